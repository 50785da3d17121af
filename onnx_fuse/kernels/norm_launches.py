"""Launches of the passes in norm/: statistics, rewritten rows, folded weights, sums."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.kernels.kernel import launch, roofline
from onnx_fuse.ops.activations import activation_macros
from onnx_fuse.program.launch import Launch, Ptr, Table, args
from onnx_fuse.program.problem import ITEMSIZE, Hardware
from onnx_fuse.program.size import coarse, minimum


def row_stats(
    m: int, k: int, dtype: str, *, ldx: int = 0, epsilon: float = 1e-5, stats: bool = True,
    norm: bool = False, given: bool = False, rms: bool = False, planes: int = 0,
    out_dtype: str = "bfloat16", align: int = 16,
) -> Launch:  # fmt: skip
    """Pointers x, mean, rstd, gamma, beta, out; x is [m, k], out is [planes, m, k].

    `given`: `norm` by the mean and rstd that are there.
    """
    size, ldx = ITEMSIZE[dtype], ldx or k
    vec = 16 // size if (ldx * size) % 16 == 0 and align % 16 == 0 else 1
    if planes and k % vec:
        vec = 1
    vectors = ceil(k / vec)
    # 4 vectors a lane: measured against a warp a row with 16, which is slower (fewer warps fit)
    tpr = next((t for t in (32, 64, 128, 256, 512) if vectors <= 4 * t), 512)
    held = min(8, ceil(vectors / tpr))
    rows = 4 if tpr == 32 else 1
    # 1024 threads on each of 132 SMs, each walks over rows; bits do not depend on it
    blocks = minimum(ceil(m / rows), 132 * 1024 // (tpr * rows))
    return launch(
        "norm/row_stats.cu", "row_stats", blocks, tpr * rows,
        *args("x, i32 m k, i64 ldx, f32 epsilon, mean rstd gamma beta out",
              m=m, k=k, ldx=ldx, epsilon=epsilon),
        T=C_TYPES[dtype], TO=C_TYPES[out_dtype], TP=C_TYPES[dtype], STATS=stats,
        NORM=2 if given else norm, PLANES=planes, TPR=tpr, ROWS=rows, HELD=held, VEC=vec,
        RMS=rms or None,
    )  # fmt: skip


def fold_seconds(k: int, n: int, dtype: str, hw: Hardware) -> float:
    """Predicted seconds of `fold`: w is read and wq written."""
    return roofline(hw, hw.costs("norm/fold.cu"), 2 * ITEMSIZE[dtype] * k * n)


def fold(k: int, n: int, dtype: str, trans_b: bool, hw: Hardware, *, align: int = 16) -> Launch:
    """Pointers w, gamma, beta, c -> wq (w's layout), cs, cv."""
    if not trans_b:
        return fold_columns([(k, n)], dtype, hw, align=align)
    return launch(
        "norm/fold.cu", "fold_rows", ceil(n / 4), 128,
        *args("w gamma beta c, i32 k n, wq cs cv", k=k, n=n),
        T=C_TYPES[dtype], VEC=8 if k % 8 == 0 and align % 16 == 0 else 1, waits="later",
    )  # fmt: skip


def fold_kind(k: int, n: int, hw: Hardware, align: int = 16) -> tuple[int, int, int]:
    """Elements of an access, columns and warps of a block: folds with the same are one launch."""
    vec = 8 if n % 8 == 0 and align % 16 == 0 else 1
    if hw.cc < 90:  # without clusters narrower columns, taller blocks
        return vec, 32, 16
    return vec, min(64 if k <= 1024 else 128, 32 * vec), 4 if k <= 1024 else 8


def fold_columns(
    shapes: Sequence[tuple[int, int]],
    dtype: str,
    hw: Hardware,
    *,
    align: int = 16,
    master: bool = False,
) -> Launch:
    """`fold`s of weights [k, n] of one kind and one dtype, as one launch.

    Pointers of several are "name.i". `master`: w is float32, its rounded copy is written to "low",
    and one alone has "name.0", too.
    """
    vec, cols, warps = fold_kind(*shapes[0], hw, align)
    words: list[Ptr | int] = []
    strips, fewest, held = 0, 8 if hw.cc >= 90 else 1, 0
    for i, (k, n) in enumerate(shapes):
        suffix = f".{i}" if master or len(shapes) > 1 else ""
        names = ("w", "gamma", "beta", "c", "low", "wq", "cs", "cv")
        words += [*[Ptr(f"{name}{suffix}") for name in names], k, n, strips]
        strips += ceil(n / cols)
        parts = next(p for p in (8, 4, 2, 1) if p == 1 or (hw.cc >= 90 and k >= 16 * p))
        rows = ceil(ceil(k / parts) / (32 * warps * vec // cols))  # a thread's
        # a few rows a thread: they all come at once
        fewest, held = min(fewest, parts), max(held, rows if rows <= 6 else 4)
    room = 1 << (len(shapes) - 1).bit_length()  # few distinct sources for many counts
    words += [0] * (len(words) // len(shapes) * (room - len(shapes)))
    if master:
        held = 4
    wide = "float" if master else C_TYPES[dtype]
    return launch(
        "norm/fold.cu", "fold_columns", fewest * strips, 32 * warps, Table(tuple(words)),
        *args("i32 count", count=len(shapes)), cluster=fewest, T=C_TYPES[dtype], COLS=cols,
        WARPS=warps, PARTS=fewest, ROWS=room, W=wide, HELD=held, waits="later",
        VEC=min(4, vec),  # accesses of 16 bytes of a master, and in 16 bits the same order of sums
    )  # fmt: skip


def fold_planes(
    k: int, n: int, planes: int, *, align: int = 16, turned: bool = False
) -> tuple[Launch, int]:
    """Pointers w, gamma, beta, c -> wq, part [parts, 2, n]; and how many parts.

    wq is `planes` bf16 planes, or with 0 of them float32, `turned` [n, k].
    """
    rows = 64 if planes else 32  # whose loads fit into the registers
    call = launch(
        "norm/fold_planes.cu", "fold_planes", (ceil(n / 128), ceil(k / rows), 1), 256,
        *args("w gamma beta c, i32 k n, wq part", k=k, n=n),
        PLANES=planes, ROWS=rows, RAGGED=bool(n % 4 or align % 16) or None, TURNED=turned or None,
    )  # fmt: skip
    return call, ceil(k / rows)


def row_dots(
    m: int, n: int, k: int, dtype: str, *, act: str = "", act_alpha: float = 1.0, planes: int = 0,
    align: int = 16,
) -> tuple[Launch, int]:  # fmt: skip
    """Pointers dy, z, cs, cv -> c1, c2, part (dz with `act`, planes); how many parts of dbias."""
    held = (2, 1) if dtype == "float32" else (4, 2, 1)
    rpw = next(r for r in held if ceil(coarse(m) / (16 * r)) >= 100 or r == 1)
    parts = ceil(m / (16 * rpw))
    call = launch(
        "norm/row_dots.cu", "row_dots", parts, 512,
        *args("dy z cs cv, i32 m n, f32 mean act_alpha, dz c1 c2 part",
              m=m, n=n, mean=1.0 / k, act_alpha=act_alpha),
        T=C_TYPES[dtype], RPW=rpw, **activation_macros(act),
        PLANES=planes or None, RAGGED=bool(n % 8 or align % 16) or None,
    )  # fmt: skip
    return call, parts


def act_parts(m: int, n: int) -> int:
    """Parts of the column sums of `act_grad`."""
    # 400 blocks fill a GPU; 32 rows are one batch of a block's loads
    return max(1, min(ceil(m / 32), 400 // ceil(n / 256)))


def act_grad(m: int, n: int, dtype: str, act: str, act_alpha: float) -> Launch:
    """Pointers dy, z -> dz, part [`act_parts`, n] (or, with one part, dbias)."""
    return launch(
        "pointwise/act_grad.cu", "act_grad_rows", (ceil(n / 256), act_parts(m, n), 1), 256,
        *args("dy z, i32 m n, f32 act_alpha, dz part dbias", m=m, n=n, act_alpha=act_alpha),
        T=C_TYPES[dtype], **activation_macros(act),
    )  # fmt: skip


def sum_parts(parts: int, n: int, vectors: int, out_dtype: str) -> Launch:
    """Pointers part [parts, vectors, n] -> wide [n] float32, out0, out1 [n]: where bound."""
    return launch(
        "norm/sum_parts.cu", "sum_parts", (ceil(n / 32), vectors, 1), 256,
        *args("part, i32 parts n, wide out0 out1", parts=parts, n=n), TO=C_TYPES[out_dtype],
    )  # fmt: skip

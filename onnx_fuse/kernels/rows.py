"""Launches of norm/row_stats.cu and norm/fold.cu: statistics, rewritten rows, folded weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from onnx_fuse.kernels.gemm_portable import C_TYPES, as_defines
from onnx_fuse.problem import ITEMSIZE, Arg, Hardware, Launch, Num, Ptr, TensorMap


def rename(launch: Launch, names: Mapping[str, Ptr]) -> Launch:
    """`launch` with the pointers called `names` replaced: how launches are composed."""

    def change(ptr: Ptr) -> Ptr:
        new = names.get(ptr.name)
        return ptr if new is None else Ptr(new.name, new.offset + ptr.offset)

    def changed(arg: Arg) -> Arg:
        if isinstance(arg, Ptr):
            return change(arg)
        return replace(arg, ptr=change(arg.ptr)) if isinstance(arg, TensorMap) else arg

    return replace(launch, args=tuple(changed(arg) for arg in launch.args))


def row_stats(
    m: int,
    k: int,
    dtype: str,
    *,
    ldx: int = 0,
    epsilon: float = 1e-5,
    stats: bool = True,
    norm: bool = False,
    rms: bool = False,
    planes: int = 0,
    out_dtype: str = "bfloat16",
    param_dtype: str = "",
    align: int = 16,
) -> Launch:
    """Pointers x, mean, rstd, gamma, beta, out; x is [m, k], out is [planes, m, k]."""
    size, ldx = ITEMSIZE[dtype], ldx or k
    vec = 16 // size if (ldx * size) % 16 == 0 and align % 16 == 0 else 1
    if planes and k % vec:
        vec = 1
    vectors = ceil(k / vec)
    # 4 vectors a lane: measured against a warp a row with 16, which is slower (fewer warps fit)
    tpr = next((t for t in (32, 64, 128, 256, 512) if vectors <= 4 * t), 512)
    held = min(8, ceil(vectors / tpr))
    rows = 4 if tpr == 32 else 1
    return Launch(
        "norm/row_stats.cu",
        "row_stats",
        # 1024 threads on each of 132 SMs, each walks over rows; bits do not depend on it
        (min(ceil(m / rows), 132 * 1024 // (tpr * rows)), 1, 1),
        (tpr * rows, 1, 1),
        (
            Ptr("x"), Num("i32", m), Num("i32", k), Num("i64", ldx), Num("f32", epsilon),
            Ptr("mean"), Ptr("rstd"), Ptr("gamma"), Ptr("beta"), Ptr("out"),
        ),
        as_defines({
            "T": C_TYPES[dtype], "TO": C_TYPES[out_dtype], "TP": C_TYPES[param_dtype or dtype],
            "STATS": stats, "NORM": norm, "PLANES": planes, "TPR": tpr, "ROWS": rows,
            "HELD": held, "VEC": vec,
        } | ({"RMS": 1} if rms else {})),
    )  # fmt: skip


def fold_parts(k: int, trans_b: bool) -> int:
    """How many partial sums a column has: the workspace of `fold` is 8 n of them."""
    return 0 if trans_b else ceil(k / 64)


def fold_seconds(k: int, n: int, dtype: str, trans_b: bool, hw: Hardware) -> float:
    """What `fold` takes: w read, wq written."""
    moved = 2 * ITEMSIZE[dtype] * k * n
    return moved / (0.85 * hw.bandwidth) + hw.launch_seconds * (1 if trans_b else 2)


def fold(
    k: int,
    n: int,
    dtype: str,
    trans_b: bool,
    *,
    align: int = 16,
) -> tuple[Launch, ...]:
    """Pointers w, gamma, beta, c -> wq (w's layout), cs, cv; "workspace" unless trans_b."""
    line = k if trans_b else n
    vec = 8 if line % 8 == 0 and align % 16 == 0 else 1
    defines = as_defines({"T": C_TYPES[dtype], "VEC": vec})
    source, shape = "norm/fold.cu", (Num("i32", k), Num("i32", n))
    weights = (Ptr("w"), Ptr("gamma"), Ptr("beta"))
    if trans_b:
        args = (*weights, Ptr("c"), *shape, Ptr("wq"), Ptr("cs"), Ptr("cv"))
        return (Launch(source, "fold_rows", (n, 1, 1), (128, 1, 1), args, defines),)
    parts = fold_parts(k, trans_b)
    columns = (*weights, *shape, Ptr("wq"), Ptr("workspace"))
    finish = (
        Ptr("workspace"), Ptr("c"), Num("i32", parts), Num("i32", n), Ptr("cs"), Ptr("cv"),
    )  # fmt: skip
    return (
        Launch(source, "fold_columns", (ceil(n / 256), parts, 1), (256, 1, 1), columns, defines),
        Launch(source, "fold_finish", (ceil(n / 32), 1, 1), (256, 1, 1), finish, defines),
    )


def row_dots(
    m: int, n: int, k: int, dtype: str, *, act: str = "", act_alpha: float = 1.0
) -> tuple[Launch, int]:
    """Pointers dy, z, cs, cv -> c1, c2, part (and dz with `act`); and how many parts of dbias."""
    rpw = next(r for r in (4, 2, 1) if ceil(m / (16 * r)) >= 100 or r == 1)
    parts = ceil(m / (16 * rpw))
    call = Launch(
        "norm/row_dots.cu",
        "row_dots",
        (parts, 1, 1),
        (512, 1, 1),
        (
            Ptr("dy"), Ptr("z"), Ptr("cs"), Ptr("cv"), Num("i32", m), Num("i32", n),
            Num("f32", 1.0 / k), Num("f32", act_alpha), Ptr("dz"), Ptr("c1"), Ptr("c2"),
            Ptr("part"),
        ),
        as_defines({"T": C_TYPES[dtype], "ACT": act.upper() or "NONE", "RPW": rpw}),
    )  # fmt: skip
    return call, parts


def act_grad(m: int, n: int, dtype: str, act: str, act_alpha: float) -> tuple[Launch, int]:
    """Pointers dy, z -> dz, part [parts, n] (or, with one part, dbias); and how many parts."""
    columns = ceil(n / 256)
    # 400 blocks fill a GPU; 32 rows are one batch of a block's loads
    parts = max(1, min(ceil(m / 32), 400 // columns))
    call = Launch(
        "pointwise/act_grad.cu",
        "act_grad_rows",
        (columns, parts, 1),
        (256, 1, 1),
        (
            Ptr("dy"), Ptr("z"), Num("i32", m), Num("i32", n), Num("f32", act_alpha), Ptr("dz"),
            Ptr("part"), Ptr("dbias"),
        ),
        as_defines({"T": C_TYPES[dtype], "ACT": act.upper()}),
    )  # fmt: skip
    return call, parts


def sum_parts(parts: int, n: int, vectors: int, out_dtype: str) -> Launch:
    """Pointers part [parts, vectors, n] -> wide [n] float32, out0, out1 [n]: where bound."""
    return Launch(
        "norm/sum_parts.cu",
        "sum_parts",
        (ceil(n / 32), vectors, 1),
        (256, 1, 1),
        (Ptr("part"), Num("i32", parts), Num("i32", n), Ptr("wide"), Ptr("out0"), Ptr("out1")),
        as_defines({"TO": C_TYPES[out_dtype]}),
    )

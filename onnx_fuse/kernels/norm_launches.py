"""Launches of the passes in norm/: statistics, rewritten rows, folded weights, sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from onnx_fuse.cuda.macros import C_TYPES, as_defines
from onnx_fuse.ops.activations import activation_macros
from onnx_fuse.program.problem import ITEMSIZE, Arg, Hardware, Launch, Num, Ptr, Table, TensorMap
from onnx_fuse.program.size import coarse, minimum


def rename(launch: Launch, names: Mapping[str, Ptr]) -> Launch:
    """`launch` with the pointers called `names` replaced: how launches are composed."""

    def change(ptr: Ptr) -> Ptr:
        new = names.get(ptr.name)
        return ptr if new is None else Ptr(new.name, new.offset + ptr.offset)

    def changed(arg: Arg) -> Arg:
        if isinstance(arg, Ptr):
            return change(arg)
        if isinstance(arg, Table):
            return Table(tuple(change(x) if isinstance(x, Ptr) else x for x in arg.words))
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
    given: bool = False,
    rms: bool = False,
    planes: int = 0,
    out_dtype: str = "bfloat16",
    align: int = 16,
) -> Launch:
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
    return Launch(
        "norm/row_stats.cu",
        "row_stats",
        # 1024 threads on each of 132 SMs, each walks over rows; bits do not depend on it
        (minimum(ceil(m / rows), 132 * 1024 // (tpr * rows)), 1, 1),
        (tpr * rows, 1, 1),
        (
            Ptr("x"), Num("i32", m), Num("i32", k), Num("i64", ldx), Num("f32", epsilon),
            Ptr("mean"), Ptr("rstd"), Ptr("gamma"), Ptr("beta"), Ptr("out"),
        ),
        as_defines({
            "T": C_TYPES[dtype], "TO": C_TYPES[out_dtype], "TP": C_TYPES[dtype],
            "STATS": stats, "NORM": 2 if given else norm, "PLANES": planes,
            "TPR": tpr, "ROWS": rows, "HELD": held, "VEC": vec,
        } | ({"RMS": 1} if rms else {})),
    )  # fmt: skip


def fold_seconds(k: int, n: int, dtype: str, hw: Hardware) -> float:
    """Predicted seconds of `fold`: w is read and wq written."""
    return 2 * ITEMSIZE[dtype] * k * n / (0.85 * hw.bandwidth) + hw.launch_seconds


def fold(k: int, n: int, dtype: str, trans_b: bool, hw: Hardware, *, align: int = 16) -> Launch:
    """Pointers w, gamma, beta, c -> wq (w's layout), cs, cv."""
    vec = 8 if (k if trans_b else n) % 8 == 0 and align % 16 == 0 else 1
    reads = (Ptr("w"), Ptr("gamma"), Ptr("beta"), Ptr("c"))
    writes = (Ptr("wq"), Ptr("cs"), Ptr("cv"))
    source, types = "norm/fold.cu", {"T": C_TYPES[dtype], "VEC": vec}
    if trans_b:
        args = (*reads, Num("i32", k), Num("i32", n), *writes)
        return Launch(
            source, "fold_rows", (ceil(n / 4), 1, 1), (128, 1, 1), args, as_defines(types)
        )
    # a few rows a thread: they all come at once; without clusters narrower columns, taller blocks
    cols, warps, most = (64, 4, 8) if k <= 1024 else (128, 8, 8)
    if hw.cc < 90:
        cols, warps, most = 32, 16, 1
    cols = min(cols, 32 * vec)
    parts = next(p for p in (8, 4, 2, 1) if p == 1 or (p <= most and k >= 16 * p))
    rows = ceil(ceil(k / parts) / (32 * warps * vec // cols))  # a thread's
    held = rows if rows <= 6 else 4
    shape = {"COLS": cols, "WARPS": warps, "PARTS": parts, "HELD": held, "ROWS": 1}
    table = Table((*reads, Ptr("low"), *writes, k, n, 0))
    return Launch(
        source, "fold_columns", (parts * ceil(n / cols), 1, 1), (32 * warps, 1, 1),
        (table, Num("i32", 1)), as_defines(types, shape, {"W": types["T"]}), cluster=parts,
    )  # fmt: skip


def fold_kind(k: int, n: int, dtype: str, hw: Hardware) -> tuple[object, ...]:
    """What `fold`s that are one launch have in common."""
    defines = fold(k, n, dtype, False, hw).defines
    return tuple(pair for pair in defines if pair[0] not in ("PARTS", "HELD"))


def fold_many(folds: Sequence[Launch], master: bool) -> Launch:
    """`fold`s of one kind as one launch, whose pointers are "name.i".

    `master`: w is float32, and its rounded copy is written to "low".
    """
    words: list[Ptr | int] = []
    strips = 0
    for i, each in enumerate(folds):
        (row,) = (arg.words for arg in each.args if isinstance(arg, Table))
        words += [Ptr(f"{x.name}.{i}", x.offset) if isinstance(x, Ptr) else x for x in row[:-1]]
        words.append(strips)
        strips += each.grid[0] // each.cluster
    rows = 1 << (len(folds) - 1).bit_length()  # few distinct sources for many counts
    words += [0] * (len(words) // len(folds) * (rows - len(folds)))
    how: dict[str, object] = dict(folds[0].defines)
    held = max(int(dict(each.defines)["HELD"]) for each in folds)
    parts = min(each.cluster for each in folds)
    how |= {"ROWS": rows, "HELD": held, "PARTS": parts}
    if master:  # 16 bytes an access
        how |= {"W": "float", "VEC": min(4, int(str(how["VEC"]))), "HELD": 4}
    return replace(
        folds[0],
        grid=(strips * parts, 1, 1),
        args=(Table(tuple(words)), Num("i32", len(folds))),
        defines=as_defines(how),
        cluster=parts,
    )


def fold_planes(
    k: int, n: int, planes: int, *, align: int = 16, turned: bool = False
) -> tuple[Launch, int]:
    """Pointers w, gamma, beta, c -> wq, part [parts, 2, n]; and how many parts.

    wq is `planes` bf16 planes, or with 0 of them float32, `turned` [n, k].
    """
    rows = 64 if planes else 32  # whose loads fit into the registers
    ragged = {} if n % 4 == 0 and align % 16 == 0 else {"RAGGED": 1}
    call = Launch(
        "norm/fold_planes.cu",
        "fold_planes",
        (ceil(n / 128), ceil(k / rows), 1),
        (256, 1, 1),
        (
            Ptr("w"), Ptr("gamma"), Ptr("beta"), Ptr("c"), Num("i32", k), Num("i32", n),
            Ptr("wq"), Ptr("part"),
        ),
        as_defines({"PLANES": planes, "ROWS": rows} | ragged | ({"TURNED": 1} if turned else {})),
    )  # fmt: skip
    return call, ceil(k / rows)


def row_dots(
    m: int,
    n: int,
    k: int,
    dtype: str,
    *,
    act: str = "",
    act_alpha: float = 1.0,
    planes: int = 0,
    align: int = 16,
) -> tuple[Launch, int]:
    """Pointers dy, z, cs, cv -> c1, c2, part (dz with `act`, planes); how many parts of dbias."""
    held = (2, 1) if dtype == "float32" else (4, 2, 1)
    ragged = {} if n % 8 == 0 and align % 16 == 0 else {"RAGGED": 1}
    rpw = next(r for r in held if ceil(coarse(m) / (16 * r)) >= 100 or r == 1)
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
        as_defines(
            {"T": C_TYPES[dtype], "RPW": rpw},
            activation_macros(act),
            {"PLANES": planes} if planes else {},
            ragged,
        ),
    )  # fmt: skip
    return call, parts


def act_parts(m: int, n: int) -> int:
    """Parts of the column sums of `act_grad`."""
    # 400 blocks fill a GPU; 32 rows are one batch of a block's loads
    return max(1, min(ceil(m / 32), 400 // ceil(n / 256)))


def act_grad(m: int, n: int, dtype: str, act: str, act_alpha: float) -> Launch:
    """Pointers dy, z -> dz, part [`act_parts`, n] (or, with one part, dbias)."""
    return Launch(
        "pointwise/act_grad.cu",
        "act_grad_rows",
        (ceil(n / 256), act_parts(m, n), 1),
        (256, 1, 1),
        (
            Ptr("dy"), Ptr("z"), Num("i32", m), Num("i32", n), Num("f32", act_alpha), Ptr("dz"),
            Ptr("part"), Ptr("dbias"),
        ),
        as_defines({"T": C_TYPES[dtype]}, activation_macros(act)),
    )  # fmt: skip


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

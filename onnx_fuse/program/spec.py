"""What every program must satisfy, whatever pass made it: one table, and what holds for all calls.

`violations` looks at a whole program and `of_calls` at calls under the passes; both answer in plain
sentences. Open sizes are taken at the values that they have here, so that looking adds no guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import numpy as np

from onnx_fuse.program import contractions, data_movement, losses, norms, problems
from onnx_fuse.program.call import Buffer, Call, Program, Tensor
from onnx_fuse.program.problem import (
    ITEMSIZE,
    AnyProblem,
    Collective,
    Contraction,
    GemmProblem,
    Hardware,
    Launch,
    Num,
    TensorMap,
    batch_strides,
    ld,
    ldc,
    operand,
)
from onnx_fuse.program.size import OpenSize, hint

GRID = (2**31 - 1, 65_535, 65_535)
"""The most blocks of a launch along x, y and z, on every chip that runs these kernels."""
THREADS = 1024
"""The most threads of a block."""
_RANGES = {"i32": (-(2**31), 2**31 - 1), "u32": (0, 2**32 - 1), "i64": (-(2**63), 2**63 - 1)}
_FLAT = 1 << 16
"""Elements up to which two views are compared place by place; larger ones by their ends."""

Needs: TypeAlias = Mapping[str, tuple[str, int]]
"""Operand -> (dtype, elements from its first to the last that the kernel touches); "": any."""


# ---- the table: what the kernels of each problem touch ------------------------------------------


def _gemm(p: GemmProblem) -> Needs:
    """A product's operands, by `program.epilogue`; a norm's product has its own names."""
    epilogue, out = p.epilogue, p.out
    wide = p.n // 2 if epilogue.gate else p.n
    rows = {f"row{i}": ("", p.m) for i in range(4)}
    common = {
        "z": ("", p.batches * p.m * p.n),
        "scale_a": ("float32", 1),
        "scale_b": ("float32", 1),
    }
    if p.op != "Gemm":
        return {**_norm_product(p), **common}
    lda, ldb = ld(p)
    high, long = (p.k, p.m) if p.trans_a else (p.m, p.k)
    tall, broad = (p.n, p.k) if p.trans_b else (p.k, p.n)
    ldy = p.ldy or wide
    reach = {
        "a": (p.dtype, _lines(p, "a", high, long, lda)),
        "b": (p.b_dtype or p.dtype, _lines(p, "b", tall, broad, ldb)),
        "y": (out, (p.batches * p.m - 1) * ldy + (p.ldy if epilogue.exp else wide)),
        "col1": ("", 0 if epilogue.dw else p.n),
        "col0": ("", p.n if epilogue.layernorm or epilogue.layer_scale else 0),
    }
    if p.planes:
        reach |= dict.fromkeys("ab", ("", 0))
    if operand(p):
        down, right = ldc(p)
        steps = [abs(s) * (n - 1) for s, n in zip(_batch(p, "c", p.m * p.n), _axes(p), strict=True)]
        reach["c"] = ("", sum(steps) + (p.m - 1) * abs(down) + (p.n - 1) * abs(right) + 1)
    return {**reach, **common, **({} if epilogue.dw else rows)}


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of these sizes and strides."""
    return 1 + sum((n - 1) * abs(step) for n, step in zip(shape, strides, strict=True))


def _axes(p: Contraction) -> tuple[int, ...]:
    return (1,) * (3 - len(p.batch)) + tuple(p.batch)


def _batch(p: GemmProblem, name: str, dense: int) -> tuple[int, ...]:
    return batch_strides(p, name, dense)


def _lines(p: GemmProblem, name: str, lines: int, length: int, step: int) -> int:
    """The reach of `lines` lines of `length` elements, `step` apart, in every matrix of a batch."""
    steps = zip(_batch(p, name, lines * length), _axes(p), strict=True)
    return sum(abs(s) * (n - 1) for s, n in steps) + (lines - 1) * step + length


def _norm_product(p: GemmProblem) -> Needs:
    n = p.n // 2 if p.epilogue.gate else p.n
    norm = p.m if p.turned else p.n
    leaf = {"dw": p.m * p.n, "w": p.m * p.n, "gamma": norm, "beta": norm}
    sizes = leaf if p.op == "LayerNormLeafGrad" else {
        "x": p.m * p.k, "gamma": p.k, "beta": p.k, "w": p.k * p.n, "wq": p.k * p.n, "cs": p.n,
        "cv": p.n, "c": p.n, "y": p.m * n, "mean": p.m, "rstd": p.m, "dy": p.m * p.n,
        "dx": p.m * p.k, "add": p.m * p.k, "dgamma": p.k, "dbeta": p.k, "dw": p.k * p.n,
        "dc": p.n, "r": p.m * p.n,
    }  # fmt: skip
    same = {"LayerNormGemm": ("x", "w", "wq"), "LayerNormGemmGrad": ("dy", "x", "dx")}.get(p.op, ())
    types = dict.fromkeys(same, p.dtype) | ({"y": p.out} if p.op == "LayerNormGemm" else {})
    return {name: (types.get(name, ""), size) for name, size in sizes.items()}


def _packed(p: contractions.PackedProduct) -> Needs:
    rows = -(-p.n // 16) * 16 if p.tiled else p.n
    scales = p.blocks * (2 if p.tiled and p.zero else 1)
    columns = p.n // 2 if p.epilogue.gate else p.n
    return {
        "a": (p.dtype, p.m * p.k), "q": ("uint8", rows * p.row_bytes), "y": (p.out, p.m * columns),
        "scale": (p.dtype, rows * scales), "bias": (p.dtype, p.n), "c": (p.dtype, p.m * p.n),
        "gamma": (p.dtype, p.k), "beta": (p.dtype, p.k),
        "groups": ("int32", p.k if p.groups else 0),
    }  # fmt: skip


def _integers(p: contractions.IntegerProduct) -> Needs:
    return {"a": (p.dtype, (p.m - 1) * p.lda + p.k), "b": (p.b_dtype, (p.n - 1) * p.ldb + p.k),
            "y": ("int32", p.batches * p.m * p.n)}  # fmt: skip


def _attention(p: contractions.Attention) -> Needs:
    names = ("q", "k", "v", "y", *(("dy", "dq", "dk", "dv") if p.op == "SdpaGrad" else ()))
    needs = {}
    for name in names:
        shape, strides = p.layout(name if name != "dy" else "y")
        strides = p.layout(name)[1] if name == "dy" and getattr(p, "dy_strides", ()) else strides
        needs[name] = (p.dtype, _reach(shape[:3], strides) + shape[3] - 1)
    for name, strides in (("mask", p.mask), ("mask2", p.mask2)):
        needs[name] = ("", _reach((*p.batch, p.m, p.n), strides) if strides else 0)
    return needs | {"lse": ("", 2 * p.batches * p.m), "lengths": ("int32", p.batch[0])}


def _append(p: data_movement.CacheAppend) -> Needs:
    lead = {"q": p.heads, "k": p.kv_heads, "v": p.kv_heads}
    strides = {"q": p.q_strides, "k": p.k_strides, "v": p.v_strides}
    cache = p.batch * p.kv_heads * p.size
    counts = {"first": 1, "each": p.batch * p.rows, "all": p.rows}
    needs = {
        name: (p.dtype, _reach((p.batch, heads, p.rows), strides[name]) + p.size - 1)
        for name, heads in lead.items()
    }
    return needs | {
        "lengths": ("int32", 0 if p.uniform or p.placed else p.batch),
        "turned": (p.dtype, p.batch * p.heads * p.rows * p.size),
        **dict.fromkeys(("cos", "sin"), (p.dtype, p.context * p.half * (1 + p.columns))),
        **dict.fromkeys(("past_key", "past_value"), (p.dtype, cache * p.past)),
        **dict.fromkeys(("present_key", "present_value"), (p.dtype, cache * p.length)),
        "positions": ("int64", counts.get(p.placed or p.positions, 0)),
    }  # fmt: skip


def _conv(p: problems.Conv) -> Needs:
    x, y = (
        p.batch * p.groups * c * prod(at) for c, at in ((p.channels, p.inner), (p.filters, p.outer))
    )
    weights = p.groups * p.filters * p.depth
    return {
        "x": (p.dtype, 0 if p.x_strides else x), "weight": (p.dtype, 0 if p.planar else weights),
        "bias": ("", p.groups * p.filters), "slope": ("", p.groups * p.filters),
        "y": (p.tail.dtype if p.tail else p.dtype, 0 if p.y_strides else y),
        **{f"e{i}": ("", 0 if p.y_strides else y) for i in range(1, 4)},
    }  # fmt: skip


def _integer_conv(p: problems.IntegerConv) -> Needs:
    filters, pixels = p.groups * p.filters, p.batch * prod(p.outer)
    x = 0 if p.x_strides else p.batch * p.groups * p.channels * prod(p.inner)
    reads, rows = (p.tail.reads, p.tail.rows) if p.tail else ((), ())
    return {
        "x": (p.dtype, x), "weight": ("int8", filters * p.depth), "shift": ("int32", filters),
        **dict.fromkeys(("scale", "bias"), ("float32", filters)),
        **{
            f"e{i + 1}": (kind, filters * (1 if i in rows else pixels))
            for i, kind in enumerate(reads)
        },
        "y": (p.tail.dtype if p.tail else "float32", pixels * filters),
    }  # fmt: skip


def _conv_weights(p: problems.ConvWeightGrad) -> Needs:
    x = p.batch * p.groups * p.channels * prod(p.inner)
    dy = p.batch * p.groups * p.filters * prod(p.outer)
    weights = p.groups * p.filters * p.depth
    return {"x": (p.dtype, 0 if p.x_strides else x), "dy": (p.dtype, dy),
            "dw": (p.out_dtype, weights)}  # fmt: skip


def _norm(p: problems.Norm) -> Needs:
    count, affine = p.rows * p.length, p.length if p.affine == 1 else p.groups * p.channels
    return {
        "x": (p.dtype, count), "residual": (p.dtype, count), "sum": (p.dtype, count),
        "y": (p.tail.dtype if p.tail else "", count), "scale": (p.param, affine),
        "bias": (p.param, affine), "mean": (p.stat, p.rows), "rstd": (p.stat, p.rows),
        "w": ("", p.length * p.columns), "z": ("", p.rows * p.columns), "c": ("", p.columns),
        **{f"e{i}": ("", count) for i in range(1, 4)},
    }  # fmt: skip


def _norm_grad(p: problems.NormGrad) -> Needs:
    count, sums = p.rows * p.length, (1 if p.rms else 2) * p.parts * p.length
    return {
        "dy": (p.dtype, p.rows * p.k if p.k else count), "x": (p.dtype, count),
        "dx": (p.tail.dtype if p.tail else p.dtype, count), "ds": (p.dtype, count),
        "scale": (p.param, p.length), "mean": (p.stat, p.rows), "rstd": (p.stat, p.rows),
        "part": ("", sums), "b": ("", p.k * p.length),
    }  # fmt: skip


def _channel_norm(p: problems.ChannelNorm) -> Needs:
    return {"x": (p.dtype, p.size), "y": (p.tail.dtype if p.tail else p.dtype, p.size),
            "scale": (p.param, p.channels), "bias": (p.param, p.channels)}  # fmt: skip


def _channel_grad(p: problems.ChannelGrad) -> Needs:
    count = p.batch * p.channels * p.inner
    return {
        **dict.fromkeys(("x", "dy", "dx"), (p.dtype, count)), "part": ("", 0),
        **dict.fromkeys(("scale", "bias", "dscale", "dbias"), (p.param, p.channels)),
    }  # fmt: skip


def _group_grad(p: norms.GroupGrad) -> Needs:
    count = p.images * p.channels * p.pixels
    return {
        **dict.fromkeys(("x", "dy", "dx"), (p.dtype, count)),
        "part": ("", 2 * p.images * p.channels * p.splits),
        **dict.fromkeys(("scale", "bias", "dscale", "dbias"), (p.param, p.channels)),
    }  # fmt: skip


def _reduce(p: problems.Reduce) -> Needs:
    read, written = p.outer * p.length * p.inner, p.outer * p.splits * p.inner
    return {
        "x": ("uint8", read * p.state) if p.from_state else (p.dtype, read),
        "x2": (p.dtype, read if p.paired else 0),
        "y": ("uint8", written * p.state) if p.to_state else (p.out_dtype, written),
        "y2": (p.out_dtype, written if p.second else 0),
    }


def _pointwise(p: data_movement.Pointwise) -> Needs:
    reads, writes = enumerate(p.reads), enumerate(p.writes)
    return {f"a{i}": (t.dtype, 0) for i, t in reads} | {f"y{i}": (t.dtype, 0) for i, t in writes}


def _same(*names: str) -> Callable[[Any], Needs]:
    """Operands of the problem's type, of `size` elements or outer x length x inner."""

    def needs(p: Any) -> Needs:
        size = p.size if hasattr(p, "size") else p.outer * p.length * p.inner
        return dict.fromkeys(names, (p.dtype, size))

    return needs


def _many(p: data_movement.PointwiseMany) -> Needs:
    columns = [(*reads, *writes) for reads, writes in p.items]
    return {
        f"{k}.{row}": (t.dtype, 0) for row, all in enumerate(columns) for k, t in enumerate(all)
    }


def _batched(p: data_movement.BatchedCalls) -> Needs:
    inner = needs(p.problem)
    return {f"{n}.{i}": need for n, need in inner.items() for i in range(p.count)}


TABLE: dict[type[AnyProblem], Callable[[Any], Needs]] = {
    GemmProblem: _gemm,
    contractions.PackedProduct: _packed,
    contractions.IntegerProduct: _integers,
    contractions.Attention: _attention,
    contractions.AttentionGrad: _attention,
    problems.Conv: _conv,
    problems.ConvWeightGrad: _conv_weights,
    problems.IntegerConv: _integer_conv,
    problems.Norm: _norm,
    problems.NormGrad: _norm_grad,
    problems.NormGradSums: lambda p: dict.fromkeys(
        ("dscale", "dbias"), (p.grad.param, p.grad.length)
    ) | {"part": ("", p.outputs * p.grad.parts * p.grad.length)},
    problems.ChannelNorm: _channel_norm,
    problems.ChannelGrad: _channel_grad,
    norms.GroupGrad: _group_grad,
    problems.RunningStats: lambda p: dict.fromkeys(
        ("mean", "variance", "old_mean", "old_variance", "new_mean", "new_variance"),
        ("", p.channels),
    ),
    problems.Softmax: _same("x", "y"),
    problems.Reduce: _reduce,
    problems.SumSquares: lambda p: {
        f"x.{i}": pair for i, pair in enumerate(zip(p.dtypes, p.sizes, strict=True))
    },
    problems.Pool: lambda p: {
        "x": (p.dtype, p.planes * prod(p.inner)), "y": (p.dtype, p.planes * prod(p.outer)),
        "indices": ("int64", p.planes * prod(p.outer)),
    },
    problems.MaxPoolGrad: lambda p: {
        **dict.fromkeys(("x", "dx"), (p.dtype, p.planes * p.channels * prod(p.inner))),
        "dy": (p.dtype, p.planes * p.channels * prod(p.outer)),
    },
    problems.ChannelWindow: _same("x", "y"),
    problems.Resample: lambda p: {
        "x": (p.dtype, p.outer * p.length * p.rows[0] * p.inner),
        "y": (p.out_dtype, p.outer * p.resized * p.rows[1] * p.inner),
        "source": ("int32", p.resized * p.taps), "above": ("int32", p.rows[1] * p.rows[2]),
    },
    problems.GridSample: lambda p: {
        "x": (p.dtype, p.batch * p.channels * prod(p.inner)),
        "grid": (p.grid, p.batch * p.points * p.rank),
        "y": (p.dtype, p.batch * p.channels * p.points),
    },
    problems.Col2Im: lambda p: {
        "x": (p.dtype, p.size // max(1, prod(p.image)) * prod(p.window.kernel) * prod(p.blocks)),
        "y": (p.dtype, p.size),
    },
    problems.SlopeProduct: lambda p: {
        **dict.fromkeys(("dy", "z", "dz"), (p.dtype, p.m * p.n)),
        "part": ("", p.parts * p.n), "dbias": ("", p.n),
    },
    problems.PartSums: lambda p: {
        "part": ("float32", p.parts * p.n), "out0": (p.out_dtype, p.n)
    },
    problems.MergedMoments: lambda p: {
        "part": ("float32", 2 * p.parts * p.n),
        **dict.fromkeys(("mean", "variance"), ("float32", p.n)),
    },
    problems.Float8: lambda p: {
        "x": (p.dtype, p.m * p.k), **dict.fromkeys(("q", "qt"), (p.kind, p.m * p.k)),
        "part": ("", p.parts * p.k),
    },
    problems.Registered: lambda p: {
        name: (dtype, prod(shape)) for name, dtype, shape in (*p.inputs, *p.outputs)
    },
    data_movement.CacheAppend: _append,
    data_movement.Pointwise: _pointwise,
    data_movement.PointwiseSums: lambda p: {**_pointwise(p.pointwise), "sum": (p.out_dtype, 0)},
    data_movement.PointwiseMany: _many,
    data_movement.BatchedCalls: _batched,
    data_movement.GatherElements: lambda p: {
        "index": (p.index, p.size), "y": (p.dtype, p.size),
        "x": (p.dtype, p.size // max(1, p.taken) * p.length),
    },
    data_movement.GatherND: lambda p: {
        "index": (p.index, p.batch * p.rows * len(p.dims)),
        "x": (p.dtype, p.batch * prod(p.dims) * p.inner),
        "y": (p.dtype, p.batch * p.rows * p.inner),
    },
    data_movement.ScatterElements: lambda p: {
        "index": (p.index, p.lines * p.given), "update": (p.dtype, p.lines * p.given),
        "y": (p.dtype, p.lines * p.length),
    },
    data_movement.ScatterND: lambda p: {
        "index": (p.index, p.count * len(p.dims)), "update": (p.dtype, p.count * p.inner),
        "y": (p.dtype, p.rows * p.inner),
    },
    data_movement.CumulativeSum: _same("x", "y"),
    data_movement.TopK: lambda p: {
        "x": (p.dtype, p.outer * p.length * p.inner), "values": (p.dtype, p.outer * p.k * p.inner),
        "indices": ("int64", p.outer * p.k * p.inner),
    },
    data_movement.SortedRows: lambda p: {
        "x": (p.dtype, p.count * p.width), "indices": ("int64", p.count)
    },
    data_movement.Random: lambda p: {"y": (p.dtype, p.size)},
    data_movement.RoiAlign: lambda p: {
        "x": (p.dtype, p.batch * prod(p.image)), "y": (p.dtype, p.size)
    },
    data_movement.Determinant: lambda p: {
        "x": (p.dtype, p.count * p.n * p.n), "y": (p.dtype, p.count),
    },
    data_movement.Fourier: lambda p: {
        "x": (p.dtype, p.outer * p.length * p.inner * p.parts), "table": ("float64", 2 * p.points),
        "window": (p.dtype, p.points), "y": (p.dtype, p.count * p.results * (1 if p.half else 2)),
    },
    data_movement.NGrams: lambda p: {"y": ("float32", p.size)},
    data_movement.Range: lambda p: {"x": ("float32", p.size)},
}  # fmt: skip
"""Kind of problem -> its operands. What it leaves out holds more than its kernels touch."""

BY_ELEMENTS = (
    data_movement.Pointwise,
    data_movement.PointwiseSums,
    data_movement.PointwiseMany,
    data_movement.CopyMany,
    Collective,
)
"""Problems whose kernels look at each operand's offset, and need no alignment but an element's."""
UPDATES = (
    *BY_ELEMENTS,
    *(losses.CrossEntropyChunk, losses.ExpRows),
    *(data_movement.ScatterElements, data_movement.ScatterND, problems.RunningStats),
)
"""Problems whose kernels read an element before they write that very element."""


def needs(problem: AnyProblem) -> Needs:
    """What the kernels of a problem touch: its row of the table."""
    row = TABLE.get(type(problem))
    return {} if row is None else row(problem)


def alignment(problem: AnyProblem | None, name: str, written: bool) -> int:
    """The bytes that the address of an operand has to be a multiple of; 1: those of an element."""
    if isinstance(problem, data_movement.BatchedCalls):
        return alignment(problem.problem, name.rpartition(".")[0], written)
    if problem is None or isinstance(problem, BY_ELEMENTS):
        return 1
    if isinstance(problem, GemmProblem) and not written:
        return min(16, problem.align)
    return 16


def misaligned(call: Call) -> list[str]:
    """The operands whose offsets the kernels of the call's problem cannot take, as sentences."""
    if call.host:
        return []
    wrong = []
    for tensors, written in ((call.reads, False), (call.writes, True)):
        for name, t in tensors:
            least, at = alignment(call.problem, name, written), t.offset * ITEMSIZE[t.dtype]
            if at % least:
                verb = "written" if written else "read"
                wrong.append(f"{name} is {verb} at +{hint(at)} bytes, not at a multiple of {least}")
    return wrong


# ---- what holds for every call ------------------------------------------------------------------


def violations(program: Program, hw: Hardware | None = None) -> list[str]:
    """What the program breaks, a sentence each, with the call and the operand; none where it holds.

    With `hw`, its launches are held to that chip's limits as well.
    """
    calls = (*program.setup, *program.calls)
    faults = of_calls(calls, program.buffers)
    written = {b.id for b in program.buffers if b.kind != "temp"}
    for call in calls:
        faults += [
            f"{_name(call)}: {name} is read from b{t.buffer}, to which nothing was written"
            for name, t in call.reads
            if t.buffer not in written and hint(t.size)
        ]
        written |= {t.buffer for _, t in call.writes}
        faults += of_launches(call, hw)
    return faults


def of_calls(calls: Iterable[Call], buffers: Sequence[Buffer]) -> list[str]:
    """What these calls break, launches aside."""
    sizes = {b.id: hint(b.nbytes) for b in buffers}
    return [f"{_name(call)}: {text}" for call in calls for text in _of_call(call, sizes)]


def of_launches(call: Call, hw: Hardware | None = None) -> list[str]:
    """What the launches of a call break, the maps of its operands included."""
    faults = [text for launch in call.launches for text in of_launch(launch, hw)]
    bound = {"workspace", *(name for name, _ in (*call.reads, *call.writes))}
    for launch in call.launches:
        for arg in launch.args:
            if isinstance(arg, TensorMap) and arg.ptr.name in bound:
                faults += [f"{launch.entry}: the map of {arg.ptr.name} {x}" for x in _of_map(arg)]
    return [f"{_name(call)}: {text}" for text in faults]


def of_launch(launch: Launch, hw: Hardware | None = None) -> list[str]:
    """What a launch breaks of the chip's limits and of its arguments' types."""
    if launch.of_library:
        return []
    faults = []
    for axis, size, most in zip("xyz", map(hint, launch.grid), GRID, strict=True):
        if not 1 <= size <= most:
            faults.append(f"{launch.entry} has {size} blocks along {axis}, of 1 to {most}")
    if any(isinstance(n, OpenSize) for n in (*launch.block, launch.cluster)):
        faults.append(f"{launch.entry} has a block of an open size")
    threads = prod(map(hint, launch.block))
    if not 1 <= threads <= THREADS or hint(launch.block[2]) > 64:
        faults.append(f"{launch.entry} has {threads} threads a block, of 1 to {THREADS}")
    if hint(launch.grid[0]) % launch.cluster:
        faults.append(f"{launch.entry} has {hint(launch.grid[0])} blocks in {launch.cluster}s")
    if hw is not None and hint(launch.smem) > hw.smem_per_block:
        faults.append(
            f"{launch.entry} takes {hint(launch.smem)} bytes of shared memory a block; "
            f"{hw.name} has {hw.smem_per_block}"
        )
    for i, arg in enumerate(launch.args):
        if isinstance(arg, Num) and arg.ctype in _RANGES:
            low, high = _RANGES[arg.ctype]
            if not low <= hint(int_of(arg.value)) <= high:
                faults.append(
                    f"{launch.entry} takes {hint(int_of(arg.value))} as argument {i}, "
                    f"which does not fit in {arg.ctype}"
                )
    return faults


def _of_map(arg: TensorMap) -> Iterator[str]:
    """What a TMA descriptor breaks of what the driver takes."""
    if any(hint(n) % 16 for n in (arg.ptr.offset, *arg.strides)):
        yield "has an offset or a stride that is no multiple of 16 bytes"
    if any(not 0 < hint(n) < 2**40 for n in arg.strides):
        yield "has a stride that is not between 0 and 2^40 bytes"
    if any(not 1 <= hint(n) <= 2**32 for n in arg.shape):
        yield "has an axis that is not of 1 to 2^32 elements"
    if any(not 1 <= hint(n) <= (1024 if arg.window else 256) for n in arg.box):
        yield "has a box that is not of 1 to 256 elements an axis"


def int_of(value: Any) -> int:
    """The value of an integer argument, an open size included."""
    return value if isinstance(value, OpenSize) else int(value)  # type: ignore[return-value]


def _of_call(call: Call, sizes: Mapping[int, int]) -> Iterator[str]:
    reads, writes = ([(n, _closed(t)) for n, t in part] for part in (call.reads, call.writes))
    for name, t in (*reads, *writes):
        yield from (f"{name}, {t}, {text}" for text in _of_tensor(t, sizes))
    for name, t in writes:
        if t.size and any(n > 1 and not s for n, s in zip(t.shape, t.strides, strict=True)):
            yield f"{name}, {t}, writes one place several times"
    if call.host or (call.problem is None and call.expression is None):
        return
    problem = None if call.problem is None else call.problem.concrete()
    closed = replace(call, reads=tuple(reads), writes=tuple(writes), problem=problem)
    yield from misaligned(closed)
    table = {} if problem is None else needs(problem)
    for name, t in (*reads, *writes):
        dtype, count = table.get(name, ("", 0))
        if dtype and t.dtype != dtype:
            yield f"{name} is {t.dtype}, where {problem} has {dtype}"
        if count > 0 and t.size and t.buffer in sizes:
            end = (t.offset + count) * ITEMSIZE[t.dtype]
            if end > sizes[t.buffer]:
                yield f"{name} is touched up to byte {end} of b{t.buffer}, of {sizes[t.buffer]}"
    yield from _overlaps(closed, reads, writes)


def _overlaps(
    call: Call, reads: Sequence[tuple[str, Tensor]], writes: Sequence[tuple[str, Tensor]]
) -> Iterator[str]:
    for i, (name, t) in enumerate(writes):
        for other, u in writes[i + 1 :]:
            if t.buffer == u.buffer and _meet(t, u):
                yield f"{name} and {other} are written to the same places of b{t.buffer}"
        for other, u in reads:
            if t.buffer != u.buffer or not _meet(t, u):
                continue
            same = (t.offset, t.size, t.dtype) == (u.offset, u.size, u.dtype) and (
                (t.shape, t.strides) == (u.shape, u.strides) or (t.dense and u.dense)
            )
            if not (same and _updates(call, name, other)):
                yield f"{name} is written over {other}, which is read, in b{t.buffer}"


def _updates(call: Call, name: str, other: str) -> bool:
    """Whether the call may write `name` over `other`, element for element."""
    p = call.problem
    if isinstance(p, data_movement.BatchedCalls):
        p = p.problem if name.rpartition(".")[2] == other.rpartition(".")[2] else p
    if p is None or isinstance(p, UPDATES) or (name, other) in call.inplace:
        return True
    if isinstance(p, Contraction):
        return bool(p.epilogue.accumulate) or getattr(p, "add", "") == "here"
    return isinstance(p, problems.Registered)


def _of_tensor(t: Tensor, sizes: Mapping[int, int]) -> Iterator[str]:
    if len(t.shape) != len(t.strides):
        yield "has another number of strides than of axes"
        return
    if any(n < 0 for n in t.shape):
        yield "has a negative size"
        return
    if t.dtype not in ITEMSIZE:
        yield "is of no type that a device holds"
        return
    if not t.size or t.buffer not in sizes:
        return
    steps = [s * (n - 1) for n, s in zip(t.shape, t.strides, strict=True)]
    first = (t.offset + sum(s for s in steps if s < 0)) * ITEMSIZE[t.dtype]
    last = (t.offset + sum(s for s in steps if s > 0) + 1) * ITEMSIZE[t.dtype]
    if first < 0 or last > sizes[t.buffer]:
        yield f"goes from byte {first} to {last} of b{t.buffer}, which has {sizes[t.buffer]}"


def _closed(t: Tensor) -> Tensor:
    """The tensor with the values that its open sizes have here."""
    shape, strides = tuple(map(hint, t.shape)), tuple(map(hint, t.strides))
    return Tensor(t.buffer, t.dtype, shape, strides, hint(t.offset))


def _meet(a: Tensor, b: Tensor) -> bool:
    """Whether two views of a buffer have an element in common; large ones if they are dense."""
    if not (a.size and b.size):
        return False
    if ITEMSIZE[a.dtype] == ITEMSIZE[b.dtype] and max(a.size, b.size) <= _FLAT:
        return bool(np.intersect1d(_places(a), _places(b)).size)
    ends = [(t.offset * ITEMSIZE[t.dtype], (t.offset + t.span) * ITEMSIZE[t.dtype]) for t in (a, b)]
    dense = a.dense and b.dense
    return dense and ends[0][0] < ends[1][1] and ends[1][0] < ends[0][1]


def _places(t: Tensor) -> np.ndarray:
    """The elements of the buffer that the view has."""
    places = np.array([t.offset])
    for size, step in zip(t.shape, t.strides, strict=True):
        places = (places[:, None] + np.arange(size) * step).reshape(-1)
    return places


def _name(call: Call) -> str:
    return f"{call.kernel} ({', '.join(call.nodes[:3])})"

"""What every program must satisfy, whatever pass made it: one table, and what holds for all calls.

`violations` looks at a whole program and `of_calls` at calls under the passes; both answer in plain
sentences. Open sizes are taken at the values that they have here, so that looking adds no guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, SupportsInt

import numpy as np

from onnx_fuse.program import contractions, data_movement, losses, problems
from onnx_fuse.program.call import Buffer, Call, Program, Tensor
from onnx_fuse.program.launch import Launch, Num, TensorMap
from onnx_fuse.program.problem import (
    ITEMSIZE,
    AnyProblem,
    Collective,
    Contraction,
    GemmProblem,
    Hardware,
    OperandRow,
    rows_of,
)
from onnx_fuse.program.size import OpenSize, hint

GRID = (2**31 - 1, 65_535, 65_535)
"""The most blocks of a launch along x, y and z, on every chip that runs these kernels."""
THREADS = 1024
"""The most threads of a block."""
_RANGES = {"i32": (-(2**31), 2**31 - 1), "u32": (0, 2**32 - 1), "i64": (-(2**63), 2**63 - 1)}
_FLAT = 1 << 16
"""Elements up to which two views are compared place by place; larger ones by their ends."""

# ---- the table: what the kernels of each problem touch ------------------------------------------


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last of these sizes and strides."""
    return 1 + sum((n - 1) * abs(step) for n, step in zip(shape, strides, strict=True))


def _matrices(p: GemmProblem, name: str, rows: int, columns: int, *steps: int) -> int:
    """The reach of an operand's matrices, whose rows and columns stand `steps` elements apart."""
    batch = (1,) * (3 - len(p.batch)) + tuple(p.batch)
    return _reach((*batch, rows, columns), (*p.batch_strides(name, rows * columns), *steps))


def _product(p: GemmProblem) -> Iterator[OperandRow]:
    """A product's operands, by `program.epilogue`; a norm's product has its own names."""
    e, y = p.epilogue, p.n // 2 if p.epilogue.gate else p.n
    lda, ldb = p.ld
    if not p.planes:
        a = (p.k, p.m) if p.trans_a else (p.m, p.k)
        b = (p.n, p.k) if p.trans_b else (p.k, p.n)
        yield "a", p.dtype, _matrices(p, "a", *a, lda, 1)
        yield "b", p.b_dtype or p.dtype, _matrices(p, "b", *b, ldb, 1)
    if p.reads_c:
        yield "c", "", _matrices(p, "c", p.m, p.n, *p.ldc)
    if not e.dw:
        yield from rows_of(p, "row0 row1 row2 row3: any m; col1: any n")
    if e.layernorm or e.layer_scale:
        yield "col0", "", p.n
    yield "y", p.out, (p.batches * p.m - 1) * (p.ldy or y) + (p.ldy if e.exp else y)


def _norm_product(p: GemmProblem) -> Iterator[OperandRow]:
    yield from rows_of(
        p,
        """c cs cv dc: any n; mean rstd: any m; r: any m n; add: any m k;
        dw: any k n; gamma beta dgamma dbeta: any k""",
    )
    if p.op == "LayerNormGemm":
        yield from rows_of(p, "x: dtype m k; w wq: dtype k n; dx: any m k; dy: any m n")
    elif p.op == "LayerNormGemmGrad":
        yield from rows_of(p, "x dx: dtype m k; dy: dtype m n; w wq: any k n")
    else:
        yield from rows_of(p, "x dx: any m k; dy: any m n; w wq: any k n")
    columns = p.n // 2 if p.epilogue.gate else p.n
    yield "y", p.out if p.op == "LayerNormGemm" else "", p.m * columns


def _gemm(p: GemmProblem) -> Iterator[OperandRow]:
    yield from rows_of(p, "z: any batches m n; scale_a scale_b: float32 1")
    if p.op == "LayerNormLeafGrad":
        yield from rows_of(p, f"dw w: any m n; gamma beta: any {'m' if p.turned else 'n'}")
    else:
        yield from _product(p) if p.op == "Gemm" else _norm_product(p)


def _packed(p: contractions.PackedProduct) -> Iterator[OperandRow]:
    yield from rows_of(p, "a: dtype m k; c: dtype m n; bias: dtype n; gamma beta: dtype k")
    rows = -(-p.n // 16) * 16 if p.tiled else p.n
    yield "q", "uint8", rows * p.row_bytes
    yield "scale", p.dtype, rows * p.blocks * (2 if p.tiled and p.zero else 1)
    yield "y", p.out, p.m * (p.n // 2 if p.epilogue.gate else p.n)
    yield "groups", "int32", p.k if p.groups else 0


def _attention(p: contractions.Attention) -> Iterator[OperandRow]:
    yield from rows_of(p, "lse: any 2 rows")
    yield "sink", p.dtype, p.batch[1] * p.sink
    yield "lengths", "int32", p.batch[0]
    yield "offsets", "int32", p.batch[0] if p.packed else 0
    layouts = {name: p.layout(name) for name in "qkvy"}
    if isinstance(p, contractions.AttentionGrad):
        layouts |= {name: p.layout(name) for name in ("dq", "dk", "dv")}
        layouts["dy"] = p.layout("dy" if p.dy_strides else "y")
    for name, (shape, strides) in layouts.items():
        dtype = p.cache_dtype if name in ("k", "v") else p.dtype
        if name == "y" and p.tail:
            dtype = p.tail.dtype
        yield name, dtype, _reach(shape, (*strides, 1))
    if p.cache:
        yield "key_step value_step", "float32", p.batch[1] // p.group * p.k
    for name, strides in (("mask", p.mask), ("mask2", p.mask2)):
        yield name, "", _reach(p.mask_shape, strides) if strides else 0


def _append(p: data_movement.CacheAppend) -> Iterator[OperandRow]:
    yield from rows_of(
        p,
        """turned: dtype batch heads rows size;
        past_key past_value: cache_dtype batch kv_heads size past;
        present_key present_value: cache_dtype batch kv_heads size length""",
    )
    strides = {"q": p.q_strides, "k": p.k_strides, "v": p.v_strides}
    for name, heads in (("q", p.heads), ("k", p.kv_heads), ("v", p.kv_heads)):
        yield name, p.dtype, _reach((p.batch, heads, p.rows, p.size), (*strides[name], 1))
    counts = {"first": 1, "each": p.batch * p.rows, "all": p.rows}
    yield "cos sin", p.dtype, p.context * p.half * (1 + p.columns)
    yield "q_scale k_scale", p.dtype, p.size * p.normed
    yield "lengths", "int32", 0 if p.uniform or p.placed else p.batch
    yield "positions", "int64", counts.get(p.placed or p.positions, 0)
    if p.cache:
        yield "key_step value_step", "float32", p.kv_heads * p.size


def _cached_attention(p: contractions.CachedAttention) -> Iterator[OperandRow]:
    append, attention = p.parts
    for names, dtype, count in _append(append):
        for name in names.split():
            if name != "turned" and (append.heads or name != "q"):
                yield contractions.CACHE_OPERANDS.get(name, name), dtype, count
    skipped = {"k", "v", *(("q",) if append.heads else ())}
    yield from (row for row in _attention(attention) if row[0] not in skipped)


def _integer_conv(p: problems.IntegerConv) -> Iterator[OperandRow]:
    yield from rows_of(
        p,
        """scale bias: float32 groups filters; x: dtype batch groups channels inner !x_strides""",
    )
    filters, pixels = p.groups * p.filters, p.batch * prod(p.outer)
    yield "weight", p.weights, p.columns * p.depth
    if p.border:
        yield "shift", "int32", filters
    yield "y", p.tail.dtype if p.tail else "float32", filters * pixels
    for i, dtype in enumerate(p.tail.reads if p.tail else ()):
        yield f"e{i + 1}", dtype, filters * (1 if p.tail and i in p.tail.rows else pixels)


def _norm(p: problems.Norm) -> Iterator[OperandRow]:
    yield from rows_of(
        p,
        """x residual sum: dtype rows length; e1 e2 e3: any rows length;
        mean rstd: stat rows; w: any length columns; z: any rows columns; c: any columns""",
    )
    yield from rows_of(p, f"y: {'result' if p.tail else 'any'} rows length")
    yield from rows_of(p, "scale bias: param " + ("length" if p.affine == 1 else "groups channels"))


def _norm_grad(p: problems.NormGrad) -> Iterator[OperandRow]:
    yield from rows_of(
        p,
        """x ds: dtype rows length; dx: result rows length; scale: param length;
        mean rstd: stat rows; b: any k length""",
    )
    yield "dy", p.dtype, p.rows * (p.k or p.length)
    yield "part", "", (1 if p.rms else 2) * p.parts * p.length


def _reduce(p: problems.Reduce) -> Iterator[OperandRow]:
    x, y = "outer length inner", "outer splits inner"
    yield from rows_of(p, f"x: uint8 {x} state" if p.from_state else f"x: dtype {x}")
    yield from rows_of(p, f"y: uint8 {y} state" if p.to_state else f"y: out_dtype {y}")
    yield from rows_of(p, f"x2: dtype {x} paired; y2: out_dtype {y} second")


def _pointwise(p: data_movement.Pointwise) -> Iterator[OperandRow]:
    yield from ((f"a{i}", t.dtype, 0) for i, t in enumerate(p.reads))
    yield from ((f"y{i}", t.dtype, 0) for i, t in enumerate(p.writes))


def _many(p: data_movement.PointwiseMany) -> Iterator[OperandRow]:
    for row, (reads, writes) in enumerate(p.items):
        yield from ((f"{k}.{row}", t.dtype, 0) for k, t in enumerate((*reads, *writes)))


def _batched(p: data_movement.BatchedCalls) -> Iterator[OperandRow]:
    for name, need in needs(p.problem).items():
        yield from ((f"{name}.{i}", *need) for i in range(p.count))


TABLE: dict[type[AnyProblem], Callable[[Any], Iterable[OperandRow]]] = {
    GemmProblem: _gemm,
    contractions.PackedProduct: _packed,
    contractions.IntegerProduct: lambda p: (
        ("a", p.dtype, (p.m - 1) * p.lda + p.k),
        ("b", p.b_dtype, (p.n - 1) * p.ldb + p.k),
        ("y", "int32", p.batches * p.m * p.n),
    ),
    contractions.Attention: _attention,
    contractions.AttentionGrad: _attention,
    contractions.CachedAttention: _cached_attention,
    problems.IntegerConv: _integer_conv,
    problems.Norm: _norm,
    problems.NormGrad: _norm_grad,
    problems.NormGradSums: lambda p: (
        ("dscale dbias", p.grad.param, p.grad.length),
        ("part", "", p.outputs * p.grad.parts * p.grad.length),
    ),
    problems.Reduce: _reduce,
    problems.SumSquares: lambda p: (
        (f"x.{i}", *pair) for i, pair in enumerate(zip(p.dtypes, p.sizes, strict=True))
    ),
    problems.Resample: lambda p: (
        ("x", p.dtype, p.outer * p.length * p.rows[0] * p.inner),
        ("y", p.out_dtype, p.outer * p.resized * p.rows[1] * p.inner),
        ("source", "int32", p.resized * p.taps),
        ("above", "int32", p.rows[1] * p.rows[2]),
    ),
    problems.Col2Im: lambda p: (
        ("x", p.dtype, p.size // max(1, prod(p.image)) * prod((*p.window.kernel, *p.blocks))),
        ("y", p.dtype, p.size),
    ),
    problems.Registered: lambda p: (
        (name, dtype, prod(shape)) for name, dtype, shape in (*p.inputs, *p.outputs)
    ),
    data_movement.CacheAppend: _append,
    data_movement.Pointwise: _pointwise,
    data_movement.PointwiseSums: lambda p: (*_pointwise(p.pointwise), ("sum", p.out_dtype, 0)),
    data_movement.PointwiseMany: _many,
    data_movement.BatchedCalls: _batched,
    data_movement.GatherElements: lambda p: (
        ("index", p.index, p.size),
        ("x", p.dtype, p.size // max(1, p.taken) * p.length),
        ("y", p.dtype, p.size),
    ),
    data_movement.Fourier: lambda p: (
        *rows_of(p, "x: dtype outer length inner parts; window: dtype points"),
        ("table", "float64", 2 * p.points),
        ("y", p.dtype, p.count * p.results * (1 if p.half else 2)),
    ),
}
"""Kind of problem -> its operands, where no text says them (`AnyProblem.operands`).

What is left out holds more than its kernels touch.
"""

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


def needs(problem: AnyProblem) -> dict[str, tuple[str, int]]:
    """Operand -> (dtype, elements touched), by the table or by the problem's own text."""
    kind = type(problem)
    text = problem.operands
    rows = TABLE[kind](problem) if kind in TABLE else rows_of(problem, text) if text else ()
    return {name: (dtype, count) for names, dtype, count in rows for name in names.split()}


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
    broken = () if launch.of_library else _of_launch(launch, hw)
    return [f"{launch.entry} {text}" for text in broken]


def _of_launch(launch: Launch, hw: Hardware | None) -> Iterator[str]:
    blocks, threads = tuple(map(hint, launch.grid)), prod(map(hint, launch.block))
    smem = hint(launch.smem)
    for axis, size, most in zip("xyz", blocks, GRID, strict=True):
        if not 1 <= size <= most:
            yield f"has {size} blocks along {axis}, of 1 to {most}"
    if any(isinstance(n, OpenSize) for n in (*launch.block, launch.cluster)):
        yield "has a block of a symbolic size"
    if not 1 <= threads <= THREADS or hint(launch.block[2]) > 64:
        yield f"has {threads} threads a block, of 1 to {THREADS}"
    if blocks[0] % launch.cluster:
        yield f"has {blocks[0]} blocks in {launch.cluster}s"
    if hw is not None and smem > hw.smem_per_block:
        yield f"takes {smem} bytes of shared memory a block; {hw.name} has {hw.smem_per_block}"
    for i, arg in enumerate(launch.args):
        if isinstance(arg, Num) and arg.ctype in _RANGES:
            low, high = _RANGES[arg.ctype]
            if not low <= (number := hint(int_of(arg.value))) <= high:
                yield f"takes {number} as argument {i}, which does not fit in {arg.ctype}"


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


def int_of(value: SupportsInt) -> int:
    """The value of an integer argument, an open size included."""
    return value if isinstance(value, OpenSize) else int(value)  # type: ignore[return-value]


def _of_call(call: Call, sizes: Mapping[int, int]) -> Iterator[str]:
    reads, writes = ([(n, _closed(t)) for n, t in part] for part in (call.reads, call.writes))
    for name, t in (*reads, *writes):
        yield from (f"{name}, {t}, {text}" for text in _of_tensor(t, sizes))
    for name, t in writes:
        if t.size and any(n > 1 and not s for n, s in zip(t.shape, t.strides, strict=True)):
            yield f"{name}, {t}, writes one place several times"
    untyped = any(t.dtype not in ITEMSIZE for _, t in (*reads, *writes))
    if untyped or call.host or (call.problem is None and call.expression is None):
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

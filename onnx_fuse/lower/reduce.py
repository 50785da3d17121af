"""Reductions over any axes: Reduce*, ArgMax, ArgMin, and what norms and losses need of them.

A reduction is a list of passes (outer, length, inner), innermost reduced axes first; a pass too
long for the blocks it has is split and merged by one more, unless its columns are short. How it is
cut depends on the shape alone, or on the class of its open sizes (`program.size`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.macros import FLOATS, accumulator, lanes
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.kernels.reduce import pass_width
from onnx_fuse.kernels.rule_based import BLOCK
from onnx_fuse.lower import elementwise
from onnx_fuse.lower.channels_last import channels_last, is_channels_last
from onnx_fuse.lower.context import Context, Lowering, apply
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.problems import Reduce, SumSquares
from onnx_fuse.program.size import OpenSize, any_batch, coarse

REDUCERS = {
    "ReduceSum": "Sum", "ReduceMean": "Mean", "ReduceSumSquare": "SumSquare", "ReduceL1": "L1",
    "ReduceL2": "L2", "ReduceLogSum": "LogSum", "ReduceLogSumExp": "LogSumExp",
    "ReduceProd": "Prod", "ReduceMax": "Max", "ReduceMin": "Min",
}  # fmt: skip
_STATES = {
    "LogSumExp": 2,
    "LogCount": 2,
    "Moments": 3,
}  # accumulators in a State; Arg* also keeps the index
_BLOCKS = 1024  # blocks a pass should have: a fixed aim, so that the order is the shape's alone
SHORT = 256  # the most elements of a column that one launch reduces


def passes(
    shape: Sequence[int], axes: Sequence[int], outermost: bool = False
) -> list[tuple[int, int, int]]:
    """(outer, length, inner) of each pass, innermost reduced axes first, or `outermost` ones."""
    groups: list[list[int]] = []  # [size, whether reduced], neighbours of a kind merged
    for axis, size in enumerate(shape):
        kind = int(axis in axes)
        if size == 1:
            continue
        if groups and groups[-1][1] == kind:
            groups[-1][0] *= size
        else:
            groups.append([size, kind])
    triples = []
    while any(kind for _, kind in groups):
        reduced = [i for i, (_, kind) in enumerate(groups) if kind]
        at = reduced[0] if outermost else reduced[-1]
        sizes = [size for size, _ in groups]
        triples.append((prod(sizes[:at]), sizes[at], prod(sizes[at + 1 :])))
        groups.pop(at)
    return triples or [(prod(shape), 1, 1)]


def pieces(outer: int, length: int, inner: int, vec: int, aim: int = _BLOCKS) -> int:
    """Elements of `length` that one block (or team) reduces; `length` if the pass is not split.

    It is split into about `aim` blocks.
    """
    if inner == 1:
        least, blocks = BLOCK * vec * 4, outer
    else:
        least, blocks = 32, outer * -(-inner // (lanes(-(-inner // vec)) * vec))
    longest = coarse(length)
    if isinstance(longest, OpenSize):
        longest -= 1  # a power of two is cut as what is shorter, in whose class it is
    splits = min(longest // least, -(-aim // max(1, any_batch(blocks))))
    return length if splits < 2 else -(-length // (splits * vec)) * vec


def reduction(
    ctx: Context,
    node: ir.Node,
    x: Tensor,
    y: Tensor,
    reducer: str,
    axes: Sequence[int],
    second: Tensor | None = None,
    shape: Sequence[int] | None = None,
    outermost: bool = False,
    other: Tensor | None = None,
) -> None:
    """Emit y = reducer over `axes` of dense x seen as `shape`; `second`: the variance (Moments).

    A Dot is the sum of x times `other`, which is as x is.
    `outermost`: the first of the axes is reduced first, as of long columns whose rows are short.
    """
    shape = x.shape if shape is None else shape
    acc = accumulator(x.dtype, reducer)
    count = prod(shape[a] for a in axes)
    words = 8 if acc in ("double", "i64", "u64") else 4
    state = (8 + max(words, 8)) if reducer.startswith("Arg") else words * _STATES.get(reducer, 1)
    todo = passes(shape, axes, outermost)
    source, from_state = x, False
    while todo:
        outer, length, inner = todo.pop(0)
        vec = 1 if from_state else pass_width(outer, length, inner, x.dtype)
        # a thread has eight rows of moments on their way: few blocks fill the chip, and the merge
        # of a column's takes long
        aim = SHORT if reducer == "Moments" and inner > 1 else _BLOCKS
        few = (from_state or inner > 1) and coarse(length) <= SHORT
        merged = from_state and few
        chunk = length if merged else pieces(outer, length, inner, vec, aim)
        short = inner > 1 and few and chunk < length  # one launch, in place of parts and their sum
        chunk = length if short else chunk
        problem = Reduce(
            reducer, outer, length, inner, chunk, count, x.dtype, y.dtype, state, from_state,
            short=short,
        )  # fmt: skip
        if problem.splits > 1:
            todo.insert(0, (outer, problem.splits, inner))
        last = not todo
        size = outer * problem.splits * inner * state
        target = y if last else ctx.scratch("uint8", (size,))
        problem = replace(problem, to_state=not last, second=last and second is not None)
        writes = {"y": target} | ({"y2": second} if last and second is not None else {})
        pair = {"x2": other} if other is not None and problem.paired else {}
        ctx.select(node, problem, {"x": source, **pair}, writes)
        source, from_state = target, True


def _axes(ctx: Context, node: ir.Node, rank: int) -> list[int]:
    listed = ctx.attr(node, "axes")
    if ctx.has(node, 1):
        listed = [int(a) for a in ctx.given(node, 1, "its axes").reshape(-1)]
    if not listed:
        return [] if ctx.attr(node, "noop_with_empty_axes", 0) else list(range(rank))
    return sorted({int(a) % rank for a in listed}) if rank else []  # a scalar's axis 0 is none


def reduce(ctx: Context, node: ir.Node) -> None:
    """ReduceSum, ReduceMean, ... over the axes of input 1 (all where there is none)."""
    x = ctx.view(node, 0)
    axes = _axes(ctx, node, len(x.shape))
    reducer = REDUCERS[node.op_type]
    if not axes and reducer in ("Sum", "Mean", "Prod", "Max", "Min"):
        ctx.alias(node, 0, x)  # in any order: a copy would leave the one of its neighbours
        return
    rank = len(x.shape)
    spatial = set(range(2, rank))
    if is_channels_last(x) and (spatial <= set(axes) or 1 in axes):  # the rest keeps its order
        x, axes = channels_last(x), sorted((0, rank - 1, *range(1, rank - 1))[a] for a in axes)
    x = ctx.contiguous(x)
    y = ctx.output(node, 0)
    if y.size and not x.size and reducer == "Mean":
        reducer = "Sum"  # onnxruntime's mean of nothing is 0
    if reducer == "LogSumExp" and x.dtype not in FLOATS:
        reducer = "LogCount"
    if y.size and not x.size and reducer in ("Max", "Min") and x.dtype not in FLOATS:
        # the type's own least or largest value: accumulators are wider
        ends = (0, 1) if x.dtype == "bool" else (np.iinfo(x.dtype).min, np.iinfo(x.dtype).max)
        apply(ctx, node, y, "", ends[reducer == "Min"])
    elif y.size:
        reduction(ctx, node, x, y, reducer, axes)


def dots(ctx: Context, node: ir.Node) -> None:
    """Dots: the sum of a times b, which are broadcast to each other, over `axes`, in one pass."""
    a, b = ctx.view(node, 0), ctx.view(node, 1)
    shape = [n if m == 1 else m for m, n in zip(a.shape, b.shape, strict=True)]
    a, b = (ctx.contiguous(x.expand(shape)) for x in (a, b))
    axes = ctx.attr(node, "axes")
    kept = [size for k, size in enumerate(shape) if k not in axes]
    y = ctx.output(node, 0, kept, a.dtype)
    if y.size:
        reduction(ctx, node, a, y, "Dot", axes, other=b)


def arg(ctx: Context, node: ir.Node) -> None:
    """ArgMax, ArgMin along one axis: the first index of the extreme, or the last; ArgMaxFinite."""
    x = ctx.dense(node, 0)
    y = ctx.output(node, 0)
    last = "Last" if ctx.attr(node, "select_last_index", 0) else ""
    if y.size:
        axis = ctx.attr(node, "axis", -1 if node.domain else 0) % len(x.shape)
        reduction(ctx, node, x, y, node.op_type + last, [axis])


def sum_of_squares(ctx: Context, node: ir.Node) -> None:
    """Sum of ReduceSumSquares over whole tensors (a global norm): few launches for all of them.

    What the ReduceSumSquares themselves emitted is dropped, as nothing reads it any more.
    """
    tensors: list[Tensor] = []
    for i, value in enumerate(node.inputs):
        maker = value.producer() if value is not None else None
        whole = maker is not None and maker.op_type == "ReduceSumSquare" and maker.domain == ""
        if maker is None or not whole or ctx.view(node, i).shape or ctx.has(maker, 1):
            return folded(ctx, node)
        tensors.append(_before_cast(ctx, maker))
    dtype = ctx.view(node, 0).dtype
    if len(tensors) < 2 or dtype not in FLOATS or not any(t.size for t in tensors):
        return folded(ctx, node)
    tensors = [t for t in tensors if t.size]  # a launch has blocks
    reads = {f"x.{i}": t for i, t in enumerate(tensors)}
    problem = SumSquares(tuple(t.size for t in tensors), tuple(t.dtype for t in tensors), dtype)
    ctx.select(node, problem, reads, {"y": ctx.output(node, 0)})


def _before_cast(ctx: Context, square: ir.Node) -> Tensor:
    """What is squared, or what it was in 16 bits: a Cast to float32 changes no number.

    Of a gradient only the update then reads the Cast, and takes it into its own call.
    """
    wide = ctx.dense(square, 0)
    value = square.inputs[0]
    cast = value.producer() if value is not None else None
    if cast is None or (cast.op_type, cast.domain) != ("Cast", "") or wide.dtype != "float32":
        return wide
    short = ctx.view(cast, 0)
    whole = short.dtype in ("float16", "bfloat16") and short.dense
    return ctx.contiguous(short) if whole else wide


folded = elementwise.LOWERINGS["", "Sum"]
LOWERINGS: dict[tuple[str, str], Lowering] = {
    **{("", name): reduce for name in REDUCERS},
    (FUSE, "Dots"): dots,
    (FUSE, "ArgMaxFinite"): arg,
    ("", "Sum"): sum_of_squares,
    ("", "ArgMax"): arg,
    ("", "ArgMin"): arg,
}

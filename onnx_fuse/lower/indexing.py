"""Gather and Scatter by data-dependent indices; OneHot and EyeLike through masks."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import Code
from onnx_fuse.ir.build import required
from onnx_fuse.lower.context import Context, Lowering, Unserved, copy, emit
from onnx_fuse.lower.views import reshaped
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.data_movement import GatherElements, GatherND, ScatterElements, ScatterND
from onnx_fuse.program.size import number

MOST_KNOWN = 1 << 12
"""Elements up to which a constant is looked at for zeros."""


def gather(ctx: Context, node: ir.Node) -> None:
    """y[o, index..., i] = x[o, index, i] along `axis`."""
    indices = ctx.host(node, 1)
    if indices is not None and indices.size == 1:
        return _pick(ctx, node)
    if indices is not None and indices.ndim == 1 and _run(ctx, node, indices):
        return
    x, index = ctx.view(node, 0), ctx.view(node, 1)
    axis = ctx.attr(node, "axis", 0) % len(x.shape)
    left, right, rank = x.shape[:axis], x.shape[axis + 1 :], len(index.shape)
    y = ctx.output(node, 0, (*left, *index.shape, *right), x.dtype)
    strides = (*x.strides[:axis], *[0] * rank, *x.strides[axis + 1 :])
    table = replace(x, shape=y.shape, strides=strides)
    index = reshaped(ctx, index, (*index.shape, *[1] * len(right))).expand(y.shape)
    code = Code()
    emit(ctx, code, node, code.row(table, index, x.strides[axis], x.shape[axis]), y)


def _run(ctx: Context, node: ir.Node, index: np.ndarray) -> bool:
    """Lower a Gather of consecutive indices, such as positions of a sequence, to a view."""
    x = ctx.view(node, 0)
    axis = ctx.attr(node, "axis", 0) % len(x.shape)
    if not _is_run(index, x.shape[axis]):
        return False
    ctx.alias(node, 0, x.part(axis, int(index[0]) if index.size else 0, index.size))
    return True


def _is_run(index: np.ndarray, size: int) -> bool:
    """Whether an index vector counts consecutive positions of an axis."""
    first = int(index[0]) if index.size else 0
    inside = first >= 0 and first + index.size <= size
    return inside and not (index != np.arange(index.size) + first).any()


def _pick(ctx: Context, node: ir.Node) -> None:
    """Gather by one index that is known at lowering, as a view."""
    x, index = ctx.view(node, 0), required(ctx.host(node, 1))
    axis = ctx.attr(node, "axis", 0) % len(x.shape)
    k = number(index.reshape(-1)[0])
    k += x.shape[axis] if k < 0 else 0
    if not 0 <= k < x.shape[axis]:
        raise Unserved("no-kernel", what=f"index {k}, outside an axis of {x.shape[axis]}")
    one = x.at(axis, k)
    strides = (*one.strides[:axis], *(0,) * index.ndim, *one.strides[axis:])
    shape = (*one.shape[:axis], *index.shape, *one.shape[axis:])
    ctx.alias(node, 0, replace(one, shape=shape, strides=strides))


def gather_elements(ctx: Context, node: ir.Node) -> None:
    """y[o, j, i] = x[o, index[o, j, i], i] along `axis`."""
    x, index = ctx.view(node, 0), ctx.dense(node, 1)
    axis = ctx.attr(node, "axis", 0) % len(x.shape)
    shape = [d if k == axis else index.shape[k] for k, d in enumerate(x.shape)]
    x = ctx.contiguous(x.first(shape))
    y = ctx.output(node, 0, index.shape, x.dtype)
    problem = GatherElements(
        y.size, prod(index.shape[axis + 1 :]), index.shape[axis], x.shape[axis], x.dtype,
        index.dtype,
    )  # fmt: skip
    ctx.select(node, problem, {"x": x, "index": index}, {"y": y})


def gather_nd(ctx: Context, node: ir.Node) -> None:
    """y[b, j, i] = x[b, index[b, j, :], i]."""
    x, index = ctx.dense(node, 0), ctx.dense(node, 1)
    batch = ctx.attr(node, "batch_dims", 0)
    q = index.shape[-1]
    tail = x.shape[batch + q :]
    y = ctx.output(node, 0, (*index.shape[:-1], *tail), x.dtype)
    problem = GatherND(
        prod(index.shape[:batch]), prod(index.shape[batch:-1]), x.shape[batch : batch + q],
        prod(tail), x.dtype, index.dtype,
    )  # fmt: skip
    ctx.select(node, problem, {"x": x, "index": index}, {"y": y})


def scatter_elements(ctx: Context, node: ir.Node) -> None:
    """y = x, then y[o, index[o, j, i], i] (op)= update[o, j, i] along `axis`, in order of j."""
    x, index, update = ctx.view(node, 0), ctx.dense(node, 1), ctx.dense(node, 2)
    rank = len(x.shape)
    axis = ctx.attr(node, "axis", 0) % rank
    if any(index.shape[k] != x.shape[k] for k in range(rank) if k != axis):
        raise Unserved("misfit", what="its indices", to="the other axes")
    y = ctx.output(node, 0, x.shape, x.dtype)
    if not y.size:
        return
    if not index.size:
        copy(ctx, node, x, y)
        return
    updates, length, inner = index.shape[axis], x.shape[axis], prod(x.shape[axis + 1 :])
    reduction, lines = ctx.attr(node, "reduction", "none"), index.size // updates
    if lines == 1 and reduction == "add":  # which may write the zeros of x as well
        rows = ScatterND(updates, (length,), 1, update.dtype, index.dtype, reduction)
        return _scattered(ctx, node, rows, x, index, update, y)
    copy(ctx, node, x, y)
    problem = ScatterElements(
        lines, inner, updates, length, update.dtype, index.dtype, reduction,
        distinct=_chosen_along(node.inputs[1], axis, rank),
    )  # fmt: skip
    reads = {"index": index, "update": update, "before": y}
    ctx.select(node, problem, reads, {"y": y})


def _chosen_along(index: ir.Value | None, axis: int, rank: int) -> bool:
    """Whether `index` is what a TopK has chosen along the axis: no index of a line comes twice."""
    node = None if index is None else index.producer()
    if node is None or node.op_type != "TopK" or node.domain or index is not node.outputs[1]:
        return False
    along = node.attributes.get("axis")
    return bool((-1 if along is None else along.as_int()) % rank == axis)


def scatter_nd(ctx: Context, node: ir.Node) -> None:
    """y = x, then y[index[j, :], i] (op)= update[j, i], in order of j."""
    x, index, update = ctx.view(node, 0), ctx.dense(node, 1), ctx.dense(node, 2)
    q, reduction = index.shape[-1], ctx.attr(node, "reduction", "none")
    y = ctx.output(node, 0, x.shape, x.dtype)
    if not y.size:
        return
    count, inner = prod(index.shape[:-1]), prod(x.shape[q:])
    if not (count and inner):
        copy(ctx, node, x, y)
        return
    index_values = ctx.host(node, 1)
    if index_values is not None and q == 1 and reduction in ("none", "add"):
        indices = index_values.reshape(-1)
        if _is_run(indices, x.shape[0]):
            _scatter_run(ctx, node, x, int(indices[0]), update, y, add=reduction == "add")
            return
    problem = ScatterND(count, x.shape[:q], inner, update.dtype, index.dtype, reduction)
    _scattered(ctx, node, problem, x, index, update, y)


def _scattered(
    ctx: Context,
    node: ir.Node,
    problem: ScatterND,
    x: Tensor,
    index: Tensor,
    update: Tensor,
    y: Tensor,
) -> None:
    """y = x with the updates; where x is zero, one kernel writes the zeros and the sums."""
    reads = {"index": index, "update": update}
    if problem.reduction == "add" and _is_zero(ctx, x):
        fresh = replace(problem, fresh=True)
        if ctx.serves(fresh):
            return ctx.select(node, fresh, reads, {"y": y})
    copy(ctx, node, x, y)
    ctx.select(node, problem, reads | {"before": y}, {"y": y})


def _is_zero(ctx: Context, x: Tensor) -> bool:
    """Whether it is known to be 0.0, and not -0.0, everywhere; of a large one only if broadcast."""
    if any(x.strides) and x.size > MOST_KNOWN:
        return False
    one = Tensor(x.buffer, x.dtype, (1,), (1,), x.offset)
    array = ctx.known(x if any(x.strides) else one)
    return array is not None and not np.ascontiguousarray(array).view(np.uint8).any()


def _scatter_run(
    ctx: Context, node: ir.Node, x: Tensor, first: int, update: Tensor, y: Tensor, *, add: bool
) -> None:
    """y = x with the updates in its rows from `first` on, in order: positions of a sequence."""
    tail = x.shape[1:]
    update = reshaped(ctx, update, (update.size // prod(tail), *tail))
    count = update.shape[0]
    for begin, end in ((0, first), (first + count, x.shape[0])):
        if begin < end:
            copy(ctx, node, x.part(0, begin, end - begin), y.part(0, begin, end - begin))
    if add:
        code = Code()
        both = (code.load(x.part(0, first, count)), code.load(update))
        emit(ctx, code, node, code.step("Add", x.dtype, *both), y.part(0, first, count))
    else:
        copy(ctx, node, update, y.part(0, first, count))


def one_hot(ctx: Context, node: ir.Node) -> None:
    """y = index == arange(depth) ? on : off, with negative indices counted from the end."""
    index, values = ctx.view(node, 0), ctx.view(node, 2)
    n = int(ctx.given(node, 1).reshape(-1)[0])
    rank = len(index.shape) + 1
    axis = ctx.attr(node, "axis", -1) % rank
    shape = (*index.shape[:axis], n, *index.shape[axis:])
    y = ctx.output(node, 0, shape, values.dtype)
    if not y.size:
        return
    place = [n if k == axis else 1 for k in range(rank)]
    classes = ctx.constant(np.arange(n))
    column = reshaped(ctx, index, (*index.shape[:axis], 1, *index.shape[axis:]))
    code = Code()
    k = code.load(column.expand(shape))
    if index.dtype != "int64":
        k = code.step("Cast", "int64", k)
    below = code.step("Less", "bool", k, code.scalar(0, "int64"))
    wrapped = code.step("Add", "int64", k, code.scalar(n, "int64"))
    k = code.step("Where", "int64", below, wrapped, k)
    hit = code.step("Equal", "bool", k, code.load(reshaped(ctx, classes, place).expand(shape)))
    off, on = (code.load(values.at(0, i).expand(shape)) for i in (0, 1))
    emit(ctx, code, node, code.step("Where", values.dtype, hit, on, off), y)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "Gather"): gather,
    ("", "GatherElements"): gather_elements,
    ("", "GatherND"): gather_nd,
    ("", "ScatterElements"): scatter_elements,
    ("", "ScatterND"): scatter_nd,
    ("", "OneHot"): one_hot,
}

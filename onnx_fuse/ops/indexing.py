"""Gather and Scatter in all their forms, TopK, OneHot, Compress."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import dim
from onnx_fuse.ops.opdef import OpDef, no_grad, register
from onnx_fuse.ops.shape_ops import (
    Tensor,
    Values,
    Writer,
    arguments,
    known_rank,
    norm_axis,
    static,
    static_ints,
    text,
)


def _gather(op: Writer, node: ir.Node, dys: Values) -> Values:
    """Rows of dy added at their indices; those of neighbours in order are padded with zeros."""
    (x, indices), dy = arguments(node, 2), dys[0]
    axis = node.attributes.get_int("axis", 0)
    run = None if x.shape is None else _run(op, indices)
    if run is not None:
        (first, count), scalar = run, indices.shape is not None and not indices.shape
        row = op.Unsqueeze(dy, [axis]) if scalar else dy
        axis = norm_axis(axis, x)
        size = dim(x, axis)
        if size is not None and isinstance(count, int):
            before, after = first % size, size - first % size - count
        else:
            extent = size if size is not None else op.Shape(x, start=axis, end=axis + 1)
            end = first + count if isinstance(count, int) else op.Add(count, first)
            before = first if first >= 0 else op.Add(extent, first)
            after = op.Sub(extent, end) if first >= 0 else -end
        return [op.pad(row, [axis], [before], [after])]
    indices = op.to_type(indices, ir.DataType.INT64)  # ScatterND takes no other
    if norm_axis(axis, x) == 0 if axis < 0 else axis == 0:
        last = op.Unsqueeze(indices, [-1])
        return [op.scatter_add(op.zeros_like(x), last, dy)]
    return [_scatter_axis(op, x, indices, dy, axis)]


def _run(op: Writer, indices: ir.Value) -> tuple[int, int | Tensor] | None:
    """The first of indices that count neighbours in order, and how many: an int, or a vector of one
    where the model runs. None for other indices.
    """
    array, producer = static(indices), indices.producer()
    if array is not None:
        if array.ndim > 1 or not array.size:
            return None
        first, count = int(array.reshape(-1)[0]), array.size
        follow = (array.reshape(-1) == np.arange(count) + first).all()
        return (first, count) if follow and (first >= 0 or first + count <= 0) else None
    if producer is None or producer.domain or producer.op_type != "Range":
        return None
    start, step = static_ints(producer.inputs[0]), static_ints(producer.inputs[2])
    if start is None or len(start) != 1 or start[0] < 0 or step != [1]:
        return None
    return start[0], op.Shape(indices)


def _scatter_axis(op: Writer, x: ir.Value, indices: ir.Value, dy: ir.Value, axis: int) -> Tensor:
    """Gather along an inner axis: bring the axis to the front, add rows, bring it back."""
    n, k, axis = known_rank(x), known_rank(indices), norm_axis(axis, x)
    # dy is [x before axis] + [indices] + [x after axis]
    forward = [*range(axis, axis + k), *range(axis), *range(axis + k, n + k - 1)]
    there = [axis, *range(axis), *range(axis + 1, n)]
    back = [int(i) for i in np.argsort(there)]
    shape = op.Gather(op.Shape(x), op.constant(there))
    rows = op.Transpose(dy, perm=forward)
    zeros, last = op.filled(shape, x.dtype), op.Unsqueeze(indices, [-1])
    added = op.scatter_add(zeros, last, rows)
    return op.Transpose(added, perm=back)


def _gather_elements(op: Writer, node: ir.Node, dys: Values) -> Values:
    x, indices = arguments(node, 2)
    axis = node.attributes.get_int("axis", 0)
    return [op.scatter_add(op.zeros_like(x), indices, dys[0], axis=axis)]


def _gather_nd(op: Writer, node: ir.Node, dys: Values) -> Values:
    (x, indices), dy = arguments(node, 2), dys[0]
    full, sizes = _with_batch(op, node, indices), [dim(x, a) for a in range(len(x.shape or ()))]
    width = dim(full, -1)
    if not sizes or width is None or not (all(sizes[:width]) or all(sizes[width:])):
        # onnxruntime's ScatterND (1.32) takes no index into an empty axis, even of empty slices
        if known_rank(indices) == 1:  # one tuple, whose only axis is its own
            full, dy = (op.Unsqueeze(v, [0]) for v in (full, dy))
        end = op.Mul(op.Size(dy), [2**31])
        full, dy = (op.Slice(v, [0], end, [0]) for v in (full, dy))
    return [op.scatter_add(op.zeros_like(x), full, dy)]


def _with_batch(op: Writer, node: ir.Node, indices: ir.Value) -> Tensor:
    """The indices with the coordinates of the batch axes before them."""
    batch = node.attributes.get_int("batch_dims", 0)
    if not batch:
        return indices
    n = known_rank(indices)
    column = op.Concat(op.Shape(indices, start=0, end=n - 1), [1], axis=0)
    columns = []
    for axis in range(batch):
        steps = op.counted(op.size_of(indices, axis))
        columns.append(op.Expand(op.reshape(steps, [-1, *[1] * (n - 1 - axis)]), column))
    return op.Concat(*columns, indices, axis=-1)


def _meet_nowhere(node: ir.Node) -> bool:
    """Whether a scatter's indices are known and name no place twice."""
    indices = static(node.inputs[1])
    if indices is None or ((indices < 0).any() and (indices >= 0).any()):
        return False
    if node.op_type != "ScatterND":
        places = [*np.indices(indices.shape)]
        places[node.attributes.get_int("axis", 0)] = indices
        indices = np.stack(places, -1)
    rows = indices.reshape(-1, indices.shape[-1])
    return len(np.unique(rows, axis=0)) == len(rows)


def _scatter(op: Writer, node: ir.Node, dys: Values) -> Values:
    (x, indices, updates), dy = arguments(node, 3), dys[0]
    kind = "ND" if node.op_type == "ScatterND" else "Elements"
    along: dict[str, Any] = {}
    if kind == "Elements":
        along["axis"] = node.attributes.get_int("axis", 0)

    def gather(v: Tensor) -> Tensor:
        return op.node(f"Gather{kind}", [v, indices], **along)

    def scatter(v: Tensor, u: Tensor, how: str) -> Tensor:
        return op.node(f"Scatter{kind}", [v, indices, u], **along, reduction=how)

    taken = gather(dy)
    match text(node, "reduction", "none"):
        case "none":
            if not _meet_nowhere(node):  # of updates of one place the last one stays
                order = op.reshape_like(op.counted(op.Size(updates)), updates)
                nothing = op.filled(op.Shape(x), ir.DataType.INT64)
                stays = op.Equal(gather(scatter(nothing, order, "none")), order)
                taken = op.Where(stays, taken, op.zeros_like(taken))
            return [scatter(dy, op.zeros_like(updates), "none"), None, taken]
        case "add":
            return [dy, None, taken]
        case "mul":
            factor = scatter(op.Expand(op.constant(1.0, x.dtype), op.Shape(x)), updates, "mul")
            # the product of all other factors: zeros are counted, and left out of what is divided
            zero = op.Equal(updates, op.zeros_like(updates))
            one, safe = op.to_like(zero, x), op.formula("Where(zero, 1, u)", zero=zero, u=updates)
            others = op.Equal(gather(scatter(op.zeros_like(x), one, "add")), one)
            du = op.Div(gather(op.Mul(dy, scatter(x, safe, "mul"))), safe)
            return [op.Mul(dy, factor), None, op.Where(others, du, op.zeros_like(du))]
    # max, min: the places that reach the extremum share its gradient
    y = node.outputs[0]
    here = op.to_like(op.Equal(x, y), x)
    there = op.to_like(op.Equal(updates, gather(y)), x)
    each = op.Div(dy, scatter(here, there, "add"))
    return [op.Mul(each, here), None, op.Mul(gather(each), there)]


def _topk(op: Writer, node: ir.Node, dys: Values) -> Values:
    x, dy = node.inputs[0], dys[0]
    if dy is None or x is None:
        return [None]
    indices = op.output(node, 1, ir.DataType.INT64, "indices")
    indices.shape = node.outputs[0].shape
    axis = node.attributes.get_int("axis", -1)
    return [op.scatter_add(op.zeros_like(x), indices, dy, axis=axis)]


def _one_hot(op: Writer, node: ir.Node, dys: Values) -> Values:
    """values = [off, on]: each gets the sum over its places."""
    dy = dys[0]
    pair = op.OneHot(
        node.inputs[0],
        node.inputs[1],
        op.constant(np.array([0.0, 1.0], np.float32)),
        axis=node.attributes.get_int("axis", -1),
    )
    on = op.ReduceSum(op.Mul(dy, op.to_like(pair, dy)), keepdims=0)
    off = op.Sub(op.ReduceSum(dy, keepdims=0), on)
    first = op.constant([0])
    return [None, None, op.Concat(op.Unsqueeze(off, first), op.Unsqueeze(on, first), axis=0)]


def _compress(op: Writer, node: ir.Node, dys: Values) -> Values:
    (x, condition), dy = arguments(node, 2), dys[0]
    axis = node.attributes.get("axis")
    length = op.elements(x) if axis is None else op.sizes_of(x)[norm_axis(axis.as_int(), x)]
    entries = dim(condition, 0)
    if entries is None or not isinstance(length, int) or entries > length:
        # entries beyond the axis count for nothing
        condition = op.Slice(condition, [0], op.vector([length]), [0])
    rows = op.Squeeze(op.NonZero(condition), [0])
    if axis is None:
        flat = op.Reshape(op.zeros_like(x), [-1])
        return [op.reshape_like(op.ScatterElements(flat, rows, dy, axis=0), x)]
    return [_scatter_axis(op, x, rows, dy, axis.as_int())]


register(
    OpDef("Gather", grad=_gather),
    OpDef("GatherElements", grad=_gather_elements),
    OpDef("GatherND", grad=_gather_nd),
    *(OpDef(name, grad=_scatter) for name in ("Scatter", "ScatterElements", "ScatterND")),
    OpDef("TopK", grad=_topk),
    OpDef("OneHot", grad=_one_hot),
    OpDef("Compress", grad=_compress),
)
no_grad("it returns positions and counts of distinct values", "Unique")

"""NonZero, Compress, Unique and NonMaxSuppression, whose output sizes depend on data.

Counting needs no unknown size: each element gets a flag, and each tile of flags a count. The
positions then go to a tensor of as many elements, whose size is read back; see `stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.program.problem import KEPT_TILE

MAX_COLUMNS = 4
"""Elements of a slice up to which Unique sorts slices in one pass an element."""

Shapes = Sequence[tuple[int, ...]]
Known = Callable[[int], "np.ndarray | None"]
Results = Sequence["ir.Value | None"]


def attr(node: ir.Node, name: str, default: object) -> Any:
    """The value of an attribute, or the default where the node has none."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def _kept(op: Builder, keep: ir.Value | None, length: int) -> tuple[Any, Any]:
    """(positions of the set flags of a bool [length], int64 [count]; their number, int64 [1])."""
    first = op.KeptCounts(keep, domain=FUSE)
    tiles = -(-length // KEPT_TILE)
    count = op.Slice(first, [tiles], [tiles + 1])
    return op.KeptPositions(keep, first, count, domain=FUSE), count


def nonzero(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Sequence[ir.Value] | None:
    """int64 [rank, count]: an index a row of each element that is not zero, in row-major order."""
    x, shape = required(node.inputs[0]), shapes[0]
    length = int(np.prod(shape))
    if not length or not shape:
        return None
    flat = op.Reshape(x, [length])
    zero = op.CastLike(op.constant(0), x)
    keep = flat if x.dtype == ir.DataType.BOOL else op.Not(op.Equal(flat, zero))
    at, _ = _kept(op, keep, length)
    rows, step = [], length
    for size in shape:
        left, step = length // step, step // size
        row = at if step == 1 else op.Div(at, step)
        rows.append(op.Unsqueeze(row if left == 1 else op.Mod(row, size), [0]))
    return [op.Concat(*rows, axis=0) if len(rows) > 1 else rows[0]]


def compress(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Sequence[ir.Value] | None:
    """The slices of x along the axis, or its elements, whose condition holds."""
    (x, condition), shape, flags = node.inputs, shapes[0], shapes[1]
    axis = attr(node, "axis", None)
    if axis is None:
        x, shape, axis = op.Reshape(x, [-1]), (int(np.prod(shape)),), 0
    length = min(flags[0], shape[axis])
    if not length:
        return None
    keep = condition if length == flags[0] else op.Slice(condition, [0], [length])
    return [op.Gather(x, _kept(op, keep, length)[0], axis=axis)]


def _ordered(op: Builder, rows: ir.Value, count: int, width: int) -> tuple[Any, Any]:
    """The sorted rows, one of a number each as [count], and int64 [count], where each has stood.

    Equal rows keep their order.
    """
    if width == 1:
        column = op.Reshape(rows, [count])
        return op.TopK(column, [count], axis=0, largest=0, sorted=1, outputs=2)
    order = op.SortedRows(rows, domain=FUSE) if width > MAX_COLUMNS else None
    if order is not None:
        return op.Gather(rows, order), order
    order = None
    for k in reversed(range(width)):  # the last column first: each pass keeps the one before
        column = op.Reshape(op.Gather(rows, [k], axis=1), [count])
        ordered = column if order is None else op.Gather(column, order)
        _, by = op.TopK(ordered, [count], axis=0, largest=0, sorted=1, outputs=2)
        order = by if order is None else op.Gather(order, by)
    return op.Gather(rows, order), order


def unique(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Sequence[Any] | None:
    """The distinct elements or slices, their first positions, the inverse indices and the counts.

    Equal elements stand side by side once sorted, in their old order, since TopK is stable.
    """
    x, shape = required(node.inputs[0]), shapes[0]
    axis = attr(node, "axis", None)
    whole = axis is None
    rows = op.Reshape(x, [-1, 1]) if whole else x
    moved = list(range(len(shape)))
    if not whole:
        axis %= len(shape)
        moved.insert(0, moved.pop(axis))
        rows = op.Reshape(op.Transpose(x, perm=moved), [shape[axis], -1])
    count = int(np.prod(shape)) if whole else shape[axis]
    width = int(np.prod(shape)) // count if count else 0
    if not count or not width:
        return None
    rows.dtype = x.dtype
    arranged, order = _ordered(op, rows, count, width)
    pair = op.Slice(arranged, [0], [count - 1], [0]), op.Slice(arranged, [1], [count], [0])
    unlike = op.Not(op.Equal(*pair))
    if x.dtype is not None and x.dtype.is_floating_point():  # NaNs are one value
        unlike = op.And(unlike, op.Not(op.And(*(op.IsNaN(p) for p in pair))))
    changed = op.Cast(unlike, to=ir.DataType.INT64)
    if width > 1:
        changed = op.ReduceMax(changed, [1], keepdims=0)
    # groups count from 0, and the first element begins one in any case
    group = op.CumSum(op.Concat([0], changed, axis=0), op.constant(0))
    keep = op.Cast(op.Concat([1], changed, axis=0), to=ir.DataType.BOOL)
    begins, total = _kept(op, keep, count)
    ends = op.Concat(op.Slice(begins, [1], [count], [0]), [count], axis=0)
    often = op.Sub(ends, begins)
    where = op.Gather(order, begins)
    inverse = op.ScatterElements(op.constant(np.zeros(count, np.int64)), order, group, axis=0)
    if not attr(node, "sorted", 1):  # in the order in which they first stand
        _, rank = op.TopK(where, total, axis=0, largest=0, sorted=1, outputs=2)
        place = op.ScatterElements(
            op.ConstantOfShape(total, value=ir.tensor(np.zeros(1, np.int64))),
            rank,
            op.Range(op.constant(0), op.Squeeze(total, [0]), op.constant(1)),
            axis=0,
        )
        where, often = op.Gather(where, rank), op.Gather(often, rank)
        inverse = op.Gather(place, inverse)
    flat = op.Reshape(x, [-1]) if whole else x
    return [op.Gather(flat, where, axis=0 if whole else axis), where, inverse, often]


def nms(op: Builder, node: ir.Node, shapes: Shapes, const: Known) -> Sequence[ir.Value] | None:
    """int64 [count, 3]: batch, class and box, the best of each class first."""
    scores = shapes[1]
    batch, classes, boxes = scores
    if 0 in scores or len(node.inputs) < 3 or node.inputs[2] is None:
        return [op.constant(np.zeros((0, 3), np.int64))]
    center = attr(node, "center_point_box", 0)
    chosen, counts = op.node(
        "NmsChosen", list(node.inputs), outputs=2, domain=FUSE, center_point_box=center
    )
    rank = op.constant(np.arange(boxes).reshape(1, 1, -1))
    length = batch * classes * boxes
    keep = op.Reshape(op.Less(rank, op.Unsqueeze(counts, [2])), [length])
    at, _ = _kept(op, keep, length)
    columns = (
        op.Div(at, classes * boxes),
        op.Mod(op.Div(at, boxes), classes),
        op.Gather(op.Reshape(chosen, [length]), at),
    )
    return [op.Concat(*(op.Unsqueeze(c, [1]) for c in columns), axis=1)]


DECOMPOSED = {
    ("", "Compress"): compress,
    ("", "NonMaxSuppression"): nms,
    ("", "NonZero"): nonzero,
    ("", "Unique"): unique,
}

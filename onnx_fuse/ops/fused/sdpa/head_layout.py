"""Operands of two, three, five and more axes as [B, H, S, D], and masks in those axes.

Attention operators take four axes. What a graph has instead is brought there by views: a batch of
heads is taken apart again, windows are one axis with the batch. A mask may have been added where
the scores had other axes than the products; it is brought to the products' axes too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, dim, rank, required
from onnx_fuse.ops.fused.sdpa.scores import Scores
from onnx_fuse.ops.rules import attribute, producer, typed
from onnx_fuse.ops.shape_ops import same_size
from onnx_fuse.reasons import Reason


@dataclass
class Frame:
    """q, k, v with four axes each; how masks come to them and how the result goes back."""

    qkv: tuple[ir.Value, ir.Value, ir.Value]
    size: int
    """Axes of the graph's own operands."""
    split: ir.Value | None = None
    """The scores [B, H, S, T], where the products have the heads in the batch: [B·H, S, T]."""
    merged: tuple[ir.Value, ir.Value, ir.Value] | None = None
    """The graph's own q, k, v of five and more axes."""
    product: ir.Value | None = None
    """The scores as the product gives them."""

    def back(self, op: Builder, y: ir.Value) -> ir.Value:
        """The result [B, H, S, Dv] in the axes that the graph has."""
        if self.split is not None:  # [B·H, S, Dv]
            lead = op.ReduceProd(op.Shape(y, start=0, end=2))
            return _shaped(op, y, [op.Reshape(lead, [1]), op.Shape(y, start=2)])
        if self.merged is not None:
            q, _, v = self.merged
            return _shaped(op, y, [op.Shape(q, start=0, end=-1), op.Shape(v, start=-1)])
        if self.size < 4:
            axes = [1] if self.size == 3 else [0, 1]
            shape = None if y.shape is None else [d for i, d in enumerate(y.shape) if i not in axes]
            return typed(op.Squeeze(y, op.constant(axes)), y, shape)
        return y

    def under(self, op: Builder, mask: ir.Value, scores: ir.Value) -> ir.Value:
        """`mask`, which is broadcast to `scores` of the graph, for [B, H, S, T]."""
        level, mask_rank = required(rank(scores)), required(rank(mask))
        if mask_rank <= 2:
            return mask
        if self.merged is not None:
            return self._with_merged_batch(op, mask, scores)
        if self.split is not None:
            return mask if level == 4 else self._with_split_batch(op, mask)
        if level == self.size:
            if self.size == 3:
                return _unsqueezed(op, mask, [1])
            return mask
        if level > self.size:
            return self._with_merged_batch(op, mask, scores)
        # the level lacks axes of size 1: the last of them, or the batch
        batches = dim(required(self.product), -3)
        return _unsqueezed(op, mask, [mask_rank - 2]) if batches == 1 else mask

    def _with_split_batch(self, op: Builder, mask: ir.Value) -> ir.Value:
        """[B·H or 1, S, T] as [B, H, S, T] or [1, 1, S, T]."""
        if dim(mask, 0) == 1:
            return _unsqueezed(op, mask, [0])
        heads = op.Shape(self.qkv[0], start=0, end=2)
        # To all of [B·H, ...] first: only then is B·H sure to split into B and H.
        rows = op.Reshape(op.ReduceProd(heads), [1])
        full = op.Expand(mask, op.Concat(rows, [1, 1], axis=0))
        return _shaped(op, typed(full, mask), [heads, op.Shape(full, start=1)], 4)

    def _with_merged_batch(self, op: Builder, mask: ir.Value, scores: ir.Value) -> ir.Value:
        """[W1, .., Wn, H, S, T] as [W1 · .. · Wn, H, S, T], axes of 1 expanded where any is not."""
        level, mask_rank = rank(scores) or 0, rank(mask) or 0
        heads = 0 if self.size == 3 else 1  # axes between the batch and the queries
        count = level - 2 - heads
        if mask_rank <= 2 + heads:
            return mask
        if mask_rank < level:
            mask = _unsqueezed(op, mask, list(range(level - mask_rank)))
        if all(dim(mask, i) == 1 for i in range(count)):
            drop = list(range(count - 1))
            if drop:
                shape = None if mask.shape is None else mask.shape[len(drop) :]
                mask = typed(op.Squeeze(mask, op.constant(drop)), mask, shape)
        else:
            sizes = self._leading(op, scores, count)
            wide = op.Concat(*sizes, op.constant([1] * (2 + heads)), axis=0)
            full = typed(op.Expand(mask, wide), mask)
            batch = op.Reshape(op.ReduceProd(op.Concat(*sizes, axis=0)), [1])
            mask = _shaped(op, full, [batch, op.Shape(full, start=count)], 3 + heads)
        return _unsqueezed(op, mask, [1]) if self.size == 3 else mask

    def _leading(self, op: Builder, scores: ir.Value, count: int) -> list[ir.Value]:
        """The sizes of the first `count` axes of `scores`, one of which may be open: the batch has
        as many rows as all of them together.
        """
        sizes = [dim(scores, i) for i in range(count)]
        if self.merged is not None:
            return [op.Shape(self.merged[0], start=i, end=i + 1) for i in range(count)]
        batch = op.Shape(self.qkv[0], start=0, end=1)
        others = prod(size for size in sizes if size is not None)
        return [op.Div(batch, [others]) if size is None else op.constant([size]) for size in sizes]


def make_frame(op: Builder, traced: Scores, qkv: Sequence[ir.Value]) -> Frame | Reason:
    """The frame of a product and its steps; why there is none."""
    q, k, v = qkv
    product = traced.product.outputs[0]
    size = rank(product) or 0
    levels = [step.at for step in traced.steps]
    ranks = {rank(level) for level in levels}
    if size == 3 and 4 in ranks and ranks <= {3, 4}:
        frame = _split(op, traced, q, k, v)
        if frame is not None:
            return frame
    for level in levels:
        if traced.viewed and not _has_axes_of(product, level, q, size):
            return Reason("leading-axes", above="the matrix multiplication", below="a mask")
    if size > 4:
        return _merged(op, q, k, v, product)
    if size < 4:
        axes = [1] if size == 3 else [0, 1]
        q, k, v = (_unsqueezed(op, t, axes) for t in (q, k, v))
    return Frame((q, k, v), size, product=product)


def _has_axes_of(product: ir.Value, level: ir.Value, q: ir.Value, size: int) -> bool:
    """Whether a mask added to `level`, a view of the product's scores, comes to its axes."""
    level_rank = rank(level) or 0
    if level_rank == size:
        return size <= 3 or (size == 4 and same_size(product, 1, level, 1))
    if level_rank < size:
        return size == 4 and level_rank == 3 and 1 in (dim(product, 0), dim(product, 1))
    heads = 0 if size == 3 else 1
    unknown = sum(dim(level, i) is None for i in range(level_rank - 2 - heads))
    known = size == 3 or (size == 4 and same_size(product, -3, level, -3))
    return known and unknown <= 1 and same_size(product, 0, q, 0)


def _split(op: Builder, traced: Scores, q: ir.Value, k: ir.Value, v: ir.Value) -> Frame | None:
    """The heads taken out of the batch again, where they were folded into it right before."""
    level = next(step.at for step in traced.steps if rank(step.at) == 4)
    heads = dim(level, 1)
    four = [_unfolded(op, t, heads) for t in (q, k, v)]
    if any(t is None for t in four):
        return None
    a, b, c = (t for t in four if t is not None)
    return Frame((a, b, c), 3, split=level, product=traced.product.outputs[0])


def _unfolded(op: Builder, value: ir.Value, heads: int | None) -> ir.Value | None:
    """[B, H, S, D] behind [B·H, S, D]; under a Transpose of the last two axes, too."""
    turn = producer(value, "Transpose")
    if turn is not None and list(attribute(turn, "perm", ())) != [0, 2, 1]:
        return None
    below = producer(value if turn is None else turn.inputs[0], "Reshape")
    source = below.inputs[0] if below is not None else None
    if source is None or rank(source) != 4 or not heads or dim(source, 1) != heads:
        return None
    width = dim(source, -1 if turn is None else -2)
    if width is None or width != dim(value, -1):
        return None
    if turn is None:
        return source
    sizes = required(source.shape)
    return typed(op.Transpose(source, perm=[0, 1, 3, 2]), source, [sizes[i] for i in (0, 1, 3, 2)])


def _merged(
    op: Builder, q: ir.Value, k: ir.Value, v: ir.Value, product: ir.Value
) -> Frame | Reason:
    """Merge all axes but the last three into one, where there are five or more."""
    size = rank(product) or 0
    for axis in range(size - 3):
        if not (same_size(q, axis, k, axis) and same_size(q, axis, v, axis)):
            return Reason("sizes-apart", what=f"axis {axis} of queries, keys and values")
    four = []
    for t in (q, k, v):
        lead = op.Reshape(op.ReduceProd(op.Shape(t, start=0, end=-3)), [1])
        wide = _shaped(op, t, [lead, op.Shape(t, start=-3)])
        sizes = [dim(t, i) for i in range(size - 3)]
        batch = None if None in sizes else prod(s for s in sizes if s is not None)
        if t.shape is not None:
            wide.shape = ir.Shape([batch, *t.shape[-3:]])
        four.append(wide)
    return Frame((four[0], four[1], four[2]), size, merged=(q, k, v), product=product)


def _shaped(
    op: Builder, x: ir.Value, sizes: Sequence[ir.Value], count: int | None = None
) -> ir.Value:
    """`x` as a view of the sizes joined, zeros among them too."""
    y: ir.Value = op.Reshape(x, op.Concat(*sizes, axis=0), allowzero=1)
    return typed(y, x, None if count is None else [None] * count)


def _unsqueezed(op: Builder, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    shape = None
    if x.shape is not None:
        dims = list(x.shape)
        for axis in axes:
            dims.insert(axis, 1)
        shape = dims
    return typed(op.Unsqueeze(x, list(axes)), x, shape)

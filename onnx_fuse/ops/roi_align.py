"""RoiAlign: averages of samples in boxes, which are products with two matrices of weights.

The samples of a box lie on a grid, so that their bilinear weights are products of a row's and a
column's: y[r, c] = A[r] · x[b(r), c] · B[r]ᵀ with A [R, P, H] and B [R, Q, W], for R boxes, bins
[P, Q] and images [N, C, H, W].
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.shape_ops import Values, Writer, arguments, fail, text


def _roi_align(op: Writer, node: ir.Node, dys: Values) -> Values:
    """dx = Σ over an image's boxes of Aᵀ dy B; a box's gradient by those of A and B."""
    (x, boxes, batch), dy = arguments(node, 3), dys[0]
    samples = node.attributes.get_int("sampling_ratio", 0)
    if text(node, "mode", "avg") != "avg":
        raise fail(node, "its mode is max")
    half = text(node, "coordinate_transformation_mode", "half_pixel") == "half_pixel"
    scale = node.attributes.get_float("spatial_scale", 1.0)
    ends = op.Sub(op.Mul(boxes, scale), 0.5) if half else op.Mul(boxes, scale)
    images, channels, height, width = (op.Shape(x, start=i, end=i + 1) for i in range(4))
    p, q = (node.attributes.get_int(f"output_{name}", 1) for name in ("height", "width"))
    rows = _Weights(op, ends, 1, p, samples, height, x, at_least_one=not half)
    columns = _Weights(op, ends, 0, q, samples, width, x, at_least_one=not half)

    # dx [N, H, C W] = M [N, H, R P] · (dy B) [R P, C W], M the rows' weights of the image's boxes
    spread = op.MatMul(dy, op.Unsqueeze(columns.weights, [1]))  # [R, C, P, W]
    number = op.counted(op.Squeeze(images))
    of_image = op.Equal(op.Unsqueeze(number, [1]), op.Cast(batch, to=int(ir.DataType.INT64)))
    turned = op.Transpose(rows.weights, perm=[2, 0, 1])  # [H, R, P]
    parts = op.Mul(turned, op.Unsqueeze(op.to_like(of_image, x), [1, 3]))
    count = op.Mul(op.Shape(boxes, start=0, end=1), [p])
    left = op.Reshape(parts, op.Concat(images, height, count, axis=0), allowzero=1)
    area = op.Mul(channels, width)
    right = op.Reshape(
        op.Transpose(spread, perm=[0, 2, 1, 3]), op.Concat(count, area, axis=0), allowzero=1
    )
    shape = op.Concat(images, height, channels, width, axis=0)
    dx = op.Transpose(op.Reshape(op.MatMul(left, right), shape, allowzero=1), perm=[0, 2, 1, 3])

    # dA[r] = Σ over channels of dy (x B ᵀ)ᵀ, and dB likewise
    image = op.Gather(x, batch, axis=0)  # [R, C, H, W]
    across = op.MatMul(op.Unsqueeze(columns.weights, [1]), op.Transpose(image, perm=[0, 1, 3, 2]))
    d_rows = op.ReduceSum(op.MatMul(dy, across), [1], keepdims=0)  # [R, P, H]
    down = op.MatMul(op.Unsqueeze(rows.weights, [1]), image)  # [R, C, P, W]
    d_columns = op.MatMul(op.Transpose(dy, perm=[0, 1, 3, 2]), down)
    d_columns = op.ReduceSum(d_columns, [1], keepdims=0)  # [R, Q, W]
    y1, y2 = rows.ends(d_rows)
    x1, x2 = columns.ends(d_columns)
    return [dx, op.Mul(op.Concat(x1, y1, x2, y2, axis=1), scale), None]


class _Weights:
    """What the samples of one axis take of its `length` pixels, and how that changes."""

    def __init__(
        self, op: Writer, ends: ir.Value, first: int, bins: int, samples: int, length: ir.Value,
        like: ir.Value, *, at_least_one: bool,
    ) -> None:  # fmt: skip
        self.op, self.bins = op, bins
        start, end = (op.Slice(ends, [i], [i + 1], [1]) for i in (first, first + 2))  # [R, 1]
        extent = op.Sub(end, start)
        self.moves = None
        """Whether the end moves the samples: not where a box is smaller than a pixel."""
        if at_least_one:
            self.moves = op.to_like(op.Greater(extent, 1.0), like)
            extent = op.Max(extent, 1.0)
        if samples > 0:
            self.samples = op.constant([samples])
            within = (np.arange(bins * samples) + 0.5) / (samples * bins)
            self.within, part = op.CastLike(op.constant(within), like), 1 / samples
        else:
            self.within, part = self._by_size(extent, like)
        place = op.Add(start, op.Mul(extent, self.within))  # [R, bins · samples]
        last = op.Sub(op.to_like(length, like), 1.0)
        near = op.And(op.GreaterOrEqual(place, -1.0), op.LessOrEqual(place, op.Add(last, 1.0)))
        inside = op.And(op.Greater(place, 0.0), op.Less(place, last))
        at = op.Unsqueeze(op.Max(op.Min(place, last), 0.0), [2])
        pixel = op.to_like(op.counted(op.Squeeze(length)), like)
        away = op.Sub(at, pixel)  # [R, bins · samples, length]
        share = op.Unsqueeze(op.Mul(op.to_like(near, like), part), [2])
        full = op.Mul(op.Max(op.Sub(1.0, op.Abs(away)), 0.0), share)
        near_pixel = op.to_like(op.Less(op.Abs(away), 1.0), like)
        moving = op.Mul(share, op.Unsqueeze(op.to_like(inside, like), [2]))
        self.slopes = op.Mul(op.Mul(op.Neg(op.Sign(away)), near_pixel), moving)
        self.weights = op.ReduceSum(self._apart(full), [2], keepdims=0)

    def _by_size(self, extent: ir.Value, like: ir.Value) -> tuple[Any, Any]:
        """Where the samples are within the extent, and each one's part of its bin's average.

        A bin has a sample for each pixel that it begins. Both results are [R, bins · samples] with
        the samples of the largest box; those that a smaller one lacks have a part of 0.
        """
        op = self.op
        count = op.Max(op.Ceil(op.Div(extent, float(self.bins))), 0.0)  # [R, 1]
        least = op.CastLike(op.constant(np.ones((1, 1))), like)
        most = op.ReduceMax(op.Concat(count, least, axis=0), keepdims=0)
        most = op.Cast(most, to=int(ir.DataType.INT64))
        self.samples = op.Unsqueeze(most, [0])
        number = op.to_like(op.counted(most), like)  # [samples]
        divisor = op.Max(count, 1.0)
        each = op.Unsqueeze(op.Div(op.Add(number, 0.5), divisor), [1])  # [R, 1, samples]
        before = op.CastLike(op.constant(np.arange(self.bins)[:, None] + 0.0), like)
        within = op.Mul(op.Add(each, before), 1 / self.bins)
        part = op.Unsqueeze(op.Div(op.to_like(op.Less(number, count), like), divisor), [1])
        part = op.Add(part, op.Mul(before, 0.0))
        return op.Flatten(within, axis=1), op.Flatten(part, axis=1)

    def _apart(self, values: ir.Value) -> Any:
        """[R, bins · samples, length] as [R, bins, samples, length]."""
        op = self.op
        sizes = op.Concat(
            op.Shape(values, start=0, end=1), [self.bins], self.samples,
            op.Shape(values, start=2, end=3), axis=0,
        )  # fmt: skip
        return op.Reshape(values, sizes, allowzero=1)

    def ends(self, d_weights: ir.Value) -> tuple[Any, Any]:
        """The gradients [R, 1] of a box's start and end by those of the weights."""
        op = self.op
        slopes = self._apart(self.slopes)
        each = op.ReduceSum(op.Mul(op.Unsqueeze(d_weights, [2]), slopes), [3], keepdims=0)
        moved = op.Flatten(each, axis=1)
        total = op.ReduceSum(moved, [1])
        far = op.ReduceSum(op.Mul(moved, self.within), [1])
        if self.moves is not None:
            far = op.Mul(far, self.moves)
        return op.Sub(total, far), far


register(OpDef("RoiAlign", grad=_roi_align))

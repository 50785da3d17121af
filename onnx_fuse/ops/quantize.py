"""Quantization: straight-through gradients of rounding, and those of scales."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import dim
from onnx_fuse.ops.opdef import OpDef, no_grad, register
from onnx_fuse.ops.shape_ops import (
    Tensor,
    Values,
    Writer,
    arguments,
    dims,
    fail,
    known_rank,
    norm_axis,
)

_WIDE = ir.DataType.FLOAT
"""The type of codes, quotients and sums: 16 bits do not hold those of 16."""


@dataclass(frozen=True)
class _Scaling:
    """How the scale and the zero point of a node lie along its x: for all, by an axis, by blocks.

    Blocks become an axis of their own, the last of them filled up with zeros.
    """

    op: Writer
    x: ir.Value
    scale: ir.Value
    axis: int | None
    block: int
    count: int

    @classmethod
    def of(cls, op: Writer, node: ir.Node) -> _Scaling:
        (x, scale), block = arguments(node, 2), node.attributes.get_int("block_size", 0)
        per_axis = block > 0 or (len(scale.shape or ()) == 1 and dim(scale, 0) != 1)
        axis = norm_axis(node.attributes.get_int("axis", 1), x) if per_axis else None
        count = 0
        if axis is not None and block:
            if dims(x) is None or (blocks := dims(scale)) is None:
                raise fail(node, "the number of its blocks is not known")
            count = blocks[axis]
        return cls(op, x, scale, axis, block, count)

    def split(self, value: Tensor) -> Tensor:
        """A value of the shape of x, with its blocks as an axis of their own."""
        if not self.block or self.axis is None:
            return value
        sizes = dims(self.x) or []
        if short := self.count * self.block - sizes[self.axis]:
            value = self.op.pad(value, [self.axis], [0], [short])
        split = [*sizes[: self.axis], self.count, self.block, *sizes[self.axis + 1 :]]
        return self.op.reshape(value, split)

    def join(self, value: Tensor) -> Tensor:
        """What `split` made of a value, in the shape of x again."""
        if not self.block or self.axis is None:
            return value
        sizes = dims(self.x) or []
        whole = [*sizes[: self.axis], self.count * self.block, *sizes[self.axis + 1 :]]
        value = self.op.reshape(value, whole)
        return self.op.pad(value, [self.axis], [0], [sizes[self.axis] - whole[self.axis]])

    def spread(self, value: Tensor) -> Tensor:
        """A value of the shape of the scale, in a shape that broadcasts to that of `split`."""
        if self.axis is None:
            return (
                self.op.Reshape(value, self.op.constant(np.zeros(0, np.int64)))
                if value.shape
                else value
            )
        if self.block:
            return self.op.Unsqueeze(value, [self.axis + 1])
        after = known_rank(self.x) - self.axis
        return self.op.Unsqueeze(value, list(range(1, after))) if after > 1 else value

    def total(self, value: Tensor) -> Tensor:
        """The sum of a value of the shape of `split` over what shares a scale."""
        axes = [a for a in range(known_rank(self.x)) if a != self.axis]
        if self.block and self.axis is not None:
            axes = [self.axis + 1]
        total = self.op.to_like(self.op.sum_over(value, axes), self.scale)
        if self.axis is not None and not self.block:  # an open size may be 1, for all of the axis
            return self.op.unbroadcast(total, self.scale)
        return self.op.reshape_like(total, self.scale)


def _dequantize(op: Writer, node: ir.Node, dys: Values) -> Values:
    """y = (x - zero_point) · scale: the gradient of x stays real, as if x had not been rounded."""
    (x, scale, zero), dy, scaling = arguments(node, 3), dys[0], _Scaling.of(op, node)
    codes = scaling.split(op.to_type(x, _WIDE))
    if zero is not None:
        codes = op.Sub(codes, scaling.spread(op.to_type(zero, _WIDE)))
    dscale = scaling.total(op.Mul(scaling.split(op.to_type(dy, _WIDE)), codes))
    dx = op.Mul(scaling.split(dy), scaling.spread(op.to_like(scale, dy)))
    return [scaling.join(dx), dscale]


def dequantized(op: Writer, node: ir.Node) -> Tensor:
    """A DequantizeLinear in other operators, of whatever type its scale has."""
    (x, scale, zero), scaling = arguments(node, 3), _Scaling.of(op, node)
    codes = scaling.split(op.to_like(x, scale))
    if zero is not None:
        codes = op.Sub(codes, scaling.spread(op.to_like(zero, scale)))
    return scaling.join(op.Mul(codes, scaling.spread(scale)))


def _quantize(op: Writer, node: ir.Node, dys: Values) -> Values:
    """y = saturate(round(x / scale) + zero_point), where what rounding adds counts as a constant.

    What saturates passes nothing on: a code out of range, and a quotient beyond the largest number
    of a float of few bits.
    """
    (x, scale, zero), scaling = arguments(node, 3), _Scaling.of(op, node)
    step = scaling.spread(op.to_type(scale, _WIDE))
    ratio = op.Div(scaling.split(op.to_type(x, _WIDE)), step)
    kind, code = node.outputs[0].dtype or ir.DataType.UINT8, ratio
    if kind.is_integer():
        code = op.Round(ratio)
        if zero is not None:
            code = op.Add(code, scaling.spread(op.to_type(zero, _WIDE)))
    inside = f"And(code >= {float(kind.min)}, code <= {float(kind.max)})"
    dy = scaling.split(op.to_type(dys[0], _WIDE))
    dx = op.Div(op.formula(f"Where({inside}, dy, 0)", code=code, dy=dy), step)
    dscale = scaling.total(op.Neg(op.Mul(dx, ratio)))
    return [op.to_like(scaling.join(dx), x), dscale]


def _quantize_dynamically(op: Writer, node: ir.Node, dys: Values) -> Values:
    """The scale is (max(x, 0) - min(x, 0)) / 255, by which nothing saturates."""
    (x,), (dy, dscale, *_) = arguments(node, 1), [*dys, None, None]
    direct = None
    if dy is not None:
        direct = op.Div(dy, node.outputs[1])
        through = op.Neg(op.ReduceSum(op.Mul(direct, op.Div(x, node.outputs[1])), keepdims=0))
        dscale = through if dscale is None else op.Add(dscale, through)
    if dscale is None:
        return [None]

    def slope(extreme: str, beyond: str) -> Tensor:
        """d extreme / d x, divided evenly among equal elements; 0 where the extreme is 0 itself."""
        here = f"here = CastLike(And(x == {extreme} <keepdims = 0> (x), {beyond}), x)"
        return op.formula(f"{here}; here / Max(ReduceSum <keepdims = 0> (here), 1)", x=x)

    above, below = slope("ReduceMax", "x > 0"), slope("ReduceMin", "x < 0")
    ranged = op.formula("(above - below) * (d / 255)", above=above, below=below, d=dscale)
    return [ranged if direct is None else op.Add(direct, ranged)]


register(
    OpDef("QuantizeLinear", grad=_quantize),
    OpDef("DequantizeLinear", grad=_dequantize),
    OpDef("DynamicQuantizeLinear", grad=_quantize_dynamically),
)
no_grad("it rounds to integers", *("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"))

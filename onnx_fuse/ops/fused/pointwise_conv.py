"""A Conv of 1 x 1 behind a norm over the channels becomes a product, which takes the norm in.

Networks of convolutions norm their channels between two Transposes: N H W C, where the channels lie
last, and back to N C H W. A Conv of one tap multiplies each pixel's channels by a matrix, so

    Conv(Transpose(x), w, c) = Transpose(x · wᵀ + c),  x [N, H, W, C], w [M, C, 1, 1], c [M]

and LayerNormGemm then fuses the norm with the product. The Transpose behind moves M numbers a pixel
where the one before moved C. On onnxruntime's CPU a ConvNeXt takes 1.13 of its time so (there a
Conv is faster than Transpose and product), so that only graphs for own kernels have it.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, given, rank
from onnx_fuse.ops.fused.activations import activation_of
from onnx_fuse.ops.fused.norm import canonical_norm
from onnx_fuse.ops.rules import (
    Rewriter,
    Rule,
    attribute,
    producer,
    sole_consumer,
    through_row_views,
    typed,
)
from onnx_fuse.reasons import Reason

NAME = "ConvAsGemm"
_NARROW = 2
"""The product pays where the Transpose behind moves at most so many times the channels: the norm's
own pass reads and writes each of them once."""


@dataclass(frozen=True)
class _Pointwise:
    """A Conv whose filters are single taps: y[n, :, pixel] = w · x[n, :, pixel] + bias."""

    node: ir.Node
    x: ir.Value
    w: ir.Value
    filters: int
    channels: int


def _pointwise(node: ir.Node | None) -> _Pointwise | None:
    """`node` as a Conv of single taps of one group, neither padded nor stepped; else None."""
    if node is None or node.op_type != "Conv" or node.domain:
        return None
    x, w = node.inputs[0], node.inputs[1]
    size, filters, channels = rank(w), dim(w, 0), dim(w, 1)
    if x is None or w is None or not size or size < 3 or not filters or not channels:
        return None
    taps = [dim(w, i) for i in range(2, size)]
    if any(d != 1 for d in taps) or attribute(node, "group", 1) != 1:
        return None
    pads, strides = attribute(node, "pads", []), attribute(node, "strides", [])
    if any(pads) or any(step != 1 for step in strides):
        return None
    return _Pointwise(node, x, w, filters, channels)


def _product(rw: Rewriter, op: Builder, conv: _Pointwise, x: ir.Value) -> ir.Value:
    """x · wᵀ + c for `x` [N, ..., C] -> [N, ..., M]."""
    array = const_array(conv.w)
    shape = [conv.filters, conv.channels]
    if array is None or rw.training:
        w = op.Transpose(typed(op.Reshape(conv.w, op.constant(shape)), conv.w, shape), perm=[1, 0])
        w = typed(w, conv.w, shape[::-1])
    else:
        w = rw.initializer(f"{conv.w.name}.T", array.reshape(shape).T)
    y = op.MatMul(x, w)
    bias = given(conv.node, 2)
    sizes = [*(x.shape or ())[:-1], conv.filters]
    y = typed(y, x, sizes)
    return y if bias is None else typed(op.Add(y, bias), x, sizes)


def _next(conv: _Pointwise) -> tuple[ir.Node, _Pointwise] | None:
    """The activation of `conv` alone, and the Conv of single taps that alone reads it."""
    z = conv.node.outputs[0]
    act = sole_consumer(z)
    if act is None or activation_of(act) is None or [*act.inputs].count(z) != 1:
        return None
    second = _pointwise(sole_consumer(act.outputs[0]))
    return None if second is None or second.x is not act.outputs[0] else (act, second)


def _rewrite(rw: Rewriter, node: ir.Node) -> bool:
    conv = _pointwise(node)
    turn = producer(conv.x, "Transpose") if conv is not None else None
    if conv is None or turn is None or turn.inputs[0] is None or rank(conv.x) is None:
        return False
    rows = turn.inputs[0]
    perm = attribute(turn, "perm", [])
    below, _ = through_row_views(rows)
    norm = canonical_norm(below.producer() if below is not None else None)
    channels = (rank(conv.x) or 0) - 1  # become the second axis
    if list(perm) != [0, channels, *range(1, channels)] or norm is None:
        return False
    if sole_consumer(conv.x) is not node or sole_consumer(rows) is not turn:
        reason = Reason("other-readers", what="the norm or its Transpose")
        return rw.refuse(NAME, [norm.node, node], reason)
    behind = _next(conv)
    width = behind[1].filters if behind is not None else conv.filters
    if width > _NARROW * conv.channels:
        reason = Reason("transpose-cost", width=width, channels=conv.channels)
        return rw.refuse(NAME, [norm.node, node], reason)
    if NAME not in rw.for_kernels:
        return rw.refuse(NAME, [norm.node, node], Reason("cpu-slower"))
    op = Builder()
    y, last = _product(rw, op, conv, rows), conv
    if behind is not None:
        act, last = behind
        inputs = [y if v is conv.node.outputs[0] else v for v in act.inputs]
        activated = op.node(act.op_type, inputs, domain=act.domain, attributes=act.attributes)
        assert isinstance(activated, ir.Value)
        y = _product(rw, op, last, typed(activated, y, y.shape))
    y = typed(op.Transpose(y, perm=perm), last.node.outputs[0], last.node.outputs[0].shape)
    return rw.replace(last.node, op, [last.node.outputs[0]], [y])


RULES = (Rule(NAME, 1, ("Conv",), _rewrite, conditions="readers types ranks body"),)

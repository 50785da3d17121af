"""GroupNorm with every activation: y = act((x - mean) / sqrt(variance + epsilon) * scale + bias).

x [N, C, ...], scale and bias [C, 1, ...]; mean and variance are of each of `num_groups`
groups of channels. The body is what exporters write, InstanceNormalization of [N, groups, rest].

The gradient is one operator too, GroupNorm<Act>Grad, which keeps nothing of the forward but x. With
xh = (x - mean) rstd, z = xh scale + bias, dz = dy act'(z) and means over a group:
dx = rstd (dz scale - mean(dz scale) - xh mean(dz scale xh)),  dscale = sum dz xh,  dbias = sum dz.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, rank, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.activations import ACTIVATIONS, Activation
from onnx_fuse.ops.fused.activations import activation_of
from onnx_fuse.ops.fused.gradients import STASH
from onnx_fuse.ops.opdef import OpDef, fused_op, register
from onnx_fuse.ops.rules import (
    Rewriter,
    Rule,
    attribute,
    combined_with,
    constant_ints,
    is_float,
    producer,
    sole_consumer,
)
from onnx_fuse.ops.shape_ops import Values, Writer, restores, same_size
from onnx_fuse.reasons import Reason

_ATTRIBUTES = ("num_groups", "epsilon: float = 1e-05", STASH)
_BODY = """
  first = [0]
  rest = [-1]
  groups = Unsqueeze (Constant <value_int: int = @num_groups> (), first)
  by_group = Concat <axis: int = 0> (first, groups, rest)
  x_shape = Shape (x)
  xs = Cast <to: int = @stash_type> (x)
  xg = Reshape (xs, by_group)
  ones = CastLike (ConstantOfShape <value: tensor = float[1] {1.0}> (groups), xs)
  zeros = CastLike (ConstantOfShape <value: tensor = float[1] {0.0}> (groups), xs)
  ng = InstanceNormalization <epsilon: float = @epsilon> (xg, ones, zeros)
  n = CastLike (Reshape <allowzero: int = 1> (ng, x_shape), x)
  m = n * scale
"""


_NODE = """
  scale1 = Reshape (scale, [-1])
  bias1 = Reshape (bias, [-1])
  {z} = GroupNormalization <num_groups: int = @num_groups, epsilon: float = @epsilon,
    stash_type: int = @stash_type> (x, scale1, bias1)
"""
"""The body where the graph had that node: of huge numbers onnxruntime's own variance is another."""

_GRAD = """
    first = [0]
    rest = [-1]
    groups = Unsqueeze (Constant <value_int: int = @num_groups> (), first)
    by_group = Concat <axis: int = 0> (first, groups, rest)
    by_channel = [0, 0, -1]
    x_shape = Shape (x)
    scale_shape = Shape (scale)
    xs = Cast <to: int = @stash_type> (x)
    xg = Reshape (xs, by_group)
    xm = xg - ReduceMean <keepdims: int = 1> (xg, [2])
    std = Sqrt (ReduceMean <keepdims: int = 1> (xm * xm, [2]) + @epsilon)
    xhg = xm / std
    xh = Reshape (Reshape <allowzero: int = 1> (xhg, x_shape), by_channel)
    dys = CastLike (Reshape (dy, by_channel), xs)
    scales = CastLike (Reshape (scale, [-1, 1]), xs)
    z = xh * scales + CastLike (Reshape (bias, [-1, 1]), xs)
    {dz}
    ps = ReduceSum <keepdims: int = 0> (dz * xh, [0, 2])
    dscale = CastLike (Reshape (ps, scale_shape), scale)
    bs = ReduceSum <keepdims: int = 0> (dz, [0, 2])
    dbias = CastLike (Reshape (bs, scale_shape), scale)
    dxh = Reshape (Reshape <allowzero: int = 1> (dz * scales, x_shape), by_group)
    m1 = ReduceMean <keepdims: int = 1> (dxh, [2])
    m2 = ReduceMean <keepdims: int = 1> (dxh * xhg, [2])
    dxg = (dxh - m1 - xhg * m2) / std
    dx = CastLike (Reshape <allowzero: int = 1> (dxg, x_shape), x)
"""


def _grad(op: Writer, node: ir.Node, dys: Values) -> Values:
    activation = FusedName.of(node.op_type).activation
    name = str(FusedName.make("GroupNorm", activation, grad=True))
    attributes = {k: a.value for k, a in node.attributes.items()}
    return list(op.emit(name, [dys[0], *node.inputs], list(node.inputs), **attributes))


def _define_grad(activation: Activation | None) -> OpDef:
    act = activation.name if activation else ""
    name = str(FusedName.make("GroupNorm", act, grad=True))
    attributes = [*_ATTRIBUTES, activation.attributes if activation else ""]
    dz = activation.gradient_text(dy="dys") if activation else "dz = Identity (dys)"
    text = _GRAD.format(dz=dz)
    return fused_op(name, attributes, "dy, x, scale, bias", "dx, dscale, dbias", text)


def _define(activation: Activation | None) -> OpDef:
    name = str(FusedName.make("GroupNorm", activation.name if activation else ""))
    attributes = [*_ATTRIBUTES, activation.attributes if activation else ""]
    z, tail = ("z", f"  y = {activation.forward}") if activation else ("y", "")
    text, newer = f"{_BODY}  {z} = m + bias\n{tail}", f"{_NODE.format(z=z)}{tail}"
    return fused_op(name, attributes, "x, scale, bias", "y", text, newer=newer, grad=_grad)


register(*(make(a) for make in (_define, _define_grad) for a in (None, *ACTIVATIONS.values())))


# ---- recognition -----------------------------------------------------------------------------


def _written_out(rw: Rewriter, node: ir.Node) -> bool:
    """InstanceNormalization of [N, groups, rest], and back, times a scale and plus a bias."""
    x3, ones, zeros = node.inputs[:3]
    split, back = producer(x3, "Reshape"), sole_consumer(node.outputs[0])
    x, groups, channels = split.inputs[0] if split else None, dim(x3, 1), None
    if x is None or x3 is None or split is None or not groups or node.domain:
        return False
    channels = dim(x, 1)
    if rank(x3) != 3 or (rank(x) or 0) < 2 or channels is None or channels % groups:
        return False
    if constant_ints(split.inputs[1]) != [0, groups, -1] and not same_size(x, 0, x3, 0):
        return False
    nodes = [node]
    if back is None or back.op_type != "Reshape" or not restores(back, x):
        return rw.refuse("GroupNorm", nodes, Reason("group-reshape"))
    if not (_holds(ones, 1) and _holds(zeros, 0)):
        return rw.refuse("GroupNorm", nodes, Reason("group-scale"))
    n = back.outputs[0]
    scale = _by_channel(n, "Mul", channels)
    bias = _by_channel(scale[0], "Add", channels) if scale is not None else None
    if scale is None or bias is None:
        return rw.refuse("GroupNorm", nodes, Reason("group-scale"))
    double = x.dtype == ir.DataType.DOUBLE
    attributes: dict[str, object] = {
        "num_groups": groups,
        "epsilon": attribute(node, "epsilon", 1e-5),
        "stash_type": int(ir.DataType.DOUBLE if double else ir.DataType.FLOAT),
    }
    return _fuse_with_activation(rw, Builder(), "", x, (scale[1], bias[1]), bias[0], attributes)


def _native(rw: Rewriter, node: ir.Node) -> bool:
    """ai.onnx's GroupNormalization, whose scale and bias are a channel's from opset 21 on."""
    if node.domain or any(v is None for v in node.inputs[:3]):
        return False
    x, scale, bias = node.inputs[:3]
    channels = dim(x, 1)
    stash = attribute(node, "stash_type", 1)
    wide = stash == 1 or (stash == 11 and x is not None and x.dtype == ir.DataType.DOUBLE)
    if x is None or scale is None or bias is None or channels is None or not is_float(x):
        return rw.refuse("GroupNorm", [node], Reason("unknown", what="its number of channels"))
    if dim(scale, 0) != channels or dim(bias, 0) != channels:
        return rw.refuse("GroupNorm", [node], Reason("group-scale"))
    if not wide or (x.dtype == ir.DataType.DOUBLE and stash == 1):
        return rw.refuse("GroupNorm", [node], Reason("group-sums"))
    attributes = {
        "num_groups": attribute(node, "num_groups", 1),
        "epsilon": attribute(node, "epsilon", 1e-5),
        "stash_type": stash,
    }
    op = Builder()
    column = op.constant([channels] + [1] * ((rank(x) or 2) - 2))
    affine = op.Reshape(scale, column), op.Reshape(bias, column)
    return _fuse_with_activation(rw, op, "newer", x, affine, node.outputs[0], attributes)


def _fuse_with_activation(
    rw: Rewriter,
    op: Builder,
    overload: str,
    x: ir.Value,
    affine: tuple[ir.Value, ir.Value],
    z: ir.Value,
    attributes: dict[str, object],
) -> bool:
    reader = sole_consumer(z)
    activation = activation_of(reader) if reader is not None else None
    at = required(reader if activation is not None else z.producer())
    name = str(FusedName.make("GroupNorm", activation[0].name if activation is not None else ""))
    attributes = attributes | (activation[1] if activation is not None else {})
    y = op.node(name, [x, *affine], domain=FUSE, attributes=attributes)
    y.producer().overload = overload
    return rw.replace(at, op, [at.outputs[0]], [y])


def _holds(value: ir.Value | None, number: float) -> bool:
    array = const_array(value)
    return array is not None and bool(np.all(array == number))


def _by_channel(value: ir.Value, op_type: str, channels: int) -> tuple[ir.Value, ir.Value] | None:
    """(result, operand) when the only use of `value` is a Mul or Add by a vector of channels."""
    node, operand = combined_with(value, op_type) or (None, None)
    if node is None or operand is None:
        return None
    size, full = rank(operand), rank(value)
    if size is None or full is None or size > full or full - size > 1:
        return None
    wanted = [1] * (size - full + 1) + [channels] + [1] * (full - 2)
    return (node.outputs[0], operand) if [dim(operand, i) for i in range(size)] == wanted else None


RULES = (
    Rule(
        "GroupNorm",
        1,
        ("InstanceNormalization",),
        _written_out,
        conditions="readers constants weights types ranks sizes body",
    ),
    Rule("GroupNorm", 1, ("GroupNormalization",), _native, conditions="ranks sizes"),
)

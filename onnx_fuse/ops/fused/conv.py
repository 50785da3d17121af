"""Conv + bias, a residual, an activation: y = act(Conv(x, w, c) + r).

x [N, C, ...], w [M, C/group, ...], c [M], r as the result. Without a residual the op is Conv<Act>,
with one ConvAdd or ConvAdd<Act>; ConvPRelu has a slope for each filter besides.
"""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, given, rank
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.activations import ACTIVATIONS, Activation
from onnx_fuse.ops.fused.activations import Tail, tail_of
from onnx_fuse.ops.fused.gradients import conv_act_grad
from onnx_fuse.ops.opdef import OpDef, fused_op, register
from onnx_fuse.ops.rules import (
    Rewriter,
    Rule,
    attribute,
    combined_with,
    consumers,
    is_constant,
    is_float,
    other_operand,
    producer,
    readers,
    sole_consumer,
    typed,
)
from onnx_fuse.reasons import Reason

_ATTRIBUTES = ("kernel_shape", "strides", "pads", "dilations")
_BODY_ATTRIBUTES = ", ".join([*(f"{a}: ints = @{a}" for a in _ATTRIBUTES), "group: int = @group"])
_PRELU = Activation("PRelu", "PRelu", "PRelu(z, slope)", "")
"""PRelu fuses with convolutions alone, whose kernels take a slope for each filter. The fused
operator has the gradient of its body."""


def _define(activation: Activation | None, residual: bool) -> OpDef:
    family, act = "ConvAdd" if residual else "Conv", activation.name if activation else ""
    name = str(FusedName.make(family, act))
    inputs = ["x", "w", "c", *(["r"] if residual else [])]
    inputs += ["slope"] if activation is _PRELU else []
    # Every attribute is bound at a call; only those with a default may follow the plain names.
    attributes = [*_ATTRIBUTES, "group: int = 1", activation.attributes if activation else ""]
    text = f"  {'m' if residual else 'z'} = Conv <{_BODY_ATTRIBUTES}> (x, w, c)\n"
    text += f"  {'z' if activation else 'y'} = m + r\n" if residual else ""
    text += f"  y = {activation.forward}" if activation else ""
    differentiable = not residual and activation is not _PRELU
    how = {"saves": ("z",), "grad": conv_act_grad} if differentiable else {}
    return fused_op(name, attributes, ", ".join(inputs), "y", text, **how)


register(
    *(_define(a, False) for a in (*ACTIVATIONS.values(), _PRELU)),
    *(_define(a, True) for a in (None, *ACTIVATIONS.values())),
)


# ---- recognition -----------------------------------------------------------------------------


def _activation_behind(z: ir.Value) -> Tail | None:
    prelu = next((n for n in consumers(z) if n.op_type == "PRelu" and not n.domain), None)
    if prelu is None:
        return tail_of(z)
    slope = other_operand(prelu, z)
    if prelu.inputs[0] is not z or slope is None or slope is z:
        return None  # the result is the slope
    return Tail(z, (), prelu, _PRELU, {}, (slope,))


def _residual(conv: ir.Node, z: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """The Add that alone reads `z`, and what it adds: a computed tensor of the same shape."""
    reader = combined_with(z, "Add")
    if reader is None:
        return None
    add, r = reader
    if is_constant(r) or rank(r) is None or rank(r) != rank(z):
        return None
    sizes = [(dim(r, i), dim(z, i)) for i in range(rank(z) or 0)]
    if any(a != b and None not in (a, b) for a, b in sizes) or not is_float(r):
        return None
    # If both operands are convolutions, the one with the larger filter takes the sum in.
    rival = producer(r, "Conv")
    if rival is not None and sole_consumer(r) is add and _taps(rival) > _taps(conv):
        return None
    return add, r


def _taps(conv: ir.Node) -> int:
    w = conv.inputs[1]
    return prod(dim(w, i) or 1 for i in range(2, rank(w) or 2))


def _biased(rw: Rewriter, conv: ir.Node) -> ir.Node | None:
    """Conv(x, w) + c, where c [1, M, 1, ...] is constant, as Conv(x, w, c); None if it is not that.

    Exporters write the frozen BatchNormalization of detectors so, behind a scale for each filter.
    """
    w, z = conv.inputs[1], conv.outputs[0]
    add, c = combined_with(z, "Add") or (None, None)
    array = const_array(c) if is_constant(c) else None
    size, filters = rank(w), dim(w, 0)
    if add is None or c is None or array is None or size is None or filters is None:
        return None
    if given(conv, 2) is not None:
        return None
    if array.shape not in ((filters, *[1] * (size - 2)), (1, filters, *[1] * (size - 2))):
        return None
    op = Builder()
    bias = rw.initializer(f"{c.name} of {filters}", array.reshape(-1))
    if rw.training:
        bias = typed(op.Reshape(c, [-1]), c, [filters])
    y: ir.Value = op.node("Conv", [conv.inputs[0], w, bias], attributes=conv.attributes)
    rw.replace(add, op, [add.outputs[0]], [y])
    return y.producer()


def _fuse(rw: Rewriter, conv: ir.Node) -> bool:
    biased = None if conv.domain else _biased(rw, conv)
    return _with_what_follows(rw, biased or conv) or biased is not None


def _with_what_follows(rw: Rewriter, conv: ir.Node) -> bool:
    z = conv.outputs[0]
    x, w = conv.inputs[0], conv.inputs[1]
    if conv.domain or x is None or w is None:
        return False
    sum_of = _residual(conv, z)
    total = sum_of[0].outputs[0] if sum_of is not None else z
    act = _activation_behind(total)
    if act is not None and act.activation is _PRELU and sum_of is not None:
        act = None
    if act is None and sum_of is None:
        return False
    nodes = [conv, *([sum_of[0]] if sum_of else []), *([act.node] if act else [])]
    if act is not None and (len(readers(total)) > 1 or total.is_graph_output()):
        if sum_of is None:
            return rw.refuse("Conv+activation", nodes, Reason("other-readers", what="its input"))
        act = None  # the sum is wanted as it is
    valid = attribute(conv, "auto_pad", "NOTSET") == "VALID"
    if not valid and attribute(conv, "auto_pad", "NOTSET") != "NOTSET":
        return rw.refuse("Conv+activation", nodes, Reason("auto-pad"))
    size, channels = rank(w), dim(w, 0)
    kernel = attribute(conv, "kernel_shape") or [dim(w, i) for i in range(2, size or 2)]
    if size is None or channels is None or None in kernel:
        return rw.refuse("Conv+activation", nodes, Reason("unknown", what="the weight's shape"))
    if size < 3:
        return rw.refuse("Conv+activation", nodes, Reason("no-spatial-axes"))
    spatial = size - 2
    bias = given(conv, 2)
    op = Builder()
    inputs = [x, w, bias if bias is not None else rw.zeros(w, channels)]
    inputs += [sum_of[1]] if sum_of else []
    y = op.node(
        str(FusedName.make("ConvAdd" if sum_of else "Conv", act.activation.name if act else "")),
        [*inputs, *(act.operands if act else ())],
        domain=FUSE,
        kernel_shape=list(kernel),
        strides=attribute(conv, "strides", [1] * spatial),
        pads=[0] * 2 * spatial if valid else attribute(conv, "pads", [0] * 2 * spatial),
        dilations=attribute(conv, "dilations", [1] * spatial),
        group=attribute(conv, "group", 1),
        attributes=act.attributes if act else {},
    )
    at = conv
    if sum_of is not None:
        at = sum_of[0]
    if act is not None:
        at, y = act.node, act.replayed(op, y)
    return rw.replace(at, op, [at.outputs[0]], [y])


RULES = (Rule("Conv", 1, ("Conv",), _fuse, conditions="readers types ranks body"),)

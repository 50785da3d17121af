"""Conv + bias + activation: y = act(Conv(x, w, c)), x [N, C, ...], w [M, C/group, ...], c [M]."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_fuse.onnx.build import Builder
from onnx_fuse.onnx.common import FUSE
from onnx_fuse.ops.fused.activations import (
    ACTIVATION_OPS,
    ACTIVATIONS,
    Activation,
    activation_of,
    signature,
)
from onnx_fuse.ops.fused.gradients import conv_act_grad
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.rewrite import Rewriter, Rule, attribute, dim, only_use, rank, users

_ATTRIBUTES = ("kernel_shape", "strides", "pads", "dilations")
_BODY_ATTRIBUTES = ", ".join([*(f"{a}: ints = @{a}" for a in _ATTRIBUTES), "group: int = @group"])


def _define(activation: Activation) -> OpDef:
    name = f"Conv{activation.name}"
    # Every attribute is bound at a call; only those with a default may follow the plain names.
    head = signature(", ".join(_ATTRIBUTES), "group: int = 1", activation.attributes)
    return OpDef(
        name,
        FUSE,
        body=f"{name} {head}(x, w, c) => (y) {{\n"
        f"  z = Conv <{_BODY_ATTRIBUTES}> (x, w, c)\n{activation.forward}}}",
        saves=("z",),
        grad=conv_act_grad,
    )


register(*(_define(a) for a in ACTIVATIONS.values()))


def _fuse(rw: Rewriter, conv: ir.Node) -> bool:
    z = conv.outputs[0]
    near = next((n for n in users(z) if n.op_type in ACTIVATION_OPS and activation_of(n)), None)
    found = activation_of(near) if near is not None else None
    x, w = conv.inputs[0], conv.inputs[1]
    if near is None or found is None or conv.domain or x is None or w is None:
        return False
    pair = [conv, near]
    if only_use(z) is None:
        return rw.refuse("Conv+activation", pair, f"its input '{z.name}' has other readers")
    valid = attribute(conv, "auto_pad", "NOTSET") == "VALID"
    if not valid and attribute(conv, "auto_pad", "NOTSET") != "NOTSET":
        return rw.refuse("Conv+activation", pair, "auto_pad depends on the input's size")
    size, channels = rank(w), dim(w, 0)
    kernel = attribute(conv, "kernel_shape") or [dim(w, i) for i in range(2, size or 2)]
    if size is None or channels is None or not isinstance(kernel, Sequence) or None in kernel:
        return rw.refuse("Conv+activation", pair, "the weight's shape is not known")
    spatial = size - 2
    bias = conv.inputs[2] if len(conv.inputs) > 2 else None
    op = Builder()
    row, attributes = found
    y = op.node(
        f"Conv{row.name}",
        [x, w, bias if bias is not None else rw.zeros(w, channels)],
        domain=FUSE,
        kernel_shape=list(kernel),
        strides=attribute(conv, "strides", [1] * spatial),
        pads=[0] * 2 * spatial if valid else attribute(conv, "pads", [0] * 2 * spatial),
        dilations=attribute(conv, "dilations", [1] * spatial),
        group=attribute(conv, "group", 1),
        attributes=attributes,
    )
    return rw.replace(near, op, [near.outputs[0]], [y])


RULES = (Rule("Conv", 1, ("Conv",), _fuse),)

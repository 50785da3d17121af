"""Recognition of activations, written out or native; QuickGelu and Silu as operators; act'(z).

What is known of each activation stands in the table of `ops/activations.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.activations import ACTIVATIONS, SQRT_2_PI, Activation
from onnx_fuse.ops.opdef import fused_op, register
from onnx_fuse.ops.patterns import Formula, text_rule
from onnx_fuse.ops.rules import (
    Rewriter,
    Rule,
    attribute,
    consumer_views,
    consumers,
    is_float,
    move_shape_readers,
    number,
    replay_views,
    scalar,
    typed,
)
from onnx_fuse.ops.shape_ops import Writer


def activation_of(node: ir.Node) -> tuple[Activation, dict[str, float]] | None:
    """The table's row for a standalone activation node, and the attributes a fused op inherits."""
    if node.op_type == "Clip" and not node.domain:
        return _clipped(node)
    for row in ACTIVATIONS.values():
        if (node.op_type, node.domain) != (row.op_type, row.domain):
            continue
        standard = {**dict(row.fixed), "approximate": "none"}
        if all(attribute(node, key, standard[key]) == value for key, value in row.fixed):
            taken = {
                k: a.as_float() for k, a in node.attributes.items() if k not in dict(row.fixed)
            }
            return row, taken
    return None


def _clipped(node: ir.Node) -> tuple[Activation, dict[str, float]] | None:
    """The row of a Clip between 0 and a number above it that an attribute, of float32, holds."""
    low, high = (scalar(v) for v in [*node.inputs[1:], None, None][:2])
    if low != 0 or np.signbit(low) or high is None or not is_float(node.inputs[0]):
        return None
    exact = 0 < high < np.inf and float(np.float32(high)) == high
    return (ACTIVATIONS["ClippedRelu"], {"alpha": high}) if exact else None


@dataclass(frozen=True)
class Tail:
    """What follows a value `z`: views, each the only reader of the one before, then an activation.

    An activation is elementwise: it may as well run before a Reshape or Transpose.
    """

    z: ir.Value
    views: tuple[ir.Node, ...]
    node: ir.Node
    activation: Activation
    attributes: dict[str, float]
    operands: tuple[ir.Value, ...] = ()

    def replayed(self, op: Builder, y: ir.Value) -> ir.Value:
        """The views of `y`, which is the activation of `z`."""
        move_shape_readers(self.z, typed(y, self.z, self.z.shape))
        return replay_views(op, self.views, self.z, y)


def tail_of(z: ir.Value) -> Tail | None:
    """The activation among the readers of `z`, which may have others, or of views of it."""
    views = consumer_views(z)
    for node in consumers(views[-1].outputs[0] if views else z):
        if activation := activation_of(node):
            return Tail(z, tuple(views), node, *activation)
    return None


def act_grad(op: Writer, node: ir.Node, name: str, dy: ir.Value, z: ir.Value) -> Any:
    """dy act'(z), by the op `{name}Grad`; `node` has the attributes."""
    wanted = ACTIVATIONS[name].attributes
    attributes = {k: a.value for k, a in node.attributes.items() if f"{k}:" in wanted}
    dz = op.node(f"{name}Grad", [dy, z], domain=FUSE, attributes=attributes)
    dz.dtype, dz.shape = z.dtype, z.shape
    return dz


def _grad(op: Writer, node: ir.Node, dys: Sequence[Any]) -> Sequence[Any]:
    return [act_grad(op, node, node.op_type, dys[0], required(node.inputs[0]))]


register(
    *(
        fused_op(a.name, [a.attributes], "z", "y", f"  y = {a.forward}", grad=_grad)
        for a in (ACTIVATIONS[name] for name in ("ClippedRelu", "QuickGelu", "Silu"))
    ),
    *(
        fused_op(f"{a.name}Grad", [a.attributes], "dy, z", "y", a.gradient_text("y"))
        for a in ACTIVATIONS.values()
    ),
)


def _one_slope(rw: Rewriter, node: ir.Node) -> bool:
    """PRelu with one constant slope is LeakyRelu, which fuses behind products as well.

    Exact for slopes from 0 up: below, the two differ in the sign of a zero. onnxruntime has
    LeakyRelu in float32 alone.
    """
    x, slope = node.inputs[0], number(node, 1)  # of more axes, it would add them to x
    if x is None or x.dtype != ir.DataType.FLOAT or slope is None or node.domain:
        return False
    if not 0 <= slope < math.inf:
        return False
    op = Builder()
    y = op.LeakyRelu(x, alpha=slope)
    return rw.replace(node, op, [node.outputs[0]], [y])


_ALPHA, _SILU = "<alpha: float = @alpha>", f"{FUSE}.Silu (x)"
_QUICK = f"{FUSE}.QuickGelu {_ALPHA} (x)"
_RELU_6 = "Clip (x + 3, 0, 6)"
_HARD_SIGMOID = f"HardSigmoid <alpha: float = {float(np.float32(1 / 6))}> (x)"
_CUBE = f"x * {SQRT_2_PI} + x * x * x *"  # its factor as a product of two, or by itself

_WRITTEN_OUT = (
    *(
        Formula(f"x * 0.5 * (1 + {t})", f'Gelu <approximate: string = "{approximate}"> (x)')
        for t, approximate in (
            (f"Erf (x * {math.sqrt(0.5)})", "none"),
            (f"Erf (x / {math.sqrt(2)})", "none"),
            (f"Tanh ({_CUBE} {SQRT_2_PI} * 0.044715)", "tanh"),
            (f"Tanh ({_CUBE} {SQRT_2_PI * 0.044715})", "tanh"),
        )
    ),
    Formula("x * Sigmoid (x)", _SILU),
    Formula("x * Sigmoid (x * alpha)", _QUICK),
)
_NEWER = (
    Formula("Swish (x)", _SILU),
    Formula(f"Swish {_ALPHA} (x)", _QUICK),
    Formula("SwiGLU (x, z)", f"{_SILU} * z"),
    Formula(f"SwiGLU {_ALPHA} (x, z)", f"{_QUICK} * z"),
)
_OLDER = (  # the last ones as TensorFlow and torch before opset 14 write them
    Formula("x * Tanh (Softplus (x))", "Mish (x)"),
    Formula(f"x * {_HARD_SIGMOID}", "HardSwish (x)"),
    *(
        Formula(f"{relu_6} {sixth}", result, double=False)  # onnxruntime has no HardSigmoid in it
        for sixth in ("/ 6", f"* {1 / 6}")
        for relu_6, result in ((f"x * {_RELU_6}", "HardSwish (x)"), (_RELU_6, _HARD_SIGMOID))
    ),
)

RULES = (
    Rule("Activation", 0, ("PRelu",), _one_slope, training=False, conditions="weights"),
    text_rule("Activation", 0, _OLDER, "readers constants weights types body"),
    text_rule("Activation", 0, _NEWER),
    text_rule("Activation", 0, _WRITTEN_OUT, "weights types body"),
)

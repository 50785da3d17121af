"""Elementwise ops: activations, unary math, broadcasting arithmetic, selection, casts."""

from __future__ import annotations

from functools import reduce

import onnx_ir as ir

from onnx_fuse.ir.build import const_array
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.activations import ACTIVATIONS
from onnx_fuse.ops.opdef import NoGrad, OpDef, Unary, formulas, no_grad, register, table
from onnx_fuse.ops.shape_ops import Tensor, Values, Writer, arguments, text


def _gelu(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    exact = text(n, "approximate", "none") == "none"
    return op.formula(ACTIVATIONS["Gelu" if exact else "GeluTanh"].gradient, z=x, dy=dy)


def _cast(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    """The gradient of a float of few bits stays wide: its digits and range would not do."""
    narrow = x.dtype is not None and x.dtype.bitwidth < 16
    return dy if narrow else op.to_like(dy, x)


UNARY: dict[str, Unary | str] = {
    **{row.op_type: row.gradient for row in ACTIVATIONS.values() if not row.domain},
    "Identity": "dy",
    "Abs": "dy * Sign(x)",
    "Neg": "-dy",
    "Exp": "dy * y",
    "Log": "dy / x",
    "Sqrt": "dy / (y + y)",
    "Reciprocal": "-(dy * (y * y))",
    "Sin": "dy * Cos(x)",
    "Cos": "-(dy * Sin(x))",
    "Tan": "dy * (y * y + 1)",
    "Asin": "dy / Sqrt(1 - x * x)",
    "Acos": "-(dy / Sqrt(1 - x * x))",
    "Atan": "dy / (x * x + 1)",
    "Sinh": "dy * Cosh(x)",
    "Cosh": "dy * Sinh(x)",
    "Asinh": "dy / Sqrt(x * x + 1)",
    "Acosh": "dy / Sqrt(x * x - 1)",
    "Atanh": "dy / (1 - x * x)",
    "Erf": "dy * (Exp(-(x * x)) * (2 / Sqrt(pi)))",
    "Relu": "Where(y > 0, dy, 0)",  # of y, which the next operator needs in memory anyway
    "ThresholdedRelu": "Where(x > @alpha, dy, 0)",
    "Softsign": "d = Abs(x) + 1; dy / (d * d)",
    "Celu": "dy * Where(x < 0, y * (1 / @alpha) + 1, 1)",
    "Gelu": _gelu,
    "Swish": ACTIVATIONS["QuickGelu"].gradient,
    "Shrink": "Where(Abs(x) > @lambd, dy, 0)",
    **dict.fromkeys(("Cast", "CastLike"), _cast),
}
table(UNARY)


# ---- several inputs; the walker un-broadcasts -------------------------------------------------


def _add(op: Writer, node: ir.Node, dys: Values) -> Values:
    return [dys[0]] * len(node.inputs)


_POWERS = {2.0: "x + x", 3.0: "x * x * 3", 0.5: "0.5 / y", -1.0: "-(y * y)"}
"""The slopes of x to some constant powers."""


def _pow(op: Writer, node: ir.Node, dys: Values) -> Values:
    (x, b), y, dy = arguments(node, 2), node.outputs[0], dys[0]
    array = const_array(b)
    exponent = float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None
    bx = op.to_like(b, x)
    if exponent is None:
        # x^(b-1) is not finite at x = 0 where b < 1; b = 0 has slope 0 there all the same.
        slope = op.formula("Where(b == 0, 0, Pow(x, b - 1) * b)", x=x, b=bx)
    else:
        slope = op.formula(_POWERS.get(exponent, "Pow(x, n - 1) * n"), x=x, y=y, n=exponent)
    # d/db = y ln x, 0 at x = 0 as PyTorch has it
    db = op.formula("dy * y * Log(Where(x > 0, x, 1))", x=x, y=y, dy=dy)
    return [op.Mul(dy, slope), op.to_like(db, b)]


def _extremum(op: Writer, node: ir.Node, dys: Values) -> Values:
    """Ties share the gradient evenly.

    Operands are held against each other, not against the result: in float16 onnxruntime may have
    rounded one of the two, so that no operand would equal it.
    """
    dy, y = dys[0], node.outputs[0]
    if len(node.inputs) == 1:
        return [dy]
    ahead = "GreaterOrEqual" if node.op_type == "Max" else "LessOrEqual"
    masks = []
    for i, x in enumerate(node.inputs):
        others = [op.node(ahead, [x, v]) for k, v in enumerate(node.inputs) if k != i]
        masks.append(op.to_like(reduce(op.And, others), y))
    return op.split_evenly(dy, masks)


def _clip(op: Writer, node: ir.Node, dys: Values) -> Values:
    """The gradient is x's within the closed bounds; outside it is the bound's (max wins)."""
    (x, low, high), dy = arguments(node, 3), dys[0]
    dx, bounds = dy, list[Tensor]()
    for beyond, bound in (("x < bound", low), ("x > bound", high)):
        if bound is None:
            bounds.append(None)
            continue
        outside = op.formula(beyond, x=x, bound=bound)
        dx = op.formula("Where(outside, 0, dx)", outside=outside, dx=dx)
        total = "ReduceSum <keepdims = 0> (Where(outside, dy, 0))"
        bounds.append(op.formula(total, outside=outside, dy=dy))
    return [dx, *bounds]


register(
    OpDef(
        "StopGradient",
        FUSE,
        body="StopGradient (x) => (y) { y = Identity (x) }",
        grad=NoGrad("its input counts as a constant"),
    ),
    OpDef("Add", grad=_add),
    OpDef("Sum", grad=_add),
    OpDef("Sub", grad=formulas("dy", "-dy")),
    OpDef("Mul", grad=formulas("dy * b", "dy * a")),
    OpDef("Div", grad=formulas("dy / b", "-(dy / b * y)")),
    OpDef("Pow", grad=_pow),
    # fmod truncates: the sign of a quotient times the floor of its size
    OpDef("Mod", grad=formulas("dy", "r = a / b; -(dy * (Sign(r) * Floor(Abs(r))))")),
    OpDef("Max", grad=_extremum),
    OpDef("Min", grad=_extremum),
    OpDef(
        "Mean", grad=lambda op, node, dys: [op.Mul(dys[0], 1 / len(node.inputs))] * len(node.inputs)
    ),
    OpDef("Where", grad=formulas(None, "Where(a, dy, 0)", "Where(a, 0, dy)")),
    OpDef("PRelu", grad=formulas("Where(a > 0, dy, dy * b)", "Where(a > 0, 0, dy * a)")),
    OpDef("Clip", grad=_clip),
)
no_grad(
    "it is piecewise constant: its derivative is 0 wherever it exists",
    *("Floor", "Ceil", "Round", "Sign", "Hardmax"),
)
no_grad(
    "its result is not a real number",
    *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "Not"),
    *("IsNaN", "IsInf", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot"),
    "BitCast",
)

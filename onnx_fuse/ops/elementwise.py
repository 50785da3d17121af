"""Elementwise ops: activations, unary math, broadcasting arithmetic, selection, casts."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import onnx_ir as ir

from onnx_fuse.ir.build import const_array, dim
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.opdef import NoGrad, OpDef, register
from onnx_fuse.ops.shape_ops import (
    Tensor,
    Unary,
    Values,
    arguments,
    dims,
    fail,
    known_rank,
    no_grad,
    norm_axis,
    pad,
    reshape,
    reshape_like,
    split_evenly,
    sum_over,
    table,
    text,
    to_like,
    unbroadcast,
)

_SELU_ALPHA, _SELU_GAMMA = 1.67326319217681884765625, 1.05070102214813232421875


def _float(name: str, default: float) -> Any:
    return lambda node: node.attributes.get_float(name, default)


_alpha, _alpha1 = _float("alpha", 0.01), _float("alpha", 1.0)


def _where(op: Any, condition: ir.Value, a: Any, b: Any, like: ir.Value) -> Tensor:
    """A Where whose branches may be numbers, which take the dtype of `like`."""
    a, b = (v if isinstance(v, ir.Value) else op.constant(float(v), like.dtype) for v in (a, b))
    return op.Where(condition, a, b)


def _inside(op: Any, dy: ir.Value, x: ir.Value, low: float, high: float) -> Tensor:
    """dy where low < x < high, else 0."""
    return _where(op, op.And(op.Greater(x, low), op.Less(x, high)), dy, 0, x)


def gelu(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    if text(n, "approximate", "none") == "none":
        # Φ(x) + x φ(x)
        cdf = op.Mul(op.Add(op.Erf(op.Mul(x, math.sqrt(0.5))), 1.0), 0.5)
        pdf = op.Mul(op.Exp(op.Mul(op.Mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
        return op.Mul(dy, op.Add(cdf, op.Mul(x, pdf)))
    # t = tanh(b (x + c x³));  ½ (1 + t) + ½ x (1 - t²) b (1 + 3 c x²)
    b, c, x2 = math.sqrt(2 / math.pi), 0.044715, op.Mul(x, x)
    t = op.Tanh(op.Mul(x, op.Add(op.Mul(x2, b * c), b)))
    slope = op.Mul(op.Sub(1.0, op.Mul(t, t)), op.Mul(x, op.Add(op.Mul(x2, 3 * b * c), b)))
    return op.Mul(dy, op.Mul(op.Add(op.Add(t, slope), 1.0), 0.5))


def _silu_like(op: Any, dy: ir.Value, x: ir.Value, alpha: float) -> Tensor:
    """d/dx x·σ(αx) = σ + αx σ (1 - σ) = σ (1 + αx (1 - σ))."""
    ax = x if alpha == 1.0 else op.Mul(x, alpha)
    s = op.Sigmoid(ax)
    return op.Mul(dy, op.Mul(s, op.Add(op.Mul(ax, op.Sub(1.0, s)), 1.0)))


def _mish(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    # t = tanh(softplus(x));  t + x σ(x) (1 - t²)
    t = op.Tanh(op.Softplus(x))
    return op.Mul(dy, op.Add(t, op.Mul(op.Mul(x, op.Sigmoid(x)), op.Sub(1.0, op.Mul(t, t)))))


def _hard_sigmoid(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    alpha, beta = n.attributes.get_float("alpha", 0.2), n.attributes.get_float("beta", 0.5)
    return op.Mul(_inside(op, dy, op.Add(op.Mul(x, alpha), beta), 0.0, 1.0), alpha)


def _hard_swish(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    # x/3 + 1/2 within (-3, 3), 0 below, 1 above
    slope = _where(op, op.Greater(x, -3.0), op.Add(op.Mul(x, 1 / 3), 0.5), 0, x)
    return op.Mul(dy, _where(op, op.Less(x, 3.0), slope, 1, x))


def _exp_below_0(op: Any, dy: ir.Value, x: ir.Value, below: ir.Value, above: float) -> Tensor:
    return op.Mul(dy, _where(op, op.Less(x, 0.0), below, above, x))


UNARY: dict[str, Unary] = {
    "Identity": lambda op, dy, x, y, n: dy,
    "Abs": lambda op, dy, x, y, n: op.Mul(dy, op.Sign(x)),
    "Neg": lambda op, dy, x, y, n: op.Neg(dy),
    "Exp": lambda op, dy, x, y, n: op.Mul(dy, y),
    "Log": lambda op, dy, x, y, n: op.Div(dy, x),
    "Sqrt": lambda op, dy, x, y, n: op.Div(dy, op.Add(y, y)),
    "Reciprocal": lambda op, dy, x, y, n: op.Neg(op.Mul(dy, op.Mul(y, y))),
    "Sin": lambda op, dy, x, y, n: op.Mul(dy, op.Cos(x)),
    "Cos": lambda op, dy, x, y, n: op.Neg(op.Mul(dy, op.Sin(x))),
    "Tan": lambda op, dy, x, y, n: op.Mul(dy, op.Add(op.Mul(y, y), 1.0)),
    "Asin": lambda op, dy, x, y, n: op.Div(dy, op.Sqrt(op.Sub(1.0, op.Mul(x, x)))),
    "Acos": lambda op, dy, x, y, n: op.Neg(op.Div(dy, op.Sqrt(op.Sub(1.0, op.Mul(x, x))))),
    "Atan": lambda op, dy, x, y, n: op.Div(dy, op.Add(op.Mul(x, x), 1.0)),
    "Sinh": lambda op, dy, x, y, n: op.Mul(dy, op.Cosh(x)),
    "Cosh": lambda op, dy, x, y, n: op.Mul(dy, op.Sinh(x)),
    "Asinh": lambda op, dy, x, y, n: op.Div(dy, op.Sqrt(op.Add(op.Mul(x, x), 1.0))),
    "Acosh": lambda op, dy, x, y, n: op.Div(dy, op.Sqrt(op.Sub(op.Mul(x, x), 1.0))),
    "Atanh": lambda op, dy, x, y, n: op.Div(dy, op.Sub(1.0, op.Mul(x, x))),
    "Erf": lambda op, dy, x, y, n: op.Mul(
        dy, op.Mul(op.Exp(op.Neg(op.Mul(x, x))), 2 / math.sqrt(math.pi))
    ),
    "Relu": lambda op, dy, x, y, n: _where(op, op.Greater(y, 0.0), dy, 0, x),
    "LeakyRelu": lambda op, dy, x, y, n: _exp_below_0(op, dy, x, _alpha(n), 1.0),
    "ThresholdedRelu": lambda op, dy, x, y, n: _where(op, op.Greater(x, _alpha1(n)), dy, 0, x),
    "Sigmoid": lambda op, dy, x, y, n: op.Mul(dy, op.Mul(y, op.Sub(1.0, y))),
    "Tanh": lambda op, dy, x, y, n: op.Mul(dy, op.Sub(1.0, op.Mul(y, y))),
    "Softplus": lambda op, dy, x, y, n: op.Mul(dy, op.Sigmoid(x)),
    "Softsign": lambda op, dy, x, y, n: op.Div(dy, op.Mul(d := op.Add(op.Abs(x), 1.0), d)),
    "Elu": lambda op, dy, x, y, n: _exp_below_0(op, dy, x, op.Add(y, _alpha1(n)), 1.0),
    "Celu": lambda op, dy, x, y, n: _exp_below_0(
        op, dy, x, op.Add(op.Mul(y, 1 / _alpha1(n)), 1.0), 1.0
    ),
    "Selu": lambda op, dy, x, y, n: _exp_below_0(
        op,
        dy,
        x,
        op.Add(
            y,
            n.attributes.get_float("alpha", _SELU_ALPHA)
            * n.attributes.get_float("gamma", _SELU_GAMMA),
        ),
        n.attributes.get_float("gamma", _SELU_GAMMA),
    ),
    "Gelu": gelu,
    "Swish": lambda op, dy, x, y, n: _silu_like(op, dy, x, n.attributes.get_float("alpha", 1.0)),
    "Mish": _mish,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "Shrink": lambda op, dy, x, y, n: _where(
        op, op.Greater(op.Abs(x), n.attributes.get_float("lambd", 0.5)), dy, 0, x
    ),
    "Cast": lambda op, dy, x, y, n: to_like(op, dy, x),
    "CastLike": lambda op, dy, x, y, n: to_like(op, dy, x),
}
table(UNARY)


# ---- several inputs; the walker un-broadcasts -------------------------------------------------


def _add(op: Any, node: ir.Node, dys: Values) -> Values:
    return [dys[0]] * len(node.inputs)


def _mul(op: Any, node: ir.Node, dys: Values) -> Values:
    a, b = arguments(node, 2)
    return [op.Mul(dys[0], b), op.Mul(dys[0], a)]


def _div(op: Any, node: ir.Node, dys: Values) -> Values:
    b = node.inputs[1]
    da = op.Div(dys[0], b)
    return [da, op.Neg(op.Mul(da, node.outputs[0]))]


def _pow(op: Any, node: ir.Node, dys: Values) -> Values:
    (x, b), y, dy = arguments(node, 2), node.outputs[0], dys[0]
    array = const_array(b)
    exponent = float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None
    bx = to_like(op, b, x)
    if exponent == 2.0:
        slope = op.Add(x, x)
    elif exponent == 3.0:
        slope = op.Mul(op.Mul(x, x), 3.0)
    elif exponent == 0.5:
        slope = op.Div(op.constant(0.5, x.dtype), y)
    elif exponent == -1.0:
        slope = op.Neg(op.Mul(y, y))
    elif exponent is not None:
        slope = op.Mul(op.Pow(x, op.constant(exponent - 1.0, x.dtype)), exponent)
    else:
        slope = op.Mul(op.Pow(x, op.Sub(bx, 1.0)), bx)
        # x^(b-1) is not finite at x = 0 where b < 1; b = 0 has slope 0 there all the same.
        slope = _where(op, op.Equal(bx, 0.0), 0, slope, x)
    # d/db = y ln x, 0 at x = 0 as PyTorch has it
    log = op.Log(_where(op, op.Greater(x, 0.0), x, 1, x))
    return [op.Mul(dy, slope), to_like(op, op.Mul(op.Mul(dy, y), log), b)]


def _mod(op: Any, node: ir.Node, dys: Values) -> Values:
    a, b = arguments(node, 2)
    ratio = op.Div(a, b)
    # fmod truncates; the sign of a quotient times the floor of its size
    whole = op.Mul(op.Sign(ratio), op.Floor(op.Abs(ratio)))
    return [dys[0], op.Neg(op.Mul(dys[0], whole))]


def _extremum(op: Any, node: ir.Node, dys: Values) -> Values:
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
        masks.append(to_like(op, reduce(op.And, others), y))
    return split_evenly(op, dy, masks)


def _where_rule(op: Any, node: ir.Node, dys: Values) -> Values:
    (condition,), dy = arguments(node, 1), dys[0]
    return [None, _where(op, condition, dy, 0, dy), _where(op, condition, 0, dy, dy)]


def _prelu(op: Any, node: ir.Node, dys: Values) -> Values:
    (x, slope), dy = arguments(node, 2), dys[0]
    below = op.Less(x, 0.0)
    return [
        op.Where(below, op.Mul(dy, slope), dy),
        _where(op, below, op.Mul(dy, x), 0, x),
    ]


def _clip(op: Any, node: ir.Node, dys: Values) -> Values:
    """The gradient is x's within the closed bounds; outside it is the bound's (max wins)."""
    (x, low, high), dy = arguments(node, 3), dys[0]
    under = op.Less(x, low) if low is not None else None
    over = op.Greater(x, high) if high is not None else None
    d_low = d_high = None
    dx = dy
    if under is not None:
        dx = _where(op, under, 0, dx, x)
        d_low = op.ReduceSum(_where(op, under, dy, 0, x), keepdims=0)
    if over is not None:
        dx = _where(op, over, 0, dx, x)
        d_high = op.ReduceSum(_where(op, over, dy, 0, x), keepdims=0)
    return [dx, d_low, d_high]


def _dequantize(op: Any, node: ir.Node, dys: Values) -> Values:
    """y = (x - zero_point) · scale of integers x: a gradient for the scale alone."""
    (x, scale, zero), dy = arguments(node, 3), dys[0]
    n, block = known_rank(x), node.attributes.get_int("block_size", 0)
    per_axis = block > 0 or (len(scale.shape or ()) == 1 and dim(scale, 0) != 1)
    axis = norm_axis(node.attributes.get_int("axis", 1), x) if per_axis else None
    whole = op.CastLike(x, dy)
    if axis is not None and block:  # its blocks become an axis of their own
        sizes, each = dims(x), dims(scale)
        if sizes is None or each is None:
            raise fail(node, "the number of its blocks is not known")
        if short := each[axis] * block - sizes[axis]:
            whole, dy = (pad(op, v, [axis], [0], [short]) for v in (whole, dy))
        split = [*each[: axis + 1], block, *each[axis + 1 :]]
        whole, dy = reshape(op, whole, split), reshape(op, dy, split)
    if zero is not None:
        shift = op.CastLike(zero, dy)
        if axis is not None and block:
            shift = op.Unsqueeze(shift, op.constant([axis + 1]))
        elif axis is not None and axis < n - 1:
            shift = op.Unsqueeze(shift, op.constant(list(range(1, n - axis))))
        whole = op.Sub(whole, shift)
    axes = [a for a in range(n) if a != axis] if axis is None or not block else [axis + 1]
    dscale = to_like(op, sum_over(op, op.Mul(dy, whole), axes), scale)
    if per_axis and not block:  # an open size may be 1, for all of the axis
        return [None, unbroadcast(op, dscale, scale)]
    return [None, reshape_like(op, dscale, scale)]


def _dynamic_scale(op: Any, node: ir.Node, dys: Values) -> Values:
    """The scale is (max(x, 0) - min(x, 0)) / 255; the integers are piecewise constant."""
    (x,), dscale = arguments(node, 1), dys[1] if len(dys) > 1 else None
    if dscale is None:
        return [None]

    def slope(extreme: Tensor, beyond: Tensor) -> Tensor:
        """d extreme / d x, divided evenly among equal elements; 0 where the extreme is 0 itself."""
        here = to_like(op, op.And(op.Equal(x, extreme), beyond), x)
        return op.Div(here, op.Max(op.ReduceSum(here, keepdims=0), 1.0))

    above = slope(op.ReduceMax(x, keepdims=0), op.Greater(x, 0.0))
    below = slope(op.ReduceMin(x, keepdims=0), op.Less(x, 0.0))
    return [op.Mul(op.Sub(above, below), op.Div(dscale, 255.0))]


register(
    OpDef("DequantizeLinear", grad=_dequantize),
    OpDef("DynamicQuantizeLinear", grad=_dynamic_scale),
    OpDef(
        "StopGradient",
        FUSE,
        body="StopGradient (x) => (y) { y = Identity (x) }",
        grad=NoGrad("its input counts as a constant"),
    ),
    OpDef("Add", grad=_add),
    OpDef("Sum", grad=_add),
    OpDef("Sub", grad=lambda op, node, dys: [dys[0], op.Neg(dys[0])]),
    OpDef("Mul", grad=_mul),
    OpDef("Div", grad=_div),
    OpDef("Pow", grad=_pow),
    OpDef("Mod", grad=_mod),
    OpDef("Max", grad=_extremum),
    OpDef("Min", grad=_extremum),
    OpDef(
        "Mean", grad=lambda op, node, dys: [op.Mul(dys[0], 1 / len(node.inputs))] * len(node.inputs)
    ),
    OpDef("Where", grad=_where_rule),
    OpDef("PRelu", grad=_prelu),
    OpDef("Clip", grad=_clip),
)
no_grad(
    "it is piecewise constant: its derivative is 0 wherever it exists",
    *("Floor", "Ceil", "Round", "Sign", "Hardmax"),
)
no_grad(
    "its result is not a real number",
    *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "Not"),
    *(
        "IsNaN",
        "IsInf",
        "BitShift",
        "BitwiseAnd",
        "BitwiseOr",
        "BitwiseXor",
        "BitwiseNot",
        "BitCast",
    ),
)
no_grad(
    "it rounds to integers",
    *("QuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"),
)

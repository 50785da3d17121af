"""Rules of elementwise operators for shapes, entries and bounds of indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir
from onnx_ir import Node, Value

from onnx_fuse.ir.sizes import SymbolicSize, larger, rounded_down, size, smaller
from onnx_fuse.validation.symbolic.walk import Array, Fact, Rule, Shape, Walk, each, small


def sign_of(a: Any, b: Any) -> int | None:
    """The sign of a - b, where it is the same for all sizes."""
    d = size(a) - size(b)
    for sign in (1, -1):
        least = (d * sign).least
        if least is not None and least > 0:
            return sign
    return None if d else 0


def _compare(holds: Callable[[int], bool]) -> Callable[[Any, Any], bool | None]:
    def decide(a: Any, b: Any) -> bool | None:
        sign = sign_of(a, b)
        return None if sign is None else holds(sign)

    return decide


def _rounded_up(x: SymbolicSize) -> SymbolicSize:
    return -rounded_down(-x)


_NUMBERS: dict[str, Callable[..., Any]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Mod": lambda a, b: a % b,
    "Min": smaller,
    "Max": larger,
    "Neg": lambda a: -a,
    "Floor": rounded_down,
    "Ceil": _rounded_up,
    "Not": lambda a: not a,
    "And": lambda a, b: a and b,
    "Or": lambda a, b: a or b,
    "Equal": _compare(lambda s: s == 0),
    "Less": _compare(lambda s: s < 0),
    "LessOrEqual": _compare(lambda s: s <= 0),
    "Greater": _compare(lambda s: s > 0),
    "GreaterOrEqual": _compare(lambda s: s >= 0),
}


def _is_integer(value: Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_integer()


def _elementwise(w: Walk, node: Node) -> list[Fact]:
    shape = w.broadcast([w.shape(v) for v in node.inputs])
    function = _NUMBERS.get(node.op_type)
    if node.op_type == "Div":
        whole = _is_integer(node.inputs[0])
        function = (lambda a, b: a // b) if whole else (lambda a, b: a / b)
    entries = [w.entries(v) for v in node.inputs]
    found = each(function, *entries) if function is not None else None
    return [Fact(shape, small(found), _bound(w, node))]


def _bound(w: Walk, node: Node) -> Shape | None:
    """The bound of sums, differences and products of indices, and of Max and Where."""
    tops = [w.fact(v).top for v in node.inputs]
    fixed = [_scalar_of(w, v) for v in node.inputs]
    if node.op_type in ("Max", "Where"):
        a, b = tops[-2:] if len(tops) > 1 else (None, None)
        return (larger(a[0], b[0]),) if a and b and len(a) == len(b) == 1 else None
    if len(tops) != 2:
        return None
    if node.op_type == "Sub":
        return tuple(t - fixed[1] for t in tops[0]) if tops[0] and fixed[1] is not None else None
    if node.op_type not in ("Add", "Mul"):
        return None
    for top, other, number in ((tops[0], tops[1], fixed[1]), (tops[1], tops[0], fixed[0])):
        if top and node.op_type == "Mul" and number is not None:
            return tuple((t - 1) * number + 1 for t in top)
        if top and node.op_type == "Add" and number is not None:
            return tuple(t + number for t in top)
        if top and node.op_type == "Add" and other and len(other) == 1:
            return tuple(t + other[0] - 1 for t in top)
    return None


def _scalar_of(w: Walk, value: Value | None) -> SymbolicSize | None:
    numbers = w.numbers(value)
    return numbers[0] if numbers is not None and len(numbers) == 1 else None


def _where(w: Walk, node: Node) -> list[Fact]:
    shape = w.broadcast([w.shape(v) for v in node.inputs])
    condition, a, b = (w.entries(v) for v in node.inputs)
    found = None
    if condition is not None and a is not None and b is not None:
        choose = np.frompyfunc(lambda c, x, y: None if c is None else x if c else y, 3, 1)
        found = np.asarray(choose(condition, a, b), object)
    return [Fact(shape, small(found), _bound(w, node))]


def _like_first(w: Walk, node: Node) -> list[Fact]:
    fact = w.fact(node.inputs[0])
    shape = w.shape(node.inputs[0])
    same = node.op_type in ("Identity", "Cast", "Dropout")
    entries = fact.entries if same else None
    if node.op_type in _NUMBERS:
        entries = each(_NUMBERS[node.op_type], fact.entries)
    if node.op_type == "Cast" and entries is not None:
        entries = _cast(entries, node)
    top = fact.top if same or node.op_type == "Clip" else None
    if node.op_type == "CumSum" and shape is not None:
        axis = w.ints(node.inputs[1])
        top = (shape[axis[0]] + 1,) if axis else None  # of a mask of zeros and ones
    out = Fact(None if shape is None else tuple(shape), entries, top)
    return [out] if node.op_type != "Dropout" else [out, Fact(out.shape)]


def _cast(entries: Array, node: Node) -> Array | None:
    kind = onnx_ir.DataType(node.attributes.get_int("to", 0))
    if kind == onnx_ir.DataType.BOOL:
        return each(lambda x: x if isinstance(x, bool) else _not_zero(x), entries)
    whole = kind.is_integer()
    number: Callable[[Any], Any] = lambda x: size(int(x)) if isinstance(x, bool) else x  # noqa: E731
    return each(lambda x: rounded_down(number(x)) if whole else number(x), entries)


def _not_zero(x: SymbolicSize) -> bool | None:
    sign = sign_of(x, 0)
    return None if sign is None else sign != 0


_UNARY = (
    *("Abs", "Neg", "Exp", "Log", "Sqrt", "Reciprocal", "Relu", "Sigmoid", "Tanh", "Erf", "Gelu"),
    *("Elu", "Selu", "Celu", "LeakyRelu", "HardSigmoid", "HardSwish", "Softplus", "Softsign"),
    *("Mish", "Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Sign", "Round"),
    *("Floor", "Ceil", "Not", "IsNaN", "IsInf", "Identity", "Cast", "Dropout", "Clip", "Trilu"),
    *("Softmax", "LogSoftmax", "Hardmax", "CumSum", "QuantizeLinear", "DequantizeLinear"),
    *("ScatterND", "ScatterElements", "Swish", "ThresholdedRelu", "Shrink", "LpNormalization"),
    *("RotaryEmbedding", "EyeLike", "RandomNormalLike", "RandomUniformLike", "Bernoulli"),
    *("GroupNormalization", "FastGelu", "QuickGelu", "BitwiseNot", "CastLike", "LRN"),
    "MeanVarianceNormalization",
)
_VARIADIC = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "And", "Or", "Xor", "Equal", "Less", "Greater"),
    *("LessOrEqual", "GreaterOrEqual", "Max", "Min", "Sum", "Mean", "PRelu", "BitShift"),
    *("BitwiseAnd", "BitwiseOr", "BitwiseXor"),
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(_UNARY, _like_first),
    **dict.fromkeys(_VARIADIC, _elementwise),
    "Where": _where,
}

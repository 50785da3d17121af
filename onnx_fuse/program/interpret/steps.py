"""Pointwise expressions by NumPy: each step in its dtype, 16-bit floats in float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.ops.activations import BY_KEY
from onnx_fuse.ops.formula import written_out
from onnx_fuse.program.call import Tensor, dtype_of
from onnx_fuse.program.expression import Expression
from onnx_fuse.program.interpret.memory import NARROW
from onnx_fuse.program.problem import Contraction

_ERF = np.vectorize(math.erf, otypes=[float])
NARROW_FLOATS = (
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn",
)  # fmt: skip


def _rounded_to(name: str, x: object) -> Any:
    return np.asarray(x).astype(np.float32).astype(dtype_of(name)).astype(np.float32)


def _floating(a: object) -> bool:
    return np.asarray(a).dtype.kind == "f"


def _div(a: np.ndarray, b: np.ndarray) -> Any:
    """Of integers towards zero, and 0 where b is."""
    if _floating(a):
        return a / b
    safe = np.where(b == 0, 1, b)
    whole = a // safe
    whole = whole + ((whole < 0) & (whole * safe != a))
    return np.where(b == 0, 0, whole)


def _is_inf(x: np.ndarray, negative: np.ndarray, positive: np.ndarray) -> Any:
    return np.isinf(x) & (((x < 0) & (negative != 0)) | ((x > 0) & (positive != 0)))


def _shift_left(a: np.ndarray, b: np.ndarray) -> Any:
    bits = 8 * np.asarray(a).dtype.itemsize
    inside = (b >= 0) & (b < bits)
    return np.where(inside, np.left_shift(a, np.where(inside, b, 0)), 0)


def _shift_right(a: np.ndarray, b: np.ndarray) -> Any:
    bits = 8 * np.asarray(a).dtype.itemsize
    inside = (b >= 0) & (b < bits)
    return np.right_shift(a, np.where(inside, b, bits - 1)) * np.where(inside | (a < 0), 1, 0)


def _saturated(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> Any:
    return np.where(x >= low, np.minimum(x, high), low)


def _sigmoid(x: np.ndarray) -> Any:
    return 1 / (1 + np.exp(-x))


_ALIKE = ("Div", "FMod", "Max", "Min", "Mod", "Pow", "Quantize")
"""Steps whose operands are brought to the type of the result first."""

STEPS: dict[str, Any] = {
    **{name: getattr(np, name.lower()) for name in (
        "Abs", "Add", "Cos", "Cosh", "Equal", "Exp", "FMod", "Floor", "Ceil", "Greater", "IsNaN",
        "Less", "Log", "Mod", "Sign", "Sin", "Sinh", "Sqrt", "Square", "Tan", "Tanh",
    )},
    **{name: getattr(np, f"arc{name.lower().removeprefix('a')}") for name in (
        "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh",
    )},
    **{f"Cast{name}": partial(_rounded_to, name) for name in NARROW_FLOATS},
    "And": np.logical_and,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseNot": np.invert,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "Cast": lambda x: x,
    "CastBFloat16": lambda x: np.asarray(x).astype(np.float32).astype(dtype_of("bfloat16")),
    "CastBool": lambda x: np.asarray(x) != 0,
    "CastFloat16": lambda x: np.asarray(x).astype(np.float16),
    "Celu": lambda x, a: np.maximum(x, 0) + np.minimum(0, a * np.expm1(x / a)),
    "ClipMax": lambda x, most: np.where(x > most, most, x),
    "ClipMin": lambda x, least: np.where(x < least, least, x),
    "ClippedRelu": lambda x, a: np.where(x < 0, 0, np.where(x > a, a, x)),
    "Div": _div,
    "Code": lambda x: x,
    "Elu": lambda x, a: np.where(x < 0, a * np.expm1(x), x),
    "Erf": _ERF,
    "Gelu": lambda x: 0.5 * x * (1 + _ERF(x * 0.7071067811865476)),
    "GeluTanh": lambda x: 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
    "GreaterOrEqual": np.greater_equal,
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Identity": lambda x: x,
    "IsInf": _is_inf,
    "LeakyRelu": lambda x, a: np.where(x < 0, a * x, x),
    "LessOrEqual": np.less_equal,
    "Max": np.maximum,
    "Min": np.minimum,
    "Mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "Mul": np.multiply,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "PRelu": lambda x, slope: np.where(x < 0, slope * x, x),
    "Pow": np.power,
    "QuickGelu": lambda x, a: x * _sigmoid(a * x),
    "Quantize": lambda x, scale, _, zero, *ends: _saturated(np.rint(x / scale) + zero, *ends),
    "Reciprocal": lambda x: 1 / x,
    "Relu": lambda x: np.where(x < 0, 0, x),
    "Round": np.rint,
    "Saturate": _saturated,
    "Scale": np.multiply,
    "Selu": lambda x, a, g: g * np.where(x < 0, a * np.expm1(x), x + 0),
    "ShiftLeft": _shift_left,
    "ShiftRight": _shift_right,
    "Shrink": lambda x, b, end: np.where(x < -end, x + b, np.where(x > end, x - b, 0)),
    "Sigmoid": _sigmoid,
    "Silu": lambda x: x * _sigmoid(x),
    "Softplus": lambda x: np.logaddexp(0, x),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Steps": lambda x, scale, _: x / scale,
    "Sub": np.subtract,
    "Swish": lambda x, a: x * _sigmoid(a * x),
    "ThresholdedRelu": lambda x, a: np.where(x > a, x, 0),
    "Where": np.where,
    "Xor": np.not_equal,
}  # fmt: skip
"""Every step of `cuda.pointwise.TABLE`, over arrays; but Iota, which counts the results."""


def activation(key: str, alpha: float, v: np.ndarray) -> np.ndarray:
    """The activation `key` of v."""
    row = BY_KEY[key]
    numbers = dict(row.numbers)
    if row.attributes:
        numbers["alpha"] = alpha
    result: np.ndarray = STEPS[row.name](v, *numbers.values())
    return result


@cache
def _derivative(key: str, alpha: float) -> Any:
    """The derivative of an activation as its row says it in ONNX, for arrays of float64."""
    from onnx.reference import ReferenceEvaluator

    row = BY_KEY[key]
    body = written_out(row.gradient_text()).replace("@alpha", repr(alpha))
    text = f"agraph (double[N] z, double[N] dy) => (double[N] dz) {{\n{body}}}"
    return ReferenceEvaluator(to_proto(text_model(text)))


def derivative(key: str, alpha: float, z: np.ndarray) -> np.ndarray:
    """act'(z)."""
    flat = z.reshape(-1).astype(np.float64)
    (d,) = _derivative(key, alpha).run(None, {"z": flat, "dy": np.ones_like(flat)})
    result: np.ndarray = d.reshape(z.shape)
    return result


def activated(p: Contraction, v: np.ndarray) -> np.ndarray:
    """act(v), as the problem's epilogue has it."""
    return activation(p.epilogue.act, p.epilogue.act_alpha, v)


def evaluate(
    expression: Expression, reads: Sequence[np.ndarray], writes: Sequence[Tensor]
) -> list[np.ndarray]:
    """What an expression stores, in the shapes and dtypes of `writes`.

    Each step's result has its dtype, that of narrow floats float32, as a kernel's register has.
    """
    values: list[Any] = [*map(_register, reads), *(np.asarray(v) for _, v in expression.scalars)]
    with np.errstate(all="ignore"):
        for step in expression.steps:
            kind = _register_type(step.dtype)
            if step.name == "Iota":
                result = np.arange(writes[0].size).reshape(writes[0].shape)
            else:
                operands = [values[a] for a in step.args]
                if step.name in _ALIKE:
                    operands = [np.asarray(v).astype(kind) for v in operands]
                elif any(v.dtype == np.uint64 for v in operands):  # as C has it; NumPy takes floats
                    operands = [v.astype(np.uint64) if v.dtype.kind == "i" else v for v in operands]
                result = STEPS[step.name](*operands)
            values.append(np.asarray(result).astype(kind))
    stored = zip(expression.stores, writes, strict=True)
    return [_stored(np.broadcast_to(values[s], t.shape), t.dtype) for s, t in stored]


def _register_type(dtype: str) -> np.dtype[Any]:
    """What kernels compute with for an element type."""
    if dtype in NARROW:
        return np.dtype(np.int32)
    short = "float" in dtype and dtype not in ("float32", "float64")
    return np.dtype(np.float32) if short else dtype_of(dtype)


def _register(array: np.ndarray) -> np.ndarray:
    return array.astype(_register_type(array.dtype.name))


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values rounded to a type, as a store does; narrow integers lose their upper bits."""
    if dtype in NARROW:
        bits = int(dtype[-1])
        low = values.astype(np.int64) & (2**bits - 1)
        sign = 2 ** (bits - 1) if dtype.startswith("int") else 0
        values = (low ^ sign) - sign
    with np.errstate(all="ignore"):
        return values.astype(dtype_of(dtype))

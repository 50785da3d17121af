"""Pointwise expressions by NumPy: each step in its dtype, 16-bit floats in float32."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from onnx_fuse.ops.activations import BY_KEY
from onnx_fuse.program.call import Tensor, dtype_of
from onnx_fuse.program.expression import Expression
from onnx_fuse.program.problem import Problem

_ERF = np.vectorize(math.erf, otypes=[float])


NARROW_FLOATS = (
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn",
)  # fmt: skip


def _rounded_to(name: str, x: Any) -> Any:
    return np.asarray(x).astype(np.float32).astype(dtype_of(name))


def _trunc_div(a: Any, b: Any) -> Any:
    return a / b if np.asarray(a).dtype.kind == "f" else np.trunc(np.true_divide(a, b))


STEPS: dict[str, Any] = {
    "Elu": lambda x, a: np.where(x < 0, a * np.expm1(x), x),
    "ClippedRelu": lambda x, a: np.clip(x, 0, a),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "Mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "Selu": lambda x, a, g: g * np.where(x < 0, a * np.expm1(x), x),
    "Softplus": lambda x: np.logaddexp(0, x),
    "LeakyRelu": lambda x, a: np.where(x < 0, a * x, x),
    "ThresholdedRelu": lambda x, a: np.where(x > a, x, 0),
    "Identity": lambda x: x,
    "Cast": lambda x: x,
    "CastFloat16": lambda x: np.asarray(x).astype(np.float16),
    "CastBFloat16": lambda x: np.asarray(x).astype(dtype_of("bfloat16")),
    "CastBool": lambda x: np.asarray(x) != 0,
    "Abs": np.abs,
    "Add": np.add,
    "And": np.logical_and,
    "ClipMax": np.minimum,
    "ClipMin": np.maximum,
    "Cos": np.cos,
    "Div": _trunc_div,
    "Equal": np.equal,
    "Erf": _ERF,
    "Exp": np.exp,
    "Gelu": lambda x: 0.5 * x * (1 + _ERF(x * 0.7071067811865476)),
    "GeluTanh": lambda x: 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3))),
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "IsNaN": np.isnan,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Log": np.log,
    "Max": np.maximum,
    "Min": np.minimum,
    "Mod": np.mod,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "Pow": np.power,
    "QuickGelu": lambda x, a: x / (1 + np.exp(-a * x)),
    "Reciprocal": lambda x: 1 / x,
    "Round": np.rint,
    "Saturate": lambda x, low, high: np.where(x >= low, np.minimum(x, high), low),
    "Scale": np.multiply,
    **{f"Cast{name}": partial(_rounded_to, name) for name in NARROW_FLOATS},
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Sign": np.sign,
    "Silu": lambda x: x / (1 + np.exp(-x)),
    "Sin": np.sin,
    "Sqrt": np.sqrt,
    "Square": lambda x: x * x,
    "Sub": np.subtract,
    "Tanh": np.tanh,
    "Where": np.where,
}


def activation(key: str, alpha: float, v: np.ndarray) -> np.ndarray:
    """The activation `key` of v."""
    row = BY_KEY[key]
    numbers = dict(row.numbers)
    if row.attributes:
        numbers["alpha"] = alpha
    result: np.ndarray = STEPS[row.name](v, *numbers.values())
    return result


def activated(p: Problem, v: np.ndarray) -> np.ndarray:
    """act(v), as the problem's epilogue has it."""
    return activation(p.epilogue.act, p.epilogue.act_alpha, v)


def evaluate(
    expression: Expression, reads: list[np.ndarray], writes: list[Tensor]
) -> list[np.ndarray]:
    """What an expression stores, in the shapes and dtypes of `writes`."""
    values: list[Any] = [*reads, *(np.asarray(v) for _, v in expression.scalars)]
    with np.errstate(all="ignore"):
        for step in expression.steps:
            if step.name == "Iota":
                result = np.arange(writes[0].size).reshape(writes[0].shape)
            else:
                result = STEPS[step.name](*(values[a] for a in step.args))
            # kernels compute what is stored in 16 bits in float
            kind = "float32" if step.dtype in ("float16", "bfloat16") else step.dtype
            values.append(np.asarray(result).astype(dtype_of(kind)))
    stored = zip(expression.stores, writes, strict=True)
    return [np.broadcast_to(values[s], t.shape).astype(dtype_of(t.dtype)) for s, t in stored]

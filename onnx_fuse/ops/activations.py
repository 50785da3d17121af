"""The one table of activations: what fuses behind a product, a convolution or a norm.

A row says all that the project knows of `y = act(z)`: its ONNX operator, act and its derivative as
ONNX text, which function bodies and their gradients are made of (they cannot branch on a string),
and act and its slope as CUDA text, which a kernel gets as macros. The fused operators' names,
their recognition, their bodies, gradients, epilogues and pointwise kernels all follow from it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_fuse.ir.build import Builder
from onnx_fuse.ir.constants import FUSE


@dataclass(frozen=True)
class Activation:
    """`y = act(z)`, in ONNX and in CUDA.

    `op_type`, `domain` name the standalone op; `fixed` are attributes it must have, with the
    default first where the standard has one; `attributes` is the one number a fused op takes over,
    as an ONNX signature with its default, which is `alpha` in every text.

    ONNX, as formulas (`ops.formula`): `forward` is y from z, and `gradient` dy act'(z) from dy and
    z, of which the operator's own gradient is made and the bodies of fused gradients.

    CUDA, in float: `value` is the body of a function of x and alpha that returns act(x), `slope`
    that of one of y, z and alpha that returns y act'(z). `Out` is the type that the result is
    rounded to; what they call is in common.cuh. `normal`: act(x) is x P(X < x) of a normal X, which
    common.cuh computes of several numbers at once where `Out` has 16 bits.

    `pointwise` is a C expression in any float type {t} of {0}, and of the attributes from {1} on;
    what it calls is in pointwise/math.cuh.
    """

    name: str
    op_type: str
    forward: str
    gradient: str
    pointwise: str = ""
    value: str = ""
    slope: str = ""
    attributes: str = ""
    domain: str = ""
    fixed: tuple[tuple[str, str | float], ...] = ()
    normal: bool = False

    @property
    def alpha(self) -> float:
        """The default of its one attribute; 0 where it has none."""
        return float(self.attributes.partition("=")[2] or 0.0)

    @property
    def key(self) -> str:
        """What problems of kernels call it: gelu_tanh."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.name).lower()

    @property
    def numbers(self) -> tuple[tuple[str, float], ...]:
        """The operator's attributes that are numbers, with their defaults, as {1} and so on."""
        parameter = ((self.attributes.partition(":")[0], self.alpha),) if self.attributes else ()
        return parameter + tuple((name, v) for name, v in self.fixed if not isinstance(v, str))

    @property
    def macros(self) -> dict[str, str]:
        """What a kernel is compiled with to have it: see common.cuh."""
        defined = {"ACT": self.name, "ACT_VALUE": self.value, "ACT_SLOPE": self.slope}
        return defined | ({"ACT_NORMAL": "1"} if self.normal else {})

    def gradient_text(self, result: str = "dz", dy: str = "dy") -> str:
        """The gradient as lines of a body, with names and attributes of its own."""
        *lines, last = self.gradient.split("; ")
        text = "\n".join(f"  {line}" for line in (*lines, f"{result} = {last}"))
        for name in (line.partition(" = ")[0] for line in lines):
            text = re.sub(rf"\b{name}\b", f"act_{name}", text)
        for name, value in self.fixed:
            text = text.replace(f"@{name}", repr(value))
        return re.sub(r"\bdy\b", dy, text) + "\n"

    def alone(self, op: Builder, x: ir.Value, fused: ir.Node) -> Any:
        """The standalone op of x, with the attribute that the fused node took over."""
        numbers = {k: a.value for k, a in fused.attributes.items() if f"{k}:" in self.attributes}
        attributes = numbers | dict(self.fixed)
        return op.node(self.op_type, [x], domain=self.domain, attributes=attributes)


def signature(*attributes: str) -> str:
    """`<epsilon: float = 1e-05, alpha: float = 0.01>`, or nothing."""
    inner = ", ".join(a for a in attributes if a)
    return f"<{inner}> " if inner else ""


SQRT_2_PI = math.sqrt(2 / math.pi)
SELU = (("alpha", 1.67326319217681884765625), ("gamma", 1.05070102214813232421875))

ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation(
            "Relu",
            "Relu",
            "Relu(z)",
            "Where(z > 0, dy, 0)",
            pointwise="{0} < 0 ? ({t})0 : {0}",
            value="return max_nan(x, 0.0f);",
            slope="return z > 0.0f ? y : 0.0f;",
        ),
        Activation(  # ReLU6, which files have as a Clip between constants: see `activation_of`
            "ClippedRelu",
            "ClippedRelu",
            "Clip(z, 0, @alpha)",
            "Where(Or(z < 0, z > @alpha), 0, dy)",
            attributes="alpha: float = 6.0",
            domain=FUSE,
            pointwise="{0} < 0 ? ({t})0 : {0} > ({t}){1} ? ({t}){1} : {0}",
            value="return x < 0.0f ? 0.0f : x > alpha ? alpha : x;",
            slope="return z < 0.0f || z > alpha ? 0.0f : y;",
        ),
        Activation(
            "LeakyRelu",
            "LeakyRelu",
            "LeakyRelu <alpha: float = @alpha> (z)",
            "dy * Where(z > 0, 1, @alpha)",
            attributes="alpha: float = 0.01",
            pointwise="{0} < 0 ? {1} * {0} : {0}",
            value="return x < 0.0f ? alpha * x : x;",
            slope="return z > 0.0f ? y : alpha * y;",
        ),
        Activation(
            "Elu",
            "Elu",
            "Elu <alpha: float = @alpha> (z)",
            "dy * Where(z > 0, 1, @alpha * Exp(z))",
            attributes="alpha: float = 1.0",
            pointwise="{0} < 0 ? {1} * m_expm1({0}) : {0}",
            value="return x < 0.0f ? alpha * expm1f(x) : x;",
            slope="return z > 0.0f ? y : y * (alpha * __expf(z));",
        ),
        Activation(
            "Selu",
            "Selu",
            "Selu(z)",
            "dy * Where(z > 0, @gamma, @alpha * @gamma * Exp(z))",
            fixed=SELU,
            pointwise="{2} * ({0} > 0 ? {0} : {1} * m_expm1({0} + ({t})0))",  # of -0 it is +0
            value="return 1.05070102f * (x > 0.0f ? x : 1.67326319f * expm1f(x + 0.0f));",
            slope="return y * (z > 0.0f ? 1.05070102f : 1.75809932f * __expf(z));",
        ),
        Activation(
            "Gelu",
            "Gelu",
            'Gelu <approximate: string = "none"> (z)',
            # Φ(z) + z φ(z)
            "cdf = (Erf(z * Sqrt(0.5)) + 1) * 0.5; "
            "pdf = Exp(z * z * -0.5) * (1 / Sqrt(2 * pi)); dy * (cdf + z * pdf)",
            fixed=(("approximate", "none"),),
            pointwise="m_gelu({0})",
            value="return x * normal_cdf(x);",
            slope="return normal_slope(y, z, normal_cdf(z));",
            normal=True,
        ),
        Activation(
            "GeluTanh",
            "Gelu",
            'Gelu <approximate: string = "tanh"> (z)',
            # t = tanh(b (z + c z³));  ½ (1 + t) + ½ z (1 - t²) b (1 + 3 c z²)
            "z2 = z * z; t = Tanh(z * (z2 * (Sqrt(2 / pi) * 0.044715) + Sqrt(2 / pi))); "
            "inner = z * (z2 * (3 * Sqrt(2 / pi) * 0.044715) + Sqrt(2 / pi)); "
            "dy * ((t + (1 - t * t) * inner + 1) * 0.5)",
            fixed=(("approximate", "tanh"),),
            pointwise="({t})0.5 * {0} * (1 + m_tanh(({t})0.79788456080286536 * "
            "({0} + ({t})0.044715 * {0} * {0} * {0})))",
            value="return x * tanh_cdf<Out>(x);",
            # the square is finite where it meets s - s^2 = 0
            slope="const float s = tanh_cdf<Out>(z), square = fminf(z * z, 1e12f); "
            "return y * (s + z * (s - s * s) * (1.5957691216057308f + 0.21406445f * square));",
        ),
        Activation(
            "QuickGelu",
            "QuickGelu",
            "z * Sigmoid(@alpha * z)",
            # σ (1 + az (1 - σ))
            "az = z * @alpha; s = Sigmoid(az); dy * (s * (az * (1 - s) + 1))",
            attributes="alpha: float = 1.702",
            domain=FUSE,
            pointwise="{0} * m_sigmoid({1} * {0})",
            value="return x * sigmoid<Out>(alpha * x);",
            slope="const float s = sigmoid<Out>(alpha * z); "
            "return y * (s + alpha * z * s * (1.0f - s));",
        ),
        Activation(
            "Silu",
            "Silu",
            "z * Sigmoid(z)",
            "s = Sigmoid(z); dy * (s * (z * (1 - s) + 1))",
            domain=FUSE,
            pointwise="{0} * m_sigmoid({0})",
            value="return x * sigmoid<Out>(x);",
            slope="const float s = sigmoid<Out>(z); return y * (s + z * s * (1.0f - s));",
        ),
        Activation(
            "Mish",
            "Mish",
            "Mish(z)",
            # t = tanh(softplus(z));  t + z σ(z) (1 - t²)
            "t = Tanh(Softplus(z)); dy * (t + z * Sigmoid(z) * (1 - t * t))",
            pointwise="{0} * m_tanh(m_softplus({0}))",
            value="return x * tanh_softplus(x);",
            # finite where it meets 1 - t^2 = 0
            slope="const float t = tanh_softplus(z), s = sigmoid<Out>(z); "
            "return y * (t + fminf(z, 1e4f) * s * (1.0f - t * t));",
        ),
        Activation(
            "Sigmoid",
            "Sigmoid",
            "Sigmoid(z)",
            "s = Sigmoid(z); dy * (s * (1 - s))",
            pointwise="m_sigmoid({0})",
            value="return sigmoid<Out>(x);",
            slope="const float s = sigmoid<Out>(z); return y * (s * (1.0f - s));",
        ),
        Activation(
            "HardSigmoid",
            "HardSigmoid",
            "HardSigmoid <alpha: float = @alpha, beta: float = 0.5> (z)",
            "v = z * @alpha + @beta; Where(And(v > 0, v < 1), dy, 0) * @alpha",
            attributes="alpha: float = 0.2",
            fixed=(("beta", 0.5),),
            pointwise="m_max(({t})0, m_min(({t})1, {1} * {0} + {2}))",
            value="return x == x ? __saturatef(alpha * x + 0.5f) : x;",
            slope="const float v = alpha * z + 0.5f; "
            "return v > 0.0f && v < 1.0f ? alpha * y : 0.0f;",
        ),
        Activation(
            "HardSwish",
            "HardSwish",
            "HardSwish(z)",
            # z/3 + 1/2 within (-3, 3), 0 below, 1 above
            "dy * Where(z < 3, Where(z > -3, z * (1 / 3) + 0.5, 0), 1)",
            pointwise="{0} * m_max(({t})0, m_min(({t})1, {0} / 6 + ({t})0.5))",
            value="return x * __saturatef(x * 0.166666667f + 0.5f);",
            slope="return z >= 3.0f ? y : z > -3.0f ? y * (z * 0.333333333f + 0.5f) : 0.0f;",
        ),
        Activation(
            "Tanh",
            "Tanh",
            "Tanh(z)",
            "t = Tanh(z); dy * (1 - t * t)",
            pointwise="m_tanh({0})",
            value="return tanhf(x);",
            slope="const float t = tanhf(z); return y * (1.0f - t * t);",
        ),
        Activation(
            "Softplus",
            "Softplus",
            "Softplus(z)",
            "dy * Sigmoid(z)",
            pointwise="m_softplus({0})",
            value="return max_nan(x, 0.0f) + log1pf(__expf(-fabsf(x)));",
            slope="return y * sigmoid<Out>(z);",
        ),
    )
}
OPERATORS = tuple({a.op_type for a in ACTIVATIONS.values()})
"""The types of the standalone operators."""
BY_KEY = {a.key: a for a in ACTIVATIONS.values()}


def activation_macros(key: str) -> dict[str, str]:
    """What a kernel is compiled with to have the activation `key`; nothing for none."""
    return BY_KEY[key].macros if key else {}

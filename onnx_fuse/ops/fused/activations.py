"""The activations that fuse behind a Gemm or Conv, in one table; and QuickGelu and Silu as ops.

Function bodies cannot branch on a string, so each fused family is generated from this table: a row
writes act(z) and act'(z) in ONNX text, whose constants take the dtype of `z`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_fuse.onnx.build import Builder
from onnx_fuse.onnx.common import FUSE
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.rewrite import Rewriter, Rule, attribute, close, is_float, scalar, users


@dataclass(frozen=True)
class Activation:
    """`y = act(z)`: `forward` computes y from z, `derivative` computes d = act'(z) from z.

    `op_type`, `domain` name the standalone op; `fixed` are attributes it must have, `attributes`
    those a fused op takes over, as an ONNX signature with defaults.
    """

    name: str
    op_type: str
    forward: str
    derivative: str
    attributes: str = ""
    domain: str = ""
    fixed: tuple[tuple[str, str], ...] = ()


def signature(*attributes: str) -> str:
    """`<epsilon: float = 1e-05, alpha: float = 0.01>`, or nothing."""
    inner = ", ".join(a for a in attributes if a)
    return f"<{inner}> " if inner else ""


def _const(name: str, value: float | str) -> str:
    return (
        f"  {name}_f = Constant <value_float: float = {value}> ()\n"
        f"  {name} = CastLike ({name}_f, z)\n"
    )


_SQRT_2_PI = math.sqrt(2 / math.pi)
_SIGMOID_DERIVATIVE = "  s = Sigmoid (z)\n  s2 = Mul (s, s)\n  d = Sub (s, s2)\n"
_QUICK_FORWARD = _const("a", "@alpha") + "  az = Mul (a, z)\n  s = Sigmoid (az)\n  y = Mul (z, s)\n"
# d/dz z·σ(az) = σ + az σ (1 - σ)
_SILU_TAIL = (
    "  s = Sigmoid (az)\n  azs = Mul (az, s)\n  azs2 = Mul (azs, s)\n  t = Sub (azs, azs2)\n"
    "  d = Add (s, t)\n"
)

ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation(
            "Relu",
            "Relu",
            "  y = Relu (z)\n",
            _const("zero", "0.0") + "  p = Greater (z, zero)\n  d = CastLike (p, z)\n",
        ),
        Activation(
            "LeakyRelu",
            "LeakyRelu",
            "  y = LeakyRelu <alpha: float = @alpha> (z)\n",
            _const("zero", "0.0")
            + _const("one", "1.0")
            + _const("a", "@alpha")
            + "  p = Less (z, zero)\n  d = Where (p, a, one)\n",
            attributes="alpha: float = 0.01",
        ),
        Activation(
            "Gelu",
            "Gelu",
            '  y = Gelu <approximate: string = "none"> (z)\n',
            # Φ(z) + z φ(z)
            _const("half", "0.5")
            + _const("one", "1.0")
            + _const("r", repr(math.sqrt(0.5)))
            + _const("g", repr(1 / math.sqrt(2 * math.pi)))
            + "  zr = Mul (z, r)\n  e = Erf (zr)\n  e1 = Add (e, one)\n  cdf = Mul (e1, half)\n"
            "  zr2 = Mul (zr, zr)\n  nzr2 = Neg (zr2)\n  ex = Exp (nzr2)\n  pdf = Mul (ex, g)\n"
            "  zpdf = Mul (z, pdf)\n  d = Add (cdf, zpdf)\n",
            fixed=(("approximate", "none"),),
        ),
        Activation(
            "GeluTanh",
            "Gelu",
            '  y = Gelu <approximate: string = "tanh"> (z)\n',
            # t = tanh(b(z + c z³));  ½(1 + t) + ½ z (1 - t²) b (1 + 3c z²)
            _const("half", "0.5")
            + _const("one", "1.0")
            + _const("b", repr(_SQRT_2_PI))
            + _const("c", "0.044715")
            + _const("c3", "0.134145")
            + "  z2 = Mul (z, z)\n  cz2 = Mul (c, z2)\n  cz2_1 = Add (cz2, one)\n"
            "  zb = Mul (z, b)\n  u = Mul (zb, cz2_1)\n  t = Tanh (u)\n  t1 = Add (t, one)\n"
            "  left = Mul (t1, half)\n  tt = Mul (t, t)\n  dt = Sub (one, tt)\n"
            "  c3z2 = Mul (c3, z2)\n  c3z2_1 = Add (c3z2, one)\n  du = Mul (zb, c3z2_1)\n"
            "  dtdu = Mul (dt, du)\n  right = Mul (dtdu, half)\n  d = Add (left, right)\n",
            fixed=(("approximate", "tanh"),),
        ),
        Activation(
            "QuickGelu",
            "QuickGelu",
            _QUICK_FORWARD,
            _const("a", "@alpha") + "  az = Mul (a, z)\n" + _SILU_TAIL,
            attributes="alpha: float = 1.702",
            domain=FUSE,
        ),
        Activation(
            "Silu",
            "Silu",
            "  s = Sigmoid (z)\n  y = Mul (z, s)\n",
            "  az = Identity (z)\n" + _SILU_TAIL,
            domain=FUSE,
        ),
        Activation("Sigmoid", "Sigmoid", "  y = Sigmoid (z)\n", _SIGMOID_DERIVATIVE),
        Activation(
            "Tanh",
            "Tanh",
            "  y = Tanh (z)\n",
            _const("one", "1.0") + "  t = Tanh (z)\n  tt = Mul (t, t)\n  d = Sub (one, tt)\n",
        ),
    )
}

ACTIVATION_OPS = tuple({a.op_type for a in ACTIVATIONS.values()})


def activation_of(node: ir.Node) -> tuple[Activation, dict[str, float]] | None:
    """The table's row for a standalone activation node, and the attributes a fused op inherits."""
    for row in ACTIVATIONS.values():
        if (node.op_type, node.domain) != (row.op_type, row.domain):
            continue
        defaults = {"approximate": "none"}
        if all(attribute(node, key, defaults.get(key)) == value for key, value in row.fixed):
            taken = {
                k: a.as_float() for k, a in node.attributes.items() if k not in dict(row.fixed)
            }
            return row, taken
    return None


def act_grad(op: Any, node: ir.Node, name: str, dy: Any, z: Any) -> Any:
    """dy act'(z), by the op `{name}Grad`; `node` has the attributes."""
    wanted = ACTIVATIONS[name].attributes
    kept = {k: a.value for k, a in node.attributes.items() if f"{k}:" in wanted}
    dz = op.node(f"{name}Grad", [dy, z], domain=FUSE, attributes=kept)
    dz.dtype, dz.shape = z.dtype, z.shape
    return dz


def _grad(op: Any, node: ir.Node, dys: Sequence[Any]) -> Sequence[Any]:
    return [act_grad(op, node, node.op_type, dys[0], node.inputs[0])]


def _bodies(row: Activation, name: str, inputs: str, text: str) -> str:
    return f"{name} {signature(row.attributes)}({inputs}) => (y) {{\n{text}}}"


register(
    *(
        OpDef(a.name, FUSE, body=_bodies(a, a.name, "z", a.forward), grad=_grad)
        for a in (ACTIVATIONS["QuickGelu"], ACTIVATIONS["Silu"])
    ),
    *(
        OpDef(
            f"{a.name}Grad",
            FUSE,
            body=_bodies(a, f"{a.name}Grad", "dy, z", f"{a.derivative}  y = Mul (dy, d)\n"),
        )
        for a in ACTIVATIONS.values()
    ),
)


# ---- recognition: the written-out forms ------------------------------------------------------

Polynomial = dict[tuple[int, int], float]
"""coefficient of x^i t^j by (i, j), where t is the output of the anchor (Erf, Tanh, Sigmoid)."""


def polynomial(
    value: ir.Value | None, x: ir.Value, t: ir.Value | None, depth: int = 12
) -> Polynomial | None:
    """`value` as a polynomial in x and t; None where anything else enters.

    One evaluation replaces the dozens of patterns for x*0.5*(1+erf(x/√2)) in every operand order.
    """
    if value is x:
        return {(1, 0): 1.0}
    if value is t:
        return {(0, 1): 1.0}
    number = scalar(value)
    if number is not None:
        return {(0, 0): number}
    node = value.producer() if value is not None else None
    if node is None or node.domain or depth == 0:
        return None
    if node.op_type not in ("Add", "Sub", "Mul", "Div", "Pow", "Neg", "Identity"):
        return None
    terms = [polynomial(v, x, t, depth - 1) for v in node.inputs]
    if any(p is None for p in terms):
        return None
    a, b = terms[0] or {}, (terms[1] if len(terms) > 1 else None) or {}
    match node.op_type:
        case "Identity":
            return a
        case "Neg":
            return _combine(a, {}, -1.0)
        case "Add":
            return _combine(a, b, 1.0, 1.0)
        case "Sub":
            return _combine(a, b, 1.0, -1.0)
        case "Mul":
            return _product(a, b)
    divisor = b.get((0, 0))
    if set(b) != {(0, 0)} or divisor is None:
        return None
    if node.op_type == "Div":
        return _combine(a, {}, 1 / divisor) if divisor else None
    if divisor not in (1.0, 2.0, 3.0):
        return None
    power = a
    for _ in range(int(divisor) - 1):
        power = _product(power, a)
    return power


def _combine(a: Polynomial, b: Polynomial, ca: float, cb: float = 0.0) -> Polynomial:
    return {k: ca * a.get(k, 0.0) + cb * b.get(k, 0.0) for k in {**a, **b}}


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    result: Polynomial = {}
    for (i, j), p in a.items():
        for (k, m), q in b.items():
            result[i + k, j + m] = result.get((i + k, j + m), 0.0) + p * q
    return result


def _equals(p: Polynomial | None, expected: Polynomial) -> bool:
    if p is None:
        return False
    p = {k: c for k, c in p.items() if c}
    return set(p) == set(expected) and all(close(p[k], c) for k, c in expected.items())


@dataclass(frozen=True)
class _Form:
    """act(x) = `top` in x and t, with t = anchor(`argument` in x)."""

    anchor: str
    argument: Polynomial
    top: Polynomial
    op_type: str
    domain: str
    attributes: tuple[tuple[str, str], ...] = ()


_HALVES: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
_CUBIC: Polynomial = {(1, 0): _SQRT_2_PI, (3, 0): _SQRT_2_PI * 0.044715}
FORMS = (
    _Form("Erf", {(1, 0): math.sqrt(0.5)}, _HALVES, "Gelu", "", (("approximate", "none"),)),
    _Form("Tanh", _CUBIC, _HALVES, "Gelu", "", (("approximate", "tanh"),)),
    _Form("Sigmoid", {(1, 0): 1.0}, {(1, 1): 1.0}, "Silu", FUSE),
)


def _sources(argument: ir.Value | None) -> list[ir.Value]:
    """What the polynomial under an anchor may be written in: itself and what it is made of."""
    found: list[ir.Value] = []
    queue = [argument]
    while queue and len(found) < 24:
        value = queue.pop(0)
        if value is None or value in found or scalar(value) is not None:
            continue
        found.append(value)
        node = value.producer()
        if node is not None and not node.domain:
            queue.extend(v for v in node.inputs if v is not None)
    return found


def _recognize(rw: Rewriter, node: ir.Node) -> bool:
    t, argument = node.outputs[0], node.inputs[0]
    if not is_float(t):
        return False
    tops = _tops(t)
    for form in (f for f in FORMS if f.anchor == node.op_type):
        for x in _sources(argument):
            inner = polynomial(argument, x, None)
            quick = form.op_type == "Silu" and inner is not None and set(inner) == {(1, 0)}
            if not quick and not _equals(inner, form.argument):
                continue
            alpha = inner[1, 0] if quick and inner else 1.0
            top = next((v for v in tops if _equals(polynomial(v, x, t), form.top)), None)
            if top is None:
                continue
            op = Builder()
            if quick and not close(alpha, 1.0):
                y = op.QuickGelu(x, domain=FUSE, alpha=alpha)
            else:
                y = op.node(form.op_type, [x], domain=form.domain, attributes=dict(form.attributes))
            producer = top.producer()
            assert producer is not None
            return rw.replace(producer, op, [top], [y])
    return False


def _tops(t: ir.Value) -> list[ir.Value]:
    """Values above `t` that could be the whole activation, the nearest first."""
    found, queue = [], [(t, 0)]
    while queue:
        value, depth = queue.pop(0)
        for node in users(value):
            if not node.domain and node.op_type in ("Add", "Mul", "Div") and depth < 5:
                found.append(node.outputs[0])
                queue.append((node.outputs[0], depth + 1))
    return found


def _native(rw: Rewriter, node: ir.Node) -> bool:
    """Node forms of other domains and newer opsets, brought to the table's own."""
    op = Builder()
    x = node.inputs[0]
    match node.domain, node.op_type:
        case "", "Swish":
            alpha = attribute(node, "alpha", 1.0)
            silu = alpha == 1.0
            y = op.Silu(x, domain=FUSE) if silu else op.QuickGelu(x, domain=FUSE, alpha=alpha)
        case "com.microsoft", "QuickGelu":
            y = op.QuickGelu(x, domain=FUSE, alpha=attribute(node, "alpha", 1.702))
        case "com.microsoft", "Gelu" | "BiasGelu":
            y = op.Gelu(op.Add(*node.inputs) if len(node.inputs) > 1 else x)
        case "com.microsoft", "FastGelu":
            biased = len(node.inputs) > 1 and node.inputs[1] is not None
            y = op.Gelu(op.Add(*node.inputs) if biased else x, approximate="tanh")
        case _:
            return False
    return rw.replace(node, op, [node.outputs[0]], [y])


RULES = (
    Rule("Activation", 0, ("Swish", "QuickGelu", "Gelu", "BiasGelu", "FastGelu"), _native),
    Rule("Activation", 0, tuple({f.anchor for f in FORMS}), _recognize),
)

"""Recognition of activations, written out or native; QuickGelu and Silu as operators; act'(z).

What is known of each activation stands in the table of `ops/activations.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, rank
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.activations import ACTIVATIONS, SQRT_2_PI, Activation, signature
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.rules import (
    Rewriter,
    Rule,
    attribute,
    consumers,
    is_constant,
    is_float,
    number,
    other_operand,
    producer,
    scalar,
    sole_consumer,
    typed,
)


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
        for a in (ACTIVATIONS[name] for name in ("ClippedRelu", "QuickGelu", "Silu"))
    ),
    *(
        OpDef(
            f"{a.name}Grad",
            FUSE,
            body=_bodies(a, f"{a.name}Grad", "dy, z", f"{a.derivative}  y = dy * d\n"),
        )
        for a in ACTIVATIONS.values()
    ),
)


# ---- recognition: the written-out forms ------------------------------------------------------

Polynomial = dict[tuple[int, int], float]
"""coefficient of x^i t^j by (i, j), where t is the output of the anchor (Erf, Tanh, Sigmoid)."""
_DEGREE = 8


class _Polynomials:
    """Values as polynomials in x and t; None where anything else enters.

    One evaluation replaces the dozens of patterns for x*0.5*(1+erf(x/√2)) in every operand order.
    A constant of more axes than x may have enters nothing: it would raise the result's rank.
    """

    def __init__(self, x: ir.Value, t: ir.Value | None) -> None:
        self.seen: dict[ir.Value, Polynomial | None] = {x: {(1, 0): 1.0}}
        self.size = rank(x)
        if t is not None:
            self.seen[t] = {(0, 1): 1.0}

    def of(self, value: ir.Value | None, depth: int = 12) -> Polynomial | None:
        if value is None or depth == 0:
            return None
        if value not in self.seen:
            found = self._of(value, depth)
            high = found is not None and any(i + j > _DEGREE for i, j in found)
            self.seen[value] = None if high else found
        return self.seen[value]

    def _of(self, value: ir.Value, depth: int) -> Polynomial | None:
        held = scalar(value)
        if held is not None:
            axes = rank(value)
            fits = axes == 0 or (axes is not None and self.size is not None and axes <= self.size)
            return {(0, 0): held} if fits else None
        node = value.producer()
        if node is None or node.domain or node.op_type not in _ARITHMETIC:
            return None
        terms = [self.of(v, depth - 1) for v in node.inputs]
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


Coefficients = dict[tuple[int, int], Collection[float]]
"""What each coefficient of a form may be."""


def _stored(number: float, dtype: ir.DataType) -> float:
    """The number of type `dtype` that is nearest to `number`.

    That is what PyTorch's exporters write for 1.4142135, 0.7978845608, 0.044715 and the like, in
    every type (2.13, opsets 13 to 23); a constant of fewer digits is another function.
    """
    return float(np.asarray(number, dtype.numpy()))


def _erf_argument(dtype: ir.DataType) -> Coefficients:
    """x · √½, or x / √2."""
    return {(1, 0): (_stored(math.sqrt(0.5), dtype), 1 / _stored(math.sqrt(2), dtype))}


def _cubic_argument(dtype: ir.DataType) -> Coefficients:
    """√(2/π) (x + 0.044715 x³), the second coefficient as a product or by itself."""
    outer, inner = _stored(SQRT_2_PI, dtype), _stored(0.044715, dtype)
    return {(1, 0): (outer,), (3, 0): (outer * inner, _stored(SQRT_2_PI * 0.044715, dtype))}


def _agrees(p: Polynomial | None, wanted: Coefficients, tolerance: float = 0.0) -> bool:
    """Whether the coefficients agree with one of those `wanted`, within the tolerance."""
    if p is None:
        return False
    p = {k: c for k, c in p.items() if c}
    return set(p) == set(wanted) and all(
        any(math.isclose(p[k], c, rel_tol=tolerance) for c in choices)
        for k, choices in wanted.items()
    )


@dataclass(frozen=True)
class _Form:
    """act(x) = `top` in x and t, with t = anchor(`argument` in x): of a table operator.

    `formula` is what the operator computes, in float64.
    """

    anchor: str
    argument: Callable[[ir.DataType], Coefficients]
    top: Coefficients
    op_type: str
    domain: str
    formula: Callable[[np.ndarray, float], np.ndarray]
    attributes: tuple[tuple[str, str], ...] = ()


_HALF_OF_ALL: Coefficients = {(1, 0): (0.5,), (1, 1): (0.5,)}
FORMS = (
    _Form(
        "Erf",
        _erf_argument,
        _HALF_OF_ALL,
        "Gelu",
        "",
        lambda x, _: x * (0.5 * (1 + _erf(x * math.sqrt(0.5)))),
        (("approximate", "none"),),
    ),
    _Form(
        "Tanh",
        _cubic_argument,
        _HALF_OF_ALL,
        "Gelu",
        "",
        lambda x, _: x * (0.5 * (1 + np.tanh(SQRT_2_PI * x * (1 + 0.044715 * x * x)))),
        (("approximate", "tanh"),),
    ),
    _Form(
        "Sigmoid",
        lambda _: {(1, 0): (1.0,)},
        {(1, 1): (1.0,)},
        "Silu",
        FUSE,
        lambda x, alpha: x * _sigmoid(alpha * x),
    ),
)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    e = np.exp(-np.abs(x))
    return np.asarray(np.where(x < 0, e, np.ones_like(e)) / (1 + e))


def _erf(x: np.ndarray) -> np.ndarray:
    return np.array([math.erf(v) for v in x.flat], np.float64).reshape(x.shape)


_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Neg": np.negative,
    "Identity": np.asarray,
}
_ANCHORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Erf": _erf,
    "Tanh": np.tanh,
    "Sigmoid": _sigmoid,
}


def _probes(dtype: ir.DataType) -> np.ndarray:
    """Numbers at which two ways to write one function differ if they ever do.

    The largest is an eighth of the type's: in x (1 + erf(x/√2)) ½, the usual spelling, the product
    overflows above half of it, which no fused activation does.
    """
    kind = dtype.numpy()
    top, least = float(dtype.max) / 8, float(dtype.tiny)
    plain = [0.0, least, least / 4, 1e-3, 0.3, 1.0, 2.5, 6.0, 15.0, 100.0, 1e4, 1e30]
    plain += [math.sqrt(top), top, math.inf]
    sized = [v for v in plain if v <= top or v == math.inf]
    return np.array([*sized, *(-v for v in sized), math.nan], np.float64).astype(kind)


def _computes(value: ir.Value, x: ir.Value, form: _Form, alpha: float) -> bool:
    """Whether `value`, worked out step by step in its own type, is act(x) at all `_probes`.

    The polynomial is one of real numbers: where a step overflows or loses the sign of a zero, the
    operator must too.
    """
    dtype = x.dtype
    if dtype is None:
        return False
    kind = dtype.numpy()
    known: dict[ir.Value, np.ndarray] = {x: _probes(dtype)}

    def work(v: ir.Value) -> np.ndarray:
        if v not in known:
            held, node = scalar(v), v.producer()
            if held is not None:
                known[v] = np.asarray(held, np.float64).astype(kind)
            else:
                assert node is not None
                inputs = [work(i) for i in node.inputs if i is not None]
                if node.op_type in _ANCHORS:
                    known[v] = _ANCHORS[node.op_type](inputs[0].astype(np.float64)).astype(kind)
                else:
                    known[v] = _ARITHMETIC[node.op_type](*inputs).astype(kind)
        return known[v]

    with np.errstate(all="ignore"):
        found = work(value).astype(np.float64)
        probes = known[x].astype(np.float64)
        truth = form.formula(probes, alpha)
        nan, inf = np.isnan(truth), np.isinf(truth)
        if (np.isnan(found) != nan).any() or (np.isinf(found) != inf).any():
            return False
        # 16 roundings, the argument's among them, each of which tanh and erf pass on once at most
        bound = 16 * float(dtype.eps) * np.abs(probes) + float(dtype.tiny)
        near = (np.abs(found - truth) <= bound) | nan | inf
    return bool(near.all() and ((np.signbit(found) == np.signbit(truth)) | nan).all())


def _sources(argument: ir.Value | None) -> list[ir.Value]:
    """What the polynomial under an anchor may be written in: itself and what it is made of."""
    found: list[ir.Value] = []
    queue = [argument]
    while queue and len(found) < 24:
        value = queue.pop(0)
        if value is None or value in found or is_constant(value):
            continue
        found.append(value)
        node = value.producer()
        if node is not None and not node.domain:
            queue.extend(v for v in node.inputs if v is not None)
    return found


def _recognize(rw: Rewriter, node: ir.Node) -> bool:
    t, argument = node.outputs[0], node.inputs[0]
    if node.domain or not is_float(t) or t.dtype is None:
        return False
    tops, near = _tops(t), ""
    for form in (f for f in FORMS if f.anchor == node.op_type):
        wanted = form.argument(t.dtype)
        for x in _sources(argument):
            inner = _Polynomials(x, None).of(argument)
            quick = form.op_type == "Silu" and inner is not None and set(inner) == {(1, 0)}
            alpha = inner[1, 0] if quick and inner else 1.0
            if not quick and not _agrees(inner, wanted, _NEAR):
                continue
            above = _Polynomials(x, t)
            top = next((v for v in tops if _agrees(above.of(v), form.top, _NEAR)), None)
            if top is None:
                continue
            name = "QuickGelu" if quick and alpha != 1.0 else form.op_type
            if not _agrees(above.of(top), form.top) or not (quick or _agrees(inner, wanted)):
                near = f"its constants are near those of {name}, but not the same"
            elif quick and any(float(np.asarray(alpha, k)) != alpha for k in _exact(t.dtype)):
                near = f"its factor {alpha} is no {t.dtype.name.lower()} that a float32 holds"
            elif not _computes(top, x, form, alpha):
                near = f"it overflows, or loses a sign, where {name} does not"
            else:
                op = Builder()
                if name == "QuickGelu":
                    y = op.QuickGelu(x, domain=FUSE, alpha=alpha)
                else:
                    kept = dict(form.attributes)
                    y = op.node(form.op_type, [x], domain=form.domain, attributes=kept)
                maker = top.producer()
                assert maker is not None
                return rw.replace(maker, op, [top], [y])
    return rw.refuse("Activation", [node], near) if near else False


_NEAR = 2e-3
"""How far constants may be off for --explain to mention them."""


def _exact(dtype: ir.DataType) -> list[Any]:
    """The types that all must hold an attribute's number: its own float32, and the tensor's."""
    return [np.float32, dtype.numpy()]


def _tops(t: ir.Value) -> list[ir.Value]:
    """Values above `t` that could be the whole activation, the nearest first."""
    found: list[ir.Value] = []
    queue = [(t, 0)]
    while queue:
        value, depth = queue.pop(0)
        for node in consumers(value):
            wanted = not node.domain and node.op_type in ("Add", "Mul", "Div")
            if wanted and depth < 5 and len(found) < 64:
                found.append(node.outputs[0])
                queue.append((node.outputs[0], depth + 1))
    return found


def _native(rw: Rewriter, node: ir.Node) -> bool:
    """Node forms of newer opsets, brought to the table's own."""
    op = Builder()
    x = node.inputs[0]
    match node.domain, node.op_type:
        case "", "Swish" | "SwiGLU":
            alpha = attribute(node, "alpha", 1.0)
            silu = alpha == 1.0
            y = op.Silu(x, domain=FUSE) if silu else op.QuickGelu(x, domain=FUSE, alpha=alpha)
            if node.op_type == "SwiGLU":
                y = op.Mul(typed(y, x, x.shape if x is not None else None), node.inputs[1])
        case _:
            return False
    return rw.replace(node, op, [node.outputs[0]], [y])


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


def _older(rw: Rewriter, node: ir.Node) -> bool:
    """HardSwish and Mish as their ONNX functions, which graphs of older opsets have instead."""
    s, y = node.outputs[0], sole_consumer(node.outputs[0])
    x = node.inputs[0]
    if node.op_type == "Tanh":
        inner = producer(x, "Softplus")
        x, name = (inner.inputs[0] if inner is not None else None), "Mish"
    else:
        sixth = float(np.float32(1 / 6))
        given = [attribute(node, key, value) for key, value in (("alpha", 0.2), ("beta", 0.5))]
        name = "HardSwish" if given == [sixth, 0.5] else ""
    if y is None or y.op_type != "Mul" or y.domain or node.domain or not name or x is None:
        return False
    if other_operand(y, s) is not x:
        return False
    op = Builder()
    return rw.replace(y, op, [y.outputs[0]], [op.node(name, [x])])


def _shifted(rw: Rewriter, node: ir.Node) -> bool:
    """Clip(x + 3, 0, 6) / 6 as HardSigmoid, as TensorFlow and torch before opset 14 write it.

    A Mul by x may stand before the quotient, or behind it: HardSwish.
    """
    found, add = _clipped(node), producer(node.inputs[0], "Add")
    if found is None or found[1] != {"alpha": 6.0} or add is None:
        return False
    if node.outputs[0].dtype == ir.DataType.DOUBLE:
        return False  # onnxruntime has no HardSigmoid in double
    at = next((i for i in (0, 1) if number(add, i) == 3), None)
    x, end = add.inputs[1 - at] if at is not None else None, sole_consumer(node.outputs[0])
    if x is None or end is None or end.domain:
        return False
    op = Builder()
    s: ir.Value = op.HardSigmoid(x, alpha=float(np.float32(1 / 6)))
    if not _sixth(end, node.outputs[0]):
        if end.op_type != "Mul" or other_operand(end, node.outputs[0]) is not x:
            return False
        product = end.outputs[0]
        after = sole_consumer(product)
        if after is None or not _sixth(after, product):
            return False
        end, s = after, op.HardSwish(x)
    return rw.replace(end, op, [end.outputs[0]], [s])


def _sixth(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node is `value` / 6, or times the number of its type that is nearest to 1/6."""
    if node.domain or node.op_type not in ("Div", "Mul") or value.dtype is None:
        return False
    if node.op_type == "Div":
        return node.inputs[0] is value and number(node, 1) == 6
    at = 1 if node.inputs[0] is value else 0
    return number(node, at) == float(value.dtype.numpy().type(1 / 6))


RULES = (
    Rule("Activation", 0, ("Clip",), _shifted, conditions="readers constants weights types body"),
    Rule(
        "Activation",
        0,
        ("Tanh", "HardSigmoid"),
        _older,
        conditions="readers constants weights types body",
    ),
    Rule("Activation", 0, ("PRelu",), _one_slope, training=False, conditions="weights"),
    Rule("Activation", 0, ("Swish", "SwiGLU"), _native),
    Rule(
        "Activation",
        0,
        tuple({f.anchor for f in FORMS}),
        _recognize,
        conditions="weights types body",
    ),
)

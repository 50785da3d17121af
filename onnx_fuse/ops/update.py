"""Optimizer updates: each maps (parameter, gradient, state, ...) to (new parameter, new state).

w, g and every state tensor have one shape and one float dtype; `lr` is a float32 scalar and `step`
an int64 scalar, 1 at the first update. Scalars are worked out in float64: 1 - 0.999**1 in float32
has only four digits. The three update operators of ai.onnx.preview.training take any number of
tensors, which no function body can: `expand_standard_updates` writes them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from onnx_fuse.ir.build import Builder
from onnx_fuse.ir.constants import FUSE, PREVIEW
from onnx_fuse.ops.opdef import NoGrad, OpDef, register


def _float64(*attributes: str) -> str:
    """`x` and its complement `x_c = 1 - x` in float64 for each attribute `x`."""
    lines = ["one = Constant <value = double {1.0}> ()"]
    for x in attributes:
        lines += [
            f"{x}_f = Constant <value_float: float = @{x}> ()",
            f"{x} = Cast <to = 11> ({x}_f)",
            f"{x}_c = one - {x}",
        ]
    return "\n".join(lines)


def _like_w(**scalars: str) -> str:
    """Casts of float64 scalars to the parameter's dtype."""
    return "\n".join(f"{name} = CastLike ({value}, w)" for name, value in scalars.items())


# p = w - lr √(1-β2^t)/(1-β1^t) · m1 / (√v1 + ε √(1-β2^t)): Adam with both bias corrections moved
# into two scalars, which saves a pass over the tensor.
_ADAM = f"""
    {_float64("beta1", "beta2", "epsilon")}
    t = Cast <to = 11> (step)
    beta1_t = Pow (beta1, t)
    beta2_t = Pow (beta2, t)
    left1 = one - beta1_t
    root2 = Sqrt (one - beta2_t)
    rate_d = Cast <to = 11> (lr) * root2 / left1
    eps_d = epsilon * root2
    {_like_w(b1="beta1", b1c="beta1_c", b2="beta2", b2c="beta2_c", rate="rate_d", eps="eps_d")}
    m1 = b1 * m + b1c * g
    v1 = b2 * v + b2c * (g * g)
    change = rate * (m1 / (Sqrt (v1) + eps))
"""
# w (1 - lr λ): decay that the gradient's statistics do not see.
_DECAYED = f"""
    {_float64("weight_decay")}
    keep = one - Cast <to = 11> (lr) * weight_decay
    {_like_w(kept_part="keep")}
    kept = kept_part * w
"""


def _update(name: str, body: str) -> OpDef:
    reason = "an optimizer's update is the last step, nothing is differentiated through it"
    return OpDef(name, FUSE, f"{name} {body}", grad=NoGrad(reason))


_ADAM_ATTRIBUTES = "beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8"

register(
    # w1 = w - lr g
    _update(
        "SgdUpdate",
        """(w, g, lr) => (w1) {
    rate = CastLike (lr, w)
    w1 = w - rate * g
}""",
    ),
    # m1 = μ m + g; w1 = w - lr m1
    _update(
        "MomentumUpdate",
        f"""<momentum: float = 0.9> (w, g, m, lr) => (w1, m1) {{
    {_float64("momentum")}
    {_like_w(mu="momentum", rate="lr")}
    m1 = mu * m + g
    w1 = w - rate * m1
}}""",
    ),
    # m1 = μ m + g; w1 = w - lr (g + μ m1)
    _update(
        "NesterovUpdate",
        f"""<momentum: float = 0.9> (w, g, m, lr) => (w1, m1) {{
    {_float64("momentum")}
    {_like_w(mu="momentum", rate="lr")}
    m1 = mu * m + g
    w1 = w - rate * (g + mu * m1)
}}""",
    ),
    # m1 = β1 m + (1-β1) g; v1 = β2 v + (1-β2) g²; w1 = w - lr m̂ / (√v̂ + ε)
    _update(
        "AdamUpdate",
        f"""<{_ADAM_ATTRIBUTES}> (w, g, m, v, lr, step) => (w1, m1, v1) {{
    {_ADAM}
    w1 = w - change
}}""",
    ),
    # Adam of w (1 - lr λ)
    _update(
        "AdamWUpdate",
        f"""<{_ADAM_ATTRIBUTES}, weight_decay: float = 0.01>
    (w, g, m, v, lr, step) => (w1, m1, v1) {{
    {_ADAM}
    {_DECAYED.replace("one = Constant <value = double {1.0}> ()", "")}
    w1 = kept - change
}}""",
    ),
    # s1 = s + g²; w1 = w - lr g / (√s1 + ε)
    _update(
        "AdagradUpdate",
        f"""<epsilon: float = 1e-10> (w, g, s, lr) => (w1, s1) {{
    {_float64("epsilon")}
    {_like_w(eps="epsilon", rate="lr")}
    s1 = s + g * g
    w1 = w - rate * (g / (Sqrt (s1) + eps))
}}""",
    ),
    # w1 = w (1 - lr λ) - lr sign(β1 m + (1-β1) g); m1 = β2 m + (1-β2) g
    _update(
        "LionUpdate",
        f"""<beta1: float = 0.9, beta2: float = 0.99, weight_decay: float = 0.0>
    (w, g, m, lr) => (w1, m1) {{
    {_float64("beta1", "beta2")}
    {_like_w(b1="beta1", b1c="beta1_c", b2="beta2", b2c="beta2_c", rate="lr")}
    change = rate * Sign (b1 * m + b1c * g)
    {_DECAYED.replace("one = Constant <value = double {1.0}> ()", "")}
    w1 = kept - change
    m1 = b2 * m + b2c * g
}}""",
    ),
    # norm = √Σ g² over all gradients; factor = min(1, max_norm / (norm + 1e-6))
    _update(
        "ClipFactor",
        """<max_norm: float = 1.0> (sum_squares) => (norm, factor) {
    norm = Sqrt (sum_squares)
    limit = CastLike (Constant <value_float: float = @max_norm> (), norm)
    tiny = CastLike (Constant <value_float = 1e-6> (), norm)
    one = CastLike (Constant <value_float = 1.0> (), norm)
    factor = Min (limit / (norm + tiny), one)
}""",
    ),
)


# ---- the standard's own updates ----------------------------------------------------------------


class _Node:
    """One parameter's part of an Adam, Adagrad or Momentum node: its constants and attributes."""

    def __init__(self, op: Builder, node: ir.Node, x: ir.Value) -> None:
        self.op, self.node = op, node
        self.dtype = x.dtype or ir.DataType.FLOAT

    def __getitem__(self, name: str) -> float:
        attribute = self.node.attributes.get(name)
        default = {"alpha": 0.9, "beta": 0.999}.get(name, 0.0)  # Adam's; the others require theirs
        return default if attribute is None else attribute.as_float()

    def const(self, x: float, dtype: ir.DataType | None = None) -> ir.Value:
        return self.op.constant(x, dtype or self.dtype)

    def scaled(self, x: ir.Value, factor: float) -> Any:
        return self.op.Mul(x, self.const(factor))

    def regularized(self, x: ir.Value, g: ir.Value) -> ir.Value:
        """The gradient with the L2 term: g + norm_coefficient · x."""
        factor = self["norm_coefficient"]
        return self.op.Add(g, self.scaled(x, factor)) if factor else g

    def started(self, t: ir.Value) -> Any:
        return self.op.Greater(t, self.const(0, ir.DataType.INT64))


def _adam(a: _Node, r: ir.Value, t: ir.Value, xs: Sequence[ir.Value]) -> list[ir.Value]:
    """r √(1-β^t)/(1-α^t) in place of r from the first update on (t > 0)."""
    (x, g, v, h), op, f64 = xs, a.op, ir.DataType.DOUBLE
    alpha, beta, post = a["alpha"], a["beta"], a["norm_coefficient_post"]
    g = a.regularized(x, g)
    v1 = op.Add(a.scaled(v, alpha), a.scaled(g, 1 - alpha))
    h1 = op.Add(a.scaled(h, beta), a.scaled(op.Mul(g, g), 1 - beta))
    td, one = op.Cast(t, to=f64), a.const(1.0, f64)
    left_alpha, left_beta = (op.Sub(one, op.Pow(a.const(b, f64), td)) for b in (alpha, beta))
    scale = op.Where(a.started(t), op.Div(op.Sqrt(left_beta), left_alpha), one)
    rate = op.CastLike(op.Mul(op.Cast(r, to=f64), scale), x)
    denominator = op.Add(op.Sqrt(h1), a.const(a["epsilon"]))
    x1 = op.Sub(x, op.Div(op.Mul(rate, v1), denominator))
    return [a.scaled(x1, 1 - post) if post else x1, v1, h1]


def _adagrad(a: _Node, r: ir.Value, t: ir.Value, xs: Sequence[ir.Value]) -> list[ir.Value]:
    """r / (1 + t decay_factor) in place of r."""
    (x, g, h), op = xs, a.op
    decay = a.scaled(op.CastLike(t, x), a["decay_factor"])
    rate = op.Div(op.CastLike(r, x), op.Add(decay, a.const(1.0)))
    g = a.regularized(x, g)
    h1 = op.Add(h, op.Mul(g, g))
    denominator = op.Add(op.Sqrt(h1), a.const(a["epsilon"]))
    return [op.Sub(x, op.Div(op.Mul(rate, g), denominator)), h1]


def _momentum(a: _Node, r: ir.Value, t: ir.Value, xs: Sequence[ir.Value]) -> list[ir.Value]:
    """The first update (t = 0) takes the gradient whole: β = 1."""
    (x, g, v), op = xs, a.op
    g = a.regularized(x, g)
    beta = op.Where(a.started(t), a.const(a["beta"]), a.const(1.0))
    v1 = op.Add(a.scaled(v, a["alpha"]), op.Mul(g, beta))
    nesterov = a.node.attributes["mode"].as_string() == "nesterov"
    change = op.Add(g, a.scaled(v1, a["alpha"])) if nesterov else v1
    return [op.Sub(x, op.Mul(op.CastLike(r, x), change)), v1]


Rule = Callable[[_Node, ir.Value, ir.Value, Sequence[ir.Value]], list[ir.Value]]
_STANDARD: dict[str, tuple[Rule, int]] = {  # with the number of tensors a parameter comes with
    "Adam": (_adam, 4),
    "Adagrad": (_adagrad, 3),
    "Momentum": (_momentum, 3),
}


def expand_standard_updates(model: ir.Model) -> int:
    """Write out the Adam, Adagrad and Momentum nodes of ai.onnx.preview.training, in place.

    Their inputs are (R, T, X1.., G1.., state1..), their outputs (X1.., state1..). Returns how many
    nodes there were.
    """
    updates = [n for n in model.graph if n.domain == PREVIEW and n.op_type in _STANDARD]
    for node in updates:
        rule, kinds = _STANDARD[node.op_type]
        r, t, *tensors = [v for v in node.inputs if v is not None]
        count, op = len(tensors) // kinds, Builder()
        for i in range(count):
            x, *_ = xs = tensors[i::count]
            for old, new in zip(
                node.outputs[i::count], rule(_Node(op, node, x), r, t, xs), strict=True
            ):
                name, new.type, new.shape = old.name, old.type, old.shape
                ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
                old.name, new.name = None, name
        model.graph.insert_before(node, op.nodes)
        model.graph.remove(node, safe=True)
    if all(n.domain != PREVIEW for n in model.graph):
        model.graph.opset_imports.pop(PREVIEW, None)
    return len(updates)

"""Optimizer updates: each maps (parameter, gradient, state, ...) to (new parameter, new state).

w, g and every state tensor have one shape and one float dtype; `lr` is a float32 scalar and `step`
an int64 scalar, 1 at the first update. Scalars are worked out in float64: 1 - 0.999**1 in float32
has only four digits. The three update operators of ai.onnx.preview.training take any number of
tensors, which no function body can: `expand_standard_updates` writes them out.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.ir.constants import FUSE, PREVIEW
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.ops.opdef import NoGrad, OpDef, register
from onnx_fuse.ops.shape_ops import Writer


def _float64(*attributes: str) -> str:
    """`x` and its complement `x_c = 1 - x` in float64 for each attribute `x`."""
    number = "{0} = Cast <to = 11> (Constant <value_float: float = @{0}> ())\n{0}_c = 1 - {0}"
    return "\n".join(map(number.format, attributes))


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
    left1 = 1 - beta1_t
    root2 = Sqrt (1 - beta2_t)
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
    keep = 1 - Cast <to = 11> (lr) * weight_decay
    {_like_w(kept_part="keep")}
    kept = kept_part * w
"""


def _update(name: str, body: str) -> OpDef:
    reason = "an optimizer's update is the last step, nothing is differentiated through it"
    return OpDef(name, FUSE, f"{name} {body}", grad=NoGrad(reason))


_ADAM_ATTRIBUTES = "beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8"


def _rmsprop(centered: bool, moving: bool) -> OpDef:
    """s1 = s + σ (g² - s); a1 = a + σ (g - a); m1 = μ m + g / (√(s1 - a1²) + ε); w1 = w - lr m1.

    Without a1 the root is √s1, and without m1 the quotient is what w moves by. The attribute is σ,
    since 1 - σ in float32 has only six digits of it.
    """
    slots = ["s", *["a"] * centered, *["m"] * moving]
    news = ", ".join(f"{slot}1" for slot in slots)
    # rounding may leave less than 0
    mean = "a1 = keep * a + new * g\n    v = Max (s1 - a1 * a1, 0)" if centered else ""
    moved = "mu * m + " * moving
    scalars = {"new": "share", "keep": "share_c", "eps": "epsilon", "rate": "lr"}
    scalars |= {"mu": "momentum"} if moving else {}
    return _update(
        f"Rmsprop{'Centered' * centered}{'Momentum' * moving}Update",
        f"""<share: float = 0.01, epsilon: float = 1e-8{", momentum: float = 0.9" * moving}>
    (w, g, {", ".join(slots)}, lr) => (w1, {news}) {{
    {_float64("share", "epsilon", *["momentum"] * moving)}
    {_like_w(**scalars)}
    s1 = keep * s + new * (g * g)
    {mean}
    m1 = {moved}g / (Sqrt ({"v" if centered else "s1"}) + eps)
    w1 = w - rate * m1
}}""",
    )


register(
    *(_rmsprop(centered, moving) for centered in (False, True) for moving in (False, True)),
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
    {_DECAYED}
    w1 = kept - change
}}""",
    ),
    # μ(t) = β1 (1 - 0.96^(t ψ) / 2); p1 = p μ(t); m1, v1 of Adam;
    # w1 = w (1 - lr λ) - lr ((1-μ(t)) / (1-p1) g + μ(t+1) / (1 - p1 μ(t+1)) m1) / (√v̂ + ε)
    _update(
        "NadamUpdate",
        f"""<{_ADAM_ATTRIBUTES}, momentum_decay: float = 0.004, weight_decay: float = 0.0>
    (w, g, m, v, p, lr, step) => (w1, m1, v1, p1) {{
    {_float64("beta1", "beta2", "epsilon", "momentum_decay", "weight_decay")}
    t = Cast <to = 11> (step)
    mu = beta1 * (1 - 0.5 * Pow (0.96, t * momentum_decay))
    mu_next = beta1 * (1 - 0.5 * Pow (0.96, (t + 1) * momentum_decay))
    product = Cast <to = 11> (p) * mu
    p1 = CastLike (product, p)
    root2 = Sqrt (1 - Pow (beta2, t))
    lr_d = Cast <to = 11> (lr)
    now_d = lr_d * root2 * (1 - mu) / (1 - product)
    next_d = lr_d * root2 * mu_next / (1 - product * mu_next)
    eps_d = epsilon * root2
    keep = 1 - lr_d * weight_decay
    {_like_w(b1="beta1", b1c="beta1_c", b2="beta2", b2c="beta2_c", eps="eps_d", kept="keep")}
    {_like_w(now_part="now_d", next_part="next_d")}
    m1 = b1 * m + b1c * g
    v1 = b2 * v + b2c * (g * g)
    w1 = kept * w - (now_part * g + next_part * m1) / (Sqrt (v1) + eps)
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
    {_DECAYED}
    w1 = kept - change
    m1 = b2 * m + b2c * g
}}""",
    ),
    # norm = √Σ g² over all gradients; factor = min(1, max_norm / (norm + 1e-6))
    _update(
        "ClipFactor",
        """<max_norm: float = 1.0> (sum_squares) => (norm, factor) {
    norm = Sqrt (sum_squares)
    factor = Min (@max_norm / (norm + 1e-6), 1)
}""",
    ),
)


# ---- the standard's own updates ----------------------------------------------------------------


_STANDARD = {
    # r √(1-β^t)/(1-α^t) in place of r from the first update on
    "Adam": (
        "x g v h",
        """v1 = v * @alpha + g * (1 - @alpha); h1 = h * @beta + g * g * (1 - @beta)
        td = Cast <to = 11> (t); ratio = Sqrt(1 - Pow(@beta, td)) / (1 - Pow(@alpha, td))
        rate = CastLike(Cast <to = 11> (r) * Where(t > 0, ratio, 1), x)
        x1 = x - rate * v1 / (Sqrt(h1) + @epsilon)
        x1 * (1 - @norm_coefficient_post), v1, h1""",
    ),
    "Adagrad": (
        "x g h",
        """rate = CastLike(r, x) / (CastLike(t, x) * @decay_factor + 1); h1 = h + g * g
        x - rate * g / (Sqrt(h1) + @epsilon), h1""",
    ),
    # the first update takes the gradient whole: β = 1
    "Momentum": (
        "x g v",
        """v1 = v * @alpha + g * Where(t > 0, @beta, one)
        x - CastLike(r, x) * change, v1""",
    ),
}
"""The tensors that a parameter comes with and their updates, of an R and a T."""


def _updates(op: Writer, node: ir.Node, **values: ir.Value) -> list[ir.Value]:
    formula = _STANDARD[node.op_type][1]
    if node.attributes.get_float("norm_coefficient", 0.0):  # the L2 term
        values["g"] = op.formula("g + x * @norm_coefficient", node, **values)
    nesterov = node.attributes.get_string("mode", "") == "nesterov"
    formula = formula.replace("change", "(g + v1 * @alpha)" if nesterov else "v1")
    one = op.constant(1.0, values["x"].dtype or ir.DataType.FLOAT)
    return list(op.formula(formula, node, one=one, **values))


def expand_standard_updates(model: ir.Model) -> int:
    """Write out the Adam, Adagrad and Momentum nodes of ai.onnx.preview.training, in place.

    Their inputs are (R, T, X1.., G1.., state1..), their outputs (X1.., state1..). Returns how many
    nodes there were.
    """
    updates = [n for n in model.graph if n.domain == PREVIEW and n.op_type in _STANDARD]
    for node in updates:
        names = _STANDARD[node.op_type][0].split()
        r, t, *tensors = [v for v in node.inputs if v is not None]
        count, op = len(tensors) // len(names), Writer()
        results: list[ir.Value | None] = [None] * len(node.outputs)
        for i in range(count):
            values = dict(zip(names, tensors[i::count], strict=True))
            results[i::count] = _updates(op, node, r=r, t=t, **values)
        replace_node(node, op.nodes, results)
    if all(n.domain != PREVIEW for n in model.graph):
        model.graph.opset_imports.pop(PREVIEW, None)
    return len(updates)

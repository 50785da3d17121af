"""Adagrad, Adam and Momentum of ai.onnx.preview.training, written out in standard operators.

Their inputs are the rate R, the count T of updates so far, then all tensors X, all gradients G and
all states (ONNX operator schemas, domain ai.onnx.preview.training, version 1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

DOMAIN = "ai.onnx.preview.training"
Update = Callable[[Any, ir.Node, Any, Any, Sequence[Any]], Sequence[Any]]


def _number(op: Any, node: ir.Node, like: ir.Value, name: str, default: float = 0.0) -> Any:
    """A float attribute as a constant of the type of `like`."""
    attribute = node.attributes.get(name)
    return op.constant(default if attribute is None else attribute.as_float(), like.dtype)


def _rest(op: Any, node: ir.Node, like: ir.Value, name: str, default: float = 0.0) -> Any:
    """1 - a float attribute."""
    attribute = node.attributes.get(name)
    return op.constant(1 - (default if attribute is None else attribute.as_float()), like.dtype)


def _regularized(op: Any, node: ir.Node, x: Any, g: Any) -> Any:
    return op.Add(op.Mul(x, _number(op, node, x, "norm_coefficient")), g)


def _adagrad(op: Any, node: ir.Node, rate: Any, count: Any, group: Sequence[Any]) -> Sequence[Any]:
    x, g, h = group
    later = op.Mul(op.CastLike(count, rate), _number(op, node, rate, "decay_factor"))
    r = op.Div(rate, op.Add(op.constant(1.0, rate.dtype), later))
    g = _regularized(op, node, x, g)
    squares = op.Add(h, op.Mul(g, g))
    root = op.Add(op.Sqrt(squares), _number(op, node, x, "epsilon", 1e-6))
    return op.Sub(x, op.Div(op.Mul(r, g), root)), squares


def _adam(op: Any, node: ir.Node, rate: Any, count: Any, group: Sequence[Any]) -> Sequence[Any]:
    x, g, v, h = group
    alpha, beta = ("alpha", 0.9), ("beta", 0.999)
    g = _regularized(op, node, x, g)
    mean = op.Add(op.Mul(v, _number(op, node, x, *alpha)), op.Mul(g, _rest(op, node, x, *alpha)))
    squares = op.Add(
        op.Mul(h, _number(op, node, x, *beta)), op.Mul(op.Mul(g, g), _rest(op, node, x, *beta))
    )
    t = op.CastLike(count, rate)

    def unbiased(name: str, default: float) -> Any:
        power = op.Pow(_number(op, node, rate, name, default), t)
        return op.Sub(op.constant(1.0, rate.dtype), power)

    corrected = op.Div(op.Mul(rate, op.Sqrt(unbiased(*beta))), unbiased(*alpha))
    r = op.Where(op.Greater(count, op.constant(0)), corrected, rate)
    root = op.Add(op.Sqrt(squares), _number(op, node, x, "epsilon", 1e-6))
    after = op.Sub(x, op.Mul(r, op.Div(mean, root)))
    return op.Mul(after, _rest(op, node, x, "norm_coefficient_post")), mean, squares


def _momentum(op: Any, node: ir.Node, rate: Any, count: Any, group: Sequence[Any]) -> Sequence[Any]:
    x, g, v = group
    alpha = _number(op, node, x, "alpha")
    g = _regularized(op, node, x, g)
    later, first = _number(op, node, x, "beta"), op.constant(1.0, x.dtype)
    share = op.Where(op.Greater(count, op.constant(0)), later, first)
    after = op.Add(op.Mul(v, alpha), op.Mul(share, g))
    nesterov = node.attributes["mode"].as_string() == "nesterov"
    step = op.Add(g, op.Mul(after, alpha)) if nesterov else after
    return op.Sub(x, op.Mul(rate, step)), after


UPDATES: dict[str, tuple[int, Update]] = {
    "Adagrad": (3, _adagrad),
    "Adam": (4, _adam),
    "Momentum": (3, _momentum),
}
"""How many tensors belong together (X, G and the states), and the update of one such group."""


def update(op: Any, node: ir.Node, shapes: Any, known: Any) -> Sequence[Any] | None:
    """New tensors, then the new states, group by group."""
    size, rule = UPDATES[node.op_type]
    rate, count, *rest = node.inputs
    many = len(rest) // size
    groups = [rest[i::many] for i in range(many)]
    made = [rule(op, node, rate, count, group) for group in groups]
    return [value for kind in zip(*made, strict=True) for value in kind]


DECOMPOSED = {(DOMAIN, name): update for name in UPDATES}

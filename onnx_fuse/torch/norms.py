"""Which modules of other libraries are an RMSNorm: those whose traced forward computes its formula.

    y = weight · x / √(mean(x²) + eps)      over the last axis

with casts to float32 and back to x's type anywhere between.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

_MUL = {operator.mul, torch.mul, "mul"}
_ADD = {operator.add, torch.add, "add"}
_POW = {operator.pow, torch.pow, "pow"}
_SQUARE = {torch.square, "square"}
_RSQRT = {torch.rsqrt, "rsqrt"}
_MEAN = {torch.mean, "mean"}


def rms_norm(module: nn.Module) -> float | None:
    """The epsilon of an RMSNorm that scales by its one parameter `weight`; None for another module.

    nn.RMSNorm is not looked at: its forward is torch's own.
    """
    parameters = dict(module.named_parameters())
    others = [*module.children(), *module.buffers()]
    if type(module).__module__.startswith("torch.") or set(parameters) != {"weight"} or others:
        return None
    if parameters["weight"].dim() != 1:
        return None
    try:
        graph = fx.Tracer().trace(module)
    except Exception:  # noqa: BLE001 - whatever a forward does with what is no tensor
        return None
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    return _Formula(inputs[0]).epsilon(output.args[0]) if len(inputs) == 1 else None


class _Formula:
    """The nodes of a graph, followed from its result to its input."""

    def __init__(self, x: fx.Node) -> None:
        self._x = x

    def epsilon(self, result: Any) -> float | None:
        """The epsilon, if `result` is the norm of the input times the weight."""
        for weight, normed in self._pairs(result, _MUL):
            if not (isinstance(weight, fx.Node) and weight.op == "get_attr"):
                continue
            for x, root in self._pairs(normed, _MUL):
                if self._uncast(x) is self._x and (found := self._root(root)) is not None:
                    return found
        return None

    def _root(self, node: Any) -> float | None:
        """The epsilon of 1 / √(mean(x²) + epsilon)."""
        (inner,) = self._operands(node, _RSQRT, 1) or (None,)
        for mean, epsilon in self._pairs(inner, _ADD):
            if isinstance(epsilon, float) and self._is_mean_of_squares(self._uncast(mean)):
                return epsilon
        return None

    def _is_mean_of_squares(self, node: Any) -> bool:
        if not isinstance(node, fx.Node) or node.target not in _MEAN:
            return False
        axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        kept = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim")
        if axes not in (-1, [-1], (-1,)) or kept is not True or "dtype" in node.kwargs:
            return False
        square = node.args[0]
        power = self._operands(square, _POW, 2)
        whole = self._operands(square, _SQUARE, 1)
        product = self._operands(square, _MUL, 2)
        if power is not None:
            return power[1] == 2 and self._uncast(power[0]) is self._x
        factors = whole or product or ()
        return bool(factors) and all(self._uncast(f) is self._x for f in factors)

    def _pairs(self, node: Any, targets: set[Any]) -> list[tuple[Any, Any]]:
        """The two operands of a node of these targets, in either order, without casts."""
        found = self._operands(node, targets, 2)
        if found is None:
            return []
        a, b = map(self._uncast, found)
        return [(a, b), (b, a)]

    def _operands(self, node: Any, targets: set[Any], count: int) -> tuple[Any, ...] | None:
        node = self._uncast(node)
        if not isinstance(node, fx.Node) or node.target not in targets or node.kwargs:
            return None
        return node.args if len(node.args) == count else None

    def _uncast(self, node: Any) -> Any:
        """What is cast to float32, or to the input's type; the node itself where it is no cast."""
        while isinstance(node, fx.Node) and node.op == "call_method" and not node.kwargs:
            kinds = node.args[1:]
            to_input = len(kinds) == 1 and (kinds[0] is torch.float32 or self._is_type(kinds[0]))
            back = node.target == "type_as" and kinds == (self._x,)
            if not ((node.target == "float" and not kinds) or back
                    or (node.target in ("to", "type") and to_input)):  # fmt: skip
                return node
            node = node.args[0]
        return node

    def _is_type(self, node: Any) -> bool:
        """Whether a node is the input's dtype."""
        return isinstance(node, fx.Node) and node.target is getattr and (
            node.args == (self._x, "dtype")
        )  # fmt: skip

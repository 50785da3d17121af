"""Modules of other libraries by what they compute: their forward, traced, is a known formula.

| | |
|---|---|
| RMSNorm | y = weight · x / √(mean(x²) + eps) over the last axis |
| linear layer | y = x · weight + bias with a weight [K, N], as GPT-2's Conv1D has it |
| activation | a formula of `_ACTIVATIONS` |

Casts to float32 and back to x's type may stand anywhere between in a norm.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

_MUL = {operator.mul, torch.mul, "mul"}
_ADD = {operator.add, torch.add, "add"}
_POW = {operator.pow, torch.pow, "pow"}
_SQUARE = {torch.square, "square"}
_RSQRT = {torch.rsqrt, "rsqrt"}
_MEAN = {torch.mean, "mean"}
_VIEW = {"view", "reshape", torch.reshape}
_NAMES: dict[Any, str] = {
    f: name for name, kinds in (("mul", _MUL), ("add", _ADD), ("pow", _POW)) for f in kinds
}
_NAMES |= {torch.tanh: "tanh", "tanh": "tanh", F.tanh: "tanh", torch.sigmoid: "sigmoid"}
_NAMES |= {"sigmoid": "sigmoid", F.sigmoid: "sigmoid", F.gelu: "gelu", F.silu: "silu"}
_NAMES |= {
    F.relu: "relu",
    torch.relu: "relu",
    torch.erf: "erf",
    F.mish: "mish",
    operator.truediv: "div",
}


def _traced(module: Any) -> fx.Graph | None:
    """The graph of a forward of one tensor, without children and buffers."""
    if isinstance(module, nn.Module) and (
        type(module).__module__.startswith("torch.") or [*module.children(), *module.buffers()]
    ):
        return None
    try:
        return fx.Tracer().trace(module)
    except Exception:  # noqa: BLE001 - whatever a forward does with what is no tensor
        return None


def _ends(graph: fx.Graph | None) -> tuple[fx.Node, Any] | None:
    """The input and the result of a graph of one input."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"] if graph else []
    if graph is None or len(inputs) != 1:
        return None
    (output,) = (node for node in graph.nodes if node.op == "output")
    return inputs[0], output.args[0]


def rms_norm(module: nn.Module) -> float | None:
    """The epsilon of an RMSNorm that scales by its one parameter `weight`; None for another module.

    nn.RMSNorm is not looked at: its forward is torch's own.
    """
    parameters = dict(module.named_parameters())
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1:
        return None
    ends = _ends(_traced(module))
    return _Norm(ends[0]).epsilon(ends[1]) if ends else None


class _Norm:
    """The nodes of a norm, followed from its result to its input."""

    def __init__(self, x: fx.Node) -> None:
        self._x = x

    def epsilon(self, result: Any) -> float | None:
        """The epsilon, if `result` is the norm of the input times the weight."""
        for weight, normed in self._pairs(result, _MUL):
            if not (isinstance(weight, fx.Node) and weight.op == "get_attr"):
                continue
            for x, root in self._pairs(normed, _MUL):
                if self._uncast(x) is self._x and (epsilon := self._root(root)) is not None:
                    return epsilon
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
        keepdim = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim")
        if axes not in (-1, [-1], (-1,)) or keepdim is not True or "dtype" in node.kwargs:
            return False
        square = node.args[0]
        power = self._operands(square, _POW, 2)
        squared = self._operands(square, _SQUARE, 1)
        product = self._operands(square, _MUL, 2)
        if power is not None:
            return power[1] == 2 and self._uncast(power[0]) is self._x
        factors = squared or product or ()
        return bool(factors) and all(self._uncast(f) is self._x for f in factors)

    def _pairs(self, node: Any, targets: set[Any]) -> list[tuple[Any, Any]]:
        """The two operands of a node of these targets, in either order, without casts."""
        operands = self._operands(node, targets, 2)
        if operands is None:
            return []
        a, b = map(self._uncast, operands)
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


def is_linear(module: nn.Module) -> bool:
    """Whether a module is x · weight + bias with its parameters weight [K, N] and bias [N].

    Its rows may lie along any number of axes: x is viewed as a matrix, and the result as x was.
    """
    parameters = dict(module.named_parameters())
    if set(parameters) != {"weight", "bias"} or parameters["weight"].dim() != 2:
        return False
    ends = _ends(_traced(module))
    if ends is None or parameters["bias"].shape != parameters["weight"].shape[1:]:
        return False
    x, result = ends

    def is_call(node: Any, targets: set[Any], *args: Any) -> bool:
        return (
            isinstance(node, fx.Node) and node.target in targets and not node.kwargs
            and len(node.args) == len(args)
            and all(a(b) if callable(a) else a == b for a, b in zip(args, node.args, strict=True))
        )  # fmt: skip

    def is_parameter(name: str) -> Any:
        return lambda node: (
            isinstance(node, fx.Node) and (node.op, node.target) == ("get_attr", name)
        )

    def is_rows(node: Any) -> bool:
        return is_call(node, _VIEW, x, -1, lambda size: is_call(size, {"size"}, x, -1))

    def is_lead(node: Any) -> bool:
        return is_call(node, {operator.getitem}, is_size, slice(None, -1, None))

    def is_size(node: Any) -> bool:
        return is_call(node, {"size"}, x) or is_call(node, {getattr}, x, "shape")

    def is_product(node: Any) -> bool:
        parts = is_parameter("bias"), is_rows, is_parameter("weight")
        return is_call(node, {torch.addmm}, *parts)

    width = (parameters["weight"].shape[1],)
    return is_call(result, _VIEW, is_product, lambda s: is_call(s, _ADD, is_lead, width))


def activation(module: nn.Module) -> str | None:
    """The name, among ours, of an activation without parameters; None for another module."""
    expression = None if [*module.parameters()] else _expression(module)
    return None if expression is None else _known().get(expression)


@cache
def _known() -> dict[Any, str]:
    """The formulas of `_ACTIVATIONS`."""
    return {_expression(formula): name for name, formula in _ACTIVATIONS}


_ACTIVATIONS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("gelu", lambda x: F.gelu(x)),
    ("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ("gelu_tanh", lambda x: 0.5 * x * (
        1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))
    )),
    ("gelu_tanh", lambda x: 0.5 * x * (
        1.0 + torch.tanh(x * math.sqrt(2.0 / math.pi) * (1.0 + 0.044715 * x * x))
    )),
    ("mish", lambda x: F.mish(x)),
    ("relu", lambda x: F.relu(x)),
    ("silu", lambda x: F.silu(x)),
    ("silu", lambda x: x * torch.sigmoid(x)),
    ("sigmoid", lambda x: torch.sigmoid(x)),
    ("tanh", lambda x: torch.tanh(x)),
)  # fmt: skip


def _expression(forward: Any) -> Any:
    """What a forward of one tensor computes, equal for formulas that differ in order alone."""
    ends = _ends(_traced(forward))
    return None if ends is None else _written(ends[1], ends[0])


def _written(node: Any, x: fx.Node) -> Any:
    """A node as nested tuples: products and sums with their terms sorted and numbers gathered."""
    if node is x:
        return "x"
    if isinstance(node, int | float):
        return float(f"{node:.6g}")
    name = _NAMES.get(node.target) if isinstance(node, fx.Node) else None
    terms = [_written(each, x) for each in node.args] if name else [None]
    if name is None or None in terms:
        return None
    if name == "div" and isinstance(terms[1], float) and terms[1]:
        name, terms[1] = "mul", float(f"{1 / terms[1]:.6g}")
    if name not in ("mul", "add"):
        return (name, *terms, *sorted(node.kwargs.items()))
    numbers: list[float] = []
    rest: list[Any] = []
    for term in terms:
        for part in term[1:] if isinstance(term, tuple) and term[0] == name else (term,):
            (numbers if isinstance(part, float) else rest).append(part)
    number = math.prod(numbers) if name == "mul" else sum(numbers)
    return (name, float(f"{number:.6g}"), *sorted(rest, key=repr))

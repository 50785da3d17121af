"""Fused modules in the place of torch's own, where the code of a forward proves it exact.

A forward is traced by torch.fx, in training and in inference mode and with and without each
optional argument. A norm is fused into linear layers that read it, where nothing else does; an
activation, or a cross entropy, into the one linear layer that it reads. The modules change their
class in place: names, parameters and state dicts stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from onnx_fuse.errors import CheckFailed
from onnx_fuse.torch import formulas
from onnx_fuse.torch.exported_module import make_whole
from onnx_fuse.torch.functional import (
    fused_layernorm_linear,
    linear_activation,
    linear_cross_entropy,
    rms_norm_linear,
)
from onnx_fuse.torch.traces import size_of, traces

# ---- what the modules become -----------------------------------------------------------------


class _Passed:
    """A module that another one computes: it returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class PassedLayerNorm(_Passed, nn.LayerNorm):
    """A LayerNorm that its readers compute: it returns its input."""


class PassedRMSNorm(_Passed, nn.RMSNorm):
    """An RMSNorm that its readers compute: it returns its input."""


class Passed(_Passed, nn.Module):
    """An activation, or a norm that is no class of torch's, which a linear layer computes."""


class PassedLinear(_Passed, nn.Linear):
    """A linear layer that the loss behind it computes: it returns its input."""


class _Fused:
    """A linear layer that computes a norm before it, an activation behind it, or both."""

    weight: Tensor
    bias: Tensor | None
    before: tuple[nn.Module, ...] = ()  # in a tuple, since its parameters are not this one's
    activation: str | None = None
    norm_eps: float | None = None
    """Of an RMSNorm."""
    transposed = False
    """Whether the weight is [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        """act(linear(norm(x)))."""
        act: dict[str, Any] = {"activation": self.activation, "transposed": self.transposed}
        if not self.before:
            return linear_activation(x, self.weight, self.bias, **act)
        (norm,) = self.before
        if isinstance(norm, nn.LayerNorm):
            affine = (norm.weight, norm.bias, norm.eps)
            return fused_layernorm_linear(x, self.weight, self.bias, *affine, **act)
        return rms_norm_linear(x, self.weight, self.bias, norm.weight, self.norm_eps, **act)


class FusedLinear(_Fused, nn.Linear):
    """An nn.Linear that computes a norm before it, an activation behind it, or both."""


class FusedConv1D(_Fused, nn.Module):
    """The same of a linear layer whose weight is [in, out], such as GPT-2's Conv1D."""

    transposed = True


class FusedCrossEntropy(nn.CrossEntropyLoss):
    """A cross entropy that computes the linear layer before it."""

    before: tuple[nn.Linear, ...] = ()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """cross_entropy(linear(x), target)."""
        (linear,) = self.before
        if x.dim() == 2 and target.dim() == 1 and not target.is_floating_point():
            return linear_cross_entropy(
                x, linear.weight, target, bias=linear.bias, ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing, reduction=self.reduction,
            )  # fmt: skip
        return super().forward(F.linear(x, linear.weight, linear.bias), target)


_NORMS: dict[type, type] = {nn.LayerNorm: PassedLayerNorm, nn.RMSNorm: PassedRMSNorm}


class _Kinds:
    """What modules are, found out once for all the traces of a run, which ask again and again."""

    def __init__(self) -> None:
        self._answers: dict[Any, Any] = {}

    def is_norm(self, module: nn.Module) -> bool:
        """Whether a module is a norm that a linear layer can compute."""
        return type(module) in _NORMS or self._once(formulas.rms_norm, module) is not None

    def is_linear(self, module: nn.Module) -> bool:
        """Whether a module is a linear layer, of torch's, of ours or by its formula."""
        exact = type(module) in (nn.Linear, FusedLinear, FusedConv1D)
        return exact or bool(self._once(formulas.is_linear, module))

    def activation(self, module: nn.Module) -> str | None:
        """The name, among ours, of what a module computes; None where it is no activation."""
        name: str | None = self._once(formulas.activation, module)
        return name

    def is_whole(self, module: nn.Module) -> bool:
        """Whether a module is one of these, or of ours."""
        closed = type(module).__module__.startswith("onnx_fuse.torch") or self.is_norm(module)
        return closed or self.is_linear(module) or self.activation(module) is not None

    def _once(self, ask: Callable[[nn.Module], Any], module: nn.Module) -> Any:
        key = ask, module, type(module)
        if key not in self._answers:
            self._answers[key] = ask(module)
        return self._answers[key]


# ---- finding them ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """Modules that may become one."""

    kind: str
    """"norm", "activation" or "cross_entropy": what a linear layer is fused with."""
    names: tuple[str, ...]
    """The names of the modules; the linear layers come last."""
    reason: str = ""
    """Why they stay apart; "" where they are fused."""


def _scopes(
    module: nn.Module, name: str, kinds: _Kinds, failed: dict[str, str]
) -> Iterator[tuple[str, Any]]:
    """The outermost modules that can be traced, with their graphs."""
    traced = traces(module, kinds.is_whole)
    if not isinstance(traced, str):
        yield name, traced
        return
    failed[name] = traced
    for child_name, child in module.named_children():
        if not type(child).__module__.startswith("torch.nn.modules") or list(child.children()):
            yield from _scopes(child, f"{name}.{child_name}" if name else child_name, kinds, failed)


class _Scope:
    """The graphs of one forward, and the modules that they call."""

    def __init__(
        self, module: nn.Module, graphs: Sequence[fx.Graph], shared: set[int], kinds: _Kinds
    ) -> None:
        self.graphs, self.shared, self.kinds = graphs, shared, kinds
        self.modules = dict(module.named_modules())
        self.calls: dict[str, list[list[fx.Node]]] = {}
        for i, graph in enumerate(graphs):
            for node in graph.nodes:
                if node.op == "call_module":
                    lists = self.calls.setdefault(str(node.target), [[] for _ in graphs])
                    lists[i].append(node)

    def obstacle(self, name: str) -> str:
        """Why a module cannot change what it computes, "" where it can."""
        module = self.modules[name]
        if id(module) in self.shared:
            return f"'{name}' is used in several places"
        if any(len(nodes) > 1 for nodes in self.calls.get(name, ())):
            return f"'{name}' is called more than once"
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(getattr(module, each, None) for each in hooks):
            return f"'{name}' has hooks"
        if hasattr(module, "parametrizations"):
            return f"'{name}' has parametrizations"
        return ""

    def readers(self, name: str) -> list[fx.Node]:
        """All nodes that read a module's result for more than its shape."""
        nodes = [n for nodes in self.calls[name] for n in nodes]
        return [user for n in nodes for user in n.users if not size_of(user)]

    def linear(self, node: fx.Node, reads: str) -> bool:
        """Whether a node is a linear layer's call on the result of the module `reads`."""
        if node.op != "call_module" or node.kwargs or len(node.args) != 1:
            return False
        x = node.args[0]
        by = isinstance(x, fx.Node) and x.op == "call_module" and x.target == reads
        return by and self.kinds.is_linear(self.modules[str(node.target)])


def _input_features(linear: nn.Module) -> int:
    return int(linear.in_features if isinstance(linear, nn.Linear) else linear.weight.shape[0])


def _norms(scope: _Scope) -> Iterator[tuple[Candidate, Any]]:
    for name in scope.calls:
        norm = scope.modules[name]
        if not scope.kinds.is_norm(norm):
            continue
        readers = scope.readers(name)
        linears = [str(n.target) for n in readers if scope.linear(n, name)]
        if not linears:
            continue
        names = tuple(dict.fromkeys((name, *linears)))
        layers = [scope.modules[each] for each in names[1:]]
        sizes = tuple(norm.normalized_shape if type(norm) in _NORMS else norm.weight.shape)
        reason = next((r for each in names if (r := scope.obstacle(each))), "")
        others = [n for n in readers if not scope.linear(n, name)]
        if others:
            reader = others[0].target if others[0].op != "output" else "the forward's result"
            reason = f"'{name}' is read by {reader} too"
        elif any(sizes != (_input_features(layer),) for layer in layers):
            reason = f"'{name}' normalizes other axes than the last"
        elif any(getattr(layer, "before", ()) for layer in layers):
            reason = "the linear layer is fused with a norm already"
        yield Candidate("norm", names, reason), (norm, *layers)


def _activations(scope: _Scope) -> Iterator[tuple[Candidate, Any]]:
    for name in scope.calls:
        linear = scope.modules[name]
        readers = scope.readers(name)
        if not scope.kinds.is_linear(linear) or not readers:
            continue
        targets = {str(n.target) if n.op == "call_module" else "" for n in readers}
        act = next((t for t in targets if t and scope.kinds.activation(scope.modules[t])), None)
        loss = next((t for t in targets if t and type(scope.modules[t]) is nn.CrossEntropyLoss), "")
        other = act or loss
        if not other:
            continue
        kind, names = ("activation" if act else "cross_entropy"), (other, name)
        reason = next((r for each in names if (r := scope.obstacle(each))), "")
        reads = all(n.args and isinstance(n.args[0], fx.Node) and n.args[0].target == name
                    and (len(n.args) == (1 if act else 2)) and not n.kwargs
                    for n in readers)  # fmt: skip
        if len(targets) > 1 or not reads:
            reason = f"'{name}' has other readers than '{other}'"
        elif act and getattr(linear, "activation", None):
            reason = "the linear layer has an activation already"
        elif loss and type(linear) is not nn.Linear:
            reason = "the linear layer is fused with others, or its weight is [in, out]"
        elif loss and scope.modules[loss].weight is not None:
            reason = f"'{loss}' weighs the classes"
        yield Candidate(kind, names, reason), (scope.modules[other], linear)


# ---- swapping --------------------------------------------------------------------------------


def _fused(linear: nn.Module) -> type:
    return FusedLinear if isinstance(linear, nn.Linear) else FusedConv1D


def _swap(kind: str, modules: Sequence[Any]) -> None:
    first, *linears = modules
    if kind == "norm":
        for linear in linears:
            linear.__class__ = _fused(linear)
            linear.before = (first,)
            if type(first) is not nn.LayerNorm:
                linear.norm_eps = (
                    first.eps if type(first) is nn.RMSNorm else formulas.rms_norm(first)
                )
        first.__class__ = _NORMS.get(type(first), Passed)
    elif kind == "activation":
        (linear,) = linears
        linear.__class__, linear.activation = _fused(linear), formulas.activation(first)
        first.__class__ = Passed
    else:
        (linear,) = linears
        first.__class__, first.before = FusedCrossEntropy, (linear,)
        linear.__class__ = PassedLinear


def _run(module: nn.Module, swap: bool) -> list[Candidate]:
    seen: dict[int, int] = {}
    for _, each in module.named_modules(remove_duplicate=False):
        seen[id(each)] = seen.get(id(each), 0) + 1
    shared = {key for key, count in seen.items() if count > 1}
    kinds = _Kinds()
    failed: dict[str, str] = {}
    fusions: list[Candidate] = []
    for name, graphs in _scopes(module, "", kinds, failed):
        inner = module.get_submodule(name) if name else module
        for find in (_norms, _activations):
            candidates = list(find(_Scope(inner, graphs, shared, kinds)))
            for candidate, modules in candidates:
                full = tuple(f"{name}.{n}" if name else n for n in candidate.names)
                fusions.append(Candidate(candidate.kind, full, candidate.reason))
                if swap and not candidate.reason:
                    _swap(candidate.kind, modules)
    reached = {n for c in fusions for n in c.names}
    for name, each in module.named_modules():
        if name not in reached and kinds.is_norm(each):
            owner = name.rpartition(".")[0]
            if owner in failed:
                where = f"'{owner}'" if owner else "the model"
                fusions.append(Candidate("norm", (name,), f"{where}: {failed[owner]}"))
    return fusions


def explain(module: nn.Module) -> list[Candidate]:
    """What `fuse` would do: each group of modules, with the reason where it stays apart."""
    return _run(module, swap=False)


def fuse(
    module: nn.Module, args: tuple[Any, ...] | None = None, *, whole: bool = False
) -> nn.Module:
    """Fuse LayerNorm and RMSNorm with the linear layers behind them, and these with activations.

    An RMSNorm may be a module of another library whose forward is its formula. With `whole`, all
    that the forward computes becomes one graph.

    Modules change in place; the names of parameters and the state dict stay. What cannot be proved
    exact stays apart (`explain` says why). The proof is about the forward that owns the modules: a
    caller that takes such a norm out of the model and calls it by itself gets its input back.

    Args:
        module: A model of nn.Modules, such as an nn.Sequential or a transformer's block. A linear
            layer before an nn.CrossEntropyLoss is fused with it.
        args: Arguments of a forward. With them the results before and after are compared, in
            inference mode.
        whole: Export the forward by torch.export for each mode and each shape that it is called
            with, and run it as an ONNX graph with a generated backward, a launch each. In an
            autocast region the graph computes in its type, and returns float32.

    Returns:
        The module.

    Raises:
        CheckFailed: The results for `args` differ; the module is as it was.
        UsageError: With `whole`, the module cannot be one graph. A call raises it too, with the
            reason, for arguments whose graph cannot be made.
    """
    change = make_whole if whole else partial(_run, swap=True)
    if args is None:
        change(module)
        return module
    modes = {each: each.training for each in module.modules()}
    classes = {each: (type(each), dict(vars(each))) for each in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            before = module(*args)
            change(module)
            after = module(*args)
        try:
            torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)
        except AssertionError as error:
            raise CheckFailed(f"the fused module computes something else: {error}") from error
    except Exception:
        for each, (kind, state) in classes.items():
            each.__class__ = kind
            vars(each).clear()
            vars(each).update(state)
        raise
    finally:
        for each, mode in modes.items():
            each.training = mode
    return module

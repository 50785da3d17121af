"""What a forward may do: its graphs by torch.fx, along all ways that a call may take."""

from __future__ import annotations

import ast
import dis
import inspect
import itertools
import operator
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias

import torch
from torch import fx, nn

IsLeaf: TypeAlias = Callable[[nn.Module], bool]
"""Says whether a module becomes one node of a graph, rather than those of its forward."""
VARIANTS = 32
"""Ways to call a forward that are traced at most."""
BRANCHES = 4
"""Branches on the values of tensors, such as a size, that a way through a forward may have."""


class _Proxy(fx.Proxy):
    """A value of a trace that a call may spread out among its arguments (`_Tracer.iter`)."""

    def __len__(self) -> int:
        raise TypeError("its forward reads the length of a tensor or of its shape")

    def __iter__(self) -> Iterator[Any]:
        """As fx does it, but for reading the caller's instructions once alone."""
        caller = sys._getframe(1)
        name, count = _instructions(caller.f_code)[caller.f_lasti]
        if name == "UNPACK_SEQUENCE":
            return (self[i] for i in range(count))
        return self.tracer.iter(self)


@cache
def _instructions(code: CodeType) -> dict[int, tuple[str, Any]]:
    """The instructions of a function, and what each is given, by their offsets."""
    return {each.offset: (each.opname, each.argval) for each in dis.get_instructions(code)}


class _Tracer(fx.Tracer):
    """Traces one way through a forward: `path` says how its branches on tensors' values go."""

    def __init__(self, is_leaf: IsLeaf, path: Sequence[bool]) -> None:
        super().__init__()
        self._whole = is_leaf
        self.taken = list(path)
        """How all branches of the trace have gone; beyond `path` they are taken as True."""
        self._left = list(path)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a module is a node: one of torch's, or one that is taken as a `whole`."""
        if self._whole(m) or super().is_leaf_module(m, module_qualified_name):
            return True
        _check_further(type(m).forward)
        return False

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> Any:
        """The forward, with a placeholder for each argument that is not fixed.

        `**kwargs` stay empty, which fx cannot do where others are fixed.
        """
        _check_further(root_fn)
        kinds = {p.kind for p in inspect.signature(root_fn).parameters.values()}
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if kinds.isdisjoint(variadic[1:]) or variadic[0] in kinds:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        named = {}
        for name, parameter in [*inspect.signature(root_fn).parameters.items()][1:]:
            if parameter.kind is not variadic[1]:
                fixed = name in concrete_args
                named[name] = (
                    concrete_args[name] if fixed else self.create_proxy("placeholder", name, (), {})
                )
        return lambda root: root_fn(root, **named), [self.root]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """How a branch goes whose condition is known in a run alone."""
        if self._left:
            return self._left.pop(0)
        if len(self.taken) >= BRANCHES:
            raise fx.proxy.TraceError(f"more than {BRANCHES} branches depend on its tensors")
        self.taken.append(True)
        return True

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """A part of a shape, which calls spread out among their arguments: two of its sizes."""
        node = obj.node
        cut = node.target is operator.getitem and isinstance(node.args[1], slice)
        if cut and isinstance(node.args[0], fx.Node) and size_of(node.args[0]):
            return iter((obj[0], obj[1]))
        return super().iter(obj)


@cache
def _check_further(forward: Callable[..., Any]) -> None:
    """Raise TraceError where a forward looks into its `**kwargs`, of which a trace has none."""
    plain = inspect.unwrap(forward)
    kinds = inspect.signature(plain).parameters.values()
    names = {p.name for p in kinds if p.kind is inspect.Parameter.VAR_KEYWORD}
    if not names:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    passed = [k.value for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords
              if k.arg is None]  # fmt: skip
    if any(isinstance(n, ast.Name) and n.id in names and n not in passed for n in ast.walk(tree)):
        raise fx.proxy.TraceError(f"its forward reads its **{', '.join(names)}")


def _paths(module: nn.Module, is_leaf: IsLeaf, fixed: dict[str, Any]) -> Iterator[fx.Graph]:
    """The graphs of all ways through a forward, but for those that end in an error of its own."""
    path: list[bool] | None = []
    while path is not None:
        tracer = _Tracer(is_leaf, path)
        try:
            yield tracer.trace(module, fixed)
        except Exception as error:
            if not _raised(error):
                raise
        while tracer.taken and not tracer.taken[-1]:
            tracer.taken.pop()
        path = [*tracer.taken[:-1], False] if tracer.taken else None


def _raised(error: Exception) -> bool:
    """Whether a forward cannot take its arguments: it raises by itself, or lacks what is None."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if last.filename == __file__ or last.filename.startswith(str(Path(torch.__file__).parent)):
        return False
    lacks = isinstance(error, TypeError | AttributeError) and "NoneType" in str(error)
    return lacks or (last.line or "").startswith("raise ")


def _variants(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The arguments that a trace fixes, for each way to call a forward."""
    choices: dict[str, tuple[Any, ...]] = {}
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.default is None:
            choices[name] = (None, ...)
        elif isinstance(parameter.default, bool):
            choices[name] = (True, False)
    for values in itertools.product(*choices.values()):
        pairs = zip(choices, values, strict=True)
        yield {name: value for name, value in pairs if value is not ...}


def traces(module: nn.Module, is_leaf: IsLeaf) -> list[fx.Graph] | str:
    """The graphs of all ways through a forward, or the reason why there are none.

    They are those of training and of inference, with and without each optional argument, and along
    both ways of each branch on what only a run knows. `is_leaf` says which modules become one node.
    """
    variants = list(itertools.islice(_variants(module), VARIANTS + 1))
    if len(variants) > VARIANTS:
        return f"its forward has too many optional arguments ({VARIANTS} ways to call it at most)"
    modes = {each: each.training for each in module.modules()}
    graphs = []
    try:
        for training in (True, False):
            module.train(training)
            graphs += [graph for fixed in variants for graph in _paths(module, is_leaf, fixed)]
    except Exception as error:  # noqa: BLE001 - whatever a forward does with what is no tensor
        line = str(error).strip().splitlines()
        return f"its forward cannot be traced: {line[0] if line else type(error).__name__}"
    finally:
        for each, mode in modes.items():
            each.training = mode
    return graphs


def size_of(node: fx.Node) -> bool:
    """Whether a node asks for a tensor's shape alone."""
    if node.op == "call_method":
        return node.target in ("size", "dim")
    return node.op == "call_function" and node.target is getattr and node.args[1] in (
        "shape", "ndim", "device", "dtype",
    )  # fmt: skip

"""A module's forward as an ONNX graph with its training behaviour, or the reason why it is none."""

from __future__ import annotations

import operator
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as tree

from onnx_fuse.errors import UsageError
from onnx_fuse.ir.constants import one_line

_LOCK = threading.RLock()
PLAIN = (type(None), bool, int, float, str)
"""What an argument or a result may be besides a tensor."""
PREFIX = "module."
"""What the names of initializers begin with, before those of the module's tensors."""


Shapes = Sequence[tuple[int, ...]]
"""The shapes of the tensors among a call's arguments."""


@dataclass(frozen=True)
class Sizes:
    """The shapes that an export holds for: sizes, and formulas of open ones with their guards."""

    shapes: Sequence[tuple[Any, ...]]
    """Of each tensor; an open size is a sympy expression."""
    ranges: Mapping[Any, tuple[Any, Any]] = field(default_factory=dict)
    """The least and the largest size of each symbol."""
    guards: tuple[Any, ...] = ()
    """What must be true of the symbols: branches that the forward took."""

    @property
    def open(self) -> bool:
        """Whether other shapes than one are served."""
        return bool(self.ranges)

    def serve(self, shapes: Shapes) -> bool:
        """Whether the export holds for these shapes."""
        values: dict[Any, int] = {}
        for mine, shape in zip(self.shapes, shapes, strict=True):
            for want, size in zip(mine, shape, strict=True):
                if want in self.ranges and values.setdefault(want, size) != size:
                    return False
        # torch traces as if no open size were 0 or 1
        for symbol, size in values.items():
            low, high = self.ranges[symbol]
            if size < 2 or not low <= size <= high:
                return False
        for mine, shape in zip(self.shapes, shapes, strict=True):
            if any(_valued(w, values) != n for w, n in zip(mine, shape, strict=True)):
                return False
        return all(_valued(guard, values) == True for guard in self.guards)  # noqa: E712 - sympy's


def _valued(formula: Any, values: Mapping[Any, int]) -> Any:
    """A formula with these numbers for its symbols."""
    return formula if isinstance(formula, int) else formula.xreplace(values)


@dataclass
class Exported:
    """What a module computes for tensors of the shapes in `sizes`, in its present mode."""

    model: ir.Model
    """Its inputs are the tensors of the arguments; initializers are called `PREFIX` and the name of
    the module's tensor. Behind the module's outputs there are new contents of buffers."""
    results: Callable[[Sequence[Tensor]], Any]
    """What forward returns, of the tensors in it."""
    sizes: Sizes
    updated: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The buffers that the last outputs are for, in their order. The new content is the first
    number times the old one, and the second times the output."""
    counted: list[str] = field(default_factory=list)
    """The buffers that each call adds 1 to."""


class _Flat(nn.Module):
    """A module as a function from tensors to tensors."""

    def __init__(self, module: nn.Module, leaves: Sequence[Any], spec: object) -> None:
        super().__init__()
        self.module = module
        self._leaves, self._spec = [None if isinstance(x, Tensor) else x for x in leaves], spec
        self._taken = [isinstance(x, Tensor) for x in leaves]
        self.seen = SimpleNamespace()  # torch.export undoes what a forward does to its module

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        fed = iter(tensors)
        leaves = [
            next(fed) if taken else x for taken, x in zip(self._taken, self._leaves, strict=True)
        ]
        args, named = tree.tree_unflatten(leaves, self._spec)
        with _Attention():
            results, spec = tree.tree_flatten(self.module(*args, **named))
        unique = {id(y): y for y in results if isinstance(y, Tensor)}  # a graph returns each once
        inputs = {id(x) for x in (*tensors, *self.parameters(), *self.buffers())}
        unique = {key: y.clone() if key in inputs else y for key, y in unique.items()}
        numbers = {key: i for i, key in enumerate(unique)}
        self.seen.leaves = [numbers.get(id(y), (y,)) for y in results]
        self.seen.spec = spec
        return tuple(unique.values())

    def results(self) -> Callable[[Sequence[Tensor]], Any]:
        """What builds the module's result of its tensors."""
        leaves, spec = self.seen.leaves, self.seen.spec
        for leaf in leaves:
            if isinstance(leaf, tuple) and not isinstance(leaf[0], PLAIN):
                raise UsageError(f"its forward returns an object of class {type(leaf[0]).__name__}")
        if spec.is_leaf():
            return operator.itemgetter(0)

        def build(tensors: Sequence[Tensor]) -> Any:
            filled = [tensors[x] if isinstance(x, int) else x[0] for x in leaves]
            return tree.tree_unflatten(filled, spec)

        return build


def export(
    module: nn.Module, leaves: Sequence[Any], spec: object, axes: Sequence[Collection[int]] = ()
) -> Exported:
    """The graph of a module's forward for arguments, which are given flat.

    `axes` has for each tensor those whose sizes may be others: they are open where torch finds
    nothing against it. Raises UsageError, which says why, where the graph would not train as the
    module does.
    """
    flat = _Flat(module, leaves, spec)
    tensors = tuple(x.detach() for x in leaves if isinstance(x, Tensor))
    with _LOCK, _no_functions_of_autograd(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat.training = module.training
        try:
            marks: tuple[object, ...] | None = None
            if any(axes):
                marks = (tuple(dict.fromkeys(each, torch.export.Dim.AUTO) for each in axes),)
            program = torch.export.export(flat, tensors, strict=False, dynamic_shapes=marks)
            _refuse(program, module)
            results = flat.results()
            mutated = {
                name.removeprefix(PREFIX)
                for name in program.run_decompositions(
                    {}
                ).graph_signature.buffers_to_mutate.values()
            }
            onnx_program = torch.onnx.export(
                program, dynamo=True, verbose=False, optimize=False, opset_version=23
            )
        except UsageError:
            raise
        except Exception as error:  # of any kind, as the module's own code may raise
            raise UsageError(f"torch cannot export it: {one_line(error)}") from error
    assert onnx_program is not None
    model: ir.Model = onnx_program.model
    exported = Exported(model, results, _served_shapes(program, tensors))
    for value in model.graph.inputs:
        value.shape = ir.Shape([*map(_known_size, value.shape or ())])
    _batch_norms(program, exported)
    exported.counted = sorted(n for n in mutated if n.endswith("num_batches_tracked"))
    rest = mutated - set(exported.updated) - set(exported.counted)
    if rest:
        raise UsageError(f"its forward changes the buffer '{min(rest)}'")
    return exported


def _known_size(size: object) -> Any:
    """A size of an input: torch calls one that it made a constant by its digits."""
    name = size.value if isinstance(size, ir.SymbolicDim) else None
    return int(name) if name is not None and name.isdigit() else size


def _served_shapes(program: torch.export.ExportedProgram, tensors: Sequence[Tensor]) -> Sizes:
    names = program.graph_signature.user_inputs
    nodes = {n.name: n.meta["val"] for n in program.graph.nodes if n.op == "placeholder"}
    values = [nodes[name] for name in names]
    shapes = [
        tuple([d if isinstance(d, int) else d.node.expr for d in value.shape]) for value in values
    ]
    symbols = {s for shape in shapes for d in shape if not isinstance(d, int)
               for s in d.free_symbols}  # fmt: skip
    if not symbols:
        return Sizes([tuple(t.shape) for t in tensors])
    ranges = {s: (r.lower, r.upper) for s, r in program.range_constraints.items() if s in symbols}
    guards = tuple([guard.expr for guard in values[0].fake_mode.shape_env.guards])
    sizes = Sizes(shapes, ranges, guards)
    if not sizes.serve([tuple(t.shape) for t in tensors]):
        raise UsageError("torch does not say for which sizes its graph holds")
    return sizes


def _refuse(program: torch.export.ExportedProgram, module: nn.Module) -> None:
    """Raise UsageError for what has other gradients in ONNX, or acts on what it is given."""
    signature = program.graph_signature
    trained = {*signature.inputs_to_parameters, *signature.user_inputs}
    live: set[Any] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if node.name in trained and isinstance(value, Tensor) and value.is_floating_point():
                live.add(node)
            continue
        if node.op != "call_function" or not live.intersection(node.all_input_nodes):
            continue
        name = str(node.target)
        if name.startswith("aten.detach"):
            raise UsageError("its forward detaches a value, which ONNX cannot express")
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise UsageError(f"its forward has a nested region ({name})")
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and any(
            a.op == "placeholder" and a.name in signature.user_inputs
            for a, s in zip(node.args, schema.arguments, strict=False)
            if isinstance(a, torch.fx.Node) and s.alias_info is not None and s.alias_info.is_write
        ):  # fmt: skip
            raise UsageError(f"its forward changes an argument in place ({name})")
        live.add(node)
    for name, each in module.named_modules():
        norm = each if isinstance(each, nn.modules.batchnorm._NormBase) else None
        if norm is not None and norm.training and norm.momentum is None:
            raise UsageError(f"'{name}' has a cumulative average (momentum=None)")


class _Attention(TorchFunctionMode):
    """Writes out attention with dropout, which torch.onnx would export without it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        named = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **named)
        return func(*args, **named)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention, whose arguments these are."""
    if not dropout_p:
        y: Tensor = F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return y
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(times, -3) for x in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        attn_mask = query.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return F.dropout(scores.softmax(-1), dropout_p) @ value
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    else:
        scores = scores + attn_mask
    blind = (scores == float("-inf")).all(-1, keepdim=True)  # a query that sees no key gets zeros
    shares = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return F.dropout(shares, dropout_p) @ value


def _batch_norms(program: torch.export.ExportedProgram, exported: Exported) -> None:
    """Let BatchNormalizations train where the module's do, with torch's new statistics."""
    graph = exported.model.graph
    calls = [n for n in program.graph.nodes if str(n.target) == "aten.batch_norm.default"]
    nodes = [n for n in graph if n.op_type == "BatchNormalization" and not n.domain]
    other = [n for n in program.graph.nodes if "norm" in str(n.target) and n not in calls
             and any(k in str(n.target) for k in ("batch_norm", "instance_norm"))]  # fmt: skip
    if len(calls) != len(nodes) or other:
        raise UsageError("torch exports its BatchNorms in a way that is not known")
    for call, node in zip(calls, nodes, strict=True):
        _, _, _, mean, var, training, momentum, *_ = call.args
        if not training:
            continue
        if mean is None or var is None:
            raise UsageError("a BatchNorm has no running statistics")
        old = [v for v in node.inputs[3:5] if v is not None]
        x = call.args[0].meta["val"]
        count = x.numel() // x.shape[1]
        if not isinstance(count, int):
            raise UsageError("a BatchNorm's statistics depend on the number of rows")
        node.resize_outputs(3)
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
        node.attributes["momentum"] = ir.AttrFloat32("momentum", 1 - momentum)
        # ONNX takes the variance of the batch by its size n, torch by n - 1
        unbiased = count / max(count - 1, 1)
        factors = ((0.0, 1.0), ((1 - momentum) * (1 - unbiased), unbiased))
        for value, new, factor in zip(old, node.outputs[1:3], factors, strict=True):
            new.name, new.type, new.shape = f"{value.name}.next", value.type, value.shape
            exported.updated[str(value.name).removeprefix(PREFIX)] = factor
            graph.outputs.append(new)


@contextmanager
def _no_functions_of_autograd() -> Iterator[None]:
    """Raise UsageError where an autograd.Function is called, whose gradient no graph would have.

    Other threads call theirs meanwhile.
    """
    kind, thread = torch.autograd.Function, threading.get_ident()
    before = kind.__dict__["apply"]

    def apply(cls: type, *args: Any, **named: Any) -> Any:
        if threading.get_ident() != thread:
            return before.__func__(cls, *args, **named)
        raise UsageError(f"its forward calls the autograd.Function '{cls.__name__}'")

    kind.apply = classmethod(apply)
    try:
        yield
    finally:
        kind.apply = before

"""The operators that torch knows: `onnx_fuse::graph`, which runs any graph, and those with a name.

Every operator has a fake kernel, which gives shapes without computing, a gradient and a rule for
vmap: eager mode, torch.compile, torch.export and torch.func need no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils import _pytree as tree

from onnx_fuse.torch import eager, gpu
from onnx_fuse.torch.eager import OWN, CompiledForward, flattened, own, plain
from onnx_fuse.torch.graph import Graph, find
from onnx_fuse.torch.guard_cache import Kinds

LIBRARY = Library("onnx_fuse", "DEF")


def fake(graph: Graph, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the shapes that the graph would return; sizes that nobody knows are new symbols.

    Raises ValueError for an output whose very rank is unknown.
    """
    symbols = graph.symbols(tensors)
    results = []
    for end in graph.outputs:
        if end.sizes is None:
            raise ValueError(f"the rank of '{end.name}' shows in a run alone: it cannot be traced")
        shape = [symbols.get(d) if isinstance(d, str) else d for d in end.sizes]
        if None in shape:
            context = torch.library.get_ctx()
            shape = [context.new_dynamic_size() if d is None else d for d in shape]
        results.append(tensors[0].new_empty(shape, dtype=end.dtype))
    return results


def mask_of(tensors: Sequence[Tensor]) -> str:
    """Which tensors ask for a gradient, as the names of derived graphs have it."""
    return "".join("1" if t.requires_grad else "0" for t in tensors)


def gradients(
    graph: Graph,
    wanted: Sequence[bool],
    dys: Sequence[Tensor],
    inputs: Sequence[Tensor],
    saved: Mapping[str, Tensor],
    forward: str,
) -> list[Tensor | None]:
    """The gradients of those inputs of `graph` that are wanted, None for the others.

    `dys` has one for each float output; `saved` has by name what the backward of the mask `forward`
    reads of a forward's results. Gradients that will be differentiated themselves are computed of
    the inputs alone, and so are all where `forward` is empty.
    """
    again, mask = torch.is_grad_enabled() or not forward, forward
    if again:
        pairs = zip(wanted, graph.inputs, strict=True)
        mask = "".join("1" if w and end.dtype.is_floating_point else "0" for w, end in pairs)
    derived = graph.derived(f"gradient:{mask}" if again else f"backward:{mask}")
    by_name = dict(zip([end.name for end in graph.inputs], inputs, strict=True)) | dict(saved)
    rest = [by_name[end.name] for end in derived.inputs[len(dys) :]]
    results = iter(run_graph(derived.key, [*dys, *rest]))
    grads = [next(results) if bit == "1" else None for bit in mask]
    return [g if w else None for g, w in zip(grads, wanted, strict=True)]


def tangent(
    graph: Graph, tangents: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """The tangents of the float outputs at those of the inputs, None for 0.

    J t is the gradient by g of (Jᵀ g) · t.
    """
    nonzero = [t for t in tangents if t is not None]
    mask = "".join("0" if t is None else "1" for t in tangents)
    transposed = graph.derived(f"gradient:{mask}")
    count = sum(end.differentiable for end in graph.outputs)
    twice = transposed.derived(f"gradient:{'1' * count}{'0' * (len(transposed.inputs) - count)}")
    symbols = graph.symbols(inputs)
    by_name = dict(zip([end.name for end in graph.inputs], inputs, strict=True))
    for end in transposed.inputs[:count]:
        shape = end.shape(symbols)
        assert shape is not None, "a gradient's shape is the output's"
        by_name[end.name] = inputs[0].new_zeros(shape, dtype=end.dtype)
    rest = [by_name[end.name] for end in twice.inputs[len(nonzero) :]]
    return run_graph(twice.key, [*nonzero, *rest])


def one_by_one(op: Any, info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    """The rule of vmap for any operator: each of the batch by itself."""
    flat, spec = tree.tree_flatten(args)
    dims = tree.tree_flatten(in_dims, is_leaf=lambda d: d is None)[0]
    size = info.batch_size

    def piece(i: int) -> Any:
        return [
            x if d is None else x.select(d, i) if size else x.new_zeros(x.movedim(d, 0).shape[1:])
            for x, d in zip(flat, dims, strict=True)
        ]

    each = [op(*tree.tree_unflatten(piece(i), spec)) for i in range(max(size, 1))]
    columns = [torch.stack(column)[:size] for column in zip(*each, strict=True)]
    zeros = [0] * len(columns)
    return (columns, zeros) if isinstance(each[0], list) else (tuple(columns), tuple(zeros))


class _UnderTransforms(torch.autograd.Function):
    """An operator under torch.func's transforms, which see no gradient of an operator itself.

    Its first argument has `call`, `setup`, `backward`, `jvp` and `vmap`.
    """

    @staticmethod
    def forward(of: Any, *args: Any) -> tuple[Tensor, ...]:
        return tuple(of.call(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.of = inputs[0]
        ctx.of.setup(ctx, inputs[1:], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.of.backward(_Shifted(ctx), *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(ctx.of.jvp(ctx, *tangents[1:]))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], of: Any, *args: Any) -> tuple[Any, Any]:
        return of.vmap(info, in_dims[1:], *args)  # type: ignore[no-any-return]


def _wants_gradients(tensors: Sequence[Tensor]) -> bool:
    for t in tensors:  # noqa: SIM110 - any() takes twice as long
        if t.requires_grad:
            return True
    return False


class _Shifted:
    """A context without the argument that `_UnderTransforms` has before an operator's own."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.needs_input_grad = ctx, ctx.needs_input_grad[1:]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def _transformed() -> bool:
    """Whether torch.func's transforms are at work, outside of torch.compile's own."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


# ---- onnx_fuse::graph ------------------------------------------------------------------------

LIBRARY.define("graph(str key, Tensor[] tensors) -> Tensor[]")


def run_graph(key: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Run the graph of this key (`torch.ops.onnx_fuse.graph`)."""
    wants = torch.is_grad_enabled() and _wants_gradients(tensors)
    if not wants and plain(tensors[0]) and own(tensors):
        return find(key).run(tensors)
    if _transformed():
        return list(_UnderTransforms.apply(_Any, key, *tensors))
    results: list[Tensor] = torch.ops.onnx_fuse.graph(key, list(tensors))
    return results


def call_graph(graph: Graph, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The outputs of a graph, with its gradient for autograd."""
    ready: Any = None
    first = tensors[0]
    if eager.on_gpu(first) and type(first) in OWN and not torch.compiler.is_compiling():
        key = torch.is_grad_enabled(), gpu.state()
        ready = graph.ready.find(key, tensors)
        if ready is None and plain(first) and own(tensors):
            ready = graph.ready.enter(key, tensors, _ready(graph, tensors))
    if ready:
        if not ready.mask:
            return ready.run(tensors)[0]  # type: ignore[no-any-return]
        results: Any = eager.apply(ready, *tensors)
        return results if isinstance(results, tuple) else (results,)
    mask = mask_of(tensors) if torch.is_grad_enabled() else ""
    name = f"{graph.key}/forward:{mask}" if "1" in mask else graph.key
    return run_graph(name, tensors)[: len(graph.outputs)]


def _ready(graph: Graph, tensors: Sequence[Tensor]) -> CompiledForward | bool:
    """What runs a graph and keeps what its gradient reads; False where the dispatcher must."""
    if gpu.current_device() != tensors[0].get_device():
        return False
    mask = mask_of(tensors) if torch.is_grad_enabled() else ""
    compiled = CompiledForward(graph, tensors, mask if "1" in mask else "", _again)
    return compiled if compiled.turn is not None else False


def _again(
    graph: Graph, needs: Sequence[bool], dys: Sequence[Tensor], tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients as functions of the tensors alone, which may be differentiated again."""
    return gradients(graph, needs, dys, tensors, {}, "")


class _Any:
    """`onnx_fuse::graph` with its tensors as arguments."""

    @staticmethod
    def call(key: str, *tensors: Tensor) -> list[Tensor]:
        results: list[Tensor] = torch.ops.onnx_fuse.graph(key, list(tensors))
        return results

    @staticmethod
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
        key, *tensors = inputs
        base, _, last = key.rpartition("/")
        ctx.mask = last.removeprefix("forward:") if last.startswith("forward:") else ""
        ctx.key = base if ctx.mask else key
        ctx.set_materialize_grads(False)
        ends = find(ctx.key).outputs
        fixed = [y for y, end in zip(output, ends, strict=False) if not end.differentiable]
        ctx.mark_non_differentiable(*fixed, *output[len(ends) :])
        ctx.shapes = [y.shape for y in output[: len(ends)]]
        ctx.kept = len(output) if ctx.mask else 0
        ctx.save_for_backward(*output[: ctx.kept], *tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> list[Tensor | None]:
        graph = find(ctx.key)
        results = iter(tangent(graph, tangents[1:], ctx.saved_tensors[ctx.kept :]))
        return [next(results) if e.differentiable else None for e in graph.outputs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graph, by_name = find(ctx.key), {}
        saved = ctx.saved_tensors  # which may be asked for once
        inner, inputs = saved[: ctx.kept], saved[ctx.kept :]
        if ctx.mask:
            ends = graph.derived(f"forward:{ctx.mask}").outputs
            by_name = dict(zip([end.name for end in ends], inner, strict=True))
        dys = [
            inputs[0].new_zeros(shape, dtype=end.dtype) if dy is None else dy
            for dy, shape, end in zip(grads, ctx.shapes, graph.outputs, strict=False)
            if end.differentiable
        ]
        wanted = ctx.needs_input_grad[1:]
        return None, *gradients(graph, wanted, dys, inputs, by_name, ctx.mask)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        return one_by_one(run_graph, info, (in_dims[0], in_dims[1:]), args[0], args[1:])


def _setup(ctx: Any, inputs: tuple[str, list[Tensor]], output: list[Tensor]) -> None:
    _Any.setup(ctx, (inputs[0], *inputs[1]), output)


class _Flat(_Shifted):
    """A context whose needs_input_grad is that of the tensors as arguments."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.needs_input_grad = ctx, (False, *ctx.needs_input_grad[1])


def _backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[None, list[Tensor | None]]:
    return None, list(_Any.backward(_Flat(ctx), *grads)[1:])


def _register(name: str, kernel: Any, shapes: Any, setup: Any, backward: Any, vmap: Any) -> None:
    """Enter the parts of an operator that is defined."""
    full = f"onnx_fuse::{name}"
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(full, shapes, lib=LIBRARY)
    torch.library.register_autograd(full, backward, setup_context=setup, lib=LIBRARY)
    torch.library.register_vmap(full, vmap, lib=LIBRARY)


_register(
    "graph",
    lambda key, tensors: find(key).run(tensors),
    lambda key, tensors: fake(find(key), tensors),
    _setup,
    _backward,
    lambda info, in_dims, *args: one_by_one(torch.ops.onnx_fuse.graph, info, in_dims, *args),
)


# ---- operators with a name -------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """A function with an operator of its own, `onnx_fuse::name`.

    Its arguments are `tensors` (those that end in "?" may be None), then `attributes`, then
    `save`, which says whether its inner values are wanted too. Its results are the function's, and
    behind it `saves` inner values; without `save` these have no elements.
    """

    name: str
    tensors: tuple[str, ...]
    attributes: tuple[str, ...]
    """Further arguments, as in a schema of torch's: "float eps"."""
    saves: int
    """The inner values that the gradient reads, at most."""
    graph: Callable[..., Graph]
    """Makes the graph of tensors (None for omitted ones) and attributes."""
    flat: int = 0
    """The rank to which the first tensor is flattened by merging leading axes; 0 keeps its rank."""
    rows: bool = False
    """Whether each row of the first tensor makes a row of every result."""
    optional: int = field(init=False)
    """The number of the tensor that may be None; -1 where there is none."""
    count: int = field(init=False)
    """The number of tensors, those left out included."""
    ready: Kinds = field(default_factory=Kinds)
    """What `_ready` found for calls."""

    def __post_init__(self) -> None:
        number = next((i for i, t in enumerate(self.tensors) if t.endswith("?")), -1)
        assert sum(t.endswith("?") for t in self.tensors) <= 1
        object.__setattr__(self, "optional", number)
        object.__setattr__(self, "count", len(self.tensors))

    def __call__(self, *args: Any) -> Tensor:
        """Run it; `args` are the tensors and the attributes."""
        count = self.count
        tensors = args[:count]
        missing = self.optional >= 0 and tensors[self.optional] is None
        present = [x for x in tensors if x is not None] if missing else tensors
        first = present[0]
        if eager.on_gpu(first) and type(first) in OWN and not torch.compiler.is_compiling():
            key = missing, torch.is_grad_enabled(), args[count:], *gpu.state()
            ready = self.ready.find(key, present)
            if ready is None and plain(first):
                ready = self.ready.enter(key, present, self._ready(args, present))
            if ready:
                if ready.mask:
                    y: Tensor = eager.apply(ready, *tensors)
                    return y
                return ready.run(present)[0][0]  # type: ignore[no-any-return]
        save = torch.is_grad_enabled() and _wants_gradients(present)
        results: tuple[Tensor, ...]
        if _transformed():
            results = _UnderTransforms.apply(self, *args, False)
        else:
            results = self.call(*args, save)
        return results[0]

    def _ready(self, args: Sequence[Any], present: Sequence[Tensor]) -> CompiledForward | bool:
        """What runs calls like this one; False where only the dispatcher can run them."""
        if not own(present) or gpu.current_device() != present[0].get_device():
            return False
        graph = self.graph(*args)
        save = torch.is_grad_enabled() and _wants_gradients(present)
        mask = graph.floats if save else ""
        compiled = CompiledForward(graph, present, mask, self._again, self.flat, self.rows)
        return compiled if compiled.turn is not None else False

    def _again(
        self, graph: Graph, needs: Sequence[bool], dys: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradients as functions of the tensors alone, which may be differentiated again."""
        x, (dy,) = tensors[0], dys
        if self.rows:
            dy = flattened(dy, self.flat)
        inputs = [flattened(x, self.flat), *tensors[1:]]
        grads = gradients(graph, needs, [dy], inputs, {}, "")
        if grads[0] is not None:
            grads[0] = grads[0].reshape(x.shape)
        return grads

    def call(self, *args: Any) -> tuple[Tensor, ...]:
        """The operator itself."""
        results: tuple[Tensor, ...] = getattr(torch.ops.onnx_fuse, self.name)(*args)
        return results

    def define(self) -> Operator:
        """Make torch know it."""
        kinds = [
            f"Tensor? {t.removesuffix('?')}" if t.endswith("?") else f"Tensor {t}"
            for t in self.tensors
        ]
        results = ", ".join(["Tensor"] * (1 + self.saves))
        arguments = ", ".join((*kinds, *self.attributes, "bool save"))
        LIBRARY.define(f"{self.name}({arguments}) -> ({results})")
        shapes = self._fake
        _register(self.name, self.kernel, shapes, self.setup, self.backward, self.vmap)
        return self

    def _split(self, args: Sequence[Any]) -> tuple[Graph, list[Tensor], torch.Size]:
        """The graph, its tensors, and the first one's shape."""
        count = len(self.tensors)
        operands, attributes = args[:count], args[count : count + len(self.attributes)]
        tensors = [x for x in operands if x is not None]
        shape = tensors[0].shape
        tensors[0] = flattened(tensors[0], self.flat)
        return self.graph(*operands, *attributes), tensors, shape

    def _results(self, results: Sequence[Tensor], shape: torch.Size) -> tuple[Tensor, ...]:
        """The function's result in the caller's shape, and a tensor for each inner value."""
        y, *inner = results
        assert len(inner) <= self.saves, "torch would crash"
        if self.rows and len(shape) != self.flat:
            y = y.reshape(*shape[: len(shape) - self.flat + 1], *y.shape[1:])
        return y, *inner, *[y.new_empty(0) for _ in range(self.saves - len(inner))]

    def kernel(self, *args: Any) -> tuple[Tensor, ...]:
        """Run the graph."""
        graph, tensors, shape = self._split(args)
        if args[-1]:
            graph = graph.derived(graph.saving)
        return self._results(graph.run(tensors), shape)

    def _fake(self, *args: Any) -> tuple[Tensor, ...]:
        graph, tensors, shape = self._split(args)
        if args[-1]:
            graph = graph.derived(graph.saving)
        return self._results(fake(graph, tensors), shape)

    def setup(self, ctx: Any, inputs: Sequence[Any], output: tuple[Tensor, ...]) -> None:
        """Keep what the gradient reads."""
        count = len(self.tensors)
        ctx.attributes, ctx.saved = inputs[count:-1], inputs[-1]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:count], *(output if ctx.saved else ()))
        ctx.save_for_forward(*inputs[:count])

    def jvp(self, ctx: Any, *tangents: Tensor | None) -> list[Tensor | None]:
        """The tangent of the function's result; inner values have none."""
        args = ctx.saved_tensors[: len(self.tensors)]
        graph, tensors, shape = self._split((*args, *ctx.attributes))
        along = [t for t, x in zip(tangents, args, strict=False) if x is not None]
        if along[0] is not None:
            along[0] = along[0].reshape(tensors[0].shape)
        (y,) = tangent(graph, along, tensors)
        return [self._results([y], shape)[0], *[None] * self.saves]

    def backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradient of each argument."""
        count = len(self.tensors)
        saved = ctx.saved_tensors  # which may be asked for once
        args, outputs = saved[:count], saved[count:]
        dy = grads[0]
        if dy is None:
            return (None,) * (count + len(ctx.attributes) + 1)
        graph, tensors, shape = self._split((*args, *ctx.attributes))
        forward = graph.floats if ctx.saved else ""
        by_name = {}
        if forward:
            y, *inner = outputs
            names = [end.name for end in graph.derived(graph.saving).outputs]
            if self.rows:
                y = y.reshape(tensors[0].shape[0], *y.shape[len(shape) - self.flat + 1 :])
            by_name = dict(zip(names, (y, *inner), strict=False))
        if self.rows and len(shape) != self.flat:
            dy = dy.reshape(tensors[0].shape[0], *dy.shape[len(shape) - self.flat + 1 :])
        present = [x is not None for x in args]
        wanted = [w for w, there in zip(ctx.needs_input_grad, present, strict=False) if there]
        if forward and self.rows:  # what its backward reads has one name for every mask
            floats = zip(wanted, graph.floats, strict=True)
            forward = "".join("1" if w and bit == "1" else "0" for w, bit in floats)
        tensor_grads = gradients(graph, wanted, [dy], tensors, by_name, forward)
        if tensor_grads[0] is not None:
            tensor_grads[0] = tensor_grads[0].reshape(shape)
        results = iter(tensor_grads)
        every = [next(results) if there else None for there in present]
        return (*every, *[None] * (len(ctx.attributes) + 1))

    def vmap(self, info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
        """A batch of the first tensor's as further rows; any other one by one."""
        if not self.rows or in_dims[0] is None or any(d is not None for d in in_dims[1:]):
            return one_by_one(self.call, info, in_dims, *args)
        x = args[0].movedim(in_dims[0], 0)
        y, *rest = self.call(x, *args[1:])
        if not args[-1]:
            return (y, *rest), (0, *[None] * len(rest))
        rows = prod(x.shape[1 : x.dim() - self.flat + 1])
        rest = [k.reshape(info.batch_size, rows, *k.shape[1:]) if k.dim() > 1 else k for k in rest]
        return (y, *rest), (0, *(0 if k.dim() > 2 else None for k in rest))

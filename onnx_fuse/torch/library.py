"""The operators that torch knows: `onnx_fuse::graph`, and one for each function of ours.

All run a graph by its key. They have a fake kernel, which gives shapes without computing, a
gradient and a rule for vmap: eager mode, torch.compile, torch.export and torch.func need no more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.library import Library
from torch.utils import _pytree as tree

from onnx_fuse.torch import eager, gpu
from onnx_fuse.torch.eager import OWN, CompiledForward, flattened, own, plain
from onnx_fuse.torch.graph import BUILDERS, OnnxGraph, built, find
from onnx_fuse.torch.guard_cache import Kinds

LIBRARY = Library("onnx_fuse", "DEF")


def fake(graph: OnnxGraph, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the shapes that the graph would return; sizes that nobody knows are new symbols.

    Raises ValueError for an output whose very rank is unknown.
    """
    symbols = graph.symbols(tensors)
    results = []
    for end in graph.outputs:
        if end.sizes is None:
            raise ValueError(f"the rank of '{end.name}' is known only in a run: no trace has it")
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
    graph: OnnxGraph,
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
    graph: OnnxGraph, tangents: Sequence[Tensor | None], inputs: Sequence[Tensor]
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


def one_by_one(op: Any, info: Any, in_dims: object, *args: object) -> tuple[Any, Any]:
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


def _wants_gradients(tensors: Sequence[Tensor]) -> bool:
    for t in tensors:  # noqa: SIM110 - any() takes twice as long
        if t.requires_grad:
            return True
    return False


def by_torch(x: Tensor) -> bool:
    """Whether torch's own operators compute a function of `x`: on the CPU they are the fastest.

    An exported program has the function as one operator, for whatever device it will run on.
    """
    return x.is_cpu and not torch.compiler.is_exporting()


# ---- onnx_fuse::graph ------------------------------------------------------------------------


def run_graph(key: str, tensors: Sequence[Tensor], name: str = "graph") -> list[Tensor]:
    """Run the graph of this key, by the operator of this name."""
    wants = torch.is_grad_enabled() and _wants_gradients(tensors)
    if not wants and plain(tensors[0]) and own(tensors):
        return find(key).run(tensors)
    # outside of torch.compile's own
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return list(_UnderTransforms.apply(key, *tensors))
    results: list[Tensor] = getattr(torch.ops.onnx_fuse, name)(key, list(tensors))
    return results


def _with_gradient(key: str, tensors: Sequence[Tensor], name: str = "graph") -> list[Tensor]:
    """The results of a graph, and what its gradient reads where a tensor asks for one."""
    mask = mask_of(tensors) if torch.is_grad_enabled() else ""
    return run_graph(f"{key}/forward:{mask}" if "1" in mask else key, tensors, name)


def call_graph(graph: OnnxGraph, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
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
            return ready.run(tensors)[0]
        results = eager.apply(ready, *tensors)
        return results if isinstance(results, tuple) else (results,)
    return _with_gradient(graph.key, tensors)[: len(graph.outputs)]


def _ready(graph: OnnxGraph, tensors: Sequence[Tensor]) -> CompiledForward | bool:
    """What runs a graph and keeps what its gradient reads; False where the dispatcher must."""
    if gpu.current_device() != tensors[0].get_device():
        return False
    mask = mask_of(tensors) if torch.is_grad_enabled() else ""
    compiled = CompiledForward(graph, tensors, mask if "1" in mask else "", _again)
    return compiled if compiled.turn is not None else False


def _again(
    graph: OnnxGraph, needs: Sequence[bool], dys: Sequence[Tensor], tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients as functions of the tensors alone, which may be differentiated again."""
    return gradients(graph, needs, dys, tensors, {}, "")


class _UnderTransforms(torch.autograd.Function):
    """`onnx_fuse::graph` under torch.func's transforms, which see no gradient of an operator."""

    @staticmethod
    def forward(key: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.ops.onnx_fuse.graph(key, list(tensors)))

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
        key, *tensors = inputs
        base, _, last = key.rpartition("/")
        ctx.mask = last.removeprefix("forward:") if last.startswith("forward:") else ""
        ctx.key = base if ctx.mask else key
        ctx.set_materialize_grads(False)
        ends = find(ctx.key).outputs
        fixed = [y for y, end in zip(output, ends, strict=False) if not end.differentiable]
        ctx.mark_non_differentiable(*fixed, *output[len(ends) :])
        ctx.shapes = [y.shape for y in output[: len(ends)]]
        ctx.kept, ctx.count = len(output) if ctx.mask else 0, len(tensors)
        ctx.save_for_backward(*tensors, *output[: ctx.kept])
        ctx.save_for_forward(*tensors)

    @staticmethod
    def jvp(ctx: FunctionCtx, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        graph = find(ctx.key)
        results = iter(tangent(graph, tangents[1:], ctx.saved_tensors[: ctx.count]))
        inner = [None] * max(ctx.kept - len(graph.outputs), 0)
        return (*(next(results) if e.differentiable else None for e in graph.outputs), *inner)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_backward(ctx, ctx.needs_input_grad[1:], grads)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], key: str, *tensors: Tensor) -> tuple[Any, Any]:
        """A batch of the first tensor's as further rows; any other one by one."""
        first, *others = in_dims[1:]
        if first is None or not find(key).rows or any(d is not None for d in others):
            return one_by_one(run_graph, info, (in_dims[0], in_dims[1:]), key, tensors)
        x = tensors[0].movedim(first, 0)
        batch, rows = x.shape[:2]
        each = run_graph(key, [x.reshape(batch * rows, *x.shape[2:]), *tensors[1:]])
        results = [y.reshape(batch, rows, *y.shape[1:]) if y.dim() > 1 else y for y in each]
        return tuple(results), tuple(0 if y.dim() > 1 else None for y in each)


def _backward(
    ctx: FunctionCtx, wanted: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    graph, by_name = find(ctx.key), {}
    saved = ctx.saved_tensors  # which may be asked for once
    inputs, inner = saved[: ctx.count], saved[ctx.count :]
    if ctx.mask:
        ends = graph.derived(f"forward:{ctx.mask}").outputs
        by_name = dict(zip([end.name for end in ends], inner, strict=True))
    dys = [
        inputs[0].new_zeros(shape, dtype=end.dtype) if dy is None else dy
        for dy, shape, end in zip(grads, ctx.shapes, graph.outputs, strict=False)
        if end.differentiable
    ]
    return gradients(graph, wanted, dys, inputs, by_name, ctx.mask)


def _define(name: str) -> None:
    """Make torch know the operator `onnx_fuse::name`, which runs the graph of a key."""
    LIBRARY.define(f"{name}(str key, Tensor[] tensors) -> Tensor[]")
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, lambda key, tensors: find(key).run(tensors), device)
    full = f"onnx_fuse::{name}"
    torch.library.register_fake(full, lambda key, tensors: fake(find(key), tensors), lib=LIBRARY)
    torch.library.register_autograd(
        full,
        lambda ctx, grads: (None, _backward(ctx, ctx.needs_input_grad[1], grads)),
        setup_context=lambda ctx, inputs, output: _UnderTransforms.setup_context(
            ctx, (inputs[0], *inputs[1]), output
        ),
        lib=LIBRARY,
    )
    torch.library.register_vmap(
        full, lambda info, in_dims, *args: one_by_one(run_graph, info, in_dims, *args), lib=LIBRARY
    )


_define("graph")


# ---- functions of ours -----------------------------------------------------------------------


@dataclass(frozen=True)
class Fused:
    """A function of tensors that is one graph. It is called with the tensors, then with options."""

    name: str
    """That of the operator, and of the graph's builder in `BUILDERS`."""
    count: int
    """The number of tensors, those left out included."""
    optional: int
    """The number of the one that may be None."""
    parts: Callable[..., tuple[str, ...]]
    """Gives what the builder takes, from what the function is called with."""
    as_torch: Callable[..., Tensor]
    """The same function of the same arguments by torch's own operators."""
    flat: int = 0
    """The rank to which the first tensor is flattened by merging leading axes; 0 keeps its rank."""
    rows: bool = False
    """Whether each row of the first tensor makes a row of the result."""
    ready: Kinds = field(default_factory=Kinds)
    """What `_ready` found for calls."""

    def __post_init__(self) -> None:
        _define(self.name)

    def __call__(self, *args: Any) -> Tensor:
        count = self.count
        tensors = args[:count]
        missing = tensors[self.optional] is None
        present = [x for x in tensors if x is not None] if missing else tensors
        first = present[0]
        if by_torch(first):
            if not torch.compiler.is_compiling():
                self._check(args, present)
            return self.as_torch(*args)
        if eager.on_gpu(first) and type(first) in OWN and not torch.compiler.is_compiling():
            key = missing, torch.is_grad_enabled(), args[count:], *gpu.state()
            ready = self.ready.find(key, present)
            if ready is None and plain(first):
                ready = self.ready.enter(key, present, self._ready(args, present))
            if ready:
                if ready.mask:
                    return eager.apply(ready, *tensors)
                return ready.run(present)[0][0]
        inputs = [flattened(first, self.flat), *present[1:]]
        name = built(self.name, *self.parts(*args))
        y = _with_gradient(name, inputs, self.name)[0]
        if self.rows and first.dim() != self.flat:
            y = y.reshape(*first.shape[: first.dim() - self.flat + 1], *y.shape[1:])
        return y

    def _check(self, args: Sequence[Any], present: Sequence[Tensor]) -> None:
        """Raise ValueError for tensors that do not fit each other, as the graph does."""
        key = len(present), args[self.count :]
        if self.ready.find(key, present) is None:
            graph = BUILDERS[self.name](*self.parts(*args))
            graph.symbols([flattened(present[0], self.flat), *present[1:]])
            self.ready.enter(key, present, True)

    def _ready(self, args: Sequence[Any], present: Sequence[Tensor]) -> CompiledForward | bool:
        """What runs calls like this one; False where only the dispatcher can run them."""
        if not own(present) or gpu.current_device() != present[0].get_device():
            return False
        graph = BUILDERS[self.name](*self.parts(*args))
        save = torch.is_grad_enabled() and _wants_gradients(present)
        mask = graph.floats if save else ""
        compiled = CompiledForward(graph, present, mask, self._again, self.flat, self.rows)
        return compiled if compiled.turn is not None else False

    def _again(
        self, graph: OnnxGraph, needs: Sequence[bool], dys: Sequence[Tensor],
        tensors: Sequence[Tensor],
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradients as functions of the tensors alone, which may be differentiated again."""
        x, (dy,) = tensors[0], dys
        if self.rows:
            dy = flattened(dy, self.flat)
        inputs = [flattened(x, self.flat), *tensors[1:]]
        grads = gradients(graph, needs, [dy], inputs, {}, "")
        if grads[0] is not None:
            grads[0] = grads[0].reshape(x.shape)
        return grads

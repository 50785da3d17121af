"""Operators on CUDA tensors in eager mode, without torch's dispatcher, which takes the host long.

What a call needs is found out once for its kind: attributes, stream, and each tensor's shape, type
and device. From then on it allocates the result, hands addresses to the launches, and leaves a node
for autograd. Values that only the backward reads share one allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, starmap
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from onnx_fuse.program.call import dense_strides
from onnx_fuse.torch import gpu
from onnx_fuse.torch.gpu import ADDRESS
from onnx_fuse.torch.graph import OnnxGraph
from onnx_fuse.torch.guard_cache import KINDS

MANY = 16
"""Gradients of one backward from which on they share an allocation."""
_APART = 256  # bytes; the values that a forward keeps begin at multiples
OWN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Torch's own classes of tensors; others may see operators first."""


def on_gpu(x: Tensor) -> bool:
    """Whether a tensor is in GPU memory."""
    is_cuda: bool = x.is_cuda
    return is_cuda


def plain(x: Tensor) -> bool:
    """Whether a kernel may run on `x` in GPU memory without the dispatcher: nobody watches."""
    return on_gpu(x) and unwatched()


def unwatched() -> bool:
    """Whether nothing asks to see operators before their kernels: no tracing, no mode."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and torch._C._len_torch_dispatch_stack() == 0
    )


def own(tensors: Sequence[Tensor]) -> bool:
    """Whether all are torch's own tensors, and none of a class that sees operators first."""
    return set(map(type, tensors)) <= OWN


def flattened(x: Tensor, axes: int) -> Tensor:
    """`x` with the axes before its last ones made one, so that it has `axes`; 0 leaves it."""
    if not axes or x.dim() == axes:
        return x
    lead = x.dim() - axes + 1
    return x.reshape(prod(x.shape[:lead]), *x.shape[lead:])


def dense(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, contiguous."""
    return [t if t.is_contiguous() else t.contiguous() for t in tensors]


class CompiledForward:
    """A graph for one kind of call in one stream.

    `flat` and `rows` are an operator's. `mask` has the inputs whose backward it keeps values for,
    as the names of derived graphs have it, or "" for none.
    """

    def __init__(
        self,
        graph: OnnxGraph,
        tensors: Sequence[Tensor],
        mask: str,
        again: Callable[..., list[Tensor | None]],
        flat: int = 0,
        rows: bool = False,
    ) -> None:
        self.graph, self.mask, self._flat, self._rows = graph, mask, flat, rows
        self.again = again
        """`again(graph, needs, dys, tensors)`: the gradients of the tensors alone."""
        self.tensors = len(tensors)
        # all tensors of a kind have the same strides
        self._dense = all(map(gpu.DENSE, tensors))
        self._latest: tuple[list[int], list[int]] = [], []
        """Addresses of the last call whose tensors were read where they are, which mostly come
        again: those of the tensors, the result and what is kept; and all that launches are given.
        """
        self.floats = [end.differentiable for end in graph.outputs]
        """Which results have gradients."""
        forward = graph.derived(f"forward:{mask}") if mask else graph
        first, *others = (t.detach() for t in tensors)
        self.turn = forward.turn(dense([flattened(first, flat), *others]))
        """What launches the forward; None where the graph needs the host between its kernels."""
        if self.turn is None:
            return
        self.shape = tensors[0].shape
        lead = self.shape[: len(self.shape) - flat + 1] if rows else ()
        count = len(graph.outputs)
        self._results = [
            (shape, dense_strides(shape), kind)
            for first, _, kind in self.turn.results[:count]
            for shape in [(*lead, *first[1:]) if rows else first]
        ]
        self._new, self._enqueue = self.turn.new, self.turn.enqueue
        inner = self.turn.results[count:]
        *self._offsets, self._bytes = _offsets(inner)
        self._memory = (self._bytes,), (1,), torch.uint8
        ends = zip(forward.outputs[count:], self._offsets, inner, strict=True)
        self._inner = {end.name: (offset, kind) for end, offset, kind in ends}
        self._names = [end.name for end in graph.outputs]
        wanted = graph.derived(f"backward:{mask}").inputs if mask else ()
        read = {end.name for end in wanted}
        self.keeps = [name in read for name in self._names]
        """Which results the backward of all inputs reads."""
        self._halves: dict[Any, CompiledBackward] = {}

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Tensor | None]:
        """The results, and the memory of what is kept."""
        results = [*starmap(self._new, self._results)]
        block = self._new(*self._memory) if self._bytes else None
        base = 0 if block is None else block.data_ptr()
        now = [*map(ADDRESS, tensors), *map(ADDRESS, results), base]
        before, ends = self._latest
        if now != before:
            read, places = gpu.aligned(tensors) if self._dense else gpu.addresses(tensors)
            ends = [*places, *map(ADDRESS, results), *[base + at for at in self._offsets]]
            if places == now[: len(places)]:
                self._latest = now, ends
            tensors = read  # copies stay alive until the launches are in the stream
        self._enqueue(ends)
        return results, block

    def gradients(
        self, needs: tuple[bool, ...], dys: Sequence[Tensor], saved: Sequence[Tensor | None]
    ) -> list[Tensor | None] | None:
        """The gradients of the tensors whose `needs` is set, None for the others.

        `dys` has one for each result of a float type. `saved` are the tensors, each result or None,
        and the memory of what is kept. Returns None where the backward needs more than that.
        """
        key = needs, gpu.state()
        half = self._halves.get(key)
        if half is None:
            if len(self._halves) >= KINDS:
                self._halves.clear()
            half = self._halves[key] = self._half(needs, dys, saved)
        return half.run(dys, saved) if half.turn is not None else None

    def _half(
        self, needs: tuple[bool, ...], dys: Sequence[Tensor], saved: Sequence[Tensor | None]
    ) -> CompiledBackward:
        """The backward for some gradients."""
        graph = self.graph
        floats = [bit == "1" for bit in self.mask]
        if self._rows:  # what its backward reads has one name for every mask
            floats = [bit and need for bit, need in zip(floats, needs, strict=True)]
        mask = "".join("1" if bit else "0" for bit in floats)
        backward = graph.derived(f"backward:{mask}")
        inputs = {end.name: i for i, end in enumerate(graph.inputs)}
        output_numbers = {name: self.tensors + i for i, name in enumerate(self._names)}
        memory = saved[-1]
        sources: list[tuple[int, int]] = []
        tensors = [flattened(dy, self._flat) if self._rows else dy for dy in dys]
        for end in backward.inputs[len(dys) :]:
            number = inputs.get(end.name, output_numbers.get(end.name))
            if number is not None:
                sources.append((number, 0))
                tensor = saved[number]
                if tensor is not None and (number == 0 or (self._rows and number >= self.tensors)):
                    tensor = flattened(tensor, self._flat)
            else:
                offset, (shape, _, dtype) = self._inner[end.name]
                sources.append((len(saved) - 1, offset))
                size = prod(shape) * dtype.itemsize
                assert memory is not None
                tensor = memory[offset : offset + size].view(dtype).view(shape)
            if tensor is None:
                return CompiledBackward(None, (), (), ())
            tensors.append(tensor)
        places, numbers = [], iter(range(len(needs)))
        for need, bit in zip(needs, floats, strict=True):
            number = next(numbers) if bit else -1
            places.append(number if need else -1)
        turn = backward.turn(dense(tensors))
        results = [] if turn is None else [*turn.results]
        if results and floats[0]:
            shape = tuple(self.shape)  # the allocator takes no torch.Size
            results[0] = shape, dense_strides(shape), results[0][2]
        return CompiledBackward(turn, sources, results, places)


class CompiledBackward:
    """A backward: where each of its inputs is, and which result is whose gradient."""

    def __init__(
        self,
        turn: Any,
        sources: Sequence[tuple[int, int]],
        results: Sequence[gpu.Result],
        places: Sequence[int],
    ) -> None:
        """`sources` are (number among what is saved, offset in bytes), `places` numbers or -1."""
        self.turn, self._sources = turn, sources
        self._results, self._places = results, places
        kinds = {kind for *_, kind in results}
        self._whole = (*kinds,) if len(results) > MANY and len(kinds) == 1 else ()
        """The type of all results, where they share one allocation."""
        if self._whole:
            size = self._whole[0].itemsize
            *starts, self._bytes = _offsets(results)
            self._starts = [start // size for start in starts]

    def run(self, dys: Sequence[Tensor], saved: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients in the order of the inputs."""
        turn = self.turn
        alive, places = gpu.addresses([*dys, *[saved[i] for i, _ in self._sources]])
        for i, (_, offset) in enumerate(self._sources, len(dys)):
            places[i] += offset
        if self._whole:
            (kind,) = self._whole
            block = turn.new((self._bytes // kind.itemsize,), (1,), kind)
            grads = [
                gpu.part(block, shape, strides, start)
                for (shape, strides, _), start in zip(self._results, self._starts, strict=True)
            ]
        else:
            grads = [*starmap(turn.new, self._results)]
        turn.enqueue([*places, *map(ADDRESS, grads)])
        del alive  # copies of tensors with gaps, until the launches are in the stream
        return [None if i < 0 else grads[i] for i in self._places]


def _offsets(results: Sequence[gpu.Result]) -> list[int]:
    """Where results begin that share an allocation, and its bytes."""
    sizes = [-(-prod(s) * d.itemsize // _APART) * _APART for s, _, d in results]
    return [*accumulate(sizes, initial=0)]


class CompiledFunction(torch.autograd.Function):
    """A node of autograd for a call. `apply` takes the Ready, and tensors or None."""

    @staticmethod
    def forward(ctx: FunctionCtx, ready: CompiledForward, *args: Tensor | None) -> Any:
        ctx.ready = ready
        tensors = args
        if len(args) != ready.tensors:
            tensors = tuple([x for x in args if x is not None])
            ctx.present = [x is not None for x in args]
        results, block = ready.run(tensors)
        if len(results) == 1:
            y = results[0]
            ctx.save_for_backward(*tensors, y if ready.keeps[0] else None, block)
            return y
        read = [y if keeps else None for y, keeps in zip(results, ready.keeps, strict=True)]
        ctx.save_for_backward(*tensors, *read, block)
        rest = [y for y, is_float in zip(results, ready.floats, strict=True) if not is_float]
        ctx.mark_non_differentiable(*rest)
        return tuple(results)

    @staticmethod
    def backward(ctx: FunctionCtx, *dys: Tensor) -> tuple[Tensor | None, ...]:
        ready, needs = ctx.ready, ctx.needs_input_grad[1:]
        present = getattr(ctx, "present", None)  # which arguments are tensors, where some are None
        if present is not None:
            needs = tuple([n for n, there in zip(needs, present, strict=True) if there])
        saved = ctx.saved_tensors  # which may be asked for once
        float_dys = [dy for dy, is_float in zip(dys, ready.floats, strict=True) if is_float]
        grads = None if torch.is_grad_enabled() else ready.gradients(needs, float_dys, saved)
        if grads is None:
            grads = ready.again(ready.graph, needs, float_dys, saved[: ready.tensors])
        if present is None:
            return None, *grads
        results = iter(grads)
        return None, *[next(results) if there else None for there in present]


apply = super(torch.autograd.Function, CompiledFunction).apply
"""`CompiledFunction.apply` without what it does for the transforms of torch.func, unused here."""

"""Graphs on torch tensors in GPU memory: our kernels in torch's current stream.

Inputs are read and outputs written where torch has them; outputs and temporaries come from torch's
allocator. So a run waits for nothing, copies nothing, and may be captured into a CUDA graph.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import reduce
from operator import attrgetter, or_
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnx_fuse.errors import UsageError
from onnx_fuse.program.call import dense_strides, dtype_of
from onnx_fuse.runtime import device, direct
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.specialize import KEEPERS
from onnx_fuse.torch.host import DTYPES

SHAPES = 256
"""Sets of shapes and streams whose launches are kept; the least recently used go first."""
SMALL = 64 << 10
"""Bytes of an arena that a stream keeps for its next run: torch's allocator takes its time."""
_ALIGNED = 16
DENSE, ADDRESS = torch.Tensor.is_contiguous, torch.Tensor.data_ptr
KIND = attrgetter("shape", "dtype", "device")
"""What a layout depends on, of each of its tensors."""
_NAMES = {kind: dtype.numpy().name for dtype, kind in DTYPES.items()}
_TORCH = {name: kind for kind, name in _NAMES.items()}


Sizes = tuple[Any, ...]
"""The precision of products and the shapes of the inputs."""


Result = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and type of an output."""


def allocator(where: torch.device) -> Callable[..., torch.Tensor]:
    """What makes a tensor of (shape, strides, type) on the current GPU, which is `where`."""
    quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # as inductor has it
    if quick is not None and where.type == "cuda":
        return quick

    def new(shape: object, strides: object, kind: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=kind, device=where)

    return new


part: Callable[..., torch.Tensor] = getattr(
    torch._C._dynamo.guards, "_reinterpret_tensor", torch.as_strided
)
"""A tensor of (other tensor, shape, strides, first element) in its memory."""


class TensorProgram(direct.BoundProgram):
    """A graph's launches for tensors of one kind in one of torch's streams."""

    def __init__(self, layout: direct.DirectLayout, handle: int, where: torch.device) -> None:
        super().__init__(layout, device.Stream(handle))
        self.where = where
        self.results: list[Result] = [
            (shape, dense_strides(shape), _TORCH[kind]) for shape, kind in layout.results
        ]
        self.new = allocator(where)
        """Makes a tensor of a Result."""
        self.used = 0
        """When the runner last found it, which counts its calls."""
        self._bytes = layout.plan.arena
        self._small: torch.Tensor | None = None

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for tensors of this kind."""
        tensors, places = addresses(tensors)
        results = [self.new(*result) for result in self.results]
        self.enqueue(places + [y.data_ptr() for y in results])
        return results

    def enqueue(self, ends: list[int]) -> None:
        """Enqueue all launches, with the addresses of the graph's inputs and then its outputs."""
        capture = capturing()
        if not self._bytes:
            self.launch([0, *ends], keep=capture)
            return
        arena = self._small  # alive until the launches are in the stream
        if arena is None or capture:
            arena = self.new((self._bytes,), (1,), torch.uint8)
            if self._bytes <= SMALL and not capture:
                self._small = arena
        self.launch([arena.data_ptr(), *ends], keep=capture)


def addresses(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], list[int]]:
    """The tensors with their addresses; those with gaps or at odd addresses are copied."""
    if not all(map(DENSE, tensors)):
        tensors = [t.contiguous() for t in tensors]
    return aligned(tensors)


def aligned(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], list[int]]:
    """The tensors, which have no gaps, with their addresses; those at odd addresses are copied."""
    places = [*map(ADDRESS, tensors)]
    if reduce(or_, places, 0) % _ALIGNED:
        tensors = [t.clone() if t.data_ptr() % _ALIGNED else t for t in tensors]
        places = [*map(ADDRESS, tensors)]
    return tensors, places


class GpuRunner:
    """A graph on one GPU: lowered once, with launches for each set of shapes and each stream.

    Float32 products are IEEE's under torch's precision "highest", and tf32's otherwise.
    """

    def __init__(self, model: ir.Model, device_id: int) -> None:
        self.device_id, self._model = device_id, model
        self._executables: dict[str, Executable] = {}
        self._layouts: dict[Sizes, direct.DirectLayout | None] = {}
        self._turns: dict[tuple[Any, ...], TensorProgram] = {}
        self._calls = itertools.count(1)
        self._lock = threading.Lock()
        KEEPERS.add(self)

    def forget(self) -> None:
        """Lower the graph anew for each set of shapes that comes."""
        with self._lock:
            self._turns.clear()
            self._layouts.clear()

    def run(self, graph: object, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of the Graph in torch's current stream.

        Raises UsageError while a CUDA graph is captured, for shapes that have not run before.
        """
        if current_device() != self.device_id:
            with torch.cuda.device(self.device_id):
                return self.run(graph, tensors)
        turn = self.turn(graph, tensors)
        return self._through_binding(graph, tensors) if turn is None else turn.run(tensors)

    def turn(self, graph: object, tensors: Sequence[torch.Tensor]) -> TensorProgram | None:
        """What runs tensors like these in torch's current stream, on torch's current device.

        None for a graph that needs the host between its kernels, or random numbers.
        Raises as `run` does.
        """
        device.start(self.device_id)
        handle = current_stream(self.device_id)
        sizes = (self._float32_math(graph), *map(KIND, tensors))
        turn = self._turns.get((handle, sizes))
        if turn is None:
            with self._lock:
                turn = self._made(graph, tensors, handle, sizes)
        if turn is not None:
            turn.used = next(self._calls)
        return turn

    @staticmethod
    def _float32_math(graph: Any) -> str:
        return "tf32" if graph.has_float32 and precision() != "highest" else "ieee"

    def _made(
        self, graph: object, tensors: Sequence[torch.Tensor], handle: int, sizes: Sizes
    ) -> TensorProgram | None:
        """A new turn, in the place of the least recently used one if there are too many."""
        program = self._turns.get((handle, sizes))
        if program is not None:
            return program
        if sizes not in self._layouts:
            self._layouts[sizes] = self._layout(graph, tensors)
        layout = self._layouts[sizes]
        if layout is None:
            return None
        while len(self._turns) >= SHAPES:
            old = min(self._turns, key=lambda key: self._turns[key].used)
            del self._turns[old]
            if all(key[1] != old[1] for key in self._turns):
                self._layouts.pop(old[1], None)
        program = self._turns[handle, sizes] = TensorProgram(layout, handle, tensors[0].device)
        return program

    def _layout(self, graph: Any, tensors: Sequence[torch.Tensor]) -> direct.DirectLayout | None:
        """What all streams share for these shapes; None for what needs the host between kernels."""
        graph.symbols(tensors)  # which raises for what does not fit
        if capturing():
            raise UsageError(
                "a CUDA graph is being captured, and these shapes have not run before: run once "
                "before the capture"
            )
        executable = self._executable(self._float32_math(graph))
        names = [end.name for end in graph.inputs]
        ends = zip(names, tensors, strict=True)
        shapes = {name: (tuple(t.shape), _NAMES[t.dtype]) for name, t in ends}
        return direct.layout(executable, names, shapes)

    def _executable(self, math: str) -> Executable:
        if math not in self._executables:
            model = self._model.clone()
            self._executables[math] = Executable(model, math=math, device_id=self.device_id)
        return self._executables[math]

    def _through_binding(self, graph: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run a graph that needs the host between its kernels."""
        if capturing():
            raise UsageError("this graph has operators without kernels: it cannot be captured")
        executable, handle = (
            self._executable(self._float32_math(graph)),
            current_stream(self.device_id),
        )
        binding = executable.io_binding()
        for end, t in zip(graph.inputs, tensors, strict=True):
            kind, shape = dtype_of(_NAMES[t.dtype]), tuple(t.shape)
            binding.bind_input(end.name, "cuda", self.device_id, kind, shape, t.data_ptr())
        for end in graph.outputs:
            binding.bind_output(end.name, "cuda")
        executable.run_with_iobinding(binding, stream=handle or device.LEGACY, synchronize=False)
        return [
            torch.from_numpy(y).to(tensors[0].device)
            if isinstance(y, np.ndarray)
            else torch.from_dlpack(y)
            for y in binding.get_outputs()
        ]


def current_device() -> int:
    """The number of torch's current GPU; a tensor is in its memory, so that torch has begun."""
    index: int = torch._C._cuda_getDevice()
    return index


def current_stream(device_id: int) -> int:
    """The handle of torch's current stream."""
    stream: int = torch._C._cuda_getCurrentRawStream(device_id)
    return stream


def capturing() -> bool:
    """Whether torch's current stream is captured into a CUDA graph."""
    active: bool = torch._C._cuda_isCurrentStreamCapturing()
    return active


def state() -> tuple[int, int, str]:
    """What decides about a run besides its tensors: torch's device, its stream, its precision."""
    torch_c = torch._C  # each function between would cost as much as what it asks
    number = torch_c._cuda_getDevice()
    stream = torch_c._cuda_getCurrentRawStream(number)
    return number, stream, torch_c._get_float32_matmul_precision()


def precision() -> str:
    """Torch's precision of float32 products."""
    name: str = torch._C._get_float32_matmul_precision()
    return name

"""Graphs on torch tensors in GPU memory: our kernels in torch's current stream.

Inputs are read and outputs written where torch has them; outputs and temporaries come from torch's
allocator. So a run waits for nothing, copies nothing, and may be captured into a CUDA graph.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.launch import bind
from onnx_fuse.errors import UsageError
from onnx_fuse.program.call import NeedsValues, Tensor
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.runtime import device
from onnx_fuse.runtime.changes import operands, workspace_key
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.launches import Launches
from onnx_fuse.runtime.plan import PlannedProgram
from onnx_fuse.runtime.schedule import segments
from onnx_fuse.runtime.tensor import dtype_of

SHAPES = 256
"""Sets of shapes and streams whose launches are kept; the least recently used go first."""
PLACES = 256
"""Sets of addresses of one shape in one stream that have launches of their own: the layers of a
model have a few each, which torch's allocator gives again step after step."""
SMALL = 64 << 10
"""Bytes of an arena that a stream keeps for its next run: torch's allocator takes its time."""
_ALIGNED = 16
KIND = attrgetter("shape", "dtype", "device")
"""What a layout depends on, of each of its tensors."""
_NAMES = {
    torch.float32: "float32", torch.float64: "float64", torch.float16: "float16",
    torch.bfloat16: "bfloat16", torch.int64: "int64", torch.int32: "int32", torch.int16: "int16",
    torch.int8: "int8", torch.uint8: "uint8", torch.bool: "bool",
}  # fmt: skip
_TORCH = {name: kind for kind, name in _NAMES.items()}


Sizes = tuple[Any, ...]
"""The precision of products and the shapes of the inputs."""


class Layout:
    """A Program of one shape, with the memory that all its launches share."""

    def __init__(
        self,
        executable: Executable,
        made: PlannedProgram,
        names: Sequence[str],
        where: torch.device,
    ) -> None:
        program = self.program = made.program
        self.where = where
        self.plan, self.hw = made.plan, executable.hw
        calls = (*program.setup, *program.calls)
        nvrtc.compile_all([x for c in calls for x in c.launches], self.hw.arch)
        self.fixed = executable.weights.of(program, executable.shared.weight)
        self._place_constants(executable)
        inputs = [(n, t) for n, t in program.inputs if t.buffer not in self.fixed]
        self.fed = [names.index(n) for n, _ in inputs]
        """The inputs that are read, by their numbers."""
        self.results: list[tuple[tuple[int, ...], torch.dtype]] = []
        """Shape and type of each output."""
        self.placed: list[int] = []
        """The outputs that kernels write, by their numbers."""
        self.copied: list[tuple[int, torch.Tensor | Tensor]] = []
        """The other outputs: each with the tensor that it is a copy of."""
        written = {b.id for b in program.buffers if b.kind == "output"}
        buffers: list[int] = []
        for i, (_, value) in enumerate(program.outputs):
            assert value is not None, "a program without stages knows its outputs"
            if isinstance(value, Tensor):
                self.results.append((value.shape, _TORCH[value.dtype]))
                if value.buffer in written and value.buffer not in buffers:
                    self.placed.append(i)
                    buffers.append(value.buffer)
                else:
                    self.copied.append((i, value))
            else:
                known = torch.from_numpy(np.array(value)).to(where)
                self.results.append((tuple(known.shape), known.dtype))
                self.copied.append((i, known))
        self.movable = [*(t.buffer for _, t in inputs), *buffers]
        """The buffers whose places a run brings: those of `fed`, then those of `placed`."""

    def nbytes(self, i: int) -> int:
        """The bytes of an output."""
        shape, kind = self.results[i]
        return prod(shape) * int(kind.itemsize)

    def _place_constants(self, executable: Executable) -> None:
        """Upload what lowering knew, and run once what depends on that alone."""
        program = self.program
        constants = [b for b in program.buffers if b.kind == "constant"]
        known = {b.id: program.constants[b.id] for b in constants if b.id in program.constants}
        placed = executable.shared.constants.place(known)
        self._held: list[Any] = [placed]
        self.fixed |= {b.id: 0 for b in constants}  # those of no bytes have no place
        self.fixed |= {b: constant.address for b, constant in placed.items()}
        for b in constants:
            if b.id not in known:
                memory = executable.shared.pool.allocate(b.nbytes, b.name or "a constant")
                self._held.append(memory)
                self.fixed[b.id] = memory.address
        for call in program.setup:
            found = operands(self.fixed, -1, call)
            for launch in call.launches:
                bind(launch, found, self.hw).enqueue(executable.stream.handle)
        executable.stream.wait("preparing a graph")  # from now on every stream may read it


class Steps:
    """The launches of a layout for one set of addresses: the arena's, then those of `movable`."""

    def __init__(self, layout: Layout, places: Sequence[int]) -> None:
        self._layout, self._places = layout, places
        self._address = dict(layout.fixed)
        self._stand(places)
        plan, hw = layout.plan, layout.hw
        self._parts = [Launches(s, plan.order, hw, self._address) for s in segments(layout.program)]

    def _stand(self, places: Sequence[int]) -> None:
        plan, arena = self._layout.plan, places[0]
        self._address.update(zip(self._layout.movable, places[1:], strict=True))
        self._address |= {b: arena + at for b, at in plan.offsets.items()}
        self._address |= {workspace_key(i): arena + at for i, at in plan.workspaces.items()}

    def address(self, tensor: Tensor) -> int:
        """Where a tensor of the program stands."""
        return self._address[tensor.buffer] + tensor.offset * ITEMSIZE[tensor.dtype]

    def move(self, places: Sequence[int]) -> None:
        """Take other addresses."""
        old, self._places = self._places, places
        pairs = zip(self._layout.movable, old[1:], places[1:], strict=True)
        moved = [b for b, a, c in pairs if a != c]
        self._stand(places)
        if old[0] != places[0]:
            plan = self._layout.plan
            moved += plan.offsets
            moved += [
                t.buffer for i in plan.workspaces for _, t in self._layout.program.calls[i].writes
            ]
        for part in self._parts:
            part.move(moved)

    def launch(self, stream: device.Stream) -> None:
        """Enqueue all."""
        for part in self._parts:
            part.launch(stream)


class Turn:
    """A layout's launches in one stream, by addresses.

    Streams share none: launches may count in memory of their own, which needs an order.
    """

    def __init__(self, layout: Layout, handle: int) -> None:
        self.layout = layout
        self.used = 0
        """When the runner last found it, which counts its calls."""
        self._stream = device.Stream(handle)
        self._steps: OrderedDict[tuple[int, ...], Steps] = OrderedDict()
        self._captured: list[Steps] = []  # a graph that nobody here knows may launch them again
        self._latest: tuple[tuple[int, ...], Steps | None] = ((), None)
        self._small: torch.Tensor | None = None
        self._lock = threading.Lock()

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs for tensors of this layout's kinds."""
        layout = self.layout
        tensors, places = addresses(tensors)
        found = [torch.empty(s, dtype=d, device=layout.where) for s, d in layout.results]
        self.launch(places, [y.data_ptr() for y in found])
        return found

    def launch(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Enqueue all launches, with the addresses of the graph's inputs and outputs."""
        layout = self.layout
        device.start(layout.where.index)  # of a thread that torch has given memory alone
        arena, capture = None, capturing()
        if layout.plan.arena:  # alive until the launches are in the stream
            arena = self._small
            if arena is None or capture:
                size, where = layout.plan.arena, layout.where
                arena = torch.empty(size, dtype=torch.uint8, device=where)
                if size <= SMALL and not capture:
                    self._small = arena
        places = (
            0 if arena is None else arena.data_ptr(),
            *[inputs[i] for i in layout.fed],
            *[outputs[i] for i in layout.placed],
        )
        with self._lock:
            before, steps = self._latest
            if capture:
                steps = Steps(layout, places)
                self._captured.append(steps)
            elif steps is None or before != places:
                steps = self._standing(places)
                self._latest = places, steps
            steps.launch(self._stream)
            for i, source in layout.copied:
                at = source if isinstance(source, torch.Tensor) else steps.address(source)
                if isinstance(at, torch.Tensor):
                    at = at.data_ptr()
                if nbytes := layout.nbytes(i):
                    self._stream.move(outputs[i], at, nbytes)

    def _standing(self, places: tuple[int, ...]) -> Steps:
        """The launches for these addresses of the arena and of `Layout.movable`."""
        found = self._steps.get(places)
        if found is not None:
            self._steps.move_to_end(places)
            return found
        if len(self._steps) < PLACES:
            found = Steps(self.layout, places)
        else:
            _, found = self._steps.popitem(last=False)
            found.move(places)
        self._steps[places] = found
        return found


def addresses(tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], list[int]]:
    """The tensors with their addresses; those with gaps or at odd addresses are copied."""
    tensors = [t if t.is_contiguous() else t.contiguous() for t in tensors]
    places = [t.data_ptr() for t in tensors]
    bits = 0
    for place in places:
        bits |= place
    if bits % _ALIGNED:
        tensors = [t.clone() if t.data_ptr() % _ALIGNED else t for t in tensors]
        places = [t.data_ptr() for t in tensors]
    return tensors, places


class GpuRunner:
    """A graph on one GPU: lowered once, with launches for each set of shapes and each stream.

    Float32 products are IEEE's under torch's precision "highest", and tf32's otherwise.
    """

    def __init__(self, model: ir.Model, device_id: int) -> None:
        self.device_id, self._model = device_id, model
        self._executables: dict[str, Executable] = {}
        self._layouts: dict[Sizes, Layout | None] = {}
        self._turns: dict[tuple[Any, ...], Turn] = {}
        self._calls = itertools.count(1)
        self._lock = threading.Lock()

    def run(self, graph: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of the Graph in torch's current stream.

        Raises UsageError while a CUDA graph is captured, for shapes that have not run before.
        """
        if current_device() != self.device_id:
            with torch.cuda.device(self.device_id):
                return self.run(graph, tensors)
        turn = self.turn(graph, tensors)
        return self._through_binding(graph, tensors) if turn is None else turn.run(tensors)

    def turn(self, graph: Any, tensors: Sequence[torch.Tensor]) -> Turn | None:
        """What runs tensors like these in torch's current stream, on torch's current device.

        None for a graph that needs the host between its kernels. Raises as `run` does.
        """
        device.start(self.device_id)
        handle = current_stream(self.device_id)
        sizes = (self._math(graph), *map(KIND, tensors))
        turn = self._turns.get((handle, sizes))
        if turn is None:
            with self._lock:
                turn = self._made(graph, tensors, handle, sizes)
        if turn is not None:
            turn.used = next(self._calls)
        return turn

    @staticmethod
    def _math(graph: Any) -> str:
        """What products of float32 are computed in."""
        return "tf32" if graph.has_float32 and precision() != "highest" else "ieee"

    def _made(
        self, graph: Any, tensors: Sequence[torch.Tensor], handle: int, sizes: Sizes
    ) -> Turn | None:
        """A new turn; the least recently used one goes where there are too many."""
        found = self._turns.get((handle, sizes))
        if found is not None:
            return found
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
        found = self._turns[handle, sizes] = Turn(layout, handle)
        return found

    def _layout(self, graph: Any, tensors: Sequence[torch.Tensor]) -> Layout | None:
        """What all streams share for these shapes; None for what needs the host between kernels."""
        graph.symbols(tensors)  # which raises for what does not fit
        if capturing():
            raise UsageError(
                "a CUDA graph is being captured, and these shapes have not run before: run once "
                "before the capture"
            )
        executable = self._executable(self._math(graph))
        names = [end.name for end in graph.inputs]
        ends = zip(names, tensors, strict=True)
        shapes = {name: (tuple(t.shape), _NAMES[t.dtype]) for name, t in ends}
        try:
            made = executable.specializer.of(shapes)
        except NeedsValues:  # of inputs that decide about shapes
            return None
        if made.program.stages or any(call.host for call in made.program.calls):
            return None
        return Layout(executable, made, names, tensors[0].device)

    def _executable(self, math: str) -> Executable:
        if math not in self._executables:
            model = self._model.clone()
            self._executables[math] = Executable(model, math=math, device_id=self.device_id)
        return self._executables[math]

    def _through_binding(self, graph: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run a graph that needs the host between its kernels."""
        if capturing():
            raise UsageError("this graph has operators without kernels: it cannot be captured")
        executable, handle = self._executable(self._math(graph)), current_stream(self.device_id)
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
    found: int = torch._C._cuda_getDevice()
    return found


def current_stream(device_id: int) -> int:
    """The handle of torch's current stream."""
    found: int = torch._C._cuda_getCurrentRawStream(device_id)
    return found


def capturing() -> bool:
    """Whether torch's current stream is captured into a CUDA graph."""
    found: bool = torch._C._cuda_isCurrentStreamCapturing()
    return found


def state(device_id: int) -> tuple[int, str]:
    """What decides about a run besides its tensors: torch's stream and precision."""
    return current_stream(device_id), precision()


def precision() -> str:
    """Torch's precision of float32 products."""
    found: str = torch._C._get_float32_matmul_precision()
    return found

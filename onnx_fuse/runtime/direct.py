"""Programs of one shape launched where their callers have the tensors: no binding, no graph.

A `BoundProgram` takes the addresses of inputs, outputs and temporaries, and enqueues the launches
for them. Whoever owns the memory allocates it: torch's allocator, or the pool of eager tensors.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import prod
from typing import Any
from weakref import WeakSet

import numpy as np

from onnx_fuse import config
from onnx_fuse.cuda import nvrtc
from onnx_fuse.errors import DeviceError
from onnx_fuse.program.call import NeedsValues, Program, Shapes, Tensor
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.runtime import device
from onnx_fuse.runtime.arg_updates import workspace_key
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.launches import Launches
from onnx_fuse.runtime.plan import PlannedProgram
from onnx_fuse.runtime.schedule import segments
from onnx_fuse.runtime.weights import RANDOM

PLACES = 256
"""Sets of addresses of one shape in one stream that have launches of their own: the layers of a
model have a few each, which an allocator gives again step after step."""
RUNS = 2
"""Runs at the same addresses after which many launches become one of a CUDA graph."""
MANY = 6
"""Launches that are many: launching a graph takes the host about as long as four of them."""
GRAPHS = 256
"""CUDA graphs at a time, which take the GPU's memory: what comes later is enqueued one by one."""
FEW = 8
"""The share of the launches, as 1 / FEW, that may take other addresses in the graph they are in."""


def is_direct(program: Program) -> bool:
    """Whether a program runs by launches alone: no host between them, no random numbers.

    Those are drawn anew for each run, and a Turn has nobody to write them where kernels read.
    """
    return not (
        program.stages
        or any(call.host for call in program.calls)
        or any(buffer.kind == RANDOM for buffer in program.buffers)
    )


def layout(executable: Executable, names: Sequence[str], shapes: Shapes) -> Layout | None:
    """The Layout for inputs of these shapes; None for what needs the host between kernels."""
    try:
        ready = executable.specializer.of(shapes)
    except NeedsValues:  # of inputs that decide about shapes
        return None
    return Layout(executable, ready, names) if is_direct(ready.program) else None


class Layout:
    """A Program of one shape, with the memory that all its launches share.

    `names` are those of the graph's inputs, in the order in which runs bring them. Outputs that
    replace an input (`Executable.state`) are written where that input stands.
    """

    def __init__(self, executable: Executable, ready: PlannedProgram, names: Sequence[str]) -> None:
        program = self.program = ready.program
        self.plan, self.hw, self.device_id = ready.plan, executable.hw, executable.device_id
        calls = (*program.setup, *program.calls)
        nvrtc.compile_all([x for c in calls for x in c.launches], self.hw.arch)
        owner = executable.shared
        self.fixed = executable.weights.of(program, owner.weight)
        constants, *held = owner.place_constants(program, {})
        self._held: list[Any] = held
        self.fixed |= constants
        owner.set_up(program.setup, self.fixed)
        executable.stream.wait("preparing a graph")  # from now on every stream may read it
        inputs = [(n, t) for n, t in program.inputs if t.buffer not in self.fixed]
        self.moving = [0, *[1 + names.index(n) for n, _ in inputs]]
        """Positions of the arena and of `movable` among the ends of `BoundProgram.launch`."""
        first = 1 + len(names)
        self.results: list[tuple[tuple[int, ...], str]] = []
        """Shape and dtype of each output."""
        self.copied: list[tuple[int, int | Tensor, int]] = []
        """Outputs that no kernel writes: (output index, source address or tensor, bytes)."""
        self.stays: dict[int, int] = {}
        """Outputs that replace an input: the number of each, and of its input."""
        written = {b.id for b in program.buffers if b.kind == "output"}
        buffers: list[int] = []
        for i, (name, value) in enumerate(program.outputs):
            assert value is not None, "a program without stages knows its outputs"
            if name in executable.state:
                self.stays[i] = names.index(executable.state[name])
            source: int | Tensor | None = None
            if not isinstance(value, Tensor):
                source = self._upload(executable, np.ascontiguousarray(value))
                value = np.asarray(value)
                kind = value.dtype.name
            else:
                kind = value.dtype
                if value.buffer not in written or value.buffer in buffers:
                    source = value
            self.results.append((tuple(value.shape), kind))
            if i in self.stays:
                continue
            if source is not None:
                self.copied.append((first + i, source, prod(value.shape) * ITEMSIZE[kind]))
            else:
                assert isinstance(value, Tensor)
                self.moving.append(first + i)
                buffers.append(value.buffer)
        self.movable = [*(t.buffer for _, t in inputs), *buffers]
        """The buffers whose places a run brings: inputs that are read, outputs that are written."""
        self.moves_all = self.moving == [*range(first + len(program.outputs))]
        self.segments = segments(program)
        self.count = sum(len(call.launches) for call in program.calls)
        """The number of launches."""

    def _upload(self, executable: Executable, array: np.ndarray[Any, Any]) -> int:
        """The address of a copy of an output that lowering knew."""
        memory = executable.shared.pool.allocate(array.nbytes, "an output")
        self._held.append(memory)
        if array.nbytes:
            executable.stream.upload(memory.address, array.ctypes.data, array.nbytes)
            executable.stream.wait("a copy to the GPU")
        return memory.address


class Steps:
    """The launches of a layout for one set of addresses: the arena's, then those of `movable`."""

    def __init__(self, layout: Layout, places: Sequence[int], like: Steps | None = None) -> None:
        """`like` are launches of the layout for other addresses."""
        self._layout, self._places = layout, places
        self._address = dict(layout.fixed)
        self._stand(places)
        self._runs = 0
        self._only: Callable[[int], None] | None = None
        plan, hw = layout.plan, layout.hw
        parts: Sequence[Launches | None] = (
            [None] * len(layout.segments) if like is None else like._parts
        )
        self._parts: list[Launches] = [
            Launches(segment, plan.order, hw, self._address, part)
            for segment, part in zip(layout.segments, parts, strict=True)
        ]
        self._only = self._parts[0].only if len(self._parts) == 1 else None

    def _stand(self, places: Sequence[int]) -> None:
        plan, arena = self._layout.plan, places[0]
        self._address.update(zip(self._layout.movable, places[1:], strict=True))
        self._address |= {b: arena + at for b, at in plan.offsets.items()}
        self._address |= {workspace_key(i): arena + at for i, at in plan.workspaces.items()}

    def address(self, tensor: Tensor) -> int:
        """Where a tensor of the program stands."""
        return self._address[tensor.buffer] + tensor.offset * ITEMSIZE[tensor.dtype]

    def moved(self, places: Sequence[int]) -> list[int]:
        """The buffers and workspaces that would stand elsewhere with these addresses."""
        layout, old = self._layout, self._places
        pairs = zip(layout.movable, old[1:], places[1:], strict=True)
        buffers = [b for b, a, c in pairs if a != c]
        if old[0] != places[0]:
            buffers += layout.plan.offsets
            calls = layout.program.calls
            buffers += [t.buffer for i in layout.plan.workspaces for _, t in calls[i].writes]
        return buffers

    def is_near(self, moved: Sequence[int]) -> bool:
        """Whether few launches use what moves, so that the others stay as they are."""
        return FEW * sum(len(part.users(moved)) for part in self._parts) <= self._layout.count

    def move(self, places: Sequence[int], moved: Sequence[int] | None = None) -> None:
        """Take other addresses; with `moved`, what is elsewhere then, a graph follows."""
        self._places = places
        self._stand(places)
        for part in self._parts:
            if moved is None:
                part.move_all()
            else:
                part.move(moved)
        self._only = self._parts[0].only if len(self._parts) == 1 else None
        if moved is None:
            self._runs = 0
            _CAPTURED.discard(self)

    def launch(self, stream: device.Stream, *, repeats: bool = True) -> None:
        """Enqueue all: one by one, and as a CUDA graph once they have come often (`repeats`)."""
        if self._only is not None:
            try:
                self._only(stream.handle)
            except DeviceError as error:
                raise self._parts[0].fault(0, error) from error
            return
        if repeats and self._runs < RUNS:
            self._runs += 1
            many = self._layout.count >= MANY and len(_CAPTURED) < GRAPHS
            if self._runs == RUNS and many and config.GRAPH.value:
                _CAPTURED.add(self)
                for part in self._parts:
                    part.capture()
        for part in self._parts:
            part.launch(stream)


_CAPTURED: WeakSet[Steps] = WeakSet()


class BoundProgram:
    """A layout's launches in one stream, by addresses.

    Streams share none: launches may count in memory of their own, which needs an order.
    """

    def __init__(self, layout: Layout, stream: device.Stream) -> None:
        self.layout, self.stream = layout, stream
        self._steps: OrderedDict[Sequence[int], Steps] = OrderedDict()
        self._latest: tuple[Sequence[int], Steps | None] = ((), None)
        """The ends of the last call, and its launches."""
        self._kept: list[Steps] = []
        self._lock = threading.Lock()

    def launch(self, ends: Sequence[int], *, keep: bool = False) -> None:
        """Enqueue all launches. `ends` are the addresses of the arena and of the graph's ends.

        These are its inputs, and then its outputs. `keep`: a graph that nobody here knows may
        launch them again, from the same memory.
        """
        layout = self.layout
        device.start(layout.device_id)  # a thread that another library has begun has no context
        with self._lock:
            before, steps = self._latest
            if keep or steps is None or before != ends:
                places = ends if layout.moves_all else [ends[i] for i in layout.moving]
                if keep:
                    steps = Steps(layout, places)
                    self._kept.append(steps)
                else:
                    steps = self._standing(places)
                    self._latest = ends, steps
            steps.launch(self.stream, repeats=not keep)
            for i, source, nbytes in layout.copied:
                if nbytes:
                    at = source if isinstance(source, int) else steps.address(source)
                    self.stream.move(ends[i], at, nbytes)

    def _standing(self, places: Sequence[int]) -> Steps:
        """The launches for these addresses of the arena and of `Layout.movable`."""
        key = tuple(places)
        steps = self._steps.get(key)
        if steps is not None:
            self._steps.move_to_end(key)
            return steps
        if self._steps and self.layout.count >= FEW:
            latest = next(reversed(self._steps))
            moved = self._steps[latest].moved(places)
            if self._steps[latest].is_near(moved):
                steps = self._steps.pop(latest)
                steps.move(places, moved)
        if steps is None and len(self._steps) == PLACES:
            _, steps = self._steps.popitem(last=False)
            steps.move(places)
        if steps is None:
            steps = Steps(self.layout, places, next(iter(self._steps.values()), None))
        self._steps[key] = steps
        return steps

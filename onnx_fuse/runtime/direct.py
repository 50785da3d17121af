"""Programs of one shape launched where their callers have the tensors: no binding, no graph.

A `BoundProgram` takes the addresses of inputs, outputs and temporaries, and enqueues the launches
for them. Whoever owns the memory allocates it: torch's allocator, or the pool of eager tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any
from weakref import WeakSet

from onnx_fuse import config
from onnx_fuse.program.call import NeedsValues, Program, Shapes, Tensor
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.runtime import device
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.launcher import ARENA, Launcher, LaunchVariant
from onnx_fuse.runtime.plan import PlannedProgram
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


def is_direct(program: Program) -> bool:
    """Whether a program runs by launches alone: no host between them, no random numbers.

    Those are drawn anew for each run, and a Turn has nobody to write them where kernels read.
    """
    return not (
        program.stages
        or any(call.host for call in program.calls)
        or any(buffer.kind == RANDOM for buffer in program.buffers)
    )


def layout(executable: Executable, names: Sequence[str], shapes: Shapes) -> DirectLayout | None:
    """The layout for inputs of these shapes; None for what needs the host between kernels."""
    try:
        ready = executable.specializer.of(shapes)
    except NeedsValues:  # of inputs that decide about shapes
        return None
    return DirectLayout(executable, ready, names) if is_direct(ready.program) else None


class DirectLayout:
    """A Program of one shape, with the memory that all its launches share.

    `names` are those of the graph's inputs, in the order in which runs bring them. Outputs that
    replace an input (`Executable.state`) are written where that input stands.
    """

    def __init__(self, executable: Executable, ready: PlannedProgram, names: Sequence[str]) -> None:
        self.ready, program = ready, ready.program
        self.plan, self.hw, self.device_id = ready.plan, executable.hw, executable.device_id
        owner = executable.shared
        self.fixed, *held = owner.prepared(program, {})
        known = {
            i: value
            for i, (_, value) in enumerate(program.outputs)
            if not isinstance(value, Tensor | None)
        }
        constants = owner.constants.place(known)
        self._held: list[Any] = [*held, constants]
        owner.set_up(program.setup, self.fixed)
        executable.stream.wait("preparing a graph")  # from now on every stream may read it
        inputs = [(n, t) for n, t in program.inputs if t.buffer not in self.fixed]
        self.moving = [0, *[1 + names.index(n) for n, _ in inputs]]
        """Positions of `movable` among the ends of `BoundProgram.launch`."""
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
                source = constants[i].address if value.nbytes else 0
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
        self.movable = [ARENA, *(t.buffer for _, t in inputs), *buffers]
        """The buffers whose places a run brings: inputs that are read, outputs that are written."""
        self.moves_all = self.moving == [*range(first + len(program.outputs))]
        self.count = sum(len(call.launches) for call in program.calls)
        """The number of launches."""


class BoundProgram:
    """A layout's launches in one stream, by addresses.

    Streams share none: launches may count in memory of their own, which needs an order.
    """

    def __init__(self, layout: DirectLayout, stream: device.Stream) -> None:
        self.layout, self.stream = layout, stream
        self.launcher = Launcher(
            layout.ready, layout.hw, dict(layout.fixed), layout.movable, most=PLACES
        )
        self._latest: Sequence[int] | None = None  # the ends of the last call
        self._kept: list[LaunchVariant] = []
        self._many = layout.count >= MANY
        self._lock = threading.Lock()

    def launch(self, ends: Sequence[int], *, keep: bool = False) -> None:
        """Enqueue all launches. `ends` are the addresses of the arena and of the graph's ends.

        These are its inputs, and then its outputs. `keep`: a graph that nobody here knows may
        launch them again, from the same memory.
        """
        layout, launcher = self.layout, self.launcher
        device.start(layout.device_id)  # a thread that another library has begun has no context
        with self._lock:
            variant = launcher.current if ends == self._latest and not keep else None
            if variant is None:
                where = tuple(ends if layout.moves_all else [ends[i] for i in layout.moving])
                if keep:
                    variant = launcher.apart(where)
                    self._kept.append(variant)
                else:
                    self._latest = None  # what fails half way is not launched again
                    variant = launcher.place(where)
                    self._latest = ends
            if self._many and not keep:
                self._repeat(variant)
            for part in variant.parts:
                part.launch(self.stream)
            for i, source, nbytes in layout.copied:
                if nbytes:
                    launcher.stand(variant.where)
                    at = source if isinstance(source, int) else launcher.find(source)
                    self.stream.move(ends[i], at, nbytes)

    def _repeat(self, variant: LaunchVariant) -> None:
        """Make the launches one graph once they have come often at the same addresses."""
        if variant.runs == RUNS or not config.GRAPH.value:
            return
        variant.runs += 1
        if variant.runs == RUNS and len(_CAPTURED) < GRAPHS:
            _CAPTURED.add(variant)
            variant.capture()


_CAPTURED: WeakSet[LaunchVariant] = WeakSet()

"""Slots of consecutive runs: each has its memory for inputs and outputs.

Several runs of a training step are pending at a time. Small inputs such as a learning rate and
labels, and small outputs such as a loss, are a few bytes: copying them blocks the stream for longer
than a kernel that accesses them over the bus. So each slot has page-locked memory, and launches
with its addresses. Large arrays such as images are copied to one of two buffers on the GPU, in
another stream, while the previous run reads the other buffer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse.errors import DeviceError
from onnx_fuse.program.call import Program, Tensor
from onnx_fuse.runtime import device
from onnx_fuse.runtime.plan import aligned
from onnx_fuse.runtime.schedule import collective
from onnx_fuse.runtime.staging import Pending
from onnx_fuse.runtime.tensor import DeviceTensor
from onnx_fuse.runtime.zero_copy import WRITTEN, ZeroCopy, over_bus

if TYPE_CHECKING:
    from onnx_fuse.runtime.resources import Resources

TURNS = 4
"""Runs of a shape that may be under way; one more waits for the oldest."""
LAUNCHES = 128
"""The most launches of a program whose copies of some bytes are worth a graph for each turn."""
AFTER = 8
"""Runs of a shape before it has turns, each of which takes a capture of its launches."""
LARGE = 256 << 10
"""Bytes of arrays from which on a copy beside the run before is worth the waits of two streams."""
Places = tuple[tuple[str, int, Tensor], ...]


class StagingBuffer:
    """A place for large inputs on the GPU, which one run reads at a time."""

    def __init__(self, memory: device.Memory) -> None:
        self.memory = memory
        self.filled, self.read = device.Event(), device.Event()


class RunSlot:
    """Memory for the small inputs and the outputs of one run, until its results are read."""

    def __init__(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], device_id: int
    ) -> None:
        self.memory = ZeroCopy(inputs, outputs)
        self.pending: Pending | None = None
        """The results of the run that has it."""
        self.inputs, self.outputs = self.memory.places(device_id)
        """Its tensors as the GPU sees them."""
        self.passed = device.Event()
        """The end of its run."""
        self.home: StagingBuffer | None = None
        """Where its large arrays go, if it is fed some."""
        self._device_id = device_id

    def __del__(self) -> None:
        # a run whose results were not read may still use the memory
        pending = getattr(self, "pending", None)
        if pending is None or pending.done or sys.is_finalizing():
            return
        with contextlib.suppress(DeviceError):  # a lost GPU writes nothing
            device.start(self._device_id)
            self.passed.wait("a run whose results nobody has read")

    def fill(self, feeds: Mapping[str, Any]) -> None:
        """Wait until its last run is over, and take over the small inputs."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None
        for name, array in self.memory.inputs.items():
            array[...] = feeds[name]

    def copying(self, copies: device.Stream) -> tuple[device.Stream, int] | None:
        """The stream and the address to copy large arrays to; None where it has no home."""
        if self.home is None:
            return None
        copies.wait_event(self.home.read)
        return copies, self.home.memory.address

    def copied(self, copies: device.Stream, stream: device.Stream) -> None:
        """Let the run, which `stream` gets next, come after these copies."""
        if self.home is not None:
            self.home.filled.record(copies)
            stream.wait_event(self.home.filled)

    def ended(self, stream: device.Stream) -> None:
        """Note the end of the run, which is the last that `stream` holds."""
        if self.home is not None:
            self.home.read.record(stream)
        if self.outputs:
            self.passed.record(stream)


class Turns:
    """The turns of a program with some outputs; `fed` are the inputs that are too large for them.

    A tensor on the GPU is read in place when it comes at the same address twice in a row: other
    addresses take the host longer than a copy takes the GPU.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        fed: Places,
        on: Resources,
    ) -> None:
        count = TURNS if inputs or outputs else 2
        self._turns = [RunSlot(inputs, outputs, on.device_id) for _ in range(count)]
        self.fed, self._on = fed, on
        self._homes: list[StagingBuffer] | None = None
        self._next = 0
        self._last: tuple[int, ...] = ()
        self.copies = on.copies
        """The stream of copies to homes."""

    def take(
        self, feeds: Mapping[str, Any], stream: device.Stream
    ) -> tuple[RunSlot, dict[str, DeviceTensor]] | None:
        """The next turn, filled, and where the inputs are that do not stand at home.

        None where a small input is on the GPU, or there is nothing to gain.
        """
        turn, fed = self._turns[self._next], self.fed
        if any(type(feeds[name]) is not np.ndarray for name in turn.inputs):
            return None
        resident = {n: feeds[n] for n, _, _ in fed if isinstance(feeds[n], DeviceTensor)}
        arrays = sum([t.nbytes for n, _, t in fed if n not in resident])
        addresses = tuple([tensor.address for tensor in resident.values()])
        again, self._last = addresses == self._last, addresses
        spared = sum([t.nbytes for t in resident.values()]) if again else 0
        if not turn.memory and max(arrays, spared) < LARGE:
            return None
        turn.fill(feeds)
        where = {**turn.inputs, **resident} if again else dict(turn.inputs)
        turn.home = self._home(stream) if arrays >= LARGE else None
        if turn.home is not None:
            base, device_id = turn.home.memory.address, self._on.device_id
            for name, at, t in fed:
                if name not in resident:
                    where[name] = DeviceTensor(base + at, t.shape, t.dtype, device_id, None)
        self._next = (self._next + 1) % len(self._turns)
        return turn, where

    def _home(self, stream: device.Stream) -> StagingBuffer | None:
        """The staging buffer of the next slot, another than the last one's; None without memory."""
        if self._homes is None:
            size = max(at + aligned(t.nbytes) for _, at, t in self.fed)
            what, self._homes = "inputs of the next run", []
            with contextlib.suppress(device.DeviceMemoryError):
                self._homes = [
                    StagingBuffer(self._on.pool.allocate(size, what, again=False)) for _ in range(2)
                ]
                stream.before(self.copies)
        return self._homes[self._next % 2] if self._homes else None

    @staticmethod
    def of(
        program: Program,
        inputs: Places,
        outputs: Sequence[tuple[str, int, Tensor]],
        on: Resources,
    ) -> Turns | None:
        """The turns of a program with these inputs and outputs; None where they gain nothing."""
        if program.stages or any(call.host or collective(call) for call in program.calls):
            return None
        small: dict[str, Tensor] = {}
        targets = {name: t for name, _, t in outputs}
        few = sum(len(call.launches) for call in program.calls) <= LAUNCHES
        few = few and sum(t.nbytes for t in targets.values()) <= WRITTEN
        if few and targets and all(over_bus(program, t) for t in targets.values()):
            small = {name: t for name, _, t in inputs if over_bus(program, t)}
        else:
            targets = {}
        fed = tuple(place for place in inputs if place[0] not in small)
        if not small and not targets and sum(t.nbytes for _, _, t in fed) < LARGE:
            return None
        return Turns(small, targets, fed, on)

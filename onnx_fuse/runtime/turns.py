"""Runs that follow each other without a copy of what is small: each has host memory of its own.

Several runs of a training step are under way at a time. What the host gives each of them, as a
learning rate and labels, and what it gets, as a loss, are some bytes; a copy of them holds up the
stream for longer than a kernel that reads or writes them over the bus. So the runs take turns with
a few pieces of page-locked memory, at whose addresses the launches are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from onnx_fuse.program.call import Program, Tensor
from onnx_fuse.runtime import device
from onnx_fuse.runtime.schedule import collective
from onnx_fuse.runtime.staging import Pending
from onnx_fuse.runtime.tensor import DeviceTensor
from onnx_fuse.runtime.zero_copy import READ, WRITTEN, ZeroCopy, is_plain

TURNS = 4
"""Runs of a shape that may be under way; one more waits for the oldest."""
LAUNCHES = 128
"""The most launches of a program whose copies are worth a graph for each turn."""
Places = tuple[tuple[str, int, Tensor], ...]


class Turn:
    """Memory for the small inputs and the outputs of one run, until its results are read."""

    def __init__(
        self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor], device_id: int
    ) -> None:
        self.memory = ZeroCopy(inputs, outputs)
        self.pending: Pending | None = None
        """The results of the run that has it."""
        self.inputs, self.outputs = self.memory.places(device_id)
        """Its tensors as the GPU sees them."""
        self.placements: dict[tuple[int, ...], Any] = {}
        """Where a run stands, by the addresses of the inputs that are read on the GPU in place."""

    @cached_property
    def passed(self) -> device.Event:
        """The end of its run."""
        return device.Event()

    def fill(self, feeds: Mapping[str, Any]) -> None:
        """Wait until its last run is over, and take over the small inputs."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None
        for name, array in self.memory.inputs.items():
            array[...] = feeds[name]


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
        device_id: int,
    ) -> None:
        self._turns = [Turn(inputs, outputs, device_id) for _ in range(TURNS)]
        self.fed = fed
        self._next = 0
        self._last: tuple[int, ...] = ()

    def take(self, feeds: Mapping[str, Any]) -> tuple[Turn, dict[str, DeviceTensor]] | None:
        """The next turn, filled, and the inputs to be read in place on the GPU.

        None where a small input is on the GPU.
        """
        turn = self._turns[self._next]
        if any(type(feeds[name]) is not np.ndarray for name in turn.inputs):
            return None
        resident = {n: feeds[n] for n, _, _ in self.fed if isinstance(feeds[n], DeviceTensor)}
        addresses = tuple([tensor.address for tensor in resident.values()])
        again, self._last = addresses == self._last, addresses
        turn.fill(feeds)
        self._next = (self._next + 1) % TURNS
        return turn, resident if again else {}

    @staticmethod
    def of(
        program: Program, inputs: Places, outputs: Sequence[tuple[str, int, Tensor]], device_id: int
    ) -> Turns | None:
        """The turns of a program whose outputs are small; None where copies take no part of it."""
        launches = sum(len(call.launches) for call in program.calls)
        if program.stages or launches > LAUNCHES:
            return None
        if any(call.host or collective(call) for call in program.calls):
            return None
        given = {name: t for name, _, t in outputs}
        if sum(t.nbytes for t in given.values()) > WRITTEN:
            return None
        if not all(_over_bus(program, t) for t in given.values()):
            return None
        small = {name: t for name, _, t in inputs if _over_bus(program, t)}
        fed = tuple(place for place in inputs if place[0] not in small)
        return Turns(small, given, fed, device_id) if small or given else None


def _over_bus(program: Program, t: Tensor) -> bool:
    """Whether all that use a tensor can reach it in host memory, and read few bytes there."""
    read = 0
    for call in program.calls:
        if not any(x.buffer == t.buffer for _, x in (*call.reads, *call.writes)):
            continue
        if not all(map(is_plain, call.launches)):
            return False
        if any(x.buffer == t.buffer for _, x in call.reads):
            read += t.nbytes * sum(prod(launch.grid) for launch in call.launches)
    return read <= READ

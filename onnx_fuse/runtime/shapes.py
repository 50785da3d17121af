"""The Programs of an Executable by the shapes of their feeds, and the Instances that run them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse.llir import NeedsValues, Program
from onnx_fuse.runtime import device
from onnx_fuse.runtime.hosts import Stages
from onnx_fuse.runtime.instance import Instance
from onnx_fuse.runtime.plan import Plan, plan
from onnx_fuse.runtime.tensor import DeviceTensor

if TYPE_CHECKING:
    from onnx_fuse.runtime.executable import Executable

INSTANCES = 64
"""Shape keys kept; the least recently used goes first."""

Feeds = Mapping[str, Any]


@dataclass
class Shape:
    """What is kept of a set of shapes: its Program, and its Instance while that has memory."""

    program: Program
    plan: Plan
    stages: Stages
    """What runs behind the calls."""
    instance: Instance | None = None
    runs: int = 0
    """Those of its instances before."""

    @property
    def whole_on_gpu(self) -> bool:
        """Whether kernels are all there is to it."""
        return not self.program.stages and not any(call.host for call in self.program.calls)

    def drop(self) -> None:
        """Let go of the instance; the next one goes on where it stopped."""
        if self.instance is not None:
            self.runs, self.instance.alive = self.instance.runs, False
            self.instance = None


class Shapes:
    """What is kept of the shapes that an Executable has met; its lock is held by whoever asks."""

    def __init__(self, owner: Executable, names: Sequence[str]) -> None:
        self._owner, self._names = owner, sorted(names)
        self._shapes: OrderedDict[tuple[Any, ...], Shape] = OrderedDict()
        self._latest: Shape | None = None  # what ran last
        self.deciding: list[str] = []
        """Feeds whose values decide about shapes."""

    def instances(self) -> list[Instance]:
        """Those that have memory, the least recently used first."""
        return [s.instance for s in self._shapes.values() if s.instance is not None]

    def programs(self) -> list[Program]:
        """The programs kept, the least recently used first, stages included."""
        found = []
        for shape in self._shapes.values():
            found.append(shape.program)
            for inner in shape.stages.executables():
                found += inner.programs()
        return found

    def clear(self) -> None:
        """Forget all of them."""
        self._shapes.clear()
        self._latest = None

    def give_up(self) -> None:
        """Give the memory of all shapes back to the driver."""
        self.retire()
        self._owner.arena.release()
        self._owner.pool.trim()

    def of(self, feeds: Feeds) -> Shape:
        """What is kept of the shapes and dtypes of `feeds`, which are lowered if need be."""
        key = self._key(feeds)
        shape = self._shapes.get(key)
        if shape is not None:
            self._shapes.move_to_end(key)
            return shape
        program = self._lowered(feeds)
        shape = Shape(program, plan(program), Stages(self._owner, program.stages))
        self._shapes[self._key(feeds)] = shape  # the key may have become longer
        while len(self._shapes) > INSTANCES:
            self._shapes.popitem(last=False)[1].drop()
        return shape

    def ready(
        self,
        shape: Shape,
        inputs: Mapping[str, DeviceTensor],
        outputs: Mapping[str, DeviceTensor],
    ) -> Instance:
        """The shape's instance; a new one begins with `inputs` and `outputs` in place."""
        device.start(self._owner.device_id)  # this thread may be another than the one that made it
        if shape.instance is None:
            self._owner.stream.catch_up()
            shape.instance = self._instance(shape, inputs, outputs)
            shape.instance.runs = shape.runs
        self._latest = shape
        return shape.instance

    def _instance(
        self,
        shape: Shape,
        inputs: Mapping[str, DeviceTensor],
        outputs: Mapping[str, DeviceTensor],
    ) -> Instance:
        # a shape that may not come again leaves its launches to this one, if they are alike
        latest = self._latest
        before = None if latest is None or not latest.whole_on_gpu else latest.instance
        if latest is not None and before is not None:
            if before.settled:
                before = None
            else:
                latest.drop()
        ends = (shape.program, shape.plan, inputs, outputs)
        try:
            return Instance(self._owner, *ends, before)
        except device.DeviceMemoryError:
            if not self.instances():
                raise
            self.give_up()
            return Instance(self._owner, *ends)

    def retire(self) -> None:
        """Give up the memory of all shapes, which are made anew when they come again."""
        for shape in self._shapes.values():
            shape.drop()

    def _key(self, feeds: Feeds) -> tuple[Any, ...]:
        """Shapes and dtypes, and the bytes of the feeds that decide about shapes."""
        key = tuple([(feeds[n].shape, feeds[n].dtype) for n in self._names if n in feeds])
        if not self.deciding:
            return key
        return key, tuple(self._host_value(feeds[name]).tobytes() for name in self.deciding)

    def _lowered(self, feeds: Feeds) -> Program:
        shapes = {name: (value.shape, value.dtype.name) for name, value in feeds.items()}
        while True:
            values = {name: self._host_value(feeds[name]) for name in self.deciding}
            try:
                return self._owner.program(shapes, values)
            except NeedsValues as needs:
                self.deciding += [name for name in needs.names if name not in self.deciding]

    def _host_value(self, value: Any) -> np.ndarray:
        if not isinstance(value, DeviceTensor):
            return np.asarray(value)
        device.start(self._owner.device_id)
        array = np.empty(value.shape, value.dtype)
        self._owner.stream.download(array.ctypes.data, value.address, array.nbytes)
        self._owner.stream.wait("reading a feed")
        return array

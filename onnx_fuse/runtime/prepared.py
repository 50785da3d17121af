"""What a run of a binding found out, for the next: all of it but for addresses and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse.program.call import Tensor, dtype_of
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.runtime import device
from onnx_fuse.runtime.exchange import Look, look, stream_of
from onnx_fuse.runtime.placement import Placement
from onnx_fuse.runtime.plan import PlannedProgram, aligned
from onnx_fuse.runtime.tensor import DeviceTensor, DeviceTensors, adopt

if TYPE_CHECKING:
    from onnx_fuse.runtime.instance import Fetch, Instance

_NOTHING = bytes(16)
"""The memory of one element of any type."""
OutputGroup = tuple[str, list[str], tuple[int, ...], np.dtype[Any], int]
"""Outputs of one shape and type in one block, which are usually released together, as those of a
cache are: what it is called, names, shape, type, and the bytes from one to the next."""


def output_groups(values: Mapping[str, Any]) -> list[OutputGroup]:
    """The groups of those of the outputs that are tensors of a program."""
    alike: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            alike.setdefault((value.shape, value.dtype), []).append(name)
    groups = []
    for (shape, dtype), names in alike.items():
        step = aligned(prod(shape) * ITEMSIZE[dtype])
        groups.append((f"output {', '.join(names)}", names, shape, dtype_of(dtype), step))
    return groups


def kinds_of(feeds: Mapping[str, Any], names: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """Shape and dtype of each feed among `names`, in that order."""
    return {n: (feeds[n].shape, feeds[n].dtype) for n in names if n in feeds}


class Prepared:
    """A binding whose runs only copy bound arrays, launch, and copy results back.

    `feeds` are arrays and tensors as runs take them, `places` those of the outputs that are bound
    to some, `fresh` the outputs that get new memory on the GPU at each run. `results` has a place
    for each output wanted, None for those that `fresh` or `fetch` bring.
    """

    def __init__(
        self,
        owner: Any,
        instance: Instance,
        feeds: Mapping[str, Any],
        places: DeviceTensors,
        fresh: Sequence[OutputGroup],
        fetch: Fetch | None,
        results: Mapping[str, DeviceTensor | None],
    ) -> None:
        self.owner, self.instance, self.made = owner, instance, instance.made
        self.feeds, self.places, self.fresh = dict(feeds), dict(places), fresh
        self.fetch, self.results = fetch, results
        self._on_gpu = [name for name, v in feeds.items() if isinstance(v, DeviceTensor)]
        self._watched: list[_Watched] = []
        self._event: device.Event | None = None
        self._latest: tuple[list[int], tuple[Placement, bool]] | None = None
        self.resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """The shape that an input had when the program was chosen, and the one that it has now."""
        self._kinds: dict[str, tuple[Any, Any]] | None = None

    def watch(self, feeds: Mapping[str, Any], places: Mapping[str, Any]) -> bool:
        """Look at these bound objects at each run; False where one cannot be looked at."""
        for side, values in ((self.feeds, feeds), (self.places, places)):
            for name, value in values.items():
                seen = look(value) if isinstance(side[name], DeviceTensor) else None
                if seen is None:
                    return False
                self._watched.append(_Watched(side, name, type(value), value, seen))
        return True

    def unchanged(self) -> bool:
        """Whether the objects that are bound are what they were, but perhaps for their address."""
        return all(self._alike(watched, watched.value) for watched in self._watched)

    def _alike(self, watched: _Watched, value: object) -> bool:
        """Whether a value may stand for the object that is watched, which it then does."""
        now = look(value)
        if now is None:
            return False
        if now[1] != watched.seen[1]:
            return value is not watched.value and self._resizes(watched, value, now)
        if now[0] != watched.seen[0] or value is not watched.value:
            # nobody is to keep the memory of the one before
            old = watched.side[watched.name]
            new = DeviceTensor(now[0], old.shape, old.dtype, old.device_id, value)
            watched.side[watched.name] = value if type(value) is DeviceTensor else new
            watched.value, watched.seen, self._latest = value, now, None
        return True

    def _resizes(self, watched: _Watched, value: object, now: Look) -> bool:
        """Whether a value of another shape may stand for the watched input, which it then does."""
        if watched.side is not self.feeds:
            return False
        new = adopt(value, self.owner.stream.handle)
        if not isinstance(new, DeviceTensor) or not self._takes(watched.name, new):
            return False
        watched.value, watched.seen = value, now
        return True

    def follow(self, stream: device.Stream) -> None:
        """Let the stream come after what makes the objects that are bound."""
        libraries = set()
        for value in (watched.value for watched in self._watched):
            if type(value) is DeviceTensor:
                if value.ready is not None and value.ready is not stream:
                    value.before(stream.handle)
            elif type(value) not in libraries:
                libraries.add(type(value))
                handle = stream_of(value, self.owner.device_id)
                if handle is not None and handle != stream.handle:
                    self._event = self._event or device.Event()
                    self._event.record(self.owner.shared.order.stream(handle))
                    stream.wait_event(self._event)

    def takes(self, name: str, value: object) -> bool:
        """Feed another value from now on; False where it may have another type or rank."""
        for watched in self._watched:
            if watched.name == name and watched.side is self.feeds:
                return type(value) is watched.kind and self._alike(watched, value)
        return self._takes(name, value)

    def _takes(self, name: str, value: Any) -> bool:
        kind, old = type(value), self.feeds.get(name)
        if old is None or kind is not type(old) or kind not in (np.ndarray, DeviceTensor):
            return False
        if value.dtype != old.dtype or len(value.shape) != len(old.shape):
            return False
        if value.shape != old.shape:
            before, _ = self.resized.get(name, (old.shape, ()))
            self.resized[name], self._latest = (before, value.shape), None
        self.feeds[name] = value
        if kind is DeviceTensor and value.address != old.address:
            self._latest = None
        return True

    def key(self, names: Sequence[str]) -> tuple[Any, ...]:
        """Shapes and dtypes of the feeds among `names`, in that order."""
        if self._kinds is None:
            self._kinds = kinds_of(self.feeds, names)
        for name in self.resized:
            self._kinds[name] = self.feeds[name].shape, self.feeds[name].dtype
        return tuple(self._kinds.values())

    def runs(self, made: PlannedProgram) -> None:
        """Note that the instance runs another shape, which these feeds have."""
        self.made = made
        self.resized.clear()

    def rest(self) -> None:
        """Keep no memory of the feeds, all of which the next run feeds anew."""
        for name, value in self.feeds.items():
            if isinstance(value, DeviceTensor):
                at = (value.address, value.shape, value.dtype, value.device_id, None)
                self.feeds[name] = DeviceTensor(*at)
            else:
                steps = (0,) * value.ndim
                self.feeds[name] = np.ndarray(value.shape, value.dtype, _NOTHING, strides=steps)
        for watched in self._watched:
            if watched.side is self.feeds:
                watched.value = None

    def moves(self, name: str, place: DeviceTensor) -> bool:
        """Write an output that has a place to another one; False where it has none of this kind."""
        old = self.places.get(name)
        if old is None or (place.shape, place.dtype) != (old.shape, old.dtype):
            return False
        self.places[name], self._latest = place, None
        return True

    def placed(self, fresh: DeviceTensors) -> tuple[Placement, bool]:
        """Where a run has all, `fresh` outputs included; whether inputs are copied to that."""
        at = [t.address for t in fresh.values()]
        if self._latest is not None and self._latest[0] == at:
            return self._latest[1]
        inputs = {name: self.feeds[name] for name in self._on_gpu}
        outputs = {**self.places, **fresh} if self.places else fresh
        placement = self.instance.placement(inputs, outputs)
        found = placement, len(inputs) < len(self.feeds) or placement.fed
        self._latest = at, found
        return found


@dataclass
class _Watched:
    """An object that is bound, as it was when it was last looked at; `side` has it as runs do."""

    side: dict[str, Any]
    name: str
    kind: type
    value: object
    seen: Look

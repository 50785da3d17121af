"""Caches that grow by Concat, in place: a present has room behind, where the next run appends.

A run that takes the presents of the last one as pasts writes the new token behind them, by the same
program at the same addresses. A present stands in its room until somebody asks for its address:
then it is copied to memory of its own. Pasts whose room ends, or has another run's token behind
them, are copied to a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse.errors import DeviceError, ModelError
from onnx_fuse.program.call import LENGTHS, NoRoom
from onnx_fuse.runtime import device
from onnx_fuse.runtime.binding import Binding
from onnx_fuse.runtime.resources import Resources
from onnx_fuse.runtime.tensor import DeviceTensor

if TYPE_CHECKING:
    import onnx_ir as ir

LEAST = 256
"""Tokens of the smallest room; others are twice as large as the one before."""
USUAL = 1024
"""Tokens that a room has where it takes MODEST bytes at most: the next one is another program."""
MODEST = 256 << 20

Run = Callable[[Binding], None]


class Grown(DeviceTensor):
    """A present [B, H, tokens, D] in a room, or in memory of its own once its address was asked."""

    def __init__(self, rooms: Rooms, past: str, tokens: int) -> None:
        # each token makes one of each layer's keys and values: what is known is not asked again
        (batch, heads, room, size), self.dtype = rooms.shapes[past], rooms.dtypes[past]
        self.rooms: Rooms | None = rooms
        self.past, self.tokens, self._address = past, tokens, 0
        self.shape, self.nbytes = (batch, heads, tokens, size), rooms.nbytes[past] // room * tokens
        self.ready, self.device_id, self._owner = None, rooms.owner.device_id, None

    @property
    def address(self) -> int:
        """The address of memory of its own, to which the tokens are copied."""
        if self.rooms is not None:
            rooms, self.rooms = self.rooms, None
            rooms.settle(self)
        return self._address

    @address.setter
    def address(self, value: int) -> None:
        self._address = value

    def wait(self) -> None:
        """Wait for what makes it, in memory of its own."""
        _ = self.address
        super().wait()

    def before(self, stream: int) -> None:
        """Let that CUstream come after what makes this, in memory of its own."""
        _ = self.address
        super().before(stream)

    def _lend(self) -> None:
        _ = self.address
        super()._lend()

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy in host memory; it stays in its room."""
        if self.rooms is None:
            return super().numpy()
        return DeviceTensor.numpy(Grown(self.rooms, self.past, self.tokens))


class Rooms:
    """Memory for the pasts of a model, each [B, H, room, D], of whose tokens `used` are in use."""

    def __init__(
        self, owner: Resources, pasts: Mapping[str, DeviceTensor], tokens: int, expected: int
    ) -> None:
        """`expected` tokens are to come in all, as far as anybody knows."""
        self.owner, self.used = owner, tokens
        self.size, wanted = LEAST, max(USUAL, expected)
        of_token = sum(prod(t.shape[:2]) * t.shape[3] * t.dtype.itemsize for t in pasts.values())
        while self.size <= tokens or (self.size < wanted and 2 * self.size * of_token <= MODEST):
            self.size *= 2
        self.shapes = {n: (*t.shape[:2], self.size, t.shape[3]) for n, t in pasts.items()}
        self.dtypes = {n: t.dtype for n, t in pasts.items()}
        self.nbytes = {n: prod(s) * self.dtypes[n].itemsize for n, s in self.shapes.items()}
        self.places: dict[str, device.Memory] = {}
        for name, past in pasts.items():
            heads, step = prod(past.shape[:2]), self.row(name)
            memory = owner.pool.allocate(heads * step, f"the cache {name}")
            width = step // self.size * tokens
            at = past.rooms.place(past.past) if isinstance(past, Grown) and past.rooms else None
            source, pitch = at or (past.address, width)
            owner.stream.move_rows(memory.address, step, source, pitch, width, heads)
            self.places[name] = memory
        self.binding = Binding([], owner.device_id)
        self.batch = next(iter(self.shapes.values()))[0]
        self.lengths = owner.pool.allocate(4 * self.batch, "lengths")  # each run adds one
        lengths = np.full(self.batch, tokens, np.int32)
        owner.uploads.send(lengths, self.lengths.address, owner.stream)

    def row(self, past: str) -> int:
        """The bytes of all tokens of a head."""
        return self.nbytes[past] // prod(self.shapes[past][:2])

    def place(self, past: str) -> tuple[int, int]:
        """Where a past begins, and the bytes from a head to the next."""
        return self.places[past].address, self.row(past)

    def presents(self) -> dict[str, Grown]:
        """The tokens so far, by the past that a run may be fed them as."""
        return {past: Grown(self, past, self.used) for past in self.places}

    def settle(self, present: Grown) -> None:
        """Copy a present to memory of its own."""
        device.start(self.owner.device_id)
        stream, (at, step) = self.owner.stream, self.place(present.past)  # in which runs write it
        memory = self.owner.pool.allocate(present.nbytes, "a present")
        heads = prod(present.shape[:2])
        width = step // self.size * present.tokens
        stream.move_rows(memory.address, width, at, step, width, heads)
        present.own(memory)
        present.ready = stream


class Growing:
    """The growing caches of a model: `pairs` have the present of each past."""

    def __init__(self, owner: Resources, pairs: Mapping[str, str]) -> None:
        self._owner, self._pairs = owner, dict(pairs)
        self._pasts = {present: past for past, present in self._pairs.items()}
        self._last: object = None  # what the last run was fed beside pasts
        self._refused: set[object] = set()

    @classmethod
    def of(cls, owner: Resources, graph: ir.Graph) -> Growing | None:
        """Those of a graph, None where it has none that are its inputs and outputs."""
        from onnx_fuse.ops.fused.caches import growing

        pairs = [*growing(graph)]
        ends = all(past.is_graph_input() and new.is_graph_output() for past, new in pairs)
        named = {past.name or "": present.name or "" for past, present in pairs}
        return cls(owner, named) if pairs and ends and len(named) == len(pairs) else None

    def run(self, binding: Binding, run: Run) -> bool:
        """Run a binding whose presents are to stay on the GPU; False where it has no rooms."""
        targets, pasts = binding.targets, self._pasts
        apart = [*map(targets.get, pasts)].count("cuda") == len(pasts)
        if not (apart and pasts.keys().isdisjoint(binding.places)):
            return False
        rooms = self._rooms(binding)
        if rooms is None:
            return False
        inner = rooms.binding
        if inner.known != list(targets) or len(inner.feeds) != len(binding.feeds) + 1:
            self._bind(rooms, list(targets))
        for name in (n for n in targets if n not in pasts):
            where, place = targets[name], binding.places.get(name)
            if inner.targets[name] != where or inner.places.get(name) is not place:
                inner.rebind(name, where, place, binding.lent.get(name))
        for name, value in binding.feeds.items():
            if name not in self._pairs and inner.feeds.get(name) is not value:
                inner.feed(name, value, addressed=name in binding.addressed)
        rooms.used += 1  # whatever comes of it: a run that began has added one on the GPU
        try:
            run(inner)
        except DeviceError:
            raise  # it may have begun
        except (NoRoom, ModelError):  # a mask has a column for each token, and none for a room
            rooms.used -= 1
            self._refused.add(self._others(binding))
            if binding.follows is not None:
                binding.follows = None
                for past, value in rooms.presents().items():
                    binding.feed(past, value, addressed=False)
            return False
        except Exception:  # of what was fed: nothing has begun
            rooms.used -= 1
            raise
        binding.late = inner.late
        results = inner.results
        if binding.chained:
            binding.follows = rooms
            binding.results = {name: results[name] for name in results if name not in pasts}
        else:
            presents = rooms.presents()
            binding.results = {**results, **{new: presents[past] for new, past in pasts.items()}}
        return True

    def _bind(self, rooms: Rooms, targets: list[str]) -> None:
        inner = rooms.binding
        inner.clear_binding_inputs()
        inner.clear_binding_outputs()
        inner.known, inner.targets = targets, dict.fromkeys(targets, "")
        for past, present in self._pairs.items():
            shape, dtype = rooms.shapes[past], rooms.dtypes[past]
            place = ("cuda", self._owner.device_id, dtype, shape, rooms.places[past].address)
            inner.bind_input(past, *place)
            inner.bind_output(present, *place)
        lengths = ("cuda", self._owner.device_id, np.int32, (rooms.batch,), rooms.lengths.address)
        inner.bind_input(LENGTHS, *lengths)

    def _rooms(self, binding: Binding) -> Rooms | None:
        """Where a run appends: where its pasts stand, or a new room.

        None for pasts that are not on the GPU, and for the first run with such other inputs: a
        prompt, of which each may be as long as it likes.
        """
        if binding.follows is not None:
            rooms = binding.follows
            if rooms.used < rooms.size:
                return rooms
            return Rooms(self._owner, rooms.presents(), rooms.used, binding.expected)
        values = [*map(binding.feeds.get, self._pairs)]
        rooms = values[0].rooms if isinstance(values[0], Grown) else None
        if rooms is not None and rooms.used < rooms.size:
            pairs = zip(values, self._pairs, strict=True)
            used = rooms.used
            if all(
                isinstance(v, Grown) and v.rooms is rooms and v.past == past and v.tokens == used
                for v, past in pairs
            ):
                return rooms
        others = self._others(binding)
        last, self._last = self._last, others
        pasts = {
            name: value
            for name, value in zip(self._pairs, values, strict=True)
            if isinstance(value, DeviceTensor) and len(value.shape) == 4 and all(value.shape[:2])
        }
        counts = {(past.shape[0], past.shape[2]) for past in pasts.values()}
        if last != others or others in self._refused or len(pasts) < len(values):
            return None
        if len(counts) != 1:
            return None
        home = self._owner.stream
        for past in pasts.values():
            if past.ready is not None and past.ready is not home:
                past.ready.before(home)
        [(_, tokens)] = counts
        return Rooms(self._owner, pasts, tokens, binding.expected)

    def _others(self, binding: Binding) -> object:
        """Names, shapes and types of what is fed beside pasts."""
        return tuple(
            (name, getattr(value, "shape", None), str(getattr(value, "dtype", "")))
            for name, value in binding.feeds.items()
            if name not in self._pairs
        )

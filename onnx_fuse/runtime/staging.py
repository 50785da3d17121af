"""Pinned host memory between arrays and the GPU: feeds on their way there, outputs on theirs back.

One copy each way a run: an instance's inputs stand side by side, and so do its outputs.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from onnx_fuse.arrays import Array
from onnx_fuse.program.call import Tensor, dtype_of
from onnx_fuse.runtime import device

PIECE = 2 << 20
"""Bytes of a large array that one thread copies while those before it are on their way."""
SPAN = 16 << 20
"""Bytes of weights that are in a room on their way to the GPU."""
SENT = 8
"""Runs whose outputs may be on their way to the host unasked; one more waits for the oldest."""


@dataclass
class Room:
    """Pinned memory that one copy at a time goes through, and the arrays that its user sees in it.

    `passed` is the end of the copy.
    """

    pinned: device.Pinned
    passed: device.Event
    views: dict[str, Array] = field(default_factory=dict)
    seen_by: object = None

    def arrays(self, user: object, places: Sequence[tuple[str, int, Tensor]]) -> dict[str, Array]:
        """The room as tensors of `user`, by name, each so many bytes from its start."""
        if self.seen_by is not user:
            raw = self.pinned.array
            self.views = {
                name: raw[at : at + t.nbytes].view(dtype_of(t.dtype)).reshape(t.shape)
                for name, at, t in places
            }
            self.seen_by = user
        return self.views


def _room(nbytes: int) -> Room:
    # twice what is asked for: the next shapes may be larger, and pinning takes a while
    return Room(device.Pinned(max(4096, 2 * nbytes)), device.Event())


@cache
def _copiers() -> ThreadPoolExecutor:
    """Threads that copy: one fills a fifth of the link to a GPU."""
    return ThreadPoolExecutor(min(6, os.cpu_count() or 1), "onnx_fuse copies")


def copied(target: Array, source: Array) -> Iterator[tuple[int, int]]:
    """Copy `source` to the dense `target`; the bytes from and to of each piece that has arrived.

    Several threads copy the pieces of a large array, so that the first may go on early.
    """
    alike = source.dtype == target.dtype and source.flags.c_contiguous
    if not alike or source.nbytes < 2 * PIECE:
        target[...] = source
        yield 0, target.nbytes
        return
    to, flat = target.reshape(-1), source.reshape(-1)
    step = PIECE // target.itemsize
    starts = range(0, to.size, step)
    done = [_copiers().submit(np.copyto, to[at : at + step], flat[at : at + step]) for at in starts]
    for at, piece in zip(starts, done, strict=True):
        piece.result()
        yield at * to.itemsize, min(at + step, to.size) * to.itemsize


class Uploads:
    """Two rooms for feeds: one is filled while the other is read."""

    def __init__(self) -> None:
        self._rooms: deque[Room] = deque()

    def acquire(self, nbytes: int) -> Room:
        """A room that nothing reads any more."""
        while self._rooms:
            room = self._rooms[0]  # whose upload began before the other's
            if not room.passed.passed():
                if len(self._rooms) < 2:
                    break
                room.passed.wait("uploading feeds")
            if len(room.pinned.array) >= nbytes:
                self._rooms.rotate(-1)
                return room
            self._rooms.popleft()
        self._rooms.append(_room(nbytes))
        return self._rooms[-1]

    def send(self, array: Array, address: int, stream: device.Stream) -> None:
        """Enqueue the upload of a dense array, a part of a room at a time.

        From pageable memory the driver copies by one thread, a quarter as fast as the link.
        """
        flat = array.reshape(-1).view(np.uint8)
        for first in range(0, flat.size, SPAN):
            part = flat[first : first + SPAN]
            room = self.acquire(min(flat.size, SPAN))
            for low, high in copied(room.pinned.array[: part.size], part):
                stream.upload(address + first + low, room.pinned.address + low, high - low)
            room.passed.record(stream)


class Downloads:
    """Rooms for outputs, each taken until its outputs have been read; any number of threads."""

    def __init__(self) -> None:
        self._free: deque[Room] = deque()
        self._sent: deque[Pending] = deque()

    def acquire(self, nbytes: int) -> Room:
        """A room of at least so many bytes."""
        try:
            room = self._free.popleft()
        except IndexError:
            return _room(nbytes)
        return room if len(room.pinned.array) >= nbytes else _room(nbytes)

    def release(self, room: Room) -> None:
        """Take back a room whose outputs have been read."""
        self._free.append(room)

    def limit_pending(self, pending: Pending) -> None:
        """Bound the runs that are under way unasked."""
        self._sent = deque(p for p in self._sent if not p.done)
        while len(self._sent) >= SENT:
            self._sent.popleft().result()
        self._sent.append(pending)


class Pending:
    """Outputs of a run, by `names`, that are on their way to the host.

    `read` answers them once `wait` has, which raises DeviceError where a kernel failed.
    """

    def __init__(
        self,
        names: Sequence[str],
        wait: Callable[[], None],
        read: Callable[[], list[Array]],
    ) -> None:
        self.names = list(names)
        self._wait, self._read = wait, read
        self._lock = threading.Lock()
        self._values: list[Array] | None = None

    @property
    def done(self) -> bool:
        """Whether somebody has waited for them."""
        return self._values is not None

    def result(self) -> list[Array]:
        """The outputs, after waiting for them. Raises DeviceError where a kernel failed."""
        with self._lock:
            if self._values is None:
                self._wait()
                self._values = self._read()
                del self._wait, self._read
        return self._values

"""The ranks of a run, as one of them sees the others: what they exchange on the host.

Every rank has two links to rank 0, which adds up in the order of the ranks, so that sums have the
same bits in every run. On GPUs only small things go this way: NCCL's identifier, whether to stop,
what a checkpoint is made of. On the CPU the gradients do, too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

import numpy as np

from onnx_fuse import config
from onnx_fuse.arrays import Array
from onnx_fuse.distributed import wire
from onnx_fuse.distributed.environment import Place, place
from onnx_fuse.distributed.watch import Watch
from onnx_fuse.errors import DeviceError, UsageError

MEETING = 300.0
"""Seconds in which all ranks must have come."""


class World:
    """The ranks of a run. All of them make the same calls in the same order.

    Raises DeviceError where ranks do not come, and where one is lost during a call.
    """

    def __init__(self, place: Place) -> None:
        self.rank, self.size, self.local_rank = place.rank, place.size, place.local_rank
        patience, stall = config.PATIENCE.value, config.STALL.value
        if place.rank == 0:
            links = wire.gather(place, MEETING)
            self._data = links["data"]
            control = dict(enumerate(links["control"], 1))
        else:
            # rank 0 answers once all links of all ranks have come
            channels = wire.join(place, MEETING)
            self._data = [channels["data"]]
            control = {0: channels["control"]}
        self.watch = Watch(place.rank, control, patience, stall)

    # -- what ranks exchange --

    def combine(
        self, arrays: Mapping[str, Array], how: Callable[[list[dict[str, Array]]], dict[str, Array]]
    ) -> dict[str, Array]:
        """What rank 0 makes of all ranks' arrays, in the order of the ranks, on every rank."""
        if self.size == 1:
            return how([dict(arrays)])
        with self._lost():
            if self.rank:
                wire.send(self._data[0], b"D", *wire.packed(arrays))
                return wire.unpacked(wire.receive(self._data[0])[1])
            theirs = [wire.unpacked(wire.receive(link)[1]) for link in self._data]
            combined = how([dict(arrays), *theirs])
            parts = wire.packed(combined)
            for link in self._data:
                wire.send(link, b"D", *parts)
            return combined

    def all_reduce(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The sum of all ranks' arrays, by name; those of 16 bits are added in float32."""
        return self.combine(arrays, _sums)

    def all_gather(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays of all ranks in a row, by name; each has one axis."""
        return self.combine(
            arrays, lambda given: {k: np.concatenate([g[k] for g in given]) for k in given[0]}
        )

    def broadcast(self, data: bytes) -> bytes:
        """The bytes of rank 0, on every rank."""
        message = {"": np.frombuffer(data, np.uint8)}
        return self.combine(message, lambda ranks: ranks[0])[""].tobytes()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        with self.watch.waiting():
            return bool(self.all_reduce({"": np.array([flag], np.int64)})[""][0])

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.any(False)

    def agree(self, what: str, text: str) -> None:
        """Raise UsageError, on every rank, where the ranks have different texts for `what`."""
        ours = np.frombuffer(text.encode().ljust(64, b"\0")[:64], np.uint8)
        texts = self.all_gather({"": ours})[""].reshape(self.size, 64)
        wrong = [str(i) for i, row in enumerate(texts) if (row != texts[0]).any()]
        if wrong:
            raise UsageError(f"rank {', '.join(wrong)}: another {what} than rank 0")

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # the watch knows better who ended and why, and ends this process meanwhile
            time.sleep(self.watch.patience)
            raise DeviceError(f"rank {self.rank} lost its link: {error}") from error

    def close(self) -> None:
        """Take leave of the other ranks."""
        self.watch.close()


def _sums(ranks: list[dict[str, Array]]) -> dict[str, Array]:
    totals = {}
    for name, first in ranks[0].items():
        wide = np.float32 if first.dtype.itemsize == 2 else first.dtype
        total = first.astype(wide)
        for other in ranks[1:]:
            total += other[name].astype(wide, copy=False)
        totals[name] = total.astype(first.dtype, copy=False)
    return totals


def _text(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


_WORLD: list[World] = []


def world() -> World:
    """The World of this process, which is made when it is first asked for.

    An exception that ends the process ends the other ranks as well. Raises UsageError where no
    launcher's variables say which rank this is, DeviceError where the others do not come.
    """
    if not _WORLD:
        here = place(os.environ)
        if here is None:
            raise UsageError(
                "distributed training needs a launcher: onnx-fuse train --gpus N, torchrun, mpirun "
                "or srun, which set RANK and WORLD_SIZE or variables of their own"
            )
        _WORLD.append(joined := World(here))
        atexit.register(joined.close)
        before = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            fail(error)
            before(kind, error, trace)

        sys.excepthook = hook
    return _WORLD[0]


def fail(error: BaseException) -> None:
    """Tell the other ranks, if there are any, that this one ends, and of what."""
    for each in _WORLD:
        each.watch.fail(_text(error))


def pieces(rows: int, size: int, rank: int) -> slice:
    """The rows of a batch that a rank takes: parts in order, the first ones larger by a row."""
    each, more = divmod(rows, size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))

"""When the collectives of a step began and ended, and what waited for them: events in its graph.

The graph notes beside its kernels when a collective's turn came, when it was over, and when all
kernels had ended that do not need its result. It also counts in host memory how far it has come,
for whoever asks while it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onnx_fuse.program.call import Call
from onnx_fuse.program.problem import Collective
from onnx_fuse.runtime import device

Aside = tuple[Callable[[], None], tuple[int, ...]]
"""What a graph does beside its steps, and the steps that it follows."""


@dataclass(frozen=True)
class Exchange:
    """One collective of a run; times are in seconds, from the run's beginning."""

    kind: str
    bucket: int
    nbytes: int
    start: float
    """When all that it reads was there."""
    end: float
    """When it was over, on this rank."""


@dataclass(frozen=True)
class Communication:
    """The collectives of one run."""

    exchanges: tuple[Exchange, ...]
    waits: tuple[tuple[float, float], ...]
    """The times in which nothing else was to be done, in seconds from the run's beginning."""

    @property
    def seconds(self) -> float:
        """The time in which a collective was under way."""
        return _length([(x.start, x.end) for x in self.exchanges])

    @property
    def exposed(self) -> float:
        """The part of it that no kernel hid."""
        return _length(self.waits)

    def __str__(self) -> str:
        size = sum(x.nbytes for x in self.exchanges)
        return (
            f"{len(self.exchanges)} collectives of {size / 1e6:,.1f} MB in "
            f"{1e3 * self.seconds:.2f} ms of a step, {1e3 * self.exposed:.2f} ms not hidden"
        )


_REACHED: list[device.Pinned] = []
"""Two numbers in host memory that the GPU writes: steps ended, and collectives come to."""


def reached() -> tuple[int, int]:
    """The steps that the GPU has ended, and the collectives that it has come to in the next one.

    Any thread may ask, at any time.
    """
    if not _REACHED:
        return 0, 0
    ended, come_to = _REACHED[0].array.view(np.uint32)
    return int(ended), int(come_to)


class Timeline:
    """The events of one graph, whose steps `calls` say what they are."""

    _launches = 0  # of all graphs of this process

    def __init__(
        self, calls: Sequence[Call], after: Sequence[Sequence[int]], stream: device.Stream
    ) -> None:
        """`after[i]` are the steps that step i follows."""
        if not _REACHED:
            _REACHED.append(device.Pinned(8))
            _REACHED[0].array[...] = 0
        self._stream = stream
        self._start = _Moment()
        self.asides: list[Aside] = [self._record(self._start, ())]
        self._exchanges: list[tuple[Collective, _Moment, _Moment, _Moment]] = []
        for i, others in _hidden_by(calls, after).items():
            problem, begin, end, free = calls[i].problem, _Moment(), _Moment(), _Moment()
            assert isinstance(problem, Collective)
            self._exchanges.append((problem, begin, end, free))
            self.asides += [
                self._record(begin, tuple(after[i])),
                self._count(len(self._exchanges), tuple(after[i])),
                self._record(end, (i,)),
                self._record(free, others),
            ]

    def _record(self, moment: _Moment, heads: tuple[int, ...]) -> Aside:
        return lambda: moment.record(self._stream), heads

    def _count(self, number: int, heads: tuple[int, ...]) -> Aside:
        return lambda: self._stream.note(_REACHED[0].address + 4, number), heads

    def ended(self, stream: device.Stream) -> None:
        """Count a launch of the graph once it is over, and begin to count collectives anew."""
        Timeline._launches += 1
        stream.note(_REACHED[0].address + 4, 0)
        stream.note(_REACHED[0].address, Timeline._launches)

    def read(self) -> Communication:
        """What the last run did, which must be over. Raises DeviceError."""
        since = self._start.until
        exchanges: list[Exchange] = []
        hidden: list[float] = []
        following, free = math.inf, math.inf
        for p, *moments in reversed(self._exchanges):
            # CUDA may record an event late, never early: what follows tells that it has passed
            begin, end, others = map(since, moments)
            end = min(end, following)
            following, free = min(begin, end), min(others, free)
            exchanges.insert(0, Exchange(p.kind, p.bucket, p.bytes, following, end))
            hidden.insert(0, free)
        waits, before = [], 0.0
        for exchange, until in zip(exchanges, hidden, strict=True):
            waits.append((max(until, before), exchange.end))
            before = exchange.end  # the next one follows it
        return Communication(tuple(exchanges), tuple(w for w in waits if w[1] > w[0]))


def _hidden_by(calls: Sequence[Call], after: Sequence[Sequence[int]]) -> dict[int, tuple[int, ...]]:
    """The steps that are collectives, each with the last of the kernels that do not need it.

    Once these are over, nothing can run until the collective has ended.
    """
    needed = [0] * len(calls)  # bits of the steps that a step follows, near or far
    for i, heads in enumerate(after):
        for k in heads:
            needed[i] |= needed[k] | 1 << k
    exchanges = {i for i, call in enumerate(calls) if isinstance(call.problem, Collective)}
    hidden = {}
    for c in sorted(exchanges):
        free = {i for i in range(len(calls)) if i not in exchanges and not needed[i] >> c & 1}
        hidden[c] = tuple(sorted(free.difference(*(after[i] for i in free))))
    return hidden


class _Moment(device.Event):
    """An event of a graph that keeps its time."""

    def __init__(self) -> None:
        super().__init__(timed=True)

    def record(self, stream: device.Stream) -> None:
        """Take the time here, in each launch of the graph that `stream` captures."""
        flag = self._driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        done = self._driver.cuEventRecordWithFlags(self.raw, stream.raw, int(flag))
        device.check(done, "an event")


def _length(spans: Sequence[tuple[float, float]]) -> float:
    """The time that is covered by at least one of the spans."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total

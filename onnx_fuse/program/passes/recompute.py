"""Recompute: results that only the backward reads again are computed a second time there.

A training step keeps what its forward computes until its backward reads it. A call that runs a
second time, right before its result is read, keeps that memory free in between ("activation
checkpointing": Chen et al., 2016, Training Deep Nets with Sublinear Memory Cost). The second run
has the launches of the first, so it gives the same bits.

Collectives never run again: another rank may choose otherwise, and the ranks need equal numbers of
them. Where the backward gathers a weight for its own products (`shard="all"`), a second run reads
that copy, so that the forward's is free in between all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

from onnx_fuse.program.call import Call, Program
from onnx_fuse.program.passes.callgraph import rename_buffer, rename_buffers
from onnx_fuse.program.problem import Collective

Twins: TypeAlias = "dict[int, list[tuple[int, int]]]"
"""Of a gathered buffer: all gathers of the same parts, each as its place among the calls and the
buffer that it writes, in order."""


def gathered_twice(calls: Sequence[Call]) -> Twins:
    """The buffers whose contents are gathered several times over in a step."""
    buffers: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    written: Counter[int] = Counter()
    for i, call in enumerate(calls):
        if isinstance(call.problem, Collective) and call.problem.kind == "AllGather":
            for (_, part), (_, y) in zip(call.reads, call.writes, strict=True):
                # a part that is written in between is another one
                key = part.buffer, written[part.buffer], part.offset, part.shape, part.dtype
                buffers.setdefault(key, []).append((i, y.buffer))
        written.update({t.buffer for _, t in call.writes})
    return {buffer: same for same in buffers.values() if len(same) > 1 for _, buffer in same}


@dataclass(frozen=True)
class Recomputation:
    """Calls that run a second time so that the results of one of them need not be kept."""

    calls: tuple[int, ...]
    """Their places in `Program.calls`: the one whose results are dropped, and before it those of
    its operands that nothing else keeps."""
    nbytes: int
    """Bytes that are free at the turn."""
    seconds: float
    """What the second runs cost."""


class Lifetimes:
    """When the temporaries of a program live, and what may run again. Its sizes are ints."""

    def __init__(self, program: Program) -> None:
        self.calls = program.calls
        self.nbytes = {b.id: b.nbytes for b in program.buffers if b.kind == "temp"}
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}
        self._twins = gathered_twice(self.calls)
        for i, call in enumerate(self.calls):
            for _, t in (*call.reads, *call.writes):
                self._first.setdefault(t.buffer, i)
                self._last[t.buffer] = i
            for buffer in {t.buffer for _, t in call.writes}:
                self._writers.setdefault(buffer, []).append(i)
        self.turn = self._turn()
        """The call at which temporaries take the most memory: there forward becomes backward."""
        self._end = max(
            (self._last[b] for b in self.nbytes if self._first.get(b, self.turn) < self.turn),
            default=0,
        )

    def _turn(self) -> int:
        change = [0] * (len(self.calls) + 1)
        for buffer in self.nbytes.keys() & self._first.keys():
            change[self._first[buffer]] += self.nbytes[buffer]
            change[self._last[buffer] + 1] -= self.nbytes[buffer]
        live = [n + c.workspace for n, c in zip(accumulate(change), self.calls, strict=False)]
        return max(range(len(live)), key=live.__getitem__, default=0)

    def _may_run_again(self, i: int) -> bool:
        """Whether a second run before the last read of any early result gives what the first did.

        It does where the call alone writes its results, and nothing it reads changes until then.
        Collectives run once, for the reason at the top.
        """
        call = self.calls[i]
        if isinstance(call.problem, Collective):
            return False
        reads, writes = ({t.buffer for _, t in part} for part in (call.reads, call.writes))
        sole = all(b in self.nbytes and self._writers[b] == [i] for b in writes)
        changed = any(i < k <= self._end for b in reads for k in self._writers.get(b, ()))
        return sole and not changed and not call.host and not reads & writes

    def _wanted(self, results: Collection[int]) -> int:
        """The first call behind the turn that reads one of these buffers."""
        behind = range(self.turn + 1, len(self.calls))
        reads = (i for i in behind if any(t.buffer in results for _, t in self.calls[i].reads))
        return next(reads, len(self.calls))

    def candidates(self, seconds: Callable[[Call], float]) -> list[Recomputation]:
        """What may run a second time; first what frees the most bytes for each second it costs."""
        choices = []
        for i, call in enumerate(self.calls[: self.turn]):
            results = {t.buffer for _, t in call.writes}
            freed = sum(self.nbytes.get(b, 0) for b in results if self._last[b] > self.turn)
            if not freed or not self._may_run_again(i):
                continue
            again, todo, cost, needed = {i}, [i], seconds(call), self._wanted(results)
            while todo:
                for buffer in {t.buffer for _, t in self.calls[todo.pop()].reads}:
                    if buffer not in self.nbytes or self._last[buffer] > self.turn:
                        continue  # it is there anyway
                    if any(self.turn < k < needed for k, _ in self._twins.get(buffer, ())):
                        continue  # it is gathered for the backward by then
                    writer, less = self._writers[buffer][0], freed - self.nbytes[buffer]
                    if writer in again:
                        continue
                    more = cost + seconds(self.calls[writer])
                    if self._may_run_again(writer) and freed * cost > less * more:
                        again.add(writer)
                        todo.append(writer)
                        cost = more
                    else:
                        freed = less  # it is kept instead
            if freed > 0:
                choices.append(Recomputation(tuple(sorted(again)), freed, cost))
        return sorted(choices, key=lambda c: (-c.nbytes / c.seconds, c.calls))


def recomputed(program: Program, turn: int, again: Collection[int]) -> Program:
    """The program with the calls `again` run a second time behind the call `turn`.

    A second run stands right before the first call that reads one of its results, behind the second
    runs of what it reads itself. All calls behind `turn` read the results of second runs. A second
    run reads the backward's copy of a gathered weight where that has been gathered by then.
    """
    if not again:
        return program
    twins = gathered_twice(program.calls)
    producer = {t.buffer: i for i in again for _, t in program.calls[i].writes}
    buffers = {b.id: b for b in program.buffers}
    fresh = 1 + max(buffers, default=0)
    copies: dict[int, int] = {}  # a buffer -> the one that its second run writes
    calls: list[Call] = []
    for i, call in enumerate(program.calls):
        if i <= turn:
            calls.append(call)
            continue
        needed: set[int] = set()
        todo = [call]
        while todo:
            for _, t in todo.pop().reads:
                k = producer.get(t.buffer)
                if k is not None and t.buffer not in copies and k not in needed:
                    needed.add(k)
                    todo.append(program.calls[k])
        for k in sorted(needed):
            first = program.calls[k]
            for buffer in dict.fromkeys(t.buffer for _, t in first.writes):
                copies[buffer], fresh = fresh, fresh + 1
                buffers[copies[buffer]] = replace(buffers[buffer], id=copies[buffer])
            late = {b: y for b, same in twins.items() for at, y in same if turn < at < i}
            second = rename_buffers(first, copies | late)
            calls.append(replace(second, note="run again"))
        calls.append(
            replace(call, reads=tuple((n, rename_buffer(t, copies)) for n, t in call.reads))
        )
    return replace(program, calls=tuple(calls), buffers=tuple(buffers.values()), sequential=True)

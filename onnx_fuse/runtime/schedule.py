"""Program -> Segments: runs of kernel calls that one CUDA graph holds, between host calls; and the
order among calls that the data asks for: what it leaves open, the graph runs side by side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import prod

from onnx_fuse.program.call import Call, Program, Tensor, in_turn

FEW_BLOCKS = 8
"""The most blocks of a call that leaves the multiprocessors to the one it runs beside."""
SIDE_BLOCKS, SIDE_STEPS = 64, 4
"""The most blocks of a step that is put off, and the fewest steps by which it may be."""


@dataclass(frozen=True)
class Segment:
    """A run of calls from index `first` on: kernel calls, or one call that onnxruntime runs."""

    first: int
    calls: tuple[Call, ...]

    @property
    def host(self) -> bytes:
        """The model of a host call, empty for kernel calls."""
        return self.calls[0].host


def segments(program: Program) -> tuple[Segment, ...]:
    """The calls in order, cut before and after each host call; calls without launches left out."""
    runs = groupby(enumerate(program.calls), lambda pair: pair[0] if pair[1].host else -1)
    parts = (zip(*run, strict=True) for _, run in runs)
    return tuple(Segment(places[0], calls) for places, calls in parts)


@dataclass(frozen=True)
class CallOrder:
    """`after[i]`: the calls that call i directly follows; `before[i]`: bits of all it comes after.

    No call of `after[i]` follows another of them.
    """

    after: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]

    @classmethod
    def of(cls, after: Iterable[Sequence[int]], calls: int) -> CallOrder:
        """The order of so many calls with these `after`. Raises ValueError where it is none."""
        before: list[int] = []
        rows = tuple(map(tuple, after))
        for i, direct in enumerate(rows):
            mask = 0
            for j in direct:
                if type(j) is not int or not 0 <= j < i:
                    raise ValueError("a call that comes after a later one")
                mask |= before[j] | 1 << j
            before.append(mask)
        if len(rows) != calls:
            raise ValueError("an order of other calls")
        return cls(rows, tuple(before))


def _order(dependencies: Iterable[Iterable[int]]) -> CallOrder:
    """The order of calls that must each follow some earlier ones; implied edges are left out."""
    after: list[tuple[int, ...]] = []
    before: list[int] = []
    for calls in dependencies:
        mask, direct = 0, []
        for i in sorted(set(calls), reverse=True):
            if not mask >> i & 1:
                direct.append(i)
                mask |= before[i] | 1 << i
        after.append(tuple(direct))
        before.append(mask)
    return CallOrder(tuple(after), tuple(before))


def by_dependency(program: Program) -> CallOrder:
    """The order in which each call follows the writers of what it reads, and the readers before it.

    A call of few blocks that could be the first follows the first instead: it has the time, and a
    CUDA graph that begins with a single kernel begins sooner.
    """
    before = _by_data(program)
    for i, call in enumerate(program.calls):
        blocks = sum(prod(launch.grid) for launch in call.launches)
        if i and not before[i] and 0 < blocks <= FEW_BLOCKS and not collective(call):
            before[i] = [0]
    return _order(_one_by_one(program, before))


def _by_data(program: Program) -> list[list[int]]:
    """The calls that each call follows by what they read and write.

    An output made of an input, element by element, may stand where that does: its call follows
    those before it that read the input.
    """
    kinds = {b.id: b.kind for b in program.buffers}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    before: list[list[int]] = []
    for i, call in enumerate(program.calls):
        reads, writes = ({t.buffer for _, t in part} for part in (call.reads, call.writes))
        before.append([writer[b] for b in reads | writes if b in writer])
        before[-1] += [r for b in writes for r in readers[b]]
        sources, made = dict(call.reads), dict(call.writes)
        for y, x in ((made[w].buffer, sources[r].buffer) for w, r in call.inplace):
            if (kinds[x], kinds[y]) == ("input", "output"):
                before[-1] += readers[x]
        for b in reads - writes:
            readers[b].append(i)
        for b in writes:
            writer[b], readers[b] = i, []
    return before


def collective(call: Call) -> bool:
    """Whether a call waits for the other ranks."""
    return call.problem is not None and call.problem.op == "Collective"


def _one_by_one(program: Program, dependencies: list[list[int]]) -> list[list[int]]:
    """`dependencies`, with each collective after the one before: all ranks need the same order."""
    places = [i for i, call in enumerate(program.calls) if collective(call)]
    for before, after in pairwise(places):
        dependencies[after].append(before)
    return dependencies


def sequential(program: Program) -> CallOrder:
    """The order in which each call waits for the one before; collectives run beside the others.

    A collective waits for the calls whose results it reads, and for the collective before it. One
    that gathers also waits for the call before it in the program, so that its result does not
    occupy memory long before it is read.
    """
    if not any(map(collective, program.calls)):
        return _order([i - 1] if i else [] for i in range(len(program.calls)))
    dependencies, before = _by_data(program), None
    for i, call in enumerate(program.calls):
        gathers = getattr(call.problem, "kind", "") == "AllGather"
        if before is not None and (gathers or not collective(call)):
            dependencies[i].append(before)
        if not collective(call):
            before = i
    return _order(_one_by_one(program, dependencies))


def overlappable(after: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Of each step those steps, of the ones that it follows, before whose end it may be launched.

    They have the longest row before them, and of the followers of one of them this step has the
    most steps behind it: another launched so would hold room that this row needs.
    """
    behind, heir = [0] * len(after), [-1] * len(after)
    for i in reversed(range(len(after))):
        for k in after[i]:
            if behind[i] >= behind[k]:
                behind[k], heir[k] = behind[i] + 1, i
    ahead = [0] * len(after)
    groups: list[tuple[int, ...]] = []
    for i, steps in enumerate(after):
        ahead[i] = max((ahead[k] + 1 for k in steps), default=0)
        last = tuple(k for k in steps if ahead[k] + 1 == ahead[i])
        alone = len(last) == 1 and heir[last[0]] == i
        groups.append(last if alone else ())
    return groups


def put_off(
    after: Sequence[Sequence[int]], blocks: Sequence[int]
) -> tuple[list[int], tuple[tuple[int, ...], ...]]:
    """The steps in an order in which small ones come later, and those that each follows there.

    A small step between two of the longest row, of which the second comes much later, would take
    room from the row's next step. It waits until the row is half way: an AdamW step of a perceptron
    took 95.3 us in place of 98.6 with the gradients of its classifier behind the next layer's
    products (H200, 2026-11).
    """
    depth, behind = [0] * len(after), [0] * len(after)
    followers: list[list[int]] = [[] for _ in after]
    for i, steps in enumerate(after):
        depth[i] = max((depth[k] + 1 for k in steps), default=0)
        for k in steps:
            followers[k].append(i)
    for i in reversed(range(len(after))):
        behind[i] = max((behind[k] + 1 for k in followers[i]), default=0)
    longest = max(depth, default=0)
    row = {i for i in range(len(after)) if depth[i] + behind[i] == longest}
    at = {depth[i]: i for i in sorted(row, reverse=True)}
    before = [list(steps) for steps in after]
    for i, steps in enumerate(after):
        around = {*steps, *followers[i]}
        if i in row or blocks[i] > SIDE_BLOCKS or not (steps and followers[i] and around <= row):
            continue
        slack = min(depth[k] for k in followers[i]) - 1 - depth[i]
        if slack >= SIDE_STEPS:  # what follows it comes after that, so there is no cycle
            before[i].append(at[depth[i] - 1 + (slack + 1) // 2])
    sequence = in_turn(dict(enumerate(before)))
    place = {step: k for k, step in enumerate(sequence)}
    return sequence, _order([place[k] for k in before[i]] for i in sequence).after


def copies(call: Call) -> tuple[tuple[str, str], ...]:
    """(read, write) of each tensor that a call does nothing but copy, to the same places of another
    buffer; empty for a call that does more.
    """
    reads, writes = dict(call.reads), dict(call.writes)
    same = (_elements(reads[read]) == _elements(writes[write]) for read, write in call.copies)
    return call.copies if all(same) else ()


def _elements(t: Tensor) -> tuple[object, ...]:
    """A key that is equal for views with the same elements at the same places of a buffer."""
    steps = tuple((d, s) for d, s in zip(t.shape, t.strides, strict=True) if d != 1)
    return t.dtype, t.offset, steps


def at_ends(program: Program) -> tuple[Call, ...]:
    """The calls with what `Aliases` and `copies` ask of them, which few sizes have a part in."""
    ends = {b.id for b in program.buffers if b.kind in ("input", "output")}
    return tuple(
        _APART
        if call.buffers.isdisjoint(ends) and not call.copies
        else replace(call, nodes=(), launches=(), workspace=0, flops=0, bytes=0, problem=None)
        for call in program.calls
    )


_APART = Call("", (), (), (), ())  # one that uses no input, writes no output and copies nothing


class Aliases:
    """Which outputs may be written in the memory of which inputs: nothing reads these later."""

    def __init__(self, program: Program, order: CallOrder) -> None:
        """Its calls may be those of `at_ends`."""
        self.program, self._before = program, order.before
        self._readers: dict[int, int] = defaultdict(int)  # of a buffer: a bit for each call
        self._writers: dict[int, set[int]] = defaultdict(set)
        for i, call in enumerate(program.calls):
            for _, tensor in call.reads:
                self._readers[tensor.buffer] |= 1 << i
            for _, tensor in call.writes:
                self._writers[tensor.buffer].add(i)
        self._inputs, self._outputs = dict(program.inputs), dict(program.outputs)
        self._asked: dict[tuple[str, str], bool] = {}

    def take(self, program: Program) -> bool:
        """Answer for another shape of the same open program from now on.

        Returns whether all answers that it has given are still true.
        """
        old, self.program = self.program, program
        same = program.outputs is old.outputs
        if same and program.calls is not old.calls:
            calls = zip(program.calls, old.calls, strict=True)
            others = [call for call, before in calls if call is not before]
            outputs = {t.buffer for t in self._outputs.values() if isinstance(t, Tensor)}
            same = outputs.isdisjoint([t.buffer for call in others for _, t in call.writes])
        pairs = zip(program.inputs, old.inputs, strict=True)
        moved = {name for (name, x), (_, before) in pairs if x is not before}
        kept = same and moved.isdisjoint([source for _, source in self._asked])
        if not kept:
            self._asked.clear()
        self._inputs, self._outputs = dict(program.inputs), dict(program.outputs)
        return kept

    def may_share(self, output: str, source: str) -> bool:
        """Whether the output may stand where the input `source` does."""
        answer = self._asked.get((output, source))
        if answer is None:
            x, y = self._inputs[source], self._outputs.get(output)
            answer = isinstance(y, Tensor) and self._may_share(x, y)
            self._asked[output, source] = answer
        return answer

    def _may_share(self, x: Tensor, y: Tensor) -> bool:
        if (x.shape, x.dtype) != (y.shape, y.dtype) or not self._readers[x.buffer]:
            return False
        if y.offset or not y.dense:
            return False
        for w in self._writers[y.buffer]:
            others = self._readers[x.buffer] & ~(1 << w) & ~self._before[w]
            writer = self.program.calls[w]
            # a copy leaves what is there, so that others may read it later
            if not (_copies(writer, x, y) or (not others and _overwrites(writer, x, y))):
                return False
        return True


def _copies(writer: Call, x: Tensor, y: Tensor) -> bool:
    """Whether a call does nothing to `y` but copy what `x` holds."""
    reads, writes = dict(writer.reads), dict(writer.writes)
    pairs = copies(writer)
    return any(reads[r].buffer == x.buffer and writes[w].buffer == y.buffer for r, w in pairs)


def _overwrites(writer: Call, x: Tensor, y: Tensor) -> bool:
    """Whether a call that writes `y` writes each element of `x`, if any, where it reads it."""
    reads, writes = dict(writer.reads), dict(writer.writes)
    own = [t for t in reads.values() if t.buffer == x.buffer]
    at = [(reads[r], writes[w]) for w, r in writer.inplace if reads[r].buffer == x.buffer]
    once = len(own) == 1 and any(r.offset == w.offset and w.buffer == y.buffer for r, w in at)
    return not own or once

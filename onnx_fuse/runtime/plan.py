"""Program -> Plan: temporaries to arena offsets by lifetime, in place where a call allows it.

Calls that the data leaves unordered may run side by side, so their temporaries share no memory;
where that takes much of it, the calls run one after another.
"""

from __future__ import annotations

import contextlib
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import le
from typing import TYPE_CHECKING, Any

from onnx_fuse.program.call import Call, Program, Shapes, Tensor
from onnx_fuse.program.formula import NoValue
from onnx_fuse.program.open import SymbolicProgram
from onnx_fuse.runtime.schedule import CallOrder, by_dependency, sequential

if TYPE_CHECKING:
    from onnx_fuse.runtime.arg_updates import Change

ALIGN = 256
SIDE_BY_SIDE = 64 << 20
"""Arena bytes up to which calls may run side by side: larger ones fill a GPU each by itself."""
LARGE = 256 << 20
"""Bytes from which a program that needs less than half of what its class may need has a layout of
its own."""
MOST_CALLS = 4000
"""Calls up to which the order is looked for: its masks grow with the square."""


def with_sizes(
    shapes: Shapes, symbols: Iterable[tuple[str, int, str]], sizes: Mapping[str, Any]
) -> Shapes:
    """The shapes with these sizes for the symbols of (input, axis, symbol) among them."""
    changed = {name: (list(shape), dtype) for name, (shape, dtype) in shapes.items()}
    for name, axis, symbol in symbols:
        if symbol in sizes:
            changed[name][0][axis] = sizes[symbol]
    return {name: (tuple(shape), dtype) for name, (shape, dtype) in changed.items()}


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole allocation units."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Plan:
    """Where the temporaries stand. `offsets` maps buffer ids, `workspaces` call indices, to bytes.

    `arena` is what they take, `naive` what they would if nothing shared memory; `order` is what the
    calls must keep to.
    """

    offsets: Mapping[int, int]
    workspaces: Mapping[int, int]
    arena: int
    naive: int
    inplace: int
    order: CallOrder

    def __str__(self) -> str:
        share = f"{self.arena / self.naive:.0%}" if self.naive else "-"
        return (
            f"arena {self.arena:,} bytes, {share} of the {self.naive:,} of "
            f"{len(self.offsets)} temporaries; {self.inplace} in place"
        )


def plan(program: Program) -> Plan:
    """The layout under the order of the data, or in line where that takes much memory."""
    if not program.sequential and len(program.calls) <= MOST_CALLS:
        free = _layout(program, by_dependency(program))
        if free.arena <= SIDE_BY_SIDE:
            return free
    return _layout(program, sequential(program))


@dataclass
class _MemoryBlock:
    """Memory that one temporary, or several in turn, take: bits of the calls that touch it."""

    nbytes: int
    first: int
    users: int


def _layout(program: Program, order: CallOrder) -> Plan:
    """Largest first, each at the lowest offset that is free whenever it lives."""
    blocks: dict[int, _MemoryBlock] = {}
    size = {b.id: b.nbytes for b in program.buffers if b.kind == "temp"}
    for i, call in enumerate(program.calls):
        for _, tensor in (*call.reads, *call.writes):
            if tensor.buffer in size:
                block = blocks.setdefault(tensor.buffer, _MemoryBlock(size[tensor.buffer], i, 0))
                block.users |= 1 << i
    for stage in program.stages:
        for _, source in stage.inputs:
            if source is not None and source.buffer in blocks:
                blocks[source.buffer].users |= 1 << len(program.calls)
    home = {b: b for b in blocks}
    inplace = 0
    for i, call in enumerate(program.calls):
        for write, read in call.inplace:
            y, x = dict(call.writes)[write], dict(call.reads)[read]
            if not {x.buffer, y.buffer} <= blocks.keys() or not _may_share(call, x, y):
                continue
            into, target = blocks[home[x.buffer]], blocks[y.buffer]
            done = not into.users & ~(order.before[i] | 1 << i)
            if done and target.first == i and into.nbytes >= target.nbytes:
                home[y.buffer] = home[x.buffer]
                into.users |= target.users
                inplace += 1
    naive = sum(aligned(size[b]) for b in blocks)
    for i, call in enumerate(program.calls):
        if call.workspace:
            blocks[-1 - i] = _MemoryBlock(call.workspace, i, 1 << i)
    owners = [(b, block) for b, block in blocks.items() if home.get(b, b) == b]
    placed: list[tuple[int, int, int, int]] = []  # offset, end, users, calls not before its first
    offsets: dict[int, int] = {}
    for key, block in sorted(owners, key=lambda item: (-item[1].nbytes, item[1].first)):
        at, nbytes = 0, aligned(block.nbytes)
        users, later = block.users, ~order.before[block.first]
        for low, high, others, after in placed:
            if low >= at + nbytes:
                break  # they stand in the order of their offsets
            # neither of the two is done with before the other is first written
            if at < high and users & after and others & later:
                at = high
        offsets[key] = at
        insort(placed, (at, at + nbytes, users, later))
    return Plan(
        {b: 0 for b, n in size.items() if not n} | {b: offsets[home[b]] for b in home},
        {-1 - key: at for key, at in offsets.items() if key < 0},
        max((high for _, high, *_ in placed), default=0),
        naive,
        inplace,
        order,
    )


def _may_share(call: Call, x: Tensor, y: Tensor) -> bool:
    """Whether the call may write `y` where it reads `x`."""
    if x.buffer == y.buffer or x.offset or y.offset:
        return False
    others = [t for _, t in call.reads if t.buffer == x.buffer and t.strides != x.strides]
    return not others and not any(t.buffer == x.buffer for _, t in call.writes)


class PlannedProgram:
    """A Program for one shape, its layout in memory, and the open program it comes from, if any.

    One of an open program is made where it is asked for: a shape that takes over another's launches
    needs its `ends` and `changes` alone.
    """

    def __init__(
        self,
        program: Program | None,
        plan: Plan,
        source: SymbolicProgram | None = None,
        room: Mapping[int, int] | None = None,
        numbers: Mapping[str, int] | None = None,
        layout: _Fitting | None = None,
    ) -> None:
        self.plan, self.source, self.room = plan, source, room or {}
        """`room`: bytes that `plan` leaves for a buffer, where they are more than it has."""
        self._program = program
        self._numbers = numbers
        self._layout = layout
        self.guarded: Mapping[str, int] = numbers or {}
        """The sizes that meet the guards of `source`, by symbol."""
        self.symbols: Mapping[tuple[str, int], str] = {}
        """The symbol of each open dimension (input, axis), if whoever made this knows."""

    @property
    def program(self) -> Program:
        """The Program, evaluated anew if it was released or not made yet."""
        if self._program is None:
            assert self.source is not None
            self._program = self.source.at(self._numbers or {})
        return self._program

    @cached_property
    def ends(self) -> Program:
        """Its inputs, outputs, constants and setup; perhaps no buffers, and calls `at_ends`."""
        part: Program | None = None
        if self.source is not None and self._numbers is not None and self._program is None:
            part = self.source.part("ends", self._numbers)
        return self.program if part is None else part

    @cached_property
    def changes(self) -> tuple[Change, ...] | None:
        """The launches that other shapes of the open program have other arguments for."""
        part: tuple[Change, ...] | None = None
        if self.source is not None and self._numbers is not None:
            part = self.source.part("changes", self._numbers)
        return part

    def resized(
        self, shapes: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    ) -> PlannedProgram | None:
        """The same open program in the same layout for inputs that have had one shape, and have
        another; None where it, or nobody here knows, serves those.
        """
        sizes: dict[str, int] = {}
        count = 0
        for name, pair in shapes.items():
            for axis, (before, now) in enumerate(zip(*pair, strict=True)):
                if before != now:
                    symbol = self.symbols.get((name, axis))
                    # of sizes that are 1 or 0, others are known than that they meet the guards
                    if symbol is None or min(before, now) < 2:
                        return None
                    if sizes.setdefault(symbol, now) != now:
                        return None
                    count += 1
        if self.source is None or self._layout is None or self._numbers is None:
            return None
        if count != sum([symbol in sizes for symbol in self.symbols.values()]):
            return None  # another dimension of this symbol has its old size
        guarded, numbers = {**self.guarded, **sizes}, {**self._numbers, **sizes}
        if not self.source.holds(guarded):
            return None
        needs = self.source.part("sizes", numbers)
        if needs is None or not self._layout.serves(needs):
            return None
        made = PlannedProgram(None, self.plan, self.source, self.room, numbers, self._layout)
        made.guarded, made.symbols = guarded, self.symbols
        return made

    def forget(self) -> None:
        """Let go of what can be evaluated again.

        That takes less than what Python's garbage collector takes for the programs of many shapes.
        """
        if self.source is not None and self._numbers is not None:
            self._program = None
            vars(self).pop("ends", None)
            vars(self).pop("changes", None)


class _Fitting:
    """A memory layout for some sizes, which smaller sizes fit too, whatever the guards say."""

    def __init__(
        self,
        source: SymbolicProgram,
        plan: Plan,
        room: Mapping[int, int],
        workspaces: Sequence[int],
        numbers: Mapping[str, int],
    ) -> None:
        self.plan, self.room, self.workspaces = plan, room, workspaces
        self._bytes = sum(room.values())
        sizes = source.part("sizes", numbers)
        self._sizes = (*room.values(), *workspaces) if sizes is None else sizes[:-1]

    @classmethod
    def of(cls, source: SymbolicProgram, whole: Program, numbers: Mapping[str, int]) -> _Fitting:
        """The layout of the program for these sizes."""
        room = {buffer.id: buffer.nbytes for buffer in whole.buffers}
        return cls(source, plan(whole), room, [call.workspace for call in whole.calls], numbers)

    def serves(self, needs: Sequence[int]) -> bool:
        """Whether what may grow fits, and takes no more than twice what it needs."""
        *sizes, total = needs
        wastes = self._bytes > LARGE and 2 * total < self._bytes
        return all(map(le, sizes, self._sizes)) and not wastes


def _whole_numbers(values: Iterable[Any]) -> None:
    """Raise ValueError where one is no whole number from 0 on."""
    numbers = [*values]
    if numbers and not ({*map(type, numbers)} == {int} and min(numbers) >= 0):
        raise ValueError("a number of a layout")


def _check_layout(
    plan: Plan, room: Mapping[int, int], workspaces: Sequence[int], program: Program
) -> None:
    """Raise ValueError where a temporary has no place in the arena that is as large as its room."""
    _whole_numbers((*plan.offsets.keys(), *plan.offsets.values(), *plan.workspaces.keys()))
    _whole_numbers((*plan.workspaces.values(), *room.keys(), *room.values()))
    used = {t.buffer for call in program.calls for _, t in (*call.reads, *call.writes)}
    temporary = {b.id for b in program.buffers if b.kind == "temp"}
    ends = [at + room[b] for b, at in plan.offsets.items()]
    ends += [at + workspaces[i] for i, at in plan.workspaces.items()]
    if (
        room.keys() != {b.id for b in program.buffers}
        or not temporary & used <= plan.offsets.keys() <= temporary
        or len(workspaces) != len(program.calls)
        or not {i for i, nbytes in enumerate(workspaces) if nbytes} <= plan.workspaces.keys()
        or max(ends, default=0) > plan.arena
        or any(at % ALIGN for at in (*plan.offsets.values(), *plan.workspaces.values()))
    ):
        raise ValueError("a temporary without a place")


def evaluated(
    source: SymbolicProgram, largest: Mapping[str, int], numbers: Mapping[str, int]
) -> tuple[Mapping[str, int], Program]:
    """The program for the largest sizes, or where it has no value there, for these; the sizes."""
    try:
        return largest, source.at(largest)
    except NoValue:
        return numbers, source.at(numbers)


class PlannedOpenProgram:
    """An open program, and the layout for the largest shape of its class.

    Where that is much too large, as for a small batch of a wide class, there are layouts for each
    size rounded up to a power of two.
    """

    seconds = 0.0
    """What lowering took, wherever that was."""

    def __init__(
        self,
        source: SymbolicProgram,
        largest: Mapping[str, int],
        layouts: Mapping[tuple[int, ...], _Fitting],
        whole: Program,
        numbers: Mapping[str, int],
    ) -> None:
        """`whole` is the program for the sizes `numbers`."""
        self.source, self.largest = source, largest
        self._layouts = dict(layouts)
        self._latest: tuple[Mapping[str, int], Program] | None = (numbers, whole)
        self.weights = {
            b.name: whole.constants[b.id]
            for b in whole.buffers
            if b.kind == "weight" and b.id in whole.constants
        }
        """What lowering made of weights, by name."""
        self.needs = tuple(
            b.name for b in whole.buffers if b.kind == "weight" and b.name not in self.weights
        )
        """The model's own weights that it reads."""

    @classmethod
    def of(
        cls, source: SymbolicProgram, largest: Mapping[str, int], numbers: Mapping[str, int]
    ) -> PlannedOpenProgram:
        """The open program with the layout for the largest sizes, or where it has no value for
        these, as they need not meet its guards, for `numbers`, which do.
        """
        largest, whole = evaluated(source, largest, numbers)
        layout = _Fitting.of(source, whole, largest)
        return cls(source, largest, {tuple(largest.values()): layout}, whole, largest)

    def layouts(self) -> dict[str, Any]:
        """The layouts as plain data, for a file."""
        return {
            "largest": dict(self.largest),
            "seconds": self.seconds,
            "of": [
                [list(sizes), list(layout.room.items()), layout.workspaces,
                 list(layout.plan.offsets.items()), list(layout.plan.workspaces.items()),
                 layout.plan.arena, layout.plan.naive, layout.plan.inplace,
                 layout.plan.order.after]
                for sizes, layout in self._layouts.items()
            ],
        }  # fmt: skip

    @classmethod
    def read(
        cls, source: SymbolicProgram, data: Mapping[str, Any], whole: Program,
        numbers: Mapping[str, int],
    ) -> PlannedOpenProgram:  # fmt: skip
        """The open program with the layouts that `layouts` described; `whole` as in `__init__`.

        Raises ValueError or TypeError for what is no layout of such a program.
        """
        largest, layouts = data["largest"], {}
        _whole_numbers(largest.values())
        if largest.keys() != numbers.keys():
            raise ValueError("the largest sizes")
        for sizes, room, workspaces, offsets, spaces, arena, naive, inplace, after in data["of"]:
            _whole_numbers((*sizes, *workspaces, arena, naive, inplace))
            order = CallOrder.of(after, len(whole.calls))
            layout = Plan(dict(offsets), dict(spaces), arena, naive, inplace, order)
            room = dict(room)
            _check_layout(layout, room, workspaces, whole)
            bounds = dict(zip(largest, sizes, strict=True))
            layouts[tuple(sizes)] = _Fitting(source, layout, room, workspaces, bounds)
        program = cls(source, largest, layouts, whole, numbers)
        program.seconds = float(data["seconds"])
        return program

    def at(self, numbers: Mapping[str, int]) -> PlannedProgram:
        """The Program for these sizes, and a layout that it fits."""
        latest, self._latest = self._latest, None
        program = latest[1] if latest is not None and latest[0] == numbers else None
        needs = self.source.part("sizes", numbers)
        if needs is None:  # all that may be larger for other sizes, and the bytes of all buffers
            program = self.source.at(numbers) if program is None else program
            sizes = [b.nbytes for b in program.buffers]
            needs = (*sizes, *[call.workspace for call in program.calls], sum(sizes))
        for bounds in (self.largest, self._nearer(numbers)):
            with contextlib.suppress(NoValue):  # as bounds need not meet the guards
                layout = self._for(bounds)
                if layout.serves(needs):
                    ready = layout.plan, self.source, layout.room, numbers, layout
                    return PlannedProgram(program, *ready)
        program = self.source.at(numbers) if program is None else program
        return PlannedProgram(program, plan(program), self.source, None, numbers)

    def _nearer(self, numbers: Mapping[str, int]) -> dict[str, int]:
        """Sizes slightly larger than these, from a small set, so that few layouts serve a class."""
        nearer = dict(self.largest)
        for name, number in numbers.items():
            if nearer[name] >= 2 * number:
                nearer[name] = 1 << (number - 1).bit_length()
        return nearer

    def _for(self, bounds: Mapping[str, int]) -> _Fitting:
        key = tuple(bounds.values())
        if key not in self._layouts:  # a new table, since a thread may be writing this one
            layout = _Fitting.of(self.source, self.source.at(bounds), bounds)
            self._layouts = {**self._layouts, key: layout}
        return self._layouts[key]

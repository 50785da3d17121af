"""Program -> Plan: temporaries to arena offsets by lifetime, in place where a call allows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnx_fuse.llir import Call, Program, Tensor

ALIGN = 256


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole allocation units."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class Plan:
    """Where the temporaries stand. `offsets` maps buffer ids, `workspaces` call indices, to bytes.

    `arena` is what they take, `naive` what they would if nothing shared memory.
    """

    offsets: Mapping[int, int]
    workspaces: Mapping[int, int]
    arena: int
    naive: int
    inplace: int

    def __str__(self) -> str:
        share = f"{self.arena / self.naive:.0%}" if self.naive else "-"
        return (
            f"arena {self.arena:,} bytes, {share} of the {self.naive:,} of "
            f"{len(self.offsets)} temporaries; {self.inplace} in place"
        )


def plan(program: Program) -> Plan:
    """Lay out the temporaries: largest first, each at the lowest offset free while it lives."""
    size = {b.id: b.nbytes for b in program.buffers if b.kind == "temp"}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, call in enumerate(program.calls):
        for _, tensor in (*call.reads, *call.writes):
            if tensor.buffer in size:
                first.setdefault(tensor.buffer, i)
                last[tensor.buffer] = i
    if program.tail is not None:
        for _, source in program.tail.inputs:
            if isinstance(source, Tensor) and source.buffer in last:
                last[source.buffer] = len(program.calls)
    root = {b: b for b in first}
    inplace = 0
    for i, call in enumerate(program.calls):
        for write, read in call.inplace:
            y, x = dict(call.writes)[write], dict(call.reads)[read]
            if _may_share(call, i, x, y, first, last, size):
                home = root[x.buffer]
                root[y.buffer] = home
                last[home] = last[y.buffer]
                # x is gone: no second output may take its place
                last[x.buffer] = max(last[x.buffer], i + 1)
                inplace += 1
    blocks = [(size[b], first[b], last[b], b) for b in first if root[b] == b]
    blocks += [
        (call.workspace, i, i, -1 - i) for i, call in enumerate(program.calls) if call.workspace
    ]
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    offsets: dict[int, int] = {}
    for nbytes, begin, end, key in sorted(blocks, key=lambda b: (-b[0], b[1])):
        at = 0
        for low, high, born, dead in placed:
            if born <= end and begin <= dead and at < high and low < at + aligned(nbytes):
                at = high
        offsets[key] = at
        placed.append((at, at + aligned(nbytes), begin, end))
        placed.sort()
    return Plan(
        {b: offsets[root[b]] for b in first},
        {-1 - key: at for key, at in offsets.items() if key < 0},
        max((high for _, high, _, _ in placed), default=0),
        sum(aligned(size[b]) for b in first),
        inplace,
    )


def _may_share(
    call: Call,
    i: int,
    x: Tensor,
    y: Tensor,
    first: Mapping[int, int],
    last: Mapping[int, int],
    size: Mapping[int, int],
) -> bool:
    """Whether `y` may take the place of `x`, which nothing else reads any more."""
    if x.buffer not in size or y.buffer not in size or x.buffer == y.buffer:
        return False
    if last[x.buffer] != i or first[y.buffer] != i or size[x.buffer] < size[y.buffer]:
        return False
    if x.offset or y.offset:
        return False
    others = [t for _, t in call.reads if t.buffer == x.buffer and t.strides != x.strides]
    return not others and not any(t.buffer == x.buffer for _, t in call.writes)

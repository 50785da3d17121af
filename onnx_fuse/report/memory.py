"""The memory of a program as a page shows it: the arena over the calls, and who holds the peak."""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from onnx_fuse.program.call import Call, Program
from onnx_fuse.report.page import Part, Section, Table, View
from onnx_fuse.runtime.plan import Plan, aligned, plan

Rect: TypeAlias = "tuple[int, int, int, int, int, str]"
"""First call, call after the last, lowest address, the one above the highest, kind, words."""

_HOLDERS = 12
_NAMED = 2  # nodes named for a call


def section(program: Program) -> Section:
    """The memory plan of a program as rectangles: calls from left to right, addresses upwards."""
    arena_plan = plan(program)
    rects = _rects(program, arena_plan)
    live = live_bytes(program, arena_plan)
    peak = max(range(len(live)), key=live.__getitem__, default=0)
    parts: list[Part] = []
    if rects:
        parts.append(
            View(
                "plane",
                f"Memory plan of {len(rects)} temporaries over {len(live)} calls",
                {
                    "title": f"arena of {arena_plan.arena:,} bytes over the calls",
                    "x": {"label": "call", "high": len(live)},
                    "y": {"label": "address", "high": arena_plan.arena, "unit": "B"},
                    "kinds": ["temporary", "workspace"],
                    "rects": rects,
                    "line": [[i + step, size] for i, size in enumerate(live) for step in (0, 1)],
                    "marks": [{"x": peak + 0.5, "label": f"peak {live[peak]:,} bytes"}],
                },
            )
        )
        holders = sorted(
            (r for r in rects if r[0] <= peak < r[1]), key=lambda r: r[3] - r[2], reverse=True
        )[:_HOLDERS]
        rows = [[r[5].replace("\n", ", "), f"{r[3] - r[2]:,}"] for r in holders]
        title = f"temporaries at the peak, at call {peak}"
        parts.append(Table(title, ["temporary", "bytes"], rows))
    kinds: Counter[str] = Counter()
    for buffer in program.buffers:
        kinds[buffer.kind] += buffer.nbytes
    rows = [[kind, f"{size:,}"] for kind, size in kinds.most_common() if kind != "temp"]
    rows.append(["arena", f"{arena_plan.arena:,}"])
    rows.append(["temporaries, if nothing shared memory", f"{arena_plan.naive:,}"])
    parts.append(Table("all memory", ["", "bytes"], rows))
    note = (
        "Each rectangle is a temporary. It spans the calls from its first use to its last, and its "
        "bytes. The line shows the bytes in use at each call."
    )
    return Section("Memory", parts, note)


def live_bytes(program: Program, plan: Plan) -> list[int]:
    """Bytes of temporaries and workspaces that are alive at each call, shared memory once."""
    spans: list[list[tuple[int, int]]] = [[] for _ in program.calls]
    for start, stop, low, high, _, _ in _rects(program, plan):
        for i in range(start, stop):
            spans[i].append((low, high))
    live = []
    for standing in spans:
        total, end = 0, 0
        for low, high in sorted(standing):
            total += max(0, high - max(low, end))
            end = max(end, high)
        live.append(total)
    return live


def _rects(program: Program, plan: Plan) -> list[Rect]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, call in enumerate(program.calls):
        for _, tensor in (*call.reads, *call.writes):
            first.setdefault(tensor.buffer, i)
            last[tensor.buffer] = i
    for stage in program.stages:
        for _, source in stage.inputs:
            if source is not None and source.buffer in last:
                last[source.buffer] = len(program.calls) - 1
    rects: list[Rect] = []
    for buffer in program.buffers:
        if buffer.id in plan.offsets and buffer.id in first:
            low = plan.offsets[buffer.id]
            start, end = first[buffer.id], last[buffer.id]
            words = f"{made_by(program.calls[start])}\n{buffer.nbytes:,} bytes, {start} to {end}"
            rects.append((start, end + 1, low, low + aligned(buffer.nbytes), 0, words))
    for i, low in plan.workspaces.items():
        call = program.calls[i]
        words = f"workspace of {made_by(call)}\n{call.workspace:,} bytes, call {i}"
        rects.append((i, i + 1, low, low + aligned(call.workspace), 1, words))
    return rects


def made_by(call: Call) -> str:
    """A call by its kernel and the nodes it computes."""
    more = " …" if len(call.nodes) > _NAMED else ""
    return f"{call.kernel}: {' '.join(call.nodes[:_NAMED])}{more}"

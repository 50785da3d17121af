"""Unread and repeated calls go; launches call early for those that come alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from onnx_fuse.cuda.source import source_text
from onnx_fuse.program.call import Call
from onnx_fuse.program.passes.callgraph import moved
from onnx_fuse.program.problem import Hardware
from onnx_fuse.program.size import rough, wide_class_of


def drop_unread(calls: Sequence[Call], keep: Collection[int]) -> list[Call]:
    """Without the calls whose results nothing reads."""
    live, kept = set(keep), []
    for call in reversed(calls):
        if any(t.buffer in live for _, t in call.writes):
            live.update(t.buffer for _, t in call.reads)
            kept.append(call)
    return kept[::-1]


def share(calls: Sequence[Call], keep: Collection[int]) -> list[Call]:
    """Equal calls on equal operands run once."""
    writers: dict[int, int] = defaultdict(int)
    for call in calls:
        for _, tensor in call.writes:
            writers[tensor.buffer] += 1
    seen: dict[object, Call] = {}
    same: dict[int, int] = {}
    kept = []
    for old in calls:
        call = replace(old, reads=tuple((n, moved(t, same)) for n, t in old.reads))
        own = [t.buffer for _, t in call.writes]
        pure = all(writers[b] == 1 and b not in keep for b in own)
        # a buffer that is written again later reads differently then
        pure = pure and all(writers[t.buffer] <= 1 for _, t in call.reads)
        pure = pure and not any(t.buffer in keep for _, t in call.reads)
        outputs = tuple((n, replace(t, buffer=-1)) for n, t in call.writes)
        key = (call.launches, call.problem, call.expression, call.host, call.reads, outputs)
        if pure and key in seen:
            for (_, a), (_, b) in zip(call.writes, seen[key].writes, strict=True):
                same[a.buffer] = b.buffer
            continue
        if pure:
            seen[key] = call
        kept.append(call)
    return kept


def call_early(calls: Sequence[Call], hw: Hardware) -> tuple[Call, ...]:
    """The calls; a launch whose next one's blocks take a multiprocessor each calls for it at once.

    Where a block falls idle the next one's then prepares itself. Smaller blocks would crowd there.
    """
    found = [list(call.launches) for call in calls]
    places = [(i, j) for i, launches in enumerate(found) for j in range(len(launches))]
    for (i, j), (after, first) in pairwise(places):
        launch, alone = found[i][j], 2 * found[after][first].smem > hw.smem_per_block
        few = rough(prod(launch.grid), wide_class_of) <= 128  # these do it anyway
        if alone and not few and "NEXT_ALONE" in source_text(launch.source):
            defines = tuple(sorted({**dict(launch.defines), "NEXT_ALONE": "1"}.items()))
            found[i][j] = replace(launch, defines=defines)
    return tuple(
        replace(call, launches=tuple(launches)) for call, launches in zip(calls, found, strict=True)
    )

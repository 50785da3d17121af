"""Common subexpressions: calls whose results nothing reads go, equal ones run once."""

from __future__ import annotations

from dataclasses import replace

from onnx_fuse.program.call import Call, Tensor
from onnx_fuse.program.passes.callgraph import Calls, rename_buffer


def eliminate_dead(calls: Calls) -> list[Call]:
    """Drop the calls whose results nothing reads."""
    live, remaining = set(calls.keep), []
    for call in reversed(calls.calls):
        if any(t.buffer in live for _, t in call.writes):
            live.update(t.buffer for _, t in call.reads)
            remaining.append(call)
    return remaining[::-1]


def eliminate_common(calls: Calls) -> list[Call]:
    """Run equal calls on equal operands once."""
    writers, keep = calls.writers, calls.keep
    seen: dict[object, Call] = {}
    same: dict[int, int] = {}
    remaining = []
    for old in calls.calls:
        call = old
        if any(t.buffer in same for _, t in old.reads):
            call = replace(old, reads=tuple((n, rename_buffer(t, same)) for n, t in old.reads))
        results = [t.buffer for _, t in call.writes]
        pure = all(len(writers[b]) == 1 and b not in keep for b in results)
        # a buffer that is written again later reads differently then
        pure = pure and all(len(writers[t.buffer]) <= 1 for _, t in call.reads)
        pure = pure and not any(t.buffer in keep for _, t in call.reads)
        if not pure:
            remaining.append(call)
            continue
        outputs = tuple(
            (n, Tensor(-1, t.dtype, t.shape, t.strides, t.offset)) for n, t in call.writes
        )
        key = (call.launches, call.problem, call.expression, call.host, call.reads, outputs)
        first = seen.setdefault(key, call)
        if first is call:
            remaining.append(call)
            continue
        for (_, a), (_, b) in zip(call.writes, first.writes, strict=True):
            same[a.buffer] = b.buffer
    return remaining

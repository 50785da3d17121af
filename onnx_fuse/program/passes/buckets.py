"""Collectives of one bucket become one call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from onnx_fuse.program.call import Call
from onnx_fuse.program.passes.callgraph import Calls, nodes_of
from onnx_fuse.program.problem import Collective


def by_bucket(calls: Calls) -> list[Call]:
    """The calls, with the collectives of a bucket as one call.

    A bucket that is reduced stands where its last operand is ready; one that is gathered stands
    where its last collective stood. All ranks have the collectives in this order.
    """
    members: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i, call in enumerate(calls.calls):
        if isinstance(call.problem, Collective):
            members[call.problem.kind, call.problem.bucket].append(i)
            calls.now[i] = ()
    gone = {i for places in members.values() for i in places}
    for (kind, _), places in members.items():
        apart = [calls.calls[i] for i in places]
        ends = [w for call in apart for _, t in call.reads for w in calls.writers[t.buffer][-1:]]
        ready = max((i for i in ends if i < places[-1]), default=places[-1])
        at = places[-1] if kind == "AllGather" or ready in gone else ready
        calls.now[at] = (*calls.now[at], _together(apart))
    return calls.left()


def first_buckets(calls: Sequence[Call]) -> list[int | None]:
    """The first bucket that needs the results of each call, None where none does."""
    needs: dict[int, int] = {}  # buffer -> the first bucket that reads it, or what is made of it
    buckets: list[int | None] = []
    for call in reversed(calls):
        collective = call.problem.bucket if isinstance(call.problem, Collective) else None
        readers = [needs[t.buffer] for _, t in call.writes if t.buffer in needs]
        bucket = min(readers, default=None) if collective is None else collective
        buckets.append(bucket)
        if bucket is None:
            continue
        for _, tensor in call.reads:
            needs[tensor.buffer] = min(bucket, needs.get(tensor.buffer, bucket))
    return buckets[::-1]


def last_buckets(calls: Sequence[Call]) -> list[int | None]:
    """The last bucket whose results each call waits for, None where it waits for none."""
    last: dict[int, int] = {}  # buffer -> the last bucket whose result it depends on
    buckets: list[int | None] = []
    for call in calls:
        waited = [last[t.buffer] for _, t in call.reads if t.buffer in last]
        if isinstance(call.problem, Collective):
            waited.append(call.problem.bucket)
        bucket = max(waited, default=None)
        buckets.append(bucket)
        if bucket is not None:
            last |= dict.fromkeys((t.buffer for _, t in call.writes), bucket)
    return buckets


def _together(members: Sequence[Call]) -> Call:
    if len(members) == 1:
        return members[0]
    problems = [call.problem for call in members if isinstance(call.problem, Collective)]
    problem = Collective(
        problems[0].kind,
        tuple(size for p in problems for size in p.sizes),
        tuple(dtype for p in problems for dtype in p.dtypes),
        problems[0].ranks,
        problems[0].bucket,
    )
    reads = {f"x.{i}": t for i, call in enumerate(members) for _, t in call.reads}
    writes = {f"y.{i}": t for i, call in enumerate(members) for _, t in call.writes}
    pairs = tuple((f"y.{i}", f"x.{i}") for i, call in enumerate(members) if call.inplace)
    name, nodes = f"{problem.kind} x{len(members)}", nodes_of(*members)
    return Call.of(name, nodes, problem, reads, writes, bytes=problem.bytes, inplace=pairs)

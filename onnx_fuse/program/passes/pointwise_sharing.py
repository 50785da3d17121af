"""Pointwise calls that read the same tensors share their loads.

Two that do not depend on each other become one call: the two halves of a rotation, or the gradients
of both factors of a product. A call that reads what an earlier one made of tensors that it reads as
well makes it again: this saves a load, and often a tensor that would stay until the backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from onnx_fuse.program.call import Call, Tensor
from onnx_fuse.program.passes.callgraph import Calls, in_order, writers_of
from onnx_fuse.program.passes.pointwise_fusion import (
    MAX_OPERANDS,
    forget_unread,
    join,
    without_stores,
)

MAX_STEPS = 8
"""Steps that are made again for a load: an activation, but no whole chain."""


def share_loads(calls: Calls) -> list[Call]:
    """The calls, those that read the same tensors joined, then results made again where they are
    read together with what they are made of.
    """
    return forget_unread(_recomputed(_joined(calls.calls)), calls.keep)


def _large(tensor: Tensor) -> bool:
    """Whether every element of a view is another one in memory."""
    return all(step for size, step in zip(tensor.shape, tensor.strides, strict=True) if size != 1)


def _joined(calls: Sequence[Call]) -> list[Call]:
    """Pairs that share a load become one call at the later one's place; copies have launches of
    their own kind that they share.
    """
    now: list[Call | None] = list(calls)
    readers: dict[Tensor, list[int]] = defaultdict(list)
    for j, call in enumerate(calls):
        if call.expression is None or not (call.expression.steps or call.expression.rows):
            continue
        places = {call.reads[row.index][1] for row in call.expression.rows}
        shared = [t for _, t in call.reads if _large(t) or t in places]
        for i in sorted({i for t in shared for i in readers[t]}, reverse=True):
            earlier, later = now[i], now[j]
            if earlier is None or later is None or not _may_wait(now, i, j):
                continue
            both = join(earlier, later, siblings=True)
            if both is None or len(both.reads) + len(both.writes) > MAX_OPERANDS:
                continue
            now[i], now[j] = None, both
        for t in shared:
            readers[t].append(j)
    return [call for call in now if call is not None]


def _may_wait(calls: Sequence[Call | None], i: int, j: int) -> bool:
    """Whether call `i` may run as late as call `j`, which does not read what it makes."""
    call = calls[i]
    assert call is not None
    behind = [(k == j, calls[k]) for k in range(i + 1, j + 1)]
    return not any(other and in_order(call, other, siblings=last) for last, other in behind)


def _recomputed(calls: Sequence[Call]) -> list[Call]:
    """Calls that read a result and all that it was made of make it themselves."""
    now = list(calls)
    writers = writers_of(calls)
    for j, call in enumerate(calls):
        if call.expression is None:
            continue
        for _, result in call.reads:
            writes = writers[result.buffer]
            if len(writes) == 1 and writes[0] < j and _large(result):
                now[j] = _with_own(now[j], calls[writes[0]], result, writes[0], writers) or now[j]
    return now


def _with_own(
    call: Call, maker: Call, result: Tensor, at: int, writers: dict[int, list[int]]
) -> Call | None:
    """The call with the steps by which `maker`, at place `at`, makes what it reads; or None."""
    if maker.expression is None or result not in [t for _, t in maker.writes]:
        return None
    alone = without_stores(maker, lambda buffer: buffer != result.buffer)
    assert alone.expression is not None
    sources = [t for _, t in alone.reads]
    operands = {t for _, t in call.reads}
    if not sources or alone.expression.rows or len(alone.expression.steps) > MAX_STEPS:
        return None
    if any(t not in operands or any(k > at for k in writers[t.buffer]) for t in sources):
        return None
    both = join(alone, call)
    return both and without_stores(both, lambda buffer: buffer == result.buffer)

"""Pointwise calls walk their elements in the order in which the result stands in memory."""

from __future__ import annotations

from dataclasses import replace

from onnx_fuse.program.call import Call
from onnx_fuse.program.passes.callgraph import Calls


def in_memory_order(calls: Calls) -> list[Call]:
    """The calls, the axes of their operands permuted so that the result's strides descend.

    What looks at dense operands afterwards then serves images in any order, and neighbouring
    threads write neighbouring elements.
    """
    return [_ordered(call) for call in calls.calls]


def _ordered(call: Call) -> Call:
    expression = call.expression
    if expression is None or expression.counts:
        return call
    (_, y), *_ = call.writes
    axes = list(range(len(y.shape)))
    if y.dense or len(axes) < 3 or any(not step for step in y.strides):
        return call
    order = sorted(axes, key=lambda axis: -y.strides[axis])
    if order == axes:
        return call
    reads, writes = (tuple((n, t.permute(order)) for n, t in p) for p in (call.reads, call.writes))
    return replace(call, reads=reads, writes=writes)

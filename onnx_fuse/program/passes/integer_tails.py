"""What stands between convolutions of integers goes into their tails, from codes to codes.

A DequantizeLinear is made where it is read, from one byte an element, and a chain ends where it is
quantized: so a convolution stores codes, and the last one before a sum of two takes the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial

from onnx_fuse.program.call import Call
from onnx_fuse.program.passes.callgraph import Calls, rewrite
from onnx_fuse.program.passes.epilogue_fusion import tail
from onnx_fuse.program.passes.integer_sums import sums_in_steps
from onnx_fuse.program.passes.pointwise_fusion import forget_unread, fuse, join, without_stores
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.program.problems import IntegerConv

_STEPS = 8
"""Steps that are made again where they are read: those of a DequantizeLinear."""


def dequantize_where_read(calls: Calls) -> Sequence[Call]:
    """The calls of which pointwise readers of floats made of a byte each read that byte."""
    if not _integers(calls.calls):
        return calls.calls
    readers, writers = calls.readers, calls.writers
    now = list(calls.calls)
    for i, call in enumerate(calls.calls):
        if call.expression is None or (len(call.reads), len(call.writes)) != (1, 1):
            continue
        (_, codes), (_, floats) = call.reads[0], call.writes[0]
        narrow = ITEMSIZE[codes.dtype] == 1 < ITEMSIZE[floats.dtype]
        if not narrow or len(call.expression.steps) > _STEPS or call.expression.rows:
            continue
        if any(at >= i for at in writers[codes.buffer]) or writers[floats.buffer] != [i]:
            continue
        for j in dict.fromkeys(readers[floats.buffer]):
            if (both := join(call, now[j])) is not None:
                now[j] = without_stores(both, partial(operator.eq, floats.buffer))
    return forget_unread(now, calls.keep)


def quantize_in_tails(calls: Calls) -> Sequence[Call]:
    """The calls with chains from codes to codes, those behind an IntegerConv as its tail."""
    if not _integers(calls.calls):
        return calls.calls
    chains = [sums_in_steps(call) for call in fuse(calls.calls, calls.keep, narrow=False)]
    return rewrite(tail, Calls(chains, calls.keep, calls.ctx))


def _integers(calls: Sequence[Call]) -> bool:
    return any(isinstance(call.problem, IntegerConv) for call in calls)

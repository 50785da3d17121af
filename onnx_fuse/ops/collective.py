"""Collectives: operators over the tensors of all ranks, the processes that train one model.

Their bodies say what they give where every rank holds the same tensor, divided by the number of
ranks where they add up: shapes are inferred from them. A graph that holds one is run by a backend
that has a communicator. Calls of one `bucket` are made together.
"""

from __future__ import annotations

from onnx_fuse.onnx.common import FUSE
from onnx_fuse.ops.opdef import NoGrad, OpDef, register

COLLECTIVES = ("AllReduce", "ReduceScatter", "AllGather")
"""The operators that wait for all ranks."""
_REASON = NoGrad("gradients are reduced after the backward, nothing is differentiated through it")
_PART = """
    count = Constant <value_int: int = @ranks> ()
    shape = Shape (x)
"""

register(
    # y = the sum of all ranks' x
    OpDef(
        "AllReduce",
        FUSE,
        "AllReduce <ranks: int = 1, bucket: int = 0> (x) => (y) { y = Identity (x) }",
        grad=_REASON,
    ),
    # y [n / ranks] = the rank's part of the sum of all ranks' x [n]
    OpDef(
        "ReduceScatter",
        FUSE,
        f"""ReduceScatter <ranks: int = 1, bucket: int = 0> (x) => (y) {{{_PART}
    zero = Constant <value = int64[1] {{0}}> ()
    part = Div (shape, count)
    y = Slice (x, zero, part)
}}""",
        grad=_REASON,
    ),
    # y [ranks n] = all ranks' x [n] in their order
    OpDef(
        "AllGather",
        FUSE,
        f"""AllGather <ranks: int = 1, bucket: int = 0> (x) => (y) {{{_PART}
    zero = Constant <value = int64[1] {{0}}> ()
    all = Constant <value = int64[1] {{-1}}> ()
    ranks = Reshape (count, all)
    row = Unsqueeze (x, zero)
    wanted = Concat <axis = 0> (ranks, shape)
    rows = Expand (row, wanted)
    y = Reshape (rows, all)
}}""",
        grad=_REASON,
    ),
)

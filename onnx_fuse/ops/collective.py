"""Collectives: operators over the tensors of all ranks, the processes that train one model.

Their bodies say what they give where every rank holds the same tensor, divided by the number of
ranks where they add up: shapes are inferred from them. A graph that holds one is run by a backend
that has a communicator. Calls of one `bucket` are made together.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_fuse.ir.build import Builder
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.opdef import NoGrad, OpDef, register

COLLECTIVES = ("AllReduce", "ReduceScatter", "AllGather")
"""The operators that wait for all ranks."""
_REASON = NoGrad("gradients are reduced after the backward, nothing is differentiated through it")
BACKWARD = 1 << 24
"""What is added to a bucket by the reduction of its gradient."""
_PART = """
    count = Constant <value_int: int = @ranks> ()
    shape = Shape (x)
"""


def _all_reduce_grad(
    op: Builder, node: ir.Node, dys: Sequence[ir.Value | None]
) -> list[ir.Value | None]:
    """dx = the sum of all ranks' dy: each rank's x is in the sum of every one."""
    (dy,) = dys
    if dy is None:
        return [None]
    ranks, bucket = (node.attributes[name].as_int() for name in ("ranks", "bucket"))
    dx: ir.Value = op.node("AllReduce", [dy], domain=FUSE, ranks=ranks, bucket=bucket + BACKWARD)
    dx.type, dx.shape = dy.type, node.outputs[0].shape
    return [dx]


register(
    # y = the sum of all ranks' x
    OpDef(
        "AllReduce",
        FUSE,
        "AllReduce <ranks: int = 1, bucket: int = 0> (x) => (y) { y = Identity (x) }",
        grad=_all_reduce_grad,
    ),
    # y [n / ranks] = the rank's part of the sum of all ranks' x [n]
    OpDef(
        "ReduceScatter",
        FUSE,
        f"""ReduceScatter <ranks: int = 1, bucket: int = 0> (x) => (y) {{{_PART}
    y = Slice (x, Constant <value = int64[1] {{0}}> (), shape / count)
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
    y = Reshape (Expand (Unsqueeze (x, zero), Concat <axis = 0> (ranks, shape)), all)
}}""",
        grad=_REASON,
    ),
)

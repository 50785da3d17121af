"""Softmax and LogSoftmax."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.lower.context import Context, Lowering, around, floats
from onnx_fuse.program.problems import Softmax


def softmax(ctx: Context, node: ir.Node) -> None:
    """y = exp(x - max) / sum exp(x - max) along one axis; LogSoftmax: its logarithm."""
    x = floats(ctx.dense(node, 0))
    y = ctx.output(node, 0)
    axis = ctx.attr(node, "axis", -1) % max(1, len(x.shape))
    problem = Softmax(*around(x.shape or (1,), axis), x.dtype, node.op_type == "LogSoftmax")
    ctx.select(node, problem, {"x": x}, {"y": y}, inplace=[("y", "x")])


LOWERINGS: dict[tuple[str, str], Lowering] = {("", "Softmax"): softmax, ("", "LogSoftmax"): softmax}

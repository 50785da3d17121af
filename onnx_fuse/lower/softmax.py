"""Softmax and LogSoftmax."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from onnx_fuse.cuda.macros import FLOATS
from onnx_fuse.lower.context import Context, Lowering
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.problems import Softmax


def softmax(ctx: Context, node: ir.Node) -> str | None:
    """y = exp(x - max) / sum exp(x - max) along one axis; LogSoftmax: its logarithm."""
    x: Tensor = ctx.dense(node, 0)
    if x.dtype not in FLOATS:
        return f"no kernel for {x.dtype}"
    y = ctx.output(node, 0)
    axis = ctx.attr(node, "axis", -1) % max(1, len(x.shape))
    shape = x.shape or (1,)
    problem = Softmax(
        prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]), x.dtype,
        node.op_type == "LogSoftmax",
    )  # fmt: skip
    return ctx.select(node, problem, {"x": x}, {"y": y}, inplace=[("y", "x")])


LOWERINGS: dict[tuple[str, str], Lowering] = {("", "Softmax"): softmax, ("", "LogSoftmax"): softmax}

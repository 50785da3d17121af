"""SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import onnx_ir as ir

from onnx_fuse.cuda.macros import accumulator
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.context import Context, Lowering, Unserved, floats
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.losses import CrossEntropy


def cross_entropy(ctx: Context, node: ir.Node) -> None:
    """-w[t] log p[t] by row; their sum, or their mean weighted by w; optionally log p itself."""
    x, target = floats(ctx.dense(node, 0)), ctx.dense(node, 1)
    classes, inner = x.shape[1], prod(x.shape[2:])
    count = x.shape[0] * inner
    kind = ctx.attr(node, "reduction", "mean")
    loss = ctx.output(node, 0)
    reads: dict[str, Tensor] = {"x": x, "target": target}
    if ctx.has(node, 2):
        reads["weight"] = ctx.dense(node, 2)
    ignored = ctx.attr(node, "ignore_index")
    # the mean of no rows is 0 in onnxruntime, unless their weights are added up: 0 / 0
    mean = kind == "mean" and bool(count or "weight" in reads or ignored is not None)
    acc = accumulator(x.dtype)
    rows = ctx.scratch("float64" if acc == "double" else "float32", (max(count, 1), 2))
    writes = {"loss": loss} if kind == "none" else {"rows": rows}
    if len(node.outputs) > 1 and ctx.wants(node, 1):
        writes["log_prob"] = ctx.output(node, 1)
    problem = CrossEntropy(
        "rows", count, classes, inner, x.dtype, target.dtype, ignored,
        node.op_type == "SoftmaxCrossEntropyLoss", mean,
    )  # fmt: skip
    if count:
        ctx.select(node, problem, reads, writes)
    if kind != "none":
        ctx.select(node, replace(problem, stage="total"), {"rows": rows}, {"loss": loss})


def cross_entropy_grad(ctx: Context, node: ir.Node) -> None:
    """dx = slope (softmax(x) - [class is the label]); label and slope [N, 1, ...]."""
    x, target = floats(ctx.dense(node, 0)), ctx.dense(node, 1)
    if target.dtype not in ("int32", "int64"):
        raise Unserved("no-kernel", what=f"labels of {target.dtype}")
    classes, inner = x.shape[1], prod(x.shape[2:])
    count = x.shape[0] * inner
    weight_shape = (x.shape[0], 1, *x.shape[2:])
    if target.shape != weight_shape:
        raise Unserved("misfit", what="its labels", to="its rows")
    slope = ctx.contiguous(ctx.view(node, 2).expand(weight_shape))
    dx = ctx.output(node, 0, x.shape, x.dtype)
    problem = CrossEntropy("grad", count, classes, inner, x.dtype, target.dtype)
    reads = {"x": x, "target": target, "slope": slope}
    ctx.select(node, problem, reads, {"dx": dx}, inplace=[("dx", "x")])


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "SoftmaxCrossEntropyLoss"): cross_entropy,
    ("", "NegativeLogLikelihoodLoss"): cross_entropy,
    (FUSE, "SoftmaxCrossEntropyGrad"): cross_entropy_grad,
}

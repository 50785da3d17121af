"""SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from onnx_fuse.cuda.macros import C_TYPES, FLOATS, accumulator, defines
from onnx_fuse.lower.reduce import block_of, team, vector
from onnx_fuse.onnx.common import FUSE
from onnx_fuse.program.call import Context, Lowering, Tensor
from onnx_fuse.program.problem import Launch, Num, Ptr


def _team(
    x: Tensor, target: Tensor, classes: int, inner: int, **more: object
) -> tuple[int, int, tuple[tuple[str, str], ...]]:
    """Threads a row, threads a block, and the macros of loss/cross_entropy.cu."""
    vec = vector(classes, x.dtype) if inner == 1 else 1
    threads = min(512, team(x.shape[0] * inner, classes, vec)) if inner == 1 else 1
    block = block_of(threads)
    macros = {"LOG_SOFTMAX": True, "MEAN": False, **more}
    types = {"T": C_TYPES[x.dtype], "I": C_TYPES[target.dtype], "ACC": accumulator(x.dtype)}
    return threads, block, defines(**types, **macros, VEC=vec, TEAM=threads, BLOCK=block)


def cross_entropy(ctx: Context, node: ir.Node) -> str | None:
    """-w[t] log p[t] by row; their sum, or their mean weighted by w; optionally log p itself."""
    x, target = ctx.dense(node, 0), ctx.dense(node, 1)
    if x.dtype not in FLOATS:
        return f"no kernel for {x.dtype}"
    classes, inner = x.shape[1], prod(x.shape[2:])
    count = x.shape[0] * inner
    kind = ctx.attr(node, "reduction", "mean")
    loss = ctx.output(node, 0)
    reads: dict[str, Tensor] = {"x": x, "target": target}
    if ctx.has(node, 2):
        reads["weight"] = ctx.dense(node, 2)
    acc = accumulator(x.dtype)
    rows = ctx.scratch("float64" if acc == "double" else "float32", (max(count, 1), 2))
    writes = {"loss": loss} if kind == "none" else {"rows": rows}
    if len(node.outputs) > 1 and ctx.wants(node, 1):
        writes["log_prob"] = ctx.output(node, 1)
    ignored = ctx.attr(node, "ignore_index")
    kind_macros = {"LOG_SOFTMAX": node.op_type == "SoftmaxCrossEntropyLoss", "MEAN": kind == "mean"}
    threads, block, macros = _team(x, target, classes, inner, **kind_macros)
    numbers = (count, classes, inner, -(2**62) if ignored is None else ignored)
    names = ("x", "target", "weight", "loss", "rows", "log_prob")
    if count:
        launch = Launch(
            "loss/cross_entropy.cu", "cross_entropy_row", (-(-count * threads // block), 1, 1),
            (block, 1, 1), (*map(Ptr, names), *(Num("i64", n) for n in numbers)), macros,
        )  # fmt: skip
        ctx.call(node, launch, reads, writes)
    if kind != "none":
        total = Launch(
            "loss/cross_entropy.cu", "cross_entropy_total", (1, 1, 1), (1024, 1, 1),
            (Ptr("rows"), Ptr("loss"), Num("i64", count)), macros,
        )  # fmt: skip
        ctx.call(node, total, {"rows": rows}, {"loss": loss})
    return None


def cross_entropy_grad(ctx: Context, node: ir.Node) -> str | None:
    """dx = slope (softmax(x) - [class is the label]); label and slope [N, 1, ...]."""
    x, target = ctx.dense(node, 0), ctx.dense(node, 1)
    if x.dtype not in FLOATS or target.dtype not in ("int32", "int64"):
        return f"no kernel for {x.dtype}"
    classes, inner = x.shape[1], prod(x.shape[2:])
    count = x.shape[0] * inner
    wanted = (x.shape[0], 1, *x.shape[2:])
    if target.shape != wanted:
        return "the labels are not one a row"
    slope = ctx.contiguous(ctx.view(node, 2).expand(wanted))
    dx = ctx.output(node, 0, x.shape, x.dtype)
    if not x.size:
        return None
    threads, block, macros = _team(x, target, classes, inner)
    launch = Launch(
        "loss/cross_entropy.cu", "cross_entropy_grad", (-(-count * threads // block), 1, 1),
        (block, 1, 1),
        (*map(Ptr, ("x", "target", "slope", "dx")),
         *(Num("i64", n) for n in (count, classes, inner))),
        macros,
    )  # fmt: skip
    reads = {"x": x, "target": target, "slope": slope}
    ctx.call(node, launch, reads, {"dx": dx}, inplace=[("dx", "x")])
    return None


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "SoftmaxCrossEntropyLoss"): cross_entropy,
    ("", "NegativeLogLikelihoodLoss"): cross_entropy,
    (FUSE, "SoftmaxCrossEntropyGrad"): cross_entropy_grad,
}

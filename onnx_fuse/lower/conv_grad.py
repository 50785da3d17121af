"""The weight's gradient of a convolution, and the gradient of a MaxPool."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from onnx_fuse.cuda.macros import FLOATS
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.channels_last import channels_last, in_stretch, stored_last
from onnx_fuse.lower.context import Context, Lowering, Unserved, copy
from onnx_fuse.lower.conv import triple, window
from onnx_fuse.lower.conv_nhwc import in_runs
from onnx_fuse.program.problems import ConvWeightGrad, MaxPoolGrad


def weight_grad(ctx: Context, node: ir.Node) -> None:
    """ConvWeightGrad: sums over the pixels of dy and x, whose channels are made the last axis."""
    dy, x = ctx.view(node, 0), ctx.view(node, 1)
    rank = len(x.shape) - 2
    if not 1 <= rank <= 3 or not (dy.size and x.size):
        raise Unserved("no-kernel", what=f"{rank} spatial axes, or nothing to sum")
    groups, kernel = ctx.attr(node, "group", 1), ctx.attr(node, "kernel_shape")
    taps = window(ctx, node, kernel, x.shape[2:], dy.shape[2:])
    channels = x.shape[1] // groups
    padded = -(-channels // 8) * 8 if groups == 1 else channels  # an access takes 8 of them
    if rank == 3 and padded != channels:
        raise Unserved("no-kernel", what=f"{channels} channels of a volume, no multiple of 8")
    math = ctx.math if x.dtype == "float32" else "ieee"
    problem = ConvWeightGrad(
        x.shape[0], groups, padded, dy.shape[1] // groups, triple(x.shape[2:]),
        triple(dy.shape[2:]), taps, x.dtype, x.dtype, math=math,
    )  # fmt: skip
    if not ctx.serves(problem):
        raise Unserved("no-kernel", what="its type, channels or axes")
    slopes = ctx.contiguous(channels_last(dy))
    dw = ctx.output(node, 0, (dy.shape[1], channels, *kernel), x.dtype)
    if padded == channels:
        reads = {"x": ctx.contiguous(channels_last(x)), "dy": slopes}
        return ctx.select(node, problem, reads, {"dw": dw})
    few = replace(problem, channels=channels)
    padded, wide, pixel = in_runs(ctx, node, few, x, 8)
    sums = ctx.scratch(x.dtype, (dy.shape[1], padded.channels, *padded.window.kernel))
    ctx.select(node, padded, {"x": wide, "dy": slopes}, {"dw": sums})
    _, high, across = taps.kernel
    each = across if taps.dilations[2] == 1 else 1
    rows = high * across // each
    steps = (padded.channels * rows, pixel * rows, rows, 1)
    # [filters, pixels of a row's run, their channels, rows]
    run = replace(sums, shape=(dy.shape[1], each, channels, rows), strides=steps)
    copy(ctx, node, run.permute((0, 2, 3, 1)), dw.view((dy.shape[1], channels, rows, each)))


def max_pool_grad(ctx: Context, node: ir.Node) -> None:
    """MaxPoolGrad: dy added to the first maximum of each window of x."""
    dy, x = ctx.view(node, 0), ctx.view(node, 1)
    rank = len(x.shape) - 2
    if x.dtype not in FLOATS or not 1 <= rank <= 3:
        raise Unserved("no-kernel", what=f"{x.dtype} in {rank} axes")
    if not dy.size:
        raise Unserved("empty")
    taps = window(ctx, node, ctx.attr(node, "kernel_shape"), x.shape[2:], dy.shape[2:])
    batch, channels = x.shape[:2]
    last = in_stretch(ctx, x)
    problem = MaxPoolGrad(
        batch if last else batch * channels, channels if last else 1, triple(x.shape[2:]),
        triple(dy.shape[2:]), taps, x.dtype,
    )  # fmt: skip
    dx = ctx.output(node, 0, x.shape, x.dtype)
    if last:
        dx = channels_last(stored_last(ctx, node, dx))
    tensors = (ctx.contiguous(channels_last(t) if last else t) for t in (x, dy))
    ctx.select(node, problem, dict(zip(("x", "dy"), tensors, strict=True)), {"dx": dx})


LOWERINGS: dict[tuple[str, str], Lowering] = {
    (FUSE, "ConvWeightGrad"): weight_grad,
    (FUSE, "MaxPoolGrad"): max_pool_grad,
}

"""Conv and ConvTranspose of one to three axes, with an activation behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.actual_sizes import POOLS, pooled, same_pads
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.kernels.gemm_integer import BYTES, LINE
from onnx_fuse.lower import conv_nhwc, conv_transpose
from onnx_fuse.lower.context import Context, Lowering, Unserved, copy, floats
from onnx_fuse.lower.linear import product
from onnx_fuse.lower.quantized import factors
from onnx_fuse.ops.activations import ACTIVATIONS
from onnx_fuse.program.call import Tensor, dtype_of
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.program.problems import Conv, Triple, Window
from onnx_fuse.program.size import OpenSize, number


def triple(sizes: Sequence[int], fill: int = 1) -> Triple:
    """Sizes of up to three axes, `fill` in front."""
    a, b, c = [fill] * (3 - len(sizes)) + [number(s) for s in sizes]
    return a, b, c


def window(
    ctx: Context, node: ir.Node, kernel: Sequence[int], x: Sequence[int], y: Sequence[int]
) -> Window:
    """The node's window over spatial sizes x -> y; auto_pad is worked out from the output size."""
    rank = len(kernel)
    strides = ctx.attr(node, "strides") or [1] * rank
    dilations = ctx.attr(node, "dilations") or [1] * rank
    pads = list(ctx.attr(node, "pads") or [0] * (2 * rank))
    auto = ctx.attr(node, "auto_pad", "NOTSET")
    transposed = node.op_type == "ConvTranspose"
    if auto.startswith("SAME") and not transposed:
        axes = zip(x, kernel, strides, strict=True)
        conv = node.op_type not in POOLS
        around = [same_pads(n, k, s, auto, conv=conv) for n, k, s in axes]
        if conv:  # what lies behind the last window is not read anyway
            around = [(before, max(after, 0)) for before, after in around]
        pads = [before for before, _ in around] + [after for _, after in around]
    elif transposed and (auto.startswith("SAME") or ctx.attr(node, "output_shape")):
        extra = ctx.attr(node, "output_padding") or [0] * rank
        for i in range(rank):
            reach = (kernel[i] - 1) * dilations[i] + 1
            total = max(strides[i] * (x[i] - 1) + extra[i] + reach - y[i], 0)
            # the spec's text: SAME_UPPER halves in front, everything else the larger half
            pads[i] = total // 2 if auto == "SAME_UPPER" else total - total // 2
            pads[rank + i] = total - pads[i]
    elif auto == "VALID":
        pads = [0] * (2 * rank)
    return Window(
        triple(kernel), triple(strides), triple(dilations), triple(pads[:rank], 0),
        triple(pads[rank:], 0),
    )  # fmt: skip


def spatial(
    ctx: Context, node: ir.Node, kernel: Sequence[int], x: Sequence[int]
) -> list[int] | None:
    """Output sizes of a Conv, ConvTranspose or pool over open sizes `x`; None: inference knows."""
    auto = ctx.attr(node, "auto_pad", "NOTSET")
    if ctx.attr(node, "output_shape") or not any(isinstance(size, OpenSize) for size in x):
        return None
    rank = len(kernel)
    strides = ctx.attr(node, "strides") or [1] * rank
    dilations = ctx.attr(node, "dilations") or [1] * rank
    pads = ctx.attr(node, "pads") or [0] * (2 * rank)
    if node.op_type in POOLS:
        ceil = bool(ctx.attr(node, "ceil_mode", 0))
        axes = zip(x, kernel, strides, zip(pads, pads[rank:], strict=False), dilations, strict=True)
        return [pooled(*axis, auto, ceil=ceil)[0] for axis in axes]
    extra = ctx.attr(node, "output_padding") or [0] * rank
    transposed = node.op_type == "ConvTranspose"
    if auto.startswith("SAME") and any(d != 1 for d in dilations):
        return None
    extents = []
    for i, size in enumerate(x):
        reach = (kernel[i] - 1) * dilations[i] + 1
        around = pads[i] + pads[rank + i] if auto == "NOTSET" else 0
        if transposed:
            whole = strides[i] * (size - 1) + extra[i] + reach - around
            same = size * strides[i] if auto.startswith("SAME") else whole
            extents.append(whole if whole < same else same)
        elif auto.startswith("SAME"):
            extents.append(-(-size // strides[i]))
        else:
            extents.append((size + around - reach) // strides[i] + 1)
    return extents


def _aligned(ctx: Context, node: ir.Node, x: Tensor) -> Tensor:
    """[N, C, P] of 16-bit elements copied to rows that start at multiples of 16 bytes.

    Without, products load them one by one: 14 x 14 and 7 x 7 pixels take four times as long.
    """
    *outer, pixels = x.shape
    room = ctx.scratch(x.dtype, (*outer, -(-pixels // 8) * 8))
    aligned = replace(room, shape=x.shape)
    copy(ctx, node, x, aligned)
    return aligned


def _product(ctx: Context, node: ir.Node, reads: dict[str, Tensor], y: Tensor, shape: Conv) -> None:
    """A filter of one tap: y[n] [M, P] = weight [M, C] · x[n] [C, P] + bias [M, 1]."""
    batch, pixels = shape.batch, prod(shape.inner)
    a = reads["weight"].view((shape.filters, shape.channels))
    b = reads["x"].view((batch, shape.channels, pixels))
    to = y.view((batch, shape.filters, pixels))
    if ITEMSIZE[y.dtype] == 2 and pixels % 8:
        b = _aligned(ctx, node, b)
    attrs: dict[str, object] = {}
    extra = {}
    if "bias" in reads and y.dtype == "float64":  # whose digits a kernel's row has not
        extra["c"] = reads["bias"]
        attrs = {"beta": 1.0, "c_rows": 1, "c_cols": 0, "c_strides": (0,) * (batch > 1)}
    elif "bias" in reads:
        extra["row0"], attrs["row_bias"] = reads["bias"], True
    if shape.act:
        attrs |= {"act": shape.act, "act_alpha": shape.act_alpha}
    product(ctx, node, a.expand((batch, *a.shape)), b, to, extra, None, attrs)


def convolution(
    ctx: Context, node: ir.Node, act: str = "", alpha: float = 0.0, slope: Tensor | None = None
) -> None:
    """y = act(Conv(x, weight) + bias), or ConvTranspose; `slope` is the alpha of each filter."""
    x, weight = floats(ctx.view(node, 0)), ctx.view(node, 1)
    transposed = node.op_type == "ConvTranspose"
    rank = len(x.shape) - 2
    if not 1 <= rank <= 3:
        raise Unserved("no-kernel", what=f"{rank} spatial axes")
    reads: dict[str, Tensor] = {}
    bias_values = ctx.host(node, 2) if ctx.has(node, 2) else None
    if ctx.has(node, 2) and (bias_values is None or bias_values.any()):  # a missing bias is zeros
        reads["bias"] = ctx.dense(node, 2)
    groups = ctx.attr(node, "group", 1)
    if x.shape[1] != (weight.shape[0] if transposed else weight.shape[1] * groups):
        raise ValueError(f"x has {x.shape[1]} channels, which the filters do not take")
    outer = spatial(ctx, node, weight.shape[2:], x.shape[2:])
    filters = weight.shape[1] * groups if transposed else weight.shape[0]
    y = ctx.output(node, 0, (x.shape[0], filters, *outer) if outer else None, x.dtype)
    if not y.size:
        return
    if slope is not None:
        reads["slope"] = slope
    taps = window(ctx, node, weight.shape[2:], x.shape[2:], y.shape[2:])
    if min(taps.before) < 0:
        raise Unserved("no-kernel", what="an auto_pad that cuts the image")
    if not x.size:  # no channels or no pixels: the sum of nothing is that of one zero
        zero = ctx.constant(np.zeros((), dtype_of(x.dtype)))
        if not x.shape[1]:
            outside = (groups, weight.shape[1]) if transposed else (weight.shape[0], 1)
            weight = zero.expand((*outside, *weight.shape[2:]))
        pixels = (number(n) or 1 for n in x.shape[2:])
        x = zero.expand((x.shape[0], x.shape[1] or groups, *pixels))
    shape = Conv(
        x.shape[0], groups, x.shape[1] // groups, y.shape[1] // groups, triple(x.shape[2:]),
        triple(y.shape[2:]), taps, x.dtype, transposed, act, alpha, slope is not None,
    )  # fmt: skip
    if transposed and conv_nhwc.one_tap(shape):  # the same as a Conv by the transposed weights
        weight, transposed = weight.permute((1, 0, *range(2, rank + 2))), False
        shape = replace(shape, transposed=False)
    if conv_nhwc.takes_integers(shape) and ctx.hw.cc >= 80 and (both := factors(ctx, node)):
        problem = conv_nhwc.of_codes(shape, both)
        if both.x.dtype in BYTES or (shape.channels % LINE == 0 and ctx.serves(problem)):
            return conv_nhwc.integers(ctx, node, shape, both, reads, y)
    if conv_nhwc.pays(ctx, shape, x):
        return conv_nhwc.convolution(ctx, node, shape, {"x": x, "weight": weight, **reads}, y)
    if conv_transpose.pays(ctx, shape, x, "bias" in reads):
        return conv_transpose.convolution(ctx, node, shape, {"x": x, "weight": weight, **reads}, y)
    reads = {"x": ctx.contiguous(x), "weight": ctx.contiguous(weight), **reads}
    moves = (
        *taps.before,
        *taps.after,
        *(s - 1 for s in taps.strides),
        *(k - 1 for k in taps.kernel),
    )
    if not any(moves) and not transposed and groups == 1 and shape.filters >= 16:
        if slope is not None:
            raise Unserved("no-kernel", what="filters of one tap and slopes by filter")
        return _product(ctx, node, reads, y, shape)
    ctx.select(node, shape, reads, {"y": y})


def plain(ctx: Context, node: ir.Node) -> None:
    """Lower Conv and ConvTranspose of ai.onnx."""
    convolution(ctx, node)


def activated(ctx: Context, node: ir.Node) -> None:
    """ConvRelu and its like: the activation in the epilogue; the pre-activation is not kept."""
    name = FusedName.of(node.op_type)
    if name.exposed:
        raise Unserved("results", names=", ".join(name.exposed))
    row = ACTIVATIONS[name.activation]
    if ctx.view(node, 0).dtype == "float64":
        raise Unserved("no-kernel", what="an activation in float64")
    convolution(ctx, node, row.key, float(ctx.attr(node, "alpha", row.alpha)))


def sloped(ctx: Context, node: ir.Node) -> None:
    """ConvPRelu: leaky ReLU with a slope for each filter."""
    slope, x, filters = ctx.dense(node, 3), ctx.view(node, 0), ctx.view(node, 1).shape[0]
    channels = len(x.shape) - 1  # the axis, from the last
    row = slope.reshape((filters,)) if slope.size == filters else None
    by_filter = len(slope.shape) >= channels and slope.shape[-channels] == filters
    if row is None or not by_filter or x.dtype == "float64" or slope.dtype != x.dtype:
        raise Unserved("no-kernel", what="float64, or slopes of another shape or type")
    convolution(ctx, node, "leaky_relu", 0.0, row)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "Conv"): plain,
    ("", "ConvTranspose"): plain,
    (FUSE, "ConvPRelu"): sloped,
    **{(FUSE, str(FusedName.make("Conv", act))): activated for act in ACTIVATIONS},
}

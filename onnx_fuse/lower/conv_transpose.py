"""ConvTranspose as convolutions of channels-last images, one for each phase of a stride.

y[o] sums x[i] w[tap] over o = i stride - pad + tap dilation. The outputs o = q stride + r of one r
take the taps of one class alone, each at its own i = q + offset: a Conv of stride 1 whose filter is
those taps, last first. A convolution's gradient by its image is such a ConvTranspose. Where the
stride is the filter's size, all phases are one product, whose columns are the taps' filters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product as every
from math import prod

import onnx_ir as ir

from onnx_fuse.lower import conv_nhwc
from onnx_fuse.lower.channels_last import channels_last, channels_second, stored_last
from onnx_fuse.lower.context import Context, apply, copy
from onnx_fuse.lower.linear import product
from onnx_fuse.lower.views import reshaped
from onnx_fuse.program.call import Tensor, dense_strides
from onnx_fuse.program.problems import Conv, Window

PHASES = 16
"""Products of strides up to which each phase is a convolution of its own."""


@dataclass(frozen=True)
class PhaseAxis:
    """One axis of a phase: outputs `first`, `first` + stride, ..., and taps from `last` down.

    `taps` of them, `step` apart, make a filter of `dilation` with these pads; 0: nothing is added.
    """

    first: int
    outputs: int
    taps: int
    last: int = 0
    step: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0


def _axis(shape: Conv, axis: int, r: int) -> PhaseAxis:
    """The outputs `r`, `r` + stride, ... of an axis."""
    window, size = shape.window, shape.inner[axis]
    stride, dilation = window.strides[axis], window.dilations[axis]
    ahead = r + window.before[axis]
    taps = [t for t in range(window.kernel[axis]) if (ahead - t * dilation) % stride == 0]
    outputs = -(-(shape.outer[axis] - r) // stride)
    if not taps:
        return PhaseAxis(r, outputs, 0)
    last, step = taps[-1], taps[1] - taps[0] if len(taps) > 1 else 1
    # kernels divide by the distance of taps, which a single one does not have
    apart = step * dilation // stride if len(taps) > 1 else 1
    start = (ahead - last * dilation) // stride
    reach = outputs - 1 + start + (len(taps) - 1) * apart
    return PhaseAxis(r, outputs, len(taps), last, step, apart, -start, reach - (size - 1))


@dataclass(frozen=True)
class Phase:
    """The axes of one phase, and its convolution; None: its outputs are zeros."""

    axes: tuple[PhaseAxis, PhaseAxis, PhaseAxis]
    shape: Conv | None


def phases(shape: Conv) -> list[Phase]:
    """The phases of a transposed convolution, which together write each output once."""
    steps = [min(s, o) for s, o in zip(shape.window.strides, shape.outer, strict=True)]
    all_phases = []
    for rest in every(*map(range, steps)):
        a, b, c = (_axis(shape, i, r) for i, r in enumerate(rest))
        window = Window(
            (a.taps, b.taps, c.taps), (1, 1, 1), (a.dilation, b.dilation, c.dilation),
            (a.before, b.before, c.before), (a.after, b.after, c.after),
        )  # fmt: skip
        outer = (a.outputs, b.outputs, c.outputs)
        part = replace(shape, transposed=False, outer=outer, window=window)
        all_phases.append(Phase((a, b, c), part if a.taps and b.taps and c.taps else None))
    return all_phases


def pays(ctx: Context, shape: Conv, x: Tensor, bias: bool) -> bool:
    """Whether each phase should run channels last; outputs that no tap reaches must be zero."""
    if not shape.transposed or shape.act:
        return False
    if _patches(shape):
        return len(x.shape) < 5 and shape.dtype != "float64"
    shared = shape.groups == 1 and shape.channels % 8 == 0
    if not (shared or shape.depthwise) or prod(shape.window.strides) > PHASES:
        return False
    shapes = [phase.shape for phase in phases(shape)]
    if bias and None in shapes:
        return False
    x = channels_second(replace(channels_last(x), strides=dense_strides(channels_last(x).shape)))
    return all(each is None or conv_nhwc.pays(ctx, each, x) for each in shapes)


def _patches(shape: Conv) -> bool:
    """Whether each pixel of x makes a patch of y by itself, as large as the filter."""
    window = shape.window
    if window.kernel != window.strides or shape.groups > 1 or prod(window.kernel) == 1:
        return False
    sizes = zip(shape.inner, window.strides, shape.outer, strict=True)
    return not any((*window.before, *window.after)) and all(i * s == o for i, s, o in sizes)


def _product(
    ctx: Context, node: ir.Node, shape: Conv, reads: dict[str, Tensor], out: Tensor
) -> None:
    """[pixels, channels] · [channels, taps * filters] + bias, its patches then put in their places.

    `out` is [batch, *outer, filters].
    """
    x, weight = ctx.contiguous(channels_last(reads["x"])), reads["weight"]
    rank, filters, taps = len(x.shape) - 2, shape.filters, prod(shape.window.kernel)
    last = ctx.arranged(weight.permute((0, *range(2, rank + 2), 1)), "taps first")
    columns = reshaped(ctx, last, (shape.channels, taps * filters))
    extra = {}
    if "bias" in reads:
        each = reads["bias"].view((1, filters))
        bias = ctx.arranged(each.expand((taps, filters)), "taps first")
        extra["col1"] = reshaped(ctx, bias, (taps * filters,))
    pixels = reshaped(ctx, x, (prod(x.shape[:-1]), shape.channels))
    patches = ctx.scratch(out.dtype, (pixels.shape[0], taps * filters))
    product(ctx, node, pixels, columns, patches, extra, None, {"bias": bool(extra)})
    kernel, inner = shape.window.kernel[3 - rank :], x.shape[1:-1]
    pairs = [n for pair in zip(inner, kernel, strict=True) for n in pair]
    order = (0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1)
    places = out.view((x.shape[0], *pairs, filters))
    copy(ctx, node, reshaped(ctx, patches, (x.shape[0], *inner, *kernel, filters)),
         places.permute(order))  # fmt: skip


def convolution(
    ctx: Context, node: ir.Node, shape: Conv, reads: dict[str, Tensor], y: Tensor
) -> None:
    """y = ConvTranspose(x, weight) + bias, channels last; `y` is the new dense output."""
    out = channels_last(stored_last(ctx, node, y))
    if _patches(shape):
        return _product(ctx, node, shape, reads, out)
    weight, rank = reads["weight"], len(y.shape) - 2
    parts = phases(shape)
    reads["x"] = channels_second(ctx.contiguous(channels_last(reads["x"])))
    for phase in parts:
        axes = phase.axes[3 - rank :]
        firsts, steps = [a.first for a in axes], shape.window.strides[3 - rank :]
        part = out.slice(
            [0, *firsts, 0], [1, *steps, 1],
            (out.shape[0], *(a.outputs for a in axes), out.shape[-1]),
        )  # fmt: skip
        if phase.shape is None:
            apply(ctx, node, part, "", 0)
            continue
        taps = weight.slice(
            [0, 0, *(a.last for a in axes)], [1, 1, *(-a.step for a in axes)],
            (*weight.shape[:2], *(a.taps for a in axes)),
        )  # fmt: skip
        if not shape.depthwise:  # whose channels are its filters
            taps = taps.permute((1, 0, *range(2, rank + 2)))
        operands = {**reads, "weight": taps}
        whole = len(parts) == 1 or conv_nhwc.writes(ctx, phase.shape, part)
        target = part if whole else ctx.scratch(y.dtype, part.shape)
        conv_nhwc.into(ctx, node, phase.shape, operands, target)
        if target is not part:
            copy(ctx, node, target, part)

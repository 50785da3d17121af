"""Conv in 16 bits with its images channels last: a product, or a Conv over packed weights."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import required
from onnx_fuse.kernels import refused
from onnx_fuse.kernels.conv_nhwc import pixel_of
from onnx_fuse.kernels.gemm_integer import LINE
from onnx_fuse.lower import quantized
from onnx_fuse.lower.channels_last import channels_last, is_channels_last, stored_last
from onnx_fuse.lower.context import Context, apply, copy, data_type
from onnx_fuse.lower.linear import product
from onnx_fuse.lower.views import reshaped
from onnx_fuse.program.call import Tensor, dense_strides
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.program.problems import Conv, ConvWeightGrad, IntegerConv, PixelBlocks, Window
from onnx_fuse.program.size import minimum

TAPS = 256
"""Taps of a filter that is packed: a larger one is the images of a weight's gradient."""
FARTHEST = 8
"""The stride of a tensor map at most."""


def one_tap(shape: Conv) -> bool:
    """Whether the convolution is a product of pixels and filters: one tap, no stride or padding."""
    window = shape.window
    moves = (*window.before, *window.after, *(s - 1 for s in window.strides))
    return shape.groups == 1 and not any(moves) and prod(window.kernel) == 1


def pays(ctx: Context, shape: Conv, x: Tensor) -> bool:
    """Whether the Conv is to run channels last: on tensor cores, where a kernel serves it."""
    if shape.transposed or (len(x.shape) > 4 and shape.channels % 8):
        return False
    if prod(shape.window.kernel) > TAPS or not x.size:
        return False
    if one_tap(shape) and not shape.slope:  # a product of NCHW images is one as well
        return is_channels_last(x) or prod(shape.inner) == 1
    stored = _stored_last(ctx, shape)
    if shape.groups == 1 and shape.channels % 8:  # its images are copied with gaps of zeros
        stored = replace(stored, channels=-(-shape.channels // 8) * 8)
    return _served(ctx, stored)


def _served(ctx: Context, shape: Conv) -> bool:
    """Whether a kernel serves it, and the one that the user asks for, if any, does."""
    return not refused(shape, ctx.hw, ctx.prefs) and ctx.serves(shape)


def _stored_last(ctx: Context, shape: Conv) -> Conv:
    math = ctx.math if shape.dtype == "float32" else "ieee"
    return replace(shape, channels_last=True, math=math)


def convolution(
    ctx: Context, node: ir.Node, shape: Conv, reads: dict[str, Tensor], y: Tensor
) -> None:
    """y = act(Conv(x, weight) + bias), all images channels last; `y` is the new dense output."""
    into(ctx, node, shape, reads, channels_last(stored_last(ctx, node, y)))


def into(ctx: Context, node: ir.Node, shape: Conv, reads: dict[str, Tensor], out: Tensor) -> None:
    """Write the convolution to `out` [batch, *outer, groups * filters]: dense, or `writes`."""
    if is_channels_last(reads["x"]):  # all readers are NHWC, too
        ctx.channels_last.add(reads["x"].buffer)
    bias = reads.get("bias")
    if bias is None:
        kind = data_type(shape.dtype).numpy()
        bias = ctx.constant(np.zeros(shape.groups * shape.filters, kind))
    gaps = _gaps(out)
    if one_tap(shape) and not shape.slope and not gaps:
        return _product(ctx, node, shape, reads, out)
    reads = {**reads, "bias": bias}
    shape = replace(_stored_last(ctx, shape), y_strides=gaps)
    planar = replace(shape, planar=True)
    if not is_channels_last(reads["x"]) and _served(ctx, planar):
        shape, reads["x"] = planar, ctx.contiguous(reads["x"])
        reads["weight"] = _runs(ctx, node, reads["weight"], shape, pixel_of(shape), 16)
    elif _patches(shape):
        return _product(ctx, node, shape, reads, out)
    elif shape.groups == 1 and shape.channels % 8:
        shape, reads["x"], reads["weight"] = _padded(ctx, node, shape, reads["x"], reads["weight"])
    else:
        reads["x"] = ctx.contiguous(channels_last(reads["x"]))
        reads["weight"] = _packed(ctx, reads["weight"], shape)
    shape = replace(shape, static_weight=ctx.known(reads["weight"]) is not None)
    ctx.select(node, shape, reads, {"y": out})


def integers(
    ctx: Context,
    node: ir.Node,
    shape: Conv,
    both: quantized.IntegerOperands,
    reads: dict[str, Tensor],
    y: Tensor,
) -> None:
    """y = act(Conv(x, weight) + bias) of the codes of x and weight, all images channels last."""
    problem, x, weight = of_codes(shape, both), both.x, both.weight
    if is_channels_last(x):
        ctx.channels_last.add(x.buffer)
    if (blocks := _in_blocks(ctx, node, problem, x, weight)) is not None:
        problem, x, weight = blocks
    elif shape.groups == 1 and shape.channels % LINE:
        problem, x, channels = in_runs(ctx, node, problem, x, 1)
        merged = shape.window.dilations[2] == 1
        weight = _runs(ctx, node, weight, shape, channels, LINE, merged)
    else:
        x, weight = ctx.contiguous(channels_last(x)), _packed(ctx, weight, shape)
    out = channels_last(stored_last(ctx, node, y))
    operands = {**reads, "x": x, "weight": weight}
    act = (shape.act, shape.act_alpha)
    quantized.convolution(ctx, node, problem, both, operands, out, act)


def of_codes(shape: Conv, both: quantized.IntegerOperands) -> IntegerConv:
    """The convolution of the codes."""
    return IntegerConv(
        shape.batch, shape.groups, shape.channels, shape.filters, shape.inner, shape.outer,
        shape.window, both.x.dtype, both.zero,
    )  # fmt: skip


def takes_integers(shape: Conv) -> bool:
    """Whether a kernel serves the convolution of 8-bit integers."""
    lined = shape.channels % LINE == 0
    deep = max(shape.inner[0], shape.outer[0], shape.window.kernel[0]) > 1
    plain = not (shape.transposed or shape.slope) and prod(shape.window.kernel) <= TAPS
    return plain and (lined or (shape.groups == 1 and not deep)) and prod(shape.inner) > 0


def _gaps(out: Tensor) -> tuple[int, ...]:
    """The strides of images, rows and pixels of channels-last images; () where they are dense."""
    if out.strides == dense_strides(out.shape):
        return ()
    return (out.strides[0], out.strides[-3], out.strides[-2])


def writes(ctx: Context, shape: Conv, out: Tensor) -> bool:
    """Whether a kernel stores the pixels of the convolution where those of `out` are."""
    if len(out.shape) > 4:
        return False
    stored = replace(_stored_last(ctx, shape), y_strides=_gaps(out))
    return out.strides[-1] == 1 and _served(ctx, stored)


def _patches(shape: Conv) -> bool:
    """Whether each pixel of y has a patch of x to itself, of which no kernel makes a step."""
    window = shape.window
    if shape.groups > 1 or window.kernel != window.strides or shape.slope:
        return False
    if any((*window.before, *window.after)) or not (
        shape.channels % 8 or max(window.strides) > FARTHEST
    ):
        return False
    sizes = zip(shape.inner, window.strides, shape.outer, strict=True)
    return all(i == s * o for i, s, o in sizes)


def _gathered(ctx: Context, node: ir.Node, shape: Conv, x: Tensor) -> Tensor:
    """[batch, *outer, channels * taps] of the images x [batch, channels, *inner]."""
    rank = len(x.shape) - 2
    outer, kernel = shape.outer[3 - rank :], shape.window.kernel[3 - rank :]
    pairs = [n for pair in zip(outer, kernel, strict=True) for n in pair]
    parts = reshaped(ctx, x, (shape.batch, shape.channels, *pairs))
    order = (0, *range(2, 2 * rank + 2, 2), 1, *range(3, 2 * rank + 2, 2))
    patches = ctx.scratch(x.dtype, (shape.batch, *outer, shape.channels, *kernel))
    copy(ctx, node, parts.permute(order), patches)
    return reshaped(ctx, patches, (shape.batch, *outer, shape.depth))


def _product(ctx: Context, node: ir.Node, shape: Conv, reads: dict[str, Tensor], y: Tensor) -> None:
    """A product with each pixel or patch: y [pixels, M] = x [pixels, K] · weight [M, K]' + bias."""
    images = channels_last(reads["x"])
    if not one_tap(shape):
        images = _gathered(ctx, node, shape, reads["x"])
    x = ctx.contiguous(images).view((_pixels(y), shape.depth))
    weight = reads["weight"].reshape((shape.filters, shape.depth))
    to = y.view((_pixels(y), shape.filters))
    weight = weight if weight is not None else ctx.contiguous(reads["weight"])
    attrs: dict[str, Any] = {}
    extra = {}
    if "bias" in reads:
        extra["col1"], attrs["bias"] = reads["bias"], True
    if shape.act:
        attrs |= {"act": shape.act, "act_alpha": shape.act_alpha}
    product(ctx, node, x, weight.permute((1, 0)), to, extra, None, attrs)


def _pixels(y: Tensor) -> int:
    return prod(y.shape[:-1])


def _packed(ctx: Context, weight: Tensor, shape: Conv) -> Tensor:
    """[filters, taps, channels] of a weight [filters, channels, *taps]; [taps, groups] where
    each channel has one filter.
    """
    spatial = range(2, len(weight.shape))
    order = (*spatial, 0, 1) if shape.depthwise else (0, *spatial, 1)
    return ctx.arranged(weight.permute(order), "channels last")


Filter = TypeVar("Filter", Conv, ConvWeightGrad, IntegerConv)


def _padded(
    ctx: Context, node: ir.Node, shape: Conv, x: Tensor, weight: Tensor
) -> tuple[Conv, Tensor, Tensor]:
    """The same sums where pixels are no multiple of 16 bytes: (problem, images, weights)."""
    problem, images, channels = in_runs(ctx, node, shape, x, 1)
    merged = shape.window.dilations[2] == 1
    return problem, images, _runs(ctx, node, weight, shape, channels, 8, merged)


def _in_blocks(
    ctx: Context, node: ir.Node, shape: IntegerConv, x: Tensor, weight: Tensor
) -> tuple[IntegerConv, Tensor, Tensor] | None:
    """The same sums by a stride of one over blocks of pixels: (problem, images, weight), or None.

    A block is the pixels of a stride along both axes, in 16 bytes; taps of zeros before the filter
    and behind it make it one of whole blocks. A tap is then a row of blocks, as of `in_runs`. What
    quantizes x is part of the call that makes the blocks.
    """
    window, channels, strides = shape.window, shape.channels, shape.window.strides[1:]
    (sh, sw), (d, h, w) = strides, shape.inner
    each, taps = sh * sw * channels, window.kernel[1:]
    if sh * sw == 1 or each > LINE or shape.groups > 1 or window.dilations != (1, 1, 1):
        return None
    if min(window.before) < 0 or max(d, window.kernel[0]) > 1 or h % sh or w % sw:
        return None
    before = [-(-p // s) for p, s in zip(window.before[1:], strides, strict=True)]
    first = [b * s - p for b, s, p in zip(before, strides, window.before[1:], strict=True)]
    kh, kw = (-(-(k + f) // s) for k, f, s in zip(taps, first, strides, strict=True))
    tall, wide, filters = shape.outer[1] + kh - 1, shape.outer[2] + kw - 1, shape.filters
    high, across = minimum(h // sh, tall - before[0]), minimum(w // sw, wide - before[1])
    held = ctx.rounded.get(x.buffer)
    rounds = held is not None and held.q == x
    source = held.x if held is not None and rounds else x
    (n, c), (y, step) = source.strides[:2], source.strides[-2:]  # of one axis, y is of one row
    blocks = PixelBlocks(
        shape.batch, channels, strides, high, across, tall, wide, before[0], before[1],
        (n, c, y, step), source.dtype, shape.dtype, shape.border,
        (float(held.scale), held.zero) if held is not None and rounds else (),
    )  # fmt: skip
    images = ctx.scratch(shape.dtype, (shape.batch, tall, wide, LINE))
    if not ctx.serves(blocks):
        return None
    ctx.select(node, blocks, {"x": source}, {"y": images})

    def packed(array: np.ndarray) -> np.ndarray:
        whole = np.zeros((filters, channels, kh * sh, kw * sw), array.dtype)
        rows, columns = (slice(f, f + k) for f, k in zip(first, taps, strict=True))
        whole[:, :, rows, columns] = array.reshape(filters, channels, *taps)
        turned = whole.reshape(filters, channels, kh, sh, kw, sw).transpose(0, 2, 4, 3, 5, 1)
        lines = np.zeros((filters, kh, kw, LINE), array.dtype)
        lines[..., :each] = turned.reshape(filters, kh, kw, each)
        return lines.reshape(filters, kh, kw * LINE)

    lines = required(ctx.packed(weight, f"in blocks of {sh} x {sw}, {first} taps in", packed))
    one = Window((1, kh, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), (0, 0, 0))
    problem = replace(
        shape, channels=kw * LINE, inner=(1, tall, shape.outer[2]), window=one,
        x_strides=(tall * wide * LINE, wide * LINE, LINE),
    )  # fmt: skip
    return problem, images, lines


def in_runs(
    ctx: Context, node: ir.Node, shape: Filter, x: Tensor, whole: int
) -> tuple[Filter, Tensor, int]:
    """The problem over pixels of whole 16 bytes: (problem, images, channels of a pixel).

    The images are copied with zeros for more channels and for the padding to both sides. A tap is
    then a row of the filter: its pixels stand one behind another, `whole` elements or a multiple,
    and the next row of the image is as many pixels on as the stride.
    """
    window, (_, h, w), width = shape.window, shape.inner, shape.outer[2]
    kernel, step = window.kernel[2], window.strides[2]
    merged = window.dilations[2] == 1
    channels, piece = shape.channels, LINE if ITEMSIZE[x.dtype] == 1 else 8
    while channels * (step if merged else 1) % piece:
        channels += 1
    run = -(-kernel * channels // whole) * whole
    left = window.before[2] if merged else 0
    wide = (width - 1) * step + -(-run // channels) if merged else w
    while wide * channels % piece:
        wide += 1
    source = channels_last(x)
    source = source.reshape((shape.batch, h, w, shape.channels)) or source
    inside = min(w, wide - left)
    images = ctx.scratch(x.dtype, (shape.batch, h, wide, channels))
    if (left, inside, channels) != (0, wide, shape.channels):
        border = shape.border if isinstance(shape, IntegerConv) else 0
        apply(ctx, node, images, "", border)
    part = (shape.batch, h, inside, shape.channels)
    origin, ones = [0, 0, 0, 0], [1, 1, 1, 1]
    copy(ctx, node, source.slice(origin, ones, part), images.slice([0, 0, left, 0], ones, part))
    if not merged:
        return replace(shape, channels=channels), images, channels

    def columns(values: tuple[int, int, int], last: int) -> tuple[int, int, int]:
        return (values[0], values[1], last)

    one = Window(
        columns(window.kernel, 1), columns(window.strides, 1), columns(window.dilations, 1),
        columns(window.before, 0), columns(window.after, 0),
    )  # fmt: skip
    problem = replace(
        shape,
        channels=run,
        inner=(1, h, width),
        window=one,
        x_strides=(h * wide * channels, wide * channels, step * channels),
    )
    return problem, images, channels


def _runs(
    ctx: Context, node: ir.Node, weight: Tensor, shape: Conv, channels: int, multiple: int,
    merged: bool = True,
) -> Tensor:  # fmt: skip
    """A weight [filters, channels, *taps] as [filters, rows, pixels], padded to `channels` a pixel.

    Zeros stand for the channels that it has not, and up to a `multiple` of elements. Unless
    `merged`, each pixel is a row of its own.
    """
    _, kh, kw = shape.window.kernel
    m, c = shape.filters, shape.channels
    run = -(-(kw if merged else 1) * channels // multiple) * multiple
    rows = kh if merged else kh * kw
    steps = (rows * run, run if merged else kw * run, channels if merged else run, 1)
    view = weight.permute((0, *range(2, len(weight.shape)), 1)).view((m, kh, kw, c))

    def packed(array: np.ndarray) -> np.ndarray:
        runs = np.zeros((m, rows, run), array.dtype)
        strides = [step * runs.itemsize for step in steps]
        np.lib.stride_tricks.as_strided(runs, array.shape, strides)[...] = array
        return runs

    constant = ctx.packed(view, f"in runs of {run}, pixels of {channels}", packed)
    if constant is not None:
        return constant
    weight_runs = ctx.scratch(weight.dtype, (m, rows, run))  # packed in each run, since it changes
    apply(ctx, node, weight_runs, "", 0)
    copy(ctx, node, view, replace(weight_runs, shape=(m, kh, kw, c), strides=steps))
    return weight_runs

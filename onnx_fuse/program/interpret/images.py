"""NumPy's answers to the problems of images: convolutions and their gradients, pools, samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

import numpy as np

from onnx_fuse.ops.activations import BY_KEY
from onnx_fuse.program.call import LOWEST, dtype_of
from onnx_fuse.program.interpret.data_movement import Results
from onnx_fuse.program.interpret.memory import CallOperands
from onnx_fuse.program.interpret.norms import column_moments, with_tail
from onnx_fuse.program.interpret.steps import STEPS, activation
from onnx_fuse.program.problems import (
    ChannelWindow,
    Col2Im,
    Conv,
    ConvWeightGrad,
    GridSample,
    IntegerConv,
    MaxPoolGrad,
    PixelBlocks,
    Pool,
    Resample,
    Window,
)

Sizes = tuple[int, ...]


def windows(x: np.ndarray, window: Window, outer: Sizes, fill: float) -> np.ndarray:
    """[N, *outer, *kernel, C] of images x [N, D, H, W, C], `fill` around them."""
    more = [(0, 0)]
    for i in range(3):
        reach = (window.kernel[i] - 1) * window.dilations[i] + 1
        last = (outer[i] - 1) * window.strides[i] + reach - window.before[i] - x.shape[i + 1]
        more.append((max(window.before[i], 0), max(last, 0)))
    z, y, first = (max(-before, 0) for before in window.before)  # SAME may cut
    x = np.pad(x[:, z:, y:, first:], [*more, (0, 0)], constant_values=fill)
    n, *_, c = x.shape
    strides = x.strides
    shape = (n, *outer, *window.kernel, c)
    steps = [s * k for s, k in zip(strides[1:4], window.strides, strict=True)]
    taps = [s * k for s, k in zip(strides[1:4], window.dilations, strict=True)]
    return np.lib.stride_tricks.as_strided(x, shape, (strides[0], *steps, *taps, strides[4]))


def tap_places(window: Window, outer: Sizes) -> Iterator[list[np.ndarray]]:
    """Where each tap in order stands along each axis, for all places of `outer`."""
    for tap in product(*map(range, window.kernel)):
        yield [
            np.arange(n) * window.strides[i] - window.before[i] + tap[i] * window.dilations[i]
            for i, n in enumerate(outer)
        ]


def taps(window: Window, inner: Sizes, outer: Sizes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(place in an image of `inner`, whether it is inside it) [*outer], of each tap in order."""
    for at in tap_places(window, outer):
        there = _all([(a >= 0) & (a < n) for a, n in zip(at, inner, strict=True)])
        z, y, x = np.ix_(*at)
        yield np.where(there, (z * inner[1] + y) * inner[2] + x, 0), there


def _all(along: Sequence[np.ndarray]) -> np.ndarray:
    """Where the conditions of all axes hold."""
    z, y, x = along
    result: np.ndarray = z[:, None, None] & y[:, None] & x
    return result


def _images(p: Conv | ConvWeightGrad | IntegerConv, of: CallOperands) -> np.ndarray:
    """x [batch, *inner, groups * channels] with the strides that the problem gives it."""
    size = p.groups * p.channels
    if not p.x_strides:
        return of.dense("x", p.batch, *p.inner, size)
    image, row, pixel = p.x_strides
    shape = (p.batch, *p.inner, size)
    return of.strided("x", shape, (image, row * p.inner[1], row, pixel, 1))


def weight_gradient(p: ConvWeightGrad, of: CallOperands) -> Results:
    """dw [groups * filters, channels, *kernel]."""
    patches = windows(_images(p, of), p.window, p.outer, 0.0).reshape(
        p.batch * prod(p.outer), prod(p.window.kernel), p.groups, p.channels
    )
    dy = of.dense("dy", p.batch * prod(p.outer), p.groups, p.filters)
    return {"dw": np.einsum("ptgc,pgf->gfct", patches, dy, optimize=True)}


def _weights(p: Conv, weight: np.ndarray) -> np.ndarray:
    """[groups, filters, taps, channels] of the layout that the problem says."""
    count = prod(p.window.kernel)
    if p.planar:  # runs of pixels of more channels
        kw = p.window.kernel[2]
        pixel = 4 if p.channels <= 4 and p.window.strides[2] % 2 == 0 else 8
        runs = weight.reshape(p.filters, count // kw, -1)[..., : kw * pixel]
        return runs.reshape(1, p.filters, count, pixel)[..., : p.channels]
    if p.channels_last and p.depthwise:
        return weight.reshape(count, p.groups, 1, 1).transpose(1, 2, 0, 3)
    if p.channels_last:
        wide = weight.reshape(p.groups, p.filters, count, -1)
        return wide[..., : p.channels]
    if p.transposed:
        return weight.reshape(p.groups, p.channels, p.filters, count).transpose(0, 2, 3, 1)
    return weight.reshape(p.groups, p.filters, p.channels, count).swapaxes(2, 3)


def _sums(p: Conv | IntegerConv, x: np.ndarray, w: np.ndarray, border: int = 0) -> np.ndarray:
    """Sums [batch, *outer, groups * filters] by w [groups, filters, taps, channels]."""
    patches = windows(x, p.window, p.outer, border)
    parts = patches.reshape(*patches.shape[:4], -1, p.groups, p.channels)
    y = np.einsum("ndhwtgc,gftc->ndhwgf", parts, w, optimize=True)
    return y.reshape(*y.shape[:4], -1)


def convolved(p: Conv, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Sums [batch, *outer, groups * filters] of x [batch, *inner, groups * channels]."""
    w, size = _weights(p, weight), p.groups * p.filters
    if not p.transposed:
        return _sums(p, x, w)
    parts = x.reshape(p.batch, -1, p.groups, p.channels)
    y = np.zeros((p.batch, prod(p.outer), p.groups, p.filters))
    for t, (place, there) in enumerate(taps(p.window, p.outer, p.inner)):  # where x's pixels go
        some = parts[:, there.reshape(-1)]
        y[:, place[there]] += np.einsum("npgc,gfc->npgf", some, w[:, :, t], optimize=True)
    return y.reshape(p.batch, *p.outer, size)


def convolution(p: Conv, read: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
    """What a Conv stores before its tail, [batch, *outer, groups * filters], of such an x."""
    y = convolved(p, x, read["weight"])
    y = y + (read["bias"].reshape(-1) if "bias" in read else 0)
    if p.act and p.slope:
        return np.asarray(STEPS[BY_KEY[p.act].name](y, read["slope"].reshape(-1)))
    return activation(p.act, p.act_alpha, y) if p.act else y


def conv(p: Conv, of: CallOperands) -> Results:
    """y through its tail, and the moments of its columns."""
    if p.channels_last and not p.planar:
        x = _images(p, of)
    else:
        x = np.moveaxis(of.dense("x", p.batch, p.groups * p.channels, *p.inner), 1, -1)
    names = [name for name in ("weight", "bias", "slope") if name in of]
    y = convolution(p, {name: of[name] for name in names}, np.ascontiguousarray(x))
    y = with_tail(p.tail, of, y if p.channels_last else np.moveaxis(y, -1, 1))
    moments = {"part": column_moments(y.astype(dtype_of(p.dtype)))} if p.column_moments else {}
    return {"y": y} | moments


def integer_conv(p: IntegerConv, of: CallOperands) -> Results:
    """The sums of codes, then scale and bias, rounded to float32 once, and the tail."""
    x, w = _images(p, of), of["weight"]
    if p.weights != "int8":
        x, w = x.astype(np.float32), w.astype(np.float32)
    w = w.reshape(p.columns, prod(p.window.kernel), -1)[: p.groups * p.filters]
    w = w.reshape(p.groups, p.filters, *w.shape[1:])[..., : p.channels]
    total = _sums(p, x, w, p.border) + (of["shift"].reshape(-1) if p.border else 0)
    scale, bias = (of[name].reshape(-1).astype(np.float32) for name in ("scale", "bias"))
    with np.errstate(all="ignore"):
        y = (total.astype(np.float32).astype(np.float64) * scale + bias).astype(np.float32)
    return {"y": with_tail(p.tail, of, y)}


def pixel_blocks(p: PixelBlocks, of: CallOperands) -> Results:
    """The codes of each block of pixels, and the border around them."""
    (rows, steps), (image, channel, line, pixel) = p.block, p.strides
    shape = (p.batch, p.high, p.columns, rows, steps, p.channels)
    strides = (image, rows * line, steps * pixel, line, pixel, channel)
    x = of.strided("x", shape, strides)
    if p.quantize:
        scale, zero = p.quantize
        ends = np.iinfo(p.out_dtype)
        codes = np.rint(x.astype(np.float32) / np.float32(scale)) + zero
        x = np.clip(np.where(np.isnan(codes), ends.min, codes), ends.min, ends.max)
    y = np.full((p.batch, p.tall, p.width, 16), p.border)
    inside = y[:, p.top : p.top + p.high, p.first : p.first + p.columns]
    inside[..., : prod(shape[3:])] = x.reshape(*shape[:3], -1)
    return {"y": y}


def pool(p: Pool, of: CallOperands) -> Results:
    """The largest and its place, the mean or the norm of each window."""
    channels = p.channels or 1
    images = p.planes // channels
    x = of.shaped("x", images, prod(p.inner), channels)
    shape = (images, *p.outer, channels)
    best, total, count = np.full(shape, -1), np.zeros(shape), np.zeros((*p.outer, 1))
    top = np.full(shape, -np.inf)
    propagates = "indices" not in of.writes and p.dtype != "float64"
    places = np.arange(prod(p.inner))
    if p.column_major:
        depth, height, _ = p.inner
        z, y, w = np.unravel_index(places, p.inner)
        places = (w * height + y) * depth + z
    ends = [n + after for n, after in zip(p.inner, p.window.after, strict=True)]
    padded = (
        _all([a < end for a, end in zip(at, ends, strict=True)])
        for at in tap_places(p.window, p.outer)
    )
    with np.errstate(all="ignore"):
        for (place, there), counted in zip(taps(p.window, p.inner, p.outer), padded, strict=True):
            if p.kind == "average":  # a negative padding behind the image cuts
                there = there & counted
            v, inside = x[:, place], there[..., None]
            count += (counted if p.include_pad else there)[..., None]
            if p.kind == "max":
                take = inside & ((best < 0) | (v > top) | (np.isnan(v) & propagates))
                top = np.where(take, v, top)
                best = np.where(take, places[place][..., None], best)
            else:
                v = v if p.kind == "average" else np.abs(v) ** p.p
                total += np.where(inside, v, 0)
        if p.kind == "max":
            base = np.arange(images).reshape(-1, 1, 1, 1, 1) * prod(p.inner)
            top = np.where(best < 0, LOWEST[p.dtype], top)
            return {"y": top, "indices": base + np.where(best < 0, p.nowhere, best)}
        if p.kind == "average":
            return {"y": np.where(count == 0, 0, total / count)}
        return {"y": total ** (1 / p.p)}


def max_pool_grad(p: MaxPoolGrad, of: CallOperands) -> Results:
    """Each dy added to where the first maximum of its window was."""
    x = of.shaped("x", p.planes, prod(p.inner), p.channels)
    dy = of.shaped("dy", p.planes, *p.outer, p.channels)
    best, top = np.full(dy.shape, -1), np.full(dy.shape, -np.inf)
    for place, there in taps(p.window, p.inner, p.outer):
        v = x[:, place]
        take = there[..., None] & ((best < 0) | (v > top))
        top, best = np.where(take, v, top), np.where(take, place[..., None], best)
    dx = np.zeros(x.shape)
    plane = np.arange(p.planes).reshape(-1, 1, 1, 1, 1)
    where = (*np.broadcast_arrays(plane, best, np.arange(p.channels)),)
    some = best >= 0
    np.add.at(dx, tuple(w[some] for w in where), dy[some])
    return {"dx": dx}


def channel_window(p: ChannelWindow, of: CallOperands) -> Results:
    """x by the squares of its neighbours."""
    x = of.shaped("x", -1, p.channels, p.inner)
    before, after = (p.width - 1) // 2, p.width // 2
    squares = np.pad(x**2, ((0, 0), (before, after), (0, 0)))
    total = sum(squares[:, i : i + p.channels] for i in range(p.width))
    return {"y": x / (p.bias + p.alpha / p.width * total) ** p.beta}


def resample(p: Resample, of: CallOperands) -> Results:
    """Weighted sums along one axis or two; `outside` where a source is -1."""
    length, resized, above_taps = p.rows
    x = of.shaped("x", p.outer, length, p.length, p.inner)
    index, weight = (of.shaped(name, p.resized, p.taps) for name in ("source", "weight"))
    outside = np.asarray((index < 0).any(1))[None, :]
    if above_taps:
        above, other = (of.shaped(n, resized, above_taps) for n in ("above", "above_weight"))
        outside = outside | np.asarray((above < 0).any(1))[:, None]
    else:
        above, other = np.arange(length)[:, None], np.ones((length, 1))
    y = np.zeros((p.outer, len(above), p.resized, p.inner))
    with np.errstate(all="ignore"):
        for s, t in product(range(above.shape[1]), range(p.taps)):
            by = other[:, s, None] * weight[None, :, t]
            v = x[:, np.maximum(above[:, s], 0)][:, :, np.maximum(index[:, t], 0)]
            y += np.where(by[..., None] == 0, 0, by[..., None] * v)
    return {"y": np.where(outside[..., None], p.outside, y)}


def _reflected(x: np.ndarray, low: float, high: float) -> np.ndarray:
    span = high - low
    if span <= 0:
        return np.full_like(x, low)
    x = np.abs(x - low)
    x = x - 2 * span * np.floor(x / (2 * span))
    return low + np.where(x > span, 2 * span - x, x)


def _settled(p: GridSample, x: np.ndarray, size: int) -> np.ndarray:
    """Positions in the image, as the padding has it."""
    if p.padding == 2:
        x = _reflected(x, 0, size - 1) if p.align else _reflected(x, -0.5, size - 0.5)
    return np.clip(x, 0, size - 1) if p.padding else x


def _axis_taps(p: GridSample, u: np.ndarray, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(index, -1 for a zero; weight) of each tap along one axis."""
    at = (u + 1) / 2 * (size - 1) if p.align else ((u + 1) * size - 1) / 2
    at = _settled(p, at, size) if p.mode < 2 else at
    base = np.rint(at) if p.mode == 0 else np.floor(at)
    taps, a = [], -0.75
    for tap in range((1, 2, 4)[p.mode]):
        shift = tap - (p.mode == 2)
        source = _settled(p, base + shift, size) if p.mode == 2 else base + shift
        index = np.where((source >= 0) & (source < size), source, -1).astype(np.int64)
        d = np.abs(at - base - shift)
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        taps.append((index, (np.ones_like(d), 1 - d, np.where(d <= 1, near, far))[p.mode]))
    return taps


def grid_sample(p: GridSample, of: CallOperands) -> Results:
    """Images at the positions of a grid."""
    x = of.shaped("x", p.batch, p.channels, prod(p.inner))
    grid = of.shaped("grid", p.batch, p.points, p.rank)
    zero = np.zeros((p.batch, p.points), np.int64)
    sizes = p.inner[::-1][: p.rank]
    with np.errstate(all="ignore"):
        axes = [_axis_taps(p, grid[..., i], size) for i, size in enumerate(sizes)]
        axes += [[(zero, np.ones(zero.shape))]] * (3 - p.rank)
        y = np.zeros((p.batch, p.channels, p.points))
        for (ix, wx), (iy, wy), (iz, wz) in product(*axes):
            inside = (ix >= 0) & (iy >= 0) & (iz >= 0)
            place = np.where(inside, (iz * p.inner[1] + iy) * p.inner[2] + ix, 0)
            v = np.take_along_axis(x, np.broadcast_to(place[:, None], y.shape), 2)
            y += np.where(inside[:, None], (wx * wy * wz)[:, None] * v, 0)
    return {"y": y}


def col2im(p: Col2Im, of: CallOperands) -> Results:
    """Each pixel the sum of what the columns hold of it."""
    planes, blocks = p.size // prod(p.image), prod(p.blocks)
    x = of.shaped("x", planes, prod(p.window.kernel), blocks)
    y = np.zeros((planes, prod(p.image)))
    for t, (place, there) in enumerate(taps(p.window, p.image, p.blocks)):
        inside = there.reshape(-1)
        np.add.at(y.T, place.reshape(-1)[inside], x[:, t, inside].T)
    return {"y": y}

"""NumPy's answer to the problems of images: Conv channels last, Pool, norms, Reduce in a pass."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from onnx_fuse.program.interpret.steps import activation
from onnx_fuse.program.problems import (
    ChannelNorm,
    Conv,
    ConvWeightGrad,
    MergedMoments,
    Pool,
    Reduce,
    Resample,
    RunningStats,
    Window,
)


def windows(x: np.ndarray, window: Window, outer: tuple[int, ...], fill: float) -> np.ndarray:
    """[N, *outer, *kernel, C] of images x [N, D, H, W, C], `fill` around them."""
    more = [(0, 0)]
    for i in range(3):
        reach = (window.kernel[i] - 1) * window.dilations[i] + 1
        last = (outer[i] - 1) * window.strides[i] + reach - window.before[i] - x.shape[i + 1]
        more.append((window.before[i], max(last, 0)))
    x = np.pad(x, [*more, (0, 0)], constant_values=fill)
    n, *_, c = x.shape
    own = x.strides
    shape = (n, *outer, *window.kernel, c)
    steps = [s * k for s, k in zip(own[1:4], window.strides, strict=True)]
    taps = [s * k for s, k in zip(own[1:4], window.dilations, strict=True)]
    return np.lib.stride_tricks.as_strided(x, shape, (own[0], *steps, *taps, own[4]))


def _images(p: Conv | ConvWeightGrad, x: np.ndarray) -> np.ndarray:
    """x with the strides that the problem gives it."""
    x = np.ascontiguousarray(x)
    if not p.x_strides:
        return x
    image, row, pixel = (8 * step for step in p.x_strides)
    shape = (p.batch, *p.inner, p.groups * p.channels)
    last = sum((n - 1) * s for n, s in zip(shape, (image, 0, row, pixel, 8), strict=True))
    assert last < x.nbytes, "reads beyond the end of the images"
    return np.lib.stride_tricks.as_strided(x, shape, (image, 0, row, pixel, 8))


def weight_gradient(p: ConvWeightGrad, read: Mapping[str, np.ndarray]) -> np.ndarray:
    """dw [groups * filters, channels, *kernel], from operands in float64."""
    size = p.groups * p.channels
    x = np.ascontiguousarray(_images(p, read["x"])).reshape(p.batch, *p.inner, size)
    found = windows(x, p.window, p.outer, 0.0).reshape(
        -1, prod(p.window.kernel), p.groups, p.channels
    )
    dy = read["dy"].reshape(-1, p.groups, p.filters)
    return np.einsum("ptgc,pgf->gfct", found, dy)


def convolution(p: Conv, read: Mapping[str, np.ndarray]) -> np.ndarray:
    """What a Conv stores before its tail, from operands in float64."""
    assert p.channels_last, p
    x, size = _images(p, read["x"]), p.groups * p.channels
    if p.planar:
        x = np.moveaxis(x.reshape(p.batch, size, *p.inner), 1, -1)
    x = np.ascontiguousarray(x).reshape(p.batch, *p.inner, size)
    found = windows(x, p.window, p.outer, 0.0).reshape(p.batch, *p.outer, -1, size)
    weight = read["weight"]
    if p.planar:  # runs of pixels of more channels
        kw = p.window.kernel[2]
        pixel = 4 if p.channels <= 4 and p.window.strides[2] % 2 == 0 else 8
        weight = weight[..., : kw * pixel].reshape(p.filters, -1, pixel)
    if p.depthwise:
        y = (found * weight.reshape(-1, size)).sum(-2)
    else:
        w = weight.reshape(p.groups, p.filters, -1, weight.shape[-1])[..., : p.channels]
        parts = found.reshape(*found.shape[:-1], p.groups, p.channels)
        y = np.einsum("n...tgc,gftc->n...gf", parts, w).reshape(*found.shape[:4], -1)
    y = y + read["bias"]
    if p.act:
        y = activation(p.act, p.act_alpha, y)
    return y


def pool(p: Pool, x: np.ndarray) -> np.ndarray:
    """The largest, or the mean of those inside, of each window."""
    assert p.channels
    assert p.kind == "max" or not p.include_pad
    x = x.reshape(-1, *p.inner, p.channels)
    fill = -np.inf if p.kind == "max" else np.nan
    found = windows(x, p.window, p.outer, fill).reshape(x.shape[0], *p.outer, -1, p.channels)
    result: np.ndarray = found.max(-2) if p.kind == "max" else np.nanmean(found, -2)
    return result


def resample(p: Resample, read: Mapping[str, np.ndarray]) -> np.ndarray:
    """Weighted sums along one axis or two."""
    length, resized, taps = p.rows
    x = read["x"].reshape(p.outer, length, p.length, p.inner)
    index, weight = (read[name].reshape(p.resized, p.taps) for name in ("source", "weight"))
    assert (index >= 0).all()
    if taps:
        above, other = (read[n].reshape(resized, taps) for n in ("above", "above_weight"))
        x = np.einsum("oisrc,is->oirc", x[:, above.astype(int)], other)
    return np.einsum("oirtc,rt->oirc", x[:, :, index.astype(int)], weight)


def reduction(p: Reduce, x: np.ndarray) -> np.ndarray:
    """A mean or a largest that one pass makes."""
    assert p.splits == 1
    assert p.reducer in ("Mean", "Max")
    x = x.reshape(p.outer, p.length, p.inner)
    result: np.ndarray = x.mean(1) if p.reducer == "Mean" else x.max(1)
    assert result.size == prod((p.outer, p.inner))
    return result


def column_moments(y: np.ndarray) -> np.ndarray:
    """[rows / 64, columns, 2]: the mean and the sum of squared deviations of 64 rows each."""
    rows = y.astype(np.float64).reshape(-1, y.shape[-1])
    parts = [rows[at : at + 64] for at in range(0, len(rows), 64)]
    return np.stack([np.stack([p.mean(0), p.var(0) * len(p)], -1) for p in parts])


def normalized(
    p: MergedMoments | ChannelNorm | RunningStats, read: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The statistics of columns from parts of them, or what they make of x or of older ones."""
    if isinstance(p, MergedMoments):
        count = np.minimum(p.m - 64 * np.arange(p.parts), 64)[:, None]
        mean, square = np.moveaxis(read["part"], 2, 0)
        whole = (mean * count).sum(0) / p.m
        return {"mean": whole, "variance": (square + count * (mean - whole) ** 2).sum(0) / p.m}
    if isinstance(p, RunningStats):
        names = ("mean", "variance")
        keep = p.momentum
        return {f"new_{n}": keep * read[f"old_{n}"] + (1 - keep) * read[n] for n in names}
    assert not p.group
    assert p.tail is None
    x = read["x"].reshape(-1, p.channels, p.inner)
    scale, bias, mean, variance = (
        read[name][:, None] for name in ("scale", "bias", "mean", "variance")
    )
    return {"y": (x - mean) / np.sqrt(variance + p.epsilon) * scale + bias}

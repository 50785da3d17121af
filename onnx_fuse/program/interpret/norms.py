"""NumPy's answers to norms and their gradients: of rows, of channels, of groups of channels."""

from __future__ import annotations

import numpy as np

from onnx_fuse.program.call import Tensor, dtype_of
from onnx_fuse.program.expression import Tail
from onnx_fuse.program.interpret.data_movement import Results
from onnx_fuse.program.interpret.memory import CallOperands
from onnx_fuse.program.interpret.steps import derivative, evaluate
from onnx_fuse.program.problems import (
    ChannelGrad,
    ChannelNorm,
    Fold,
    GroupGrad,
    MergedMoments,
    Norm,
    NormGrad,
    NormGradSums,
    RunningStats,
)


def with_tail(tail: Tail | None, of: CallOperands, values: np.ndarray) -> np.ndarray:
    """What a tail makes of the values, in their shape."""
    if tail is None:
        return values
    loads = [
        of.raw(e).reshape(values.shape[-1:] if i in tail.rows else values.shape)
        for i, e in enumerate(e for e in ("e1", "e2", "e3") if e in of)
    ]
    loads.insert(tail.own, values)
    target = Tensor(0, tail.dtype, values.shape, (0,) * values.ndim)
    (result,) = evaluate(tail.expression, loads, [target])
    return result


def column_moments(y: np.ndarray) -> np.ndarray:
    """[rows / 64, columns, 2]: the mean and the sum of squared deviations of 64 rows each."""
    rows = y.astype(np.float64).reshape(-1, y.shape[-1])
    parts = [rows[at : at + 64] for at in range(0, len(rows), 64)]
    return np.stack([np.stack([p.mean(0), p.var(0) * len(p)], -1) for p in parts])


def norm(p: Norm, of: CallOperands) -> Results:
    """y and what else there is of rows: the sum, the statistics, a product with few columns."""
    s = of.shaped("x", p.rows, p.length)
    if p.residual:
        s = s + of.shaped("residual", p.rows, p.length)
        s = s.astype(dtype_of(p.dtype)).astype(np.float64)
    mean = np.zeros((p.rows, 1)) if p.rms else s.mean(1, keepdims=True)
    variance = np.square(s - mean).mean(1, keepdims=True)
    with np.errstate(all="ignore"):
        rstd = 1 / np.sqrt(variance + p.epsilon)
        y = (s - mean) * rstd
        if p.affine == 1:
            y = y * of.shaped("scale", p.length)
            y = y + (of.shaped("bias", p.length) if "bias" in of else 0)
        elif p.affine == 2:
            rows = np.arange(p.rows)[:, None] % p.groups * p.channels
            channel = rows + np.arange(p.length) // p.inner
            y = y * of["scale"].reshape(-1)[channel] + of["bias"].reshape(-1)[channel]
    results = {"sum": s, "mean": mean, "rstd": rstd}
    y = with_tail(p.tail, of, y)  # a product of few columns reads it where it is not written, too
    if "y" in of.writes:
        results["y"] = y
    if p.columns:
        shape = (p.columns, p.length) if p.turned else (p.length, p.columns)
        w = of.dense("w", *shape)
        z = y.astype(np.float64) @ (w.T if p.turned else w)
        results["z"] = z + (of["c"].reshape(-1) if "c" in of else 0)
    return results


def norm_grad(p: NormGrad, of: CallOperands) -> Results:
    """dx, and sums of dy xh and dy for `parts` runs of rows."""
    x, rstd = of.shaped("x", p.rows, p.length), of.shaped("rstd", p.rows, 1)
    if p.k:
        shape = (p.length, p.k) if p.turned else (p.k, p.length)
        b = of.dense("b", *shape)
        dy = of.dense("dy", p.rows, p.k) @ (b.T if p.turned else b)
    else:
        dy = of.shaped("dy", p.rows, p.length)
    xh = x * rstd if p.rms else (x - of.shaped("mean", p.rows, 1)) * rstd
    g = dy * of.shaped("scale", p.length)
    dx = g - xh * (g * xh).mean(1, keepdims=True)
    dx = rstd * (dx if p.rms else dx - g.mean(1, keepdims=True))
    dx = dx + (of.shaped("ds", p.rows, p.length) if p.skip else 0)
    results = {"dx": with_tail(p.tail, of, dx)} if p.dx else {}
    sums = [np.stack([(dy * xh)[i :: p.parts].sum(0), dy[i :: p.parts].sum(0)])
            for i in range(p.parts)]  # fmt: skip
    return results | {"part": np.stack(sums)}


def norm_grad_sums(p: NormGradSums, of: CallOperands) -> Results:
    """The sums over the parts."""
    part = of.dense("part", p.grad.parts, 2, p.grad.length).sum(0)
    return dict(zip(("dscale", "dbias"), part, strict=True))


def merged_moments(p: MergedMoments, of: CallOperands) -> Results:
    """The statistics of columns from parts of 64 rows."""
    count = np.minimum(p.m - 64 * np.arange(p.parts), 64)[:, None]
    mean, square = np.moveaxis(of.dense("part", p.parts, p.n, 2), 2, 0)
    whole = (mean * count).sum(0) / p.m
    return {"mean": whole, "variance": (square + count * (mean - whole) ** 2).sum(0) / p.m}


def running_stats(p: RunningStats, of: CallOperands) -> Results:
    """What is left of the old statistics, and the batch's own."""
    keep = p.momentum
    names = ("mean", "variance")
    return {f"new_{n}": keep * of[f"old_{n}"] + (1 - keep) * of[n] for n in names}


def channel_norm(p: ChannelNorm, of: CallOperands) -> Results:
    """y by statistics that are given for each channel, or for each row's groups of channels."""
    rows = p.size // (p.channels * p.inner)
    x = of.shaped("x", rows, p.channels, p.inner)
    scale, bias = (of.shaped(name, p.channels, 1) for name in ("scale", "bias"))
    mean, variance = (of[name].reshape(-1) for name in ("mean", "variance"))
    channel = np.arange(p.channels)
    if p.group:
        image = np.arange(rows)[:, None] // (p.pixels or 1)
        at = (image * (p.channels // p.group) + channel // p.group)[..., None]
    else:
        at = channel[:, None]
    with np.errstate(all="ignore"):
        y = (x - mean[at]) / np.sqrt(variance[at] + p.epsilon) * scale + bias
    return {"y": with_tail(p.tail, of, y)}


def channel_grad(p: ChannelGrad, of: CallOperands) -> Results:
    """One of the three stages of a BatchNormalization's gradient."""
    shape = (p.batch, p.channels, p.inner)
    if p.stage == "params":
        part = of["part"]
        sums = part.reshape(-1, 2, p.channels, part.shape[-1] // p.channels).sum((0, 3))
        root = np.sqrt(of["variance"].reshape(-1) + p.epsilon)
        count, scale = p.batch * p.inner, of["scale"].reshape(-1)
        gate = of["bias"].reshape(-1) if p.relu else np.zeros(p.channels)
        numbers = np.stack([sums[0] / count / root, sums[1] / count, scale / root, gate])
        return {"dscale": sums[0], "dbias": sums[1], "sums": numbers}
    x, dy = (of.shaped(name, *shape) for name in ("x", "dy"))
    centred = x - of.shaped("mean", p.channels, 1)
    if p.stage == "sums":
        rstd = 1 / np.sqrt(of.shaped("variance", p.channels, 1) + p.epsilon)
        if p.relu:
            scale, bias = (of.shaped(name, p.channels, 1) for name in ("scale", "bias"))
            dy = np.where(centred * rstd * scale + bias > 0, dy, 0)
        part = np.zeros(of.writes["part"].shape)
        columns = part.reshape(len(part), 2, p.channels, -1)
        columns[0, :, :, 0] = (dy * centred * rstd).sum((0, 2)), dy.sum((0, 2))
        return {"part": part}
    assert p.stage == "dx", p
    c2, c1, a, gate = of.dense("sums", 4, p.channels, 1)
    if p.relu:
        dy = np.where(centred * a + gate > 0, dy, 0)
    return {"dx": a * (dy - c1 - centred * c2)}


def group_grad(p: GroupGrad, of: CallOperands) -> Results:
    """One of the three stages of a GroupNormalization's gradient."""
    groups = p.channels // p.per
    scale = of["scale"].reshape(-1)
    root = np.sqrt(of.shaped("variance", p.images, groups) + p.epsilon)
    if p.stage == "params":
        part = of.dense("part", p.images, 2, p.channels, p.splits).sum(3)
        weighted = (part * scale).reshape(p.images, 2, groups, p.per).sum(3)
        count = p.per * p.pixels
        one, two = weighted[:, 0] / count / root, weighted[:, 1] / count / root**3
        dscale = (part[:, 1] / np.repeat(root, p.per, 1)).sum(0)
        return {"dscale": dscale, "dbias": part[:, 0].sum(0), "means": np.stack([one, two], -1)}
    shape = (p.images, p.pixels, p.channels) if p.last else (p.images, p.channels, p.pixels)
    x, dy = (of.shaped(name, *shape) for name in ("x", "dy"))
    x, dy = (v if p.last else v.swapaxes(1, 2) for v in (x, dy))  # [images, pixels, channels]

    def by_channel(values: np.ndarray) -> np.ndarray:
        return np.repeat(values.reshape(p.images, groups), p.per, 1)[:, None]

    centred = x - by_channel(of["mean"])
    a = scale / by_channel(root)
    z = centred * a + of["bias"].reshape(-1)
    dz = dy * derivative(p.act, p.act_alpha, z) if p.act else dy
    if p.stage == "sums":
        part = np.zeros((p.images, 2, p.channels, p.splits))
        part[..., 0] = np.stack([dz.sum(1), (dz * centred).sum(1)], 1)
        return {"part": part}
    assert p.stage == "dx", p
    one, two = (by_channel(v) for v in np.moveaxis(of.dense("means", p.images, groups, 2), 2, 0))
    dx = a * dz - one - centred * two
    return {"dx": dx if p.last else dx.swapaxes(1, 2)}


def fold(p: Fold, of: CallOperands) -> Results:
    """wq = gamma w, its column sums as it is rounded, and cv = beta w + c, of each weight."""
    results: Results = {}
    for i, (k, n) in enumerate(p.shapes):
        end = f".{i}" if f"w.{i}" in of else ""
        w, gamma = of.dense(f"w{end}", k, n), of.shaped(f"gamma{end}", k, 1)
        low = w.astype(dtype_of(p.dtype))
        w = low.astype(np.float64)
        wq = (gamma * w).astype(dtype_of(p.dtype))
        beta = of.shaped(f"beta{end}", k) if f"beta{end}" in of else np.zeros(k)
        cv = beta @ w + (of.shaped(f"c{end}", n) if f"c{end}" in of else 0)
        cs = wq.astype(np.float64).sum(0)
        results |= {f"wq{end}": wq, f"cs{end}": cs, f"cv{end}": cv, f"low{end}": low}
    return results

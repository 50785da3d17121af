"""Normalizations: Layer, RMS, Skip (residual), Group, Instance and Batch.

Rows that fit in registers take one kernel (layernorm/row.cu); few long rows, and BatchNormalization
in training, take the split reduction to moments and then layernorm/channel.cu.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import onnx_ir as ir

from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.kernels.channel import by_columns, channel_chunks, group_chunks
from onnx_fuse.kernels.norm import grad_parts
from onnx_fuse.lower.channels_last import channels_last, in_stretch, stored_last
from onnx_fuse.lower.context import Context, Lowering, Unserved, floats
from onnx_fuse.lower.elementwise import relu_of
from onnx_fuse.lower.reduce import reduction
from onnx_fuse.ops.activations import ACTIVATIONS
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.problems import (
    ChannelGrad,
    ChannelNorm,
    GroupGrad,
    Norm,
    NormGrad,
    NormGradSums,
    RunningStats,
)


def layer_norm(ctx: Context, node: ir.Node) -> None:
    """LayerNormalization, RMSNormalization, SkipLayerNorm, SkipRMSNorm over the trailing axes."""
    name = FusedName.of(node.op_type)
    skip, rms = name.skip, name.rms
    x = floats(ctx.dense(node, 0))
    axis = ctx.attr(node, "axis", -1) % len(x.shape)
    length = prod(x.shape[axis:])
    scale = _row(ctx, node, 1 + skip, x.shape[axis:])
    if scale is None:
        raise Unserved("not-a-row", what="the scale")
    reads = {"x": x, "scale": scale}
    if skip:
        reads["residual"] = ctx.dense(node, 1)
        if reads["residual"].shape != x.shape:
            raise Unserved("broadcast")
    if not rms and ctx.has(node, 2 + skip):
        bias = _row(ctx, node, 2 + skip, x.shape[axis:])
        if bias is None:
            raise Unserved("not-a-row", what="the bias")
        reads["bias"] = bias
    outputs = ["y", "sum"] if skip else ["y"]
    outputs += name.exposed if node.domain == FUSE else ["mean", "rstd"]
    writes = {
        name: ctx.output(node, i, *(() if name in ("mean", "rstd") else (x.shape, x.dtype)))
        for i, name in enumerate(outputs)
        if i < len(node.outputs) and (i == 0 or ctx.wants(node, i) or name == "sum")
    }
    if not x.size:
        return
    stat = next((writes[n].dtype for n in ("mean", "rstd") if n in writes), "float32")
    problem = Norm(
        x.size // length, length, x.dtype, scale.dtype, stat, rms, residual=skip,
        epsilon=ctx.attr(node, "epsilon", 1e-5),
    )  # fmt: skip
    ctx.select(node, problem, reads, writes, inplace=[("y", "x")])


def _row(ctx: Context, node: ir.Node, i: int, row: tuple[int, ...]) -> Tensor | None:
    """Input `i` spread to the shape of a row; None where it is another one for other rows."""
    value = ctx.view(node, i)
    lead = len(value.shape) - len(row)
    shape = (*[1] * -lead, *value.shape[max(lead, 0) :])
    if any(n != 1 for n in value.shape[: max(lead, 0)]):
        return None
    if not all(n in (1, size) for n, size in zip(shape, row, strict=True)):
        return None
    return ctx.contiguous(ctx.contiguous(value).view(shape).expand(row))


def layer_norm_grad(ctx: Context, node: ir.Node) -> None:
    """LayerNormGrad, RMSNormalizationGrad, their Skip forms: dx, dscale, dbias by mean, rstd."""
    op = FusedName.of(node.op_type)
    skip, rms = op.skip, op.rms
    names = ["dy", *(["ds"] if skip else []), "x", "scale", *([] if rms else ["mean"]), "rstd"]
    reads = {name: ctx.dense(node, i) for i, name in enumerate(names)}
    x, scale, rstd = reads["x"], reads["scale"], reads["rstd"]
    length = x.shape[-1] if x.shape else 1
    floats(x, *(reads[n] for n in ("dy", "ds") if n in reads))
    if scale.size != length or not x.size:
        raise Unserved("not-a-row", what="the scale")
    problem = NormGrad(
        x.size // length, length, x.dtype, scale.dtype, rstd.dtype, 0, rms, skip,
        dx=ctx.wants(node, 0),
    )  # fmt: skip
    problem = replace(problem, parts=grad_parts(problem))
    wide = "float64" if x.dtype == "float64" else "float32"
    part = ctx.scratch(wide, (problem.parts, 2, length))
    dx = {"dx": ctx.output(node, 0, x.shape, x.dtype)} if problem.dx else {}
    inplace = [(w, r) for w in dx for r in ("dy", "x")]
    ctx.select(node, problem, reads, {**dx, "part": part}, inplace=inplace)
    params = {n: ctx.output(node, i, scale.shape, scale.dtype)
              for i, n in enumerate(["dscale"] if rms else ["dscale", "dbias"], 1)}  # fmt: skip
    # whether dx is made is all the same to the sums: others may share their launch
    sums = NormGradSums(replace(problem, dx=True), len(params))
    ctx.select(node, sums, {"part": part}, params)


def group_norm(ctx: Context, node: ir.Node) -> None:
    """GroupNormalization and InstanceNormalization (a group a channel): scale, bias by channel."""
    x, scale, bias = floats(ctx.view(node, 0)), ctx.dense(node, 1), ctx.dense(node, 2)
    batch, channels, inner = x.shape[0], x.shape[1], prod(x.shape[2:])
    groups = ctx.attr(node, "num_groups", channels)
    if scale.size != channels:
        raise Unserved("group-scale")
    y = ctx.output(node, 0, x.shape, x.dtype)
    if not x.size:
        return
    rows, per, epsilon = batch * groups, channels // groups, ctx.attr(node, "epsilon", 1e-5)
    length = per * inner
    if in_stretch(ctx, x):
        x, y = channels_last(x), channels_last(stored_last(ctx, node, y))
        stats = _group_moments(ctx, node, x, (batch, inner, groups, per), True)
        _apply(ctx, node, (x, scale, bias, *stats), y, (channels, 1), per, epsilon, inner)
        return
    x = ctx.contiguous(x)
    if length > 32768 or (length > 4096 and rows < 64):
        stats = _group_moments(ctx, node, x, (batch, inner, groups, per), False)
        _apply(ctx, node, (x, scale, bias, *stats), y, (channels, inner), per, epsilon)
        return
    problem = Norm(
        rows, length, x.dtype, scale.dtype, affine=2, groups=groups, channels=per, inner=inner,
        epsilon=epsilon,
    )  # fmt: skip
    reads = {"x": x, "scale": scale, "bias": bias}
    ctx.select(node, problem, reads, {"y": y}, inplace=[("y", "x")])


def _group_moments(
    ctx: Context, node: ir.Node, x: Tensor, sizes: tuple[int, int, int, int], last: bool
) -> tuple[Tensor, Tensor]:
    """Mean and variance of each image's groups: by the same calls in forward and gradient.

    `sizes` are the images, pixels, groups and channels a group; `last`: channels are x's last axis.
    """
    images, pixels, groups, per = sizes
    rows = images * groups
    mean, variance = (ctx.scratch(_stat(x), (rows,)) for _ in range(2))
    if last:
        reduction(ctx, node, x, mean, "Moments", [1, 3], variance, sizes, outermost=True)
    else:
        reduction(ctx, node, x, mean, "Moments", [1], variance, (rows, per * pixels))
    return mean, variance


def group_norm_grad(ctx: Context, node: ir.Node) -> None:
    """GroupNormGrad and its forms with an activation: dx, dscale, dbias from dy and x."""
    dy, x = ctx.view(node, 0), ctx.view(node, 1)
    scale, bias = ctx.dense(node, 2), ctx.dense(node, 3)
    if not floats(x, dy).size or x.size >= 2**32:
        raise Unserved("empty")
    outer, last = x.shape, in_stretch(ctx, x)
    images, channels, pixels = outer[0], outer[1], prod(outer[2:])
    groups = ctx.attr(node, "num_groups", channels)
    if scale.size != channels or bias.size != channels or channels % groups:
        raise Unserved("group-scale")
    act = ACTIVATIONS.get(FusedName.of(node.op_type).activation)
    if act is not None and x.dtype == "float64":
        raise Unserved("no-kernel", what="an activation in float64")
    problem = GroupGrad(
        "sums", images, channels, pixels, channels // groups, last, 1, 1, x.dtype, scale.dtype,
        ctx.attr(node, "epsilon", 1e-5), act.key if act else "",
        ctx.attr(node, "alpha", act.alpha) if act else 0.0,
    )  # fmt: skip
    splits, chunk = group_chunks(problem)
    problem = replace(problem, splits=splits, chunk=chunk)
    dy, x = (ctx.contiguous(channels_last(t) if last else t) for t in (dy, x))
    sizes = (images, pixels, groups, problem.per)
    mean, variance = _group_moments(ctx, node, x, sizes, last)
    stat = _stat(x)
    part = ctx.scratch(stat, (images, 2, channels, splits))
    means = ctx.scratch(stat, (images, groups, 2))
    shared = {"x": x, "dy": dy, "scale": scale, "bias": bias, "mean": mean, "variance": variance}
    ends = {"scale": scale, "variance": variance}
    _in_stages(ctx, node, problem, (shared, ends, shared), part, {"means": means}, outer, last)


def batch_norm(ctx: Context, node: ir.Node) -> None:
    """BatchNormalization: by the running statistics, or in training by the batch's own."""
    x = floats(ctx.view(node, 0))
    scale, bias, mean, variance = (ctx.dense(node, i) for i in range(1, 5))
    y = ctx.output(node, 0, x.shape, x.dtype)
    if not x.size:
        return
    last = in_stretch(ctx, x)
    y = channels_last(stored_last(ctx, node, y)) if last else y
    shape = _planes(x, last)
    planes = channels, _ = shape[1:]
    x = ctx.contiguous(channels_last(x) if last else x)
    if ctx.attr(node, "training_mode", 0):
        old = (mean, variance)
        mean, variance = (ctx.scratch(_stat(x), (channels,)) for _ in range(2))
        reduction(ctx, node, x, mean, "Moments", [0, 2], variance, shape)
        if any(ctx.wants(node, i) for i in (1, 2) if i < len(node.outputs)):
            new = [ctx.output(node, 1), ctx.output(node, 2)]
            names = ("old_mean", "old_variance", "mean", "variance", "new_mean", "new_variance")
            problem = RunningStats(
                channels, x.dtype, scale.dtype, mean.dtype, old[0].dtype,
                ctx.attr(node, "momentum", 0.9),
            )  # fmt: skip
            bound = dict(zip(names, (*old, mean, variance, *new), strict=True))
            ctx.select(
                node, problem, {n: bound[n] for n in names[:4]}, {n: bound[n] for n in names[4:]}
            )
    epsilon = ctx.attr(node, "epsilon", 1e-5)
    _apply(ctx, node, (x, scale, bias, mean, variance), y, planes, 0, epsilon)


def batch_norm_grad(ctx: Context, node: ir.Node) -> None:
    """BatchNormGrad: dx, dscale, dbias; the forward's mean and variance are the same calls."""
    dy, x, scale = ctx.view(node, 0), ctx.view(node, 1), ctx.dense(node, 2)
    if not floats(x, dy).size or x.size >= 2**32:
        raise Unserved("empty")
    relu = _relu_behind(ctx, node)
    dy = ctx.view(relu[0], 1) if relu is not None else dy
    outer, last = x.shape, in_stretch(ctx, x)
    batch, channels, inner = _planes(x, last)
    dy, x = (ctx.contiguous(channels_last(t) if last else t) for t in (dy, x))
    stat = _stat(x)
    mean, variance = (ctx.scratch(stat, (channels,)) for _ in range(2))
    reduction(ctx, node, x, mean, "Moments", [0, 2], variance, (batch, channels, inner))
    problem = ChannelGrad(
        "sums", batch, channels, inner, 0, 0, x.dtype, scale.dtype,
        ctx.attr(node, "epsilon", 1e-5), relu is not None,
    )  # fmt: skip
    splits, chunk = channel_chunks(problem)
    problem = replace(problem, splits=splits, chunk=chunk)
    per = inner if by_columns(problem) else 1
    part, sums = ctx.scratch(stat, (splits, 2, channels * per)), ctx.scratch(stat, (4, channels))
    operands = {"x": x, "dy": dy, "mean": mean}
    gate = {} if relu is None else {"scale": scale, "bias": ctx.dense(relu[1], 2)}
    shared = {**operands, **gate, "variance": variance}
    ends = {"scale": scale, **gate, "variance": variance}
    _in_stages(ctx, node, problem, (shared, ends, operands), part, {"sums": sums}, outer, last)


def _in_stages(
    ctx: Context, node: ir.Node, problem: ChannelGrad | GroupGrad,
    stages: tuple[dict[str, Tensor], ...], part: Tensor, means: dict[str, Tensor],
    outer: tuple[int, ...], last: bool,
) -> None:  # fmt: skip
    """The parts of the sums over pixels, dscale and dbias of them with what dx takes, and dx.

    `stages` are what the three read beside parts and `means`; `outer` is the shape of dx, and
    `last` says that its channels are last.
    """
    first, ends, pixels = stages
    scale = ends["scale"]
    ctx.select(node, problem, first, {"part": part})
    params = {name: ctx.output(node, i, scale.shape, scale.dtype)
              for i, name in ((1, "dscale"), (2, "dbias")) if ctx.wants(node, i)}  # fmt: skip
    ctx.select(node, replace(problem, stage="params"), {"part": part, **ends}, params | means)
    if ctx.wants(node, 0):
        dx = ctx.output(node, 0, outer, problem.dtype)
        dx = channels_last(stored_last(ctx, node, dx)) if last else dx
        inplace = [("dx", "dy"), ("dx", "x")]
        reads = {**pixels, **means}
        ctx.select(node, replace(problem, stage="dx"), reads, {"dx": dx}, inplace=inplace)


def _relu_behind(ctx: Context, node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """The Relu gradient that only this BatchNormGrad reads, and the norm in front of that Relu."""
    dy, x, scale = node.inputs
    before = dy.producer() if dy is not None and len(dy.uses()) == 1 else None
    relu = relu_of(ctx, before) if before is not None else None
    norm = relu.inputs[0].producer() if relu is not None and relu.inputs[0] is not None else None
    if before is None or norm is None or (norm.op_type, norm.domain) != ("BatchNormalization", ""):
        return None
    same = norm.inputs[0] is x and norm.inputs[1] is scale
    same = same and ctx.attr(norm, "epsilon", 1e-5) == ctx.attr(node, "epsilon", 1e-5)
    trained = (
        ctx.attr(norm, "training_mode", 0) and ctx.view(before, 1).shape == ctx.view(node, 1).shape
    )
    return (before, norm) if same and trained else None


def _planes(x: Tensor, last: bool) -> tuple[int, int, int]:
    """(batch, channels, elements of a channel side by side); `last`: pixels make the batch."""
    if len(x.shape) < 2:
        return x.size, 1, 1
    batch, channels, *spatial = x.shape
    return (batch * prod(spatial), channels, 1) if last else (batch, channels, prod(spatial))


def _stat(x: Tensor) -> str:
    return "float64" if x.dtype == "float64" else "float32"


def _apply(
    ctx: Context, node: ir.Node, reads: tuple[Tensor, ...], y: Tensor, planes: tuple[int, int],
    per: int, epsilon: float, pixels: int = 0,
) -> None:  # fmt: skip
    """y by given statistics; `per` channels share one, or 0: one a channel over the batch.

    `planes` are the channels, and the elements of one side by side; `pixels`: rows of channels that
    share statistics, or all.
    """
    x = reads[0]
    problem = ChannelNorm(
        x.size, *planes, per, x.dtype, reads[1].dtype, reads[3].dtype, epsilon, pixels=pixels
    )  # fmt: skip
    bound = dict(zip(("x", "scale", "bias", "mean", "variance"), reads, strict=True))
    ctx.select(node, problem, bound, {"y": y}, inplace=[("y", "x")])


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "LayerNormalization"): layer_norm,
    ("", "RMSNormalization"): layer_norm,
    (FUSE, "RMSNormalization"): layer_norm,
    (FUSE, "SkipLayerNorm"): layer_norm,
    (FUSE, "SkipRMSNorm"): layer_norm,
    (FUSE, "LayerNormGrad"): layer_norm_grad,
    (FUSE, "RMSNormalizationGrad"): layer_norm_grad,
    (FUSE, "SkipLayerNormGrad"): layer_norm_grad,
    (FUSE, "SkipRMSNormGrad"): layer_norm_grad,
    ("", "GroupNormalization"): group_norm,
    ("", "InstanceNormalization"): group_norm,
    **{
        (FUSE, str(FusedName.make("GroupNorm", act, grad=True))): group_norm_grad
        for act in ("", *ACTIVATIONS)
    },
    ("", "BatchNormalization"): batch_norm,
    (FUSE, "BatchNormGrad"): batch_norm_grad,
}

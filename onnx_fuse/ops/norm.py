"""Normalizations. With xh = (x - mean)·rstd, g = dy·scale and means over the normalized axes:
dx = rstd (g - mean(g) - xh·mean(g·xh)),  dscale = Σ dy·xh,  dbias = Σ dy.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_fuse.ir.build import required
from onnx_fuse.ops.opdef import OpDef, Unary, register, table
from onnx_fuse.ops.shape_ops import (
    Tensor,
    Values,
    Writer,
    arguments,
    ints_attribute,
    known_rank,
    norm_axis,
    same_shape,
    spans,
)


def normalized(
    op: Writer, g: ir.Value, xh: ir.Value, rstd: ir.Value, axes: Sequence[int], centred: bool = True
) -> Tensor:
    """dx of xh = (x - mean)·rstd (or x·rstd), from g = d loss / d xh."""
    inner = op.mean_over(op.Mul(g, xh), axes)
    if centred:
        g = op.Sub(g, op.mean_over(g, axes))
    return op.Mul(op.Sub(g, op.Mul(xh, inner)), rstd)


def _affine(
    op: Writer, dy: ir.Value, xh: ir.Value, scale: ir.Value, bias: ir.Value | None
) -> tuple[Tensor, Tensor]:
    """dscale, dbias: sums over what scale and bias were broadcast along."""
    return (
        op.unbroadcast(op.Mul(dy, xh), scale),
        None if bias is None else op.unbroadcast(dy, bias),
    )


def _layer_norm(op: Writer, node: ir.Node, dys: Values) -> Values:
    """The gradient from the saved Mean and InvStdDev, in their own type (stash_type)."""
    x, scale, bias = arguments(node, 3)
    axis, n = norm_axis(node.attributes.get_int("axis", -1), x), known_rank(x)
    axes = range(axis, n)
    wide = ir.DataType(node.attributes.get_int("stash_type", 1))
    if x.dtype == ir.DataType.DOUBLE and wide != x.dtype:
        # the statistics of the node are rounded to float32
        wide, (xh, rstd) = x.dtype, _moments(op, node, x, axes)
    else:
        mean, rstd = (op.output(node, i, wide, label) for i, label in ((1, "mean"), (2, "rstd")))
        for value in (mean, rstd):
            if value.shape is None and x.shape is not None:
                value.shape = ir.Shape([*x.shape[:axis], *[1] * (n - axis)])
        last = axis == n - 1 and bias is not None and x.dtype == scale.dtype == bias.dtype
        last = last and spans(scale, x) and spans(bias, x)
        if op.fused and last and not any(dy is not None for dy in dys[1:]):
            inputs = [dys[0], x, scale, mean, rstd]
            return list(op.emit("LayerNormGrad", inputs, [x, scale, bias], stash_type=int(wide)))
        xh = op.formula("(x - mean) * rstd", x=op.to_type(x, wide), mean=mean, rstd=rstd)
    dy, dmean, drstd = (
        None if i >= len(dys) or dys[i] is None else op.to_type(dys[i], wide) for i in range(3)
    )
    dx, dscale, dbias = None, None, None
    if dy is not None:
        dscale, dbias = _affine(op, dy, xh, scale, bias)
        dx = normalized(op, op.Mul(dy, op.to_type(scale, wide)), xh, rstd, axes)
    if dmean is not None or drstd is not None:
        # mean = Σ x / K;  rstd = (var + ε)^-½:  d rstd / dx = -rstd² xh / K
        count = op.to_type(op.ratio(x, rstd), wide)
        if dmean is not None:
            part = op.Expand(op.Div(dmean, count), op.Shape(x))
            dx = part if dx is None else op.Add(dx, part)
        if drstd is not None:
            text = "drstd * (rstd * rstd) / count * xh"
            part = op.formula(text, drstd=drstd, rstd=rstd, count=count, xh=xh)
            dx = op.Neg(part) if dx is None else op.Sub(dx, part)
    return [None if g is None else op.to_type(g, x.dtype) for g in (dx, dscale, dbias)]


def _rms_norm(op: Writer, node: ir.Node, dys: Values) -> Values:
    (x, scale), dy = arguments(node, 2), dys[0]
    axis = norm_axis(node.attributes.get_int("axis", -1), x)
    axes = range(axis, known_rank(x))
    square = op.mean_over(op.Mul(x, x), axes)
    rstd = _rstd(op, node, square)
    xh = op.Mul(x, rstd)
    dscale, _ = _affine(op, dy, xh, scale, None)
    return [normalized(op, op.Mul(dy, scale), xh, rstd, axes, centred=False), dscale]


def _rstd(op: Writer, node: ir.Node, variance: ir.Value) -> Tensor:
    return op.formula("Reciprocal(Sqrt(variance + @epsilon))", node, variance=variance)


def _moments(op: Writer, node: ir.Node, x: ir.Value, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(x - mean)·rstd and rstd over `axes`."""
    centred = op.Sub(x, op.mean_over(x, axes))
    rstd = _rstd(op, node, op.mean_over(op.Mul(centred, centred), axes))
    return op.Mul(centred, rstd), rstd


def _per_channel(op: Writer, value: ir.Value, n: int) -> Tensor:
    """[C] as [C, 1, …], which broadcasts along axis 1 of rank n."""
    return op.Unsqueeze(value, list(range(1, n - 1))) if n > 2 else value


def _batch_norm(op: Writer, node: ir.Node, grads: Values) -> Values:
    """The gradient in the type of scale, which is wider than that of x in mixed precision."""
    data, scale, _, mean, variance = arguments(node, 5)
    x = op.to_like(data, scale)
    dys = [None if dy is None else op.to_like(dy, scale) for dy in grads]
    n, epsilon = known_rank(x), node.attributes.get_float("epsilon", 1e-5)
    momentum = node.attributes.get_float("momentum", 0.9)
    axes = [0, *range(2, n)]
    if not node.attributes.get_int("training_mode", 0):
        dy = required(dys[0])
        rstd = op.to_like(_rstd(op, node, variance), scale)
        dbias = op.sum_over(dy, axes)
        centred = op.Sub(x, _per_channel(op, op.to_like(mean, x), n))
        inner = op.sum_over(op.Mul(dy, centred), axes)  # Σ dy (x - mean)
        dscale = op.Mul(inner, rstd)
        factor = op.Mul(scale, rstd)
        # y = factor (x - mean) + bias, where factor = scale (var + ε)^-½
        dmean = op.Neg(op.Mul(dbias, factor))
        dvar = op.Mul(op.Mul(dscale, op.Mul(scale, op.Mul(rstd, rstd))), -0.5)
        dx = op.Mul(dy, _per_channel(op, factor, n))
        dx, dmean = op.to_like(dx, data), op.to_like(dmean, mean)
        return [dx, dscale, dbias, dmean, op.to_like(dvar, variance)]
    if op.fused and n > 1 and not any(dy is not None for dy in grads[1:]):
        stash = x.dtype if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        how = {"epsilon": epsilon, "stash_type": int(stash)}
        inputs = [grads[0], data, scale]
        return [*op.emit("BatchNormGrad", inputs, [data, scale, scale], **how), None, None]
    xh, rstd = _moments(op, node, x, axes)
    dx = dscale = dbias = dmean = dvar = None
    if dys[0] is not None:
        dy = dys[0]
        dscale = op.sum_over(op.Mul(dy, xh), axes)
        dbias = op.sum_over(dy, axes)
        # dx = scale rstd (dy - mean(dy) - xh mean(dy xh)): the means are those sums over the count,
        # which float16 may not hold
        count = op.Cast(op.ratio(x, scale), to=ir.DataType.DOUBLE)
        mean_dy, inner = (
            _per_channel(op, op.to_like(op.Div(op.Cast(v, to=ir.DataType.DOUBLE), count), x), n)
            for v in (dbias, dscale)
        )
        g = op.Sub(op.Sub(dy, mean_dy), op.Mul(xh, inner))
        dx = op.Mul(g, op.Mul(_per_channel(op, scale, n), rstd))
    # running = momentum · old + (1 - momentum) · batch statistic (the biased variance)
    for k in (1, 2):
        dr = dys[k] if k < len(dys) else None
        if dr is None:
            continue
        count = op.ratio(x, scale)
        each = op.Div(op.to_like(op.Mul(dr, 1 - momentum), x), op.to_like(count, x))
        each = _per_channel(op, each, n)
        part = op.Expand(each, op.Shape(x))
        if k == 2:
            part = op.Mul(op.Mul(each, 2.0), op.Div(xh, rstd))
            dvar = op.Mul(dr, momentum)
        else:
            dmean = op.Mul(dr, momentum)
        dx = part if dx is None else op.Add(dx, part)
    return [None if dx is None else op.to_like(dx, data), dscale, dbias, dmean, dvar]


def _instance_norm(op: Writer, node: ir.Node, dys: Values) -> Values:
    (x, scale, _), dy = arguments(node, 3), dys[0]
    n = known_rank(x)
    axes = range(2, n)
    xh, rstd = _moments(op, node, x, axes)
    dscale, dbias = (op.sum_over(v, [0, *axes]) for v in (op.Mul(dy, xh), dy))
    return [normalized(op, op.Mul(dy, _per_channel(op, scale, n)), xh, rstd, axes), dscale, dbias]


def _group_norm(op: Writer, node: ir.Node, dys: Values) -> Values:
    """Opset 21: scale and bias are per channel."""
    (x, scale, bias), dy = arguments(node, 3), dys[0]
    groups, n = node.attributes.get_int("num_groups", 1), known_rank(x)
    image = op.elements(x, 1)
    each = image // groups if isinstance(image, int) else op.Div(image, groups)
    grouped = [op.sizes_of(x)[0], groups, each]
    axes = [2]
    xh, rstd = _moments(op, node, op.reshape(x, grouped), axes)
    flat = op.reshape_like(xh, dy)  # y has as many channels as scale where x has no element
    others = [0, *range(2, n)]

    def fitted(g: Tensor, like: ir.Value) -> Tensor:
        g = op.unbroadcast(g, like)  # it may be one number for all channels
        return g if same_shape(g, like) else op.Expand(g, op.Shape(like))

    dscale = fitted(op.sum_over(op.Mul(dy, flat), others), scale)
    dbias = fitted(op.sum_over(dy, others), bias)
    g = op.reshape(op.Mul(dy, _per_channel(op, scale, n)), grouped)
    return [op.reshape_like(normalized(op, g, xh, rstd, axes), x), dscale, dbias]


def mean_variance_axes(node: ir.Node, rank: int) -> list[int]:
    """The axes of a MeanVarianceNormalization of this rank; onnxruntime ignores further ones."""
    named = ints_attribute(node, "axes", [0, 2, 3]) or []
    return sorted({axis % rank for axis in named if -rank <= axis < rank})


def _mean_variance(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    axes = mean_variance_axes(n, known_rank(x))
    centred = op.Sub(x, op.mean_over(x, axes))
    deviation = op.Sqrt(op.mean_over(op.Mul(centred, centred), axes))
    # the operator divides by (standard deviation + 1e-9)
    rstd = op.Reciprocal(op.Add(deviation, 1e-9))
    return normalized(op, dy, op.Mul(centred, rstd), rstd, axes)


def _lrn(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    """y = x s^-β, s = bias + α/size Σ_window x²;  dx = dy s^-β - 2αβ/size x Σ_window' dy y / s."""
    size, alpha = n.attributes.get_int("size", 1), n.attributes.get_float("alpha", 1e-4)
    beta = n.attributes.get_float("beta", 0.75)
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2

    def window(value: ir.Value, low: int, high: int) -> Tensor:
        padded = op.pad(value, [1], [low], [high])
        channels = op.Shape(x, start=1, end=2)
        total = None
        for k in range(low + high + 1):
            part = op.Slice(padded, [k], op.Add(channels, k), [1])
            total = part if total is None else op.Add(total, part)
        return required(total)

    squares = window(op.Mul(x, x), before, after)
    s = op.formula("squares * share + @bias", n, squares=squares, share=alpha / size)
    around = window(op.formula("dy * y / s", dy=dy, y=y, s=s), after, before)
    return op.formula(
        "dy * Pow(s, power) - x * around * factor",
        dy=dy, s=s, power=-beta, x=x, around=around, factor=2 * alpha * beta / size,
    )  # fmt: skip


NORM: dict[str, Unary] = {"MeanVarianceNormalization": _mean_variance, "LRN": _lrn}
table(NORM)
register(
    OpDef("LayerNormalization", grad=_layer_norm),
    OpDef("RMSNormalization", grad=_rms_norm),
    OpDef("BatchNormalization", grad=_batch_norm),
    OpDef("InstanceNormalization", grad=_instance_norm),
    OpDef("GroupNormalization", grad=_group_norm),
)

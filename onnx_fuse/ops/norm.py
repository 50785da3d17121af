"""Normalizations. With xh = (x - mean)·rstd, g = dy·scale and means over the normalized axes:
dx = rstd (g - mean(g) - xh·mean(g·xh)),  dscale = Σ dy·xh,  dbias = Σ dy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnx_fuse.ops.formula import emitted
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.shape_ops import (
    Tensor,
    Unary,
    Values,
    arguments,
    elements,
    emit,
    ints_attribute,
    known_rank,
    mean_over,
    norm_axis,
    output,
    pad,
    ratio,
    reshape,
    reshape_like,
    same_shape,
    sizes_of,
    spans,
    sum_over,
    table,
    to_like,
    to_type,
    unbroadcast,
)


def normalized(
    op: Any, g: ir.Value, xh: ir.Value, rstd: ir.Value, axes: Sequence[int], centred: bool = True
) -> Tensor:
    """dx of xh = (x - mean)·rstd (or x·rstd), from g = d loss / d xh."""
    inner = mean_over(op, op.Mul(g, xh), axes)
    if centred:
        g = op.Sub(g, mean_over(op, g, axes))
    return op.Mul(op.Sub(g, op.Mul(xh, inner)), rstd)


def _affine(
    op: Any, dy: ir.Value, xh: ir.Value, scale: ir.Value, bias: ir.Value | None
) -> tuple[Tensor, Tensor]:
    """dscale, dbias: sums over what scale and bias were broadcast along."""
    return (
        unbroadcast(op, op.Mul(dy, xh), scale),
        None if bias is None else unbroadcast(op, dy, bias),
    )


def _layer_norm(op: Any, node: ir.Node, dys: Values) -> Values:
    """The gradient from the saved Mean and InvStdDev, in their own type (stash_type)."""
    x, scale, bias = arguments(node, 3)
    axis, n = norm_axis(node.attributes.get_int("axis", -1), x), known_rank(x)
    axes = range(axis, n)
    wide = ir.DataType(node.attributes.get_int("stash_type", 1))
    if x.dtype == ir.DataType.DOUBLE and wide != x.dtype:
        # the statistics of the node are rounded to float32
        wide, (xh, rstd) = x.dtype, _moments(op, node, x, axes)
    else:
        mean, rstd = (output(op, node, i, wide, label) for i, label in ((1, "mean"), (2, "rstd")))
        for value in (mean, rstd):
            if value.shape is None and x.shape is not None:
                value.shape = ir.Shape([*x.shape[:axis], *[1] * (n - axis)])
        last = axis == n - 1 and bias is not None and x.dtype == scale.dtype == bias.dtype
        last = last and spans(scale, x) and spans(bias, x)
        if op.fused and last and not any(dy is not None for dy in dys[1:]):
            inputs = [dys[0], x, scale, mean, rstd]
            return list(emit(op, "LayerNormGrad", inputs, [x, scale, bias], stash_type=int(wide)))
        xh = emitted("(x - mean) * rstd", op, x=to_type(op, x, wide), mean=mean, rstd=rstd)
    dy, dmean, drstd = (
        None if i >= len(dys) or dys[i] is None else to_type(op, dys[i], wide) for i in range(3)
    )
    dx, dscale, dbias = None, None, None
    if dy is not None:
        dscale, dbias = _affine(op, dy, xh, scale, bias)
        dx = normalized(op, op.Mul(dy, to_type(op, scale, wide)), xh, rstd, axes)
    if dmean is not None or drstd is not None:
        # mean = Σ x / K;  rstd = (var + ε)^-½:  d rstd / dx = -rstd² xh / K
        count = to_type(op, ratio(op, x, rstd), wide)
        if dmean is not None:
            part = op.Expand(op.Div(dmean, count), op.Shape(x))
            dx = part if dx is None else op.Add(dx, part)
        if drstd is not None:
            text = "drstd * (rstd * rstd) / count * xh"
            part = emitted(text, op, drstd=drstd, rstd=rstd, count=count, xh=xh)
            dx = op.Neg(part) if dx is None else op.Sub(dx, part)
    return [None if g is None else to_type(op, g, x.dtype) for g in (dx, dscale, dbias)]


def _rms_norm(op: Any, node: ir.Node, dys: Values) -> Values:
    (x, scale), dy = arguments(node, 2), dys[0]
    axis = norm_axis(node.attributes.get_int("axis", -1), x)
    axes = range(axis, known_rank(x))
    square = mean_over(op, op.Mul(x, x), axes)
    rstd = _rstd(op, node, square)
    xh = op.Mul(x, rstd)
    dscale, _ = _affine(op, dy, xh, scale, None)
    return [normalized(op, op.Mul(dy, scale), xh, rstd, axes, centred=False), dscale]


def _rstd(op: Any, node: ir.Node, variance: ir.Value) -> Tensor:
    return emitted("Reciprocal(Sqrt(variance + @epsilon))", op, node, variance=variance)


def _moments(op: Any, node: ir.Node, x: ir.Value, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(x - mean)·rstd and rstd over `axes`."""
    centred = op.Sub(x, mean_over(op, x, axes))
    rstd = _rstd(op, node, mean_over(op, op.Mul(centred, centred), axes))
    return op.Mul(centred, rstd), rstd


def _per_channel(op: Any, value: ir.Value, n: int) -> Tensor:
    """[C] as [C, 1, …], which broadcasts along axis 1 of rank n."""
    return op.Unsqueeze(value, op.constant(list(range(1, n - 1)))) if n > 2 else value


def _batch_norm(op: Any, node: ir.Node, grads: Values) -> Values:
    """The gradient in the type of scale, which is wider than that of x in mixed precision."""
    data, scale, _, mean, variance = arguments(node, 5)
    x = to_like(op, data, scale)
    dys = [None if dy is None else to_like(op, dy, scale) for dy in grads]
    n, epsilon = known_rank(x), node.attributes.get_float("epsilon", 1e-5)
    momentum = node.attributes.get_float("momentum", 0.9)
    axes = [0, *range(2, n)]
    if not node.attributes.get_int("training_mode", 0):
        dy = dys[0]
        assert dy is not None
        rstd = to_like(op, _rstd(op, node, variance), scale)
        dbias = sum_over(op, dy, axes)
        centred = op.Sub(x, _per_channel(op, to_like(op, mean, x), n))
        inner = sum_over(op, op.Mul(dy, centred), axes)  # Σ dy (x - mean)
        dscale = op.Mul(inner, rstd)
        factor = op.Mul(scale, rstd)
        # y = factor (x - mean) + bias, where factor = scale (var + ε)^-½
        dmean = op.Neg(op.Mul(dbias, factor))
        dvar = op.Mul(op.Mul(dscale, op.Mul(scale, op.Mul(rstd, rstd))), -0.5)
        dx = op.Mul(dy, _per_channel(op, factor, n))
        dx, dmean = to_like(op, dx, data), to_like(op, dmean, mean)
        return [dx, dscale, dbias, dmean, to_like(op, dvar, variance)]
    if op.fused and n > 1 and not any(dy is not None for dy in grads[1:]):
        stash = x.dtype if x.dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        how = {"epsilon": epsilon, "stash_type": int(stash)}
        inputs = [grads[0], data, scale]
        return [*emit(op, "BatchNormGrad", inputs, [data, scale, scale], **how), None, None]
    xh, rstd = _moments(op, node, x, axes)
    dx = dscale = dbias = dmean = dvar = None
    if dys[0] is not None:
        dy = dys[0]
        dscale = sum_over(op, op.Mul(dy, xh), axes)
        dbias = sum_over(op, dy, axes)
        # dx = scale rstd (dy - mean(dy) - xh mean(dy xh)): the means are those sums over the count,
        # which float16 may not hold
        count = op.Cast(ratio(op, x, scale), to=ir.DataType.DOUBLE)
        mean_dy, inner = (
            _per_channel(op, to_like(op, op.Div(op.Cast(v, to=ir.DataType.DOUBLE), count), x), n)
            for v in (dbias, dscale)
        )
        g = op.Sub(op.Sub(dy, mean_dy), op.Mul(xh, inner))
        dx = op.Mul(g, op.Mul(_per_channel(op, scale, n), rstd))
    # running = momentum · old + (1 - momentum) · batch statistic (the biased variance)
    for k in (1, 2):
        dr = dys[k] if k < len(dys) else None
        if dr is None:
            continue
        count = ratio(op, x, scale)
        each = op.Div(to_like(op, op.Mul(dr, 1 - momentum), x), to_like(op, count, x))
        each = _per_channel(op, each, n)
        part = op.Expand(each, op.Shape(x))
        if k == 2:
            part = op.Mul(op.Mul(each, 2.0), op.Div(xh, rstd))
            dvar = op.Mul(dr, momentum)
        else:
            dmean = op.Mul(dr, momentum)
        dx = part if dx is None else op.Add(dx, part)
    return [None if dx is None else to_like(op, dx, data), dscale, dbias, dmean, dvar]


def _instance_norm(op: Any, node: ir.Node, dys: Values) -> Values:
    (x, scale, _), dy = arguments(node, 3), dys[0]
    n = known_rank(x)
    axes = range(2, n)
    xh, rstd = _moments(op, node, x, axes)
    dscale, dbias = (sum_over(op, v, [0, *axes]) for v in (op.Mul(dy, xh), dy))
    return [normalized(op, op.Mul(dy, _per_channel(op, scale, n)), xh, rstd, axes), dscale, dbias]


def _group_norm(op: Any, node: ir.Node, dys: Values) -> Values:
    """Opset 21: scale and bias are per channel."""
    (x, scale, bias), dy = arguments(node, 3), dys[0]
    groups, n = node.attributes.get_int("num_groups", 1), known_rank(x)
    image = elements(op, x, 1)
    each = image // groups if isinstance(image, int) else op.Div(image, groups)
    grouped = [sizes_of(op, x)[0], groups, each]
    axes = [2]
    xh, rstd = _moments(op, node, reshape(op, x, grouped), axes)
    flat = reshape_like(op, xh, dy)  # y has as many channels as scale where x has no element
    others = [0, *range(2, n)]

    def fitted(g: Tensor, like: ir.Value) -> Tensor:
        g = unbroadcast(op, g, like)  # it may be one number for all channels
        return g if same_shape(g, like) else op.Expand(g, op.Shape(like))

    dscale = fitted(sum_over(op, op.Mul(dy, flat), others), scale)
    dbias = fitted(sum_over(op, dy, others), bias)
    g = reshape(op, op.Mul(dy, _per_channel(op, scale, n)), grouped)
    return [reshape_like(op, normalized(op, g, xh, rstd, axes), x), dscale, dbias]


def _mean_variance(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    axes = ints_attribute(n, "axes", [0, 2, 3]) or []
    centred = op.Sub(x, mean_over(op, x, axes))
    deviation = op.Sqrt(mean_over(op, op.Mul(centred, centred), axes))
    # the operator divides by (standard deviation + 1e-9)
    rstd = op.Reciprocal(op.Add(deviation, 1e-9))
    return normalized(op, dy, op.Mul(centred, rstd), rstd, axes)


def _lrn(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    """y = x s^-β, s = bias + α/size Σ_window x²;  dx = dy s^-β - 2αβ/size x Σ_window' dy y / s."""
    size, alpha = n.attributes.get_int("size", 1), n.attributes.get_float("alpha", 1e-4)
    beta = n.attributes.get_float("beta", 0.75)
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2

    def window(value: ir.Value, low: int, high: int) -> Tensor:
        padded = pad(op, value, [1], [low], [high])
        channels = op.Shape(x, start=1, end=2)
        total = None
        for k in range(low + high + 1):
            part = op.Slice(padded, [k], op.Add(channels, k), [1])
            total = part if total is None else op.Add(total, part)
        assert total is not None
        return total

    squares = window(op.Mul(x, x), before, after)
    s = emitted("squares * share + @bias", op, n, squares=squares, share=alpha / size)
    around = window(emitted("dy * y / s", op, dy=dy, y=y, s=s), after, before)
    return emitted(
        "dy * Pow(s, power) - x * around * factor", op,
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

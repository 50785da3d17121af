"""BatchNormalization by the statistics of all ranks' rows, written out in standard operators."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.autodiff import Emitter
from onnx_fuse.ops.rules import typed
from onnx_fuse.ops.shape_ops import arguments
from onnx_fuse.training.ranks import Reduction

STATISTICS = 3 << 20
"""The first bucket of the sums, of which each node has two."""


def synchronised(
    node: ir.Node, op: Emitter, reduction: Reduction, counts: ir.Value, index: int
) -> list[ir.Value]:
    """y and the new running mean and variance of a training BatchNormalization.

    Sums over the rows and places of each channel are added over the ranks: first of x, then of the
    squares of what is left without the mean. A rank whose rows do not count adds nothing. `counts`
    ends in the rank's number of rows, `index` is the node's among all.
    """
    x, scale, bias, mean, var = arguments(node, 5)
    if x.shape is None:
        raise ValueError("a synchronised BatchNormalization needs to know the rank of its input")
    wide, axes = ir.DataType.FLOAT, [0, *range(2, len(x.shape))]
    number = op.constant([-1])
    counted = op.Cast(op.Greater(op.Gather(counts, number, axis=0), 0.0), to=wide.value)
    x32 = x if x.dtype == wide else typed(op.Cast(x, to=wide.value), scale, x.shape)
    sizes = op.Gather(op.Shape(x), op.constant(axes), axis=0)
    places = op.Mul(op.Cast(op.ReduceProd(sizes, keepdims=1), to=wide.value), counted)
    places.dtype, places.shape = wide, ir.Shape([1])

    def total(value: ir.Value, bucket: int) -> ir.Value:
        value.dtype = wide
        return reduction.node("AllReduce", value, STATISTICS + bucket)

    def per_channel(value: ir.Value) -> ir.Value:
        channel_sums = op.Mul(op.ReduceSum(value, op.constant(axes), keepdims=0), counted)
        return typed(channel_sums, None, scale.shape)

    count = total(places, 3 * index)
    means = op.Div(total(per_channel(x32), 3 * index + 1), count)
    inner = op.constant([-1, *[1] * (len(x.shape) - 2)])
    rest = op.Sub(x32, op.Reshape(means, inner))
    variance = op.Div(total(per_channel(op.Mul(rest, rest)), 3 * index + 2), count)
    epsilon = node.attributes.get_float("epsilon", 1e-5)
    factor = op.Div(
        typed(op.Cast(scale, to=wide.value), None, scale.shape),
        op.Sqrt(op.Add(variance, float(epsilon))),
    )
    y = op.Add(op.Mul(rest, op.Reshape(factor, inner)), op.Reshape(op.CastLike(bias, x32), inner))
    momentum = float(node.attributes.get_float("momentum", 0.9))
    news = []
    for old, new in ((mean, means), (var, variance)):
        running = op.Add(op.Mul(old, momentum), op.CastLike(op.Mul(new, 1 - momentum), old))
        news.append(typed(running, old, old.shape))
    return [typed(op.CastLike(y, x), x, x.shape), *news]

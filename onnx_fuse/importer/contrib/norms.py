"""Norms and activations: SkipLayerNormalization and its kin, Gelu in its spellings, embeddings."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_fuse.importer.contrib.table import (
    Body,
    Results,
    Unwritable,
    attr,
    contrib,
    known_rank,
    needed,
    wants,
)
from onnx_fuse.ir.build import dim, given, rank


def rms_norm(
    op: Body, x: ir.Value, scale: ir.Value, epsilon: float, axis: int = -1
) -> tuple[ir.Value, ir.Value]:
    """(y, rstd): x / sqrt(mean(x²) + epsilon) * scale, the statistics in float32 or better."""
    wide = x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    xs = x if wide else op.Cast(x, to=ir.DataType.FLOAT)
    axes = op.ints(-1) if axis == -1 else op.ints(*range(axis, known_rank(x, "X")))
    like = x if wide else op.constant(np.zeros((), np.float32))
    mean = op.ReduceMean(op.Pow(xs, op.number(2.0, like)), axes, keepdims=1)
    std = op.Sqrt(op.Add(mean, op.number(epsilon, like)))
    n = op.Div(xs, std)
    y = op.Mul(op.cast_like(n, scale), scale)
    return y, op.Reciprocal(std)


def layer_norm(
    op: Body,
    x: ir.Value,
    scale: ir.Value,
    bias: ir.Value | None,
    epsilon: float,
    *,
    statistics: bool = False,
) -> list[ir.Value]:
    """y over the last axis; with `statistics` also mean and 1/std, in float32."""
    if bias is None:
        # onnxruntime fails on a function whose LayerNormalization has no bias
        bias = _nothing(op, scale)
    count = 3 if statistics else 1
    results = op.LayerNormalization(x, scale, bias, outputs=count, axis=-1, epsilon=epsilon)
    if not statistics:
        return [results]
    y, mean, rstd = results
    mean.dtype = rstd.dtype = ir.DataType.FLOAT
    return [y, mean, rstd]


def _nothing(op: Body, like: ir.Value) -> ir.Value:
    """A vector of -0.0, which added to x leaves every x as it is."""
    size = dim(like, 0)
    if size is None or like.dtype is None:
        return op.Expand(op.number(-0.0, like), op.Shape(like))
    return op.constant(np.full(size, -0.0, like.dtype.numpy()))


def _residual(op: Body, x: ir.Value, skip: ir.Value, bias: ir.Value | None) -> ir.Value:
    """x + skip + bias; the bias goes to the operand that is a product, which takes it over.

    In 16 bits each sum is rounded, as in the graph that onnxruntime made one node of and as its
    kernels for GPUs do; those for CPUs sum in float32, where 65504 is not the end.
    """
    if bias is not None:
        producer = skip.producer()
        if producer is not None and producer.op_type == "MatMul" and rank(x) == rank(skip):
            skip = op.Add(skip, bias)
        else:
            x = op.Add(x, bias)
    return op.Add(x, skip)


@contrib("SkipLayerNormalization")
def skip_layer_norm(op: Body, node: ir.Node) -> Results:
    x, skip, gamma = (needed(node, i) for i in range(3))
    total = _residual(op, x, skip, given(node, 4))
    epsilon, statistics = attr(node, "epsilon", 1e-12), wants(node, 1) or wants(node, 2)
    norm = layer_norm(op, total, gamma, given(node, 3), epsilon, statistics=statistics)
    return [*norm, *([] if statistics else [None, None]), total]


@contrib("SkipSimplifiedLayerNormalization")
def skip_rms_norm(op: Body, node: ir.Node) -> Results:
    x, skip, gamma = (needed(node, i) for i in range(3))
    if wants(node, 1):
        raise Unwritable("it returns the mean, which this norm does not compute")
    total = _residual(op, x, skip, given(node, 3))
    y, rstd = rms_norm(op, total, gamma, attr(node, "epsilon", 1e-12))
    return [y, None, rstd, total]


@contrib("SimplifiedLayerNormalization", domain="")
def simplified_layer_norm(op: Body, node: ir.Node) -> Results:
    x, scale = needed(node, 0), needed(node, 1)
    axis = attr(node, "axis", -1)
    size = rank(x)
    if axis != -1:
        axis = axis % known_rank(x, "X")
        axis = -1 if size is not None and axis == size - 1 else axis
    y, rstd = rms_norm(op, x, scale, attr(node, "epsilon", 1e-5), axis)
    return [y, rstd]


@contrib("Gelu", "BiasGelu")
def gelu(op: Body, node: ir.Node) -> Results:
    x, bias = needed(node, 0), given(node, 1)
    return [op.Gelu(x if bias is None else op.Add(x, bias))]


@contrib("FastGelu")
def fast_gelu(op: Body, node: ir.Node) -> Results:
    x, bias = needed(node, 0), given(node, 1)
    z = x if bias is None else op.Add(x, bias)
    if x.dtype != ir.DataType.DOUBLE:
        return [op.Gelu(z, approximate="tanh")]
    # sqrt(2/pi) and its 0.044715th as onnxruntime writes them out where it has no kernel
    b, c = op.number(0.797885, z), op.number(0.035677, z)
    t = op.Tanh(op.Mul(z, op.Add(op.Mul(c, op.Mul(z, z)), b)))
    half = op.number(0.5, z)
    return [op.Mul(z, op.Add(op.Mul(half, t), half))]


@contrib("QuickGelu")
def quick_gelu(op: Body, node: ir.Node) -> Results:
    x, alpha = needed(node, 0), attr(node, "alpha", 1.702)
    scaled = x if alpha == 1.0 else op.Mul(x, op.number(alpha, x))
    return [op.Mul(x, op.Sigmoid(scaled))]


@contrib("BiasSplitGelu")
def bias_split_gelu(op: Body, node: ir.Node) -> Results:
    """The left half times Gelu of the right one, of x + bias."""
    z = op.Add(needed(node, 0), needed(node, 1))
    left, right = op.Split(z, outputs=2, axis=-1, num_outputs=2)
    return [op.Mul(left, op.Gelu(right))]


@contrib("BiasAdd")
def bias_add(op: Body, node: ir.Node) -> Results:
    return [op.Add(op.Add(needed(node, 0), needed(node, 1)), needed(node, 2))]


@contrib("BiasSoftmax")
def bias_softmax(op: Body, node: ir.Node) -> Results:
    """softmax over the axes from `axis` on of data + bias, the bias broadcast inside or outside."""
    x, bias = needed(node, 0), needed(node, 1)
    size = known_rank(x, "the data")
    axis = attr(node, "axis", 1) % max(size, 1)
    if axis != size - 1:
        raise Unwritable("it flattens several axes")
    if rank(bias) != size:
        raise Unwritable("the bias has another rank than the data")
    return [op.Softmax(op.Add(x, bias), axis=-1)]


@contrib("EmbedLayerNormalization")
def embed_layer_norm(op: Body, node: ir.Node) -> Results:
    """LayerNorm of the sum of word, position and segment embeddings; the rows' lengths."""
    ids, segments, mask, positions = (given(node, i) for i in (0, 1, 7, 8))
    word, position, gamma, beta = (needed(node, i) for i in (2, 3, 5, 6))
    if ids is None:
        raise Unwritable("its input_ids are missing")
    total = op.Gather(word, ids)
    if positions is not None:
        total = op.Add(total, op.Gather(position, positions))
    else:
        end = op.size(ids, 1)
        if not dim(ids, 0):  # without a sequence there may be fewer positions than steps
            end = op.Max(op.Mul(end, op.Min(op.size(ids, 0), op.ints(1))), op.ints(1))
        total = op.Add(total, op.Slice(position, op.ints(0), end, op.ints(0)))
    if segments is not None:
        total = op.Add(total, op.Gather(needed(node, 4), segments))
    (y,) = layer_norm(op, total, gamma, beta, attr(node, "epsilon", 1e-12))
    if mask is not None:
        one = op.Equal(mask, op.number(1, mask))
        lengths = op.ReduceSum(op.Cast(one, to=ir.DataType.INT32), op.ints(1), keepdims=0)
    else:
        zero = ir.tensor(np.zeros(1, np.int32))
        lengths = op.ConstantOfShape(op.size(ids, 0), value=zero)
    return [y, lengths if wants(node, 1) else None, total]

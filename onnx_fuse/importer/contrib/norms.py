"""Norms and activations: SkipLayerNormalization and its kin, Gelu in its spellings, embeddings."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_fuse.importer.contrib.table import (
    Body,
    Input,
    Results,
    Unwritable,
    contrib,
    known,
    known_rank,
)
from onnx_fuse.ir.build import dim, rank


def rms_norm(
    op: Body, x: ir.Value, scale: ir.Value, epsilon: float, axis: int = -1
) -> tuple[ir.Value, ir.Value]:
    """(y, rstd): x / sqrt(mean(x²) + epsilon) * scale, the statistics in float32 or better."""
    wide = x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    xs = x if wide else op.Cast(x, to=ir.DataType.FLOAT)
    axes = [-1] if axis == -1 else list(range(axis, known_rank(x, "X")))
    variance = "ReduceMean <keepdims = 1> (Pow(xs, 2), axes)"
    std = op.formula(f"Sqrt({variance} + epsilon)", xs=xs, axes=axes, epsilon=epsilon)
    return op.Mul(op.to_like(op.Div(xs, std), scale), scale), op.Reciprocal(std)


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
    producer = skip.producer()
    if producer is not None and producer.op_type == "MatMul" and rank(x) == rank(skip):
        return op.Add(x, op.plus(skip, bias))
    return op.Add(op.plus(x, bias), skip)


@contrib("SkipLayerNormalization")
def skip_layer_norm(
    op: Body, x: ir.Value, skip: ir.Value, gamma: ir.Value, beta: Input = None, bias: Input = None
) -> Results:
    total = _residual(op, x, skip, bias)
    epsilon, statistics = op.attr("epsilon", 1e-12), op.wants(1) or op.wants(2)
    norm = layer_norm(op, total, gamma, beta, epsilon, statistics=statistics)
    return [*norm, *([] if statistics else [None, None]), total]


@contrib("SkipSimplifiedLayerNormalization")
def skip_rms_norm(
    op: Body, x: ir.Value, skip: ir.Value, gamma: ir.Value, bias: Input = None
) -> Results:
    if op.wants(1):
        raise Unwritable("it returns the mean, which this norm does not compute")
    total = _residual(op, x, skip, bias)
    y, rstd = rms_norm(op, total, gamma, op.attr("epsilon", 1e-12))
    return [y, None, rstd, total]


@contrib("SimplifiedLayerNormalization", domain="")
def simplified_layer_norm(op: Body, x: ir.Value, scale: ir.Value) -> Results:
    axis = op.attr("axis", -1)
    size = rank(x)
    if axis != -1:
        axis = axis % known_rank(x, "X")
        axis = -1 if size is not None and axis == size - 1 else axis
    return rms_norm(op, x, scale, op.attr("epsilon", 1e-5), axis)


@contrib("Gelu", "BiasGelu")
def gelu(op: Body, x: ir.Value, bias: Input = None) -> Results:
    return op.Gelu(op.plus(x, bias))


@contrib("FastGelu")
def fast_gelu(op: Body, x: ir.Value, bias: Input = None) -> Results:
    z = op.plus(x, bias)
    if x.dtype != ir.DataType.DOUBLE:
        return op.Gelu(z, approximate="tanh")
    # sqrt(2/pi) and its 0.044715th as onnxruntime writes them out where it has no kernel
    return op.formula("t = Tanh(z * (0.035677 * (z * z) + 0.797885)); z * (0.5 * t + 0.5)", z=z)


@contrib("QuickGelu")
def quick_gelu(op: Body, x: ir.Value) -> Results:
    return op.formula("x * Sigmoid(x * alpha)", x=x, alpha=op.attr("alpha", 1.702))


@contrib("BiasSplitGelu")
def bias_split_gelu(op: Body, x: ir.Value, bias: ir.Value) -> Results:
    """The left half times Gelu of the right one, of x + bias."""
    left, right = op.Split(op.Add(x, bias), outputs=2, axis=-1, num_outputs=2)
    return op.Mul(left, op.Gelu(right))


@contrib("BiasAdd")
def bias_add(op: Body, x: ir.Value, bias: ir.Value, skip: ir.Value) -> Results:
    return op.Add(op.Add(x, bias), skip)


@contrib("BiasSoftmax")
def bias_softmax(op: Body, x: ir.Value, bias: ir.Value) -> Results:
    """softmax over the axes from `axis` on of data + bias, the bias broadcast inside or outside."""
    size = known_rank(x, "the data")
    if op.attr("axis", 1) % max(size, 1) != size - 1:
        raise Unwritable("it flattens several axes")
    if rank(bias) != size:
        raise Unwritable("the bias has another rank than the data")
    return op.Softmax(op.Add(x, bias), axis=-1)


@contrib("EmbedLayerNormalization")
def embed_layer_norm(
    op: Body,
    ids: ir.Value,
    segments: Input,
    word: ir.Value,
    position: ir.Value,
    segment: Input,
    gamma: ir.Value,
    beta: ir.Value,
    mask: Input = None,
    positions: Input = None,
) -> list[ir.Value | None]:
    """LayerNorm of the sum of word, position and segment embeddings; the rows' lengths."""
    total = op.Gather(word, ids)
    if positions is not None:
        total = op.Add(total, op.Gather(position, positions))
    else:
        end = op.shape_of(ids, [1])
        if not dim(ids, 0):  # without a sequence there may be fewer positions than steps
            one = op.constant([1])
            end = op.Max(op.Mul(end, op.Min(op.shape_of(ids, [0]), one)), one)
        total = op.Add(total, op.Slice(position, [0], end, [0]))
    if segments is not None:
        total = op.Add(total, op.Gather(known(segment, "its segment embeddings"), segments))
    (y,) = layer_norm(op, total, gamma, beta, op.attr("epsilon", 1e-12))
    if mask is not None:
        one = op.formula("mask == 1", mask=mask)
        lengths = op.ReduceSum(op.Cast(one, to=ir.DataType.INT32), [1], keepdims=0)
    else:
        lengths = op.filled(op.shape_of(ids, [0]), ir.DataType.INT32)
    return [y, lengths if op.wants(1) else None, total]

"""Inverse, convolutions with a state or channels last, 4-bit floats, T5's and WavLM's biases."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_fuse.importer.contrib.attention import multi_head_attention
from onnx_fuse.importer.contrib.table import (
    CONV,
    Body,
    Results,
    Unwritable,
    attr,
    contrib,
    count,
    known_rank,
    needed,
)
from onnx_fuse.ir.build import detach, dim, given, rank

LARGEST_INVERSE = 16
"""Rows up to which an elimination is written out."""


@contrib("Inverse", recognized=False)
def inverse(op: Body, node: ir.Node) -> Results:
    """Gauss and Jordan's elimination of [A | 1], the largest of each column the pivot."""
    x = needed(node, 0)
    size, kind = dim(x, -1) or dim(x, -2), x.dtype
    if size is None or kind is None or not 1 <= size <= LARGEST_INVERSE:
        raise Unwritable(f"its matrices are not known to have 1 to {LARGEST_INVERSE} rows")
    wide = kind if kind == ir.DataType.DOUBLE else ir.DataType.FLOAT
    x = x if kind == wide else op.Cast(x, to=wide)
    zero, none = op.number(0.0, x), op.number(-1.0, x)
    unit = op.Expand(op.constant(np.eye(size, dtype=wide.numpy())), op.Shape(x))
    both = op.Concat(x, unit, axis=-1)
    places = op.constant(np.arange(size))
    for k in range(size):
        ahead = op.constant(np.arange(size) >= k)
        here = op.constant((np.arange(size) == k)[:, None])

        column = op.Slice(both, op.ints(k), op.ints(k + 1), op.ints(-1))
        sizes = op.Where(ahead, op.Squeeze(op.Abs(column), op.ints(-1)), none)
        at = op.ArgMax(sizes, axis=-1, keepdims=1)
        chosen = op.Unsqueeze(op.Equal(places, at), op.ints(-1))
        best = op.ReduceSum(op.Where(chosen, both, zero), op.ints(-2), keepdims=1)
        kth_row = op.Slice(both, op.ints(k), op.ints(k + 1), op.ints(-2))
        both = op.Where(here, best, op.Where(chosen, kth_row, both))
        row = op.Div(best, op.Slice(best, op.ints(k), op.ints(k + 1), op.ints(-1)))
        column = op.Slice(both, op.ints(k), op.ints(k + 1), op.ints(-1))
        both = op.Where(here, row, op.Sub(both, op.Mul(column, row)))
    y = op.Slice(both, op.ints(size), op.ints(2 * size), op.ints(-1))
    return [y if kind == wide else op.Cast(y, to=kind)]


@contrib("NhwcConv")
def nhwc_conv(op: Body, node: ir.Node) -> Results:
    """Conv of images and filters whose channels come last."""
    x, w = (op.channels_first(needed(node, i), 4) for i in range(2))
    return [op.channels_last(op.like("Conv", node, [x, w, given(node, 2)], CONV), 4)]


@contrib("CausalConvWithState")
def causal_conv(op: Body, node: ir.Node) -> Results:
    """A convolution of each channel over the last places and the new ones, which it hands on."""
    x, w, bias, past = needed(node, 0), *(given(node, i) for i in range(1, 4))
    usual = {"ndim": 1, "state_update_capacity": 0, "state_window": 0, "state_length": 0,
             "channels_last": 0, "input_channel_offset": 0, "input_channels": 0,
             "state_channels_last": -1}  # fmt: skip
    for name, value in usual.items():
        if attr(node, name, value) != value:
            raise Unwritable(f"its {name} is not supported")
    channels, taps = dim(w, 0), dim(w, 2)
    if channels is None or taps is None:
        raise Unwritable("the size of its weights is not known")
    every = attr(node, "dilation", 1)
    length = (taps - 1) * every
    if past is None:
        like = op.shape(op.size(x, 0), channels, length)
        past = op.Expand(op.number(0.0, x), like)
    joined = op.Concat(past, x, axis=2)
    y = op.Conv(joined, w, bias, group=channels, dilations=[every])
    match attr(node, "activation", "none"):
        case "none" | "":
            pass
        case "silu" | "swish":
            y = op.Mul(y, op.Sigmoid(y))
        case other:
            raise Unwritable(f"its activation '{other}' is not known")
    size = op.Shape(joined, start=2, end=3)
    last = op.Slice(joined, op.Sub(size, op.ints(length)), size, op.ints(2))
    return [y, last]


# bitsandbytes' 16 numbers of 4 bits: of a float with 2 bits of exponent and 1 of fraction, and the
# quantiles of a normal distribution.
_FP4 = [0, 0.0052083333, 0.66666667, 1, 0.33333333, 0.5, 0.16666667, 0.25]
_NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


@contrib("MatMulBnb4")
def matmul_bnb4(op: Body, node: ir.Node) -> Results:
    """x times weights of 4-bit numbers, two a byte, the first above, and a scale a block."""
    x, packed, scales = (needed(node, i) for i in range(3))
    rows, columns, block = (count(node, name) for name in ("N", "K", "block_size"))
    if rows * columns % block or rows * columns % 2 or x.dtype is None:
        raise Unwritable("its last block or byte is not full")
    numbers = _NF4 if attr(node, "quant_type") == 1 else [*_FP4, *(-v for v in _FP4)]
    four = op.constant(np.array(16, np.uint8))
    pair = [op.Unsqueeze(v, op.ints(1)) for v in (op.Div(packed, four), op.Mod(packed, four))]
    code = op.Cast(op.Reshape(op.Concat(*pair, axis=1), op.ints(-1, block)), to=ir.DataType.INT32)
    table = op.constant(np.array(numbers, np.float32).astype(x.dtype.numpy()))
    weights = op.Mul(op.Gather(table, code), op.Unsqueeze(scales, op.ints(1)))
    w = op.Reshape(weights, op.ints(rows, columns))
    if attr(node, "transB", 1):
        w = op.Transpose(w, perm=[1, 0])
    return [op.MatMul(x, w)]


@contrib("GemmFastGelu")
def gemm_fast_gelu(op: Body, node: ir.Node) -> Results:
    z, bias = op.MatMul(needed(node, 0), needed(node, 1)), given(node, 2)
    return [op.Gelu(z if bias is None else op.Add(z, bias), approximate="tanh")]


@contrib("RelativePositionBias", recognized=False)
def relative_position_bias(op: Body, node: ir.Node) -> Results:
    """T5's: a number a head and a bucket of distances, near ones each, far ones by logarithm."""
    table, queries, keys = (needed(node, i) for i in range(3))
    buckets, far = dim(table, 0), attr(node, "max_distance")
    if buckets is None:
        raise Unwritable("the number of its buckets is not known")
    flat, zero, one = op.ints(), op.constant(0), op.constant(1)

    def steps(count: ir.Value, axis: int) -> ir.Value:
        number = op.Cast(op.Reshape(count, flat), to=ir.DataType.INT64)
        return op.Unsqueeze(op.Range(zero, number, one), op.ints(axis))

    distance = op.Sub(steps(keys, 0), steps(queries, 1))
    base = None
    if attr(node, "is_bidirectional", 0):
        buckets //= 2
        after = op.Cast(op.Greater(distance, zero), to=ir.DataType.INT64)
        base = op.Mul(after, op.constant(buckets))
        distance = op.Abs(distance)
    else:
        distance = op.Max(op.Neg(distance), zero)
    exact = buckets // 2
    near = op.Less(distance, op.constant(exact))
    ratio = op.Div(op.Cast(op.Max(distance, one), to=ir.DataType.FLOAT),
                   op.constant(np.array(exact, np.float32)))  # fmt: skip
    share = op.Div(op.Log(ratio), op.constant(np.array(math.log(far / exact), np.float32)))
    beyond = op.Mul(share, op.constant(np.array(buckets - exact, np.float32)))
    large = op.Add(op.Cast(beyond, to=ir.DataType.INT64), op.constant(exact))
    bucket = op.Where(near, distance, op.Min(large, op.constant(buckets - 1)))
    bucket = bucket if base is None else op.Add(base, bucket)
    heads = op.Transpose(op.Gather(table, bucket), perm=[2, 0, 1])
    return [op.Unsqueeze(heads, op.ints(0))]


@contrib("GatedRelativePositionBias", recognized=False)
def gated_relative_position_bias(op: Body, node: ir.Node) -> Results:
    """WavLM's: a bias by position, scaled by gates that the queries decide."""
    if given(node, 6) is not None or known_rank(needed(node, 0), "its queries") != 3:
        raise Unwritable("its tokens are packed")
    queries, shift, places, weights, bias, scale = (needed(node, i) for i in range(6))
    heads, width = count(node, "num_heads"), dim(weights, 1)
    if width is None:
        raise Unwritable("the size of its weights is not known")
    rows = op.Reshape(op.Add(queries, shift), op.ints(0, 0, heads, -1))
    gates = op.Add(op.MatMul(op.Transpose(rows, perm=[0, 2, 1, 3]), weights), bias)
    parts = op.Reshape(gates, op.ints(0, 0, 0, 2, width // 2))
    update, reset = op.Split(
        op.Sigmoid(op.ReduceSum(parts, op.ints(-1), keepdims=0)), outputs=2, axis=-1, num_outputs=2
    )
    one, two = op.number(1.0, queries), op.number(2.0, queries)
    gate = op.Add(op.Mul(update, op.Sub(op.Mul(reset, scale), one)), two)
    return [op.Mul(gate, places)]


@contrib(
    "DecoderMaskedMultiHeadAttention",
    whole=lambda node: True,
    lowered=lambda node: given(node, 7) is not None,
)
def decoder_masked_attention(op: Body, node: ir.Node) -> Results:
    """Attention of one new token; a past stands in a buffer that is shared with present."""
    query, key, value = needed(node, 0), given(node, 1), given(node, 2)
    past = [given(node, i) for i in (5, 6, 7)]
    if past[0] is None and (rank(key) != 4 or rank(value) != 4):
        raise Unwritable("it has neither a past nor the heads of keys and values apart")
    if past[0] is not None and (past[2] is None or attr(node, "output_qk", 0)):
        raise Unwritable("it is not known how much of its buffer is filled, or it returns scores")
    if given(node, 8) is not None or given(node, 9) is not None:
        raise Unwritable("its cache is that of a beam search")
    operands = [query, key, value, given(node, 10), given(node, 3), given(node, 4), *past]
    names = ("num_heads", "mask_filter_value", "scale")
    inner = ir.Node(
        "com.microsoft",
        "MultiHeadAttention",
        operands,
        [a for k, a in node.attributes.items() if k in names],
        num_outputs=len(node.outputs),
    )
    for mine, theirs in zip(inner.outputs, node.outputs, strict=True):
        mine.name = theirs.name
    results = list(multi_head_attention(op, inner))
    detach([inner])
    return results

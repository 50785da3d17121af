"""Inverse, convolutions with a state or channels last, 4-bit floats, T5's and WavLM's biases."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_fuse.importer.contrib.attention import multi_head_attention
from onnx_fuse.importer.contrib.table import (
    CONV,
    Body,
    Input,
    Results,
    Unwritable,
    contrib,
    known,
    known_rank,
)
from onnx_fuse.ir.build import dim, given, rank

LARGEST_INVERSE = 16
"""Rows up to which an elimination is written out."""


@contrib("Inverse", recognized=False)
def inverse(op: Body, x: ir.Value) -> Results:
    """Gauss and Jordan's elimination of [A | 1], the largest of each column the pivot."""
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

        column = op.Slice(both, [k], [k + 1], [-1])
        sizes = op.Where(ahead, op.Squeeze(op.Abs(column), [-1]), none)
        at = op.ArgMax(sizes, axis=-1, keepdims=1)
        chosen = op.Unsqueeze(op.Equal(places, at), [-1])
        best = op.ReduceSum(op.Where(chosen, both, zero), [-2], keepdims=1)
        kth_row = op.Slice(both, [k], [k + 1], [-2])
        both = op.Where(here, best, op.Where(chosen, kth_row, both))
        row = op.Div(best, op.Slice(best, [k], [k + 1], [-1]))
        column = op.Slice(both, [k], [k + 1], [-1])
        both = op.Where(here, row, op.Sub(both, op.Mul(column, row)))
    y = op.Slice(both, [size], [2 * size], [-1])
    return [y if kind == wide else op.Cast(y, to=kind)]


@contrib("NhwcConv")
def nhwc_conv(op: Body, x: ir.Value, w: ir.Value, bias: Input) -> Results:
    """Conv of images and filters whose channels come last."""
    x, w = op.channels_first(x, 4), op.channels_first(w, 4)
    return op.channels_last(op.like("Conv", [x, w, bias], CONV), 4)


@contrib("CausalConvWithState")
def causal_conv(op: Body, x: ir.Value, w: ir.Value, bias: Input, past: Input) -> Results:
    """A convolution of each channel over the last places and the new ones, which it hands on."""
    usual = {"ndim": 1, "state_update_capacity": 0, "state_window": 0, "state_length": 0,
             "channels_last": 0, "input_channel_offset": 0, "input_channels": 0,
             "state_channels_last": -1}  # fmt: skip
    for name, value in usual.items():
        if op.attr(name, value) != value:
            raise Unwritable(f"its {name} is not supported")
    channels, taps = (known(dim(w, axis), "the size of its weights") for axis in (0, 2))
    every = op.attr("dilation", 1)
    length = (taps - 1) * every
    if past is None:
        sizes = op.vector([op.shape_of(x, [0]), channels, length])
        past = op.Expand(op.number(0.0, x), sizes)
    joined = op.Concat(past, x, axis=2)
    y = op.Conv(joined, w, bias, group=channels, dilations=[every])
    match op.attr("activation", "none"):
        case "none" | "":
            pass
        case "silu" | "swish":
            y = op.Mul(y, op.Sigmoid(y))
        case other:
            raise Unwritable(f"its activation '{other}' is not known")
    size = op.Shape(joined, start=2, end=3)
    return [y, op.Slice(joined, op.Sub(size, [length]), size, [2])]


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
def matmul_bnb4(op: Body, x: ir.Value, packed: ir.Value, scales: ir.Value) -> Results:
    """x times weights of 4-bit numbers, two a byte, the first above, and a scale a block."""
    rows, columns, block = (op.count(name) for name in ("N", "K", "block_size"))
    if rows * columns % block or rows * columns % 2 or x.dtype is None:
        raise Unwritable("its last block or byte is not full")
    numbers = _NF4 if op.attr("quant_type") == 1 else [*_FP4, *(-v for v in _FP4)]
    four = op.constant(np.array(16, np.uint8))
    pair = [op.Unsqueeze(v, [1]) for v in (op.Div(packed, four), op.Mod(packed, four))]
    code = op.Cast(op.Reshape(op.Concat(*pair, axis=1), [-1, block]), to=ir.DataType.INT32)
    table = op.constant(np.array(numbers, np.float32).astype(x.dtype.numpy()))
    weights = op.Mul(op.Gather(table, code), op.Unsqueeze(scales, [1]))
    w = op.Reshape(weights, [rows, columns])
    return op.MatMul(x, op.Transpose(w, perm=[1, 0]) if op.attr("transB", 1) else w)


@contrib("GemmFastGelu")
def gemm_fast_gelu(op: Body, x: ir.Value, w: ir.Value, bias: Input) -> Results:
    return op.Gelu(op.plus(op.MatMul(x, w), bias), approximate="tanh")


@contrib("RelativePositionBias", recognized=False)
def relative_position_bias(op: Body, table: ir.Value, queries: ir.Value, keys: ir.Value) -> Results:
    """T5's: a number a head and a bucket of distances, near ones each, far ones by logarithm."""
    buckets, far = known(dim(table, 0), "the number of its buckets"), op.attr("max_distance")
    columns, rows = (
        op.Unsqueeze(op.counted(op.Cast(op.Reshape(v, []), to=ir.DataType.INT64)), [axis])
        for axis, v in enumerate((keys, queries))
    )
    distance = op.Sub(columns, rows)
    base = None
    if op.attr("is_bidirectional", 0):
        buckets //= 2
        after = "Cast <to = 7> (distance > 0) * buckets"
        base = op.formula(after, distance=distance, buckets=float(buckets))
        distance = op.Abs(distance)
    else:
        distance = op.formula("Max(-distance, 0)", distance=distance)
    exact = buckets // 2
    bucket = op.formula(
        """steps = Log(Cast <to = 1> (Max(distance, 1)) / exact) / range * further
        large = Cast <to = 7> (steps) + exact
        Where(distance < exact, distance, Min(large, last))""",
        distance=distance,
        exact=float(exact),
        range=math.log(far / exact),
        further=float(buckets - exact),
        last=float(buckets - 1),
    )
    bucket = bucket if base is None else op.Add(base, bucket)
    return op.Unsqueeze(op.Transpose(op.Gather(table, bucket), perm=[2, 0, 1]), [0])


@contrib("GatedRelativePositionBias", recognized=False)
def gated_relative_position_bias(
    op: Body,
    queries: ir.Value,
    shift: ir.Value,
    places: ir.Value,
    weights: ir.Value,
    bias: ir.Value,
    scale: ir.Value,
) -> Results:
    """WavLM's: a bias by position, scaled by gates that the queries decide."""
    if op.given(6) is not None or known_rank(queries, "its queries") != 3:
        raise Unwritable("its tokens are packed")
    heads, width = op.count("num_heads"), known(dim(weights, 1), "the size of its weights")
    rows = op.Transpose(op.Reshape(op.Add(queries, shift), [0, 0, heads, -1]), perm=[0, 2, 1, 3])
    parts = op.Reshape(op.Add(op.MatMul(rows, weights), bias), [0, 0, 0, 2, width // 2])
    gates = op.Sigmoid(op.ReduceSum(parts, [-1], keepdims=0))
    update, reset = op.Split(gates, outputs=2, axis=-1, num_outputs=2)
    return op.formula(
        "(update * (reset * scale - 1) + 2) * places",
        update=update,
        reset=reset,
        scale=scale,
        places=places,
    )


@contrib(
    "DecoderMaskedMultiHeadAttention",
    whole=lambda node: True,
    lowered=lambda node: given(node, 7) is not None,
)
def decoder_masked_attention(op: Body, query: ir.Value, key: Input, value: Input) -> Results:
    """Attention of one new token; a past stands in a buffer that is shared with present."""
    mask, bias, *past, beam_width, beam_rows, projection_bias = (op.given(i) for i in range(3, 11))
    if past[0] is None and (rank(key) != 4 or rank(value) != 4):
        raise Unwritable("it has neither a past nor the heads of keys and values apart")
    if past[0] is not None and (past[2] is None or op.attr("output_qk", 0)):
        raise Unwritable("it is not known how much of its buffer is filled, or it returns scores")
    if beam_width is not None or beam_rows is not None:
        raise Unwritable("its cache is that of a beam search")
    operands = key, value, projection_bias, mask, bias, *past, None
    return multi_head_attention(op, query, *operands)

"""Quantized operators: QLinear… ones as dequantize, compute, quantize; products of integers.

Weights of few bits are unpacked.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_fuse.importer.contrib.attention import attention_of
from onnx_fuse.importer.contrib.norms import embed_layer_norm
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
from onnx_fuse.importer.upgrade import counted_part
from onnx_fuse.ir.build import dim, rank

INT8 = (ir.DataType.INT8, ir.DataType.UINT8)


def dequantized(
    op: Body, first: int, places: tuple[int, int] = (1, 2), *, axis: int | None = None
) -> ir.Value:
    """The floats of the operand `first`, whose scale and zero point come `places` later."""
    of_scale, of_zero = (first + place for place in places)
    x, scale, zero = op.needed(first), op.needed(of_scale), op.given(of_zero)
    y: ir.Value = op.DequantizeLinear(x, scale, zero, axis=axis)
    if scale.dtype is not None:
        y.dtype = scale.dtype
    y.shape = x.shape
    return y


def quantized(
    op: Body, y: ir.Value, scale: ir.Value, zero: ir.Value | None, kind: ir.DataType | None
) -> ir.Value:
    """`y` quantized to integers; without a zero point they are of type `kind` and around 0."""
    if zero is None:
        kind = known(kind, "the type of its result")
        zero = op.constant(np.zeros((), kind.numpy()))
    q: ir.Value = op.QuantizeLinear(y, scale, zero)
    if zero.dtype is not None:
        q.dtype = zero.dtype
    return q


@contrib("QuantizeLinear", recognized=False)
def quantize_linear(op: Body, x: ir.Value, scale: ir.Value, zero: Input) -> Results:
    return op.like("QuantizeLinear", [x, scale, zero], "axis")


@contrib("DequantizeLinear", recognized=False)
def dequantize_linear(op: Body) -> Results:
    return dequantized(op, 0, axis=op.attr("axis"))


# ---- operators between a dequantization and a quantization -----------------------------------


def _enter(
    name: str, compute: Callable[[Body, list[ir.Value]], ir.Value], operands: int = 1
) -> None:
    """Enter an operator of `operands` quantized inputs, then the result's scale and zero point."""

    def build(op: Body) -> Results:
        y = compute(op, [dequantized(op, 3 * i) for i in range(operands)])
        last = 3 * operands
        return quantized(op, y, op.needed(last), op.given(last + 1), op.needed(0).dtype)

    contrib(name, recognized=False)(build)


@contrib("QLinearSoftmax", recognized=False)
def qlinear_softmax(op: Body) -> Results:
    """onnxruntime counts the steps of its result in 1 / scale, rounded down to a whole number."""
    axis = op.attr("axis", -1)
    if op.attr("opset", 13) < 13:
        size = known_rank(op.needed(0), "X")
        if axis % size != size - 1:
            raise Unwritable("it flattens several axes")
        axis = -1
    scale = op.needed(3)
    y = op.Softmax(dequantized(op, 0), axis=axis)
    steps = op.formula("y * Floor(Reciprocal(scale))", y=y, scale=scale)
    return quantized(op, steps, op.number(1.0, scale), op.given(4), op.needed(0).dtype)


def _with_channels_first(
    op: Body, x: ir.Value, size: int, compute: Callable[[ir.Value], ir.Value]
) -> ir.Value:
    if not op.attr("channels_last", 0):
        return compute(x)
    return op.channels_last(compute(op.channels_first(x, size)), size)


def _pool_rank(op: Body) -> int:
    window = op.attr("kernel_shape")
    if not window:
        raise Unwritable("its attribute 'kernel_shape' is missing")
    return len(window) + 2


def _average(op: Body, x: list[ir.Value]) -> ir.Value:
    names = "auto_pad ceil_mode count_include_pad kernel_shape pads strides"
    if op.attr("ceil_mode", 0) and op.attr("count_include_pad", 0):
        raise Unwritable("windows beyond the padding are divided by the size of the kernel")

    def pool(v: ir.Value) -> ir.Value:
        y, factor = op.like("AveragePool", [v], names), counted_part(op.call, v, op)
        return y if factor is None else op.Mul(y, factor)

    return _with_channels_first(op, x[0], _pool_rank(op), pool)


def _global_average(op: Body, x: list[ir.Value]) -> ir.Value:
    size = known_rank(op.needed(0), "X") if op.attr("channels_last", 0) else 0
    return _with_channels_first(op, x[0], size, op.GlobalAveragePool)


def _mean(op: Body, x: list[ir.Value]) -> ir.Value:
    return op.ReduceMean(x[0], [*op.attr("axes")], keepdims=op.attr("keepdims", 1))


_enter("QLinearAdd", lambda op, x: op.Add(*x), 2)
_enter("QLinearMul", lambda op, x: op.Mul(*x), 2)
_enter("QLinearSigmoid", lambda op, x: op.Sigmoid(x[0]))
_enter("QLinearLeakyRelu", lambda op, x: op.LeakyRelu(x[0], alpha=op.attr("alpha", 0.01)))
_enter("QLinearAveragePool", _average)
_enter("QLinearGlobalAveragePool", _global_average)
_enter("QLinearReduceMean", _mean)


@contrib("QLinearConcat", recognized=False)
def qlinear_concat(op: Body) -> Results:
    parts = [dequantized(op, i) for i in range(2, len(op.call.inputs), 3)]
    joined = op.Concat(*parts, axis=op.attr("axis")) if len(parts) > 1 else parts[0]
    return quantized(op, joined, op.needed(0), op.needed(1), None)


@contrib("QLinearWhere", recognized=False)
def qlinear_where(op: Body) -> Results:
    chosen = op.Where(op.needed(0), dequantized(op, 1), dequantized(op, 4))
    return quantized(op, chosen, op.needed(7), op.needed(8), None)


@contrib("QLinearConv", recognized=False)
def qlinear_conv(op: Body) -> Results:
    """ai.onnx's, with channels last or first."""
    size, others = known_rank(op.needed(3), "w"), op.call.inputs[1:]
    return _with_channels_first(
        op, op.needed(0), size, lambda v: op.like("QLinearConv", [v, *others], CONV)
    )


@contrib("NhwcMaxPool", recognized=False)
def nhwc_max_pool(op: Body, x: ir.Value) -> Results:
    size, names = _pool_rank(op), "auto_pad ceil_mode dilations kernel_shape pads strides"
    return op.channels_last(op.like("MaxPool", [op.channels_first(x, size)], names), size)


# ---- products of integers --------------------------------------------------------------------


def _integer_product(
    op: Body,
    a: ir.Value,
    b: ir.Value,
    zeros: tuple[ir.Value | None, ir.Value | None],
    scale: ir.Value,
    bias: ir.Value | None,
) -> ir.Value:
    """(a - a_zero)(b - b_zero) · scale + bias, the product in int32."""
    product = op.Cast(op.MatMulInteger(a, b, *zeros), to=ir.DataType.FLOAT)
    y: ir.Value = op.Mul(product, op.to_like(scale, product))
    return y if bias is None else op.Add(y, op.to_like(bias, y))


@contrib("DynamicQuantizeMatMul", recognized=False)
def dynamic_quantize_matmul(
    op: Body, a: ir.Value, b: ir.Value, b_scale: ir.Value, b_zero: Input, bias: Input
) -> Results:
    quantized_a, a_scale, a_zero = op.DynamicQuantizeLinear(a, outputs=3)
    quantized_a.dtype = a_zero.dtype = ir.DataType.UINT8
    a_scale.dtype = ir.DataType.FLOAT
    scale = op.Mul(a_scale, b_scale)
    return _integer_product(op, quantized_a, b, (a_zero, b_zero), scale, bias)


@contrib("MatMulIntegerToFloat", recognized=False)
def matmul_integer_to_float(
    op: Body, a: ir.Value, b: ir.Value, a_scale: ir.Value, b_scale: ir.Value
) -> Results:
    if rank(a_scale) not in (0, 1) or (rank(a_scale) == 1 and dim(a_scale, 0) not in (1, None)):
        raise Unwritable("its scale of a is no scalar")
    zeros = op.given(4), op.given(5)
    y = _integer_product(op, a, b, zeros, op.Mul(a_scale, b_scale), op.given(6))
    return op.to_like(y, b_scale)


@contrib("QGemm", recognized=False)
def qgemm(op: Body) -> Results:
    """alpha · a_scale · b_scale · ((A - a_zero)(B - b_zero) + C), quantized where y_scale is."""
    a, a_scale, b, b_scale = (op.needed(i) for i in (0, 1, 3, 4))
    a, b = (
        op.Transpose(x, perm=[1, 0]) if op.attr(trans, 0) else x
        for x, trans in ((a, "transA"), (b, "transB"))
    )
    product = op.plus(op.MatMulInteger(a, b, op.given(2), op.given(5)), op.given(6))
    scale = op.formula(
        "alpha * a_scale * b_scale", alpha=op.attr("alpha", 1.0), a_scale=a_scale, b_scale=b_scale
    )
    rounds = op.given(7) is not None
    if rounds:  # by one product, in the order of onnxruntime's kernel: ties fall alike
        scale = op.Div(scale, op.needed(7))
    y = op.Mul(op.to_like(op.Cast(product, to=ir.DataType.FLOAT), scale), scale)
    return quantized(op, y, op.number(1.0, scale), op.given(8), a.dtype) if rounds else y


@contrib("QAttention", recognized=False)
def qattention(
    op: Body,
    x: ir.Value,
    weights: ir.Value,
    bias: ir.Value,
    x_scale: ir.Value,
    w_scale: ir.Value,
    mask: Input,
    x_zero: Input,
    w_zero: Input,
    past: Input,
) -> Results:
    columns = known(dim(weights, 1) or dim(bias, 0), "the size of its weights")
    scale = op.Mul(x_scale, w_scale)
    qkv = _integer_product(op, x, weights, (x_zero, w_zero), scale, bias)
    return attention_of(op, op.to_like(qkv, bias), [columns // 3] * 3, mask=mask, past=past)


@contrib("QEmbedLayerNormalization", recognized=False)
def quantized_embed_layer_norm(op: Body, ids: ir.Value, segments: Input) -> Results:
    word, position, gamma, beta = (dequantized(op, i, (6, 11)) for i in (2, 3, 5, 6))
    segment = None if op.given(4) is None else dequantized(op, 4, (6, 11))
    tables = (word, position, segment, gamma, beta)
    return embed_layer_norm(op, ids, segments, *tables, op.given(7))[:2]


# ---- weights of few bits ---------------------------------------------------------------------


def _unpacked(op: Body, packed: ir.Value, bits: int, shape: list[int]) -> ir.Value:
    """The numbers of `bits` bits that bytes hold, the lowest bits first, as uint8 of a shape."""
    if bits == 8:
        return op.Reshape(packed, [*shape])
    mask = op.constant(np.array((1 << bits) - 1, np.uint8))
    flat = op.Reshape(packed, [-1, 1])
    parts = []
    for low in range(0, 8, bits):
        moved = flat
        if low:
            moved = op.BitShift(flat, op.constant(np.array(low, np.uint8)), direction="RIGHT")
        parts.append(op.BitwiseAnd(moved, mask))
    return op.Reshape(op.Concat(*parts, axis=1), [*shape])


def _first(op: Body, x: ir.Value, columns: int) -> ir.Value:
    return op.Slice(x, [0], [columns], [1])


def _zero_points(
    op: Body, zeros: ir.Value | None, scales: ir.Value, bits: int, rows: int, blocks: int
) -> ir.Value:
    """The zero point of each block [rows, blocks, 1] in the type of the scales, or that of all."""
    if zeros is None:
        return op.number(float(1 << (bits - 1)), scales)
    if known(zeros.dtype, "the type of its zero points") == ir.DataType.UINT8:
        width = -(-blocks * bits // 8) * 8 // bits
        zeros = _unpacked(op, zeros, bits, [rows, width])
        zeros = zeros if width == blocks else _first(op, zeros, blocks)
    return op.to_like(op.Reshape(zeros, [rows, blocks, 1]), scales)


def unpacked_weights(op: Body) -> ir.Value:
    """The weights [N, K] of a MatMulNBits in the type of its scales."""
    b, scales, zeros, groups = op.needed(1), op.needed(2), op.given(3), op.given(4)
    bits, size = op.attr("bits", 4), op.count("block_size")
    n, k = op.count("N"), op.count("K")
    if bits not in (2, 4, 8) or op.attr("weight_prepacked", 0):
        raise Unwritable("its weights are packed in another way")
    if zeros is not None and groups is not None:
        # onnxruntime's kernel for the CPU leaves the zero points out then (1.32)
        raise Unwritable("it has g_idx beside zero points, on which kernels do not agree")
    blocks = -(-k // size)
    q = _unpacked(op, b, bits, [n, blocks, size])
    zero = _zero_points(op, zeros, scales, bits, n, blocks)
    if groups is not None:  # the block of each row of the weights, instead of its place
        flat = _first(op, op.Reshape(q, [n, blocks * size]), k)
        scale = op.Gather(op.Reshape(scales, [n, blocks]), groups, axis=1)
        return op.Mul(op.Sub(op.to_like(flat, scales), zero), scale)
    scale = op.Reshape(scales, [n, blocks, 1])
    w = op.Mul(op.Sub(op.to_like(q, scales), zero), scale)
    rows: ir.Value = op.Reshape(w, [n, blocks * size])
    return rows if blocks * size == k else _first(op, rows, k)


@contrib("MatMulNBits", recognized=False)
def matmul_nbits(op: Body, a: ir.Value) -> Results:
    weights = op.to_like(unpacked_weights(op), a)
    return op.plus(op.MatMul(a, op.Transpose(weights, perm=[1, 0])), op.given(5))


@contrib("GatherBlockQuantized", recognized=False)
def gather_block_quantized(
    op: Body, data: ir.Value, ids: ir.Value, scales: ir.Value, zeros: Input
) -> Results:
    """Rows of a table of few bits, as floats; indices are taken to be within the table."""
    size, bits = op.count("block_size", 128), op.count("bits", 4)
    columns, axis = dim(data, 1), op.attr("quantize_axis", 1)
    if rank(data) != 2 or columns is None or axis not in (1, -1):
        raise Unwritable("its table is no matrix with blocks along the rows")
    if op.attr("gather_axis", 0) not in (0, -2):
        raise Unwritable("it gathers along the rows")
    if data.dtype in (ir.DataType.INT4, ir.DataType.UINT4):
        return op.Gather(op.DequantizeLinear(data, scales, zeros, axis=1, block_size=size), ids)
    width = columns * 8 // bits
    if data.dtype != ir.DataType.UINT8 or bits not in (2, 4, 8) or width % size:
        raise Unwritable("its table is packed in another way")
    blocks = width // size
    q = _unpacked(op, op.Gather(data, ids), bits, [-1, blocks, size])
    scale = op.Reshape(op.Gather(scales, ids), [-1, blocks, 1])
    read = None if zeros is None else op.Gather(zeros, ids)
    zero = _zero_points(op, read, scales, bits, -1, blocks)
    y = op.Mul(op.Sub(op.to_like(q, scales), zero), scale)
    return op.Reshape(y, op.vector([op.Shape(ids), width]), allowzero=1)

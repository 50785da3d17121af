"""Quantized operators: QLinear… ones as dequantize, compute, quantize; products of integers.

Weights of few bits are unpacked.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_fuse.importer.contrib.attention import attention_of
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
from onnx_fuse.importer.upgrade import counted_part
from onnx_fuse.ir.build import dim, given, rank

INT8 = (ir.DataType.INT8, ir.DataType.UINT8)


def dequantized(op: Body, node: ir.Node, first: int, *, axis: int | None = None) -> ir.Value:
    """The floats of the operand `first`, whose scale and zero point come next."""
    x, scale, zero = needed(node, first), needed(node, first + 1), given(node, first + 2)
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
        if kind is None:
            raise Unwritable("the type of its result is not known")
        zero = op.constant(np.zeros((), kind.numpy()))
    q: ir.Value = op.QuantizeLinear(y, scale, zero)
    if zero.dtype is not None:
        q.dtype = zero.dtype
    return q


@contrib("QuantizeLinear", recognized=False)
def quantize_linear(op: Body, node: ir.Node) -> Results:
    operands = [needed(node, 0), needed(node, 1), given(node, 2)]
    return [op.node("QuantizeLinear", operands, attributes={"axis": attr(node, "axis")})]


@contrib("DequantizeLinear", recognized=False)
def dequantize_linear(op: Body, node: ir.Node) -> Results:
    return [dequantized(op, node, 0, axis=attr(node, "axis"))]


# ---- operators between a dequantization and a quantization -----------------------------------


def _enter(
    name: str, compute: Callable[[Body, ir.Node, list[ir.Value]], ir.Value], operands: int = 1
) -> None:
    """Enter an operator of `operands` quantized inputs, then the result's scale and zero point."""

    def build(op: Body, node: ir.Node) -> Results:
        values = [dequantized(op, node, 3 * i) for i in range(operands)]
        y = compute(op, node, values)
        last = 3 * operands
        kind = needed(node, 0).dtype
        return [quantized(op, y, needed(node, last), given(node, last + 1), kind)]

    contrib(name, recognized=False)(build)


@contrib("QLinearSoftmax", recognized=False)
def qlinear_softmax(op: Body, node: ir.Node) -> Results:
    """onnxruntime counts the steps of its result in 1 / scale, rounded down to a whole number."""
    axis = attr(node, "axis", -1)
    if attr(node, "opset", 13) < 13:
        size = known_rank(needed(node, 0), "X")
        if axis % size != size - 1:
            raise Unwritable("it flattens several axes")
        axis = -1
    scale = needed(node, 3)
    y = op.Softmax(dequantized(op, node, 0), axis=axis)
    steps = op.Mul(y, op.Floor(op.Reciprocal(scale)))
    return [quantized(op, steps, op.number(1.0, scale), given(node, 4), needed(node, 0).dtype)]


def _with_channels_first(
    op: Body, node: ir.Node, x: ir.Value, size: int, compute: Callable[[ir.Value], ir.Value]
) -> ir.Value:
    if not attr(node, "channels_last", 0):
        return compute(x)
    return op.channels_last(compute(op.channels_first(x, size)), size)


def _pool_rank(node: ir.Node) -> int:
    """The rank of what a pool takes. Raises Unwritable."""
    window = attr(node, "kernel_shape")
    if not window:
        raise Unwritable("its attribute 'kernel_shape' is missing")
    return len(window) + 2


def _average(op: Body, node: ir.Node, x: list[ir.Value]) -> ir.Value:
    names = "auto_pad ceil_mode count_include_pad kernel_shape pads strides"
    if attr(node, "ceil_mode", 0) and attr(node, "count_include_pad", 0):
        raise Unwritable("its windows that pass the padding are divided by the whole kernel's size")

    def pool(v: ir.Value) -> ir.Value:
        y, factor = op.like("AveragePool", node, [v], names), counted_part(node, v, op)
        return y if factor is None else op.Mul(y, factor)

    return _with_channels_first(op, node, x[0], _pool_rank(node), pool)


def _global_average(op: Body, node: ir.Node, x: list[ir.Value]) -> ir.Value:
    size = known_rank(needed(node, 0), "X") if attr(node, "channels_last", 0) else 0
    return _with_channels_first(op, node, x[0], size, op.GlobalAveragePool)


def _mean(op: Body, node: ir.Node, x: list[ir.Value]) -> ir.Value:
    return op.ReduceMean(x[0], op.ints(*attr(node, "axes")), keepdims=attr(node, "keepdims", 1))


_enter("QLinearAdd", lambda op, node, x: op.Add(*x), 2)
_enter("QLinearMul", lambda op, node, x: op.Mul(*x), 2)
_enter("QLinearSigmoid", lambda op, node, x: op.Sigmoid(x[0]))
_enter("QLinearLeakyRelu", lambda op, node, x: op.LeakyRelu(x[0], alpha=attr(node, "alpha", 0.01)))
_enter("QLinearAveragePool", _average)
_enter("QLinearGlobalAveragePool", _global_average)
_enter("QLinearReduceMean", _mean)


@contrib("QLinearConcat", recognized=False)
def qlinear_concat(op: Body, node: ir.Node) -> Results:
    scale, zero = needed(node, 0), needed(node, 1)
    parts = [dequantized(op, node, i) for i in range(2, len(node.inputs), 3)]
    joined = op.Concat(*parts, axis=attr(node, "axis")) if len(parts) > 1 else parts[0]
    return [quantized(op, joined, scale, zero, None)]


@contrib("QLinearWhere", recognized=False)
def qlinear_where(op: Body, node: ir.Node) -> Results:
    chosen = op.Where(needed(node, 0), dequantized(op, node, 1), dequantized(op, node, 4))
    return [quantized(op, chosen, needed(node, 7), needed(node, 8), None)]


@contrib("QLinearConv", recognized=False)
def qlinear_conv(op: Body, node: ir.Node) -> Results:
    """ai.onnx's, with channels last or first."""
    size, others = known_rank(needed(node, 3), "w"), node.inputs[1:]
    y = _with_channels_first(
        op, node, needed(node, 0), size, lambda v: op.like("QLinearConv", node, [v, *others], CONV)
    )
    return [y]


@contrib("NhwcMaxPool", recognized=False)
def nhwc_max_pool(op: Body, node: ir.Node) -> Results:
    x, size = op.channels_first(needed(node, 0), _pool_rank(node)), _pool_rank(node)
    names = "auto_pad ceil_mode dilations kernel_shape pads strides"
    return [op.channels_last(op.like("MaxPool", node, [x], names), size)]


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
    y = op.Mul(product, op.cast_like(scale, product))
    return y if bias is None else op.Add(y, op.cast_like(bias, y))


def _one_scale(value: ir.Value) -> None:
    if rank(value) not in (0, 1) or (rank(value) == 1 and dim(value, 0) not in (1, None)):
        raise Unwritable("its scale of a is no scalar")


@contrib("DynamicQuantizeMatMul", recognized=False)
def dynamic_quantize_matmul(op: Body, node: ir.Node) -> Results:
    a, b, b_scale = (needed(node, i) for i in range(3))
    quantized_a, a_scale, a_zero = op.DynamicQuantizeLinear(a, outputs=3)
    quantized_a.dtype = a_zero.dtype = ir.DataType.UINT8
    a_scale.dtype = ir.DataType.FLOAT
    scale = op.Mul(a_scale, b_scale)
    return [_integer_product(op, quantized_a, b, (a_zero, given(node, 3)), scale, given(node, 4))]


@contrib("MatMulIntegerToFloat", recognized=False)
def matmul_integer_to_float(op: Body, node: ir.Node) -> Results:
    a, b, a_scale, b_scale = (needed(node, i) for i in range(4))
    _one_scale(a_scale)
    zeros = given(node, 4), given(node, 5)
    y = _integer_product(op, a, b, zeros, op.Mul(a_scale, b_scale), given(node, 6))
    return [op.cast_like(y, b_scale)]


@contrib("QGemm", recognized=False)
def qgemm(op: Body, node: ir.Node) -> Results:
    """alpha · a_scale · b_scale · ((A - a_zero)(B - b_zero) + C), quantized where y_scale is."""
    a, a_scale, b, b_scale = (needed(node, i) for i in (0, 1, 3, 4))
    a, b = (
        op.Transpose(x, perm=[1, 0]) if attr(node, trans, 0) else x
        for x, trans in ((a, "transA"), (b, "transB"))
    )
    product = op.MatMulInteger(a, b, given(node, 2), given(node, 5))
    if given(node, 6) is not None:
        product = op.Add(product, given(node, 6))
    if (alpha := attr(node, "alpha", 1.0)) != 1.0:
        a_scale = op.Mul(op.number(alpha, a_scale), a_scale)
    scale = op.Mul(a_scale, b_scale)
    rounds = given(node, 7) is not None
    if rounds:  # by one product, in the order of onnxruntime's kernel: ties fall alike
        scale = op.Div(scale, needed(node, 7))
    y = op.Mul(op.cast_like(op.Cast(product, to=ir.DataType.FLOAT), scale), scale)
    if rounds:
        y = quantized(op, y, op.number(1.0, scale), given(node, 8), a.dtype)
    return [y]


@contrib("QAttention", recognized=False)
def qattention(op: Body, node: ir.Node) -> Results:
    x, weights, bias, x_scale, w_scale = (needed(node, i) for i in range(5))
    columns = dim(weights, 1) or dim(bias, 0)
    if columns is None:
        raise Unwritable("the size of its weights is not known")
    zeros = given(node, 6), given(node, 7)
    qkv = _integer_product(op, x, weights, zeros, op.Mul(x_scale, w_scale), bias)
    sizes = [columns // 3] * 3
    return attention_of(
        op, node, op.cast_like(qkv, bias), sizes, mask=given(node, 5), past=given(node, 8)
    )


# ---- weights of few bits ---------------------------------------------------------------------


def _unpacked(op: Body, packed: ir.Value, bits: int, shape: list[int]) -> ir.Value:
    """The numbers of `bits` bits that bytes hold, the lowest bits first, as uint8 of a shape."""
    if bits == 8:
        return op.Reshape(packed, op.ints(*shape))
    mask = op.constant(np.array((1 << bits) - 1, np.uint8))
    flat = op.Reshape(packed, op.ints(-1, 1))
    parts = []
    for low in range(0, 8, bits):
        moved = flat
        if low:
            moved = op.BitShift(flat, op.constant(np.array(low, np.uint8)), direction="RIGHT")
        parts.append(op.BitwiseAnd(moved, mask))
    return op.Reshape(op.Concat(*parts, axis=1), op.ints(*shape))


def _first(op: Body, x: ir.Value, columns: int) -> ir.Value:
    return op.Slice(x, op.ints(0), op.ints(columns), op.ints(1))


def unpacked_weights(op: Body, node: ir.Node) -> ir.Value:
    """The weights [N, K] of a MatMulNBits in the type of its scales."""
    b, scales, zeros, groups = needed(node, 1), needed(node, 2), given(node, 3), given(node, 4)
    bits, size = attr(node, "bits", 4), count(node, "block_size")
    n, k = count(node, "N"), count(node, "K")
    if bits not in (2, 4, 8) or attr(node, "weight_prepacked", 0):
        raise Unwritable("its weights are packed in another way")
    if zeros is not None and groups is not None:
        # onnxruntime's kernel for the CPU leaves the zero points out then (1.32)
        raise Unwritable("it has g_idx beside zero points, on which kernels do not agree")
    blocks = -(-k // size)
    q = _unpacked(op, b, bits, [n, blocks, size])
    if zeros is None:
        zero = op.number(float(1 << (bits - 1)), scales)
    else:
        if zeros.dtype == ir.DataType.UINT8:
            width = -(-blocks * bits // 8) * 8 // bits
            zeros = _unpacked(op, zeros, bits, [n, width])
            zeros = zeros if width == blocks else _first(op, zeros, blocks)
        elif zeros.dtype is None:
            raise Unwritable("the type of its zero points is not known")
        zero = op.cast_like(op.Reshape(zeros, op.ints(n, blocks)), scales)
    scale = op.Reshape(scales, op.ints(n, blocks))
    if groups is not None:  # the block of each row of the weights, instead of its place
        flat = _first(op, op.Reshape(q, op.ints(n, blocks * size)), k)
        scale = op.Gather(scale, groups, axis=1)
        return op.Mul(op.Sub(op.cast_like(flat, scales), zero), scale)
    last = op.ints(2)
    zero = zero if zeros is None else op.Unsqueeze(zero, last)
    w = op.Mul(op.Sub(op.cast_like(q, scales), zero), op.Unsqueeze(scale, last))
    rows: ir.Value = op.Reshape(w, op.ints(n, blocks * size))
    return rows if blocks * size == k else _first(op, rows, k)


@contrib("MatMulNBits", recognized=False)
def matmul_nbits(op: Body, node: ir.Node) -> Results:
    a, bias = needed(node, 0), given(node, 5)
    weights = op.cast_like(unpacked_weights(op, node), a)
    y = op.MatMul(a, op.Transpose(weights, perm=[1, 0]))
    return [y if bias is None else op.Add(y, bias)]


@contrib("GatherBlockQuantized", recognized=False)
def gather_block_quantized(op: Body, node: ir.Node) -> Results:
    """Rows of a table of few bits, as floats; indices are taken to be within the table."""
    data, ids, scales, zeros = needed(node, 0), needed(node, 1), needed(node, 2), given(node, 3)
    size, bits = count(node, "block_size", 128), count(node, "bits", 4)
    columns, axis = dim(data, 1), attr(node, "quantize_axis", 1)
    if rank(data) != 2 or columns is None or axis not in (1, -1):
        raise Unwritable("its table is no matrix with blocks along the rows")
    if attr(node, "gather_axis", 0) not in (0, -2):
        raise Unwritable("it gathers along the rows")
    if data.dtype in (ir.DataType.INT4, ir.DataType.UINT4):
        table = op.DequantizeLinear(data, scales, zeros, axis=1, block_size=size)
        return [op.Gather(table, ids)]
    width = columns * 8 // bits
    if data.dtype != ir.DataType.UINT8 or bits not in (2, 4, 8) or width % size:
        raise Unwritable("its table is packed in another way")
    blocks = width // size
    q = _unpacked(op, op.Gather(data, ids), bits, [-1, blocks, size])
    scale = op.Reshape(op.Gather(scales, ids), op.ints(-1, blocks, 1))
    zero = op.number(float(1 << (bits - 1)), scales)
    if zeros is not None:
        each = -(-blocks * bits // 8) * 8 // bits
        rows = _unpacked(op, op.Gather(zeros, ids), bits, [-1, each])
        rows = rows if each == blocks else _first(op, rows, blocks)
        zero = op.cast_like(op.Reshape(rows, op.ints(-1, blocks, 1)), scales)
    y = op.Mul(op.Sub(op.cast_like(q, scales), zero), scale)
    return [op.Reshape(y, op.shape(op.Shape(ids), width), allowzero=1)]

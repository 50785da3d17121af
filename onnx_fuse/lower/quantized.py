"""Convolutions and products between DequantizeLinear and QuantizeLinear, in integers.

x = (q - zx) sx and w = (p - zw) sw give x * w = sx sw (Σ q (p - zw) - zx Σ (p - zw)): the sums are
exact in int32, and one number a filter, its scale, makes them floats. What is quantized again
behind it is part of the same call, as a tail.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import Code, cast_step
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.kernels.gemm_integer import BYTES
from onnx_fuse.lower.context import Context, emit
from onnx_fuse.lower.quant import axis_of
from onnx_fuse.ops.activations import BY_KEY
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.problems import IntegerConv

LARGEST = 2**31 // (255 * 255)
"""The products that int32 always holds the sum of."""


@dataclass(frozen=True)
class Codes:
    """What a DequantizeLinear reads: y = (q - zero) scale, both one number or one along `axis`."""

    q: Tensor
    scale: np.ndarray
    zero: np.ndarray
    axis: int | None


def codes(ctx: Context, node: ir.Node, i: int) -> Codes | None:
    """The 8-bit codes behind input `i`, whose scales and zero points nothing writes to; or None."""
    value = node.inputs[i] if i < len(node.inputs) else None
    source = value.producer() if value is not None else None
    if source is None or source.op_type != "DequantizeLinear" or source.domain == FUSE:
        return None
    if any(v is not None and v not in ctx.slots for v in source.inputs):
        return None  # of a graph around this one
    q = ctx.view(source, 0)
    if q.dtype not in BYTES or ctx.attr(source, "block_size", 0) or not q.size:
        return None
    held = [ctx.known(ctx.view(source, i)) for i in (1, 2) if ctx.has(source, i)]
    if any(array is None for array in held):
        return None
    scale, *points = (np.asarray(array) for array in held)
    point = points[0] if points else np.zeros(scale.shape, np.int8)
    sizes = {scale.size, point.size}
    axis = None if sizes == {1} else axis_of(ctx, source, q)
    if len(sizes) > 1 or (axis is not None and q.shape[axis] != scale.size):
        return None
    return Codes(q, scale.astype(np.float32).reshape(-1), point.astype(np.int32).reshape(-1), axis)


@dataclass(frozen=True)
class Factors:
    """Both operands of a product in integers: x of one scale, filters of one each or one for all.

    "weight" is int8 [filters, ...] less its zero points, "shift" and "scale" are rows of filters.
    """

    x: Tensor
    zero: int
    weight: Tensor
    shift: Tensor
    scale: Tensor


def factors(ctx: Context, node: ir.Node, order: tuple[int, ...] = ()) -> Factors | None:
    """The operands of a Conv or of a product, if both are dequantized and int32 holds the sums.

    `order` are the axes of the weight with those of filters first, for a product.
    """
    x, w = codes(ctx, node, 0), codes(ctx, node, 1)
    if x is None or w is None or x.axis is not None:
        return None
    weight = w.q.permute(order) if order else w.q
    first = order[0] if order else 0
    if w.axis not in (None, first) or weight.size // weight.shape[0] > LARGEST:
        return None
    with np.errstate(all="ignore"):
        scale = x.scale * w.scale
        # the sums of floats that these stand for neither overflow nor vanish
        regular = np.abs(scale) < np.finfo(np.float32).max / 2**31
        regular &= np.abs(scale) >= np.finfo(np.float32).tiny
    array = ctx.known(weight)
    if array is None or not regular.all():
        return None
    zero, filters = w.zero.reshape(-1, *[1] * (len(weight.shape) - 1)), weight.shape[0]
    least, most = (int(end(array.astype(np.int32) - zero)) for end in (np.min, np.max))
    if not -128 <= least <= most <= 127:
        return None
    digest = hashlib.sha256(repr((w.zero.tolist(), x.zero.tolist())).encode()).hexdigest()[:16]

    def signed(values: np.ndarray) -> np.ndarray:
        return (values.astype(np.int32) - zero).astype(np.int8)

    def shifts(values: np.ndarray) -> np.ndarray:
        sums = (values.astype(np.int64) - zero).reshape(filters, -1).sum(1)
        return (-int(x.zero[0]) * sums).astype(np.int32)

    less, shift = (
        ctx.packed(weight, f"{name} {digest}", make)
        for name, make in (("less zero points", signed), ("shift of sums", shifts))
    )
    assert less is not None
    assert shift is not None
    row = ctx.constant(np.ascontiguousarray(np.broadcast_to(scale, (filters,))))
    return Factors(x.q, int(x.zero[0]), less, shift, row)


def convolution(
    ctx: Context,
    node: ir.Node,
    problem: IntegerConv,
    both: Factors,
    reads: Mapping[str, Tensor],
    y: Tensor,
    act: tuple[str, float] = ("", 0.0),
) -> str | None:
    """y = act(scale (x * weight + shift) + bias); `reads` are x, weight and perhaps a bias.

    y is laid out as the problem has it.
    """
    filters = problem.groups * problem.filters
    bias = reads.get("bias")
    if bias is None:
        bias = ctx.constant(np.zeros(filters, np.float32))
    elif bias.dtype != "float32":
        wide = ctx.packed(bias, "float32", lambda array: array.astype(np.float32))
        if wide is None:
            wide = ctx.scratch("float32", bias.shape)
            code = Code()
            emit(ctx, code, node, code.step("Cast", "float32", code.load(bias)), wide)
        bias = wide
    operands = {**reads, "bias": bias, "shift": both.shift, "scale": both.scale}
    name, alpha = act
    plain = y.dtype == "float32" and not name
    sums = y if plain else ctx.scratch("float32", y.shape)
    why = ctx.select(node, problem, operands, {"y": sums})
    if why or plain:
        return why
    code = Code()
    value = code.load(sums)
    if name:
        row = BY_KEY[name]
        numbers = [number for _, number in row.numbers]
        numbers[: bool(row.attributes)] = [alpha] * bool(row.attributes)
        scalars = [code.scalar(number, "float32") for number in numbers]
        value = code.step(row.name, "float32", value, *scalars)
    if y.dtype != "float32":
        value = code.step(cast_step(y.dtype), y.dtype, value)
    emit(ctx, code, node, value, y)
    return None

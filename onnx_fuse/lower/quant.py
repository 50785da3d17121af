"""Quantization: QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear, element by element.

y = saturate(round(x / scale) + zero_point) and y = (q - zero_point) * scale are pointwise
expressions, so they become part of the chains around them. Scales and zero points are views of the
iteration space: one number, one for each index of an axis, or one for each block of an axis, which
is two axes then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import (
    LARGEST,
    NARROW_FLOATS,
    STORAGE,
    Code,
    Ref,
    cast_step,
    dtype_name,
    rounded,
)
from onnx_fuse.ir.build import required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.kernels.gemm_integer import BYTES, CODES
from onnx_fuse.lower.channels_last import follow
from onnx_fuse.lower.context import Codes, Context, Lowering, Rounded, Unserved, emit
from onnx_fuse.program.call import Tensor, dtype_of
from onnx_fuse.program.data_movement import Range

RANGES = {
    "int8": (-128, 127), "uint8": (0, 255), "int16": (-32768, 32767), "uint16": (0, 65535),
    "int4": (-8, 7), "uint4": (0, 15), "int2": (-2, 1), "uint2": (0, 3),
}  # fmt: skip
"""The range of each integer type that is quantized to."""
FLOATS = ("float32", "float16", "bfloat16")
E4M3 = "float8_e4m3fn"
View = Callable[[Tensor], Tensor]


def _parts(ctx: Context, node: ir.Node, x: Tensor, scale: Tensor) -> list[tuple[View, View]]:
    """The iteration spaces of a node: how x and y, and how scale and zero point are seen in each.

    Several where the last block of an axis is not whole. Raises ValueError for a scale that does
    not fit.
    """
    size = ctx.attr(node, "block_size", 0)
    if not size:
        if scale.size == 1 and len(scale.shape) <= 1:
            return [(lambda t: t, lambda t: t.view(()).expand(x.shape))]
        axis = axis_of(ctx, node, x)
        if scale.shape != (x.shape[axis],):
            raise ValueError(f"axis {axis} has {x.shape[axis]} elements, scale {scale.shape}")
        ones = [1] * (len(x.shape) - axis - 1)
        return [(lambda t: t, lambda t: t.view((t.size, *ones)).expand(x.shape))]
    axis = axis_of(ctx, node, x)
    length, blocks = x.shape[axis], -(-x.shape[axis] // size)
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    if scale.shape != (*before, blocks, *after):
        raise ValueError(f"{blocks} blocks along axis {axis}, scale {scale.shape}")
    parts: list[tuple[View, View]] = []
    for first, count, width in ((0, length // size, size), (length // size, 1, length % size)):
        if not count or not width:
            continue
        parts.append(_blocks(axis, first, count, (*before, count, width, *after), size))
    return parts


def _blocks(
    axis: int, first: int, count: int, shape: tuple[int, ...], size: int
) -> tuple[View, View]:
    """How x and the numbers of its blocks of `size` are seen in the iteration space `shape`.

    It is of `count` blocks along `axis` from the `first` on.
    """
    one = (*shape[: axis + 1], 1, *shape[axis + 2 :])
    return (
        lambda t: t.part(axis, first * size, count * shape[axis + 1]).view(shape),
        lambda t: t.part(axis, first, count).view(one).expand(shape),
    )


def axis_of(ctx: Context, node: ir.Node, x: Tensor) -> int:
    """The axis of x that the node's scales lie along."""
    axis, rank = int(ctx.attr(node, "axis", 1)), len(x.shape)
    if not -rank <= axis < rank:
        raise ValueError(f"axis {axis} of a tensor of {rank} axes")
    return axis % rank


def _number(ctx: Context, code: Code, node: ir.Node, i: int, view: View) -> Ref | None:
    """Input `i` in the iteration space; a known single number is a scalar; None where absent."""
    if not ctx.has(node, i):
        return None
    array = ctx.host(node, i)
    if array is not None and array.size == 1:
        return code.scalar(array.reshape(-1)[0], array.dtype.name)
    return code.load(view(ctx.dense(node, i)))


def _hold_stored(*dtypes: str) -> None:
    if other := [dtype for dtype in dtypes if dtype not in STORAGE]:
        raise Unserved("no-kernel", what=other[0])


def quantize(ctx: Context, node: ir.Node) -> None:
    """y = saturate(round_half_even(x / scale) + zero_point), the division in `precision`.

    As in onnxruntime's CPU kernel, a NaN becomes the smallest integer. With saturate=0, a value
    beyond the range of a float8 type becomes NaN.
    """
    x, scale = ctx.view(node, 0), ctx.view(node, 1)
    held = codes(ctx, node, 0)
    if held is not None and _same_codes(ctx, node, held):
        ctx.alias(node, 0, held.q)
        return
    asked = ctx.attr(node, "output_dtype", 0)
    if ctx.has(node, 2):
        dtype = ctx.view(node, 2).dtype
    else:
        dtype = dtype_name(ir.DataType(asked)) if asked else "uint8"
    precision = ctx.attr(node, "precision", 0)
    how = dtype_name(ir.DataType(precision)) if precision else scale.dtype
    how = "float32" if how == "float8_e8m0fnu" else how
    _hold_stored(x.dtype, scale.dtype, dtype)
    if _from_zero(ctx, node):
        dtype = "uint8"
    if how not in FLOATS or x.dtype not in (*FLOATS, "int32") or scale.dtype == "int32":
        raise Unserved("no-kernel", what=f"{x.dtype} by {scale.dtype} in {how}")
    if dtype not in RANGES and dtype not in LARGEST:
        raise Unserved("no-kernel", what=f"codes of {dtype}")
    y, parts = ctx.output(node, 0, x.shape, dtype), _parts(ctx, node, x, scale)
    if not ctx.attr(node, "block_size", 0):
        y = follow(ctx, node, y, [x])
    for elements, numbers in parts:
        code = Code()
        value, divisor = code.load(elements(x)), required(_number(ctx, code, node, 1, numbers))
        if how == "float32":
            value = code.step("Cast", "float32", value)
            if dtype in BYTES and (numbers_of := scalars(ctx, node)) is not None:
                emit(ctx, code, node, to_code(code, value, dtype, *numbers_of), elements(y))
                ctx.rounded[y.buffer] = Rounded(y, x, *numbers_of)
                continue
            if dtype == E4M3 and (numbers_of := scalars(ctx, node)) is not None:
                pair = (numbers_of[0], np.float32(1) / numbers_of[0])
                ends = [code.scalar(number, "float32") for number in pair]
                value = code.step("Steps", "float32", value, *ends)
            else:
                value = code.step("Div", "float32", value, divisor)
        else:
            value, divisor = (
                operand
                if kind == how
                else code.step(cast_step(how), how, code.step("Cast", "float32", operand))
                for operand, kind in ((value, x.dtype), (divisor, scale.dtype))
            )
            # a quotient of 16-bit floats that is rounded to float first is rounded right
            value = code.step(cast_step(how), how, code.step("Div", "float32", value, divisor))
        if dtype in RANGES:
            value = to_integer(code, value, dtype, _number(ctx, code, node, 2, numbers))
        else:
            saturate = bool(ctx.attr(node, "saturate", 1)) or dtype == "float4_e2m1fn"
            value = rounded(code, value, dtype, saturate)
        emit(ctx, code, node, value, elements(y))


def divides_exactly(scale: np.float32) -> bool:
    """Whether pointwise/math.cuh's `quantized` rounds as a division by the scale does.

    Before it is rounded, its quotient errs by less than 3 * 2^-24 units in the last place. From
    where two floats meet, one of them halfway between small integers, a quotient of floats is
    j / 2^25 of a unit or more away: j = ±S modulo 2^14 for a scale of bits S.
    """
    low = int(scale.view(np.uint32)) % 2**14
    return bool(2.0**-100 < scale < 2.0**100) and (low == 0 or 8 < low < 2**14 - 8)


def scalars(ctx: Context, node: ir.Node) -> tuple[np.float32, int] | None:
    """The scale, which `divides_exactly`, and the zero point, each one number that is known."""
    arrays = [ctx.host(node, i) if ctx.has(node, i) else np.zeros(1, np.int8) for i in (1, 2)]
    if any(array is None or array.size != 1 for array in arrays):
        return None
    scale, zero = (np.asarray(array).reshape(-1)[0] for array in arrays)
    scale = np.float32(scale)
    return (scale, 0 if _from_zero(ctx, node) else int(zero)) if divides_exactly(scale) else None


def _from_zero(ctx: Context, node: ir.Node) -> bool:
    """Whether int8 codes whose zero point is their least are kept as uint8 codes of zero point 0.

    A convolution pads those without further sums. All who read the node's codes dequantize them.
    """
    uses = node.outputs[0].uses()
    if not uses or node.outputs[0].is_graph_output() or ctx.attr(node, "precision", 0):
        return False
    readers = [use.node for use in uses]
    if any((r.op_type, r.graph, r.domain) != ("DequantizeLinear", node.graph, "") for r in readers):
        return False
    points = [ctx.host(n, 2) if ctx.has(n, 2) else None for n in (node, *readers)]
    scale = ctx.host(node, 1)
    if scale is None or scale.size != 1 or scale.dtype != np.float32:
        return False
    least = all(
        point is not None and point.dtype == np.int8 and point.size == 1 and point.min() == -128
        for point in points
    )
    return least and divides_exactly(scale.reshape(-1)[0])


def _point(q: Tensor, point: np.ndarray) -> np.ndarray:
    """The zero points of codes in int32, which a node has as `point`: 0 for those `_from_zero`."""
    moved = 128 if q.dtype == "uint8" and point.dtype == np.int8 else 0
    return point.astype(np.int32) + moved


def to_code(code: Code, value: Ref, dtype: str, scale: np.float32, zero: int) -> Ref:
    """The float32 value over its scale, rounded and shifted, as the nearest 8-bit integer."""
    numbers = (scale, np.float32(1) / scale, zero, *RANGES[dtype])
    scalars = [code.scalar(number, "float32") for number in numbers]
    return code.step("Code", dtype, code.step("Quantize", "float32", value, *scalars))


def to_integer(code: Code, value: Ref, dtype: str, zero: Ref | None) -> Ref:
    """The float32 value, rounded and shifted by its zero point, as the nearest `dtype`."""
    value = code.step("Round", "float32", value)
    if zero is not None:
        value = code.step("Add", "float32", value, code.step("Cast", "float32", zero))
    ends = [code.scalar(end, "float32") for end in RANGES[dtype]]
    return code.step("Cast", dtype, code.step("Saturate", "float32", value, *ends))


def dequantize(ctx: Context, node: ir.Node) -> None:
    """y = (q - zero_point) * scale: the difference in int32, the product in float32."""
    q, scale = ctx.view(node, 0), ctx.view(node, 1)
    asked = ctx.attr(node, "output_dtype", 0)
    dtype = dtype_name(ir.DataType(asked)) if asked else scale.dtype
    _hold_stored(q.dtype, scale.dtype, dtype)
    if dtype not in FLOATS:
        raise Unserved("no-kernel", what=f"codes to {dtype}")
    parts = _parts(ctx, node, q, scale)
    if not four_bit_weights(ctx, node) and (once := _once(ctx, node, q, parts, dtype)) is not None:
        ctx.alias(node, 0, once)
        _remember(ctx, node, q, once)
        return
    y = ctx.output(node, 0, q.shape, dtype)
    if not ctx.attr(node, "block_size", 0):
        y = follow(ctx, node, y, [q])
    for elements, numbers in parts:
        code = Code()
        value = code.load(elements(q))
        # a zero point of a float is zero
        point = ctx.host(node, 2) if q.dtype in BYTES and ctx.has(node, 2) else None
        zero: Ref | int | None = None
        if point is not None and point.size == 1:
            zero = int(_point(q, point).reshape(-1)[0])
        elif q.dtype not in NARROW_FLOATS:
            zero = _number(ctx, code, node, 2, numbers)
        factor = required(_number(ctx, code, node, 1, numbers))
        emit(ctx, code, node, to_float(code, value, dtype, zero, factor), elements(y))
    _remember(ctx, node, q, y)


def _remember(ctx: Context, node: ir.Node, q: Tensor, floats: Tensor) -> None:
    """Note the codes of what the node dequantizes, if nothing writes to scales and zero points."""
    if q.dtype not in CODES or ctx.attr(node, "block_size", 0):
        return
    held = [ctx.known(ctx.view(node, i)) for i in (1, 2) if ctx.has(node, i)]
    if not q.size or any(array is None for array in held):
        return
    scale, *points = (np.asarray(array) for array in held)
    integers = points and q.dtype in BYTES  # a zero point of a float is zero
    point = points[0] if integers else np.zeros(scale.shape, np.int8)
    axis = None if scale.size == 1 and len(scale.shape) <= 1 else axis_of(ctx, node, q)
    ctx.codes[floats.buffer] = Codes(
        q, floats, scale.astype(np.float32).reshape(-1), _point(q, point).reshape(-1), axis
    )


def codes(ctx: Context, node: ir.Node, i: int) -> Codes | None:
    """The codes that input `i` was dequantized from, through views of both; or None."""
    view = ctx.view(node, i)
    held = ctx.codes.get(view.buffer)
    if held is None or view == held.floats:
        return held
    q, floats = held.q, held.floats
    if q.strides != floats.strides or not q.dense or floats.offset:
        return None
    axis = held.axis
    if axis is not None:  # whose place is known where axes are permuted
        sides = [[*zip(t.shape, t.strides, strict=True)] for t in (floats, view)]
        if view.offset or sorted(sides[0]) != sorted(sides[1]):
            return None
        axis = sides[1].index(sides[0][axis])
    moved = Tensor(q.buffer, q.dtype, view.shape, view.strides, q.offset + view.offset)
    return replace(held, q=moved, floats=view, axis=axis)


def to_float(code: Code, value: Ref, dtype: str, zero: Ref | int | None, factor: Ref) -> Ref:
    """The integer less its zero point, times its scale."""
    if zero is not None and not isinstance(zero, int):
        value, zero = (code.step("Cast", "int32", v) for v in (value, zero))
        value = code.step("Sub", "int32", value, zero)
    elif zero:  # as exact in floats
        value = code.step("Cast", "float32", value)
        value = code.step("Sub", "float32", value, code.scalar(zero, "float32"))
    value = code.step("Scale", "float32", code.step("Cast", "float32", value), factor)
    return value if dtype == "float32" else code.step(cast_step(dtype), dtype, value)


def _same_codes(ctx: Context, node: ir.Node, held: Codes) -> bool:
    """Whether a QuantizeLinear of what was dequantized gives those codes again, every one."""
    scale, point = (ctx.known(ctx.view(node, i)) if ctx.has(node, i) else None for i in (1, 2))
    dtype = None if point is None else "uint8" if _from_zero(ctx, node) else point.dtype.name
    if scale is None or point is None or dtype != held.q.dtype:
        return False
    kinds = {ctx.view(node, 0).dtype, ctx.view(node, 1).dtype}
    alike = scale.size == point.size == 1 and kinds == {"float32"} and dtype in BYTES
    if not alike or ctx.attr(node, "precision", 0) or held.axis is not None:
        return False
    if (scale != held.scale).any() or (_point(held.q, point) != held.zero).any():
        return False
    low, high = RANGES[held.q.dtype]
    every = np.arange(low, high + 1) - held.zero
    with np.errstate(all="ignore"):
        again = np.rint(every.astype(np.float32) * held.scale / held.scale)
    return bool((again == every).all())


def _once(
    ctx: Context, node: ir.Node, q: Tensor, parts: list[tuple[View, View]], dtype: str
) -> Tensor | None:
    """The node's result for a weight that nothing writes to, computed when the program is made."""
    point = ctx.dense(node, 2) if ctx.has(node, 2) and q.dtype not in NARROW_FLOATS else None
    held = [ctx.dense(node, 1)] + ([point] if point is not None else [])
    if len(parts) != 1 or not q.size or any(ctx.known(t) is None for t in (q, *held)):
        return None
    _, numbers = parts[0]
    views = [required(ctx.known(numbers(t))) for t in held]
    digest = hashlib.sha256(repr((dtype, node.attributes.get("axis"))).encode())
    for view in views:
        digest.update(repr((view.shape, view.dtype.name)).encode() + view.tobytes())

    def make(array: np.ndarray) -> np.ndarray:
        scale, *zero = views
        value = array.reshape(scale.shape)
        if zero:
            value = value.astype(np.int32) - zero[0].astype(np.int32)
        with np.errstate(all="ignore"):
            wide = value.astype(np.float32) * scale.astype(np.float32)
            return wide.astype(dtype_of(dtype)).reshape(q.shape)

    return ctx.packed(q, f"dequantized {digest.hexdigest()[:16]}", make)


def stays_packed(ctx: Context, weight: ir.Value | None) -> bool:
    """Whether a product's weight is dequantized from 4 bits, which MatMulNBits multiplies."""
    source = weight.producer() if weight is not None else None
    quantized = source is not None and (source.domain, source.op_type) == ("", "DequantizeLinear")
    return source is not None and quantized and four_bit_weights(ctx, source)


def _is_weight(node: ir.Node, index: int) -> bool:
    """Whether a product's input is its right operand, alone or in a fused operator."""
    if node.domain == FUSE:
        name = FusedName.of(node.op_type)
        product = name.family == "Gemm" and not (name.place or name.grad)
        return product and index == len(node.inputs) - 2
    return (node.op_type, node.domain, index) == ("MatMul", "", 1)


def four_bit_weights(ctx: Context, node: ir.Node) -> bool:
    """Whether a DequantizeLinear is of 4-bit weights [k, n] that products alone read, in blocks
    along k: MatMulNBits multiplies those as they are.
    """
    value, size = node.outputs[0], ctx.attr(node, "block_size", 0)
    q, scale = ctx.view(node, 0), ctx.view(node, 1)
    if q.dtype not in ("int4", "uint4") or len(q.shape) != 2 or not q.size:
        return False
    axis = int(ctx.attr(node, "axis", 1)) % 2
    blocked = (
        (axis == 0 and size % 16 == 0) if size else (axis == 1 and scale.shape == (q.shape[1],))
    )
    uses = value.uses()
    held = [ctx.known(ctx.view(node, i)) for i in range(3) if ctx.has(node, i)]
    plain = ctx.attr(node, "output_dtype", 0) == 0 and scale.dtype in FLOATS
    return (
        bool(blocked and plain and uses)
        and all(_is_weight(use.node, use.idx) for use in uses)
        and not value.is_graph_output()
        and all(array is not None for array in held)
        and (size or q.shape[0] % 16 == 0)
    )


def dynamic_quantize(ctx: Context, node: ir.Node) -> None:
    """uint8 y, scale and zero point of float32 x by its range, which holds 0 and leaves NaN out.

    scale = (max - min) / 255, 1 where that is 0; zero point = round(-min / scale) within 0..255.
    """
    x = ctx.dense(node, 0)
    if x.dtype != "float32":
        raise Unserved("no-kernel", what=x.dtype)
    y = ctx.output(node, 0, x.shape, "uint8")
    scale, zero = ctx.output(node, 1, (), "float32"), ctx.output(node, 2, (), "uint8")
    ctx.select(node, Range(x.size), {"x": x}, {"scale": scale, "zero": zero})
    if not x.size:
        return
    code = Code()
    value = code.step("Div", "float32", code.load(x), code.load(scale.expand(x.shape)))
    value = to_integer(code, value, "uint8", code.load(zero.expand(x.shape)))
    emit(ctx, code, node, value, y)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "QuantizeLinear"): quantize,
    ("", "DequantizeLinear"): dequantize,
    ("com.microsoft", "QuantizeLinear"): quantize,
    ("com.microsoft", "DequantizeLinear"): dequantize,
    ("", "DynamicQuantizeLinear"): dynamic_quantize,
}

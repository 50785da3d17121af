"""MatMulInteger, ConvInteger, QLinearMatMul and QLinearConv, as products of 8-bit integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import Code
from onnx_fuse.ir.build import required
from onnx_fuse.kernels.gemm_integer import BYTES, LINE
from onnx_fuse.lower import conv_nhwc, linear
from onnx_fuse.lower.channels_last import follow
from onnx_fuse.lower.context import Codes, Context, Lowering, Unserved, apply, copy, emit
from onnx_fuse.lower.conv import triple, window
from onnx_fuse.lower.matrices import factors, with_gaps
from onnx_fuse.lower.quant import to_integer
from onnx_fuse.lower.quantized import factors_of
from onnx_fuse.lower.views import reshaped
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.contractions import IntegerProduct
from onnx_fuse.program.problems import Conv


def _rows(ctx: Context, node: ir.Node, t: Tensor) -> Tensor:
    """`t` [..., rows, k] with k contiguous and everything else 16-byte aligned, copied if need be.

    A copy has no more elements than `t` has in memory; of a constant it is made once.
    """
    steps = [s for d, s in zip(t.shape[:-1], t.strides, strict=False) if d > 1]
    k = t.shape[-1]
    if (t.strides[-1] == 1 or k == 1) and not any(s % LINE for s in (*steps, t.offset)):
        return t
    core_shape = [1 if s == 0 else d for d, s in zip(t.shape, t.strides, strict=True)]
    line = -(-k // LINE) * LINE
    return with_gaps(ctx, node, t.first(core_shape), line, f"rows of {line}").expand(t.shape)


def _zero(ctx: Context, node: ir.Node, i: int) -> Tensor | None:
    """A zero point; None where it is absent or known to be zero."""
    if not ctx.has(node, i):
        return None
    values = ctx.host(node, i)
    return None if values is not None and not values.any() else ctx.dense(node, i)


def _step(t: Tensor, axis: int) -> int:
    return t.strides[axis] if t.shape[axis] > 1 else LINE * -(-t.shape[-1] // LINE)


def product(
    ctx: Context,
    node: ir.Node,
    a: Tensor,
    b: Tensor,
    za: Tensor | None,
    zb: Tensor | None,
    y: Tensor,
    za_step: int = 0,
) -> None:
    """y [..., m, n] = (a [..., m, k] - za) · (b [..., n, k] - zb)ᵀ, of two batch axes at most."""
    a, b = _rows(ctx, node, a), _rows(ctx, node, b)
    (*batch, m, k), n = a.shape, b.shape[-2]
    kinds = [("" if z is None else "one" if z.size == 1 else "each") for z in (za, zb)]
    problem = IntegerProduct(
        m=m, n=n, k=k, batch=tuple(batch), dtype=a.dtype, b_dtype=b.dtype, za=kinds[0],
        zb=kinds[1], za_step=za_step, lda=_step(a, -2), ldb=_step(b, -2),
        a_strides=a.strides[:-2], b_strides=b.strides[:-2],
    )  # fmt: skip
    reads = {"a": a, "b": b}
    reads |= {name: z for name, z in (("za", za), ("zb", zb)) if z is not None}
    ctx.select(node, problem, reads, {"y": y})


def _wide(ctx: Context, node: ir.Node, t: Tensor, zero: Tensor | None) -> Tensor:
    """t - zero in int32: `zero` broadcasts to it."""
    code = Code()
    value = code.step("Cast", "int32", code.load(t))
    if zero is not None:
        less = code.step("Cast", "int32", code.load(zero.expand(t.shape)))
        value = code.step("Sub", "int32", value, less)
    y = ctx.scratch("int32", t.shape)
    emit(ctx, code, node, value, y)
    return y


def _matmul(ctx: Context, node: ir.Node, places: tuple[int, int, int, int]) -> Tensor:
    """The int32 product of a and b with zero points."""
    ia, ib, iza, izb = places
    a, b, batch, shape = factors(ctx.view(node, ia), ctx.view(node, ib))
    if a.dtype not in BYTES or b.dtype not in BYTES:
        raise Unserved("no-kernel", what=f"{a.dtype} and {b.dtype}")
    za, zb = _zero(ctx, node, iza), _zero(ctx, node, izb)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"a matrix multiplication over {a.shape[-1]} and {b.shape[-2]}")
    (m, k), n = a.shape[-2:], b.shape[-1]
    y = ctx.scratch("int32", (*batch, m, n))
    if not y.size:
        return reshaped(ctx, y, shape)
    if k == 0:
        return ctx.constant(np.zeros((), np.int32)).expand(shape)
    rows = za is not None and za.size != 1
    columns = zb is not None and zb.size not in (1, n)
    wide = columns or (rows and bool(batch))
    if wide:
        # zero points of a's rows [m], or as many axes as a has; of b's columns [n], or likewise
        if za is not None and len(za.shape) == 1 and za.size != 1:
            za = reshaped(ctx, za, (za.size, 1))
        a, b = _wide(ctx, node, a, za), _wide(ctx, node, b, zb)
        a, b = a.expand((*batch, m, k)), b.expand((*batch, k, n))
        linear.product(ctx, node, a, b, y)
        return reshaped(ctx, y, shape)
    if (za is not None and rows and za.size != m) or (zb is not None and zb.size not in (1, n)):
        raise ValueError("zero points do not fit the rows and columns")
    turned = b.permute((*range(len(b.shape) - 2), len(b.shape) - 1, len(b.shape) - 2))
    a, turned = a.expand((*batch, m, k)), turned.expand((*batch, n, k))
    if all(s == 0 or d == 1 for d, s in zip(batch, turned.strides, strict=False)):
        a = reshaped(ctx, a, (prod(batch) * m, k))
        turned = replace(turned, shape=(n, k), strides=turned.strides[-2:])
        flat: tuple[int, ...] = (prod(batch) * m, n)
    else:
        count = prod(batch)
        a, turned = reshaped(ctx, a, (count, m, k)), reshaped(ctx, turned, (count, n, k))
        flat = (count, m, n)
    product(ctx, node, a, turned, za, zb, reshaped(ctx, y, flat))
    return reshaped(ctx, y, shape)


def matmul_integer(ctx: Context, node: ir.Node) -> None:
    """MatMulInteger: int32 of a, b and their zero points."""
    ctx.alias(node, 0, _matmul(ctx, node, (0, 1, 2, 3)))


Scales = tuple[int, int, int, int]  # inputs: of a, of b, of y, y's zero point


def _requantize(
    ctx: Context, node: ir.Node, total: Tensor, places: Scales, row: Callable[[Tensor], Tensor],
    bias: Tensor | None = None,
) -> None:  # fmt: skip
    """Output 0 = saturate(round((total + bias) (sa sb / sy)) + zero).

    `row` turns a vector with one number per channel into a view that broadcasts to `total`.
    """
    dtype = ctx.view(node, places[3]).dtype
    y = ctx.output(node, 0, total.shape, dtype)
    if not total.size:
        return
    code = Code()

    def number(i: int) -> Any:
        tensor = ctx.dense(node, i)
        return code.load((tensor if tensor.size == 1 else row(tensor)).expand(total.shape))

    def one(t: Tensor) -> Tensor:
        return reshaped(ctx, t, ())

    value = code.load(total)
    if bias is not None:
        value = code.step("Add", "int32", value, code.load(row(bias).expand(total.shape)))
    scales = [ctx.host(node, i) for i in places[:3]]
    if all(array is not None for array in scales):
        of_a, of_b, of_y = (np.asarray(array, np.float32).reshape(-1) for array in scales)
        with np.errstate(all="ignore"):
            factor = ctx.constant(of_a * of_b / of_y)
        scale = code.load((one(factor) if factor.size == 1 else row(factor)).expand(total.shape))
    else:
        sa, sb, sy = (code.step("Cast", "float32", number(i)) for i in places[:3])
        scale = code.step("Div", "float32", code.step("Scale", "float32", sa, sb), sy)
    value = code.step("Scale", "float32", code.step("Cast", "float32", value), scale)
    emit(ctx, code, node, to_integer(code, value, dtype, number(places[3])), y)


def qlinear_matmul(ctx: Context, node: ir.Node) -> None:
    """QLinearMatMul: a, sa, za, b, sb, zb, sy, zy; scales of a and y are one number each."""
    if any(ctx.view(node, i).size != 1 for i in (1, 6, 7)):
        raise Unserved("no-kernel", what="scales of a's or y's rows")
    if ctx.view(node, 7).dtype not in BYTES:
        raise Unserved("no-kernel", what=ctx.view(node, 7).dtype)
    total = _matmul(ctx, node, (0, 3, 2, 5))
    if ctx.view(node, 4).size not in (1, *total.shape[-1:]):
        raise ValueError("b's scales do not fit its columns")
    _requantize(ctx, node, total, (1, 4, 6, 7), lambda t: reshaped(ctx, t, (t.size,)))


def _convolution(ctx: Context, node: ir.Node, places: tuple[int, int, int, int]) -> Tensor:
    """The int32 convolution of x and w with zero points, [batch, channels, *sizes]."""
    ix, iw, izx, izw = places
    x, w = ctx.view(node, ix), ctx.view(node, iw)
    rank, groups = len(x.shape) - 2, int(ctx.attr(node, "group", 1))
    if x.dtype not in BYTES or w.dtype not in BYTES or not 1 <= rank <= 3:
        raise Unserved("no-kernel", what=f"{x.dtype} and {w.dtype} over {rank} axes")
    batch, channels = x.shape[:2]
    filters, each = w.shape[0] // groups, w.shape[1]
    if channels != each * groups or w.shape[0] % groups:
        raise ValueError(f"x has {channels} channels, {groups} groups of filters read {each} each")
    types = ctx.infer(node)
    shape = types[0] if types else None
    if shape is None:
        raise Unserved("no-kernel", what="an unknown shape")
    outer = (1,) * (3 - rank) + shape[1][2:]
    total = ctx.scratch("int32", (batch, groups, filters, prod(outer)))
    if not total.size:
        return reshaped(ctx, total, shape[1])
    zx, zw = _zero(ctx, node, izx), _zero(ctx, node, izw)
    if (zx is not None and zx.size != 1) or (zw is not None and zw.size not in (1, w.shape[0])):
        raise ValueError("the zero points do not fit x, or the filters")
    taps = window(ctx, node, w.shape[2:], x.shape[2:], shape[1][2:])
    if min(taps.before) < 0:
        raise Unserved("no-kernel", what="an auto_pad that cuts the image")
    lead = (1,) * (3 - rank)
    x, w = reshaped(ctx, x, (batch, channels, *lead, *x.shape[2:])), ctx.contiguous(w)
    # channels last, so that a tap's are neighbours, and the border is the zero point
    last = x.permute((0, 2, 3, 4, 1))
    if any((*taps.before, *taps.after)):
        sizes = [d + p + q for d, p, q in zip(x.shape[2:], taps.before, taps.after, strict=True)]
        around = ctx.scratch(x.dtype, (batch, *sizes, channels))
        apply(ctx, node, around, "", 0 if zx is None else reshaped(ctx, zx, ()))
        copy(ctx, node, last, around.slice((0, *taps.before, 0), (1,) * 5, last.shape))
        last = around
    elif any(d > 1 for d in taps.kernel) or any(s > 1 for s in taps.strides) or groups > 1:
        last = ctx.contiguous(last)
    depth = prod(taps.kernel) * each
    split = reshaped(ctx, last, (*last.shape[:4], groups, each))
    n, d, h, v, g, c = split.strides
    step = [s * k for s, k in zip((d, h, v), taps.strides, strict=True)]
    reach = [s * k for s, k in zip((d, h, v), taps.dilations, strict=True)]
    windows = replace(
        split, shape=(batch, groups, *outer, *taps.kernel, each), strides=(n, g, *step, *reach, c)
    )
    lines = ctx.scratch(x.dtype, (batch, groups, prod(outer), -(-depth // LINE) * LINE))
    columns = lines.first((*lines.shape[:-1], depth))
    copy(ctx, node, windows, columns.view(windows.shape))
    turned = w.view((groups, filters, each, *taps.kernel)).permute((0, 1, 3, 4, 5, 2))
    packed = ctx.packed(turned, "channels last", lambda array: array)
    rows = reshaped(ctx, turned if packed is None else packed, (1, groups, filters, depth))
    a = rows.expand((batch, groups, filters, depth))
    step_of_zeros = filters if zw is not None and zw.size > 1 else 0
    product(ctx, node, a, columns, zw, zx, total, step_of_zeros)
    return reshaped(ctx, total, shape[1])


def conv_integer(ctx: Context, node: ir.Node) -> None:
    """ConvInteger: int32 of x, w and their zero points."""
    ctx.alias(node, 0, _convolution(ctx, node, (0, 1, 2, 3)))


def _at_once(ctx: Context, node: ir.Node) -> bool:
    """Whether a QLinearConv whose parameters nothing writes to is one call, without windows."""
    x, w = ctx.view(node, 0), ctx.view(node, 3)
    numbers = [ctx.known(ctx.view(node, i)) if ctx.has(node, i) else None for i in range(9)]
    held = [n for n in numbers[1:3] + numbers[4:8] if n is not None]
    types = ctx.infer(node)
    if len(held) < 6 or x.dtype not in BYTES or types is None or types[0] is None:
        return False
    if ctx.hw.cc < 80 or not 1 <= len(x.shape) - 2 <= 3 or not prod(types[0][1]):
        return False
    sx, zx, sw, zw, sy, zy = (n.reshape(-1) for n in held)
    (dtype, shape), groups = types[0], int(ctx.attr(node, "group", 1))
    taps = window(ctx, node, w.shape[2:], x.shape[2:], shape[2:])
    problem = Conv(
        shape[0], groups, x.shape[1] // groups, shape[1] // groups, triple(x.shape[2:]),
        triple(shape[2:]), taps, "float32",
    )  # fmt: skip
    if min(taps.before) < 0 or not conv_nhwc.takes_integers(problem):
        return False
    left = Codes(x, x, sx, zx.astype(np.int32), None)
    axis = 0 if max(sw.size, zw.size) > 1 else None
    ones = np.ones(w.shape[0] if axis == 0 else 1, np.float32)
    right = Codes(w, w, ones * sw, (ones * zw).astype(np.int32), axis)
    both, bias = factors_of(ctx, left, right), numbers[8]
    shift = None if both is None else ctx.known(both.shift)
    if both is None or shift is None or (ctx.has(node, 8) and bias is None):
        return False
    filters = np.ones(shape[1], np.float32)
    scale = filters * (sx * sw / sy)
    more = shift if bias is None else (shift.astype(np.int64) + bias).astype(np.int32)
    both = replace(both, shift=ctx.constant(more), scale=ctx.constant(scale))
    sums = ctx.output(node, 0, shape, "float32")
    try:
        conv_nhwc.integers(ctx, node, problem, both, {}, sums)
    except Unserved:
        return False
    value = required(ctx.slots[node.outputs[0]].tensor)
    y, code = follow(ctx, node, ctx.output(node, 0, shape, dtype), [value]), Code()
    zero = code.scalar(zy[0], dtype)
    emit(ctx, code, node, to_integer(code, code.load(value), dtype, zero), y)
    return True


def qlinear_conv(ctx: Context, node: ir.Node) -> None:
    """QLinearConv: x, sx, zx, w, sw, zw, sy, zy, bias (int32)."""
    if any(ctx.view(node, i).size != 1 for i in (1, 6, 7)):
        raise Unserved("no-kernel", what="several scales of x or y")
    if _at_once(ctx, node):
        return
    total = _convolution(ctx, node, (0, 3, 2, 5))

    def channel(t: Tensor) -> Tensor:
        return reshaped(ctx, t, (t.size, *(1,) * (len(total.shape) - 2)))

    bias = ctx.dense(node, 8) if ctx.has(node, 8) else None
    _requantize(ctx, node, total, (1, 4, 6, 7), channel, bias)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "MatMulInteger"): matmul_integer,
    ("", "QLinearMatMul"): qlinear_matmul,
    ("", "ConvInteger"): conv_integer,
    ("", "QLinearConv"): qlinear_conv,
}

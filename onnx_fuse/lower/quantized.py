"""Convolutions and products between DequantizeLinear and QuantizeLinear, in codes of 8 bits.

x = (q - zx) sx and w = (p - zw) sw give x * w = sx sw (Σ q (p - zw) - zx Σ (p - zw)): the sums are
exact in int32, and one number a filter, its scale, makes them floats. What is quantized again
behind it is part of the same call, as a tail. Codes of float8 have no zero points; their sums are
floats.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import Code, cast_step
from onnx_fuse.ir.build import required
from onnx_fuse.kernels.gemm_integer import LINE
from onnx_fuse.lower.context import Codes, Context, apply, emit
from onnx_fuse.lower.quant import E4M3, codes, scalars
from onnx_fuse.ops.activations import BY_KEY
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.problems import IntegerConv, Window

LARGEST = 2**31 // (255 * 255)
"""The products that int32 always holds the sum of."""
ONE_TAP = Window((1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), (0, 0, 0))


@dataclass(frozen=True)
class IntegerOperands:
    """Both operands of a product in integers: x of one scale, filters of one each or one for all.

    "weight" is int8 [filters, ...] less its zero points, or float8; "shift", which is read only
    where x has a zero point, and "scale" are rows of filters.
    """

    x: Tensor
    zero: int
    weight: Tensor
    shift: Tensor
    scale: Tensor


def factors(ctx: Context, node: ir.Node, order: tuple[int, ...] = ()) -> IntegerOperands | None:
    """The operands of a Conv or of a product, if both are dequantized and int32 holds the sums.

    `order` are the axes of the weight with those of filters first, for a product.
    """
    x, w = codes(ctx, node, 0), codes(ctx, node, 1)
    return None if x is None or w is None else factors_of(ctx, x, w, order)


def factors_of(
    ctx: Context, x: Codes, w: Codes, order: tuple[int, ...] = ()
) -> IntegerOperands | None:
    """The operands of a product of those codes, as of `factors`."""
    if x.axis is not None:
        return None
    weight = w.q.permute(order) if order else w.q
    first = order[0] if order else 0
    floats = E4M3 in (x.q.dtype, w.q.dtype)
    if floats and x.q.dtype != w.q.dtype:
        return None
    if w.axis not in (None, first) or (not floats and weight.size // weight.shape[0] > LARGEST):
        return None
    with np.errstate(all="ignore"):
        scale = x.scale * w.scale
        # the sums of floats that these stand for neither overflow nor vanish
        regular = np.abs(scale) < np.finfo(np.float32).max / 2**31
        regular &= np.abs(scale) >= np.finfo(np.float32).tiny
    array = ctx.known(weight)
    if array is None or not regular.all():
        return None
    filters = weight.shape[0]
    row = ctx.constant(np.ascontiguousarray(np.broadcast_to(scale, (filters,))))
    if floats:
        packed = required(ctx.packed(weight, "filters first", lambda values: values))
        return IntegerOperands(x.q, 0, packed, row, row)
    zero = w.zero.reshape(-1, *[1] * (len(weight.shape) - 1))
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
        required(ctx.packed(weight, f"{name} {digest}", make))
        for name, make in (("less zero points", signed), ("shift of sums", shifts))
    )
    return IntegerOperands(x.q, int(x.zero[0]), less, shift, row)


def _next_scale(ctx: Context, node: ir.Node) -> np.float32 | None:
    """The scale, one number, by which the one reader of what the node gives quantizes it; a Relu
    may lie between. None where it is read otherwise.
    """
    reader = node
    while reader is node or (reader.op_type, reader.domain) == ("Relu", ""):
        y = reader.outputs[0]
        uses = [] if y.is_graph_output() else list(y.uses())
        if len(uses) != 1 or uses[0].idx or uses[0].node.graph is not node.graph:
            return None
        reader = uses[0].node
    if (reader.op_type, reader.domain) != ("QuantizeLinear", "") or ctx.attr(
        reader, "precision", 0
    ):
        return None
    numbers = scalars(ctx, reader)
    return None if numbers is None else numbers[0]


def _fits(row: np.ndarray | None, step: np.float32) -> bool:
    """Whether sums that the row multiplies, or is added to, are finite in steps, too."""
    with np.errstate(all="ignore"):
        return row is not None and bool(
            (np.abs(row / step) < np.finfo(np.float32).max / 2**32).all()
        )


def convolution(
    ctx: Context,
    node: ir.Node,
    problem: IntegerConv,
    both: IntegerOperands,
    reads: Mapping[str, Tensor],
    y: Tensor,
    act: tuple[str, float] = ("", 0.0),
) -> None:
    """y = act(scale (x * weight + shift) + bias); `reads` are x, weight and perhaps a bias.

    y is laid out as the problem has it. What is quantized next is counted in its steps, so that
    nothing is divided by its scale.
    """
    filters = problem.groups * problem.filters
    bias = reads.get("bias")
    if bias is None:
        bias = ctx.constant(np.zeros(filters, np.float32))
    elif bias.dtype != "float32":
        wide = ctx.packed(bias, "float32", lambda array: array.astype(np.float32))
        if wide is None:
            wide = ctx.scratch("float32", bias.shape)
            apply(ctx, node, wide, "Cast", bias)
        bias = wide
    name, alpha = act
    scale, step = both.scale, _next_scale(ctx, node) if name in ("", "relu") else None
    rows = [ctx.known(row) for row in (bias, scale)]
    if step is not None and all(_fits(row, step) for row in rows):
        bias, scale = (
            required(ctx.packed(row, f"in steps of {step!r}", lambda values: values / step))
            for row in (bias, scale)
        )
    else:
        step = None
    operands = {**reads, "bias": bias, "scale": scale}
    if more := problem.columns - filters:
        operands["weight"] = required(
            ctx.packed(
                reads["weight"], f"and {more} filters of zeros",
                lambda w: np.pad(w.reshape(filters, -1), ((0, more), (0, 0))),
            )
        )  # fmt: skip
    operands |= {"shift": both.shift} if problem.border else {}
    plain = y.dtype == "float32" and not name and step is None
    sums = y if plain else ctx.scratch("float32", y.shape)
    ctx.select(node, problem, operands, {"y": sums})
    if plain:
        return
    code = Code()
    value = code.load(sums)
    if name:
        row = BY_KEY[name]
        numbers = [number for _, number in row.numbers]
        numbers[: bool(row.attributes)] = [alpha] * bool(row.attributes)
        scalars = [code.scalar(number, "float32") for number in numbers]
        value = code.step(row.name, "float32", value, *scalars)
    if step is not None:
        value = code.step("Scale", "float32", value, code.scalar(step, "float32"))
    if y.dtype != "float32":
        value = code.step(cast_step(y.dtype), y.dtype, value)
    emit(ctx, code, node, value, y)


def product(
    ctx: Context,
    node: ir.Node,
    y: Tensor,
    bias: Tensor | None = None,
    act: tuple[str, float] = ("", 0.0),
    turned: bool = False,
) -> bool:
    """Whether y [..., n] = act(x · w + bias) is computed of the codes of x [..., k] and w [k, n].

    `turned`: w is [n, k]. Nothing is done where the answer is no.
    """
    weight = ctx.view(node, 1)
    if len(weight.shape) != 2 or not y.size or len(y.shape) < 2 or ctx.hw.cc < 80:
        return False
    both = factors(ctx, node, () if turned else (1, 0))
    if both is None or both.x.shape[-1] % LINE or both.x.shape[:-1] != y.shape[:-1]:
        return False
    k, n = both.x.shape[-1], y.shape[-1]
    rows = (1, 1, prod(y.shape[:-1]))
    problem = IntegerConv(1, 1, k, n, rows, rows, ONE_TAP, both.x.dtype, both.zero)
    if both.weight.shape != (n, k) or not ctx.serves(problem):
        return False
    reads = {"x": ctx.contiguous(both.x), "weight": ctx.contiguous(both.weight)}
    reads |= {"bias": bias} if bias is not None else {}
    convolution(ctx, node, problem, both, reads, y, act)
    return True

"""Random ops: Philox over a seed and a draw counter in device memory."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import FLOATS, Code, dtype_name
from onnx_fuse.lower.context import Context, Lowering, Unserved, apply, emit
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.data_movement import Random

UNIFORM, NORMAL, BERNOULLI, DROPOUT = range(4)


def fill(
    ctx: Context,
    node: ir.Node,
    y: Tensor,
    kind: int,
    a: float = 0.0,
    b: float = 1.0,
    x: Tensor | None = None,
) -> None:
    """y by `kind`; a node's `seed` fixes its numbers, else they differ from run to run."""
    seed = ctx.attr(node, "seed")
    bits = int(np.float32(seed or 0.0).view(np.uint32))
    state, stream = ctx.random()
    problem = Random(
        kind, y.size, stream, y.dtype, x.dtype if x is not None else "float32", a, b,
        seed is not None, bits,
    )  # fmt: skip
    ctx.select(node, problem, {"state": state} | ({"x": x} if x is not None else {}), {"y": y})


def _dtype(ctx: Context, node: ir.Node, default: str) -> str:
    number = ctx.attr(node, "dtype")
    return default if number is None else dtype_name(ir.DataType(number))


def draw(ctx: Context, node: ir.Node) -> None:
    """RandomUniform, RandomNormal, RandomUniformLike and RandomNormalLike."""
    like = node.op_type.endswith("Like")
    shape = ctx.view(node, 0).shape if like else tuple(ctx.attr(node, "shape"))
    dtype = _dtype(ctx, node, ctx.view(node, 0).dtype if like else "float32")
    if dtype not in FLOATS:
        raise Unserved("no-kernel", what=f"random numbers of {dtype}")
    y = ctx.output(node, 0, shape, dtype)
    if "Normal" in node.op_type:
        fill(ctx, node, y, NORMAL, ctx.attr(node, "mean", 0.0), ctx.attr(node, "scale", 1.0))
    else:
        fill(ctx, node, y, UNIFORM, ctx.attr(node, "low", 0.0), ctx.attr(node, "high", 1.0))


def bernoulli(ctx: Context, node: ir.Node) -> None:
    """1 with probability x[i]."""
    x = ctx.dense(node, 0)
    dtype = _dtype(ctx, node, x.dtype)
    drawn = dtype if dtype in (*FLOATS, "bool") else "float32"
    y = ctx.output(node, 0, x.shape, dtype) if drawn == dtype else ctx.scratch(drawn, x.shape)
    fill(ctx, node, y, BERNOULLI, x=x)
    if drawn != dtype:
        apply(ctx, node, ctx.output(node, 0, x.shape, dtype), "Cast", y)


def dropout(ctx: Context, node: ir.Node) -> None:
    """y = x scale, mask = scale > 0; scale = 1 / (1 - ratio) where kept. Outside training y = x."""
    x = ctx.view(node, 0)
    training = ctx.host(node, 2) if ctx.has(node, 2) else np.zeros((), bool)
    ratio = ctx.host(node, 1) if ctx.has(node, 1) else np.array(0.5)
    if training is None or (training.any() and ratio is None):
        raise Unserved("unknown", what="its ratio, or whether it trains")
    share = float(ratio.reshape(-1)[0]) if ratio is not None else 0.0
    if not training.any() or share == 0:
        ctx.alias(node, 0, x)
        if ctx.wants(node, 1):
            ctx.alias(node, 1, ctx.constant(np.ones((), bool)).expand(x.shape))
        return
    scale = ctx.scratch("float32", x.shape)
    growth = 1 / (1 - share) if share < 1 else 0.0
    fill(ctx, node, scale, DROPOUT, growth, share)
    code = Code()
    factor = code.load(scale)
    if x.dtype == "float64":  # float32 has too few digits for its scale
        nonzero = code.step("Greater", "bool", factor, code.scalar(0, "float32"))
        numbers = (code.scalar(value, x.dtype) for value in (growth, 0))
        factor = code.step("Where", x.dtype, nonzero, *numbers)
    y = ctx.output(node, 0, x.shape, x.dtype)
    emit(ctx, code, node, code.step("Mul", x.dtype, code.load(x), factor), y)
    if ctx.wants(node, 1):
        apply(ctx, node, ctx.output(node, 1, x.shape, "bool"), "Greater", scale, 0)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "RandomNormal"): draw,
    ("", "RandomNormalLike"): draw,
    ("", "RandomUniform"): draw,
    ("", "RandomUniformLike"): draw,
    ("", "Bernoulli"): bernoulli,
    ("", "Dropout"): dropout,
}

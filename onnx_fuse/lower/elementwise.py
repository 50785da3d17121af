"""Operators that work element by element, and Range: each becomes an expression of `pointwise`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import (
    ATTRIBUTES,
    COMPARES,
    FLOATS,
    LARGEST,
    STORAGE,
    TABLE,
    Code,
    Ref,
    cast_step,
    dtype_name,
    rounded,
)
from onnx_fuse.ir.build import required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.channels_last import follow
from onnx_fuse.lower.context import Context, Lowering, Unserved, broadcast, emit, operand
from onnx_fuse.ops.activations import ACTIVATIONS
from onnx_fuse.program import size as sizes


def _store(
    ctx: Context, code: Code, node: ir.Node, value: Ref, shape: Sequence[int], dtype: str
) -> None:
    """Make output 0 of a value, channels last where its largest operand is so."""
    y = follow(ctx, node, ctx.output(node, 0, shape, dtype), code.reads)
    emit(ctx, code, node, value, y)


def _simple(name: str) -> Lowering:
    def lower(ctx: Context, node: ir.Node) -> None:
        code, shape = Code(), broadcast(ctx, node)
        args, dtypes = [], []
        for i in range(len(node.inputs)):
            arg, dtype = operand(ctx, code, node, i, shape)
            args.append(arg)
            dtypes.append(dtype)
        dtype = dtypes[1] if name == "Where" else dtypes[0]
        step = name
        if name == "Mod" and ctx.attr(node, "fmod", 0):
            step = "FMod"
        if name == "Gelu" and ctx.attr(node, "approximate", "none") == "tanh":
            step = "GeluTanh"
        if name == "BitShift":
            step = "ShiftLeft" if ctx.attr(node, "direction") == "LEFT" else "ShiftRight"
        if name == "Pow":
            power = ctx.host(node, 1)
            e = float(power.reshape(-1)[0]) if power is not None and power.size == 1 else None
            if e in (2.0, 0.5) and dtype in FLOATS:
                code, step = Code(), "Square" if e == 2 else "Sqrt"
                args = [operand(ctx, code, node, 0, shape)[0]]
            elif dtypes[1] != dtype or dtype not in FLOATS:
                # onnxruntime (1.32) raises integers in double, then truncates
                inner = "float64" if dtype not in FLOATS else dtype
                args = [code.step("Cast", inner, a) for a in args]
                raised = code.step("Pow", inner, *args)
                _store(ctx, code, node, code.step("Cast", dtype, raised), shape, dtype)
                return
        if name == "Sign" and dtype in ("float16", "bfloat16"):  # onnxruntime's of a NaN is 0 there
            zero = code.scalar(0.0, dtype)
            sides = [code.step(side, "bool", *args, zero) for side in ("Greater", "Less")]
            step, args = "Sub", [code.step("Cast", dtype, side) for side in sides]
        for attribute, default in ATTRIBUTES.get(name, ()):
            value = ctx.attr(node, attribute, default)
            args.append(code.scalar(value, dtype if name != "IsInf" else "int32"))
        result = "bool" if name in COMPARES else dtype
        _store(ctx, code, node, code.step(step, result, *args), shape, result)

    return lower


def _fold(name: str) -> Lowering:
    """Max, Min, Sum, Mean of any number of inputs."""

    def lower(ctx: Context, node: ir.Node) -> None:
        code, shape = Code(), broadcast(ctx, node)
        value, dtype = operand(ctx, code, node, 0, shape)
        step = "Add" if name in ("Sum", "Mean") else name
        for i in range(1, len(node.inputs)):
            value = code.step(step, dtype, value, operand(ctx, code, node, i, shape)[0])
        if name == "Mean":
            value = code.step("Div", dtype, value, code.scalar(len(node.inputs), dtype))
        _store(ctx, code, node, value, shape, dtype)

    return lower


_plain_where = _simple("Where")


def relu_of(ctx: Context, node: ir.Node) -> ir.Node | None:
    """The Relu whose gradient this Where computes, if nothing else reads its mask."""
    if node.op_type != "Where" or node.domain or node.inputs[0] is None:
        return None
    mask = node.inputs[0].producer()
    y = mask.inputs[0] if mask is not None and mask.op_type == "Greater" else None
    relu = y.producer() if y is not None else None
    if mask is None or relu is None or relu.op_type != "Relu" or relu.domain:
        return None
    zeros = [ctx.host(mask, 1), ctx.host(node, 2)]
    if len(mask.outputs[0].uses()) > 1 or ctx.host(node, 0) is not None:
        return None
    return relu if all(z is not None and z.size == 1 and not z.any() for z in zeros) else None


def where(ctx: Context, node: ir.Node) -> None:
    """Lower Where; the mask of a Relu's gradient is computed there, from the Relu's result.

    The gradient of the next layer keeps that result anyway. A mask computed in the forward pass
    would keep the Relu out of the epilogue of the kernel before it.
    """
    if relu_of(ctx, node) is None:
        return _plain_where(ctx, node)
    mask = required(required(node.inputs[0]).producer())
    code, shape = Code(), broadcast(ctx, node)
    args = [operand(ctx, code, mask, i, shape)[0] for i in range(2)]
    condition = code.step("Greater", "bool", *args)
    (a, dtype), (b, _) = (operand(ctx, code, node, i, shape) for i in (1, 2))
    _store(ctx, code, node, code.step("Where", dtype, condition, a, b), shape, dtype)


def clip(ctx: Context, node: ir.Node) -> None:
    """y = min(max, max(min, x)); onnxruntime takes the largest number for an absent bound."""
    x = ctx.view(node, 0)
    code = Code()
    value = code.load(x)
    for i, step, sign in ((1, "ClipMin", -1), (2, "ClipMax", 1)):
        if ctx.has(node, i):
            bound, _ = operand(ctx, code, node, i, x.shape)
        elif x.dtype in FLOATS:
            limits: Any = ml_dtypes.finfo
            bound = code.scalar(sign * float(limits(x.dtype).max), x.dtype)
        else:
            continue
        value = code.step(step, x.dtype, value, bound)
    _store(ctx, code, node, value, x.shape, x.dtype)


def cast(ctx: Context, node: ir.Node) -> None:
    """Lower Cast or CastLike."""
    x = ctx.view(node, 0)
    if node.op_type == "Cast":
        dtype = dtype_name(ir.DataType(ctx.attr(node, "to")))
    else:
        like = ctx.host(node, 1)
        dtype = like.dtype.name if like is not None else ctx.view(node, 1).dtype
    if dtype not in STORAGE or x.dtype not in STORAGE:
        raise Unserved("no-kernel", what=f"a cast from {x.dtype} to {dtype}")
    if dtype == x.dtype:
        ctx.alias(node, 0, x)
        return
    if dtype == "float8_e8m0fnu":
        raise Unserved("no-kernel", what=f"a cast to {dtype}")
    code = Code()
    value = code.load(x)
    if dtype in LARGEST:
        value = rounded(code, value, dtype, bool(ctx.attr(node, "saturate", 1)))
    else:
        value = code.step(cast_step(dtype), dtype, value)
    emit(ctx, code, node, value, ctx.output(node, 0, x.shape, dtype))


def identity(ctx: Context, node: ir.Node) -> None:
    """Identity and Dropout's first output outside training."""
    ctx.alias(node, 0, ctx.view(node, 0))


def range_(ctx: Context, node: ir.Node) -> None:
    """start + i delta; all three known at lowering, or the length would depend on data."""
    start, limit, delta = (ctx.given(node, i).reshape(-1)[0] for i in range(3))
    if any(isinstance(v, sizes.OpenSize) for v in (start, limit, delta)):
        dtype, step = "int64", int(delta)
        n = -((start - limit) // step)
        n = n if n > 0 else 0
    elif np.issubdtype(start.dtype, np.integer):
        dtype, n = start.dtype.name, len(range(int(start), int(limit), int(delta)))
    else:
        dtype = start.dtype.name
        n = max(int(np.ceil((float(limit) - float(start)) / float(delta))), 0)
    code = Code()
    i = code.step("Cast", dtype, code.step("Iota", "int64"))
    scaled = code.step("Mul", dtype, i, code.scalar(delta, dtype))
    y = ctx.output(node, 0, (n,), dtype)
    emit(ctx, code, node, code.step("Add", dtype, scaled, code.scalar(start, dtype)), y)


_FOLDS = ("Max", "Min", "Sum", "Mean")
_OTHER = ("Identity", "Iota", "Cast", "ClipMin", "ClipMax", "Square", "GeluTanh", "FMod",
          "Saturate", "Scale", "Steps", "Quantize", "Code", *_FOLDS)  # fmt: skip
LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", name): _simple(name)
    for name in (*TABLE, "BitShift")
    if name not in _OTHER and not name.startswith(("CastF", "CastB", "Castf", "Shift"))
} | {
    **{("", name): _fold(name) for name in _FOLDS},
    ("", "Identity"): identity,
    ("", "Cast"): cast,
    ("", "CastLike"): cast,
    ("", "Clip"): clip,
    ("", "Where"): where,
    ("", "Range"): range_,
}
for _row in ACTIVATIONS.values():
    if _row.domain == FUSE:
        LOWERINGS[FUSE, _row.op_type] = LOWERINGS.pop(("", _row.op_type))

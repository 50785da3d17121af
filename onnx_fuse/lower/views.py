"""Ops that move elements and compute nothing: views where strides will do, else strided copies."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import cast_step, dtype_name
from onnx_fuse.ir.build import required
from onnx_fuse.ir.evaluate import TO_THE_END
from onnx_fuse.lower.channels_last import follow
from onnx_fuse.lower.context import Context, Lowering, Unserved, apply, copy
from onnx_fuse.program import size as sizes
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.problem import ITEMSIZE


def _ints(array: np.ndarray) -> list[int]:
    return [sizes.number(v) for v in array.reshape(-1)]


def reshaped(ctx: Context, tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """`tensor` under another shape, copied only where its strides forbid a view."""
    view = tensor.reshape(shape)
    return ctx.contiguous(tensor).view(shape) if view is None else view


def reshape(ctx: Context, node: ir.Node) -> None:
    x, shape = ctx.view(node, 0), _ints(ctx.given(node, 1))
    if not ctx.attr(node, "allowzero", 0):
        shape = [x.shape[k] if d == 0 else d for k, d in enumerate(shape)]
    held, rest = x.size, prod(d for d in shape if d != -1)
    if not rest:  # onnxruntime divides the sizes that are not 0
        held, rest = (prod(d for d in each if d > 0) for each in (x.shape, shape))
    if -1 in shape and not held % rest:
        shape[shape.index(-1)] = held // rest
    if -1 in shape or prod(shape) != x.size:
        raise ValueError(f"it has {x.size} elements, {shape} {prod(shape)}")
    ctx.alias(node, 0, reshaped(ctx, x, shape))


def squeeze(ctx: Context, node: ir.Node) -> None:
    x = ctx.view(node, 0)
    axes = [a % len(x.shape) for a in _ints(ctx.given(node, 1))] if ctx.has(node, 1) else []
    if not axes:  # onnxruntime takes an empty list for none
        axes = [k for k, d in enumerate(x.shape) if d == 1]
    remaining = [k for k in range(len(x.shape)) if k not in axes]
    shape, strides = tuple(x.shape[k] for k in remaining), tuple(x.strides[k] for k in remaining)
    ctx.alias(node, 0, Tensor(x.buffer, x.dtype, shape, strides, x.offset))


def unsqueeze(ctx: Context, node: ir.Node) -> None:
    x, axes = ctx.view(node, 0), _ints(ctx.given(node, 1))
    rank = len(x.shape) + len(axes)
    new = {a % rank for a in axes}
    old = iter(zip(x.shape, x.strides, strict=True))
    pairs = [(1, 0) if k in new else next(old) for k in range(rank)]
    shape, strides = tuple(d for d, _ in pairs), tuple(s for _, s in pairs)
    ctx.alias(node, 0, Tensor(x.buffer, x.dtype, shape, strides, x.offset))


def flatten(ctx: Context, node: ir.Node) -> None:
    x, axis = ctx.view(node, 0), ctx.attr(node, "axis", 1)
    axis = axis + len(x.shape) if axis < 0 else axis
    rows = prod(x.shape[:axis])
    ctx.alias(node, 0, reshaped(ctx, x, (rows, prod(x.shape[axis:]))))


def transpose(ctx: Context, node: ir.Node) -> None:
    x = ctx.view(node, 0)
    perm = ctx.attr(node, "perm") or list(reversed(range(len(x.shape))))
    ctx.alias(node, 0, x.permute(perm))


def expand(ctx: Context, node: ir.Node) -> None:
    x = ctx.view(node, 0)
    ctx.alias(node, 0, x.expand(sizes.broadcast(x.shape, _ints(ctx.given(node, 1)))))


def _part(begin: int, end: int, step: int, size: int) -> tuple[int, int]:
    """The first element of x[begin:end:step] on an axis of `size`, and their number."""
    if step < 0:
        length = int(size)
        first, last = (int(v) + length if v < 0 else int(v) for v in (begin, end))
        first = min(max(first, 0), length - 1)
        last = -1 if int(end) in TO_THE_END else min(max(last, -1), length - 1)
        return max(first, 0), len(range(first, last, step))
    begin, end = (v + size if v < 0 else v for v in (begin, end))
    begin, end = (0 if v < 0 else size if v > size else v for v in (begin, end))
    return begin, -((begin - end) // step) if end > begin else 0


_FAR = 2**31 - 1
"""A step beyond any axis: strides of a larger one, such as the lowest int64, have no 64 bits."""


def slice_(ctx: Context, node: ir.Node) -> None:
    x = ctx.view(node, 0)
    bounds = [_ints(ctx.given(node, i)) if ctx.has(node, i) else None for i in range(1, 5)]
    begin, end = required(bounds[0]), required(bounds[1])
    axes, strides = bounds[2] or list(range(len(begin))), bounds[3] or [1] * len(begin)
    starts, steps, shape = [0] * len(x.shape), [1] * len(x.shape), list(x.shape)
    for a, b, e, step in zip(axes, begin, end, strides, strict=True):
        axis = a % len(x.shape)
        steps[axis] = min(max(step, -_FAR), _FAR)
        starts[axis], shape[axis] = _part(b, e, step, x.shape[axis])
    ctx.alias(node, 0, x.slice(starts, steps, shape))


def split(ctx: Context, node: ir.Node) -> None:
    x = ctx.view(node, 0)
    axis, count = ctx.attr(node, "axis", 0) % len(x.shape), len(node.outputs)
    if ctx.has(node, 1):
        sizes = _ints(ctx.given(node, 1))
        if sum(sizes) != x.shape[axis]:
            raise ctx.fault(node, f"its parts have {sum(sizes)} elements along axis {axis}")
    else:
        each = -(-x.shape[axis] // count)
        sizes = [min(each, x.shape[axis] - i * each) for i in range(count)]
    start = 0
    for i, size in enumerate(sizes):
        ctx.alias(node, i, x.part(axis, start, size))
        start += size


def _adjacent(parts: Sequence[Tensor], axis: int, shape: Sequence[int]) -> Tensor | None:
    """The dense tensor whose consecutive slices along `axis` are the parts, or None.

    A gradient that is joined from parts is such a tensor where its kernel wrote the parts in place.
    Parts of one element along the axis may stand any distance apart.
    """
    first, *others = parts
    strides = list(first.strides)
    if others and first.shape[axis] == 1:
        strides[axis] = others[0].offset - first.offset
    at = first.offset
    for part in parts:
        steps = zip(part.shape, part.strides, strides, strict=True)
        if part.buffer != first.buffer or part.dtype != first.dtype or part.offset != at:
            return None
        if any(size != 1 and step != expected for size, step, expected in steps):
            return None
        at += part.shape[axis] * strides[axis]
    whole = Tensor(first.buffer, first.dtype, tuple(shape), tuple(strides), first.offset)
    order = sorted(range(len(shape)), key=lambda k: -strides[k])
    return whole if whole.permute(order).dense else None


def concat(ctx: Context, node: ir.Node) -> None:
    parts = [ctx.view(node, i) for i in range(len(node.inputs))]
    axis = ctx.attr(node, "axis") % len(parts[0].shape)
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    if (there := _adjacent(parts, axis, shape)) is not None:
        ctx.alias(node, 0, there)
        return
    y = ctx.output(node, 0, shape, parts[0].dtype)
    y = follow(ctx, node, y, parts)
    start = 0
    for part in parts:
        if part.size:
            copy(ctx, node, part, y.part(axis, start, part.shape[axis]))
        start += part.shape[axis]


def tile(ctx: Context, node: ir.Node) -> None:
    x, times = ctx.view(node, 0), _ints(ctx.given(node, 1))
    shape, strides = [], []
    for d, s, n in zip(x.shape, x.strides, times, strict=True):
        shape += [n, d]
        strides += [0, s]
    wide = Tensor(x.buffer, x.dtype, tuple(shape), tuple(strides), x.offset)
    final = [d * n for d, n in zip(x.shape, times, strict=True)]
    ctx.alias(node, 0, reshaped(ctx, wide, final))


def pad(ctx: Context, node: ir.Node) -> None:
    """mode constant: fill, then copy the inside (negative pads crop); others: reflected copies."""
    x, widths = ctx.view(node, 0), _ints(ctx.given(node, 1))
    rank, mode = len(x.shape), ctx.attr(node, "mode", "constant")
    axes = [a % rank for a in _ints(ctx.given(node, 3))] if ctx.has(node, 3) else list(range(rank))
    before, after = [0] * rank, [0] * rank
    for k, axis in enumerate(axes):
        before[axis], after[axis] = widths[k], widths[k + len(axes)]
    shape = [d + b + a for d, b, a in zip(x.shape, before, after, strict=True)]
    if mode != "constant":
        return _pad_axes(ctx, node, x, before, after, mode)
    y = follow(ctx, node, ctx.output(node, 0, shape, x.dtype), [x])
    fill: Tensor | float = 0
    if ctx.has(node, 2):
        value = ctx.host(node, 2)
        fill = ctx.view(node, 2).view(()) if value is None else value.reshape(-1)[0]
    inside = [
        slice(max(-b, 0), d + min(a, 0)) for d, b, a in zip(x.shape, before, after, strict=True)
    ]
    starts = [s.start for s in inside]
    inner_shape = [max(s.stop - s.start, 0) for s in inside]
    if inner_shape != shape:
        apply(ctx, node, y, "", fill)
    if all(inner_shape):
        source = x.slice(starts, [1] * rank, inner_shape)
        copy(ctx, node, source, y.slice([max(b, 0) for b in before], [1] * rank, inner_shape))


def _pad_axes(
    ctx: Context, node: ir.Node, x: Tensor, before: list[int], after: list[int], mode: str
) -> None:
    """edge, reflect, wrap: axis by axis, the border rows copied from their sources."""
    rank = len(x.shape)
    if any(b < 0 or a < 0 for b, a in zip(before, after, strict=True)):
        raise Unserved("no-kernel", what=f"Pad mode {mode} with negative pads")
    padded = [k for k in range(rank) if before[k] or after[k]]
    if not padded:
        ctx.alias(node, 0, x)
        return
    for axis in padded:
        d = x.shape[axis]
        shape = [
            n + (before[axis] + after[axis] if k == axis else 0) for k, n in enumerate(x.shape)
        ]
        last = axis == padded[-1]
        y = ctx.output(node, 0, shape, x.dtype) if last else ctx.scratch(x.dtype, shape)
        source = np.pad(np.arange(d), (before[axis], after[axis]), mode=mode)  # type: ignore[call-overload]
        at = 0
        while at < len(source):
            step = int(source[at + 1] - source[at]) if at + 1 < len(source) else 1
            if step not in (-1, 0, 1):
                step = 1
            end = at + 1
            while end < len(source) and source[end] - source[end - 1] == step:
                end += 1
            run = x.part(axis, int(source[at]), end - at, step)
            copy(ctx, node, run, y.part(axis, at, end - at))
            at = end
        x = y


def trilu(ctx: Context, node: ir.Node) -> None:
    """The triangle by a mask made at lowering: [R, C] bytes, shared by every matrix."""
    x = ctx.view(node, 0)
    diagonal = int(ctx.given(node, 1).reshape(-1)[0]) if ctx.has(node, 1) else 0
    upper = ctx.attr(node, "upper", 1)
    ones = np.ones(x.shape[-2:], bool)
    mask = ctx.constant(np.triu(ones, diagonal) if upper else np.tril(ones, diagonal))
    apply(ctx, node, ctx.output(node, 0, x.shape, x.dtype), "Where", mask, x, 0)


def depth_to_space(ctx: Context, node: ir.Node) -> None:
    """DepthToSpace and SpaceToDepth: six axes in another order, two of which merge thrice."""
    x = ctx.view(node, 0)
    n, c, h, w = x.shape
    b, columns = ctx.attr(node, "blocksize"), ctx.attr(node, "mode", "DCR") == "DCR"
    if node.op_type == "SpaceToDepth":
        split, order = (n, c, h // b, b, w // b, b), (0, 3, 5, 1, 2, 4)
        order = order if columns else (0, 1, 3, 5, 2, 4)
        merged = (n, c * b * b, h // b, w // b)
    else:
        few = c // (b * b)
        split, order = (n, few, b, b, h, w), (0, 1, 4, 2, 5, 3)
        if columns:
            split, order = (n, b, b, few, h, w), (0, 3, 4, 1, 5, 2)
        merged = (n, few, h * b, w * b)
    ctx.alias(node, 0, reshaped(ctx, reshaped(ctx, x, split).permute(order), merged))


def bit_cast(ctx: Context, node: ir.Node) -> None:
    """The same bits as another type of that size."""
    x, name = ctx.view(node, 0), dtype_name(ir.DataType(ctx.attr(node, "to")))
    if ITEMSIZE.get(name) != ITEMSIZE[x.dtype]:
        raise Unserved("no-kernel", what=f"a view of {x.dtype} as {name}")
    ctx.alias(node, 0, Tensor(x.buffer, name, x.shape, x.strides, x.offset))


def constant_of_shape(ctx: Context, node: ir.Node) -> None:
    """Refuse a shape that is not known; one that is known is evaluated on the host."""
    raise Unserved("unknown", what="its shape")


def eye_like(ctx: Context, node: ir.Node) -> None:
    x = ctx.view(node, 0)
    dtype = ctx.attr(node, "dtype")
    name = x.dtype if dtype is None else dtype_name(ir.DataType(dtype))
    rows, columns = x.shape
    ones = ctx.constant(np.eye(rows, columns, ctx.attr(node, "k", 0), dtype=bool))
    apply(ctx, node, ctx.output(node, 0, x.shape, name), cast_step(name), ones)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "Reshape"): reshape,
    ("", "Squeeze"): squeeze,
    ("", "Unsqueeze"): unsqueeze,
    ("", "Flatten"): flatten,
    ("", "Transpose"): transpose,
    ("", "Expand"): expand,
    ("", "Slice"): slice_,
    ("", "Split"): split,
    ("", "BitCast"): bit_cast,
    ("", "Concat"): concat,
    ("", "ConstantOfShape"): constant_of_shape,
    ("", "EyeLike"): eye_like,
    ("", "Tile"): tile,
    ("", "Pad"): pad,
    ("", "Trilu"): trilu,
    ("", "SpaceToDepth"): depth_to_space,
    ("", "DepthToSpace"): depth_to_space,
}

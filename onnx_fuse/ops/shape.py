"""Ops that move, repeat, cut and join without arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import dim, given, rank
from onnx_fuse.ops.opdef import OpDef, Unary, no_grad, register, table
from onnx_fuse.ops.shape_ops import (
    Tensor,
    Values,
    Writer,
    arguments,
    fail,
    ints_attribute,
    known_rank,
    norm_axis,
    static_ints,
    text,
)


def _like(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    return op.reshape_like(dy, x)


def _vector(op: Writer, axes: Tensor) -> Tensor:
    """onnxruntime's Unsqueeze takes one axis as a number, its Squeeze a vector alone.

    Not by Reshape: onnxruntime (1.32) makes one Reshape of it and of the Squeeze that reads it.
    """
    return axes if rank(axes) == 1 else op.Expand(axes, [1])


def _squeeze(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    axes = given(n, 1)
    return op.Unsqueeze(dy, axes) if static_ints(axes) else op.reshape_like(dy, x)


def _transpose(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    perm = ints_attribute(n, "perm")
    if perm is None:
        return op.Transpose(dy)
    return op.Transpose(dy, perm=[int(i) for i in np.argsort(perm)])


def _tile(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    """Sum over the repeats: dy as [r0, d0, r1, d1, …], reduced over every r."""
    repeats = static_ints(n.inputs[1])
    sizes: list[Any] = []
    axes: list[int] = []
    for axis, size in enumerate(op.sizes_of(x)):
        if repeats is None or repeats[axis] != 1:
            axes.append(len(sizes))
            sizes.append(
                op.Slice(n.inputs[1], [axis], [axis + 1], [0]) if repeats is None else repeats[axis]
            )
        sizes.append(size)
    return op.ReduceSum(op.reshape(dy, sizes), op.constant(axes), keepdims=0) if axes else dy


def _pad(op: Writer, node: ir.Node, dys: Values) -> Values:
    (x, pads), dy = arguments(node, 2), dys[0]
    mode = text(node, "mode", "constant")
    axes = given(node, 3)
    if mode == "constant":
        static_axes = static_ints(axes)
        if axes is None or static_axes is None:
            dx = op.Pad(dy, op.Neg(pads), None, axes)
        else:
            cut = op.pieces(op.Neg(pads), 2 * len(static_axes))
            dx = op.pad(dy, static_axes, cut[: len(static_axes)], cut[len(static_axes) :])
        fill = given(node, 2)
        if fill is None:
            return [dx]
        total, inner = op.ReduceSum(dy, keepdims=0), op.ReduceSum(dx, keepdims=0)
        return [dx, None, op.reshape_like(op.Sub(total, inner), fill)]
    static_axes, amounts = static_ints(axes), static_ints(pads)
    padded = list(range(known_rank(x))) if axes is None else static_axes
    if padded is None:
        raise fail(node, f"mode '{mode}' with axes that are not constant")
    dx, count = dy, len(padded)
    for i, axis in enumerate(padded):
        axis = norm_axis(axis, x)
        if amounts is not None and amounts[i] == amounts[i + count] == 0:
            continue
        # Each place of y along the axis holds the place of x it shows: pad the positions the same.
        positions = op.counted(op.size_of(x, axis))
        ends = (
            op.constant([amounts[i], amounts[i + count]])
            if amounts is not None
            else op.Gather(pads, [i, i + count])
        )
        places = op.Pad(positions, ends, mode=mode)
        dx = add_along(op, dx, places, axis, op.size_of(x, axis), known_rank(x))
    return [dx]


def add_along(
    op: Writer, dy: ir.Value, places: ir.Value, axis: int, size: ir.Value, n: int
) -> Tensor:
    """x of the given size along `axis` with x[places[i]] += dy[i], the transpose of Gather."""
    shape = op.Shape(dy)
    before = [op.Slice(shape, [0], [axis], [0])] if axis else []
    after = [op.Slice(shape, [axis + 1], [n], [0])] if axis + 1 < n else []
    result_shape = op.vector([*before, op.Unsqueeze(size, [0]), *after])
    column = places if axis == n - 1 else op.Unsqueeze(places, list(range(1, n - axis)))
    zeros = op.filled(result_shape, dy.dtype)
    return op.scatter_add(zeros, op.Expand(column, shape), dy, axis=axis)


def _concat(op: Writer, node: ir.Node, dys: Values) -> Values:
    dy, axis = dys[0], node.attributes.get_int("axis", 0)
    inputs = [x for x in node.inputs if x is not None]
    if len(inputs) == 1:
        return [dy]
    sizes = [op.shape_of(x, [norm_axis(axis, x)]) for x in inputs]
    ints = [static_ints(s) for s in sizes]
    split = (
        op.constant([s[0] for s in ints if s]) if None not in ints else op.Concat(*sizes, axis=0)
    )
    parts = op.Split(dy, split, axis=axis, outputs=len(inputs))
    return list(parts)


def _split(op: Writer, node: ir.Node, dys: Values) -> Values:
    parts = [op.present(dy, y) for dy, y in zip(dys, node.outputs, strict=True)]
    if len(parts) == 1:
        return parts
    return [op.Concat(*parts, axis=node.attributes.get_int("axis", 0))]


def _slice(op: Writer, node: ir.Node, dys: Values) -> Values:
    """Pad back with zeros; steps other than 1 scatter along each axis."""
    x, first, last = arguments(node, 3)
    dy, y = dys[0], node.outputs[0]
    starts, ends = static_ints(first), static_ints(last)
    axes_value, steps_value = given(node, 3), given(node, 4)
    axes, steps = static_ints(axes_value), static_ints(steps_value)
    if axes_value is None:
        count = dim(first, 0) if starts is None else len(starts)
        if count is None:
            raise fail(node, "neither its axes nor the number of its starts are known")
        axes = list(range(count))
    if axes is None:
        raise fail(node, "its axes are not constant")
    axes = [norm_axis(a, x) if a < 0 else a for a in axes]
    if (steps is None and steps_value is not None) or any(s != 1 for s in steps or ()):
        return [_slice_steps(op, node, x, dy, axes)]
    before, after = [], []
    for i, axis in enumerate(axes):
        start = starts[i] if starts is not None else None
        pads = _static_pads(x, y, axis, start, ends[i] if ends is not None else None)
        if pads is None:
            extent, part = op.shape_of(x, [axis]), op.shape_of(y, [axis])
            if start is not None and start >= 0:
                begin = op.Min([start], extent)
            else:
                first = op.pieces(node.inputs[1], len(axes))[i]
                first = op.constant([first]) if isinstance(first, int) else first
                first = op.to_type(first, ir.DataType.INT64)
                first = op.Where(op.Less(first, 0), op.Add(first, extent), first)
                begin = op.Max(op.Min(first, extent), 0)
            pads = begin, op.Sub(op.Sub(extent, begin), part)
        before.append(pads[0])
        after.append(pads[1])
    return [op.pad(dy, axes, before, after)]


def _static_pads(
    x: ir.Value, y: ir.Value, axis: int, start: int | None, end: int | None
) -> tuple[Any, Any] | None:
    """Zeros before and after the slice, where they don't depend on a dynamic size."""
    size, cut = dim(x, axis), dim(y, axis)
    if start is not None and size is not None and cut is not None:
        begin = min(max(start + size if start < 0 else start, 0), size)
        return begin, size - begin - cut
    if start == 0 and end is not None and end >= 2**31 - 1:
        return 0, 0
    return None


def _slice_steps(op: Writer, node: ir.Node, x: ir.Value, dy: ir.Value, axes: list[int]) -> Tensor:
    """Undo the axes one by one, the last first: each adds rows at the positions it took."""
    _, starts, ends, _, steps = arguments(node, 5)
    for i, axis in reversed(list(enumerate(axes))):
        size = op.size_of(x, axis)
        positions = op.counted(size)
        one = [op.Slice(v, [i], [i + 1], [0]) for v in (starts, ends)]
        step = [1] if steps is None else op.Slice(steps, [i], [i + 1], [0])
        zero = op.constant(np.zeros(1, (starts.dtype or ir.DataType.INT64).numpy()))
        places = op.Slice(positions, *one, zero, step)
        dy = add_along(op, dy, places, axis, size, known_rank(x))
    return dy


def _depth_to_space(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    block = n.attributes.get_int("blocksize", 1)
    if text(n, "mode", "DCR") == "DCR":
        return op.SpaceToDepth(dy, blocksize=block)
    # CRD: y[c, h·b + i, w·b + j] = x[c·b² + i·b + j, h, w]
    batch, channels, height, width = op.sizes_of(x)
    if not isinstance(channels, int):
        raise fail(n, "mode CRD with a dynamic number of channels")
    sizes = [batch, channels // (block * block), height, block, width, block]
    return op.reshape_like(op.Transpose(op.reshape(dy, sizes), perm=[0, 1, 3, 5, 2, 4]), x)


def _reverse_sequence(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    batch, time = n.attributes.get_int("batch_axis", 1), n.attributes.get_int("time_axis", 0)
    return op.ReverseSequence(dy, n.inputs[1], batch_axis=batch, time_axis=time)


def _range(op: Writer, node: ir.Node, dys: Values) -> Values:
    """y[i] = start + i·delta."""
    dy = dys[0]
    steps = op.counted(op.Squeeze(op.Shape(dy), [0]))
    return [
        op.ReduceSum(dy, keepdims=0),
        None,
        op.ReduceSum(op.Mul(dy, op.CastLike(steps, dy)), keepdims=0),
    ]


SHAPE: dict[str, Unary] = {
    "Reshape": _like,
    "Flatten": _like,
    "Unsqueeze": lambda op, dy, x, y, n: op.Squeeze(dy, _vector(op, n.inputs[1])),
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Trilu": lambda op, dy, x, y, n: op.Trilu(
        dy, given(n, 1), upper=n.attributes.get_int("upper", 1)
    ),
    "Tile": _tile,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": lambda op, dy, x, y, n: op.DepthToSpace(
        dy, blocksize=n.attributes.get_int("blocksize", 1), mode="DCR"
    ),
    "ReverseSequence": _reverse_sequence,
}
table(SHAPE)
register(
    OpDef("Pad", grad=_pad),
    OpDef("Concat", grad=_concat),
    OpDef("Split", grad=_split),
    OpDef("Slice", grad=_slice),
    OpDef("Expand", grad=lambda op, node, dys: [dys[0]]),
    OpDef("Range", grad=_range),
)
no_grad(
    "it reads the shape only",
    *("Shape", "Size", "ConstantOfShape", "EyeLike"),
    *("BlackmanWindow", "HammingWindow", "HannWindow"),
)
no_grad("sequences have no gradient", "SequenceMap")

"""Rules of operators that move, cut and index values, for shapes and entries."""

from __future__ import annotations

import numpy as np
from onnx_ir import Node

from onnx_fuse.ir.build import given
from onnx_fuse.ir.entries import MOST, vector
from onnx_fuse.ir.sizes import SymbolicSize, product, size, unknown
from onnx_fuse.validation.sizes import least, smaller
from onnx_fuse.validation.symbolic.guesses import likely_sign
from onnx_fuse.validation.symbolic.walk import Fact, Rule, Shape, Walk, needed, one, sizes_in


def _shape_of(w: Walk, node: Node) -> list[Fact]:
    if node.op_type == "Size":
        return [Fact(())]
    shape = needed(w.shape(node.inputs[0]))
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end")
    return [Fact((size(len(shape[start:end])),))]


def _reshape(w: Walk, node: Node) -> list[Fact]:
    shape, target = w.shape(node.inputs[0]), needed(sizes_in(w, node.inputs[1]))
    if not node.attributes.get_int("allowzero", 0) and shape is not None:
        target = [shape[i] if t.number == 0 else t for i, t in enumerate(target)]
    holes = [i for i, t in enumerate(target) if t.number == -1]
    if shape is None:
        return [Fact(tuple(unknown() if i in holes else t for i, t in enumerate(target)))]
    if len(shape) == len(target):
        w.alike += [(a, b) for a, b in zip(shape, target, strict=True) if b.number != -1]
    left, right = list(shape), [t for t in target if t.number != -1]
    for d in tuple(right):
        if d in left:
            left.remove(d)
            right.remove(d)
    total, rest = product(left), product(right)
    if holes:
        w.system.require("divides", total, rest)
        target[holes[0]] = total / rest
    else:
        w.system.require("equal", total, rest)
    target = [w.system.resolve(t) for t in target]
    return [Fact(tuple(target), one(w.fact(node.inputs[0]).top))]


def _flatten(w: Walk, node: Node) -> list[Fact]:
    shape = needed(w.shape(node.inputs[0]))
    axis = node.attributes.get_int("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    rows, columns = product(shape[:axis]), product(shape[axis:])
    return [Fact((rows, columns), one(w.fact(node.inputs[0]).top))]


def _transpose(w: Walk, node: Node) -> list[Fact]:
    fact, shape = w.fact(node.inputs[0]), needed(w.shape(node.inputs[0]))
    order = list(node.attributes.get_ints("perm", range(len(shape))[::-1]))
    return [Fact(tuple(shape[i] for i in order), one(fact.top))]


def _unsqueeze(w: Walk, node: Node) -> list[Fact]:
    fact, shape = w.fact(node.inputs[0]), needed(w.shape(node.inputs[0]))
    axes = needed(w.ints(node.inputs[1]))
    rank = len(shape) + len(axes)
    places = sorted(a % rank for a in axes)
    for a in places:
        shape.insert(a, size(1))
    return [Fact(tuple(shape), one(fact.top))]


def _squeeze(w: Walk, node: Node) -> list[Fact]:
    fact, shape = w.fact(node.inputs[0]), needed(w.shape(node.inputs[0]))
    axes = [] if given(node, 1) is None else needed(w.ints(node.inputs[1]))
    axes = axes or [i for i, d in enumerate(shape) if d.number == 1]
    gone = {a % len(shape) for a in axes}
    for a in gone:
        w.same(shape[a], size(1))
    remaining = tuple(d for i, d in enumerate(shape) if i not in gone)
    return [Fact(remaining, one(fact.top))]


def _concat(w: Walk, node: Node) -> list[Fact]:
    shapes = [needed(w.shape(v)) for v in node.inputs]
    axis = node.attributes.get_int("axis", 0) % len(shapes[0])
    dims = list(shapes[0])
    for shape in shapes[1:]:
        for i, d in enumerate(shape):
            dims[i] = dims[i] + d if i == axis else w.same(dims[i], d)
    tops = [w.fact(v).top for v in node.inputs]
    single = [t[0] for t, s in zip(tops, shapes, strict=True) if t and s[-1].number == 1]
    along = axis == len(dims) - 1 and len(single) == len(shapes)
    return [Fact(tuple(dims), tuple(single) if along else None)]


def _split(w: Walk, node: Node) -> list[Fact]:
    shape = needed(w.shape(node.inputs[0]))
    axis = node.attributes.get_int("axis", 0) % len(shape)
    sizes = sizes_in(w, node.inputs[1]) if given(node, 1) is not None else None
    count = len(node.outputs)
    if sizes is None:
        part = -(-shape[axis] // count)
        last = shape[axis] - part * (count - 1)
        sizes = [part] * (count - 1) + [last]
    else:
        total = size(0)
        for part in sizes:
            total = total + part
        w.same(shape[axis], total)
    entries = w.entries(node.inputs[0])
    facts, start = [], 0
    for part, value in zip(sizes, node.outputs, strict=True):
        facts.append(Fact(tuple(part if i == axis else d for i, d in enumerate(shape))))
        if entries is not None and isinstance(part.number, int):
            w.guesses.enter(value, np.take(entries, range(start, start + part.number), axis))
            start += part.number
    return facts


def _slice(w: Walk, node: Node) -> list[Fact]:
    fact, shape = w.fact(node.inputs[0]), needed(w.shape(node.inputs[0]))
    extra = [*node.inputs[3:], None, None][:2]
    starts, ends = needed(sizes_in(w, node.inputs[1])), needed(sizes_in(w, node.inputs[2]))
    axes = w.ints(extra[0]) if extra[0] is not None else list(range(len(starts)))
    steps = w.ints(extra[1]) if extra[1] is not None else [1] * len(starts)
    if axes is None or steps is None:
        return [Fact(tuple(unknown() for _ in shape))]
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis = axis % len(shape)
        shape[axis] = _extent(w, shape[axis], start, end, step)
    return [Fact(tuple(shape), fact.top)]


def _extent(
    w: Walk, dim: SymbolicSize, start: SymbolicSize, end: SymbolicSize, step: int
) -> SymbolicSize:
    """The length of a slice; where it depends, the slice is taken to lie within."""
    if step < 0:
        to_start = end.number is not None and end.number < -(2**30)
        return -(-dim // -step) if to_start else unknown()
    start, end = (x + dim if (likely_sign(x) or 0) < 0 else x for x in (start, end))
    bounds = []
    for x in (start, end):
        if x.number is not None and x.number >= 2**31 - 1:
            bounds.append(dim)
        elif likely_sign(dim - x) is not None or x.number is not None:
            bounds.append(smaller(x, dim))
        else:
            w.system.require("least", dim, x, soft=True)
            bounds.append(x)
    length = bounds[1] - bounds[0]
    if (shortest := least(length)) is None or shortest < 0:
        w.system.require("least", length, size(0), soft=True)
    return length if step == 1 else -(-length // step)


def _gather(w: Walk, node: Node) -> list[Fact]:
    data, indices = w.fact(node.inputs[0]), w.fact(node.inputs[1])
    shape, at = needed(w.shape(node.inputs[0])), needed(w.shape(node.inputs[1]))
    axis = node.attributes.get_int("axis", 0) % len(shape)
    _reaches(w, shape[axis], indices.top)
    return [Fact((*shape[:axis], *at, *shape[axis + 1 :]), one(data.top))]


def _reaches(w: Walk, dim: SymbolicSize, top: Shape | None) -> None:
    if top is not None and len(top) == 1:
        limit = w.system.resolve(top[0])
        if dim.number is None:
            w.indexed.append((dim, limit))
        w.system.require("least", dim, limit)


def _gather_nd(w: Walk, node: Node) -> list[Fact]:
    shape, at = needed(w.shape(node.inputs[0])), needed(w.shape(node.inputs[1]))
    if (depth := at[-1].number) is None:
        return []
    batch, depth = node.attributes.get_int("batch_dims", 0), int(depth)
    tops = w.fact(node.inputs[1]).top or ()
    if len(tops) == depth:
        for i, top in enumerate(tops):
            _reaches(w, shape[batch + i], (top,))
    return [Fact((*at[:-1], *shape[batch + depth :]))]


def _like_indices(w: Walk, node: Node) -> list[Fact]:
    return [Fact(tuple(needed(w.shape(node.inputs[1]))))]


def _constant_of_shape(w: Walk, node: Node) -> list[Fact]:
    return [Fact(tuple(needed(sizes_in(w, node.inputs[0]))))]


def _expand(w: Walk, node: Node) -> list[Fact]:
    fact, target = w.fact(node.inputs[0]), sizes_in(w, node.inputs[1])
    shape = w.broadcast([w.shape(node.inputs[0]), target])
    return [Fact(shape, one(fact.top))]


def _tile(w: Walk, node: Node) -> list[Fact]:
    shape, repeats = needed(w.shape(node.inputs[0])), needed(sizes_in(w, node.inputs[1]))
    dims = tuple(d * r for d, r in zip(shape, repeats, strict=True))
    return [Fact(dims, one(w.fact(node.inputs[0]).top))]


def _range(w: Walk, node: Node) -> list[Fact]:
    numbers = [w.numbers(v) for v in node.inputs]
    if any(n is None or n[0] is None for n in numbers):
        return [Fact((unknown(),))]
    start, limit, delta = (n[0] or size(0) for n in numbers if n)
    step = delta.number
    if step is None or step == 0:
        return [Fact((unknown(),))]
    count = -((start - limit) // delta)
    if isinstance(count.number, int) and 0 <= count.number <= MOST:
        w.guesses.enter(node.outputs[0], vector([start + delta * i for i in range(count.number)]))
    return [Fact((count,), (limit,) if step > 0 else None)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("Shape", "Size"), _shape_of),
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "GatherElements": _like_indices,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Tile": _tile,
    "Range": _range,
}

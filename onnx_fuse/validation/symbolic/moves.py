"""Rules of operators that move, cut and index values, for shapes and entries."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx_ir import Node

from onnx_fuse.ir.sizes import SymbolicSize, product, size, smaller, unknown
from onnx_fuse.validation.symbolic.arithmetic import sign_of
from onnx_fuse.validation.symbolic.walk import (
    ENTRIES,
    NOTHING,
    Fact,
    Rule,
    Shape,
    Walk,
    entries_of,
    one,
    scalar,
    sizes_in,
    small,
    vector,
)


def _shape_of(w: Walk, node: Node) -> list[Fact]:
    shape = w.shape(node.inputs[0])
    if shape is None:
        return [NOTHING]
    if node.op_type == "Size":
        return [Fact((), scalar(product(shape)))]
    end = node.attributes.get("end")
    part = shape[node.attributes.get_int("start", 0) : end.as_int() if end is not None else None]
    return [Fact((size(len(part)),), vector(part))]


def _reshape(w: Walk, node: Node) -> list[Fact]:
    shape, target = w.shape(node.inputs[0]), sizes_in(w, node.inputs[1])
    if target is None:
        return [NOTHING]
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
    fact = w.fact(node.inputs[0])
    entries, sizes = fact.entries, [t.number for t in target]
    if entries is not None:
        entries = (
            None if None in sizes else entries.reshape([int(n) for n in sizes if n is not None])
        )
    return [Fact(tuple(target), entries, one(fact.top))]


def _flatten(w: Walk, node: Node) -> list[Fact]:
    shape = w.shape(node.inputs[0])
    if shape is None:
        return [NOTHING]
    axis = node.attributes.get_int("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return [
        Fact((product(shape[:axis]), product(shape[axis:])), None, one(w.fact(node.inputs[0]).top))
    ]


def _transpose(w: Walk, node: Node) -> list[Fact]:
    fact, shape = w.fact(node.inputs[0]), w.shape(node.inputs[0])
    if shape is None:
        return [NOTHING]
    order = list(node.attributes.get_ints("perm", range(len(shape))[::-1]))
    entries = fact.entries.transpose(order) if fact.entries is not None else None
    return [Fact(tuple(shape[i] for i in order), entries, one(fact.top))]


def _unsqueeze(w: Walk, node: Node) -> list[Fact]:
    fact, shape, axes = w.fact(node.inputs[0]), w.shape(node.inputs[0]), w.ints(node.inputs[1])
    if shape is None or axes is None:
        return [NOTHING]
    rank = len(shape) + len(axes)
    places = sorted(a % rank for a in axes)
    for a in places:
        shape.insert(a, size(1))
    entries = fact.entries
    for a in places:
        entries = np.expand_dims(entries, a) if entries is not None else None
    return [Fact(tuple(shape), entries, one(fact.top))]


def _squeeze(w: Walk, node: Node) -> list[Fact]:
    fact, shape = w.fact(node.inputs[0]), w.shape(node.inputs[0])
    if shape is None:
        return [NOTHING]
    axes = w.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else []
    if axes is None:
        return [NOTHING]
    axes = axes or [i for i, d in enumerate(shape) if d.number == 1]
    gone = {a % len(shape) for a in axes}
    for a in gone:
        w.same(shape[a], size(1))
    kept = tuple(d for i, d in enumerate(shape) if i not in gone)
    entries = fact.entries
    if entries is not None:
        entries = entries.reshape([n for i, n in enumerate(entries.shape) if i not in gone])
    return [Fact(kept, entries, one(fact.top))]


def _concat(w: Walk, node: Node) -> list[Fact]:
    shapes = [w.shape(v) for v in node.inputs]
    known = [s for s in shapes if s is not None]
    if len(known) < len(shapes):
        return [NOTHING]
    axis = node.attributes.get_int("axis", 0) % len(known[0])
    dims = list(known[0])
    for shape in known[1:]:
        for i, d in enumerate(shape):
            dims[i] = dims[i] + d if i == axis else w.same(dims[i], d)
    parts = [w.entries(v) for v in node.inputs]
    entries = None
    if all(p is not None for p in parts):
        entries = np.concatenate([p for p in parts if p is not None], axis)
    tops = [w.fact(v).top for v in node.inputs]
    single = [t[0] for t, s in zip(tops, known, strict=True) if t and s[-1].number == 1]
    along = axis == len(dims) - 1 and len(single) == len(shapes)
    return [Fact(tuple(dims), small(entries), tuple(single) if along else None)]


def _split(w: Walk, node: Node) -> list[Fact]:
    shape = w.shape(node.inputs[0])
    if shape is None:
        return []
    axis = node.attributes.get_int("axis", 0) % len(shape)
    given = sizes_in(w, node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    count = len(node.outputs)
    if given is None:
        part = -(-shape[axis] // count)
        last = shape[axis] - part * (count - 1)
        given = [part] * (count - 1) + [last]
    else:
        total = size(0)
        for g in given:
            total = total + g
        w.same(shape[axis], total)
    entries = w.entries(node.inputs[0])
    facts, start = [], 0
    for g in given:
        dims = [g if i == axis else d for i, d in enumerate(shape)]
        piece = None
        if entries is not None and isinstance(g.number, int):
            piece = np.take(entries, range(start, start + g.number), axis)
            start += g.number
        facts.append(Fact(tuple(dims), piece))
    return facts


def _slice(w: Walk, node: Node) -> list[Fact]:
    fact, shape = w.fact(node.inputs[0]), w.shape(node.inputs[0])
    if shape is None:
        return [NOTHING]
    extra = [*node.inputs[3:], None, None][:2]
    starts, ends = sizes_in(w, node.inputs[1]), sizes_in(w, node.inputs[2])
    if starts is None or ends is None:
        return [NOTHING]
    axes = w.ints(extra[0]) if extra[0] is not None else list(range(len(starts)))
    steps = w.ints(extra[1]) if extra[1] is not None else [1] * len(starts)
    if axes is None or steps is None:
        return [Fact(tuple(unknown() for _ in shape))]
    entries = fact.entries
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        axis = axis % len(shape)
        if entries is not None:
            a, b = start.number, end.number
            cut = [slice(None)] * entries.ndim
            cut[axis] = (
                slice(a, b, step) if step > 0 or (b or 0) >= -(2**31) else slice(a, None, step)
            )
            entries = entries[tuple(cut)] if a is not None and b is not None else None
        shape[axis] = _extent(w, shape[axis], start, end, step)
    return [Fact(tuple(shape), entries, fact.top)]


def _extent(
    w: Walk, dim: SymbolicSize, start: SymbolicSize, end: SymbolicSize, step: int
) -> SymbolicSize:
    """The length of a slice; where it depends, the slice is taken to lie within."""
    if step < 0:
        whole = end.number is not None and end.number < -(2**30)
        return -(-dim // -step) if whole else unknown()
    start, end = (x + dim if (sign_of(x, 0) or 0) < 0 else x for x in (start, end))
    bounds = []
    for x in (start, end):
        if x.number is not None and x.number >= 2**31 - 1:
            bounds.append(dim)
        elif sign_of(dim, x) is not None or x.number is not None:
            bounds.append(smaller(x, dim))
        else:
            w.system.require("least", dim, x, soft=True)
            bounds.append(x)
    length = bounds[1] - bounds[0]
    if (length.least or 0) < 0 or length.least is None:
        w.system.require("least", length, size(0), soft=True)
    return length if step == 1 else -(-length // step)


def _gather(w: Walk, node: Node) -> list[Fact]:
    data, indices = w.fact(node.inputs[0]), w.fact(node.inputs[1])
    shape, at = w.shape(node.inputs[0]), w.shape(node.inputs[1])
    if shape is None or at is None:
        return [NOTHING]
    axis = node.attributes.get_int("axis", 0) % len(shape)
    _reaches(w, shape[axis], indices.top)
    entries = None
    places = w.ints(node.inputs[1])
    if data.entries is not None and places is not None and indices.entries is not None:
        index = np.array(places, int).reshape(indices.entries.shape)
        entries = np.asarray(np.take(data.entries, index, axis), object)
        if entries.ndim == 0:
            entries = scalar(entries[()])
    return [Fact((*shape[:axis], *at, *shape[axis + 1 :]), entries, one(data.top))]


def _reaches(w: Walk, dim: SymbolicSize, top: Shape | None) -> None:
    if top is not None and len(top) == 1:
        limit = w.system.resolve(top[0])
        if dim.number is None:
            w.indexed.append((dim, limit))
        w.system.require("least", dim, limit)


def _gather_nd(w: Walk, node: Node) -> list[Fact]:
    shape, at = w.shape(node.inputs[0]), w.shape(node.inputs[1])
    if shape is None or at is None or at[-1].number is None:
        return [NOTHING]
    batch, depth = node.attributes.get_int("batch_dims", 0), int(at[-1].number)
    tops = w.fact(node.inputs[1]).top or ()
    if len(tops) == depth:
        for i, top in enumerate(tops):
            _reaches(w, shape[batch + i], (top,))
    return [Fact((*at[:-1], *shape[batch + depth :]))]


def _like_indices(w: Walk, node: Node) -> list[Fact]:
    shape = w.shape(node.inputs[1])
    return [Fact(None if shape is None else tuple(shape))]


def _constant_of_shape(w: Walk, node: Node) -> list[Fact]:
    target = sizes_in(w, node.inputs[0])
    if target is None:
        return [NOTHING]
    attribute = node.attributes.get("value")
    fill: Any = size(0)
    if attribute is not None:
        one = entries_of(attribute.as_tensor().numpy())
        fill = one.flat[0] if one is not None else None
    sizes = [t.number for t in target]
    entries = None
    if None not in sizes and np.prod([float(n or 0) for n in sizes]) <= ENTRIES:
        entries = np.full([int(n or 0) for n in sizes], fill, object)
    return [Fact(tuple(target), entries)]


def _expand(w: Walk, node: Node) -> list[Fact]:
    fact, target = w.fact(node.inputs[0]), sizes_in(w, node.inputs[1])
    shape = w.broadcast([w.shape(node.inputs[0]), target])
    entries = None
    if shape is not None and fact.entries is not None:
        sizes = [d.number for d in shape]
        if None not in sizes and np.prod([float(n or 0) for n in sizes]) <= ENTRIES:
            entries = np.broadcast_to(fact.entries, [int(n or 0) for n in sizes])
    return [Fact(shape, entries, one(fact.top))]


def _tile(w: Walk, node: Node) -> list[Fact]:
    shape, repeats = w.shape(node.inputs[0]), sizes_in(w, node.inputs[1])
    if shape is None or repeats is None:
        return [NOTHING]
    dims = tuple(d * r for d, r in zip(shape, repeats, strict=True))
    return [Fact(dims, None, one(w.fact(node.inputs[0]).top))]


def _range(w: Walk, node: Node) -> list[Fact]:
    numbers = [w.numbers(v) for v in node.inputs]
    if any(n is None or n[0] is None for n in numbers):
        return [Fact((unknown(),))]
    start, limit, delta = (n[0] or size(0) for n in numbers if n)
    step = delta.number
    if step is None or step == 0:
        return [Fact((unknown(),))]
    count = -((start - limit) // delta)
    entries = None
    if isinstance(count.number, int) and 0 <= count.number <= ENTRIES:
        entries = vector([start + delta * i for i in range(count.number)])
    return [Fact((count,), entries, (limit,) if step > 0 else None)]


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

"""Rotary embeddings half by half: y = x cos + (-x2, x1) sin, x1 and x2 the halves of x.

As exporters write it, (-x2, x1) is a tensor of its own, and so are zeros around each half's
gradient. A training step has two expressions over the halves instead, with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, dim, rank, required
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.ops.patterns import NODES, Match, inside, other_reader
from onnx_fuse.ops.rules import attribute, cut_of, producer
from onnx_fuse.rewrite.canonicalize import rewrite_each

FIRST_OPSET = 13
"""The opset from which the sizes of a Split are an input."""


def split_rotations(model: ir.Model) -> int:
    """Write each rotation of the main graph half by half, in place; returns how many there were."""
    if model.graph.opset_imports[""] < FIRST_OPSET:
        return 0
    return rewrite_each(model, "Add", _split)


@dataclass(frozen=True)
class Rotation:
    """An Add that rotates `x`, by tables as wide as x that broadcast to it."""

    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    halves: tuple[ir.Value, ir.Value]


_ROTATION = "x * cos + Concat <axis: int = @axis> (Neg (second), first) * sin"


def rotation_of(total: ir.Node | None) -> Rotation | None:
    """x cos + (-x2, x1) sin, the products and the factors in any order."""
    match = NODES.find(_ROTATION, total.outputs[0], _is_rotation) if total is not None else None
    if match is None:
        return None
    return Rotation(match["x"], match["cos"], match["sin"], (match["first"], match["second"]))


def head_rotation_of(value: ir.Value) -> Rotation | None:
    """The rotation that makes `value`, of all or of the first numbers of each head, as its tables
    are wide; what is behind them stays as it is.
    """
    join = producer(value, "Concat")
    if join is None or len(join.inputs) != 2:
        return rotation_of(value.producer())
    turned, rest = join.inputs
    rotation = None if turned is None else rotation_of(turned.producer())
    first, second = (None if rotation is None else cut_of(rotation.x)), cut_of(rest)
    if rotation is None or first is None or second is None:
        return None
    width, size, last = dim(turned, -1), dim(first.source, -1), (rank(turned) or 0) - 1
    fits = first.source is second.source and (first.start, second.start) == (0, width)
    along = first.axis == second.axis == last and attribute(join, "axis", 0) in (-1, last)
    if not (fits and along and size and width and dim(rest, -1) == size - width):
        return None
    return replace(rotation, x=first.source)


def _is_rotation(match: Match) -> bool:
    """Whether x's halves are joined along the last axis, and the tables are as wide as x."""
    x, size, axes = match["x"], dim(match["x"], -1), rank(match["x"])
    if not size or size % 2 or axes is None or match["axis"] not in (-1, axes - 1):
        return False
    for half, start in ((match["first"], 0), (match["second"], size // 2)):
        cut = cut_of(half)
        if cut is None or (cut.source, cut.axis, cut.start) != (x, axes - 1, start):
            return False
        if dim(half, -1) != size // 2:
            return False
    return all(
        0 < (rank(t) or 0) <= axes and dim(t, -1) == size for t in (match["cos"], match["sin"])
    )


def _split(graph: ir.Graph, total: ir.Node) -> bool:
    """Replace an Add that rotates, if nothing else reads a part of it."""
    rotation = rotation_of(total)
    if rotation is None:
        return False
    x, cos, sin = rotation.x, rotation.cos, rotation.sin
    if other_reader(inside(total.outputs[0], [x, cos, sin, *rotation.halves])):
        return False
    size = required(dim(x, -1))
    op = Builder()
    (x1, x2), (c1, c2), (s1, s2) = (
        op.Split(v, op.constant([size // 2] * 2), axis=-1, outputs=2) for v in (x, cos, sin)
    )
    y = op.Concat(
        op.Sub(op.Mul(x1, c1), op.Mul(x2, s1)), op.Add(op.Mul(x2, c2), op.Mul(x1, s2)), axis=-1
    )
    replace_node(total, op.nodes, [y], named=False)
    return True

"""Rotary embeddings half by half: y = x cos + (-x2, x1) sin, x1 and x2 the halves of x.

As exporters write it, (-x2, x1) is a tensor of its own, and so are zeros around each half's
gradient. A training step has two expressions over the halves instead, with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, dim, rank, required
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.ops.rules import cut_of, producer
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
    parts: tuple[ir.Value, ...]
    """What lies between x and the sum."""


def rotation_of(total: ir.Node | None) -> Rotation | None:
    """x cos + (-x2, x1) sin, the products and the factors in any order."""
    if total is None or total.op_type != "Add" or total.domain:
        return None
    for product, straight in (total.inputs, total.inputs[::-1]):
        for joined, sin in _factor_pairs(product):
            if (x := _turned(joined)) is None:
                continue
            cos = next((other for one, other in _factor_pairs(straight) if one is x), None)
            if cos is not None and sin is not None and _are_tables(x, cos, sin):
                negated = required(required(joined.producer()).inputs[0])
                parts = (negated, joined, required(product), required(straight))
                return Rotation(x, cos, sin, parts)
    return None


def _factor_pairs(product: ir.Value | None) -> Sequence[Sequence[ir.Value]]:
    node = producer(product, "Mul")
    factors = [v for v in node.inputs if v is not None] if node is not None else []
    return (factors, factors[::-1]) if len(factors) == 2 else ()


def _turned(joined: ir.Value) -> ir.Value | None:
    """The x of (-x2, x1)."""
    join = producer(joined, "Concat")
    if join is None or len(join.inputs) != 2 or not _last_axis(join, joined):
        return None
    neg = producer(join.inputs[0], "Neg")
    second, first = _half(neg.inputs[0] if neg is not None else None), _half(join.inputs[1])
    if first is None or second is None or (first[1], second[1]) != (0, 1):
        return None
    return first[0] if first[0] is second[0] else None


def _are_tables(x: ir.Value, *tables: ir.Value) -> bool:
    size, level = dim(x, -1), rank(x)
    if level is None or not isinstance(size, int):
        return False
    return all(0 < (rank(t) or 0) <= level and dim(t, -1) == size for t in tables)


def _split(graph: ir.Graph, total: ir.Node) -> bool:
    """Replace an Add that rotates, if nothing else reads a part of it."""
    rotation = rotation_of(total)
    if rotation is None or any(len(v.uses()) > 1 or v.is_graph_output() for v in rotation.parts):
        return False
    x, cos, sin = rotation.x, rotation.cos, rotation.sin
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


def _last_axis(node: ir.Node, value: ir.Value) -> bool:
    level = rank(value)
    return level is not None and node.attributes.get_int("axis", 0) in (-1, level - 1)


def _half(value: ir.Value | None) -> tuple[ir.Value, int] | None:
    """(x, 0 or 1) where a value is the first or second half of x along the last axis."""
    cut = cut_of(value)
    if cut is None or cut.axis is None or cut.axis + 1 != rank(cut.source):
        return None
    size = dim(cut.source, -1)
    if not size or size % 2 or dim(value, -1) != size // 2 or cut.start not in (0, size // 2):
        return None
    return cut.source, 2 * cut.start // size

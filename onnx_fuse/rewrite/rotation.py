"""Rotary embeddings half by half: y = x cos + (-x2, x1) sin, x1 and x2 the halves of x.

As exporters write it, (-x2, x1) is a tensor of its own, and so are zeros around each half's
gradient. A training step has two expressions over the halves instead, with the same bits.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, rank, replace_node
from onnx_fuse.rewrite.canonicalize import rewrite_each

FIRST_OPSET = 13
"""The opset from which the sizes of a Split are an input."""


def split_rotations(model: ir.Model) -> int:
    """Write each rotation of the main graph half by half, in place; returns how many there were."""
    if model.graph.opset_imports[""] < FIRST_OPSET:
        return 0
    return rewrite_each(model, "Concat", _split)


def _split(graph: ir.Graph, join: ir.Node) -> bool:
    """Replace the Add behind a Concat of (-x2, x1), if it is one and nothing else reads a part."""
    if len(join.inputs) != 2 or not _last_axis(join, join.outputs[0]):
        return False
    negated, first = join.inputs
    neg = _only_producer(negated, "Neg")
    halves = _half(first), _half(neg.inputs[0] if neg is not None else None)
    if halves[0] is None or halves[1] is None or [h[1] for h in halves if h] != [0, 1]:
        return False
    x = halves[0][0]
    product = _reader(join.outputs[0], "Mul")
    total = None if product is None else _reader(product.outputs[0], "Add")
    if x is not halves[1][0] or product is None or total is None:
        return False
    sin = _other(product, join.outputs[0])
    straight = _only_producer(_other(total, product.outputs[0]), "Mul")
    cos = None if straight is None or x not in straight.inputs else _other(straight, x)
    size, level = dim(x, -1), rank(x)
    if sin is None or cos is None or level is None or not isinstance(size, int):
        return False
    for table in (cos, sin):
        table_rank = rank(table)
        if table_rank is None or not 0 < table_rank <= level or dim(table, -1) != size:
            return False
    op = Builder()
    (x1, x2), (c1, c2), (s1, s2) = (
        op.Split(v, op.constant([size // 2] * 2), axis=-1, outputs=2) for v in (x, cos, sin)
    )
    y = op.Concat(
        op.Sub(op.Mul(x1, c1), op.Mul(x2, s1)), op.Add(op.Mul(x2, c2), op.Mul(x1, s2)), axis=-1
    )
    replace_node(graph, total, op, y)
    return True


def _last_axis(node: ir.Node, value: ir.Value) -> bool:
    level = rank(value)
    return level is not None and node.attributes.get_int("axis", 0) in (-1, level - 1)


def _only_producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node of this type that makes a value which one other alone reads."""
    node = None if value is None else value.producer()
    if value is None or node is None or node.op_type != op_type or node.domain:
        return None
    return node if len(value.uses()) == 1 and not value.is_graph_output() else None


def _reader(value: ir.Value, op_type: str) -> ir.Node | None:
    """The node of this type that alone reads a value, once."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = uses[0].node
    return node if node.op_type == op_type and not node.domain else None


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The other operand of a node of two."""
    first, second = node.inputs
    return second if first is value else first


def _half(value: ir.Value | None) -> tuple[ir.Value, int] | None:
    """(x, 0 or 1) where a value is the first or second half of x along the last axis."""
    node = None if value is None else value.producer()
    if value is None or node is None or node.domain or node.op_type not in ("Slice", "Split"):
        return None
    x = node.inputs[0]
    size, level = (None, None) if x is None else (dim(x, -1), rank(x))
    if x is None or level is None or not isinstance(size, int) or size % 2:
        return None
    if dim(value, -1) != size // 2:
        return None
    if node.op_type == "Split":
        place = list(node.outputs).index(value)
        return (x, place) if len(node.outputs) == 2 and _last_axis(node, x) else None
    bounds = [const_array(v) for v in node.inputs[1:]]
    if any(a is None or a.size != 1 for a in bounds) or len(bounds) < 3:
        return None
    start, _, axis, *step = (int(a.reshape(-1)[0]) for a in bounds if a is not None)
    if axis not in (-1, level - 1) or step not in ([], [1]):
        return None
    start += size if start < 0 else 0
    return (x, 2 * start // size) if start in (0, size // 2) else None

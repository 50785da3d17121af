"""A norm, a Pad that adds rows of zeros, a product: the product may come before the Pad.

A norm with a bias makes no zeros of a row of zeros, so it cannot move behind the Pad. The product
can move before it: P(N(x)) · w + c = P_c(N(x) · w + c), where P_c adds rows that are c. It then
works on fewer rows and takes the norm with it, but the Pad and the moves around it carry the
product's columns in the place of its operand's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, rank, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.rules import attribute, constant_ints, consumers, row_axis, typed
from onnx_fuse.reasons import Reason

Fill = np.ndarray | None
"""What each column of an added row is; None where that is 0."""


def fill_of(w: ir.Value, c: ir.Value | None) -> tuple[Fill, Reason | None]:
    """The row that the product makes of zeros, 0 · w + c, or why it is not known."""
    weight, bias = const_array(w), const_array(c)
    if weight is None or not np.isfinite(weight.astype(np.float64)).all():
        return None, Reason("padded-weight")
    if c is None:
        return None, None
    if bias is None or any(d != 1 for d in bias.shape[:-1]):
        return None, Reason("bias-shape")
    row = bias.reshape(-1) + np.zeros((), bias.dtype)  # 0 + -0.0 is 0
    return (row if row.any() else None), None


def refusal(node: ir.Node, x: ir.Value, views: Sequence[ir.Node]) -> Reason | None:
    """Why the products of `x`, which `views` make of what `node` norms, stay behind the Pad.

    Bytes are compared, in columns a row, with r rows behind the Pad for each before it. A product
    behind: the norm 2 K, the moves K + r K, the product r K + r N; one before: the product K + N,
    the moves N + r N.
    """
    between = [node.outputs[0], *(v for n in views for v in n.outputs)]
    shapes = [n for v in between for n in consumers(v) if n.op_type == "Shape"]
    products = [n for n in consumers(x) if n not in shapes]
    others = [n for v in between for n in consumers(v) if n not in (*views, *shapes, *products)]
    if others or any(v.is_graph_output() for v in (*between, *(n.outputs[0] for n in shapes))):
        return Reason("other-readers", what="the norm, or what is between")
    if not all(_product_columns(n, x) for n in products):
        return Reason("padded-readers")
    axes = _axes(x, views)
    ratio = 1.0
    for view in views:
        axis = axes[view.outputs[0]]
        if view.op_type == "Pad":
            after = _padded_shape(view)
            if after is None:
                return Reason("unknown", what="the shape that is padded")
            if axis != len(after) - 1:
                return Reason("padded-axis")
            ratio *= prod(after) / prod(_sizes(view, after))
        elif view.op_type == "Reshape":
            target = constant_ints(view.inputs[1])
            if target is None or target[axis] == 0:
                return Reason("unknown", what="a shape between")
    # counted by weight: a product that is fused already is dead, but still there
    columns, width = (
        sum({n.inputs[1]: _product_columns(n, x) for n in products}.values()),
        dim(x, -1) or 0,
    )
    if columns >= width * (1 + ratio):
        return Reason("padded-cost", columns=columns, width=width)
    if any(n.domain for n in products):
        return Reason("padded-readers")
    return None


def replay_padded_views(
    op: Builder, x: ir.Value, views: Sequence[ir.Node], y: ir.Value, fill: Fill
) -> ir.Value:
    """The `views` over `y`, the product of what they are over; rows that they add are `fill`.

    What asks for the shape of a value between is told that of its successor, but for the columns.
    """
    axes, width = _axes(x, views), dim(y, -1) or 0
    normed = views[0].inputs[0]
    moved: dict[ir.Value | None, ir.Value] = {normed: y}
    _replace_shape_nodes(op, normed, y, axes[normed])
    for view in views:
        inputs = [moved.get(v, v) for v in view.inputs]
        axis = axes[view.outputs[0]]
        if view.op_type == "Reshape":
            target = constant_ints(view.inputs[1]) or []
            inputs[1] = op.constant([width if i == axis else d for i, d in enumerate(target)])
        count = len(view.outputs)
        results = op.node(view.op_type, inputs, outputs=count, attributes=view.attributes)
        outputs = results if isinstance(results, tuple) else (results,)
        for before, after in zip(view.outputs, outputs, strict=True):
            shape = None if before.shape is None else [*before.shape]
            if shape is not None:
                shape[axes.get(before, axis)] = width
            typed(after, y, shape)
            if view.op_type == "Pad" and fill is not None:
                there = op.constant(_unpadded_rows(view))
                after = typed(op.Where(there, after, op.constant(fill)), y, shape)
            moved[before] = after
            _replace_shape_nodes(op, before, after, axes.get(before, axis))
    return moved[x]


def _replace_shape_nodes(op: Builder, old: ir.Value | None, new: ir.Value, axis: int) -> None:
    """Shape nodes of `old` are worked out from `new`, which differs from it along `axis` alone."""
    for reader in [n for n in consumers(old) if n.op_type == "Shape"] if old is not None else ():
        sizes = [op.Shape(new, end=axis), op.constant([dim(old, axis)])]
        after = [op.Shape(new, start=axis + 1)] if axis + 1 < (rank(old) or 0) else []
        told = op.Concat(*sizes, *after, axis=0)
        start, end = attribute(reader, "start", 0), attribute(reader, "end", None)
        if start or end is not None:
            last = op.constant([rank(old) or 0 if end is None else end])
            told = op.Slice(told, [start], last)
        reader.outputs[0].replace_all_uses_with(
            typed(told, reader.outputs[0], reader.outputs[0].shape)
        )


def _product_columns(node: ir.Node, x: ir.Value) -> int:
    name = FusedName.of(node.op_type)
    before = name.norm or name.place or name.grad
    fused = node.domain == FUSE and name.family == "Gemm" and not before
    if not (fused or (node.domain == "" and node.op_type in ("MatMul", "Gemm"))):
        return 0
    w = node.inputs[1]
    if node.inputs[0] is not x or attribute(node, "transA", 0) or rank(w) != 2 or w is x:
        return 0
    return dim(w, 0 if attribute(node, "transB", 0) else 1) or 0


def _axes(x: ir.Value, views: Sequence[ir.Node]) -> dict[ir.Value | None, int]:
    """The axis, in each value between, along which the rows of `x` are stored."""
    axes: dict[ir.Value | None, int] = {x: (rank(x) or 0) - 1}
    for view in reversed(views):
        axis = next(axes[v] for v in view.outputs if v in axes)
        below = axis if view.op_type == "Pad" else required(row_axis(view, axis))
        axes |= dict.fromkeys(view.outputs, axis)
        axes |= dict.fromkeys(view.inputs if view.op_type == "Concat" else view.inputs[:1], below)
    return axes


def _padded_shape(pad: ir.Node) -> list[int] | None:
    """The result's sizes, 1 along the axes that stay as they are."""
    pads, size = constant_ints(pad.inputs[1]) or [], rank(pad.inputs[0]) or 0
    sizes = []
    for axis in range(size):
        by, here = (pads[axis], pads[axis + size]), dim(pad.inputs[0], axis)
        if any(by) and (here is None or min(by) < 0):
            return None
        sizes.append((here or 0) + sum(by) if any(by) else 1)
    return sizes


def _sizes(pad: ir.Node, after: Sequence[int]) -> list[int]:
    pads = constant_ints(pad.inputs[1]) or []
    return [d - pads[i] - pads[i + len(after)] for i, d in enumerate(after)]


def _unpadded_rows(pad: ir.Node) -> np.ndarray:
    after, pads = _padded_shape(pad) or [], constant_ints(pad.inputs[1]) or []
    there = np.zeros(after, np.bool_)
    there[tuple(slice(pads[i], d - pads[i + len(after)]) for i, d in enumerate(after))] = True
    return there

"""Rows that nobody reads are not computed.

A classifier reads one token of its last block, and the block computes all of them:

    Gather(x + MatMul(f(LN(x)), w), 0) = x0 + MatMul(f(LN(x0)), w)      where x0 = Gather(x, 0)

Each of these operators makes a row of its result from that row of its operands alone, so that the
rows kept have the same value, whatever the others hold. Their gradient is the same sum without the
rows that add 0 to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, extent, rank, required
from onnx_fuse.ir.traits import POINTWISE
from onnx_fuse.ops.rules import Rewriter, Rule, attribute, constant_ints, consumers, typed

NAME = "ReadRows"
_BINARY = ("Add", "Div", "Max", "Min", "Mul", "Pow", "Sub")
_NORMS = ("LayerNormalization", "RMSNormalization")

_Axes = list[int | None]
"""For each input the axis whose rows an operator takes, or None where it takes all."""


def _row_axes(node: ir.Node, axis: int) -> _Axes | None:
    """The axes of the inputs that a row along `axis` of the result is made of.

    None where it is made of other rows, too, or that is not known.
    """
    y = node.outputs[0]
    size = rank(y)
    if node.op_type == "MatMulNBits" and size is not None and rank(node.inputs[0]) == size:
        return [axis, *[None] * len(node.inputs[1:])] if axis < size - 1 else None
    if node.domain or size is None or len(node.inputs) == 0:
        return None
    if node.op_type in POINTWISE and len(node.inputs) == 1:
        return [axis]
    if node.op_type in _BINARY:
        return _elementwise(node, axis, size)
    if node.op_type == "MatMul" and rank(node.inputs[1]) == 2:
        return [axis, None] if rank(node.inputs[0]) == size and axis < size - 1 else None
    if node.op_type in _NORMS:
        first = attribute(node, "axis", -1) % size
        if axis >= first:
            return None
        scales = node.inputs[1:]
        by_column = all(v is None or (rank(v) or 0) <= size - first for v in scales)
        return [axis, *[None] * len(scales)] if by_column else None
    return None


def _elementwise(node: ir.Node, axis: int, size: int) -> _Axes | None:
    """The axes of operands that are broadcast: those of one row along `axis` are read whole."""
    axes: _Axes = []
    rows = extent(node.outputs[0], axis)
    for x in node.inputs:
        axis_count = rank(x)
        if x is None or axis_count is None:
            return None
        at = axis - (size - axis_count)
        if at < 0 or dim(x, at) == 1:
            axes.append(None)
        elif rows is not None and extent(x, at) == rows:
            axes.append(at)
        else:
            return None
    return axes


@dataclass
class _Region:
    """The nodes whose rows only `pick` reads, and the axis of each of their values."""

    pick: ir.Node
    axis: int
    nodes: dict[ir.Node, _Axes] = field(default_factory=dict)
    wanted: dict[ir.Value, int] = field(default_factory=dict)

    def grow(self) -> None:
        self.wanted[required(self.pick.inputs[0])] = self.axis
        grown = True
        while grown:
            grown = False
            for value, axis in list(self.wanted.items()):
                node = value.producer()
                if (
                    node is None
                    or node in self.nodes
                    or not self._read_by_region_alone(value, axis)
                ):
                    continue
                axes = _row_axes(node, axis)
                if axes is None or node.graph is not self.pick.graph:
                    continue
                pairs = [
                    (x, a)
                    for x, a in zip(node.inputs, axes, strict=True)
                    if x is not None and a is not None
                ]
                if any(self.wanted.get(x, a) != a for x, a in pairs):
                    continue
                self.nodes[node] = axes
                self.wanted.update(pairs)
                grown = True

    def _read_by_region_alone(self, value: ir.Value, axis: int) -> bool:
        node = required(value.producer())
        if value.is_graph_output():
            return False
        if any(v is not value and (v.uses() or v.is_graph_output()) for v in node.outputs):
            return False
        for reader in consumers(value):
            axes: _Axes | None = [self.axis] if reader is self.pick else self.nodes.get(reader)
            if axes is None:
                return False
            # of a pick the operands behind the first are numbers
            for i, x in enumerate(reader.inputs):
                if x is value and (i >= len(axes) or axes[i] != axis):
                    return False
        return True


def _picked_row_count(pick: ir.Node) -> int | None:
    if pick.op_type == "Gather":
        levels = rank(pick.inputs[1])
        return 1 if levels == 0 else dim(pick.inputs[1], 0) if levels == 1 else None
    axes = constant_ints(pick.inputs[3]) if len(pick.inputs) > 3 else None
    if axes is None or len(axes) != 1 or any(const_array(v) is None for v in pick.inputs[1:]):
        return None
    size = rank(pick.outputs[0])
    return None if size is None else dim(pick.outputs[0], axes[0])


def _picked_axis(pick: ir.Node) -> int | None:
    size = rank(pick.inputs[0])
    if not size:
        return None
    if pick.op_type == "Gather":
        return attribute(pick, "axis", 0) % size
    axes = constant_ints(pick.inputs[3]) if len(pick.inputs) > 3 else None
    return None if axes is None or len(axes) != 1 else axes[0] % size


def _picked(op: Builder, pick: ir.Node, x: ir.Value, axis: int, count: int) -> ir.Value:
    """The rows of `x` along `axis` that `pick` takes, which stay an axis."""
    sizes = required(x.shape)
    shape = [*sizes[:axis], count, *sizes[axis + 1 :]]
    if pick.op_type == "Slice":
        start, end, step = pick.inputs[1], pick.inputs[2], (*pick.inputs[4:], None)[0]
        return typed(op.Slice(x, start, end, [axis], step), x, shape)
    index = pick.inputs[1]
    if (number := const_array(index)) is not None:
        index = op.constant([int(i) for i in number.flat])
    elif rank(index) == 0:
        index = op.Unsqueeze(index, [0])
    return typed(op.Gather(x, index, axis=axis), x, shape)


def _apply(rw: Rewriter, pick: ir.Node) -> bool:
    """A Gather or Slice of few rows that products made, each from a row of its own."""
    axis, count = _picked_axis(pick), _picked_row_count(pick)
    if pick.domain or axis is None or count is None or pick.inputs[0] is None:
        return False
    held = dim(pick.inputs[0], axis)
    if count < 1 or (count > 1 if held is None else 2 * count > held):
        return False
    region = _Region(pick, axis)
    region.grow()
    if not any(node.op_type in ("MatMul", "MatMulNBits") for node in region.nodes):
        return False
    op = Builder()
    rows: dict[ir.Value, ir.Value] = {}

    def rows_of(value: ir.Value, at: int) -> ir.Value:
        if value not in rows:
            rows[value] = _picked(op, pick, value, at, count)
        return rows[value]

    for node in reversed(region.nodes):
        inputs: Sequence[ir.Value | None] = [
            x if x is None or a is None else rows_of(x, a)
            for x, a in zip(node.inputs, region.nodes[node], strict=True)
        ]
        same = node.op_type, inputs
        result = op.node(*same, domain=node.domain, attributes=node.attributes, name=node.name)
        y = node.outputs[0]
        assert isinstance(result, ir.Value)
        at, sizes = region.wanted[y], required(y.shape)
        rows[y] = typed(result, y, [*sizes[:at], count, *sizes[at + 1 :]])
    y = rows[pick.inputs[0]]
    if pick.op_type == "Gather" and rank(pick.inputs[1]) == 0:
        y = op.Squeeze(y, [axis])
    rw.fusions[NAME] += 1
    return rw.replace(pick, op, [pick.outputs[0]], [y])


RULES = (Rule(NAME, 1, ("Gather", "Slice"), _apply, conditions="readers ranks body"),)

"""What is computed from numbers beyond float16's range, where a graph is made narrower.

A mask's float32 lowest outweighs every score: score + lowest is lowest, so that a row masked whole
attends evenly. -65504 does not: what is summed with such a number stays float32, and an attention
operator learns what the -65504 in its mask stands for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, sources
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ir.traits import VIEWS
from onnx_fuse.ops.fused.sdpa.kinds import FLOOR, KINDS

F32, F16 = ir.DataType.FLOAT, ir.DataType.FLOAT16
LARGEST = 65504.0
LOWEST = float(np.finfo(np.float32).min)

# Operators that only move or choose numbers, and which inputs these come from (None: each).
_MOVES: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(VIEWS, (0,)),
    **dict.fromkeys(("Expand", "Tile", "Slice", "Split", "Gather", "Trilu"), (0,)),
    **dict.fromkeys(("Pad", "ScatterND", "ScatterElements"), (0, 2)),
    "Where": (1, 2),
    "Concat": None,
}
# Arithmetic whose results are about as large as its operands. A bound of Max, Min or Clip is not
# counted as an operand.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sum", "Pow", "Reciprocal", "CumSum")
_BOUNDED = ("Max", "Min", "Clip")
# Operators that read numbers beyond the range, but whose results are within it.
_ENDS = ("Softmax", "LogSoftmax", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal")


@dataclass
class OutOfRange:
    """Nodes that are kept in float32, and the attention nodes that read a mask from them."""

    nodes: dict[ir.Node, None] = field(default_factory=dict)
    """Computed in float32."""
    values: dict[ir.Value, None] = field(default_factory=dict)
    """The float32 values beyond float16's range."""
    masks: list[tuple[ir.Node, int, float]] = field(default_factory=list)
    """(attention, index of its mask, the number that float16's lowest replaces there)."""


def masks_of(node: ir.Node) -> tuple[int, ...]:
    """The inputs of an attention operator of ours that are added to its scores."""
    kind = KINDS.get(FusedName.of(node.op_type).kind) if node.domain == FUSE else None
    if kind is None:
        return ()
    return tuple(i for i, name in enumerate(kind.inputs) if name.startswith("mask"))


def find_out_of_range(graph: ir.Graph, *, training: bool = False) -> OutOfRange:
    """The values that a constant beyond float16's range reaches by moves and arithmetic alone.

    Of a graph's float32 inputs those count too that become an attention's mask in this way. With
    `training` a mask that depends on weights does not: its gradient is the body's, without a floor.
    """
    reach = {v: n for v in _constants(graph) if (n := _lowest(v))}
    reach |= dict.fromkeys(_mask_inputs(graph), LOWEST)
    far = OutOfRange()
    arithmetic: list[ir.Node] = []
    for node in graph:
        taken = _passed_inputs(node, reach)
        numbers = [reach[v] for i in taken if (v := node.inputs[i]) is not None and v in reach]
        if not numbers:
            continue
        if node.op_type in _MOVES and _computes_float32(node):
            reach |= dict.fromkeys(node.outputs, min(numbers))
        elif node.op_type in _ENDS:
            arithmetic.append(node)
        elif _computes_float32(node):
            reach |= dict.fromkeys(node.outputs, min(numbers))
            arithmetic.append(node)

    def keep(value: ir.Value) -> None:
        todo = [value]
        while todo:
            at = todo.pop()
            if at not in reach or at in far.values:
                continue
            far.values[at] = None
            maker = at.producer()
            if maker is not None and maker.op_type != "Constant":
                far.nodes[maker] = None
                todo += [
                    v for i in _passed_inputs(maker, reach) if (v := maker.inputs[i]) is not None
                ]

    for node in arithmetic:
        if node.op_type not in _ENDS:
            for value in node.outputs:
                keep(value)
    for node in arithmetic:
        # a row of what was only chosen has one lowest number, in either type
        if node.op_type in _ENDS and any(v in far.values for v in node.inputs if v is not None):
            far.nodes[node] = None
    for node in graph:
        for i in masks_of(node):
            mask = node.inputs[i] if i < len(node.inputs) else None
            if mask in reach and not (training and _depends_on_weights(mask)):
                far.masks.append((node, i, reach[mask]))
    far.values |= {v: None for v in graph.inputs if v in reach}  # a Cast would make them infinite
    return far


def narrowed(op: Builder, value: ir.Value) -> ir.Value:
    """`value` in float16, its finite numbers within the range, infinities and NaN as they are."""
    low, high = (op.constant(np.float32(n)) for n in (-LARGEST, LARGEST))
    finite = op.Less(op.Abs(value), op.constant(np.float32(np.inf)))
    near = op.Where(finite, op.Clip(value, low, high), value)
    cast: ir.Value = op.Cast(near, to=F16.value)
    cast.dtype, cast.shape = F16, value.shape
    return cast


def _computes_float32(node: ir.Node) -> bool:
    return not node.domain and all(v.dtype == F32 for v in node.outputs)


def _passed_inputs(node: ir.Node, reach: dict[ir.Value, float]) -> tuple[int, ...]:
    """The inputs through which a number beyond the range gets into the node's result."""
    every, kind = tuple(range(len(node.inputs))), node.op_type
    if node.domain:
        return ()
    if kind in _MOVES:
        where = _MOVES[kind]
        return every if where is None else tuple(i for i in where if i < len(node.inputs))
    if kind == "Clip":
        return every[:1]
    if kind in _BOUNDED:  # a constant is a bound
        return tuple(i for i in every if (v := node.inputs[i]) is not None and not _constant(v))
    return every if kind in (*_ARITHMETIC, *_ENDS) else ()


def _constant(value: ir.Value) -> bool:
    return value.const_value is not None


def _constants(graph: ir.Graph) -> list[ir.Value]:
    from_nodes = [
        n.outputs[0] for n in graph if n.op_type in ("Constant", "ConstantOfShape") and not n.domain
    ]
    every = [v for v in (*graph.initializers.values(), *from_nodes) if v.dtype == F32]
    return [v for v in every if any(use.idx in _passed_inputs(use.node, {}) for use in v.uses())]


def _lowest(value: ir.Value) -> float:
    """Minus the largest finite magnitude in a constant where float16 does not reach it, else 0."""
    array, maker = const_array(value), value.producer()
    if array is None and maker is not None and maker.op_type == "ConstantOfShape":
        attribute = maker.attributes.get("value")
        array = attribute.as_tensor().numpy() if attribute is not None else None
    if array is None or not array.size:
        return 0.0
    low, high = (float(f(array, initial=0, where=np.isfinite(array))) for f in (np.min, np.max))
    far = max(high, -low)
    return -far if far > LARGEST else 0.0


def _mask_inputs(graph: ir.Graph) -> list[ir.Value]:
    """The float32 inputs of the graph that moves and arithmetic make an attention's mask of."""
    masks = [node.inputs[i] for node in graph for i in masks_of(node) if i < len(node.inputs)]
    read = sources(
        [v for v in masks if v is not None and v.dtype == F32],
        lambda n: [v for i in _passed_inputs(n, {}) if (v := n.inputs[i]) and v.dtype == F32],
    )
    return [v for v in graph.inputs if v in read]


def _depends_on_weights(value: ir.Value | None) -> bool:
    weights = [v for v in sources([value]) if v.is_initializer() and v.dtype == F32]
    return any((array := const_array(v)) is None or array.size > 1 for v in weights)


def set_floor(node: ir.Node, number: float) -> None:
    """Tell an attention operator what float16's lowest stands for in its masks."""
    floor = node.attributes.get_float(FLOOR, 0.0)
    node.attributes[FLOOR] = ir.AttrFloat32(FLOOR, min(floor, number))

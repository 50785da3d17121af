"""What a check of gradients holds: the integers that values round to, and the choice of elements.

Their derivative is 0 wherever it exists, and a difference sees the jumps between instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_fuse.ir.build import add_input, reads
from onnx_fuse.ir.traits import VIEWS
from onnx_fuse.validation.values import by_name

_ROUNDS = {"QuantizeLinear": (0,), "DynamicQuantizeLinear": (0, 2)}
_ROUNDS |= dict.fromkeys(("QLinearConv", "QLinearMatMul"), (0,))
"""Operators that round to integers, and the outputs that are these integers."""
_SELECTS = ("NonZero", "NonMaxSuppression")
"""Operators whose output, positions of elements, has a length that depends on the values.
The length of a Compress depends on its condition."""


def roundings(model: ir.Model) -> list[str]:
    """The names of the integers that nodes round to.

    Where a scale moves, some of many values round to another integer within any step. Nor do all
    values round to the same integer in float32 and in float64.
    """
    names = [
        node.outputs[k].name or ""
        for node in model.graph
        for k in _ROUNDS.get(node.op_type, ())
        if not node.domain and k < len(node.outputs)
    ]
    return [name for name in names if name]


def straight_through(model: ir.Model) -> set[str]:
    """The names of what is rounded before a DequantizeLinear: gradients pass that unchanged."""
    codes: set[ir.Value | None] = set()
    rounded: set[ir.Value | None] = set()
    for node in reversed(model.graph):
        read = node.outputs[0] in codes
        if node.op_type == "DequantizeLinear" or (read and node.op_type in VIEWS):
            codes.add(node.inputs[0])
        if (read and node.op_type in _ROUNDS) or not rounded.isdisjoint(node.outputs):
            rounded.update(reads(node))
    return {value.name or "" for value in rounded if value is not None}


def selections(model: ir.Model) -> list[str]:
    """The names of the values that say which elements follow, and so how many.

    A score beside a threshold may be chosen in float32 alone: the results in float64 are others.
    """
    names: dict[str, None] = {}
    for node in model.graph:
        value = node.outputs[0] if node.op_type in _SELECTS else None
        if node.op_type == "Compress":
            value = node.inputs[1]
        if not node.domain and value is not None and value.producer() is not None and value.name:
            names[value.name] = None
    return list(names)


def hold(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """The model with the values of these names as inputs; the same model where there are none."""
    if not names:
        return model
    held = model.clone()
    for name, value in by_name(held, names).items():
        new_input = add_input(held.graph, name, value.type, value.shape)
        ir.convenience.replace_all_uses_with(value, new_input, replace_graph_outputs=True)
        value.name = f"{name}.computed"
    return held

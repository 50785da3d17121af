"""Quantization steps: what a rounding that falls the other way changes in an output."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from onnx_fuse.ir.build import const_array
from onnx_fuse.ir.traits import VIEWS

COUNT = 2
"""Steps that an output may move: one where its own rounding falls the other way, one for all such
roundings before it (sums over many of them hardly move it further: they fall either way)."""

FOUR_BITS = 4
"""Steps where onnxruntime's kernel rounds the input of a product of four bits and a written-out
one does not: every number moves by up to half a step, not a few by a whole one."""

_ROUNDS = ("QuantizeLinear", "DynamicQuantizeLinear")
_MOVES = VIEWS.union(
    ("Slice", "Gather", "Concat", "Split", "Relu", "Clip", "MaxPool", "Expand", "Tile")
)


@dataclass(frozen=True)
class Steps:
    """The size of a step of each output, by name; of the others a part of their range."""

    scales: dict[str, float]
    levels: int
    rest: bool
    """Whether there are outputs without a scale of their own."""
    count: int = COUNT
    """The number of steps that an output may move."""

    @classmethod
    def of(cls, model: ir.Model) -> Steps | None:
        """The steps of a model, or None where nothing that depends on the inputs is quantized."""
        rounding = [
            node
            for node in ir.traversal.RecursiveGraphIterator(model.graph)
            if _rounds(node) and const_array(node.inputs[0]) is None
        ]
        if not rounding:
            return None
        bits = min((_bits(node) for node in rounding), default=8)
        scales = {v.name or "": s for v in model.graph.outputs if (s := _scale(v)) is not None}
        rest = any(v.name not in scales for v in model.graph.outputs)
        count = FOUR_BITS if any(n.op_type == "MatMulNBits" for n in rounding) else COUNT
        return cls(scales, (1 << bits) - 1, rest, count)

    def limit(self, name: str, y: object) -> float:
        """How far an output may move: `count` of its steps."""
        if not isinstance(y, np.ndarray) or y.dtype.kind not in "iuf" or not y.size:
            return 0.0
        if name in self.scales:
            return self.count * self.scales[name]
        if y.dtype.kind in "iu":
            return 0.0
        finite = y[np.isfinite(y)].astype(np.float64)
        return self.count * float(np.ptp(finite)) / self.levels if finite.size else 0.0

    def __str__(self) -> str:
        steps = [f"{s:.3g} in '{n}'" for n, s in list(self.scales.items())[:3]]
        if self.rest:
            steps.append(f"1/{self.levels} of the range of an output without a scale")
        return (
            f"quantized: the limit is {self.count} quantization steps, a step being "
            f"{', '.join(steps)}"
        )


def _rounds(node: Node) -> bool:
    """Whether a node rounds to integers; a MatMulNBits of level 4 may round its input to int8."""
    level = node.attributes.get("accuracy_level")
    if node.op_type == "MatMulNBits":
        return level is not None and level.value == 4
    return node.op_type in _ROUNDS or node.op_type.startswith("QLinear")


def _bits(node: Node) -> int:
    dtype = node.outputs[0].dtype
    return dtype.bitwidth if dtype is not None and dtype.is_integer() else 8


def _scale(value: Value) -> float | None:
    """The step of an output: 1 of what is quantized, the (largest) scale of what was."""
    node = value.producer()
    while node is not None and node.op_type in _MOVES:
        source = node.inputs[0]
        node = source.producer() if source is not None else None
    if node is None:
        return None
    if node.op_type in _ROUNDS or node.op_type.startswith("QLinear"):
        return 1.0 if node.op_type != "DynamicQuantizeLinear" or value is node.outputs[0] else None
    if node.op_type == "DequantizeLinear" and const_array(node.inputs[0]) is None:
        scale = const_array(node.inputs[1])
        return float(np.abs(scale.astype(np.float64)).max()) if scale is not None else None
    return None

"""Weights that a file stores as integers behind DequantizeLinear, and the floats they train as.

A step moves a weight by less than an integer stands for, so that the weight has to be a float. A
QuantizeLinear behind it makes the integers of the file of it, in the forward and when it is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.ir.build import Builder, add_initializer, const_array
from onnx_fuse.ir.names import Names

_NO_QUANTIZE = ir.DataType.INT32
"""What QuantizeLinear does not make: biases, whose scale is so small that they train as floats."""


@dataclass(frozen=True)
class StoredCodes:
    """How a weight is stored: codes of a dtype, by a scale for all, along an axis, or a block."""

    dtype: ir.DataType
    scale: str
    """The name of the scale, which may train."""
    scales: Array
    zeros: Array | None
    axis: int
    block: int

    def _spread(self, array: Array, shape: tuple[int, ...]) -> Array:
        """A scale or zero point in a shape that broadcasts to that of the weight."""
        if self.block:
            ends = tuple(slice(size) for size in shape)
            return array.repeat(self.block, self.axis)[ends]
        if array.size == 1:
            return array.reshape(())
        return array.reshape([-1 if i == self.axis % len(shape) else 1 for i in range(len(shape))])

    def floats(self, codes: Array) -> Array:
        """What DequantizeLinear makes of the codes, in the type of the scale."""
        wide = codes.astype(np.float32)
        if self.zeros is not None:
            wide = wide - self._spread(self.zeros, codes.shape).astype(np.float32)
        scale = self._spread(self.scales, codes.shape).astype(np.float32)
        return (wide * scale).astype(self.scales.dtype)

    def codes(self, weight: Array, trained: Mapping[str, Array]) -> Array:
        """What QuantizeLinear makes of a weight, by the scale among `trained` if it is one."""
        scales = trained.get(self.scale, self.scales)
        wide = np.float64 if self.dtype == _NO_QUANTIZE else np.float32  # of more digits than 24
        code = weight.astype(wide) / self._spread(scales, weight.shape).astype(wide)
        if self.dtype.is_integer():
            code = np.rint(code)
        if self.zeros is not None:
            code = code + self._spread(self.zeros, weight.shape).astype(wide)
        return np.clip(code, float(self.dtype.min), float(self.dtype.max)).astype(
            self.dtype.numpy()
        )


def notes_of(names: Sequence[str]) -> list[str]:
    """The sentence that says how weights train that a file stores as integers."""
    if not names:
        return []
    others = f" and {len(names) - 1} other weights" if names[1:] else ""
    return [
        f"'{names[0]}'{others}: stored as integers, trained as floats that each step rounds; "
        "the saved file has integers again"
    ]


def as_floats(graph: ir.Graph, chosen: Callable[[str], bool]) -> dict[str, StoredCodes]:
    """Turn the chosen codes that DequantizeLinear alone reads into floats of their names, in place.

    Returns how the file stores each. Codes that several nodes read by different scales stay.
    """
    stored: dict[str, StoredCodes] = {}
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        if node.op_type == "DequantizeLinear" and node.inputs and node.inputs[0] is not None:
            readers.setdefault(node.inputs[0], []).append(node)
    for value, nodes in readers.items():
        codes, description = const_array(value), stored_codes(nodes[0])
        if codes is None or description is None or not codes.ndim or not chosen(value.name or ""):
            continue
        alike = all(n.inputs[1:] == nodes[0].inputs[1:] for n in nodes)
        alike &= len({str(dict(n.attributes)) for n in nodes}) == 1
        if not alike or {n for n, _ in value.uses()} != set(nodes) or value.is_graph_output():
            continue
        maker, name = value.producer(), str(value.name)
        if value.is_graph_input() or any(n.outputs[0].is_graph_output() for n in nodes):
            continue
        if maker is None:
            del graph.initializers[name]
        weight = add_initializer(graph, name, description.floats(codes))
        for node in nodes:
            _train_as(graph, node, weight, description)
        if maker is not None:
            graph.remove(maker, safe=True)
        stored[name] = description
    return stored


def stored_codes(node: ir.Node) -> StoredCodes | None:
    """How the codes that a DequantizeLinear reads are stored; None where that is not constant."""
    value, scale, *rest = [*node.inputs, None][:3]
    scales, zero = const_array(scale), rest[0]
    zeros = const_array(zero)
    if value is None or scale is None or scales is None or value.dtype is None:
        return None
    if zero is not None and zeros is None:
        return None
    attributes = node.attributes
    axis, block = attributes.get_int("axis", 1), attributes.get_int("block_size", 0)
    return StoredCodes(value.dtype, str(scale.name), scales, zeros, axis, block)


def _train_as(graph: ir.Graph, node: ir.Node, weight: ir.Value, stored: StoredCodes) -> None:
    """Let a DequantizeLinear read the codes of a float weight, or the weight take its place."""
    if stored.dtype == _NO_QUANTIZE:
        ir.convenience.replace_all_uses_with(node.outputs[0], weight)
        operands = [value for value in node.inputs[1:] if value is not None]
        graph.remove(node, safe=True)
        for value in operands:
            if value.is_initializer() and not (value.uses() or value.is_graph_output()):
                del graph.initializers[str(value.name)]
        return
    scale, zero = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
    if zero is None:  # it tells QuantizeLinear the type of the codes
        zeros = np.zeros(stored.scales.shape, stored.dtype.numpy())
        zero = add_initializer(graph, Names.of(graph).fresh(f"{weight.name}.zero"), zeros)
    op = Builder()
    attributes = {key: node.attributes[key].as_int() for key in ("axis", "block_size")
                  if key in node.attributes}  # fmt: skip
    codes = op.node(
        "QuantizeLinear", [weight, scale, zero], domain=node.domain, attributes=attributes
    )
    codes.type, codes.shape = ir.TensorType(stored.dtype), weight.shape
    graph.insert_before(node, op.nodes)
    node.replace_input_with(0, codes)

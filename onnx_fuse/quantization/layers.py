"""The layers of a model that may be quantized, and the reason why another one stays float."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from onnx_fuse.ir.build import const_array

PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""The operators whose weights are quantized, and their inputs."""
_TABLES = ("Gather", "Embedding")


@dataclass(frozen=True)
class Layer:
    """A node with a weight, and what becomes of it."""

    name: str
    """The node's name."""
    op: str
    weight: str
    """The name of its weight; "" where it multiplies two computed tensors."""
    to: str = "float"
    """The type that it is quantized to, or "float"."""
    why: str = ""
    """The reason for that."""
    error: float | None = None
    """How far its result is from the float model's, of the norm of that, in the whole model."""
    cost: float | None = None
    """The error at the outputs where this layer alone is quantized; None where not asked for."""


def layers(graph: ir.Graph, to: str, *, ends: bool, skip: Collection[str]) -> list[Layer]:
    """All products of a graph in its order, each with a type or with the reason why it has none.

    Args:
        graph: A graph whose nodes have names.
        to: int8, fp8 or int4-weights.
        ends: Whether the first and the last layers are quantized as well.
        skip: Names of nodes that stay float.
    """
    nodes = [node for node in graph if node.op_type in PRODUCTS and not node.domain]
    first, last = _at_inputs(graph), _at_outputs(graph)
    found = []
    for node in nodes:
        why = _obstacle(node, to)
        if not why and node.name in skip:
            why = "it was named to stay float"
        if not why and not ends and node in first:
            why = "a first layer: no other one comes before it (--ends)"
        if not why and not ends and node in last:
            why = "a last layer: no other one comes after it (--ends)"
        weight = node.inputs[1] if const_array(node.inputs[1]) is not None else None
        label = "" if weight is None else str(weight.name)
        found.append(
            Layer(
                str(node.name),
                node.op_type,
                label,
                "float" if why else to,
                why or "its weight is constant",
            )
        )
    return found


def _obstacle(node: ir.Node, to: str) -> str:
    """The reason why no file can hold a quantized form of the node, or ""."""
    weight = const_array(node.inputs[1])
    if weight is None:
        return "it multiplies two computed tensors"
    if weight.dtype != "float32":
        return f"its weight is {weight.dtype}, and the quantizer reads float32"
    if not weight.size:
        return "its weight is empty"
    if to == "int4-weights" and (node.op_type not in ("Gemm", "MatMul") or weight.ndim != 2):
        return "weights of 4 bits are matrices of Gemm and MatMul"
    if to != "int8" and node.op_type == "ConvTranspose":
        return "ConvTranspose is quantized to int8 only"
    return ""


def _weighted(node: ir.Node) -> bool:
    """Whether a node has weights: a product, or a look-up in a table."""
    table = node.op_type in _TABLES and const_array(node.inputs[0]) is not None
    product = node.op_type in PRODUCTS and const_array(node.inputs[1]) is not None
    return not node.domain and (table or product)


def _at_inputs(graph: ir.Graph) -> set[ir.Node]:
    """The nodes with weights whose data no other such node has been at."""
    behind: set[ir.Value] = set()
    """The values that nodes with weights have a part in."""
    first = set()
    for node in graph:
        later = any(v in behind for v in node.inputs)
        if _weighted(node) and not later:
            first.add(node)
        if later or _weighted(node):
            behind.update(node.outputs)
    return first


def _at_outputs(graph: ir.Graph) -> set[ir.Node]:
    """The nodes with weights of which no other one reads the result before the outputs."""
    behind: set[ir.Value] = set()
    """The values that a node with weights reads further on."""
    last = set()
    for node in reversed(graph):
        read_later = any(v in behind for v in node.outputs)
        if _weighted(node) and not read_later:
            last.add(node)
        if read_later or _weighted(node):
            behind.update(v for v in node.inputs if v is not None)
    return last

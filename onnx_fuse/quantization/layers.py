"""The layers of a model that may be quantized, and the reason why another one stays float."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import const_array

Values: TypeAlias = "Sequence[ir.Value | None]"
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
"""The operators whose weights are quantized, and their inputs."""


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

    Raises ModelError for a weight that is not finite, of a layer that is quantized.
    """
    nodes = [node for node in graph if node.op_type in PRODUCTS and not node.domain]
    first = _outermost(graph, lambda node: node.inputs, lambda node: node.outputs)
    last = _outermost(reversed(graph), lambda node: node.outputs, lambda node: node.inputs)
    found = []
    for node in nodes:
        why = _obstacle(node, to)
        if not why and node.name in skip:
            why = "it was named to stay float"
        if not why and not ends and node in first:
            why = "a first layer: no other one comes before it (--ends)"
        if not why and not ends and node in last:
            why = "a last layer: no other one comes after it (--ends)"
        weight, label = const_array(node.inputs[1]), ""
        if weight is not None and node.inputs[1] is not None:
            label = str(node.inputs[1].name)
            if not why and not np.isfinite(np.float32(weight)).all():
                raise ModelError(
                    f"the weight '{label}' of '{node.name}' is not finite: repair the file, or "
                    "leave the layer float (skip)"
                )
        result, reason = ("float", why) if why else (to, "its weight is constant")
        found.append(Layer(str(node.name), node.op_type, label, result, reason))
    return found


def _obstacle(node: ir.Node, to: str) -> str:
    """The reason why no file can hold a quantized form of the node, or ""."""
    weight = const_array(node.inputs[1])
    if weight is None:
        maker = node.inputs[1].producer() if node.inputs[1] is not None else None
        stored = maker is not None and maker.op_type == "DequantizeLinear"
        return "it is quantized already" if stored else "it multiplies two computed tensors"
    types = ("float32", "float16", "bfloat16")[: 3 if to == "int4-weights" else 1]
    if weight.dtype not in types:
        return f"its weight is {weight.dtype}, not float32"
    if not weight.size:
        return "its weight is empty"
    if to == "int4-weights" and (node.op_type not in ("Gemm", "MatMul") or weight.ndim != 2):
        return "weights of 4 bits are matrices of Gemm and MatMul"
    if to == "int8" and node.op_type == "MatMul" and weight.ndim > 2:
        return "its weights are several matrices, whose scales onnxruntime does not run"
    if to != "int8" and node.op_type == "ConvTranspose":
        return "ConvTranspose is quantized to int8 only"
    return ""


def _weighted(node: ir.Node) -> bool:
    """Whether a node has weights: a product, or a look-up in a table."""
    table = node.op_type == "Gather" and const_array(node.inputs[0]) is not None
    product = node.op_type in PRODUCTS and const_array(node.inputs[1]) is not None
    return not node.domain and (table or product)


def _outermost(
    nodes: Iterable[ir.Node], near: Callable[[ir.Node], Values], far: Callable[[ir.Node], Values]
) -> set[ir.Node]:
    """The nodes with weights that no other one lies before, on the way from their near ends."""
    behind: set[ir.Value | None] = set()
    found = set()
    for node in nodes:
        later = not behind.isdisjoint(set(near(node)) - {None})
        if _weighted(node) and not later:
            found.add(node)
        if later or _weighted(node):
            behind.update(far(node))
    return found


def channels(node: ir.Node, weight: Array) -> int:
    """The axis of a weight along which the channels of the result lie."""
    turned = node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
    if node.op_type == "Conv" or turned:
        return 0
    return weight.ndim - 1

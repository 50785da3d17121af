"""What stands between DequantizeLinear and QuantizeLinear, which stays float32 in 16 bits.

A product of codes is a sum of integers, and its epilogue makes the next codes in registers: to
round in between would cost instructions and digits. Memory holds none of these floats.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from onnx_fuse.ir.build import Builder
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.activations import ACTIVATIONS

CODES = (ir.DataType.INT8, ir.DataType.UINT8)
_ELEMENTWISE = {row.op_type for row in ACTIVATIONS.values()} | {
    "Add", "Clip", "Div", "Flatten", "MaxPool", "Mul", "Reshape", "Squeeze", "Sub", "Transpose",
    "Unsqueeze",
}  # fmt: skip
"""Elementwise operators, those that move elements, and the largest of codes, which is a code."""


def between_codes(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that read nothing but dequantized floats, weights and each other's results, all of
    which are quantized again; and each DequantizeLinear and QuantizeLinear at their ends.

    What else reads a dequantized float gets a DequantizeLinear of its own.
    """
    kept = {node: None for node in graph if _in_registers(node)}
    unsure = list(kept)
    while unsure:
        node = unsure.pop()
        if node in kept and not _surrounded(node, kept):
            del kept[node]
            unsure += _neighbours(node)
    ends: dict[ir.Node, None] = {}
    for node in kept:
        for read in node.inputs:
            source = read.producer() if read is not None else None
            if source is not None and source.op_type == "DequantizeLinear":
                ends[source] = None
        ends.update((use, None) for y in node.outputs for use in y.consumers() if use not in kept)
    for end in ends:
        others = [(n, i) for n, i in end.outputs[0].uses() if n not in kept]
        if end.op_type == "DequantizeLinear" and others:
            op = Builder()
            again = op.node(end.op_type, end.inputs, domain=end.domain, attributes=end.attributes)
            again.type, again.shape = end.outputs[0].type, end.outputs[0].shape
            for n, i in others:
                n.replace_input_with(i, again)
            graph.insert_after(end, op.nodes)
    return [*kept, *ends]


def _neighbours(node: ir.Node) -> Iterator[ir.Node]:
    makers = (v.producer() for v in node.inputs if v is not None)
    yield from (maker for maker in makers if maker is not None)
    yield from (use for y in node.outputs for use in y.consumers())


def _in_registers(node: ir.Node) -> bool:
    """Whether it is elementwise, or a product of codes by a kernel of integers."""
    if node.op_type in _ELEMENTWISE:
        return True
    name = FusedName.of(node.op_type)
    plain = not (name.norm or name.place or name.grad or name.exposed)
    if len(node.inputs) < 2 or not (
        node.op_type in ("Conv", "Gemm", "MatMul") or (plain and name.family in ("Conv", "Gemm"))
    ):
        return False
    makers = [v.producer() if v is not None else None for v in node.inputs[:2]]
    if any(m is None or m.op_type != "DequantizeLinear" for m in makers):
        return False
    codes = [m.inputs[0] for m in makers if m is not None]
    if any(q is None or q.dtype not in CODES for q in codes):
        return False
    held = codes[1] is not None and codes[1].const_value is not None
    return held and node.attributes.get_int("group", 1) == 1


def _surrounded(node: ir.Node, kept: dict[ir.Node, None]) -> bool:
    """Whether each float that it reads is dequantized or a weight or kept, and its results are
    quantized or kept.
    """
    for read in node.inputs:
        if read is None or read.dtype != ir.DataType.FLOAT or read.const_value is not None:
            continue
        source = read.producer()
        if source is None or not (source in kept or source.op_type == "DequantizeLinear"):
            return False
    for y in node.outputs:
        uses = list(y.consumers())
        if y.dtype != ir.DataType.FLOAT or y.is_graph_output() or not uses:
            return False
        if any(use.graph is not node.graph for use in uses):
            return False  # a body's QuantizeLinear is none of the graph's
        if any(use not in kept and use.op_type != "QuantizeLinear" for use in uses):
            return False
    return True

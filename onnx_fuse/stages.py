"""What follows a Program whose results decide about sizes: the nodes left, as models to run next.

A node whose sizes depend on data, and all behind it, wait for the program's results. They are a
model of their own, over tensors that stand on the device, which is lowered when it is run: small
integers that decide about sizes are inputs of it, whose values lowering asks for (`NeedsValues`).
A node that no further value helps runs on onnxruntime in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.context import Slot, captured, data_type, type_proto
from onnx_fuse.llir import Stage, Tensor
from onnx_fuse.onnx.build import subgraphs
from onnx_fuse.onnx.common import FUSE
from onnx_fuse.onnx.save import to_proto
from onnx_fuse.onnx.shapes import MAKES_SEQUENCES
from onnx_fuse.problem import ITEMSIZE

_OF_SEQUENCES = MAKES_SEQUENCES | {
    *("SequenceAt", "SequenceLength", "ConcatFromSequence"),
    *("OptionalHasElement", "StringConcat", "StringSplit", "StringNormalizer"),
}
"""Operators whose operands or results are no tensors of numbers."""

Dated = Callable[[onnx.ModelProto, Sequence[ir.Node]], None]


def stages(
    nodes: Sequence[ir.Node],
    stuck: Collection[ir.Node],
    slots: Mapping[ir.Value, Slot],
    contiguous: Callable[[Tensor], Tensor],
    opsets: Mapping[str, int],
    wanted: Sequence[str],
    dated: Dated,
) -> tuple[Stage, ...]:
    """The stages that run `nodes` (in order) and give the values named `wanted`.

    `stuck` are those that onnxruntime must run: all they read is there. Where strings or sequences
    pass between the nodes, onnxruntime runs them all.
    """
    if not nodes:
        return ()
    if any(_beyond_tensors(node, slots) for node in nodes):
        return (_stage(nodes, slots, contiguous, opsets, wanted, dated, host=True),)
    heads = [node for node in nodes if node in stuck]
    rest = [node for node in nodes if node not in stuck]
    read = {v.name for node in rest for v in (*node.inputs, *captured(node)) if v is not None}
    kept = [v.name for node in heads for v in node.outputs if v.name in read or v.name in wanted]
    parts = []
    if heads:
        ends = [str(name) for name in kept]
        parts.append(_stage(heads, slots, contiguous, opsets, ends, dated, host=True))
    if rest:
        made = {v.name for node in rest for v in node.outputs}
        ends = [name for name in wanted if name in made]
        parts.append(_stage(rest, slots, contiguous, opsets, ends, dated, host=False))
    return tuple(parts)


def _beyond_tensors(node: ir.Node, slots: Mapping[ir.Value, Slot]) -> bool:
    """Whether strings, sequences or optionals pass through the node."""
    graphs = [g for a in node.attributes.values() for g in subgraphs(a)]
    for graph in graphs:
        if any(_beyond_tensors(inner, slots) for inner in graph):
            return True
    if node.op_type in _OF_SEQUENCES or node.domain == "ai.onnx.ml":
        return True
    for value in (*node.inputs, *node.outputs):
        if value is None:
            continue
        slot = slots.get(value)
        if value.dtype == ir.DataType.STRING or isinstance(value.type, ir.SequenceType):
            return True
        if slot is not None and slot.host is not None and slot.host.dtype.name not in ITEMSIZE:
            return True
        if slot is not None and slot.tensor is not None and slot.tensor.dtype not in ITEMSIZE:
            return True
    return False


def _stage(
    nodes: Sequence[ir.Node],
    slots: Mapping[ir.Value, Slot],
    contiguous: Callable[[Tensor], Tensor],
    opsets: Mapping[str, int],
    wanted: Sequence[str],
    dated: Dated,
    *,
    host: bool,
) -> Stage:
    """One model of `nodes`: what is known is an initializer of it, all else it reads an input."""
    inside = {v.name for node in nodes for v in node.outputs}
    inputs: dict[str, Tensor | None] = {}
    known: dict[str, np.ndarray] = {}
    infos: list[onnx.ValueInfoProto] = []
    for node in nodes:
        for value in (*node.inputs, *captured(node)):
            name = value.name if value is not None else None
            if value is None or not name or name in inside or name in inputs or name in known:
                continue
            slot = slots[value]
            if slot.host is not None:
                known[name] = slot.host
                continue
            inputs[name] = None if slot.tensor is None else contiguous(slot.tensor)
            info = onnx.ValueInfoProto(name=name)
            if slot.tensor is not None:
                info.type.CopyFrom(type_proto(data_type(slot.tensor.dtype), slot.tensor.shape))
            infos.append(info)
    graph = onnx.helper.make_graph(
        [ir.serde.serialize_node(node) for node in nodes],
        "stage",
        infos,
        [onnx.ValueInfoProto(name=name) for name in wanted],
    )
    for name, array in known.items():
        tensor = ir.serde.serialize_tensor(ir.tensor(np.asarray(array, order="C"), name=name))
        graph.initializer.append(tensor)
    imports = [onnx.helper.make_opsetid(d, v) for d, v in opsets.items()]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    if host:
        model = to_proto(ir.serde.deserialize_model(model))
        dated(model, nodes)
    elif not any(node.domain == FUSE for node in nodes):
        kept = [o for o in model.opset_import if o.domain != FUSE]
        del model.opset_import[:]
        model.opset_import.extend(kept)
    return Stage(model.SerializeToString(), tuple(inputs.items()), tuple(wanted), host)

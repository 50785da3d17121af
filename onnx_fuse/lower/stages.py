"""The stages behind a Program whose results decide about sizes: models of the nodes left.

A node whose sizes depend on data, and all behind it, wait for the program's results. They are a
model of their own, over tensors that stand on the device, which is lowered when it is run: small
integers that decide about sizes are inputs of it, whose values lowering asks for (`NeedsValues`).
A node that no further value helps runs on onnxruntime in between. A Loop of which nobody knows
how often it runs is a stage whose model is one pass: the host reads one condition a pass, and what
passes hand on stays on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.importer.save import to_proto
from onnx_fuse.importer.shapes import MAKES_SEQUENCES
from onnx_fuse.ir.build import all_nodes, captured, reads, required, subgraphs
from onnx_fuse.ir.constants import CANONICAL_OPSET, FUSE
from onnx_fuse.lower.context import Slot, data_type, type_proto
from onnx_fuse.lower.control import Control
from onnx_fuse.ops.bodies import carries_body
from onnx_fuse.program.call import Loop, Stage, Tensor
from onnx_fuse.program.problem import ITEMSIZE

_OF_SEQUENCES = MAKES_SEQUENCES | {
    *("SequenceAt", "SequenceLength", "ConcatFromSequence"),
    *("OptionalHasElement", "StringConcat", "StringSplit", "StringNormalizer"),
}
"""Operators whose operands or results are no tensors of numbers."""


def stages(low: Control, outputs: Sequence[str]) -> tuple[Stage, ...]:
    """The stages that run the nodes that are left (`low.later`) and give the values `outputs`.

    No lowering helps those that are stuck: all they read is there. They run on onnxruntime, a Loop
    pass by pass. Where strings or sequences pass between the nodes, onnxruntime runs them all.
    """
    nodes, stuck = low.later, low.stuck
    if not nodes:
        return ()
    if any(beyond_tensors(node, low.slots) for node in nodes):
        return (_stage(low, nodes, outputs, host=True),)
    rest = [node for node in nodes if node not in stuck]
    read = {v.name for node in rest for v in reads(node) if v is not None}
    loops = [node for node in nodes if node in stuck and by_passes(node)]
    heads = [node for node in nodes if node in stuck and node not in loops]
    parts = [_loop(low, node, read.union(outputs)) for node in loops]
    if heads:
        ends = [v.name or "" for node in heads for v in node.outputs]
        ends = [name for name in ends if name in read or name in outputs]
        parts.append(_stage(low, heads, ends, host=True))
    if rest:
        results = {v.name for node in rest for v in node.outputs}
        ends = [name for name in outputs if name in results]
        parts.append(_stage(low, rest, ends, host=False))
    return tuple(parts)


def beyond_tensors(node: ir.Node, slots: Mapping[ir.Value, Slot]) -> bool:
    """Whether strings, sequences or optionals pass through the node."""
    graphs = [g for a in node.attributes.values() for g in subgraphs(a)]
    for graph in graphs:
        if any(beyond_tensors(inner, slots) for inner in graph):
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


def _stage(low: Control, nodes: Sequence[ir.Node], names: Sequence[str], *, host: bool) -> Stage:
    """A model of `nodes`: known values are its initializers, all else that it reads its inputs."""
    inside = {v.name for node in nodes for v in node.outputs}
    outer = [v for node in nodes for v in reads(node) if v is not None]
    inputs, constants = _given(low, [v for v in outer if v.name not in inside])
    infos = [_info(name, tensor) for name, tensor in inputs.items()]
    graph = onnx.helper.make_graph(
        [ir.serde.serialize_node(node) for node in nodes],
        "stage",
        infos,
        [onnx.ValueInfoProto(name=name) for name in names],
    )
    graph.initializer.extend(_tensor(name, array) for name, array in constants.items())
    model = _model(low, graph, nodes)
    if host:
        model = to_proto(ir.serde.deserialize_model(model))
        use_oldest_opset(low, model, nodes)
    elif not model.functions:
        opsets = [o for o in model.opset_import if o.domain != FUSE]
        del model.opset_import[:]
        model.opset_import.extend(opsets)
    return Stage(model.SerializeToString(), tuple(inputs.items()), tuple(names), host)


def _model(low: Control, graph: onnx.GraphProto, nodes: Iterable[ir.Node]) -> onnx.ModelProto:
    imports = [onnx.helper.make_opsetid(d, v) for d, v in low.opsets.items()]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=10)
    calls = any(map(carries_body, all_nodes(nodes)))  # onnxruntime may run this model, too
    return to_proto(ir.serde.deserialize_model(model), shapes=False) if calls else model


def _given(
    low: Control, values: Sequence[ir.Value]
) -> tuple[dict[str, Tensor | None], dict[str, np.ndarray]]:
    """The tensors that a stage reads (None: not made yet), and the values that are known."""
    inputs: dict[str, Tensor | None] = {}
    constants: dict[str, np.ndarray] = {}
    for value in values:
        name, slot = value.name or "", low.slots[value]
        if not name or name in inputs or name in constants:
            continue
        if slot.host is not None:
            constants[name] = slot.host
        else:
            inputs[name] = None if slot.tensor is None else low.contiguous(slot.tensor)
    return inputs, constants


def _info(name: str, tensor: Tensor | None) -> onnx.ValueInfoProto:
    info = onnx.ValueInfoProto(name=name)
    if tensor is not None:
        info.type.CopyFrom(type_proto(data_type(tensor.dtype), tensor.shape))
    return info


def _tensor(name: str, array: np.ndarray) -> onnx.TensorProto:
    if array.dtype.kind in "OSU":
        strings = [s if isinstance(s, bytes) else str(s).encode() for s in array.reshape(-1)]
        return onnx.TensorProto(
            name=name, data_type=onnx.TensorProto.STRING, dims=array.shape, string_data=strings
        )
    return ir.serde.serialize_tensor(ir.tensor(np.asarray(array, order="C"), name=name))


# ---- loops ---------------------------------------------------------------------------------------


def by_passes(node: ir.Node) -> bool:
    """Whether a stage can run the node pass by pass: a Loop that says what it stacks."""
    if node.op_type != "Loop" or node.domain:
        return False
    body = node.attributes["body"].as_graph()
    return all(v.dtype is not None for v in body.outputs[len(node.inputs) - 1 :])


def _loop(low: Control, node: ir.Node, wanted: Collection[str | None]) -> Stage:
    """The stage of a Loop: a model of its body, with what the body reads of the outer graph."""
    body = node.attributes["body"].as_graph()
    states = node.inputs[2:]
    trips, condition = (v if v is not None and v.name else None for v in node.inputs[:2])
    start = [v for v in states if v is not None]
    types, values = _given(low, [v for v in (trips, condition, *start) if v is not None])
    outer, constants = _given(low, captured(node))
    proto = ir.serde.serialize_graph(body)
    computed = {name for n in proto.node for name in n.output}
    ends: list[str] = []
    for i, output in enumerate(v.name or "" for v in body.outputs):
        if output not in computed or output in ends:  # an output of its own
            ends.append(f"{node.name or node.outputs[0].name} result {i}")
            proto.node.append(onnx.helper.make_node("Identity", [output], [ends[-1]]))
        else:
            ends.append(output)
    first = [v.name or "" for v in body.inputs]
    graph = onnx.helper.make_graph(
        list(proto.node),
        "pass",
        [*(_info(n, None) for n in first), *(_info(n, t) for n, t in outer.items())],
        [onnx.ValueInfoProto(name=name) for name in ends],
        [*proto.initializer, *(_tensor(n, a) for n, a in constants.items())],
    )
    model = _model(low, graph, body)
    results = [i for i, v in enumerate(node.outputs) if v.name and v.name in wanted]
    loop = Loop(
        inputs=tuple(first),
        outputs=tuple(ends),
        trips="" if trips is None else trips.name or "",
        condition="" if condition is None else condition.name or "",
        start=tuple(v.name or "" for v in start),
        known=values,
        results=tuple(results),
        empty=tuple(_empty(v) for v in body.outputs[1 + len(start) :]),
    )
    names = tuple(node.outputs[i].name or "" for i in results)
    return Stage(model.SerializeToString(), tuple((outer | types).items()), names, False, loop)


def _empty(value: ir.Value) -> np.ndarray:
    """The stack of no passes; its unknown sizes are 0, as in onnxruntime."""
    row = [d if isinstance(d, int) else 0 for d in value.shape or ()]
    return np.zeros((0, *row), required(value.dtype).numpy())


def use_oldest_opset(low: Control, model: onnx.ModelProto, nodes: Sequence[ir.Node]) -> None:
    """Import the oldest opset that has these nodes' operators: onnxruntime may lag behind."""
    graphs = [g for n in nodes for a in n.attributes.values() for g in subgraphs(a)]
    if graphs or any(map(carries_body, nodes)):
        return
    since = [
        oldest(node, [low.dtype(v) for v in node.inputs], low.opset)
        for node in nodes
        if node.domain == "" and onnx.defs.has(node.op_type, low.opset)
    ]
    for entry in model.opset_import:
        if entry.domain == "" and since:
            entry.version = max(since)


_TYPE_NAMES = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}


def oldest(node: ir.Node, dtypes: Sequence[ir.DataType | None], opset: int) -> int:
    """The oldest opset that has the node's operator, where later versions only allow more types."""
    schema = onnx.defs.get_schema(node.op_type, opset, "")

    def same(a: onnx.defs.OpSchema, b: onnx.defs.OpSchema) -> bool:
        ends = [[(p.name, p.option) for p in (*s.inputs, *s.outputs)] for s in (a, b)]
        return bool(
            ends[0] == ends[1] and a.doc == b.doc and set(a.attributes) == set(b.attributes)
        )

    def takes(schema: onnx.defs.OpSchema) -> bool:
        variadic = [schema.inputs[min(i, len(schema.inputs) - 1)] for i in range(len(dtypes))]
        types = [d and f"tensor({_TYPE_NAMES.get(d, d.name.lower())})" for d in dtypes]
        return all(w is None or w in p.types for w, p in zip(types, variadic, strict=True))

    while schema.since_version > CANONICAL_OPSET:
        if not onnx.defs.has(node.op_type, schema.since_version - 1):
            break
        before = onnx.defs.get_schema(node.op_type, schema.since_version - 1, "")
        if not (same(before, schema) and takes(before)):
            break
        schema = before
    return int(schema.since_version)

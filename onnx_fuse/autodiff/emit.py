"""Nodes of a gradient as they are made; nodes that become their bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from onnx_fuse.errors import ModelError
from onnx_fuse.importer import contrib
from onnx_fuse.importer.save import fused_function
from onnx_fuse.importer.types import element_type
from onnx_fuse.ir.actual_sizes import correct_types
from onnx_fuse.ir.build import Builder, detach, extent, required, subgraphs
from onnx_fuse.ir.constants import one_line
from onnx_fuse.ir.copying import Copier, replace_node
from onnx_fuse.ir.names import Names
from onnx_fuse.ops.bodies import carries_body
from onnx_fuse.ops.recurrent import GATES
from onnx_fuse.ops.rnn_unrolled import Written, activations
from onnx_fuse.ops.shape_ops import Writer, fail, may_be_float, text

CombinesGradients: TypeAlias = Callable[[ir.Node], bool]
"""Whether kernels serve the gradients of a fused float32 node better than those of its parts."""


class Emitter(Writer):
    """A builder that names and types each node it makes, and makes one node of equal ones.

    `fused`: rules may answer with operators of ours where kernels have them; a fused node in
    float32 that is not `whole` is differentiated by its parts then.
    """

    def __init__(
        self,
        model: ir.Model,
        names: Names | None = None,
        fused: bool = False,
        whole: CombinesGradients | None = None,
    ) -> None:
        super().__init__()
        self.fused, self.whole = fused, whole
        self.opset: int = model.graph.opset_imports[""]
        self.stem = "grad"
        self.active: set[ir.Value] = set()
        self._imports = [
            onnx.helper.make_opsetid(domain, version)
            for domain, version in model.graph.opset_imports.items()
        ]
        self._seen: dict[Any, ir.Node] = {}
        # of a fused node's outputs, by the operator, its attributes and the types of its inputs
        self._types: dict[tuple[Any, ...], list[onnx.TypeProto]] = {}
        self.names = names or Names()
        self.names.add(model.graph)
        self.fresh = self.names.fresh
        for node in model.graph:
            if node.op_type == "Shape" and not node.domain:
                self._seen.setdefault(_key(node), node)

    def node(self, op_type: str, inputs: Sequence[Any], **keywords: Any) -> Any:
        """Emit a node, or return the results of an equal one that was emitted before."""
        result = super().node(op_type, inputs, **keywords)
        node = self.nodes.pop()
        # a node whose outputs the caller names is never merged with an equal one
        key = _key(node) if isinstance(keywords.get("outputs", 1), int) else None
        same = self._seen.get(key) if key is not None else None
        if same is not None:
            detach([node])  # or it would stay among the uses
            return same.outputs[0] if len(same.outputs) == 1 else tuple(same.outputs)
        if key is not None:
            self._seen[key] = node
        self.adopt(node)
        self.nodes.append(node)
        return result

    def adopt(self, node: ir.Node) -> None:
        """Give a new node and its outputs names and types."""
        node.name = node.name or self.fresh(f"{self.stem}/{node.op_type}")
        for value in node.outputs:
            value.name = value.name or self.fresh(f"{self.stem}/{node.op_type}")
        types = self._infer(node)
        like = next((v.dtype for v in node.inputs if may_be_float(v) and v is not None), None)
        for value in node.outputs:
            inferred = types.get(value.name or "")
            if inferred is not None:
                value.type = value.type or ir.serde.deserialize_type_proto_for_type(inferred)
                if value.shape is None:
                    value.shape = ir.serde.deserialize_type_proto_for_shape(inferred)
            if value.dtype is None and (
                dtype := element_type(node, value.index() or 0, self.opset)
            ):
                value.dtype = dtype
            if value.dtype is None and node.domain and like is not None:
                value.dtype = like

    def wants(self, value: ir.Value) -> bool:
        """Whether the gradient of an input is asked for: for rules that can save work of size."""
        return value in self.active

    def _infer(self, node: ir.Node) -> dict[str, onnx.TypeProto]:
        """Types of the outputs by the operator's own inference, which takes some 30 µs."""
        types, data = {}, {}
        for value in node.inputs:
            if value is None:
                continue
            if value.type is None:
                return {}
            types[value.name or ""] = _type_proto(value)
            constant = ir.convenience.get_const_tensor(value)  # of a Constant's output too
            if constant is not None and constant.size <= 64:
                data[value.name or ""] = ir.serde.serialize_tensor(constant)
        try:
            if carries_body(node):
                return self._infer_body(node, types)
            schema = onnx.defs.get_schema(node.op_type, self.opset, node.domain)
            proto = ir.serde.serialize_node(node)
            inferred: dict[str, onnx.TypeProto] = onnx.shape_inference.infer_node_outputs(
                schema, proto, types, data, None, self._imports
            )
            correct_types(proto, types, data, inferred, write=False)
            return inferred
        except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError):
            return {}
        except onnx.checker.ValidationError as error:  # what a wrongly typed model leads to
            raise ModelError(f"the gradient needs {node.op_type}: {one_line(error)}") from error

    def _infer_body(
        self, node: ir.Node, types: Mapping[str, onnx.TypeProto]
    ) -> dict[str, onnx.TypeProto]:
        """Give the outputs the element types that the function body has."""
        bound = [v for v in node.inputs if v is not None]
        attributes = list(ir.serde.serialize_node(node).attribute)
        key = (
            *(node.domain, node.op_type, tuple(repr(v.type) for v in bound)),
            *(attribute.SerializeToString() for attribute in attributes),
        )
        inferred = self._types.get(key)
        if inferred is None:
            body = fused_function(node.op_type, self.opset, domain=node.domain)
            inferred = onnx.shape_inference.infer_function_output_types(
                ir.serde.serialize_function(body), [types[v.name or ""] for v in bound], attributes
            )
            self._types[key] = inferred
        for proto in inferred:
            proto.tensor_type.ClearField("shape")
        return {v.name or "": proto for v, proto in zip(node.outputs, inferred, strict=True)}


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    ir.serde.serialize_type_into(proto, required(value.type))
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    return proto


def _key(node: ir.Node) -> Any:
    """A key that is equal for nodes that compute the same; None for those that are never shared."""
    attributes = []
    for name, attribute in sorted(node.attributes.items()):
        value = attribute.value
        if attribute.type == ir.AttributeType.TENSOR:
            if value.size > 256:
                return None
            value = (value.dtype, tuple(value.shape), value.tobytes())
        elif isinstance(value, list | tuple):
            value = tuple(value)
        elif not isinstance(value, str | int | float):
            return None
        attributes.append((name, value))
    inputs = tuple(map(id, node.inputs))
    return node.domain, node.op_type, inputs, tuple(attributes), len(node.outputs)


def expand(op: Emitter, node: ir.Node) -> list[ir.Node] | None:
    """Replace `node` by the nodes of its function body, which are returned; None without a body.

    Raises contrib.Unwritable where a contrib node has none.
    """
    if contrib.lookup(node) is not None:
        op.stem = node.name or node.op_type
        new_nodes, written = contrib.write(node)
        for inner in new_nodes:
            inner.metadata_props.update(node.metadata_props)
            op.adopt(inner)
        replace_node(node, new_nodes, written)
        return new_nodes
    if node.op_type in GATES and not node.domain:
        return _as_scans(op, node)
    function = _body(node, op.opset)
    if function is None:
        return None
    if any(subgraphs(a) for inner in function for a in inner.attributes.values()):
        raise fail(node, "its body holds a subgraph")
    op.stem = node.name or node.op_type
    copier = Copier.of_call(
        function, node.inputs, node.attributes, props=node.metadata_props,
        fresh=lambda name: None, names_nodes=True,
    )  # fmt: skip
    copies = [copy for inner in function for copy in copier.copy(inner)]
    for copy in copies:
        op.adopt(copy)
    results = copier.read(function.outputs[: len(node.outputs)], "its outputs")
    replace_node(node, copies, results)
    return copies


def _as_scans(op: Emitter, node: ir.Node) -> list[ir.Node] | None:
    """Replace a recurrent node by Scans of its steps; None where its activations are not plain."""
    count = 2 if text(node, "direction", "forward") == "bidirectional" else 1
    acts = activations(node, count)
    if acts is None:
        return None
    op.stem = node.name or node.op_type
    written = Written(Builder(), node, acts)
    for inner in written.op.nodes:
        inner.metadata_props.update(node.metadata_props)
        if inner.op_type != "Scan":
            op.adopt(inner)
            continue
        body = inner.attributes["body"].as_graph()
        states = len(inner.inputs) - inner.attributes["num_scan_inputs"].as_int()
        for i, formal in enumerate(body.inputs):
            operand = required(inner.inputs[i])
            formal.name = op.fresh(f"{op.stem}/step")
            formal.type = operand.type
            if operand.shape is not None:
                formal.shape = ir.Shape(operand.shape[1:]) if i >= states else operand.shape
        for each in body:
            op.adopt(each)
        for i, (value, end) in enumerate(zip(inner.outputs, body.outputs, strict=True)):
            value.type = end.type
            if i < states:  # a state keeps its shape
                value.shape = end.shape = body.inputs[i].shape
            elif end.shape is not None:
                value.shape = ir.Shape([extent(inner.inputs[states], 0), *end.shape])
        op.adopt(inner)
    replace_node(node, written.op.nodes, written.results)
    return written.op.nodes


def _body(node: ir.Node, opset: int) -> ir.Function | None:
    """The body of one of our ops, or the one the ONNX standard gives for an operator of its own."""
    if carries_body(node):
        return fused_function(node.op_type, opset, domain=node.domain)
    if node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)
    plain, by_types = (
        schema.function_opset_versions,
        schema.context_dependent_function_opset_versions,
    )
    versions = [v for v in (plain or by_types) if v <= opset]
    if not versions:
        return None
    if plain:
        data = schema.get_function_with_opset_version(max(versions))
    else:
        typed = (_type_proto(v) if v is not None and v.type else None for v in node.inputs)
        types = [(proto or onnx.TypeProto()).SerializeToString() for proto in typed]
        call = ir.serde.serialize_node(node).SerializeToString()
        data = schema.get_context_dependent_function_with_opset_version(max(versions), call, types)
    if not data:
        return None
    function = onnx.FunctionProto.FromString(data)
    # outputs the node does not ask for, the body need not make
    computed = {name for inner in function.node for name in inner.output}
    while function.output and function.output[-1] not in computed:
        function.output.pop()
    return ir.serde.deserialize_function(function)


def roots(graph: ir.Graph) -> list[ir.Value]:
    """The inputs and initializers of a graph."""
    return [*graph.inputs, *graph.initializers.values()]

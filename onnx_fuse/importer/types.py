"""Element types by the operators' own type constraints, where shape inference says nothing.

And of onnxruntime's operators of blocked channels (com.microsoft.nchwc), which the files have that
it optimized for one CPU: the standard has none of them.

Inference gives up on a node whole: on GroupNormalization with a dynamic channel axis, whose
function needs the size, not even the element type of its output is told, nor that of any node
after it. The type needs no size: the schema says which input it follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import onnx
import onnx_ir as ir

from onnx_fuse.importer.inference import inferred
from onnx_fuse.ir.actual_sizes import infer_actual
from onnx_fuse.ir.build import all_nodes, extents, outer_values
from onnx_fuse.ir.constants import FUSE

_ELEMENT = {
    f"tensor({t.name.lower()})": t
    for t in ir.DataType
    if t not in (ir.DataType.UNDEFINED, ir.DataType.STRING)
}


def _keeps_shape(node: ir.Node) -> bool:
    """Whether inference is silent about a node whose output has the shape of its input.

    A fused operator whose body is a GroupNormalization is one, as that is.
    """
    if node.domain == FUSE:
        return node.overload == "newer" and node.op_type.startswith("GroupNorm")
    return node.op_type == "GroupNormalization" and not node.domain


READ_BY_INFERENCE = 1000  # bytes of a constant that may be axes or a shape
NCHWC = "com.microsoft.nchwc"


def _blocked_shape(node: ir.Node, x: ir.Shape) -> list[int | ir.SymbolicDim | None] | None:
    """The output shape, as far as known, of an operator on [N, C, H, W] in blocks of channels."""
    if len(x) != 4:
        return None
    match node.op_type:
        case "ReorderInput":  # C is rounded up to whole blocks, whose length is the CPU's
            return [x[0], None, *(x[1:3] if _attribute(node, "channels_last") else x[2:])]
        case "ReorderOutput":
            channels = _attribute(node, "channels")
            if _attribute(node, "channels_last"):
                return [x[0], *x[2:], channels]
            return [x[0], channels, *x[2:]]
        case "GlobalAveragePool" | "GlobalMaxPool":
            return [x[0], x[1], 1, 1]
    return [x[0], None, None, None]


def _attribute(node: ir.Node, name: str) -> int:
    return node.attributes.get_int(name, 0)


def element_type(node: ir.Node, index: int, opset: int) -> ir.DataType | None:
    """The element type of output `index` of a standard operator, from those of its inputs.

    None where the schema does not fix it, or the inputs' types are unknown.
    """
    if node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
        return None
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    if not schema.outputs:
        return None
    formal = schema.outputs[min(index, len(schema.outputs) - 1)]
    if not formal.is_homogeneous:
        return None
    name = formal.type_str
    for i, value in enumerate(node.inputs):
        if value is None or value.dtype is None or not schema.inputs:
            continue
        slot = schema.inputs[min(i, len(schema.inputs) - 1)]
        if slot.type_str == name and slot.is_homogeneous and isinstance(value.type, ir.TensorType):
            return value.dtype
    allowed = [name] if name.startswith("tensor(") else []
    for constraint in schema.type_constraints:
        if constraint.type_param_str == name:
            allowed = list(constraint.allowed_type_strs)
    return _ELEMENT.get(allowed[0]) if len(allowed) == 1 else None


def complete_types(nodes: Iterable[ir.Node], opset: int) -> bool:
    """Give outputs without a type one, in the order of the nodes; whether a shape was found too.

    A new shape is worth another inference: what follows may depend on it.
    """
    changed = False
    for node in nodes:
        if node.domain == NCHWC:
            changed = _complete_blocked(node) or changed
        if node.op_type == "Loop" and not node.domain:
            changed = _begin_loop(node, opset) or _complete_loop(node) or changed
        for i, value in enumerate(node.outputs):
            if value.type is None and (dtype := element_type(node, i, opset)) is not None:
                value.type = ir.TensorType(dtype)
        x = node.inputs[0] if node.inputs else None
        if _keeps_shape(node) and x is not None:
            y = node.outputs[0]
            y.type = y.type or x.type
            if y.shape is None and x.shape is not None:
                y.shape, changed = x.shape.copy(), True
    return changed


def _begin_loop(node: ir.Node, opset: int) -> bool:
    """Give the states in a Loop's body types and shapes where the file does not; whether it could.

    The type is that of the first value. So are the sizes, or else the rank, that the body then
    gives the state again: it gives them at every step after that.
    """
    body = node.attributes["body"].as_graph()
    pairs = list(zip(node.inputs[2:], body.inputs[2:], node.outputs, strict=False))
    changed = False
    forms: dict[int, list[ir.Shape]] = {}
    for k, (first, before, last) in enumerate(pairs):
        for value in (before, last):
            if value.type is None and first is not None and isinstance(first.type, ir.TensorType):
                value.type, changed = ir.TensorType(first.type.dtype), True
        if before.shape is None and first is not None and first.shape is not None:
            forms[k] = [first.shape.copy(), ir.Shape([None] * len(first.shape))]
    while forms:
        for k, (form, *_) in forms.items():
            pairs[k][1].shape = form
        after = shapes_of_body(body, opset)[1:]
        bad = [k for k, (form, *_) in forms.items() if not _fits_form(form, after[k])]
        for k in () if bad else forms:
            pairs[k][2].shape = pairs[k][2].shape or forms[k][0].copy()
        if not bad:
            return True
        for k in bad:
            forms[k].pop(0)
            pairs[k][1].shape = None
        forms = {k: each for k, each in forms.items() if each}
    return changed


def _fits_form(form: ir.Shape, shape: ir.Shape | None) -> bool:
    if shape is None or len(shape) != len(form):
        return False
    sizes = zip(extents(form), extents(shape), strict=True)
    return all(a is None or a == b for a, b in sizes)


def _complete_loop(node: ir.Node) -> bool:
    """Give the states that a Loop ends with a shape, which inference leaves open; whether it could.

    A state keeps its rank where its first value, the body's input and the body's output all have
    it. It keeps its sizes where the first value and the body's output have the same ones.
    """
    body = node.attributes["body"].as_graph()
    states = list(
        zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], node.outputs, strict=False)
    )
    shapes = [
        [v.shape for v in (first, before, after) if v is not None and v.shape is not None]
        for first, before, after, _ in states
    ]
    same = all(
        len(set(dims) - {None}) < 2
        for of_state in shapes
        if len({len(shape) for shape in of_state}) == 1
        for dims in zip(
            *([d if isinstance(d, int) else None for d in s] for s in of_state), strict=True
        )
    )
    changed = False
    for of_state, (*_, y) in zip(shapes, states, strict=True):
        if y.shape is not None or len(of_state) < 3 or len({len(shape) for shape in of_state}) > 1:
            continue
        first, _, after = of_state
        sizes = [
            d if same and isinstance(d, int) and d == other else None
            for d, other in zip(first, after, strict=True)
        ]
        y.shape, changed = ir.Shape(sizes), True
    return changed


def shapes_of_body(body: ir.Graph, opset: int, each: int = 0) -> list[ir.Shape | None]:
    """The shapes of a body's outputs by those of what it reads, whatever the file calls them.

    Operators of other domains have results of unknown shapes. `each` is every open size.
    """
    graph = ir.serde.serialize_graph(body)
    local = {v for n in body for v in n.outputs} | {*body.inputs, *body.initializers.values()}
    outer = [v for v in outer_values([body]) if v.name]
    graph.input.extend(map(ir.serde.serialize_value, outer))
    constants = (v.const_value for v in outer if v.const_value is not None)
    axes = [ir.serde.serialize_tensor(t) for t in constants if t.nbytes <= READ_BY_INFERENCE]
    graph.initializer.extend(axes)
    inner = {name for value in local - set(body.outputs) if (name := value.name)}
    del graph.value_info[:]
    for output in graph.output:
        if output.name not in inner:
            output.type.tensor_type.ClearField("shape")
    for size in (d for v in graph.input if each for d in v.type.tensor_type.shape.dim):
        size.dim_value = size.dim_value if size.HasField("dim_value") else each
    domains = {n.domain: 1 for n in all_nodes(body)} | {"": opset}
    opsets = [onnx.helper.make_opsetid(*each) for each in domains.items()]
    model = onnx.helper.make_model(graph, opset_imports=opsets)
    try:
        results = infer_actual(model, partial(inferred, data_prop=False)).graph.output
    except (onnx.shape_inference.InferenceError, RuntimeError, ValueError):
        return [None] * len(body.outputs)  # a body that contradicts itself
    shape_of = ir.serde.deserialize_type_proto_for_shape
    return [shape_of(y.type) if y.type.tensor_type.HasField("shape") else None for y in results]


def _complete_blocked(node: ir.Node) -> bool:
    x, y = node.inputs[0], node.outputs[0]
    if x is None or x.dtype is None or x.shape is None or y.shape is not None:
        return False
    shape = _blocked_shape(node, x.shape)
    y.type, y.shape = ir.TensorType(x.dtype), None if shape is None else ir.Shape(shape)
    return shape is not None

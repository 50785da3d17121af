"""The backward of an ONNX graph, as ONNX: one reverse walk over the rules of `ops`.

`backward` extends a model in place; `gradient` makes the file that `onnx-fuse gradient` writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.onnx import contrib
from onnx_fuse.onnx.build import Builder, const_array, subgraphs
from onnx_fuse.onnx.common import FUSE, Model, one_line
from onnx_fuse.onnx.load import load
from onnx_fuse.onnx.save import fused_function
from onnx_fuse.onnx.shapes import infer_shapes
from onnx_fuse.onnx.types import element_type
from onnx_fuse.ops import NoGrad, OpDef, lookup
from onnx_fuse.ops.derive import fail, is_float, text, unbroadcast, zeros_like
from onnx_fuse.ops.loss import LOSSES, label_value
from onnx_fuse.ops.rewrite import CONSTANT, rank
from onnx_fuse.ops.update import PREVIEW, expand_standard_updates
from onnx_fuse.passes.canonicalize import canonicalize
from onnx_fuse.passes.constants import lift_parameters
from onnx_fuse.passes.leaf_norm import without_rows
from onnx_fuse.passes.params import parts, unpack_values

# The rules of these answer in a broadcast shape (elementwise: the output's), which the walker sums
# back; all other rules answer in the shape of the input.
ELEMENTWISE = frozenset(
    (
        *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Mean"),
        *("Where", "PRelu", "Expand"),
    )
)
MATRIX = frozenset(("MatMul", "Gemm"))


Whole: TypeAlias = Callable[[ir.Node], bool]
"""Whether kernels serve the gradients of a fused float32 node better than those of its parts."""

# ---- emit ------------------------------------------------------------------------------------


class Emitter(Builder):
    """A Builder that names and types each node it makes, and makes one node of equal ones.

    `fused`: rules may answer with operators of ours where kernels have them; a fused node in
    float32 that is not `whole` is differentiated by its parts then.
    """

    def __init__(
        self,
        model: ir.Model,
        taken: set[str | None] | None = None,
        fused: bool = False,
        whole: Whole | None = None,
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
        self.taken = set() if taken is None else taken
        self.taken.update(v.name for v in (*model.graph.inputs, *model.graph.initializers.values()))
        for node in ir.traversal.RecursiveGraphIterator(model.graph):
            self.taken.update((node.name, *(v.name for v in node.outputs)))
        for node in model.graph:
            if node.op_type == "Shape" and not node.domain:
                self._seen.setdefault(_key(node), node)

    def node(self, op_type: str, inputs: Sequence[Any], **keywords: Any) -> Any:
        result = super().node(op_type, inputs, **keywords)
        node = self.nodes.pop()
        # a node whose outputs the caller names stands for itself
        key = _key(node) if isinstance(keywords.get("outputs", 1), int) else None
        same = self._seen.get(key) if key is not None else None
        if same is not None:
            for i, value in enumerate(node.inputs):
                if value is not None:
                    node.replace_input_with(i, None)  # or it would stay among the uses
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
        like = next((v.dtype for v in node.inputs if is_float(v) and v is not None), None)
        for value in node.outputs:
            found = types.get(value.name or "")
            if found is not None:
                value.type = value.type or ir.serde.deserialize_type_proto_for_type(found)
                if value.shape is None:
                    value.shape = ir.serde.deserialize_type_proto_for_shape(found)
            if value.dtype is None:
                value.dtype = element_type(node, value.index() or 0, self.opset)
            if value.dtype is None and node.domain and like is not None:
                value.dtype = like

    def wants(self, value: ir.Value) -> bool:
        """Whether the gradient of an input is asked for: for rules that can save work of size."""
        return value in self.active

    def fresh(self, stem: str) -> str:
        name, count = stem, 0
        while name in self.taken:
            count += 1
            name = f"{stem}_{count}"
        self.taken.add(name)
        return name

    def _infer(self, node: ir.Node) -> dict[str, onnx.TypeProto]:
        """Types of the outputs by the operator's own inference, which takes some 30 µs."""
        types, data = {}, {}
        for value in node.inputs:
            if value is None:
                continue
            if value.type is None:
                return {}
            types[value.name or ""] = _type_proto(value)
            known = ir.convenience.get_const_tensor(value)  # of a Constant's output too
            if known is not None and known.size <= 64:
                data[value.name or ""] = ir.serde.serialize_tensor(known)
        try:
            if node.domain == FUSE:
                return self._infer_body(node, types)
            schema = onnx.defs.get_schema(node.op_type, self.opset, node.domain)
            return onnx.shape_inference.infer_node_outputs(
                schema, ir.serde.serialize_node(node), types, data, None, self._imports
            )
        except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError):
            return {}
        except onnx.checker.ValidationError as error:  # what a wrongly typed model leads to
            raise ModelError(f"the gradient needs {node.op_type}: {one_line(error)}") from error

    def _infer_body(
        self, node: ir.Node, types: Mapping[str, onnx.TypeProto]
    ) -> dict[str, onnx.TypeProto]:
        """Element types by the function body."""
        function = ir.serde.serialize_function(fused_function(node.op_type, self.opset))
        found = onnx.shape_inference.infer_function_output_types(
            function,
            [types[v.name or ""] for v in node.inputs if v is not None],
            list(ir.serde.serialize_node(node).attribute),
        )
        for proto in found:
            proto.tensor_type.ClearField("shape")
        return {v.name or "": proto for v, proto in zip(node.outputs, found, strict=True)}


def _type_proto(value: ir.Value) -> onnx.TypeProto:
    proto = onnx.TypeProto()
    assert value.type is not None
    ir.serde.serialize_type_into(proto, value.type)
    if value.shape is not None:
        ir.serde.serialize_shape_into(proto, value.shape)
    return proto


def _key(node: ir.Node) -> Any:
    """Equal for nodes that compute the same; None where that is not worth knowing."""
    attributes = []
    for name, attribute in sorted(node.attributes.items()):
        value: Any = attribute.value
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


# ---- expand a node that has a body but no rule -----------------------------------------------


def expand(graph: ir.Graph, op: Emitter, node: ir.Node) -> list[ir.Node] | None:
    """Replace `node` by the nodes of its function body, which are returned; None without a body.

    Raises contrib.Unwritable where a contrib node has none.
    """
    if contrib.lookup(node) is not None:
        return _write_out(graph, op, node)
    function = _body(node, op.opset)
    if function is None:
        return None
    values: dict[ir.Value | None, ir.Value | None] = {None: None}
    for i, formal in enumerate(function.inputs):
        values[formal] = node.inputs[i] if i < len(node.inputs) else None
    given = {**{k: a for k, a in function.attributes.items() if a.value is not None}}
    given.update(node.attributes)
    made = []
    for inner in function:
        attributes = []
        for name, attribute in inner.attributes.items():
            if attribute.type == ir.AttributeType.GRAPH:
                raise fail(node, "its body holds a subgraph")
            if attribute.ref_attr_name is None:
                attributes.append(attribute)
            elif attribute.ref_attr_name in given:
                source = given[attribute.ref_attr_name]
                attributes.append(ir.Attr(name, source.type, source.value))
        copy = ir.Node(
            inner.domain,
            inner.op_type,
            [values[v] for v in inner.inputs],
            attributes,
            num_outputs=len(inner.outputs),
            metadata_props=node.metadata_props,
        )
        op.stem = node.name or node.op_type
        values.update(zip(inner.outputs, copy.outputs, strict=True))
        for value, formal in zip(copy.outputs, inner.outputs, strict=True):
            if not formal.name:
                value.name = ""
        op.adopt(copy)
        made.append(copy)
    outputs = [v for f in function.outputs[: len(node.outputs)] if (v := values[f]) is not None]
    for old, new in zip(node.outputs, outputs, strict=True):
        new.type, new.shape = new.type or old.type, old.shape or new.shape
    ir.convenience.replace_nodes_and_values(graph, node, [node], made, node.outputs, outputs)
    return made


def _write_out(graph: ir.Graph, op: Emitter, node: ir.Node) -> list[ir.Node]:
    """Replace a contrib node by the nodes of its body."""
    op.stem = node.name or node.op_type
    made, results = contrib.write(node)
    for inner in made:
        inner.metadata_props.update(node.metadata_props)
        op.adopt(inner)
    pairs = [(o, n) for o, n in zip(node.outputs, results, strict=True) if n is not None]
    for old, new in pairs:
        new.type, new.shape = new.type or old.type, old.shape or new.shape
    old_values, new_values = [o for o, _ in pairs], [n for _, n in pairs]
    ir.convenience.replace_nodes_and_values(graph, node, [node], made, old_values, new_values)
    return made


def _body(node: ir.Node, opset: int) -> ir.Function | None:
    """The body of one of our ops, or the one the ONNX standard gives for an operator of its own."""
    if node.domain == FUSE:
        return fused_function(node.op_type, opset)
    if node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)
    if schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= opset]
        data = schema.get_function_with_opset_version(max(versions)) if versions else None
    elif schema.has_context_dependent_function:
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        types = [
            (
                _type_proto(v) if v is not None and v.type is not None else onnx.TypeProto()
            ).SerializeToString()
            for v in node.inputs
        ]
        proto = ir.serde.serialize_node(node).SerializeToString()
        data = (
            schema.get_context_dependent_function_with_opset_version(max(versions), proto, types)
            if versions
            else None
        )
    else:
        return None
    if not data:
        return None
    function = onnx.FunctionProto.FromString(data)
    # outputs the node does not ask for, the body need not make
    made = {name for inner in function.node for name in inner.output}
    while function.output and function.output[-1] not in made:
        function.output.pop()
    return ir.serde.deserialize_function(function)


# ---- walk ------------------------------------------------------------------------------------


def backward(
    model: ir.Model,
    dys: Mapping[ir.Value, ir.Value | None],
    wrt: Sequence[ir.Value],
    *,
    strict: bool = True,
    fused: bool = False,
    whole: Whole | None = None,
) -> dict[str, ir.Value]:
    """Append the backward to `model`; returns {name: d loss / d value} for each value of `wrt`.

    `dys` maps outputs (any values) to their gradients, None for 1 (a scalar loss). A value that
    does not reach any of them has gradient zero. Forward nodes may gain outputs, or be replaced by
    their function bodies, but compute what they did. Raises ModelError where the gradient would
    have to flow through a node that has none, naming the node, its operator and the reason; without
    `strict`, a value all of whose paths end at such nodes is left out. `fused`
    allows operators of ours in the backward; a fused node in float32 is then differentiated by its
    parts, unless it is `whole`.
    """
    if any(v.type is None for n in model.graph for v in n.outputs):
        infer_shapes(model)
    found = _walk(Emitter(model, fused=fused, whole=whole), model.graph, dys, wrt, strict=strict)
    return without_rows(Emitter(model), model.graph, found) if fused else found


def _walk(
    op: Emitter,
    graph: ir.Graph,
    dys: Mapping[ir.Value, ir.Value | None],
    wrt: Sequence[ir.Value],
    *,
    strict: bool,
) -> dict[str, ir.Value]:
    kept = {v.name: v for v in dys}
    nodes, active, stops = _mark(graph, op, wrt)
    by_name = {v.name: v for n in graph for v in n.outputs} | {v.name: v for v in _roots(graph)}
    pending: dict[ir.Value, list[ir.Value]] = {}
    for name, y in kept.items():
        op.stem = f"{name}.grad"
        dy, y = dys[y], by_name[name]
        if dy is None:
            dy = op.constant(np.ones([], (y.dtype or ir.DataType.FLOAT).numpy()))
            dy = dy if y.shape is not None and not len(y.shape) else op.Expand(dy, op.Shape(y))
        pending.setdefault(y, []).append(dy)
    for node in reversed(nodes):
        got = [_total(op, pending.get(y)) if is_float(y) else None for y in node.outputs]
        if all(dy is None for dy in got):
            continue
        for y, dy in zip(node.outputs, got, strict=True):
            if dy is not None:
                pending[y] = [_shaped(dy, y)]
        _step(op, node, got, active, pending)
    result = {}
    for x in wrt:
        op.stem = f"{x.name}.grad"
        found = _total(op, pending.get(x))
        if found is None and (why := _stopped(x, stops)) is not None:
            if strict:
                raise ModelError(f"'{x.name}' has no gradient: {why}")
            continue
        result[x.name or ""] = found if found is not None else zeros_like(op, x)
    _append_used(graph, op.nodes, result.values())
    return result


def _roots(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.initializers.values()]


def _mark(
    graph: ir.Graph, op: Emitter, wrt: Sequence[ir.Value]
) -> tuple[list[ir.Node], set[ir.Value], list[tuple[ir.Node, str]]]:
    """Nodes that the gradient passes, in order; the values it reaches; the nodes that stop it.

    On the way, nodes with a body but no rule become their bodies, and those that have values to
    save return them.
    """
    active, nodes, stops = set(wrt), [], []
    todo = list(reversed(list(graph)))
    while todo:
        node = todo.pop()
        if not any(v in active for v in _reads(node)):
            continue
        definition, exposed = lookup(node)
        rule = definition.grad if definition is not None else None
        if isinstance(rule, NoGrad):
            stops.append((node, rule.reason))
            continue
        apart = rule is None or (op.fused and _split(op, node, active))
        try:
            made = expand(graph, op, node) if apart and not _captures(node) else None
        except contrib.Unwritable as error:
            stops.append((node, str(error)))
            continue
        if made is not None:
            todo.extend(reversed(made))
            continue
        if definition is not None and not set(definition.saves) <= set(exposed):
            _expose(op, node, definition, exposed)
        reached = [v for v in node.outputs if is_float(v)]
        if not reached:
            stops.append((node, "its output is not of a floating-point type"))
        active.update(reached)
        nodes.append(node)
    return nodes, active, stops


def _split(op: Emitter, node: ir.Node, active: set[ir.Value]) -> bool:
    """Whether a fused node's parts are differentiated in its place: in fp32, where it is not whole
    or its x needs no gradient.
    """
    base = node.op_type.split("_")[0]
    product = node.domain == FUSE and "Gemm" in base and not base.endswith("Grad")
    x = node.inputs[0]
    if not product or x is None or x.dtype != ir.DataType.FLOAT:
        return False
    return op.whole is None or x not in active or not op.whole(node)


def _captures(node: ir.Node) -> bool:
    return any(subgraphs(a) for a in node.attributes.values())


def _reads(node: ir.Node) -> list[ir.Value | None]:
    """All that a node reads, also from within its subgraphs."""
    reads = list(node.inputs)
    for attribute in node.attributes.values():
        for sub in subgraphs(attribute):
            for inner in ir.traversal.RecursiveGraphIterator(sub):
                reads.extend(inner.inputs)
            reads.extend(sub.outputs)
    return reads


def _expose(op: Emitter, node: ir.Node, definition: OpDef, exposed: Sequence[str]) -> None:
    """Let a fused node return the inner values its gradient needs, besides those it returns."""
    labels = [name for name in definition.saves if name not in exposed]
    first = len(node.outputs)
    node.op_type, node.overload = definition.op_type([*exposed, *labels]), ""
    node.resize_outputs(first + len(labels))
    for value, label in zip(node.outputs[first:], labels, strict=True):
        value.name = op.fresh(f"{node.outputs[0].name}.{label}")
    op.adopt(node)


def _step(
    op: Emitter,
    node: ir.Node,
    dys: Sequence[ir.Value | None],
    active: set[ir.Value],
    pending: dict[ir.Value, list[ir.Value]],
) -> None:
    """Pass the gradients of a node's outputs on to its inputs."""
    definition, _ = lookup(node)
    rule = definition.grad if definition is not None else None
    op.active = active
    if node.op_type == "If" and not node.domain:
        for value, grad in _through_if(op, node, dys, active):
            pending.setdefault(value, []).append(grad)
        return
    if _captures(node):
        raise fail(node, "the gradient does not pass through loops")
    if rule is None or isinstance(rule, NoGrad):
        raise fail(node, "this operator has no gradient rule")
    op.stem = f"{node.name or node.outputs[0].name}.grad"
    try:
        answers = rule(op, node, dys)
    except IndexError as error:  # ranks, axes and counts that no valid node has
        raise fail(node, "its inputs and attributes contradict each other") from error
    if len(answers) > len(node.inputs):
        answers = answers[: len(node.inputs)]
    for x, dx in zip(node.inputs, answers, strict=False):
        if x is None or dx is None or x not in active:
            continue
        if node.op_type in ELEMENTWISE:
            dx = unbroadcast(op, _shaped(dx, node.outputs[0]), x)
        elif node.op_type in MATRIX or node.domain == FUSE:
            dx = unbroadcast(op, dx, x)
        else:
            dx = _shaped(dx, x)
        pending.setdefault(x, []).append(dx)


def _through_if(
    op: Emitter, node: ir.Node, dys: Sequence[ir.Value | None], active: set[ir.Value]
) -> list[tuple[ir.Value, ir.Value]]:
    """(x, dx) for each value the branches capture: an If whose branches are the branches' backward.

    A branch computes its forward again, for what it kept is out of reach.
    """
    xs = list(dict.fromkeys(v for v in _reads(node) if v is not None and v in active))
    branches = {}
    for name in ("then_branch", "else_branch"):
        branch = node.attributes[name].as_graph().clone(allow_outer_scope_values=True)
        branch.opset_imports.update({"": op.opset, FUSE: 1})
        inner = Emitter(ir.Model(branch, ir_version=10), op.taken)
        for copy in branch:
            inner.adopt(copy)
        wanted = {y: dy for y, dy in zip(branch.outputs, dys, strict=True) if dy is not None}
        found = _walk(inner, branch, wanted, xs, strict=False)
        inner.nodes, inner.stem = [], f"{op.stem}/{name}"
        outputs = []
        for x in xs:
            dx = found.get(x.name or "")
            dx = zeros_like(inner, x) if dx is None else dx
            outputs.append(inner.node("Identity", [dx], outputs=[inner.fresh(inner.stem)]))
            outputs[-1].type, outputs[-1].shape = x.type, x.shape
        branch.extend(inner.nodes)
        branch.outputs.clear()
        branch.outputs.extend(outputs)
        branches[name] = branch
    op.stem = f"{node.name or node.outputs[0].name}.grad"
    made = op.node("If", [node.inputs[0]], outputs=len(xs), attributes=branches)
    grads = (made,) if len(xs) == 1 else made
    for x, dx in zip(xs, grads, strict=True):
        dx.type, dx.shape = x.type, x.shape
    return list(zip(xs, grads, strict=True))


def _shaped(g: ir.Value, like: ir.Value) -> ir.Value:
    """`g` with the shape that a rule gave it, of which inference may see less."""
    if like.shape is not None and g.producer() is not None:
        g.shape = like.shape
    return g


def _total(op: Emitter, terms: Sequence[ir.Value] | None) -> ir.Value | None:
    if not terms:
        return None
    total = terms[0]
    for term in terms[1:]:
        total = op.Add(total, term)
    return total


def _stopped(x: ir.Value, stops: Sequence[tuple[ir.Node, str]]) -> str | None:
    """Why the gradient of `x` is missing, if a node that has none stopped it."""
    seen, todo = {x}, [x]
    while todo:
        for node, _ in todo.pop().uses():
            for stop, reason in stops:
                if stop is node:
                    return str(fail(node, reason))
            new = [v for v in node.outputs if v not in seen]
            seen.update(new)
            todo.extend(new)
    return None


def _append_used(graph: ir.Graph, nodes: Sequence[ir.Node], results: Any) -> None:
    """Append those nodes that the results need: gradients nobody asked for are not built."""
    wanted, used = set(results), []
    for node in reversed(nodes):
        if any(v in wanted for v in node.outputs):
            wanted.update(v for v in _reads(node) if v is not None)
            used.append(node)
        else:
            for i in range(len(node.inputs)):
                node.replace_input_with(i, None)
    graph.extend(reversed(used))


# ---- the gradient of a model -----------------------------------------------------------------


def attach_loss(
    model: ir.Model,
    loss: str,
    options: Mapping[str, Any] | None = None,
    *,
    output: str | None = None,
) -> tuple[ir.Value, ir.Value | None]:
    """Append the loss named `loss` of an output (the first); returns it and its new label input.

    `loss` is a name of `ops.loss.LOSSES`, or a scalar output of the model that is the loss already.
    Options that are arrays (weight, pos_weight) become initializers. Raises UsageError.
    """
    graph, settings = model.graph, dict(options or {})
    named = {v.name: v for v in graph.outputs}
    if loss not in LOSSES:
        if loss not in named:
            raise UsageError(
                f"no loss '{loss}': choose {', '.join(LOSSES)}, or an output that is the loss: "
                f"{', '.join(str(n) for n in named)}"
            )
        return named[loss], None
    if output is not None and output not in named:
        raise UsageError(f"the model has no output '{output}': it has {', '.join(map(str, named))}")
    logits = named[output] if output is not None else graph.outputs[0]
    op = Emitter(model)
    op.stem = "loss"
    label = label_value(logits, loss, op.fresh("labels"), settings)
    graph.inputs.append(label)
    for key in ("weight", "pos_weight"):
        if settings.get(key) is not None:
            array = np.asarray(settings[key])
            dtype = (logits.dtype or ir.DataType.FLOAT).numpy()
            value = ir.Value(
                name=op.fresh(f"loss.{key}"), const_value=ir.tensor(array.astype(dtype))
            )
            value.type = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
            value.shape = ir.Shape(array.shape)
            if value.const_value is not None:
                value.const_value.name = value.name
            graph.register_initializer(value)
            settings[key] = value
    value = LOSSES[loss].build(op, logits, label, settings)
    value = op.node("Identity", [value], outputs=[op.fresh("loss")])
    value.type, value.shape = ir.TensorType(logits.dtype or ir.DataType.FLOAT), ir.Shape(())
    graph.extend(op.nodes)
    graph.outputs.append(value)
    return value, label


def trainable(model: ir.Model) -> list[ir.Value]:
    """The float initializers that are the model's own: what `wrt` means where nothing is said.

    The scales of a Resize are sizes.
    """
    return [
        v
        for v in model.graph.initializers.values()
        if v.dtype and is_float(v) and CONSTANT not in v.metadata_props
        if not v.uses() or any(n.op_type != "Resize" or i not in (1, 2) for n, i in v.uses())
    ]


def gradient(
    model: Model,
    wrt: Sequence[str] | None = None,
    loss: str | None = None,
    **options: Any,
) -> ir.Model:
    """The model with its backward: the graph that computes gradients, which onnxruntime runs.

    Without `loss` it is the vector-Jacobian product: for each float output `y` there is an input
    `y.grad`, and for each name `w` of `wrt` an output `w.grad` of w's shape and dtype. `wrt` names
    initializers, outputs of Constant nodes or graph inputs; by default it is all weights that have
    a gradient: float initializers, and Constant nodes that stand where weights do, but no scalars.
    In the names of outputs, characters that need quoting in a shell are "_". With `loss`, a name
    of `ops.loss.LOSSES` (or a scalar output), there are an input `labels` and an output `loss`.
    `options` are the loss's. Raises ModelError, UsageError.
    """
    model = load(model)
    graph = model.graph
    lift_parameters(model, wrt or ())
    infer_shapes(model)
    if any(rank(v) is None for node in graph for v in node.outputs if is_float(v)):
        canonicalize(model, training=True)  # the sizes a Reshape reads may be computed of constants
        infer_shapes(model)
    holders: dict[str, list[ir.Value]] = {}  # a parameter may be packed, and more than once
    for v in trainable(model):
        for part in parts(v)[1]:
            holders.setdefault(part.name, []).append(v)
    holders.update({str(v.name): [v] for v in graph.inputs if is_float(v)})
    targets = list(holders) if wrt is None else list(dict.fromkeys(wrt))
    if wrt is None:
        targets = [name for name in targets if all(map(is_weight, holders[name]))]
    for name in targets:
        if name not in holders:
            raise UsageError(_unknown(graph, name))
    dys: dict[ir.Value, ir.Value | None] = {}
    if loss is not None:
        value, _ = attach_loss(model, loss, options)
        dys[value] = None
    else:
        op = Emitter(model)
        for y in graph.outputs:
            if is_float(y) and y not in dys:
                dy = ir.Value(
                    name=op.fresh(f"{_typeable(y.name)}.grad"), type=y.type, shape=y.shape
                )
                dys[y] = dy
                graph.inputs.append(dy)
    values = list(dict.fromkeys(v for name in targets for v in holders[name]))
    found = backward(model, dys, values, strict=wrt is not None)
    op = Emitter(model)
    grads: dict[str, tuple[ir.Value, ir.Value]] = {}
    for x in values:
        if x.name in found:
            packed = x.is_initializer()
            own = unpack_values(op, x, found[x.name]) if packed else {x.name: found[x.name]}
            for name, g in own.items():
                grads[name] = (op.Add(grads[name][0], g) if name in grads else g, x)
    for name in targets:
        if name in grads:
            g, x = grads[name]
            out = op.node("Identity", [g], outputs=[op.fresh(f"{_typeable(name)}.grad")])
            out.type, out.shape = x.type, g.shape if x.is_initializer() else x.shape
            graph.outputs.append(out)
    graph.extend(op.nodes)
    return model


def is_weight(value: ir.Value) -> bool:
    """Not a scalar, and not a mask: exporters keep constants among the weights."""
    array = const_array(value) if value.is_initializer() else None
    if array is None or array.ndim == 0:
        return False
    return bool(np.abs(array).max(initial=0) < (65504 if array.dtype == np.float16 else 1e9))


def _typeable(name: str | None) -> str:
    """The name with "_" in place of what needs quoting in a shell."""
    return re.sub(r"[^A-Za-z0-9_.,:/@%+=\[\]-]", "_", name or "")


def _unknown(graph: ir.Graph, name: str) -> str:
    for value in _roots(graph):
        if value.name == name:
            return f"'{name}' is of type {value.dtype}: it has no gradient"
    return f"the model has no initializer or input '{name}'"


# ---- ai.onnx.preview.training ----------------------------------------------------------------


def expand_training_ops(model: ir.Model) -> int:
    """Replace the nodes of ai.onnx.preview.training, in place; returns how many there were.

    Adam, Adagrad and Momentum are written out; Gradient becomes the backward of the values its
    attributes name. Raises ModelError where a name is not a value of the graph.
    """
    graph = model.graph
    found = [n for n in graph if n.domain == PREVIEW and n.op_type == "Gradient"]
    if found:
        infer_shapes(model)
    for node in found:
        _expand_gradient(model, node)
    if found:
        graph.sort()  # what read the gradients stands before them
        infer_shapes(model)
    return len(found) + expand_standard_updates(model)


def _expand_gradient(model: ir.Model, node: ir.Node) -> None:
    """d y / d xs of the part of the graph between xs, zs and y, at the values of the inputs."""
    graph = model.graph
    named = {v.name: v for v in (*_roots(graph), *(v for n in graph for v in n.outputs))}
    xs = node.attributes.get_strings("xs", ()) or ()
    names = [*xs, *(node.attributes.get_strings("zs", ()) or ()), text(node, "y", "")]
    for name in names:
        if name not in named:
            raise fail(node, f"the graph has no value '{name}'")
    *symbols, y = (named[name] for name in names)
    inputs = [v for v in node.inputs if v is not None]
    if len(inputs) != len(symbols):
        raise fail(node, f"it has {len(inputs)} inputs for {len(symbols)} names in xs and zs")
    y, leaves = _copy_between(model, dict(zip(symbols, inputs, strict=True)), y)
    wrt = leaves[: len(xs)]
    grads = backward(model, {y: None}, wrt)
    for old, x in zip(node.outputs, wrt, strict=False):
        new = grads[x.name or ""]
        if new.is_graph_output() or new.producer() is None or new in named.values():
            op = Emitter(model)
            new = op.Identity(new)
            graph.extend(op.nodes)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        label, old.name = old.name, None
        new.name = label
        new.type, new.shape = old.type or new.type, old.shape or new.shape
    graph.remove(node, safe=True)


def _copy_between(
    model: ir.Model, given: Mapping[ir.Value, ir.Value], y: ir.Value
) -> tuple[ir.Value, list[ir.Value]]:
    """The nodes between the keys of `given` and y again, on copies of its values: (y, copies).

    A copy stands for a symbol: the gradient does not flow past it, and a node of the original that
    another reader needs stays as it is.
    """
    graph, op = model.graph, Emitter(model)
    values = {
        symbol: op.node("Identity", [value], outputs=[op.fresh(f"{symbol.name}.of.{y.name}")])
        for symbol, value in given.items()
    }
    leaves = list(values.values())
    wanted, between = {y}, []
    for node in reversed(list(graph)):
        if any(v in wanted and v not in given for v in node.outputs):
            between.append(node)
            wanted.update(v for v in node.inputs if v is not None)
    for node in reversed(between):
        if not any(v in values for v in node.inputs if v is not None):
            continue
        copy = ir.Node(
            node.domain,
            node.op_type,
            [values.get(v, v) if v is not None else None for v in node.inputs],
            list(node.attributes.values()),
            num_outputs=len(node.outputs),
            name=op.fresh(f"{node.name or node.op_type}.of.{y.name}"),
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = op.fresh(f"{old.name}.of.{y.name}") if old.name else ""
            new.type, new.shape = old.type, old.shape
            values.setdefault(old, new)
        op.nodes.append(copy)
    graph.extend(op.nodes)
    return values.get(y, y), leaves

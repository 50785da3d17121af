"""The reverse walk over a graph: each node's rule, and the sums of what they answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import zip_longest

import numpy as np
import onnx_ir as ir

from onnx_fuse.autodiff.emit import CombinesGradients, Emitter, expand, roots
from onnx_fuse.autodiff.subgraphs import captures, through_if, through_loop
from onnx_fuse.errors import ModelError
from onnx_fuse.importer import contrib
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import all_nodes, needed_nodes, reads, sources
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ir.traits import VIEWS
from onnx_fuse.ops import NoGrad, OpDef, lookup
from onnx_fuse.ops.recurrent import GATES, steps_kind
from onnx_fuse.ops.shape_ops import fail, may_be_float
from onnx_fuse.rewrite.leaf_norm import without_rows

# Rules that answer in a broadcast shape (elementwise: the output's), which the walker sums back.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Mean")
ELEMENTWISE = frozenset((*_ARITHMETIC, "Where", "PRelu", "Expand"))
MATRIX = frozenset(("MatMul", "Gemm", "Einsum"))
# Integers that these make have a gradient, of a float type, on their way to the others alone.
_MAKE_CODES = frozenset(("QuantizeLinear", "DynamicQuantizeLinear"))
_READ_CODES = VIEWS | {"DequantizeLinear"}
_FEW = 3


def backward(
    model: ir.Model,
    dys: Mapping[ir.Value, ir.Value | None],
    wrt: Sequence[ir.Value],
    *,
    stopped: dict[str, str] | None = None,
    fused: bool = False,
    whole: CombinesGradients | None = None,
) -> dict[str, ir.Value]:
    """Append the backward to `model`; returns {name: d loss / d value} for each value of `wrt`.

    `dys` maps outputs (any values) to their gradients, None for 1 (a scalar loss). A value that
    does not reach any of them has gradient zero. Forward nodes may gain outputs, or be replaced by
    their function bodies, but compute what they did. Raises ModelError where the gradient would
    have to flow through a node that has none, naming the node, its operator and the reason. With
    `stopped`, a value all of whose paths end at such nodes is left out instead, and the reason is
    put there by its name: "" where it reaches them through a StopGradient alone, if at all. `fused`
    allows operators of ours in the backward; a fused node in float32 is then differentiated by its
    parts, unless it is `whole`.
    """
    if any(v.type is None for n in model.graph for v in n.outputs):
        infer_shapes(model)
    open_sizes_not_shown(model.graph)
    op = Emitter(model, fused=fused, whole=whole)
    grads = _walk(op, model.graph, dys, wrt, stopped)
    return without_rows(Emitter(model), model.graph, grads) if fused else grads


def open_sizes_not_shown(graph: ir.Graph) -> None:
    """Leave sizes of broadcast results open where an operand has another symbol of the inputs."""
    names = {d for v in graph.inputs for d in v.shape or () if not isinstance(d, int) and d.value}
    for node in all_nodes(graph):
        y, shapes = node.outputs[0], [v.shape for v in node.inputs if v is not None]
        if node.op_type in ELEMENTWISE - {"Expand"} and y.shape is not None and None not in shapes:
            columns = zip_longest(*(tuple(s)[::-1] for s in shapes if s is not None), fillvalue=1)
            pairs = zip(y.shape[::-1], columns, strict=False)
            dims = [None if (d == 1 or d in names) and names & {*s} - {d} else d for d, s in pairs]
            y.shape = ir.Shape(dims[::-1])


def without_gradient(
    reasons: Mapping[str, str], one: str = "has no gradient", many: str = "have no gradient"
) -> list[str]:
    """Sentences about values that have no gradient, of {name: reason}: one for each of few.

    A reason of "" is a StopGradient, which is meant.
    """
    named = {name: why for name, why in reasons.items() if why}
    if len(named) <= _FEW:
        return [f"'{name}' {one}: {why}" for name, why in named.items()]
    first = ", ".join(f"'{name}'" for name in list(named)[:_FEW])
    rest = f"{len(named) - _FEW} other value{'s' * (len(named) > _FEW + 1)}"
    return [f"{first} and {rest} {many}: {next(iter(named.values()))}"]


def _walk(
    op: Emitter,
    graph: ir.Graph,
    dys: Mapping[ir.Value, ir.Value | None],
    wrt: Sequence[ir.Value],
    stopped: dict[str, str] | None,
) -> dict[str, ir.Value]:
    ends_by_name = {v.name: v for v in dys}
    nodes, active, stops = _mark(graph, op, wrt)
    by_name = {v.name: v for n in graph for v in n.outputs} | {v.name: v for v in roots(graph)}
    pending: dict[ir.Value, list[ir.Value]] = {}
    for name, y in ends_by_name.items():
        op.stem = f"{name}.grad"
        dy, y = dys[y], by_name[name]
        if dy is None:
            dy = op.constant(np.ones([], (y.dtype or ir.DataType.FLOAT).numpy()))
            dy = dy if y.shape is not None and not len(y.shape) else op.Expand(dy, op.Shape(y))
        pending.setdefault(y, []).append(dy)
    for node in reversed(nodes):
        got = [
            _total(op, pending.get(y)) if may_be_float(y) or y in active else None
            for y in node.outputs
        ]
        if all(dy is None for dy in got):
            continue
        for y, dy in zip(node.outputs, got, strict=True):
            if dy is not None:
                pending[y] = [_shaped(dy, y)]
        _step(op, node, got, active, pending, stops)
    result = {}
    for x in wrt:
        op.stem = f"{x.name}.grad"
        dx = _total(op, pending.get(x))
        ends = _ends(x, graph, stops) if dx is None else []
        if ends:
            losses = [by_name[name] for name in ends_by_name]
            flowing = sources(losses, lambda n: () if _detaches(n) else reads(n)).keys()
            wanting = [n for n in ends if not (_detaches(n) or flowing.isdisjoint(n.outputs))]
            end = (wanting or ends)[0]
            why = str(fail(end, stops[end]))
            if stopped is None:
                raise ModelError(f"'{x.name}' has no gradient: {why}")
            stopped[x.name or ""] = why if wanting else ""
            continue
        result[x.name or ""] = dx if dx is not None else op.zeros_like(x)
    graph.extend(needed_nodes(op.nodes, result.values()))
    return result


def _mark(
    graph: ir.Graph, op: Emitter, wrt: Sequence[ir.Value]
) -> tuple[list[ir.Node], set[ir.Value], dict[ir.Node, str]]:
    """Nodes that the gradient passes, in order; the values it reaches; the nodes that stop it.

    On the way, nodes with a body but no rule become their bodies, and those that have values to
    save return them.
    """
    active, nodes, stops = set(wrt), list[ir.Node](), dict[ir.Node, str]()
    todo = list(reversed(list(graph)))
    while todo:
        node = todo.pop()
        if not any(v in active for v in reads(node)):
            continue
        definition, exposed = lookup(node)
        rule = definition.grad if definition is not None else None
        if isinstance(rule, NoGrad):
            stops[node] = rule.reason
            continue
        apart = rule is None or (op.fused and _split(op, node, active)) or _by_steps(node)
        apart = apart or _needs_parts(node, definition, exposed)
        try:
            body_nodes = expand(op, node) if apart and not captures(node) else None
        except contrib.Unwritable as error:
            stops[node] = str(error)
            continue
        if body_nodes is not None:
            todo.extend(reversed(body_nodes))
            continue
        if definition is not None and not set(definition.saves) <= set(exposed):
            _expose(op, node, definition, exposed)
        reached = [v for v in node.outputs if may_be_float(v)]
        codes = [v for v in reads(node) if v in active and not may_be_float(v)]
        if codes and (node.op_type not in _READ_CODES or node.domain):
            stops[node] = "it computes with the integers of a quantized tensor"
            continue
        if codes or node.op_type in _MAKE_CODES:
            reached = list(node.outputs[:2])
        if not reached:
            stops[node] = "its output is not of a floating-point type"
        active.update(reached)
        nodes.append(node)
    return nodes, active, stops


def _split(op: Emitter, node: ir.Node, active: set[ir.Value]) -> bool:
    """Whether a fused node's parts are differentiated in its place: in fp32, where it is not whole
    or its x needs no gradient.
    """
    name = FusedName.of(node.op_type)
    product = node.domain == FUSE and name.family == "Gemm" and not name.grad
    x = node.inputs[0]
    if not product or x is None or x.dtype != ir.DataType.FLOAT:
        return False
    return op.whole is None or x not in active or not op.whole(node)


def _by_steps(node: ir.Node) -> bool:
    """Whether a recurrent node has gates or activations that no gradient of ours knows."""
    return node.op_type in GATES and not node.domain and bool(steps_kind(node)[1])


def _needs_parts(node: ir.Node, definition: OpDef | None, exposed: Sequence[str]) -> bool:
    """Whether a fused node's own gradient does not do: others read an inner value that it returns,
    as an earlier gradient does, or it would save the float32 mean that doubles have.
    """
    saves = () if definition is None else definition.saves
    inner = zip(exposed, node.outputs[len(node.outputs) - len(exposed) :], strict=True)
    if any(label in saves and (v.uses() or v.is_graph_output()) for label, v in inner):
        return True
    return "mean" in saves and node.outputs[0].dtype == ir.DataType.DOUBLE


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
    stops: dict[ir.Node, str],
) -> None:
    """Pass the gradients of a node's outputs on; `stops` are the nodes that pass none."""
    definition, _ = lookup(node)
    rule = definition.grad if definition is not None else None
    op.active = active
    through = _THROUGH.get(node.op_type) if not node.domain else None
    if through is not None:
        for value, grad, reason in through(op, node, dys, active, _walk):
            if reason:
                stops.setdefault(node, reason)
            else:
                pending.setdefault(value, []).append(grad)
        return
    if captures(node):
        raise fail(node, "the gradient does not pass through its subgraph")
    if rule is None or isinstance(rule, NoGrad):
        raise fail(node, "this operator has no gradient rule")
    op.stem = f"{node.name or node.outputs[0].name}.grad"
    pairs = zip(node.outputs, dys, strict=True)
    no_outputs = all(dy is None or _is_empty(y) for y, dy in pairs)
    try:
        answers = [None] * len(node.inputs) if no_outputs else rule(op, node, dys)
    except IndexError as error:  # ranks, axes and counts that no valid node has
        raise fail(node, "its inputs and attributes contradict each other") from error
    if len(answers) > len(node.inputs):
        answers = answers[: len(node.inputs)]
    for x, dx in zip(node.inputs, answers, strict=False):
        if x is None or x not in active:
            continue
        if no_outputs or _is_empty(x):
            # zeros, or nothing: onnxruntime does not run every operator on no elements
            pending.setdefault(x, []).append(op.zeros_like(x))
            continue
        if dx is None:
            continue
        if node.op_type in ELEMENTWISE:
            dx = op.unbroadcast(_shaped(dx, node.outputs[0]), x)
        elif node.op_type in MATRIX or node.domain == FUSE:
            dx = op.unbroadcast(dx, x)
        else:
            dx = _shaped(dx, x)
        pending.setdefault(x, []).append(dx)


def _is_empty(value: ir.Value) -> bool:
    return value.shape is not None and 0 in value.shape


_THROUGH = {"If": through_if, "Loop": through_loop, "Scan": through_loop}


def _shaped(g: ir.Value, like: ir.Value) -> ir.Value:
    if like.shape is not None and g.producer() is not None:  # it may say more than inference
        g.shape = like.shape
    return g


def _total(op: Emitter, terms: Sequence[ir.Value] | None) -> ir.Value | None:
    return reduce(op.Add, terms) if terms else None


def _ends(x: ir.Value, graph: ir.Graph, stops: Mapping[ir.Node, str]) -> list[ir.Node]:
    """The nodes without a gradient that the paths from `x` end at.

    A node may read `x`, or what was made of it, from within its subgraphs.
    """
    reached, ends = {x}, []
    for node in graph if stops else ():
        if any(v in reached for v in reads(node)):
            if node in stops:
                ends.append(node)
            else:
                reached.update(node.outputs)
    return ends


def _detaches(node: ir.Node) -> bool:
    return node.op_type == "StopGradient" and node.domain == FUSE

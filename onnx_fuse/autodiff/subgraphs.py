"""Gradients through If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_fuse.autodiff.emit import Emitter
from onnx_fuse.importer.types import shapes_of_body
from onnx_fuse.ir.build import (
    all_nodes,
    captured,
    const_array,
    reads,
    required,
    sources,
    subgraphs,
)
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.traits import DRAWS
from onnx_fuse.ops.shape_ops import arguments, fail, may_be_float

Walk: TypeAlias = Callable[..., dict[str, ir.Value]]
"""`walk._walk`: the gradients of values of a graph, appended to it."""


def captures(node: ir.Node) -> bool:
    """Whether a node has subgraphs, which may read values from outside."""
    return any(subgraphs(a) for a in node.attributes.values())


def ancestors(values: Sequence[ir.Value]) -> set[ir.Node]:
    """The nodes that make these values."""
    return {node for v in sources(values) if (node := v.producer()) is not None}


def draws(node: ir.Node) -> bool:
    """Whether two runs of a node may have other results: it draws random numbers."""
    if node.op_type == "Dropout" and not node.domain:
        training = arguments(node, 3)[2]
        on = const_array(training)
        return training is not None and (on is None or bool(on.any()))
    return node.op_type in DRAWS and not node.domain


def _refuse_draws(node: ir.Node, body: ir.Graph, results: Sequence[ir.Value]) -> None:
    """Raises ModelError where the backward of a body, of these results, draws random numbers."""
    if any(map(draws, all_nodes(ancestors(results).intersection(body)))):
        why = "the backward computes its body again and would draw other random numbers"
        raise fail(node, why)


def _apart(inner: Emitter, graph: ir.Graph) -> list[ir.Value]:
    """Give each output of a body a node of its own: one value may be two outputs, or an input."""
    outputs = []
    for y in graph.outputs:
        output = inner.Identity(y)
        output.type, output.shape = output.type or y.type, output.shape or y.shape
        outputs.append(output)
    # equal nodes are made once, so two outputs of one value are told apart by a second node
    for i, output in enumerate(outputs):
        if output in outputs[:i]:
            node = ir.Node("", "Identity", [output], num_outputs=1)
            inner.adopt(node)
            inner.nodes.append(node)
            outputs[i] = node.outputs[0]
    graph.extend(inner.nodes)
    inner.nodes = []
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    return outputs


def through_if(
    op: Emitter, node: ir.Node, dys: Sequence[ir.Value | None], active: set[ir.Value], walk: Walk
) -> list[tuple[ir.Value, ir.Value, str]]:
    """(x, dx, "") of each value the branches capture: an If of the branches' backward.

    In place of "" stands the reason why no branch has a gradient of x. A branch computes
    its forward again, for what it kept is out of reach.
    """
    xs = list(dict.fromkeys(v for v in reads(node) if v is not None and v in active))
    branches, reasons, flows = {}, dict[str, str](), set[ir.Value]()
    for name in ("then_branch", "else_branch"):
        branch = node.attributes[name].as_graph().clone(allow_outer_scope_values=True)
        branch.opset_imports.update({"": op.opset, FUSE: 1})
        inner = Emitter(ir.Model(branch, ir_version=10), op.names)
        for copy in branch:
            copy.name = copy.name or copy.outputs[0].name  # by which a reason names it
            inner.adopt(copy)
        ends = _apart(inner, branch)
        wanted = {y: dy for y, dy in zip(ends, dys, strict=True) if dy is not None}
        stopped: dict[str, str] = {}
        operands = {v for n in branch for v in reads(n)}
        by_name = walk(inner, branch, wanted, xs, stopped)
        reasons |= stopped
        flows.update(x for x in xs if x in operands and x.name in by_name)
        inner.nodes, inner.stem = [], f"{op.stem}/{name}"
        outputs = []
        for x in xs:
            dx = by_name.get(x.name or "")
            dx = inner.zeros_like(x) if dx is None else dx
            outputs.append(inner.node("Identity", [dx], outputs=[inner.fresh(inner.stem)]))
            outputs[-1].type, outputs[-1].shape = x.type, x.shape
        branch.extend(inner.nodes)
        branch.outputs.clear()
        branch.outputs.extend(outputs)
        _refuse_draws(node, branch, outputs)
        branches[name] = branch
    op.stem = f"{node.name or node.outputs[0].name}.grad"
    results = op.node("If", [node.inputs[0]], outputs=len(xs), attributes=branches)
    grads = (results,) if len(xs) == 1 else results
    for x, dx in zip(xs, grads, strict=True):
        dx.type, dx.shape = x.type, x.shape
    whys = ["" if x in flows else reasons.get(x.name or "", "") for x in xs]
    return list(zip(xs, grads, whys, strict=True))


def through_loop(
    op: Emitter, node: ir.Node, dys: Sequence[ir.Value | None], active: set[ir.Value], walk: Walk
) -> list[tuple[ir.Value, ir.Value, str]]:
    """(x, dx, "") of all that a Loop or Scan reads, by another one over its steps in reverse.

    In place of "" stands the reason why no step has a gradient of x.

    The forward node gets the states before each step for further outputs; the backward's body
    computes a step again from them. So a Loop may have any number of steps, and end by its
    condition. Raises ModelError where a state is no tensor of one shape.
    """
    loop = node.op_type == "Loop"
    body = node.attributes["body"].as_graph()
    step = body.clone(allow_outer_scope_values=True)
    scanned = 0 if loop else node.attributes.get_int("num_scan_inputs", 0)
    lead = 2 if loop else 0  # Loop's body starts with the step's number and the condition
    count = len(body.inputs) - lead - scanned
    starts = [v for v in node.inputs[lead : lead + count] if v is not None]
    if len(starts) != count:
        raise fail(node, "a state has no first value")
    _one_shape(op, node, body, starts, lead)
    axes_in, ways_in = (_of_scan(node, f"scan_input_{kind}", scanned) for kind in _SCAN)
    stacked = len(node.outputs) - count
    axes_out, ways_out = (_of_scan(node, f"scan_output_{kind}", stacked) for kind in _SCAN)

    states = [*body.inputs[:1], *body.inputs[lead:][:count]] if loop else body.inputs[:count]
    saved = _save(op, node, body, list(states), stacked)
    inputs = list(node.inputs[lead + count :])
    outer = [v for v in captured(node) if v in active]

    step.opset_imports.update({"": op.opset, FUSE: 1})
    inner = Emitter(ir.Model(step, ir_version=10), op.names)
    steps = step.inputs[lead:]
    for value, x in zip(steps, [*starts, *inputs], strict=True):
        value.type = value.type or (x.type if x is not None else None)
    for value, x in zip(steps, starts, strict=False):
        value.shape = value.shape or x.shape
    for value, x, axis in zip(steps[count:], inputs, axes_in, strict=True):
        if value.shape is None and x is not None and x.shape is not None:
            value.shape = ir.Shape([d for i, d in enumerate(x.shape) if i != axis % len(x.shape)])
    for copy in step:
        copy.name = copy.name or copy.outputs[0].name  # by which a reason names it
        inner.adopt(copy)
    ends = _apart(inner, step)[1 if loop else 0 :]

    # what the body reads at each step: adjoints of states, sums over the steps, then the scanned
    floats = [i for i in range(count) if may_be_float(starts[i])]
    adjoints = {i: _like(inner, steps[i], "d") for i in floats}
    sums = [_like(inner, x, "sum") for x in outer]
    scans: list[tuple[ir.Value, ir.Value, int, int]] = []  # of the body, of the graph, axis, way
    body_states = [step.inputs[0], *steps[:count]] if loop else list(steps[:count])
    scans += [(v, s, 0, 1) for v, s in zip(body_states, saved, strict=True)]
    scans += [
        (v, x, axis, 1 - way)
        for v, x, axis, way in zip(steps[count:], inputs, axes_in, ways_in, strict=True)
        if x is not None
    ]
    wanted: dict[ir.Value, ir.Value] = {ends[i]: adjoints[i] for i in floats}
    for k, dy in enumerate(dys[count : count + stacked]):
        if dy is not None:
            wanted[ends[count + k]] = each = _like(inner, ends[count + k], "dy")
            scans.append((each, dy, axes_out[k], 1 - ways_out[k]))
    moving = [i for i, x in enumerate(inputs) if x is not None and x in active and may_be_float(x)]
    wrt = [*(steps[i] for i in floats), *(steps[count + i] for i in moving), *outer]
    stopped: dict[str, str] = {}
    by_name = walk(inner, step, wanted, wrt, stopped)

    inner.nodes, inner.stem = [], f"{op.stem}/step"
    grads = [by_name.get(str(x.name)) for x in wrt]
    results = []
    totals: list[ir.Value | None] = [*[None] * (len(wrt) - len(outer)), *sums]
    for x, dx, total in zip(wrt, grads, totals, strict=True):
        dx = inner.zeros_like(x) if dx is None else dx
        dx = dx if total is None else inner.Add(total, dx)
        results.append(inner.node("Identity", [dx], outputs=[inner.fresh(inner.stem)]))
        results[-1].type, results[-1].shape = x.type, x.shape
    step.extend(inner.nodes)
    _refuse_draws(node, step, results)
    cut = len(floats) + len(moving)
    results = [*results[: len(floats)], *results[cut:], *results[len(floats) : cut]]
    op.stem = f"{node.name or node.outputs[0].name}.grad"
    firsts = [dys[i] if dys[i] is not None else op.zeros_like(starts[i]) for i in floats]
    operands = [*firsts, *(op.zeros_like(x) for x in outer)]
    held = [*adjoints.values(), *sums]
    if loop:
        _walk_back(op, step, held, [(v, x) for v, x, *_ in scans], results)
        operands = [op.size_of(saved[0], 0), None, *operands]
        attributes: dict[str, Any] = {"body": step}
    else:
        step.inputs.clear()
        step.inputs.extend([*held, *(v for v, *_ in scans)])
        step.outputs.clear()
        step.outputs.extend(results)
        operands += [x for _, x, _, _ in scans]
        attributes = {
            "body": step,
            "num_scan_inputs": len(scans),
            "scan_input_axes": [axis for *_, axis, _ in scans],
            "scan_input_directions": [way for *_, way in scans],
            "scan_output_axes": [axes_in[i] for i in moving],
            "scan_output_directions": [1 - ways_in[i] for i in moving],
        }
        attributes = {k: v for k, v in attributes.items() if v != []}
    dxs = op.node(node.op_type, operands, outputs=len(results), attributes=attributes)
    dxs = (dxs,) if len(results) == 1 else dxs
    targets = [*(starts[i] for i in floats), *outer, *(inputs[i] for i in moving)]
    # without a step a state's last value is its first one, which has a gradient then
    inside = [*outer, *(steps[count + i] for i in moving)]
    whys = [*("" for _ in floats), *(stopped.get(v.name or "", "") for v in inside)]
    answers = []
    for x, dx, why in zip(map(required, targets), dxs, whys, strict=True):
        dx.type, dx.shape = x.type, x.shape
        answers.append((x, dx, why))
    return [answer for answer in answers if answer[0] in active]


def _walk_back(
    op: Emitter,
    body: ir.Graph,
    held: Sequence[ir.Value],
    scans: Sequence[tuple[ir.Value, ir.Value]],
    results: Sequence[ir.Value],
) -> None:
    """Make the body one of a Loop, which may have no step at all, as onnxruntime's Scan may not.

    Each value that the body reads of a step is taken from those of all steps, the last one first.
    """
    step = ir.Value(
        name=op.fresh("step"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([])
    )
    going = ir.Value(
        name=op.fresh("going"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([])
    )
    first = body[0]
    inner = Emitter(ir.Model(body, ir_version=10), op.names)
    one = inner.constant(np.int64(1))
    place = inner.Sub(inner.Sub(inner.size_of(scans[0][1], 0), one), step)
    for value, steps in scans:
        taken = inner.Gather(steps, place, axis=0)
        taken.type, taken.shape = value.type, value.shape
        ir.convenience.replace_all_uses_with(value, taken)
    on = inner.constant(np.array(True))
    ir.convenience.replace_all_uses_with(body.inputs[1], on)  # the steps that were made all met it
    body.insert_before(first, inner.nodes)
    inner.nodes = []
    flag = inner.Identity(on)
    body.extend(inner.nodes)
    body.inputs.clear()
    body.inputs.extend([step, going, *held])
    body.outputs.clear()
    body.outputs.extend([flag, *results])


_SCAN = ("axes", "directions")
_TRIAL = 5040  # a size by which a body is tried; what halves and doubles an axis keeps it


def _of_scan(node: ir.Node, name: str, count: int) -> list[int]:
    """A list attribute of Scan, zeros where it is absent; Loop stacks along axis 0."""
    return list(node.attributes.get_ints(name, []) or [0] * count)


def _one_shape(
    op: Emitter, node: ir.Node, body: ir.Graph, starts: Sequence[ir.Value], lead: int
) -> None:
    """Raises ModelError where a state may change its shape, or is no tensor."""
    first, pairs = 1 if lead else 0, list(zip(starts, body.inputs[lead:], strict=False))
    for x, held in pairs:
        held.shape = held.shape or x.shape
    named, tried = (shapes_of_body(body, op.opset, each)[first:] for each in (0, _TRIAL))
    for i, (x, held) in enumerate(pairs):
        y, z = body.outputs[first + i], node.outputs[i]
        if isinstance(x.type, ir.SequenceType | ir.OptionalType):
            raise fail(node, f"its state '{x.name}' is no tensor")
        before = _sizes(held.shape) if held.shape is not None else None
        changes = any(_differ(x.shape, other.shape) for other in (y, z, held))
        if before and not changes:
            trial = [d if isinstance(d, int) else _TRIAL for d in before]
            changes = _differ(ir.Shape(trial), tried[i])
        if not changes and _differ(held.shape, y.shape, named=True):
            shape = named[i]  # an exporter may call one size by two names
            changes = shape is None or _sizes(shape) != before
        if changes:
            raise fail(node, f"its state '{x.name}' changes its shape from step to step")


def _differ(a: ir.Shape | None, b: ir.Shape | None, *, named: bool = False) -> bool:
    """Whether two shapes are known to differ; with `named`, by the names of their sizes too."""
    if a is None or b is None:
        return False
    if len(a) != len(b):
        return True
    pairs = [(d, e) for d, e in zip(_sizes(a), _sizes(b), strict=True) if None not in (d, e)]
    return any(d != e and (named or type(d) is type(e) is int) for d, e in pairs)


def _sizes(shape: ir.Shape) -> list[int | str | None]:
    """Each size by its number or name; inference's own names (unk__0) say nothing."""
    names = (None if isinstance(d, int) else d.value for d in shape)
    named = (None if n is None or n.startswith("unk__") else n for n in names)
    return [d if isinstance(d, int) else n for d, n in zip(shape, named, strict=True)]


def _save(
    op: Emitter, node: ir.Node, body: ir.Graph, states: list[ir.Value], stacked: int
) -> list[ir.Value]:
    """Let the node return these inputs of its body, one entry a step."""
    if not node.outputs[0].name:
        node.outputs[0].name = op.fresh(f"{node.name or node.op_type}.y")
    first, saved = len(node.outputs), []
    for state in states:
        copy = ir.Node("", "Identity", [state], num_outputs=1)
        copy.outputs[0].name = op.fresh(f"{state.name}.before")
        copy.name = copy.outputs[0].name
        copy.outputs[0].type, copy.outputs[0].shape = state.type, state.shape
        body.append(copy)
        body.outputs.append(copy.outputs[0])
    node.resize_outputs(first + len(states))
    for value, state in zip(node.outputs[first:], states, strict=True):
        value.name = op.fresh(f"{node.outputs[0].name}.{state.name}.before")
        value.type = state.type
        if state.shape is not None:
            value.shape = ir.Shape([None, *state.shape])
        saved.append(value)
    for kind in _SCAN:
        attribute = node.attributes.get(f"scan_output_{kind}")
        if attribute is not None:
            more = [*attribute.as_ints(), *[0] * len(states)]
            node.attributes[attribute.name] = ir.AttrInt64s(attribute.name, more)
    return saved


def _like(inner: Emitter, x: ir.Value, label: str) -> ir.Value:
    """A new input of a body, of the type and shape of a value."""
    return ir.Value(name=inner.fresh(f"{x.name}.{label}"), type=x.type, shape=x.shape)

"""LSTM, GRU and Scan of nothing, for which onnxruntime (1.32) ends the process or refuses to run.

An LSTM of no sequence ends it, a GRU of no sequence, step or feature, and a Scan along a later axis
of no step. What onnxruntime gets has an LSTM or GRU behind an If: where x has no element, it runs
on zeros with at least one of each, and its results are cut. A Scan takes a step on zeros at least.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, all_nodes, dim, given
from onnx_fuse.ir.copying import replace_node


def survivable(model: ir.Model) -> ir.Model:
    """The model, or a copy of it with an If around each LSTM and GRU whose x may be empty."""
    if not any(map(_may_be_empty, all_nodes(model.graph))):
        return model
    model = model.clone()
    for node in list(all_nodes(model.graph)):
        if node.graph is None or not _may_be_empty(node):
            continue
        if node.op_type == "Scan":
            _take_a_step(node)
            continue
        outer, plain, labels = Builder(), Builder(), [v.name or "" for v in node.outputs]
        used = [i for i, name in enumerate(labels) if name]
        results = plain.node(node.op_type, node.inputs, outputs=labels, attributes=node.attributes)
        results = results if isinstance(results, tuple) else (results,)
        branches = {
            "then_branch": _of_zeros(node, used),
            "else_branch": ir.Graph([], [results[i] for i in used], nodes=plain.nodes),
        }
        for key, branch in branches.items():
            branch.name = f"{node.name or labels[used[0]]}.{key}"
            for i, value in zip(used, branch.outputs, strict=True):
                value.name = f"{labels[i]}.{key}"
        empty = outer.Equal(outer.Size(node.inputs[0]), outer.constant(0))
        ends = outer.node("If", [empty], outputs=len(used), name=node.name, attributes=branches)
        by_place = dict(zip(used, ends if isinstance(ends, tuple) else (ends,), strict=True))
        replace_node(node, outer.nodes, [by_place.get(i) for i in range(len(node.outputs))])
    return model


def _may_be_empty(node: ir.Node) -> bool:
    if node.op_type == "Scan" and not node.domain and node.version != 8:
        first, axes = _scanned(node)
        return not all(dim(x, axis) for x, axis in zip(node.inputs[first:], axes, strict=True))
    recurrent = node.op_type in ("LSTM", "GRU") and not node.domain and len(node.inputs) > 2
    return recurrent and not all(dim(node.inputs[0], axis) for axis in range(3))


def _scanned(node: ir.Node) -> tuple[int, list[int]]:
    """The place of a Scan's first scanned input, and the axes along which they are."""
    count = node.attributes["num_scan_inputs"].as_int()
    return len(node.inputs) - count, list(node.attributes.get_ints("scan_input_axes", [0] * count))


def _take_a_step(node: ir.Node) -> None:
    """A Scan in place of another: without a step it takes one on zeros, and its results are cut."""
    op, (first, axes) = Builder(), _scanned(node)
    steps = op.Gather(op.Shape(node.inputs[first]), [axes[0]])
    none = op.Equal(op.Squeeze(steps), op.constant(0))
    missing = op.Concat([0], op.Sub([1], op.Min(steps, [1])), axis=0)
    states, scanned = node.inputs[:first], node.inputs[first:]
    padded = [op.Pad(x, missing, None, [axis]) for x, axis in zip(scanned, axes, strict=True)]
    results = op.node("Scan", [*states, *padded], outputs=len(node.outputs),
                      attributes=node.attributes)  # fmt: skip
    results = list(results) if isinstance(results, tuple) else [results]
    for i, state in enumerate(states):
        ways = {}
        for branch, value in (("then_branch", state), ("else_branch", results[i])):
            way = Builder()
            ways[branch] = ir.Graph([], [way.Identity(value)], nodes=way.nodes, name=branch)
        results[i] = op.node("If", [none], attributes=ways)
    outputs = node.attributes.get_ints("scan_output_axes", [0] * (len(results) - first))
    for i, axis in enumerate(outputs, first):
        results[i] = op.Slice(results[i], [0], steps, [axis])
    named = zip(results, node.outputs, strict=True)
    replace_node(node, op.nodes, [value if old.name else None for value, old in named])


def _of_zeros(node: ir.Node, used: list[int]) -> ir.Graph:
    """The node on at least one sequence, step and feature, all zeros; what is too much is cut."""
    op, inputs = Builder(), [given(node, i) for i in range(8)]
    x, w, lengths = inputs[0], inputs[1], inputs[4]
    assert x is not None
    sizes = op.Shape(x)
    full = op.Max(sizes, [1, 1, 1])
    steps, batch = (op.Slice(sizes, [i], [i + 1], [0]) for i in (0, 1))
    missing = op.Split(op.Sub(full, sizes), num_outputs=3, axis=0, outputs=3)
    none, more, features = op.constant([0]), missing[1], missing[2]
    inputs[0] = op.CastLike(op.ConstantOfShape(full), x)
    inputs[1] = op.Pad(w, op.Concat(*[none] * 5, features, axis=0))
    lengths = op.Expand(op.Cast(steps, to=ir.DataType.INT32), batch) if lengths is None else lengths
    inputs[4] = op.Pad(lengths, op.Concat(none, more, axis=0))
    for i in (5, 6):
        if inputs[i] is not None:
            inputs[i] = op.Pad(inputs[i], op.Concat(*[none] * 4, more, none, axis=0))
    results = op.node(
        node.op_type, inputs, outputs=2 + (node.op_type == "LSTM"), attributes=node.attributes
    )
    ends = [op.Concat(steps, batch, axis=0), batch, batch]
    axes = ([0, 2], [1], [1])
    cut = [op.Slice(results[i], [0] * len(axes[i]), ends[i], axes[i]) for i in used]
    return ir.Graph([], cut, nodes=op.nodes)

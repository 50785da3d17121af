"""LSTM and GRU of nothing, for which onnxruntime (1.32) ends the process.

An LSTM of no sequence does, and a GRU of no sequence, step or feature. What onnxruntime gets has
such a node behind an If: where x has no element, it runs on zeros with at least one of each, and
its results are cut.
"""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, all_nodes, dim, given


def survivable(model: ir.Model) -> ir.Model:
    """The model, or a copy of it with an If around each LSTM and GRU whose x may be empty."""
    if not any(map(_may_be_empty, all_nodes(model.graph))):
        return model
    model = model.clone()
    for node in list(all_nodes(model.graph)):
        graph = node.graph
        if graph is None or not _may_be_empty(node):
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
        ends = ends if isinstance(ends, tuple) else (ends,)
        for i, value in zip(used, ends, strict=True):
            old = node.outputs[i]
            value.name, value.type, value.shape, old.name = old.name, old.type, old.shape, None
            ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
        graph.insert_before(node, outer.nodes)
        graph.remove(node, safe=True)
    return model


def _may_be_empty(node: ir.Node) -> bool:
    recurrent = node.op_type in ("LSTM", "GRU") and not node.domain and len(node.inputs) > 2
    return recurrent and not all(dim(node.inputs[0], axis) for axis in range(3))


def _of_zeros(node: ir.Node, used: list[int]) -> ir.Graph:
    """The node on at least one sequence, step and feature, all zeros; what is too much is cut."""
    op, inputs = Builder(), [given(node, i) for i in range(8)]
    x, w, lengths = inputs[0], inputs[1], inputs[4]
    assert x is not None
    sizes = op.Shape(x)
    full = op.Max(sizes, op.constant([1, 1, 1]))
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

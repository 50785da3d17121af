"""The training operators of the standard (ai.onnx.preview.training), written out."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnx_fuse.autodiff.emit import Emitter, roots
from onnx_fuse.autodiff.walk import backward
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import reads
from onnx_fuse.ir.constants import PREVIEW
from onnx_fuse.ir.copying import Copier
from onnx_fuse.ops.shape_ops import fail, text
from onnx_fuse.ops.update import expand_standard_updates


def expand_training_ops(model: ir.Model) -> int:
    """Replace the nodes of ai.onnx.preview.training, in place; returns how many there were.

    Adam, Adagrad and Momentum are written out; Gradient becomes the backward of the values its
    attributes name. Raises ModelError where a name is not a value of the graph.
    """
    graph = model.graph
    markers = [n for n in graph if n.domain == PREVIEW and n.op_type == "Gradient"]
    if markers:
        infer_shapes(model)
    for node in markers:
        _expand_gradient(model, node)
    if markers:
        graph.sort()  # what read the gradients stands before them
        infer_shapes(model)
    return len(markers) + expand_standard_updates(model)


def _expand_gradient(model: ir.Model, node: ir.Node) -> None:
    """d y / d xs of the part of the graph between xs, zs and y, at the values of the inputs."""
    graph = model.graph
    named = {v.name: v for v in (*roots(graph), *(v for n in graph for v in n.outputs))}
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
    model: ir.Model, values: Mapping[ir.Value, ir.Value], y: ir.Value
) -> tuple[ir.Value, list[ir.Value]]:
    """The nodes between the keys of `values` and y again, on copies of its values: (y, copies).

    A copy stands for a symbol: the gradient does not flow past it, and a node of the original that
    another reader needs stays as it is.
    """
    graph, op = model.graph, Emitter(model)
    leaves = {
        symbol: op.node("Identity", [value], outputs=[op.fresh(f"{symbol.name}.of.{y.name}")])
        for symbol, value in values.items()
    }
    wanted, between = {y}, []
    for node in reversed(list(graph)):
        if any(v in wanted and v not in values for v in node.outputs):
            between.append(node)
            wanted.update(v for v in reads(node) if v is not None)
    copier = Copier(
        values=dict(leaves), fresh=lambda name: op.fresh(f"{name}.of.{y.name}"), names_nodes=True,
        typed=True,
    )  # fmt: skip
    for node in reversed(between):
        if not copier.values.keys().isdisjoint(reads(node)):
            op.nodes += copier.copy(node)
            copier.values.update(leaves)  # a symbol that the node makes stays what it stands for
    graph.extend(op.nodes)
    return copier.values.get(y) or y, list(leaves.values())

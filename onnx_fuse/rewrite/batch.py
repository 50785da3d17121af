"""Open the batch of a model that was exported with a fixed one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import ModelError
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import Builder, const_array, extents, required
from onnx_fuse.ir.names import Names


def free_batch(model: ir.Model) -> int:
    """Make the first axis of all inputs, which must be of one fixed size, free; returns that size.

    Exporters write the batch down in constant Reshape targets, whose first entry, the batch or a
    multiple of it, becomes 0 (as in the input) or -1 (whatever is left), and in parts joined to
    each example. Whether that was all is for the caller to check, on numbers. Raises ModelError.
    """
    graph = model.graph
    first = {v.name: v.shape[0] for v in graph.inputs if v.shape is not None and len(v.shape)}
    sizes = set(extents(first.values()))
    if len(sizes) != 1 or not isinstance(size := next(iter(sizes)), int):
        raise ModelError(f"the inputs have no fixed batch in common: {first}")
    infer_shapes(model)
    depends = _computed_from(graph.inputs)
    for node in list(graph):
        if node.op_type == "Reshape" and node.inputs[0] in depends:
            _open_target(graph, node, size)
        elif node.op_type == "Concat" and depends.intersection(filter(None, node.inputs)):
            _open_parts(graph, node, depends)
    for value in graph.inputs:
        if value.shape is not None and len(value.shape):
            value.shape = ir.Shape(["batch", *value.shape[1:]])
    for value in depends - set(graph.inputs):
        value.shape = None
    infer_shapes(model)
    return size


def _open_target(graph: ir.Graph, node: ir.Node, size: int) -> None:
    data, target = required(node.inputs[0]), const_array(node.inputs[1])
    if target is None or not target.size or target[0] % size or 0 in target:
        return
    same = data.shape is not None and len(data.shape) > 0 and data.shape[0] == target[0] == size
    if not same and -1 in target:
        return
    op = Builder()
    shape = op.constant(np.array([0 if same else -1, *target[1:]], np.int64))
    shape.name = Names.of(graph).fresh(f"{node.outputs[0].name}.shape")
    graph.insert_before(node, op.nodes)
    node.replace_input_with(1, shape)
    node.attributes.pop("allowzero", None)


def _open_parts(graph: ir.Graph, node: ir.Node, depends: set[ir.Value]) -> None:
    """Repeat a part that is the same for all examples, such as a class token, for each of them."""
    if node.attributes["axis"].as_int() == 0:
        return
    batched = next(v for v in node.inputs if v in depends)
    for i, part in enumerate(node.inputs):
        if part is None or part in depends or part.shape is None or part.shape[0] != 1:
            continue
        op = Builder()
        ones = op.constant([1] * (len(part.shape) - 1))
        shape = op.Concat(op.Shape(batched, start=0, end=1), ones, axis=0)
        repeated = op.Expand(part, shape)
        for new in op.nodes:
            new.outputs[0].name = Names.of(graph).fresh(f"{node.outputs[0].name}.part")
            graph.insert_before(node, new)
        node.replace_input_with(i, repeated)


def _computed_from(roots: Iterable[ir.Value]) -> set[ir.Value]:
    dependent = set(roots)
    todo = list(dependent)
    while todo:
        for node, _ in todo.pop().uses():
            new = [v for v in node.outputs if v not in dependent]
            dependent.update(new)
            todo.extend(new)
    return dependent

"""The bodies of a model's contrib nodes: written out, or lent to shape inference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import onnx_ir as ir

from onnx_fuse.importer.contrib.table import (
    MICROSOFT,
    Unwritable,
    function,
    lookup,
    signature,
    wants,
    write,
)
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.ir.names import Names


def expand(
    model: ir.Model, chosen: Callable[[ir.Node], bool] = lambda node: True
) -> dict[str, str]:
    """Replace the contrib nodes that are `chosen` by their bodies, in place.

    Returns the reason for each that has none, by the node's name. A node of a body carries the
    metadata of the node it stands for.
    """
    reasons: dict[str, str] = {}
    names: Names | None = None
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        if lookup(node) is None or not chosen(node) or node.graph is None:
            continue
        try:
            nodes, results = write(node)
        except Unwritable as error:
            reasons[node.name or node.outputs[0].name or node.op_type] = str(error)
            continue
        names = names or Names.of(model.graph)
        stem = node.name or next((v.name for v in node.outputs if v.name), node.op_type)
        for i, inner in enumerate(nodes):
            inner.metadata_props.update(node.metadata_props)
            inner.name = names.fresh(f"{stem}/{inner.op_type}")
            for value in inner.outputs:
                value.name = names.fresh(f"{stem}.{inner.op_type}.{i}")
        if nodes:
            nodes[-1].name, nodes[-1].doc_string = node.name, node.doc_string
        replace_node(node, nodes, results)
    if not any(n.domain == MICROSOFT for n in ir.traversal.RecursiveGraphIterator(model.graph)):
        model.graph.opset_imports.pop(MICROSOFT, None)
    return reasons


@contextlib.contextmanager
def bodies_attached(model: ir.Model) -> Iterator[tuple[set[ir.Value], int]]:
    """Within the block each contrib node calls a function that is its body: inference reads it.

    The values yielded are outputs that nobody reads: a body does not make them, and what stands
    for them in the function has any type. The number is that of the nodes whose body cannot be
    written, perhaps since a size of their inputs is not known yet. Nothing is to be written in the
    block: onnxruntime has kernels for these operators.
    """
    overloads: dict[object, str | None] = {}
    held: list[tuple[ir.Node, str]] = []
    without = 0
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if lookup(node) is None:
            continue
        key = signature(node)
        if key is None or key not in overloads:
            overload: str | None = f"body{len(overloads)}"
            try:
                body = function(node, model.graph.opset_imports, overload or "")
                model.functions[body.identifier()] = body
            except Unwritable:
                overload = None
            overloads[key if key is not None else object()] = overload
        else:
            overload = overloads[key]
        if overload is None:
            without += 1
        else:
            held.append((node, node.overload))
            node.overload = overload
    added = {node.op_identifier() for node, _ in held}
    unread = {v for node, _ in held for i, v in enumerate(node.outputs) if not wants(node, i)}
    try:
        yield unread, without
    finally:
        for key in added:
            model.functions.pop(key, None)
        for node, before in held:
            node.overload = before

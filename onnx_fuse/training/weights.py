"""Names of weights, and what reaches a value."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.ir.build import all_nodes, subgraphs
from onnx_fuse.rewrite import packed_weights


def model_names(value: ir.Value) -> list[str]:
    """The model's own names of what a (packed) initializer holds."""
    return [part.name for part in packed_weights.parts(value)[1]]


def ancestors(value: ir.Value) -> set[ir.Value]:
    """All values that `value` is computed from, those that the bodies of an If or Loop read too."""
    seen, todo = {value}, [value]
    while todo:
        node = todo.pop().producer()
        if node is None:
            continue
        bodies = [inner for a in node.attributes.values() for inner in subgraphs(a)]
        for reader in (node, *(each for body in bodies for each in all_nodes(body))):
            for v in reader.inputs:
                if v is not None and v not in seen:
                    seen.add(v)
                    todo.append(v)
        for v in (result for body in bodies for result in body.outputs):
            if v not in seen:  # a body may return what is outside it
                seen.add(v)
                todo.append(v)
    return seen


def literal(name: str) -> str:
    """A glob that matches this name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)

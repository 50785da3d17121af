"""Follow shapes through a graph, and collect its constraints on the sizes of its inputs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir import Node, Value

from onnx_fuse.ir.build import const_array, subgraphs
from onnx_fuse.validation.sizes import System
from onnx_fuse.validation.symbolic import arithmetic, caches, compute, moves
from onnx_fuse.validation.symbolic.walk import Fact, Lengths, Rule, Shape, Walk, origin


def follow(
    model: ir.Model, system: System, shapes: Mapping[str, Shape], branches: Setting | None = None
) -> Mapping[str, Lengths]:
    """Collect the hard and soft constraints of the graph on its inputs' `shapes` in `system`.

    Soft constraints: two axes that meet only in a Reshape are equal, a mask indexed by positions is
    as long as the positions reach, and an axis of an input and one of an output with the same name
    are equal, as for an output's cotangent. Returns the inputs that hold numbers of tokens.
    """
    walk = Walk(system, RULES, branches or {})
    for value in model.graph.inputs:
        shape = shapes.get(value.name or "")
        if shape is not None:
            walk.facts[value] = Fact(shape)
    walk.graph(model.graph)
    for value in model.graph.outputs:
        inferred, named = walk.fact(value).shape, walk.declared(value)
        if inferred is not None and named is not None and len(inferred) == len(named):
            walk.alike += [p for p in zip(named, inferred, strict=True) if p[0] != p[1]]
    for a, b in (*walk.alike, *walk.indexed):
        a, b = system.resolve(a), system.resolve(b)
        difference = a - b
        simple = all(len(m) == 1 and isinstance(m[0], str) for m in difference.terms)
        if simple and a.number is None and b.number is None:
            system.require("equal", a, b, soft=True)
    return walk.lengths


def _if(w: Walk, node: Node) -> list[Fact]:
    """The branch that the condition chooses, or where that is open both, for their shapes."""
    condition = node.inputs[0]
    entries = w.entries(condition)
    decided = entries.flat[0] if entries is not None and entries.size == 1 else None
    if decided is None and condition is not None:
        name, wanted = controls(condition) or ("", None)
        chosen = w.branches.get(name)
        decided = chosen if wanted is None or chosen is None else chosen == wanted
    if not isinstance(decided, bool):
        return []
    [branch] = subgraphs(node.attributes["then_branch" if decided else "else_branch"])
    w.graph(branch)
    for value, inner in zip(node.outputs, branch.outputs, strict=True):
        if (inner_entries := w.entries(inner)) is not None:
            w.guesses.enter(value, inner_entries)
    return [w.fact(v) for v in branch.outputs]


Setting = Mapping[str, bool | int]
"""Values of the inputs that branches depend on."""


def controls(condition: Value) -> tuple[str, int | None] | None:
    """(input, None) where a condition is a boolean input, (input, 3) where it is `input == 3`."""
    source = origin(condition)
    node = source.producer()
    if node is None:
        return (source.name or "", None) if source.is_graph_input() else None
    if node.op_type != "Equal":
        return None
    for value, other in (node.inputs, node.inputs[::-1]):
        number = const_array(other)
        start = origin(value) if value is not None else None
        single = number is not None and number.size == 1 and number.dtype.kind in "iu"
        if single and number is not None and start is not None and start.is_graph_input():
            return start.name or "", int(number.item())
    return None


RULES: dict[str, Rule] = {
    **arithmetic.RULES,
    **moves.RULES,
    **compute.RULES,
    **caches.RULES,
    "If": _if,
}

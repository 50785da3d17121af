"""What a graph asks of the sizes of its inputs, found by following shapes through its nodes."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir
from onnx_ir import Node, Value

from onnx_fuse.onnx.build import subgraphs
from onnx_fuse.validate.sizes import System
from onnx_fuse.validate.symbolic import arithmetic, compute, moves
from onnx_fuse.validate.symbolic.walk import Fact, Rule, Shape, Walk


def follow(
    model: onnx_ir.Model,
    system: System,
    shapes: Mapping[str, Shape],
    branches: Mapping[str, bool] | None = None,
) -> None:
    """Enter what the graph asks of its inputs' `shapes` into `system`, and what it makes likely.

    Likely is that axes are equal where only a Reshape meets both, and that a mask which positions
    pick from is as long as these reach.
    """
    walk = Walk(system, RULES, branches or {})
    for value in model.graph.inputs:
        walk.facts[value] = Fact(shapes.get(value.name or ""))
    walk.graph(model.graph)
    for a, b in (*walk.alike, *walk.indexed):
        a, b = system.resolve(a), system.resolve(b)
        difference = a - b
        simple = all(len(m) == 1 and isinstance(m[0], str) for m in difference.terms)
        if simple and a.number is None and b.number is None:
            system.demand("equal", a, b, soft=True)


def _if(w: Walk, node: Node) -> list[Fact]:
    """The branch that the condition chooses, or where that is open both, for their shapes."""
    condition = node.inputs[0]
    entries = w.entries(condition)
    known = entries.flat[0] if entries is not None and entries.size == 1 else None
    if known is None and condition is not None:
        known = w.branches.get(controls(condition) or "")
    if not isinstance(known, bool):
        return []
    [branch] = subgraphs(node.attributes["then_branch" if known else "else_branch"])
    w.graph(branch)
    return [w.fact(v) for v in branch.outputs]


def controls(condition: Value) -> str | None:
    """The boolean input that a condition is, through nodes that only pass it on."""
    node = condition.producer()
    if node is None:
        return condition.name if condition.is_graph_input() else None
    passes_on = node.op_type in ("Identity", "Squeeze", "Unsqueeze", "Reshape", "Cast", "Gather")
    return controls(node.inputs[0]) if passes_on and node.inputs and node.inputs[0] else None


RULES: dict[str, Rule] = arithmetic.RULES | moves.RULES | compute.RULES | {"If": _if}

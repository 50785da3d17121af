"""A fusion rule from a body: nodes that are, one for one, those of an operator's body become it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array
from onnx_fuse.ops.opdef import OpDef
from onnx_fuse.ops.rules import Rewriter, Rule

_COMMUTES = frozenset(("Add", "Mul", "Max", "Min", "And", "Or", "Xor", "Equal"))


def body_rule(definition: OpDef, level: int) -> Rule:
    """A rule that puts the operator where a graph computes what its body does.

    The graph is then the same but for the operator's name, so that nothing is rounded differently.
    Inner values must have no other reader. Attributes that the body refers to are read from the
    nodes, a Constant in the body from a constant that is equal to it.
    """
    function = definition.function()
    (y,) = function.outputs
    last = y.producer()
    assert last is not None

    def apply(rw: Rewriter, node: ir.Node) -> bool:
        match = _Match(function)
        if not match.value(y, node.outputs[0]):
            return False
        inner = [n for n in match.nodes.values() if n is not node]
        for each in inner:
            for value in each.outputs:
                readers = [use.node for use in value.uses()]
                if value.is_graph_output() or any(r not in match.nodes.values() for r in readers):
                    reason = f"another node reads '{value.name}'"
                    return rw.refuse(definition.name, [node, *inner], reason)
        if any(formal not in match.values for formal in function.inputs):
            return False
        op = Builder()
        made = op.node(
            definition.name,
            [match.values[formal] for formal in function.inputs],
            domain=definition.domain,
            attributes=match.attributes,
        )
        rw.model.graph.opset_imports[definition.domain] = 1
        return rw.replace(node, op, [node.outputs[0]], [made])

    return Rule(definition.name, level, (last.op_type,), apply)


class _Match:
    """What the values, nodes and attributes of a body stand for in a graph."""

    def __init__(self, function: ir.Function) -> None:
        self._formals = set(function.inputs)
        self.values: dict[ir.Value, ir.Value] = {}
        self.nodes: dict[ir.Node, ir.Node] = {}
        self.attributes: dict[str, Any] = {}

    def value(self, formal: ir.Value | None, actual: ir.Value | None) -> bool:
        """Whether a value of the graph is that of the body, as far as is known so far."""
        if formal is None or actual is None:
            return formal is actual
        known = self.values.get(formal)
        if known is not None:
            return known is actual
        pattern, node = formal.producer(), actual.producer()
        if formal in self._formals:
            self.values[formal] = actual
            return True
        assert pattern is not None
        if pattern.op_type == "Constant" and not pattern.domain:
            return _equal(const_array(formal), const_array(actual), pattern)
        if node is None or formal.index() != actual.index() or not self._node(pattern, node):
            return False
        self.values[formal] = actual
        return True

    def _node(self, pattern: ir.Node, node: ir.Node) -> bool:
        if (pattern.domain, pattern.op_type) != (node.domain, node.op_type):
            return False
        if self.nodes.get(pattern, node) is not node or not self._attributes(pattern, node):
            return False
        self.nodes[pattern] = node
        for order in _orders(pattern, node):
            before = dict(self.values), dict(self.nodes), dict(self.attributes)
            if all(self.value(f, a) for f, a in zip(pattern.inputs, order, strict=True)):
                return True
            self.values, self.nodes, self.attributes = before
        return False

    def _attributes(self, pattern: ir.Node, node: ir.Node) -> bool:
        for name in {*pattern.attributes, *node.attributes}:
            wanted, found = pattern.attributes.get(name), node.attributes.get(name)
            if found is None or wanted is None:
                return False
            if wanted.ref_attr_name is None:
                if wanted.value != found.value:
                    return False
            elif self.attributes.setdefault(wanted.ref_attr_name, found.value) != found.value:
                return False
        return True


def _orders(pattern: ir.Node, node: ir.Node) -> Iterator[tuple[ir.Value | None, ...]]:
    """The orders in which the inputs of a node may be those of the pattern's."""
    if len(pattern.inputs) != len(node.inputs):
        return
    yield tuple(node.inputs)
    if pattern.op_type in _COMMUTES and len(node.inputs) == 2:
        yield tuple(node.inputs)[::-1]


def _equal(a: np.ndarray | None, b: np.ndarray | None, pattern: ir.Node) -> bool:
    """Whether a constant of a graph is that of a body, in type, shape and every bit."""
    if a is None:
        attribute = next(iter(pattern.attributes.values()))
        a = np.asarray(attribute.value)
    if b is None or a.shape != b.shape:
        return False
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()

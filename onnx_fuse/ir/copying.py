"""Copies of nodes on other values, and nodes in the place of others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import onnx_ir as ir

from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import required, subgraphs

_Kind = TypeVar("_Kind", bound="Copier")


@dataclass(frozen=True, kw_only=True)
class Copier:
    """Copies nodes, with their subgraphs, so that they read and make other values.

    `values` says what stands for a value that is read; the results of a copy are added to it. A
    value that it does not hold is read as it is, or where the graph is `closed`, as the body of a
    function is, raises ModelError. `fresh` gives a value its name, from the one it had, and a node
    where `names_nodes`. Results have a type and a shape where `typed`: these may differ from what
    they were. `attributes` are bound to the references to them; one that they lack leaves the
    operator its default. `props` are metadata that each copy gets; `opset` is the version of a node
    that has none.
    """

    values: dict[ir.Value, ir.Value | None]
    fresh: Callable[[str], str | None]
    names_nodes: bool = False
    typed: bool = False
    closed: bool = False
    attributes: Mapping[str, ir.Attr] = field(default_factory=dict)
    props: Mapping[str, str] = field(default_factory=dict)
    opset: int | None = None
    where: str = "the graph"

    @classmethod
    def of_call(
        cls: type[_Kind],
        function: ir.Function,
        inputs: Iterable[ir.Value | None],
        attributes: Mapping[str, ir.Attr],
        **options: Any,
    ) -> _Kind:
        """A copier of the body of a function, for a call with these inputs and attributes."""
        values = dict[ir.Value, ir.Value | None].fromkeys(function.inputs)
        values.update(zip(function.inputs, inputs, strict=False))
        defaults = {a.name: a for a in function.attributes.values() if a.value is not None}
        return cls(values=values, attributes={**defaults, **attributes}, closed=True, **options)

    def read(self, values: Iterable[ir.Value | None], who: str) -> list[ir.Value | None]:
        """The values that stand for those `who` reads. Raises ModelError for a lost one."""
        values = list(values)
        lost = (v for v in values if self.closed and v is not None and v not in self.values)
        if (value := next(lost, None)) is not None:
            raise ModelError(f"{self.where}: nothing defines '{value.name}', which {who} needs")
        return [None if v is None else self.values.get(v, v) for v in values]

    def copy(self, node: ir.Node) -> list[ir.Node]:
        """A copy of a node, or the nodes that stand for it."""
        copy = ir.Node(
            node.domain,
            node.op_type,
            self.inputs_of(node),
            self.attributes_of(node).values(),
            overload=node.overload,
            version=node.version or (None if node.domain else self.opset),
            num_outputs=len(node.outputs),
            name=self.fresh(node.name or node.op_type) if self.names_nodes else node.name,
            doc_string=node.doc_string,
            metadata_props={**self.props, **node.metadata_props},
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = self.fresh(old.name) if old.name else ""  # "" is an output left out
            if self.typed:
                new.type, new.shape = old.type, None if old.shape is None else old.shape.copy()
            self.values[old] = new
        return [copy]

    def inputs_of(self, node: ir.Node) -> list[ir.Value | None]:
        """What a copy of the node reads."""
        return self.read(node.inputs, f"node '{node.name}' ({node.op_type})")

    def attributes_of(self, node: ir.Node) -> dict[str, ir.Attr]:
        """The attributes of a copy of the node, by their names."""
        bound = ((name, self._attribute(name, a)) for name, a in node.attributes.items())
        return {name: attribute for name, attribute in bound if attribute is not None}

    def value(self, old: ir.Value) -> ir.Value:
        """A copy of an input or an initializer of a graph."""
        new = ir.Value(
            name=self.fresh(old.name or "value"),
            type=old.type,
            shape=None if old.shape is None else old.shape.copy(),
            const_value=old.const_value,
        )
        new.metadata_props.update(old.metadata_props)
        self.values[old] = new
        return new

    def _attribute(self, name: str, attribute: ir.Attr) -> ir.Attr | None:
        if attribute.is_ref():
            bound = self.attributes.get(attribute.ref_attr_name or "")
            return None if bound is None else ir.Attr(name, bound.type, bound.value)
        graphs = [self._graph(graph) for graph in subgraphs(attribute)]
        if not graphs:
            return attribute
        single = attribute.type == ir.AttributeType.GRAPH
        return ir.Attr(name, attribute.type, graphs[0] if single else graphs)

    def _graph(self, graph: ir.Graph) -> ir.Graph:
        ends = [self.value(v) for v in dict.fromkeys((*graph.inputs, *graph.initializers.values()))]
        nodes = [copy for node in graph for copy in self.copy(node)]
        outputs = []
        for value in self.read(graph.outputs, f"the graph '{graph.name}'"):
            if value is None:
                raise ModelError(f"{self.where}: a branch returns an input that is left out")
            outputs.append(value)
        constants = [v for v in ends if v.const_value is not None]
        inputs = ends[: len(graph.inputs)]
        return ir.Graph(inputs, outputs, nodes=nodes, initializers=constants, name=graph.name)


def replace_node(
    node: ir.Node, nodes: Sequence[ir.Node], results: Sequence[ir.Value | None], named: bool = True
) -> None:
    """Put `nodes` where a node stands, and their `results` in the places of its outputs.

    A result takes an output's type, a known shape and, where `named`, its name and what describes
    it. None is the result of an output without use.
    """
    graph = required(node.graph)
    graph.insert_before(node, nodes)
    for old, new in [(o, n) for o, n in zip(node.outputs, results, strict=False) if n is not None]:
        new.type, new.shape = old.type or new.type, new.shape if old.shape is None else old.shape
        if named:
            name, old.name = old.name, None
            new.name, new.doc_string = name or new.name, old.doc_string
            new.metadata_props.update(old.metadata_props)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(node, safe=True)

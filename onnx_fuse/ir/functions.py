"""Local functions written out at their calls, and branches where their If stood."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import all_nodes, subgraphs

MAX_DEPTH = 100
MAX_NODES = 1 << 18
"""The most nodes that the calls of one model may become: levels of functions double them."""


def inline_functions(model: ir.Model) -> None:
    """Replace every call of a local function by its nodes, in place.

    Each node keeps the ai.onnx opset of its function as its `version`, for `upgrade` to read: the
    attributes that a rule needs are those of the call.

    The work is linear in the nodes that result. Raises ModelError where a function calls itself,
    where the calls become more than MAX_NODES nodes or nest deeper than MAX_DEPTH (before any is
    written out), and for a function that reads or returns what it does not define.
    """
    called = dict(model.functions)
    if not called:
        return
    _check_size(model.graph, called, _order(model.graph, called))
    _Inliner(called).run(model.graph)
    model.functions.clear()


def inline_branches(graph: ir.Graph, taken: Iterable[tuple[ir.Node, ir.Graph]]) -> None:
    """Put the nodes of each branch in the place of its If; `graph` is the model's whole graph."""
    inliner = _Inliner({})
    inliner.note_names(graph)
    for node, branch in taken:
        home = node.graph
        assert isinstance(home, ir.Graph)
        inliner.branch(home, node, branch)


def _name(key: ir.OperatorIdentifier) -> str:
    return "function '" + (f"{key[0]}.{key[1]}" if key[0] else key[1]) + "'"


def _calls(graph: ir.Graph, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> list[
    ir.OperatorIdentifier
]:  # fmt: skip
    nodes = all_nodes(graph)
    return [key for node in nodes if (key := node.op_identifier()) in functions]


def _order(
    graph: ir.Graph, functions: Mapping[ir.OperatorIdentifier, ir.Function]
) -> list[ir.OperatorIdentifier]:
    """The functions that the graph needs, each after those it calls."""
    order: dict[ir.OperatorIdentifier, None] = {}
    open_: set[ir.OperatorIdentifier] = set()
    todo = [(key, False) for key in dict.fromkeys(_calls(graph, functions))]
    while todo:
        key, done = todo.pop()
        if done:
            open_.discard(key)
            order[key] = None
        elif key in open_:
            raise ModelError(f"{_name(key)} calls itself")
        elif key not in order:
            open_.add(key)
            todo.append((key, True))
            inner = dict.fromkeys(_calls(functions[key].graph, functions))
            if again := next((k for k in inner if k in open_), None):
                raise ModelError(f"{_name(again)} calls itself")
            todo += [(k, False) for k in inner if k not in order]
    return list(order)


def _check_size(
    graph: ir.Graph,
    functions: Mapping[ir.OperatorIdentifier, ir.Function],
    order: Iterable[ir.OperatorIdentifier],
) -> None:
    sizes: dict[ir.OperatorIdentifier, int] = {}
    depths: dict[ir.OperatorIdentifier, int] = {}

    def size(graph: ir.Graph) -> int:
        nodes = all_nodes(graph)
        return sum(sizes.get(node.op_identifier(), 1) for node in nodes)

    for key in order:
        sizes[key] = size(functions[key].graph)
        inner = _calls(functions[key].graph, functions)
        depths[key] = 1 + max((depths[k] for k in inner), default=0)
        if depths[key] > MAX_DEPTH:
            raise ModelError(f"{_name(key)} nests more than {MAX_DEPTH} functions")
        if sizes[key] > MAX_NODES:
            raise ModelError(
                f"{_name(key)} becomes {sizes[key]} nodes, of which {MAX_NODES} are allowed"
            )
    if size(graph) > MAX_NODES:
        worst = max(sizes, key=lambda k: sizes[k])
        raise ModelError(
            f"the calls of {_name(worst)} and others become {size(graph)} nodes, of which "
            f"{MAX_NODES} are allowed"
        )


@dataclass(frozen=True)
class _Scope:
    """One call of a function: what its values, its attributes and its place stand for."""

    values: dict[ir.Value, ir.Value | None]
    attributes: Mapping[str, ir.Attr]
    props: Mapping[str, str]
    where: str
    opset: int | None = None  # of ai.onnx, that the function imports
    open: bool = False  # a branch reads values of the graph that it is in

    def read(self, values: Iterable[ir.Value | None], who: str) -> list[ir.Value | None]:
        """The values that stand for those a body reads. Raises ModelError for a lost one."""
        values = list(values)
        if self.open:
            return [None if v is None else self.values.get(v, v) for v in values]
        lost = next((v for v in values if v is not None and v not in self.values), None)
        if lost is not None:
            raise ModelError(f"{self.where}: nothing defines '{lost.name}', which {who} needs")
        return [None if v is None else self.values[v] for v in values]


class _Inliner:
    """Writes the calls in one graph out. New names are the function's own, with a number."""

    def __init__(self, functions: Mapping[ir.OperatorIdentifier, ir.Function]) -> None:
        self.functions = functions
        self.taken: set[str] = set()
        self.next: dict[str, int] = {}

    def note_names(self, graph: ir.Graph) -> None:
        """Note the names that values of a graph have."""
        for inner in (graph, *graph.subgraphs()):
            self.taken.update(v.name or "" for v in (*inner.inputs, *inner.initializers.values()))
            for node in inner:
                self.taken.update(v.name or "" for v in node.outputs)

    def run(self, graph: ir.Graph) -> None:
        """Write out all calls in a graph."""
        self.note_names(graph)
        for node in list(all_nodes(graph)):
            function = self.functions.get(node.op_identifier())
            if function is not None:
                self._call(node, function)

    def _call(self, call: ir.Node, function: ir.Function) -> None:
        nodes: list[ir.Node] = []
        props = dict(call.metadata_props)
        found = self._expand(call, function, call.inputs, call.attributes, props, nodes)
        self._replace(call, nodes, found, _name(function.identifier()))

    def branch(self, home: ir.Graph, node: ir.Node, branch: ir.Graph) -> None:
        """Move the nodes of a branch into the graph around it."""
        nodes: list[ir.Node] = []
        scope = _Scope({}, {}, dict(node.metadata_props), f"node '{node.name}'", open=True)
        for old in branch.initializers.values():
            new = ir.Value(
                name=self._unique(old.name or "value"),
                type=old.type,
                shape=old.shape,
                const_value=old.const_value,
            )
            new.metadata_props.update(old.metadata_props)
            home.register_initializer(new)
            scope.values[old] = new
        for inner in branch:
            self._node(inner, scope, nodes)
        self._replace(node, nodes, scope.read(branch.outputs, "its branch"), scope.where)

    def _replace(
        self, call: ir.Node, nodes: list[ir.Node], found: Sequence[ir.Value | None], where: str
    ) -> None:
        """Put `nodes` in place of a call; the values that they make take its outputs' names."""
        fresh = {v for node in nodes for v in node.outputs}
        graph = call.graph
        assert graph is not None
        results: list[ir.Value] = []
        for old, result in zip(call.outputs, found, strict=False):
            if result is None and (old.uses() or old.is_graph_output()):
                raise ModelError(f"{where} returns an input that node '{call.name}' leaves out")
            if result is None or result not in fresh:  # what the caller gave, or returned twice
                identity = ir.Node("", "Identity", [result], num_outputs=1)
                nodes.append(identity)
                result = identity.outputs[0]
            fresh.discard(result)
            result.name, result.type, result.shape = old.name, old.type, old.shape
            result.doc_string = old.doc_string
            result.metadata_props.update(old.metadata_props)
            results.append(result)
        graph.insert_before(call, nodes)
        ir.convenience.replace_all_uses_with(call.outputs, results, replace_graph_outputs=True)
        graph.remove(call, safe=True)

    def _expand(
        self,
        call: ir.Node,
        function: ir.Function,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, ir.Attr],
        props: Mapping[str, str],
        nodes: list[ir.Node],
    ) -> list[ir.Value | None]:
        """Add the nodes of a call on these inputs to `nodes`; the values that it returns."""
        where = _name(function.identifier())
        if len(inputs) > len(function.inputs) or len(call.outputs) > len(function.outputs):
            raise ModelError(
                f"node '{call.name}' gives {where} {len(inputs)} inputs and {len(call.outputs)} "
                f"outputs: it has {len(function.inputs)} and {len(function.outputs)}"
            )
        given = {a.name: a for a in function.attributes.values() if a.value is not None}
        given.update(attributes)
        values: dict[ir.Value, ir.Value | None] = dict.fromkeys(function.inputs)
        values.update(zip(function.inputs, inputs, strict=False))
        scope = _Scope(values, given, props, where, function.opset_imports.get(""))
        for node in function:
            self._node(node, scope, nodes)
        return scope.read(function.outputs, "its outputs")

    def _node(self, node: ir.Node, scope: _Scope, nodes: list[ir.Node]) -> None:
        """Add a copy of `node` to `nodes`, or of what it calls."""
        inputs = scope.read(node.inputs, f"node '{node.name}' ({node.op_type})")
        attributes = {k: a for k, v in node.attributes.items() if (a := self._attr(k, v, scope))}
        props = {**scope.props, **node.metadata_props}
        function = self.functions.get(node.op_identifier())
        if function is not None:
            results = self._expand(node, function, inputs, attributes, props, nodes)
            scope.values.update(zip(node.outputs, results, strict=False))
            return
        made = ir.Node(
            node.domain,
            node.op_type,
            inputs,
            attributes.values(),
            overload=node.overload,
            version=node.version or (None if node.domain else scope.opset),
            num_outputs=len(node.outputs),
            name=node.name,
            doc_string=node.doc_string,
            metadata_props=props,
        )
        for old, new in zip(node.outputs, made.outputs, strict=True):
            # An output that is left out has no name. The type is not copied: it may differ here.
            new.name = self._unique(old.name) if old.name else ""
            scope.values[old] = new
        nodes.append(made)

    def _attr(self, name: str, attribute: ir.Attr, scope: _Scope) -> ir.Attr | None:
        if attribute.is_ref():
            given = scope.attributes.get(attribute.ref_attr_name or "")
            # one that the call leaves out has the operator's default
            return None if given is None else ir.Attr(name, given.type, given.value)
        graphs = [self._subgraph(graph, scope) for graph in subgraphs(attribute)]
        if not graphs:
            return attribute
        single = attribute.type == ir.AttributeType.GRAPH
        return ir.Attr(name, attribute.type, graphs[0] if single else graphs)

    def _subgraph(self, graph: ir.Graph, scope: _Scope) -> ir.Graph:
        made: list[ir.Value] = []
        for old in dict.fromkeys((*graph.inputs, *graph.initializers.values())):
            new = ir.Value(
                name=self._unique(old.name or "value"), type=old.type, const_value=old.const_value
            )
            new.shape = None if old.shape is None else old.shape.copy()
            scope.values[old] = new
            made.append(new)
        nodes: list[ir.Node] = []
        for node in graph:
            self._node(node, scope, nodes)
        outputs = []
        for value in scope.read(graph.outputs, f"the graph '{graph.name}'"):
            if value is None:
                raise ModelError(f"{scope.where}: a branch returns an input that is left out")
            outputs.append(value)
        constants = [v for v in made if v.const_value is not None]
        return ir.Graph(
            made[: len(graph.inputs)], outputs, nodes=nodes, initializers=constants, name=graph.name
        )

    def _unique(self, stem: str) -> str:
        name, number = stem, self.next.get(stem, 1)
        while name in self.taken:
            number += 1
            name = f"{stem}_{number}"
        self.next[stem] = number
        self.taken.add(name)
        return name

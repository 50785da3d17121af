"""Local functions written out at their calls, and branches where their If stood."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import all_nodes
from onnx_fuse.ir.copying import Copier, replace_node
from onnx_fuse.ir.names import Names

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
    _Inliner(model.graph, called).run(model.graph)
    model.functions.clear()


def inline_branches(graph: ir.Graph, taken: Iterable[tuple[ir.Node, ir.Graph]]) -> None:
    """Put the nodes of each branch in the place of its If; `graph` is the model's whole graph."""
    inliner = _Inliner(graph, {})
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


@dataclass(frozen=True, kw_only=True)
class _CallCopier(Copier):
    """Copies a body, in which calls of functions are written out, too."""

    inliner: _Inliner

    def copy(self, node: ir.Node) -> list[ir.Node]:
        function = self.inliner.functions.get(node.op_identifier())
        if function is None:
            return super().copy(node)
        inputs, attributes = self.inputs_of(node), self.attributes_of(node)
        props = {**self.props, **node.metadata_props}
        nodes, results = self.inliner.expand(node, function, inputs, attributes, props)
        self.values.update(zip(node.outputs, results, strict=False))
        return nodes


class _Inliner:
    """Writes the calls in one graph out. New names are the function's own, with a number."""

    def __init__(
        self, graph: ir.Graph, functions: Mapping[ir.OperatorIdentifier, ir.Function]
    ) -> None:
        self.functions = functions
        self.names = Names.of(graph)

    def run(self, graph: ir.Graph) -> None:
        for node in list(all_nodes(graph)):
            function = self.functions.get(node.op_identifier())
            if function is not None:
                self._call(node, function)

    def _call(self, call: ir.Node, function: ir.Function) -> None:
        props = dict(call.metadata_props)
        nodes, results = self.expand(call, function, call.inputs, call.attributes, props)
        self._replace(call, nodes, results, _name(function.identifier()))

    def branch(self, home: ir.Graph, node: ir.Node, branch: ir.Graph) -> None:
        props, where = dict(node.metadata_props), f"node '{node.name}'"
        copier = _CallCopier(
            values={}, fresh=self.names.fresh, props=props, where=where, inliner=self
        )
        for old in branch.initializers.values():
            home.register_initializer(copier.value(old))
        nodes = [copy for inner in branch for copy in copier.copy(inner)]
        self._replace(node, nodes, copier.read(branch.outputs, "its branch"), where)

    def _replace(
        self, call: ir.Node, nodes: list[ir.Node], returned: Sequence[ir.Value | None], where: str
    ) -> None:
        """Put `nodes` in place of a call; the values that they make take its outputs' names."""
        fresh = {v for node in nodes for v in node.outputs}
        results: list[ir.Value] = []
        for old, result in zip(call.outputs, returned, strict=False):
            if result is None and (old.uses() or old.is_graph_output()):
                raise ModelError(f"{where} returns an input that node '{call.name}' leaves out")
            if result is None or result not in fresh:  # what the caller gave, or returned twice
                identity = ir.Node("", "Identity", [result], num_outputs=1)
                nodes.append(identity)
                result = identity.outputs[0]
            fresh.discard(result)
            results.append(result)
        replace_node(call, nodes, results)

    def expand(
        self,
        call: ir.Node,
        function: ir.Function,
        inputs: Sequence[ir.Value | None],
        attributes: Mapping[str, ir.Attr],
        props: Mapping[str, str],
    ) -> tuple[list[ir.Node], list[ir.Value | None]]:
        where = _name(function.identifier())
        if len(inputs) > len(function.inputs) or len(call.outputs) > len(function.outputs):
            raise ModelError(
                f"node '{call.name}' gives {where} {len(inputs)} inputs and {len(call.outputs)} "
                f"outputs: it has {len(function.inputs)} and {len(function.outputs)}"
            )
        copier = _CallCopier.of_call(
            function, inputs, attributes, props=props, opset=function.opset_imports.get(""),
            fresh=self.names.fresh, where=where, inliner=self,
        )  # fmt: skip
        nodes = [copy for node in function for copy in copier.copy(node)]
        return nodes, copier.read(function.outputs, "its outputs")

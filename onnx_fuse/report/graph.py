"""Graphs as a page draws them: nodes with all that is known about each, laid out in layers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.ir.build import const_array
from onnx_fuse.ir.constants import CANONICAL_OPSET, FUSE, base_name
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.bodies import body_of
from onnx_fuse.ops.rules import label
from onnx_fuse.report.layered import layered
from onnx_fuse.report.page import View

_LETTER = 7.7  # width of a letter of an operator's name
_MARGIN = 22
_LONGEST = 160  # letters of an attribute's value
_FEW = 6  # elements of a constant that are shown

_UNNAMED = re.compile(r"unk__\d+|None")  # what shape inference calls a size it does not know

INPUT, OUTPUT = "input", "output"


@dataclass
class Drawn:
    """A graph to draw, and what a command knows about its nodes."""

    title: str
    model: ir.Model
    facts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By a node's label: names and values to show."""
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By a metric's name, "time" or "error", and a node's label: a number to colour the node by."""


def view(drawn: Sequence[Drawn]) -> View:
    """A View of one graph, or of the graph before and after fusion, in this order."""
    graphs = [_Graph(d) for d in drawn]
    data = [graph.data() for graph in graphs]
    if len(graphs) == 2:
        origins = _origins(*graphs)
        data[1]["from"] = {str(i): sorted(nodes) for i, nodes in origins.items()}
        data[0]["group"] = _groups(graphs[0], graphs[1], origins)
    last = graphs[-1]
    data[-1]["group"] = [
        base_name(n) if isinstance(n, ir.Node) and n.domain == FUSE else "" for n in last.nodes
    ]
    bodies = {n.op_type: _body_text(n) for n in last.own if n.domain == FUSE}
    counts = [f"{d.title}, {len(g.own)} nodes" for d, g in zip(drawn, graphs, strict=True)]
    return View("graph", f"Graph: {' and '.join(counts)}", {"graphs": data, "bodies": bodies})


class _Graph:
    """The nodes of a graph, its inputs and outputs among them, and the edges between them."""

    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn
        graph = drawn.model.graph
        self.own = [n for n in graph if n.op_type != "Constant"]
        inputs = [v for v in graph.inputs if v.name not in graph.initializers and v.uses()]
        self.nodes: list[ir.Node | tuple[str, ir.Value]] = [(INPUT, v) for v in inputs]
        self.nodes += self.own
        self.nodes += [(OUTPUT, v) for v in graph.outputs]
        self.makers: dict[ir.Value, int] = {v: i for i, v in enumerate(inputs)}
        for i, node in enumerate(self.own, len(inputs)):
            self.makers.update(dict.fromkeys(node.outputs, i))
        edges: dict[tuple[int, int], None] = {}
        for i, reader in enumerate(self.nodes):
            for value in reads(reader):
                if value in self.makers:
                    edges[self.makers[value], i] = None
        self.edges = list(edges)

    def data(self) -> dict[str, Any]:
        values, types, ops = _Numbers(), _Numbers(), _Numbers()
        nodes: list[list[Any]] = []
        attributes, facts = {}, {}
        metrics: dict[str, list[float | None]] = {
            name: [None] * len(self.nodes) for name in self.drawn.metrics
        }
        for i, node in enumerate(self.nodes):
            if isinstance(node, tuple):
                kind, value = node
                line = [self._value(value, values, types)]
                ends: tuple[list[int], list[int]] = ([], line) if kind == INPUT else (line, [])
                nodes.append([ops[kind], value.name or "", *ends])
                continue
            ins = [-1 if v is None else self._value(v, values, types) for v in node.inputs]
            outs = [self._value(v, values, types) for v in node.outputs if v.name]
            name = node.op_type if node.domain in ("", FUSE) else f"{node.domain}.{node.op_type}"
            nodes.append([ops[name], label(node), ins, outs])
            if node.attributes:
                attributes[str(i)] = {a.name: _attribute(a) for a in node.attributes.values()}
            if label(node) in self.drawn.facts:
                facts[str(i)] = self.drawn.facts[label(node)]
            for metric, numbers in self.drawn.metrics.items():
                metrics[metric][i] = numbers.get(label(node))
        wide = [max(56, round(_LETTER * len(name) + _MARGIN)) for name in ops.names]
        placed = layered([wide[node[0]] for node in nodes], self.edges)
        return {
            "title": self.drawn.title, "ops": ops.names, "wide": wide, "types": types.names,
            "values": values.names, "nodes": nodes, "attributes": attributes, "facts": facts,
            "metrics": metrics, "x": placed.x, "y": placed.y,
            "width": placed.width, "height": placed.height,
            "edges": [[a, b, *path] for (a, b), path in zip(self.edges, placed.paths, strict=True)],
        }  # fmt: skip

    def _value(self, value: ir.Value, values: _Numbers, types: _Numbers) -> int:
        return values[value.name or "", types[_type(value)]]


class _Numbers:
    """Numbers objects in the order in which they are first asked for."""

    def __init__(self) -> None:
        self.names: list[Any] = []
        self._known: dict[Any, int] = {}

    def __getitem__(self, name: object) -> int:
        if name not in self._known:
            self._known[name] = len(self.names)
            self.names.append(name)
        return self._known[name]


def reads(node: ir.Node | tuple[str, ir.Value]) -> Iterable[ir.Value]:
    """The values that a node reads, those in its branches and bodies among them."""
    if isinstance(node, tuple):
        return [node[1]] if node[0] == OUTPUT else []
    values = [v for v in node.inputs if v is not None]
    for attribute in node.attributes.values():
        graphs: list[ir.Graph] = []
        if attribute.type == ir.AttributeType.GRAPH:
            graphs = [attribute.value]
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs = list(attribute.value)
        for graph in graphs:
            inner = list(ir.traversal.RecursiveGraphIterator(graph))
            values += [v for n in inner for v in n.inputs if v is not None]
            values.extend(graph.outputs)
    return values


def _type(value: ir.Value) -> str:
    """The type and shape of a value, and the numbers of a small constant."""
    kind = value.dtype.name.lower() if value.dtype is not None else ""
    dims = value.shape if value.shape is not None else None
    shape = "" if dims is None else f"[{', '.join(_UNNAMED.sub('?', str(d)) for d in dims)}]"
    text = f"{kind} {shape}".strip() or "unknown type"
    array = const_array(value)
    if array is None:
        return text
    if array.size <= _FEW and array.dtype.kind in "biuf":
        return f"{text} = {', '.join(f'{x:.6g}' for x in array.astype(np.float64).ravel())}"
    return f"{text} constant"


def _attribute(attribute: ir.Attr) -> str:
    value = attribute.value
    if attribute.type == ir.AttributeType.GRAPH:
        return f"graph of {len(value)} nodes"
    if attribute.type == ir.AttributeType.TENSOR:
        text = f"{value.dtype.name.lower()} {list(value.shape)}"
        return f"{text} = {value.numpy().ravel().tolist()}" if value.size <= _FEW else text
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    text = str(list(value) if isinstance(value, tuple | list) else value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _body_text(node: ir.Node) -> str:
    body = body_of(node.op_type)
    if body is None:
        return ""
    exposed = FusedName.of(node.op_type).exposed
    function = body(exposed, CANONICAL_OPSET, node.overload)
    return str(onnx.printer.to_text(ir.serde.serialize_function(function)))


# ---- before and after -----------------------------------------------------------------------


def _origins(before: _Graph, after: _Graph) -> dict[int, set[int]]:
    """For each node of the graph after fusion the nodes before it that it stands for.

    Fusions keep the names of the values that they leave: what a node computes is whatever computed
    the values of its outputs' names, back to values that the graph after fusion has too. A node
    that has a new output stands also for what the nodes that read it stand for.
    """
    computed = {v.name: i for v, i in before.makers.items()}
    stays = {v.name for v in after.makers}
    origins: dict[int, set[int]] = {}
    for i, node in enumerate(after.nodes):
        if isinstance(node, tuple):
            if node[1].name in computed and node[0] == INPUT:
                origins[i] = {computed[node[1].name]}
            continue
        todo = [v.name for v in node.outputs if v.name in computed]
        region: set[int] = set()
        while todo:
            number = computed[todo.pop()]
            if number in region:
                continue
            region.add(number)
            todo += [
                v.name
                for v in reads(before.nodes[number])
                if v.name in computed and v.name not in stays
            ]
        if region:
            origins[i] = region
    readers: dict[int, list[int]] = defaultdict(list)
    for a, b in after.edges:
        readers[a].append(b)
    for i, node in reversed(list(enumerate(after.nodes))):
        outputs = [] if isinstance(node, tuple) else node.outputs
        if any(v.name not in computed and v.uses() for v in outputs):
            regions = [origins[j] for j in readers[i] if j in origins]
            if regions:
                origins[i] = origins.get(i, set()).union(*regions)
    return origins


def _groups(before: _Graph, after: _Graph, origins: Mapping[int, set[int]]) -> list[str]:
    """The fused operator that each node of `before` is now a part of.

    It is "" for a node that is still there, and "-" for one that was removed.
    """
    groups = ["-"] * len(before.nodes)
    smallest = [len(before.nodes) + 1] * len(before.nodes)
    for i, region in origins.items():
        node = after.nodes[i]
        name = base_name(node) if isinstance(node, ir.Node) and node.domain == FUSE else ""
        for number in region:
            if name and len(region) < smallest[number]:
                smallest[number] = len(region)
                groups[number] = name
            elif groups[number] == "-":
                groups[number] = ""
    for number, node in enumerate(before.nodes):
        if isinstance(node, tuple):
            groups[number] = ""
    return groups

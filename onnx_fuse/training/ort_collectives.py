"""A graph with collectives on onnxruntime: the stages between them, and what the ranks exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.distributed.world import World
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import add_input, all_nodes, reads, remove_unused_nodes, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.collective import COLLECTIVES
from onnx_fuse.runtime import ort


@dataclass(frozen=True)
class _Exchange:
    """A collective between two stages: its kind, and the names of what it reads and writes."""

    kind: str
    source: str
    target: str


@dataclass(frozen=True)
class _Stage:
    """A part of the graph that waits for nobody, and the collectives behind it."""

    session: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    exchanges: tuple[_Exchange, ...]


class Staged:
    """A model that is run in stages on the CPU by all ranks of `world` together.

    `threads` are those of an operator, as in `ort.quiet_options`.
    """

    def __init__(self, model: ir.Model, world: World, threads: int = 0) -> None:
        self._world = world
        infer_shapes(model)
        levels = _levels(model)
        last = max(levels.values(), default=0)
        self._stages = [_stage(model, levels, level, threads) for level in range(last + 1)]

    def run(self, feeds: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """The outputs of these names. Raises ModelError for what onnxruntime cannot do."""
        values: dict[str, Array] = dict(feeds)
        for stage in self._stages:
            if stage.outputs:
                inputs = {name: values[name] for name in stage.inputs}
                outputs = ort.run(stage.session, inputs, stage.outputs)
                values |= zip(stage.outputs, outputs, strict=True)
            for kind in COLLECTIVES:
                pairs = [e for e in stage.exchanges if e.kind == kind]
                if pairs:
                    exchanged = self._exchanged(kind, {e.source: values[e.source] for e in pairs})
                    values |= {e.target: exchanged[e.source] for e in pairs}
        return {name: values[name] for name in names}

    def _exchanged(self, kind: str, arrays: dict[str, Array]) -> dict[str, Array]:
        if kind == "AllGather":
            return self._world.all_gather(arrays)
        reduced = self._world.all_reduce(arrays)
        if kind == "ReduceScatter":
            rank, size = self._world.rank, self._world.size
            reduced = {k: a[len(a) // size * rank :][: len(a) // size] for k, a in reduced.items()}
        return reduced


def _is_collective(node: ir.Node) -> bool:
    return node.domain == FUSE and node.op_type in COLLECTIVES


def _levels(model: ir.Model) -> dict[ir.Node, int]:
    """The length of the longest chain of collectives that each node waits for."""
    of: dict[ir.Value, int] = {}
    levels: dict[ir.Node, int] = {}
    for node in model.graph:
        level = max((of.get(v, 0) for v in reads(node) if v is not None), default=0)
        levels[node] = level
        for value in node.outputs:
            of[value] = level + _is_collective(node)
    return levels


def _stage(model: ir.Model, levels: Mapping[ir.Node, int], level: int, threads: int) -> _Stage:
    """The nodes of one level as a model of its own, and the collectives behind them."""
    nodes = list(model.graph)
    waits = [node for node in nodes if _is_collective(node)]
    in_stage = [not _is_collective(n) and (levels[n] == level or _is_constant(n)) for n in nodes]
    later = {v for node in nodes if levels[node] > level for v in reads(node)}
    later |= {v for node in waits if levels[node] == level for v in reads(node)}
    later |= set(model.graph.outputs)
    results = {v for n, inside in zip(nodes, in_stage, strict=True) if inside for v in n.outputs}
    outputs = sorted(str(v.name) for v in results & later if not _is_constant(v.producer()))
    part = model.clone()
    graph = part.graph
    part_nodes = [node for node, inside in zip(list(graph), in_stage, strict=True) if inside]
    values = {str(v.name): v for node in graph for v in node.outputs}
    inner = {v for node in part_nodes for v in node.outputs}
    crossing = {v for node in part_nodes for v in reads(node) if v and v in values.values()} - inner
    graph.outputs.clear()
    for value in sorted(crossing, key=lambda v: str(v.name)):
        graph_input = add_input(graph, str(value.name), value.type, value.shape)
        ir.convenience.replace_all_uses_with(value, graph_input)
    graph.remove([node for node in list(graph) if node not in set(part_nodes)])
    graph.outputs.extend(values[name] for name in outputs)
    remove_unused_nodes(part)
    used = {v for node in all_nodes(graph) for v in node.inputs}
    for value in [v for v in graph.inputs if v not in used and v not in set(graph.outputs)]:
        graph.inputs.remove(value)
    return _Stage(
        # behind a stage a rank waits for the others, whose work needs the processors
        ort.session(part, ort.quiet_options(threads=threads, spins="in runs")) if outputs else None,
        tuple(str(v.name) for v in graph.inputs),
        tuple(outputs),
        tuple(
            _Exchange(n.op_type, str(required(n.inputs[0]).name), str(n.outputs[0].name))
            for n in waits
            if levels[n] == level
        ),
    )


def _is_constant(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "Constant" and not node.domain

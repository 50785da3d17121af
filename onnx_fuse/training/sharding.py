"""Weights of which each rank holds a part, gathered where a step reads them (`shard`).

Weights are gathered in buckets in the order in which they are read, each while what reads the
bucket before it runs, and in 16 bits where 16 bits are read. With "all" a weight is gathered twice,
for the forward and for the backward, so that it takes memory only while it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from onnx_fuse.distributed import buckets
from onnx_fuse.ir.build import Builder, required, sources
from onnx_fuse.ops.rules import typed
from onnx_fuse.training.ranks import Reduction

GATHERED = 2 << 20
"""The first bucket of weights that are gathered."""


@dataclass
class _Read:
    """The readers of a weight, or of its copy in another type, in a step or in half of one."""

    weight: ir.Value
    value: ir.Value
    uses: list[tuple[ir.Node, int]]
    first: int
    """The place in the graph of the first of them."""

    @property
    def nbytes(self) -> int:
        return int(prod(required(self.weight.shape).numpy()) * required(self.value.dtype).itemsize)


def candidates(
    graph: ir.Graph, weights: Sequence[ir.Value], reduction: Reduction
) -> dict[ir.Value, ir.Value]:
    """The weights whose parts the ranks hold, each with a value that stands for this rank's part.

    What a body of an If or Loop reads stays whole, and so does what the ranks do not divide.
    """
    parts = {}
    for w in weights:
        part = reduction.part_of(w)
        if part and all(node.graph is graph for node, _ in w.uses()):
            parts[w] = typed(ir.Value(name=f"{w.name}.part"), w, [part])
    return parts


def gather(
    graph: ir.Graph,
    parts: Mapping[ir.Value, ir.Value],
    reduction: Reduction,
    loss: ir.Value,
    bucket: int,
) -> None:
    """Make each weight an input of this rank's part, and gather the whole for its readers.

    Args:
        graph: The whole graph of a step or of an evaluation.
        parts: The weights, with what stands for their parts until now.
        reduction: What makes the collectives.
        loss: What the forward ends in.
        bucket: Bytes from which weights are gathered together.
    """
    places = {node: i for i, node in enumerate(graph)}
    nodes, forward = list(graph), sources([loss])
    twice = reduction.ranks.shard == "all"
    reads = [r for w in parts for r in _reads(w, places, forward if twice else None)]
    reads.sort(key=lambda r: r.first)
    planned = buckets.plan([r.nbytes for r in reads], bucket)
    starts = {b: r.first for r, b in zip(reversed(reads), reversed(planned), strict=True)}
    op = Builder()
    reduction.op = op
    for read, number in zip(reads, planned, strict=True):
        w, part = read.weight, parts[read.weight]
        if read.value is not w:
            part = op.Cast(part, to=required(read.value.dtype).value)
            part.dtype, part.shape = read.value.dtype, parts[w].shape
        shape = required(w.shape).numpy()
        flat = reduction.node("AllGather", part, GATHERED + number, int(prod(shape)))
        gathered = typed(op.Reshape(flat, list(shape)), read.value, w.shape)
        for node, index in read.uses:
            node.replace_input_with(index, gathered)
        # while what reads the bucket before it runs
        anchor = nodes[starts[number - 1] if number else 0]
        graph.insert_before(anchor, op.nodes)
        op.nodes = []
    for w, part in parts.items():
        for node, _ in list(w.uses()):
            graph.remove(node, safe=True)  # the casts of the whole, which nothing reads any more
        ir.convenience.replace_all_uses_with(part, w)
        w.shape = part.shape


def _reads(
    w: ir.Value, places: Mapping[ir.Node, int], forward: Collection[ir.Value] | None
) -> list[_Read]:
    """The reads of a weight and of its casts; those in the forward apart, where that is known."""
    casts = {n.outputs[0] for n, _ in w.uses() if n.op_type == "Cast" and not n.domain}
    reads = []
    for value in (w, *casts):
        halves: dict[bool, list[tuple[ir.Node, int]]] = {True: [], False: []}
        for node, index in value.uses():
            if node.outputs[0] not in casts:
                first = forward is None or any(v in forward for v in node.outputs)
                halves[first].append((node, index))
        reads += [
            _Read(w, value, uses, min(places[node] for node, _ in uses))
            for uses in halves.values()
            if uses
        ]
    return reads

"""What ranks that train one model together add to the graph of a step.

The loss is the mean over the batch of all ranks: each rank's own mean counts by what it is a mean
of, labels that are not ignored, so its gradient is a part of a sum. Gradients are reduced in
buckets in the order in which the backward makes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.distributed import buckets
from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import Builder, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.traits import VIEWS
from onnx_fuse.ops.loss import LOSSES
from onnx_fuse.ops.rules import typed
from onnx_fuse.training.losses import Target, Term

if TYPE_CHECKING:
    from onnx_fuse.distributed.world import World
    from onnx_fuse.training.options import TrainingOptions
    from onnx_fuse.training.state import State


COUNTS, LOSS, GRADIENTS = 0, 1, 2
"""The buckets: what the ranks count, the loss with statistics, and gradients from 2 on."""
REDUCED = {"fp32": None, "bf16": ir.DataType.BFLOAT16}
"""What gradients are added in, by name."""
SHARDS = ("", "optimizer", "all")


@dataclass(frozen=True)
class Ranks:
    """One of several processes that train one model."""

    rank: int
    """Its number, from 0."""
    size: int
    """The number of processes."""
    reduce: str = "fp32"
    """What gradients are added in: "fp32" (their own type) or "bf16"."""
    shard: str = ""
    """"optimizer": each rank holds, and updates, its part alone of the weights and of the
    optimizer's state, and gathers the weights once a step; "all": for each half of it."""
    sync_batchnorm: bool = False
    """Whether BatchNormalization takes the statistics of all ranks' rows together."""
    bucket: int = buckets.BUCKET
    """Bytes from which gradients are reduced together."""

    def __post_init__(self) -> None:
        if self.reduce not in REDUCED:
            raise UsageError(f"reduce_dtype '{self.reduce}' is not one of {', '.join(REDUCED)}")
        if self.shard not in SHARDS:
            raise UsageError(f"shard '{self.shard}' is not 'optimizer' or 'all'")


@dataclass(frozen=True)
class Measure:
    """What the mean of one loss is taken over; "" where that is the rows of the batch."""

    labels: str = ""
    """The input of labels."""
    ignored: int | None = None
    """The label that does not count, where labels are classes."""
    weight: tuple[float, ...] = ()
    """What a label of each class counts; none where each counts 1."""
    sums: bool = False
    """Whether the loss is a sum, of which the sum over the ranks is taken."""

    def count(self, feeds: Mapping[str, Array], rows: int) -> float:
        """What a rank's batch counts."""
        if self.sums or not self.labels:
            return float(rows)
        labels = feeds[self.labels]
        if self.ignored is None:
            return float(labels.size)
        chosen = labels[labels != self.ignored]
        return float(np.asarray(self.weight)[chosen].sum()) if self.weight else float(chosen.size)


def measures(terms: Sequence[Term], targets: Sequence[Target]) -> tuple[Measure, ...]:
    """What the losses are means of; `targets` are those of the terms that compare with labels."""
    rest, all_measures = list(targets), []
    for term in terms:
        if not term.named or term.loss not in LOSSES:
            all_measures.append(Measure())
            continue
        sums, kind = term.options.get("reduction", "mean") == "sum", LOSSES[term.loss].labels
        target = rest.pop(0) if kind else Target("", "")
        classes = kind == "classes"
        weight = term.options.get("weight") if classes else None
        all_measures.append(
            Measure(
                target.labels if kind != "sequence" else "",
                target.ignored if classes else None,
                () if weight is None else tuple(np.asarray(weight, np.float64).tolist()),
                sums,
            )
        )
    return tuple(all_measures)


def ranks_of(options: TrainingOptions, world: World | None) -> Ranks | None:
    """This process among those of `world`; without it any of those that steps are compiled for.

    Raises UsageError for options that do not go with it.
    """
    count = options.distributed
    if not count:
        if options.shard or options.reduce_dtype != "fp32" or options.sync_batchnorm:
            raise UsageError(
                "shard, reduce_dtype and sync_batchnorm are for ranks: give distributed=True"
            )
        return None
    if options.ema is not None and options.shard:
        raise UsageError("a sharded optimizer keeps no running averages: leave out ema")
    if world is None and (count is True or count < 2):
        raise UsageError("steps of ranks are compiled for a number of them: give distributed=2")
    if world is not None and count not in (True, world.size):
        raise UsageError(f"distributed is {count}, but {world.size} ranks have come")
    rank, size = (0, count) if world is None else (world.rank, world.size)
    return Ranks(rank, size, options.reduce_dtype, options.shard, options.sync_batchnorm)


class Spare(dict[str, Array]):
    """Feeds of a rank that has no rows of a batch: it takes part in the step and counts nothing."""


def counted(
    feeds: Mapping[str, Array],
    loss_measures: Sequence[Measure],
    targets: Sequence[Target],
    *,
    spare: bool = False,
) -> tuple[dict[str, Array], Array]:
    """Feeds that give a finite loss, and what they count (float64, [losses + 1], rows last).

    The mean of nothing is no number: where all labels of a rank are ignored others take their
    place, and its share of 0 leaves them out.
    """
    rows = max((len(array) for array in feeds.values() if array.ndim), default=0)
    counts = np.array([*(m.count(feeds, rows) for m in loss_measures), rows], np.float64)
    replaced = {
        t.labels: np.zeros_like(feeds[t.labels])
        for t in targets
        if t.classes and (feeds[t.labels] == t.ignored).all()
    }
    return {**feeds, **replaced}, counts * (not spare)


def whole_states(
    states: Sequence[State], array: Callable[[str], Array], world: World | None
) -> dict[str, Array]:
    """All states of a run by name, put together from the ranks' parts; all ranks call it together.

    Accumulators are the sum of all ranks'.
    """
    arrays = {s.name: array(s.name) for s in states}
    if world is None:
        return arrays
    parts = {s.name: arrays[s.name] for s in states if s.whole is not None}
    sums = {s.name: arrays[s.name] for s in states if s.kind == "accumulator"}
    if parts:
        arrays |= world.all_gather(parts)
    if sums:
        arrays |= world.all_reduce(sums)
    return {s.name: arrays[s.name].reshape(s.whole or arrays[s.name].shape) for s in states}


def part_of_state(state: State, tensor: Array, world: World | None) -> Array:
    """What a rank holds of a state, of which `tensor` is the whole."""
    if world is None:
        return tensor
    if state.kind == "accumulator" and world.rank:
        return np.zeros_like(tensor)
    if state.whole is None:
        return tensor
    part = tensor.size // world.size
    return tensor.reshape(-1)[part * world.rank : part * (world.rank + 1)]


class Reduction:
    """The nodes that reduce over the ranks, emitted with `op`."""

    def __init__(self, ranks: Ranks, op: Builder) -> None:
        self.ranks, self.op = ranks, op

    def node(self, kind: str, x: ir.Value, bucket: int, size: int | None = None) -> Any:
        """A collective of `x`; `size`: the elements of its result, where that is another."""
        y = self.op.node(kind, [x], domain=FUSE, ranks=self.ranks.size, bucket=bucket)
        return typed(y, x, x.shape if size is None else [size])

    def shares(
        self, counts: ir.Value, loss_measures: Sequence[Measure]
    ) -> tuple[list[ir.Value | None], ir.Value]:
        """This rank's share of each loss (None for a sum), and of the rows, as float32 scalars."""
        op = self.op
        total = self.node("AllReduce", counts, COUNTS)
        share = op.Cast(op.Div(counts, total), to=ir.DataType.FLOAT.value)
        scalars = []
        for i in range(len(loss_measures) + 1):
            scalar = op.Gather(share, op.constant(np.array(i)), axis=0)
            scalar.dtype, scalar.shape = ir.DataType.FLOAT, ir.Shape([])
            scalars.append(scalar)
        *of_losses, rows = scalars
        return [None if m.sums else s for m, s in zip(loss_measures, of_losses, strict=True)], rows

    def means(self, values: Sequence[ir.Value], share: ir.Value) -> list[ir.Value]:
        """The means over all rows of statistics, each rank's by its rows."""
        op = self.op
        # all of them first, so that one launch does it
        weighted = [typed(op.Mul(x, op.CastLike(share, x)), x, x.shape) for x in values]
        return [self.node("AllReduce", x, LOSS) for x in weighted]

    def part_of(self, w: ir.Value) -> int:
        """The elements of a weight that each rank holds; 0 where all hold the whole of it.

        A weight whose size the ranks do not divide stays whole, and so does a small one: its
        states take little memory, and its collectives would take their latency.
        """
        size = prod(w.shape.numpy()) if w.shape is not None else 0
        divides = size % self.ranks.size == 0 and size >= 1024 * self.ranks.size
        return size // self.ranks.size if self.ranks.shard and divides else 0

    def gradients(
        self,
        graph: ir.Graph,
        grads: Mapping[ir.Value, ir.Value],
        parts: Collection[ir.Value],
    ) -> dict[ir.Value, ir.Value]:
        """The sums over the ranks, in the order in which the backward makes them.

        Those of the weights in `parts` are the rank's part, flat. What casts or scales a gradient
        comes to stand behind the node that makes it, so that no bucket waits for the end.
        """
        kind, op = REDUCED[self.ranks.reduce], self.op
        low = {w: typed(_narrow(op, g, kind), None, w.shape) for w, g in grads.items()}
        places = _move_early(graph, op, low.values())
        order = sorted(grads, key=lambda w: places[low[w].producer()])
        each = [
            int(prod(required(low[w].shape).numpy()) * required(low[w].dtype).itemsize)
            for w in order
        ]
        sums: dict[ir.Value, ir.Value] = {}
        placed = dict(zip(order, buckets.plan(each, self.ranks.bucket), strict=True))
        for w, bucket in placed.items():
            if w in parts:
                part = self.part_of(w)
                flat = typed(op.Reshape(low[w], [-1]), low[w], [part * self.ranks.size])
                y = self.node("ReduceScatter", flat, GRADIENTS + bucket, part)
            else:
                y = self.node("AllReduce", low[w], GRADIENTS + bucket)
            if w.dtype is not None and y.dtype != w.dtype:
                y = typed(op.Cast(y, to=w.dtype.value), w, y.shape)
            sums[w] = typed(y, w, y.shape)
        return sums

    def share(self, array: Array) -> Array:
        """This rank's part of an array, flat."""
        part = array.size // self.ranks.size
        return array.reshape(-1)[part * self.ranks.rank : part * (self.ranks.rank + 1)]


def _move_early(
    graph: ir.Graph, op: Builder, values: Iterable[ir.Value]
) -> dict[ir.Node | None, int]:
    """Put the casts, views and new nodes that end in `values` behind the last node they need.

    Returns where the nodes stand; one that was put elsewhere counts where that last node does, and
    what no node makes is there from the start.
    """
    new, found, left = set(op.nodes), set[ir.Node](), [v.producer() for v in values]
    while left:
        node = left.pop()
        view = node is not None and not node.domain and node.op_type in VIEWS | {"Cast"}
        if node is not None and node not in found and (view or node in new):
            found.add(node)
            left += [v.producer() for v in node.inputs if v is not None]
    moved = [node for node in (*graph, *op.nodes) if node in found]
    graph.remove([node for node in moved if node not in new])
    op.nodes = [node for node in op.nodes if node not in found]
    kept = list(graph)
    places: dict[ir.Node | None, int] = {None: 0, **{node: i for i, node in enumerate(kept)}}
    behind: dict[int, list[ir.Node]] = defaultdict(list)
    for node in moved:
        places[node] = max((places[v.producer()] for v in node.inputs if v is not None), default=0)
        behind[places[node]].append(node)
    for place, nodes in behind.items():
        graph.insert_after(kept[place], nodes)
    return places


def _narrow(op: Builder, g: ir.Value, kind: ir.DataType | None) -> ir.Value:
    """A float32 gradient in `kind`; the one that it was widened from, where that was of `kind`."""
    if kind is None or g.dtype != ir.DataType.FLOAT:
        return g
    node = g.producer()
    source = node.inputs[0] if node is not None and node.op_type == "Cast" else None
    if source is not None and source.dtype == kind:
        return typed(source, source, g.shape)
    cast = typed(op.Cast(g, to=kind.value), None, g.shape)
    cast.dtype = kind
    return cast

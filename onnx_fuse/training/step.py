"""The graph of a training step: forward, loss, backward and update in one ONNX model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_fuse import autodiff, rewrite
from onnx_fuse.arrays import Array
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.importer.load import read
from onnx_fuse.ir.build import add_input, bind_defaults, required, sources
from onnx_fuse.ir.constants import FUSE, Model
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.ops.fused import linear_cross_entropy
from onnx_fuse.ops.rules import TRAINS, Rewriter, cast_to, nodes_in_order, typed
from onnx_fuse.options import takes
from onnx_fuse.program.packing import Packing
from onnx_fuse.program.problem import TRAINING_PRECISIONS
from onnx_fuse.rewrite import batch, padding
from onnx_fuse.rewrite.canonicalize import clean
from onnx_fuse.rewrite.patches import patches_as_products
from onnx_fuse.rewrite.precision import cast_frozen, lower_precision
from onnx_fuse.rewrite.rotation import split_rotations
from onnx_fuse.training import float8, losses, optim, sharding, tokens
from onnx_fuse.training.adapters import AdapterSet
from onnx_fuse.training.batchnorm import synchronised
from onnx_fuse.training.dropout import draw_masks
from onnx_fuse.training.groups import TrainableSelection
from onnx_fuse.training.losses import Term
from onnx_fuse.training.merged import Merging, Sums, add_to_weights
from onnx_fuse.training.options import StepOptions
from onnx_fuse.training.own_rows import OwnRows
from onnx_fuse.training.ranks import LOSS, Measure, Ranks, Reduction, measures
from onnx_fuse.training.spec import Spec
from onnx_fuse.training.state import State
from onnx_fuse.training.weights import model_names

__all__ = ["Mode", "Spec", "training_model"]
__dir__ = __all__.copy

ByWeight: TypeAlias = "dict[ir.Value, ir.Value]"
"""What belongs to each weight, or to each state: its gradient, its next value, its part."""
Mode = Literal["update", "accumulate", "evaluate", "average"]
NORM = 1 << 20
"""The bucket of what follows the gradients: their norm."""
UNREAD = "the loss does not depend on it"
"""The reason why a weight that does not reach the loss does not train."""
GROWTH = 2000
"""Steps without an overflow after which float16's loss scale doubles."""


@dataclass(frozen=True)
class _StepArguments(StepOptions):
    model: Model
    mode: Mode = field(default="update", kw_only=True)
    fused: bool = field(default=False, kw_only=True)
    whole: autodiff.CombinesGradients | None = field(default=None, kw_only=True)
    ranks: Ranks | None = field(default=None, kw_only=True)
    merging: Merging | None = field(default=None, kw_only=True)
    adapters: AdapterSet | None = field(default=None, kw_only=True)
    pack: bool = field(default=False, kw_only=True)


@takes(_StepArguments)
def training_model(options: _StepArguments) -> tuple[ir.Model, Spec]:
    """Forward, loss, backward and update of `model` as one graph, and the meaning of its ends.

    Weights that train become inputs, and their new values outputs; so do optimizer state and the
    running statistics of BatchNormalization. A state has one name in all modes.

    Args:
        mode: "update" is a whole step. "accumulate" adds gradient / `accumulate` to accumulators
            in place of the update. "evaluate" is the forward in inference mode, with the loss, and
            "average" is that by the running averages of the weights.
        fused: Allow this project's fused operators in the backward at every level.
        whole: Which fused nodes get all their gradients from one call (`autodiff.backward`).
        ranks: The processes that train together, of which each has its part of the batch.
        merging: The low-rank adapters that are added to weights.
        adapters: Those that each train on their own rows of the batch.
        pack: Compute only the tokens (`rewrite.padding`); the labels are fed with their padding.
        {options}

    The errors are those of `training.trainer.Trainer`.
    """
    precision, ranks = options.precision, options.ranks
    original = read(options.model)
    named, source = set(original.graph.initializers), load(original)
    scales = autodiff.scales(source.graph) if options.trainable is None else set()
    candidates = [str(v.name) for v in autodiff.trainable(source) if autodiff.is_weight(v)]
    without = autodiff.named_scalars(source) | dict.fromkeys(candidates, UNREAD)
    without = {name: why for name, why in without.items() if name not in scales}
    without |= autodiff.only_measured(source.graph)
    bind_defaults(source)
    if options.free_batch:
        batch.free_batch(source)
    optimizer = optim.chosen(options.optimizer)
    choice = TrainableSelection(options.trainable, options.frozen, optimizer.groups)
    owner = options.adapters.owner if options.adapters else lambda name: 0
    skipped = float8.skipped(precision)
    prepared = _prepare(source, choice, optimizer, owner, options.level or 0, *skipped)
    prepared = padding.pack(prepared, tokens=True) if options.pack else prepared
    if options.fused:
        split_rotations(prepared)
        patches_as_products(prepared)
    dtype, _ = TRAINING_PRECISIONS[precision]
    if dtype != "float32":
        lower_precision(prepared, ir.DataType[dtype.upper()], masters=True)
    sums = Sums() if options.merging is None else add_to_weights(prepared, options.merging)
    named |= {str(v.name) for v in sums.factors}
    step = _Step(prepared, options, named, optimizer, sums)
    statistics = step.batch_norms(choice)
    step.dropouts()
    takes_over = options.fused and not step.evaluates
    terms = losses.terms(options.loss, options.loss_options, options.output)
    step.attach_loss(terms, takes_over)
    if takes_over:
        step.fuse_loss()
    weights = step.weights(statistics, choice, scales)
    if step.evaluates:
        for w in weights:
            step.state(w, "parameter")
            if step.mode == "average":
                w.name = _average(w)
        if ranks is not None and ranks.shard:
            step.shard(weights, ranks)
        return step.finish()
    if precision == "fp16":
        step.scale()
    if precision == "fp8":
        step.histories = float8.in_float8(prepared, weights, step.add_state)
    gradients = step.by_adapter(step.differentiate(weights), terms)
    trained = {name for v in (*gradients, *statistics) for name in model_names(v)}
    left_out = {n: why for n, why in without.items() if choice(n) and n not in trained}
    step.untrained = left_out | step.untrained
    if options.accumulate > 1:
        gradients = step.accumulate(gradients)
    step.agree()
    if step.mode == "update":
        gradients = step.check(step.reduce(gradients))
        step.update(step.clip(gradients))
    elif ranks is not None and ranks.shard:
        step.shard(list(gradients), ranks)
    return step.finish()


def _average(w: ir.Value) -> str:
    return f"{w.name}.ema"


def _prepare(
    source: ir.Model,
    choice: TrainableSelection,
    optimizer: optim.Optimizer,
    owner: Callable[[str], int],
    level: int,
    *skip: str,
) -> ir.Model:
    """The fused model; without merged products where one would mix weights of other settings."""
    for tried in (level, min(level, 1)):
        graph = source.clone()
        for value in autodiff.trainable(graph):
            if choice(str(value.name)) and (choice.trainable or autodiff.is_weight(value)):
                value.meta[TRAINS] = True
        rewrite.optimize(graph, training=True, level=tried, skip=skip)
        kinds = (
            {
                (
                    *(choice(name), choice(name) and owner(name), optimizer.setting(name)),
                    optimizer.elementwise(name, shape) or name,
                )
                for name in model_names(value)
            }
            for value in graph.graph.initializers.values()
            for shape in [required(value.shape).numpy()]
        )
        if all(len(kind) == 1 for kind in kinds):
            break
    return graph


class _Step:
    """A training graph while it is built: its model, its states, and the outputs it is to have."""

    def __init__(
        self,
        model: ir.Model,
        options: _StepArguments,
        named: set[str],
        optimizer: optim.Optimizer,
        sums: Sums,
    ) -> None:
        self.options, self.mode, self.sums = options, options.mode, sums
        self.model, self.graph = model, model.graph
        self.optimizer, self.evaluates = optimizer, self.mode in ("evaluate", "average")
        self.untrained: dict[str, str] = {}
        self.named = named  # initializers of the model as given, which passes add constants to
        self.op = autodiff.Emitter(model)
        self.packing = of = Packing.of(model) if options.pack else None
        self.feeds = [v for v in self.graph.inputs if of is None or v.name not in of.added]
        self.states: list[tuple[ir.Value, str, Array]] = []
        self.next: ByWeight = {}
        self.scalars: dict[str, ir.Value] = {}
        self.norm: ir.Value | None = None
        self.loss_scale: ir.Value | None = None
        self.total: ir.Value | None = None  # Σ g², and whether a scaled step counts
        self.finite: ir.Value | None = None
        self.averages: ByWeight = {}
        self.shared: dict[tuple[str, float], ir.Value] = {}
        self.ranks = None if self.evaluates else options.ranks
        self.counts: ir.Value | None = None
        if self.ranks is not None:
            self.counts = self.input("ranks.counts", ir.DataType.DOUBLE, [None])
        self.measures: tuple[Measure, ...] = ()
        self.own: OwnRows | None = None
        self.rows: ir.Value | None = None  # the rank's share of all rows
        self.wholes: dict[ir.Value, tuple[int, ...]] = {}  # of states that are sharded
        self.parts: ByWeight = {}  # of weights that are gathered to read
        self.histories: dict[ir.Value, ir.Value | None] = {}  # float8's, and what follows

    def input(self, name: str, dtype: ir.DataType, shape: Iterable[Any] | None) -> ir.Value:
        return add_input(self.graph, self.op.fresh(name), dtype, shape)

    def scalar(self, name: str, dtype: ir.DataType) -> ir.Value:
        """The scalar input `name`, made at its first use."""
        if name not in self.scalars:
            self.scalars[name] = self.input(name, dtype, [])
        return self.scalars[name]

    def state(self, value: ir.Value, kind: str) -> None:
        self.states.append((value, kind, required(value.const_value).numpy()))
        del self.graph.initializers[required(value.name)]
        value.const_value = None
        self.graph.inputs.append(value)

    def slots(self, w: ir.Value) -> list[ir.Value]:
        """The optimizer's states of parameter `w`, or of the part that this rank updates."""
        part, states = self.parts.get(w, w), []
        shape, dtype = tuple(required(part.shape).numpy()), required(w.dtype).numpy()
        for name, first in self.optimizer.initial(model_names(w)[0], shape, dtype).items():
            if name not in self.optimizer.shared:
                states.append(self.add_state(f"{w.name}.{name}", "slot", first))
                if part is not w:
                    self.wholes[states[-1]] = tuple(required(w.shape).numpy())
                continue
            owner = f".{self.own.name(w)}" if self.own else ""
            key = f"{name}.{dtype}{owner}", float(self.setting(w)[2])  # by the first update
            if key not in self.shared:
                self.shared[key] = self.add_state(f"optimizer.{name}{owner}", "slot", first)
            states.append(self.shared[key])
        return states

    def add_state(self, name: str, kind: str, initial: Array) -> ir.Value:
        dtype = ir.DataType.from_numpy(initial.dtype)
        value = self.input(name, dtype, initial.shape)
        self.states.append((value, kind, initial))
        return value

    def place(self) -> None:
        self.graph.extend(self.op.nodes)
        self.op.nodes = []

    def batch_norms(self, choice: TrainableSelection) -> set[ir.Value]:
        """Set the mode of each BatchNormalization; returns the statistics of all of them.

        One whose running mean is selected trains by the statistics of the batch and updates its
        running ones; a frozen one stays as in inference.
        """
        statistics: set[ir.Value] = set()
        for node in list(self.graph):
            if node.op_type != "BatchNormalization" or node.domain:
                continue
            running = [v for v in node.inputs[3:5] if v is not None]
            selected = all(
                v.is_initializer() and v not in statistics and choice(str(v.name)) for v in running
            )
            statistics.update(running)
            learns = selected and not self.evaluates
            if selected:
                for value in running:
                    self.state(value, "statistic")
            if not learns:
                for value, now in zip(node.outputs[1:3], running, strict=False):
                    if value.is_graph_output():
                        self.graph.outputs.remove(value)
                    ir.convenience.replace_all_uses_with(value, now)
                node.resize_outputs(1)
            elif len(node.outputs) < 3:
                node.resize_outputs(3)
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", int(learns))
            if learns and self.ranks is not None and self.ranks.sync_batchnorm:
                self.synchronise(node, running)
            elif learns:
                for value, new in zip(running, node.outputs[1:3], strict=True):
                    new.name = new.name or self.op.fresh(f"{value.name}.next")
                    new.type, new.shape = value.type, value.shape
                    self.next[value] = new
        return statistics

    def synchronise(self, node: ir.Node, running: Sequence[ir.Value]) -> None:
        """Put the statistics of all ranks in the place of those of this rank's rows."""
        counts = required(self.counts)
        y, *news = synchronised(node, self.op, self.reduction, counts, len(self.next))
        if node.outputs[0].is_graph_output():
            y = self.op.Identity(y)
        replace_node(node, self.op.nodes, [y], named=False)
        self.op.nodes = []
        self.next.update(zip(running, news, strict=True))

    def dropouts(self) -> None:
        """Draw the masks of training Dropout from `rng`, so that a resumed run draws the same."""
        rng = None if self.evaluates else lambda: self.scalar("rng", ir.DataType.INT64)
        draw_masks(self.graph, self.op, rng)

    def attach_loss(self, terms: Sequence[Term], fused: bool) -> None:
        self.outputs = list(self.graph.outputs)
        shares: Sequence[ir.Value | None] = ()
        if self.ranks is not None:
            # what the terms are means of is known once they are attached
            targets = losses.attach(self.model.clone(), terms)[2]
            self.measures = measures(terms, targets)
            counts = required(self.counts)
            counts.shape = ir.Shape([len(terms) + 1])
            shares, self.rows = self.reduction.shares(counts, self.measures)
            self.place()
        self.loss, labels, self.targets = losses.attach(self.model, terms, shares, fused)
        self.measures = self.measures or measures(terms, self.targets)
        self.op = autodiff.Emitter(self.model)
        self.labels = tokens.taken(self.op, self.graph, self.packing, self.targets, labels, terms)

    def fuse_loss(self) -> None:
        """Let the loss take over the product that makes its scores, which no step returns."""
        self.graph.outputs.clear()
        self.graph.outputs.append(self.loss)
        rw = Rewriter(self.model, training=True)
        for node in nodes_in_order(self.graph, linear_cross_entropy.RULE.anchors):
            linear_cross_entropy.RULE.apply(rw, node)
        (self.loss,) = self.graph.outputs
        self.op = autodiff.Emitter(self.model)

    @property
    def reduction(self) -> Reduction:
        """What emits the collectives, with the emitter of now."""
        return Reduction(required(self.ranks), self.op)

    def agree(self) -> None:
        """Replace the loss and the running statistics by those over the rows of all ranks."""
        if self.ranks is None:
            return
        statistics = [v for v, kind, _ in self.states if kind == "statistic" and v in self.next]
        if statistics and not self.ranks.sync_batchnorm:
            news = [self.next[value] for value in statistics]
            means = self.reduction.means(news, required(self.rows))
            self.next.update(zip(statistics, means, strict=True))
        self.loss = self.reduction.node("AllReduce", self.loss, LOSS)

    def reduce(self, gradients: ByWeight) -> ByWeight:
        """The gradients of all ranks' batches together."""
        if self.ranks is None:
            return gradients
        self.parts = sharding.candidates(self.graph, self.divisible(gradients), self.reduction)
        return self.reduction.gradients(self.graph, gradients, self.parts)

    def weights(
        self, statistics: set[ir.Value], choice: TrainableSelection, scales: set[str]
    ) -> list[ir.Value]:
        """The initializers of the model that train."""
        floats = [
            v for v in autodiff.trainable(self.model) if self.named.issuperset(model_names(v))
        ]
        floats = [v for v in floats if v not in statistics]
        if choice.trainable is None:
            floats = [
                v for v in floats if autodiff.is_weight(v) and scales.isdisjoint(model_names(v))
            ]
        if not floats:
            raise ModelError("the model has no float weights to train")
        names = [n for v in floats for n in model_names(v)] + [str(v.name) for v in statistics]
        names += [str(v.name) for v in autodiff.trainable(self.model) if v not in floats]
        for pattern in choice.globs:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(
                    f"'{pattern}' matches no weight of the model: it has {', '.join(names[:8])}"
                    f"{', …' if len(names) > 8 else ''}"
                )
        chosen = [v for v in floats if any(map(choice, model_names(v)))]
        if not chosen:
            raise UsageError("every weight of the model is frozen: there is nothing to train")
        reached = sources([self.loss])
        chosen = [v for v in chosen if v in reached]
        if not chosen:
            raise ModelError("no weight of the model reaches the loss")
        return chosen

    def differentiate(self, weights: Sequence[ir.Value]) -> ByWeight:
        """The gradient of each weight; those without one stay initializers."""
        for w in weights:
            if w.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
                raise ModelError(f"'{w.name}' is {w.dtype}: only float32 and float64 weights train")
        arrays = {w: w.const_value for w in weights}
        for w in weights:
            self.state(w, "parameter")
        # Gradients arrive as part of the mean over the accumulated batches.
        share = np.array(1 / self.options.accumulate, required(self.loss.dtype).numpy())
        dy = self.op.constant(share) if self.options.accumulate > 1 else None
        if self.loss_scale is not None:
            scale = self.op.CastLike(self.loss_scale, self.loss)
            dy = scale if dy is None else self.op.Mul(scale, dy)
            dy.dtype, dy.shape = self.loss.dtype, ir.Shape([])
        self.place()
        factors, sums = self.sums.factors, self.sums.of(weights)
        wanted = [*(w for w in weights if w not in factors), *sums]
        wanted += (h for h, v in self.histories.items() if v is None)
        stopped: dict[str, str] = {}
        grads = autodiff.backward(
            self.model,
            {self.loss: dy},
            wanted,
            stopped=None if self.options.trainable is not None else stopped,
            fused=self.options.fused,
            whole=self.options.whole,
        )
        factor_grads = self.sums.gradients(self.graph, {v: grads[str(v.name)] for v in sums})
        grads |= {str(v.name): g for v, g in factor_grads.items()}
        self.next |= float8.following(self.histories, grads)
        for w in weights:
            if w.name not in grads:
                self.untrained |= dict.fromkeys(model_names(w), stopped[str(w.name)])
                w.const_value = arrays[w]
                self.graph.inputs.remove(w)
                self.graph.register_initializer(w)
        if not any(w.name in grads for w in weights):
            notes = autodiff.without_gradient(self.untrained) or ["each one is detached"]
            raise ModelError(f"no weight of the model trains: {notes[0]}")
        self.states = [s for s in self.states if s[0].const_value is None]
        self.op = autodiff.Emitter(self.model)
        self.op.stem = "update"
        gradients = {w: grads[w.name] for w in weights if w.name in grads}
        if self.loss_scale is None:
            return gradients
        back = self.op.Reciprocal(self.loss_scale)
        back.dtype, back.shape = ir.DataType.FLOAT, ir.Shape([])
        return {
            w: typed(self.op.Mul(g, cast_to(self.op, back, w)), w, w.shape)
            for w, g in gradients.items()
        }

    def by_adapter(self, gradients: ByWeight, terms: Sequence[Term]) -> ByWeight:
        """The gradients of each adapter as of its own rows' loss, where there are several."""
        adapters, op = self.options.adapters, self.op
        if adapters is None:
            return gradients
        self.own = own = OwnRows(op, self.graph, adapters, terms, self.measures)
        none = np.zeros(len(adapters.names), np.int64)
        if self.options.accumulate > 1:
            before = self.add_state("adapters.accumulated", "accumulator", none.astype(np.float32))
            own.counts = typed(op.Add(before, own.counts), before, before.shape)
            self.next[before] = own.counts if self.mode == "accumulate" else self.zeros(before)
        if self.mode == "update":
            own.updates = self.add_state("adapters.updates", "slot", none)
        return {w: own.scaled(op, w, g) for w, g in gradients.items()}

    def scale(self) -> None:
        """Multiply the loss's gradient by a state, so that float16 holds small gradients.

        A step whose gradients overflow changes no weight, and halves the scale; GROWTH steps in a
        row without one double it.
        """
        initial = np.array(self.options.loss_scale, np.float32)
        self.loss_scale = self.add_state("loss_scale", "scaler", initial)

    def check(self, gradients: ByWeight) -> ByWeight:
        """Whether all gradients are finite, and what follows for the scale; zeros if not.

        So the update waits for the answer: else its moments would be worked out and stored before.
        """
        if self.loss_scale is None:
            return gradients
        op, scale = self.op, self.loss_scale
        good = self.add_state("loss_scale.good_steps", "scaler", np.array(0))
        updates = self.add_state("loss_scale.updates", "scaler", np.array(0))
        one = op.constant(np.array(1))
        self.scalars["step"] = typed(op.Add(updates, one), updates, ir.Shape([]))
        self.total = total = self.squares(gradients)
        self.finite = op.Less(total, op.constant(np.inf, total.dtype))  # nor is a NaN
        count = op.Add(good, one)
        full = op.GreaterOrEqual(count, op.constant(np.array(GROWTH)))
        full = op.And(full, op.Less(scale, 2.0**127))  # infinity would halve to itself
        larger = op.Where(full, op.Mul(scale, 2.0), scale)
        self.next[scale] = op.Where(self.finite, larger, op.Mul(scale, 0.5))
        zero = op.constant(np.array(0))
        self.next[good] = op.Where(self.finite, op.Where(full, zero, count), zero)
        self.next[updates] = op.Where(self.finite, self.scalars["step"], updates)
        none = op.constant(0.0, total.dtype)
        return {w: typed(op.Where(self.finite, g, none), w, g.shape) for w, g in gradients.items()}

    def squares(self, gradients: ByWeight) -> ir.Value:
        """Σ g² over the gradients of all weights that train already."""
        squares: list[ir.Value] = []
        parts: list[ir.Value] = []
        for w, g in gradients.items():
            square = self.op.ReduceSumSquare(g, keepdims=0)
            if (began := self.began(w)) is not None:
                square = self.op.Where(began, square, self.op.constant(0.0, w.dtype))
            (parts if w in self.parts else squares).append(typed(square, w, ir.Shape([])))
        if parts:
            of_rank = typed(self.op.Sum(*parts), parts[0], ir.Shape([]))
            squares.append(self.reduction.node("AllReduce", of_rank, NORM))
        total: ir.Value = self.op.Sum(*squares)
        return typed(total, next(iter(gradients)), ir.Shape([]))

    def accumulate(self, gradients: ByWeight) -> ByWeight:
        sums = {}
        for w, g in gradients.items():
            none = np.zeros((), required(w.dtype).numpy())
            first = np.broadcast_to(none, tuple(required(w.shape).numpy()))  # one number in memory
            total = self.add_state(f"{w.name}.accumulated", "accumulator", first)
            sums[w] = self.op.Add(total, g)
            # an update takes the sum and starts the next one at zero
            self.next[total] = sums[w] if self.mode == "accumulate" else self.zeros(total)
        return sums

    def zeros(self, like: ir.Value) -> ir.Value:
        """Zeros of the shape and dtype of `like`, whatever it holds."""
        no, zero = self.op.constant(np.array(False)), self.op.constant(0.0, like.dtype)
        return typed(self.op.Where(no, like, zero), like, like.shape)

    def clip(self, gradients: ByWeight) -> ByWeight:
        """Gradients scaled down so that the norm of all of them together, or of those of each
        adapter, is at most `clip_norm`.

        An infinite bound leaves them as they are, and the norm is an output all the same.
        """
        clip_norm, own = self.options.clip_norm, self.own
        if clip_norm is None:
            return gradients
        owners = dict.fromkeys(map(own.owner, gradients)) if own else [0]
        if clip_norm == np.inf or len(owners) > 1:
            total = self.squares(gradients) if self.total is None else self.total
            self.norm = typed(self.op.Sqrt(total), total, ir.Shape([]))
        if clip_norm == np.inf:
            return gradients
        clipped: ByWeight = {}
        for owner in owners:
            part = {w: g for w, g in gradients.items() if own is None or own.owner(w) == owner}
            whole = self.total if len(owners) == 1 else None
            total = self.squares(part) if whole is None else whole
            norm, factor = self.op.node(
                "ClipFactor", [total], domain=FUSE, outputs=2, max_norm=clip_norm
            )
            for value in (norm, factor):
                value.dtype, value.shape = total.dtype, ir.Shape([])
            self.norm = self.norm or norm
            clipped |= {w: self.op.Mul(g, factor) for w, g in part.items()}
        return clipped

    def setting(self, w: ir.Value) -> tuple[float, float, int]:
        return self.optimizer.setting(model_names(w)[0])

    def lr_of(self, w: ir.Value) -> ir.Value:
        """The learning rate of a weight; weights of equal factors share it."""
        rate, factor = self.scalar("lr", ir.DataType.FLOAT), self.setting(w)[0]
        if factor == 1:
            return rate
        if ("lr", factor) not in self.shared:
            lr = typed(self.op.Mul(rate, factor), rate, ir.Shape([]))
            self.shared["lr", factor] = lr
        return self.shared["lr", factor]

    def number(self, w: ir.Value) -> tuple[ir.Value, str]:
        """The number of the update, or of that of the weight's adapter, and which one it is."""
        if self.own is None:
            return self.scalar("step", ir.DataType.INT64), ""
        return self.own.number(self.op, w), str(self.own.owner(w))

    def began(self, w: ir.Value) -> ir.Value | None:
        """Whether the weight trains already; None if it does from the first update on."""
        start = self.setting(w)[2]
        if not start:
            return None
        step, owner = self.number(w)
        key = f"began{owner}", start
        if key not in self.shared:
            self.shared[key] = self.op.Greater(step, self.op.constant(np.array(start)))
        return self.shared[key]

    def step_of(self, w: ir.Value) -> ir.Value:
        """The number of a weight's update, which is 1 at its first one."""
        (step, owner), start = self.number(w), self.setting(w)[2]
        if not start:
            return step
        key = f"step{owner}", start
        if key not in self.shared:
            number = self.op.Sub(step, self.op.constant(np.array(start)))
            number = self.op.Where(self.began(w), number, self.op.constant(np.array(1)))
            self.shared[key] = typed(number, step, ir.Shape([]))
        return self.shared[key]

    def update(self, gradients: ByWeight) -> None:
        for w, g in gradients.items():
            lr = self.lr_of(w)
            step = self.step_of(w) if self.optimizer.counts else lr
            slots, part = self.slots(w), self.parts.get(w, w)
            news = self.optimizer.update(self.op, model_names(w)[0], part, g, slots, lr, step)
            olds = [part, *slots]
            if self.options.ema is not None:
                olds.append(self.average(w))
                moved = self.op.Mul(self.op.Sub(news[0], olds[-1]), 1 - self.options.ema)
                news = [*news, self.op.Add(olds[-1], moved)]
            trains = self.own and self.own.trains(self.op, w)
            for condition in (self.began(w), self.finite, trains):
                if condition is not None:
                    pairs = zip(news, olds, strict=True)
                    news = [typed(self.op.Where(condition, *p), p[1], p[1].shape) for p in pairs]
            self.next.update(zip([w, *olds[1:]], news, strict=True))
        if self.own is not None and self.own.updates is not None:
            self.next[self.own.updates] = self.own.next_updates(self.op, self.finite)
        if self.parts:
            self.place()
            self.gather(required(self.ranks))

    def divisible(self, weights: Iterable[ir.Value]) -> list[ir.Value]:
        """The weights that ranks may update a part each of."""
        kept = self.optimizer.elementwise
        return [w for w in weights if kept(model_names(w)[0], required(w.shape).numpy())]

    def shard(self, weights: Sequence[ir.Value], ranks: Ranks) -> None:
        """Let this rank hold its part of the weights, which nothing updates here."""
        reduction = Reduction(ranks, self.op)
        self.parts = sharding.candidates(self.graph, self.divisible(weights), reduction)
        self.place()
        self.gather(ranks)

    def gather(self, ranks: Ranks) -> None:
        """Gather the weights of `parts` where they are read, and hold this rank's part of them."""
        self.wholes |= {w: tuple(w.shape.numpy()) for w in self.parts if w.shape is not None}
        reduction = Reduction(ranks, self.op)
        sharding.gather(self.graph, self.parts, reduction, self.loss, ranks.bucket)
        self.states = [
            (w, kind, reduction.share(initial) if w in self.parts else initial)
            for w, kind, initial in self.states
        ]

    def average(self, w: ir.Value) -> ir.Value:
        """A new state that is the running average of a parameter, and begins as what it is."""
        initial = next(array for value, _, array in self.states if value is w)
        self.averages[w] = self.add_state(_average(w), "average", initial)
        return self.averages[w]

    def finish(self) -> tuple[ir.Model, Spec]:
        """The graph with the loss, the norm and the successors of states for outputs."""
        self.place()
        outputs = [v for v in self.outputs if self.evaluates and v is not self.loss]
        ends = [self.loss, *([self.norm] if self.norm is not None else []), *self.next.values()]
        for value, new in self.next.items():
            new.name = self.op.fresh(f"{value.name}.next")
            new.type, new.shape = value.type, value.shape
        self.graph.outputs.clear()
        self.graph.outputs.extend(dict.fromkeys([*ends, *outputs]))
        cast_frozen(self.graph)
        clean(self.model)
        names = {k: str(v.name) for k, v in self.scalars.items() if v.is_graph_input()}

        def name(values: ByWeight, v: ir.Value) -> str:
            return str(values[v].name) if v in values else ""

        spec = Spec(
            feeds=(*self.feeds, *self.labels),
            targets=tuple(self.targets),
            loss=str(self.loss.name),
            norm=str(self.norm.name) if self.norm is not None else "",
            lr=names.get("lr", ""),
            step=names.get("step", ""),
            rng=names.get("rng", ""),
            outputs=tuple(str(v.name) for v in outputs),
            states=tuple(
                State(
                    *(str(v.name), kind, initial, v, name(self.next, v), name(self.averages, v)),
                    self.wholes.get(v),
                )
                for v, kind, initial in self.states
            ),
            counts=str(self.counts.name) if self.counts is not None else "",
            measures=self.measures,
            untrained=self.untrained,
            packing=self.packing,
        )
        return self.model, spec

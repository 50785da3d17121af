"""Training: the whole step as one ONNX graph (`training_model`), and the Trainer that runs it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial, total_ordering
from pathlib import Path
from typing import Any, Literal, NamedTuple, SupportsFloat

import numpy as np
import onnx_ir

from onnx_fuse import autodiff, checkpoint, data, ir, optim, passes
from onnx_fuse.errors import CheckFailed, DataError, ModelError, UsageError
from onnx_fuse.ir import FUSE
from onnx_fuse.ops.loss import LOSSES, class_axis, ignored_label
from onnx_fuse.ops.rewrite import typed
from onnx_fuse.passes import batch, params
from onnx_fuse.passes.canonicalize import clean
from onnx_fuse.passes.precision import lower_precision
from onnx_fuse.problem import PRECISIONS, Hardware
from onnx_fuse.runtime import ort

Array = np.ndarray[Any, Any]
Mode = Literal["update", "accumulate", "evaluate"]
GROWTH = 2000
"""Steps without an overflow after which float16's loss scale doubles."""


# ---- the graph of a step -----------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """A tensor that outlives a step: the graph's input `name`, and its output `next` if it changes.

    `kind` is "parameter", "statistic" (of BatchNormalization), "slot" (the optimizer's),
    "accumulator" (of gradients) or "scaler" (of the loss, in float16). `value` has its dtype, shape
    and, if packed, its record.
    """

    name: str
    kind: str
    initial: Array
    value: onnx_ir.Value
    next: str = ""


@dataclass(frozen=True)
class Spec:
    """What the inputs and outputs of a training graph mean; "" for those it does not have.

    `feeds` are the model's own inputs and `labels`, class numbers below `classes` where that is
    not 0: then they count the axis `class_axis` of the output `logits`. `lr` is a float32 scalar;
    `step`, 1 at the first update, and `rng`, which differs from step to step, are int64 scalars.
    `loss`, and `norm` of all gradients before clipping, are scalars. `outputs` are the model's own.
    """

    feeds: tuple[onnx_ir.Value, ...]
    labels: str
    classes: int
    class_axis: int
    logits: str
    loss: str
    norm: str
    lr: str
    step: str
    rng: str
    outputs: tuple[str, ...]
    states: tuple[State, ...]

    @property
    def strict(self) -> bool:
        """Whether a gradient that is not finite is a fault: a scaled step leaves it out itself."""
        return all(s.kind != "scaler" for s in self.states)


def training_model(
    model: ir.Model,
    *,
    loss: str,
    optimizer: optim.Optimizer,
    mode: Mode = "update",
    loss_options: Mapping[str, Any] | None = None,
    output: str | None = None,
    trainable: Sequence[str] | None = None,
    frozen: Sequence[str] = (),
    clip_norm: float | None = None,
    accumulate: int = 1,
    free_batch: bool = False,
    level: int = 0,
    precision: str = "fp32",
    loss_scale: float = 65536.0,
    fused: bool = False,
    whole: autodiff.Whole | None = None,
) -> tuple[onnx_ir.Model, Spec]:
    """Forward, loss, backward and update of `model` as one graph, and what its ends mean.

    Weights that train become inputs, with their successors as outputs; so do optimizer state and
    the running statistics of BatchNormalization. Mode "accumulate" adds gradient / `accumulate` to
    accumulators in place of the update; "evaluate" is the forward in inference mode, with the loss.
    A state has one name in all modes. `trainable` and `frozen` are globs over initializers; without
    `trainable`, all float weights that have an axis and reach the loss train. `free_batch` opens a
    batch that was exported fixed. `level` is that of `passes.optimize`; `fused` allows operators of
    ours in the backward at any, `whole` as in `autodiff.backward`. In precision "fp16" the backward
    is scaled, by `loss_scale` at first: see `_Step.scale`. Raises ModelError, UsageError.
    """
    original = ir.read(model)
    named, source = set(original.graph.initializers), ir.load(original)
    if free_batch:
        batch.free_batch(source)
    prepared = _prepare(source, trainable, frozen, level)
    dtype, _ = PRECISIONS[precision]
    if dtype != "float32":
        lower_precision(prepared, onnx_ir.DataType[dtype.upper()], masters=True)
    step = _Step(prepared, mode, named)
    statistics = step.batch_norms(trainable, frozen)
    step.dropouts()
    step.attach_loss(loss, dict(loss_options or {}), output)
    weights = step.weights(statistics, trainable, frozen)
    if mode == "evaluate":
        for w in weights:
            step.state(w, "parameter")
        return step.finish()
    if precision == "fp16":
        step.scale(loss_scale)
    gradients = step.differentiate(
        weights, accumulate, strict=trainable is not None, fused=fused, whole=whole
    )
    if accumulate > 1:
        gradients = step.accumulate(gradients)
    if mode == "update":
        gradients = step.check(gradients)
        step.update(step.clip(gradients, clip_norm), optimizer)
    return step.finish()


def _selected(name: str, trainable: Sequence[str] | None, frozen: Sequence[str]) -> bool:
    wanted = trainable is None or any(fnmatchcase(name, pattern) for pattern in trainable)
    return wanted and not any(fnmatchcase(name, pattern) for pattern in frozen)


def _names(value: onnx_ir.Value) -> list[str]:
    """The model's own names of what a (packed) initializer holds."""
    return [part.name for part in params.parts(value)[1]]


def _prepare(
    source: onnx_ir.Model, trainable: Sequence[str] | None, frozen: Sequence[str], level: int
) -> onnx_ir.Model:
    """The fused model; without merged products where one would mix trained and frozen weights."""
    for tried in (level, min(level, 1)):
        graph = source.clone()
        passes.optimize(graph, training=True, level=tried)
        split = (
            {_selected(name, trainable, frozen) for name in _names(value)}
            for value in graph.graph.initializers.values()
        )
        if all(len(choice) == 1 for choice in split):
            break
    return graph


class _Step:
    """A training graph as it grows: its model, the states found so far, the ends of note."""

    def __init__(self, model: onnx_ir.Model, mode: Mode, named: set[str]) -> None:
        self.model, self.graph, self.mode = model, model.graph, mode
        self.named = named  # initializers of the model as given, which passes add constants to
        self.op = autodiff.Emitter(model)
        self.feeds = list(self.graph.inputs)
        self.states: list[tuple[onnx_ir.Value, str, Array]] = []
        self.next: dict[onnx_ir.Value, onnx_ir.Value] = {}
        self.scalars: dict[str, onnx_ir.Value] = {}
        self.norm: onnx_ir.Value | None = None
        self.loss_scale: onnx_ir.Value | None = None
        self.total: onnx_ir.Value | None = None  # Σ g², and whether a scaled step counts
        self.finite: onnx_ir.Value | None = None

    def input(self, name: str, dtype: onnx_ir.DataType, shape: Any) -> onnx_ir.Value:
        value = onnx_ir.Value(
            name=self.op.fresh(name), type=onnx_ir.TensorType(dtype), shape=onnx_ir.Shape(shape)
        )
        self.graph.inputs.append(value)
        return value

    def scalar(self, name: str, dtype: onnx_ir.DataType) -> onnx_ir.Value:
        """The scalar input `name`, made at its first use."""
        if name not in self.scalars:
            self.scalars[name] = self.input(name, dtype, [])
        return self.scalars[name]

    def state(self, value: onnx_ir.Value, kind: str) -> None:
        """Turn an initializer into a state."""
        assert value.name is not None
        assert value.const_value is not None
        self.states.append((value, kind, value.const_value.numpy()))
        del self.graph.initializers[value.name]
        value.const_value = None
        self.graph.inputs.append(value)

    def slot(self, w: onnx_ir.Value, name: str, kind: str, initial: float) -> onnx_ir.Value:
        """A new state in the shape of parameter `w`."""
        assert w.dtype is not None
        assert w.shape is not None
        return self.kept(
            f"{w.name}.{name}", kind, np.full(w.shape.numpy(), initial, w.dtype.numpy())
        )

    def kept(self, name: str, kind: str, initial: Array) -> onnx_ir.Value:
        """A new state."""
        dtype = onnx_ir.DataType.from_numpy(initial.dtype)
        value = self.input(name, dtype, initial.shape)
        self.states.append((value, kind, initial))
        return value

    def place(self) -> None:
        """Append the nodes emitted so far."""
        self.graph.extend(self.op.nodes)
        self.op.nodes = []

    def batch_norms(
        self, trainable: Sequence[str] | None, frozen: Sequence[str]
    ) -> set[onnx_ir.Value]:
        """Set the mode of each BatchNormalization; returns the statistics of all of them.

        One whose running mean is selected trains by the statistics of the batch and updates its
        running ones; a frozen one stays as in inference.
        """
        found: set[onnx_ir.Value] = set()
        for node in list(self.graph):
            if node.op_type != "BatchNormalization" or node.domain:
                continue
            running = [v for v in node.inputs[3:5] if v is not None]
            selected = all(
                v.is_initializer() and v not in found and _selected(str(v.name), trainable, frozen)
                for v in running
            )
            found.update(running)
            learns = selected and self.mode != "evaluate"
            if selected:
                for value in running:
                    self.state(value, "statistic")
            if not learns:
                for value, now in zip(node.outputs[1:3], running, strict=False):
                    if value.is_graph_output():
                        self.graph.outputs.remove(value)
                    onnx_ir.convenience.replace_all_uses_with(value, now)
                node.resize_outputs(1)
            elif len(node.outputs) < 3:
                node.resize_outputs(3)
            node.attributes["training_mode"] = onnx_ir.AttrInt64("training_mode", int(learns))
            if learns:
                for value, new in zip(running, node.outputs[1:3], strict=True):
                    new.name = new.name or self.op.fresh(f"{value.name}.next")
                    new.type, new.shape = value.type, value.shape
                    self.next[value] = new
        return found

    def dropouts(self) -> None:
        """Draw the masks of training Dropout from `rng`, so that a resumed run draws the same."""
        for index, node in enumerate([n for n in self.graph if n.op_type == "Dropout"]):
            x, ratio, training = (*node.inputs, None, None)[:3]
            on = ir.const_array(training)
            if on is None or not on.any() or (len(node.outputs) > 1 and node.outputs[1].uses()):
                continue
            assert x is not None
            (old, *_), y = node.outputs, x
            if self.mode != "evaluate":
                ratio = self.op.constant(0.5) if ratio is None else ratio
                inputs = [self.op.Shape(x), ratio, self.scalar("rng", onnx_ir.DataType.INT64)]
                scale = self.op.node("DropoutScale", inputs, domain=FUSE, stream=index)
                scale.dtype, scale.shape = onnx_ir.DataType.FLOAT, old.shape
                y = self.op.Mul(x, self.op.CastLike(scale, x))
            if old.is_graph_output():
                y = self.op.Identity(y)
            self.graph.insert_before(node, self.op.nodes)
            self.op.nodes = []
            onnx_ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
            self.graph.remove(node, safe=True)

    def attach_loss(self, loss: str, options: dict[str, Any], output: str | None) -> None:
        self.outputs = list(self.graph.outputs)
        own = {v.name: v for v in self.outputs}
        logits = own.get(output) or self.graph.outputs[0]
        self.loss, self.labels = autodiff.attach_loss(self.model, loss, options, output=output)
        self.classes, self.axis, self.logits = 0, 0, str(logits.name)
        if loss in LOSSES and LOSSES[loss].classes and logits.shape is not None:
            self.axis = class_axis(len(logits.shape), options)
            count = logits.shape[self.axis]
            self.classes = count if isinstance(count, int) else 0
        self.op = autodiff.Emitter(self.model)

    def weights(
        self,
        statistics: set[onnx_ir.Value],
        trainable: Sequence[str] | None,
        frozen: Sequence[str],
    ) -> list[onnx_ir.Value]:
        """The initializers that train."""
        floats = [v for v in autodiff.trainable(self.model) if self.named.issuperset(_names(v))]
        floats = [v for v in floats if v not in statistics]
        if trainable is None:
            floats = [v for v in floats if _is_weight(v)]
        if not floats:
            raise ModelError("the model has no float weights to train")
        known = [n for v in floats for n in _names(v)] + [str(v.name) for v in statistics]
        for pattern in (*(trainable or ()), *frozen):
            if not any(fnmatchcase(name, pattern) for name in known):
                raise UsageError(
                    f"'{pattern}' matches no weight of the model: it has {', '.join(known[:8])}"
                    f"{', …' if len(known) > 8 else ''}"
                )
        chosen = [v for v in floats if any(_selected(n, trainable, frozen) for n in _names(v))]
        if not chosen:
            raise UsageError("every weight of the model is frozen: there is nothing to train")
        reached = _ancestors(self.loss)
        chosen = [v for v in chosen if v in reached]
        if not chosen:
            raise ModelError("no weight of the model reaches the loss")
        return chosen

    def differentiate(
        self,
        weights: Sequence[onnx_ir.Value],
        accumulate: int,
        *,
        strict: bool,
        fused: bool,
        whole: autodiff.Whole | None,
    ) -> dict[onnx_ir.Value, onnx_ir.Value]:
        """The gradient of each weight; those without one stay initializers."""
        for w in weights:
            if w.dtype not in (onnx_ir.DataType.FLOAT, onnx_ir.DataType.DOUBLE):
                raise ModelError(f"'{w.name}' is {w.dtype}: only float32 and float64 weights train")
        kept = {w: w.const_value for w in weights}
        for w in weights:
            self.state(w, "parameter")
        # Gradients arrive as part of the mean over the accumulated batches.
        assert self.loss.dtype is not None
        share = np.array(1 / accumulate, self.loss.dtype.numpy())
        dy = self.op.constant(share) if accumulate > 1 else None
        if self.loss_scale is not None:
            scale = self.op.CastLike(self.loss_scale, self.loss)
            dy = scale if dy is None else self.op.Mul(scale, dy)
            dy.dtype, dy.shape = self.loss.dtype, onnx_ir.Shape([])
        self.place()
        found = autodiff.backward(
            self.model, {self.loss: dy}, weights, strict=strict, fused=fused, whole=whole
        )
        for w in weights:
            if w.name not in found:
                w.const_value = kept[w]
                self.graph.inputs.remove(w)
                self.graph.register_initializer(w)
        self.states = [s for s in self.states if s[0].const_value is None]
        self.op = autodiff.Emitter(self.model)
        self.op.stem = "update"
        gradients = {w: found[w.name] for w in weights if w.name in found}
        if self.loss_scale is None:
            return gradients
        back = self.op.Reciprocal(self.loss_scale)
        back.dtype, back.shape = onnx_ir.DataType.FLOAT, onnx_ir.Shape([])
        return {
            w: typed(self.op.Mul(g, self.like(back, w)), w, w.shape) for w, g in gradients.items()
        }

    def like(self, x: onnx_ir.Value, w: onnx_ir.Value) -> onnx_ir.Value:
        """A scalar in the type of a weight."""
        assert w.dtype is not None
        return x if x.dtype == w.dtype else self.op.Cast(x, to=w.dtype.value)

    def scale(self, initial: float) -> None:
        """Multiply the loss's gradient by a state, so that float16 holds small gradients.

        A step whose gradients overflow changes no weight, and halves the scale; GROWTH steps in a
        row without one double it.
        """
        self.loss_scale = self.kept("loss_scale", "scaler", np.array(initial, np.float32))

    def check(
        self, gradients: dict[onnx_ir.Value, onnx_ir.Value]
    ) -> dict[onnx_ir.Value, onnx_ir.Value]:
        """Whether all gradients are finite, and what follows for the scale; zeros if not.

        So the update waits for the answer: else its moments would be worked out and stored before.
        """
        if self.loss_scale is None:
            return gradients
        op, scale = self.op, self.loss_scale
        good = self.kept("loss_scale.good_steps", "scaler", np.array(0))
        made = self.kept("loss_scale.updates", "scaler", np.array(0))
        self.total = total = self.squares(gradients)
        self.finite = op.Less(total, op.constant(np.inf, total.dtype))  # NaN is not less either
        one = op.constant(np.array(1))
        count = op.Add(good, one)
        full = op.GreaterOrEqual(count, op.constant(np.array(GROWTH)))
        full = op.And(full, op.Less(scale, 2.0**127))  # infinity would halve to itself
        larger = op.Where(full, op.Mul(scale, 2.0), scale)
        self.next[scale] = op.Where(self.finite, larger, op.Mul(scale, 0.5))
        zero = op.constant(np.array(0))
        self.next[good] = op.Where(self.finite, op.Where(full, zero, count), zero)
        self.scalars["step"] = op.Add(made, one)
        self.next[made] = op.Where(self.finite, self.scalars["step"], made)
        none = op.constant(0.0, total.dtype)
        return {w: typed(op.Where(self.finite, g, none), w, w.shape) for w, g in gradients.items()}

    def squares(self, gradients: Mapping[onnx_ir.Value, onnx_ir.Value]) -> onnx_ir.Value:
        """Σ g² over all gradients."""
        squares = [self.op.ReduceSumSquare(g, keepdims=0) for g in gradients.values()]
        found: onnx_ir.Value = self.op.Sum(*squares)
        return typed(found, next(iter(gradients)), onnx_ir.Shape([]))

    def accumulate(
        self, gradients: Mapping[onnx_ir.Value, onnx_ir.Value]
    ) -> dict[onnx_ir.Value, onnx_ir.Value]:
        sums = {}
        for w, g in gradients.items():
            total = self.slot(w, "accumulated", "accumulator", 0.0)
            sums[w] = self.op.Add(total, g)
            # an update takes the sum and starts the next one at zero
            self.next[total] = sums[w] if self.mode == "accumulate" else self.zeros(total)
        return sums

    def zeros(self, like: onnx_ir.Value) -> onnx_ir.Value:
        """Zeros, whatever `like` holds."""
        no, zero = self.op.constant(np.array(False)), self.op.constant(0.0, like.dtype)
        return typed(self.op.Where(no, like, zero), like, like.shape)

    def clip(
        self, gradients: Mapping[onnx_ir.Value, onnx_ir.Value], clip_norm: float | None
    ) -> Mapping[onnx_ir.Value, onnx_ir.Value]:
        """Gradients scaled down so that the norm of all of them together is at most `clip_norm`."""
        if clip_norm is None:
            return gradients
        total = self.squares(gradients) if self.total is None else self.total
        self.norm, factor = self.op.node(
            "ClipFactor", [total], domain=FUSE, outputs=2, max_norm=clip_norm
        )
        for value in (self.norm, factor):
            value.dtype, value.shape = total.dtype, onnx_ir.Shape([])
        return {w: self.op.Mul(g, factor) for w, g in gradients.items()}

    def update(
        self, gradients: Mapping[onnx_ir.Value, onnx_ir.Value], optimizer: optim.Optimizer
    ) -> None:
        lr = self.scalar("lr", onnx_ir.DataType.FLOAT)
        step = self.scalar("step", onnx_ir.DataType.INT64) if optimizer.counts else lr
        for w, g in gradients.items():
            slots = [self.slot(w, k, "slot", initial) for k, initial in optimizer.slots.items()]
            news = optimizer.update(self.op, _names(w)[0], w, g, slots, lr, step)
            if self.finite is not None:
                olds = (w, *slots)
                news = [self.op.Where(self.finite, *p) for p in zip(news, olds, strict=True)]
            self.next.update(zip((w, *slots), news, strict=True))

    def finish(self) -> tuple[onnx_ir.Model, Spec]:
        """The graph with the loss, the norm and the successors of states for outputs."""
        self.place()
        evaluates = self.mode == "evaluate"
        outputs = [v for v in self.outputs if evaluates and v is not self.loss]
        ends = [self.loss, *([self.norm] if self.norm is not None else []), *self.next.values()]
        for value, new in self.next.items():
            new.name, new.type, new.shape = (
                self.op.fresh(f"{value.name}.next"),
                value.type,
                value.shape,
            )
        self.graph.outputs.clear()
        self.graph.outputs.extend(dict.fromkeys([*ends, *outputs]))
        clean(self.model)
        feeds = [*self.feeds, *([self.labels] if self.labels is not None else [])]
        names = {k: str(v.name) for k, v in self.scalars.items() if v.is_graph_input()}
        spec = Spec(
            feeds=tuple(feeds),
            labels=str(self.labels.name) if self.labels is not None else "",
            classes=self.classes,
            class_axis=self.axis,
            logits=self.logits,
            loss=str(self.loss.name),
            norm=str(self.norm.name) if self.norm is not None else "",
            lr=names.get("lr", ""),
            step=names.get("step", ""),
            rng=names.get("rng", ""),
            outputs=tuple(str(v.name) for v in outputs),
            states=tuple(
                State(
                    str(v.name), kind, initial, v, str(self.next[v].name) if v in self.next else ""
                )
                for v, kind, initial in self.states
            ),
        )
        return self.model, spec


def _is_weight(value: onnx_ir.Value) -> bool:
    """Not a scalar, and not a mask: exporters keep constants among the weights."""
    array = ir.const_array(value)
    return array is not None and array.ndim > 0 and bool(np.all(np.abs(array) < 1e9))


def _ancestors(value: onnx_ir.Value) -> set[onnx_ir.Value]:
    """All values that `value` is computed from."""
    seen, todo = {value}, [value]
    while todo:
        node = todo.pop().producer()
        for v in node.inputs if node is not None else ():
            if v is not None and v not in seen:
                seen.add(v)
                todo.append(v)
    return seen


# ---- running it --------------------------------------------------------------------------------


class _Portable:
    """The states of a run and the graphs that read and write them, on stock onnxruntime.

    Each state has two buffers: a step reads one and writes the other, so nothing is copied, and a
    step that turns out bad is dropped by not changing over.
    """

    def __init__(self, states: Sequence[State]) -> None:
        import onnxruntime

        # Own memory, which onnxruntime reads and writes in place.
        self._arrays = {s.name: [np.array(s.initial, order="C") for _ in range(2)] for s in states}
        self._wrap = onnxruntime.OrtValue.ortvalue_from_numpy
        self._values = {k: [self._wrap(a) for a in pair] for k, pair in self._arrays.items()}
        self._now = dict.fromkeys(self._arrays, 0)
        self._bindings: dict[tuple[Any, ...], Any] = {}
        self._sessions: dict[str, Any] = {}
        self._options = onnxruntime.RunOptions()
        self._options.log_severity_level = ort.FATAL

    def add(self, key: str, model: onnx_ir.Model) -> None:
        with ort.faults("training graph"):
            self._sessions[key] = ort.session(model)

    def array(self, name: str) -> Array:
        """The current content of a state, in place."""
        return self._arrays[name][self._now[name]]

    def write(self, name: str, array: Array) -> None:
        """Replace a state."""
        self.array(name)[...] = array

    ahead = 0
    """Steps that may be under way when the next one is asked for."""

    def start(
        self, key: str, spec: Spec, feeds: Mapping[str, Array]
    ) -> Callable[[], dict[str, Array]]:
        """Run; the outputs but for the states' successors, which `commit` makes current."""
        found = self._run(key, spec, feeds)
        return lambda: found

    def go_on(self) -> None:
        """Nothing was changed by a bad step."""

    def _run(self, key: str, spec: Spec, feeds: Mapping[str, Array]) -> dict[str, Array]:
        scalars = [name for name in (spec.loss, spec.norm) if name]
        pattern = (key, *(self._now[s.name] for s in spec.states))
        binding = self._bindings.get(pattern)
        if binding is None:
            binding = self._bindings[pattern] = self._sessions[key].io_binding()
            for name in scalars:
                binding.bind_output(name)
            for s in spec.states:
                now = self._now[s.name]
                binding.bind_ortvalue_input(s.name, self._values[s.name][now])
                if s.next:
                    binding.bind_ortvalue_output(s.next, self._values[s.name][1 - now])
        for name in spec.outputs:
            binding.bind_output(name)  # anew: its shape may be another
        for name, array in feeds.items():
            binding.bind_ortvalue_input(name, self._wrap(array))
        with ort.faults("training step"):
            self._sessions[key].run_with_iobinding(binding, self._options)
        values = binding.get_outputs()
        found = [*values[: len(scalars)], *values[len(values) - len(spec.outputs) :]]
        return {
            name: value.numpy()
            for name, value in zip((*scalars, *spec.outputs), found, strict=True)
        }

    def commit(self, spec: Spec) -> None:
        """Make what the last step wrote the current states."""
        for s in spec.states:
            if s.next:
                self._now[s.name] = 1 - self._now[s.name]


class _Cuda:
    """The same on a GPU: one graph launch a step, states replaced in place unless it was bad."""

    ahead = 4

    def __init__(self, states: Sequence[State], math: str) -> None:
        from onnx_fuse.runtime.states import CudaStates

        self._states = CudaStates({s.name: np.asarray(s.initial) for s in states}, math=math)
        self.add = self._states.add
        self.array = self._states.read
        self.write = self._states.write
        self.go_on = self._states.go_on

    def start(
        self, key: str, spec: Spec, feeds: Mapping[str, Array]
    ) -> Callable[[], dict[str, Array]]:
        successors = {s.next: s.name for s in spec.states if s.next}
        scalars = [name for name in (spec.loss, spec.norm) if name]
        guards = scalars if spec.strict else [spec.loss]
        return self._states.start(key, successors, scalars, spec.outputs, feeds, guards)

    def commit(self, spec: Spec) -> None:
        """Nothing is left to do."""


@dataclass
class _Run:
    """A step that was started: `index` among all, and what is known of it by now."""

    index: int
    mode: Mode
    spec: Spec
    feeds: dict[str, Array]
    result: Callable[[], dict[str, Array]]
    loss: float | None = None
    fault: str = ""


@total_ordering
class Loss:
    """The loss of a step that the GPU may still be at: to use it as a number waits for the step.

    Raises CheckFailed then, where that step (or one before it that nobody has looked at) was bad.
    """

    def __init__(self, trainer: Trainer, run: _Run) -> None:
        self._trainer, self._run = trainer, run

    def __float__(self) -> float:
        return self._trainer._loss(self._run)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(float(self), dtype)

    def __eq__(self, other: object) -> bool:
        return float(self) == (float(other) if isinstance(other, Loss) else other)

    def __lt__(self, other: SupportsFloat) -> bool:
        return float(self) < float(other)

    def __hash__(self) -> int:
        return hash(float(self))

    def __add__(self, other: SupportsFloat) -> float:
        return float(self) + float(other)

    def __sub__(self, other: SupportsFloat) -> float:
        return float(self) - float(other)

    def __mul__(self, other: SupportsFloat) -> float:
        return float(self) * float(other)

    def __truediv__(self, other: SupportsFloat) -> float:
        return float(self) / float(other)

    __radd__, __rmul__ = __add__, __mul__

    def __rsub__(self, other: SupportsFloat) -> float:
        return float(other) - float(self)

    def __rtruediv__(self, other: SupportsFloat) -> float:
        return float(other) / float(self)

    def __neg__(self) -> float:
        return -float(self)

    def __abs__(self) -> float:
        return abs(float(self))

    def __round__(self, digits: int | None = None) -> float:
        return round(float(self), digits)

    def __bool__(self) -> bool:
        return bool(float(self))

    def __format__(self, form: str) -> str:
        return format(float(self), form)

    def __repr__(self) -> str:
        return repr(float(self))


class Evaluation(NamedTuple):
    """Loss and outputs of a batch; where its labels are classes, how many count and are hit."""

    loss: float
    outputs: dict[str, Array]
    counted: int
    hits: int


class Trainer:
    """Fine-tunes a model: `step(feeds)` is one batch, `save(path)` writes the tuned model.

    model: path, bytes, ModelProto or ir.Model. loss: a name of `ops.loss.LOSSES`, of the output
    `output` (the first) against the input "labels", or of a scalar output that is the loss already.
    loss_options: ignore_index, label_smoothing, weight, delta, ... trainable, frozen: globs over
    the model's float initializers; without `trainable`, all that have an axis and reach the loss.
    clip_norm bounds the norm of all gradients together. With accumulate=k, every k-th step updates,
    by the mean of k gradients. Batch and sequence may change from step to step where the model's
    inputs leave them open; free_batch opens a batch that was exported fixed, and proves on the
    first feeds that the results of the original stay. Equal seeds and data give equal bits.
    `precision` is as in InferenceSession: "tf32", "bf16x3" and "bf16x6" are of products alone; with
    "bf16" and "fp16" forward and backward are in 16 bits, weights and update in float32, and
    "fp16" scales the loss, by `loss_scale` at first, and leaves out updates whose gradients
    overflow. `level` is that of the fusions, by default 2 where a GPU computes in 16 bits, else 0:
    attention's kernels of float32 are slower than its products apart, onnxruntime is fastest
    without (measured: 5 to 20 %).
    Raises ModelError, UsageError.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        loss: str,
        optimizer: optim.Optimizer | None = None,
        loss_options: Mapping[str, Any] | None = None,
        output: str | None = None,
        trainable: Sequence[str] | None = None,
        frozen: Sequence[str] = (),
        clip_norm: float | None = None,
        accumulate: int = 1,
        seed: int = 0,
        precision: str = "fp32",
        loss_scale: float = 65536.0,
        device: str = "cpu",
        free_batch: bool = False,
        level: int | None = None,
    ) -> None:
        _supported(precision, device)
        if device == "cuda":
            from onnx_fuse.runtime.device import begin

            begin()
        if accumulate < 1 or seed < 0 or (clip_norm is not None and not clip_norm > 0):
            raise UsageError("accumulate is at least 1, seed at least 0, clip_norm above 0")
        if not 0 < loss_scale < np.inf:
            raise UsageError(f"the loss scale is {loss_scale}: it must be finite and above 0")
        self.optimizer = optimizer or optim.AdamW()
        self._source = ir.read(model)
        self._options: dict[str, Any] = {
            "loss": loss,
            "loss_options": dict(loss_options or {}),
            "output": output,
            "trainable": None if trainable is None else list(trainable),
            "frozen": list(frozen),
            "clip_norm": clip_norm,
            "accumulate": accumulate,
            "free_batch": free_batch,
            "level": _level(precision, device) if level is None else level,
            "precision": precision,
            "loss_scale": loss_scale,
        }
        math = PRECISIONS[precision][1]
        self._whole = partial(_whole, math=math) if device == "cuda" else None
        self.seed, self.accumulate = seed, accumulate
        self._ignored = ignored_label(loss_options or {})
        self._unproved: bool = free_batch
        self.calls = 0
        """Steps so far, each one batch."""
        self._runs: list[_Run] = []  # started, and not looked at yet
        self.extra: dict[str, Any] = {}
        """What `checkpoint` was given to keep besides the states."""
        graph, spec = self._build("update")
        self._specs: dict[Mode, Spec] = {"update": spec}
        self._device: _Portable | _Cuda = (
            _Portable(spec.states) if device == "cpu" else _Cuda(spec.states, math)
        )
        self._device.add("update", graph)

    # -- graphs --

    def _build(self, mode: Mode) -> tuple[onnx_ir.Model, Spec]:
        options = dict(self._options)
        if mode != "update":
            # The same states as in "update", whichever those came to be.
            names = _weight_names(self._specs["update"])
            options |= {"trainable": [_literal(n) for n in names], "frozen": ()}
        return training_model(
            self._source,
            optimizer=self.optimizer,
            mode=mode,
            fused=self._whole is not None,
            whole=self._whole,
            **options,
        )

    def spec(self, mode: Mode = "update") -> Spec:
        """What the graph of this mode reads and gives; the graph is built at its first use."""
        if mode not in self._specs:
            graph, self._specs[mode] = self._build(mode)
            self._device.add(mode, graph)
        return self._specs[mode]

    def schedule(self, rates: optim.Schedule) -> None:
        """Take other learning rates, which are no part of the graph."""
        self.optimizer = dataclasses.replace(self.optimizer, lr=rates)

    # -- steps --

    @property
    def updates(self) -> int:
        return self.calls // self.accumulate

    def step(self, feeds: Mapping[str, Any]) -> float | Loss:
        """Forward, backward and, every `accumulate` calls, the update; returns the batch's loss.

        On a GPU the loss is a Loss, and the step may be under way still: up to four are. feeds: the
        model's inputs by name, and "labels". Raises DataError for feeds that do not fit,
        CheckFailed where the loss or a gradient is not finite: then the states stay as they were,
        and so they do in the steps started since, which count as not made.
        """
        self._settle(max(self._device.ahead - 1, 0))
        mode: Mode = "update" if (self.calls + 1) % self.accumulate == 0 else "accumulate"
        spec = self.spec(mode)
        arrays = self._fit(spec, feeds)
        if self._unproved:
            self.evaluate(feeds)
        arrays |= {
            name: value
            for name, value in (
                (spec.lr, np.array(self.optimizer.rate(self.updates), np.float32)),
                (spec.step, np.array(self.updates + 1)),
                (spec.rng, np.array((self.seed << 32) % 2**62 + self.calls)),
            )
            if name
        }
        run = _Run(self.calls, mode, spec, arrays, self._device.start(mode, spec, arrays))
        self._runs.append(run)
        self.calls += 1
        return Loss(self, run) if self._device.ahead else self._loss(run)

    def _loss(self, run: _Run) -> float:
        if run.loss is None and not run.fault:
            self._settle(len(self._runs) - 1 - self._runs.index(run))
        if run.loss is None:
            raise CheckFailed(run.fault)
        return run.loss

    def _settle(self, ahead: int = 0) -> None:
        """Look at the steps under way, the oldest first, until `ahead` are left.

        Raises CheckFailed for one that was bad: neither it nor those after it have changed a state.
        """
        while len(self._runs) > ahead:
            run = self._runs[0]
            found, spec = run.result(), run.spec  # may raise: then the run is still to be looked at
            del self._runs[0]
            ends = (spec.loss, spec.norm if spec.strict else "")
            if all(np.isfinite(found[name]) for name in ends if name):
                self._device.commit(spec)
                run.loss, run.feeds = float(found[spec.loss]), {}
                continue
            after, self._runs, self.calls = self._runs, [], run.index
            fault = self._blame(run.mode, spec, run.feeds, found)
            for other in (run, *after):
                other.fault, other.feeds = fault, {}
            self._device.go_on()
            raise CheckFailed(fault)

    def evaluate(self, feeds: Mapping[str, Any]) -> Evaluation:
        """Loss and outputs of a batch in inference mode."""
        self._settle()
        spec = self.spec("evaluate")
        arrays = self._fit(spec, feeds)
        self._prove_batch(spec, arrays)
        found = self._device.start("evaluate", spec, arrays)()
        counted = hits = 0
        if spec.classes:
            labels = arrays[spec.labels]
            counts = labels != self._ignored
            counted = int(counts.sum())
            hits = int((counts & (found[spec.logits].argmax(spec.class_axis) == labels)).sum())
        outputs = {n: found[n] for n in spec.outputs}
        return Evaluation(float(found[spec.loss]), outputs, counted, hits)

    def _fit(self, spec: Spec, feeds: Mapping[str, Any]) -> dict[str, Array]:
        arrays = data.fit(feeds, spec.feeds)
        if spec.classes:
            self.check_labels(arrays[spec.labels])
        return arrays

    def _prove_batch(self, spec: Spec, arrays: Mapping[str, Array]) -> None:
        """Compare the model with its batch freed to the original, on all that fill its batch.

        Raises ModelError where they differ, DataError for too few rows.
        """
        if not self._unproved:
            return
        self._unproved = False
        session = ort.session(self._source)
        size = int(session.get_inputs()[0].shape[0])
        rows = len(arrays[session.get_inputs()[0].name])
        if rows < size:
            raise DataError(f"the first batch needs {size} rows at least, as the model has")
        head = "the batch of the model cannot be freed"
        try:
            found = self._device.start("evaluate", spec, arrays)()
        except ModelError as error:
            raise ModelError(f"{head}: {error}") from error
        for i in range(0, rows - size + 1, size):
            own = {v.name: arrays[v.name][i : i + size] for v in session.get_inputs()}
            for name, y in zip(spec.outputs, ort.run(session, own, spec.outputs), strict=True):
                got = found[name][i : i + size]
                if got.shape != y.shape or not np.allclose(got, y, rtol=1e-3, atol=1e-4):
                    raise ModelError(f"{head}: '{name}' comes out different")

    def check_labels(self, labels: Array, first: int = 0) -> None:
        """Raises DataError for a label that is neither a class of the model nor ignore_index.

        `first` is the number of the first row, for the message.
        """
        spec = self._specs["update"]
        wrong = ((labels < 0) | (labels >= spec.classes)) & (labels != self._ignored)
        if wrong.any():
            place = [int(i) for i in np.unravel_index(int(np.argmax(wrong)), labels.shape)]
            found = labels[tuple(place)]
            place[0] += first
            raise DataError(
                f"'{spec.labels}' holds {found} at {place}: the model has the classes 0 to "
                f"{spec.classes - 1}"
            )

    def _blame(
        self, mode: Mode, spec: Spec, feeds: Mapping[str, Array], found: Mapping[str, Array]
    ) -> str:
        """The first value of a failed step that is not finite although what it came from is."""
        head = f"step {self.calls + 1}: the loss is {float(found[spec.loss])}"
        if np.isfinite(found[spec.loss]):
            head = f"step {self.calls + 1}: the norm of the gradients is {float(found[spec.norm])}"
        arrays = {**feeds, **{s.name: self._device.array(s.name) for s in spec.states}}
        bad = {k for k, a in arrays.items() if a.dtype.kind == "f" and not np.isfinite(a).all()}
        for name in (*feeds, *arrays):
            if name in bad:
                return f"{head}; '{name}' holds a value that is not finite"
        try:
            with ort.faults("looking for the first value that is not finite"):
                return f"{head}; {_first_not_finite(self._build(mode)[0], arrays)}"
        except ModelError as error:  # it lacks many operators in 16 bits; the step's fault counts
            return f"{head}; {error}"

    # -- results --

    def state(self) -> dict[str, Array]:
        """All tensors of the run by their names in the graph, as copies."""
        self._settle()
        return {s.name: self._device.array(s.name).copy() for s in self._specs["update"].states}

    def weights(self) -> dict[str, Array]:
        """Trained weights and running statistics, under the model's own names and shapes."""
        self._settle()
        found: dict[str, Array] = {}
        for s in self._specs["update"].states:
            if s.kind in ("parameter", "statistic"):
                found |= params.unpack(s.value, self._device.array(s.name))
        return {name: np.array(array, order="C") for name, array in found.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as it was given, with the trained weights in place of its own."""
        model = self._source.clone()
        for name, array in self.weights().items():
            model.graph.initializers[name].const_value = onnx_ir.tensor(array, name=name)
        tensors = (v.const_value for v in self._source.graph.initializers.values())
        ir.save(model, path, external=any(t is not None and "external" in t.meta for t in tensors))

    # -- checkpoints --

    def checkpoint(self, folder: str | os.PathLike[str], **extra: Any) -> Path:
        """Write `folder/step-N`, from which `resume` goes on to the same bits; returns it.

        extra: JSON values, found again in `extra` after a resume. Raises CheckFailed, and writes
        nothing, where a state is not finite.
        """
        self._settle()
        spec = self._specs["update"]
        states = {s.name: self._device.array(s.name) for s in spec.states}
        for name, array in states.items():
            # of an update that will be left out
            summed = not spec.strict and name.endswith(".accumulated")
            if not summed and not np.isfinite(array).all():
                raise CheckFailed(f"step {self.calls}: '{name}' is not finite any more")
        self.extra = extra
        manifest = {
            "step": self.calls,
            "model": self._fingerprint(),
            "settings": self._settings(),
            "extra": extra,
        }
        return checkpoint.write(folder, states, manifest)

    @classmethod
    def resume(
        cls, folder: str | os.PathLike[str], model: ir.Model, *, device: str = "cpu"
    ) -> Trainer:
        """The run as its newest whole checkpoint has it, over the model it was started with.

        Raises DataError where there is none, or it is of another model.
        """
        settings = dict(checkpoint.read(folder)[1]["settings"])
        optimizer = optim.from_json(settings.pop("optimizer"))
        trainer = cls(model, optimizer=optimizer, device=device, **settings)
        trainer.restore(folder)
        return trainer

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Go on from the newest whole checkpoint, which a trainer of equal settings has written.

        Raises DataError where there is none or it is of another model, UsageError where settings
        differ.
        """
        self._settle()
        tensors, manifest = checkpoint.read(folder)
        stored = manifest["settings"]
        for key, value in self._settings().items():
            if stored.get(key) != value:
                raise UsageError(f"{folder}: the run was started with {key} {stored.get(key)}")
        states = self._specs["update"].states
        if manifest["model"] != self._fingerprint() or {s.name for s in states} != set(tensors):
            raise DataError(f"{folder}: the checkpoint is of another model")
        for s in states:
            self._device.write(s.name, tensors[s.name])
        self.calls, self.extra = manifest["step"], manifest["extra"]

    def _settings(self) -> dict[str, Any]:
        """All arguments but the model, as JSON gives them back."""
        settings = {
            **self._options,
            "seed": self.seed,
            "optimizer": optim.to_json(self.optimizer),
        }
        found: dict[str, Any] = json.loads(json.dumps(settings, default=np.ndarray.tolist))
        return found

    def _fingerprint(self) -> str:
        """Equal for models that differ at most in the content of the trained weights."""
        graph, trained = self._source.graph, set(_weight_names(self._specs["update"]))
        digest = hashlib.sha256(repr(sorted(graph.opset_imports.items())).encode())
        for node in graph:
            digest.update(onnx_ir.serde.serialize_node(node).SerializeToString(deterministic=True))
        for name, value in sorted(graph.initializers.items()):
            digest.update(f"{name} {value.dtype} {value.shape}".encode())
            if name not in trained and value.const_value is not None:
                digest.update(value.const_value.tobytes())
        return digest.hexdigest()


def _level(precision: str, device: str) -> int:
    """The default level of the fusions."""
    return 2 if device == "cuda" and PRECISIONS[precision][0] != "float32" else 0


def _whole(node: onnx_ir.Node, math: str) -> bool:
    """Whether a fused node's gradients are best made by one call on this GPU."""
    from onnx_fuse.kernels.linear import gradient_pays

    return gradient_pays(node, math, Hardware.detect(0))


def _supported(precision: str, device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise UsageError(f"training runs on device 'cpu' or 'cuda', not on '{device}'")
    if precision not in PRECISIONS:
        raise UsageError(f"precision '{precision}' is not one of {', '.join(PRECISIONS)}")
    if device == "cpu" and precision not in ("fp32", "fp16"):
        raise UsageError(
            f"precision '{precision}' needs a GPU: on the CPU onnxruntime has no {precision} "
            "matrix product; use precision 'fp32'"
        )


def _weight_names(spec: Spec) -> list[str]:
    kinds = ("parameter", "statistic")
    return [name for s in spec.states if s.kind in kinds for name in _names(s.value)]


def _literal(name: str) -> str:
    """A glob that matches this name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _first_not_finite(model: onnx_ir.Model, feeds: Mapping[str, Array]) -> str:
    """Names the node that first makes a value that is not finite out of finite ones.

    Nodes that make NaN or +inf come before those that make -inf, which masks do on purpose.
    """
    graph = model.graph
    made = {v.name: n for n in graph for v in n.outputs if v.name and n.op_type != "Constant"}
    graph.outputs.clear()
    graph.outputs.extend(v for n in made.values() for v in n.outputs if v.name in made)
    names = [str(v.name) for v in graph.outputs]
    reads = {v.name for v in graph.inputs}
    run = ort.session(model, as_written=True)
    values = dict(feeds) | dict(zip(names, ort.run(run, _only(feeds, reads), names), strict=True))
    suspects: list[tuple[bool, bool, int, str]] = []
    for name in names:
        value, node = values[name], made[name]
        if value.dtype.kind != "f" or np.isfinite(value).all():
            continue
        sources = [values.get(str(v.name)) for v in node.inputs if v is not None]
        clean_in = all(a is None or a.dtype.kind != "f" or np.isfinite(a).all() for a in sources)
        masks = not (np.isnan(value) | np.isposinf(value)).any()
        kind = "nan" if np.isnan(value).any() else "-inf" if masks else "inf"
        label = f"'{name}', which the {node.op_type} node '{node.name}' made, is the first to be"
        suspects.append((not clean_in, masks, len(suspects), f"{label} {kind}"))
    return min(suspects)[-1] if suspects else "every value of the graph is finite on its own"


def _only(feeds: Mapping[str, Array], names: set[str | None]) -> dict[str, Array]:
    return {k: v for k, v in feeds.items() if k in names}

"""The Trainer runs steps and evaluations, and writes checkpoints and the tuned model."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import onnx_fuse.ir  # noqa: F401  # first: it imports onnx_ir without sympy

# isort: split
import numpy as np
import onnx_ir as ir

from onnx_fuse.adapters import files as adapter_files
from onnx_fuse.arrays import Array
from onnx_fuse.autodiff import without_gradient
from onnx_fuse.distributed.world import world
from onnx_fuse.errors import CheckFailed, DataError, NoGradientWarning, UsageError
from onnx_fuse.importer.exported import exported
from onnx_fuse.importer.load import read
from onnx_fuse.importer.save import save
from onnx_fuse.importer.shapes import with_shapes
from onnx_fuse.ir.build import dim, required
from onnx_fuse.ir.constants import Model
from onnx_fuse.options import takes
from onnx_fuse.rewrite import packed_weights
from onnx_fuse.rewrite.constants import lift_parameters, set_parameter
from onnx_fuse.runtime.timeline import Communication
from onnx_fuse.session import load
from onnx_fuse.textwrap import html_table
from onnx_fuse.training import (
    adapters,
    backends,
    checkpoint,
    data,
    fit,
    optim,
    settings,
    sources,
    tokens,
)  # fmt: skip
from onnx_fuse.training.adapters import Adapter, Lora
from onnx_fuse.training.distillation import distilled
from onnx_fuse.training.fault import fault_of
from onnx_fuse.training.groups import TrainableSelection
from onnx_fuse.training.history import History
from onnx_fuse.training.loss import Loss, Run
from onnx_fuse.training.losses import Given, Term, terms
from onnx_fuse.training.merged import Merging
from onnx_fuse.training.metrics import Evaluation, evaluation
from onnx_fuse.training.options import TrainingOptions
from onnx_fuse.training.ranks import Spare, counted, part_of_state, ranks_of, whole_states
from onnx_fuse.training.spec import Spec
from onnx_fuse.training.state import State
from onnx_fuse.training.step import UNREAD, Mode, training_model
from onnx_fuse.training.stored_codes import as_floats, notes_of
from onnx_fuse.training.tied_weights import resolve as resolve_tied
from onnx_fuse.training.tied_weights import untie as untie_weights
from onnx_fuse.training.weights import literal, model_names

__all__ = ["Evaluation", "Loss", "Trainer"]
__dir__ = __all__.copy


@dataclasses.dataclass(frozen=True)
class _TrainerArguments(TrainingOptions):
    model: object
    args: object = None


_WEIGHTS = ("parameter", "statistic", "average")
PACKED = "packed "
"""Begins the name of a mode whose graph is over tokens only."""


class Trainer:
    """Fine-tune a model: `step(feeds)` trains on one batch, `save(path)` writes the tuned model.

    Batch and sequence length may change from step to step where the model's inputs leave them
    free. Equal seeds and data give equal bits.
    """

    @takes(_TrainerArguments)
    def __init__(self, arguments: _TrainerArguments) -> None:
        """Read the model, check the options, and make what runs the steps.

        Args:
            model: A path, bytes, ModelProto or onnx_ir.Model, or a torch.onnx.ONNXProgram or
                torch.nn.Module. It is not changed.
            args: The arguments of a module's forward, which it is exported with in inference mode.
            {options}

        Raises:
            ModelError: The model is malformed, or cannot be differentiated.
            UsageError: Arguments contradict each other or the model.
            DeviceError: `device` is "cuda" and there is no usable GPU.
        """
        ranked = arguments.distributed and arguments.hardware is None
        self.world = world() if ranked else None
        """The ranks that train together, or None."""
        self._options = options = backends.placed(arguments, self.world)
        self._ranks = ranks_of(options, self.world)
        self.optimizer = optim.chosen(options.optimizer)
        self._original = read(exported(arguments.model, arguments.args))
        if options.teacher is not None:
            term = distilled(
                load(self._original), options.teacher, options.distill, options.temperature,
                options.level or 0,
            )  # fmt: skip
            losses = terms(options.loss, options.loss_options, options.output)
            options = dataclasses.replace(
                options, loss=[*losses, term], loss_options=None, output=None
            )
            self._options = options
        self.notes: list[str] = []
        """Sentences about weights that do not train because no gradient reaches them, that the
        file stores twice, or once for several places."""
        if options.untie:
            untie_weights(self._original.graph)
        self._source = self._original.clone()
        trainable = options.trainable
        lift_parameters(self._source, frozenset(trainable or ()))
        choice = TrainableSelection(trainable, options.frozen, self.optimizer.groups)
        wanted = trainable if options.lora is None else trainable or ()
        self._stored = as_floats(self._source.graph, TrainableSelection(wanted, (), ()))
        self.notes += notes_of([name for name in self._stored if choice(name)])
        self._duplicates, notes = resolve_tied(self._source.graph, choice, tied=options.tie)
        self.notes += notes
        plain, given = self._source, options.lora
        self.adapters: list[Adapter]
        """The low-rank adapters that train beside weights."""
        self._source, self.adapters, self._several = adapters.attach(plain, given, options.seed)
        globs = [literal(name) for each in self.adapters for name in (each.a, each.b)]
        self._trainable = [*globs, *(trainable or ())] if globs else trainable
        self._merging: Merging | None = None
        self._sized = with_shapes(self._source, options.shapes, options.dims)
        if isinstance(options.lora, Lora):
            self._merging = backends.merging(self._source, self._sized, self.adapters, options)
            lora = dataclasses.replace(options.lora, merged=self._merging is not None)
            self._options = options = dataclasses.replace(options, lora=lora)
        if self._merging is not None:
            self._sized = with_shapes(plain, options.shapes, options.dims)
        self.hardware, self.precision = options.hardware, options.precision
        """`hardware` is the GPU that the steps are only compiled for, or None."""
        self._whole = backends.CombinedGradients(options) if options.device == "cuda" else None
        self.in_parts: list[str] = self._whole.in_parts if self._whole else []
        """Norms and matrix multiplications trained as two operators, with predicted times."""
        self.seed, self.accumulate = options.seed, options.accumulate
        self._batch_unchecked: bool = options.free_batch
        self.calls = 0
        """The number of steps so far, each of one batch."""
        self._runs: list[Run] = []  # started, and not looked at yet
        self._fitting = data.Fitting()
        self.extra: dict[str, Any] = {}
        """The JSON values that `checkpoint` was given to keep besides the states."""
        self._unpacked = False
        """Whether a batch has run with its padding although it was to be packed."""
        graph, spec = self._build("update")
        for unread in (False, True):
            reasons = {n: why for n, why in spec.untrained.items() if (why == UNREAD) == unread}
            notes = without_gradient(reasons, "does not train", "do not train")
            self.notes += notes
            for note in () if unread else notes:
                warnings.warn(note, NoGradientWarning, stacklevel=3)
        self._specs: dict[str, Spec] = {"update": spec}
        if self.world is not None:
            common = self._ranks and dataclasses.replace(self._ranks, rank=0)
            identity = f"{self._fingerprint()} {self._settings()} {common}"
            self.world.agree("model or settings", hashlib.sha256(identity.encode()).hexdigest())
        self._device = backends.backend(spec.states, options, self.world)
        self._device.add("update", graph)
        if options.pack:
            self.spec(PACKED + "update")

    def __repr__(self) -> str:
        sizes = [s.initial.size for s in self._specs["update"].states if s.kind == "parameter"]
        return (
            f"Trainer({type(self.optimizer).__name__}, {sum(sizes):,} weights in {len(sizes)} "
            f"tensor{'s' * (len(sizes) != 1)}, {self.calls} steps, device='{self._options.device}')"
        )

    def _repr_html_(self) -> str:
        """The weights that train as a table, in a notebook."""
        weights = [s for s in self._specs["update"].states if s.kind == "parameter"]
        rows = [[s.name, s.initial.dtype, [*s.initial.shape]] for s in weights]
        return html_table(repr(self), ["weight", "type", "shape"], rows)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Raises UsageError: neither copy nor pickle can take what runs the steps."""
        raise UsageError(
            "a Trainer cannot be copied: checkpoint(folder) keeps it for Trainer.resume, and "
            "save(path) writes its model"
        )

    # -- graphs --

    def _build(self, key: str) -> tuple[ir.Model, Spec]:
        options, mode = self._options.of_step(), cast(Mode, key.removeprefix(PACKED))
        options |= {"trainable": self._trainable, "optimizer": self.optimizer}
        if key != "update":
            # The same states as in "update", whichever those came to be.
            names = settings.weight_names(self._specs["update"])
            options |= {"trainable": [literal(n) for n in names], "frozen": ()}
        return training_model(
            self._sized,
            mode=mode,
            fused=self._whole is not None,
            whole=self._whole,
            ranks=self._ranks,
            merging=self._merging,
            adapters=self._several,
            pack=key != mode,
            **options,
        )

    def spec(self, mode: str = "update") -> Spec:
        """The inputs, outputs and states of the graph of a mode, which its first use builds.

        "packed update" and "packed accumulate" are those over tokens only.
        """
        if mode not in self._specs:
            graph, self._specs[mode] = self._build(mode)
            self._device.add(mode, graph)
        return self._specs[mode]

    def graphs(self) -> dict[str, tuple[ir.Model, dict[str, str]]]:
        """Of a Trainer with `hardware`, each mode's graph, and which outputs replace which states.

        "copies" makes the 16-bit copies of weights that steps read, where there are any. Raises
        UsageError for another Trainer.
        """
        if not isinstance(self._device, backends.Compiling):
            raise UsageError("the Trainer was not made for compiling: give it hardware=")
        modes: list[Mode] = ["update", "evaluate"]
        modes += ["accumulate"] if self.accumulate > 1 else []
        modes += ["average"] if self._options.ema is not None else []
        graphs = {str(mode): self._device.graph(mode, self.spec(mode)) for mode in modes}
        return graphs | self._device.copies()

    @property
    def recompute(self) -> str:
        """What the steps run so far compute a second time to keep within `memory`, in words."""
        report = self._device.recompute("update")
        return "" if report is None else str(report)

    def schedule(self, rates: optim.Schedule) -> None:
        """Use other learning rates from now on; the graph stays, since they are no part of it."""
        self.optimizer = dataclasses.replace(self.optimizer, lr=rates)

    @property
    def lr(self) -> float:
        """The learning rate of the next update. One that is set stays until another is set."""
        return self.optimizer.rate(self.updates)

    @lr.setter
    def lr(self, rate: float) -> None:
        self.schedule(optim.Schedule(rate))

    # -- steps --

    @property
    def exported_batch(self) -> int:
        """The batch size that the model was exported with and that was freed, or 0."""
        if not self._options.free_batch:
            return 0
        graph = self._source.graph
        first = next(v for v in graph.inputs if v.name not in graph.initializers and v.shape)
        return required(dim(first, 0))

    @property
    def in_flight(self) -> int:
        """The number of steps that may be under way when the next one is asked for."""
        return self._device.in_flight

    @property
    def updates(self) -> int:
        """The number of updates so far: one for every `accumulate` steps."""
        return self.calls // self.accumulate

    def step(self, feeds: sources.Batch) -> float | Loss:
        """Train on one batch: forward, backward and, every `accumulate` calls, the update.

        Args:
            feeds: The model's inputs by name, and "labels", as arrays of the model's types, or as
                tensors on the GPU, which must not change before the loss is known; or a tuple in
                the order of the inputs, the labels last.

        Returns:
            The loss of the batch. On a GPU it is a Loss, which waits for the step when it is used
            as a number; up to four steps are under way.

        Raises:
            DataError: The arrays do not fit the model.
            CheckFailed: The loss or a gradient is not finite. The states stay as they were, and
                steps that were started since count as not made.
        """
        run = self.start(feeds)
        return Loss(run, self.finish) if self._device.in_flight else self.finish(run)

    def start(self, feeds: sources.Batch) -> Run:
        """Begin a step on the batch `feeds`, of which `finish` gives the loss; errors as `step`."""
        self._finish_steps(max(self._device.in_flight - 1, 0))
        mode: Mode = "update" if (self.calls + 1) % self.accumulate == 0 else "accumulate"
        spec = self.spec(mode)
        arrays = self._fit(spec, feeds)
        if self._batch_unchecked:
            self.evaluate(feeds)
        rows = max((array.shape[0] for array in arrays.values() if array.shape), default=0)
        if self.world is not None:
            spare = isinstance(feeds, Spare)
            arrays, count = counted(arrays, spec.measures, spec.targets, spare=spare)
            arrays[spec.counts] = count
            rows *= self.world.size
        rate = self.optimizer.rate(self.updates)
        key, spec, arrays = self._packed(mode, spec, arrays)
        arrays |= self._scalars(spec, rate)
        begin = partial(self._device.start, key, spec, arrays)
        shapes = (a.shape for a in arrays.values())
        result = begin() if self.world is None else self.world.watch.step((mode, *shapes), begin)
        run = Run(self.calls, key, spec, arrays, rate, rows, result)
        self._runs.append(run)
        self.calls += 1
        return run

    def _packed(
        self, mode: Mode, spec: Spec, arrays: dict[str, Array]
    ) -> tuple[str, Spec, dict[str, Array]]:
        """The graph over tokens only and what it is fed, where that is asked for and possible."""
        if not self._options.pack:
            return mode, spec, arrays
        packed = self.spec(PACKED + mode)
        more = tokens.feeds(required(packed.packing), packed.targets, arrays)
        if not isinstance(more, str):
            return PACKED + mode, packed, arrays | more
        if not self._unpacked:
            self._unpacked = True
            warnings.warn(f"a batch runs with its padding (said once): {more}", stacklevel=4)
        return mode, spec, arrays

    def _scalars(self, spec: Spec, rate: float) -> dict[str, Array]:
        """The inputs of a step other than its batch and the states, such as the learning rate."""
        draw = self.calls
        if self.world is not None:  # as if one process had the ranks' batches one by one
            draw = self.calls * self.world.size + self.world.rank
        scalars = (
            (spec.lr, np.array(rate, np.float32)),
            (spec.step, np.array(self.updates + 1)),
            (spec.rng, np.array((self.seed << 32) % 2**62 + draw)),
        )
        return {name: value for name, value in scalars if name}

    def step_graph(self, feeds: Mapping[str, Any]) -> tuple[ir.Model, dict[str, Array]]:
        """The graph of a step with its update, and all that it reads for the batch `feeds`.

        A profiler runs it; the states are copies, so that the run stays as it is. Raises DataError
        where the arrays do not fit the model.
        """
        graph, spec = self._build("update")
        states = {s.name: np.array(self._device.array(s.name)) for s in spec.states}
        scalars = self._scalars(spec, self.optimizer.rate(self.updates))
        if spec.counts:
            scalars[spec.counts] = np.ones(len(spec.measures) + 1)
        return graph, {**self._fit(spec, feeds), **scalars, **states}

    def finish(self, run: Run) -> float:
        """Wait for the step `run` that `start` began, and return its loss. Raises CheckFailed."""
        if run.loss is None and not run.fault:
            self._finish_steps(len(self._runs) - 1 - self._runs.index(run))
        if run.loss is None:
            raise CheckFailed(run.fault)
        return run.loss

    def _finish_steps(self, in_flight: int = 0) -> None:
        """Look at the steps under way, the oldest first, until `in_flight` are left.

        Raises CheckFailed for one that was bad: neither it nor those after it have changed a state.
        """
        while len(self._runs) > in_flight:
            run = self._runs[0]
            ends, spec = run.result(), run.spec  # may raise: then the run is still to be looked at
            del self._runs[0]
            if all(math.isfinite(ends[name]) for name in spec.guards):
                self._device.commit(spec)
                run.loss, run.feeds = float(ends[spec.loss]), {}
                run.norm = float(ends[spec.norm]) if spec.norm else None
                continue
            after, self._runs, self.calls = self._runs, [], run.index
            fed = {name: np.asarray(value) for name, value in run.feeds.items()}
            arrays = {**fed, **{x.name: self._device.array(x.name) for x in spec.states}}
            fault = fault_of(spec, run.feeds, arrays, ends, partial(self._build, run.mode))
            fault = f"step {run.index + 1}: {fault}"
            for other in (run, *after):
                other.fault, other.feeds = fault, {}
            self._device.resume_updates()
            raise CheckFailed(fault)

    @takes(fit.FitArguments)
    def fit(self, options: fit.FitArguments) -> History:
        """Train over a data set: epochs, evaluations, callbacks and checkpoints.

        Args:
            data: Arrays by name, a data set with columns, or batches, as `training.fit.fit` says.
            {options}

        Returns:
            The losses, rates, gradient norms, speeds and evaluations of the run.
        """
        return fit.train(self, options)

    def predict(self, feeds: sources.Batch, *, ema: bool = False) -> dict[str, Array]:
        """The model's outputs for a batch, by name, in inference mode and without labels.

        Args:
            feeds: The model's inputs by name, as a tuple in their order, or the array of the only
                one.
            ema: Take the running averages of the weights.

        Raises:
            DataError: The arrays do not fit the model.
            UsageError: The labels' shapes do not follow from the inputs', or there are no averages.
        """
        read = self.spec("evaluate").feeds
        names = {v.name for v in self._source.graph.inputs}
        arrays = sources.as_feeds(feeds, [v for v in read if v.name in names])
        return self.evaluate(data.with_labels(arrays, read), ema=ema).outputs

    def evaluate(self, feeds: sources.Batch, *, ema: bool = False) -> Evaluation:
        """Compute loss and outputs of a batch in inference mode.

        Args:
            feeds: The arrays that `step` takes.
            ema: Take the running averages of the weights.

        Raises:
            DataError: The arrays do not fit the model.
            UsageError: `ema` is True, but the Trainer keeps no averages.
        """
        self._finish_steps()
        mode: Mode = "average" if self._averages(ema) else "evaluate"
        spec = self.spec(mode)
        arrays = self._fit(spec, feeds)
        if self._batch_unchecked:
            self._batch_unchecked = False
            run = partial(self._device.start, "evaluate", spec, arrays)
            data.check_freed_batch(self._source, arrays, spec.outputs, lambda: run()())
        outputs = self._device.start(mode, spec, arrays)()
        return evaluation(spec, arrays, outputs)

    def _averages(self, wanted: bool) -> bool:
        if wanted and self._options.ema is None:
            raise UsageError("the Trainer keeps no averages of the weights: give it ema=0.999")
        return wanted

    def _fit(self, spec: Spec, feeds: sources.Batch) -> dict[str, Array]:
        if not isinstance(feeds, Mapping):
            feeds = sources.as_feeds(feeds, spec.feeds)
        if self.world is None:  # ranks look at what they are fed
            feeds = self._device.adopt(feeds)
        arrays = self._fitting(feeds, spec.feeds)
        empty = next((t.labels for t in spec.targets if 0 in arrays[t.labels].shape), None)
        if empty is not None and self.world is None:
            raise DataError(f"'{empty}' is empty: a batch needs at least one row with a label")
        for target in [t for t in spec.targets if t.checked]:  # few bytes, wherever they are
            arrays[target.labels] = np.asarray(arrays[target.labels])
            target.check(arrays[target.labels])
        return arrays

    def communication(self) -> Communication | None:
        """What the ranks exchanged in the last update; None where no graph on a GPU did so."""
        self._finish_steps()
        return self._device.communication("update")

    # -- results --

    def state(self) -> dict[str, Array]:
        """Copies of all tensors that outlive a step, by their names in the graph of the step."""
        self._finish_steps()
        return {s.name: self._device.array(s.name).copy() for s in self._specs["update"].states}

    def set_weights(self, states: Mapping[str, Array]) -> None:
        """Replace the weights and running statistics by those in `states`, which `state` gave."""
        self._finish_steps()
        held = [s for s in self._specs["update"].states if s.kind in _WEIGHTS]
        for s in held:
            if not isinstance(states, Mapping) or s.name not in states:
                raise DataError(f"no array for the weight '{s.name}': give what `state` gave")
        for s in held:
            self._device.write(s.name, states[s.name])

    def weights(self, *, ema: bool = False, adapter: str | None = None) -> dict[str, Array]:
        """Trained weights and running statistics, under the model's own names and shapes.

        `ema` asks for averages, `adapter` for one of several. Raises UsageError for none of them.
        """
        self._finish_steps()
        averages, several = self._averages(ema), adapters.choosable(self._several, adapter)
        named: dict[str, Array] = {}
        for s, array in self._held():
            chosen = self._device.array(s.average) if averages and s.average else array
            named |= packed_weights.unpack(s.value, chosen)
        pairs = {each: (named.pop(each.a), named.pop(each.b)) for each in self.adapters}
        for each in self.adapters if several is None else several.of(adapter):
            w = required(self._source.graph.initializers[each.weight].const_value)
            named[each.weight] = each.merged(w.numpy(), *pairs[each])
        named |= {t.copy: t.of(named[t.weight]) for t in self._duplicates if t.weight in named}
        return {name: np.array(array, order="C") for name, array in named.items()}

    def save(
        self, path: str | os.PathLike[str], *, ema: bool = False, adapter: str | None = None
    ) -> None:
        """Write the model as it was given, with the trained weights in place of its own.

        A weight that the file stores as integers is rounded to them.
        With `ema` these are their running averages; `adapter` names one of several. Of several
        ranks, rank 0 writes it. Raises UsageError where there are no averages.
        """
        weights = self.weights(ema=ema, adapter=adapter)
        if self.world is not None and self.world.rank:
            return
        model = self._original.clone()
        for name, array in weights.items():
            stored = self._stored.get(name)
            set_parameter(model, name, array if stored is None else stored.codes(array, weights))
        tensors = (v.const_value for v in self._original.graph.initializers.values())
        save(model, path, external=any(t is not None and "external" in t.meta for t in tensors))

    def save_adapters(self, path: str | os.PathLike[str], *, adapter: str | None = None) -> None:
        """Write all that trains, unmerged: a file (.safetensors), or a folder in the form of PEFT.

        `load_adapters` and `training.adapters.merge` read it. `adapter` names one of several.
        Raises UsageError without adapters, and for a folder where a weight has no PyTorch name.
        """
        tensors, held = self._unmerged(adapter)
        if self.world is None or self.world.rank == 0:
            adapter_files.write(path, tensors, held, self._original.graph)

    def load_adapters(self, path: str | os.PathLike[str], *, adapter: str | None = None) -> None:
        """Continue from what `save_adapters`, or PEFT, wrote to `path`, with a new optimizer.

        `adapter` names one of several. Raises DataError for another model's, rank's or scale's, and
        UsageError without adapters.
        """
        current, held = self._unmerged(adapter)
        tensors, restored = adapter_files.read_file(path, held, current)
        if {k: a.shape for k, a in tensors.items()} != {k: a.shape for k, a in current.items()}:
            raise DataError(f"{os.fspath(path)}: other names or shapes than the Trainer's adapters")
        if {a.scale for a in restored} != {a.scale for a in held}:
            raise DataError(f"{os.fspath(path)}: another alpha / rank than the Trainer's")
        if self._several is not None:
            tensors = self._several.within(adapter, tensors)
        for s in self._specs["update"].states:
            if s.kind in ("parameter", "statistic") and tensors.keys() >= {*model_names(s.value)}:
                part = part_of_state(s, packed_weights.pack(s.value, tensors), self.world)
                for name in filter(None, (s.name, s.average)):
                    self._device.write(name, part)

    def _unmerged(self, adapter: str | None) -> tuple[dict[str, Array], list[Adapter]]:
        if not self.adapters:
            raise UsageError("the Trainer has no adapters: give it lora=Lora()")
        self._finish_steps()
        held = ((s.value, array.copy()) for s, array in self._held())
        weights = {k: a for value in held for k, a in packed_weights.unpack(*value).items()}
        several = adapters.choosable(self._several, adapter)
        return (weights, self.adapters) if several is None else several.alone(adapter, weights)

    def _held(self) -> list[tuple[State, Array]]:
        """The weights and running statistics, whole; ranks that hold parts call it together."""
        states = self._specs["update"].states
        held = [s for s in states if s.kind in ("parameter", "statistic")]
        arrays = whole_states(held, self._device.array, self.world)
        return [(s, arrays[s.name]) for s in held]

    # -- checkpoints --

    def checkpoint(self, folder: str | os.PathLike[str], **extra: object) -> Path:
        """Write the folder `folder/step-N`, from which `resume` continues to the same bits.

        All ranks of a run call it together, and rank 0 writes.

        Args:
            folder: A folder for the checkpoints of this run; it is made where it is missing.
            **extra: JSON values, which are in `extra` again after a resume.

        Returns:
            The path of the new folder.

        Raises:
            CheckFailed: A state is not finite; nothing is written.
            DataError: The folder cannot be written.
            UsageError: Another training writes its checkpoints there.
        """
        self._finish_steps()
        spec = self._specs["update"]
        states = whole_states(spec.states, self._device.array, self.world)
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
        if self.world is None:
            return checkpoint.write(folder, states, manifest)
        written = b"" if self.world.rank else bytes(checkpoint.write(folder, states, manifest))
        return Path(os.fsdecode(self.world.broadcast(written)))

    @classmethod
    def resume(
        cls,
        folder: str | os.PathLike[str],
        model: Model,
        *,
        device: str = "cpu",
        schedule: optim.Schedule | None = None,
        loss: Given | Sequence[Term] | None = None,
        memory: int | str | None = None,
        **ranks: Any,
    ) -> Trainer:
        """Make a Trainer that continues a run from its newest whole checkpoint.

        Args:
            folder: The folder that `checkpoint` was given.
            model: The model that the run was started with.
            device: "cpu" or "cuda"; it may differ from that of the run.
            schedule: Learning rates from now on; the default is those of the run.
            loss: The loss of the run, where that is a model or a function.
            memory: The most GPU memory that a step may take; it may differ from that of the run.
            **ranks: device_id, distributed, reduce_dtype and shard, which may differ as well.

        Raises:
            DataError: There is no whole checkpoint, or it is of another model.
            UsageError: The loss is needed and not given, or another one.
        """
        stored = dict(checkpoint.read(folder)[1]["settings"])
        try:
            optimizer = optim.from_json(stored.pop("optimizer"))
            missing = optimizer.lr.missing if isinstance(optimizer.lr, optim.Schedule) else ""
            if missing and schedule is None:
                raise UsageError(
                    f"{folder}: the learning rate of the run is {missing}, which no checkpoint "
                    "holds: give its schedule as schedule="
                )
            run_loss = settings.stored_loss(folder, stored["loss"]) if loss is None else loss
            stored |= {"loss": run_loss}
            stored["lora"] = settings.stored_lora(stored["lora"])
            stored |= {"optimizer": optimizer, "device": device, "memory": memory}
            trainer = cls(model, **stored, **ranks)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"{folder}: the settings of its run are damaged: {error}") from error
        trainer.restore(folder)
        if schedule is not None:
            trainer.schedule(schedule)
        return trainer

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Continue from the newest whole checkpoint in `folder`, of a trainer with equal settings.

        The number of steps of the learning rate's schedule may differ, so that a run can go on for
        longer than it was meant to. Raises DataError where there is no such checkpoint, where it is
        of another model, and where a tensor has another dtype or shape; UsageError where settings
        differ. In these cases nothing is restored.
        """
        self._finish_steps()
        tensors, manifest = checkpoint.read(folder)
        settings.check(folder, self._settings(), manifest["settings"])
        states = self._specs["update"].states
        if manifest["model"] != self._fingerprint() or {s.name for s in states} != set(tensors):
            also = ", or adapters stand elsewhere there: try Trainer.resume" * bool(self.adapters)
            raise DataError(f"{folder}: the checkpoint is of another model{also}")
        for s in states:
            got, initial = tensors[s.name], np.asarray(s.initial)
            shape = initial.shape if s.whole is None else s.whole
            if (got.dtype, got.shape) != (initial.dtype, shape):
                raise DataError(
                    f"{folder}: '{s.name}' is {got.dtype}{list(got.shape)} in the checkpoint, "
                    f"{initial.dtype}{list(shape)} in the run"
                )
        for s in states:
            self._device.write(s.name, part_of_state(s, tensors[s.name], self.world))
        self.calls, self.extra = manifest["step"], manifest["extra"]

    def _settings(self) -> dict[str, Any]:
        """All arguments but the model, as JSON gives them back."""
        return settings.as_json(self._options, self.optimizer)

    def _fingerprint(self) -> str:
        """Equal for models that differ at most in the content of the trained weights."""
        return settings.fingerprint(self._source, set(settings.weight_names(self._specs["update"])))

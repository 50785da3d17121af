"""The Trainer runs steps and evaluations, and writes checkpoints and the tuned model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx_ir

from onnx_fuse.errors import CheckFailed, DataError, ModelError, UsageError
from onnx_fuse.onnx.common import Model
from onnx_fuse.onnx.exported import exported
from onnx_fuse.onnx.load import read
from onnx_fuse.onnx.save import save
from onnx_fuse.onnx.shapes import fix_shapes
from onnx_fuse.ops.loss import ignored_label
from onnx_fuse.passes import params
from onnx_fuse.passes.constants import lift_parameters, set_parameter
from onnx_fuse.program.problem import PRECISIONS, Hardware
from onnx_fuse.runtime import ort
from onnx_fuse.runtime.budget import parse as parse_budget
from onnx_fuse.training import checkpoint, data, optim, shared
from onnx_fuse.training.backends import Cuda, Portable
from onnx_fuse.training.loss import Loss, Run
from onnx_fuse.training.shared import Duplicate
from onnx_fuse.training.step import Mode, Spec, training_model
from onnx_fuse.training.weights import is_selected, literal, model_names

__all__ = ["Evaluation", "Loss", "Trainer"]

Array = np.ndarray[Any, Any]


class Evaluation(NamedTuple):
    """The result of `Trainer.evaluate` for one batch."""

    loss: float
    """The loss of the batch."""
    outputs: dict[str, Array]
    """The model's outputs by name."""
    counted: int
    """The number of labels other than ignore_index; 0 where labels are not classes."""
    hits: int
    """The number of those that the largest logit predicts."""


class Trainer:
    """Fine-tune a model: `step(feeds)` trains on one batch, `save(path)` writes the tuned model.

    Batch and sequence length may change from step to step where the model's inputs leave them
    free. Equal seeds and data give equal bits.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model, or a torch.onnx.ONNXProgram or
            torch.nn.Module. It is not changed.
        args: The arguments of a module's forward, which it is exported with in inference mode.
        loss: cross_entropy, nll, mse, l1, huber or bce_with_logits, computed from an output and
            the input "labels"; or the name of a scalar output that is the loss already.
        optimizer: An optimizer of `onnx_fuse.optim`; the default is AdamW().
        loss_options: ignore_index, label_smoothing, weight, pos_weight, delta, reduction or
            class_axis, with PyTorch's meanings.
        output: The output that the loss is computed from; the default is the first.
        trainable: Globs over the names of float initializers that train; the default is all that
            have an axis and reach the loss.
        frozen: Globs over the names of initializers that do not train.
        clip_norm: Bound on the norm of all gradients together.
        accumulate: Number of steps whose mean gradient makes one update.
        seed: Seed of Dropout, and of the order of data in `fit`.
        precision: As in InferenceSession. With "bf16" and "fp16", forward and backward are in 16
            bits, and weights, sums and the update are in float32. "fp16" scales the loss, and
            skips updates whose gradients overflow.
        loss_scale: The first scale of the loss in "fp16".
        device: "cpu" trains on onnxruntime, "cuda" on this package's kernels.
        free_batch: Free a batch size that was exported fixed. The first batch proves that the
            results stay those of the original, row by row.
        level: Level of the fusions, 0 to 3. The default is 2 where a GPU computes in 16 bits,
            and otherwise 0, which was measured to be 5 to 20 % faster.
        shapes, dims: Shapes by input and sizes by symbol, fixed in training but not in what
            `save` writes.
        tie: Train a weight that the file stores twice as one.
        untie: Give each place that reads a tensor of one repeated number a tensor of its own.
        memory: The most GPU memory that a step may take, as bytes or as a text such as "6GiB";
            "min" is the least possible. Weights, states, inputs and temporaries count. Results of
            the forward are then computed a second time in the backward where that frees enough
            memory; the numbers stay the same, bit for bit.

    Raises:
        ModelError: The model is malformed, or cannot be differentiated.
        UsageError: Arguments contradict each other or the model.
        DeviceError: `device` is "cuda" and there is no usable GPU.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
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
        shapes: Mapping[str, Sequence[int]] | None = None,
        dims: Mapping[str, int] | None = None,
        tie: bool = False,
        untie: bool = False,
        memory: int | str | None = None,
    ) -> None:
        _supported(precision, device)
        if memory is not None and device != "cuda":
            raise UsageError("memory bounds a step on a GPU: on the CPU onnxruntime plans its own")
        budget = None if memory is None else parse_budget(memory)
        if device == "cuda":
            from onnx_fuse.runtime.device import begin

            begin()
        if accumulate < 1 or seed < 0 or (clip_norm is not None and not clip_norm > 0):
            raise UsageError(
                "accumulate must be at least 1, seed at least 0, and clip_norm above 0"
            )
        if not 0 < loss_scale < np.inf:
            raise UsageError(f"the loss scale is {loss_scale}: it must be finite and above 0")
        self.optimizer = optimizer or optim.AdamW()
        self._given = read(exported(model, args))
        self._tie, self._untie = tie, untie
        self.notes: list[str] = []
        """Sentences about weights that the file stores twice, or once for several places."""
        self._source, self._duplicates = self._resolve_sharing(
            frozenset(trainable or ()), trainable, frozen
        )
        self._sized = self._source
        if shapes or dims:
            self._sized = self._source.clone()
            fix_shapes(self._sized, shapes or {}, dims)
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
        self._batch_unchecked: bool = free_batch
        self.calls = 0
        """The number of steps so far, each of one batch."""
        self._runs: list[Run] = []  # started, and not looked at yet
        self.extra: dict[str, Any] = {}
        """The JSON values that `checkpoint` was given to keep besides the states."""
        graph, spec = self._build("update")
        self._specs: dict[Mode, Spec] = {"update": spec}
        self._device: Portable | Cuda = (
            Portable(spec.states) if device == "cpu" else Cuda(spec.states, math, budget)
        )
        self._device.add("update", graph)

    # -- graphs --

    def _resolve_sharing(
        self, named: Collection[str], trainable: Sequence[str] | None, frozen: Sequence[str]
    ) -> tuple[onnx_ir.Model, list[Duplicate]]:
        """The model to train: Constant nodes that are weights lifted, copies tied or untied."""
        if self._untie:
            shared.untie(self._given.graph)
        source = self._given.clone()
        lift_parameters(source, named)
        for name, places in shared.shared_constants(source.graph).items():
            self.notes.append(
                f"'{name}' holds one number and is read in {places} places: it is one parameter "
                "(untie gives each place its own)"
            )
        duplicates = shared.find_duplicates(source.graph)
        if not self._tie:
            self.notes += [
                f"'{t.copy}' holds {'the transpose of ' if t.transposed else ''}'{t.weight}': they "
                "train apart (tie makes them one)"
                for t in duplicates
            ]
            return source, []
        for t in duplicates:
            if is_selected(t.weight, trainable, frozen) != is_selected(t.copy, trainable, frozen):
                raise UsageError(f"'{t.weight}' and '{t.copy}' are tied: train both, or neither")
            self.notes.append(f"'{t.copy}' is tied to '{t.weight}'")
        shared.tie(source.graph, duplicates)
        return source, duplicates

    def _build(self, mode: Mode) -> tuple[onnx_ir.Model, Spec]:
        options = dict(self._options)
        if mode != "update":
            # The same states as in "update", whichever those came to be.
            names = _weight_names(self._specs["update"])
            options |= {"trainable": [literal(n) for n in names], "frozen": ()}
        return training_model(
            self._sized,
            optimizer=self.optimizer,
            mode=mode,
            fused=self._whole is not None,
            whole=self._whole,
            **options,
        )

    def spec(self, mode: Mode = "update") -> Spec:
        """The inputs, outputs and states of the graph of a mode, which its first use builds."""
        if mode not in self._specs:
            graph, self._specs[mode] = self._build(mode)
            self._device.add(mode, graph)
        return self._specs[mode]

    @property
    def recompute(self) -> str:
        """What the steps run so far compute a second time to keep within `memory`, in words."""
        found = self._device.recompute("update")
        return "" if found is None else str(found)

    def schedule(self, rates: optim.Schedule) -> None:
        """Use other learning rates from now on; the graph stays, since they are no part of it."""
        self.optimizer = dataclasses.replace(self.optimizer, lr=rates)

    # -- steps --

    @property
    def exported_batch(self) -> int:
        """The batch size that the model was exported with and that was freed, or 0."""
        if not self._options["free_batch"]:
            return 0
        names = self._source.graph.initializers
        first = next(v for v in self._source.graph.inputs if v.name not in names and v.shape)
        assert first.shape is not None
        return int(first.shape[0])  # type: ignore[arg-type]

    @property
    def updates(self) -> int:
        """The number of updates so far: one for every `accumulate` steps."""
        return self.calls // self.accumulate

    def step(self, feeds: Mapping[str, Any]) -> float | Loss:
        """Train on one batch: forward, backward and, every `accumulate` calls, the update.

        Args:
            feeds: The model's inputs by name, and "labels", as arrays of the model's types.

        Returns:
            The loss of the batch. On a GPU it is a Loss, which waits for the step when it is used
            as a number; up to four steps are under way.

        Raises:
            DataError: The arrays do not fit the model.
            CheckFailed: The loss or a gradient is not finite. The states stay as they were, and
                steps that were started since count as not made.
        """
        self._finish_steps(max(self._device.in_flight - 1, 0))
        mode: Mode = "update" if (self.calls + 1) % self.accumulate == 0 else "accumulate"
        spec = self.spec(mode)
        arrays = self._fit(spec, feeds)
        if self._batch_unchecked:
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
        run = Run(self.calls, mode, spec, arrays, self._device.start(mode, spec, arrays))
        self._runs.append(run)
        self.calls += 1
        return Loss(run, self._loss) if self._device.in_flight else self._loss(run)

    def _loss(self, run: Run) -> float:
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
            self._device.resume_updates()
            raise CheckFailed(fault)

    def evaluate(self, feeds: Mapping[str, Any]) -> Evaluation:
        """Compute loss and outputs of a batch in inference mode; `feeds` are those of `step`."""
        self._finish_steps()
        spec = self.spec("evaluate")
        arrays = self._fit(spec, feeds)
        self._check_batch(spec, arrays)
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

    def _check_batch(self, spec: Spec, arrays: Mapping[str, Array]) -> None:
        """Compare the model with its batch freed to the original, on all that fill its batch.

        Raises ModelError where they differ, DataError for too few rows.
        """
        if not self._batch_unchecked:
            return
        self._batch_unchecked = False
        session = ort.session(self._source)
        size = int(session.get_inputs()[0].shape[0])
        rows = len(arrays[session.get_inputs()[0].name])
        if rows < size:
            raise DataError(
                f"the first batch has {rows} rows, but it needs at least {size}, the batch that "
                "the model was exported with"
            )
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
                    raise ModelError(f"{head}: its output '{name}' changes")

    def check_labels(self, labels: Array, first: int = 0) -> None:
        """Raise DataError for one of `labels` that is neither a class nor ignore_index.

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
        """Copies of all tensors that outlive a step, by their names in the graph of the step."""
        self._finish_steps()
        return {s.name: self._device.array(s.name).copy() for s in self._specs["update"].states}

    def weights(self) -> dict[str, Array]:
        """Trained weights and running statistics, under the model's own names and shapes."""
        self._finish_steps()
        found: dict[str, Array] = {}
        for s in self._specs["update"].states:
            if s.kind in ("parameter", "statistic"):
                found |= params.unpack(s.value, self._device.array(s.name))
        found |= {t.copy: t.of(found[t.weight]) for t in self._duplicates if t.weight in found}
        return {name: np.array(array, order="C") for name, array in found.items()}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as it was given, with the trained weights in place of its own."""
        model = self._given.clone()
        for name, array in self.weights().items():
            set_parameter(model, name, array)
        tensors = (v.const_value for v in self._given.graph.initializers.values())
        save(model, path, external=any(t is not None and "external" in t.meta for t in tensors))

    # -- checkpoints --

    def checkpoint(self, folder: str | os.PathLike[str], **extra: Any) -> Path:
        """Write the folder `folder/step-N`, from which `resume` continues to the same bits.

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
        states = {s.name: self._device.array(s.name) for s in spec.states}
        for name, array in states.items():
            # of an update that will be left out
            summed = not spec.strict and name.endswith(".accumulated")
            if not summed and not np.isfinite(array).all():
                raise CheckFailed(f"step {self.calls}: '{name}' is no longer finite")
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
        cls,
        folder: str | os.PathLike[str],
        model: Model,
        *,
        device: str = "cpu",
        memory: int | str | None = None,
    ) -> Trainer:
        """Make a Trainer that continues a run from its newest whole checkpoint.

        Args:
            folder: The folder that `checkpoint` was given.
            model: The model that the run was started with.
            device: "cpu" or "cuda"; it may differ from that of the run.
            memory: The most GPU memory that a step may take; it may differ from that of the run.

        Raises:
            DataError: There is no whole checkpoint, or it is of another model.
        """
        settings = dict(checkpoint.read(folder)[1]["settings"])
        try:
            optimizer = optim.from_json(settings.pop("optimizer"))
            trainer = cls(model, optimizer=optimizer, device=device, memory=memory, **settings)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(f"{folder}: the settings of its run are damaged: {error}") from error
        trainer.restore(folder)
        return trainer

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Continue from the newest whole checkpoint in `folder`, of a trainer with equal settings.

        Raises DataError where there is no such checkpoint, where it is of another model, and where
        a tensor has another dtype or shape; UsageError where settings differ. In these cases
        nothing is restored.
        """
        self._finish_steps()
        tensors, manifest = checkpoint.read(folder)
        stored = manifest["settings"]
        for key, value in self._settings().items():
            if stored.get(key) != value:
                raise UsageError(
                    f"{folder}: the run was started with {key} {stored.get(key)}, not {value}: "
                    "give the same, or another folder"
                )
        states = self._specs["update"].states
        if manifest["model"] != self._fingerprint() or {s.name for s in states} != set(tensors):
            raise DataError(f"{folder}: the checkpoint is of another model")
        for s in states:
            got, own = tensors[s.name], np.asarray(s.initial)
            if (got.dtype, got.shape) != (own.dtype, own.shape):
                raise DataError(
                    f"{folder}: '{s.name}' is {got.dtype}{list(got.shape)} in the checkpoint, "
                    f"{own.dtype}{list(own.shape)} in the run"
                )
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
        settings |= {k: True for k, on in (("tie", self._tie), ("untie", self._untie)) if on}
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
    from onnx_fuse.lower.linear import gradient_pays

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
    return [name for s in spec.states if s.kind in kinds for name in model_names(s.value)]


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


def __dir__() -> list[str]:
    return sorted(__all__)

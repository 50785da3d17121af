"""What `fit` does beside its steps: it stops early, keeps the best weights, and writes logs."""

from __future__ import annotations

import csv
import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

import numpy as np

from onnx_fuse import progress
from onnx_fuse.arrays import Array
from onnx_fuse.errors import DataError, UsageError
from onnx_fuse.training import checkpoint
from onnx_fuse.training.history import History
from onnx_fuse.training.learner import Learner

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "BestWeights",
    "Callback",
    "CsvLog",
    "EarlyStopping",
    "Fit",
    "MLflow",
    "Progress",
    "ReduceLROnPlateau",
    "TensorBoard",
    "Wandb",
    "Watch",
]
__dir__ = __all__.copy


@dataclass
class Fit:
    """A call of `fit`, as its callbacks see it."""

    trainer: Learner
    """The Trainer, whose `lr` may be set."""
    history: History
    """The course of the run so far. Callbacks read it and do not change it."""
    epochs: int
    """The number of epochs after which the run ends."""
    steps: int | None
    """The number of steps of the whole run, or None where it is not known."""
    metrics: list[str] = field(default_factory=list)
    """The names of what an evaluation gives, "validation_loss" first; none without validation."""
    stopped: str = ""
    """The reason for which the run ends before its last epoch, or ""."""
    finished: bool = False
    """Whether the run has ended without an exception."""

    def stop(self, reason: str) -> None:
        """End the run after this step, for `reason`."""
        self.stopped = self.stopped or reason


class Callback:
    """The base of all callbacks. Each method gets the run and may be overridden; none must be.

    Of several ranks each calls its own, but for those that only show something.
    """

    shows: ClassVar[bool] = False
    """Whether it does nothing but show or write, which rank 0 does for all ranks."""

    def on_start(self, fit: Fit) -> None:
        """Called before the first step; `fit.history` holds the steps of a run that goes on."""

    def on_step(self, fit: Fit) -> None:
        """Called after each step, whose numbers are the last in the lists of `fit.history`."""

    def on_evaluation(self, fit: Fit) -> None:
        """Called after each evaluation, whose record is the last one in `fit.history.metrics`."""

    def on_epoch(self, fit: Fit) -> None:
        """Called after each epoch, whose record is the last one in `fit.history.epochs`."""

    def on_end(self, fit: Fit) -> None:
        """Called when `fit` ends, by an exception too; not where `on_start` has raised one."""


class Watch(Callback):
    """Calls `function` with the history after each step and each epoch."""

    def __init__(self, function: Callable[[History], None]) -> None:
        self.function = function

    def on_step(self, fit: Fit) -> None:
        self.function(fit.history)

    on_epoch = on_step


# ---- by what an evaluation gave ----------------------------------------------------------------


@dataclass
class _Monitor(Callback):
    """The values of one metric, and the best of them."""

    monitor: str = "validation_loss"
    """The metric that is looked at: a name of `Fit.metrics`."""
    mode: str = "auto"
    """Whether the best is the smallest ("min") or the largest ("max"). "auto" takes the smallest of
    a name with "loss", "error" or "perplexity" in it, and else the largest."""
    min_delta: float = 0.0
    """The least change that counts as better."""

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "min", "max"):
            raise UsageError(f"a metric is best at its min or max, not at its '{self.mode}'")

    def on_start(self, fit: Fit) -> None:
        """Check that the evaluations of `fit` give the metric. Raises UsageError."""
        if self.monitor not in fit.metrics:
            names = ", ".join(fit.metrics)
            raise UsageError(
                f"no metric '{self.monitor}' to monitor: the evaluations give {names}"
                if names
                else f"'{self.monitor}' is monitored: give validation data"
            )

    def best(self, history: History) -> int:
        """The number, from 0, of the best evaluation in `history`; -1 where there is none."""
        return max((i for i, better in enumerate(self.better(history)) if better), default=-1)

    def better(self, history: History) -> Iterator[bool]:
        """Whether each evaluation in `history` is better than those before it.

        It is if it is so by more than `min_delta`; NaN never is.
        """
        small = any(word in self.monitor for word in ("loss", "error", "perplexity"))
        sign = -1 if self.mode == "min" or (self.mode == "auto" and small) else 1
        best = -np.inf
        for record in history.metrics:
            value = sign * record[self.monitor]
            margin = self.min_delta if best > -np.inf else 0.0
            yield (better := value > best + margin)
            best = value if better else best


@dataclass
class EarlyStopping(_Monitor):
    """Ends the run once `patience` evaluations in a row are no better than the best before them.

    It looks only at the history, so a resumed run ends where the whole one would have.
    """

    patience: int = 3
    """The number of evaluations without progress that end the run."""

    def on_start(self, fit: Fit) -> None:
        """Check the metric, and look at the evaluations of the run that goes on as `fit`."""
        super().on_start(fit)
        if self.patience < 1:
            raise UsageError(f"patience is {self.patience}: it must be at least 1")
        self.on_evaluation(fit)

    def on_evaluation(self, fit: Fit) -> None:
        records = fit.history.metrics
        best = self.best(fit.history)
        if len(records) - 1 - best >= self.patience:
            reached = f", the best is {records[best][self.monitor]:.6g}" if best >= 0 else ""
            fit.stop(f"{self.monitor} has not improved in {self.patience} evaluations{reached}")


@dataclass
class ReduceLROnPlateau(_Monitor):
    """Multiplies the learning rate by `factor` when more than `patience` evaluations in a row are
    no better than the best before them, as PyTorch's scheduler of this name does.

    From then on the rate is constant. A resumed run begins at the rate that it had reached.
    """

    factor: float = 0.1
    """The factor on the learning rate, below 1."""
    patience: int = 10
    """The number of evaluations without progress that change nothing."""
    min_lr: float = 0.0
    """The lowest learning rate."""

    def on_start(self, fit: Fit) -> None:
        """Check the numbers, and reduce the rate of a run that goes on as `fit` as before."""
        super().on_start(fit)
        if not 0 <= self.factor < 1 or self.patience < 0 or self.min_lr < 0:
            raise UsageError(
                "factor must be at least 0 and below 1, patience and min_lr at least 0"
            )
        if fit.history.lr and any(self._reductions(fit.history)):
            fit.trainer.lr = fit.history.lr[-1]
            self._reduce(fit)

    def on_evaluation(self, fit: Fit) -> None:
        self._reduce(fit)

    def _reduce(self, fit: Fit) -> None:
        evaluated = fit.history.metrics[-1]["step"] == len(fit.history.losses)
        if evaluated and self._reductions(fit.history)[-1]:
            fit.trainer.lr = max(fit.trainer.lr * self.factor, min(self.min_lr, fit.trainer.lr))

    def _reductions(self, history: History) -> list[bool]:
        """Whether the rate is reduced after each evaluation in `history`."""
        bad, reduced = 0, []
        for better in self.better(history):
            bad = 0 if better else bad + 1
            reduced.append(bad > self.patience)
            bad = 0 if reduced[-1] else bad
        return reduced


@dataclass
class BestWeights(_Monitor):
    """Keeps the weights of the best evaluation, and puts them back when the run ends."""

    folder: str | os.PathLike[str] | None = None
    """A folder of its own for checkpoints of the best weights; by default they stay in memory, and
    a resumed run knows of them only if it finds better ones."""
    restore: bool = True
    """Whether the Trainer has the best weights when the run ends. Its step and the optimizer's
    state stay those of the last step."""

    def on_start(self, fit: Fit) -> None:
        """Check the metric and the folder: empty for a new run, of this run where it goes on."""
        super().on_start(fit)
        self._best_state: dict[str, Array] | None = None
        if not self.folder:
            return
        folder, exists = os.fspath(self.folder), checkpoint.exists(self.folder)
        if self.best(fit.history) >= 0 and not exists:
            raise DataError(f"{folder}: the best weights of the run are missing")
        if exists and not fit.history.losses:
            raise UsageError(f"{folder} holds the best weights of another run: give another folder")

    def on_evaluation(self, fit: Fit) -> None:
        """Keep the weights of `fit` where its last evaluation is the best one."""
        if self.best(fit.history) != len(fit.history.metrics) - 1:
            return
        if self.folder:
            fit.trainer.checkpoint(self.folder, fit=asdict(fit.history))
        else:
            self._best_state = fit.trainer.state()

    def on_end(self, fit: Fit) -> None:
        """Put the best weights back into the Trainer of `fit`, unless an exception ends it."""
        if fit.finished and self.restore and self.best(fit.history) >= 0:
            weights = checkpoint.read(self.folder)[0] if self.folder else self._best_state
            if weights is not None:
                fit.trainer.set_weights(weights)


# ---- logs --------------------------------------------------------------------------------------


def _step_numbers(history: History, i: int) -> dict[str, float | None]:
    speed = history.examples_per_second
    return {
        "step": i + 1,
        "loss": history.losses[i],
        "lr": history.lr[i],
        "gradient_norm": history.gradient_norms[i],
        "examples_per_second": speed[i] if i < len(speed) else None,
    }


class CsvLog(Callback):
    """Writes the CSV file `path` with a row for each step and each evaluation.

    The columns are step, epoch, loss, lr, gradient_norm, examples_per_second, and the metrics by
    name. A resumed run writes the whole file anew, with the steps before.
    """

    shows = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def on_start(self, fit: Fit) -> None:
        """Write the header, and what the history of `fit` holds. Raises DataError."""
        history = fit.history
        try:
            self._file = self.path.open("w", newline="", encoding="utf-8")
        except OSError as error:
            raise DataError(f"{self.path}: cannot be written: {error.strerror}") from error
        names = ["step", "epoch", "loss", "lr", "gradient_norm", "examples_per_second"]
        self._table = csv.DictWriter(self._file, [*names, *fit.metrics], extrasaction="ignore")
        self._table.writeheader()
        evaluations = {int(record["step"]): record for record in history.metrics}
        for i in range(len(history.losses)):
            self._table.writerow(_step_numbers(history, i))
            if i + 1 in evaluations:
                self._table.writerow(evaluations[i + 1])

    def on_step(self, fit: Fit) -> None:
        self._table.writerow(_step_numbers(fit.history, len(fit.history.losses) - 1))

    def on_evaluation(self, fit: Fit) -> None:
        """Write a row for the last evaluation of `fit`, and let readers see the file so far."""
        self._table.writerow(fit.history.metrics[-1])
        if self._file:
            self._file.flush()

    def on_end(self, fit: Fit) -> None:
        if self._file:
            self._file.close()


class _Tracker(Callback, ABC):
    """Sends train/loss, train/lr, validation/… to a tracker of experiments."""

    shows = True

    @abstractmethod
    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Send the numbers of a step, by their names."""

    def on_step(self, fit: Fit) -> None:
        numbers = _step_numbers(fit.history, len(fit.history.losses) - 1)
        self._add("train", {k: v for k, v in numbers.items() if v is not None})

    def on_evaluation(self, fit: Fit) -> None:
        record = fit.history.metrics[-1]
        self._add("validation", {k.removeprefix("validation_"): v for k, v in record.items()})

    def _add(self, kind: str, numbers: Mapping[str, float]) -> None:
        named = {f"{kind}/{k}": v for k, v in numbers.items() if k not in ("step", "epoch")}
        self.log(named, int(numbers["step"]))


def _tracker(module: str, package: str) -> Any:
    """The module of a tracker. Raises UsageError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{module} is not installed: pip install {package}") from error


class TensorBoard(_Tracker):
    """Writes train/loss, train/lr, validation/… into `folder` for TensorBoard, by tensorboardX."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = folder
        self._writer: Any = None

    def on_start(self, fit: Fit) -> None:
        """Open the folder. Raises UsageError where tensorboardX is not installed."""
        writer = _tracker("tensorboardX", "tensorboardX").SummaryWriter
        # what another process wrote after the checkpoint from which this one goes on is hidden
        self._writer = writer(os.fspath(self.folder), purge_step=len(fit.history.losses) + 1)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def on_end(self, fit: Fit) -> None:
        if self._writer is not None:
            self._writer.close()


class Wandb(_Tracker):
    """Sends train/loss, train/lr, validation/… to a run of Weights & Biases.

    `options` are those of `wandb.init`, such as project, name or mode="offline".
    """

    def __init__(self, **options: object) -> None:
        self.options = options
        self._run: Any = None

    def on_start(self, fit: Fit) -> None:
        """Begin the run. Raises UsageError where wandb is not installed."""
        self._run = _tracker("wandb", "wandb").init(**self.options)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(dict(numbers), step=step)

    def on_end(self, fit: Fit) -> None:
        """End the run, as failed where an exception ends it."""
        if self._run is not None:
            self._run.finish(exit_code=0 if fit.finished else 1)


class MLflow(_Tracker):
    """Sends train/loss, train/lr, validation/… to a run of MLflow, in `experiment`.

    `options` are those of `mlflow.start_run`, such as run_name. The server is MLflow's own setting
    (MLFLOW_TRACKING_URI).
    """

    def __init__(self, experiment: str | None = None, **options: object) -> None:
        self.experiment, self.options = experiment, options
        self._mlflow: Any = None

    def on_start(self, fit: Fit) -> None:
        """Begin the run. Raises UsageError where MLflow is not installed."""
        mlflow = _tracker("mlflow", "mlflow-skinny")
        if self.experiment is not None:
            mlflow.set_experiment(self.experiment)
        mlflow.start_run(**self.options)
        self._mlflow = mlflow

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def on_end(self, fit: Fit) -> None:
        """End the run, as failed where an exception ends it."""
        if self._mlflow is not None:
            self._mlflow.end_run("FINISHED" if fit.finished else "FAILED")


class Progress(Callback):
    """Shows a bar with loss, speed and remaining time, and prints a line for each evaluation.

    It writes to the `console` of rich, which is a new one by default. On what is not a terminal the
    bar is left out.
    """

    shows = True

    def __init__(self, console: Console | None = None) -> None:
        self.console = console

    def on_start(self, fit: Fit) -> None:
        from rich import progress as bars
        from rich.console import Console

        columns = (
            bars.TextColumn("step {task.completed}" + (f"/{fit.steps}" if fit.steps else "")),
            bars.BarColumn(),
            bars.TextColumn("loss {task.fields[loss]}  {task.fields[speed]:,.0f} examples/s  ETA"),
            bars.TimeRemainingColumn(),
        )
        console = self.console or Console()
        progress.quiet()
        self._bars = bars.Progress(*columns, console=console, transient=True)
        done = len(fit.history.losses)
        self._task = self._bars.add_task("", total=fit.steps, completed=done, loss="-", speed=0.0)
        self._bars.start()

    def on_step(self, fit: Fit) -> None:
        history = fit.history
        recent = history.examples_per_second[-50:]
        speed = len(recent) / sum(1 / s for s in recent if s) if any(recent) else 0.0
        loss = f"{history.losses[-1]:.4g}"
        self._bars.update(self._task, completed=len(history.losses), loss=loss, speed=speed)

    def on_evaluation(self, fit: Fit) -> None:
        record = fit.history.metrics[-1]
        if record["epoch"] <= len(fit.history.epochs):
            return
        self._print(f"step {record['step']:.0f}", record, ("step", "epoch"))

    def on_epoch(self, fit: Fit) -> None:
        record = fit.history.epochs[-1]
        self._print(f"epoch {record['epoch']:.0f} of {fit.epochs}", record, ("step", "epoch"))

    def _print(self, head: str, record: Mapping[str, float], left_out: tuple[str, ...]) -> None:
        values = [f"{k.replace('_', ' ')} {v:.6g}" for k, v in record.items() if k not in left_out]
        self._bars.console.print("  ".join([head, *values]), markup=False, soft_wrap=True)

    def on_end(self, fit: Fit) -> None:
        self._bars.stop()
        if fit.stopped:
            self._bars.console.print(f"stopped: {fit.stopped}", markup=False, soft_wrap=True)

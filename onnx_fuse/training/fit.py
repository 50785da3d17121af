"""Train over whole data sets: epochs, evaluations, callbacks, checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

import numpy as np

from onnx_fuse.arrays import Array
from onnx_fuse.errors import DataError, UsageError
from onnx_fuse.ir.build import required
from onnx_fuse.options import takes
from onnx_fuse.training import checkpoint, sources
from onnx_fuse.training import history as histories
from onnx_fuse.training.callbacks import Callback, Fit, Progress
from onnx_fuse.training.fit_options import FitOptions
from onnx_fuse.training.history import History
from onnx_fuse.training.learner import Learner
from onnx_fuse.training.loss import Run
from onnx_fuse.training.metrics import Selection, begin

__all__ = ["evaluate", "fit", "start_or_resume"]
__dir__ = __all__.copy


@dataclass(frozen=True)
class FitArguments(FitOptions):
    """What `fit` takes besides the Trainer."""

    data: sources.Data


@takes(FitArguments)
def fit(trainer: Learner, options: FitArguments) -> History:
    """Train until `epochs` epochs are done, counted from the beginning of the run.

    Args:
        trainer: The Trainer; one that was resumed continues in the middle of an epoch.
        data: Training data: arrays by input name, and "labels", whose first axis counts examples;
            a data set with columns (Hugging Face's); or batches, from an iterable such as PyTorch's
            DataLoader, from a generator, or from a function that makes one for an epoch's number.
            A batch is a mapping, or a tuple in the order of the model's inputs and the labels.
        {options}

    Raises:
        DataError: The data does not fit the model. For whole arrays this is found before the first
            step.
        UsageError: The run to resume had other data or another batch size, or the data can be read
            only once and is needed more often.
        CheckFailed: A loss or gradient is not finite.
    """
    return train(trainer, options)


def train(trainer: Learner, options: FitArguments) -> History:
    """As `fit`, which has the arguments one by one."""
    epochs, steps_per_epoch = options.epochs, options.steps_per_epoch
    source = sources.source(
        trainer,
        options.data,
        options.batch_size,
        shuffle=options.shuffle,
        again=epochs > 1 and not steps_per_epoch,
        split=True,
    )
    held_out = None
    if options.validation is not None:
        held_out = sources.source(trainer, options.validation, options.batch_size, shuffle=False)
    per_epoch = min((n for n in (source.steps, steps_per_epoch) if n), default=None)
    run = Fit(
        trainer, _history(trainer, source), epochs, per_epoch and per_epoch * epochs, metrics=[]
    )
    if held_out is not None:
        run.metrics = [
            "validation_loss",
            *(m.name for m in begin(options.metrics, trainer.spec("evaluate"))),
        ]
    elif options.evaluate_every or options.metrics:
        raise UsageError("evaluate_every and metrics need data to evaluate: give validation")
    with contextlib.ExitStack() as stack:
        if options.folder and is_first(trainer):
            stack.enter_context(checkpoint.locked(options.folder))
        called = _bar() if options.callbacks is None else options.callbacks
        for callback in called:
            if not isinstance(callback, Callback):
                raise UsageError(f"{callback!r:.80} is no callback: give objects of `callbacks`")
        callbacks = [c for c in called if not c.shows or is_first(trainer)]
        for callback in callbacks:
            callback.on_start(run)
            stack.callback(callback.on_end, run)
        loop = _Loop(run, source, held_out, callbacks, options)
        while len(run.history.epochs) < epochs and not loop.stopped():
            loop.epoch()
        run.finished = True
    return run.history


def _bar() -> list[Callback]:
    """What shows the run of a caller who names no callbacks."""
    if not sys.stderr.isatty():
        return []
    from rich.console import Console

    return [Progress(Console(stderr=True))]


def is_first(trainer: Learner) -> bool:
    """Whether this process is the only one of the run, or the one that writes for all ranks."""
    return trainer.world is None or trainer.world.rank == 0


def _history(trainer: Learner, source: sources.Source) -> History:
    """The History of a new run, or of the one that was resumed, if that had the same data."""
    history = History(source.examples, source.batch_size)
    if "fit" not in trainer.extra:
        return history
    stored = histories.read(trainer.extra["fit"])
    if (stored.examples, stored.batch_size) != (source.examples, source.batch_size):
        raise UsageError(
            f"the run to resume has {stored.examples} examples in batches of {stored.batch_size}, "
            f"not {source.examples} in batches of {source.batch_size}: give it the same data and "
            "batch size, or begin another run in another folder"
        )
    return stored


class _Loop:
    """The epochs of a run: steps that are started, read, evaluated and kept."""

    def __init__(
        self,
        run: Fit,
        source: sources.Source,
        validation: sources.Source | None,
        callbacks: Sequence[Callback],
        options: FitOptions,
    ) -> None:
        self.run, self.trainer, self.history = run, run.trainer, run.history
        self.source, self.validation = source, validation
        self.callbacks, self.options = callbacks, options
        self.started: deque[Run] = deque()
        self.clock = time.perf_counter()

    def tell(self, event: str) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self.run)

    def epoch(self) -> None:
        """The rest of the epoch that is not over."""
        history, options = self.history, self.options
        first = histories.steps_done(history)
        for feeds in self.batches(first):
            self.started.append(self.trainer.start(feeds))
            # on a GPU the loss before this one is read while this step runs
            self.read(min(self.trainer.in_flight, 1))
            step = len(history.losses) + len(self.started)
            if options.evaluate_every and step % options.evaluate_every == 0:
                self.read()
                self.evaluate(len(history.epochs) + 1.0)
                self.tell("on_evaluation")
            if options.folder and options.every and step % options.every == 0:
                self.read()
                self.keep()
            if self.stopped():
                break
        self.read()
        if self.stopped():
            self.keep()
            return
        record = self.mean(first)
        evaluated = bool(history.metrics) and history.metrics[-1]["step"] == record["step"]
        if self.validation is not None:
            if not evaluated:
                self.evaluate(record["epoch"])
            record = {**history.metrics[-1], **record}
        history.epochs.append(record)
        if self.validation is not None and not evaluated:
            self.tell("on_evaluation")
        self.tell("on_epoch")
        self.keep()

    def stopped(self) -> bool:
        """Whether the run ends here, on whichever rank a callback wants it."""
        world = self.trainer.world
        if world is not None and world.any(bool(self.run.stopped)):
            self.run.stop("another rank ended the run")
        return bool(self.run.stopped)

    def batches(self, first: int) -> Iterator[dict[str, Array]]:
        """The batches of this epoch that are not done, of which `first` came before it."""
        done = len(self.history.losses)
        start, number = done - first, len(self.history.epochs)
        stop = self.options.steps_per_epoch
        if stop is not None:
            stop = max(stop - start, 0)
        return islice(self.source.batches(number, start, done), stop)

    def read(self, under_way: int = 0) -> None:
        """Wait for the steps that were started, but for `under_way`, and note what they gave."""
        history = self.history
        while len(self.started) > under_way:
            step = self.started.popleft()
            history.losses.append(self.trainer.finish(step))
            now = time.perf_counter()
            history.lr.append(step.lr)
            history.gradient_norms.append(step.norm)
            history.examples_per_second.append(step.rows / max(now - self.clock, 1e-9))
            self.clock = now
            self.tell("on_step")

    def mean(self, first: int) -> dict[str, float]:
        losses = self.history.losses[first:]
        number = len(self.history.epochs) + 1.0
        if not losses:
            raise DataError(
                f"the data gave no batch in epoch {number:.0f}: a generator can be read only "
                "once; give a function that makes it, or fewer epochs"
            )
        done = float(len(self.history.losses))
        return {"epoch": number, "step": done, "loss": float(np.mean(losses))}

    def evaluate(self, epoch: float) -> None:
        metrics, ema = self.options.metrics, self.options.ema
        results = evaluate(self.trainer, required(self.validation), 0, metrics, ema=ema)
        if self.trainer.world is not None:  # who decides by them decides as rank 0 does
            results = json.loads(self.trainer.world.broadcast(json.dumps(results).encode()))
        step = float(len(self.history.losses))
        self.history.metrics.append({"step": step, "epoch": epoch, **results})
        self.clock = time.perf_counter()

    def keep(self) -> None:
        if self.options.folder:
            self.trainer.checkpoint(self.options.folder, fit=asdict(self.history))


def evaluate(
    trainer: Learner,
    data: sources.Data,
    batch_size: int = 32,
    metrics: Selection = None,
    *,
    ema: bool = False,
) -> dict[str, float]:
    """Evaluate a whole data set in inference mode.

    Args:
        trainer: The Trainer that evaluates the batches.
        data: The data, in the forms that `fit` takes.
        batch_size: Number of examples in a batch, of data that has no batches of its own.
        metrics: The metrics, as `fit` takes them.
        ema: Take the running averages of the weights.

    Returns:
        "validation_loss", the mean over examples, and each metric by its name.

    Raises:
        DataError: The data does not fit the model, or holds no batch.
        UsageError: A metric does not fit the model.
    """
    started = begin(metrics, trainer.spec("evaluate"))
    total = rows = 0.0
    source = sources.source(trainer, data, batch_size, shuffle=False, again=False)
    for feeds in source.batches(0, 0, 0):
        batch = trainer.evaluate(feeds, ema=ema)
        size = len(next(iter(feeds.values())))
        total, rows = total + batch.loss * size, rows + size
        for metric in started:
            metric.update(batch, feeds)
    if not rows:
        raise DataError("the data to evaluate gave no batch")
    return {"validation_loss": total / rows, **{m.name: float(m.result()) for m in started}}


def start_or_resume(trainer: Learner, folder: str | os.PathLike[str], *, resume: bool) -> None:
    """Restore the run in `folder`, if there is one.

    Raises UsageError where there is one and `resume` is False, and the errors of `Trainer.restore`.
    """
    if not checkpoint.exists(folder):
        return
    if not resume:
        raise UsageError(
            f"{folder} holds the checkpoints of a run: continue it with --resume, or give another "
            "folder"
        )
    trainer.restore(folder)

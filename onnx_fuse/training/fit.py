"""Train over whole data sets: batches in order, evaluation, checkpoints, history, loss curve."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np

from onnx_fuse.errors import DataError, UsageError
from onnx_fuse.training import checkpoint, data
from onnx_fuse.training import history as histories
from onnx_fuse.training.history import History
from onnx_fuse.training.loss import Run
from onnx_fuse.training.trainer import Trainer

__all__ = ["History", "check", "curve", "evaluate", "fit", "start_or_resume", "steps_per_epoch"]

Array = np.ndarray[Any, Any]
_CHUNK = 1 << 16  # labels checked at once, where the file is mapped


def fit(
    trainer: Trainer,
    arrays: Mapping[str, Array],
    *,
    epochs: int,
    batch_size: int,
    validation: Mapping[str, Array] | None = None,
    shuffle: bool = True,
    folder: str | os.PathLike[str] | None = None,
    every: int | None = None,
    watch: Callable[[History], None] = lambda history: None,
) -> History:
    """Train until `epochs` epochs are done, counted from the beginning of the run.

    Args:
        trainer: The Trainer; one that was resumed continues in the middle of an epoch.
        arrays: Training data by input name, and "labels"; the first axis counts examples.
        epochs: Number of passes over the data.
        batch_size: Number of examples in a batch.
        validation: Data to evaluate after each epoch, in the form of `arrays`.
        shuffle: Draw a new order for each epoch, from the trainer's seed and the epoch's number.
        folder: Folder that gets a checkpoint after each epoch.
        every: Number of steps after which `folder` gets a checkpoint, too.
        watch: Called with the history after each step and each epoch.

    Raises:
        DataError: The data does not fit the model; this is found before the first step.
        UsageError: The run to resume had other data or another batch size.
        CheckFailed: A loss or gradient is not finite.
    """
    examples = check(trainer, arrays, batch_size)
    if validation is not None:
        check(trainer, validation, batch_size)
    steps = steps_per_epoch(trainer, examples, batch_size)
    history = History(examples, batch_size)
    if "fit" in trainer.extra:
        history = histories.read(trainer.extra["fit"])
        if (history.examples, history.batch_size) != (examples, batch_size):
            raise UsageError(
                f"the run to resume has {history.examples} examples in batches of "
                f"{history.batch_size}, not {examples} in batches of {batch_size}"
            )
    started: deque[Run] = deque()
    clock = time.perf_counter()
    hold = checkpoint.locked(folder) if folder else contextlib.nullcontext()

    def note(under_way: int = 0) -> None:
        nonlocal clock
        while len(started) > under_way:
            run = started.popleft()
            history.losses.append(trainer.finish(run))
            now = time.perf_counter()
            history.lr.append(run.lr)
            history.gradient_norms.append(run.norm)
            history.examples_per_second.append(run.rows / max(now - clock, 1e-9))
            clock = now
            watch(history)

    with hold:
        while (epoch := len(history.epochs)) < epochs:
            first = histories.steps_done(history)
            indices = data.order(examples, trainer.seed, epoch, shuffle=shuffle)
            start = len(history.losses) - first
            for feeds in data.batches(arrays, indices[: steps * batch_size], batch_size, start):
                started.append(trainer.start(feeds))
                # on a GPU the loss before this one is read while this step runs
                note(min(trainer.in_flight, 1))
                if folder and every and (len(history.losses) + len(started)) % every == 0:
                    note()
                    trainer.checkpoint(folder, fit=asdict(history))
            note()
            done = float(len(history.losses))
            mean = float(np.mean(history.losses[first:]))
            record = {"epoch": epoch + 1.0, "step": done, "loss": mean}
            if validation is not None:
                found = evaluate(trainer, validation, batch_size)
                record |= found
                history.metrics.append({"step": done, "epoch": epoch + 1.0, **found})
            history.epochs.append(record)
            watch(history)
            if folder:
                trainer.checkpoint(folder, fit=asdict(history))
    return history


def start_or_resume(trainer: Trainer, folder: str | os.PathLike[str], *, resume: bool) -> None:
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


def check(trainer: Trainer, arrays: Mapping[str, Array], batch_size: int) -> int:
    """Check all arrays and labels against the model, and return the number of examples.

    Raises DataError for data that does not fit, and UsageError where `batch_size` is not the size
    that the model fixes.
    """
    spec = trainer.spec()
    examples = data.count(arrays, spec.feeds)
    fixed = _fixed_batch(trainer)
    if fixed is not None and fixed != batch_size:
        raise UsageError(
            f"the model's batch is fixed at {fixed}: give --batch-size {fixed}, or --free-batch"
        )
    if fixed is not None and examples < fixed:
        raise DataError(
            f"the data has {examples} examples, which do not fill one batch: the model fixes it at "
            f"{fixed}"
        )
    if spec.classes:
        labels = arrays[spec.labels]
        for i in range(0, len(labels), _CHUNK):
            trainer.check_labels(labels[i : i + _CHUNK], i)
    return examples


def _fixed_batch(trainer: Trainer) -> int | None:
    first = [v.shape[0] for v in trainer.spec().feeds if v.shape is not None and len(v.shape)]
    return next((d for d in first if isinstance(d, int)), None)


def steps_per_epoch(trainer: Trainer, examples: int, batch_size: int) -> int:
    """The number of steps in which batches of `batch_size` go over all `examples`.

    A smaller last batch counts, unless the model fixes the size of the batch.
    """
    whole = _fixed_batch(trainer) is not None
    return examples // batch_size if whole else math.ceil(examples / batch_size)


def evaluate(trainer: Trainer, arrays: Mapping[str, Array], batch_size: int) -> dict[str, float]:
    """Evaluate the data set `arrays` in inference mode, in batches of `batch_size`.

    The result has "validation_loss", the mean over examples, and where labels are classes
    "accuracy", the share of labels that are predicted (0 to 1). Raises DataError.
    """
    examples = data.count(arrays, trainer.spec("evaluate").feeds)
    rows = steps_per_epoch(trainer, examples, batch_size) * batch_size
    total = counted = hits = seen = 0.0
    for feeds in data.batches(arrays, np.arange(min(rows, examples)), batch_size):
        found = trainer.evaluate(feeds)
        size = len(next(iter(feeds.values())))
        total, seen = total + found.loss * size, seen + size
        counted, hits = counted + found.counted, hits + found.hits
    return {"validation_loss": total / seen} | ({"accuracy": hits / counted} if counted else {})


# ---- the loss curve ----------------------------------------------------------------------------

_WIDTH, _HEIGHT, _MARGIN, _POINTS = 860, 420, 56, 600


def curve(history: History, title: str) -> str:
    """The loss curve of a run as one HTML page that loads nothing.

    It shows the loss by step and the validation loss by epoch of `history`, below `title`.
    """
    losses = np.asarray(history.losses)
    steps = -(-len(losses) // max(len(history.epochs), 1))
    lines = [("loss", "#8ab4f8", _thinned(losses))]
    if len(losses) > 20:
        lines.append(("smoothed", "#1a56c4", _thinned(_smooth(losses))))
    validation = [
        (e["epoch"] * steps, e["validation_loss"]) for e in history.epochs if "validation_loss" in e
    ]
    if validation:
        lines.append(("validation", "#c4451a", validation))
    points = [p for _, _, line in lines for p in line]
    right = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    high = high if high > low else low + 1

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - 1) / max(right - 1, 1)
        return (
            _MARGIN + across * (_WIDTH - 2 * _MARGIN),
            _HEIGHT - _MARGIN - (y - low) / (high - low) * (_HEIGHT - 2 * _MARGIN),
        )

    parts = []
    for i in range(5):
        x, y = 1 + (right - 1) * i / 4, low + (high - low) * i / 4
        (px, _), (_, py) = place(x, low), place(1, y)
        parts += [
            f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{py:.1f}" y2="{py:.1f}"/>',
            f'<text x="{_MARGIN - 8}" y="{py + 4:.1f}" text-anchor="end">{y:.4g}</text>',
            f'<text x="{px:.1f}" y="{_HEIGHT - _MARGIN + 20}" text-anchor="middle">{x:.0f}</text>',
        ]
    for i, (name, colour, line) in enumerate(lines):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        parts += [
            f'<polyline points="{path}" stroke="{colour}"/>',
            f'<text x="{_WIDTH - _MARGIN}" y="{_MARGIN + 18 * i}" text-anchor="end" '
            f'style="fill:{colour}">{name}</text>',
        ]
    return _PAGE.format(title=escape(title), width=_WIDTH, height=_HEIGHT, body="\n".join(parts))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 14px system-ui, sans-serif; margin: 2em; background: #fff; color: #222 }}
svg text {{ font-size: 12px; fill: #555 }}
svg line {{ stroke: #ddd }}
svg polyline {{ fill: none; stroke-width: 1.5 }}
</style></head><body><h1>{title}</h1>
<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="loss by step">
{body}
</svg></body></html>
"""


def _thinned(values: Array) -> list[tuple[float, float]]:
    """(step, value) points, the means of equal stretches where there are more than _POINTS."""
    parts = np.array_split(np.arange(len(values)), min(len(values), _POINTS))
    return [(float(p.mean()) + 1, float(values[p].mean())) for p in parts]


def _smooth(values: Array) -> Array:
    """A running mean of the last 5 % of the steps."""
    width = max(len(values) // 20, 2)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - width, 0)
    means: Array = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def __dir__() -> list[str]:
    return sorted(__all__)

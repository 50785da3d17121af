"""The options of a run over a data set, each declared once as in `training.options`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import os

    from onnx_fuse.training.callbacks import Callback
    from onnx_fuse.training.metrics import Selection
    from onnx_fuse.training.sources import Data


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """How a Trainer goes over a data set."""

    TEXTS: ClassVar = """
        epochs (--epochs, 1 or more): Train for this many epochs.
        batch_size (--batch-size, 1 or more): Use this many examples in a step. | Data with batches
            has its own.
        validation: Data to evaluate after each epoch, in any of the same forms.
        evaluate_every (--evaluate-every, 1 or more): Evaluate after this many steps, too.
        metrics (--metric NAME): Report this metric of the validation: accuracy, top5 (or another
            number), perplexity or f1. The default is accuracy for class labels. | Several are a
            list, also of objects of `training.metrics`, or of functions of the outputs and the
            batch.
        callbacks: Objects of `training.callbacks`, which are called in this order. The default
            shows a bar where standard error is a terminal.
        steps_per_epoch: Number of batches that make an epoch, of data without an end.
        shuffle: Draw a new order for each epoch, from the trainer's seed and the epoch's number.
        folder (--checkpoint DIR): Save the run in this folder after each epoch. | And when a
            callback ends the run.
        every (--checkpoint-every, 1 or more): Save it after this many steps, too.
        ema: Evaluate the running averages of the weights, which the trainer keeps.
        """
    epochs: int = 1
    batch_size: int = 32
    validation: Data | None = None
    evaluate_every: int | None = None
    metrics: Selection = None
    callbacks: Sequence[Callback] | None = None
    steps_per_epoch: int | None = None
    shuffle: bool = True
    folder: str | os.PathLike[str] | None = None
    every: int | None = None
    ema: bool = False

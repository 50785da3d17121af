"""The course of a training run, as numbers that reports draw and checkpoints keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from onnx_fuse.errors import DataError
from onnx_fuse.textwrap import html_table

__all__ = ["History", "read"]
__dir__ = __all__.copy


@dataclass(repr=False)
class History:
    """The course of a training run, which a resumed run continues."""

    examples: int
    """The number of examples in the training data, or 0 where it is not known."""
    batch_size: int
    """The number of examples in a batch, or 0 where the data comes in batches of its own."""
    losses: list[float] = field(default_factory=list)
    """The loss of each step, in order."""
    epochs: list[dict[str, float]] = field(default_factory=list)
    """Each epoch's number "epoch" (from 1), its last step "step", the mean "loss" of its steps, and
    what the evaluation at its end gave, such as "validation_loss" and "accuracy"."""
    lr: list[float] = field(default_factory=list)
    """The learning rate of each step."""
    gradient_norms: list[float | None] = field(default_factory=list)
    """The norm of all gradients together at each step, before clipping. It is None for steps that
    make no update, and for all steps where the Trainer has no `clip_norm`."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """What each evaluation gave, within epochs too: "step", "epoch", "validation_loss" and the
    metrics by name."""
    examples_per_second: list[float] = field(default_factory=list, compare=False)
    """The speed at each step, over the time since the step before it."""

    def __repr__(self) -> str:
        last = self.metrics[-1] if self.metrics else {}
        ends = {"last loss": self.losses[-1]} if self.losses else {}
        ends |= {name: value for name, value in last.items() if name not in ("step", "epoch")}
        shown = "".join(f", {name} {value:.4g}" for name, value in ends.items())
        return f"History({len(self.losses)} steps, {len(self.epochs)} epochs{shown})"

    def _repr_html_(self) -> str:
        """The epochs as a table, in a notebook."""
        names = list(dict.fromkeys(name for record in self.epochs for name in record))
        rows = [
            [f"{record[name]:.6g}" if name in record else "" for name in names]
            for record in self.epochs
        ]
        return html_table(repr(self), names, rows)


_DAMAGED = "the checkpoint is damaged: its history lacks"
_EPOCH = {"epoch", "step", "loss"}


def read(data: object) -> History:
    """The History whose fields a checkpoint holds in the mapping `data`.

    Raises DataError for anything else.
    """
    fields = {f.name: int if f.type == "int" else list for f in dataclasses.fields(History)}
    if not isinstance(data, dict) or {k: type(v) for k, v in data.items()} != fields:
        raise DataError(f"{_DAMAGED} one of {', '.join(fields)}")
    numbers = [*data["losses"], *data["lr"], *data["examples_per_second"]]
    numbers += [x for x in data["gradient_norms"] if x is not None]
    for record in (*data["epochs"], *data["metrics"]):
        if not isinstance(record, dict):
            raise DataError(f"{_DAMAGED} a record")
        numbers += record.values()
    if not all(set(record) >= _EPOCH for record in data["epochs"]):
        raise DataError(f"{_DAMAGED} the epoch, step or loss of a record")
    if any(type(x) is not float for x in numbers):
        raise DataError(f"{_DAMAGED} a number where one should be")
    history = History(**data)
    steps = len(history.losses)
    if any(len(values) != steps for values in (history.lr, history.gradient_norms)):
        raise DataError(f"{_DAMAGED} the rate or the norm of a step")
    if steps_done(history) > steps:
        raise DataError(f"{_DAMAGED} losses of its epochs")
    return history


def steps_done(history: History) -> int:
    """The number of steps in the epochs that are over."""
    last: Mapping[str, float] = history.epochs[-1] if history.epochs else {"step": 0.0}
    return int(last["step"])

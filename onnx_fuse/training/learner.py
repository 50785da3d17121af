"""What `fit`, its data and its callbacks need of the Trainer that they are given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from onnx_fuse.arrays import Array
from onnx_fuse.distributed.world import World
from onnx_fuse.training.loss import Run
from onnx_fuse.training.metrics import Evaluation
from onnx_fuse.training.spec import Spec
from onnx_fuse.training.step import Mode

__all__ = ["Learner"]
__dir__ = __all__.copy


class Learner(Protocol):
    """The part of `Trainer` that a run over a data set uses; `Trainer` describes each method."""

    world: World | None
    """The ranks that train together, or None for a single process."""
    seed: int
    """The seed of the order of data."""
    extra: dict[str, Any]
    """The JSON values that the last checkpoint keeps besides the states."""
    lr: float
    """The learning rate of the next update, which may be set."""

    @property
    def updates(self) -> int:
        """The number of updates so far."""

    @property
    def in_flight(self) -> int:
        """The number of steps that may be under way when the next one is asked for."""

    def spec(self, mode: Mode = "update") -> Spec:
        """The inputs, outputs and states of the graph of a mode."""

    def start(self, feeds: Mapping[str, Any]) -> Run:
        """Begin a step, whose loss `finish` gives."""

    def finish(self, run: Run) -> float:
        """Wait for the step `run` that `start` began, and return its loss. Raises CheckFailed."""

    def evaluate(self, feeds: Mapping[str, Any], *, ema: bool = False) -> Evaluation:
        """Compute loss and outputs of a batch in inference mode; with `ema`, by the averages."""

    def state(self) -> dict[str, Array]:
        """Copies of all tensors that outlive a step, by name."""

    def set_weights(self, states: Mapping[str, Array]) -> None:
        """Replace the weights and running statistics by those in `states`."""

    def weights(self, *, ema: bool = False) -> dict[str, Array]:
        """The trained weights and running statistics by name; with `ema`, the averages."""

    def save(self, path: str | os.PathLike[str], *, ema: bool = False) -> None:
        """Write the model with the trained weights, or, with `ema`, with their averages."""

    def checkpoint(self, folder: str | os.PathLike[str], **extra: object) -> Path:
        """Write a folder from which a run continues, with the values of `extra`; its path."""

    def restore(self, folder: str | os.PathLike[str]) -> None:
        """Continue from the newest whole checkpoint in `folder`."""

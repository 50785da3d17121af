"""What the inputs, outputs and states of a training graph mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir

from onnx_fuse.program.packing import Packing
from onnx_fuse.training.losses import Target
from onnx_fuse.training.ranks import Measure
from onnx_fuse.training.state import State


@dataclass(frozen=True)
class Spec:
    """The meaning of a training graph's inputs and outputs; "" names one that it does not have."""

    feeds: tuple[ir.Value, ...]
    """The inputs that a caller feeds: the model's own, and the labels."""
    targets: tuple[Target, ...]
    """What the losses compare; none where the model computes its loss itself."""
    loss: str
    """The output of the loss, a scalar."""
    norm: str
    """The output of the norm of all gradients before clipping, a scalar."""
    lr: str
    """The input of the learning rate, a float32 scalar."""
    step: str
    """The input of the update's number, an int64 scalar that is 1 at the first update."""
    rng: str
    """The input of an int64 scalar that differs from step to step, for Dropout."""
    outputs: tuple[str, ...]
    """The model's own outputs."""
    states: tuple[State, ...]
    """The tensors that outlive a step."""
    counts: str = ""
    """The input of what this rank's losses are means of, and of its rows: float64."""
    measures: tuple[Measure, ...] = ()
    """What the losses are means of: those of ranks, and of several adapters, are weighted by it."""
    untrained: Mapping[str, str] = field(default_factory=dict)
    """The weights that were to train and have no gradient, with the reason."""
    packing: Packing | None = None
    """What a step over tokens only is fed besides."""

    @cached_property
    def strict(self) -> bool:
        """Whether a gradient that is not finite is an error; a step with a scaled loss skips it."""
        return all(s.kind != "scaler" for s in self.states)

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        """The outputs that each step answers: the loss, and the norm where there is one."""
        return tuple(name for name in (self.loss, self.norm) if name)

    @cached_property
    def successors(self) -> dict[str, str]:
        """The state that each output replaces."""
        return {s.next: s.name for s in self.states if s.next}

    @property
    def guards(self) -> tuple[str, ...]:
        """The scalars of which one that is not finite keeps the states as they are."""
        return self.scalars if self.strict else (self.loss,)

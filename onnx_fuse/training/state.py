"""What a training keeps from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnx_fuse.arrays import Array


@dataclass(frozen=True)
class State:
    """A tensor that outlives a step."""

    name: str
    """The graph's input that reads it."""
    kind: str
    """"parameter", "statistic" (of BatchNormalization), "slot" (of the optimizer), "accumulator"
    (of gradients), "average" (of a parameter), "scaler" (float16's) or "history" (float8's)."""
    initial: Array
    """The value before the first step."""
    value: ir.Value
    """The graph's value, with dtype and shape, and the record of how a parameter is packed."""
    next: str = ""
    """The graph's output that replaces it after the step, or "" if the step leaves it alone."""
    average: str = ""
    """The state that is a parameter's running average, or ""."""
    whole: tuple[int, ...] | None = None
    """The shape of the whole of which this rank holds its part, flat; None for all of it."""

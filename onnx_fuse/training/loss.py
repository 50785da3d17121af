"""The loss of a step that may still be running, as a number that waits for it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import total_ordering
from typing import Any, SupportsFloat

import numpy as np

from onnx_fuse.arrays import Array
from onnx_fuse.training.spec import Spec


@dataclass
class Run:
    """A pending step; `index` counts all steps."""

    index: int
    mode: str
    spec: Spec
    feeds: dict[str, Array]
    lr: float
    rows: int
    result: Callable[[], dict[str, Array]]
    loss: float | None = None
    norm: float | None = None
    fault: str = ""


def _binary(work: Callable[[float, float], float]) -> Callable[[Loss, SupportsFloat], float]:
    return lambda loss, other: work(float(loss), float(other))


@total_ordering
class Loss:
    """The loss of a step that the GPU may still be running; using it as a number waits for it.

    That use raises CheckFailed where the step, or an earlier one whose loss was not read, had a
    loss or gradient that is not finite.
    """

    def __init__(self, run: Run, read: Callable[[Run], float]) -> None:
        self._run, self._read = run, read

    def __float__(self) -> float:
        return self._read(self._run)

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> Array:
        return np.array(float(self), dtype)

    def __eq__(self, other: object) -> bool:
        return float(self) == (float(other) if isinstance(other, Loss) else other)

    def __lt__(self, other: SupportsFloat) -> bool:
        return float(self) < float(other)

    def __hash__(self) -> int:
        return hash(float(self))

    __add__ = __radd__ = _binary(operator.add)
    __sub__ = _binary(operator.sub)
    __rsub__ = _binary(lambda loss, other: other - loss)
    __mul__ = __rmul__ = _binary(operator.mul)
    __truediv__ = _binary(operator.truediv)
    __rtruediv__ = _binary(lambda loss, other: other / loss)

    def __neg__(self) -> float:
        return -float(self)

    def __abs__(self) -> float:
        return abs(float(self))

    def __round__(self, digits: int | None = None) -> float:
        return round(float(self), digits)

    def __bool__(self) -> bool:
        return bool(float(self))

    def __format__(self, form: str) -> str:
        return format(float(self), form)

    def __repr__(self) -> str:
        return repr(float(self))

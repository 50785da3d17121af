"""Seeds: the numbers that parameters begin with and the masks of dropout."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from onnx_fuse.nn.dispatch import MODE
from onnx_fuse.nn.tensor import Tensor

__all__ = ["generator", "manual_seed", "rand", "randint", "randn"]
__dir__ = __all__.copy


class _Source(threading.local):
    """A thread's generator, and the number of masks it has drawn since the seed."""

    def __init__(self) -> None:
        self.seed(0)

    def seed(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.first, self.drawn = seed << 32, 0

    def next(self) -> np.ndarray[Any, Any]:
        """A number that no mask of this seed has had."""
        self.drawn += 1
        return np.array((self.first + self.drawn) & ((1 << 63) - 1), np.int64)


_SOURCE = _Source()


def manual_seed(seed: int) -> None:
    """Make what is drawn in this thread from now on a function of `seed`."""
    _SOURCE.seed(seed)


def generator() -> np.random.Generator:
    """The NumPy generator that parameters of this thread are drawn from."""
    return _SOURCE.generator


def draw() -> Tensor:
    """A new int64 scalar for each mask, in a captured function for each replay, too."""
    number = Tensor(_SOURCE.next())
    if MODE.recorder is not None:
        MODE.recorder.renewed(number, _SOURCE.next)
    return number


def randn(*shape: int, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """A float32 Tensor of this `shape` drawn from the standard normal distribution.

    `device` and `requires_grad` are those of `Tensor`.
    """
    numbers = np.asarray(_SOURCE.generator.standard_normal(shape, np.float32))
    return Tensor(numbers, device=device, requires_grad=requires_grad)


def rand(*shape: int, device: str | None = None, requires_grad: bool = False) -> Tensor:
    """A float32 Tensor of this `shape` drawn evenly from 0 to 1.

    `device` and `requires_grad` are those of `Tensor`.
    """
    numbers = np.asarray(_SOURCE.generator.random(shape, np.float32))
    return Tensor(numbers, device=device, requires_grad=requires_grad)


def randint(low: int, high: int, shape: tuple[int, ...], device: str | None = None) -> Tensor:
    """An int64 Tensor of this `shape` on `device`, drawn evenly from `low` to `high` - 1."""
    return Tensor(np.asarray(_SOURCE.generator.integers(low, high, shape)), device=device)

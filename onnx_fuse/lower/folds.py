"""A norm's scale and bias in the weights behind it, by parts that a core's cache holds."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np


def cores() -> ThreadPoolExecutor:
    """Threads for NumPy's work, which it does without Python's lock."""
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1))


class Folding:
    """wq, cs and cv of `Context.folded`, made by threads: they are whole once `fits` is known."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        gamma: np.ndarray,
        beta: np.ndarray | None,
        w: np.ndarray,
        c: np.ndarray,
        trans: bool,
    ) -> None:
        k, n = w.shape
        wq = np.empty((n, k) if trans else (k, n), w.dtype)
        self.arrays = {"wq": wq, "cs": np.empty(n, np.float32), "cv": np.empty(n, np.float32)}
        self._c, step = c, max(64 if trans else 1, (1 << 19) // n)
        infinity = np.array(np.inf, w.dtype).view(np.uint16)

        def part(first: int) -> tuple[bool, np.ndarray | float, np.ndarray | float]:
            rows = slice(first, first + step)
            wide = w[rows].astype(np.float32)
            shift = beta[rows].astype(np.float64) @ wide if beta is not None else 0.0
            with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused
                wide *= gamma[rows].astype(np.float32)[:, None]
                (wq.T if trans else wq)[rows] = scaled = wide.astype(w.dtype)
                sums = 0.0 if beta is None else scaled.astype(np.float32).sum(0, dtype=np.float64)
            return bool((scaled.view(np.uint16) & 0x7FFF).max() < infinity), sums, shift

        self._parts = [threads.submit(part, first) for first in range(0, k, step)]

    @cached_property
    def fits(self) -> bool:
        """Whether all numbers of wq are finite."""
        cs, cv = np.zeros(len(self._c)), self._c.astype(np.float64)
        for made in self._parts:  # in order: equal bits
            finite, sums, shift = made.result()
            if not finite:
                return False
            cs, cv = cs + sums, cv + shift
        self.arrays["cs"][:], self.arrays["cv"][:] = cs, cv
        return True


class Folds:
    """What threads fold while a graph is lowered; `kept` has what was folded before, by name: what
    w was, and the arrays, or none where a number of wq is not finite.
    """

    def __init__(self, kept: dict[str, tuple[Any, dict[str, np.ndarray]]]) -> None:
        self._kept, self._threads = kept, cores()
        self._begun: dict[str, tuple[Any, Folding]] = {}

    def of(self, name: str, w: object, *given: Any) -> dict[str, np.ndarray]:
        """The arrays of a name, which are filled later, or none; `given` is as for `Folding`."""
        if name in self._kept and self._kept[name][0] is w:  # a clone's may be another
            return self._kept[name][1]
        if name not in self._begun:
            self._begun[name] = w, Folding(self._threads, *given)
        return self._begun[name][1].arrays

    def is_made(self, array: np.ndarray) -> bool:
        """Wait for an array that may be one of them; whether its numbers are finite."""
        foldings = (folding for _, folding in self._begun.values())
        return all(f.fits for f in foldings if any(array is a for a in f.arrays.values()))

    def keep(self) -> bool:
        """Wait for all of them and keep them; whether all numbers are finite."""
        with self._threads:
            for name, (w, folding) in self._begun.items():
                self._kept[name] = w, folding.arrays if folding.fits else {}
        return all(folding.fits for _, folding in self._begun.values())

"""A norm's scale and bias in the weights behind it, by parts that a core's cache holds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from onnx_fuse.program.call import ColumnOrder

PART = 1 << 19
"""Elements of a matrix that a core's cache holds in float32."""


def cores() -> ThreadPoolExecutor:
    """Threads for NumPy's work, which it does without Python's lock."""
    return ThreadPoolExecutor(min(16, os.cpu_count() or 1))


def in_order(order: ColumnOrder, w: np.ndarray) -> np.ndarray:
    """A matrix or a row with its columns in another order, by threads."""
    rows, ordered = w.reshape(-1, w.shape[-1]), np.empty(w.shape, w.dtype)
    to, step = ordered.reshape(rows.shape), max(1, PART // w.shape[-1])

    def part(first: int) -> None:
        to[first : first + step] = order.of(rows[first : first + step])

    with cores() as threads:
        list(threads.map(part, range(0, len(rows), step)))
    return ordered


def least_infinite(dtype: np.dtype[Any]) -> float:
    """The least number that is infinite in float16 or bfloat16."""
    infinity = int(np.array(np.inf, dtype).view(np.uint16))
    before, last = np.arange(infinity - 2, infinity, dtype=np.uint16).view(dtype).astype(float)
    return float(last + (last - before) / 2)


class RowsOfSeveral:
    """The rows of matrices beside each other, which are put together when they are read."""

    def __init__(self, matrices: Sequence[np.ndarray]) -> None:
        self._matrices, self.dtype = matrices, matrices[0].dtype
        self.shape = len(matrices[0]), sum(matrix.shape[1] for matrix in matrices)

    def __getitem__(self, rows: slice) -> np.ndarray:
        return np.concatenate([matrix[rows] for matrix in self._matrices], 1)


Rows: TypeAlias = np.ndarray | RowsOfSeveral


class Folding:
    """wq, cs and cv of `Context.folded`, made by threads: they are whole once `fits` is known."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        gamma: np.ndarray,
        beta: np.ndarray | None,
        w: Rows,
        c: np.ndarray,
        trans: bool,
        order: ColumnOrder | None,
    ) -> None:
        """`c` is in the order already."""
        k, n = w.shape
        wq = np.empty((n, k) if trans else (k, n), w.dtype)
        self.arrays = {"wq": wq, "cs": np.empty(n, np.float32), "cv": np.empty(n, np.float32)}
        self._c, step = c, max(64 if trans else 1, PART // n)
        limit = least_infinite(w.dtype)

        def part(first: int) -> tuple[bool, np.ndarray | float, np.ndarray | float]:
            # each step of NumPy's waits for Python's lock: they are few
            rows = slice(first, first + step)
            wide = (w[rows] if order is None else order.of(w[rows])).astype(np.float32, order="C")
            scaled, sums = (wq.T if trans else wq)[rows], 0.0
            shift = 0.0 if beta is None else beta[rows].astype(np.float64) @ wide
            with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused
                wide *= gamma[rows].astype(np.float32)[:, None]
                scaled[...] = wide
                if beta is not None:
                    sums = scaled.astype(np.float32, order="C").sum(0, dtype=np.float64)
            return bool(wide.max() < limit and wide.min() > -limit), sums, shift

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

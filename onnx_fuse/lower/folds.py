"""A norm's scale and bias in the weights behind it, by parts that a core's cache holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def in_threads(work: Callable[[int], T], first: Iterable[int]) -> Iterator[T]:
    """The results of `work` for each number, in order."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        yield from threads.map(work, first)


def fold_weights(
    gamma: np.ndarray, beta: np.ndarray | None, w: np.ndarray, c: np.ndarray, trans: bool
) -> dict[str, np.ndarray] | None:
    """wq, cs and cv of `Context.folded`; None where a number of wq overflows."""
    k, n = w.shape
    wq = np.empty((n, k) if trans else (k, n), w.dtype)
    step = max(64 if trans else 1, (1 << 19) // n)

    def part(first: int) -> tuple[bool, np.ndarray, np.ndarray | float]:
        rows = slice(first, first + step)
        wide = w[rows].astype(np.float32)
        with np.errstate(over="ignore"):
            scaled = (gamma[rows].astype(np.float32)[:, None] * wide).astype(w.dtype)
        (wq.T if trans else wq)[rows] = scaled
        rounded = scaled.astype(np.float32)
        shift = beta[rows].astype(np.float64) @ wide if beta is not None else 0.0
        return bool(np.isfinite(rounded).all()), rounded.sum(0, dtype=np.float64), shift

    cs, cv = np.zeros(n), c.astype(np.float64)
    for finite, sums, shift in in_threads(part, range(0, k, step)):  # in order: equal bits
        if not finite:
            return None
        cs, cv = cs + sums, cv + shift
    return {"wq": wq, "cs": cs.astype(np.float32), "cv": cv.astype(np.float32)}

"""Whether a low-rank product is cheaper beside a product or within its weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from onnx_fuse.kernels.costs import Passes, total
from onnx_fuse.program.problem import ITEMSIZE, AnyProblem, GemmProblem, Hardware, Value

ROWS = 4096
"""The rows of a product whose batch or lengths are open: a step of a few thousand tokens."""


@dataclass(frozen=True)
class LowRank:
    """The sizes of x·(W + A·B) with x [rows, k], W [k, n], A [k, rank] and B [rank, n]."""

    k: int
    n: int
    rank: int
    rows: tuple[int | None, ...]
    """Of each product that reads W; None where they are not known yet."""
    normed: bool = False
    """x is what a norm gives, which in 16 bits is a part of its product."""


@dataclass(frozen=True)
class Costs:
    """What the low-rank products of a training step cost; an open number of rows counts as ROWS."""

    dtype: str
    """The type of a step's products; weights and their gradients are float32."""
    math: str
    """Which products of float32 it may use."""
    hw: Hardware

    def merging_pays(self, products: Iterable[LowRank]) -> bool:
        """Whether a step takes less time with W + A·B than with (x·A)·B beside x·W.

        What both ways have in common is left out.
        """
        beside = within = 0.0
        for each in products:
            within += total(self._merged_weight(each.k, each.n, each.rank), self.hw)
            for rows in each.rows:
                sizes = (rows, each.k, each.n, each.rank)
                apart = self._seconds(_beside, *sizes)
                behind = self._seconds(_beside_a_norm, *sizes) if each.normed else inf
                beside += behind if self.dtype != "float32" and behind < inf else apart
                within += min(self._seconds(way, *sizes) for way in (_by_rows, _by_weight))
        return within < beside

    def rows_pay(self, rows: int | None, k: int, n: int, rank: int) -> bool:
        """Whether the gradients of A and B cost less from x and dy than from dW."""
        sizes = (rows, k, n, rank)
        return self._seconds(_by_rows, *sizes) < self._seconds(_by_weight, *sizes)

    def _merged_weight(self, k: int, n: int, rank: int) -> Iterator[AnyProblem]:
        """A·B, and a pass over W, the sum and what is left of A·B, which all weights share."""
        sizes: dict[str, Value] = {"m": k, "n": n, "k": rank, "dtype": self.dtype}
        if self.dtype == "float32":
            yield GemmProblem.of("Gemm", beta=1.0, math=self.math, **sizes)
        else:
            yield GemmProblem.of("Gemm", **sizes)
            yield Passes(k * n * (ITEMSIZE["float32"] + 2 * ITEMSIZE[self.dtype]), launches=0)

    def _seconds(self, way: Way, rows: int | None, k: int, n: int, rank: int) -> float:
        return total(way(rows or ROWS, k, n, rank, self.dtype, self.math), self.hw)


Way: TypeAlias = Callable[[int, int, int, int, str, str], Iterator[AnyProblem]]
"""(rows, K, N, rank, dtype, math) -> problems."""


def _beside(m: int, k: int, n: int, rank: int, dtype: str, math: str) -> Iterator[AnyProblem]:
    """y + u·B and dx + t·Aᵀ, besides what the gradients by rows take."""
    how: dict[str, Value] = {"dtype": dtype, "math": math, "residual": True}
    yield GemmProblem.of("Gemm", m=m, n=n, k=rank, **how)
    yield GemmProblem.of("Gemm", m=m, n=k, k=rank, trans_b=True, **how)
    yield from _by_rows(m, k, n, rank, dtype, math)


def _beside_a_norm(
    m: int, k: int, n: int, rank: int, dtype: str, math: str
) -> Iterator[AnyProblem]:
    """The same where u and the gradients of x and A are products of their own behind the norm."""
    how: dict[str, Value] = {"dtype": dtype, "math": math}
    yield GemmProblem.of("LayerNormGemm", m=m, n=rank, k=k, bias=True, **how)
    yield GemmProblem.of("Gemm", m=m, n=n, k=rank, residual=True, **how)
    yield GemmProblem.of("Gemm", m=rank, n=n, k=m, trans_a=True, **how)
    yield GemmProblem.of("Gemm", m=m, n=rank, k=n, trans_b=True, **how)
    yield GemmProblem.of("LayerNormGemmGrad", m=m, n=rank, k=k, **how)


def _by_rows(m: int, k: int, n: int, rank: int, dtype: str, math: str) -> Iterator[AnyProblem]:
    """u = x·A and dB = uᵀ·dy; t = dy·Bᵀ and dA = xᵀ·t."""
    how: dict[str, Value] = {"dtype": dtype, "math": math}
    yield GemmProblem.of("Gemm", m=m, n=rank, k=k, **how)
    yield GemmProblem.of("Gemm", m=rank, n=n, k=m, trans_a=True, **how)
    yield GemmProblem.of("Gemm", m=m, n=rank, k=n, trans_b=True, **how)
    yield GemmProblem.of("Gemm", m=k, n=rank, k=m, trans_a=True, **how)


def _by_weight(m: int, k: int, n: int, rank: int, dtype: str, math: str) -> Iterator[AnyProblem]:
    """dW = xᵀ·dy; dA = dW·Bᵀ and dB = Aᵀ·dW."""
    how: dict[str, Value] = {"dtype": dtype, "math": math}
    yield GemmProblem.of("Gemm", m=k, n=n, k=m, trans_a=True, **how)
    yield GemmProblem.of("Gemm", m=k, n=rank, k=n, trans_b=True, **how)
    yield GemmProblem.of("Gemm", m=rank, n=n, k=k, trans_a=True, **how)

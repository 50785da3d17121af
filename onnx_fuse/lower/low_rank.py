"""Whether a low-rank product is cheaper beside a product or within its weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

from onnx_fuse.kernels import costs
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
class LoraCosts:
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
                apart = self._seconds(f"{_BESIDE}; {_BY_ROWS}", *sizes)
                behind = self._seconds(_BESIDE_A_NORM, *sizes) if each.normed else inf
                beside += behind if self.dtype != "float32" and behind < inf else apart
                within += min(self._seconds(way, *sizes) for way in (_BY_ROWS, _BY_WEIGHT))
        return within < beside

    def rows_pay(self, rows: int | None, k: int, n: int, rank: int) -> bool:
        """Whether the gradients of A and B cost less from x and dy than from dW."""
        sizes = (rows, k, n, rank)
        return self._seconds(_BY_ROWS, *sizes) < self._seconds(_BY_WEIGHT, *sizes)

    def _merged_weight(self, k: int, n: int, rank: int) -> Iterator[AnyProblem]:
        """A·B, and a pass over W, the sum and what is left of A·B, which all weights share."""
        sizes: dict[str, Value] = {"m": k, "n": n, "k": rank, "dtype": self.dtype}
        if self.dtype == "float32":
            yield GemmProblem.of("Gemm", beta=1.0, math=self.math, **sizes)
        else:
            yield GemmProblem.of("Gemm", **sizes)
            yield Passes(k * n * (ITEMSIZE["float32"] + 2 * ITEMSIZE[self.dtype]), launches=0)

    def _seconds(self, way: str, rows: int | None, k: int, n: int, rank: int) -> float:
        sizes = {"m": rows or ROWS, "k": k, "n": n, "r": rank}
        return total(costs.products(way, sizes, dtype=self.dtype, math=self.math), self.hw)


_BESIDE = "NN m n r residual; NT m k r residual"
"""y + u·B and dx + t·Aᵀ, besides what the gradients by rows take; r is the rank."""
_BY_ROWS = "NN m r k; TN r n m; NT m r n; TN k r m"
"""u = x·A and dB = uᵀ·dy; t = dy·Bᵀ and dA = xᵀ·t."""
_BY_WEIGHT = "TN k n m; NT k r n; TN r n k"
"""dW = xᵀ·dy; dA = dW·Bᵀ and dB = Aᵀ·dW."""
_BESIDE_A_NORM = (
    "LayerNormGemm m r k bias; NN m n r residual; TN r n m; NT m r n; LayerNormGemmGrad m r k"
)
"""All of that where u and the gradients of x and A are products of their own behind the norm."""

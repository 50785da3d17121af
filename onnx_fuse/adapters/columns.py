"""How the matrices of adapters stand in one input, and by which inputs a program reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from onnx_fuse.adapters.files import Adapter
from onnx_fuse.arrays import Array


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight that can have an adapter."""

    adapter: Adapter
    """How it is read, and the names that its own adapter would have."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class WeightColumns:
    """The columns of a weight's adapter: K from `begin` on are Aᵀ, and N behind them are B."""

    begin: int
    k: int
    n: int

    @property
    def parts(self) -> tuple[slice, slice]:
        """The columns of Aᵀ and those of B."""
        middle = self.begin + self.k
        return slice(self.begin, middle), slice(middle, middle + self.n)


@dataclass(frozen=True)
class AdapterColumns:
    """Where a matrix [rank, columns] has the adapters of weights."""

    places: Mapping[str, WeightColumns]
    dtype: np.dtype[Any]

    @staticmethod
    def of(weights: Iterable[AdaptedWeight], dtype: np.dtype[Any] | None) -> AdapterColumns:
        """That of these weights, in their type or `dtype`."""
        places, begin, kinds = {}, 0, set()
        for each in weights:
            k, n = each.shape[:: -1 if each.adapter.transposed else 1]
            places[each.adapter.weight] = WeightColumns(begin, k, n)
            begin += k + n
            kinds.add(each.dtype)
        return AdapterColumns(
            places, dtype or (kinds.pop() if len(kinds) == 1 else np.dtype(np.float32))
        )

    @cached_property
    def columns(self) -> int:
        """The number of columns."""
        return sum(place.k + place.n for place in self.places.values())

    def matrix(self, pairs: Mapping[str, tuple[Array, Array]]) -> Array:
        """The matrix with these Aᵀ [r, K] and B [r, N] by weight, of the highest r."""
        rank = max(len(a) for a, _ in pairs.values())
        matrix = np.zeros((rank, self.columns), self.dtype)
        for weight, pair in pairs.items():
            for part, columns in zip(pair, self.places[weight].parts, strict=True):
                matrix[: len(part), columns] = part
        return matrix


@dataclass(frozen=True)
class Ends:
    """The inputs that a graph has for its adapters."""

    matrices: str
    """Its name, [ranks, columns]."""
    mask: str
    """Its name, bool [batch, ranks]: which columns of x·A count for a sequence."""
    batch: str
    """The input whose first axis is the batch."""
    refusal: str
    """Why rows of a batch cannot have different adapters, "" where they can; then no mask is."""


def rows_for(ranks: int) -> int:
    """The matrices' rows for ranks: a power of two, at least the 16 that tensor cores take."""
    return max(16, 1 << (ranks - 1).bit_length())

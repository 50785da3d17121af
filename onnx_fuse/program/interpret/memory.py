"""The buffers of a program as bytes in the host's memory, and what a call sees of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

import numpy as np

from onnx_fuse.program.call import Program, Tensor, dense_strides, dtype_of
from onnx_fuse.program.expression import Row
from onnx_fuse.program.problem import ITEMSIZE

NARROW = tuple(name for name in ITEMSIZE if name.startswith(("int4", "uint4", "int2", "uint2")))
"""Integers of less than 8 bits, which NumPy does not compute with."""


def widened(array: np.ndarray, dtype: str) -> np.ndarray:
    """The elements in float64 or int64; booleans and uint64 as they are."""
    if "float" in dtype:
        return array.astype(np.float64)
    return array if dtype in ("bool", "uint64") else array.astype(np.int64)


class HostMemory:
    """Buffers of a program as bytes: those with an offset in one arena, all others apart.

    All begin as 0xA5, so that what is read before it is written shows.
    """

    def __init__(self, program: Program, offsets: Mapping[int, int]) -> None:
        ends = [offsets[b.id] + b.nbytes for b in program.buffers if b.id in offsets]
        self.arena = np.full(max(ends, default=0), 0xA5, np.uint8)
        self.parts: dict[int, np.ndarray] = {}
        for b in program.buffers:
            if b.id in offsets:
                at = offsets[b.id]
                self.parts[b.id] = self.arena[at : at + b.nbytes]
            else:
                self.parts[b.id] = np.full(b.nbytes, 0xA5, np.uint8)

    def view(self, t: Tensor) -> np.ndarray:
        """The elements of a tensor where they stand. Raises ValueError beyond its buffer."""
        dtype = dtype_of(t.dtype)
        reach = [(d - 1) * s for d, s in zip(t.shape, t.strides, strict=True)]
        first, last = (t.offset + sum(end(0, n) for n in reach) for end in (min, max))
        if t.size and (first < 0 or (last + 1) * dtype.itemsize > len(self.parts[t.buffer])):
            raise ValueError(f"{t} reaches beyond its {len(self.parts[t.buffer])} bytes")
        flat = self.parts[t.buffer].view(f"V{dtype.itemsize}")[t.offset :]  # float8's is no code
        strides = [s * dtype.itemsize for s in t.strides]
        return np.lib.stride_tricks.as_strided(flat, t.shape, strides).view(dtype)

    def rows(self, t: Tensor, row: Row, index: np.ndarray) -> np.ndarray:
        """`t`, each element `row.step` elements further for each of `index`."""
        k = np.where(index < 0, index + row.size, index)
        inside = (k >= 0) & (k < row.size)
        at = t.offset + np.where(inside, k, 0) * row.step
        for places, step in zip(np.indices(t.shape), t.strides, strict=True):
            at = at + places * step
        elements: np.ndarray = self.parts[t.buffer].view(dtype_of(t.dtype))[at]
        return np.where(inside, elements, np.zeros((), elements.dtype))

    def store(self, t: Tensor, values: np.ndarray) -> None:
        """Round values to a tensor's dtype and write them where it stands."""
        kind = dtype_of(t.dtype)
        values = np.asarray(values)
        with np.errstate(all="ignore"):
            if t.dtype in NARROW and values.dtype != kind:
                values = values.astype(np.int32)
            if values.dtype == np.float64 and kind.itemsize == 1 and "float" in t.dtype:
                values = values.astype(np.float32)  # ml_dtypes would round it twice otherwise
            self.view(t)[...] = np.reshape(values, t.shape).astype(kind)


class CallOperands:
    """What a call reads and writes, by its names of them."""

    def __init__(
        self,
        memory: HostMemory,
        reads: Iterable[tuple[str, Tensor]],
        writes: Iterable[tuple[str, Tensor]],
    ) -> None:
        self.memory, self.reads, self.writes = memory, dict(reads), dict(writes)

    def __contains__(self, name: str) -> bool:
        return name in self.reads

    def raw(self, name: str) -> np.ndarray:
        """A copy of what is read, in its own dtype."""
        return self.memory.view(self.reads[name]).copy()

    def __getitem__(self, name: str) -> np.ndarray:
        return widened(self.memory.view(self.reads[name]), self.reads[name].dtype)

    def shaped(self, name: str, *shape: int) -> np.ndarray:
        """What is read in another shape."""
        return self[name].reshape(shape)

    def former(self, name: str) -> np.ndarray:
        """What a tensor that is written holds before."""
        t = self.writes[name]
        return widened(self.memory.view(t), t.dtype)

    def strided(self, name: str, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
        """Elements at these strides from the first one of what is read, in float64 or int64.

        So a kernel reads an operand whose strides are its problem's.
        """
        t = self.reads[name]
        view = Tensor(t.buffer, t.dtype, tuple(shape), tuple(strides), t.offset)
        return widened(self.memory.view(view), t.dtype)

    def dense(self, name: str, *shape: int) -> np.ndarray:
        """Elements in row-major order from the first one of what is read, in float64 or int64."""
        if prod(shape) == self.reads[name].size and self.reads[name].dense:
            return self.shaped(name, *shape)
        return self.strided(name, shape, dense_strides(shape))

    def of(self, index: int) -> CallOperands:
        """Those of one of several calls that share a launch: "name.index" as "name"."""
        end = f".{index}"
        parts = (
            [(n.removesuffix(end), t) for n, t in part.items() if n.endswith(end)]
            for part in (self.reads, self.writes)
        )
        return CallOperands(self.memory, *parts)

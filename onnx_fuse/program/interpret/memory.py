"""The buffers of a program as bytes in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnx_fuse.program.call import Program, Tensor, dtype_of
from onnx_fuse.program.expression import Row


class Memory:
    """Buffers of a program as bytes: those with an offset in one arena, all others apart.

    All begin as 0xA5, so that what is read before it is written shows.
    """

    def __init__(self, program: Program, offsets: Mapping[int, int]) -> None:
        ends = [offsets[b.id] + b.nbytes for b in program.buffers if b.id in offsets]
        self.arena = np.full(max(ends, default=0), 0xA5, np.uint8)
        self.parts = {}
        for b in program.buffers:
            if b.id in offsets:
                at = offsets[b.id]
                self.parts[b.id] = self.arena[at : at + b.nbytes]
            else:
                self.parts[b.id] = np.full(b.nbytes, 0xA5, np.uint8)

    def view(self, t: Tensor) -> np.ndarray:
        dtype = dtype_of(t.dtype)
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
        found: np.ndarray = self.parts[t.buffer].view(dtype_of(t.dtype))[at]
        return np.where(inside, found, np.zeros((), found.dtype))

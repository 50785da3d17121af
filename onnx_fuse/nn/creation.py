"""Tensors of numbers that are given: zeros, ones, ranges."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from onnx_fuse.nn.arrays import DType, Sizes, np_name
from onnx_fuse.nn.tensor import Number, Tensor
from onnx_fuse.program.call import dtype_of

__all__ = ["arange", "eye", "full", "full_like", "ones", "ones_like", "zeros", "zeros_like"]
__dir__ = __all__.copy


def _filled(shape: Sequence[Any], value: Number, dtype: DType, device: str | None) -> Tensor:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    return Tensor(np.full(tuple(sizes), value, dtype_of(np_name(dtype))), device=device)


def zeros(*shape: Sizes, dtype: DType = "float32", device: str | None = None) -> Tensor:
    """A Tensor of zeros of this `shape`, `dtype` and `device`."""
    return _filled(shape, 0, dtype, device)


def ones(*shape: Sizes, dtype: DType = "float32", device: str | None = None) -> Tensor:
    """A Tensor of ones of this `shape`, `dtype` and `device`."""
    return _filled(shape, 1, dtype, device)


def full(
    shape: Sequence[int], value: Number, dtype: DType = "float32", device: str | None = None
) -> Tensor:
    """A Tensor of one `value` in this `shape`, `dtype` and `device`."""
    return _filled((tuple(shape),), value, dtype, device)


def full_like(x: Tensor, value: Number) -> Tensor:
    """A Tensor of one `value` with the shape, dtype and device of `x`."""
    return full(x.shape, value, x.dtype, x.device)


def zeros_like(x: Tensor) -> Tensor:
    """Zeros with the shape, dtype and device of `x`."""
    return full_like(x, 0)


def ones_like(x: Tensor) -> Tensor:
    """Ones with the shape, dtype and device of `x`."""
    return full_like(x, 1)


def eye(n: int, dtype: DType = "float32", device: str | None = None) -> Tensor:
    """The identity matrix of `n` rows, of this `dtype` and `device`."""
    return Tensor(np.eye(n, dtype=dtype_of(np_name(dtype))), device=device)


def arange(start: int, end: int | None = None, step: int = 1, device: str | None = None) -> Tensor:
    """The int64 numbers from `start` to `end` - 1 by `step`; of one argument, from 0 below it."""
    first, last = (0, start) if end is None else (start, end)
    first, last, step = index(first), index(last), index(step)
    return Tensor(np.arange(first, last, step, dtype=np.int64), device=device)

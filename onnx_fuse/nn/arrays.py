"""Arrays of tensors: element types, memory of other libraries, places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from operator import index
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

from onnx_fuse.errors import UsageError
from onnx_fuse.nn.dispatch import MODE
from onnx_fuse.nn.runner import Array, adopt, upload
from onnx_fuse.runtime.tensor import DeviceTensor, bfloat16_array, capsule

DType: TypeAlias = "str | type | np.dtype[Any]"
Sizes: TypeAlias = "int | Sequence[int]"
Dims: TypeAlias = "Sizes | None"


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether elements of the type have gradients."""
    return dtype.kind == "f" or "float" in dtype.name


def np_name(dtype: DType) -> str:
    """The name of an element type that is given as NumPy's, by name, or as a Python type."""
    if isinstance(dtype, str):
        return dtype
    return {float: "float32", int: "int64", bool: "bool"}.get(dtype) or np.dtype(dtype).name  # type: ignore[arg-type]


def axis_of(dim: SupportsIndex, rank: int) -> int:
    """An axis of so many, counted from the front. A Tensor without axes has axis 0, and -1.

    Raises IndexError for one that there is not.
    """
    place = index(dim)
    if not -max(rank, 1) <= place < max(rank, 1):
        raise IndexError(f"axis {place} is out of range for a Tensor of {rank} axes")
    return place % max(rank, 1)


def axes_of(dim: Dims, rank: int) -> tuple[int, ...] | None:
    """One axis or several of so many, as a tuple; None for all, and for all of no axes.

    Raises IndexError for an axis that there is not, UsageError for one that is named twice.
    """
    if dim is None:
        return None
    dims = [dim] if isinstance(dim, int | np.integer) else list(dim)
    axes = tuple([axis_of(d, rank) for d in dims])
    if len(set(axes)) < len(axes):
        raise UsageError(f"an axis is named twice: {dims}")
    return axes if rank else None


def of_one(method: Callable[..., Any]) -> Any:
    """A method along an axis, which takes a Tensor without axes for one element, as PyTorch's."""

    @wraps(method)
    def call(self: Any, *args: object, **named: object) -> Any:
        if self.ndim:
            return method(self, *args, **named)
        results = method(self.reshape(1), *args, **named)
        several = isinstance(results, tuple)
        return tuple([r.squeeze(0) for r in results]) if several else results.squeeze(0)

    return call


def number_of(value: object, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A number in a type. Raises UsageError for one with a fraction in a type of integers."""
    if not is_float(dtype) and isinstance(value, float) and not value.is_integer():
        raise UsageError(f"{value} is no number of type {dtype.name}: take x.float() first")
    return np.array(value, dtype)


def within(places: object, size: int | None = None, besides: int | None = None) -> None:
    """Refuse negative places in host memory, as PyTorch does: ONNX counts them from the end.

    So are those from `size` on, which onnxruntime refuses itself but in OneHot. `besides` is
    allowed. A captured function checks its arguments at each replay.

    Raises UsageError.
    """

    def check(array: Array) -> None:
        if type(array) is not np.ndarray or array.dtype.kind not in "iu" or not array.size:
            return
        outside = array < 0 if size is None else (array < 0) | (array >= size)
        if besides is not None:
            outside &= array != besides
        if outside.any():
            limit = "" if size is None else f" to {size - 1}"
            raise UsageError(f"{array[outside][0]} is out of range: places count from 0{limit}")

    check(places._data if hasattr(places, "_data") else places)
    if MODE.recorder is not None:
        MODE.recorder.checked(places, check)


def ints(numbers: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Integers that are given one by one or as one list."""
    if len(numbers) == 1 and isinstance(numbers[0], list | tuple | np.ndarray):
        numbers = list(numbers[0])
    return np.array([index(i) for i in numbers], np.int64)


def as_array(data: object) -> Array:
    """The data of a Tensor, sharing memory where the data has any (see `Tensor`)."""
    if hasattr(data, "_data"):
        return data._data
    if isinstance(data, DeviceTensor):
        return data
    if not isinstance(data, np.ndarray | np.generic) and (
        hasattr(data, "__dlpack_device__") or hasattr(data, "__cuda_array_interface__")
    ):
        return _from_dlpack(data)
    if isinstance(data, list | tuple) and any(hasattr(d, "_data") for d in data):
        data = [np.asarray(d) for d in data]
    array = np.asarray(data)
    if array.dtype.kind in "OSUMm" or array.dtype.char in "gG":
        kind = f"{type(data).__name__} of {array.dtype.name}"
        raise UsageError(f"a Tensor holds numbers, not {kind}")
    short = array.dtype == np.float64 and not _numpy(data)
    return array.astype("float32" if short else array.dtype.newbyteorder("="), copy=False)


def _numpy(data: object) -> bool:
    """Whether nested lists hold NumPy's arrays or numbers, whose type they keep."""
    while isinstance(data, list | tuple) and data:
        data = data[0]
    return isinstance(data, np.ndarray | np.generic)


def _from_dlpack(data: Any) -> Array:
    if not hasattr(data, "__dlpack_device__") or int(data.__dlpack_device__()[0]) == 2:
        return adopt(data)
    half = str(getattr(data, "dtype", "")).endswith("bfloat16")
    return bfloat16_array(data) if half else np.from_dlpack(data)


def exported(array: Array, options: Mapping[str, Any]) -> Any:
    """The DLPack capsule of an array, with the `options` of its `__dlpack__`."""
    if type(array) is np.ndarray and array.dtype.name == "bfloat16":  # which NumPy refuses
        steps = [s // array.dtype.itemsize for s in array.strides]
        return capsule(array.ctypes.data, (1, 0), array.shape, steps, array.dtype, array)
    return array.__dlpack__(**options)


def placed(array: Array, device: str | None) -> Array:
    """The array on a device; a copy unless it is there already."""
    if device is None:
        return array
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise UsageError(f"unknown device '{device}': choose cpu, cuda or cuda:N")
    if kind == "cpu":
        return array if type(array) is np.ndarray else array.numpy()
    gpu = int(number or 0)
    if type(array) is not np.ndarray:
        if array.device_id == gpu:
            return array
        array = array.numpy()
    return upload(array, gpu)


def ones_like(array: Array) -> Array:
    """Ones where `array` is, of its shape and dtype."""
    ones = np.ones(array.shape, array.dtype)
    return ones if type(array) is np.ndarray else upload(ones, array.device_id)

"""Tensors on the GPU that cross the session's border: feeds from anywhere, outputs kept there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnx_fuse.errors import UsageError
from onnx_fuse.llir import dense_strides
from onnx_fuse.problem import ITEMSIZE
from onnx_fuse.runtime import device


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy dtype of a problem.ITEMSIZE name."""
    if name.startswith(("bfloat", "float8", "float4", "int4", "uint4", "int2", "uint2")):
        import ml_dtypes

        name = getattr(ml_dtypes, name)
    found: np.dtype[Any] = np.dtype(name)
    return found


class DeviceTensor:
    """A contiguous tensor in GPU memory, with `__dlpack__` and `__cuda_array_interface__`.

    `owner` keeps the memory alive: this runtime's own allocation, or the object it came from.
    """

    def __init__(
        self, address: int, shape: Sequence[int], dtype: str, device_id: int, owner: Any
    ) -> None:
        self.address, self.shape, self.dtype = address, tuple(shape), dtype_of(dtype)
        self.device_id, self._owner = device_id, owner

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.name == "bfloat16":
            raise AttributeError("the CUDA array interface has no bfloat16: use __dlpack__")
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self.device_id

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        """A DLPack capsule; what made the tensor has finished, so no stream need wait."""
        return _export(self)

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy in host memory."""
        device.start(self.device_id)
        array = np.empty(self.shape, self.dtype)
        if array.nbytes:
            driver = device.bindings()
            device.check(
                driver.cuMemcpyDtoH(array.ctypes.data, self.address, array.nbytes), "a copy"
            )
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __repr__(self) -> str:
        return f"DeviceTensor({self.dtype.name}{list(self.shape)}, cuda:{self.device_id})"


def adopt(value: Any, stream: int) -> np.ndarray[Any, Any] | DeviceTensor:
    """A feed as an array, or as the GPU tensor it is (DLPack, __cuda_array_interface__).

    `stream` is made to wait for what the producer has enqueued. Raises UsageError for a GPU tensor
    that is not contiguous.
    """
    if isinstance(value, np.ndarray | DeviceTensor):
        return value
    on_gpu = hasattr(value, "__cuda_array_interface__") or (
        hasattr(value, "__dlpack_device__") and int(value.__dlpack_device__()[0]) == _CUDA
    )
    if not on_gpu:
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_any_interface(value, stream_ptr=stream)
    shape = tuple(int(d) for d in view.shape)
    strides = view.strides
    pairs = zip(shape, strides or (), dense_strides(shape), strict=False)
    if strides and any(d != 1 and s != e for d, s, e in pairs):
        raise UsageError("a GPU tensor that is fed must be contiguous")
    return DeviceTensor(int(view.ptr), shape, view.dtype.name, int(view.device_id), value)


class Binding:
    """onnxruntime's IOBinding for the CUDA device: inputs by array or address, outputs by place."""

    def __init__(self, outputs: Sequence[str], device_id: int) -> None:
        self.known, self.device_id = list(outputs), device_id
        self.feeds: dict[str, Any] = {}
        self.targets: dict[str, str] = {}
        self.places: dict[str, DeviceTensor] = {}
        self.results: list[Any] = []

    def bind_cpu_input(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Feed an array."""
        self.feeds[name] = array

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        """Feed anything that has `__dlpack__`, `__cuda_array_interface__` or `numpy()`."""
        plain = not hasattr(value, "__dlpack__") and hasattr(value, "numpy")
        self.feeds[name] = value.numpy() if plain else value

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:
        """Feed GPU memory by its address."""
        self.feeds[name] = self._memory(device_type, device_id, element_type, shape, buffer_ptr)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Where the output shall stand after a run: "cpu", "cuda", or GPU memory of the caller's.

        The latter by its address, with the element type and shape that the output must have.
        """
        if name not in self.known:
            raise UsageError(f"the model has no output '{name}'")
        if device_type not in ("cpu", "cuda"):
            raise UsageError(f"an output is bound to 'cpu' or 'cuda', not to '{device_type}'")
        self.targets[name] = device_type
        self.places.pop(name, None)
        if buffer_ptr is not None:
            memory = (device_type, device_id, element_type, shape or (), buffer_ptr)
            self.places[name] = self._memory(*memory)

    @staticmethod
    def _memory(
        device_type: str, device_id: int, element_type: Any, shape: Sequence[int], address: int
    ) -> DeviceTensor:
        if device_type != "cuda":
            raise UsageError(f"an address is one of GPU memory, not of '{device_type}'")
        dtype = np.dtype(element_type).name
        if dtype not in ITEMSIZE:
            raise UsageError(f"no GPU tensor has the element type {dtype}")
        return DeviceTensor(address, shape, dtype, device_id, None)

    def get_outputs(self) -> list[Any]:
        """The outputs bound, in that order: arrays, or DeviceTensors where bound to "cuda"."""
        return self.results

    def copy_outputs_to_cpu(self) -> list[np.ndarray[Any, Any]]:
        """The outputs bound, as arrays."""
        return [np.asarray(result) for result in self.results]


# ---- DLPack ----

_CUDA = 2


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT = 4
_exported: dict[int, Any] = {}


def _delete(address: int) -> None:
    _exported.pop(address, None)


def _drop_capsule(capsule: int) -> None:
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    if api.PyCapsule_IsValid(capsule, b"dltensor"):  # else its consumer owns the tensor
        api.PyCapsule_GetPointer.restype = ctypes.c_void_p
        api.PyCapsule_GetPointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
        _delete(api.PyCapsule_GetPointer(capsule, b"dltensor"))


_DELETE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_DROP_CAPSULE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_drop_capsule)


def _export(tensor: DeviceTensor) -> Any:
    rank = len(tensor.shape)
    shape = (ctypes.c_int64 * max(rank, 1))(*tensor.shape)
    strides = (ctypes.c_int64 * max(rank, 1))(*dense_strides(tensor.shape))
    code = _BFLOAT if tensor.dtype.name == "bfloat16" else _CODES[tensor.dtype.kind]
    managed = _DLManagedTensor(
        _DLTensor(
            tensor.address, _CUDA, tensor.device_id, rank, code, 8 * tensor.dtype.itemsize, 1,
            shape, strides, 0,
        ),
        None,
        _DELETE,
    )  # fmt: skip
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, strides, tensor)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(address, b"dltensor", ctypes.cast(_DROP_CAPSULE, ctypes.c_void_p))

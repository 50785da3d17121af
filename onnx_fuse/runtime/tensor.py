"""Tensors on the GPU that cross the session's border: feeds from anywhere, outputs kept there."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from onnx_fuse.errors import DeviceError, UsageError
from onnx_fuse.program.call import dense_strides, dtype_of
from onnx_fuse.runtime import device


class Argument(NamedTuple):
    """An end of the model as onnxruntime describes it: unnamed open sizes are None."""

    name: str
    type: str
    shape: list[int | str | None]


class DeviceTensor:
    """A contiguous tensor in GPU memory, with `__dlpack__` and `__cuda_array_interface__`.

    `owner` keeps the memory alive: this runtime's own allocation, or the object it came from.
    """

    def __init__(
        self,
        address: int,
        shape: Sequence[int],
        dtype: str | np.dtype[Any],
        device_id: int,
        owner: object,
    ) -> None:
        self.address, self.shape = address, tuple(shape)
        self.dtype = dtype_of(dtype) if isinstance(dtype, str) else dtype
        self.nbytes = prod(self.shape) * self.dtype.itemsize
        """Bytes of the elements."""
        self.ready: device.Stream | device.Event | None = None
        """What makes it, while that may be under way: whoever reads it comes after."""
        self.device_id, self._owner = device_id, owner

    def own(self, memory: device.Memory) -> None:
        """Stand in `memory` from now on."""
        self.address, self._owner = memory.address, memory

    def is_private(self) -> bool:
        """Whether it has memory of a pool to itself, whose address no other library has seen."""
        return isinstance(self._owner, device.Pooled) and not self._owner.lent

    def wait(self) -> None:
        """Wait for what makes it. Raises DeviceError where a kernel failed."""
        if self.ready is not None:
            device.start(self.device_id)
            self.ready.wait(f"making {self}")
            self.ready = None

    def before(self, stream: int) -> None:
        """Let what is enqueued in that CUstream from now on come after what makes this."""
        if self.ready is not None:
            device.start(self.device_id)
            self.ready.before(device.Stream(stream))

    def _lend(self) -> None:
        if isinstance(self._owner, device.Pooled):
            self._owner.lent = True

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.name == "bfloat16":
            raise AttributeError("the CUDA array interface has no bfloat16: use __dlpack__")
        self.wait()
        self._lend()
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

    def __dlpack__(self, *, stream: int | None = None, **_: object) -> Any:
        """A DLPack capsule; the consumer's `stream` waits on the GPU for what makes the tensor."""
        if stream != -1:  # which asks for no order
            self.before(device.LEGACY if stream is None else int(stream))
        self._lend()
        place = self.address, (_CUDA, self.device_id)
        return capsule(*place, self.shape, dense_strides(self.shape), self.dtype, self)

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy in host memory."""
        device.start(self.device_id)
        self.wait()
        array = np.empty(self.shape, self.dtype)
        if array.nbytes:
            driver = device.bindings()
            device.check(
                driver.cuMemcpyDtoH(array.ctypes.data, self.address, array.nbytes), "a copy"
            )
        return array

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> np.ndarray:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __repr__(self) -> str:
        return f"DeviceTensor({self.dtype.name}{list(self.shape)}, cuda:{self.device_id})"


DeviceTensors: TypeAlias = Mapping[str, DeviceTensor]
"""Inputs or outputs by name."""


def adopt(value: object, stream: int) -> np.ndarray[Any, Any] | DeviceTensor:
    """A feed as an array, or as the GPU tensor it is (DLPack, __cuda_array_interface__).

    `stream` is made to wait for what the producer has enqueued. Raises UsageError for a GPU tensor
    that is not contiguous.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, DeviceTensor):
        value.before(stream)
        return value
    on_gpu = hasattr(value, "__cuda_array_interface__") or (
        hasattr(value, "__dlpack_device__") and int(value.__dlpack_device__()[0]) == _CUDA
    )
    if not on_gpu:
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    try:
        from cuda.core.utils import StridedMemoryView
    except ImportError as error:
        raise DeviceError(
            f"feeding a GPU tensor of another library needs cuda-core ({error}): "
            "pip install cuda-core"
        ) from error
    view = StridedMemoryView.from_any_interface(value, stream_ptr=stream)
    shape = tuple(int(d) for d in view.shape)
    strides = view.strides
    pairs = zip(shape, strides or (), dense_strides(shape), strict=False)
    if strides and 0 not in shape and any(d != 1 and s != e for d, s, e in pairs):
        raise UsageError(
            "an input on the GPU must be a contiguous tensor: copy it (in torch: x.contiguous())"
        )
    return DeviceTensor(int(view.ptr), shape, view.dtype.name, int(view.device_id), value)


# ---- DLPack ----

_CUDA = 2


class DlTensor(ctypes.Structure):
    """DLPack's description of a tensor."""

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
        ("tensor", DlTensor),
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


def capsule(
    data: int,
    place: tuple[int, int],
    sizes: Sequence[int],
    steps: Sequence[int],
    dtype: np.dtype[Any],
    owner: object,
) -> Any:
    """A DLPack capsule of memory at address `data` that `owner` keeps alive.

    `place` is DLPack's (device type, number); `sizes` and `steps` count elements of `dtype`.
    """
    rank = len(sizes)
    shape = (ctypes.c_int64 * max(rank, 1))(*sizes)
    strides = (ctypes.c_int64 * max(rank, 1))(*steps)
    code = _BFLOAT if dtype.name == "bfloat16" else _CODES[dtype.kind]
    managed = _DLManagedTensor(
        DlTensor(data, *place, rank, code, 8 * dtype.itemsize, 1, shape, strides, 0),
        None,
        _DELETE,
    )
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, strides, owner)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(address, b"dltensor", ctypes.cast(_DROP_CAPSULE, ctypes.c_void_p))


def bfloat16_array(value: Any) -> np.ndarray[Any, Any]:
    """The bfloat16 elements of another library's host tensor, shared: NumPy's DLPack has none."""
    held = value.__dlpack__()
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    address = api.PyCapsule_GetPointer(held, b"dltensor")
    tensor = _DLManagedTensor.from_address(address).tensor
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides else dense_strides(shape)
    reach = 1 + sum((d - 1) * s for d, s in zip(shape, strides, strict=True)) if all(shape) else 0
    memory: Any = (ctypes.c_uint16 * reach).from_address((tensor.data or 0) + tensor.byte_offset)
    memory.owner = value  # the capsule goes, and the memory is the tensor's
    flat: np.ndarray[Any, Any] = np.frombuffer(memory, dtype_of("bfloat16"))
    return np.lib.stride_tricks.as_strided(flat, shape, tuple(2 * s for s in strides))

"""GPU tensors of other libraries as they are now: a look takes a microsecond, adopting one many.

A tensor may get other memory or another shape while it is bound, so that being the same object says
nothing. DLPack's exchange interface, which torch has, tells it without a capsule.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from ctypes import string_at
from functools import lru_cache
from threading import Lock
from typing import Any

from onnx_fuse.runtime.tensor import DeviceTensor

Look = tuple[int, object]
"""The address of a tensor, and everything else about it."""
_CUDA = 2
NAME = b"dlpack_exchange_api"
_POINTER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class ExchangeInterface(ctypes.Structure):
    """What `__dlpack_c_exchange_api__` of a type points to, in version 1 of DLPack."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("before", ctypes.c_void_p),
        ("unused", ctypes.c_void_p * 3),
        ("tensor", ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)),
        (
            "stream",
            ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p),
        ),
    )


class Library:
    """How the tensors of one type are looked at, and which stream their library works in."""

    def __init__(self, interface: ExchangeInterface) -> None:
        self._tensor, self._stream, self._lock = interface.tensor, interface.stream, Lock()
        self._words, self._handle = (ctypes.c_uint64 * 6)(), ctypes.c_void_p()  # of a DlTensor
        self._place = ctypes.addressof(self._words)

    def look(self, value: object) -> Look:
        """The look of a tensor. Raises what its library does."""
        with self._lock:
            self._tensor(value, self._place)
            address, where, kind, shape, strides, offset = self._words[:]
            nbytes = 8 * (kind & 0xFFFFFFFF)  # the rank, and then the type
            places = tuple([string_at(at, nbytes) if at else b"" for at in (shape, strides)])
        return address + offset, (where, kind, places)

    def stream(self, value: object, device_id: int) -> int | None:
        """The handle of the stream that the library enqueues its work in now."""
        with self._lock:
            self._stream(_CUDA, device_id, ctypes.addressof(self._handle))
            return self._handle.value or 0


class _ArrayInterface:
    """Tensors with `__cuda_array_interface__` that says which stream they come after."""

    @staticmethod
    def look(value: Any) -> Look | None:
        says = value.__cuda_array_interface__
        if "stream" not in says:
            return None
        return says["data"][0], (says["shape"], says["typestr"], says.get("strides"))

    @staticmethod
    def stream(value: Any, device_id: int) -> int | None:
        handle: int | None = value.__cuda_array_interface__["stream"]
        return handle


class _OrtValues:
    """onnxruntime's OrtValue, whose runs are over when it is there."""

    @staticmethod
    def look(value: Any) -> Look:
        return value.data_ptr(), (tuple(value.shape()), value.element_type())

    @staticmethod
    def stream(value: object, device_id: int) -> None:
        return None


@lru_cache(maxsize=256)
def library(kind: Hashable) -> Any:
    """The Library, or what does its work, of a type of tensors; None where a look is no use."""
    held = getattr(kind, "__dlpack_c_exchange_api__", None)
    if held is not None:
        interface = ExchangeInterface.from_address(_POINTER(held, NAME))
        return Library(interface) if interface.major == 1 else None
    if all(callable(getattr(kind, name, None)) for name in ("data_ptr", "shape", "element_type")):
        return _OrtValues
    return _ArrayInterface if hasattr(kind, "__cuda_array_interface__") else None


def look(value: Any) -> Look | None:
    """What a GPU tensor is now; None where only adopting it tells."""
    kind: Hashable = value.__class__
    if kind is DeviceTensor:
        return value.address, (value.shape, value.dtype, value.device_id)
    of = library(kind)
    return None if of is None else of.look(value)


def stream_of(value: Any, device_id: int) -> int | None:
    """The handle of the stream that the tensor's library works in on this GPU, if it says one."""
    kind: Hashable = value.__class__
    handle: int | None = library(kind).stream(value, device_id)
    return handle

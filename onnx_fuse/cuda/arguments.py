"""A launch's arguments in memory, as the driver reads them; packed again where addresses change."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping
from copy import copy
from functools import lru_cache
from typing import Any

from onnx_fuse.errors import DeviceError
from onnx_fuse.program.launch import Arg, Launch, Num, Ptr, Table, TensorMap

_NUMBERS = {"i32": "i4x", "u32": "I4x", "i64": "q", "f32": "f4x", "f64": "d"}
_MAP_BYTES = 128
_MAP = f"{_MAP_BYTES}s"
_ALIGNED = 64  # of a TMA descriptor
_MAPS = 4096
"""Kinds of tensors whose descriptors are kept."""
Addresses = Mapping[Any, int]
Operands = Mapping[str, tuple[Any, int]]
"""The key among addresses, and the offset in bytes, of each name that is no key itself."""


class Arguments:
    """The arguments of one launch: each in a slot of its own, and the array that points to them.

    `address` is that array's, which stays where it is: what `place` writes, later launches read.
    """

    def __init__(self, launch: Launch, operands: Operands) -> None:
        self._layout = _layout(tuple([_code(arg) for arg in launch.args]))
        self.words, self._spots = words_of(launch.args, operands)
        """See `words_of`; others of the same launch may stand here before `place`."""
        self._take_memory()

    def twin(self) -> Arguments:
        """The same arguments, to be placed, in memory of their own."""
        twin = copy(self)
        twin._take_memory()
        return twin

    def _take_memory(self) -> None:
        _, offsets, nbytes = self._layout
        count = len(offsets)
        self._memory = (ctypes.c_uint8 * (nbytes + 8 * count + _ALIGNED))()
        start = ctypes.addressof(self._memory)
        self._skipped = -start % _ALIGNED
        start += self._skipped
        table = struct.Struct(f"<{count}Q")
        table.pack_into(self._memory, self._skipped + nbytes, *[start + at for at in offsets])
        self.address = start + nbytes

    def place(self, address: Addresses, sync: int) -> None:
        """Write all arguments, with null for what has no address; `sync` is the launch's own."""
        words, find = [*self.words], address.get
        for at, key, mapped in self._spots:
            base = sync if key == "sync" else find(key)
            if mapped:
                arg, offset = words[at]
                words[at] = _descriptor(arg, base + offset if base else 0)
            else:
                words[at] = base + words[at] if base else 0
        self._layout[0].pack_into(self._memory, self._skipped, *words)


def words_of(
    args: tuple[Arg, ...], operands: Operands
) -> tuple[tuple[Any, ...], list[tuple[int, Any, bool]]]:
    """The words of arguments, and which are addresses: (word, key, whether it is a map's).

    A word is a number, an offset from the address of the key, or (TensorMap, offset).
    """
    words: list[Any] = []
    spots: list[tuple[int, Any, bool]] = []

    def address(ptr: Ptr, arg: TensorMap | None = None) -> None:
        key, start = operands.get(ptr.name, (ptr.name, 0))
        spots.append((len(words), key, arg is not None))
        words.append(start + ptr.offset if arg is None else (arg, start + ptr.offset))

    for word in [w for arg in args for w in (arg.words if type(arg) is Table else (arg,))]:
        if type(word) is Ptr:
            address(word)
        elif type(word) is TensorMap:
            address(word.ptr, word)
        else:
            words.append(word.value if type(word) is Num else word)
    return tuple(words), spots


def _code(arg: Arg) -> str:
    """The argument's format in `struct`, of 8 bytes or a multiple."""
    if isinstance(arg, Ptr):
        return "Q"
    if isinstance(arg, Num):
        return _NUMBERS[arg.ctype]
    return f"{len(arg.words)}Q" if isinstance(arg, Table) else _MAP


@lru_cache(maxsize=4096)
def _layout(codes: tuple[str, ...]) -> tuple[struct.Struct, tuple[int, ...], int]:
    """How arguments of these codes are packed, where each stands, and the bytes of all."""
    text, at, offsets = "<", 0, []
    for code in codes:
        if code == _MAP:
            text += f"{-at % _ALIGNED}x"
            at += -at % _ALIGNED
        offsets.append(at)
        text += code
        at += struct.calcsize("<" + code)
    return struct.Struct(text), tuple(offsets), at


# ---- TMA descriptors ----------------------------------------------------------------------------


_ENCODED: dict[TensorMap, Any] = {}
_ENCODING = threading.Lock()


@lru_cache(maxsize=8192)
def _descriptor(arg: TensorMap, address: int) -> bytes:
    """The descriptor of the tensor there; zeros, which nobody reads, for an operand left out."""
    if not address:
        return bytes(_MAP_BYTES)
    from cuda.bindings import driver

    with _ENCODING:
        descriptor = _ENCODED.get(arg)
        if descriptor is None or int(driver.cuTensorMapReplaceAddress(descriptor, address)[0]):
            if len(_ENCODED) >= _MAPS:
                _ENCODED.clear()
            descriptor = _ENCODED[arg] = _encoded(arg, address)
        return ctypes.string_at(int(descriptor.getPtr()), _MAP_BYTES)


def _encoded(arg: TensorMap, address: int) -> Any:
    """The driver's descriptor of the tensor there, which takes it far longer than a new address."""
    from cuda.bindings import driver

    kinds, shape, strides, box, ones = _constants(arg.dtype, arg.shape, arg.strides, arg.box)
    swizzle = driver.CUtensorMapSwizzle
    if arg.window:
        encode = driver.cuTensorMapEncodeIm2col
        axes = len(arg.shape) - 2
        low, high, each = (list(arg.window[i * axes : (i + 1) * axes]) for i in range(3))
        how = [low, high, *arg.box, [ones[0], *map(driver.cuuint32_t, each), ones[0]]]
    else:
        encode, how = driver.cuTensorMapEncodeTiled, [box, ones]
    code, descriptor = encode(
        kinds,
        len(arg.shape),
        address,
        shape,
        strides,
        *how,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(swizzle, _SWIZZLES[arg.swizzle]),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(code):
        raise DeviceError(f"a TMA descriptor of {arg}: {driver.CUresult(code).name}")
    return descriptor


MAP_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "tf32": 4, "int8": 1, "uint8": 1}
"""The bytes of each element type of a TensorMap; tf32 is float32 that the copy rounds."""
_SWIZZLES = {
    0: "CU_TENSOR_MAP_SWIZZLE_NONE", 64: "CU_TENSOR_MAP_SWIZZLE_64B",
    128: "CU_TENSOR_MAP_SWIZZLE_128B",
}  # fmt: skip


@lru_cache(maxsize=1024)
def _constants(
    dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> tuple[Any, list[Any], list[Any], list[Any], list[Any]]:
    """What does not depend on the address, as the driver's types."""
    from cuda.bindings import driver

    kind = driver.CUtensorMapDataType
    kinds = {
        "bfloat16": kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "float16": kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "float32": kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        "tf32": kind.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32,
        "int8": kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "uint8": kind.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }
    return (
        kinds[dtype],
        [driver.cuuint64_t(x) for x in shape],
        [driver.cuuint64_t(x) for x in strides],
        [driver.cuuint32_t(x) for x in box],
        [driver.cuuint32_t(1)] * len(shape),
    )

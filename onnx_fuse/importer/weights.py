"""Weights beside the parsed protobuf: large tensors of a file go to memory once, by themselves.

Parsing a model of 440 MB as one message copies its weights twice and takes a second. Here the
message is walked by the lengths that it states, the bytes of large initializers are left out of
what is parsed, and threads read them from the file to where they stay.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.container import WEIGHTS, Container, stamp
from onnx_fuse.errors import ModelError

PLACE = "place"
"""Key of a tensor's `meta`: (file, offset, the file's stamp) of its bytes.

The file "" is the model's own, and has no stamp: whoever reads it knows when it began to.
"""
Place = tuple[str, int, tuple[int, int] | None]
LARGE = 1 << 16
"""Bytes from which an initializer is read by itself."""
Piece: TypeAlias = "bytes | memoryview"
"""Bytes of a message; a memoryview is of bytes, too."""
_SMALL_FILE = 1 << 20
GRAPH, INITIALIZER = 7, 5  # fields of ModelProto and of GraphProto
RAW_DATA, _DATA_TYPE, _EXTERNAL, _LOCATION = 9, 2, 13, 14  # fields of TensorProto
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}


class Weights(Protocol):
    """A source of tensors whose external data is `location`, other than files of a folder."""

    location: str

    def nbytes(self, tensor: onnx.TensorProto) -> int:
        """Bytes stored for a tensor. Raises ModelError or ValueError where there are none."""

    def array(self, tensor: ir.ExternalTensor) -> np.ndarray[Any, Any]:
        """The bytes as an array of uint8."""

    def place(self, tensor: ir.ExternalTensor) -> Place | None:
        """The place of the bytes for the key PLACE, or None."""


def read_places(file: BinaryIO, places: Sequence[tuple[int, int]]) -> list[np.ndarray[Any, Any]]:
    """The bytes at each (offset, number), in threads. Raises ModelError if the file has shrunk."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(partial(_read_place, file.fileno()), places))


def _read_place(file: int, place: tuple[int, int]) -> np.ndarray[Any, Any]:
    at, left = place
    array = np.empty(left, np.uint8)
    view = array.data
    while left:
        got = os.preadv(file, [view[-left:]], at)
        if not got:
            raise ModelError("the file ends early: it is being written")
        at, left = at + got, left - got
    return array


class InMemory:
    """Initializers that `parts` has cut out of a file; a tensor's "offset" is its number here."""

    def __init__(self) -> None:
        self.location = secrets.token_hex(16)  # no file can name it beforehand
        self.places: list[tuple[int, int]] = []
        self._arrays: list[np.ndarray[Any, Any]] = []

    def read(self, file: BinaryIO) -> None:
        """Read the bytes at `places`. Raises ModelError where the file has shrunk."""
        self._arrays = read_places(file, self.places)

    def nbytes(self, tensor: onnx.TensorProto) -> int:
        return self._arrays[_number(tensor)].nbytes

    def array(self, tensor: ir.ExternalTensor) -> np.ndarray[Any, Any]:
        return self._arrays[tensor.offset or 0]

    def place(self, tensor: ir.ExternalTensor) -> Place | None:
        return "", self.places[tensor.offset or 0][0], None


class InFile(InMemory):
    """Initializers that stay in the file and are read whenever their numbers are asked for."""

    def read(self, file: BinaryIO) -> None:
        """Keep the file open for what is read later."""
        self._file, self._stamp = os.dup(file.fileno()), stamp(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def nbytes(self, tensor: onnx.TensorProto) -> int:
        return self.places[_number(tensor)][1]

    def array(self, tensor: ir.ExternalTensor) -> np.ndarray[Any, Any]:
        """The bytes. Raises ModelError where the file is no longer as it was."""
        array = _read_place(self._file, self.places[tensor.offset or 0])
        if stamp(self._file) != self._stamp:
            raise ModelError("the model's file has been written to since it was opened")
        return array


def _number(tensor: onnx.TensorProto) -> int:
    return next(int(e.value) for e in tensor.external_data if e.key == "offset")


class InContainer:
    """Weights of a compiled file, by name, where it is mapped."""

    location = WEIGHTS

    def __init__(self, container: Container) -> None:
        self._container = container

    def nbytes(self, tensor: onnx.TensorProto) -> int:
        return self._container.tensor_place(tensor.name)[1]

    def array(self, tensor: ir.ExternalTensor) -> np.ndarray[Any, Any]:
        return self._container.tensor(tensor.name or "")

    def place(self, tensor: ir.ExternalTensor) -> Place | None:
        return None


def parts(path: Path, *, lazy: bool = False) -> tuple[bytes, InMemory | None]:
    """The model at `path` to be parsed, and the weights that it names but no longer holds.

    With `lazy` these are read when they are asked for.
    """
    with path.open("rb") as file:
        rest, weights = parts_of_file(file, InFile() if lazy else InMemory())
        if weights is not None:
            weights.read(file)
        return rest, weights


def parts_of_file(file: BinaryIO, weights: InMemory | None = None) -> tuple[bytes, InMemory | None]:
    """As `parts`, of an open file, with weights that are still to be read."""
    size = os.fstat(file.fileno()).st_size
    if size < _SMALL_FILE or not hasattr(os, "preadv"):
        return file.read(), None
    weights = weights or InMemory()
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return b"".join(_model(data, size, weights)), weights
        except _Unusual:
            return data[:], None


class _Unusual(Exception):
    """The file has bytes that only the general parser understands or refuses."""


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """The number and wire type of each field, its start, and the start and end of its value."""
    while at < end:
        start = at
        key, at = _varint(data, at, end)
        number, kind = key >> 3, key & 7
        if kind == _BYTES:
            length, at = _varint(data, at, end)
            stop = at + length
        elif kind == _VARINT:
            _, stop = _varint(data, at, end)
        elif kind in _FIXED:
            stop = at + _FIXED[kind]
        else:
            raise _Unusual
        if stop > end or number == 0:  # a file of zeros would be walked byte by byte
            raise _Unusual
        yield number, kind, start, at, stop
        at = stop


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    raise _Unusual


def _as_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def lengthy(number: int, pieces: Sequence[Piece]) -> list[Piece]:
    """A field of a message or of bytes."""
    return [_as_varint(number << 3 | _BYTES), _as_varint(sum(map(len, pieces))), *pieces]


def _model(data: mmap.mmap, end: int, weights: InMemory) -> Iterator[Piece]:
    for number, kind, start, at, stop in _fields(data, 0, end):
        if number == GRAPH and kind == _BYTES:
            yield from lengthy(number, _graph(data, at, stop, weights))
        else:
            yield data[start:stop]


def _graph(data: mmap.mmap, at: int, end: int, weights: InMemory) -> list[Piece]:
    """The graph's fields in order, what lies between two large initializers in one piece."""
    pieces: list[Piece] = []
    copied = at
    for number, kind, start, inner, stop in _fields(data, at, end):
        if number == INITIALIZER and kind == _BYTES and stop - inner >= LARGE:
            pieces.append(data[copied:start])
            pieces += lengthy(number, _tensor(data, inner, stop, weights))
            copied = stop
    return [*pieces, data[copied:end]]


def _tensor(data: mmap.mmap, at: int, end: int, weights: InMemory) -> list[bytes]:
    """The tensor, its bytes named as external data where they are many and stand as usual."""
    fields = list(_fields(data, at, end))
    raw = [f for f in fields if f[0] == RAW_DATA]
    bits = 0
    for number, kind, _, value, stop in fields:
        if number == _DATA_TYPE and kind == _VARINT:
            bits = _BITS.get(_varint(data, value, stop)[0], 0)
    odd = any(f[0] in (_EXTERNAL, _LOCATION) for f in fields)
    if len(raw) != 1 or odd or bits < 8 or raw[0][4] - raw[0][3] < LARGE:
        return [data[at:end]]
    _, _, start, value, stop = raw[0]
    named = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, text in (("location", weights.location), ("offset", str(len(weights.places)))):
        named.external_data.add(key=key, value=text)
    weights.places.append((value, stop - value))
    return [data[at:start], data[stop:end], named.SerializeToString()]


_NO_BITS = (ir.DataType.UNDEFINED, ir.DataType.STRING)
_BITS = {t.value: t.bitwidth for t in ir.DataType if t not in _NO_BITS}

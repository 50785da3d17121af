"""The deployable file: a stored zip archive whose members are mapped into memory and checked.

A zip, since it is one file to copy, any tool lists and unpacks it, and a stored member is a range
of the file's bytes: nothing is unpacked and weights go to the GPU from the page cache.
`manifest.json` names every other member with its size and the SHA-256 digests of its pieces, which
are compared in threads. Tensors stand in a member of their own, in the safetensors layout.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import threading
import time
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnx_fuse import config
from onnx_fuse.errors import ModelError
from onnx_fuse.files import private_folder, read_private, written_private

MANIFEST = "manifest.json"
GRAPH = "model.onnx"
"""The fused graph, whose large weights are tensors of the next member, by name."""
WEIGHTS = "weights.safetensors"
MAGIC = "onnx-fuse"
"""What the manifest's "kind" must be."""
PIECE = 8 << 20
"""Bytes of a member that one digest is of."""
ALIGN = 64
_MAX_HEADER = 256 << 20  # bytes of a manifest or of a table of tensors
_LOCAL = struct.Struct("<4s5H3I2H")  # what stands before a member's data
_PADDING = 0xD935  # kind of the extra field that only moves the data behind it

# safetensors' names of element types; what it has no name for is stored as bytes
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32",
    "uint16": "U16", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def is_container(path: str | os.PathLike[str]) -> bool:
    """Whether the file at `path` starts as a zip archive does, which no ONNX file can."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError:
        return False


# ---- writing ------------------------------------------------------------------------------------


def write(
    path: Path,
    manifest: Mapping[str, Any],
    members: Mapping[str, bytes],
    tensors: Mapping[str, np.ndarray[Any, Any]],
) -> dict[str, Any]:
    """Write the file at `path`: `manifest` with "kind" and "files" added, the members, the tensors.

    The whole manifest is returned. It needs the weights' digests, and stands last: one pass does.
    """
    files: dict[str, Any] = {}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, data in members.items():
            _add(archive, name, [data], files)
        _add(archive, WEIGHTS, _safetensors(tensors), files)
        full_manifest = {"kind": MAGIC, **manifest, "files": files}
        _add(archive, MANIFEST, [json.dumps(full_manifest, separators=(",", ":")).encode()], {})
    return full_manifest


def _add(archive: zipfile.ZipFile, name: str, parts: Iterable[Any], files: dict[str, Any]) -> None:
    """One member, its data on a multiple of ALIGN, with its digests into `files`."""
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))  # the same bytes whenever it is made
    assert archive.fp is not None
    wide = 20  # of the field that zipfile itself writes for a member that may be large
    end = archive.fp.tell() + _LOCAL.size + len(name) + wide + 4
    info.extra = struct.pack("<HH", _PADDING, -end % ALIGN) + bytes(-end % ALIGN)
    nbytes, digests, piece, room = 0, [], hashlib.sha256(), PIECE
    with archive.open(info, "w", force_zip64=True) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            file.write(view)
            nbytes += len(view)
            while len(view):
                piece.update(view[:room])
                taken = min(room, len(view))
                view, room = view[taken:], room - taken
                if not room:
                    digests.append(piece.hexdigest())
                    piece, room = hashlib.sha256(), PIECE
    if room < PIECE or not digests:
        digests.append(piece.hexdigest())
    files[name] = {"bytes": nbytes, "sha256": digests}


def _safetensors(tensors: Mapping[str, np.ndarray[Any, Any]]) -> Iterator[Any]:
    """The layout's parts: length of the table, the table, and each tensor's bytes."""
    table, at = {}, 0
    for name, array in tensors.items():
        kind = _NAMES.get(array.dtype.name)
        shape = list(array.shape) if kind else [array.nbytes]
        table[name] = {
            "dtype": kind or "U8",
            "shape": shape,
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    yield struct.pack("<Q", len(text))
    yield text
    for array in tensors.values():
        if array.nbytes:
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# ---- reading ------------------------------------------------------------------------------------


class Container:
    """A file that `write` made, mapped into memory. Raises ModelError for any other.

    Members are compared with their digests before they are given out: small ones when asked for,
    the weights in threads that start when the file is opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - as long as the map is read
            weakref.finalize(self, self._file.close)
            self._stamp = stamp(self._file.fileno())
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            self._places, sums = members_of(self._file)
        # zipfile raises NotImplementedError for archives of a kind that it does not read
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
            raise self.fault(f"not a file of onnx-fuse compile, or damaged ({error})") from error
        except OSError as error:
            raise self.fault(error.strerror or str(error)) from error
        self._data = memoryview(self._map)
        if MANIFEST not in self._places:
            raise self.fault("a zip archive, but none that onnx-fuse compile has made")
        if zlib.crc32(self._member(MANIFEST)) != sums[MANIFEST]:
            raise self.fault("its manifest is damaged")
        try:
            self.manifest = json.loads(bytes(self._member(MANIFEST)))
        except (ValueError, RecursionError) as error:
            raise self.fault("its manifest is damaged") from error
        if not isinstance(self.manifest, dict) or self.manifest.get("kind") != MAGIC:
            raise self.fault("a zip archive, but none that onnx-fuse compile has made")
        self._checks = self._begin_checks()
        self._checked: set[str] = set()
        self._table: dict[str, tuple[int, int]] | None = None

    def fault(self, reason: str) -> ModelError:
        """The ModelError about this file."""
        return ModelError(f"{self.path}: {reason}")

    def _unchanged(self) -> None:
        """Raise ModelError where the file was written to: reading the map might be a fault then."""
        if stamp(self._file.fileno()) != self._stamp:
            raise self.fault(
                "changed while it is in use: write another file and rename it, which keeps the "
                "old one for processes that use it"
            )

    def _member(self, name: str) -> memoryview:
        start, nbytes = self._places[name]
        return self._data[start : start + nbytes]

    def _begin_checks(self) -> dict[str, list[Future[str]]]:
        """Start comparing every member with its digests."""
        pieces: dict[str, list[tuple[Any, int, int]]] = {}
        try:
            for name, entry in self.manifest["files"].items():
                if name not in self._places:
                    raise self.fault(f"incomplete: {name} is missing")
                start, nbytes = self._places[name]
                if [entry["bytes"], len(entry["sha256"])] != [nbytes, max(1, -(-nbytes // PIECE))]:
                    raise self.fault(f"damaged: {name} has another length than in the manifest")
                pieces[name] = _pieces(self._file, start, nbytes)
        except (AttributeError, KeyError, TypeError) as error:
            raise self.fault("its manifest is damaged") from error
        checks = iter(in_threads(_digest, [piece for part in pieces.values() for piece in part]))
        return {name: [*islice(checks, len(part))] for name, part in pieces.items()}

    def member(self, name: str) -> memoryview:
        """The bytes of a member that is as it was written."""
        self._unchanged()
        if name not in self._checks:
            raise self.fault(f"incomplete: {name[:80]} is missing")
        if name not in self._checked:
            digests = [check.result() for check in self._checks[name]]
            if digests != self.manifest["files"][name]["sha256"]:
                raise self.fault(f"damaged: {name} has another digest than in the manifest")
            self._checked.add(name)
        return self._member(name)

    def json(self, name: str) -> Any:
        """A member that is JSON."""
        try:
            return json.loads(bytes(self.member(name)))
        except (ValueError, RecursionError) as error:
            raise self.fault(f"damaged: {name} is no JSON") from error

    def tensor(self, name: str) -> np.ndarray[Any, Any]:
        """The bytes of a tensor as uint8, over the mapped file."""
        start, nbytes = self.tensor_place(name)
        return np.frombuffer(self._map, np.uint8, nbytes, start)

    def tensor_place(self, name: str) -> tuple[int, int]:
        """Where in the file the bytes of a tensor stand: their offset and number."""
        weights = self.member(WEIGHTS)
        if self._table is None:
            self._table = self._read_table(weights)
        if name not in self._table:
            raise self.fault(f"incomplete: there is no tensor {name[:80]!r}")
        start, stop = self._table[name]
        return self._places[WEIGHTS][0] + start, stop - start

    def _read_table(self, weights: memoryview) -> dict[str, tuple[int, int]]:
        try:
            (length,) = struct.unpack_from("<Q", weights)
            if length > min(_MAX_HEADER, len(weights) - 8):
                raise ValueError("its table is longer than the member")
            table = json.loads(bytes(weights[8 : 8 + length]))
            places = {}
            for name, entry in table.items():
                begin, end = entry["data_offsets"]
                if not 0 <= begin <= end <= len(weights) - 8 - length:
                    raise ValueError(f"{name[:80]} reaches beyond the member")
                if min(entry["shape"], default=0) < 0 or prod(entry["shape"]) > end - begin:
                    raise ValueError(f"{name[:80]} has more elements than bytes")
                places[name] = (8 + length + begin, 8 + length + end)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self.fault(f"damaged: {WEIGHTS}: {error}") from error
        return places


def stamp(file: int | Path) -> tuple[int, int]:
    """The size and time of change of an open file or of the one at a path."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns


def _pieces(file: BinaryIO, start: int, nbytes: int) -> list[tuple[BinaryIO, int, int]]:
    return [(file, start + at, min(PIECE, nbytes - at)) for at in range(0, nbytes or 1, PIECE)]


def _digest(file: BinaryIO, at: int, left: int) -> str:
    """SHA-256 of the bytes there, as far as there are any.

    They are read, not mapped: a file that is being overwritten must not end the process.
    """
    digest, room = hashlib.sha256(), memoryview(bytearray(min(left, 1 << 20)))
    while left:
        got = os.preadv(file.fileno(), [room[:left]], at)
        if not got:
            break
        digest.update(room[:got])
        at, left = at + got, left - got
    return digest.hexdigest()


def members_of(file: BinaryIO) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """(offset of the data, bytes), and the CRC-32, of each member. Raises BadZipFile."""
    size = os.fstat(file.fileno()).st_size
    places, sums = {}, {}
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise zipfile.BadZipFile(f"{info.filename} is compressed")
            file.seek(info.header_offset)
            head = file.read(_LOCAL.size)
            if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
                raise zipfile.BadZipFile(f"{info.filename} has no header")
            name, extra = _LOCAL.unpack(head)[9:]
            start = info.header_offset + _LOCAL.size + name + extra
            if start + info.file_size > size:
                raise zipfile.BadZipFile(f"{info.filename} ends beyond the file")
            places[info.filename] = (start, info.file_size)
            sums[info.filename] = info.CRC
    return places, sums


def in_threads(work: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]) -> list[Future[Any]]:
    """Begin `work` of each job. An executor takes none after the main thread's end."""
    futures: list[Future[Any]] = [Future() for _ in jobs]
    todo = iter([*zip(futures, jobs, strict=True)])  # of a list, from which threads may take

    def take() -> None:
        for future, job in todo:
            try:
                future.set_result(work(*job))
            except Exception as error:  # noqa: BLE001, PERF203 - for who asks for the result
                future.set_exception(error)

    for _ in range(min(8, os.cpu_count() or 1, len(jobs))):
        threading.Thread(target=take, name="onnx_fuse digests").start()
    return futures


def digest_of(parts: Sequence[Any]) -> str:
    """16 hex digits over `parts`, which are bytes or arrays: the name of what is stored once."""
    jobs = in_threads(lambda part: hashlib.sha256(part).digest(), [(part,) for part in parts])
    return hashlib.sha256(b"".join([job.result() for job in jobs])).hexdigest()[:16]


def digest_of_file(path: Path) -> str:
    """SHA-256 over the digests of the file's pieces, which threads compute, or as it was noted.

    The cache notes it by the times of the file, of which nobody can set that of the last change of
    its inode.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        times = [status.st_mtime_ns, status.st_ctime_ns]
        state = [status.st_dev, status.st_ino, status.st_size, *times]
        name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
        note = config.CACHE_DIR.value / "digests" / name
        with contextlib.suppress(OSError, ValueError):
            *noted, digest = json.loads(read_private(note))
            if noted == state:
                return str(digest)
        pieces = in_threads(_digest, _pieces(file, 0, status.st_size))
        text = "".join([str(status.st_size), *(piece.result() for piece in pieces)])
    digest = hashlib.sha256(text.encode()).hexdigest()
    if time.time_ns() - max(times) > _SETTLED:
        with contextlib.suppress(OSError):
            if private_folder(note.parent):
                with written_private(note) as draft:
                    draft.write_text(json.dumps([*state, digest]))
    return digest


_SETTLED = 60_000_000_000  # ns: what a process writes to a map of a file changes no time for 35 s

"""The folder of the cache that keeps the open programs of one model.

A file holds the guards and the program as data (`program.template`), with its layouts and the bytes
of its constants: a process that meets a shape that meets the guards lowers nothing. Weights that
lowering made stand in files of their own, each once for all programs. What is damaged, or was
written by other code, counts as absent, and a folder that others may write to is not read at all.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnx_fuse import config
from onnx_fuse.arrays import Array
from onnx_fuse.container import Container, digest_of, write
from onnx_fuse.cuda.source import source_root
from onnx_fuse.errors import ModelError
from onnx_fuse.files import opened_private, private_folder, read_private, written_private
from onnx_fuse.kernels import cublaslt, tuning
from onnx_fuse.program import template
from onnx_fuse.program.call import dtype_of
from onnx_fuse.program.formula import Formulas
from onnx_fuse.program.problem import Hardware
from onnx_fuse.runtime import collector, encoding
from onnx_fuse.runtime.plan import PlannedOpenProgram

if TYPE_CHECKING:
    from onnx_fuse.runtime.budget import Budget

Key = tuple[object, ...]
"""What programs of one list have in common: their open dimensions, the ranks and types of inputs,
and the inputs whose values are known."""


@dataclass(frozen=True)
class Origin:
    """What the graph of a session was made of: the cache's entry of it, and the model's file.

    `digest` is of the file and the graph, `made` names the made weights that the entry holds.
    """

    digest: str
    entry: Path
    model: Path
    made: frozenset[str]


class ProgramCache:
    """The folder of one model's programs; any number of processes read and write there.

    `arrays` gives the weights that lowering has made so far, by name; the names in `given` are
    there for every reader.
    """

    seconds = 0.02
    """What took longer to lower is written."""

    def __init__(
        self, folder: Path, arrays: Callable[[], Mapping[str, Array]], given: Collection[str] = ()
    ) -> None:
        self.folder, self._arrays, self.given = folder, arrays, frozenset(given)
        self._guards: dict[Path, Formulas | None] = {}  # of the files seen so far
        self._containers: dict[Path, Container | None] = {}
        self._folders: dict[Key, Path] = {}
        self._pruned = False
        self._lock = threading.Lock()

    def find(self, key: Key, numbers: Mapping[str, int]) -> PlannedOpenProgram | None:
        """The program of this key whose guards these sizes meet, None where there is none."""
        with self._lock:
            for path in self._paths(key):
                if self._meets(path, numbers) and (hit := self._read(path, numbers)) is not None:
                    return hit
        return None

    def has(self, key: Key, numbers: Mapping[str, int]) -> bool:
        """Whether `find` would find one, damage aside."""
        with self._lock:
            return any(self._meets(path, numbers) for path in self._paths(key))

    def keep(self, key: Key, planned: PlannedOpenProgram) -> None:
        """Write the program, and what of its made weights is not there yet.

        Warns where the cache cannot be written to.
        """
        header = json.dumps(planned.source.guards.data).encode()
        path = self._of(key) / f"{digest_of([header])}.program"
        try:
            if not private_folder(path.parent) or path.exists():
                return
            self._keep_weights(planned.weights)
            with collector.paused():  # nothing of what it makes stays
                body = _written(planned)
            with written_private(path) as draft:
                parts = (hashlib.sha256(header).digest(), hashlib.sha256(body).digest())
                draft.write_bytes(b"".join((*parts, _LENGTH.pack(len(header)), header, body)))
            if not self._pruned:
                self._pruned = True
                prune(config.CACHE_MB.value << 20)
        except (OSError, ModelError) as error:
            warnings.warn(f"the program is not cached: {error}", stacklevel=2)

    def _of(self, key: Key) -> Path:
        if key not in self._folders:
            self._folders[key] = self.folder / digest_of([repr(key).encode()])
        return self._folders[key]

    def _paths(self, key: Key) -> Iterator[Path]:
        try:
            names = os.listdir(self._of(key))
        except OSError:
            return
        for name in names:
            if name.endswith(".program"):
                yield self._of(key) / name

    def _meets(self, path: Path, numbers: Mapping[str, int]) -> bool:
        if path not in self._guards:
            self._guards[path] = _guards(path)
        guards = self._guards[path]
        return guards is not None and guards.hold(numbers)

    def _read(self, path: Path, numbers: Mapping[str, int]) -> PlannedOpenProgram | None:
        try:
            data = memoryview(read_private(path))
            start = _HEAD + _LENGTH.unpack_from(data, 64)[0]
            if hashlib.sha256(data[start:]).digest() != data[32:64]:
                raise ValueError("its digest is wrong")
            guards = self._guards[path]
            assert guards is not None
            planned = self._decoded(guards, data[start:], numbers)
            os.utime(self.folder)  # used now, for who removes what is old
        except FileNotFoundError:  # another process has removed it, or what it reads
            planned = None
        except _DAMAGE as error:
            warnings.warn(f"{path} is not used and is written anew: {error}", stacklevel=2)
            planned = None
        if planned is None:
            self._guards[path] = None  # as if it were not there, and so it is written anew
            with contextlib.suppress(OSError):
                path.unlink()
        return planned

    def _decoded(
        self, guards: Formulas, body: memoryview, numbers: Mapping[str, int]
    ) -> PlannedOpenProgram:
        """The program of a file; whatever the file says is checked, for these sizes."""
        length, words = _LENGTHS.unpack_from(body)
        text = json.loads(bytes(body[_LENGTHS.size : _LENGTHS.size + length]))
        data, stored = text["program"], body[_LENGTHS.size + length :]
        data["words"] = np.frombuffer(stored, np.int32, words)
        stored, arrays = stored[4 * words :], self._arrays()

        def array(name: str, dtype: str, shape: tuple[int, ...]) -> Array:
            kind, _, rest = name.partition(" ")
            if kind == "weight":
                content = arrays[rest] if rest in arrays else self._weight(rest)
            else:
                at, nbytes = map(int, rest.split())
                content = np.frombuffer(stored, np.uint8, nbytes, at).view(dtype_of(dtype))
                content = content.reshape(shape)
            if (content.dtype.name, content.shape) != (dtype, shape):
                raise ValueError(f"{rest} is of another shape")
            return content

        source = encoding.read(data, guards, array)
        whole = source.check_parts(numbers)
        return PlannedOpenProgram.read(source, text["layouts"], whole, numbers)

    # ---- what lowering made of weights ----

    def _keep_weights(self, arrays: Mapping[str, Array]) -> None:
        """Write those that are not there for every reader."""
        there = self.given | {n for c in self._made() for n in c.manifest["arrays"]}
        new = {name: array for name, array in arrays.items() if name not in there}
        if not new:
            return
        described = {name: [a.dtype.name, list(a.shape)] for name, a in new.items()}
        folder = self.folder / "weights"
        if not private_folder(folder):
            return
        with written_private(folder / f"{digest_of([repr(described).encode()])}.made") as draft:
            write(draft, {"arrays": described}, {}, new)

    def _made(self) -> Iterator[Container]:
        folder = self.folder / "weights"
        for path in sorted(folder.glob("*.made")):
            if path not in self._containers:
                try:
                    opened_private(path).close()
                    container = Container(path)
                    dict(container.manifest["arrays"])  # which another kind of file has not
                    self._containers[path] = container
                except (OSError, ModelError, LookupError, TypeError, ValueError):
                    self._containers[path] = None
            if (opened := self._containers[path]) is not None:
                yield opened

    def _weight(self, name: str) -> Array:
        """A made weight of the cache. Raises FileNotFoundError where nobody has it."""
        for container in self._made():
            if name in container.manifest["arrays"]:
                dtype, shape = container.manifest["arrays"][name]
                return container.tensor(name).view(dtype_of(dtype)).reshape(shape)
        raise FileNotFoundError(errno.ENOENT, "a made weight", name)


_DAMAGE = (
    *(OSError, ModelError, LookupError, ValueError, TypeError, AttributeError, OverflowError),
    *(RecursionError, struct.error),
)
"""What is raised for a file that is no program, whoever wrote it."""
_LENGTH = struct.Struct("<Q")
_LENGTHS = struct.Struct("<QQ")  # bytes of the text, number of words
_HEAD = 64 + _LENGTH.size  # digests of guards and program, bytes of the guards


def _guards(path: Path) -> Formulas | None:
    """The guards of a file, None of a damaged one."""
    try:
        with opened_private(path) as file:
            head = file.read(_HEAD)
            length = _LENGTH.unpack_from(head, 64)[0]
            header = file.read(min(length, 1 << 24))
        whole = hashlib.sha256(header).digest() == head[:32]
        return Formulas.read(json.loads(header), conditions=True) if whole else None
    except (OSError, ValueError, RecursionError, struct.error):
        return None


def _written(planned: PlannedOpenProgram) -> bytes:
    """The program as JSON, and the bytes of arrays that are no weights that lowering made."""
    names = {id(array): name for name, array in planned.weights.items()}
    stored: list[bytes] = []

    def store(array: Array) -> str:
        if id(array) in names:
            return f"weight {names[id(array)]}"
        stored.append(np.ascontiguousarray(array).tobytes())
        return f"array {sum(map(len, stored[:-1]))} {len(stored[-1])}"

    program = template.write(planned.source, store)
    words = np.array(program.pop("words"), np.int32)
    data = {"program": program, "layouts": planned.layouts()}
    text = json.dumps(data, separators=(",", ":")).encode()
    return b"".join((_LENGTHS.pack(len(text), len(words)), text, words.tobytes(), *stored))


# ---- names --------------------------------------------------------------------------------------


def folder_of(
    digest: str,
    hw: Hardware,
    math: str,
    prefs: Mapping[str, str] | None,
    state: Mapping[str, str] | None,
    memory: Budget | None = None,
) -> Path:
    """The folder of a graph's programs, named by all that lowering depends on."""
    chosen = (math, sorted((prefs or {}).items()), sorted((state or {}).items()), memory)
    around = (config.KERNEL.value, cublaslt.version(), tuning.stamp(hw))
    parts = (digest, asdict(hw), chosen, around, code_digest(), sys.implementation.cache_tag)
    return config.CACHE_DIR.value / "programs" / hashlib.sha256(repr(parts).encode()).hexdigest()


def prune(limit: int) -> None:
    """Remove the graphs, and the programs of a model, used longest ago while all hold more."""
    files: list[tuple[int, int, Path]] = []
    for folder in ("graphs", "programs"):
        for path in (config.CACHE_DIR.value / folder).glob("*"):
            with contextlib.suppress(OSError):  # another process removes them as well
                inside = [path, *path.rglob("*")] if path.is_dir() else [path]
                size = sum(p.stat().st_size for p in inside)
                last = path.stat().st_mtime_ns if path.is_dir() else path.stat().st_atime_ns
                files.append((last, size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files)[:-1]:
        if total <= limit:
            return
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        total -= size


@cache
def code_digest() -> str:
    """A digest of this package's code and of the packages that lowering depends on."""
    root = Path(__file__).resolve().parents[1]
    files = sorted(
        (str(path), stat.st_size, stat.st_mtime_ns)
        for folder in (root, source_root())
        for path, stat in _sources(folder)
    )
    others = [metadata.version(name) for name in ("onnx", "onnx-ir", "onnxscript", "numpy")]
    return hashlib.sha256(repr((files, others)).encode()).hexdigest()


def _sources(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    with os.scandir(folder) as items:
        for item in items:
            if item.is_dir() and item.name != "__pycache__":
                yield from _sources(Path(item.path))
            elif item.name.endswith((".py", ".cu", ".cuh")):
                yield Path(item.path), item.stat()

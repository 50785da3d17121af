"""Optimized graphs by the digest of their file, so that a later process starts from those.

An entry is a container (see there) of the graph that runs, with the weights that optimizing, a
precision or lowering made; those that are the file's own are read from the file. Its name is a
digest of the file's bytes, of what the session was asked for, and of this package's code. A damaged
entry counts as absent; the least recently used go where all of them hold too much.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse import config
from onnx_fuse.container import GRAPH, WEIGHTS, Container, digest_of_file, stamp, write
from onnx_fuse.errors import ModelError
from onnx_fuse.files import written
from onnx_fuse.onnx.common import MAP_TYPE
from onnx_fuse.onnx.load import reread
from onnx_fuse.onnx.save import outlined, stands_outside
from onnx_fuse.onnx.weights import PLACE, Place, read_places
from onnx_fuse.runtime.tensor import dtype_of

if TYPE_CHECKING:
    import onnx_ir as ir

_MADE = ("folded", "packed")  # what lowering makes of weights and keeps in the graph's `meta`


class Entry:
    """The place of one graph in the cache; whether it is there, `load` says."""

    def __init__(
        self, model: Path, digest: str, before: tuple[int, int], options: Mapping[str, Any]
    ) -> None:
        """`before` is the file's stamp from before its digest was taken."""
        self._model, self._before = model, before
        key = repr((digest, sorted(options.items()), _code()))
        name = hashlib.sha256(key.encode()).hexdigest()
        self._path = config.CACHE_DIR.value / "graphs" / f"{name}.graph"

    def load(self) -> ir.Model | None:
        """The graph as `store` was given it; None where it is not there, or not whole."""
        try:
            written = self._path.stat().st_mtime_ns
            os.utime(self._path, ns=(time.time_ns(), written))  # read now, for _prune
            container = Container(self._path)
            manifest = container.manifest
            for name, digest in manifest["external"].items():
                if digest_of_file(self._model.parent / name) != digest:
                    return None
            weights = _Weights(container, self._model)
            model = reread(bytes(container.member(GRAPH)), weights)
            for kind in _MADE:
                made = model.graph.meta[kind] = {}
                for name, source, arrays in manifest[kind]:
                    found = {key: weights.made(*place) for key, place in arrays.items()}
                    value = model.graph.initializers[source].const_value
                    made[name] = value, found if kind == "folded" else found[""]
            return model if self._unchanged() else None
        except (OSError, ModelError, LookupError, TypeError, ValueError, AttributeError):
            return None  # as if it were not there: it is written anew

    def _unchanged(self) -> bool:
        """Whether the file is still the one of the digest, and what was read of it is, too."""
        return stamp(self._model) == self._before

    def store(self, model: ir.Model) -> None:
        """Keep the graph in a thread of its own: nobody waits for it but the end of the process."""
        limit = config.CACHE_MB.value << 20
        graph = model.graph
        tensors: dict[str, np.ndarray[Any, Any]] = {}
        places: dict[str, tuple[str, int, int]] = {}
        stamps: dict[str, tuple[int, int]] = {}  # of the files beside the model, when read
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None or not stands_outside(tensor):
                continue
            place: Place | None = getattr(tensor, "meta", {}).get(PLACE)
            if place is None:
                tensors[name] = tensor.numpy()
                continue
            file, at, read = place
            places[name] = file, at, tensor.nbytes
            if read is not None and stamps.setdefault(file, read) != read:
                return
        names = {id(v.const_value): n for n, v in graph.initializers.items()}
        manifest: dict[str, Any] = {"places": places}
        for kind in _MADE:
            rows = manifest[kind] = []
            for name, (value, found) in graph.meta.get(kind, {}).items():
                arrays = found if kind == "folded" else {"": found}
                kept = {key: f"{kind} {name} {key}" for key in arrays}
                if id(value) in names:
                    tensors |= {kept[key]: array for key, array in arrays.items()}
                    described = {
                        key: [kept[key], array.dtype.name, list(array.shape)]
                        for key, array in arrays.items()
                    }
                    rows.append([name, names[id(value)], described])
        if sum(a.nbytes for a in tensors.values()) > limit // 2:
            return
        copy = model.clone()  # of the graph alone: the caller goes on with its own

        def work() -> None:
            try:
                beside = {name: self._model.parent / name for name in stamps}
                manifest["external"] = {n: digest_of_file(path) for n, path in beside.items()}
                same = all(stamp(path) == stamps[name] for name, path in beside.items())
                if not same or not self._unchanged():
                    return
                members = {GRAPH: outlined(copy)}
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with written(self._path) as draft:
                    write(draft, manifest, members, tensors)
                _prune(self._path.parent, limit)
            except (OSError, ModelError) as error:
                warnings.warn(f"the optimized graph is not kept: {error}", stacklevel=2)

        threading.Thread(target=work).start()


class _Weights:
    """Weights of an entry by name: in the entry, or where they stand in the model's files."""

    location = WEIGHTS

    def __init__(self, container: Container, model: Path) -> None:
        self._container = container
        places: Mapping[str, Any] = container.manifest["places"]
        self._arrays: dict[str, np.ndarray[Any, Any]] = {}
        own = {name: (at, n) for name, (file, at, n) in places.items() if not file}
        with model.open("rb") as file:
            self._arrays |= zip(own, read_places(file, list(own.values())), strict=True)
        maps: dict[str, mmap.mmap] = {}
        for name, (location, at, nbytes) in places.items():
            if not location:
                continue
            if location not in maps:
                with (model.parent / location).open("rb") as file:
                    maps[location] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._arrays[name] = np.frombuffer(maps[location], np.uint8, nbytes, at)

    def nbytes(self, tensor: Any) -> int:
        return self.array(tensor).nbytes

    def array(self, tensor: Any) -> np.ndarray[Any, Any]:
        if tensor.name in self._arrays:
            return self._arrays[tensor.name]
        return self._container.tensor(tensor.name)

    def place(self, tensor: Any) -> Place | None:
        return None  # what is taken from an entry is not kept again

    def made(self, stored: str, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
        """An array that lowering made."""
        return self._container.tensor(stored).view(dtype_of(dtype)).reshape(shape)


def keepable(model: ir.Model) -> bool:
    """Whether a graph is in its protobuf whole: onnx-ir has no types of maps."""
    return not any(MAP_TYPE in v.meta for v in (*model.graph.inputs, *model.graph.outputs))


@cache
def _code() -> str:
    """What tells this package's code, and that of those it works with, from another's."""
    root = Path(__file__).parent
    files = sorted(
        (str(path.relative_to(root)), found.st_size, found.st_mtime_ns)
        for path, found in _sources(root)
    )
    others = [metadata.version(name) for name in ("onnx", "onnx-ir", "onnxscript", "numpy")]
    return hashlib.sha256(repr((files, others)).encode()).hexdigest()


def _sources(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    with os.scandir(folder) as found:
        for item in found:
            if item.is_dir() and item.name != "__pycache__":
                yield from _sources(Path(item.path))
            elif item.name.endswith(".py"):
                yield Path(item.path), item.stat()


def _prune(folder: Path, limit: int) -> None:
    """Remove the entries used longest ago while all of them hold more than `limit` bytes."""
    found = []
    for path in folder.glob("*.graph"):
        with contextlib.suppress(OSError):  # another process removes them as well
            found.append((path.stat().st_atime_ns, path.stat().st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found)[:-1]:
        if total <= limit:
            return
        path.unlink(missing_ok=True)
        total -= size

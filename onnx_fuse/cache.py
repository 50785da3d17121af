"""Optimized graphs by the digest of their file, so that a later process starts from those.

An entry is a container (see there) of the graph that runs, with the weights that optimizing, a
precision or lowering made; those that are the file's own are read from the file. Its name is a
digest of the file's bytes, of what the session was asked for, and of this package's code. A damaged
entry counts as absent; the least recently used go where all of them hold too much.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_fuse import config
from onnx_fuse.container import GRAPH, Container, digest_of_file, stamp, write
from onnx_fuse.errors import ModelError
from onnx_fuse.files import opened_private, private_folder, written_private
from onnx_fuse.importer.save import serialized_without_weights
from onnx_fuse.ir.constants import MAP_TYPE
from onnx_fuse.runtime import graphs
from onnx_fuse.runtime.program_cache import Origin, code_digest, prune

if TYPE_CHECKING:
    import onnx_ir as ir


class Entry:
    """The place of one graph in the cache; whether it is there, `load` says."""

    def __init__(
        self, model: Path, digest: str, before: tuple[int, int], options: Mapping[str, Any]
    ) -> None:
        """`before` is the file's stamp from before its digest was taken."""
        self._model, self._before = model, before
        key = repr((digest, sorted(options.items()), code_digest()))
        name = hashlib.sha256(key.encode()).hexdigest()
        self._path = config.CACHE_DIR.value / "graphs" / f"{name}.graph"

    def load(self) -> tuple[ir.Model, Origin] | None:
        """The graph as `store` was given it; None where it is not there, or not whole."""
        try:
            with opened_private(self._path) as file:
                written = os.fstat(file.fileno()).st_mtime_ns
            os.utime(self._path, ns=(time.time_ns(), written))  # read now, for prune
            container = Container(self._path)
            manifest = container.manifest
            for name, digest in manifest["external"].items():
                if digest_of_file(self._model.parent / name) != digest:
                    return None
            model = graphs.opened(container, self._model)
            return (model, self._origin(manifest)) if self._unchanged() else None
        except (OSError, ModelError, LookupError, TypeError, ValueError, AttributeError):
            return None  # as if it were not there: it is written anew

    def _origin(self, manifest: Mapping[str, Any]) -> Origin:
        files = manifest["files"][GRAPH], sorted(manifest["external"].items())
        names = frozenset(graphs.derived_names(manifest))
        return Origin(repr((self._path.name, files)), self._path, self._model, names)

    def _unchanged(self) -> bool:
        """Whether the file is still the one of the digest, and what was read of it is, too."""
        return stamp(self._model) == self._before

    def store(self, model: ir.Model) -> Future[Origin | None]:
        """Keep the graph in a thread of its own: nobody waits for it but the end of the process.

        The result is None where it is not kept.
        """
        limit = config.CACHE_MB.value << 20
        parts = graphs.parts(model, beside=True)
        stored: Future[Origin | None] = Future()
        if parts is None or sum(a.nbytes for a in parts.tensors.values()) > limit // 2:
            stored.set_result(None)
            return stored
        copy = model.clone()  # of the graph alone: the caller goes on with its own
        manifest, stamps = parts.manifest, parts.stamps

        def work() -> Origin | None:
            try:
                beside = {name: self._model.parent / name for name in stamps}
                manifest["external"] = {n: digest_of_file(path) for n, path in beside.items()}
                same = all(stamp(path) == stamps[name] for name, path in beside.items())
                if not same or not self._unchanged():
                    return None
                members = {GRAPH: serialized_without_weights(copy)}
                if not private_folder(self._path.parent):
                    return None
                with written_private(self._path) as draft:
                    write(draft, manifest, members, parts.tensors)
                prune(limit)
                return self._origin(Container(self._path).manifest)
            except (OSError, ModelError) as error:
                warnings.warn(f"the optimized graph is not cached: {error}", stacklevel=2)
                return None

        def told() -> None:
            origin = None
            try:
                origin = work()
            finally:
                stored.set_result(origin)

        threading.Thread(target=told).start()
        return stored


def keepable(model: ir.Model) -> bool:
    """Whether a graph is in its protobuf whole: onnx-ir has no types of maps."""
    return not any(MAP_TYPE in v.meta for v in (*model.graph.inputs, *model.graph.outputs))

"""Optimized graphs by the digest of their file, so that a later process starts from those.

An entry is a container (see there) of the graph that runs, with the weights that optimizing, a
precision or lowering made; those that are the file's own are read from the file. Its name is a
digest of the file's bytes, of what the session was asked for, of this package's code and of what
plugins have registered. A damaged entry counts as absent; the least recently used go where all of
them hold too much.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onnx_fuse import config
from onnx_fuse.container import GRAPH, Container, digest_of_file, stamp, write
from onnx_fuse.errors import ModelError
from onnx_fuse.files import opened_private, private_folder, written_private
from onnx_fuse.importer.save import inline, serialized_without_weights
from onnx_fuse.importer.shapes import symbols_apart
from onnx_fuse.ir.constants import FUSE, MAP_TYPE
from onnx_fuse.ops import OPS
from onnx_fuse.ops.patterns import body_rule
from onnx_fuse.ops.rules import ADDED
from onnx_fuse.runtime import graphs
from onnx_fuse.runtime.program_cache import Origin, code_digest, prune
from onnx_fuse.runtime.recurrences import survivable

if TYPE_CHECKING:
    import onnx_ir as ir

T = TypeVar("T")


class Entry:
    """The place of one graph in the cache; whether it is there, `load` says."""

    def __init__(
        self, model: Path, digest: str, before: tuple[int, int], options: Mapping[str, Any]
    ) -> None:
        """`before` is the file's stamp from before its digest was taken."""
        self._model, self._before = model, before
        key = repr((digest, sorted(options.items()), code_digest(), _registered()))
        name = hashlib.sha256(key.encode()).hexdigest()
        self._path = config.CACHE_DIR.value / "graphs" / f"{name}.graph"

    def load(self) -> tuple[ir.Model, Origin] | None:
        """The graph as `store` was given it; None where it is not there, or not whole."""
        return self._read(lambda c: (graphs.opened(c, self._model), self._origin(c.manifest)))

    def portable(self) -> graphs.DualGraph | None:
        """The graph as onnxruntime takes it, where `store` was asked for that, as `load`."""
        return self._read(lambda container: graphs.DualGraph.of_container(container, self._model))

    def _read(self, form: Callable[[Container], T]) -> T | None:
        try:
            with opened_private(self._path) as file:
                written = os.fstat(file.fileno()).st_mtime_ns
            os.utime(self._path, ns=(time.time_ns(), written))  # read now, for prune
            container = Container(self._path)
            beside = container.manifest["external"].items()
            same = all(digest_of_file(self._model.parent / name) == d for name, d in beside)
            result = form(container) if same else None
            return result if self._unchanged() else None
        except (OSError, ModelError, LookupError, TypeError, ValueError, AttributeError):
            return None  # as if it were not there: it is written anew

    def _origin(self, manifest: Mapping[str, Any]) -> Origin:
        files = manifest["files"][GRAPH], sorted(manifest["external"].items())
        names = frozenset(graphs.derived_names(manifest))
        return Origin(repr((self._path.name, files)), self._path, self._model, names)

    def _unchanged(self) -> bool:
        """Whether the file is still the one of the digest, and what was read of it is, too."""
        return stamp(self._model) == self._before

    def store(self, model: ir.Model, *, portable: bool = False) -> Future[Origin | None]:
        """Keep the graph in a thread of its own: nobody waits for it but the end of the process.

        The result is None where it is not kept. With `portable` the graph is kept in the form for
        onnxruntime, too, so that this does not inline the bodies of fused operators at each start.
        """
        limit = config.CACHE_MB.value << 20
        of = partial(graphs.parts, beside=True, limit=limit // 2)
        parts = of(model) if _keepable(model) else None
        flat = _inlined(model) if portable and parts else None
        more = parts if flat is None else of(flat)
        stored: Future[Origin | None] = Future()
        if parts is None or more is None:
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
                if flat is not None:
                    members[graphs.PORTABLE] = serialized_without_weights(flat, shapes=False)
                if not private_folder(self._path.parent):
                    return None
                with written_private(self._path) as draft:
                    whole = write(draft, manifest, members, more.tensors | parts.tensors)
                prune(limit)
                return self._origin(whole)
            except (OSError, ModelError) as error:
                warnings.warn(f"the optimized graph is not cached: {error}", stacklevel=2)
                return None

        def told() -> None:
            origin = None
            try:
                origin = work()
            finally:
                stored.set_result(origin)

        threading.Thread(target=told, name="onnx_fuse cache").start()
        return stored


def _inlined(model: ir.Model) -> ir.Model:
    """The graph without fused operators, tidied: onnxruntime makes the same of it."""
    from onnx_fuse.rewrite import tidy_inlined  # what is kept is read without its rules

    flat = inline(model, lambda node: False)
    with symbols_apart(flat):
        tidy_inlined(flat)
    return survivable(flat)


def _keepable(model: ir.Model) -> bool:
    """Whether the protobuf holds the graph whole, and the key names all that made it.

    onnx-ir has no types of maps, and a rule of a user's own may do anything.
    """
    if any(not rule.apply.__qualname__.startswith(body_rule.__name__) for rule in ADDED):
        return False
    return not any(MAP_TYPE in v.meta for v in (*model.graph.inputs, *model.graph.outputs))


def _registered() -> list[tuple[object, ...]]:
    """The operators of plugins with their bodies, and the levels of the rules made of these."""
    bodies = [(*key, op.body) for key, op in OPS.items() if key[0] not in ("", FUSE)]
    return [*sorted(bodies), *sorted((rule.name, rule.level) for rule in ADDED)]

"""Programs and kernels for shapes that have not come yet, made by processes of low priority.

Such a process (`precompile_worker`) lowers for this GPU's description and compiles, and never
touches the GPU. It writes its results to the cache, where a run that needs them finds them. It ends
when it has been idle for a while, and when the process that started it ends in any way.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from onnx_fuse import config
from onnx_fuse.container import GRAPH, digest_of, write
from onnx_fuse.importer.save import serialized_without_weights
from onnx_fuse.program.call import Shapes
from onnx_fuse.program.size import size_class
from onnx_fuse.runtime import collector, graphs
from onnx_fuse.runtime.program_cache import Origin
from onnx_fuse.runtime.specialize import Specializer, Symbols

FAR = 512
"""Size up to which programs are made ahead of time, whatever sizes have come."""
WORTH = 0.1
"""Seconds that a new shape's program and kernels must have taken, for others to be made ahead."""
CORES = 4
"""Fewer would be taken from the runs; with more there is a process for each so many."""
PROCESSES = 4
"""At most, since NVRTC compiles one kernel after another in a process, whatever its threads."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The processor time that a container may take, and in which time, in microseconds."""
LARGEST = 4 << 30
"""Bytes of weights that all those processes may hold."""

_LIVING: set[int] = set()  # processes of all sessions
_Wish: TypeAlias = tuple[Shapes, dict[str, int]]  # how far the sizes of some symbols go


def processes(specializer: Specializer) -> int:
    """How many processes may prepare programs of the model beside this one."""
    interpreter = bool(sys.executable) and not getattr(sys, "frozen", False)
    if not interpreter or not hasattr(os, "memfd_create"):
        return 0
    weights = specializer.model.graph.initializers.values()
    nbytes = sum(v.const_value.nbytes for v in weights if v.const_value is not None)
    free = max(1, PROCESSES - len(_LIVING))
    return min(free, int(_cores()) // CORES, LARGEST // max(1, nbytes))


def _cores() -> float:
    """The processors that this process may use, a container's limit included."""
    cores = float(len(os.sched_getaffinity(0)))
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = QUOTA.read_text().split()
        cores = min(cores, int(quota) / int(period))  # "max" is no limit
    return cores


class Precompiler:
    """Has the other size classes prepared of the dimensions that vary from run to run.

    The one dimension behind the first axis that a model leaves free, the length of its sequences,
    is expected to vary from the first run on; any other once it has had two sizes.

    A model that no file of the cache holds gets its name there from its content, so that its
    programs are kept as well.
    """

    def __init__(self, specializer: Specializer) -> None:
        self._specializer = weakref.ref(specializer)
        self._worth = False
        self._first: dict[str, int] = {}
        self._varying: set[str] = set()
        self._seen: dict[object, int] = {}
        self._wanted: list[_Wish] = []
        self._changed = threading.Condition()
        self._busy = False  # whether a thread hands over what is wanted
        self.children: list[_Child] = []

    def expect(self, shapes: Shapes, seconds: float) -> None:
        """Prepare what may come after these shapes, whose program took so long to make.

        Nothing happens until a program has taken WORTH, here or before it was in the cache.
        """
        specializer = self._specializer()
        if specializer is None:
            return
        numbers = specializer.numbers(shapes)
        if not numbers:
            return  # all sizes are fixed: there is one program, which has been made
        self._varying |= likely_to_vary(specializer.symbols(shapes))
        for symbol, number in numbers.items():
            if self._first.setdefault(symbol, number) != number:
                self._varying.add(symbol)
        begins = max(seconds, specializer.seconds) > WORTH and not self._worth
        self._worth |= begins
        if not self._worth:
            return
        sizes = {}
        for symbol in sorted(self._varying & numbers.keys()):
            others = tuple(size_class(n) for name, n in numbers.items() if name != symbol)
            far = largest_size(numbers[symbol])
            if self._seen.get((symbol, others), 0) < far:
                self._seen[symbol, others] = far
                sizes[symbol] = far
        if not (sizes or begins):
            return
        with self._changed:
            self._wanted.insert(0, (shapes, sizes))  # the latest first
            if not self._busy:
                self._busy = True
                threading.Thread(
                    target=self._hand_over, name="onnx_fuse ahead", daemon=True
                ).start()

    def wait(self) -> None:
        """Return when all that was wanted is prepared, and the processes have ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)
        for child in self.children:
            child.say({"end": True})
        for child in self.children:
            child.ended.wait()

    def _hand_over(self) -> None:
        """A thread's: tell the process, which is started if need be, what is wanted."""
        try:
            while (request := self._next()) is not None:
                specializer = self._specializer()
                if specializer is not None:
                    self._tell(specializer, *request)
        except BaseException:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
            if threading.main_thread().is_alive():  # an ending process starts no thread anymore
                raise

    def _next(self) -> _Wish | None:
        with self._changed:
            if self._wanted:
                return self._wanted.pop(0)
            self._busy = False
            self._changed.notify_all()
            return None

    def _tell(self, specializer: Specializer, shapes: Shapes, sizes: dict[str, int]) -> None:
        origin = None if specializer.origin is None else specializer.origin.result()
        graph: _GraphCopy | None = None
        if specializer.programs is None:
            graph = _GraphCopy.of(specializer)
            if graph is None:
                return  # too large
            specializer.cache_under(graph.digest)
        if not sizes:
            return
        self.children = [child for child in self.children if not child.ended.is_set()]
        if not self.children:
            parts = processes(specializer)
            if not parts or not missing(specializer, shapes, sizes):
                return
            if origin is None and graph is None and (graph := _GraphCopy.of(specializer)) is None:
                return
            with contextlib.nullcontext() if graph is None else graph.open():
                for part in range(parts):
                    child = _Child(specializer, origin, graph, (part, parts))
                    weakref.finalize(self, child.end)
                    self.children.append(child)
        plain = {name: [list(shape), dtype] for name, (shape, dtype) in shapes.items()}
        for child in self.children:
            child.say({"shapes": plain, "sizes": sizes})


def likely_to_vary(symbols: Symbols) -> set[str]:
    """The symbol of the only open dimension behind the first axis; none where there are several.

    To prepare each of several (an image's height and width) by itself would be work in vain where
    they change together.
    """
    leading = {symbol for _, axis, symbol in symbols if not axis}
    inner = {symbol for _, _, symbol in symbols} - leading
    return inner if len(inner) == 1 else set()


def nearest_first(number: int, far: int, part: int = 0, parts: int = 1) -> list[int]:
    """All sizes up to `far`: class by class, those nearest to the number first.

    Of `parts` processes each takes every so-manyth class.
    """
    classes, last = [], 0
    while last < far:
        first, last = size_class(last + 1)
        classes.append((first, last))
    classes.sort(key=lambda pair: abs(pair[1] - number))
    return [size for first, last in classes[part::parts] for size in range(last, first - 1, -1)]


def missing(specializer: Specializer, shapes: Shapes, sizes: dict[str, int]) -> bool:
    """Whether some of the sizes wanted has no program yet."""
    key, numbers = specializer.key(shapes, {}), specializer.numbers(shapes)
    return any(
        not specializer.has(key, numbers | {symbol: size})
        for symbol, far in sizes.items()
        for size in nearest_first(numbers[symbol], far)
    )


class _GraphCopy:
    """A graph with its weights, for a process to read as a file that is in memory alone."""

    def __init__(self, data: bytes, parts: graphs.GraphParts) -> None:
        self._data, self._parts = data, parts
        arrays = (parts.tensors[n] for n in parts.manifest["own"])
        dense = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
        self.digest = digest_of([data, *dense])
        self.file = -1

    @classmethod
    def of(cls, specializer: Specializer) -> _GraphCopy | None:
        """A copy of the specializer's model, or None where its weights are too large."""
        with collector.paused():  # nothing of the clone stays
            with specializer.lock:
                parts = graphs.parts(specializer.model, beside=False, limit=LARGEST)
                if parts is None:
                    return None
                graph = specializer.model.clone()
            parts.manifest["own"] = [n for n in graph.graph.initializers if n in parts.tensors]
            data = serialized_without_weights(graph)
            del graph
        return cls(data, parts)

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Within the block the file exists."""
        self.file = os.memfd_create("onnx_fuse")
        try:
            write(self.path, self._parts.manifest, {GRAPH: self._data}, self._parts.tensors)
            yield
        finally:
            os.close(self.file)

    @property
    def path(self) -> Path:
        """The path by which this process, or one that inherits the open file, opens it."""
        return Path(f"/proc/self/fd/{self.file}")


class _Child:
    """A process that prepares programs, until it has `ended`."""

    def __init__(
        self,
        specializer: Specializer,
        origin: Origin | None,
        copy: _GraphCopy | None,
        part: tuple[int, int],
    ) -> None:
        """The graph is the cache's entry that `origin` names, or the copy."""
        assert specializer.programs is not None
        if copy is not None:
            graph, model = copy.path, None
        else:
            assert origin is not None
            graph, model = origin.entry, str(origin.model)
        job = {
            "graph": str(graph),
            "model": model,
            "folder": str(specializer.programs.folder),
            "given": sorted(specializer.programs.given),
            "hardware": asdict(specializer.hw),
            "math": specializer.math,
            "prefs": specializer.prefs,
            "memory": specializer.memory,
            "state": specializer.state,
            "part": part,
        }
        path = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "onnx_fuse.runtime.precompile_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=None if config.DEBUG.value else subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": path,
                "PYTHONSAFEPATH": "1",  # the current folder may have another onnx_fuse in it
                "CUDA_VISIBLE_DEVICES": "",
                "ONNX_FUSE_DUMP": "",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            pass_fds=() if copy is None else (copy.file,),
            start_new_session=True,  # Ctrl-C is for this process
        )
        self.ended = threading.Event()
        _LIVING.add(self._process.pid)
        threading.Thread(target=self._reap, name="onnx_fuse ahead", daemon=True).start()
        self.say(job)

    def _reap(self) -> None:
        self._process.wait()
        _LIVING.discard(self._process.pid)
        self.ended.set()

    def say(self, message: dict[str, Any]) -> None:
        """Write a line to it, if it is still there to read it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def end(self) -> None:
        """Have it end at once."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def largest_size(number: int) -> int:
    """The largest size to prepare once this size has come: FAR, or one class more."""
    return max(FAR, size_class(2 * number)[1])

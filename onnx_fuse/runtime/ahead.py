"""Programs and kernels for shapes that have not come yet, made in the background."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from onnx_fuse.cuda import jit
from onnx_fuse.errors import OnnxFuseError
from onnx_fuse.lower.walk import Shapes
from onnx_fuse.program.call import NeedsValues
from onnx_fuse.program.problem import Launch
from onnx_fuse.program.size import class_of
from onnx_fuse.runtime.specialize import Interrupted, Specializer

COMPILING, WORKERS = 2, 4
"""Programs whose kernels are compiled at once, and threads for each."""
PAUSE = 0.02
"""Seconds after which a program is tried again that gave way to a run."""


class Ahead:
    """Prepares the other size classes of the dimensions that vary from run to run.

    One thread lowers, and gives up what it does when a run needs a program; others compile.
    """

    def __init__(self, specializer: Specializer) -> None:
        self._specializer = weakref.ref(specializer)
        self._arch = specializer.hw.arch
        self._first: dict[str, int] = {}
        self._varying: set[str] = set()
        self._seen: set[object] = set()
        self._done = threading.Condition()
        self._lowering = _Queue(1, self._lower, self._done)
        self._compiling = _Queue(COMPILING, self._compile, self._done)

    def expect(self, shapes: Shapes) -> None:
        """Prepare what may come after these shapes, once some dimension has had two sizes."""
        specializer = self._specializer()
        if specializer is None:
            return
        symbols = specializer.symbols(shapes)
        numbers = {symbol: shapes[name][0][axis] for name, axis, symbol in symbols}
        for symbol, number in numbers.items():
            if self._first.setdefault(symbol, number) != number:
                self._varying.add(symbol)
        for symbol in self._varying & numbers.keys():
            others = tuple(class_of(n) for name, n in numbers.items() if name != symbol)
            for other in specializer.like(shapes, symbol):
                size = next(other[name][0][axis] for name, axis, own in symbols if own == symbol)
                key = symbol, size, others
                if key not in self._seen:
                    self._seen.add(key)
                    self._lowering.put(other)

    def wait(self) -> None:
        """Return when nothing is left to prepare."""
        with self._done:
            self._done.wait_for(lambda: not self._lowering.busy and not self._compiling.busy)

    def _lower(self, shapes: Shapes) -> None:
        specializer = self._specializer()
        if specializer is None:
            return
        try:
            program = specializer.prepare(shapes)
        except Interrupted:
            time.sleep(PAUSE)
            self._lowering.put(shapes)
            return
        except (OnnxFuseError, NeedsValues):
            return  # that shape says why when it comes
        if program is not None:
            calls = (*program.setup, *program.calls)
            self._compiling.put(tuple(x for call in calls for x in call.launches))

    def _compile(self, launches: tuple[Launch, ...]) -> None:
        jit.compile_all(launches, self._arch, workers=WORKERS, progress=False)


class _Queue:
    """Work for a few threads, which begin with the first item.

    A thread asks for its next item when it has done one: a process that ends waits for what is
    under way, not for all that was put in.
    """

    def __init__(
        self, workers: int, work: Callable[[Any], None], done: threading.Condition
    ) -> None:
        self._workers, self._work, self._done = workers, work, done
        self._items: deque[Any] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self.busy = 0
        """Threads at work."""

    def put(self, item: Any) -> None:
        with self._done:
            self._items.append(item)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._workers, "onnx_fuse")
            if self.busy < self._workers:
                self.busy += 1
                self._go_on()

    def _go_on(self) -> None:
        assert self._pool is not None
        try:
            self._pool.submit(self._one)
        except RuntimeError:  # the process ends
            self.busy -= 1

    def _one(self) -> None:
        with self._done:
            item = self._items.popleft() if self._items else None
        try:
            if item is not None:
                self._work(item)
        finally:
            with self._done:
                if self._items:
                    self._go_on()
                else:
                    self.busy -= 1
                self._done.notify_all()

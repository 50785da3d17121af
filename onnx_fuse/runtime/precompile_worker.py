"""`python -m onnx_fuse.runtime.precompile_worker`: the process that prepares programs for
`precompile`.

It reads lines of JSON: first what to lower and for which GPU, then shapes. Programs and kernels go
to the cache. At the end of its input it ends at once; when it was told that nothing more comes, or
when nothing came for IDLE seconds, it ends when all is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from onnx_fuse.container import Container
from onnx_fuse.cuda import nvrtc
from onnx_fuse.errors import OnnxFuseError
from onnx_fuse.lower.walk import Shapes
from onnx_fuse.program.call import NeedsValues, Program
from onnx_fuse.program.problem import Hardware
from onnx_fuse.runtime import graphs
from onnx_fuse.runtime.plan import PlannedOpenProgram
from onnx_fuse.runtime.precompile import nearest_first
from onnx_fuse.runtime.program_cache import Key, ProgramCache
from onnx_fuse.runtime.specialize import Specializer

IDLE = 10.0
"""Seconds without anything to do after which the process ends."""
NICE = 10
"""How far it stands behind other processes."""

Request = tuple[Shapes, str, int]
"""Shapes, and the symbol that is to have other sizes up to some."""


class Requests:
    """What is asked for on lines that a thread reads; the latest comes first."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines, self._waiting, self._last = lines, deque[Request](), False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._lines:
            message = json.loads(line)
            given = message.get("shapes", {}).items()
            shapes = {name: (tuple(shape), dtype) for name, (shape, dtype) in given}
            with self._changed:
                self._last |= message.get("end", False)
                for symbol, far in message.get("sizes", {}).items():
                    self._waiting.appendleft((shapes, symbol, far))
                self._changed.notify()
        os._exit(0)  # whoever asked is gone

    @property
    def waiting(self) -> bool:
        """Whether there is a next one at once."""
        return bool(self._waiting)

    def next(self) -> Request | None:
        """The next, None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._last, IDLE)
            return self._waiting.popleft() if self._waiting else None

    def put_back(self, wish: Request) -> None:
        """Something newer comes first."""
        with self._changed:
            self._waiting.append(wish)


def prepare(
    specializer: Specializer, wish: Request, wishes: Requests, part: int = 0, parts: int = 1
) -> None:
    """Lower for every size that no program holds for yet, until something newer is wished for.

    Of `parts` processes this is one.
    """
    shapes, symbol, far = wish
    key, numbers = specializer.key(shapes, {}), specializer.numbers(shapes)
    for size in nearest_first(numbers[symbol], far, part, parts):
        if wishes.waiting:
            wishes.put_back(wish)
            return
        if not specializer.has(key, numbers | {symbol: size}):
            with contextlib.suppress(OnnxFuseError, NeedsValues):  # said when that shape comes
                specializer.of(specializer.changed(shapes, {symbol: size}))
        if not specializer.is_open:
            return  # each shape is lowered by itself


class CompilingCache(ProgramCache):
    """Programs that are written once their kernels are compiled."""

    seconds = 0.0
    arch: str
    _turns = threading.Lock()

    def keep(self, key: Key, kept: PlannedOpenProgram) -> None:
        program: Program = kept.source.at(kept.largest)
        launches = [x for call in (*program.setup, *program.calls) for x in call.launches]
        with self._turns:
            nvrtc.compile_all(launches, self.arch, workers=1)
        super().keep(key, kept)


def main() -> None:
    """Do what the lines of standard input ask for."""
    os.nice(NICE)
    lines = sys.stdin.buffer
    first = lines.readline()
    if not first:
        return  # whoever started it is gone
    job = json.loads(first)
    wishes = Requests(lines)
    model = None if job["model"] is None else Path(job["model"])
    hw = dict(job["hardware"], flops=tuple((kind, rate) for kind, rate in job["hardware"]["flops"]))
    graph = graphs.opened(Container(job["graph"]), model)
    specializer = Specializer(
        graph,
        Hardware(**hw),
        math=job["math"],
        prefs=job["prefs"],
        state=job["state"],
        memory=job["memory"],
    )
    programs = CompilingCache(Path(job["folder"]), specializer.made, job["given"])
    programs.arch = specializer.hw.arch
    specializer.cache_in(programs)
    while (wish := wishes.next()) is not None:
        prepare(specializer, wish, wishes, *job["part"])
    specializer.written()
    os._exit(0)  # a thread still waits for lines


if __name__ == "__main__":
    main()

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
from onnx_fuse.program.call import NeedsValues, Program, Shapes
from onnx_fuse.program.problem import Hardware
from onnx_fuse.runtime import graphs
from onnx_fuse.runtime.plan import PlannedOpenProgram
from onnx_fuse.runtime.precompile import nearest_first
from onnx_fuse.runtime.program_cache import Key, ProgramCache
from onnx_fuse.runtime.specialize import Specializer

IDLE = 10.0
"""Seconds without anything to do after which the process ends."""

LOWEST = 19
"""How far its work stands behind other processes."""
NICE = 10
"""How far its session does, where Linux weighs sessions whatever their processes ask for."""
WRITING = threading.Lock()
"""Held while a program is written, so that no part of it is left where the process ends."""

Request = tuple[Shapes, str, int]
"""Shapes, and the symbol that is to have other sizes up to some."""


class Requests:
    """The requests on lines that a thread reads; the latest one comes first."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines, self._waiting, self._last = lines, deque[Request](), False
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._lines:
            message = json.loads(line)
            items = message.get("shapes", {}).items()
            shapes = {name: (tuple(shape), dtype) for name, (shape, dtype) in items}
            with self._changed:
                self._last |= message.get("end", False)
                for symbol, far in message.get("sizes", {}).items():
                    self._waiting.appendleft((shapes, symbol, far))
                self._changed.notify()
        with WRITING:
            os._exit(0)  # whoever asked is gone

    @property
    def waiting(self) -> bool:
        """Whether a request is waiting."""
        return bool(self._waiting)

    def next(self) -> Request | None:
        """The next request; None when no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._last, IDLE)
            return self._waiting.popleft() if self._waiting else None

    def put_back(self, request: Request) -> None:
        """Do this request later, since a newer one comes first."""
        with self._changed:
            self._waiting.append(request)


def prepare(
    specializer: Specializer, request: Request, requests: Requests, part: int = 0, parts: int = 1
) -> None:
    """Lower for every size that no program holds for yet, until a newer request comes.

    Of `parts` processes this is one.
    """
    shapes, symbol, far = request
    key, numbers = specializer.key(shapes, {}), specializer.numbers(shapes)
    for size in nearest_first(numbers[symbol], far, part, parts):
        if requests.waiting:
            requests.put_back(request)
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

    def keep(self, key: Key, planned: PlannedOpenProgram) -> None:
        program: Program = planned.source.at(planned.largest)
        launches = [x for call in (*program.setup, *program.calls) for x in call.launches]
        with self._turns:
            nvrtc.compile_all(launches, self.arch, workers=1)
        with WRITING:
            super().keep(key, planned)


def _stand_back() -> None:
    """Let this thread, and those it starts, run where a processor has nothing better to do."""
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
    with contextlib.suppress(OSError):  # there are no such weights
        Path("/proc/self/autogroup").write_text(str(NICE))


def main() -> None:
    """Do what the lines of standard input ask for."""
    lines = sys.stdin.buffer
    first = lines.readline()
    if not first:
        return  # whoever started it is gone
    job = json.loads(first)
    requests = Requests(lines)
    _stand_back()  # but for the thread that waits for the end
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
    while (request := requests.next()) is not None:
        prepare(specializer, request, requests, *job["part"])
    specializer.written()
    os._exit(0)  # a thread still waits for lines


if __name__ == "__main__":
    main()

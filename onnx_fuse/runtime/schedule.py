"""Program -> Segments: runs of kernel calls that one CUDA graph holds, between host calls."""

from __future__ import annotations

from dataclasses import dataclass

from onnx_fuse.llir import Call, Program


@dataclass(frozen=True)
class Segment:
    """Calls `first` and on: kernel calls, or one call that onnxruntime runs."""

    first: int
    calls: tuple[Call, ...]

    @property
    def host(self) -> bytes:
        """The model of a host call, empty for kernel calls."""
        return self.calls[0].host


def segments(program: Program) -> tuple[Segment, ...]:
    """The calls in order, cut before and after each host call; calls without launches left out."""
    found: list[Segment] = []
    run: list[Call] = []
    start = 0
    for i, call in enumerate(program.calls):
        if call.host:
            if run:
                found.append(Segment(start, tuple(run)))
            found.append(Segment(i, (call,)))
            run, start = [], i + 1
        else:
            run.append(call)
    if run:
        found.append(Segment(start, tuple(run)))
    return tuple(found)

"""Runs in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Times are microseconds. A process is a device or the host, a thread is a stream or a lane of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse import __version__
from onnx_fuse.report.files import write_json
from onnx_fuse.report.memory import live_bytes
from onnx_fuse.runtime.plan import plan

if TYPE_CHECKING:
    from onnx_fuse.distributed.world import World
    from onnx_fuse.profile import Profile
    from onnx_fuse.program.call import Program
    from onnx_fuse.runtime.timeline import Communication

HOST, GPU, STEP = 1, 2, 3
"""Processes of a trace; STEP is a training step that was profiled by itself."""
_APART = 10
"""The distance between the process numbers of one rank and of the next."""
Event = dict[str, Any]


def write(path: Path, title: str, events: Sequence[Event]) -> None:
    """Write events as a trace. Raises ModelError if the file cannot be written."""
    about = {"title": title, "onnx-fuse": __version__}
    write_json(path, {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": about})


def of_profile(
    profile: Profile, program: Program | None = None, *, process: int = HOST
) -> list[Event]:
    """The events of a run: onnxruntime's own, or the kernel calls with the memory of their plan.

    Those of onnxruntime are the `process`'s.
    """
    if profile.calls:
        return list(_of_calls(profile, program))
    return list(_of_onnxruntime(profile, process))


def _of_onnxruntime(profile: Profile, process: int) -> Iterator[Event]:
    yield from named(process, "onnxruntime" if process == HOST else "onnxruntime, a step by itself")
    threads: dict[int, int] = {}
    for event in profile.events:
        thread = threads.setdefault(event["tid"], len(threads) + 1)
        name = event["name"].removesuffix("_kernel_time")
        about = event.get("args", {})
        op = about.get("op_name")
        title = f"{op} {name}" if op else name
        yield span(title, event["ts"], event["dur"], process, thread, event.get("cat", ""), about)
        if "mem_bytes_in_use" in about:
            at = event["ts"] + event["dur"]
            yield counter("memory in use", at, {"bytes": int(about["mem_bytes_in_use"])}, process)
    for number in threads.values():
        yield thread_name(process, number, f"thread {number}")


def _of_calls(profile: Profile, program: Program | None) -> Iterator[Event]:
    yield from named(GPU, "GPU")
    yield thread_name(GPU, 1, profile.lane)
    live: dict[int, int] = {}
    if program is not None:
        live = {
            id(call): size
            for call, size in zip(program.calls, live_bytes(program, plan(program)), strict=True)
        }
    for piece, (call, _) in zip(profile.spans, profile.calls, strict=True):
        about = {
            "nodes": list(piece.nodes), "flops": call.flops, "bytes": call.bytes, "why": call.why,
            "grids": ["x".join(map(str, launch.grid)) for launch in call.launches],
        }  # fmt: skip
        start = 1e6 * piece.start
        if id(call) in live:
            yield counter("arena in use", start, {"bytes": live[id(call)]}, GPU)
        yield span(piece.op, start, 1e6 * piece.seconds, GPU, 1, "kernel", about)


def of_communication(communication: Communication, end: float) -> Iterator[Event]:
    """The collectives of a step on a GPU, which ended at `end`, and when nothing hid them."""
    last = max((x.end for x in communication.exchanges), default=0.0)
    yield from named(GPU, "GPU")
    yield thread_name(GPU, 1, "collectives of the last step")
    yield thread_name(GPU, 2, "waits for them")
    for x in communication.exchanges:
        about = {"bucket": x.bucket, "bytes": x.nbytes}
        start = end + 1e6 * (x.start - last)
        yield span(x.kind, start, 1e6 * (x.end - x.start), GPU, 1, "collective", about)
    for start, stop in communication.waits:
        yield span(
            "wait", end + 1e6 * (start - last), 1e6 * (stop - start), GPU, 2, "collective", {}
        )


def of_ranks(world: World, events: Sequence[Event]) -> list[Event]:
    """The events of all ranks, each with processes of its own; all ranks call it together.

    Their times count from one moment, such as a barrier.
    """
    packed = np.frombuffer(json.dumps(list(events)).encode(), np.uint8)
    sizes = world.all_gather({"": np.array([packed.size])})[""]
    parts = np.split(world.all_gather({"": packed})[""], np.cumsum(sizes)[:-1])
    merged: list[Event] = []
    for rank, part in enumerate(parts):
        for event in json.loads(part.tobytes()):
            if event["name"] == "process_name":
                event["args"] = {"name": f"rank {rank} {event['args']['name']}"}
            merged.append(event | {"pid": event["pid"] + _APART * rank})
    return merged


# ---- events ----------------------------------------------------------------------------------


def span(
    name: str, start: float, us: float, process: int, thread: int, kind: str, about: Event
) -> Event:
    """Something that took time."""
    return {
        "name": name, "cat": kind, "ph": "X", "ts": start, "dur": us, "pid": process,
        "tid": thread, "args": about,
    }  # fmt: skip


def counter(name: str, at: float, values: Event, process: int) -> Event:
    """Numbers at a time, which a viewer draws as an area."""
    return {"name": name, "ph": "C", "ts": at, "pid": process, "tid": 0, "args": values}


def named(process: int, name: str) -> Iterator[Event]:
    """The name of a process."""
    yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}


def thread_name(process: int, thread: int, name: str) -> Event:
    """The name of a thread."""
    return {"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}

"""Where a run's time goes: by operator on onnxruntime, by kernel call on the GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx_ir

from onnx_fuse.importer.save import inline
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.rules import label
from onnx_fuse.program.call import Call
from onnx_fuse.runtime import ort
from onnx_fuse.validation.inputs import Feeds

_WARM = 2  # runs before those of which one is kept: the first makes onnxruntime's buffers
_RUNS = 5  # of which the fastest is kept: others may have waited for the machine
_SECONDS = 2.0  # after which no further run begins
_INSIDE = " ▸ "  # between the name of a fused node and the operator inside of it
_NODE = "_kernel_time"  # the end of the name of a node's event


@dataclass(frozen=True)
class Span:
    """One operator or kernel call of a run; times are in seconds, from the run's beginning."""

    op: str
    nodes: tuple[str, ...]
    """The names of the nodes that it computes."""
    start: float
    seconds: float
    note: str = ""
    """Further facts about the span, such as shapes."""


@dataclass
class Profile:
    """One run, span by span."""

    spans: list[Span]
    lane: str
    """The name of what ran the spans, such as a stream."""
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Bytes of onnxruntime's memory in use, by the time of the run."""
    events: list[Mapping[str, Any]] = field(default_factory=list)
    """All of onnxruntime's own events, in the Chrome trace format, with loading and warm-up."""
    calls: list[tuple[Call, float]] = field(default_factory=list)
    """Kernel calls and the seconds that each takes by itself."""

    @property
    def operators(self) -> dict[str, tuple[int, float]]:
        """(runs, microseconds) by operator or kernel, the longest first."""
        times: dict[str, tuple[int, float]] = {}
        for span in self.spans:
            runs, us = times.get(span.op, (0, 0.0))
            times[span.op] = (runs + 1, us + 1e6 * span.seconds)
        return dict(sorted(times.items(), key=lambda item: -item[1][1]))


def of_onnxruntime(model: onnx_ir.Model, feeds: Feeds) -> Profile:
    """Profile the fastest of a few runs of `model` on onnxruntime, which fuses on its own.

    Raises what onnxruntime raises.
    """
    import onnxruntime

    with TemporaryDirectory(prefix="onnx-fuse-") as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = ort.FATAL
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.session(_named(model), options)
        begun = time.perf_counter()
        for i in range(_WARM + _RUNS):
            if i <= _WARM or time.perf_counter() - begun < _SECONDS:
                ort.run(session, feeds)
        events = json.loads(Path(session.end_profiling()).read_text())
    runs = [e for e in events if e["name"] == "model_run"][_WARM:]
    began, took = min(((e["dur"], e["ts"]) for e in runs), default=(inf, 0))[::-1]
    profile = Profile([], "onnxruntime", events=events)
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith(_NODE):
            continue
        if not began <= event["ts"] <= began + took:
            continue
        about = event["args"]
        start, seconds = (event["ts"] - began) * 1e-6, event["dur"] * 1e-6
        node, _, _ = event["name"].removesuffix(_NODE).partition(_INSIDE)
        shapes = _shapes(about.get("output_type_shape", ()))
        profile.spans.append(Span(about["op_name"], (node,), start, seconds, shapes))
        if "mem_bytes_in_use" in about:  # since onnxruntime 1.2x; older ones do not say
            profile.memory.append((start + seconds, int(about["mem_bytes_in_use"])))
    return profile


def _named(model: onnx_ir.Model) -> onnx_ir.Model:
    """The model with the bodies of fused operators in their place, under the names of their nodes.

    onnxruntime puts them there itself, under names that say nothing. Where it fuses further, the
    new node has a name of its choice.
    """
    labels = {label(node) for node in model.graph}
    owners = {v.name: label(node) for node in model.graph if node.domain == FUSE
              for v in node.outputs if v.name}  # fmt: skip
    flat = inline(model)
    for number, node in enumerate(reversed(flat.graph)):
        if label(node) in labels and not any(v.name in owners for v in node.outputs):
            continue
        readers = [use.node.name or "" for v in node.outputs for use in v.uses()]
        owner = next((owners[v.name] for v in node.outputs if v.name in owners), None)
        if owner is None:
            inner = (name.partition(_INSIDE) for name in readers)
            owner = next((name for name, inside, _ in inner if inside), None)
        if owner is not None:
            node.name = f"{owner}{_INSIDE}{node.op_type} {number}"
    return flat


def of_calls(calls: Sequence[tuple[Call, float]]) -> Profile:
    """The profile of kernel calls that were timed one by one: they are put one after another."""
    profile = Profile([], "stream, calls one after another", calls=list(calls))
    start = 0.0
    for call, seconds in calls:
        profile.spans.append(Span(call.kernel, call.nodes, start, seconds, call.why))
        start += seconds
    return profile


def _shapes(types: Sequence[Mapping[str, Sequence[int]]]) -> str:
    return ", ".join(f"{kind} {shape}" for one in types for kind, shape in one.items())

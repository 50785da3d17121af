"""Timing: a model as it is against the same model fused, taking turns under onnxruntime."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir

from onnx_fuse import passes
from onnx_fuse.runtime import ort
from onnx_fuse.session import InferenceSession
from onnx_fuse.validate import Array, Feeds, generate


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one run: the median and the 10th and 90th percentiles."""

    median: float
    low: float
    high: float


def timing(seconds: Sequence[float]) -> Timing:
    low, median, high = (float(q) * 1e3 for q in np.quantile(seconds, (0.1, 0.5, 0.9)))
    return Timing(median, low, high)


@dataclass(frozen=True)
class Comparison:
    """The same feeds through both models; `ratio` is the median of fused / original by pair."""

    original: Timing
    fused: Timing
    ratio: float
    feeds: dict[str, list[int]]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    path: Path,
    graph: onnx_ir.Model,
    feeds: Feeds | None = None,
    *,
    repeat: int = 50,
) -> Comparison:
    """Time the file at `path` and the fusion of `graph` (the same model, loaded) in pairs.

    The two run in turns, so that a change of the machine's speed meets both alike.
    """
    original = ort.session(path)
    feeds = feeds or generate(graph, lambda f: ort.run(original, f))[-1][0]
    fused_graph = graph.clone()
    passes.optimize(fused_graph)
    fused = ort.session(fused_graph)
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(repeat + 3):
        for session, seconds in zip((original, fused), times, strict=True):
            started = time.perf_counter()
            ort.run(session, feeds)
            if i >= 3:
                seconds.append(time.perf_counter() - started)
    return Comparison(
        timing(times[0]),
        timing(times[1]),
        float(np.median(np.divide(times[1], times[0]))),
        {name: list(array.shape) for name, array in feeds.items()},
    )


@dataclass
class RunResult:
    """One run: outputs, time, and where asked for (runs, microseconds) by operator."""

    feeds: Feeds
    outputs: dict[str, Array]
    milliseconds: float
    operators: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def total_us(self) -> float:
        return sum(us for _, us in self.operators.values()) or 1.0


def run_once(
    graph: onnx_ir.Model,
    feeds: Feeds | None = None,
    *,
    device: str = "cpu",
    profile: bool = False,
) -> RunResult:
    """Run the fusion of `graph`; `profile` adds the time by operator, or by kernel on "cuda"."""
    session = InferenceSession(graph, device=device)
    feeds = feeds or generate(graph, lambda f: session.run(None, f))[0][0]
    started = time.perf_counter()
    outputs = session.run(None, feeds)
    milliseconds = (time.perf_counter() - started) * 1e3
    names = [v.name for v in session.get_outputs()]
    result = RunResult(feeds, dict(zip(names, outputs, strict=True)), milliseconds)
    if profile:
        if device == "cuda":
            result.operators = session.profile(feeds)
        else:
            result.operators = _operator_times(session.model, feeds)
    return result


def _operator_times(model: onnx_ir.Model, feeds: Feeds) -> dict[str, tuple[int, float]]:
    """(runs, microseconds) by operator, the longest first; onnxruntime fuses on its own."""
    import onnxruntime

    with TemporaryDirectory(prefix="onnx-fuse-") as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.session(model, options)
        ort.run(session, feeds)
        events = json.loads(Path(session.end_profiling()).read_text())
    times: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            runs, us = times.get(event["args"]["op_name"], (0, 0.0))
            times[event["args"]["op_name"]] = (runs + 1, us + event["dur"])
    return dict(sorted(times.items(), key=lambda item: -item[1][1]))

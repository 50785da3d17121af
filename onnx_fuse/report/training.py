"""Training runs as a page shows them: curves by step, live while they run, one or two together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnx_fuse.files import is_stream
from onnx_fuse.report import page, trace
from onnx_fuse.report.page import Page, Section, Table, View, chart
from onnx_fuse.training.callbacks import Callback, Fit

Run = Mapping[str, Any]
"""The fields of a `training.history.History`, or those of what `train --json` wrote. All but
"losses" may be missing."""

_POINTS = 1500  # of a line: more than a screen has
_SMOOTHED = 20  # steps from which a smoothed line is drawn too
_REFRESH = 4.0  # seconds after which a live page loads itself again
_SPARED = 40  # writing a live page takes at most one part of the time in this many
_STEPS = ("lr", "rates", "gradient_norms", "examples_per_second")
_NOISY = ("gradient_norms", "examples_per_second")
_NAMES = {
    "lr": "learning rate", "rates": "learning rate", "gradient_norms": "gradient norm",
    "examples_per_second": "examples a second",
}  # fmt: skip
_VALIDATION = "var(--s2)"  # the colour of what one run's validation gave
_KEYS = ("epoch", "step", "loss")  # of a record, what is no metric


def sections(runs: Mapping[str, Run]) -> list[Section]:
    """What is known by evaluation, then the loss, then the rest by step, of runs by their names."""
    metrics = ["validation_loss"] + [
        key for run in runs.values() for record in _evaluations(run) for key in record
        if key not in _KEYS
    ]  # fmt: skip
    evaluated = [
        _chart(key.replace("_", " "), lines)
        for key in dict.fromkeys(metrics)
        if (lines := list(_validations(key, runs)))
    ]
    loss = _chart("loss", list(_losses(runs)))
    parts = [Section("Validation", evaluated, folded=False)] if evaluated else []
    parts.append(Section("Loss", [loss], folded=bool(evaluated)))
    others: list[View] = []
    for key in _STEPS:
        lines = [
            line
            for i, (name, run) in enumerate(runs.items())
            if any(x is not None for x in run.get(key) or [])
            for line in _lines(_of(name, runs), i, run[key], smooth=key in _NOISY)
        ]
        if lines:
            others.append(_chart(_NAMES[key], lines))
    if others:
        parts.append(Section("By step", others))
    tables = [_epochs(name, run) for name, run in runs.items() if run.get("epochs")]
    if tables:
        parts.append(Section("By epoch", tables))
    return parts


def _validations(key: str, runs: Mapping[str, Run]) -> Iterator[dict[str, Any]]:
    for i, (name, run) in enumerate(runs.items()):
        steps, values = points(run, key)
        if steps:
            colour = f"var(--s{i + 1})" if len(runs) > 1 else _VALIDATION
            yield _line(_of(name, runs), steps, values) | {"colour": colour, "dots": True}


def _losses(runs: Mapping[str, Run]) -> Iterator[dict[str, Any]]:
    for i, (name, run) in enumerate(runs.items()):
        prefix = _of(name, runs)
        yield from _lines(f"{prefix} loss".strip(), i, run["losses"], smooth=True)
        steps, validation = points(run, "validation_loss")
        if steps:
            line = _line(f"{prefix} validation".strip(), steps, validation) | {"dashed": True}
            yield line | {"colour": f"var(--s{i + 1})" if prefix else _VALIDATION}


def _lines(
    name: str, i: int, values: Sequence[float | None], *, smooth: bool
) -> Iterator[dict[str, Any]]:
    """The line of run `i` and, with `smooth`, a thick one of running means where it is long.

    The thin line of one run is grey, so that the key tells the two apart.
    """
    colour = {"colour": f"var(--s{i + 1})"}
    numbers = [x for x in values if x is not None]
    smooth = smooth and len(values) > _SMOOTHED and len(numbers) == len(values)
    label = name or ("each step" if smooth else "")
    thin = {"thin": True} | ({} if i or name not in ("", "loss") else {"colour": "var(--s5)"})
    yield _line(label, *_thinned(values)) | colour | (thin if smooth else {})
    if smooth:
        base = name.removesuffix("loss").strip()
        yield _line(f"{base} smoothed".strip(), *_thinned(_smooth(numbers))) | colour


def _of(name: str, runs: Mapping[str, Run]) -> str:
    return name if len(runs) > 1 else ""


def _chart(title: str, lines: Sequence[Mapping[str, Any]]) -> View:
    x, y = {"label": "step", "choose": True}, {"label": "", "choose": True}
    return chart(f"{title} by step", title, x, y, *lines)


def _line(name: str, x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    return {"name": name, "kind": "line", "x": x, "y": y}


def _evaluations(run: Run) -> Sequence[Mapping[str, float]]:
    """The records of all evaluations; where only epochs are known, those at their ends."""
    return run.get("metrics") or run.get("epochs") or []


def points(run: Run, key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of what the evaluations of a run gave under `key`."""
    steps = len(run["losses"]) / max(len(run.get("epochs") or []), 1)
    points = [
        (record.get("step", record.get("epoch", 0) * steps), record[key])
        for record in _evaluations(run)
        if key in record
    ]
    return [x for x, _ in points], [y for _, y in points]


def _epochs(name: str, run: Run) -> Table:
    keys = list(dict.fromkeys(key for record in run["epochs"] for key in record))
    rows = [[_number(record.get(key)) for key in keys] for record in run["epochs"]]
    return Table(name, [key.replace("_", " ") for key in keys], rows, left=0)


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else str(value or "")


def _thinned(values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """(steps, values), the means of equal stretches where there are more than _POINTS of them."""
    points = [(i + 1, x) for i, x in enumerate(values) if x is not None]
    array = np.asarray([(i, float(x)) for i, x in points], np.float64).reshape(-1, 2)
    parts = np.array_split(array, min(len(array), _POINTS)) if len(array) else []
    return [float(p[:, 0].mean()) for p in parts], [float(p[:, 1].mean()) for p in parts]


def _smooth(values: Sequence[float]) -> list[float]:
    """A running mean of the last 5 % of the steps."""
    width = max(len(values) // 20, 2)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - width, 0)
    return [float(x) for x in (sums[ends] - sums[starts]) / (ends - starts)]


# ---- while it runs ---------------------------------------------------------------------------


class Live(Callback):
    """Writes the page of a run while it trains, and notes what it did when for its trace.

    `make(run, refresh)` returns the page of the run so far, which loads itself again after so many
    seconds; without a `path` it is never asked.
    """

    def __init__(self, path: Path | None, make: Callable[[Run, float], Page]) -> None:
        # a pipe or a device gets the last page alone
        self._path = None if path is None or is_stream(path) else path
        self._make = make
        self._next = 0.0
        self._steps = 0
        self._began = time.perf_counter()
        self.last = 0.0
        """When the last step or evaluation was over, in microseconds."""
        self._events = [*trace.named(trace.HOST, "host"), trace.thread_name(trace.HOST, 1, "steps")]

    def on_step(self, fit: Fit) -> None:
        losses = fit.history.losses
        if len(losses) != self._steps:  # an epoch ends after its last step
            self._steps = len(losses)
            self._note(f"step {self._steps}", {"loss": losses[-1]})
            self._events.append(trace.counter("loss", self.last, {"loss": losses[-1]}, trace.HOST))
        now = time.perf_counter()
        if self._path is None or now < self._next:
            return
        page.write(self._path, self._make(vars(fit.history), _REFRESH))
        spent = time.perf_counter() - now
        self._next = now + max(_REFRESH / 2, _SPARED * spent)

    on_epoch = on_step

    def on_evaluation(self, fit: Fit) -> None:
        self._note("evaluation", fit.history.metrics[-1])

    def _note(self, name: str, about: Mapping[str, Any]) -> None:
        """Note that `name` is over; it began when the event noted before it ended."""
        start, self.last = self.last, 1e6 * (time.perf_counter() - self._began)
        self._events.append(
            trace.span(name, start, self.last - start, trace.HOST, 1, "step", dict(about))
        )

    def events(self) -> list[trace.Event]:
        """The steps and evaluations as a trace, with the loss as a counter."""
        return self._events

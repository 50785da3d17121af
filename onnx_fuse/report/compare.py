"""Two runs side by side: whatever numbers the JSON reports of both have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnx_fuse.errors import DataError
from onnx_fuse.report import timing, training
from onnx_fuse.report.page import Lines, Overview, Section, Table, View

_LEFT_OUT = ("rounds", "losses", "rates", "lr", "gradient_norms", "examples_per_second", "seconds")
_MOST = 400  # rows
_SPREADS = {".median": (".low", ".high"), "ratio": ("noise.1", "noise.2")}
"""Ends of the names of numbers, and of those between which another run may have them."""
_NAMES = {
    ".median": ": median, ms",
    ".low": ": lowest tenth, ms",
    ".high": ": highest tenth, ms",
    "noise.1": "ratio, lowest of sessions",
    "noise.2": "ratio, highest of sessions",
}
"""How names of numbers in the report of `bench` end, and what a table has in their place."""
_FIRST = ("ratio", "original: median, ms", "fused: median, ms", "milliseconds")
"""Names of numbers that stand at the top of the page."""


def read(path: Path) -> dict[str, Any]:
    """A report that `--json` wrote. Raises DataError for anything else."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path}: not a report that --json has written: {error}") from error
    if not isinstance(report, dict):
        raise DataError(f"{path}: not a report that --json has written")
    return report


def rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[list[str]]:
    """[what, in a, in b, change] for each number that either has, those that differ first."""
    left, right = dict(_numbers(a)), dict(_numbers(b))
    changes = []
    for key in dict.fromkeys((*left, *right)):
        x, y = left.get(key), right.get(key)
        changed = x is not None and y is not None and x != y
        change = f"{y / x - 1:+.1%}" if changed and x and y is not None else ""
        spreads = [_spread(key, numbers) for numbers in (left, right)]
        if change and all(spreads):
            low, high = max(min(s) for s in spreads), min(max(s) for s in spreads)
            change += ", within the noise" if low <= high else ", beyond the noise"
        changes.append((x == y, [_named(key), _shown(x), _shown(y), change]))
    return [row for _, row in sorted(changes, key=lambda item: item[0])][:_MOST]


def _spread(key: str, numbers: Mapping[str, float]) -> tuple[float, ...]:
    """The numbers between which another run may have this one; empty where that is not known."""
    for end, ends in _SPREADS.items():
        spread = [key.removesuffix(end) + other for other in ends]
        if key.endswith(end) and all(name in numbers for name in spread):
            return tuple(numbers[name] for name in spread)
    return ()


def check_alike(names: tuple[str, str], a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    """Raise DataError for the reports of two commands, or of CPU time and wall-clock time."""
    for key, noun in (("command", "command"), ("clock", "kind of time")):
        first, second = a.get(key), b.get(key)
        if first and second and first != second:
            raise DataError(
                f"{names[0]} is a report of {first}, {names[1]} of {second}: "
                f"compare two of one {noun}"
            )


def settings(names: tuple[str, str], a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """A line for each setting that differs: the model, the place, the sizes of the inputs."""
    both = [(key, a.get(key), b.get(key)) for key in ("model", "where", "feeds")]
    return [
        f"not the same {key}: {names[0]} has {_said(x)}, {names[1]} has {_said(y)}"
        for key, x, y in both
        if x and y and x != y
    ]


def _said(setting: object) -> str:
    if not isinstance(setting, Mapping):
        return str(setting)
    return ", ".join(f"{name} {value}" for name, value in setting.items())


def overview(names: tuple[str, str], a: Mapping[str, Any], b: Mapping[str, Any]) -> Overview:
    """What two trainings came to, or how many numbers differ beyond the noise, and the first."""
    reports = dict(zip(names, (a, b), strict=True))
    if a.get("losses") and b.get("losses"):
        text = "; ".join(f"{name}: {_ends(report)}" for name, report in reports.items())
        best = {
            f"lowest validation loss, {name}": f"{min(losses):.4g}"
            for name, report in reports.items()
            if (losses := training.points(report, "validation_loss")[1])
        }
        return Overview(text, None, best)
    changed = [row for row in rows(a, b) if row[3]]
    judged = [row[3].endswith("beyond the noise") for row in changed if "the noise" in row[3]]
    text = f"{len(changed)} numbers differ"
    if judged:
        text += f"; {sum(judged)} of {len(judged)} times and ratios differ beyond the noise"
    first = [row for row in changed if row[0] in _FIRST] or changed
    figures = {name: f"{float(x):.4g} → {float(y):.4g}" for name, x, y, _ in first[:3]}
    again = ("onnx-fuse", "bench", b.get("model", ""), "--repeat", 200, "--json", "again.json")
    return Overview(text, None, figures, {"Time it again, longer": again} if judged else {})


def _ends(report: Mapping[str, Any]) -> str:
    losses, metrics = report["losses"], report.get("metrics") or report.get("epochs") or [{}]
    last = metrics[-1].get("validation_loss")
    more = "" if last is None else f", validation {last:.4g}"
    return f"loss {losses[-1]:.4g} after {len(losses)} steps{more}"


def sections(names: tuple[str, str], a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Section]:
    """The page of two reports: their curves or times where they have these, and all numbers."""
    parts: list[Section] = []
    if a.get("losses") and b.get("losses"):
        parts += training.sections({names[0]: a, names[1]: b})
    if a.get("operators") and b.get("operators"):
        views = [_times(name, report) for name, report in zip(names, (a, b), strict=True)]
        parts.append(Section("Time by operator", views))
    if a.get("rounds") and b.get("rounds"):
        times = {
            "Medians of both models": [
                [f"{name}: {model}", took["median"] * 1e-3, "", False,
                 took["low"] * 1e-3, took["high"] * 1e-3]
                for model in ("original", "fused")
                for name, report in zip(names, (a, b), strict=True)
                for took in [report[model]]
            ]
        }  # fmt: skip
        parts += timing.times(times)
    table = rows(a, b)
    if not table:
        return [*parts, Section("Numbers", [Lines(["these reports have no numbers in common"])])]
    if differing := settings(names, a, b):
        parts.insert(0, Section("Settings that differ", [Lines(differing)]))
    return [*parts, Section("Numbers", [Table("", ["", *names, "change"], table)])]


def _times(name: str, report: Mapping[str, Any]) -> View:
    bars = [[f"{op} ({entry['runs']})", entry["us"] * 1e-6]
            for op, entry in report["operators"].items()]  # fmt: skip
    return View("bars", f"{name}: time by operator",
                {"title": name, "unit": "s", "share": True, "rows": bars})  # fmt: skip


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of all numbers in a report, the names of what holds them before each."""
    if isinstance(value, bool | int | float):
        yield name, float(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            counts = name.startswith("epochs.") and key in ("epoch", "step")
            if key not in _LEFT_OUT and not counts:
                yield from _numbers(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and name.rpartition(".")[2] in ("epochs", "noise", "outputs"):
        for i, inner in enumerate(value):
            yield from _numbers(inner, f"{name}.{i + 1}")


def _named(key: str) -> str:
    end = next((end for end in _NAMES if key.endswith(end)), "")
    return key.removesuffix(end) + _NAMES[end] if end else key


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"

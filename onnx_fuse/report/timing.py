"""Times as a page shows them: by operator, by node, as a timeline, and against the hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onnx_fuse.kernels import ExplainRow, site
from onnx_fuse.report import graph, memory
from onnx_fuse.report.page import Lines, Section, Table, View, bars, chart

if TYPE_CHECKING:
    from onnx_fuse.bench import Comparison, RunResult
    from onnx_fuse.profile import Profile
    from onnx_fuse.program.call import Call, Program
    from onnx_fuse.program.problem import Hardware


def ran(result: RunResult, model: ir.Model) -> list[Section]:
    """What took the time of a run of the fused `model` and what held its memory, where profiled."""
    sections: list[Section] = []
    profile = result.profile
    if profile is not None:
        sections += profile_sections(profile)
        if profile.calls and result.hardware is not None:
            sections += _against_hardware(profile.calls, result.hardware, measured=True)
    drawn = graph.Drawn("fused", model)
    if profile is not None:
        drawn = _timed(model, profile, result.hardware)
    sections.append(Section("Graph", [graph.view([drawn])]))
    if result.program is not None:
        sections.append(memory.section(result.program))
    return sections


def compared(result: Comparison, run: RunResult | None, model: ir.Model) -> list[Section]:
    """Two models timed in turns, and the profile of the fused one."""
    rows = [
        [
            name,
            t.median * 1e-3,
            f"{t.low:.4g} … {t.high:.4g} ms",
            False,
            t.low * 1e-3,
            t.high * 1e-3,
        ]
        for name, t in (("original", result.original), ("fused", result.fused))
    ]
    title = "median time of a run; the line is from 10 % to 90 % of the rounds"
    low, high = result.noise
    text = f"fused / original: {result.ratio:.3f} ({low:.3f} to {high:.3f} among pairs of sessions)"
    rounds = chart(
        "Time of each round",
        "time of each round",
        {"label": "round"},
        {"label": "time", "unit": "s", "choose": True, "zero": True},
        *(
            {"name": name, "kind": "line", "y": [pair[i] * 1e-3 for pair in result.rounds]}
            for i, name in enumerate(("original", "fused"))
        ),
    )
    compared = Section("Comparison", [Lines([text]), bars(title, rows), rounds])
    return [compared, *(ran(run, model) if run else [])]


def predicted(program: Program, hw: Hardware, name: str = "") -> list[Section]:
    """The calls of a program for a GPU that need not be there, and its memory.

    `name` tells the sections of several programs apart.
    """
    calls = [(call, site(call, hw).seconds) for call in program.calls if call.launches]
    sections = [*_against_hardware(calls, hw, measured=False), memory.section(program)]
    if name:
        sections = [replace(section, title=f"{name}: {section.title}") for section in sections]
    return sections


def profile_sections(profile: Profile, of: str = "") -> list[Section]:
    """Bars by operator and by node, and a timeline; `of` says of what, in their titles."""
    ops = [
        [f"{op} ({runs} {'run' if runs == 1 else 'runs'})", us * 1e-6]
        for op, (runs, us) in profile.operators.items()
    ]
    spans = sorted(profile.spans, key=lambda span: -span.seconds)
    nodes = [[f"{s.op}: {' '.join(s.nodes[:3])}", s.seconds] for s in spans]
    whole = f"{sum(span.seconds for span in spans) * 1e6:,.0f} µs in all"
    by_operator = bars(f"time by operator or kernel, {whole}", ops, share=True)
    by_node = bars(f"time by node or call, {whole}", nodes, share=True)
    end = max((s.start + s.seconds for s in profile.spans), default=0.0)
    names = list(profile.operators)
    line = View(
        "plane",
        f"Timeline of {len(profile.spans)} spans",
        {
            "title": f"timeline: {profile.lane}",
            "x": {"label": "time", "unit": "s", "high": end},
            "y": {"label": "", "lanes": names[:_LANES] + (["others"] if names[_LANES:] else [])},
            "kinds": [""],
            "rects": [
                [s.start, s.start + s.seconds, lane, lane + 1, lane,
                 f"{s.op} {' '.join(s.nodes[:3])}\n{s.seconds * 1e6:.1f} µs\n{s.note}"]
                for s in profile.spans
                for lane in [min(names.index(s.op), _LANES)]
            ],
        },
    )  # fmt: skip
    sections = [Section(f"Time {of}".strip(), [by_operator, by_node])]
    if end > 0:
        sections.append(Section(f"Timeline {of}".strip(), [line]))
    if profile.memory:
        sections.append(Section(f"Memory in use {of}".strip(), [_in_use(profile)]))
    return sections


def times(by_title: Mapping[str, Sequence[Sequence[str | float]]]) -> list[Section]:
    """A bar chart for each of several problems, by the problem's title.

    A row is (name, seconds), and may go on as those of the view `bars`: a note, whether the bar is
    marked as bad, and the ends of its error bar.
    """
    return [Section(title, [bars(title, rows)]) for title, rows in by_title.items()]


_LANES = 10


def _in_use(profile: Profile) -> View:
    high = max(size for _, size in profile.memory)
    times, sizes = zip(*profile.memory, strict=True)
    return chart(
        f"Memory of onnxruntime over the run, {high:,} bytes at most",
        f"onnxruntime's memory over the run, {high:,} bytes at most",
        {"label": "time", "unit": "s"},
        {"label": "bytes in use", "unit": "B", "zero": True},
        {"name": "", "kind": "line", "x": times, "y": sizes},
    )


def _timed(model: ir.Model, profile: Profile, hw: Hardware | None) -> graph.Drawn:
    times: dict[str, float] = {}
    facts: dict[str, dict[str, str]] = {}
    if profile.calls and hw is not None:
        calls = [asdict(site(call, hw)) | {"seconds": t} for call, t in profile.calls]
        facts = call_facts(calls, measured=True)
    total = sum(s.seconds for s in profile.spans) or 1.0
    for s in profile.spans:
        for node in s.nodes:
            times[node] = times.get(node, 0.0) + s.seconds
            shown = facts.setdefault(node, {"ran as": s.op})
            shown["time"] = f"{times[node] * 1e6:.1f} µs, {times[node] / total:.1%} of the run"
    return graph.Drawn("fused", model, facts, {"time": times})


def call_facts(
    kernels: Sequence[Mapping[str, Any]], measured: bool = False
) -> dict[str, dict[str, str]]:
    """By a node's label, the kernel that computes it; calls are those that `--json` lists."""
    facts: dict[str, dict[str, str]] = {}
    for call in kernels:
        time = f"{1e6 * call['seconds']:.1f} µs {'measured' if measured else 'predicted'}"
        of_floor = call["floor"] / call["seconds"] if call["seconds"] else 0.0
        for node in call["nodes"]:
            shown = facts.setdefault(node, {})
            shown["kernel"] = f"{call['op']} {call['kernel']}"
            shown["configuration"] = call["config"] or "the only one"
            shown["time"] = time + (
                f", with {len(call['nodes']) - 1} other nodes" if len(call["nodes"]) > 1 else ""
            )
            shown["share of the floor"] = f"{of_floor:.0%}"
            shown["chosen by"] = call["why"]
    return facts


# ---- against the hardware --------------------------------------------------------------------


def _against_hardware(
    calls: Sequence[tuple[Call, float]], hw: Hardware, *, measured: bool
) -> list[Section]:
    """Each call's time and share of its floor, and the roofline of those that multiply."""
    how = "measured" if measured else "predicted"
    sites = [(site(call, hw), call, seconds) for call, seconds in calls]
    rows = [
        [_named(s), seconds, f"{s.floor / seconds:.0%} of floor" if seconds else ""]
        for s, _, seconds in sorted(sites, key=lambda item: -item[2])
    ]
    title = f"time by call, {how}, and the share of it that no kernel could save"
    total, floor = sum(t for *_, t in sites), sum(s.floor for s, *_ in sites)
    text = f"{len(sites)} calls, {total * 1e6:.1f} µs {how}; the chip itself takes at least "
    said = Lines([f"{text}{floor * 1e6:.3g} µs on {hw.name}"])
    points = [(s, call, seconds) for s, call, seconds in sites if call.flops and call.bytes]
    sections = [Section("Kernels", [said, bars(title, rows)])]
    if points:
        note = (
            f"{how.capitalize()} rates of the calls that multiply, below what {hw.name}'s memory "
            "and multipliers allow. Calls that only move numbers are not in it."
        )
        sections.append(Section("Roofline", [_roofline(points, hw)], note))
    table = Table(
        "",
        ["call", "kernel", "configuration", "µs", "of floor", "chosen by"],
        [
            [" ".join(s.nodes[:3]), f"{s.op} {s.kernel}", s.config, f"{seconds * 1e6:.2f}",
             f"{s.floor / seconds:.0%}" if seconds else "", s.why]
            for s, _, seconds in sites
        ],
        left=3,
    )  # fmt: skip
    return [*sections, Section("Calls", [table])]


def _roofline(points: Sequence[tuple[ExplainRow, Call, float]], hw: Hardware) -> View:
    x = [call.flops / call.bytes for _, call, _ in points]
    kinds = {
        kind: hw.rate(kind) for kind in ("float32", "tf32", "bfloat16") if kind in dict(hw.flops)
    }
    low, high = min(x) / 2, max(*x, max(kinds.values()) / hw.bandwidth) * 4
    series: list[dict[str, Any]] = []
    for kind, rate in kinds.items():
        knee = rate / hw.bandwidth
        xs = sorted({low, min(max(knee, low), high), high})
        series.append(
            {"name": f"{kind} roof", "kind": "line", "x": xs,
             "y": [min(rate, hw.bandwidth * v) for v in xs]}
        )  # fmt: skip
    series.append(
        {
            "name": "calls", "kind": "points", "x": x,
            "y": [call.flops / seconds if seconds else 0.0 for _, call, seconds in points],
            "labels": [f"{_named(s)}\n{seconds * 1e6:.1f} µs" for s, _, seconds in points],
        }
    )  # fmt: skip
    return chart(
        f"Roofline of {len(points)} calls on {hw.name}",
        "operations a second by operations a byte",
        {"label": "FLOP a byte", "log": True, "choose": True},
        {"label": "rate", "unit": "FLOP/s", "log": True, "choose": True},
        *series,
    )


def _named(s: ExplainRow) -> str:
    return f"{s.op} {s.kernel}: {' '.join(s.nodes[:2])}"

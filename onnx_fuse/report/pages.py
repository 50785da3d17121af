"""The sections of each command's page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from onnx_fuse.report import graph
from onnx_fuse.report.page import Lines, Part, Section, Table, View, chart
from onnx_fuse.report.terminal import Summary, check_lines, gradient_lines, models_rows

if TYPE_CHECKING:
    from onnx_fuse.quantization.layers import Layer
    from onnx_fuse.rewrite import Report
    from onnx_fuse.validation.check import Check
    from onnx_fuse.validation.gradients import GradientCheck
    from onnx_fuse.validation.layerwise import Along, Distribution

_NAMED = 40  # nodes named for each reason


def optimized(
    before: ir.Model,
    after: ir.Model,
    sizes: Sequence[Summary],
    report: Report,
    checked: Check | None,
    facts: Mapping[str, Mapping[str, str]],
) -> list[Section]:
    """What `optimize` did.

    Args:
        before, after: The graphs to draw side by side.
        sizes: The summaries of both.
        report: What the passes fused and what they did not.
        checked: The comparison of both, if there was one.
        facts: By a node's label, what else is known about it, such as its kernel.
    """
    drawn = [graph.Drawn("before", before), _checked_graph("after", after, checked, facts)]
    [old, new] = sizes
    saved = [
        ["nodes", f"{old.nodes:,}", f"{new.nodes:,}", _change(old.nodes, new.nodes)],
        [
            "operators",
            f"{len(old.ops):,}",
            f"{len(new.ops):,}",
            _change(len(old.ops), len(new.ops)),
        ],
        ["bytes", f"{old.bytes:,}", f"{new.bytes:,}", _change(old.bytes, new.bytes)],
        ["parameters", f"{old.parameters:,}", f"{new.parameters:,}", ""],
    ]
    fused: list[Part] = [
        Table("", ["fusion", "count"], [[k, str(v)] for k, v in report.fusions.items()])
    ]
    if not report.fusions:
        fused = [Lines(["nothing was fused"])]
    left: list[Part] = [
        Table(
            "",
            ["nodes", "reason", "which"],
            [[str(len(r.nodes)), r.reason, named(r.nodes)] for r in report.not_fused],
            left=3,
        )
    ]
    sections = [
        Section("Sizes", [Table("", ["", "before", "after", "change"], saved)]),
        Section(
            "Graph",
            [graph.view(drawn)],
            "Nodes of a fused operator have its colour on both sides; dashed nodes were folded. "
            "Select a node to see the nodes that it replaces, or the node that replaces it.",
        ),
        Section("Fused", fused),
    ]
    if report.not_fused:
        note = "Norms, attention, activations, sums and changes of layout that stayed."
        sections.append(Section("Not fused, and why", left, note))
    if report.notes:
        sections.append(Section("Notes", [Lines(list(report.notes))]))
    if checked is not None:
        sections += check_sections(checked)
    rows = models_rows(sizes)
    details = Table("", ["", *(m.name for m in sizes)], rows)
    return [*sections, Section("Inputs, outputs and operators", [details])]


def validated(
    original: ir.Model, model: ir.Model, checked: Check, gradients: GradientCheck | None
) -> list[Section]:
    """What `validate` found: the check, its gradients, and the graphs side by side."""
    sections = check_sections(checked)
    if gradients is not None:
        rows = [
            [e.tensor, e.op, f"{e.slope:.6g}", f"{e.expected:.6g}", f"{e.max_abs:.3g}",
             f"{e.limit:.3g}", e.where, "ok" if e.ok else "FAILED"]
            for e in gradients.errors
        ]  # fmt: skip
        head = ["tensor", "read by", "slope", "expected", "off by", "limit", "where", ""]
        parts: list[Part] = [
            Lines(gradient_lines(gradients)),
            Table("by tensor", head, rows, left=2),
        ]
        sections.append(Section("Gradients", parts))
    drawn = [graph.Drawn("original", original), _checked_graph("checked", model, checked, {})]
    return [*sections, Section("Graph", [graph.view(drawn)])]


def inspected(models: Mapping[str, ir.Model]) -> list[Section]:
    """The graphs of models by their names: two side by side, more one after another."""
    drawn = [graph.Drawn(name, model) for name, model in models.items()]
    parts = [graph.view(drawn)] if len(drawn) == 2 else [graph.view([d]) for d in drawn]
    return [Section("Graph", parts)]


# ---- checks ----------------------------------------------------------------------------------


def check_sections(checked: Check) -> list[Section]:
    """The verdict, the errors by output, along the graph, by size, and the worst entries."""
    outputs = max(len(checked.differences) // max(len(checked.feeds), 1), 1)
    rows = [
        ["ok" if d.ok else "FAILED", run_label(checked, i // outputs), d.output,
         f"{d.max_abs:.3g}", f"{d.limit:.3g}", percent(d.max_abs, d.limit), f"{d.max_rel:.3g}",
         d.where, d.level]
        for i, d in enumerate(checked.differences)
    ]  # fmt: skip
    head = ["", "run", "output", "largest difference", "limit", "of limit", "relative", "where"]
    parts: list[Part] = [
        Lines(check_lines(checked, inputs=False)),
        Table("each output of each run", [*head, "level"], rows, left=3),
        _inputs_table(checked),
    ]
    sections = [Section("Check", parts)]
    along = checked.along
    if along is not None and along.values:
        sections.append(
            Section(
                "Errors along the graph",
                [_errors_chart(along), _errors_table(along)]
                if any(d.max_abs for d in along.values)
                else [Lines([f"none of {len(along.values)} values differs"])],
                "Each column is a value that both models compute, in the order of the graph; its "
                "height is the largest difference as a share of what is allowed there. Both ran as "
                "they are written, on the inputs of the worst difference.",
            )
        )
        if along.outputs:
            spreads = [part for spread in along.outputs for part in _distribution(spread)]
            sections.append(Section("Errors by entry", spreads))
    return sections


def run_label(checked: Check, run: int) -> str:
    """The number of a run, from 1, with what is special about its inputs or their first shape."""
    first = next(iter(checked.feeds[run].values()), None) if checked.feeds else None
    return f"{run + 1}: {checked.cases.get(run + 1) or _shape(first)}"


def _inputs_table(checked: Check) -> Table:
    names = dict.fromkeys(name for feed in checked.feeds for name in feed)
    rows = [[name, *(_shape(feed.get(name)) for feed in checked.feeds)] for name in names]
    return Table("inputs", ["input", *(f"run {i + 1}" for i in range(len(checked.feeds)))], rows)


def _shape(shape: Sequence[int] | None) -> str:
    """A shape without spaces, at which a narrow column would break it."""
    return "" if shape is None else "×".join(map(str, shape)) or "scalar"


def quantized(layers: Sequence[Layer]) -> list[Section]:
    """The error of each layer along the graph."""
    measured = [layer for layer in layers if layer.error is not None]
    errors = chart(
        f"Errors of {len(measured)} quantized layers along the graph",
        "error of a layer's result against float",
        {"label": "layer"},
        {"label": "part of its norm", "log": True, "choose": True, "zero": True},
        {
            "name": "",
            "kind": "columns",
            "y": [layer.error for layer in measured],
            "labels": [f"{each.name}\n{each.to}: {each.error:.3g}" for each in measured],
        },
    )
    return [Section("Errors along the graph", [errors])] if measured else []


def _errors_chart(along: Along) -> View:
    shares = [error_ratio(d.max_abs, d.limit) for d in along.values]
    labels = [
        f"{node}\n{d.where}: {d.max_abs:.3g}, limit {d.limit:.3g}"
        for node, d in zip(along.nodes, along.values, strict=True)
    ]
    bad = [not d.ok for d in along.values]
    return chart(
        f"Differences at {len(shares)} values along the graph",
        "largest difference as a share of its limit",
        {"label": "value"},
        {"label": "share of the limit", "log": True, "choose": True, "zero": True},
        {"name": "", "kind": "columns", "y": shares, "labels": labels, "bad": bad},
        lines=[{"name": "limit", "y": 1}],
    )


def _errors_table(along: Along) -> Table:
    worst = sorted(
        zip(along.nodes, along.values, strict=True),
        key=lambda item: (item[1].ok, -error_ratio(item[1].max_abs, item[1].limit)),
    )[:20]
    rows = [
        [node, percent(d.max_abs, d.limit), f"{d.max_abs:.3g}", f"{d.limit:.3g}", d.where]
        for node, d in worst
    ]
    head = ["node", "of limit", "largest difference", "limit", "where"]
    return Table("the largest", head, rows)


def _distribution(spread: Distribution) -> Iterable[Part]:
    rows = [[decade, count] for decade, count in spread.decades.items()]
    yield View(
        "bars",
        f"Number of entries of {spread.output} by the size of their difference",
        {
            "title": f"{spread.output}: entries by difference",
            "unit": "",
            "share": True,
            "rows": rows,
        },
    )
    if spread.worst:
        entries = [
            [str(list(e.index)), f"{e.expected:.8g}", f"{e.got:.8g}", f"{e.got - e.expected:.3g}"]
            for e in spread.worst
        ]
        head = ["index", "original", "checked", "difference"]
        yield Table(f"{spread.output}: the worst entries", head, entries)


def _checked_graph(
    title: str, model: ir.Model, checked: Check | None, facts: Mapping[str, Mapping[str, str]]
) -> graph.Drawn:
    facts_of = {node: dict(row) for node, row in facts.items()}
    errors: dict[str, float] = {}
    if checked is not None and checked.along is not None:
        for node, d in zip(checked.along.nodes, checked.along.values, strict=True):
            facts_of.setdefault(node, {})["error"] = (
                f"{d.max_abs:.3g}, {percent(d.max_abs, d.limit)} of the limit, at {d.where}"
                if d.max_abs
                else "none"
            )
            errors[node] = max(errors.get(node, 0.0), error_ratio(d.max_abs, d.limit))
    return graph.Drawn(title, model, facts_of, {"error": errors} if errors else {})


# ---- numbers ---------------------------------------------------------------------------------


def named(nodes: Sequence[str]) -> str:
    """The names of nodes, the first of very many."""
    more = f", and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
    return ", ".join(nodes[:_NAMED]) + more


def error_ratio(error: float, limit: float) -> float:
    """An error as a share of its limit; where nothing is allowed, any error is infinitely much."""
    return error / limit if limit else (0.0 if not error else float("inf"))


def percent(error: float, limit: float) -> str:
    """`error_ratio` for a reader."""
    ratio = error_ratio(error, limit)
    return f"{ratio:.1%}" if ratio < 100 else f"{ratio:.3g} times"


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before else ""

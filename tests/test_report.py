"""Reports: what a page holds, where a graph's boxes stand, what a profile and a trace say."""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir
import pytest
from fake_gpu import FakeGpu
from support import ENCODER, Cli

from onnx_fuse import bench, profile, rewrite, session
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import site
from onnx_fuse.ops.rules import label
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.report import compare, graph, memory, page, pages, terminal, timing, trace, training
from onnx_fuse.report.layered import HEIGHT, PITCH, layered
from onnx_fuse.report.page import Lines, Overview, Page, Section, Table, View
from onnx_fuse.runtime.plan import plan
from onnx_fuse.training.history import History
from onnx_fuse.validation import layerwise
from onnx_fuse.validation.check import check_outputs, validate
from onnx_fuse.validation.compare import TOLERANCES
from onnx_fuse.validation.request import Request

H200 = CHIPS["H200"]
Save = Callable[..., Path]
NORM = (
    "g (float[N, 8] x) => (float[N, 4] y) <float[8] s = {1,2,3,4,5,6,7,8}, float[8] b = "
    "{0,0,0,0,0,0,0,1}, float[8,4] w = {" + ",".join(["0.5"] * 32) + "}, float[4] c = {1,2,3,4}>"
    " { n = LayerNormalization(x, s, b) m = MatMul(n, w) y = Add(m, c) }"
)


def data_of(html: str) -> list[Any]:
    """The blocks of data in a page, each of which must be JSON."""
    blocks = re.findall(r'<script type="application/json" id="data-\d+">(.*?)</script>', html, re.S)
    return [json.loads(block) for block in blocks]


def views(sections: list[Section], kind: str) -> list[View]:
    parts = [part for section in sections for part in section.parts]
    return [part for part in parts if isinstance(part, View) and part.kind == kind]


# ---- the page --------------------------------------------------------------------------------


def test_a_page_loads_nothing_and_keeps_names_from_being_markup() -> None:
    evil = '</script><img src=x onerror="alert(1)">\u202e'
    rows = [[evil, "1"], [], ["b", "2"]]
    parts = [Table(evil, [evil, "n"], rows), Lines([evil]), View("bars", evil, {"rows": [[evil]]})]
    shown = Overview(evil, True, {evil: evil}, {evil: [evil]})
    html = page.render(Page(evil, f"onnx-fuse run {evil}", [Section(evil, parts)], shown))
    assert "<img" not in html
    assert "\u202e" not in html
    assert data_of(html) == [{"rows": [[evil.replace("\u202e", "\\u202e")]]}]
    assert html.count("<tbody>") == 2
    assert "default-src 'none'" in html
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#|data:,)", html)
    assert "@import" not in html
    assert "url(" not in html


def test_numbers_that_json_lacks_become_text() -> None:
    view = View("chart", "", {"y": [float("nan"), float("inf"), 1.0]})
    html = page.render(Page("m", "", [Section("s", [view])]))
    assert data_of(html) == [{"y": ["nan", "inf", 1.0]}]


def test_every_command_has_a_page_with_what_it_printed(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "i.html"
    assert cli("inspect", ENCODER, "--html", path).code == 0
    html = path.read_text()
    assert "<h1>encoder.onnx</h1>" in html
    assert "About this run" in html
    assert "onnx-fuse inspect" in html
    assert "<td>LayerNormalization</td>" in html or "<td>Gemm</td>" in html


# ---- the graph -------------------------------------------------------------------------------


def random_graph(nodes: int, seed: int) -> tuple[list[int], list[tuple[int, int]]]:
    draw = random.Random(seed)
    edges = {(max(0, i - draw.choice((1, 1, 2, 30))), i) for i in range(1, nodes)}
    edges |= {(draw.randrange(i), i) for i in range(1, nodes, 7)}
    return [draw.choice((56, 90, 180)) for _ in range(nodes)], sorted(edges)


@pytest.mark.parametrize("seed", range(4))
def test_boxes_of_a_layer_do_not_overlap_and_edges_go_down(seed: int) -> None:
    widths, edges = random_graph(300, seed)
    layout = layered(widths, edges)
    rows: dict[int, list[int]] = {}
    for i, y in enumerate(layout.y):
        rows.setdefault(y, []).append(i)
    for row in rows.values():
        row.sort(key=lambda i: layout.x[i])
        for a, b in itertools.pairwise(row):
            assert layout.x[a] + widths[a] / 2 < layout.x[b] - widths[b] / 2
    for (a, b), points in zip(edges, layout.paths, strict=True):
        assert points[:2] == [layout.x[a], layout.y[a] + HEIGHT]
        assert points[-2:] == [layout.x[b], layout.y[b]]
        assert points[1::2] == sorted(points[1::2])
    right = max(x + w / 2 for x, w in zip(layout.x, widths, strict=True))
    assert min(x - w / 2 for x, w in zip(layout.x, widths, strict=True)) >= -1
    assert right <= layout.width + 1
    assert layout.height == max(layout.y) + HEIGHT


def test_a_chain_is_straight_and_an_empty_graph_is_no_error() -> None:
    layout = layered([50] * 40, [(i, i + 1) for i in range(39)])
    assert len(set(layout.x)) == 1
    assert layout.y == [PITCH * i for i in range(40)]
    assert all(len(path) == 4 for path in layout.paths)
    assert layered([], []).paths == []


def test_a_graph_too_long_for_placeholders_is_drawn_all_the_same() -> None:
    edges = [(i, i + 1) for i in range(1999)] + [(i, 1999) for i in range(0, 1990, 10)]
    layout = layered([50] * 2000, edges)
    assert len(layout.paths) == len(edges)


def test_a_fused_node_stands_for_the_nodes_it_was_made_of() -> None:
    model = session.load(text_model(NORM))
    before = model.clone()
    rewrite.optimize(model)
    view = graph.view([graph.Drawn("before", before), graph.Drawn("after", model)])
    old, new = view.data["graphs"]
    names = [new["ops"][node[0]] for node in new["nodes"]]
    fused = next(i for i, name in enumerate(names) if name.startswith("LayerNormGemm"))
    made_of = {old["ops"][old["nodes"][i][0]] for i in new["from"][str(fused)]}
    assert made_of == {"LayerNormalization", "MatMul", "Add"}
    assert Counter(old["group"]) == {"LayerNormGemm": 3, "": 2}
    assert "LayerNormalization" in view.data["bodies"][names[fused]]
    assert new["attributes"][str(fused)]["epsilon"]


def test_all_nodes_and_edges_of_a_model_are_drawn() -> None:
    model = session.load(ENCODER)
    [drawn] = graph.view([graph.Drawn("graph", model)]).data["graphs"]
    own = [node for node in model.graph if node.op_type != "Constant"]
    ends = len(model.graph.inputs) + len(model.graph.outputs)
    assert len(drawn["nodes"]) == len(own) + ends
    assert len(drawn["x"]) == len(drawn["y"]) == len(drawn["group"]) == len(drawn["nodes"])
    assert all(a != b and drawn["y"][a] < drawn["y"][b] for a, b, *_ in drawn["edges"])


def test_a_branch_reads_what_stands_outside_of_it() -> None:
    model = session.load(
        text_model(
            "g (float[N] x, bool c) => (float[N] y) { r = Relu(x) y = If (c) <then_branch = t () =>"
            " (float[N] a) { a = Exp(r) }, else_branch = e () => (float[N] b) { b = Neg(r) }> }"
        )
    )
    [drawn] = graph.view([graph.Drawn("graph", model)]).data["graphs"]
    names = [drawn["ops"][node[0]] for node in drawn["nodes"]]
    edge = [names.index("Relu"), names.index("If")]
    assert edge in [e[:2] for e in drawn["edges"]]
    assert drawn["attributes"][str(edge[1])]["then_branch"] == "graph of 1 nodes"


# ---- checks ----------------------------------------------------------------------------------


def test_errors_along_the_graph_name_the_node_and_the_entries() -> None:
    right = text_model("g (float[4] x) => (float[4] y) { a = Relu(x) b = Exp(a) y = Neg(b) }")
    wrong = text_model("g (float[4] x) => (float[4] y) { a = Relu(x) b = Tanh(a) y = Neg(b) }")
    feeds = {"x": np.array([0, -1, 2, 3], np.float32)}
    check = check_outputs(right, wrong, Request(feeds=[feeds], along=True))
    found = {d.output: d for d in check.along.values}
    assert found["a"].ok
    assert not found["b"].ok
    [spread] = check.along.outputs
    assert spread.worst[0].index == (3,)
    assert spread.worst[0].expected == pytest.approx(-np.exp(3), rel=1e-6)  # a float's own rounding
    assert sum(spread.decades.values()) == 4
    sections = pages.check_sections(check)
    [chart] = views(sections, "chart")
    _, outputs, inputs = sections[0].parts
    assert [row[:3] for row in outputs.rows] == [["FAILED", "1: 4", "y"]]
    assert inputs.rows == [["x", "4"]]
    assert chart.data["series"][0]["bad"] == [False, True, True]
    assert "FAILED" in str(sections[0].parts[0])


def test_errors_along_a_large_graph_are_found_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = text_model("g (float[N] x) => (float[N] y) { a = Relu(x) b = Exp(a) y = Neg(b) }")
    monkeypatch.setattr(layerwise, "_TOGETHER", 1)
    feeds = {"x": np.ones(4, np.float32)}
    assert list(layerwise.chunks(model, ["a", "b", "y"], feeds)) == [["a"], ["b"], ["y"]]
    found = layerwise.errors_along(model, model, feeds, TOLERANCES[onnx_ir.DataType.FLOAT])
    assert [d.output for d in found.values] == ["a", "b", "y"]


def test_errors_along_are_made_only_where_they_are_asked_for() -> None:
    assert validate(text_model(NORM)).along is None
    assert "along" not in validate(text_model(NORM)).to_dict()


def test_an_error_where_none_is_allowed_is_infinitely_much() -> None:
    assert pages.percent(0.0, 0.0) == "0.0%"
    assert pages.percent(1.0, 0.0) == "inf times"
    assert pages.percent(1.0, 4.0) == "25.0%"


# ---- times and memory ------------------------------------------------------------------------


def test_a_profile_knows_the_fused_node_that_an_operator_is_part_of() -> None:
    model = session.load(text_model(NORM))
    rewrite.optimize(model)
    [fused] = [node for node in model.graph if node.domain]
    found = profile.of_onnxruntime(model, {"x": np.ones((2, 8), np.float32)})
    assert label(fused) in {node for span in found.spans for node in span.nodes}
    assert sum(runs for runs, _ in found.operators.values()) == len(found.spans)
    assert all(span.start >= 0 and span.seconds >= 0 for span in found.spans)
    starts = [span.start for span in found.spans]
    assert starts == sorted(starts)


def program_of(path: Path = ENCODER) -> Any:
    model = session.load(path)
    rewrite.optimize(model, own_kernels=True)
    return bench.program(model, H200)


def test_the_page_of_kernel_calls_has_bars_a_timeline_a_roofline_and_memory() -> None:
    program = program_of()
    calls = [(call, site(call, H200).seconds) for call in program.calls if call.launches]
    result = bench.RunResult({}, {}, 1.0, profile.of_calls(calls), program, H200)
    sections = timing.ran(result, session.load(ENCODER))
    titles = [section.title for section in sections]
    assert titles[:2] == ["Time", "Timeline"]
    assert {"Kernels", "Roofline", "Calls", "Graph", "Memory"} <= set(titles)
    [timeline, arena] = views(sections, "plane")
    assert len(timeline.data["rects"]) == len(calls)
    total = sum(seconds for _, seconds in calls)
    assert timeline.data["x"]["high"] == pytest.approx(total)
    roof = next(v for v in views(sections, "chart") if "Roofline" in v.label)
    points = roof.data["series"][-1]
    bound = H200.rate("float16") * 2
    assert all(0 < y < bound for y in points["y"])
    assert arena.data["marks"][0]["x"] < len(program.calls)


def test_programs_of_several_targets_are_told_apart() -> None:
    sections = timing.predicted(program_of(), H200, "h200")
    assert [s.title for s in sections][::3] == ["h200: Kernels", "h200: Memory"]


def test_a_run_on_the_gpu_is_profiled_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu().use(monkeypatch)
    model = session.load(text_model("g (float[N,4] x) => (float[N,4] y) { a = Exp(x) y = Neg(a) }"))
    result = bench.run_once(model, {"x": np.ones((3, 4), np.float32)}, device="cuda", profile=True)
    assert [call for call, _ in result.profile.calls] == list(result.program.calls)
    assert sum(runs for runs, _ in result.operators.values()) == len(result.program.calls)
    sections = timing.ran(result, model)
    assert "Kernels" in [section.title for section in sections]
    [drawn] = views(sections, "graph")[0].data["graphs"]
    facts = next(iter(drawn["facts"].values()))
    assert {"kernel", "configuration", "share of the floor", "time"} <= set(facts)
    assert any(event["ph"] == "X" for event in trace.of_profile(result.profile, result.program))


def test_the_rectangles_of_the_arena_hold_all_that_is_alive() -> None:
    program = program_of()
    layout = plan(program)
    live = memory.live_bytes(program, layout)
    assert 0 < max(live) <= layout.arena
    [view] = [p for p in memory.section(program).parts if isinstance(p, View)]
    rects = view.data["rects"]
    assert max(rect[3] for rect in rects) == layout.arena
    for i, size in enumerate(live):
        alive = sum(high - low for start, end, low, high, *_ in rects if start <= i < end)
        assert size <= alive  # what stands in place of what it was made from counts once


def test_a_trace_has_named_threads_spans_in_microseconds_and_counters() -> None:
    program = program_of()
    calls = [(call, 1e-6 * (i + 1)) for i, call in enumerate(program.calls) if call.launches]
    events = trace.of_profile(profile.of_calls(calls), program)
    spans = [event for event in events if event["ph"] == "X"]
    assert [event["dur"] for event in spans] == pytest.approx([1e6 * s for _, s in calls])
    ends = [event["ts"] + event["dur"] for event in spans]
    assert [event["ts"] for event in spans[1:]] == pytest.approx(ends[:-1])
    names = {event["name"] for event in events if event["ph"] == "M"}
    assert names == {"process_name", "thread_name"}
    assert any(event["ph"] == "C" and event["args"]["bytes"] > 0 for event in events)


def test_run_and_bench_write_a_trace(cli: Cli, tmp_path: Path) -> None:
    for arguments in (("run",), ("bench", "--repeat", 1)):
        path, html = tmp_path / "trace.json", tmp_path / "page.html"
        command, *rest = arguments
        assert cli(command, ENCODER, *rest, "--trace", path, "--html", html).code == 0
        events = json.loads(path.read_text())["traceEvents"]
        assert {"X", "M", "C"} <= {event["ph"] for event in events}
        assert all({"ts", "dur", "pid", "tid"} <= set(e) for e in events if e["ph"] == "X")
        assert any(event["name"].startswith("MatMul ") for event in events)
        assert any("timeline" in d.get("title", "") for d in data_of(html.read_text()))


# ---- training and comparison -----------------------------------------------------------------


def test_a_run_is_drawn_with_what_is_known_of_it() -> None:
    few = training.sections({"": {"losses": [3.0, 2.0]}})
    assert [section.title for section in few] == ["Loss"]
    run = {
        "losses": [1 / (i + 1) for i in range(4000)],
        "lr": [0.1] * 4000,
        "gradient_norms": [None, 2.0] * 2000,
        "examples_per_second": [10.0] * 4000,
        "metrics": [{"step": 2000.0, "epoch": 1.0, "validation_loss": 0.5, "accuracy": 0.25}],
        "epochs": [{"epoch": 1.0, "step": 2000.0, "loss": 0.7}],
    }
    charts = {v.data["title"]: v for v in views(training.sections({"": run}), "chart")}
    names = ("accuracy", "loss", "learning rate", "gradient norm", "examples a second")
    assert tuple(charts) == ("validation loss", *names)
    assert [s.title for s in training.sections({"": run}) if not s.folded] == ["Validation"]
    lines = {line["name"]: line for line in charts["loss"].data["series"]}
    looks = {(x["colour"], x.get("thin"), x.get("dashed")) for x in lines.values()}
    assert len(looks) == len(lines)  # told apart in the key
    assert lines["validation"]["x"] == [2000.0]
    assert len(lines["loss"]["x"]) < 2000
    assert charts["gradient norm"].data["series"][0]["y"] == [2.0] * 1500
    both = views(training.sections({"a": run, "b": {"losses": [1.0]}}), "chart")[2]
    assert {line["name"] for line in both.data["series"]} >= {"a loss", "b loss", "a validation"}


def test_a_live_page_reloads_itself_until_the_run_is_over(tmp_path: Path) -> None:
    path = tmp_path / "live.html"

    def make(run: training.Run, refresh: float) -> Page:
        return Page("m", "", training.sections({"": run}), refresh=refresh)

    live = training.Live(path, make)
    run: Any = SimpleNamespace(history=History(1, 1, losses=[2.0]))
    live.on_step(run)
    assert re.search(r'data-refresh="[1-9]', path.read_text())
    run.history.losses.append(1.0)
    live.on_step(run)
    run.history.metrics.append({"step": 2.0, "validation_loss": 0.5})
    live.on_evaluation(run)
    live.on_epoch(run)  # its last step is noted already
    spans = [event for event in live.events() if event["ph"] == "X"]
    assert [event["name"] for event in spans] == ["step 1", "step 2", "evaluation"]
    assert [event["args"].get("loss") for event in spans] == [2.0, 1.0, None]
    training.Live(None, make).on_step(run)


def test_training_writes_a_trace_of_its_steps_and_of_one_by_operator(
    cli: Cli, saved: Save, tmp_path: Path
) -> None:
    weight = ",".join(map(str, range(12)))
    text = (
        f"g (float[N,4] x) => (float[N,3] y) <float[4,3] w = {{{weight}}}> {{ y = MatMul(x, w) }}"
    )
    labels, data = np.zeros(8, np.int64), tmp_path / "d.npz"
    np.savez(data, x=np.ones((8, 4), np.float32), labels=labels)
    files = {name: tmp_path / name for name in ("t.json", "p.html", "o.onnx")}
    line = ["train", saved(text), "--data", data, "--loss", "cross_entropy", "--batch-size", 4]
    line += ["--trace", files["t.json"], "--html", files["p.html"], "-o", files["o.onnx"]]
    result = cli(*line, "--val", data)
    assert (result.code, result.err) == (0, "")
    events = json.loads(files["t.json"].read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    host = [event["name"] for event in spans if event["pid"] == trace.HOST]
    assert host == ["step 1", "step 2", "evaluation"]
    assert any("MatMul" in event["name"] for event in spans if event["pid"] == trace.STEP)
    html = files["p.html"].read_text()
    assert "Time of a step" in html
    assert 'data-refresh="0"' in html


def test_compare_says_what_two_trainings_came_to() -> None:
    one = {"losses": [2.0, 1.0], "epochs": [{"step": 2, "epoch": 1, "validation_loss": 0.5}]}
    other = {"losses": [2.0, 1.5, 0.75], "epochs": [{"step": 3, "epoch": 1, "loss": 1.0}]}
    found = compare.overview(("a", "b"), one, other)
    assert found.verdict == "a: loss 1 after 2 steps, validation 0.5; b: loss 0.75 after 3 steps"
    assert found.figures == {"lowest validation loss, a": "0.5"}
    named = [row[0] for row in compare.rows(one, other)]
    assert named == ["epochs.1.validation_loss", "epochs.1.loss"]


def test_compare_shows_what_changed_first(cli: Cli, tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    one = {"ratio": 1.0, "same": 3, "noise": [0.9, 1.1], "losses": [2.0, 1.0]}
    other = {"ratio": 0.5, "same": 3, "noise": [0.4, 0.6], "losses": [2.0, 0.5]}
    a.write_text(json.dumps(one))
    b.write_text(json.dumps(other))
    change = "-50.0%, beyond the noise"
    assert compare.rows(compare.read(a), compare.read(b))[0] == ["ratio", "1", "0.5", change]
    shown = compare.overview(("a", "b"), one | {"losses": []}, other)
    assert shown.verdict.endswith("1 of 1 times and ratios differ beyond the noise")
    assert shown.figures["ratio"] == "1 → 0.5"
    change = compare.rows(one, other | {"noise": [0.4, 0.9]})[0][-1]
    assert change == "-50.0%, within the noise"
    result = cli("compare", a, b, "--html", tmp_path / "c.html")
    assert result.code == 0
    assert "-50.0%" in result.out
    assert any(d.get("title") == "loss" for d in data_of((tmp_path / "c.html").read_text()))


def test_compare_draws_error_bars() -> None:
    took = {"median": 2.0, "low": 1.0, "high": 4.0}
    report = {"rounds": [[2.0, 2.0]], "original": took, "fused": took}
    [bars] = views(compare.sections(("a", "b"), report, report), "bars")
    assert bars.data["rows"][0] == ["a: original", 2e-3, "", False, 1e-3, 4e-3]


@pytest.mark.parametrize(
    ("model", "code", "figures", "command"),
    [
        ("y = Tanh(z)", 0, ["0.0%", "1 of 1"], "bench"),
        ("y = Relu(z)", 3, ["runs × outputs"], "--blame"),
    ],
)
def test_a_page_begins_with_the_verdict_three_figures_and_what_to_do(
    cli: Cli, tmp_path: Path, saved: Save, model: str, code: int, figures: list[str], command: str
) -> None:
    weighted = "g (float[2] x) => (float[2] y) <float[2] w = {1,2}> { z = Mul(x, w) %s }"
    right, page_ = saved(weighted % "y = Tanh(z)", "right.onnx"), tmp_path / "p.html"
    line = ["validate", saved(weighted % model), "--against", right, "--grad"]
    assert cli(*line, "--html", page_).code == code
    head = page_.read_text().partition("<nav")[0].partition("<header>")[2]
    assert all(figure in head for figure in figures)
    assert head.count("<dt>") >= 2
    assert f"onnx-fuse {'bench' if code == 0 else 'validate'}" in head
    assert command in head.partition("What to do next")[2]


def test_a_profile_has_a_sum_and_a_run_the_median_of_several(cli: Cli, saved: Save) -> None:
    text = cli(
        "run", saved("g (float[2] x) => (float[2] y) { z = Exp(x) y = Ceil(z) }"), "--profile"
    )
    rows = [line.split("│")[1:-1] for line in text.out.split("time under")[1].splitlines()]
    *parts, whole = [[int(cell) for cell in row[1:3]] for row in rows if len(row) == 4]
    assert [runs for runs, _ in (*parts, whole)] == [1, 1, 2]
    assert abs(sum(us for _, us in parts) - whole[1]) <= 2  # rounded
    assert "ms on cpu, the median of 11 runs" in text.out


def test_compare_refuses_reports_of_two_commands(cli: Cli, tmp_path: Path, saved: Save) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    model = saved("g (float[2] x) => (float[2] y) { y = Exp(x) }")
    assert cli("run", model, "--json", a).code == cli("inspect", model, "--json", b).code == 0
    assert "a.json is a report of run, b.json of inspect" in cli.fails(1, "compare", a, b)


def test_compare_names_settings_that_differ_and_refuses_two_kinds_of_time(
    cli: Cli, tmp_path: Path
) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    report = {"command": "bench", "model": "m.onnx", "clock": "GPU time", "feeds": {"x": [2, 3]}}
    a.write_text(json.dumps(report))
    b.write_text(json.dumps(report | {"model": "n.onnx", "feeds": {"x": [4, 3]}}))
    text = cli.done("compare", a, b)
    assert "not the same model: a.json has m.onnx, b.json has n.onnx" in text
    assert "not the same feeds: a.json has x [2, 3], b.json has x [4, 3]" in text
    b.write_text(json.dumps(report | {"clock": "wall-clock time"}))
    assert "two of one kind of time" in cli.fails(1, "compare", a, b)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_compare_refuses_what_is_no_report(cli: Cli, tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert "not a report that --json has written" in cli.fails(1, "compare", path, path)


def test_the_printer_remembers_what_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    printer = terminal.Printer()
    printer.text("a")
    printer.text("b", "c")
    printer.table("t", ["x"], [["1"], []])
    capsys.readouterr()
    assert printer.blocks == [Lines(["a", "b", "c"]), Table("t", ["x"], [["1"], []], 1)]

"""Tuning: what is tried, what is left out, what is kept; the GPU's part is played by the test."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from lowering import lowered
from support import Cli

from onnx_fuse import config, progress, single_op_models, tune
from onnx_fuse.cli import bench
from onnx_fuse.cuda import cublaslt
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import candidates, select, tuning
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Call
from onnx_fuse.program.problem import CHIPS, PRECISIONS
from onnx_fuse.program.problems import Norm
from onnx_fuse.report.terminal import Printer

H200 = CHIPS["H200"]
SHAPE = (512, 768, 3072)


class Played:
    """Operands of no GPU: the later a configuration is tried the faster, the last one is wrong."""

    made: ClassVar[list[str]] = []

    def __init__(self, call: Call, workspace: int, hw: object) -> None:
        self.made.clear()

    def results(self, call: Call) -> list[np.ndarray]:
        return [np.array([float(len(self.made))])]

    def agree(self, got: list[np.ndarray], want: list[np.ndarray], math: str) -> bool:
        return len(self.made) < 5

    def graph(self, call: Call) -> Callable[[], float]:
        self.made.append(call.why)
        seconds = 1e-3 / len(self.made)
        return lambda: seconds


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tune, "Operands", Played)
    monkeypatch.setattr(tune.nvrtc, "compile_all", lambda *_: None)
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("op", ["Gemm", "LayerNormGemm", "MatMulNBits"])
def test_an_operator_by_name_is_the_problem_a_model_has(op: str, precision: str) -> None:
    (call,) = tune.calls_of(single_op_models.program_of(op, SHAPE, precision, H200), op)
    dtype, math = PRECISIONS[precision]
    assert (call.problem.dtype, call.problem.math) == (dtype, math)
    assert (call.problem.m, call.problem.k, call.problem.n) == SHAPE
    folded = op == "LayerNormGemm" and dtype != "float32"
    assert getattr(call.problem, "folded", False) == folded  # as inference has it


@pytest.mark.parametrize("op", ["Norm", "Softmax", "Reduce", "Conv"])
def test_an_operator_that_a_rule_runs_is_tuned_by_name(op: str, played: Path) -> None:
    (call,) = tune.calls_of(single_op_models.program_of(op, SHAPE, "bf16", H200), op)
    (found,) = tune.tune([call], H200)
    assert found.tried >= 2
    assert found.floor > 0
    choice = select(op, found.problem, H200)
    assert choice.why == "tuning record"
    assert (choice.kernel.name, str(choice.config)) == (found.kernel, found.config)


def test_what_has_no_choice_is_not_timed(played: Path) -> None:
    """A gradient's sums over parts have one kernel and one configuration."""
    graph = text_model(
        "agraph (float[64,768] dy, float[64,768] x, float[768] s, float[64,1] m, "
        "float[64,1] r) => (float[64,768] dx, float[768] ds, float[768] db) "
        "{ dx, ds, db = onnx_fuse.LayerNormGrad (dy, x, s, m, r) }"
    )
    calls = tune.calls_of(lowered(graph))
    assert [c.problem.op for c in calls if c.problem] == ["NormGrad", "NormGradSums"]
    assert [found.problem.op for found in tune.tune(calls, H200)] == ["NormGrad"]


def test_the_gradient_is_tuned_by_name() -> None:
    program = single_op_models.program_of("LayerNormGemmGrad", SHAPE, "bf16", H200)
    assert [c.problem.op for c in tune.calls_of(program, "LayerNormGemmGrad") if c.problem] == [
        "LayerNormGemmGrad"
    ]


def test_the_fastest_that_agrees_is_kept_and_selected(played: Path) -> None:
    calls = tune.calls_of(single_op_models.program_of("LayerNormGemm", SHAPE, "bf16", H200))
    (found,) = tune.tune(calls, H200)
    assert found.tried == 5
    assert len(found.refused) > 1
    assert found.us == pytest.approx(200.0)
    assert found.before_us == pytest.approx(1000.0)
    choice = select("LayerNormGemm", found.problem, H200)
    assert (choice.kernel.name, str(choice.config)) == (found.kernel, found.config)
    assert choice.why == "tuning record"
    assert found.before != f"{found.kernel} {found.config}"


@pytest.mark.parametrize(("faster", "replaced"), [(0.005, False), (0.02, True)])
def test_what_is_hardly_faster_replaces_nothing(
    faster: float, replaced: bool, played: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "medians", lambda runs: [1.0, *(1 - faster for _ in runs[1:])])
    calls = tune.calls_of(single_op_models.program_of("LayerNormGemm", SHAPE, "bf16", H200))
    (found,) = tune.tune(calls, H200)
    assert (found.before != f"{found.kernel} {found.config}") == replaced


def test_records_go_where_they_are_asked_to(played: Path) -> None:
    calls = tune.calls_of(single_op_models.program_of("Gemm", SHAPE, "fp16", H200))
    (found,) = tune.tune(calls, H200, folder=played / "mine")
    (path,) = (played / "mine").iterdir()
    records = json.loads(path.read_text())
    assert list(records) == [tuning.key("Gemm", found.problem)]
    assert not (played / "tuning").exists()


def test_records_of_sources_that_changed_go_when_others_are_kept(played: Path) -> None:
    calls = tune.calls_of(single_op_models.program_of("Gemm", SHAPE, "fp16", H200))
    (found,) = tune.tune(calls, H200, folder=played / "mine")
    (path,) = (played / "mine").iterdir()
    (record,) = json.loads(path.read_text()).values()
    name = tuning.key("Gemm", found.problem)
    other = name.replace(f"m={found.problem.m} ", "m=510 ")
    dead = {
        name.replace(f"m={found.problem.m} ", "m=1601 "): {**record, "version": 0},
        name.replace(f"m={found.problem.m} ", "m=1602 "): {**record, "kernel": "gone"},
        name.replace("m=", "size="): {**record, "kernel": "old"},
    }
    path.write_text(json.dumps({other: record, **dead}))
    tuning.save([("Gemm", found.problem, record)], H200, played / "mine", candidates)
    assert set(json.loads(path.read_text())) == {other, name}


def test_shipped_records_are_of_the_sources_beside_them() -> None:
    dead = [
        f"{path.name}: {name}"
        for chip, hw in CHIPS.items()
        for path in tuning.SHIPPED.glob(f"*{chip}*.json")
        for name, entry in json.loads(path.read_text()).items()
        if not tuning.is_current(name, entry, hw, candidates(name.partition(" | ")[0]))
    ]
    assert not dead, "measure again, or delete what select cannot use any more"


NORMS = """agraph (float[512,768] x, float[768] s, float[768] b, float[512,768] r)
  => (float[512,768] y, float[512,768] z) {
  n = LayerNormalization <axis = -1> (x, s, b)
  y = Tanh (n)
  m = LayerNormalization <axis = -1> (r, s, b)
  z = Add (m, x)
}
"""


def test_what_a_norm_does_before_it_stores_parts_records(played: Path) -> None:
    """Each is saved beside those before it, whose keys are read to see that their code is alike."""
    shapes = {"x": (512, 768), "s": (768,), "b": (768,), "r": (512, 768)}
    graph = text_model(NORMS)
    program = lower(graph, {n: (s, "float32") for n, s in shapes.items()}, H200)
    found = list(tune.tune(tune.calls_of(program), H200))
    steps = {str(f.problem.tail) for f in found if isinstance(f.problem, Norm)}
    assert steps == {"Tanh", "Add"}
    (path,) = (played / "tuning").iterdir()
    assert set(json.loads(path.read_text())) == {tuning.key(f.problem.op, f.problem) for f in found}
    for f in found:
        choice = select(f.problem.op, f.problem, H200)
        assert choice.why == "tuning record"
        assert (choice.kernel.name, str(choice.config)) == (f.kernel, f.config)


def test_records_of_configurations_that_are_no_more_go(played: Path) -> None:
    """An earlier version's may lack what the kernel's own code asks of them."""
    (call,) = tune.calls_of(single_op_models.program_of("Gemm", SHAPE, "bf16", H200))
    assert call.problem is not None
    entry = {"kernel": "wgmma", "config": {"stages": 4}, "us": 1.0, "version": 1}
    name = tuning.key("Gemm", call.problem)
    assert not tuning.is_current(name, entry, H200, candidates("Gemm"))


def test_the_gain_counts_each_call_of_a_model(
    played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = tune.calls_of(single_op_models.program_of("LayerNormGemm", SHAPE, "bf16", H200))
    (problem,) = [call.problem for call in calls]
    counts = {tuning.key(problem.op, problem): 12}
    (data,) = bench._tune(Printer(), calls, counts, H200, 60, 6, None)
    assert (data["before_us"], data["us"]) == (pytest.approx(1000.0), pytest.approx(200.0))
    says = "12 calls of 1 problem: 12,000.0 µs as chosen before, 2,400.0 µs by the fastest"
    assert says in capsys.readouterr().out
    (data,) = bench._tune(Printer(), calls, {}, H200, 60, 6, None)
    assert "1 call of 1 problem" in capsys.readouterr().out


def test_no_problem_is_begun_after_the_limit(played: Path) -> None:
    calls = tune.calls_of(single_op_models.program_of("Gemm", SHAPE, "fp16", H200))
    told: list[str] = []
    with progress.watched(lambda what, done, total: told.append(what)):
        assert list(tune.tune(calls, H200, seconds=-1)) == []
    assert told == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["Gemm", "--tune", "--shape", "8,8", "--precision", "fp16"], "M,K,N"),
        (["Gemm", "--tune", "--precision", "int8"], "choose one of"),
        (["Gem", "--tune"], "Gem"),
        (["model.onnx", "--shape", "8,8,8"], "--tune"),
    ],
)
def test_what_cannot_be_tuned_is_said(cli: Cli, arguments: list[str], says: str) -> None:
    result = cli("bench", *arguments)
    assert result.code != 0
    assert says in result.err


def test_a_choice_is_bound_as_a_session_binds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's call has no source to compile."""
    program = single_op_models.program_of("Gemm", SHAPE, "bf16", H200)
    (call,) = tune.calls_of(program)
    call = replace(call, launches=(replace(call.launches[0], source="", product=call.problem),))
    made: list[object] = []
    monkeypatch.setattr(cublaslt, "BoundMatmul", lambda *given: made.append(given[0]))
    operands = object.__new__(tune.Operands)
    operands.hw = H200
    assert operands._bound(call, {}) == [None]
    assert made == [call.launches[0]]


@pytest.mark.parametrize(
    ("got", "agrees"),
    [
        ([1.0, -2.0, np.nan, np.inf], True),
        ([1.0 + 1e-6, -2.0, np.nan, np.inf], True),
        ([1.0 + 1e-3, -2.0, np.nan, np.inf], False),
        ([1.0, -2.0, 0.0, np.inf], False),
        ([1.0, np.nan, np.nan, np.inf], False),
        ([1.0, -2.0, np.nan, -np.inf], False),
    ],
)
def test_results_agree_up_to_rounding(got: list[float], agrees: bool) -> None:
    want = np.array([1.0, -2.0, np.nan, np.inf], np.float32)
    assert tune.Operands.agree([np.array(got, np.float32)], [want]) == agrees
    rounded = [np.array([1.0 + 1e-3, *got[1:]], np.float32)]
    assert tune.Operands.agree(rounded, [want], "tf32") == (agrees or got[0] != 1.0)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_operands_of_a_norms_gradient_are_of_one_forward(precision: str) -> None:
    """The mean over k of g xh is a sum over n of dy (z - v): kernels take one or the other."""
    (call,) = tune.calls_of(
        single_op_models.program_of("LayerNormGemmGrad", SHAPE, precision, H200),
        "LayerNormGemmGrad",
    )
    m, k, n = SHAPE
    rng = np.random.default_rng(0)
    filled = {name: tune._random(rng, name, t) for name, t in call.reads}
    of = {
        name: a.astype(np.float64)
        for name, a in (filled | tune._forward(call.problem, filled)).items()
    }
    w, dy, z = of["w"].reshape(k, n), of["dy"].reshape(m, n), of["z"].reshape(m, n)
    xh = (of["x"].reshape(m, k) - of["mean"][:, None]) * of["rstd"][:, None]
    by_product = (dy @ (of["gamma"][:, None] * w).T * xh).sum(1)
    by_z = (dy * (z - of["beta"] @ w - of["c"])).sum(1)
    limit = 4e-3 if precision == "fp16" else 2e-2  # z is rounded
    np.testing.assert_allclose(by_z, by_product, rtol=0, atol=limit * np.abs(by_product).max())

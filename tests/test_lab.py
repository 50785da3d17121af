"""The kernel lab: what it tries, what it refuses, what it keeps; the test plays the GPU's part."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Cli
from test_plugins import Squash, squash

import onnx_fuse as of
from onnx_fuse import config, lab, single_op_models, tune
from onnx_fuse.cli import lab as command
from onnx_fuse.cuda.source import source_root
from onnx_fuse.errors import UsageError
from onnx_fuse.kernels import candidates, select
from onnx_fuse.program.call import Call
from onnx_fuse.program.problem import CHIPS

H200 = CHIPS["H200"]
SHAPE = (512, 768, 3072)


class Played:
    """Operands of no GPU, on which kernels of `wrong` names compute something else."""

    wrong = ""

    def __init__(self, call: Call, workspace: int, hw: object) -> None:
        self.calls = 0

    def results(self, call: Call) -> list[np.ndarray]:
        return [np.array([float(bool(self.wrong) and call.why.startswith(self.wrong))])]

    def agree(self, got: list[np.ndarray], want: list[np.ndarray], math: str) -> bool:
        return np.array_equal(got[0], want[0])

    def graph(self, call: Call) -> Callable[[], float]:
        self.calls += 1
        seconds = 1e-3 / self.calls
        return lambda: seconds


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tune, "Operands", Played)
    monkeypatch.setattr(tune.nvrtc, "compile_all", lambda *_: None)
    monkeypatch.setattr(Played, "wrong", "")
    monkeypatch.setattr(lab, "CASES", lab.CASES[:2])
    monkeypatch.setattr(command, "hardware_of", lambda device: H200)
    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("op", ["Gemm", "LayerNormGemm", "LayerNormGemmGrad", "Softmax"])
def test_all_configurations_are_checked_in_all_cases(op: str, played: Path) -> None:
    call = lab.of(op, SHAPE, "bf16", H200)
    kernels = lab.kernels_of(op, None, call, H200)
    assert {k.name for k in kernels} <= {k.name for k in candidates(op)}
    cases = lab.cases_of(op, "bf16", H200)
    rows = list(lab.check(kernels, cases, H200, time.monotonic() + 60))
    assert {row.kernel for row in rows} == {k.name for k in kernels}
    assert all(row.cases >= 1 and not row.fault for row in rows)


def test_each_kernel_of_a_size_is_timed(played: Path, cli: Cli) -> None:
    """Large sizes have configurations that no case has."""
    result = cli("lab", "LayerNormGemmGrad", "--precision", "bf16", "--shape", "8192,768,3072",
                 "--json", played / "lab.json")  # fmt: skip
    assert result.code == 0
    timed = json.loads((played / "lab.json").read_text())["timed"]
    assert {row["kernel"] for row in timed} == {"two_gemms", "portable"}


def test_what_is_wrong_is_said_and_not_timed(played: Path, cli: Cli) -> None:
    Played.wrong = "mma"
    result = cli("lab", "Gemm", "--precision", "bf16", "--json", played / "lab.json",
                 "--html", played / "lab.html")  # fmt: skip
    assert result.code == 3
    assert "configurations wrong" in (played / "lab.html").read_text()
    assert "wrong: mma" in result.out + result.err
    assert "not here: wgmma_split: " in result.out
    data = json.loads((played / "lab.json").read_text())
    assert {row["kernel"] for row in data["checked"] if row["fault"]} == {"mma"}
    assert "mma" not in {row["kernel"] for row in data["timed"]}


def test_the_fastest_is_frozen_and_selected(played: Path, cli: Cli) -> None:
    result = cli("lab", "Gemm", "--precision", "bf16", "--shape", "512,768,3072", "--freeze")
    assert result.code == 0, result.out + result.err
    assert "of floor" in result.out + result.err
    problem = lab.of("Gemm", SHAPE, "bf16", H200).problem
    assert problem is not None
    choice = select("Gemm", problem, H200)
    assert choice.why == "tuning record"


def test_a_changed_source_is_tried_beside_the_kernel_that_has_it(tmp_path: Path) -> None:
    call = lab.of("Gemm", SHAPE, "bf16", H200)
    file = tmp_path / "mma_sm80.cu"
    file.write_text("// changed\n" + (source_root() / "gemm/mma_sm80.cu").read_text())
    plain, changed = lab.kernels_of("Gemm", file, call, H200)[:2]
    problem: Any = call.problem
    how = next(iter(plain.configs(problem, H200)))
    assert changed.name == f"{plain.name} ({file})"
    assert changed.cost(problem, how, H200) == plain.cost(problem, how, H200)
    ours, theirs = (k.launch(problem, how, H200) for k in (changed, plain))
    assert [x.source.startswith("// changed") for x in ours] == [
        x.source.endswith("mma_sm80.cu") for x in theirs
    ]
    (tmp_path / "other.cu").write_text("")
    with pytest.raises(UsageError, match=r"has a source named other\.cu"):
        lab.kernels_of("Gemm", tmp_path / "other.cu", call, H200)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("LayerNormGem",), "unknown operator 'LayerNormGem' (did you mean 'LayerNormGemm'?)"),
        (("Gemm", "--records", "x"), "--freeze"),
    ],
)
def test_what_it_cannot_do_is_a_sentence(given: Any, says: str, cli: Cli) -> None:
    result = cli("lab", *given)
    assert result.code == 2
    assert says in result.out + result.err


@pytest.mark.parametrize("op", single_op_models.OPS)
def test_every_operator_has_a_graph_that_calls_it(op: str) -> None:
    call = lab.of(op, (190, 136, 200), "bf16", H200)
    assert call.problem is not None
    assert lab.kernels_of(op, None, call, H200)


class OfBody(Played):
    """The same for `Squash` of test_plugins.py, whose answers NumPy gives."""

    agree = staticmethod(tune.Operands.agree)
    ends = staticmethod(tune.Operands.ends)

    def __init__(self, call: Call, workspace: int, hw: object) -> None:
        super().__init__(call, workspace, hw)
        rng = np.random.default_rng(0)
        self.filled = {name: tune._random(rng, name, t) for name, t in call.reads}

    def results(self, call: Call) -> list[np.ndarray]:
        x, scale = self.filled["x"].reshape(30, 40), self.filled["scale"]
        return self.ends([2 * np.tanh(x * scale) + bool(self.wrong)])


@pytest.mark.parametrize("wrong", ["", "mine"])
def test_kernels_of_a_registered_operator_are_compared_with_its_body(
    wrong: str, played: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "Operands", OfBody)
    monkeypatch.setattr(Played, "wrong", wrong)
    of.register_op(squash())
    try:
        shapes = ("--input-shapes", "x:30,40", "scale:40")
        result = cli("lab", "my.ops::Squash", *shapes)
        assert "no kernel of my.ops::Squash serves" in result.out + result.err
        of.register_kernel("my.ops::Squash", Squash())
        result = cli("lab", "my.ops::Squash", *shapes, "--freeze")
        if wrong:
            assert "wrong: mine" in result.out + result.err
            assert "differs from body" in result.out + result.err
            return
        assert result.code == 0, result.out + result.err
        call, _ = lab.of_registered("my.ops::Squash", {"x": [30, 40], "scale": [40]}, H200)
        assert getattr(select("my.ops::Squash", call.problem, H200), "why", "") == "tuning record"
        result = cli("lab", "my.ops::Squash", "--shape", "1,2,3")
        assert "--input-shapes is for operators domain::Name" in result.out + result.err
    finally:
        of.plugins.unregister("my.ops::Squash")


def test_a_candidate_file_that_wins_is_not_frozen_in_silence(played: Path, cli: Cli) -> None:
    file = played / "mma_sm80.cu"
    file.write_text("// changed\n" + (source_root() / "gemm/mma_sm80.cu").read_text())
    result = cli("lab", "Gemm", "--precision", "bf16", "--candidate", file, "--tune", "--freeze")
    assert result.code == 0, result.out + result.err
    assert "not frozen: mma (" in result.out.replace("\n", " ")

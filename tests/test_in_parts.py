"""Why an operator with kernels of its own is lowered, or trained, in parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
from lowering import H200, lowered, two_norms

from onnx_fuse import Trainer
from onnx_fuse.ir.build import text_model
from onnx_fuse.lower import linear
from onnx_fuse.program.call import Program
from onnx_fuse.program.problem import CHIPS

GRADIENT = """agraph ({d}[{m},{n}] dy, {d}[{m},{k}] x, {d}[{k}] s,
        {d}[{k}] b, {d}[{k},{n}] w, {d}[{n}] c, float[{m},1] mean, float[{m},1] rstd,
        {d}[{m},{n}] z)
    => ({d}[{m},{k}] dx, {d}[{k}] ds, {d}[{k}] db, {d}[{k},{n}] dw, {d}[{n}] dc)
    {{ dx, ds, db, dw, dc = onnx_fuse.LayerNormGemmGrad (dy, x, s, b, w, c, mean, rstd, z) }}"""


def program_of(shape: tuple[int, int, int], dtype: str, math: str, chip: str) -> Program:
    m, k, n = shape
    model = text_model(GRADIENT.format(m=m, k=k, n=n, d=dtype))
    return lowered(model, CHIPS[chip], math=math)


DEAR = {"LayerNormGemmGrad": 3e-5}
"""Seconds on paper of a kernel beside which all others take 3.3 us."""


def dear(monkeypatch: pytest.MonkeyPatch) -> None:
    def total(problems: Any, *_: Any) -> float:
        return sum(DEAR.get(problem.op, 1e-5 / 3) for problem in problems)

    monkeypatch.setattr(linear, "total", total)


def test_the_reason_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    dear(monkeypatch)
    program = program_of((64, 60, 130), "float", "ieee", "A100")
    assert "LayerNormGemmGrad" not in [c.problem.op for c in program.calls if c.problem]
    assert program.in_parts == ("LayerNormGemmGrad: its parts are faster: 10.0 µs against 30.0",)


def test_who_forces_the_kernel_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dear(monkeypatch)
    monkeypatch.setenv("ONNX_FUSE_KERNEL", "LayerNormGemmGrad=two_gemms")
    program = program_of((8192, 64, 64), "float", "bf16x6", "H200")
    assert [c.problem.op for c in program.calls if c.problem] == ["LayerNormGemmGrad"]
    assert not program.in_parts


def test_explain_prints_it(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dear(monkeypatch)
    path = tmp_path / "gradient.onnx"
    onnx_ir.save(text_model(GRADIENT.format(m=64, k=64, n=128, d="float")), path)
    options = ["--target", "h200", "--no-check", "-o", tmp_path / "o.onnx"]
    reason = "in parts: LayerNormGemmGrad: "
    assert reason in cli("optimize", path, *options, "--explain").out
    assert reason not in cli("optimize", path, *options).out


@pytest.mark.parametrize(
    ("rows", "precision", "said"),
    [
        (8192, "bf16x3", ""),
        (64, "bf16x3", "LayerNorm and Gemm of 64 x 768 x 768: "),
        (8192, "fp32", "LayerNorm and Gemm of 8192 x 768 x 768: "),
        (8192, "bf16", ""),
    ],
)
def test_a_trainer_says_what_it_trains_in_parts(rows: int, precision: str, said: str) -> None:
    model = two_norms(rows)
    trainer = Trainer(model, loss="mse", precision=precision, level=1, device="cuda", hardware=H200)
    assert len(trainer.in_parts) == bool(said)  # a size stands there once
    assert all(said in line for line in trainer.in_parts)

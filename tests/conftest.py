"""Fixtures that every test file may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir
import pytest

from onnx_fuse import cli as command
from onnx_fuse import ir

ENCODER = Path(__file__).parent.parent / "models" / "encoder.onnx"


@dataclass(frozen=True)
class Result:
    """What one call of the command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


Cli = Callable[..., Result]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """`cli("optimize", path, "--explain")` runs the command in this process."""

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = command.run_command(command.expand([str(a) for a in arguments]))
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """`saved(text or model, name)` writes a model into the test's folder."""

    def save(model: str | onnx_ir.Model, name: str = "model.onnx") -> Path:
        path = tmp_path / name
        ir.save(ir.text_model(model) if isinstance(model, str) else model, path)
        return path

    return save

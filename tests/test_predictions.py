"""tools/predictions.py: calls that are alike are timed once and counted, the worst come first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import predictions

from onnx_fuse import alone
from onnx_fuse.kernels import site
from onnx_fuse.program.call import Call
from onnx_fuse.program.problem import CHIPS, Hardware

H200 = CHIPS["H200"]


class Played:
    """An instance of no GPU, whose calls take twice their predicted time."""

    def __init__(self, *calls: Call) -> None:
        self.program = SimpleNamespace(calls=calls)

    def profile(self, wanted: Callable[[Call], bool]) -> list[tuple[Call, float]]:
        return [(c, 2 * site(c, H200).seconds) for c in self.program.calls if wanted(c)]


def call(op: str, *shape: int) -> Call:
    found = [c for c in alone.program_of(op, shape, "fp16", H200).calls if c.problem]
    return found[-1]


def test_calls_that_are_alike_are_timed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Hardware, "detect", lambda _: H200)
    large, small = call("Gemm", 4096, 4096, 4096), call("Softmax", 8, 64, 1)
    instance = Played(large, small, replace(large, nodes=("another",)))
    found = predictions.timed(instance)  # type: ignore[arg-type]
    assert [row.count for row in found] == [2, 1]
    assert [row.off for row in found] == pytest.approx([2.0, 2.0])
    predictions.show("model", found, 20.0, 10)
    first, *listed = capsys.readouterr().out.splitlines()
    assert first.startswith("model: 0 of 2 calls over 20 us within 1.5; ")
    assert len(listed) == 1
    assert "2 of  Gemm" in listed[0]
    found = [replace(row, measured=1.4 * row.predicted) for row in found]
    predictions.show("model", found, 20.0, 0)
    assert capsys.readouterr().out.startswith("model: 2 of 2 calls over 20 us")

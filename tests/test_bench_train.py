"""tools/bench_train.py: figures come one by one, and an arm that takes too long is ended."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import bench_train

SLOW = """
import json, time
print("a library's line")
print(json.dumps({"first": 1.5}), flush=True)
print(json.dumps({"step": 0.002}), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("script", "limit", "error"),
    [
        (SLOW, 1.0, "ended after 1 s"),
        (SLOW.replace("time.sleep(60)", "raise SystemExit('no GPU')"), 30.0, "no GPU"),
        (SLOW.replace("time.sleep(60)", ""), 30.0, None),
    ],
)
def test_figures_found_until_an_arm_ends_are_kept(
    script: str,
    limit: float,
    error: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "arm.py").write_text(script)
    monkeypatch.setattr(bench_train, "__file__", str(tmp_path / "arm.py"))
    options = argparse.Namespace(layers=0, profile=False, limit=limit)
    found = bench_train.measured("mlp", "cold", str(tmp_path), options)
    assert found == {"first": 1.5, "step": 0.002} | ({"error": error} if error else {})
    shown = f"  cold    first 1.50 s  step 2.000 ms{f'  {error}' if error else ''}\n"
    assert capsys.readouterr().out == shown

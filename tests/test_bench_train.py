"""tools/bench_train.py: figures come one by one, arms in turn, and one that takes long is ended."""

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path

import bench_train
import pytest

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
    script: str, limit: float, error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "arm.py").write_text(script)
    monkeypatch.setattr(bench_train, "__file__", str(tmp_path / "arm.py"))
    options = argparse.Namespace(layers=0, adapters=0, profile=False, limit=limit)
    shown: list[str] = []
    found = bench_train.measured("mlp", "cold", {}, options, shown.append)
    assert found == {"first": 1.5, "step": 0.002} | ({"error": error} if error else {})
    assert shown == ["  first 1.50 s", "  step 2.000 ms"] + ([f"  {error}"] if error else [])


TURN = """
import json, sys, time
sys.path.insert(0, TOOLS)
from gpu_turns import Turn
turn = Turn()
time.sleep(0.5 if "torch" in sys.argv else 0.1)
ready = time.time()
turn.take()
begun = time.time()
time.sleep(0.2)
print(json.dumps({"ready": ready, "begun": begun, "step": time.time()}))
"""


def test_arms_get_ready_together_and_are_timed_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = TURN.replace("TOOLS", repr(str(Path(bench_train.__file__).parent)))
    (tmp_path / "arm.py").write_text(script)
    monkeypatch.setattr(bench_train, "__file__", str(tmp_path / "arm.py"))
    monkeypatch.setattr(bench_train, "devices", lambda: ["0"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    only = ["mlp", "vit"]
    options = argparse.Namespace(
        layers=0, adapters=0, profile=False, limit=30.0, only=only, json=None
    )
    rows = {name: {"model": name} for name in only}
    bench_train.at_once(options, rows)
    times = sorted((rows[name][arm] for name in only for arm in ("cold", "torch")),
                   key=lambda found: found["begun"])  # fmt: skip
    assert times[0]["begun"] >= max(found["ready"] for found in times)
    assert all(a["step"] <= b["begun"] for a, b in pairwise(times))
    out = capsys.readouterr().out
    assert out.count("of torch.compile's step") == 2

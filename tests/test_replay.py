"""tools/replay.py: two recordings of one package are equal, and a changed graph is noticed."""

from functools import partial
from pathlib import Path

import pytest
import replay

from onnx_fuse import rewrite

ONLY = ["--only", "fusion gemm_transposed_weight"]


def test_a_changed_graph_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(tmp_path / name) for name in ("before", "again", "after")]
    for folder in folders[:2]:
        assert replay.main(["record", folder, *ONLY]) == 0
    assert replay.main(["compare", *folders[:2]]) == 0
    counts = capsys.readouterr().out
    assert "graph: 0 of 5 differ" in counts
    assert "launches: 0 of 2 differ" in counts
    assert "results: 0 of 2 differ" in counts

    monkeypatch.setattr(rewrite, "optimize", partial(rewrite.optimize, skip=["Gemm"]))
    replay.main(["record", folders[2], *ONLY])
    capsys.readouterr()
    assert replay.main(["compare", folders[0], folders[2]]) == 1
    shown = capsys.readouterr().out
    assert "+z: FLOAT[B,24] = Gemm<transB=1>(x, w, c)" in shown

    allowed = tmp_path / "allowed"
    allowed.write_text("*/fusion gemm_transposed_weight/*  # the fusion is off\n")
    assert replay.main(["compare", folders[0], folders[2], "--allow", str(allowed)]) == 0

"""Ranks on GPUs: the curves of one GPU, the same bits twice, and the step as one graph."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rank_runs import check_killed
from rank_worker import CASES, PLACES, RANKS, WIDE

from onnx_fuse.distributed import launch, nccl
from onnx_fuse.errors import DeviceError
from onnx_fuse.runtime import device

pytestmark = pytest.mark.gpu
WORKER = [sys.executable, str(Path(__file__).parents[1] / "rank_worker.py"), "curves"]
COMPILED = ("clip", "sharded")
"""Cases whose steps the second run compiles: for one size, whose kernels may be others."""
TOLERANCE = 1e-3
"""Of 50 steps of AdamW: where a gradient is near 0, its sign decides about a step of lr."""


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> None:
    try:
        nccl.bindings()
        device.probe(RANKS - 1)
    except DeviceError as error:
        pytest.skip(str(error))


def curves(
    folder: Path, ranks: int, *, ranked: bool, **environ: str
) -> list[dict[str, np.ndarray]]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setenv("DEVICE", "cuda")
        patch.setenv("RANKS", str(ranks))
        if not ranked:
            subprocess.run([*WORKER, str(folder)], check=True)
            return [dict(np.load(folder / "one.npz"))]
        assert launch.run([*WORKER, str(folder)], ranks) == 0
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_as_one_gpu_with_their_batches(tmp_path: Path, ranks: int) -> None:
    try:
        device.probe(ranks - 1)
    except DeviceError as error:
        pytest.skip(str(error))
    (one,) = curves(tmp_path, ranks, ranked=False)
    first, *others = curves(tmp_path, ranks, ranked=True)
    again = curves(tmp_path, ranks, ranked=True, COMPILED=",".join(COMPILED), BUDGET="spread")[0]
    for name, expected in one.items():
        case, what = name.split(maxsplit=1)
        assert case in CASES
        if what == "bytes":
            continue
        for other in others:
            np.testing.assert_array_equal(first[name], other[name], err_msg=name)
        limit = WIDE.get(case, TOLERANCE)
        same = limit if case in COMPILED else 0.0
        np.testing.assert_allclose(first[name], again[name], same, same, err_msg=f"again, {name}")
        np.testing.assert_allclose(first[name], expected, rtol=limit, atol=limit, err_msg=name)


def test_a_rank_killed_anywhere_ends_the_other_and_its_run_resumes(tmp_path: Path) -> None:
    check_killed(tmp_path, "cuda", PLACES, TOLERANCE)


def test_a_gpu_that_hangs_ends_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ahead of a step that is one graph already; the hosts of both ranks wait for it."""
    for name, value in (("DEVICE", "cuda"), ("ONNX_FUSE_PATIENCE", "4"), ("ONNX_FUSE_STALL", "8")):
        monkeypatch.setenv(name, value)
    assert launch.run([*WORKER[:2], "inside", str(tmp_path)], RANKS) == 1
    assert "rank 1 has " in capfd.readouterr().err
    assert not (tmp_path / "finished").exists()

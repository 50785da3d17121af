"""A model on several devices: one queue of batches, and a batch that is split."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import Cli

from onnx_fuse import InferenceSession, Replicas, UsageError

TEXT = """net (float[batch, 3] x, float[3] scale) => (float[batch, 4] y) <float[3, 4] w =
    {0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0}> {
    z = Mul (x, scale)
    y = MatMul (z, w)
}"""
TOTAL = """net (float[batch, 3] x) => (float y) { y = ReduceSum <keepdims = 0> (x) }"""
SCALE = np.array([1.0, 2.0, 3.0], np.float32)


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_a_batch_is_split_and_joined_in_order(rows: int, saved: Callable[..., Path]) -> None:
    path = saved(TEXT)
    feeds = {"x": np.arange(rows * 3, dtype=np.float32).reshape(rows, 3), "scale": SCALE}
    with Replicas(path, ["cpu"] * 3) as replicas:
        (found,) = replicas.run(None, feeds)
    np.testing.assert_array_equal(found, InferenceSession(path).run(None, feeds)[0])


def test_a_queue_serves_many_batches_and_passes_errors_on(saved: Callable[..., Path]) -> None:
    with Replicas(saved(TEXT), ["cpu", "cpu"]) as replicas:
        x = np.ones((2, 3), np.float32)
        running = [replicas.submit(["y"], {"x": i * x, "scale": SCALE}) for i in range(20)]
        bad = replicas.submit(None, {"x": np.ones((2, 5), np.float32), "scale": SCALE})
        for i, each in enumerate(running):
            np.testing.assert_allclose(each.result()[0], i * replicas.run(None, {
                "x": x, "scale": SCALE})[0])  # fmt: skip
        with pytest.raises(Exception, match="invalid dimensions"):
            bad.result()


def test_what_cannot_be_split_is_refused(saved: Callable[..., Path]) -> None:
    with (
        Replicas(saved(TOTAL), ["cpu", "cpu"]) as replicas,
        pytest.raises(UsageError, match="output 'y' lacks"),
    ):
        replicas.run(None, {"x": np.ones((2, 3), np.float32)})


def test_run_spreads_a_batch(saved: Callable[..., Path], cli: Cli, tmp_path: Path) -> None:
    path, feeds = saved(TEXT), tmp_path / "feeds.npz"
    np.savez(feeds, x=np.ones((5, 3), np.float32), scale=SCALE)
    outputs = []
    for gpus in ("1", "2"):
        result = cli("run", path, "--inputs", feeds, "-o", tmp_path / f"{gpus}.npz", "--gpus",
                     gpus, "--json", tmp_path / "run.json")  # fmt: skip
        assert result.code == 0, result.err
        assert json.loads((tmp_path / "run.json").read_text())["outputs"]["y"]["shape"] == [5, 4]
        outputs.append(np.load(tmp_path / f"{gpus}.npz")["y"])
    np.testing.assert_array_equal(*outputs)
    assert "give it by --inputs" in cli("run", path, "--gpus", "2").err

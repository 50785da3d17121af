"""A model on several devices: one queue of batches, and a batch that is split."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import Cli, assert_same

from onnx_fuse import InferenceSession, Replicas, UsageError
from onnx_fuse.replicas import run_together

TEXT = """net (float[batch, 3] x, float[3] scale) => (float[batch, 4] y) <float[3, 4] w =
    {0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0}>
    { z = Mul (x, scale)  y = MatMul (z, w) }"""
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
        cli.done("run", path, "--inputs", feeds, "-o", tmp_path / f"{gpus}.npz", "--gpus",
                     gpus, "--json", tmp_path / "run.json")  # fmt: skip
        assert json.loads((tmp_path / "run.json").read_text())["outputs"]["y"]["shape"] == [5, 4]
        outputs.append(np.load(tmp_path / f"{gpus}.npz")["y"])
    np.testing.assert_array_equal(*outputs)
    assert "give it by --inputs" in cli("run", path, "--gpus", "2").err


POOLED = """net (float[batch, width] x) => (float[batch, width] y, float[batch] s)
    { y = Relu (x)  axes = Constant <value_ints = [1]> ()
    s = ReduceSum <keepdims = 0> (x, axes) }"""


class Counting:
    """A session that counts the batches that it runs."""

    def __init__(self, session: InferenceSession) -> None:
        self.session, self.rows = session, list[int]()

    def run(self, names: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        self.rows.append(len(feeds["x"]))
        return self.session.run(names, feeds)


def test_requests_of_equal_shapes_are_one_batch(saved: Callable[..., Path]) -> None:
    """Each gets its own rows back, in its place; a batch may sum in another order."""
    session = InferenceSession(saved(POOLED))
    shapes = [(1, 3), (2, 5), (0, 3), (4, 3), (1, 5)]
    requests = [
        {"x": np.random.default_rng(i).normal(size=shape).astype(np.float32)}
        for i, shape in enumerate(shapes)
    ]
    counting = Counting(session)
    found = run_together(counting, requests)
    assert counting.rows == [5, 3]
    for feeds, outputs in zip(requests, found, strict=True):
        assert_same(outputs, session.run(None, feeds), rtol=1e-5)
    assert run_together(session, []) == []


@pytest.mark.parametrize(
    ("text", "feeds", "words"),
    [
        (TEXT, {"x": np.ones((2, 3), np.float32), "scale": SCALE}, "no common number of rows"),
        (TOTAL, {"x": np.ones((2, 3), np.float32)}, r"an output \[\] of a batch of 2 rows"),
    ],
)
def test_requests_that_make_no_batch_are_refused(
    text: str, feeds: dict[str, np.ndarray], words: str, saved: Callable[..., Path]
) -> None:
    with pytest.raises(UsageError, match=words):
        run_together(InferenceSession(saved(text)), [feeds])

"""The example on Ray Serve: equal answers, several processes, and one that dies is replaced."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnx_fuse import InferenceSession

ROOT = Path(__file__).parents[1]
TEXT = """net (float[batch, width] x) => (float[batch, width] y) { y = Relu (x) }"""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ray with two CPUs, whose processes find the example and this package."""
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "examples"), str(ROOT)]))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield serve
    serve.shutdown()
    ray.shutdown()
    sys.modules.pop("ray_replicas", None)


def test_replicas_answer_and_a_dead_one_is_replaced(serve: Any, saved: Callable[..., Path]) -> None:
    import ray_replicas

    path = saved(TEXT)
    handle = ray_replicas.deploy(str(path), 2)
    session = InferenceSession(path)
    requests = [
        {"x": np.random.default_rng(i).normal(size=(1 + i % 2, 3 + i % 3)).astype(np.float32)}
        for i in range(20)
    ]

    def processes() -> set[int]:
        return {handle.process.remote().result(timeout_s=30) for _ in range(20)}

    def check() -> None:
        running = [handle.remote(feeds) for feeds in requests]
        for feeds, each in zip(requests, running, strict=True):
            (got,), (expected,) = each.result(timeout_s=30), session.run(None, feeds)
            np.testing.assert_array_equal(got, expected)

    check()
    before = processes()
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    end = time.monotonic() + 60
    while len(after := processes() - {min(before)}) < 2:
        assert time.monotonic() < end
        time.sleep(0.5)
    assert max(before) in after
    check()

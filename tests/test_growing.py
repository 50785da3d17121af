"""Shapes of one class, one after another: they share an instance, and run on as one graph."""

from __future__ import annotations

import numpy as np
import pytest
from fake_gpu import FakeGpu

from onnx_fuse import InferenceSession
from onnx_fuse.onnx.build import text_model

BIAS = np.linspace(-1, 1, 8, dtype=np.float32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu().use(monkeypatch)


OPEN = """
<ir_version: 10, opset_import: ["": 21]>
agraph (float[N,8] x, float[8] b) => (float[N,8] y, int64[N] places) {
    dims = Shape(x)
    zero = Constant<value_int = 0>()
    one = Constant<value_int = 1>()
    n = Gather<axis = 0>(dims, zero)
    places = Range(zero, n, one)
    y = Add(x, b)
}
"""


def test_shapes_of_one_class_take_over_one_instance(gpu: FakeGpu) -> None:
    """A growing size: no allocation, no lowering, the right results; one that comes again keeps."""
    session_of = InferenceSession(text_model(OPEN), device="cuda")
    runner = session_of._executable
    assert runner is not None
    seen = set()
    for n in (34, 36, 40, 64, 50):
        x = np.arange(8 * n, dtype=np.float32).reshape(n, 8)
        y, places = session_of.run(None, {"x": x, "b": BIAS})
        np.testing.assert_array_equal(y, x + BIAS)
        np.testing.assert_array_equal(places, np.arange(n))
        seen.add(id(runner.instances()[-1]))
        assert len(runner.instances()) == 1
    assert len(seen) == 1
    for n in (50, 50, 42, 50):
        x = np.full((n, 8), n, np.float32)
        y, places = session_of.run(None, {"x": x, "b": BIAS})
        np.testing.assert_array_equal(y, x + BIAS)
        np.testing.assert_array_equal(places, np.arange(n))
    assert len(runner.instances()) == 2

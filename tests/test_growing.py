"""Shapes of one class, one after another: they share an instance, and run on as one graph."""

import ctypes
from dataclasses import replace

import numpy as np
from fake_gpu import FakeGpu

from onnx_fuse import InferenceSession
from onnx_fuse.cuda.launch import BoundLaunch
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.problem import CHIPS, Launch, Num, Ptr

BIAS = np.linspace(-1, 1, 8, dtype=np.float32)


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


def test_what_a_launch_counts_in_is_new_where_its_size_is_another(gpu: FakeGpu) -> None:
    """What a run leaves there lies by the bytes, so that other bytes begin at zero."""
    launch = Launch(
        "quant/float8.cu",
        "e",
        (1, 1, 1),
        (32, 1, 1),
        (Ptr("x"), Num("i32", 3), Ptr("sync")),
        sync=48,
    )
    bound = BoundLaunch(launch, {"x": 4096}, CHIPS["H200"])

    def words() -> tuple[int, int, int]:
        x, n, sync = (ctypes.c_uint64 * 3).from_address(bound.arguments)
        found = ctypes.c_uint64.from_address
        return found(x).value, ctypes.c_int32.from_address(n).value, found(sync).value

    _, _, first = words()
    bound.rewrite((2, 1, 1), (8192, 5, 0), 48)
    assert words() == (8192, 5, first)
    bound.rewrite((3, 1, 1), (4096, 7, 0), 200)
    x, n, second = words()
    assert (x, n) == (4096, 7)
    assert second not in (0, first)
    bound.rewrite((3, 1, 1), (4096, 7, 0), 48)
    assert words()[2] not in (first, second)
    assert not bound.update(replace(launch, sync=200), {"x": 4096})
    assert bound.update(launch, {"x": 12288})
    assert words()[:2] == (12288, 3)

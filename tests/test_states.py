"""States of a run on the GPU: what steps keep of them, over a GPU made of host memory."""

import numpy as np
import onnx_ir as ir
import pytest
from fake_gpu import FakeGpu

from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime.states import CudaStates

STEP = """agraph (float[3] w, float[3] x, float l) => (float[3] n, float loss)
{ h = Cast <to = TYPE> (w) b = Cast <to = 1> (h) p = Mul (b, x) n = Add (w, p)
loss = Identity (l) }"""
EVALUATION = """agraph (float[3] w, float[3] x) => (float[3] y)
{ h = Cast <to = TYPE> (w) b = Cast <to = 1> (h) y = Mul (b, x) }"""


@pytest.mark.parametrize("dtype", [ir.DataType.BFLOAT16, ir.DataType.FLOAT16])
def test_steps_read_the_copies_of_weights_that_updates_write(
    dtype: ir.DataType, gpu: FakeGpu
) -> None:
    """Through a bad step, those behind it, and weights from outside; each mode reads the same."""
    w, x = np.array([1.003, -2.71, 3.3e-5], np.float32), np.array([0.3, 1.7, 9.1], np.float32)
    states = CudaStates({"w": w})
    for key, text in (("update", STEP), ("evaluate", EVALUATION)):
        states.add(key, text_model(text.replace("TYPE", str(dtype.value))))

    def product() -> np.ndarray:
        return w.astype(dtype.numpy()).astype(np.float32) * x

    def step(loss: float) -> None:
        feeds = {"x": x, "l": np.array(loss, np.float32)}
        states.start("update", {"n": "w"}, ["loss"], [], feeds, ["loss"])()

    def check() -> None:
        np.testing.assert_array_equal(states.read("w"), w)
        found = states.start("evaluate", {}, [], ["y"], {"x": x}, [])()
        np.testing.assert_array_equal(found["y"], product())

    for turn in range(3):
        for loss in (1.0, 2.0, np.inf, 3.0):
            step(loss)
            w = w if loss > 2 else w + product()
            check()
        states.resume_updates()
        if turn == 1:
            w = w * np.float32(-1.7)
            states.write("w", w)
    copy = f"onnx_fuse.{dtype.name.lower()} w"
    for key in ("update", "evaluate"):
        (instance,) = states._executables[key].instances()
        names = {b.id: b.name for b in instance.program.buffers}
        read = {names[t.buffer] for call in instance.program.calls for _, t in call.reads}
        assert read & {copy, "w"} == ({copy, "w"} if key == "update" else {copy})

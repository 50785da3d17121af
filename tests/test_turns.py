"""Runs under way together: what is small stands in host memory of each run, and nothing mixes."""

import gc

import numpy as np
import pytest
from fake_gpu import FakeGpu

from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime.device import DeviceMemoryError, Memory
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.run_slots import AFTER, TURNS
from onnx_fuse.runtime.tensor import DeviceTensor

SIZE = 1 << 16
TEXT = f"""agraph (float[{SIZE}] x, float s, float[3] t) => (float[{SIZE}] big, float[3] y)
{{ m = Mul(x, s) big = Abs(m) n = Mul(t, s) y = Tanh(n) }}"""
WARM = AFTER + 2 * TURNS
"""Runs after which each turn has a graph of its own."""


def feeds(i: int, x: np.ndarray | DeviceTensor) -> dict[str, np.ndarray | DeviceTensor]:
    return {"x": x, "s": np.array(i, np.float32), "t": np.arange(3, dtype=np.float32) / 8}


def expected(i: int) -> np.ndarray:
    return np.tanh(np.arange(3, dtype=np.float32) / 8 * np.float32(i))


def test_small_feeds_and_results_are_not_copied(gpu: FakeGpu) -> None:
    x = np.ones(SIZE, np.float32)
    made = Executable(text_model(TEXT))
    for i in range(WARM):
        (got,) = made.send(["y"], feeds(i, x)).result()
        np.testing.assert_allclose(got, expected(i), rtol=1e-6)
    gpu.counts.clear()
    sent = [made.send(["y"], feeds(i, x)) for i in range(7)]
    assert gpu.counts["cuMemcpyHtoDAsync"] == 7, "x alone is copied"
    assert not gpu.counts["cuMemcpyDtoHAsync"]
    assert not gpu.counts["update"], "no graph is written anew"
    assert gpu.counts["cuGraphLaunch"] == 7
    # each run that comes when all turns are taken waits for the oldest
    assert [pending.done for pending in sent] == [i < 7 - TURNS for i in range(7)]
    for i, pending in reversed(list(enumerate(sent))):
        np.testing.assert_allclose(pending.result()[0], expected(i), rtol=1e-6)


def test_of_what_gives_its_shape_alone_nothing_is_copied(gpu: FakeGpu) -> None:
    text = """agraph (float[65536] x, float[3] t) => (float[3] y)
        { s = Shape(x) n = Cast <to = 1> (s) m = Mul(t, n) y = Tanh(m) }"""
    made = Executable(text_model(text))
    for _ in range(WARM):
        gpu.counts.clear()
        (got,) = made.run(["y"], feeds(0, np.ones(SIZE, np.float32)))
        np.testing.assert_allclose(got, np.tanh(np.arange(3) / 8 * SIZE), rtol=1e-6)
    assert not gpu.counts["cuMemcpyHtoDAsync"], "t is read in the host's memory"


def test_a_gpu_tensor_that_comes_again_is_read_in_place(gpu: FakeGpu) -> None:
    made = Executable(text_model(TEXT))
    tensors = []
    for fill in (1.0, 2.0):
        _, address = gpu.cuMemAlloc(4 * SIZE)
        tensor = DeviceTensor(address, (SIZE,), "float32", 0, None)
        values = np.full(SIZE, fill, np.float32)
        gpu.cuMemcpyHtoDAsync(address, values.ctypes.data, 4 * SIZE, 0)
        tensors.append(tensor)
    for i in range(WARM):
        made.send(["y"], feeds(i, tensors[0]))
    gpu.counts.clear()
    results = [made.send(["y"], feeds(i, tensors[0])) for i in range(TURNS)]
    assert not gpu.counts["cuMemcpyDtoDAsync"]
    assert not gpu.counts["cuMemcpyHtoDAsync"]
    for i, pending in enumerate(results):
        np.testing.assert_allclose(pending.result()[0], expected(i), rtol=1e-6)
    gpu.counts.clear()
    for i in range(4):  # others are copied, as the graph's own place is known
        (got,) = made.send(["y"], feeds(i, tensors[(i + 1) % 2])).result()
        np.testing.assert_allclose(got, expected(i), rtol=1e-6)
    assert gpu.counts["cuMemcpyDtoDAsync"] == 4


@pytest.mark.usefixtures("gpu")
def test_results_of_other_outputs_and_runs_between() -> None:
    made, x = Executable(text_model(TEXT)), np.full(SIZE, 0.5, np.float32)
    waiting = []
    for i in range(2 * WARM):
        waiting.append((i, made.send(["y"], feeds(i, x))))
        if i % 5 == 4:  # a large output goes by a copy, and so does a run
            (big,) = made.send(["big"], feeds(i, x)).result()
            np.testing.assert_array_equal(big, x * np.float32(i))
            (got,) = made.run(["y"], feeds(i, x))
            np.testing.assert_allclose(got, expected(i), rtol=1e-6)
    for i, pending in waiting:
        np.testing.assert_allclose(pending.result()[0], expected(i), rtol=1e-6)


def test_arrays_go_to_the_one_place_where_there_is_no_room_for_more(gpu: FakeGpu) -> None:
    made, x = Executable(text_model(TEXT)), np.ones(SIZE, np.float32)
    for i in range(AFTER):
        made.send(["y"], feeds(i, x)).result()

    def full(nbytes: int, what: str, *, again: bool = True) -> Memory:
        raise DeviceMemoryError(what)

    made.shared.pool.allocate = full  # type: ignore[method-assign]
    pending = [(i, made.send(["y"], feeds(i, x * i))) for i in range(12)]
    for i, sent in pending:
        np.testing.assert_allclose(sent.result()[0], expected(i), rtol=1e-6)
    assert not gpu.counts["cuStreamWaitEvent"]


def test_memory_stays_until_a_run_that_nobody_waits_for_is_over(gpu: FakeGpu) -> None:
    made, x = Executable(text_model(TEXT)), np.ones(SIZE, np.float32)
    for i in range(WARM):
        made.send(["y"], feeds(i, x)).result()
    waits = gpu.counts["cuEventSynchronize"]
    made.send(["y"], feeds(0, x))
    made.send(["y"], feeds(1, x))
    assert gpu.counts["cuEventSynchronize"] == waits
    del made
    gc.collect()
    assert gpu.counts["cuEventSynchronize"] == waits + 2

"""GPU memory of a session that nobody has, over a GPU made of host memory."""

import gc
import weakref

import numpy as np
import pytest
from fake_gpu import FakeGpu

from onnx_fuse import InferenceSession
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime import device

GRAPHS = {
    "two launches": """agraph (float[N,8] x, float[8] b) => (float[N,8] y, float[8,N] z)
    { s = Add(x, b) y = Tanh(s) t = Transpose(y) z = Neg(t) }""",
    "a stage: which branch it is, the calls compute": """
    agraph (float[N,8] x, float[8] b) => (float[N,8] y)
    <int64[1] zero = {0}, int64[1] one = {1}, int64[0] scalar = {}, float none = {0}>
    { s = Add(x, b) p = Slice(b, zero, one) q = Reshape(p, scalar) c = Less(q, none)
      y = If(c) <then_branch = t () => (float[N,8] n) { n = Neg(s) },
                 else_branch = e () => (float[N,8] m) { m = Abs(s) }> }""",
}


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.filterwarnings("ignore:each shape is lowered by itself")
def test_it_comes_back_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a session refers to what holds it: no memory waits for the garbage collector."""
    gpu = FakeGpu().use(monkeypatch)
    gc.collect()
    gc.disable()
    try:
        session = InferenceSession(to_proto(text_model(GRAPHS[name])), device="cuda")
        for rows in (4, 4, 5):  # a shape that comes again, and one that has come once
            x, b = np.ones((rows, 8), np.float32), np.ones(8, np.float32)
            session.run(None, {"x": x, "b": b})
        executable = weakref.ref(session._executable)
        instances = [weakref.ref(i) for i in session._executable.instances()]
        assert instances
        del session
        assert executable() is None
        assert not any(instance() for instance in instances)
        assert gpu.counts["cuMemFreeAsync"] == gpu.counts["cuMemAllocFromPoolAsync"] > 0
        made = gpu.counts["cuMemPoolCreate"]
        assert gpu.counts["cuMemPoolTrimTo"] == made > 0
        again = InferenceSession(to_proto(text_model(GRAPHS[name])), device="cuda")
        again.run(None, {"x": x, "b": b})
        assert gpu.counts["cuMemPoolCreate"] == made  # the pools serve the next session
        del again
        assert gpu.counts["cuStreamDestroy"] == gpu.counts["cuStreamCreate"] > 0
    finally:
        gc.enable()


class Ended(FakeGpu):
    """A GPU that says what it was asked of a stream that is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[int] = []
        self.late: list[str] = []

    def cuStreamDestroy(self, stream: int) -> tuple[int]:
        self.streams.append(stream)
        return (0,)

    def cuMemFreeAsync(self, address: int, stream: int) -> tuple[int]:
        self.late += ["free"] * (stream in self.streams)
        return super().cuMemFreeAsync(address, stream)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[int]:
        self.late += ["wait"] * (stream in self.streams)
        return super().cuStreamWaitEvent(stream, event, flags)


def test_memory_that_outlives_its_stream_in_a_cycle_of_garbage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector ends the stream first; the memory goes behind what that stream held."""
    gpu = Ended()
    gpu.use(monkeypatch)
    gc.collect()
    stream = device.Stream()
    pool = device.Pool(stream, 0)
    cycle = [stream, pool, pool.allocate(64, "a tensor")]
    cycle.append(cycle)  # type: ignore[arg-type]
    own = stream.handle
    del stream, pool, cycle
    gc.collect()
    assert gpu.streams == [own]
    assert not gpu.late
    assert gpu.counts["cuMemPoolTrimTo"] == gpu.counts["cuMemFreeAsync"] == 1
    assert ("wait", device.LEGACY) in [given[:2] for given in gpu.order]


def test_a_result_on_its_way_outlives_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu().use(monkeypatch)
    session = InferenceSession(to_proto(text_model(GRAPHS["two launches"])), device="cuda")
    x, b = np.ones((4, 8), np.float32), np.zeros(8, np.float32)
    pending = session._executable.send(["y"], {"x": x, "b": b})
    del session
    (y,) = pending.result()
    np.testing.assert_allclose(y, np.tanh(x), atol=1e-6)

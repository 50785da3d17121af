"""What is bound in place, callers' streams, threads, memory that shapes share: on the GPU."""

import ctypes
import threading
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from support import with_weights

from onnx_fuse import InferenceSession
from onnx_fuse.cuda import arguments
from onnx_fuse.errors import UsageError
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.launch import Ptr, TensorMap
from onnx_fuse.runtime import device
from onnx_fuse.runtime.executable import DIRECT_BYTES, Executable

CHAIN = "agraph (float[N,16] x, float[16] b) => (float[N,16] y) { s = Add(x, b) y = Tanh(s) }"
BIAS = np.linspace(-1, 1, 16, dtype=np.float32)


def block() -> Executable:
    """A norm and two products, by TMA where the GPU has it: several launches."""
    rng = np.random.default_rng(0)
    weights = {
        "g": np.ones(256, np.float16), "b": np.zeros(256, np.float16),
        "v": (rng.standard_normal((256, 512)) / 16).astype(np.float16),
        "w": (rng.standard_normal((512, 256)) / 16).astype(np.float16),
    }  # fmt: skip
    text = """agraph (float16[N,256] x) => (float16[N,256] y, float16[N,512] h)
    { n = LayerNormalization (x, g, b) h = MatMul (n, v) t = Tanh (h) y = MatMul (t, w) }"""
    return Executable(with_weights(text_model(text), weights))


class Places:
    """GPU memory of a caller's, in pieces at chosen offsets."""

    def __init__(self, runner: Executable, nbytes: int) -> None:
        self.stream = runner.stream
        self.memory = device.Memory(nbytes, "a caller's memory")
        self.stream.fill(self.memory.address, 0, nbytes)

    def put(self, at: int, array: np.ndarray) -> int:
        self.stream.upload(self.memory.address + at, array.ctypes.data, array.nbytes)
        self.stream.wait("a caller's copy")
        return self.memory.address + at

    def get(self, at: int, like: np.ndarray) -> np.ndarray:
        found = np.empty_like(like)
        self.stream.download(found.ctypes.data, self.memory.address + at, found.nbytes)
        self.stream.wait("a caller's copy")
        return found


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often memory is taken, copied or waited for, and graphs are captured."""
    found: Counter[str] = Counter()

    def watch(owner: type, name: str) -> None:
        inner: Callable[..., object] = getattr(owner, name)

        def counted(*args: object, **options: object) -> object:
            found[f"{owner.__name__}.{name}"] += 1
            return inner(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    for owner, names in (
        (device.Memory, ("__init__",)), (device.Pinned, ("__init__",)),
        (device.Pool, ("allocate",)),
        (device.Stream, ("upload", "download", "move", "fill", "wait", "capture", "wait_event")),
        (device.Event, ("__init__", "wait", "record")), (device.Graph, ("update",)),
    ):  # fmt: skip
        for name in names:
            watch(owner, name)
    return found


def test_what_is_bound_costs_launches_alone(counts: Counter[str]) -> None:
    runner = block()
    places, x = Places(runner, 1 << 20), np.random.default_rng(1).standard_normal((64, 256))
    x = x.astype(np.float16)
    want = runner.run(None, {"x": x})
    binding = runner.io_binding()
    sizes = {"y": 64 * 256 * 2, "h": 64 * 512 * 2}
    base = places.put(0, x)
    binding.bind_input("x", "cuda", 0, np.float16, x.shape, base)
    binding.bind_output("y", "cuda", 0, np.float16, (64, 256), base + (1 << 17))
    binding.bind_output("h", "cuda", 0, np.float16, (64, 512), base + (1 << 18))
    runner.run_with_iobinding(binding)
    for _ in range(4):  # the graph is captured meanwhile
        counts.clear()
        runner.run_with_iobinding(binding)
    assert counts == {"Stream.wait": 1}
    counts.clear()
    runner.run_with_iobinding(binding, synchronize=False)
    assert not counts
    binding.synchronize_outputs()
    for (at, array), tensor in zip(
        ((1 << 17, want[0]), (1 << 18, want[1])), binding.get_outputs(), strict=True
    ):
        assert tensor.nbytes == sizes["y" if at == 1 << 17 else "h"]
        assert places.get(at, array).tobytes() == array.tobytes() == tensor.numpy().tobytes()


def test_another_place_updates_the_graph(counts: Counter[str]) -> None:
    """The kernels' arguments and TMA descriptors; nothing is captured anew."""
    runner, rng = block(), np.random.default_rng(2)
    places = Places(runner, 1 << 22)
    xs = [rng.standard_normal((64, 256)).astype(np.float16) for _ in range(6)]
    wants = [runner.run(None, {"x": x}) for x in xs]
    assert counts["Stream.capture"] == 1
    binding = runner.io_binding()
    for i, (x, want) in enumerate([*zip(xs, wants, strict=True)] * 2):
        at = (i % 5) << 19
        base = places.put(at, x)
        binding.bind_input("x", "cuda", 0, np.float16, x.shape, base)
        for name, array, offset in zip("yh", want, (1 << 16, 1 << 17), strict=True):
            place = base + offset + 16 * i
            binding.bind_output(name, "cuda", 0, np.float16, array.shape, place)
        runner.run_with_iobinding(binding)
        for array, offset in zip(want, (1 << 16, 1 << 17), strict=True):
            assert places.get(at + offset + 16 * i, array).tobytes() == array.tobytes()
    assert counts["Stream.capture"] == 1
    assert counts["Graph.update"] > 0
    assert counts["Stream.move"] == 0
    assert runner.run(None, {"x": xs[0]})[0].tobytes() == wants[0][0].tobytes()


@pytest.mark.parametrize("where", ["over the input", "over each other", "not aligned"])
def test_a_place_that_cannot_be_written_at_once_is_copied_to(where: str) -> None:
    runner = block()
    places, x = Places(runner, 1 << 20), np.random.default_rng(3).standard_normal((64, 256))
    x = x.astype(np.float16)
    want = runner.run(None, {"x": x})
    offsets = {"over the input": (0, 1 << 18), "over each other": (1 << 18, (1 << 18) - 64 * 512),
               "not aligned": ((1 << 18) + 2, 1 << 17)}[where]  # fmt: skip
    binding = runner.io_binding()
    for _ in range(5):
        base = places.put(0, x)
        binding.bind_input("x", "cuda", 0, np.float16, x.shape, base)
        for name, array, at in zip("yh", want, offsets, strict=True):
            binding.bind_output(name, "cuda", 0, np.float16, array.shape, base + at)
        runner.run_with_iobinding(binding)
        if where == "over each other":  # the one bound last is whole
            assert places.get(offsets[1], want[1]).tobytes() == want[1].tobytes()
            continue
        for array, at in zip(want, offsets, strict=True):
            assert places.get(at, array).tobytes() == array.tobytes()


CACHE = """agraph (float16[1,4,C,8] past, float16[1,4,1,8] new, int64[1,4,1,8] at)
=> (float16[1,4,C,8] present, float16[1,4,1,C] scores) {
    present = ScatterElements <axis = 2> (past, at, new)
    turned = Transpose <perm = [0, 1, 3, 2]> (present)
    scores = MatMul (new, turned)
}"""


def test_a_cache_grows_where_it_stands(counts: Counter[str]) -> None:
    runner, shape = Executable(text_model(CACHE)), (1, 4, 32, 8)
    places, binding = Places(runner, 1 << 16), runner.io_binding()
    rng, cache = np.random.default_rng(4), np.zeros(shape, np.float16)
    binding.bind_input("past", "cuda", 0, np.float16, shape, places.memory.address)
    binding.bind_output("present", "cuda", 0, np.float16, shape, places.memory.address)
    binding.bind_output("scores")
    for position in range(8):
        new = rng.standard_normal((1, 4, 1, 8)).astype(np.float16)
        cache[:, :, position] = new[:, :, 0]
        binding.bind_cpu_input("new", new)
        binding.bind_cpu_input("at", np.full((1, 4, 1, 8), position))
        counts.clear()
        runner.run_with_iobinding(binding)
        assert not counts["Stream.move"]
        (scores,) = binding.copy_outputs_to_cpu()[1:]
        want = new.astype(np.float64) @ cache.astype(np.float64).transpose(0, 1, 3, 2)
        np.testing.assert_allclose(scores, want, rtol=2e-3, atol=2e-3)  # stored in float16
        assert places.get(0, cache).tobytes() == cache.tobytes()


class Handle:
    """A stream of another library."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@pytest.mark.parametrize("kind", [int, Handle])
def test_runs_in_callers_streams_come_in_order(kind: type, counts: Counter[str]) -> None:
    runner = Executable(text_model(CHAIN))
    rows = 4096
    places = Places(runner, 1 << 22)
    base = places.memory.address
    places.put(0, BIAS)
    x_at, y_at = base + 4096, base + (1 << 20)
    xs = [np.full((rows, 16), i / 8, np.float32) for i in range(8)]
    pinned = [device.Pinned(xs[0].nbytes) for _ in range(16)]
    for room, x in zip(pinned, xs, strict=False):
        room.array[: x.nbytes] = x.reshape(-1).view(np.uint8)
    binding = runner.io_binding()
    binding.bind_input("x", "cuda", 0, np.float32, (rows, 16), x_at)
    binding.bind_input("b", "cuda", 0, np.float32, (16,), base)
    binding.bind_output("y", "cuda", 0, np.float32, (rows, 16), y_at)
    runner.run_with_iobinding(binding)
    first, second = device.Stream(), device.Stream()
    for i in range(8):  # each reads what its stream has copied before it, and nobody waits
        stream = (first, second)[i // 4]
        if i == 4:
            first.before(second)
        stream.upload(x_at, pinned[i].address, xs[i].nbytes)
        counts.clear()
        runner.run_with_iobinding(binding, stream=kind(stream.handle), synchronize=False)
        assert counts["Stream.wait"] == counts["Stream.move"] == 0
        stream.download(pinned[8 + i].address, y_at, xs[i].nbytes)
    # a run of its own comes after them, over the same arena
    other = runner.run(None, {"x": xs[3], "b": BIAS})[0]
    np.testing.assert_allclose(other, np.tanh(xs[3] + BIAS), atol=1e-6)
    second.wait("the caller's work")
    for i in range(8):
        y = pinned[8 + i].array[: xs[0].nbytes].view(np.float32).reshape(rows, 16)
        np.testing.assert_allclose(y, np.tanh(xs[i] + BIAS), atol=1e-6, err_msg=str(i))
    with pytest.raises(UsageError, match="__cuda_stream__"):
        runner.run_with_iobinding(binding, stream="0")


def test_outputs_for_the_host_come_when_they_are_asked_for() -> None:
    session = InferenceSession(to_proto(text_model(CHAIN)), device="cuda")
    binding, x = session.io_binding(), np.ones((5, 16), np.float32)
    binding.bind_cpu_input("b", BIAS)
    binding.bind_output("y")
    caller = device.Stream()
    for i in range(12):
        binding.bind_cpu_input("x", i * x)
        stream = caller.handle if i % 3 else None
        session.run_with_iobinding(binding, stream=stream, synchronize=False)
        np.testing.assert_allclose(binding.get_outputs()[0], np.tanh(i * x + BIAS), atol=1e-6)


def test_outputs_that_are_kept_are_not_written_again() -> None:
    for rows in (4, DIRECT_BYTES // 64):  # copied, and written where they stay
        runner = Executable(text_model(CHAIN))
        kept = []
        for i in range(6):
            x = np.full((rows, 16), i, np.float32)
            (y,) = runner.run(None, {"x": x, "b": BIAS}, on_device=True)
            kept.append(y)
        for i, y in enumerate(kept):
            np.testing.assert_allclose(y.numpy()[0], np.tanh(i + BIAS), atol=1e-6)
        addresses = {y.address for y in kept}
        assert len(addresses) == 6
        del kept, y
        (y,) = runner.run(None, {"x": x, "b": BIAS}, on_device=True)
        assert y.address in addresses, "it went back to the pool"


def test_an_output_under_way_is_read_in_order() -> None:
    runner = Executable(text_model(CHAIN))
    binding = runner.io_binding()
    binding.bind_cpu_input("b", BIAS)
    binding.bind_output("y", "cuda")
    x = np.zeros((1 << 16, 16), np.float32)
    for i in range(5):
        binding.bind_cpu_input("x", x + i)
        runner.run_with_iobinding(binding, synchronize=False)
        (y,) = binding.get_outputs()
        assert y.ready is not None
        np.testing.assert_allclose(y.numpy()[-1], np.tanh(i + BIAS), atol=1e-6)
        assert y.ready is None


def test_threads_share_a_session() -> None:
    session = InferenceSession(to_proto(text_model(CHAIN)), device="cuda")
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            binding = session.io_binding()
            binding.bind_output("y", "cuda" if seed % 2 else "cpu")
            for i in range(40):
                x = rng.standard_normal((int(rng.integers(1, 6)) * 7, 16)).astype(np.float32)
                want = np.tanh(x + BIAS)
                if i % 2:
                    (y,) = session.run(None, {"x": x, "b": BIAS})
                else:
                    binding.bind_cpu_input("x", x)
                    binding.bind_cpu_input("b", BIAS)
                    session.run_with_iobinding(binding, synchronize=bool(i % 4))
                    (y,) = binding.copy_outputs_to_cpu()
                np.testing.assert_allclose(y, want, atol=1e-6)
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults


def test_shapes_share_their_memory(counts: Counter[str]) -> None:
    """No allocation of the driver's for a shape, and a graph only for one that comes again."""
    runner = block()
    runner.run(None, {"x": np.zeros((256, 256), np.float16)})
    counts.clear()
    for rows in range(1, 40):
        runner.run(None, {"x": np.ones((rows, 256), np.float16)})
    assert counts["Memory.__init__"] == counts["Pinned.__init__"] == counts["Stream.capture"] == 0
    assert counts["Pool.allocate"] <= 1
    assert runner.release_memory() > 0
    x = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float16)
    ys = [runner.run(["y"], {"x": x})[0].tobytes() for _ in range(5)]
    assert len(set(ys)) == 1, "launches one by one, and as a graph"
    assert counts["Stream.capture"] == 1


MAPS = [
    TensorMap(Ptr("a"), "bfloat16", (64, 128), (128,), (64, 64), 128),
    TensorMap(Ptr("a"), "float32", (32, 64, 3), (128, 8192), (32, 8, 1), 0),
    TensorMap(
        Ptr("a"), "float16", (64, 14, 14, 2), (128, 1792, 25088), (64, 64), 128,
        (-1, -1, -1, -1, 1, 1),
    ),
]  # fmt: skip


@pytest.mark.parametrize("arg", MAPS, ids=["matrix", "three axes", "image"])
def test_a_descriptor_moved_elsewhere_is_the_one_made_there(arg: TensorMap) -> None:
    device.start()
    memory = device.Memory(1 << 20, "a tensor")
    for offset in (0, 4096, 65536, 4096 + 16):
        made = arguments._encoded(arg, memory.address + offset)
        found = arguments._descriptor(arg, memory.address + offset)
        assert found == ctypes.string_at(int(made.getPtr()), len(found))

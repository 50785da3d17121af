"""The runtime over a GPU made of host memory: places, graphs, streams, memory, threads."""

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeGpu
from support import assert_same, in_threads, with_weights

from onnx_fuse import InferenceSession, Trainer, config
from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.arguments import Arguments
from onnx_fuse.errors import DataError, UsageError
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.lower import folds
from onnx_fuse.program.launch import Launch, Num, Ptr, Table
from onnx_fuse.runtime import device, shapes, staging
from onnx_fuse.runtime import executable as module
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.placement import overlapping
from onnx_fuse.runtime.tensor import DeviceTensor

# y is made by a call of its own, from what z is made of: two launches
CHAIN = """agraph (float[N,8] x, float[8] b) => (float[N,8] y, float[8,N] z)
{ s = Add(x, b) y = Tanh(s) t = Transpose(y) z = Neg(t) }"""
BIAS = np.linspace(-1, 1, 8, dtype=np.float32)


def x_of(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 8)).astype(np.float32)


def expected(x: np.ndarray) -> list[np.ndarray]:
    y = np.tanh(x + BIAS)
    return [y, -y.T]


def same(found: list[Any], x: np.ndarray) -> None:
    assert_same(found, expected(x), atol=1e-6)


def session(text: str = CHAIN) -> InferenceSession:
    return InferenceSession(to_proto(text_model(text)), device="cuda")


def place(array: np.ndarray) -> tuple[Any, ...]:
    """What bind_input and bind_output take of memory that is `array`'s."""
    return "cuda", 0, array.dtype, array.shape, array.ctypes.data


def bind(runs: Any, inputs: dict[str, Any], **outputs: Any) -> Any:
    """A binding of arrays of the host, places and devices."""
    binding = runs.io_binding()
    for name, value in inputs.items():
        if isinstance(value, tuple):
            binding.bind_input(name, *value)
        else:
            binding.bind_cpu_input(name, value)
    for name, value in outputs.items():
        binding.bind_output(name, *(value if isinstance(value, tuple) else (value,)))
    return binding


def aligned(shape: tuple[int, ...], skew: int = 0) -> np.ndarray:
    raw = np.zeros(4 * int(np.prod(shape)) + 64, np.uint8)
    start = -raw.ctypes.data % 16 + skew
    return raw[start : start + 4 * int(np.prod(shape))].view(np.float32).reshape(shape)


def test_a_program_is_prepared_while_its_weights_are_made(gpu, monkeypatch):
    text = """<ir_version: 10, opset_import: ["": 23]> agraph (float16[N,64] x) => (float16[N,64] y)
    { n = RMSNormalization (x, g) h = MatMul (n, w) t = Tanh (h) y = MatMul (t, v) }"""
    rng, model = np.random.default_rng(3), text_model(text)
    shapes = {"g": (64,), "w": (64, 64), "v": (64, 64), "x": (5, 64)}
    arrays = {n: rng.standard_normal(s).astype(np.float16) / 4 for n, s in shapes.items()}
    x = arrays.pop("x")
    runs = InferenceSession(with_weights(model, arrays), device="cuda")
    modules, keep = [], folds.Folds.keep

    def compile_all(launches: Any, arch: str) -> None:
        modules.append({(launch.source, launch.defines) for launch in launches})

    def kept(made: folds.Folds) -> bool:
        shared = runs._executable.shared
        shared._compiler.submit(int).result()
        assert len(modules) == 1
        assert {"v"} < shared.weights.resident.keys()
        return keep(made)

    monkeypatch.setattr(nvrtc, "compile_all", compile_all)
    monkeypatch.setattr(folds.Folds, "keep", kept)
    (y,) = runs.run(None, {"x": x})
    chosen, placed = modules
    assert chosen == placed
    wide = {name: array.astype(np.float64) for name, array in (*arrays.items(), ("x", x))}
    n = wide["x"] / np.sqrt((wide["x"] ** 2).mean(-1, keepdims=True) + 1e-5) * wide["g"]
    np.testing.assert_allclose(y, np.tanh(n @ wide["w"]) @ wide["v"], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("captured", [1, 3, 100])
def test_a_shape_is_launched_directly_until_it_is_captured(
    captured: int, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNX_FUSE_CAPTURE", str(captured))
    runs = session()
    for i in range(5):
        x = x_of(4, i)
        same(runs.run(None, {"x": x, "b": BIAS}), x)
    assert gpu.counts["capture"] == (captured < 5)
    assert gpu.counts["cuGraphLaunch"] == max(0, 6 - captured)
    assert gpu.counts["cuLaunchKernelEx"] == 2 * min(5, captured - 1)


def test_every_tensor_may_have_memory_of_its_own(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written in pieces begins as NaN, which would show where a kernel read between."""
    monkeypatch.setenv("ONNX_FUSE_ARENA", "0")
    text = """agraph (float[N,8] x) => (float[N,4] y)
    { a = Tanh(x) b = Neg(x) c = Concat<axis = 1>(a, b) one = Constant<value = int64[1] {6}>()
      ten = Constant<value = int64[1] {10}>() axis = Constant<value = int64[1] {1}>()
      y = Slice(c, one, ten, axis) }"""
    runs = session(text)
    x = x_of(3)
    (y,) = runs.run(None, {"x": x})
    np.testing.assert_allclose(y, np.hstack([np.tanh(x), -x])[:, 6:10], atol=1e-6)
    assert gpu.counts["cuMemAlloc"] > 2


@pytest.mark.parametrize("failing", [1, 2])
def test_sessions_that_nobody_has_give_their_memory_back_first(
    failing: int, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        """In a circle of references, as a session is."""

        def __init__(self) -> None:
            self.own = self

    gc.collect()
    nobodys, left = weakref.ref(Held()), [2] * failing

    def take(nbytes: int) -> tuple[int, int]:
        return (left.pop(), 0) if left else gpu._new("cuMemAlloc", nbytes)

    monkeypatch.setattr(gpu, "cuMemAlloc", take, raising=False)
    if failing == 1:
        assert device.Memory(64, "x").address
    else:
        monkeypatch.setattr(
            gpu, "cuGetErrorName", lambda code: (0, b"CUDA_ERROR_OUT_OF_MEMORY"), raising=False
        )
        with pytest.raises(device.DeviceMemoryError, match="x: 64 bytes"):
            device.Memory(64, "x")
    assert nobodys() is None


def test_the_run_of_capture_is_a_number() -> None:
    for text in ("0", "-1", "soon"):
        with pytest.raises(ValueError, match="at least 1"):
            config.CAPTURE.parse(text)


def bound(runs: InferenceSession, x: np.ndarray, *ys: np.ndarray) -> Any:
    places = {name: place(y) for name, y in zip("yz", ys, strict=False)}
    return bind(runs, {"x": place(x), "b": place(BIAS)}, **places)


def test_what_is_bound_costs_launches_alone(gpu: FakeGpu) -> None:
    runs, x = session(), aligned((4, 8))
    y, z = aligned((4, 8)), aligned((8, 4))
    binding = bound(runs, x, y, z)
    for i in range(6):
        x[...] = x_of(4, i)
        gpu.counts.clear()
        runs.run_with_iobinding(binding, synchronize=i % 2 == 0)
        if i > 2:
            waits = {"cuStreamSynchronize": 1} if i % 2 == 0 else {}
            assert gpu.counts == {"cuGraphLaunch": 1} | waits
        same([y, z], x)
        same(binding.get_outputs(), x)


def test_another_place_updates_the_graph(gpu: FakeGpu) -> None:
    runs = session()
    ends = [(aligned((4, 8)), aligned((4, 8)), aligned((8, 4))) for _ in range(12)]
    for i, (x, y, z) in enumerate(ends):
        x[...] = x_of(4, i)
        gpu.counts.clear()
        runs.run_with_iobinding(bound(runs, x, y, z))
        same([y, z], x)
        assert gpu.counts["cuMemcpyDtoDAsync"] == 0
        assert gpu.counts["capture"] == (i == 2)
        assert (gpu.counts["update"] > 0) == (i > 2)
    same(runs.run(None, {"x": x, "b": BIAS}), x)  # what is its own again


@pytest.mark.parametrize("places", [2, 4, 6])
def test_places_that_come_again_have_graphs_of_their_own(places: int, gpu: FakeGpu) -> None:
    """As of a cache that is read in one place and written to another, in turns."""
    runs = session()
    ends = [(aligned((4, 8)), aligned((4, 8)), aligned((8, 4))) for _ in range(places)]
    bindings = [bound(runs, *arrays) for arrays in ends]
    for i in range(6 * places):
        if i == 4 * places:
            gpu.counts.clear()
        x, y, z = ends[i % places]
        x[...] = x_of(4, i)
        runs.run_with_iobinding(bindings[i % places])
        same([y, z], x)
    assert gpu.counts["capture"] == gpu.counts["cuLaunchKernelEx"] == 0
    assert gpu.counts["cuGraphLaunch"] == 2 * places
    assert (gpu.counts["update"] > 0) == (places > 4)


@pytest.mark.parametrize("skew", [4, 8])
@pytest.mark.parametrize("which", ["x", "y", "z"])
def test_an_address_that_is_not_aligned_is_copied(which: str, skew: int, gpu: FakeGpu) -> None:
    runs = session()
    for i in range(5):
        shapes = {"x": (4, 8), "y": (4, 8), "z": (8, 4)}
        x, y, z = (aligned(s, skew * (n == which)) for n, s in shapes.items())
        x[...] = x_of(4, i)
        gpu.counts.clear()
        runs.run_with_iobinding(bound(runs, x, y, z))
        same([y, z], x)
        assert gpu.counts["cuMemcpyDtoDAsync"] == 1


def test_an_output_over_what_others_need_is_written_last(gpu: FakeGpu) -> None:
    runs = session()
    for i in range(5):
        x, z = aligned((4, 8)), aligned((8, 4))
        before = x[...] = x_of(4, i)
        before = before.copy()
        runs.run_with_iobinding(bound(runs, x, x, z))  # y where x is, which z reads as well
        same([x, z], before)
        both = aligned((8, 8))
        x, y, z = aligned((4, 8)), both[:4], both[2:6].reshape(8, 4)
        x[...] = before
        runs.run_with_iobinding(bound(runs, x, y, z))
        np.testing.assert_allclose(z, expected(before)[1], atol=1e-6)


def test_a_place_of_another_shape_is_refused(gpu: FakeGpu) -> None:
    runs, x = session(), aligned((4, 8))
    binding = bound(runs, x, aligned((4, 4)), aligned((8, 4)))
    for _ in range(2):
        with pytest.raises(UsageError, match=r"output y is float32\[4, 8\], not .*\[4, 4\]"):
            runs.run_with_iobinding(binding)
    with pytest.raises(UsageError, match="no output is bound"):
        runs.run_with_iobinding(bound(runs, x))
    with pytest.raises(UsageError, match="no output 'q'"):
        binding.bind_output("q")


class Handle:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def works(gpu: FakeGpu) -> dict[int, set[int]]:
    """Launches and copies by number -> those that each comes after, by streams, events, waits."""
    seen: dict[int, set[int]] = {}  # stream -> the works that what it is given next comes after
    events: dict[int, set[int]] = {}
    found: dict[int, set[int]] = {}
    over: set[int] = set()  # what the host has waited for
    for i, (what, stream, *event) in enumerate(gpu.order):
        known = seen.setdefault(stream, set())
        if what == "record":
            events[event[0]] = known | over
        elif what == "wait":
            known |= events[event[0]]
        elif what == "done":
            over |= known
        elif what == "passed":
            over |= events[event[0]]
        else:
            found[i] = known | over
            known.add(i)
    return found


def ordered(gpu: FakeGpu) -> bool:
    """Whether each launch and copy comes after all before it."""
    found = works(gpu)
    return all(len(before) == k for k, before in enumerate(found.values()))


@pytest.mark.parametrize("kind", [int, Handle])
def test_runs_of_all_streams_come_one_after_another(kind: type, gpu: FakeGpu) -> None:
    runs, x = session(), aligned((4, 8))
    y, z = aligned((4, 8)), aligned((8, 4))
    binding = bound(runs, x, y, z)
    other = bind(runs, {"x": x_of(4, 1), "b": BIAS}, y="cuda", z="cpu")
    runs.run(None, {"x": x, "b": BIAS})
    for i, stream in enumerate([7, 7, None, 8, 7, 7, None, None, 8, 8]):
        x[...] = x_of(4, i)
        named = None if stream is None else kind(stream)
        runs.run_with_iobinding(binding, stream=named, synchronize=False)
        same([y, z], x)
        runs.run_with_iobinding(other, stream=named, synchronize=i % 2 == 0)
        same(other.get_outputs(), x_of(4, 1))
        if i % 3 == 0:
            same(runs.run(None, {"x": x, "b": BIAS}), x)
    assert ordered(gpu)
    for _ in range(2):
        gpu.counts.clear()
        runs.run_with_iobinding(binding, stream=kind(8), synchronize=False)
    assert gpu.counts["cuStreamWaitEvent"] == 0, "nothing came between"


def test_a_stream_is_a_number_or_has_one(gpu: FakeGpu) -> None:
    runs = session()
    binding = bound(runs, aligned((4, 8)), aligned((4, 8)), aligned((8, 4)))
    with pytest.raises(UsageError, match="neither a handle"):
        runs.run_with_iobinding(binding, stream="the first")
    portable = InferenceSession(to_proto(text_model(CHAIN)))
    with pytest.raises(UsageError, match="no CUDA streams"):
        portable.run_with_iobinding(portable.io_binding(), stream=7)


def test_shapes_share_the_arena_and_their_constants(gpu: FakeGpu) -> None:
    text = """agraph (float[N,4] x) => (float[N,4] y) <float[4] c = {1,2,3,4}>
    { a = Add(x, c) e = Transpose(a) f = Exp(e) y = Transpose(f) }"""
    runner = Executable(text_model(text))

    def run(rows: int) -> None:
        x = np.random.default_rng(rows).random((rows, 4), np.float32)
        (y,) = runner.run(None, {"x": x})
        np.testing.assert_allclose(y, np.exp(x + np.arange(1, 5)), rtol=1e-6)

    run(100)
    gpu.counts.clear()
    for rows in range(1, 30):
        run(rows)
    taken = ("cuMemAlloc", "cuMemAllocHost", "cuMemAllocFromPoolAsync", "capture")
    assert not {name: gpu.counts[name] for name in taken if gpu.counts[name]}
    blocks = {instance.memory.address for instance in runner.instances()}
    assert len(blocks) == 1
    run(1 << 18)  # more than the arena has
    assert len(runner.instances()) == 1, "the others let go of their memory"
    assert len(runner.programs()) == 31, "but keep their programs"
    run(5)
    assert runner.instances()[-1].memory.address not in blocks
    assert runner.release_memory() >= 1 << 20
    assert not runner.instances()
    run(7)


def test_the_least_recently_used_shapes_go(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "INSTANCES", 3)
    runs = session()
    for rows in (1, 2, 3, 1, 4, 1, 5):
        same(runs.run(None, {"x": x_of(rows), "b": BIAS}), x_of(rows))
    assert [p.inputs[0][1].shape[0] for p in runs._on_cuda().programs()] == [4, 1, 5]


def test_outputs_that_are_kept_go_back_when_nobody_has_them(gpu: FakeGpu) -> None:
    for rows in (4, module.DIRECT_BYTES // 32):
        runs = session()

        def keep_six(rows: int = rows, runs: InferenceSession = runs) -> None:
            xs = [x_of(rows, i) for i in range(6)]
            kept = [runs._on_cuda().run(None, {"x": x, "b": BIAS}, on_device=True) for x in xs]
            for found, x in zip(kept, xs, strict=True):
                same(found, x)

        keep_six()
        gpu.counts.clear()
        keep_six()
        assert gpu.counts["cuMemAllocFromPoolAsync"] == 0
        assert gpu.counts["cuMemFreeAsync"] == 0
        runs.release_memory()
        assert gpu.counts["cuMemFreeAsync"] == 12 + 1  # and the arena


def test_nothing_is_given_back_into_a_graph_that_is_captured(gpu: FakeGpu) -> None:
    """The stream of a capture is nobody else's."""
    pool = device.Pool(device.Stream(), 0)
    memory = [pool.allocate(8, what, again=False) for what in ("some", "more")]

    def step() -> None:
        memory.pop()
        assert gpu.counts["cuMemFreeAsync"] == 1

    device.Stream().capture([step])
    memory.pop()
    assert gpu.counts["cuMemFreeAsync"] == 2


def test_what_another_library_has_seen_goes_back_when_the_gpu_is_idle(gpu: FakeGpu) -> None:
    runs = session()
    (y, _) = runs._on_cuda().run(None, {"x": x_of(4), "b": BIAS}, on_device=True)
    capsule = y.__dlpack__(stream=1)
    del y
    assert gpu.counts["cuMemFreeAsync"] == 0, "its consumer may come"
    del capsule, _
    assert gpu.counts["cuMemFreeAsync"] == 1, "the other one is kept"
    assert gpu.counts["cuCtxSynchronize"] == 1


def test_an_output_under_way_is_waited_for(gpu: FakeGpu) -> None:
    runs = session()
    binding = bind(runs, {"x": x_of(4), "b": BIAS}, y="cuda")
    runs.run_with_iobinding(binding, synchronize=False)
    gpu.counts.clear()
    (y,) = binding.get_outputs()
    y.__dlpack__(stream=5)
    assert gpu.counts["cuStreamWaitEvent"] == 1, "the consumer's stream waits, the host does not"
    assert gpu.counts["cuStreamSynchronize"] == 0
    np.testing.assert_allclose(y.numpy(), expected(x_of(4))[0], atol=1e-6)
    assert gpu.counts["cuStreamSynchronize"] == 1
    y.__dlpack__(stream=5)
    assert gpu.counts["cuStreamWaitEvent"] == 1


def test_bound_arrays_and_outputs_for_the_host_are_prepared_too(gpu: FakeGpu) -> None:
    """What a run reads of a bound array is what it holds then."""
    runs, x, y = session(), x_of(4), aligned((4, 8))
    binding = bind(runs, {"x": x, "b": place(BIAS)}, y=place(y), z="cpu")
    for i in range(30):
        x[...] = x_of(4, i)
        runs.run_with_iobinding(binding, synchronize=i % 3 == 0)
        assert binding.prepared is not None
        if i % 4:  # the others are never asked for
            same(binding.get_outputs(), x)
    gpu.counts.clear()
    runs.run_with_iobinding(binding, synchronize=False)
    copies = gpu.counts["cuMemcpyHtoDAsync"], gpu.counts["cuMemcpyDtoHAsync"]
    assert (*copies, gpu.counts["cuGraphLaunch"]) == (1, 1, 1)


PAIR = "agraph (float[N,8] x, float[N,8] w) => (float[N,8] y, float[N,8] z) "
APART = "{ y = Exp(x) z = Neg(w) }"


def pair(text: str = APART) -> InferenceSession:
    return session(PAIR + text)


def pair_feeds(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": x_of(rows, seed), "w": x_of(rows, seed + 100)}


def test_small_ends_are_used_by_kernels_in_host_memory(gpu: FakeGpu) -> None:
    """From the run on that a shape has a graph; and no result changes when another run comes."""
    runs = pair()
    kept = []
    for i in range(8):
        feeds = pair_feeds(4, i)
        gpu.counts.clear()
        kept.append((runs.run(["z", "y", "z"], feeds), feeds))
        copies = gpu.counts["cuMemcpyHtoDAsync"] + gpu.counts["cuMemcpyDtoHAsync"]
        assert copies == (2 if i < 3 else 0)
    assert gpu.counts == {"cuGraphLaunch": 1, "cuStreamSynchronize": 1}
    for (z, y, again), feeds in kept:
        np.testing.assert_allclose(y, np.exp(feeds["x"]), rtol=1e-6)
        assert z.tobytes() == again.tobytes() == (-feeds["w"]).tobytes()


@pytest.mark.parametrize(("text", "rows", "stands"), [
    (APART, 4, True), ("{ y = Exp(x) z = Add(y, w) }", 4, True), (APART, 0, False),
    (APART, 4000, False),  # much to write
    ("{ y = Exp(x) z = Mul(x, w) }", 4, True),  # one call makes both
    ("{ y = Exp(x) t = Transpose(x) u = Neg(t) v = Transpose(u) z = Add(v, w) }", 4, False),
    ("{ y = Exp(x) t = Transpose(y) u = Neg(t) v = Transpose(u) z = Add(v, w) }", 4, False),
])  # fmt: skip
def test_which_ends_may_stand_in_host_memory(
    text: str, rows: int, stands: bool, gpu: FakeGpu
) -> None:
    runs, feeds = pair(text), pair_feeds(rows)
    for _ in range(5):
        (y,) = runs.run(["y"], feeds)
        np.testing.assert_allclose(y, np.exp(feeds["x"]), rtol=1e-6)
        for got, want in zip(runs.run(None, feeds), runs.run(["y", "z"], feeds), strict=True):
            assert got.tobytes() == want.tobytes()
    [instance] = runs._on_cuda().instances()
    assert (instance.zero_copy is not None) == stands


def test_an_output_that_lowering_knew_is_written_at_each_run(gpu: FakeGpu) -> None:
    text = "agraph (float[N,4] x) => (int64[2] s, float[N,4] y) { s = Shape(x) y = Exp(x) }"
    runs = session(text)
    x, y, s = aligned((3, 4)), aligned((3, 4)), np.zeros(2, np.int64)
    binding = bind(runs, {"x": place(x)}, y=place(y), s=place(s))
    for _ in range(5):
        s[...] = 0
        runs.run_with_iobinding(binding)
        assert s.tolist() == [3, 4]


@pytest.mark.parametrize("addressed", [0, 3])
@pytest.mark.parametrize("stream", [None, 7])
def test_a_result_of_another_session_under_way_is_waited_for(
    stream: int | None, addressed: int, gpu: FakeGpu
) -> None:
    """Where it is bound as an object, though by its address before."""
    first, second = session(), session()
    made = bind(first, {"x": x_of(4), "b": BIAS}, y="cuda")
    taken = bind(second, {"b": BIAS}, y="cuda")
    for k in range(6):
        first.run_with_iobinding(made, synchronize=k < addressed)
        (y,) = made.get_outputs()
        if k < addressed:
            taken.bind_input("x", "cuda", 0, y.dtype, y.shape, y.address)
        else:
            taken.bind_ortvalue_input("x", y)
        makes = max(i for i, (what, *_) in enumerate(gpu.order) if what == "launch")
        second.run_with_iobinding(taken, stream=stream, synchronize=False)
        takes = max(i for i, (what, *_) in enumerate(gpu.order) if what == "launch")
        assert makes in works(gpu)[takes]
    np.testing.assert_allclose(taken.get_outputs()[0].numpy(), expected(expected(x_of(4))[0])[0])


def test_arrays_and_gpu_tensors_are_fed_side_by_side(gpu: FakeGpu) -> None:
    text = """agraph (float[N,8] a, float[N,8] b, float[N,8] c) => (float[N,8] y)
    { s = Add(a, b) t = Mul(s, c) y = Tanh(t) }"""
    runner = Executable(text_model(text))
    held = aligned((3, 8))
    there = DeviceTensor(held.ctypes.data, held.shape, "float32", 0, held)
    for i in range(6):
        a, b, c = (x_of(3, 3 * i + k) for k in range(3))
        held[...] = b
        for feeds in ({"a": a, "b": there, "c": c}, {"a": a, "b": b, "c": c}):
            (y,) = runner.run(None, feeds)
            np.testing.assert_allclose(y, np.tanh((a + b) * c), atol=1e-6)


def test_a_large_array_goes_up_in_pieces(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE", 96)  # three rows
    runs = session()
    for rows, order in ((5, "C"), (6, "C"), (20, "C"), (20, "F")):
        x = np.asarray(x_of(rows), order=order)
        same(runs.run(None, {"x": x, "b": BIAS}), x)
        before = gpu.counts["cuMemcpyHtoDAsync"]
        same(runs.run(None, {"x": x, "b": BIAS}), x)
        copies = gpu.counts["cuMemcpyHtoDAsync"] - before
        assert copies == (1 + -(-rows // 3) if rows > 5 and order == "C" else 1), rows


def test_a_trainer_takes_tensors_on_the_gpu(gpu: FakeGpu) -> None:
    text = """agraph (float[N,8] x) => (float[N,2] y) <float[8,2] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 8,
    7, 6, 5, 4, 3, 2}> { y = MatMul(x, w) }"""
    held, labels = aligned((5, 8)), np.arange(5) % 2
    held[...] = x_of(5)
    there = DeviceTensor(held.ctypes.data, held.shape, "float32", 0, held)
    classes = DeviceTensor(labels.ctypes.data, labels.shape, "int64", 0, labels)
    trainer = Trainer(text_model(text), loss="cross_entropy", device="cuda")
    given = trainer._fit(trainer.spec(), {"x": there, "labels": classes})
    assert given["x"] is there  # which a launch copies; tests/gpu has the step's numbers
    assert given["labels"].tolist() == labels.tolist()  # they are looked at before it
    labels[0] = 2
    with pytest.raises(DataError, match=r"'labels' holds 2 at \[0\]"):
        trainer.step({"x": there, "labels": classes})
    wide = DeviceTensor(held.ctypes.data, (2, 8), "float64", 0, held)
    with pytest.raises(DataError, match="'x' holds float64, the model reads float32"):
        trainer.step({"x": wide, "labels": labels[:2]})


@pytest.mark.parametrize(("pieces", "found"), [
    ([(0, 8, "a"), (8, 16, "b")], ""), ([(0, 9, "a"), (8, 16, "b")], "ab"),
    ([(0, 99, ""), (8, 16, "b"), (20, 30, "c")], "bc"), ([(0, 8, ""), (0, 8, "")], ""),
    ([(0, 99, "a"), (5, 6, ""), (98, 100, "c"), (99, 101, "d")], "acd"),
    ([(8, 8, "none"), (0, 16, "b")], ""), ([(0, 16, "b"), (16, 16, "none")], ""),
])  # fmt: skip
def test_pieces_of_memory_that_overlap(pieces: list[tuple[int, int, str]], found: str) -> None:
    assert overlapping(pieces) == set(found)


def test_arrays_around_what_is_bound_go_up_in_one_copy(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the room of a cache that stands between them among the inputs."""
    text = """agraph (float[N] a, float[M,8] x, float[N] c) => (float[N] y, float[M,8] z)
    { y = Add (a, c) z = Neg (x) }"""
    runs, uploaded = session(text), []
    upload = device.Stream.upload

    def counted(stream: device.Stream, address: int, source: int, nbytes: int) -> None:
        uploaded.append(nbytes)
        upload(stream, address, source, nbytes)

    monkeypatch.setattr(device.Stream, "upload", counted)
    a, c = np.arange(5, dtype=np.float32), np.ones(5, np.float32)
    x = aligned((40_000, 8))
    x[...] = 2
    binding = bind(runs, {"a": a, "x": place(x), "c": c}, y="cpu", z=place(x))
    for sign in (-1, 1):
        uploaded.clear()
        runs.run_with_iobinding(binding)
        assert uploaded == [4 * 512 + 20]  # `a` has room for the 512 floats of its class
        np.testing.assert_array_equal(binding.get_outputs()[0], a + c)
        assert (x == sign * 2).all()


IN_PLACE = {  # what y, bound where x stands, costs a run: launches, copies
    "element for element": ("y = Add (x, b)", 1, 0),
    "the same": ("y = Identity (x)", 0, 0),
    "read elsewhere too": ("y = Add (x, b) t = Transpose (x) z = Neg (t)", 2, 1),
    "read twice": ("y = Add (x, b) t = Transpose (x) n = Neg (y) z = Add (t, n)", 1, 1),
    "in another order": (
        "r = Reshape (x, c) t = Transpose (r) d = Reshape (t, e) y = Neg (d)",
        1,
        1,
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_output_may_stand_where_an_input_does(name: str, gpu: FakeGpu) -> None:
    nodes, launches, copied = IN_PLACE[name]
    z = ", float[8,8] z" if " z = " in nodes else ""
    text = (
        f"agraph (float[8,8] x, float[8] b) => (float[8,8] y{z}) "
        f"<int64[2] c = {{4, 16}}, int64[2] e = {{8, 8}}> {{ {nodes} }}"
    )
    model = to_proto(text_model(text))
    runs, plain = InferenceSession(model, device="cuda"), InferenceSession(model)
    x, other, z_at = aligned((8, 8)), aligned((8, 8)), aligned((8, 8))
    others = {"z": place(z_at)} if z else {}
    binding, apart = (
        bind(runs, {"x": place(x), "b": place(BIAS)}, y=place(to), **others) for to in (x, other)
    )
    for i in range(12):
        x[...] = x_of(8, i)
        want = plain.run(None, {"x": x, "b": BIAS})
        for array in (other, z_at):
            array[...] = 0
        gpu.counts.clear()
        gpu.order.clear()
        here = i % 4 != 3  # now and then y stands elsewhere
        runs.run_with_iobinding(binding if here else apart)
        for got, wanted in zip([x if here else other, z_at], want, strict=False):
            np.testing.assert_allclose(got, wanted, atol=1e-6)
        if here:
            assert gpu.counts["cuMemcpyDtoDAsync"] == copied
            if i < 2:
                assert gpu.counts["cuLaunchKernelEx"] == launches


def test_arrays_are_read_before_a_run_returns(gpu: FakeGpu) -> None:
    runs, x = session(), x_of(4)
    pending = []
    for i in range(20):
        x[...] = i
        pending.append(runs._on_cuda().send(["y"], {"x": x, "b": BIAS}))
    for i, found in enumerate(pending):
        np.testing.assert_allclose(found.result()[0], np.tanh(i + BIAS)[None].repeat(4, 0))


def test_threads_share_a_session(gpu: FakeGpu) -> None:
    runs = session()

    def work(seed: int) -> None:
        for i in range(25):
            x = x_of(1 + (seed * i) % 5, seed * 100 + i)
            if i % 2:
                same(runs.run(None, {"x": x, "b": BIAS}), x)
                continue
            binding = bind(runs, {"x": x, "b": BIAS}, y="cuda" if i % 4 else "cpu", z="cpu")
            runs.run_with_iobinding(binding, synchronize=i % 3 == 0)
            same(binding.get_outputs(), x)

    in_threads(work, range(1, 7))


def test_arguments_are_packed_as_kernels_read_them() -> None:
    args = (
        Num("i32", -5), Ptr("x", 8), Num("f32", 1.5), Ptr("none", 8), Num("i64", 1 << 40),
        Table((3, Ptr("x", 16), Ptr("none"))), Num("u32", 7), Num("f64", 0.1),
    )  # fmt: skip
    launch = Launch("s", "e", (1, 1, 1), (32, 1, 1), args)
    packed = Arguments(launch, {})
    for start in (4096, 1 << 41):
        packed.place({"x": start}, 0)
        slots = (ctypes.c_uint64 * len(args)).from_address(packed.address)
        kinds = (ctypes.c_int32, ctypes.c_uint64, ctypes.c_float, ctypes.c_uint64, ctypes.c_int64,
                 ctypes.c_uint64 * 3, ctypes.c_uint32, ctypes.c_double)  # fmt: skip
        found = [k.from_address(slot) for k, slot in zip(kinds, slots, strict=True)]
        values = [list(v) if hasattr(v, "_length_") else v.value for v in found]
        assert values == [-5, start + 8, 1.5, 0, 1 << 40, [3, start + 16, 0], 7, 0.1]


def test_an_empty_constant_has_no_place(gpu: FakeGpu) -> None:
    model = text_model(
        '<ir_version: 10, opset_import: ["": 21]>\n'
        "agraph (int64[3,0,5] x, int64 k) => (int64[3,0,5] y) { y = Trilu<upper = 0>(x, k) }"
    )
    (y,) = InferenceSession(model, device="cuda").run(
        None, {"x": np.zeros((3, 0, 5), np.int64), "k": np.array(6)}
    )
    assert y.shape == (3, 0, 5)

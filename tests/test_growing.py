"""Shapes of one class, one after another: they share an instance, and run on as one graph."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeGpu
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from test_bound_tensors import LIBRARIES
from test_caches import EXPORTED, ROOMY, Exported
from test_runtime import BIAS, aligned, bind, place, same, session, x_of

from onnx_fuse import InferenceSession
from onnx_fuse.cuda.launch import BoundLaunch
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.launch import Launch, Num, Ptr
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.runtime import growing, launches
from onnx_fuse.runtime import instance as instance_module
from onnx_fuse.runtime.arg_updates import operands
from onnx_fuse.runtime.instance import Instance
from onnx_fuse.runtime.tensor import DeviceTensor

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


def test_places_that_come_again_after_another_shape(gpu: FakeGpu) -> None:
    """Launches have the numbers of the present shape; a copy has nothing to do over its source."""
    runs = session("agraph (float[N] x) => (float[N] y, float[N] z) { y = Exp(x) z = Identity(x) }")
    for n in (36, 44, 40):
        x, y, z = (aligned((n,)) for _ in range(3))
        pairs = (y, x), (x, z)
        bindings = [bind(runs, {"x": place(x)}, y=place(a), z=place(b)) for a, b in pairs]
        for i in range(8 if n == 44 else 1):
            x[...] = i / 8
            runs.run_with_iobinding(bindings[i % 2])
            np.testing.assert_allclose(pairs[i % 2][0], np.exp(np.full_like(x, i / 8)), rtol=1e-6)
            np.testing.assert_array_equal(pairs[i % 2][1], np.full_like(x, i / 8))
    assert [len(made.launcher._variants) for made in runs._executable.instances()] == [2, 1]


CONSTANT = """
<ir_version: 10, opset_import: ["": 21]>
agraph (float[N] m, int64[2,3] x) => (float[N] n, int64[2,3] y) {
    dims = Shape(m)
    minus = Neg(dims)
    both = Concat<axis = 0>(dims, minus, dims)
    n = Exp(m)
    y = Add(x, both)
}
"""


def test_a_constant_of_other_sizes_is_read_where_it_stands(gpu: FakeGpu) -> None:
    """Also by a launch that has no size among its arguments."""
    session = InferenceSession(text_model(CONSTANT), device="cuda")
    for n in (34, 36, 40, 64, 36, 50):
        m = np.linspace(0, 1, n, dtype=np.float32)
        x = np.arange(6).reshape(2, 3)
        found, y = session.run(None, {"m": m, "x": x})
        np.testing.assert_allclose(found, np.exp(m), rtol=1e-6)
        np.testing.assert_array_equal(y - x, [[n, -n, n]] * 2)


def test_what_a_launch_counts_in_is_new_where_its_size_is_another(gpu: FakeGpu) -> None:
    """What a run leaves there lies by the bytes, so that other bytes begin at zero."""
    args = Ptr("x"), Num("i32", 3), Ptr("sync")
    launch = Launch("quant/float8.cu", "e", (1, 1, 1), (32, 1, 1), args, sync=48)
    bound = BoundLaunch(launch, {"x": 4096}, CHIPS["H200"])

    def words() -> tuple[int, int, int]:
        x, n, sync = (ctypes.c_uint64 * 3).from_address(bound.arguments)
        found = ctypes.c_uint64.from_address
        return found(x).value, ctypes.c_int32.from_address(n).value, found(sync).value

    _, _, first = words()
    bound.rewrite((2, 1, 1), 0, (0, 5, 0), 48, {"x": 8192})
    assert words() == (8192, 5, first)
    bound.rewrite((3, 1, 1), 0, (64, 7, 0), 200, {"x": 4032})
    x, n, second = words()
    assert (x, n) == (4096, 7)
    assert second not in (0, first)
    bound.rewrite((3, 1, 1), 0, (0, 7, 0), 48, {"x": 4096})
    assert words()[2] not in (first, second)


def test_a_shape_more_is_an_update_of_the_graph(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node of a launch that changes, and that follows another, is told."""
    monkeypatch.setattr(instance_module, "GRAPH_LAUNCHES", -1)  # however few launches stay
    monkeypatch.setattr(launches, "AHEAD", 1)
    runs = session()
    for n in range(72, 136, 8):
        if n == 104:
            gpu.counts.clear()
        same(runs.run(None, {"x": x_of(n), "b": BIAS}), x_of(n))
    (instance,) = runs._executable.instances()
    assert len(instance.made.changes or ()) == 2
    counts = [
        gpu.counts[name] for name in ("cuLaunchKernelEx", "cuGraphLaunch", "update", "capture")
    ]
    assert counts == [4, 4, 4, 0], "the first launch stays out of the graph"


MASKED = """
<ir_version: 10, opset_import: ["": 21]>
agraph (int64[B,N] mask, float[B,8] x) => (float[B,8] y)
<int64[1] one = {1}> {
    count = ReduceSum<keepdims = 1>(mask, one)
    length = Cast<to = 1>(count)
    y = Add(x, length)
}
"""
LONGER = [*range(300, 306), 511, 512, 513, 1024, 1025, 2048, 2, 1, 0, 7, 600]


@pytest.mark.parametrize("of", [place, np.copy, *LIBRARIES[:3]])
def test_a_bound_mask_of_another_length_is_an_update_of_the_graph(
    of: Any, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is looked up but the sizes: no lowering, capture or memory, and one update a run."""
    monkeypatch.setattr(instance_module, "GRAPH_LAUNCHES", 0)
    runs, ones = InferenceSession(text_model(MASKED), device="cuda"), np.ones((3, 2048), np.int64)
    x, y, memory = aligned((3, 8)), aligned((3, 8)), np.zeros(3 * 2048 + 2, np.int64)
    x[...] = np.arange(24).reshape(3, 8)
    memory = memory[memory.ctypes.data % 16 // 8 :]
    binding = bind(runs, {"x": place(x)}, y=place(y))
    for length in LONGER:
        mask = memory[: 3 * length].reshape(3, length)
        mask[...] = ones[:, :length]
        mask[1, length // 2 :] = 0
        if length == LONGER[5]:
            gpu.counts.clear()
        value = of(mask)
        if of is place:
            binding.bind_input("mask", *value)
        else:
            (binding.bind_cpu_input if of is np.copy else binding.bind_ortvalue_input)(
                "mask", value
            )
        runs.run_with_iobinding(binding)
        np.testing.assert_array_equal(y, x + mask.sum(1, keepdims=True))
        if length == 2048:
            assert (gpu.counts["cuGraphLaunch"], gpu.counts["capture"]) == (7, 0)
            assert (gpu.counts["cuLaunchKernelEx"], gpu.counts["update"]) == (7, 0)
            assert not gpu.counts["cuMemAllocFromPoolAsync"]
            assert runs._executable.specializer.traced == 1
    assert runs._executable.specializer.traced == 3, "with a length of 1, and of 0"


def test_a_bound_input_that_reaches_an_output_is_read_first(gpu: FakeGpu) -> None:
    """As long as it ends before, the output is written in place."""
    runs = InferenceSession(text_model(MASKED), device="cuda")
    memory, x = aligned((1, 2 * 330)), aligned((1, 8))
    y = memory[:, 2 * 320 : 2 * 320 + 8]
    binding = bind(runs, {"x": place(x)}, y=place(y))
    for length in (300, 301, 302, 303, 320, 324, 325, 319):
        mask = memory[:, : 2 * length].view(np.int64)
        mask[...] = 1
        binding.bind_input("mask", *place(mask))
        runs.run_with_iobinding(binding)
        np.testing.assert_array_equal(y, x + length)
        assert runs._executable.instances()[-1].now.copied == ({"y"} if length > 320 else set())


TWO = """
<ir_version: 10, opset_import: ["": 21]>
agraph (float[N] a, float[N] b, float[1] x) => (float[1] y)
<int64[1] zero = {0}> {
    product = Mul(a, b)
    sum = ReduceSum<keepdims = 1>(product, zero)
    y = Add(x, sum)
}
"""


def test_bound_inputs_of_one_size_become_longer_together(gpu: FakeGpu) -> None:
    """Between two bindings to both, one is longer than the other, which no program serves."""
    runs = InferenceSession(text_model(TWO), device="cuda")
    memory, x, y = aligned((2, 64)), aligned((1,)), aligned((1,))
    memory[...] = np.arange(128).reshape(2, 64)
    binding = bind(runs, {"x": place(x)}, y=place(y))
    for length in (40, 41, 42, 43, 44, 48):
        if length == 44:
            with pytest.raises(Exception, match="broadcast"), pytest.warns(match="differ"):
                runs.run_with_iobinding(binding)
        for name, row in zip("ab", memory, strict=True):
            binding.bind_input(name, *place(row[:length]))
        runs.run_with_iobinding(binding)
        np.testing.assert_allclose(y, [memory[0, :length] @ memory[1, :length]], rtol=1e-5)
        binding.bind_input("a", *place(memory[0, : length + 1]))


def assert_as_if_new(instance: Instance) -> None:
    """Every launch has the grid and the arguments of one that is bound anew for this shape."""
    source, numbers = instance.made.source, instance.made._numbers
    assert source is not None
    for recipe in source.recipes.values():
        recipe._last, recipe.sizes._valued = None, []
    program, steps = source.at(numbers), iter(instance.launcher.parts[0]._steps)
    for i, call in enumerate(program.calls):
        for launch in call.launches:
            step = next(steps)
            new = BoundLaunch(launch, operands(instance.address, i, call), instance.owner.hw)
            new._sync = step._sync
            new.place(operands(instance.address, i, call))
            assert (step.grid, words_in(step)) == (new.grid, words_in(new)), (i, call.kernel)
            assert (step.smem, step.launch.smem) == (launch.smem, launch.smem)
            assert step.launch.sync == launch.sync


def words_in(step: BoundLaunch) -> bytes:
    arguments = step._arguments
    start = arguments._skipped
    return bytes(arguments._memory)[start : start + arguments._layout[0].size]


def gqa() -> Any:
    """Attention over a cache of 64 places, with a mask that says how many are taken."""
    return text_model(GQA)


GQA = """
<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
agraph (float16[B,S,128] q, float16[B,S,64] k, float16[B,S,64] v, int64[B,T] mask,
        float16[B,2,P,32] past_k, float16[B,2,P,32] past_v)
    => (float16[B,S,128] y, float16[B,2,P,32] present_k, float16[B,2,P,32] present_v)
<int64[1] one = {1}> {
    count = ReduceSum<keepdims = 0>(mask, one)
    less = Sub(count, one)
    lengths = Cast<to = 6>(less)
    dims = Shape(mask)
    last = Gather(dims, one)
    total = Cast<to = 6>(last)
    y, present_k, present_v = com.microsoft.GroupQueryAttention
        <num_heads = 4, kv_num_heads = 2>(q, k, v, past_k, past_v, lengths, total)
}
"""


DECODERS = Path(__file__).parent / "data" / "decoders"


@pytest.mark.parametrize(
    "name", ["llama_sdpa_dyn23", "gpt2_ts17tot_nopos", "whisper_ts14_f32", "gqa"]
)
def test_what_sizes_changed_is_what_an_evaluation_anew_gives(
    name: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches and masks of decoders, or a mask alone, that grow and shrink between runs."""
    monkeypatch.setattr(gpu, "_run", lambda *_: None)  # the shapes are of interest here
    model: Any = gqa() if name == "gqa" else str(DECODERS / f"{name}.onnx")
    session = InferenceSession(model, device="cuda", precision="fp16")
    executable, instances = session._executable, set()
    for past in (18, 19, 20, 21, 22, 26, 30, 31, 23, 24, 29, 18, 20, 27):
        feeds = {}
        for end in session.get_inputs():
            cache, mask = "past" in end.name, "mask" in end.name
            long = {2: 64 if name == "gqa" else past} if cache else {1: past + 1} if mask else {}
            shape = [d if isinstance(d, int) else long.get(i, 1) for i, d in enumerate(end.shape)]
            kind = np.dtype({"float": "float32"}.get(end.type[7:-1], end.type[7:-1]))
            feeds[end.name] = np.zeros(shape, kind)
        session.run(None, feeds)
        instance = executable.instances()[-1]
        instances.add(id(instance))
        assert_as_if_new(instance)
    assert len(instances) <= 4  # two classes, and shapes that came again


@pytest.mark.parametrize("row", ROOMY, ids=lambda row: row.name)
def test_a_cache_that_grows_stays_where_it_is(
    row: Exported, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token more is no new shape and no copy of the cache; what others see is as it was."""
    monkeypatch.setattr(growing, "LEAST", 4)
    monkeypatch.setattr(growing, "MODEST", 0)
    session, rng = InferenceSession(row.model(), device="cuda"), np.random.default_rng(8)
    names = [v.name for v in session.get_outputs()]
    text = [row.feeds(2, 1, 0, rng) for _ in range(10)]
    start = {name: array for name, array in text[0].items() if "past" in name}
    binding = session.io_binding()

    def token(feeds: dict[str, np.ndarray], pasts: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        for name, value in (feeds | pasts).items():
            host = isinstance(value, np.ndarray)
            (binding.bind_cpu_input if host else binding.bind_ortvalue_input)(name, value)
        for name in names:
            binding.bind_output(name, "cpu" if name == "y" else "cuda")
        session.run_with_iobinding(binding)
        y, *presents = binding.get_outputs()
        return y, dict(zip(start, presents, strict=bool(presents)))

    wanted, pasts = [], start
    for feeds in text:  # by copies of all
        y, *presents = session.run(names, feeds | pasts)
        pasts = dict(zip(start, presents, strict=True))
        wanted.append((y, pasts))
    kept, begun, pasts = [], [], start
    for feeds, (y, _) in zip(text, wanted, strict=True):
        gpu.counts.clear()
        found, pasts = token(feeds, pasts)
        np.testing.assert_allclose(found, y, atol=2e-3)
        begun.append(gpu.counts["cuMemcpy2DAsync"] > 0)
        kept.append(pasts)
    # a room of 4 from the second run on, then of 8 and of 16
    assert [i for i, new in enumerate(begun) if new] == [1, 4, 8]
    assert len({id(value.rooms) for value in pasts.values()}) == 1
    for pasts, (_, presents) in zip(kept, wanted, strict=True):
        for name, value in pasts.items():
            assert value.shape == presents[name].shape
            np.testing.assert_array_equal(value.numpy(), presents[name])
    # another token behind the same ones harms nobody
    other, _ = token(text[0], kept[5])
    assert not np.allclose(other, wanted[6][0], atol=2e-3)
    for i in (5, 6, 2, 8):
        np.testing.assert_allclose(token(text[i + 1], kept[i])[0], wanted[i + 1][0], atol=2e-3)
    for name, value in kept[9].items():
        address = value.address  # from here on it has memory of its own
        assert value.rooms is None
        assert value.address == address
        np.testing.assert_array_equal(value.numpy(), wanted[9][1][name])
    # runs of which each follows the last name their pasts in the first ones alone
    binding, pasts = session.io_binding(), start
    binding.chained = True
    for feeds, (y, _) in zip(text, wanted, strict=True):
        if binding.follows is not None:  # a run that is refused has no token
            with pytest.raises(InvalidArgument):
                token({name: a.astype(np.int32) for name, a in feeds.items()}, pasts)
        found, pasts = token(feeds, pasts)
        np.testing.assert_allclose(found, y, atol=2e-3)
        assert bool(pasts) == (binding.follows is None)
    for name, value in binding.follows.presents().items():
        np.testing.assert_array_equal(value.numpy(), wanted[9][1][name])


@pytest.mark.parametrize(
    ("sequences", "tokens", "expected", "room"),
    [
        (1, 3, 0, 1024),
        (1, 1023, 0, 1024),
        (1, 1024, 0, 2048),
        (1, 3, 3000, 4096),
        (1, 3, 1 << 20, 8192),  # 256 MB: as many as may never come
        (16, 3, 0, 512),
        (64, 3, 900, 256),
        (64, 300, 0, 512),
    ],
)
def test_a_room_is_as_large_as_is_usual_where_that_is_little(
    gpu: FakeGpu, sequences: int, tokens: int, expected: int, room: int
) -> None:
    """A next room is another program, which stops a text for some tenths of a second."""
    shape = (sequences, 8, tokens, 128)
    pasts = {str(i): DeviceTensor(0, shape, "float16", 0, None) for i in range(16)}
    owner = SimpleNamespace(
        pool=SimpleNamespace(allocate=lambda *_: SimpleNamespace(address=0)),
        stream=SimpleNamespace(move_rows=lambda *_: None),
        uploads=SimpleNamespace(send=lambda *_: None),
        device_id=0,
    )
    assert growing.Rooms(owner, pasts, tokens, expected).size == room


@pytest.mark.parametrize("row", [*EXPORTED, *ROOMY], ids=lambda row: row.name)
def test_a_cache_that_cannot_have_room_grows_by_copies(row: Exported, gpu: FakeGpu) -> None:
    """Some tokens a run, a mask, or a type of which no kernel takes lengths."""
    session, rng = InferenceSession(row.model(), device="cuda"), np.random.default_rng(8)
    names, rows = [v.name for v in session.get_outputs()], 1 if row.masked else 2
    binding, pasts = session.io_binding(), {}
    for i in range(4):
        feeds = row.feeds(2, rows, rows * i, rng)
        pasts = pasts or {n: array for n, array in feeds.items() if "past" in n}
        feeds |= {name: np.asarray(value) for name, value in pasts.items()}
        for name, value in (feeds | pasts).items():
            host = isinstance(value, np.ndarray)
            (binding.bind_cpu_input if host else binding.bind_ortvalue_input)(name, value)
        for name in names:
            binding.bind_output(name, "cuda")
        for _ in range(2):  # as if it were another token
            session.run_with_iobinding(binding)
        y, *presents = binding.get_outputs()
        pasts = dict(zip(pasts, presents, strict=True))
        for name, found in zip(names, (y, *presents), strict=True):
            [exact] = session.run([name], feeds)
            np.testing.assert_allclose(found.numpy(), exact, atol=2e-3)
            assert getattr(found, "rooms", None) is None

"""How graphs run on torch's CUDA tensors, over a GPU made of host memory."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fake_gpu import FakeGpu  # noqa: E402
from lowering import program_of  # noqa: E402

import onnx_fuse.torch.functional  # noqa: E402, F401
from onnx_fuse.errors import UsageError  # noqa: E402
from onnx_fuse.ir.build import text_model  # noqa: E402
from onnx_fuse.program.call import dtype_of  # noqa: E402
from onnx_fuse.program.problem import CHIPS  # noqa: E402
from onnx_fuse.runtime import direct  # noqa: E402
from onnx_fuse.runtime.specialize import Specializer  # noqa: E402
from onnx_fuse.session import load  # noqa: E402
from onnx_fuse.torch import gpu as module  # noqa: E402
from onnx_fuse.torch.graph import BUILDERS, OnnxGraph, find  # noqa: E402
from onnx_fuse.torch.guard_cache import Kinds  # noqa: E402

TEXT = """agraph (float[N,8] x, float[8] b) => (float[N,8] y, float[8,N] z, float[N,8] same,
int64[2] s) { q = Add(x, b) y = Tanh(q) t = Transpose(y) z = Neg(t) same = Identity(x)
s = Shape(x) }"""


class Torch:
    """What torch says of its present state."""

    def __init__(self) -> None:
        self.stream, self.capturing = 7, False


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Torch:
    found = Torch()
    monkeypatch.setattr(module, "current_device", lambda: 0)
    monkeypatch.setattr(module, "current_stream", lambda device_id: found.stream)
    monkeypatch.setattr(module, "capturing", lambda: found.capturing)
    monkeypatch.setattr(module, "precision", lambda: "highest")
    return found


def runner() -> tuple[Any, Any]:
    graph = OnnxGraph("test", load(text_model(TEXT)))
    made = module.GpuRunner(graph.model, 0)
    return made, lambda *tensors: made.run(graph, tensors)


def check(run: Any, rows: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, b = torch.randn(rows, 8, generator=generator), torch.randn(8, generator=generator)
    y, z, same, s = run(x, b)
    torch.testing.assert_close(y, torch.tanh(x + b))
    torch.testing.assert_close(z, -torch.tanh(x + b).t())
    assert torch.equal(same, x)
    assert same.data_ptr() != x.data_ptr() or not rows
    assert s.tolist() == [rows, 8]


def test_runs_in_any_shape_wait_for_nothing_once_it_is_known(gpu: FakeGpu, now: Torch) -> None:
    _, run = runner()
    for rows in (4, 5, 0):
        check(run, rows)
    gpu.counts.clear()
    gpu.order.clear()
    for seed in range(12):
        for rows in (4, 5):
            check(run, rows, seed)
    assert {stream for _, stream, *_ in gpu.order} == {7}
    assert {name for name, *_ in gpu.order} <= {"launch", "cuMemcpyDtoDAsync"}
    assert not [n for n in gpu.counts if "Alloc" in n or "Synchronize" in n or "Event" in n]


def test_each_stream_has_launches_of_its_own(gpu: FakeGpu, now: Torch) -> None:
    made, run = runner()
    for stream in (7, 8, 7):
        now.stream = stream
        gpu.order.clear()
        check(run, 4)
        assert {s for name, s, *_ in gpu.order if name == "launch"} == {stream}
    first, second = made._turns.values()
    assert first.launcher.current is not second.launcher.current


def test_a_capture_needs_a_run_before_and_keeps_its_launches(gpu: FakeGpu, now: Torch) -> None:
    made, run = runner()
    now.capturing = True
    with pytest.raises(UsageError, match="run once before the capture"):
        check(run, 4)
    now.capturing = False
    check(run, 4)
    now.capturing, now.stream = True, 9
    gpu.counts.clear()
    check(run, 4)
    assert not [n for n in gpu.counts if "Alloc" in n or "Synchronize" in n or "Event" in n]
    assert [len(turn._kept) for turn in made._turns.values()] == [0, 1]


def test_a_tensor_given_twice_is_a_kind_of_its_own() -> None:
    a, b, c = (torch.zeros(3) for _ in range(3))
    kinds = Kinds()
    kinds.enter("key", [a, b, a], "twice")
    assert kinds.find("key", [c, a, c]) == "twice"
    assert kinds.find("key", [a, b, c]) is None
    assert kinds.find("key", [a, a, a]) is None
    kinds.enter("key", [a, b, c], "apart")
    assert [kinds.find("key", x) for x in ([b, c, a], [b, a, b])] == ["apart", "twice"]


def test_a_graph_that_draws_is_not_launched_again(gpu: FakeGpu, now: Torch) -> None:
    """Its numbers are drawn for each run: launches that are kept have nobody to do so."""
    text = "agraph (float[N,8] x) => (float[N,8] y) { y = RandomUniformLike (x) }"
    graph = OnnxGraph("draw", load(text_model(text)))
    assert module.GpuRunner(graph.model, 0).turn(graph, [torch.ones(2, 8)]) is None


def test_old_shapes_go(gpu: FakeGpu, now: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHAPES", 2)
    made, run = runner()
    for rows in (4, 5, 6, 4):
        check(run, rows)
    assert len(made._layouts) == len(made._turns) == 2


def test_launches_that_repeat_become_a_graph(
    gpu: FakeGpu, now: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "MANY", 2)
    monkeypatch.setattr(direct, "PLACES", 2)
    text = """agraph (float[N,8] x, float[8,8] v) => (float[8,8] y, float[N,8] z)
    { a = Tanh(v) b = Transpose(a) c = Tanh(b) d = Transpose(c) y = Tanh(d) z = Tanh(x) }"""
    graph = OnnxGraph("test", load(text_model(text)))
    v = torch.randn(8, 8)
    turn = module.GpuRunner(graph.model, 0).turn(graph, [torch.zeros(4, 8), v])
    assert turn is not None
    y, z = torch.empty(8, 8), torch.empty(4, 8)

    def launched(x: Any, z: Any) -> tuple[int, int]:
        gpu.counts.clear()
        turn.enqueue([t.data_ptr() for t in (x, v, y, z)])
        torch.testing.assert_close(z, torch.tanh(x))
        torch.testing.assert_close(y, v.tanh().tanh().tanh())
        return gpu.counts["cuGraphLaunch"], gpu.counts["update"]

    x, other, elsewhere = torch.randn(4, 8), torch.randn(4, 8), torch.empty(4, 8)
    assert [launched(x, z) for _ in range(4)] == [(0, 0), (1, 0), (1, 0), (1, 0)]
    assert launched(other, z) == (1, 1)  # one launch reads it: the graph follows
    y = torch.empty(8, 8)
    assert launched(x, z) == (1, 2)
    now.capturing = True
    assert launched(x, z) == (0, 0)  # into a graph that may be launched by others
    now.capturing = False
    # what comes again has launches of its own, as far as there is room
    assert [launched(other, z) for _ in range(2)] == [(1, 1), (1, 0)]
    assert [launched(x, z) for _ in range(3)] == [(0, 0), (1, 0), (1, 0)]
    assert [launched(other, z), launched(x, z)] == [(1, 0), (1, 0)]
    assert launched(other, elsewhere) == (1, 1)
    assert len(turn.launcher._variants) == 2


def test_tensors_at_odd_addresses_are_copied_first(gpu: FakeGpu, now: Torch) -> None:
    _, run = runner()
    memory = torch.randn(41)
    x, b = memory[1:33].view(4, 8), torch.zeros(8)
    assert x.data_ptr() % 16
    torch.testing.assert_close(run(x, b)[0], torch.tanh(x))


def test_a_graph_that_needs_the_host_runs_by_a_binding(gpu: FakeGpu, now: Torch) -> None:
    text = """agraph (float[N] x) => (int64[1,M] i, float[N] y) { i = NonZero(x) y = Neg(x) }"""
    graph = OnnxGraph("test", load(text_model(text)))
    made = module.GpuRunner(graph.model, 0)
    x = torch.tensor([0.0, 1, 0, 2])
    assert made._layout(graph, [x]) is None
    now.capturing = True
    with pytest.raises(UsageError, match="cannot be captured"):
        made._through_binding(graph, [x])
    assert np.array_equal(np.flatnonzero(x.numpy()), [1, 3])


# ---- the programs of the functions -----------------------------------------------------------

SIZES = {"M": 24, "K": 64, "N": 48, "B": 2, "S": 16, "T": 16, "E": 64}
EPS = (1e-5).hex()
# builder of a function's graph, what follows the type, the kernels of its forward and its backward
PROGRAMS = {
    "layer norm": ("layernorm_linear", f"{EPS},gelu,1,0",
                   "LayerNormGemmGelu_mean_rstd_z", "LayerNormGemmGeluGrad"),
    "layer norm without a bias": ("layernorm_linear", f"{EPS},,0,0",
                                  "LayerNormGemm_mean_rstd", "LayerNormGemmGrad"),
    "rms norm": ("rms_norm_linear", f"{EPS},silu,1,0",
                 "RMSNormGemmSilu_rstd_z", "RMSNormGemmSiluGrad"),
    "linear": ("linear_activation", "gelu_tanh,1,0", "GemmGeluTanh_z", "GemmGeluTanhGrad"),
    "attention": ("attention", "4,2,64,1,,", "GroupedSdpaCausal_lse", "GroupedSdpaCausalGrad"),
    "loss": ("linear_cross_entropy", f"1,-100,{0.1.hex()},mean,0",
             "SoftmaxCrossEntropyLoss", "ScatterElements"),
}  # fmt: skip


def drawn(graph: OnnxGraph, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {}
    for value in graph.model.graph.inputs:
        shape = [d if isinstance(d, int) else SIZES[d.value] for d in value.shape or ()]
        if value.name == "target":
            found["target"] = rng.integers(0, SIZES["N"], shape)
        else:
            found[str(value.name)] = rng.standard_normal(shape).astype(dtype_of(dtype)) / 4
    return found


@pytest.mark.parametrize("dtype", ["BFLOAT16", "FLOAT16", "FLOAT"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_function_is_its_fused_kernels_and_needs_no_host(name: str, dtype: str) -> None:
    builder, options, forward, backward = PROGRAMS[name]
    graph = BUILDERS[builder](dtype, *options.split(","))
    assert find(graph.key) is graph  # as another process finds it, by a key in torch's caches
    numpy = {"FLOAT": "float32"}.get(dtype, dtype.lower())
    feeds = drawn(graph, numpy)
    for part, kernel in (
        (graph.saving, forward),
        (graph.saving.replace("forward", "backward"), backward),
    ):
        half = graph.derived(part)
        if part.startswith("back"):
            ends = [(v, dtype_of(numpy)) for v in half.model.graph.inputs if v.name not in feeds]
            assert [str(v.name) for v, _ in ends] == ["y.grad"]
            feeds["y.grad"] = np.ones([SIZES.get(getattr(d, "value", ""), d)
                                       for d in ends[0][0].shape or ()], ends[0][1])  # fmt: skip
            if name == "loss":
                feeds["y.grad"] = feeds["y.grad"].astype(np.float32)
        given = {str(v.name): feeds[str(v.name)] for v in half.model.graph.inputs}
        program = program_of(half.model.clone(), given)
        assert not program.stages
        assert not program.fallbacks
        assert not any(call.host for call in program.calls)
        if dtype != "FLOAT":
            assert kernel in [call.kernel for call in program.calls]
        tensors = [_tensor(given[end.name]) for end in half.inputs]
        names = [end.name for end in half.outputs]
        found = dict(zip(names, half.run(tensors), strict=True))
        feeds |= {k: _array(t) for k, t in found.items() if k not in feeds}


@pytest.mark.parametrize("dtype", ["BFLOAT16", "FLOAT16"])
def test_no_weight_of_a_large_product_is_copied(dtype: str) -> None:
    """It lies as [N, K], and so does its gradient; where the shapes are open, too."""
    graph = BUILDERS["layernorm_linear"](dtype, EPS, "gelu", "1", "0")
    half = graph.derived(graph.saving.replace("forward", "backward"))
    sizes = {"M": 8192, "K": 4096, "N": 4096}
    specializer = Specializer(half.model.clone(), CHIPS["H200"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that each shape is lowered by itself
        shapes = {
            end.name: (tuple(sizes.get(d, d) for d in end.sizes or ()), dtype_of_torch(end.dtype))
            for end in half.inputs
        }
        made = specializer.of(shapes)
    assert [call.kernel for call in made.program.calls] == ["LayerNormGemmGeluGrad"]
    names = dict(made.program.outputs)
    assert names["weight.grad"].shape == (4096, 4096)


def dtype_of_torch(kind: Any) -> str:
    return str(kind).removeprefix("torch.")


def _tensor(array: np.ndarray) -> Any:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _array(tensor: Any) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(dtype_of("bfloat16"))
    return tensor.numpy()

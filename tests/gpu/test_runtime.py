"""The runtime on the GPU: sessions, shape keys, bindings, device tensors, state, faults."""

import os
import re
import subprocess
import sys
import threading
from math import erf, pi
from pathlib import Path

import lowering
import ml_dtypes
import mlp
import numpy as np
import onnxruntime
import pytest
import test_lower
import test_program_passes
import test_train
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from support import normal

from onnx_fuse import InferenceSession, bench, rewrite, single_op_models
from onnx_fuse.cuda import pointwise
from onnx_fuse.errors import DeviceError, UsageError
from onnx_fuse.importer.load import read
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.kernels import reduce as reduce_kernels
from onnx_fuse.lower import elementwise
from onnx_fuse.program.problem import GemmProblem, Hardware
from onnx_fuse.runtime import device, plan, shapes
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.training.trainer import Trainer
from onnx_fuse.validation.request import Request

CHAIN = "agraph (float[N,16] x, float[16] b) => (float[N,16] y) { s = Add(x, b) y = Tanh(s) }"


def feeds_of(rows: int) -> dict[str, np.ndarray]:
    return normal({"x": (rows, 16), "b": (16,)}, rows)


def expected(feeds: dict[str, np.ndarray]) -> np.ndarray:
    return np.tanh(feeds["x"] + feeds["b"])


@pytest.mark.parametrize("name", lowering.GRAPHS)
@pytest.mark.filterwarnings("ignore:runs on onnxruntime")
def test_graphs_of_the_lowering_tests(name: str) -> None:
    text, feeds = lowering.GRAPHS[name]
    model = text_model(text)
    want = onnxruntime.InferenceSession(to_proto(model).SerializeToString()).run(None, feeds)
    for got, array in zip(Executable(model).run(None, feeds), want, strict=True):
        assert got.dtype == array.dtype
        np.testing.assert_allclose(got, array, rtol=1e-5, atol=1e-6)


ROW_PRODUCT = pytest.mark.launches("layernorm/row.cu", "layernorm_row", "PRODUCT", "10")
GRAD_PRODUCT = pytest.mark.launches("layernorm/grad.cu", "layernorm_dx", "PRODUCT", "10")


@pytest.mark.parametrize("k", [1, pytest.param(10, marks=GRAD_PRODUCT), 16, 17])
@pytest.mark.parametrize("turned", [False, True])
def test_a_norms_backward_makes_rows_of_dy_from_few_columns(k: int, turned: bool) -> None:
    text, given = test_program_passes.norm_grad_of_a_product(k, turned)
    rng = np.random.default_rng(k)
    feeds = {n: rng.standard_normal(v.shape).astype(np.float32) for n, v in given.items()}
    wide = {name: array.astype(np.float64) for name, array in feeds.items()}
    dy = wide["a"] @ (wide["b"].T if turned else wide["b"])
    xh, g = (wide["x"] - wide["m"]) * wide["r"], dy * wide["s"]
    inner = (g * xh).mean(1, keepdims=True)
    dx = wide["r"] * (g - g.mean(1, keepdims=True) - xh * inner)
    run = Executable(text_model(text))
    got, again = run.run(None, feeds), run.run(None, feeds)
    wants = ((dx, 2e-6 * np.abs(dx).max()), *(
        # float32 rounds by the size of the 40 terms, which may cancel
        (terms.sum(0), 5e-7 * np.abs(terms).sum(0).max()) for terms in (dy * xh, dy)
    ))  # fmt: skip
    for y, twice, (want, bound) in zip(got, again, wants, strict=True):
        assert y.tobytes() == twice.tobytes()
        np.testing.assert_allclose(y, want, rtol=0, atol=bound)


@pytest.mark.parametrize("also", ["", "t = Tanh(y)"])
@pytest.mark.parametrize(("n", "shape", "dtype"), [
    (2, (40, 64), "float32"), pytest.param(10, (256, 512), "float32", marks=ROW_PRODUCT),
    (16, (5, 784), "float32"),
    (10, (3000, 32), "float32"), (7, (3, 9), "float32"), (10, (2, 300), "float16"),
    (5, (1000, 64), "float16"),
])  # fmt: skip
@pytest.mark.parametrize("turned", [False, True])
def test_a_norm_makes_a_product_of_few_columns(
    n: int, shape: tuple[int, int], dtype: str, turned: bool, also: str
) -> None:
    text, feeds = test_program_passes.product_of_a_norm(n, turned, also, dtype=dtype, shape=shape)
    x, s, b, w, c = (feeds[name].astype(np.float64) for name in "xsbwc")
    d = x - x.mean(-1, keepdims=True)
    y = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * s + b
    w = w.T if turned else w
    run = Executable(text_model(text))
    got, again = run.run(None, feeds), run.run(None, feeds)
    (call,) = (call for call in run.instance(feeds).program.calls if "Gemm" in call.kernel)
    assert call.kernel == "LayerNormalization+Gemm"
    part = {"float32": 2e-6, "float16": 2e-3}[dtype]
    # each factor y is rounded, and z; the sum is float32's
    bound = part * (np.abs(y) @ np.abs(w)).max()
    np.testing.assert_allclose(got[0].astype(np.float64), y @ w + c, rtol=0, atol=bound)
    assert [a.tobytes() for a in got] == [a.tobytes() for a in again]
    if also:
        np.testing.assert_allclose(got[1], np.tanh(y), rtol=0, atol=2 * part)


UNARY = [
    name
    for name in pointwise.TABLE
    if ("", name) in elementwise.LOWERINGS
    and "{1}" not in pointwise.TABLE[name]
    and name not in ("BitwiseNot", "Cast", "Iota", "Not")
]


@pytest.mark.parametrize("dtype", ["float", "double", "float16"])
@pytest.mark.parametrize("size", [1, 7, 8, 4099])
def test_unary_ops_match_onnxruntime(dtype: str, size: int) -> None:
    """One graph with every unary op; sizes around the vector width."""
    names = {"float": np.float32, "double": np.float64, "float16": np.float16}
    x = np.random.default_rng(size).uniform(0.1, 0.9, size).astype(names[dtype])
    outputs, nodes, kept = [], [], []
    for op in UNARY:
        kind = "bool" if op in pointwise.COMPARES else dtype
        text = f"agraph ({dtype}[N] x) => ({kind}[N] y) {{ y = {op}(x) }}"
        try:
            session = onnxruntime.InferenceSession(to_proto(text_model(text)).SerializeToString())
            outputs.append(session.run(None, {"x": x})[0])
        except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
            continue  # onnxruntime's CPU has no such kernel: nothing to compare with
        kept.append(f"{kind}[N] y_{op}")
        nodes.append(f"y_{op} = {op}(x)")
    text = f"agraph ({dtype}[N] x) => ({', '.join(kept)}) {{ {' '.join(nodes)} }}"
    got = Executable(text_model(text)).run(None, {"x": x})
    tolerance = {"float": 2e-6, "double": 1e-12, "float16": 2e-3}[dtype]
    for label, y, want in zip(kept, got, outputs, strict=True):
        np.testing.assert_allclose(y, want, rtol=tolerance, atol=tolerance, err_msg=label)


def test_session_runs_other_shapes_through_other_instances(tmp_path) -> None:
    session = InferenceSession(to_proto(text_model(CHAIN)), device="cuda")
    for rows in (1, 5, 1, 64):
        feeds = feeds_of(rows)
        np.testing.assert_allclose(session.run(None, feeds)[0], expected(feeds), atol=1e-6)


def test_instances_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(shapes, "INSTANCES", 3)
    runner = Executable(text_model(CHAIN))
    for rows in range(1, 8):
        feeds = feeds_of(rows)
        np.testing.assert_allclose(runner.run(None, feeds)[0], expected(feeds), atol=1e-6)
    assert len(runner.programs()) == 3
    assert runner.release_memory() > 0
    np.testing.assert_allclose(runner.run(None, feeds)[0], expected(feeds), atol=1e-6)


def test_a_feed_that_decides_about_shapes_joins_the_key() -> None:
    text = "agraph (float[6] x, int64[2] s) => (float[A,B] y) { e = Exp(x) y = Reshape(e, s) }"
    runner, x = Executable(text_model(text)), np.arange(6, dtype=np.float32)
    for shape in ([2, 3], [3, 2], [-1, 6], [2, 3]):
        (y,) = runner.run(None, {"x": x, "s": np.array(shape)})
        np.testing.assert_allclose(y, np.exp(x).reshape(shape), rtol=1e-6)


def test_graph_and_single_launches_agree(monkeypatch) -> None:
    feeds = feeds_of(33)
    captured = Executable(text_model(CHAIN)).run(None, feeds)[0]
    monkeypatch.setenv("ONNX_FUSE_GRAPH", "0")
    assert Executable(text_model(CHAIN)).run(None, feeds)[0].tobytes() == captured.tobytes()


def test_two_sessions_in_threads() -> None:
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            runner = Executable(text_model(CHAIN))
            for rows in (seed, seed + 3, seed):
                feeds = feeds_of(rows)
                np.testing.assert_allclose(runner.run(None, feeds)[0], expected(feeds), atol=1e-6)
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults


def test_outputs_stay_on_the_device_and_come_back_as_feeds() -> None:
    runner, feeds = Executable(text_model(CHAIN)), feeds_of(9)
    (y,) = runner.run(None, feeds, on_device=True)
    np.testing.assert_allclose(y.numpy(), expected(feeds), atol=1e-6)
    again = {"x": y, "b": feeds["b"]}
    np.testing.assert_allclose(
        runner.run(None, again)[0], np.tanh(expected(feeds) + feeds["b"]), atol=1e-6
    )


def test_tensors_of_another_library_in_and_out() -> None:
    torch = pytest.importorskip("torch")
    runner, feeds = Executable(text_model(CHAIN)), feeds_of(9)
    tensors = {name: torch.from_numpy(a).cuda() for name, a in feeds.items()}
    (y,) = runner.run(None, tensors, on_device=True)
    for back in (torch.from_dlpack(y), torch.as_tensor(y, device="cuda")):
        np.testing.assert_allclose(back.cpu().numpy(), expected(feeds), atol=1e-6)
    session = InferenceSession(to_proto(text_model(CHAIN)), device="cuda")
    np.testing.assert_allclose(session.run(None, tensors)[0], expected(feeds), atol=1e-6)


def test_io_binding() -> None:
    session, feeds = InferenceSession(to_proto(text_model(CHAIN)), device="cuda"), feeds_of(4)
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("y", "cuda")
    session.run_with_iobinding(binding)
    (y,) = binding.get_outputs()
    assert y.shape == (4, 16)
    np.testing.assert_allclose(binding.copy_outputs_to_cpu()[0], expected(feeds), atol=1e-6)
    binding.bind_output("y", "cuda", 0, np.float32, y.shape, y.address)
    binding.bind_cpu_input("b", -feeds["b"])
    session.run_with_iobinding(binding)
    negated = {**feeds, "b": -feeds["b"]}
    np.testing.assert_allclose(y.numpy(), expected(negated), atol=1e-6)
    binding.bind_output("y", "cuda", 0, np.float32, (4, 8), y.address)
    with pytest.raises(UsageError, match=r"output y is float32\[4, 16\], not .*\[4, 8\]"):
        session.run_with_iobinding(binding)
    binding.bind_cpu_input("b", feeds["b"].astype(np.float64))
    with pytest.raises(InvalidArgument, match=r"Actual: \(tensor\(double\)\)"):
        session.run_with_iobinding(binding)
    unbound = session.io_binding()
    for name, array in feeds.items():
        unbound.bind_cpu_input(name, array)
    with pytest.raises(UsageError, match="no output is bound"):
        session.run_with_iobinding(unbound)


FAULT = """
import sys
import numpy as np
from onnx_fuse.errors import DeviceError, UsageError
from onnx_fuse.cuda.arguments import Arguments
from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime.executable import Executable

text = "agraph (float[8,64] x, float[64,8] w) => (float[8,8] y) { y = MatMul (x, w) }"
feeds = {"x": np.ones((8, 64), np.float32), "w": np.ones((64, 8), np.float32)}
whole = Executable(text_model(text))
whole.run(None, feeds)
place = Arguments.place
Arguments.place = lambda self, address, sync: place(self, dict.fromkeys(address, 256), sync)
for runner in (Executable(text_model(text)), whole):
    try:
        runner.run(None, feeds)
    except DeviceError as error:
        print(error)
"""


@pytest.mark.parametrize("named", [False, True])
def test_a_kernels_fault_is_said_and_the_lost_gpu_too(named: bool) -> None:
    single = {"ONNX_FUSE_GRAPH": "0", "ONNX_FUSE_DEBUG": "1"} if named else {}
    done = subprocess.run(
        [sys.executable, "-c", FAULT], env={**os.environ, **single}, capture_output=True, text=True
    )
    first, second = done.stdout.splitlines()
    where = (
        r"MatMul \(y\): Gemm m=8 n=8 k=64 .* gemm_\w+" if named else "running a program of 1 calls"
    )
    assert re.search(rf"^{where}: .*ILLEGAL_ADDRESS.*cannot use the GPU any more", first), done
    assert re.search("ILLEGAL_ADDRESS.*cannot use the GPU any more", second), done


def test_bound_gpu_memory_is_read_in_place() -> None:
    runner, feeds = Executable(text_model(CHAIN)), feeds_of(9)
    memory = device.Memory(1 << 12, "a caller's memory")
    binding = runner.io_binding()
    binding.bind_cpu_input("b", feeds["b"])
    binding.bind_output("y", "cuda")

    def run(rows: int, shift: int) -> np.ndarray:
        x = np.random.default_rng(rows + shift).random((rows, 16), np.float32)
        runner.stream.upload(memory.address + shift, x.ctypes.data, x.nbytes)
        runner.stream.wait("a caller's copy")
        place = memory.address + shift
        binding.bind_input("x", "cuda", 0, np.float32, x.shape, place)
        runner.run_with_iobinding(binding)
        got = binding.get_outputs()[0].numpy()
        np.testing.assert_allclose(got, np.tanh(x + feeds["b"]), atol=1e-6)
        return x

    for rows, shift, places, instances in (
        *((9, 0, True, 1), (9, 0, True, 1)),  # the second reads what stands there then
        *((9, 64, True, 1), (9, 4, False, 1)),  # and one that no 16-byte read may start at
        *((5, 0, True, 1), (9, 0, True, 2)),  # another shape takes its place, then each has one
    ):
        run(rows, shift)
        assert len(runner.instances()) == instances
        made = runner.instances()[-1]
        [x] = [b.id for b in made.program.buffers if b.name == "x"]
        assert (made.address[x] == memory.address + shift) == places
    del feeds["x"]
    with pytest.raises(KeyError):
        runner.run(None, feeds)


RANDOM = """agraph () => (float[100000] u, float[100000] n, float[100000] f, int64[100000] b)
    <float p = {0.25}, int64[1] size = {100000}> {
    u = RandomUniform<low=-1.0, high=3.0, shape=[100000]>()
    n = RandomNormal<mean=2.0, scale=0.5, shape=[100000]>()
    f = RandomUniform<seed=7.0, shape=[100000]>()
    q = Expand(p, size) b = Bernoulli<dtype=7>(q) }"""


@pytest.mark.launches("reduce/sum_squares.cu", "sum_squares")
@pytest.mark.launches("reduce/sum_squares.cu", "sum_squares_total")
@pytest.mark.parametrize("dtype", ["float", "double", "float16", "mixed"])
def test_the_global_norm_of_many_tensors(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce_kernels, "ROWS", 8)  # several tables
    sizes, rng = [1, 7, 8192, 8193, 0, 100_003, 40, 65536, 3, 12, 20000], np.random.default_rng(2)
    kinds = {"float": "ff", "double": "dd", "float16": "ee", "mixed": "fe"}[dtype]
    drawn = [rng.standard_normal(n) / 16 for n in sizes]
    feeds = {f"g{i}": array.astype(kinds[i % 2]) for i, array in enumerate(drawn)}
    want = sum(float((g.astype(np.float64) ** 2).sum()) for g in feeds.values())
    how = ("float", "float16") if dtype == "mixed" else (dtype,)
    model = text_model(test_lower.norm_graph(sizes, *how))
    found = [Executable(model).run(None, feeds)[0] for _ in range(2)]
    rounding = {"float": 1e-6, "mixed": 1e-6, "double": 1e-13, "float16": 5e-4}[dtype]
    np.testing.assert_allclose(found[0], want, rtol=rounding)
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.launches("scan/compact.cu", "kept_positions")
@pytest.mark.launches("regions/nms.cu", "nms", "CENTER", "0")
@pytest.mark.launches("regions/nms.cu", "nms", "CENTER", "1")
@pytest.mark.parametrize("center", [0, 1])
def test_the_boxes_that_suppression_keeps(center: int) -> None:
    """As onnxruntime keeps them, in its order, and the same bits twice; and what follows them."""
    rng = np.random.default_rng(4)
    corners = rng.random((2, 700, 4)).astype(np.float32)
    corners[..., 2:] = corners[..., :2] + 0.2 * corners[..., 2:]
    feeds = {"b": corners, "s": rng.integers(0, 40, (2, 3, 700)).astype(np.float32) / 40}
    model = text_model(f"""agraph (float[2,700,4] b, float[2,3,700] s)
      => (int64[N,3] y, int64[N] z)
      <int64[1] most = {{50}}, float[1] iou = {{0.4}}, float[1] least = {{0.3}}, int64 two = {{2}}>
      {{ y = NonMaxSuppression <center_point_box = {center}> (b, s, most, iou, least)
      z = Gather <axis = 1> (y, two) }}""")
    want = onnxruntime.InferenceSession(to_proto(model).SerializeToString()).run(None, feeds)
    runner = Executable(model)
    found = [runner.run(None, feeds) for _ in range(2)]
    assert not any(program.fallbacks for program in runner.programs())
    for got in found:
        for y, truth in zip(got, want, strict=True):
            np.testing.assert_array_equal(y, truth)


@pytest.mark.launches("random/philox.cu", "philox_fill")
def test_random_numbers_are_the_same_in_every_process_and_new_in_every_run() -> None:
    first, second = (Executable(text_model(RANDOM)) for _ in range(2))
    u, n, fixed, b = first.run(None, {})
    assert abs(u.mean() - 1) < 0.02
    assert u.min() >= -1
    assert u.max() < 3
    assert abs(n.mean() - 2) < 0.01
    assert abs(n.std() - 0.5) < 0.01
    assert abs(b.mean() - 0.25) < 0.01
    for one, two in zip((u, n, fixed, b), second.run(None, {}), strict=True):
        assert one.tobytes() == two.tobytes()
    v, m, same, c = first.run(None, {})
    for one, two in ((u, v), (n, m)):
        assert (one != two).mean() > 0.99
    assert 0.3 < (b != c).mean() < 0.45  # 2 p (1 - p)
    assert fixed.tobytes() == same.tobytes()  # a node's own seed fixes its numbers


@pytest.mark.launches("random/philox.cu", "philox_fill")
def test_dropout_keeps_the_mean_and_the_mask_agrees() -> None:
    text = """agraph (float[N] x) => (float[N] y, bool[N] m) <float r = {0.3}, bool t = {1}>
    { y, m = Dropout(x, r, t) }"""
    x = np.ones(100000, np.float32)
    y, mask = Executable(text_model(text)).run(None, {"x": x})
    np.testing.assert_allclose(y, mask / np.float32(0.7), rtol=1e-6)
    assert abs(mask.mean() - 0.7) < 0.01


@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_may_come_late(accumulate: int) -> None:
    test_train.late_losses("cuda", accumulate)


def test_a_split_batch_has_the_same_bits_where_sums_are_exact() -> None:
    test_train.split_batches("cuda")


def test_feeds_may_change_while_steps_are_under_way() -> None:
    """The arrays of a step are read before `step` returns."""
    text = """agraph (float[N,4] x) => (float[N,2] y) <float[4,2] w = {1,2,3,4,5,6,7,8}>
    { y = MatMul(x, w) }"""
    runs = []
    for reads in (True, False):
        trainer = Trainer(text_model(text), loss="mse", device="cuda")
        feeds = {"x": np.zeros((4096, 4), np.float32), "labels": np.zeros((4096, 2), np.float32)}
        losses = []
        for i in range(20):
            feeds["x"][...] = i + 1
            losses.append(trainer.step(feeds))
            if reads:
                float(losses[-1])
        runs.append([float(loss) for loss in losses])
    assert runs[0] == runs[1]


@pytest.mark.launches("generated", "batched")
def test_small_equal_calls_share_a_launch() -> None:
    names = range(5)
    ends = [", ".join(f"float[7,96] {c}{i}" for i in names) for c in "xy"]
    nodes = " ".join(f"y{i} = Softmax(x{i})" for i in names)
    runner = Executable(text_model(f"agraph ({ends[0]}) => ({ends[1]}) {{ {nodes} }}"))
    feeds = {f"x{i}": np.random.default_rng(i).random((7, 96), np.float32) for i in names}
    for i, y in enumerate(runner.run(None, feeds)):
        e = np.exp(feeds[f"x{i}"])
        np.testing.assert_allclose(y, e / e.sum(-1, keepdims=True), rtol=1e-5)
    assert len(runner.instance(feeds).program.calls) == 1


@pytest.mark.launches("generated", "pointwise_many")
def test_an_update_of_many_tensors_is_one_launch() -> None:
    names = range(40)
    weights = ", ".join(f"float[{3 + i},5] w{i}" for i in names)
    outputs = ", ".join(f"float[{3 + i},5] v{i}" for i in names)
    nodes = " ".join(f"a{i} = Mul(w{i}, r) v{i} = Sub(w{i}, a{i})" for i in names)
    model = text_model(f"agraph ({weights}) => ({outputs}) <float r = {{0.25}}> {{ {nodes} }}")
    feeds = {f"w{i}": np.random.default_rng(i).random((3 + i, 5), np.float32) for i in names}
    runner = Executable(model)
    for i, y in enumerate(runner.run(None, feeds)):
        np.testing.assert_allclose(y, 0.75 * feeds[f"w{i}"], rtol=1e-6)
    assert len(runner.instance(feeds).program.calls) == 1


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_a_norm_folded_into_the_weights(norm: str) -> None:
    model, values = test_program_passes.norm_model(norm)
    gamma, w, c = (values[name].astype(np.float64) for name in ("gamma", "w", "c"))
    executable = Executable(model)
    for rows in (3, 130):
        x = np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float16)
        d = x.astype(np.float64)
        if norm == "LayerNorm":
            d = d - d.mean(1, keepdims=True)
        n = d / np.sqrt((d * d).mean(1, keepdims=True) + 1e-5) * gamma
        want = (n + values.get("beta", np.zeros(64))) @ w + c
        (got,) = executable.run(None, {"x": x})
        # float16 rounds weights, result: 1e-3 as in test_gemm
        assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)
    assert "w" not in executable.weights.resident, "only the folded weights take memory"


@pytest.mark.parametrize(("batch", "rows"), [(1, 8), (1, 128), (4, 512), (2, 4096)])
def test_a_norm_left_to_the_products_that_read_it(batch: int, rows: int) -> None:
    model, feeds = test_program_passes.post_norm_model(
        test_program_passes.POST_NORM, rows=rows, batch=batch
    )
    executable = Executable(model)
    (got,) = executable.run(None, feeds)
    kernels = [call.kernel for call in executable.instance(feeds).program.calls]
    if executable.hw.cc == 90:  # elsewhere it depends on the cost models
        assert kernels.count("LayerNormalization") == 1, "the output's"
    if executable.hw.cc == 90:  # elsewhere it depends on the cost models
        assert kernels.count("LayerNormalization") == 1, "the output's"
    want = test_program_passes.post_norm_value(lowering.weights_of(model) | feeds)
    # float16 rounds weights, sums and the result, twice each: 1e-3 as in test_gemm
    assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)


@pytest.mark.parametrize(("rows", "way"), [(64, "apart"), (5000, "here")])
def test_the_gradient_of_a_residual_block(rows: int, way: str) -> None:
    """act'(z) in the product before, the residual's gradient where dx is stored; then apart."""
    rng, (width, inner) = np.random.default_rng(rows), (256, 512)
    shapes = {"g": (rows, width), "v": (inner, width), "x": (rows, width), "s": (width,),
              "b": (width,), "w": (width, inner), "c": (inner,)}  # fmt: skip
    scale = {"v": inner**-0.5, "w": width**-0.5}
    feeds = {n: (rng.standard_normal(s) * scale.get(n, 1.0)).astype(ml_dtypes.bfloat16)
             for n, s in shapes.items()}  # fmt: skip
    wide = {n: a.astype(np.float64) for n, a in feeds.items()}
    mean, std = wide["x"].mean(-1, keepdims=True), wide["x"].std(-1, keepdims=True)
    xh = (wide["x"] - mean) / std
    z = ((xh * wide["s"] + wide["b"]) @ wide["w"] + wide["c"]).astype(ml_dtypes.bfloat16)
    feeds |= {"mean": mean.astype(np.float32), "rstd": (1 / std).astype(np.float32), "z": z}
    at = z.astype(np.float64)
    slope = (1 + np.vectorize(erf)(at / 2**0.5)) / 2 + at * np.exp(-at * at / 2) / (2 * pi) ** 0.5
    dz = -wide["g"] @ wide["v"].T * slope
    d = dz @ (wide["s"][:, None] * wide["w"]).T
    d = (d - d.mean(-1, keepdims=True) - xh * (d * xh).mean(-1, keepdims=True)) / std
    h = xh * wide["s"] + wide["b"]
    text = test_program_passes.BLOCK_GRAD.replace("M,", f"{rows},").replace("ORDER", "dx, r")
    ways = []
    for more in ("", f", bfloat16[{rows},{inner}] dh, bfloat16[{rows},{width}] dx"):
        runner = Executable(text_model(text.replace("MORE", more).replace("NODE", "")))
        y, dw, *_ = runner.run(None, feeds)
        for got, want in ((y, d - wide["g"]), (dw, h.T @ dz)):
            difference = np.linalg.norm(got.astype(np.float64) - want)
            # as test_gemm's for bfloat16: dz and dx are rounded on their way
            assert difference <= 6e-3 * np.linalg.norm(want)
        assert runner.run(None, feeds)[0].tobytes() == y.tobytes()
        problems = [
            call.problem
            for call in runner.programs()[0].calls
            if isinstance(call.problem, GemmProblem)
        ]
        ways.append([(bool(p.epilogue.dact), p.add) for p in problems])
    assert ways == [[(True, ""), (False, way)], [(False, ""), (False, "")]]


@pytest.mark.launches("pointwise/act_grad.cu", "act_grad_rows", "ACT", "")
@pytest.mark.parametrize(("rows", "more"), [(8, ""), (130, ""), (4100, ", bfloat16[N] dc")])
def test_the_gradient_of_a_hidden_layer(rows: int, more: str) -> None:
    """act'(z) in the product before, and dbias from what it stored."""
    width, inner = (768, 3072) if more else (256, 512)
    rng, shapes = np.random.default_rng(rows), {"dy": (rows, width), "v": (inner, width),
                                                "x": (rows, 128), "w": (128, inner)}  # fmt: skip
    feeds = {n: rng.standard_normal(s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
    feeds["z"] = rng.standard_normal((rows, inner)).astype(ml_dtypes.bfloat16)
    wide = {n: a.astype(np.float64) for n, a in feeds.items()}
    sigmoid = 1 / (1 + np.exp(-wide["z"]))
    dz = wide["dy"] @ wide["v"].T * sigmoid * (1 + wide["z"] * (1 - sigmoid))
    runner = Executable(test_program_passes.hidden_gradient(rows, width, inner, more))
    found, again = runner.run(None, feeds), runner.run(None, feeds)
    assert runner.programs()[0].calls[0].problem.epilogue.dact
    wanted = (dz @ wide["w"].T, wide["x"].T @ dz, dz.sum(0))
    for got, twice, want in zip(found, again, wanted[: len(found)], strict=True):
        # as test_gemm's for bfloat16: dz is rounded on its way
        assert np.linalg.norm(got.astype(np.float64) - want) <= 6e-3 * np.linalg.norm(want)
        assert got.tobytes() == twice.tobytes()


def test_out_of_memory_says_what_asked_for_how_much() -> None:
    text = "agraph (float[1,N] x, float[M,1] z) => (float[M,N] y) { y = Add(x, z) }"
    size = 1 << 20
    feeds = {"x": np.zeros((1, size), np.float32), "z": np.zeros((size, 1), np.float32)}
    runner = Executable(text_model(text))
    with pytest.raises(DeviceError, match=r"4,398,\d+,\d+,\d+ bytes.*lower the batch"):
        runner.run(None, feeds)
    small = {"x": np.ones((1, 8), np.float32), "z": np.ones((4, 1), np.float32)}
    np.testing.assert_array_equal(runner.run(None, small)[0], np.full((4, 8), 2, np.float32))


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(DeviceError, match="does not exist"):
        device.start(99)


@pytest.mark.parametrize("width", [1, 7, 64])
@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_rows_by_indices_outside_a_table_are_zero(kind: str, width: int) -> None:
    text = f"""agraph (float16[5,{width}] w, {kind}[2,6] i, float16[{width},5] u)
    => (float[2,6,{width}] y, float16[2,6,{width}] z, float16[{width},2,6] v)
    {{ z = Gather(w, i) s = Add(z, z) y = Cast<to=1>(s) v = Gather<axis=1>(u, i) }}"""
    w = np.random.default_rng(width).standard_normal((5, width)).astype(np.float16)
    w[0, 0] = np.array(0xFD55, np.uint16).view(np.float16)  # a NaN of certain bits
    i = np.array([[0, 4, -1, -5, 3, 1], [5, -6, 1 << 30, -(1 << 31), 2, -2]], kind)
    inside = (i >= -5) & (i < 5)
    want = np.where(inside[..., None], w[np.where(inside, i, 0)], np.float16(0))
    feeds = {"w": w, "i": i, "u": np.ascontiguousarray(w.T)}
    runner = Executable(text_model(text))
    y, z, v = runner.run(None, feeds)
    assert z.tobytes() == want.tobytes()
    assert v.tobytes() == np.ascontiguousarray(np.moveaxis(want, 2, 0)).tobytes()
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y, 2 * want.astype(np.float32))
    assert len(runner.instance(feeds).program.calls) == 2


@pytest.mark.launches("layernorm/row.cu", "layernorm_row", "TY", "float")
@pytest.mark.launches("layernorm/row.cu", "layernorm_row", "TY", "f16")
@pytest.mark.parametrize("shape", [(5, 33), (9, 768), (1100, 4096), (2, 50000)])
def test_what_follows_a_norm_is_stored_by_it(shape: tuple[int, int]) -> None:
    """float16 rows, in place of their own and as float32."""
    (m, k), rng = shape, np.random.default_rng(0)
    text = f"""agraph (float16[{m},{k}] x, float16[{k}] g, float16[{k}] b, float16[{m},{k}] r)
    => (float[{m},{k}] y, float16[{m},{k}] z)
    {{ t = Neg(x) n = LayerNormalization(t, g, b) y = Cast<to=1>(n)
      u = Abs(x) v = LayerNormalization(u, g, b) h = Add(v, r) a = Relu(h) z = Mul(a, r) }}"""
    shapes = {"x": (m, k), "g": (k,), "b": (k,), "r": (m, k)}
    feeds = {n: rng.standard_normal(s).astype(np.float16) for n, s in shapes.items()}
    runner = Executable(text_model(text))
    got = runner.run(None, feeds)
    x, g, b, r = (feeds[n].astype(np.float64) for n in "xgbr")

    def norm(s: np.ndarray) -> np.ndarray:
        d = s - s.mean(-1, keepdims=True)
        return d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * g + b

    wants = norm(-x), np.maximum(norm(abs(x)) + r, 0) * r
    # of sums in float32, and half an ulp of float16
    for y, want, bound in zip(got, wants, (6e-6, 1e-3), strict=True):
        assert np.abs(y - want).max() <= bound * np.abs(want).max()
    for y, twice in zip(got, runner.run(None, feeds), strict=True):
        assert y.tobytes() == twice.tobytes()
    kernels = [call.kernel for call in runner.instance(feeds).program.calls]
    assert {"LayerNormalization+Cast", "LayerNormalization+Add+Relu+Mul"} <= set(kernels)


@pytest.mark.parametrize("rows", [5, 32])
def test_what_a_product_stores_may_be_wider_than_its_operands(rows: int) -> None:
    text = f"""agraph (float16[{rows},256] x, float16[256,256] w, float16[256] c, float16[256] g,
    float16[256] b) => (float[{rows},256] y, float[{rows},256] z)
    {{ n = LayerNormalization(x, g, b) m = MatMul(n, w) p = Add(m, c) t = Tanh(p)
      y = Cast<to=1>(t) q = MatMul(x, w) u = Add(q, c) z = Cast<to=1>(u) }}"""
    model, rng = text_model(text), np.random.default_rng(rows)
    shapes = {"x": (rows, 256), "w": (256, 256), "c": (256,), "g": (256,), "b": (256,)}
    feeds = {n: (rng.standard_normal(s) / 16**(n == "w")).astype(np.float16)
             for n, s in shapes.items()}  # fmt: skip
    rewrite.optimize(model)
    runner = Executable(model)
    got = runner.run(None, feeds)
    x, w, c, g, b = (feeds[n].astype(np.float64) for n in "xwcgb")
    d = x - x.mean(-1, keepdims=True)
    n = d / np.sqrt((d * d).mean(-1, keepdims=True) + 1e-5) * g + b
    for y, want in zip(got, (np.tanh(n @ w + c), x @ w + c), strict=True):
        # float16 rounds weights, and the norm: 1e-3 as in test_gemm
        assert np.linalg.norm(y - want) <= 1e-3 * np.linalg.norm(want)
    problems = [call.problem for call in runner.instance(feeds).program.calls]
    assert [p and p.out for p in problems if p] == ["float32"] * 2


def test_scatter_is_ordered_and_repeatable() -> None:
    text = """agraph (float[64,8] x, int64[5000,1] i, float[5000,8] u) => (float[64,8] y)
    { y = ScatterND<reduction="add">(x, i, u) }"""
    rng = np.random.default_rng(0)
    x, u = np.zeros((64, 8), np.float32), rng.standard_normal((5000, 8)).astype(np.float32)
    i = rng.integers(0, 64, (5000, 1))
    runner = Executable(text_model(text))
    y, again = (runner.run(None, {"x": x, "i": i, "u": u})[0] for _ in range(2))
    want = x.astype(np.float64)
    np.add.at(want, i[:, 0], u)
    # some 80 rows an index, in parts whose order is fixed
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(y, again)


def test_calls_side_by_side_give_the_bits_of_calls_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps of a perceptron of LayerNorm, Linear and GELU; onnxruntime's, within rounding."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 196)).astype(np.float32)
    feeds = {"x": x, "labels": rng.integers(0, 10, 256)}

    def states(device: str) -> dict[str, np.ndarray]:
        model = mlp.build(mlp.Config((196, 128, 128, 10)))
        trainer = Trainer(model, loss="cross_entropy", device=device)
        for _ in range(5):
            float(trainer.step(feeds))
        return trainer.state()

    aside, again = states("cuda"), states("cuda")
    monkeypatch.setattr(plan, "SIDE_BY_SIDE", 0)
    line, portable = states("cuda"), states("cpu")
    for name, value in aside.items():
        assert value.tobytes() == again[name].tobytes() == line[name].tobytes(), name
        np.testing.assert_allclose(value, portable[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_tuning_keeps_what_agrees_and_what_it_keeps_is_selected(monkeypatch, tmp_path) -> None:
    from onnx_fuse import config, tune
    from onnx_fuse.kernels import select
    from onnx_fuse.kernels.gemm_skinny import SmallM

    monkeypatch.setenv(config.CACHE_DIR.name, str(tmp_path))
    hw = Hardware.detect()
    program = single_op_models.program_of("LayerNormGemm", (64, 512, 768), "bf16", hw)
    launch = SmallM.launch
    monkeypatch.setattr(  # a kernel that does another thing
        SmallM, "launch", lambda self, p, how, hw: launch(self, p.replace(act="relu"), how, hw)
    )
    (found,) = tune.tune(tune.calls_of(program), hw, top=3)
    assert found.refused
    assert all(name.startswith("skinny") for name in found.refused)
    assert 0 < found.us <= found.before_us
    choice = select("LayerNormGemm", found.problem, hw)
    assert (choice.kernel.name, str(choice.config)) == (found.kernel, found.config)
    assert choice.why == "tuning record"


def test_a_model_is_timed_fused_against_unfused() -> None:
    path = Path(__file__).parents[2] / "models" / "encoder.onnx"
    found = bench.compare(path, read(path), Request(device="cuda", precision="fp16"), repeat=4)
    assert 0 < found.noise[0] <= found.ratio <= found.noise[1]
    assert 0 < found.fused.low <= found.fused.median <= found.fused.high

"""InferenceSession, optimize and load: what a user of onnxruntime expects, in its own words."""

import contextlib
import gc
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime as ort
import pytest
from support import ENCODER, assert_same, python
from test_cache import wait_for_writers

import onnx_fuse as of
from onnx_fuse import session
from onnx_fuse.autodiff.load import load
from onnx_fuse.importer.save import save, to_proto
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.runtime import device
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.tensor import DeviceTensor

TEXT = """
agraph (float[N, 3] x, int64[N] i) => (float[N, 3] y, int64[N] z, float[N, 3] w)
{ y = Relu (x)  z = Identity (i)  w = Neg (x) }
"""
X, IDS = np.array([[-1, 2, 3], [4, -5, 6]], np.float32), np.array([7, 8])
FEEDS = {"x": X, "i": IDS}


def test_an_exit_waits_for_the_context_that_is_being_made() -> None:
    code = (
        "import time\n"
        "from onnx_fuse.runtime import device\n"
        "device._context = lambda device_id: (time.sleep(0.3), print('made'))\n"
        "device.begin()\n"
    )
    assert python(code) == "made\n"


def test_a_feed_on_the_gpu_is_read_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Stream:
        def download(self, target: int, address: int, nbytes: int) -> None:
            calls.append(f"{nbytes} bytes from {address}")

        def wait(self, what: str) -> None:
            calls.append(what)

    monkeypatch.setattr(device, "start", lambda device_id: calls.append(f"context {device_id}"))
    runner = object.__new__(Executable)
    runner.device_id = 1
    runner.shared = SimpleNamespace(stream=Stream())  # type: ignore[assignment]
    runner.host_value(DeviceTensor(256, (2,), "int64", 1, None))
    assert calls == ["context 1", "16 bytes from 256", "reading a feed"]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """What the collector frees on the way, device memory too, would spoil the capture."""
    calls: list[str] = []

    class Driver:
        CUstream = int
        CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
        CUgraphDependencyType = SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=1)
        CUstreamUpdateCaptureDependencies_flags = SimpleNamespace(
            CU_STREAM_SET_CAPTURE_DEPENDENCIES=1
        )
        CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1
        CUgraphEdgeData = SimpleNamespace

        def __getattr__(self, name: str) -> Callable[..., tuple[int, ...]]:
            return lambda *arguments: calls.append(name) or (0, 1, 2, 3, [4])

    def enqueue() -> None:
        calls.append(f"collects: {gc.isenabled()}")
        if fails:
            raise ValueError("a launch")

    monkeypatch.setattr(device, "bindings", Driver)
    stream = device.Stream(7)
    with pytest.raises(ValueError, match="a launch") if fails else contextlib.nullcontext():
        stream.capture([enqueue])
    ends = ["cuStreamEndCapture"] if fails else ["cuStreamGetCaptureInfo", "cuStreamEndCapture"]
    assert calls[: 3 + (not fails)] == ["cuStreamBeginCapture", "collects: False", *ends]
    assert gc.isenabled()


def model() -> onnx.ModelProto:
    proto = to_proto(text_model(TEXT))
    proto.producer_name, proto.doc_string, proto.model_version = "somebody", "a note", 7
    proto.graph.doc_string = "graph note"
    onnx.helper.set_model_props(proto, {"author": "somebody", "license": "theirs"})
    return proto


def stock() -> ort.InferenceSession:
    return ort.InferenceSession(model().SerializeToString(), providers=["CPUExecutionProvider"])


def outcome(call: Callable[[], Any]) -> tuple[str, str] | list[Any]:
    try:
        return [np.asarray(a).tolist() for a in call()]
    except Exception as error:  # noqa: BLE001 - the error is what is compared
        return type(error).__name__, str(error)


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "all": (None, FEEDS),
    "empty names": ([], FEEDS),
    "named, reordered": (["w", "y"], FEEDS),
    "one named twice": (["y", "y"], FEEDS),
    "missing feed": (None, {"x": X}),
    "no feed": (None, {}),
    "unknown feed": (None, {**FEEDS, "q": X}),
    "unknown output": (["nothing"], FEEDS),
    "wrong dtype": (None, {"x": X.astype(np.float64), "i": IDS}),
    "wrong integer": (None, {"x": X, "i": IDS.astype(np.int32)}),
    "bool for float": (None, {"x": X > 0, "i": IDS}),
    "wrong dimension": (None, {"x": X[:, :2], "i": IDS}),
    "wrong rank": (None, {"x": X[0], "i": IDS}),
    "a list": (None, {"x": X.tolist(), "i": IDS}),
}


@pytest.mark.parametrize("case", RUNS)
def test_run_answers_and_complains_as_onnxruntime_does(case: str) -> None:
    names, feeds = RUNS[case]
    expected = outcome(lambda: stock().run(names, feeds))
    assert outcome(lambda: of.InferenceSession(model()).run(names, feeds)) == expected


class Echo:
    """Stands in for the CUDA executable: what it is asked for, and what it is fed."""

    def __init__(self, model: onnx_ir.Model, precision: str, gpu: int) -> None:
        self.session, self.gpu = stock(), gpu

    def run(self, names: list[str], feeds: dict[str, np.ndarray]) -> list[Any]:
        return list(self.session.run(names, feeds))

    def release_memory(self) -> int:
        return 7


@pytest.mark.parametrize("case", RUNS)
def test_the_checks_before_a_cuda_run_use_the_same_words(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_executable", Echo)
    names, feeds = RUNS[case]
    expected = outcome(lambda: stock().run(names, feeds))
    ours = of.InferenceSession(model(), providers=[("CUDAExecutionProvider", {"device_id": 2})])
    assert ours._executable.gpu == 2
    assert ours.release_memory() == 7
    assert ours.get_providers() == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert outcome(lambda: ours.run(names, feeds)) == expected


def test_ends_and_metadata_are_the_original_ones() -> None:
    ours, theirs = of.InferenceSession(model()), stock()
    for get in ("get_inputs", "get_outputs"):
        ends = [[(v.name, v.type, v.shape) for v in getattr(s, get)()] for s in (ours, theirs)]
        assert ends[0] == ends[1]
    fields = ("producer_name", "graph_name", "description", "graph_description", "version")
    for field in (*fields, "custom_metadata_map", "domain"):
        assert getattr(ours.get_modelmeta(), field) == getattr(theirs.get_modelmeta(), field)
    assert ours.get_providers() == ["CPUExecutionProvider"]


SOURCES: dict[str, Callable[[Path], Any]] = {
    "path": lambda path: path,
    "str": str,
    "bytes": Path.read_bytes,
    "proto": onnx.load,
    "ir": onnx_ir.load,
}
RESULTS = {"bytes": bytes, "ir": onnx_ir.Model}
"""What is given back for a source; a ModelProto for the others."""


@pytest.mark.parametrize("kind", SOURCES)
def test_a_model_may_come_as(kind: str) -> None:
    source = SOURCES[kind](ENCODER)
    fused = of.optimize(source)
    assert isinstance(fused, RESULTS.get(kind, onnx.ModelProto))
    ids = np.ones((2, 5), np.int64)
    feeds = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ids)
    expected = ort.InferenceSession(ENCODER).run(None, feeds)
    for runs in (source, fused):
        assert_same(of.InferenceSession(runs).run(None, feeds), expected, atol=1e-5)
    if not isinstance(fused, onnx_ir.Model):
        data = fused if isinstance(fused, bytes) else fused.SerializeToString()
        np.testing.assert_allclose(
            ort.InferenceSession(data).run(None, feeds)[0], expected[0], atol=1e-5
        )


@pytest.mark.parametrize("function", ["load", "optimize", "gradient"])
@pytest.mark.parametrize("kind", ["path", "bytes", "proto", "ir"])
def test_each_kind_of_model_is_given_back_with_its_bodies(
    function: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "fused.onnx"
    path.write_bytes(of.optimize(ENCODER.read_bytes()))
    found = getattr(of, function)(SOURCES[kind](path))
    assert isinstance(found, RESULTS.get(kind, onnx.ModelProto))
    if isinstance(found, onnx_ir.Model):
        found = onnx_ir.serde.serialize_model(found)
    proto = onnx.ModelProto.FromString(found) if isinstance(found, bytes) else found
    called = {n.op_type for n in proto.graph.node if n.domain == FUSE}
    assert called
    assert called <= {f.name for f in proto.functions}
    ort.InferenceSession(proto.SerializeToString())


FRESH = """
import sys
import onnx_fuse as of
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.autodiff.load import load
print(sum(n.domain == FUSE for n in {text}))
"""
WAYS = {
    "session": "of.InferenceSession(sys.argv[1], optimize=False).model.graph",
    "load": "of.load(sys.argv[1]).graph.node",
    "backend": "of.backend.prepare(sys.argv[1], optimize=False).session.model.graph",
    "the loader alone": "load(sys.argv[1]).graph",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_fused_file_keeps_its_operators_in_a_fresh_process(way: str, tmp_path: Path) -> None:
    path = tmp_path / "fused.onnx"
    path.write_bytes(of.optimize(ENCODER.read_bytes()))
    fused = sum(n.domain == FUSE for n in onnx.load(path).graph.node)
    code = [sys.executable, "-c", FRESH.format(text=WAYS[way]), str(path)]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    assert int(done.stdout) == fused > 0


def test_the_callers_model_stays_as_it_was() -> None:
    proto, graph = onnx.load(ENCODER), onnx_ir.load(ENCODER)
    before = [n.op_type for n in graph.graph]
    of.optimize(proto)
    of.optimize(graph)
    assert proto == onnx.load(ENCODER)
    assert [n.op_type for n in graph.graph] == before


def test_it_optimizes_unless_told_otherwise() -> None:
    def fused(**options: Any) -> int:
        graph = of.InferenceSession(ENCODER, **options).model.graph
        return sum(node.domain == FUSE for node in graph)

    assert fused() > fused(level=0) >= fused(optimize=False) == 0


def test_an_output_that_another_output_is_made_of_keeps_its_name() -> None:
    text = "agraph (float[N] x) => (float[N] a, float[N] b) { a = Relu (x)  b = Identity (a) }"
    ours = of.InferenceSession(text_model(text))
    assert [v.name for v in ours.get_outputs()] == ["a", "b"]
    assert [y.tolist() for y in ours.run(["b", "a"], {"x": X[0]})] == [[0, 2, 3]] * 2


class OnlyDlpack:
    """An array of another library: no __array__, only DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_feeds_may_be_dlpack_objects() -> None:
    y = of.InferenceSession(model()).run(["y"], {"x": OnlyDlpack(X), "i": IDS})[0]
    np.testing.assert_array_equal(y, np.maximum(X, 0))


def test_session_options_and_io_binding_pass_through() -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    ours = of.InferenceSession(model(), options, ["CPUExecutionProvider"])
    binding = ours.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_cpu_input("i", IDS)
    binding.bind_output("y")
    ours.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.copy_outputs_to_cpu()[0], np.maximum(X, 0))


def test_without_the_cuda_packages_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.delitem(sys.modules, "cuda.bindings.driver", raising=False)
    for options in ({"device": "cuda"}, {"providers": ["CUDAExecutionProvider"]}):
        with pytest.raises(of.DeviceError, match=r'pip install "\.\[cuda13\]"'):
            of.InferenceSession(model(), **options)
    with pytest.raises(of.UsageError, match="device 'cuda' has fp32, tf32, bf16x3, bf16x6, bf16"):
        of.InferenceSession(model(), precision="bf16x3")
    with pytest.raises(of.UsageError, match="unknown device 'tpu'"):
        of.InferenceSession(model(), device="tpu")


@pytest.mark.parametrize("options", [{}, {"device_id": 1}])
def test_without_a_gpu_the_next_provider_is_used(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.delitem(sys.modules, "cuda.bindings.driver", raising=False)
    cuda, others = ("CUDAExecutionProvider", options), ["CPUExecutionProvider"]
    with pytest.warns(UserWarning, match="CUDAExecutionProvider is not used: device 'cuda' needs"):
        ours = of.InferenceSession(model(), providers=[cuda, *others])
    assert (ours.device, ours.get_providers()) == ("cpu", others)
    np.testing.assert_array_equal(ours.run(["y"], {"x": X, "i": IDS})[0], np.maximum(X, 0))
    with pytest.warns(UserWarning, match="TensorrtExecutionProvider is not used: the installed"):
        of.InferenceSession(model(), providers=["TensorrtExecutionProvider", *others])
    with pytest.raises(of.UsageError, match="TensorrtExecutionProvider cannot be used: the inst"):
        of.InferenceSession(model(), providers=["TensorrtExecutionProvider"])


@pytest.mark.parametrize("source", ["memory", "file", "cache"])
def test_other_providers_of_onnxruntime_are_passed_on(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their options and in their order; those that it does not have are its to warn of."""
    asked: list[Any] = []
    genuine = ort.InferenceSession

    def recorded(path: Any, options: Any, providers: Any, **more: Any) -> Any:
        asked.append(list(providers))
        return genuine(path, options, ["CPUExecutionProvider"], **more)

    there = ["OpenVINOExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: there)
    monkeypatch.setattr(ort, "InferenceSession", recorded)
    save(load(ENCODER), tmp_path / "m.onnx")
    given = [("OpenVINOExecutionProvider", {"device_type": "CPU"}), "CUDAExecutionProvider"]
    sources = {"memory": model(), "file": tmp_path / "m.onnx", "cache": tmp_path / "m.onnx"}
    if source == "cache":
        of.InferenceSession(sources[source])
        wait_for_writers()
        asked.clear()
    ours = of.InferenceSession(sources[source], providers=given)
    assert (ours.device, asked[0]) == ("cpu", given)
    assert (ours._cached is not None) == (source == "cache")
    asked.clear()
    of.validate(sources[source], providers=given)
    assert given in asked


def test_other_providers_read_standard_operators_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO refuses a file with functions."""
    seen: list[onnx.ModelProto] = []
    genuine = ort.InferenceSession

    def recorded(data: Any, options: Any, providers: Any, **more: Any) -> Any:
        seen.append(onnx.load_from_string(data))
        return genuine(data, options, ["CPUExecutionProvider"], **more)

    there = ["OpenVINOExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(ort, "get_available_providers", lambda: there)
    monkeypatch.setattr(ort, "InferenceSession", recorded)
    fused = of.optimize(load(ENCODER))
    assert any(node.domain for node in fused.graph)
    of.InferenceSession(fused, providers=there, optimize=False)
    assert not any(node.domain for node in seen[-1].graph.node)


@pytest.mark.parametrize(
    ("providers", "words"),
    [
        (
            ["CudaExecutionProvidr"],
            "'CudaExecutionProvidr' (did you mean 'CUDAExecutionProvider'?)",
        ),
        (
            ["CPUExecutionProvider", "OpenVino"],
            "onnxruntime knows no execution provider 'OpenVino'",
        ),
        ([("cpuexecutionprovider", {})], "(did you mean 'CPUExecutionProvider'?)"),
        ([("CPUExecutionProvider", 3)], "is no execution provider: give a name"),
        ([None], "is no execution provider: give a name"),
    ],
)
def test_an_unknown_provider_is_named(providers: list[Any], words: str) -> None:
    with pytest.raises(of.UsageError, match=re.escape(words)):
        of.InferenceSession(model(), providers=providers)


def test_external_data_lives_on_without_its_file(tmp_path: Path) -> None:
    save(load(ENCODER), tmp_path / "m.onnx", external=True)
    assert (tmp_path / "m.onnx.data").stat().st_size > 100_000
    fused = of.optimize(tmp_path / "m.onnx")
    for path in tmp_path.iterdir():
        path.unlink()
    assert isinstance(fused, onnx.ModelProto)
    onnx.checker.check_model(fused)
    ids = np.ones((1, 3), np.int64)
    feeds = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ids)
    stored = io.BytesIO(fused.SerializeToString()).getvalue()
    expected = ort.InferenceSession(ENCODER).run(None, feeds)
    assert_same(ort.InferenceSession(stored).run(None, feeds), expected, atol=1e-5)


LOOP = """
g (float[N, 4] x, bool c) => (float[N, 4] y)
{ h = Abs (x)
  b = If (c) <then_branch = t () => (float[N, 4] u) { k = Neg (h)  u = Exp (k) },
              else_branch = e () => (float[N, 4] v) { v = Cos (h) }>
  y = Sin (b) }
"""


@pytest.mark.parametrize("external", [False, True])
def test_what_is_written_for_onnxruntime_has_no_inner_shapes(
    external: bool, tmp_path: Path
) -> None:
    graph = load(text_model(LOOP))
    infer_shapes(graph)
    for shapes, known in ((True, {"h", "b", "k"}), (False, set())):
        save(graph, tmp_path / "m.onnx", external=external, shapes=shapes)
        written = onnx.load(tmp_path / "m.onnx")
        branch = next(n for n in written.graph.node if n.op_type == "If").attribute[0].g
        assert {v.name for v in (*written.graph.value_info, *branch.value_info)} == known
    assert len(onnx.shape_inference.infer_shapes(written).graph.value_info) >= 2
    assert all(v.shape == (onnx_ir.SymbolicDim("N"), 4) for n in graph.graph for v in n.outputs)
    fused = of.optimize(ENCODER)
    assert isinstance(fused, onnx.ModelProto)
    weights = {t.name for t in fused.graph.initializer}
    assert {v.name for v in fused.graph.value_info} <= weights  # where parameters' maps are noted


@pytest.mark.parametrize("name", ["load", "optimize", "InferenceSession"])
def test_a_bad_model_is_a_model_error(name: str, tmp_path: Path) -> None:
    for source in (tmp_path / "none.onnx", b"nonsense", onnx.ModelProto()):
        with pytest.raises(of.ModelError):
            getattr(of, name)(source)


def test_where_names_clash_onnxruntimes_optimizations_are_left_out(monkeypatch) -> None:
    """As in files of its transformers package: one clash ends the making of a session."""
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail

    from onnx_fuse.runtime import ort as runtime

    off = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    made = runtime._session

    def clashing(model, options, providers):
        if options.graph_optimization_level != off:
            raise Fail("AddInitializedOrtValue Attempt to replace the existing tensor")
        return made(model, options, providers)

    monkeypatch.setattr(runtime, "_session", clashing)
    model = text_model("g (float[2] x) => (float[2] y) { y = Relu (x) }")
    with pytest.warns(UserWarning, match="runs without them"):
        found = runtime.session(model)
    [y] = runtime.run(found, {"x": np.array([-1, 2], np.float32)})
    np.testing.assert_array_equal(y, [0, 2])


def test_where_onnxruntime_refuses_the_fused_graph_the_file_runs_as_it_is() -> None:
    """Its inference counts dilations where SAME does not, and meets a size that is folded."""
    model = text_model("""g (float[N,5,N,3] x) => (float[A,B,C,D] y, int64[E,F,G,H] z)
        <int64 one = {1}, int64 none = {0}> {
          y, places = MaxPool <auto_pad = "SAME_LOWER", dilations = [2,2], kernel_shape = [3,3],
                               strides = [3,2]> (x)
          s = Shape (x)  n = Gather (s, one)  h = Range (none, n, one)  z = Add (h, places)
        }""")
    x = np.arange(135, dtype=np.float32).reshape(3, 5, 3, 3)
    with pytest.warns(UserWarning, match="runs as it is"):
        session = of.InferenceSession(model)
    want = ort.InferenceSession(onnx_ir.serde.serialize_model(model).SerializeToString())
    assert_same(session.run(None, {"x": x}), want.run(None, {"x": x}))


def test_what_onnxruntime_refuses_is_a_node_of_the_file() -> None:
    model = text_model("""g (float[2,3] x) => (float[2,5] y) <float[4,1] w = {1,2,3,4}>
        { h = MatMul (x, w)  y = Relu (h) }""")
    with pytest.raises(
        ort.capi.onnxruntime_pybind11_state.Fail, match=r"Op \(MatMul\)"
    ):  # and not the GemmRelu made of both
        of.InferenceSession(model)

"""What a file says of itself and onnxruntime does not ask for, and names that others have taken."""

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from fake_gpu import IdleDriver
from support import Cli, run

import onnx_fuse
from onnx_fuse import autodiff
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.ops.rules import PACKED
from onnx_fuse.runtime import ort
from onnx_fuse.runtime.invariance import limits
from onnx_fuse.session import InferenceSession
from onnx_fuse.validation.gradients import check_gradients

HEAD = '<ir_version: 10, opset_import: ["" : 21]>\n'
DENSE = f"""{HEAD}g (float[N,2] x) => (float[N,2] y) <float[2,2] w = {{1, 2, 3, 4}}>
{{ a = MatMul (x, w)  y = Tanh (a) }}"""


def test_external_data_of_length_0_has_the_length_of_its_shape(tmp_path: Path) -> None:
    proto = to_proto(text_model(DENSE))
    [tensor] = proto.graph.initializer
    array = onnx.numpy_helper.to_array(tensor)
    (tmp_path / "m.data").write_bytes(array.tobytes())
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "m.data"), ("offset", "0"), ("length", "0")):
        tensor.external_data.add(key=key, value=value)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    weight = load(tmp_path / "m.onnx").graph.initializers["w"].const_value
    np.testing.assert_array_equal(weight.numpy(), array)


def test_an_initializer_has_the_shape_of_its_tensor() -> None:
    proto = to_proto(text_model(DENSE))
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("w", 1, [20]))
    assert list(load(proto).graph.initializers["w"].shape or ()) == [2, 2]


BROKEN = f"""{HEAD}g (float[1,1] x) => (float[1,2] y)
<float two = {{2}}, float eps = {{0.00001}}, int64[1] ax = {{-1}}, float[2] g = {{-2, 0.5}}>
{{ sq = Pow (x, two)  m = ReduceMean <keepdims = 1> (sq, ax)  e = Add (m, eps)  s = Sqrt (e)
n = Div (x, s)  y = Mul (n, g) }}"""


def test_what_onnxruntime_breaks_runs_as_written_after_one_warning() -> None:
    session = InferenceSession(text_model(BROKEN), optimize=False)
    feeds = {"x": np.array([[0.5]], np.float32)}
    with pytest.warns(UserWarning, match="own optimizations break this graph"):
        [y] = session.run(None, feeds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.run(None, feeds)
    np.testing.assert_allclose(y, [[-2, 0.5]], rtol=1e-4)


def test_a_binding_falls_back_as_a_run_does() -> None:
    session = InferenceSession(text_model(BROKEN), optimize=False)
    binding = session.io_binding()
    binding.bind_cpu_input("x", np.array([[0.5]], np.float32))
    binding.bind_output("y")
    with pytest.warns(UserWarning, match="own optimizations break this graph"):
        session.run_with_iobinding(binding)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.run_with_iobinding(binding)
    np.testing.assert_allclose(binding.copy_outputs_to_cpu()[0], [[-2, 0.5]], rtol=1e-4)


def test_a_file_is_one_model_by_every_entry() -> None:
    text = """<ir_version: 10, opset_import: ["" : 21, "ai.onnx.preview.training" : 1]>
    g (float[2] x) => (float[2] dx)
    { y = Mul (x, x)  dx = ai.onnx.preview.training.Gradient <xs = ["x"], y = "y"> (x) }"""
    graph = load(text_model(text))
    assert {node.domain for node in graph.graph} == {""}


BODIES: dict[str, str] = {
    "an upgraded sum beside an If": """<ir_version: 10, opset_import: ["" : 12]>
    g (float[2,3] x, bool c) => (float[2,3] y, float[2] z) {
    y = If (c) <then_branch = a () => (float[2,3] u) { u = LogSoftmax <axis = 0> (x) },
    else_branch = b () => (float[2,3] v) { v = Exp (x) }>
    z = ReduceSum <axes = [1], keepdims = 0> (x) }""",
    "a recurrence beside val_0": f"""{HEAD}
    g (float[2,2,3] x, float[1,4,3] w, float[1,4,1] r) => (float[2,1,2,1] y, float[2,2,3] z)
    <float[1,3] p = {{1, 2, 3}}>
    {{ y = LSTM <hidden_size = 1> (x, w, r, "", "", "", "", p)  val_0 = Neg (x)
    z = Neg (val_0) }}""",
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_gradients_have_names_of_their_own(name: str) -> None:
    model = onnx_fuse.gradient(text_model(BODIES[name]), wrt=["x"])
    ort.session(to_proto(model).SerializeToString())


NAMES: dict[str, str] = {
    "quoted": DENSE.replace(" y)", ' "out;put")').replace("y =", '"out;put" ='),
    "taken": DENSE.replace("float[N,2] x)", 'float[N,2] x, float[N,2] "y.grad")').replace(
        "y = Tanh (a)", 'b = Add (a, "y.grad")  y = Tanh (b)'
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_found_by_what_they_are_of(name: str, cli: Cli, tmp_path: Path) -> None:
    model = text_model(NAMES[name])
    assert check_gradients(model).ok
    graph = autodiff.gradient(model)
    given = autodiff.gradient_names(graph.graph.inputs)
    assert given
    assert set(given) < {v.name for v in graph.graph.outputs}
    path = tmp_path / "m.onnx"
    path.write_bytes(to_proto(model).SerializeToString())
    assert cli("gradient", path, "--check").code == 0


def test_an_axis_far_out_of_range_is_refused_before_lists_of_axes() -> None:
    text = f"""{HEAD}g (float[2,3,4] x) => (float[2,3,4] y) <float[4] s = {{1, 1, 1, 1}}>
    {{ y = LayerNormalization <axis = 4611686018427387904> (x, s) }}"""
    with pytest.raises(ModelError, match="out of range"):
        load(text_model(text))


def test_a_user_without_a_home_has_a_cache() -> None:
    code = (
        "import pathlib\n"
        "def home(): raise RuntimeError('no home')\n"
        "pathlib.Path.home = home\n"
        "from onnx_fuse import config\n"
        "print(config.CACHE_DIR.value)\n"
    )
    environment: dict[str, Any] = {**os.environ}
    for name in ("XDG_CACHE_HOME", "ONNX_FUSE_CACHE_DIR"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert "onnx-fuse" in done.stdout


def test_an_output_has_the_size_that_is_inferred_where_its_file_declares_another() -> None:
    for size in "10":
        model = text_model(DENSE.replace("=> (float[N,2]", f"=> (float[{size},2]"))
        trainer = onnx_fuse.Trainer(to_proto(model), loss="mse")
        batch = {"x": np.ones((3, 2), np.float32), "labels": np.ones((3, 2), np.float32)}
        assert np.isfinite(trainer.step(batch))
        assert check_gradients(model).ok


@pytest.mark.parametrize("declared", ["float", "float[N]", "float[5,2,1]", "float[N,2,N]"])
def test_an_output_has_the_rank_that_is_inferred_where_its_file_declares_another(
    declared: str,
) -> None:
    text = f"""{HEAD}g (float[N,2] x, float[1] z) => ({declared} y, float[A,B] e)
    {{ y = Relu (x)  s = Shape (y)  e = Expand (z, s) }}"""
    feeds = {"x": np.ones((3, 2), np.float32), "z": np.ones(1, np.float32)}
    for level in (0, 2):
        y, e = run(onnx_fuse.optimize(to_proto(text_model(text)), level=level), feeds)
        assert y.shape == e.shape == (3, 2)


PART = '{"name": "p", "shape": [2, 2], "perm": null}'
FALSE_RECORDS = [
    *("", "x", "1", "{}", "[" * 9999, '{"axis": null, "parts": []}', '{"axis": 0, "parts": 1}'),
    *(f'{{"axis": {axis}, "parts": [{PART}, {PART}]}}' for axis in ("null", "0", "2", '"0"')),
    *(
        f'{{"axis": null, "parts": [{PART.replace(old, new)}]}}'
        for old, new in (
            *(("[2, 2]", new) for new in ("[4, 1]", "[2]", "[2, 2, 1]", "[2.0, 2]", '"22"')),
            *(("null", new) for new in ("[0, 0]", "[1]", "[2, 0]", "true")),
            *((', "perm": null', ""), ('"p"', "5")),
        )
    ),
    f'{{"axis": 0, "parts": [{PART.replace("[2", "[-1")}, {PART.replace("[2", "[3")}]}}',
]


def with_record(record: str) -> onnx.ModelProto:
    """DENSE whose weight and input say this of what they are packed of."""
    proto = to_proto(text_model(DENSE))
    weight = onnx.helper.make_tensor_value_info("w", 1, [2, 2])
    proto.graph.value_info.append(weight)
    for value in (proto.graph.value_info[-1], proto.graph.input[0]):
        value.metadata_props.add(key=PACKED, value=record)
    return proto


@pytest.mark.parametrize("record", FALSE_RECORDS)
def test_a_record_of_packed_weights_that_does_not_fit_is_dropped(record: str) -> None:
    fused = onnx_fuse.optimize(with_record(record))
    names = {v.name for v in onnx_fuse.gradient(fused, wrt=["w", "x"]).graph.output}
    assert names == {"y", "w.grad", "x.grad"}


def test_a_record_of_packed_weights_that_fits_is_kept() -> None:
    record = f'{{"axis": null, "parts": [{PART.replace("null", "[1, 0]")}]}}'
    names = {v.name for v in onnx_fuse.gradient(with_record(record), wrt=["p"]).graph.output}
    assert names == {"y", "p.grad"}


def test_metadata_of_other_packages_does_not_end_training() -> None:
    proto = to_proto(text_model(DENSE))
    proto.metadata_props.add(key="onnx_fuse.packing", value="1")
    batch = {"x": np.ones((3, 2), np.float32), "labels": np.ones((3, 2), np.float32)}
    assert np.isfinite(onnx_fuse.Trainer(proto, loss="mse").step(batch))


@pytest.mark.parametrize("note", ["1", "[1]", '{"N": "x"}', "[" * 9999])
def test_a_note_of_sizes_that_is_none_is_refused(note: str) -> None:
    model = text_model(DENSE)
    model.metadata_props["onnx_fuse.batch_invariant"] = note
    with pytest.raises(ModelError, match="none of this package"):
        limits(model)


def test_inputs_may_contradict_the_names_of_their_sizes() -> None:
    text = f"""{HEAD}g (float[n,4] x, float[n,4] z) => (float[a,b] y)
    {{ s = Shape (z)  e = Expand (x, s)  y = Neg (e) }}"""
    session = InferenceSession(text_model(text))
    x, z = np.arange(4, dtype=np.float32).reshape(1, 4), np.zeros((3, 4), np.float32)
    for fed, expected in ((z, -np.repeat(x, 3, 0)), (z[:1], -x)):
        binding = session.io_binding()
        binding.bind_cpu_input("x", x)
        binding.bind_cpu_input("z", fed)
        binding.bind_output("y")
        session.run_with_iobinding(binding)
        for [y] in (session.run(None, {"x": x, "z": fed}), binding.copy_outputs_to_cpu()):
            np.testing.assert_array_equal(y, expected)


def test_a_gpu_session_asks_of_sizes_of_one_name_at_new_shapes_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stand_in in IdleDriver().stand_ins():
        monkeypatch.setattr(*stand_in)
    text = f"{HEAD}g (float[n,4] x, float[n,4] z) => (float[n,4] y) {{ y = Add (x, z) }}"
    session = InferenceSession(text_model(text), device="cuda")
    runs = session._executable
    monkeypatch.setattr(runs, "_instance", lambda *shape: SimpleNamespace(runs=0))
    feeds = {"x": np.zeros((1, 4), np.float32), "z": np.zeros((3, 4), np.float32)}
    with pytest.warns(UserWarning, match="different sizes .* calls 'n'"):
        runs.instance(feeds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.instance(feeds)

"""Files are untrusted: each kind of bad file gets exit 1 and one sentence, and leaves no trace."""

import os
import re
import sys
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import encoder
import numpy as np
import onnx
import onnx_ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from support import ENCODER, Cli, parsed

from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.load import read
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir import evaluate
from onnx_fuse.runtime import ort

TEXT = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[N, 4] x) => (float[N, 4] y)
<float[4] w = {1, 2, 3, 4}> { a = Add (x, w)  y = Relu (a) }
"""
Mutation = Callable[[onnx.ModelProto, Path], None]
Save = Callable[..., Path]


def small() -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT)


def overflowing_dimension(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.initializer[0].dims[:] = [2**62, 2**62]


def unknown_dtype(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.initializer[0].data_type = 99


def input_without_element_type(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.input[0].type.tensor_type.elem_type = 0


def constant_without_its_tensor(model: onnx.ModelProto, folder: Path) -> None:
    constant = model.graph.node.add(op_type="Constant", output=["c"])
    constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)


def external(
    location: str, offset: int | str = 0, place: str = "weights.bin", link: str = ""
) -> Mutation:
    """The weight stored at a location, `{folder}` the model's; 16 bytes at a place, or a link."""

    def change(model: onnx.ModelProto, folder: Path) -> None:
        if place:
            (folder / place).write_bytes(bytes(16))
        if link:
            (folder / link).symlink_to(folder / place)
        tensor = model.graph.initializer[0]
        tensor.ClearField("float_data")
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        at = location.format(folder=folder)
        for key, value in (("location", at), ("offset", offset), ("length", 16)):
            tensor.external_data.add(key=key, value=str(value))

    return change


def external_is_a_folder(model: onnx.ModelProto, folder: Path) -> None:
    (folder / "weights.bin").mkdir()
    external("weights.bin", place="")(model, folder)


def sparse(place: int) -> onnx.SparseTensorProto:
    """One number in a vector of four."""
    values = numpy_helper.from_array(np.ones(1, np.float32), "s")
    indices = numpy_helper.from_array(np.array([place]), "s_indices")
    return helper.make_sparse_tensor(values, indices, [4])


def sparse_initializer(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.sparse_initializer.append(sparse(4))


def sparse_too_large(model: onnx.ModelProto, folder: Path) -> None:
    model.graph.sparse_initializer.append(sparse(0))
    model.graph.sparse_initializer[0].dims[:] = [1 << 40, 1 << 40]


def constant(**attribute: Any) -> Mutation:
    """One Constant more."""
    node = helper.make_node("Constant", [], ["s"], **attribute)
    return lambda model, folder: model.graph.node.append(node)


def without_name(ends: str) -> Mutation:
    """One input or output more, which has no name."""

    def change(model: onnx.ModelProto, folder: Path) -> None:
        getattr(model.graph, ends).add().type.CopyFrom(model.graph.input[0].type)

    return change


MALFORMED: dict[str, tuple[Mutation | tuple[str, str], str]] = {
    "cyclic": (("Add (x, w)", "Add (y, w)"), "cycle"),
    "missing_initializer": (("<float[4] w = {1, 2, 3, 4}>", ""), "reads 'w'"),
    "unknown_op": (("Relu", "Reluuu"), "no operator 'Reluuu'"),
    "unknown_domain": (("Relu", "com.nobody.Relu"), "domain 'com.nobody'"),
    "unimported_domain": (("Relu", "com.microsoft.Relu"), "does not import its domain"),
    "no_opset": (('["" : 21]', "[]"), "imports no ai.onnx opset"),
    "future_opset": (("21", "999"), "opset 999"),
    "two_nodes_make_one_value": (("y = Relu", "a = Relu"), "names two values"),
    "negative_dimension": (("float[4] w", "float[-4] w"), "negative dimension"),
    "overflowing_dimension": (overflowing_dimension, "overflows"),
    "too_few_values": (("float[4] w", "float[5] w"), "holds 4 values"),
    "unknown_dtype": (unknown_dtype, "unknown element type 99"),
    "input_without_type": (("(float[N, 4] x)", "(x)"), "input 'x' has no type"),
    "input_without_element_type": (input_without_element_type, "input 'x' has no type"),
    "constant_without_its_tensor": (constant_without_its_tensor, "is a TENSOR, but holds none"),
    "input_without_name": (without_name("input"), "an input has no name"),
    "output_without_name": (without_name("output"), "an output has no name"),
    "no_output": (("(float[N, 4] y)", "()"), "has no outputs"),
    "two_initializers_of_one_name": (("4}>", "4}, float[4] w = {1, 2, 3, 4}>"), "names two values"),
    "two_inputs_of_one_name": (("x)", "x, float[N, 4] x)"), "'x' names two values"),
    "one_node_makes_a_value_twice": (
        ("(a)", "(a)  a, a = Split <axis = 0, num_outputs = 2> (x)"), "'a' names two values",
    ),
    "a_node_makes_an_input": (("(a)", "(a)  x = Relu (x)"), "'x' names two values"),
    "text_of_bytes": (constant(value_string=b"\xff\xfe"), "'value_string' is no UTF-8 text"),
    "texts_of_bytes": (constant(value_strings=[b"a", b"\xff"]), "'value_strings' is no UTF-8 text"),
    "external_missing": (external("weights.bin", place=""), "'weights.bin' is not there"),
    "external_offset": (external("weights.bin", offset=8), "no 16 bytes at offset 8"),
    "external_offset_of_text": (
        external("weights.bin", offset="0x40"), "its offset is '0x40', no number of bytes",
    ),
    "external_without_location": (external("", place=""), "its external data has no location"),
    "external_at_a_null": (external("a\0b", place=""), "outside the model's folder"),
    "external_parent": (
        external("../weights.bin", place="../weights.bin"), "outside the model's folder",
    ),
    "external_absolute": (external("{folder}/weights.bin"), "outside the model's folder"),
    "external_symlink": (
        external("weights.bin", place="../secret.bin", link="weights.bin"),
        "outside the model's folder",
    ),
    "external_is_a_folder": (external_is_a_folder, "'weights.bin' is no file"),
    "sparse_initializer": (sparse_initializer, "sparse initializer 's' is malformed"),
    "sparse_constant": (constant(sparse_value=sparse(-1)), "node 's' (Constant) is malformed"),
    "sparse_too_large": (sparse_too_large, "too large to be stored dense"),
    "stride_beyond_32_bits": (
        (
            "y = Relu (a)",
            "one = Constant <value_ints = [1]> () u = Unsqueeze (a, one) "
            "y = MaxPool <kernel_shape = [1], strides = [4611686018427387904]> (u)",
        ),
        "strides is [4611686018427387904]",
    ),
    "scan_behind_an_unknown_rank": (
        (
            "y = Relu (a)",
            "none = Constant <value = int64[0] {}> () s = Squeeze (a, none) "
            "last, y = Scan <num_scan_inputs = 1, body = b (p, q) => (n, r) "
            "{ n = Neg (p) r = Add (p, q) }> (w, s)",
        ),
        "(Scan): the rank of a result is unknown",
    ),
    "wrong_arity": (("(a)", "(a, x, x)"), "Relu"),
    "wrong_attribute": (("(a)", '<alpha = "text"> (a)'), "alpha"),
}  # fmt: skip
"""Another text in place of one in TEXT, or a change of the model; and what is said of it."""
COMMANDS = (("optimize",), ("optimize", "--no-check"), ("run",), ("validate",), ("bench",))


def refused(cli: Cli, path: Path, sentence: str, *command: str) -> None:
    """The command exits 1 with one line that names the file; the folder holds what it held."""
    before = sorted(path.parent.rglob("*"))
    err = cli.line(1, *command, path)
    assert str(path) in err
    assert sentence in err
    assert "internal error" not in err
    assert sorted(path.parent.rglob("*")) == before


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_model(
    cli: Cli, tmp_path: Path, saved: Save, name: str, command: tuple[str, ...]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    change, sentence = MALFORMED[name]
    model = small() if callable(change) else onnx.parser.parse_model(TEXT.replace(*change))
    if callable(change):
        change(model, folder)
    refused(cli, saved(model, "model/bad.onnx"), sentence, *command)


CONTENTS = {
    "empty": b"",
    "random": np.random.default_rng(0).bytes(4096),
    "text": b"this is not a model\n",
    "truncated": ENCODER.read_bytes()[:100_000],
    "tail": ENCODER.read_bytes()[70_000:],
    "another_message": helper.make_tensor("t", TensorProto.FLOAT, [1], [0.0]).SerializeToString(),
    "zeros": bytes(1000),
    "operator_without_text": small().SerializeToString().replace(b"Relu", b"\xff\xfe\xfd\xfc"),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("command", [*COMMANDS, ("inspect",)], ids=" ".join)
def test_not_a_model(cli: Cli, tmp_path: Path, content: str, command: tuple[str, ...]) -> None:
    path = tmp_path / "bad.onnx"
    path.write_bytes(CONTENTS[content])
    refused(cli, path, "UTF-8" if content == "operator_without_text" else "", *command)


FOREIGN: dict[str, tuple[bytes | dict[str, bytes], str]] = {
    "torch": (
        {"archive/data.pkl": b"", "archive/version": b"3"},
        "torch.save or torch.jit.save: exp",
    ),
    "keras": ({"model.weights.h5": b"", "config.json": b"{}"}, "a Keras model: export it"),
    "zip": ({"net/model.onnx": b""}, "a zip archive with ONNX files in it: unpack net/model.onnx"),
    "pickle": (b"\x80\x04\x95\x10\x00", "a pickle, as of torch.save or scikit-learn: export it"),
    "tflite": (b"\x1c\x00\x00\x00TFL3\x14\x00", "a TFLite model: python -m tf2onnx.convert"),
    "ort": (b"\x18\x00\x00\x00ORTM\x14\x00", "a model in onnxruntime's ORT format"),
    "hdf5": (b"\x89HDF\r\n\x1a\n\x00", "an HDF5 file, as of Keras"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "pointer: git lfs pull"),
    "html": (b"\n  <!DOCTYPE html><html>", "an HTML page: download the file itself"),
    "openvino": (b'<?xml version="1.0"?><net name="m">', "an XML file, as of OpenVINO"),
    "json": (b'{"architectures": ["BertModel"]}', "a JSON file"),
    "nothing": (b"", "an empty file: export or download it again"),
    "safetensors": (b'\x40\0\0\0\0\0\0\0{"w": {"dtype"', "a safetensors file, which has weights"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_of_another_kind_is_named(cli: Cli, tmp_path: Path, kind: str) -> None:
    content, words = FOREIGN[kind]
    path = tmp_path / "model.onnx"
    if isinstance(content, bytes):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=re.escape(words)):
            read(content)
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    err = cli.fails(1, "optimize", path)
    assert f"{path}: not an ONNX file, but" in " ".join(err.split())
    assert words in " ".join(err.split())


def test_a_saved_model_folder_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"\x08\x01")
    for path in (tmp_path, tmp_path / "saved_model.pb"):
        err = cli.fails(1, "validate", path)
        assert "a SavedModel of TensorFlow: python -m tf2onnx.convert" in " ".join(err.split())


def test_a_file_that_was_cut_short_is_named(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(ENCODER.read_bytes()[:100_000])
    words = " ".join(cli("optimize", path).err.split())
    assert "not a whole ONNX file: its 100,000 bytes are damaged or cut" in words


def test_a_file_whose_name_is_no_text(cli: Cli, tmp_path: Path) -> None:
    """onnxruntime opens no such file itself."""
    path = tmp_path / os.fsdecode(b"\xff\xfe.onnx")
    onnx.save(small(), path)
    for command in (("optimize", path, "-o", tmp_path / "out.onnx"), ("validate", path)):
        result = cli(*command)
        assert (result.code, result.err) == (0, ""), result


@pytest.mark.parametrize("command", [*COMMANDS, ("inspect",)], ids=" ".join)
def test_no_file_and_no_plain_file(cli: Cli, tmp_path: Path, command: tuple[str, ...]) -> None:
    refused(cli, tmp_path / "none.onnx", "No such file", *command)
    (tmp_path / "folder.onnx").mkdir()
    refused(cli, tmp_path / "folder.onnx", "directory", *command)


NAMES = [
    'say "hi"', "two\nlines", "end */ of comment", "tab\there", "ünïcode ×", "a'b", "{0}", "%s",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_strange_names_go_through(cli: Cli, tmp_path: Path, saved: Save, name: str) -> None:
    model = small()
    for node in model.graph.node:
        node.name = name + node.op_type
        node.input[:] = [name + i for i in node.input]
        node.output[:] = [name + o for o in node.output]
    for value in (*model.graph.input, *model.graph.output, *model.graph.initializer):
        value.name = name + value.name
    cli.done(
        "optimize", saved(model, "strange.onnx"), "--explain", "--json", tmp_path / "report.json"
    )
    fused = onnx.load(tmp_path / "strange.fused.onnx")
    assert [v.name for v in fused.graph.output] == [name + "y"]
    assert cli("run", tmp_path / "strange.fused.onnx").code == 0


def test_a_strange_name_in_an_error_stays_one_line(cli: Cli, saved: Save) -> None:
    model = small()
    model.graph.node[1].op_type, model.graph.node[1].name = "No\nSuch", "line\nbreak */"
    refused(cli, saved(model), "line break */", "optimize")


def test_an_output_that_cannot_be_written(cli: Cli, tmp_path: Path, saved: Save) -> None:
    path = saved(small())
    os.mkfifo(tmp_path / "fifo")
    places = (tmp_path / "none" / "out.onnx", tmp_path, path / "out.onnx", tmp_path / "fifo")
    for output in places:
        assert "cannot be written" in cli.fails(1, "optimize", path, "-o", output)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "fifo", path]
    assert (tmp_path / "fifo").is_fifo()


def test_an_output_on_a_full_device(
    cli: Cli, tmp_path: Path, saved: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(small())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert "No space left" in cli.fails(1, "optimize", path)
    assert sorted(tmp_path.iterdir()) == [path]


def test_the_output_may_not_be_the_input(cli: Cli, tmp_path: Path, saved: Save) -> None:
    path, link = saved(small(), "m.onnx"), tmp_path / "link.onnx"
    link.symlink_to(path)
    data = path.read_bytes()
    for output in (path, link, tmp_path / "x" / ".." / "m.onnx"):
        assert "the output is the input" in cli.fails(2, "optimize", path, "-o", output)
    assert path.read_bytes() == data


HUGE = {
    "Range": "a = Constant <value_int = 0> ()  b = Constant <value_int = 1000000000000> ()"
    "  c = Constant <value_int = 1> ()  r = Range (a, b, c)",
    "Tile": "a = Constant <value_ints = [1]> ()  b = Constant <value_ints = [1000000000000]> ()"
    "  r = Tile (a, b)",
    "ConstantOfShape": "a = Constant <value_ints = [1000000000000]> ()  r = ConstantOfShape (a)",
    "Expand": "a = Constant <value_ints = [1048576, 1073741824, 7]> ()"
    "  b = Constant <value_ints = [1]> ()  r = Expand (b, a)",
}


@pytest.mark.parametrize("op", HUGE)
def test_a_constant_that_asks_for_a_huge_tensor(cli: Cli, saved: Save, op: str) -> None:
    model = parsed(
        f"g (int64[N] x) => (int64 y) {{ {HUGE[op]}  s = Shape (r)  y = ReduceSum (s) }}"
    )
    assert cli("optimize", saved(model)).code in (0, 1)
    model.graph.node[-2].op_type = "Neg"
    path = saved(model)
    assert str(path) in cli.fails(1, "optimize", path)


def test_what_onnxruntime_cannot_survive_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"m\.onnx: onnxruntime crashed .*Killed"):
        ort.guarded(lambda: os.kill(os.getpid(), 9), "m.onnx")
    with pytest.raises(ModelError, match="out of memory"):
        ort.guarded(lambda: bytearray(sys.maxsize), "m.onnx")
    assert ort.guarded(lambda: np.arange(3).tolist(), "m.onnx") == [0, 1, 2]


# ---- mutations -------------------------------------------------------------------------------

SMALL = [
    TEXT,
    """<ir_version: 10, opset_import: ["" : 17]>
    g (float[B, 3] x, int64[B] i) => (float[B, 5] y, float z)
    <float[3] s = {1, 1, 1}, float[3] b = {0, 1, 0}, float[3, 5] w, float[5] c = {0, 1, 2, 3, 4},
     float[7, 3] table, float k = {0.5}>
     { n = LayerNormalization <axis: int = -1, epsilon: float = 0.001> (x, s, b)
     e = Gather (table, i)  h = Add (n, e)  m = MatMul (h, w)  a = Add (m, c)  y = Relu (a)
     r = ReduceMean <keepdims: int = 0> (y)  z = Mul (r, k) }""",
]


def small_models() -> list[bytes]:
    models = []
    for text in SMALL:
        model = onnx.parser.parse_model(text)
        for tensor in model.graph.initializer:
            if not tensor.float_data and not tensor.raw_data:
                array = np.random.default_rng(0).standard_normal(list(tensor.dims))
                tensor.CopyFrom(numpy_helper.from_array(array.astype(np.float32), tensor.name))
        models.append(model.SerializeToString())
    layer = encoder.build(encoder.Config(1, 2, 16, 64, 16))  # every kind of node of a BERT
    return [*models, to_proto(layer).SerializeToString()]


MODELS = small_models()
MUTATIONS = int(os.environ.get("MUTATIONS", 0))
HYPOTHESIS = settings(
    derandomize=not MUTATIONS,
    max_examples=MUTATIONS or 60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def mutated_bytes(draw: st.DrawFn) -> bytes:
    """A real file with bytes flipped, cut off, or taken from elsewhere in the file."""
    data = bytearray(draw(st.sampled_from(MODELS)))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(("flip", "flip", "flip", "cut", "splice"))):
            case "flip":
                data[start] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[max(start, 1) :]
            case "splice":
                other = draw(st.integers(0, len(data) - 1))
                size = draw(st.integers(1, 64))
                data[start : start + size] = data[other : other + size]
    return bytes(data)


@st.composite
def mutated_fields(draw: st.DrawFn) -> bytes:
    """A real model with one to three fields set wrong: what a broken exporter writes."""
    model = onnx.ModelProto.FromString(draw(st.sampled_from(MODELS)))
    graph = model.graph
    names = sorted({n for node in graph.node for n in (*node.input, *node.output)})
    size = st.sampled_from((-1, 0, 1, 3, 2**31, 2**62, 2**63 - 1))
    for _ in range(draw(st.integers(1, 3))):
        node = draw(st.sampled_from(list(graph.node)))
        tensor = draw(st.sampled_from(list(graph.initializer)))
        match draw(st.integers(0, 9)):
            case 0 if node.input:
                node.input[draw(st.integers(0, len(node.input) - 1))] = draw(st.sampled_from(names))
            case 1:
                node.output[0] = draw(st.sampled_from(names))
            case 2:
                node.op_type = draw(st.sampled_from(("Relu", "MatMul", "Shape", "Loop", "Concat")))
            case 3 if tensor.dims:
                tensor.dims[draw(st.integers(0, len(tensor.dims) - 1))] = draw(size)
            case 4:
                tensor.data_type = draw(st.integers(-1, 30))
            case 5:
                kind = draw(st.sampled_from(list(graph.input))).type.tensor_type
                kind.elem_type = draw(st.integers(-1, 30))
            case 6:
                dims = draw(st.sampled_from(list(graph.input))).type.tensor_type.shape.dim
                if dims:
                    dims[0].dim_value = draw(size)
            case 7 if node.attribute:
                node.attribute[0].i = draw(size)
                node.attribute[0].type = draw(st.integers(0, 14))
            case 8:
                model.opset_import[0].version = draw(st.integers(-1, 40))
            case 9:
                node.input.append(draw(st.sampled_from(names)))
    return model.SerializeToString()


def survives(cli: Cli, folder: Path, data: bytes) -> None:
    """The commands end with a sentence about a mutated file, or without one.

    The mutations are the same in each run. Other ones, over more commands:
    `MUTATIONS=5000 pytest tests/test_bad_input.py -k mutated --hypothesis-seed=7`
    """
    path, output = folder / "mutated.onnx", folder / "mutated.fused.onnx"
    path.write_bytes(data)
    output.unlink(missing_ok=True)
    result = cli("optimize", path)
    assert result.code in (0, 1, 3), result
    assert "internal error" not in result.err, result.err
    assert "Traceback" not in result.err
    assert sorted(folder.iterdir()) == sorted([path, output] if result.code == 0 else [path])
    if result.code == 0:
        read(output)
    others = (("run",), ("validate", "--grad"), ("inspect",)) if MUTATIONS else ()
    for name, *options in (("gradient", "-o", output), *others):
        result = cli(name, path, *options)
        assert result.code in (0, 1, 3), result
        assert "internal error" not in result.err, result.err


@pytest.mark.parametrize("dtype", ["uint16", "complex128"])
def test_the_gradient_of_a_wrongly_typed_model_is_refused(
    cli: Cli, tmp_path: Path, saved: Save, dtype: str
) -> None:
    model = parsed(
        f"g ({dtype}[N] i) => (float[N, 2] y) <float[3, 2] t = {{1, 2, 3, 4, 5, 6}}> "
        "{ y = Gather (t, i) }"
    )
    err = cli.fails(1, "gradient", saved(model), "-o", tmp_path / "g.onnx")
    # the type constraints of the operator say it, or onnxruntime, which loads what is written
    assert "has unsupported type" in err or f"tensor({dtype})" in err
    assert len(err.splitlines()) == 1
    assert "internal error" not in err
    assert not (tmp_path / "g.onnx").exists()


def test_a_division_of_unequal_types_is_refused(cli: Cli, tmp_path: Path, saved: Save) -> None:
    """It is of constants, which folding would divide."""
    model = parsed(
        "g (float[1] x) => (float[1] y) { one = Constant <value = float[1] {1.0}> ()"
        "  axes = Constant <value = int64[1] {-1}> ()  r = Div (one, axes)  y = Mul (x, r) }"
    )
    err = cli.fails(1, "optimize", saved(model), "-o", tmp_path / "out.onnx")
    assert "Div" in err
    assert "internal error" not in err


def test_transposes_of_unequal_ranks_are_refused() -> None:
    """Nothing in between says so, since the first one's input has no rank."""
    model = parsed(
        "g (float[] x, int64[N] s) => (float[A, B, C] y) { r = Reshape (x, s)"
        "  t = Transpose <perm = [1, 0]> (r)  y = Transpose <perm = [2, 0, 1]> (t) }"
    )
    with pytest.raises(ModelError, match="do not fit"):
        rewrite.optimize(load(model))


def test_an_expand_to_a_number_is_one_of_a_vector() -> None:
    """As onnxruntime has it, which onnxscript's rule does not know."""
    model = parsed("g (float[1] x) => (float[A] y) <int64 s = {3}> { y = Expand (x, s) }")
    graph = load(model)
    rewrite.optimize(graph)
    (y,) = ort.run(ort.session(graph), {"x": np.ones(1, "f")})
    assert y.shape == (3,)


def test_an_expand_to_a_negative_size_stays_for_onnxruntime_to_refuse() -> None:
    graph = load(
        parsed("g (bool[1] x) => (bool[A] y) { s = Constant <value_ints = [-1]> ()"
               "  e = Expand (x, s)  y = Not (e) }")
    )  # fmt: skip
    rewrite.optimize(graph)
    assert [node.op_type for node in graph.graph] == ["Expand", "Not"]


@pytest.mark.parametrize("error", [TypeError, AssertionError, IndexError])
def test_a_fault_beside_onnxscripts_rules_is_no_fault_of_the_file(error: type[Exception]) -> None:
    model = load(parsed("g (float[3] x) => (float[3] y) { y = Transpose <perm = [0]> (x) }"))
    canonicalize = import_module("onnx_fuse.rewrite.canonicalize")
    with patch.object(canonicalize, "isolated_subgraphs", side_effect=error), pytest.raises(error):
        canonicalize._apply(model, ["no_op_transpose"], lambda node: True)


@HYPOTHESIS
@given(data=mutated_bytes())
def test_mutated_bytes(cli: Cli, tmp_path: Path, data: bytes) -> None:
    survives(cli, tmp_path, data)


@HYPOTHESIS
@given(data=mutated_fields())
def test_mutated_fields(cli: Cli, tmp_path: Path, data: bytes) -> None:
    survives(cli, tmp_path, data)


def test_a_range_of_vectors_is_differentiated_or_refused(
    cli: Cli, tmp_path: Path, saved: Save
) -> None:
    """onnxruntime runs one whose ends are vectors of one element, or refuses it."""
    for start, code in (("int64[1] s = {2}", 0), ("int64[2] s = {2, 3}", 0), ("float s = {2}", 1)):
        model = parsed(
            f"g (float[8, 3] x, int64 l) => (float[A, 3] y) <{start}, int64[1] d = {{1}}>"
            " { r = Range (s, l, d)  y = Gather (x, r) }"
        )
        result = cli("gradient", saved(model), "--wrt", "x", "-o", tmp_path / "g.onnx")
        assert (result.code, "internal error" in result.err) == (code, False), result.err


MISFITS: dict[str, tuple[str, list[Any]]] = {
    "Slice by a scalar": ("Slice", [np.arange(3), np.array(0), np.array([1])]),
    "Slice by fractions": ("Slice", [np.arange(3), np.array([0.5]), np.array([1.5])]),
    "Slice to an end that is unknown": ("Slice", [np.arange(3), np.array([0]), None]),
    "Reshape to a shape that is unknown": ("Reshape", [np.arange(3), None]),
    "Range of mixed types": ("Range", [np.array(0), np.array(2.5), np.array(1)]),
    "Range of two starts": ("Range", [np.array([0, 1]), np.array(3), np.array(1)]),
    "Gather beyond the end": ("Gather", [np.arange(3), np.array([3])]),
    "sum of unequal shapes": ("Add", [np.arange(3), np.arange(2)]),
    "sum with an unknown": ("Add", [np.arange(3), None]),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_node_that_cannot_run_is_not_evaluated(name: str) -> None:
    operator, arrays = MISFITS[name]
    assert evaluate.exact(onnx_ir.Node("", operator, [None] * len(arrays)), arrays) is None


@pytest.mark.parametrize("error", [AttributeError, TypeError, KeyError, AssertionError])
def test_a_fault_of_a_rule_is_no_fault_of_the_file(error: type[Exception]) -> None:
    """What ranks and sizes that do not fit raise is the file's: a sentence. All else is ours."""
    node = onnx_ir.Node("", "Add", [None, None], name="sum")
    for raised, told in ((error, error), (IndexError, ModelError), (ValueError, ModelError)):
        rule = SimpleNamespace(name="Sum", apply=Mock(side_effect=raised("why")))
        with pytest.raises(told) as caught:
            rewrite._applied(rule, Mock(), node)  # type: ignore[arg-type]
        assert isinstance(caught.value, ModelError) == (told is ModelError)

"""Files that hold a model in an unusual but valid way: sparse tensors, links, names used twice."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support import Cli, parsed, stock, table

import onnx_fuse
from onnx_fuse.autodiff.load import load
from onnx_fuse.importer.save import to_proto
from onnx_fuse.rewrite.fold import fold_constants
from onnx_fuse.runtime import ort
from onnx_fuse.validation.check import validate

SPARSE = {
    "one index each": ([0, 5, 10], np.float32),
    "an index for each axis": ([[0, 1], [3, 3]], np.float32),
    "nothing": ([], np.float32),
    "float16": ([7, 8], np.float16),
}


def sparse_model(indices: list[int], dtype: type, place: str) -> onnx.ModelProto:
    """y = x W for a sparse W: an initializer, a Constant, or a Constant in a branch."""
    at = np.array(indices, np.int64)
    values = numpy_helper.from_array(np.arange(1, len(at) + 1).astype(dtype), "w")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(at, "i"), [4, 4])
    kind = "float16" if dtype == np.float16 else "float"
    model = parsed(
        f"g ({kind}[N,4] x) => ({kind}[N,4] y) {{ {PLACES[place].replace('KIND', kind)} }}"
    )
    if place == "initializer":
        model.graph.sparse_initializer.append(sparse)
        return model
    graph = model.graph.node[-1].attribute[0].g if place == "branch" else model.graph
    graph.node[0].attribute.append(helper.make_attribute("sparse_value", sparse))
    return model


PLACES = {
    "initializer": "y = MatMul (x, w)",
    "constant": "w = Constant () y = MatMul (x, w)",
    "branch": """c = Constant <value = bool {1}> () y = If (c) <
        then_branch = t () => (KIND[N,4] p) { w = Constant () p = MatMul (x, w) },
        else_branch = e () => (KIND[N,4] z) { z = Relu (x) }>""",
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_tensors_are_stored_dense(name: str, place: str) -> None:
    indices, dtype = SPARSE[name]
    model = sparse_model(indices, dtype, place)
    before = model.SerializeToString()
    x = {"x": np.random.default_rng(0).standard_normal((3, 4)).astype(dtype)}
    dense = np.zeros((4, 4), dtype)
    for i, at in enumerate(indices):
        dense[tuple(at) if isinstance(at, list) else divmod(at, 4)] = i + 1
    found = to_proto(load(model))
    [y] = ort.run(ort.session(found.SerializeToString()), x)
    np.testing.assert_allclose(y, x["x"] @ dense, rtol=1e-2 if dtype == np.float16 else 1e-6)
    assert model.SerializeToString() == before  # the caller's own stays as it was


def external_model(path: Path) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4, 4])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="weights.bin")
    model = parsed("g (float[N,4] x) => (float[N,4] y) { y = MatMul (x, w) }")
    model.graph.initializer.append(weight)
    path.write_bytes(model.SerializeToString())


def test_weights_behind_links_are_read(tmp_path: Path) -> None:
    """A hub's cache links a model and its weights into a folder of blobs; others link hard."""
    blobs, shown = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    shown.mkdir(parents=True)
    external_model(blobs / "1f")
    (blobs / "2e").write_bytes(np.eye(4, dtype=np.float32).tobytes())
    (shown / "model.onnx").symlink_to(blobs / "1f")
    (shown / "weights.bin").symlink_to(blobs / "2e")
    hard = tmp_path / "hard"
    hard.mkdir()
    external_model(hard / "model.onnx")
    os.link(blobs / "2e", hard / "weights.bin")
    for folder in (shown, hard):
        [weight] = load(folder / "model.onnx").graph.initializers.values()
        np.testing.assert_array_equal(weight.const_value.numpy(), np.eye(4))


ORACLES = table(globals())("""
a function whose Softmax is of opset 11: True
  <ir_version: 8, opset_import: ["" : 17, "local" : 1]> g (float[B,3,4] x) => (float[B,3,4] y)
  { y = local.f (x) } <domain: "local", opset_import: ["" : 11]> f (x) => (y) { y = Softmax (x) }
a function whose Clip is of opset 10: True
  <ir_version: 8, opset_import: ["" : 17, "local" : 1]> g (float[B,3,4] x) => (float[B,3,4] y)
  { y = local.f (x) } <domain: "local", opset_import: ["" : 10]> f (x) => (y)
  { y = Clip <min = 0.5> (x) }
a function whose nodes are the same in both opsets: False
  <ir_version: 8, opset_import: ["" : 17, "local" : 1]> g (float[B,3,4] x) => (float[B,3,4] y)
  { y = local.f (x) } <domain: "local", opset_import: ["" : 14]> f (x) => (y) { y = Relu (x) }
two nodes of one name: True
  <ir_version: 8, opset_import: ["" : 17]> g (float[B,4] x) => (float[B,4] y) { [n] a = Relu (x)
  [n] y = Sigmoid (a) }
an empty last operand: True
  <ir_version: 8, opset_import: ["" : 17]> g (float[B,4] x) => (float[B,4] y)
  <float[4] w = {1,2,3,4}> { a = Clip (x, , , )  y = LayerNormalization (a, w, , ) }
an axis that is split into ones, and dropped: False
  <ir_version: 8, opset_import: ["" : 17]> g (float[B,2] x) => (float[] y)
  <int64 i = {0}, int64 one = {1}>
  { s = SplitToSequence <axis = 1, keepdims = 0> (x, one)  y = SequenceAt (s, i) }
a function whose first result nobody reads: False
  <ir_version: 8, opset_import: ["" : 17, "local" : 1]> g (float[B,4] x) => (float[B,4] y)
  { , y = local.f (x) } <domain: "local", opset_import: ["" : 17]> f (x) => (r, y)
  { r = Relu (x)  y = Neg (r) }
""")


@pytest.mark.parametrize("name", ORACLES)
def test_the_original_is_what_the_file_means(name: str) -> None:
    """onnxruntime reads these files otherwise, or refuses them: the check says what it ran."""
    text, mended = ORACLES[name]
    check = validate(onnx.parser.parse_model(text))
    assert check.ok
    assert any("repairs this in the original" in note for note in check.notes) == mended


def test_a_graph_needs_no_name() -> None:
    model = parsed("g (float[2] x) => (float[2] y) <float[2] w = {1, 2}> { y = Mul (x, w) }")
    model.graph.name = ""
    assert validate(model).ok
    assert onnx_fuse.optimize(model).graph.name


@pytest.mark.parametrize("outer", ["", "w = Mul (x, x)"], ids=["initializer", "computed"])
@pytest.mark.parametrize("other", ["Add (x, w)", "Neg (x)"])
def test_a_branch_takes_the_outer_value_that_a_branch_reads(other: str, outer: str) -> None:
    """ONNX has no two values of one name; onnxruntime runs the file."""
    held = "" if outer else "<float[1] w = {10}>"
    model = parsed(
        f"g (float[1] x, bool c) => (float[1] y)"
        f" {held} {{ {outer} z = If (c) <then_branch: graph = t () => (float[1] a)"
        f" <float[1] w = {{5}}> {{ a = Add (x, w) }},"
        f" else_branch: graph = e () => (float[1] b) {{ b = {other} }}>"
        " y = Add (z, w) }"
    )
    theirs, ours = stock(model, optimized=True), onnx_fuse.InferenceSession(model)
    for taken in (True, False):
        feed = {"x": np.ones(1, np.float32), "c": np.array(taken)}
        np.testing.assert_array_equal(ours.run(None, feed)[0], theirs.run(None, feed)[0])


def test_a_node_without_a_type_is_simplified() -> None:
    """Inference has no types for operators of an opset that it does not know."""
    model = load(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 24]>
      g (float[A,B] x) => (float[A,B] y)
      { s = Shape (x)  t = Concat <axis = 0> (s)  y = Reshape (x, t) }""")
    )
    for node in list(model.graph)[:2]:
        node.outputs[0].type = None
    assert fold_constants(model, lambda node: True)
    assert [node.op_type for node in to_proto(model).graph.node] == ["Shape", "Identity", "Reshape"]


def int8_model(opset: int) -> onnx.ModelProto:
    """Activations in int8 whose DequantizeLinear stands before a Reshape, as static quantization
    of an attention writes them."""
    return onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : {opset}]> g (float[2,8] x) => (float[2,4,2] y)'
        " <float s = {0.1}, int8 z = {3}, int64[3] to = {2, 2, 4}> {"
        " q = QuantizeLinear (x, s, z)  d = DequantizeLinear (q, s, z)"
        " r = Reshape (d, to)  t = Transpose <perm = [0, 2, 1]> (r)  y = Mul (t, t) }"
    )


@pytest.mark.parametrize("opset", [13, 19, 20])
def test_int8_activations_stay_loadable(
    opset: int, tmp_path: Path, cli: Cli, saved: Callable[..., Path]
) -> None:
    """From opset 21 on onnxruntime's own rewrites break such a graph (`onnx.save.loadable`)."""
    model = int8_model(opset)
    fused = onnx_fuse.optimize(model)
    assert [o.version for o in fused.opset_import if not o.domain] == [opset]
    x = {"x": np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)}
    [expected] = ort.run(ort.session(model.SerializeToString(), as_written=True), x)
    [found] = stock(fused, optimized=True).run(None, x)
    np.testing.assert_array_equal(found, expected)
    [found] = onnx_fuse.InferenceSession(model, device="cpu").run(None, x)
    np.testing.assert_array_equal(found, expected)
    for more in ([], ["--inline"]):
        cli.done("optimize", saved(model), "-o", tmp_path / "o.onnx", *more)
        written = onnx.load(tmp_path / "o.onnx")
        assert [o.version for o in written.opset_import if not o.domain] == [opset]

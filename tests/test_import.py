"""Loading and saving: opsets, local functions, external data, sizes, and what a user wrote kept."""

from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import support
from support import assert_same, stock

from onnx_fuse import optimize, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import at_opset, inline, save, to_proto
from onnx_fuse.ir.build import Builder, text_model
from onnx_fuse.ir.constants import CANONICAL_OPSET, FUSE

run = partial(support.run, optimized=True)

# The same network as each opset spells it: what changed its signature from one to the next is here.
_BODY = """
  n = BatchNormalization (x, s, b, m, v)
  {clip}
  {pad}
  {up}
  {drop}
  {mean}
  {unsqueeze}
  {squeeze}
  f = Flatten (q)
  y = Softmax <axis = 1> (f)
"""
_SPELLING = {
    "clip": {7: "c = Clip <min = -1.0, max = 1.0> (n)", 11: "c = Clip (n, lo, hi)"},
    "pad": {7: "p = Pad <pads = [0,0,1,1,0,0,1,1]> (c)", 11: "p = Pad (c, pads)"},
    "up": {
        7: 'u = Upsample <mode = "nearest", scales = [1.0,1.0,2.0,2.0]> (p)',
        9: 'u = Upsample <mode = "nearest"> (p, scales)',
        10: 'u = Resize <mode = "nearest"> (p, scales)',
        11: 'u = Resize <mode = "nearest"> (p, roi, scales)',
    },
    "drop": {7: "d = Dropout <ratio = 0.3> (u)", 12: "d = Dropout (u)"},
    "mean": {
        7: "r = ReduceMean <axes = [3], keepdims = 0> (d)",
        18: "r = ReduceMean <keepdims = 0> (d, three)",
    },
    "unsqueeze": {7: "e = Unsqueeze <axes = [0]> (r)", 13: "e = Unsqueeze (r, zero)"},
    "squeeze": {7: "q = Squeeze <axes = [0]> (e)", 13: "q = Squeeze (e, zero)"},
}


def spelled(opset: int) -> onnx.ModelProto:
    lines = {k: forms[max(o for o in forms if o <= opset)] for k, forms in _SPELLING.items()}
    vectors = "float[3] s = {1.0, 2.0, 0.5}, float[3] b = {0.1, 0.2, 0.3}"
    vectors += ", float[3] m = {0.0, 0.1, -0.1}, float[3] v = {1.0, 0.5, 2.0}"
    vectors += ", float lo = {-1.0}, float hi = {1.0}, int64[1] zero = {0}, int64[1] three = {3}"
    vectors += ", int64[8] pads = {0,0,1,1,0,0,1,1}, float[4] scales = {1.0,1.0,2.0,2.0}"
    vectors += ", float[0] roi = {}"
    model = onnx.parser.parse_model(
        f'<ir_version: {3 if opset < 9 else 8}, opset_import: ["" : {opset}]>\n'
        f"agraph (float[N,3,5,4] x) => (float[N,42] y) <{vectors}> {{{_BODY.format(**lines)}}}"
    )
    used = {name for node in model.graph.node for name in node.input}
    for tensor in [t for t in model.graph.initializer if t.name not in used]:
        model.graph.initializer.remove(tensor)
    if opset < 9:  # IR 3 lists every initializer as an input too
        for tensor in model.graph.initializer:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            model.graph.input.append(info)
    return model


@pytest.mark.parametrize("opset", [7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 18, 20, 21])
def test_every_opset_is_brought_up(opset: int) -> None:
    proto = spelled(opset)
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype(np.float32)
    expected = run(proto.SerializeToString(), {"x": x})
    model = load(proto)
    assert model.graph.opset_imports[""] == CANONICAL_OPSET
    assert [v.name for v in model.graph.inputs] == ["x"]
    rewrite.optimize(model)
    actual = run(to_proto(model).SerializeToString(), {"x": x})
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("opset", [9, 13])
def test_a_batch_norm_that_trains_by_its_outputs_still_trains(opset: int) -> None:
    proto = onnx.parser.parse_model(
        f'<ir_version: 7, opset_import: ["" : {opset}]>\n'
        "agraph (float[N,2] x) => (float[N,2] y, float[2] mean)\n"
        "<float[2] s = {1, 2}, float[2] b = {0, 1}, float[2] m = {0, 0}, float[2] v = {1, 1}>\n"
        "{ n, mean, var, mu, rstd = BatchNormalization <momentum = 0.8> (x, s, b, m, v)"
        "  y = Relu (n) }"
    )
    x = np.random.default_rng(0).standard_normal((7, 2)).astype(np.float32) + 3
    model = load(proto)
    rewrite.optimize(model)
    actual = run(to_proto(model).SerializeToString(), {"x": x})
    unit = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    np.testing.assert_allclose(actual[0], np.maximum(unit * [1, 2] + [0, 1], 0), atol=1e-5)
    np.testing.assert_allclose(actual[1], 0.2 * x.mean(0), rtol=1e-5)


def annotated() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 17], producer_name: "someone", model_version: 3,
         doc_string: "of the model", metadata_props: ["key": "value"]>
        named (float[batch,4] second, float[batch,4] first)
        => (float[batch,6] out, float[batch,4] n)
        <float[4] g = {1.0, 2.0, 3.0, 4.0}, float[4] b = {0.0, 0.1, 0.2, 0.3}, float[4,6] w = {
          1.0,2.0,3.0,4.0,5.0,6.0, 1.0,0.0,0.0,0.0,0.0,1.0, 0.5,0.5,0.5,0.5,0.5,0.5,
          2.0,1.0,0.0,0.0,1.0,2.0}>
        {
          s = Add (first, second)
          n = LayerNormalization (s, g, b)
          out = MatMul (n, w)
        }
        """
    )
    model.graph.doc_string = "of the graph"
    model.graph.node[2].name = "the product"
    model.graph.node[2].doc_string = "of the node"
    model.graph.input[0].doc_string = "of the input"
    return model


def test_what_the_user_wrote_is_kept(tmp_path: Path) -> None:
    model = load(annotated())
    rewrite.optimize(model)
    save(model, tmp_path / "kept.onnx")
    proto = onnx.load(tmp_path / "kept.onnx")
    onnx.checker.check_model(proto)
    assert (proto.producer_name, proto.model_version) == ("someone", 3)
    assert proto.doc_string == "of the model"
    assert {p.key: p.value for p in proto.metadata_props} == {"key": "value"}
    assert (proto.graph.name, proto.graph.doc_string) == ("named", "of the graph")
    assert [i.name for i in proto.graph.input] == ["second", "first"]
    assert [o.name for o in proto.graph.output] == ["out", "n"]
    assert proto.graph.input[0].doc_string == "of the input"
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    (node,) = [n for n in proto.graph.node if n.domain == FUSE]
    assert (node.op_type, node.name) == ("LayerNormGemm_n", "the product")
    assert node.doc_string == "of the node"


def test_local_functions_are_inlined() -> None:
    proto = onnx.parser.parse_model(
        """
        <ir_version: 8, opset_import: ["" : 17, "local" : 1]>
        agraph (float[N,4] x, float[4] g, float[4] b) => (float[N,4] y) {
          y = local._aten_layer_norm_onnx <eps = 0.01> (x, g, b)
        }
        <opset_import: ["" : 17], domain: "local">
        _aten_layer_norm_onnx <eps: float> (x, g, b) => (n) {
          n, mean, rstd = LayerNormalization <axis = -1, epsilon: float = @eps> (x, g, b)
        }
        """
    )
    model = load(proto)
    assert not model.functions
    rewrite.optimize(model)
    (node,) = list(model.graph)
    assert (node.op_type, len(node.outputs)) == ("LayerNormalization", 1)
    assert node.attributes["epsilon"].as_float() == pytest.approx(0.01)


def test_what_is_written_anew_in_a_body_and_outside_has_names_of_its_own() -> None:
    nodes = """{y}t = Einsum <equation = "bij,bkj->bik"> ({x}, {x})  {y}u = Gelu ({x})
      {y}v = MatMul ({y}u, w)  {y}r = Add ({y}v, c)  {y} = MatMul ({y}t, {y}r)"""
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 20]>
        g (float[B,3,4] x, int64 n) => (float[B,3,4] y) <float[4,4] w = {{{"1,-1,0," * 5}2}},
          float[4] c = {{1,2,3,4}}> {{
          {nodes.format(x="x", y="h")}
          y = Loop (n, , h) <body = b (int64 i, bool k, float[B,3,4] s) =>
            (bool d, float[B,3,4] e) {{ d = Identity (k) {nodes.format(x="s", y="e")} }}> }}""")
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 3, 4)).astype("f"),
             "n": np.array(2)}  # fmt: skip
    [want] = stock(proto, optimized=True).run(None, feeds)
    for level in (0, 2):
        model = load(proto)
        rewrite.optimize(model, level=level)
        for candidate in (model, inline(model), at_opset(inline(model), 13)):
            data = to_proto(candidate).SerializeToString()
            [y] = onnxruntime.InferenceSession(data).run(None, feeds)
            np.testing.assert_allclose(y, want, rtol=1e-4)


@pytest.mark.parametrize("level", [0, 2])
def test_a_loop_without_condition_and_states_keeps_two_inputs(level: int) -> None:
    """The standard wants both named, though both may be absent."""
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[N,4] x, int64 n) => (float[M,N,4] y) {
          z = Loop (n) <body = b (int64 i, bool c) => (bool d, float[N,4] e)
            { d = Identity (c)  e = Neg (x) }>  y = Identity (z) }""")
    proto.graph.node[0].input.append("")
    result = optimize(proto, level=level)
    assert [list(n.input) for n in result.graph.node if n.op_type == "Loop"] == [["n", ""]]
    feeds = {"x": np.ones((2, 4), np.float32), "n": np.array(3)}
    [y] = stock(result, optimized=True).run(None, feeds)
    np.testing.assert_array_equal(y, -np.ones((3, 2, 4)))


def test_an_empty_list_is_one_of_integers_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    y = Builder().Transpose(onnx_ir.Value(name="x"), perm=[])
    assert y.producer().attributes["perm"].type == onnx_ir.AttributeType.INTS
    assert caplog.records == []


def test_a_split_of_no_elements_is_an_empty_sequence() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 18]>
        g (float[0,3] x) => (int64 n) { k = Constant <value = int64 {2}> ()
          s = SplitToSequence <axis = 0> (x, k)  n = SequenceLength (s) }""")
    model = load(proto)
    rewrite.optimize(model)
    session = stock(model, optimized=True)
    assert session.run(None, {"x": np.empty((0, 3), np.float32)}) == [0]


def test_an_optional_without_a_value_stays() -> None:
    kind = onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [2])
    nodes = [
        onnx.helper.make_node("Optional", [], ["o"], type=kind),
        onnx.helper.make_node("OptionalHasElement", ["o"], ["h"]),
    ]
    found = onnx.helper.make_tensor_value_info("h", onnx.TensorProto.BOOL, [])
    graph = onnx.helper.make_graph(nodes, "g", [], [found])
    opsets = [onnx.helper.make_opsetid("", 18)]
    model = load(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8))
    rewrite.optimize(model)
    assert run(to_proto(model).SerializeToString(), {}) == [False]


def test_external_data_is_read_and_written(tmp_path: Path) -> None:
    model = load(annotated())
    feeds = {k: np.ones((2, 4), np.float32) * i for i, k in enumerate(("second", "first"))}
    feeds["first"][0] = [1, -2, 3, 5]
    expected = run(annotated().SerializeToString(), feeds)
    save(model, tmp_path / "a.onnx", external=True)
    assert (tmp_path / "a.onnx.data").exists()
    again = load(tmp_path / "a.onnx")
    rewrite.optimize(again)
    save(again, tmp_path / "b.onnx", external=True)
    assert_same(run(str(tmp_path / "b.onnx"), feeds), expected, rtol=1e-5, atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("a.onnx", "a.onnx.data", "b.onnx", "b.onnx.data")
    ]


def test_weights_over_two_gigabytes(tmp_path: Path) -> None:
    """A sparse file stands for the weights: they are mapped, never read as a whole."""
    rows, width = 530_000, 1024  # 2.17 GB of float32
    with (tmp_path / "big.data").open("wb") as file:
        file.truncate(rows * width * 4)
        file.seek(7 * width * 4)
        file.write(np.arange(width, dtype=np.float32).tobytes())
    model = text_model(
        f"agraph (int64[N] i, float[{rows},{width}] table) => (float[N,{width}] y) {{\n"
        "  y = Gather (table, i)\n}"
    )
    table = model.graph.inputs.pop()
    table.const_value = onnx_ir.ExternalTensor(
        "big.data",
        offset=0,
        length=rows * width * 4,
        dtype=onnx_ir.DataType.FLOAT,
        shape=onnx_ir.Shape([rows, width]),
        name="table",
        base_dir=tmp_path,
    )
    model.graph.register_initializer(table)
    (tmp_path / "big.onnx").write_bytes(onnx_ir.to_proto(model).SerializeToString())
    loaded = load(tmp_path / "big.onnx")
    rewrite.optimize(loaded)
    save(loaded, tmp_path / "out.onnx")  # no flag: it cannot fit a protobuf
    assert (tmp_path / "out.onnx").stat().st_size < 10_000
    (row,) = run(str(tmp_path / "out.onnx"), {"i": np.array([7])})
    np.testing.assert_array_equal(row[0], np.arange(width, dtype=np.float32))


def test_a_model_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    model = load(annotated())
    with pytest.raises(ModelError, match="cannot be written"):
        save(model, tmp_path / "no such folder" / "x.onnx")
    (tmp_path / "x.onnx").mkdir()
    with pytest.raises(ModelError, match="cannot be written"):
        save(model, tmp_path / "x.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["x.onnx"]


@pytest.mark.parametrize("kind", ["FLOAT", "BFLOAT16", "INT4", "STRING"])
def test_large_weights_are_streamed_to_the_same_model(kind: str, tmp_path: Path) -> None:
    dtype = onnx_ir.DataType[kind]
    held = np.arange(512 * 512).reshape(512, 512).T % 7
    if dtype == onnx_ir.DataType.STRING:
        weight = onnx_ir.StringTensor([b"word"] * held.size, shape=onnx_ir.Shape(held.shape))
    else:
        weight = onnx_ir.tensor(
            held.astype(dtype.numpy()), dtype
        )  # its rows do not follow each other
    weight.doc_string, weight.metadata_props["from"] = "of a test", "here"
    model = text_model(
        f"agraph (float x) => ({kind.lower()}[512,512] y) <float[1] w = {{1}}> {{y = Identity (w)}}"
    )
    value = model.graph.initializers["w"]
    value.const_value, value.dtype, value.shape = weight, dtype, onnx_ir.Shape(held.shape)
    save(model, tmp_path / "streamed.onnx")
    whole = to_proto(model)
    del whole.graph.value_info[:]  # an initializer states its own type
    assert onnx.load(tmp_path / "streamed.onnx") == whole
    onnx.checker.check_model(tmp_path / "streamed.onnx")


def test_a_fault_of_the_code_is_not_called_one_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(proto: onnx.ModelProto) -> None:
        raise UnboundLocalError("x")

    monkeypatch.setattr("onnx_fuse.importer.load._checked", broken)
    with pytest.raises(UnboundLocalError):
        load(to_proto(text_model("m (float x) => (float y) { y = Relu(x) }")))

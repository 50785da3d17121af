"""Files that were once loaded wrong, for ever, or not at all, and the classes they stand for.

A valid one answers what onnxruntime answers for the file as it is, at every level and written out;
a bad one is refused in one line that says what is wrong and where.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from support import Cli, normal, run, table

from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import inline, to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.functions import MAX_NODES
from onnx_fuse.validation.check import validate
from onnx_fuse.validation.gradients import check_gradients

Save = Callable[..., Path]
HEAD = '<ir_version: 10, opset_import: ["" : 21]>'


def same(proto: onnx.ModelProto, feeds: dict[str, Any]) -> None:
    """The model at levels 0 to 3, and each written out, answers what the file itself does."""
    data = proto.SerializeToString()
    expected = run(data, feeds)
    for level in range(4):
        model = load(data)
        rewrite.optimize(model, level=level)
        for candidate in (model, inline(model)):
            actual = run(to_proto(candidate).SerializeToString(), feeds)
            for a, b in zip(expected, actual, strict=True):
                assert type(a) is type(b)
                if not isinstance(a, np.ndarray) or a.dtype.kind not in "fc":
                    assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
                    continue
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                np.testing.assert_array_equal(b, a)
                np.testing.assert_array_equal(np.signbit(a[a == 0]), np.signbit(b[b == 0]))


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(text if text.startswith("<") else HEAD + text)


# ---- constants -----------------------------------------------------------------------------------

NUMBERS = "{0.0, -0.0, 1.5, 2.5, -0.5, 1e-42, 3.4e38, -2.5}"
# Each is `k` (awkward numbers) through one operator: onnx's reference evaluator answers otherwise
# for several of them, and NumPy for others.
FOLDED = {
    "LpNormalization": "c = LpNormalization <p = 1, axis = 0> (k)",
    "LpNormalization2": "c = LpNormalization <p = 2, axis = -1> (k)",
    "CastInt4": "a = Mul (k, half)  b = Clip (a, low, high)  d = Cast <to = 22> (b)"
    "  c = Cast <to = 1> (d)",
    "CastUint4": "a = Abs (k)  b = Clip (a, low, high)  d = Cast <to = 21> (b)  c = Cast <to=1>(d)",
    "CastFloat8": "d = Cast <to = 17> (k)  c = Cast <to = 1> (d)",
    "CastFloat8NoSaturation": "d = Cast <to = 19, saturate = 0> (k)  c = Cast <to = 1> (d)",
    "CastBFloat16": "d = Cast <to = 16> (k)  c = Cast <to = 1> (d)",
    "CastFloat16": "d = Cast <to = 10> (k)  c = Cast <to = 1> (d)",
    "Sign": "n = Sqrt (k)  c = Sign (n)",
    "ClipNaN": "n = Sqrt (minus)  c = Clip (k, n)",
    "Round": "c = Round (k)",
    "Mod": "c = Mod <fmod = 1> (k, half)",
    "Pow": "c = Pow (k, half)",
    "MinNaN": "n = Sqrt (k)  c = Min (n, k)",
    "MaxNaN": "n = Sqrt (k)  c = Max (k, n)",
    "ReduceMin": "n = ReduceMin (k)  c = Add (k, n)",
    "ReduceMaxNaN": "n = Sqrt (k)  m = ReduceMax (n)  c = Add (k, m)",
    "Softmax": "c = Softmax (k)",
    "LogSoftmax": "c = LogSoftmax (k)",
    "Where": "n = Greater (k, half)  c = Where (n, k, half)",
    "Erf": "c = Erf (k)",
    "Gelu": 'c = Gelu <approximate = "tanh"> (k)',
    "CumSum": "c = CumSum <reverse = 1, exclusive = 1> (k, zero)",
    "Div": "c = Div (half, k)",
    "HardSigmoid": "c = HardSigmoid (k)",
    "ArgMax": "i = ArgMax (k)  f = Cast <to = 1> (i)  c = Add (k, f)",
    "TopK": "n = Sqrt (k)  v, i = TopK (n, eight)  f = Cast <to = 1> (i)  c = Add (v, f)",
    "Resize": 'e = Reshape (k, square)  r = Resize <mode = "linear", '
    'coordinate_transformation_mode = "align_corners"> (e, , scales)  s = ReduceSum (r)'
    "  q = Squeeze (s)  c = Add (k, q)",
    "IntegerDivision": "i = Div (seven, three)  f = Cast <to = 1> (i)  c = Add (k, f)",
    "IntegerPower": "i = Pow (seven, big)  f = Cast <to = 1> (i)  c = Add (k, f)",
    "IntegerOverflow": "i = Mul (big, big)  f = Cast <to = 1> (i)  c = Add (k, f)",
    "ShapeArithmetic": "s = Shape (k)  g = Gather (s, zero)  n = Neg (g)  i = Div (n, three64)"
    "  f = Cast <to = 1> (i)  c = Add (k, f)",
    "ScalarTranspose": "t = Transpose (zero)  g = Gather (k, t)  u = Unsqueeze (g, zero1)"
    "  c = Add (k, u)",
    "ScalarExpand": "t = Expand (half, none)  u = Unsqueeze (t, zero1)  c = Add (k, u)",
    "Slice": "s = Slice (k, minus2, far, zero1, minus1)  t = ReduceSum (s)  c = Add (k, t)",
}


@pytest.mark.parametrize("name", FOLDED)
def test_a_folded_constant_is_what_onnxruntime_computes(name: str) -> None:
    constants = (
        f"float[8] k = {NUMBERS}, float half = {{0.5}}, float low = {{-7}}, float high = {{7}}, "
        "float minus = {-1}, int64 zero = {0}, int64[1] eight = {8}, int64[4] square = {1,1,2,4}, "
        "float[4] scales = {1,1,1.7,1.7}, int32[1] seven = {-7}, int32[1] three = {3}, "
        "int32[1] big = {1000003}, int64[1] three64 = {3}, int64[1] minus2 = {-2}, "
        "int64[1] far = {-9223372036854775807}, int64[1] zero1 = {0}, int64[1] minus1 = {-1}, "
        "int64[0] none = {}"
    )
    proto = parsed(
        f"g (float[8] x) => (float[8] y) <{constants}> {{ {FOLDED[name]}  y = Add (x, c) }}"
    )
    used = {n for node in proto.graph.node for n in node.input}
    for tensor in [t for t in proto.graph.initializer if t.name not in used]:
        proto.graph.initializer.remove(tensor)
    x = np.array([0, -0.0, 1, np.nan, np.inf, -np.inf, 1e-42, -1], np.float32)
    same(proto, {"x": x})


def test_a_mean_over_nothing_is_left_to_the_run() -> None:
    proto = parsed(
        "g (float[2] x) => (float[2] y) <float[0,2] k = {}> "
        "{ a = Constant <value_ints = [0]> ()  c = ReduceMean <keepdims = 0> (k, a)"
        "  y = Add (x, c) }"
    )
    same(proto, {"x": np.ones(2, np.float32)})


def test_an_integer_division_by_zero_is_left_alone() -> None:
    """onnxruntime dies of it (SIGFPE): it is neither run nor folded."""
    for op in ("Div", "Mod"):
        proto = parsed(
            "g (int64[1] x) => (int64[1] y) <int64[1] a = {1}, int64[1] b = {0}>"
            f" {{ c = {op} (a, b)  y = Add (x, c) }}"
        )
        model = load(proto)
        rewrite.optimize(model)
        assert op in [node.op_type for node in model.graph]


def test_a_chain_of_constants_is_one_constant() -> None:
    proto = parsed(
        "g (float[4] x) => (float[4] y) <float[4] k = {1, 2, 3, 4}>"
        " { a = Sqrt (k)  b = Exp (a)  c = Neg (b)  d = Mul (c, k)  y = Add (x, d) }"
    )
    model = load(proto)
    rewrite.optimize(model)
    assert [node.op_type for node in model.graph] == ["Add"]
    same(proto, {"x": np.ones(4, np.float32)})


@pytest.mark.parametrize("condition", [0, 1])
def test_a_known_branch_takes_its_ifs_place(condition: int) -> None:
    """The names inside are also those of another If's branches and of the graph."""
    proto = parsed(
        f"g (float[2] x, bool b) => (float[2] y) <bool c = {{{condition}}}, float one = {{1}}> {{"
        "  t = Relu (x)"
        "  u = If (c) <then_branch = p () => (o) { t1 = Neg (t)  o = Add (t1, one) },"
        "              else_branch = q () => (o) { t1 = Abs (x)  o = Mul (t1, t) }>"
        "  v = If (b) <then_branch = p () => (o) { t1 = Exp (u)  o = Identity (t1) },"
        "              else_branch = q () => (o) { o = Identity (u) }>"
        "  y = Add (u, v) }"
    )
    for b in (True, False):
        same(proto, {"x": np.array([-1.5, 2], np.float32), "b": np.array(b)})


# ---- strings, defaults, shapes -------------------------------------------------------------------

VALID = {
    "const_cast_string": "g (float[3] z) => (float[3] z2, string[2] y) <float[2] x = {1.5, 2}>"
    " { y = Cast <to = 8> (x)  z2 = Neg (z) }",
    "string_identity": 'g (float[3] z) => (float[3] y, string[2] k2) <string[2] k = {"a", "b"}>'
    " { y = Relu (z)  k2 = Identity (k) }",
    "string_moves": 'g (float[3] z) => (string[4] y) <string[2] k = {"a", "b"}>'
    " { y = Concat <axis = 0> (k, k) }",
    "no_output_shape": "g (float[3] z) => (float y) { y = Relu (z) }",
    "function_of_ort": '<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>'
    " g (float[3] z) => (float[1,3] y) <int32 a = {0}> { y = com.microsoft.ExpandDims (z, a) }"
    ' <domain: "com.microsoft", opset_import: ["" : 21]>'
    " ExpandDims (z, a) => (y) { y = Neg (z) }",
    "empty_part": "g (float[3] z) => (float[3] y) <float[0] e = {}>"
    " { a = Concat <axis = 0> (e, z, e)  y = Relu (a) }",
}


@pytest.mark.parametrize("name", VALID)
def test_a_valid_file_is_read(name: str) -> None:
    proto = parsed(VALID[name])
    if name == "no_output_shape":
        proto.graph.output[0].type.tensor_type.ClearField("shape")
    same(proto, {"z": np.array([1, -2, np.nan], np.float32)})


OVERRIDDEN = (
    "g (float[3,8] x, float[8] s) => (float[3,8] y) <float[8] s = {1,1,1,1,1,1,1,1}>"
    " { t = Mul (x, s)  y = Relu (t) }"
)


def test_a_default_is_no_constant() -> None:
    proto = parsed(OVERRIDDEN)
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    s = np.full(8, -3, np.float32)
    same(proto, {"x": x})
    same(proto, {"x": x, "s": s})
    model = load(proto)
    report = rewrite.optimize(model)
    assert [v.name for v in model.graph.inputs] == ["x", "s"]
    assert "may override (s)" in report.notes[0]
    written = to_proto(load(to_proto(model)))
    assert [v.name for v in written.graph.input] == ["x", "s"]
    assert [t.name for t in written.graph.initializer] == ["s"]


def test_a_default_before_ir_version_4_is_a_constant() -> None:
    proto = parsed(OVERRIDDEN)
    proto.ir_version, proto.opset_import[0].version = 3, 8
    model = load(proto)
    assert not rewrite.optimize(model).notes
    assert [v.name for v in model.graph.inputs] == ["x"]
    assert list(model.graph.initializers) == ["s"]


def test_a_default_can_be_trained_and_differentiated() -> None:
    from onnx_fuse import InferenceSession, Trainer, gradient, optim

    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    target = np.abs(x) * 2
    proto = parsed(OVERRIDDEN)
    trainer = Trainer(proto, loss="mse", optimizer=optim.SGD(lr=0.1))
    losses = [float(trainer.step({"x": x, "labels": target})) for _ in range(5)]
    assert losses[-1] < losses[0]
    graph = gradient(proto, loss="mse")
    assert isinstance(graph, onnx.ModelProto)
    assert {"s.grad", "loss"} <= {v.name for v in graph.graph.output}
    found = run(graph.SerializeToString(), {"x": x, "labels": target})
    assert len(found) == len(graph.graph.output)
    for feeds in ({"x": x}, {"x": x, "s": np.full(8, 2, np.float32)}):
        check = check_gradients(proto, feeds=feeds)
        assert check.ok
        assert [error.tensor for error in check.errors] == ["s"]
    session = InferenceSession(proto.SerializeToString())
    assert [v.name for v in session.get_inputs()] == ["x"]
    assert [v.name for v in session.get_overridable_initializers()] == ["s"]
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.maximum(x, 0))


def test_a_size_of_minus_one_is_free() -> None:
    proto = parsed("g (float[2,3] x) => (float[2,3] y) { y = Relu (x) }")
    for info in (*proto.graph.input, *proto.graph.output):
        info.type.tensor_type.shape.dim[0].dim_value = -1
    model = load(proto)
    assert not isinstance(model.graph.inputs[0].shape[0], int)
    (y,) = run(to_proto(model).SerializeToString(), {"x": np.ones((5, 3), np.float32)})
    assert y.shape == (5, 3)


@pytest.mark.parametrize(
    ("grow", "rows"), [("Mul ({0}, {0})", 30), ("Concat<axis=0>({0}, {0})", 22)]
)
def test_a_doubling_chain_of_shapes_ends(grow: str, rows: int) -> None:
    """As trees these have 2^30 and 2^22 leaves."""
    lines = [f"m{i + 1} = {grow.format(f'm{i}')}" for i in range(rows)]
    proto = parsed(
        "g (float[N,3] x) => (float[A,B] y) <int64[1] i0 = {0}, int64[1] minus = {-1}> {"
        f" s = Shape (x)  m0 = Gather (s, i0)  {'  '.join(lines)}"
        f"  c = Concat <axis = 0> (minus, m{rows})  r = Reshape (x, c)  y = Relu (r) }}"
    )
    for level in (0, 3):
        model = load(proto)
        rewrite.optimize(model, level=level)
        assert to_proto(inline(model)).graph.node


def test_a_branch_that_the_sizes_never_take_is_left_alone(
    cli: Cli, tmp_path: Path, saved: Save
) -> None:
    """As in silero_vad: the sizes fit one of the sample rates, and inference fails in the other."""
    proto = parsed("""g (float[B,N] x, bool fast) => (float[P,Q] y)
        <int64[2] a = {-1,4}, int64[2] b = {-1,3}> {
          y = If (fast) <then_branch = t () => (o) { o = Reshape (x, a) },
                         else_branch = e () => (o) { p = Reshape (x, b)  o = Neg (p) }> }""")
    path, out = saved(proto), tmp_path / "o.onnx"
    result = cli("optimize", path, "--input-shapes", "x:2,4", "--no-check", "-o", out)
    assert result.code == 0
    assert "the given sizes are not written" in result.out
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(run(out.read_bytes(), {"x": x, "fast": np.array(True)})[0], x)


# ---- functions -----------------------------------------------------------------------------------


def doubling(depth: int) -> onnx.ModelProto:
    """A function that calls another twice, `depth` times over: 2^depth nodes."""
    function = '<domain: "loc", opset_import: ["" : 21, "loc" : 1]> '
    calls = [
        f"{function} f{i} (a) => (b) {{ t = loc.f{i + 1} (a)  b = loc.f{i + 1} (t) }}"
        for i in range(depth)
    ]
    return parsed(
        '<ir_version: 10, opset_import: ["" : 21, "loc" : 1]> g (float[3] x) => (float[3] y) '
        f"{{ y = loc.f0 (x) }} {' '.join(calls)} {function} f{depth} (a) => (b) {{ b = Neg (a) }}"
    )


def test_functions_that_double_are_written_out() -> None:
    model = load(doubling(10))
    assert len(model.graph) == 1024
    names = [v.name for node in model.graph for v in node.outputs]
    assert len(set(names)) == 1024
    x = np.array([1, -2, 3], np.float32)
    np.testing.assert_array_equal(run(to_proto(model).SerializeToString(), {"x": x})[0], x)


def test_functions_that_double_without_end_are_refused() -> None:
    with pytest.raises(
        ModelError, match=rf"function 'loc\.f\d+' becomes \d+ nodes, of which {MAX_NODES} "
    ):
        load(doubling(26))


FUNCTIONS = {
    # a function that returns what it was given, twice, and leaves an input out
    "passes_through": """g (float[3] x) => (float[3] y, float[3] z) { y, z = loc.f (x) }
        <domain: "loc", opset_import: ["" : 21]> f (a, b) => (a, c) { c = Relu (a) }""",
    # attributes given, left out, and passed on; a body in a body
    "attributes": """g (float[3] x) => (float[3] y) { y = loc.f <k: float = 0.5> (x) }
        <domain: "loc", opset_import: ["" : 21, "loc" : 1]>
        f <k> (a) => (b) { c = loc.h <alpha: float = @k> (a)  d = loc.h (c)  b = loc.h (d) }
        <domain: "loc", opset_import: ["" : 21]>
        h <alpha> (a) => (b) { b = LeakyRelu <alpha: float = @alpha> (a) }""",
    "subgraph": """g (float[3] x, bool c) => (float[3] y) { t = Neg (x)  y = loc.f (x, c) }
        <domain: "loc", opset_import: ["" : 21]>
        f (a, c) => (b) { t = Abs (a)
          b = If (c) <then_branch = p () => (o) { o = Add (t, a) },
                      else_branch = q () => (o) { t2 = Exp (a)  o = Add (t2, t) }> }""",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_written_out(name: str) -> None:
    body = FUNCTIONS[name]
    text = f'<ir_version: 10, opset_import: ["" : 21, "loc" : 1]> {body}'
    proto = parsed(text)
    feeds: dict[str, Any] = {"x": np.array([1, -2, np.nan], np.float32)}
    if name == "subgraph":
        for c in (True, False):
            same(proto, {**feeds, "c": np.array(c)})
        return
    if name == "passes_through":  # onnxruntime refuses the file as it is
        model = load(proto)
        y, z = run(to_proto(model).SerializeToString(), feeds)
        np.testing.assert_array_equal(y, feeds["x"])
        np.testing.assert_array_equal(z, np.maximum(feeds["x"], 0))
        return
    same(proto, feeds)


# ---- other domains -------------------------------------------------------------------------------


def opaque_model() -> onnx.ModelProto:
    return parsed("""<ir_version: 8, opset_import: ["" : 17, "com.nobody" : 3]>
        g (float[N,4] x) => (float y) <float[4] s = {1,1,1,1}, float[4] b = {0,0,0,0}> {
          a = Identity (x)
          [one] c = com.nobody.Foo <alpha = 1.5> (a)
          [two] d = com.nobody.Foo <alpha = 1.5> (a)
          e = Add (c, d)
          f = com.nobody.Softmax (e)
          h = com.nobody.LayerNormalization (f, s, b)
          y = Relu (h)
        }""")


def test_a_node_of_an_unknown_domain_stays(cli: Cli, tmp_path: Path, saved: Save) -> None:
    for level in range(4):
        model = load(opaque_model())
        rewrite.optimize(model, level=level)
        foreign = [n.op_type for n in model.graph if n.domain == "com.nobody"]
        assert foreign == ["Foo", "Foo", "Softmax", "LayerNormalization"]
        assert "Identity" not in [n.op_type for n in model.graph]
    path = saved(opaque_model(), "m.onnx")
    assert "node 'one' (com.nobody.Foo): onnxruntime has no such operator" in cli.fails(
        1, "optimize", path
    )
    assert cli("optimize", path, "--no-check").code == 0
    written = onnx.load(tmp_path / "m.fused.onnx")
    assert {o.domain: o.version for o in written.opset_import}["com.nobody"] == 3
    cli.line(1, "run", tmp_path / "m.fused.onnx")


def classifier() -> onnx.ModelProto:
    """What scikit-learn's converter writes: a scaler, a linear model, a sequence of maps."""
    return parsed("""<ir_version: 8, opset_import: ["" : 15, "ai.onnx.ml" : 3]>
        g (float[N,3] x) => (int64[N] label, seq(map(int64, float)) maps) {
          n = ai.onnx.ml.Scaler <offset = [0.0, 1.0, 2.0], scale = [1.0, 2.0, 3.0]> (x)
          label, p = ai.onnx.ml.LinearClassifier <
            coefficients = [1.0, 2.0, -1.0, 0.5, 0.1, 0.2], intercepts = [0.1, -0.1],
            classlabels_ints = [0, 1], post_transform = "SOFTMAX"> (n)
          maps = ai.onnx.ml.ZipMap <classlabels_int64s = [0, 1]> (p) }""")


def test_a_pipeline_of_scikit_learn(cli: Cli, tmp_path: Path, saved: Save) -> None:
    proto = classifier()
    same(proto, {"x": np.array([[1, 2, 3], [-1, 0.5, 2]], np.float32)})
    path = saved(proto, "m.onnx")
    assert cli("optimize", path).code == 0
    written = onnx.load(tmp_path / "m.fused.onnx")
    assert written.graph.output[1].type == proto.graph.output[1].type
    assert cli("run", path).code == 0
    assert "output 'maps' is a list" in cli.line(1, "run", path, "-o", tmp_path / "out.npz")


# ---- refused -------------------------------------------------------------------------------------

REFUSED = table(globals())("""
constant_without_a_value:
  g (float[2,3] x) => (float[2,3] y) { [c] s = Constant () y = Add (x, s) }
  -> node 'c': a Constant has one attribute, this has 0
split_of_fewer_parts:
  g (float[3,8] x) => (float[3,4] y) { [n] y, z = Split <axis = 1, num_outputs = 1> (x) }
  -> node 'n': num_outputs is 1, but Split has 2 outputs
stash_type:
  g (float[3,8] x, float[8] s) => (float[3,8] y)
  { [n] y = LayerNormalization <stash_type = 99> (x, s) }
  -> node 'n' (LayerNormalization): stash_type is 99, which is no element type
stash_type_of_no_number:
  g (float[3,8] x, float[8] s) => (float[3,8] y)
  { [n] y = LayerNormalization <stash_type = 2> (x, s) }
  -> node 'n' (LayerNormalization): stash_type is 2 (uint8), which is no floating-point type
cast:
  g (float[3] x) => (float[3] y) { [n] y = Cast <to = 65536> (x) }
  -> node 'n' (Cast): to is 65536, which is no element type
cast_to_nothing:
  g (float[3] x) => (float[3] y) { [n] y = Cast <to = 0> (x) }
  -> node 'n' (Cast): to is 0, which is no element type
pads_of_a_kernel:
  g (float[1,1,8] x) => (float[1,1,9] y)
  { [n] y = MaxPool <kernel_shape = [2], pads = [2, 0], auto_pad = "SAME_UPPER"> (x) }
  -> node 'n' (MaxPool): pads are [2, 0], but each must be smaller than the kernel, which is [2]
unimported:
  g (float[3] x) => (float[3] y) { [n] y = com.nobody.Foo (x) }
  -> node 'n': the model does not import its domain 'com.nobody'
# the specification's checker sees it first
recursion: ""
  <ir_version: 10, opset_import: ["" : 21, "loc" : 1]> g (float[3] x) => (float[3] y)
  { y = loc.f (x) } <domain: "loc", opset_import: ["" : 21, "loc" : 1]> f (a) => (b)
  { b = loc.f (a) }
# onnxruntime sees it: the scale of a BatchNormalization has one axis
statistics of channels: ""
  g (float[1,2,3,3] x) => (float[1,2,1,1] y) <float[2,2,3,3] w, float[2] b = {1,2}>
  { c = Conv (x, w) y = BatchNormalization (c, w, b, b, b) }
""") | {
    "control_characters": (
        'g (float[3] x) => (float[3] y) { ["\x1b[31mEVIL\x1b]0;pwn\x07"] y = No (x) }',
        r"node '\x1b[31mEVIL\x1b]0;pwn\x07': ai.onnx opset 21 has no operator 'No'",
    ),
}


@pytest.mark.parametrize("command", [("optimize",), ("optimize", "--no-check"), ("validate",)])
@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_file_is_refused_in_one_line(
    cli: Cli, saved: Save, name: str, command: tuple[str, ...]
) -> None:
    text, sentence = REFUSED[name]
    path = saved(parsed(text))
    err = cli.line(1, *command, path)
    assert str(path) in err
    assert sentence in err
    assert "internal error" not in err
    assert "\x1b" not in err


def test_shapes_that_contradict_a_pattern_name_the_node(cli: Cli, saved: Save) -> None:
    """A Transpose whose perm is longer than the rank that the file states."""
    proto = parsed(
        "g (float[B,S,8] x) => (y) <float one = {1}, float[2,2] k> {"
        "  k = Reshape (x, z)  t = Transpose <perm = [0,1,3,2]> (k)  s = MatMul (x, t)"
        "  p = Softmax (s)  y = MatMul (p, x) }".replace("Reshape (x, z)", "Identity (x)")
    )
    assert "internal error" not in cli.line(1, "optimize", saved(proto))


def test_control_characters_do_not_reach_a_terminal(cli: Cli, saved: Save) -> None:
    proto = parsed("g (float[3] x) => (float[3] y) { y = Relu (x) }")
    proto.producer_name = "\x1b]0;pwn\x07\x1b[2J\x9b31m"
    proto.graph.node[0].name = proto.graph.output[0].name = "\x1b[2J"
    proto.graph.node[0].output[0] = "\x1b[2J"
    path = saved(proto)
    for command in ("inspect", "optimize", "run"):
        out = cli.done(command, path)
        assert not set(out) & {"\x1b", "\x07", "\x9b"}
        assert "\\x1b[2J" in out


def test_the_gradient_of_gather_takes_32_bit_indices() -> None:
    from onnx_fuse import gradient

    for ends, axis in (("float[5,3]", 0), ("float[3,5]", 1)):
        proto = parsed(f"g ({ends} w, int32[2] i) => (y) {{ y = Gather <axis = {axis}> (w, i) }}")
        proto.graph.output[0].type.tensor_type.elem_type = TensorProto.FLOAT
        graph = gradient(proto, ["w"])
        assert isinstance(graph, onnx.ModelProto)
        shape = (5, 3) if axis == 0 else (3, 5)
        dy = np.ones((2, 3) if axis == 0 else (3, 2), np.float32)
        feeds = {"w": np.zeros(shape, np.float32), "i": np.array([4, 4], np.int32), "y.grad": dy}
        found = dict(zip([o.name for o in graph.graph.output],
                         run(graph.SerializeToString(), feeds), strict=True))  # fmt: skip
        expected = np.zeros(shape, np.float32)
        expected[(4,) if axis == 0 else (slice(None), 4)] = 2
        np.testing.assert_array_equal(found["w.grad"], expected)


@pytest.mark.parametrize(
    ("amounts", "axes"),
    [
        ("int64[1,6] {0, 0, 0, 0, 2, 0}", ""),
        ("int64[4] {0, 0, 2, 0}", ""),
        ("int64[8] {0, 0, 0, 0, 0, 2, 0, 0}", ""),
        ("int64[2] {0, 2}", ", , axes"),
    ],
)
def test_amounts_that_no_pad_may_have_are_left_to_the_check(amounts: str, axes: str) -> None:
    """Two for each axis, in one dimension; nothing may take others apart before that is said."""
    text = f"""agraph (float[2,6,8] x) => (float[Q,P,8] y)
    <int64[1] axes = {{3}}, int64[1] s = {{1}}, int64[1] e = {{4}}>
    {{ by = Constant <value = {amounts}> () p = Pad (x, by{axes})
      t = Transpose <perm = [1, 0, 2]> (p) u = Slice (t, s, e) y = Abs (u) }}"""
    model = text_model(text)
    rewrite.optimize(model)
    assert "Pad" in {node.op_type for node in model.graph}


# ---- where onnxruntime answers otherwise than ONNX's inference, or NumPy ------------------------


OTHERWISE = {
    "the size of a Resize is a product of float32": """
        g (float[1,1,20,30] x) => (float[] y) <float[4] sc = {1,1,1.3,1.3}>
        { r = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric"> (x, "", sc)
          s = Shape (r)  k = ConstantOfShape (s)  y = Add (r, k) }""",
    "the size that a file declares is of onnxruntime's, and its own inference is not": """
        g (float[1,1,20,30] x) => (float[] y) <float[4] sc = {1,1,1.3,1.3}, float[1,1,26,39] r>
        { r = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric"> (x, "", sc)
          s = Shape (r)  k = ConstantOfShape (s)  y = Add (r, k) }""",
    "windows that begin beyond the image are dropped": """
        g (float[1,1,8,8] x) => (float[] y, int64[] s)
        { y = MaxPool <kernel_shape = [1,1], strides = [2,2], ceil_mode = 1> (x)
          s = Shape (y) }""",
    "sizes in a vector keep the axis of a SplitToSequence": """
        g (float[N,3] x) => (float[] y) <int64[3] sp = {1,1,1}, int64 i = {-1}>
        { s = SplitToSequence <axis = 1, keepdims = 0> (x, sp)  a = SequenceAt (s, i)
          y = Neg (a) }""",
    "the parts of a SplitToSequence are of several lengths": """
        g (float[N,3] x) => (float[] y) <int64[2] sp = {1,2}, int64 i = {-1}>
        { s = SplitToSequence <axis = 1, keepdims = 0> (x, sp)  a = SequenceAt (s, i)
          y = Neg (a) }""",
    "the largest end of a backward Slice is the front": """
        g (float[2,3,4] x) => (int64[] y, float[] z)
        <int64[1] s = {2147483647}, int64[1] e = {9223372036854775807}, int64[1] a = {0},
         int64[1] t = {-1}>
        { h = Shape (x)  r = Slice (h, s, e, a, t)  y = Add (r, r)  z = Slice (x, s, e, a, t) }""",
    "folded weights that are outputs": """
        g (float[1,2,3,3] x) => (float[] y, float[2,2,1,1] w, float[2] b)
        <float[2,2,1,1] w = {1,2,3,4}, float[2] b = {1,2}, float[2] ga = {2,3}, float[2] be = {0,1},
         float[2] mu = {0,1}, float[2] va = {3,8}>
        { c = Conv (x, w, b)  y = BatchNormalization <epsilon = 1.0> (c, ga, be, mu, va) }""",
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_the_answer_is_onnxruntimes(case):
    proto = parsed(OTHERWISE[case])
    shape = [d.dim_value or 2 for d in proto.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(0).integers(-4, 5, shape).astype(np.float32)
    same(proto, {"x": x})


# ---- names of sizes ------------------------------------------------------------------------------

# Inputs of which onnxruntime takes other sizes than their names say, and what reads them.
CONTRADICTED = table(globals(), at=1)("""
expand: "float[N,4] x, float[N,4] z", {"x": (1, 4), "z": (3, 4)}
  s = Shape (z) e = Expand (x, s) y = Neg (e)
square: "float[N,N] x", {"x": (2, 3)}
  s = Shape (x) t = Transpose (x) r = Reshape (t, s) y = Neg (r)
einsum: "float[B,H,S,8] q, float[B,H,T,8] k, float[B,H,T,8] v", {"q": (2, 3, 4, 8), "k": (2, 3, 1,
8), "v": (2, 3, 5, 8)}
  s = Einsum <equation = "bhid, bhjd -> bhij"> (q, k) p = Softmax (s)
  y = Einsum <equation = "bhij, bhjd -> bhid"> (p, v)
windows: "float[B,3,4,8] q, float[B,3,5,8] k, float[B,3,5,6] v, float[4,5] bias", {"q": (1, 3, 4,
8), "k": (2, 3, 5, 8), "v": (2, 3, 5, 6), "bias": (4, 5)}
  t = Transpose <perm = [0,1,3,2]> (k) s = MatMul (q, t) z = Add (s, bias) p = Softmax (z)
  y = MatMul (p, v)
grouped: "float[B,4,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v", {"q": (2, 4, 3, 8), "k": (2, 2, 5,
8), "v": (2, 2, 1, 8)}
  i = Constant <value_ints = [2]> () f = Constant <value_ints = [4]> ()
  d = Constant <value_ints = [8]> () b = Shape <end = 1> (k) t = Shape <start = 2, end = 3> (k)
  five = Concat <axis = 0> (b, i, i, t, d) four = Concat <axis = 0> (b, f, t, d)
  k5 = Unsqueeze (k, i) ke = Expand (k5, five) kr = Reshape (ke, four) v5 = Unsqueeze (v, i)
  ve = Expand (v5, five) vr = Reshape (ve, four) kt = Transpose <perm = [0,1,3,2]> (kr)
  s = MatMul (q, kt) p = Softmax (s) y = MatMul (p, vr)
""")


@pytest.mark.parametrize("name", CONTRADICTED)
def test_equal_names_of_sizes_are_no_proof(name: str) -> None:
    inputs, body, shapes = CONTRADICTED[name]
    feeds = normal(shapes)
    proto = parsed(f"g ({inputs}) => (float y) {{ {body} }}")
    del proto.graph.output[0].type.tensor_type.shape.dim[:]
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    expected = run(proto.SerializeToString(), feeds)[0]
    for level in range(4):
        model = load(proto)
        rewrite.optimize(model, level=level)
        assert [str(v.shape) for v in model.graph.inputs] == [
            str(v.shape) for v in load(proto).graph.inputs
        ]
        for candidate in (model, inline(model)):
            [y] = run(to_proto(candidate).SerializeToString(), feeds)
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_a_check_feeds_unequal_sizes_of_one_name() -> None:
    inputs, body, _ = CONTRADICTED["expand"]
    original = parsed(f"g ({inputs}) => (float[?,?] y) {{ {body} }}")
    believed = parsed(f"g ({inputs}) => (float[?,?] y) {{ y = Neg (x) }}")
    check = validate(believed, original)
    assert not check.ok
    assert check.worst.where == "y: float32[1, 4], not float32[2, 4]"
    assert validate(original).ok

"""Gradients through bodies, of states that have names for sizes; and what has none."""

import numpy as np
import onnx
import onnx_ir
import pytest
from support import parsed, table

from onnx_fuse import autodiff
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime import ort
from onnx_fuse.validation import check_gradients


@pytest.mark.parametrize("sizes", ["[P] [Q]", "[P] [P]", "[2] [2]", ""])
def test_a_state_that_grows_is_refused(sizes):
    """Whatever the file says of it: sizes of two names, of one name, one number, or nothing."""
    before, after = (f"float{size}" for size in sizes.split()) if sizes else ("", "")
    text = f"""agraph (float[N] x, int64 n) => (float[M] y) {{
        y = Loop (n, , x) <body = b (int64 i, bool c, {before} s) => (bool d, {after} t) {{
            d = Identity (c)
            t = Concat <axis = 0> (s, x)
        }}>
    }}"""
    with pytest.raises(ModelError, match=r"\(Loop\): its state 'x' changes its shape from step"):
        autodiff.gradient(load(text_model(text)), wrt=["x"])


REFUSED = table(globals())(r"""
a body that is run for each element:
  g (float[3,4] x, float[4,4] w) => (float[3,4] y) { s = SplitToSequence <axis = 0> (x)
  o = SequenceMap <body = b (float[M,4] e) => (float[M,4] r) { r = MatMul (e, w) }> (s)
  y = ConcatFromSequence <axis = 0> (o) }
  -> 'w' has no gradient: .* \(SequenceMap\): sequences have no gradient
an output of maps:
  g (float[2,2] w) => (seq(map(int64, float)) y)
  { y = ai.onnx.ml.ZipMap <classlabels_int64s = [3, 5]> (w) }
  -> output 'y' is not a tensor: ZipMap '.*', its node, has no gradient
a slice of as many axes as a vector is long:
  g (float[2,3] w, int64[N] s) => (float[A,B] y) { y = Slice (w, s, s) }
  -> \(Slice\): neither its axes nor the number of its starts are known
codes of 8 bits:
  g (float[N,2] x, float8e4m3fn[2,2] w) => (float[N,2] y) <float s = {2}>
  { v = DequantizeLinear (w, s) y = MatMul (x, v) }
  -> 'w' is of type FLOAT8E4M3FN: it has no gradient
a branch that draws:
  g (bool c, float[3] w) => (float[3] y) { y = If (c) <then_branch = t () => (float[3] a)
  { r = RandomNormalLike (w) a = Mul (w, r) }, else_branch = e () => (float[3] b)
  { b = Identity (w) }> }
  -> 'y' \(If\): the backward computes its body again and would draw other random numbers
steps that drop:
  g (float[3] w, int64 n) => (float[] y)
  { , h = Loop (n, , w) <body = b (int64 i, bool c, float[3] s) => (bool d, float[3] t, float[3] u)
  { d = Identity (c) on = Constant <value = bool {1}> () u = Dropout (s, , on) t = Mul (u, w) }>
  y = ReduceSum <keepdims = 0> (h) }
  -> \(Loop\): the backward computes its body again
""")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_number_has_no_gradient(name):
    text, said = REFUSED[name]
    head = '<ir_version: 10, opset_import: ["" : 21, "ai.onnx.ml" : 3]>'
    with pytest.raises((ModelError, UsageError), match=said):
        autodiff.gradient(onnx.parser.parse_model(f"{head} {text}"), wrt=["w"])


def test_a_gradient_that_reads_no_drawn_number_passes_a_body():
    model = parsed("""g (bool c, float[3] x) => (float[3] y) { y = If (c) <
        then_branch = t () => (float[3] a) { r = RandomNormalLike (x) z = Dropout (x)
                                             d = Mul (z, z) a = Add (d, r) },
        else_branch = e () => (float[3] b) { b = Identity (x) }> }""")
    made = ort.session(autodiff.gradient(model, wrt=["x"]))
    x, dy = np.float32([1, 2, 3]), np.float32([1, 1, 2])
    (dx,) = made.run(["x.grad"], {"c": np.array(True), "x": x, "y.grad": dy})
    np.testing.assert_allclose(dx, 2 * x * dy)


def test_codes_of_8_bits_are_no_parameters():
    model = text_model("""<ir_version: 10, opset_import: ["" : 21]>
      agraph (float[N,2] x) => (float[N,2] y, float8e4m3fn[2,2] c) <float[2] s = {2, 3}> {
        k = Constant <value = float[2,2] {1, 2, 3, 4}> () c = Cast <to = 17> (k)
        w = DequantizeLinear <axis = 1> (c, s) y = MatMul (x, w) }""")
    made = autodiff.gradient(model)
    assert {v.name for v in made.graph.inputs} == {"x", "y.grad"}
    assert {v.name for v in made.graph.outputs} >= {"s.grad"}
    ort.session(made)


def test_a_loop_whose_state_has_two_names_for_a_size():
    # As PyTorch's scripted loops are exported; behind it a norm, which needs the state's rank.
    text = """agraph (float[T,B,3] x) => (float[M,3] y)
      <float[3,3] w = {0.3,-0.2,0.1,0.4,0.2,-0.5,0.1,0.3,-0.1}, float[3] scale = {1,2,0.5}> {
        at = Constant <value_int = 0> () on = Constant <value = bool {1}> ()
        sizes = Shape (x) trips = Gather (sizes, at)
        first = Gather (x, at) shape = Shape (first) start = ConstantOfShape (shape)
        h = Loop (trips, on, start) <body = b (int64 i, bool c, float[B,3] s)
            => (bool d, float[Tanh_dim_0, Tanh_dim_1] t) {
                d = Identity (on)
                p = MatMul (s, w) row = Gather (x, i) z = Add (p, row)
                t = Tanh (z)
            }>
        y = LayerNormalization (h, scale)
    }"""
    check = check_gradients(text_model(text), dims={"T": 4, "B": 2})
    assert [(e.tensor, e.ok) for e in check.errors] == [("w", True), ("scale", True)]
    assert all(abs(e.expected) > 1e-3 for e in check.errors)


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        ("t = Softmax (s)", ["B", 4]),
        ("u = Transpose (s)  t = MatMul (s, u)", [None, None]),
        ("u = Unsqueeze (s, axis)  t = ReduceSum <keepdims = 0> (u, axis)", [None, None]),
        ("t = Unsqueeze (s, axis)", None),
        ("u = com.example.Twice (s)  t = Add (u, x)", None),
        ("u = com.example.Twice (s)  t = Exp (x)", ["B", 4]),
        ("u = MatMul (s, axis)  t = Reshape (u, u)", None),
        ("u = Shape (s)  t = Expand (x, u)", [None, None]),
    ],
)
def test_states_of_a_body_without_types_have_what_the_body_keeps(step, shape):
    """Exporters of scripts write no types there; what follows the Loop then had no rank."""
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 21, "com.example" : 1]>
        g (float16[B,4] x, int64 n) => (float16[A] y) <int64[1] axis = {{0}}> {{
          h = Loop (n, , x) <body = b (int64 i, bool c, float16 s) => (bool d, float16 t)
            {{ d = Identity (c)  {step} }}>  y = Softmax (h) }}""")
    body = proto.graph.node[0].attribute[0].g
    for value in (body.input[2], body.output[1]):
        value.ClearField("type")
    model = load(proto)
    infer_shapes(model)
    loop = model.graph.node(0)
    assert loop.outputs[0].dtype == onnx_ir.DataType.FLOAT16
    before = loop.attributes["body"].as_graph().inputs[2].shape
    assert (before is None) == (shape is None)
    if shape is not None:
        names = [d if isinstance(d, int) else d.value for d in before]
        assert [n for n, want in zip(names, shape, strict=True) if want] == [d for d in shape if d]
        assert len(loop.outputs[0].shape) == 2


def test_bodies_know_the_axes_and_sizes_that_stand_outside():
    text = """agraph (float[B,3,4] x, bool flag) => (float[M] y) <int64[1] axes = {1}> {
        last = Constant <value = int64[1] {-1}> ()
        h = If (flag) <
          then_branch = f () => (float t) { u = Unsqueeze (x, axes)  t = ReduceSum (u, last) },
          else_branch = g () => (float e) {
            one = Constant <value = bool {1}> ()
            e = If (one) <
              then_branch = p () => (float v) { w = Unsqueeze (x, last)  v = ReduceMax (w, axes) },
              else_branch = q () => (float r) { r = Unsqueeze (x, last) }> }>
        y = Softmax (h) }"""
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 21]> {text}')
    branches = [a.g for a in proto.graph.node[1].attribute]
    branches += [a.g for a in branches[1].node[1].attribute]
    for branch in branches:
        branch.output[0].type.tensor_type.ClearField("shape")
    model = load(proto)
    infer_shapes(model)
    assert len(model.graph.node(1).outputs[0].shape) == 4


def test_heads_of_an_unknown_size_are_not_empty():
    model = text_model("""<ir_version: 10, opset_import: ["" : 23]>
        agraph (float[B,S,Q] q, float[B,S,K] k, float[B,S,V] v) => (float[B,S,H] y) {
          h = Attention <q_num_heads = 2, kv_num_heads = 2> (q, k, v)  y = Neg (h) }""")
    infer_shapes(model)
    assert 0 not in model.graph.node(0).outputs[0].shape

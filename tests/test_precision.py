"""lower_precision: graphs in 16 bits, with float32 where it is needed; no GPU."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import pytest
from lowering import lowered
from onnx.reference import ReferenceEvaluator
from support import ENCODER, run, stock

import onnx_fuse as of
from onnx_fuse import autodiff
from onnx_fuse.importer.save import inline, to_proto
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.build import text_model
from onnx_fuse.program.problems import IntegerConv
from onnx_fuse.rewrite.precision import lower_precision
from onnx_fuse.validation.compare import COMPUTED

DATA = Path(__file__).parent / "data"
STORED = ("t5_encoder__ts17", "vit__dynamo", "resnet_train__ts17")


def narrowed(text, dtype, **options):
    """A graph in 16 bits."""
    model = text_model(text)
    infer_shapes(model)
    lower_precision(model, onnx_ir.DataType[dtype], **options)
    return model


@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16"])
def test_lower_precision_leaves_the_model_it_was_cloned_from(dtype):
    text = """agraph (float[2,4] x) => (float[2,3] y) <float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}>
    { a = MatMul(x, w) y = Exp(a) }"""
    model = text_model(text)
    infer_shapes(model)
    half = model.clone()
    lower_precision(half, onnx_ir.DataType[dtype])
    matmul = next(c for c in lowered(half).calls if "MatMul" in c.kernel)
    assert {t.dtype for _, t in (*matmul.reads, *matmul.writes)} == {dtype.lower()}
    assert {v.dtype for n in model.graph for v in n.outputs} == {onnx_ir.DataType.FLOAT}
    assert [v.dtype for v in half.graph.outputs] == [onnx_ir.DataType.FLOAT]


@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16"])
def test_ends_keep_their_types_in_16_bits(dtype):
    """Those that had 16 bits too, as a cache has."""
    kind, number = dtype.lower(), onnx_ir.DataType[dtype].value
    text = f"""agraph ({kind}[2,4] p, float[2,4] x) => ({kind}[4,4] q, float[4,4] y)
    {{ h = Cast<to={number}>(x) q = Concat<axis=0>(p, h) w = Cast<to=1>(q) y = Exp(w) }}"""
    model = narrowed(text, dtype)
    kinds = [onnx_ir.DataType[dtype], onnx_ir.DataType.FLOAT]
    for ends in (model.graph.inputs, model.graph.outputs):
        assert [v.dtype for v in ends] == kinds


@pytest.mark.parametrize("initializer", [False, True])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16"])
def test_a_mask_of_the_lowest_float_stays_finite_in_16_bits(dtype, masters, initializer):
    low = "low = Constant <value = float {-3.4028234e38}> ()"
    text = f"""agraph (float[2,4] keep, float[2,4] s) => (float[2,4] y)
    {"<float low = {-3.4028234e38}>" if initializer else ""}
    {{ one = Constant <value_float = 1.0> () {"" if initializer else low}
      gone = Sub(one, keep) mask = Mul(gone, low) t = Add(s, mask) y = Softmax(t) }}"""
    model = narrowed(text, dtype, masters=masters)
    keep, s = np.float32([[1, 1, 0, 0], [1, 1, 1, 1]]), np.zeros((2, 4), np.float32)
    (y,) = ReferenceEvaluator(to_proto(model)).run(None, {"keep": keep, "s": s})
    np.testing.assert_array_equal(y, [[0.5, 0.5, 0, 0], [0.25] * 4])


@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16"])
def test_what_an_opset_has_in_wider_types_only_trains_between_casts(dtype):
    text = """agraph (float[3,4] x) => (float[3,4] y, float[3,4] c)
    <float[4,4] w = {1,0,0,2,0,1,0,0,0,0,1,0,0,0,0,1}>
    { a = Celu<alpha = 2.0>(x) b = Celu(a) m = MatMul(b, w) c = Celu(m) y = Add(m, c) }"""
    model, x = text_model(text), np.float32([[-1, 2, 0.5, -4], [1, 1, 1, 1], [0, -8, 8, 0.25]])
    infer_shapes(model)
    want = ReferenceEvaluator(to_proto(model)).run(None, {"x": x})
    lower_precision(model, onnx_ir.DataType[dtype], masters=True)
    kinds = [(n.op_type, n.inputs[0].dtype.name) for n in model.graph if n.op_type != "Cast"]
    assert kinds == [("Celu", "FLOAT")] * 2 + [("MatMul", dtype), ("Celu", "FLOAT"), ("Add", dtype)]
    found = ReferenceEvaluator(to_proto(model)).run(None, {"x": x})
    for y, exact in zip(found, want, strict=True):
        np.testing.assert_allclose(y, exact, rtol=2**-7, atol=2**-7)  # bfloat16 has 8 bits
    onnx.checker.check_model(to_proto(autodiff.gradient(model)), full_check=True)


@pytest.mark.parametrize("masters", [False, True])
def test_what_stays_float32_is_cast_for_others_that_read_it(masters):
    """Equal initializers are one: a GroupNormalization may read a BatchNormalization's scale.

    And the sizes a Resize reads are worked out in float32.
    """
    text = """agraph (float[2,4,3,1] x, float s) => (float[2,4,P,1] y)
    <float[4] g = {1,2,3,4}, float[4] b = {4,3,2,1}, float[2] pair = {1,1}, float[1] last = {1}>
    { n = BatchNormalization(x, g, b, b, g) m = GroupNormalization<num_groups = 2>(n, g, b)
      t = Add(s, last) z = Concat<axis = 0>(pair, t, last) y = Resize<mode = "linear">(m, , z) }"""
    model = narrowed(text, "BFLOAT16", masters=masters)
    onnx.checker.check_model(to_proto(model), full_check=True)
    assert {n.inputs[0].dtype.name for n in model.graph if n.op_type in ("Add", "Concat")} == {
        "FLOAT"
    }


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16"])
def test_angles_of_positions_stay_float32(dtype, masters):
    """In 16 bits the angle of position 2000 would be off by whole turns; one of data may be."""
    text = """agraph (float[B,T,4] x) => (float[B,T,4] y) <int64 zero = {0}, int64 one = {1},
    int64[1] axis = {0}, int64[1] last = {1}, float[4] rates = {1, 0.3, 0.1, 0.03}>
    { s = Shape<start=1, end=2>(x) n = Squeeze(s, axis) k = Range(zero, n, one) f = Cast<to=1>(k)
      u = Unsqueeze(f, last) a = Mul(u, rates) c = Cos(a) z = Sin(x) p = Mul(z, c) y = Tanh(p) }"""
    model = narrowed(text, dtype, masters=masters)
    kinds = {node.op_type: node.inputs[0].dtype for node in model.graph if node.op_type != "Cast"}
    assert kinds["Cos"] == onnx_ir.DataType.FLOAT
    assert kinds["Sin"] == kinds["Tanh"] == onnx_ir.DataType[dtype]


@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16"])
def test_what_stands_between_codes_stays_float32(dtype):
    """Their integers are the file's; others read a dequantized float of their own, in 16 bits."""
    rng = np.random.default_rng(0)
    bias, weight = (
        ",".join(map(str, a)) for a in (rng.normal(size=16), rng.integers(-127, 128, 256))
    )
    text = f"""agraph (float[2,16] x) => (float[2,16] y, float[2,16] z, int8[2,16] q)
    <int8 o = {{0}}, float s = {{0.1}}, float t = {{0.05}}, float u = {{0.02}},
     float[16] b = {{{bias}}}, int8[16,16] w = {{{weight}}}>
    {{ c = QuantizeLinear(x, s, o) d = DequantizeLinear(c, s, o) v = DequantizeLinear(w, u, o)
      m = MatMul(d, v) a = Add(m, b) r = Relu(a) q = QuantizeLinear(r, t, o)
      e = DequantizeLinear(q, t, o) p = MatMul(e, v) k = Add(p, d) l = Relu(k) y = Sigmoid(l)
      z = Neg(e) }}"""
    model = narrowed(text, dtype)
    types = {n.op_type + n.inputs[0].name: n.outputs[0].dtype.name for n in model.graph}
    assert {types[name] for name in ("MatMuld", "Addm", "Relua")} == {"FLOAT"}
    assert {types[name] for name in ("Addp", "Reluk", "Sigmoidl")} == {dtype}
    masters = narrowed(text, dtype, masters=True)
    assert {n.outputs[0].dtype.name for n in masters.graph if n.op_type == "Relu"} == {dtype}
    products = [c.problem for c in lowered(model).calls if isinstance(c.problem, IntegerConv)]
    types = [{step.dtype for step in product.tail.expression.steps} for product in products]
    assert [dtype.lower() in steps for steps in types] == [False, True]
    if dtype == "FLOAT16":
        x = rng.normal(size=(2, 16)).astype(np.float32)
        half = narrowed(text, dtype, stored=True)
        assert np.array_equal(*(stock(m).run(["q"], {"x": x})[0] for m in (text_model(text), half)))


TYPES_OF_THEIR_OWN = {
    "scales of codes": """(uint8[1,1,3,3] q, float[3] x) => (uint8[1,1,3,3] y, float[3] z)
    { s = Constant <value = float {0.5}> ()  o = Constant <value = uint8 {3}> ()
      w = Constant <value = uint8[1,1,1,1] {5}> ()
      y = QLinearConv (q, s, o, w, s, o, s, o)  z = Neg (x) }""",
    "boxes": """(float[1,2,4] x) => (int64[n,3] y)
    { b = Abs (x)  s = Constant <value = float[1,1,2] {0.5, 0.6}> ()
      k = Constant <value = int64[1] {2}> ()  y = NonMaxSuppression (b, s, k) }""",
    "a statistic": """(float[2,3] x) => (float[2,3] y, float[2,3] z)
    { h = Relu (x)  o = Constant <value = float[3] {1.0, 1.0, 1.0}> ()
      y, m = LayerNormalization (h, o)  z = Mul (m, h) }""",
    "a window": """(float[4] x) => (float[4] y)
    { n = Constant <value = int64 {4}> ()  w = HannWindow (n)  y = Mul (w, x) }""",
    "random numbers": """(float[4] x) => (float[4] y)
    { u = RandomUniform <shape = [4], low = 1.0, high = 1.0> ()  y = Mul (u, x) }""",
    "a sequence": """(float[2,4] x) => (float[2,4] y, float[n,m] z)
    { s = SplitToSequence <axis = 1, keepdims = 1> (x)  y = ConcatFromSequence <axis = 1> (s)
      e = SequenceEmpty ()  r = Relu (x)  t = SequenceInsert (e, r)
      i = Constant <value = int64 {0}> ()  u = SequenceAt (t, i)  z = Neg (u) }""",
    "an output that stands twice": """(float[2,4] x) => (float[2,4] y, float[2,4] y)
    { y = Sigmoid (x) }""",
    "a diagonal": """(int64[3,3] i, float[3,3] x) => (float[3,3] y)
    { e = EyeLike <dtype = 1> (i)  y = Mul (e, x) }""",
}


@pytest.mark.parametrize("name", TYPES_OF_THEIR_OWN)
def test_a_file_in_16_bits_casts_what_has_a_type_of_its_own(name):
    model = text_model("g " + TYPES_OF_THEIR_OWN[name])
    feeds = {
        v.name: np.resize([1.5, 0.25, 3, 2], v.shape.numpy()).astype(v.dtype.numpy())
        for v in model.graph.inputs
    }
    half = of.optimize(model, precision="fp16")
    for got, want in zip(run(half, feeds), run(model, feeds), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


def test_what_a_body_quantizes_is_in_16_bits():
    model = narrowed(
        """agraph (bool c, float[2,16] x) => (float[2,16] y) <int8 o = {0}, float s = {0.1}>
        { q = QuantizeLinear(x, s, o) d = DequantizeLinear(q, s, o) r = Relu(d)
          y = If (c) <then_branch = g () => (float[2,16] a)
                      { p = QuantizeLinear(r, s, o) a = DequantizeLinear(p, s, o) },
                      else_branch = h () => (float[2,16] b) { b = Identity(x) }> }""",
        "FLOAT16",
    )
    relu = next(n for n in model.graph if n.op_type == "Relu")
    assert relu.outputs[0].dtype == onnx_ir.DataType.FLOAT16


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "path", [ENCODER, *(DATA / f"{m}.onnx" for m in STORED)], ids=lambda p: p.stem
)
def test_a_file_in_16_bits_is_valid_and_near_the_original(path, precision):
    """T5 has a mask of float32's lowest, the others norms, attention and convolutions."""
    half, report = of.optimize(path, precision=precision, report=True)
    limit = COMPUTED[precision]
    if precision == "fp16":  # of bf16 graphs onnxruntime's CPU has no kernels: they run widened
        assert of.validate(half, path, rtol=limit.rtol, atol=limit.atol).ok
    onnx.checker.check_model(to_proto(inline(of.load(onnx_ir.from_proto(half)))), full_check=True)
    kind = {"fp16": onnx.TensorProto.FLOAT16, "bf16": onnx.TensorProto.BFLOAT16}[precision]
    assert sum(w.data_type == kind for w in half.graph.initializer) > 10
    assert half.ByteSize() < 0.75 * path.stat().st_size
    before = onnx.load(path)
    for ends in ("input", "output"):
        kinds = [
            [v.type.tensor_type.elem_type for v in getattr(m.graph, ends)] for m in (half, before)
        ]
        assert kinds[0] == kinds[1]
    assert report.before.total() >= report.after.total()


def test_a_graph_with_a_body_is_not_written_in_16_bits():
    text = """agraph (bool c, float[2] x) => (float[2] y) {
        y = If(c) <then_branch = g () => (float[2] a) { a = Neg(x) },
                   else_branch = h () => (float[2] b) { b = Abs(x) }> }"""
    with pytest.raises(of.ModelError, match="has a body of its own"):
        of.optimize(to_proto(text_model(text)), precision="fp16")
    with pytest.raises(of.UsageError, match="unknown precision of a file 'tf32'"):
        of.optimize(to_proto(text_model(text)), precision="tf32")

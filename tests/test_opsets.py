"""A node of an old opset and the same node brought up to the newest answer the same.

onnxruntime runs every opset from 7 on: it is asked for the node as it was written, and for what
`load` makes of it.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import Cli, assert_same, run, stock, table

from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import at_opset, inline, to_proto
from onnx_fuse.importer.upgrade import UPGRADES
from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.constants import CANONICAL_OPSET

RNG = np.random.default_rng(0)
AWKWARD = np.array(
    [np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-42, 3.4e38, -3.4e38, 0.5, 1.5, 2.5, -0.5], np.float32
)


# opset and graph. x is filled with awkward values, then normal ones; "s" are scales, "i" are
# indices. The graph's text says the rest.
ROWS = table(globals(), at=1)("""
# the matrix that Softmax, LogSoftmax and Hardmax took their input for
matrix of $op $v, $axis: $v; op in Softmax LogSoftmax Hardmax;
v, axis in 7 0 | 7 1 | 11 1 | 11 2 | 11 -1 | 11 -2 | 12 0
  (float[2,3,4] x) => (float[2,3,4] y) { y = $op <axis: int = $axis> (x) }
Hardmax: 11
  (float[2,3,4] x) => (float[2,3,4] y) { y = Hardmax (x) }
Softmax of open rows: 12
  (float[N,3,4] x) => (float[N,3,4] y) { y = Softmax (x) }
Softmax of nothing: 11
  (float[2,0,4] x) => (float[2,0,4] y) { y = Softmax (x) }
Softmax of open axes: 11
  (float[A,B,C,D] x) => (float[A,B,C,D] y) { y = Softmax <axis: int = 2> (x) }
# coordinates of Upsample and Resize
Upsample by $by, $mode: 7; mode in nearest linear; by in 2.0,2.0 1.0,3.0 1.7,2.3 1.5,1.0
  (float[1,2,4,6] x) => (float[1,2,H,W] y)
  { y = Upsample <mode: string = "$mode", scales: floats = [1.0,1.0,$by]> (x) }
$op by an input, $mode: $v; v, op in 9 Upsample | 10 Resize; mode in nearest linear
  (float[1,2,4,6] x, float[4] s) => (float[1,2,H,W] y) { y = $op <mode: string = "$mode"> (x, s) }
Resize by $by, $mode: 10; mode in nearest linear; by in 2,2 0.5,0.5 0.6,0.3 0.6,2.5 1.7,0.5 1,1
  (float[1,2,4,6] x) => (float[1,2,H,W] y) <float[4] c = {1,1,$by}>
  { y = Resize <mode: string = "$mode"> (x, c) }
Resize $v, $mode, $how: $v; v in 11 13 18 19; mode in nearest linear cubic;
how, more in half_pixel , nearest_mode: string = "round_prefer_ceil" |
pytorch_half_pixel , nearest_mode: string = "floor" |
align_corners , nearest_mode: string = "ceil" |
asymmetric , cubic_coeff_a: float = -0.5, exclude_outside: int = 0
  (float[1,2,4,6] x) => (float[1,2,H,W] y) <float[4] c = {1,1,1.7,0.6}, float[0] r = {}>
  { y = Resize <mode: string = "$mode", coordinate_transformation_mode: string = "$how"$more>
  (x, r, c) }
Resize to sizes: 11
  (float[1,2,4,6] x) => (float[1,2,H,W] y) <float[0] e = {}, int64[4] z = {1,2,7,3}>
  { y = Resize <mode: string = "linear"> (x, e, e, z) }
# masks of Dropout
Dropout 7 of $kind: 7; kind in float double
  ($kind[2,3] x) => ($kind[2,3] y, $kind[2,3] m) { y, m = Dropout (x) }
Dropout $v: $v; v in 10 12
  (float[2,3] x) => (float[2,3] y, bool[2,3] m) { y, m = Dropout (x) }
Dropout of nothing: 10
  (float[2,0] x) => (float[2,0] y, bool[2,0] m) { y, m = Dropout <ratio = 0.1> (x) }
Dropout 11: 11
  (float[2,3] x) => (float[2,3] y, bool[2,3] m) { y, m = Dropout <ratio = 0.1> (x) }
# statistics in the type of x, and not in float32
GroupNormalization $v: $v; v in 18 20
  (double[2,4,3] x, double[2] g, double[2] b) => (double[2,4,3] y)
  { y = GroupNormalization <num_groups = 2> (x, g, b) }
GroupNormalization of one scale: 18
  (float[2,4,3] x, float[1] g, float[2] b) => (float[2,4,3] y)
  { y = GroupNormalization <num_groups = 2> (x, g, b) }
Resize as TensorFlow, $mode: 11; mode in nearest linear cubic
  (float[1,2,4,6] x) => (float[1,2,H,W] y) <float[4] c = {1,1,1.7,0.6}, float[0] r = {}>
  { y = Resize <mode: string = "$mode", coordinate_transformation_mode: string =
  "tf_half_pixel_for_nn"> (x, r, c) }
# attributes that became inputs
Clip $bounds: 7; bounds in <min = -1.0, max = 1.0> | | <min = 0.0> | <max = 0.25>
  (float[12] x) => (float[12] y) { y = Clip $bounds (x) }
Pad $v of $kind, $mode: $v; v in 7 10; kind in float double;
mode, more in constant , value: float = 0.1 | reflect | edge
  ($kind[3,4] x) => ($kind[A,B] y)
  { y = Pad <mode: string = "$mode", pads: ints = [1,0,1,2]$more> (x) }
Pad that cuts: 7
  (float[3,4] x) => (float[A,B] y) { y = Pad <pads: ints = [-1,0,0,-2]> (x) }
TopK: 7
  (float[2,9] x) => (float[2,3] y, int64[2,3] i) { y, i = TopK <k = 3> (x) }
Slice: 7
  (float[3,5] x) => (float[A,B] y) { y = Slice <starts = [-2,1], ends = [9,-1]> (x) }
Slice of an axis: 7
  (float[3,5] x) => (float[A,B] y) { y = Slice <axes = [1], starts = [1], ends = [4]> (x) }
Split in unequal parts: 7
  (float[2,7] x) => (float[2,3] y, float[2,4] z) { y, z = Split <axis=1, split=[3,4]>(x) }
Split $v: $v; v in 7 13
  (float[2,6] x) => (float[2,3] y, float[2,3] z) { y, z = Split <axis = 1> (x) }
Squeeze: 7
  (float[1,3,1] x) => (float[A] y) { y = Squeeze (x) }
Squeeze of an axis: 11
  (float[1,3,1] x) => (float[1,3] y) { y = Squeeze <axes = [-1]> (x) }
Unsqueeze: 7
  (float[3] x) => (float[1,3,1] y) { y = Unsqueeze <axes = [0,2]> (x) }
$op $v: $v; v, axes in 7 1 | 11 -1 | 13 0; op in ReduceMean | ReduceMax | ReduceMin | ReduceProd |
ReduceL1 | ReduceL2 | ReduceLogSum | ReduceLogSumExp | ReduceSumSquare
  (float[2,3,4] x) => (float[A,B,C] y) { y = $op <axes = [$axes]> (x) }
ReduceSum $v: $v; v, axes in 7 1 | 11 -1
  (float[2,3,4] x) => (float[A,B,C] y) { y = ReduceSum <axes = [$axes]> (x) }
$op of all: 11; op in ReduceMean ReduceSum
  (float[2,3,4] x) => (float y) { y = $op <keepdims = 0> (x) }
# other defaults, names and meanings
BatchNormalization: 7
  (float[2,3,4] x) => (float[2,3,4] y) <float[3] s = {1,2,3}, float[3] b = {0,1,2},
  float[3] m = {0.5,0,-1}, float[3] v = {1,2,4}>
  { y = BatchNormalization <epsilon = 0.001, momentum = 0.5> (x, s, b, m, v) }
# onnxruntime runs other types than float32 by a body that it takes up to opset 18
LeakyRelu of double: 16
  (double[2,3] x) => (double[2,3] y) { y = LeakyRelu (x) }
PRelu of double: 17
  (double[2,3] x, double[3] p) => (double[2,3] y) { y = PRelu (x, p) }
$first and $then of double: 18; first, then in Elu<alpha=0.7> Selu | HardSigmoid HardSwish |
Softplus Mish | Softsign ThresholdedRelu
  (double[2,3] x) => (double[2,3] y) { z = $first (x) y = $then (z) }
PRelu of int32: 18
  (int32[2,3] x, int32[3] p) => (int32[2,3] y) { y = PRelu (x, p) }
Relu of int64: 18
  (int64[2,3] x) => (int64[2,3] y) { y = Relu (x) }
Scatter: 9
  (float[4,3] x, int64[2,3] i, float[2,3] u) => (float[4,3] y) { y = Scatter (x, i, u) }
OneHot: 9
  (float[2,3] x, int64[4] i) => (float[4,5] y) <int64 d = {5}, float[2] v = {0.5,3}>
  { z = OneHot (i, d, v) n = Shape (x) c = Cast <to = 1> (n) q = ReduceSum <keepdims = 0> (c)
  y = Add (z, q) }
RoiAlign: 10
  (float[1,2,8,8] x) => (float[2,2,3,3] y) <float[2,4] b = {0,0,5,6,1,2,7,7}, int64[2] k = {0,0}>
  { y = RoiAlign <output_height = 3, output_width = 3, spatial_scale = 0.9> (x, b, k) }
GridSample $mode: 16; mode in bilinear nearest bicubic
  (float[1,1,4,5] x, float[1,3,3,2] g) => (float[1,1,3,3] y)
  { y = GridSample <mode: string = "$mode"> (x, g) }
GridSample: 16
  (float[1,1,4,5] x, float[1,3,3,2] g) => (float[1,1,3,3] y) { y = GridSample (x, g) }
DFT, $how: 17; how in axis onesided
  (float[2,8,1] x) => (float[A,B,2] y) { y = DFT <$how: int = 1> (x) }
# what took further types and attributes alone
$op $v $more: $v; v, op, more in 7 AveragePool , pads = [1,0,1,1] | 10 AveragePool , ceil_mode = 1 |
11 AveragePool , pads = [1,0,1,1], count_include_pad = 1, ceil_mode = 1 |
11 AveragePool , auto_pad = "SAME_UPPER" | 7 MaxPool , pads = [1,0,1,1] |
10 MaxPool , ceil_mode = 1, dilations = [2,1] | 7 LpPool , pads = [1,0,1,1] | 11 LpPool , p = 3
  (float[1,2,7,6] x) => (float[1,2,H,W] y)
  { y = $op <kernel_shape = [3,2], strides = [2,2]$more> (x) }
numbers and texts of Constant $v: $v; v in 9 11
  (float[2,3] x) => (float[3,2] y, float[2] s) { f = Constant <value_float = 2.5> ()
  g = Constant <value_floats = [1.0, 2.0, 3.0]> () i = Constant <value_int = 4> ()
  k = Constant <value_ints = [3, 2]> () t = Constant <value_strings = ["1.5", "2"]> ()
  s = Cast <to = 1> (t) c = Cast <to = 1> (i) a = Mul (x, f) b = Add (a, g) d = Sub (b, c)
  y = Reshape (d, k) }
PRelu: 7
  (float[2,3,4] x, float[4] w) => (float[2,3,4] y) { y = PRelu (x, w) }
LRN: 7
  (float[2,6,2,2] x) => (float[2,6,2,2] y) { y = LRN <size = 3> (x) }
MeanVarianceNormalization: 9
  (float[2,6,2,2] x) => (float[2,6,2,2] y) { y = MeanVarianceNormalization (x) }
# onnxruntime's own LayerNormalization, whose scale may have another type than x
LayerNormalization of $x and $w: $v; v, x, w, u, stash in 16 double float float |
16 float double double , stash_type = 11 | 13 float16 float float | 16 float float16 float
  ($x[2,3,4] x, $w[4] w, $w[4] b) => ($w[2,3,4] y, $u[2,3,1] m, $u[2,3,1] d)
  { c = Identity (x) y, m, d = LayerNormalization <axis = -1$stash> (c, w, b) }
LayerNormalization of two axes: 16
  (double[2,3,4] x, float[3,4] w) => (float[2,3,4] y) { y = LayerNormalization <axis = 1> (x, w) }
LpNormalization: 7
  (float[2,6] x) => (float[2,6] y) { y = LpNormalization <p = 1, axis = 0> (x) }
Cast to integers: 7
  (float[12] x) => (int32[12] y) { a = Abs (x) b = Clip <max = 99.0> (a) y = Cast <to = 6> (b) }
Cast to bool: 9
  (float[12] x) => (bool[12] y) { y = Cast <to = 9> (x) }
IsInf: 10
  (float[12] x) => (bool[12] y) { y = IsInf (x) }
Sign: 9
  (float[12] x) => (float[12] y) { y = Sign (x) }
Pow of integers: 12
  (int32[3] p, int32[3] q) => (int32[3] y) { y = Pow (p, q) }
Pow: 7
  (float[12] x) => (float[12] y) <float two = {2}> { y = Pow (x, two) }
Max: 8
  (float[3] x, float[2,1] w) => (float[2,3] y) { y = Max (x, w) }
ArgMax: 7
  (float[3,4] x) => (int64[1,4] y) { y = ArgMax (x) }
Flatten: 7
  (float[2,3,4,5] x) => (float[A,B] y) { y = Flatten <axis = 2> (x) }
DepthToSpace $v: $v; v in 7 11
  (float[1,8,2,2] x) => (float[A,B,C,D] y) { y = DepthToSpace <blocksize = 2> (x) }
QuantizeLinear: 10
  (float[2,3] x) => (float[2,3] y) <float s = {0.1}, uint8 z = {7}>
  { q = QuantizeLinear (x, s, z) y = DequantizeLinear (q, s, z) }
""")


def feeds_of(model: onnx.ModelProto, hostile: bool) -> dict[str, np.ndarray]:
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value if d.HasField("dim_value") else 3 for d in
                 value.type.tensor_type.shape.dim]  # fmt: skip
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if value.name == "s":
            feeds[value.name] = np.array([1, 1, 1.3, 2.5], kind)
        elif kind.kind == "i":
            feeds[value.name] = RNG.integers(-1 if value.name == "i" else 0, 3, shape).astype(kind)
        elif hostile:
            feeds[value.name] = np.resize(AWKWARD, shape).astype(kind)
        else:
            feeds[value.name] = RNG.standard_normal(shape).astype(kind)
    return feeds


def parsed(name: str) -> onnx.ModelProto:
    opset, text = ROWS[name]
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')


@pytest.mark.parametrize("name", ROWS)
def test_the_upgraded_node_answers_the_same(name: str) -> None:
    proto = parsed(name)
    data = proto.SerializeToString()
    model = load(data)
    assert model.graph.opset_imports[""] == CANONICAL_OPSET
    upgraded = to_proto(model).SerializeToString()
    rewrite.optimize(model, level=3)
    candidates = [upgraded, to_proto(model).SerializeToString()]
    candidates.append(to_proto(inline(model)).SerializeToString())
    for hostile in (False, True):
        feeds = feeds_of(proto, hostile)
        expected = run(data, feeds)
        for candidate in candidates:
            for a, b in zip(expected, run(candidate, feeds), strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                # the kernels are the same; sums over other axes may be taken in another order
                np.testing.assert_allclose(b, a, rtol=2e-6, atol=1e-6)
                if a.dtype.kind == "f":
                    np.testing.assert_array_equal(np.signbit(b[b == 0]), np.signbit(a[b == 0]))


def test_the_node_is_written_back_at_its_opset() -> None:
    """Or refused with the operator that needs a later one, which few of them do."""
    refused: list[str] = []
    reasons: list[str] = []
    for name, (opset, _) in ROWS.items():
        proto = parsed(name)
        model = load(proto)
        rewrite.optimize(model, level=0)
        try:
            written = to_proto(at_opset(model, opset))
        except ModelError as error:
            refused.append(proto.graph.node[0].op_type)
            reasons.append(str(error))
            continue
        assert [(o.domain, o.version) for o in written.opset_import] == [("", opset)]
        feeds = feeds_of(proto, hostile=True)
        expected = run(proto.SerializeToString(), feeds)
        assert_same(run(written.SerializeToString(), feeds), expected, rtol=2e-6, atol=1e-6)
    pattern = r"node '.*' \(\w+\).* needs opset \d+.*"
    assert [r for r in reasons if not re.fullmatch(pattern, r)] == []
    # Upsample and Resize 10 become Resize 13; a matrix of several axes is reshaped by opset 14
    matrices = {"Softmax", "LogSoftmax", "Hardmax"}
    asked = {"Scatter", "Upsample", "Resize", "Dropout", "GroupNormalization", *matrices}
    assert set(refused) <= asked


def test_what_fusions_read_of_shapes_is_written_in_opset_13() -> None:
    proto = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 21]>
        g (float[B,S,6] x) => (float[N,M] y, int64[1] last, float[B,3,2,S] z)
        { middle = Shape <start = 1, end = 2> (x)  last = Shape <start = -1> (x)
        ends = Constant <value_ints = [-1, 6]> ()  rows = Reshape <allowzero = 1> (x, ends)
        one = Constant <value_int = 2> ()  two = CastLike (one, x)
        doubled = Mul (rows, two)  batch = Shape <end = 1> (x)
        sizes = Concat <axis = 0> (batch, middle)  s2 = ReduceProd <keepdims = 1> (sizes)
        six = Constant <value_ints = [6]> ()  s2_6 = Concat <axis = 0> (s2, six)
        y = Expand (doubled, s2_6)
        parts = Constant <value_ints = [0, 0, 3, 2]> ()  apart = Reshape (x, parts)
        z = Transpose <perm = [0, 2, 3, 1]> (apart) }""")
    written = to_proto(at_opset(load(proto), 13))
    assert [o.version for o in written.opset_import] == [13]
    for shape in ((2, 3, 6), (1, 1, 6), (2, 0, 6)):
        feeds = {"x": RNG.standard_normal(shape).astype(np.float32)}
        expected = run(proto.SerializeToString(), feeds)
        assert_same(expected, run(written.SerializeToString(), feeds))


@pytest.mark.parametrize("kind", ["uint8", "int8", "int32", "uint16", "int64"])
def test_the_lowest_bits_are_a_remainder_before_opset_18(kind: str) -> None:
    """Also of negative numbers, whose bits are those of the two's complement."""
    proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18]>
        g ({kind}[N] x) => ({kind}[N] y, {kind}[N] z)
        <{kind} low = {{15}}, {kind}[1] one = {{1}}> {{
          y = BitwiseAnd (x, low)  z = BitwiseAnd (one, x) }}""")
    written = to_proto(at_opset(load(proto), 17))
    assert [n.op_type for n in written.graph.node if "Constant" not in n.op_type] == ["Mod", "Mod"]
    info = np.iinfo(kind)
    feeds = {"x": np.array([0, 1, 15, 16, 100, info.max, info.min, info.min + 5], kind)}
    expected = run(proto.SerializeToString(), feeds)
    assert_same(expected, run(written.SerializeToString(), feeds))


def test_other_bits_have_no_older_spelling() -> None:
    for mask in (6, 127):  # 128 is no int8
        proto = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["" : 18]>
            g (int8[N] x) => (int8[N] y) <int8 m = {{{mask}}}> {{ y = BitwiseAnd (x, m) }}""")
        with pytest.raises(ModelError, match=r"BitwiseAnd.* needs opset 18"):
            at_opset(load(proto), 17)


FUSED = """<ir_version: 8, opset_import: ["" : 17]>
g (float[N,4] x) => (float[N,4] y) <float[4] s = {1,2,3,4}, float[4] b = {0,1,0,1},
  float[4,4] w = {1,0,0,1,0,1,0,1,1,0,1,0,0,1,1,0}> {
  n = LayerNormalization (x, s, b)  p = MatMul (n, w)  q = Add (p, b)
  h = Div (q, r)  e = Erf (h)  a = Add (e, one)  m = Mul (q, a)  y = Mul (m, half) }"""
GATED = (
    FUSED.replace("y = Mul (m, half)", "t = Mul (m, half)  d = MatMul (n, v)  y = Mul (t, d)")
).replace("> {", ", float[4,4] v = {1,0,2,1,0,1,3,1,1,0,1,0,0,2,1,0}> {")


@pytest.mark.parametrize(
    ("text", "name"), [(FUSED, "LayerNormGemmGelu"), (GATED, "LayerNormGateFirstGemmGelu")]
)
def test_a_fused_model_is_written_at_its_opset_and_read_again(text: str, name: str) -> None:
    text = text.replace("> {", ", float r = {1.4142135}, float one = {1}, float half = {0.5}> {")
    proto = onnx.parser.parse_model(text)
    model = load(proto)
    rewrite.optimize(model)
    fused = [n.op_type for n in model.graph]
    assert fused == [name]
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    (expected,) = run(proto.SerializeToString(), {"x": x})
    for opset in (17, 18, 21, 22):
        written = to_proto(at_opset(model, opset))
        assert {o.domain: o.version for o in written.opset_import}[""] == opset
        (y,) = run(written.SerializeToString(), {"x": x})
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
        assert [n.op_type for n in load(written).graph] == fused
    with pytest.raises(ModelError, match=rf"{name}: node .* needs opset 17"):
        at_opset(model, 15)
    plain = inline(model)
    rewrite.tidy_inlined(plain)
    assert "CastLike" not in [n.op_type for n in plain.graph]
    (y,) = run(to_proto(at_opset(plain, 13)).SerializeToString(), {"x": x})
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_group_normalization_by_group() -> None:
    """Opset 18 to 20 scales by group, 21 by channel; onnxruntime runs neither before 21."""
    text = """<ir_version: 8, opset_import: ["" : 18]>
    g (float[N,6,2,2] x, float[3] s, float[3] b) => (float[N,6,2,2] y)
    { y = GroupNormalization <num_groups = 3, epsilon = 0.01> (x, s, b) }"""
    model = load(onnx.parser.parse_model(text))
    x = RNG.standard_normal((2, 6, 2, 2)).astype(np.float32)
    s, b = np.array([1, 2, -3], np.float32), np.array([0, 1, 2], np.float32)
    rows = x.reshape(2, 3, -1)
    unit = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 0.01)
    expected = (unit * s[:, None] + b[:, None]).reshape(x.shape)
    for level in (0, 3):
        optimized = model.clone()
        rewrite.optimize(optimized, level=level)
        (y,) = run(to_proto(optimized).SerializeToString(), {"x": x, "s": s, "b": b})
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_statistics_for_each_element() -> None:
    """BatchNormalization with spatial=0, which onnxruntime no longer runs."""
    text = """<ir_version: 3, opset_import: ["" : 7]>
    g (float[2,3] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[2,3] y)
    { y = BatchNormalization <spatial = 0, epsilon = 0.5> (x, s, b, m, v) }"""
    model = load(onnx.parser.parse_model(text))
    arrays = {k: np.abs(RNG.standard_normal(3)).astype(np.float32) for k in "sbmv"}
    x = RNG.standard_normal((2, 3)).astype(np.float32)
    (y,) = run(to_proto(model).SerializeToString(), {"x": x, **arrays})
    s, b, m, v = (arrays[k] for k in "sbmv")
    np.testing.assert_allclose(y, (x - m) / np.sqrt(v + 0.5) * s + b, rtol=1e-5)


def test_an_opset_before_seven_is_brought_up() -> None:
    text = """<ir_version: 8, opset_import: ["" : 6]>
    g (float[2,3] x, float[3] b) => (float[2,3] y)
    { t = Add <broadcast = 1> (x, b)  d = Dropout <is_test = 1> (t)  y = Relu (d) }"""
    model = load(onnx.parser.parse_model(text))
    x, b = RNG.standard_normal((2, 3)).astype(np.float32), np.ones(3, np.float32)
    (y,) = run(to_proto(model).SerializeToString(), {"x": x, "b": b})
    np.testing.assert_array_equal(y, np.maximum(x + b, 0))


def test_branches_and_functions_are_brought_up() -> None:
    text = """<ir_version: 8, opset_import: ["" : 11, "loc" : 1]>
    g (bool c, float[2,3,4] x) => (float[2,3,4] y) {
      h = loc.f <k: int = 1> (x)
      y = If (c) <then_branch = yes () => (float[2,3,4] a) { a = Hardmax <axis: int = 1> (h) },
                  else_branch = no () => (float[2,3,4] b) { b = loc.f <k: int = 0> (h) }>
    }
    <opset_import: ["" : 13], domain: "loc">
    f <k> (u) => (v) { w = Softmax <axis: int = @k> (u)  v = loc_none (w) }"""
    text = text.replace("v = loc_none (w)", "v = Identity (w)")
    model = load(onnx.parser.parse_model(text))
    assert not model.functions
    x = RNG.standard_normal((2, 3, 4)).astype(np.float32)

    def softmax(v: np.ndarray, axis: int) -> np.ndarray:
        e = np.exp(v - v.max(axis, keepdims=True))
        return np.asarray(e / e.sum(axis, keepdims=True))

    data = to_proto(model).SerializeToString()
    h = softmax(x, 1)
    hard = (h.reshape(2, -1) == h.reshape(2, -1).max(-1, keepdims=True)).reshape(x.shape)
    for c, expected in ((True, hard.astype(np.float32)), (False, softmax(h, 0))):
        (y,) = run(data, {"c": np.array(c), "x": x})
        np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_the_command_writes_an_opset(cli: Cli, tmp_path: Path) -> None:
    text = FUSED.replace("> {", ", float r = {1.4142135}, float one = {1}, float half = {0.5}> {")
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    for given, opset in (("keep", 17), ("18", 18)):
        assert cli("optimize", path, "--opset", given).code == 0
        written = onnx.load(tmp_path / "m.fused.onnx")
        assert {o.domain: o.version for o in written.opset_import}[""] == opset
    err = cli.line(1, "optimize", path, "--opset", "15")
    assert f"{path}: the body of LayerNormGemmGelu: node" in err
    assert "needs opset 17 or newer: it cannot be written in 15" in err
    assert cli("optimize", path, "--opset", "13", "--inline").code == 0
    for wrong in ("0", "old", "-1"):
        assert cli("optimize", path, "--opset", wrong).code == 2
    assert cli("optimize", path, "--opset", "999").code == 1


# A version of an operator that looks as if it meant something else, and does not.
COMPATIBLE = {
    ("Constant", 11): "one of several attributes instead of the only one",
    ("Shape", 15): "start and end are new",
}


def test_every_change_of_an_operator_has_its_rule() -> None:
    """A version that takes an attribute away, or gives it another default, needs an upgrade."""
    versions: dict[str, list[Any]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "":
            versions.setdefault(schema.name, []).append(schema)
    changed = set()
    for name, schemas in versions.items():
        schemas.sort(key=lambda s: s.since_version)
        for old, new in itertools.pairwise(schemas):
            if not 7 < new.since_version <= CANONICAL_OPSET:
                continue
            lost = [
                k
                for k, a in old.attributes.items()
                if k not in new.attributes
                or str(new.attributes[k].default_value) != str(a.default_value)
            ]
            needed = sum(re.search("Single$", str(p.option)) is not None for p in new.inputs)
            if lost or new.deprecated or needed > len(old.inputs):
                changed.add((name, new.since_version))
    missing = changed - set(UPGRADES) - set(COMPATIBLE)
    assert not missing


@pytest.mark.parametrize("directions", ["", ", directions = [1]"])
def test_a_scan_with_a_batch_is_a_scan_of_scans(directions: str) -> None:
    model = text_model(
        f"""<ir_version: 4, opset_import: ["" : 8]>
        g (float[2,4] s, float[2,3,4] x) => (float[2,4] y, float[2,3,4] z) {{
          y, z = Scan <num_scan_inputs = 1, body = b (float[4] a, float[4] e)
            => (float[4] p, float[4] q) {{ p = Add (a, e) q = Tanh (p) }}{directions}>
            (, s, x) }}"""
    )
    proto = to_proto(model)
    rng = np.random.default_rng(0)
    feeds = {k: rng.standard_normal(n).astype(np.float32) for k, n in SCANNED.items()}
    want = stock(proto, optimized=True).run(None, feeds)
    upgraded = to_proto(load(proto))
    got = stock(upgraded, optimized=True).run(None, feeds)
    assert_same(got, want)


SCANNED = {"s": (2, 4), "x": (2, 3, 4)}


def test_a_slope_of_opset_6_is_one_a_channel() -> None:
    model = text_model(
        """<ir_version: 8, opset_import: ["" : 6]>
        g (float[2,3,4,4] x) => (float[2,3,4,4] y) <float[3] a = {0.5, 0.25, 2}>
        { y = PRelu (x, a) }"""
    )
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)
    slope = np.array([0.5, 0.25, 2], np.float32).reshape(3, 1, 1)
    (y,) = run(load(to_proto(model)), {"x": x}, optimized=True)
    np.testing.assert_array_equal(y, np.where(x < 0, x * slope, x))

"""Programs of small graphs, for the tests of lowering and of the passes over programs."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import onnx
from support import answers, assert_near, normal, parsed, stock, table

from onnx_fuse.ir.build import text_model
from onnx_fuse.lower import walk
from onnx_fuse.program.call import NeedsValues, Program
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.runtime.plan import plan

H200 = CHIPS["H200"]
T = TypeVar("T")


def lowered(model, hw=H200, size=None, **options) -> Program:
    """The program of a model, or of its text, for the shapes and types of its inputs, `size` in
    open dimensions.
    """
    model = text_model(model) if isinstance(model, str) else model
    shapes = {
        v.name: (tuple(d if isinstance(d, int) else size for d in v.shape), v.dtype.numpy().name)
        for v in model.graph.inputs
    }
    return walk.lower(model, shapes, hw, **options)


def two_norms(rows: int | str) -> onnx.ModelProto:
    """Two products behind norms, the second one's x with a gradient; of weights of ones."""
    model = parsed(f"""g (float[{rows},768] x) => (float[{rows},768] y) {{
        h = LayerNormalization <axis = -1> (x, g0, b0) p = MatMul (h, w0) r = Add (p, c0)
        n = LayerNormalization <axis = -1> (r, g1, b1) q = MatMul (n, w1) y = Add (q, c1) }}""")
    for name in ("w0", "g0", "b0", "c0", "w1", "g1", "b1", "c1"):
        ones = np.ones((768, 768) if name[0] == "w" else 768, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(ones, name))
    return model


def program_of(model, feeds, hw=H200, **options) -> Program:
    shapes = {name: (a.shape, a.dtype.name) for name, a in feeds.items()}
    return walk.lower(model, shapes, hw, **options)


def answered(
    make: Callable[[dict[str, np.ndarray]], T],
    feed: Mapping[str, np.ndarray],
    values: dict[str, np.ndarray],
) -> T:
    """What `make` gives for `values`, to which the inputs come that it asks for (NeedsValues)."""
    try:
        return make(values)
    except NeedsValues as needs:
        values |= {name: np.asarray(feed[name]) for name in needs.names}
    return answered(make, feed, values)


def with_values(model, feeds, hw=H200, **options) -> Program:
    """The program of a model for these feeds, some of whose values decide about shapes."""
    return answered(
        lambda values: program_of(model, feeds, hw, values=values, **options), feeds, {}
    )


def interpreted(model, feeds) -> dict[str, np.ndarray]:
    """What the whole program of a model, and of all its stages, gives: by NumPy, without a GPU."""
    program = with_values(model, feeds)
    offsets = plan(program).offsets
    return interpret(program, feeds, weights_of(model), with_values, offsets=offsets)


def assert_program(model, feeds, program=None, rtol=1e-6, atol=1e-6) -> Program:
    """The program of a model, which by NumPy gives onnxruntime's results."""
    program = program or program_of(model, feeds)
    expected = answers(stock(model, optimized=True), feeds)
    assert_near(interpret(program, feeds, weights_of(model), with_values), expected, rtol, atol)
    return program


def weights_of(model) -> dict[str, np.ndarray]:
    return {name: v.const_value.numpy() for name, v in model.graph.initializers.items()}


# text of a graph, feeds: each row names what it exercises
RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 4, 6)).astype(np.float32)


def arrays(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return normal(shapes, seed=1)


EMBEDDING = arrays(w=(3, 6), t=(4, 6), p=(4, 6))
EMBEDDING["i"] = RNG.integers(-3, 3, (3, 4))
EMBEDDING["k"] = RNG.integers(-4, 4, (3, 4)).astype(np.int32)

GRAPHS = table(globals())("""
chain with broadcasting: {"x": X, "b": X[0, 0]}
  agraph (float[3,4,6] x, float[6] b) => (float[3,4,6] y) { s = Add(x, b) t = Tanh(s)
  y = Mul(t, s) }
the absent bounds of a Clip: {"x": np.float32([-np.inf, np.inf, np.nan, 0.5, 3, -3.4e+38, -0.0, 1]),
"z": np.array([-np.inf, np.inf, np.nan, 0.5, 3, -3.4e+38, -0.0, 1])}
  agraph (float[8] x, double[8] z) => (float[8] a, float[8] b, double[8] c)
  <float one = {1}, double low = {-2}> { a = Clip(x, "", one) b = Clip(x) c = Clip(z, low) }
integers of 64 bits without a sign: {"x": np.uint64([0, 5, 2**63, 2**64 - 1])}
  agraph (uint64[4] x) => (bool[4] g, uint64[4] s)
  <uint64 most = {18446744073709551614}, uint64 three = {3}>
  { g = Greater (x, most)  b = BitwiseAnd (x, three)  s = BitShift <direction = "LEFT"> (b, three) }
powers of integers: {"x": np.arange(-3, 4), "z": np.int64([-2, 39, -1, 62, 0, 33, 5])}
  agraph (int64[7] x, int64[7] z) => (int64[7] y) { y = Pow (x, z) }
a number worked out where it is read: {"x": X}
  agraph (float[3,4,6] x) => (float[3,4,6] y) <float one = {1}> { m = ReduceMax <keepdims = 0> (x)
  r = Div(one, m) n = Neg(r) y = Mul(x, n) }
the variance of close numbers: {"x": np.float32([[100, 100.01, 100.03], [1, 2, 4]])}
  g (float[2,3] x) => (float[2,3] y) { y = MeanVarianceNormalization <axes = [1]> (x) }
the axes that a mean and a variance have here: {"x": X[0]}
  g (float[4,6] x) => (float[4,6] y) { y = MeanVarianceNormalization (x) }
the scale of a Dropout of float64: {"x": np.linspace(1e4, 2e4, 64)}
  g (double[64] x) => (double[64] y)
  <double r = {0.25}, bool t = {1}, double zero = {0}, double q = {0.75}>
  { d, m = Dropout (x, r, t) s = Div (x, q) k = Where (m, s, zero) y = Sub (d, k) }
the halves of a rotation: arrays(x=(2, 40, 64), c=(40, 32), s=(40, 32))
  agraph (float[2,40,64] x, float[40,32] c, float[40,32] s) => (float[2,40,64] y)
  { a, b = Split<axis=-1, num_outputs=2>(x) ac = Mul(a, c) bs = Mul(b, s) f = Sub(ac, bs)
  bc = Mul(b, c) as = Mul(a, s) g = Add(bc, as) y = Concat<axis=-1>(f, g) }
both gradients of a gated product: arrays(gu=(40, 96)) | {"w": np.eye(48, 32, dtype=np.float32)}
  agraph (float[40,96] gu, float[48,32] w) => (float[40,96] d, float[40,32] z)
  { g, u = Split<axis=-1, num_outputs=2>(gu) s = Sigmoid(g) h = Mul(s, u) z = MatMul(h, w)
  t = Transpose<perm=[1,0]>(w) dh = MatMul(z, t) du = Mul(dh, s) hu = Mul(dh, u) dg = Mul(hu, g)
  d = Concat<axis=-1>(dg, du) }
a chain through a reshape: {"x": X}
  agraph (float[3,4,6] x) => (float[12,6] y) <int64[2] shape = {12, 6}> { s = Exp(x)
  r = Reshape(s, shape) y = Neg(r) }
two paths that must not close a cycle: {"x": X}
  agraph (float[3,4,6] x) => (float[3,4,6] y) { a = Exp(x) s = Softmax(a) y = Add(a, s) }
transposed views into one kernel: {"x": X}
  agraph (float[3,4,6] x) => (float[6,4,3] y) { t = Transpose<perm=[2,1,0]>(x) u = Relu(t)
  y = Add(u, t) }
filters as convolutions and their gradients read them: arrays(w=(40, 60, 3, 3), u=(40, 60, 3, 3)) |
{"v": np.float16(arrays(v=(64, 300, 3, 3))["v"])}
  agraph (float[40,60,3,3] w, float[40,60,3,3] u, float16[64,300,3,3] v) => (float[40,3,3,60] a,
  float[60,3,3,40] b, float16[64,3,3,300] c, float16[300,3,3,64] d, float[40,3,3,60] e)
  <int64[2] last = {-1, -1}, int64[2] first = {-9, -9}, int64[2] axes = {2, 3}>
  { a = Transpose <perm = [0,2,3,1]> (w) s = Slice (w, last, first, axes, last)
  b = Transpose <perm = [1,2,3,0]> (s) c = Transpose <perm = [0,2,3,1]> (v)
  t = Slice (v, last, first, axes, last) d = Transpose <perm = [1,2,3,0]> (t)
  e = Transpose <perm = [0,2,3,1]> (u) }
a product of rows that stand apart: arrays(x=(40, 4, 6), w=(6, 5))
  agraph (float[40,4,6] x, float[6,5] w) => (float[4,40,5] y) { t = Transpose<perm=[1,0,2]>(x)
  y = MatMul(t, w) }
slices with negative steps: {"x": X}
  agraph (float[3,4,6] x) => (float[3,2,6] y)
  <int64[2] s = {-1, 5}, int64[2] e = {-5, -7}, int64[2] a = {1, 2}, int64[2] k = {-2, -1}>
  { y = Slice(x, s, e, a, k) }
the first row of a norm, in another type: {"x": X, "w": X[0, 0]}
  agraph (float[3,4,6] x, float[6] w) => (float16[1,4,6] y)
  <int64[1] zero = {0}, int64[1] one = {1}> { n = LayerNormalization(x, w)
  s = Slice(n, zero, one, zero) y = Cast<to=10>(s) }
the first rows of a product, and a residual: {"x": X, "w": arrays(w=(6, 6))["w"]}
  agraph (float[3,4,6] x, float[6,6] w) => (float[2,4,6] y)
  <int64[1] zero = {0}, int64[1] two = {2}> { m = MatMul(x, w) s = Slice(m, zero, two, zero)
  r = Slice(x, zero, two, zero) y = Add(s, r) }
split and concat: {"x": X}
  agraph (float[3,4,6] x) => (float[3,4,6] y) { a, b, c = Split<axis=2, num_outputs=3>(x) n = Neg(b)
  y = Concat<axis=2>(c, n, a) }
pieces that a Transpose rearranges: {"x": X}
  agraph (float[3,4,6] x) => (float[3,4,12] y) <int64[1] zero = {0}, int64[3] shape = {3, 4, 12}>
  { a = Exp(x) b = Neg(x) u = Unsqueeze(a, zero) v = Unsqueeze(b, zero) c = Concat<axis=0>(u, v)
  t = Transpose<perm=[1,2,0,3]>(c) y = Reshape(t, shape) }
pieces of which one is read apart: {"x": X}
  agraph (float[3,4,6] x) => (float[4,6,3] y, float[4,6] z) <int64 one = {1}>
  { a, b, d = Split<axis=0, num_outputs=3>(x) e = Exp(b) c = Concat<axis=0>(d, e, a)
  y = Transpose<perm=[1,2,0]>(c) z = Gather(c, one) }
casts of the parts of a packed gradient: {"x": arrays(x=(6, 32))["x"].astype(np.float16)}
  agraph (float16[6,32] x) => (float[6,8] a, float[6,16] b, float[6,8] c) <int64[3] n = {8, 16, 8}>
  { u, v, w = Split<axis=1>(x, n) a = Cast<to=1>(u) b = Cast<to=1>(v) c = Cast<to=1>(w) }
casts into the parts of one tensor: arrays(a=(6, 8), b=(6, 16), c=(16,), d=(8,))
  agraph (float[6,8] a, float[6,16] b, float[16] c, float[8] d) => (float16[6,24] y, float16[24] z)
  { f = Cast<to=10>(a) g = Cast<to=10>(b) y = Concat<axis=1>(f, g) h = Cast<to=10>(c)
  k = Cast<to=10>(d) z = Concat<axis=0>(h, k) }
pad, constant and cropped: {"x": X}
  agraph (float[3,4,6] x) => (float[y0,y1,y2] y) <int64[6] p = {1, -1, 0, 0, 2, -3}, float v = {7}>
  { y = Pad(x, p, v) }
pad, reflected: {"x": X}
  agraph (float[3,4,6] x) => (float[y0,y1,y2] y) <int64[6] p = {2, 0, 3, 1, 0, 5}>
  { y = Pad<mode="reflect">(x, p) }
pad, edges: {"x": X}
  agraph (float[3,4,6] x) => (float[y0,y1,y2] y) <int64[6] p = {2, 0, 3, 1, 0, 5}>
  { y = Pad<mode="edge">(x, p) }
tile: {"x": X}
  agraph (float[3,4,6] x) => (float[6,4,18] y) <int64[3] n = {2, 1, 3}> { y = Tile(x, n) }
shape arithmetic on the host: {"x": X}
  agraph (float[3,b,6] x) => (float[N,M] y)
  <int64 one = {1}, int64[1] m = {-1}, int64[1] zero = {0}> { s = Shape(x) n = Gather(s, one)
  u = Unsqueeze(n, zero) w = Concat<axis=0>(u, m) y = Reshape(x, w) }
rows of tables into their sum: EMBEDDING
  agraph (float[3,6] w, float[4,6] t, float[4,6] p, int64[3,4] i, int32[3,4] k) => (float[3,4,6] y)
  { a = Gather(w, i) b = Gather(t, k) s = Add(a, b) y = Add(s, p) }
rows of one table by two indices and by one twice: {name: EMBEDDING[name] for name in "wi"}
  agraph (float[3,6] w, int64[3,4] i) => (float[3,4,6] y) <int64 last = {-1}> { j = Sub(last, i)
  a = Gather(w, i) b = Gather(w, j) c = Gather(w, i) s = Add(a, b) y = Sub(s, c) }
rows along an inner axis, in a chain through a reshape: {"x": X, "i": np.array([-1, 2])}
  agraph (float[3,4,6] x, int64[2] i) => (float[6,6] y) <int64[2] shape = {6, 6}> { e = Exp(x)
  v = Gather<axis=1>(x, i) u = Gather<axis=1>(e, i) s = Add(u, v) r = Reshape(s, shape) y = Neg(r) }
rows of a transposed table by a slice of indices: {"w": X[0, :3].T.copy(), "i": EMBEDDING["i"]}
  agraph (float[6,3] w, int64[3,4] i) => (float[3,2,6] y)
  <int64[1] s = {1}, int64[1] e = {3}, int64[1] a = {1}> { t = Transpose(w) k = Slice(i, s, e, a)
  g = Gather(t, k) y = Neg(g) }
numbers of a vector, by indices that a chain makes: {"w": X[0, 0], "i": np.array([0, 1, 2, 3, 1])}
  agraph (float[6] w, int64[5] i) => (float[5] y, int64[5] k) <int64 two = {-2}> { k = Mul(i, two)
  g = Gather(w, k) y = Neg(g) }
the one row of a table that a chain makes: {"w": X[0, :1], "i": np.array([-1])}
  agraph (float[1,6] w, int64[1] i) => (float[1,6] y) { e = Exp(w) g = Gather(e, i) y = Neg(g) }
rows that two chains and the host read: {name: EMBEDDING[name] for name in "wi"}
  agraph (float[3,6] w, int64[3,4] i) => (float[3,4,6] y, float[3,4,6] z) { g = Gather(w, i)
  s = Softmax(g) y = Add(s, g) z = Neg(g) }
a norm and what follows it: {"x": X, "r": X[::-1].copy()} | arrays(g=(6,), b=(6,))
  agraph (float[3,4,6] x, float[6] g, float[6] b, float[3,4,6] r) => (float[12,6] y)
  <int64[2] shape = {12, 6}> { e = Exp(x) n = LayerNormalization(e, g, b) s = Add(r, n) t = Tanh(s)
  y = Reshape(t, shape) }
a norm in another type: {"x": X} | arrays(g=(6,), b=(6,), h=(4,))
  agraph (float[3,4,6] x, float[6] g, float[6] b, float[4] h) => (double[3,4,6] y, double[3,4,6] z)
  { e = Exp(x) n = LayerNormalization(e, g, b) y = Cast<to=11>(n) m = InstanceNormalization(e, h, h)
  a = Neg(m) z = Cast<to=11>(a) }
an input returned as it is: {"x": X[0, 0]}
  agraph (float[N] x) => (float[N] y) { y = Identity(x) }
one value, two outputs: {"x": X[0, 0]}
  agraph (float[N] x) => (float[N] y, float[N] z) { y = Neg(x) z = Identity(y) }
an output known at lowering: {"x": X[0, 0]}
  agraph (float[N] x) => (int64[1] y) { y = Shape(x) }
a shape that depends on data: {"x": np.array([0, 1, 0, 2], np.float32)}
  agraph (float[N] x) => (int64[1,K] y, float[N] z) { a = Neg(x) y = NonZero(a) z = Exp(a) }
integer division and modulo: {"x": np.arange(-5, 6)}
  agraph (int64[N] x) => (int64[N] y) <int64 d = {3}> { q = Div(x, d) m = Mul(q, x) y = Abs(m) }
an empty tensor: {"x": np.zeros(0, np.float32)}
  agraph (float[N] x) => (float[N] y) { a = Exp(x) y = Neg(a) }
depth to space: {"x": RNG.standard_normal((1, 8, 2, 3)).astype(np.float32)}
  agraph (float[1,8,2,3] x) => (float[1,2,4,6] y) { y = DepthToSpace<blocksize=2, mode="CRD">(x) }
trilu: {"x": X}
  agraph (float[3,4,6] x) => (float[3,4,6] y) <int64 k = {1}> { y = Trilu<upper=0>(x, k) }
Scan, backwards over its second axis: {"s": X[0, :, 0], "x": X[0, :, :3]}
  agraph (float[4] s, float[4,3] x) => (float[4] t, float[3,4] y)
  { t, y = Scan<num_scan_inputs=1, scan_input_axes=[1], scan_input_directions=[1], body = b
  (float[4] a, float[4] v) => (float[4] c, float[4] d) { c = Add(a, v) d = Neg(c) }>(s, x) }
Loop of a known length: {"s": X[0, :, 0]}
  agraph (float[4] s) => (float[4] t, float[5,4] y) <int64 n = {5}, bool go = {1}>
  { t, y = Loop<body = b (int64 i, bool c, float[4] a) => (bool k, float[4] d, float[4] e) { k =
  Identity(c) f = Cast<to=1>(i) d = Add(a, f) e = Exp(d) }>(n, go, s) }
Einsum over a batch: {"x": X, "z": RNG.standard_normal((3, 6, 5)).astype(np.float32)}
  agraph (float[3,4,6] x, float[3,6,5] z) => (float[5,3,4] y)
  { y = Einsum<equation="bij,bjk->kbi">(x, z) }
Einsum of an ellipsis, broadcast: {"x": X, "z": RNG.standard_normal((1, 5, 6)).astype(np.float32)}
  agraph (float[3,4,6] x, float[1,5,6] z) => (float[3,5] y)
  { y = Einsum<equation="...ij, ...kj -> ...k">(x, z) }
reversed sequences: {"x": X, "n": np.array([1, 2, 3, 2])}
  agraph (float[3,4,6] x, int64[4] n) => (float[3,4,6] y)
  { y = ReverseSequence<time_axis=0, batch_axis=1>(x, n) }
RNN: {"x": X} | arrays(w=(1, 5, 6), r=(1, 5, 5))
  agraph (float[3,4,6] x, float[1,5,6] w, float[1,5,5] r) => (float[1,4,5] yh)
  { y, yh = RNN<hidden_size=5>(x, w, r) }
half a Fourier transform: {"x": X[..., None]}
  agraph (float[3,4,6,1] x) => (float[3,3,6,2] y) <int64 axis = {1}>
  { y = DFT<onesided=1>(x, , axis) }
a Fourier transform back, padded: {"x": X.reshape(6, 6, 2)}
  agraph (float[6,6,2] x) => (float[6,8,2] y) <int64 n = {8}, int64 axis = {-2}>
  { y = DFT<inverse=1>(x, n, axis) }
frames of a signal: {"x": X.reshape(3, 24, 1)} | arrays(w=(8,))
  agraph (float[3,24,1] x, float[8] w) => (float[3,5,5,2] y) <int64 step = {4}>
  { y = STFT(x, step, w) }
frames of a signal without a last axis: {"x": X.reshape(3, 24)} | arrays(w=(8,))
  agraph (float[3,24] x, float[8] w) => (float[3,5,5,2] y) <int64 step = {4}>
  { y = STFT(x, step, w) }
MaxUnpool: {"x": X.reshape(1, 2, 6, 6)}
  agraph (float[1,2,6,6] x) => (float[1,2,6,6] y)
  { v, i = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)
  y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(v, i) }
If with a condition known at lowering: {"x": X[0, 0]}
  agraph (float[N] x) => (float[N] y) <int64 n = {3}, int64 z = {0}> { s = Shape(x) d = Gather(s, z)
  c = Greater(d, n) y = If(c)
  <then_branch = a () => (float[N] t) { t = Neg(x) }, else_branch = b () => (float[N] e) { e =
  Exp(x) }> }
""") | {
    "parts of packed parameters that are cast": (
        "agraph (float[6,8] a, float[6,16] b, float[6,8] c, float[6,8] p, float[16] d, "
        "float[8] e) => (float16[6,24] y, float16[6,16] z, float16[24] v) { f = Cast<to=10>(a) "
        "g = Cast<to=10>(b) h = Cast<to=10>(c) k = Cast<to=10>(p) y = Concat<axis=1>(f, g) "
        "z = Concat<axis=1>(h, k) m = Cast<to=10>(d) n = Cast<to=10>(e) v = Concat<axis=0>(m, n) }",
        arrays(a=(6, 8), b=(6, 16), c=(6, 8), p=(6, 8), d=(16,), e=(8,)),
    ),
    "LSTM, both ways, of unequal lengths": (
        "agraph (float[3,4,6] x, float[2,20,6] w, float[2,20,5] r, float[2,40] b, int32[4] n, "
        "float[2,4,5] h, float[2,4,5] c, float[2,15] p) => "
        "(float[3,2,4,5] y, float[2,4,5] yh, float[2,4,5] yc) { y, yh, yc = "
        'LSTM<hidden_size=5, direction="bidirectional">(x, w, r, b, n, h, c, p) }',
        {"x": X, "n": np.array([1, 3, 2, 3], np.int32)}
        | arrays(w=(2, 20, 6), r=(2, 20, 5), b=(2, 40), h=(2, 4, 5), c=(2, 4, 5), p=(2, 15)),
    ),
    "GRU backwards, its reset behind the product": (
        "agraph (float[3,4,6] x, float[1,15,6] w, float[1,15,5] r, float[1,30] b) => "
        '(float[3,1,4,5] y, float[1,4,5] yh) { y, yh = GRU<hidden_size=5, direction="reverse", '
        'linear_before_reset=1, clip=0.7, activations=["Tanh", "Relu"]>(x, w, r, b) }',
        {"x": X} | arrays(w=(1, 15, 6), r=(1, 15, 5), b=(1, 30)),
    ),
    **{
        f"LSTM of activations with numbers, {name}": (
            "agraph (float[3,4,6] x, float[1,20,6] w, float[1,20,5] r, float[1,40] b, "
            "float[1,15] p) => (float[3,1,4,5] y, float[1,4,5] yh, float[1,4,5] yc) "
            f"{{ y, yh, yc = LSTM<hidden_size=5, {how}>(x, w, r, b, , , , p) }}",
            {"x": X} | arrays(w=(1, 20, 6), r=(1, 20, 5), b=(1, 40), p=(1, 15)),
        )
        for name, how in (
            ("defaults", 'activations=["HardSigmoid", "Tanh", "Elu"], clip=2.0'),
            (
                "given",
                'activations=["HardSigmoid", "LeakyRelu", "Tanh"], '
                "activation_alpha=[0.3, 0.2], activation_beta=[0.4]",
            ),
            (
                "both",
                'activations=["Affine", "ScaledTanh", "ThresholdedRelu"], '
                "activation_alpha=[0.3, 0.7, 0.1], activation_beta=[0.4, 1.2]",
            ),
            ("coupled", "input_forget=1"),
        )
    },
}

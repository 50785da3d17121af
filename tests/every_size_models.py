"""The models whose programs are proved at every size: see every_size.py and tools/open_sizes.py."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path

import onnx
import onnx_ir as ir
import test_models
from cases import NEWEST_OPSET, real_cases
from fusion_cases import FUSION_CASES
from support import table
from test_contrib import ROWS

import onnx_fuse
from onnx_fuse import rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.ir.build import text_model
from onnx_fuse.training import optim
from onnx_fuse.training.step import training_model

DECODERS = Path(__file__).parent / "data" / "decoders"
Make = Callable[[], tuple[ir.Model, ...]]
"""Makes a model, the graph that is lowered for it and, of a gradient, the model before it."""


FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE, ir.DataType.BFLOAT16)


def optimized(make: Callable[[], ir.Model]) -> Make:
    """The model as it is, and fused."""
    return lambda: (make(), onnx_fuse.optimize(make()))


def fused_gradient(make: Callable[[], ir.Model], wrt: list[str] | None = None) -> ir.Model:
    """The gradient of the fused model."""
    fused = make()
    rewrite.optimize(fused, training=True)  # all weights stay as they are
    return onnx_fuse.gradient(fused, wrt=wrt)


def differentiated(make: Callable[[], ir.Model], wrt: list[str] | None = None) -> Make:
    """The gradient of the model as it is, and of the fused one; by its inputs without weights."""

    def graphs() -> tuple[ir.Model, ...]:
        model = make()
        weights = [v for v in model.graph.initializers.values() if v.dtype in FLOATS]
        inputs = [v.name or "" for v in model.graph.inputs if v.dtype in FLOATS]
        asked = wrt if wrt or weights else inputs
        return onnx_fuse.gradient(model, wrt=asked), fused_gradient(make, asked), make()

    return graphs


def gradient_graphs() -> Iterator[tuple[str, Make]]:
    """Gradients of graphs of fused operators whose sizes broadcast."""
    name = "attention of one key, broadcast by its mask"
    make = differentiated(lambda: text_model(GRAPHS[name]), ["q", "k", "v", "mask"])
    one = GRAPHS[name].replace("T", "1", 1)
    yield f"gradient of {name}", lambda: (*make()[:2], text_model(one))


def step(make: Callable[[], ir.Model], loss: str) -> ir.Model:
    """A training step, which onnxruntime runs by the bodies of its operators."""
    how = {"loss": loss, "optimizer": optim.SGD(lr=0.1, momentum=0.9), "level": 2}
    return training_model(make(), **how)[0]


def stepped(make: Callable[[], ir.Model], loss: str) -> tuple[ir.Model, ...]:
    """The training step, twice: it is lowered as it is."""
    return step(make, loss), step(make, loss)


def built(name: str, options: list[str]) -> ir.Model:
    """A model of models/, as its command writes it with these options."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        path = test_models.write(name, Path(folder) / "model.onnx", *options)
        return ir.serde.deserialize_model(onnx.load(path))


def exports(folder: Path) -> Iterator[tuple[str, Make]]:
    """The models of a folder's .onnx files."""
    for path in sorted(folder.glob("*.onnx")):
        yield path.stem, optimized(lambda path=path: load(path))


def sources() -> Iterator[tuple[str, Callable[[], ir.Model], str]]:
    """The name of each model, what makes it, and its training: "gradient", a loss, or neither."""
    for name, text in GRAPHS.items():
        yield name, lambda text=text: text_model(text), ""
    for case in real_cases():
        yield case.name, lambda case=case: load(case.path), ""
    for path in sorted(DECODERS.glob("*.onnx")):
        yield f"decoder {path.stem}", lambda path=path: load(path), ""
    for name, (module, options, *_) in test_models.CASES.items():
        loss = "mse" if module == "mlp" else "cross_entropy"
        yield f"models {name}", partial(built, module, options), loss
    for case in FUSION_CASES:
        if case.opset <= NEWEST_OPSET:
            yield f"fusion {case.name}", case.model, "gradient"
    for i, row in enumerate(ROWS):
        if row.op == "Inverse" and row.name == "1 rows":
            continue  # onnxruntime writes beyond a matrix that is not square
        yield f"contrib {i} {row}", row.model, ""


def subjects() -> Iterator[tuple[str, Make]]:
    """The name of each model, and what makes it."""
    yield from gradient_graphs()
    for name, make, training in sources():
        yield name, optimized(make)
        row = name.partition(" ")[2]
        if training == "gradient":
            yield f"gradient {row}", differentiated(make)
        elif training:
            yield f"step {row}", partial(stepped, make, training)


# text of a graph: each row names the decision that its sizes take
GRAPHS = table(globals())("""
rows of a norm:
  agraph (float[B,S,4] x, float[4] w) => (float[N,S,4] y) { zero = Constant<value_ints = [0]>()
  one = Constant<value_ints = [1]>() n = LayerNormalization(x, w) first = Slice(n, zero, one, zero)
  y = Tanh(first) }
a mean that may be of nothing:
  agraph (float[B,S] x) => (float[1,S] y, float[A] z) { zero = Constant<value_ints = [0]>()
  none = Slice(zero, zero, zero, zero) y = ReduceMean(x, zero) z = Squeeze(y, none) }
sizes that pass 32 bits:
  agraph (float[B,S] x) => (int64[2] y, int64[2] z) { most = Constant<value_int = 2147483647>()
  shape = Shape(x) large = Mul(shape, most) cut = Cast<to = 6>(large) y = Cast<to = 7>(cut)
  low = Cast<to = 6>(shape) top = Constant<value = int32 {2147483647}>() p = Mul(low, top)
  z = Cast<to = 7>(p) }
images of which there may be none, resized:
  agraph (float[N,C,2,W] x) => (float[N,C,3,5] y) <float[0] none = {}, int64[2] to = {3, 5}>
  { nc = Shape<end = 2>(x) s = Concat<axis = 0>(nc, to) y = Resize<mode = "linear">(x, none, , s) }
a count of one, broadcast over a batch:
  agraph (float[B,S,4] x, int64[B,1] start) => (int64[B,S] y) <int64 one = {1}>
  { zero = Constant<value_int = 0>() step = Constant<value_int = 1>() dims = Shape(x)
  length = Gather(dims, one) places = Range(zero, length, step) y = Add(start, places) }
a count of one between axes:
  agraph (float[B,S,T] x) => (float[B,S,T] y) <int64 at = {1}> { zero = Constant<value_int = 0>()
  step = Constant<value_int = 3>() dims = Shape(x) size = Gather(dims, at) limit = Mul(size, step)
  places = Range(zero, limit, step) axes = Constant<value_ints = [1]>()
  column = Unsqueeze(places, axes) f = Cast<to = 1>(column) y = Add(x, f) }
parts of which two may be empty:
  agraph (float[B,2,S,4] x, float[B,2,P,4] past) => (float[B,2,P,4] y, float[B,2,S,4] yx,
  float[B,2,P,4] z, float[B,2,S,4] zx) { both = Concat<axis = 2>(past, x) p = Softmax(both)
  l = LogSoftmax(both) first = Shape<start = 2, end = 3>(past) then = Shape<start = 2, end = 3>(x)
  sizes = Concat<axis = 0>(first, then) y, px = Split<axis = 2>(p, sizes) yx = Mul(px, x)
  z, lx = Split<axis = 2>(l, sizes) zx = Add(lx, x) }
a grid of one image, one pixel wide:
  agraph (float[B,2,3] theta) => (float[B,3,1,2] y) { batch = Shape<end = 1>(theta)
  rest = Constant<value_ints = [2, 3, 1]>() size = Concat<axis = 0>(batch, rest)
  y = AffineGrid<align_corners = 1>(theta, size) }
counts in a mask:
  agraph (float[B,S,T] x) => (float[B,S,T] y, bool[S,T] m) { zero = Constant<value_int = 0>()
  one = Constant<value_int = 1>() dims = Shape(x) two = Constant<value_int = 2>()
  s = Gather(dims, one) t = Gather(dims, two) rows = Range(zero, s, one)
  columns = Range(zero, t, one) axes = Constant<value_ints = [1]>() column = Unsqueeze(rows, axes)
  m = LessOrEqual(columns, column) low = Constant<value_float = -1e30>() y = Where(m, x, low) }
a count behind a product:
  agraph (float[B,S,4] x, float[4,T] w) => (float[B,S,T] y) { zero = Constant<value_int = 0>()
  one = Constant<value_int = 1>() dims = Shape(w) t = Gather(dims, one) places = Range(zero, t, one)
  f = Cast<to = 1>(places) z = MatMul(x, w) a = Add(z, f) y = Tanh(a) }
a count that is summed:
  agraph (float[B,S] x) => (float[1,S] y, float[B,S] z) { zero = Constant<value_int = 0>()
  one = Constant<value_int = 1>() dims = Shape(x) s = Gather(dims, one) places = Range(zero, s, one)
  f = Cast<to = 1>(places) z = Mul(x, f) axes = Constant<value_ints = [0]>()
  y = ReduceSum(z, axes) }
Hardmax:
  agraph (float[B,S] x) => (float[B,S] y) { y = Hardmax<axis = -1>(x) }
edges of a count, and its scalars:
  agraph (float[A] x) => (int64[P,2] y) <int64[4] pads = {1, 0, 1, 1}>
  { zero = Constant<value_int = 0>() one = Constant<value_int = 1>() dims = Shape(x)
  axes = Constant<value_ints = [0]>() length = Squeeze(dims, axes) places = Range(zero, length, one)
  last = Constant<value_ints = [1]>() column = Unsqueeze(places, last)
  y = Pad<mode = "edge">(column, pads) }
logarithms of sums of integers:
  agraph (float[A,B] x) => (int64[A] y, int32 z) { scale = Constant<value_float = 3.0>()
  s = Mul(x, scale) i = Cast<to = 7>(s) axes = Constant<value_ints = [1]>()
  y = ReduceLogSumExp<keepdims = 0>(i, axes) j = Cast<to = 6>(s)
  z = ReduceLogSumExp<keepdims = 0>(j) }
reversed sequences:
  agraph (float[S,B,4] x) => (float[S,B,4] y) { at = Constant<value_ints = [0]>()
  to = Constant<value_ints = [1]>() dims = Shape(x) s = Slice(dims, at, to)
  end = Constant<value_ints = [2]>() b = Slice(dims, to, end) n = Expand(s, b)
  y = ReverseSequence<time_axis = 0, batch_axis = 1>(x, n) }
scores of no queries:
  <ir_version: 10, opset_import: ["" : 25]> agraph (float[B,4,S,8] q, float[B,2,K,8] k,
  float[B,2,K,6] v, bool[S,K] m) => (float[B,4,S,6] y, float[B,4,S,K] p) {
  y, , , p = Attention<qk_matmul_output_mode = 3>(q, k, v, m) }
a Fourier transform:
  agraph (float[B,S,1] x) => (float[B,S,2] y) { axis = Constant<value_int = 1>()
  y = DFT(x, , axis) }
one element of a Concat:
  agraph (float[N] x, float[1] v) => (float y) <int64 k = {1}> { c = Concat <axis = 0> (v, x, v)
  y = Gather(c, k) }
products over nothing:
  agraph (float[B,K] x, float[K,4] w, float[4] c, float[S,B,K] a, float[S,K,B] b)
  => (float[B,4] y, float[B,4] z, float[S,B,B] p) { m = MatMul(x, w) s = Add(m, c) y = Relu(s)
  z = Gemm<alpha = 2.0, beta = 0.5>(x, w, c) q = MatMul(a, b) p = Exp(q) }
axes of size 1 beside an empty one:
  agraph (float[B,S,1] x) => (float[B,S] y, float[1,B,S,1] z)
  <int64[1] last = {2}, float[1,1,1,1] slope = {0.5}> { n = Tanh(x) y = Squeeze(n, last)
  z = PRelu(n, slope) }
a transposed convolution whose pads cut the image:
  agraph (float16[B,2,7] x, float16[2,1,1] w) => (float16[B,2,6] y) { y = ConvTranspose
  <group = 2, pads = [1, 0]> (x, w) }
a bias and a scale of a product's parts:
  agraph (float[B,3] x) => (float[B,2,4] y, float[B,2,4] z)
  <float[8] b = {1, 2, 3, 4, 5, 6, 7, 8}, float[4] c = {1, 2, 3, 4}, int64[3] to = {0, 2, 4}>
  { ones = Constant<value_ints = [3, 8]>() w = ConstantOfShape<value = float[1] {0.5}>(ones)
  m = MatMul(x, w) r = Reshape(m, to) y = Add(r, c) n = Gemm(x, w, b) s = Reshape(n, to)
  z = Mul(s, c) }
heads of no batch:
  agraph (float[B,S,8] x, float[B,2,T,4] past) => (float[B,2,U,4] y) <int64[2] heads = {-1, 4}>
  { rows = Shape<start = 0, end = 2>(x) to = Concat<axis = 0>(rows, heads) n = Tanh(x)
  r = Reshape<allowzero = 1>(n, to) t = Transpose<perm = [0, 2, 1, 3]>(r)
  y = Concat<axis = 2>(past, t) }
attention whose batches broadcast:
  agraph (float[1,S,4] q, float[B,T,4] k, float[B,T,4] v) => (float[B,S,4] y) { t = Transpose
  <perm = [0, 2, 1]> (k) s = MatMul(q, t) w = Softmax <axis = -1> (s) y = MatMul(w, v) }
attention whose heads broadcast:
  agraph (float[B,1,S,4] q, float[C,H,T,4] k, float[B,H,T,4] v) => (float[B,H,S,4] y)
  { t = Transpose <perm = [0, 1, 3, 2]> (k) s = MatMul(q, t) w = Softmax <axis = -1> (s)
  y = MatMul(w, v) }
attention of one key, broadcast by its mask:
  agraph (float[B,1,S,4] q, float[B,1,T,4] k, float[B,1,2,4] v) => (float[B,1,S,4] y)
  <float[1,1,1,2] mask = {0.5, -0.5}, float[1] zero = {0}> { t = Transpose <perm = [0, 1, 3, 2]> (k)
  s = MatMul(q, t) z = Add(s, mask) w = Softmax <axis = -1> (z) nan = IsNaN(w)
  g = Where(nan, zero, w) y = MatMul(g, v) }
Einsum over an axis of one, broadcast to any size:
  agraph (float[1,2,K] x, float[1,3] w) => (float[1,2,3] y)
  { y = Einsum<equation="bij,jk->bik">(x, w) }
a branch of a later stage, taken by an input:
  agraph (float[N] x, bool c) => (float[K] y) <float zero = {0}>
  { g = Greater(x, zero) k = Compress(x, g) y = If(c) <then_branch = a () => (float[K] t)
  { t = Neg(k) }, else_branch = b () => (float[K] e) { e = Exp(k) }> }
the mean of the losses of no rows:
  agraph (float[N,3] x, int64[N] labels, float[3] w) => (float y, float z) {
  y = NegativeLogLikelihoodLoss(x, labels) z = NegativeLogLikelihoodLoss(x, labels, w) }
""")

"""lower: Programs of real and small graphs, run by NumPy against onnxruntime; no GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import math_cases
import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from interpret import interpret
from onnx.reference import ReferenceEvaluator

from onnx_fuse import autodiff, passes, session
from onnx_fuse.cuda import jit, pointwise
from onnx_fuse.errors import ModelError
from onnx_fuse.kernels import cublaslt, site
from onnx_fuse.kernels import reduce as reduce_kernels
from onnx_fuse.lower import elementwise, indexing, linear, views, walk
from onnx_fuse.onnx.build import text_model
from onnx_fuse.onnx.common import FUSE
from onnx_fuse.onnx.save import to_proto
from onnx_fuse.onnx.shapes import infer_shapes
from onnx_fuse.passes.precision import lower_precision
from onnx_fuse.program import passes as program_passes
from onnx_fuse.program.call import NeedsValues, Program, Tensor, reshape_strides
from onnx_fuse.program.problem import CHIPS, Problem
from onnx_fuse.runtime.states import SOUND, guarded
from onnx_fuse.training import optim
from onnx_fuse.training.step import training_model
from onnx_fuse.training.trainer import Trainer

H200 = CHIPS["H200"]


def program_of(model, feeds, hw=H200, **options) -> Program:
    shapes = {name: (a.shape, a.dtype.name) for name, a in feeds.items()}
    return walk.lower(model, shapes, hw, **options)


def weights_of(model) -> dict[str, np.ndarray]:
    return {name: v.const_value.numpy() for name, v in model.graph.initializers.items()}


@pytest.fixture
def moves_only(monkeypatch):
    """Pointwise, views and Gather are kernels, every other node a host call."""
    table = {**elementwise.LOWERINGS, **views.LOWERINGS, ("", "Gather"): indexing.gather}
    monkeypatch.setattr(walk, "lowerings", lambda: table)
    monkeypatch.setattr(walk.Lowerer, "_body", lambda self, node: None)


# text of a graph, feeds: each row names what it exercises
RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 4, 6)).astype(np.float32)


def arrays(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {k: rng.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}


EMBEDDING = arrays(w=(3, 6), t=(4, 6), p=(4, 6))
EMBEDDING["i"] = RNG.integers(-3, 3, (3, 4))
EMBEDDING["k"] = RNG.integers(-4, 4, (3, 4)).astype(np.int32)

GRAPHS = {
    "chain with broadcasting": (
        "agraph (float[3,4,6] x, float[6] b) => (float[3,4,6] y) "
        "{ s = Add(x, b) t = Tanh(s) y = Mul(t, s) }",
        {"x": X, "b": X[0, 0]},
    ),
    "a number worked out where it is read": (
        "agraph (float[3,4,6] x) => (float[3,4,6] y) <float one = {1}> "
        "{ m = ReduceMax <keepdims = 0> (x) r = Div(one, m) n = Neg(r) y = Mul(x, n) }",
        {"x": X},
    ),
    "a chain through a reshape": (
        "agraph (float[3,4,6] x) => (float[12,6] y) <int64[2] shape = {12, 6}> "
        "{ s = Exp(x) r = Reshape(s, shape) y = Neg(r) }",
        {"x": X},
    ),
    "two paths that must not close a cycle": (
        "agraph (float[3,4,6] x) => (float[3,4,6] y) { a = Exp(x) s = Softmax(a) y = Add(a, s) }",
        {"x": X},
    ),
    "transposed views into one kernel": (
        "agraph (float[3,4,6] x) => (float[6,4,3] y) "
        "{ t = Transpose<perm=[2,1,0]>(x) u = Relu(t) y = Add(u, t) }",
        {"x": X},
    ),
    "a product of rows that stand apart": (
        "agraph (float[40,4,6] x, float[6,5] w) => (float[4,40,5] y) "
        "{ t = Transpose<perm=[1,0,2]>(x) y = MatMul(t, w) }",
        arrays(x=(40, 4, 6), w=(6, 5)),
    ),
    "slices with negative steps": (
        "agraph (float[3,4,6] x) => (float[3,2,6] y) "
        "<int64[2] s = {-1, 5}, int64[2] e = {-5, -7}, int64[2] a = {1, 2}, int64[2] k = {-2, -1}> "
        "{ y = Slice(x, s, e, a, k) }",
        {"x": X},
    ),
    "split and concat": (
        "agraph (float[3,4,6] x) => (float[3,4,6] y) "
        "{ a, b, c = Split<axis=2, num_outputs=3>(x) n = Neg(b) y = Concat<axis=2>(c, n, a) }",
        {"x": X},
    ),
    "pad, constant and cropped": (
        "agraph (float[3,4,6] x) => (float[y0,y1,y2] y) "
        "<int64[6] p = {1, -1, 0, 0, 2, -3}, float v = {7}> { y = Pad(x, p, v) }",
        {"x": X},
    ),
    "pad, reflected": (
        "agraph (float[3,4,6] x) => (float[y0,y1,y2] y) <int64[6] p = {2, 0, 3, 1, 0, 5}> "
        '{ y = Pad<mode="reflect">(x, p) }',
        {"x": X},
    ),
    "pad, edges": (
        "agraph (float[3,4,6] x) => (float[y0,y1,y2] y) <int64[6] p = {2, 0, 3, 1, 0, 5}> "
        '{ y = Pad<mode="edge">(x, p) }',
        {"x": X},
    ),
    "tile": (
        "agraph (float[3,4,6] x) => (float[6,4,18] y) <int64[3] n = {2, 1, 3}> { y = Tile(x, n) }",
        {"x": X},
    ),
    "shape arithmetic on the host": (
        "agraph (float[3,b,6] x) => (float[N,M] y) <int64 one = {1}, int64[1] m = {-1}, "
        "int64[1] zero = {0}> { s = Shape(x) n = Gather(s, one) u = Unsqueeze(n, zero) "
        "w = Concat<axis=0>(u, m) y = Reshape(x, w) }",
        {"x": X},
    ),
    "rows of tables into their sum": (
        "agraph (float[3,6] w, float[4,6] t, float[4,6] p, int64[3,4] i, int32[3,4] k) => "
        "(float[3,4,6] y) { a = Gather(w, i) b = Gather(t, k) s = Add(a, b) y = Add(s, p) }",
        EMBEDDING,
    ),
    "rows of one table by two indices and by one twice": (
        "agraph (float[3,6] w, int64[3,4] i) => (float[3,4,6] y) <int64 last = {-1}> "
        "{ j = Sub(last, i) a = Gather(w, i) b = Gather(w, j) c = Gather(w, i) s = Add(a, b) "
        "y = Sub(s, c) }",
        {name: EMBEDDING[name] for name in "wi"},
    ),
    "rows along an inner axis, in a chain through a reshape": (
        "agraph (float[3,4,6] x, int64[2] i) => (float[6,6] y) <int64[2] shape = {6, 6}> "
        "{ e = Exp(x) v = Gather<axis=1>(x, i) u = Gather<axis=1>(e, i) s = Add(u, v) "
        "r = Reshape(s, shape) y = Neg(r) }",
        {"x": X, "i": np.array([-1, 2])},
    ),
    "rows of a transposed table by a slice of indices": (
        "agraph (float[6,3] w, int64[3,4] i) => (float[3,2,6] y) <int64[1] s = {1}, "
        "int64[1] e = {3}, int64[1] a = {1}> { t = Transpose(w) k = Slice(i, s, e, a) "
        "g = Gather(t, k) y = Neg(g) }",
        {"w": X[0, :3].T.copy(), "i": EMBEDDING["i"]},
    ),
    "numbers of a vector, by indices that a chain makes": (
        "agraph (float[6] w, int64[5] i) => (float[5] y, int64[5] k) <int64 two = {-2}> "
        "{ k = Mul(i, two) g = Gather(w, k) y = Neg(g) }",
        {"w": X[0, 0], "i": np.array([0, 1, 2, 3, 1])},
    ),
    "the one row of a table that a chain makes": (
        "agraph (float[1,6] w, int64[1] i) => (float[1,6] y) "
        "{ e = Exp(w) g = Gather(e, i) y = Neg(g) }",
        {"w": X[0, :1], "i": np.array([-1])},
    ),
    "rows that two chains and the host read": (
        "agraph (float[3,6] w, int64[3,4] i) => (float[3,4,6] y, float[3,4,6] z) "
        "{ g = Gather(w, i) s = Softmax(g) y = Add(s, g) z = Neg(g) }",
        {name: EMBEDDING[name] for name in "wi"},
    ),
    "a norm and what follows it": (
        "agraph (float[3,4,6] x, float[6] g, float[6] b, float[3,4,6] r) => (float[12,6] y) "
        "<int64[2] shape = {12, 6}> { e = Exp(x) n = LayerNormalization(e, g, b) s = Add(r, n) "
        "t = Tanh(s) y = Reshape(t, shape) }",
        {"x": X, "r": X[::-1].copy()} | arrays(g=(6,), b=(6,)),
    ),
    "a norm in another type": (
        "agraph (float[3,4,6] x, float[6] g, float[6] b, float[4] h) => "
        "(double[3,4,6] y, double[3,4,6] z) "
        "{ e = Exp(x) n = LayerNormalization(e, g, b) y = Cast<to=11>(n) "
        "m = InstanceNormalization(e, h, h) a = Neg(m) z = Cast<to=11>(a) }",
        {"x": X} | arrays(g=(6,), b=(6,), h=(4,)),
    ),
    "an input returned as it is": (
        "agraph (float[N] x) => (float[N] y) { y = Identity(x) }",
        {"x": X[0, 0]},
    ),
    "one value, two outputs": (
        "agraph (float[N] x) => (float[N] y, float[N] z) { y = Neg(x) z = Identity(y) }",
        {"x": X[0, 0]},
    ),
    "an output known at lowering": (
        "agraph (float[N] x) => (int64[1] y) { y = Shape(x) }",
        {"x": X[0, 0]},
    ),
    "a shape that depends on data": (
        "agraph (float[N] x) => (int64[1,K] y, float[N] z) "
        "{ a = Neg(x) y = NonZero(a) z = Exp(a) }",
        {"x": np.array([0, 1, 0, 2], np.float32)},
    ),
    "integer division and modulo": (
        "agraph (int64[N] x) => (int64[N] y) <int64 d = {3}> "
        "{ q = Div(x, d) m = Mul(q, x) y = Abs(m) }",
        {"x": np.arange(-5, 6)},
    ),
    "an empty tensor": (
        "agraph (float[N] x) => (float[N] y) { a = Exp(x) y = Neg(a) }",
        {"x": np.zeros(0, np.float32)},
    ),
    "depth to space": (
        "agraph (float[1,8,2,3] x) => (float[1,2,4,6] y) "
        '{ y = DepthToSpace<blocksize=2, mode="CRD">(x) }',
        {"x": RNG.standard_normal((1, 8, 2, 3)).astype(np.float32)},
    ),
    "trilu": (
        "agraph (float[3,4,6] x) => (float[3,4,6] y) <int64 k = {1}> { y = Trilu<upper=0>(x, k) }",
        {"x": X},
    ),
    "Scan, backwards over its second axis": (
        "agraph (float[4] s, float[4,3] x) => (float[4] t, float[3,4] y) "
        "{ t, y = Scan<num_scan_inputs=1, scan_input_axes=[1], scan_input_directions=[1], "
        "body = b (float[4] a, float[4] v) => (float[4] c, float[4] d) "
        "{ c = Add(a, v) d = Neg(c) }>(s, x) }",
        {"s": X[0, :, 0], "x": X[0, :, :3]},
    ),
    "Loop of a known length": (
        "agraph (float[4] s) => (float[4] t, float[5,4] y) <int64 n = {5}, bool go = {1}> "
        "{ t, y = Loop<body = b (int64 i, bool c, float[4] a) => (bool k, float[4] d, float[4] e) "
        "{ k = Identity(c) f = Cast<to=1>(i) d = Add(a, f) e = Exp(d) }>(n, go, s) }",
        {"s": X[0, :, 0]},
    ),
    "Einsum over a batch": (
        "agraph (float[3,4,6] x, float[3,6,5] z) => (float[5,3,4] y) "
        '{ y = Einsum<equation="bij,bjk->kbi">(x, z) }',
        {"x": X, "z": RNG.standard_normal((3, 6, 5)).astype(np.float32)},
    ),
    "reversed sequences": (
        "agraph (float[3,4,6] x, int64[4] n) => (float[3,4,6] y) "
        "{ y = ReverseSequence<time_axis=0, batch_axis=1>(x, n) }",
        {"x": X, "n": np.array([1, 2, 3, 2])},
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
    "RNN": (
        "agraph (float[3,4,6] x, float[1,5,6] w, float[1,5,5] r) => (float[1,4,5] yh) "
        "{ y, yh = RNN<hidden_size=5>(x, w, r) }",
        {"x": X} | arrays(w=(1, 5, 6), r=(1, 5, 5)),
    ),
    "half a Fourier transform": (
        "agraph (float[3,4,6,1] x) => (float[3,3,6,2] y) <int64 axis = {1}> "
        "{ y = DFT<onesided=1>(x, , axis) }",
        {"x": X[..., None]},
    ),
    "a Fourier transform back, padded": (
        "agraph (float[6,6,2] x) => (float[6,8,2] y) <int64 n = {8}, int64 axis = {-2}> "
        "{ y = DFT<inverse=1>(x, n, axis) }",
        {"x": X.reshape(6, 6, 2)},
    ),
    "frames of a signal": (
        "agraph (float[3,24,1] x, float[8] w) => (float[3,5,5,2] y) <int64 step = {4}> "
        "{ y = STFT(x, step, w) }",
        {"x": X.reshape(3, 24, 1)} | arrays(w=(8,)),
    ),
    "MaxUnpool": (
        "agraph (float[1,2,6,6] x) => (float[1,2,6,6] y) { v, i = MaxPool<kernel_shape=[2,2], "
        "strides=[2,2]>(x) y = MaxUnpool<kernel_shape=[2,2], strides=[2,2]>(v, i) }",
        {"x": X.reshape(1, 2, 6, 6)},
    ),
    "If with a condition known at lowering": (
        "agraph (float[N] x) => (float[N] y) <int64 n = {3}, int64 z = {0}> { s = Shape(x) "
        "d = Gather(s, z) c = Greater(d, n) y = If(c) <then_branch = a () => (float[N] t) "
        "{ t = Neg(x) }, else_branch = b () => (float[N] e) { e = Exp(x) }> }",
        {"x": X[0, 0]},
    ),
}


@pytest.mark.parametrize("inverse", [0, 1])
@pytest.mark.parametrize("size", [10, 129, 256])
def test_a_fourier_transform_is_rounded_once(size, inverse):
    """float32, and 0 where the sum is: numpy's own in float32 has 1.9e-7 there at size 10."""
    text = f"agraph (float[1,{size},10,2] x) => (float[1,{size},10,2] y) <int64 at = {{1}}>"
    model = text_model(f"{text} {{ y = DFT <inverse = {inverse}> (x, , at) }}")
    x = np.zeros((1, size, 10, 2), np.float32)
    x[..., 0] = np.arange(size * 10).reshape(1, size, 10)
    y = interpret(program_of(model, {"x": x}), {"x": x}, weights_of(model))["y"]
    exact = (np.fft.ifft if inverse else np.fft.fft)(x[..., 0].astype(np.float64), axis=1)
    exact = np.stack([exact.real, exact.imag], -1)
    # half a unit of float32, and the sum's own error in double
    error = 2.0**-24 * np.abs(exact) + 1e-15 * size * np.abs(x).max()
    assert (np.abs(y - exact) <= error).all()


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_gives_onnxruntimes_results(name, moves_only):
    text, feeds = GRAPHS[name]
    model = text_model(text)
    program = program_of(model, feeds)
    expected = onnxruntime.InferenceSession(to_proto(model).SerializeToString()).run(None, feeds)
    got = interpret(program, feeds, weights_of(model))
    for value, want in zip(model.graph.outputs, expected, strict=True):
        assert got[value.name].shape == want.shape
        np.testing.assert_allclose(got[value.name], want, rtol=1e-6, atol=1e-6)


def test_rows_that_stand_apart_are_one_product():
    """As torch's MultiheadAttention asks for: a product for each place takes 20 times as long."""
    text, feeds = GRAPHS["a product of rows that stand apart"]
    model = text_model(text)
    program = program_of(model, feeds)
    [product] = [call.problem for call in program.calls if isinstance(call.problem, Problem)]
    assert (product.m, product.batch) == (160, ())
    want = feeds["x"].swapaxes(0, 1) @ feeds["w"]
    np.testing.assert_allclose(interpret(program, feeds, {})["y"], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("act", "bias"), [("", 1), ("Relu", 1), ("Gelu", 0), ("Tanh", 1)])
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_a_filter_of_one_tap_is_a_product_with_all_that_follows(batch, act, bias, dtype, width):
    """Its bias a row of the product, the residual and the activation in the same epilogue.

    16-bit pixels of no whole 16 bytes a channel are copied to such rows first.
    """
    z = "y" if not act else "z"
    text = f"""agraph ({dtype}[{batch},24,7,{width}] x, {dtype}[32,24,1,1] w, {dtype}[32] b,
                       {dtype}[{batch},32,7,{width}] r) => ({dtype}[{batch},32,7,{width}] y)
    {{ c = Conv (x, w{", b" * bias}) {z} = Add (r, c) {f"y = {act} (z)" if act else ""} }}"""
    kind = {"float": "float32"}.get(dtype, dtype)
    shapes = {"x": (batch, 24, 7, width), "w": (32, 24, 1, 1), "b": (32,)}
    shapes["r"] = (batch, 32, 7, width)
    feeds = {n: a.astype(kind) for n, a in arrays(**shapes).items()}
    model = text_model(text)
    (expected,) = onnxruntime.InferenceSession(to_proto(model).SerializeToString()).run(None, feeds)
    passes.optimize(model)
    calls = program_of(model, feeds).calls
    copied = dtype == "float16" and width == 7
    assert [isinstance(c.problem, Problem) for c in calls] == [False] * copied + [True]
    assert calls[-1].problem.op == "Gemm"
    assert calls[-1].problem.integer("ldb") == (56 if copied else 7 * width)
    if act == "Tanh":  # the interpreter has none in an epilogue
        return
    (y,) = interpret(program_of(model, feeds), feeds, {}).values()
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol={"float16": 4e-2}.get(dtype, 1e-5))


def test_a_residual_stays_apart_where_no_kernel_adds_it_before_the_activation_as_fast():
    shapes = {"x": ((16, 4096), "float16"), "w": ((4096, 4096), "float16"),
              "r": ((16, 4096), "float16")}  # fmt: skip
    ends = ", ".join(f"float16[{a[0]},{a[1]}] {name}" for name, (a, _) in shapes.items())
    body = "{ m = MatMul (x, w) s = Add (m, r) y = Relu (s) }"
    model = text_model(f"agraph ({ends}) => (float16[16,4096] y) {body}")
    calls = walk.lower(model, shapes, H200).calls
    product = next(c.problem for c in calls if isinstance(c.problem, Problem))
    assert product.attr("residual") or product.attr("beta") == 1.0
    assert (len(calls) == 1) == bool(product.attr("act"))


def test_the_floor_of_a_convolution_counts_its_products():
    text = (
        "agraph (float[2,64,32,32] x, float[64,64,3,3] w) => (float[2,64,32,32] y) "
        "{ y = Conv <pads = [1,1,1,1]> (x, w) }"
    )
    calls = program_of(text_model(text), arrays(x=(2, 64, 32, 32), w=(64, 64, 3, 3))).calls
    floor = sum(site(call, H200).floor for call in calls)
    assert floor >= 2 * 2 * 64 * 32 * 32 * 64 * 9 / H200.rate("float32")


def test_the_copies_of_a_lowering_that_refuses_go_with_it(monkeypatch):
    def refuses(ctx, node):
        ctx.dense(node, 0)
        return "not today"

    table = {**elementwise.LOWERINGS, **views.LOWERINGS, ("", "Softmax"): refuses}
    monkeypatch.setattr(walk, "lowerings", lambda: table)
    monkeypatch.setattr(walk.Lowerer, "_body", lambda self, node: None)
    text = "agraph (float[3,4,6] x) => (float[6,4,3] y) "
    model, feeds = (
        text_model(text + "{ t = Transpose<perm=[2,1,0]>(x) y = Softmax(t) }"),
        {"x": X},
    )
    expected = np.exp(X.T) / np.exp(X.T).sum(-1, keepdims=True)
    got = interpret(program_of(model, feeds), feeds, {})
    np.testing.assert_allclose(got["y"], expected, rtol=1e-6)


def test_feeds_that_decide_about_shapes_are_asked_for():
    text = """agraph (float[6] x, int64[2] s) => (float[A,B] y)
    { e = Exp(x) t = Identity(s) y = Reshape(e, t) }"""
    model, feeds = text_model(text), {"x": np.zeros(6, np.float32), "s": np.array([2, 3])}
    with pytest.raises(NeedsValues) as needs:
        program_of(model, feeds)
    assert needs.value.names == ("s",)
    program = program_of(model, feeds, values={"s": feeds["s"]})
    assert not program.fallbacks
    assert dict(program.outputs)["y"].shape == (2, 3)


def test_large_feeds_are_not():
    text = "agraph (float[6] x, int64[200] s) => (int64[1,N] y) { y = NonZero(s) }"
    feeds = {"x": np.zeros(6, np.float32), "s": np.zeros(200, np.int64)}
    program = program_of(text_model(text), feeds)
    assert [stage.host for stage in program.stages] == [False]
    assert not program.fallbacks


def test_views_launch_nothing():
    text = """agraph (float[4,6] x) => (float[2,12] y)
    <int64[3] a = {2, 2, 6}, int64[2] b = {2, 12}>
    { r = Reshape(x, a) e = Exp(r) y = Reshape(e, b) }"""
    program = program_of(text_model(text), {"x": np.zeros((4, 6), np.float32)})
    assert [call.kernel for call in program.calls] == ["Exp"]


def test_chain_is_one_kernel_that_stores_what_is_read_later():
    text = "agraph (float[8] x) => (float[8] y, float[8] z) { a = Exp(x) y = Neg(a) z = Mul(a, y) }"
    program = program_of(text_model(text), {"x": np.zeros(8, np.float32)})
    (call,) = program.calls
    assert len(call.reads) == 1
    assert len(call.writes) == 2


def test_a_number_of_one_chain_is_worked_out_where_it_is_read():
    text = """agraph (float[8] x, float s) => (float[8] y) <float one = {1}>
        { r = Div(one, s) y = Mul(x, r) }"""
    feeds = {"x": np.zeros(8, np.float32), "s": np.array(2, np.float32)}
    (call,) = program_of(text_model(text), feeds).calls
    assert [len(call.reads), len(call.writes)] == [2, 1]
    kept = text_model(text.replace("=> (", "=> (float r, "))
    assert len(program_of(kept, feeds).calls) == 2  # many threads would store it


def test_equal_nodes_run_once():
    text = "agraph (float[8] x) => (float[8] y) { a = Softmax(x) b = Softmax(x) y = Add(a, b) }"
    program = program_of(text_model(text), {"x": np.zeros(8, np.float32)})
    assert len([c for c in program.calls if "Softmax" in c.kernel]) == 1


def test_program_is_a_function_of_its_arguments():
    text, feeds = GRAPHS["chain with broadcasting"]
    first, second = (program_of(text_model(text), feeds) for _ in range(2))
    assert str(first) == str(second)
    assert first.calls == second.calls


def test_names_never_reach_the_source():
    text = "agraph (float[8] x) => (float[8] y) { z = Exp(x) y = Neg(z) }"
    model = text_model(text)
    for value in (*model.graph.inputs, *model.graph.outputs, model.graph[0].outputs[0]):
        value.name = f'{value.name}"; #error'
    for node in model.graph:
        node.name = "/* evil"
    feeds = {model.graph.inputs[0].name: np.zeros(8, np.float32)}
    for call in program_of(model, feeds).calls:
        for launch in call.launches:
            assert "evil" not in launch.source
            assert "#error" not in launch.source


def test_small_equal_calls_share_a_launch():
    text = "agraph (float[7,96] x, float[7,96] z) => (float[7,96] y, float[7,96] w) "
    text += "{ y = Softmax(x) w = Softmax(z) }"
    feeds = {name: np.ones((7, 96), np.float32) for name in "xz"}
    (call,) = program_of(text_model(text), feeds).calls
    assert call.launches[0].entry == "twins"


def test_the_gradient_of_a_batch_norm_takes_the_forwards_statistics():
    text = """agraph (float[8,4,6,6] x, float[4] s, float[4] b, float[4] m, float[4] v,
        float[8,4,6,6] dy) => (float[8,4,6,6] y, float[8,4,6,6] dx, float[4] ds, float[4] db) {
        y, rm, rv = BatchNormalization <training_mode = 1> (x, s, b, m, v)
        dx, ds, db = onnx_fuse.BatchNormGrad (dy, x, s) }"""
    feeds = arrays(x=(8, 4, 6, 6), s=(4,), b=(4,), m=(4,), v=(4,), dy=(8, 4, 6, 6))
    entries = [x.entry for c in program_of(text_model(text), feeds).calls for x in c.launches]
    assert sum(entry.startswith("reduce_") for entry in entries) == 2  # once, in two passes
    assert {"channel_sums", "channel_params", "channel_dx"} <= set(entries)


def norm_graph(sizes: list[int], dtype: str = "float") -> str:
    """y = Σ g² over tensors of these sizes."""
    inputs = ", ".join(f"{dtype}[{n}] g{i}" for i, n in enumerate(sizes))
    squares = " ".join(f"s{i} = ReduceSumSquare <keepdims = 0> (g{i})" for i in range(len(sizes)))
    terms = ", ".join(f"s{i}" for i in range(len(sizes)))
    return f"agraph ({inputs}) => ({dtype}[] y) {{ {squares} y = Sum({terms}) }}"


def test_a_global_norm_is_two_launches(monkeypatch):
    sizes = [1, 8192, 8193, 0, 20000]
    feeds = {f"g{i}": np.zeros(n, np.float32) for i, n in enumerate(sizes)}
    (call,) = program_of(text_model(norm_graph(sizes)), feeds).calls
    assert [(x.entry, x.grid[0]) for x in call.launches] == [
        ("sum_squares", 1 + 1 + 2 + 0 + 3),
        ("sum_squares_total", 1),
    ]
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        found = jit.resources(call.launches[0].source, call.launches[0].defines, arch)
        assert all(entry.clean for entry in found.values())
    monkeypatch.setattr(reduce_kernels, "ROWS", 2)  # a table holds so many: more take more launches
    (call,) = program_of(text_model(norm_graph(sizes)), feeds).calls
    assert [x.grid[0] for x in call.launches] == [2, 2, 3, 1]
    parts = [x.args[-1].offset for x in call.launches[:3]]
    assert parts == [0, 8, 16]
    # a sum of other things stays one expression
    other = norm_graph(sizes[:3]).replace("s0 = ReduceSumSquare", "s0 = ReduceSum")
    assert len(program_of(text_model(other), feeds).calls) > 1


def test_convolution_and_pooling_train_in_bfloat16():
    """Their gradients too: opset 21 has Conv, ConvTranspose and MaxPool in no bfloat16."""
    text = """agraph (float[2,3,9,9] x) => (float[2,4,4,4] y)
    <float[4,3,3,3] w = {W}> { c = Conv <pads = [1,1,1,1]> (x, w) r = Relu(c)
      y = MaxPool <kernel_shape = [2,2], strides = [2,2]> (r) }"""
    text = text.replace("{W}", "{" + ", ".join(["0.1"] * 108) + "}")
    graph, spec = training_model(
        text_model(text), loss="mse", optimizer=optim.SGD(lr=0.1), precision="bf16", fused=True
    )
    feeds = {"x": np.zeros((2, 3, 9, 9), np.float32), "labels": np.zeros((2, 4, 4, 4), np.float32)}
    feeds |= {s.name: np.asarray(s.initial) for s in spec.states}
    feeds |= {spec.lr: np.array(0.1, np.float32)}
    calls = program_of(graph, feeds).calls
    assert not any(call.host for call in calls)
    made = {t.dtype for c in calls if "Conv" in c.kernel for _, t in c.reads if len(t.shape) == 4}
    assert made == {"bfloat16"}


@pytest.mark.parametrize(
    ("rows", "hw", "count"),
    [(8192, H200, 1), ("rows", H200, 0), (64, H200, 0), (8192, CHIPS["A100"], 0)],
)
def test_a_trainers_float32_gradients_by_split_products_are_one_call(rows, hw, count):
    """Where that is faster than norm and product apart, behind a norm whose x has a gradient."""
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 20]>
        g (float[{rows},768] x) => (float[{rows},768] y) {{
        h = LayerNormalization <axis = -1> (x, g0, b0) p = MatMul (h, w0) r = Add (p, c0)
        n = LayerNormalization <axis = -1> (r, g1, b1) q = MatMul (n, w1) y = Add (q, c1) }}""")
    for name in ("w0", "g0", "b0", "c0", "w1", "g1", "b1", "c1"):
        ones = np.ones((768, 768) if name[0] == "w" else 768, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(ones, name))
    graph, _ = training_model(
        model, loss="mse", optimizer=optim.SGD(lr=0.1), precision="bf16x3", fused=True, level=1,
        whole=partial(linear.gradient_pays, math="bf16x3", hw=hw),
    )  # fmt: skip
    shapes = {
        v.name: (tuple(d if isinstance(d, int) else 2048 for d in v.shape), v.dtype.numpy().name)
        for v in graph.graph.inputs
    }
    calls = walk.lower(graph, shapes, hw, math="bf16x3").calls
    ops = [call.problem.op for call in calls if isinstance(call.problem, Problem)]
    assert ops.count("LayerNormGemmGrad") == count


def test_a_float16_step_overflows_and_recovers(moves_only, monkeypatch):
    """The training step's Program, its states in place, beside float32's on onnxruntime."""
    monkeypatch.setattr(
        program_passes, "batch", lambda calls, *_: list(calls)
    )  # the interpreter takes calls one by one
    numbers = ", ".join(map(str, np.linspace(-1, 1, 30)))
    text = f"agraph (float[4,6] x) => (float[4,5] y) <float[6,5] w = {{{numbers}}}> "
    text += "{ p = MatMul(x, w) y = Tanh(p) }"
    options = {"loss": "mse", "optimizer": optim.AdamW(lr=0.02), "clip_norm": 1.0}
    graph, spec = training_model(text_model(text), precision="fp16", loss_scale=2.0**22, **options)
    successors = {s.next: s.name for s in spec.states if s.next}
    model = guarded(graph, successors, [spec.loss])
    successors[f"{SOUND}.next"] = SOUND
    feeds = {"x": X[0], "labels": X[1, :, :5]}
    ends = {spec.lr: np.array(0.02, np.float32)}
    states = {SOUND: np.array(True)} | {s.name: np.asarray(s.initial) for s in spec.states}
    losses, scales = [], [2.0**22]
    for _ in range(20):
        arrays = {**feeds, **ends, **states}
        program = program_of(model, arrays, state=successors)
        found = interpret(program, arrays, weights_of(model))
        states = {name: found[after] for after, name in successors.items()}
        losses.append(float(found[spec.loss]))
        scales.append(float(states["loss_scale"]))
    skipped = 20 - int(states["loss_scale.updates"])
    assert 3 <= skipped <= 12
    assert scales == [2.0 ** (22 - min(i, skipped)) for i in range(21)]
    full = Trainer(text_model(text), **options)
    np.testing.assert_allclose(
        losses, [losses[0]] * skipped + [full.step(feeds) for _ in range(20 - skipped)], rtol=5e-3
    )


@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_a_recurrence_of_no_steps_is_onnxruntimes(op, gates):
    text = f"agraph (float[T,2,3] x) => (float[T,1,2,4] y) <float[1,{gates * 4},3] w = "
    text += f"{{{'1,' * (gates * 12 - 1)}1}}, float[1,{gates * 4},4] r = "
    text += f"{{{'1,' * (gates * 16 - 1)}1}}> {{ y = {op} <hidden_size = 4> (x, w, r) }}"
    model = text_model(text)
    found = [program_of(model, {"x": np.zeros((t, 2, 3), np.float32)}).fallbacks for t in (0, 1)]
    assert found == [(f"{op}: no kernel",), ()]


def test_state_is_written_in_place():
    text = """agraph (float[8] w, float[8] g) => (float[8] w1) <float r = {0.5}>
    { s = Mul(g, r) w1 = Sub(w, s) }"""
    feeds = {"w": np.zeros(8, np.float32), "g": np.zeros(8, np.float32)}
    program = program_of(text_model(text), feeds, state={"w1": "w"})
    (call,) = program.calls
    assert dict(program.outputs)["w1"] == dict(program.inputs)["w"]
    assert call.writes[0][1].buffer == dict(program.inputs)["w"].buffer


@pytest.mark.parametrize(
    "nodes",
    [
        "a1 = Identity(b) b1 = Identity(a)",
        "a1 = Exp(b) b1 = Identity(a)",
        "a1 = Transpose(a) b1 = Add(a, b)",
    ],
)
def test_states_made_of_states_take_their_values_before(nodes):
    text = f"agraph (float[4,4] a, float[4,4] b) => (float[4,4] a1, float[4,4] b1) {{ {nodes} }}"
    model, feeds = text_model(text), arrays(a=(4, 4), b=(4, 4))
    want = session.InferenceSession(model, device="cpu").run(None, feeds)
    got = interpret(program_of(model, feeds, state={"a1": "a", "b1": "b"}), feeds, {})
    for name, value in zip(("a1", "b1"), want, strict=True):
        np.testing.assert_allclose(got[name], value, rtol=1e-6)


RESHAPES = [
    ((2, 3, 4), (12, 4, 1), (6, 4), (4, 1)),
    ((3, 2, 4), (4, 12, 1), (6, 4), None),
    ((3, 2, 4), (4, 12, 1), (3, 2, 2, 2), (4, 12, 2, 1)),
    ((4,), (0,), (2, 2), (0, 0)),
    ((1,), (5,), (), ()),
]


@pytest.mark.parametrize(("shape", "strides", "wanted", "expected"), RESHAPES)
def test_reshape_strides(shape, strides, wanted, expected):
    assert reshape_strides(shape, strides, wanted) == expected


def test_width_follows_alignment():
    def width(offset, shape, strides):
        t = Tensor(0, "float32", shape, strides, offset)
        y = Tensor(1, "float32", shape, (shape[1], 1), 0)
        dims, s = pointwise.collapse(shape, [t.strides, y.strides])
        return pointwise.vector_width(dims, [t, y], s)

    assert width(0, (4, 8), (8, 1)) == 4
    assert width(2, (4, 8), (8, 1)) == 2
    assert width(0, (4, 8), (9, 1)) == 1
    assert width(0, (4, 6), (8, 1)) == 2


@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16"])
def test_lower_precision_leaves_the_model_it_was_cloned_from(dtype):
    text = """agraph (float[2,4] x) => (float[2,3] y) <float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12}>
    { a = MatMul(x, w) y = Exp(a) }"""
    model = text_model(text)
    infer_shapes(model)
    half = model.clone()
    lower_precision(half, onnx_ir.DataType[dtype])
    feeds = {"x": np.ones((2, 4), np.float32)}
    matmul = next(c for c in program_of(half, feeds).calls if "MatMul" in c.kernel)
    assert {t.dtype for _, t in (*matmul.reads, *matmul.writes)} == {dtype.lower()}
    assert {v.dtype for n in model.graph for v in n.outputs} == {onnx_ir.DataType.FLOAT}
    assert [v.dtype for v in half.graph.outputs] == [onnx_ir.DataType.FLOAT]


@pytest.mark.parametrize("dtype", ["FLOAT16", "BFLOAT16"])
def test_ends_keep_their_types_in_16_bits(dtype):
    """Those that had 16 bits too, as a cache has."""
    kind, number = dtype.lower(), onnx_ir.DataType[dtype].value
    text = f"""agraph ({kind}[2,4] p, float[2,4] x) => ({kind}[4,4] q, float[4,4] y)
    {{ h = Cast<to={number}>(x) q = Concat<axis=0>(p, h) w = Cast<to=1>(q) y = Exp(w) }}"""
    model = text_model(text)
    infer_shapes(model)
    lower_precision(model, onnx_ir.DataType[dtype])
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
    model = text_model(text)
    infer_shapes(model)
    lower_precision(model, onnx_ir.DataType[dtype], masters=masters)
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
    model = text_model(text)
    infer_shapes(model)
    lower_precision(model, onnx_ir.DataType.BFLOAT16, masters=masters)
    onnx.checker.check_model(to_proto(model), full_check=True)
    assert {n.inputs[0].dtype.name for n in model.graph if n.op_type in ("Add", "Concat")} == {
        "FLOAT"
    }


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("y = Add (x, z)", ((2, 3), (2, 4))),
        ("y = MatMul (x, z)", ((2, 3), (2, 4))),
        ("y = Gemm (x, z, r)", ((2, 3), (3, 4))),
        ("y = Concat <axis = 0> (x, z)", ((2, 3), (2, 4))),
        ("s = Constant <value_ints = [4, -1]> () u = Add (x, z) y = Reshape (u, s)", ((2, 3),) * 2),
        ("y = Conv (x, z)", ((1, 3, 4, 4), (2, 4, 3, 3))),
        ("y = LayerNormalization (x, z)", ((2, 3), (4,))),
        ("y = onnx_fuse.Gemm (x, z, r)", ((2, 3), (4, 5))),
        ("y = onnx_fuse.LayerNormGemm (x, r, r, z, r)", ((2, 3), (4, 5))),
        ("y = onnx_fuse.Sdpa (x, z, z)", ((1, 2, 4, 8), (1, 2, 4, 6))),
    ],
)
def test_operands_that_do_not_fit_are_refused_not_read_past_their_end(text, shapes):
    x, z, y = (",".join(f"{n}{i}" for i in range(len(shapes[n == "z"]))) for n in "xzy")
    model = text_model(f"agraph (float[{x}] x, float[{z}] z, float[5] r) => (float[{y}] y)"
                          f"{{ {text} }}")  # fmt: skip
    feeds = {name: np.zeros(s, np.float32) for name, s in zip("xz", shapes, strict=True)}
    with pytest.raises(ModelError, match=r"node '.*' \(\w+\) of \["):
        program_of(model, feeds | {"r": np.zeros(5, np.float32)})


GATED = """<ir_version: 10, opset_import: ["": 21, "onnx_fuse": 1]>
agraph ({kind}[B,64] x) => ({kind}[B,N] y) {{ y = onnx_fuse.{op} (x, {norm}w, c) }}"""
KINDS = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16"}


def gated_model(op, dtype="float32", columns=48, rows=32):
    """A gated product of constant weights, and x and what it should give."""
    rng = np.random.default_rng(4)
    norm = {"L": "g, b, ", "R": "g, "}.get(op[0], "")
    model = text_model(GATED.format(kind=KINDS[dtype], op=op, norm=norm))
    kind = onnx_ir.DataType[dtype.upper() if dtype != "float32" else "FLOAT"].numpy()
    arrays = {
        "w": rng.standard_normal((64, 2 * columns)) / 8,
        "c": rng.standard_normal(2 * columns),
    }
    arrays |= {"g": rng.standard_normal(64), "b": rng.standard_normal(64)}
    arrays = {name: array.astype(kind) for name, array in arrays.items()}
    for value in next(iter(model.graph)).inputs[1:]:
        value.const_value = onnx_ir.tensor(arrays[value.name], name=value.name)
        value.type, value.shape = (
            onnx_ir.TensorType(value.const_value.dtype),
            value.const_value.shape,
        )
        model.graph.register_initializer(value)
    x = rng.standard_normal((rows, 64)).astype(kind)
    wide = {name: array.astype(np.float64) for name, array in (*arrays.items(), ("x", x))}
    h = wide["x"]
    if norm:
        h = h - h.mean(-1, keepdims=True) * (op[0] == "L")
        h = h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-5) * wide["g"] + wide["b"] * (
            op[0] == "L"
        )
    first, last = np.split(h @ wide["w"] + wide["c"], 2, -1)
    gate, other = (first, last) if "First" in op else (last, first)
    return model, {"x": x}, gate / (1 + np.exp(-gate)) * other


@pytest.mark.parametrize("chip", ["H200", "A100", "B200"])
@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("place", ["GateFirst", "GateLast"])
@pytest.mark.parametrize("norm", ["", "LayerNorm", "RMSNorm"])
def test_a_gated_product_of_constant_weights_is_one_call(norm, place, dtype, chip):
    model, feeds, want = gated_model(f"{norm}{place}GemmSilu", dtype)
    program = program_of(model, feeds, hw=CHIPS[chip])
    (call,) = program.calls
    assert call.problem.attr("gate")
    assert dict(call.writes)["y"].shape == (32, 48)
    if norm and dtype == "float32":
        return  # the norm is in the launches
    bound = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype]  # roundings of w and y
    got = interpret(program, feeds, {})["y"].astype(np.float64)
    assert np.abs(got - want).max() <= bound * np.abs(want).max()


@pytest.mark.parametrize(
    ("columns", "rows", "calls"),
    [(48, 32, 1), (44, 32, 2), (48, 0, 1)],  # no whole blocks of 8 gates; a pass over nothing
)
@pytest.mark.parametrize("op", ["GateFirstGemmSilu", "RMSNormGateLastGemmSilu"])
def test_a_gated_product_that_no_epilogue_makes_is_its_parts(op, columns, rows, calls):
    model, feeds, want = gated_model(op, "float16", columns, rows)
    program = program_of(model, feeds)
    assert not program.fallbacks
    assert len(program.calls) == calls
    got = interpret(program, feeds, weights_of(model))["y"].astype(np.float64)
    assert got.shape == (rows, columns)
    assert not rows or np.abs(got - want).max() <= 4e-3 * np.abs(want).max()


def test_a_gated_product_of_computed_weights_is_its_parts():
    text = """agraph (float16[B,64] x, float16[64,96] w, float16[96] c) => (float16[B,48] y)
    { y = onnx_fuse.GateFirstGemmGelu (x, w, c) }"""
    feeds = {"x": np.ones((4, 64)), "w": np.ones((64, 96)), "c": np.ones(96)}
    program = program_of(text_model(text), {k: a.astype(np.float16) for k, a in feeds.items()})
    assert [isinstance(call.problem, Problem) for call in program.calls] == [True, False]


def test_a_kernel_without_that_epilogue_may_be_asked_for(monkeypatch):
    model, feeds, _ = gated_model("GateFirstGemmSilu", "float16")
    (call,) = program_of(model, feeds, prefs={"Gemm": "mma"}).calls
    assert call.problem.attr("gate")
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    product, over = program_of(model, feeds, prefs={"Gemm": "cublaslt"}).calls
    assert "cublaslt" in product.why
    assert not product.problem.attr("gate")
    assert over.kernel == "Silu+Mul"


@pytest.mark.parametrize("changed", ["w", "g"])
def test_weights_that_are_given_anew_are_packed_anew(changed):
    """A program of other shapes takes what was packed before, unless the weights are others."""
    model, feeds, _ = gated_model("RMSNormGateFirstGemmSilu", "float16")
    first = interpret(program_of(model, feeds), feeds, {})["y"]
    value = model.graph.initializers[changed]
    other = value.const_value.numpy() * np.float16(2)
    value.const_value = onnx_ir.tensor(other, name=changed)
    second = interpret(program_of(model, feeds), feeds, {})["y"]
    assert np.abs(second.astype(np.float32) - first).max() > 0.1


def test_each_pass_of_a_loop_has_its_own_shapes():
    text = """agraph (float[A] x) => (float[B] y)
    { n = Constant <value = int64 {3}> () c = Constant <value = bool {1}> ()
      y = Loop (n, c, x) <body = inner (int64 i, bool ci, float[P] v) => (bool co, float[Q] w)
      { co = Identity (ci) u = Concat <axis = 0> (v, v) w = Softmax <axis = 0> (u) }> }"""
    program = program_of(text_model(text), {"x": np.zeros(2, np.float32)})
    assert [c.writes[0][1].shape for c in program.calls if c.kernel == "Softmax"] == [
        (4,), (8,), (16,)
    ]  # fmt: skip


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_a_fused_product_of_no_rows_is_no_call(norm):
    text = f"""agraph (float16[B,8] x, float16[8] g, float16[8,4] w, float16[4] c)
    => (float16[B,4] y) {{ y = onnx_fuse.{norm}Gemm (x, g, {"g, " * (norm[0] == "L")}w, c) }}"""
    feeds = {"x": np.zeros((0, 8)), "g": np.ones(8), "w": np.ones((8, 4)), "c": np.ones(4)}
    program = program_of(text_model(text), {k: a.astype(np.float16) for k, a in feeds.items()})
    assert not program.fallbacks
    assert dict(program.outputs)["y"].shape == (0, 4)


def test_a_residual_is_added_in_the_product():
    text = """agraph (float[4,64] x, float[4,64] r, float[64,64] w) => (float[4,64] y)
    { a = MatMul(x, w) y = Add(r, a) }"""
    feeds = {name: np.ones((4, 64), np.float32) for name in "xr"}
    feeds["w"] = np.ones((64, 64), np.float32)
    program = program_of(text_model(text), feeds)
    (call,) = program.calls
    assert call.problem is not None
    assert call.problem.attr("residual")
    assert dict(call.reads)["c"] == dict(program.inputs)["r"]


def post_norm_model(text: str, dtype=np.float16, width: int = 768, rows: int = 256, batch: int = 1):
    """A graph over x [batch, rows / batch, width]; its other names are weights."""
    model = text_model(f"agraph ({text}")
    shapes = {"g": (width,), "b": (width,), "c": (width,), "w": (width,) * 2, "v": (width,) * 2}
    for node in model.graph:
        for value in node.inputs:
            made = value.producer() is not None or value.is_graph_input() or value.is_initializer()
            if not made:
                array = RNG.standard_normal(shapes[value.name[0]]) / len(shapes[value.name[0]]) ** 4
                value.const_value = onnx_ir.tensor(array.astype(dtype), name=value.name)
                model.graph.register_initializer(value)
    x = RNG.standard_normal((batch, rows // batch, width)) * 2 + 1
    return model, {"x": x.astype(dtype)}


POST_NORM = """float16[B,M,768] x) => (float16[B,M,768] y)
{ p = onnx_fuse.Gemm (x, w0, c0) q = onnx_fuse.Gemm (p, v0, b0) s = Add (q, x)
  h = LayerNormalization (s, g, b1)
  f = onnx_fuse.GemmRelu (h, w1, c1) o = onnx_fuse.Gemm (f, v1, b2) t = Add (h, o)
  y = LayerNormalization (t, g2, b3) }"""


def post_norm_value(given: dict[str, np.ndarray]) -> np.ndarray:
    """y of POST_NORM in float64."""
    wide = {k: v.astype(np.float64) for k, v in given.items()}

    def norm(s, g, b):
        centred = s - s.mean(-1, keepdims=True)
        return centred / np.sqrt(s.var(-1, keepdims=True) + 1e-5) * wide[g] + wide[b]

    def product(a, w, c):
        return a @ wide[w] + wide[c]

    x = wide["x"]
    h = norm(product(product(x, "w0", "c0"), "v0", "b0") + x, "g", "b1")
    t = product(np.maximum(product(h, "w1", "c1"), 0), "v1", "b2") + h
    return norm(t, "g2", "b3")


@pytest.mark.parametrize(
    "text",
    [
        POST_NORM,
        POST_NORM.replace("o = onnx_fuse.Gemm (f, v1, b2)", "r = MatMul (f, v1) o = Add (r, b2)"),
    ],
    ids=["", "bias added"],
)
@pytest.mark.parametrize(("batch", "rows"), [(1, 8), (4, 256), (1, 256), (2, 4096)])
def test_a_norm_is_left_to_the_products_that_read_it(batch, rows, text):
    model, feeds = post_norm_model(text, rows=rows, batch=batch)
    program = program_of(model, feeds)
    first, maker, reader, after, last = program.calls
    assert reader.problem.op == "LayerNormGemm"
    assert after.problem.attr("residual") == "norm"
    assert last.kernel == "LayerNormalization", "an output"
    many = rows > 1000
    assert bool(maker.problem.attr("moments")) == bool(reader.problem.attr("parts")) == many
    assert not first.problem.attr("moments")
    got = interpret(program, feeds, weights_of(model))["y"]
    want = post_norm_value(weights_of(model) | feeds)
    assert np.linalg.norm(got - want) <= 2e-3 * np.linalg.norm(want)


KEPT_NORMS = {
    "read by more than products": POST_NORM.replace(
        "y = LayerNormalization (t,", "e = Exp (h) d = Mul (e, t) y = LayerNormalization (d,"
    ),
    "an output": POST_NORM.replace("768] y)", "768] y, float16[B,M,768] h)"),
    "the residual first": """float16[B,M,768] x, float16[B,M,768] f)
    => (float16[B,M,768] t, float16[B,M,768] y)
{ h = LayerNormalization (x, g, b1) o = onnx_fuse.Gemm (f, v1, b2) t = Add (h, o)
  y = onnx_fuse.GemmRelu (h, w1, c1) }""",
    "an activation before": POST_NORM.replace("o = onnx_fuse.Gemm", "o = onnx_fuse.GemmRelu"),
    "transposed": POST_NORM.replace(
        "f = onnx_fuse.GemmRelu (h,",
        "k = Transpose <perm = [0, 2, 1]> (h) f = onnx_fuse.GemmRelu (k,",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT_NORMS)
def test_a_norm_that_something_else_reads_stays(name):
    square = name == "transposed"
    model, feeds = post_norm_model(KEPT_NORMS[name], rows=768 if square else 128)
    if name == "the residual first":
        feeds["f"] = np.ones((1, 128, 768), np.float16)
    calls = program_of(model, feeds).calls
    assert sum(c.kernel == "LayerNormalization" for c in calls) == (1 if "first" in name else 2)
    assert {c.problem.op for c in calls if isinstance(c.problem, Problem)} == {"Gemm"}


def test_a_norm_whose_parameters_are_trained_stays():
    model, feeds = post_norm_model(POST_NORM)
    for state in ({"y": "g"}, {"y": "b2"}, {"y": "w1"}):
        calls = program_of(model, feeds, state=state).calls
        assert sum(c.kernel == "LayerNormalization" for c in calls) == 2


def test_a_forced_kernel_that_takes_no_norm_keeps_it():
    model, feeds = post_norm_model(POST_NORM)
    calls = program_of(model, feeds, prefs={"LayerNormGemm": "apply_mma"}).calls
    assert sum(c.kernel == "LayerNormalization" for c in calls) == 2


def norm_model(norm: str):
    """<norm>Gemm of x [B, 64] in float16, and the values of its weights."""
    shapes = {"gamma": (64,), "beta": (64,), "w": (64, 32), "c": (32,)}
    if norm == "RMSNorm":
        del shapes["beta"]
    model = text_model(
        "agraph (float16[B,64] x) => (float16[B,32] y) "
        f"{{ y = {FUSE}.{norm}Gemm(x, {', '.join(shapes)}) }}"
    )
    values = {name: RNG.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    for value in model.graph[0].inputs[1:]:
        value.const_value = onnx_ir.tensor(values[value.name], name=value.name)
        model.graph.register_initializer(value)
    return model, values


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_an_inference_program_reads_weights_with_the_norm_folded_in(norm):
    model, values = norm_model(norm)

    def found(rows, **options):
        program = program_of(model, {"x": np.zeros((rows, 64), np.float16)}, **options)
        call = next(c for c in program.calls if isinstance(c.problem, Problem))
        assert {name for name, _ in call.writes} == {"y", "mean", "rstd"}
        names = {b.id: b.name for b in program.buffers}
        reads = {name: (names[t.buffer], program.constants.get(t.buffer)) for name, t in call.reads}
        return call.problem, reads

    wide = {name: value.astype(np.float64) for name, value in values.items()}
    wq = (wide["gamma"][:, None] * wide["w"]).astype(np.float16)
    cv = wide.get("beta", np.zeros(64)) @ wide["w"] + wide["c"]
    problem, reads = found(3)
    assert problem.attr("folded")
    assert problem.attr("static_b")
    np.testing.assert_array_equal(reads["wq"][1], wq)
    np.testing.assert_allclose(reads["cs"][1], wq.astype(np.float64).sum(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(reads["cv"][1], cv, rtol=1e-6, atol=1e-6)
    again = found(40)[1]
    assert all(again[name][0] == reads[name][0] for name in ("wq", "cs", "cv"))
    assert not found(64, state={"y": "w"})[0].attr("folded"), "w is replaced"
    model = model.clone()
    model.graph.initializers["w"].const_value = onnx_ir.tensor(-values["w"], name="w")
    np.testing.assert_array_equal(found(3)[1]["wq"][1], -wq)


@pytest.mark.parametrize(
    ("dtype", "math"),
    [("bfloat16", "ieee"), *(("float", how) for how in ("ieee", "tf32", "bf16x3", "bf16x6"))],
)
@pytest.mark.parametrize("act", ["", "Gelu"])
@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_a_norm_before_a_product_has_one_gradient_call(dtype, math, act, norm):
    layer = norm == "LayerNorm"
    text = f"""agraph ({dtype}[32,128] dy, {dtype}[32,64] x, {dtype}[64] s,
        {f"{dtype}[64] b," if layer else ""} {dtype}[64,128] w, {dtype}[128] c,
        {"float[32,1] mean," if layer else ""} float[32,1] rstd, {dtype}[32,128] z)
    => ({dtype}[32,64] dx, {dtype}[64] ds, {f"{dtype}[64] db," if layer else ""}
        {dtype}[64,128] dw, {dtype}[128] dc)
    {{ dx, ds, {"db," if layer else ""} dw, dc = onnx_fuse.{norm}Gemm{act}Grad
       (dy, x, s, {"b," if layer else ""} w, c, {"mean," if layer else ""} rstd, z) }}"""
    model = text_model(text)
    feeds = {
        v.name: (tuple(v.shape), "float32" if v.dtype == onnx_ir.DataType.FLOAT else "bfloat16")
        for v in model.graph.inputs
    }
    calls = walk.lower(model, feeds, H200, math=math).calls
    kinds = [call.problem.op for call in calls if isinstance(call.problem, Problem)]
    if dtype == "bfloat16" or math.startswith("bf16"):
        assert kinds == ["LayerNormGemmGrad"]
        assert calls[0].problem.text("act") == act.lower()
        assert bool(calls[0].problem.attr("rms")) != layer
        names = ["dy", "x", "gamma", "beta", "w", "c", "mean", "rstd", "z"]
        names = [name for name in names if layer or name not in ("beta", "mean")]
        assert [name for name, _ in calls[0].reads] == names
        assert ("dbeta" in dict(calls[0].writes)) == layer
    else:  # no kernel for fp32 as it is: the op's body
        assert set(kinds) == {"Gemm"}


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        ((8192, 1024, 4096), {"LayerNormGemmGrad"}),
        ((8192, 64, 64), {"Gemm"}),  # splitting its operands costs more than the products
        ((64, 60, 128), {"Gemm"}),  # rows of no whole 16 bytes
    ],
)
def test_a_float32_gradient_by_split_products_is_one_call_where_that_is_faster(shape, kinds):
    m, k, n = shape
    model = text_model(f"""agraph (float[{m},{n}] dy, float[{m},{k}] x, float[{k}] s,
        float[{k}] b, float[{k},{n}] w, float[{n}] c, float[{m},1] mean, float[{m},1] rstd,
        float[{m},{n}] z)
    => (float[{m},{k}] dx, float[{k}] ds, float[{k}] db, float[{k},{n}] dw, float[{n}] dc)
    {{ dx, ds, db, dw, dc = onnx_fuse.LayerNormGemmGrad (dy, x, s, b, w, c, mean, rstd, z) }}""")
    feeds = {v.name: (tuple(v.shape), "float32") for v in model.graph.inputs}
    calls = walk.lower(model, feeds, H200, math="bf16x6").calls
    assert {call.problem.op for call in calls if isinstance(call.problem, Problem)} == kinds


@pytest.mark.parametrize(("rows", "folds"), [(8192, 1), (64, 0)])
def test_a_step_folds_the_weights_once_where_that_pays(rows, folds):
    sizes = {"gamma": (2048,), "beta": (2048,), "w": (2048, 2048), "c": (2048,)}
    model = text_model(
        """agraph (bfloat16[M,2048] x, bfloat16[2048] gamma, bfloat16[2048] beta,
        bfloat16[2048,2048] w, bfloat16[2048] c) => (bfloat16[M,2048] y)
        { h = LayerNormalization (x, gamma, beta)  p = MatMul (h, w)  y = Add (p, c) }"""
    )
    passes.optimize(model)
    graph = autodiff.gradient(model, wrt=["x", *sizes])
    shapes = dict.fromkeys(("x", "y.grad"), (rows, 2048)) | sizes
    program = walk.lower(graph, {name: (s, "bfloat16") for name, s in shapes.items()}, H200)
    entries = [launch.entry for call in program.calls for launch in call.launches]
    assert entries.count("fold_columns") == folds
    forward, backward = (call for call in program.calls if isinstance(call.problem, Problem))
    assert bool(forward.problem.attr("folded")) == bool(backward.problem.attr("folded")) == folds
    if folds:
        names = ("wq", "cs", "cv")
        assert all(dict(forward.reads)[name] == dict(backward.reads)[name] for name in names)


def test_the_weights_of_a_mixed_precision_step_fold_in_one_launch(monkeypatch):
    """It reads the float32 masters and writes their 16-bit copies too, which have no cast then."""
    monkeypatch.setattr(linear, "_fold_pays", lambda *asked: True)
    shapes = {"g1": [16], "b1": [16], "w1": [16, 24], "c1": [24],
              "g2": [24], "b2": [24], "w2": [24, 8], "c2": [8]}  # fmt: skip
    weights = (
        f"float{shape} {name} = {{{', '.join(['0.5'] * int(np.prod(shape)))}}}"
        for name, shape in shapes.items()
    )
    graph, spec = training_model(
        text_model(
            f"""agraph (float[40,16] x) => (float[40,8] y) <{", ".join(weights)}> {{
            h = LayerNormalization (x, g1, b1)  p = MatMul (h, w1)  s = Add (p, c1)
            k = LayerNormalization (s, g2, b2)  q = MatMul (k, w2)  y = Add (q, c2) }}"""
        ),
        loss="mse", optimizer=optim.SGD(lr=0.1), precision="bf16", fused=True, level=1,
    )  # fmt: skip
    feeds = {"x": np.zeros((40, 16), np.float32), "labels": np.zeros((40, 8), np.float32)}
    feeds |= {s.name: np.asarray(s.initial) for s in spec.states}
    feeds |= {spec.lr: np.array(0.1, np.float32)}
    successors = {s.next: s.name for s in spec.states if s.next}
    program = program_of(graph, feeds, state=successors)
    (fold,) = (call for call in program.calls if call.kernel.startswith("Fold"))
    assert [launch.entry for launch in fold.launches] == ["fold_columns"]
    first, inputs = program.calls.index(fold), dict(program.inputs)
    reads, writes = dict(fold.reads), dict(fold.writes)
    made = {t.buffer: j for j, c in enumerate(program.calls) for _, t in c.writes}
    for i, w in enumerate(("w1", "w2")):
        assert reads[f"w.{i}"].buffer == inputs[w].buffer
        assert made[reads[f"gamma.{i}"].buffer] < first
        for name in ("low", "wq"):
            tensor = writes[f"{name}.{i}"]
            assert tensor.dtype == "bfloat16"
            assert made[tensor.buffer] == first
            users = [c for c in program.calls for _, t in c.reads if t.buffer == tensor.buffer]
            assert users
            assert min(map(program.calls.index, users)) > first


def test_an_encoder_layer_moves_nothing():
    """Heads split and merged by strides, positions by a view: in a layer only what computes."""
    model = session.load(Path(__file__).parents[1] / "models/encoder.onnx")
    passes.optimize(model)
    lower_precision(model, onnx_ir.DataType.FLOAT16)
    names = ("input_ids", "attention_mask", "token_type_ids")
    program = program_of(model, {name: np.ones((1, 64), np.int64) for name in names})
    layer = ["LayerNormGemm", "SdpaMask", "Gemm", "LayerNormGemmGelu", "Gemm"]
    kernels = [c.kernel for c in program.calls if not c.kernel.startswith("CastFloat16+Sub")]
    assert kernels[:11] == ["Gather+Gather+Add+Add", *layer, *layer]
    assert "Copy" not in kernels


def test_a_launch_calls_early_for_one_whose_blocks_fill_a_multiprocessor():
    text = """agraph (float16[4096,768] x, float16[768,3072] v, float16[3072,3072] w,
                     float16[3072] s) => (float16[4096,3072] y)
    { a = MatMul(x, v) b = MatMul(a, w) y = LayerNormalization(b, s) }"""
    shapes = {"x": (4096, 768), "v": (768, 3072), "w": (3072, 3072), "s": (3072,)}
    feeds = {name: np.empty(shape, np.float16) for name, shape in shapes.items()}
    calls = program_of(text_model(text), feeds).calls
    assert [call.kernel for call in calls] == ["MatMul", "MatMul", "LayerNormalization"]
    early = [dict(call.launches[0].defines).get("NEXT_ALONE") for call in calls]
    assert early == ["1", None, None]


@pytest.mark.parametrize("also", ["t = Neg(x)", "t = Neg(z)", "an output"])
def test_an_activation_is_applied_in_the_product(also):
    read_again, t = "x" not in also, "z" if also == "an output" else "t"
    text = f"""agraph (float[4,64] x, float[64,64] w, float[64] c)
    => (float[4,64] y, float[4,64] {t})
    {{ z = Gemm(x, w, c) y = Gelu(z) {also if t == "t" else ""} }}"""
    feeds = {"x": np.ones((4, 64), np.float32), "w": np.ones((64, 64), np.float32)}
    feeds["c"] = np.ones(64, np.float32)
    calls = program_of(text_model(text), feeds).calls
    (product,) = [call for call in calls if isinstance(call.problem, Problem)]
    assert len(calls) == (2 if t == "t" else 1)
    assert product.problem is not None
    assert product.problem.text("act") == "gelu"
    assert bool(product.problem.attr("save_z")) == read_again == ("z" in dict(product.writes))


def test_a_norms_backward_takes_in_what_follows_it():
    """dx of a LayerNorm times act'(z): one launch writes the product alone."""
    text = """agraph (float[6,64] dy, float[6,64] x, float[64] s, float[6,1] m, float[6,1] r,
                     float[6,64] z) => (float[6,64] y, float[64] ds, float[64] db)
    { dx, ds, db = onnx_fuse.LayerNormGrad(dy, x, s, m, r) e = Exp(z) h = Add(e, z)
      y = Mul(dx, h) }"""
    shapes = {"dy": (6, 64), "x": (6, 64), "s": (64,), "m": (6, 1), "r": (6, 1), "z": (6, 64)}
    feeds = arrays(**shapes)
    program = program_of(text_model(text), feeds)
    main, finish = program.calls
    assert main.kernel == "LayerNormGrad+Exp+Add+Mul"
    assert set(dict(main.writes)) == {"dx", "part"}
    assert dict(main.writes)["dx"] == dict(program.outputs)["y"]
    assert dict(main.reads)["e1"] == dict(program.inputs)["z"]
    macros = dict(main.launches[0].defines)
    assert macros["OPERANDS"] == "1"
    assert "m_exp(v1)" in macros["SUFFIX(v0, v1, v2, v3)"]
    assert finish.kernel == "LayerNormGrad"


@pytest.mark.parametrize(("also", "kernel"), [
    ("y = Cast<to=1>(n)", "LayerNormalization+Cast"),
    ("c = Add(r, n) y = Cast<to=1>(c)", "LayerNormalization+Add+Cast"),
    ("h = Relu(n) m = Softmax(n) c = Add(h, m) y = Cast<to=1>(c)", "LayerNormalization"),
    ("c = Add(n, b) y = Cast<to=1>(c)", "LayerNormalization"),
])  # fmt: skip
def test_a_norm_stores_what_its_one_reader_makes_of_it(also, kernel):
    text = f"""agraph (float16[9,64] x, float16[64] g, float16[64] b, float16[9,64] r)
    => (float[9,64] y) {{ t = Tanh(x) n = LayerNormalization(t, g, b) {also} }}"""
    shapes = dict.fromkeys("xr", (9, 64)) | dict.fromkeys("gb", (64,))
    feeds = {name: np.ones(shape, np.float16) for name, shape in shapes.items()}
    program = program_of(text_model(text), feeds)
    (norm,) = [c for c in program.calls if c.kernel.startswith("LayerNormalization")]
    assert norm.kernel == kernel
    if "+" in kernel:
        assert dict(norm.writes)["y"] == dict(program.outputs)["y"]
        assert dict(norm.launches[0].defines)["TY"] == "float"
        assert not norm.inplace, "rows of x are half as long as those of y"


@pytest.mark.parametrize(("nodes", "rows", "wide"), [
    ("z = Gemm(x, w, c) y = Cast<to=1>(z)", 32, True),
    ("z = Gemm(x, w, c) y = Cast<to=1>(z)", 2048, False),
    ("p = Gemm(x, w, c) z = Tanh(p) y = Cast<to=1>(z)", 32, True),
    ("p = Gemm(x, w, c) z = Add(p, r) y = Cast<to=1>(z)", 32, False),
    ("z = Gemm(x, w, c) t = Softmax(z) u = Mul(t, z) y = Cast<to=1>(u)", 32, False),
])  # fmt: skip
def test_a_product_stores_the_type_that_its_one_reader_wants(nodes, rows, wide):
    sizes = {"x": (rows, 64), "w": (64, 64), "c": (64,), "r": (rows, 64)}
    ends = ", ".join(f"float16[{','.join(map(str, s))}] {name}" for name, s in sizes.items())
    model = text_model(f"agraph ({ends}) => (float[{rows},64] y) {{ {nodes} }}")
    calls = program_of(model, {n: np.ones(s, np.float16) for n, s in sizes.items()}).calls
    (product,) = [call for call in calls if isinstance(call.problem, Problem)]
    assert (product.problem.out == "float32") == wide == (len(calls) == 1)


def norm_grad_of_a_product(k, turned, also=""):
    """(text, feeds) of the gradient of a norm whose dy is a product over k."""
    b = (64, k) if turned else (k, 64)
    text = f"""agraph (float[40,{k}] a, float{list(b)} b, float[40,64] x, float[64] s,
                     float[40,1] m, float[40,1] r) => (float[40,64] dx, float[64] ds, float[64] db
                     {", float[40,64] t" if also else ""})
    {{ dy = Gemm <transB = {int(turned)}> (a, b) {also}
      dx, ds, db = onnx_fuse.LayerNormGrad(dy, x, s, m, r) }}"""
    return text, arrays(a=(40, k), b=b, x=(40, 64), s=(64,), m=(40, 1), r=(40, 1))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("k", "also", "taken"), [(10, "", True), (16, "", True), (17, "", False),
                                                  (10, "t = Neg(dy)", False)])  # fmt: skip
def test_a_norms_backward_makes_rows_of_dy_from_few_columns(k, also, taken, turned):
    """dy = a · b over a classifier's classes has no launch, where nothing else reads it."""
    text, feeds = norm_grad_of_a_product(k, turned, also)
    program = program_of(text_model(text), feeds)
    kernels = [call.kernel for call in program.calls]
    assert ("Gemm" not in kernels) == taken
    assert ("Gemm+LayerNormGrad" in kernels) == taken
    if taken:
        main, given = program.calls[0], dict(program.inputs)
        assert dict(main.reads)["dy"] == given["a"]
        assert dict(main.reads)["b"].buffer == given["b"].buffer
        assert dict(main.launches[0].defines)["TURNED"] == str(int(turned))
        assert all(read != "dy" for _, read in main.inplace)


def product_of_a_norm(n, turned, also="", of="w", dtype="float32", shape=(40, 64)):
    """(text, feeds) of a product of n columns behind a norm."""
    (m, k), kind = shape, dtype.removesuffix("32")
    text = f"""agraph ({kind}[{m},{k}] x, {kind}[{k}] s, {kind}[{k}] b, {kind}[{n}] c,
                     {kind}{[n, k] if turned else [k, n]} w) => ({kind}[{m},{n}] z
                     {f", {kind}[{m},{k}] t" if "t = " in also else ""})
    {{ y = LayerNormalization(x, s, b) {also} z = Gemm <transB = {int(turned)}> (y, {of}, c) }}"""
    given = arrays(x=shape, s=(k,), b=(k,), w=(n, k) if turned else (k, n), c=(n,))
    return text, {name: array.astype(dtype) for name, array in given.items()}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("n", "more", "taken"), [
    (10, {}, True), (16, {"also": "t = Relu(y)"}, True), (10, {"dtype": "float16"}, True),
    (10, {"shape": (2000, 64)}, True),
    (17, {}, False), (10, {"shape": (4096, 512)}, False), (10, {"shape": (4, 20000)}, False),
    (10, {"also": "v = Tanh(w)", "of": "v"}, False),  # made behind the norm
])  # fmt: skip
def test_a_norm_makes_a_product_of_few_columns(n, more, taken, turned):
    """z = y · w + c over a classifier's classes has no launch, and y is stored where it is read."""
    text, feeds = product_of_a_norm(n, turned, **more)
    program = program_of(text_model(text), feeds)
    fused = [call for call in program.calls if call.kernel == "LayerNormalization+Gemm"]
    assert len(fused) == taken
    assert any(isinstance(call.problem, Problem) for call in program.calls) != taken
    for norm in fused:
        writes, given = dict(norm.writes), dict(program.inputs)
        assert writes["z"] == dict(program.outputs)["z"]
        assert ("y" in writes) == ("also" in more)
        assert dict(norm.reads)["w"].buffer == given["w"].buffer
        assert dict(norm.launches[0].defines)["TURNED"] == str(int(turned))


@pytest.mark.parametrize(("row", "column"), [("4", "bias"), ("5,1", ""), ("2,5,4", "residual")])
def test_a_row_added_to_a_product_is_its_bias(row, column):
    text = f"""agraph (float[2,5,3] x, float[3,4] w, float[{row}] c) => (float[2,5,4] y)
    {{ z = MatMul(x, w) y = Add(c, z) }}"""
    shape = tuple(map(int, row.split(",")))
    calls = program_of(text_model(text), arrays(x=(2, 5, 3), w=(3, 4), c=shape)).calls
    (product,) = [call for call in calls if isinstance(call.problem, Problem)]
    assert len(calls) == (1 if column else 2)
    assert {name for name in ("bias", "residual") if product.problem.attr(name)} == {column} - {""}
    assert ("col1" in dict(product.reads)) == (column == "bias")


def test_large_tensors_that_are_ready_last_are_updated_apart():
    """w - g for several w: the large ones do not wait for what makes the others' gradients."""
    text = """agraph (float[256,256] g, float[256,256] u, float[256,256] v, float[256,256] w,
                      float[4] s, float[5] t, float[4] h, float[5] k)
    => (float[256,256] u1, float[256,256] v1, float[256,256] w1, float[4] s1, float[5] t1)
    { a = Softmax(g) b = Softmax(a) c = Softmax(b)
      h1 = Softmax(h) h2 = Softmax(h1) h3 = Softmax(h2) h4 = Softmax(h3) k1 = Softmax(k)
      u1 = Sub(u, a) v1 = Sub(v, b) w1 = Sub(w, c) s1 = Sub(s, h4) t1 = Sub(t, k1) }"""
    big = dict.fromkeys("guvw", (256, 256))
    feeds = arrays(**big, s=(4,), t=(5,), h=(4,), k=(5,))
    state = {f"{name}1": name for name in "uvwst"}
    program = program_of(text_model(text), feeds, state=state)
    name = {t.buffer: name for name, t in program.inputs}
    updates = [{name[t.buffer] for _, t in call.writes} for call in program.calls
               if call.kernel.startswith("Sub")]  # fmt: skip
    assert updates == [{"u", "v"}, {"w"}, {"s", "t"}]


@pytest.mark.parametrize("first", [False, True])
def test_a_norms_backward_writes_no_state_that_is_read_after_it(first):
    """h' = dx z replaces h, and so waits for what reads h."""
    read = "t = Softmax(h)"
    text = f"""agraph (float[6,64] dy, float[6,64] x, float[64] s, float[6,1] m, float[6,1] r,
                      float[6,64] z, float[6,64] h)
    => (float[6,64] new, float[64] ds, float[64] db, float[6,64] t)
    {{ {read if first else ""} dx, ds, db = onnx_fuse.LayerNormGrad(dy, x, s, m, r)
      {"" if first else read} new = Mul(dx, z) }}"""
    names = {"s": (64,), "m": (6, 1), "r": (6, 1)}
    feeds = arrays(
        **{name: names.get(name, (6, 64)) for name in ("dy", "x", "s", "m", "r", "z", "h")}
    )
    program = program_of(text_model(text), feeds, state={"new": "h"})
    state = dict(program.inputs)["h"].buffer
    (wrote,) = [i for i, c in enumerate(program.calls) for _, t in c.writes if t.buffer == state]
    (reader,) = [i for i, c in enumerate(program.calls) for _, t in c.reads if t.buffer == state]
    assert reader < wrote
    assert (program.calls[wrote].kernel == "LayerNormGrad+Mul") == first


@pytest.mark.parametrize(
    ("nodes", "op"),
    [
        ("h = RMSNormalization (x, s)  y = MatMul (h, w)", "LayerNormGemm"),
        ("h = LayerNormalization (x, s)  y = MatMul (h, w)", "LayerNormGemm"),
        ("z = MatMul (x, w)  y = Gelu (z)", "Gemm"),
        ("z = MatMul (x, w)  b = Add (z, c)  y = Gelu (b)", "Gemm"),
    ],
)
def test_a_product_without_a_bias_has_the_kernel_of_one_with_it(nodes, op):
    text = f"""agraph (float16[40,64] x, float16[64] s, float16[64,72] w, float16[1] c)
    => (float16[40,72] y) {{ {nodes} }}"""
    model = text_model(text)
    passes.optimize(model)
    shapes = {v.name: (tuple(v.shape), "float16") for v in model.graph.inputs}
    program = walk.lower(model, shapes, H200)
    (call,) = [call for call in program.calls if isinstance(call.problem, Problem)]
    assert call.problem.op == op
    bias = dict(call.reads)["c" if op == "LayerNormGemm" else "col1"]
    assert bias.shape == (72,)
    if "(z, c)" in nodes:  # a number that is known when it runs
        (copy,) = [other for other in program.calls if other is not call]
        assert copy.writes[0][1] == bias
    else:
        assert len(program.calls) == 1
        assert not program.constants[bias.buffer].any()


BLOCK_GRAD = """agraph (bfloat16[M,256] g, bfloat16[512,256] v, bfloat16[M,256] x, bfloat16[256] s,
    bfloat16[256] b, bfloat16[256,512] w, bfloat16[512] c, float[M,1] mean, float[M,1] rstd,
    bfloat16[M,512] z) => (bfloat16[M,256] y, bfloat16[256,512] dw MORE)
{ r = Neg(g) dh = Gemm <transB = 1> (r, v)
  dx, ds, db, dw, dc = onnx_fuse.LayerNormGemmGeluGrad (dh, x, s, b, w, c, mean, rstd, z)
  y = Add(ORDER) NODE }"""
"""Backward of y = x + gelu(LN(x) w + c) v: what it gives to x."""


def block_gradient(rows, more="", node="", order="dx, r"):
    text = BLOCK_GRAD.replace("MORE", more).replace("NODE", node).replace("ORDER", order)
    model = text_model(text.replace("M,", f"{rows},"))
    shapes = {
        v.name: (tuple(v.shape), "float32" if v.dtype == onnx_ir.DataType.FLOAT else "bfloat16")
        for v in model.graph.inputs
    }
    program = walk.lower(model, shapes, H200)
    product, grad = (call for call in program.calls if isinstance(call.problem, Problem))
    return program, product, grad


@pytest.mark.parametrize(("also", "moved"), [("", True), (", bfloat16[64,512] dh", False)])
def test_a_product_stores_its_result_times_the_slope_of_the_activation_before(also, moved):
    program, product, grad = block_gradient(64, also)
    assert bool(product.problem.attr("dact")) == moved
    assert product.problem.text("act") == ("gelu" if moved else "")
    assert grad.problem.text("act") == ("" if moved else "gelu")
    z = dict(program.inputs)["z"]
    assert dict(product.reads).get("c") == (z if moved else None)
    assert dict(grad.reads)["dy"].buffer == product.writes[0][1].buffer


HIDDEN_GRAD = """agraph (bfloat16[M,K] dy, bfloat16[N,K] v, bfloat16[M,128] x,
    bfloat16[128,N] w, bfloat16[M,N] z) => (bfloat16[M,128] dx, bfloat16[128,N] dw MORE)
{ dh = Gemm <transB = 1> (dy, v)  dx, dw, dc = onnx_fuse.GemmSiluGrad (dh, x, w, z) }"""
"""Backward of y = silu(x w + c) v to its first layer."""


def hidden_gradient(rows, width, inner, more):
    text = HIDDEN_GRAD.replace("MORE", more).replace("M,", f"{rows},")
    for name, size in (("K", width), ("N", inner)):
        text = text.replace(f"{name}]", f"{size}]").replace(f"[{name},", f"[{size},")
    return text_model(text)


@pytest.mark.parametrize(
    ("rows", "more", "sums"),
    [(8, "", 0), (4100, "", 0), (4100, ", bfloat16[N] dc", 1)],
)
def test_of_an_activations_gradient_the_sums_for_the_bias_are_left(rows, more, sums):
    model = hidden_gradient(rows, 768, 3072, more)
    shapes = {v.name: (tuple(v.shape), "bfloat16") for v in model.graph.inputs}
    program = walk.lower(model, shapes, H200)
    calls = [call for call in program.calls if call.launches[0].entry == "act_grad_rows"]
    first, *products = (call for call in program.calls if isinstance(call.problem, Problem))
    assert len(calls) == sums
    assert (first.problem.attr("dact"), first.problem.text("act")) == (True, "silu")
    assert dict(first.reads)["c"] == dict(program.inputs)["z"]
    dz = dict(first.writes)["y"].buffer
    assert all(dz in {t.buffer for _, t in call.reads} for call in (*products, *calls))
    for call in calls:
        (launch,) = call.launches
        assert "ACT" not in dict(launch.defines)
        assert "dz" not in dict(call.writes)
        found = jit.resources(launch.source, launch.defines, H200.arch)
        assert all(entry.clean for entry in found.values())


@pytest.mark.parametrize("order", ["dx, r", "r, dx"])
@pytest.mark.parametrize(
    ("rows", "also", "node", "way"),
    [
        (64, "", "", "apart"),
        (64, ", bfloat16[64,256] t", "t = Softmax(r)", "apart"),
        (64, ", bfloat16[64,256] dx", "", ""),
        (8192, "", "", "here"),
        (8192, ", bfloat16[8192,256] r", "", ""),  # no kernel for so many rows reads it elsewhere
        (8192, ", bfloat16[8192,256] t", "e = Exp(dw) f = ReduceMax(e) t = Add(r, f)", ""),
    ],
)
def test_a_residuals_gradient_is_added_where_dx_is_stored(rows, also, node, way, order):
    program, product, grad = block_gradient(rows, also, node, order)
    assert grad.problem.text("add") == way
    y = dict(program.outputs)["y"].buffer
    adds = [call for call in program.calls if call.kernel.startswith("Add")]
    if not way:
        assert y in {t.buffer for call in adds for _, t in call.writes}
        return
    assert not adds
    assert dict(grad.writes)["dx"].buffer == y
    added = dict(grad.reads)["add"].buffer
    assert (added == y) == (way == "here")
    assert dict(product.reads)["a"].buffer == added


@pytest.mark.parametrize(("rows", "sums"), [(1, 0), (33, 1)])
def test_an_activations_gradient_is_one_pass_and_two_products_at_any_rows(rows, sums):
    case = math_cases.Case(
        "GemmGeluGrad", ((rows, 72), (rows, 40), (40, 72), (rows, 72)), {}, 3, "bfloat16",
        math_cases.FUSE,
    )  # fmt: skip
    calls = case.program().calls
    entries = [call.launches[0].entry for call in calls if not isinstance(call.problem, Problem)]
    assert entries == ["act_grad_rows"] + ["sum_parts"] * sums
    dx, dw = (call.problem for call in calls if isinstance(call.problem, Problem))
    assert (dx.m, dx.n, dx.k) == (rows, 40, 72)
    # of one row, too, x is a transpose whose rows TMA can read
    assert (dw.m, dw.n, dw.k, dw.trans_a, dw.integer("lda")) == (40, 72, rows, True, 40)


@pytest.mark.parametrize(("rows", "columns"), [(0, 128), (32, 0)])
@pytest.mark.parametrize("op", ["LayerNormGemm", "LayerNormGemmGelu", "GemmGelu"])
def test_gradients_of_empty_products_are_their_bodies(op, rows, columns):
    m, n, norm = rows, columns, op.startswith("LayerNorm")
    vectors = "float16[64] s, float16[64] b," if norm else ""
    more = f"float16[{n}] c, float[{m},1] mean, float[{m},1] rstd," if norm else ""
    extra = "float16[64] ds, float16[64] db," if norm else ""
    text = f"""agraph (float16[{m},{n}] dy, float16[{m},64] x, {vectors} float16[64,{n}] w, {more}
        float16[{m},{n}] z) => (float16[{m},64] dx, {extra} float16[64,{n}] dw, float16[{n}] dc)
    {{ dx, {"ds, db," if norm else ""} dw, dc = onnx_fuse.{op}Grad
       (dy, x, {"s, b," if norm else ""} w, {"c, mean, rstd," if norm else ""} z) }}"""
    model = text_model(text)
    shapes = {
        v.name: (tuple(v.shape), "float32" if v.dtype == onnx_ir.DataType.FLOAT else "float16")
        for v in model.graph.inputs
    }
    program = walk.lower(model, shapes, H200)
    assert not any(
        call.problem is not None and call.problem.op.endswith("Grad") for call in program.calls
    )
    assert [t.shape for _, t in program.outputs] == [tuple(v.shape) for v in model.graph.outputs]

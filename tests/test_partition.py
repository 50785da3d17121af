"""A graph cut into a forward and a backward computes what the two as one graph compute."""

import numpy as np
import onnx_ir
import pytest
from support import answers, assert_near, drawn, table

from onnx_fuse import session
from onnx_fuse.autodiff import Partition, gradient, open_parameters, partition, trainable
from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime import ort

# name: graph, inputs asked for, inner values that pass from one half to the other
CASES = table(globals())("""
one fused operator: "xwcsb", {"y.mean", "y.rstd", "y.z"}
  agraph (float[M,K] x, float[N,K] w, float[N] c, float[K] s, float[K] b) => (float[M,N] y)
  { t = Transpose <perm = [1, 0]> (w) y = onnx_fuse.LayerNormGemmGelu
  <epsilon = 0.001> (x, s, b, t, c) }
an output that the backward reads: "x", {"y"}
  agraph (float[M,K] x) => (float[M,K] y) { y = Tanh(x) }
nothing but inputs: "xw", set()
  agraph (float[M,K] x, float[M,K] w) => (float[M,K] y) { y = Mul(x, w) }
views are made again, sizes are those of inputs: "xw", {"e"}
  agraph (float[M,K] x, float[M,K] w) => (float[] y) { e = Exp(x) t = Transpose(e) u = Transpose(w)
  p = Mul(t, u) y = ReduceSum <keepdims = 0> (p) }
sizes that no input tells are kept: "x", {"g", "n", "shape of p"}
  agraph (float[M,K] x) => (float[] y) <int64[1] flat = {-1}, int64[1] first = {0}>
  { f = Reshape(x, flat) n = NonZero(f) i = Squeeze(n, first) g = Gather(f, i) p = Mul(g, g)
  y = ReduceSum <keepdims = 0> (p) }
an output that gets no gradient: "x", set()
  agraph (float[M,K] x) => (float[M,K] y, int64[M] i) { y = Sin(x) i = ArgMax
  <axis = 1, keepdims = 0> (x) }
what is split is kept, not its parts: "xw", {"e", "p", "q"}
  agraph (float[M,12] x, float[M,4] w) => (float[M,4] y) { e = Exp(x) a, b, c = Split
  <axis = 1, num_outputs = 3> (e) p = Mul(a, b) q = Mul(c, w) y = Mul(p, q) }
what an If captures is kept, not sizes in its branches: "xw", {"e", "f", "c", "y"}
  agraph (float[M,K] x, float[M,K] w) => (float[M,K] y) <float zero = {0}>
  { e = Exp(x) f = Sin(w) s = ReduceSum <keepdims = 0> (x) c = Greater(s, zero)
  q = If <then_branch = g () => (float[M,K] a) { a = Mul(e, f) },
  else_branch = h () => (float[M,K] b) { r = ReduceSum <keepdims = 1> (e) b = Mul(r, f) }> (c)
  y = Tanh(q) }
two outputs of one value's making: "x", {"y"}
  agraph (float[M,K] x) => (float[M,K] y, float[M,K] z) { y = Exp(x) z = Mul(y, x) }
""")
SIZES = {"M": 3, "K": 4, "N": 5}


def run(model: onnx_ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return answers(ort.session(model), feeds)


def both(
    model: onnx_ir.Model, halves: Partition, feeds: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The results of the forward and of the backward."""
    made = run(halves.forward, feeds)
    return made | run(halves.backward, feeds | made)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("recompute", [False, True])
def test_the_halves_compute_what_the_whole_computes(name: str, recompute: bool) -> None:
    text, wrt, kept = CASES[name]
    model = session.load(text_model(text))
    halves = partition(model, list(wrt), recompute=recompute)
    whole = gradient(model, list(wrt))
    feeds = drawn(whole, SIZES)
    expected = run(whole, feeds)
    found = both(model, halves, feeds)
    assert_near(found, expected, rtol=1e-5, atol=1e-6)
    own = {str(v.name) for v in model.graph.inputs}
    dys = {str(v.name) for v in whole.graph.inputs} - own
    read = {str(v.name) for v in halves.backward.graph.inputs} - own - dys
    assert len(read) == (0 if recompute else len(kept))
    if not recompute and "shape of p" not in kept:
        assert read == kept


def test_attention_is_kept_in_the_order_in_which_it_is_read() -> None:
    model = session.load(
        text_model("""agraph (float[M,2,K,8] q, float[M,2,K,8] k,
    float[M,2,K,8] v) => (float[M,K,2,8] z) { y = onnx_fuse.Sdpa <scale = 0.5> (q, k, v)
    t = Transpose <perm = [0, 2, 1, 3]> (y) z = Exp(t) }""")
    )
    halves = partition(model, list("qkv"), fused=True)
    kept = {v.name: v for v in halves.forward.graph.outputs}
    assert "t" in kept
    assert "y" not in kept
    whole = gradient(model, list("qkv"))
    feeds = drawn(whole, SIZES)
    found = both(model, halves, feeds)
    assert_near(found, run(whole, feeds), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["one fused operator", "nothing but inputs"])
def test_gradients_of_gradients_are_those_of_differences(name: str) -> None:
    text, wrt, _ = CASES[name]
    model = session.load(text_model(text))
    first = partition(model, list(wrt), recompute=True).backward
    second = partition(first, ["x"], recompute=True).backward
    given = drawn(first, SIZES) | drawn(second, SIZES, seed=2)
    feeds = {k: a.astype(np.float64) for k, a in given.items()}
    step = np.random.default_rng(1).standard_normal(feeds["x"].shape)

    def along(t: float) -> float:
        """Σ u · (gradients at x + t step), with u the cotangents of the second backward."""
        at = {k: a.astype(np.float32) for k, a in (feeds | {"x": feeds["x"] + t * step}).items()}
        found = run(first, at)
        return float(sum((feeds[f"{k}.grad"] * v).sum() for k, v in found.items()))

    exact = run(second, {k: a.astype(np.float32) for k, a in feeds.items()})
    slope = (along(1e-2) - along(-1e-2)) / 2e-2
    # differences in float32: a step of 1e-2 leaves three digits
    (dx,) = exact.values()
    np.testing.assert_allclose((dx * step).sum(), slope, rtol=2e-2, atol=2e-2)


def test_parameters_that_a_pass_packed_are_inputs_in_their_own_shapes() -> None:
    from onnx_fuse import rewrite

    model = session.load(
        text_model(
            """agraph (float[M,2] x) => (float[M,2] p, float[M,2] q)
            <float[2,2] a = {1,2,3,4}, float[2,2] b = {5,6,7,8}, float[2] c = {0,1}>
            { p = Gemm <transB = 1> (x, a, c) q = Gemm <transB = 1> (x, b, c) }"""
        )
    )
    x = np.array([[1, -1], [0.5, 2]], np.float32)
    before = run(model, {"x": x})
    weights = {
        str(v.name): v.const_value.numpy().copy()
        for v in model.graph.initializers.values()
        if v.const_value is not None
    }
    rewrite.optimize(model, training=True)
    names = open_parameters(model, trainable(model))
    assert sorted(names) == ["a", "b", "c"]
    after = run(model, {"x": x, **weights})
    assert_near(after, before, rtol=1e-6)
    shapes = {str(v.name): tuple(v.shape or ()) for v in model.graph.inputs[1:]}
    assert shapes == {"a": (2, 2), "b": (2, 2), "c": (2,)}


def test_what_draws_random_numbers_is_not_run_again() -> None:
    text = """agraph (float[M,K] x) => (float[M,K] y)
    { r = RandomNormalLike(x) e = Exp(r) y = Mul(x, e) }"""
    model = session.load(text_model(text))
    halves = partition(model, ["x"])
    feeds = drawn(model, SIZES) | {"y.grad": np.ones((3, 4), np.float32)}
    found = both(model, halves, feeds)
    np.testing.assert_allclose(found["x.grad"] * feeds["x"], found["y"], rtol=1e-5)
    with pytest.raises(ModelError, match="draws random numbers"):
        partition(model, ["x"], recompute=True)

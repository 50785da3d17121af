"""The reverse walk: what it builds, what it refuses; losses; fused gradients; stored gradients."""

from collections import Counter

import numpy as np
import pytest
from cases import real_cases
from support import answers, assert_near, drawn, table, with_weights
from test_gradients import plain_and_fused, session

import onnx_fuse.ops.fused  # noqa: F401
from onnx_fuse import autodiff, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.importer.save import inline
from onnx_fuse.ir.build import text_model
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops import OPS
from onnx_fuse.ops.activations import ACTIVATIONS
from onnx_fuse.ops.fused.sdpa import KINDS

CASES = real_cases()


def rng(seed=0):
    return np.random.default_rng(seed)


def weighted(text, **weights):
    """An ONNX text model whose inputs named in `weights` become initializers."""
    return with_weights(text_model(text), weights)


def run(model, feeds):
    return answers(session(model), feeds)


def ops_of(model):
    return Counter(n.op_type for n in model.graph)


# ---- stored gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_stored_gradients(case, fused):
    model = load(case.path)
    outputs = [v.name for v in model.graph.outputs]
    if fused:
        rewrite.optimize(model, training=True)
    found = autodiff.gradient(model, wrt=list(case.gradients))
    feeds, expected = case.feeds[0]
    cotangent = case.arrays["cotangent"]
    feeds = {**feeds, f"{outputs[0]}.grad": (cotangent / cotangent.size).astype(np.float32)}
    for name in outputs[1:]:
        feeds[f"{name}.grad"] = np.zeros_like(expected[name])
    got = run(found, feeds)
    # Some gradients are zero up to rounding (attention's key biases): measured against the largest.
    floor = 1e-3 * max(np.abs(g).max() for g in case.gradients.values())
    for name, gradient in case.gradients.items():
        error = np.abs(got[f"{name}.grad"] - gradient).max()
        assert error <= 1e-4 * max(np.abs(gradient).max(), floor), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_second_feed_of_other_sizes_runs(case):
    model = load(case.path)
    feeds, expected = case.feeds[1]
    feeds = {**feeds, **{f"{k}.grad": np.ones_like(v) for k, v in expected.items()}}
    for name, value in run(autodiff.gradient(model), feeds).items():
        assert np.isfinite(value).all(), name


# ---- what is built ---------------------------------------------------------------------------

MLP = """agraph (float[B,4] x, float[4,5] w, float[5] b, float[5,3] v) => (float[B,3] y)
    { h = MatMul (x, w)  z = Add (h, b)  r = Relu (z)  y = MatMul (r, v) }"""


def mlp():
    shapes = {"w": (4, 5), "b": (5,), "v": (5, 3)}
    return weighted(MLP, **{k: rng(1).standard_normal(s, "f") for k, s in shapes.items()})


def test_only_needed_gradients_are_built():
    assert ops_of(autodiff.gradient(mlp(), wrt=["v"]))["Gemm"] == 1
    assert ops_of(autodiff.gradient(mlp()))["Gemm"] == 3  # v, relu's input, w; none for x
    both = autodiff.gradient(mlp(), wrt=["b", "x"])
    assert [v.name for v in both.graph.outputs] == ["y", "b.grad", "x.grad"]


def test_static_sums_need_no_shape_arithmetic():
    found = ops_of(autodiff.gradient(mlp()))
    assert not found.keys() & {"Shape", "NonZero", "Equal", "Transpose"}


def test_shared_weights_add_up_and_unused_ones_are_zero():
    text = """agraph (float[2,3] x, float[3] w, float[3] u) => (float[2,3] y)
        { a = Mul (x, w)  y = Mul (a, w) }"""
    w = np.array([1, 2, 3], np.float32)
    x, dy = rng().standard_normal((2, 2, 3), "f")
    got = run(autodiff.gradient(weighted(text, w=w, u=w)), {"x": x, "y.grad": dy})
    np.testing.assert_allclose(got["w.grad"], (2 * x * w * dy).sum(0), rtol=1e-6)
    np.testing.assert_array_equal(got["u.grad"], np.zeros(3, "f"))


@pytest.mark.parametrize("dtype", ["float16", "double"])
def test_gradients_have_the_dtype_of_the_model(dtype):
    numpy_dtype = {"float16": np.float16, "double": np.float64}[dtype]
    weights = {
        k: v.const_value.numpy().astype(numpy_dtype) for k, v in mlp().graph.initializers.items()
    }
    model = weighted(MLP.replace("float[", f"{dtype}["), **weights)
    x, dy = rng().standard_normal((6, 4)), rng(1).standard_normal((6, 3))
    got = run(
        autodiff.gradient(model), {"x": x.astype(numpy_dtype), "y.grad": dy.astype(numpy_dtype)}
    )
    expected = run(autodiff.gradient(mlp()), {"x": x.astype("f"), "y.grad": dy.astype("f")})
    for name in ("w.grad", "b.grad", "v.grad"):
        assert got[name].dtype == numpy_dtype
        scale = np.abs(expected[name]).max()
        np.testing.assert_allclose(
            got[name], expected[name], atol=scale * {"float16": 5e-3, "double": 1e-6}[dtype]
        )


def test_an_operator_without_rule_goes_through_its_body():
    assert ("", "CenterCropPad") not in OPS
    text = """agraph (float[4,3] x, int64[2] shape) => (float[2,5] y)
        { y = CenterCropPad (x, shape) }"""
    dy = rng().standard_normal((2, 5), "f")
    model = weighted(text, shape=np.array([2, 5]))
    got = run(autodiff.gradient(model, wrt=["x"]), {"x": np.zeros((4, 3), "f"), "y.grad": dy})
    expected = np.zeros((4, 3), "f")
    expected[1:3] = dy[:, 1:4]
    np.testing.assert_array_equal(got["x.grad"], expected)


# ---- what is refused -------------------------------------------------------------------------


REFUSED = table(globals())("""
Floor: ["'x' has no gradient", "Floor", "piecewise constant"]
  y = Floor (x)
Cast: ["Cast", "not of a floating-point type"]
  i = Cast <to = 7> (x) y = Cast <to = 1> (i)
Unique: ["Unique", "positions"]
  n = Constant <value_ints = [1]> () u, p, i, c = Unique (x) y = Reshape (u, n)
RNN: ["node 's' (RNN)", "its activations are affine, not tanh"]
  a = Constant <value_ints = [0]> () v = Unsqueeze (x, a)
  w = Constant <value = float[1,1,2] {1, 2}> () r = Constant <value = float[1,1,1] {1}> ()
  s = RNN <hidden_size = 1, activations = ["Affine"]> (v, w, r) y = Flatten (s)
Det: ["node 'y' (Det)", "no gradient rule"]
  y = Det (x)
Einsum: ["(Einsum)", "diagonal"]
  y = Einsum <equation = "ii->i"> (x)
""")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_node_and_the_reason(name):
    body, words = REFUSED[name]
    model = text_model(f"agraph (float[2,2] x) => (float[n,m] y) {{ {body} }}")
    with pytest.raises(ModelError) as caught:
        autodiff.gradient(model, wrt=["x"])
    for word in words:
        assert word in str(caught.value)


def test_an_operator_that_is_not_known_is_named_where_its_shape_is_missing():
    text = """<ir_version: 10, opset_import: ["" : 21, "elsewhere" : 1]>
      g (float[2,2] x) => (float[n,m] y) { a = elsewhere.Own (x) y = MatMul (a, x) }"""
    with pytest.raises(ModelError, match=r"what elsewhere\.Own computes is not known here"):
        autodiff.gradient(text_model(text), wrt=["x"])


@pytest.mark.parametrize("form", [('Einsum <equation = "abk,kn->abn">', "MatMul"), ("", "")])
def test_a_rank_that_constants_decide_is_found(form):
    text = """agraph (float[A,6] x) => (float[A,2,1] y) <float[3,1] w = {1,2,3}> {
      last = Constant <value_ints = [-1]> () rank = Constant <value_ints = [2]> ()
      zero = Constant <value_ints = [0]> () tail = Constant <value_ints = [2,3]> ()
      all = Shape (x) end = Mod (last, rank) head = Slice (all, zero, end)
      sizes = Concat <axis = 0> (head, tail) r = Reshape (x, sizes)
      y = Einsum <equation = "abk,kn->abn"> (r, w) }""".replace(*form)
    x = np.arange(12, dtype=np.float32).reshape(2, 6)
    feeds = {"x": x, "y.grad": np.ones((2, 2, 1), np.float32)}
    _, dw = session(autodiff.gradient(text_model(text), wrt=["w"])).run(None, feeds)
    np.testing.assert_allclose(dw[:, 0], x.reshape(-1, 3).sum(0))


@pytest.mark.parametrize("condition", [True, False])
def test_if_gets_an_if(condition):
    text = """agraph (float[N,2] x, float[2] w, bool c) => (float[N,2] y) {
        h = Mul (x, w)
        z, k = If (c) <
            then_branch = a () => (float[N,2] p, float[2] r) { p = Sin (h)\n r = Exp (w) },
            else_branch = b () => (float[N,2] q, float[2] s) { q = Mul (h, h)\n s = Identity (w) }>
        y = Mul (z, k)
    }"""
    x, dy = rng().standard_normal((2, 3, 2), "f")
    w = np.array([0.5, -1.5], "f")
    feeds = {"x": x, "w": w, "c": np.array(condition), "y.grad": dy}
    got = run(autodiff.gradient(text_model(text), wrt=["w", "x"]), feeds)
    h = x * w
    z, dz, k, dk = (
        (np.sin(h), np.cos(h), np.exp(w), np.exp(w)) if condition else (h * h, 2 * h, w, 1)
    )
    np.testing.assert_allclose(got["x.grad"], dy * k * dz * w, rtol=1e-5)
    np.testing.assert_allclose(
        got["w.grad"], (dy * k * dz * x + dy * z * dk).sum(0), rtol=1e-5, atol=1e-6
    )


def test_a_stopped_path_is_zero_where_another_is_open():
    model = text_model("agraph (float[2] x) => (float[2] y) { f = Floor (x)\n y = Mul (f, x) }")
    x = np.array([1.5, -2.5], np.float32)
    got = run(autodiff.gradient(model, wrt=["x"]), {"x": x, "y.grad": np.ones(2, "f")})
    np.testing.assert_array_equal(got["x.grad"], np.floor(x))


@pytest.mark.parametrize(
    ("wrt", "loss", "words"),
    [
        (["z"], None, "no initializer or input 'z'"),
        (["n"], None, "'n' is of type INT64"),
        (None, "cross_entopy", "unknown loss 'cross_entopy' .did you mean 'cross_entropy'"),
    ],
)
def test_wrong_requests(wrt, loss, words):
    text = (
        "agraph (float[2] x, int64[2] n) => (float[2] y) { m = Cast <to = 1> (n)\n y = Mul (x, m) }"
    )
    with pytest.raises(UsageError, match=words):
        autodiff.gradient(text_model(text), wrt=wrt, loss=loss)


# ---- losses ----------------------------------------------------------------------------------


def reference(loss, x, t, o):
    """The losses in NumPy, class axis last."""
    if loss in ("cross_entropy", "nll"):
        top = x.max(-1, keepdims=True)
        log_p = x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))
        log_p = log_p if loss == "cross_entropy" else x
        kept = t != (-100 if o.get("ignore_index") is None else o["ignore_index"])
        w = np.asarray(o.get("weight", np.ones(x.shape[-1])))
        label = np.where(kept, t, 0)
        each = -np.take_along_axis(log_p, label[..., None], -1)[..., 0] * w[label] * kept
        smooth = -(log_p * w).sum(-1) * kept / x.shape[-1]
        eps = o.get("label_smoothing", 0.0)
        total = ((1 - eps) * each + eps * smooth).sum()
        return total if o.get("reduction") == "sum" else total / (w[label] * kept).sum()
    d = np.abs(x - t)
    delta = o.get("delta", 1.0)
    p = np.asarray(o.get("pos_weight", 1.0))
    softplus = np.logaddexp(0, -x)
    each = {
        "mse": d * d,
        "l1": d,
        "huber": np.where(d <= delta, d * d / 2, delta * (d - delta / 2)),
        "bce_with_logits": (1 - t) * x + (1 + (p - 1) * t) * softplus,
    }[loss]
    return each.sum() if o.get("reduction") == "sum" else each.mean()


WEIGHT = np.array([0.5, 1.5, 1.0, 2.0])


@pytest.mark.parametrize(
    ("loss", "shape", "options"),
    [
        ("cross_entropy", (5, 4), {}),
        ("cross_entropy", (5, 4), {"reduction": "sum", "weight": WEIGHT}),
        ("cross_entropy", (2, 3, 4), {"ignore_index": 1}),
        ("cross_entropy", (2, 3, 4), {"label_smoothing": 0.1}),
        ("cross_entropy", (2, 3, 4), {"label_smoothing": 0.2, "weight": WEIGHT, "ignore_index": 2}),
        ("cross_entropy", (2, 4, 3, 2), {"label_smoothing": 0.2, "weight": WEIGHT}),
        ("cross_entropy", (2, 4, 3), {"class_axis": 1}),
        ("nll", (5, 4), {"weight": WEIGHT}),
        ("nll", (2, 3, 4), {"ignore_index": 0}),
        ("mse", (3, 4), {}),
        ("mse", (3, 4), {"reduction": "sum"}),
        ("l1", (3, 4), {}),
        ("huber", (3, 4), {}),
        ("huber", (3, 4), {"delta": 0.3}),
        ("bce_with_logits", (3, 4), {}),
        ("bce_with_logits", (3, 4), {"pos_weight": WEIGHT}),
    ],
    ids=str,
)
def test_losses(loss, shape, options):
    x = rng().standard_normal(shape)
    axis = options.get("class_axis", 1 if len(shape) == 4 else -1)
    last = np.moveaxis(x, axis, -1)
    labels = rng(1).integers(0, 4, last.shape[:-1]) if loss in ("cross_entropy", "nll") else None
    if labels is None:
        labels = rng(1).integers(0, 2, shape).astype(float) + (
            0.25 if loss != "bce_with_logits" else 0
        )
    floats = loss != "bce_with_logits"  # softplus has no float64 kernel in onnxruntime
    dtype, kind = (np.float64, "double") if floats else (np.float32, "float")
    dims = ",".join(["B", *map(str, shape[1:])])
    model = text_model(f"agraph ({kind}[{dims}] x) => ({kind}[{dims}] y) {{ y = Identity (x) }}")
    found = autodiff.gradient(model, wrt=["x"], loss=loss, **options)
    feeds = {"x": x.astype(dtype)}
    feeds["labels"] = labels if labels.dtype == np.int64 else labels.astype(dtype)
    got = run(found, feeds)
    assert got["loss"].shape == ()
    np.testing.assert_allclose(got["loss"], reference(loss, last, labels, options), rtol=1e-6)
    for seed in range(3):
        d = rng(seed).standard_normal(shape)
        h = 1e-6
        up, down = (
            reference(loss, np.moveaxis(x + s * h * d, axis, -1), labels, options) for s in (1, -1)
        )
        expected = (up - down) / (2 * h)
        assert np.vdot(got["x.grad"], d) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("options", [{}, {"weight": WEIGHT}, {"label_smoothing": 0.2}], ids=str)
@pytest.mark.parametrize("loss", ["cross_entropy", "nll"])
def test_where_no_row_counts_the_loss_is_nan_and_its_gradient_zero(loss, options):
    if loss == "nll":
        options = {k: v for k, v in options.items() if k == "weight"}
    model = text_model("agraph (double[B, 4] x) => (double[B, 4] y) { y = Identity (x) }")
    found = autodiff.gradient(model, wrt=["x"], loss=loss, **options)
    got = run(found, {"x": rng().standard_normal((3, 4)), "labels": np.full(3, -100)})
    assert np.isnan(got["loss"])
    np.testing.assert_array_equal(got["x.grad"], np.zeros((3, 4)))


def test_an_output_may_be_the_loss():
    model = text_model(
        "agraph (float[N] x) => (float[N] y, float total) "
        "{ y = Exp (x)\n total = ReduceSum <keepdims = 0> (y) }"
    )
    x = np.array([0.0, 1.0], np.float32)
    got = run(autodiff.gradient(model, wrt=["x"], loss="total"), {"x": x})
    np.testing.assert_allclose(got["x.grad"], np.exp(x), rtol=1e-6)


# ---- fused gradients -------------------------------------------------------------------------

K, N = 6, 5
NORM_INPUTS = {"": "", "LayerNorm": "scale, bias, ", "RMSNorm": "scale, "}


def fused(call, outputs="y", kind="float", **inputs):
    """A model of one fused node on random inputs, all of which are graph inputs; and the inputs."""
    arrays = {
        name: np.asarray(rng(i).standard_normal(shape) + (name == "scale"), np.float32)
        for i, (name, shape) in enumerate(inputs.items())
    }
    declared = ", ".join(
        f"{kind}[{','.join(map(str, array.shape))}] {name}" if array.ndim else f"{kind} {name}"
        for name, array in arrays.items()
    )
    out = ", ".join(f"{kind}[a,b,c] {o}" for o in outputs.split(", "))
    model = text_model(f"agraph ({declared}) => ({out}) {{ {outputs} = onnx_fuse.{call} }}")
    return model, arrays


def against_body(model, arrays, wrt=None):
    """The gradients of a fused graph, which must be those of its body."""
    wrt = wrt or list(arrays)
    found = autodiff.gradient(model, wrt=wrt)
    plain = autodiff.gradient(inline(model), wrt=wrt)
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    shapes = run(model, arrays)
    feeds = {**arrays}
    for i, (name, value) in enumerate(shapes.items()):
        feeds[f"{name}.grad"] = rng(20 + i).standard_normal(value.shape, "f")
    got, expected = run(found, feeds), run(plain, feeds)
    for name in wrt:
        a, b = got[f"{name}.grad"], expected[f"{name}.grad"]
        assert a.shape == arrays[name].shape
        np.testing.assert_allclose(a, b, atol=2e-5 * max(1, np.abs(b).max()), err_msg=name)
    return found


def product(prefix, op, columns=N):
    """A model of a product behind a norm or none, and its inputs."""
    affine = dict.fromkeys(NORM_INPUTS[prefix].replace(",", "").split(), (K,))
    call = f"{prefix}{op} (x, {NORM_INPUTS[prefix]}w, c)"
    return fused(call, x=(2, 3, K), **affine, w=(K, columns), c=(columns,))


@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
@pytest.mark.parametrize("prefix", NORM_INPUTS)
def test_gemm_gradients(prefix, activation):
    model, arrays = product(prefix, f"Gemm{activation}")
    found = against_body(model, arrays)
    names = [n.op_type for n in found.graph if n.domain == FUSE]
    assert names[1] == f"{prefix}Gemm{activation}Grad"
    kept = names[0].split("_")[1:]
    assert "n" not in kept  # never the normalised copy
    assert kept == [*OPS[FUSE, f"{prefix}Gemm{activation}"].saves]


@pytest.mark.parametrize("place", ["GateFirst", "GateLast"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("prefix", NORM_INPUTS)
def test_gated_products_have_the_gradient_of_their_parts(prefix, activation, place):
    """By their body, and with training's parts, which have kernels for it."""
    model, arrays = product(prefix, f"{place}Gemm{activation}", 2 * N)
    against_body(model, arrays)
    parts = model.clone()
    rewrite.optimize(parts, training=True)
    left = [n.op_type for n in parts.graph if n.domain == FUSE]
    assert left[0] == f"{prefix}Gemm"
    assert not any("Gate" in name for name in left)
    found, plain = (autodiff.gradient(m, wrt=list(arrays)) for m in (parts, model))
    (y,) = run(model, arrays).values()
    feeds = {**arrays, "y.grad": rng(9).standard_normal(y.shape, "f")}
    got, expected = run(found, feeds), run(plain, feeds)
    for name, want in expected.items():
        bound = 2e-5 * max(1, np.abs(want).max())
        np.testing.assert_allclose(got[name], want, atol=bound, err_msg=name)


@pytest.mark.parametrize("c", [(), (1,), (1, N), (1, 1, N), (3, 1), (2, 3, 1), (2, 1, N)], ids=str)
def test_gemm_bias_of_any_shape(c):
    against_body(
        *fused("LayerNormGemmRelu (x, s, b, w, c)", x=(2, 3, K), s=(K,), b=(K,), w=(K, N), c=c)
    )
    against_body(*fused("GemmGelu (x, w, c)", x=(2, 3, K), w=(K, N), c=c))


@pytest.mark.parametrize(
    ("call", "outputs", "shapes"),
    [
        ("LayerNormGemm_n (x, s, b, w, c)", "y, n", {"s": (K,), "b": (K,), "w": (K, N), "c": (N,)}),
        ("RMSNormGemmSilu_n (x, s, w, c)", "y, n", {"s": (K,), "w": (K, N), "c": (N,)}),
        ("RMSNormalization (x, s)", "y", {"s": (K,)}),
        ("SkipLayerNorm (x, r, s, b)", "y, t", {"r": (2, 3, K), "s": (K,), "b": (K,)}),
        ("SkipRMSNorm (x, r, s)", "y, t", {"r": (2, 3, K), "s": (K,)}),
        ("Silu (x)", "y", {}),
        ("QuickGelu <alpha: float = 1.2> (x)", "y", {}),
    ],
)
def test_norm_and_activation_gradients(call, outputs, shapes):
    against_body(*fused(call, outputs, x=(2, 3, K), **shapes))


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        ("LayerNormGemmGelu (x, s, b, w, c)", {"s": (K,), "b": (K,), "w": (K, N), "c": (N,)}),
        ("RMSNormGemmSilu (x, s, w, c)", {"s": (K,), "w": (K, N), "c": (N,)}),
        ("SkipLayerNorm (x, r, s, b)", {"r": (2, 3, K), "s": (K,), "b": (K,)}),
        ("GemmQuickGelu (x, w, c)", {"w": (K, N), "c": (N,)}),
    ],
)
def test_fused_gradients_in_float16(call, shapes):
    outputs = "y, t" if "Skip" in call else "y"
    model, arrays = fused(call, outputs, x=(2, 3, K), **shapes)
    half, _ = fused(call, outputs, kind="float16", x=(2, 3, K), **shapes)
    feeds = dict(arrays)
    for name, value in run(model, arrays).items():
        feeds[f"{name}.grad"] = rng(3).standard_normal(value.shape, "f")
    expected = run(autodiff.gradient(model, wrt=list(arrays)), feeds)
    got = run(
        autodiff.gradient(half, wrt=list(arrays)),
        {name: array.astype(np.float16) for name, array in feeds.items()},
    )
    for name in arrays:
        a, b = got[f"{name}.grad"], expected[f"{name}.grad"]
        assert a.dtype == np.float16
        np.testing.assert_allclose(a, b, atol=4e-3 * np.abs(b).max(), err_msg=name)


def test_skip_norm_with_one_output_read():
    model, arrays = fused(
        "SkipLayerNorm (x, r, s, b)", "y, t", x=(2, 3, K), r=(2, 3, K), s=(K,), b=(K,)
    )
    model.graph.outputs.pop()
    found = against_body(model, arrays)
    assert "LayerNormGrad" in ops_of(found)


@pytest.mark.parametrize("shape", [(3, 4, 5, 2), (6, 4)], ids=str)
def test_batch_norm_in_training_has_one_gradient_operator(shape):
    text = f"""agraph (float{list(shape)} x, float[4] s, float[4] b, float[4] m, float[4] v)
        => (float loss) {{
        y, rm, rv = BatchNormalization <training_mode = 1, epsilon = 0.01> (x, s, b, m, v)
        z = Sin(y) loss = ReduceSum <keepdims = 0> (z) }}"""
    feeds = drawn(text_model(text))
    (plain, before), (ours, after) = plain_and_fused(text, feeds | {"x": feeds["x"] + 3}, "x s b")
    assert ["BatchNormGrad" in ops_of(model) for model in (plain, ours)] == [False, True]
    assert_near(after, before, atol=2e-5)


@pytest.mark.parametrize("wanted", ["s b w c", "s b w", "x s b w c", "s b c"])
@pytest.mark.parametrize("turned", [False, True])
def test_a_norm_whose_x_needs_no_gradient_makes_no_rows(turned, wanted):
    """One product where there were two; a scale of zero divides nothing."""
    weights, product = ("6, 5", "MatMul (h, w)") if turned else ("5, 6", "Gemm <transB = 1> (h, w)")
    text = f"""agraph (float[20, 6] x, float[6] s, float[6] b, float[{weights}] w, float[5] c)
        => (float loss) {{ h = LayerNormalization (x, s, b) t = {product} u = Add(t, c)
        z = Sin(u) loss = ReduceSum <keepdims = 0> (z) }}"""
    feeds = drawn(text_model(text))
    feeds["s"][2] = 0
    feeds["x"] += 3
    (_, before), (model, after) = plain_and_fused(text, feeds, wanted)
    ops, alone = ops_of(model), "x" not in wanted and "w" in wanted
    assert ops["LayerNormLeafGradTurned" if turned else "LayerNormLeafGrad"] == alone
    assert ops["Gemm"] + ops["MatMul"] == (1 if alone else 2 if wanted == "s b c" else 3)
    assert_near(after, before, atol=3e-5)


def test_large_mean_keeps_its_digits():
    """|mean| / std = 100: the row sums come from z, where they are no small differences."""
    model, arrays = fused(
        "LayerNormGemm (x, s, b, w, c)", x=(4, 2, 64), s=(64,), b=(64,), w=(64, N), c=(N,)
    )
    arrays["x"] += 100
    against_body(model, arrays)


@pytest.mark.parametrize("activation", ["Relu", "Silu", "LeakyRelu"])
def test_conv_gradients(activation):
    attributes = (
        "kernel_shape: ints = [3], strides: ints = [2], pads: ints = [1, 1], dilations: ints = [1]"
    )
    model, arrays = fused(
        f"Conv{activation} <{attributes}> (x, w, c)", x=(2, 3, 8), w=(4, 3, 3), c=(4,)
    )
    against_body(model, arrays)


# every step, two of them in each order, and each flag; all kinds come from one template
SDPA_KINDS = (
    *("", "Mask", "MaskGuard", "Causal", "Where", "MaskWhere", "WhereMask", "MaskMask"),
    *("WhereWhere", "NanGuard", "WhereNanGuard", "Softcap", "SoftcapMaskWhere", "WideMask"),
    *("WideSoftcapWhereMaskNanGuard", "SoftcapCausal", "CausalMaskGuard"),
)


def sdpa_model(kind, heads, t=5, fills=(-1.5, -2.5)):
    """One attention operator whose conditions drop a whole row each, and its inputs."""
    name = f"{'Grouped' if heads == 4 else ''}Sdpa{kind}"
    shapes = {"q": (2, heads, 3, 4), "k": (2, 2, t, 4), "v": (2, 2, t, 6)}
    arrays = {n: rng(i).standard_normal(shape, "f") for i, (n, shape) in enumerate(shapes.items())}
    names, constants = [*shapes], []
    for i, step in enumerate(KINDS[name].steps, 1):
        if step == "Mask":
            arrays[f"mask{i}"] = rng(i).standard_normal((1, 1, 3, t), "f")
            names.append(f"mask{i}")
            continue
        arrays[f"keep{i}"] = rng(i).random((2, 1, 3, t)) < 0.6
        arrays[f"keep{i}"][0, 0, i] = False
        names += [f"keep{i}", f"fill{i}"]
        constants.append(f"float fill{i} = {{{fills[i - 1]}}}")
    inputs = ", ".join(
        f"{'bool' if a.dtype == bool else 'float'}[{','.join(map(str, a.shape))}] {n}"
        for n, a in arrays.items()
    )
    rows = f", q_rows: ints = [0, {heads}, -1, 0], kv_rows: ints = [0, 2, -1, 0]"
    cap = ", softcap: float = 1.7" if "Softcap" in kind else ""
    head = f"<scale: float = 0.4{cap}{rows if heads == 4 else ''}>"
    model = text_model(
        f"agraph ({inputs}) => (float[2,{heads},3,6] y) <{', '.join(constants)}> "
        f"{{ y = onnx_fuse.{name} {head} ({', '.join(names)}) }}"
    )
    return model, arrays


@pytest.mark.parametrize("kind", SDPA_KINDS)
@pytest.mark.parametrize("heads", [2, 4])
def test_sdpa_gradients(kind, heads):
    model, arrays = sdpa_model(kind, heads)
    wrt = [name for name, array in arrays.items() if array.dtype != bool]
    against_body(model, arrays, wrt)


@pytest.mark.parametrize("fill", [-1e9, np.finfo("f").min, -np.inf])
def test_a_row_that_is_masked_whole_has_no_gradient_in_its_scores(fill):
    """Its weights are uniform, which v sees; with -inf they are NaN."""
    model, arrays = sdpa_model("Where", 2, fills=[fill])
    found = autodiff.gradient(model, wrt=["q", "k", "v"])
    feeds = {**arrays, "y.grad": np.ones((2, 2, 3, 6), "f")}
    got = run(found, feeds)
    if np.isinf(fill):
        assert np.isnan(got["v.grad"][0]).all()
        assert np.isfinite(got["v.grad"][1]).all()
        return
    np.testing.assert_array_equal(got["q.grad"][0, :, 1], 0)
    arrays["keep1"][:] = False
    got = run(found, {**feeds, **arrays})
    np.testing.assert_allclose(got["v.grad"], np.full((2, 2, 5, 6), 3 / 5), rtol=1e-6)
    assert not got["k.grad"].any()


# ---- ai.onnx.preview.training ----------------------------------------------------------------

TRAINING = "ai.onnx.preview.training"


GRADIENTS = {  # body: (y, p, q) at a = 3, b = 5
    'y = Add (a, b)\n p, q = GRAD <xs = ["a", "b"], y = "y"> (a, b)': (8, 1, 1),
    'c = Add (a, b)\n y = Mul (c, a)\n p, q = GRAD <xs = ["a", "b"], y = "y"> (a, b)': (24, 11, 3),
    # other values than the named ones, one held fixed: d (x b)² / dx at x = a + b + a b = 23
    "c = Mul (a, b)\n y = Mul (c, c)\n s = Sum (a, b, c)\n"
    ' p = GRAD <xs = ["a"], zs = ["b"], y = "y"> (s, b)\n'
    ' q = GRAD <xs = ["c"], y = "y"> (c)': (225, 1150, 30),
    # at other values than the named ones, through an If whose branches alone read them
    "c = Less (a, b)\n"
    "y = If (c) <then_branch = t () => (float m) { m = Mul (a, b) },"
    " else_branch = e () => (float n) { n = Sub (a, b) }>\n"
    ' p, q = GRAD <xs = ["a", "b"], y = "y"> (b, a)': (15, 1, -1),
    # the gradient of a gradient
    'y = Mul (a, a)\n d = GRAD <xs = ["a"], y = "y"> (a)\n'
    ' p = GRAD <xs = ["a"], y = "d"> (a)\n q = Identity (b)': (9, 2, 5),
}


@pytest.mark.parametrize(("body", "expected"), GRADIENTS.items())
def test_gradient_operator(body, expected):
    body = body.replace("GRAD", f"{TRAINING}.Gradient")
    model = text_model(
        f'<ir_version: 10, opset_import: ["" : 21, "{TRAINING}" : 1]>\n'
        f"agraph (float a, float b) => (float y, float p, float q) {{ {body} }}"
    )
    assert autodiff.expand_training_ops(model) == body.count("Gradient")
    got = run(model, {"a": np.array(3, np.float32), "b": np.array(5, np.float32)})
    assert tuple(got[name] for name in ("y", "p", "q")) == expected


def test_gradient_operator_names_must_exist():
    model = text_model(
        f'<ir_version: 10, opset_import: ["" : 21, "{TRAINING}" : 1]>\n'
        f'agraph (float a) => (float p) {{ p = {TRAINING}.Gradient <xs = ["a"], y = "z"> (a) }}'
    )
    with pytest.raises(ModelError, match="no value 'z'"):
        autodiff.expand_training_ops(model)

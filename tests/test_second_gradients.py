"""The gradient of a gradient: of fused and of plain graphs, they are equal."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support import answers, assert_near, stock

import onnx_fuse
from onnx_fuse.errors import ModelError, NoGradientWarning, UsageError

NORM = "n = LayerNormalization (x, g, b)"
GRAPHS = {
    "LayerNormGemm": f"{NORM} m = MatMul (n, w) y = Add (m, c)",
    "LayerNormGemmTanh": f"{NORM} m = Gemm (n, w, c) y = Tanh (m)",
    "SkipLayerNorm": """s = Add (x, e) n = LayerNormalization (s, g, b) o = Mul (s, n)
      m = MatMul (o, w) y = Add (m, c)""",
    "RMSNormGemm": "n = RMSNormalization (x, g) m = MatMul (n, w) y = Add (m, c)",
    "Sdpa": """axes = Constant <value_ints = [0, 1]> () q = Unsqueeze (x, axes)
      a = Attention (q, q, q) t = Squeeze (a, axes) m = MatMul (t, w) y = Add (m, c)""",
}


def graph(body: str) -> onnx.ModelProto:
    e = "float[5,8] e, " if " e)" in body else ""
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 23]>\n'
        f"f (float[5,8] x, {e}float[8] g, float[8] b, float[8,3] w, float[3] c) => (float[5,3] y)"
        f"{{ {body} }}"
    )
    operands = [v for v in model.graph.input if any(v.name in n.input for n in model.graph.node)]
    del model.graph.input[:]
    model.graph.input.extend(operands)
    return model


def second(model: onnx.ModelProto, names: list[str], feeds: dict[str, Any]) -> dict[str, Any]:
    """The gradients of all outputs of a model's gradient, each weighted by fixed numbers.

    What `feeds` does not hold is added to it.
    """
    twice = onnx_fuse.gradient(onnx_fuse.gradient(model, names), names)
    session = stock(twice, optimized=True)
    for value in session.get_inputs():
        if value.name not in feeds:
            rng = np.random.default_rng(sum(value.name.encode()))
            feeds[value.name] = rng.standard_normal(value.shape).astype("f")
    return answers(session, feeds)


@pytest.mark.parametrize("name", GRAPHS)
def test_second_gradients_of_fused_graphs_are_those_of_plain_ones(name: str) -> None:
    model = graph(GRAPHS[name])
    names = [v.name for v in model.graph.input]
    fused = onnx_fuse.optimize(model)
    assert any(n.op_type.startswith(name) or n.op_type.endswith(name) for n in fused.graph.node)
    expected, got = second(model, names, {}), second(fused, names, {})
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        tolerance = 1e-5 * max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(got[key], value, rtol=1e-4, atol=tolerance, err_msg=key)


def test_a_gradient_knows_the_sizes_that_an_exporter_wrote() -> None:
    """An exporter's shapes may say more than inference finds, such as the number of heads."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 23]>
      f (float[B,S,H] x) => (float[B,S,H] y) {
        four = Constant <value_ints = [0, 0, -1, 4]> () back = Constant <value_ints = [0, 0, -1]> ()
        h = Reshape (x, four) q = Transpose <perm = [0, 2, 1, 3]> (h) a = Attention (q, q, q)
        t = Transpose <perm = [0, 2, 1, 3]> (a) y = Reshape (t, back) }""")
    info = onnx.helper.make_tensor_value_info("q", onnx.TensorProto.FLOAT, ["B", 2, "S", 4])
    with pytest.raises(ModelError, match="its numbers of heads are not static"):
        onnx_fuse.gradient(model, ["x"])
    model.graph.value_info.append(info)
    twice = onnx_fuse.gradient(onnx_fuse.gradient(model, ["x"]), ["x"])
    assert stock(twice, optimized=True)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("relu", ["", "y = Relu (z)"])
def test_second_gradients_of_convolutions_know_no_sizes(stride: int, relu: str) -> None:
    """A weight's gradient is a Conv whose kernel is dy, of a size that only a run tells."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20]>
      f (float[2,4,7,6] x, float[6,2,3,2] w, float[6] c) => (float[2,6,p,q] {"y" if relu else "z"})
      {{ z = Conv <strides = [{stride}, {stride}], pads = [1, 0, 1, 1], group = 2> (x, w, c)
         {relu} }}""")
    sizes = model.graph.input[0].type.tensor_type.shape.dim
    names = ["x", "w", "c"]
    feeds: dict[str, Any] = {}
    expected = second(model, names, feeds)
    for size, symbol in zip((sizes[0], *sizes[2:]), "nhv", strict=True):
        size.dim_param = symbol
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "n"
    for dynamic in (model, onnx_fuse.optimize(model)):
        got = second(dynamic, names, feeds)
        assert_near(got, expected, rtol=1e-4, atol=1e-4)


def test_a_gradient_of_a_gradient_of_inputs_that_share_a_size() -> None:
    """Their names are asked for once, by the first gradient."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
      f (int64[B,S] ids, float[B,S,2] x) => (float[B,S,2] y) <float[3,2] w = {1,2,3,4,5,6}> {
        e = Gather (w, ids) p = Mul (e, x) y = Tanh (p) }""")
    ids = np.array([[0, 2], [1, 1]])
    feeds: dict[str, Any] = {"ids": ids, "w.grad.grad": np.ones((3, 2), "f")}
    feeds |= {name: np.ones((2, 2, 2), "f") for name in ("x", "y.grad", "y.grad_1")}
    twice = onnx_fuse.gradient(onnx_fuse.gradient(model, ["w"]), ["w"])
    session = stock(twice, optimized=True)
    found = answers(session, {v.name: feeds[v.name] for v in session.get_inputs()})
    assert set(found) > {"y", "w.grad"}
    with pytest.raises(Exception, match="must be equal"):
        answers(session, {v.name: feeds[v.name] for v in session.get_inputs()} | {"ids": ids[:1]})


HESSIANS = {
    "a network": (
        """f (float[B,3] x, float[3,4] w, float[4] c, float[4,2] v) => (float[B,2] y) {
        m = MatMul (x, w) a = Add (m, c) t = Tanh (a) y = MatMul (t, v) }""",
        *("mse", np.float32([[0.5, -1], [2, 1]])),
    ),
    "classes": (
        """f (float[B,3] x, float[3,4] w, float[4] c) => (float[B,4] y) {
        n = Softplus (x) m = MatMul (n, w) y = Add (m, c) }""",
        *("cross_entropy", np.array([3, 1])),
    ),
    "sequences": (
        """f (float[B,5,2] x, float[2,3] w) => (float[B,5,3] y) { y = MatMul (x, w) }""",
        *("ctc", np.array([[1, 2], [2, -100]])),
    ),
    "a straight line": (
        "f (float[B,3] x, float[3,2] w) => (float[B,2] y) { y = MatMul (x, w) }",
        *("hinge", np.float32([[1, -1], [-1, 1]])),
    ),
}


@pytest.mark.parametrize("case", HESSIANS)
def test_a_hessian_times_vectors_is_the_change_of_gradients(case: str) -> None:
    """Of weights that are inputs here, by differences of the graph's own gradients."""
    text, loss, labels = HESSIANS[case]
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    rng = np.random.default_rng(4)
    feeds: dict[str, Any] = {"labels": labels}
    for value in model.graph.input:
        sizes = [d.dim_value or 2 for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.normal(size=sizes).astype("f")
    names = [v.name for v in model.graph.input][1:]
    vectors = {name: rng.normal(size=feeds[name].shape).astype("f") for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGradientWarning)  # where a comparison alone reads w
        found = onnx_fuse.hvp(model, feeds, vectors, loss=loss)
    first = stock(onnx_fuse.gradient(model, names, loss), optimized=True)
    h = 1e-2
    up, down = (
        answers(first, feeds | {n: feeds[n] + np.float32(s * h) * vectors[n] for n in names})
        for s in (1, -1)
    )
    assert list(found) == names
    for name in names:
        change = (up[f"{name}.grad"] - down[f"{name}.grad"]) / (2 * h)
        np.testing.assert_allclose(found[name], change, rtol=2e-2, atol=5e-3, err_msg=name)
    assert (case == "a straight line") == all((a == 0).all() for a in found.values())


def test_second_derivatives_of_what_the_loss_does_not_read_are_zero() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
      f (float[2] x, float[2] z) => (float[2] y, float[2] u) { y = Exp (x) u = Exp (z) }""")
    with pytest.raises(UsageError, match="order is 3: it must be 1 or 2"):
        onnx_fuse.gradient(model, ["x"], "mse", order=3)
    ones = np.ones(2, np.float32)
    feeds = {"x": ones, "z": ones, "labels": 0 * ones}
    found = onnx_fuse.hvp(model, feeds, {"x": ones, "z": ones}, loss="mse")
    np.testing.assert_allclose(found["x"], 2 * np.exp(2 * ones), rtol=1e-6)
    np.testing.assert_array_equal(found["z"], 0 * ones)


def test_the_command_compares_hessian_vector_products(tmp_path: Path, cli: Any) -> None:
    text, loss, _ = HESSIANS["a network"]
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    onnx.save(model, tmp_path / "model.onnx")
    written = tmp_path / "hvp.onnx"
    options = ("--loss", loss, "--wrt", "w,v", "--order", "2", "--check", "-o", written)
    done = cli("gradient", tmp_path / "model.onnx", *options)
    assert done.code == 0, done.err
    assert "gradients ok: 2 tensors" in done.out
    names = [v.name for v in onnx.load(written).graph.output]
    assert names == ["y", "loss", "w.grad", "v.grad", "w.hvp", "v.hvp"]

"""Which tensors of a file are weights: Constant nodes, copies, tensors that were merged."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cases import FusionCase
from exact_cases import EXACT_CASES
from fusion_cases import FUSION_CASES
from support import answers, parsed, table

from onnx_fuse import autodiff, cli, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import UsageError
from onnx_fuse.importer.save import save, serialized
from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime import ort
from onnx_fuse.training import optim
from onnx_fuse.training.trainer import Trainer

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)
EMBED = RNG.standard_normal((6, 5)).astype(np.float32)

# As converters from other frameworks write it: every weight is a Constant.
CONSTANTS = """agraph (float[N, 3] x) => (float[N, 6] y)
    { w = Constant <value = float[3, 6] {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9}> ()
    b = Constant <value = float[6] {1, 2, 3, 4, 5, 6}> ()  half = Constant <value = float {0.5}> ()
    mean = Constant <value = float[3] {0.1, 0.2, 0.3}> ()  low = Constant <value = float {-50.0}> ()
    c = Sub (x, mean)  p = MatMul (c, w)  q = Add (p, b)  r = Mul (q, half)  y = Clip (r, low) }"""


def grads(model: Any, **options: Any) -> list[str]:
    found = autodiff.gradient(model, **options)
    return [str(v.name) for v in found.graph.outputs if str(v.name).endswith(".grad")]


def regression(width: int) -> dict[str, Array]:
    labels = RNG.standard_normal((4, width)).astype(np.float32)
    return {"x": RNG.standard_normal((4, 3)).astype(np.float32), "labels": labels}


def test_weights_in_constant_nodes_have_gradients() -> None:
    model = text_model(CONSTANTS)
    assert grads(model) == ["w.grad", "b.grad"]
    assert grads(model, wrt=["half", "mean", "x"]) == ["half.grad", "mean.grad", "x.grad"]
    with pytest.raises(UsageError, match="no initializer or input 'nothing'"):
        grads(model, wrt=["nothing"])


def test_weights_in_constant_nodes_train_and_stay_where_they_were(tmp_path: Path) -> None:
    trainer = Trainer(text_model(CONSTANTS), loss="mse", optimizer=optim.SGD(lr=0.01))
    assert sorted(trainer.weights()) == ["b", "w"]
    feeds = regression(6)
    losses = [float(trainer.step(feeds)) for _ in range(3)]
    assert losses[2] < losses[0]
    trainer.save(path := tmp_path / "m.onnx")
    saved = onnx.load(path)
    assert not saved.graph.initializer
    assert [n.op_type for n in saved.graph.node].count("Constant") == 5
    (y,) = ort.run(ort.session(path), {"x": feeds["x"]})
    np.testing.assert_allclose(y, trainer.evaluate(feeds).outputs["y"], rtol=1e-5, atol=1e-5)


def test_scalars_are_left_out_unless_they_are_named() -> None:
    text = (
        "agraph (float[N, 3] x) => (float[N, 3] y) <float[3] w = {1, 2, 3}, float s = {2}> "
        "{ p = Mul (x, w) y = Mul (p, s) }"
    )
    assert grads(text_model(text)) == ["w.grad"]
    assert grads(text_model(text), wrt=["s"]) == ["s.grad"]


def test_first_states_are_left_out_unless_they_are_named() -> None:
    text = """agraph (float[4, 2, 3] x) => (float[4, 1, 2, 1] y)
        <float[1, 1, 3] w = {1, 2, 3}, float[1, 1, 1] r = {2}, float[1, 2, 1] h = {0, 0}>
        { y = RNN <hidden_size = 1> (x, w, r, , , h) }"""
    assert grads(text_model(text)) == ["w.grad", "r.grad"]
    assert grads(text_model(text), wrt=["h"]) == ["h.grad"]
    trainer = Trainer(text_model(text), loss="mse")
    assert sorted(trainer.weights()) == ["r", "w"]


def test_names_of_gradients_need_no_quotes() -> None:
    model = text_model("agraph (float[N] x) => (float[N] y) <float[1] w = {2}> { y = Mul (x, w) }")
    model.graph.initializers["w"].name = "a b;'ü'/onnx::w"
    model.graph.outputs[0].name = "my y"
    found = autodiff.gradient(model)
    assert [v.name for v in found.graph.inputs] == ["x", "my_y.grad"]
    assert [v.name for v in found.graph.outputs] == ["my y", "a_b____/onnx::w.grad"]


def test_the_command_loads_what_it_wrote_and_lists_it(tmp_path: Path) -> None:
    save(load(text_model(CONSTANTS)), model := tmp_path / "m.onnx")
    report = tmp_path / "r.json"
    assert cli.run_command(["gradient", str(model), "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert found["gradients"] == ["w.grad", "b.grad"]
    assert ort.session(found["output"]) is not None


# ---- stored twice, stored once --------------------------------------------------------------


def twice(second: Array, node: str) -> Any:
    """An embedding, and an output projection of its own tensor."""
    text = f"""agraph (int64[N] x) => (float[N, 6] y) {{ h = Gather (table, x)  {node} }}"""
    model = parsed(text, 23)
    for name, array in (("table", EMBED), ("head", second)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


TWICE = {
    "transpose": (np.ascontiguousarray(EMBED.T), "y = MatMul (h, head)"),
    "copy": (EMBED.copy(), "y = Gemm <transB = 1> (h, head)"),
}


@pytest.mark.parametrize("kind", TWICE)
def test_a_weight_stored_twice_trains_as_one(kind: str, tmp_path: Path) -> None:
    model = twice(*TWICE[kind])
    feeds = {"x": np.array([0, 3, 3]), "labels": np.array([1, 2, 0])}
    options: Any = {"loss": "cross_entropy", "optimizer": optim.SGD(lr=0.1)}
    apart = Trainer(model, **options)
    (note,) = apart.notes
    assert "'head' holds " in note
    assert "tie trains them as one" in note
    tied = Trainer(model, tie=True, **options)
    assert tied.notes == ["'head' is tied to 'table'"]
    for trainer in (apart, tied):
        trainer.step(feeds)
    moves = {
        k: v - EMBED if v.shape == EMBED.shape else v.T - EMBED for k, v in apart.weights().items()
    }
    together = tied.weights()
    head = together["head"] if kind == "copy" else together["head"].T
    np.testing.assert_array_equal(together["table"], head)
    np.testing.assert_allclose(
        together["table"] - EMBED, moves["table"] + moves["head"], rtol=1e-4, atol=1e-6
    )
    tied.save(path := tmp_path / "m.onnx")
    assert [v.name for v in onnx.load(path).graph.initializer] == ["table", "head"]
    (y,) = ort.run(ort.session(path), {"x": feeds["x"]})
    np.testing.assert_allclose(y, tied.evaluate(feeds).outputs["y"], rtol=1e-5, atol=1e-6)


def test_tied_weights_train_together_or_not_at_all() -> None:
    with pytest.raises(UsageError, match="'table' and 'head' are tied: train both, or neither"):
        Trainer(twice(*TWICE["copy"]), loss="cross_entropy", tie=True, frozen=["head"])


MERGED = """agraph (float[N, 3] x) => (float[N, 3] y)
    <float[3, 3] v = {1,2,3,4,5,6,7,8,9}, float[3, 3] w = {1,2,3,4,5,6,7,8,1},
     float[3] b = {0, 0, 0}>
     { p = MatMul (x, v)  q = Add (p, b)  r = MatMul (q, w)  y = Add (r, b) }"""


@pytest.mark.parametrize("frozen", [(), ("b",)])
def test_a_merged_bias_gets_a_note(frozen: tuple[str, ...]) -> None:
    (note,) = Trainer(text_model(MERGED), loss="mse", frozen=frozen).notes
    assert note.startswith("all entries of 'b' are equal and 2 nodes read it: it is one parameter")


def test_each_use_of_a_merged_bias_may_have_its_own(tmp_path: Path) -> None:
    options: Any = {"loss": "mse", "optimizer": optim.SGD(lr=0.01)}
    feeds = regression(3)
    one, two = (Trainer(text_model(MERGED), untie=untie, **options) for untie in (False, True))
    for trainer in (one, two):
        trainer.step(feeds)
    assert not two.notes
    own = two.weights()
    assert sorted(own) == ["b", "b.1", "v", "w"]
    np.testing.assert_allclose(one.weights()["b"], own["b"] + own["b.1"], rtol=1e-4)
    assert np.abs(own["b"] - own["b.1"]).max() > 1e-3
    two.save(path := tmp_path / "m.onnx")
    (y,) = ort.run(ort.session(path), {"x": feeds["x"]})
    np.testing.assert_allclose(y, two.evaluate(feeds).outputs["y"], rtol=1e-5, atol=1e-5)


def test_a_tied_run_resumes(tmp_path: Path) -> None:
    feeds = {"x": np.array([0, 3, 3]), "labels": np.array([1, 2, 0])}
    first = Trainer(twice(*TWICE["copy"]), loss="cross_entropy", tie=True)
    first.step(feeds)
    first.checkpoint(tmp_path)
    second = Trainer.resume(tmp_path, twice(*TWICE["copy"]))
    np.testing.assert_array_equal(second.weights()["head"], first.weights()["head"])


FOLDED = [
    *(case for case in (*FUSION_CASES, *EXACT_CASES) if "batch_norm" in case.name),
    *(case for case in FUSION_CASES if "bias_before_a_pad" in case.name and not case.reason),
]


@pytest.mark.parametrize("case", FOLDED, ids=lambda case: case.name)
def test_a_parameter_that_is_folded_loses_its_name(case: FusionCase) -> None:
    plain, fused = load(case.model()), load(case.model())
    report = rewrite.optimize(fused)
    before = plain.graph.initializers
    for name, value in fused.graph.initializers.items():
        if name in before:
            np.testing.assert_array_equal(value.const_value, before[name].const_value, name)
    # rows that a Pad adds are the bias, which the product alone reads no more
    assert not ("LayerNormGemm" in report.fusions and "c" in fused.graph.initializers)


# Weights that a fold or a fusion takes as constants at one reader, while another node reads them.
SHARED = table(globals(), at=1)("""
cast: "float[6,6] w"
  d = Cast<to=11>(w) f = Cast<to=1>(d) a = MatMul(x, f) y = MatMul(a, w)
scaled: "float[6,6] w"
  two = Constant<value=float {2.}>() v = Mul(w, two) a = MatMul(x, v) y = MatMul(a, w)
transposed: "float[6,6] w"
  v = Transpose<perm=[1,0]>(w) a = MatMul(x, v) y = MatMul(a, w)
product: "float[6,6] w, float[6,6] v"
  m = MatMul(w, v) a = MatMul(x, m) b = MatMul(a, v) y = Add(b, b)
layer scale: "float[6,6] w, float[6] g"
  a = MatMul(x, w) b = Mul(a, g) y = Mul(b, g)
layer scale, bias elsewhere: "float[6,6] w, float[6] c, float[6] g"
  a = MatMul(x, w) b = Add(a, c) d = Mul(b, g) f = Add(x, d) e = Sin(f) y = Add(e, c)
affine: "float[6,6] w, float[6] g, float[6] c"
  a = Mul(x, g) b = MatMul(a, w) d = Add(b, c) e = Sin(d) y = Mul(e, g)
norm: "float[6,6] w, float[6] g, float[6] c, float[6] m, float[6] v"
  h = Abs(v) a = MatMul(x, w) b = BatchNormalization(a, g, c, m, h) e = Sin(b) f = Mul(e, g)
  y = Add(f, c)
zero: "float[6,6] w, float zero"
  z = Mul(zero, zero) a = MatMul(x, w) b = Add(a, z) e = Sin(b) y = Add(e, zero)
wide scale: "float[1] g, float[6,6] w"
  a = LayerNormalization(x, g) b = MatMul(a, w) y = Mul(b, g)
attention's scale: "float s, float[6,6] w"
  q = MatMul(x, w) k = Transpose<perm=[1,0]>(q) i = Mul(q, s) a = MatMul(i, k) p = Softmax(a)
  b = MatMul(p, q) y = Mul(b, s)
packed too: "float[6,6] w, float[6,6] u"
  two = Constant<value=float {2.}>() v = Mul(w, two) a = MatMul(x, v) b = Gemm<transB=1>(a, w)
  c = Gemm<transB=1>(a, u) y = Add(b, c)
""")


def results(model: Any, values: dict[str, Array]) -> dict[str, Array]:
    return answers(ort.session(model), values)


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("name", SHARED)
def test_no_gradient_after_optimize_is_partial(name: str, level: int) -> None:
    weights, body = SHARED[name]
    case = FusionCase(name, f"float[5,6] x, {weights}", body, output="float[5,6] y")
    plain, fused = load(case.model()), load(case.model())
    rewrite.optimize(fused, level=level)
    fused = load(serialized(fused))  # a file says it as well
    values = {
        "x": RNG.standard_normal((5, 6)).astype(np.float32),
        "y.grad": RNG.standard_normal((5, 6)).astype(np.float32),
    }
    names = [str(v.name) for v in plain.graph.initializers.values()]
    whole = results(autodiff.gradient(plain, [*names, "x"]), values)
    rest = results(autodiff.append_gradients(fused)[0], values)
    for parameter in names:
        try:
            one = results(autodiff.gradient(fused, [parameter]), values)
        except UsageError:
            continue
        rest |= one
    for key in whole.keys() & rest.keys():
        np.testing.assert_allclose(rest[key], whole[key], 1e-3, 1e-3, err_msg=key)


@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize("name", ["cast", "scaled", "transposed", "product"])
def test_a_weight_that_others_read_as_it_is_keeps_its_gradient(name: str, level: int) -> None:
    weights, body = SHARED[name]
    graph = load(FusionCase(name, f"float[5,6] x, {weights}", body, output="float[5,6] y").model())
    rewrite.optimize(graph, level=level)
    assert "w.grad" in {value.name for value in autodiff.gradient(graph).graph.outputs}


def test_a_reader_that_a_rewrite_left_behind_does_not_tie_a_weight() -> None:
    body = 'y = Einsum<equation = "ij,kj->ik">(x, w)'
    graph = load(FusionCase("", "float[5,6] x, float[4,6] w", body, output="float[5,4] y").model())
    rewrite.optimize(graph, level=0)
    assert [node.op_type for node in graph.graph] == ["MatMul"]

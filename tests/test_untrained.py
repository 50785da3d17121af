"""Weights that no gradient reaches are named, and where none is left there is an error."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from support import table

from onnx_fuse import Trainer, cli, gradient
from onnx_fuse.errors import ModelError, NoGradientWarning, UsageError
from onnx_fuse.importer.save import save
from onnx_fuse.ir.build import text_model

WEIGHTS = "float[4] w = {1, 2.5, 3, 4}, float s = {0.1}, uint8 zero = {0}"
ROUND = "(Round): it is piecewise constant"
ON = "yes = Constant <value = bool {1}> () n = Constant <value = int64 {2}> ()"

# how `h` comes of `x` and `w`, and the reason why `w` has no gradient
BEHIND = table(globals())("""
Round: ROUND
  r = Round (w) h = Mul (x, r)
Floor: "(Floor): it is piecewise constant"
  r = Floor (w) h = Mul (x, r)
what computes with codes: "(Cast): it computes with the integers of a quantized tensor"
  q = QuantizeLinear (w, s, zero) r = Cast <to = 1> (q) h = Mul (x, r)
a product of codes: "(MatMulInteger): it rounds to integers"
  q = QuantizeLinear (w, s, zero) p = MatMulInteger (q, q) r = Cast <to = 1> (p) h = Mul (x, r)
Less: "(Less): its result is not a real number"
  c = Less (w, x) h = Cast <to = 1> (c)
Cast: "(Cast): its output is not of a floating-point type"
  c = Cast <to = 7> (w) r = Cast <to = 1> (c) h = Mul (x, r)
both branches: ROUND
  $ON h = If (yes) < then_branch = t () => (float[N,4] p) { r = Round (w)
  p = Mul (r, x) }, else_branch = e () => (float[N,4] q) { q = Identity (x) }>
each step: ROUND
  $ON h = Loop (n, yes, x) < body = b (int64 i, bool c, float[N,4] a) => (bool d, float[N,4] o)
  { d = Identity (c) r = Round (w) o = Mul (a, r) }>
""")


def net(name: str, *, trains: bool):
    last = "y = Add (h, b)" if trains else "y = Identity (h)"
    bias = ", float[4] b = {1, 2, 3, 4}" if trains else ""
    weights = WEIGHTS if "zero" in BEHIND[name][0] else WEIGHTS.split(", float s")[0]
    return text_model(
        f"g (float[N,4] x) => (float[N,4] y) <{weights}{bias}> {{ {BEHIND[name][0]} {last} }}"
    )


@pytest.mark.parametrize("name", BEHIND)
def test_a_weight_without_a_gradient_is_named(name: str) -> None:
    model, why = net(name, trains=True), BEHIND[name][1]
    with pytest.warns(NoGradientWarning) as said:
        graph = gradient(model, loss="mse")
    assert [v.name for v in graph.graph.outputs] == ["y", "loss", "b.grad"]
    assert [why in str(w.message) for w in said] == [True]
    assert "'w' has no gradient" in str(said[0].message)
    with pytest.warns(NoGradientWarning, match="'w' does not train"):
        trainer = Trainer(model, loss="mse")
    assert [why in note for note in trainer.notes] == [True]
    assert list(trainer.weights()) == ["b"]


@pytest.mark.parametrize("name", BEHIND)
def test_where_no_weight_is_left_there_is_an_error(name: str) -> None:
    model = net(name, trains=False)
    for loss in (None, "mse"):
        with pytest.raises(ModelError, match="nothing to differentiate by: 'w' has no"):
            gradient(model, loss=loss)
    with pytest.raises(ModelError, match="no weight of the model trains: 'w' has no gradient"):
        Trainer(model, loss="mse")


def test_a_branch_that_passes_a_gradient_is_enough() -> None:
    model = text_model("""g (float[4] x, bool c) => (float[4] y) <float[4] w = {1, 2.5, 3, 4}> {
      y = If (c) <
        then_branch = t () => (float[4] p) { r = Round (w) p = Mul (r, x) },
        else_branch = e () => (float[4] q) { q = Mul (w, x) }> }""")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [v.name for v in gradient(model).graph.outputs] == ["y", "w.grad"]


def test_a_weight_that_only_decides_sizes_is_named() -> None:
    model = text_model("""g (float[N,4] x) => (float[N,4] y, float[3,4] z)
      <float[3,4] w = {1,2,3,4,5,6,7,8,9,1,2,3}, float[1,4] b = {1,2,3,4}> {
      y = Mul (x, b) size = Shape (w) z = Expand (b, size) }""")
    with pytest.warns(NoGradientWarning, match="'w' has no gradient: it only decides sizes"):
        gradient(model)
    with pytest.raises(UsageError, match="'w' has no gradient: it only decides sizes"):
        gradient(model, wrt=["w"])
    with pytest.warns(NoGradientWarning, match="'w' does not train: it only decides sizes"):
        Trainer(model, loss="mse", output="z")


def test_a_weight_that_the_loss_does_not_read_is_named() -> None:
    model = text_model("""g (float[N,4] x) => (float[N,4] y, float[N,4] z)
      <float[4] w = {1,2,3,4}, float[4] b = {1,2,3,5}> { y = Mul (x, b) z = Mul (x, w) }""")
    trainer = Trainer(model, loss="mse", output="y")
    assert trainer.notes == ["'w' does not train: the loss does not depend on it"]
    assert list(trainer.weights()) == ["b"]
    assert not Trainer(model, loss="mse", output="y", frozen=["w"]).notes


def test_a_scalar_that_may_be_a_parameter_is_named() -> None:
    """An exporter's own constants are not: it numbers them."""
    model = text_model("""g (float[N,4] x) => (float[N,4] y)
      <float[4] w = {1, 2, 3, 4}, float logit_scale = {2}, float val_3 = {0.5}> {
      h = Mul (x, w) s = Exp (logit_scale) z = Mul (h, s) y = Mul (z, val_3) }""")
    with pytest.warns(NoGradientWarning, match="'logit_scale' does not train: it is a scalar"):
        trainer = Trainer(model, loss="mse")
    assert (len(trainer.notes), list(trainer.weights())) == (1, ["w"])
    trainer = Trainer(model, loss="mse", trainable=["w", "logit_scale"])
    assert (trainer.notes, sorted(trainer.weights())) == ([], ["logit_scale", "w"])
    assert not Trainer(model, loss="mse", frozen=["logit_scale"]).notes


def test_many_weights_are_one_line() -> None:
    steps = " ".join(f"r{i} = Round (w{i}) h{i + 1} = Add (h{i}, r{i})" for i in range(5))
    weights = ", ".join(f"float[4] w{i} = {{1, 2, 3, {i}}}" for i in range(5))
    model = text_model(f"""g (float[4] x) => (float[4] y) <{weights}, float[4] b = {{1,2,3,9}}> {{
      h0 = Mul (x, b) {steps} y = Identity (h5) }}""")
    with pytest.warns(NoGradientWarning) as said:
        gradient(model)
    (note,) = (str(w.message) for w in said)
    assert note.startswith("'w0', 'w1', 'w2' and 2 other values have no gradient: no gradient for")


def test_without_weights_or_floats_there_is_an_error() -> None:
    with pytest.raises(ModelError, match="it has no weight; name an input, as in wrt"):
        gradient(text_model("g (float[4] x) => (float[4] y) { y = Relu (x) }"))
    integers = text_model(
        "g (float[4] x) => (int64[1] y) <float[4] w = {1,2,3,4}> { p = Mul (x, w) y = ArgMax (p) }"
    )
    with pytest.raises(ModelError, match="'x' has no gradient: no output is of a floating-point"):
        gradient(integers, wrt=["x"])


def test_the_commands_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(
        tmp_path / "data.npz", x=np.ones((4, 4), np.float32), labels=np.ones((4, 4), np.float32)
    )
    for trains in (True, False):
        path, out, report = (tmp_path / name for name in ("m.onnx", "out.onnx", "r.json"))
        save(net("Round", trains=trains), path)
        data = ["--data", str(tmp_path / "data.npz"), "--loss", "mse", "--json", str(report)]
        for command in (["gradient", str(path)], ["train", str(path), *data]):
            out.unlink(missing_ok=True)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                assert cli.run_command([*command, "-o", str(out)]) == (0 if trains else 1)
            printed = capsys.readouterr()
            assert out.exists() == trains
            said = "".join([printed.out, printed.err, *(str(w.message) for w in warned)])
            assert " ".join(said.split()).count("(Round): it is piecewise constant") == 1
        if trains:
            assert json.loads(report.read_text())["notes"]

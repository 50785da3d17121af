"""Losses of one's own as ONNX, and several losses with weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxscript
import pytest
from onnxscript import FLOAT
from onnxscript import opset18 as op
from support import assert_near

from onnx_fuse.errors import DataError, ModelError, OnnxFuseError, UsageError
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.training import fit, optim
from onnx_fuse.training.losses import Term
from onnx_fuse.training.trainer import Trainer

Array = np.ndarray[Any, Any]
MODEL = """net (float[batch, 3] x) => (float[batch, 4] y, float[batch, 2] z)
    <float[3, 4] w = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2},
     float[3, 2] v = {0.6, 0.5, 0.4, 0.3, 0.2, 0.1}> { y = MatMul (x, w)  z = MatMul (x, v) }"""
TYPES = '<ir_version: 9, opset_import: ["" : 18]>'
MSE = f"""{TYPES} mse (float[n, c] guess, float[n, c] labels) => (float loss)
    {{ d = Sub (guess, labels)  s = Mul (d, d)  loss = ReduceMean <keepdims = 0> (s) }}"""
# reads both outputs by name, has names that the model has, and a constant that does not train
BOTH = f"""{TYPES} both (float[n, 2] z, float[n, 4] t, float[n, 4] y) => (float loss, float[n, 4] d)
    <float[2] w = {{0.5, 2.0}}, bool yes = {{1}}> {{
    x = Mul (z, w)
    a = ReduceSumSquare <keepdims = 0> (x)
    d = Sub (y, t)
    b = ReduceSumSquare <keepdims = 0> (d)
    loss = If (yes) <
        then_branch = g1 () => (float loss) {{ loss = Add (a, b) }},
        else_branch = g2 () => (float loss) {{ loss = Sub (a, b) }}>
}}"""


@onnxscript.script()
def annotated(guess: FLOAT["n", "c"], labels: FLOAT["n", "c"]) -> FLOAT:  # noqa: F821
    d = op.Sub(guess, labels)
    return op.ReduceMean(op.Mul(d, d), keepdims=0)


@onnxscript.script()
def plain(guess, labels):  # type: ignore[no-untyped-def]
    d = op.Sub(guess, labels)
    return op.ReduceMean(op.Mul(d, d), keepdims=0)


def batch(seed: int = 0, rows: int = 6) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "labels": rng.normal(size=(rows, 4)).astype(np.float32)}


def model() -> Any:
    return text_model(MODEL)


GIVEN: dict[str, Callable[[], Any]] = {
    "a ModelProto": lambda: onnx.parser.parse_model(MSE),
    "bytes": lambda: onnx.parser.parse_model(MSE).SerializeToString(),
    "an onnx_ir.Model": lambda: text_model(MSE),
    "onnxscript with types": lambda: annotated,
    "onnxscript without": lambda: plain,
    "a FunctionProto": lambda: plain.to_function_proto(),
}


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("form", GIVEN)
def test_a_loss_as_onnx_is_the_loss_by_name(form: str, level: int, tmp_path: Path) -> None:
    given = GIVEN[form]()
    runs = [
        Trainer(model(), loss=loss, optimizer=optim.SGD(lr=0.1), level=level)
        for loss in ("mse", given)
    ]
    losses = [[float(run.step(batch(i))) for i in range(3)] for run in runs]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    assert_near(runs[1].weights(), runs[0].weights(), rtol=1e-5)
    assert runs[1].evaluate(batch(9)).loss == pytest.approx(runs[0].evaluate(batch(9)).loss)


def test_a_loss_in_a_file_reads_outputs_by_name(tmp_path: Path) -> None:
    """Its constants stay; its names are not mixed up with the model's; `z` reaches it, too."""
    onnx.save(onnx.parser.parse_model(BOTH), tmp_path / "both.onnx")
    trainer = Trainer(model(), loss=str(tmp_path / "both.onnx"), optimizer=optim.SGD(lr=0.01))
    assert set(trainer.weights()) == {"w", "v"}
    w, v = (a.astype(np.float64) for a in trainer.weights().values())
    feeds = {"x": batch()["x"], "t": batch()["labels"]}
    x, t = (a.astype(np.float64) for a in feeds.values())
    d, scaled = x @ w - t, x @ v * [0.5, 2.0]
    assert trainer.step(feeds) == pytest.approx((d**2).sum() + (scaled**2).sum(), rel=1e-5)
    found = trainer.weights()
    expected = {"w": w - 0.02 * x.T @ d, "v": v - 0.02 * x.T @ (scaled * [0.5, 2.0])}
    assert_near(found, expected, rtol=1e-5, atol=1e-6)
    trainer.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx").graph
    assert [n.op_type for n in saved.node] == ["MatMul", "MatMul"]


def test_several_losses_are_their_weighted_sum() -> None:
    """Classes on one output, numbers on the other; the first loss's metrics are reported."""
    terms = [
        Term("cross_entropy", "y", 0.5, options={"label_smoothing": 0.1, "ignore_index": 3}),
        Term("mse", "z", 2.0, labels="values"),
        Term(onnx.parser.parse_model(MSE.replace("c]", "2]")), "z", 0.25, labels="values2"),
    ]
    rng = np.random.default_rng(0)
    feeds = {
        "x": batch()["x"],
        "labels": np.array([0, 1, 2, 3, 0, 1]),
        "values": rng.normal(size=(6, 2)).astype(np.float32),
    }
    feeds["values2"] = feeds["values"]
    whole = Trainer(model(), loss=terms, optimizer=optim.SGD(lr=0.1))
    parts = [
        Trainer(model(), loss="cross_entropy", output="y", loss_options=dict(terms[0].options)),
        Trainer(model(), loss="mse", output="z"),
    ]
    own = [feeds, {"x": feeds["x"], "labels": feeds["values"]}]
    losses = [part.evaluate(each).loss for part, each in zip(parts, own, strict=True)]
    assert whole.step(feeds) == pytest.approx(0.5 * losses[0] + 2.25 * losses[1], rel=1e-6)
    found = fit.evaluate(whole, feeds, metrics=["accuracy"])
    assert found["validation_loss"] < 0.5 * losses[0] + 2.25 * losses[1]
    y = whole.evaluate(feeds).outputs["y"]
    counted = feeds["labels"] != 3
    assert found["accuracy"] == (y.argmax(1) == feeds["labels"])[counted].mean()
    with pytest.raises(DataError, match="no array for the input 'values'"):
        whole.step({k: a for k, a in feeds.items() if k != "values"})
    with pytest.raises(DataError, match=r"'labels' holds 4 at \[0\]"):
        whole.step({**feeds, "labels": np.full(6, 4)})


def test_terms_may_share_their_labels() -> None:
    """A distance by two norms of one output: one input is fed."""
    terms = [Term("mse", labels="t"), Term("l1", weight=0.5, labels="t")]
    trainer = Trainer(model(), loss=terms)
    assert [v.name for v in trainer.spec().feeds] == ["x", "t"]
    feeds = {"x": batch()["x"], "t": batch()["labels"]}
    d = trainer.evaluate(feeds).outputs["y"] - feeds["t"]
    assert trainer.step(feeds) == pytest.approx((d**2).mean() + 0.5 * abs(d).mean(), rel=1e-5)


def test_a_run_with_a_loss_of_its_own_is_resumed_with_it(tmp_path: Path) -> None:
    first = Trainer(model(), loss=plain)
    first.step(batch())
    first.checkpoint(tmp_path / "own")
    with pytest.raises(UsageError, match="has a loss that is a model: give it as loss="):
        Trainer.resume(tmp_path / "own", model())
    with pytest.raises(UsageError, match="was started with loss"):
        Trainer.resume(tmp_path / "own", model(), loss=onnx.parser.parse_model(BOTH))
    resumed = Trainer.resume(tmp_path / "own", model(), loss=plain)
    assert resumed.step(batch(1)) == first.step(batch(1))
    several = Trainer(model(), loss=[Term("mse"), Term("l1", "z", labels="t")])
    several.checkpoint(tmp_path / "named")
    Trainer.resume(tmp_path / "named", model())


WRONG = MSE.replace("float[n, c] guess, float[n, c]", "double[n, c] guess, double[n, c]")
REFUSED: dict[str, tuple[Any, type[OnnxFuseError], str]] = {
    "type": (7, UsageError, "a loss of type int: give a name, a model or a function"),
    "empty": ([], UsageError, "several losses are a list of Term"),
    "names": (["mse", "l1"], UsageError, "several losses are a list of Term"),
    "output": ([Term("mse", "q")], UsageError, "the model has no output 'q': it has y, z"),
    "double": (
        onnx.parser.parse_model(WRONG.replace("(float loss)", "(double loss)")),
        ModelError,
        "the loss reads 'guess' as DOUBLE, but the model's 'y' is FLOAT",
    ),
    "no scalar": (
        onnx.parser.parse_model(
            MSE.replace("keepdims = 0", "keepdims = 1").replace("float loss", "float[1, 1] loss")
        ),
        ModelError,
        "must be a float scalar",
    ),
    "labels": (
        [Term("mse", labels="t"), Term("cross_entropy", labels="t")],
        UsageError,
        "'t' is FLOAT, but a loss reads INT64 there",
    ),
    "file": ("missing.onnx", ModelError, "missing.onnx: No such file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    given, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        Trainer(to_proto(model()), loss=given)

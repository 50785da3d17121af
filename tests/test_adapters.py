"""LoRA: the low-rank product in every form of a product, what trains, what is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import safetensors.numpy
from cases import real_cases

from onnx_fuse import passes
from onnx_fuse.errors import DataError, UsageError
from onnx_fuse.onnx.build import text_model
from onnx_fuse.onnx.load import load
from onnx_fuse.onnx.save import save
from onnx_fuse.training import optim
from onnx_fuse.training.adapters import Lora, merge
from onnx_fuse.training.trainer import Trainer

Array = np.ndarray[Any, Any]
NUMBERS = ", ".join(str(round(i / 24 - 0.5, 3)) for i in range(24))


def graph(body: str, shape: str = "6, 4", rank3: bool = False) -> str:
    lead = "batch, 2" if rank3 else "batch"
    return f"""net (float[{lead}, 6] x) => (float[{lead}, 4] y)
        <float[{shape}] w = {{{NUMBERS}}}, float[4] c = {{0.1, 0.2, 0.3, 0.4}},
         float[6] g = {{1, 2, 1, 2, 1, 2}}, float[6] b = {{0, 0, 1, 0, 0, 0}}> {{ {body} }}"""


FORMS = {
    "MatMul": graph("y = MatMul (x, w)"),
    "three axes and a bias": graph("p = MatMul (x, w) y = Add (p, c)", rank3=True),
    "Gemm": graph("y = Gemm <alpha = 0.5, beta = 2.0> (x, w, c)"),
    "Gemm, transposed": graph("y = Gemm <transB = 1> (x, w, c)", "4, 6"),
    "Transpose": graph("t = Transpose <perm = [1, 0]> (w) p = MatMul (x, t) y = Tanh (p)", "4, 6"),
    "twice": graph("p = MatMul (x, w) q = Relu (x) r = MatMul (q, w) y = Add (p, r)"),
    "behind a norm": graph("n = LayerNormalization (x, g, b) p = MatMul (n, w) y = Add (p, c)"),
}


def batch(form: str, seed: int = 0, rows: int = 8) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    lead = (rows, 2) if "three" in form else (rows,)
    x = rng.normal(size=(*lead, 6)).astype(np.float32)
    return {"x": x, "labels": rng.normal(size=(*lead, 4)).astype(np.float32)}


@pytest.mark.parametrize("written", ["as it is", "fused"])
@pytest.mark.parametrize("form", FORMS)
def test_adapters_train_beside_every_form_of_a_product(
    form: str, written: str, tmp_path: Path
) -> None:
    """In files of fused operators, too: what is saved is the given graph, with merged weights."""
    model = text_model(FORMS[form])
    if written == "fused":
        model = load(model)
        passes.optimize(model, level=2)
    save(model, tmp_path / "model.onnx")
    trainer = Trainer(
        tmp_path / "model.onnx",
        loss="mse",
        optimizer=optim.Adam(lr=0.05),
        lora=Lora(2, 4.0),
    )
    first = trainer.evaluate(batch(form)).outputs["y"]
    run = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(first, run.run(None, {"x": batch(form)["x"]})[0], rtol=1e-5)
    losses = [float(trainer.step(batch(form))) for _ in range(20)]
    assert losses[-1] < 0.9 * losses[0]
    assert {a.shape for k, a in trainer.state().items() if "exp" not in k} == {(6, 2), (2, 4)}
    assert len(trainer.weights()) == 1
    trainer.save(tmp_path / "tuned.onnx")
    kinds = [
        [n.op_type for n in onnx.load(tmp_path / f).graph.node]
        for f in ("model.onnx", "tuned.onnx")
    ]
    assert kinds[0] == kinds[1]
    run = ort.InferenceSession(tmp_path / "tuned.onnx", providers=["CPUExecutionProvider"])
    found = run.run(None, {"x": batch(form, 1)["x"]})[0]
    expected = trainer.evaluate(batch(form, 1)).outputs["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_step_is_the_formula() -> None:
    """SGD on A and B, of which B is zero at first: A moves from the second step on."""
    trainer = Trainer(
        text_model(FORMS["MatMul"]), loss="mse", optimizer=optim.SGD(lr=0.3), lora=Lora(2, 3.0)
    )
    state = {k: a.astype(np.float64) for k, a in trainer.state().items()}
    w, a, b = (np.array([float(x) for x in NUMBERS.split(",")]).reshape(6, 4), *state.values())
    assert a.any()
    assert np.abs(a).max() <= 6**-0.5
    assert not b.any()
    for i in range(3):
        feeds = batch("MatMul", i)
        trainer.step(feeds)
        x, t = (feeds[k].astype(np.float64) for k in ("x", "labels"))
        d = 2 * (x @ (w + 1.5 * a @ b) - t) / t.size
        a, b = a - 0.3 * 1.5 * x.T @ d @ b.T, b - 0.3 * 1.5 * (x @ a).T @ d
    np.testing.assert_allclose(trainer.weights()["w"], w + 1.5 * a @ b, rtol=1e-5, atol=1e-6)
    other = Trainer(text_model(FORMS["MatMul"]), loss="mse", lora=Lora(2), seed=1)
    assert not np.array_equal(next(iter(other.state().values())), state["w.lora_a"])


@pytest.mark.parametrize("level", [0, 2])
def test_an_exported_model_adapts(level: int, tmp_path: Path) -> None:
    """GPT-2 as its exporter wrote it: the loss falls, the adapters are small and come back."""
    (case,) = (case for case in real_cases() if case.name == "gpt2__ts17")
    (feeds, outputs), path = case.feeds[0], case.path
    labels = next(iter(outputs.values())) + 1
    trainer = Trainer(
        path, loss="mse", optimizer=optim.Adam(lr=1e-2), lora=Lora(4), level=level, ema=0.5
    )
    losses = [float(trainer.step({**feeds, "labels": labels})) for _ in range(4)]
    assert losses[-1] < losses[0]
    trainer.save_adapters(tmp_path / "adapters.safetensors")
    trainer.save(tmp_path / "merged.onnx")
    small = (tmp_path / "adapters.safetensors").stat().st_size
    assert small < 0.5 * path.stat().st_size
    merge(path, tmp_path / "adapters.safetensors", tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == (tmp_path / "merged.onnx").read_bytes()
    fresh = Trainer(path, loss="mse", lora=Lora(4), level=level, ema=0.5)
    fresh.load_adapters(tmp_path / "adapters.safetensors")
    for ema in (False, True):
        for name, array in fresh.weights(ema=ema).items():
            np.testing.assert_array_equal(array, trainer.weights()[name])


def test_a_head_may_train_whole() -> None:
    """`trainable` adds weights that have no adapter, or one that its own products keep."""
    trainer = Trainer(
        text_model(FORMS["three axes and a bias"]), loss="mse", lora=Lora(2), trainable=["c"]
    )
    trainer.step(batch("three"))
    assert set(trainer.weights()) == {"w", "c"}


def test_a_run_with_adapters_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    def build() -> Trainer:
        return Trainer(text_model(FORMS["Gemm"]), loss="mse", lora=Lora(2), seed=5, trainable=["c"])

    first = build()
    for i in range(3):
        first.step(batch("Gemm", i))
    first.checkpoint(tmp_path)
    resumed = Trainer.resume(tmp_path, text_model(FORMS["Gemm"]))
    for run in (first, resumed):
        run.step(batch("Gemm", 4))
    for name, array in first.state().items():
        assert resumed.state()[name].tobytes() == array.tobytes(), name
    with pytest.raises(UsageError, match=r"was started with lora\.rank 2, not 3"):
        Trainer(
            text_model(FORMS["Gemm"]), loss="mse", lora=Lora(3), seed=5, trainable=["c"]
        ).restore(tmp_path)
    with pytest.raises(UsageError, match=r"was started with lora .*'rank': 2.*, not None"):
        Trainer(text_model(FORMS["Gemm"]), loss="mse", seed=5, trainable=["c"]).restore(tmp_path)


EMBEDDING = """net (int64[batch, T] ids) => (float[batch, T, 3] y) <float[4, 3] w = {NUMBERS}> {
    y = Gather (w, ids)
}""".replace("NUMBERS", ", ".join(["1"] * 12))
REFUSED: dict[str, tuple[str, Any, str]] = {
    "glob": (FORMS["MatMul"], lambda: Lora(weights=("q*",)), r"'q\*' matches no weight"),
    "no matrix": (FORMS["MatMul"], lambda: Lora(weights="c"), "c name no matrix"),
    "embedding": (EMBEDDING, lambda: Lora(), "'w' is read by the Gather node"),
    "left": (
        graph("t = MatMul (w, x) y = MatMul (x, t)").replace("batch", "4"),
        lambda: Lora(),
        "which is no product of rows",
    ),
    "rank": (FORMS["MatMul"], lambda: Lora(0), "the rank of LoRA must be at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    text, make, words = REFUSED[case]
    with pytest.raises(UsageError, match=words):
        Trainer(text_model(text), loss="mse", lora=make())


def test_refuses_files(tmp_path: Path) -> None:
    trainer = Trainer(text_model(FORMS["MatMul"]), loss="mse", lora=Lora(2))
    safetensors.numpy.save_file({"x": np.ones(3)}, tmp_path / "other.safetensors")
    (tmp_path / "none.safetensors").write_bytes(b"nothing")
    for name, words in (
        ("other.safetensors", "holds no adapters of this package"),
        ("none.safetensors", "holds no adapters of this package"),
        ("missing.safetensors", "missing.safetensors"),
    ):
        with pytest.raises(DataError, match=words):
            trainer.load_adapters(tmp_path / name)
    Trainer(text_model(FORMS["MatMul"]), loss="mse", lora=Lora(3)).save_adapters(tmp_path / "three")
    with pytest.raises(DataError, match="have other names or shapes"):
        trainer.load_adapters(tmp_path / "three")
    with pytest.raises(DataError, match=r"'w' is \[4, 6\] in the model, \[6, 4\] in the adapters"):
        merge(text_model(FORMS["Transpose"]), tmp_path / "three", tmp_path / "merged.onnx")
    plain = Trainer(text_model(FORMS["MatMul"]), loss="mse")
    with pytest.raises(UsageError, match="the Trainer has no adapters"):
        plain.save_adapters(tmp_path / "plain")

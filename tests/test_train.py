"""The Trainer against formulas and PyTorch's figures; what it saves; what it refuses."""

import json
from pathlib import Path
from typing import Any

import convnet
import encoder
import gpt
import mlp
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import pytorch_curves
import text_data
from cases import RealCase, real_cases
from support import answers, assert_near, assert_same, normal, run, stock

from onnx_fuse import autodiff, nn, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import (
    CheckFailed,
    DataError,
    DeviceError,
    ModelError,
    OnnxFuseError,
    UsageError,
)
from onnx_fuse.importer.save import save, to_proto
from onnx_fuse.importer.shapes import fix_shapes
from onnx_fuse.ir.build import text_model
from onnx_fuse.training import fit, optim
from onnx_fuse.training.backends import Cuda, Portable
from onnx_fuse.training.callbacks import Watch
from onnx_fuse.training.loss import Loss
from onnx_fuse.training.options import TrainingOptions
from onnx_fuse.training.step import Spec, training_model
from onnx_fuse.training.trainer import Trainer

Array = np.ndarray[Any, Any]
DATA = Path(__file__).parent / "data"
LINEAR = """linear (float[batch, 3] x) => (float[batch, 2] y)
    <float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {0.5, -0.5}>
    { p = MatMul (x, w)  y = Add (p, b) }"""


def batch(seed: int = 0, rows: int = 8) -> dict[str, Array]:
    return normal({"x": (rows, 3), "labels": (rows, 2)}, seed)


def gradients(w: Array, b: Array, feeds: dict[str, Array]) -> tuple[Array, Array]:
    """Of mean((x w + b - t)²), in float64."""
    x, t = (feeds[k].astype(np.float64) for k in ("x", "labels"))
    d = 2 * (x @ w + b - t) / t.size
    return x.T @ d, d.sum(0)


def test_float64_weights_train_under_a_scaled_loss() -> None:
    """Only float32 becomes 16 bits: the graph of a float64 model is what it was, and typed."""
    model = text_model(LINEAR.replace("float", "double"))
    graph, _ = training_model(model, loss="mse", optimizer=optim.SGD(lr=0.1), precision="fp16")
    onnx.checker.check_model(to_proto(graph), full_check=True)
    assert {v.dtype.name for v in graph.graph.outputs if v.name in ("w.next", "b.next")} == {
        "DOUBLE"
    }


def test_the_scales_of_a_resize_are_no_weights() -> None:
    model = text_model("""agraph (float[B,1,4,4] x) => (float[B,1,8,8] y)
      <float[1,1,1,1] w = {2}, float[4] scales = {1,1,2,2}>
      { z = Mul (x, w) y = Resize <mode = "nearest"> (z, , scales) }""")
    _, spec = training_model(model, loss="mse", optimizer=optim.AdamW())
    assert [s.name for s in spec.states if s.kind == "parameter"] == ["w"]


SIZES = {
    "made by Concat": "scales = Concat <axis = 0> (ones, factors)",
    "made by Mul and Max": "m = Mul (four, factor) scales = Max (m, four)",
    "read in a branch": """yes = Constant <value = bool {1}> ()
        scales = If (yes) <
          then_branch = g () => (float[4] s) { s = Concat <axis = 0> (ones, factors) },
          else_branch = h () => (float[4] t) { t = Identity (four) }>""",
}


@pytest.mark.parametrize("form", SIZES)
def test_what_reaches_only_sizes_does_not_train(form: str) -> None:
    model = text_model(f"""agraph (float[B,1,4,4] x) => (float[B,1,8,8] y)
      <float[1,1,1,2] w = {{2, 3}}, float[2] ones = {{1,1}}, float[2] factors = {{2,2}},
       float[4] four = {{1,1,2,2}}, float[4] factor = {{1,1,1,1}}>
      {{ z = Conv (x, w) {SIZES[form]} y = Resize <mode = "nearest"> (z, , scales) }}""")
    for name, value in list(model.graph.initializers.items()):
        if not value.uses():
            del model.graph.initializers[name]
    assert [v.name for v in autodiff.gradient(model.clone()).graph.outputs] == ["y", "w.grad"]
    assert list(nn.from_onnx(model).state_dict()) == ["w"]
    _, spec = training_model(model, loss="mse", optimizer=optim.AdamW())
    assert [s.name for s in spec.states if s.kind == "parameter"] == ["w"]


START = np.arange(1.0, 7.0).reshape(3, 2), np.array([0.5, -0.5])


@pytest.mark.parametrize("clip", [None, 3.0])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("rows", [(8, 8), (8, 5)])
def test_step_is_the_formula(clip: float | None, accumulate: int, rows: tuple[int, ...]) -> None:
    """SGD over batches of different sizes, with clipping and accumulation, in float64 beside it."""
    sgd = optim.SGD(lr=optim.step(0.1, every=2, gamma=0.5))
    options = {"optimizer": sgd, "clip_norm": clip, "accumulate": accumulate}
    trainer = Trainer(text_model(LINEAR), loss="mse", **options)
    w, b = START
    for update in range(4):
        total_w, total_b = np.zeros_like(w), np.zeros_like(b)
        for i in range(accumulate):
            feeds = batch(10 * update + i, rows[i % 2])
            x, t = feeds["x"], feeds["labels"]
            assert trainer.step(feeds) == pytest.approx(np.mean((x @ w + b - t) ** 2), rel=1e-5)
            gw, gb = gradients(w, b, feeds)
            total_w, total_b = total_w + gw / accumulate, total_b + gb / accumulate
        norm = np.sqrt((total_w**2).sum() + (total_b**2).sum())
        factor = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
        rate = 0.1 * 0.5 ** (update // 2) * factor
        w, b = w - rate * total_w, b - rate * total_b
        np.testing.assert_allclose(trainer.weights()["w"], w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(trainer.weights()["b"], b, rtol=1e-5, atol=1e-6)
    assert trainer.updates == 4


def test_frozen_weights_stay_bit_for_bit() -> None:
    trainer = Trainer(text_model(LINEAR), loss="mse", frozen=["b"])
    trainer.step(batch())
    assert set(trainer.weights()) == {"w"}
    trainer = Trainer(text_model(LINEAR), loss="mse", trainable=["b*"])
    trainer.step(batch())
    assert set(trainer.weights()) == {"b"}


def test_evaluate_is_onnxruntime_on_the_saved_model(tmp_path: Path) -> None:
    trainer = Trainer(text_model(LINEAR), loss="mse")
    for i in range(3):
        trainer.step(batch(i))
    trainer.save(tmp_path / "tuned.onnx")
    feeds = batch(7)
    found = trainer.evaluate(feeds)
    (y,) = run(tmp_path / "tuned.onnx", feeds, optimized=True)
    np.testing.assert_allclose(found.outputs["y"], y, rtol=1e-6)
    assert found.loss == pytest.approx(float(np.mean((y - feeds["labels"]) ** 2)), rel=1e-5)


# ---- whole models ------------------------------------------------------------------------------


def images(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(8, 3, 8, 8)).astype(np.float32)
    return {"x": x, "labels": rng.integers(0, 10, 8)}


def tokens(seed: int) -> dict[str, Array]:
    ids = np.random.default_rng(seed).integers(0, 256, (4, 17))
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def sentences(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 256, (4, 12))
    mask = (np.arange(12) < rng.integers(5, 13, (4, 1))).astype(np.int64)
    labels = rng.normal(size=(4, 12, 32)).astype(np.float32)
    feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return feeds | {"labels": labels}


MODELS = {
    "mlp": (
        lambda: mlp.build(mlp.SIZES["digits"]),
        lambda seed: {
            "x": images(seed)["x"].reshape(8, -1)[:, :64],
            "labels": images(seed)["labels"],
        },
        "cross_entropy",
    ),
    "gpt": (lambda: gpt.build(gpt.Config()), tokens, "cross_entropy"),
    "encoder": (lambda: encoder.build(encoder.SIZES["tiny"]), sentences, "mse"),
    "convnet": (lambda: convnet.build(convnet.SIZES["tiny"]), images, "cross_entropy"),
    "a learned temperature": (
        lambda: text_model("""g (float[N,3,4] q) => (float[N,3,4] y)
            <float[1] temperature = {2}, float[1] val_73 = {0.5}> { t = Transpose<perm=[0,2,1]>(q)
            a = Mul (q, val_73) b = Mul (t, val_73) s = MatMul (a, b) u = Div (s, temperature)
            p = Softmax (u) y = MatMul (p, q) }"""),
        lambda seed: normal(dict.fromkeys(("q", "labels"), (2, 3, 4)), seed),
        "mse",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_fused_and_plain_graphs_train_alike(name: str, tmp_path: Path) -> None:
    """Equal losses and weights, up to rounding; what is saved is the original with new weights."""
    build, feeds, loss = MODELS[name]
    model = build()
    trainers = [
        Trainer(model, loss=loss, optimizer=optim.SGD(lr=0.05), level=level) for level in (0, 2)
    ]
    losses = np.array([[t.step(feeds(i)) for i in range(4)] for t in trainers])
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-5)
    plain, fused = (t.weights() for t in trainers)
    assert plain.keys() == fused.keys()
    assert "val_73" not in plain  # as torch.onnx calls the scale of attention
    assert_near(plain, fused, rtol=1e-4, atol=2e-6)
    assert_saves(trainers[1], to_proto(model), feeds(9), tmp_path / "tuned.onnx")


def structure(proto: onnx.ModelProto) -> list[str]:
    """The lines of a model without its weights; an empty text is as good as none."""
    copy, names = onnx.ModelProto(), {t.name for t in proto.graph.initializer}
    copy.CopyFrom(proto)
    hints = sorted((v for v in proto.graph.value_info if v.name not in names), key=lambda v: v.name)
    del copy.graph.initializer[:], copy.graph.value_info[:]
    copy.graph.value_info.extend(hints)
    empty = {'doc_string: ""', 'domain: ""'}
    return [line for line in str(copy).splitlines() if line.strip() not in empty]


def assert_saves(
    trainer: Trainer, original: onnx.ModelProto, feeds: dict[str, Array], path: Path
) -> None:
    """The file differs from the original in the content of trained weights alone, and runs."""
    trainer.save(path)
    saved = onnx.load(path)
    weights = trainer.weights()
    changed = 0
    for old in original.graph.initializer:
        (new,) = (t for t in saved.graph.initializer if t.name == old.name)
        expected = weights.get(old.name, onnx.numpy_helper.to_array(old))
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(new), expected)
        changed += old.name in weights
        assert (new.data_type, list(new.dims)) == (old.data_type, list(old.dims))
    assert changed == len(weights) > 0
    assert structure(saved) == structure(original)
    found = answers(stock(path, optimized=True), feeds)
    if any(a.name == "training_mode" and a.i for n in original.graph.node for a in n.attribute):
        loss = float(
            np.mean((next(iter(found.values())) - feeds["labels"]) ** 2)
        )  # by statistics of the batch
        assert trainer.step(feeds) == pytest.approx(loss, rel=1e-4)
        return
    outputs = trainer.evaluate(feeds).outputs
    assert [*found] == [*outputs]
    assert_same(found.values(), outputs.values(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("case", real_cases(), ids=lambda case: case.name)
def test_exported_models_train_and_save(case: RealCase, level: int, tmp_path: Path) -> None:
    """From what exporters write: the loss falls, and the file that comes out is the one put in."""
    feeds, outputs = case.feeds[0]
    target = next(iter(outputs.values()))
    noise = np.random.default_rng(0).normal(size=target.shape)
    feeds = {**feeds, "labels": (target + noise).astype(target.dtype)}
    trainer = Trainer(case.path, loss="mse", optimizer=optim.SGD(lr=2e-3), level=level)
    losses = [trainer.step(feeds) for _ in range(4)]
    assert losses[0] > losses[1] > losses[2] > losses[3]
    assert_saves(trainer, onnx.load(case.path), feeds, tmp_path / "tuned.onnx")


def test_external_data_comes_back_external(tmp_path: Path) -> None:
    """The weights lie beside the saved model as they lay beside the original, which stays."""
    model = mlp.build(mlp.SIZES["digits"])
    save(model, tmp_path / "model.onnx", external=True)
    before = (tmp_path / "model.onnx.data").read_bytes()
    name, feeds = "mlp", MODELS["mlp"][1](0)
    trainer = Trainer(tmp_path / "model.onnx", loss=MODELS[name][2])
    trainer.step(feeds)
    trainer.save(tmp_path / "tuned.onnx")
    stored = onnx.load(tmp_path / "tuned.onnx", load_external_data=False).graph.initializer
    assert {t.name for t in stored if t.data_location == onnx.TensorProto.EXTERNAL} >= {
        f"layers.{i}.fc.weight" for i in range(3)
    }
    assert (tmp_path / "model.onnx.data").read_bytes() == before
    (y,) = run(tmp_path / "tuned.onnx", feeds, optimized=True)
    np.testing.assert_allclose(y, trainer.evaluate(feeds).outputs["logits"], rtol=1e-4, atol=1e-5)


def test_old_file_whose_weights_are_inputs_too(tmp_path: Path) -> None:
    """As exporters did before IR version 4: opset 9, each weight an initializer and an input."""
    text = """<ir_version: 3, opset_import: ["" : 9]>
    old (float[batch, 3] x, float[3, 2] w) => (float[batch, 2] y)
        <float[3, 2] w = {1, 2, 3, 4, 5, 6}> { y = MatMul (x, w) }"""
    proto = onnx.parser.parse_model(text)
    onnx.save(proto, tmp_path / "old.onnx")
    trainer = Trainer(tmp_path / "old.onnx", loss="mse")
    feeds = batch()
    assert trainer.step(feeds) > trainer.step(feeds)
    assert_saves(trainer, proto, feeds, tmp_path / "tuned.onnx")


def test_tied_weights_stay_one(tmp_path: Path) -> None:
    """A weight read twice has the sum of its gradients, fused or not."""
    text = """net (float[batch, 4] x) => (float[batch, 4] y) <float[4, 4] w = {WEIGHTS}>
        { h = MatMul (x, w)  t = Transpose <perm = [1, 0]> (w)
        y = MatMul (h, t) }""".replace("WEIGHTS", ", ".join(str(i / 16) for i in range(16)))
    rng = np.random.default_rng(0)
    x, t = (rng.normal(size=(5, 4)).astype(np.float32) for _ in range(2))
    w = np.arange(16.0).reshape(4, 4) / 16
    d = 2 * (x @ w @ w.T - t) / t.size
    expected = w - 0.1 * (x.T @ d @ w + d.T @ x @ w)
    for level in (0, 2):
        trainer = Trainer(text_model(text), loss="mse", optimizer=optim.SGD(lr=0.1), level=level)
        trainer.step({"x": x, "labels": t})
        np.testing.assert_allclose(trainer.weights()["w"], expected, rtol=1e-4, atol=1e-6)


def fixed(case: RealCase) -> tuple[Any, dict[str, Array]]:
    """The model as if exported for one example, its shapes computed; and three examples."""
    feeds, outputs = case.feeds[0]
    model = load(case.path)
    fix_shapes(model, {k: [1, *v.shape[1:]] for k, v in feeds.items()})
    rewrite.optimize(model, level=0, training=True)
    feeds = {**feeds, "labels": 1 + next(iter(outputs.values()))}
    return model, {k: np.concatenate([v[:2], v[:1]]) for k, v in feeds.items()}


def test_a_batch_that_is_an_index_is_not_freed() -> None:
    """This mask reads row `arange(batch)` of the inputs: of a fixed batch, a constant."""
    (case,) = (case for case in real_cases() if case.name == "bert__ts13")
    model, feeds = fixed(case)
    with pytest.raises(ModelError, match="cannot be freed: its output 'last_hidden_state' changes"):
        Trainer(model, loss="mse", free_batch=True).step(feeds)


@pytest.mark.parametrize("name", ["vit__dynamo", "whisper_encoder__ts13"])
def test_fixed_batch_is_freed(name: str) -> None:
    """Trained on three examples a step, it is the model that was exported with a free batch."""
    (case,) = (case for case in real_cases() if case.name == name)
    model, feeds = fixed(case)
    with pytest.raises(DataError, match="has shape"):
        Trainer(model, loss="mse").step(feeds)
    free = Trainer(case.path, loss="mse")
    names = list(free.weights())  # constants that got names in `fixed` are none
    freed = Trainer(model, loss="mse", free_batch=True, trainable=names)
    losses = [[t.step(feeds) for _ in range(3)] for t in (freed, free)]
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["encoder_layer_prenorm__dynamo", "gpt2__dynamo23", "t5_encoder__ts17"]
)
def test_batch_that_cannot_be_freed(name: str) -> None:
    """One breaks at a node; the others would read one example for another."""
    (case,) = (case for case in real_cases() if case.name == name)
    model, feeds = fixed(case)
    trainer = Trainer(model, loss="mse", free_batch=True)
    with pytest.raises(ModelError, match="the batch of the model cannot be freed"):
        trainer.step(feeds)


def test_batch_and_sequence_change_from_step_to_step() -> None:
    trainer = Trainer(gpt.build(gpt.Config()), loss="cross_entropy", optimizer=optim.SGD(lr=0.0))
    for rows, length in [(2, 8), (3, 16), (1, 5), (2, 8)]:
        ids = np.random.default_rng(rows).integers(0, 256, (rows, length + 1))
        assert 5 < trainer.step({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}) < 6
        outputs = trainer.evaluate({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}).outputs
        assert outputs["logits"].shape == (rows, length, 256)


def test_running_statistics_follow_the_batches() -> None:
    """0.9 of the old and 0.1 of the batch's, read off the one convolution before the norm."""
    model = convnet.build(convnet.SIZES["tiny"])
    feeds = images(0)
    stem = model.clone()
    conv = next(n for n in stem.graph if n.op_type == "Conv")
    stem.graph.outputs[:] = [conv.outputs[0]]
    run = stock(stem, optimized=True)
    (h,) = run.run(None, {"x": feeds["x"]})
    trainer = Trainer(model, loss="cross_entropy")
    trainer.step(feeds)
    found = trainer.weights()
    mean, var = h.mean((0, 2, 3)), h.var((0, 2, 3))
    np.testing.assert_allclose(found["stem.norm.running_mean"], 0.1 * mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["stem.norm.running_var"], 0.9 + 0.1 * var, rtol=1e-4)
    still = Trainer(model, loss="cross_entropy", frozen=["*.running_*"])
    still.step(feeds)
    assert not [name for name in still.weights() if "running" in name]


DROPOUT = """net (float[batch, 64] x) => (float[batch, 64] y)
    <float[64] w = {ONES}, float ratio = {0.25}, bool on = {1}>
    { h = Mul (x, w)  y = Dropout (h, ratio, on) }""".replace("ONES", ", ".join(["1"] * 64))


def test_dropout_draws_by_seed_and_step() -> None:
    """A quarter is dropped, the rest scaled up; another step or seed draws another mask."""
    feeds = {"x": np.ones((500, 64), np.float32), "labels": np.zeros((500, 64), np.float32)}

    def losses(seed: int) -> list[float]:
        trainer = Trainer(text_model(DROPOUT), loss="mse", optimizer=optim.SGD(lr=0.0), seed=seed)
        assert trainer.evaluate(feeds).loss == 1  # no mask in inference
        return [trainer.step(feeds) for _ in range(3)]

    first = losses(0)
    assert first == losses(0)
    assert len({*first, *losses(1)}) == 6
    # mean of mask² is 0.75 / 0.75²; its deviation over 32,000 draws 0.0032
    np.testing.assert_allclose(first, 4 / 3, atol=0.015)


def test_dropout_gradient_goes_through_the_kept() -> None:
    trainer = Trainer(text_model(DROPOUT), loss="mse", optimizer=optim.SGD(lr=1.0))
    feeds = {"x": np.ones((1, 64), np.float32), "labels": np.zeros((1, 64), np.float32)}
    trainer.step(feeds)
    steps = np.unique((1 - trainer.weights()["w"]) * 64)
    np.testing.assert_allclose(steps, [0, 2 / 0.75**2], rtol=1e-5)


# ---- refusals ----------------------------------------------------------------------------------


class Nowhere:
    """States on no GPU."""

    def __init__(self, states: object, options: TrainingOptions) -> None:
        self.memory = options.memory

    def add(self, key: str, model: object) -> None:
        self.model = model


@pytest.mark.parametrize(
    ("precision", "level", "math"),
    [("fp32", 0, "ieee"), ("bf16x3", 0, "bf16x3"), ("bf16", 2, "ieee"), ("fp16", 2, "ieee")],
)
def test_a_gpu_trains_fused_in_16_bits(
    monkeypatch: pytest.MonkeyPatch, precision: str, level: int, math: str
) -> None:
    monkeypatch.setattr("onnx_fuse.training.backends.Cuda", Nowhere)
    monkeypatch.setattr("onnx_fuse.runtime.device.begin", lambda *_: None)
    trainer = Trainer(
        text_model(LINEAR), loss="mse", precision=precision, device="cuda", memory="1 KiB"
    )
    assert trainer._options.level == level
    assert trainer._whole is not None
    assert trainer._whole.math == math
    assert trainer._device.memory == 1024


NO_WEIGHTS = "net (float[2] x) => (float[2] y) { y = Relu (x) }"
REFUSED: dict[str, tuple[str, dict[str, Any], type[OnnxFuseError], str]] = {
    "no weights": (NO_WEIGHTS, {}, ModelError, "no float weights"),
    "all frozen": (LINEAR, {"frozen": ["*"]}, UsageError, "every weight of the model is frozen"),
    "no match": (LINEAR, {"trainable": ["head.*"]}, UsageError, "'head.*' matches no weight"),
    "loss": (LINEAR, {"loss": "hing"}, UsageError, "unknown loss 'hing'"),
    "output": (LINEAR, {"output": "z"}, UsageError, "no output 'z'"),
    "precision": (LINEAR, {"precision": "bf16"}, UsageError, "precision 'bf16' needs a GPU"),
    "no precision": (
        LINEAR,
        {"precision": "int8"},
        UsageError,
        "one of fp32, tf32, bf16x3, bf16x6",
    ),
    "scale": (LINEAR, {"loss_scale": 0.0}, UsageError, "loss scale is 0.0"),
    "device": (LINEAR, {"device": "tpu"}, UsageError, "not on 'tpu'"),
    "accumulate": (LINEAR, {"accumulate": 0}, UsageError, "accumulate must be at least 1"),
    "threads": (LINEAR, {"threads": -1}, UsageError, "seed and threads at least 0"),
    "threads of a GPU": (LINEAR, {"threads": 2, "device": "cuda"}, UsageError, "leave them out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str) -> None:
    text, options, error, words = REFUSED[case]
    with pytest.raises(error, match=words.replace("*", r"\*")):
        Trainer(text_model(text), **{"loss": "mse", **options})


def test_threads_are_those_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("onnx_fuse.runtime.ort.session", lambda _, options: made.append(options))
    Trainer(text_model(LINEAR), loss="mse", threads=3)
    assert [options.intra_op_num_threads for options in made] == [3]


WRONG_FEEDS = {
    "missing": ({"x": batch()["x"]}, "no array for the input 'labels'"),
    "dtype": ({**batch(), "x": batch()["x"] + np.float64(0.1)}, "'x' holds float64"),
    "rank": ({**batch(), "x": batch()["x"][0]}, r"'x' has shape \[3\]"),
    "width": ({**batch(), "x": batch()["x"][:, :2]}, r"the model reads \[batch, 3\]"),
    "no rows": ({name: a[:0] for name, a in batch().items()}, "'labels' is empty: a batch needs"),
    "batch": ({**batch(), "labels": batch()["labels"][:3]}, "'batch', is 8 in 'x', and .*: rename"),
}


@pytest.mark.parametrize("case", WRONG_FEEDS)
def test_refuses_feeds(case: str) -> None:
    feeds, words = WRONG_FEEDS[case]
    trainer = Trainer(text_model(LINEAR), loss="mse")
    with pytest.raises(DataError, match=words):
        trainer.step(feeds)


def test_labels_out_of_range() -> None:
    trainer = Trainer(text_model(LINEAR), loss="cross_entropy")
    x = batch()["x"][:3]
    trainer.step({"x": x, "labels": np.array([0, 1, -100])})  # -100 is left out of the loss
    for wrong in (2, -1):
        with pytest.raises(DataError, match=rf"'labels' holds {wrong} at \[1\]"):
            trainer.step({"x": x, "labels": np.array([0, wrong, 1])})


OVERFLOWS = """net (float[batch, 3] x) => (float[batch, 3] y) <float[3] w = {1, 1, 1}>
    { h = Mul (x, w)  e = Exp (h)  y = Log (e) }"""


def test_step_that_is_not_finite_is_named_and_dropped() -> None:
    trainer = Trainer(text_model(OVERFLOWS), loss="mse")
    good = {"x": np.ones((2, 3), np.float32), "labels": np.zeros((2, 3), np.float32)}
    trainer.step(good)
    before = trainer.state()
    with pytest.raises(CheckFailed, match=r"step 2: the loss is inf; 'e', .* the Exp node") as e:
        trainer.step({**good, "x": np.full((2, 3), 100, np.float32)})
    assert e.value.exit_code == 3
    with pytest.raises(CheckFailed, match="'x' holds a value that is not finite"):
        trainer.step({**good, "x": np.full((2, 3), np.nan, np.float32)})
    assert all(np.array_equal(a, before[k]) for k, a in trainer.state().items())
    trainer.step(good)


def test_a_step_that_onnxruntime_cannot_look_into_is_still_a_failed_check(monkeypatch) -> None:
    """A graph in bfloat16, of which it runs little: its error is told behind the step's."""
    found = "onnx_fuse.training.fault._first_not_finite"
    monkeypatch.setattr(found, lambda *_: ort.InferenceSession(b"no model"))
    trainer = Trainer(text_model(OVERFLOWS), loss="mse")
    feeds = {"x": np.full((2, 3), 100, np.float32), "labels": np.zeros((2, 3), np.float32)}
    with pytest.raises(CheckFailed, match=r"step 1: .* inf; looking for .*onnxruntime: "):
        trainer.step(feeds)


class Ahead(Portable):
    """The contract of a device that runs ahead: after a fault no step changes a state."""

    in_flight = 4
    sound = True

    def start(self, key: str, spec: Spec, feeds: Any) -> Any:
        found = {name: array.copy() for name, array in self._run(key, spec, feeds).items()}
        self.sound &= all(np.isfinite(found[name]) for name in (spec.loss, spec.norm) if name)
        if self.sound:
            super().commit(spec)
        return lambda: found

    def commit(self, spec: Spec) -> None:
        """Done in `start`."""

    def resume_updates(self) -> None:
        self.sound = True


def late_losses(device: str, accumulate: int) -> None:
    """Losses that nobody waits for are those of steps run one by one; a fault undoes what followed.

    tests/gpu runs this too.
    """
    made = [
        Trainer(text_model(LINEAR), loss="mse", device=device, accumulate=accumulate, clip_norm=2.0)
        for _ in range(2)
    ]
    late = [made[0].step(batch(i)) for i in range(9)]
    early = [float(made[1].step(batch(i))) for i in range(9)]
    assert all(isinstance(loss, Loss) for loss in late)
    assert late == early
    assert f"{late[0]:.3f}" == f"{early[0]:.3f}"
    assert sum(late) == sum(early)
    assert np.mean(late) == np.mean(early)
    a, b = late[0], early[0]
    assert (a + a, a - b, 2 * a, a * 2, a / 2) == (b + b, 0, 2 * b, 2 * b, b / 2)
    assert (1 - a, 1 / a, -a, abs(-a), bool(a)) == (1 - b, 1 / b, -b, b, True)
    assert (round(a), round(a, 2)) == (round(b), round(b, 2))
    assert (late[0] > late[8]) == (early[0] > early[8])

    bad = {**batch(9), "x": np.full((8, 3), np.inf, np.float32)}
    first, wrong, after = (made[0].step(feeds) for feeds in (batch(9), bad, batch(10)))
    made[1].step(batch(9))
    assert float(first) > 0
    with pytest.raises(CheckFailed, match=r"step 11: .*'x' holds a value that is not finite"):
        float(wrong)
    with pytest.raises(CheckFailed, match="step 11: "):
        float(after)  # it was started behind the bad one, and is not made
    assert made[0].calls == made[1].calls == 10
    for i in (10, 11):
        assert made[0].step(batch(i)) == made[1].step(batch(i))
    for name, array in made[0].state().items():
        assert array.tobytes() == made[1].state()[name].tobytes(), name

    made[0].step(bad)  # whose loss nobody reads: the next to look at the states is told
    with pytest.raises(CheckFailed, match="step 13: "):
        made[0].weights()
    made[0].step(bad)
    for i in range(Cuda.in_flight - 1):
        made[0].step(batch(i))
    with pytest.raises(CheckFailed, match="step 13: "):
        made[0].step(batch())
    assert made[0].weights().keys() == made[1].weights().keys()


def test_a_wait_that_failed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx_fuse.training.backends.Portable", Ahead)
    trainer = Trainer(text_model(LINEAR), loss="mse")
    loss, after = trainer.step(batch()), trainer.step(batch(1))
    assert isinstance(loss, Loss)

    def gone() -> dict[str, Array]:
        raise DeviceError("gone")

    arrived, loss._run.result = loss._run.result, gone
    for late in (loss, after, loss):
        with pytest.raises(DeviceError, match="gone"):
            float(late)
    loss._run.result = arrived
    assert float(loss) != float(after)


def split_batches(device: str) -> None:
    """A batch in parts: the bits of any split where sums are exact, else those of the same one.

    tests/gpu runs this too.
    """
    rng = np.random.default_rng(0)
    numbers = {name: rng.integers(-8, 8, (16, n)) for name, n in (("x", 3), ("labels", 2))}
    exact = {name: array.astype(np.float32) for name, array in numbers.items()}
    for feeds, splits in ((exact, (1, 2, 8, 16)), (batch(rows=16), (4, 4))):
        found = []
        for k in splits:
            sgd = optim.SGD(lr=0.5)
            trainer = Trainer(
                text_model(LINEAR), loss="mse", device=device, optimizer=sgd, accumulate=k
            )
            for part in range(k):
                trainer.step({name: array[part::k] for name, array in feeds.items()})
            found.append(b"".join(array.tobytes() for array in trainer.weights().values()))
        assert len(set(found)) == 1


def test_a_split_batch_has_the_same_bits_where_sums_are_exact() -> None:
    split_batches("cpu")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_losses_may_come_late(monkeypatch: pytest.MonkeyPatch, accumulate: int) -> None:
    monkeypatch.setattr("onnx_fuse.training.backends.Portable", Ahead)
    late_losses("cpu", accumulate)


def test_fit_is_the_same_with_late_losses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arrays = {name: np.concatenate([batch(i)[name] for i in range(5)]) for name in batch()}
    histories = []
    for device in (Portable, Ahead):
        monkeypatch.setattr("onnx_fuse.training.backends.Portable", device)
        trainer = Trainer(text_model(LINEAR), loss="mse")
        seen: list[int] = []
        folder = tmp_path / device.__name__
        watch = Watch(lambda h, seen=seen: seen.append(len(h.losses)))
        stored = {"folder": folder, "every": 2}
        history = fit.fit(trainer, arrays, epochs=2, batch_size=8, callbacks=[watch], **stored)
        histories.append(history)
        assert sorted(set(seen)) == list(range(1, 11))
        assert Trainer.resume(folder, text_model(LINEAR)).calls == 10
    assert histories[0] == histories[1]
    assert all(type(loss) is float for loss in histories[1].losses)


def test_gpt_learns_the_standard_library() -> None:
    """Each quarter of the steps is better than the one before; tools/text_data.py goes on
    to 1.9 nats a byte."""
    arrays = text_data.windows(64, ("argparse",))
    trainer = Trainer(gpt.build(gpt.Config()), loss="cross_entropy", optimizer=optim.AdamW(lr=3e-3))
    history = fit.fit(trainer, {k: a[:640] for k, a in arrays.items()}, epochs=1, batch_size=8)
    quarters = np.array(history.losses).reshape(4, 20).mean(1)
    assert np.all(np.diff(quarters) < -0.02), quarters
    assert quarters[-1] < 2.75


# ---- against PyTorch ---------------------------------------------------------------------------

CURVES: dict[str, list[float]] = json.loads((DATA / "pytorch_curves.json").read_text())["curves"]


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("name", CURVES)
def test_curve_is_pytorchs(name: str, level: int) -> None:
    """50 losses, step by step, within 1e-4; the batches change in size."""
    model, optimizer = name.split()
    kind, options = pytorch_curves.OPTIMIZERS[optimizer]
    built, loss = pytorch_curves.MODELS[model](), pytorch_curves.LOSSES[model]
    trainer = Trainer(built, loss=loss, optimizer=getattr(optim, kind)(**options), level=level)
    losses = [
        trainer.step(pytorch_curves.batch(model, step)) for step in range(pytorch_curves.STEPS)
    ]
    np.testing.assert_allclose(losses, CURVES[name], rtol=0, atol=1e-4)
    assert losses[-1] < 0.9 * losses[0]

"""Quantization-aware training: the Trainer on files with QuantizeLinear and DequantizeLinear."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from lowering import interpreted, with_values
from support import answers, assert_near, stock

from onnx_fuse import Trainer, optim
from onnx_fuse.cli import run_command
from onnx_fuse.errors import CheckFailed
from onnx_fuse.ir.build import add_initializer, text_model

NET = """g (float[N,4] x) => (float[N,3] y) <float xs = {0.05}, int8 xz = {3}, int8[3] wz = {0,0,0},
  float[3] b = {0.1, 0.2, 0.3}> {
  qx = QuantizeLinear (x, xs, xz) dx = DequantizeLinear (qx, xs, xz)
  WEIGHT p = MatMul (dx, dw) y = Add (p, b) }"""
FLOATS = "qw = QuantizeLinear <axis = 1> (w, ws, wz) dw = DequantizeLinear <axis = 1> (qw, ws, wz)"
RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 4)).astype(np.float32)
FEEDS = {"x": X, "labels": X @ RNG.standard_normal((4, 3)).astype(np.float32)}


def net(weight: str = FLOATS) -> ir.Model:
    model = text_model(NET.replace("WEIGHT", weight))
    w = np.random.default_rng(1).uniform(-1, 1, (4, 3)).astype(np.float32)
    fill(model, {"w": w, "ws": (np.abs(w).max(0) / 100).astype(np.float32)})
    return model


def fill(model: ir.Model, arrays: dict[str, np.ndarray]) -> None:
    """Make initializers of values that the text of a model names, and does not make."""
    for name, array in arrays.items():
        value = add_initializer(model.graph, f"{name}.", array)
        for node in model.graph:
            for i, read in enumerate(node.inputs):
                if read is not None and read.name == name:
                    node.replace_input_with(i, value)
        value.name = name


def test_weights_behind_quantize_linear_train(tmp_path) -> None:
    trainer = Trainer(net(), loss="mse", optimizer=optim.AdamW(lr=0.01))
    losses = [trainer.step(FEEDS) for _ in range(30)]
    assert losses[-1] < losses[0] / 1.5
    assert not trainer.notes
    assert sorted(trainer.weights()) == ["b", "w"]  # a scale only where it is named
    trainer.save(tmp_path / "tuned.onnx")
    saved = onnx.load(tmp_path / "tuned.onnx")
    kinds = [node.op_type for node in saved.graph.node]
    assert kinds.count("QuantizeLinear") == kinds.count("DequantizeLinear") == 2
    found = answers(stock(saved), {"x": X})["y"]
    np.testing.assert_allclose(found, trainer.evaluate(FEEDS).outputs["y"], atol=1e-5)


def test_a_named_scale_trains() -> None:
    trainer = Trainer(net(), loss="mse", trainable=["w", "ws"], optimizer=optim.SGD(lr=1e-4))
    before = trainer.weights()["ws"]
    trainer.step(FEEDS)
    assert sorted(trainer.weights()) == ["w", "ws"]
    assert (trainer.weights()["ws"] != before).all()


STORED = {
    "int8 by columns": ("dw = DequantizeLinear <axis = 1> (w, ws, wz)", "INT8", (3,), 1, 0),
    "uint8 by rows": ("dw = DequantizeLinear <axis = 0> (w, ws)", "UINT8", (4,), 0, 0),
    "int4 in blocks": (
        "dw = DequantizeLinear <axis = 0, block_size = 2> (w, ws)", "INT4", (2, 3), 0, 2),
    "int16": ("dw = DequantizeLinear (w, ws)", "INT16", (), 1, 0),
    "float8": ("dw = DequantizeLinear (w, ws)", "FLOAT8E4M3FN", (), 1, 0),
}  # fmt: skip


def stored_net(name: str) -> ir.Model:
    """A net whose weight is stored as codes, and whose bias is int32 behind DequantizeLinear."""
    text, kind, scales, _, _ = STORED[name]
    text = NET.replace("WEIGHT", text).replace("(p, b)", "(p, db)")
    text = text.replace(
        "float[3] b = {0.1, 0.2, 0.3}", "float bs = {0.001}, int32[3] b = {90,200,300}"
    )
    model = text_model(text.replace("y = Add", "db = DequantizeLinear (b, bs) y = Add"))
    rng, dtype = np.random.default_rng(2), ir.DataType[kind]
    low, high = max(float(dtype.min), -300), min(float(dtype.max), 300)
    codes = rng.uniform(low, high, (4, 3)).astype(dtype.numpy())
    scale = rng.uniform(0.8, 1, scales) / high
    fill(model, {"w": codes, "ws": np.float32(scale)})
    return model


@pytest.mark.parametrize("name", STORED)
def test_weights_stored_as_integers_train(name: str, tmp_path) -> None:
    model = stored_net(name)
    trainer = Trainer(model, loss="mse", optimizer=optim.AdamW(lr=0.02))
    assert any("'w' and 1 other" in note for note in trainer.notes)
    losses = [trainer.step(FEEDS) for _ in range(20)]
    assert losses[-1] < losses[0] / 1.3
    assert trainer.weights()["w"].dtype == trainer.weights()["b"].dtype == np.float32
    trainer.save(tmp_path / "tuned.onnx")
    saved = ir.load(tmp_path / "tuned.onnx")
    for value in model.graph.initializers.values():
        written = saved.graph.initializers[value.name]
        assert written.dtype == value.dtype
        changed = (written.const_value.numpy() != value.const_value.numpy()).any()
        assert changed == (value.name in ("w", "b"))
    found = answers(stock(saved), {"x": X})["y"]
    expected = trainer.evaluate(FEEDS).outputs["y"]
    np.testing.assert_allclose(found, expected, atol=1e-3)  # the bias is rounded at the end


@pytest.mark.parametrize("name", STORED)
def test_a_loss_that_is_infinite_is_traced_through_stored_weights(name: str) -> None:
    trainer = Trainer(stored_net(name), loss="mse", frozen=["w"])
    with pytest.raises(CheckFailed, match=r"inf; '.*', the result of the \w+ node .* is the"):
        trainer.step(FEEDS | {"labels": np.full_like(FEEDS["labels"], 1e38)})


def test_what_does_not_train_keeps_its_integers(tmp_path) -> None:
    model = stored_net("int8 by columns")
    trainer = Trainer(model, loss="mse", frozen=["w"])
    assert sorted(trainer.weights()) == ["b"]
    trainer.step(FEEDS)
    trainer.save(tmp_path / "tuned.onnx")
    saved = ir.load(tmp_path / "tuned.onnx").graph.initializers
    expected = model.graph.initializers["w"].const_value.numpy()
    np.testing.assert_array_equal(saved["w"].const_value.numpy(), expected)


def test_scales_are_no_weights_that_the_file_shares(tmp_path) -> None:
    """Both nodes of a pair read the scale, which untie= must not split; a bias's may be frozen."""
    model = stored_net("int8 by columns")
    scale = np.full(3, 0.01, np.float32)
    model.graph.initializers["ws"].const_value = ir.tensor(scale, name="ws")
    bias_scale = add_initializer(model.graph, "bs.", np.full(3, 1e-3, np.float32))
    node = next(n for n in model.graph if n.inputs[0] is not None and n.inputs[0].name == "b")
    node.replace_input_with(1, bias_scale)
    node.attributes["axis"] = ir.AttrInt64("axis", 0)
    trainer = Trainer(model, loss="mse", untie=True, frozen=["ws"])
    assert len(trainer.notes) == 1
    assert "stored as integers" in trainer.notes[0]
    trainer.step(FEEDS)
    trainer.save(tmp_path / "tuned.onnx")
    saved = ir.load(tmp_path / "tuned.onnx")
    assert list(saved.graph.initializers) == list(model.graph.initializers)
    np.testing.assert_array_equal(saved.graph.initializers["ws"].const_value.numpy(), scale)


def test_codes_are_those_of_float32_in_half_precision(tmp_path) -> None:
    trainer = Trainer(stored_net("int8 by columns"), loss="mse", precision="fp16")
    for _ in range(3):
        trainer.step(FEEDS)
    trainer.save(tmp_path / "tuned.onnx")
    found = answers(stock(ir.load(tmp_path / "tuned.onnx")), {"x": X})["y"]
    np.testing.assert_allclose(found, trainer.evaluate(FEEDS).outputs["y"], rtol=3e-3, atol=3e-3)


@pytest.mark.parametrize("name", STORED)
def test_a_step_is_a_program_of_kernels(name: str) -> None:
    trainer = Trainer(stored_net(name), loss="mse", optimizer=optim.SGD(lr=0.01))
    step, feeds = trainer.step_graph(FEEDS)
    assert not with_values(step, feeds).fallbacks
    assert_near(interpreted(step, feeds), answers(stock(step), feeds), rtol=1e-5, atol=1e-5)


def test_the_file_that_train_writes_is_compared_as_it_is_written(tmp_path) -> None:
    """onnxruntime makes MatMulNBits of 8-bit weights, which rounds what they multiply."""
    model = text_model("""g (float[N,8] x) => (float[N,4] y) <float s = {0.1}, int8 z = {0}> {
      q = QuantizeLinear (w, s, z) d = DequantizeLinear (q, s, z) y = MatMul (x, d) }""")
    fill(model, {"w": 3 * RNG.standard_normal((8, 4)).astype(np.float32)})
    paths = [str(tmp_path / name) for name in ("model.onnx", "data.npz", "tuned.onnx")]
    ir.save(model, paths[0])
    x = RNG.standard_normal((32, 8)).astype(np.float32)
    np.savez(paths[1], x=x, labels=x[:, :4])
    command = ["train", paths[0], "--data", paths[1], "--loss", "mse", "-o", paths[2]]
    assert run_command(command) == 0

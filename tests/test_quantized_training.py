"""Quantization-aware training: the Trainer on files with QuantizeLinear and DequantizeLinear."""

import numpy as np
import onnx
import onnx_ir as ir
from support import answers, stock

from onnx_fuse import Trainer, optim
from onnx_fuse.ir.build import text_model
from onnx_fuse.ops.rules import add_initializer

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
    arrays = {"w": w, "ws": (np.abs(w).max(0) / 100).astype(np.float32)}
    for name, array in arrays.items():
        value = add_initializer(model.graph, f"{name}.", array)
        for node in model.graph:
            for i, read in enumerate(node.inputs):
                if read is not None and read.name == name:
                    node.replace_input_with(i, value)
        value.name = name
    return model


def stored(path) -> dict[str, np.ndarray]:
    model = onnx.load(path)
    return {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}


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

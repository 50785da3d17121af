"""A step of a small convolutional network on the GPU, against the same step in float32."""

import numpy as np
import pytest
from support import normal
from window_gradients import network

import onnx_fuse
from onnx_fuse import optim
from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime.executable import Executable

# Of the change of a weight, as a part of its norm. Rounding x and the weights to bfloat16 alone
# moves maxima and masks, so that some changes differ by 0.11.
ALLOWED = {"bf16": 0.4, "fp16": 0.08, "fp32": 1e-3}


@pytest.mark.parametrize("precision", ALLOWED)
def test_a_step_changes_the_weights_as_in_float32(precision: str) -> None:
    feeds = normal({"x": (4, 3, 32, 32), "labels": (4, 32)}, seed=1)
    found = []
    for device, kind in (("cpu", "fp32"), ("cuda", precision), ("cuda", precision)):
        trainer = onnx_fuse.Trainer(
            network(), loss="mse", optimizer=optim.SGD(lr=1.0), device=device, precision=kind
        )
        before = {name: w.copy() for name, w in trainer.weights().items()}
        trainer.step(feeds)
        found.append({name: w - before[name] for name, w in trainer.weights().items()})
    truth, ours, again = found
    for name, change in truth.items():
        assert ours[name].tobytes() == again[name].tobytes(), name
        error = np.linalg.norm(ours[name] - change) / max(np.linalg.norm(change), 1e-12)
        assert error <= ALLOWED[precision], (name, error)


def test_images_may_be_on_the_gpu() -> None:
    x = np.random.default_rng(1).standard_normal((4, 3, 32, 32)).astype(np.float32)
    labels = np.arange(4) % 2
    turned = text_model("agraph (float[4,3,32,32] x) => (float[4,3,32,32] y) { y = Neg(x) }")
    (there,) = Executable(turned).run(None, {"x": -x}, on_device=True)
    losses = []
    for feeds in ({"x": x, "labels": labels}, {"x": there, "labels": labels}):
        trainer = onnx_fuse.Trainer(network(), loss="cross_entropy", device="cuda")
        losses.append([float(trainer.step(feeds)) for _ in range(5)])
    assert losses[0] == losses[1]

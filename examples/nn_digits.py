"""A perceptron that reads scikit-learn's handwritten digits, eagerly and captured.

    python examples/nn_digits.py

The eager loop runs operator by operator. `capture` makes one graph of the whole training step
(forward, backward and update), which is fused and replayed; the losses are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from sklearn.datasets import load_digits

import onnx_fuse as of
from onnx_fuse import nn
from onnx_fuse.nn import functional as F


def train(captured: bool, steps: int = 120) -> tuple[nn.Module, list[float], float]:
    """Train for some steps; returns the network, the losses, and the share of digits it knows."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    nn.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )
    optimizer = nn.optim.AdamW(model, lr=3e-3)

    def step(x: nn.Tensor, y: nn.Tensor) -> nn.Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run: Callable[..., nn.Tensor] = of.capture(step) if captured else step
    losses = []
    for i in range(steps):
        rows = np.arange(i * 64, i * 64 + 64) % 1500
        losses.append(run(nn.tensor(images[rows]), nn.tensor(labels[rows])).item())
    with nn.no_grad():
        found = model(nn.tensor(images[1500:])).argmax(1)
    return model, losses, float((found.numpy() == labels[1500:]).mean())


if __name__ == "__main__":
    for captured in (False, True):
        model, losses, share = train(captured)
        name = "captured" if captured else "eager"
        print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {share:.1%} of new digits known")
    model.export("digits.onnx", [nn.tensor(np.zeros((1, 64), np.float32))])
    print("digits.onnx runs on any ONNX runtime")

"""Fine-tune an imported ONNX file with a loss that is written in Python, and save it as ONNX.

    python examples/nn_custom_loss.py

The file is made here; any .onnx file will do. The loss pulls the answers of a class together and
keeps others apart, which no loss by name does.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from sklearn.datasets import load_digits

from onnx_fuse import nn
from onnx_fuse.nn import functional as F


def contrastive(answers: nn.Tensor, labels: nn.Tensor, margin: float = 1.0) -> nn.Tensor:
    """d² of pairs of one class, (margin - d)² of other pairs that are nearer than the margin."""
    squares = (answers * answers).sum(1)
    distances = squares.unsqueeze(1) + squares.unsqueeze(0) - 2 * (answers @ answers.T)
    distances = distances.clamp(min=1e-6)
    same = labels.unsqueeze(1) == labels.unsqueeze(0)
    apart = (margin - distances.sqrt()).relu()
    return F.where(same, distances, apart * apart).mean()


def tune(path: Path, steps: int = 60) -> tuple[nn.ImportedModule, list[float]]:
    """Train the file's weights by the loss; returns the module and the losses."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    model = nn.from_onnx(path)
    optimizer = nn.optim.Adam(model, lr=2e-3)
    losses = []
    for i in range(steps):
        rows = np.arange(i * 32, i * 32 + 32) % 1500
        loss = contrastive(model(nn.tensor(images[rows])), nn.tensor(labels[rows]))
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def made_file(path: Path) -> Path:
    """Write a small network as an ONNX file."""
    nn.manual_seed(1)
    network = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 2))
    network.export(path, [nn.tensor(np.zeros((1, 64), np.float32))])
    return path


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        model, losses = tune(made_file(Path(folder) / "network.onnx"))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    model.export("tuned.onnx", [nn.tensor(np.zeros((1, 64), np.float32))])

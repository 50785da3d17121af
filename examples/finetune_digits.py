"""Train a network on scikit-learn's handwritten digits: `python examples/finetune_digits.py`.

The network is an ONNX file with random weights (`models/mlp.py --size digits`). The script trains
it in about five seconds on two cores, prints the accuracy on held-out digits after each epoch, and
writes `digits.tuned.onnx`, which stock onnxruntime runs.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np

import onnx_fuse as of

HERE = Path(__file__).parent
EPOCHS, BATCH = 6, 32


def network(path: Path) -> Path:
    """Write the network with random weights, and return its path."""
    script = HERE.parent / "models" / "mlp.py"
    sys.path.insert(0, str(script.parent))
    arguments, sys.argv = sys.argv, [str(script), "--size", "digits", "-o", str(path)]
    runpy.run_path(str(script), run_name="__main__")
    sys.argv = arguments
    return path


def main() -> None:
    runpy.run_path(str(HERE / "digits_data.py"), run_name="__main__")
    train, test = np.load("digits_train.npz"), np.load("digits_test.npz")
    x, labels = train["x"], train["labels"]
    steps = EPOCHS * (len(x) // BATCH)
    trainer = of.Trainer(
        network(Path("digits.onnx")),
        loss="cross_entropy",
        optimizer=of.optim.AdamW(lr=of.optim.cosine(3e-3, steps, warmup=20)),
    )
    order = np.random.default_rng(0)
    for epoch in range(EPOCHS):
        rows = order.permutation(len(x))
        for i in range(0, len(x) - BATCH + 1, BATCH):
            batch = rows[i : i + BATCH]
            loss = trainer.step({"x": x[batch], "labels": labels[batch]})
        found = trainer.evaluate({"x": test["x"], "labels": test["labels"]})
        hits = (found.outputs["logits"].argmax(1) == test["labels"]).mean()
        print(f"epoch {epoch + 1}: loss {loss:.3f}, held-out loss {found.loss:.3f}, {hits:.1%}")
    trainer.save("digits.tuned.onnx")
    print("wrote digits.tuned.onnx")


if __name__ == "__main__":
    main()

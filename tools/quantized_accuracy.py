"""What int8, float8 and 4-bit weights cost on three small tasks, and what training gives back.

    python tools/quantized_accuracy.py [--only digits classifier gpt] [--steps 200] [--json FILE]

Trains a convolutional network on scikit-learn's digits, a classifier of texts (an encoder that
tells from which of three modules of Python's standard library 64 bytes are) and a small GPT on
bytes of that library, all on the CPU. Each is quantized on 256 rows of its training data, and
trained for more steps as the quantized file that it is then. Prints the metric on rows that were
held out: the accuracy, and for the GPT nats a byte. Takes about six minutes.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
import convnet
import encoder
import gpt
import numpy as np
import onnx_ir as ir
from sklearn.datasets import load_digits
from text_data import windows

from onnx_fuse import Trainer, optim, quantize
from onnx_fuse.importer.load import read

KINDS = ("int8", "fp8", "int4-weights")
CLASSES = ("ipaddress", "tarfile", "typing")
"""The modules that the classifier tells apart."""
CALIBRATION = 256
"""Rows of the training data that ranges and errors are taken of."""
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """A network to train, and its data."""

    model: ir.Model
    data: Arrays
    steps: int
    batch: int
    lr: float
    metric: str

    def rows(self, held_out: bool) -> Arrays:
        """The rows that are trained with, or each fifth, which is not."""
        chosen = (np.arange(len(self.data["labels"])) % 5 == 0) == held_out
        return {name: array[chosen] for name, array in self.data.items()}

    def batches(self, steps: int, seed: int) -> Iterator[Arrays]:
        """Random rows for each step."""
        rows, rng = self.rows(held_out=False), np.random.default_rng(seed)
        for _ in range(steps):
            chosen = rng.choice(len(rows["labels"]), self.batch, replace=False)
            yield {name: array[chosen] for name, array in rows.items()}

    def trained(self, model: Any, steps: int, lr: float, seed: int) -> Any:
        """The model after steps of AdamW, whose rate falls to 0 as a cosine."""
        trainer = Trainer(model, loss="cross_entropy", optimizer=optim.AdamW(lr=lr), device="cpu")
        for i, batch in enumerate(self.batches(steps, seed)):
            trainer.lr = lr * (1 + np.cos(np.pi * i / steps)) / 2
            trainer.step(batch)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trained.onnx"
            trainer.save(path)
            return read(path)

    def measure(self, model: Any) -> float:
        """The metric on the rows that were held out."""
        rows, size = self.rows(held_out=True), 64
        trainer = Trainer(model, loss="cross_entropy", device="cpu")
        found, count = 0.0, len(rows["labels"]) // size * size
        for first in range(0, count, size):
            result = trainer.evaluate({k: a[first : first + size] for k, a in rows.items()})
            share = result.hits / result.counted if self.metric == "accuracy" else result.loss
            found += share * size / count
        return float(found)


def digits() -> Task:
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    model = convnet.build(convnet.Config(channels=1, stages=2))
    data = {"x": images, "labels": labels.astype(np.int64)}
    return Task(model, data, 400, 64, 3e-3, "accuracy")


def classifier() -> Task:
    parts = [windows(64, (name,))["input_ids"] for name in CLASSES]
    ids = np.concatenate(parts)
    labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    order = np.random.default_rng(0).permutation(len(ids))
    data = {"input_ids": ids[order], "attention_mask": np.ones_like(ids),
            "token_type_ids": np.zeros_like(ids), "labels": labels[order]}  # fmt: skip
    config = encoder.Config(2, 4, 64, 256, 64, classes=len(CLASSES))
    return Task(encoder.build(config), data, 800, 32, 2e-3, "accuracy")


def language() -> Task:
    config = gpt.Config(layers=2, heads=4, width=64, context=64)
    return Task(gpt.build(config), windows(64), 800, 16, 4e-3, "nats")


TASKS = {"digits": digits, "classifier": classifier, "gpt": language}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--steps", type=int, default=200, help="of the quantized files' training")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    records = []
    print(f"{'':12} {'metric':9} {'float':>7}" + "".join(f"{k:>14} {'trained':>8}" for k in KINDS))
    for name in options.only:
        start, task = time.perf_counter(), TASKS[name]()
        model = task.trained(task.model, task.steps, task.lr, seed=0)
        calibration = {k: a[:CALIBRATION] for k, a in task.rows(held_out=False).items()}
        record = {"task": name, "metric": task.metric, "float": task.measure(model)}
        for kind in KINDS:
            found = quantize(model, to=kind, calibrate=calibration, ends=kind == "int4-weights")
            trained = task.trained(found.model, options.steps, task.lr / 10, seed=1)
            record[kind] = [task.measure(found.model), task.measure(trained)]
        record["seconds"] = time.perf_counter() - start
        records.append(record)
        cells = "".join(f"{record[k][0]:14.4f} {record[k][1]:8.4f}" for k in KINDS)
        print(f"{name:12} {task.metric:9} {record['float']:7.4f}{cells}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()

"""Bytes of Python's own standard library as training data for models/gpt.py.

    python models/gpt.py -o gpt.onnx
    python tools/text_data.py -o text
    onnx-fuse train gpt.onnx --data text/train.npz --val text/test.npz --loss cross_entropy \\
        --optimizer adamw --lr 4e-3 --schedule cosine --warmup 50 --batch-size 16 --epochs 2

Writes train.npz and test.npz: input_ids and labels, both [examples, length] int64, the labels one
byte ahead. Every tenth window is held out.
"""

import argparse
import importlib.util
from pathlib import Path

import numpy as np

MODULES = ("argparse", "inspect", "typing", "tarfile", "difflib", "doctest", "ipaddress")


def windows(length: int, modules: tuple[str, ...] = MODULES) -> dict[str, np.ndarray]:
    """The sources end to end, cut into windows of `length` bytes and their successors."""
    specs = [importlib.util.find_spec(name) for name in modules]
    text = b"".join(Path(spec.origin).read_bytes() for spec in specs if spec and spec.origin)
    data = np.frombuffer(text, np.uint8).astype(np.int64)
    count = (len(data) - 1) // length
    inputs, labels = (data[i : i + count * length].reshape(count, length) for i in (0, 1))
    return {"input_ids": inputs, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", required=True, type=Path, help="folder to write to")
    parser.add_argument("--length", type=int, default=128, help="bytes a window")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    arrays = windows(options.length)
    held = np.arange(len(arrays["labels"])) % 10 == 9
    for name, rows in (("train", ~held), ("test", held)):
        np.savez(options.output / f"{name}.npz", **{k: a[rows] for k, a in arrays.items()})
        print(f"{name}.npz: {rows.sum():,} windows of {options.length} bytes")


if __name__ == "__main__":
    main()

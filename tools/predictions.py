"""Predicted and measured time of each kernel call over 20 us of whole models, on one GPU.

    python tools/predictions.py [--models gpt2 bert ...] [--least 20] [--worst 10]

The predictions are those that `--explain` and `--target` print. A call is measured by itself, in a
CUDA graph of twenty runs, so the L2 is warm. For each model: how many calls are within 1.5 of their
time, the sums, and the worst calls.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encoder
import gpt
import numpy as np

from onnx_fuse import InferenceSession, Trainer, optim
from onnx_fuse.kernels import site
from onnx_fuse.program.problem import Hardware
from onnx_fuse.runtime.instance import Instance

WITHIN = 1.5


def gpt2() -> Instance:
    """A training step of GPT-2 124M in bf16, 16 x 1024 tokens."""
    ids = np.random.default_rng(0).integers(0, 50257, (16, 1025))
    trainer = Trainer(
        gpt.build(gpt.SIZES["gpt2-small"]),
        loss="cross_entropy",
        optimizer=optim.AdamW(),
        device="cuda",
        precision="bf16",
    )
    return _step(trainer, {"input_ids": ids[:, :-1].copy(), "labels": ids[:, 1:].copy()})


def _step(trainer: Trainer, feeds: dict[str, Any]) -> Instance:
    trainer.step(feeds)
    (instance,) = trainer._device._states._executables["update"].instances()
    return instance


def bert(batch: int = 32, tokens: int = 128) -> Instance:
    """A run of BERT-base in fp16."""
    c = encoder.SIZES["bert-base"]
    feeds = {n: np.zeros((batch, tokens), np.int64) for n in ("input_ids", "token_type_ids")}
    feeds["input_ids"] = np.random.default_rng(0).integers(0, c.vocab, (batch, tokens))
    feeds["attention_mask"] = np.ones((batch, tokens), np.int64)
    session = InferenceSession(encoder.build(c), device="cuda", precision="fp16")
    session.run(None, feeds)
    return session._on_cuda().instance(feeds)


def vision(module: str, size: str, batch: int) -> Instance:
    """A run of a vision model of models/ in fp16."""
    builder = importlib.import_module(module)
    session = InferenceSession(builder.build(builder.SIZES[size]), device="cuda", precision="fp16")
    (given,) = session.get_inputs()
    images = np.random.default_rng(0).standard_normal((batch, 3, 224, 224), dtype=np.float32)
    session.run(None, {given.name: images})
    return session._on_cuda().instance({given.name: images})


MODELS: dict[str, Callable[[], Instance]] = {
    "gpt2": gpt2,
    "bert": bert,
    "resnet50": lambda: vision("resnet", "resnet50", 32),
    "convnext": lambda: vision("convnext", "convnext-tiny", 16),
    "efficientnet": lambda: vision("efficientnet", "efficientnet-b0", 32),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--least", type=float, default=20, help="us of the calls that count")
    parser.add_argument("--worst", type=int, default=10, help="calls listed")
    args = parser.parse_args()
    hw = Hardware.detect(0)
    for name in args.models:
        found = [(call, site(call, hw).seconds * 1e6, s * 1e6)
                 for call, s in MODELS[name]().profile()]  # fmt: skip
        large = [row for row in found if max(row[1:]) > args.least]
        off = {id(call): max(a / b, b / a) for call, a, b in large}
        good = sum(ratio <= WITHIN for ratio in off.values())
        sums = [sum(row[i] for row in found) for i in (1, 2)]
        print(f"{name}: {good} of {len(large)} calls over {args.least:g} us within {WITHIN}; "
              f"{sums[0]:,.0f} us predicted, {sums[1]:,.0f} measured")  # fmt: skip
        for call, a, b in sorted(large, key=lambda row: -off[id(row[0])])[: args.worst]:
            print(f"  {b:9.1f} us, predicted {a:9.1f} ({b / a:5.2f})  {call.kernel[:40]}  "
                  f"{call.problem} {call.why}"[:200])  # fmt: skip


if __name__ == "__main__":
    main()

"""Losses of a small GPT on text in fp32, tf32 and bf16 (or fp8), beside PyTorch's autocast.

    python tools/precision_curves.py [--steps 500] [--seeds 8] [--arms ARM ...] [--json FILE]

models/gpt.py with two blocks of width 256, trained with AdamW on Python's standard library
(tools/text_data.py) from the same weights and on the same batches in every arm, for several seeds
of both. PyTorch's arms (needs torch) are the function of tools/pytorch_curves.py, in fp32 and under
autocast to bfloat16. Prints each arm's loss, the mean over the last 50 steps, and how far it is
from our fp32 for each seed: one seed alone tells little, two precisions of it end up to 0.03 apart.
The command fails (exit code 1) if an arm of ours ends more than 0.01 nats from fp32 in the mean;
fp8, which takes another path from the first steps on, is only shown.
"""

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
import gpt
import numpy as np
from pytorch_curves import forward
from text_data import windows

from onnx_fuse import Trainer, optim

CONFIG = gpt.Config(layers=2, heads=2, width=256)
BATCH, LR, DECAY = 32, 1e-3, 0.1
LIMIT = 0.01
"""Nats by which the mean loss of the last 50 steps may differ: a tenth of what a seed changes."""


def batches(steps: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Random windows of CONFIG.context bytes, the same in every arm."""
    text, rng = windows(CONFIG.context), np.random.default_rng(seed)
    chosen = (rng.choice(len(text["labels"]), BATCH, replace=False) for _ in range(steps))
    return [{name: array[rows] for name, array in text.items()} for rows in chosen]


def ours(precision: str, seed: int, data: list[dict[str, np.ndarray]]) -> list[float]:
    """The losses of Trainer's steps in this precision."""
    trainer = Trainer(
        gpt.build(CONFIG, seed),
        loss="cross_entropy",
        optimizer=optim.AdamW(lr=LR, weight_decay=DECAY),
        device="cuda",
        precision=precision,
    )
    return [float(loss) for loss in [trainer.step(feeds) for feeds in data]]


def peer(half: bool, seed: int, data: list[dict[str, np.ndarray]]) -> list[float]:
    """The losses of PyTorch's network, under autocast to bfloat16 where `half`."""
    import torch

    initial = gpt.build(CONFIG, seed).graph.initializers
    weights: dict[str, Any] = {
        name: torch.tensor(np.array(value.const_value.numpy()), device="cuda", requires_grad=True)
        for name, value in initial.items()
        if not name.startswith("const.") and value.const_value is not None
    }
    update = torch.optim.AdamW(weights.values(), lr=LR, weight_decay=DECAY, fused=True)
    loss_of, losses = forward("gpt"), []
    for feeds in data:
        update.zero_grad()
        given = {name: torch.tensor(array, device="cuda") for name, array in feeds.items()}
        cast = torch.autocast("cuda", torch.bfloat16) if half else contextlib.nullcontext()
        with torch.device("cuda"), cast:
            loss = loss_of(weights, given)
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--arms", nargs="+", default=["fp32", "tf32", "bf16"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    arms: dict[str, Callable[[int, list[dict[str, np.ndarray]]], list[float]]] = {
        f"onnx_fuse {name}": partial(ours, name) for name in args.arms
    }
    if importlib.util.find_spec("torch") is not None:
        arms |= {"torch fp32": partial(peer, False), "torch autocast bf16": partial(peer, True)}
    data = [batches(args.steps, seed) for seed in range(args.seeds)]
    curves: dict[str, list[list[float]]] = {}
    ends: dict[str, np.ndarray] = {}
    for name, arm in arms.items():
        curves[name] = [arm(seed, each) for seed, each in enumerate(data)]
        ends[name] = np.mean(np.array(curves[name])[:, -50:], axis=1)
        apart = ends[name] - next(iter(ends.values()))
        print(f"{name:20} {ends[name].mean():.4f} ({apart.mean():+.4f}: "
              f"{', '.join(f'{x:+.4f}' for x in apart)})", flush=True)  # fmt: skip
        if args.json:
            args.json.write_text(json.dumps(curves) + "\n")
    base = next(iter(ends.values()))
    held = (name for name in ends if "fuse" in name and "fp8" not in name)
    return int(any(abs((ends[name] - base).mean()) > LIMIT for name in held))


if __name__ == "__main__":
    sys.exit(main())

"""Losses of a small GPT on text in fp32, tf32 and bf16, beside PyTorch's autocast, on one GPU.

    python tools/precision_curves.py [--steps 500] [--json FILE]

models/gpt.py with two blocks of width 256, trained with AdamW on Python's standard library
(tools/text_data.py) from the same weights and on the same batches in every arm. PyTorch's arms
(needs torch) are the function of tools/pytorch_curves.py, in fp32 and under autocast to bfloat16.
Prints each arm's loss, the mean over the last 50 steps, and how far it is from our fp32. The
command fails (exit code 1) if an arm of ours ends more than 0.01 nats from fp32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import gpt
import numpy as np
from pytorch_curves import forward
from text_data import windows

from onnx_fuse import Trainer, optim

CONFIG = gpt.Config(layers=2, heads=2, width=256)
BATCH, LR, DECAY = 32, 1e-3, 0.1
LIMIT = 0.01
"""Nats by which the mean loss of the last 50 steps may differ: a tenth of what a seed changes."""


def batches(steps: int) -> list[dict[str, np.ndarray]]:
    """Random windows of CONFIG.context bytes, the same in every arm."""
    text, rng = windows(CONFIG.context), np.random.default_rng(0)
    chosen = (rng.choice(len(text["labels"]), BATCH, replace=False) for _ in range(steps))
    return [{name: array[rows] for name, array in text.items()} for rows in chosen]


def ours(precision: str, data: list[dict[str, np.ndarray]]) -> list[float]:
    """The losses of Trainer's steps in this precision."""
    update = optim.AdamW(lr=LR, weight_decay=DECAY)
    trainer = Trainer(
        gpt.build(CONFIG),
        loss="cross_entropy",
        optimizer=update,
        device="cuda",
        precision=precision,
    )
    return [float(trainer.step(feeds)) for feeds in data]


def peer(half: bool, data: list[dict[str, np.ndarray]]) -> list[float]:
    """The losses of PyTorch's network, under autocast to bfloat16 where `half`."""
    import torch

    initial = gpt.build(CONFIG).graph.initializers
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
    parser.add_argument("--precisions", nargs="+", default=["fp32", "tf32", "bf16"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    data = batches(args.steps)
    curves = {f"onnx_fuse {name}": ours(name, data) for name in args.precisions}
    with contextlib.suppress(ModuleNotFoundError):
        curves["torch fp32"] = peer(False, data)
        curves["torch autocast bf16"] = peer(True, data)
    ends = {name: float(np.mean(losses[-50:])) for name, losses in curves.items()}
    base = ends[next(iter(ends))]
    for name, losses in curves.items():
        shown = f"{losses[0]:.4f} -> {ends[name]:.4f} ({ends[name] - base:+.4f})"
        print(f"{name:20} {shown}, largest difference of a step "
              f"{np.abs(np.subtract(losses, curves[next(iter(curves))])).max():.4f}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(curves) + "\n")
    return int(any(abs(end - base) > LIMIT for name, end in ends.items() if "fuse" in name))


if __name__ == "__main__":
    sys.exit(main())

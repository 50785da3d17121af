"""Loss curves of PyTorch on the CPU, for tests/test_train.py to compare with.

    pip install torch==2.13.0 onnx-ir
    python tools/pytorch_curves.py -o tests/data/pytorch_curves.json

Each curve is the losses of STEPS updates of one of models/, from the weights its builder draws, on
the batches of `batch`. The forward passes are written here in PyTorch's own functions.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
import encoder
import gpt
import mlp
import numpy as np

STEPS = 50
MODELS = {
    "mlp": lambda: mlp.build(mlp.SIZES["digits"]),
    "gpt": lambda: gpt.build(gpt.Config(width=32)),
    "encoder": lambda: encoder.build(encoder.SIZES["tiny"]),
}
LOSSES = {"mlp": "cross_entropy", "gpt": "cross_entropy", "encoder": "mse"}
# By the names and arguments that torch.optim and onnx_fuse.optim have in common.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "nesterov": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": ("Adam", {"lr": 1e-3, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"lr": 1e-3, "weight_decay": 0.1}),
    "adagrad": ("Adagrad", {"lr": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "nadam": ("NAdam", {"lr": 1e-3, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    "adafactor": ("Adafactor", {"lr": 0.01, "weight_decay": 0.1}),
    "muon": ("Muon", {"lr": 0.02, "weight_decay": 0.1}),
}
# Only these models: the others would say no more of an optimizer, and take seconds each.
MODELS_OF = {"rmsprop": ["mlp"], "nadam": ["mlp"], "adafactor": ["mlp"], "muon": ["mlp", "gpt"]}


def batch(model: str, step: int) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs and labels of a step: something that can be learnt, of changing size."""
    rng = np.random.Generator(np.random.PCG64([7, step]))
    rows = 16 if step % 2 else 12
    if model == "mlp":
        teacher = np.random.Generator(np.random.PCG64(8)).standard_normal((64, 10))
        x = rng.standard_normal((rows, 64)).astype(np.float32)
        return {"x": x, "labels": (x @ teacher).argmax(1)}
    length = 24 if step % 3 else 17
    start, stride = rng.integers(0, 64, (rows, 1)), rng.integers(1, 4, (rows, 1))
    ids = (start + stride * np.arange(length + 1)) % 64
    if model == "gpt":
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    table = np.random.Generator(np.random.PCG64(9)).standard_normal((64, 32)).astype(np.float32)
    ids = ids[:, :-1]
    mask = (np.arange(length) < rng.integers(length // 2, length + 1, (rows, 1))).astype(np.int64)
    zeros = np.zeros_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": zeros, "labels": table[ids]}


def forward(model: str) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    """The loss of (weights, batch), as a function of PyTorch tensors."""
    import torch
    import torch.nn.functional as F

    def norm(w: dict[str, Any], name: str, x: Any, epsilon: float) -> Any:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], epsilon)

    def linear(w: dict[str, Any], name: str, x: Any) -> Any:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def attend(q: Any, k: Any, v: Any, mask: Any, heads: int) -> Any:
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def mlp_loss(w: dict[str, Any], b: dict[str, Any]) -> Any:
        x = b["x"]
        for i in range(3):
            x, fc = norm(w, f"layers.{i}.norm", x, 1e-5), f"layers.{i}.fc"
            x = F.linear(x, w[f"{fc}.weight"], w[f"{fc}.bias"])
            x = F.gelu(x) if i < 2 else x
        return F.cross_entropy(x, b["labels"])

    def gpt_loss(w: dict[str, Any], b: dict[str, Any]) -> Any:
        ids = b["input_ids"]
        length = ids.shape[1]
        x = w["wte.weight"][ids] + w["wpe.weight"][:length]
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
        for i in range(2):
            block = f"blocks.{i}"
            h = linear(w, f"{block}.attn.qkv", norm(w, f"{block}.ln_1", x, 1e-5))
            x = x + linear(w, f"{block}.attn.proj", attend(*h.chunk(3, -1), mask, 2))
            h = linear(w, f"{block}.mlp.fc", norm(w, f"{block}.ln_2", x, 1e-5))
            x = x + linear(w, f"{block}.mlp.proj", F.gelu(h, approximate="tanh"))
        logits = norm(w, "ln_f", x, 1e-5) @ w["wte.weight"].T
        return F.cross_entropy(logits.flatten(0, 1), b["labels"].flatten())

    def encoder_loss(w: dict[str, Any], b: dict[str, Any]) -> Any:
        e, ids = "embeddings", b["input_ids"]
        x = w[f"{e}.word.weight"][ids] + w[f"{e}.token_type.weight"][b["token_type_ids"]]
        x = norm(w, f"{e}.norm", x + w[f"{e}.position.weight"][: ids.shape[1]], 1e-12)
        mask = (1 - b["attention_mask"][:, None, None].float()) * torch.finfo(torch.float32).min
        for i in range(2):
            layer = f"layers.{i}"
            q, k, v = (linear(w, f"{layer}.attn.{n}", x) for n in ("query", "key", "value"))
            h = linear(w, f"{layer}.attn.output", attend(q, k, v, mask, 2))
            x = norm(w, f"{layer}.attn_norm", x + h, 1e-12)
            h = linear(w, f"{layer}.mlp.down", F.gelu(linear(w, f"{layer}.mlp.up", x)))
            x = norm(w, f"{layer}.mlp_norm", x + h, 1e-12)
        return F.mse_loss(x, b["labels"])

    return {"mlp": mlp_loss, "gpt": gpt_loss, "encoder": encoder_loss}[model]


def curve(model: str, optimizer: str) -> list[float]:
    import torch

    weights = {
        name: torch.tensor(np.array(value.const_value.numpy()), requires_grad=True)
        for name, value in MODELS[model]().graph.initializers.items()
        if not name.startswith("const.") and not name.startswith("pooler.")
    }
    kind, options = OPTIMIZERS[optimizer]
    updated, rest = list(weights.values()), []
    if kind == "Muon":  # which leaves other weights than matrices to AdamW
        updated, rest = ([w for w in updated if (w.ndim == 2) == is_2d] for is_2d in (True, False))
        torch.Tensor.bfloat16 = torch.Tensor.float  # it would round the iterations to two digits
    updates = [getattr(torch.optim, kind)(updated, **options)]
    updates += [torch.optim.AdamW(rest, **options, eps=1e-7)] if rest else []
    loss_of, losses = forward(model), []
    for step in range(STEPS):
        for update in updates:
            update.zero_grad()
        loss = loss_of(weights, {k: torch.tensor(a) for k, a in batch(model, step).items()})
        loss.backward()
        for update in updates:
            update.step()
        losses.append(round(loss.item(), 7))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", required=True, type=Path)
    output = parser.parse_args().output
    import torch

    torch.set_num_threads(1)
    curves = {
        f"{m} {o}": curve(m, o) for m in MODELS for o in OPTIMIZERS if m in MODELS_OF.get(o, MODELS)
    }
    output.write_text(json.dumps({"torch": torch.__version__, "curves": curves}, indent=0) + "\n")
    for name, losses in curves.items():
        print(f"{name:20} {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()

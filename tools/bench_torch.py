"""Fused functions in PyTorch's training loops against torch.compile, on one GPU, in one run.

    python tools/bench_torch.py [--json FILE] [--quick]

Prints one table: LayerNorm+Linear forward and backward in bf16, against torch.compile of the two
modules; a training step of a GPT-2 block that `onnx_fuse.torch.fuse` has fused, against
torch.compile of the same block; the time that the host takes for a call of
`fused_layernorm_linear`, beyond that of F.linear; and an imported transformer's forward and
backward as an nn.Module, against `Trainer.step`'s. The arms are interleaved and the times are
medians, so that ratios hold from run to run. Needs torch.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import onnx_fuse as of

SHAPES = ((8192, 768, 3072), (8192, 4096, 4096))
GOALS = {"LayerNorm+Linear": 0.92, "GPT-2 block": 0.95, "imported module": 1.05}


class Block(nn.Module):
    """A block of GPT-2: 768 wide, 12 heads."""

    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act = nn.Linear(width, 4 * width), nn.GELU(approximate="tanh")
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        b, t, d = x.shape
        rows = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = rows.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(self.act(self.up(self.ln_2(x))))


def interleaved(arms: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of each arm on the GPU: medians over rounds in which all take turns."""
    for work in arms.values():
        for _ in range(5):
            work()
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, work in arms.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(2_000_000)  # the host is ahead of the GPU when it begins
            begin.record()
            for _ in range(5):
                work()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / 5)
    return {name: statistics.median(found) for name, found in times.items()}


def host_time(work: Callable[[], Any], calls: int = 200) -> float:
    """Microseconds that the host takes for a call; the GPU's queue never fills."""
    found = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        found.append(1e6 * (time.perf_counter() - began) / calls)
    return min(found)


def layer_norm_linear(m: int, k: int, n: int, rounds: int) -> dict[str, float]:
    pair = nn.Sequential(nn.LayerNorm(k), nn.Linear(k, n)).cuda().bfloat16()
    fused = of.torch.fuse(copy.deepcopy(pair))
    compiled = torch.compile(pair)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)

    def step(model: Any) -> Callable[[], Any]:
        given = [x, *model.parameters()]
        return lambda: torch.autograd.grad(model(x), given, dy)

    return interleaved({"torch.compile": step(compiled), "ours": step(fused)}, rounds)


def block(rounds: int, batch: int = 8, length: int = 1024) -> dict[str, float]:
    plain = Block().cuda()
    fused = of.torch.fuse(copy.deepcopy(plain))
    x = torch.randn(batch, length, 768, device="cuda")

    def step(model: Any, whole: Any) -> Callable[[], Any]:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

        def work() -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = whole(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return work

    arms = {
        "torch.compile": step(plain, torch.compile(plain)),
        "ours": step(fused, torch.compile(fused)),
    }
    return interleaved(arms, rounds)


def imported(rounds: int, batch: int = 8, length: int = 128) -> dict[str, float]:
    model = nn.Sequential(*(Block() for _ in range(4)), nn.LayerNorm(768), nn.Linear(768, 2))
    x = torch.randn(batch, length, 768)
    file = io.BytesIO(
        torch.onnx.export(model.eval(), (x,), dynamo=True, verbose=False)
        .model_proto.SerializeToString()
    )  # fmt: skip
    module = of.torch.from_onnx(file.getvalue(), precision="bf16", untie=True).cuda()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    trainer = of.Trainer(
        file.getvalue(), loss="mse", optimizer=of.optim.SGD(lr=1e-3), precision="bf16",
        device="cuda", untie=True,
    )  # fmt: skip
    data, target = x.cuda(), torch.zeros(batch, length, 2, device="cuda")
    names = [value.name for value in trainer.spec().feeds]
    feeds = dict(zip(names, (x.numpy(), target.cpu().numpy()), strict=True))

    def ours() -> None:
        loss = F.mse_loss(module(data), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return interleaved({"Trainer": lambda: trainer.step(feeds), "ours": ours}, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    rounds = 5 if options.quick else 25
    rows: list[dict[str, Any]] = []

    def add(name: str, goal: float, found: dict[str, float]) -> None:
        (peer, theirs), (_, own) = found.items()
        rows.append({"what": name, "peer": peer, "ms": own, "peer_ms": theirs,
                     "ratio": own / theirs, "goal": goal})  # fmt: skip
        print(f"{name:44} {own:8.3f} ms   {peer} {theirs:8.3f} ms   "
              f"ratio {own / theirs:.3f} (goal {goal})", flush=True)  # fmt: skip

    for m, k, n in SHAPES:
        found = layer_norm_linear(m, k, n, rounds)
        add(f"LayerNorm+Linear bf16 {m},{k},{n}", GOALS["LayerNorm+Linear"], found)
    add("GPT-2 block, training step", GOALS["GPT-2 block"], block(rounds))
    add("imported module, training step", GOALS["imported module"], imported(rounds))

    shapes = ((64, 256), (256, 256), (256,), (256,), (256,))
    for grad in (False, True):
        given = [torch.randn(*s, device="cuda").bfloat16().requires_grad_(grad) for s in shapes]
        ours = host_time(lambda g=given: of.torch.fused_layernorm_linear(*g, 1e-5))
        torch_s = host_time(lambda g=given: F.linear(*g[:3]))
        what = f"host time of a call{', with gradients' if grad else ''}"
        rows.append({"what": what, "us": ours, "linear_us": torch_s})
        print(f"{what:44} {ours:8.2f} us   F.linear {torch_s:8.2f} us   "
              f"difference {ours - torch_s:.2f} (goal 6)", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

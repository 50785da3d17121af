"""What PyTorch's users get: fused functions, eager tensors, imported modules, beside torch's own.

    python tools/bench_torch.py [--only ROW ...] [--limit S] [--quick] [--profile] [--json FILE]

Rows have processes of their own, which all prepare (compile, warm up) at the same time, and are
then measured one after another, so that nothing else uses the GPU. No programs are made ahead of
time for other lengths: they would take turns with a row in its process. A row that takes longer
than the limit is given up. The arms of a row take turns and their times are medians, so that ratios
hold from run to run.
`host` is the time until the calls of a step return: where it is nearly the step's own, the host is
what is measured. --profile lists the kernels of each arm, and times a norm and a product as CUDA
graphs. Needs torch and one GPU.
"""

import argparse
import copy
import json
import operator
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
import onnx_ir as ir
import torch
import torch.nn.functional as F
from gpu_events import captured as as_graph
from gpu_events import in_turns, microseconds
from gpu_turns import Found, Turn, devices, say, together, told
from torch import nn

import onnx_fuse as of

Work = Callable[[], Any]
Row = Callable[[], "tuple[dict[str, Work], float]"]
"""Prepares the works that are compared, the peer's first; with the bar of the last one's ratio."""

# ---- what is compared --------------------------------------------------------------------------


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


def layer_norm_linear(m: int, k: int, n: int) -> tuple[dict[str, Work], float]:
    pair = nn.Sequential(nn.LayerNorm(k), nn.Linear(k, n)).cuda().bfloat16()
    fused = of.torch.fuse(copy.deepcopy(pair))
    compiled = torch.compile(pair)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)

    def step(model: Any) -> Work:
        given = [x, *model.parameters()]
        return lambda: torch.autograd.grad(model(x), given, dy)

    return {"torch.compile": step(compiled), "ours": step(fused)}, 0.92


def block(batch: int = 8, entire: bool = False) -> tuple[dict[str, Work], float]:
    """A training step; `entire` is fused whole, and not compiled by torch besides."""
    plain = Block().cuda()
    fused = of.torch.fuse(copy.deepcopy(plain), whole=entire)
    x = torch.randn(batch, 1024, 768, device="cuda")

    def step(model: Any, whole: Any) -> Work:
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
        "ours": step(fused, fused if entire else torch.compile(fused)),
    }
    return arms, 0.95


def imported(batch: int = 16, length: int = 128) -> tuple[dict[str, Work], float]:
    """BERT-base with a classifier, a training step with SGD, against the Trainer's."""
    import encoder

    config = encoder.Config(12, 12, 768, 30522, 512, classes=2)
    file = ir.to_proto(encoder.build(config))
    rate = 1e-3
    module = of.torch.from_onnx(file, precision="bf16").cuda()
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, fused=True)
    trainer = of.Trainer(
        file, loss="cross_entropy", optimizer=of.optim.SGD(lr=rate), precision="bf16", device="cuda"
    )
    ids = torch.randint(0, 30522, (batch, length))
    feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids),
             "token_type_ids": torch.zeros_like(ids)}  # fmt: skip
    labels = torch.randint(0, 2, (batch,))
    given = {name: x.cuda() for name, x in feeds.items()}
    target = labels.cuda()
    arrays = {name: x.numpy() for name, x in feeds.items()} | {"labels": labels.numpy()}

    def ours() -> None:
        loss = F.cross_entropy(module(**given), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return {"Trainer": lambda: trainer.step(arrays), "ours": ours}, 1.05


def captured(batch: int = 128) -> tuple[dict[str, Work], float]:
    """A perceptron of `onnx_fuse.nn`, its step captured, against the Trainer's of the same file."""
    import mlp

    from onnx_fuse import nn as own
    from onnx_fuse.nn import functional

    file = ir.to_proto(mlp.build(mlp.SIZES["mnist"]))
    trainer = of.Trainer(
        file, loss="cross_entropy", optimizer=of.optim.AdamW(lr=1e-3), device="cuda"
    )
    model = own.from_onnx(file).to("cuda")
    optimizer = own.optim.AdamW(model, lr=1e-3)

    @of.capture
    def step(x: Any, labels: Any) -> Any:
        loss = functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x, labels = torch.randn(batch, 784).numpy(), torch.randint(0, 10, (batch,)).numpy()
    feeds = {"x": x, "labels": labels}

    def ours() -> Any:
        return step(own.tensor(x, device="cuda"), own.tensor(labels, device="cuda"))

    return {"Trainer": lambda: trainer.step(feeds), "ours": ours}, 1.05


def call(grad: bool) -> tuple[dict[str, Work], float]:
    shapes = ((64, 256), (256, 256), (256,), (256,), (256,))
    given = [torch.randn(*s, device="cuda").bfloat16().requires_grad_(grad) for s in shapes]
    arms = {
        "F.linear": lambda: F.linear(*given[:3]),
        "ours": lambda: of.torch.fused_layernorm_linear(*given, 1e-5),
    }
    return arms, 6


def eager(name: str, grad: bool) -> tuple[dict[str, Work], float]:
    """An operator on eager tensors; a bar of 12 us that is not the difference from torch's."""
    from onnx_fuse import nn as own

    a = torch.randn(256, 256, device="cuda", requires_grad=grad)
    x = own.tensor(a.detach().cpu().numpy(), device="cuda", requires_grad=grad)
    work: Callable[[Any, Any], Any] = getattr(operator, name)
    return {"torch": lambda: work(a, a), "ours": lambda: work(x, x)}, 12


ROWS: dict[str, Row] = {
    "norm_linear": partial(layer_norm_linear, 8192, 768, 3072),
    "norm_linear_wide": partial(layer_norm_linear, 8192, 4096, 4096),
    "block": block,
    "block_large": partial(block, batch=32),
    "block_whole": partial(block, entire=True),
    "block_whole_large": partial(block, batch=32, entire=True),
    "imported": imported,
    "captured": captured,
}
HOST: dict[str, Row] = {
    "call": partial(call, False),
    "call_with_gradients": partial(call, True),
    "eager_add": partial(eager, "add", False),
    "eager_add_with_gradients": partial(eager, "add", True),
    "eager_matmul": partial(eager, "matmul", False),
}
"""Those of which the host's time is the figure: the bar is of the difference, in microseconds."""


# ---- measuring -----------------------------------------------------------------------------------


def elapsed(work: Work, calls: int) -> tuple[float, float]:
    """Milliseconds of a call until the GPU is done, and until the host is."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        work()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / calls, 1e3 * host / calls


def measured(arms: dict[str, Work], rounds: int, enough: float = 40) -> dict[str, Any]:
    """Medians of each arm's milliseconds and of its host's, in rounds of `enough` milliseconds."""
    calls = {name: max(10, int(enough / elapsed(work, 3)[0])) for name, work in arms.items()}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, work in arms.items():
            found[name].append(elapsed(work, calls[name]))
    return {
        name: {"ms": statistics.median(a for a, _ in each),
               "host_ms": statistics.median(b for _, b in each)}
        for name, each in found.items()
    }  # fmt: skip


def replayed(arms: dict[str, Work], rounds: int, replays: int = 20) -> dict[str, float]:
    """Medians of the milliseconds of each arm as a CUDA graph: what the GPU takes, without a host.

    The arms allocate with torch alone.
    """
    graphs = {name: as_graph(work) for name, work in arms.items()}
    return in_turns(
        {
            name: lambda graph=graph: microseconds(graph.replay, replays) / 1e3
            for name, graph in graphs.items()
        },
        rounds,
    )


def called(arms: dict[str, Work], rounds: int) -> dict[str, Any]:
    """The least microseconds of the host for a call; the GPU's queue never fills."""
    found: dict[str, float] = {}
    for _ in range(rounds):
        for name, work in arms.items():
            us = 1e3 * elapsed(work, 200)[1]
            found[name] = min(us, found.get(name, us))
    return {name: {"us": us} for name, us in found.items()}


def kernels(work: Work, calls: int = 3) -> list[tuple[float, float, str]]:
    """(microseconds, launches, name) of each kernel in a call, the longest first.

    A kernel that starts while the one before it ends counts its wait: the sum is more than a call.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            work()
        torch.cuda.synchronize()
    rows = [(e.self_device_time_total / calls, e.count / calls, e.key) for e in seen.key_averages()]
    return sorted((r for r in rows if r[0] > 0), reverse=True)


def child(name: str, rounds: int, profile: bool) -> None:
    """Prepare a row, wait for its turn, and say what it measures."""
    turn = Turn()
    arms, bar = {**ROWS, **HOST}[name]()
    for work in arms.values():
        for _ in range(5):
            work()
    torch.cuda.synchronize()
    turn.take()
    found = called(arms, rounds) if name in HOST else measured(arms, rounds)
    if profile and name.startswith("norm_linear"):
        for arm, ms in replayed(arms, rounds).items():
            found[arm]["graph_ms"] = ms
    if profile and name in ROWS:
        for arm, work in arms.items():
            found[arm]["kernels"] = kernels(work)
    say(row=name, bar=bar, arms=found)


def show(found: dict[str, Any]) -> None:
    """Print a row's line, and its kernels where there are any."""
    (peer, theirs), (_, own) = found["arms"].items()
    if "us" in own:
        difference = own["us"] - theirs["us"]
        print(f"{found['row']:28} {own['us']:8.2f} us   {peer} {theirs['us']:8.2f} us   "
              f"difference {difference:.2f} (bar {found['bar']})", flush=True)  # fmt: skip
    else:
        print(f"{found['row']:28} {own['ms']:8.3f} ms (host {own['host_ms']:.3f})   "
              f"{peer} {theirs['ms']:8.3f} ms (host {theirs['host_ms']:.3f})   "
              f"ratio {own['ms'] / theirs['ms']:.3f} (bar {found['bar']})", flush=True)  # fmt: skip
    if "graph_ms" in own:
        print(f"    as CUDA graphs {own['graph_ms']:.3f} ms, {peer} {theirs['graph_ms']:.3f} ms, "
              f"ratio {own['graph_ms'] / theirs['graph_ms']:.3f}", flush=True)  # fmt: skip
    for arm, figures in found["arms"].items():
        spent = figures.get("kernels", [])
        if spent:
            print(f"    {arm}: {sum(us for us, *_ in spent):.1f} us of kernels")
        for us, launches, name in spent[:14]:
            print(f"    {us:9.1f} us {launches:5.1f} x  {name[:80]}", flush=True)


def main() -> None:
    every = [*ROWS, *HOST]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=every, help="a row; may be repeated")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each row")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--profile", action="store_true", help="list the kernels of each arm")
    parser.add_argument("--child", choices=every, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child, 5 if options.quick else 25, options.profile)
    os.environ.setdefault("ONNX_FUSE_AHEAD", "0")
    flags = [flag for flag in ("--quick", "--profile") if getattr(options, flag[2:])]

    def measure(name: str, _: str, where: Mapping[str, Any]) -> Found:
        return told([sys.executable, __file__, "--child", name, *flags], where, options.limit)

    rows = []
    for name, _, found in together(options.only or every, ("",), measure, devices()[:1]):
        if "error" in found:
            print(f"{name}: {found['error']}", flush=True)
        else:
            rows.append(found)
            show(found)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

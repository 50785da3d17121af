"""A training step of GPT-2 124M on several GPUs of this machine, beside PyTorch's DDP.

    python tools/bench_gpus.py [--gpus 2] [--batch 16] [--reduce bf16] [--shard optimizer] [--ddp]

bf16, AdamW, sequences of 1024 tokens, `--batch` of them a GPU, random weights and tokens. A process
a GPU, one GPU first and then all; rank 0 prints the median of nine times ten steps, one graph
launch each, and what of the communication no kernel hid in the last one. --ddp measures PyTorch's
DistributedDataParallel behind that (autocast, fused AdamW; --compile for torch.compile).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "models"), str(ROOT)]
LENGTH, VOCAB = 1024, 50257


def ours(args: argparse.Namespace) -> None:
    """The Trainer's step, and what is in it."""
    import gpt
    import numpy as np

    import onnx_fuse as of

    trainer = of.Trainer(
        gpt.build(gpt.SIZES[args.size]),
        loss="cross_entropy",
        loss_options={"class_axis": -1},
        optimizer=of.optim.AdamW(lr=3e-4),
        precision="bf16",
        device="cuda",
        distributed=not args.alone,
        **({} if args.alone else {"reduce_dtype": args.reduce, "shard": args.shard}),
    )
    config = gpt.SIZES[args.size]
    length = min(LENGTH, config.context)
    rank = trainer.world.rank if trainer.world else 0
    size = trainer.world.size if trainer.world else 1
    rng = np.random.default_rng(rank)
    tokens = rng.integers(0, config.vocab, (args.batch, length + 1))
    feeds = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    start = time.perf_counter()
    losses = [float(trainer.step(feeds)) for _ in range(5)]
    first = time.perf_counter() - start
    executable = trainer._device._states._executables["update"]
    (instance,) = executable.instances()

    def timed() -> list[float]:
        found = []
        for _ in range(9):
            if trainer.world is not None:
                trainer.world.barrier()
            found.append(executable.stream.timed(instance.launch, 10) * 1e3)
        return found

    times = timed()
    step = median(times)
    exchanged = trainer.communication()
    if rank == 0:
        states = trainer._device._states._home.weights.nbytes / 1e6
        print(
            f"{args.size} bf16 {args.batch} x {length}, {size} GPUs, reduce {args.reduce}, shard "
            f"{args.shard or '-'}: {step:.3f} ms ({min(times):.3f} to {max(times):.3f}), "
            f"{size * args.batch * length / step / 1e3:.3f} M tokens/s, losses {losses[0]:.5f} .. "
            f"{losses[-1]:.5f}, weights and states {states:,.0f} MB, first 5 {first:.1f} s",
            flush=True,
        )
        if exchanged is not None:
            print(f"  communication: {exchanged}", flush=True)
        if args.profile:
            for call in instance.program.calls:
                if call.kernel.startswith(("All", "Reduce")) and call.problem is not None:
                    print(f"  {call.kernel} {getattr(call.problem, 'bytes', 0):,} bytes")


def ddp(args: argparse.Namespace) -> None:
    """PyTorch's step of the same model."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn

    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, w = x.shape
            q, k, v = (
                part.view(b, t, self.heads, -1).transpose(1, 2)
                for part in self.qkv(self.ln_1(x)).split(w, 2)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(b, t, w))
            return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCAB, 768), nn.Embedding(LENGTH, 768)
            self.blocks = nn.ModuleList(Block(768, 12) for _ in range(12))
            self.ln = nn.LayerNorm(768)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            logits = self.ln(x) @ self.wte.weight.t()
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model = Gpt().cuda()
    if size > 1:
        dist.init_process_group("nccl")
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    run = torch.compile(model) if args.compile else model
    tokens = torch.randint(0, VOCAB, (args.batch, LENGTH + 1), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 5)
    if rank == 0:
        found = median(times)
        print(
            f"DDP{' compiled' if args.compile else ''} {args.batch} x {LENGTH}, {size} GPUs: "
            f"{found:.3f} ms ({min(times):.3f} to {max(times):.3f}), "
            f"{size * args.batch * LENGTH / found / 1e3:.3f} M tokens/s",
            flush=True,
        )
    if size > 1:
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="one GPU alone, without ranks")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", default="gpt2-small")
    parser.add_argument("--reduce", default="bf16")
    parser.add_argument("--shard", default="")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ or args.alone:
        (ddp if args.ddp else ours)(args)
        return 0
    from onnx_fuse.distributed import launch

    command = [sys.executable, *(arg for arg in sys.argv if arg != "--ddp")]
    codes = []
    for more in ([], ["--ddp"]) if args.ddp else ([],):
        codes.append(subprocess.run([*command, *more, "--alone"], check=False).returncode)
        if args.gpus > 1:
            codes.append(launch.run([*command, *more], args.gpus))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())

"""Training GPT-2 124M on the GPUs of this machine, beside PyTorch's compiled DDP: one table.

    python tools/bench_gpus.py [--gpus 4] [--minutes 8] [--only one ranks ...] [--json FILE]

bf16, AdamW, 16 x 1024 tokens a GPU, random weights and tokens. Each part is a process a GPU, one
after another: a step on one GPU and on all, what of the communication no kernel hid, the same with
shard="optimizer" and "all", torch.compile with DistributedDataParallel on one GPU and on all, and
50 steps in fp32 whose weights are compared with those of one GPU. A part that fails or takes too
long is ended with all its ranks, and named; the table has what the others found.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import _paths
import gpt
import numpy as np
import scale_model

from onnx_fuse.distributed import launch

Found = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """What one start of processes measures."""

    label: str
    """Its line of the table."""
    limit: float
    """Seconds after which it is ended."""
    ranked: bool = True
    """Whether it runs on all GPUs, and not on one."""
    shard: str = ""
    torch: bool = False


PARTS = {
    "one": Part("onnx-fuse", 90, ranked=False),
    "ranks": Part("onnx-fuse", 90),
    "ddp-one": Part("DDP, torch.compile", 120, ranked=False, torch=True),
    "ddp": Part("DDP, torch.compile", 150, torch=True),
    "optimizer": Part('onnx-fuse, shard="optimizer"', 60, shard="optimizer"),
    "all": Part('onnx-fuse, shard="all"', 60, shard="all"),
    "equal": Part("50 steps in fp32", 120),
}
ALONE = {"ranks": "one", "optimizer": "one", "all": "one", "ddp": "ddp-one"}
"""What a part on all GPUs is compared with."""
EQUAL = ("plain", "clip", "masked", "sharded")
"""The cases of tests/rank_worker.py whose curves are compared."""
ROUNDS, STEPS = 7, 10
SHORTEST = 5.0
"""Seconds in which no part finds anything."""


def say(file: Path, figures: Mapping[str, Any]) -> None:
    """Write what is known so far, whole or not at all."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(dict(figures)))
    draft.replace(file)


def batch(config: Any, rows: int, rank: int) -> np.ndarray:
    """A rank's tokens, [rows, context + 1]: inputs and labels are the same, one place apart."""
    return np.random.default_rng(rank).integers(0, config.vocab, (rows, config.context + 1))


# ---- in the processes of a part ----------------------------------------------------------------


def ours(part: Part, args: argparse.Namespace) -> None:
    """Measure `Trainer.step` as one graph launch a step."""
    import onnx_fuse as of

    config = gpt.SIZES[args.size]
    begun = time.perf_counter()
    more = {"distributed": True, "reduce_dtype": args.reduce, "shard": part.shard}
    trainer = of.Trainer(
        gpt.build(config),
        loss="cross_entropy",
        loss_options={"class_axis": -1},
        optimizer=of.optim.AdamW(lr=3e-4),
        precision="bf16",
        device="cuda",
        **(more if part.ranked else {}),
    )
    tokens = batch(config, args.batch, trainer.world.rank if trainer.world else 0)
    feeds = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    losses = [float(trainer.step(feeds)) for _ in range(5)]
    held = [np.asarray(s.initial).nbytes for s in trainer.spec().states if s.kind == "slot"]
    found: Found = {
        "first": time.perf_counter() - begun,
        "losses": [losses[0], losses[-1]],
        "states": sum(held),
        "weights and states": trainer._device._states._home.weights.nbytes,
    }
    executable = trainer._device._states._executables["update"]
    (instance,) = executable.instances()
    times = []
    for _ in range(ROUNDS):
        if trainer.world is not None:
            trainer.world.barrier()
        times.append(executable.stream.timed(instance.launch, STEPS) * 1e3)
    found |= {"ms": median(times), "least": min(times), "most": max(times)}
    exchanged = trainer.communication()
    if exchanged is not None:
        found |= {"exposed": exchanged.exposed * 1e3, "communication": str(exchanged)}
    if trainer.world is None:
        say(args.file, found)
        found["backward"] = found["ms"] * backward_share(instance)
    if trainer.world is None or trainer.world.rank == 0:
        say(args.file, found)


def backward_share(instance: Any) -> float:
    """The part of a step that its calls between the loss and the update take, by themselves."""
    from onnx_fuse.program.passes.recompute import Memory

    calls, turn = instance.program.calls, Memory(instance.program).turn
    after = {id(call) for call in calls[turn + 1 :]}
    seconds = instance.profile()
    updates = max(range(len(seconds)), key=lambda i: len(seconds[i][0].writes))  # of all weights
    back = sum(took for call, took in seconds[:updates] if id(call) in after)
    return float(back / sum(took for _, took in seconds))


def ddp(part: Part, args: argparse.Namespace) -> None:
    """Measure PyTorch's step of the same network: autocast, fused AdamW, one process a GPU."""
    import gpu_events
    import torch
    import torch.distributed as dist
    import train_peers

    config = gpt.SIZES[args.size]
    rank = int(os.environ.get("RANK", 0))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    begun = time.perf_counter()
    torch.manual_seed(0)
    with torch.device("cuda"):
        net: Any = train_peers.Gpt(config)
    train_peers.small_weights(net)
    if part.ranked:
        dist.init_process_group("nccl")
        net = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    run = torch.compile(net, dynamic=False)
    update = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)
    tokens = torch.from_numpy(batch(config, args.batch, rank)).cuda()
    given = {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(**given)
        loss.backward()
        update.step()
        update.zero_grad(set_to_none=True)
        return loss

    losses = [float(step()) for _ in range(5)]
    found: Found = {"first": time.perf_counter() - begun, "losses": [losses[0], losses[-1]]}
    times = []
    for _ in range(ROUNDS):
        if part.ranked:
            dist.barrier()
        times.append(gpu_events.microseconds(step, STEPS) / 1e3)
    found |= {"ms": median(times), "least": min(times), "most": max(times)}
    if rank == 0:
        say(args.file, found)
    if part.ranked:
        dist.destroy_process_group()


# ---- in the process that starts them -----------------------------------------------------------


class Late(Exception):
    """The time of a part is over."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise Late in the block after so many seconds."""

    def late(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def started(command: Sequence[str], ranks: int, seconds: float) -> str:
    """Run a command by so many ranks, or once where that is 1; why it failed, or "".

    All processes have ended when it returns.
    """
    try:
        with within(seconds):
            code = launch.run(command, ranks) if ranks > 1 else once(command)
    except Late:
        return f"ended after {seconds:.0f} s"
    return f"ended with exit code {code}" if code else ""


def once(command: Sequence[str]) -> int:
    """Run a command that is no rank of others."""
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def measured(name: str, args: argparse.Namespace, seconds: float, folder: Path) -> Found:
    """The figures of a part; "failed" says why some are missing."""
    part, file = PARTS[name], folder / f"{name}.json"
    command = [sys.executable, __file__, "--part", name, "--file", str(file)]
    command += ["--batch", str(args.batch), "--size", args.size, "--reduce", args.reduce]
    failed = started(command, args.gpus if part.ranked else 1, seconds)
    found: Found = json.loads(file.read_text()) if file.is_file() else {}
    return found | ({"failed": failed} if failed else {})


def curves(args: argparse.Namespace, seconds: float, folder: Path) -> Found:
    """How far 50 steps of all ranks are from those of one GPU with the batches of all."""
    end = time.monotonic() + seconds
    worker = [sys.executable, str(_paths.ROOT / "tests" / "rank_worker.py"), "curves", str(folder)]
    os.environ.update(DEVICE="cuda", CASES=",".join(EQUAL), RANKS=str(args.gpus))
    failed = started(worker, args.gpus, end - time.monotonic())
    failed = failed or started(worker, 1, end - time.monotonic())
    return {"failed": failed} if failed else compared(folder, args.gpus)


def compared(folder: Path, ranks: int) -> Found:
    """The largest differences by case between the curves in a folder, and whether ranks agree."""
    read = [dict(np.load(folder / f"{who}.npz")) for who in (*range(ranks), "one")]
    *each, one = read
    largest = dict.fromkeys(EQUAL, 0.0)
    same = True
    for key, expected in one.items():
        case, what = key.split(maxsplit=1)
        if what != "bytes":
            same &= all(np.array_equal(other[key], each[0][key]) for other in each[1:])
            difference = np.abs(each[0][key].astype(np.float64) - expected)
            largest[case] = max(largest[case], float(difference.max(initial=0.0)))
    return {"differences": largest, "same bits on all ranks": same}


def line(name: str, found: Mapping[str, Found], gpus: int, tokens: int) -> str:
    """A part's line of the table."""
    part, own = PARTS[name], found.get(name, {})
    if "ms" not in own:
        return f"{part.label:29s} {own.get('failed', 'not measured')}"
    size = gpus if part.ranked else 1
    ms, alone = own["ms"], found.get(ALONE.get(name, ""), {}).get("ms")
    exposed = own.get("exposed", ms - alone if part.torch and alone and part.ranked else None)
    columns = [
        f"{size:4d}",
        f"{ms:8.3f}",
        f"{alone / ms:9.3f}" if alone else " " * 9,
        f"{size * tokens / ms / 1e3:10.3f}",
        " " * 10 if exposed is None else f"{exposed:10.3f}",
        f"{own['states'] / 2**20:11,.0f}" if "states" in own else "",
    ]
    return f"{part.label:29s} {' '.join(columns)}".rstrip()


HEAD = (
    f"{'':29s} {'GPUs':>4} {'ms':>8} {'of linear':>9} {'M tokens/s':>10} {'exposed ms':>10} "
    f"{'states, MiB':>11}"
)


def table(found: Mapping[str, Found], gpus: int, tokens: int) -> list[str]:
    """All that was found, as lines."""
    lines = [HEAD, *(line(name, found, gpus, tokens) for name in PARTS if name != "equal")]
    lines.append(
        "exposed: what the step's own events show that no kernel hid; DDP's is its step less that "
        "of one GPU"
    )
    one, sharded = (found.get(name, {}).get("states") for name in ("one", "optimizer"))
    if one and sharded:
        lines.append(
            f'states of a GPU with shard="optimizer": {sharded / one:.4f} of one GPU\'s '
            f"(1 / {gpus} is {1 / gpus:.4f})"
        )
    equal = found.get("equal", {})
    if "differences" in equal:
        worst = ", ".join(f"{case} {x:.1e}" for case, x in equal["differences"].items())
        same = "the same bits" if equal["same bits on all ranks"] else "DIFFERENT BITS"
        lines.append(f"50 steps in fp32, largest difference from one GPU: {worst}; {same} by rank")
    else:
        lines.append(f"50 steps in fp32: {equal.get('failed', 'not measured')}")
    one, ranks = found.get("one", {}), found.get("ranks", {})
    if "backward" in one and "ms" in ranks:
        ms, _ = scale_model.step(
            "gpt2-small", one["ms"], one["backward"], gpus, 2, scale_model.Links(), 0.1
        )
        lines.append(
            f"tools/scale_model.py, of {one['ms']:.2f} ms with {one['backward']:.2f} of backward: "
            f"{ms:.2f} ms on {gpus} GPUs, {ms / ranks['ms'] - 1:+.1%} of the measured"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="rows a GPU")
    parser.add_argument("--size", default="gpt2-small")
    parser.add_argument("--reduce", default="bf16", help="gradients in bf16 or fp32")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=8, help="the most that all parts take")
    parser.add_argument("--json", type=Path, help="write all figures to this file as well")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        part = PARTS[args.part]
        (ddp if part.torch else ours)(part, args)
        return 0
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Measure all parts, print the table, and return 1 where a part failed."""
    end = time.monotonic() + 60 * args.minutes
    tokens = args.batch * gpt.SIZES[args.size].context
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as where:
        for name in args.only:
            begun = time.monotonic()
            seconds = min(PARTS[name].limit, end - begun)
            take = curves if name == "equal" else partial(measured, name)
            found[name] = {"failed": "left out: the time is over"}
            if seconds > SHORTEST:
                found[name] = take(args, seconds, Path(where))
            if name != "equal":
                print(line(name, found, args.gpus, tokens), flush=True)
            about = [f"{time.monotonic() - begun:.0f} s"]
            about += [f"{key} {found[name][key]}" for key in ("communication", "losses", "failed")
                      if key in found[name]]  # fmt: skip
            print(f"  {name}: {'; '.join(about)}", flush=True)
            if args.json:
                say(args.json, found)
    print("\n".join(table(found, args.gpus, tokens)), flush=True)
    return int(any("failed" in each for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())

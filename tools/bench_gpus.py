"""Training a model on the GPUs of this machine, beside PyTorch's compiled DDP: one table.

    python tools/bench_gpus.py [--model bert] [--gpus 4] [--only one ranks ...] [--json FILE]

A model of tools/bench_train.py, its batch on each GPU, bf16, AdamW, random weights and feeds. A
process a GPU measures a step of one GPU and of all, what of the communication no kernel hid, and
the same with shard="optimizer" and "all" ("sync": with sync_batchnorm). Then come torch.compile
with DistributedDataParallel on one GPU and on all. What fails or takes too long is ended with all
its ranks, and named; the table has what was found until then.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import _paths  # noqa: F401
import bench_train
import numpy as np
import scale_model
from gpu_events import host_seconds, microseconds

from onnx_fuse.distributed import launch
from onnx_fuse.errors import UsageError

Found = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A line of the table."""

    label: str
    limit: float
    """Seconds after which it is ended."""
    ranked: bool = True
    """Whether it runs on all GPUs, and not on one."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What the Trainer is given for it."""
    start: str = "ours"
    """Parts of one start, next to each other, are measured by the same processes."""


PARTS = {
    "one": Part("onnx-fuse", 60, ranked=False),
    "ranks": Part("onnx-fuse", 60),
    "optimizer": Part('onnx-fuse, shard="optimizer"', 60, more={"shard": "optimizer"}),
    "all": Part('onnx-fuse, shard="all"', 60, more={"shard": "all"}),
    "sync": Part("onnx-fuse, sync_batchnorm", 60, more={"sync_batchnorm": True}),
    "ddp-one": Part("DDP, torch.compile", 120, ranked=False, start="alone"),
    "ddp": Part("DDP, torch.compile", 150, start="ddp"),
    "session": Part("fp16 inference", 40, ranked=False, start="inference"),
    "replicas": Part("fp16 inference, replicas", 40, start="inference"),
    "split": Part("the same, a batch split", 40, start="inference"),
}
ALONE = {"ranks": "one", "optimizer": "one", "all": "one", "sync": "one", "ddp": "ddp-one",
         "replicas": "session", "split": "session"}  # fmt: skip
"""What a part on all GPUs is compared with."""
MODELS = ("gpt2", "bert", "vit", "llama", "resnet50")
"""Of tools/bench_train.py."""
ROUNDS, STEPS, BATCHES = 7, 10, 4
SHORTEST = 5.0
"""Seconds in which no part finds anything."""


def say(file: Path, figures: Mapping[str, Any]) -> None:
    """Write what is known so far, whole or not at all."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(dict(figures)))
    draft.replace(file)


def row_of(name: str) -> bench_train.Row:
    """A row of tools/bench_train.py; ResNet-50 as models/ has it, without torchvision."""
    row = bench_train.ROWS[name]
    return replace(row, size=f"{row.size}-training", exported=False) if row.exported else row


# ---- in the processes of a start ---------------------------------------------------------------


def ours(names: Sequence[str], args: argparse.Namespace) -> None:
    """Measure `Trainer.step` as one graph launch a step."""
    row = row_of(args.model)
    config = row.config(0)
    model, rank = row.model(config), int(os.environ.get("RANK", 0))
    feeds = row.feeds(config, row.batch, row.length, np.random.default_rng(rank))
    for name in names:
        try:
            found = step_of(PARTS[name], args, model, feeds)
        except UsageError as error:  # of a limit that all ranks refuse
            found = {"failed": str(error)}
        if rank == 0:
            say(args.folder / f"{name}.json", found)
            print(f"  {name}: {found}", flush=True)


def step_of(part: Part, args: argparse.Namespace, model: Any, feeds: Any) -> Found:
    """The figures of one Trainer; that of one GPU is every rank's own."""
    import onnx_fuse as of

    begun = time.perf_counter()
    more = {"distributed": True, "reduce_dtype": args.reduce, **part.more}
    limit = {"memory": args.memory} if args.memory else {}
    trainer = of.Trainer(
        model,
        loss="cross_entropy",
        loss_options={"class_axis": -1},
        optimizer=of.optim.AdamW(lr=1e-4),
        precision="bf16",
        device="cuda",
        **limit,
        **(more if part.ranked else {"device_id": int(os.environ.get("LOCAL_RANK", 0))}),
    )
    losses = [float(trainer.step(feeds)) for _ in range(5)]
    held = [np.asarray(s.initial).nbytes for s in trainer.spec().states if s.kind == "slot"]
    states = trainer._device._states  # type: ignore[union-attr]
    executable = states._executables["update"]
    (instance,) = executable.instances()
    weights = states._home.weights.nbytes
    found: Found = {
        "first": time.perf_counter() - begun,
        "losses": [losses[0], losses[-1]],
        "states": sum(held),
        "weights and states": weights,
        "memory": weights + executable.weights.nbytes + instance.memory.nbytes,
    }
    times = []
    for _ in range(ROUNDS):
        if trainer.world is not None:
            trainer.world.barrier()
        times.append(executable.stream.timed(instance.launch, STEPS) * 1e3)
    found |= {"ms": median(times), "least": min(times), "most": max(times)}
    exchanged = trainer.communication()
    if exchanged is not None:
        found |= {"exposed": exchanged.exposed * 1e3, "communication": str(exchanged)}
        found["exchanges"] = [astuple(each) for each in exchanged.exchanges]
        found["waits"] = exchanged.waits
    else:
        found["backward"] = found["ms"] * backward_share(instance)
    return found


def backward_share(instance: Any) -> float:
    """The part of a step that its calls between the loss and the update take, by themselves."""
    from onnx_fuse.program.passes.recompute import Lifetimes

    calls, turn = instance.program.calls, Lifetimes(instance.program).turn
    after = {id(call) for call in calls[turn + 1 :]}
    seconds = instance.profile()
    updates = max(range(len(seconds)), key=lambda i: len(seconds[i][0].writes))  # of all weights
    back = sum(took for call, took in seconds[:updates] if id(call) in after)
    return float(back / sum(took for _, took in seconds))


def inference(names: Sequence[str], args: argparse.Namespace) -> None:
    """Measure batches from NumPy to NumPy: by a session, from the queue of replicas, and split."""
    import onnx_fuse as of

    row = row_of(args.model)
    config = row.config(0)
    model, wide = row.model(config), args.gpus * row.batch
    rngs = [np.random.default_rng(seed) for seed in range(BATCHES)]
    batches = [row.feeds(config, wide, row.length, rng) for rng in rngs]
    for batch in batches:
        del batch["labels"]
    parts = [{name: a[: row.batch] for name, a in batch.items()} for batch in batches]
    session = of.InferenceSession(model, device="cuda", precision="fp16")
    devices = [f"cuda:{i}" for i in range(args.gpus)]
    with of.Replicas(model, devices, precision="fp16") as replicas:

        def queued(given: Sequence[Any]) -> None:
            for each in [replicas.submit(None, batch) for batch in given]:
                each.result()

        def in_turn(runs: Any, given: Sequence[Any]) -> None:
            for batch in given:
                runs.run(None, batch)

        works = {
            "session": partial(in_turn, session, parts),
            "replicas": partial(queued, args.gpus * parts),
            "split": partial(in_turn, replicas, batches),
        }
        for name in names:
            # the first round makes the programs
            times = [1e3 * t / BATCHES for t in host_seconds(works[name], STEPS, 1 + ROUNDS)]
            found = {"ms": median(times[1:]), "least": min(times[1:]), "most": max(times[1:])}
            say(args.folder / f"{name}.json", found)


def ddp(names: Sequence[str], args: argparse.Namespace) -> None:
    """Measure PyTorch's step of the same network: autocast, fused AdamW, one process a GPU."""
    import torch
    import torch.distributed as dist

    (name,) = names
    row, part = row_of(args.model), PARTS[name]
    config, rank = row.config(0), int(os.environ.get("RANK", 0))
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    begun = time.perf_counter()
    feeds = row.feeds(config, row.batch, row.length, np.random.default_rng(rank))
    net, given = bench_train.torch_network(row, config, feeds)
    if part.ranked:
        dist.init_process_group("nccl")
        net = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    step = bench_train.torch_step(row, net, given)
    losses = [float(step()) for _ in range(5)]
    found: Found = {"first": time.perf_counter() - begun, "losses": [losses[0], losses[-1]]}
    times = []
    for _ in range(ROUNDS):
        if part.ranked:
            dist.barrier()
        times.append(microseconds(step, STEPS) / 1e3)
    found |= {"ms": median(times), "least": min(times), "most": max(times)}
    if rank == 0:
        say(args.folder / f"{name}.json", found)
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
    """Run a command by so many ranks; why it failed, or "".

    All processes have ended when it returns.
    """
    try:
        with within(seconds):
            code = launch.run(command, ranks)
    except Late:
        return f"ended after {seconds:.0f} s"
    return f"ended with exit code {code}" if code else ""


def measured(
    names: Sequence[str], args: argparse.Namespace, seconds: float, folder: Path
) -> dict[str, Found]:
    """The figures of the parts of one start; "failed" says why some are missing."""
    command = [sys.executable, __file__, "--parts", *names, "--folder", str(folder)]
    command += ["--model", args.model, "--reduce", args.reduce, "--gpus", str(args.gpus)]
    command += ["--memory", args.memory] if args.memory else []
    ranked = any(PARTS[name].ranked and PARTS[name].start != "inference" for name in names)
    failed = started(command, args.gpus if ranked else 1, seconds)
    files = {name: folder / f"{name}.json" for name in names}
    found = {k: json.loads(f.read_text()) if f.is_file() else {} for k, f in files.items()}
    late = [name for name in names if not found[name]] or names[-1:]
    return found | {name: {**found[name], "failed": failed} for name in late if failed}


def line(name: str, found: Mapping[str, Found], gpus: int, rows: int) -> str:
    """A part's line of the table; `rows` is the batch of a GPU."""
    part, own = PARTS[name], found.get(name, {})
    if "ms" not in own:
        return f"{part.label:29s} {own.get('failed', 'not measured')}"
    size = gpus if part.ranked else 1
    ms, alone = own["ms"], found.get(ALONE.get(name, ""), {}).get("ms")
    exposed = own.get("exposed", ms - alone if part.start == "ddp" and alone else None)
    columns = [
        f"{size:4d}",
        f"{ms:8.3f}",
        f"{alone / ms:9.3f}" if alone else " " * 9,
        f"{size * rows / ms * 1e3:8,.0f}",
        " " * 10 if exposed is None else f"{exposed:10.3f}",
        *(f"{own[of] / 2**20:11,.0f}" for of in ("states", "memory") if of in own),
    ]
    return f"{part.label:29s} {' '.join(columns)}".rstrip()


HEAD = (
    f"{'':29s} {'GPUs':>4} {'ms':>8} {'of linear':>9} {'rows/s':>8} {'exposed ms':>10} "
    f"{'states, MiB':>11} {'memory, MiB':>11}"
)


def table(found: Mapping[str, Found], model: str, gpus: int) -> list[str]:
    """All that was found, as lines."""
    rows = row_of(model).batch
    lines = [HEAD]
    lines += [line(name, found, gpus, rows) for name in PARTS if name in found]
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
    one, ranks = found.get("one", {}), found.get("ranks", {})
    if "backward" in one and "ms" in ranks and model in scale_model.MODELS:
        ms, _ = scale_model.step(model, one["ms"], one["backward"], gpus)
        lines.append(
            f"tools/scale_model.py, of {one['ms']:.2f} ms with {one['backward']:.2f} of backward: "
            f"{ms:.2f} ms on {gpus} GPUs, {ms / ranks['ms'] - 1:+.1%} of the measured"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--reduce", default="bf16", help="gradients in bf16 or fp32")
    parser.add_argument("--memory", help="a limit of each GPU's, as of onnx-fuse train")
    usual = [name for name in PARTS if name not in ("sync", "session", "replicas", "split")]
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=usual)
    parser.add_argument("--minutes", type=float, default=8, help="the most that all parts take")
    parser.add_argument("--json", type=Path, help="write all figures to this file as well")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parts:
        measures = {"ours": ours, "inference": inference}
        measures.get(PARTS[args.parts[0]].start, ddp)(args.parts, args)
        return 0
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Measure all parts, print the table, and return 1 where a part failed."""
    end = time.monotonic() + 60 * args.minutes
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory() as where:
        for _, group in groupby(args.only, lambda name: PARTS[name].start):
            names, begun = list(group), time.monotonic()
            seconds = min(sum(PARTS[name].limit for name in names), end - begun)
            if seconds <= SHORTEST:
                found |= {name: {"failed": "left out: the time is over"} for name in names}
            else:
                found |= measured(names, args, seconds, Path(where))
            print(f"{', '.join(names)}: {time.monotonic() - begun:.0f} s", flush=True)
            for name in names:
                about = [f"{key} {found[name][key]}" for key in ("communication", "losses",
                         "first", "failed") if key in found[name]]  # fmt: skip
                print(f"  {name}: {'; '.join(about)}", flush=True)
            if args.json:
                say(args.json, found)
    print("\n".join(table(found, args.model, args.gpus)), flush=True)
    return int(any("failed" in each for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Predicted and measured time of each kernel call over 20 us of whole models, on one GPU.

    python tools/predictions.py [NAME ...] [--least 20] [--worst 10] [--all] [--jobs N]
                                [--limit S] [--folder DIR] [--json DIR] [--tune]

The predictions are those that `--explain` and `--target` print. A call is measured by itself, in a
CUDA graph of twenty runs, so the L2 is warm; of calls that are alike one is measured. For each
model: how many calls are within 1.5 of their time, the sums, and the worst calls (with `--all`,
every one of them). Each model is a process of its own; `--jobs` of them get ready beside each
other, and are timed alone (gpu_turns.py). Models that PyTorch exports are kept in `--folder`.
`--tune` tunes the calls as `onnx-fuse bench --tune` does it, and ships the winners as records.

The models are those of bench_train.py ("-step": a training step), bench_vision.py and bench_bert.py
(inference in fp16), with random weights.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
import bench_train
import numpy as np
import onnx_ir
from gpu_turns import Place, Turn, devices

from onnx_fuse import InferenceSession, Trainer, config, optim
from onnx_fuse.importer.save import save
from onnx_fuse.kernels import site, tuning
from onnx_fuse.program.call import Call
from onnx_fuse.program.problem import Hardware
from onnx_fuse.runtime.instance import Instance
from onnx_fuse.tune import calls_of, tune

WITHIN = 1.5


def step(name: str, folder: Path) -> Instance:
    """A training step of a row of bench_train.py."""
    row = bench_train.ROWS[name]
    if row.exported:  # the same network, which needs no PyTorch
        row = replace(row, size=f"{row.size}-training", exported=False)
    c = row.config(0)
    trainer = Trainer(
        row.model(c), loss="cross_entropy", optimizer=optim.AdamW(), device="cuda",
        precision=row.precision,
    )  # fmt: skip
    trainer.step(row.feeds(c, row.batch, row.length, np.random.default_rng(0)))
    found: list[Instance] = list(trainer._device._states._executables["update"].instances())  # type: ignore[union-attr]
    return found[0]


def run(model: Any, arrays: Sequence[np.ndarray]) -> Instance:
    """A run in fp16, of arrays in the order of the model's inputs."""
    session = InferenceSession(model, device="cuda", precision="fp16")
    feeds = dict(zip([v.name for v in session.get_inputs()], arrays, strict=True))
    session.run(None, feeds)
    found: Instance = session._on_cuda().instance(feeds)
    return found


def bert(batch: int, tokens: int, folder: Path) -> Instance:
    """A run of BERT-base."""
    row = bench_train.ROWS["bert"]
    feeds = row.feeds(row.config(0), batch, tokens, np.random.default_rng(0))
    model = row.model(replace(row, more={}).config(0))
    return run(model, [feeds[str(v.name)] for v in model.graph.inputs])


def vision(name: str, folder: Path) -> Instance:
    """A run of a row of bench_vision.py; what PyTorch exports is kept, in one file or two.

    A session of the file itself might find a program that an earlier one kept, whose calls no
    longer know their problems.
    """
    bench_vision = importlib.import_module("bench_vision")
    row, path = bench_vision.ROWS[name], folder / f"{name}.onnx"
    if row.built is not None:
        bench_train._quick_weights()
        model = bench_vision.graph(row)
    elif path.exists():
        model = onnx_ir.external_data.load_to_model(onnx_ir.load(path))
    else:
        folder.mkdir(parents=True, exist_ok=True)
        model = bench_vision.graph(row)
        save(model, path)
    rng = np.random.default_rng(0)
    return run(model, [rng.standard_normal(shape, np.float32) for shape in row.shapes])


MODELS: dict[str, Callable[[Path], Instance]] = {
    **{f"{name}-step": partial(step, name) for name in bench_train.ROWS if name != "mlp"},
    **{f"bert-{n}x{length}": partial(bert, n, length) for n, length in ((32, 128), (8, 512))},
    **{
        name: partial(vision, name)
        for name in (
            "vit-32", "resnet50-1", "resnet50-32", "resnet50-128", "convnext-16",
            "efficientnet-32", "swin-16", "mobilenetv3-32", "segformer-1", "unet-2", "vae-1",
        )
    },
}  # fmt: skip


def alike(call: Call) -> Hashable:
    """What calls of the same time have in common."""
    return call.kernel, tuning.canonical(call.problem) if call.problem else call.launches


@dataclass(frozen=True)
class Timed:
    """Calls that are alike: how many, and the microseconds of one."""

    call: Call
    count: int
    predicted: float
    measured: float

    @property
    def off(self) -> float:
        """How far the prediction is off, as a factor of 1 or more."""
        return max(self.predicted / self.measured, self.measured / self.predicted)


def timed(instance: Instance) -> list[Timed]:
    """All kernel calls, those that are alike together."""
    hw = Hardware.detect(0)
    kinds: dict[Hashable, list[Call]] = {}
    for call in instance.program.calls:
        if call.problem is not None:
            kinds.setdefault(alike(call), []).append(call)
    firsts = {id(calls[0]): calls for calls in kinds.values()}
    return [
        Timed(call, len(firsts[id(call)]), 1e6 * site(call, hw).seconds, 1e6 * seconds)
        for call, seconds in instance.profile(lambda call: id(call) in firsts)
    ]


def show(name: str, found: list[Timed], least: float, worst: int | None) -> None:
    """One model's summary, and its worst calls."""
    large = [row for row in found if max(row.predicted, row.measured) > least]
    good = sum(row.count for row in large if row.off <= WITHIN)
    sums = [sum(getattr(row, kind) * row.count for row in found)
            for kind in ("predicted", "measured")]  # fmt: skip
    print(
        f"{name}: {good} of {sum(row.count for row in large)} calls over {least:g} us within "
        f"{WITHIN}; {sums[0]:,.0f} us predicted, {sums[1]:,.0f} measured",
        flush=True,
    )
    for row in sorted(large, key=lambda row: -row.off)[:worst]:
        choice = row.call.choice.how
        print(f"  {row.measured:9.1f} us, predicted {row.predicted:9.1f} "
              f"({row.measured / row.predicted:5.2f}), {row.count} of  {row.call.kernel[:40]}  "
              f"{row.call.problem} | {choice}"[:700])  # fmt: skip


def child(name: str, args: argparse.Namespace) -> None:
    """Measure one model in this process."""
    turn, begun = Turn(), time.monotonic()
    instance = MODELS[name](args.folder)
    ready = time.monotonic()
    turn.take(args.patience)
    timing = time.monotonic()
    if args.tune:
        calls, left = calls_of(instance.program), args.limit - (timing - begun)
        for won in tune(calls, Hardware.detect(0), seconds=left, folder=tuning.SHIPPED):
            print(
                f"{won.before_us:9.1f} to {won.us:9.1f} us of {won.tried}, {len(won.refused)} "
                f"refused: {str(won.problem)[:120]} | {won.kernel} {won.config}",
                flush=True,
            )
        return
    found = timed(instance)
    show(name, found, args.least, None if args.all else args.worst)
    if args.json:
        rows = [
            {"kernel": row.call.kernel, "problem": str(row.call.problem), "why": row.call.why}
            | {"count": row.count, "predicted": row.predicted, "measured": row.measured}
            for row in found
        ]
        args.json.mkdir(parents=True, exist_ok=True)
        (args.json / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"  ready after {ready - begun:.1f} s, measured in {time.monotonic() - timing:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--least", type=float, default=20, help="us of the calls that count")
    parser.add_argument("--worst", type=int, default=10, help="calls listed")
    parser.add_argument("--all", action="store_true", help="list every call that counts")
    parser.add_argument("--jobs", type=int, default=1, help="models that get ready at once")
    parser.add_argument("--limit", type=float, default=180, help="seconds for each model")
    parser.add_argument("--patience", type=float, default=100, help="seconds until all are ready")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnx-fuse")
    parser.add_argument("--json", type=Path, help="folder for a file of all calls of each model")
    parser.add_argument("--tune", action="store_true", help="ship the fastest kernels as records")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args)
        return
    if unknown := set(args.models) - set(MODELS):
        parser.error(f"no model is called {', '.join(sorted(unknown))}")
    command = [sys.executable, __file__, "--least", str(args.least), "--worst", str(args.worst),
               "--patience", str(args.patience), "--folder", str(args.folder),
               "--limit", str(args.limit),
               *(f"--{flag}" for flag in ("all", "tune") if getattr(args, flag)),
               *(["--json", str(args.json)] if args.json else [])]  # fmt: skip
    gpu = devices()[0]

    def measure(name: str) -> None:
        with Place(gpu, config.CACHE_DIR.value) as where:
            done = subprocess.run(
                [*command, "--child", name], capture_output=True, text=True, check=False,
                timeout=args.limit + 60 * args.tune, **where,
            )  # fmt: skip
        failed = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
        print(done.stdout + (f"{name}: {failed}\n" if failed else ""), end="", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(measure, args.models or MODELS))


if __name__ == "__main__":
    main()

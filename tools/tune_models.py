"""Tune the kernel calls of whole models on this GPU, and keep the winners as shipped records.

    python tools/tune_models.py [--only NAME ...] [--model FILE] [--top N] [--seconds S]
                                [--folder DIR] [--chip NAME]

The models are those of bench_train.py (training steps) and of `RUNS` (inference in fp16, as
bench_bert.py and bench_vision.py run them), with random weights; `--model` adds an ONNX file: its
inference in fp16 and its training step with cross-entropy in bf16, images 64 x 3 x 224 x 224. Every
call is planned for this GPU, the kernels of all shortlists are compiled side by side, and the calls
are tuned as `onnx-fuse bench --tune` does it, those with the longest predicted times first.
`--chip` plans for a GPU that is not here and prints what would be tuned.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import bench_train
import numpy as np
import onnx_ir

from onnx_fuse import Trainer, bench, optim, optimize
from onnx_fuse.cuda import nvrtc
from onnx_fuse.kernels import site, tuning
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Call, Program
from onnx_fuse.program.problem import CHIPS, Hardware
from onnx_fuse.session import load
from onnx_fuse.tune import calls_of, shortlist, tune

Arrays = bench_train.Arrays
SHAPES = ((1, 128), (32, 128), (8, 512))
"""Batches and lengths of BERT's inference."""
LEAST = 5e-6


def _ids(batch: int, length: int) -> Arrays:
    names = ("input_ids", "attention_mask", "token_type_ids")
    return {name: np.ones((batch, length), np.int64) for name in names}


RUNS: dict[str, tuple[str, str, list[Arrays]]] = {
    "bert-run": ("encoder", "bert-base", [_ids(*shape) for shape in SHAPES]),
    "resnet-run": ("resnet", "resnet50", [
        {"x": np.zeros((n, 3, 224, 224), np.float32)} for n in (1, 32)
    ]),
    "vit-run": ("vit", "vit-b16", [
        {"pixels": np.zeros((n, 3, 224, 224), np.float32)} for n in (1, 32)
    ]),
}  # fmt: skip
"""Module, size and feeds of what runs in fp16."""


def training(model: onnx_ir.Model, feeds: Arrays, precision: str, hw: Hardware) -> Program:
    """The program of a training step with AdamW and cross-entropy."""
    trainer = Trainer(
        model, loss="cross_entropy", optimizer=optim.AdamW(), device="cuda",
        precision=precision, hardware=hw,
    )  # fmt: skip
    graph, states = trainer.graphs()["update"]
    shapes = {}
    for value in graph.graph.inputs:
        assert value.dtype is not None
        assert value.shape is not None
        assert value.name is not None
        sizes = feeds[value.name].shape if value.name in feeds else tuple(value.shape)
        shapes[value.name] = (sizes, value.dtype.numpy().name)
    return lower(graph, shapes, hw, state=states)  # type: ignore[arg-type]


def programs(names: Iterable[str], files: Iterable[Path], hw: Hardware) -> Iterator[Program]:
    """The programs of these models, and of files."""
    for name in names:
        if name in RUNS:
            module, size, each = RUNS[name]
            built = importlib.import_module(module)
            fused = load(optimize(built.build(built.SIZES[size])))
            for feeds in each:
                yield bench.program(fused, hw, feeds, "fp16")
        else:
            row = bench_train.ROWS[name]
            config = row.config(0)
            feeds = row.feeds(config, row.batch, row.length, np.random.default_rng(0))
            model = importlib.import_module(row.module).build(config)
            yield training(model, feeds, row.precision, hw)
    for file in files:
        model = load(file)
        (image,) = (value.name for value in model.graph.inputs)
        x = {str(image): np.zeros((64, 3, 224, 224), np.float32)}
        yield bench.program(load(optimize(model)), hw, x, "fp16")
        yield training(load(file), x | {"labels": np.zeros(64, np.int64)}, "bf16", hw)


def wanted(found: Iterable[Program], hw: Hardware) -> list[Call]:
    """One call a problem that has a choice, by how long all calls of it are predicted to take.

    Those that take less than `LEAST` seconds in all are left out.
    """
    calls: dict[str, Call] = {}
    seconds: dict[str, float] = {}
    for program in found:
        for call in program.calls:
            if call.problem is not None:
                key = tuning.key(call.problem.op, call.problem)
                seconds[key] = seconds.get(key, 0.0) + site(call, hw).seconds
        calls |= {tuning.key(c.problem.op, c.problem): c for c in calls_of(program) if c.problem}
    return [
        call
        for key, call in sorted(calls.items(), key=lambda item: -seconds[item[0]])
        if call.problem and seconds[key] > LEAST and len(shortlist(call.problem, hw, 2)) > 1
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=[*bench_train.ROWS, *RUNS],
                        default=[*bench_train.ROWS, *RUNS])  # fmt: skip
    parser.add_argument("--model", nargs="+", type=Path, default=[])
    parser.add_argument("--top", type=int, default=4, help="configurations of each candidate")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--folder", type=Path, default=tuning.SHIPPED)
    parser.add_argument("--chip", choices=CHIPS)
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    bench_train._quick_weights()
    hw = CHIPS[args.chip] if args.chip else Hardware.detect(0)
    calls = wanted(programs(args.only, args.model, hw), hw)
    launches = [
        launch
        for call in calls
        if call.problem
        for choice in shortlist(call.problem, hw, args.top)
        for launch in choice.launch(call.problem, hw)
    ]
    modules = {(launch.source, launch.defines) for launch in launches}
    print(f"{hw.name}: {len(calls)} problems, {len(modules)} kernels", flush=True)
    if args.chip:
        for call in calls:
            print(f"{site(call, hw).seconds * 1e6:9.1f} us  {str(call.problem)[:150]}")
        return
    nvrtc.compile_all(launches, hw.arch)
    print(f"compiled, {until - time.monotonic():.0f} s are left", flush=True)
    left = until - time.monotonic()
    for found in tune(calls, hw, top=args.top, seconds=left, folder=args.folder):
        print(
            f"{found.before_us:9.1f} to {found.us:9.1f} us of {found.tried}, "
            f"{len(found.refused)} refused: {str(found.problem)[:120]} | {found.kernel} "
            f"{found.config}",
            flush=True,
        )


if __name__ == "__main__":
    main()

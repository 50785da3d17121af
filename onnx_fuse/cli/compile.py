"""`onnx-fuse compile`: a model as one file that runs without NVRTC and without ONNX libraries."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import (
    PACKS,
    hardware_of,
    shape_sets,
    size_ranges,
    split_names,
    with_options,
)
from onnx_fuse.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from onnx_fuse.deploy import Compiled
    from onnx_fuse.program.problem import Hardware
    from onnx_fuse.report import Printer
    from onnx_fuse.training.trainer import Trainer

EXAMPLES = (
    "onnx-fuse compile model.onnx --target h200 --dim batch=1,8 sequence=128 -o model.fused",
    "onnx-fuse compile model.onnx --target h100,a100 --precision fp16 --input-shapes x:1,3,224,224",
    "onnx-fuse compile model.onnx --train step.toml --target h200 --dim batch=8 sequence=1..512",
)
OPTIONS = """
    target (--target GPU): Compile for these GPUs: h200, h100, a100, ..., or cuda for the one in
        this machine, which is the default.
    output (-o, --output OUT): Write to this file. The default is MODEL with the ending .fused.
    level (--level, 0 to 3): Fuse up to this level, as onnx-fuse optimize does.
    shapes (--input-shapes NAME:1,128 ...): Compile for these shapes of the inputs. A
        repeated name begins another program.
    dims (--dim SYMBOL=8 ...): Compile for these sizes, by the names that the model's inputs have
        for them: 8, several as 1,8 or 16..128:16, or 1..512 for all sizes from 1 to 512.
    adapter_rank (--adapter-rank, 1 or more): Also compile programs for low-rank adapters
        (session.add_adapter); the ranks of a batch's adapters may add up to this number.
    adapter_weights (--adapter-weights GLOB ...): Let only these weights have adapters. The default
        is all matrices that linear layers read.
    pack (--pack WHAT): Also compile programs without the padding of a batch, for sessions with the
        same pack: exact, or zero if an output has a row for each token.
    train (--train FILE.toml|FILE.yaml): Compile training instead, with the options of onnx-fuse
        train --config in this file, for each of its `gpus`. OUT is then a folder, for onnx-fuse
        train --compiled.
    """


@with_options(OPTIONS)
def compile(
    context: typer.Context,
    *,
    model: Path,
    target: list[str] | None = None,
    output: Path | None = None,
    precision: str = "fp32",
    level: int = 2,
    shapes: list[str] | None = None,
    dims: list[str] | None = None,
    adapter_rank: int | None = None,
    adapter_weights: list[str] | None = None,
    pack: str = "",
    train: Path | None = None,
    reports: show.Reports,
) -> None:
    """Compile MODEL for a GPU into one file that runs without NVRTC and without ONNX libraries.

    No GPU is needed. The file runs in the shapes and the precision that it is compiled for.
    """
    output = output or files.default_output(model, ".fused" if train is None else ".steps")
    where = "-o" if train is None else "-o DIR"
    files.check_paths({"MODEL": model, "--train": train}, {where: output, **reports.paths})
    from onnx_fuse import deploy
    from onnx_fuse.report.page import Overview

    printer = show.printer()
    try:
        targets = {name: hardware_of(name) for name in split_names(target) or ["cuda"]}
    except DeviceError as error:
        raise UsageError(
            f"this machine has no usable GPU ({error}): name the one that will run the file, as in "
            "--target h200"
        ) from error
    if adapter_rank is None and adapter_weights:
        raise UsageError("--adapter-weights is for --adapter-rank: give both")
    if (adapter_rank is not None or pack) and train is not None:
        raise UsageError("--adapter-rank and --pack are for inference: leave them or --train out")
    if pack not in PACKS:
        raise UsageError("--pack takes exact or zero")
    named, ranges = size_ranges(dims)
    largest = [f"{symbol}={high}" for symbol, (_, high) in ranges.items()]
    started = time.perf_counter()
    if train is not None:
        trainer = _trainer(context, model, train, targets)
        graph = trainer.graphs()["update"][0]
        sets = shape_sets(graph, shapes, [*named, *largest])
        steps = deploy.compile_training(trainer, output, shapes=sets, ranges=ranges)
        seconds = time.perf_counter() - started
        _show_training(printer, steps)
        printer.text(f"{output}: training in {trainer.precision}, in {seconds:.1f} s")
        graphs = {mode: one.modules for mode, one in steps.items()}
        written = {"model": str(model), "output": str(output), "kernels": graphs}
        reports.write(printer, written | {"seconds": seconds})
        return
    graph = files.load(model, str(model))
    sets = shape_sets(graph, shapes, [*named, *largest])
    built = files.named(
        str(model),
        lambda: deploy.compile(
            graph,
            output,
            targets=targets,
            shapes=sets,
            ranges=ranges,
            precision=precision,
            level=level,
            adapter_rank=adapter_rank or 0,
            adapter_weights=adapter_weights or ("*",),
            pack=PACKS[pack],
        ),
    )
    seconds = time.perf_counter() - started
    rows = [
        [name, targets[name].name, str(len(programs)), str(max(len(p.calls) for p in programs))]
        for name, programs in built.programs.items()
    ]
    printer.table("compiled", ["target", "GPU", "programs", "calls at most"], rows, left=2)
    for symbol, (low, high) in ranges.items():
        printer.text(f"{symbol} from {low} to {high}")
    printer.text(
        f"{built.modules} kernels, {built.weight_bytes / 1e6:,.1f} MB of weights, {precision}",
        f"{output}: {built.file_bytes / 1e6:,.1f} MB in {seconds:.1f} s",
    )
    data = {
        "model": str(model),
        "output": str(output),
        "precision": precision,
        "targets": {name: len(programs) for name, programs in built.programs.items()},
        "shapes": [{name: list(shape) for name, shape in s.items()} for s in built.shapes],
        "ranges": {symbol: list(bounds) for symbol, bounds in ranges.items()},
        "kernels": built.modules,
        "weight_bytes": built.weight_bytes,
        "file_bytes": built.file_bytes,
        "seconds": seconds,
    }

    def sections() -> Any:
        from onnx_fuse.report import timing

        return [
            section
            for name, programs in built.programs.items()
            for section in timing.predicted(programs[0], targets[name], name)  # others are alike
        ]

    reports.write(
        printer,
        data,
        overview=Overview(f"{output.name}: {built.file_bytes / 1e6:,.1f} MB"),
        device=", ".join(hw.name for hw in targets.values()),
        sections=sections,
    )


def _show_training(printer: Printer, steps: Mapping[str, Compiled]) -> None:
    rows = [
        [mode, str(len(programs)), str(one.modules), f"{one.file_bytes / 1e6:,.1f}"]
        for mode, one in steps.items()
        for programs in one.programs.values()
    ]
    printer.table("compiled", ["graph", "programs", "kernels", "MB"], rows, left=1)


def _trainer(
    context: typer.Context, model: Path, config: Path, targets: Mapping[str, Hardware]
) -> Trainer:
    """A Trainer that is only compiled, by the options of `onnx-fuse train` in a file.

    Raises UsageError for what they cannot be.
    """
    from onnx_fuse.cli.train import trainer_settings
    from onnx_fuse.training.trainer import Trainer

    if len(targets) > 1:
        raise UsageError("--train compiles for one GPU: name one --target")
    (hw,) = targets.values()
    commands: Any = context.find_root().command
    command = commands.get_command(context, "train")
    arguments = [str(model), "--data", str(model), "--config", str(config)]
    with command.make_context("train", arguments, parent=context) as options:
        settings = trainer_settings(model, options.params)
    gpus = options.params["gpus"] or 1
    ranks = gpus if gpus > 1 else False
    return Trainer(model, **settings, device="cuda", hardware=hw, distributed=ranks)

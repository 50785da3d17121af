"""The `onnx-fuse` command. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_fuse import __version__
from onnx_fuse.errors import CheckFailed, ModelError, OnnxFuseError, UsageError

if TYPE_CHECKING:
    from onnx_fuse import report
    from onnx_fuse.train import Trainer
    from onnx_fuse.validate import Check, GradientCheck

app = typer.Typer(
    name="onnx-fuse",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write what is shown as JSON.")
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write what is shown as HTML.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Device = Annotated[str, typer.Option(help="cpu (onnxruntime) or cuda (this project's kernels).")]
Inputs = Annotated[
    Path | None,
    typer.Option(metavar="FILE.npz", help="Arrays named like the inputs; default: generated."),
]
Precision = Annotated[
    str, typer.Option(metavar="NAME", help="On cuda: fp32, tf32, bf16x3, bf16x6, bf16 or fp16.")
]
ModelArg = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--input-shapes", metavar="NAME:1,128 ...", help="Fix the shapes of inputs; -1 stays free."
    ),
]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("-v", "--version", help="Print the version.")] = False,
) -> None:
    """Fuse, run, check, differentiate and train ONNX models."""
    if version:
        print(f"onnx-fuse {__version__}")
        raise typer.Exit


# ---- optimize --------------------------------------------------------------------------------


@app.command()
def optimize(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="An .onnx file.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="Default: MODEL with .fused.onnx."),
    ] = None,
    level: Annotated[int, typer.Option(min=0, max=3, help="0 canonicalize to 3.")] = 2,
    fuse: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Turn a fusion on, whatever the level.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Turn a fusion off.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the fusions and levels.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say which near misses were not fused, and why.")
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="GPU", help="And each kernel this GPU would run (h200, a100, ...; cuda: yours)."
        ),
    ] = None,
    precision: Precision = "fp32",
    inline: Annotated[
        bool, typer.Option("--inline", help="Write plain ai.onnx: fused ops as their bodies.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Compare with onnxruntime on the original.")
    ] = True,
    keep: Annotated[
        bool, typer.Option("--keep", help="Write the result even if the check fails.")
    ] = False,
    input_shapes: Shapes = None,
    external: Annotated[
        bool,
        typer.Option("--save-as-external-data", help="Weights into OUT.data beside the model."),
    ] = False,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Fuse MODEL into a file that still runs on stock onnxruntime, and check it."""
    printer = _printer()
    if list_:
        _list_fusions(printer, json, html)
        return
    if model is None or not model.name:
        raise UsageError("give the MODEL to optimize")
    output = output or model.with_suffix(".fused.onnx")
    _refuse_same(model, output)
    from onnx_fuse import bench, ir, passes, report

    _check_precision(precision)
    if precision != "fp32" and not target:
        raise UsageError(
            "--precision is of the kernels that --target lists; the file keeps its types"
        )
    hardware = _hardware(target) if target else None
    started = time.perf_counter()
    original = ir.read(model)
    before = report.summary(original, "original", model)
    graph = _load(original, str(model))
    shapes = _shapes(input_shapes)
    ir.fix_shapes(graph, shapes)
    found = passes.optimize(graph, level=level, fuse=_names(fuse), skip=_names(skip))
    result = ir.inline(graph) if inline else graph
    checked: Check | None = None
    with _written_beside(output) as draft:
        ir.save(result, draft, external=external, shapes=False)
        seconds = time.perf_counter() - started
        after = report.summary(result, "fused", draft)
        if check:
            checked = _check(model, draft, shapes=shapes)
        failed = checked is not None and not checked.ok
        if failed and not keep:
            for path in draft.parent.iterdir():
                path.unlink()
    _show_optimize(printer, before, after, found, checked, seconds, explain=explain)
    kernels = []
    if hardware is not None:
        lowered = bench.program(graph, hardware, precision=precision)
        kernels = _show_kernels(printer, lowered, hardware)
    data = {
        "input": str(model),
        "output": None if failed and not keep else str(output),
        "fusions": dict(found.fusions),
        "not_fused": [{"nodes": list(r.nodes), "reason": r.reason} for r in found.not_fused],
        "notes": list(found.notes),
        "nodes": {"before": before.nodes, "after": after.nodes},
        "bytes": {"before": before.bytes, "after": after.bytes},
        "seconds": seconds,
        "models": [report.as_dict(before), report.as_dict(after)],
        "check": checked.to_dict() if checked else None,
        "kernels": kernels,
    }
    _write_reports(printer, data, json, html)
    if failed:
        raise CheckFailed(
            f"{model}: the fused model differs from the original "
            + (f"(written all the same: {output})" if keep else "(nothing was written)")
            + ": run onnx-fuse validate --blame"
        )
    printer.text(f"wrote {output}")


def _refuse_same(model: Path, output: Path) -> None:
    same = output.resolve() == model.resolve()
    if same or (output.exists() and model.exists() and output.samefile(model)):
        raise UsageError(f"{output}: the output is the input: choose another with -o")
    if output.exists() and not output.is_file():
        raise ModelError(f"{output}: cannot be written: it is no plain file")


@contextlib.contextmanager
def _written_beside(output: Path) -> Iterator[Path]:
    """A path in a new folder beside `output`; what is there at the end is moved to `output`."""
    try:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
            yield Path(folder) / output.name
            # The data file first: a model never stands without its weights.
            for path in sorted(Path(folder).iterdir(), key=lambda p: p.name == output.name):
                target = output.parent / path.name
                if target != output and target.exists() and not output.exists():
                    raise ModelError(f"{target}: already there, and not of {output}")
                os.replace(path, target)
    except OSError as error:
        raise ModelError(f"{output}: cannot be written: {error.strerror or error}") from error


def _show_optimize(
    printer: report.Printer,
    before: report.Summary,
    after: report.Summary,
    found: Any,
    checked: Check | None,
    seconds: float,
    *,
    explain: bool,
) -> None:
    from onnx_fuse import report

    rows = report.models_rows([before, after])
    rows.append(["seconds", "", f"{seconds:.2f}"])
    printer.table("", ["", before.name, after.name], rows)
    if found.fusions:
        printer.table(
            "fusions", ["fused op", "count"], [[k, str(v)] for k, v in found.fusions.items()]
        )
    else:
        printer.text("fusions: none found (--explain says why)")
    if explain:
        rows = [[", ".join(r.nodes), r.reason] for r in found.not_fused]
        printer.table("not fused", ["nodes", "reason"], rows, left=2)
    notes = found.notes if explain else found.notes[:_NOTES]
    printer.text(*(f"note: {note}" for note in notes))
    if len(found.notes) > len(notes):
        printer.text(f"note: {len(found.notes) - len(notes)} more with --explain")
    if checked:
        printer.text(*report.check_lines(checked))


def _hardware(target: str) -> Any:
    """The Hardware of a GPU by its short name, or of the one in this machine ("cuda")."""
    from onnx_fuse.problem import CHIPS, Hardware

    if target == "cuda":
        from onnx_fuse.runtime import device

        device.probe()
        return Hardware.detect()
    chips = {name.lower(): hw for name, hw in CHIPS.items()}
    if target.lower() not in chips:
        raise UsageError(f"--target {target}: choose cuda or one of {', '.join(chips)}")
    return chips[target.lower()]


def _show_kernels(printer: report.Printer, program: Any, hw: Any) -> list[dict[str, Any]]:
    """The table of a program's kernels, and the same as JSON."""
    from collections import Counter
    from dataclasses import asdict

    from onnx_fuse import bench
    from onnx_fuse.runtime.plan import plan

    sites = bench.sites(program, hw)
    rows = [
        [
            " ".join(s.nodes[:3]) + (" …" if len(s.nodes) > 3 else ""),
            f"{s.op} {s.kernel}",
            s.config,
            f"{s.seconds * 1e6:.1f}",
            f"{s.floor / s.seconds:.0%}",
            s.why,
        ]
        for s in sites
    ]
    head = ["nodes", "kernel", "config", "µs", "of floor", "why"]
    printer.table(f"kernels on {hw.name}, predicted", head, rows, left=3)
    refused = Counter((s.op, name, why) for s in sites for name, why in s.refused)
    rows = [[f"{op} {name}", why, str(count)] for (op, name, why), count in refused.items()]
    if rows:
        printer.table("kernels that cannot serve", ["kernel", "why", "sites"], rows, left=2)
    total = sum(s.seconds for s in sites)
    floor = sum(s.floor for s in sites)
    shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in program.inputs)
    printer.text(f"{len(sites)} calls, {total * 1e6:.1f} µs; their floors {floor * 1e6:.3g} µs")
    printer.text(f"at {shapes}", f"memory: {plan(program)}")
    for fallback in program.fallbacks:
        printer.text(f"on onnxruntime: {fallback}")
    return [asdict(s) for s in sites]


_NOTES = 3  # shown without --explain


def _list_fusions(printer: report.Printer, json: Path | None, html: Path | None) -> None:
    from onnx_fuse import passes

    printer.table(
        "levels", ["level", "what"], [[str(k), v] for k, v in passes.LEVELS.items()], left=2
    )
    rows = [[name, str(level)] for name, level in passes.FUSIONS.items()]
    printer.table("fusions", ["name (for --fuse, --skip)", "from level"], rows)
    levels = {str(k): v for k, v in passes.LEVELS.items()}
    _write_reports(printer, {"levels": levels, "fusions": dict(passes.FUSIONS)}, json, html)


# ---- validate, run ---------------------------------------------------------------------------


@app.command()
def validate(
    model: ModelArg,
    against: Annotated[
        Path | None,
        typer.Option(metavar="ORIGINAL", help="The original; default: MODEL against its fusion."),
    ] = None,
    grad: Annotated[
        bool, typer.Option("--grad", help="Check every gradient by central differences.")
    ] = False,
    blame: Annotated[
        bool, typer.Option("--blame", help="Trace a difference to the node that makes it.")
    ] = False,
    device: Device = "cpu",
    precision: Precision = "fp32",
    inputs: Inputs = None,
    input_shapes: Shapes = None,
    rtol: Annotated[float | None, typer.Option(min=0.0, help="Of the largest value.")] = None,
    atol: Annotated[float | None, typer.Option(min=0.0, help="Absolute.")] = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Compare MODEL, or its fusion, with ORIGINAL under onnxruntime; see --device, --precision."""
    from onnx_fuse import ir, report

    printer = _printer()
    _check_device(device)
    _check_precision(precision)
    if precision != "fp32" and (device != "cuda" or grad or blame):
        raise UsageError("--precision is of --device cuda, without --grad and --blame")
    original = against or model
    candidate: Any = model
    source = _load(ir.read(original), str(original))
    if against is None:
        from onnx_fuse import passes

        candidate = source.clone()
        passes.optimize(candidate)
    else:
        ir.read(model)
    data: dict[str, Any] = {"model": str(model), "original": str(original)}
    checked = _check(
        original,
        candidate,
        shapes=_shapes(input_shapes),
        inputs=inputs,
        rtol=rtol,
        atol=atol,
        device=device,
        precision=precision,
        blame=blame,
    )
    printer.text(*report.check_lines(checked))
    data["check"] = checked.to_dict()
    failure = ""
    if not checked.ok:
        failure = f"differs from {original}"
        failure += f": {checked.culprits[0]}" if checked.culprits else ""
    elif grad:
        gradients = _check_gradients(model, inputs, device)
        data["gradients"] = gradients.to_dict()
        printer.text(*report.gradient_lines(gradients))
        if gradients.failed:
            first = gradients.failed[0]
            failure = f"the gradient of '{first.tensor}', read by {first.op}, is wrong"
    _write_reports(printer, data, json, html)
    if failure:
        raise CheckFailed(f"{model}: {failure}")


def _check_gradients(model: Path, inputs: Path | None, device: str) -> GradientCheck:
    from onnx_fuse import validate as checks

    def work() -> GradientCheck:
        feeds = checks.read_feeds(inputs, _load(model, str(model))) if inputs else None
        return checks.check_gradients(model, feeds=feeds, device=device)

    checked: GradientCheck = _guarded(work, str(model), device)
    return checked


@app.command()
def run(
    model: ModelArg,
    inputs: Inputs = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="OUT.npz", help="Save the outputs.")
    ] = None,
    device: Device = "cpu",
    precision: Precision = "fp32",
    input_shapes: Shapes = None,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Time by operator (as onnxruntime sees it), or by kernel."),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="On cuda: each kernel, its time and why it runs.")
    ] = False,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Run MODEL, fused, on given or generated inputs."""
    import numpy as np

    from onnx_fuse import bench, ir
    from onnx_fuse import validate as checks

    printer = _printer()
    _check_device(device)
    _check_precision(precision)
    if explain and device != "cuda":
        raise UsageError("--explain needs --device cuda; without a GPU: optimize --target h200")
    graph = _load(model, str(model))
    feeds = checks.read_feeds(inputs, graph) if inputs else None
    ir.fix_shapes(graph, _shapes(input_shapes))
    result = _guarded(
        lambda: bench.run_once(graph, feeds, device=device, precision=precision, profile=profile),
        str(model),
        device,
    )
    rows = [
        [name, str(y.dtype), str(list(y.shape)), _range(y)] for name, y in result.outputs.items()
    ]
    printer.table("outputs", ["name", "dtype", "shape", "min … max"], rows, left=3)
    if result.operators:
        rows = [
            [op, str(n), f"{us:,.0f}", f"{us / result.total_us:.1%}"]
            for op, (n, us) in result.operators.items()
        ]
        printer.table("time", ["operator", "runs", "µs", "share"], rows)
    kernels = _show_kernels(printer, result.program, result.hardware) if explain else []
    printer.text(f"{result.milliseconds:.2f} ms on {device}")
    data = {
        "model": str(model),
        "device": device,
        "milliseconds": result.milliseconds,
        "inputs": {k: list(v.shape) for k, v in result.feeds.items()},
        "outputs": {
            k: {"dtype": str(v.dtype), "shape": list(v.shape)} for k, v in result.outputs.items()
        },
        "operators": {k: {"runs": n, "us": us} for k, (n, us) in result.operators.items()},
        "kernels": kernels,
        "output": str(output) if output else None,
    }
    if output:
        _refuse_same(model, output)
        with _written_beside(output) as draft, draft.open("wb") as file:
            np.savez(file, **result.outputs)
    _write_reports(printer, data, json, html)


def _range(array: Any) -> str:
    if not array.size or array.dtype.kind not in "biuf":
        return ""
    return f"{array.min():.6g} … {array.max():.6g}"


# ---- gradient, train -------------------------------------------------------------------------


@app.command()
def gradient(
    model: ModelArg,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="Default: MODEL with .grad.onnx."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A loss, or an output that is one; default: the vjp."),
    ] = None,
    wrt: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Weights, inputs; default: weights.")
    ] = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Write the graph that computes MODEL's gradients, as ONNX that any runtime runs."""
    from onnx_fuse import autodiff, ir, report

    printer = _printer()
    output = output or model.with_suffix(".grad.onnx")
    _refuse_same(model, output)
    original = ir.read(model)
    result = autodiff.gradient(_load(original, str(model)), wrt=_names(wrt) or None, loss=loss)
    ir.save(result, output)
    found = [report.summary(original, "model", model), report.summary(result, "gradient", output)]
    printer.table("", ["", *(m.name for m in found)], report.models_rows(found))
    printer.text(f"wrote {output}")
    data = {"input": str(model), "output": str(output), "models": [*map(report.as_dict, found)]}
    _write_reports(printer, data, json, html)


@app.command()
def train(
    model: ModelArg,
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE.npz",
            help="Arrays named like the inputs, and labels; or a folder of .npy.",
        ),
    ],
    loss: Annotated[
        str, typer.Option(metavar="NAME", help="cross_entropy, mse, ...; or an output that is one.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="Default: MODEL with .tuned.onnx."),
    ] = None,
    val: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Evaluated after each epoch.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the data.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples a step.")] = 32,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help="sgd, adam, adamw, adagrad, lion.")
    ] = "adamw",
    lr: Annotated[float, typer.Option(help="Learning rate, at its peak.")] = 1e-3,
    schedule: Annotated[
        str, typer.Option(metavar="NAME", help="constant, linear, cosine, step.")
    ] = "constant",
    warmup: Annotated[int, typer.Option(min=0, help="Updates of growing rate.")] = 0,
    lr_every: Annotated[
        int, typer.Option(min=1, help="step: updates between decays by 10.")
    ] = 1000,
    momentum: Annotated[float | None, typer.Option(help="Of sgd.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Default: the optimizer's.")] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="Bound on the norm of all gradients together.")
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Steps an update.")] = 1,
    ignore_index: Annotated[
        int | None, typer.Option(help="Label that does not count; default: -100.")
    ] = None,
    label_smoothing: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Of cross_entropy.")
    ] = None,
    logits: Annotated[
        str | None, typer.Option(metavar="NAME", help="Output the loss is of; default: the first.")
    ] = None,
    trainable: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Weights that train; default: all.")
    ] = None,
    freeze: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Weights that stay.")
    ] = None,
    level: Annotated[
        int | None,
        typer.Option(min=0, max=3, help="Of fusions; default: 2 on a GPU in 16 bits, else 0."),
    ] = None,
    free_batch: Annotated[
        bool, typer.Option("--free-batch", help="Open a batch that was exported fixed, if it can.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the order and of Dropout.")] = 0,
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="As for run; on the CPU fp32 or fp16.")
    ] = "fp32",
    device: Device = "cpu",
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Save the run there after each epoch.")
    ] = None,
    every: Annotated[
        int | None, typer.Option("--checkpoint-every", min=1, help="And after each N steps.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in DIR, if any.")
    ] = False,
    curve: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write the loss curve.")
    ] = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Fine-tune MODEL, and write it as it was but for its weights."""
    from onnx_fuse import fit, optim, report
    from onnx_fuse.data import load
    from onnx_fuse.train import Trainer

    printer = _printer()
    output = output or model.with_suffix(".tuned.onnx")
    _refuse_same(model, output)
    if resume and checkpoint is None:
        raise UsageError("--resume needs the folder: --checkpoint DIR")
    arrays, held_out = load(data), load(val) if val else None
    loss_options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    trainer = Trainer(
        model,
        loss=loss,
        loss_options={k: v for k, v in loss_options.items() if v is not None},
        optimizer=optim.make(optimizer, lr=lr, momentum=momentum, weight_decay=weight_decay),
        output=logits,
        trainable=_names(trainable) or None,
        frozen=_names(freeze),
        clip_norm=clip_norm,
        accumulate=accumulate,
        free_batch=free_batch,
        level=level,
        seed=seed,
        precision=precision,
        device=device,
    )
    examples = fit.check(trainer, arrays, batch_size)
    steps = epochs * fit.steps_per_epoch(trainer, examples, batch_size)
    span = steps // accumulate if schedule in ("linear", "cosine") else 0
    trainer.schedule(optim.Schedule(lr, schedule, span, warmup, every=lr_every))
    if checkpoint is not None:
        fit.begin(trainer, checkpoint, resume=resume)
    weights = sum(a.size for a in trainer.weights().values())
    printer.text(f"{model}: {weights:,} weights in {len(trainer.weights())} tensors train")
    with report.progress(printer, steps, f"of {epochs}") as watch:
        history = fit.fit(
            trainer,
            arrays,
            epochs=epochs,
            batch_size=batch_size,
            validation=held_out,
            folder=checkpoint,
            every=every,
            watch=lambda h: watch(len(h.losses), h.batch_size, h.losses[-1], h.epochs),
        )
    with _written_beside(output) as draft:
        trainer.save(draft)
        _check_saved(draft, trainer, {k: a[:batch_size] for k, a in arrays.items()})
    if curve is not None:
        report.write_whole(curve, fit.curve(history, f"{model.name}: {loss}"))
    printer.text(f"wrote {output}")
    result = {"model": str(model), "output": str(output), "weights": weights}
    rates = [trainer.optimizer.rate(i // accumulate) for i in range(len(history.losses))]
    found = {"losses": history.losses, "rates": rates, "epochs": history.epochs}
    _write_reports(printer, result | found, json, html)


def _check_saved(draft: Path, trainer: Trainer, feeds: Mapping[str, Any]) -> None:
    """The file under stock onnxruntime against the trainer; a file that differs does not stay."""
    from onnx_fuse import validate as checks
    from onnx_fuse.runtime import ort

    saved = _load(draft, str(draft))
    if checks.random_outputs(saved) or any(
        a.name == "training_mode" for node in saved.graph for a in node.attributes.values()
    ):
        return  # it computes by the statistics of the batch, or at random, as it did before
    expected = trainer.evaluate(feeds).outputs
    session = ort.session(draft)
    own = {v.name: feeds[v.name] for v in session.get_inputs()}
    tolerance = checks.tolerance_of(saved)
    for (name, y), got in zip(expected.items(), ort.run(session, own, list(expected)), strict=True):
        found = checks.difference(name, y, got, tolerance)
        if not found.ok:
            draft.unlink()
            raise CheckFailed(
                f"'{name}' of the saved model differs from the trained state by {found.max_abs:.3g}"
                " (nothing was written)"
            )


# ---- bench, inspect, doctor ------------------------------------------------------------------


@app.command()
def bench(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="An .onnx file; with --tune also an operator.")
    ],
    inputs: Inputs = None,
    input_shapes: Shapes = None,
    device: Device = "cpu",
    repeat: Annotated[int, typer.Option(min=1, help="Timed rounds of both.")] = 50,
    threads: Annotated[
        int, typer.Option(min=0, help="0: as onnxruntime likes; 1 is timed by CPU time.")
    ] = 0,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Time the GPU's kernels instead, and keep the fastest in use."),
    ] = False,
    shape: Annotated[
        list[str] | None, typer.Option(metavar="M,K,N", help="Of an operator to tune.")
    ] = None,
    precision: Precision = "fp32",
    limit: Annotated[float, typer.Option(min=1, help="Seconds that tuning may take.")] = 120,
    top: Annotated[int, typer.Option(min=1, help="Configurations tried of each kernel.")] = 6,
    records: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep what is tuned there, not in the cache.")
    ] = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Time MODEL as it is and fused, taking turns; print the ratio.

    Under onnxruntime, or with --device cuda on the GPU (level 0 and 2, one launch a run, feeds
    and outputs there). With --tune: time the kernels that serve MODEL (or an operator) on this GPU.
    """
    from onnx_fuse import bench as timing
    from onnx_fuse import validate as checks

    printer = _printer()
    if tune:
        calls, hw = _to_tune(model, inputs, input_shapes, shape or [], precision)
        data = _tune(printer, calls, hw, limit, top, records)
        _write_reports(printer, {"model": str(model), "gpu": hw.name, "tuned": data}, json, html)
        return
    if shape:
        raise UsageError("--shape is an operator's, and operators are timed with --tune")
    _check_device(device)
    _check_precision(precision)
    if precision != "fp32" and device != "cuda":
        raise UsageError("--precision is of --device cuda, and of --tune")
    if threads and device == "cuda":
        raise UsageError("--threads is of --device cpu")
    graph = _load(model, str(model))
    feeds = checks.read_feeds(inputs, graph) if inputs else None
    shapes = _shapes(input_shapes)
    result = _guarded(
        lambda: timing.compare(
            model, graph, feeds, shapes=shapes, repeat=repeat, threads=threads, device=device,
            precision=precision,
        ),
        str(model),
        device,
    )  # fmt: skip
    rows = [
        [name, f"{t.median:.4g}", f"{t.low:.4g}", f"{t.high:.4g}"]
        for name, t in (("original", result.original), ("fused", result.fused))
    ]
    where = f"{_hardware('cuda').name}, {precision}" if device == "cuda" else "onnxruntime, CPU"
    printer.table(where, ["model", "median ms", "10 %", "90 %"], rows)
    low, high = result.noise
    printer.text(
        f"fused / original: {result.ratio:.3f} ({low:.3f} to {high:.3f} among pairs of sessions)"
    )
    _write_reports(printer, {"model": str(model)} | result.to_dict(), json, html)


def _to_tune(
    model: Path, inputs: Path | None, input_shapes: list[str] | None, shape: list[str], how: str
) -> tuple[list[Any], Any]:
    """The calls to tune, of a model or of an operator at each of `shape`, and the Hardware."""
    from onnx_fuse import ir, tune
    from onnx_fuse import validate as checks
    from onnx_fuse.session import InferenceSession

    _check_precision(how)
    if not model.exists() and str(model) in tune.OPS:
        op = str(model)
        sizes = [_mkn(text) for text in shape]
        if not sizes:
            raise UsageError(f"{op} is tuned at --shape M,K,N")
        hw = _hardware("cuda")
        programs = [tune.program_of(op, size, how, hw) for size in sizes]
        return [call for p in programs for call in tune.calls_of(p, op)], hw
    if not model.exists():
        raise UsageError(f"{model} is neither a file nor one of {', '.join(tune.OPS)}")
    graph = _load(model, str(model))
    ir.fix_shapes(graph, _shapes(input_shapes) or {})
    session = InferenceSession(graph, device="cuda", precision=how)
    feeds = checks.read_feeds(inputs, graph) if inputs else None
    feeds = feeds or checks.generate(graph, lambda f: session.run(None, f))[0][0]
    program, hw = session.program(feeds)
    return tune.calls_of(program), hw


def _mkn(text: str) -> tuple[int, int, int]:
    try:
        m, k, n = (int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--shape {text}: give M,K,N") from None
    return m, k, n


def _tune(
    printer: report.Printer, calls: list[Any], hw: Any, limit: float, top: int, folder: Path | None
) -> list[dict[str, Any]]:
    """Tune with a bar; the table of what won, and the same as JSON."""
    from dataclasses import asdict

    from onnx_fuse import report, tune

    with report.bar(printer, len(calls)) as watch:
        work = tune.tune(calls, hw, top=top, seconds=limit, folder=folder, watch=watch)
        found = list(work)
    rows = [
        [
            str(t.problem),
            f"{t.kernel} {t.config}",
            f"{t.us:.1f}",
            f"{t.before_us:.1f}",
            f"{t.floor:.0%}",
            f"{t.tried}",
        ]
        for t in found
    ]
    head = ["problem", "fastest", "µs", "before", "of floor", "tried"]
    printer.table(f"kernels on {hw.name}", head, rows, left=2)
    for t in found:
        for name in t.refused:
            printer.text(f"left out, another result: {name} at {t.problem}")
    if len(found) < len(calls):
        printer.text(f"{len(calls) - len(found)} of {len(calls)} problems not reached: --limit")
    return [asdict(t) | {"problem": str(t.problem)} for t in found]


@app.command()
def inspect(
    models: Annotated[list[Path], typer.Argument(metavar="MODEL ...", help="One or more files.")],
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Show models side by side: inputs, outputs, operators, sizes."""
    from onnx_fuse import ir, report

    printer = _printer()
    found = [report.summary(ir.read(path), path.name, path) for path in models]
    printer.table("", ["", *(m.name for m in found)], report.models_rows(found))
    _write_reports(printer, {"models": [report.as_dict(m) for m in found]}, json, html)


@app.command()
def doctor(json: Json = None, html: Html = None, debug: Debug = False) -> None:
    """Show versions, devices and settings, and try the portable backend."""
    import platform
    from importlib import metadata

    from onnx_fuse import config
    from onnx_fuse.runtime import ort

    printer = _printer()
    installed = {d.name.lower().replace("_", "-"): d.version for d in metadata.distributions()}
    found = {"python": platform.python_version(), "onnx-fuse": __version__}
    found |= {name: installed.get(name, "not installed") for name in _PACKAGES}
    printer.table("versions", ["package", "version"], [[k, v] for k, v in found.items()])
    values = {
        v.name: int(v.value) if isinstance(v.value, bool) else v.value for v in config.VARIABLES
    }
    variables = {
        v.name: ("" if values[v.name] is None else str(values[v.name]), v.help)
        for v in config.VARIABLES
    }
    rows = [[name, value, text] for name, (value, text) in variables.items()]
    printer.table("settings", ["variable", "value", "what"], rows, left=3)
    cpu = ort.guarded(_try_onnxruntime, "onnxruntime")
    gpu = _gpu()
    printer.text(f"cpu: {cpu}", *(f"cuda: {line}" for line in gpu))
    data = {
        "versions": found,
        "settings": {name: value for name, (value, _) in variables.items()},
        "cpu": cpu,
        "cuda": gpu,
    }
    _write_reports(printer, data, json, html)


_PACKAGES = (
    *("numpy", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "ml-dtypes", "safetensors"),
    *("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvmath-python"),
)


def _try_onnxruntime() -> str:
    """Run a small fused model, so that a broken installation shows here."""
    import numpy as np

    from onnx_fuse import ir
    from onnx_fuse.session import InferenceSession

    model = ir.text_model("agraph (float[N] x) => (float[N] y) { y = Relu(x) }")
    [y] = InferenceSession(model).run(None, {"x": np.array([-1, 2], np.float32)})
    return "ok" if y.tolist() == [0, 2] else f"wrong: Relu([-1, 2]) gave {y.tolist()}"


def _gpu() -> list[str]:
    """The GPU as the kernels see it, or what is missing and what mends it."""
    from onnx_fuse.kernels import jit
    from onnx_fuse.problem import Hardware
    from onnx_fuse.runtime import device

    if faults := device.faults():
        return [f"not usable: {fault}" for fault in faults]
    hw = Hardware.detect()
    driver = f"{hw.driver // 1000}.{hw.driver % 1000 // 10}"
    return [f"ok: {hw.name} ({hw.arch}), driver for CUDA {driver}, NVRTC {jit.check_compiler()}"]


# ---- shared ----------------------------------------------------------------------------------


def _printer() -> report.Printer:
    from onnx_fuse.report import Printer

    return Printer()


def _write_reports(
    printer: report.Printer, data: Mapping[str, Any], json: Path | None, html: Path | None
) -> None:
    from onnx_fuse import report

    if json:
        report.write_json(json, data)
    if html:
        printer.html(html)


def _load(model: Any, name: str) -> Any:
    """`session.load`, with the file's name in the error also where the model is parsed already."""
    from onnx_fuse.session import load

    try:
        return load(model)
    except ModelError as error:
        raise ModelError(str(error).replace("model: ", f"{name}: ", 1)) from error


def _check(
    original: Path,
    candidate: Any,
    *,
    shapes: Mapping[str, Sequence[int]],
    inputs: Path | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    device: str = "cpu",
    precision: str = "fp32",
    blame: bool = False,
) -> Check:
    from onnx_fuse import validate as checks

    def work() -> Check:
        feeds = [checks.read_feeds(inputs, _load(original, str(original)))] if inputs else None
        return checks.validate(
            original,
            candidate,
            feeds=feeds,
            shapes=shapes,
            rtol=rtol,
            atol=atol,
            device=device,
            precision=precision,
            find_culprit=blame,
        )

    checked: Check = _guarded(work, str(original), device)
    return checked


def _guarded(work: Callable[[], Any], name: str, device: str) -> Any:
    """`work()` where a crash of onnxruntime cannot take this process along."""
    from onnx_fuse.runtime import ort

    if device == "cpu":
        return ort.guarded(work, name)
    with ort.faults(name):  # a CUDA context does not survive a fork
        return work()


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: choose cpu or cuda")


def _check_precision(precision: str) -> None:
    from onnx_fuse.problem import PRECISIONS

    if precision not in PRECISIONS:
        raise UsageError(f"--precision {precision}: choose one of {', '.join(PRECISIONS)}")


def _names(values: Sequence[str] | None) -> list[str]:
    return [name for value in values or () for name in value.split(",") if name]


def _shapes(values: Sequence[str] | None) -> dict[str, list[int]]:
    """`NAME:1,128` to {NAME: [1, 128]}; the name itself may hold colons."""
    shapes = {}
    for value in values or ():
        name, _, dims = value.rpartition(":")
        try:
            shapes[name] = [int(d) for d in dims.split(",")] if dims else []
        except ValueError as error:
            raise UsageError(f"--input-shapes {value}: expected NAME:1,128") from error
        if not name or any(d < -1 for d in shapes[name]):
            raise UsageError(f"--input-shapes {value}: expected NAME:1,128")
    return shapes


_SHAPE = re.compile(r".+:-?\d+(,-?\d+)*")


def expand(arguments: Sequence[str]) -> list[str]:
    """`--input-shapes a:1,2 b:3` to one option a value, which is all the parser knows."""
    result: list[str] = []
    inside = False
    for argument in arguments:
        if inside and _SHAPE.fullmatch(argument) and result[-1] != "--input-shapes":
            result.append("--input-shapes")
        elif argument.startswith("-") or not _SHAPE.fullmatch(argument):
            inside = False
        inside = inside or argument == "--input-shapes"
        result.append(argument)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: every fault becomes an exit code and one line on stderr."""
    arguments = expand(sys.argv[1:] if arguments is None else arguments)
    sys.exit(run_command(arguments))


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    debug = "--debug" in arguments
    try:
        code = app(arguments, prog_name="onnx-fuse", standalone_mode=False)
        sys.stdout.flush()
        if code == _INTERRUPTED:  # typer's own answer to Ctrl-C
            return _fail("interrupted", code)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output left; nobody is there to be told.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except OnnxFuseError as error:
        if debug:
            raise
        return _fail(str(error), error.exit_code)
    except (MemoryError, OSError) as error:
        if debug:
            raise
        if isinstance(error, MemoryError):
            return _fail("out of memory", 1)
        return _fail(f"{error.filename or 'standard output'}: {error.strerror or error}", 1)
    except Exception as error:
        if isinstance(error, _USAGE):
            error.show()
            return 2
        if debug:
            raise
        return _fail(f"internal error: {type(error).__name__}: {error} (--debug shows where)", 1)


_INTERRUPTED = 130
# The parser's own errors; their base class has no public name in typer.
_USAGE: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def _fail(text: str, code: int) -> int:
    line = " ".join(text.split())
    with contextlib.suppress(OSError):
        print(f"onnx-fuse: {line}", file=sys.stderr)
    return code

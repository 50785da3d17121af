"""`onnx-fuse train`: fine-tune a model and write it with its new weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import (
    Debug,
    Device,
    Dims,
    Html,
    Json,
    ModelArg,
    Shapes,
    Trace,
    parse_dims,
    parse_shapes,
    split_names,
)
from onnx_fuse.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from onnx_fuse.report.page import Page
    from onnx_fuse.training.trainer import Trainer


EXAMPLES = (
    "onnx-fuse train model.onnx --data train.npz --loss cross_entropy --epochs 3 -o tuned.onnx",
    "onnx-fuse train model.onnx --data train.npz --val test.npz --loss mse --lr 3e-4 "
    "--schedule cosine --checkpoint run --resume",
)


def train(
    context: typer.Context,
    model: ModelArg,
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            "--inputs",
            metavar="FILE.npz",
            help="Train on these arrays, which have the names of the inputs, and labels. A folder "
            "of .npy files is mapped instead of read.",
        ),
    ],
    loss: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Minimize this loss: cross_entropy, nll, mse, l1, huber, bce_with_logits, or a "
            "scalar output.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="Write to this file. The default is MODEL with the ending .tuned.onnx.",
        ),
    ] = None,
    val: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Evaluate on these arrays after each epoch."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Go over the data this many times.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Take this many examples in a step.")] = 32,
    optimizer: Annotated[
        str,
        typer.Option(metavar="NAME", help="Update by sgd, adam, adamw, adagrad or lion."),
    ] = "adamw",
    lr: Annotated[float, typer.Option(help="Set the learning rate, at its peak.")] = 1e-3,
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Change the rate over the run: constant, linear, cosine or step."
        ),
    ] = "constant",
    warmup: Annotated[
        int, typer.Option(min=0, help="Let the rate grow over this many updates at first.")
    ] = 0,
    lr_every: Annotated[
        int,
        typer.Option(min=1, help="Divide the rate by 10 each time after this many updates (step)."),
    ] = 1000,
    momentum: Annotated[float | None, typer.Option(help="Set the momentum of sgd.")] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="Set the weight decay, instead of the optimizer's default.")
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="Bound the norm of all gradients together.")
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Update once in this many steps.")] = 1,
    ignore_index: Annotated[
        int | None, typer.Option(help="Leave out labels of this number. The default is -100.")
    ] = None,
    label_smoothing: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Smooth the labels of cross_entropy.")
    ] = None,
    logits: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Compute the loss from this output, not from the first."),
    ] = None,
    trainable: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Train these weights. The default is all."),
    ] = None,
    freeze: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Leave these weights as they are.")
    ] = None,
    tie: Annotated[
        bool, typer.Option("--tie", help="Train a weight that the file stores twice as one.")
    ] = False,
    untie: Annotated[
        bool,
        typer.Option(
            "--untie", help="Give each reader of a tensor of one repeated number its own weight."
        ),
    ] = False,
    level: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=3,
            help="Fuse up to this level. The default is 2 on a GPU in 16 bits, and otherwise 0.",
        ),
    ] = None,
    free_batch: Annotated[
        bool,
        typer.Option(
            "--free-batch", help="Train with another batch size than the one that MODEL fixes."
        ),
    ] = False,
    input_shapes: Shapes = None,
    dim: Dims = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed the order of the data and Dropout.")] = 0,
    precision: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Compute in this precision: fp32, tf32, bf16x3, bf16x6, bf16 or fp16; on the CPU "
            "fp32 or fp16.",
        ),
    ] = "fp32",
    device: Device = "cpu",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Keep a step within this much GPU memory, such as 6GiB, by computing results a "
            "second time in the backward; min asks for the least possible.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Save the run in this folder after each epoch."),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option("--checkpoint-every", min=1, help="Save it after this many steps, too."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue from the newest checkpoint in the folder, if there is one."
        ),
    ] = False,
    curve: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write the loss curve to this file.")
    ] = None,
    trace: Trace = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Fine-tune MODEL, and write the same graph with its new weights."""
    output = output or files.default_output(model, ".tuned.onnx")
    files.check_paths(
        {"MODEL": model, "--data": data, "--val": val},
        {
            "-o": files.with_weights(output),
            "--checkpoint": checkpoint,
            "--curve": curve,
            "--trace": trace,
            "--json": json,
            "--html": html,
        },
    )
    from onnx_fuse import report
    from onnx_fuse.files import written
    from onnx_fuse.report import trace as traces
    from onnx_fuse.report import training
    from onnx_fuse.training import checkpoint as folders
    from onnx_fuse.training import fit, optim
    from onnx_fuse.training.data import load
    from onnx_fuse.training.trainer import Trainer

    printer = show.printer()
    if resume and checkpoint is None:
        raise UsageError("--resume needs the folder of the run: add --checkpoint DIR")
    if checkpoint is not None:
        context.with_resource(folders.locked(checkpoint))
    arrays, held_out = load(data), load(val) if val else None
    loss_options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    trainer = Trainer(
        model,
        loss=loss,
        loss_options={k: v for k, v in loss_options.items() if v is not None},
        optimizer=optim.make(optimizer, lr=lr, momentum=momentum, weight_decay=weight_decay),
        output=logits,
        trainable=split_names(trainable) or None,
        frozen=split_names(freeze),
        clip_norm=clip_norm,
        accumulate=accumulate,
        free_batch=free_batch,
        shapes=parse_shapes(input_shapes),
        dims=parse_dims(dim),
        tie=tie,
        untie=untie,
        level=level,
        seed=seed,
        precision=precision,
        device=device,
        memory=memory,
    )
    for note in trainer.notes:
        printer.text(f"note: {note}")
    examples = fit.check(trainer, arrays, batch_size)
    steps = epochs * fit.steps_per_epoch(trainer, examples, batch_size)
    span = steps // accumulate if schedule in ("linear", "cosine") else 0
    trainer.schedule(optim.Schedule(lr, schedule, span, warmup, every=lr_every))
    if checkpoint is not None:
        fit.start_or_resume(trainer, checkpoint, resume=resume)
    weights = sum(a.size for a in trainer.weights().values())
    printer.text(f"{model}: {weights:,} weights in {len(trainer.weights())} tensors train")

    def page(history: Mapping[str, Any], refresh: float) -> Page:
        losses = history["losses"]
        return show.page(
            printer,
            {"model": str(model)},
            sections=training.sections({"": history}) if losses else [],
            verdict=f"loss {losses[-1]:.4g} after {len(losses)} steps"
            + (", still training" if refresh else ""),
            device=f"{device}, {precision}",
            refresh=refresh,
        )

    live = training.Live(html, page)
    with report.progress(printer, steps, f"of {epochs}") as watch:

        def step(h: fit.History) -> None:
            watch(len(h.losses), h.batch_size, h.losses[-1], h.epochs)
            live(vars(h))

        history = fit.fit(
            trainer,
            arrays,
            epochs=epochs,
            batch_size=batch_size,
            validation=held_out,
            folder=checkpoint,
            every=every,
            watch=step,
        )
    if trainer.recompute:
        printer.text(trainer.recompute)
    with written(output) as draft:
        trainer.save(draft)
        _check_saved(draft, trainer, {k: a[:batch_size] for k, a in arrays.items()})
    if curve is not None:
        report.write_whole(curve, fit.curve(history, f"{model.name}: {loss}"))
    printer.text(f"wrote {output}")
    result = {
        "model": str(model),
        "output": str(output),
        "weights": weights,
        "notes": trainer.notes,
    }
    rates = [trainer.optimizer.rate(i // accumulate) for i in range(len(history.losses))]
    found = {"losses": history.losses, "rates": rates, "epochs": history.epochs}
    if trace is not None:
        traces.write(trace, str(model), live.events())
    show.write_reports(printer, result | found, json, None)
    if html is not None:
        show.write_page(html, page(vars(history) | found, 0.0))


def _check_saved(draft: Path, trainer: Trainer, feeds: Mapping[str, Any]) -> None:
    """Compare the file on stock onnxruntime with the trainer, and delete a file that differs.

    Raises CheckFailed for one.
    """
    from onnx_fuse.runtime import ort
    from onnx_fuse.validation.compare import difference, random_outputs, tolerance_of

    saved = files.load(draft, str(draft))
    if random_outputs(saved) or any(
        a.name == "training_mode" for node in saved.graph for a in node.attributes.values()
    ):
        return  # its outputs depend on the batch, or on random numbers, as they did before
    session = ort.session(draft)
    if trainer.exported_batch:  # its batch is fixed still
        feeds = {name: array[: trainer.exported_batch] for name, array in feeds.items()}
    expected = trainer.evaluate(feeds).outputs
    own = {v.name: feeds[v.name] for v in session.get_inputs()}
    tolerance = tolerance_of(saved)
    for (name, y), got in zip(expected.items(), ort.run(session, own, list(expected)), strict=True):
        found = difference(name, y, got, tolerance)
        if not found.ok:
            draft.unlink()
            raise CheckFailed(
                f"'{name}' of the saved model differs from the trained state by {found.max_abs:.3g}"
                " (nothing was written)"
            )

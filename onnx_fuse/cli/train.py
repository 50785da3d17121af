"""`onnx-fuse train`: fine-tune a model and write it with its new weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import parse_dims, parse_shapes, split_names, values_of, with_options
from onnx_fuse.cli.train_options import (
    Config,
    begin_ranks,
    parse_groups,
    parse_numbers,
    parse_terms,
    parse_values,
)
from onnx_fuse.errors import CheckFailed, NoGradientWarning, UsageError, unknown
from onnx_fuse.training.fit_options import FitOptions
from onnx_fuse.training.options import TrainingOptions

if TYPE_CHECKING:
    from onnx_fuse.report import Printer
    from onnx_fuse.report.page import Page, Section
    from onnx_fuse.training.history import History


EXAMPLES = (
    "onnx-fuse train model.onnx --data train.npz --loss cross_entropy --epochs 3 -o tuned.onnx",
    "onnx-fuse train model.onnx --data train.npz --val test.npz --loss mse --lr 3e-4 "
    "--schedule cosine --checkpoint run --resume",
)
OPTIONS = """
    data (--data, --inputs FILE.npz): Train on these arrays, named like the inputs, and labels. Or
        give a folder of .npy files, which are mapped instead of read; a .csv or .jsonl file with
        such columns (x.0, x.1, ... for several numbers); or a folder with a folder of images for
        each class.
    image_mean (--image-mean R,G,B): Subtract this from the pixels of images, which are from 0 to 1.
    image_std (--image-std R,G,B): Divide them by this.
    destination (-o, --output OUT): Write to this file. The default is MODEL with the ending
        .tuned.onnx.
    val (--val FILE.npz): Evaluate on these arrays after each epoch.
    split (--split, 0 to 1): Evaluate on this share of the examples, and train on the others.
    patience (--patience, 1 or more): Stop after this many evaluations without a better one.
    min_delta (--min-delta): Count an evaluation as better only if it improves by more than
        this.
    monitor (--monitor NAME): Compare evaluations by this metric.
    keep_best (--keep-best): Write the weights of the best evaluation.
    optimizer (--optimizer NAME): Update by sgd, adam, adamw, adamw8bit, nadam, rmsprop, adagrad,
        adafactor, lion or muon.
    optimizer_option (--optimizer-option NAME=VALUE): Set a number of the optimizer by its name in
        Python, such as betas=[0.9,0.95].
    lr (--lr): Set the learning rate, at its peak.
    schedule (--schedule NAME): Change the rate over the run: constant, linear, cosine, polynomial
        (here linear, too), onecycle, step, restarts (repeated half cosines) or cyclic.
    warmup (--warmup, 0 or more): Warm up: increase the rate over this many first updates.
    lr_every (--lr-every, 1 or more): Divide the rate by 10 each time after this many updates
        (step), begin a half cosine anew (restarts), or turn from rising to falling (cyclic).
    momentum (--momentum): Set the momentum of sgd, rmsprop or muon.
    weight_decay (--weight-decay): Set the weight decay, instead of the optimizer's default.
    ignore_index (--ignore-index): Ignore labels with this number. The default is -100.
    label_smoothing (--label-smoothing, 0.0 to 1.0): Smooth the labels of cross_entropy.
    loss_option (--loss-option NAME=VALUE): Set another option of the loss, such as gamma=3.
    add_loss (--add-loss NAME,output=Y,weight=1,labels=T): Also minimize this loss,
        times its weight; it may read another output and other labels.
    group (--group GLOB:lr=R,weight_decay=D): Train these weights with other settings: lr or
        scale, weight_decay, start (after so many updates), or frozen.
    layer_decay (--layer-decay): Multiply the rate by this with each layer towards the input.
    lora_rank (--lora-rank, 1 or more): Train low-rank adapters of this rank, and freeze the
        weights.
    lora_alpha (--lora-alpha): Scale the adapters by this over their rank. The default is 2 ·
        rank.
    lora (--lora GLOB): Adapt these weights. The default is all matrices.
    adapters (--adapters FILE.safetensors|DIR): Write only the adapters to this file, or in
        PEFT's format to a folder.
    explain (--explain): List the norms and matrix multiplications that the GPU trains as two
        operators because no fused kernel is faster, with the predicted times.
    gpus (--gpus, 1 or more): Train on this many GPUs of this machine, one process for each; with
        --device cpu, in this many processes. --batch-size counts the rows of all of them.
    resume (--resume): Continue from the newest checkpoint in the folder, if there is one.
    csv (--csv FILE.csv): Write a row for each step and evaluation.
    tensorboard (--tensorboard DIR): Write logs for TensorBoard; this needs tensorboardX.
    wandb (--wandb PROJECT): Log to this project of Weights & Biases; this needs wandb.
    mlflow (--mlflow NAME): Log to this experiment of MLflow; this needs mlflow-skinny or mlflow.
    curve (--curve FILE.html): Write the page of --html to this file, when the run is over.
    """


@with_options(OPTIONS, TrainingOptions, FitOptions, after="config")
def train(
    context: typer.Context,
    *,
    model: Path,
    data: Path,
    destination: Path | None = None,
    image_mean: str = "0",
    image_std: str = "1",
    config: Config = None,
    val: Path | None = None,
    split: float | None = None,
    patience: int | None = None,
    min_delta: float = 0.0,
    monitor: str = "validation_loss",
    keep_best: bool = False,
    optimizer: str = "adamw",
    optimizer_option: list[str] | None = None,
    lr: float = 1e-3,
    schedule: str = "constant",
    warmup: int = 0,
    lr_every: int = 1000,
    momentum: float | None = None,
    weight_decay: float | None = None,
    ignore_index: int | None = None,
    label_smoothing: float | None = None,
    loss_option: list[str] | None = None,
    add_loss: list[str] | None = None,
    group: list[str] | None = None,
    layer_decay: float | None = None,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    lora: list[str] | None = None,
    adapters: Path | None = None,
    shapes: list[str] | None = None,
    dims: list[str] | None = None,
    device: str = "cpu",
    explain: bool = False,
    gpus: int | None = None,
    resume: bool = False,
    csv: Path | None = None,
    tensorboard: Path | None = None,
    wandb: str | None = None,
    mlflow: str | None = None,
    curve: Path | None = None,
    trace: Path | None = None,
    reports: show.Reports,
    **options: Any,
) -> None:
    """Fine-tune MODEL, and write the same graph with its new weights."""
    ranks = begin_ranks(gpus)
    first, traced = ranks is None or ranks.rank == 0, trace is not None
    if not first:  # which writes and shows what there is to see
        csv, tensorboard, curve, trace, reports = None, None, None, None, show.Reports()
    output = destination or files.default_output(model, ".tuned.onnx")
    checkpoint, batch_size = options["folder"], options["batch_size"]
    ema = options["ema"] is not None
    in_folder = adapters is not None and adapters.suffix != ".safetensors"
    files.check_paths(
        {
            "MODEL": model,
            "--data": data,
            "--val": val,
            "--config": config,
            "--compiled": options["compiled"],
            "--teacher": None if options["teacher"] is None else Path(options["teacher"]),
        },
        {
            "-o": files.with_weights(output),
            "--checkpoint": checkpoint,
            "--adapters DIR" if in_folder else "--adapters": adapters,
            "--csv": csv,
            "--tensorboard": tensorboard,
            "--curve": curve,
            "--trace": trace,
            **reports.paths,
        },
    )
    from contextlib import nullcontext
    from dataclasses import asdict, replace

    from onnx_fuse import profile
    from onnx_fuse.adapters.files import by_module
    from onnx_fuse.files import written
    from onnx_fuse.report import overview, timing, training
    from onnx_fuse.report import trace as traces
    from onnx_fuse.training import callbacks, fit, images, optim, schedules, sources
    from onnx_fuse.training import checkpoint as folders
    from onnx_fuse.training import data as examples
    from onnx_fuse.training.backends import check_device
    from onnx_fuse.training.trainer import Trainer

    printer = show.printer()
    if lora_rank is None and adapters:
        raise UsageError("adapters need a rank: add --lora-rank 8")
    if resume and checkpoint is None:
        raise UsageError("--resume needs the folder of the run: add --checkpoint DIR")
    if checkpoint is not None and first:
        context.with_resource(folders.locked(checkpoint))
    check_device(options["precision"], device)
    if schedule not in schedules.NAMED:
        raise UsageError(unknown("schedule", schedule, schedules.NAMED))
    if explain and device == "cpu":
        raise UsageError("--explain compares a GPU's kernels: add --device cuda")
    if val and split is not None:
        raise UsageError("--split holds out examples of --data: leave --val out")
    arrays = examples.load_examples(data)
    held_out = examples.load_examples(val) if val else None
    settings = trainer_settings(model, context.params)
    if reports.html or curve:
        settings.setdefault("clip_norm", inf)  # clips nothing, and the page shows the norm
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoGradientWarning)  # they are among the notes
        trainer = Trainer(model, **settings, device=device, distributed=ranks is not None)
    if in_folder:
        by_module(trainer.adapters)
    for note in trainer.notes:
        printer.text(f"note: {note}")
    for pair in trainer.in_parts if explain else ():
        printer.text(f"in parts: {pair}")
    inputs = trainer.spec().feeds
    normal = [parse_numbers("--image-mean", image_mean), parse_numbers("--image-std", image_std)]
    if held_out is not None:
        images.same_classes(arrays, held_out)
        held_out = images.for_inputs(held_out, inputs, *normal)
    if images.IMAGES in arrays:
        shown = ", ".join(f"{i} {name}" for i, name in enumerate(arrays[images.IMAGES].classes))
        printer.text(f"classes: {shown}")
    arrays = images.for_inputs(arrays, inputs, *normal)
    if left_out := examples.left_out(arrays.keys() - {"label"}, inputs):
        printer.text(f"note: {data.name}: {left_out}")
    arrays |= sources.as_feeds(arrays, inputs)
    if held_out is not None:
        held_out |= sources.as_feeds(held_out, inputs)
    if split is not None:
        examples.count(arrays, inputs)
        arrays, held_out = examples.split(arrays, split, trainer.seed)
    source = sources.source(trainer, arrays, batch_size, split=True)
    steps = options["epochs"] * (source.steps or 0) // trainer.accumulate
    span = steps if schedule in schedules.ENDING else 0
    factor = 0.1 if schedule == "step" else 1.0
    trainer.schedule(optim.Schedule(lr, schedule, span, warmup, every=lr_every, gamma=factor))
    if checkpoint is not None:
        fit.start_or_resume(trainer, checkpoint, resume=resume)
    trained = [s.initial.size for s in trainer.spec().states if s.kind == "parameter"]
    weights = sum(trained)
    printer.text(
        f"{model}: {weights:,} weights in {len(trained)} tensor{'s' * (len(trained) != 1)} train"
    )

    def page(history: Mapping[str, Any], refresh: float) -> Page:
        return show.page(
            printer,
            {"model": str(model)},
            sections=[*training.sections({"": history}), *extra],
            overview=overview.trained(output, device, history, over=not refresh),
            device=f"{device}, {trainer.precision}",
            refresh=refresh,
        )

    extra: list[Section] = []
    if ranks is not None:
        ranks.barrier()  # from which on the times of all ranks count
    live = training.Live(reports.html, page)
    watching: list[callbacks.Callback] = [callbacks.Progress(printer.console), live]
    if patience:
        watching.append(callbacks.EarlyStopping(monitor, "auto", min_delta, patience))
    if keep_best:
        best = checkpoint and checkpoint.with_name(f"{checkpoint.name}.best")
        watching.append(callbacks.BestWeights(monitor, "auto", min_delta, best))
    files_of = (callbacks.CsvLog, csv), (callbacks.TensorBoard, tensorboard)
    watching += [log(place) for log, place in files_of if place]
    watching += [callbacks.Wandb(project=wandb)] if wandb else []
    watching += [callbacks.MLflow(mlflow)] if mlflow else []
    fitting = values_of(FitOptions, options)
    history = fit.fit(trainer, source, **fitting, validation=held_out, ema=ema, callbacks=watching)
    _show_metrics(printer, history)
    if trainer.recompute:
        printer.text(trainer.recompute)
    events, exchanged = live.events(), trainer.communication()
    if exchanged is not None:
        printer.text(f"communication: {exchanged}")
        events += traces.of_communication(exchanged, live.last)
    if ranks is not None and traced:
        events = traces.of_ranks(ranks, events)
    feeds = {k: a[:batch_size] for k, a in arrays.items()}
    if trainer.exported_batch:  # which the saved file has still
        feeds = {k: a[: trainer.exported_batch] for k, a in feeds.items()}
    # all ranks: each may hold a part of what rank 0 writes
    expected = trainer.evaluate(feeds, ema=ema).outputs
    with written(output) if first else nullcontext(output) as draft:
        trainer.save(draft, ema=ema)
        if first:
            _check_saved(draft, expected, feeds)
    if adapters is not None:
        trainer.save_adapters(adapters)
    if not first:
        return
    printer.text(f"wrote {output}")
    result = {
        "model": str(model),
        "output": str(output),
        "weights": weights,
        "notes": trainer.notes,
        "in_parts": trainer.in_parts,
    }
    curves = asdict(history)
    if trace is not None:
        if device == "cpu":
            step = profile.of_onnxruntime(*trainer.step_graph(feeds))
            events += traces.of_profile(step, process=traces.STEP)
            extra = timing.profile_sections(step, "of a step")
        traces.write(trace, str(model), events)
    replace(reports, html=None).write(printer, result | curves)
    for path in (reports.html, curve):
        if path is not None:
            show.write_page(path, page(curves, 0.0))


def trainer_settings(model: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """What the options of `train`, by their names, are to a Trainer. Raises UsageError."""
    from onnx_fuse.training import optim
    from onnx_fuse.training.adapters import Lora
    from onnx_fuse.training.losses import Term

    get = options.__getitem__
    loss_options = {k: get(k) for k in ("ignore_index", "label_smoothing") if get(k) is not None}
    loss_options |= parse_values("--loss-option", get("loss_option"))
    more, groups = parse_terms(get("add_loss")), parse_groups(get("group"))
    if get("layer_decay") is not None:
        groups += optim.layer_decay(model, get("layer_decay"))
    rank, adapted = get("lora_rank"), split_names(get("lora"))
    if rank is None and (adapted or get("lora_alpha")):
        raise UsageError("adapters need a rank: add --lora-rank 8")
    first = Term(get("loss"), get("output"), options=loss_options)
    given = {"lr": get("lr"), "momentum": get("momentum"), "weight_decay": get("weight_decay")}
    given |= parse_values("--optimizer-option", get("optimizer_option")) | {"groups": groups}
    return values_of(TrainingOptions, options) | {
        "loss": [first, *more] if more else get("loss"),
        "loss_options": None if more else loss_options,
        "optimizer": optim.make(get("optimizer"), **given),
        "output": None if more else get("output"),
        "lora": Lora(rank, get("lora_alpha") or 2.0 * rank, tuple(adapted) or ("*",))
        if rank
        else None,
        "shapes": parse_shapes(get("shapes")),
        "dims": parse_dims(get("dims")),
    }  # fmt: skip


_ROWS = 20  # evaluations that the table shows at most, the last ones


def _show_metrics(printer: Printer, history: History) -> None:
    records = history.metrics[-_ROWS:]
    if not records:
        return
    names = [name for name in records[0] if name not in ("step", "epoch")]
    rows = [
        [f"{r['step']:.0f}", f"{r['epoch']:.0f}", *(f"{r[name]:.6g}" for name in names)]
        for r in records
    ]
    heads = [name.replace("_", " ") for name in names]
    printer.table("validation", ["step", "epoch", *heads], rows, left=0)


def _check_saved(draft: Path, expected: Mapping[str, Any], feeds: Mapping[str, Any]) -> None:
    """Compare the file on stock onnxruntime with the trained state, and delete a file that differs.

    onnxruntime runs it as written: of its own accord it rounds what 8-bit weights multiply.
    `expected` is what the state gives for `feeds`. Raises CheckFailed for a file that differs.
    """
    from onnx_fuse.runtime import ort
    from onnx_fuse.validation.compare import difference, random_outputs, tolerance_of

    saved = files.load(draft, str(draft))
    if random_outputs(saved) or any(
        a.name == "training_mode" for node in saved.graph for a in node.attributes.values()
    ):
        return  # its outputs depend on the batch, or on random numbers, as they did before
    session = ort.session(draft, as_written=True)
    fed = {v.name: feeds[v.name] for v in session.get_inputs()}
    tolerance = tolerance_of(saved)
    for (name, y), got in zip(expected.items(), ort.run(session, fed, list(expected)), strict=True):
        error = difference(name, y, got, tolerance)
        if not error.ok:
            draft.unlink()
            raise CheckFailed(
                f"'{name}' of the saved model differs from the trained state by {error.max_abs:.3g}"
                " (nothing was written)"
            )

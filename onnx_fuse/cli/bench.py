"""`onnx-fuse bench`: time a model as it is and fused, or tune its kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_fuse.cli import checking, files, show
from onnx_fuse.cli.options import hardware_of, parse_mkn, with_options
from onnx_fuse.errors import UsageError
from onnx_fuse.options import RunOptions, shared

if TYPE_CHECKING:
    from onnx_fuse import report
    from onnx_fuse.program.hardware import Hardware

EXAMPLES = (
    "onnx-fuse bench model.onnx --threads 1",
    "onnx-fuse bench model.onnx --device cuda --against ort:cuda",
    "onnx-fuse bench model.onnx --grad --device cuda --precision bf16",
    "onnx-fuse bench model.onnx --train --loss mse --device cuda --mode end2end",
    "onnx-fuse bench LayerNormGemm --tune --shape 8192,768,3072 --precision bf16",
)
OPTIONS = """
    model (MODEL): The .onnx file to time; with --tune, also an operator's name.
    repeat (--repeat, 1 or more): Time both models this many times.
    threads (--threads, 0 or more): Use this many threads on the CPU. With 0, onnxruntime
        chooses the number; with 1, CPU time is measured.
    grad (--grad): Time forward and backward: the gradients of all weights and outputs.
    train (--train): Time a training step with AdamW and --loss.
    loss (--loss NAME): The loss of --train.
    mode (--mode kernel|end2end): Time only the GPU's work, or calls from host memory to host
        memory.
    against (--against unfused|ort:NAME): Compare with MODEL unfused in the same place, or on
        onnxruntime's provider of this name, such as ort:cuda, ort:tensorrt or ort:cpu.
    tune (--tune): Time the kernels for MODEL on this GPU, and use the fastest from now on.
    shape (--shape M,K,N): Tune an operator at these sizes.
    limit (--limit, 1 or more): Stop tuning after this many seconds.
    top (--top, 1 or more): Try this many configurations of each kernel.
    records (--records DIR): Keep tuning records in this folder, not in the cache.
    """


@with_options(OPTIONS)
def bench(
    *,
    model: Path,
    inputs: Path | None = None,
    options: RunOptions,
    repeat: int = 50,
    threads: int = 0,
    grad: bool = False,
    train: bool = False,
    loss: str = "cross_entropy",
    mode: str = "kernel",
    against: str = "unfused",
    tune: bool = False,
    shape: list[str] | None = None,
    limit: float = 120,
    top: int = 6,
    records: Path | None = None,
    trace: Path | None = None,
    reports: show.Reports,
) -> None:
    """Time MODEL as it is and fused, in turns, and show the ratio; or tune its kernels.

    Both run on onnxruntime, on its CPU or on --providers. With --device cuda both run on the GPU,
    unfused (level 0) and fused (level 2), each as one launch, with inputs and outputs in GPU
    memory.
    """
    files.check_paths(
        {"MODEL": model, "--inputs": inputs},
        {"--records": records, "--trace": trace, **reports.paths},
    )
    from onnx_fuse import bench as timing
    from onnx_fuse.importer.shapes import fix_shapes
    from onnx_fuse.report import overview
    from onnx_fuse.validation.inputs import read_feeds
    from onnx_fuse.validation.request import Request

    printer = show.printer()
    request = Request(**shared(Request, options))
    device, precision = request.device, request.precision
    if tune:
        calls, counts, hw = _to_tune(model, inputs, options, shape or [])
        data = _tune(printer, calls, counts, hw, limit, top, records)
        reports.write(printer, {"model": str(model), "gpu": hw.name, "tuned": data})
        return
    if (grad or train) and (reports.html or trace):
        raise UsageError("--grad and --train show a table and --json: leave --html and --trace out")
    if request.providers and (train or reports.html or trace):
        raise UsageError("--providers shows a table and --json: leave --train, --html, --trace out")
    _check_combination(grad, train, mode, against, device)
    if shape:
        raise UsageError("--shape is for an operator, which only --tune times: add --tune")
    if precision != "fp32" and device != "cuda":
        raise UsageError(f"--precision {precision} needs --device cuda or --tune")
    if threads and device == "cuda":
        raise UsageError(f"--threads {threads} needs --device cpu")
    graph = files.load(model, str(model))
    feeds = read_feeds(inputs, graph) if inputs else None
    request = replace(request, feeds=None if feeds is None else [feeds])

    def work() -> tuple[timing.Comparison, timing.RunResult | None]:
        comparison = timing.compare(
            model, graph, request, repeat=repeat, threads=threads,
            grad=grad, loss=loss if train else "", mode=mode, against=against,
        )  # fmt: skip
        if not reports.html and not trace:
            return comparison, None
        fix_shapes(graph, request.shapes or {}, request.dims)
        return comparison, timing.run_once(
            graph, feeds, device=device, precision=precision, profile=True
        )

    theirs = timing.providers_of(against)
    first = f"onnxruntime, {theirs[0]}" if theirs else "original"
    result, run = checking.guarded(work, str(model), theirs[0] if theirs else request.place)
    rows = [
        [name, f"{t.median:.4g}", f"{t.low:.4g}", f"{t.high:.4g}"]
        for name, t in ((first, result.original), ("fused", result.fused))
    ]
    where = f"onnxruntime, {request.place}"
    if request.place == "cuda":
        where = f"{hardware_of('cuda').name}, {precision}"
    printer.table(f"{where}: {result.clock}", ["model", "median ms", "10 %", "90 %"], rows)
    printer.text(show.inputs(result.feeds))
    for name, nbytes in zip((first, "fused"), result.memory, strict=True):
        if nbytes is not None:
            printer.text(f"{name} takes {nbytes / 2**20:,.1f} MiB of GPU memory")
    low, high = result.noise
    printer.text(
        f"fused / {first}: {result.ratio:.3f} ({low:.3f} to {high:.3f} among pairs of sessions)"
    )
    if trace and run is not None and run.profile is not None:
        from onnx_fuse.report import trace as traces

        traces.write(trace, str(model), traces.of_profile(run.profile, run.program))

    def sections() -> Any:
        from onnx_fuse import rewrite
        from onnx_fuse.report import timing as pages

        fused = graph.clone()
        rewrite.optimize(fused, own_kernels=device == "cuda")
        return pages.compared(result, run, fused)

    reports.write(
        printer,
        {"model": str(model), "where": where} | result.to_dict(),
        overview=overview.benched(model, device, first, result),
        device=where,
        sections=sections,
    )


def _check_combination(grad: bool, train: bool, mode: str, against: str, device: str) -> None:
    from onnx_fuse.bench import MODES

    if mode not in MODES:
        raise UsageError("--mode is kernel or end2end")
    if grad and train:
        raise UsageError("--grad times forward and backward, --train a whole step: choose one")
    if device == "cpu" and mode != "kernel":
        raise UsageError("--mode needs --device cuda")
    if against != "unfused" and (grad or train):
        raise UsageError(f"--against {against} times the forward: leave --grad and --train out")


def _to_tune(
    model: Path, inputs: Path | None, options: RunOptions, shape: list[str]
) -> tuple[list[Any], Mapping[str, int], Any]:
    """The calls to tune (of a model, or of an operator at each of `shape`), and the Hardware.

    Between them: how often the model has each problem, by its key.
    """
    from onnx_fuse import single_op_models, tune
    from onnx_fuse.importer.shapes import fix_shapes
    from onnx_fuse.kernels import tuning
    from onnx_fuse.session import InferenceSession
    from onnx_fuse.validation.inputs import generate, read_feeds

    how = options.precision
    if not model.exists() and str(model) in single_op_models.OPS:
        op = str(model)
        sizes = [parse_mkn(text) for text in shape]
        if not sizes:
            raise UsageError(f"give the sizes to tune {op} at, as in --shape 8192,768,3072")
        hw = hardware_of("cuda")
        programs = [single_op_models.program_of(op, size, how, hw) for size in sizes]
        return [call for p in programs for call in tune.calls_of(p, op)], {}, hw
    if not model.exists():
        operators = ", ".join(single_op_models.OPS)
        raise UsageError(f"{model} is neither a file nor an operator: give one of {operators}")
    graph = files.load(model, str(model))
    fix_shapes(graph, options.shapes or {}, options.dims)
    session = InferenceSession(graph, device="cuda", precision=how)
    feeds = read_feeds(inputs, graph) if inputs else None
    feeds = feeds or generate(graph, lambda f: session.run(None, f), single=True)[0][0]
    program, hw = session.program(feeds)
    counts = Counter(tuning.key(c.problem.op, c.problem) for c in program.calls if c.problem)
    return tune.calls_of(program), counts, hw


def _tune(
    printer: report.Printer,
    calls: list[Any],
    counts: Mapping[str, int],
    hw: Hardware,
    limit: float,
    top: int,
    folder: Path | None,
) -> list[dict[str, Any]]:
    """Tune, show a table of the fastest kernels and the gain, and return it as JSON values."""
    from dataclasses import asdict

    from onnx_fuse import tune
    from onnx_fuse.kernels import tuning

    tuned = list(tune.tune(calls, hw, top=top, seconds=limit, folder=folder))
    rows = [
        [
            str(t.problem),
            f"{t.kernel} {t.config}",
            f"{t.us:.1f}",
            f"{t.before_us:.1f}",
            f"{t.floor:.0%}",
            f"{t.tried}",
        ]
        for t in tuned
    ]
    head = ["problem", "fastest", "µs", "before", "of floor", "tried"]
    printer.table(f"kernels on {hw.name}", head, rows, left=2)
    often = [counts.get(tuning.key(t.problem.op, t.problem), 1) for t in tuned]
    before, after = (
        sum(n * us for n, us in zip(often, times, strict=True))
        for times in ([t.before_us for t in tuned], [t.us for t in tuned])
    )
    if tuned:
        printer.text(
            f"{sum(often)} {'calls' if sum(often) > 1 else 'call'} of {len(tuned)} "
            f"{'problems' if len(tuned) > 1 else 'problem'}: {before:,.1f} µs as chosen before, "
            f"{after:,.1f} µs by the fastest"
        )
    for t in tuned:
        for name in t.refused:
            printer.text(f"skipped, because its result differs: {name} at {t.problem}")
    if len(tuned) < len(calls):
        printer.text(
            f"{len(calls) - len(tuned)} of {len(calls)} problems were not reached in {limit:.0f} "
            "seconds: a larger --limit gives more time"
        )
    return [asdict(t) | {"problem": str(t.problem)} for t in tuned]

"""`onnx-fuse validate`: compare a model, or its fusion, with its original."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from onnx_fuse.cli import checking, files, show
from onnx_fuse.cli.options import with_options
from onnx_fuse.errors import CheckFailed, UsageError
from onnx_fuse.options import CheckOptions, shared

EXAMPLES = (
    "onnx-fuse validate --op LayerNormGemm --input-shapes x:4,8 scale:8 bias:8 w:8,16 c:16 --grad",
    "onnx-fuse validate model.onnx --grad",
    "onnx-fuse validate model.fused.onnx --against model.onnx --blame --inputs feeds.npz",
)
OPTIONS = """
    against (--against ORIGINAL): Compare MODEL with this file. Without it, MODEL is compared
        with its own fusion.
    op (--op): Compare an operator (LayerNormGemm, or domain::Name) with its body.
    grad (--grad): Also compare every gradient with central differences.
    batch_invariant (--batch-invariant): Instead compare the bits of a row that runs alone, in
        batches of other sizes and in another order; on cuda in a batch-invariant session.
    adapters (--adapters FILE ...): With --batch-invariant, give the rows in turn these low-rank
        adapters, or none.
    """


@with_options(OPTIONS)
def validate(
    *,
    model: Path,
    against: Path | None = None,
    op: bool = False,
    grad: bool = False,
    batch_invariant: bool = False,
    adapters: list[str] | None = None,
    inputs: Path | None = None,
    options: CheckOptions,
    reports: show.Reports,
) -> None:
    """Compare all outputs of MODEL with those of its fusion, or of ORIGINAL, on onnxruntime.

    The original always runs on onnxruntime's CPU; --device, --providers and --precision say where
    and how the other model runs.
    """
    if batch_invariant:
        if op or against is not None or grad or options.providers:
            raise UsageError(
                "--batch-invariant compares a file with itself, row by row: leave --op, --against, "
                "--grad and --providers out"
            )
        _compare_rows(model, adapters or [], inputs, options, reports)
    elif adapters:
        raise UsageError("--adapters is for --batch-invariant")
    elif op:
        if against is not None:
            raise UsageError("--op compares an operator with its body: leave --against out")
        from onnx_fuse.validation.operator import operator_files

        with TemporaryDirectory(prefix="onnx-fuse-") as folder:
            single, body = operator_files(
                str(model), options.shapes or {}, Path(folder), trains=grad
            )
            _compare(single, body, grad, inputs, replace(options, shapes=None, dims=None), reports)
    else:
        _compare(model, against, grad, inputs, options, reports)


def _compare_rows(
    model: Path, adapters: list[str], inputs: Path | None, options: CheckOptions,
    reports: show.Reports,
) -> None:  # fmt: skip
    files.check_paths({"MODEL": model, "--inputs": inputs}, reports.paths)
    from onnx_fuse.validation.inputs import read_feeds
    from onnx_fuse.validation.invariant import Invariance, check_batch

    printer = show.printer()
    graph = files.load(model, str(model))
    feeds = read_feeds(inputs, graph) if inputs else None
    device, precision = options.device, options.precision

    def work() -> Invariance:
        return check_batch(
            graph, device=device, precision=precision, feeds=feeds, dims=options.dims,
            seed=options.seed, adapters=adapters,
        )  # fmt: skip

    found: Invariance = checking.guarded(work, str(model), device)
    names = ", ".join(found.outputs)
    printer.text(
        f"{found.runs} runs of rows of a batch of {found.batch}: {names or 'no output has rows'}",
        *found.faults[:8],
    )
    if found.predicted is not None:
        here, usual = (1e6 * seconds for seconds in found.predicted)
        printer.text(
            f"predicted {here:,.1f} µs for the batch, and {usual:,.1f} µs where bits may differ "
            f"({here / usual:.2f})"
        )
    if found.ok:
        printer.text("ok: each row has the same bits in all of them")
    data = {"model": str(model), "batch_invariant": {"ok": found.ok, **asdict(found)}}
    reports.write(printer, data, device=f"{device}, {precision}")
    if not found.ok:
        raise CheckFailed(f"{model}: the bits of a row depend on its batch: {found.faults[0]}")


def _compare(
    model: Path,
    against: Path | None,
    grad: bool,
    inputs: Path | None,
    options: CheckOptions,
    reports: show.Reports,
) -> None:
    files.check_paths({"MODEL": model, "--against": against, "--inputs": inputs}, reports.paths)
    from onnx_fuse import report
    from onnx_fuse.importer.load import read
    from onnx_fuse.report import overview
    from onnx_fuse.validation.compare import tolerance_of
    from onnx_fuse.validation.request import Request

    printer = show.printer()
    device, precision = options.device, options.precision
    if precision != "fp32" and (device != "cuda" or options.blame):
        raise UsageError(
            f"--precision {precision} needs --device cuda, and does not go with --blame"
        )
    if options.every and not grad:
        raise UsageError("--all needs --grad: it says how gradients are compared")
    original = against or model
    candidate: Any = model
    source = files.load(read(original), str(original))
    if against is None:
        from onnx_fuse import rewrite

        candidate = source.clone()
        rewrite.optimize(candidate)
    else:
        read(model)
    data: dict[str, Any] = {"model": str(model), "original": str(original)}
    request = Request(**shared(Request, options), along=reports.html is not None)
    checked = checking.check(original, candidate, request, inputs)
    printer.text(*report.check_lines(checked))
    data["check"] = checked.to_dict()
    failure, gradients = "", None
    if not checked.ok:
        failure = f"differs from {original}"
        failure += f": {checked.culprits[0]}" if checked.culprits else ""
        usual = tolerance_of(files.load(model, str(model)))
        if options.rtol is None and usual.rtol > tolerance_of(source).rtol:
            failure += f"; --rtol {usual.rtol:g} allows for its coarser types"
    elif grad:
        gradients = checking.gradients(model, None, request, inputs)
        data["gradients"] = gradients.to_dict()
        printer.text(*report.gradient_lines(gradients))
        if gradients.failed:
            first = gradients.failed[0]
            written_by = f", written by {first.kernel}," if first.kernel else ""
            failure = f"the gradient of '{first.tensor}', read by {first.op},{written_by} is wrong"

    def checked_graph() -> Any:
        return files.load(candidate, str(model)) if against else candidate

    reports.write(
        printer,
        data,
        overview=overview.validated(model, against, failure, checked, gradients),
        device=f"{request.place}, {precision}",
        sections=lambda: show.pages().validated(source, checked_graph(), checked, gradients),
    )
    if failure:
        raise CheckFailed(f"{model}: {failure}")

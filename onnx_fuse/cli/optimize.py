"""`onnx-fuse optimize`: fuse a model, check it and write it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_fuse.cli import checking, files, show
from onnx_fuse.cli.options import hardware_of, precision_of, split_names, with_options
from onnx_fuse.errors import CheckFailed, ModelError, UsageError
from onnx_fuse.options import SizeOptions, shared

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnx_fuse import report
    from onnx_fuse.rewrite import Report
    from onnx_fuse.validation.check import Check

EXAMPLES = (
    "onnx-fuse optimize model.onnx -o model.fused.onnx --explain",
    "onnx-fuse optimize encoder.onnx decoder.onnx -o fused",
    "onnx-fuse optimize model.onnx --skip LayerNormGemm --dim batch=1 sequence=128",
)
_NOTES = 3  # shown without --explain
_NODES = 3  # named for each reason of --explain
OPTIONS = """
    models (MODEL ...): The .onnx files to fuse.
    output (-o, --output OUT): Write to this file or, with several files, into this folder. The
        default is MODEL with the ending .fused.onnx.
    level (--level, 0 to 3): Fuse up to this level; --list says what each level does.
    fuse (--fuse NAME): Turn this fusion on at every level.
    skip (--skip NAME): Turn this fusion off.
    list_ (--list): List all levels and fusions, and stop.
    explain (--explain): Give a reason for everything that was not fused.
    target (--target GPU): Also list the ten slowest kernels for this GPU (with --explain, all):
        h200, h100, a100, ..., or cuda for the GPU in this machine.
    precision (--precision NAME): Write MODEL in 16 bits, fp16 or bf16; its inputs and outputs keep
        their types. With --target, also tf32, bf16x3 or bf16x6 for the kernels that it lists.
    inline (--inline): Write only standard operators, instead of fused ones.
    opset (--opset N|keep): Write this version of the ai.onnx opset, or keep that of MODEL.
    check (--check/--no-check): Compare the result with MODEL on onnxruntime.
    keep (--keep): Keep the result even if the check fails.
    """


@with_options(OPTIONS)
def optimize(
    *,
    models: list[Path] | None = None,
    output: Path | None = None,
    level: int = 2,
    fuse: list[str] | None = None,
    skip: list[str] | None = None,
    list_: bool = False,
    explain: bool = False,
    target: str | None = None,
    precision: str = "fp32",
    inline: bool = False,
    opset: str | None = None,
    check: bool = True,
    keep: bool = False,
    inputs: Path | None = None,
    sizes: SizeOptions,
    external: bool = False,
    reports: show.Reports,
) -> None:
    """Fuse MODEL into a file that still runs on stock onnxruntime, and check the result."""
    given = dict(locals())
    if list_:
        files.check_paths({}, reports.paths)
        _list_fusions(show.printer(), reports)
        return
    if not models:
        raise UsageError("no MODEL was given: onnx-fuse optimize model.onnx, or --list")
    outputs = [files.default_output(path, ".fused.onnx") for path in models]
    if len(models) > 1:
        if any(reports.paths.values()):
            raise UsageError("--json and --html are of one MODEL: give one at a time")
        if output is not None:
            if output.is_file() or output.suffix == ".onnx":
                raise UsageError(f"-o {output}: several models are written into a folder")
            output.mkdir(parents=True, exist_ok=True)
            outputs = [output / path.name for path in outputs]
        files.check_paths({"MODEL": models}, {"-o": outputs})
        for path, part in zip(models, outputs, strict=True):
            show.printer().text(f"{path}:")
            inspect.unwrap(optimize)(**given | {"models": [path], "output": part})
        return
    model, output = models[0], output or outputs[0]
    files.check_paths(
        {"MODEL": model, "--inputs": inputs}, {"-o": files.with_weights(output), **reports.paths}
    )
    started = time.perf_counter()
    printer = show.printer()
    from onnx_fuse import progress, report, rewrite
    from onnx_fuse.api import FILE_PRECISIONS
    from onnx_fuse.files import written
    from onnx_fuse.importer.load import opaque, read
    from onnx_fuse.importer.save import at_opset, loadable, save
    from onnx_fuse.importer.save import inline as inlined
    from onnx_fuse.importer.shapes import fix_shapes
    from onnx_fuse.report import overview
    from onnx_fuse.rewrite.precision import in_precision
    from onnx_fuse.validation.inputs import read_feeds
    from onnx_fuse.validation.request import Request

    stored = precision_of(precision) in FILE_PRECISIONS
    if not (stored or target):
        raise UsageError(
            f"--precision {precision} is for the kernels that --target lists: a file can be in "
            f"{', '.join(FILE_PRECISIONS)}"
        )
    hardware = hardware_of(target) if target else None
    wanted = _opset(opset)
    original = read(model, lazy=True)
    before = report.summary(original, "original", model)
    graph = files.load(original, str(model))
    feeds = read_feeds(inputs, graph) if inputs else None
    fix_shapes(graph, sizes.shapes or {}, sizes.dims)
    branch = _refusal(graph, model) if (sizes.shapes or sizes.dims) and "If" in before.ops else None
    if branch:
        # One that these sizes never take: with them written down onnxruntime loads no file.
        graph = files.load(original, str(model))
    loaded: Any = graph.clone() if reports.html else None
    try:
        fused = rewrite.optimize(graph, level=level, fuse=split_names(fuse), skip=split_names(skip))
    except ModelError as error:
        raise ModelError(f"{model}: {error}") from error
    if branch:
        fused.notes.append(f"the given sizes are not written: a branch contradicts them ({branch})")
    if check and (unknown := opaque(graph)):
        raise ModelError(
            f"{model}: {unknown}: onnxruntime has no such operator, so the result cannot be "
            "checked; --no-check writes it without a check"
        )
    precision_of_file = precision if stored else "fp32"
    try:
        result = in_precision(graph, precision_of_file, stored=True)[0]
    except ModelError as error:
        raise ModelError(f"{model}: --precision {precision}: {error}") from error
    result = inlined(result) if inline else result
    if inline:
        rewrite.tidy_inlined(result)
    if wanted is None:
        result = loadable(result)
    else:
        try:
            result = at_opset(result, wanted or original.graph.opset_imports[""])
        except ModelError as error:
            raise ModelError(f"{model}: {error}") from error
    checked: Check | None = None
    with written(output) as draft:
        progress.report(f"writing {output.name}")
        save(result, draft, external=external, shapes=False)
        after = report.summary(result, "fused", draft)
        if check:
            request = Request(**shared(Request, sizes), along=reports.html is not None)
            request = replace(request, precision=precision_of_file)
            checked = checking.check(model, draft, request, inputs, original)
        failed = checked is not None and not checked.ok
        if failed and not keep:
            for path in draft.parent.iterdir():
                path.unlink()
    seconds = time.perf_counter() - started
    _show_optimize(printer, before, after, fused, checked, seconds, explain=explain)
    kernels, lowered = [], None
    if hardware is not None:
        from onnx_fuse import bench

        on_gpu = graph.clone()
        rewrite.optimize(on_gpu, level=level, own_kernels=True)  # as a session on that GPU does
        lowered = bench.program(on_gpu, hardware, feeds, precision=precision)
        kernels = show.kernels(printer, lowered, hardware, explain=explain)
    data = {
        "input": str(model),
        "output": None if failed and not keep else str(output),
        "fusions": dict(fused.fusions),
        "not_fused": [
            {"nodes": list(r.nodes), "reason": r.reason, "code": r.code} for r in fused.not_fused
        ],
        "notes": list(fused.notes),
        "nodes": {"before": before.nodes, "after": after.nodes},
        "bytes": {"before": before.bytes, "after": after.bytes},
        "seconds": seconds,
        "models": [report.as_dict(before), report.as_dict(after)],
        "check": checked.to_dict() if checked else None,
        "kernels": kernels,
    }

    def sections() -> Any:
        from onnx_fuse.report import pages, timing

        facts = timing.call_facts(kernels)
        parts = pages.optimized(loaded, graph, [before, after], fused, checked, facts)
        if lowered is None or hardware is None:
            return parts
        return [*parts, *timing.predicted(lowered, hardware)]

    paths = (model, output)
    reports.write(
        printer,
        data,
        overview=overview.optimized(paths, (before, after), fused, checked, kernels),
        device=f"CPU; predicted for {hardware.name}" if hardware else "CPU",
        sections=sections,
    )
    if failed:
        raise CheckFailed(
            f"{model}: the fused model differs from the original "
            + (f"(written nevertheless: {output})" if keep else "(nothing was written)")
            + f": onnx-fuse validate {model} --blame names the operator"
        )
    printer.text(f"wrote {output}")


def _refusal(graph: ir.Model, path: Path) -> str | None:
    """The reason why onnxruntime does not load a model, or None if it does."""
    from onnx_fuse.runtime import ort

    def work() -> str | None:
        try:
            ort.session(graph, as_written=True)
        except Exception as error:  # noqa: BLE001 - of whatever kind, it is the answer
            return ort.plain(error)
        return None

    return checking.guarded(work, str(path), "cpu")


def _opset(text: str | None) -> int | None:
    """The opset to write: a number, 0 for the file's own, or None for the one of the passes."""
    if text is None or text == "keep":
        return None if text is None else 0
    if not text.isdecimal() or not int(text):
        raise UsageError(f"--opset takes a number or 'keep', not '{text}'")
    return int(text)


def _show_optimize(
    printer: report.Printer,
    before: report.Summary,
    after: report.Summary,
    result: Report,
    checked: Check | None,
    seconds: float,
    *,
    explain: bool,
) -> None:
    from onnx_fuse import report

    rows = report.models_rows([before, after])
    rows.append(["seconds, with the check" if checked else "seconds", "", f"{seconds:.2f}"])
    printer.table("", ["", before.name, after.name], rows)
    if result.fusions:
        printer.table(
            "fusions", ["fusion", "count"], [[k, str(v)] for k, v in result.fusions.items()]
        )
    else:
        printer.text("fusions: none found" + ("" if explain else " (--explain says why)"))
    if explain and result.not_fused:
        rows = [[str(len(r.nodes)), r.reason, _shortened(r.nodes)] for r in result.not_fused]
        printer.table("not fused", ["count", "reason", "nodes"], rows, left=3)
    elif explain:
        printer.text("not fused: no norm, attention, activation, residual or layout is left")
    notes = result.notes if explain else result.notes[:_NOTES]
    printer.text(*(f"note: {note}" for note in notes))
    if len(result.notes) > len(notes):
        printer.text(f"note: {len(result.notes) - len(notes)} more with --explain")
    if checked:
        printer.text(*report.check_lines(checked))


def _shortened(nodes: Sequence[str]) -> str:
    """The names of the first nodes; --json has all of them."""
    return ", ".join(nodes[:_NODES]) + (", …" if len(nodes) > _NODES else "")


def _list_fusions(printer: report.Printer, reports: show.Reports) -> None:
    from onnx_fuse import rewrite

    printer.table(
        "levels", ["level", "what"], [[str(k), v] for k, v in rewrite.LEVELS.items()], left=2
    )
    rows = [[name, str(level)] for name, level in rewrite.FUSIONS.items()]
    printer.table("fusions", ["name (for --fuse, --skip)", "from level"], rows)
    levels = {str(k): v for k, v in rewrite.LEVELS.items()}
    reports.write(printer, {"levels": levels, "fusions": dict(rewrite.FUSIONS)})

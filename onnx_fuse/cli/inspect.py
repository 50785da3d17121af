"""`onnx-fuse inspect`: models side by side."""

from __future__ import annotations

from pathlib import Path

from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import with_options

EXAMPLES = (
    "onnx-fuse inspect model.onnx",
    "onnx-fuse inspect model.onnx model.fused.onnx --html compared.html",
)
OPTIONS = """
    models (MODEL ...): One or more files to show.
    """


@with_options(OPTIONS)
def inspect(*, models: list[Path], reports: show.Reports) -> None:
    """Show the inputs, outputs, operators and sizes of models, side by side."""
    from onnx_fuse import report
    from onnx_fuse.importer.load import read

    files.check_paths({"MODEL": models}, reports.paths)
    printer = show.printer()
    loaded = {path: read(path) for path in models}
    summaries = [report.summary(model, path.name, path) for path, model in loaded.items()]
    printer.table("", ["", *(m.name for m in summaries)], report.models_rows(summaries))

    data = {"models": [report.as_dict(m) for m in summaries]}
    named = {str(path): model for path, model in loaded.items()}
    reports.write(printer, data, sections=lambda: show.pages().inspected(named))

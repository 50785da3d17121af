"""`onnx-fuse inspect`: models side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import with_options

if TYPE_CHECKING:
    from onnx_fuse.report.page import Section

EXAMPLES = (
    "onnx-fuse inspect model.onnx",
    "onnx-fuse inspect model.onnx model.fused.onnx --html compared.html",
)
OPTIONS = """
    models (MODEL ...): One or more files to show.
    """


@with_options(OPTIONS)
def inspect(
    models: list[Path],
    json: Path | None = None,
    html: Path | None = None,
    debug: bool = False,
) -> None:
    """Show the inputs, outputs, operators and sizes of models, side by side."""
    from onnx_fuse import report
    from onnx_fuse.importer.load import read

    files.check_paths({"MODEL": models}, {"--json": json, "--html": html})
    printer = show.printer()
    loaded = {path: read(path) for path in models}
    summaries = [report.summary(model, path.name, path) for path, model in loaded.items()]
    printer.table("", ["", *(m.name for m in summaries)], report.models_rows(summaries))

    def sections() -> list[Section]:
        from onnx_fuse.report import pages

        return pages.inspected({str(path): model for path, model in loaded.items()})

    data = {"models": [report.as_dict(m) for m in summaries]}
    show.write_reports(printer, data, json, html, sections=sections)

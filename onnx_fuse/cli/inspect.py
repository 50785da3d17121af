"""`onnx-fuse inspect`: models side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import Debug, Html, Json

EXAMPLES = (
    "onnx-fuse inspect model.onnx",
    "onnx-fuse inspect model.onnx model.fused.onnx --html compared.html",
)


def inspect(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL ...", help="One or more files to show.")
    ],
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Show the inputs, outputs, operators and sizes of models, side by side."""
    from onnx_fuse import report
    from onnx_fuse.onnx.load import read

    files.check_paths({"MODEL": models}, {"--json": json, "--html": html})
    printer = show.printer()
    found = [report.summary(read(path), path.name, path) for path in models]
    printer.table("", ["", *(m.name for m in found)], report.models_rows(found))
    show.write_reports(printer, {"models": [report.as_dict(m) for m in found]}, json, html)

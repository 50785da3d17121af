"""`onnx-fuse gradient`: write the graph of a model's gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import Debug, Html, Json, ModelArg, split_names


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
    from onnx_fuse import autodiff, report
    from onnx_fuse.onnx.load import read
    from onnx_fuse.onnx.save import save

    output = output or files.beside(model, ".grad.onnx")
    files.claim(
        {"MODEL": model}, {"-o": files.with_weights(output), "--json": json, "--html": html}
    )
    printer = show.printer()
    original = read(model)
    result = autodiff.gradient(
        files.load(original, str(model)), wrt=split_names(wrt) or None, loss=loss
    )
    save(result, output)
    found = [report.summary(original, "model", model), report.summary(result, "gradient", output)]
    printer.table("", ["", *(m.name for m in found)], report.models_rows(found))
    printer.text(f"wrote {output}")
    data = {"input": str(model), "output": str(output), "models": [*map(report.as_dict, found)]}
    show.write_reports(printer, data, json, html)

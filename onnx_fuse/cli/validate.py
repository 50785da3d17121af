"""`onnx-fuse validate`: a model, or its fusion, against its original."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_fuse.cli import checking, files, show
from onnx_fuse.cli.options import (
    Debug,
    Device,
    Html,
    Inputs,
    Json,
    ModelArg,
    Precision,
    Shapes,
    check_device,
    check_precision,
    parse_shapes,
)
from onnx_fuse.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from onnx_fuse.validate.gradients import GradientCheck


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
    files.claim(
        {"MODEL": model, "--against": against, "--inputs": inputs},
        {"--json": json, "--html": html},
    )
    from onnx_fuse import report
    from onnx_fuse.onnx.load import read

    printer = show.printer()
    check_device(device)
    check_precision(precision)
    if precision != "fp32" and (device != "cuda" or grad or blame):
        raise UsageError("--precision is of --device cuda, without --grad and --blame")
    original = against or model
    candidate: Any = model
    source = files.load(read(original), str(original))
    if against is None:
        from onnx_fuse import passes

        candidate = source.clone()
        passes.optimize(candidate)
    else:
        read(model)
    data: dict[str, Any] = {"model": str(model), "original": str(original)}
    checked = checking.check(
        original,
        candidate,
        shapes=parse_shapes(input_shapes),
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
    show.write_reports(printer, data, json, html)
    if failure:
        raise CheckFailed(f"{model}: {failure}")


def _check_gradients(model: Path, inputs: Path | None, device: str) -> GradientCheck:
    from onnx_fuse.validate.gradients import check_gradients
    from onnx_fuse.validate.inputs import read_feeds

    def work() -> GradientCheck:
        feeds = read_feeds(inputs, files.load(model, str(model))) if inputs else None
        return check_gradients(model, feeds=feeds, device=device)

    checked: GradientCheck = checking.guarded(work, str(model), device)
    return checked

"""`onnx-fuse compile`: a model as one file that runs without NVRTC and without ONNX libraries."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import (
    Debug,
    Html,
    Json,
    ModelArg,
    Precision,
    check_precision,
    hardware_of,
    shape_sets,
    split_names,
)
from onnx_fuse.errors import DeviceError, UsageError


def compile(
    model: ModelArg,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPU", help="The GPU that runs it: h200, h100, a100, ...; cuda is yours."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="OUT", help="Default: MODEL with .fused."),
    ] = None,
    precision: Precision = "fp32",
    level: Annotated[int, typer.Option(min=0, max=3, help="0 canonicalize to 3.")] = 2,
    input_shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--input-shapes",
            metavar="NAME:1,128 ...",
            help="Shapes of inputs. A name that comes again begins another program.",
        ),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(
            "--dim",
            metavar="SYMBOL=8 ...",
            help="Sizes by the symbols of the inputs: 8, or several as 1,8 or 16..128:16.",
        ),
    ] = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Compile MODEL into one file that runs without NVRTC and ONNX libraries, on GPUs named."""
    output = output or files.beside(model, ".fused")
    files.claim({"MODEL": model}, {"-o": output, "--json": json, "--html": html})
    from onnx_fuse import deploy

    printer = show.printer()
    check_precision(precision)
    try:
        targets = {name: hardware_of(name) for name in split_names(target) or ["cuda"]}
    except DeviceError as error:
        raise UsageError(f"name the GPU that will run it: --target h200 ({error})") from error
    graph = files.load(model, str(model))
    sets = shape_sets(graph, input_shapes, dim)
    started = time.perf_counter()
    found = files.named(
        str(model),
        lambda: deploy.compile(
            graph, output, targets=targets, shapes=sets, precision=precision, level=level
        ),
    )
    seconds = time.perf_counter() - started
    rows = [
        [name, targets[name].name, str(len(programs)), str(max(len(p.calls) for p in programs))]
        for name, programs in found.programs.items()
    ]
    printer.table("compiled", ["target", "GPU", "programs", "calls at most"], rows, left=2)
    printer.text(
        f"{found.modules} kernels, {found.weight_bytes / 1e6:,.1f} MB of weights, {precision}",
        f"{output}: {found.file_bytes / 1e6:,.1f} MB in {seconds:.1f} s",
    )
    data = {
        "model": str(model),
        "output": str(output),
        "precision": precision,
        "targets": {name: len(programs) for name, programs in found.programs.items()},
        "shapes": [{name: list(shape) for name, shape in s.items()} for s in found.shapes],
        "kernels": found.modules,
        "weight_bytes": found.weight_bytes,
        "file_bytes": found.file_bytes,
        "seconds": seconds,
    }
    show.write_reports(printer, data, json, html)

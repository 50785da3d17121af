"""The options that several commands have, and what their values mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from onnx_fuse.errors import UsageError

Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write what is shown as JSON.")
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write what is shown as HTML.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Device = Annotated[str, typer.Option(help="cpu (onnxruntime) or cuda (this project's kernels).")]
Inputs = Annotated[
    Path | None,
    typer.Option(metavar="FILE.npz", help="Arrays named like the inputs; default: generated."),
]
Precision = Annotated[
    str, typer.Option(metavar="NAME", help="On cuda: fp32, tf32, bf16x3, bf16x6, bf16 or fp16.")
]
ModelArg = Annotated[Path, typer.Argument(metavar="MODEL", help="An .onnx file.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--input-shapes", metavar="NAME:1,128 ...", help="Fix the shapes of inputs; -1 stays free."
    ),
]

Dims = Annotated[
    list[str] | None,
    typer.Option("--dim", metavar="SYMBOL=8 ...", help="Fix sizes by the symbols of the inputs."),
]


def check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: choose cpu or cuda")


def check_precision(precision: str) -> None:
    from onnx_fuse.problem import PRECISIONS

    if precision not in PRECISIONS:
        raise UsageError(f"--precision {precision}: choose one of {', '.join(PRECISIONS)}")


def hardware_of(target: str) -> Any:
    """The Hardware of a GPU by its short name, or of the one in this machine ("cuda")."""
    from onnx_fuse.problem import CHIPS, Hardware

    if target == "cuda":
        from onnx_fuse.runtime import device

        device.probe()
        return Hardware.detect()
    chips = {name.lower(): hw for name, hw in CHIPS.items()}
    if target.lower() not in chips:
        raise UsageError(f"--target {target}: choose cuda or one of {', '.join(chips)}")
    return chips[target.lower()]


def split_names(values: Sequence[str] | None) -> list[str]:
    return [name for value in values or () for name in value.split(",") if name]


def parse_shapes(values: Sequence[str] | None) -> dict[str, list[int]]:
    """`NAME:1,128` to {NAME: [1, 128]}; the name itself may hold colons."""
    shapes = {}
    for value in values or ():
        name, _, dims = value.rpartition(":")
        try:
            shapes[name] = [int(d) for d in dims.split(",")] if dims else []
        except ValueError as error:
            raise UsageError(f"--input-shapes {value}: expected NAME:1,128") from error
        if not name or any(d < -1 for d in shapes[name]):
            raise UsageError(f"--input-shapes {value}: expected NAME:1,128")
    return shapes


def parse_dims(values: Sequence[str] | None) -> dict[str, int]:
    """`SYMBOL=8` to {SYMBOL: 8}; the symbol itself may hold equal signs."""
    sizes: dict[str, int] = {}
    for value in values or ():
        symbol, _, number = value.rpartition("=")
        if not symbol or not number.isdecimal() or sizes.get(symbol, int(number)) != int(number):
            raise UsageError(f"--dim {value}: expected SYMBOL=8, one size a symbol")
        sizes[symbol] = int(number)
    return sizes

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
    from onnx_fuse.program.problem import PRECISIONS

    if precision not in PRECISIONS:
        raise UsageError(f"--precision {precision}: choose one of {', '.join(PRECISIONS)}")


def hardware_of(target: str) -> Any:
    """The Hardware of a GPU by its short name, or of the one in this machine ("cuda")."""
    from onnx_fuse.program.problem import CHIPS, Hardware

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


_MOST_PROGRAMS = 1024


def shape_sets(
    model: Any, shapes: Sequence[str] | None, dims: Sequence[str] | None
) -> list[dict[str, list[int]]]:
    """Shapes of inputs, one set a program: an input named again in `shapes` begins another set.

    Each set is taken with every combination of the sizes in `dims`: `SYMBOL=8`, `SYMBOL=1,8`,
    `SYMBOL=16..128:16`. Raises UsageError.
    """
    from itertools import product

    from onnx_fuse.onnx.shapes import fix_shapes

    given: list[list[str]] = [[]]
    for value in shapes or ():
        if value.rpartition(":")[0] in parse_shapes(given[-1]):
            given.append([])
        given[-1].append(value)
    choices: dict[str, list[int]] = {}
    for value in dims or ():
        symbol, _, sizes = value.rpartition("=")
        try:
            choices.setdefault(symbol, []).extend(
                s for part in sizes.split(",") for s in _run(part)
            )
        except ValueError as error:
            raise UsageError(f"--dim {value}: expected SYMBOL=8, =1,8 or =16..128:16") from error
    count = len(given)
    for sizes_of in choices.values():
        count *= len(sizes_of)
    if not count or count > _MOST_PROGRAMS:
        raise UsageError(f"--dim asks for {count:,} programs ({_MOST_PROGRAMS} at most)")
    sets = []
    for named in given:
        for combined in product(*choices.values()):
            closed = model.clone()
            fix_shapes(closed, parse_shapes(named), dict(zip(choices, combined, strict=True)))
            sets.append(
                {
                    v.name: [d if isinstance(d, int) else -1 for d in v.shape]
                    for v in closed.graph.inputs
                    if v.shape is not None
                }
            )
    return sets


def _run(text: str) -> range:
    """`8`, or `16..128`, or `16..128:16`, ends included."""
    low, dots, rest = text.partition("..")
    high, colon, step = rest.partition(":")
    if not dots:
        return range(int(low), int(low) + 1)
    return range(int(low), int(high) + 1, int(step) if colon else 1)

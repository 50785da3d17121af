"""The options that several commands have, and what their values mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from onnx_fuse.cli.show import Reports
from onnx_fuse.errors import UsageError
from onnx_fuse.options import Option, RunOptions, options_in, options_of

_SHARED = """
    model (MODEL): The .onnx file, or a file that onnx-fuse compile has written.
    trace (--trace FILE.json): Write a timeline to this file, as a trace for ui.perfetto.dev.
    inputs (--inputs FILE.npz): Read the inputs from this file, whose arrays have the inputs' names.
        The default is generated inputs.
    external (--save-as-external-data): Write the weights to OUT.data beside the model.
    """
"""What several commands have."""
PACKS: dict[str, bool | Literal["zero"]] = {"": False, "exact": True, "zero": "zero"}
"""What --pack takes."""
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (bool, int, float, Path)}
_KINDS |= {"Sequence[str]": list[str], "Selection": list[str], "str | os.PathLike[str]": Path}
_KINDS |= {"str | os.PathLike[str] | Mapping[str, Any]": Path, "Sequence[Any]": list[str]}
_KINDS |= dict.fromkeys(("Mapping[str, Sequence[int]]", "Mapping[str, int]"), list[str])
"""Types of options by the annotation of a dataclass's field; others are texts."""
Command = TypeVar("Command", bound=Callable[..., None])


def with_options(text: str = "", *classes: type, after: str = "") -> Callable[[Command], Command]:
    """Give the parameters of a command the options that a text and dataclasses declare.

    A parameter that is an object of a dataclass stands for the options of its fields. A field of
    `classes` that is no parameter becomes one, after the parameter `after`.
    """
    fields = {key: pair for cls in classes for key, pair in _fields(cls).items()}
    shared = {
        key: option for cls in (RunOptions, Reports) for key, option in options_of(cls).items()
    }
    declared = shared | options_in(_SHARED) | {k: v for k, (_, v) in fields.items()}
    declared |= options_in(text)
    read = {key: parse for key, parse in _READ.items() if declared[key] is shared[key]}

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        parameters: list[inspect.Parameter] = []
        objects: dict[str, Any] = {}
        for name, parameter in signature.parameters.items():
            kind: Any = parameter.annotation
            if is_dataclass(kind):
                objects[name] = kind
                parameters += [_field(*pair) for pair in _fields(kind).values()]
                continue
            if name in declared:
                kind = _parsed(parameter.annotation, declared[name])
                parameter = parameter.replace(annotation=kind)
            if parameter.kind is not parameter.VAR_KEYWORD:
                parameters.append(parameter)
            if name == after:
                added = (pair for key, pair in fields.items() if key not in signature.parameters)
                parameters += [_field(*pair) for pair in added]

        expanded = {key for cls in objects.values() for key in _fields(cls)}

        @wraps(command)
        def call(**values: object) -> None:
            values |= {key: parse(values[key]) for key, parse in read.items() if key in values}
            values |= {name: cls(**values_of(cls, values)) for name, cls in objects.items()}
            command(**{key: value for key, value in values.items() if key not in expanded})

        changed: Any = call
        changed.__signature__ = signature.replace(parameters=parameters)
        changed.__annotations__ = {p.name: p.annotation for p in parameters}
        return changed

    return decorate


def values_of(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a command that are those of a dataclass's options, where they are given."""
    args = {name: values[name] for name in _fields(cls)}
    several = (list, tuple)  # as the command and its context have them
    lists = {name: split_names(value) for name, value in args.items() if isinstance(value, several)}
    return {name: value for name, value in (args | lists).items() if value not in (None, [])}


def _fields(cls: Any) -> dict[str, tuple[inspect.Parameter, Option]]:
    """The parameter and the option of each field that the command line has."""
    parameters = inspect.signature(cls).parameters
    return {name: (parameters[name], o) for name, o in options_of(cls).items() if o.flag}


def _field(parameter: inspect.Parameter, option: Option) -> inspect.Parameter:
    kind = _KINDS.get(parameter.annotation.removesuffix(" | None"), str)
    if parameter.default in (None, ()):
        kind, parameter = kind | None, parameter.replace(default=None)
    return parameter.replace(annotation=_parsed(kind, option))


def _parsed(kind: object, option: Option) -> Any:
    if option.flag is None:
        return Annotated[kind, typer.Argument(metavar=option.metavar, help=option.help)]
    flags, metavar, text = option.flag.split(", "), option.metavar, option.help
    least, most = option.least, option.most
    if option.above:  # the parser has no open ranges; check_types refuses `least` itself
        text += f"  [x>{least}]" if most is None else f"  [{least}<x<={most}]"
        least = most = None
    return Annotated[kind, typer.Option(*flags, metavar=metavar, min=least, max=most, help=text)]


def _device_of(name: str) -> str:
    if name not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: choose cpu or cuda")
    return name


def precision_of(name: str) -> str:
    from onnx_fuse.program.problem import PRECISIONS

    if name not in PRECISIONS:
        raise UsageError(f"--precision {name}: choose one of {', '.join(PRECISIONS)}")
    return name


def hardware_of(target: str) -> Any:
    """The Hardware of a GPU by its short name, or of the GPU in this machine ("cuda").

    Raises UsageError for an unknown name, DeviceError where this machine has no usable GPU.
    """
    from onnx_fuse.program.problem import CHIPS

    if target == "cuda":
        from onnx_fuse.runtime import calibration, device

        device.probe()
        return calibration.of().hw
    chips = {name.lower(): hw for name, hw in CHIPS.items()}
    if target.lower() not in chips:
        raise UsageError(f"--target {target}: choose cuda or one of {', '.join(chips)}")
    return chips[target.lower()]


def split_names(values: Sequence[str] | None) -> list[str]:
    """The names of an option that may be repeated and may hold several, separated by commas."""
    return [name for value in values or () for name in value.split(",") if name]


def parse_shapes(values: Sequence[str] | None) -> dict[str, list[int]]:
    """Read `NAME:1,128` as {NAME: [1, 128]}; the name itself may hold colons."""
    shapes = {}
    for value in values or ():
        name, _, dims = value.rpartition(":")
        try:
            shapes[name] = [int(d) for d in dims.split(",")] if dims else []
        except ValueError as error:
            raise UsageError(f"--input-shapes {value}: expected NAME:1,128") from error
        if not name or any(d < -1 for d in shapes[name]):
            raise UsageError(
                f"--input-shapes {value}: expected NAME:1,128, with -1 for a dynamic size"
            )
    return shapes


def parse_dims(values: Sequence[str] | None) -> dict[str, int]:
    """Read `SYMBOL=8` as {SYMBOL: 8}; the symbol itself may hold equal signs."""
    sizes: dict[str, int] = {}
    for value in values or ():
        symbol, _, number = value.rpartition("=")
        if not symbol or not number.isdecimal() or sizes.get(symbol, int(number)) != int(number):
            raise UsageError(f"--dim {value}: expected SYMBOL=8, with one size for each symbol")
        sizes[symbol] = int(number)
    return sizes


_READ: dict[str, Callable[[Any], Any]] = {
    "shapes": parse_shapes, "dims": parse_dims, "device": _device_of, "precision": precision_of,
}  # fmt: skip
"""What the values of the options of RunOptions are, by their names."""
_MOST_PROGRAMS = 1024


def size_ranges(dims: Sequence[str] | None) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """Split `--dim` into what names sizes one by one and `SYMBOL=1..512`, all sizes between two."""
    named, ranges = [], {}
    for value in dims or ():
        symbol, _, sizes = value.rpartition("=")
        low, dots, high = sizes.partition("..")
        if symbol and dots and low.isdecimal() and high.isdecimal():
            ranges[symbol] = int(low), int(high)
        else:
            named.append(value)
    return named, ranges


def parse_mkn(text: str) -> tuple[int, int, int]:
    """The sizes of `--shape M,K,N`. Raises UsageError."""
    try:
        m, k, n = (int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--shape {text}: expected M,K,N, as in 8192,768,3072") from None
    return m, k, n


def shape_sets(
    model: Any, shapes: Sequence[str] | None, dims: Sequence[str] | None
) -> list[dict[str, list[int]]]:
    """The shapes of the inputs for each program: an input named again in `shapes` begins a new one.

    Each of these is combined with all sizes in `dims`: `SYMBOL=8`, `SYMBOL=1,8`,
    `SYMBOL=16..128:16`. Raises UsageError.
    """
    from itertools import product

    from onnx_fuse.importer.shapes import fix_shapes

    groups: list[list[str]] = [[]]
    for value in shapes or ():
        if value.rpartition(":")[0] in parse_shapes(groups[-1]):
            groups.append([])
        groups[-1].append(value)
    choices: dict[str, list[int]] = {}
    for value in dims or ():
        symbol, _, sizes = value.rpartition("=")
        try:
            choices.setdefault(symbol, []).extend(
                s for part in sizes.split(",") for s in _sizes_of(part)
            )
        except ValueError as error:
            raise UsageError(f"--dim {value}: expected SYMBOL=8, =1,8 or =16..128:16") from error
    count = len(groups)
    for sizes_of in choices.values():
        count *= len(sizes_of)
    if not count or count > _MOST_PROGRAMS:
        raise UsageError(
            f"--dim asks for {count:,} programs: give sizes that make 1 to {_MOST_PROGRAMS}"
        )
    sets = []
    for named in groups:
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


def _sizes_of(text: str) -> range:
    """The sizes that `8`, `16..128` or `16..128:16` stand for, ends included."""
    low, dots, rest = text.partition("..")
    high, colon, step = rest.partition(":")
    if not dots:
        return range(int(low), int(low) + 1)
    return range(int(low), int(high) + 1, int(step) if colon else 1)

"""Options, each declared once as text: arguments, command line, checkpoints and docs are of it."""

from __future__ import annotations

import inspect
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from numbers import Integral, Real
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar, overload

from onnx_fuse.errors import UsageError

P = ParamSpec("P")
A_co = TypeVar("A_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")
_FLAG = r"--?[\w-]+"
_RANGE = r"(?P<above>above )?(\d[\d.]*)(?: or more| to (\d[\d.]*)|(?(above)|(?!)))"
_METAVAR = r"(?!\d+ or more)[^ ,)][^)]*?"
_ENDS = rf"(?:(?:, |(?<=\()){_RANGE})?"
_PARSER = rf" \(({_FLAG}(?:(?:, |/){_FLAG})*)?(?: ?({_METAVAR}))?{_ENDS}\)"
_ENTRY = re.compile(rf"(\w+)(?:{_PARSER})?: (.*?)(?: \| (.*))?")


@dataclass(frozen=True)
class Option:
    """What a text says of an option: `name (--flag METAVAR, 1 or more): Help. | More help.`"""

    flag: str | None
    """The names on the command line; None for an argument there, or what is no part of it."""
    metavar: str | None
    above: str | None
    """Whether `least` itself is too little."""
    least: float | None
    most: float | None
    help: str
    """What --help says."""
    more: str | None
    """What a docstring says besides."""


def options_in(text: str) -> dict[str, Option]:
    """The options that a text declares, by their names; further lines of one are indented."""
    entries = (" ".join(entry.split()) for entry in re.split(r"\n(?=\w)", inspect.cleandoc(text)))
    matches = [_ENTRY.fullmatch(entry) for entry in entries if entry]
    options = {}
    for name, flag, metavar, above, *ends, text, more in (m.groups() for m in matches if m):
        least, most = (n if n is None else float(n) if "." in n else int(n) for n in ends)
        options[name] = Option(flag, metavar, above, least, most, text, more)
    return options


def options_of(cls: type) -> dict[str, Option]:
    """The options of a dataclass by the names of its fields, from TEXTS of it and its bases."""
    texts = [vars(base).get("TEXTS", "") for base in reversed(cls.__mro__)]
    return {name: option for text in texts for name, option in options_in(text).items()}


class _Takes(Protocol[P, A_co]):
    @overload
    def __call__(self, function: Callable[[A_co], R], /) -> Callable[P, R]: ...

    @overload
    def __call__(self, function: Callable[[S, A_co], R], /) -> Callable[Concatenate[S, P], R]: ...


def takes(arguments: Callable[P, A_co]) -> _Takes[P, A_co]:
    """Let a function be called with the arguments of a dataclass, and get them as that one object.

    Its signature, and the line `{options}` in its docstring, name every field. What comes before
    the object, as `self` does, stays.
    """
    cls: Any = arguments

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        signature = inspect.signature(function)
        *before, _ = signature.parameters.values()
        fields = inspect.signature(cls).parameters.values()
        cls.__init__.__qualname__ = function.__qualname__  # which a TypeError names

        @wraps(function)
        def call(*args: object, **options: object) -> R:
            lead = [*args[: len(before)], *(options.pop(p.name) for p in before[len(args) :])]
            given = cls(*args[len(before) :], **options)
            check_types(given)
            return function(*lead, given)

        shown = signature.replace(parameters=[*before, *fields])
        call.__signature__ = shown  # type: ignore[attr-defined]
        text = function.__doc__ or ""
        indent = text.partition("{options}")[0].rpartition("\n")[2]
        call.__doc__ = text.replace("{options}", described(cls, indent).lstrip())
        return call

    return decorate


def check_types(options: Any) -> None:
    """Raise UsageError where a field of a dataclass of options has another type than it says.

    A number has to lie within the range that is declared for it.
    """
    declared = options_of(type(options))
    for field in fields(options):
        value, option = getattr(options, field.name), declared.get(field.name)
        kinds = [kind.partition("[")[0] for kind in _ALTERNATIVES.findall(str(field.type))]
        if not all(kind in _IS for kind in kinds):
            continue  # a type of this package's, which what takes it checks
        if not any(_IS[kind][0](value) for kind in kinds):
            words = " or ".join(_IS[kind][1] for kind in kinds)
            shown = " ".join(repr(value).split())
            raise UsageError(f"{field.name} is {shown:.80}: it takes {words}")
        if option is None or value is None or isinstance(value, str) or option.least is None:
            continue
        least, most = option.least, math.inf if option.most is None else option.most
        if not (least < value if option.above else least <= value) or value > most:
            words = f"{option.above or 'at least '}{least}"
            words += "" if option.most is None else f", and at most {most}"
            raise UsageError(f"{field.name} is {value}: it must be {words}")


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


_ALTERNATIVES = re.compile(r"[\w.]+(?:\[.*?\](?!\]))?")
"""The types that an annotation joins by "|"."""
_IS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda v: isinstance(v, bool) or type(v).__name__ == "bool_", "True or False"),
    "int": (lambda v: _is_number(v, Integral), "a whole number"),
    "float": (lambda v: _is_number(v, Real), "a number"),
    "str": (lambda v: isinstance(v, str), "a text"),
    "os.PathLike": (lambda v: isinstance(v, os.PathLike), "a path"),
    "tuple": (lambda v: isinstance(v, list | tuple), "a list"),
    "Sequence": (lambda v: isinstance(v, Iterable) and not isinstance(v, str | Mapping), "a list"),
    "Mapping": (lambda v: isinstance(v, Mapping), "a dictionary"),
    "None": (lambda v: v is None, "None"),
}
"""What each of them takes, and in words."""


def described(cls: type, indent: str) -> str:
    """The fields of a dataclass of options as lines of a docstring."""
    lines = []
    for name, option in options_of(cls).items():
        text = f"{name}: {option.help} {option.more or ''}"
        lines += textwrap.wrap(text, 88, initial_indent=indent, subsequent_indent=f"{indent}    ")
    return "\n".join(lines)


def shared(cls: type, options: object) -> dict[str, Any]:
    """The values of the fields that a dataclass has in common with that of `options`."""
    return {f.name: getattr(options, f.name) for f in fields(cls) if hasattr(options, f.name)}


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """The sizes of a model's inputs."""

    TEXTS: ClassVar = """
        shapes (--input-shapes NAME:1,128 ...): Fix the shapes of these inputs; a size of -1 stays
            dynamic.
        dims (--dim SYMBOL=8 ...): Fix sizes by the names that the model's inputs have for them,
            such as batch=8.
        """
    shapes: Mapping[str, Sequence[int]] | None = None
    dims: Mapping[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class RunOptions(SizeOptions):
    """Where a model runs, and in what."""

    TEXTS: ClassVar = """
        device (--device cpu|cuda): Run on cpu (by onnxruntime) or on cuda (by this package's
            kernels).
        precision (--precision NAME): Compute in this precision on cuda: fp32, tf32, bf16x3, bf16x6,
            bf16 or fp16.
        providers (--providers NAME ...): Instead of --device, run on the first of these execution
            providers that the installed onnxruntime has, such as OpenVINOExecutionProvider.
            CUDAExecutionProvider means this package's kernels. | An entry may be a tuple of a name
            and options.
        """
    device: str = "cpu"
    precision: str = "fp32"
    providers: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.providers and self.device != "cpu":
            raise UsageError("providers take the place of the device: give one of the two")


@dataclass(frozen=True, kw_only=True)
class OutputOptions(RunOptions):
    """How the outputs of a model are compared with its original's."""

    TEXTS: ClassVar = """
        seed: The seed of generated values.
        blame (--blame): Name the nodes that cause the difference. | They are `Check.culprits`.
        rtol (--rtol, 0.0 or more): Allow this difference, as a share of an output's largest value.
            | The default depends on the coarsest float type in the graph.
        atol (--atol, 0.0 or more): Also allow this absolute difference.
        """
    seed: int = 0
    blame: bool = False
    rtol: float | None = None
    atol: float | None = None


@dataclass(frozen=True, kw_only=True)
class GradientOptions(RunOptions):
    """How the gradients of a model are compared with differences."""

    TEXTS: ClassVar = """
        seed: The seed of generated values, of the cotangents and of the directions.
        every (--all): Compare each tensor's gradient by itself, not many at once. | That takes four
            runs of the model for each tensor.
        """
    seed: int = 0
    every: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckOptions(OutputOptions, GradientOptions):
    """What a check of a model is asked for."""

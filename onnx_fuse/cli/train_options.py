"""Options of `train` that are more than a number: groups, losses, and the file of --config."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnx_fuse.cli import show
from onnx_fuse.errors import INSTALL_YAML, UsageError

if TYPE_CHECKING:
    from onnx_fuse.distributed.world import World
    from onnx_fuse.training.groups import Group
    from onnx_fuse.training.losses import Term


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of a TOML or YAML file for defaults of the command's options, by their names.

    Raises UsageError for a file that is none, and for a name that is no option.
    """
    if path is None:
        return None
    parse = _yaml if path.suffix.lower() in (".yaml", ".yml") else _toml
    try:
        values = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UsageError(f"--config {path}: {reason}") from error
    options = {
        flag.lstrip("-"): parameter
        for parameter in context.command.params
        for flag in parameter.opts
        if flag.startswith("--") and parameter.name != "config"
    }
    settings: dict[str, Any] = {}
    for key, value in values.items():
        parameter = options.get(key.replace("_", "-"))
        if parameter is None:
            raise UsageError(
                f"--config {path}: '{key}' is not an option: use the names of the command's "
                "options, such as batch-size"
            )
        if value is None:
            raise UsageError(f"--config {path}: '{key}' has no value")
        several = isinstance(value, list)
        if isinstance(value, Mapping) or several != parameter.multiple:
            value = [value] if parameter.multiple and not isinstance(value, Mapping) else None
        if value is None:
            kind = "a list of values" if several else "a table"
            raise UsageError(f"--config {path}: '{key}' is {kind}, but the option takes one value")
        settings[str(parameter.name)] = value
    context.default_map = {**(context.default_map or {}), **settings}
    return path


def _toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    return tomllib.loads(text)


def _yaml(text: str) -> dict[str, Any]:
    """The mapping that a YAML document is. Raises ValueError for another, and without PyYAML."""
    try:
        import yaml
    except ImportError as error:
        raise ValueError(f"YAML needs PyYAML: {INSTALL_YAML}; or write the file as TOML") from error
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(values, dict):
        raise ValueError("expected lines such as 'epochs: 3'")
    return {str(key): value for key, value in values.items()}


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml|FILE.yaml",
        is_eager=True,
        callback=read_config,
        help="Read options from this file, by their names without dashes; the command line "
        "overrides them.",
    ),
]


def parse_groups(texts: list[str] | None) -> tuple[Group, ...]:
    """The groups that `GLOB:lr=1e-4,weight_decay=0,start=100,frozen` describes.

    Raises UsageError.
    """
    from onnx_fuse.training.groups import Group

    groups = []
    for text in texts or ():
        glob, _, settings = text.rpartition(":")
        kinds = {"lr": float, "scale": float, "weight_decay": float, "start": int}
        if not glob or not settings:
            example = "GLOB:lr=1e-4,weight_decay=0 or GLOB:frozen"
            raise UsageError(f"--group {text}: write it as {example}")
        values = _pairs(text, "--group", settings, kinds, flags=("frozen",))
        groups.append(Group((glob,), **values))
    return tuple(groups)


def parse_numbers(option: str, text: str) -> list[float]:
    """The numbers between commas. Raises UsageError."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text}: expected numbers, as in 0.485,0.456,0.406") from None


def parse_values(option: str, texts: list[str] | None) -> dict[str, Any]:
    """The values of `NAME=VALUE` by name; one that is no JSON is a text. Raises UsageError."""
    values: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise UsageError(f"{option} {text}: write it as NAME=VALUE")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def parse_terms(texts: list[str] | None) -> list[Term]:
    """The losses that `mse,output=z,weight=0.5,labels=t` describes. Raises UsageError."""
    from onnx_fuse.training.losses import Term

    terms = []
    for text in texts or ():
        loss, _, settings = text.partition(",")
        values = _pairs(
            text, "--add-loss", settings, {"output": str, "weight": float, "labels": str}
        )
        terms.append(Term(loss, **values))
    return terms


def _pairs(
    text: str, option: str, settings: str, kinds: Mapping[str, type], flags: tuple[str, ...] = ()
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in filter(None, settings.split(",")):
        name, equals, value = pair.partition("=")
        if not equals and name in flags:
            values[name] = True
            continue
        if name not in kinds:
            raise UsageError(f"{option} {text}: '{name}' is none of {', '.join((*kinds, *flags))}")
        try:
            values[name] = kinds[name](value)
        except ValueError as error:
            raise UsageError(f"{option} {text}: '{value}' is no number") from error
    return values


def begin_ranks(gpus: int | None) -> World | None:
    """The ranks of the run that this process is one of, or None for a run of one process.

    Without a launcher's variables this process becomes the launcher of `gpus` ranks with the same
    command line, and ends with them. Raises UsageError where a launcher has started another number.
    """
    from onnx_fuse.distributed import environment

    place = environment.place(os.environ)
    if place is None and gpus is not None and gpus > 1:
        from onnx_fuse.distributed import launch

        arguments = shlex.split(show.command_line.get())[1:]
        raise typer.Exit(launch.run([sys.executable, "-m", "onnx_fuse", *arguments], gpus))
    if place is None or place.size == 1:
        return None
    if gpus not in (None, place.size):
        raise UsageError(f"--gpus {gpus}, but the launcher has started {place.size} processes")
    from onnx_fuse.distributed.world import world

    ranks = world()
    if ranks.rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    return ranks

"""Read a model, and make sure that a command does not overwrite a file that it reads."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.files import is_stream

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnx_fuse.ir.constants import Model

T = TypeVar("T")
Paths: TypeAlias = "Mapping[str, Path | Sequence[Path] | None]"


def load(model: Model, name: str) -> ir.Model:
    """`session.load`, with `name` in the error even where the model was parsed before."""
    from onnx_fuse import session

    return named(name, lambda: session.load(model))


def named(name: str, work: Callable[[], T]) -> T:
    """Return the result of `work`; a ModelError that names no file gets this `name`."""
    try:
        return work()
    except ModelError as error:
        text = str(error).removeprefix("model: ")
        raise ModelError(text if name in text else f"{name}: {text}") from error


def default_output(model: Path, suffix: str) -> Path:
    """The default output of a command. Raises UsageError for a path without a name."""
    if not model.name:
        raise UsageError(f"'{model}' is not a file name: give the path of an .onnx file as MODEL")
    return model.with_suffix(suffix)


def with_weights(output: Path) -> tuple[Path, ...]:
    """The files that may be written for a model: itself, and its weights beside it."""
    if is_stream(output) or output.is_dir():
        return (output,)
    return (output, output.with_name(f"{output.name}.data"))


def check_paths(reads: Paths, writes: Paths) -> None:
    """Check all files of a command, by the option that names each, before any work is done.

    The weights that a model names and the arrays in a folder of data are included, and links are
    followed. Raises UsageError where the command would overwrite a file that it reads, or write one
    file twice, and ModelError where a file cannot be written.
    """
    taken: dict[object, str] = {}
    models: list[Path] = []
    for option, path in _flat(reads):
        for part in (path, *(path.glob("*.npy") if path.is_dir() else ())):
            taken.setdefault(_key(part), option)
        if path.is_file():
            models.append(path)
    outputs = list(_flat(writes))
    if any(path.exists() for _, path in outputs):
        from onnx_fuse.importer.load import external_files

        for model in models:
            for part in external_files(model):
                taken.setdefault(_key(part), f"the weights of {model}")
    written: dict[object, str] = {}
    for option, path in outputs:
        key = _key(path)
        if key is None:
            continue
        if key in taken:
            raise UsageError(
                f"{path}: the output is the input: {option} would overwrite {taken[key]}; give "
                "another path"
            )
        if key in written:
            raise UsageError(
                f"{path}: {written[key]} and {option} would write the same file; give another path"
            )
        written[key] = option
    if all(path.exists() for _, path in _flat(reads)):  # otherwise the missing file is reported
        for option, path in outputs:
            _writable(option, path)


# outputs that are folders, made where they are missing
_FOLDERS = ("--checkpoint", "--records", "--adapters DIR", "-o DIR")


def _flat(paths: Paths) -> Iterator[tuple[str, Path]]:
    for option, value in paths.items():
        for path in () if value is None else [value] if isinstance(value, Path) else value:
            yield option, path


def _key(path: Path) -> object:
    """A key that is equal for two names of one file, or None for a device such as /dev/null."""
    for name in (path, os.path.realpath(path)):  # the latter finds none/../m.onnx too
        with contextlib.suppress(OSError):
            status = os.stat(name)
            return None if stat.S_ISCHR(status.st_mode) else (status.st_dev, status.st_ino)
    return os.path.realpath(path)


def _writable(option: str, path: Path) -> None:
    """Raise ModelError where `path` cannot be written, before hours of work are lost."""
    code = 0
    place = Path(os.path.realpath(path))
    if option in _FOLDERS:
        if path.exists() and not path.is_dir():
            code = errno.ENOTDIR
    elif is_stream(path):
        return
    elif path.is_dir():
        code = errno.EISDIR
    elif not place.parent.is_dir():
        code = errno.ENOTDIR if place.parent.exists() else errno.ENOENT
    elif not os.access(place.parent, os.W_OK | os.X_OK):
        code = errno.EACCES
    if code:
        advice = _ADVICE.get(code, "")
        raise ModelError(f"{path}: cannot be written: {os.strerror(code)}{advice}")


_ADVICE = {
    errno.EISDIR: ": give the path of a file in it",
    errno.ENOENT: ": make its folder first",
    errno.EACCES: ": its folder may not be written to",
}

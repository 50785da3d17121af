"""Reading a model, and writing a file so that it stands whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnx_fuse.errors import ModelError, UsageError


def load(model: Any, name: str) -> Any:
    """`session.load`, with the file's name in the error also where the model is parsed already."""
    from onnx_fuse import session

    try:
        return session.load(model)
    except ModelError as error:
        raise ModelError(str(error).replace("model: ", f"{name}: ", 1)) from error


def refuse_same(model: Path, output: Path) -> None:
    same = output.resolve() == model.resolve()
    if same or (output.exists() and model.exists() and output.samefile(model)):
        raise UsageError(f"{output}: the output is the input: choose another with -o")
    if output.exists() and not output.is_file():
        raise ModelError(f"{output}: cannot be written: it is no plain file")


@contextlib.contextmanager
def written_beside(output: Path) -> Iterator[Path]:
    """A path in a new folder beside `output`; what is there at the end is moved to `output`."""
    try:
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as folder:
            yield Path(folder) / output.name
            # The data file first: a model never stands without its weights.
            for path in sorted(Path(folder).iterdir(), key=lambda p: p.name == output.name):
                target = output.parent / path.name
                if target != output and target.exists() and not output.exists():
                    raise ModelError(f"{target}: already there, and not of {output}")
                os.replace(path, target)
    except OSError as error:
        raise ModelError(f"{output}: cannot be written: {error.strerror or error}") from error

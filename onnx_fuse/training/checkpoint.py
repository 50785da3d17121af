"""Checkpoints: one folder a step, tensors in safetensors and all else in a JSON manifest.

A checkpoint is written under another name and renamed, so a folder `step-N` is always whole: a
killed process leaves at most a draft, which the next run removes. Other folders beside these, such
as copies, are neither counted nor touched.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnx_fuse import files
from onnx_fuse.arrays import Array
from onnx_fuse.errors import DataError, UsageError

__all__ = ["exists", "locked", "read", "write"]
__dir__ = __all__.copy

FORMAT = 1
KEEP = 2  # the number that stay: the older one is there in case the newer is damaged later
_TENSORS, _MANIFEST, _DRAFT = "state.safetensors", "manifest.json", ".draft-"
_FIELDS: dict[str, type] = {
    "format": int,
    "step": int,
    "model": str,
    "settings": dict,
    "extra": dict,
    "sha256": str,
}


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Lock `folder` for the checkpoints of this thread's training; make it where it is missing.

    The lock ends with the block, or with the process in whatever way it ends. Drafts of processes
    that died are removed, and so is a new folder into which nothing was written. Raises UsageError
    where another training has locked the folder, DataError where it cannot be written.
    """
    folder = Path(folder)
    new = not folder.exists()
    with _faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    with files.locked(folder) as mine:
        if not mine:
            raise UsageError(
                f"{folder}: another training writes its checkpoints there: wait for it, or give "
                "another folder"
            )
        files.sweep(folder, _DRAFT)
        try:
            yield
        finally:
            if new:
                with contextlib.suppress(OSError):  # it holds checkpoints now
                    folder.rmdir()


@contextlib.contextmanager
def _faults(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error


def write(
    folder: str | os.PathLike[str], tensors: Mapping[str, Array], manifest: Mapping[str, Any]
) -> Path:
    """Write `tensors` and `manifest` as `folder/step-NNNNNNNN`, and return that path.

    The number is manifest["step"].

    Of the steps up to this one the KEEP newest stay. Raises DataError where the folder cannot be
    written, UsageError while another training has locked it.
    """
    from safetensors.numpy import save

    folder = Path(folder)
    target = folder / _name(manifest["step"])
    data = save({name: np.asarray(array, order="C") for name, array in tensors.items()})
    digest = hashlib.sha256(data).hexdigest()
    text = json.dumps({"format": FORMAT, **manifest, "sha256": digest}, indent=1)
    with locked(folder), _faults(folder), files.locked_folder(folder, _DRAFT) as draft:
        _write(draft / _TENSORS, data)
        _write(draft / _MANIFEST, text.encode())
        _put(draft, target)
        # Newer ones do not belong to this run: they were damaged, so it continued from before them.
        steps = _steps(folder)
        for step in [n for n in steps if n <= manifest["step"]][KEEP:]:
            shutil.rmtree(steps[step])
    return target


def _put(draft: Path, target: Path) -> None:
    """Rename `draft` to `target`; an old `target` stays if that fails or is interrupted."""
    if not target.exists():
        os.replace(draft, target)
        return
    with files.locked_folder(target.parent, _DRAFT) as replaced:
        os.replace(target, replaced)
        try:
            os.replace(draft, target)
        except BaseException:
            if not target.exists():
                os.replace(replaced, target)
            raise


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _steps(folder: Path) -> dict[int, Path]:
    """The checkpoints of a folder by step, newest first; copies under other names do not count."""
    steps = {}
    for path in folder.glob("step-*"):
        number = path.name.removeprefix("step-")
        valid_name = re.fullmatch("[0-9]{8,18}", number) and path.name == _name(int(number))
        if valid_name and path.is_dir() and not path.is_symlink():
            steps[int(number)] = path
    return dict(sorted(steps.items(), reverse=True))


def exists(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` holds a checkpoint, damaged or not."""
    return bool(_steps(Path(folder)))


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, Any]]:
    """The tensors and the manifest of the newest undamaged checkpoint in `folder`.

    A damaged one gives a warning. Raises DataError where there is no undamaged one.
    """
    undamaged = filter(None, map(_read, _steps(Path(folder)).values()))
    newest = next(undamaged, None)
    if newest is None:
        raise DataError(
            f"{folder}: the folder has no valid checkpoint to resume from: give the folder of "
            "the run, or begin a new run"
        )
    return newest


def _read(path: Path) -> tuple[dict[str, Array], dict[str, Any]] | None:
    from safetensors import SafetensorError

    # What the parsers raise on bytes that are none of ours; a deep list ends in RecursionError.
    faults = (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError)
    try:
        return _parse(path)
    except faults as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        warnings.warn(f"{path} is damaged and skipped: {reason}", stacklevel=4)
        return None


def _parse(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    from safetensors.numpy import load

    manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict):
        raise ValueError(f"{_MANIFEST} is no object")
    for field, kind in _FIELDS.items():
        if type(manifest.get(field)) is not kind:
            raise ValueError(f"{_MANIFEST} has no '{field}' that is of type {kind.__name__}")
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']}, this version reads {FORMAT}")
    if _name(manifest["step"]) != path.name:
        raise ValueError(f"{_MANIFEST} is of step {manifest['step']}")
    data = (path / _TENSORS).read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
        raise ValueError(f"{_TENSORS} is not what was written")
    return dict(load(data)), manifest

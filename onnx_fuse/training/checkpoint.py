"""Checkpoints: one folder a step, tensors in safetensors and all else in a JSON manifest.

A checkpoint is written under another name and renamed, so a folder `step-*` is always whole: a
killed process leaves at most a draft, which the next save removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnx_fuse.errors import DataError

FORMAT = 1
KEEP = 2  # how many stay: the older one is there in case the newer is damaged later
_TENSORS, _MANIFEST, _DRAFT = "state.safetensors", "manifest.json", ".draft-"
Array = np.ndarray[Any, Any]


def write(
    folder: str | os.PathLike[str], tensors: Mapping[str, Array], manifest: Mapping[str, Any]
) -> Path:
    """Write the checkpoint `folder/step-NNNNNNNN` of manifest["step"]; the KEEP newest stay.

    Raises DataError where the folder cannot be written.
    """
    from safetensors.numpy import save

    folder = Path(folder)
    target = folder / f"step-{manifest['step']:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=folder))
        data = save({name: np.asarray(array, order="C") for name, array in tensors.items()})
        _write(draft / _TENSORS, data)
        digest = hashlib.sha256(data).hexdigest()
        text = json.dumps({"format": FORMAT, **manifest, "sha256": digest}, indent=1)
        _write(draft / _MANIFEST, text.encode())
        if target.exists():
            os.replace(target, Path(tempfile.mkdtemp(prefix=_DRAFT, dir=folder)) / "replaced")
        os.replace(draft, target)
        for old in _steps(folder)[KEEP:]:
            shutil.rmtree(old)
        for stale in folder.glob(f"{_DRAFT}*"):
            shutil.rmtree(stale, ignore_errors=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error
    return target


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _steps(folder: Path) -> list[Path]:
    """Checkpoints of a folder, newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def exists(folder: str | os.PathLike[str]) -> bool:
    return bool(_steps(Path(folder)))


def read(folder: str | os.PathLike[str]) -> tuple[dict[str, Array], dict[str, Any]]:
    """Tensors and manifest of the newest checkpoint that is undamaged; a damaged one is warned of.

    Raises DataError where there is none.
    """
    whole = filter(None, map(_read, _steps(Path(folder))))
    found = next(whole, None)
    if found is None:
        raise DataError(f"{folder}: holds no whole checkpoint to resume from")
    return found


def _read(path: Path) -> tuple[dict[str, Array], dict[str, Any]] | None:
    try:
        return _parse(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        warnings.warn(f"{path} is damaged and left out: {error}", stacklevel=4)
        return None


def _parse(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    from safetensors.numpy import load

    manifest = json.loads((path / _MANIFEST).read_text())
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']}, this version reads {FORMAT}")
    data = (path / _TENSORS).read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
        raise ValueError(f"{_TENSORS} is not what was written")
    return dict(load(data)), manifest

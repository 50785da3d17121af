"""Exceptions and the exit code each one becomes on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = [
    "CheckFailed",
    "DataError",
    "DeviceError",
    "ModelError",
    "NoGradientWarning",
    "OnnxFuseError",
    "UsageError",
]
__dir__ = __all__.copy

INSTALL_CUDA = 'pip install ".[cuda13]"'
"""The command that installs the CUDA packages, in a checkout of this project."""
INSTALL_CUBLASLT = 'pip install ".[cublaslt]"'
"""The command that installs cuBLASLt, in a checkout of this project."""
INSTALL_DISTRIBUTED = 'pip install ".[distributed]"'
"""The command that installs NCCL and its bindings, in a checkout of this project."""
INSTALL_TORCH = 'pip install ".[torch]"'
"""The command that installs PyTorch, in a checkout of this project."""

INSTALL_YAML = 'pip install ".[yaml]"'
"""The command that installs PyYAML, in a checkout of this project."""
INSTALL_TEXT = 'pip install ".[text]"'
"""The command that installs tokenizers and Jinja, in a checkout of this project."""


class OnnxFuseError(Exception):
    """Base of every error that a user can cause."""

    exit_code = 1
    """The exit code of a command that ends with this error."""


class ModelError(OnnxFuseError):
    """The model file is malformed, or asks for something that is not supported (exit 1)."""


class UsageError(OnnxFuseError):
    """The caller's arguments contradict each other or the model (exit 2)."""

    exit_code = 2


class CheckFailed(OnnxFuseError):
    """A comparison with the original model failed, or a step was not finite (exit 3)."""

    exit_code = 3


class DeviceError(OnnxFuseError):
    """The GPU, its driver or NVRTC is missing or failed (exit 1)."""


class DataError(OnnxFuseError):
    """Training data or a checkpoint is missing, malformed, or does not fit the model (exit 1)."""


def listed(name: str, value: object) -> list[Any]:
    """An argument that holds several names or objects as a list; one name is a list of one.

    Raises UsageError for what is neither.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Iterable):
        raise UsageError(f"{name} is {value!r:.80}: it takes a list")
    return list(value)


def unknown(noun: str, name: str, names: Iterable[str]) -> str:
    """The sentence that refuses a name: it says which one was probably meant, and lists all."""
    known = list(names)
    return f"unknown {noun} '{name}'{did_you_mean(name, known)}: choose one of {', '.join(known)}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """What a sentence adds to an unknown name: the one that was probably meant, or nothing."""
    from difflib import get_close_matches

    by_lower = {known.lower(): known for known in names}
    close = get_close_matches(name.lower(), by_lower, 1)
    return f" (did you mean '{by_lower[close[0]]}'?)" if close else ""


class NoGradientWarning(UserWarning):
    """Weights that no gradient reaches are left out of a training run, or of a gradient's file."""


def printable(text: str) -> str:
    """Write out the control characters of a text, so that a name in a file cannot steer a terminal.

    Line ends and tabs stay, and so do all letters. Marks that change the direction of text count
    as control characters.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii")
        for c in text
    )

"""Exceptions and the exit code each one becomes on the command line."""

from __future__ import annotations

INSTALL_CUDA = "pip install 'onnx-fuse[cuda13]'"
"""What mends an installation without the CUDA packages."""


class OnnxFuseError(Exception):
    """Base of every error a user can cause; `exit_code` is what the command returns."""

    exit_code = 1


class ModelError(OnnxFuseError):
    """The model file, or what it asks for, is malformed or unsupported (exit 1)."""


class UsageError(OnnxFuseError):
    """The caller's arguments contradict each other or the model (exit 2)."""

    exit_code = 2


class CheckFailed(OnnxFuseError):
    """A comparison with the oracle failed (exit 3)."""

    exit_code = 3


class DeviceError(OnnxFuseError):
    """The GPU, its driver or NVRTC is missing or failed (exit 1)."""


class DataError(OnnxFuseError):
    """Training data or a checkpoint is missing, malformed, or does not fit the model (exit 1)."""


def printable(text: str) -> str:
    """The text with control characters written out: a name in a file must not steer a terminal.

    Line ends and tabs stay; so do all letters. Marks that turn the direction of text count too.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii")
        for c in text
    )

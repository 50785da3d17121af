"""The `onnx-fuse` command. Everything heavy is imported inside the command that needs it."""

from __future__ import annotations

from onnx_fuse.cli.process import main

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from onnx_fuse.cli.app import expand, run_command

__all__ = ["expand", "main", "run_command"]


def __getattr__(name: str) -> Any:
    """The parser's part, imported when it is asked for: `main` first sees to the signals."""
    if name not in __all__:
        raise AttributeError(f"module 'onnx_fuse.cli' has no attribute '{name}'")
    from onnx_fuse.cli import app

    return getattr(app, name)

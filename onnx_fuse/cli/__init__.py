"""The `onnx-fuse` command. Everything heavy is imported inside the command that needs it."""

from onnx_fuse.cli.app import expand, main, run_command

__all__ = ["expand", "main", "run_command"]

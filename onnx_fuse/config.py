"""Every ONNX_FUSE_* environment variable, typed, in one table."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable, read at each use so that a test or a caller may set it late."""

    name: str
    parse: Callable[[str], T]
    default: T
    help: str

    @property
    def value(self) -> T:
        """The parsed value, or the default. Raises UsageError for text of another form."""
        text = os.environ.get(self.name)
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            from onnx_fuse.errors import UsageError

            raise UsageError(f"{self.name}={text!r}: {error}") from error


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("expected a number of at least 1")
    return int(text)


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "onnx-fuse"
    try:
        return Path.home() / ".cache" / "onnx-fuse"
    except RuntimeError:  # a user without a home, as in many containers
        return Path(tempfile.gettempdir()) / f"onnx-fuse-{getattr(os, 'getuid', lambda: 0)()}"


DEBUG = Variable(
    "ONNX_FUSE_DEBUG",
    int,
    0,
    "1 prints the memory plan of each program, and waits after each launch outside CUDA graphs, so "
    "that an error names its kernel, and checks the program after each pass; 2 also prints it",
)
DUMP = Variable(
    "ONNX_FUSE_DUMP",
    Path,
    None,
    "a folder to write to: the model and program of each shape, and the source, cubin and SASS of "
    "each kernel",
)
KERNEL = Variable("ONNX_FUSE_KERNEL", str, "", "forces kernels for operators: OP=NAME[,OP=NAME...]")
GRAPH = Variable(
    "ONNX_FUSE_GRAPH", _flag, True, "0 launches kernels one by one, without CUDA graphs"
)
CAPTURE = Variable(
    "ONNX_FUSE_CAPTURE",
    _count,
    3,
    "the number of the run of a shape that captures a CUDA graph; earlier runs launch kernels one "
    "by one",
)
ARENA = Variable(
    "ONNX_FUSE_ARENA", _flag, True, "0 gives every tensor its own memory, for memory checkers"
)
AHEAD = Variable(
    "ONNX_FUSE_AHEAD",
    _flag,
    True,
    "0 starts no process of low priority that prepares programs and kernels for other lengths, and "
    "other sizes of a dimension that varies",
)
CACHE_DIR = Variable(
    "ONNX_FUSE_CACHE_DIR", Path, _cache_dir(), "compiled kernels, graphs, programs, records"
)
CACHE_MB = Variable(
    "ONNX_FUSE_CACHE_MB", int, 4096, "MB of graphs and programs kept in the cache; 0 keeps none"
)
ADAPTER_MB = Variable(
    "ONNX_FUSE_ADAPTER_MB",
    _count,
    1024,
    "MB of the adapters that a session keeps on its GPU; those that ran last stay",
)
PATIENCE = Variable(
    "ONNX_FUSE_PATIENCE",
    _count,
    25,
    "the seconds without a sign of life after which a rank of a distributed run counts as hanging",
)
STALL = Variable(
    "ONNX_FUSE_STALL",
    _count,
    120,
    "the seconds that a living rank may stay a step behind the others before all of them end",
)

VARIABLES = tuple(value for value in globals().values() if isinstance(value, Variable))

"""What the modules of this package share: its names, and how a fault reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import onnx
import onnx_ir as ir

FUSE = "onnx_fuse"
"""Domain of the fused operators."""
CANONICAL_OPSET = 21
"""Opset that older models are brought up to: the newest that onnxruntime 1.22 implements whole.
Newer models stay at theirs; what this project emits means the same in all of them."""
BODIES: dict[str, Callable[[Sequence[str], int, str], ir.Function]] = {}
"""`BODIES[name](exposed, opset, overload)`: a fused op's body as a function; `ops` fills it."""
MAP_TYPE = "map type"
"""Key of a Value's `meta`: the TypeProto of a map or a sequence of maps, which onnx-ir lacks."""
DEFAULT = "default"
"""Key of a Value's `meta`: the tensor that stands for an input that a caller leaves out."""
Model: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model"


def one_line(error: BaseException) -> str:
    """The first line that an error's text has."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


@contextlib.contextmanager
def quiet(logger_name: str) -> Iterator[None]:
    """Within the block this logger says nothing: what it logs we report, or need not report."""
    import logging

    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR + 1)
    try:
        yield
    finally:
        logger.setLevel(level)

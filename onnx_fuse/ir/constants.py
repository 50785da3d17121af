"""Names that the modules of this package share, and the text of an error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import onnx
import onnx_ir as ir

from onnx_fuse.ir.names import FusedName

FUSE = "onnx_fuse"
"""Domain of the fused operators."""
PREVIEW = "ai.onnx.preview.training"
"""Domain of the standard's training operators."""
CANONICAL_OPSET = 21
"""Opset that older models are brought up to: the newest that onnxruntime 1.22 implements whole.
Newer models stay at theirs; what this project emits means the same in all of them."""
Body: TypeAlias = Callable[[Sequence[str], int, str], ir.Function]
"""`body(exposed, opset, overload)`: a fused op's body as a function."""
BODIES: dict[tuple[str, str], Body] = {}
"""The bodies by (domain, name), as far as the modules that define them are imported (`ops.bodies`).
Domains other than ours are those of operators that a user has registered (`plugins`)."""
MAP_TYPE = "map type"
"""Key of a Value's `meta`: the TypeProto of a map or a sequence of maps, which onnx-ir lacks."""
CAME_IN = "onnx_fuse.came_in"
"""meta key of a graph, which its clones have too: the ai.onnx opset of its file."""
DEFAULT = "default"
"""Key of a Value's `meta`: the tensor that stands for an input that a caller leaves out."""
Model: TypeAlias = "str | os.PathLike[str] | bytes | onnx.ModelProto | ir.Model"


def base_name(node: ir.Node) -> str:
    """The name of a node's operator; of one of ours without the inner values that it exposes."""
    return FusedName.of(node.op_type).base if node.domain == FUSE else node.op_type


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

"""Det: determinants of square matrices."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.cuda.macros import FLOATS
from onnx_fuse.lower.context import Context, Lowering
from onnx_fuse.program.data_movement import Determinant


def det(ctx: Context, node: ir.Node) -> str | None:
    """y [...] = det(x [..., n, n])."""
    x = ctx.dense(node, 0)
    if x.dtype not in FLOATS:
        return f"no kernel for {x.dtype}"
    if len(x.shape) < 2 or x.shape[-1] != x.shape[-2]:
        raise ValueError("only square matrices have a determinant")
    y = ctx.output(node, 0, x.shape[:-2], x.dtype)
    problem = Determinant(y.size, x.shape[-1], x.dtype)
    return ctx.select(node, problem, {"x": x}, {"y": y})


LOWERINGS: dict[tuple[str, str], Lowering] = {("", "Det"): det}

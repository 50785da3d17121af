"""Collectives over the ranks of a training: a call each, which a pass puts together by bucket."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from onnx_fuse.errors import ModelError
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.context import Context, Lowering
from onnx_fuse.ops.collective import COLLECTIVES
from onnx_fuse.program.problem import Collective
from onnx_fuse.program.problems import COLLECTIVE_DTYPES


def collective(kind: str, ctx: Context, node: ir.Node) -> None:
    """One tensor of a bucket."""
    x = ctx.dense(node, 0)
    if x.dtype not in COLLECTIVE_DTYPES:
        # its body would be what no other rank has a part in
        raise ModelError(f"{ctx.label(node)}: the ranks cannot exchange {x.dtype}")
    ranks = ctx.attr(node, "ranks", 1)
    shapes = {"ReduceScatter": (x.size // ranks,), "AllGather": (x.size * ranks,)}
    y = ctx.output(node, 0, shapes.get(kind, x.shape), x.dtype)
    problem = Collective(kind, (x.size,), (x.dtype,), ranks, ctx.attr(node, "bucket", 0))
    inplace = [("y.0", "x.0")] if kind == "AllReduce" else []
    ctx.select(node, problem, {"x.0": x}, {"y.0": y}, inplace=inplace)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    (FUSE, kind): partial(collective, kind) for kind in COLLECTIVES
}

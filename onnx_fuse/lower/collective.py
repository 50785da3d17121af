"""Collectives over the ranks of a training: a call each, which a pass puts together by bucket."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from onnx_fuse.onnx.common import FUSE
from onnx_fuse.ops.collective import COLLECTIVES
from onnx_fuse.program.call import Context, Lowering
from onnx_fuse.program.problems import COLLECTIVE_DTYPES, Collective


def collective(kind: str, ctx: Context, node: ir.Node) -> str | None:
    """One tensor of a bucket."""
    x = ctx.dense(node, 0)
    if x.dtype not in COLLECTIVE_DTYPES:
        return f"no collective of {x.dtype}"
    ranks = ctx.attr(node, "ranks", 1)
    y = ctx.output(node, 0)
    problem = Collective(kind, (x.size,), (x.dtype,), ranks, ctx.attr(node, "bucket", 0))
    inplace = [("y.0", "x.0")] if kind == "AllReduce" else []
    return ctx.select(node, problem, {"x.0": x}, {"y.0": y}, inplace=inplace)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    (FUSE, kind): partial(collective, kind) for kind in COLLECTIVES
}

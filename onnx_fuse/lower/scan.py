"""CumSum, CumProd, TopK and sorting along one axis, and the positions of flags that are set."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.context import Context, Lowering, Unserved, around
from onnx_fuse.program.data_movement import (
    CumulativeSum,
    KeptCounts,
    KeptPositions,
    SortedRows,
    TopK,
)


def cumsum(ctx: Context, node: ir.Node) -> None:
    """Running sums or products; `exclusive` leaves the element out, `reverse` starts at the end."""
    x = ctx.dense(node, 0)
    axis = int(ctx.given(node, 1, "its axis").reshape(-1)[0]) % len(x.shape)
    y = ctx.output(node, 0)
    problem = CumulativeSum(
        *around(x.shape, axis), x.dtype, bool(ctx.attr(node, "exclusive", 0)),
        bool(ctx.attr(node, "reverse", 0)), node.op_type == "CumProd",
    )  # fmt: skip
    ctx.select(node, problem, {"x": x}, {"y": y})


def topk(ctx: Context, node: ir.Node) -> None:
    """The k largest or smallest and their indices, in order; equal values by index."""
    x = ctx.dense(node, 0)
    k = int(ctx.given(node, 1, "its k").reshape(-1)[0])
    values, indices = ctx.output(node, 0), ctx.output(node, 1)
    sizes = around(x.shape, ctx.attr(node, "axis", -1) % len(x.shape))
    problem = TopK(*sizes, k, x.dtype, bool(ctx.attr(node, "largest", 1)))
    ctx.select(node, problem, {"x": x}, {"values": values, "indices": indices})


def sorted_rows(ctx: Context, node: ir.Node) -> None:
    """int64 [count]: the rows of [count, width] in order, by their first numbers that differ."""
    x = ctx.dense(node, 0)
    count, width = x.shape
    indices = ctx.output(node, 0, (count,), "int64")
    ctx.select(node, SortedRows(count, width, x.dtype), {"x": x}, {"indices": indices})


def kept_counts(ctx: Context, node: ir.Node) -> None:
    """int64 [tiles + 1]: the flags of a bool [length] set before each tile, and last of all."""
    keep = ctx.dense(node, 0)
    problem = KeptCounts(keep.size)
    first = ctx.output(node, 0, (problem.tiles + 1,), "int64")
    ctx.select(node, problem, {"keep": keep}, {"first": first})


def kept_positions(ctx: Context, node: ir.Node) -> None:
    """int64 [count]: the positions of the flags that are set, by their counts and their number."""
    keep, first, number = ctx.dense(node, 0), ctx.dense(node, 1), ctx.host(node, 2)
    if number is None:
        ctx.require_operand(node, 2)  # the counts of tiles decide about no shape
        raise Unserved("unknown", what="its shape")
    count = int(number.reshape(-1)[0])
    position = ctx.output(node, 0, (count,), "int64")
    if not count:
        return
    reads = {"keep": keep, "first": first}
    ctx.select(node, KeptPositions(keep.size, count), reads, {"position": position})


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "CumSum"): cumsum,
    ("", "CumProd"): cumsum,
    ("", "TopK"): topk,
    (FUSE, "KeptCounts"): kept_counts,
    (FUSE, "KeptPositions"): kept_positions,
    (FUSE, "SortedRows"): sorted_rows,
}

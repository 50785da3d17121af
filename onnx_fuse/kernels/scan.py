"""CumSum, CumProd and TopK along one axis."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from onnx_fuse.kernels.gemm import C_TYPES
from onnx_fuse.kernels.reduce import accumulator, defines, pow2
from onnx_fuse.llir import Context, Lowering
from onnx_fuse.problem import Launch, Num, Ptr

TOPK_MAX = 2048
"""The largest k of the kernel where a row is longer than 4096."""


def cumsum(ctx: Context, node: ir.Node) -> str | None:
    """Running sums or products; `exclusive` leaves the element out, `reverse` starts at the end."""
    x = ctx.dense(node, 0)
    given = ctx.host(node, 1)
    if given is None:
        return "its axis is not known before it runs"
    y = ctx.output(node, 0)
    if not x.size:
        return None
    axis = int(given.reshape(-1)[0]) % len(x.shape)
    outer, length, inner = prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])
    row = inner == 1 and length >= 16
    macros: dict[str, object]
    if row:
        block = min(512, max(32, pow2(length) // 4))
        macros, grid = {"BLOCK": block}, outer
    else:
        bx = min(32, pow2(inner))
        by = min(1024 // bx, max(1, pow2(length) // 8))
        block, macros = bx * by, {"BX": bx, "BY": by}
        grid = -(-inner // bx) * outer
    sizes = (length,) if row else (length, inner)
    launch = Launch(
        "scan/cumsum.cu", "cumsum_row" if row else "cumsum_column", (grid, 1, 1), (block, 1, 1),
        (Ptr("x"), Ptr("y"), *(Num("i64", n) for n in sizes)),
        defines(
            T=C_TYPES[x.dtype], ACC=accumulator(x.dtype), **macros,
            EXCLUSIVE=bool(ctx.attr(node, "exclusive", 0)),
            REVERSE=bool(ctx.attr(node, "reverse", 0)), PRODUCT=node.op_type == "CumProd",
        ),
    )  # fmt: skip
    ctx.call(node, launch, {"x": x}, {"y": y})
    return None


def topk(ctx: Context, node: ir.Node) -> str | None:
    """The k largest or smallest and their indices, in order; equal values by index."""
    x = ctx.dense(node, 0)
    given = ctx.host(node, 1)
    if given is None:
        return "its k is not known before it runs"
    k, axis = int(given.reshape(-1)[0]), ctx.attr(node, "axis", -1) % len(x.shape)
    outer, length, inner = prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])
    if length > 2 * TOPK_MAX and k > TOPK_MAX:
        return f"k = {k} of {length}: the kernel takes {TOPK_MAX}"
    values, indices = ctx.output(node, 0), ctx.output(node, 1)
    if not values.size:
        return None
    # longer rows than `size` pass through it: k stay, and a block's worth may always join
    size = (
        pow2(length) if length <= 1024 else min(pow2(length), max(1024, 4 * pow2(k)), 2 * TOPK_MAX)
    )
    size = max(32, size)
    block = min(256, size // 2) if length > size else min(1024, max(32, size // 2))
    launch = Launch(
        "scan/topk.cu", "topk", (outer * inner, 1, 1), (block, 1, 1),
        (Ptr("x"), Ptr("values"), Ptr("indices"), *(Num("i64", n) for n in (length, inner, k))),
        defines(
            T=C_TYPES[x.dtype], SIZE=size, BLOCK=block,
            LARGEST=bool(ctx.attr(node, "largest", 1)),
        ),
        smem=12 * size + 16,  # and its counter
    )  # fmt: skip
    ctx.call(node, launch, {"x": x}, {"values": values, "indices": indices})
    return None


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "CumSum"): cumsum,
    ("", "CumProd"): cumsum,
    ("", "TopK"): topk,
}

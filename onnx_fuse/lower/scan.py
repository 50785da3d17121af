"""CumSum, CumProd, TopK and sorting along one axis."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from onnx_fuse.cuda.macros import C_TYPES, accumulator, defines, pow2
from onnx_fuse.onnx.common import FUSE
from onnx_fuse.program.call import Context, Lowering, Tensor
from onnx_fuse.program.problem import Launch, Num, Ptr

TOPK_MAX = 2048
"""The largest k of scan/topk.cu where a row is longer than 4096; others are sorted whole."""


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
    values, indices = ctx.output(node, 0), ctx.output(node, 1)
    if not values.size:
        return None
    if length > 2 * TOPK_MAX and k > TOPK_MAX:
        total = outer * inner * k
        sizes = (length, inner, inner, 1)
        largest = bool(ctx.attr(node, "largest", 1))
        sort, key, at, padded = _sorted(ctx, x, outer * inner, sizes, largest=largest, wide=False)
        take = Launch(
            "scan/sort.cu", "sort_take", (-(-total // _PAIRS), 1, 1), (_PAIRS, 1, 1),
            (*map(Ptr, ("x", "at", "values", "indices")),
             *(Num("i64", n) for n in (length, inner, padded, k, total))),
            sort[0].defines,
        )  # fmt: skip
        writes = {"key": key, "at": at, "values": values, "indices": indices}
        ctx.call(node, [*sort, take], {"x": x}, writes)
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


_PAIRS = 1024
"""Pairs that a block of scan/sort.cu exchanges; its shared memory holds twice as many elements."""


def _sorted(
    ctx: Context,
    x: Tensor,
    rows: int,
    sizes: tuple[int, int, int, int],
    *,
    largest: bool,
    wide: bool,
) -> tuple[list[Launch], Tensor, Tensor, int]:
    """The launches that sort rows by scan/sort.cu, the keys, the indices and a row's length there.

    `sizes` are a row's elements, the elements within which rows alternate, and an element's stride
    and width.
    """
    padded = max(pow2(sizes[0]), 2 * _PAIRS)
    key = ctx.scratch("uint64", (1 if wide else rows * padded,))
    at = ctx.scratch("uint32", (rows * padded,))
    macros = defines(T=C_TYPES[x.dtype], SIZE=2 * _PAIRS, BLOCK=_PAIRS, LARGEST=largest, WIDE=wide)
    grid = (rows * padded // (2 * _PAIRS), 1, 1)

    def launch(entry: str, *more: int) -> Launch:
        numbers = (Num("i64", n) for n in (*sizes, padded, *more))
        pointers = map(Ptr, ("x", "key", "at"))
        return Launch(
            "scan/sort.cu", entry, grid, (_PAIRS, 1, 1), (*pointers, *numbers), macros
        )  # fmt: skip

    launches, size = [launch("sort_chunks")], 4 * _PAIRS
    while size <= padded:
        step = size // 2
        while step > _PAIRS:
            launches.append(launch("sort_step", size, step))
            step //= 2
        launches.append(launch("sort_merge", size))
        size *= 2
    return launches, key, at, padded


def sorted_rows(ctx: Context, node: ir.Node) -> str | None:
    """int64 [count]: the rows of [count, width] in order, by their first numbers that differ."""
    x = ctx.dense(node, 0)
    count, width = x.shape
    sizes = (count, 1, width, width)
    launches, key, at, _ = _sorted(ctx, x, 1, sizes, largest=False, wide=True)
    order = Launch(
        "scan/sort.cu", "sort_order", (-(-count // _PAIRS), 1, 1), (_PAIRS, 1, 1),
        (Ptr("at"), Ptr("indices"), Num("i64", count)), launches[0].defines,
    )  # fmt: skip
    writes = {"key": key, "at": at, "indices": ctx.output(node, 0, (count,), "int64")}
    ctx.call(node, [*launches, order], {"x": x}, writes)
    return None


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "CumSum"): cumsum,
    ("", "CumProd"): cumsum,
    ("", "TopK"): topk,
    (FUSE, "SortedRows"): sorted_rows,
}

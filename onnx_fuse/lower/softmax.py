"""Softmax and LogSoftmax: rows in registers, or columns where the axis is not the last."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from onnx_fuse.cuda.macros import C_TYPES, FLOATS, accumulator, defines, pow2
from onnx_fuse.lower.reduce import block_of, team, vector
from onnx_fuse.program.call import Context, Lowering, Tensor
from onnx_fuse.program.problem import Launch, Num, Ptr


def row_items(length: int, vec: int, threads: int, most: int) -> int:
    """Vectors a thread keeps of its row; 0 where the row passes `most` elements a thread."""
    items = -(-length // (vec * threads))
    return items if items * vec <= most else 0


def softmax_launch(outer: int, length: int, inner: int, dtype: str, log: bool) -> Launch:
    """Launch over x[outer, length, inner] -> y, softmax along `length`."""
    macros: dict[str, object] = {"T": C_TYPES[dtype], "ACC": accumulator(dtype), "LOG": log}
    shape = (Num("i64", length), Num("i64", inner))
    if inner > 1:
        bx = min(32, pow2(inner))
        by = min(1024 // bx, max(pow2(length) // 4, 1))
        grid = -(-inner // bx) * outer
        return Launch(
            "softmax/column.cu", "softmax_column", (grid, 1, 1), (bx * by, 1, 1),
            (Ptr("x"), Ptr("y"), *shape), defines(**macros, BX=bx, BY=by),
        )  # fmt: skip
    vec = vector(length, dtype)
    threads = team(outer, length, vec)
    items = row_items(length, vec, threads, 32)
    threads = threads if items else 512  # a row read again: more rows at once hide its latency
    block = block_of(threads)
    return Launch(
        "softmax/row.cu", "softmax_row", (-(-outer * threads // block), 1, 1), (block, 1, 1),
        (Ptr("x"), Ptr("y"), Num("i64", outer), shape[0]),
        defines(**macros, VEC=vec, TEAM=threads, BLOCK=block, ITEMS=items),
    )  # fmt: skip


def softmax(ctx: Context, node: ir.Node) -> str | None:
    """y = exp(x - max) / sum exp(x - max) along one axis; LogSoftmax: its logarithm."""
    x: Tensor = ctx.dense(node, 0)
    if x.dtype not in FLOATS:
        return f"no kernel for {x.dtype}"
    y = ctx.output(node, 0)
    if not x.size:
        return None
    axis = ctx.attr(node, "axis", -1) % max(1, len(x.shape))
    shape = x.shape or (1,)
    launch = softmax_launch(
        prod(shape[:axis]), shape[axis], prod(shape[axis + 1 :]), x.dtype,
        node.op_type == "LogSoftmax",
    )  # fmt: skip
    ctx.call(node, launch, {"x": x}, {"y": y}, inplace=[("y", "x")])
    return None


LOWERINGS: dict[tuple[str, str], Lowering] = {("", "Softmax"): softmax, ("", "LogSoftmax"): softmax}

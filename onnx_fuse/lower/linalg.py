"""Det: determinants of square matrices."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.cuda.macros import C_TYPES, FLOATS, accumulator, defines
from onnx_fuse.program.call import Context, Lowering
from onnx_fuse.program.problem import Launch, Num, Ptr


def det(ctx: Context, node: ir.Node) -> str | None:
    """y [...] = det(x [..., n, n])."""
    x = ctx.dense(node, 0)
    if x.dtype not in FLOATS:
        return f"no kernel for {x.dtype}"
    if len(x.shape) < 2 or x.shape[-1] != x.shape[-2]:
        raise ValueError("only square matrices have a determinant")
    y = ctx.output(node, 0, x.shape[:-2], x.dtype)
    if not y.size:
        return None
    acc = accumulator(x.dtype)
    work = ctx.scratch({"float": "float32", "double": "float64"}[acc], x.shape)
    launch = Launch(
        "linalg/det.cu", "det", (y.size, 1, 1), (256, 1, 1),
        (*map(Ptr, ("x", "work", "y")), Num("i32", x.shape[-1])),
        defines(T=C_TYPES[x.dtype], ACC=acc),
    )  # fmt: skip
    ctx.call(node, launch, {"x": x}, {"work": work, "y": y})
    return None


LOWERINGS: dict[tuple[str, str], Lowering] = {("", "Det"): det}

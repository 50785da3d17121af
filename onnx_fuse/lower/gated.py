"""Gated products, (LayerNorm|RMSNorm)Gate(First|Last)Gemm<Act>, as one Gemm or LayerNormGemm.

Its epilogue makes N columns of the product's 2N where the weights are constants, whose columns then
stand in memory as `interleaved` has them. Where the cost models find the product by itself with a
pass over its two halves cheaper, or no kernel has that epilogue, it is written out as these.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import FLOATS
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.kernels.costs import Passes, pays
from onnx_fuse.lower.context import Context, Lowering, Unserved
from onnx_fuse.lower.linear import (
    activation,
    bias_row,
    norm_problem,
    norm_product,
    ordered,
    product,
)
from onnx_fuse.ops.fused.gated import OPS
from onnx_fuse.program.call import ColumnOrder, Tensor
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem

BLOCK = 8
"""Columns of gates that are stored beside as many columns of the values that they multiply."""


def interleaved(w: np.ndarray, place: str) -> np.ndarray:
    """[..., 2N] with the gates in its first or last half -> blocks of 16: gate, other, gate, ...

    A block's pairs are of the even columns of y, then of the odd ones: see gate_column in
    gemm/epilogue.cuh.
    """
    pairs = np.empty((*w.shape[:-1], w.shape[-1] // (2 * BLOCK), BLOCK, 2), w.dtype)
    halves = np.split(w, 2, -1)
    for i, half in enumerate(halves if place == "GateFirst" else halves[::-1]):
        columns = half.reshape(*pairs.shape[:-2], BLOCK // 2, 2)
        pairs[..., : BLOCK // 2, i], pairs[..., BLOCK // 2 :, i] = columns[..., 0], columns[..., 1]
    return pairs.reshape(w.shape)


def gated_gemm(ctx: Context, node: ir.Node) -> None:
    """y = act(gate) * other, of the halves of N(x) · w + c."""
    name = OPS[node.op_type]
    prefix, place = name.norm, name.place
    at = {"": 1, "RMSNorm": 2, "LayerNorm": 3}[prefix]
    x, w = ctx.view(node, 0), ctx.view(node, at)
    if x.dtype not in FLOATS or len(x.shape) < 2 or len(w.shape) != 2 or w.shape[1] % 2:
        raise Unserved("no-kernel", what=f"{x.dtype} in {len(x.shape)} axes and {list(w.shape)}")
    if 0 in (*x.shape, *w.shape):
        raise Unserved("empty")
    row = bias_row(ctx, node, at + 1, w.shape[1])
    if w.shape[1] % (2 * BLOCK):
        raise Unserved("no-kernel", what=f"{w.shape[1] // 2} columns, no multiple of {BLOCK}")
    if not (ctx.lasting(w) and ctx.lasting(row)):
        raise Unserved("computed", what="its weights")
    attrs = {**activation(ctx, node, name.activation), "gate": True}
    if not _pays(ctx, node, w, attrs):
        raise Unserved("faster", by="")
    order = ColumnOrder(f"{place} interleaved", partial(interleaved, place=place))
    if prefix:
        return norm_product(ctx, node, w, row, attrs, order=order)
    one, columns = (ordered(ctx, tensor, order) for tensor in (w, row))
    y = ctx.output(node, 0, (*x.shape[:-1], w.shape[1] // 2), x.dtype)
    wide = one.expand((*x.shape[:-2], *one.shape))
    product(ctx, node, x, wide, y, {"col1": columns}, attrs={"bias": True, **attrs})


def _pays(ctx: Context, node: ir.Node, w: Tensor, attrs: Mapping[str, Any]) -> bool:
    """Whether one call is faster than the product and a pass over its halves."""
    x, (k, n) = ctx.view(node, 0), w.shape
    how = {"bias": True, "static_b": True, **attrs}
    if OPS[node.op_type].norm:
        problem = norm_problem(ctx, node, n, how)
        if x.dtype in ("float16", "bfloat16"):
            problem = problem.replace(folded=True)
    else:
        m, math = prod(x.shape[:-1]), ctx.math
        problem = GemmProblem.of("Gemm", m=m, n=n, k=k, dtype=x.dtype, math=math, **how)
    problem = problem.upper_bound()
    plain = problem.with_epilogue(act="", act_alpha=1.0, gate=False)
    moved = problem.m * problem.n * 3 // 2 * ITEMSIZE[x.dtype]
    return pays((plain, Passes(moved)), (problem,), ctx.hw, ctx.prefs)


LOWERINGS: dict[tuple[str, str], Lowering] = {(FUSE, name): gated_gemm for name in OPS}

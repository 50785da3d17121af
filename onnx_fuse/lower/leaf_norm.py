"""LayerNormLeafGrad, as a problem."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from onnx_fuse.ir.constants import FUSE
from onnx_fuse.kernels import select
from onnx_fuse.kernels.costs import Passes, pays
from onnx_fuse.lower.context import Context, Lowering, Unserved
from onnx_fuse.lower.matrices import alignment, matrix
from onnx_fuse.program.problem import GemmProblem


def leaf_norm_grad(ctx: Context, node: ir.Node) -> None:
    """dw, dgamma, dbeta, dc of dt [M,n], xh [M,k], w [n,k] (turned: [k,n]), gamma, beta [k]."""
    turned = node.op_type.endswith("Turned")
    dt, xh = ctx.view(node, 0), ctx.view(node, 1)
    w, gamma, beta = (ctx.dense(node, i) for i in range(2, 5))
    if {t.dtype for t in (dt, xh, w, gamma, beta)} != {"float32"}:
        raise Unserved("no-kernel", what="other types than float32")
    a, b = (xh, dt) if turned else (dt, xh)
    left, right = matrix(ctx, a.permute((1, 0))), matrix(ctx, b)
    if not left.trans or right.trans:
        raise Unserved("no-kernel", what="a dt or xh that does not lie in rows")
    (k, m), n = a.shape, b.shape[1]
    problem = GemmProblem.of(
        "LayerNormLeafGrad", m=m, n=n, k=k, trans_a=True, math=ctx.math, lda=left.ld, ldb=right.ld,
        align=alignment(left.tensor, right.tensor), turned=turned,
    )  # fmt: skip
    if select(problem.op, problem, ctx.hw) is None:
        raise Unserved("unserved")
    # the body's product, its passes over W and G, its sums and its product of one row
    product = replace(problem, op="Gemm", turned=False)
    if not pays((product, Passes(24 * m * n, 6)), (problem,), ctx.hw):
        raise Unserved("faster", by="")
    reads = {"a": left.tensor, "b": right.tensor, "w": w, "gamma": gamma, "beta": beta}
    names = {"dw": (m, n), "dgamma": gamma.shape, "dbeta": beta.shape, "dc": (dt.shape[1],)}
    writes = {
        name: ctx.output(node, i, shape, "float32") for i, (name, shape) in enumerate(names.items())
    }
    ctx.select(node, problem, reads, writes)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    (FUSE, "LayerNormLeafGrad"): leaf_norm_grad,
    (FUSE, "LayerNormLeafGradTurned"): leaf_norm_grad,
}

"""Float8Linear and its gradient: operands rounded once, as rows and as columns, and products."""

from __future__ import annotations

from typing import Any, NamedTuple

import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.kernels.gemm_fp8 import E4M3, E5M2
from onnx_fuse.kernels.norm_launches import act_parts
from onnx_fuse.lower.context import Context, Lowering
from onnx_fuse.lower.linear import ACTIVATIONS, activation, bias_row
from onnx_fuse.ops.fused.float8 import HISTORY, MULTIPLE, NAME
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.problem import GemmProblem
from onnx_fuse.program.problems import Float8, PartSums, SlopeProduct


class RoundedMatrix(NamedTuple):
    """A tensor v [r, c] in float8: `rows` [r, c] and `columns` [c, r], which v's scale belongs to.

    None where nothing reads it.
    """

    rows: Tensor | None
    columns: Tensor | None
    scale: Tensor


def _rounded(
    ctx: Context, node: ir.Node, v: Tensor, kind: str, history: int, following: int,
    rounded: RoundedMatrix, sums: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `rounded` with `v`, and `sums` with those of its columns, for each 128 rows.

    The history is input `history`, and the next one output `following`.
    """
    if any(size % MULTIPLE for size in v.shape):
        raise UsageError(
            f"precision 'fp8': {ctx.label(node)} has an operand of {v.shape[0]} x {v.shape[1]}, "
            f"whose sizes are no multiples of {MULTIPLE}: choose another batch, or precision 'bf16'"
        )
    rows, columns = rounded.rows, rounded.columns
    turned = v.permute((1, 0))
    if turned.dense and not v.dense:  # it lies as its transpose
        v, rows, columns = turned, columns, rows
    v = ctx.contiguous(v)
    problem = Float8(v.shape[0], v.shape[1], v.dtype, kind, HISTORY)
    reads = {"x": v, "history": ctx.dense(node, history)}
    writes = {"q": rows, "qt": columns, "scale": rounded.scale, "part": sums,
              "next": ctx.output(node, following, (HISTORY,), "float32")}  # fmt: skip
    ctx.select(node, problem, reads, {k: t for k, t in writes.items() if t is not None})


def _product(
    ctx: Context,
    node: ir.Node,
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    writes: dict[str, Tensor],
    extra: dict[str, Tensor] | None = None,
    attrs: dict[str, Any] | None = None,
) -> None:
    """y [m, n] = a [m, k] · b [n, k] times both scales, and the epilogue."""
    problem = GemmProblem.of(
        "Gemm", m=a.shape[0], n=b.shape[0], k=a.shape[1], dtype=a.dtype, b_dtype=b.dtype,
        out_dtype=writes["y"].dtype, trans_b=True, **(attrs or {}),
    )  # fmt: skip
    reads = {"a": a, "b": b, "scale_a": scales[0], "scale_b": scales[1]}
    ctx.select(node, problem, {**reads, **(extra or {})}, writes)


def linear(ctx: Context, node: ir.Node) -> None:
    """y = act(x · w + c); for a gradient also z, xt and wq, in float8, and both scales."""
    act, exposed = _activation(ctx, node), FusedName.of(node.op_type).exposed
    at = {name: 3 + i for i, name in enumerate(exposed) if ctx.wants(node, 3 + i)}
    x, w = ctx.view(node, 0), ctx.view(node, 1)
    (m, k), n = x.shape, w.shape[1]

    def saved(name: str, shape: tuple[int, ...], dtype: str) -> Tensor | None:
        return ctx.output(node, at[name], shape, dtype) if name in at else None

    rounded_x = RoundedMatrix(
        ctx.scratch(E4M3, (m, k)),
        saved("xt", (k, m), E4M3),
        saved("xscale", (), "float32") or ctx.scratch("float32", ()),
    )
    rounded_w = RoundedMatrix(
        saved("wq", (k, n), E4M3),
        ctx.scratch(E4M3, (n, k)),
        saved("wscale", (), "float32") or ctx.scratch("float32", ()),
    )
    assert rounded_x.rows is not None
    assert rounded_w.columns is not None
    _rounded(ctx, node, x, E4M3, 3, 1, rounded_x)
    _rounded(ctx, node, w, E4M3, 4, 2, rounded_w)
    extra, writes = {}, {"y": ctx.output(node, 0, (m, n), x.dtype)}
    bias_values = ctx.host(node, 2)
    if bias_values is None or bias_values.any():
        row = bias_row(ctx, node, 2, n)
        extra, act = {"col1": row}, {"bias": True, "bias_dtype": row.dtype, **act}
    if "z" in at:
        writes["z"], act["save_z"] = ctx.output(node, at["z"], (m, n), x.dtype), True
    scales = rounded_x.scale, rounded_w.scale
    _product(ctx, node, rounded_x.rows, rounded_w.columns, scales, writes, extra, act)


def gradient(ctx: Context, node: ir.Node) -> None:
    """dx = g · wᵀ, dw = xᵀ · g and dc = Σ g of g = dy act'(z), where they are read."""
    dy, xt, wq = ctx.dense(node, 0), ctx.dense(node, 1), ctx.dense(node, 2)
    (m, n), k, act = dy.shape, wq.shape[0], _activation(ctx, node)
    dz = dy
    if act:  # its own sums are not read: a product that makes dz has none
        parts, dz = act_parts(m, n), ctx.scratch(dy.dtype, (m, n))
        problem = SlopeProduct(m, n, dy.dtype, parts, **act)
        writes = {"dz": dz, "part": ctx.scratch("float32", (parts, n))}
        ctx.select(node, problem, {"dy": dy, "z": ctx.dense(node, 6)}, writes)
    parts = Float8(m, n, dz.dtype, E5M2, HISTORY).parts
    sums = ctx.scratch("float32", (parts, n)) if ctx.wants(node, 2) else None
    q = RoundedMatrix(
        ctx.scratch(E5M2, (m, n)) if ctx.wants(node, 0) else None,
        ctx.scratch(E5M2, (n, m)) if ctx.wants(node, 1) else None,
        ctx.scratch("float32", ()),
    )
    _rounded(ctx, node, dz, E5M2, 5, 3, q, sums)
    if sums is not None:
        dc = ctx.output(node, 2, (n,), dy.dtype)
        ctx.select(node, PartSums(parts, n, dc.dtype), {"part": sums}, {"out0": dc})
    if q.rows is not None:
        dx = {"y": ctx.output(node, 0, (m, k), dy.dtype)}
        _product(ctx, node, q.rows, wq, (q.scale, ctx.view(node, 4)), dx)
    if q.columns is not None:
        dw = {"y": ctx.output(node, 1, (k, n), dy.dtype)}
        _product(ctx, node, xt, q.columns, (ctx.view(node, 3), q.scale), dw)


def _activation(ctx: Context, node: ir.Node) -> dict[str, Any]:
    """The activation and its number, by the names of the fields of problems."""
    name = FusedName.of(node.op_type).kind.removeprefix(NAME)
    return activation(ctx, node, name)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    (FUSE, f"{NAME}{act}{grad}"): lowering
    for act in ACTIVATIONS
    for grad, lowering in (("", linear), ("Grad", gradient))
}

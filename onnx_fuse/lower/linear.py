"""MatMul, Gemm and the fused Gemm+activation ops, as Problems of the Gemm candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import FLOATS
from onnx_fuse.ir.build import dim, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.kernels import forced, refusals, select
from onnx_fuse.kernels.costs import Passes, pays, products, seconds, total
from onnx_fuse.kernels.norm_launches import act_parts
from onnx_fuse.lower import quantized
from onnx_fuse.lower.context import Context, Lowering, Unserved, copy
from onnx_fuse.lower.folds import in_order
from onnx_fuse.lower.matrices import Matrix, alignment, factors, matrix, with_whole_rows
from onnx_fuse.lower.quant import stays_packed
from onnx_fuse.ops.activations import ACTIVATIONS as TABLE
from onnx_fuse.program.call import ColumnOrder, Tensor, dtype_of, reshape_strides
from onnx_fuse.program.epilogue import Epilogue
from onnx_fuse.program.problem import ITEMSIZE, AnyProblem, GemmProblem, Hardware, Value
from onnx_fuse.program.problems import Fold, PartSums, SlopeProduct

MAX_BATCH = 3
TILE_ROWS = 128
"""The rows of a product in a batch below which it is better to copy rows that stand apart."""


def _batches(shape: Sequence[int], a: Matrix, b: Matrix) -> tuple[list[int], list[int], list[int]]:
    """Batch axes merged where both operands walk them as one; size-1 axes dropped."""
    dims: list[int] = []
    sa: list[int] = []
    sb: list[int] = []
    for d, x, y in zip(shape, a.batch_strides, b.batch_strides, strict=True):
        if d == 1:
            continue
        if dims and sa[-1] == x * d and sb[-1] == y * d:
            dims[-1], sa[-1], sb[-1] = dims[-1] * d, x, y
        else:
            dims.append(d)
            sa.append(x)
            sb.append(y)
    return dims, sa, sb


def product(
    ctx: Context,
    node: ir.Node,
    a: Tensor,
    b: Tensor,
    y: Tensor,
    extra: dict[str, Tensor] | None = None,
    writes: dict[str, Tensor] | None = None,
    attrs: dict[str, Any] | None = None,
) -> None:
    """y [..., M, N] = a [..., M, K] · b [..., K, N]; batch axes already broadcast to one shape."""
    if 0 in y.shape:
        return
    if a.shape[-1] == 0:  # the sum of nothing, with all that follows it: one product of zeros
        zero = ctx.constant(np.zeros((), dtype_of(a.dtype)))
        a, b = zero.expand((*a.shape[:-1], 1)), zero.expand((*b.shape[:-2], 1, b.shape[-1]))
    m, k = a.shape[-2:]
    n = b.shape[-1]
    batch = y.shape[:-2]
    # one weight for every row: the batch is only more rows
    flat = None
    if prod(batch) > 1 and all(
        s == 0 or d == 1 for d, s in zip(b.shape[:-2], b.strides[:-2], strict=True)
    ):
        strides = reshape_strides(a.shape, a.strides, (prod(batch) * m, k))
        if strides is None and (a.strides[-1] != 1 or m < TILE_ROWS < prod(batch) * m):
            a = ctx.contiguous(a)
        flat = a.reshape((prod(batch) * m, k))
    if flat is not None:
        a, b = flat, Tensor(b.buffer, b.dtype, b.shape[-2:], b.strides[-2:], b.offset)
        m, batch = prod(batch) * m, ()
    left, right = matrix(ctx, a), matrix(ctx, b)
    dims, sa, sb = _batches(batch, left, right)
    if len(dims) > MAX_BATCH:
        whole = (prod(batch), m, k), (prod(batch), k, n)
        left = matrix(ctx, ctx.contiguous(a).view(whole[0]))
        right = matrix(ctx, ctx.contiguous(b).view(whole[1]))
        dims, sa, sb = _batches((prod(batch),), left, right)
    problem = GemmProblem.of(
        "Gemm",
        m=m,
        n=n,
        k=k,
        batch=tuple(dims),
        dtype=a.dtype,
        out_dtype=y.dtype,
        trans_a=left.trans,
        trans_b=right.trans,
        math=ctx.math,
        lda=left.ld,
        ldb=right.ld,
        a_strides=tuple(sa),
        b_strides=tuple(sb),
        align=alignment(left.tensor, right.tensor),
        **(attrs or {}),
    )
    problem, left, right, out = with_whole_rows(ctx, node, problem, left, right, y)
    reads = {"a": left.tensor, "b": right.tensor, **(extra or {})}
    ctx.select(node, problem, reads, {"y": out, **(writes or {})})
    if out is not y:
        copy(ctx, node, out, y.reshape(out.shape) or y)


def matmul(ctx: Context, node: ir.Node) -> None:
    """y = a · b with NumPy's rules for 1-D operands and broadcast batches."""
    a, b, batch, shape = factors(ctx.view(node, 0), ctx.view(node, 1))
    y = ctx.output(node, 0, shape, a.dtype)
    if quantized.product(ctx, node, y):
        return
    a, b = (t.expand((*batch, *t.shape[-2:])) for t in (a, b))
    product(ctx, node, a, b, y.view((*batch, a.shape[-2], b.shape[-1])))


def gemm(ctx: Context, node: ir.Node) -> None:
    """Y = alpha A' · B' + beta C."""
    a, b = ctx.view(node, 0), ctx.view(node, 1)
    a = a.permute((1, 0)) if ctx.attr(node, "transA", 0) else a
    b = b.permute((1, 0)) if ctx.attr(node, "transB", 0) else b
    shape = (a.shape[0], b.shape[1])
    y = ctx.output(node, 0, shape, a.dtype)
    alpha, beta = ctx.attr(node, "alpha", 1.0), ctx.attr(node, "beta", 1.0)
    if ctx.codes and alpha == 1 and beta in (0, 1) and not ctx.attr(node, "transA", 0):
        biased = ctx.has(node, 2) and beta == 1
        row = _row(ctx, node, 2, shape[1]) if biased else None
        turned = bool(ctx.attr(node, "transB", 0))
        if biased == (row is not None) and quantized.product(ctx, node, y, row, turned=turned):
            return
    attrs: dict[str, Any] = {"alpha": alpha} if alpha != 1 else {}
    extra = {}
    if ctx.has(node, 2) and beta != 0:
        c = ctx.view(node, 2).expand(shape)
        if beta == 1 and alpha == 1 and c.strides == (0, 1) and a.dtype in FLOATS:
            extra["col1"], attrs["bias"] = c.at(0, 0), True
        else:
            extra["c"] = c
            attrs |= {"beta": beta, "c_rows": c.strides[0], "c_cols": c.strides[1]}
    product(ctx, node, a, b, y, extra, attrs=attrs)


ACTIVATIONS = {"": "", **{a.name: a.key for a in TABLE.values()}}
"""Fused op's suffix -> the problem's activation."""


def activation(ctx: Context, node: ir.Node, suffix: str) -> dict[str, Any]:
    """The epilogue's attrs for an activation suffix of a fused op."""
    if not suffix:
        return {}
    row = TABLE[suffix]
    attrs: dict[str, Any] = {"act": row.key}
    if row.attributes:
        attrs["act_alpha"] = float(ctx.attr(node, "alpha", row.alpha))
    return attrs


def bias_row(ctx: Context, node: ir.Node, i: int, n: int) -> Tensor:
    """Input `i`, a bias of n columns or one number for all, as a row; else raises Unserved."""
    if (row := _row(ctx, node, i, n)) is None:
        raise Unserved("not-a-row", what="the bias")
    return row


def _row(ctx: Context, node: ir.Node, i: int, n: int) -> Tensor | None:
    c = ctx.view(node, i)
    if c.size == 1 and n > 1:  # zero, where there is no bias
        value = ctx.host(node, i)
        if value is None:
            return ctx.contiguous(c.view((1,)).expand((n,)))
        return ctx.constant(np.broadcast_to(value.reshape(-1), (n,)))
    row = c.reshape((n,)) if c.size == n and c.shape[-1:] == (n,) else None
    return None if row is None else ctx.contiguous(row)


def fused_gemm(ctx: Context, node: ir.Node) -> None:
    """Gemm, Gemm<Act>: y = act(x · w + c), z the pre-activation where it is exposed."""
    name = FusedName.of(node.op_type)
    if name.exposed not in ((), ("z",)):
        raise Unserved("results", names=", ".join(name.exposed))
    if stays_packed(ctx, node.inputs[1]):
        raise Unserved("four-bits")
    x, w = ctx.view(node, 0), ctx.view(node, 1)
    n = w.shape[1]
    row = bias_row(ctx, node, 2, n)
    attrs = {"bias": True} | activation(ctx, node, name.activation)
    shape = (*x.shape[:-1], n)
    if len(x.shape) == 1:
        raise Unserved("no-kernel", what="a vector x")
    y = ctx.output(node, 0, shape, x.dtype)
    writes = {}
    act = (str(attrs.get("act", "")), float(str(attrs.get("act_alpha", 0.0))))
    if not name.exposed and quantized.product(ctx, node, y, row, act):
        return
    if name.exposed:
        z = ctx.output(node, 1, shape, x.dtype)
        writes["z"] = z
        attrs["save_z"] = True
    product(ctx, node, x, w.expand((*x.shape[:-2], *w.shape)), y, {"col1": row}, writes, attrs)


def norm_gemm(ctx: Context, node: ir.Node) -> None:
    """(LayerNorm|RMSNorm)Gemm<Act>: y = act(N(x) · w + c); mean, rstd, z where they are exposed."""
    name = FusedName.of(node.op_type)
    exposed = name.exposed
    if not set(exposed) <= {"mean", "rstd", "z"}:
        raise Unserved("results", names=", ".join(exposed))
    at = 2 if name.rms else 3
    if stays_packed(ctx, node.inputs[at]):
        raise Unserved("four-bits")
    w = ctx.view(node, at)
    row = bias_row(ctx, node, at + 1, w.shape[1])
    if len(ctx.view(node, 0).shape) < 2:
        raise Unserved("no-kernel", what="a vector x")
    weights = node.inputs[at]
    maker = weights.producer() if weights is not None else None
    # a step reads the copy that the update before it wrote, and decides as if it cast the weight
    copied = weights is not None and weights.is_graph_input() and bool(ctx.mutable)
    cast = copied or (maker is not None and maker.op_type == "Cast")
    norm_product(ctx, node, w, row, activation(ctx, node, name.activation), exposed, cast=cast)


def norm_problem(ctx: Context, node: ir.Node, n: int, attrs: Mapping[str, Any]) -> GemmProblem:
    """The LayerNormGemm of a node that begins with a norm, whose weight has n columns."""
    x = ctx.view(node, 0)
    return GemmProblem.of(
        "LayerNormGemm", m=prod(x.shape[:-1]), n=n, k=x.shape[-1], dtype=x.dtype, math=ctx.math,
        epsilon=float(ctx.attr(node, "epsilon", 1e-5)), rms=FusedName.of(node.op_type).rms, **attrs,
    )  # fmt: skip


def norm_product(
    ctx: Context,
    node: ir.Node,
    w: Tensor,
    row: Tensor,
    attrs: Mapping[str, Any],
    exposed: Sequence[str] = (),
    *,
    cast: bool = False,
    order: ColumnOrder | None = None,
) -> None:
    """y = act(N(x) · w + row), the norm's x and parameters being the node's first inputs.

    `cast`: w is a cast of its master in each run, or a copy of it that is kept. The kernel reads
    the columns of w and row in the `order`.
    """
    rms = FusedName.of(node.op_type).rms
    x, scale = ctx.dense(node, 0), ctx.dense(node, 1)
    n, k = w.shape[1], x.shape[-1]
    # a copy in another order is dense, and only made where no fold is
    right = matrix(ctx, w) if order is None else Matrix(w, False, n, ())
    if right.ld != (k if right.trans else n):
        right = matrix(ctx, ctx.contiguous(w))
    align = alignment(right.tensor) if order is None else 16
    how = {"bias": True, "trans_b": right.trans, "align": align}
    problem = norm_problem(ctx, node, n, {**how, **attrs})
    if "z" in exposed:
        problem = problem.replace(save_z=True)
    if select("LayerNormGemm", problem, ctx.hw) is None:
        raise Unserved("no-kernel", what=problem)
    beta = None if rms else ctx.view(node, 2)
    folded, trans = None, right.trans
    if not exposed:
        trans = trans or _rows_pay(ctx, problem)
        folded = ctx.folded(scale, beta, right.tensor, row, trans, order)
    folded_problem = problem.replace(folded=True, align=16, trans_b=trans)
    reads = {"x": x, "gamma": scale, "w": right.tensor, "c": row}
    if beta is not None:
        reads["beta"] = ctx.contiguous(beta)
    asked = problem, cast
    if exposed and asked not in ctx.fold_pays:
        ctx.fold_pays[asked] = _fold_pays(ctx, *asked)
    if exposed and ctx.fold_pays[asked]:
        folded = ctx.folds.get(_places(reads)) or _folded_here(ctx, node, reads)
    if folded is not None and select("LayerNormGemm", folded_problem, ctx.hw) is not None:
        problem, reads = folded_problem, {"x": x, **folded}
    elif order is not None:
        reads |= {name: ordered(ctx, reads[name], order) for name in "wc"}
    columns = n // 2 if problem.epilogue.gate else n
    writes = {"y": ctx.output(node, 0, (*x.shape[:-1], columns), x.dtype)}
    stat = (*x.shape[:-1], 1)
    for i, extra in enumerate(exposed, 1):
        shape = (*x.shape[:-1], n) if extra == "z" else stat
        writes[extra] = ctx.output(node, i, shape, x.dtype if extra == "z" else "float32")
    for extra in ("mean", "rstd"):  # RMSNorm's mean is zero
        if extra not in writes:
            writes[extra] = ctx.scratch("float32", stat)
    ctx.select(node, problem, reads, writes)


def ordered(ctx: Context, constant: Tensor, order: ColumnOrder) -> Tensor:
    """A constant with its columns in the order."""
    return required(ctx.packed(constant, order.name, partial(in_order, order)))


def _rows_pay(ctx: Context, problem: GemmProblem) -> bool:
    """Whether a decoder's token gains by folded weights that are stored as [n, k].

    A tenth at least, where those of other numbers of rows are kept beside them. Weights beyond the
    L2 cache, such as a head's, are kept once: other numbers of rows read them as fast so.
    """
    large = ITEMSIZE[problem.dtype] * problem.n * problem.k > ctx.hw.l2_bytes
    if problem.epilogue.gate or not (large or problem.m == 1):
        return False
    one = problem.replace(m=1, folded=True, align=16, static_b=True)
    ways = (one.replace(trans_b=t) for t in (False, True))
    columns, rows = (seconds(way, ctx.hw, ctx.prefs, records=False) for way in ways)
    return rows < (0.95 if large else 0.9) * columns


def _places(reads: Mapping[str, Tensor]) -> tuple[tuple[int, int], ...]:
    parameters = (reads[name] for name in ("gamma", "beta", "w", "c") if name in reads)
    return tuple((t.buffer, t.offset) for t in parameters)


def _fold_pays(ctx: Context, problem: GemmProblem, master: bool) -> bool:
    """Whether forward and gradient together gain by weights that are folded for both.

    All folds of a program are one launch, which makes the 16-bit copies of a `master` as well.
    """
    if problem.trans_b or problem.dtype not in ("float16", "bfloat16"):
        return False
    forward = problem.epilogue
    behind = Epilogue(act=forward.act, act_alpha=forward.act_alpha)
    problem, hw = problem.upper_bound(), ctx.hw
    m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
    gradient = GemmProblem(
        "LayerNormGemmGrad", m=m, n=n, k=k, dtype=dtype, epilogue=behind, rms=problem.rms
    )
    pair = (problem, gradient)
    fold = seconds(Fold(((k, n),), dtype), hw) - hw.launch_seconds
    folded = total((p.replace(folded=True) for p in pair), hw, ctx.prefs)
    return folded + (fold / 2 if master else fold) < total(pair, hw, ctx.prefs) < inf


def _folded_here(ctx: Context, node: ir.Node, reads: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Append a call that folds the weights; the gradient reads its results as well."""
    params = {name: reads[name] for name in ("w", "gamma", "beta", "c") if name in reads}
    k, n = params["w"].shape
    folded = {"wq": ctx.scratch(params["w"].dtype, (k, n))}
    folded |= {name: ctx.scratch("float32", (n,)) for name in ("cs", "cv")}
    ctx.select(node, Fold(((k, n),), params["w"].dtype), params, folded)
    ctx.folds[_places(reads)] = folded
    return folded


def norm_gemm_grad(ctx: Context, node: ir.Node) -> None:
    """(LayerNorm|RMSNorm)Gemm<Act>Grad: dx, dscale, (dbias,) dw, dc from dy and what was kept."""
    name = FusedName.of(node.op_type)
    if name.exposed:
        raise Unserved("results", names=", ".join(name.exposed))
    rms = name.rms
    names = ["dy", "x", "gamma", "beta", "w", "c", "mean", "rstd", "z"]
    names = [key for key in names if not rms or key not in ("beta", "mean")]
    operands = {key: ctx.view(node, i) for i, key in enumerate(names)}
    x, w = operands["x"], operands["w"]
    k, n = w.shape
    if {t.dtype for key, t in operands.items() if key not in ("mean", "rstd")} != {x.dtype}:
        raise Unserved("no-kernel", what="operands of several types")
    if {operands[key].dtype for key in ("mean", "rstd") if key in operands} != {"float32"}:
        raise Unserved("no-kernel", what="a mean or rstd in other types than float32")
    row = bias_row(ctx, node, names.index("c"), n)
    if len(x.shape) < 2:
        raise Unserved("no-kernel", what="a vector x")
    problem = GemmProblem.of(
        "LayerNormGemmGrad",
        m=prod(x.shape[:-1]),
        n=n,
        k=k,
        dtype=x.dtype,
        math=ctx.math if x.dtype == "float32" else "ieee",
        rms=rms,
        **activation(ctx, node, name.activation),
    )
    if not any(v.uses() or v.is_graph_output() for v in node.outputs[1:]):
        problem = problem.replace(frozen=True)
    if select(problem.op, problem, ctx.hw, ctx.prefs) is None:
        why = refusals(problem.op, problem, ctx.hw).items()
        listing = "; ".join(f"{kernel}: {reason}" for kernel, reason in why)
        raise Unserved("kernels", reasons=listing or "it has no rows")
    if problem.op not in forced(ctx.prefs):
        fused, apart = (total(p, ctx.hw, ctx.prefs) for p in ((problem,), _apart(problem)))
        if apart <= fused:
            raise Unserved("faster", by=f": {apart * 1e6:.1f} µs against {fused * 1e6:.1f}")
    if turned := _turned(ctx, problem, w):
        problem = problem.replace(trans_b=True)
    reads = {
        key: row if key == "c" else w.permute((1, 0)) if turned and key == "w" else
        ctx.dense(node, i)
        for i, key in enumerate(names)
    }  # fmt: skip
    if (folded := ctx.folds.get(_places(reads))) is not None and not turned:
        problem, reads = problem.replace(folded=True), reads | folded
    shapes = {"dx": x.shape, "dgamma": (k,), "dbeta": (k,), "dw": (k, n), "dc": (n,)}
    if rms:
        del shapes["dbeta"]
    writes = {}
    for i, (key, shape) in enumerate(shapes.items()):
        if turned and key == "dw":
            writes[key] = ctx.scratch(x.dtype, (n, k))
            ctx.alias(node, i, writes[key].permute((1, 0)))
        else:
            writes[key] = ctx.output(node, i, shape, x.dtype)
    ctx.select(node, problem, reads, writes)


def _turned(ctx: Context, problem: GemmProblem, w: Tensor) -> bool:
    """Whether a weight stored as [n, k], and its gradient, should stay so rather than be copied."""
    lies = w.permute((1, 0))
    if w.dense or not lies.dense or alignment(lies) < 16:
        return False
    turned = problem.replace(trans_b=True)
    copied, direct = (select(problem.op, p, ctx.hw) for p in (problem, turned))
    if copied is None or direct is None:
        return direct is not None
    copies = Passes(4 * ITEMSIZE[w.dtype] * problem.k * problem.n, 2)
    return pays((problem, copies), (turned,), ctx.hw)


class GradientCosts(NamedTuple):
    """Predicted seconds of forward and backward: fused, and of a norm and a product [m, k, n]."""

    whole: float
    apart: float
    shape: tuple[int, int, int]


def gradient_costs(node: ir.Node, math: str, hw: Hardware) -> GradientCosts | None:
    """What a fused float32 norm and product cost; None for a node that is no such pair.

    The gradient of the fused form is one call. An unknown number of rows is taken to be 1024.
    """
    name = FusedName.of(node.op_type)
    suffix = name.activation
    if name.family != "Gemm" or not name.norm or name.place or name.exposed:
        return None
    x, w = node.inputs[0], node.inputs[2 if name.rms else 3]
    k, n = dim(w, 0), dim(w, 1)
    if x is None or x.shape is None or not k or not n:
        return None
    rows = [dim(x, i) for i in range(len(x.shape) - 1)]
    m = 1024 if None in rows else prod(d for d in rows if d is not None)
    act: dict[str, Value] = {"act": ACTIVATIONS[suffix]} if suffix else {}
    saved: dict[str, Value] = act | {"save_z": True} if act else {}
    how: dict[str, Value] = {"m": m, "math": math}
    whole = (
        GemmProblem.of("LayerNormGemm", n=n, k=k, bias=True, **how, **saved),
        GemmProblem.of("LayerNormGemmGrad", n=n, k=k, **how, **act),
    )
    apart = (
        GemmProblem.of("Gemm", n=n, k=k, bias=True, **how, **saved),
        *products("NT m k n; TN k n m", {"m": m, "n": n, "k": k}, math=math),
    )
    # the norm and its gradient, dz, its sums; small launches beside others take half their time
    moved = 4 * (5 * m * k + (4 if act else 1) * m * n)
    passes = Passes(moved, 4 if act else 3)
    return GradientCosts(total(whole, hw), total((*apart, passes), hw), (m, k, n))


def _apart(problem: GemmProblem) -> tuple[AnyProblem, ...]:
    """What the op's body costs: two products, and passes over [m, n], [m, k] and [k, n].

    They take about fifteen launches.
    """
    problem = problem.upper_bound()
    m, n, k = problem.m, problem.n, problem.k
    passes = 8 * m * n + 6 * m * k + 12 * k * n + (2 * m * n if problem.epilogue.act else 0)
    sizes = {"m": m, "n": n, "k": k}
    gemms = products("NT m k n; TN k n m", sizes, dtype=problem.dtype, math=problem.math)
    return (*gemms, Passes(ITEMSIZE[problem.dtype] * passes, 15))


def activated_gemm_grad(ctx: Context, node: ir.Node) -> None:
    """Gemm<Act>Grad: dz = dy act'(z) and dc = sum_m dz in one pass, dx = dz wᵀ, dw = xᵀ dz."""
    name = FusedName.of(node.op_type)
    dy, w = ctx.view(node, 0), ctx.view(node, 2)
    k, n = w.shape
    if (
        dy.dtype not in ("float16", "bfloat16")
        or n % 8
        or not n
        or name.exposed not in ((), ("dz",))
    ):
        raise Unserved(
            "no-kernel", what=f"{n} columns of {dy.dtype}, but for 16-bit rows of whole 16 bytes"
        )
    dy, x, z = (ctx.dense(node, i) for i in (0, 1, 3))
    rows, how = dy.size // n, activation(ctx, node, name.activation)
    parts = act_parts(rows, n)
    problem = SlopeProduct(rows, n, dy.dtype, parts, **how)
    dz = (
        ctx.output(node, 3, dy.shape, dy.dtype) if name.exposed else ctx.scratch(dy.dtype, dy.shape)
    )
    dc = ctx.output(node, 2, (n,), dy.dtype) if ctx.wants(node, 2) else None
    if dc is not None and parts == 1:
        ctx.select(node, problem, {"dy": dy, "z": z}, {"dz": dz, "dbias": dc})
    else:
        part = ctx.scratch("float32", (parts, n))
        ctx.select(node, problem, {"dy": dy, "z": z}, {"dz": dz, "part": part})
        if dc is not None:
            ctx.select(node, PartSums(parts, n, dy.dtype), {"part": part}, {"out0": dc})
    flat = dz.view((rows, n))
    if ctx.wants(node, 0):
        dx = ctx.output(node, 0, x.shape, x.dtype).view((rows, k))
        product(ctx, node, flat, w.permute((1, 0)), dx)
    if ctx.wants(node, 1):
        turned = x.view((rows, k)).permute((1, 0))
        product(ctx, node, turned, flat, ctx.output(node, 1, (k, n), w.dtype))


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "Gemm"): gemm,
    **{
        (FUSE, str(FusedName.make("Gemm", act, norm=norm, grad=grad))): lowering
        for act in ACTIVATIONS
        for norm, grad, lowering in (
            ("", False, fused_gemm),
            *((("", True, activated_gemm_grad),) if act else ()),
            ("LayerNorm", False, norm_gemm),
            ("LayerNorm", True, norm_gemm_grad),
            ("RMSNorm", False, norm_gemm),
            ("RMSNorm", True, norm_gemm_grad),
        )
    },
}

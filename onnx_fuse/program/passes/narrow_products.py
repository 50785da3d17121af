"""A product of few columns, as of a classifier's classes, has no launch beside a LayerNorm.

The block that has a row in its registers multiplies it by the weights, which L2 holds: behind the
norm as y · w, in the norm's gradient as dy = a · b, a row of a being short.
"""

from __future__ import annotations

from dataclasses import replace

from onnx_fuse.program.call import Call
from onnx_fuse.program.passes.callgraph import Calls, whole
from onnx_fuse.program.problem import GemmProblem
from onnx_fuse.program.problems import Norm, NormGrad

COLUMNS = 16
"""The number of columns of weights that a norm's kernel multiplies by at most."""


def _plain(call: Call, also: str = "") -> GemmProblem | None:
    """The problem of a Gemm of dense operands without epilogue but `also`."""
    p = call.problem
    if not isinstance(p, GemmProblem) or p.op != "Gemm" or len(call.writes) != 1:
        return None
    if p.trans_a or p.batch:
        return None
    allowed = {"lda", "ldb", "align", "static_b", also}
    if not {name for name, value in p.extras.items() if value} <= allowed or p.align % 16:
        return None
    return p if p.ld == (p.k, p.k if p.trans_b else p.n) else None


def product_behind_norm(calls: Calls, i: int, call: Call) -> None:
    """z = y · w + c over few columns, y a LayerNormalization's: that makes z, and y if read."""
    p = _plain(call, "bias")
    if p is None or p.n > COLUMNS:
        return
    reads, (_, z) = dict(call.reads), call.writes[0]
    y, w, row = reads["a"], reads["b"], [reads["col1"]] if "col1" in reads else []
    at, norm = calls.producer(y) or (i, call)
    plain = norm.problem
    if not isinstance(plain, Norm) or plain.columns:
        return
    normed, fits = dict(norm.writes)["y"], plain.affine == 1 and plain.length == p.k
    if normed.buffer != y.buffer or not fits or not whole(p.m * p.k, normed, y):
        return
    types = {p.out, *(t.dtype for t in (y, normed, w, z, *row))}
    if len(types) > 1 or y.dtype == "float64" or not z.dense or z.size != p.m * p.n:
        return
    if any(c.shape[-1] != p.n or c.strides[-1] != 1 for c in row):
        return
    if calls.written(at, i, w, *row) or not calls.may_write(at, i, z):
        return
    both = replace(plain, columns=p.n, turned=p.trans_b)
    if not calls.pays((plain, p), (both,)):
        return
    unread = calls.sole_producer(i, y) is not None
    more = tuple(zip(("w", "c"), (w, *row), strict=False))
    calls.fuse(at, i, replace(
        norm,
        kernel=f"{norm.kernel}+{call.kernel}",
        problem=both,
        reads=(*norm.reads, *more),
        writes=(*(pair for pair in norm.writes if pair[0] != "y" or not unread), ("z", z)),
        flops=norm.flops + p.flops,
        bytes=norm.bytes + sum(t.nbytes for _, t in more) + z.nbytes - unread * y.nbytes,
        inplace=() if unread else norm.inplace,
    ))  # fmt: skip


def product_in_norm_grad(calls: Calls, i: int, call: Call) -> None:
    """dy = a · b over few k, read by a LayerNormGrad alone: that makes its rows of dy itself."""
    reads, grad = dict(call.reads), call.problem
    if not isinstance(grad, NormGrad) or grad.rms or grad.skip or grad.k:
        return
    dy = reads["dy"]
    at, product = calls.sole_producer(i, dy) or (i, call)
    p = _plain(product)
    if p is None or p.k > COLUMNS or not dy.dense or dy.size != p.m * p.n:
        return
    if {p.dtype, p.out, reads["scale"].dtype} != {"float32"}:
        return
    a, b = (dict(product.reads)[name] for name in ("a", "b"))
    if calls.written(at + 1, i, a, b):
        return
    both = replace(grad, k=p.k, turned=p.trans_b)
    if not calls.pays((p, grad), (both,)):
        return
    fused = replace(
        call,
        kernel=f"{product.kernel}+{call.kernel}",
        problem=both,
        reads=(("dy", a), ("b", b), *((n, t) for n, t in call.reads if n != "dy")),
        flops=call.flops + p.flops,
        bytes=call.bytes - dy.nbytes + a.nbytes + b.nbytes,
        inplace=tuple(pair for pair in call.inplace if pair[1] != "dy"),
    )
    calls.fuse(at, i, fused, here=True)


FEW_COLUMNS = (product_behind_norm, product_in_norm_grad)

"""A LayerNormalization left to the 16-bit products that read it: no launch, no stored rows.

Post-norm transformers: h = LN(s), y = act(h · w + c), t = a · v + b + h become
y = LayerNormGemm(s) with folded weights and t = a · v + (b + beta) + (s - mean) rstd gamma, with
the statistics that the first wrote. It takes them from s, or from the moments of each row's tiles
that the wgmma product which makes s leaves: whichever the cost models find cheapest, if it is
cheaper than the launch of the norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnx_fuse.kernels.gemm_sm90 import TILES
from onnx_fuse.program.call import Call, PassContext, Tensor
from onnx_fuse.program.epilogue import Epilogue
from onnx_fuse.program.passes.callgraph import Calls, nodes_of, whole
from onnx_fuse.program.problem import AnyProblem, GemmProblem
from onnx_fuse.program.problems import Norm

PLAIN = {"bias", "align", "lda", "ldb", "a_strides", "b_strides", "static_b"}
ACTIVATED = PLAIN | {"act", "act_alpha"}


@dataclass(frozen=True)
class Normalised:
    """y = LN(x) of a call, and the values of its parameters."""

    call: Call
    norm: Norm
    x: Tensor
    y: Tensor
    gamma: np.ndarray
    beta: np.ndarray


def defer(calls: Calls, i: int, call: Call) -> None:
    """Leave a LayerNormalization to its readers, where all can take it over and it is cheaper."""
    rows = _norm(call, calls.ctx)
    if rows is None or rows.y.buffer in calls.keep or calls.writers[rows.y.buffer] != [i]:
        return
    if max(calls.writers[rows.x.buffer], default=-1) > i:
        return  # x has another value by then
    readers = calls.readers[rows.y.buffer]
    at = {j: now for j in readers for now in calls.now[j]}
    products = {j: c for j, c in at.items() if _product(c, rows)}
    residuals = {j: c for j, c in at.items() if _residual(c, rows, calls.ctx)}
    if not products or len(products) + len(residuals) < len(readers):
        return
    if min(residuals, default=len(calls.calls)) < min(products):
        return  # the statistics would come too late

    def seconds(*problems: AnyProblem) -> float:
        return sum(map(calls.seconds, problems))

    added = seconds(*map(_added, residuals.values()))
    before = seconds(rows.norm, *map(_problem, (*products.values(), *residuals.values())))
    ways = [(added + seconds(*(_norm_gemm(c, rows) for c in products.values())), 0)]
    place, source = calls.producer(rows.x) or (i, call)
    if _makes(source, rows):
        old, width = _problem(source), rows.norm.length
        for parts in sorted({width // bn for _, bn, _ in TILES if width % bn == 0}):
            more = seconds(old.with_epilogue(moments=parts)) - seconds(old)
            after = seconds(*(_norm_gemm(c, rows, parts) for c in products.values()))
            ways.append((added + more + after, parts))
    after, parts = min(ways)
    if not after < before:
        return
    part = {"part": calls.ctx.scratch("float32", (parts, rows.norm.rows, 2))} if parts else {}
    if (changed := _readers(calls.ctx, rows, part, products, residuals)) is None:
        return
    if parts:
        problem = _problem(source).with_epilogue(moments=parts)
        changed[place] = replace(source, problem=problem, writes=(*source.writes, *part.items()))
    calls.now[i] = ()
    for j, new in changed.items():
        calls.now[j] = (new,)


def _norm(call: Call, ctx: PassContext) -> Normalised | None:
    """The LayerNormalization of a 16-bit x whose parameters nothing writes to."""
    norm = call.problem
    if not isinstance(norm, Norm) or norm.rms or norm.affine != 1 or not norm.stored:
        return None
    if [name for name, _ in call.writes] != ["y"]:
        return None
    reads, y = dict(call.reads), call.writes[0][1]
    gamma = ctx.known(reads["scale"])
    beta = ctx.known(reads["bias"]) if "bias" in reads else np.zeros(1, np.float32)
    x = reads["x"]
    if x.dtype not in ("float16", "bfloat16") or gamma is None or beta is None or x.offset:
        return None
    if gamma.size != x.shape[-1]:
        return None
    return Normalised(call, norm, x, y, gamma.reshape(-1), beta.reshape(-1))


def _reads(call: Call, rows: Normalised, name: str, allowed: set[str]) -> GemmProblem | None:
    """The problem of a Gemm with no more than `allowed`, whose operand `name` are all rows of the
    norm, in order, and which reads them nowhere else.
    """
    p, reads = call.problem, dict(call.reads)
    if not isinstance(p, GemmProblem) or p.op != "Gemm" or p.batch or p.m != rows.norm.rows:
        return None
    if [operand for operand, t in call.reads if t.buffer == rows.y.buffer] != [name]:
        return None
    given = {field for field, value in p.extras.items() if value}
    return p if whole(rows.y.size, reads[name]) and given <= allowed else None


def _product(call: Call, rows: Normalised) -> bool:
    """Whether the norm's rows are the product's left operand, and nothing else of it."""
    p = _reads(call, rows, "a", ACTIVATED)
    if p is None or p.trans_a or p.k != rows.norm.length:
        return False
    return p.ld == (p.k, p.k if p.trans_b else p.n)


def _residual(call: Call, rows: Normalised, ctx: PassContext) -> bool:
    """Whether the product adds the norm's rows to its own, after a bias that is known."""
    p = _reads(call, rows, "c", PLAIN | {"residual", "moments"})
    if p is None or p.n != rows.norm.length or p.epilogue.residual is not True:
        return False
    bias = dict(call.reads).get("col1")
    return bias is None or ctx.known(bias) is not None


def _readers(
    ctx: PassContext,
    rows: Normalised,
    part: Mapping[str, Tensor],
    products: Mapping[int, Call],
    residuals: Mapping[int, Call],
) -> dict[int, Call] | None:
    """The readers' new calls by their place, or None where the weights cannot be folded."""
    new_calls: dict[int, Call] = {}
    params, parts = dict(rows.call.reads), part["part"].shape[0] if part else 0
    beta = params.get("bias") or ctx.constant(np.zeros_like(rows.gamma))
    statistics: dict[str, Tensor] = {}
    for j, call in products.items():
        reads, problem = dict(call.reads), _norm_gemm(call, rows, parts)
        b = reads["b"]
        weights = replace(b, shape=b.shape[-2:], strides=b.strides[-2:])
        row = reads.get("col1") or ctx.constant(np.zeros(problem.n, rows.gamma.dtype))
        folded = ctx.folded(params["scale"], beta, weights, row, problem.trans_b)
        if folded is None:
            return None
        moments = {n: ctx.scratch("float32", (*rows.x.shape[:-1], 1)) for n in ("mean", "rstd")}
        statistics = statistics or moments
        new_calls[j] = replace(
            call, kernel=f"LayerNorm{call.kernel}", nodes=nodes_of(rows.call, call),
            problem=problem, reads=(("x", rows.x), *folded.items(), *part.items()),
            writes=(*call.writes, *moments.items()),
        )  # fmt: skip
    gamma = ctx.constant(rows.gamma.astype(np.float32))
    for j, call in residuals.items():
        reads = dict(call.reads)
        bias = ctx.known(reads["col1"]) if "col1" in reads else np.zeros(1)
        assert bias is not None
        both = np.broadcast_to(bias.astype(np.float64).reshape(-1) + rows.beta, rows.gamma.shape)
        reads |= {
            "c": rows.x, "row0": statistics["rstd"], "row1": statistics["mean"],
            "col0": gamma, "col1": ctx.constant(both.astype(np.float32)),
        }  # fmt: skip
        nodes = nodes_of(call, rows.call)
        new_calls[j] = replace(call, nodes=nodes, problem=_added(call), reads=tuple(reads.items()))
    return new_calls


def _problem(call: Call) -> GemmProblem:
    """The problem of a call that makes a product."""
    assert isinstance(call.problem, GemmProblem)
    return call.problem


def _norm_gemm(call: Call, rows: Normalised, parts: int = 0) -> GemmProblem:
    """The LayerNormGemm that a product of the norm's rows becomes."""
    p = _problem(call)
    act, alpha = p.epilogue.act, p.epilogue.act_alpha
    return GemmProblem(
        "LayerNormGemm", m=p.m, n=p.n, k=p.k, dtype=p.dtype, out_dtype=p.out_dtype,
        trans_b=p.trans_b, math=p.math, epsilon=rows.norm.epsilon, folded=True, static_b=True,
        parts=parts, epilogue=Epilogue(bias=True, act=act, act_alpha=alpha),
    )  # fmt: skip


def _added(call: Call) -> GemmProblem:
    """The product with the residual that it added replaced by the norm of that residual."""
    return _problem(call).with_epilogue(residual="norm", bias=True)


def _makes(call: Call, rows: Normalised) -> bool:
    """Whether a product's result is the norm's x, row by row."""
    p = call.problem
    return (
        isinstance(p, GemmProblem)
        and p.op == "Gemm"
        and [(name, t.buffer) for name, t in call.writes] == [("y", rows.x.buffer)]
        and whole(rows.x.size, call.writes[0][1])
        and (p.m, p.n, p.batch) == (rows.norm.rows, rows.norm.length, ())
    )

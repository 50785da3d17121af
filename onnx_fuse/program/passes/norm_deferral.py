"""A LayerNormalization left to the 16-bit products that read it: no launch, no stored rows.

Post-norm transformers: h = LN(s), y = act(h · w + c), t = a · v + b + h become
y = LayerNormGemm(s) with folded weights and t = a · v + (b + beta) + (s - mean) rstd gamma, with
the statistics that the first wrote. It takes them from s, or from the moments of each row's tiles
that the wgmma product which makes s leaves: whichever the cost models find cheapest, if it is
cheaper than the launch of the norm.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from onnx_fuse.kernels.costs import seconds
from onnx_fuse.kernels.gemm_sm90 import TILES
from onnx_fuse.program.call import Call, PassContext, Tensor
from onnx_fuse.program.epilogue import Epilogue
from onnx_fuse.program.passes.callgraph import uses
from onnx_fuse.program.problem import AnyProblem, GemmProblem
from onnx_fuse.program.problems import Norm

PLAIN = {"bias", "align", "lda", "ldb", "a_strides", "b_strides", "static_b"}
ACTIVATED = PLAIN | {"act", "act_alpha"}


@dataclass(frozen=True)
class Rows:
    """y = LN(x) over rows of `width` elements, and its parameters' values."""

    call: Call
    x: Tensor
    y: Tensor
    gamma: np.ndarray
    beta: np.ndarray
    epsilon: float

    @property
    def width(self) -> int:
        return self.x.shape[-1]

    @property
    def rows(self) -> int:
        return prod(self.x.shape[:-1])

    def whole(self, tensor: Tensor) -> bool:
        """Whether these are all rows, in order."""
        return tensor.dense and not tensor.offset and tensor.size == self.y.size


def defer(
    calls: Sequence[Call],
    keep: Collection[int],
    ctx: PassContext,
) -> tuple[Call, ...]:
    """The calls without the LayerNormalizations that all their readers can take over."""
    readers, writers = uses(calls)
    result: list[Call | None] = list(calls)
    choices = Choices(ctx)
    for i, call in enumerate(calls):
        norm = _norm(call, ctx)
        if norm is None or norm.y.buffer in keep or writers[norm.y.buffer] != [i]:
            continue
        if max(writers[norm.x.buffer], default=-1) > i:
            continue  # x has another value by then
        at = {j: result[j] for j in readers[norm.y.buffer]}
        products = {j: c for j, c in at.items() if c is not None and _product(c, norm)}
        residuals = {j: c for j, c in at.items() if c is not None and _residual(c, norm, ctx)}
        if not products or len(products) + len(residuals) < len(readers[norm.y.buffer]):
            continue
        if min(residuals, default=len(calls)) < min(products):
            continue  # the statistics would come too late
        maker = writers[norm.x.buffer]
        source = result[maker[0]] if len(maker) == 1 else None
        changed = choices.replaced(norm, source, products, residuals)
        if changed is not None:
            result[i] = None
            for j, new in changed.items():
                result[maker[0] if j < 0 else j] = new
    return tuple(call for call in result if call is not None)


def _norm(call: Call, ctx: PassContext) -> Rows | None:
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
    return Rows(call, x, y, gamma.reshape(-1), beta.reshape(-1), norm.epsilon)


def _attrs(problem: GemmProblem) -> set[str]:
    return {name for name, value in problem.extras.items() if value}


def _product(call: Call, norm: Rows) -> bool:
    """Whether the norm's rows are the product's left operand, and nothing else of it."""
    p = call.problem
    return (
        isinstance(p, GemmProblem)
        and p.op == "Gemm"
        and [name for name, t in call.reads if t.buffer == norm.y.buffer] == ["a"]
        and norm.whole(dict(call.reads)["a"])
        and (p.m, p.k, p.batch, p.trans_a) == (norm.rows, norm.width, (), False)
        and p.ld == (p.k, p.k if p.trans_b else p.n)
        and _attrs(p) <= ACTIVATED
    )


def _residual(call: Call, norm: Rows, ctx: PassContext) -> bool:
    """Whether the product adds the norm's rows to its own, after a bias that is known."""
    p, reads = call.problem, dict(call.reads)
    return (
        isinstance(p, GemmProblem)
        and p.op == "Gemm"
        and [name for name, t in call.reads if t.buffer == norm.y.buffer] == ["c"]
        and norm.whole(reads["c"])
        and (p.m, p.n, p.batch) == (norm.rows, norm.width, ())
        and p.epilogue.residual is True
        and _attrs(p) <= PLAIN | {"residual", "moments"}
        and ("col1" not in reads or ctx.known(reads["col1"]) is not None)
    )


class Choices:
    """Chooses what replaces a norm and its readers, where that is cheaper."""

    def __init__(self, ctx: PassContext) -> None:
        self.ctx = ctx
        self._seconds: dict[AnyProblem, float] = {}

    def seconds(self, *problems: AnyProblem) -> float:
        """Seconds by the cost models alone, which compare where records would not."""
        for problem in problems:
            if problem not in self._seconds:
                time = seconds(problem, self.ctx.hw, self.ctx.prefs, records=False)
                self._seconds[problem] = time
        return sum(self._seconds[problem] for problem in problems)

    def replaced(
        self,
        norm: Rows,
        source: Call | None,
        products: Mapping[int, Call],
        residuals: Mapping[int, Call],
    ) -> dict[int, Call] | None:
        """The readers' new calls by their place, -1: of the call that makes x; None: as it was."""
        added = self.seconds(*(_added(c) for c in residuals.values()))
        readers = (*products.values(), *residuals.values())
        alone = [p for p in (norm.call.problem,) if p is not None]
        before = self.seconds(*alone, *(_problem(c) for c in readers))
        ways = [(added + self.seconds(*(_norm_gemm(c, norm) for c in products.values())), 0)]
        if source is not None and _makes(source, norm):
            old = _problem(source)
            for parts in sorted({norm.width // bn for _, bn, _ in TILES if norm.width % bn == 0}):
                new = (_norm_gemm(c, norm, parts) for c in products.values())
                more = self.seconds(old.with_epilogue(moments=parts)) - self.seconds(old)
                ways.append((added + more + self.seconds(*new), parts))
        after, parts = min(ways)
        if not after < before:
            return None
        return self._calls(norm, source if parts else None, parts, products, residuals)

    def _calls(
        self,
        norm: Rows,
        source: Call | None,
        parts: int,
        products: Mapping[int, Call],
        residuals: Mapping[int, Call],
    ) -> dict[int, Call] | None:
        """The calls that replace the norm, or None where the weights cannot be folded."""
        ctx, new_calls, part = self.ctx, {}, {}
        if source is not None:
            part = {"part": ctx.scratch("float32", (parts, norm.rows, 2))}
            wrote = replace(source, writes=(*source.writes, *part.items()))
            new_calls[-1] = replace(wrote, problem=_problem(source).with_epilogue(moments=parts))
        params = dict(norm.call.reads)
        statistics: dict[str, Tensor] = {}
        for j, call in products.items():
            reads, problem = dict(call.reads), _norm_gemm(call, norm, parts)
            b = reads["b"]
            weights = replace(b, shape=b.shape[-2:], strides=b.strides[-2:])
            row = reads.get("col1") or ctx.constant(np.zeros(problem.n, norm.gamma.dtype))
            folded = ctx.folded(params["scale"], params.get("bias"), weights, row, problem.trans_b)
            if folded is None:
                return None
            moments = {n: ctx.scratch("float32", (*norm.x.shape[:-1], 1)) for n in ("mean", "rstd")}
            statistics = statistics or moments
            reader = replace(
                call,
                kernel=f"LayerNorm{call.kernel}",
                nodes=tuple(dict.fromkeys((*norm.call.nodes, *call.nodes))),
                reads=tuple(({"x": norm.x} | folded | part).items()),
                writes=(*call.writes, *moments.items()),
            )
            new_calls[j] = replace(reader, problem=problem)
        gamma = ctx.constant(norm.gamma.astype(np.float32))
        for j, call in residuals.items():
            reads = dict(call.reads)
            bias = ctx.known(reads["col1"]) if "col1" in reads else np.zeros(1)
            assert bias is not None
            both = np.broadcast_to(bias.astype(np.float64).reshape(-1) + norm.beta, norm.width)
            changed = {
                "c": norm.x, "row0": statistics["rstd"], "row1": statistics["mean"],
                "col0": gamma, "col1": ctx.constant(both.astype(np.float32)),
            }  # fmt: skip
            reader = replace(
                call,
                nodes=tuple(dict.fromkeys((*call.nodes, *norm.call.nodes))),
                reads=tuple((reads | changed).items()),
            )
            new_calls[j] = replace(reader, problem=_added(call))
        return new_calls


def _problem(call: Call) -> GemmProblem:
    """The problem of a call that makes a product."""
    assert isinstance(call.problem, GemmProblem)
    return call.problem


def _norm_gemm(call: Call, norm: Rows, parts: int = 0) -> GemmProblem:
    """The LayerNormGemm that a product of the norm's rows becomes."""
    p = _problem(call)
    act, alpha = p.epilogue.act, p.epilogue.act_alpha
    return GemmProblem(
        "LayerNormGemm", m=p.m, n=p.n, k=p.k, dtype=p.dtype, out_dtype=p.out_dtype,
        trans_b=p.trans_b, math=p.math, epsilon=norm.epsilon, folded=True, static_b=True,
        parts=parts, epilogue=Epilogue(bias=True, act=act, act_alpha=alpha),
    )  # fmt: skip


def _added(call: Call) -> GemmProblem:
    """The product with the residual that it added replaced by the norm of that residual."""
    return _problem(call).with_epilogue(residual="norm", bias=True)


def _makes(call: Call, norm: Rows) -> bool:
    """Whether a product's result is the norm's x, row by row."""
    p = call.problem
    return (
        isinstance(p, GemmProblem)
        and p.op == "Gemm"
        and [(name, t.buffer) for name, t in call.writes] == [("y", norm.x.buffer)]
        and norm.whole(call.writes[0][1])
        and (p.m, p.n, p.batch) == (norm.rows, norm.width, ())
    )

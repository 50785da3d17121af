"""The gradient of a bias, left to a product that reads the same rows.

A layer's dbias is the sum of dy over its rows, and dx = dy · Wᵀ reads dy as well: the product adds
up the columns of the tiles that it holds in shared memory, so that no launch reads dy for them.
"""

from __future__ import annotations

from dataclasses import replace

from onnx_fuse.program.call import Call, Tensor
from onnx_fuse.program.passes.callgraph import Calls
from onnx_fuse.program.problem import GemmProblem
from onnx_fuse.program.problems import PartSums, Reduce, SlopeProduct

ROWS = 64
"""Each part of the sums is over so many rows of a (`Epilogue.column_sums`)."""


def sum_columns(calls: Calls, i: int, call: Call) -> None:
    """Put product and sum of parts in the place of a product and of the sums that begin at `i`."""
    summed = _summed(call)
    places = [] if summed is None else passes_of(calls, i)
    if not places or summed is None:
        return
    (_, x), end = call.reads[0], calls.calls[places[-1]]
    (_, y) = end.writes[0]
    for at in dict.fromkeys(calls.readers[x.buffer]):
        product = calls.now[at][0] if len(calls.now[at]) == 1 else calls.calls[i]
        problem = product.problem
        if not isinstance(problem, GemmProblem) or not adds_up(product, x, summed):
            continue
        if any(min(i, at) <= w <= max(i, at) for w in calls.writers[x.buffer]):
            continue  # the two read other values
        behind = max(at, places[-1])
        used = (*calls.readers[y.buffer], *calls.writers[y.buffer])
        if any(j not in places and j <= behind for j in used):
            continue
        fused = problem.with_epilogue(column_sums=True)
        sums = PartSums(-(-summed[0] // ROWS), summed[1], y.dtype)
        apart = [p for j in places if (p := calls.calls[j].problem) is not None]
        if not calls.pays((problem, *apart), (fused, sums)):
            continue
        part = calls.ctx.scratch("float32", (sums.parts, sums.n))
        call_fused = replace(product, problem=fused, writes=(*product.writes, ("part", part)))
        last = replace(
            end, kernel="PartSums", problem=sums, reads=(("part", part),), writes=(("out0", y),),
            bytes=sums.bytes, inplace=(),
        )  # fmt: skip
        return calls.gather(places, at, call_fused, last)


def _summed(call: Call) -> tuple[int, int] | None:
    """The rows and columns of the matrix whose rows a call adds up, None where it does not."""
    problem = call.problem
    if isinstance(problem, SlopeProduct) and not problem.act:
        return problem.m, problem.n
    if not isinstance(problem, Reduce) or problem.reducer != "Sum" or problem.from_state:
        return None
    if problem.outer != 1 or problem.inner == 1 or not call.reads[0][1].dense:
        return None
    return problem.length, problem.inner


def passes_of(calls: Calls, i: int) -> list[int]:
    """The places of the passes of a reduction, the first of which is at `i`.

    There are none where something else reads what they leave to each other.
    """
    problem, places = calls.calls[i].problem, [i]
    while (isinstance(problem, Reduce) and problem.to_state) or (
        isinstance(problem, SlopeProduct) and calls.calls[i].writes[0][0] == "part"
    ):
        buffer = calls.calls[places[-1]].writes[0][1].buffer
        if len(calls.readers[buffer]) != 1 or calls.writers[buffer] != places[-1:]:
            return []
        places.append(calls.readers[buffer][0])
        problem = calls.calls[places[-1]].problem
    same = all(calls.now[j] == (calls.calls[j],) for j in places)
    return places if isinstance(problem, Reduce | SlopeProduct | PartSums) and same else []


def adds_up(product: Call, x: Tensor, summed: tuple[int, int]) -> bool:
    """Whether rows and columns that are added up are those of the product's left operand."""
    problem = product.problem
    if not isinstance(problem, GemmProblem) or problem.op != "Gemm":
        return False
    if problem.batch or problem.trans_a:
        return False
    a = dict(product.reads)["a"]
    return (
        (a.buffer, a.offset, a.size, a.dtype) == (x.buffer, x.offset, x.size, x.dtype)
        and a.dense
        and (problem.m, problem.k) == summed
        and problem.lda in (None, problem.k)
    )

"""The statistics of a BatchNormalization in training, left to what makes its input.

A convolution or a product has each tile of its result in shared memory before it stores it: it
leaves the moments of the tile's columns, and no launch reads the result for them.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from onnx_fuse.program.call import Call
from onnx_fuse.program.passes.callgraph import Calls, whole
from onnx_fuse.program.passes.column_sums import passes_of
from onnx_fuse.program.problem import AnyProblem, GemmProblem
from onnx_fuse.program.problems import Conv, MergedMoments, Reduce


def leave_moments(calls: Calls, i: int, call: Call) -> None:
    """Merge the moments of parts in the place of the reductions of columns that begin at `i`."""
    first = call.problem
    if not isinstance(first, Reduce) or first.reducer != "Moments" or first.from_state:
        return
    (_, x), (m, n) = call.reads[0], (first.length, first.inner)
    source, places = calls.producer(x), passes_of(calls, i)
    if first.outer != 1 or n == 1 or source is None or not places or not whole(m * n, x):
        return
    at, product = source
    last = calls.calls[places[-1]]
    written, stats = dict(product.writes).get("y"), dict(last.writes)
    if written is None or not whole(m * n, written) or calls.now[at] != (product,):
        return
    if (written.buffer, written.dtype) != (x.buffer, x.dtype) or stats.keys() != {"y", "y2"}:
        return
    if any(t.dtype != "float32" for t in stats.values()):
        return
    fused = _with_moments(product.problem, m, n)
    merged = MergedMoments(m, n)
    before = [p for j in places if (p := calls.calls[j].problem) is not None]
    if fused is None or product.problem is None or not calls.serves(fused):
        return
    if not calls.pays((product.problem, *before), (fused, merged)):
        return
    part = calls.ctx.scratch("float32", (merged.parts, n, 2))
    calls.now[at] = (replace(product, problem=fused, writes=(*product.writes, ("part", part))),)
    calls.gather(places, places[-1], replace(
        last, kernel="MergedMoments", problem=merged, reads=(("part", part),),
        writes=(("mean", stats["y"]), ("variance", stats["y2"])), bytes=merged.bytes, inplace=(),
    ))  # fmt: skip


def _with_moments(problem: AnyProblem | None, m: int, n: int) -> AnyProblem | None:
    """The problem that leaves the moments of its [m, n] columns; None where it has others."""
    if isinstance(problem, Conv):
        rows, columns = problem.batch * prod(problem.outer), problem.groups * problem.filters
        usable = problem.channels_last and not problem.transposed and not problem.y_strides
        return (
            replace(problem, column_moments=True) if usable and (rows, columns) == (m, n) else None
        )
    if isinstance(problem, GemmProblem) and problem.op == "Gemm" and not problem.batch:
        return (
            problem.with_epilogue(column_moments=True) if (problem.m, problem.n) == (m, n) else None
        )
    return None

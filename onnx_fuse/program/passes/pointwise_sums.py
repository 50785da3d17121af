"""The sums of what a pointwise call stores, left to that call.

The gradient of a bias is the sum of dz = dy act'(z) over an axis, or over both: the call that makes
dz, and what else it stores of it, adds that up as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from onnx_fuse.program.call import Call, Tensor, reshape_strides
from onnx_fuse.program.data_movement import Pointwise, PointwiseSums
from onnx_fuse.program.passes.callgraph import Calls, nodes_of, whole
from onnx_fuse.program.passes.column_sums import passes_of
from onnx_fuse.program.passes.pointwise_fusion import as_problem, pointwise
from onnx_fuse.program.problem import AnyProblem
from onnx_fuse.program.problems import Reduce


def sum_results(calls: Calls, i: int, call: Call) -> None:
    """Put one call in the place of a pointwise call and of the sums of its result from `i` on."""
    first, places = call.problem, passes_of(calls, i) if isinstance(call.problem, Reduce) else []
    if not isinstance(first, Reduce) or first.reducer != "Sum" or first.from_state or not places:
        return
    x = call.reads[0][1]
    source = calls.producer(x)
    if source is None or calls.now[source[0]] != (source[1],) or not whole(x.size, x):
        return
    at, source_call = source
    number = next((j for j, (_, t) in enumerate(source_call.writes) if t.buffer == x.buffer), None)
    if number is None or source_call.expression is None:
        return
    over, m, n = _over(first, source_call)
    if over == "columns" and (further := _of_sums(calls, places[-1])) is not None:
        over, places = "all", [*places, further]
    views = _matrices(source_call, m, n)
    end = calls.calls[places[-1]]
    (_, y) = end.writes[0]
    if not over or views is None or not calls.may_write(at, places[-1], y):
        return
    # a reduction over axes apart has further passes, over these sums
    if not whole({"columns": n, "rows": m, "all": 1}[over], y):
        return
    fused = PointwiseSums(views, number, over, y.dtype)
    before: list[AnyProblem] = [p for j in places if (p := calls.calls[j].problem) is not None]
    if not calls.serves(fused) or not joins(calls, (pointwise(source_call), *before), fused):
        return
    calls.gather(places, at, replace(
        as_problem(source_call), problem=fused, expression=None,
        nodes=nodes_of(source_call, *(calls.calls[j] for j in places)),
        writes=(*source_call.writes, ("sum", y)), flops=fused.flops, bytes=fused.bytes,
    ))  # fmt: skip


def joins(calls: Calls, before: Sequence[AnyProblem], fused: PointwiseSums) -> bool:
    """Whether the one call is the faster way."""
    return calls.pays(before, (fused,))


def _over(first: Reduce, call: Call) -> tuple[str, int, int]:
    """What is added up, "" for neither rows nor columns, of how many rows and columns."""
    if first.inner > 1:
        return "columns" if first.outer == 1 else "", first.length, first.inner
    if first.outer > 1:
        return "rows", first.outer, first.length
    shape = call.writes[0][1].shape
    return "all", prod(shape[:-1]), prod(shape[-1:])


def _of_sums(calls: Calls, at: int) -> int | None:
    """The place of the call that adds up all sums of columns, which nothing else reads."""
    (_, y) = calls.calls[at].writes[0]
    if len(calls.readers[y.buffer]) != 1 or y.buffer in calls.keep:
        return None
    reader = calls.readers[y.buffer][0]
    last = calls.calls[reader].problem
    alone = calls.now[reader] == (calls.calls[reader],) and calls.writers[y.buffer] == [at]
    if not alone or not isinstance(last, Reduce) or last.reducer != "Sum" or last.to_state:
        return None
    sums = last.outer == last.inner == 1 and last.length == y.size and not last.from_state
    return reader if sums else None


def _matrices(call: Call, m: int, n: int) -> Pointwise | None:
    """The call's problem over [m, n]; None where one of its views is no matrix of that size."""
    problem = pointwise(call)
    if prod(problem.writes[0].shape) != m * n:
        return None

    def matrix(tensor: Tensor) -> Tensor | None:
        strides = reshape_strides(tensor.shape, tensor.strides, (m, n))
        return None if strides is None else replace(tensor, shape=(m, n), strides=strides)

    reads, writes = ([matrix(t) for t in part] for part in (problem.reads, problem.writes))
    if None in reads or None in writes:
        return None
    operands = [tuple(t for t in part if t is not None) for part in (reads, writes)]
    return Pointwise(problem.expression, *operands)

"""Pointwise candidates: a transpose through tiles, or a kernel generated for the expression.

Operands: a0, a1, ... y0, y1, ...
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import TypeAlias

from onnx_fuse.cuda.pointwise import (
    ROWS_AT_ONCE,
    launch_of,
    launch_sums,
    sum_blocks,
    sums_width,
)
from onnx_fuse.cuda.transpose import launch_short, launch_transpose
from onnx_fuse.kernels.kernel import Kernels, roofline
from onnx_fuse.kernels.rule_based import HeuristicKernel
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.data_movement import Pointwise, PointwiseSums
from onnx_fuse.program.launch import Launch, Launches
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig
from onnx_fuse.program.size import OpenSize, minimum

Turn: TypeAlias = "Callable[[Tensor, Tensor], Launch | None]"
FEW_BYTES = 1 << 20
"""Bytes of a view whose order does not matter."""
READ_APART, WRITTEN_APART = 12, 56
"""Bytes that an element moves whose neighbours stand 32 bytes apart or more: a sector holds one,
and what other rows of the tensor find of it in the L2 is gone before they write (H200, 2026-11)."""


class TurnedCopy(HeuristicKernel[Pointwise]):
    """A candidate of indexing/transpose.cu, or of transpose_short.cu."""

    free_axes = "yz"

    def __init__(self, name: str, source: str, turned: Turn) -> None:
        self.name, self.source, self._turned = name, source, turned

    def _launch_of(self, problem: Pointwise) -> Launch | None:
        if problem.expression.steps or len(problem.reads) != 1 or len(problem.writes) != 1:
            return None
        return self._turned(problem.reads[0], problem.writes[0])

    def supports(self, problem: Pointwise, hw: Hardware) -> str | None:
        """A copy between views that run along different axes."""
        found = self._launch_of(problem)
        return None if found else f"no copy between two axes that are as long as {self.name} want"

    def launch(self, problem: Pointwise, config: KernelConfig, hw: Hardware) -> Launches:
        launch = self._launch_of(problem)
        assert launch is not None
        return (launch,)


def _bytes_moved(tensor: Tensor, apart: int, gathered: bool = False) -> int:
    """The bytes of a view: what it repeats counts once, but not the rows that indices name."""
    size, item = 1, ITEMSIZE[tensor.dtype]
    for length, stride in zip(tensor.shape, tensor.strides, strict=True):
        size *= length if stride or gathered else 1
    step = item * abs(tensor.strides[-1]) if tensor.shape else item
    if step <= item or item * size < FEW_BYTES:
        return item * size
    return size * (apart if step >= 32 else min(apart, step))


class Generated(HeuristicKernel[Pointwise]):
    """A kernel whose text is the expression; sizes and strides are its arguments."""

    name = "generated"

    def cost(self, problem: Pointwise, config: KernelConfig, hw: Hardware) -> float:
        """A pass over its views, which takes longer where neighbours stand apart."""
        rows = {row.load for row in problem.expression.rows}
        moved = sum(_bytes_moved(t, READ_APART, i in rows) for i, t in enumerate(problem.reads))
        moved += sum(_bytes_moved(t, WRITTEN_APART) for t in problem.writes)
        return max(problem.flops / problem.rate(hw), moved / hw.bandwidth) + hw.launch_seconds

    def launch(self, problem: Pointwise, config: KernelConfig, hw: Hardware) -> Launches:
        return (launch_of(problem.expression, problem.reads, problem.writes),)


class GeneratedSums(HeuristicKernel[PointwiseSums]):
    """A kernel whose text is the expression, with the sums of one result. Operands: a0 y0 sum."""

    name = "generated"

    def supports(self, problem: PointwiseSums, hw: Hardware) -> str | None:
        views, shape = problem.pointwise, problem.pointwise.writes[0].shape
        if len(shape) != 2 or views.expression.rows or views.expression.counts:
            return "its views are no matrices"
        if any(t.strides != (shape[1], 1) for t in views.writes):
            return "its results are not dense"
        added = {views.writes[problem.summed].dtype, problem.out_dtype}
        if not added <= {"float32", "float16", "bfloat16"}:
            return f"sums are in float32, not of {' and '.join(sorted(added))}"
        return f"{shape[1]} columns: an open number" if isinstance(shape[1], OpenSize) else None

    def cost(self, problem: PointwiseSums, config: KernelConfig, hw: Hardware) -> float:
        """A pass over the views, and what the last blocks take to add the parts up."""
        views = problem.pointwise
        m, n = views.writes[0].shape
        width = sums_width(views.reads, views.writes)
        strips, most = sum_blocks(n, width)
        parts = minimum(ceil(m / ROWS_AT_ONCE), most)
        moved = sum(_bytes_moved(t, READ_APART) for t in views.reads)
        moved += sum(_bytes_moved(t, WRITTEN_APART) for t in views.writes)
        # lanes beyond the last column idle; beyond the L2 the walk draws a part of memory's rate
        costs = hw.costs("sums of a generated kernel")
        share = {"memory": costs["memory"]} if moved > hw.l2_bytes else {}
        idle = (1 + strips * 32 * width / n) / 2
        seconds = roofline(hw, share, idle * moved, views.flops / views.rate(hw))
        if problem.over == "all":  # whose blocks take turns at one counter
            return seconds + costs["all"] + costs["turn"] * strips * parts
        seconds += costs["start"] + costs["strip"] * strips
        return seconds + costs["part"] * parts if problem.over == "columns" else seconds

    def workspace(self, problem: PointwiseSums, config: KernelConfig, hw: Hardware) -> int:
        """One float for each block and column, or row, or one for each block."""
        views = problem.pointwise
        m, n = views.writes[0].shape
        strips, parts = sum_blocks(n, sums_width(views.reads, views.writes))
        return 4 * {"columns": parts * n, "rows": strips * m, "all": strips * parts}[problem.over]

    def launch(self, problem: PointwiseSums, config: KernelConfig, hw: Hardware) -> Launches:
        views, result = problem.pointwise, (problem.summed, problem.over, problem.out_dtype)
        return (launch_sums(views.expression, views.reads, views.writes, *result),)


KERNELS: Kernels = {
    "Pointwise": (
        TurnedCopy("tiles", "indexing/transpose.cu", launch_transpose),
        TurnedCopy("runs", "indexing/transpose_short.cu", launch_short),
        Generated(),
    ),
    "PointwiseSums": (GeneratedSums(),),
}

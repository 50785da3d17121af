"""Softmax candidates: a row a team of threads, or columns where the axis is not the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx_fuse.cuda.macros import lanes, pow2
from onnx_fuse.kernels.kernel import Kernels
from onnx_fuse.kernels.rule_based import (
    CHUNK,
    HeuristicKernel,
    Plan,
    Planned,
    access_width,
    block_of,
    cut,
    row_items,
    team_size,
    thread_choices,
    typed,
)
from onnx_fuse.program.launch import Launches, args
from onnx_fuse.program.problem import Hardware, KernelConfig
from onnx_fuse.program.problems import Softmax
from onnx_fuse.program.size import any_batch

_KEPT = 32  # elements of a row a thread may hold in registers
_FEW = 128  # rows that leave the chip idle
_THREADS = 256


def _macros(problem: Softmax) -> dict[str, Any]:
    return typed(problem) | {"LOG": problem.log}


class RowSoftmax(HeuristicKernel[Softmax]):
    """softmax/row.cu. Operands: x y."""

    name = "row"
    source = "softmax/row.cu"
    free_axes = "yz"

    def supports(self, problem: Softmax, hw: Hardware) -> str | None:
        return None if problem.inner == 1 else "a row's elements do not stand side by side"

    def configs(self, problem: Softmax, hw: Hardware) -> Sequence[KernelConfig]:
        vec = access_width(problem.length, problem.dtype)
        return thread_choices(team_size(problem.outer, problem.length, vec))

    def launch(self, problem: Softmax, config: KernelConfig, hw: Hardware) -> Launches:
        outer, length = problem.outer, problem.length
        vec = access_width(length, problem.dtype)
        threads = config.integer("team") or team_size(outer, length, vec)
        items = row_items(length, vec, threads, _KEPT)
        threads = threads if items else 512  # a row read again: more rows at once hide its latency
        block = block_of(threads)
        return self.one(
            "softmax_row", -(-outer * threads // block), block,
            *args("x y, i64 outer length", problem), **_macros(problem), VEC=vec, TEAM=threads,
            BLOCK=block, ITEMS=items,
        )  # fmt: skip


class PartsSoftmax(Planned[Softmax], HeuristicKernel[Softmax]):
    """softmax/parts.cu: few long rows, each by many blocks. Operands: x y."""

    name = "parts"
    source = "softmax/parts.cu"

    def supports(self, problem: Softmax, hw: Hardware) -> str | None:
        if problem.inner != 1:
            return "a row's elements do not stand side by side"
        if any_batch(problem.outer) >= _FEW or problem.length < 4 * CHUNK:
            return f"{problem.outer} rows of {problem.length} are not few and long"
        return None

    def moved(self, problem: Softmax) -> int:
        return problem.bytes * 3 // 2

    def plan(self, problem: Softmax, config: KernelConfig, hw: Hardware) -> Plan:
        """What each chunk has, two accumulators, and the row by what all of its chunks have."""
        vec = access_width(problem.length, problem.dtype)
        chunk, chunks = cut(problem.outer, problem.length, vec)

        def each(entry: str, names: str) -> Launches:
            text = f"{names}, i64 length chunk chunks"
            return self.one(
                entry, problem.outer * chunks, _THREADS,
                *args(text, problem, chunk=chunk, chunks=chunks),
                **_macros(problem), VEC=vec, BLOCK=_THREADS,
            )  # fmt: skip

        parts = each("softmax_parts", "x workspace")
        return parts + each("softmax_apply", "x y workspace"), 16 * problem.outer * chunks


class ColumnSoftmax(HeuristicKernel[Softmax]):
    """softmax/column.cu. Operands: x y."""

    name = "column"
    source = "softmax/column.cu"
    free_axes = "yz"

    def launch(self, problem: Softmax, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch: a block for up to 32 columns."""
        inner = problem.inner
        bx = lanes(inner)
        by = min(1024 // bx, max(pow2(problem.length) // 4, 1))
        return self.one(
            "softmax_column", -(-inner // bx) * problem.outer, bx * by,
            *args("x y, i64 length inner", problem), **_macros(problem), BX=bx, BY=by,
        )  # fmt: skip


KERNELS: Kernels = {"Softmax": (PartsSoftmax(), RowSoftmax(), ColumnSoftmax())}

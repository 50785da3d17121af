"""Reduce, one pass of a reduction, and SumSquares of many tensors.

How a pass is cut depends on the shape alone, or on the class of its open sizes (`program.size`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx_fuse.cuda.macros import C_TYPES, accumulator, lanes, pow2
from onnx_fuse.kernels.kernel import Kernels
from onnx_fuse.kernels.rule_based import (
    BLOCK,
    HeuristicKernel,
    Plan,
    Planned,
    access_width,
    block_of,
    team_size,
    thread_choices,
)
from onnx_fuse.program.launch import Launches, Ptr, Table, args
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig
from onnx_fuse.program.problems import Reduce, SumSquares
from onnx_fuse.program.size import OpenSize, coarse, widely

_LARGE_BLOCK = 512  # threads a block for columns in one launch
_FEW = 128  # rows that leave most of the chip idle
CHUNK, ROWS = 8192, 1024  # of a sum of squares: elements a block, tensors a launch


def _macros(problem: Reduce) -> dict[str, Any]:
    return {
        "T": C_TYPES[problem.dtype], "U": C_TYPES[problem.out_dtype],
        "ACC": accumulator(problem.dtype, problem.reducer), "REDUCER": problem.reducer,
        "FROM_STATE": problem.from_state, "TO_STATE": problem.to_state, "VEC": _vec(problem),
        "SECOND": problem.second or None, "PAIR": problem.paired or None,
        "BATCHED": problem.reducer == "Moments" or None,
    }  # fmt: skip


def pass_width(outer: int, length: int, inner: int, dtype: str) -> int:
    """The number of elements of one access of a pass over dense elements.

    A single row of few elements is read one by one where its length is open, as that of the losses
    of a batch is, and so are rows of elements of 8 bytes, as of a mask: all lengths then share a
    program.
    """
    open_row = inner == 1 and isinstance(length, OpenSize)
    if open_row and (ITEMSIZE[dtype] == 8 or (outer == 1 and coarse(length) <= CHUNK)):
        return 1
    return access_width(length if inner == 1 else inner, dtype)


def _operands(problem: Reduce) -> str:
    return "x x2 y y2" if problem.paired else "x y y2"


def _vec(problem: Reduce) -> int:
    if problem.from_state or problem.short:
        return 1
    return pass_width(problem.outer, problem.length, problem.inner, problem.dtype)


def _team(problem: Reduce) -> int:
    """Threads a row, the same for a class of lengths: idle ones cost little where rows are few."""
    rows = problem.outer * problem.splits
    longest = widely(problem.chunk, least=2048 if coarse(rows) < _FEW else 512)
    return team_size(rows, longest, _vec(problem))


class RowReduce(HeuristicKernel[Reduce]):
    """reduce/reduce.cu, along the last axis. Operands: x x2 y y2."""

    name = "row"
    source = "reduce/reduce.cu"
    free_axes = "yz"

    def supports(self, problem: Reduce, hw: Hardware) -> str | None:
        return None if problem.inner == 1 else "a row's elements do not stand side by side"

    def configs(self, problem: Reduce, hw: Hardware) -> Sequence[KernelConfig]:
        return thread_choices(_team(problem))

    def launch(self, problem: Reduce, config: KernelConfig, hw: Hardware) -> Launches:
        threads = config.integer("team") or _team(problem)
        block = block_of(threads)
        return self.one(
            "reduce_row", -(-problem.outer * problem.splits * threads // block), block,
            *args(f"{_operands(problem)}, i64 outer length chunk splits count", problem),
            **_macros(problem), TEAM=threads, BLOCK=block,
        )  # fmt: skip


class ColumnReduce(HeuristicKernel[Reduce]):
    """reduce/reduce.cu, along another axis. Operands: x x2 y y2."""

    name = "column"
    source = "reduce/reduce.cu"
    free_axes = "yz"

    def supports(self, problem: Reduce, hw: Hardware) -> str | None:
        return None if problem.inner != 1 else "there is one column"

    def cost(self, problem: Reduce, config: KernelConfig, hw: Hardware) -> float:
        """A pass over x; short columns in one launch have few rows on their way at a time."""
        slower = self.numbers(hw)["short"] if problem.short else 1
        return problem.floor(hw) * slower + hw.launch_seconds

    def launch(self, problem: Reduce, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch: a block for up to 32 accesses side by side."""
        inner, vec = problem.inner, _vec(problem)
        bx = lanes(-(-inner // vec))
        block = _LARGE_BLOCK if problem.short else BLOCK
        return self.one(
            "reduce_column", -(-inner // (bx * vec)) * problem.splits * problem.outer, block,
            *args(f"{_operands(problem)}, i64 length inner chunk splits count", problem),
            **_macros(problem), BX=bx, BY=block // bx,
        )  # fmt: skip


class Squares(Planned[SumSquares], HeuristicKernel[SumSquares]):
    """reduce/sum_squares.cu: a launch for 1024 tensors of a type, and one that adds their sums up.

    Operands: x.0, x.1, ... y.
    """

    source = "reduce/sum_squares.cu"

    def plan(self, problem: SumSquares, config: KernelConfig, hw: Hardware) -> Plan:
        """Launches that leave a sum for each block, by tables of addresses, and the sum of all."""
        types = {"U": C_TYPES[problem.out_dtype], "ACC": accumulator(problem.out_dtype)}
        size = 8 if types["ACC"] == "double" else 4
        launches: Launches = ()
        begun = 0  # blocks of the launches before
        for dtype in dict.fromkeys(problem.dtypes):
            of = [i for i, d in enumerate(problem.dtypes) if d == dtype]
            for k in range(0, len(of), ROWS):
                few = of[k : k + ROWS]
                rows = pow2(len(few))  # few distinct sources for many counts
                blocks = 0
                words: list[Ptr | int] = []
                for i in few:
                    words += [Ptr(f"x.{i}"), problem.sizes[i], blocks]
                    blocks += -(-problem.sizes[i] // CHUNK)
                words += [0] * (3 * (rows - len(few)))
                macros = {"T": C_TYPES[dtype], **types, "CHUNK": CHUNK, "ROWS": rows}
                launches += self.one(
                    "sum_squares", blocks, 256, Table(tuple(words)),
                    *args("i32 count", count=len(few)), Ptr("workspace", begun * size), **macros,
                )  # fmt: skip
                begun += blocks
        ends = args("workspace, i64 begun, y", begun=begun)
        return launches + self.one("sum_squares_total", 1, 1024, *ends, **macros), begun * size


KERNELS: Kernels = {
    "Reduce": (RowReduce(), ColumnReduce()),
    "SumSquares": (Squares(),),
}

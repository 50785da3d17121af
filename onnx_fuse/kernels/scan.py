"""CumulativeSum, TopK, SortedRows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx_fuse.cuda.macros import C_TYPES, accumulator, defines, lanes, pow2
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.rule_based import RuleBased
from onnx_fuse.program.moves import CumulativeSum, SortedRows, TopK
from onnx_fuse.program.problem import Config, Hardware, Launch, Num, Ptr

PAIRS = 1024
"""Pairs that a block of scan/sort.cu exchanges; its shared memory holds twice as many elements."""
TOPK_MAX = 2048
"""The largest k of scan/topk.cu where a row is longer than 4096; others are sorted whole."""


class Cumulative(RuleBased):
    """scan/cumsum.cu. Operands: x y."""

    source = "scan/cumsum.cu"
    free_axes = "yz"

    def launch(self, problem: CumulativeSum, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch: a block a row, or for up to 32 columns."""
        outer, length, inner = problem.outer, problem.length, problem.inner
        row = inner == 1 and length >= 16
        macros: dict[str, Any]
        if row:
            block = min(512, max(32, pow2(length) // 4))
            macros, grid = {"BLOCK": block}, outer
        else:
            bx = lanes(inner)
            by = min(1024 // bx, max(1, pow2(length) // 8))
            block, macros = bx * by, {"BX": bx, "BY": by}
            grid = -(-inner // bx) * outer
        sizes = (length,) if row else (length, inner)
        return self.one(
            "cumsum_row" if row else "cumsum_column", grid, block,
            Ptr("x"), Ptr("y"), *(Num("i64", n) for n in sizes),
            T=C_TYPES[problem.dtype], ACC=accumulator(problem.dtype), **macros,
            EXCLUSIVE=problem.exclusive, REVERSE=problem.reverse, PRODUCT=problem.product,
        )  # fmt: skip


class InBlock(RuleBased):
    """scan/topk.cu: a block a row. Operands: x values indices."""

    name = "block"
    source = "scan/topk.cu"
    free_axes = "yz"

    def supports(self, problem: TopK, hw: Hardware) -> str | None:
        """The reason why shared memory cannot hold the rows of `problem`, or None if it can."""
        if problem.length > 2 * TOPK_MAX and problem.k > TOPK_MAX:
            return f"{problem.k} of {problem.length} elements do not fit in shared memory"
        return None

    def launch(self, problem: TopK, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        length, k = problem.length, problem.k
        # longer rows than `size` pass through it: k stay, and a block's worth may always join
        size = pow2(length)
        if length > 1024:
            size = min(size, max(1024, 4 * pow2(k)), 2 * TOPK_MAX)
        size = max(32, size)
        block = min(256, size // 2) if length > size else min(1024, max(32, size // 2))
        return self.one(
            "topk", problem.outer * problem.inner, block, Ptr("x"), Ptr("values"), Ptr("indices"),
            *(Num("i64", n) for n in (length, problem.inner, k)), smem=12 * size + 16,  # a counter
            T=C_TYPES[problem.dtype], SIZE=size, BLOCK=block, LARGEST=problem.largest,
        )  # fmt: skip


def _padded(length: int) -> int:
    """Elements of a row that scan/sort.cu sorts."""
    return max(pow2(length), 2 * PAIRS)


def _room(rows: int, length: int, keys: int) -> tuple[Ptr, Ptr, int]:
    """The offsets of keys and indices in the workspace, and its bytes."""
    at = -(-8 * keys // 16) * 16
    return Ptr("workspace"), Ptr("workspace", at), at + 4 * rows * _padded(length)


def _sorting(
    rows: int, sizes: tuple[int, int, int, int], dtype: str, *, largest: bool, wide: bool
) -> tuple[list[Launch], Ptr, int]:
    """The launches that sort rows by scan/sort.cu, where the indices stand, and the workspace.

    `sizes` are a row's elements, the elements within which rows alternate, and an element's stride
    and width. Wide rows have one key each, which is not stored.
    """
    padded = _padded(sizes[0])
    key, at, room = _room(rows, sizes[0], 1 if wide else rows * padded)
    macros = defines(T=C_TYPES[dtype], SIZE=2 * PAIRS, BLOCK=PAIRS, LARGEST=largest, WIDE=wide)
    grid = (rows * padded // (2 * PAIRS), 1, 1)

    def launch(entry: str, *more: int) -> Launch:
        numbers = (Num("i64", n) for n in (*sizes, padded, *more))
        return Launch(
            "scan/sort.cu", entry, grid, (PAIRS, 1, 1), (Ptr("x"), key, at, *numbers), macros
        )  # fmt: skip

    launches, size = [launch("sort_chunks")], 4 * PAIRS
    while size <= padded:
        step = size // 2
        while step > PAIRS:
            launches.append(launch("sort_step", size, step))
            step //= 2
        launches.append(launch("sort_merge", size))
        size *= 2
    return launches, at, room


class WholeRows(RuleBased):
    """scan/sort.cu: rows are sorted whole. Operands: x values indices."""

    name = "sort"
    source = "scan/sort.cu"
    free_axes = "yz"

    def _sorted(self, problem: TopK) -> tuple[list[Launch], Ptr, int]:
        rows, inner = problem.outer * problem.inner, problem.inner
        sizes = (problem.length, inner, inner, 1)
        return _sorting(rows, sizes, problem.dtype, largest=problem.largest, wide=False)

    def workspace(self, problem: TopK, config: Config, hw: Hardware) -> int:
        """The bytes of keys and indices."""
        return self._sorted(problem)[2]

    def launch(self, problem: TopK, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """The steps of the sort, and the choice of the first k."""
        sort, at, _ = self._sorted(problem)
        total = problem.outer * problem.inner * problem.k
        numbers = (problem.length, problem.inner, _padded(problem.length), problem.k, total)
        take = Launch(
            self.source, "sort_take", (-(-total // PAIRS), 1, 1), (PAIRS, 1, 1),
            (Ptr("x"), at, Ptr("values"), Ptr("indices"), *(Num("i64", n) for n in numbers)),
            sort[0].defines,
        )  # fmt: skip
        return (*sort, take)


class Order(RuleBased):
    """scan/sort.cu. Operands: x indices."""

    name = "sort"
    source = "scan/sort.cu"
    free_axes = "yz"

    def _sorted(self, problem: SortedRows) -> tuple[list[Launch], Ptr, int]:
        count, width = problem.count, problem.width
        sizes = (count, 1, width, width)
        return _sorting(1, sizes, problem.dtype, largest=False, wide=True)

    def workspace(self, problem: SortedRows, config: Config, hw: Hardware) -> int:
        """The bytes of the indices."""
        return self._sorted(problem)[2]

    def launch(self, problem: SortedRows, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """The steps of the sort, and its order."""
        sort, at, _ = self._sorted(problem)
        count = problem.count
        order = Launch(
            self.source, "sort_order", (-(-count // PAIRS), 1, 1), (PAIRS, 1, 1),
            (at, Ptr("indices"), Num("i64", count)), sort[0].defines,
        )  # fmt: skip
        return (*sort, order)


KERNELS: dict[str, Sequence[Kernel]] = {
    "CumulativeSum": (Cumulative(),),
    "TopK": (InBlock(), WholeRows()),
    "SortedRows": (Order(),),
}

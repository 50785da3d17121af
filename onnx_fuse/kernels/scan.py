"""CumulativeSum, TopK, SortedRows, KeptCounts, KeptPositions."""

from __future__ import annotations

from typing import Any, TypeAlias

from onnx_fuse.cuda.macros import C_TYPES, lanes, pow2
from onnx_fuse.kernels.kernel import Kernels
from onnx_fuse.kernels.radix import RadixSort, aligned
from onnx_fuse.kernels.rule_based import HeuristicKernel, Plan, Planned, typed
from onnx_fuse.program.data_movement import (
    CumulativeSum,
    KeptCounts,
    KeptPositions,
    SortedRows,
    TopK,
)
from onnx_fuse.program.launch import Launches, Ptr, args
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig
from onnx_fuse.program.size import coarse

Kept: TypeAlias = KeptCounts | KeptPositions
PAIRS = 1024
"""Pairs that a block of scan/sort.cu exchanges; its shared memory holds twice as many elements."""
TOPK_MAX = 2048
"""The largest k of scan/topk.cu where a row is longer than 4096; others are sorted whole."""
FEW_BLOCKS = 264
"""Rows, or tiles of columns, below which each of them is cut into chunks for several blocks."""
CHUNK = 4096
"""The least elements of such a chunk."""
BLOCKS = 1024
"""Blocks that chunks are to give, whatever the chip: the order of a sum is the shape's alone."""
THREADS = 256


def chunk_length(blocks: int, length: int, least: int = CHUNK, multiple: int = 4) -> int:
    """Elements of a chunk of a row, of which there are `blocks` where it is not cut."""
    chunks = min(coarse(length) // least, -(-BLOCKS // max(1, blocks)))
    if blocks >= FEW_BLOCKS or chunks < 2:
        return length
    return -(-length // (chunks * multiple)) * multiple


class Cumulative(Planned[CumulativeSum], HeuristicKernel[CumulativeSum]):
    """scan/cumsum.cu. Operands: x y."""

    source = "scan/cumsum.cu"
    free_axes = "yz"

    @staticmethod
    def _of_rows(problem: CumulativeSum) -> bool:
        return problem.inner == 1 and problem.length >= 16

    def _cut(self, problem: CumulativeSum) -> tuple[int, int, int]:
        """(blocks of a chunk of all rows, elements of a chunk, chunks a row)."""
        outer, length, inner = problem.outer, problem.length, problem.inner
        rows = self._of_rows(problem)
        blocks = outer if rows else -(-inner // lanes(inner)) * outer
        chunk = chunk_length(blocks, length, CHUNK if rows else CHUNK // lanes(inner))
        return blocks, chunk, -(-length // chunk)

    def moved(self, problem: CumulativeSum) -> int:
        """x is read twice where it is cut, and of columns."""
        twice = self._cut(problem)[2] > 1 or not self._of_rows(problem)
        return problem.bytes * 3 // 2 if twice else problem.bytes

    def plan(self, problem: CumulativeSum, config: KernelConfig, hw: Hardware) -> Plan:
        """A block a row, or for up to 32 columns; of chunks their sums first."""
        length, inner = problem.length, problem.inner
        blocks, chunk, chunks = self._cut(problem)
        row = self._of_rows(problem)
        macros: dict[str, Any]
        if row:
            block = min(512, max(32, pow2(length) // 4))
            macros = {"BLOCK": block, "VEC": 1 if length % 4 else 4}
        else:
            bx = lanes(inner)
            by = min(1024 // bx, max(1, pow2(chunk) // 8))
            block, macros = bx * by, {"BX": bx, "BY": by}
        entry = "cumsum_row" if row else "cumsum_column"
        macros |= typed(problem) | {"EXCLUSIVE": problem.exclusive, "REVERSE": problem.reverse,
                                    "PRODUCT": problem.product}  # fmt: skip

        def one(name: str, pointers: str) -> Launches:
            text = f"{pointers}, i64 length{'' if row else ' inner'} chunk chunks"
            made = args(text, problem, chunk=chunk, chunks=chunks)
            return self.one(name, blocks * chunks, block, *made, **macros)

        if chunks > 1:
            sums = one(f"{entry}_parts", "x workspace") + one(entry, "x y workspace")
            return sums, 8 * problem.outer * inner * chunks
        return one(entry, "x y parts"), 0


class InBlock(HeuristicKernel[TopK]):
    """scan/topk.cu: a block a row, or a chunk of few long rows. Operands: x values indices."""

    name = "block"
    source = "scan/topk.cu"
    free_axes = "yz"

    def supports(self, problem: TopK, hw: Hardware) -> str | None:
        if problem.length > 2 * TOPK_MAX and problem.k > TOPK_MAX:
            return f"{problem.k} of {problem.length} elements do not fit in shared memory"
        return None

    def _levels(self, problem: TopK) -> list[tuple[int, int]]:
        """(length, chunks) of each launch: one takes the k of what the chunks of another found."""
        rows, length = problem.outer * problem.inner, problem.length
        levels: list[tuple[int, int]] = []
        while rows < FEW_BLOCKS and length >= 2 * max(CHUNK, 8 * problem.k):
            least = max(CHUNK, 8 * problem.k)
            chunks = min(length // least, -(-BLOCKS // max(1, rows)))
            levels.append((length, chunks))
            length = chunks * problem.k
        return [*levels, (length, 1)]

    @staticmethod
    def _block(problem: TopK, length: int, chunks: int) -> tuple[int, int]:
        """(pairs that shared memory holds, threads) of a block that has one of the chunks."""
        # longer chunks than `size` pass through it: k stay, and a block's worth may always join
        part = -(-length // chunks)
        size = pow2(part)
        if part > 1024:
            size = min(size, max(1024, 4 * pow2(problem.k)), 2 * TOPK_MAX)
        size = max(32, size)
        return size, min(256, size // 2) if part > size else min(512, max(32, size // 2))

    def cost(self, problem: TopK, config: KernelConfig, hw: Hardware) -> float:
        """The rounds of a block's loads, the exchanges of a thread's pairs, and waves of blocks."""
        costs, seconds = self.numbers(hw), problem.bytes / hw.bandwidth
        for length, chunks in self._levels(problem):
            size, block = self._block(problem, length, chunks)
            rounds = -(-length // (chunks * block))
            sorts = 1 if rounds * block <= size else 3
            exchanges = size.bit_length() ** 2 // 2 * -(-size // (2 * block))
            blocks = problem.outer * problem.inner * chunks
            waves = max(1.0, blocks * block / (hw.sm_count * 1024))
            took = rounds * costs["round"] + sorts * exchanges * costs["exchange"]
            seconds += took * waves + hw.launch_seconds
        return seconds

    @staticmethod
    def _side(problem: TopK, chunks: int) -> tuple[int, int]:
        """(offset of the indices, bytes) of what `chunks` a row have found."""
        count = problem.outer * problem.inner * chunks * problem.k
        at = aligned(count * ITEMSIZE[problem.dtype])
        return at, at + aligned(8 * count)

    def workspace(self, problem: TopK, config: KernelConfig, hw: Hardware) -> int:
        """What the first two levels have found: each later one writes over the one before last."""
        return sum(self._side(problem, n)[1] for _, n in self._levels(problem)[:-1][:2])

    def launch(self, problem: TopK, config: KernelConfig, hw: Hardware) -> Launches:
        rows, inner, k = problem.outer * problem.inner, problem.inner, problem.k
        levels = self._levels(problem)
        base = self._side(problem, levels[0][1])[1]
        launches: Launches = ()
        x, source = Ptr("x"), Ptr("from")
        for level, (length, chunks) in enumerate(levels):
            first, last = level == 0, level == len(levels) - 1
            start = base * (level % 2)
            values = Ptr("values") if last else Ptr("workspace", start)
            at = self._side(problem, chunks)[0]
            indices = Ptr("indices") if last else Ptr("workspace", start + at)
            size, block = self._block(problem, length, chunks)
            sizes = (length, inner if first else 1, inner if last else 1, k, chunks)
            launches += self.one(
                "topk", rows * chunks, block, x, source, values, indices,
                *args("i64 sizes", sizes=sizes), smem=12 * size + 16,  # a counter
                T=C_TYPES[problem.dtype], SIZE=size, BLOCK=block, LARGEST=problem.largest,
            )  # fmt: skip
            x, source = values, indices
        return launches


class WholeRows(Planned[TopK], HeuristicKernel[TopK]):
    """scan/radix.cu: rows are sorted whole. Operands: x values indices."""

    name = "sort"
    source = "scan/ranked.cu"

    def _sort(self, problem: TopK) -> RadixSort:
        floating = problem.dtype in ("float32", "float16", "bfloat16")
        bits = 32 if floating else 8 * ITEMSIZE[problem.dtype]
        return RadixSort(problem.outer * problem.inner, problem.length, bits)

    def moved(self, problem: TopK) -> int:
        """What the passes of the sort move beside the operands."""
        return problem.bytes + self._sort(problem).moved

    def plan(self, problem: TopK, config: KernelConfig, hw: Hardware) -> Plan:
        sort = self._sort(problem)
        macros: dict[str, Any] = {"T": C_TYPES[problem.dtype], "KEY": sort.key, "BITS": sort.bits,
                  "LARGEST": problem.largest}  # fmt: skip

        def each(entry: str, size: int, at: Ptr, text: str) -> Launches:
            made = (*args("x"), at, *args(text, problem, size=size))
            return self.one(entry, -(-size // THREADS), THREADS, *made, **macros)

        keys = each("rank_keys", sort.rows * problem.length, sort.keys, "i64 length inner size")
        text = "values indices, i64 length inner k size"
        take = each("take_ranked", sort.rows * problem.k, sort.sorted[1], text)
        return keys + sort.launches() + take, sort.end


class BitonicSort(Planned[SortedRows], HeuristicKernel[SortedRows]):
    """scan/sort.cu. Operands: x indices."""

    name = "sort"
    source = "scan/sort.cu"

    @staticmethod
    def _padded(problem: SortedRows) -> int:
        return max(pow2(problem.count), 2 * PAIRS)

    def moved(self, problem: SortedRows) -> int:
        """Each step of the network reads both rows of every pair."""
        steps = self._padded(problem).bit_length() ** 2 // 2
        return problem.bytes * steps

    def plan(self, problem: SortedRows, config: KernelConfig, hw: Hardware) -> Plan:
        padded = self._padded(problem)
        macros: dict[str, Any] = {"T": C_TYPES[problem.dtype], "SIZE": 2 * PAIRS, "BLOCK": PAIRS}

        def step(entry: str, numbers: str, **values: int) -> Launches:
            made = args(f"x workspace, i64 {numbers}", problem, **values)
            return self.one(entry, padded // (2 * PAIRS), PAIRS, *made, **macros)

        launches, size = step("sort_chunks", "count width"), 4 * PAIRS
        while size <= padded:
            apart = size // 2
            while apart > PAIRS:
                launches += step("sort_step", "width size apart", size=size, apart=apart)
                apart //= 2
            launches += step("sort_merge", "width size", size=size)
            size *= 2
        ends = args("workspace indices, i64 count", problem)
        launches += self.one("sort_order", -(-problem.count // PAIRS), PAIRS, *ends, **macros)
        return launches, 4 * padded


class Votes(Planned[Kept], HeuristicKernel[Kept]):
    """scan/compact.cu. Operands: keep first, or keep first position."""

    source = "scan/compact.cu"

    def plan(self, problem: Kept, config: KernelConfig, hw: Hardware) -> Plan:
        tiles = problem.tiles
        if isinstance(problem, KeptPositions):
            made = args("keep first position, i64 length", problem)
            return self.one("kept_positions", tiles, 256, *made), 0
        counts = self.one("kept_counts", tiles, 256, *args("keep workspace, i64 length", problem))
        offsets = args("workspace first, i64 tiles", problem)
        return counts + self.one("kept_offsets", 1, 1024, *offsets), 4 * tiles


KERNELS: Kernels = {
    "CumulativeSum": (Cumulative(),),
    "TopK": (InBlock(), WholeRows()),
    "SortedRows": (BitonicSort(),),
    "KeptCounts": (Votes(),),
    "KeptPositions": (Votes(),),
}

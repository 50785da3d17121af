"""GatherElements, GatherND, ScatterElements, ScatterND: an element, or a line of them, a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx_fuse.cuda.macros import C_TYPES, FLOATS, defines, lanes
from onnx_fuse.cuda.pointwise import STORAGE
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.rule_based import RuleBased, access_width
from onnx_fuse.program.moves import GatherElements, GatherND, ScatterElements, ScatterND
from onnx_fuse.program.problem import ITEMSIZE, Arg, Config, Hardware, Launch, Num, Ptr
from onnx_fuse.program.size import coarse

THREADS = 256
MAX_TUPLE = 6
FEW = 64
"""The most updates of which a block of indexing/scatter.cu finds the earlier ones in one pass."""
IDS = 512
"""Rows of the table whose updates a block of indexing/row_sums.cu finds."""
FILLED = 1 << 16
"""Elements that a block of it fills with zeros."""
MOST_READ = 1 << 31
"""Index tuples that all of its blocks may read together: some milliseconds."""
_UNITS = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "u128"}
_INDEX_TYPES = {"int64": "i64", "int32": "int"}
_REDUCTIONS = {"none": 0, "add": 1, "mul": 2, "max": 3, "min": 4}


def _dims(dims: tuple[int, ...]) -> tuple[Num, ...]:
    """The sizes that a tuple of indices counts along, 1 for those it has not."""
    return tuple(Num("i64", d) for d in (*dims, *(1,) * (MAX_TUPLE - len(dims))))


class _Tuples(RuleBased):
    """Kernels that read tuples of up to MAX_TUPLE indices."""

    def supports(self, problem: GatherND | ScatterND, hw: Hardware) -> str | None:
        """Refuse tuples of more indices than the kernel has arguments for."""
        q = len(problem.dims)
        return f"index tuples of {q}" if q > MAX_TUPLE else None


class Elements(RuleBased):
    """indexing/gather.cu. Operands: x index y."""

    source = "indexing/gather.cu"
    free_axes = "yz"

    def launch(self, problem: GatherElements, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        sizes = (problem.size, problem.inner, problem.taken, problem.length)
        return self.one(
            "gather_elements", -(-problem.size // THREADS), THREADS,
            Ptr("x"), Ptr("index"), Ptr("y"), *(Num("i64", s) for s in sizes),
            IDX=_INDEX_TYPES[problem.index], T=_UNITS[ITEMSIZE[problem.dtype]],
        )  # fmt: skip


class Tuples(_Tuples):
    """indexing/gather.cu. Operands: x index y."""

    source = "indexing/gather.cu"
    free_axes = "yz"

    def launch(self, problem: GatherND, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch, up to 16 bytes a thread."""
        size = ITEMSIZE[problem.dtype]
        width = 16 // size
        while problem.inner % width:
            width //= 2
        n = problem.batch * problem.rows * problem.inner // width
        return self.one(
            "gather_nd", -(-n // THREADS), THREADS,
            Ptr("x"), Ptr("index"), Ptr("y"), Num("i64", n), Num("i64", problem.inner // width),
            Num("i64", problem.rows), Num("i32", len(problem.dims)), *_dims(problem.dims),
            IDX=_INDEX_TYPES[problem.index], T=_UNITS[width * size],
        )  # fmt: skip


def _scatter_macros(problem: ScatterElements | ScatterND) -> dict[str, Any]:
    reduce = _REDUCTIONS[problem.reduction]
    return {"IDX": _INDEX_TYPES[problem.index], "REDUCE": reduce, "T": STORAGE[problem.dtype]}


class Lines(RuleBased):
    """indexing/scatter.cu. Operands: y index update."""

    source = "indexing/scatter.cu"
    free_axes = "yz"

    def launch(self, problem: ScatterElements, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch, a line a thread: its updates are in order."""
        sizes = (problem.lines, problem.inner, problem.given, problem.length)
        return self.one(
            "scatter_elements", -(-problem.lines // THREADS), THREADS, Ptr("y"), Ptr("index"),
            Ptr("update"), *(Num("i64", s) for s in sizes), **_scatter_macros(problem),
        )  # fmt: skip


class Grouped(RuleBased):
    """indexing/row_sums.cu: the updates of a row are found by a sort. Operands: y index update.

    A configuration sets `part`, the sorted updates of a row that one block sums.
    """

    name = "grouped"
    source = "indexing/row_sums.cu"

    def supports(self, problem: ScatterND, hw: Hardware) -> str | None:
        """Sums of rows; not so few that the launches weigh more, nor in too large a table."""
        count, rows = problem.count, problem.rows
        if problem.reduction != "add":
            return f"reduction {problem.reduction}"
        if problem.dtype not in (*FLOATS, "int32", "int64"):
            return f"rows of {problem.dtype}"
        if len(problem.dims) > MAX_TUPLE:
            return f"index tuples of {len(problem.dims)}"
        if count <= FEW and not problem.fresh:
            return f"only {count} updates"
        large = any(size >= 1 << 30 for size in (count, rows, problem.inner))
        if large or -(-rows // IDS) * count > MOST_READ:
            return f"{count} updates in {rows} rows are too many to read once for {IDS} rows"
        return None

    def cost(self, problem: ScatterND, config: Config, hw: Hardware) -> float:
        """The sort, and the updates, read in its order at 0.13 of a copy's rate (H200, 2026-11)."""
        updates = problem.count * problem.inner * ITEMSIZE[problem.dtype]
        return super().cost(problem, config, hw) + updates / (0.13 * hw.bandwidth)

    def configs(self, problem: ScatterND, hw: Hardware) -> Sequence[Config]:
        """The rule's, then smaller and larger parts."""
        part = self._part(problem)
        return [Config.of(), *(Config.of(part=n) for n in (part // 2, 2 * part))]

    @staticmethod
    def _part(problem: ScatterND) -> int:
        """About the square root of all, so that parts and their sums are about as long."""
        return 1 << max(6, (coarse(problem.count) - 1).bit_length() // 2)

    def _room(self, problem: ScatterND, config: Config) -> tuple[int, int, int]:
        """Sorted updates a part, the offset of the parts' sums in the workspace, and its bytes."""
        part = config.integer("part") or self._part(problem)
        at = _aligned(4 * (problem.rows + 1)) + 2 * _aligned(4 * problem.count)
        size = 8 if problem.dtype in ("float64", "int64") else 4
        return part, at, at + 2 * -(-problem.count // part) * problem.inner * size

    def workspace(self, problem: ScatterND, config: Config, hw: Hardware) -> int:
        """The bytes of the order of the updates and of the sums of parts."""
        return self._room(problem, config)[2]

    def launch(self, problem: ScatterND, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """The sort, the sums of parts if a row can have several, and the sums of rows."""
        count, rows, inner = problem.count, problem.rows, problem.inner
        part, at, _ = self._room(problem, config)
        vec = access_width(inner, problem.dtype)
        team = lanes(-(-inner // vec))
        first = _aligned(4 * (rows + 1))
        start, row = Ptr("workspace"), Ptr("workspace", first)
        order, sums = Ptr("workspace", first + _aligned(4 * count)), Ptr("workspace", at)
        macros = defines(
            T=C_TYPES[problem.dtype], IDX=_INDEX_TYPES[problem.index], Q=len(problem.dims),
            VEC=vec, TEAM=team, IDS=IDS, FRESH=problem.fresh,
        )  # fmt: skip

        def summing(entry: str, blocks: int, *args: Arg) -> Launch:
            grid = (blocks, -(-inner // (team * vec)), 1)
            given = (start, row, order, Ptr("update"), sums, *args)
            numbers = (Num("i32", n) for n in (rows, inner, part))
            return Launch(self.source, entry, grid, (THREADS, 1, 1), (*given, *numbers), macros)

        filling = -(-rows * inner // FILLED) if problem.fresh else 0
        sort = Launch(
            self.source, "group_rows", (-(-rows // IDS) + filling, 1, 1), (1024, 1, 1),
            (Ptr("index"), start, row, order, Ptr("y"), Num("i32", count), Num("i32", rows),
             Num("i64", rows * inner), *_dims(problem.dims)),
            macros, smem=4 * (32 * IDS + 32),
        )  # fmt: skip
        return (
            sort,
            *((summing("sum_parts", -(-count // part)),) if count > part else ()),
            summing("sum_rows", -(-count * team // THREADS), Ptr("y")),
        )


class Rows(_Tuples):
    """indexing/scatter.cu. Operands: y index update."""

    source = "indexing/scatter.cu"
    free_axes = "yz"

    def supports(self, problem: GatherND | ScatterND, hw: Hardware) -> str | None:
        """Tuples that are not too long, into what y holds."""
        if isinstance(problem, ScatterND) and problem.fresh:
            return "it writes no zeros"
        return super().supports(problem, hw)

    def launch(self, problem: ScatterND, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch, a block a tuple."""
        return self.one(
            "scatter_nd", problem.count, 128,
            Ptr("y"), Ptr("index"), Ptr("update"), Num("i64", problem.count),
            Num("i64", problem.inner), Num("i32", len(problem.dims)), *_dims(problem.dims),
            **_scatter_macros(problem),
        )  # fmt: skip


def _aligned(nbytes: int) -> int:
    """The bytes up to the next multiple of 16, where a tensor may begin."""
    return -(-nbytes // 16) * 16


KERNELS: dict[str, Sequence[Kernel]] = {
    "GatherElements": (Elements(),),
    "GatherND": (Tuples(),),
    "ScatterElements": (Lines(),),
    "ScatterND": (Grouped(), Rows()),
}

"""GatherElements, GatherND, ScatterElements, ScatterND.

Few updates are written in their order by one thread or block a line; of many the last of each
element is found, or a sort brings those of an element together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from onnx_fuse.cuda.macros import C_TYPES, FLOATS, lanes
from onnx_fuse.cuda.pointwise import STORAGE
from onnx_fuse.kernels.kernel import Kernels, WorkspaceArena, launch, roofline
from onnx_fuse.kernels.radix import RadixSort, aligned
from onnx_fuse.kernels.rule_based import Each, HeuristicKernel, Plan, Planned, access_width
from onnx_fuse.program.data_movement import GatherND, ScatterElements, ScatterND
from onnx_fuse.program.launch import Arg, Launch, Launches, Ptr, args
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig
from onnx_fuse.program.size import coarse

THREADS = 256
MAX_TUPLE = 6
RUN_TILE, TILE_BYTES = 2048, 24
"""Sorted updates of a block of indexing/run_sums.cu, and what it leaves of them."""
FEW = 64
"""The most updates of which a block of indexing/scatter.cu finds the earlier ones in one pass."""
IDS = 512
"""Rows of the table whose updates a block of indexing/row_sums.cu finds."""
FILLED = 1 << 16
"""Elements that a block of it fills with zeros."""
MOST_READ = 1 << 24
"""Index tuples that all of its blocks may read together: beyond it a radix sort is faster."""
MOST_ROWS = (1 << 31) - 1
"""Rows, and updates, that the numbers of indexing/places.cu count."""
SHORT, LONG, FEWEST = 16, 256, 4
"""Updates that a thread writes one after another: of few lines, of many side by side, and of many
lines each of which stands by itself, so that the threads of a warp read far apart."""
MANY = 1 << 15
"""Lines that give the chip threads enough."""
WARPS = 4
"""Lines of a block that has a warp for each."""
WARP_LENGTH, WARP_GIVEN = 1024, 256
"""Elements of such a line, and its updates where lines are few; MANY lines may have any number."""
Scatter: TypeAlias = ScatterElements | ScatterND
_UNITS = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "u128"}
_INDEX_TYPES = {"int64": "i64", "int32": "int"}
_REDUCTIONS = {"none": 0, "add": 1, "mul": 2, "max": 3, "min": 4}


def _dims(dims: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes that a tuple of indices counts along, 1 for those it has not."""
    return (*dims, *(1,) * (MAX_TUPLE - len(dims)))


def _units(inner: int, dtype: str) -> tuple[int, str]:
    """Elements of an access of at most 16 bytes, and the C type of as many bytes."""
    width = access_width(inner, dtype)
    return width, _UNITS[width * ITEMSIZE[dtype]]


def _long_tuples(problem: GatherND | ScatterND) -> str | None:
    """Why the kernels have not as many arguments as a tuple has indices; None where they have."""
    q = len(problem.dims)
    return f"index tuples of {q}" if q > MAX_TUPLE else None


class Tuples(HeuristicKernel[GatherND]):
    """indexing/gather.cu. Operands: x index y."""

    source = "indexing/gather.cu"
    free_axes = "yz"

    def supports(self, problem: GatherND, hw: Hardware) -> str | None:
        return _long_tuples(problem)

    def launch(self, problem: GatherND, config: KernelConfig, hw: Hardware) -> Launches:
        width, unit = _units(problem.inner, problem.dtype)
        inner, dims = problem.inner // width, _dims(problem.dims)
        n, count = problem.batch * problem.rows * inner, len(problem.dims)
        made = args("x index y, i64 n inner rows, i32 count, i64 dims", problem,
                    n=n, inner=inner, count=count, dims=dims)  # fmt: skip
        idx = _INDEX_TYPES[problem.index]
        return self.one("gather_nd", -(-n // THREADS), THREADS, *made, IDX=idx, T=unit)


def _scatter_macros(problem: Scatter) -> dict[str, Any]:
    reduce = _REDUCTIONS[problem.reduction]
    return {"IDX": _INDEX_TYPES[problem.index], "REDUCE": reduce, "T": STORAGE[problem.dtype]}


@dataclass(frozen=True)
class _ScatterUpdates:
    """`count` updates of `inner` elements for the `rows` of y, as indexing/places.cu sees them."""

    count: int
    rows: int
    inner: int
    q: int
    sizes: tuple[int, ...]
    elements: bool

    @classmethod
    def of(cls, problem: Scatter) -> _ScatterUpdates:
        if isinstance(problem, ScatterND):
            of, dims = (problem.count, problem.rows, problem.inner), problem.dims
            return cls(*of, len(dims), _dims(dims), False)
        lines, sizes = problem.lines, _dims((problem.inner, problem.given, problem.length))
        return cls(lines * problem.given, lines * problem.length, 1, 0, sizes, True)


def _distinct(problem: Scatter) -> bool:
    return isinstance(problem, ScatterElements) and problem.distinct


def _short_lines(problem: Scatter) -> str | None:
    """Why a thread a line is better: lines are short, or side by side and many. None if it is not.

    Tuples have no lines, but may be too long.
    """
    if isinstance(problem, ScatterND):
        return _long_tuples(problem)
    lines, updates = problem.lines, problem.given
    few = SHORT if lines < MANY else FEWEST
    most = LONG if problem.inner >= 32 and lines >= MANY else few  # of neighbours
    if updates <= most:
        return f"{lines} lines of {updates} updates are short"
    return None


def _uncombined(problem: Scatter) -> str | None:
    """Why updates of a row are not combined, or not in C; None where they are."""
    if problem.reduction == "none":
        return "reduction none"
    return None if problem.dtype in C_TYPES else f"rows of {problem.dtype}"


class _Many(HeuristicKernel[Scatter]):
    """Kernels that find out which updates are for the same row of y."""

    source = "indexing/places.cu"

    def supports(self, problem: Scatter, hw: Hardware) -> str | None:
        """Many updates, of which no thread has a short line to itself."""
        if isinstance(problem, ScatterND) and problem.fresh:
            return "it writes no zeros"
        if reason := _short_lines(problem):
            return reason
        updates = _ScatterUpdates.of(problem)
        if updates.count <= FEW:
            return f"only {updates.count} updates"
        if updates.count > MOST_ROWS or updates.rows > MOST_ROWS:
            return f"{updates.count} updates of {updates.rows} rows pass its numbers"
        return None

    def _macros(self, problem: Scatter, unit: str) -> dict[str, Any]:
        elements = isinstance(problem, ScatterElements)
        return {"IDX": _INDEX_TYPES[problem.index], "T": unit, "ELEMENTS": elements}


class Last(Planned[Scatter], _Many):
    """indexing/places.cu: the last update of each row is written. Operands: y index update."""

    name = "last"

    def supports(self, problem: Scatter, hw: Hardware) -> str | None:
        if problem.reduction != "none":
            return f"reduction {problem.reduction}"
        return super().supports(problem, hw)

    def moved(self, problem: Scatter) -> int:
        """The indices twice, and the numbers of y's rows: cleared, and looked up in sectors."""
        updates = _ScatterUpdates.of(problem)
        if _distinct(problem):
            return problem.bytes + 32 * updates.count
        return 2 * problem.bytes + 4 * updates.rows + 64 * updates.count

    def plan(self, problem: Scatter, config: KernelConfig, hw: Hardware) -> Plan:
        """Numbers of 0, the largest number of an update of each row, and those updates.

        Where no row has two updates, all of them alone.
        """
        updates = _ScatterUpdates.of(problem)
        width, unit = _units(updates.inner, problem.dtype)
        macros = self._macros(problem, unit)
        units = updates.inner // width
        total = updates.count * units
        distinct = _distinct(problem)
        last = "last" if distinct else "workspace"  # null

        def each(entry: str, size: int, text: str) -> Launches:
            made = args(text, updates, total=total, units=units)
            return self.one(entry, -(-size // THREADS), THREADS, *made, **macros)

        tuples = "i32 q, i64 sizes"
        write = each("write_last", total, f"index update {last} y, i64 total units, {tuples}")
        if distinct:
            return write, 0
        clear = each("clear_last", updates.rows, f"{last}, i64 rows")
        mark = each("mark_last", updates.count, f"index {last}, i64 count, {tuples}")
        return clear + mark + write, 4 * updates.rows


class WarpLines(HeuristicKernel[ScatterElements]):
    """indexing/scatter.cu: a line in a warp's shared memory. Operands: y index update."""

    name = "warp"
    source = "indexing/scatter.cu"
    free_axes = "yz"

    def supports(self, problem: ScatterElements, hw: Hardware) -> str | None:
        if problem.inner != 1:
            return "a line's elements do not stand side by side"
        if problem.dtype not in C_TYPES:
            return f"rows of {problem.dtype}"
        if problem.given <= FEWEST or problem.length > WARP_LENGTH:
            return f"lines of {problem.length} elements and {problem.given} updates"
        if problem.given > WARP_GIVEN and problem.given * MANY > WARP_GIVEN * problem.lines:
            return f"{problem.lines} lines of {problem.given} updates are few and long"
        return None

    def cost(self, problem: ScatterElements, config: KernelConfig, hw: Hardware) -> float:
        """The bytes, or a warp's rounds of 32 updates one after another."""
        costs = self.numbers(hw)
        waves = max(1.0, problem.lines / (costs["resident"] * hw.sm_count))
        rounds = (-(-problem.given // 32) + 2) * costs["round"]
        return max(super().cost(problem, config, hw), rounds * waves + hw.launch_seconds)

    def moved(self, problem: ScatterElements) -> int:
        """Indices and updates, and y read and written whole."""
        size = ITEMSIZE[problem.dtype]
        nbytes = problem.given * (size + ITEMSIZE[problem.index])
        return problem.lines * (nbytes + 2 * problem.length * size)

    def launch(self, problem: ScatterElements, config: KernelConfig, hw: Hardware) -> Launches:
        slot, length = ITEMSIZE[problem.dtype], problem.length
        if problem.reduction != "none" and problem.dtype in ("float16", "bfloat16"):
            slot = 4
        made = args("y index update, i64 lines, i32 given length bits", problem,
                    bits=length.bit_length())  # fmt: skip
        return self.one(
            "scatter_lines", -(-problem.lines // WARPS), 32 * WARPS, *made,
            smem=aligned(WARPS * length * slot), **_scatter_macros(problem),
        )  # fmt: skip


class GroupedUpdates(Planned[Scatter], HeuristicKernel[Scatter]):
    """indexing/row_sums.cu: the updates of a row are found by a sort. Operands: y index update.

    A configuration sets `part`, the sorted updates of a row that one block sums.
    """

    name = "grouped"
    source = "indexing/row_sums.cu"

    def supports(self, problem: Scatter, hw: Hardware) -> str | None:
        """Combined updates; not so few that the launches weigh more, nor in too large a table."""
        if reason := _uncombined(problem) or _short_lines(problem):
            return reason
        updates = _ScatterUpdates.of(problem)
        count, rows = updates.count, updates.rows
        if count <= FEW and not (isinstance(problem, ScatterND) and problem.fresh):
            return f"only {count} updates"
        large = any(size >= 1 << 30 for size in (count, rows, updates.inner))
        # an element's place takes divisions
        if large or -(-rows // IDS) * count * (8 if updates.elements else 1) > MOST_READ:
            return f"{count} updates in {rows} rows are too many to read once for {IDS} rows"
        return None

    def cost(self, problem: Scatter, config: KernelConfig, hw: Hardware) -> float:
        """The sort, and the updates, read in its order at a small part of a copy's rate."""
        updates = _ScatterUpdates.of(problem)
        read = updates.count * updates.inner * ITEMSIZE[problem.dtype]
        passes = roofline(hw, self.numbers(hw), read, launches=0)
        return super().cost(problem, config, hw) + passes

    def configs(self, problem: Scatter, hw: Hardware) -> Sequence[KernelConfig]:
        """The rule's, then smaller and larger parts."""
        part = _part(problem)
        more = (part // 2, 2 * part) if part < _WHOLE else ()
        return [KernelConfig.of(), *(KernelConfig.of(part=n) for n in more)]

    def plan(self, problem: Scatter, config: KernelConfig, hw: Hardware) -> Plan:
        """The sort, the sums of parts if a row can have several, and the sums of rows."""
        updates = _ScatterUpdates.of(problem)
        count, rows, inner = updates.count, updates.rows, updates.inner
        fresh = isinstance(problem, ScatterND) and problem.fresh
        part, arena = config.integer("part") or _part(problem), WorkspaceArena(aligned=16)
        start, row, order = (arena.allocate(4 * n) for n in (rows + 1, count, count))
        sums_bytes = 2 * -(-count // part) * inner * max(4, ITEMSIZE[problem.dtype])
        sums = _RowSums(
            count, rows, inner, part, problem.dtype,
            (start, Ptr("stop"), Ptr("found"), row, order), Ptr("workspace", arena.size),
            {"FRESH": fresh, "IDS": IDS, "IDX": _INDEX_TYPES[problem.index], "Q": updates.q,
             "ELEMENTS": updates.elements, "REDUCE": _REDUCTIONS[problem.reduction]},
        )  # fmt: skip
        filling = -(-rows * inner // FILLED) if fresh else 0
        sort = self.one(
            "group_rows", -(-rows // IDS) + filling, 1024, Ptr("index"), start, row, order,
            *args("y, i32 count rows, i64 total sizes", updates, total=rows * inner),
            smem=4 * (32 * IDS + 32), **sums.macros,
        )  # fmt: skip
        return sort + sums.launches(), arena.size + sums_bytes


@dataclass(frozen=True)
class _RowSums:
    """The launches of indexing/row_sums.cu behind a sort of `count` updates.

    `order` points to start, stop, found, row and order, of which stop and found may be null; `part`
    sorted updates are one block's.
    """

    count: int
    rows: int
    inner: int
    part: int
    dtype: str
    order: tuple[Ptr, ...]
    sums: Ptr
    more: dict[str, object]

    @property
    def _team(self) -> tuple[int, int]:
        vec = access_width(self.inner, self.dtype)
        return vec, lanes(-(-self.inner // vec))

    @property
    def macros(self) -> dict[str, Any]:
        """Those of the sort in the same source as well."""
        vec, team = self._team
        return {"T": STORAGE[self.dtype], "VEC": vec, "TEAM": team, **self.more}

    def launches(self) -> Launches:
        """The sums of parts if a row can have several, and the sums of rows."""
        vec, team = self._team

        def summing(entry: str, blocks: int, *more: Ptr) -> Launch:
            grid = (blocks, -(-self.inner // (team * vec)), 1)
            return launch(
                "indexing/row_sums.cu", entry, grid, THREADS, *self.order, Ptr("update"), self.sums,
                *more, *args("i32 rows inner part", self), **self.macros,
            )  # fmt: skip

        parts = -(-self.count // self.part)
        return (
            *((summing("sum_parts", parts),) if self.count > self.part else ()),
            summing("sum_rows", -(-self.count * team // THREADS), Ptr("y")),
        )


_WHOLE = 1 << 30


def _part(problem: Scatter) -> int:
    """About the square root of all, so that parts and their sums are about as long.

    Updates of which a NaN may undo those before it are no parts.
    """
    if problem.reduction in ("max", "min") and problem.dtype in FLOATS:
        return _WHOLE
    return 1 << max(6, (coarse(_ScatterUpdates.of(problem).count) - 1).bit_length() // 2)


class Sorted(Planned[Scatter], _Many):
    """scan/radix.cu and indexing/row_sums.cu: any reduction of many. Operands: y index update."""

    name = "sorted"

    def supports(self, problem: Scatter, hw: Hardware) -> str | None:
        return _uncombined(problem) or super().supports(problem, hw)

    def _sort(self, problem: Scatter) -> RadixSort:
        """Of the updates themselves where they have the size of an index."""
        updates = _ScatterUpdates.of(problem)
        values = updates.inner == 1 and ITEMSIZE[problem.dtype] == 4
        payload = Ptr("update") if values else None
        return RadixSort(1, updates.count, updates.rows.bit_length(), payload=payload)

    def moved(self, problem: Scatter) -> int:
        """The sort, and the updates in its order: a sector each at least, unless it moved them."""
        updates, sort = _ScatterUpdates.of(problem), self._sort(problem)
        size = max(32, updates.inner * ITEMSIZE[problem.dtype])
        behind = 2 * size if sort.payload else 3 * size + 32
        return sort.moved + problem.bytes + behind * updates.count

    def plan(self, problem: Scatter, config: KernelConfig, hw: Hardware) -> Plan:
        """The updates' rows, their sort, and their sums: by runs, or for rows by where they end."""
        updates, sort = _ScatterUpdates.of(problem), self._sort(problem)
        row, order = sort.sorted
        counts = args("i64 count, i32 rows", updates)
        macros = self._macros(problem, "u32")
        reduce = _REDUCTIONS[problem.reduction]

        def each(entry: str, *made: Arg) -> Launches:
            return self.one(entry, -(-updates.count // THREADS), THREADS, *made, **macros)

        tuples = args("i32 q, i64 sizes", updates)
        keys = each("row_keys", Ptr("index"), sort.keys, *counts, *tuples)
        if updates.inner == 1:
            tiles = TILE_BYTES * -(-updates.count // RUN_TILE)
            return (*keys, *sort.launches(), *self._runs(problem, sort)), sort.end + tiles
        part, arena = _part(problem), WorkspaceArena(sort.end, 16)
        ends = [arena.allocate(size) for size in (4 * updates.rows, 4 * updates.rows, 16)]
        adding = _RowSums(
            updates.count, updates.rows, updates.inner, part, problem.dtype,
            (*ends, row, order), Ptr("workspace", arena.size), {"FRESH": False, "REDUCE": reduce},
        )  # fmt: skip
        marks = each("mark_runs", row, *ends, *counts)
        nbytes = arena.size + 16 * -(-updates.count // part) * updates.inner
        return (*keys, *sort.launches(), *marks, *adding.launches()), nbytes

    def _runs(self, problem: Scatter, sort: RadixSort) -> Launches:
        """indexing/run_sums.cu: the sums of a tile, and of what reaches beyond tiles."""
        updates = _ScatterUpdates.of(problem)
        blocks = -(-updates.count // RUN_TILE)
        tiles, source = Ptr("workspace", sort.end), "indexing/run_sums.cu"
        macros: dict[str, Any] = {
            "T": STORAGE[problem.dtype], "VALUES": sort.payload is not None,
            "REDUCE": _REDUCTIONS[problem.reduction],
        }  # fmt: skip
        sums = (*sort.sorted, *args("update y"), tiles, *args("i32 count rows", updates))
        left = (tiles, *args("y, i32 blocks rows", updates, blocks=blocks))
        return (
            launch(source, "run_sums", blocks, THREADS, *sums, **macros),
            launch(source, "run_joins", 1, 1024, *left, **macros),
        )


class ScatteredRows(HeuristicKernel[ScatterND]):
    """indexing/scatter.cu. Operands: y index update."""

    source = "indexing/scatter.cu"
    free_axes = "yz"

    def supports(self, problem: ScatterND, hw: Hardware) -> str | None:
        return "it writes no zeros" if problem.fresh else _long_tuples(problem)

    def launch(self, problem: ScatterND, config: KernelConfig, hw: Hardware) -> Launches:
        made = args("y index update, i64 count inner, i32 q, i64 dims", problem,
                    q=len(problem.dims), dims=_dims(problem.dims))  # fmt: skip
        return self.one("scatter_nd", problem.count, 128, *made, **_scatter_macros(problem))


KERNELS: Kernels = {
    "GatherElements": (Each(
        "indexing/gather.cu", "gather_elements", "x index y, i64 size inner taken length",
        lambda p: {"IDX": _INDEX_TYPES[p.index], "T": _UNITS[ITEMSIZE[p.dtype]]},
    ),),
    "GatherND": (Tuples(),),
    "ScatterElements": (
        WarpLines(), Last(), GroupedUpdates(), Sorted(),
        Each(  # a line a thread: its updates are in order
            "indexing/scatter.cu", "scatter_elements",
            "y index update, i64 lines inner given length", _scatter_macros, count="lines",
        ),
    ),
    "ScatterND": (GroupedUpdates(), Last(), Sorted(), ScatteredRows()),
}  # fmt: skip

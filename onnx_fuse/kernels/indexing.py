"""GatherElements, GatherND, ScatterElements, ScatterND: an element, or a line of them, a thread."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_fuse.cuda.pointwise import STORAGE
from onnx_fuse.kernels import Kernel
from onnx_fuse.kernels.rule_based import RuleBased
from onnx_fuse.program.moves import GatherElements, GatherND, ScatterElements, ScatterND
from onnx_fuse.program.problem import ITEMSIZE, Arg, Config, Hardware, Launch, Num, Ptr

THREADS = 256
MAX_TUPLE = 6
_UNITS = {1: "u8", 2: "u16", 4: "u32", 8: "u64", 16: "u128"}
_INDEX_TYPES = {"int64": "i64", "int32": "int"}
_REDUCTIONS = {"none": 0, "add": 1, "mul": 2, "max": 3, "min": 4}


def _blocks(n: int) -> tuple[int, int, int]:
    return (-(-n // THREADS), 1, 1)


def _dims(dims: tuple[int, ...]) -> tuple[Num, ...]:
    """The sizes that a tuple of indices counts along, 1 for those it has not."""
    return tuple(Num("i64", d) for d in (*dims, *(1,) * (MAX_TUPLE - len(dims))))


class _Tuples(RuleBased):
    """Kernels of tuples of at most so many indices."""

    def supports(self, problem: GatherND | ScatterND, hw: Hardware) -> str | None:
        """What the kernel has arguments for."""
        q = len(problem.dims)
        return f"index tuples of {q}" if q > MAX_TUPLE else None


class Elements(RuleBased):
    """indexing/gather.cu. Operands: x index y."""

    source = "indexing/gather.cu"
    free_axes = "yz"

    def launch(self, problem: GatherElements, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """The one launch of the kernel."""
        sizes = (problem.size, problem.inner, problem.taken, problem.length)
        args: tuple[Arg, ...] = (Ptr("x"), Ptr("index"), Ptr("y"), *(Num("i64", s) for s in sizes))
        unit = _UNITS[ITEMSIZE[problem.dtype]]
        defines = (("IDX", _INDEX_TYPES[problem.index]), ("T", unit))
        grid = _blocks(problem.size)
        return (Launch(self.source, "gather_elements", grid, (THREADS, 1, 1), args, defines),)


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
        args: tuple[Arg, ...] = (
            Ptr("x"), Ptr("index"), Ptr("y"), Num("i64", n), Num("i64", problem.inner // width),
            Num("i64", problem.rows), Num("i32", len(problem.dims)), *_dims(problem.dims),
        )  # fmt: skip
        defines = (("IDX", _INDEX_TYPES[problem.index]), ("T", _UNITS[width * size]))
        return (Launch(self.source, "gather_nd", _blocks(n), (THREADS, 1, 1), args, defines),)


def _scatter_defines(problem: ScatterElements | ScatterND) -> tuple[tuple[str, str], ...]:
    return (
        ("IDX", _INDEX_TYPES[problem.index]),
        ("REDUCE", str(_REDUCTIONS[problem.reduction])),
        ("T", STORAGE[problem.dtype]),
    )


class Lines(RuleBased):
    """indexing/scatter.cu. Operands: y index update."""

    source = "indexing/scatter.cu"
    free_axes = "yz"

    def launch(self, problem: ScatterElements, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch, a line a thread: its updates are in order."""
        sizes = (problem.lines, problem.inner, problem.given, problem.length)
        args: tuple[Arg, ...] = (
            Ptr("y"), Ptr("index"), Ptr("update"), *(Num("i64", s) for s in sizes),
        )  # fmt: skip
        return (Launch(
            self.source, "scatter_elements", _blocks(problem.lines), (THREADS, 1, 1), args,
            _scatter_defines(problem),
        ),)  # fmt: skip


class Rows(_Tuples):
    """indexing/scatter.cu. Operands: y index update."""

    source = "indexing/scatter.cu"
    free_axes = "yz"

    def launch(self, problem: ScatterND, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch, a block a tuple."""
        args: tuple[Arg, ...] = (
            Ptr("y"), Ptr("index"), Ptr("update"), Num("i64", problem.count),
            Num("i64", problem.inner), Num("i32", len(problem.dims)), *_dims(problem.dims),
        )  # fmt: skip
        return (Launch(
            self.source, "scatter_nd", (problem.count, 1, 1), (128, 1, 1), args,
            _scatter_defines(problem),
        ),)  # fmt: skip


KERNELS: dict[str, Sequence[Kernel]] = {
    "GatherElements": (Elements(),),
    "GatherND": (Tuples(),),
    "ScatterElements": (Lines(),),
    "ScatterND": (Rows(),),
}

"""Base of kernels that are configured by a heuristic, not by a fitted cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

from onnx_fuse.cuda.macros import C_TYPES, accumulator, pow2
from onnx_fuse.cuda.pointwise import SCALAR, STORAGE, inline
from onnx_fuse.kernels.kernel import Kernel, P, renamed
from onnx_fuse.program.expression import Tail
from onnx_fuse.program.launch import Launches, Num, Ptr, args
from onnx_fuse.program.problem import ITEMSIZE, AnyProblem, GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.problems import Window
from onnx_fuse.program.size import any_batch, coarse

BLOCK = 256
"""Threads of a block where nothing asks for more."""
ACCESS, LATENCY = 32, 0.6e-6
"""Bytes that a thread waits for at once, and the seconds that memory takes (H200, 2026-11)."""


Plan: TypeAlias = tuple[Launches, int]
"""Launches, and the bytes of the workspace."""


class Planned(Kernel[P]):
    """A candidate whose launches and workspace are worked out together."""

    def plan(self, problem: P, config: KernelConfig, hw: Hardware) -> Plan:
        """The launches, and the bytes of the workspace."""
        raise TypeError(f"{type(self).__name__} has no launches")

    def launch(self, problem: P, config: KernelConfig, hw: Hardware) -> Launches:
        return self.plan(problem, config, hw)[0]

    def workspace(self, problem: P, config: KernelConfig, hw: Hardware) -> int:
        return self.plan(problem, config, hw)[1]


class DelegatingKernel(Kernel[P]):
    """A candidate that leaves the product inside its problem to another candidate."""

    inner: Kernel[GemmProblem]
    own_version = 0

    @property
    def version(self) -> int:
        """That of the product's candidate, and its own, which is raised in the same way."""
        return self.own_version + self.inner.version

    def _gemm(self, problem: P) -> GemmProblem:
        """The problem of the product."""
        raise TypeError(f"{type(self).__name__} has no product")

    def _own_bytes(self, problem: P) -> int:
        """The bytes of scratch in front of the product's own."""
        return 0

    def _before(self, problem: P, hw: Hardware) -> tuple[Launches, dict[str, Ptr]]:
        """The launches in front of the product's, and where its operands are."""
        return (), {}

    def launch(self, problem: P, config: KernelConfig, hw: Hardware) -> Launches:
        """The candidate's own launches, then the product's."""
        before, names = self._before(problem, hw)
        names["workspace"] = Ptr("workspace", self._own_bytes(problem))
        return before + renamed(self.inner.launch(self._gemm(problem), config, hw), names)

    def configs(self, problem: P, hw: Hardware) -> Sequence[KernelConfig]:
        return self.inner.configs(self._gemm(problem), hw)

    def fits(self, problem: P, config: KernelConfig) -> bool:
        return self.inner.fits(self._gemm(problem), config)

    def workspace(self, problem: P, config: KernelConfig, hw: Hardware) -> int:
        """The candidate's own bytes, then the product's."""
        nbytes = self.inner.workspace(self._gemm(problem), config, hw)
        return self._own_bytes(problem) + nbytes


class HeuristicKernel(Kernel[P]):
    """A candidate that runs by the rule of its `launch` where its configuration names nothing.

    `select` takes the first of an operator's that serves the problem. Further configurations name
    what they set, for the tuner and for who forces a kernel.
    """

    name = "plain"
    compared = False
    """Whether the cheapest is chosen, where all that serve a problem say so."""

    def supports(self, problem: P, hw: Hardware) -> str | None:
        """Every problem of its operator whose tail is one."""
        tail = getattr(problem, "tail", None)
        return None if tail is None or tail_text(tail) else "its steps are no C expression"

    def configs(self, problem: P, hw: Hardware) -> Sequence[KernelConfig]:
        """The rule's own."""
        return (KernelConfig.of(),)

    def moved(self, problem: P) -> int:
        """The bytes that its launches read and write together: the problem's, unless it says so."""
        return problem.bytes

    def cost(self, problem: P, config: KernelConfig, hw: Hardware) -> float:
        """What the chip needs at least or its threads to move the bytes, and the launches.

        A thread has ACCESS bytes on their way at a time, and a multiprocessor has a limit as well:
        few threads or blocks leave most of the memory's rate unused, however fast the chip is.
        """
        launches = self.launch(problem, config, hw)
        threads = max(prod(x.grid) * prod(x.block) for x in launches)
        blocks = max(prod(x.grid) for x in launches)
        rate = min(hw.bandwidth, threads * ACCESS / LATENCY,
                   2 * blocks * hw.bandwidth / hw.sm_count)  # fmt: skip
        took = max(problem.floor(hw), self.moved(problem) / rate)
        return took + len(launches) * hw.launch_seconds

    def launch(self, problem: P, config: KernelConfig, hw: Hardware) -> Launches:
        raise TypeError(f"{type(self).__name__} has no launch")


class Chosen(HeuristicKernel[P]):
    """A candidate whose rule is the cheapest of its configurations."""

    def tiles(self, problem: P, hw: Hardware) -> Sequence[KernelConfig]:
        """The configurations that the problem admits."""
        raise TypeError(f"{type(self).__name__} has no tiles")

    def seconds(self, problem: P, config: KernelConfig, hw: Hardware) -> float:
        """The time of one of them."""
        raise TypeError(f"{type(self).__name__} has no cost")

    def configs(self, problem: P, hw: Hardware) -> Sequence[KernelConfig]:
        return [KernelConfig.of(), *self.tiles(problem, hw)]

    def ruled(self, problem: P, config: KernelConfig, hw: Hardware) -> KernelConfig:
        """The configuration itself, or the cheapest for the class of the problem."""
        if config.attrs:
            return config
        largest = problem.upper_bound()
        return min(self.tiles(largest, hw), key=lambda how: self.seconds(largest, how, hw))

    def cost(self, problem: P, config: KernelConfig, hw: Hardware) -> float:
        return self.seconds(problem, self.ruled(problem, config, hw), hw)


class Each(HeuristicKernel[P]):
    """A kernel of one launch, whose blocks have `per` elements each of the fields `count`."""

    free_axes = "yz"
    version = 1

    def __init__(
        self, source: str, entry: str, args: str, macros: Callable[[P], dict[str, Any]],
        *, count: str = "size", per: int = BLOCK, threads: int = BLOCK, version: int = 1,
    ) -> None:  # fmt: skip
        """`args` is text as `program.launch.args` reads it, `macros` are those of a problem."""
        self.source, self.entry, self.args, self.macros = source, entry, args, macros
        self.count, self.per, self.threads, self.version = count.split(), per, threads, version

    def launch(self, problem: P, config: KernelConfig, hw: Hardware) -> Launches:
        blocks = -(-prod(getattr(problem, name) for name in self.count) // self.per)
        made, macros = args(self.args, problem), self.macros(problem)
        return self.one(self.entry, blocks, self.threads, *made, **macros)


def typed(problem: AnyProblem, **fields: str) -> dict[str, Any]:
    """The macros T and ACC of a problem's dtype, and those of the types in other fields."""
    types = {name: getattr(problem, field) for name, field in {"T": "dtype", **fields}.items()}
    return {"ACC": accumulator(types["T"]), **{k: C_TYPES[dtype] for k, dtype in types.items()}}


def access_width(length: int, *dtypes: str, most: int = 16) -> int:
    """The elements of an access of at most `most` bytes, in dense rows of `length` of any of these
    types.
    """
    width = max(1, most // max(ITEMSIZE[dtype] for dtype in dtypes))
    while length % width:
        width //= 2
    return width


def team_size(rows: int, length: int, vec: int) -> int:
    """Threads a row, a power of two: few with much each, more where the rows are few."""
    vectors = -(-length // vec)
    if vectors <= 32:
        return pow2(vectors)
    if vectors <= 256:  # 32 elements a thread still fit in its registers
        return max(32, pow2(-(-length // 32))) if coarse(rows) >= 1024 else min(256, pow2(vectors))
    return min(1024, pow2(-(-vectors // 4)))


def block_of(threads: int) -> int:
    """Threads a block for teams of `threads`: several teams of a warp or less, or one larger."""
    return BLOCK if threads <= 32 else threads


def row_items(length: int, vec: int, threads: int, most: int) -> int:
    """Vectors a thread keeps of its row; 0 where the row passes `most` elements a thread."""
    items = -(-length // (vec * threads))
    return items if items * vec <= most else 0


CHUNK, BLOCKS = 8192, 1024
"""The least elements of a chunk of a long row, and the blocks that few rows are cut into."""


def cut(rows: int, length: int, vec: int) -> tuple[int, int]:
    """(elements of a chunk, chunks a row) of few long rows, read in accesses of `vec`."""
    chunks = min(coarse(length) // CHUNK, -(-BLOCKS // any_batch(rows)))
    chunk = -(-length // (chunks * vec)) * vec
    return chunk, -(-length // chunk)


def thread_choices(threads: int, least: int = 1) -> list[KernelConfig]:
    """The rule's configuration, then half and twice its `threads` a row, from `least` to 1024."""
    sizes = [size for size in (threads // 2, 2 * threads) if least <= size <= 1024]
    return [KernelConfig.of(), *(KernelConfig.of(team=size) for size in sizes)]


NUMBERS = tuple(f"n{i}" for i in range(16))
"""What a kernel calls the numbers of a tail that are its arguments."""


def tail_text(tail: Tail, numbers: Sequence[str] = ()) -> str | None:
    """The tail as a C++ expression of v0, v1, v2 and v3, as of `inline`; None where it has none."""
    loads = range(tail.expression.loads)
    names = ["v0" if j == tail.own else f"v{j + (j < tail.own)}" for j in loads]
    return inline(tail.expression, names, numbers)


def tail_macros(tail: Tail | None, numbers: Sequence[str] = ()) -> dict[str, Any]:
    """The macros of what kernels with a SUFFIX store; `numbers` as of `tail_text`."""
    if tail is None:
        return {}
    text = tail_text(tail, numbers)
    assert text is not None
    e4m3 = "e4m3" in text or "float8_e4m3fn" in (tail.dtype, *tail.reads)
    return {
        "OPERANDS": tail.expression.loads - 1, "SUFFIX(v0, v1, v2, v3)": text,
        "TY": STORAGE[tail.dtype], "SHORT_RESULT": ITEMSIZE[tail.dtype] <= 2 or None,
        "E4M3_STEPS": e4m3 or None,
    }  # fmt: skip


def numbered_tail(tail: Tail | None) -> tuple[list[Num], dict[str, Any]]:
    """The numbers of a tail as arguments of its kernel, whose text is then that of many tails, and
    its macros; literals where they are more than NUMBERS or of other types.
    """
    scalars = tail.expression.scalars if tail else ()
    named = len(scalars) <= len(NUMBERS) and {kind for kind, _ in scalars} <= {"f32", "i32"}
    numbers = [Num("f32", 0.0)] * len(NUMBERS)
    if named:
        numbers[: len(scalars)] = [Num(kind, value) for kind, value in scalars]
    each = (f"{SCALAR[n.ctype]} {name}" for name, n in zip(NUMBERS, numbers, strict=True))
    return numbers, {
        "NUMBERS": ", ".join(each), **tail_macros(tail, NUMBERS[: len(scalars) * named])
    }  # fmt: skip


def whole_sectors(tail: Tail | None, dtype: str, vec: int, items: int) -> tuple[int, int]:
    """(elements an access, accesses a thread): where a tail stores elements wider than `dtype`,
    fewer as many times more, so that a warp's store has no gaps.
    """
    wider = 1 if tail is None else max(1, ITEMSIZE[tail.dtype] // ITEMSIZE[dtype])
    less = min(vec, wider)
    return vec // less, items * less


def window_macros(window: Window) -> dict[str, Any]:
    """KD KH KW, SD ..., DD ..., PD ...: what conv/geometry.cuh and pool/pool.cu read."""
    named = {"K": window.kernel, "S": window.strides, "D": window.dilations, "P": window.before}
    return {k + axis: v for k, t in named.items() for axis, v in zip("DHW", t, strict=True)}

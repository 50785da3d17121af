"""Launch: one kernel call, its grid, its arguments and how its source is specialised."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeAlias

from onnx_fuse.program.problem import Collective, GemmProblem

Waits = Literal["first", "later", ""]


@dataclass(frozen=True)
class Ptr:
    """Kernel argument: the address bound to `name`, plus `offset` bytes; null if unbound."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Num:
    """Kernel argument: a number of C type `ctype` (i32, i64, u32, f32, f64)."""

    ctype: str
    value: int | float


@dataclass(frozen=True)
class TensorMap:
    """Kernel argument: a TMA descriptor over `ptr`, dims innermost first, strides in bytes.

    `strides` has one entry fewer than `shape` (the innermost is contiguous), `swizzle` 0, 64, 128.
    With a `window`, `shape` is (channels, width, height, images), or has a depth before the images,
    `box` is (channels, pixels), and a load takes so many pixels one after another (im2col): from
    the left and top (and front) corner on, as far beyond the first pixel, to the right and bottom
    one beyond the last, in steps along the axes. The window has the three in this order.
    """

    ptr: Ptr
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128
    window: tuple[int, ...] = ()


@dataclass(frozen=True)
class Table:
    """Kernel argument: a struct of 64-bit words by value, addresses and numbers mixed."""

    words: tuple[Ptr | int, ...]


Arg = Ptr | Num | TensorMap | Table


def args(text: str, problem: object = None, /, **values: Any) -> tuple[Arg, ...]:
    """The arguments of a kernel, as in "x y, i64 size inner, f32 epsilon".

    A part names pointers, or behind a C type numbers, each of them one of `values` or a field of
    the problem; a tuple is several numbers.
    """
    made: list[Arg] = []
    for kind, pointers, names in _args(text):
        made += pointers
        for name in names:
            value = values[name] if name in values else getattr(problem, name)
            made += [Num(kind, n) for n in (value if isinstance(value, tuple) else (value,))]
    return tuple(made)


@cache
def _args(text: str) -> list[tuple[str, tuple[Ptr, ...], list[str]]]:
    """Of each part its C type, pointers and names of numbers: texts are few, and come again."""
    parts = [part.split() for part in text.split(",")]
    kinds = ("i32", "u32", "i64", "f32", "f64")
    return [(x[0], (), x[1:]) if x[0] in kinds else ("", tuple(map(Ptr, x)), []) for x in parts]


@dataclass(frozen=True)
class Launch:
    """One kernel call: `source` is a path under cuda_src/ or the text itself, specialised by -D.

    `sync`: bytes bound under "sync", this call's own, zero at first; what the kernel leaves there
    the next run finds (counters and flags that it resets itself). `cooperative`: all blocks are on
    the chip at once, so they may wait for each other. `product`: no kernel, but cuBLASLt's call for
    this problem; `collective`: NCCL's for this bucket. `source` is empty then.

    `waits`: when the kernel waits for what was launched before it: "first" of all, so it may start
    while any launches before it run; "later", after reads of what no launch writes, so it may start
    while the one before it runs; "" by itself never. `early`: macros by which the kernel lets the
    next launch start at once.
    """

    source: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Arg, ...]
    defines: tuple[tuple[str, str], ...] = ()
    smem: int = 0
    cluster: int = 1
    sync: int = 0
    cooperative: bool = False
    product: GemmProblem | None = None
    collective: Collective | None = None
    waits: Waits = ""
    early: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def of_library(self) -> bool:
        """Whether a library's call takes the place of a kernel."""
        return self.product is not None or self.collective is not None


Launches: TypeAlias = tuple[Launch, ...]
"""What a kernel enqueues, in order."""

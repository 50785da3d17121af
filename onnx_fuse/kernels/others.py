"""Operators of one plain kernel: random numbers, regions, n-grams, determinants, ranges."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_fuse.cuda.macros import C_TYPES, accumulator, defines
from onnx_fuse.cuda.pointwise import STORAGE
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.rule_based import RuleBased, window_macros
from onnx_fuse.program.moves import (
    DeformColumns,
    Determinant,
    NGrams,
    NmsChosen,
    Random,
    Range,
    RoiAlign,
)
from onnx_fuse.program.problem import Config, Hardware, Launch, Num, Ptr


def _blocks(size: int, each: int) -> tuple[int, int, int]:
    return (-(-size // each), 1, 1)


class Philox(RuleBased):
    """random/philox.cu. Operands: state x y."""

    source = "random/philox.cu"
    free_axes = "yz"

    def launch(self, problem: Random, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch, four numbers a thread."""
        args = (
            Ptr("state"), Ptr("x"), Ptr("y"), Num("i64", problem.size), Num("i64", problem.bits),
            Num("i64", problem.stream), Num("f32", problem.a), Num("f32", problem.b),
        )  # fmt: skip
        macros = defines(
            FIXED=problem.fixed, KIND=problem.kind, T=STORAGE[problem.dtype],
            X=STORAGE[problem.given],
        )  # fmt: skip
        grid = _blocks(problem.size, 1024)
        return (Launch(self.source, "philox_fill", grid, (256, 1, 1), args, macros),)


class Bins(RuleBased):
    """regions/roi_align.cu. Operands: x rois index y."""

    source = "regions/roi_align.cu"
    free_axes = "yz"

    def launch(self, problem: RoiAlign, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch, a bin a thread."""
        numbers = (*problem.image, *problem.bins, problem.samples)
        return (Launch(
            self.source, "roi_align", _blocks(problem.size, 128), (128, 1, 1),
            (*map(Ptr, ("x", "rois", "index", "y")), Num("i64", problem.size),
             Num("i64", problem.batch), *(Num("i32", n) for n in numbers),
             Num("f32", problem.scale)),
            defines(
                T=C_TYPES[problem.dtype], I=C_TYPES[problem.index],
                ACC=accumulator(problem.dtype), MAXIMUM=problem.maximum,
                HALF_PIXEL=problem.half_pixel,
            ),
        ),)  # fmt: skip


class OffsetTaps(RuleBased):
    """regions/deform_columns.cu. Operands: x offset mask columns."""

    source = "regions/deform_columns.cu"
    free_axes = "yz"

    def launch(self, problem: DeformColumns, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch, an offset a thread."""
        frame = window_macros(problem.window)
        numbers = (problem.channels, problem.shifts, *problem.image, *problem.outer)
        return (Launch(
            self.source, "deform_columns", _blocks(problem.size, 128), (128, 1, 1),
            (*map(Ptr, ("x", "offset", "mask", "columns")), Num("i64", problem.size),
             *(Num("i32", n) for n in numbers)),
            defines(T=C_TYPES[problem.dtype], ACC=accumulator(problem.dtype),
                    **{k: v for k, v in frame.items() if k.endswith(("H", "W"))}),
        ),)  # fmt: skip


class Suppression(RuleBased):
    """regions/nms.cu. Operands: boxes scores most iou least left chosen found."""

    source = "regions/nms.cu"
    free_axes = "yz"

    def launch(self, problem: NmsChosen, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch, a block a class of an image."""
        names = ("boxes", "scores", "most", "iou", "least", "left", "chosen", "found")
        return (Launch(
            self.source, "nms", (problem.lines, 1, 1), (256, 1, 1),
            (*map(Ptr, names), Num("i32", problem.classes), Num("i32", problem.count)),
            defines(CENTER=problem.center),
        ),)  # fmt: skip


class Elimination(RuleBased):
    """linalg/det.cu. Operands: x work y."""

    source = "linalg/det.cu"
    free_axes = "yz"

    def launch(self, problem: Determinant, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch, a block a matrix."""
        return (Launch(
            self.source, "det", (problem.count, 1, 1), (256, 1, 1),
            (*map(Ptr, ("x", "work", "y")), Num("i32", problem.n)),
            defines(T=C_TYPES[problem.dtype], ACC=accumulator(problem.dtype)),
        ),)  # fmt: skip


class Counts(RuleBased):
    """text/tfidf.cu. Operands: x pool entry weight y."""

    source = "text/tfidf.cu"
    free_axes = "yz"

    def launch(self, problem: NGrams, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One launch, a warp a count."""
        return (Launch(
            self.source, "tfidf", _blocks(problem.size, 8), (256, 1, 1),
            (*map(Ptr, ("x", "pool", "entry", "weight", "y")), Num("i64", problem.size),
             Num("i32", problem.columns), Num("i64", problem.words)),
            defines(X=C_TYPES[problem.dtype], MODE=problem.mode),
        ),)  # fmt: skip


class MinMax(RuleBased):
    """quant/range.cu. Operands: x scale zero."""

    source = "quant/range.cu"
    free_axes = "yz"

    def _parts(self, problem: Range, hw: Hardware) -> int:
        return max(1, min(2 * hw.sm_count, -(-problem.size // 4096)))

    def workspace(self, problem: Range, config: Config, hw: Hardware) -> int:
        """The bytes of two numbers for each block."""
        return 8 * self._parts(problem, hw)

    def launch(self, problem: Range, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """The range of each block's part, then of all."""
        blocks = self._parts(problem, hw)
        parts = Launch(
            self.source, "least_and_largest", (blocks, 1, 1), (256, 1, 1),
            (Ptr("x"), Ptr("workspace"), Num("i64", problem.size)),
        )  # fmt: skip
        total = Launch(
            self.source, "scale_and_zero", (1, 1, 1), (256, 1, 1),
            (Ptr("workspace"), Ptr("scale"), Ptr("zero"), Num("i32", blocks)),
        )  # fmt: skip
        return (parts, total)


KERNELS: dict[str, Sequence[Kernel]] = {
    "Random": (Philox(),),
    "RoiAlign": (Bins(),),
    "DeformColumns": (OffsetTaps(),),
    "NmsChosen": (Suppression(),),
    "Determinant": (Elimination(),),
    "NGrams": (Counts(),),
    "Range": (MinMax(),),
}

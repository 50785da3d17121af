"""Operators of one plain kernel: random numbers, regions, n-grams, determinants, ranges."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_fuse.cuda.macros import C_TYPES, accumulator, pow2
from onnx_fuse.cuda.pointwise import STORAGE
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.rule_based import HeuristicKernel, access_width, window_macros
from onnx_fuse.program.data_movement import (
    DeformColumns,
    Determinant,
    Fourier,
    NGrams,
    NmsChosen,
    Random,
    Range,
    RoiAlign,
    is_smooth,
)
from onnx_fuse.program.problem import Hardware, KernelConfig, Launches, Num, Ptr


class Philox(HeuristicKernel):
    """random/philox.cu. Operands: state x y."""

    source = "random/philox.cu"
    free_axes = "yz"

    def launch(self, problem: Random, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, four numbers a thread."""
        return self.one(
            "philox_fill", -(-problem.size // 1024), 256,
            Ptr("state"), Ptr("x"), Ptr("y"), Num("i64", problem.size), Num("i64", problem.bits),
            Num("i64", problem.stream), Num("f32", problem.a), Num("f32", problem.b),
            FIXED=problem.fixed, KIND=problem.kind, T=STORAGE[problem.dtype],
            X=STORAGE[problem.given],
        )  # fmt: skip


class Bins(HeuristicKernel):
    """regions/roi_align.cu. Operands: x rois index y."""

    version = 2
    source = "regions/roi_align.cu"
    free_axes = "yz"

    def launch(self, problem: RoiAlign, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, a bin a thread."""
        numbers = (*problem.image, *problem.bins, problem.samples)
        return self.one(
            "roi_align", -(-problem.size // 128), 128,
            *map(Ptr, ("x", "rois", "index", "y")), Num("i64", problem.size),
            Num("i64", problem.batch), *(Num("i32", n) for n in numbers),
            Num("f32", problem.scale), T=C_TYPES[problem.dtype], I=C_TYPES[problem.index],
            ACC=accumulator(problem.dtype), MAXIMUM=problem.maximum, HALF_PIXEL=problem.half_pixel,
        )  # fmt: skip


class OffsetTaps(HeuristicKernel):
    """regions/deform_columns.cu. Operands: x offset mask columns."""

    source = "regions/deform_columns.cu"
    free_axes = "yz"

    def launch(self, problem: DeformColumns, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, an offset a thread."""
        frame = {k: v for k, v in window_macros(problem.window).items() if k[-1] in "HW"}
        numbers = (problem.channels, problem.shifts, *problem.image, *problem.outer)
        return self.one(
            "deform_columns", -(-problem.size // 128), 128,
            *map(Ptr, ("x", "offset", "mask", "columns")), Num("i64", problem.size),
            *(Num("i32", n) for n in numbers), T=C_TYPES[problem.dtype],
            ACC=accumulator(problem.dtype), **frame,
        )  # fmt: skip


class Suppression(HeuristicKernel):
    """regions/nms.cu. Operands: boxes scores most iou least left chosen found."""

    source = "regions/nms.cu"
    free_axes = "yz"

    def launch(self, problem: NmsChosen, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, a block a class of an image."""
        names = ("boxes", "scores", "most", "iou", "least", "left", "chosen", "found")
        numbers = Num("i32", problem.classes), Num("i32", problem.count)
        pointers = map(Ptr, names)
        return self.one("nms", problem.lines, 256, *pointers, *numbers, CENTER=problem.center)


class RowsOfLanes(HeuristicKernel):
    """linalg/det_rows.cu. Operands: x y."""

    name = "rows"
    source = "linalg/det_rows.cu"
    free_axes = "yz"

    def supports(self, problem: Determinant, hw: Hardware) -> str | None:
        """None where a warp has a lane for each row, and otherwise the reason for a refusal."""
        return None if problem.n <= 32 else "a matrix has more than 32 rows"

    def launch(self, problem: Determinant, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, a lane a row."""
        side = pow2(problem.n)
        return self.one(
            "det_rows", -(-problem.count * side // 256), 256, Ptr("x"), Ptr("y"),
            Num("i64", problem.count), Num("i32", problem.n), SIDE=side,
            VEC=access_width(problem.n, problem.dtype) if problem.n else 1,
            T=C_TYPES[problem.dtype], ACC=accumulator(problem.dtype),
        )  # fmt: skip


class Elimination(HeuristicKernel):
    """linalg/det.cu. Operands: x y."""

    source = "linalg/det.cu"
    free_axes = "yz"

    def workspace(self, problem: Determinant, config: KernelConfig, hw: Hardware) -> int:
        """The bytes of a copy of each matrix."""
        item = 8 if accumulator(problem.dtype) == "double" else 4
        return problem.count * problem.n * problem.n * item

    def cost(self, problem: Determinant, config: KernelConfig, hw: Hardware) -> float:
        """Rounds of barriers, eight blocks a multiprocessor at a time, and their elements."""
        # 156,250 matrices of 8 rows on an H200 (2026-11): 3.5 us a round
        waves, n = -(-problem.count // (8 * hw.sm_count)), problem.n
        return waves * n * (3.5e-6 + n * n * 4e-11) + hw.launch_seconds

    def launch(self, problem: Determinant, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, a block a matrix."""
        pointers = map(Ptr, ("x", "workspace", "y"))
        return self.one(
            "det", problem.count, 256, *pointers, Num("i32", problem.n),
            T=C_TYPES[problem.dtype], ACC=accumulator(problem.dtype),
        )  # fmt: skip


class Stockham(HeuristicKernel):
    """linalg/fourier.cu. Operands: x table window y."""

    source = "linalg/fourier.cu"
    free_axes = "yz"

    def supports(self, problem: Fourier, hw: Hardware) -> str | None:
        """None where the transform is one of stages that a block has room for."""
        if not is_smooth(problem.points):
            return f"{problem.points} points are not a product of 2, 3 and 5, or too many"
        return None

    def cost(self, problem: Fourier, config: KernelConfig, hw: Hardware) -> float:
        """The stages' 46 bytes a point, at half of shared memory's rate, or the usual."""
        stages = -(-(problem.points.bit_length() - 1) // 3)
        shared = problem.count * problem.points * stages * 46 / (1.1e11 * hw.sm_count)
        return max(shared + hw.launch_seconds, super().cost(problem, config, hw))

    def launch(self, problem: Fourier, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, a block for about 1024 points, eight of them a thread."""
        n, across = problem.points, problem.inner > 1
        rows = max(1, 1024 // n, min(8, 4096 // n) if across else 1)
        threads = max(32, -(-rows * n // 256) * 32)
        numbers = (problem.count, problem.frames, problem.inner, problem.length, problem.step)
        return self.one(
            "fourier", -(-problem.count // rows), threads,
            *map(Ptr, ("x", "window" if problem.window else "x", "table", "y")),
            *(Num("i64", number) for number in numbers), Num("i32", problem.taken),
            smem=16 * rows * (n + n // 8 + 1), T=C_TYPES[problem.dtype], POINTS=n, ROWS=rows,
            BLOCK=threads, SIGN=1 if problem.inverse else -1, RESULTS=problem.results,
            PARTS=problem.parts, OUT=1 if problem.half else 2, ACROSS=across,
            WINDOW=problem.window, HALF=problem.half,
        )  # fmt: skip


class Counts(HeuristicKernel):
    """text/tfidf.cu. Operands: x pool entry weight y."""

    source = "text/tfidf.cu"
    free_axes = "yz"

    def launch(self, problem: NGrams, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, a warp a count."""
        return self.one(
            "tfidf", -(-problem.size // 8), 256,
            *map(Ptr, ("x", "pool", "entry", "weight", "y")), Num("i64", problem.size),
            Num("i32", problem.columns), Num("i64", problem.words),
            X=C_TYPES[problem.dtype], MODE=problem.mode,
        )  # fmt: skip


class MinMax(HeuristicKernel):
    """quant/range.cu. Operands: x scale zero."""

    source = "quant/range.cu"
    free_axes = "yz"

    def _parts(self, problem: Range, hw: Hardware) -> int:
        return max(1, min(2 * hw.sm_count, -(-problem.size // 4096)))

    def workspace(self, problem: Range, config: KernelConfig, hw: Hardware) -> int:
        """The bytes of two numbers for each block."""
        return 8 * self._parts(problem, hw)

    def launch(self, problem: Range, config: KernelConfig, hw: Hardware) -> Launches:
        """The range of each block's part, then of all."""
        blocks = self._parts(problem, hw)
        ends, size = (Ptr("scale"), Ptr("zero")), Num("i64", problem.size)
        parts = self.one("least_and_largest", blocks, 256, Ptr("x"), Ptr("workspace"), size)
        total = self.one("scale_and_zero", 1, 256, Ptr("workspace"), *ends, Num("i32", blocks))
        return parts + total


KERNELS: dict[str, Sequence[Kernel]] = {
    "Random": (Philox(),),
    "RoiAlign": (Bins(),),
    "DeformColumns": (OffsetTaps(),),
    "NmsChosen": (Suppression(),),
    "Determinant": (RowsOfLanes(), Elimination()),
    "Fourier": (Stockham(),),
    "NGrams": (Counts(),),
    "Range": (MinMax(),),
}

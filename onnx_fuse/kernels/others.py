"""Operators of one plain kernel: random numbers, regions, n-grams, determinants, ranges."""

from __future__ import annotations

from math import ceil

from onnx_fuse.cuda.macros import C_TYPES, pow2
from onnx_fuse.cuda.pointwise import STORAGE
from onnx_fuse.kernels.kernel import Kernels
from onnx_fuse.kernels.rule_based import (
    Each,
    HeuristicKernel,
    Plan,
    Planned,
    access_width,
    typed,
    window_macros,
)
from onnx_fuse.program.data_movement import Determinant, Fourier, Range, is_smooth
from onnx_fuse.program.launch import Launches, args
from onnx_fuse.program.problem import Hardware, KernelConfig


class RowsOfLanes(HeuristicKernel[Determinant]):
    """linalg/det_rows.cu. Operands: x y."""

    name = "rows"
    source = "linalg/det_rows.cu"
    free_axes = "yz"

    def supports(self, problem: Determinant, hw: Hardware) -> str | None:
        return None if problem.n <= 32 else "a matrix has more than 32 rows"

    def launch(self, problem: Determinant, config: KernelConfig, hw: Hardware) -> Launches:
        side, vec = pow2(problem.n), access_width(problem.n, problem.dtype) if problem.n else 1
        return self.one(
            "det_rows", -(-problem.count * side // 256), 256,
            *args("x y, i64 count, i32 n", problem), SIDE=side, VEC=vec, **typed(problem),
        )  # fmt: skip


class Elimination(Planned[Determinant], HeuristicKernel[Determinant]):
    """linalg/det.cu. Operands: x y."""

    source = "linalg/det.cu"
    free_axes = "yz"

    def cost(self, problem: Determinant, config: KernelConfig, hw: Hardware) -> float:
        """Rounds of barriers, some blocks a multiprocessor at a time, and their elements."""
        costs, n = self.numbers(hw), problem.n  # fitted to 156,250 matrices of 8 rows
        waves = ceil(problem.count / (costs["resident"] * hw.sm_count))
        return waves * n * (costs["round"] + n * n * costs["element"]) + hw.launch_seconds

    def plan(self, problem: Determinant, config: KernelConfig, hw: Hardware) -> Plan:
        made, macros = args("x workspace y, i32 n", problem), typed(problem)
        copies = problem.count * problem.n * problem.n * (8 if macros["ACC"] == "double" else 4)
        return self.one("det", problem.count, 256, *made, **macros), copies


class Stockham(HeuristicKernel[Fourier]):
    """linalg/fourier.cu. Operands: x table window y."""

    source = "linalg/fourier.cu"
    free_axes = "yz"

    def supports(self, problem: Fourier, hw: Hardware) -> str | None:
        if not is_smooth(problem.points):
            return f"{problem.points} points are not a product of 2, 3 and 5, or too many"
        return None

    def cost(self, problem: Fourier, config: KernelConfig, hw: Hardware) -> float:
        """The stages' bytes of a point, at half of shared memory's rate, or the usual."""
        stages = -(-(problem.points.bit_length() - 1) // 3)
        costs, points = self.numbers(hw), problem.count * problem.points
        shared = points * stages * costs["point"] / (costs["shared"] * hw.sm_count)
        return max(shared + hw.launch_seconds, super().cost(problem, config, hw))

    def launch(self, problem: Fourier, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, a block for about 1024 points, eight of them a thread."""
        n, across = problem.points, problem.inner > 1
        rows = max(1, 1024 // n, min(8, 4096 // n) if across else 1)
        threads = max(32, -(-rows * n // 256) * 32)
        names = f"x {'window' if problem.window else 'x'} table y"
        return self.one(
            "fourier", -(-problem.count // rows), threads,
            *args(f"{names}, i64 count frames inner length step, i32 taken", problem),
            smem=16 * rows * (n + n // 8 + 1), T=C_TYPES[problem.dtype], POINTS=n, ROWS=rows,
            BLOCK=threads, SIGN=1 if problem.inverse else -1, RESULTS=problem.results,
            PARTS=problem.parts, OUT=1 if problem.half else 2, ACROSS=across,
            WINDOW=problem.window, HALF=problem.half,
        )  # fmt: skip


class MinMax(Planned[Range], HeuristicKernel[Range]):
    """quant/range.cu. Operands: x scale zero."""

    source = "quant/range.cu"
    free_axes = "yz"

    def plan(self, problem: Range, config: KernelConfig, hw: Hardware) -> Plan:
        """The range of each block's part, two numbers, then of all."""
        blocks = max(1, min(2 * hw.sm_count, -(-problem.size // 4096)))
        made = args("x workspace, i64 size", problem)
        parts = self.one("least_and_largest", blocks, 256, *made)
        ends = args("workspace scale zero, i32 blocks", blocks=blocks)
        return parts + self.one("scale_and_zero", 1, 256, *ends), 8 * blocks


KERNELS: Kernels = {
    "Random": (Each(  # four numbers a thread
        "random/philox.cu", "philox_fill", "state x y, i64 size bits stream, f32 a b",
        lambda p: {"FIXED": p.fixed, "KIND": p.kind, "T": STORAGE[p.dtype], "X": STORAGE[p.given]},
        per=1024,
    ),),
    "RoiAlign": (Each(
        "regions/roi_align.cu", "roi_align",
        "x rois index y, i64 size batch, i32 image bins samples, f32 scale",
        lambda p: typed(p, I="index") | {"MAXIMUM": p.maximum, "HALF_PIXEL": p.half_pixel},
        per=128, threads=128, version=2,
    ),),
    "DeformColumns": (Each(
        "regions/deform_columns.cu", "deform_columns",
        "x offset mask columns, i64 size, i32 channels shifts image outer",
        lambda p: typed(p) | {k: v for k, v in window_macros(p.window).items() if k[-1] in "HW"},
        per=128, threads=128,
    ),),
    "NmsChosen": (Each(  # a block a class of an image
        "regions/nms.cu", "nms",
        "boxes scores most iou least left chosen found, i32 classes count",
        lambda p: {"CENTER": p.center}, count="lines", per=1,
    ),),
    "Determinant": (RowsOfLanes(), Elimination()),
    "Fourier": (Stockham(),),
    "NGrams": (Each(  # a warp a count
        "text/tfidf.cu", "tfidf", "x pool entry weight y, i64 size, i32 columns, i64 words",
        lambda p: {"X": C_TYPES[p.dtype], "MODE": p.mode}, per=8,
    ),),
    "Range": (MinMax(),),
}  # fmt: skip

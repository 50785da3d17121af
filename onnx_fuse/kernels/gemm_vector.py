"""A product of one row: a block loads its weights while the previous launch still runs.

The source is gemm/vector.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from onnx_fuse.kernels.gemm_portable import (
    VECTOR,
    aligned,
    as_norm,
    epilogue_args,
    epilogue_defines,
    epilogue_refusal,
    half_refusal,
    type_defines,
)
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.program.launch import Launches, args
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem, Hardware, KernelConfig

STEPS = 16
"""Loads of 16 bytes that a thread has on their way at once, 4 registers each."""


class Gemv(Kernel[GemmProblem]):
    """A Gemm, or a LayerNormGemm with folded weights and its statistics in the same launch."""

    name = "vector"
    source, waits = "gemm/vector.cu", "later"
    version = 2
    free_axes = "yz"

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.m != 1:
            return f"for one row, not {problem.m}"
        if reason := half_refusal(problem):
            return reason
        if problem.batch or problem.trans_a or problem.planes:
            return "no batches, and x contiguous"
        if problem.op == "LayerNormGemm" and not problem.folded:
            return "gamma and beta must be folded into the weights"
        if problem.op == "LayerNormGemm" and problem.stats:
            return "it makes the statistics itself"
        if reason := epilogue_refusal(problem, VECTOR):
            return reason
        if problem.reads_c and problem.epilogue.c_cols != 1:
            return "c is read as a dense row"
        if not aligned(problem) or (problem.k if problem.trans_b else problem.n) % 8:
            return "rows of w are not of 16-byte pieces"
        return None if self.configs(problem, hw) else f"k={problem.k} does not fit into registers"

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        shapes = (
            [("each", each, warps) for each in (1, 2) for warps in (4, 8)]
            if problem.trans_b
            else [("cols", cols, warps) for cols in (8, 16, 32, 64) for warps in (4, 8, 16)]
        )
        ways = [KernelConfig.of(warps=warps, **{name: columns}) for name, columns, warps in shapes]
        return [config for config in ways if self.fits(problem, config)]

    def _steps(self, k: int, trans_b: bool, warps: int, columns: int) -> int:
        """Loads of a thread along k."""
        return ceil(k / 256) if trans_b else ceil(k / (256 // columns * warps))

    def fits(self, problem: GemmProblem, config: KernelConfig) -> bool:
        """Whether registers hold all of k."""
        columns = config.integer("each") or config.integer("cols")
        steps = self._steps(problem.k, problem.trans_b, config.integer("warps"), columns)
        return (columns if problem.trans_b else 1) * steps <= STEPS

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """What follows the wait; blocks that come up; the bytes of w, some of them read before."""
        warps, each = config.integer("warps"), config.integer("each")
        columns = each * warps if each else config.integer("cols")
        blocks = ceil(problem.n / columns)
        nbytes = problem.k * problem.n * ITEMSIZE[problem.dtype]
        # fitted to timings on an H200 (2026-11) of decoders' products, launches overlapping
        stream = nbytes / ((1.05 if each else 0.55) * hw.bandwidth)
        start = (1.2e-6 if problem.op == "Gemm" else 1.6e-6) + 3e-10 * min(blocks * warps, 4000)
        if each:
            shape = 3e-8 * warps + 3e-7 / each
        else:
            shape = 1.6e-6 / columns + (0.4e-6 if blocks < 24 else 0.0)
        return start + shape + max(0.4 * stream, stream - 1.5e-6)

    def launch(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> Launches:
        warps, each = config.integer("warps"), config.integer("each")
        norm, columns = problem.op == "LayerNormGemm", each or config.integer("cols")
        steps = self._steps(problem.k, problem.trans_b, warps, columns)
        epilogue = epilogue_defines(problem) | ({"EACH": each} if each else {"COLS": columns})
        blocks = ceil(problem.n / (columns * warps if each else columns))
        # few blocks leave room for those that want an SM for themselves (kernel.apart)
        smem = 0 if each or blocks > hw.sm_count else hw.smem_per_block // 8
        text = "a b y z c, i32 n k, i64 ldb, f32 epsilon, mean rstd"
        launches = self.one(
            "gemm_vector", blocks, 32 * warps,
            *args(text, problem, ldb=problem.ld[1]), *epilogue_args(problem),
            smem=smem, TRANS_B=problem.trans_b, WARPS=warps, STEPS=steps, LN=norm,
            STATIC_B=problem.static_b, RMS=(norm and problem.rms) or None, **type_defines(problem),
            **epilogue,
        )  # fmt: skip
        return as_norm(problem, launches)

"""The Gemm candidate of float8 operands: gemm/wgmma_sm90.cu, which counts them in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnx_fuse.kernels.gemm_portable import FLOAT8, epilogue_refusal, result_refusal
from onnx_fuse.kernels.gemm_sm90 import STREAM, Wgmma
from onnx_fuse.kernels.kernel import rename
from onnx_fuse.kernels.rule_based import DelegatingKernel
from onnx_fuse.program.launch import Launches, Ptr
from onnx_fuse.program.problem import GemmProblem, Hardware, KernelConfig

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
KINDS = {(E4M3, E4M3): 1, (E5M2, E4M3): 2, (E4M3, E5M2): 3}
"""The types of a and b that a kernel is compiled for, and the number of each pair."""
TILES = ((2, 128, 0), (1, 256, 0), (1, 192, 0), (1, 128, 0))
"""Both warpgroups multiply, so that one does while the other adds. Pingpong takes 1.2 to 1.4 of
the time: 63 and 79 us in place of 53 and 59 at 16384 x 768 x 2304 and 16384 x 3072 x 768."""
OCCUPIED = 0.9
"""The time of a product beside that predicted for as many bytes of bfloat16 (H200, 2026-11)."""


class EightBits(DelegatingKernel[GemmProblem]):
    """y = "scale_a" "scale_b" a · b of float8 operands with k contiguous, and an epilogue.

    Both scales are one float32 on the device. Sums of 128 products are added up in float32.
    """

    name = "wgmma_float8"
    inner = Wgmma()

    def _gemm(self, problem: GemmProblem) -> GemmProblem:
        """The same product with each two float8 elements taken as one 16-bit word."""
        lda, ldb = problem.ld
        epilogue = replace(problem.epilogue, bias_dtype=problem.epilogue.bias_dtype or problem.out)
        return replace(
            problem, dtype="bfloat16", b_dtype="", out_dtype=problem.out, k=problem.k // 2,
            lda=lda // 2, ldb=ldb // 2, epilogue=epilogue,
        )  # fmt: skip

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if (problem.dtype, problem.b_dtype or problem.dtype) not in KINDS:
            return f"for float8 operands, not {problem.dtype}"
        if problem.trans_a or not problem.trans_b:
            return "float8 operands lie along k"
        if problem.batch:
            return "no batches"
        if reason := epilogue_refusal(problem, FLOAT8) or result_refusal(problem):
            return reason
        if problem.planes or problem.epilogue.alpha != 1 or problem.epilogue.residual == "norm":
            return "it multiplies the sum by nothing but the operands' scales"
        if any(step % 16 for step in (problem.k, *problem.ld)):
            return f"rows of float8 are multiples of 16, not k={problem.k}"
        return self.inner.supports(self._gemm(problem), hw)

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        """Those of 16-bit words whose tiles leave registers for the sums of 128 products.

        CTAs do not share tiles: that was not tried with float8.
        """
        configs = self.inner.configs(self._gemm(problem), hw)
        apart = (how for how in configs if how.integer("splits") != STREAM)
        return [how for how in apart if how.integers("tile") in TILES]

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """That of words, which are multiplied at the rate of 16-bit elements."""
        seconds = self.inner.cost(self._gemm(problem), config, hw)
        return hw.launch_seconds + OCCUPIED * (seconds - hw.launch_seconds)

    def launch(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> Launches:
        kind = KINDS[problem.dtype, problem.b_dtype or problem.dtype]
        product, *rest = self.inner.launch(self._gemm(problem), config, hw, EIGHT=kind)
        return (rename(product, {"row2": Ptr("scale_a"), "row3": Ptr("scale_b")}), *rest)

"""SlopeProduct, PartSums, MergedMoments and Fold: the small passes between products."""

from __future__ import annotations

from onnx_fuse.kernels.kernel import Kernels, roofline
from onnx_fuse.kernels.norm_launches import act_grad, fold_columns, sum_parts
from onnx_fuse.kernels.rule_based import HeuristicKernel
from onnx_fuse.program.launch import Launches, args
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig
from onnx_fuse.program.problems import Fold, MergedMoments, PartSums, SlopeProduct


class SlopeOfProduct(HeuristicKernel[SlopeProduct]):
    """pointwise/act_grad.cu. Operands: dy z dz part dbias."""

    source = "pointwise/act_grad.cu"
    free_axes = "z"

    def cost(self, problem: SlopeProduct, config: KernelConfig, hw: Hardware) -> float:
        """Seconds for its bytes, at twice the rate where L2 still holds dy."""
        whole = 3 * problem.m * problem.n * ITEMSIZE[problem.dtype]
        rate = hw.cached_bandwidth if whole <= hw.l2_bytes / 2 else hw.bandwidth
        return hw.launch_seconds + problem.bytes / rate

    def launch(self, problem: SlopeProduct, config: KernelConfig, hw: Hardware) -> Launches:
        act = problem.act
        return (act_grad(problem.m, problem.n, problem.dtype, act, problem.act_alpha),)


class SumOfParts(HeuristicKernel[PartSums]):
    """norm/sum_parts.cu. Operands: part out0."""

    source = "norm/sum_parts.cu"
    free_axes = "z"

    def launch(self, problem: PartSums, config: KernelConfig, hw: Hardware) -> Launches:
        return (sum_parts(problem.parts, problem.n, 1, problem.out_dtype),)


class Merged(HeuristicKernel[MergedMoments]):
    """norm/merge_moments.cu. Operands: part mean variance."""

    source = "norm/merge_moments.cu"

    def launch(self, problem: MergedMoments, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch; a block has fewer columns where these are long, as there are few."""
        columns, rows = (
            (4, 256) if problem.parts > 1024 else (8, 128 if problem.parts > 256 else 32)
        )
        return self.one(
            "merge_moments", -(-problem.n // columns), columns * rows,
            *args("part, i32 m n, mean variance", problem),
            COLUMNS=columns, ROWS=rows,
        )  # fmt: skip


class Columns(HeuristicKernel[Fold]):
    """norm/fold.cu. Operands: w gamma beta c low wq cs cv, of several folds with their number."""

    source, waits = "norm/fold.cu", "later"

    def cost(self, problem: Fold, config: KernelConfig, hw: Hardware) -> float:
        """Seconds for its bytes, and for a launch.

        Those of training read float32 and write two copies, at a higher rate and with a longer
        start (24 of GPT-2's took 103 us, 16 of ConvNeXt's 26, on an H200 in 2026-11).
        """
        costs = self.numbers(hw)
        if problem.master:
            own = {"memory": costs["master"]}
            return roofline(hw, own, problem.bytes) + costs["master_start"]
        return roofline(hw, costs, problem.bytes)

    def launch(self, problem: Fold, config: KernelConfig, hw: Hardware) -> Launches:
        return (fold_columns(problem.shapes, problem.dtype, hw, master=problem.master),)


KERNELS: Kernels = {
    "SlopeProduct": (SlopeOfProduct(),),
    "PartSums": (SumOfParts(),),
    "MergedMoments": (Merged(),),
    "Fold": (Columns(),),
}

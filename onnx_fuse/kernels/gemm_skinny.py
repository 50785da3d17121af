"""Few rows, or small sizes: one launch that streams w once (cuda_src/layernorm_gemm/skinny.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.kernels.gemm_portable import (
    aligned,
    as_norm,
    epilogue_args,
    epilogue_defines,
    half_refusal,
    plain_refusal,
    slope_seconds,
    type_defines,
)
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.program.launch import Launches, args
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.size import coarse


class SmallM(Kernel[GemmProblem]):
    """A Gemm, or a LayerNormGemm with its statistics in the same launch."""

    name = "skinny"
    source = "layernorm_gemm/skinny.cu"
    free_axes = "z"

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if reason := half_refusal(problem):
            return reason
        if problem.batch or problem.trans_a:
            return "no batches, and rows of x contiguous"
        if coarse(problem.m) > 512:
            return f"{problem.m} rows (at most 512): w would be read too often"
        if problem.k % 8 or not aligned(problem):
            return f"k={problem.k} is not a multiple of 8, or rows are not 16-byte aligned"
        if not problem.trans_b and problem.n % 2:
            return f"rows of w are read in pairs of columns, not n={problem.n}"
        return plain_refusal(problem)

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        m, n, k = problem.m, problem.n, problem.k
        configs = []
        for mt in (1,) if m <= 16 else (1, 2):
            for nt in (4, 2, 1) if problem.trans_b else (4, 2):
                for warps, wn in ((16, 1), (16, 4), (8, 1), (8, 2), (4, 1)):
                    for cluster in (1, 2, 4, 8) if hw.cc >= 90 else (1,):
                        share = warps // wn * cluster
                        if (not problem.trans_b and n % nt) or (warps == 16 and nt + 2 * mt > 6):
                            continue
                        # k is worth sharing while a lane still has a chunk of its own
                        if share > max(4, ceil(k / 32)) or (m > 64 and cluster > 1):
                            continue
                        configs.append(
                            KernelConfig.of(mt=mt, nt=nt, wn=wn, warps=warps, cluster=cluster)
                        )
        return configs

    def fits(self, problem: GemmProblem, config: KernelConfig) -> bool:
        return problem.trans_b or problem.n % config.integer("nt") == 0

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """Latency of load, multiply, add, store; w's bytes; L2's bytes."""
        mt, nt, wn, warps, cluster = self._shape(config)
        blocks_m, blocks_n = ceil(problem.m / (16 * mt)), ceil(problem.n / (8 * nt * wn))
        blocks = blocks_m * blocks_n * cluster
        chunks = ceil(problem.k / 32 / (warps // wn * cluster))
        unroll = self._unroll(mt, nt, warps, problem.op != "Gemm")
        per_sm = max(1, 16 // warps)
        waves = ceil(blocks / (hw.sm_count * per_sm))
        # bytes in flight on an SM, against latency times bandwidth (about 40 KB)
        rows = 1 if problem.m <= 8 else 2 * mt
        flight = min(chunks, unroll) * warps * 512 * (nt + rows)
        resident = min(per_sm, ceil(blocks / hw.sm_count))
        fed = min(1.0, blocks / hw.sm_count) * min(1.0, flight * resident / 4e4)
        read = 8 * rows + 8 * nt * wn
        l2 = blocks / cluster * 2 * problem.k * read / (1.2 * hw.bandwidth)
        stream = problem.bytes / (0.85 * hw.bandwidth * max(fed, 0.02))
        chain = (0.8 + 0.7 * waves * ceil(chunks / unroll)) * 1e-6
        # fitted to 180 timings on an H200 (2026-11): what the terms above leave out
        kind = 1 if problem.op == "Gemm" else 1.35 if problem.folded else 1.75
        sharing = {1: 1.0, 2: 1.2, 4: 1.5, 8: 1.8}[cluster]
        side = {4: 0.97, 8: 1.0, 16: 0.99}[warps] * (1.1 if wn > 1 else 1.0)
        slope = slope_seconds(problem, 4 * mt * nt * wn / warps / cluster)
        return slope + hw.launch_seconds / 2 + 1.45 * kind * sharing * side * max(chain, stream, l2)

    def _shape(self, config: KernelConfig) -> tuple[int, int, int, int, int]:
        mt, nt, wn, warps, cluster = (
            config.integer(name) for name in ("mt", "nt", "wn", "warps", "cluster")
        )
        return mt, nt, wn, warps, cluster

    def _unroll(self, mt: int, nt: int, warps: int, norm: bool) -> int:
        """Chunks in each of a lane's two batches: what the registers allow (4 a 16-byte load)."""
        fit = ((80 if warps == 16 else 176) - 64 * norm) // (8 * (nt + 2 * mt))
        return 4 if fit >= 4 else 2 if fit >= 2 else 1

    def launch(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> Launches:
        mt, nt, wn, warps, cluster = self._shape(config)
        mode = 0 if problem.op != "LayerNormGemm" else 1 if problem.folded else 2
        text = "a b y z c, i32 m n k, i64 steps, f32 epsilon, mean rstd gamma beta"
        columns = 8 * nt * wn
        grid = (cluster * ceil(problem.n / columns), ceil(problem.m / (16 * mt)), 1)
        smem = ITEMSIZE["float32"] * (warps // wn) * 16 * mt * columns
        launches = self.one(
            "gemm_skinny", grid, 32 * warps, *args(text, problem, steps=problem.ld),
            *epilogue_args(problem), smem=smem, cluster=cluster,
            TP=C_TYPES[problem.dtype], TRANS_B=problem.trans_b, MT=mt, NT=nt, WN=wn, WARPS=warps,
            CLUSTER=cluster, HALF=problem.m <= 8, UNROLL=self._unroll(mt, nt, warps, mode == 2),
            LN=mode, **type_defines(problem), **epilogue_defines(problem),
            RMS=problem.rms or None,
        )  # fmt: skip
        return as_norm(problem, launches)

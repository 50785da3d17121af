"""The Hopper Gemm candidate for float32 products of tf32: TMA and wgmma (gemm/tf32_sm90.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.kernels.gemm_portable import (
    aligned,
    each_has_steps,
    epilogue_defines,
    plain_refusal,
    portable_args,
    slope_seconds,
)
from onnx_fuse.kernels.gemm_sm90 import sum_of_parts
from onnx_fuse.kernels.kernel import Kernel, matrices, rename
from onnx_fuse.program.launch import Launches, Num, Ptr
from onnx_fuse.program.problem import GemmProblem, Hardware, KernelConfig

BK = 32
"""k of a step, 128 bytes."""
TILES = ((64, 2), (128, 2), (256, 1))
"""Columns of a tile of 128 rows, and the blocks that share a multiprocessor."""
PRODUCT_SECONDS, OPERAND_SECONDS, ALONE_SECONDS = 1.63e-11, 8.6e-10, 5.2e-8
"""An element's products in a step, a row of an operand's step, and what a step takes longer where
no other block of the multiprocessor hides it. Fitted, as what follows, to 132 timings of the 25
products and convolutions of ResNet-50, 32 images (H200, 2026-11)."""
TILE_SECONDS, STORE_SECONDS, LAUNCH_SECONDS = 4.5e-6, 7e-11, 1.4e-6
"""The begin and end of the tiles that share a multiprocessor, an element stored, a launch."""
READ, WRITTEN, ADDED, PARTS = 1.04, 1.4, 1.5, 1.13
"""How much longer than a copy's a byte takes that is read or written, that the epilogue reads, and
that parts of sums have."""
REST = 0.1
"""The share that counts of what takes less long than the longest."""


class Tf32(Kernel[GemmProblem]):
    """The candidate of gemm/tf32_sm90.cu.

    Configurations: `tile` (columns, blocks of a multiprocessor) and `splits` parts of k.
    """

    name = "wgmma_tf32"
    source, waits = "gemm/tf32_sm90.cu", "later"

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if hw.arch != "sm_90a":
            return f"wgmma needs sm_90a, this is {hw.arch}"
        if (problem.dtype, problem.out, problem.math) != ("float32", "float32", "tf32"):
            return f"{problem.dtype} {problem.math} -> {problem.out}: only float32 by tf32"
        if problem.batch or problem.trans_a or not problem.trans_b:
            return "wgmma takes single matrix multiplications of tf32 whose k is contiguous"
        if problem.rows or problem.planes or problem.epilogue.gate:
            return "no statistics of rows, no planes, no gates"
        if problem.n % 2 or not aligned(problem):
            return "N is even, and rows begin at multiples of 16 bytes"
        empty = any(size < 1 for size in (problem.m, problem.n, problem.k))
        if empty or problem.m * problem.n >= 2**40:
            return "empty or too large"
        return plain_refusal(problem.replace(dw=False) if problem.epilogue.dw is True else problem)

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        """Each tile that is no wider than y needs, with k in parts where tiles are few."""
        steps, rows = ceil(problem.k / BK), ceil(problem.m / 128)
        configs = []
        for bn, resident in TILES:
            if bn >= 2 * problem.n and bn > 64:
                continue
            tiles = rows * ceil(problem.n / bn)
            for splits in (1, 2, 3, 4, 6, 8):
                few = tiles * splits <= 2 * resident * hw.sm_count and steps >= 4 * splits
                if splits == 1 or (few and each_has_steps(steps, splits)):
                    configs.append(KernelConfig.of(tile=(bn, resident), splits=splits))
        return configs

    def fits(self, problem: GemmProblem, config: KernelConfig) -> bool:
        splits = config.integer("splits")
        return splits <= 1 or each_has_steps(ceil(problem.k / BK), splits)

    def workspace(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> int:
        splits = config.integer("splits")
        return 4 * splits * problem.m * problem.n if splits > 1 else 0

    def parts(self, problem: GemmProblem, config: KernelConfig) -> int:
        columns = 1024 if config.integer("splits") > 1 else config.integers("tile")[0]
        return ceil(problem.n / columns)

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        return self.seconds(problem, config, hw, 4 * problem.k * (problem.m + problem.n))

    def seconds(self, problem: GemmProblem, config: KernelConfig, hw: Hardware, read: int) -> float:
        """The tiles' time or the memory's for operands of `read` bytes, then the sum of parts."""
        epilogue, size = problem.epilogue, 4 * problem.m * problem.n
        written = size * (1 + bool(epilogue.save_z or epilogue.save_act))
        added = size * bool(problem.reads_c)
        memory = (READ * read + WRITTEN * written + ADDED * added) / hw.bandwidth + TILE_SECONDS
        tiles = self._tiles_seconds(problem, config, hw)
        seconds = (1 - REST) * max(tiles, memory) + REST * (tiles + memory) + LAUNCH_SECONDS
        if (splits := config.integer("splits")) > 1:
            seconds += PARTS * size * (splits + 1) / hw.bandwidth
        # a chip at its limit of power takes longer for long products, whose tiles rank by the rest
        return max(seconds, problem.flops / (0.8 * hw.rate("tf32")) + 0.01 * seconds)

    def _tiles_seconds(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """A multiprocessor's tiles; a step's products, or its operands, whichever takes longer."""
        (bn, resident), splits = config.integers("tile"), max(1, config.integer("splits"))
        blocks = ceil(problem.m / 128) * ceil(problem.n / bn) * splits
        rounds = ceil(blocks / (hw.sm_count * resident))
        together = ceil(ceil(blocks / hw.sm_count) / rounds)
        step = max(128 * bn * PRODUCT_SECONDS, (128 + bn) * OPERAND_SECONDS)
        step = max(step * together, step + ALONE_SECONDS)
        steps = ceil(ceil(problem.k / BK) / splits)
        tail = TILE_SECONDS + 128 * bn * together * STORE_SECONDS + slope_seconds(problem, bn / 2)
        return rounds * (steps * step + tail)

    def launch(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> Launches:
        (bn, resident), splits = config.integers("tile"), max(1, config.integer("splits"))
        m, n, k = problem.m, problem.n, problem.k
        lda, ldb = problem.ld

        stage = (128 + bn) * 128 + 16
        room = (hw.smem_per_block + 1024) // resident - 1024  # of which each block's 1024 are lost
        stages = min(8, (room - 1024) // stage)
        kind = C_TYPES[problem.epilogue.bias_dtype or "float32"]
        macros = epilogue_defines(problem) if splits == 1 else {}
        product = self.one(
            "gemm_tf32", (ceil(m / 128) * ceil(n / bn), splits, 1), 288,
            matrices("a", "tf32", k, m, lda, (BK, 128)), matrices("b", "tf32", k, n, ldb, (BK, bn)),
            *portable_args(problem), Num("i32", ceil(ceil(k / BK) / splits)), smem=stages * stage,
            BN=bn, STAGES=stages, RESIDENT=resident, TV=kind,
            TR=kind if problem.epilogue.row_bias else None, **macros,
        )  # fmt: skip
        if splits == 1:
            return product
        return rename(product[0], {"y": Ptr("workspace")}), sum_of_parts(problem, splits)

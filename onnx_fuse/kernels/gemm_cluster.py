"""Few tiles on Hopper: k split inside clusters, one launch (cuda_src/gemm/cluster_sm90.cu)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, log2

from onnx_fuse.kernels.gemm_portable import (
    as_norm,
    each_has_steps,
    epilogue_args,
    epilogue_defines,
    half_refusal,
    plain_refusal,
    slope_seconds,
    type_defines,
)
from onnx_fuse.kernels.kernel import Kernel, matrices
from onnx_fuse.program.launch import Launches, Ptr, TensorMap, args
from onnx_fuse.program.problem import GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.size import coarse, upper_bound

BK = 64


class Cluster(Kernel[GemmProblem]):
    """A Gemm, or a LayerNormGemm with folded weights and its statistics in the same launch."""

    name = "cluster"
    source, waits = "gemm/cluster_sm90.cu", "later"
    norms = False  # whether gamma and beta are applied to a in shared memory

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if hw.arch != "sm_90a":
            return f"wgmma needs sm_90a, this is {hw.arch}"
        if reason := half_refusal(problem):
            return reason
        if problem.batch or problem.planes:
            return "one matrix multiplication at a time"
        norm = problem.op == "LayerNormGemm"
        if norm and not problem.folded:
            return "gamma and beta must be folded into the weights"
        if norm and (problem.k % 8 or problem.trans_a):
            return f"row statistics take 8 of k={problem.k} at a time, k contiguous"
        if problem.epilogue.accumulate:
            return "y is written, not added to"
        if reason := plain_refusal(problem):
            return reason
        steps = [x * 2 for x in problem.ld]
        if problem.align % 16 or any(step % 16 for step in steps):
            return f"TMA needs strides that are multiples of 16 bytes, not {steps}"
        tiles = ceil(problem.m / 128) * ceil(problem.n / 128)
        if problem.m > 64 and coarse(tiles) > hw.sm_count:
            return f"{tiles} tiles of 128 x 128, more than there are SMs"
        if ceil(problem.n / 256) > 2 * hw.sm_count:
            return f"n={problem.n}: more than two tiles an SM"
        if any(size < 1 for size in (problem.m, problem.n, problem.k)):
            return "empty"
        return None

    def _shape(self, config: KernelConfig) -> tuple[int, int, int, int, int]:
        of = config.integer
        return of("wgm"), of("bn"), of("split"), of("share"), of("room")

    def _rows(self, problem: GemmProblem, wgm: int, share: int) -> int:
        """Rows of a that are loaded: the others of a 64-row block are never stored."""
        if problem.trans_a or problem.m > 32 * wgm:
            return 64 * wgm
        return ceil(problem.m / (8 * share)) * 8 * share

    def _steps(self, problem: GemmProblem, config: KernelConfig) -> int:
        """64-wide steps of k that a CTA makes."""
        return ceil(ceil(problem.k / BK) / config.integer("split"))

    def _held(self, problem: GemmProblem, config: KernelConfig) -> int:
        """Steps of which a stays in shared memory."""
        return self._steps(problem, config) if self.norms else 0

    def _smem(self, problem: GemmProblem, config: KernelConfig) -> Callable[[int], int]:
        """A function from the number of stages to the bytes of shared memory that they take."""
        wgm, bn, split, share, _ = self._shape(config)
        rows, held = self._rows(problem, wgm, share), self._held(problem, config)
        stage = ((0 if held else rows) + bn) * BK * 2
        sums = (split - 1) * (bn // split // 8) * ceil(rows / 16) * 512
        moments = split * rows * 8 if self._stats(problem) else 0
        rest = sums + moments + 2 * (bn // split) * 4 + 16 + held * (BK * 4 + 8)
        resident = held * rows * BK * 2
        # the last stage's a is read as whole 64-row blocks
        least = wgm * 8192 - stage
        return lambda stages: resident + stages * stage + max(rest + 16 * stages, least)

    def _stages(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> int:
        # an SM has 1 KB beyond what one block may take, and keeps 1 KB of each block's for itself
        room = config.integer("room")
        limit = (hw.smem_per_block + 1024) // room - 1024
        # of open sizes those of the largest of the class: a CTA may have fewer steps than stages
        steps = upper_bound(self._steps(problem, config))
        most = min(steps, limit // (config.integer("bn") * BK * 2))
        smem = self._smem(problem, config)
        return next((s for s in range(most, 0, -1) if smem(s) <= limit), 0)

    def _stats(self, problem: GemmProblem) -> bool:
        return problem.op == "LayerNormGemm" and not problem.stats

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        """Tiles, k shared by 1 to 8 CTAs, a's tile by 1 to 4, one or two CTAs an SM.

        Clusters of eight, which find the least room beside the launch before, are tried with the
        last ones late as well, which is the same where b is not read ahead.
        """
        configs = []
        steps, whole = ceil(problem.k / BK), 16 if problem.epilogue.gate else 8
        for wgm in (1,) if problem.m <= 64 else (1, 2):
            for bn in (32, 64, 96, 128, 192, 256) if problem.trans_b else (64, 128, 192, 256):
                tiles_n = ceil(problem.n / bn)
                for split in (1, 2, 4, 8):
                    per = ceil(steps / split)
                    if (
                        bn // split % whole
                        or (split - 1) * per >= steps
                        or bn >= 2 * problem.n + 64
                    ):
                        continue
                    # three warpgroups and the producer have 128 registers a thread
                    if self._stats(problem) and wgm * bn > 256:
                        continue
                    # of which a gate of 192 columns in one CTA would want two more
                    if self._stats(problem) and whole == 16 and (bn, split) == (192, 1):
                        continue
                    for share in (1, 2, 4):
                        rows = self._rows(problem, wgm, share)
                        if split * share > 8 or tiles_n % share or rows > 64 * wgm:
                            continue
                        ctas = ceil(problem.m / (64 * wgm)) * tiles_n * split
                        for room in (2, 1):
                            how = KernelConfig.of(
                                wgm=wgm, bn=bn, split=split, share=share, room=room
                            )
                            stages = self._stages(problem, how, hw)
                            if ctas <= 2 * room * hw.sm_count and stages >= min(per, 3):
                                configs.append(how)
                                if room == 1 and split * share == 8 and not self.norms:
                                    configs.append(how.replace(late=1))
                            if stages == per:  # more room would change nothing
                                break
        return configs

    def fits(self, problem: GemmProblem, config: KernelConfig) -> bool:
        """Whether each CTA of a cluster has steps of k, and tiles to share a's with."""
        _, bn, split, share, _ = self._shape(config)
        if split > 1 and not each_has_steps(ceil(problem.k / BK), split):
            return False
        return share == 1 or ceil(problem.n / bn) % share == 0

    def _few_rows_seconds(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """b streams from memory while the steps of a CTA follow each other; waves of CTAs.

        Fitted to 900 timings of decoders' products on an H200 (2026-11), each launch overlapping
        the one before: 10 % of a time is left (docs/kernel-notes.md).
        """
        wgm, bn, split, share, room = self._shape(config)
        rows, per, stats = (
            self._rows(problem, wgm, share), self._steps(problem, config), self._stats(problem)
        )  # fmt: skip
        threads = 128 * wgm + 128 * stats + 32
        registers = 28 + bn / 2 + 4 * stats + (bn / 2 / split if problem.epilogue.gate else 0)
        resident = max(1, min(room, 65536 // (threads * 8 * ceil(registers / 8))))
        slots = resident * hw.sm_count * {1: 1.0, 2: 1.0, 4: 0.965, 8: 0.92}[split * share]
        ctas = ceil(problem.m / (64 * wgm)) * ceil(problem.n / bn) * split
        memory = problem.bytes / (0.86 * hw.bandwidth)
        step = max(9.4e-8 + 7e-10 * bn + 1.4e-9 * rows, 1.23e-6 / self._stages(problem, config, hw))
        flow: float = (memory**3.6 + (per * step) ** 3.6) ** (1 / 3.6)
        sums = 3.9e-10 * log2(split) * rows * bn / split
        late = 1e-7 if config.integer("late") else 0.0
        waves = 2.3e-6 * (ceil(ctas / slots) - 1)
        # where all shared memory is taken the next launch cannot read its weights ahead
        crowd = 6e-7 * min(1.0, ctas / (room * hw.sm_count))
        return 1.2e-6 + 0.57e-6 * stats + flow + sums + waves + crowd + late

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """A launch, the slowest of the flows, what does not fit into the stages, the exchange."""
        if problem.m <= 32 and not self.norms:
            return self._few_rows_seconds(problem, config, hw)
        wgm, bn, split, share, room = self._shape(config)
        rows, per = self._rows(problem, wgm, share), self._steps(problem, config)
        stages = self._stages(problem, config, hw)
        ctas = ceil(problem.m / (64 * wgm)) * ceil(problem.n / bn) * split
        # clusters do not fill every group of SMs
        slots = room * hw.sm_count * {1: 1.0, 2: 1.0, 4: 0.95, 8: 0.85}[split * share]
        deep, step = ceil(ctas / hw.sm_count), per * BK * 2
        # fitted to 200 timings on an H200 (2026-11), each launch overlapping the one before
        l2 = ctas * step * (rows / share + bn) / (2.1 * hw.bandwidth)
        per_sm = 1.2 * hw.rate(problem.dtype) / hw.sm_count
        products = deep * 2 * 64 * wgm * bn * per * BK / per_sm
        stats = deep * rows / share * per * BK * 3e-11 if self._stats(problem) else 0.0
        memory = problem.bytes / (1.05 * hw.bandwidth)
        sums = (split - 1) / split * rows * bn * 4 / 3.8e10
        turns = 0.76e-6 * (per / stages - 1) + (0.36e-6 if per > stages else 0.0)
        waves = 4e-6 * (ceil(ctas / slots) - 1)
        # where all SMs are taken the next launch cannot read its weights ahead
        crowd = 0.26 * min(1.0, ctas / (room * hw.sm_count)) * problem.bytes / hw.bandwidth
        sums += slope_seconds(problem, bn + 10)
        if problem.reads_c:  # c of a wide tile is loaded in turns
            sums += 2.7e-8 * max(0, bn - 64)
        start = 1.12 * hw.launch_seconds + (2.3e-6 if stats else 0.3e-6) * (wgm - 1)
        # what the launch before leaves of the SMs is not known here: for measurements to choose
        late = 1e-7 if config.integer("late") else 0.0
        return start + max(l2, products, stats, memory) + sums + turns + waves + crowd + late

    def launch(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> Launches:
        wgm, bn, split, share, _ = self._shape(config)
        m, n, k = problem.m, problem.n, problem.k
        rows, stages = self._rows(problem, wgm, share), self._stages(problem, config, hw)
        stats = self._stats(problem)
        lda, ldb = problem.ld
        step_n = next(step for step in (64, 8, 2, 1) if n % step == 0)
        if step_n == 64 and (problem.trans_b or bn % 64):
            step_n = 8
        types, epilogue = type_defines(problem), epilogue_defines(problem)
        grid = split * share * ceil(m / (64 * wgm)) * ceil(n / (bn * share))
        # with every SM taken nothing is read ahead, and a's first tile would only wait behind b's:
        # 7.7 us in place of 7.2 at 512x768x3072 (H200, 2026-11)
        early = problem.static_b and grid <= 0.9 * config.integer("room") * hw.sm_count
        epilogue |= {
            "LATE": (early and config.integer("late")) or None, "NORM": self.norms or None,
            "HELD": self._held(problem, config) if self.norms else None,
            "STATS": stats or None, "RMS": (problem.rms and stats) or None,
        }  # fmt: skip

        load = partial(matrices, dtype=problem.dtype)
        map_a = (
            load("a", line=m, lines=k, step=lda, box=(64, BK // share))
            if problem.trans_a
            else load("a", line=k, lines=m, step=lda, box=(BK, rows // share))
        )
        if problem.trans_b:
            map_b = load("b", line=k, lines=n, step=ldb, box=(BK, bn))
        elif step_n == 64:  # a tile's blocks of 64 columns by one load
            map_b = TensorMap(
                Ptr("b"), problem.dtype, (64, k, n // 64), (ldb * 2, 128), (64, BK, bn // 64)
            )
        else:
            map_b = load("b", line=n, lines=k, step=ldb, box=(64, BK))
        text = f"y z {'c' if problem.reads_c else 'none'}, i32 m n k, f32 epsilon, mean rstd"
        norm_args = args("gamma beta" if self.norms else "none none")
        launches = self.one(
            "gemm_cluster", grid, 128 * wgm + (128 if stats else 0) + 32, map_a, map_b,
            *args(text, problem), *epilogue_args(problem), *norm_args,
            smem=self._smem(problem, config)(stages), cluster=split * share,
            TRANS_A=problem.trans_a, TRANS_B=problem.trans_b, WGM=wgm, ROWS=rows, BN=bn,
            SPLIT=split, SHARE=share, STAGES=stages, N_STEP=step_n, STATIC_B=early,
            RING=upper_bound(self._steps(problem, config)) > stages, **types, **epilogue,
        )  # fmt: skip
        if self.norms:
            return as_norm(problem, launches, col0="none", row0="none", row1="none")
        return as_norm(problem, launches, row0="rstd", row1="mean")


class NormCluster(Cluster):
    """A LayerNormGemm whose weights are not folded: a's rows are normalised in shared memory."""

    name = "norm_cluster"
    norms = True

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.folded:
            return "the weights are folded: gamma and beta are not given"
        if problem.stats:
            return "it makes the statistics itself"
        return super().supports(problem.replace(folded=True), hw)

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """The product, which waits for all of a, and what a thread rewrites of it."""
        wgm, _, _, share, _ = self._shape(config)
        threads, held = 128 * wgm + 128, self._held(problem, config)
        chunks = ceil(self._rows(problem, wgm, share) * 8 / threads) * held
        return super().cost(problem, config, hw) + 0.6e-6 + 5e-8 * chunks

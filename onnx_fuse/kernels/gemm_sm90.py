"""The Hopper Gemm candidates: TMA and wgmma (gemm/wgmma_sm90.cu), split k, split fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from onnx_fuse.cuda.macros import defines
from onnx_fuse.kernels.gemm_portable import (
    CHOICES,
    HALVES,
    each_has_steps,
    epilogue_args,
    epilogue_defines,
    epilogue_refusal,
    gate_refusal,
    normed,
    result_refusal,
    slope_seconds,
    type_defines,
)
from onnx_fuse.kernels.kernel import Kernel, launch, matrices, rename
from onnx_fuse.kernels.norm_launches import row_stats
from onnx_fuse.kernels.rule_based import DelegatingKernel
from onnx_fuse.program.epilogue import EXP_COLUMNS
from onnx_fuse.program.launch import Launch, Launches, Ptr, TensorMap, args
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.size import minimum, upper_bound

# MI, BN, PINGPONG: the tile is 128 MI (64 MI when pingpong) x BN
TILES = (
    (1, 256, 0), (2, 128, 0), (2, 192, 1), (2, 128, 1), (1, 256, 1), (1, 192, 1), (1, 128, 1),
    (1, 128, 0), (1, 64, 0), (1, 144, 0), (1, 192, 0),
)  # fmt: skip
PLANES = {"bf16x3": 2, "bf16x6": 3}
"""Products of float32 -> bf16 planes that an operand is split into."""
BK = 64
BOX = 2048
LONG_SECONDS, SHARED_B = 5e-5, 0.98
"""For long products, prefer CTAs that share b in pairs (multicast), because it saves power. Alone
they take the same time, or 6 % less for long k, but they read a third less from L2, and the chip
may be at its power limit: a step of GPT-2 took 29.0 ms, not 29.4 (H200 at 675 W, 2026-11)."""
SIDE_SECONDS, OWN_SECONDS = 3e-6, 0.6e-6
"""What the first tiles wait for statistics made beside them; from the only one (H200, 2026-11)."""
MOMENT_SECONDS, MOMENT_HIDDEN = 4e-11, 1.4e-6
"""An element's share of the moments of its column, and the products of a tile from which on the
other warpgroup's hide a part: 200704 x 64 x 256 took 58.7 us in place of 38.3, 12544 x 256 x 1024
16.2 in place of 11.8, 50176 x 512 x 128 19.6 in place of 18.2 (H200, 2026-11)."""
SIDE_WARPS = 3
ACT_AND_Z = 2e-10
"""Seconds that an SM needs for an element whose activation and pre-activation are both stored:
25088 x 768 with k = 192 took 38 us (H200, 2026-11)."""
PAST_SECONDS, PIXEL_SECONDS, FETCH_SECONDS = 3.9e-9, 2.5e-9, 4e-7
"""TMA zero-fill costs 6.9 clocks for a row of a box that reaches past its tensor's end, an im2col
row of pixels 4.4; the last is the overhead of a tile, doubled where nothing overlaps its epilogue.
2048 x 640 with k = 5760, whose last tile has 64 of 192 columns, took 49 us where its products take
27; 401408 x 16 with k = 16 and c took 60 us, 48 of them for such rows (H200, 2026-11)."""
SHARED_ROW = 1e-8
"""A row of b that shares its line of 128 bytes with others, which all multiprocessors ask for at
once; twice as much where it begins within a sector. 401408 x 64 with k = 16 took 51 us, and 34 with
each row in a line of its own; 100352 x 72 with k = 24 took 25 and 16 (H200, 2026-11)."""
TIE = 1e-3
"""Weight of a tile's own time as a tie-breaker where all tiles wait for the same thing."""
STREAM = 0
"""Value of the number of splits for stream-K: CTAs share the k-steps of all tiles."""
STREAM_SECONDS, STREAM_TILES = 4e-6, 0.7
"""What it takes to leave and to add sums, and how many tiles a CTA has at least: 96 tiles of k =
16384 took 113 us in place of 125 so, but 36 took 44 in place of 41, as each is shared by more; and
with more tiles than CTAs a step of a Llama took 51.3 ms in place of 46.2 (H200, 2026-11)."""


def side_lanes(k: int) -> int:
    """Lanes that read a row of k elements, four pieces of 16 bytes each at a time."""
    return 2 if k <= 128 else 8 if k <= 1024 else 16 if k <= 2048 else 32


def side_seconds(problem: GemmProblem, hw: Hardware) -> float:
    """Seconds that the idle warps need for the rows' statistics, 1.25 us a load (H200, 2026-11)."""
    lanes = side_lanes(problem.k)
    tickets = ceil(ceil(problem.m / (32 // lanes)) / (SIDE_WARPS * hw.sm_count))
    return tickets * ceil(problem.k / (32 * lanes)) * 1.25e-6


def columns(problem: GemmProblem) -> int:
    """How many column vectors the epilogue reads."""
    turned = problem.epilogue.dw == "turned"
    if problem.epilogue.layernorm or normed(problem) or problem.epilogue.layer_scale or turned:
        return 2
    return int(bool(problem.epilogue.bias or problem.epilogue.dw))


def direct(problem: GemmProblem, splits: int = 1) -> bool:
    """Whether y leaves by plain stores: TMA stores 16-bit rows of a multiple of 16 bytes."""
    stride = problem.ldy or problem.n
    return splits > 1 or ITEMSIZE[problem.out] != 2 or stride % 8 != 0


def streamed(problem: GemmProblem) -> int:
    """The bytes that a product moves, with c and z."""
    more = problem.reads_c + bool(problem.epilogue.save_z or problem.epilogue.save_act)
    each = problem.batches * problem.m * problem.n * ITEMSIZE[problem.out]
    return problem.bytes + more * each


def sum_of_parts(problem: GemmProblem, splits: int) -> Launch:
    """The sum of parts of a product in the workspace, with the product's epilogue."""
    types = {name: t for name, t in type_defines(problem).items() if name in ("TO", "TV", "TR")}
    made = args("workspace, i32 splits m n, y z c", problem, splits=splits)
    return launch(
        "gemm/reduce.cu", "gemm_reduce", (problem.m, ceil(problem.n / 1024), 1), 256, *made,
        *epilogue_args(problem), Ptr("part"), **types, **epilogue_defines(problem),
    )  # fmt: skip


class Wgmma(Kernel[GemmProblem]):
    """The candidate of gemm/wgmma_sm90.cu."""

    name = "wgmma"
    source, waits = "gemm/wgmma_sm90.cu", "later"
    early = defines(NEXT_ALONE=1)

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if hw.arch != "sm_90a":
            return f"wgmma needs sm_90a, this is {hw.arch}"
        planes = problem.planes
        if problem.dtype not in HALVES:
            return f"no wgmma candidate for {problem.dtype} operands"
        if reason := result_refusal(problem) or epilogue_refusal(problem, CHOICES):
            return reason
        if planes and (problem.batch or planes not in (2, 3)):
            return f"planes={planes} with batch={problem.batch}"
        extra = problem.reads_c
        dense_c = problem.ldc
        if extra and dense_c != (problem.n, 1):
            return f"c is read as a dense [M, N], its strides are {dense_c}"
        steps = [x * 2 for x in problem.ld]
        if len(problem.batch) > 1:
            return "one batch dim at most"
        if problem.batch:
            m, n, k = problem.m, problem.n, problem.k
            steps += [2 * problem.batch_strides("a", m * k)[2]]
            steps += [2 * problem.batch_strides("b", k * n)[2]]
            if extra and problem.batch_strides("c", m * n)[2] != m * n:
                return "c is broadcast over the batch"
        stored = problem.among("ldy", "moments", "exp", "column_moments")
        if direct(problem) and (stored or problem.epilogue.dw == "turned"):
            return f"{stored or 'sums of columns'} need TMA stores: 16-bit rows of 16 bytes"
        parts = problem.epilogue.moments
        if problem.epilogue.save_act and not (problem.epilogue.dact and problem.epilogue.act):
            return "it stores the activation by whose slope it multiplies"
        if problem.epilogue.column_sums and problem.k % 8:
            return "column sums are of an a whose rows are of whole 16 bytes"
        if problem.epilogue.exp and (problem.out != "bfloat16" or problem.epilogue.alpha != 1.0):
            return f"no room for exponentials of any score in {problem.out}, or of scaled ones"
        if parts and problem.n not in {parts * bn for _, bn, _ in TILES}:
            return f"no tile is a row of {problem.n} in {parts}"
        if problem.align % 16 or any(step % 16 for step in steps):
            return f"TMA needs strides that are multiples of 16 bytes, not {steps}"
        sizes = (problem.m, problem.n, problem.k)
        if any(size < 1 for size in sizes) or problem.m * problem.n >= 2**40:
            return "empty or too large"
        return gate_refusal(problem)

    def own(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> bool:
        """Whether the statistics of rows come from the one tile that each CTA has."""
        mi, bn, pingpong = config.integers("tile")
        # for all sizes of the class at once, so that its lengths share a program
        tiles = upper_bound(ceil(problem.m / 64) * ceil(problem.n / bn) * problem.batches)
        single = config.integer("splits") == 1 and config.integer("cluster") == 1
        shape = mi == 1 and pingpong == 1 and single and tiles <= hw.sm_count
        return shape and problem.rows in ("stats", "rms")

    def _smem(
        self, problem: GemmProblem, config: KernelConfig, hw: Hardware
    ) -> tuple[int, int, int]:
        """Bytes of shared memory: of each stage, of each box of the result in flight, the rest."""
        mi, bn, pingpong = config.integers("tile")
        stored = self.own(problem, config, hw)
        rows = (64 if pingpong else 128) * mi
        splits = config.integer("splits")
        box, rest = 8 * BOX, 8 * 2 * 8 + 16
        if direct(problem, splits):
            box = 0
        elif problem.reads_c:
            rest += 2 * box
        if splits <= 1:  # a split product has no epilogue: the reduction runs it
            sets = 2 if pingpong and not stored else 1
            rest += sets * columns(problem) * bn * 4 + (512 if stored else 0)
        if problem.epilogue.column_moments:
            rest += 8 * bn * 10  # of each warp's rows: two sums, and one number of 16 bits
        wide = bn if problem.trans_b else ceil(bn / 64) * 64
        return (rows + wide) * BK * 2 + 16, box, rest

    def _stages(
        self, problem: GemmProblem, config: KernelConfig, hw: Hardware
    ) -> tuple[int, int, int]:
        """Stages of the ring, boxes of the result that a warp keeps in flight, and all bytes."""
        stage, box, rest = self._smem(problem, config, hw)

        def fit(boxes: int) -> int:
            most = min(8, (hw.smem_per_block - rest - boxes * box) // stage)
            return most if most >= 2 else 0

        two, four = fit(2), fit(4)
        stages, boxes = (four, 4) if four >= min(two, 5) else (two, 2)
        return stages, boxes, stages * stage + boxes * box + rest

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        """Tiles, clusters where two rows of tiles exist, and splits where tiles are few."""
        configs = []
        steps = self._steps(problem)
        for mi, bn, pingpong in TILES:
            bm = (64 if pingpong else 128) * mi
            tiles_m, tiles_n = ceil(problem.m / bm), ceil(problem.n / bn)
            tiles = tiles_m * tiles_n * problem.batches
            whole = problem.rows == "tiles"  # a row's tiles are on the chip at once
            if problem.epilogue.moments and problem.n != problem.epilogue.moments * bn:
                continue
            if problem.epilogue.exp and bn != EXP_COLUMNS:
                continue
            if problem.epilogue.gate and bn % 128:  # a TMA store has 64 columns of y
                continue
            # its last columns go by plain stores
            if (problem.ldy or problem.epilogue.column_moments) and bn % 64:
                continue
            apart = (problem.epilogue.moments, problem.parts, problem.ldy,
                     problem.epilogue.column_sums, problem.epilogue.save_act,
                     problem.epilogue.column_moments, problem.epilogue.exp)  # fmt: skip
            alone = whole or problem.epilogue.dw == "turned" or any(apart)
            if whole and (tiles_n > hw.sm_count or not pingpong):
                continue  # they wait for each other in the epilogue, which only pingpong hides
            for cluster in (1, 2) if tiles_m > 1 and not whole else (1,):
                for splits in (1, 2, 3, 4, 6, 8) if not alone else (1,):
                    per = ceil(steps / splits)
                    if splits > 1 and (
                        tiles * splits > 2 * hw.sm_count
                        or per < 4
                        or (splits - 1) * per >= steps
                        or problem.batch
                    ):
                        continue
                    configs.append(
                        KernelConfig.of(
                            tile=(mi, bn, pingpong), cluster=cluster, splits=splits, group=8
                        )
                    )
            shared = problem.trans_a and not (alone or problem.batch or problem.planes)
            shared = shared and (mi, bn, pingpong) == (1, 192, 0)  # larger tiles spill
            idle = STREAM_TILES * hw.sm_count <= tiles < hw.sm_count
            if shared and idle and tiles * steps >= 8 * hw.sm_count:
                configs.append(KernelConfig.of(tile=(mi, bn, 0), cluster=1, splits=STREAM, group=8))
        return [how for how in configs if self._stages(problem, how, hw)[0] >= 3]

    def fits(self, problem: GemmProblem, config: KernelConfig) -> bool:
        splits = config.integer("splits")
        return splits <= 1 or each_has_steps(self._steps(problem), splits)

    def _steps(self, problem: GemmProblem) -> int:
        """64-wide steps of k, in all products of bf16 planes."""
        return ceil(problem.k / BK) * max(1, {0: 1, 2: 3, 3: 6}[problem.planes])

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """The tiles' time, or that of their operands; where c and z take longest, tiles rank so."""
        mi, bn, pingpong = config.integers("tile")
        # tiles mostly empty of rows stream b at a third of the memory's rate, if not many follow
        few, rate = problem.m <= (32 if pingpong else 64) * mi, 1.0
        if few:
            many = problem.n > 2 * bn * hw.sm_count
            rate = 0.35 if not many else 0.65 + bn / 850 if pingpong else 0.75
        stream = problem.bytes / (hw.bandwidth * rate)
        rank = max(self.tile_seconds(problem, config, hw), stream)
        least = streamed(problem) / hw.bandwidth
        if problem.epilogue.act and problem.epilogue.save_z:
            each = problem.batches * problem.m * problem.n / hw.sm_count
            least = max(least, each * ACT_AND_Z)
        return max(rank, least + TIE * rank) + hw.launch_seconds

    def fetch_seconds(
        self, problem: GemmProblem, config: KernelConfig, alone: bool, pixels: bool
    ) -> float:
        """What TMA needs for a tile's rows of zeros: for the last column of tiles where `alone`."""
        mi, bn, pingpong = config.integers("tile")
        bm, cluster = (64 if pingpong else 128) * mi, config.integer("cluster")
        steps, tiles_n = self._steps(problem), ceil(problem.n / bn)
        steps = ceil(steps / max(1, config.integer("splits")))
        short = problem.k % BK
        past = (tiles_n * bn - problem.n) / (1 if alone else tiles_n)
        rows: float = steps * past  # of b, or as many zeros in its rows of 64 columns
        if short:
            rows += bm * (not problem.trans_a)
            rows += bn - past if problem.trans_b else (BK - short) * bn / 64
        if problem.reads_c and not direct(problem):
            rows += bm * past / 64
        pitch, seconds = 2 * problem.ld[1], rows * PAST_SECONDS
        if problem.trans_b and (pitch < 128 or pitch % 32):
            shared = min(problem.n, bn) * (2 if pitch % 32 else 1)
            seconds += shared * SHARED_ROW / cluster * (pitch < 256)
        seconds += FETCH_SECONDS * (1 if pingpong else 2)
        return seconds + bm * steps * PIXEL_SECONDS * pixels

    def tile_seconds(
        self, problem: GemmProblem, config: KernelConfig, hw: Hardware, pixels: bool = False
    ) -> float:
        """Waves of tiles; a tile's time is its products, its epilogue where nothing hides it.

        `pixels`: TMA gathers the rows of a from images.
        """
        mi, bn, pingpong = config.integers("tile")
        cluster, splits = config.integer("cluster"), config.integer("splits")
        bm = (64 if pingpong else 128) * mi
        passes = {0: 1, 2: 3, 3: 6}[problem.planes]
        units = ceil(ceil(problem.m / bm) / cluster) * ceil(problem.n / bn) * problem.batches
        slots = hw.sm_count // cluster
        if problem.rows == "tiles":  # whole rows of tiles
            slots -= slots % ceil(problem.n / bn)
        waves = ceil(units * max(splits, 1) / slots)
        per_sm = hw.rate(problem.dtype) / hw.sm_count
        # operand traffic bounds small tiles: 2 (bm + bn) bytes into smem for bm bn products
        # an SM's only tile: nothing would hide its epilogue, which here two warpgroups share
        alone = waves == 1 and (mi, bn, pingpong) == (1, 192, 0)
        full = pingpong or alone or splits == STREAM
        reach = (1.09 if full else 1.06) * bm * bn / (bm * bn + 10 * (bm + bn))
        # a tile that is no multiple of 64 wide takes nearly the time of the next that is
        wide = bn if bn % 64 == 0 else 0.97 * 64 * ceil(bn / 64)
        products = 2 * bm * wide * problem.k * passes / max(splits, 1) / (per_sm * min(1.0, reach))
        if splits == STREAM:
            products *= units / hw.sm_count / waves
        if problem.rows == "tiles":  # k-steps wait for their column sums
            products *= 1 + 1.2 / ceil(problem.n / bn)
        if problem.epilogue.column_sums:
            products *= 1 + 0.6 / ceil(problem.n / bn)
        if cluster == 2 and waves * products > LONG_SECONDS:
            products *= SHARED_B
        tail, share = (1.5e-6, 0.1) if pingpong else (2.5e-6, 0.5)
        if alone:
            tail, share = 1.2e-6, 0.0
        if ITEMSIZE[problem.out] == 4:  # by plain stores (H200, 2026-11: 45 us where f16 takes 28)
            share = 2.0
        elif direct(problem):  # two bytes at a time (16384 x 50257 words: 4.8 ms, 2.0 by TMA)
            share = 4.0
        epilogue = bm * bn * 4 / (hw.bandwidth / hw.sm_count) * share
        # an activation's instructions hold up the products they run beside, z is a second store
        second = problem.epilogue.save_z or problem.epilogue.save_act
        extra = 0.6e-6 * bool(problem.epilogue.act) + 0.5e-6 * bool(second)
        if waves > 1:  # where nothing runs beside it, every kernel pays for it alike
            epilogue += extra if pingpong else 2 * extra
        tail += slope_seconds(problem, bm * bn / (128 if pingpong else 256))
        if problem.epilogue.moments or problem.parts:
            tail += 0.5e-6
        if problem.epilogue.column_moments:
            shown = min(1.0, MOMENT_HIDDEN / products) if pingpong else 1.0
            epilogue += MOMENT_SECONDS * bm * bn * shown
        if problem.rows in ("stats", "rms") and splits == 1:
            tail += OWN_SECONDS if self.own(problem, config, hw) else SIDE_SECONDS
        each = products + epilogue
        if splits != STREAM:
            each = max(each, self.fetch_seconds(problem, config, waves == 1, pixels))
        seconds = waves * each + tail
        if problem.rows in ("stats", "rms") and splits == 1 and not self.own(problem, config, hw):
            seconds = max(seconds, side_seconds(problem, hw) + SIDE_SECONDS)
        if splits == STREAM:
            seconds += STREAM_SECONDS * hw.sm_count / units
        if splits > 1:
            seconds += 4 * problem.m * problem.n * (splits + 1) / hw.bandwidth + 4e-6
        return seconds

    def workspace(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> int:
        """Bytes of the partial sums of the splits of k, or of shared tiles."""
        splits = config.integer("splits")
        if splits == STREAM:
            mi, bn, _ = config.integers("tile")
            return 4 * hw.sm_count * 128 * mi * bn
        return 4 * splits * problem.m * problem.n if splits > 1 else 0

    def row_tiles(self, problem: GemmProblem, config: KernelConfig) -> int:
        """How many rows of "part" hold the column sums of a, with rows="tiles"."""
        mi, _, pingpong = config.integers("tile")
        return ceil(problem.m / ((64 if pingpong else 128) * mi))

    def parts(self, problem: GemmProblem, config: KernelConfig) -> int:
        """How many [2, m] planes of "part" hold sums of dgamma and dbeta; [2, n] of "turned"."""
        if problem.epilogue.dw == "turned":
            return ceil(problem.m / 16)
        columns = 1024 if config.integer("splits") > 1 else config.integers("tile")[1]
        return ceil(problem.n / columns)

    def launch(
        self, problem: GemmProblem, config: KernelConfig, hw: Hardware, **more: object
    ) -> Launches:
        m, n, k = problem.m, problem.n, problem.k
        mi, bn, pingpong = config.integers("tile")
        cluster, splits = config.integer("cluster"), config.integer("splits")
        bm, batches = (64 if pingpong else 128) * mi, problem.batches
        planes = problem.planes
        lda, ldb = problem.ld
        step_a, step_b = (
            problem.batch_strides("a", m * k)[2],
            problem.batch_strides("b", k * n)[2],
        )

        def load(
            name: str, stands: bool, length: int, tall: int, wide: int, step: int
        ) -> TensorMap:
            """An operand whose lines are along k, or where it `stands` along the `length`."""
            apart = step_a if name == "a" else step_b
            shape, box = ((length, k), (64, wide)) if stands else ((k, length), (BK, tall))
            count = planes or (batches if apart else 1)
            return matrices(name, problem.dtype, *shape, step, box, count=count, apart=apart)

        map_a = load("a", problem.trans_a, m, bm, BK, lda)
        map_b = load("b", not problem.trans_b, n, bn // cluster, BK // cluster, ldb)
        plain = direct(problem, splits)
        wide = problem.ldy or (n // 2 if problem.epilogue.gate else n)

        def stored(name: str, used: object) -> TensorMap:
            there = name if used and not plain else "none"
            return matrices(there, problem.out, wide, m, wide, (64, 16), count=batches)

        stream = splits == STREAM
        units = ceil(ceil(m / bm) / cluster) * ceil(n / bn) * batches * max(splits, 1)
        stages, boxes, smem = self._stages(problem, config, hw)
        macros: dict[str, object] = {
            **type_defines(problem), "MI": mi, "BN": bn, "PINGPONG": pingpong, "CLUSTER": cluster,
            "DIRECT": plain, "STAGES": stages, "GROUP": config.integer("group"),
            "TRANS_A": problem.trans_a, "TRANS_B": problem.trans_b, "STREAM": stream or None,
            "STATIC_B": (problem.static_b and cluster == 1) or None,
            "SINGLE": stream or batches * splits == 1 or None,
            "BOXES_OUT": boxes if boxes != 2 and not plain else None,
            "PASSES": {0: None, 2: 3, 3: 6}[planes], **more,
        }  # fmt: skip
        behind, whole = problem.epilogue, splits <= 1 and ITEMSIZE[problem.out] == 4
        # of these y and c begin with their buffers
        if whole and (behind.dx or behind.dw) and not behind.save_z and n % 4 == 0:
            macros["EVEN"] = 1
        elif whole and n % 2 == 0 and not planes:
            other = behind.among("save_z", "save_act", "gate") or problem.reads_c
            macros["PAIRS"] = not other or None
        blocks = hw.sm_count if stream else minimum(hw.sm_count // cluster, units) * cluster
        side, pairs = problem.rows if splits == 1 else "", m
        if side == "tiles":
            pairs *= ceil(n / bn)
            blocks -= blocks % ceil(n / bn)
        if self.own(problem, config, hw):
            macros["SIDE"] = "OWN_RMS" if side == "rms" else "OWN"
            side = ""
        if side:  # a warp has 2 KB of rows in flight: short rows, several at a time
            lanes = None if side == "tiles" else side_lanes(k)
            macros |= {"SIDE": side.upper(), "SIDE_LANES": lanes}
        if behind.column_sums:
            macros["SIDE"] = "COLUMNS"
        macros |= {
            "MOMENTS": bool(behind.moments) or None, "PARTS": problem.parts or None,
            "COLUMN_MOMENTS": behind.column_moments or None,
        }  # fmt: skip
        macros |= {"TO": "float"} if splits > 1 else epilogue_defines(problem)
        gemm = self.one(
            "gemm_wgmma", blocks, 384, map_a, map_b, stored("y", True),
            stored("z", behind.among("save_z", "save_act")), stored("c", problem.reads_c),
            Ptr("workspace" if splits > 1 else "y"),
            *args("z c, i32 m n k batches moves splits", problem, splits=splits,
                  moves=(int(step_a != 0), int(step_b != 0))),
            *epilogue_args(problem), Ptr("part"),
            *args("sync a, i64 lda, f32 epsilon", problem, lda=lda),
            *((Ptr("workspace"),) if stream else ()), smem=smem, cluster=cluster,
            sync=32 + 16 * pairs if side else 32 * hw.sm_count if stream else 0,
            cooperative=side == "tiles", **macros,
        )  # fmt: skip
        return gemm if splits <= 1 else (*gemm, sum_of_parts(problem, splits))


class SplitWgmma(DelegatingKernel[GemmProblem]):
    """fp32 operands as sums of bf16 planes, multiplied plane by plane by Wgmma.

    bf16x3: 2 planes, 3 products, 4e-6 relative error; bf16x6: 3 planes, 6 products, as fp32 itself.
    """

    name = "wgmma_split"

    inner = Wgmma()

    def planes(self, problem: GemmProblem) -> int:
        """bf16 planes an operand is split into."""
        return PLANES.get(problem.math, 0)

    def _gemm(self, problem: GemmProblem) -> GemmProblem:
        epilogue = problem.epilogue
        if epilogue.bias or epilogue.row_bias:
            epilogue = replace(epilogue, bias_dtype=epilogue.bias_dtype or problem.dtype)
        return replace(  # its planes are made just before, and dense
            problem, op="Gemm", dtype="bfloat16", out_dtype=problem.out, math="ieee", lda=None,
            ldb=None, static_b=False, epilogue=epilogue, planes=self.planes(problem),
        )  # fmt: skip

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.dtype != "float32" or not self.planes(problem):
            return f"for fp32 operands and bf16x3 or bf16x6, not {problem.dtype} {problem.math}"
        if problem.batch:
            return "no batches"
        return self.inner.supports(self._gemm(problem), hw)

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """Both splittings (4 bytes read, 2 a plane written) and the passes."""
        moved = (4 + 2 * self.planes(problem)) * problem.k * (problem.m + problem.n)
        split = moved / hw.bandwidth + 2 * hw.launch_seconds
        return split + self.inner.cost(self._gemm(problem), config, hw)

    def _sizes(self, problem: GemmProblem) -> tuple[int, int]:
        each = 2 * self.planes(problem) * problem.k
        return ceil(each * problem.m / 256) * 256, ceil(each * problem.n / 256) * 256

    def _own_bytes(self, problem: GemmProblem) -> int:
        return sum(self._sizes(problem))

    def _before(self, problem: GemmProblem, hw: Hardware) -> tuple[Launches, dict[str, Ptr]]:
        lda, ldb = problem.ld
        a, _ = self._sizes(problem)
        rows_a, line_a = (problem.k, problem.m) if problem.trans_a else (problem.m, problem.k)
        rows_b, line_b = (problem.n, problem.k) if problem.trans_b else (problem.k, problem.n)
        planes, align = self.planes(problem), problem.align

        def split(name: str, rows: int, line: int, stride: int, to: Ptr) -> Launch:
            call = row_stats(
                rows, line, "float32", ldx=stride, stats=False, planes=planes, align=align
            )
            return rename(call, {"x": Ptr(name), "out": to})

        to = {"a": Ptr("workspace"), "b": Ptr("workspace", a)}
        parts = split("a", rows_a, line_a, lda, to["a"]), split("b", rows_b, line_b, ldb, to["b"])
        return parts, to

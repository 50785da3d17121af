"""LayerNormGemmGrad for few rows: both products in one launch, one more for what crosses blocks.

Serves folded and unfolded weights alike, from w itself: cuda_src/layernorm_gemm/grad_few_rows.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.kernels.kernel import WorkspaceArena, roofline
from onnx_fuse.kernels.rule_based import Plan, Planned
from onnx_fuse.ops.activations import activation_macros
from onnx_fuse.program.launch import Launches, Ptr, args
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.size import coarse, maximum

N_STEP = 64  # columns of dz and w a stage holds


@dataclass(frozen=True)
class Tiles:
    """g's tile am x ak, dw's bk x bn, bm rows of x and dz a stage, and who works on them.

    `micros`, of the cost model: a step of g and of dw, what a second block on the SM adds to them
    (relative), the rest of a block of g and of dw.
    """

    am: int
    ak: int
    bk: int
    bn: int
    bm: int
    warps: int
    stages: int
    blocks: int
    micros: tuple[float, float, float, float, float]
    wg: bool = False
    run: int = 1

    @property
    def smem(self) -> int:
        """Bytes a block uses, the slack to align them included."""
        a, b = (self.am + self.ak) * 128, (self.bk + self.bn) * self.bm * 2 + 8 * self.bm
        return self.stages * ceil(max(a, b) / 1024) * 1024 + 1024

    def defines(self) -> dict[str, object]:
        """The macros that specialize the kernel."""
        return {
            "AM": self.am, "AK": self.ak, "BK": self.bk, "BN": self.bn, "BM": self.bm,
            "WARPS": self.warps, "STAGES": self.stages, "BLOCKS": self.blocks, "WG": self.wg,
            "RUN": self.run,
        }  # fmt: skip

    def blocks_of(self, problem: GemmProblem) -> tuple[int, int]:
        """Tiles of g, and blocks of dw."""
        of_g = ceil(problem.m / self.am) * ceil(problem.k / self.ak)
        return of_g, ceil(problem.k / self.bk) * ceil(ceil(problem.n / self.bn) / self.run)


# `micros` are fitted to 400 timings on an H200 (2026-11), which they meet within 3 to 10 % (rms)
TILES = {
    "16x64": Tiles(16, 64, 64, 128, 16, 4, 5, 3, (0.18, 0.61, 0.43, 2.93, 0.89), run=4),
    "16x64n": Tiles(16, 64, 64, 64, 16, 4, 5, 4, (0.19, 0.66, 0.30, 2.17, 0.35), run=4),
    "32x32": Tiles(32, 32, 64, 64, 32, 4, 4, 4, (0.13, 0.42, 0.42, 0.52, 0.79)),
    "32x64": Tiles(32, 64, 64, 64, 32, 4, 4, 4, (0.21, 0.53, 0.32, 2.47, 1.18), run=4),
    "64x64": Tiles(64, 64, 64, 64, 64, 4, 4, 3, (0.30, 1.05, 0.12, 2.95, 1.20)),
    "64x64w": Tiles(64, 64, 64, 64, 64, 4, 4, 3, (0.27, 0.76, 0.12, 2.71, 1.22), wg=True),
    "64x128w": Tiles(64, 128, 64, 128, 64, 4, 4, 2, (0.36, 0.81, 0.14, 3.80, 1.73), wg=True),
    "128x128w": Tiles(128, 128, 128, 128, 64, 8, 3, 2, (0.50, 1.04, 0.41, 5.15, 1.84), wg=True),
    "128x128w6": Tiles(128, 128, 128, 128, 64, 8, 6, 1, (0.40, 1.05, 0.45, 5.40, 1.80), wg=True),
}
SPLITS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


class FewRowsGrad(Planned[GemmProblem]):
    """Two launches; a third before them where there is an activation."""

    name = "few_rows"
    source, waits = "layernorm_gemm/grad_few_rows.cu", "later"

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.dtype not in ("float16", "bfloat16"):
            return f"for 16-bit operands, not {problem.dtype}"
        if any(size < 1 for size in (problem.m, problem.n, problem.k)):
            return "empty"
        if coarse(problem.m) > 4096:
            return f"{problem.m} rows (at most 4096): the parts of g would be too large"
        if problem.trans_b:
            return "w is [k, n]"
        if problem.k % 8 or problem.n % 8:
            return f"k={problem.k}, n={problem.n}: only rows of multiples of 8 are 16-byte aligned"
        if maximum(problem.m, problem.k) * maximum(problem.n, problem.k) >= 2**31:
            return "offsets of 32 bits do not reach all elements"
        if problem.align % 16:
            return "operands are not 16-byte aligned"
        return None

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        """Tiles no taller than the rows, with enough splits of n to fill the chip."""
        steps, configs = ceil(problem.n / N_STEP), []
        for name, tiles in TILES.items():
            low, high = (0, tiles.am) if tiles.am < 64 else (tiles.am // 2, 1 << 30)
            if not low < problem.m <= high or (
                tiles.am >= 64 and tiles.wg != (hw.arch == "sm_90a")
            ):
                continue
            if tiles.smem > hw.smem_per_block:
                continue
            of_g, _ = tiles.blocks_of(problem)
            enough = [s for s in SPLITS if s <= max(1, steps // 2)]
            room = [s for s in enough if of_g * s <= 3 * hw.sm_count] or enough[:1]
            configs += [KernelConfig.of(tiles=name, splits=splits) for splits in room]
        return configs

    def fits(self, problem: GemmProblem, config: KernelConfig) -> bool:
        return config.integer("splits") <= max(1, ceil(problem.n / N_STEP) // 2)

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """Waves of blocks, or the bytes if they take longer, and the second launch."""
        tiles, splits = self._shape(config)
        m, n, k, size = problem.m, problem.n, problem.k, ITEMSIZE[problem.dtype]
        step_g, step_dw, share, rest_g, rest_dw = tiles.micros
        of_g, of_dw = tiles.blocks_of(problem)
        of_g *= splits
        resident = min(tiles.blocks, max(1.0, (of_g + of_dw) / hw.sm_count))
        slow = 1 + share * (resident - 1)
        steps_dw = min(tiles.run, ceil(n / tiles.bn)) if tiles.run > 1 else ceil(m / tiles.bm)
        one_g = slow * (step_g * ceil(ceil(n / N_STEP) / splits) + rest_g)
        one_dw = slow * (step_dw * steps_dw + rest_dw)
        slots = hw.sm_count * tiles.blocks
        busy = max(one_g, one_dw)
        if of_g + of_dw > slots:
            busy = (of_g * one_g + of_dw * one_dw) / slots + one_dw / 2
        busy = max(busy, ceil(of_g / slots) * one_g) * 1e-6
        moved = size * (2 * k * n + 2 * m * n + 2 * m * k) + 4 * splits * m * k
        added = size * m * k / hw.bandwidth if problem.add else 0
        costs = self.numbers(hw)
        first = costs["start"] + roofline(hw, costs, moved, busy, launches=0)
        summed = 4 * (splits + 1) * m * k / (costs["cached"] * hw.bandwidth)
        second = costs["second"] + costs["part"] * splits + summed
        if not problem.epilogue.act:
            return first + second + added
        passed = 3 * size * m * n  # from L2 where it fits: dy was made just before
        rate = hw.cached_bandwidth if passed <= hw.l2_bytes / 2 else hw.bandwidth
        return first + second + added + passed / rate + hw.launch_seconds

    def _shape(self, config: KernelConfig) -> tuple[Tiles, int]:
        return TILES[config.text("tiles")], config.integer("splits")

    def plan(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> Plan:
        """The pass that makes dz, if there is an activation; the products; sums across blocks."""
        tiles, splits = self._shape(config)
        m, n, k, act = problem.m, problem.n, problem.k, problem.epilogue.act
        of_g, of_dw = tiles.blocks_of(problem)
        row_parts, column_parts = splits * ceil(k / tiles.ak), splits * ceil(m / tiles.am)
        arena = WorkspaceArena()
        dz = arena.allocate(ITEMSIZE[problem.dtype] * m * n) if act else Ptr("dy")
        g, rows = arena.allocate(4 * splits * m * k), arena.allocate(8 * row_parts * m)
        columns = arena.allocate(8 * column_parts * k)
        macros = tiles.defines() | {"T": C_TYPES[problem.dtype]} | activation_macros(act)
        calls: Launches = ()
        if act:
            passed = args("dy z, i64 size, f32 act_alpha", problem.epilogue, size=m * n)
            calls = self.one("grad_dz", ceil(m * n / 2048), 256, *passed, dz, **macros)
        calls += self.one(
            "grad_products", splits * of_g + of_dw, 32 * tiles.warps, dz,
            *args("x gamma beta w mean rstd, i32 m n k splits", problem, splits=splits),
            g, rows, columns, *args("dw dc"), smem=tiles.smem, **macros,
        )  # fmt: skip
        parts = (splits, row_parts, column_parts)
        calls += self.one(
            "grad_finish", ceil(m * ceil(k / 256) / 4) + ceil(2 * k / 128), 128,
            *args("x gamma mean rstd, i32 m k parts", problem, parts=parts), g, rows, columns,
            Ptr({"": "none", "here": "dx"}.get(problem.add, "add")), *args("dx dgamma dbeta"),
            **macros,
        )  # fmt: skip
        return calls, arena.size

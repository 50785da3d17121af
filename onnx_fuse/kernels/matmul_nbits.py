"""MatMulNBits: products of weights that stay in 2, 4 or 8 bits (`products.PackedProduct`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from typing import Any

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.kernels.gemm import KERNELS as GEMM
from onnx_fuse.kernels.kernel import Kernel, Kernels, launch
from onnx_fuse.kernels.rule_based import DelegatingKernel
from onnx_fuse.ops.activations import BY_KEY, activation_macros
from onnx_fuse.program.contractions import PackedProduct
from onnx_fuse.program.launch import Launches, Ptr, args
from onnx_fuse.program.nbits_tiles import CHUNK
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.size import any_batch

FLOATS = ("float16", "bfloat16", "float32")
ROWS = 8
"""The rows of a that one block of `FewRows` multiplies: further blocks read the weights again."""


class FewRows(Kernel[PackedProduct]):
    """Weights unpacked in registers on their way to the tensor cores (quant/matmul_nbits.cu)."""

    name = "mma"
    source, waits = "quant/matmul_nbits.cu", "later"
    free_axes = "z"

    def supports(self, problem: PackedProduct, hw: Hardware) -> str | None:
        bits, block = problem.bits, problem.block
        if problem.tiled or problem.norm or set(problem.epilogue.given) - {"bias"}:
            return "it reads rows of weights, and adds a bias"
        if bits not in (4, 8):
            return f"4 or 8 bits, not {bits}"
        if problem.m > 8 * ROWS:
            return f"{problem.m} rows (at most {8 * ROWS}): the weights would be read too often"
        if problem.zero == "float" or problem.groups:
            return "zero points are integers, and blocks neighbours along k"
        if problem.k % 8 or problem.row_bytes % 16:
            return f"k={problem.k} is not a multiple of 8, or rows of weights are not of 16 bytes"
        if block % 128 and block not in (16, 32, 64):
            return f"blocks of 16, 32, 64 or a multiple of 128, not {block}"
        return None

    def _columns(self, problem: PackedProduct) -> int:
        """Columns of an mma that a row of a takes: blocks that a quad of lanes reads at a time."""
        return max(1, min(4, 512 // problem.bits // problem.block))

    def _sets(self, problem: PackedProduct) -> int:
        return ceil(min(problem.m, ROWS) * self._columns(problem) / 8)

    def configs(self, problem: PackedProduct, hw: Hardware) -> Sequence[KernelConfig]:
        """Numbers of warps that divide k among them, and of tiles of 16 rows of weights a warp."""
        wide = self._sets(problem) > 1 or problem.dtype == "float32"
        return [
            KernelConfig.of(warps=warps, tiles=tiles)
            for warps, tiles in ((8, 1), (4, 2), (16, 1), (4, 1), (8, 2))
            if not (warps == 16 and wide)  # it would spill
        ]

    def cost(self, problem: PackedProduct, config: KernelConfig, hw: Hardware) -> float:
        """Bytes and instructions, which hide in part behind each other, or a warp's steps in turn.

        Fitted to 70 timings on an H200 (2026-11).
        """
        warps, tiles = config.integer("warps"), config.integer("tiles")
        passes = ceil(problem.m / ROWS)
        weights = problem.n * problem.row_bytes * 8 / problem.bits
        each = 1.7 + 0.95 / tiles + 2.05 * (self._sets(problem) - 1)
        if problem.dtype == "float32":
            each += (3.2 + 4.4 / tiles) * self._sets(problem)
        # a rate in fp32 is two operations an instruction and lane
        issue = weights * passes * each / (0.64 * hw.rate("float32"))
        stream = problem.bytes / hw.bandwidth
        resident = max(1, (32 if tiles == 1 else 20) // warps)
        blocks = ceil(problem.n / (16 * tiles)) * passes
        waves = ceil(blocks / (hw.sm_count * resident))
        chain = 9e-7 * waves * ceil(problem.row_bytes / 64 / warps)
        uneven = ceil(blocks / hw.sm_count) * hw.sm_count / blocks  # some multiprocessors have more
        return 2.3e-6 + max(chain, uneven * (0.56 * stream + 1.2 * issue))

    def launch(self, problem: PackedProduct, config: KernelConfig, hw: Hardware) -> Launches:
        warps, tiles = config.integer("warps"), config.integer("tiles")
        columns, sets = self._columns(problem), self._sets(problem)
        block, run = problem.block, 128 // problem.bits
        scales = 2 * max(1, run // block)  # of a lane's two columns
        grid = (ceil(problem.n / (16 * tiles)), ceil(problem.m / (sets * 8 // columns)), 1)
        return self.one(
            "matmul_nbits", grid, 32 * warps,
            *args("a q scale zero bias y, i32 m n k row_bytes blocks", problem),
            T=C_TYPES[problem.dtype], BITS=problem.bits, BLOCK=block, CB=columns, SETS=sets,
            TILES=tiles, WARPS=warps, ZERO=bool(problem.zero), BIAS=bool(problem.epilogue.bias),
            PAIRED=columns > 1 and problem.blocks % scales == 0, AHEAD=problem.static_b,
            WHOLE=problem.row_bytes % 64 == 0 and problem.k % block == 0,
        )  # fmt: skip


class TiledRows(Kernel[PackedProduct]):
    """Constant weights in an mma's order, all of a block's on their way at once
    (quant/tiled_nbits.cu).
    """

    name = "tiles"
    source, waits = "quant/tiled_nbits.cu", "later"
    version = 4
    free_axes = "z"

    def supports(self, problem: PackedProduct, hw: Hardware) -> str | None:
        if not problem.tiled:
            return "it reads tiles of weights"
        if problem.m > 64:
            return f"{problem.m} rows (at most 64): the weights would be read too often"
        if other := set(problem.epilogue.given) - {"bias", "residual", "gate", "act", "act_alpha"}:
            return f"its epilogue has no {', '.join(sorted(other))}"
        if problem.epilogue.gate and (problem.n % 32 or problem.epilogue.residual):
            return "after a gate it stores halves of whole tiles, without a residual"
        if problem.epilogue.act and problem.epilogue.act not in BY_KEY:
            return f"no activation {problem.epilogue.act!r}"
        return None if self.configs(problem, hw) else f"k={problem.k} is not in shared memory"

    def configs(self, problem: PackedProduct, hw: Hardware) -> Sequence[KernelConfig]:
        """Numbers of warps that divide k among them, and of tiles a block."""
        few = min(4, self._units(problem))
        ways = [
            KernelConfig.of(warps=warps, tiles=tiles)
            for warps in sorted({few, 4, 8, 16, 32})
            for tiles in ((2, 4, 8) if problem.epilogue.gate else (1, 2, 4))
        ]
        return [how for how in ways if self.fits(problem, how)]

    def fits(self, problem: PackedProduct, config: KernelConfig) -> bool:
        """Whether each warp has a share of k, and the block's weights and sums fit."""
        warps = config.integer("warps")
        few = problem.m <= 8
        if warps * config.integer("tiles") * self._sets(problem) > (128 if few else 64):
            return False
        if warps == 32 and not few:
            return False
        chunks = self._chunks(problem, config)
        one, held = any_batch(problem.m) == 1, self._held(problem, config)
        normed = not problem.norm or one or held == chunks
        shares = self._units(problem) >= warps and chunks <= 16
        return normed and shares and self._smem(problem, config) <= 220 << 10

    def _sets(self, problem: PackedProduct) -> int:
        """Columns of 8 rows of a, 1, 2 or 4: registers hold the sums of each."""
        return 1 if problem.m <= 8 else 2 if problem.m <= 16 else 4

    def _units(self, problem: PackedProduct) -> int:
        """Runs of k that are a warp's: whole chunks and whole blocks."""
        return problem.k // max(CHUNK, problem.block)

    def _chunks(self, problem: PackedProduct, config: KernelConfig) -> int:
        """The chunks of k that a warp has at most."""
        units = ceil(self._units(problem) / config.integer("warps"))
        return units * max(1, problem.block // CHUNK)

    def _held(self, problem: PackedProduct, config: KernelConfig) -> int:
        """The chunks of a that registers hold at once; all, where each lane normalises its own."""
        few = any_batch(problem.m) == 1 or config.integer("warps") == 32
        most = 4 if few else {1: 8, 2: 2, 4: 1}[self._sets(problem)]
        return min(most, self._chunks(problem, config))

    def _smem(self, problem: PackedProduct, config: KernelConfig) -> int:
        warps, tiles = config.integer("warps"), config.integer("tiles")
        chunks = self._chunks(problem, config)
        scales = ceil(chunks * CHUNK / problem.block) * (64 if problem.zero else 32)
        row = chunks * CHUNK * ITEMSIZE[problem.dtype] if any_batch(problem.m) == 1 else 0
        return warps * (tiles * (512 * max(chunks, self._sets(problem)) + scales) + row)

    def cost(self, problem: PackedProduct, config: KernelConfig, hw: Hardware) -> float:
        """What follows the wait, the bytes of the weights or the instructions of their use.

        Fitted to timings on an H200 (2026-11) of a decoder's products, launches overlapping.
        """
        warps, tiles = config.integer("warps"), config.integer("tiles")
        passes = ceil(problem.m / (8 * self._sets(problem)))
        blocks = ceil(problem.n / (16 * tiles)) * passes
        resident = min(hw.smem_per_block // self._smem(problem, config), 48 // warps) or 1
        waves = max(1.0, blocks / (hw.sm_count * resident))
        sets, chunks = self._sets(problem), self._chunks(problem, config)
        each = 1.75 + 0.6 * sets
        busy = min(16.0, warps * max(1.0, blocks / hw.sm_count / waves))  # warps of an SM
        issue = problem.n * problem.k * passes * each / (0.5 * hw.rate("float32")) * sqrt(16 / busy)
        stream = problem.bytes * passes / (0.85 * hw.bandwidth)
        chain = 1e-7 * chunks * sets + 5e-8 * chunks * tiles * sets
        norm = 0.15e-6 + 0.35e-6 * problem.m if problem.norm else 0.0
        # blocks that come up behind others, or beside them, where they keep the next launch's out
        again = 2.5e-6 * (waves - 1) + 5e-7 * max(0.0, blocks / hw.sm_count - 2)
        begun = 0.4e-6 + 1e-7 * warps + 4e-6 / warps
        return begun + norm + again + max(stream, issue) + 0.3 * chain

    def launch(self, problem: PackedProduct, config: KernelConfig, hw: Hardware) -> Launches:
        warps, tiles = config.integer("warps"), config.integer("tiles")
        sets, epilogue, kind = self._sets(problem), problem.epilogue, C_TYPES[problem.dtype]
        text = "a q scale bias c gamma beta y, i32 m n k, f32 epsilon act_alpha"
        grid = (ceil(problem.n / (16 * tiles)), ceil(problem.m / (8 * sets)), 1)
        return self.one(
            "tiled_nbits", grid, 32 * warps, *args(text, problem, act_alpha=epilogue.act_alpha),
            smem=self._smem(problem, config), T=kind, TO=kind, SCALED=problem.block, SETS=sets,
            ONE=any_batch(problem.m) == 1, TILES=tiles, WARPS=warps,
            CHUNKS=self._chunks(problem, config), HELD=self._held(problem, config),
            WHOLE=self._units(problem) % warps == 0,
            ZERO=bool(problem.zero), NORM=["", "rms", "layer"].index(problem.norm),
            EPI_BIAS=epilogue.bias or None, EPI_RES=bool(epilogue.residual) or None,
            GATE=epilogue.gate or None, **activation_macros(epilogue.act),
        )  # fmt: skip


GATED = ("wgmma", "mma")
"""Kernels whose gates are columns of the accumulators, however b lies in memory."""


class Unpacked(DelegatingKernel[PackedProduct]):
    """The weights unpacked into the workspace, then any Gemm; together they serve every problem."""

    def __init__(self, inner: Kernel[GemmProblem]) -> None:
        self.inner = inner
        self.name = f"unpack_{inner.name}"

    def _gemm(self, problem: PackedProduct) -> GemmProblem:
        return GemmProblem(
            "Gemm", m=problem.m, n=problem.n, k=problem.k, dtype=problem.dtype, trans_b=True,
            math=problem.math, epilogue=problem.epilogue,
        )  # fmt: skip

    def supports(self, problem: PackedProduct, hw: Hardware) -> str | None:
        if problem.dtype not in FLOATS:
            return f"no weights in {problem.dtype}"
        if problem.norm:
            return "a norm has a launch of its own beside a Gemm"
        gemm = self._gemm(problem)
        if problem.epilogue.gate:
            if not problem.tiled or problem.epilogue.bias:
                return "rows of weights in tiles, without a bias, change places for a gate"
            if self.inner.name not in GATED:
                return "its gate takes no b of rows along n"
            gemm = gemm.replace(trans_b=False)
        return self.inner.supports(gemm, hw)

    def _own_bytes(self, problem: PackedProduct) -> int:
        return -(-problem.n * problem.k * ITEMSIZE[problem.dtype] // 256) * 256

    def cost(self, problem: PackedProduct, config: KernelConfig, hw: Hardware) -> float:
        moved = self._own_bytes(problem) + problem.n * problem.row_bytes
        seconds = self.inner.cost(self._gemm(problem), config, hw)
        return seconds + moved / (0.8 * hw.bandwidth) + hw.launch_seconds

    def _before(self, problem: PackedProduct, hw: Hardware) -> tuple[Launches, dict[str, Ptr]]:
        zero = {"": 0, "packed": 1, "float": 2}[problem.zero]
        size = problem.n * problem.k
        macros: dict[str, Any] = {"T": C_TYPES[problem.dtype], "BLOCK": problem.block, "ZERO": zero}
        text = "q scale zero groups workspace, i64 size, i32 k row_bytes blocks"
        entry, each = "unpack", 2048
        if problem.tiled:
            text = "q scale workspace, i32 n k blocks"
            entry, each, size = "unpack_tiles", 8192, ceil(problem.n / 16) * 16 * problem.k
            macros |= {"TILED": 1, "GATE": int(problem.epilogue.gate)}
        else:
            whole = problem.k % 8 == 0 and not problem.groups
            macros |= {"BITS": problem.bits, "GROUPS": problem.groups, "WHOLE": whole}
        made = args(text, problem, size=size)
        unpack = launch("quant/unpack.cu", entry, ceil(size / each), 256, *made, **macros)
        return (unpack,), {"b": Ptr("workspace"), "col1": Ptr("bias")}


KERNELS: Kernels = {
    "MatMulNBits": (FewRows(), TiledRows(), *(Unpacked(kernel) for kernel in GEMM["Gemm"])),
}

"""MatMulNBits: products of weights that stay in 2, 4 or 8 bits (`products.PackedProduct`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from onnx_fuse.cuda.macros import C_TYPES, as_defines
from onnx_fuse.kernels.gemm import KERNELS as GEMM
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.norm_launches import rename
from onnx_fuse.kernels.rule_based import DelegatingKernel, Unconditional, WithoutWorkspace
from onnx_fuse.program.contractions import PackedProduct
from onnx_fuse.program.problem import (
    ITEMSIZE,
    Arg,
    GemmProblem,
    Hardware,
    KernelConfig,
    Launch,
    Launches,
    Num,
    Ptr,
)

FLOATS = ("float16", "bfloat16", "float32")
ROWS = 8
"""The rows of a that one block multiplies. Blocks of further rows read the weights again."""


class FewRows(WithoutWorkspace, Unconditional):
    """Weights unpacked in registers on their way to the tensor cores (quant/matmul_nbits.cu)."""

    name = "mma"
    source = "quant/matmul_nbits.cu"
    free_axes = "z"

    def supports(self, problem: PackedProduct, hw: Hardware) -> str | None:
        bits, block = problem.bits, problem.block
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
        defines = as_defines({
            "T": C_TYPES[problem.dtype], "BITS": problem.bits,
            "PAIRED": columns > 1 and problem.blocks % scales == 0,
            "WHOLE": problem.row_bytes % 64 == 0 and problem.k % block == 0,
            "BLOCK": block, "CB": columns, "SETS": sets, "TILES": tiles,
            "WARPS": warps, "ZERO": bool(problem.zero),
            "BIAS": bool(problem.epilogue.bias), "AHEAD": problem.static_b,
        })  # fmt: skip
        args: tuple[Arg, ...] = (
            *map(Ptr, ("a", "q", "scale", "zero", "bias", "y")),
            *(Num("i32", x) for x in (problem.m, problem.n, problem.k)),
            Num("i32", problem.row_bytes), Num("i32", problem.blocks),
        )  # fmt: skip
        grid = (ceil(problem.n / (16 * tiles)), ceil(problem.m / (sets * 8 // columns)), 1)
        return (Launch(self.source, "matmul_nbits", grid, (32 * warps, 1, 1), args, defines),)


class Unpacked(DelegatingKernel):
    """The weights unpacked into the workspace, then any Gemm; together they serve every problem."""

    def __init__(self, inner: Kernel) -> None:
        self.inner = inner
        self.name = f"unpack_{inner.name}"

    def _gemm(self, problem: PackedProduct) -> GemmProblem:
        shape = {"m": problem.m, "n": problem.n, "k": problem.k}
        bias = {"bias": True} if problem.epilogue.bias else {}
        return GemmProblem.of(
            "Gemm", **shape, dtype=problem.dtype, trans_b=True, math=problem.math, **bias
        )

    def supports(self, problem: PackedProduct, hw: Hardware) -> str | None:
        if problem.dtype not in FLOATS:
            return f"no weights in {problem.dtype}"
        return self.inner.supports(self._gemm(problem), hw)

    def _own_bytes(self, problem: PackedProduct) -> int:
        """The bytes of the weights."""
        return -(-problem.n * problem.k * ITEMSIZE[problem.dtype] // 256) * 256

    def cost(self, problem: PackedProduct, config: KernelConfig, hw: Hardware) -> float:
        """The GEMM's, and the weights read packed and written."""
        moved = self._own_bytes(problem) + problem.n * problem.row_bytes
        seconds = self.inner.cost(self._gemm(problem), config, hw)
        return seconds + moved / (0.8 * hw.bandwidth) + hw.launch_seconds

    def launch(self, problem: PackedProduct, config: KernelConfig, hw: Hardware) -> Launches:
        """The launches that unpack the weights and multiply."""
        zero = {"": 0, "packed": 1, "float": 2}[problem.zero]
        size = problem.n * problem.k
        unpack = Launch(
            "quant/unpack.cu", "unpack", (ceil(size / 2048), 1, 1), (256, 1, 1),
            (*map(Ptr, ("q", "scale", "zero", "groups", "workspace")), Num("i64", size),
             Num("i32", problem.k), Num("i32", problem.row_bytes),
             Num("i32", problem.blocks)),
            as_defines({
                "T": C_TYPES[problem.dtype], "BITS": problem.bits, "ZERO": zero,
                "BLOCK": problem.block, "GROUPS": problem.groups,
                "WHOLE": problem.k % 8 == 0 and not problem.groups,
            }),
        )  # fmt: skip
        places = {
            "b": Ptr("workspace"), "col1": Ptr("bias"),
            "workspace": Ptr("workspace", self._own_bytes(problem)),
        }  # fmt: skip
        product = self.inner.launch(self._gemm(problem), config, hw)
        return (unpack, *(rename(call, places) for call in product))


KERNELS: dict[str, Sequence[Kernel]] = {
    "MatMulNBits": (FewRows(), *(Unpacked(kernel) for kernel in GEMM["Gemm"])),
}

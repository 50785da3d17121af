"""Pool, ChannelWindow (LRN), Resample, GridSample, Col2Im: gathers of neighbours with weights."""

from __future__ import annotations

from math import prod

from onnx_fuse.cuda.macros import C_TYPES, FLOATS, accumulator
from onnx_fuse.kernels.kernel import Kernels
from onnx_fuse.kernels.rule_based import (
    Each,
    HeuristicKernel,
    Plan,
    Planned,
    access_width,
    typed,
    window_macros,
)
from onnx_fuse.program.call import LOWEST
from onnx_fuse.program.launch import Launches, args
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig
from onnx_fuse.program.problems import MaxPoolGrad, Pool, Resample

_KINDS = ("max", "average", "lp")


class Windows(HeuristicKernel[Pool]):
    """pool/pool.cu. Operands: x y indices."""

    source = "pool/pool.cu"
    free_axes = "yz"

    def cost(self, problem: Pool, config: KernelConfig, hw: Hardware) -> float:
        """The floor, with each tap of x read at a share of memory's rate, through caches."""
        taps = problem.planes * prod(problem.outer) * prod(problem.window.kernel)
        read = taps * ITEMSIZE[problem.dtype] / (self.numbers(hw)["taps"] * hw.bandwidth)
        return max(problem.floor(hw), read) + hw.launch_seconds

    def launch(self, problem: Pool, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, a result a thread, or the neighbouring channels of one access."""
        dtype = problem.dtype
        vec = access_width(problem.channels, dtype) if problem.channels else 1
        size = problem.planes * prod(problem.outer) // vec
        small = ITEMSIZE[dtype] == 1 and vec >= 4 and size < 2**31 and problem.kind == "max"
        after = {"E" + a: pad for a, pad in zip("DHW", problem.window.after, strict=True)}
        text = "x y indices, i64 size, i32 channels inner outer, f32 p, i64 nowhere"
        return self.one(
            "pool", -(-size // 256), 256, *args(text, problem, size=size),
            VEC=vec, CHANNELS_LAST=bool(problem.channels), LOWEST=LOWEST[dtype],
            T=C_TYPES[dtype], ACC=accumulator(dtype) if dtype in FLOATS else "float",
            MODE=_KINDS.index(problem.kind), INCLUDE_PAD=problem.include_pad,
            COLUMN_MAJOR=problem.column_major, **window_macros(problem.window), **after,
            CODES=small or None,
        )  # fmt: skip


class MaxGrad(Planned[MaxPoolGrad], HeuristicKernel[MaxPoolGrad]):
    """pool/max_pool_grad.cu. Operands: x dy dx."""

    source = "pool/max_pool_grad.cu"

    def cost(self, problem: MaxPoolGrad, config: KernelConfig, hw: Hardware) -> float:
        """The floor, or the instructions of an element of x, which vectors of channels share."""
        elements = problem.planes * prod(problem.inner) * problem.channels
        # fitted to 3 x 3 windows of stride 2
        each = self.numbers(hw)["channels_last" if problem.channels > 1 else "planes"]
        return max(problem.floor(hw), elements * each / hw.rate("float32"))

    def plan(self, problem: MaxPoolGrad, config: KernelConfig, hw: Hardware) -> Plan:
        """The windows' first maxima, by the number of their tap, then the sums."""
        vec = access_width(problem.channels, problem.dtype)
        outputs = problem.planes * prod(problem.outer) * problem.channels
        taps = prod(problem.window.kernel)
        wide_code = 1 if taps < 1 << 8 else 2 if taps < 1 << 16 else 4
        wide = access_width(problem.inner[2], problem.dtype) if problem.channels == 1 else 1
        elements = problem.planes * prod(problem.inner) * problem.channels
        macros = typed(problem) | window_macros(problem.window) | {
            "INDEX": "u32" if max(elements, outputs) < 2**31 else "i64",
            "CODE": f"u{8 * wide_code}", "VEC": vec, "WIDE": wide,
        }  # fmt: skip

        def each(entry: str, size: int, names: str) -> Launches:
            made = args(f"{names}, i64 size, i32 channels inner outer", problem, size=size)
            return self.one(entry, -(-size // 256), 256, *made, **macros)

        codes = each("max_pool_codes", outputs // vec, "x workspace")
        sums = each("max_pool_grad", elements // (vec * wide), "dy workspace dx")
        return codes + sums, outputs * wide_code


class Taps(HeuristicKernel[Resample]):
    """pool/resample.cu. Operands: x source weight y; of rows above above_weight."""

    version = 3
    source = "pool/resample.cu"
    free_axes = "yz"

    def _vec(self, problem: Resample) -> int:
        return access_width(problem.inner, problem.dtype, problem.out_dtype)

    def cost(self, problem: Resample, config: KernelConfig, hw: Hardware) -> float:
        """The usual, or the instructions of a tap, of which vectors share the address."""
        sums = problem.outer * problem.resized * problem.rows[1] * problem.inner
        taps = sums * problem.taps * max(1, problem.rows[2])
        costs = self.numbers(hw)
        each = costs["tap"] + costs["address"] / self._vec(problem)
        took = taps * each / hw.rate("float32")
        return max(took + hw.launch_seconds, super().cost(problem, config, hw))

    def launch(self, problem: Resample, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, an access of 16 bytes a thread, or up to four columns."""
        length, resized, taps = problem.rows
        vec = self._vec(problem)
        columns = access_width(problem.resized, "float32") if problem.inner == 1 else 1
        across, inner = problem.resized // columns, problem.inner // vec
        threads = problem.outer * resized * across * inner
        above = "above above_weight" if taps else "source weight"
        made = args(
            f"x source weight {above} y, i64 threads, i32 rows length across, i64 inner, "
            "f32 outside", problem, threads=threads, rows=(length, resized), across=across,
            inner=inner,
        )  # fmt: skip
        return self.one(
            "resample", -(-threads // 256), 256, *made, X=C_TYPES[problem.dtype],
            Y=C_TYPES[problem.out_dtype], ACC=problem.compute, TAPS=problem.taps, ROWS=taps,
            VEC=vec, COLUMNS=columns,
        )  # fmt: skip


KERNELS: Kernels = {
    "Pool": (Windows(),),
    "MaxPoolGrad": (MaxGrad(),),
    "ChannelWindow": (Each(
        "pool/lrn.cu", "lrn", "x y, i64 size, i32 channels, i64 inner, i32 width, "
        "f32 alpha beta bias", typed,
    ),),
    "Resample": (Taps(),),
    "GridSample": (Each(
        "pool/grid_sample.cu", "grid_sample", "x grid y, i64 points batch, i32 channels inner",
        lambda p: typed(p, G="grid") | {"RANK": p.rank, "MODE": p.mode, "PADDING": p.padding,
                                        "ALIGN": p.align},
        count="points batch", per=128, threads=128,
    ),),
    "Col2Im": (Each(
        "pool/col2im.cu", "col2im", "x y, i64 size, i32 image blocks",
        lambda p: typed(p) | {"TRANSPOSED": True} | window_macros(p.window),
    ),),
}  # fmt: skip

"""Pool, ChannelWindow (LRN), Resample, GridSample, Col2Im: gathers of neighbours with weights."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from onnx_fuse.cuda.macros import C_TYPES, FLOATS, accumulator
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.rule_based import HeuristicKernel, access_width, window_macros
from onnx_fuse.program.call import LOWEST
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig, Launches, Num, Ptr
from onnx_fuse.program.problems import (
    ChannelWindow,
    Col2Im,
    GridSample,
    MaxPoolGrad,
    Pool,
    Resample,
)

_KINDS = ("max", "average", "lp")


class Windows(HeuristicKernel):
    """pool/pool.cu. Operands: x y indices."""

    source = "pool/pool.cu"
    free_axes = "yz"

    def cost(self, problem: Pool, config: KernelConfig, hw: Hardware) -> float:
        """The floor, with each tap of x read at three quarters of memory's rate, through caches."""
        taps = problem.planes * prod(problem.outer) * prod(problem.window.kernel)
        read = taps * ITEMSIZE[problem.dtype] / (0.75 * hw.bandwidth)
        return max(problem.floor(hw), read) + hw.launch_seconds

    def launch(self, problem: Pool, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, a result a thread, or the neighbouring channels of one access."""
        dtype = problem.dtype
        vec = access_width(problem.channels, dtype) if problem.channels else 1
        size = problem.planes * prod(problem.outer) // vec
        small = ITEMSIZE[dtype] == 1 and vec >= 4 and size < 2**31 and problem.kind == "max"
        codes = {"CODES": True} if small else {}
        after = {"E" + a: pad for a, pad in zip("DHW", problem.window.after, strict=True)}
        return self.one(
            "pool", -(-size // 256), 256, Ptr("x"), Ptr("y"), Ptr("indices"), Num("i64", size),
            *(Num("i32", n) for n in (problem.channels, *problem.inner, *problem.outer)),
            Num("f32", problem.p), Num("i64", problem.nowhere),
            VEC=vec, CHANNELS_LAST=bool(problem.channels), LOWEST=LOWEST[dtype],
            T=C_TYPES[dtype], ACC=accumulator(dtype) if dtype in FLOATS else "float",
            MODE=_KINDS.index(problem.kind), INCLUDE_PAD=problem.include_pad,
            COLUMN_MAJOR=problem.column_major, **window_macros(problem.window), **after, **codes,
        )  # fmt: skip


class MaxGrad(HeuristicKernel):
    """pool/max_pool_grad.cu. Operands: x dy dx."""

    source = "pool/max_pool_grad.cu"

    def cost(self, problem: MaxPoolGrad, config: KernelConfig, hw: Hardware) -> float:
        """The floor, or the instructions of an element of x, which vectors of channels share."""
        elements = problem.planes * prod(problem.inner) * problem.channels
        # 3 x 3 windows of stride 2 on an H200 (2026-11), in picoseconds
        each = 4e-12 if problem.channels > 1 else 12e-12
        return max(problem.floor(hw), elements * each * 50e12 / hw.rate("float32"))

    def launch(self, problem: MaxPoolGrad, config: KernelConfig, hw: Hardware) -> Launches:
        """The windows' first maxima, by the number of their tap, then the sums."""
        vec, outputs = access_width(problem.channels, problem.dtype), _outputs(problem)
        wide = access_width(problem.inner[2], problem.dtype) if problem.channels == 1 else 1
        elements = problem.planes * prod(problem.inner) * problem.channels
        macros: dict[str, Any] = {
            "T": C_TYPES[problem.dtype], "ACC": accumulator(problem.dtype),
            "INDEX": "u32" if max(elements, outputs) < 2**31 else "i64",
            "CODE": f"u{8 * _code_bytes(problem)}", "VEC": vec, "WIDE": wide,
            **window_macros(problem.window),
        }  # fmt: skip
        sizes = [Num("i32", n) for n in (problem.channels, *problem.inner, *problem.outer)]

        def each(entry: str, size: int, *names: str) -> Launches:
            pointers = map(Ptr, names)
            return self.one(
                entry, -(-size // 256), 256, *pointers, Num("i64", size), *sizes, **macros
            )

        codes = each("max_pool_codes", outputs // vec, "x", "workspace")
        return codes + each("max_pool_grad", elements // (vec * wide), "dy", "workspace", "dx")

    def workspace(self, problem: MaxPoolGrad, config: KernelConfig, hw: Hardware) -> int:
        """A number for each window."""
        return _outputs(problem) * _code_bytes(problem)


def _outputs(problem: MaxPoolGrad) -> int:
    return problem.planes * prod(problem.outer) * problem.channels


def _code_bytes(problem: MaxPoolGrad) -> int:
    taps = prod(problem.window.kernel)
    return 1 if taps < 1 << 8 else 2 if taps < 1 << 16 else 4


class Channels(HeuristicKernel):
    """pool/lrn.cu. Operands: x y."""

    source = "pool/lrn.cu"
    free_axes = "yz"

    def launch(self, problem: ChannelWindow, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, an element a thread."""
        return self.one(
            "lrn", -(-problem.size // 256), 256,
            Ptr("x"), Ptr("y"), Num("i64", problem.size), Num("i32", problem.channels),
            Num("i64", problem.inner), Num("i32", problem.width), Num("f32", problem.alpha),
            Num("f32", problem.beta), Num("f32", problem.bias),
            T=C_TYPES[problem.dtype], ACC=accumulator(problem.dtype),
        )  # fmt: skip


class Taps(HeuristicKernel):
    """pool/resample.cu. Operands: x source weight y; of rows above above_weight."""

    version = 3
    source = "pool/resample.cu"
    free_axes = "yz"

    def _vec(self, problem: Resample) -> int:
        wider = max(problem.dtype, problem.out_dtype, key=ITEMSIZE.__getitem__)
        return access_width(problem.inner, wider)

    def cost(self, problem: Resample, config: KernelConfig, hw: Hardware) -> float:
        """The usual, or the instructions of a tap, of which vectors share the address."""
        sums = problem.outer * problem.resized * problem.rows[1] * problem.inner
        taps = sums * problem.taps * max(1, problem.rows[2])
        took = taps * (6 + 14 / self._vec(problem)) / hw.rate("float32")
        return max(took + hw.launch_seconds, super().cost(problem, config, hw))

    def launch(self, problem: Resample, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, an access of 16 bytes a thread, or up to four columns."""
        length, resized, taps = problem.rows
        vec = self._vec(problem)
        columns = access_width(problem.resized, "float32") if problem.inner == 1 else 1
        across, inner = problem.resized // columns, problem.inner // vec
        threads = problem.outer * resized * across * inner
        above = ("above", "above_weight") if taps else ("source", "weight")
        return self.one(
            "resample", -(-threads // 256), 256,
            *map(Ptr, ("x", "source", "weight", *above, "y")), Num("i64", threads),
            *(Num("i32", n) for n in (length, resized, problem.length, across)),
            Num("i64", inner), Num("f32", problem.outside),
            X=C_TYPES[problem.dtype], Y=C_TYPES[problem.out_dtype], ACC=problem.compute,
            TAPS=problem.taps, ROWS=taps, VEC=vec, COLUMNS=columns,
        )  # fmt: skip


class Points(HeuristicKernel):
    """pool/grid_sample.cu. Operands: x grid y."""

    source = "pool/grid_sample.cu"
    free_axes = "yz"

    def launch(self, problem: GridSample, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, a point a thread."""
        return self.one(
            "grid_sample", -(-problem.points * problem.batch // 128), 128,
            *map(Ptr, ("x", "grid", "y")), Num("i64", problem.points), Num("i64", problem.batch),
            *(Num("i32", n) for n in (problem.channels, *problem.inner)),
            T=C_TYPES[problem.dtype], G=C_TYPES[problem.grid], ACC=accumulator(problem.dtype),
            RANK=problem.rank, MODE=problem.mode, PADDING=problem.padding, ALIGN=problem.align,
        )  # fmt: skip


class Columns(HeuristicKernel):
    """pool/col2im.cu. Operands: x y."""

    source = "pool/col2im.cu"
    free_axes = "yz"

    def launch(self, problem: Col2Im, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, a pixel a thread."""
        return self.one(
            "col2im", -(-problem.size // 256), 256, Ptr("x"), Ptr("y"), Num("i64", problem.size),
            *(Num("i32", n) for n in (*problem.image, *problem.blocks)),
            T=C_TYPES[problem.dtype], ACC=accumulator(problem.dtype), TRANSPOSED=True,
            **window_macros(problem.window),
        )  # fmt: skip


KERNELS: dict[str, Sequence[Kernel]] = {
    "Pool": (Windows(),),
    "MaxPoolGrad": (MaxGrad(),),
    "ChannelWindow": (Channels(),),
    "Resample": (Taps(),),
    "GridSample": (Points(),),
    "Col2Im": (Columns(),),
}

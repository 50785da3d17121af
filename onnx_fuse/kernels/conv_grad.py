"""ConvWeightGrad candidates: sums over the pixels of channels-last images.

Operands: x dy dw. A sum is split by the shape alone, never by the GPU, so that its bits are the
same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from onnx_fuse.cuda.macros import C_TYPES, accumulator, pow2
from onnx_fuse.kernels.conv_nhwc import (
    gathered,
    image_strides,
    is_deep,
    unboxed,
    unpaired,
)
from onnx_fuse.kernels.gemm_sm90 import Wgmma as Gemm
from onnx_fuse.kernels.kernel import Kernels, launch, matrices, renamed, roofline
from onnx_fuse.kernels.rule_based import (
    Chosen,
    HeuristicKernel,
    Plan,
    Planned,
    access_width,
    typed,
    window_macros,
)
from onnx_fuse.program.launch import Launch, Launches, Ptr, args
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.problems import ConvWeightGrad

_BLOCKS = 264  # blocks a launch should have
_THREADS, _TAPS = 1 << 17, 64  # threads that sum the parts, and taps a block of them has at most
_LEAST = 256  # pixels a part has at least
# BM, BN, WM, WN, BK, stages -> share of the full rate that the tile reaches on Hopper
_TILES: dict[tuple[int, ...], float] = {
    (128, 128, 64, 32, 32, 4): 0.4,
    (128, 64, 32, 32, 32, 4): 0.35,
    (64, 128, 32, 32, 32, 4): 0.35,
    (64, 64, 32, 16, 64, 4): 0.25,
}


# wgmma's tiles: filters, columns, blocks of a multiprocessor
_WGMMA_TILES = (
    (128, 256, 1), (256, 128, 1), (128, 192, 1), (128, 128, 1), (128, 128, 2), (256, 64, 1),
    (64, 256, 1), (64, 128, 1), (64, 128, 2), (128, 64, 1), (128, 64, 2),
)  # fmt: skip
_SMS = 132
# what the rule weighs, in seconds, fitted to 22 shapes of ResNet-50 on an H200 (2026-11): a product
# of 64 pixels; a step that no other block of the multiprocessor hides; a block's begin and end; a
# row of an operand's step from L2, for all blocks, and what one of gathered pixels takes of that; a
# byte from memory; a byte of a part, written and read; a launch. What takes longest counts, and of
# the others a share
_PRODUCT, _STEP, _BLOCK, _ROW, _GATHERED = 2.2e-11, 3.6e-8, 1.8e-6, 6.7e-12, 1.6
_BYTE, _PART, _LAUNCH, _REST = 2.6e-13, 4.2e-13, 3e-7, 0.1
_PRODUCT_TILES = 96  # tiles of 64 x 128 from which on a product with its pixels in one part pays


def _unlike(problem: ConvWeightGrad, tf32: bool = False) -> str | None:
    """Why no product over pixels of 16 bits, or of float32 by `tf32`, makes it; None if one can."""
    narrow = problem.dtype in ("float16", "bfloat16")
    if not narrow and not (tf32 and (problem.dtype, problem.math) == ("float32", "tf32")):
        return f"for 16-bit operands{' or tf32' * tf32}, not {problem.dtype} by {problem.math}"
    if problem.filters % 8 or any(n % 8 for n in (problem.channels, *image_strides(problem))):
        return "the channels or filters of a group are no multiple of 8"
    if problem.batch * prod(problem.outer) >= 2**31 - 2**16:
        return "more pixels than 31 bits count"
    return None


def _divide(d: int) -> tuple[int, int]:
    """The factor and the shift of a division by `d` of a number below 2^31."""
    shift = max(0, d - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - d)) // d + 1, shift


def _total(problem: ConvWeightGrad, splits: int) -> Launch:
    """The sum of `splits` parts in the workspace."""
    rows, channels = problem.groups * problem.filters, problem.channels
    taps = prod(problem.window.kernel)
    if channels == 1 or taps == 1:  # the parts lie as dw does
        rows, channels, taps = 1, rows * channels * taps, 1
    vec = access_width(channels, "float64" if problem.dtype == "float64" else "float32")
    sums = max(1, rows * channels * taps // vec)
    lanes, few = pow2(max(1, min(_THREADS // sums, splits // 2, 32))), min(taps, _TAPS)
    most = max(1, (256 if taps == 1 else 512) // (few * lanes))
    across = vec * min(1 << (most.bit_length() - 1), -(-channels // vec))
    threads = min(256, -(-across // vec * few * lanes // 32) * 32)
    return launch(
        "conv/weight_sum.cu", "conv_weight_sum",
        (rows * -(-channels // across), -(-taps // few), 1), threads,
        *args("workspace dw, u32 sizes", sizes=(rows, channels, taps, splits)),
        TY=C_TYPES[problem.out_dtype], ACC=accumulator(problem.dtype), VEC=vec, LANES=lanes,
        CB=across, TB=few,
    )  # fmt: skip


class ByMma(Planned[ConvWeightGrad], HeuristicKernel[ConvWeightGrad]):
    """conv/weight_grad_sm80.cu: a product over the pixels on the tensor cores, in 16 bits or tf32.

    Configurations: `tile` (BM, BN, WM, WN, BK of 16 bits, stages) and `split` parts of the sum.
    """

    name = "mma"
    source = "conv/weight_grad_sm80.cu"

    def supports(self, problem: ConvWeightGrad, hw: Hardware) -> str | None:
        return "at most two spatial axes" if is_deep(problem) else _unlike(problem, tf32=True)

    def configs(self, problem: ConvWeightGrad, hw: Hardware) -> Sequence[KernelConfig]:
        """The rule's, then every tile with the parts that the rule has for it."""
        return [KernelConfig.of(), *(KernelConfig.of(tile=tile) for tile in _TILES)]

    def _ruled(
        self, problem: ConvWeightGrad, config: KernelConfig
    ) -> tuple[tuple[int, ...], int, int]:
        """The tile, its tiles of the result, and the pixels of a part."""
        pixels = problem.batch * prod(problem.outer)

        def tiles(tile: tuple[int, ...]) -> int:
            across = -(-problem.depth // tile[1])
            return problem.groups * -(-problem.filters // tile[0]) * across

        def seconds(tile: tuple[int, ...]) -> float:
            return tiles(tile) * tile[0] * tile[1] / _TILES[tile]

        tile = config.integers("tile") or min(_TILES, key=seconds)
        parts = max(1, min(pixels // _LEAST, _BLOCKS // tiles(tile)))
        step = tile[4] * 2 // ITEMSIZE[problem.dtype]
        return tile, tiles(tile), -(-pixels // (parts * step)) * step

    def cost(self, problem: ConvWeightGrad, config: KernelConfig, hw: Hardware) -> float:
        """Bytes and products at the shares that ConvNeXt's first layer reaches (H200, 2026-11)."""
        return roofline(hw, self.numbers(hw), problem.bytes, problem.flops / problem.rate(hw))

    def plan(self, problem: ConvWeightGrad, config: KernelConfig, hw: Hardware) -> Plan:
        tile, tiles, chunk = self._ruled(problem, config)
        bm, bn, wm, wn, bk, stages = tile
        size = ITEMSIZE[problem.dtype]
        (_, h, w), (_, oh, ow) = problem.inner, problem.outer
        pixels = problem.batch * oh * ow
        splits = -(-pixels // chunk)
        geometry, (sn, sy, sx) = window_macros(problem.window), image_strides(problem)
        macros = {"BM": bm, "BN": bn, "WM": wm, "WN": wn, "BK": bk * 2 // size, "STAGES": stages}
        made = args(
            "x dy workspace, u32 pixels, i32 groups channels filters h w, u32 divisors, "
            "i64 sn, i32 sy sx", problem, pixels=pixels, h=h, w=w, sn=sn, sy=sy, sx=sx,
            divisors=(*_divide(oh * ow), *_divide(ow), oh * ow, ow, chunk),
        )  # fmt: skip
        product = self.one(
            "conv_weight_grad", (tiles, splits, 1), 32 * bm * bn // (wm * wn), *made,
            smem=stages * bk * 2 * (bm + bn + 16), T=C_TYPES[problem.dtype],
            DENSE=not problem.x_strides, **macros, **geometry,
        )  # fmt: skip
        parts = 4 * splits * problem.groups * problem.filters * problem.depth
        return (*product, _total(problem, splits)), parts


class _Way(NamedTuple):
    """How ByWgmma runs: its tile, tiles of dw, parts of the sum, and pixels of a part."""

    tile: tuple[int, ...]
    tiles: int
    parts: int
    chunk: int

    def direct(self, problem: ConvWeightGrad) -> bool:
        """Whether the only part is dw as it lies."""
        return self.parts == 1 and prod(problem.window.kernel) == 1


class ByWgmma(Planned[ConvWeightGrad], HeuristicKernel[ConvWeightGrad]):
    """conv/weight_grad_sm90.cu: the same product by TMA and wgmma.

    Configurations: `tile` (filters, columns of blocks of 64 channels of a tap, blocks of a
    multiprocessor) and `split` parts of the sum.
    """

    name = "wgmma"
    source, waits = "conv/weight_grad_sm90.cu", "later"

    def supports(self, problem: ConvWeightGrad, hw: Hardware) -> str | None:
        if hw.arch != "sm_90a":
            return f"wgmma needs sm_90a, this is {hw.arch}"
        if problem.groups > 1 or problem.channels < 32:
            return f"{problem.groups} groups of {problem.channels} channels (one, of at least 32)"
        return _unlike(problem) or unboxed(problem)

    def configs(self, problem: ConvWeightGrad, hw: Hardware) -> Sequence[KernelConfig]:
        """The rule's, then every tile with the parts that the rule has for it."""
        return [KernelConfig.of(), *(KernelConfig.of(tile=tile) for tile in _WGMMA_TILES)]

    def cost(self, problem: ConvWeightGrad, config: KernelConfig, hw: Hardware) -> float:
        seconds = self._ruled(problem.concrete(), config)[0]
        # half of a block of 64 channels is idle: 1.6 of what the rule weighs (H200, 2026-11)
        return max(problem.floor(hw), seconds * (1.5 if problem.channels <= 32 else 1.0))

    def _ruled(self, problem: ConvWeightGrad, config: KernelConfig) -> tuple[float, _Way]:
        steps = -(-problem.batch * prod(problem.outer) // 64)
        blocks = -(-problem.channels // 64) * prod(problem.window.kernel)
        ways = []
        for tile in (config.integers("tile"),) if config.attrs else _WGMMA_TILES:
            bm, bn, resident = tile
            if not config.attrs and bm > 64 and bm >= 2 * problem.filters:
                continue  # half of it would be idle
            tiles = -(-problem.filters // bm) * -(-blocks // (bn // 64))
            most = resident * _SMS // tiles
            for aim in (config.integer("split"),) if config.attr("split") else (most, 2 * most):
                each = -(-steps // max(1, min(steps // 4, aim)))
                way = _Way(tile, tiles, -(-steps // each), each * 64)
                ways.append((self._seconds(problem, way), way))
        return min(ways)

    def _seconds(self, problem: ConvWeightGrad, way: _Way) -> float:
        """A multiprocessor's blocks, what all read from L2 or memory, then what adds the parts."""
        bm, bn, resident = way.tile
        size = 4 * problem.filters * problem.depth
        blocks, steps = way.tiles * way.parts, way.chunk // 64
        rounds = -(-blocks // (_SMS * resident))
        together = -((-blocks // _SMS) // rounds)
        product = bm * bn * _PRODUCT
        step = max(product * together, product + _STEP)
        times = (
            rounds * (steps * step + _BLOCK),
            blocks * steps * (bm + _GATHERED * bn) * _ROW + _BLOCK,
            self._moved(problem) * _BYTE + _BLOCK,
        )
        seconds = max(times) * (1 - _REST) + sum(times) * _REST + _LAUNCH
        return seconds if way.direct(problem) else seconds + size * way.parts * _PART

    def _moved(self, problem: ConvWeightGrad) -> int:
        """Bytes of dy and of the pixels that a tap sees."""
        window = zip(problem.inner, problem.outer, problem.window.kernel, strict=True)
        seen = prod(min(i, o * k) for i, o, k in window)
        each = problem.channels * seen + problem.filters * prod(problem.outer)
        return problem.batch * each * ITEMSIZE[problem.dtype]

    def plan(self, problem: ConvWeightGrad, config: KernelConfig, hw: Hardware) -> Plan:
        way = self._ruled(problem, config)[1]
        bm, bn, resident = way.tile
        outer = problem.outer[0 if is_deep(problem) else 1 :]
        pixels, m, c = problem.batch * prod(outer), problem.filters, problem.channels
        stage = (bm + bn) * 128
        room = (hw.smem_per_block + 1024) // resident - 1024  # of which each block's 1024 are lost
        stages = min(8, (room - 1024) // (stage + 16))
        slopes = matrices("dy", problem.dtype, m, pixels, m, (64, 64))
        direct = way.direct(problem)
        part = C_TYPES[problem.out_dtype if direct else "float32"]
        macros: dict[str, Any] = {"T": C_TYPES[problem.dtype], "BM": bm, "BN": bn, "STAGES": stages,
                  "RESIDENT": resident, "IM2COL": 1, "PART": part}  # fmt: skip
        made = args(
            f"{'dw' if direct else 'workspace'}, u32 pixels, i32 sizes, u32 chunk", way,
            pixels=pixels, sizes=(c, m, *outer),
        )  # fmt: skip
        product = self.one(
            "conv_weight_grad_wgmma", (way.tiles, way.parts, 1), 288, slopes,
            gathered(problem, 64), *made, smem=stages * (stage + 16), **macros,
            DEEP=is_deep(problem) or None, **window_macros(problem.window),
        )  # fmt: skip
        if direct:
            return product, 0
        parts = 4 * way.parts * problem.filters * problem.depth
        return (*product, _total(problem, way.parts)), parts


class PointwiseWeightGrad(Chosen[ConvWeightGrad]):
    """A filter of one tap: a Gemm of dy's and x's pixels, where its tiles are many."""

    name = "product"

    def __init__(self) -> None:
        self.inner = Gemm()

    def _gemm(self, problem: ConvWeightGrad) -> GemmProblem:
        return GemmProblem.of(
            "Gemm", m=problem.filters, n=problem.channels, k=problem.batch * prod(problem.outer),
            dtype=problem.dtype, out_dtype=problem.out_dtype, trans_a=True,
        )  # fmt: skip

    def supports(self, problem: ConvWeightGrad, hw: Hardware) -> str | None:
        window = problem.window
        if problem.groups > 1 or problem.x_strides or max(*window.kernel, *window.strides) > 1:
            return "for filters of one tap over dense images, in one group"
        if any((*window.before, *window.after)):
            return "pixels beyond the image are no part of a matrix multiplication"
        if -(-problem.filters // 64) * -(-problem.channels // 128) < _PRODUCT_TILES:
            return "tiles are few, so that pixels are summed in parts"
        return _unlike(problem) or self.inner.supports(self._gemm(problem), hw)

    def tiles(self, problem: ConvWeightGrad, hw: Hardware) -> Sequence[KernelConfig]:
        """The product's configurations whose sums are whole."""
        configs = self.inner.configs(self._gemm(problem), hw)
        return [how for how in configs if how.integer("splits") == 1]

    def seconds(self, problem: ConvWeightGrad, config: KernelConfig, hw: Hardware) -> float:
        return self.inner.cost(self._gemm(problem), config, hw)

    def launch(self, problem: ConvWeightGrad, config: KernelConfig, hw: Hardware) -> Launches:
        how = self.ruled(problem, config, hw)
        names = {"a": Ptr("dy"), "b": Ptr("x"), "y": Ptr("dw")}
        return renamed(self.inner.launch(self._gemm(problem), how, hw), names)


class DepthwiseGrad(Planned[ConvWeightGrad], HeuristicKernel[ConvWeightGrad]):
    """conv/depthwise_weight_grad.cu: two channels a thread, their filters in registers."""

    name = "depthwise"
    source = "conv/depthwise_weight_grad.cu"

    def supports(self, problem: ConvWeightGrad, hw: Hardware) -> str | None:
        if reason := unpaired(problem):
            return reason
        if is_deep(problem):
            return "at most two spatial axes"
        if problem.window.kernel[2] > 16 or self._span(problem, 1) > 32:
            return "the filter is too wide"
        return None

    def _span(self, problem: ConvWeightGrad, wide: int) -> int:
        taps = problem.window
        return (wide - 1) * taps.strides[2] + (taps.kernel[2] - 1) * taps.dilations[2] + 1

    def _rule(self, problem: ConvWeightGrad) -> tuple[int, int, int]:
        """Pixels at once, rows of the filter a thread, and rows of dy a block."""
        _, taps, across = problem.window.kernel
        wide = next(n for n in (8, 4, 2, 1) if n == 1 or self._span(problem, n) <= 16)
        if problem.outer[2] % 7 == 0 and wide == 8 and self._span(problem, 7) <= 14:
            wide = 7
        most = 16  # taps a thread: more leave room for few warps, which wait for memory
        rows_of = [n for n in range(taps, 0, -1) if taps % n == 0 and n * across <= most]
        krows = rows_of[0] if rows_of else 1
        rows = problem.batch * problem.outer[1]
        blocks = -(-problem.groups // 64) * (taps // krows)
        parts = max(1, min(rows // 8, 3 * _SMS // blocks))
        return wide, krows, -(-rows // (8 * parts)) * 8

    def cost(self, problem: ConvWeightGrad, config: KernelConfig, hw: Hardware) -> float:
        """Passes over x and dy, one for each group of rows of the filter.

        Their rate is that of filters of 7 x 7 on an H200 (2026-11).
        """
        problem = problem.concrete()
        passes = problem.window.kernel[1] // self._rule(problem)[1]
        return roofline(hw, self.numbers(hw), passes * problem.bytes)

    def plan(self, problem: ConvWeightGrad, config: KernelConfig, hw: Hardware) -> Plan:
        wide, krows, chunk = self._rule(problem)
        (_, h, w), (_, oh, ow) = problem.inner, problem.outer
        rows = problem.batch * oh
        splits = -(-rows // chunk)
        grid = (-(-problem.groups // 64), splits, problem.window.kernel[1] // krows)
        made = args("x dy workspace, i32 sizes", sizes=(rows, problem.groups, h, w, oh, ow, chunk))
        sums = self.one(
            "conv_depthwise_weight_grad", grid, 256, *made, WIDE=wide, KROWS=krows,
            **typed(problem), **window_macros(problem.window),
        )  # fmt: skip
        wide = 8 if problem.dtype == "float64" else 4
        return (*sums, _total(problem, splits)), wide * splits * problem.groups * problem.depth


KERNELS: Kernels = {"ConvWeightGrad": (DepthwiseGrad(), PointwiseWeightGrad(), ByWgmma(), ByMma())}

"""Products of 8-bit integers in int32: MatMulInteger, ConvInteger, QLinearMatMul and QLinearConv,
and convolutions and products between a DequantizeLinear and a QuantizeLinear.

What is quantized again, y = saturate(round(sum * scale) + zero), is a
pointwise call behind the product. A convolution is a product of the filter with the windows of x,
which are copied for it: as many times x's bytes as the filter has taps over its strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

import numpy as np

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.cuda.pointwise import SCALAR
from onnx_fuse.kernels.conv_nhwc import (
    gathered,
    gathering,
    image_strides,
    is_deep,
    unboxed,
)
from onnx_fuse.kernels.kernel import Kernel, Kernels, matrices, roofline
from onnx_fuse.kernels.rule_based import Chosen, HeuristicKernel, tail_macros, window_macros
from onnx_fuse.program.contractions import IntegerProduct
from onnx_fuse.program.problem import (
    ITEMSIZE,
    Hardware,
    KernelConfig,
    Launches,
    Num,
    Ptr,
    TensorMap,
    args,
)
from onnx_fuse.program.problems import IntegerConv
from onnx_fuse.program.size import minimum

BYTES = ("int8", "uint8")
LINE = 16
"""Bytes that rows of operands are padded to."""
TILES = {
    (128, 128): (2, 2, 64, 4), (128, 64): (2, 2, 64, 4), (64, 64): (2, 2, 128, 4),
    (32, 64): (1, 4, 128, 5), (16, 32): (1, 2, 256, 4),
}  # fmt: skip
"""Tile of y -> warps along it, bytes of k a step, steps in shared memory."""


class MmaInt8(Kernel):
    """The candidate of quant/mma_s8_sm80.cu, by mma.sync m16n8k32."""

    name = "mma_s8"
    source = "quant/mma_s8_sm80.cu"
    free_axes = "yz"

    def supports(self, problem: IntegerProduct, hw: Hardware) -> str | None:
        if problem.dtype not in BYTES or problem.b_dtype not in BYTES:
            return f"8-bit integers, not {problem.dtype} and {problem.b_dtype}"
        return None if len(problem.batch) <= 2 else "two batch axes at most"

    def configs(self, problem: IntegerProduct, hw: Hardware) -> Sequence[KernelConfig]:
        return [KernelConfig.of(tile=tile) for tile in TILES]

    def _blocks(self, problem: IntegerProduct, config: KernelConfig) -> tuple[int, int]:
        bm, bn = config.integers("tile")
        return ceil(problem.n / bn), ceil(problem.m / bm)

    def cost(self, problem: IntegerProduct, config: KernelConfig, hw: Hardware) -> float:
        """Steps of 64 of k, those of small tiles bound by their copies; bytes."""
        bm, bn = config.integers("tile")
        blocks = prod(self._blocks(problem, config)) * problem.batches
        at_once = min(blocks, hw.sm_count)
        step = max(
            128 * bm * bn / (0.5 * hw.rate("int8") / hw.sm_count), 1.2e-10 * (bm + bn) + 5e-8
        )
        seconds = ceil(blocks / at_once) * (ceil(problem.k / 64) * step + 3e-7)
        return hw.launch_seconds / 2 + max(seconds + 1e-6, problem.bytes / (0.8 * hw.bandwidth))

    def launch(self, problem: IntegerProduct, config: KernelConfig, hw: Hardware) -> Launches:
        bm, bn = config.integers("tile")
        wm, wn, bk, stages = TILES[bm, bn]
        kinds = {"": 0, "one": 1, "each": 2}
        names = {"int8": "s8", "uint8": "u8"}
        columns, rows = self._blocks(problem, config)
        made = args(
            "a b za zb y, i32 m n k, i64 lda ldb, i32 blocks, i64 steps, i32 za_step", problem,
            blocks=(columns, rows, problem.batch[-1] if problem.batch else 1),
            steps=(0, 0, *problem.a_strides)[-2:] + (0, 0, *problem.b_strides)[-2:],
        )  # fmt: skip
        return self.one(
            "mma_s8_sm80", columns * rows * problem.batches, 32 * wm * wn, *made,
            smem=stages * (bm + bn) * (bk + 16), A_TYPE=names[problem.dtype],
            B_TYPE=names[problem.b_dtype], BM=bm, BN=bn, WM=wm, WN=wn, BK=bk, STAGES=stages,
            ZA=kinds[problem.za], ZB=kinds[problem.zb],
        )  # fmt: skip


CONV_TILES = (
    (256, 64, 64, 32, 64, 3), (128, 128, 64, 32, 64, 4), (128, 128, 64, 32, 128, 3),
    (128, 64, 32, 32, 64, 4), (64, 128, 32, 32, 64, 4), (64, 64, 32, 32, 128, 4),
    (32, 64, 16, 32, 128, 4), (32, 32, 16, 16, 128, 4),
)  # fmt: skip
"""BM, BN, WM, WN, bytes of k a step, steps in shared memory."""
NUMBERS = tuple(f"n{i}" for i in range(16))
"""The numbers of a tail that the kernel takes as arguments: its text is then that of many tails."""


def row_of_filters(problem: IntegerConv) -> int:
    """The bytes of a tap of the weights."""
    return -(-problem.channels // LINE) * LINE


def is_flat(problem: IntegerConv) -> bool:
    """Whether y's pixels are x's, one behind another."""
    (sn, sy, sx), window = image_strides(problem), problem.window
    moved = any((*window.before, *(s - 1 for s in window.strides)))
    dense = (sn, sy) == (prod(problem.inner) * sx, problem.inner[2] * sx)
    return prod(window.kernel) == 1 and not moved and dense and problem.inner == problem.outer


def served_bytes(problem: IntegerConv) -> str | None:
    """Why no kernel reads the images, or None if the kernels do."""
    if problem.dtype not in BYTES:
        return f"8-bit integers, not {problem.dtype}"
    steps = image_strides(problem)
    if any(step % LINE for step in steps) or (problem.groups > 1 and problem.channels % LINE):
        return f"pixels are no multiple of {LINE} bytes apart"
    if max(steps[0], prod(problem.outer)) >= 2**29:
        return "an image of 2^29 elements or more"
    if problem.batch * prod(problem.outer) >= 2**31 - 256:
        return "2^31 pixels or more"
    return None


def _tail_of(problem: IntegerConv) -> tuple[list[Num], dict[str, Any]]:
    """The numbers of its tail, and the macros of it and of the window."""
    tail = problem.tail
    scalars = tail.expression.scalars if tail else ()
    named = len(scalars) <= len(NUMBERS) and {kind for kind, _ in scalars} <= {"f32", "i32"}
    numbers = [Num("f32", 0.0)] * len(NUMBERS)
    if named:
        numbers[: len(scalars)] = [Num(kind, value) for kind, value in scalars]
    kinds = (*(tail.reads if tail else ()), *["float32"] * 3)[:3]
    macros = {
        "T": C_TYPES[problem.dtype], "TRANSPOSED": False, "TY": "float",
        "ROWS_OF_E": sum(1 << i for i in (tail.rows if tail else ())),
        "NUMBERS": ", ".join(f"{SCALAR[n.ctype]} {name}"
                             for name, n in zip(NUMBERS, numbers, strict=True)),
        **{f"E{i}": C_TYPES[kind] for i, kind in enumerate(kinds, 1)},
        **window_macros(problem.window), **tail_macros(tail, NUMBERS[: len(scalars) * named]),
    }  # fmt: skip
    return numbers, macros


def shared_seconds(blocks: int, resident: int, work: float, alone: float, hw: Hardware) -> float:
    """Waves of blocks that share a multiprocessor, each at least as long as one block alone."""
    waves, last = divmod(-(-blocks // hw.sm_count), resident)
    return waves * max(resident * work, alone) + (max(last * work, alone) if last else 0)


@dataclass(frozen=True)
class IntegerCosts:
    """What a block of a convolution of integers takes on a multiprocessor, in seconds."""

    start: float = 4.4e-7
    """Until the first step's copies are there."""
    step: float = 1.95e-7
    """The latency of a step."""
    barrier: float = 5e-9
    """Of a step, what no other block hides."""
    traffic: float = 8e-12
    """Of two bytes of a filter into shared memory, a third of a pixel's, and of four out of it."""
    output: float = 1.02e-10
    """Of one result, as a code."""
    operand: float = 8.3e-11
    """Of one element that its tail reads, and what it makes of it."""


class MmaInt8Nhwc(Chosen):
    """conv/integer_sm80.cu: convolutions and products of integers, from codes to codes."""

    name = "mma_s8_nhwc"
    source = "conv/integer_sm80.cu"
    entry = "conv_integer"
    version = 3
    costs = IntegerCosts()
    all_tiles: tuple[tuple[int, ...], ...] = CONV_TILES
    warps = 1
    """Warps that share WM x WN."""
    pieces: tuple[int, ...] = (16, 8, 1)
    """Elements that a thread stores at once, where filters are a multiple of them."""

    def supports(self, problem: Any, hw: Hardware) -> str | None:
        if hw.cc < 80:
            return f"mma.sync of 16x8x32 integers needs sm_80, this is {hw.arch}"
        return served_bytes(problem) or HeuristicKernel.supports(self, problem, hw)

    def _vec(self, problem: IntegerConv) -> int:
        """Elements that a thread stores at once."""
        return next(n for n in self.pieces if problem.filters % n == 0)

    def _threads(self, tile: tuple[int, ...]) -> int:
        bm, bn, wm, wn, _, _ = tile
        return 32 * self.warps * (bm // wm) * (bn // wn)

    def _smem(self, problem: IntegerConv, tile: tuple[int, ...]) -> int:
        """Bytes of the stages; of the result, which takes their place or that of an operand."""
        (bm, bn, _, _, bk, stages), tail = tile, problem.tail
        wide = ITEMSIZE[tail.dtype] if tail else 4
        ahead = (
            tail is not None and tail.reads[:1] in (("int8",), ("uint8",)) and 0 not in tail.rows
        )
        if ahead and wide == 1 and self._vec(problem) == 16:
            return stages * (bm + bn) * bk + bm * (bn + 16)
        return max(stages * (bm + bn) * bk, bm * (bn * wide + 16))

    def tiles(self, problem: Any, hw: Hardware) -> Sequence[KernelConfig]:
        """Each tile that shared memory holds."""
        fitting = [t for t in self.all_tiles if self._smem(problem, t) <= hw.smem_per_block]
        return [KernelConfig.of(tile=tile) for tile in fitting]

    def _resident(self, problem: IntegerConv, tile: tuple[int, ...], hw: Hardware) -> int:
        """Blocks that a multiprocessor holds: by about how many registers its threads have."""
        _, _, wm, wn, _, _ = tile
        threads = self._threads(tile)
        registers = threads * (44 + wm * wn // 32 // self.warps)
        shared = (hw.smem_per_block + 1024) // (self._smem(problem, tile) + 1024)
        return max(1, min(2**16 // registers, shared, 2048 // threads))

    def seconds(self, problem: Any, config: KernelConfig, hw: Hardware) -> float:
        """Waves of blocks that share a multiprocessor or wait for their own latency; bytes."""
        tile, costs = config.integers("tile"), self.costs
        bm, bn, wm, wn, bk, _ = tile
        blocks = -(-problem.batch * prod(problem.outer) // bm) * -(-problem.filters // bn)
        blocks *= problem.groups
        steps = -(-problem.channels // bk) * prod(problem.window.kernel)
        products = 2 * bm * bn * bk / (problem.rate(hw) / hw.sm_count)
        read = (bm // wm) * (bn // wn) * (wm + wn)
        operands = problem.tail.expression.loads - 1 if problem.tail else 0
        copies = costs.traffic * bk / 2 * (3 * bm + bn + read / 2)
        work = steps * (products + copies + costs.barrier)
        work += bm * bn * (costs.output + costs.operand * operands)
        alone = work + costs.start + costs.step * steps
        took = shared_seconds(blocks, self._resident(problem, tile, hw), work, alone, hw)
        return max(took, problem.bytes / hw.bandwidth) + hw.launch_seconds

    def launch(self, problem: Any, config: KernelConfig, hw: Hardware) -> Launches:
        tile = self.ruled(problem, config, hw).integers("tile")
        bm, bn, wm, wn, bk, stages = tile
        rows, (sn, sy, sx) = problem.batch * prod(problem.outer), image_strides(problem)
        blocks = -(-rows // bm) * -(-problem.filters // bn) * problem.groups
        sizes = (problem.groups, problem.channels, problem.filters, *problem.inner, *problem.outer)
        made = args(
            "x weight bias e1 e2 e3 y, i32 rows sizes, i64 sn, i32 steps, shift scale, u32 border",
            rows=rows, sizes=sizes, sn=sn, border=problem.border % 256 * 0x01010101,
            steps=(problem.inner[1] * sy, sy, sx, row_of_filters(problem)),
        )  # fmt: skip
        numbers, macros = _tail_of(problem)
        return self.one(
            self.entry, blocks, self._threads(tile), *made, *numbers,
            smem=self._smem(problem, tile), FLAT=is_flat(problem), BM=bm, BN=bn, WM=wm, WN=wn,
            BK=bk, STAGES=stages, DEEP=is_deep(problem), VEC=self._vec(problem), **macros,
        )  # fmt: skip


WGMMA_TILES = (
    (128, 256, 64, 256, 128, 3), (128, 128, 64, 128, 128, 3), (128, 64, 64, 64, 128, 3),
    (128, 64, 64, 64, 64, 4), (128, 64, 128, 64, 128, 3),
    (128, 64, 128, 64, 64, 4), (64, 128, 64, 128, 64, 3), (64, 64, 64, 64, 128, 6),
    (64, 64, 64, 64, 128, 4), (64, 64, 64, 64, 64, 4), (256, 64, 128, 64, 64, 3),
)  # fmt: skip
"""As CONV_TILES; WM x WN is of a warpgroup, which has all filters of its tile."""


class WgmmaInt8Nhwc(MmaInt8Nhwc):
    """conv/integer_sm90.cu: the same on wgmma; mma.sync is for few rows and for other chips."""

    name = "wgmma_s8_nhwc"
    source, waits = "conv/integer_sm90.cu", "later"
    entry = "conv_integer_wgmma"
    version = 2
    costs = IntegerCosts(
        start=8.6e-7, step=6.4e-8, barrier=5.9e-8, traffic=4.6e-12, output=1.11e-10,
        operand=1.14e-10,
    )  # fmt: skip
    all_tiles = WGMMA_TILES
    warps = 4
    pieces = (16, 8, 4, 1)

    def supports(self, problem: Any, hw: Hardware) -> str | None:
        if hw.arch != "sm_90a":
            return f"wgmma needs sm_90a, this is {hw.arch}"
        if problem.batch * image_strides(problem)[0] >= 2**35:
            return "images of 2^35 bytes or more"
        return super().supports(problem, hw)

    def _smem(self, problem: IntegerConv, tile: tuple[int, ...]) -> int:
        """Bytes of the stages, and of the places of the pixels."""
        bm, bn, _, _, bk, stages = tile
        return stages * (bm + bn) * bk + 16 * bm


TMA_TILES = (
    (256, 64, 64, 4), (128, 64, 64, 4), (128, 64, 128, 3), (64, 64, 128, 4), (64, 128, 128, 3),
    (128, 256, 128, 4),
)  # fmt: skip
"""BM, BN, bytes of k a step, steps in shared memory."""


class TmaInt8Nhwc(Chosen):
    """conv/integer_tma_sm90.cu: the same with copies by TMA, of whole 64 filters."""

    name = "tma_s8_nhwc"
    source, waits = "conv/integer_tma_sm90.cu", "later"

    def supports(self, problem: Any, hw: Hardware) -> str | None:
        if hw.arch != "sm_90a":
            return f"wgmma needs sm_90a, this is {hw.arch}"
        if problem.groups > 1 or problem.filters % 64:
            return f"{problem.groups} groups of {problem.filters} filters (one, a multiple of 64)"
        if problem.border and any((*problem.window.before, *problem.window.after)):
            return "TMA makes zeros of a border"
        reason = None if is_flat(problem) else unboxed(problem)
        return reason or served_bytes(problem) or HeuristicKernel.supports(self, problem, hw)

    def _ahead(self, problem: IntegerConv) -> bool:
        """Whether the first operand of its tail is copied to shared memory."""
        tail = problem.tail
        return tail is not None and tail.reads[:1] in (("int8",), ("uint8",)) and 0 not in tail.rows

    def _smem(self, problem: IntegerConv, tile: tuple[int, ...]) -> int:
        """Bytes of the stages, of two tiles of the operand, and of the barriers."""
        bm, bn, bk, stages = tile
        return stages * (bm + bn) * bk + 2 * bm * bn * self._ahead(problem) + 16 * stages + 32

    def _resident(self, problem: IntegerConv, tile: tuple[int, ...], hw: Hardware) -> int:
        """Blocks that a multiprocessor holds: by shared memory, and the registers of the sums."""
        bm, bn, _, _ = tile
        warps = bm // 16 + 1  # which four schedulers share, with 2^14 registers each
        most = (hw.smem_per_block + 1024) // (self._smem(problem, tile) + 1024)

        def registers(blocks: int) -> int:
            return 512 // -(-blocks * warps // 4) // 8 * 8

        return max((n for n in range(1, most + 1) if registers(n) >= 40 + bn // 2), default=1)

    def tiles(self, problem: Any, hw: Hardware) -> Sequence[KernelConfig]:
        """Each tile that shared memory holds."""
        fitting = [t for t in TMA_TILES if self._smem(problem, t) <= hw.smem_per_block]
        return [KernelConfig.of(tile=tile) for tile in fitting]

    def seconds(self, problem: Any, config: KernelConfig, hw: Hardware) -> float:
        """As of the others; products and epilogues of tiles that share a multiprocessor overlap.

        Fitted to the layers of a ResNet-50 of 32 images on an H200 (2026-11).
        """
        tile, costs = config.integers("tile"), self.numbers(hw)
        bm, bn, bk, _ = tile
        blocks = -(-problem.batch * prod(problem.outer) // bm) * -(-problem.filters // bn)
        steps = -(-problem.channels // bk) * prod(problem.window.kernel)
        rate = costs["math"] * problem.rate(hw) / hw.sm_count
        products = steps * (2 * bm * bn * bk / rate + costs["barrier"])
        operands = problem.tail.expression.loads - 1 if problem.tail else 0
        each = costs["result"] + costs["operand"] * operands
        results = bm * min(bn, problem.filters) * each
        work = max(products, results) + 0.3 * min(products, results)
        alone = costs["start"] + max(costs["step"] * steps, products)
        took = shared_seconds(blocks, self._resident(problem, tile, hw), work, alone, hw)
        return roofline(hw, {}, problem.bytes, took)

    def launch(self, problem: Any, config: KernelConfig, hw: Hardware) -> Launches:
        tile = self.ruled(problem, config, hw).integers("tile")
        bm, bn, bk, stages = tile
        rows, filters = problem.batch * prod(problem.outer), problem.filters
        flat, resident = is_flat(problem), self._resident(problem, tile, hw)
        tiles = -(-rows // bm) * -(-filters // bn)
        line, pixel = row_of_filters(problem), image_strides(problem)[2]
        depth = prod(problem.window.kernel) * line
        x = (
            matrices("x", problem.dtype, problem.channels, rows, pixel, (bk, bm))
            if flat
            else replace(gathered(problem, bm), box=(bk, bm))
        )
        # of each 64 filters, the order by which a lane's columns are neighbours
        weight = TensorMap(
            Ptr("weight"), "int8", (depth, 2, 4, 8, filters // 64),
            (depth, 16 * depth, 2 * depth, 64 * depth), (bk, 2, 4, 8, bn // 64),
        )  # fmt: skip
        maps = [replace(x, swizzle=bk), replace(weight, swizzle=bk)]
        if ahead := self._ahead(problem):
            e1 = matrices("e1", problem.tail.reads[0], filters, rows, filters, (64, bm))
            maps.append(replace(e1, swizzle=0))
        made = args(
            "bias e1 e2 e3 y, u32 rows, i32 channels filters outer line, shift scale", problem,
            rows=rows, line=line,
        )  # fmt: skip
        numbers, macros = _tail_of(problem)
        return self.one(
            "conv_integer_tma", minimum(tiles, resident * hw.sm_count), 2 * bm + 32, *maps,
            *made, *numbers, smem=self._smem(problem, tile), FLAT=flat, BM=bm, BN=bn, BK=bk,
            STAGES=stages, BLOCKS=resident, AHEAD=ahead, WHOLE=filters % bn == 0,
            **macros,
            **({} if flat else {"IM2COL": 1, **gathering(problem)}),
        )  # fmt: skip


class BlocksOfPixels(HeuristicKernel):
    """conv/pixel_blocks.cu: images of a convolution with a stride, quantized as they are read."""

    name = "pixel_blocks"
    source = "conv/pixel_blocks.cu"
    version = 2

    def launch(self, problem: Any, config: KernelConfig, hw: Hardware) -> Launches:
        """A thread for each block of pixels."""
        blocks = problem.batch * problem.tall * problem.width
        scale, zero = problem.quantize or (1.0, 0)
        ends = np.iinfo(problem.out_dtype)
        numbers = map(float, (scale, 1 / np.float32(scale), zero, ends.min, ends.max))
        made = args(
            "x y, i64 blocks, i32 high columns tall width top first, i64 strides, u32 border, "
            "f32 numbers", problem, blocks=blocks, border=problem.border % 256,
            numbers=tuple(numbers),
        )  # fmt: skip
        (rows, steps), threads = problem.block, 256
        return self.one(
            "pixel_blocks", -(-blocks // threads), threads, *made, T=C_TYPES[problem.dtype],
            CHANNELS=problem.channels, SH=rows, SW=steps, QUANTIZED=bool(problem.quantize),
        )  # fmt: skip


KERNELS: Kernels = {
    "GemmInteger": (MmaInt8(),),
    "IntegerConv": (TmaInt8Nhwc(), WgmmaInt8Nhwc(), MmaInt8Nhwc()),
    "PixelBlocks": (BlocksOfPixels(),),
}

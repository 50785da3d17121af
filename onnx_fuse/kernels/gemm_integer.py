"""Products of 8-bit integers in int32: MatMulInteger, ConvInteger, QLinearMatMul and QLinearConv,
and convolutions and products between a DequantizeLinear and a QuantizeLinear.

What is quantized again, y = saturate(round(sum * scale) + zero), is a
pointwise call behind the product. A convolution is a product of the filter with the windows of x,
which are copied for it: as many times x's bytes as the filter has taps over its strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any

import numpy as np

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.kernels.conv_nhwc import gathered, image_strides, is_deep, unboxed
from onnx_fuse.kernels.kernel import Kernel, Kernels, matrices
from onnx_fuse.kernels.rule_based import Chosen, HeuristicKernel, numbered_tail, window_macros
from onnx_fuse.program.contractions import IntegerProduct
from onnx_fuse.program.launch import Launches, Num, Ptr, TensorMap, args
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig
from onnx_fuse.program.problems import IntegerConv, PixelBlocks
from onnx_fuse.program.size import minimum

BYTES = ("int8", "uint8")
CODES = (*BYTES, "float8_e4m3fn")
LINE = 16
"""Bytes that rows of operands are padded to."""
TILES = {
    (128, 128): (2, 2, 64, 4), (128, 64): (2, 2, 64, 4), (64, 64): (2, 2, 128, 4),
    (32, 64): (1, 4, 128, 5), (16, 32): (1, 2, 256, 4),
}  # fmt: skip
"""Tile of y -> warps along it, bytes of k a step, steps in shared memory."""


class MmaInt8(Kernel[IntegerProduct]):
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


def row_of_filters(problem: IntegerConv) -> int:
    """The bytes of a tap of the weights."""
    return -(-problem.channels // LINE) * LINE


def is_flat(problem: IntegerConv) -> bool:
    """Whether y's pixels are x's, one behind another."""
    (sn, sy, sx), window = image_strides(problem), problem.window
    moved = any((*window.before, *(s - 1 for s in window.strides)))
    dense = (sn, sy) == (prod(problem.inner) * sx, problem.inner[2] * sx)
    return prod(window.kernel) == 1 and not moved and dense and problem.inner == problem.outer


def _is_filled(problem: IntegerConv) -> bool:
    """Whether taps fall outside of the images, where x has no zeros."""
    window = problem.window
    return problem.border != 0 and any((*window.before, *window.after))


def _copies_codes(problem: IntegerConv) -> bool:
    """Whether the first operand of its tail can be copied to shared memory."""
    tail = problem.tail
    codes = tail is not None and {*tail.reads[:1]} & {*CODES} and 0 not in tail.rows
    return bool(codes) and problem.filters % LINE == 0


def served_bytes(problem: IntegerConv) -> str | None:
    """Why no kernel reads the images, or None if the kernels do."""
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
    numbers, of_tail = numbered_tail(tail)
    kinds = (*(tail.reads if tail else ()), *["float32"] * 3)[:3]
    macros = {
        "T": C_TYPES[problem.dtype], "TRANSPOSED": False, "TY": "float",
        "SHIFTED": problem.border != 0,
        "ROWS_OF_E": sum(1 << i for i in (tail.rows if tail else ())),
        **{f"E{i}": C_TYPES[kind] for i, kind in enumerate(kinds, 1)},
        **window_macros(problem.window), **of_tail,
    }  # fmt: skip
    return numbers, macros


class MmaInt8Nhwc(Chosen[IntegerConv]):
    """conv/integer_sm80.cu: convolutions and products of integers, from codes to codes."""

    name = "mma_s8_nhwc"
    source = "conv/integer_sm80.cu"
    version = 4
    compared = True

    def supports(self, problem: IntegerConv, hw: Hardware) -> str | None:
        if hw.cc < 80:
            return f"mma.sync of 16x8x32 integers needs sm_80, this is {hw.arch}"
        if problem.dtype not in BYTES:
            return f"8-bit integers, not {problem.dtype}"
        return served_bytes(problem) or HeuristicKernel.supports(self, problem, hw)

    def _vec(self, problem: IntegerConv) -> int:
        """Elements that a thread stores at once."""
        return next(n for n in (16, 8, 1) if problem.filters % n == 0)

    def _threads(self, tile: tuple[int, ...]) -> int:
        bm, bn, wm, wn, _, _ = tile
        return 32 * (bm // wm) * (bn // wn)

    def _smem(self, problem: IntegerConv, tile: tuple[int, ...]) -> int:
        """Bytes of the stages; of the result, which takes their place or that of an operand."""
        (bm, bn, _, _, bk, stages), tail = tile, problem.tail
        wide = ITEMSIZE[tail.dtype] if tail else 4
        if _copies_codes(problem) and wide == 1:
            return stages * (bm + bn) * bk + bm * (bn + 16)
        return max(stages * (bm + bn) * bk, bm * (bn * wide + 16))

    def tiles(self, problem: IntegerConv, hw: Hardware) -> Sequence[KernelConfig]:
        fitting = [t for t in CONV_TILES if self._smem(problem, t) <= hw.smem_per_block]
        return [KernelConfig.of(tile=tile) for tile in fitting]

    def _resident(self, problem: IntegerConv, tile: tuple[int, ...], hw: Hardware) -> int:
        """Blocks that a multiprocessor holds: by about how many registers its threads have."""
        _, _, wm, wn, _, _ = tile
        threads = self._threads(tile)
        registers = threads * (44 + wm * wn // 32)
        shared = (hw.smem_per_block + 1024) // (self._smem(problem, tile) + 1024)
        return max(1, min(2**16 // registers, shared, 2048 // threads))

    def seconds(self, problem: IntegerConv, config: KernelConfig, hw: Hardware) -> float:
        """Waves of blocks that share a multiprocessor or wait for their own latency; bytes."""
        tile, costs = config.integers("tile"), self.numbers(hw)
        bm, bn, wm, wn, bk, _ = tile
        blocks = -(-problem.batch * prod(problem.outer) // bm) * -(-problem.filters // bn)
        blocks *= problem.groups
        steps = -(-problem.channels // bk) * prod(problem.window.kernel)
        products = 2 * bm * bn * bk / (problem.rate(hw) / hw.sm_count)
        read = (bm // wm) * (bn // wn) * (wm + wn)
        operands = problem.tail.expression.loads - 1 if problem.tail else 0
        copies = costs["traffic"] * bk / 2 * (3 * bm + bn + read / 2)
        work = steps * (products + copies + costs["barrier"])
        work += bm * bn * (costs["output"] + costs["operand"] * operands)
        alone = work + costs["start"] + costs["step"] * steps
        resident = self._resident(problem, tile, hw)
        waves, last = divmod(-(-blocks // hw.sm_count), resident)
        took = waves * max(resident * work, alone) + (max(last * work, alone) if last else 0)
        return max(took, problem.bytes / hw.bandwidth) + hw.launch_seconds

    def launch(self, problem: IntegerConv, config: KernelConfig, hw: Hardware) -> Launches:
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
            "conv_integer", blocks, self._threads(tile), *made, *numbers,
            smem=self._smem(problem, tile), FLAT=is_flat(problem), BM=bm, BN=bn, WM=wm, WN=wn,
            BK=bk, STAGES=stages, DEEP=is_deep(problem), VEC=self._vec(problem), **macros,
        )  # fmt: skip


TMA_TILES = (
    (256, 64, 64, 4), (128, 64, 64, 4), (64, 64, 128, 4), (64, 64, 128, 8), (64, 128, 128, 3),
    (128, 128, 64, 4), (128, 128, 128, 3), (128, 192, 128, 4), (128, 256, 128, 4),
    (64, 192, 128, 6),
)  # fmt: skip
"""BM, BN, bytes of k a step, steps in shared memory."""
PATCH_TILES = ((256, 64, 64, 2), (128, 64, 128, 2), (64, 64, 128, 2))
"""Those of patches."""


class TmaInt8Nhwc(Chosen[IntegerConv]):
    """conv/integer_tma_sm90.cu: the same on wgmma, with copies by TMA, of one group."""

    name = "tma_s8_nhwc"
    source, waits = "conv/integer_tma_sm90.cu", "later"
    version = 4
    compared = True

    def supports(self, problem: IntegerConv, hw: Hardware) -> str | None:
        if hw.arch != "sm_90a":
            return f"wgmma needs sm_90a, this is {hw.arch}"
        width = ITEMSIZE[problem.tail.dtype if problem.tail else "float32"]
        if problem.groups > 1 or problem.filters * width % 16:
            return f"{problem.groups} groups of {problem.filters} filters (one, whole 16 bytes)"
        if problem.dtype not in CODES:
            return f"codes of 8 bits, not {problem.dtype}"
        reason = None if is_flat(problem) else unboxed(problem)
        return reason or served_bytes(problem) or HeuristicKernel.supports(self, problem, hw)

    def _width(self, problem: IntegerConv) -> int:
        """The pixels of a line of a patch."""
        return problem.outer[2] + problem.window.kernel[2] - 1

    def _teams(self, tile: tuple[int, ...]) -> int:
        """The warpgroups that take turns of tiles, one's codes beside another one's products."""
        return 2 if tile[:2] == (64, 192) else 1

    def _steps(self, problem: IntegerConv, tile: tuple[int, ...]) -> int:
        """Steps of one tap each."""
        return -(-problem.channels // tile[2]) * prod(problem.window.kernel)

    def _smem(self, problem: IntegerConv, tile: tuple[int, ...]) -> int:
        """Bytes of the stages, rows and tiles of operands of two tiles, barriers, kept filters."""
        bm, bn, bk, stages, kept, lines = tile
        _, kh, kw = problem.window.kernel
        pixels = bm + ((kh - 1) * self._width(problem) + kw - 1 if lines else 0)
        stage = -(-pixels * bk // 1024) * 1024
        stage += 0 if kept else bn * bk * (kh * kw if lines else 1)
        side = bn * 4 * (2 + (problem.border != 0))
        side += bm * bn if _copies_codes(problem) and not lines else 0
        sides = 2 * self._teams(tile)
        own = stages * stage + sides * side + 16 * stages + 16 * sides + 8
        return -(-own // 1024) * 1024 + self._steps(problem, tile) * bn * bk if kept else own

    def _resident(self, problem: IntegerConv, tile: tuple[int, ...], hw: Hardware) -> int:
        """Blocks that a multiprocessor holds: by shared memory, and the registers of the sums."""
        bm, bn = tile[:2]
        warps = bm // 16 * self._teams(tile) + 1  # four schedulers share them, and 2^16 registers
        most = (hw.smem_per_block + 1024) // (self._smem(problem, tile) + 1024)

        def registers(blocks: int) -> int:
            return 512 // -(-blocks * warps // 4) // 8 * 8

        plain = not problem.border and (problem.tail is None or problem.tail.expression.loads == 1)
        more = 40 if bn == 64 else 32 if plain else 64
        more += bn // 2
        if problem.dtype not in BYTES:  # sums that are added to others
            more += bn // 2 if bn <= 128 else bn // 4
        return max((n for n in range(1, most + 1) if registers(n) >= more), default=1)

    def _lines(self, problem: IntegerConv, bm: int) -> int:
        """Lines of y of which a patch makes a tile; 0 where there are none."""
        window = problem.window
        if prod(window.kernel) == 1 or is_deep(problem) or _is_filled(problem):
            return 0
        if problem.dtype not in BYTES:  # products of all taps at once are too many for 14 bits
            return 0
        if max(*window.strides, *window.dilations) > 1:
            return 0
        return min(bm // self._width(problem), problem.outer[1], 257 - window.kernel[1])

    def tiles(self, problem: IntegerConv, hw: Hardware) -> Sequence[KernelConfig]:
        """Each tile that shared memory holds, by way of its copies."""
        ways = [(*tile, kept, 0) for tile in TMA_TILES for kept in (0, 1)]
        ways += [
            (*tile, kept, lines)
            for tile in PATCH_TILES
            for kept in (0, 1)
            if (lines := self._lines(problem, tile[0]))
        ]
        return [
            KernelConfig.of(tile=way)
            for way in ways
            if self._smem(problem, way) <= hw.smem_per_block and self._at_once(problem, way, hw) > 0
            # of float8 the sums of 256 columns fill the registers, and no teams take turns
            if problem.dtype in BYTES or (way[1] < 256 and self._teams(way) == 1)
        ]

    def ruled(self, problem: IntegerConv, config: KernelConfig, hw: Hardware) -> KernelConfig:
        """As of the others, but no patch of images of open sizes, which a patch's text has."""
        if config.attrs or all(isinstance(size, int) for size in problem.outer):
            return super().ruled(problem, config, hw)
        largest = problem.upper_bound()
        ways = [how for how in self.tiles(largest, hw) if not how.integers("tile")[5]]
        return min(ways, key=lambda how: self.seconds(largest, how, hw))

    def seconds(self, problem: IntegerConv, config: KernelConfig, hw: Hardware) -> float:
        """Tiles one behind another, each as long as its own latency or as what shares the
        multiprocessor takes: products, lines of copies and results, which overlap in part.

        Fitted to the layers of a ResNet-50 of 32 images on an H200 (2026-11).
        """
        tile, costs = config.integers("tile"), self.numbers(hw)
        bm, bn, bk, _, kept, lines = tile
        across, steps = -(-problem.filters // bn), self._steps(problem, tile)
        blocks, teams = self._rows(problem, bm, lines) * across, self._teams(tile)
        grid = min(blocks, self._at_once(problem, tile, hw) * teams)
        shared, turns = -(-grid // hw.sm_count), -(-blocks // grid)
        chunks = steps // prod(problem.window.kernel) if lines else steps
        pixels = (lines + problem.window.kernel[1] - 1) * self._width(problem) if lines else bm
        operands = problem.tail.expression.loads - 1 if problem.tail else 0
        copied = chunks * pixels + (0 if kept else steps * bn) + operands * bm * bn / bk
        wide = 4 if problem.tail is None or ITEMSIZE[problem.tail.dtype] == 4 else 0
        copies = costs["line"] * (copied + wide * bm * bn / 128 * 3)
        products = 2 * bm * bn * bk * steps / (costs["math"] * problem.rate(hw) / hw.sm_count)
        if problem.dtype not in BYTES:  # sums of other columns than 128 at once take longer
            products *= 1.3 if bn < 128 else 1.02 if bn > 128 else 1.0
        each = costs["result"] + costs["operand"] * operands
        results = bm * min(bn, problem.filters) * each
        longest = max(products, copies, results)
        work = longest + (products + copies + results - longest) / 2
        alone = max(chunks * costs["step"] * min(1.0, 4 / tile[3]), products) + results
        once = costs["start"] + kept * steps * bn * costs["line"] * shared / teams / 2
        took = once + turns * max(shared * work, alone)
        return max(took, problem.bytes / hw.bandwidth)

    def _at_once(self, problem: IntegerConv, tile: tuple[int, ...], hw: Hardware) -> int:
        """Blocks that the GPU holds, as many for each column of tiles where filters are kept."""
        blocks = self._resident(problem, tile, hw) * hw.sm_count
        return blocks - (blocks % -(-problem.filters // tile[1]) if tile[4] else 0)

    def _rows(self, problem: IntegerConv, bm: int, lines: int) -> Any:
        if lines:
            return problem.batch * -(-problem.outer[1] // lines)
        return -(-problem.batch * prod(problem.outer) // bm)

    def launch(self, problem: IntegerConv, config: KernelConfig, hw: Hardware) -> Launches:
        tile = self.ruled(problem, config, hw).integers("tile")
        bm, bn, bk, stages, kept, lines = tile
        rows, filters = problem.batch * prod(problem.outer), problem.filters
        flat, across = is_flat(problem), -(-filters // bn)
        line, pixel = row_of_filters(problem), image_strides(problem)[2]
        depth = prod(problem.window.kernel) * line
        if flat:
            x = matrices("x", "uint8", problem.channels, rows, pixel, (bk, bm))
        elif lines:
            box = (bk, self._width(problem), lines + problem.window.kernel[1] - 1, 1)
            x = replace(gathered(problem, bm), box=box, window=())
        else:
            x = replace(gathered(problem, bm), box=(bk, bm))
        # the order by which a lane's columns are neighbours
        run = 16 // ITEMSIZE[problem.tail.dtype if problem.tail else "float32"]
        weight = TensorMap(
            Ptr("weight"), "int8", (depth, 2, 4, run // 2, -(-filters // (4 * run))),
            (depth, run * depth, 2 * depth, 4 * run * depth), (bk, 2, 4, run // 2, bn // (4 * run)),
        )  # fmt: skip
        maps = [replace(x, dtype="uint8", swizzle=bk), replace(weight, swizzle=bk)]
        if ahead := _copies_codes(problem) and not lines:
            e1 = matrices("e1", "uint8", filters, rows, filters, (64, bm))
            maps.append(replace(e1, swizzle=0))
        made = args(
            "bias e1 e2 e3 y, u32 rows, i32 channels filters inner outer line, shift scale, "
            "u32 border", problem, rows=rows, line=line, border=problem.border % 256 * 0x01010101,
        )  # fmt: skip
        numbers, macros = _tail_of(problem)
        blocks = self._rows(problem, bm, lines) * across
        return self.one(
            "conv_integer_tma", minimum(blocks, self._at_once(problem, tile, hw)),
            2 * bm * self._teams(tile) + 32, *maps, *made, *numbers,
            smem=self._smem(problem, tile), BM=bm, BN=bn, BK=bk, STAGES=stages,
            BLOCKS=self._resident(problem, tile, hw), TEAMS=self._teams(tile), AHEAD=ahead,
            WHOLE=filters % bn == 0, KEPT=kept, LINES=lines, BORDER=_is_filled(problem), FLAT=flat,
            PATCH=self._width(problem) if lines else 0, **macros,
            FLOAT8=problem.dtype not in BYTES or None, IM2COL=not (flat or lines) or None,
            DEEP=(not (flat or lines) and is_deep(problem)) or None,
        )  # fmt: skip


class BlocksOfPixels(HeuristicKernel[PixelBlocks]):
    """conv/pixel_blocks.cu: images of a convolution with a stride, quantized as they are read."""

    name = "pixel_blocks"
    source = "conv/pixel_blocks.cu"
    version = 2

    def launch(self, problem: PixelBlocks, config: KernelConfig, hw: Hardware) -> Launches:
        blocks = problem.batch * problem.tall * problem.width
        scale, zero = problem.quantize or (1.0, 0)
        ends = np.iinfo(problem.out_dtype)
        numbers = map(float, (scale, float(1 / np.float32(scale)), zero, ends.min, ends.max))
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
    "IntegerConv": (TmaInt8Nhwc(), MmaInt8Nhwc()),
    "PixelBlocks": (BlocksOfPixels(),),
}

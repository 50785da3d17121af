"""The Conv candidate for channels-last images in small groups, as those of ResNeXt and RegNet."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from onnx_fuse.kernels.conv_nhwc import ChannelsLast, conv_macros, tile_args
from onnx_fuse.kernels.rule_based import Chosen, tail_macros
from onnx_fuse.program.launch import Launches
from onnx_fuse.program.problem import Hardware, KernelConfig
from onnx_fuse.program.problems import Conv

SLAB = 64
"""Channels of a block at most."""
_SMEM = 100 << 10
_REGISTERS = 81  # of a thread's weights


class Grouped(Chosen[Conv], ChannelsLast):
    """conv/grouped_sm80.cu: `tile` (rows, columns) of y at a time, the weights in registers.

    A block `stays` for several tiles, so that it loads the weights once, or makes one.
    """

    name = "grouped"
    source = "conv/grouped_sm80.cu"

    def supports(self, problem: Conv, hw: Hardware) -> str | None:
        c = problem.channels
        if problem.groups == 1 or problem.filters != c:
            return f"{problem.groups} groups of {c} channels and {problem.filters} filters"
        if c > SLAB or (c != 4 and c % 8):
            return f"{c} channels a group (4, or a multiple of 8 up to {SLAB})"
        if problem.groups % max(1, 16 // c):
            return f"{problem.groups} groups of {c} channels (16 channels are shared out together)"
        if self._width(c) * -(-c // 8) * prod(problem.window.kernel) > _REGISTERS:
            return "the filter is too wide"
        return super().supports(problem, hw) or (
            None if self.tiles(problem, hw) else "a tile of y lies over too much of x"
        )

    @staticmethod
    def _width(channels: int) -> int:
        """Eights of filters of a warp."""
        return 2 if channels <= 32 and channels != 24 else 1

    def _slab(self, problem: Conv) -> int:
        """Groups of a block: as many as divide all, and each warp has its own."""
        c = problem.channels
        most = min(problem.groups, SLAB // c)
        return next(n for n in range(most, 0, -1)
                    if problem.groups % n == 0 and n * c % (8 * self._width(c)) == 0)  # fmt: skip

    def _stage(self, problem: Conv, tile: Sequence[int]) -> int:
        """Bytes of the part of x under a tile of y."""
        window = problem.window
        high, wide = (
            (tile[i] - 1) * window.strides[i + 1]
            + (window.kernel[i + 1] - 1) * window.dilations[i + 1]
            + 1
            for i in (0, 1)
        )
        slab = self._slab(problem) * problem.channels
        return 2 * (high * wide * (slab + (16 if slab // 8 % 2 else 8)) + 8)

    def tiles(self, problem: Conv, hw: Hardware) -> Sequence[KernelConfig]:
        """Tiles of up to 128 and 64 pixels, as wide as a row, its half or its quarter."""
        _, oh, ow = problem.outer
        most = min(_SMEM, hw.smem_per_block)
        tiles = {
            (-(-oh // -(-oh // max(1, pixels // wide))), wide)  # rows in equal parts
            for wide in {min(-(-ow // n), 32) for n in (1, 2, 4)}
            for pixels in (64, 128)
        }
        return [
            KernelConfig.of(tile=tile, stays=stays)
            for tile in sorted(tiles)
            for stays in (1, 0)
            if self._stage(problem, tile) <= most
        ]

    def seconds(self, problem: Conv, config: KernelConfig, hw: Hardware) -> float:
        """Seconds of the bytes, which count x again for each tile, or of the gathers if longer."""
        high, wide = config.integers("tile")
        _, oh, ow = problem.outer
        c, size = problem.channels, problem.groups * problem.channels
        tiles = problem.batch * -(-oh // high) * -(-ow // wide)
        slabs = problem.groups // self._slab(problem)
        # of 16 pixels and a warp's filters: 512 bytes a gather, at 128 a cycle
        gathers = -(-high * wide // 16) * (size // 8 // self._width(c)) * -(-c // 16)
        costs = self.numbers(hw)
        cycles = costs["gather"] if c > 4 else costs["narrow_gather"]
        work = tiles * gathers * prod(problem.window.kernel) * cycles
        rate = hw.rate("float32") / 256  # cycles of all multiprocessors a second
        read = tiles * slabs * self._stage(problem, (high, wide))
        moved = read / (costs["cached"] * hw.bandwidth) + problem.bytes / hw.bandwidth
        # a block's start, and its weights: a block of one tile loads them again (H200, 2026-11)
        weights = size * c * prod(problem.window.kernel) * 2
        blocks = min(tiles, -(-3 * hw.sm_count // slabs)) if config.integer("stays") else tiles
        start = costs["start"] + costs["weights"] * blocks * weights / hw.bandwidth
        return max(moved, work / rate) + start + hw.launch_seconds

    def launch(self, problem: Conv, config: KernelConfig, hw: Hardware) -> Launches:
        config = self.ruled(problem, config, hw)
        high, wide = config.integers("tile")
        _, oh, ow = problem.outer
        c, groups = problem.channels, self._slab(problem)
        width, stage = self._width(c), self._stage(problem, (high, wide))
        warps = groups * c // 8 // width
        rows = max(1, min(8 // warps, -(-high * wide // 16)))
        stays = config.integer("stays")
        stages = 2 if stays and 2 * stage <= min(_SMEM, hw.smem_per_block) else 1
        tiles = problem.batch * -(-oh // high) * -(-ow // wide)
        slabs = problem.groups // groups
        blocks = -(-3 * hw.sm_count // slabs) if stays else tiles
        return self.one(
            "conv_grouped", (min(tiles, blocks), slabs, 1), 32 * warps * rows,
            *tile_args(problem, tiles), smem=stages * stage, CHANNELS=c, GROUPS=groups, NT=width,
            TH=high, TW=wide, WM=rows, STAGES=stages, **conv_macros(problem),
            **tail_macros(problem.tail),
        )  # fmt: skip

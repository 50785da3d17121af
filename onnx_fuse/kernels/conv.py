"""Conv candidates: sums over taps and channels, as tiles of [filters, pixels] or a pixel a thread.

Operands: x weight bias slope e1 e2 e3 y; e1 to e3 are laid out as y. By default a sum is split by
the shape alone, never by the GPU, so that its bits are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.kernels import conv_nhwc
from onnx_fuse.kernels.conv_grouped import Grouped
from onnx_fuse.kernels.conv_nhwc import ENDS, conv_macros, finish
from onnx_fuse.kernels.kernel import Kernels, launch, roofline
from onnx_fuse.kernels.rule_based import (
    HeuristicKernel,
    Plan,
    Planned,
    tail_macros,
    window_macros,
)
from onnx_fuse.program.launch import Launches, Ptr, args
from onnx_fuse.program.problem import ITEMSIZE, Hardware, KernelConfig
from onnx_fuse.program.problems import Conv

_BLOCKS = 264  # blocks a launch should have: a fixed aim, so that sums split by shape alone
_SPLITS = 64  # of a sum, at most
CHANNELS_LAST = "its images are channels last"


_SIZES = "i32 groups channels filters inner outer"


class DirectConv(HeuristicKernel[Conv]):
    """conv/direct.cu: an element of y a thread."""

    name = "direct"
    source = "conv/direct.cu"
    free_axes = "yz"

    def supports(self, problem: Conv, hw: Hardware) -> str | None:
        """Few filters a group: others would read x again for each."""
        if problem.channels_last:
            return CHANNELS_LAST
        if problem.filters > 4:
            return f"{problem.filters} filters a group (at most 4): x would be read for each"
        return super().supports(problem, hw)

    def launch(self, problem: Conv, config: KernelConfig, hw: Hardware) -> Launches:
        size = problem.batch * prod(problem.outer) * problem.groups * problem.filters
        return self.one(
            "conv_direct", -(-size // 256), 256,
            *args(f"x weight {ENDS}, i64 size, {_SIZES}, f32 act_alpha", problem, size=size),
            **conv_macros(problem), **tail_macros(problem.tail),
        )  # fmt: skip


class _Tiled(Planned[Conv], HeuristicKernel[Conv]):
    """Implicit products of tiles, with the weights packed before and parts of k summed after.

    Configurations: `bm` filters a tile, `split` parts of the sum.
    """

    half = False

    def supports(self, problem: Conv, hw: Hardware) -> str | None:
        return CHANNELS_LAST if problem.channels_last else super().supports(problem, hw)

    def configs(self, problem: Conv, hw: Hardware) -> Sequence[KernelConfig]:
        """The rule's configuration, then both tiles with a sum in one to eight parts."""
        wide = (64,) if problem.dtype == "float64" else (64, 128)
        return [
            KernelConfig.of(),
            *(KernelConfig.of(bm=bm, split=split) for bm in wide for split in (1, 2, 4, 8)
              if split <= self._most(problem)),
        ]  # fmt: skip

    def fits(self, problem: Conv, config: KernelConfig) -> bool:
        """Whether the sum is long enough for its parts."""
        return config.integer("split") <= max(1, self._most(problem))

    def _tile(self, problem: Conv, config: KernelConfig) -> tuple[int, int, int, int]:
        """Filters, pixels and channels of a tile's step, and fragments a thread."""
        columns = problem.batch * prod(problem.outer)
        wide = problem.filters > 64 and problem.dtype != "float64"
        tiles = -(-problem.filters // 128) * -(-columns // 128) * problem.groups
        large = wide and (self.half or tiles >= _BLOCKS // 2)
        bm = config.integer("bm") or (128 if large else 64)
        if self.half:
            return bm, 128, 32, 0
        return (bm, bm, 8, 2) if bm == 128 else (bm, bm, 16, 1)

    def _depth(self, problem: Conv, bk: int) -> tuple[int, int, int, bool]:
        """Steps of the sum, how many a part is a multiple of, padded channels, and whether one tap
        a step."""
        padded = -(-problem.channels // bk) * bk
        tap_major = self.half or padded <= 1.3 * problem.channels
        count = prod(problem.window.kernel)
        if self.half:
            return padded // bk * count, 1, padded, True
        return (padded if tap_major else problem.channels) * count, bk, padded, tap_major

    def _most(self, problem: Conv) -> int:
        """Parts of the sum that are still worth a launch."""
        steps, step, _, _ = self._depth(problem, 32 if self.half else 16)
        return max(1, steps // (step * (2 if self.half else 4)))

    def plan(self, problem: Conv, config: KernelConfig, hw: Hardware) -> Plan:
        pixels, dtype, count = prod(problem.outer), problem.dtype, prod(problem.window.kernel)
        columns = problem.batch * pixels
        rows = problem.groups * problem.filters
        size = columns * rows
        bm, bn, bk, fragments = self._tile(problem, config)
        depth, step, padded, tap_major = self._depth(problem, bk)
        grid = (-(-columns // bn), -(-problem.filters // bm) * problem.groups)
        aim = min(depth // (step * (8 if self.half else 16)), -(-_BLOCKS // prod(grid)), _SPLITS)
        splits = config.integer("split") or max(1, aim)
        chunk = -(-depth // (splits * step)) * step
        splits = -(-depth // chunk)
        how: dict[str, object] = {"BM": bm, "BN": bn, "SPLIT": splits > 1}
        if self.half:
            how["WM"] = bm // 32
        else:
            how |= {"BK": bk, "FRAGMENTS": fragments, "TAP_MAJOR": tap_major}
        acc = ITEMSIZE["float64" if dtype == "float64" else "float32"]
        tail = tail_macros(problem.tail)
        # the packed weights stand behind the partial sums, where 16-byte copies may begin
        launches, at = [], -(-splits * size * acc // 16) * 16 if splits > 1 else 0
        weight = Ptr("weight")
        if tap_major:
            weight = Ptr("workspace", at)
            channels = -(-problem.channels // 8) * 8 if self.half else padded
            widths = args("i32 filters channels to", problem, to=channels)
            launches.append(launch(
                "conv/pack.cu", "conv_pack", (-(-count // 32), -(-channels // 32), rows), 256,
                Ptr("weight"), weight, *widths, T=C_TYPES[dtype], TRANSPOSED=problem.transposed,
                **window_macros(problem.window),
            ))  # fmt: skip
            at += rows * count * channels * ITEMSIZE[dtype]
            padded = channels
        launches += self.one(
            "conv", (*grid, splits), 256 if self.half else bm * bn // (16 * fragments**2),
            Ptr("x"), weight,
            *args(f"{ENDS} workspace, i64 columns, {_SIZES} chunk padded, f32 act_alpha", problem,
                  columns=columns, chunk=chunk, padded=padded),
            smem=2 * 2 * (bm * 40 + 32 * (bn + 8)) if self.half else 0,
            **conv_macros(problem), **how, **({} if splits > 1 else tail),
        )  # fmt: skip
        if splits > 1:
            launches.append(finish(problem, size, rows, pixels, splits))
        return tuple(launches), at


class MmaConv(_Tiled):
    """conv/mma_sm80.cu: 16-bit products on the tensor cores, a tap of 32 channels a step."""

    name = "mma"
    source = "conv/mma_sm80.cu"
    half = True

    def supports(self, problem: Conv, hw: Hardware) -> str | None:
        """Refuse fewer than 12 channels, since a step multiplies 32, mostly zeros then."""
        if problem.dtype not in ("float16", "bfloat16"):
            return f"for 16-bit operands, not {problem.dtype}"
        if problem.channels < 12:
            return f"{problem.channels} channels a group (at least 12)"
        return super().supports(problem, hw)


class Implicit(_Tiled):
    """conv/implicit.cu: any type."""

    name = "implicit"
    source = "conv/implicit.cu"

    def cost(self, problem: Conv, config: KernelConfig, hw: Hardware) -> float:
        # 0.36 to 0.49 of it for the 3 x 3 filters of ResNet-50 in float32 on an H200 (2026-11)
        return roofline(hw, self.numbers(hw), problem.bytes, problem.flops / problem.rate(hw))


KERNELS: Kernels = {"Conv": (Grouped(), *conv_nhwc.KERNELS, DirectConv(), MmaConv(), Implicit())}

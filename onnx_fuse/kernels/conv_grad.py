"""ConvWeightGrad candidates: sums over the pixels of channels-last images.

Operands: x dy dw. A sum is split by the shape alone, never by the GPU, so that its bits are the
same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from onnx_fuse.cuda.macros import C_TYPES, as_defines
from onnx_fuse.kernels import Kernel
from onnx_fuse.kernels.rule_based import RuleBased, window_macros
from onnx_fuse.program.problem import Config, Hardware, Launch, Num, Ptr
from onnx_fuse.program.problems import ConvWeightGrad

_BLOCKS = 264  # blocks a launch should have
_LEAST = 256  # pixels a part has at least
# BM, BN, WM, WN, BK, stages -> share of the full rate that the tile reaches on Hopper
_TILES: dict[tuple[int, ...], float] = {
    (128, 128, 64, 32, 32, 4): 0.4,
    (128, 64, 32, 32, 32, 4): 0.35,
    (64, 128, 32, 32, 32, 4): 0.35,
    (64, 64, 32, 16, 64, 4): 0.25,
}


def _divide(d: int) -> tuple[int, int]:
    """The factor and the shift of a division by `d` of a number below 2^31."""
    shift = max(0, d - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - d)) // d + 1, shift


class Mma(RuleBased):
    """conv/weight_grad_sm80.cu: a product over the pixels on the tensor cores, in 16 bits.

    Configurations: `tile` (BM, BN, WM, WN, BK, stages) and `split` parts of the sum.
    """

    name = "mma"
    source = "conv/weight_grad_sm80.cu"

    def supports(self, problem: ConvWeightGrad, hw: Hardware) -> str | None:
        """Refuse other types, channels that copies of 16 bytes would cut, and three axes."""
        if hw.cc < 80:
            return f"mma.sync with cp.async needs sm_80, this is {hw.arch}"
        if problem.dtype not in ("float16", "bfloat16"):
            return f"for 16-bit operands, not {problem.dtype}"
        if problem.channels % 8 or problem.filters % 8:
            return "the channels or filters of a group are no multiple of 8"
        if problem.inner[0] != 1 or problem.outer[0] != 1:
            return "at most two spatial axes"
        if problem.batch * prod(problem.outer) >= 2**31 - 2**16:
            return "more pixels than 31 bits count"
        return None

    def configs(self, problem: ConvWeightGrad, hw: Hardware) -> Sequence[Config]:
        """The rule's, then every tile with the parts that the rule has for it."""
        return [Config.of(), *(Config.of(tile=tile) for tile in _TILES)]

    def _ruled(self, problem: ConvWeightGrad, config: Config) -> tuple[tuple[int, ...], int, int]:
        """The tile, its tiles of the result, and the pixels of a part."""
        pixels = problem.batch * prod(problem.outer)

        def tiles(tile: tuple[int, ...]) -> int:
            across = -(-problem.depth // tile[1])
            return problem.groups * -(-problem.filters // tile[0]) * across

        def seconds(tile: tuple[int, ...]) -> float:
            return tiles(tile) * tile[0] * tile[1] / _TILES[tile]

        tile = config.integers("tile") or min(_TILES, key=seconds)
        parts = max(1, min(pixels // _LEAST, _BLOCKS // tiles(tile)))
        step = tile[4]
        return tile, tiles(tile), -(-pixels // (parts * step)) * step

    def launch(self, problem: ConvWeightGrad, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """The products of the parts, then their sum."""
        tile, tiles, chunk = self._ruled(problem, config)
        bm, bn, wm, wn, bk, stages = tile
        (_, h, w), (_, oh, ow) = problem.inner, problem.outer
        pixels, types = problem.batch * oh * ow, {"TY": C_TYPES[problem.out_dtype]}
        splits = -(-pixels // chunk)
        size = problem.groups * problem.filters * problem.depth
        geometry = window_macros(problem.window)
        macros = dict(zip(("BM", "BN", "WM", "WN", "BK", "STAGES"), tile, strict=True))
        product = Launch(
            self.source, "conv_weight_grad", (tiles, splits, 1), (32 * bm * bn // (wm * wn), 1, 1),
            (Ptr("x"), Ptr("dy"), Ptr("workspace"), Num("u32", pixels),
             *(Num("i32", n) for n in (problem.groups, problem.channels, problem.filters, h, w)),
             *(Num("u32", n) for n in (*_divide(oh * ow), *_divide(ow), oh * ow, ow, chunk))),
            as_defines({"T": C_TYPES[problem.dtype]}, types, macros, geometry),
            stages * bk * (bm + bn + 16) * 2,
        )  # fmt: skip
        total = Launch(
            self.source, "conv_weight_sum", (-(-size // 32), 1, 1), (256, 1, 1),
            (Ptr("workspace"), Ptr("dw"), Num("u32", size), Num("u32", problem.channels),
             Num("i32", splits)),
            as_defines({"T": C_TYPES[problem.dtype]}, types, geometry),
        )  # fmt: skip
        return product, total

    def workspace(self, problem: ConvWeightGrad, config: Config, hw: Hardware) -> int:
        """The parts' sums."""
        _, _, chunk = self._ruled(problem, config)
        splits = -(-problem.batch * prod(problem.outer) // chunk)
        return 4 * splits * problem.groups * problem.filters * problem.depth


KERNELS: dict[str, Sequence[Kernel]] = {"ConvWeightGrad": (Mma(),)}

"""Products of 8-bit integers in int32: MatMulInteger, ConvInteger, QLinearMatMul and QLinearConv,
and convolutions and products between a DequantizeLinear and a QuantizeLinear.

What is quantized again, y = saturate(round(sum * scale) + zero), is a
pointwise call behind the product. A convolution is a product of the filter with the windows of x,
which are copied for it: as many times x's bytes as the filter has taps over its strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import Any

from onnx_fuse.cuda.macros import C_TYPES, as_defines
from onnx_fuse.kernels.conv_nhwc import ENDS, Images, Mma, image_strides, is_deep
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.kernels.rule_based import (
    HeuristicKernel,
    tail_macros,
    window_macros,
)
from onnx_fuse.program.contractions import IntegerProduct
from onnx_fuse.program.problem import Arg, Hardware, KernelConfig, Launch, Launches, Num, Ptr

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
        """The sizes of the tiles of y."""
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
        defines = as_defines({
            "A_TYPE": names[problem.dtype], "B_TYPE": names[problem.b_dtype], "BM": bm,
            "BN": bn, "WM": wm, "WN": wn, "BK": bk, "STAGES": stages,
            "ZA": kinds[problem.za], "ZB": kinds[problem.zb],
        })  # fmt: skip
        columns, rows = self._blocks(problem, config)
        inner = problem.batch[-1] if problem.batch else 1

        def last_two(strides: tuple[int, ...]) -> list[Num]:
            return [Num("i64", step) for step in (0, 0, *strides)[-2:]]

        args: tuple[Arg, ...] = (
            *map(Ptr, ("a", "b", "za", "zb", "y")),
            *(Num("i32", x) for x in (problem.m, problem.n, problem.k)),
            Num("i64", problem.lda), Num("i64", problem.ldb),
            *(Num("i32", x) for x in (columns, rows, inner)), *last_two(problem.a_strides),
            *last_two(problem.b_strides), Num("i32", problem.za_step),
        )  # fmt: skip
        grid, smem = (columns * rows * problem.batches, 1, 1), stages * (bm + bn) * (bk + 16)
        block = (32 * wm * wn, 1, 1)
        return (Launch(self.source, "mma_s8_sm80", grid, block, args, defines, smem),)


class MmaInt8Nhwc(Mma):
    """conv/nhwc_sm80.cu of integers: convolutions and products, scaled in the epilogue."""

    name = "mma_s8_nhwc"
    version = 1

    def supports(self, problem: Any, hw: Hardware) -> str | None:
        """Refuse pixels, and channels of groups, that are no multiple of 16 bytes apart."""
        if hw.cc < 80:
            return f"mma.sync of 16x8x32 integers needs sm_80, this is {hw.arch}"
        if problem.dtype not in BYTES:
            return f"8-bit integers, not {problem.dtype}"
        steps = image_strides(problem)
        if any(step % LINE for step in steps) or (problem.groups > 1 and problem.channels % LINE):
            return f"pixels are no multiple of {LINE} bytes apart"
        if max(steps[0], prod(problem.outer)) >= 2**29:
            return "an image of 2^29 elements or more"
        return HeuristicKernel.supports(self, problem, hw)

    def tiles(self, problem: Images, hw: Hardware) -> Sequence[KernelConfig]:
        """Each tile that shared memory holds, with the sum in one part."""
        return [how for how in super().tiles(problem, hw) if how.integer("split") == 1]

    def launch(self, problem: Any, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch."""
        tile, tail = self.ruled(problem, config, hw).integers("tile"), problem.tail
        (bm, bn, wm, wn, _, stages), bk = tile, self._depth(problem, tile)
        rows, (sn, sy, sx) = problem.batch * prod(problem.outer), image_strides(problem)
        blocks = -(-rows // bm) * -(-problem.filters // bn) * problem.groups
        numbers = (problem.groups, problem.channels, problem.filters, *problem.inner,
                   *problem.outer)  # fmt: skip
        line, steps = -(-problem.channels // LINE) * LINE, self._steps(problem, tile)
        args: tuple[Arg, ...] = (
            Ptr("x"), Ptr("weight"), *ENDS, Ptr("workspace"), Num("i64", rows),
            *(Num("i32", n) for n in numbers), Num("i64", sn),
            *(Num("i32", n) for n in (problem.inner[1] * sy, sy, sx, line, steps)),
            Num("f32", 0.0), Ptr("shift"), Ptr("scale"),
            Num("u32", problem.border % 256 * 0x01010101),
        )  # fmt: skip
        kinds = (*(tail.reads if tail else ()), *["float32"] * 3)[:3]
        macros: dict[str, object] = {
            "T": C_TYPES[problem.dtype], "BIAS": "float", "INTEGER": True, "TRANSPOSED": False,
            "BM": bm, "BN": bn, "WM": wm, "WN": wn, "BK": bk, "STAGES": stages, "SPLIT": False,
            "SPLIT_BF16": False, "DEEP": is_deep(problem), "TY": "float",
            "VEC": 8 if problem.filters % 8 == 0 else 1,
            "ROWS_OF_E": sum(1 << i for i in (tail.rows if tail else ())),
            **{f"E{i}": C_TYPES[kind] for i, kind in enumerate(kinds, 1)},
        }  # fmt: skip
        macros |= {**window_macros(problem.window), **tail_macros(tail)}
        block, smem = (32 * (bm // wm) * (bn // wn), 1, 1), self._smem(tile)
        defines = as_defines(macros)
        return (Launch(self.source, "conv_nhwc", (blocks, 1, 1), block, args, defines, smem),)


KERNELS: dict[str, Sequence[Kernel]] = {
    "GemmInteger": (MmaInt8(),),
    "IntegerConv": (MmaInt8Nhwc(),),
}


# ---- lowering -----------------------------------------------------------------------------------

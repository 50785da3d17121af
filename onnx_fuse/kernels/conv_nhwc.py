"""Conv candidates for channels-last images: implicit products of [pixels, filters], and depthwise.

Operands: x weight bias slope e1 e2 e3 y; e1 to e3 are laid out as y (`problems.Conv`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, prod
from typing import Any, TypeAlias

from onnx_fuse.cuda.macros import C_TYPES, defines, lanes
from onnx_fuse.kernels.gemm_cluster import Cluster
from onnx_fuse.kernels.gemm_sm90 import MOMENT_SECONDS, Wgmma
from onnx_fuse.kernels.gemm_tf32 import Tf32
from onnx_fuse.kernels.kernel import launch, matrices, renamed
from onnx_fuse.kernels.rule_based import (
    Chosen,
    HeuristicKernel,
    Plan,
    Planned,
    tail_macros,
    typed,
    window_macros,
)
from onnx_fuse.ops.activations import ACTIVATIONS, activation_macros
from onnx_fuse.program.epilogue import NONE, Epilogue
from onnx_fuse.program.expression import Tail
from onnx_fuse.program.launch import Arg, Launch, Launches, Ptr, TensorMap, args
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem, Hardware, KernelConfig
from onnx_fuse.program.problems import Conv, ConvWeightGrad, IntegerConv

Images: TypeAlias = Conv | IntegerConv

ENDS = "bias slope e1 e2 e3 y"
# BM, BN, WM, WN, BK, stages -> share of the full rate that the tile reaches on Hopper
TILES: dict[tuple[int, ...], float] = {
    (128, 128, 64, 32, 64, 3): 0.3,
    (128, 128, 64, 32, 32, 4): 0.27,
    (128, 64, 32, 32, 32, 4): 0.33,
    (64, 128, 32, 32, 32, 4): 0.33,
    (64, 64, 32, 16, 64, 4): 0.25,
    (128, 32, 32, 32, 32, 4): 0.25,
    (32, 64, 16, 16, 64, 4): 0.2,
}


def image_strides(problem: Images | ConvWeightGrad) -> tuple[int, ...]:
    """The strides of x's images, rows and pixels in elements."""
    if problem.x_strides:
        return problem.x_strides
    pixel = problem.groups * problem.channels
    return (prod(problem.inner) * pixel, problem.inner[2] * pixel, pixel)


def is_deep(problem: Images | ConvWeightGrad) -> bool:
    """Whether the first of three spatial axes is more than one plane under a filter of one."""
    return max(problem.inner[0], problem.outer[0], problem.window.kernel[0]) > 1


def row_of_weights(problem: Conv) -> int:
    """The channels of a row of the weights."""
    return -(-problem.channels // 8) * 8


def act_macros(problem: Conv) -> dict[str, Any]:
    return {**activation_macros(problem.act), "SLOPE": problem.slope or None}


def conv_macros(problem: Conv) -> dict[str, Any]:
    """Types, window and activation of a Conv."""
    macros = typed(problem) | {"TRANSPOSED": problem.transposed}
    return macros | window_macros(problem.window) | act_macros(problem)


def tile_args(problem: Conv, tiles: int) -> tuple[Arg, ...]:
    """The arguments of a kernel that makes so many tiles of images of two axes."""
    sn, sy, sx = image_strides(problem)
    sizes = (problem.groups * problem.channels, *problem.inner[1:], *problem.outer[1:])
    return args(
        f"x weight {ENDS}, i64 tiles, i32 sizes, i64 sn, i32 sy sx, f32 act_alpha", problem,
        tiles=tiles, sizes=sizes, sn=sn, sy=sy, sx=sx,
    )  # fmt: skip


def finish(problem: Conv, size: int, filters: int, pixels: int, splits: int) -> Launch:
    """The sum of parts in the workspace, with what stands behind it: `filters` of `pixels` each."""
    return launch(
        "conv/finish.cu", "conv_finish", -(-size // 256), 256,
        *args(f"workspace {ENDS}, i64 size, i32 parts, f32 act_alpha", problem, size=size,
              parts=(filters, pixels, splits)),
        **typed(problem), **act_macros(problem), **tail_macros(problem.tail),
    )  # fmt: skip


class ChannelsLast(HeuristicKernel[Conv]):
    """What the candidates for channels-last images share."""

    planar = False  # whether x has its channels first
    gaps = False  # whether y's pixels may stand apart
    moments = False  # whether the channels' moments are left for a norm
    axes = 2  # spatial axes at most
    maths: tuple[str, ...] = ()  # how products of float32 may be computed

    def supports(self, problem: Conv, hw: Hardware) -> str | None:
        if not problem.channels_last or problem.transposed:
            return "for a Conv of channels-last images"
        if problem.planar != self.planar:
            return "x has its channels first" if problem.planar else "x has its channels last"
        if problem.dtype not in ("float16", "bfloat16", "float32"):
            return f"no tensor core matrix multiplications for {problem.dtype}"
        if problem.dtype == "float32" and problem.math not in self.maths:
            return f"for 16-bit operands, not float32 by {problem.math} matrix multiplications"
        if self.axes < 3 and is_deep(problem):
            return "at most two spatial axes"
        if problem.y_strides and not self.gaps:
            return "y's pixels stand apart"
        if problem.column_moments and not self.moments:
            return "no moments of channels"
        strided = not (problem.depthwise or problem.planar)
        piece = 16 // ITEMSIZE[problem.dtype]
        if strided and any(step % piece for step in image_strides(problem)):
            return "pixels are no multiple of 16 bytes apart"
        if max(image_strides(problem)[0], prod(problem.outer)) >= 2**29:
            return "an image of 2^29 elements or more"
        return super().supports(problem, hw)


def unpaired(problem: Images | ConvWeightGrad) -> str | None:
    """Why the channels are not each with a filter of its own, and in pairs; None if they are."""
    if not problem.depthwise:
        return f"{problem.channels} channels and {problem.filters} filters a group, not 1 and 1"
    return f"{problem.groups} channels are no pairs" if problem.groups % 2 else None


_RESIDENT = 3  # depthwise blocks on a multiprocessor


class Depthwise(ChannelsLast):
    """conv/depthwise_nhwc.cu: `pairs` of channels and `tall` x `wide` outputs a thread."""

    name = "depthwise"
    source = "conv/depthwise_nhwc.cu"

    def supports(self, problem: Conv, hw: Hardware) -> str | None:
        """A filter a channel, of pairs of channels, no wider than registers are many."""
        if reason := unpaired(problem):
            return reason
        if self._kept(problem, 2, 1, 1) > 64 or prod(problem.window.kernel) > 128:
            return "the filter is too wide"
        return super().supports(problem, hw)

    def _kept(self, problem: Conv, wide: int, tall: int, pairs: int) -> int:
        """Words that a thread keeps: the inputs of its rows on their way, and its sums."""
        taps = problem.window
        span, deep = (
            (n - 1) * taps.strides[i] + (taps.kernel[i] - 1) * taps.dilations[i] + 1
            for n, i in ((wide, 2), (tall, 1))
        )
        return ((deep if deep <= 4 else 3) * span + 2 * wide * tall) * pairs

    def configs(self, problem: Conv, hw: Hardware) -> Sequence[KernelConfig]:
        """The rule's, then others whose rows of inputs fit the registers."""
        configs = [
            KernelConfig.of(wide=wide, tall=tall, pairs=pairs)
            for wide in (2, 4, 7, 8)
            for tall in (1, 2)
            for pairs in (1, 2)
            if self._kept(problem, wide, tall, pairs) <= 66 and problem.groups % (2 * pairs) == 0
        ]
        return [KernelConfig.of(), *configs]

    def cost(self, problem: Conv, config: KernelConfig, hw: Hardware) -> float:
        """The floor, or the instructions of the outputs, more behind a stride, on full blocks."""
        wide, tall, _, _, tiles, grid = self._tiling(problem, config, hw)
        taps, outputs = prod(problem.window.kernel), tiles * wide * tall * problem.groups
        each = (1.1 + 0.107 * taps) * (1.6 if max(problem.window.strides) > 1 else 1.0)
        # fitted to thirty shapes on an H200 (2026-11), in picoseconds
        work = outputs * each * 1e-12 * 50e12 / hw.rate("float32")
        work *= max(1.0, _RESIDENT * hw.sm_count / prod(grid))
        return max(problem.floor(hw), work) + hw.launch_seconds

    def _tiling(
        self, problem: Conv, config: KernelConfig, hw: Hardware
    ) -> tuple[int, int, int, int, int, tuple[int, int, int]]:
        """Outputs a thread along both axes, its pairs, neighbours in a warp, tiles, and blocks."""
        _, oh, ow = problem.outer
        wide, tall, pairs = (config.integer(name) for name in ("wide", "tall", "pairs"))
        if not wide:
            wide = 4 if self._kept(problem, 4, 1, 1) <= 64 else 2
            tall = 2 if self._kept(problem, wide, 2, 1) <= 64 and oh > 1 else 1
            both = problem.groups % 4 == 0 and self._kept(problem, wide, tall, 2) <= 64
            pairs = 2 if both else 1
        each = problem.groups // (2 * pairs)  # of which a warp has so many side by side
        width = min((32, 16, 8), key=lambda n: -(-each // n) * n) if each > 8 else lanes(each)
        columns = -(-problem.groups // (2 * pairs * width))
        tiles = problem.batch * -(-oh // tall) * -(-ow // wide)
        turns = -(-tiles * width // 256)  # of blocks; each block has as many as the others
        rows = -(-turns // -(-turns // max(1, _RESIDENT * hw.sm_count // columns)))
        return wide, tall, pairs, width, tiles, (rows, columns, 1)

    def launch(self, problem: Conv, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch; a warp has 32 neighbours, or as many as there are channels."""
        wide, tall, pairs, width, tiles, grid = self._tiling(problem, config, hw)
        return self.one(
            "conv_depthwise", grid, 256, *tile_args(problem, tiles), WIDE=wide, TALL=tall,
            PAIRS=pairs, LANES=width, **conv_macros(problem), **tail_macros(problem.tail),
        )  # fmt: skip


def pixel_of(problem: Conv) -> int:
    """The channels that a pixel of a planar x is given: those under y's are 16 bytes apart."""
    return 4 if problem.channels <= 4 and problem.window.strides[2] % 2 == 0 else 8


class FewChannels(ChannelsLast):
    """conv/few_channels_sm80.cu: 16 x 16 pixels of y a block, all of x under them in its memory."""

    name = "few_channels"
    source = "conv/few_channels_sm80.cu"
    planar = True
    moments = True

    def supports(self, problem: Conv, hw: Hardware) -> str | None:
        if problem.groups > 1 or problem.channels > 8:
            return f"{problem.groups * problem.channels} channels (at most 8, in one group)"
        if problem.filters % 8:
            return f"{problem.filters} filters (a multiple of 8)"
        if problem.window.dilations[2] > 1:
            return "the taps of a row stand apart"
        if problem.outer[1] < 4:
            return f"{problem.outer[1]} rows of y, of the 16 that a block makes"
        if problem.tail or problem.slope:
            return "nothing may follow its activation, which has one slope"
        if problem.column_moments and (problem.outer[1] % 16 or problem.outer[2] % 16):
            return "moments are of whole blocks of 16 x 16 pixels"
        if self._smem(problem) > min(100 << 10, hw.smem_per_block):
            return "16 x 16 pixels of y lie over too much of x"
        return super().supports(problem, hw)

    def _width(self, problem: Conv) -> int:
        """Filters of a block."""
        return 32 if problem.filters % 64 else 64

    def _smem(self, problem: Conv) -> int:
        """Bytes of the filters and of x, or of y, which takes their place."""
        (_, kh, kw), (_, sh, sw) = problem.window.kernel, problem.window.strides
        pixel, bn = pixel_of(problem), self._width(problem)
        run = -(-kw * pixel // 16) * 16
        high = 15 * sh + (kh - 1) * problem.window.dilations[1] + 1
        wide = (15 * sw + run // pixel + 1) // 2 * 2
        return 2 * max(bn * (kh * run + 8) + high * wide * pixel, 256 * (bn + 8))

    def cost(self, problem: Conv, config: KernelConfig, hw: Hardware) -> float:
        """The floor, or the blocks: their products, of zeros too, and what else they do.

        Fitted to the first layers of ResNet, EfficientNet and ConvNeXt on an H200 (2026-11).
        """
        (_, kh, kw), (_, oh, ow) = problem.window.kernel, problem.outer
        run, bn = -(-kw * pixel_of(problem) // 16) * 16, self._width(problem)
        blocks = problem.batch * -(-oh // 16) * -(-ow // 16) * -(-problem.filters // bn)
        per_sm = hw.rate(problem.dtype) / hw.sm_count
        each = 2 * 256 * bn * kh * run / (0.26 * per_sm) + 1.3e-6
        each += MOMENT_SECONDS * 256 * bn * problem.column_moments
        work = each * max(1.0, blocks / hw.sm_count)
        return max(problem.floor(hw), work) + hw.launch_seconds

    def launch(self, problem: Conv, config: KernelConfig, hw: Hardware) -> Launches:
        (_, h, w), (_, oh, ow) = problem.inner, problem.outer
        bn = self._width(problem)
        tiles = problem.batch * -(-oh // 16) * -(-ow // 16)
        return self.one(
            "conv_few", (tiles, -(-problem.filters // bn), 1), 256,
            *args("x weight bias y, i32 filters sizes, f32 act_alpha, part", problem,
                  sizes=(h, w, oh, ow)),
            smem=self._smem(problem), T=C_TYPES[problem.dtype], CHANNELS=problem.channels,
            PIXEL=pixel_of(problem), BN=bn, TRANSPOSED=False, **window_macros(problem.window),
            **act_macros(problem), COLUMN_MOMENTS=problem.column_moments or None,
        )  # fmt: skip


class NhwcMma(Planned[Conv], Chosen[Conv], ChannelsLast):
    """conv/nhwc_sm80.cu: tiles on mma.sync, with the sum in `split` parts where tiles are few.

    A tile's k is that of 16 bits; of float32 it is half as many.
    """

    name = "mma_nhwc"
    source, version = "conv/nhwc_sm80.cu", 2
    maths = ("tf32", "bf16x3")
    axes = 3

    def supports(self, problem: Conv, hw: Hardware) -> str | None:
        if problem.depthwise:
            return "a filter a channel leaves no matrix multiplication to share"
        if problem.groups > 1 and problem.channels % 8:
            return f"{problem.channels} channels a group (a multiple of 8)"
        return super().supports(problem, hw)

    def _steps(self, problem: Images, tile: tuple[int, ...]) -> int:
        return -(-problem.channels // self._depth(problem, tile)) * prod(problem.window.kernel)

    def _smem(self, tile: tuple[int, ...]) -> int:
        """Bytes of the stages, or of the result, which takes their place."""
        bm, bn, _, _, bk, stages = tile
        return max(stages * (bm + bn) * (bk + 8) * 2, bm * (bn + 4) * 4)

    def _depth(self, problem: Images, tile: tuple[int, ...]) -> int:
        """Channels of a step."""
        return tile[4] * 2 // ITEMSIZE[problem.dtype]

    def tiles(self, problem: Images, hw: Hardware) -> Sequence[KernelConfig]:
        """Each tile that shared memory holds, the sum in parts of at least four steps."""
        fitting = [tile for tile in TILES if self._smem(tile) <= hw.smem_per_block]
        steps = {tile: self._steps(problem, tile) for tile in fitting}
        return [
            KernelConfig.of(tile=tile, split=split)
            for tile in fitting
            for split in (1, 2, 3, 4, 6, 8, 12, 16)
            if split == 1 or 4 * split <= steps[tile] > (split - 1) * -(-steps[tile] // split)
        ]

    def seconds(self, problem: Images, config: KernelConfig, hw: Hardware) -> float:
        """Waves of blocks, at least the latency of their steps; the parts written and read."""
        tile, split = config.integers("tile"), config.integer("split")
        bm, bn, bk = *tile[:2], self._depth(problem, tile)
        rows = problem.batch * prod(problem.outer)
        blocks = -(-rows // bm) * -(-problem.filters // bn) * problem.groups * split
        steps = -(-self._steps(problem, tile) // split)
        share = TILES[tile] * (0.6 if problem.dtype == "float32" else 1.0)
        per_sm = problem.rate(hw) / hw.sm_count * share
        latency = min(ITEMSIZE[problem.dtype], 2) * bk * 0.5e-8  # of a step
        each = max(2 * bm * bn * bk * steps / per_sm, steps * latency) + 1.5e-6
        size = rows * problem.groups * problem.filters
        parts = 4 * size * (split + 1) / hw.bandwidth + 3e-6 if split > 1 else 0.0
        waves = ceil(blocks / hw.sm_count)
        return max(waves * each, problem.bytes / hw.bandwidth) + parts + hw.launch_seconds

    def plan(self, problem: Conv, config: KernelConfig, hw: Hardware) -> Plan:
        config = self.ruled(problem, config, hw)
        tile, split = config.integers("tile"), config.integer("split")
        (bm, bn, wm, wn, _, stages), bk = tile, self._depth(problem, tile)
        rows, filters = problem.batch * prod(problem.outer), problem.groups * problem.filters
        steps = self._steps(problem, tile)
        chunk = -(-steps // split)
        blocks = -(-rows // bm) * -(-problem.filters // bn) * problem.groups
        sn, sy, sx = image_strides(problem)
        made = args(
            f"x weight {ENDS} workspace, i64 rows, i32 groups channels filters inner outer, "
            "i64 sn, i32 steps chunk, f32 act_alpha", problem, rows=rows, sn=sn, chunk=chunk,
            steps=(problem.inner[1] * sy, sy, sx, row_of_weights(problem)),
        )  # fmt: skip
        product = self.one(
            "conv_nhwc", (blocks, 1, split), 32 * (bm // wm) * (bn // wn), *made,
            smem=self._smem(tile), BM=bm, BN=bn, WM=wm, WN=wn, BK=bk, STAGES=stages,
            SPLIT_BF16=problem.math == "bf16x3", DEEP=is_deep(problem), SPLIT=split > 1,
            VEC=8 if problem.filters % 8 == 0 else 1, **conv_macros(problem),
            **({} if split > 1 else tail_macros(problem.tail)),
        )  # fmt: skip
        if split == 1:
            return product, 0
        sums = finish(problem, rows * filters, filters, 1, split)
        return (*product, sums), 4 * split * rows * filters


def epilogue_of(problem: Conv) -> Epilogue | None:
    """The epilogue of a product that does what stands behind the convolution; None: none does.

    Its bias is "col1", and "e1" is its c: a residual before or behind the activation.
    """
    plain = replace(NONE, bias=True, act=problem.act, act_alpha=problem.act_alpha)
    if problem.slope:
        return None
    return plain if problem.tail is None else _with_tail(plain, problem.tail, problem.dtype)


def _with_tail(plain: Epilogue, tail: Tail, dtype: str) -> Epilogue | None:
    """The epilogue followed by a sum, an activation, or one and then the other."""
    names = [step.name for step in tail.expression.steps]
    expression, first = tail.expression, tail.expression.loads + len(tail.expression.scalars)
    if tail.dtype != dtype or expression.stores != (first + len(names) - 1,):
        return None
    add = names[:1] == ["Add"]
    if add and (expression.loads != 2 or sorted(expression.steps[0].args) != [0, 1]):
        return None
    rest = expression.steps[int(add) :]
    if not rest:
        return replace(plain, residual=True) if add else None
    row = ACTIVATIONS.get(rest[0].name)
    number = first if add else tail.own
    if plain.act or len(rest) > 1 or row is None or rest[0].args[0] != number:
        return None
    numbers = [value for _, value in expression.scalars]
    values = dict(zip((name for name, _ in row.numbers), numbers, strict=False))
    if len(numbers) != len(row.numbers) or (not add and expression.loads != 1):
        return None
    if any(values[name] != value for name, value in row.fixed if name in values):
        return None
    alpha = values["alpha"] if row.attributes else 1.0
    return replace(plain, beta=float(add), act=row.key, act_alpha=alpha)


class Gathered(Chosen[Conv], ChannelsLast):
    """A product of Hopper with a's tiles gathered by TMA: a step is 128 bytes of a tap's channels.

    Its operands are described as images and taps; what stands behind it is in its epilogue.
    """

    axes = 3

    def __init__(self, many: Wgmma | Tf32) -> None:
        self.many = many

    def inner(self, config: KernelConfig) -> Wgmma | Tf32 | Cluster:
        """The candidate of the product to which the configuration belongs."""
        return self.many

    def product(self, problem: Conv) -> GemmProblem:
        """The product of the same tiles, whose k is the taps' channels in whole steps."""
        epilogue = epilogue_of(problem)
        assert epilogue is not None
        step = 128 // ITEMSIZE[problem.dtype]
        return GemmProblem.of(
            "Gemm", m=problem.batch * prod(problem.outer), n=problem.filters,
            k=-(-problem.channels // step) * step * prod(problem.window.kernel),
            dtype=problem.dtype, trans_b=True, math=problem.math, static_b=problem.static_weight,
            epilogue=replace(epilogue, column_moments=problem.column_moments),
        )  # fmt: skip

    def supports(self, problem: Conv, hw: Hardware) -> str | None:
        if problem.groups > 1:
            return f"{problem.groups} groups"
        if epilogue_of(problem) is None:
            return "no epilogue of a matrix multiplication computes the operators after it"
        reason = super().supports(problem, hw) or unboxed(problem)
        return reason or self.many.supports(self.product(problem), hw)

    def tiles(self, problem: Conv, hw: Hardware) -> Sequence[KernelConfig]:
        return self.many.configs(self.product(problem), hw)

    def fits(self, problem: Conv, config: KernelConfig) -> bool:
        return not config.attrs or self.inner(config).fits(self.product(problem), config)

    def workspace(self, problem: Conv, config: KernelConfig, hw: Hardware) -> int:
        how = self.ruled(problem, config, hw)
        return self.inner(how).workspace(self.product(problem), how, hw)

    def launch(self, problem: Conv, config: KernelConfig, hw: Hardware) -> Launches:
        config = self.ruled(problem, config, hw)
        product, *rest = self.inner(config).launch(self.product(problem), config, hw)
        a, b, y = product.args[:3]
        assert isinstance(a, TensorMap)
        assert isinstance(b, TensorMap)
        window, ldw, size = problem.window, row_of_weights(problem), ITEMSIZE[problem.dtype]
        taps = prod(window.kernel)
        filters = matrices(
            "weight", b.dtype, ldw, problem.filters, taps * ldw, (128 // size, b.box[1]),
            count=taps, apart=ldw,
        )  # fmt: skip
        if problem.y_strides:
            assert isinstance(y, TensorMap)
            _, oh, ow = problem.outer
            y = TensorMap(
                Ptr("y"), problem.dtype, (problem.filters, ow, oh, problem.batch),
                tuple(size * step for step in reversed(problem.y_strides)), y.box[:2],
                window=(0, 0, 0, 0, 1, 1),
            )  # fmt: skip
        sizes = (*problem.outer[0 if is_deep(problem) else 1 :], -(-problem.channels * size // 128))
        x = gathered(problem, a.box[1])
        made = (x, filters, y, *product.args[3:], *args("i32 sizes", sizes=sizes))
        macros = defines(
            **dict(product.defines),
            IM2COL=1,
            DEEP=is_deep(problem) or None,
            GAPS=bool(problem.y_strides) or None,
            **window_macros(window),
        )
        names = {"a": Ptr("x"), "c": Ptr("e1"), "col1": Ptr("bias")}
        return renamed((replace(product, args=made, defines=macros), *rest), names)


class Im2col(Gathered):
    """The products of 16 bits, by many tiles or by few."""

    name = "wgmma"
    gaps = True
    moments = True

    def __init__(self) -> None:
        super().__init__(Wgmma())
        self.few = Cluster()

    def inner(self, config: KernelConfig) -> Wgmma | Tf32 | Cluster:
        """The candidate of the product to which the configuration belongs."""
        return self.many if config.attr("tile") else self.few

    def supports(self, problem: Conv, hw: Hardware) -> str | None:
        if problem.y_strides and (problem.tail or problem.filters % 8):
            return "y's pixels stand apart: no operands as y, and filters a multiple of 8"
        if problem.y_strides and problem.column_moments:
            return "y's pixels stand apart, so that no box of them is whole"
        if problem.y_strides and is_deep(problem):
            return "y's pixels stand apart along three axes"
        return super().supports(problem, hw)

    def tiles(self, problem: Conv, hw: Hardware) -> Sequence[KernelConfig]:
        """The configurations of both products, and a narrow tile for few filters."""
        product, configs = self.product(problem), [*super().tiles(problem, hw)]
        if problem.y_strides:  # the stores of whole sums by TMA alone leave gaps
            configs = [how for how in configs if how.integer("splits") == 1]
        if problem.filters <= 64:
            configs.append(KernelConfig.of(tile=(2, 64, 1), cluster=1, splits=1, group=8))
        if not problem.y_strides and self.few.supports(product, hw) is None:
            configs += self.few.configs(product, hw)
        return configs

    def seconds(self, problem: Conv, config: KernelConfig, hw: Hardware) -> float:
        """The time of the product, whose a is the images once and not tap by tap."""
        product, many = self.product(problem), self.many
        if not config.attr("tile"):
            return self.few.cost(product, config, hw)
        assert isinstance(many, Wgmma)
        tiles = many.tile_seconds(product, config, hw, pixels=True)
        return max(tiles, problem.bytes / hw.bandwidth) + hw.launch_seconds


class Tf32Im2col(Gathered):
    """The products of float32 by tf32 (gemm/tf32_sm90.cu)."""

    name = "wgmma_tf32"
    maths = ("tf32",)

    def __init__(self) -> None:
        super().__init__(Tf32())

    def seconds(self, problem: Conv, config: KernelConfig, hw: Hardware) -> float:
        """The time of the product, whose a is the images once and not tap by tap."""
        product, many = self.product(problem), self.many
        assert isinstance(many, Tf32)
        window = zip(problem.inner, problem.outer, problem.window.kernel, strict=True)
        seen = prod(min(i, o * k) for i, o, k in window)
        read = 4 * (problem.batch * problem.channels * seen + product.n * product.k)
        return many.seconds(product, config, hw, read)


def _axes(problem: Images | ConvWeightGrad) -> tuple[int, ...]:
    """The spatial axes of the images' tensor map, the innermost first."""
    return (2, 1, 0) if is_deep(problem) else (2, 1)


def _corners(problem: Images | ConvWeightGrad) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Both corners of the box of a window's first taps, beyond the image, by `_axes`."""
    window = problem.window
    reach = [(k - 1) * d for k, d in zip(window.kernel, window.dilations, strict=True)]
    axes = _axes(problem)
    return tuple(-window.before[i] for i in axes), tuple(window.after[i] - reach[i] for i in axes)


def unboxed(problem: Images | ConvWeightGrad) -> str | None:
    """Why TMA cannot gather the pixels of x that a tap of the filter sees, or None if it can."""
    window, axes, (low, high) = problem.window, _axes(problem), _corners(problem)
    taps = [(window.kernel[i] - 1) * window.dilations[i] for i in axes]
    bits = 8 if len(axes) == 2 else 5  # of an offset along each axis, in a descriptor of its rank
    beyond = min(low + high) < -(1 << bits - 1) or max(low + high) >= 1 << bits - 1
    if max(window.strides) > 8 or max(taps) >= 1 << bits or beyond:
        return "a stride, an offset or a padding that a TMA descriptor does not hold"
    for i, first, last in zip(axes, low, high, strict=True):
        if (problem.inner[i] - 1 + last - first) // window.strides[i] + 1 != problem.outer[i]:
            return "y ends elsewhere than the window"
    return None


def gathered(problem: Images | ConvWeightGrad, pixels: int) -> TensorMap:
    """The descriptor of the images x: a load gathers so many pixels, 128 bytes of channels each."""
    axes, (low, high) = _axes(problem), _corners(problem)
    images, row, pixel = image_strides(problem)
    steps = (pixel, row, problem.inner[1] * row)[: len(axes)]
    size = ITEMSIZE[problem.dtype]
    return TensorMap(
        Ptr("x"), "tf32" if problem.dtype == "float32" else problem.dtype,
        (problem.channels, *(problem.inner[i] for i in axes), problem.batch),
        tuple(size * step for step in (*steps, images)), (128 // size, pixels),
        window=(*low, *high, *(problem.window.strides[i] for i in axes)),
    )  # fmt: skip


KERNELS = (Tf32Im2col(), Depthwise(), FewChannels(), Im2col(), NhwcMma())

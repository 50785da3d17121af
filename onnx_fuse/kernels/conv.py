"""Conv and ConvTranspose of one to three axes, with an activation behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from onnx_fuse.kernels.gemm import C_TYPES
from onnx_fuse.kernels.reduce import FLOATS, accumulator, defines
from onnx_fuse.llir import Context, Lowering, Tensor
from onnx_fuse.problem import ITEMSIZE, Launch, Num, Ptr

_BLOCKS = 264  # blocks a launch should have: a fixed aim, so that sums split by shape alone
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Window:
    """Filter or pool window over three spatial axes; where there are fewer, 1 leads."""

    kernel: Triple
    strides: Triple
    dilations: Triple
    before: Triple
    after: Triple

    def macros(self) -> dict[str, object]:
        """KD KH KW, SD ..., DD ..., PD ...: what conv/geometry.cuh and pool/pool.cu read."""
        named = {"K": self.kernel, "S": self.strides, "D": self.dilations, "P": self.before}
        return {k + axis: v for k, t in named.items() for axis, v in zip("DHW", t, strict=True)}


def triple(sizes: Sequence[int], fill: int = 1) -> Triple:
    """Sizes of up to three axes, `fill` in front."""
    a, b, c = [fill] * (3 - len(sizes)) + [int(s) for s in sizes]
    return a, b, c


def window(
    ctx: Context, node: ir.Node, kernel: Sequence[int], x: Sequence[int], y: Sequence[int]
) -> Window:
    """The node's window over spatial sizes x -> y; auto_pad is worked out from the output size."""
    rank = len(kernel)
    strides = ctx.attr(node, "strides") or [1] * rank
    dilations = ctx.attr(node, "dilations") or [1] * rank
    pads = list(ctx.attr(node, "pads") or [0] * (2 * rank))
    auto = ctx.attr(node, "auto_pad", "NOTSET")
    transposed = node.op_type == "ConvTranspose"
    if auto.startswith("SAME") or (transposed and ctx.attr(node, "output_shape")):
        extra = ctx.attr(node, "output_padding") or [0] * rank
        for i in range(rank):
            reach = (kernel[i] - 1) * dilations[i] + 1
            if transposed:
                total = strides[i] * (x[i] - 1) + extra[i] + reach - y[i]
                # the spec's text: SAME_UPPER halves in front, everything else the larger half
                small_first = auto == "SAME_UPPER"
            else:
                total, small_first = (y[i] - 1) * strides[i] + reach - x[i], auto == "SAME_UPPER"
            total = max(total, 0)
            pads[i] = total // 2 if small_first else total - total // 2
            pads[rank + i] = total - pads[i]
    elif auto == "VALID":
        pads = [0] * (2 * rank)
    return Window(
        triple(kernel), triple(strides), triple(dilations), triple(pads[:rank], 0),
        triple(pads[rank:], 0),
    )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """x [batch, groups * channels, *inner] -> y [batch, groups * filters, *outer]."""

    batch: int
    groups: int
    channels: int
    filters: int
    inner: Triple
    outer: Triple

    @property
    def flops(self) -> int:
        """Without the filter's taps."""
        return 2 * self.batch * self.groups * self.channels * self.filters * prod(self.outer)


def conv_launches(
    shape: Shape, taps: Window, dtype: str, transposed: bool, act: str = "", alpha: float = 0.0
) -> tuple[tuple[Launch, ...], int]:
    """The launches over names x weight bias y workspace, and the workspace's bytes."""
    macros = {"T": C_TYPES[dtype], "ACC": accumulator(dtype), "TRANSPOSED": transposed}
    macros |= taps.macros()
    if act:
        macros["ACT"] = act.upper()
    pixels = prod(shape.outer)
    columns = shape.batch * pixels
    operands = (Ptr("x"), Ptr("weight"), Ptr("bias"), Ptr("y"))
    sizes = tuple(
        Num("i32", n)
        for n in (shape.groups, shape.channels, shape.filters, *shape.inner, *shape.outer)
    )
    size = columns * shape.groups * shape.filters
    if shape.filters <= 4:
        direct = Launch(
            "conv/direct.cu", "conv_direct", (-(-size // 256), 1, 1), (256, 1, 1),
            (*operands, Num("i64", size), *sizes, Num("f32", alpha)), defines(**macros),
        )  # fmt: skip
        return (direct,), 0
    depth = shape.channels * prod(taps.kernel)
    bm = bn = 64
    if shape.filters > 64 and dtype != "float64":
        wide = -(-shape.filters // 128) * -(-columns // 128) * shape.groups
        bm = bn = 128 if wide >= _BLOCKS // 2 else 64
    fragments, bk = (2, 8) if bm == 128 else (1, 16)
    grid = (-(-columns // bn), -(-shape.filters // bm) * shape.groups)
    splits = max(1, min(depth // (bk * 16), -(-_BLOCKS // prod(grid)), 64))
    chunk = -(-depth // (splits * bk)) * bk
    splits = -(-depth // chunk)
    macros |= {"BM": bm, "BN": bn, "BK": bk, "FRAGMENTS": fragments, "SPLIT": splits > 1}
    main = Launch(
        "conv/implicit.cu", "conv", (*grid, splits), (bm * bn // (16 * fragments**2), 1, 1),
        (*operands, Ptr("workspace"), Num("i64", columns), *sizes, Num("i32", chunk),
         Num("f32", alpha)),
        defines(**macros),
    )  # fmt: skip
    if splits == 1:
        return (main,), 0
    numbers = (shape.groups * shape.filters, pixels, splits)
    finish = Launch(
        "conv/implicit.cu", "conv_finish", (-(-size // 256), 1, 1), (256, 1, 1),
        (Ptr("workspace"), Ptr("bias"), Ptr("y"), Num("i64", size),
         *(Num("i32", n) for n in numbers), Num("f32", alpha)),
        main.defines,
    )  # fmt: skip
    return (main, finish), splits * size * ITEMSIZE["float64" if dtype == "float64" else "float32"]


def convolution(ctx: Context, node: ir.Node, act: str = "", alpha: float = 0.0) -> str | None:
    """y = act(Conv(x, weight) + bias), or ConvTranspose."""
    x, weight = ctx.dense(node, 0), ctx.dense(node, 1)
    transposed = node.op_type == "ConvTranspose"
    if x.dtype not in FLOATS:
        return f"no kernel for {x.dtype}"
    rank = len(x.shape) - 2
    if not 1 <= rank <= 3:
        return f"{rank} spatial axes"
    reads: dict[str, Tensor] = {"x": x, "weight": weight}
    if ctx.has(node, 2):
        reads["bias"] = ctx.dense(node, 2)
    y = ctx.output(node, 0)
    if not y.size:
        return None
    groups = ctx.attr(node, "group", 1)
    taps = window(ctx, node, weight.shape[2:], x.shape[2:], y.shape[2:])
    shape = Shape(
        x.shape[0], groups, x.shape[1] // groups, y.shape[1] // groups,
        triple(x.shape[2:]), triple(y.shape[2:]),
    )  # fmt: skip
    launches, workspace = conv_launches(shape, taps, x.dtype, transposed, act, alpha)
    flops = shape.flops * prod(taps.kernel)
    ctx.call(node, launches, reads, {"y": y}, workspace=workspace, flops=flops)
    return None


def plain(ctx: Context, node: ir.Node) -> str | None:
    """Conv and ConvTranspose as they stand."""
    return convolution(ctx, node)


LOWERINGS: dict[tuple[str, str], Lowering] = {("", "Conv"): plain, ("", "ConvTranspose"): plain}

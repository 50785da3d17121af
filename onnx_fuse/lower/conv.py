"""Conv and ConvTranspose of one to three axes, with an activation behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import onnx_ir as ir

from onnx_fuse.cuda.macros import C_TYPES, FLOATS, accumulator, defines
from onnx_fuse.cuda.pointwise import copy
from onnx_fuse.lower.linear import product
from onnx_fuse.onnx.common import FUSE
from onnx_fuse.onnx.names import FusedName
from onnx_fuse.ops.activations import ACTIVATIONS, activation_macros
from onnx_fuse.program.call import Context, Lowering, Tensor
from onnx_fuse.program.problem import ITEMSIZE, Launch, Num, Ptr
from onnx_fuse.program.size import Size, number

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
    a, b, c = [fill] * (3 - len(sizes)) + [number(s) for s in sizes]
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


def spatial(
    ctx: Context, node: ir.Node, kernel: Sequence[int], x: Sequence[int]
) -> list[int] | None:
    """Output sizes of a Conv, ConvTranspose or pool over open sizes `x`; None: inference knows."""
    auto = ctx.attr(node, "auto_pad", "NOTSET")
    given = ctx.attr(node, "ceil_mode", 0) or ctx.attr(node, "output_shape")
    if given or not any(isinstance(size, Size) for size in x):
        return None
    rank = len(kernel)
    strides = ctx.attr(node, "strides") or [1] * rank
    dilations = ctx.attr(node, "dilations") or [1] * rank
    pads = ctx.attr(node, "pads") or [0] * (2 * rank)
    extra = ctx.attr(node, "output_padding") or [0] * rank
    transposed = node.op_type == "ConvTranspose"
    found = []
    for i, size in enumerate(x):
        reach = (kernel[i] - 1) * dilations[i] + 1
        around = pads[i] + pads[rank + i] if auto == "NOTSET" else 0
        if auto.startswith("SAME"):
            found.append(size * strides[i] if transposed else -(-size // strides[i]))
        elif transposed:
            found.append(strides[i] * (size - 1) + extra[i] + reach - around)
        else:
            found.append((size + around - reach) // strides[i] + 1)
    return found


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
    shape: Shape,
    taps: Window,
    dtype: str,
    transposed: bool,
    act: str = "",
    alpha: float = 0.0,
    slope: bool = False,
) -> tuple[tuple[Launch, ...], int]:
    """The launches over names x weight bias slope e1 e2 e3 y workspace, and the workspace's bytes.

    e1 to e3 are laid out as y: what a suffix of the last launch takes (conv/suffix.cuh). `slope`:
    the activation's alpha is that tensor's, by filter.
    """
    macros: dict[str, object] = {
        "T": C_TYPES[dtype],
        "ACC": accumulator(dtype),
        "TRANSPOSED": transposed,
    }
    macros |= taps.macros()
    if act:
        macros |= activation_macros(act)
    if slope:
        macros["SLOPE"] = True
    pixels = prod(shape.outer)
    columns = shape.batch * pixels
    ends = tuple(map(Ptr, ("bias", "slope", "e1", "e2", "e3", "y")))
    operands = (Ptr("x"), Ptr("weight"), *ends)
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
    # steps of 32 channels: with fewer than 12 the tensor cores would mostly multiply zeros
    half = dtype in ("float16", "bfloat16") and shape.channels >= 12
    count = prod(taps.kernel)
    wide = shape.filters > 64 and dtype != "float64"
    tiles = -(-shape.filters // 128) * -(-columns // 128) * shape.groups
    bm = 128 if wide and (half or tiles >= _BLOCKS // 2) else 64
    bn = 128 if half else bm
    bk, fragments = (32, 0) if half else (8, 2) if bm == 128 else (16, 1)
    # one tap a step pads the channels to whole steps
    padded = -(-shape.channels // bk) * bk
    tap_major = half or padded <= 1.3 * shape.channels
    step = 1 if half else bk
    depth = padded // bk * count if half else (padded if tap_major else shape.channels) * count
    grid = (-(-columns // bn), -(-shape.filters // bm) * shape.groups)
    splits = max(1, min(depth // (step * (8 if half else 16)), -(-_BLOCKS // prod(grid)), 64))
    chunk = -(-depth // (splits * step)) * step
    splits = -(-depth // chunk)
    how: dict[str, object] = {"BM": bm, "BN": bn, "SPLIT": splits > 1}
    how |= {"WM": bm // 32} if half else {"BK": bk, "FRAGMENTS": fragments, "TAP_MAJOR": tap_major}
    acc = ITEMSIZE["float64" if dtype == "float64" else "float32"]
    # the packed weights stand behind the partial sums, where 16-byte copies may begin
    launches, at = [], -(-splits * size * acc // 16) * 16 if splits > 1 else 0
    weight = Ptr("weight")
    if tap_major:
        weight, channels = Ptr("workspace", at), -(-shape.channels // 8) * 8 if half else padded
        widths = (shape.filters, shape.channels, channels)
        pack = Launch(
            "conv/pack.cu", "conv_pack",
            (-(-count // 32), -(-channels // 32), shape.groups * shape.filters), (256, 1, 1),
            (Ptr("weight"), weight, *(Num("i32", n) for n in widths)),
            defines(T=C_TYPES[dtype], TRANSPOSED=transposed, **taps.macros()),
        )  # fmt: skip
        launches.append(pack)
        at += shape.groups * count * shape.filters * channels * ITEMSIZE[dtype]
        padded = channels
    main = Launch(
        "conv/mma_sm80.cu" if half else "conv/implicit.cu", "conv", (*grid, splits),
        (256 if half else bm * bn // (16 * fragments**2), 1, 1),
        (Ptr("x"), weight, *ends, Ptr("workspace"), Num("i64", columns), *sizes,
         Num("i32", chunk), Num("i32", padded), Num("f32", alpha)),
        defines(**macros, **how),
        2 * 2 * (bm * 40 + 32 * (bn + 8)) if half else 0,
    )  # fmt: skip
    launches.append(main)
    if splits > 1:
        numbers = (shape.groups * shape.filters, pixels, splits)
        kept = {k: v for k, v in macros.items() if k in ("T", "ACC", "SLOPE")}
        kept |= activation_macros(act)
        finish = Launch(
            "conv/finish.cu", "conv_finish", (-(-size // 256), 1, 1), (256, 1, 1),
            (Ptr("workspace"), *ends, Num("i64", size),
             *(Num("i32", n) for n in numbers), Num("f32", alpha)),
            defines(**kept),
        )  # fmt: skip
        launches.append(finish)
    return tuple(launches), at


def _aligned(ctx: Context, node: ir.Node, x: Tensor) -> Tensor:
    """[N, C, P] of 16-bit elements copied to rows that start at multiples of 16 bytes.

    Without, products load them one by one: 14 x 14 and 7 x 7 pixels take four times as long.
    """
    *outer, pixels = x.shape
    room = ctx.scratch(x.dtype, (*outer, -(-pixels // 8) * 8))
    made = replace(room, shape=x.shape)
    copy(ctx, node, x, made)
    return made


def _product(
    ctx: Context, node: ir.Node, reads: dict[str, Tensor], y: Tensor, shape: Shape, act: str,
    alpha: float,
) -> str | None:  # fmt: skip
    """A filter of one tap: y[n] [M, P] = weight [M, C] · x[n] [C, P] + bias [M, 1]."""
    batch, pixels = shape.batch, prod(shape.inner)
    a = reads["weight"].reshape((shape.filters, shape.channels))
    b = reads["x"].reshape((batch, shape.channels, pixels))
    to = y.reshape((batch, shape.filters, pixels))
    assert a is not None
    assert b is not None
    assert to is not None
    if ITEMSIZE[y.dtype] == 2 and pixels % 8:
        b = _aligned(ctx, node, b)
    attrs: dict[str, object] = {}
    extra = {}
    if "bias" in reads and y.dtype == "float64":  # whose digits a kernel's row has not
        extra["c"] = reads["bias"]
        attrs = {"beta": 1.0, "c_rows": 1, "c_cols": 0, "c_strides": (0,) * (batch > 1)}
    elif "bias" in reads:
        extra["row0"], attrs["row_bias"] = reads["bias"], True
    if act:
        attrs |= {"act": act, "act_alpha": alpha}
    return product(ctx, node, a.expand((batch, *a.shape)), b, to, extra, None, attrs)


def convolution(
    ctx: Context, node: ir.Node, act: str = "", alpha: float = 0.0, slope: Tensor | None = None
) -> str | None:
    """y = act(Conv(x, weight) + bias), or ConvTranspose; `slope` is the alpha of each filter."""
    x, weight = ctx.dense(node, 0), ctx.dense(node, 1)
    transposed = node.op_type == "ConvTranspose"
    if x.dtype not in FLOATS:
        return f"no kernel for {x.dtype}"
    rank = len(x.shape) - 2
    if not 1 <= rank <= 3:
        return f"{rank} spatial axes"
    reads: dict[str, Tensor] = {"x": x, "weight": weight}
    known = ctx.host(node, 2) if ctx.has(node, 2) else None
    if ctx.has(node, 2) and (known is None or known.any()):  # zeros stand for no bias
        reads["bias"] = ctx.dense(node, 2)
    groups = ctx.attr(node, "group", 1)
    if x.shape[1] != (weight.shape[0] if transposed else weight.shape[1] * groups):
        raise ValueError(f"{x.shape[1]} channels")
    outer = spatial(ctx, node, weight.shape[2:], x.shape[2:])
    filters = weight.shape[1] * groups if transposed else weight.shape[0]
    y = ctx.output(node, 0, (x.shape[0], filters, *outer) if outer else None, x.dtype)
    if not y.size:
        return None
    if slope is not None:
        reads["slope"] = slope
    taps = window(ctx, node, weight.shape[2:], x.shape[2:], y.shape[2:])
    shape = Shape(
        x.shape[0], groups, x.shape[1] // groups, y.shape[1] // groups,
        triple(x.shape[2:]), triple(y.shape[2:]),
    )  # fmt: skip
    moves = (
        *taps.before,
        *taps.after,
        *(s - 1 for s in taps.strides),
        *(k - 1 for k in taps.kernel),
    )
    if not any(moves) and not transposed and groups == 1 and shape.filters >= 16:
        if slope is not None:
            return "a filter of one tap is a product, whose kernels take one slope for all"
        return _product(ctx, node, reads, y, shape, act, alpha)
    launches, workspace = conv_launches(
        shape, taps, x.dtype, transposed, act, alpha, slope is not None
    )
    flops = shape.flops * prod(taps.kernel)
    ctx.call(node, launches, reads, {"y": y}, workspace=workspace, flops=flops, suffix="y")
    return None


def plain(ctx: Context, node: ir.Node) -> str | None:
    """Conv and ConvTranspose as they stand."""
    return convolution(ctx, node)


def activated(ctx: Context, node: ir.Node) -> str | None:
    """ConvRelu and its like: the activation in the epilogue; the pre-activation is not kept."""
    name = FusedName.of(node.op_type)
    if name.exposed:
        return f"it returns {', '.join(name.exposed)}"
    row = ACTIVATIONS[name.activation]
    if ctx.view(node, 0).dtype == "float64":
        return "the epilogue's activations are of float32"
    return convolution(ctx, node, row.key, float(ctx.attr(node, "alpha", row.alpha)))


def sloped(ctx: Context, node: ir.Node) -> str | None:
    """ConvPRelu: leaky ReLU with a slope for each filter."""
    slope, x, filters = ctx.dense(node, 3), ctx.view(node, 0), ctx.view(node, 1).shape[0]
    channels = len(x.shape) - 1  # the axis, from the last
    row = slope.reshape((filters,)) if slope.size == filters else None
    by_filter = len(slope.shape) >= channels and slope.shape[-channels] == filters
    if row is None or not by_filter or x.dtype == "float64" or slope.dtype != x.dtype:
        return "the slope is not one number a filter, in the type of x, or that is float64"
    return convolution(ctx, node, "leaky_relu", 0.0, row)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "Conv"): plain,
    ("", "ConvTranspose"): plain,
    (FUSE, "ConvPRelu"): sloped,
    **{(FUSE, str(FusedName.make("Conv", act))): activated for act in ACTIVATIONS},
}

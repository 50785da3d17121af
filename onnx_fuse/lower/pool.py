"""Pools, LRN, Resize, GridSample and Col2Im."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.macros import FLOATS, accumulator
from onnx_fuse.cuda.pointwise import Code
from onnx_fuse.ir.build import required
from onnx_fuse.lower.channels_last import (
    channels_last,
    follow,
    in_stretch,
    is_channels_last,
    stored_last,
)
from onnx_fuse.lower.context import Context, Lowering, Unserved, copy, emit, floats
from onnx_fuse.lower.conv import spatial, triple, window
from onnx_fuse.lower.quant import codes, to_float
from onnx_fuse.lower.reduce import reduction
from onnx_fuse.program.call import Tensor, dense_strides
from onnx_fuse.program.problems import ChannelWindow, Col2Im, GridSample, Pool, Resample
from onnx_fuse.program.size import number

_TAPS = 16
"""Elements that one pass adds up; more, as to reduce an image without aliasing, are of two."""
_TIE = np.float32(1e-6)
"""How near to the middle of two pixels a position of Resize counts as the middle."""
KINDS = {"MaxPool": "max", "AveragePool": "average", "LpPool": "lp"}


def pool(ctx: Context, node: ir.Node) -> None:
    """MaxPool (with indices), AveragePool, LpPool."""
    if max_of_codes(ctx, node):
        return
    _pool(ctx, node, ctx.view(node, 0))


def _pool(ctx: Context, node: ir.Node, x: Tensor) -> None:
    """The pool of x, which is the node's input or its codes."""
    largest = node.op_type == "MaxPool"
    if x.dtype not in FLOATS and (not largest or x.dtype not in ("int8", "uint8")):
        raise Unserved("no-kernel", what=x.dtype)
    rank = len(x.shape) - 2
    if not 1 <= rank <= 3:
        raise Unserved("no-kernel", what=f"{rank} spatial axes")
    kernel = ctx.attr(node, "kernel_shape")
    outer = spatial(ctx, node, kernel, x.shape[2:])
    shape = (*x.shape[:2], *outer) if outer else None
    y = ctx.output(node, 0, shape, x.dtype)
    writes = {"y": y}
    nowhere, major = -1, bool(ctx.attr(node, "storage_order", 0))
    if len(node.outputs) > 1 and ctx.wants(node, 1):
        writes["indices"] = ctx.output(node, 1, shape, "int64")
        steps = dense_strides(x.shape[2:][:: -1 if major else 1])
        nowhere = -sum(map(number, steps))  # onnxruntime's: position -1 along each axis
    if not y.size:
        return
    inner = x.shape[2:]
    last = in_stretch(ctx, x) and "indices" not in writes
    x = channels_last(x) if last else ctx.contiguous(x)
    channels = y.shape[1] if last else 0
    taps = window(ctx, node, kernel, inner, y.shape[2:])
    problem = Pool(
        KINDS[node.op_type], y.shape[0] * y.shape[1], triple(inner), triple(y.shape[2:]),
        taps, x.dtype, bool(ctx.attr(node, "count_include_pad", 0)),
        major, float(ctx.attr(node, "p", 2)), channels, nowhere,
    )  # fmt: skip
    if last:
        writes["y"] = channels_last(stored_last(ctx, node, y))
    ctx.select(node, problem, {"x": x}, writes)


def max_of_codes(ctx: Context, node: ir.Node) -> bool:
    """Whether the largest of dequantized numbers are taken of their codes, which are as ordered.

    So they are where each window has a pixel of the image: what a window without any gives is no
    code.
    """
    held = codes(ctx, node, 0) if node.op_type == "MaxPool" and not ctx.wants(node, 1) else None
    if held is None or held.axis is not None or not 0 < held.scale[0] < np.inf:
        return False
    kernel, pads = ctx.attr(node, "kernel_shape"), ctx.attr(node, "pads") or [0]
    moved = max(ctx.attr(node, "dilations") or [1]) > 1 or ctx.attr(node, "ceil_mode", 0)
    if moved or ctx.attr(node, "auto_pad", "NOTSET") != "NOTSET" or max(pads) >= min(kernel):
        return False
    dtype = ctx.view(node, 0).dtype
    _pool(ctx, node, held.q)
    pooled = required(ctx.slots[node.outputs[0]].tensor)
    y, code = follow(ctx, node, ctx.output(node, 0, pooled.shape, dtype), [pooled]), Code()
    zero = code.scalar(int(held.zero[0]), "int32")
    factor = code.scalar(held.scale[0], "float32")
    emit(ctx, code, node, to_float(code, code.load(pooled), dtype, zero, factor), y)
    ctx.codes[y.buffer] = replace(held, q=pooled, floats=y)
    return True


def global_pool(ctx: Context, node: ir.Node) -> None:
    """GlobalAveragePool, GlobalMaxPool, GlobalLpPool: reductions over the spatial axes."""
    x = ctx.view(node, 0)
    kind = node.op_type.removeprefix("Global").removesuffix("Pool")
    p = ctx.attr(node, "p", 2)
    if kind == "Lp" and p not in (1, 2):
        raise Unserved("no-kernel", what=f"p = {p}")
    y = ctx.output(node, 0)
    if y.size:
        reducer = {"Average": "Mean", "Max": "Max", "Lp": f"L{p}"}[kind]
        last = is_channels_last(x)
        axes = range(1 + (not last), len(x.shape) - last)
        reduction(ctx, node, channels_last(x) if last else ctx.contiguous(x), y, reducer, axes)


def lrn(ctx: Context, node: ir.Node) -> None:
    """Local response normalization over neighbouring channels."""
    x = floats(ctx.dense(node, 0))
    y = ctx.output(node, 0)
    problem = ChannelWindow(
        x.size, x.shape[1], prod(x.shape[2:]), ctx.attr(node, "size"), x.dtype,
        ctx.attr(node, "alpha", 1e-4), ctx.attr(node, "beta", 0.75), ctx.attr(node, "bias", 1.0),
    )  # fmt: skip
    ctx.select(node, problem, {"x": x}, {"y": y})


# ---- Resize -----------------------------------------------------------------------------------


def _positions(
    length: int, resized: int, scale: np.float32, transform: str, roi: tuple[float, float]
) -> np.ndarray:
    """Where in an axis of `length` each element of the resized one lies.

    In float32, step by step as onnxruntime has it: which pixel is the nearest depends on it.
    """
    half, i = np.float32(0.5), np.arange(resized, dtype=np.float32)
    last = np.float32(length - 1)
    if scale == 1:
        return i
    match transform:
        case "align_corners":
            return i * last / np.float32(resized - 1) if resized > 1 else 0 * i
        case "asymmetric":
            return i / scale
        case "tf_half_pixel_for_nn":
            return (i + half) / scale
        case "pytorch_half_pixel":
            return (i + half) / scale - half if resized > 1 else 0 * i
        case "half_pixel_symmetric":
            # the resized length is a rounded one: keep the centres where they were
            adjust = np.float32(resized) / (scale * np.float32(length))
            shift = float(np.float32(length / 2) * (1 - adjust))
            return (shift + (i + half).astype(float) / float(scale) - 0.5).astype(np.float32)
        case "tf_crop_and_resize":
            start, end = map(np.float32, roi)
            if resized > 1:
                return start * last + i * (end - start) * last / np.float32(resized - 1)
            return half * (start + end) * last + 0 * i
    return (i + half) / scale - half


def taps(
    length: int, resized: int, scale: float, *, mode: str, transform: str, nearest: str,
    cubic: float, exclude_outside: bool, antialias: bool, roi: tuple[float, float],
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """(source index int32, weight float32) [resized, taps] of one axis; index -1: outside.

    `transform` and `mode` are ONNX Resize's coordinate_transformation_mode and mode.
    """
    at = _positions(length, resized, np.float32(scale), transform, roi)
    outside = (at < 0) | (at > length - 1) if transform == "tf_crop_and_resize" else at != at
    if mode == "nearest":
        below = np.floor(at)
        beyond = at - (below + np.float32(0.5))  # onnxruntime (1.32) lets this be off by rounding
        if nearest == "floor":
            source = below
        elif nearest == "ceil":
            source = np.ceil(at)
        elif nearest == "round_prefer_ceil":
            source = below + (beyond > -_TIE)
        else:
            source = below + (beyond >= _TIE)
        index = np.clip(source, 0, length - 1).astype(np.int64)[:, None]
        weight = np.ones_like(index, np.float64)
    else:
        # antialiasing stretches the filter by the factor of the downsampling
        stretch = min(scale, 1.0) if antialias else 1.0
        reach = (1 if mode == "linear" else 2) / stretch
        count = 2 * int(np.ceil(reach))
        index = (np.floor(at)[:, None] + np.arange(1 - count // 2, count // 2 + 1)).astype(np.int64)
        d = np.abs(at[:, None] - index) * stretch
        if mode == "linear":
            weight = np.maximum(0.0, 1 - d)
        else:
            near = ((cubic + 2) * d - (cubic + 3)) * d * d + 1
            far = ((cubic * d - 5 * cubic) * d + 8 * cubic) * d - 4 * cubic
            weight = np.where(d <= 1, near, np.where(d < 2, far, 0.0))
        if exclude_outside:
            weight = np.where((index < 0) | (index >= length), 0.0, weight)
        if exclude_outside or antialias:
            weight /= weight.sum(1, keepdims=True)
        index = np.clip(index, 0, length - 1)
    index[outside] = -1
    return index.astype(np.int32), weight.astype(np.float32)


def resize(ctx: Context, node: ir.Node) -> None:
    """Resize: a pass for two axes, a gather with weights that the host works out."""
    x = ctx.view(node, 0)
    rank = len(x.shape)
    mode = ctx.attr(node, "mode", "nearest")
    if x.dtype not in FLOATS and (mode != "nearest" or x.dtype not in ("int32", "int8", "uint8")):
        raise Unserved("no-kernel", what=x.dtype)
    y = ctx.output(node, 0)
    axes = [a % rank for a in ctx.attr(node, "axes") or range(rank)]
    scales = dict.fromkeys(range(rank), 1.0)
    sizes_or_scales = ctx.host(node, 2) if ctx.has(node, 2) else None
    if sizes_or_scales is not None and sizes_or_scales.size:
        scales |= dict(zip(axes, sizes_or_scales.reshape(-1).tolist(), strict=True))
    elif ctx.has(node, 3):
        # not_larger and not_smaller give all axes one factor; the output's size is rounded after
        policy = ctx.attr(node, "keep_aspect_ratio_policy", "stretch")
        sizes = ctx.given(node, 3, "its sizes")
        lengths = [int(x.shape[a]) or 1 for a in axes]
        ratios = [
            float(np.float32(int(s)) / np.float32(n)) for s, n in zip(sizes, lengths, strict=True)
        ]
        if policy != "stretch":
            ratios = [(min if policy == "not_larger" else max)(ratios)] * len(axes)
        scales |= dict(zip(axes, ratios, strict=True))
    else:
        raise Unserved("unknown", what="its scales")
    transform = ctx.attr(node, "coordinate_transformation_mode", "half_pixel")
    roi = ctx.host(node, 1) if ctx.has(node, 1) else None
    if transform == "tf_crop_and_resize" and roi is None:
        raise Unserved("unknown", what="its region of interest")
    antialias = bool(ctx.attr(node, "antialias", 0))
    todo = [
        a for a in range(rank) if scales[a] != 1 and not (antialias and x.shape[a] == y.shape[a])
    ]
    if x.shape == y.shape or not todo:  # copied, whatever the scales
        ctx.alias(node, 0, x)
        return
    if not y.size:
        return
    acc = accumulator(x.dtype) if x.dtype in FLOATS else "float"
    between = {"float": "float32", "double": "float64"}[acc]
    last_axis = is_channels_last(x)  # what it makes is the larger one, should a copy be needed
    if last_axis:
        y = channels_last(stored_last(ctx, node, y))
    places = [0, rank - 1, *range(1, rank - 1)] if last_axis else list(range(rank))
    tables = {}
    for axis in todo:
        at = axes.index(axis) if axis in axes else -1
        crop = (
            (float(roi[at]), float(roi[at + len(axes)])) if roi is not None and roi.size else (0, 1)
        )
        tables[places[axis]] = taps(
            int(x.shape[axis]), int(y.shape[places[axis]]), scales[axis], mode=mode,
            transform=transform,
            nearest=ctx.attr(node, "nearest_mode", "round_prefer_floor"),
            cubic=ctx.attr(node, "cubic_coeff_a", -0.75),
            exclude_outside=bool(ctx.attr(node, "exclude_outside", 0)),
            antialias=antialias, roi=crop,
        )  # fmt: skip
    source = channels_last(x) if last_axis else x
    if _repeated(ctx, node, source, y, tables):
        return
    source, shape = ctx.contiguous(source), list(source.shape)
    todo = sorted(tables)
    while todo:
        b = todo.pop()
        index, weight = tables[b]
        read = {"source": ctx.constant(index), "weight": ctx.constant(weight)}
        a, size, rows = b, shape[b], (1, 1, 0)
        if todo and todo[-1] == b - 1 and tables[b - 1][0].shape[1] * index.shape[1] <= _TAPS:
            a = todo.pop()
            above, weight = tables[a]
            read |= {"above": ctx.constant(above), "above_weight": ctx.constant(weight)}
            rows = (number(shape[a]), number(y.shape[a]), above.shape[1])
        shape[a : b + 1] = y.shape[a : b + 1]
        target: Tensor = ctx.scratch(between, tuple(shape)) if todo else y
        problem = Resample(
            prod(shape[:a]), size, shape[b], prod(shape[b + 1 :]), index.shape[1], source.dtype,
            target.dtype, acc, ctx.attr(node, "extrapolation_value", 0.0), rows,
        )  # fmt: skip
        ctx.select(node, problem, {"x": source, **read}, {"y": target})
        source = target


def _repeated(
    ctx: Context, node: ir.Node, x: Tensor, y: Tensor,
    tables: Mapping[int, tuple[np.ndarray, np.ndarray]],
) -> bool:  # fmt: skip
    """Lower a Resize that only repeats elements along some axes, as copies to strided views."""
    shape: list[int] = []
    pairs: list[int] = []
    for a, size in enumerate(x.shape):
        times = 1
        if a in tables:
            index, _ = tables[a]
            times, rest = divmod(len(index), int(size))
            steps = np.repeat(np.arange(int(size)), times)
            if rest or index.shape[1] > 1 or not np.array_equal(index[:, 0], steps):
                return False
        shape += [size, 1]
        pairs += [size, times]
    copy(ctx, node, x.view(shape).expand(pairs), y.view(pairs))
    return True


# ---- gathers with weights ----------------------------------------------------------------------


def grid_sample(ctx: Context, node: ir.Node) -> None:
    """GridSample in two or three axes: nearest, linear or cubic; zeros, border or reflection."""
    x, grid = ctx.dense(node, 0), ctx.dense(node, 1)
    rank = len(x.shape) - 2
    if x.dtype not in FLOATS or rank not in (2, 3):
        raise Unserved("no-kernel", what=f"{x.dtype} in {rank} axes")
    modes = {"nearest": 0, "linear": 1, "bilinear": 1, "cubic": 2, "bicubic": 2}
    mode = modes[ctx.attr(node, "mode", "linear")]
    if mode == 2 and rank == 3:
        raise Unserved("no-kernel", what="cubic steps in three axes")
    paddings = ("zeros", "border", "reflection")
    y = ctx.output(node, 0, (*x.shape[:2], *grid.shape[1:-1]), x.dtype)
    if not y.size or not x.size:
        raise Unserved("empty")
    problem = GridSample(
        x.shape[0], x.shape[1], triple(x.shape[2:]), prod(grid.shape[1:-1]), rank, x.dtype,
        grid.dtype, mode, paddings.index(ctx.attr(node, "padding_mode", "zeros")),
        bool(ctx.attr(node, "align_corners", 0)),
    )  # fmt: skip
    ctx.select(node, problem, {"x": x, "grid": grid}, {"y": y})


def col2im(ctx: Context, node: ir.Node) -> None:
    """Col2Im: each pixel adds up what the columns hold of it."""
    x = floats(ctx.dense(node, 0))
    image, block = ([int(n) for n in ctx.given(node, i, "its shapes")] for i in (1, 2))
    rank = len(image)
    if not 1 <= rank <= 3:
        raise Unserved("no-kernel", what=f"{rank} spatial axes")
    y = ctx.output(node, 0, (x.shape[0], x.shape[1] // prod(block), *image), x.dtype)
    taps = window(ctx, node, block, image, [1] * rank)
    reach = [(k - 1) * d + 1 for k, d in zip(taps.kernel, taps.dilations, strict=True)]
    padded = [n + a + b for n, a, b in zip(triple(image), taps.before, taps.after, strict=True)]
    grid = [(n - r) // s + 1 for n, r, s in zip(padded, reach, taps.strides, strict=True)]
    problem = Col2Im(y.size, triple(image), triple(grid), taps, x.dtype)
    ctx.select(node, problem, {"x": x}, {"y": y})


LOWERINGS: dict[tuple[str, str], Lowering] = {
    **{("", name): pool for name in KINDS},
    **{("", f"Global{kind}Pool"): global_pool for kind in ("Average", "Max", "Lp")},
    ("", "LRN"): lrn,
    ("", "Resize"): resize,
    ("", "GridSample"): grid_sample,
    ("", "Col2Im"): col2im,
}

"""Convolutions, pools, resizing: 1 to 3 spatial axes, any stride, dilation, group and pads.

Convolution is linear in the image and in the weight. Its transposes are standard ops: for the image
ConvTranspose, for the weight a Conv whose batch and channel axes are swapped, strides and dilations
exchanged. A pool other than MaxPool is a depthwise convolution with a constant kernel.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.actual_sizes import POOLS, pooled, same_pads
from onnx_fuse.ir.build import const_array, dim, required
from onnx_fuse.ir.windows import passes_padding
from onnx_fuse.ops.opdef import OpDef, Unary, register, table
from onnx_fuse.ops.shape_ops import (
    Tensor,
    Values,
    Writer,
    arguments,
    fail,
    ints_attribute,
    known_rank,
    static_ints,
    text,
)


class _Window(NamedTuple):
    """A node's filter or window along the spatial axes; `extent` is its size with dilations.

    Both are empty where the size is known at run time only.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    extent: list[int]
    group: int


def _window(node: ir.Node, weight: ir.Value | None, n: int) -> _Window:
    kernel = _kernel(node, weight, n)
    strides = ints_attribute(node, "strides", [1] * n) or []
    dilations = ints_attribute(node, "dilations", [1] * n) or []
    extent = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=False)]
    return _Window(kernel, strides, dilations, extent, node.attributes.get_int("group", 1))


def _kernel(node: ir.Node, weight: ir.Value | None, n: int) -> list[int]:
    kernel = ints_attribute(node, "kernel_shape")
    if kernel is not None:
        return kernel
    sizes = [dim(weight, 2 + a) for a in range(n)] if weight is not None else [None]
    fixed = [s for s in sizes if s is not None]
    if len(fixed) == len(sizes):
        return fixed
    same = text(node, "auto_pad", "NOTSET").startswith("SAME")
    if weight is None or same or "output_shape" in node.attributes:
        raise fail(node, "the size of its kernel is not known")
    return []


def _padded(op: Writer, node: ir.Node, x: ir.Value, window: _Window) -> tuple[Tensor, list[int]]:
    """The image and the explicit pads (begins, then ends) that auto_pad stands for. Where they are
    known at run time only, or cut, the image is padded or cut, and no pads remain.
    """
    kernel, strides, n = window.kernel, window.strides, len(window.strides)
    mode, conv = text(node, "auto_pad", "NOTSET"), node.op_type not in POOLS
    if mode == "NOTSET":
        pads = ints_attribute(node, "pads", [0] * 2 * n) or []
        # onnxruntime has no ConvTranspose to nothing, and its Conv of nothing kills the process
        spans = enumerate(zip(pads, pads[n:], window.extent or [1] * n, strict=False))
        if all(dim(x, 2 + a) or begin + end < extent for a, (begin, end, extent) in spans):
            return x, pads
        return op.Pad(x, [0, 0, *pads[:n], 0, 0, *pads[n:]]), [0] * 2 * n
    if mode == "VALID":
        return x, [0] * 2 * n
    # with a stride of 1, the size drops out
    sizes = [1 if strides[a] == 1 else dim(x, 2 + a) for a in range(n)]
    if None not in sizes:
        axes = zip(sizes, kernel, strides, strict=True)
        pairs = [same_pads(size or 0, k, s, mode, conv=conv) for size, k, s in axes]
        # a pool's window with holes may reach what would be cut behind it
        pads = [b for b, _ in pairs] + [a if conv else max(a, 0) for _, a in pairs]
        if min(pads) >= 0:
            return x, pads
        amounts = op.constant([0, 0, *pads[:n], 0, 0, *pads[n:]])
        return op.Pad(x, amounts), [0] * 2 * n
    size = op.shape_of(x, list(range(2, 2 + n)))
    stride = op.constant(strides)
    ahead = op.Mul(op.Div(op.Sub(op.Add(size, stride), 1), stride), stride)  # ceil(size / s) s
    total = op.Sub(op.Add(op.Sub(ahead, stride), op.constant(kernel)), size)
    twice = total if mode == "SAME_UPPER" else op.Add(total, 1)
    if conv and any(s > k for s, k in zip(strides, kernel, strict=True)):
        twice = op.Add(twice, op.Cast(op.Less(total, 0), to=int(ir.DataType.INT64)))
    before = op.Div(twice, 2)  # towards zero
    after = op.Sub(total, before)
    amounts = op.vector([0, 0, before, 0, 0, after if conv else op.Max(after, 0)])
    return op.Pad(x, amounts), [0] * 2 * n


def image_grad(
    op: Writer, dy: ir.Value, weight: ir.Value, x: ir.Value, window: _Window, pads: list[int]
) -> Tensor:
    """d loss / d image of Conv: ConvTranspose(dy, weight), of the image's own size."""
    _, strides, dilations, extent, group = window
    n = len(strides)
    sizes = [dim(x, 2 + a) for a in range(n)] if extent else [None] * n
    # A stride skips the last few rows of some images: how many, output_padding says. Where sizes
    # are dynamic, take the most there can be and cut.
    if None in sizes and any(s > 1 for s in strides):
        extra = [s - 1 for s in strides]
    else:
        extra = [
            0 if s is None else (s + pads[a] + pads[n + a] - extent[a]) % strides[a]
            for a, s in enumerate(sizes)
        ]
    dx = op.ConvTranspose(
        dy, weight, strides=strides, dilations=dilations, pads=pads, group=group,
        output_padding=extra if any(extra) else None,
    )  # fmt: skip
    if None in sizes and any(extra):
        spatial = list(range(2, 2 + n))
        dx = op.Slice(dx, op.constant([0] * n), op.shape_of(x, spatial), op.constant(spatial))
    return dx


def weight_grad(
    op: Writer, x: ir.Value, dy: ir.Value, weight: ir.Value, window: _Window, pads: list[int]
) -> Tensor:
    """d loss / d weight of Conv: the image convolved with dy, channels in the batch's place."""
    kernel, strides, dilations, _, group = window
    n = len(strides)
    spatial = list(range(2, 2 + n))
    half = weight.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    depthwise = group == dim(weight, 0) and dim(weight, 1) == 1
    depth = dim(weight, 1)  # TMA gathers volumes of channels that are a multiple of 16 bytes
    volume = half and group == 1 and isinstance(depth, int) and depth % 8 == 0
    pointwise = set(kernel) == set(strides) == set(dilations) == {1} and not any(pads)
    # as tf32; of other float32 products the body is what stands below
    single = weight.dtype == ir.DataType.FLOAT and group == 1 and not pointwise
    flat = half or depthwise or single
    if op.fused and kernel and (flat if n < 3 else n == 3 and volume and not pointwise):
        how = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}
        swap = [1, 0, *spatial]
        (dw,) = op.emit("ConvWeightGrad", [dy, x], [weight], group=group, swap=swap, **how)
        return dw
    if pointwise and group == 1:
        # A 1x1 convolution is a product: Σ_n dy[n] [M, P] · x[n]ᵀ [P, C], as [M, C, 1, …].
        rows = op.reshape(dy, [*op.sizes_of(dy)[:2], op.elements(dy, 2)])
        image = op.reshape(x, [*op.sizes_of(x)[:2], op.elements(x, 2)])
        product = op.MatMul(rows, op.Transpose(image, perm=[0, 2, 1]))
        return op.reshape_like(op.ReduceSum(product, [0], keepdims=0), weight)
    channels = dim(weight, 1)
    wide = channels is None or channels >= _FEW_CHANNELS
    if group == 1 and wide and kernel and math.prod(kernel) <= _MOST_PLACES:
        return _products_over_places(op, x, dy, weight, window, pads)
    if group == 1:
        images = op.Transpose(x, perm=[1, 0, *spatial])
    else:
        # [N, g, C/g, ...] -> [C/g, g N, ...]: each group sees its own N images
        batch, channels, *rest = op.sizes_of(x)
        each = dim(weight, 1)
        if each is None:
            each = channels // group if isinstance(channels, int) else op.Div(channels, group)
        split = op.reshape(x, [batch, group, each, *rest])
        swapped = op.Transpose(split, perm=[2, 1, 0, *(s + 1 for s in spatial)])
        images = op.reshape(swapped, [each, _times(op, batch, group), *rest])
    taps = op.Transpose(dy, perm=[1, 0, *spatial])
    # strides and dilations change places
    dw = op.Conv(images, taps, strides=dilations, dilations=strides, pads=pads, group=group)
    # inference says nothing of a Conv whose kernel, here dy, has no static size
    dw.shape = ir.Shape([dim(weight, 1), dim(weight, 0), *[None] * n])
    if any(s > 1 for s in strides):
        # rows that the stride skipped make a few taps too many
        sizes = op.constant(kernel) if kernel else op.shape_of(weight, spatial)
        dw = op.Slice(dw, op.constant([0] * n), sizes, op.constant(spatial))
        dw.shape = ir.Shape([dim(weight, 1), dim(weight, 0), *(dim(weight, a) for a in spatial)])
    return op.Transpose(dw, perm=[1, 0, *spatial])


_FEW_CHANNELS = 8  # onnxruntime's CPU convolves images of fewer channels faster than it multiplies
_MOST_PLACES = 49  # of a kernel for which a graph gets a product each


def _products_over_places(
    op: Writer, x: ir.Value, dy: ir.Value, weight: ir.Value, window: _Window, pads: list[int]
) -> Tensor:
    """[M, C, *kernel] from dy [M, N P] · xᵀ [N P, C], for what each place of the kernel sees of x.

    onnxruntime's CPU takes half to nine tenths of the time of the convolution with dy.
    """
    kernel, strides, dilations, _, _ = window
    n = len(strides)
    spatial = list(range(2, 2 + n))
    image = op.Transpose(x, perm=[1, 0, *spatial])
    if any(pads):
        image = op.Pad(image, [0, 0, *pads[:n], 0, 0, *pads[n:]])
    swapped = op.Transpose(dy, perm=[1, 0, *spatial])
    (count, channels, *_), length = op.sizes_of(weight), op.elements(swapped, 1)
    rows = op.reshape(swapped, [count, length])
    reach = op.Mul(op.shape_of(dy, spatial), op.constant(strides))
    products = []
    for place in product(*map(range, kernel)):
        begin = op.constant([i * d for i, d in zip(place, dilations, strict=True)])
        ends = op.Add(begin, reach)
        seen = op.Slice(image, begin, ends, op.constant(spatial), op.constant(strides))
        products.append(op.Gemm(rows, op.reshape(seen, [channels, length]), transB=1))
    dw = op.Concat(*products, axis=1) if len(products) > 1 else products[0]
    by_place = op.Transpose(op.reshape(dw, [count, len(products), channels]), perm=[0, 2, 1])
    return op.reshape_like(by_place, weight)


def _times(op: Writer, a: ir.Value | int, b: ir.Value | int) -> Any:
    return a * b if isinstance(a, int) and isinstance(b, int) else op.Mul(a, b)


def _bias_grad(op: Writer, dy: ir.Value, n: int) -> Tensor:
    return op.ReduceSum(dy, [0, *range(2, 2 + n)], keepdims=0)


def conv_grad(op: Writer, node: ir.Node, dys: Values) -> Values:
    (x, weight, _), dy = arguments(node, 3), dys[0]
    n = known_rank(x) - 2
    window = _window(node, weight, n)
    image, pads = _padded(op, node, x, window)
    dx = _unpad(op, image_grad(op, dy, weight, image, window, pads), x, image)
    return [dx, weight_grad(op, image, dy, weight, window, pads), _bias_grad(op, dy, n)]


def _unpad(op: Writer, dx: Tensor, x: ir.Value, image: ir.Value) -> Tensor:
    """Undo what `_padded` made of x, which its Pad node tells."""
    if image is x:
        return dx
    return op.Pad(dx, op.Neg(required(image.producer()).inputs[1]))


def _conv_transpose(op: Writer, node: ir.Node, dys: Values) -> Values:
    """The roles swap: dx = Conv(dy, weight); the weight's gradient sees dy as the image."""
    (x, weight, _), dy = arguments(node, 3), dys[0]
    n = known_rank(x) - 2
    window = _window(node, weight, n)
    _, strides, dilations, extent, group = window
    pads = ints_attribute(node, "pads", [0] * 2 * n) or []
    shape, mode = ints_attribute(node, "output_shape"), text(node, "auto_pad", "NOTSET")
    if mode == "VALID":
        pads = [0] * 2 * n
    if shape is not None or mode.startswith("SAME"):
        extra = ints_attribute(node, "output_padding", [0] * n) or []
        begins, ends = [], []
        for a in range(n):
            size = dim(x, 2 + a)
            # SAME_*: the output is size · stride, so the size of the input drops out
            padding = -strides[a] + extent[a] + extra[a]
            if shape is not None:
                if size is None:
                    raise fail(node, "it has an output_shape, and its input a dynamic size")
                padding += strides[a] * size - shape[-n:][a]
            total = max(padding, 0)
            begin = (total + (mode != "SAME_UPPER")) // 2
            begins.append(begin)
            ends.append(total - begin)
        pads = begins + ends
    dx = op.Conv(dy, weight, strides=strides, dilations=dilations, pads=pads, group=group)
    return [dx, weight_grad(op, dy, x, weight, window, pads), _bias_grad(op, dy, n)]


# ---- pools -----------------------------------------------------------------------------------


def _write_pads(node: ir.Node, x: ir.Value) -> None:
    """Write pads for SAME, and no needless ceil_mode, where the size of a pool's image is known:
    onnxruntime (1.32) plans its buffers by inference, which has other sizes for those two.
    """
    n, auto_pad = known_rank(x) - 2, text(node, "auto_pad", "NOTSET")
    window, pads = _window(node, None, n), ints_attribute(node, "pads", [0] * 2 * n) or []
    sizes = [size for a in range(n) if (size := dim(x, 2 + a)) is not None]
    if len(sizes) < n:
        return
    sides = zip(pads[:n], pads[n:], strict=True)
    axes = list(zip(sizes, window.kernel, window.strides, sides, window.dilations, strict=True))
    ceil = bool(node.attributes.get_int("ceil_mode", 0))
    asked, plain = ([pooled(*axis, auto_pad, ceil=c) for axis in axes] for c in (ceil, False))
    if plain == asked:
        node.attributes.pop("ceil_mode", None)
    begins, ends = zip(*(amounts for _, amounts in asked), strict=True)
    if min(*begins, *ends) < 0:
        if node.op_type == "LpPool" and max(window.dilations) > 1:
            raise fail(node, "SAME cuts the image, which windows with holes read")
    elif auto_pad.startswith("SAME"):
        node.attributes["auto_pad"] = ir.AttrString("auto_pad", "NOTSET")
        node.attributes["pads"] = ir.AttrInt64s("pads", [*begins, *ends])


def _max_pool(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, node: ir.Node) -> Tensor:
    """dy added at the flat positions that the pool reports; windows may overlap."""
    _write_pads(node, x)
    if op.fused:
        how = {k: a.value for k, a in node.attributes.items() if k != "storage_order"}
        (dx,) = op.emit("MaxPoolGrad", [dy, x], [x], **how)
        return dx
    if node.attributes.get_int("storage_order", 0):
        attributes = {k: a.value for k, a in node.attributes.items() if k != "storage_order"}
        _, indices = op.MaxPool(x, outputs=2, **attributes)
    else:
        indices = op.output(node, 1, ir.DataType.INT64, "indices")
        indices.shape = y.shape
    flat = op.constant([-1])
    zeros = op.filled(op.Reshape(op.Size(x), flat), x.dtype)
    places, rows = op.Reshape(indices, flat), op.Reshape(dy, flat)
    return op.reshape_like(op.scatter_add(zeros, places, rows, axis=0), x)


def _add_to_windows(op: Writer, node: ir.Node, dy: Tensor, x: ir.Value) -> Tensor:
    """Each output's gradient added to all of its window: ConvTranspose with ones, by channel."""
    n = known_rank(x) - 2
    spatial = list(range(2, 2 + n))
    place = _window(node, None, n)
    kernel, strides, dilations, extent, _ = place
    image, pads = _padded(op, node, x, place)
    begin = op.constant(pads[:n])
    if kernel == extent == strides:
        # Windows that tile the image: every value is repeated over its own.
        batch, channels, *size = op.sizes_of(dy)
        pairs = [(s, k) for s, k in zip(size, kernel, strict=True)]
        ones = op.reshape(dy, [batch, channels, *(v for s, _ in pairs for v in (s, 1))])
        tiles = op.Expand(ones, [1, 1, *(v for k in kernel for v in (1, k))])
        tiled = [_times(op, s, k) for s, k in pairs]
        spread = op.reshape(tiles, [batch, channels, *tiled])
    else:
        # Channels join the batch, so that one window of ones serves them all.
        batch, channels, *rest = op.sizes_of(dy)
        rows = op.reshape(dy, [_times(op, batch, channels), 1, *rest])
        window = op.constant(np.ones([1, 1, *kernel], (x.dtype or ir.DataType.FLOAT).numpy()))
        spread = op.ConvTranspose(rows, window, strides=strides, dilations=dilations)
        spread = op.Reshape(
            spread, op.vector([batch, channels, op.Shape(spread, start=2)]), allowzero=1
        )
    # Of [0, spread), the image is [begin, begin + size): padding before it, and places no window
    # reached (or that stick out) after it. A negative pad cuts.
    size = op.shape_of(image, spatial)
    after = op.Sub(op.Add(size, begin), op.Shape(spread, start=2))
    dx = op.Pad(spread, op.vector([0, 0, op.Neg(begin), 0, 0, after]))
    dx.shape = image.shape
    return _unpad(op, dx, x, image)


def _average_pool(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, node: ir.Node) -> Tensor:
    """Each dy, divided by the number of places its window counts, is added to all of the window."""
    _write_pads(node, x)
    n = known_rank(x) - 2
    place = _window(node, None, n)
    kernel, strides, dilations, extent, _ = place
    beyond = node.attributes.get_int("ceil_mode", 0) or passes_padding(node, x)
    include = node.attributes.get_int("count_include_pad", 0)
    same = text(node, "auto_pad", "NOTSET").startswith("SAME")
    if not beyond and (include or not (same or any(ints_attribute(node, "pads") or []))):
        return _add_to_windows(op, node, op.Mul(dy, 1 / math.prod(kernel)), x)
    ones = op.filled(op.Concat([1, 1], op.Shape(x, start=2), axis=0), x.dtype, 1.0)
    ones.shape = ir.Shape([1, 1, *(x.shape or ())[2:]])
    image, pads = _padded(op, node, ones, place)
    if include:  # padding counts, but not what lies beyond it
        around = op.constant([p + q for p, q in zip(pads[:n], pads[n:], strict=True)])
        padded_size = op.Add(op.Shape(image, start=2), around)
        image, pads = op.filled(op.Concat([1, 1], padded_size, axis=0), x.dtype, 1.0), [0] * 2 * n
    # an image may be smaller than the window at run time, which a Conv refuses
    beyond = beyond or None in [dim(x, 2 + a) for a in range(n)]
    if beyond:
        more = [max(s - 1, e) for s, e in zip(strides, extent, strict=True)]
        pads = [*pads[:n], *(p + m for p, m in zip(pads[n:], more, strict=True))]
    window = op.constant(np.ones([1, 1, *kernel], (x.dtype or ir.DataType.FLOAT).numpy()))
    counts = op.Conv(image, window, strides=strides, dilations=dilations, pads=pads)
    if beyond:
        ends, axes = op.Shape(dy, start=2), op.constant(list(range(2, 2 + n)))
        counts = op.Slice(counts, op.constant([0] * n), ends, axes)
    each = op.Div(dy, counts)
    each.shape = dy.shape
    return _add_to_windows(op, node, each, x)


def _lp_pool(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, node: ir.Node) -> Tensor:
    """y = (Σ |x|^p)^(1/p):  dx = sign(x) |x|^(p-1) Σ_windows dy y^(1-p)."""
    _write_pads(node, x)
    p = node.attributes.get_int("p", 2)
    if p == 1:
        return op.Mul(op.Sign(x), _add_to_windows(op, node, dy, x))
    around = _add_to_windows(op, node, _over_norm(op, dy, y, p), x)
    return op.Mul(_powered(op, x, p), around)


def _over_norm(op: Writer, dy: ir.Value, y: ir.Value, p: int) -> Tensor:
    """dy y^(1-p); dy where y is 0."""
    text = f"safe = y + CastLike(y == 0, y); dy / {'safe' if p == 2 else 'Pow(safe, n)'}"
    return op.formula(text, dy=dy, y=y, n=p - 1.0)


def _powered(op: Writer, x: ir.Value, p: int) -> Tensor:
    """sign(x) |x|^(p-1)."""
    return x if p == 2 else op.formula("x * Pow(Abs(x), n)", x=x, n=p - 2.0)


def _global_average(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    places = op.elements(x, 2)
    each = op.Div(dy, float(places) if isinstance(places, int) else op.to_like(places, dy))
    return op.Expand(each, op.shape_of(x))


def _global_max(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    text = "mask = CastLike(x == y, x); mask * (dy / ReduceSum <keepdims = 1> (mask, axes))"
    return op.formula(text, x=x, y=y, dy=dy, axes=list(range(2, known_rank(x))))


def _global_lp(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    p = n.attributes.get_int("p", 2)
    if p == 1:
        return op.Mul(dy, op.Sign(x))
    return op.Mul(_powered(op, x, p), _over_norm(op, dy, y, p))


# ---- resize ----------------------------------------------------------------------------------


def _resize(op: Writer, node: ir.Node, dys: Values) -> Values:
    """Resizing is linear, axis by axis. The matrix of an axis is the resized identity."""
    (x, _, scales, sizes), dy = arguments(node, 4), dys[0]
    y = node.outputs[0]
    mode = text(node, "mode", "nearest")
    transform = text(node, "coordinate_transformation_mode", "half_pixel")
    if text(node, "keep_aspect_ratio_policy", "stretch") != "stretch":
        raise fail(node, "keep_aspect_ratio_policy is not 'stretch'")
    if transform == "tf_crop_and_resize":
        raise fail(node, "coordinate_transformation_mode is 'tf_crop_and_resize'")
    n = known_rank(x)
    axes = [a % n for a in ints_attribute(node, "axes", list(range(n))) or []]
    factors = const_array(scales)
    whole_repeats = _repeats(node, x, axes, factors, static_ints(sizes), mode, transform)
    if whole_repeats is not None:
        split: list[Any] = []
        summed: list[int] = []
        for size, repeats in zip(op.sizes_of(x), whole_repeats, strict=True):
            split.append(size)
            if repeats != 1:
                summed.append(len(split))
                split.append(repeats)
        if not summed:
            return [dy]
        return [op.ReduceSum(op.reshape(dy, split), op.constant(summed), keepdims=0)]
    keep = {
        k: a.value
        for k, a in node.attributes.items()
        if k not in ("axes", "keep_aspect_ratio_policy", "extrapolation_value")
    }
    for i, axis in enumerate(axes):
        if factors is not None and float(factors.reshape(-1)[i]) == 1.0:
            continue
        if sizes is not None and dim(x, axis) is not None and dim(x, axis) == dim(y, axis):
            continue
        size = op.shape_of(x, [axis])
        eye = op.EyeLike(op.filled(op.Concat(size, size, axis=0), x.dtype))
        last = axis == n - 1
        # [out, in] for the last axis (dy · M), [in, out] for the others (M · dy)
        if sizes is not None:
            target = op.Slice(sizes, [i], [i + 1], [0])
            pair = [target, size] if last else [size, target]
            matrix = op.Resize(eye, None, None, op.Concat(*pair, axis=0), **keep)
        else:
            factor = op.Slice(scales, [i], [i + 1], [0])
            one = op.constant(np.ones(1, np.float32))
            pair = [factor, one] if last else [one, factor]
            if factors is not None and not 1 < factors.reshape(-1)[i] < 2:
                matrix = op.Resize(eye, None, op.Concat(*pair, axis=0), **keep)
            else:
                matrix = _slightly_larger(op, eye, x, y, factor, keep)
                matrix = op.Transpose(matrix, perm=[1, 0]) if last else matrix
        if last:
            dy = op.MatMul(dy, matrix)
            continue
        if axis == n - 2:
            dy = op.MatMul(matrix, dy)
            continue
        before, after = op.sizes_of(dy)[:axis], op.sizes_of(dy)[axis + 1 :]
        rows = op.Shape(dy, start=axis, end=axis + 1)
        flat = op.reshape(dy, [*before, rows, op.elements(dy, axis + 1)])
        dy = op.reshape(op.MatMul(matrix, flat), [*before, size, *after])
    return [dy]


def _slightly_larger(
    op: Writer, eye: Tensor, x: ir.Value, y: ir.Value, factor: Tensor, keep: dict[str, Any]
) -> Tensor:
    """The matrix [in, out] of an axis, whose size may stay the same where another one changes.

    onnxruntime copies what keeps all of its sizes, so that an axis of 1 grows where x does.
    """
    differs = op.Cast(op.Not(op.Equal(op.Shape(x), op.Shape(y))), to=ir.DataType.FLOAT)
    one = op.constant(np.ones(1, np.float32))
    scales = op.Concat(one, one, factor, op.Add(one, op.ReduceMax(differs)), axis=0)
    columns = op.Resize(op.Unsqueeze(eye, [0, 3]), None, scales, **keep)
    return op.Squeeze(op.Slice(columns, [0], [1], [3]), [0, 3])


def _repeats(
    node: ir.Node, x: ir.Value, axes: list[int], factors: np.ndarray | None,
    sizes: list[int] | None, mode: str, transform: str,
) -> list[int] | None:  # fmt: skip
    """How often each axis repeats its entries, where nearest-neighbour resizing does just that."""
    rounding = text(node, "nearest_mode", "round_prefer_floor")
    if mode != "nearest" or (transform, rounding) not in (
        ("half_pixel", "round_prefer_floor"),
        ("half_pixel", "round_prefer_ceil"),
        ("half_pixel_symmetric", "round_prefer_floor"),
        ("asymmetric", "floor"),
    ):
        return None
    repeats = [1] * known_rank(x)
    for i, axis in enumerate(axes):
        if factors is not None:
            factor = float(factors.reshape(-1)[i])
        elif sizes is not None and dim(x, axis):
            factor = sizes[i] / (dim(x, axis) or 1)
        else:
            return None
        if factor != int(factor) or factor < 1:
            return None
        repeats[axis] = int(factor)
    return repeats


# ---- sampling --------------------------------------------------------------------------------


def _grid_sample(op: Writer, node: ir.Node, dys: Values) -> Values:
    """Each output mixes four pixels (or takes one): their weights spread dy back, and the slopes of
    the weights give the grid's gradient. Images [N, C, H, W], grid [N, P, Q, 2] of (x, y).
    """
    (x, grid), dy = arguments(node, 2), dys[0]
    mode = {"bilinear": "linear"}.get(name := text(node, "mode", "linear"), name)
    padding = text(node, "padding_mode", "zeros")
    supported = mode in ("linear", "nearest") and padding in ("zeros", "border")
    if known_rank(x) != 4 or not supported:
        raise fail(node, f"mode '{mode}' and padding '{padding}' on rank {known_rank(x)}")
    batch, channels, height, width = (op.Shape(x, start=a, end=a + 1) for a in range(4))
    planes = op.Concat(batch, channels, [-1], axis=0)
    flat, rows = (op.Reshape(v, planes, allowzero=1) for v in (x, dy))
    # [-1, 1] spans the centres of the border pixels, or their outer edges
    formula = f"""extent = CastLike(size, x); last = extent - 1
    slope = {"last" if node.attributes.get_int("align_corners", 0) else "extent"} * 0.5
    place = g * slope + last * 0.5\n"""
    if padding == "border":
        formula += """slope = CastLike(And(place > 0, place < last), x) * slope
        place = Max(Min(place, last), 0)\n"""
    points = op.Reshape(grid, [0, -1, 2])
    if mode == "nearest":
        formula += "low = Round(place); low, low, slope, last"
    else:
        formula += "low = Floor(place); low, place - low, slope, last"
    axes = []
    for index, size in enumerate((width, height)):
        g = op.Gather(points, op.constant(np.int64(index)), axis=2)
        axes.append(op.formula(formula, g=g, size=size, x=x))
    (x_low, x_rest, x_slope, x_last), (y_low, y_rest, y_slope, y_last) = axes
    dx = op.zeros_like(flat)
    sums: list[Any] = [None, None]
    ends = (0,) if mode == "nearest" else (0, 1)
    for i, j in product(ends, ends):
        spots, valid = op.formula(
            """inside = And(And(column >= 0, column <= x_last), And(line >= 0, line <= y_last))
            valid = CastLike(inside, x); spot = (line * (x_last + 1) + column) * valid
            Expand(Unsqueeze(Cast <to = 7> (spot), [1]), shape), valid""",
            column=op.Add(x_low, 1.0) if i else x_low, line=op.Add(y_low, 1.0) if j else y_low,
            x_last=x_last, y_last=y_last, x=x, shape=op.Shape(rows),
        )  # fmt: skip
        if mode == "nearest":
            share = op.formula("rows * Unsqueeze(valid, [1])", rows=rows, valid=valid)
            dx = op.scatter_add(dx, spots, share, axis=2)
            continue
        wx, wy = (r if k else op.Sub(1.0, r) for r, k in ((x_rest, i), (y_rest, j)))
        # pull = Σ_c dy v, the change of the loss with this pixel's weight
        share, pull = op.formula(
            """values = GatherElements <axis = 2> (flat, spots)
            pull = ReduceSum <keepdims = 0> (rows * values, [1]) * valid
            rows * Unsqueeze(wx * wy * valid, [1]), pull""",
            rows=rows, flat=flat, spots=spots, valid=valid, wx=wx, wy=wy,
        )  # fmt: skip
        dx = op.scatter_add(dx, spots, share, axis=2)
        for axis, other, sign in ((0, wy, i), (1, wx, j)):
            term = op.Mul(pull, other)
            total = sums[axis]
            if total is None:
                sums[axis] = term if sign else op.Neg(term)
            else:
                sums[axis] = op.Add(total, term) if sign else op.Sub(total, term)
    dx = op.reshape_like(dx, x)
    if mode == "nearest":
        return [dx, op.zeros_like(grid)]
    slopes = x_slope, y_slope
    parts = [op.Unsqueeze(op.Mul(s, k), [-1]) for s, k in zip(sums, slopes, strict=True)]
    return [dx, op.reshape_like(op.Concat(*parts, axis=-1), grid)]


CONV: dict[str, Unary] = {
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalAveragePool": _global_average,
    "GlobalMaxPool": _global_max,
    "GlobalLpPool": _global_lp,
}
table(CONV)
register(
    OpDef("Conv", grad=conv_grad),
    OpDef("ConvTranspose", grad=_conv_transpose),
    OpDef("Resize", grad=_resize),
    OpDef("GridSample", grad=_grid_sample),
)

"""The gradients of convolutions and pools that are operators of their own, for kernels to serve.

ConvWeightGrad (dy [N, M, *outer], x [N, C, *inner]) -> dw [M, C / group, *kernel_shape] is the
gradient of Conv's weight, MaxPoolGrad and AveragePoolGrad (dy, x) -> dx that of a pool's image.
"""

from __future__ import annotations

from onnx_fuse.ops.opdef import fused_op, register

# A convolution of x with dy: batch and channels change places, as do strides and dilations. Each
# group sees images of its own. `swap` is the exchange of the first two axes.
_WEIGHT = """
    one = [1]
    groups = Reshape (Constant <value_int: int = @group> (), one)
    xt = Transpose <perm: ints = @swap> (x)
    channels = Shape <start: int = 0, end: int = 1> (xt)
    batch = Shape <start: int = 1, end: int = 2> (xt)
    spatial = Shape <start: int = 2> (xt)
    each = channels / groups
    length = batch * ReduceProd <keepdims: int = 1> (spatial)
    x3 = Reshape <allowzero: int = 1> (xt, Concat <axis: int = 0> (groups, each, length))
    x3t = Transpose <perm: ints = [1, 0, 2]> (x3)
    shape = Concat <axis: int = 0> (each, groups * batch, spatial)
    images = Reshape <allowzero: int = 1> (x3t, shape)
    taps = Transpose <perm: ints = @swap> (dy)
    full = Conv <strides: ints = @dilations, dilations: ints = @strides, pads: ints = @pads,
        group: int = @group> (images, taps)
    ends = Constant <value_ints: ints = @kernel_shape> ()
    starts = ends - ends
    size = Size (ends)
    two = Constant <value_int: int = 2> ()
    step = Constant <value_int: int = 1> ()
    cut = Slice (full, starts, ends, Range (two, size + two, step))
    dw = Transpose <perm: ints = @swap> (cut)
"""

_HOW = (
    "kernel_shape: ints = @kernel_shape, strides: ints = @strides, pads: ints = @pads, "
    "dilations: ints = @dilations, auto_pad: string = @auto_pad, ceil_mode: int = @ceil_mode"
)

# dy added at the positions that the pool reports, the first of equal maxima.
_MAX_POOL = f"""
    y, indices = MaxPool <{_HOW}> (x)
    flat = [-1]
    zero = CastLike (Constant <value_float: float = 0.0> (), x)
    zeros = Expand (zero, Reshape (Size (x), flat))
    places = Reshape (indices, flat)
    updates = Reshape (dy, flat)
    sums = ScatterElements <axis: int = 0, reduction: string = "add"> (zeros, places, updates)
    dx = Reshape <allowzero: int = 1> (sums, Shape (x))
"""

_OF_CONV = ["kernel_shape", "strides", "dilations", "pads", "group", "swap"]
_OF_POOL = ["kernel_shape", "strides", "pads", "dilations", "auto_pad", "ceil_mode"]
register(
    fused_op("ConvWeightGrad", _OF_CONV, "dy, x", "dw", _WEIGHT),
    fused_op("MaxPoolGrad", _OF_POOL, "dy, x", "dx", _MAX_POOL),
)

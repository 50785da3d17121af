"""Images in memory as [batch, *spatial, channels], with views as [batch, channels, *spatial].

A convolution in 16 bits writes this layout, and pointwise operators, pools, Resize, Concat and Pad
keep it where they can. `ctx.dense` copies to NCHW.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from onnx_fuse.lower.context import Context
from onnx_fuse.program.call import Tensor, dense_strides


def channels_last(tensor: Tensor) -> Tensor:
    """The tensor with its channels as the last axis."""
    return tensor.permute((0, *range(2, len(tensor.shape)), 1))


def channels_second(images: Tensor) -> Tensor:
    """A view of channels-last images as everyone sees them."""
    rank = len(images.shape)
    return images.permute((0, rank - 1, *range(1, rank - 1)))


def is_channels_last(tensor: Tensor) -> bool:
    """Whether the tensor is dense once its channels are the last axis, and not as it stands."""
    return len(tensor.shape) > 2 and not tensor.dense and channels_last(tensor).dense


def stored_last(ctx: Context, node: ir.Node, y: Tensor) -> Tensor:
    """Make `y`, the node's new dense output 0, channels last, and return that view of it."""
    batch, channels, *spatial = y.shape
    shape = (batch, *spatial, channels)
    last = channels_second(replace(y, shape=shape, strides=dense_strides(shape)))
    ctx.alias(node, 0, last)
    ctx.channels_last.add(y.buffer)
    return last


def in_stretch(ctx: Context, x: Tensor) -> bool:
    """Whether a convolution's stretch has made x channels last; what a Transpose makes is not."""
    return x.buffer in ctx.channels_last and is_channels_last(x)


def follow(ctx: Context, node: ir.Node, y: Tensor, reads: Sequence[Tensor]) -> Tensor:
    """Make output 0 in the memory order of the node's operands, and return the view to write.

    It is channels last where an operand of the same rank is. If the graph has channels-last
    convolutions, images that a Transpose made of pixels count as such operands.
    """
    rank = len(y.shape)
    images = [x for x in reads if len(x.shape) == rank]
    largest = max((x.size for x in images), default=0)
    for x in (x for x in images if x.size == largest):
        if in_stretch(ctx, x) or (rank == 4 and ctx.channels_last and is_channels_last(x)):
            return stored_last(ctx, node, y)
    return y

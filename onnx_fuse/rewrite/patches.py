"""A convolution over patches of the model's input, as a product of the patches with its weight.

Vision transformers begin with a Conv whose steps are as long as its kernel is. Its patches do not
overlap, so that a Reshape and a Transpose bring each of them into a row, and both the Conv and the
gradient of its weight are one product of these rows.
"""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, dim, given, rank
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.rewrite.canonicalize import rewrite_each

MOST_CHANNELS = 4
"""Channels up to which the kernels of convolutions, made for 8 and more, leave most lanes idle."""
LEAST_WIDTH = 16
"""Elements of a patch from which a product of them is worth its copy."""


def patches_as_products(model: ir.Model) -> int:
    """Write each such Conv of the main graph as a product, in place; returns how many there were.

    It must read an input of the graph, whose gradient nobody asks for, with known channels and
    sizes that are whole numbers of patches. Padded, dilated and grouped ones stay.
    """
    return rewrite_each(model, "Conv", _as_product)


def _as_product(graph: ir.Graph, node: ir.Node) -> bool:
    x, w, bias = node.inputs[0], node.inputs[1], given(node, 2)
    if x is None or w is None or not x.is_graph_input() or not w.is_initializer():
        return False
    axes = (rank(w) or 0) - 2
    filters, *sizes = (dim(w, i) for i in range(axes + 2))
    image = [dim(x, i) for i in range(1, axes + 2)]
    if axes < 1 or filters is None or None in sizes or None in image or rank(x) != axes + 2:
        return False
    channels, *kernel = (size for size in sizes if size is not None)
    shape = [size for size in image if size is not None]
    if image[0] != channels or channels > MOST_CHANNELS or prod(kernel) * channels < LEAST_WIDTH:
        return False
    attributes = node.attributes
    plain = attributes.get_int("group", 1) == 1 and not any(attributes.get_ints("pads", ()))
    plain = plain and all(step == 1 for step in attributes.get_ints("dilations", ()))
    plain = plain and attributes.get_string("auto_pad", "NOTSET") in ("NOTSET", "VALID")
    apart = list(attributes.get_ints("strides", [1] * axes)) == kernel
    if not plain or not apart or any(s % k for s, k in zip(shape[1:], kernel, strict=True)):
        return False
    counts = [size // k for size, k in zip(shape[1:], kernel, strict=True)]
    op, width = Builder(), channels * prod(kernel)
    split = [0, channels, *(n for pair in zip(counts, kernel, strict=True) for n in pair)]
    order = [0, *range(2, 2 * axes + 2, 2), 1, *range(3, 2 * axes + 2, 2)]
    tiles = op.Transpose(op.Reshape(x, op.constant(split)), perm=order)
    rows = op.Reshape(tiles, [0, prod(counts), width])
    columns = op.Transpose(op.Reshape(w, [filters, width]), perm=[1, 0])
    product = op.MatMul(rows, columns)
    if bias is not None:
        product = op.Add(product, bias)
    y = op.Reshape(op.Transpose(product, perm=[0, 2, 1]), [0, filters, *counts])
    replace_node(node, op.nodes, [y], named=False)
    return True

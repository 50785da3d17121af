"""Operators that the standard has too, in another form: old ones of com.microsoft, NHWC ones."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_fuse.importer.contrib.table import (
    Body,
    Results,
    Unwritable,
    attr,
    contrib,
    known_ints,
    known_rank,
    needed,
    wants,
)
from onnx_fuse.ir.build import given, rank


@contrib("GatherND", recognized=False)
def gather_nd(op: Body, node: ir.Node) -> Results:
    indices = op.Cast(needed(node, 1), to=ir.DataType.INT64)
    return [op.GatherND(needed(node, 0), indices)]


@contrib("Pad", recognized=False)
def pad(op: Body, node: ir.Node) -> Results:
    data, pads, value = needed(node, 0), needed(node, 1), given(node, 2)
    pads = op.Reshape(pads, op.ints(-1))
    if value is not None and rank(value) != 0:
        value = op.Reshape(value, op.constant(np.zeros(0, np.int64)))
    return [op.node("Pad", [data, pads, value], attributes={"mode": attr(node, "mode")})]


@contrib("Unique", recognized=False)
def unique(op: Body, node: ir.Node) -> Results:
    """The values of a vector in the order of first appearance, their places in x, and counts."""
    y, first, inverse, counts = op.Unique(needed(node, 0), outputs=4, sorted=0)
    first.dtype = inverse.dtype = counts.dtype = ir.DataType.INT64
    return [y, inverse, counts]


@contrib("Trilu", recognized=False)
def trilu(op: Body, node: ir.Node) -> Results:
    k = given(node, 1)
    return [op.node("Trilu", [needed(node, 0), k], attributes={"upper": attr(node, "upper")})]


@contrib("Range", recognized=False)
def range_(op: Body, node: ir.Node) -> Results:
    start, limit, delta = needed(node, 0), needed(node, 1), given(node, 2)
    step = op.number(1, start) if delta is None else delta
    none = op.constant(np.zeros(0, np.int64))
    scalars = (v if rank(v) == 0 else op.Reshape(v, none) for v in (start, limit, step))
    return [op.Range(*scalars)]


@contrib("ExpandDims", recognized=False)
def expand_dims(op: Body, node: ir.Node) -> Results:
    axis, numbers = needed(node, 1), known_ints(given(node, 1))
    if numbers is None:
        axis = op.Cast(op.Reshape(axis, op.ints(1)), to=ir.DataType.INT64)
    return [op.Unsqueeze(needed(node, 0), axis if numbers is None else op.ints(*numbers))]


@contrib("CDist", recognized=False)
def cdist(op: Body, node: ir.Node) -> Results:
    """Distances of the rows of A and B: |a|² - 2 a·b + |b|², at least 0, or its root."""
    a, b = needed(node, 0), needed(node, 1)
    squares = [op.ReduceSum(op.Mul(x, x), op.ints(1), keepdims=1) for x in (a, b)]
    product = op.MatMul(a, op.Transpose(b, perm=[1, 0]))
    two, zero = op.number(2.0, a), op.number(0.0, a)
    total = op.Add(squares[0], op.Transpose(squares[1], perm=[1, 0]))
    y = op.Max(op.Sub(total, op.Mul(product, two)), zero)
    return [op.Sqrt(y) if attr(node, "metric", "sqeuclidean") == "euclidean" else y]


@contrib("GridSample", recognized=False)
def grid_sample(op: Body, node: ir.Node) -> Results:
    """ai.onnx's, whose modes have other names."""
    modes = {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"}
    mode = attr(node, "mode", "bilinear")
    if mode not in modes:
        raise Unwritable(f"its mode '{mode}' is not known")
    taken = {name: attr(node, name) for name in ("align_corners", "padding_mode")}
    operands = [needed(node, 0), needed(node, 1)]
    return [op.node("GridSample", operands, attributes={**taken, "mode": modes[mode]})]


# ---- GroupNorm, channels last or first -------------------------------------------------------


def _group_norm(op: Body, node: ir.Node, x: ir.Value) -> ir.Value:
    """The norm of each group of channels, then SiLU where the node asks for it."""
    last, size = attr(node, "channels_last", 1), known_rank(needed(node, 0), "X")
    if last:
        x = op.channels_first(x, size)
    gamma, beta = (op.cast_like(needed(node, i), x) for i in (1, 2))
    epsilon = attr(node, "epsilon", 1e-5)
    groups = attr(node, "groups")
    y = op.GroupNormalization(x, gamma, beta, epsilon=epsilon, num_groups=groups)
    if attr(node, "activation", 0):
        y = op.Mul(y, op.Sigmoid(y))
    return op.channels_last(y, size) if last else y


@contrib("GroupNorm")
def group_norm(op: Body, node: ir.Node) -> Results:
    return [_group_norm(op, node, needed(node, 0))]


@contrib("SkipGroupNorm")
def skip_group_norm(op: Body, node: ir.Node) -> Results:
    x, skip, bias = needed(node, 0), needed(node, 3), given(node, 4)
    if attr(node, "channels_last", 1) == 0:
        raise Unwritable("its skip has channels first")
    if known_rank(skip, "skip") == 2:
        skip = op.Unsqueeze(skip, op.ints(1, 2))
    total = op.Add(x, skip)
    if bias is not None:
        total = op.Add(total, bias)
    return [_group_norm(op, node, total), total if wants(node, 1) else None]

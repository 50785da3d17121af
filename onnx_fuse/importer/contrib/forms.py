"""Operators that the standard has too, in another form: old ones of com.microsoft, NHWC ones."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.importer.contrib.table import (
    Body,
    Input,
    Results,
    Unwritable,
    contrib,
    known_ints,
    known_rank,
)
from onnx_fuse.ir.build import rank


@contrib("GatherND", recognized=False)
def gather_nd(op: Body, x: ir.Value, indices: ir.Value) -> Results:
    return op.GatherND(x, op.Cast(indices, to=ir.DataType.INT64))


@contrib("Pad", recognized=False)
def pad(op: Body, x: ir.Value, pads: ir.Value, value: Input) -> Results:
    pads = op.Reshape(pads, [-1])
    if value is not None and rank(value) != 0:
        value = op.Reshape(value, [])
    return op.like("Pad", [x, pads, value], "mode")


@contrib("Unique", recognized=False)
def unique(op: Body, x: ir.Value) -> Results:
    """The values of a vector in the order of first appearance, their places in x, and counts."""
    y, first, inverse, counts = op.Unique(x, outputs=4, sorted=0)
    first.dtype = inverse.dtype = counts.dtype = ir.DataType.INT64
    return [y, inverse, counts]


@contrib("Trilu", recognized=False)
def trilu(op: Body, x: ir.Value, k: Input) -> Results:
    return op.like("Trilu", [x, k], "upper")


@contrib("Range", recognized=False)
def range_(op: Body, start: ir.Value, limit: ir.Value, delta: Input) -> Results:
    step = op.number(1, start) if delta is None else delta
    return op.Range(*(v if rank(v) == 0 else op.Reshape(v, []) for v in (start, limit, step)))


@contrib("ExpandDims", recognized=False)
def expand_dims(op: Body, x: ir.Value, axis: ir.Value) -> Results:
    numbers = known_ints(axis)
    if numbers is not None:
        return op.Unsqueeze(x, [*numbers])
    return op.Unsqueeze(x, op.Cast(op.Reshape(axis, [1]), to=ir.DataType.INT64))


@contrib("CDist", recognized=False)
def cdist(op: Body, a: ir.Value, b: ir.Value) -> Results:
    """Distances of the rows of A and B: |a|² - 2 a·b + |b|², at least 0, or its root."""
    y = op.formula(
        """aa = ReduceSum <keepdims = 1> (a * a, [1]); bb = ReduceSum <keepdims = 1> (b * b, [1])
        product = MatMul(a, Transpose <perm = [1, 0]> (b))
        Max(aa + Transpose <perm = [1, 0]> (bb) - product * 2, 0)""",
        a=a,
        b=b,
    )
    return op.Sqrt(y) if op.attr("metric", "sqeuclidean") == "euclidean" else y


@contrib("GridSample", recognized=False)
def grid_sample(op: Body, x: ir.Value, grid: ir.Value) -> Results:
    """ai.onnx's, whose modes have other names."""
    modes = {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"}
    mode = op.attr("mode", "bilinear")
    if mode not in modes:
        raise Unwritable(f"its mode '{mode}' is not known")
    return op.like("GridSample", [x, grid], "align_corners padding_mode", mode=modes[mode])


# ---- GroupNorm, channels last or first -------------------------------------------------------


@contrib("GroupNorm")
def group_norm(op: Body, x: ir.Value, gamma: ir.Value, beta: ir.Value) -> ir.Value:
    """The norm of each group of channels, then SiLU where the node asks for it."""
    last, size = op.attr("channels_last", 1), known_rank(op.needed(0), "X")
    if last:
        x = op.channels_first(x, size)
    epsilon, groups = op.attr("epsilon", 1e-5), op.attr("groups")
    affine = op.to_like(gamma, x), op.to_like(beta, x)
    y: ir.Value = op.GroupNormalization(x, *affine, epsilon=epsilon, num_groups=groups)
    if op.attr("activation", 0):
        y = op.Mul(y, op.Sigmoid(y))
    return op.channels_last(y, size) if last else y


@contrib("SkipGroupNorm")
def skip_group_norm(
    op: Body, x: ir.Value, gamma: ir.Value, beta: ir.Value, skip: ir.Value, bias: Input
) -> Results:
    if op.attr("channels_last", 1) == 0:
        raise Unwritable("its skip has channels first")
    if known_rank(skip, "skip") == 2:
        skip = op.Unsqueeze(skip, [1, 2])
    total = op.plus(op.Add(x, skip), bias)
    return [group_norm(op, total, gamma, beta), total if op.wants(1) else None]

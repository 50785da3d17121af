"""Reductions, softmax, cumulative sums, argmax."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import dim, given
from onnx_fuse.ops.opdef import OpDef, Unary, no_grad, register, table
from onnx_fuse.ops.rules import nan_guard
from onnx_fuse.ops.shape_ops import (
    Tensor,
    Values,
    Writer,
    arguments,
    fail,
    ints_attribute,
    known_rank,
    norm_axis,
    static_ints,
)


def axes_of(node: ir.Node) -> list[int] | None:
    """The reduced axes, all of them where none are named; None where they are not known."""
    x, named = node.inputs[0], given(node, 1)
    axes = ints_attribute(node, "axes", []) if named is None else static_ints(named)
    if axes == [] and x is not None and x.shape is not None:
        return list(range(known_rank(x)))
    return axes


def _keep(op: Writer, value: ir.Value, x: ir.Value, node: ir.Node) -> Tensor:
    """A reduced value (dy, y) with its reduced axes put back as ones."""
    if node.attributes.get_int("keepdims", 1) or _is_noop(node):
        return value
    axes = axes_of(node)
    if axes is None:
        return op.Unsqueeze(value, node.inputs[1])
    return op.Unsqueeze(value, op.constant(axes)) if axes else value


def _is_noop(node: ir.Node) -> bool:
    axes = given(node, 1)
    return bool(node.attributes.get_int("noop_with_empty_axes", 0)) and (
        axes is None or static_ints(axes) == []
    )


def _full(op: Writer, g: ir.Value, x: ir.Value) -> Tensor:
    return op.Expand(g, op.shape_of(x))


def _mean(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    if _is_noop(n):
        return dy
    axes = axes_of(n)
    sizes = [dim(x, a) for a in axes] if axes is not None and x.shape is not None else [None]
    count = 1
    for size in sizes:
        count *= size or 0
    dy = op.Mul(dy, 1 / count) if count else op.Div(dy, op.to_like(op.ratio(x, y), dy))
    return _full(op, _keep(op, dy, x, n), x)


def _reduction(rule: str, alone: str = "dy") -> Unary:
    """A rule in which `dy` and `y` have the reduced axes as ones; `axes` are those of the node.

    `alone` is the rule where nothing is reduced; `kept` stands for the attributes of a reduction
    over the same axes, which may turn out to be none.
    """

    def grad(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
        if _is_noop(n):
            return op.formula(alone, x=x, dy=dy)
        axes = n.inputs[1] if given(n, 1) is not None else None
        noop = n.attributes.get_int("noop_with_empty_axes", 0)
        attributes = "keepdims = 1" + ", noop_with_empty_axes = 1" * noop
        reduced = {"y": _keep(op, y, x, n), "dy": _keep(op, dy, x, n)}
        return op.formula(rule.replace("kept", attributes), x=x, axes=axes, **reduced)

    return grad


def _log_sum(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    if _is_noop(n):
        return op.Div(dy, x)
    return _full(op, op.Div(_keep(op, dy, x, n), op.Exp(_keep(op, y, x, n))), x)


def _softmax(rule: str) -> Unary:
    def grad(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
        guard = nan_guard(y)  # y would make NaN of its gradient, which is 0 where y is NaN
        if guard is not None:  # one in a branch is not known behind the branch
            beside = guard.graph is y.graph
            y = guard.outputs[0] if beside else op.formula("Where(IsNaN(y), 0, y)", y=y)
        return op.formula(rule, y=y, dy=dy, axis=[n.attributes.get_int("axis", -1)])

    return grad


def _cumsum(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    reverse = n.attributes.get_int("reverse", 0)
    exclusive = n.attributes.get_int("exclusive", 0)
    return op.CumSum(dy, n.inputs[1], reverse=1 - reverse, exclusive=exclusive)


def _dft(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    """y = F x over pairs of real and imaginary part: dx = F* dy = N F⁻¹ dy, and F dy / N for F⁻¹.

    F is symmetric, of all N elements; of a real x the imaginary part has no gradient.
    """
    axis = static_ints(given(n, 2)) if given(n, 2) is not None else [-2]
    if axis is None or given(n, 1) is not None or n.attributes.get_int("onesided", 0) != 0:
        raise fail(n, "it has a length, is onesided, or its axis is not constant")
    inverse = n.attributes.get_int("inverse", 0)
    dx = op.node("DFT", [dy, *n.inputs[1:]], inverse=1 - inverse)
    size = op.to_like(op.Gather(op.shape_of(x), op.constant(axis[0])), dy)
    dx = op.Div(dx, size) if inverse else op.Mul(dx, size)
    return op.Slice(dx, [0], [1], [-1]) if dim(x, -1) == 1 else dx


def _stft(op: Writer, node: ir.Node, dys: Values) -> Values:
    """y[b, f, k] = Σ_n x[b, f·step + n] w[n] (cos(2πkn/N), -sin(2πkn/N)) of a real signal x.

    So y is a convolution with a filter for each part of each k, and dx a transposed one.
    """
    (x, step, window, length), dy = arguments(node, 4), dys[0]
    every, given_size = static_ints(step), static_ints(length)
    size = given_size[0] if given_size else dim(window, 0) if window is not None else None
    if not every or not size:
        raise fail(node, "its step or the length of its frames is not constant")
    if known_rank(x) == 3 and dim(x, 2) != 1:
        raise fail(node, "its signal is complex, or may be")
    bins = size // 2 + 1 if node.attributes.get_int("onesided", 1) else size
    angles = 2 * np.pi * np.outer(np.arange(bins), np.arange(size)) / size
    filters = np.stack([np.cos(angles), -np.sin(angles)], 1).reshape(2 * bins, 1, size)
    basis = op.to_like(op.constant(filters), x)
    columns = op.Reshape(dy, [0, 0, 2 * bins])
    weighted = basis if window is None else op.Mul(basis, window)
    dx = op.ConvTranspose(op.Transpose(columns, perm=[0, 2, 1]), weighted, strides=every)
    ends = op.Sub(op.Shape(x, start=1, end=2), op.Shape(dx, start=2, end=3))
    dx = op.Pad(dx, op.Concat(op.constant([0] * 5), ends, axis=0))
    dwindow = None
    if window is not None:
        starts = op.Mul(op.counted(op.size_of(dy, 1)), step)
        places = op.Add(op.Unsqueeze(starts, [1]), op.constant(np.arange(size)))
        flat = op.Squeeze(x, [2]) if known_rank(x) == 3 else x
        frames = op.Gather(flat, places, axis=1)
        dframes = op.MatMul(columns, op.Squeeze(basis, [1]))
        dwindow = op.ReduceSum(op.Mul(frames, dframes), [0, 1], keepdims=0)
    return [op.reshape_like(dx, x), None, dwindow]


def _lp_normalization(op: Writer, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    """y = x / |x|_p:  dx = (dy - d|x|/dx · Σ dy y) / |x|, where d|x|/dx is y (p = 2) or sign(x)."""
    two = n.attributes.get_int("p", 2) == 2
    norm, slope = ("ReduceL2", "y") if two else ("ReduceL1", "Sign(x)")
    formula = f"""norm = {norm} <keepdims = 1> (x, axis); safe = norm + CastLike(norm == 0, x)
    (dy - {slope} * ReduceSum <keepdims = 1> (dy * y, axis)) / safe"""
    return op.formula(
        formula, x=x, y=y, dy=dy, axis=[norm_axis(n.attributes.get_int("axis", -1), x)]
    )


REDUCE: dict[str, Unary] = {
    "ReduceSum": lambda op, dy, x, y, n: dy if _is_noop(n) else _full(op, _keep(op, dy, x, n), x),
    "ReduceMean": _mean,
    # ties share the gradient evenly
    **dict.fromkeys(
        ("ReduceMax", "ReduceMin"),
        _reduction("t = CastLike(x == y, x); t * (dy / ReduceSum <kept> (t, axes))"),
    ),
    # The product of the others is y/x without zeros; with one zero, it alone gets the rest. Those
    # of an entry hold (zeros - its own) zeros: `rest / safe` is their product if that is none.
    "ReduceProd": _reduction(
        """zero = CastLike(x == 0, x); zeros = ReduceSum <kept> (zero, axes)
        safe = x + zero; rest = ReduceProd <kept> (safe, axes)
        dy * CastLike(zeros - zero == 0, x) * (rest / safe)"""
    ),
    "ReduceL1": _reduction("dy * Sign(x)", "dy * Sign(x)"),
    # 0 at the origin, as PyTorch has it
    "ReduceL2": _reduction("x * (dy / (y + CastLike(y == 0, x)))", "dy * Sign(x)"),
    "ReduceSumSquare": _reduction("dy * (x + x)", "dy * (x + x)"),
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": _reduction("dy * Exp(x - y)"),
    "Softmax": _softmax("y * (dy - ReduceSum <keepdims = 1> (dy * y, axis))"),
    "LogSoftmax": _softmax("dy - Exp(y) * ReduceSum <keepdims = 1> (dy, axis)"),
    "CumSum": _cumsum,
    "DFT": _dft,
    "LpNormalization": _lp_normalization,
}
table(REDUCE)
register(OpDef("STFT", grad=_stft))
no_grad("it returns positions", "ArgMax", "ArgMin", "NonZero", "NonMaxSuppression")

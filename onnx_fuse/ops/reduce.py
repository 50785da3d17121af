"""Reductions, softmax, cumulative sums, argmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import dim, given
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.shape_ops import (
    Tensor,
    Unary,
    Values,
    arguments,
    fail,
    ints_attribute,
    known_rank,
    no_grad,
    norm_axis,
    ratio,
    reshape_like,
    shape_of,
    static_ints,
    table,
    to_like,
)


def axes_of(node: ir.Node) -> list[int] | None:
    """The reduced axes, all of them where none are named; None where they are not known."""
    x, named = node.inputs[0], given(node, 1)
    axes = ints_attribute(node, "axes", []) if named is None else static_ints(named)
    if axes == [] and x is not None and x.shape is not None:
        return list(range(known_rank(x)))
    return axes


def _keep(op: Any, value: ir.Value, x: ir.Value, node: ir.Node) -> Tensor:
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


def _full(op: Any, g: ir.Value, x: ir.Value) -> Tensor:
    return op.Expand(g, shape_of(op, x))


def _mean(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    if _is_noop(n):
        return dy
    axes = axes_of(n)
    sizes = [dim(x, a) for a in axes] if axes is not None and x.shape is not None else [None]
    count = 1
    for size in sizes:
        count *= size or 0
    dy = op.Mul(dy, 1 / count) if count else op.Div(dy, to_like(op, ratio(op, x, y), dy))
    return _full(op, _keep(op, dy, x, n), x)


def _extremum(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    """Ties share the gradient evenly."""
    if _is_noop(n):
        return dy
    mask = to_like(op, op.Equal(x, _keep(op, y, x, n)), x)
    axes = n.inputs[1] if given(n, 1) is not None else None
    count = op.ReduceSum(mask, axes, keepdims=1)
    return op.Mul(mask, op.Div(_keep(op, dy, x, n), count))


def _prod(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    """dy · (product of the others): y/x without zeros; with one zero, it alone gets the rest."""
    if _is_noop(n):
        return dy
    axes = n.inputs[1] if given(n, 1) is not None else None
    is_zero = op.Equal(x, 0.0)
    zero = to_like(op, is_zero, x)
    zeros = op.ReduceSum(zero, axes, keepdims=1)
    safe = op.Add(x, zero)
    rest = op.ReduceProd(safe, axes, keepdims=1)
    # an entry's others hold (zeros - its own) zeros: their product is `rest / safe` if that is none
    alive = to_like(op, op.Equal(op.Sub(zeros, zero), 0.0), x)
    return op.Mul(op.Mul(_keep(op, dy, x, n), alive), op.Div(rest, safe))


def _l2(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    if _is_noop(n):
        return op.Mul(dy, op.Sign(x))
    norm = _keep(op, y, x, n)
    # 0 at the origin, as PyTorch has it
    safe = op.Add(norm, to_like(op, op.Equal(norm, 0.0), x))
    return op.Mul(x, op.Div(_keep(op, dy, x, n), safe))


def _log_sum_exp(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    if _is_noop(n):
        return dy
    return op.Mul(_keep(op, dy, x, n), op.Exp(op.Sub(x, _keep(op, y, x, n))))


def _log_sum(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    if _is_noop(n):
        return op.Div(dy, x)
    return _full(op, op.Div(_keep(op, dy, x, n), op.Exp(_keep(op, y, x, n))), x)


def _softmax(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    axis = op.constant([n.attributes.get_int("axis", -1)])
    return op.Mul(y, op.Sub(dy, op.ReduceSum(op.Mul(dy, y), axis, keepdims=1)))


def _log_softmax(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    axis = op.constant([n.attributes.get_int("axis", -1)])
    return op.Sub(dy, op.Mul(op.Exp(y), op.ReduceSum(dy, axis, keepdims=1)))


def _cumsum(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    reverse = n.attributes.get_int("reverse", 0)
    exclusive = n.attributes.get_int("exclusive", 0)
    return op.CumSum(dy, n.inputs[1], reverse=1 - reverse, exclusive=exclusive)


def _dft(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    """y = F x over pairs of real and imaginary part: dx = F* dy = N F⁻¹ dy, and F dy / N for F⁻¹.

    F is symmetric, of all N elements; of a real x the imaginary part has no gradient.
    """
    axis = static_ints(given(n, 2)) if given(n, 2) is not None else [-2]
    if axis is None or given(n, 1) is not None or n.attributes.get_int("onesided", 0) != 0:
        raise fail(n, "it has a length, is onesided, or its axis is not constant")
    inverse = n.attributes.get_int("inverse", 0)
    dx = op.node("DFT", [dy, *n.inputs[1:]], inverse=1 - inverse)
    size = to_like(op, op.Gather(shape_of(op, x), op.constant(axis[0])), dy)
    dx = op.Div(dx, size) if inverse else op.Mul(dx, size)
    return op.Slice(dx, [0], [1], [-1]) if dim(x, -1) == 1 else dx


def _stft(op: Any, node: ir.Node, dys: Values) -> Values:
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
    kept = size // 2 + 1 if node.attributes.get_int("onesided", 1) else size
    angles = 2 * np.pi * np.outer(np.arange(kept), np.arange(size)) / size
    filters = np.stack([np.cos(angles), -np.sin(angles)], 1).reshape(2 * kept, 1, size)
    basis = to_like(op, op.constant(filters), x)
    columns = op.Reshape(dy, op.constant([0, 0, 2 * kept]))
    weighted = basis if window is None else op.Mul(basis, window)
    dx = op.ConvTranspose(op.Transpose(columns, perm=[0, 2, 1]), weighted, strides=every)
    ends = op.Sub(op.Shape(x, start=1, end=2), op.Shape(dx, start=2, end=3))
    dx = op.Pad(dx, op.Concat(op.constant([0] * 5), ends, axis=0))
    dwindow = None
    if window is not None:
        count, one = op.Squeeze(op.Shape(dy, start=1, end=2), op.constant([0])), np.int64(1)
        starts = op.Mul(op.Range(op.constant(np.int64(0)), count, op.constant(one)), step)
        places = op.Add(op.Unsqueeze(starts, op.constant([1])), op.constant(np.arange(size)))
        flat = op.Squeeze(x, op.constant([2])) if known_rank(x) == 3 else x
        frames = op.Gather(flat, places, axis=1)
        dframes = op.MatMul(columns, op.Squeeze(basis, op.constant([1])))
        dwindow = op.ReduceSum(op.Mul(frames, dframes), op.constant([0, 1]), keepdims=0)
    return [reshape_like(op, dx, x), None, dwindow]


def _lp_normalization(op: Any, dy: ir.Value, x: ir.Value, y: ir.Value, n: ir.Node) -> Tensor:
    """y = x / |x|_p:  dx = (dy - d|x|/dx · Σ dy y) / |x|, where d|x|/dx is y (p = 2) or sign(x)."""
    axis = op.constant([norm_axis(n.attributes.get_int("axis", -1), x)])
    two = n.attributes.get_int("p", 2) == 2
    norm = (op.ReduceL2 if two else op.ReduceL1)(x, axis, keepdims=1)
    norm = op.Add(norm, to_like(op, op.Equal(norm, 0.0), x))
    slope = y if two else op.Sign(x)
    inner = op.ReduceSum(op.Mul(dy, y), axis, keepdims=1)
    return op.Div(op.Sub(dy, op.Mul(slope, inner)), norm)


REDUCE: dict[str, Unary] = {
    "ReduceSum": lambda op, dy, x, y, n: dy if _is_noop(n) else _full(op, _keep(op, dy, x, n), x),
    "ReduceMean": _mean,
    "ReduceMax": _extremum,
    "ReduceMin": _extremum,
    "ReduceProd": _prod,
    "ReduceL1": lambda op, dy, x, y, n: op.Mul(_keep(op, dy, x, n), op.Sign(x)),
    "ReduceL2": _l2,
    "ReduceSumSquare": lambda op, dy, x, y, n: op.Mul(_keep(op, dy, x, n), op.Add(x, x)),
    "ReduceLogSum": _log_sum,
    "ReduceLogSumExp": _log_sum_exp,
    "Softmax": _softmax,
    "LogSoftmax": _log_softmax,
    "CumSum": _cumsum,
    "DFT": _dft,
    "LpNormalization": _lp_normalization,
}
table(REDUCE)
register(OpDef("STFT", grad=_stft))
no_grad("it returns positions", "ArgMax", "ArgMin", "NonZero", "NonMaxSuppression")

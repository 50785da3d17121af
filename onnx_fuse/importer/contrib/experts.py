"""MoE: a mixture of experts, every expert's answer weighted by a router's best few."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.importer.contrib.table import Body, Results, Unwritable, contrib, known
from onnx_fuse.ir.build import dim, rank


def _gates(op: Body, routed: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(weights, whether chosen) of [tokens, experts]: a softmax, over all or over the chosen."""
    if op.attr("use_sparse_mixer", 0):
        raise Unwritable("its router is a sparse mixer, which is not supported")
    best, at = op.TopK(routed, [op.attr("k", 1)], outputs=2, axis=-1)
    at.dtype = ir.DataType.INT64
    zeros = op.Expand(op.number(0.0, routed), op.Shape(routed))
    if op.attr("normalize_routing_weights", 0):
        weights = op.ScatterElements(zeros, at, op.Softmax(best, axis=-1), axis=-1)
    else:
        weights = op.Softmax(routed, axis=-1)
    ones = op.Expand(op.number(1.0, routed), op.Shape(best))
    chosen = op.Cast(op.ScatterElements(zeros, at, ones, axis=-1), to=ir.DataType.BOOL)
    return weights, chosen


def _projected(op: Body, x: ir.Value, weights: ir.Value, bias: ir.Value | None) -> ir.Value:
    """x [experts or 1, tokens, in] times weights [experts, out, in], and a bias an expert."""
    y: ir.Value = op.MatMul(x, op.Transpose(weights, perm=[0, 2, 1]))
    return y if bias is None else op.Add(y, op.Unsqueeze(bias, [1]))


def _swiglu(op: Body, gate: ir.Value, up: ir.Value) -> ir.Value:
    limit = op.attr("swiglu_limit")
    if limit is not None:
        gate = op.formula("Min(gate, most)", gate=gate, most=limit)
        up = op.formula("Clip(up, least, most)", up=up, least=-limit, most=limit)
    beta = op.attr("activation_beta", 0.0)
    shifted = up if beta == 0.0 else op.formula("up + beta", up=up, beta=beta)
    return op.formula(
        "gate * Sigmoid(gate * alpha) * shifted",
        gate=gate,
        alpha=op.attr("activation_alpha", 1.0),
        shifted=shifted,
    )


def _first_activation(op: Body, x: ir.Value) -> ir.Value:
    first = _projected(op, x, op.needed(2), op.given(3))
    other, kind = op.given(6), op.attr("activation_type", "relu")
    if kind != "swiglu":
        if other is not None:
            raise Unwritable(f"its third weights do not go with {kind}")
        match kind:
            case "relu":
                return op.Relu(first)
            case "gelu":
                return op.Gelu(first, approximate="tanh")
            case "silu":
                return op.Mul(first, op.Sigmoid(first))
            case "identity":
                return first
        raise Unwritable(f"its activation '{kind}' is not known")
    if op.attr("swiglu_limit_after_activation", 0):
        raise Unwritable("its limit comes after the activation")
    way = op.attr("swiglu_fusion", 0)
    if way == 0:
        if other is None:
            raise Unwritable("its third weights are missing")
        return _swiglu(op, first, _projected(op, x, other, op.given(7)))
    if way == 1:  # columns of gate and up alternate
        pairs = op.Reshape(first, [0, 0, -1, 2])
        halves = op.Split(pairs, outputs=2, axis=3, num_outputs=2)
        return _swiglu(op, *(op.Squeeze(half, [3]) for half in halves))
    return _swiglu(op, *op.Split(first, outputs=2, axis=-1, num_outputs=2))


@contrib("MoE", recognized=False, whole=lambda node: True)
def moe(op: Body, x: ir.Value, routed: ir.Value) -> Results:
    """Every expert answers every token; those that a token did not choose count for nothing."""
    known(x.dtype, "the type of its input")
    weights, chosen = _gates(op, routed)
    hidden = op.needed(2)
    size = known(dim(hidden, 2) if rank(hidden) == 3 else None, "the size of its weights")
    tokens = op.Reshape(x, [1, -1, size])
    y = _projected(op, _first_activation(op, tokens), op.needed(4), op.given(5))
    total = op.formula(
        """weighed = y * Unsqueeze(Transpose <perm = [1, 0]> (weights), [2])
        counts = Unsqueeze(Transpose <perm = [1, 0]> (chosen), [2])
        ReduceSum <keepdims = 0> (Where(counts, weighed, 0), [0])""",
        y=y,
        weights=weights,
        chosen=chosen,
    )
    return op.Reshape(total, op.Shape(x), allowzero=1)

"""MoE: a mixture of experts, every expert's answer weighted by a router's best few."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_fuse.importer.contrib.table import Body, Results, Unwritable, attr, contrib, needed
from onnx_fuse.ir.build import given


def _gates(op: Body, node: ir.Node, routed: ir.Value) -> tuple[ir.Value, ir.Value]:
    """(weights, whether chosen) of [tokens, experts]: a softmax, over all or over the chosen."""
    if attr(node, "use_sparse_mixer", 0):
        raise Unwritable("its router is a sparse mixer, which is not supported")
    count = op.ints(attr(node, "k", 1))
    best, at = op.node("TopK", [routed, count], outputs=2, axis=-1)
    at.dtype = ir.DataType.INT64
    zeros = op.Expand(op.number(0.0, routed), op.Shape(routed))
    if attr(node, "normalize_routing_weights", 0):
        weights = op.ScatterElements(zeros, at, op.Softmax(best, axis=-1), axis=-1)
    else:
        weights = op.Softmax(routed, axis=-1)
    ones = op.Expand(op.number(1.0, routed), op.Shape(best))
    chosen = op.Cast(op.ScatterElements(zeros, at, ones, axis=-1), to=ir.DataType.BOOL)
    return weights, chosen


def _projected(op: Body, x: ir.Value, weights: ir.Value, bias: ir.Value | None) -> ir.Value:
    """x [experts or 1, tokens, in] times weights [experts, out, in], and a bias an expert."""
    y: ir.Value = op.MatMul(x, op.Transpose(weights, perm=[0, 2, 1]))
    return y if bias is None else op.Add(y, op.Unsqueeze(bias, op.ints(1)))


def _swiglu(op: Body, node: ir.Node, gate: ir.Value, up: ir.Value) -> ir.Value:
    limit = attr(node, "swiglu_limit")
    if limit is not None:
        gate = op.Min(gate, op.number(limit, gate))
        up = op.Clip(up, op.number(-limit, up), op.number(limit, up))
    alpha, beta = attr(node, "activation_alpha", 1.0), attr(node, "activation_beta", 0.0)
    scaled = gate if alpha == 1.0 else op.Mul(gate, op.number(alpha, gate))
    shifted = up if beta == 0.0 else op.Add(up, op.number(beta, up))
    return op.Mul(op.Mul(gate, op.Sigmoid(scaled)), shifted)


def _hidden(op: Body, node: ir.Node, x: ir.Value) -> ir.Value:
    """The activation of the first product."""
    first = _projected(op, x, needed(node, 2), given(node, 3))
    other, kind = given(node, 6), attr(node, "activation_type", "relu")
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
    if attr(node, "swiglu_limit_after_activation", 0):
        raise Unwritable("its limit comes after the activation")
    way = attr(node, "swiglu_fusion", 0)
    if way == 0:
        if other is None:
            raise Unwritable("its third weights are missing")
        return _swiglu(op, node, first, _projected(op, x, other, given(node, 7)))
    if way == 1:  # columns of gate and up alternate
        pairs = op.Reshape(first, op.ints(0, 0, -1, 2))
        gate, up = (op.Squeeze(v, op.ints(3)) for v in op.Split(
            pairs, outputs=2, axis=3, num_outputs=2))  # fmt: skip
    else:
        gate, up = op.Split(first, outputs=2, axis=-1, num_outputs=2)
    return _swiglu(op, node, gate, up)


@contrib("MoE", recognized=False, whole=lambda node: True)
def moe(op: Body, node: ir.Node) -> Results:
    """Every expert answers every token; those that a token did not choose count for nothing."""
    x, routed = needed(node, 0), needed(node, 1)
    if x.dtype is None:
        raise Unwritable("the type of its input is not known")
    weights, chosen = _gates(op, node, routed)
    hidden = needed(node, 2).shape
    size = hidden[2] if hidden is not None and len(hidden) == 3 else None
    if not isinstance(size, int):
        raise Unwritable("the size of its weights is not known")
    tokens = op.Reshape(x, op.ints(1, -1, size))
    y = _projected(op, _hidden(op, node, tokens), needed(node, 4), given(node, 5))

    def of_experts(value: ir.Value) -> ir.Value:
        return op.Unsqueeze(op.Transpose(value, perm=[1, 0]), op.ints(2))

    weighed = op.Mul(y, of_experts(weights))
    counted = op.Where(of_experts(chosen), weighed, op.constant(np.zeros((), x.dtype.numpy())))
    total = op.ReduceSum(counted, op.ints(0), keepdims=0)
    return [op.Reshape(total, op.Shape(x), allowzero=1)]

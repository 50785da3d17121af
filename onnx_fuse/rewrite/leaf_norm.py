"""The gradient of a LayerNormalization whose x needs none: its parameters', without the rows of dy.

y = xh gamma + beta is read by t = y · W alone, and dy = dt · Wᵀ would only be summed over its rows.
LayerNormLeafGrad makes all from G = xhᵀ · dt and dc = Σ dt, one product, at any gamma:
dW = gamma ⊙ G + beta ⊗ dc,  dgamma = Σ_n W ⊙ G,  dbeta = W · dc.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnx_fuse.ir.build import Builder, dim, rank, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.rules import attribute, constant_ints, consumers, producer, sole_consumer

MIN_ROWS = 16
"""Rows from which a product costs more than a pass over the weights."""


def without_rows(
    op: Builder, graph: ir.Graph, gradients: Mapping[str, ir.Value]
) -> dict[str, ir.Value]:
    """Rewrite LayerNormGrads whose dx nobody reads; returns `gradients` with the new values."""
    grads = dict(gradients)
    for node in list(graph):
        nodes = _parts(node, set(grads.values()))
        if nodes is None:
            continue
        rows, product, total = nodes
        old = [product.outputs[0], *node.outputs[1:], *(total.outputs if total is not None else ())]
        for before, after in zip(old, _emit(op, node, rows, product, old), strict=False):
            before.replace_all_uses_with(after)
            grads = {name: after if value is before else value for name, value in grads.items()}
        readers = consumers(required(rows.inputs[0]))
        graph.insert_before(next(n for n in graph if n in readers), op.nodes)
        op.nodes = []
        graph.remove([n for n in (node, rows, product, total) if n is not None], safe=True)
    return grads


def _parts(node: ir.Node, results: set[ir.Value]) -> tuple[ir.Node, ir.Node, ir.Node | None] | None:
    """The products dy = dt · Wᵀ and dW of such a node, and the sum dc where there is one."""
    if node.op_type != "LayerNormGrad" or node.domain != FUSE:
        return None
    dy, x, gamma, mean, rstd = node.inputs
    norm, rows = producer(mean, "LayerNormalization"), producer(dy, "Gemm")
    if x is None or dy is None or norm is None or rows is None or rank(x) != 2:
        return None
    if node.outputs[0].uses() or {node.outputs[0], dy} & results or sole_consumer(dy) is not node:
        return None
    if norm.inputs[:2] != (x, gamma) or list(norm.outputs[1:]) != [mean, rstd]:
        return None
    size, dt = dim(x, 0), rows.inputs[0]
    if x.dtype != ir.DataType.FLOAT or (size is not None and size < MIN_ROWS) or dt is None:
        return None
    if not _only_multiplies(rows) or attribute(rows, "transA", 0):
        return None
    readers, operands = consumers(dt), {norm.outputs[0], dt}
    product = next(
        (n for n in readers if _only_multiplies(n) and set(n.inputs[:2]) == operands), None
    )
    if product is None or not attribute(product, "transA", 0) or attribute(product, "transB", 0):
        return None
    return rows, product, next((n for n in readers if _sums_rows(n)), None)


def _emit(
    op: Builder, node: ir.Node, rows: ir.Node, product: ir.Node, like: list[ir.Value]
) -> list[ir.Value]:
    """dW, dgamma, dbeta, dc; W and its gradient are [N, K], or ("Turned") [K, N]."""
    _, x, gamma, mean, rstd = node.inputs
    norm = required(producer(mean, "LayerNormalization"))
    (dt, w), beta = rows.inputs[:2], norm.inputs[2]
    turned = product.inputs[0] is norm.outputs[0]
    if bool(attribute(rows, "transB", 0)) != turned:
        w = op.Transpose(w, perm=[1, 0])
    name = "LayerNormLeafGradTurned" if turned else "LayerNormLeafGrad"
    xh = op.Mul(op.Sub(x, mean), rstd)
    return list(op.emit(name, [dt, xh, w, gamma, beta], [*like, beta][:4]))


def _only_multiplies(node: ir.Node) -> bool:
    alone = len(node.inputs) < 3 or node.inputs[2] is None
    return node.op_type == "Gemm" and alone and attribute(node, "alpha", 1.0) == 1.0


def _sums_rows(node: ir.Node) -> bool:
    """dc = Σ dt over rows."""
    summed = node.op_type == "ReduceSum" and constant_ints(node.inputs[1]) == [0]
    return summed and attribute(node, "keepdims", 1) == 0

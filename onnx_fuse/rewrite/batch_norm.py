"""BatchNormalization folded into the weights of the Conv, ConvTranspose, Gemm or MatMul before it.

    BatchNormalization(x·w + b) = x·(w s) + (b - mean) s + beta,  s = gamma / sqrt(var + epsilon)
Views may stand between that leave the axis of the channels whole. For inference only: the weights
as they were are lost.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, add_initializer, const_array, rank
from onnx_fuse.ir.names import Names
from onnx_fuse.ir.traits import REARRANGES
from onnx_fuse.ops.rules import (
    Rewriter,
    attribute,
    is_initializer,
    move_shape_readers,
    other_operand,
    producer,
    readers,
    replay_views,
    row_axis,
    typed,
)
from onnx_fuse.reasons import Reason

FOLD_BATCH_NORM = "FoldBatchNorm"
"""The name of the rewrite in reports and for --fuse and --skip."""


def fold_batch_norm(rw: Rewriter) -> int:
    """Fold where the folded weights are finite and as precise; return how many were folded."""
    nodes = list(ir.traversal.RecursiveGraphIterator(rw.graph))
    return sum(_fold(rw, n) for n in nodes if n.op_type == "BatchNormalization" and not n.domain)


def _climbed(norm: ir.Node) -> tuple[ir.Node, ir.Node | None, list[ir.Node]] | None:
    """The product whose channels the norm scales, the Add of its bias, and the views between."""
    value, axis, views = norm.inputs[0], 1, list[ir.Node]()
    while (view := producer(value, *REARRANGES)) is not None and len(views) < _MOST:
        below = row_axis(view, axis)
        if below is None:
            return None
        value, axis = view.inputs[0], below
        views.insert(0, view)
    product, add = producer(value, *_PRODUCTS), producer(value, "Add")
    if add is not None:
        column = next((i for i in (0, 1) if rank(add.inputs[i]) == 1), None)
        product = None if column is None else producer(add.inputs[1 - column], "MatMul")
    if product is None or value is None:
        return None
    last = axis == (rank(value) or 0) - 1 and rank(product.inputs[1]) == 2
    rows = product.op_type in ("Gemm", "MatMul") and (rank(product.inputs[0]) or 0) >= 2
    return (product, add, views) if (rows and last) or (not rows and axis == 1) else None


_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_MOST = 16
"""Views that are climbed over."""


def _fold(rw: Rewriter, norm: ir.Node) -> bool:
    climbed = _climbed(norm)
    if climbed is None or attribute(norm, "training_mode", 0):
        return False
    product, add, views = climbed
    if product.graph is not norm.graph:
        return False
    nodes = [product, norm]
    chain = [product, *([add] if add is not None else []), *views]
    between = [v.outputs[0] for v in chain]
    if any(v.is_graph_output() or len(readers(v)) > 1 for v in between):
        return rw.refuse(FOLD_BATCH_NORM, nodes, Reason("other-readers", what="its input"))
    x, w, *rest = product.inputs
    b = rest[0] if rest else None
    if add is not None:
        b = other_operand(add, product.outputs[0])
    parameters = [w, b, *norm.inputs[1:]]
    if w is None or not all(v is None or is_initializer(v) for v in parameters):
        reason = Reason("computed", what="its weights or statistics")
        return rw.refuse(FOLD_BATCH_NORM, nodes, reason)
    if len(w.uses()) > 1:  # one node may read it twice
        reason = Reason("other-readers", what=f"the weight '{w.name}'")
        return rw.refuse(FOLD_BATCH_NORM, nodes, reason)
    types = {v.dtype for v in parameters if v is not None}
    if len(types) > 1 or not types <= {ir.DataType.FLOAT, ir.DataType.DOUBLE}:
        names = " and ".join(sorted(t.name.lower() for t in types if t is not None))
        return rw.refuse(FOLD_BATCH_NORM, nodes, Reason("batch-dtypes", dtypes=names))
    folded = _folded(product, b, norm)
    if folded is None:
        return rw.refuse(FOLD_BATCH_NORM, nodes, Reason("not-finite"))
    weight, bias = folded
    fresh = Names.of(rw.graph).fresh
    b = add_initializer(rw.graph, fresh(f"{w.name}_folded_bias"), bias)
    w = add_initializer(rw.graph, fresh(f"{w.name}_folded"), weight)
    attributes = {name: a.value for name, a in product.attributes.items() if name != "beta"}
    op = Builder()
    if product.op_type == "MatMul":
        biased = op.Add(typed(op.MatMul(x, w), w, product.outputs[0].shape), b)
    else:
        biased = op.node(product.op_type, [x, w, b], attributes=attributes)
    last = chain[-1 - len(views)].outputs[0]
    for node in chain[: len(chain) - len(views)]:
        move_shape_readers(node.outputs[0], biased)
    y = replay_views(op, views, last, typed(biased, w, last.shape))
    return rw.replace(norm, op, [norm.outputs[0]], [y])


def _folded(
    product: ir.Node, b: ir.Value | None, norm: ir.Node
) -> tuple[np.ndarray, np.ndarray] | None:
    """The new weight and bias; None where they cannot stand for what the nodes compute."""
    arrays = [const_array(v) for v in (product.inputs[1], b, *norm.inputs[1:]) if v is not None]
    constants = [a for a in arrays if a is not None]
    dtype = constants[0].dtype
    with np.errstate(all="ignore"):
        weight, *bias, gamma, beta, mean, var = [a.astype(np.float64) for a in constants]
        if {v.shape for v in (gamma, beta, mean, var)} != {(gamma.size,)}:
            return None  # onnxruntime refuses it
        epsilon = attribute(norm, "epsilon", 1e-5)
        scale = gamma / np.sqrt(var + epsilon)
        before = bias[0] if bias else np.zeros(())
        if product.op_type == "Gemm":
            before = before * attribute(product, "beta", 1.0)
            if before.ndim > 1 and before.shape[0] != 1:
                return None  # a bias per row
        by_channel = _by_channel(product, weight, scale)
        if by_channel is None or before.size not in (1, scale.size):
            return None
        folded = (weight * by_channel).astype(dtype)
        shift = ((before.reshape(-1) - mean) * scale + beta).astype(dtype)
        kept_finite = np.isfinite(weight) <= np.isfinite(folded)
        lost = (folded == 0) & (weight != 0) & (by_channel != 0)
    fine = np.isfinite(scale).all() and np.isfinite(shift).all() and kept_finite.all()
    return (folded, shift) if fine and not lost.any() else None


def _by_channel(product: ir.Node, weight: np.ndarray, scale: np.ndarray) -> np.ndarray | None:
    """`scale` in a shape that multiplies `weight` by its output channels; None if it cannot."""
    if product.op_type == "ConvTranspose":  # [C, M / group, ...], channels in order of the groups
        group = attribute(product, "group", 1)
        if scale.size != weight.shape[1] * group or weight.shape[0] % group:
            return None
        rows = np.repeat(scale.reshape(group, -1), weight.shape[0] // group, axis=0)
        return rows.reshape(*weight.shape[:2], *[1] * (weight.ndim - 2))
    plain = product.op_type == "Gemm" and not attribute(product, "transB", 0)
    axis = 1 if plain or product.op_type == "MatMul" else 0
    if scale.size != weight.shape[axis]:
        return None
    return scale.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])

"""BatchNormalization folded into the weights of the Conv, ConvTranspose or Gemm before it.

    BatchNormalization(x·w + b) = x·(w s) + (b - mean) s + beta,  s = gamma / sqrt(var + epsilon)
For inference only: the weights as they were are lost.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_fuse.onnx.build import Builder, const_array, unique_name
from onnx_fuse.ops.rewrite import (
    Rewriter,
    attribute,
    is_initializer,
    made_by,
    only_use,
    users,
)

FOLD_BATCH_NORM = "FoldBatchNorm"
"""name of the rewrite in reports and for --fuse and --skip."""


def fold_batch_norm(rw: Rewriter) -> int:
    """Fold where the folded weights are finite numbers of the same precision; how many."""
    nodes = list(ir.traversal.RecursiveGraphIterator(rw.graph))
    return sum(_fold(rw, n) for n in nodes if n.op_type == "BatchNormalization" and not n.domain)


def _fold(rw: Rewriter, norm: ir.Node) -> bool:
    product = made_by(norm.inputs[0], "Conv", "ConvTranspose", "Gemm")
    if product is None or product.graph is not norm.graph or attribute(norm, "training_mode", 0):
        return False
    nodes = [product, norm]
    if only_use(product.outputs[0]) is not norm:
        return rw.refuse(FOLD_BATCH_NORM, nodes, "other nodes read what it normalizes")
    x, w, *rest = product.inputs
    b = rest[0] if rest else None
    parameters = [w, b, *norm.inputs[1:]]
    if w is None or not all(v is None or is_initializer(v) for v in parameters):
        return rw.refuse(FOLD_BATCH_NORM, nodes, "weights or statistics are no constants")
    if len(users(w)) > 1:
        return rw.refuse(FOLD_BATCH_NORM, nodes, f"other nodes read the weight '{w.name}'")
    types = {v.dtype for v in parameters if v is not None}
    if len(types) > 1 or not types <= {ir.DataType.FLOAT, ir.DataType.DOUBLE}:
        names = " and ".join(sorted(t.name.lower() for t in types if t is not None))
        reason = f"its parameters are of {names}: the folded weights would be rounded once more"
        return rw.refuse(FOLD_BATCH_NORM, nodes, reason)
    folded = _folded(product, norm)
    if folded is None:
        return rw.refuse(FOLD_BATCH_NORM, nodes, "the folded weights are not finite, or lost")
    weight, bias = folded
    w.const_value = ir.tensor(weight, name=w.name)
    if b is not None and len(users(b)) == 1:
        b.const_value = ir.tensor(bias, name=b.name)
        b.shape = ir.Shape(bias.shape)
    else:
        tensor = ir.tensor(bias, name=unique_name(rw.graph, f"{w.name}_bias"))
        b = ir.Value(name=tensor.name, shape=ir.Shape(bias.shape), type=ir.TensorType(tensor.dtype))
        b.const_value = tensor
        rw.graph.register_initializer(b)
    kept = {name: a.value for name, a in product.attributes.items() if name != "beta"}
    op = Builder()
    y = op.node(product.op_type, [x, w, b], attributes=kept)
    return rw.replace(norm, op, [norm.outputs[0]], [y])


def _folded(product: ir.Node, norm: ir.Node) -> tuple[np.ndarray, np.ndarray] | None:
    """The new weight and bias; None where they cannot stand for what the two nodes compute."""
    arrays = [const_array(v) for v in (*product.inputs[1:], *norm.inputs[1:]) if v is not None]
    kept = [a for a in arrays if a is not None]
    dtype = kept[0].dtype
    with np.errstate(all="ignore"):
        weight, *bias, gamma, beta, mean, var = [a.astype(np.float64) for a in kept]
        epsilon = attribute(norm, "epsilon", 1e-5)
        assert isinstance(epsilon, float)
        scale = gamma / np.sqrt(var + epsilon)
        before = bias[0] if bias else np.zeros(())
        if product.op_type == "Gemm":
            factor = attribute(product, "beta", 1.0)
            assert isinstance(factor, float)
            before = before * factor
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
        assert isinstance(group, int)
        if scale.size != weight.shape[1] * group or weight.shape[0] % group:
            return None
        rows = np.repeat(scale.reshape(group, -1), weight.shape[0] // group, axis=0)
        return rows.reshape(*weight.shape[:2], *[1] * (weight.ndim - 2))
    axis = 1 if product.op_type == "Gemm" and not attribute(product, "transB", 0) else 0
    if scale.size != weight.shape[axis]:
        return None
    return scale.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])

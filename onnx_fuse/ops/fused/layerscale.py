"""Layer scale: (x · W + c) ⊙ g, g a constant of each column, is x · (W ⊙ g) + c ⊙ g.

It rounds W once more where the graph rounds the product. That is admitted as the fold of a
BatchNormalization is: in float and double at every level, if each weight stays a finite number of
full precision; in 16 bits, whose digits show it, at level 3. It loses the parameter, so it is not
for training. Between the two may be views that keep the columns one axis.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import const_array, given, rank
from onnx_fuse.ops.rules import (
    Rewriter,
    Rule,
    attribute,
    freeze,
    freeze_shared,
    is_constant,
    label,
    other_operand,
    row_axis,
    sole_consumer,
)
from onnx_fuse.reasons import Reason

NAME, NAME_16 = "LayerScale", "LayerScale16"
WIDE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_STEPS = 16
"""Views and sums between a product and its scale that are looked over at most."""


def scale_of(node: ir.Node) -> tuple[ir.Value, np.ndarray, int] | None:
    """(scaled value, numbers, axis) of a Mul by a constant that differs along one axis alone."""
    if node.op_type != "Mul" or node.domain or len(node.inputs) != 2:
        return None
    g = next((v for v in node.inputs if is_constant(v)), None)
    x = other_operand(node, g) if g is not None else None
    if g is None or x is None or is_constant(x) or x.dtype != g.dtype:
        return None
    vector = _along(g, rank(x))
    return None if vector is None else (x, *vector)


def _along(value: ir.Value, size: int | None) -> tuple[np.ndarray, int] | None:
    """The numbers of a constant vector and the axis they lie along among `size`."""
    array = const_array(value)
    if array is None or size is None or array.ndim > size or array.dtype.kind != "f":
        return None
    long = [i for i, d in enumerate(array.shape) if d != 1]
    return (array.reshape(-1), long[0] + size - array.ndim) if len(long) == 1 else None


def product_below(value: ir.Value, axis: int) -> tuple[ir.Node, ir.Node | None] | None:
    """The product, and the sum with its bias, whose columns `axis` of `value` are.

    Nothing else reads what lies between.
    """
    bias: ir.Node | None = None
    for _ in range(_STEPS):
        node = value.producer()
        if node is None or node.domain or sole_consumer(value) is None:
            return None
        if node.op_type in ("MatMul", "Gemm", "Conv"):
            columns = 1 if node.op_type == "Conv" else (rank(value) or 0) - 1
            return (node, bias) if axis == columns else None
        if node.op_type == "Add":
            c = next((v for v in node.inputs if is_constant(v)), None)
            x = other_operand(node, c) if c is not None else None
            along = _along(c, rank(value)) if c is not None else None
            if bias is not None or x is None or along is None or along[1] != axis:
                return None
            if rank(x) != rank(value):
                return None
            value, bias = x, node
            continue
        below, x = row_axis(node, axis), node.inputs[0]
        if below is None or x is None or node.op_type in ("Concat", "Split", "Gather", "Slice"):
            return None
        value, axis = x, below
    return None


def _fold(name: str, rw: Rewriter, node: ir.Node) -> bool:
    if (node.outputs[0].dtype in WIDE) != (name == NAME):
        return False
    scaled = scale_of(node)
    below = product_below(scaled[0], scaled[2]) if scaled is not None else None
    if scaled is None or below is None or node.outputs[0].is_graph_output():
        return False
    x, scale, _ = scaled
    product, add = below
    nodes = [node, product]
    if any(attribute(product, k, 1.0) != 1.0 for k in ("alpha", "beta")):
        return rw.refuse(name, nodes, Reason("scaled", what="alpha or beta"))
    w, columns = product.inputs[1], len(scale)
    weight = const_array(w)
    if w is None or weight is None:
        return rw.refuse(name, nodes, Reason("computed", what="the weight"))
    first = product.op_type == "Conv" or attribute(product, "transB", 0) != 0
    axis = 0 if first else weight.ndim - 1
    if weight.ndim < 2 or weight.shape[axis] != columns:  # one of a single axis has no columns
        return False
    sums = [(add, add.inputs.index(c), c) for c in add.inputs if is_constant(c)] if add else []
    if product.op_type != "MatMul" and given(product, 2) is not None:
        sums.append((product, 2, product.inputs[2]))
    parts = [(weight, axis)]
    for owner, _, c in sums:
        array = const_array(c)
        if array is None:
            return rw.refuse(name, nodes, Reason("computed", what="the bias"))
        at = int(np.argmax([d == columns for d in array.shape])) if array.ndim else 0
        by_row = owner is product and array.shape[-1:] != (columns,)
        if array.size != columns or by_row:
            return rw.refuse(name, nodes, Reason("bias-shape"))
        parts.append((array, at))
    folded = []
    for (owner, index, value), (part, at) in zip([(product, 1, w), *sums], parts, strict=True):
        array = _scaled(part, scale, at)
        if array is None:
            return rw.refuse(name, nodes, Reason("not-finite"))
        stem = f"{value.name if value is not None else ''} times {label(node)}"
        folded.append((owner, index, rw.initializer(stem, array)))
    for owner, index, value in folded:
        lost = owner.inputs[index]
        owner.replace_input_with(index, value)
        freeze([lost])
    node.outputs[0].replace_all_uses_with(x)
    freeze_shared(node.outputs)
    rw.fusions[name] += 1
    return True


def _scaled(array: np.ndarray, scale: np.ndarray, axis: int) -> np.ndarray | None:
    """The product, rounded once; None where a number is not finite or loses digits by it."""
    shape = [1] * array.ndim
    shape[axis] = -1
    with np.errstate(all="ignore"):
        exact = array.astype(np.float64) * scale.astype(np.float64).reshape(shape)
        product: np.ndarray = exact.astype(array.dtype)
        smallest = float(ir.DataType.from_numpy(array.dtype).tiny)
        # also by a scale of 0, which may give a -0 that a sum of zeros does not
        lost = (np.abs(product.astype(np.float64)) < smallest) & (array != 0)
    return product if np.isfinite(product).all() and not lost.any() else None


_CONDITIONS = "readers weights types ranks body"
RULES = tuple(
    Rule(name, level, ("Mul",), partial(_fold, name), training=False, conditions=_CONDITIONS)
    for name, level in ((NAME, 1), (NAME_16, 3))
)

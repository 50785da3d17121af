"""Dropout and the random generators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir import const_array
from onnx_fuse.ops.derive import Values, given, no_grad, to_like
from onnx_fuse.ops.opdef import OpDef, register


def _dropout(op: Any, node: ir.Node, dys: Values) -> Values:
    """dx = dy · mask / (1 - ratio) in training, dy otherwise."""
    dy, training, ratio = dys[0], given(node, 2), given(node, 1)
    assert dy is not None
    on = const_array(training)
    if training is None or (on is not None and not on.any()):
        return [dy]
    if len(node.outputs) < 2:
        node.resize_outputs(2)
    mask = node.outputs[1]
    if not mask.name:
        mask.name = f"{node.outputs[0].name}.mask"
        mask.dtype, mask.shape = ir.DataType.BOOL, node.outputs[0].shape
    number = const_array(ratio)
    kept = op.Mul(dy, to_like(op, mask, dy))
    if on is not None and (ratio is None or number is not None):
        share = 0.5 if number is None else float(np.asarray(number).reshape(-1)[0])
        return [op.Mul(kept, 1 / (1 - share) if share < 1 else 0.0)]
    ratio = op.constant(0.5, dy.dtype) if ratio is None else to_like(op, ratio, dy)
    scale = op.Where(training, op.Reciprocal(op.Sub(1.0, ratio)), op.constant(1.0, dy.dtype))
    return [op.Mul(kept, scale)]


register(OpDef("Dropout", grad=_dropout))
no_grad(
    "its result is drawn at random",
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Bernoulli", "Multinomial"),
)

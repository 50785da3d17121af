"""LayerNormalization and RMSNormalization from every form exporters write; residual add + norm.

In the canonical graph a norm over the last axis is either ai.onnx LayerNormalization with scale and
bias and axis -1, or `onnx_fuse.RMSNormalization` (ai.onnx has one from opset 23 only):
    RMSNormalization(x, scale) = x / sqrt(mean(x²) + epsilon) * scale
    SkipLayerNorm(x, residual, scale, bias) = LayerNormalization(s, scale, bias), s = x + residual
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, rank, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.fused.gradients import NORM_GRADS, rms_norm_grad, skip_norm_grad
from onnx_fuse.ops.opdef import fused_op, register
from onnx_fuse.ops.patterns import Condition, Match, Spellings, tops
from onnx_fuse.ops.rules import (
    Rewriter,
    Rule,
    attribute,
    combined_with,
    constant_ints,
    consumers,
    freeze,
    is_constant,
    producer,
    scalar,
    sole_consumer,
    typed,
)
from onnx_fuse.ops.shape_ops import spans
from onnx_fuse.reasons import Reason

EPSILON = "epsilon: float = 1e-05"
STASH = "stash_type: int = 1"

# Pow, Div and Mul in this order are what onnxruntime's own SimplifiedLayerNormalization fusion
# finds.
RMS_TEXT = """  xs = Cast <to: int = @stash_type> (x)
  two = CastLike (Constant <value_float: float = 2.0> (), xs)
  sq = Pow (xs, two)
  axes = [-1]
  ms = ReduceMean <keepdims: int = 1> (sq, axes)
  v = ms + CastLike (Constant <value_float: float = @epsilon> (), xs)
  std = Sqrt (v)
  rstd = Reciprocal (std)
  ns = xs / std
  nx = CastLike (ns, x)
"""
LAYER_NORM_TEXT = (
    "  {n}, mean, rstd = LayerNormalization <axis: int = -1, epsilon: float = @epsilon> "
    "({x}, scale, bias)\n"
)

register(
    fused_op(
        "RMSNormalization", [EPSILON, STASH], "x, scale", "y",
        f"{RMS_TEXT}  y = nx * scale", saves=("rstd",), grad=rms_norm_grad,
    ),
    fused_op(
        "SkipLayerNorm", [EPSILON], "x, residual, scale, bias", "y, s",
        f"  s = x + residual\n{LAYER_NORM_TEXT.format(n='y', x='s')}",
        saves=("mean", "rstd"), grad=skip_norm_grad,
    ),
    fused_op(
        "SkipRMSNorm", [EPSILON, STASH], "x, residual, scale", "y, s",
        "  s = x + residual\n"
        f"{RMS_TEXT.replace('(x)', '(s)').replace('(ns, x)', '(ns, s)')}  y = nx * scale",
        saves=("rstd",), grad=skip_norm_grad,
    ),
    *NORM_GRADS,
)  # fmt: skip


@dataclass(frozen=True)
class Norm:
    """A canonical norm node over the last axis, taken apart."""

    node: ir.Node
    kind: str  # "LayerNorm" or "RMSNorm": the prefix of the fused ops
    x: ir.Value
    affine: tuple[ir.Value, ...]  # (scale, bias) or (scale,)
    attributes: dict[str, float | int]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two norms that compute the same."""
        return (self.kind, self.x, self.affine, tuple(sorted(self.attributes.items())))


def canonical_norm(node: ir.Node | None) -> Norm | None:
    """The parts of a node that `RULES` has brought to canonical form, else None."""
    if node is None:
        return None
    epsilon = attribute(node, "epsilon", 1e-5)
    bound = [v for v in node.inputs if v is not None]
    if not all(spans(v, bound[0]) for v in bound[1:]):
        return None
    match node.domain, node.op_type:
        case "", "LayerNormalization":
            canonical = attribute(node, "axis", -1) == -1 and len(bound) == 3
            if not canonical or attribute(node, "stash_type", 1) != 1:
                return None
            return Norm(node, "LayerNorm", bound[0], tuple(bound[1:]), {"epsilon": epsilon})
        case "onnx_fuse", "RMSNormalization":
            attributes = {"epsilon": epsilon, "stash_type": attribute(node, "stash_type", 1)}
            return Norm(node, "RMSNorm", bound[0], tuple(bound[1:]), attributes)
    return None


def norm_node(
    op: Builder, kind: str, x: ir.Value, affine: Sequence[ir.Value | None],
    attributes: Mapping[str, Any],
) -> ir.Value:  # fmt: skip
    """The norm of that kind, "LayerNorm" or "RMSNorm", as a node of its own, like x."""
    if kind == "RMSNorm":
        y = op.RMSNormalization(x, *affine, domain=FUSE, **attributes)
    else:
        y = op.LayerNormalization(x, *affine, axis=-1, **attributes)
    return typed(y, x, x.shape)


def norm_attributes(node: ir.Node) -> dict[str, Any]:
    """Those attributes of a fused product that are its norm's."""
    return {k: a.value for k, a in node.attributes.items() if k in ("epsilon", "stash_type")}


# ---- canonicalization ------------------------------------------------------------------------


def _native(rw: Rewriter, node: ir.Node) -> bool:
    """Node forms: bias bound, axis -1, no outputs nobody reads."""
    x, scale = node.inputs[0], node.inputs[1]
    size = rank(x)
    axis = attribute(node, "axis", -1)
    last = axis == -1 or (size is not None and axis == size - 1)
    if not last or node.domain or rank(scale) != 1 or x is None or scale is None:
        return False
    if node.op_type == "RMSNormalization":
        op = Builder()
        centred, size = _EXACT.find(_CENTRED, x), dim(scale, 0)
        stash = attribute(node, "stash_type", 1)
        if x.dtype != scale.dtype or not spans(scale, x):
            return rw.refuse("RMSNormalization", [node], Reason("norm-scale"))
        if centred is not None and size and stash == 1 and x.dtype == ir.DataType.FLOAT:
            # What exporters make of a LayerNorm by hand; in 16 bits the deviation is rounded first.
            n = node.outputs[0]
            n, bias = _affine(n, "Add", size) or (n, rw.zeros(scale, size))
            epsilon = attribute(node, "epsilon", 1e-5)
            y = op.LayerNormalization(centred["x"], scale, bias, axis=-1, epsilon=epsilon)
            return rw.replace(n.producer() or node, op, [n], [y])
        if x.dtype == ir.DataType.DOUBLE:
            stash = ir.DataType.DOUBLE.value  # onnxruntime computes doubles in nothing less
        epsilon = attribute(node, "epsilon", 1e-5)
        y = op.RMSNormalization(x, scale, domain=FUSE, epsilon=epsilon, stash_type=stash)
        return rw.replace(node, op, [node.outputs[0]], [y])
    changed = _widened(rw, node, x)
    scale = node.inputs[1] or scale
    while len(node.outputs) > 1 and not consumers(node.outputs[-1]):
        if node.outputs[-1].is_graph_output():
            break
        node.resize_outputs(len(node.outputs) - 1)
        changed = True
    width = dim(scale, 0)
    if (len(node.inputs) < 3 or node.inputs[2] is None) and width is not None:
        # onnxruntime dies of a function whose LayerNormalization has no bias (1.22 to 1.31).
        node.resize_inputs(3)
        node.replace_input_with(2, rw.zeros(scale, width))
        changed = True
    if axis != -1:
        node.attributes["axis"] = ir.AttrInt64("axis", -1)
        changed = True
    return changed


def _widened(rw: Rewriter, node: ir.Node, x: ir.Value) -> bool:
    """Expand a scale and a bias of one number to the width of x, where that is known."""
    width, op, changed = dim(x, -1), Builder(), False
    if width is None or width == 1 or node.graph is None:
        return False
    for i, value in enumerate(node.inputs[1:], 1):
        if value is None or rank(value) != 1 or dim(value, 0) != 1:
            continue
        array = None if rw.training else const_array(value)
        if array is None:
            wide = op.Expand(value, [width])
        else:
            wide = rw.initializer(f"{value.name}x{width}", np.repeat(array, width))
        node.replace_input_with(i, wide)
        if array is not None:
            freeze([value])
        changed = True
    node.graph.insert_before(node, op.nodes)
    return changed


def _reduces_last_axis(values: Match) -> bool:
    axes, size = constant_ints(values["axes"]), rank(values["x"])
    return axes in ([-1], [size - 1] if size is not None else None)


def _keeps_axis(values: Match) -> bool:
    x, y = values["x"].shape, values["y"].shape
    sizes = [getattr(size, "value", size) for size in x[:-1]] if x is not None else [None]
    return (
        _reduces_last_axis(values)
        and None not in sizes
        and y is not None
        and tuple(y) == (*sizes, 1)
    )


_REDUCED = "<keepdims: int = {}, noop_with_empty_axes: int = @noop> (x, axes)"
_TABLE: dict[str, dict[str, Condition | None]] = {
    f"Row{kind}": {
        f"Reduce{kind} {_REDUCED.format(1)}": _reduces_last_axis,
        f"Reshape <allowzero: int = @zero> (Reduce{kind} {_REDUCED.format(0)}, to)": _keeps_axis,
        f"Unsqueeze (Reduce{kind} {_REDUCED.format(0)}, to)": _keeps_axis,
    }
    for kind in ("Mean", "Sum")
}
_TABLE["Average"] = {
    "RowMean (x)": None,
    "RowSum (x) / width": lambda match: scalar(match["width"]) == dim(match["x"], -1),
}
_TABLE["Square"] = {"x * x": None, "Pow (x, 2)": None}
_TABLE["Root"] = {"Sqrt (x)": None, "Pow (x, 0.5)": None}
_TABLE["InverseRoot"] = {
    "Reciprocal (Root (x))": None,
    "1 / Root (x)": None,
    "Pow (x, power)": lambda values: scalar(values["power"]) == -0.5,
}
_TABLE["OverRoot"] = {"x / Root (v)": None, "x * InverseRoot (v)": None}
_EXACT = Spellings(_TABLE)
LOOSE = Spellings(_TABLE, ("Cast", "Identity"), fixed_rank=False)
"""Norms with casts between, and constants of more axes."""
_CENTRED = "(x - Average (x))"
_NORMS = [  # exporters leave out an epsilon of next to nothing
    (name, f"OverRoot ({d}, Average (Square ({d})){epsilon})")
    for name, d in (("LayerNormalization", _CENTRED), ("RMSNormalization", "x"))
    for epsilon in (" + epsilon", "")
]


def _decomposed(rw: Rewriter, node: ir.Node) -> bool:
    """Recognize sqrt(mean(d²) + epsilon): d = x - mean(x) makes a LayerNorm, d = x an RMSNorm."""
    if node.domain or (node.op_type == "Pow" and abs(scalar(node.inputs[1]) or 0) != 0.5):
        return False
    for spellings, (name, text) in product((_EXACT, LOOSE), _NORMS):
        for n in tops(node.outputs[0], "Mul", "Div", "Reciprocal", *spellings.views):
            values = spellings.find(text, n)
            epsilon = scalar(values["epsilon"]) if values and "epsilon" in values else 0.0
            if values is None or epsilon is None:
                continue
            if spellings is LOOSE:
                return rw.refuse(name, [node], Reason("norm-form"))
            return _build(rw, node, name, n, values["x"], epsilon)
    return False


def _affine(value: ir.Value, op_type: str, width: int | None) -> tuple[ir.Value, ir.Value] | None:
    """(result, operand) when the only use of `value` is a Mul or Add by a vector of the row."""
    node, operand = combined_with(value, op_type) or (None, None)
    if node is None or operand is None or rank(operand) != 1 or not is_constant(operand):
        return None
    return (node.outputs[0], operand) if width is not None and dim(operand, 0) == width else None


def _differs(name: str, x: ir.Value, epsilon: float) -> Reason | None:
    """Why the fused norm would not compute what is written out; None if it would.

    LayerNormalization has no other stash_type than float32 in onnxruntime, epsilon is a float32.
    """
    if not dim(x, -1):
        return Reason("unknown", what="the number of its columns")
    centred = name == "LayerNormalization"
    if x.dtype != ir.DataType.FLOAT and (centred or x.dtype != ir.DataType.DOUBLE):
        kind = x.dtype.name.lower() if x.dtype is not None else "an unknown type"
        return Reason("norm-type", dtype=kind, name=name)
    if float(np.float32(epsilon)) != epsilon:
        return Reason("not-float32", what="epsilon", number=epsilon, dtype="double")
    return None


def _build(
    rw: Rewriter, node: ir.Node, name: str, n: ir.Value, x: ir.Value, epsilon: float
) -> bool:
    if reason := _differs(name, x, epsilon):
        return rw.refuse(name, [node], reason)
    width, centred = dim(x, -1) or 0, name == "LayerNormalization"
    last, back, before = n, sole_consumer(n), producer(x, "Cast")
    source = before.inputs[0] if before is not None else None
    if back is not None and back.op_type == "Cast" and source is not None:
        narrow = source.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        if narrow and back.outputs[0].dtype == source.dtype and x.dtype == ir.DataType.FLOAT:
            # From 16 bits and back before the affine part: what stash_type = float32 means.
            last, x = back.outputs[0], source
    dtype = last.dtype
    if dtype is None or x.dtype != dtype:
        return False
    scale = _affine(last, "Mul", width)
    last = scale[0] if scale else last
    shift = _affine(last, "Add", width) if centred else None
    last = shift[0] if shift else last
    if scale:
        weight = scale[1]
    else:
        stem = f"onex{np.dtype(dtype.numpy()).name}x{width}"
        weight = rw.initializer(stem, np.ones(width, dtype.numpy()))
    op = Builder()
    if centred:
        bias = shift[1] if shift else rw.zeros(last, width)
        y = op.LayerNormalization(x, weight, bias, axis=-1, epsilon=epsilon)
    else:
        stash = ir.DataType.DOUBLE if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        y = op.RMSNormalization(x, weight, domain=FUSE, epsilon=epsilon, stash_type=int(stash))
    return rw.replace(required(last.producer()), op, [last], [y])


# ---- fusion ----------------------------------------------------------------------------------


def _skip(rw: Rewriter, node: ir.Node) -> bool:
    """Residual add + norm, where no Gemm has taken the norm over."""
    norm = canonical_norm(node)
    add = producer(norm.x, "Add") if norm else None
    if norm is None or add is None or len(node.outputs) > 1:
        return False
    a, b = add.inputs[0], add.inputs[1]
    if a is None or b is None or rank(a) != rank(b) or is_constant(a) or is_constant(b):
        return False
    if rank(a) is None:
        reason = Reason("unknown", what="the rank of the residual")
        return rw.refuse("SkipLayerNorm", [add, node], reason)
    if not rw.training and (producer(a, "DequantizeLinear") or producer(b, "DequantizeLinear")):
        return rw.refuse("SkipLayerNorm", [add, node], Reason("codes"))
    if any(v.producer() is not None for v in norm.affine):
        return rw.refuse("SkipLayerNorm", [add, node], Reason("computed", what="its scale"))
    for i in range(rank(a) or 0):
        if dim(a, i) != dim(b, i) and dim(a, i) is not None and dim(b, i) is not None:
            return rw.refuse("SkipLayerNorm", [add, node], Reason("broadcast"))
    op = Builder()
    name = f"Skip{norm.kind}"
    y, s = op.node(name, [a, b, *norm.affine], outputs=2, domain=FUSE, attributes=norm.attributes)
    return rw.replace(add, op, [add.outputs[0], node.outputs[0]], [s, y])


CANONICAL = (
    Rule("Norm", 0, ("LayerNormalization", "RMSNormalization"), _native, conditions="ranks sizes"),
    Rule(
        "Norm",
        0,
        ("Sqrt", "Pow"),
        _decomposed,
        conditions="constants weights types ranks sizes body",
    ),
)
SKIP = Rule(
    "SkipLayerNorm",
    1,
    ("LayerNormalization", "RMSNormalization"),
    _skip,
    conditions="types ranks body",
)

"""Rules of elementwise operators for shapes, entries and bounds of indices."""

from __future__ import annotations

from onnx_ir import Node, Value

from onnx_fuse.ir.sizes import SymbolicSize
from onnx_fuse.ir.traits import BROADCASTS, POINTWISE
from onnx_fuse.validation.sizes import larger
from onnx_fuse.validation.symbolic.walk import Fact, Rule, Shape, Walk


def _elementwise(w: Walk, node: Node) -> list[Fact]:
    return [Fact(w.broadcast([w.shape(v) for v in node.inputs]), _bound(w, node))]


def _bound(w: Walk, node: Node) -> Shape | None:
    """The bound of sums, differences and products of indices, and of Max and Where."""
    tops = [w.fact(v).top for v in node.inputs]
    fixed = [_scalar_of(w, v) for v in node.inputs]
    if node.op_type in ("Max", "Where"):
        a, b = tops[-2:] if len(tops) > 1 else (None, None)
        return (larger(a[0], b[0]),) if a and b and len(a) == len(b) == 1 else None
    if len(tops) != 2:
        return None
    if node.op_type == "Sub":
        return tuple(t - fixed[1] for t in tops[0]) if tops[0] and fixed[1] is not None else None
    if node.op_type not in ("Add", "Mul"):
        return None
    for top, other, number in ((tops[0], tops[1], fixed[1]), (tops[1], tops[0], fixed[0])):
        if top and node.op_type == "Mul" and number is not None:
            return tuple((t - 1) * number + 1 for t in top)
        if top and node.op_type == "Add" and number is not None:
            return tuple(t + number for t in top)
        if top and node.op_type == "Add" and other and len(other) == 1:
            return tuple(t + other[0] - 1 for t in top)
    return None


def _scalar_of(w: Walk, value: Value | None) -> SymbolicSize | None:
    numbers = w.numbers(value)
    return numbers[0] if numbers is not None and len(numbers) == 1 else None


def _like_first(w: Walk, node: Node) -> list[Fact]:
    shape = w.shape(node.inputs[0])
    passes_on = node.op_type in ("Identity", "Cast", "Dropout", "Clip")
    top = w.fact(node.inputs[0]).top if passes_on else None
    if node.op_type == "CumSum" and shape is not None:
        axis = w.ints(node.inputs[1])
        top = (shape[axis[0]] + 1,) if axis else None  # of a mask of zeros and ones
    out = Fact(None if shape is None else tuple(shape), top)
    return [out] if node.op_type != "Dropout" else [out, Fact(out.shape)]


_KEEPS_SHAPE = (
    *("Bernoulli", "CastLike", "CumSum", "Dropout", "EyeLike"),
    *("GroupNormalization", "Hardmax", "LRN", "LogSoftmax", "LpNormalization"),
    *("MeanVarianceNormalization", "RandomNormalLike", "RandomUniformLike", "RotaryEmbedding"),
    *("ScatterElements", "ScatterND", "Softmax", "Trilu"),
)
RULES: dict[str, Rule] = {
    **dict.fromkeys((*POINTWISE, *_KEEPS_SHAPE), _like_first),
    **dict.fromkeys(BROADCASTS, _elementwise),
}

"""Shape arithmetic on open sizes: ONNX operators over small int64 arrays that hold `OpenSize`s.

Such an array has NumPy's dtype object. Operators that are not here take plain integers, which is a
guard on each size (see `size`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.evaluate import viewer
from onnx_fuse.program.size import OpenSize, maximum, minimum

INT32 = ir.DataType.INT32
Arrays = Sequence[Any]
"""An array for each input, None for one that is left out."""


def is_open(array: np.ndarray | None) -> bool:
    """Whether an array holds sizes (strings are objects too)."""
    if array is None or array.dtype != object:
        return False
    return any(isinstance(v, OpenSize) for v in array.reshape(-1))


def closed(array: np.ndarray) -> np.ndarray:
    """int64 of the same values, each guarded."""
    return np.array([int(v) for v in array.reshape(-1)], np.int64).reshape(array.shape)


def evaluate(node: ir.Node, arrays: Arrays) -> np.ndarray | None:
    """The only result of a node of the default domain; None where it has no rule here."""
    rule = RULES.get(node.op_type)
    result = None if rule is None else rule(node, arrays)
    if result is not None and result.dtype == object and not is_open(result):
        result = closed(result)
    return result


# ---- rules --------------------------------------------------------------------------------------


def _elementwise(one: Callable[..., Any], kind: type = object) -> Any:
    ufunc = np.frompyfunc(one, one.__code__.co_argcount, 1)

    def rule(node: ir.Node, arrays: Arrays) -> np.ndarray | None:
        return np.asarray(ufunc(*arrays), kind)

    return rule


def _quotient(a: int, b: int) -> Any:
    """C's division, as ONNX has it: towards zero."""
    if a >= 0 and b > 0:
        return a // b
    return int(abs(int(a)) // abs(int(b)) * (1 if (int(a) < 0) == (int(b) < 0) else -1))


def _cast(node: ir.Node, arrays: Arrays) -> np.ndarray | None:
    return arrays[0] if node.attributes["to"].as_int() in (ir.DataType.INT64, INT32) else None


def _moved(node: ir.Node, arrays: Arrays) -> np.ndarray | None:
    """The elements where the node moves them; where to, guarded numbers say."""
    if node.op_type == "Concat":  # the parts' types may differ
        operands = [a.astype(object) for a in arrays]
    elif node.op_type == "Where":
        operands = [arrays[0].astype(bool), *(a.astype(object) for a in arrays[1:])]
    else:
        operands = [arrays[0], *(a if a is None else closed(a) for a in arrays[1:])]
    try:
        return viewer(node)(operands)
    except (ValueError, IndexError):
        return None  # no valid node: onnxruntime says what is wrong with it


def _repeated(node: ir.Node, arrays: Arrays) -> np.ndarray | None:
    data, by = arrays[0], closed(arrays[1]).tolist()
    if node.op_type == "Tile":
        return np.tile(data, by) if data.size * prod(by) <= 64 else None
    shape = np.broadcast_shapes(data.shape, tuple(by))
    return np.broadcast_to(data, shape) if prod(shape) <= 64 else None


def _reduce(one: Callable[[Sequence[Any]], Any]) -> Any:
    def rule(node: ir.Node, arrays: Arrays) -> np.ndarray | None:
        data, attributes = arrays[0], node.attributes
        if data is None or data.ndim > 1:
            return None
        axes = arrays[1] if len(arrays) > 1 else None
        if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
            return None  # they are not known
        named = "axes" in attributes or (axes is not None and axes.size)
        if not named and attributes.get_int("noop_with_empty_axes", False):
            return data
        reduced = np.empty(1, object)
        reduced[0] = one(list(data.reshape(-1)))
        return reduced if attributes.get_int("keepdims", 1) and data.ndim else reduced.reshape(())

    return rule


RULES: dict[str, Callable[[ir.Node, Arrays], np.ndarray | None]] = {
    **dict.fromkeys(("Concat", "Gather", "Identity", "Reshape", "Slice", "Squeeze"), _moved),
    **dict.fromkeys(("Unsqueeze", "Where"), _moved),
    "Abs": _elementwise(lambda a: abs(a)),
    "Add": _elementwise(lambda a, b: a + b),
    "Cast": _cast,
    "Div": _elementwise(_quotient),
    "Equal": _elementwise(lambda a, b: a == b, bool),
    "Expand": _repeated,
    "Greater": _elementwise(lambda a, b: a > b, bool),
    "GreaterOrEqual": _elementwise(lambda a, b: a >= b, bool),
    "Less": _elementwise(lambda a, b: a < b, bool),
    "LessOrEqual": _elementwise(lambda a, b: a <= b, bool),
    "Max": lambda node, arrays: _pairwise(maximum, arrays),
    "Min": lambda node, arrays: _pairwise(minimum, arrays),
    "Mul": _elementwise(lambda a, b: a * b),
    "Neg": _elementwise(lambda a: -a),
    "ReduceMax": _reduce(lambda values: _fold(maximum, values)),
    "ReduceMin": _reduce(lambda values: _fold(minimum, values)),
    "ReduceProd": _reduce(prod),
    "ReduceSum": _reduce(sum),
    "Sub": _elementwise(lambda a, b: a - b),
    "Tile": _repeated,
}


def _fold(one: Callable[[Any, Any], Any], values: Sequence[Any]) -> Any:
    total = values[0]
    for value in values[1:]:
        total = one(total, value)
    return total


def _pairwise(one: Callable[[Any, Any], Any], arrays: Arrays) -> np.ndarray:
    ufunc = np.frompyfunc(one, 2, 1)
    return np.asarray(_fold(ufunc, arrays), object)

"""Shape arithmetic on open sizes: ONNX operators over small int64 arrays that hold `Size`s.

Such an array has NumPy's dtype object. Operators that are not here take plain integers, which is a
guard on each size (see `size`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from onnx_fuse.program.size import Size, maximum, minimum, number

INT64 = 7  # onnx.TensorProto.INT64
Arrays = Sequence["np.ndarray | None"]
Attributes = Mapping[str, Any]


def is_open(array: np.ndarray | None) -> bool:
    """Whether an array holds sizes (strings are objects too)."""
    if array is None or array.dtype != object:
        return False
    return any(isinstance(v, Size) for v in array.reshape(-1))


def closed(array: np.ndarray) -> np.ndarray:
    """int64 of the same values, each guarded."""
    return np.array([int(v) for v in array.reshape(-1)], np.int64).reshape(array.shape)


def evaluate(name: str, arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    """The only result of the default domain's operator `name`; None for one that is not here."""
    rule = RULES.get(name)
    found = None if rule is None else rule(arrays, attributes)
    if found is None:
        return None
    if found.dtype == object and not is_open(found):
        found = closed(found)
    return found


# ---- rules --------------------------------------------------------------------------------------


def _elementwise(one: Callable[..., Any], kind: Any = object) -> Any:
    made = np.frompyfunc(one, one.__code__.co_argcount, 1)

    def rule(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
        return np.asarray(made(*arrays), kind)

    return rule


def _quotient(a: Any, b: Any) -> Any:
    """C's division, as ONNX has it: towards zero."""
    if a >= 0 and b > 0:
        return a // b
    return int(abs(int(a)) // abs(int(b)) * (1 if (int(a) < 0) == (int(b) < 0) else -1))


def _ints(array: np.ndarray | None) -> list[int]:
    return [] if array is None else [number(v) for v in array.reshape(-1)]


def _cast(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    return arrays[0] if attributes.get("to") == INT64 else None


def _gather(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    data, at = arrays
    assert data is not None
    assert at is not None
    axis = attributes.get("axis", 0)
    size = data.shape[axis]
    places = np.array([int(i) for i in at.reshape(-1)], np.int64).reshape(at.shape)
    if np.any(places < -size) or np.any(places >= size):
        return None
    return np.asarray(np.take(data, places, axis=axis), object)


def _concat(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    parts = [a for a in arrays if a is not None]
    return np.concatenate([a.astype(object) for a in parts], attributes["axis"])


def _slice(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    data, starts, ends, *more = arrays
    assert data is not None
    axes = _ints(more[0]) if more and more[0] is not None else range(len(_ints(starts)))
    steps = _ints(more[1]) if len(more) > 1 and more[1] is not None else [1] * len(_ints(starts))
    where = [slice(None)] * data.ndim
    for start, end, axis, step in zip(_ints(starts), _ints(ends), axes, steps, strict=True):
        size = data.shape[axis]
        first, last = (max(-size - 1, min(int(v), size)) for v in (start, end))
        stop = None if step < 0 and last < -size else last
        where[axis] = slice(first, stop, int(step))
    return data[tuple(where)]


def _unsqueeze(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    data, axes = arrays[0], _ints(arrays[1])
    assert data is not None
    rank = data.ndim + len(axes)
    return np.expand_dims(data, tuple(a % rank for a in axes))


def _squeeze(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    data = arrays[0]
    assert data is not None
    given = arrays[1] if len(arrays) > 1 else None
    return np.squeeze(data) if given is None else np.squeeze(data, tuple(_ints(given)))


def _reshape(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    data = arrays[0]
    assert data is not None
    wanted = [int(n) for n in _ints(arrays[1])]
    if not attributes.get("allowzero", 0):
        wanted = [data.shape[k] if n == 0 else n for k, n in enumerate(wanted)]
    return data.reshape(wanted)


def _reduce(one: Callable[[Sequence[Any]], Any]) -> Any:
    def rule(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
        data = arrays[0]
        if data is None or data.ndim > 1:
            return None
        if len(arrays) > 1 and arrays[1] is None and attributes.get("noop_with_empty_axes", 0):
            return data
        found = np.empty(1, object)
        found[0] = one(list(data.reshape(-1)))
        return found if attributes.get("keepdims", 1) and data.ndim else found.reshape(())

    return rule


def _where(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    condition, a, b = arrays
    assert condition is not None
    assert a is not None
    assert b is not None
    return np.where(condition.astype(bool), a.astype(object), b.astype(object))


def _expand(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    data, shape = arrays
    assert data is not None
    wanted = np.broadcast_shapes(data.shape, tuple(int(n) for n in _ints(shape)))
    return np.broadcast_to(data, wanted) if prod(wanted) <= 64 else None


def _tile(arrays: Arrays, attributes: Attributes) -> np.ndarray | None:
    data, repeats = arrays
    assert data is not None
    counts = [int(n) for n in _ints(repeats)]
    return np.tile(data, counts) if data.size * prod(counts) <= 64 else None


RULES: dict[str, Callable[[Arrays, Attributes], np.ndarray | None]] = {
    "Abs": _elementwise(lambda a: abs(a)),
    "Add": _elementwise(lambda a, b: a + b),
    "Cast": _cast,
    "Concat": _concat,
    "Div": _elementwise(_quotient),
    "Equal": _elementwise(lambda a, b: a == b, bool),
    "Expand": _expand,
    "Gather": _gather,
    "Greater": _elementwise(lambda a, b: a > b, bool),
    "GreaterOrEqual": _elementwise(lambda a, b: a >= b, bool),
    "Identity": lambda arrays, attributes: arrays[0],
    "Less": _elementwise(lambda a, b: a < b, bool),
    "LessOrEqual": _elementwise(lambda a, b: a <= b, bool),
    "Max": lambda arrays, attributes: _pairwise(maximum, arrays),
    "Min": lambda arrays, attributes: _pairwise(minimum, arrays),
    "Mul": _elementwise(lambda a, b: a * b),
    "Neg": _elementwise(lambda a: -a),
    "ReduceMax": _reduce(lambda values: _fold(maximum, values)),
    "ReduceMin": _reduce(lambda values: _fold(minimum, values)),
    "ReduceProd": _reduce(prod),
    "ReduceSum": _reduce(sum),
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _elementwise(lambda a, b: a - b),
    "Tile": _tile,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}


def _fold(one: Callable[[Any, Any], Any], values: Sequence[Any]) -> Any:
    found = values[0]
    for value in values[1:]:
        found = one(found, value)
    return found


def _pairwise(one: Callable[[Any, Any], Any], arrays: Arrays) -> np.ndarray:
    made = np.frompyfunc(one, 2, 1)
    return np.asarray(_fold(made, arrays), object)

"""The entries of small integer tensors that are made of shapes, as sizes over the symbols.

A tensor is an array of its own rank. An entry is a `SymbolicSize`, a bool, or None where nothing is
known of it. What moves entries moves them as `evaluate.exact` does, whose answers are those of
onnxruntime.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import const_array, extents
from onnx_fuse.ir.evaluate import exact
from onnx_fuse.ir.sizes import SymbolicSize, product, sign, size
from onnx_fuse.ir.traits import VIEWS

Array: TypeAlias = "np.ndarray[Any, Any]"
Sizes: TypeAlias = list[SymbolicSize | None]
Entry: TypeAlias = "SymbolicSize | bool | None"
"""A number or a truth value; None where it is not known."""
MOST = 64
"""The entries of a tensor that are followed; of a longer one nothing is known."""

_WHOLE = (ir.DataType.INT64, ir.DataType.INT32)


class Entries:
    """What is known of the entries of values, and what symbols mean that stand for a size."""

    def __init__(self) -> None:
        self.meaning: dict[str, SymbolicSize] = {}
        """The sizes that inference calls by a name of its own."""
        self.believed: set[ir.Value] = set()
        """Values whose sizes or entries hold only where no size that a Reshape names is 0."""
        self._arrays: dict[ir.Value, Array] = {}

    def sizes(self, value: ir.Value | None) -> Sizes | None:
        """The sizes of a value; None where its rank is not known."""
        if value is None or value.shape is None:
            return None
        meaning = self.meaning
        dims = extents(value.shape)
        return [None if d is None else meaning[d] if d in meaning else size(d) for d in dims]

    def of(self, value: ir.Value | None) -> Array | None:
        """The entries of a value, None for each that is not known; None if their number is not."""
        if value is None or value in self._arrays:
            return None if value is None else self._arrays[value]
        array = const_array(value)
        if array is None:
            return self._unread(value)
        return self.constant(array) if array.size <= MOST else None

    def vector(self, value: ir.Value | None) -> Sizes | None:
        """The entries of a shape or another vector, or of a scalar."""
        array = self.of(value)
        if array is None or array.ndim > 1:
            return None
        return [e if isinstance(e, SymbolicSize) else None for e in array.flat]

    def follow(self, node: ir.Node) -> Array | None:
        """Enter what is known of the entries of a node's result, and return it."""
        if node.domain or not node.inputs or node.inputs[0] is None or len(node.outputs) != 1:
            return None
        entries = self._entries(node)
        if entries is None or entries.size > MOST:
            return None
        self.enter(node.outputs[0], entries)
        return entries

    def enter(self, value: ir.Value, entries: Array) -> None:
        """Keep the entries of a value."""
        self._arrays[value] = entries

    def constant(self, array: Array) -> Array | None:
        """The entries of a constant."""
        return objects(array) if array.dtype.kind in "iub" else None

    def function(self, node: ir.Node) -> Callable[..., Any] | None:
        """What a node makes of the entries at one place, where it computes each by itself."""
        kind, reads = node.op_type, node.inputs[-1]
        dtype = None if reads is None else reads.dtype
        if kind == "Cast":
            return _cast_to(node)
        if kind in LOGIC:
            return LOGIC[kind]
        if kind in _COMPARED:
            return _COMPARED[kind] if dtype in _WHOLE else None
        if kind == "Mod" and node.attributes.get_int("fmod", 0) != 0:
            return None
        # Sums and products of 32 bits wrap around where sizes are large.
        return _NUMBERS.get(kind) if dtype == _WHOLE[0] else None

    def _unread(self, value: ir.Value) -> Array | None:
        followed = value.dtype in _WHOLE or value.dtype == ir.DataType.BOOL
        dims = [d for d in value.shape or () if isinstance(d, int)]
        if not followed or value.shape is None or len(dims) < len(value.shape):
            return None
        if min(dims, default=0) < 0:  # an Expand or Reshape that onnxruntime refuses
            return None
        return np.full(dims, None, object) if np.prod(dims, dtype=float) <= MOST else None

    def _entries(self, node: ir.Node) -> Array | None:
        kind = node.op_type
        if kind == "Shape":
            sizes = self.sizes(node.inputs[0])
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end")
            return None if sizes is None else vector(sizes[start:end])
        if kind == "Size":
            total = multiplied(self.sizes(node.inputs[0]) or [None])
            return None if total is None else _filled((), total)
        if kind in _MOVES:
            return self._moved(node)
        if kind not in _FOLLOWED:
            return None
        arrays = [self.of(v) for v in node.inputs if v is not None]
        if len(arrays) < len(node.inputs) or any(a is None for a in arrays):
            return None
        complete = [a for a in arrays if a is not None]
        if kind in ("ConstantOfShape", "Range"):
            return _computed(node, complete)
        if kind in _REDUCTIONS:
            return _reduced(node, complete)
        function = self.function(node)
        return None if function is None else _each(function, complete)

    def _moved(self, node: ir.Node) -> Array | None:
        """The entries that the node takes, found by moving their places."""
        count = len(node.inputs) if node.op_type == "Concat" else 1
        sources = [self.of(v) for v in node.inputs[:count]]
        if any(a is None for a in sources):
            return None
        complete = [a for a in sources if a is not None]
        operands: list[Array | None] = []
        at = 0
        for array in complete:
            operands.append(np.arange(at, at + array.size).reshape(array.shape))
            at += array.size
        for value in node.inputs[count:]:
            numbers = const_array(value)  # the ends of a Slice may be larger than any size
            numbers = _numbers(self.of(value)) if numbers is None else numbers
            if value is not None and numbers is None:
                return None
            operands.append(numbers)
        moved = exact(node, operands)
        if moved is None or moved[0].size > MOST:
            return None
        flat = vector([e for array in complete for e in array.flat])
        return _filled(moved[0].shape, *(flat[int(i)] for i in moved[0].flat))


def multiplied(sizes: Iterable[SymbolicSize | None]) -> SymbolicSize | None:
    """The product of sizes that cannot be negative; None where one is not known."""
    factors = list(sizes)
    if any(s is None or not s.nonnegative for s in factors):
        return None
    total = product(s for s in factors if s is not None)
    return total if total.settled else None


def divided(dividend: SymbolicSize, by: SymbolicSize) -> SymbolicSize | None:
    """The integer quotient, rounded towards zero, of a value that cannot be negative."""
    exactly = dividend / by if by else None
    if exactly is not None and exactly.settled and exactly.whole:
        return exactly  # a divisor of 0 ends the run
    if not dividend.nonnegative or not by.positive:
        a, b = dividend.number, by.number
        if not isinstance(a, int) or not isinstance(b, int) or not b:
            return None
        return size(abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1))
    rounded = dividend // by
    return rounded if rounded.settled else None


def _remainder(a: SymbolicSize, b: SymbolicSize) -> SymbolicSize | None:
    x, y = a.number, b.number
    if isinstance(x, int) and isinstance(y, int) and x >= 0 and y > 0:  # as fmod has it, too
        return size(x % y)
    quotient = divided(a, b) if a.nonnegative and b.positive else None
    return None if quotient is None else a - quotient * b


def _larger(a: SymbolicSize, *others: SymbolicSize) -> SymbolicSize | None:
    least = _smaller(-a, *(-b for b in others))
    return None if least is None else -least


def _smaller(a: SymbolicSize, *others: SymbolicSize) -> SymbolicSize | None:
    for b in others:
        if a != b and not (b - a).nonnegative:
            if not (a - b).nonnegative:
                return None
            a = b
    return a


def _absolute(a: SymbolicSize) -> SymbolicSize | None:
    return a if not a or a.nonnegative else -a if (-a).nonnegative else None


def comparisons(sign: Callable[[SymbolicSize], int | None]) -> dict[str, Callable[..., Any]]:
    """The operators that compare entries, by the sign of a difference where it is known."""

    def comparison(holds: Callable[[int], bool]) -> Callable[..., Any]:
        def decide(a: Entry, b: Entry) -> bool | None:
            if a is None or b is None or isinstance(a, bool) or isinstance(b, bool):
                return None
            order = sign(a - b)
            return None if order is None else holds(order)

        return decide

    return {
        "Equal": comparison(lambda s: s == 0),
        "Less": comparison(lambda s: s < 0),
        "LessOrEqual": comparison(lambda s: s <= 0),
        "Greater": comparison(lambda s: s > 0),
        "GreaterOrEqual": comparison(lambda s: s >= 0),
    }


def _chosen(condition: object, a: object, b: object) -> Any:
    if condition is None:
        return a if a == b else None
    return a if condition else b


def _both(a: object, b: object) -> bool | None:
    return False if a is False or b is False else None if a is None or b is None else True


def _any(a: object, b: object) -> bool | None:
    return True if a is True or b is True else None if a is None or b is None else False


def arithmetic(
    function: Callable[..., SymbolicSize | None], *, settled: bool = True
) -> Callable[..., Any]:
    """A function of sizes as one of entries; where `settled`, without an unknown in the result."""

    def compute(*args: object) -> SymbolicSize | None:
        if any(not isinstance(a, SymbolicSize) for a in args):
            return None
        result = function(*args)
        return result if result is not None and (result.settled or not settled) else None

    return compute


_MOVES = VIEWS | {"Concat", "Gather", "Slice", "Expand"}
_NUMBERS: dict[str, Callable[..., Any]] = {
    "Add": arithmetic(operator.add),
    "Sub": arithmetic(operator.sub),
    "Mul": arithmetic(operator.mul),
    "Div": arithmetic(divided),
    "Mod": arithmetic(_remainder),
    "Neg": arithmetic(operator.neg),
    "Abs": arithmetic(_absolute),
    "Min": arithmetic(_smaller),
    "Max": arithmetic(_larger),
}
_COMPARED = comparisons(sign)
LOGIC: dict[str, Callable[..., Any]] = {
    "Not": lambda a: None if a is None else not a,
    "And": _both,
    "Or": _any,
    "Xor": lambda a, b: None if a is None or b is None else a != b,
    "Where": _chosen,
}
_REDUCTIONS: dict[str, tuple[Callable[..., Any], SymbolicSize | None]] = {
    "ReduceProd": (_NUMBERS["Mul"], size(1)),
    "ReduceSum": (_NUMBERS["Add"], size(0)),
    "ReduceMax": (_NUMBERS["Max"], None),
    "ReduceMin": (_NUMBERS["Min"], None),
}

_FOLLOWED = {"ConstantOfShape", "Range", "Cast", "Floor", "Ceil"}
_FOLLOWED |= {*_NUMBERS, *_COMPARED, *LOGIC, *_REDUCTIONS}


def _cast_to(node: ir.Node) -> Callable[..., Any]:
    to = ir.DataType(node.attributes.get_int("to", 0))

    def cast(a: Entry) -> Any:
        if to == ir.DataType.BOOL:
            order = a if isinstance(a, bool) or a is None else sign(a)
            return None if order is None else bool(order)
        if to not in _WHOLE or a is None:
            return None
        number = size(int(a)) if isinstance(a, bool) else a
        return number if to == ir.DataType.INT64 or _fits(number) else None

    return cast


def _fits(value: SymbolicSize) -> bool:
    """Whether 32 bits hold it: a number of so many, or the size of one axis."""
    return isinstance(value.number, int) and abs(value.number) < 1 << 31


def _computed(node: ir.Node, arrays: Sequence[Array]) -> Array | None:
    numbers = [_numbers(a) for a in arrays]
    if any(a is None for a in numbers):
        return None
    if node.op_type == "ConstantOfShape":
        count = numbers[0]
        if count is None or (count < 0).any() or np.prod(count, dtype=float) > MOST:
            return None
    results = exact(node, numbers)
    if results is None or results[0].dtype not in (np.int64, np.int32, np.bool_):
        return None
    return objects(results[0]) if results[0].size <= MOST else None


def _reduced(node: ir.Node, arrays: Sequence[Array]) -> Array | None:
    x, axes = arrays[0], _numbers(arrays[1]) if len(arrays) > 1 else np.empty(0, np.int64)
    if axes is None or node.inputs[0] is None or node.inputs[0].dtype != ir.DataType.INT64:
        return None
    if not axes.size and node.attributes.get_int("noop_with_empty_axes", 0) != 0:
        return x
    gone = {int(a) for a in axes.flat} or set(range(x.ndim))
    if any(not -x.ndim <= a < x.ndim for a in gone):
        return None
    gone = {a % x.ndim for a in gone}
    function, start = _REDUCTIONS[node.op_type]
    for axis in sorted(gone):
        parts = [np.take(x, [i], axis) for i in range(x.shape[axis])]
        if not parts and start is None:
            return None
        shape = tuple(1 if i == axis else n for i, n in enumerate(x.shape))
        total: Array | None = parts[0] if parts else _filled(shape, start)
        for part in parts[1:]:
            total = _each(function, [total, part]) if total is not None else None
        if total is None:
            return None
        x = total
    if node.attributes.get_int("keepdims", 1) != 0:
        return x
    return x.reshape([n for i, n in enumerate(x.shape) if i not in gone])


def _each(function: Callable[..., Any], arrays: Sequence[Array]) -> Array | None:
    """The function of the entries, broadcast; None where the arrays do not fit together."""
    try:
        together = np.broadcast_arrays(*arrays)
    except ValueError:  # onnxruntime says so
        return None
    if together[0].size > MOST:
        return None
    flat = [list(a.flat) for a in together]
    return _filled(together[0].shape, *(function(*args) for args in zip(*flat, strict=True)))


def _filled(shape: Sequence[int], *entries: object) -> Array:
    """An array of objects of these entries, or of the only one."""
    array = np.empty(tuple(shape), object)
    for i in range(array.size):
        array.flat[i] = entries[i] if len(entries) > 1 else entries[0]
    return array


def vector(entries: Sequence[Any]) -> Array:
    return _filled((len(entries),), *entries)


def objects(array: Array) -> Array:
    flat = array.reshape(-1).tolist()
    return _filled(array.shape, *(n if isinstance(n, bool) else size(n) for n in flat))


def _numbers(array: Array | None) -> Array | None:
    """An int64 array of entries that are all numbers."""
    if array is None:
        return None
    numbers = [e.number if isinstance(e, SymbolicSize) else None for e in array.flat]
    if not all(isinstance(n, int) for n in numbers):
        return None
    return np.array(numbers, np.int64).reshape(array.shape)

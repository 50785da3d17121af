"""Entries where runs are looked for that succeed: sizes are 1 and more, and numbers fit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from onnx_fuse.ir.entries import LOGIC, Array, Entries, Sizes, arithmetic, comparisons, vector
from onnx_fuse.ir.sizes import SymbolicSize, rounded_down, size
from onnx_fuse.validation.sizes import larger, least, smaller

Guess = Callable[..., Any]


class GuessedEntries(Entries):
    """Entries of any type, by the `sizes` of values that are known elsewhere."""

    def __init__(
        self,
        sizes: Callable[[Value | None], Sequence[SymbolicSize | None] | None],
        resolve: Callable[[SymbolicSize], SymbolicSize],
    ) -> None:
        super().__init__()
        self._sizes, self._resolve = sizes, resolve

    def sizes(self, value: Value | None) -> Sizes | None:
        sizes = self._sizes(value)
        return None if sizes is None else list(sizes)

    def of(self, value: Value | None) -> Array | None:
        """The entries of a value, with what is solved put in."""
        entries = super().of(value)
        if value is not None and entries is not None:
            for i, entry in enumerate(entries.flat):
                if isinstance(entry, SymbolicSize):
                    entries.flat[i] = self._resolve(entry)
            self.enter(value, entries)
        return entries

    def constant(self, array: Array) -> Array | None:
        """The entries of a constant, exact fractions where these are floats."""
        if array.dtype.kind != "f":
            return super().constant(array)
        numbers = [size(Fraction(float(x))) if np.isfinite(x) else None for x in array.flat]
        return vector(numbers).reshape(array.shape)

    def function(self, node: Node) -> Guess | None:
        """What a node makes of the entries at one place, in numbers that never wrap around."""
        if node.op_type == "Cast":
            return _cast(ir.DataType(node.attributes.get_int("to", 0)))
        if node.op_type == "Div" and not is_integer(node.inputs[0]):
            return _RATIO
        return _GUESSED.get(node.op_type)


def is_integer(value: Value | None) -> bool:
    """Whether a value holds integers."""
    return value is not None and value.dtype is not None and value.dtype.is_integer()


def likely_sign(value: SymbolicSize) -> int | None:
    """The sign of a value, where it is the same for all sizes of 1 and more."""
    for sign in (1, -1):
        bound = least(value * sign)
        if bound is not None and bound > 0:
            return sign
    return None if value else 0


def _cast(to: ir.DataType) -> Guess:
    def cast(x: SymbolicSize | bool | None) -> Any:
        if x is None or (to == ir.DataType.BOOL and isinstance(x, bool)):
            return x
        number = size(int(x)) if isinstance(x, bool) else x
        if to == ir.DataType.BOOL:
            sign = likely_sign(number)
            return None if sign is None else sign != 0
        return rounded_down(number) if to.is_integer() else number

    return cast


def _sizes(function: Callable[..., SymbolicSize]) -> Guess:
    return arithmetic(function, settled=False)


_RATIO = _sizes(operator.truediv)
_GUESSED: dict[str, Guess] = {
    **LOGIC,
    **comparisons(likely_sign),
    "Add": _sizes(operator.add),
    "Sub": _sizes(operator.sub),
    "Mul": _sizes(operator.mul),
    "Div": _sizes(operator.floordiv),
    "Mod": _sizes(operator.mod),
    "Min": _sizes(smaller),
    "Max": _sizes(larger),
    "Neg": _sizes(operator.neg),
    "Floor": _sizes(rounded_down),
    "Ceil": _sizes(lambda x: -rounded_down(-x)),
}

"""Open sizes: integers that remember which dimensions of the inputs they were computed from.

Lowering runs on the sizes of one set of inputs. As `OpenSize`s they behave as those integers, but
arithmetic keeps a polynomial over the open dimensions, and every decision taken on one (`n % 8`,
`n <= 64`, `n == m`) is kept as a guard by the `Trace`. What was lowered then holds for all inputs
that meet the guards: its numbers are the polynomials' values. Turning a size into a plain integer
(formatting it, indexing with it, `int()`) is a guard too: that it is equal.
"""

from __future__ import annotations

import contextlib
import operator as op
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil, floor, isfinite
from typing import Any, SupportsInt, TypeGuard, cast

import numpy as np

from onnx_fuse.program import formula

Polynomial = tuple[tuple[tuple[str, ...], int], ...]
"""Sum of terms: (atoms, coefficient), sorted by atoms. An atom is a symbol or the text of an
integer quotient, remainder, least or largest of polynomials."""
CLASSES = (16, 32, 64)
"""Sizes up to the last of these are of the class of the next one; above, see `size_class`."""


def size_class(size: int) -> tuple[int, int]:
    """The smallest and the largest size of the class of `size`, for which choices are the same.

    Up to 64: 1 to 16, 17 to 32, 33 to 64; then steps of an eighth of the next power of two, but at
    least 64 long: to 512 by 64, to 1024 by 128, to 2048 by 256.
    """
    if size <= 1:
        return size, size
    below = 1
    for limit in CLASSES:
        if size <= limit:
            return below + 1, limit
        below = limit
    step = max(64, (1 << (size - 1).bit_length()) // 8)
    last = -(-size // step) * step
    return last - step + 1, last


def wide_size_class(size: int, least: int = 512) -> tuple[int, int]:
    """The class of `size` in steps of four: 2 to 512, 513 to 2048, 2049 to 8192 and so on.

    `least` is the end of the first.
    """
    if size <= 1:
        return size, size
    first, last = 2, least
    while size > last:
        first, last = last + 1, 4 * last
    return first, last


Classes = Callable[[int], tuple[int, int]]


class Trace:
    """The open dimensions of one lowering, their values there, and the guards met on the way."""

    def __init__(self, batch: Mapping[str, int] | None = None) -> None:
        self.batch = batch or {}
        """The symbols of batches that choices must not depend on, and the largest size of each:
        all sizes are of one class, so that sums have the same order in each."""
        self.values: dict[str, int] = {}
        self.guards: dict[str, None] = {}
        """Python expressions over the symbols, each true for the sizes traced."""
        self._narrow: set[str] = set()
        self.text_depth = 0
        """Above 0 while text is for people alone: a size in it is no decision."""
        self.asked: set[Any] = set()
        """Comparisons that are among the guards."""
        self.memo: dict[Any, Any] = {}
        """What was made for problems with these sizes: their guards are among `guards`."""

    def symbol(self, name: str, value: int) -> int:
        """The open dimension called `name`, an identifier; its value is `value`."""
        self.values[name] = value
        return cast(int, OpenSize(self, (((name,), 1),), value))

    def class_bound(self, terms: Polynomial, classes: Classes) -> dict[str, int]:
        """The largest size of the class of each dimension in a polynomial; the classes are kept.

        A dimension whose narrow class is kept already is taken by that.
        """
        bounds = {}
        text = text_of(terms)
        for name, number in self.values.items():
            if re.search(rf"\b{name}\b", text):
                if name in self.batch:
                    first, last = 0, self.batch[name]
                elif classes is size_class or name in self._narrow:
                    self._narrow.add(name)
                    first, last = size_class(number)
                else:
                    first, last = classes(number)
                self.guard(f"{first} <= {name} <= {last}")
                bounds[name] = last
        return bounds

    @property
    def narrow(self) -> dict[str, int]:
        """The dimensions whose class, that of `size_class`, is a guard."""
        return {name: self.values[name] for name in self.values if name in self._narrow}

    @contextlib.contextmanager
    def formatting(self) -> Iterator[None]:
        """Within the block sizes are formatted without a guard: for messages, never for code."""
        self.text_depth += 1
        try:
            yield
        finally:
            self.text_depth -= 1

    def largest(self) -> dict[str, int]:
        """The largest size of each dimension's class, as far as the choices so far say."""
        return {
            name: (size_class if name in self._narrow else wide_size_class)(number)[1]
            for name, number in self.values.items()
        }

    def guard(self, text: str) -> None:
        """Record that the expression holds."""
        self.guards[text] = None


def _ordered(
    how: str, rounded: Callable[[float], int], holds: bool
) -> Callable[[OpenSize, object], bool]:
    """The comparison `how`, or where it does not hold; with a float by the integer next to it."""

    def compare(size: OpenSize, other: object) -> bool:
        if isinstance(other, float) and isfinite(other):
            other = rounded(other)
        return _compared(size, other, how) == holds if _whole(other) else NotImplemented

    return compare


class OpenSize:
    """An integer and the polynomial that gives it; typed as `int` where it is handed on."""

    __slots__ = ("terms", "trace", "value")

    def __init__(self, trace: Trace, terms: Polynomial, value: int) -> None:
        self.trace, self.terms, self.value = trace, terms, value

    # ---- arithmetic that stays open ----

    def __add__(self, other: float | OpenSize) -> Any:
        return _combined(self, other, 1) if _whole(other) else self.plain() + other

    __radd__ = __add__

    def __sub__(self, other: float | OpenSize) -> Any:
        return _combined(self, other, -1) if _whole(other) else self.plain() - other

    def __rsub__(self, other: float | OpenSize) -> Any:
        return _combined(-self, other, 1) if _whole(other) else other - self.plain()

    def __neg__(self) -> Any:
        return _normalized(self.trace, {atoms: -n for atoms, n in self.terms}, -self.value)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def __mul__(self, other: float | OpenSize) -> Any:
        if not _whole(other):
            return other * self.plain()  # a sequence too
        if not isinstance(other, OpenSize):
            if other == 1:
                return self
            scaled = tuple([(atoms, n * int(other)) for atoms, n in self.terms])
            return OpenSize(self.trace, scaled, self.value * int(other)) if other else 0
        terms: dict[tuple[str, ...], int] = {}
        for a, n in self.terms:
            for b, m in other.terms:
                key = tuple(sorted((*a, *b)))
                terms[key] = terms.get(key, 0) + n * m
        return _normalized(self.trace, terms, self.value * other.value)

    __rmul__ = __mul__

    def __floordiv__(self, other: float | OpenSize) -> Any:
        return _divided(self, other) if _whole(other) else NotImplemented

    def __rfloordiv__(self, other: float | OpenSize) -> Any:
        return _divided(other, self) if _whole(other) else NotImplemented

    def __mod__(self, other: float | OpenSize) -> Any:
        return _remainder(self, other) if _whole(other) else NotImplemented

    def __rmod__(self, other: float | OpenSize) -> Any:
        return _remainder(other, self) if _whole(other) else NotImplemented

    def __divmod__(self, other: float | OpenSize) -> Any:
        return self // other, self % other

    # ---- decisions ----

    __lt__, __ge__ = (_ordered("<", ceil, holds) for holds in (True, False))
    __le__, __gt__ = (_ordered("<=", floor, holds) for holds in (True, False))

    def __eq__(self, other: object) -> bool:
        return _compared(self, other, "==") if _whole(other) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not _compared(self, other, "==") if _whole(other) else NotImplemented

    def __bool__(self) -> bool:
        return not _compared(self, 0, "==")

    def __hash__(self) -> int:
        # A set or dict tells sizes apart that are equal at the sizes traced alone. That is no
        # decision, so that what is looked up must not depend on which is found.
        return hash(self.terms)

    # ---- where it becomes a plain integer ----

    def plain(self) -> int:
        """The value, guarded: what was lowered holds for this value alone."""
        self.trace.guard(f"{text_of(self.terms)} == {self.value}")
        return self.value

    __index__ = plain
    __int__ = plain
    __trunc__ = plain

    def __float__(self) -> float:
        return float(self.plain())

    def __truediv__(self, other: float) -> Any:
        return Ratio(self, other) if _whole(other) else self.plain() / other

    def __rtruediv__(self, other: float) -> Any:
        return Ratio(other, self) if _whole(other) else other / self.plain()

    def __pow__(self, other: int) -> Any:
        return self.plain() ** other

    def __lshift__(self, other: int) -> Any:
        return self * (1 << other)

    def __rshift__(self, other: int) -> Any:
        return self // (1 << other)

    def __and__(self, other: int) -> Any:
        return self.plain() & other

    def __or__(self, other: int) -> Any:
        return self.plain() | other

    __rand__ = __and__
    __ror__ = __or__

    def bit_length(self) -> int:
        """Bits of the value, guarded by the powers of two around it."""
        bits = self.value.bit_length()
        if self >= 1 << bits or self < 1 << max(bits - 1, 0):
            return self.plain().bit_length()
        return bits

    def __str__(self) -> str:
        return str(self.value if self.trace.text_depth else self.plain())

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(self.value if self.trace.text_depth else self.plain(), spec)


def _of_float(how: Callable[[Any, Any], Any]) -> Callable[[Ratio, Any], Any]:
    """An operator of a Ratio that is that of its float."""
    return lambda ratio, other: how(float(ratio), other)


class Ratio:
    """a / b of which at least one is a `OpenSize`: open while it is only rounded to an integer."""

    __slots__ = ("above", "below")

    def __init__(self, above: int | OpenSize, below: int | OpenSize) -> None:
        self.above, self.below = above, below

    def __ceil__(self) -> Any:
        return -(-self.above // self.below)

    def __floor__(self) -> Any:
        return self.above // self.below

    def __float__(self) -> float:
        return plain(self.above) / plain(self.below)

    __lt__, __le__, __gt__, __ge__ = map(_of_float, (op.lt, op.le, op.gt, op.ge))
    __add__, __sub__, __mul__, __truediv__ = map(_of_float, (op.add, op.sub, op.mul, op.truediv))
    __radd__, __rmul__ = __add__, __mul__
    __rsub__ = _of_float(lambda number, other: other - number)
    __rtruediv__ = _of_float(lambda number, other: other / number)


def plain(size: int | OpenSize) -> int:
    """A size as an integer that is no `OpenSize`, guarded if it was one."""
    return size.plain() if isinstance(size, OpenSize) else size


def number(value: SupportsInt) -> int:
    """An element of an array of integers or of sizes, as it is or as a Python integer."""
    return cast(int, value) if isinstance(value, OpenSize) else int(value)


def array(values: object) -> np.ndarray:
    """int64 [n] or [] of sizes; an array of objects where one of them is open."""
    flat = values if isinstance(values, list | tuple) else [values]
    kind = object if any(isinstance(v, OpenSize) for v in flat) else np.int64
    cells = np.empty(len(flat), kind)
    for i, v in enumerate(flat):
        cells[i] = v
    return cells if isinstance(values, list | tuple) else cells.reshape(())


def hint(size: int | OpenSize) -> int:
    """The value of a size here, unguarded: for messages, and where only this shape matters."""
    if isinstance(size, OpenSize):
        return size.value
    return int(size) if isinstance(size, np.integer) else size


def negative(size: int) -> bool:
    """Whether a size is below 0. Of one that is a sum of dimensions alone that needs no guard."""
    if isinstance(size, OpenSize) and "-" not in text_of(size.terms):
        return False
    return size < 0


def upper_bound(size: int, classes: Classes = size_class) -> int:
    """The size with each open dimension at the largest of its class, for estimates.

    Guarded are the classes of the dimensions alone. Dimensions that never are that large together
    may divide by zero; the estimate is then the size here.
    """
    if not isinstance(size, OpenSize):
        return size
    bounds = size.trace.class_bound(size.terms, classes)
    try:
        return int(formula.value(text_of(size.terms), bounds))
    except formula.NoValue:
        return size.value


def coarse(size: int) -> int:
    """The size with its dimensions at the largest of their class, for rough comparisons.

    Only a dimension whose class is a guard already, and at most twice as large as its smallest
    member, is taken so; the others stay open. A comparison then is one on those alone.
    """
    if not isinstance(size, OpenSize):
        return size
    classes = {name: size_class(number) for name, number in size.trace.narrow.items()}
    bounds = {name: last for name, (first, last) in classes.items() if last <= 2 * first}
    bounds |= size.trace.batch
    others = {name: OpenSize(size.trace, (((name,), 1),), number)
              for name, number in size.trace.values.items()}  # fmt: skip
    symbols = {**others, **bounds}
    return cast(int, formula.value(text_of(size.terms), symbols, min=minimum, max=maximum))


def widely(size: int, least: int) -> int:
    """As `coarse`, but a size of one dimension alone is taken by its wide class, of which the first
    ends at `least`: as that of a mask is, to which each run adds a token.
    """
    if isinstance(size, OpenSize):
        text = text_of(size.terms)
        if sum(bool(re.search(rf"\b{name}\b", text)) for name in size.trace.values) == 1:
            return upper_bound(size, partial(wide_size_class, least=least))
    return coarse(size)


def any_batch(size: int) -> int:
    """The size with the batch at its largest, where no sum may depend on it; else the size."""
    return coarse(size) if isinstance(size, OpenSize) and size.trace.batch else size


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that all of them broadcast to, by NumPy's rules. Raises ValueError."""
    rank = max(map(len, shapes), default=0)
    result: list[int] = [1] * rank
    for shape in shapes:
        for k, size in enumerate(shape, rank - len(shape)):
            if size == 1 or size == result[k]:
                continue
            if result[k] != 1:
                raise ValueError(f"{[list(s) for s in shapes]} do not broadcast")
            result[k] = size
    return tuple(result)


def minimum(a: int, b: int) -> int:
    """min(a, b), without a guard on which of them it is."""
    return _either(a, b, "min", min)


def maximum(a: int, b: int) -> int:
    """max(a, b), without a guard on which of them it is."""
    return _either(a, b, "max", max)


def text_of(terms: Polynomial) -> str:
    """The polynomial as a Python expression in brackets."""
    parts = ["*".join((str(n), *atoms)) if n != 1 or not atoms else "*".join(atoms)
             for atoms, n in terms]  # fmt: skip
    return f"({'+'.join(parts)})" if parts else "0"


def expression(size: int | OpenSize) -> str:
    """A size as a Python expression over the symbols."""
    return text_of(size.terms) if isinstance(size, OpenSize) else str(size)


# ---- helpers ------------------------------------------------------------------------------------


_WHOLE = (int, OpenSize, np.integer)


def _whole(other: object) -> TypeGuard[int | OpenSize]:
    return isinstance(other, _WHOLE)


def _terms(size: int | OpenSize) -> dict[tuple[str, ...], int]:
    if isinstance(size, OpenSize):
        return dict(size.terms)
    return {(): int(size)} if size else {}


def _normalized(trace: Trace, terms: dict[tuple[str, ...], int], number: int) -> Any:
    nonzero = tuple(sorted((atoms, n) for atoms, n in terms.items() if n))
    if not nonzero:
        return 0
    if len(nonzero) == 1 and not nonzero[0][0]:
        return nonzero[0][1]
    return OpenSize(trace, nonzero, number)


def _combined(a: OpenSize, b: int | OpenSize, sign: int) -> Any:
    if not isinstance(b, OpenSize):
        if not b:
            return a
        if a.terms[0][0]:  # no constant yet: it sorts before all atoms
            constant = ((), sign * int(b))
            return OpenSize(a.trace, (constant, *a.terms), a.value + constant[1])
    terms = dict(a.terms)
    for atoms, n in _terms(b).items():
        terms[atoms] = terms.get(atoms, 0) + sign * n
    return _normalized(a.trace, terms, a.value + sign * hint(b))


def _compared(a: OpenSize, b: int | OpenSize, how: str) -> bool:
    number = a.value - hint(b)
    outcome = number < 0 if how == "<" else number <= 0 if how == "<=" else number == 0
    key = a.terms, b.terms if isinstance(b, OpenSize) else b, how
    if key in a.trace.asked:
        return outcome
    a.trace.asked.add(key)
    difference = a - b
    if isinstance(difference, OpenSize):
        if difference.terms[0][1] < 0 and how == "==":
            difference = -difference  # one text for both
        text = text_of(difference.terms)
        a.trace.guard(f"{text} {how} 0" if outcome else f"not {text} {how} 0")
    return outcome


def _quotient(terms: Polynomial, by: dict[tuple[str, ...], int]) -> dict[Any, int] | None:
    """The exact quotient by one term, None where a term does not divide."""
    if len(by) != 1:
        return None
    ((atoms, n),) = by.items()
    quotient = {}
    for key, m in terms:
        left = list(key)
        for atom in atoms:
            if atom not in left:
                return None
            left.remove(atom)
        if m % n:
            return None
        quotient[tuple(left)] = m // n
    return quotient


def _trace(a: int | OpenSize, b: int | OpenSize) -> Trace:
    return a.trace if isinstance(a, OpenSize) else cast(OpenSize, b).trace


def _divided(a: int | OpenSize, b: int | OpenSize) -> Any:
    trace, number = _trace(a, b), hint(a) // hint(b)
    if isinstance(b, OpenSize) and b == 0:
        raise ZeroDivisionError
    if isinstance(a, OpenSize):
        exact = _quotient(a.terms, _terms(b))
        if exact is not None:
            return _normalized(trace, exact, number)
        if isinstance(b, OpenSize) and a.terms == b.terms:
            return 1
    atom = f"({expression(cast(int, a))}//{expression(cast(int, b))})"
    return OpenSize(trace, (((atom,), 1),), number)


def _remainder(a: int | OpenSize, b: int | OpenSize) -> Any:
    trace, number = _trace(a, b), hint(a) % hint(b)
    if isinstance(b, OpenSize) and b == 0:
        raise ZeroDivisionError
    if isinstance(a, OpenSize):
        if _quotient(a.terms, _terms(b)) is not None:
            return 0
        if not isinstance(b, OpenSize):
            b = int(b)
            rest = {atoms: n % b for atoms, n in a.terms if n % b}
            reduced = _normalized(trace, rest, 1)
            if not isinstance(reduced, OpenSize):
                return reduced % b
            atom = f"({text_of(reduced.terms)}%{b})"
            return OpenSize(trace, (((atom,), 1),), number)
    atom = f"({expression(cast(int, a))}%{expression(cast(int, b))})"
    return OpenSize(trace, (((atom,), 1),), number)


def _either(a: int, b: int, name: str, choose: Callable[[int, int], int]) -> int:
    if not isinstance(a, OpenSize) and not isinstance(b, OpenSize):
        return choose(a, b)
    difference = a - b
    if not isinstance(difference, OpenSize):
        return choose(a, b)
    atom = f"{name}({expression(a)},{expression(b)})"
    return cast(int, OpenSize(_trace(a, b), (((atom,), 1),), choose(hint(a), hint(b))))

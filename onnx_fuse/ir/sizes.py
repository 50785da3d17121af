"""Sizes as polynomials over a model's symbols: the algebra of shapes and of what is made of them.

A symbol is the size of an axis: an integer of 0 and more, of which nothing else is known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Atom:
    """A term that is no polynomial: a quotient rounded down, a minimum, or an unknown."""

    op: str
    args: tuple[SymbolicSize, ...] = ()
    number: int = 0

    @cached_property
    def depth(self) -> int:
        """The depth to which atoms are nested."""
        inner = (s.depth for a in self.args for m in a.terms for s in m if isinstance(s, Atom))
        return 1 + max(inner, default=0)

    @cached_property
    def text(self) -> str:
        inner = ", ".join(map(str, self.args)) if self.args else str(self.number)
        return f"{self.op}({inner})"

    def __str__(self) -> str:
        return self.text


_unknowns = itertools.count(1)
# Beyond these a size is an unknown: chains of products and quotients grow without end.
_TERMS, _DEGREE, _DEPTH, _LARGEST = 64, 12, 6, 1 << 62


def unknown() -> SymbolicSize:
    """A new size of which nothing is known."""
    return SymbolicSize({(Atom("unknown", (), next(_unknowns)),): 1})


def atom_of(op: str, *args: SymbolicSize) -> SymbolicSize:
    """The size that an atom is; an unknown where it would be nested too deep."""
    atom = Atom(op, args)
    return SymbolicSize({(atom,): 1}) if atom.depth <= _DEPTH else unknown()


Symbol: TypeAlias = str | Atom
Number: TypeAlias = int | Fraction
Monomial: TypeAlias = tuple[Symbol, ...]


class SymbolicSize:
    """A polynomial with rational coefficients; equal sizes are equal objects."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: Mapping[Monomial, Number]) -> None:
        self.terms = {
            m: c.numerator if isinstance(c, Fraction) and c.denominator == 1 else c
            for m, c in terms.items()
            if c
        }
        self._hash = hash(frozenset(self.terms.items()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SymbolicSize) and self.terms == other.terms

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __add__(self, other: object) -> SymbolicSize:
        terms = dict(self.terms)
        for m, c in size(other).terms.items():
            terms[m] = terms.get(m, 0) + c
        too_many = len(terms) > _TERMS or any(_large(c) for c in terms.values())
        return unknown() if too_many else SymbolicSize(terms)

    def __mul__(self, other: object) -> SymbolicSize:
        terms: dict[Monomial, Number] = {}
        factor = size(other)
        if len(self.terms) * len(factor.terms) > _TERMS:
            return unknown()
        for m, c in self.terms.items():
            for n, d in factor.terms.items():
                key = tuple(sorted((*m, *n), key=str))
                terms[key] = terms.get(key, 0) + c * d
                if len(key) > _DEGREE or _large(terms[key]):
                    return unknown()
        return SymbolicSize(terms)

    def __neg__(self) -> SymbolicSize:
        return self * -1

    def __sub__(self, other: object) -> SymbolicSize:
        return self + -size(other)

    def __rsub__(self, other: object) -> SymbolicSize:
        return size(other).__sub__(self)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: object) -> SymbolicSize:
        return rounded_down(self / other)

    def __rfloordiv__(self, other: object) -> SymbolicSize:
        return rounded_down(size(other) / self)

    def __truediv__(self, other: object) -> SymbolicSize:
        divisor = size(other)
        if divisor.terms:
            n, d = next(iter(divisor.terms.items()))
            parts = {without(m, n): Fraction(c) / d for m, c in self.terms.items()}
            quotient = SymbolicSize({m: c for m, c in parts.items() if m is not None})
            if not any(_large(c) for c in parts.values()) and quotient * divisor == self:
                return quotient
        return atom_of("quotient", self, divisor)

    def __rtruediv__(self, other: object) -> SymbolicSize:
        return size(other).__truediv__(self)

    def __mod__(self, other: object) -> SymbolicSize:
        return self - self // size(other) * size(other)

    def __rmod__(self, other: object) -> SymbolicSize:
        return size(other).__mod__(self)

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        parts = []
        for m, c in self.terms.items():
            factors = [str(s) for s in m]
            parts.append("*".join(factors if c == 1 and m else [str(c), *factors]))
        return " + ".join(parts)

    __repr__ = __str__

    @property
    def number(self) -> Number | None:
        """The value, if it is a constant."""
        if not self.terms:
            return 0
        return self.terms.get(()) if len(self.terms) == 1 else None

    @property
    def whole(self) -> bool:
        """Whether its value is an integer for all integers that its symbols may stand for."""
        return all(
            isinstance(c, int) and not any(isinstance(s, Atom) and s.op == "quotient" for s in m)
            for m, c in self.terms.items()
        )

    @property
    def symbols(self) -> set[Symbol]:
        """All symbols and atoms, those inside of atoms too."""
        symbols: set[Symbol] = set()
        for m in self.terms:
            for s in m:
                symbols.add(s)
                if isinstance(s, Atom):
                    for arg in s.args:
                        symbols |= arg.symbols
        return symbols

    @property
    def settled(self) -> bool:
        """Whether nothing unknown is in it."""
        return not any(isinstance(s, Atom) and s.op == "unknown" for s in self.symbols)

    @property
    def nonnegative(self) -> bool:
        """Whether it is 0 or more for all sizes that its symbols may stand for."""
        return all(c > 0 and all(map(_never_negative, m)) for m, c in self.terms.items())

    @property
    def positive(self) -> bool:
        """Whether it is 1 or more for all sizes that its symbols may stand for."""
        return self.nonnegative and self.terms.get((), 0) >= 1


def _never_negative(symbol: Symbol) -> bool:
    if isinstance(symbol, str):
        return True
    return symbol.op != "unknown" and all(a.nonnegative for a in symbol.args)


def sign(value: SymbolicSize) -> int | None:
    """The sign of a value, where it is the same whatever its symbols stand for."""
    if not value:
        return 0
    return 1 if value.positive else -1 if (-value).positive else None


def _large(number: Number) -> bool:
    return max(abs(number.numerator), number.denominator) > _LARGEST


def size(value: object) -> SymbolicSize:
    """A number or a symbol as a Size; a Size as it is."""
    return value if isinstance(value, SymbolicSize) else _size(value)


@lru_cache(4096)
def _size(value: Any) -> SymbolicSize:
    if isinstance(value, str | Atom):
        return SymbolicSize({(value,): 1})
    number = value if isinstance(value, Fraction) else int(value)
    return SymbolicSize({(): number}) if not _large(number) else unknown()


def without(m: Monomial, n: Monomial) -> Monomial | None:
    """The factors of m that are not those of n; None where n does not divide m."""
    left = list(m)
    for s in n:
        if s not in left:
            return None
        left.remove(s)
    return tuple(left)


def rounded_down(value: SymbolicSize) -> SymbolicSize:
    """The floor: what is whole stays a polynomial, the rest becomes an atom."""
    integers: dict[Monomial, Number] = {}
    rest: dict[Monomial, Number] = {}
    for m, c in value.terms.items():
        # An atom that is not rounded itself (a quotient) is no integer.
        integral = not any(isinstance(s, Atom) and s.op == "quotient" for s in m)
        integer = c if isinstance(c, int) and integral else math.floor(c) if integral else 0
        integers[m] = integer
        rest[m] = c - integer
    left = SymbolicSize(rest)
    number = left.number
    if number is not None:
        return SymbolicSize(integers) + math.floor(number)
    return SymbolicSize(integers) + atom_of("floor", left)


def product(values: Iterable[SymbolicSize]) -> SymbolicSize:
    total = size(1)
    for value in values:
        total = total * value
    return total


def evaluate(value: SymbolicSize, sizes: Mapping[Symbol, int]) -> Number | None:
    """The value for given symbols; None where an unknown decides."""
    total: Number = 0
    for m, c in value.terms.items():
        term = c
        for s in m:
            factor = _atom(s, sizes) if isinstance(s, Atom) else sizes.get(s)
            if factor is None:
                return None
            term *= factor
        total += term
    return total


def _atom(atom: Atom, sizes: Mapping[Symbol, int]) -> Number | None:
    args = [evaluate(a, sizes) for a in atom.args]
    numbers = [a for a in args if a is not None]
    if atom.op == "unknown" or len(numbers) < len(args):
        return None
    if atom.op == "floor":
        return math.floor(numbers[0])
    if atom.op == "min":
        return min(numbers)
    return Fraction(numbers[0]) / numbers[1] if numbers[1] else None

"""Sizes as polynomials over a model's symbols, and the constraints that a graph puts on them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Atom:
    """A term that is no polynomial: a quotient rounded down, a minimum, or an unknown."""

    op: str
    args: tuple[Size, ...] = ()
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


def unknown() -> Size:
    """A new size of which nothing is known."""
    return Size({(Atom("unknown", (), next(_unknowns)),): 1})


def _atom_of(op: str, *args: Size) -> Size:
    made = Atom(op, args)
    return Size({(made,): 1}) if made.depth <= _DEPTH else unknown()


Symbol: TypeAlias = str | Atom
Number: TypeAlias = int | Fraction
Monomial: TypeAlias = tuple[Symbol, ...]


class Size:
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
        return isinstance(other, Size) and self.terms == other.terms

    def __bool__(self) -> bool:
        return bool(self.terms)

    def __add__(self, other: Any) -> Size:
        terms = dict(self.terms)
        for m, c in size(other).terms.items():
            terms[m] = terms.get(m, 0) + c
        too_many = len(terms) > _TERMS or any(_large(c) for c in terms.values())
        return unknown() if too_many else Size(terms)

    def __mul__(self, other: Any) -> Size:
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
        return Size(terms)

    def __neg__(self) -> Size:
        return self * -1

    def __sub__(self, other: Any) -> Size:
        return self + -size(other)

    def __rsub__(self, other: Any) -> Size:
        return size(other).__sub__(self)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Any) -> Size:
        return rounded_down(self / other)

    def __rfloordiv__(self, other: Any) -> Size:
        return rounded_down(size(other) / self)

    def __truediv__(self, other: Any) -> Size:
        divisor = size(other)
        if len(divisor.terms) == 1:
            [(n, d)] = divisor.terms.items()
            parts = {_without(m, n): Fraction(c) / d for m, c in self.terms.items()}
            if None not in parts and not any(_large(c) for c in parts.values()):
                return Size({m: c for m, c in parts.items() if m is not None})
        return _atom_of("quotient", self, divisor)

    def __rtruediv__(self, other: Any) -> Size:
        return size(other).__truediv__(self)

    def __mod__(self, other: Any) -> Size:
        return self - self // size(other) * size(other)

    def __rmod__(self, other: Any) -> Size:
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
        found: set[Symbol] = set()
        for m in self.terms:
            for s in m:
                found.add(s)
                if isinstance(s, Atom):
                    for arg in s.args:
                        found |= arg.symbols
        return found

    @property
    def least(self) -> Number | None:
        """A lower bound where every symbol is at least 1 and every atom at least 0."""
        total: Number = 0
        for m, c in self.terms.items():
            if c < 0 and m:
                return None
            total += c if not any(isinstance(s, Atom) for s in m) else 0
        return total


def _large(number: Number) -> bool:
    return max(abs(number.numerator), number.denominator) > _LARGEST


def size(value: Any) -> Size:
    """A number or a symbol as a Size; a Size as it is."""
    if isinstance(value, Size):
        return value
    if isinstance(value, str | Atom):
        return Size({(value,): 1})
    number = value if isinstance(value, Fraction) else int(value)
    return Size({(): number}) if not _large(number) else unknown()


def _without(m: Monomial, n: Monomial) -> Monomial | None:
    left = list(m)
    for s in n:
        if s not in left:
            return None
        left.remove(s)
    return tuple(left)


def rounded_down(value: Size) -> Size:
    """The floor: what is whole stays a polynomial, the rest becomes an atom."""
    whole: dict[Monomial, Number] = {}
    rest: dict[Monomial, Number] = {}
    for m, c in value.terms.items():
        # An atom that is not rounded itself (a quotient) is no integer.
        integral = not any(isinstance(s, Atom) and s.op == "quotient" for s in m)
        kept = c if isinstance(c, int) and integral else math.floor(c) if integral else 0
        whole[m] = kept
        rest[m] = c - kept
    left = Size(rest)
    known = left.number
    if known is not None:
        return Size(whole) + math.floor(known)
    return Size(whole) + _atom_of("floor", left)


def smaller(a: Size, b: Size) -> Size:
    """The size min(a, b), where it can be told or as an atom."""
    if (low := (b - a).least) is not None and low >= 0:
        return a
    if (low := (a - b).least) is not None and low >= 0:
        return b
    return _atom_of("min", a, b)


def larger(a: Size, b: Size) -> Size:
    """The size max(a, b), where it can be told or as an atom."""
    return -smaller(-a, -b)


def product(values: Iterable[Size]) -> Size:
    total = size(1)
    for value in values:
        total = total * value
    return total


@dataclass(frozen=True)
class Constraint:
    """A constraint of a node on sizes; a `soft` one may fail (a slice then ends earlier)."""

    kind: str  # equal, broadcast, least (a >= b), divides (a % b == 0)
    a: Size
    b: Size
    soft: bool = False

    def holds(self, sizes: Mapping[Symbol, int]) -> bool:
        """Whether it holds; what depends on an unknown is taken to hold."""
        a, b = evaluate(self.a, sizes), evaluate(self.b, sizes)
        if a is None or b is None:
            return True
        if self.kind == "equal":
            return a == b
        if self.kind == "broadcast":
            return a == b or a == 1 or b == 1
        if self.kind == "least":
            return a >= b
        return b != 0 and a % b == 0


def evaluate(value: Size, sizes: Mapping[Symbol, int]) -> Number | None:
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


@dataclass
class System:
    """Equations between sizes, solved as they come, and all constraints, to check numbers by."""

    order: list[str] = field(default_factory=list)
    """The symbols in the order of the inputs: a later one is expressed by earlier ones."""
    known: dict[Symbol, Size] = field(default_factory=dict)
    constraints: dict[Constraint, None] = field(default_factory=dict)

    def resolve(self, value: Size) -> Size:
        """The value with everything solved put in."""
        if not self.known or not (value.symbols & self.known.keys()):
            return value
        total = size(0)
        for m, c in value.terms.items():
            total = total + product(self._symbol(s) for s in m) * c
        return total

    def _symbol(self, symbol: Symbol) -> Size:
        if symbol in self.known:
            self.known[symbol] = self.resolve(self.known[symbol])
            return self.known[symbol]
        if isinstance(symbol, Atom) and symbol.args:
            args = [self.resolve(a) for a in symbol.args]
            if tuple(args) == symbol.args:
                return size(symbol)
            if symbol.op == "floor":
                return rounded_down(args[0])
            return smaller(*args) if symbol.op == "min" else args[0] / args[1]
        return size(symbol)

    def require(self, kind: str, a: Size, b: Size, *, soft: bool = False) -> None:
        """Add a constraint; equations are solved for a symbol where one can be."""
        a, b = self.resolve(a), self.resolve(b)
        trivial = a == b if kind != "divides" else (a / b).whole
        low = (a - b).least if kind == "least" else None
        if trivial or (low is not None and low >= 0):
            return
        if kind == "broadcast" and 1 in (a.number, b.number):
            return
        self.constraints[Constraint(kind, a, b, soft)] = None
        self.__dict__.pop("resolved", None)
        if kind in ("equal", "broadcast"):
            self._solve(a - b)

    def _solve(self, zero: Size) -> None:
        common = _common(list(zero.terms))
        zero = Size({_without(m, common) or (): c for m, c in zero.terms.items()})
        found: list[tuple[int, int, Symbol, Size]] = []
        for m, c in zero.terms.items():
            if len(m) != 1 or (isinstance(m[0], Atom) and m[0].op != "unknown"):
                continue
            symbol = m[0]
            rest = Size({n: d for n, d in zero.terms.items() if n != m}) * (Fraction(-1) / c)
            whole = all(isinstance(d, int) for d in rest.terms.values())
            if symbol in rest.symbols or not whole or (rest.number or 0) < 0:
                continue
            negative = any(d < 0 for d in rest.terms.values())
            # An unknown is never expressed by others' unknowns where a symbol would do.
            rank = 1 if isinstance(symbol, Atom) else -self.place(symbol)
            found.append((isinstance(symbol, str) + 2 * negative, rank, symbol, rest))
        if found:
            _, _, symbol, rest = min(found, key=lambda f: f[:2])
            self.known[symbol] = rest

    def place(self, symbol: str) -> int:
        """How early the inputs name the symbol; symbols that they do not name come last."""
        return self.order.index(symbol) if symbol in self.order else len(self.order)

    def violated(self, sizes: Mapping[Symbol, int]) -> list[Constraint]:
        """The constraints that do not hold for sizes of the free symbols; hard ones first."""
        bad = [d for d in self.resolved if not d.holds(sizes)]
        return sorted(bad, key=lambda d: d.soft)

    @cached_property
    def resolved(self) -> list[Constraint]:
        """The constraints in terms of the free symbols, without those that always hold."""
        every = {
            Constraint(d.kind, self.resolve(d.a), self.resolve(d.b), d.soft): None
            for d in self.constraints
        }
        return [d for d in every if d.a != d.b and not (d.kind == "divides" and (d.a / d.b).whole)]

    def divisors(self, symbol: str) -> set[int]:
        """The numbers by which the constraints divide sizes that contain the symbol."""
        found: set[int] = set()
        for constraint in self.resolved:
            for value in (constraint.a, constraint.b):
                for atom in value.symbols:
                    if isinstance(atom, Atom) and any(symbol in a.symbols for a in atom.args):
                        for arg in atom.args:
                            found |= {
                                Fraction(c).denominator for m, c in arg.terms.items() if symbol in m
                            }
            if constraint.kind == "divides" and symbol in constraint.a.symbols:
                number = constraint.b.number
                found |= {int(number)} if number else set()
        return {d for d in found if d > 1}


def _common(monomials: Sequence[Monomial]) -> Monomial:
    """The symbols that all monomials share."""
    if not monomials:
        return ()
    shared: list[Symbol] = []
    rest = [list(m) for m in monomials]
    for s in monomials[0]:
        if all(s in m for m in rest):
            shared.append(s)
            for m in rest:
                m.remove(s)
    return tuple(shared)

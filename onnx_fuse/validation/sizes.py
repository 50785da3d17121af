"""The constraints that a graph puts on the sizes of its inputs, and what they make of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from onnx_fuse.ir.sizes import (
    Atom,
    Monomial,
    Number,
    Symbol,
    SymbolicSize,
    atom_of,
    evaluate,
    product,
    rounded_down,
    size,
    without,
)


def least(value: SymbolicSize) -> Number | None:
    """A lower bound where every symbol is at least 1 and every atom at least 0."""
    total: Number = 0
    for m, c in value.terms.items():
        if c < 0 and m:
            return None
        total += c if not any(isinstance(s, Atom) for s in m) else 0
    return total


def smaller(a: SymbolicSize, *others: SymbolicSize) -> SymbolicSize:
    """The smallest of sizes of such symbols, where it can be told, or as an atom."""
    for b in others:
        above, below = least(b - a), least(a - b)
        if above is None or above < 0:
            a = b if below is not None and below >= 0 else atom_of("min", a, b)
    return a


def larger(a: SymbolicSize, *others: SymbolicSize) -> SymbolicSize:
    """The largest of sizes of such symbols, where it can be told, or as an atom."""
    return -smaller(-a, *(-b for b in others))


@dataclass(frozen=True)
class Constraint:
    """A constraint of a node on sizes; a `soft` one may fail (a slice then ends earlier)."""

    kind: str  # equal, broadcast, least (a >= b), divides (a % b == 0)
    a: SymbolicSize
    b: SymbolicSize
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


@dataclass
class System:
    """Equations between sizes, solved as they come, and all constraints, to check numbers by."""

    order: list[str] = field(default_factory=list)
    """The symbols in the order of the inputs: a later one is expressed by earlier ones."""
    solved: dict[Symbol, SymbolicSize] = field(default_factory=dict)
    constraints: dict[Constraint, None] = field(default_factory=dict)

    def resolve(self, value: SymbolicSize) -> SymbolicSize:
        """The value with everything solved put in."""
        if not self.solved or not (value.symbols & self.solved.keys()):
            return value
        total = size(0)
        for m, c in value.terms.items():
            total = total + product(self._symbol(s) for s in m) * c
        return total

    def _symbol(self, symbol: Symbol) -> SymbolicSize:
        if symbol in self.solved:
            self.solved[symbol] = self.resolve(self.solved[symbol])
            return self.solved[symbol]
        if isinstance(symbol, Atom) and symbol.args:
            args = [self.resolve(a) for a in symbol.args]
            if tuple(args) == symbol.args:
                return size(symbol)
            if symbol.op == "floor":
                return rounded_down(args[0])
            return smaller(*args) if symbol.op == "min" else args[0] / args[1]
        return size(symbol)

    def require(self, kind: str, a: SymbolicSize, b: SymbolicSize, *, soft: bool = False) -> None:
        """Add a constraint; equations are solved for a symbol where one can be."""
        a, b = self.resolve(a), self.resolve(b)
        trivial = a == b if kind != "divides" else (a / b).whole
        low = least(a - b) if kind == "least" else None
        if trivial or (low is not None and low >= 0):
            return
        if kind == "broadcast" and 1 in (a.number, b.number):
            return
        self.constraints[Constraint(kind, a, b, soft)] = None
        self.__dict__.pop("resolved", None)
        if kind in ("equal", "broadcast"):
            self._solve(a - b)

    def _solve(self, zero: SymbolicSize) -> None:
        common = _common_symbols(list(zero.terms))
        zero = SymbolicSize({without(m, common) or (): c for m, c in zero.terms.items()})
        candidates: list[tuple[int, int, Symbol, SymbolicSize]] = []
        for m, c in zero.terms.items():
            if len(m) != 1 or (isinstance(m[0], Atom) and m[0].op != "unknown"):
                continue
            symbol = m[0]
            rest = SymbolicSize({n: d for n, d in zero.terms.items() if n != m}) * (
                Fraction(-1) / c
            )
            integral = all(isinstance(d, int) for d in rest.terms.values())
            if symbol in rest.symbols or not integral or (rest.number or 0) < 0:
                continue
            negative = any(d < 0 for d in rest.terms.values())
            # An unknown is never expressed by others' unknowns where a symbol would do.
            rank = 1 if isinstance(symbol, Atom) else -self.place(symbol)
            candidates.append((isinstance(symbol, str) + 2 * negative, rank, symbol, rest))
        if candidates:
            _, _, symbol, rest = min(candidates, key=lambda f: f[:2])
            self.solved[symbol] = rest

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
        divisors: set[int] = set()
        for constraint in self.resolved:
            for value in (constraint.a, constraint.b):
                for atom in value.symbols:
                    if isinstance(atom, Atom) and any(symbol in a.symbols for a in atom.args):
                        for arg in atom.args:
                            divisors |= {
                                Fraction(c).denominator for m, c in arg.terms.items() if symbol in m
                            }
            if constraint.kind == "divides" and symbol in constraint.a.symbols:
                number = constraint.b.number
                divisors |= {int(number)} if number else set()
        return {d for d in divisors if d > 1}


def _common_symbols(monomials: Sequence[Monomial]) -> Monomial:
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

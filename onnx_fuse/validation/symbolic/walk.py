"""Shapes and small integer values, followed through a graph node by node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import onnx_ir as ir
from onnx_ir import Node, Value

from onnx_fuse.ir.build import const_array
from onnx_fuse.ir.entries import Array
from onnx_fuse.ir.sizes import SymbolicSize, size, unknown
from onnx_fuse.validation.sizes import System
from onnx_fuse.validation.symbolic.guesses import GuessedEntries

T = TypeVar("T")
Shape = tuple[SymbolicSize, ...]


@dataclass(frozen=True)
class Fact:
    """The facts about a value: its shape, and a bound.

    `top` bounds entries from above, exclusively: one for all, or one for each along the last axis.
    """

    shape: Shape | None = None
    top: Shape | None = None


@dataclass(frozen=True)
class Lengths:
    """The entries of an input that says how many tokens there are.

    They are `total`, or of each sequence its last token's place, which is at most `total` - 1.
    """

    total: SymbolicSize
    places: bool


NOTHING = Fact()
Rule = Callable[["Walk", Node], Sequence[Fact]]
"""A Fact for each output that the rule knows of."""


@dataclass
class Walk:
    """One pass over a graph; `branches` says which way an If on an input's value goes."""

    system: System
    rules: Mapping[str, Rule]
    branches: Mapping[str, bool | int] = field(default_factory=dict)
    facts: dict[Value, Fact] = field(default_factory=dict)
    indexed: list[tuple[SymbolicSize, SymbolicSize]] = field(default_factory=list)
    """(size of an axis, size that its indices reach): a mask that positions pick from."""
    lengths: dict[str, Lengths] = field(default_factory=dict)
    """Inputs that say how many tokens there are, by name."""
    alike: list[tuple[SymbolicSize, SymbolicSize]] = field(default_factory=list)
    """Pairs of sizes that a Reshape to the same rank exchanges, axis by axis."""
    _named: dict[str, SymbolicSize] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.guesses = GuessedEntries(self.shape, self.system.resolve)

    def graph(self, graph: ir.Graph) -> None:
        """Follow the nodes in their order."""
        for node in graph:
            if node.op_type == "Constant":  # read where it is used
                continue
            facts = self._node(node)
            for value, fact in zip(node.outputs, facts, strict=False):
                if fact.shape is None and value.shape is not None:
                    fact = Fact(self.declared(value), fact.top)
                self.facts[value] = fact

    def _node(self, node: Node) -> Sequence[Fact]:
        name = f"{node.domain}:{node.op_type}" if node.domain else node.op_type
        rule = self.rules.get(name)
        try:
            self.guesses.follow(node)
            facts = rule(self, node) if rule is not None else ()
        except (IndexError, TypeError, ValueError, ZeroDivisionError):
            # A node that is wrong in itself is for the runtime to refuse, in its own words.
            facts = ()
        return [*facts, *([NOTHING] * (len(node.outputs) - len(facts)))]

    def declared(self, value: Value) -> Shape | None:
        """The shape that inference left on a value, its own names as unknowns."""
        if value.shape is None:
            return None
        dims: list[SymbolicSize] = []
        for d in value.shape:
            name = None if isinstance(d, int) else d.value
            if isinstance(d, int):
                dims.append(size(d))
            elif name in self.system.order:
                dims.append(size(name))
            else:
                fresh = unknown()
                dims.append(self._named.setdefault(name, fresh) if name else fresh)
        return tuple(dims)

    def fact(self, value: Value | None) -> Fact:
        if value is None:
            return NOTHING
        if value not in self.facts:
            shape = self.declared(value)
            array = const_array(value)
            top = None
            if array is not None:
                shape = tuple(size(n) for n in array.shape)
                if array.dtype.kind in "iu" and array.size:
                    top = (size(int(array.max()) + 1),)
            self.facts[value] = Fact(shape, top)
        return self.facts[value]

    def shape(self, value: Value | None) -> list[SymbolicSize] | None:
        """The sizes of a value, or None where they are not known."""
        shape = self.fact(value).shape
        return None if shape is None else [self.system.resolve(d) for d in shape]

    def entries(self, value: Value | None) -> Array | None:
        """The entries of a value, or None where they are not known."""
        return self.guesses.of(value)

    def numbers(self, value: Value | None) -> list[SymbolicSize | None] | None:
        """The entries of a vector or scalar, each a Size or None."""
        entries = self.entries(value)
        if entries is None:
            return None
        return [e if isinstance(e, SymbolicSize) else None for e in entries.flat]

    def ints(self, value: Value | None) -> list[int] | None:
        """The entries of a value as integers, or None where one is not known."""
        numbers = self.numbers(value)
        if numbers is None:
            return None
        ints = [n.number if n is not None else None for n in numbers]
        return None if None in ints else [int(n) for n in ints if n is not None]

    def same(self, a: SymbolicSize, b: SymbolicSize) -> SymbolicSize:
        """Demand that two sizes are equal, and return the size."""
        self.system.require("equal", a, b)
        return self.system.resolve(a)

    def broadcast(self, shapes: Sequence[Sequence[SymbolicSize] | None]) -> Shape | None:
        """The shape that all are broadcast to; axes of 1 give way."""
        complete = [s for s in shapes if s is not None]
        if len(complete) < len(shapes):
            return None
        rank = max((len(s) for s in complete), default=0)
        dims = []
        for axis in range(rank):
            here = [s[axis - rank] for s in complete if len(s) >= rank - axis]
            here = [d for d in here if d.number != 1]
            dim = here[0] if here else size(1)
            for other in here[1:]:
                self.system.require("broadcast", dim, other)
                dim = self.system.resolve(dim if dim.number is None else other)
            dims.append(dim)
        return tuple(dims)


class UnknownFact(ValueError):
    """A rule needs what is not known: then it says nothing of the node's results."""


def needed(fact: T | None) -> T:
    """The fact. Raises UnknownFact where there is none."""
    if fact is None:
        raise UnknownFact
    return fact


_PASSES_ON = ("Identity", "Squeeze", "Unsqueeze", "Reshape", "Cast", "Gather")


def origin(value: Value) -> Value:
    """The value that `value` is a copy of, through nodes that only pass it on."""
    node = value.producer()
    while node is not None and node.op_type in _PASSES_ON and node.inputs[0] is not None:
        value = node.inputs[0]
        node = value.producer()
    return value


def sizes_in(w: Walk, value: Value | None) -> list[SymbolicSize] | None:
    """A shape given as a tensor; sizes not known in it are unknowns."""
    numbers = w.numbers(value)
    if numbers is None:
        shape = w.shape(value)
        count = shape[0].number if shape else None
        return None if count is None else [unknown() for _ in range(int(count))]
    return [unknown() if n is None else w.system.resolve(n) for n in numbers]


def one(top: Shape | None) -> Shape | None:
    """A shape of one axis, and None for any other."""
    return top if top is not None and len(top) == 1 else None

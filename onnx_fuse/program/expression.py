"""What a pointwise call computes: loads, scalars, steps and stores."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """value = TABLE[name](args), computed in the arithmetic type of `dtype`."""

    name: str
    dtype: str
    args: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """Load `load` is read `step` elements further for each of load `index`, an axis of `size`.

    Negative indices count from the end; outside the axis the load is zero.
    """

    load: int
    index: int
    step: int
    size: int


@dataclass(frozen=True)
class Expression:
    """Values are numbered: loads (the Call's reads), then `scalars` (C type, value), then `steps`.

    `stores[i]` is the value that the Call's write `i` receives, converted to that tensor's dtype.
    """

    loads: int
    scalars: tuple[tuple[str, float], ...]
    steps: tuple[Operation, ...]
    stores: tuple[int, ...]
    rows: tuple[Row, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether a step is an element's place in row-major order in the call's own shape.

        Such a call may be reshaped. It may not be broadcast, permuted, or become a part of a kernel
        that walks other axes.
        """
        return any(step.name == "Iota" for step in self.steps)

    @property
    def name(self) -> str:
        """The steps' names in order, for listings."""
        return "+".join(["Gather"] * len(self.rows) + [s.name for s in self.steps]) or "Copy"


@dataclass(frozen=True)
class Tail:
    """Pointwise steps that a kernel takes each element through before it stores it.

    Load `own` of the expression is that element; the others, in order, are the elements at the same
    place of the call's "e1", "e2" and "e3". What is stored is of `dtype`. `reads` are the types of
    the others where they are not that element's, and `rows` says which of them (from 0) are one
    number for each element of the last axis.
    """

    expression: Expression
    own: int
    dtype: str
    reads: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.expression.name

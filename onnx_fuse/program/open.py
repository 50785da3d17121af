"""A Program over open sizes: what was lowered once, for every shape that meets its guards.

The guards and the program's numbers are tables of operations made from the polynomials of `size`
(see `formula`), so that another shape costs an evaluation: no lowering, no choice of kernels, no
text of kernels. `program.template` writes one to a file, and reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, cached_property, reduce
from operator import itemgetter, or_
from typing import Any

import numpy as np

from onnx_fuse.program.formula import Formulas
from onnx_fuse.program.size import OpenSize, Trace, expression, maximum, minimum


class SymbolicProgram:
    """An object with open sizes, which can be evaluated for other values of their symbols."""

    def __init__(self, made: object, trace: Trace, parts: Mapping[str, Any] | None = None) -> None:
        """`parts` are separately evaluable parts: `part` evaluates one, for less than all cost."""
        symbols = tuple(trace.values)
        # guards of size classes first, since most programs differ in these
        guards = sorted(trace.guards, key=lambda guard: guard.count(" <= ") < 2)
        recipes = {
            name: EvalPlan.of(part, symbols, often=True) for name, part in (parts or {}).items()
        }
        recipes[""] = EvalPlan.of(made, symbols)
        self.set(Formulas.of(guards, symbols), recipes)

    def set(self, guards: Formulas, recipes: Mapping[str, EvalPlan]) -> None:
        """Take what was made before; the recipe of the whole object is called ""."""
        self.guards, self.recipes = guards, recipes
        self.symbols = tuple(guards.symbols)

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether these values meet all guards, so that lowering would take the same decisions."""
        return self.guards.hold(values)

    def at(self, values: Mapping[str, int]) -> Any:
        """The object for these values of the symbols, which must meet the guards (see `holds`)."""
        return self.recipes[""].at(values[name] for name in self.symbols)

    def traced(self, values: Mapping[str, int]) -> Any:
        """The object over other open sizes."""
        return self.recipes[""].at(
            (values[name] for name in self.symbols), min=minimum, max=maximum
        )

    def part(self, name: str, values: Mapping[str, int]) -> Any:
        """The part of this name for these values of the symbols, None where there is none."""
        recipe = self.recipes.get(name)
        return None if recipe is None else recipe.at(values[symbol] for symbol in self.symbols)


Maker = Callable[[Sequence[Any]], Any]
"""What makes an object of its parts: `tuple`, `list`, or one of the classes below."""
EvalStep = tuple[Maker, Sequence[int]]
"""A maker, and the places of the parts."""
_Place = tuple[int, int]  # closed part, size or result of a step (0, 1, 2), and which of them


class EvalPlan:
    """The steps that rebuild an object for other sizes; parts without open sizes are shared.

    The recipe fills a list of places: first the parts without open sizes, then the sizes, then what
    each step makes of earlier places. One that is evaluated `often` keeps a getter for each step,
    which is faster; Python's garbage collector, which walks all that is kept, has less to do with
    the others. What the sizes that differ from those of the last evaluation have no part in is the
    same object again.
    """

    def __init__(
        self,
        closed: list[Any],
        sizes: Formulas,
        steps: list[EvalStep],
        result: int,
        *,
        often: bool = False,
    ) -> None:
        self.closed, self.sizes, self.steps, self.result = closed, sizes, steps, result
        self.often = often
        self._last: list[Any] | None = None  # the places of the last evaluation
        self._todo: dict[int, list[int]] = {}
        self._work = [(_getter(parts), _unless_made(*step)) for step in steps
                      for parts in (step[1],)] if often else None  # fmt: skip

    @classmethod
    def of(cls, value: object, symbols: Sequence[str], *, often: bool = False) -> EvalPlan:
        """The recipe of an object over these symbols."""
        return _Planner(value).recipe(symbols, often)

    def at(self, values: Iterable[Any], **functions: Callable[[Any, Any], Any]) -> Any:
        """The object with the sizes that these values give; `functions`: see `Formulas.at`."""
        sizes, first = self.sizes.at(values, **functions), len(self.closed)
        end = first + len(sizes)
        last = None if functions else self._last
        if last is None:
            places = [*self.closed, *sizes, *self.steps]
            todo: Sequence[int] = range(len(self.steps))
        else:
            pairs = enumerate(zip(sizes, last[first:end], strict=True))
            changed = sum([1 << i for i, (now, before) in pairs if now != before])
            if not changed:
                return last[self.result]
            places = last.copy()
            places[first:end] = sizes
            todo = self._after(changed)
        if self._work is None:
            for i in todo:
                make, parts = self.steps[i]
                places[end + i] = make([places[part] for part in parts])
        else:
            for i in todo:
                get, finish = self._work[i]
                operands = get(places)
                places[end + i] = operands if finish is None else finish(operands)
        if not functions:
            self._last = places
        return places[self.result]

    def _after(self, changed: int) -> list[int]:
        """The steps in which these sizes, a bit for each, have a part."""
        todo = self._todo.get(changed)
        if todo is None:
            if len(self._todo) >= 64:
                self._todo.clear()
            todo = [i for i, read in enumerate(self._read) if read & changed]
            self._todo[changed] = todo
        return todo

    @cached_property
    def _read(self) -> list[int]:
        """Of each step, a bit for each size that has a part in what it makes."""
        closed = len(self.closed)
        bits = [0] * closed + [1 << i for i in range(len(self.sizes.roots))]
        for _, parts in self.steps:
            bits.append(reduce(or_, (bits[part] for part in parts), 0))
        return bits[closed + len(self.sizes.roots) :]


class _Planner:
    """Finds the steps of an object."""

    def __init__(self, value: object) -> None:
        self._parts: list[Any] = []
        self._steps: list[tuple[Maker, list[_Place]]] = []
        self._sizes: dict[str, _Place] = {}  # by expression
        self._known: dict[Any, _Place] = {}
        self._objects: dict[int, tuple[Any, _Place | None]] = {}
        self._result = self._place(value)

    def recipe(self, symbols: Sequence[str], often: bool) -> EvalPlan:
        """The recipe, in which places are counted through."""
        first = (0, len(self._parts), len(self._parts) + len(self._sizes))
        steps: list[EvalStep] = [(make, [first[kind] + i for kind, i in parts])
                             for make, parts in self._steps]  # fmt: skip
        kind, i = self._result
        sizes = Formulas.of(self._sizes, symbols)
        return EvalPlan(self._parts, sizes, steps, first[kind] + i, often=often)

    def _place(self, value: object) -> _Place:
        """The place of a value, whether or not it holds sizes."""
        place = self._open(value)
        return self._closed(value) if place is None else place

    def _closed(self, value: object) -> _Place:
        """The place of a part without open sizes."""
        kind = type(value)
        key = (kind, value) if kind is int or kind is str else id(value)
        if key not in self._known:
            self._known[key] = 0, len(self._parts)
            self._parts.append(value)  # kept, so that its id stays its own
        return self._known[key]

    def _append(self, parts: list[_Place], make: Maker) -> _Place:
        """Append a step, and return the place of what it makes."""
        self._steps.append((make, parts))
        return 2, len(self._steps) - 1

    def _open(self, value: object) -> _Place | None:
        """The place of a value that holds open sizes; None for a value without any."""
        if type(value) in PLAIN:
            return None
        if type(value) is OpenSize:
            return self._sizes.setdefault(expression(value), (1, len(self._sizes)))
        entry = self._objects.get(id(value))
        if entry is not None:
            return entry[1]
        place = self._structure(value)
        self._objects[id(value)] = value, place  # kept, so that its id stays its own
        return place

    def _structure(self, value: object) -> _Place | None:
        kind: Any = type(value)
        if isinstance(value, tuple | list):
            places = self._places(value)
            make: Maker = tuple if isinstance(value, tuple) else list
            return None if places is None else self._append(places, make)
        if isinstance(value, dict):
            places = self._places(value.values())
            return None if places is None else self._append(places, Dict(tuple(value)))
        if isinstance(value, np.ndarray):
            places = self._places(value.reshape(-1)) if value.dtype == object else None
            return None if places is None else self._append(places, Array(value.shape))
        fixed, names, parts = {}, [], []
        for name in field_names(kind):
            inner = getattr(value, name)
            place = None if type(inner) in PLAIN else self._open(inner)
            if place is None:
                fixed[name] = inner
            else:
                names.append(name)
                parts.append(place)
        return self._append(parts, InstanceOf(kind, fixed, tuple(names))) if parts else None

    def _places(self, values: Iterable[Any]) -> list[_Place] | None:
        """The places of several values, None where none of them holds sizes."""
        places = [(None if type(value) in PLAIN else self._open(value), value) for value in values]
        if all(place is None for place, _ in places):
            return None
        return [self._closed(value) if place is None else place for place, value in places]


def _unless_made(make: Maker, parts: Sequence[int]) -> Maker | None:
    # what takes several places out of a list gives a tuple already
    return None if make is tuple and len(parts) > 1 else make


def _getter(places: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that takes the items at these places out of a list."""
    if len(places) == 1:
        return itemgetter(slice(places[0], places[0] + 1))
    return itemgetter(*places)


@dataclass(frozen=True)
class Dict:
    """Makes a dict of its values."""

    keys: tuple[Any, ...]

    def __call__(self, parts: Sequence[Any]) -> dict[Any, Any]:
        return dict(zip(self.keys, parts, strict=True))


@dataclass(frozen=True)
class Array:
    """Makes an array of int64 of its elements."""

    shape: tuple[int, ...]

    def __call__(self, parts: Sequence[Any]) -> np.ndarray[Any, Any]:
        return np.array(parts, np.int64).reshape(self.shape)


@dataclass(frozen=True)
class InstanceOf:
    """Makes an instance of a dataclass, unchecked, of the fields `names`; others are `fixed`."""

    kind: type[Any]
    fixed: dict[str, Any]
    names: tuple[str, ...]

    def __call__(self, parts: Sequence[Any]) -> Any:
        instance = object.__new__(self.kind)
        inside = instance.__dict__
        inside.update(self.fixed)
        inside.update(zip(self.names, parts, strict=True))
        return instance


PLAIN = frozenset({type(None), bool, int, float, str, bytes})
"""The types of values that have no parts."""


@cache
def field_names(kind: object) -> tuple[str, ...]:
    """Names of a dataclass's fields; nothing else holds sizes."""
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()


@cache
def defaults(kind: type[Any]) -> dict[str, Any]:
    """The default values of a dataclass's fields that have one."""
    return {f.name: f.default for f in fields(kind) if f.default is not MISSING}

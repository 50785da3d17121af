"""A Program over open sizes: what was lowered once, for every shape that meets its guards.

The guards and the program's numbers are Python code made from the polynomials of `size`, so that
another shape costs an evaluation: no lowering, no choice of kernels, no text of kernels.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from operator import itemgetter
from types import CodeType
from typing import Any

import numpy as np

from onnx_fuse.program.size import Size, Trace, expression, maximum, minimum


class Open:
    """An object with open sizes, which can be evaluated for other values of their symbols."""

    def __init__(self, made: Any, trace: Trace, parts: Mapping[str, Any] | None = None) -> None:
        """`parts` are objects that `part` makes by themselves, for less than `made` costs."""
        symbols = tuple(trace.values)
        # guards of size classes first, since most programs differ in these
        guards = tuple(sorted(trace.guards, key=lambda guard: guard.count(" <= ") < 2))
        checks = "".join(f"    if not ({guard}): return False\n" for guard in guards)
        code = _compiled(f"def holds({', '.join(symbols)}):\n{checks}    return True\n")
        recipes = {name: Recipe(part, symbols, often=True) for name, part in (parts or {}).items()}
        self._set(symbols, guards, code, Recipe(made, symbols), recipes)

    def _set(
        self,
        symbols: tuple[str, ...],
        guards: tuple[str, ...],
        code: CodeType,
        whole: Recipe,
        parts: Mapping[str, Recipe],
    ) -> None:
        self.symbols, self.guards, self._code = symbols, guards, code
        self._whole, self._parts = whole, parts
        self._holds: Callable[..., bool] = _function(code, "holds")

    def __getstate__(self) -> tuple[Any, ...]:
        """For pickle, with the compiled code: to compile it anew takes ten times as long."""
        table = _Table()
        parts = {name: recipe.sharing(table) for name, recipe in self._parts.items()}
        code = marshal.dumps(self._code)
        return self.symbols, self.guards, code, self._whole.sharing(table), parts

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        symbols, guards, code, whole, parts = state
        self._set(symbols, guards, marshal.loads(code), whole, parts)

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether these values meet all guards, so that lowering would take the same decisions."""
        return self._holds(*(values[name] for name in self.symbols))

    def at(self, values: Mapping[str, int]) -> Any:
        """The object for these values of the symbols, which must meet the guards (see `holds`)."""
        return self._whole.at(values[name] for name in self.symbols)

    def part(self, name: str, values: Mapping[str, int]) -> Any:
        """The part of this name for these values of the symbols, None where there is none."""
        recipe = self._parts.get(name)
        return None if recipe is None else recipe.at(values[symbol] for symbol in self.symbols)


def _compiled(text: str) -> CodeType:
    return compile(text, "<open sizes>", "exec")  # text of our own making


def _function(code: CodeType, name: str) -> Callable[..., Any]:
    names: dict[str, Any] = {"min": minimum, "max": maximum}  # which leave sizes open
    exec(code, names)
    found: Callable[..., Any] = names[name]
    return found


Step = tuple[int, tuple[int, ...], Callable[[Sequence[Any]], Any]]
"""(place of the result, places of its parts, what makes it of them)."""
_Work = tuple[int, Callable[[list[Any]], Sequence[Any]], Callable[[Sequence[Any]], Any] | None]


class Recipe:
    """The steps that rebuild an object for other sizes; parts without open sizes are shared.

    The recipe fills a list of places. A place holds a part without open sizes, what a step makes of
    earlier places, or one of the open sizes, which are counted from the end. One that is evaluated
    `often` keeps a getter for each step, which is faster; Python's garbage collector, which walks
    all that is kept, has less to do with the others.
    """

    def __init__(self, value: Any, symbols: Sequence[str], *, often: bool = False) -> None:
        self._places: list[Any] = []
        self._steps: list[Step] = []
        self._sizes: dict[str, int] = {}  # expression -> its place
        self._known: dict[Any, int] = {}
        self._objects: dict[int, tuple[Any, int | None]] = {}
        result = self._place(value)
        text = "".join(f"{size}, " for size in reversed(self._sizes))
        code = _compiled(f"def numbers({', '.join(symbols)}):\n    return ({text})\n")
        self._set(self._places, self._steps, result, code, often)
        del self._sizes, self._known, self._objects

    def _set(
        self, places: list[Any], steps: list[Step], result: int, code: CodeType, often: bool
    ) -> None:
        self._places, self._steps, self._result, self._code = places, steps, result, code
        self._numbers = _function(code, "numbers")
        self._work: list[_Work] | None = [_work(step) for step in steps] if often else None

    def __getstate__(self) -> tuple[Any, ...]:
        often = self._work is not None
        return self._places, self._steps, self._result, marshal.dumps(self._code), often

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        places, steps, result, code, often = state
        self._set(places, steps, result, marshal.loads(code), often)

    def sharing(self, table: _Table) -> Recipe:
        """The same recipe, in which equal parts are one object, also with others of the table."""
        made = object.__new__(Recipe)
        places, steps = map(table.one, self._places), map(table.one, self._steps)
        made._set([*places], [*steps], self._result, self._code, self._work is not None)
        return made

    def at(self, values: Iterable[int]) -> Any:
        """The object with the sizes that these values of the symbols give."""
        places = [*self._places, *self._numbers(*values)]
        if self._work is None:
            for place, parts, make in self._steps:
                places[place] = make([places[part] for part in parts])
            return places[self._result]
        for place, get, known in self._work:
            found = get(places)
            places[place] = found if known is None else known(found)
        return places[self._result]

    def _new(self, content: Any = None) -> int:
        self._places.append(content)
        return len(self._places) - 1

    def _place(self, value: Any) -> int:
        """The place of a value, whether or not it holds sizes."""
        found = self._open(value)
        return self._closed(value) if found is None else found

    def _closed(self, value: Any) -> int:
        """The place of a part without open sizes."""
        kind = type(value)
        key = (kind, value) if kind is int or kind is str else id(value)
        if key not in self._known:
            self._known[key] = self._new(value)  # kept, so that its id stays its own
        return self._known[key]

    def _append(self, parts: Sequence[int], make: Callable[[Sequence[Any]], Any]) -> int:
        """Append a step, and return the place of what it makes."""
        place = self._new()
        self._steps.append((place, tuple(parts), make))
        return place

    def _open(self, value: Any) -> int | None:
        """The place of a value that holds open sizes; None for a value without any."""
        kind = type(value)
        if kind in _PLAIN:
            return None
        if kind is Size:
            text = expression(value)
            return self._sizes.setdefault(text, -1 - len(self._sizes))
        known = self._objects.get(id(value))
        if known is not None:
            return known[1]
        found = self._structure(value)
        self._objects[id(value)] = value, found  # kept, so that its id stays its own
        return found

    def _structure(self, value: Any) -> int | None:
        kind: Any = type(value)
        if isinstance(value, tuple | list):
            found = self._parts(value)
            return (
                None
                if found is None
                else self._append(found, tuple if isinstance(value, tuple) else list)
            )
        if isinstance(value, dict):
            found = self._parts(value.values())
            return None if found is None else self._append(found, _Dict(tuple(value)))
        if isinstance(value, np.ndarray):
            found = self._parts(value.reshape(-1)) if value.dtype == object else None
            return None if found is None else self._append(found, _Array(value.shape))
        fixed, names, parts = {}, [], []
        for name in _fields(kind):
            inner = getattr(value, name)
            place = None if type(inner) in _PLAIN else self._open(inner)
            if place is None:
                fixed[name] = inner
            else:
                names.append(name)
                parts.append(place)
        return self._append(parts, _Instance(kind, fixed, tuple(names))) if parts else None

    def _parts(self, values: Iterable[Any]) -> list[int] | None:
        """The places of several values, None where none of them holds sizes."""
        places = [(None if type(value) in _PLAIN else self._open(value), value) for value in values]
        if all(place is None for place, _ in places):
            return None
        return [self._closed(value) if place is None else place for place, value in places]


def _work(step: Step) -> _Work:
    """A step with a function that gets its parts."""
    place, parts, make = step
    # what takes several places out of a list gives a tuple already
    return place, _getter(parts), None if make is tuple and len(parts) > 1 else make


def _getter(places: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that takes the items at these places out of a list."""
    if len(places) == 1:
        first = places[0]
        return itemgetter(slice(first, first + 1 or None))
    return itemgetter(*places)


@dataclass(frozen=True)
class _Dict:
    keys: tuple[Any, ...]

    def __call__(self, parts: Sequence[Any]) -> dict[Any, Any]:
        return dict(zip(self.keys, parts, strict=True))


@dataclass(frozen=True)
class _Array:
    shape: tuple[int, ...]

    def __call__(self, parts: Sequence[Any]) -> np.ndarray[Any, Any]:
        return np.array(parts, np.int64).reshape(self.shape)


@dataclass(frozen=True)
class _Instance:
    """An instance of a dataclass, unchecked: some fields are as they were."""

    kind: Any
    fixed: dict[str, Any]
    names: tuple[str, ...]

    def __call__(self, parts: Sequence[Any]) -> Any:
        made = object.__new__(self.kind)
        inside = made.__dict__
        inside.update(self.fixed)
        inside.update(zip(self.names, parts))  # noqa: B905 (as many as names)
        return made


class _Table:
    """Parts that never change, each of which stands here once however many are equal to it.

    Half of a program's parts are equal to others, and to read them takes as long as all the rest.
    """

    def __init__(self) -> None:
        self._objects: dict[int, tuple[Any, Any]] = {}  # kept, so that their ids stay their own
        self._known: dict[Any, Any] = {}

    def one(self, value: Any) -> Any:
        """The object that stands for all that are equal to this one in type and bits."""
        if type(value) in _PLAIN:
            return value
        found = self._objects.get(id(value))
        if found is None:
            found = self._objects[id(value)] = value, self._of(value)
        return found[1]

    def _of(self, value: Any) -> Any:
        kind: Any = type(value)
        if kind is tuple:
            made = tuple([self.one(part) for part in value])
            return self._known.setdefault((kind, *map(_token, made)), made)
        if not _is_frozen(kind):
            return value
        inside = {name: self.one(part) for name, part in vars(value).items()}
        if kind is _Instance:  # whose dict nobody changes
            fixed = {name: self.one(part) for name, part in value.fixed.items()}
            key = ("fixed", *fixed, *map(_token, fixed.values()))
            inside["fixed"] = self._known.setdefault(key, fixed)
        made = object.__new__(kind)
        made.__dict__.update(inside)
        return self._known.setdefault((kind, *inside, *map(_token, inside.values())), made)


def _token(part: Any) -> Any:
    """What two parts have in common that are the same: 1, 1.0 and True are not, nor 0.0 and -0.0.

    One that is not plain is the same object.
    """
    kind = type(part)
    if kind is float:
        return kind, part.hex()
    return (kind, part) if kind in _PLAIN else id(part)


@cache
def _is_frozen(kind: Any) -> bool:
    """Whether it is a dataclass of objects that never change, which their fields make up."""
    found = getattr(kind, "__dataclass_params__", None)
    return found is not None and found.frozen and not hasattr(kind, "__slots__")


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    """Names of a dataclass's fields; nothing else holds sizes."""
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()

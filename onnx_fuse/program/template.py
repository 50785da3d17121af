"""An open program as plain data, for the cache and for compiled files: lists, numbers and texts.

Data hold a table of objects, each of which names earlier ones by number: plain values first, then
groups of tuples, dicts, arrays and instances of the classes in `CLASSES`, field by field. Equal
parts are one object. A recipe (see `open`) names the objects that it puts together. All these
numbers are one list, "words", which a file may keep as binary.

`read` builds nothing but these classes, calls nothing but their makers, and raises ValueError for
data that `write` has not made. What an object says is checked by `runtime.encoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

from onnx_fuse.errors import ModelError
from onnx_fuse.program.call import Buffer, Call, Program, Tensor
from onnx_fuse.program.epilogue import Epilogue
from onnx_fuse.program.formula import Formulas
from onnx_fuse.program.launch import Launch, Num, Ptr, Table, TensorMap
from onnx_fuse.program.open import (
    PLAIN,
    Array,
    Dict,
    EvalPlan,
    EvalStep,
    InstanceOf,
    Maker,
    SymbolicProgram,
    defaults,
    field_names,
)
from onnx_fuse.program.problem import Choice, Collective, GemmProblem, KernelConfig

CLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Buffer, Call, Choice, Collective, Epilogue, KernelConfig, Launch, Num, GemmProblem,
                 Program, Ptr, Table, Tensor, TensorMap)
}  # fmt: skip
"""The classes whose instances a file may hold, by name."""
_KNOWN = frozenset(CLASSES.values())
_NO_DATA = {"Call.expression", "Call.host", "Launch.early"}


def _left_out(name: str, value: object) -> bool:
    """Whether a field is for passes over a program alone; a collective's problem orders calls."""
    if name == "Call.problem":
        return not (value.__class__ is Collective or getattr(value, "kind", None) is Collective)
    return name in _NO_DATA


# ---- writing ------------------------------------------------------------------------------------


def write(opened: SymbolicProgram, array: Callable[[np.ndarray[Any, Any]], str]) -> dict[str, Any]:
    """The data of an open program without its guards.

    `array` keeps an array, and gives the name that it is read by.

    Raises ModelError for an object that a file cannot hold.
    """
    table = _ObjectTable(array)
    recipes = {name: _Shared(recipe, table) for name, recipe in opened.recipes.items()}
    plain, groups, words, place = table.data()
    heads = {name: shared.head(place, words) for name, shared in recipes.items()}
    return {"plain": plain, "groups": groups, "recipes": heads, "words": words}


class _Shared:
    """What a file holds of a recipe; equal parts, and equal steps, are one."""

    def __init__(self, recipe: EvalPlan, table: _ObjectTable) -> None:
        self._recipe = recipe
        closed, sizes = len(recipe.closed), len(recipe.sizes.roots)
        first = closed + sizes
        steps = _without_fields(recipe)
        needed = {recipe.result}
        for place in range(first + len(steps) - 1, first - 1, -1):
            if place in needed:
                needed.update(steps[place - first][1])
        rows = {
            place: table.row(recipe.closed[place]) for place in sorted(needed) if place < closed
        }
        self._closed = {row: i for i, row in enumerate(dict.fromkeys(rows.values()))}
        makers = {}
        for place, (make, parts) in enumerate(steps, first):
            if place not in needed:
                continue
            # few makers, to which fields without sizes are given as well
            fixed = _given(make.kind, make.fixed) if isinstance(make, InstanceOf) else {}
            more = [table.row(value) for value in fixed.values()]
            if isinstance(make, InstanceOf):
                make = InstanceOf(make.kind, {}, (*make.names, *fixed))
            makers[place] = table.row(make), parts, more
            for row in more:
                self._closed.setdefault(row, len(self._closed))
        moved = {place: self._closed[row] for place, row in rows.items()}
        last = len(self._closed) + sizes
        moved |= zip(range(closed, first), range(len(self._closed), last), strict=True)
        self._steps: dict[tuple[int, ...], int] = {}
        for place, (maker, parts, more) in makers.items():
            make = steps[place - first][0]
            mutable = make is list or isinstance(make, Dict | Array)
            key = (-place if mutable else 0, maker, *[moved[p] for p in parts])
            key += tuple([self._closed[row] for row in more])
            moved[place] = self._steps.setdefault(key, last + len(self._steps))
        self._result = moved[recipe.result]

    def head(self, place: Mapping[int, int], words: list[int]) -> list[Any]:
        """What describes it, beside the words that it appends."""
        words += [place[row] for row in self._closed]
        words += [place[maker] for _, maker, *_ in self._steps]
        words += [len(key) - 2 for key in self._steps]
        for _, _, *parts in self._steps:
            words += parts
        counts = len(self._closed), len(self._steps), sum(len(key) - 2 for key in self._steps)
        return [self._recipe.often, self._recipe.sizes.data, *counts, self._result]


def _without_fields(recipe: EvalPlan) -> list[EvalStep]:
    """The steps, without the fields of instances that no file holds."""
    values = [
        *recipe.closed,
        *[None] * len(recipe.sizes.roots),
        *[make for make, _ in recipe.steps],
    ]
    steps: list[EvalStep] = []
    for make, parts in recipe.steps:
        if isinstance(make, InstanceOf):
            label, given = make.kind.__name__, zip(make.names, parts, strict=True)
            pairs = [(n, p) for n, p in given if not _left_out(f"{label}.{n}", values[p])]
            make = InstanceOf(make.kind, make.fixed, tuple([n for n, _ in pairs]))
            parts = [p for _, p in pairs]
        steps.append((make, parts))
    return steps


_Label = tuple[str, tuple[str, ...], tuple[str, ...] | None]
"""What the objects of a group are, the names of their fields, and of a maker those to be given."""


class _ObjectTable:
    """Objects, each once however many are equal to it in type and bits."""

    def __init__(self, array: Callable[[np.ndarray[Any, Any]], str]) -> None:
        self._array = array
        self._rows: dict[Any, int] = {}
        self._depths: list[int] = []
        self._objects: dict[int, tuple[Any, int]] = {}  # kept, so that their ids stay their own

    def row(self, value: object) -> int:
        """The number of an object."""
        kind = type(value)
        if kind in PLAIN and kind is not bytes:
            return self._add((kind, value.hex() if type(value) is float else value), 0)
        if id(value) not in self._objects:
            self._objects[id(value)] = value, self._of(value)
        return self._objects[id(value)][1]

    def _add(self, key: object, depth: int) -> int:
        row = self._rows.setdefault(key, len(self._depths))
        if row == len(self._depths):
            self._depths.append(depth)
        return row

    def _of(self, value: Any) -> int:
        kind: Any = value.__class__
        label: _Label
        if value is tuple or value is list:
            label, parts = ("make", (), None), ["tuple" if value is tuple else "list"]
        elif kind is tuple or kind is list:
            label, parts = (kind.__name__, (), None), value
        elif kind is dict:
            label, parts = ("dict", (), None), [*chain(*value.items())]
        elif kind is np.ndarray:
            parts = [self._array(value), value.dtype.name, value.shape]
            label = "array", (), None
        elif kind is Dict or kind is Array:
            label, parts = (kind.__name__, (), None), [value.keys if kind is Dict else value.shape]
        elif kind is InstanceOf and value.kind in _KNOWN:
            label, parts = (value.kind.__name__, (), value.names), []
        elif kind in _KNOWN:
            fields = _given(kind, {name: getattr(value, name) for name in field_names(kind)})
            label, parts = (kind.__name__, tuple(fields), None), [*fields.values()]
        else:
            raise ModelError(f"a file cannot hold {value!r:.80}")
        rows = [self.row(part) for part in parts]
        depth = 1 + max((self._depths[row] for row in rows), default=0)
        return self._add((label, *rows), depth)

    def data(self) -> tuple[list[Any], list[Any], list[int], dict[int, int]]:
        """The plain values, the groups, their words, and the place of each row among the objects.

        A group's head has its label, and how many fields and how many objects there are.
        """
        plain = [key for key in self._rows if isinstance(key[0], type)]
        place = {self._rows[key]: i for i, key in enumerate(plain)}
        groups: dict[tuple[int, Any, int], list[tuple[int, list[int]]]] = {}
        for key, row in self._rows.items():
            if not isinstance(key[0], type):
                label, *rows = key
                groups.setdefault((self._depths[row], label, len(rows)), []).append((row, rows))
        heads, words = [], []
        for (_, label, fields), members in sorted(groups.items(), key=lambda item: item[0][0]):
            for row, _ in members:
                place[row] = len(place)
            for k in range(fields):
                words += [place[rows[k]] for _, rows in members]
            heads.append([*label, fields, len(members)])
        return [[value] if kind is float else value for kind, value in plain], heads, words, place


def _given(kind: Any, pairs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not as they are by default, nor left out."""
    usual, name = defaults(kind), kind.__name__
    return {
        k: v for k, v in pairs.items()
        if k not in usual or not (v is usual[k] or _left_out(f"{name}.{k}", v))
    }  # fmt: skip


# ---- reading ------------------------------------------------------------------------------------


def read(
    data: Mapping[str, Any],
    guards: Formulas,
    array: Callable[[str, str, tuple[int, ...]], np.ndarray[Any, Any]],
) -> dict[str, EvalPlan]:
    """The recipes of the open program with these guards that `write` described.

    `array` gives an array by name, dtype and shape.

    Raises ValueError for other data, LookupError for an array that is not there.
    """
    try:
        words = _Words(data["words"])
        objects = _objects(data["plain"], data["groups"], words, array)
        recipes = {str(name): _recipe(head, objects, words, guards.symbols)
                   for name, head in data["recipes"].items()}  # fmt: skip
        return {"": recipes[""], **recipes}
    except (TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


class _Words:
    """The numbers of data, taken one part after another."""

    def __init__(self, words: Sequence[int]) -> None:
        self._words = np.asarray(words, np.int64 if len(words) == 0 else None)
        if self._words.ndim != 1 or self._words.dtype.kind != "i":
            raise ValueError("words that are no numbers")
        self._list: list[int] = self._words.tolist()
        self._at = 0

    def within(self, ends: Sequence[int], counts: Sequence[int]) -> None:
        """Raise ValueError unless so many of the next are from 0 on and before each of the ends."""
        if not {*map(type, counts)} <= {int} or min(counts, default=0) < 0:
            raise ValueError("a count")
        words = self._words[self._at : self._at + sum(counts)]
        if (
            len(words) != sum(counts)
            or not ((words >= 0) & (words < np.repeat(np.array(ends, np.int64), counts))).all()
        ):
            raise ValueError("a part that is not there")

    def take(self, count: int) -> list[int]:
        """The next words."""
        words = self._list[self._at : self._at + count]
        self._at += count
        return words


def _objects(
    plain: Sequence[Any],
    groups: Sequence[Any],
    words: _Words,
    array: Callable[[str, str, tuple[int, ...]], np.ndarray[Any, Any]],
) -> list[Any]:
    if not {*map(type, plain)} <= {type(None), bool, int, str, list}:
        raise ValueError("a value of an unknown type")
    objects = [float.fromhex(*x) if type(x) is list else x for x in plain]
    counts = [group[-1] for group in groups]
    ends = [*accumulate([len(objects), *counts[:-1]])] if counts else []
    words.within(ends, [fields * count for *_, fields, count in groups])
    for label, names, later, fields, count in groups:
        if count != 1 and not fields:
            raise ValueError("equal objects")
        flat = [objects[i] for i in words.take(fields * count)]
        columns = [flat[at : at + count] for at in range(0, fields * count, count)]
        rows: Iterable[tuple[Any, ...]] = zip(*columns, strict=True) if columns else [()]
        if label == "tuple":
            objects += rows
        elif label in CLASSES:
            objects += _instances(CLASSES[label], names, later, rows)
        elif label == "make":
            objects += [{"tuple": tuple, "list": list}[name] for (name,) in rows]
        elif label == "list":
            objects += map(list, rows)
        elif label == "dict":
            objects += [dict(zip(row[::2], row[1::2], strict=True)) for row in rows]
        elif label == "array":
            objects += [array(*row) for row in rows]
        elif label in ("Dict", "Array"):
            objects += [(Dict if label == "Dict" else Array)(*row) for row in rows]
        else:
            raise ValueError(f"an object of the kind {str(label)[:40]!r}")
    return objects


def _instances(
    kind: Any, names: Sequence[str], later: Sequence[str] | None, rows: Iterable[tuple[Any, ...]]
) -> Iterable[Any]:
    """Instances of a dataclass, or makers of such to which the fields `later` are given."""
    usual, all_names = defaults(kind), (*names, *(later or ()))
    own_fields, listed = set(field_names(kind)), set(all_names)
    if not listed <= own_fields <= listed | usual.keys() or len(listed) != len(all_names):
        raise ValueError(f"the fields of a {kind.__name__}")
    usual = {name: value for name, value in usual.items() if name not in listed}
    if later is not None:
        return [InstanceOf(kind, usual, tuple(later)) for _ in rows]
    instances, new = [], object.__new__
    for row in rows:
        instance = new(kind)
        inside = instance.__dict__
        inside.update(usual)
        inside.update(zip(names, row))  # noqa: B905
        instances.append(instance)
    return instances


def _recipe(
    head: Sequence[Any], objects: Sequence[Any], words: _Words, symbols: Sequence[str]
) -> EvalPlan:
    often, numbers, closed, steps, length, result = head
    sizes = Formulas.read(numbers)
    if tuple(sizes.symbols) != tuple(symbols):
        raise ValueError("numbers of other symbols")
    first = closed + len(sizes.roots)
    words.within([len(objects), length + 1], [closed + steps, steps])
    parts = [objects[i] for i in words.take(closed)]
    makers: list[Maker] = [objects[i] for i in words.take(steps)]
    if not {*map(type, makers)} <= {type, Dict, Array, InstanceOf}:
        raise ValueError("a step that makes nothing")
    counts = words.take(steps)
    words.within(range(first, first + steps), counts)  # a step has earlier ones for parts
    flat, until = words.take(length), [*accumulate(counts)]
    if length != (until[-1] if steps else 0) or not 0 <= result < first + steps:
        raise ValueError("a step of too many or too few parts")
    slices = map(slice, [0, *until[:-1]], until)
    eval_steps: list[EvalStep] = [*zip(makers, map(flat.__getitem__, slices), strict=True)]
    return EvalPlan(parts, sizes, eval_steps, result, often=often is True)

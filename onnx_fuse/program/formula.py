"""Expressions over sizes as tables of integer operations: what a file holds, and what is evaluated.

A table lists constants, then the symbols, then operations on two rows above them each. So a file
names operations by their place in `OPERATIONS` and operands by numbers, which `Formulas.read`
checks: no text of a file is ever compiled or looked up by name. `size.text_of` writes expressions
as text, which `Formulas.of` reads; that text is of this process alone.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any

OPERATIONS: tuple[tuple[str, Callable[[Any, Any], Any]], ...] = (
    ("add", operator.add), ("sub", operator.sub), ("mul", operator.mul),
    ("floordiv", operator.floordiv), ("mod", operator.mod), ("min", min), ("max", max),
    ("lt", operator.lt), ("le", operator.le), ("eq", operator.eq), ("ne", operator.ne),
    ("gt", operator.gt), ("ge", operator.ge),
    ("and", lambda a, b: a and b), ("or", lambda a, b: a or b),
)  # fmt: skip
"""What a row may be of two others; a file has the place in this list."""
_PLACES = {name: place for place, (name, _) in enumerate(OPERATIONS)}
_NUMERIC = _PLACES["max"]  # the last whose result is a number
_AST = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Lt: "lt", ast.LtE: "le", ast.Eq: "eq", ast.NotEq: "ne", ast.Gt: "gt", ast.GtE: "ge",
    ast.And: "and", ast.Or: "or",
}  # fmt: skip
_OPPOSITE = {"lt": "ge", "le": "gt", "eq": "ne", "ge": "lt", "gt": "le", "ne": "eq"}
_MOST = 1 << 20  # rows of a table
_BITS = 46  # of a symbol: a dimension has fewer elements than a buffer may have bytes
_MOST_BITS = 512

Row = tuple[int, int, int]
"""(operation, row, row)"""
Step = tuple[Callable[[Any, Any], Any], int, int]
"""(function, row, row)"""
_Part = tuple[Sequence[tuple[int, Callable[[Any, Any], Any], int, int]], int]
"""(steps before, each with the row that it makes), root"""


class NoValue(ValueError):
    """Expressions have no value for some sizes, at which a guard may fail."""


class Formulas:
    """Several expressions over the same symbols; `roots` are the rows of their values."""

    def __init__(
        self,
        symbols: Sequence[str],
        constants: Sequence[int],
        rows: Sequence[Row],
        roots: Sequence[int],
    ) -> None:
        self.symbols, self.constants, self.rows, self.roots = symbols, constants, rows, roots
        self._steps = _steps(rows)
        self._held: list[Any] = []  # the rows for the last sizes that met all conditions
        self._valued: list[Any] = []  # the rows for the last sizes with values
        self._todo: dict[int, Sequence[_Part]] = {}

    @classmethod
    def of(cls, texts: Iterable[str], symbols: Sequence[str]) -> Formulas:
        """The expressions that these texts are. Raises ValueError where one is none."""
        writer = _FormulaWriter(symbols)
        return writer.formulas([writer.row(_tree(text)) for text in texts])

    @classmethod
    def read(cls, data: Sequence[Any], *, conditions: bool = False) -> Formulas:
        """The expressions that `data` described: whole numbers, or conditions.

        Raises ValueError for anything else, and for numbers that could become too large.
        """
        try:
            symbols, constants, flat, roots = data
            plain = {type(x) for x in chain(constants, flat, roots)} <= {int}
            if not plain or {type(x) for x in symbols} - {str} or len(flat) > _MOST:
                raise ValueError("a table of expressions has something that is no number")
            rows = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
            _check(len(symbols), constants, rows, roots, conditions)
        except TypeError as error:
            raise ValueError("no table of expressions") from error
        return cls(tuple(symbols), constants, rows, roots)

    @property
    def data(self) -> list[Any]:
        """Lists and numbers, as a file holds them."""
        return [list(self.symbols), list(self.constants), [*chain(*self.rows)], list(self.roots)]

    def hold(self, values: Mapping[str, int]) -> bool:
        """Whether these sizes meet all of the conditions, which are looked at in order.

        False where one has no value for them.
        """
        try:
            results, parts = self._begun([values[name] for name in self.symbols], self._held)
            for steps, root in parts:
                for row, do, a, b in steps:
                    results[row] = do(results[a], results[b])
                if not results[root]:
                    return False
        except (KeyError, ZeroDivisionError):
            return False
        self._held = results
        return True

    def _begun(
        self, sizes: Sequence[Any], known: Sequence[Any]
    ) -> tuple[list[Any], Sequence[_Part]]:
        """The rows for these sizes that are as in `known`, and the steps to the others: those in
        which symbols with other sizes have a part.
        """
        first = len(self.constants)
        end = first + len(self.symbols)
        if not known:
            return [*self.constants, *sizes, *self.rows], self._steps_to(-1)
        pairs = enumerate(zip(sizes, known[first:end], strict=True))
        changed = sum([1 << i for i, (now, before) in pairs if now != before])
        results = [*known]
        results[first:end] = sizes
        return results, self._steps_to(changed)

    def _steps_to(self, changed: int) -> Sequence[_Part]:
        """Each root in which these symbols, a bit for each, have a part, and the steps up to it
        that those before it do not need; -1: all of them.
        """
        parts = self._todo.get(changed)
        if parts is None:
            parts, steps, begin = [], [], len(self.constants) + len(self.symbols)
            for root in self.roots:
                rows = range(begin, root + 1)
                steps += [(row, *self._steps[row - len(self._read) + len(self.rows)])
                          for row in rows if self._read[row] & changed or changed < 0]  # fmt: skip
                begin = max(begin, root + 1)
                if self._read[root] & changed or changed < 0:
                    parts.append((steps, root))
                    steps = []
            if len(self._todo) >= 64:
                self._todo.clear()
            self._todo[changed] = parts
        return parts

    @cached_property
    def _read(self) -> list[int]:
        """Of each row, a bit for each symbol that has a part in it."""
        bits = [0] * len(self.constants) + [1 << i for i in range(len(self.symbols))]
        for _, a, b in self.rows:
            bits.append(bits[a] | bits[b])
        return bits

    def at(self, values: Iterable[Any], **functions: Callable[[Any, Any], Any]) -> list[Any]:
        """The values, for these of the symbols; `functions` replace operations by name.

        Raises NoValue for a division by zero.
        """
        try:
            if functions:
                results = [*self.constants, *values]
                for do, a, b in _steps(self.rows, functions):
                    results.append(do(results[a], results[b]))
            else:
                results, parts = self._begun([*values], self._valued)
                for steps, _ in parts:
                    for row, do, a, b in steps:
                        results[row] = do(results[a], results[b])
                self._valued = results
        except ZeroDivisionError as error:
            raise NoValue("no value: a division by zero") from error
        return [results[root] for root in self.roots]


def _steps(
    rows: Iterable[Row], functions: Mapping[str, Callable[[Any, Any], Any]] | None = None
) -> list[Step]:
    """The rows with the functions of their operations, some of them replaced by name."""
    does = [(functions or {}).get(name, do) for name, do in OPERATIONS]
    return [(does[op], a, b) for op, a, b in rows]


def value(text: str, symbols: Mapping[str, Any], **functions: Callable[[Any, Any], Any]) -> Any:
    """The value of one expression; `functions` take the place of operations by name."""
    return _one(text, tuple(symbols)).at(symbols.values(), **functions)[0]


@lru_cache(256)
def _one(text: str, symbols: tuple[str, ...]) -> Formulas:
    return Formulas.of([text], symbols)


@lru_cache(1024)
def _tree(text: str) -> ast.expr:
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text[:40]!r} is no expression over sizes") from error


def _check(
    symbols: int,
    constants: Sequence[int],
    rows: Sequence[Row],
    roots: Sequence[int],
    conditions: bool,
) -> None:
    """Raise ValueError for a row that reads no row above it, and for numbers without a bound."""
    bits = [*map(int.bit_length, constants), *[_BITS] * symbols]
    numbers = len(bits)
    for op, a, b in rows:
        if not 0 <= op < len(OPERATIONS) or not (0 <= a < len(bits) and 0 <= b < len(bits)):
            raise ValueError("an expression of what is not there")
        wide = bits[a] + bits[b] if op == 2 else max(bits[a], bits[b]) + (op < 2)
        if wide > _MOST_BITS:
            raise ValueError("an expression that may become too large")
        bits.append(1 if op > _NUMERIC else wide)
    for root in roots:
        if not 0 <= root < len(bits):
            raise ValueError("an expression that is not there")
        if conditions != (root >= numbers and rows[root - numbers][0] > _NUMERIC):
            raise ValueError("a condition where a number is expected, or a number for a condition")


class _FormulaWriter:
    """Makes the rows of expressions, each once."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self._symbols = {name: -1 - i for i, name in enumerate(symbols)}
        self._constants: dict[int, int] = {}
        self._rows: dict[tuple[int, Any, Any], int] = {}

    # While rows are made, a symbol is a negative number, a constant a text, and a row its place.

    def row(self, tree: ast.AST) -> Any:
        """The row of a tree. Raises ValueError for one that is no expression over the symbols."""
        if isinstance(tree, ast.Constant) and type(tree.value) is int:
            self._constants.setdefault(tree.value, len(self._constants))
            return str(tree.value)
        if isinstance(tree, ast.Name) and tree.id in self._symbols:
            return self._symbols[tree.id]
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            if isinstance(tree.operand, ast.Constant) and type(tree.operand.value) is int:
                return self.row(ast.Constant(-tree.operand.value))
            return self._add("sub", self.row(ast.Constant(0)), self.row(tree.operand))
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
            part = tree.operand
            if isinstance(part, ast.Compare) and len(part.ops) == 1:
                left, right = self.row(part.left), self.row(part.comparators[0])
                return self._add(_OPPOSITE[_AST[type(part.ops[0])]], left, right)
            return self._add("eq", self.row(part), self.row(ast.Constant(0)))
        if isinstance(tree, ast.BinOp) and type(tree.op) in _AST:
            left = self.row(tree.left)
            return self._add(_AST[type(tree.op)], left, self.row(tree.right))
        if isinstance(tree, ast.BoolOp):
            return self._all(_AST[type(tree.op)], [self.row(part) for part in tree.values])
        if isinstance(tree, ast.Compare) and {*map(type, tree.ops)} <= _AST.keys():
            parts = [self.row(part) for part in (tree.left, *tree.comparators)]
            pairs = zip(tree.ops, parts, parts[1:], strict=False)
            return self._all("and", [self._add(_AST[type(op)], a, b) for op, a, b in pairs])
        if isinstance(tree, ast.Call) and getattr(tree.func, "id", "") in ("min", "max"):
            assert isinstance(tree.func, ast.Name)
            return self._all(tree.func.id, [self.row(part) for part in tree.args])
        raise ValueError(f"{ast.unparse(tree)[:40]!r} is no expression over sizes")

    def _all(self, name: str, parts: list[Any]) -> Any:
        first, *rest = parts
        for part in rest:
            first = self._add(name, first, part)
        return first

    def _add(self, name: str, a: object, b: object) -> int:
        return self._rows.setdefault((_PLACES[name], a, b), len(self._rows))

    def formulas(self, roots: Sequence[Any]) -> Formulas:
        """The table, in which every operand is the number of its row."""
        first = len(self._constants)
        last = first + len(self._symbols)

        def place(operand: str | int) -> int:
            if isinstance(operand, str):
                return self._constants[int(operand)]
            return first - 1 - operand if operand < 0 else last + operand

        rows = [(op, place(a), place(b)) for op, a, b in self._rows]
        return Formulas([*self._symbols], [*self._constants], rows, [*map(place, roots)])

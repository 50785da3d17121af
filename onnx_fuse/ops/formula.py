"""Formulas in the bodies of operators, written out as the ONNX text that they stand for.

A line `name = ...` of a body may hold calls within calls, the signs + - * / between values, and
numbers (of float64) and lists of integers for constants; each becomes nodes, in the order in which
they are computed:

    h1 = o * Tanh (f * c + i * g)        m = ReduceMean <keepdims: int = 1> (x * x, [-1])

`+ - * /` are Add, Sub, Mul and Div, with the precedence of arithmetic. Any other line, such as the
first of a node that holds a graph, is ONNX text and stays as it is.
"""

from __future__ import annotations

import re
from functools import lru_cache

_LINE = re.compile(r"(\s*)((?:\w+\s*,\s*)*\w+) = (.+)")
_TOKEN = re.compile(r"\s*(<[^<>]*>|\[[^\]]*\]|\d[\d.]*(?:e-?\d+)?|[\w.]+|[-+*/(),])")
_SIGNS = ({"+": "Add", "-": "Sub"}, {"*": "Mul", "/": "Div"})
"""The operators of the signs, those that bind least first."""


@lru_cache(1024)
def written_out(text: str) -> str:
    """The text of a function with its formulas as nodes."""
    lines = []
    for line in text.splitlines():
        found = _LINE.fullmatch(line)
        nodes = _Formula(found[2], found[3]).nodes() if found else None
        lines += [line] if nodes is None else nodes
    return "\n".join(lines)


class _Formula:
    """The right side of one line."""

    def __init__(self, target: str, text: str) -> None:
        self._name = target.split(",")[0].strip()
        self._target = target
        self._tokens: list[str] = []
        end = 0
        while found := _TOKEN.match(text, end):
            self._tokens.append(found[1])
            end = found.end()
        self._whole = not text[end:].strip()
        self._nodes: list[str] = []

    def nodes(self) -> list[str] | None:
        """The lines of its nodes; None for what is no formula."""
        if not self._whole:
            return None
        try:
            last = self._sum(0)
        except IndexError:  # it goes on in the next line
            return None
        if self._tokens or not self._nodes or last != self._temporary():
            return None
        self._nodes[-1] = self._nodes[-1].replace(f"{last} =", f"{self._target} =", 1)
        return self._nodes

    def _temporary(self) -> str:
        return f"{self._name}_{len(self._nodes)}"

    def _node(self, call: str) -> str:
        """The name of the result of one more node."""
        self._nodes.append(f"{self._name}_{len(self._nodes) + 1} = {call}")
        return self._temporary()

    def _sum(self, level: int) -> str:
        """Parse operands joined by the signs of `level`, or of a higher precedence."""
        if level == len(_SIGNS):
            return self._operand()
        left = self._sum(level + 1)
        while self._tokens and self._tokens[0] in _SIGNS[level]:
            sign = _SIGNS[level][self._tokens.pop(0)]
            left = self._node(f"{sign} ({left}, {self._sum(level + 1)})")
        return left

    def _operand(self) -> str:
        """A name, a list of integers, a sum in brackets, or a call."""
        token = self._tokens.pop(0)
        if token == "(":
            inner = self._sum(0)
            self._tokens.pop(0)
            return inner
        if token.startswith("["):
            return self._node(f"Constant <value_ints: ints = {token}> ()")
        if token[0].isdigit():
            return self._node(f"Constant <value: tensor = double {{{token}}}> ()")
        if not self._tokens or not self._tokens[0].startswith(("<", "(")):
            return token
        attributes = f"{self._tokens.pop(0)} " if self._tokens[0].startswith("<") else ""
        if self._tokens.pop(0) != "(":
            raise IndexError
        values = []
        while self._tokens[0] != ")":
            values.append(self._sum(0))
            if self._tokens[0] == ",":
                self._tokens.pop(0)
        self._tokens.pop(0)
        return self._node(f"{token} {attributes}({', '.join(values)})")

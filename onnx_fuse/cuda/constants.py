"""The values of C++ expressions of numbers, where they do not depend on names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_NUMBER = re.compile(r"(0[xX][\da-fA-F]+|\d+)[uUlL]*")
_NAME = re.compile(r"[A-Za-z_]\w*")
_SIZES = {"float": 4, "double": 8, "int": 4, "bf16": 2, "f16": 2, "u8": 1, "u16": 2, "u32": 4,
          "i64": 8, "u64": 8, "bool": 1}  # fmt: skip
_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a or b))},
    {"&&": lambda a, b: int(bool(a and b))},
    {"|": lambda a, b: a | b},
    {"^": lambda a, b: a ^ b},
    {"&": lambda a, b: a & b},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {
        "<": lambda a, b: int(a < b),
        ">": lambda a, b: int(a > b),
        "<=": lambda a, b: int(a <= b),
        ">=": lambda a, b: int(a >= b),
    },
    {"<<": lambda a, b: a << b, ">>": lambda a, b: a >> b},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {
        "*": lambda a, b: a * b,
        "/": lambda a, b: int(a / b) if b else 0,
        "%": lambda a, b: a - b * int(a / b) if b else 0,
    },
)
"""Operators by how loosely they bind."""


class _Unclear(Exception):
    """Something that is no plain expression."""


def evaluate(tokens: Sequence[str]) -> int | None:
    """Return the value; None where it depends on a name or the expression is not understood.

    `0 && x` is 0 and `1 || x` is 1 whatever x is; so are `x && 0` and `x || 1` where x changes
    nothing.
    """
    try:
        parser = _Parser(tokens)
        value = parser.ternary()
        return value if parser.at == len(tokens) else None
    except (_Unclear, ValueError):
        return None


class _Parser:
    """A recursive-descent parser; a value that is not known is None."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens, self.at = tokens, 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def expect(self, token: str) -> None:
        if self.peek() != token:
            raise _Unclear
        self.at += 1

    def ternary(self) -> int | None:
        chosen = self.binary(0)
        if self.peek() != "?":
            return chosen
        self.at += 1
        first = self.ternary()
        self.expect(":")
        second = self.ternary()
        if chosen is None:
            return first if first == second else None
        return first if chosen else second

    def binary(self, level: int) -> int | None:
        if level == len(_LEVELS):
            return self.unary()
        start, value = self.at, self.binary(level + 1)
        while (operator := self.peek()) in _LEVELS[level]:
            pure = not any(
                t == "(" and i and _NAME.fullmatch(self.tokens[start + i - 1])
                for i, t in enumerate(self.tokens[start : self.at])
            )
            self.at += 1
            other = self.binary(level + 1)
            if operator in ("&&", "||"):
                decides = operator == "||"
                if value is not None and bool(value) == decides:
                    value = int(decides)
                    continue
                if value is None and other is not None and bool(other) == decides and pure:
                    value = int(decides)
                    continue
            constant = value is not None and other is not None
            value = _LEVELS[level][operator](value or 0, other or 0) if constant else None
        return value

    def unary(self) -> int | None:
        token = self.peek()
        if token in ("!", "-", "+", "~"):
            self.at += 1
            value = self.unary()
            if value is None:
                return None
            return {"!": int(not value), "-": -value, "+": value, "~": ~value}[token]
        if token == "(":
            self.at += 1
            inner = self.ternary()
            self.expect(")")
            return inner
        self.at += 1
        if number := _NUMBER.fullmatch(token):
            return int(number[1], 0)
        if token in ("true", "false"):
            return int(token == "true")
        if token == "sizeof" and self.peek() == "(":
            size = _SIZES.get(self.tokens[self.at + 1])
            self.at += 2
            self.expect(")")
            return size
        if not _NAME.fullmatch(token):
            raise _Unclear
        self.behind_a_name()
        return None

    def behind_a_name(self) -> None:
        """Parse what follows a name: calls, members, elements, or a final `NAME<argument>`."""
        while True:
            token = self.peek()
            after = self.tokens[self.at + 1 : self.at + 4]
            if token in (".", "->", "::"):
                self.at += 2
            elif token in ("(", "["):
                depth = 0
                while self.at < len(self.tokens):
                    depth += (self.peek() in "([{") - (self.peek() in ")]}")
                    self.at += 1
                    if not depth:
                        break
                else:
                    raise _Unclear
            elif token == "<" and after[1:2] == [">"] and after[2:] in ([], ["&&"], ["||"], [")"]):
                self.at += 3
            else:
                return

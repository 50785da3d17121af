"""Expressions over sizes as text, as they stand in a file, and their values for given sizes.

`size.text_of` writes them: whole numbers, symbols, arithmetic, `min`, `max`, comparisons. Nothing
else is evaluated, so the text may come from anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

_ALLOWED = re.compile(r"(?:s\d{1,9}\b|\d{1,25}\b|(?:min|max)\(|not |<=|==|//|[-+*%<,() ])*\Z")
_LONGEST = 1 << 20
_FUNCTIONS = {"__builtins__": {}, "min": min, "max": max}


def compiled(text: str) -> CodeType:
    """The code of an expression. Raises ValueError for text that is no such expression."""
    # numbers stay small without powers and shifts
    wrong = "**" in text or "<<" in text or len(text) > _LONGEST
    if wrong or not _ALLOWED.match(text):
        raise ValueError(f"{text[:40]!r} is no expression over sizes")
    try:
        return compile(text, "<sizes>", "eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text[:40]!r} is no expression over sizes") from error


def evaluated(code: CodeType, symbols: Mapping[str, int]) -> Any:
    """The value of compiled text for these sizes. Raises ValueError where it has none."""
    try:
        return eval(code, _FUNCTIONS, dict(symbols))
    except (NameError, TypeError, ArithmeticError) as error:
        raise ValueError(f"no value for {dict(symbols)}: {error}") from error


class Guards:
    """What must hold for a program to serve some sizes; each is compiled when it is first asked."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._parts: list[str | CodeType] = list(texts)

    def hold(self, symbols: Mapping[str, int]) -> bool:
        """Whether these sizes meet all of them. Raises ValueError where one is no expression."""
        for i, part in enumerate(self._parts):
            if isinstance(part, str):
                part = self._parts[i] = compiled(part)
            if not evaluated(part, symbols):
                return False
        return True


class Numbers:
    """Several expressions, evaluated at once. Raises ValueError where one is none."""

    def __init__(self, texts: Sequence[str]) -> None:
        for text in texts:
            compiled(text)  # each by itself is one
        self._code = compiled("".join(f"({text})," for text in texts) or "()")

    def at(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """Their values, whole numbers. Raises ValueError where one is none."""
        found: tuple[int, ...] = evaluated(self._code, symbols)
        if any(type(value) is not int for value in found):
            raise ValueError("an expression is no whole number")
        return found

"""A Program over open sizes: what was lowered once, for every shape that meets its guards.

The guards and the program's numbers are Python code made from the polynomials of `size`, so that
another shape costs an evaluation: no lowering, no choice of kernels, no text of kernels.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import CodeType
from typing import Any

import numpy as np

from onnx_fuse.program.size import Size, Trace, expression, maximum, minimum

_PART = "part_"


class Open:
    """An object that holds sizes of a trace, and what it is for other values of its symbols."""

    def __init__(self, made: Any, trace: Trace, parts: Mapping[str, Any] | None = None) -> None:
        """`parts` are objects that `part` makes by themselves, for less than `made` costs."""
        symbols = tuple(trace.values)
        # classes first: most programs are told apart by them
        guards = tuple(sorted(trace.guards, key=lambda guard: guard.count(" <= ") < 2))
        given = ", ".join(symbols)
        writer = _Writer()
        result = writer.write(made)
        more = ""
        for name, value in (parts or {}).items():
            inner = _Writer(writer.names)
            text = inner.write(value)
            body = "".join(f"    {line}\n" for line in inner.lines)
            more += f"def {_PART}{name}({given}):\n{body}    return {text}\n"
        checks = "".join(f"    if not ({guard}): return False\n" for guard in guards)
        lines = "".join(f"    {line}\n" for line in writer.lines)
        source = (
            f"def holds({given}):\n{checks}    return True\n"
            f"def make({given}):\n{lines}    return {result}\n{more}"
        )
        self._set(symbols, guards, compile(source, "<open sizes>", "exec"), writer.names)

    def _set(
        self, symbols: tuple[str, ...], guards: tuple[str, ...], code: CodeType, used: Any
    ) -> None:
        self.symbols, self.guards, self._code, self._used = symbols, guards, code, used
        names = used | {"new": _new, "array": np.array, "int64": np.int64}
        names |= {"min": minimum, "max": maximum}  # which leave sizes open
        exec(code, names)  # text of our own making
        self._holds: Callable[..., bool] = names["holds"]
        self._make: Callable[..., Any] = names["make"]
        self._parts: dict[str, Callable[..., Any]] = {
            name.removeprefix(_PART): make for name, make in names.items() if name.startswith(_PART)
        }

    def __getstate__(self) -> tuple[Any, ...]:
        """For pickle, with the compiled code: to compile it anew takes ten times as long."""
        return self.symbols, self.guards, marshal.dumps(self._code), self._used

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        symbols, guards, code, used = state
        self._set(symbols, guards, marshal.loads(code), used)

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether every decision that was taken on the way would be taken again."""
        return self._holds(*(values[name] for name in self.symbols))

    def at(self, values: Mapping[str, int]) -> Any:
        """The object with the numbers of these symbols, which `holds`."""
        return self._make(*(values[name] for name in self.symbols))

    def part(self, name: str, values: Mapping[str, int]) -> Any:
        """The part called so with the numbers of these symbols, None where there is none."""
        make = self._parts.get(name)
        return None if make is None else make(*(values[symbol] for symbol in self.symbols))


def _new(kind: type, values: dict[str, Any]) -> Any:
    """An instance of a dataclass with these fields, unchecked."""
    made: Any = object.__new__(kind)
    made.__dict__.update(values)
    return made


class _Writer:
    """Python text that builds an object anew; what holds no size is used as it is."""

    def __init__(self, names: dict[str, Any] | None = None) -> None:
        self.lines: list[str] = []
        self.names = {} if names is None else names
        self._sizes: dict[str, str] = {}
        self._objects: dict[int, tuple[Any, str | None]] = {}

    def write(self, value: Any) -> str:
        """The expression that is `value`."""
        return self._open(value) or self._kept(value)

    def _kept(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int | str) or value == ():
            return repr(value)
        name = f"k{len(self.names)}"
        self.names[name] = value
        return name

    def _named(self, text: str) -> str:
        name = f"o{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def _open(self, value: Any) -> str | None:
        """The expression of what holds sizes, None for anything else."""
        kind = type(value)
        if kind in _PLAIN:
            return None
        if kind is Size:
            text = expression(value)
            if text not in self._sizes:
                self._sizes[text] = self._named(text)
            return self._sizes[text]
        known = self._objects.get(id(value))
        if known is not None:
            return known[1]
        found = self._structure(value)
        self._objects[id(value)] = value, found  # kept, so that its id stays its own
        return found

    def _structure(self, value: Any) -> str | None:
        if isinstance(value, tuple | list):
            parts = [self._open(part) for part in value]
            if not any(parts):
                return None
            inside = "".join(
                f"{text or self._kept(part)}, " for text, part in zip(parts, value, strict=True)
            )
            return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
        if isinstance(value, dict):
            named = {key: self._open(part) for key, part in value.items()}
            if not any(named.values()):
                return None
            texts = [f"{self._kept(k)}: {t or self._kept(value[k])}" for k, t in named.items()]
            return self._named("{" + ", ".join(texts) + "}")
        if isinstance(value, np.ndarray):
            numbers = self._open(list(value.reshape(-1))) if value.dtype == object else None
            if numbers is None:
                return None
            return self._named(f"array({numbers}, int64).reshape({value.shape})")
        kind: Any = type(value)
        names = _fields(kind)
        own = {name: self._open(getattr(value, name)) for name in names}
        if not any(own.values()):
            return None
        texts = [f"{k!r}: {t or self._kept(getattr(value, k))}" for k, t in own.items()]
        return self._named(f"new({self._kept(kind)}, {{{', '.join(texts)}}})")


_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


@cache
def _fields(kind: Any) -> tuple[str, ...]:
    """Names of a dataclass's fields; nothing else holds sizes."""
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()

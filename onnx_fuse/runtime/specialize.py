"""Programs of a model for the shapes it meets: lowered once over open sizes, evaluated after that.

The open sizes are the dimensions that the model leaves free. What a lowering decides on them is
kept as guards (`program.size`); a shape that meets those of an earlier one costs an evaluation. A
model whose later stages or values of inputs decide about shapes is lowered for each shape by
itself, as it always was.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import OnnxFuseError
from onnx_fuse.lower.walk import Shapes, lower
from onnx_fuse.program.call import NeedsValues, Program
from onnx_fuse.program.open import Open
from onnx_fuse.program.problem import Hardware
from onnx_fuse.program.size import Trace, class_of
from onnx_fuse.runtime.plan import Made, plan

LARGE = 256 << 20
"""Bytes from which a program that needs less than half of what its class may need has a layout of
its own."""
KEPT = 128
"""Open programs kept of one model; the least recently used goes first."""

Symbols = tuple[tuple[str, int, str], ...]
"""(input, axis, symbol) of each open dimension."""


class Interrupted(Exception):
    """A program is wanted now, and one that was made ahead of time is given up."""


class Specializer:
    """The programs of one model on one GPU."""

    def __init__(
        self,
        model: ir.Model,
        hw: Hardware,
        *,
        math: str = "ieee",
        prefs: Mapping[str, str] | None = None,
        state: Mapping[str, str] | None = None,
    ) -> None:
        self.model, self.hw, self.math = model, hw, math
        self.prefs, self.state = prefs, state
        self.is_open = True
        self.traced = 0
        """Lowerings so far."""
        self._kept: dict[tuple[object, ...], list[_Kept]] = {}
        self._lock = threading.RLock()
        self._waiting: list[None] = []  # one for each thread that wants a program now

    def of(self, shapes: Shapes, values: Mapping[str, np.ndarray] | None = None) -> Made:
        """The Program for inputs of these (shape, dtype), by name, and its plan.

        `values` are inputs known at lowering. Raises what `lower` raises.
        """
        self._waiting.append(None)
        with self._lock, _no_collection():
            self._waiting.pop()
            found = self._opened(shapes, values or {}) if self.is_open else None
            if found is not None:
                return found
            program = self._lower(shapes, values)
            return Made(program, plan(program))

    def prepare(self, shapes: Shapes) -> Program | None:
        """The open Program's for these shapes, None if there is none.

        Raises Interrupted, with nothing done, when another thread calls `of`.
        """
        with self._lock, _no_collection():
            self._give_way("")
            found = self._opened(shapes, {}, self._give_way) if self.is_open else None
            return None if found is None else found.program

    def _give_way(self, guard: str) -> None:
        if self._waiting:
            raise Interrupted

    def like(self, shapes: Shapes, symbol: str) -> Iterator[Shapes]:
        """Shapes like these but for one open dimension, for each of its classes, the nearest first.

        Up to the class above the dimension's own, each at its largest sizes that are a multiple of
        8, of 4, of 2 and of 1: wide loads and stores depend on that.
        """
        symbols = self.symbols(shapes)
        number = next(shapes[name][0][axis] for name, axis, own in symbols if own == symbol)
        limits, last = [], 1
        while last < 2 * number:
            first, last = class_of(last + 1)
            limits.append((first, last))
        for first, last in sorted(limits, key=lambda pair: abs(pair[1] - number)):
            for size in (last, last - 1, last - 2, last - 4):
                if size >= first:
                    yield _changed(shapes, symbols, {symbol: size})

    def changed(self, shapes: Shapes, sizes: Mapping[str, Any]) -> Shapes:
        """The shapes with these sizes for the symbols among them."""
        return _changed(shapes, self.symbols(shapes), sizes)

    def _lower(self, shapes: Shapes, values: Mapping[str, np.ndarray] | None) -> Program:
        self.traced += 1
        return lower(
            self.model, shapes, self.hw, math=self.math, prefs=self.prefs, state=self.state,
            values=values,
        )  # fmt: skip

    def _opened(
        self,
        shapes: Shapes,
        values: Mapping[str, np.ndarray],
        watch: Callable[[str], None] | None = None,
    ) -> Made | None:
        symbols = self.symbols(shapes)
        if not symbols:
            return None
        numbers = {symbol: shapes[name][0][axis] for name, axis, symbol in symbols}
        fixed = tuple(sorted((name, array.tobytes()) for name, array in values.items()))
        inputs = {v.name for v in self.model.graph.inputs}
        ranks = tuple(
            sorted((n, len(shape), dtype) for n, (shape, dtype) in shapes.items() if n in inputs)
        )
        kept = self._kept.setdefault((symbols, ranks, fixed), [])
        for i, entry in enumerate(kept):
            if entry.source.holds(numbers):
                kept.insert(0, kept.pop(i))
                return entry.at(numbers)
        trace = Trace()
        trace.watch = watch
        opened = {symbol: trace.symbol(symbol, number) for symbol, number in numbers.items()}
        try:
            program = self._lower(_changed(shapes, symbols, opened), values)
            if program.stages or program.fallbacks:
                self.is_open = False
                return None
            entry = _Kept(Open(program, trace), trace.largest())
        except (NeedsValues, OnnxFuseError, Interrupted):
            raise
        except (
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
        ) as error:  # the model still runs, one lowering a shape
            warnings.warn(f"each shape is lowered by itself: {error!r}", stacklevel=6)
            self.is_open = False
            return None
        kept.insert(0, entry)
        del kept[KEPT:]
        return entry.at(numbers)

    def symbols(self, shapes: Shapes) -> Symbols:
        """The open dimensions; those of one name in the model share a symbol if they are equal."""
        found: list[tuple[str, int, str | None]] = []
        sizes: dict[str, set[int]] = {}
        resident = set((self.state or {}).values())
        for value in self.model.graph.inputs:
            name = value.name or ""
            if name not in shapes or name in resident:
                continue
            shape = shapes[name][0]
            dims = list(value.shape) if value.shape is not None else [None] * len(shape)
            for axis, (dim, size) in enumerate(zip(dims, shape, strict=True)):
                if not isinstance(dim, int):
                    label = getattr(dim, "value", None)
                    found.append((name, axis, label))
                    if label:
                        sizes.setdefault(label, set()).add(size)
        numbers: dict[str, int] = {}
        symbols = []
        for name, axis, label in found:
            shared = label if label and len(sizes[label]) == 1 else f"{name} {axis}"
            symbols.append((name, axis, f"s{numbers.setdefault(shared, len(numbers))}"))
        return tuple(symbols)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's cyclic garbage collector, which would go through the whole model again and
    again: half of a lowering's time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Kept:
    """An open program, and the layout for the largest shape of its class."""

    def __init__(self, source: Open, largest: Mapping[str, int]) -> None:
        self.source = source
        # a layout for these sizes is one for smaller ones, whether or not the guards hold there
        whole = source.at(largest)
        self._plan = plan(whole)
        self._room = {buffer.id: buffer.nbytes for buffer in whole.buffers}
        self._bytes = sum(self._room.values())
        self._workspaces = [call.workspace for call in whole.calls]

    def at(self, numbers: Mapping[str, int]) -> Made:
        """The Program for these sizes, and a layout that it fits."""
        program: Program = self.source.at(numbers)
        fits = all(b.nbytes <= self._room[b.id] for b in program.buffers)
        fits = fits and all(
            call.workspace <= n for call, n in zip(program.calls, self._workspaces, strict=True)
        )
        large = self._bytes > LARGE and 2 * sum(b.nbytes for b in program.buffers) < self._bytes
        if fits and not large:
            return Made(program, self._plan, self.source, self._room)
        return Made(program, plan(program), self.source)


def _changed(shapes: Shapes, symbols: Symbols, sizes: Mapping[str, Any]) -> Shapes:
    """The shapes with these sizes for the symbols among them."""
    changed = {name: (list(shape), dtype) for name, (shape, dtype) in shapes.items()}
    for name, axis, symbol in symbols:
        if symbol in sizes:
            changed[name][0][axis] = sizes[symbol]
    return {name: (tuple(shape), dtype) for name, (shape, dtype) in changed.items()}

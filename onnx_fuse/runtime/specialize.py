"""Programs of a model by shape: lowered once over open sizes, then evaluated for each shape.

Open sizes are the dynamic dimensions of the model. The decisions of a lowering on them are its
guards (`program.size`); a shape that meets the guards of an earlier program only evaluates it. A
model whose shapes depend on later stages or on values of inputs is lowered for each shape.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import OnnxFuseError, UsageError
from onnx_fuse.program.call import LENGTHS, NeedsValues, Program, Shapes
from onnx_fuse.program.open import SymbolicProgram
from onnx_fuse.program.passes.recompute import recomputed
from onnx_fuse.program.problem import Hardware
from onnx_fuse.program.size import OpenSize, Trace, expression
from onnx_fuse.runtime import collector, invariance
from onnx_fuse.runtime.arg_updates import changes
from onnx_fuse.runtime.budget import Budget, Recompute, within
from onnx_fuse.runtime.graphs import derived_weights
from onnx_fuse.runtime.plan import PlannedOpenProgram, PlannedProgram, evaluated, plan, with_sizes
from onnx_fuse.runtime.program_cache import Key, Origin, ProgramCache, folder_of
from onnx_fuse.runtime.schedule import at_ends

KEPT = 128
"""Open programs kept of one model; the least recently used goes first."""

Symbols = tuple[tuple[str, int, str], ...]
"""(input, axis, symbol) of each open dimension."""
Ranks = tuple[tuple[str, int, str], ...]
"""(input, rank, dtype) of each input."""
_Sizes = tuple[Symbols, dict[str, int], Ranks]


class _Keeper(Protocol):
    def forget(self) -> None: ...


KEEPERS: WeakSet[_Keeper] = WeakSet()
"""What keeps programs, or launches of programs."""


def forget_programs(*, has_only_ours: bool) -> None:
    """Lower anew from now on: kernels were registered, or taken back.

    The cache on disk is left alone unless all kernels are of this package (`has_only_ours`).
    """
    Specializer.has_only_ours = has_only_ours
    for keeper in list(KEEPERS):
        keeper.forget()


class Specializer:
    """The programs of one model on one GPU."""

    has_only_ours = True
    """Whether all kernels are of this package."""

    def __init__(
        self,
        model: ir.Model,
        hw: Hardware,
        *,
        math: str = "ieee",
        prefs: Mapping[str, str] | None = None,
        state: Mapping[str, str] | None = None,
        memory: Budget | None = None,
    ) -> None:
        """`memory` bounds what a program takes, weights and states included; see `budget`."""
        self.model, self.hw, self.math = model, hw, math
        self.prefs, self.state, self.memory = prefs, state, memory
        self.is_open = True
        self.on_chosen: Callable[[Program, Callable[[np.ndarray], bool]], None] | None = None
        """Told of a program while its weights are still being made, as `lower` tells it."""
        self.traced = 0
        """Lowerings so far."""
        self.seconds = 0.0
        """What it took to lower the program that came last, here or before it was in the cache."""
        self.recompute: Recompute | None = None
        """What the last program that was lowered within the budget runs a second time."""
        self.origin: Future[Origin | None] | None = None
        """The path of the graph in the cache, once it is known; None where it is not cached."""
        self.programs: ProgramCache | None = None
        """The programs in the cache, once their name there is known."""
        self._kept: dict[Key, list[PlannedOpenProgram]] = {}
        # what the cache does not have yet, and how long it took
        self._unwritten: list[tuple[Key, PlannedOpenProgram, float]] = []
        self._writers: list[threading.Thread] = []
        self.lock = threading.RLock()
        """This lock is held while the model is lowered, which changes it."""
        self._inputs = {LENGTHS, *(value.name for value in model.graph.inputs)}
        self._free: dict[tuple[object, ...], _Free] = {}
        KEEPERS.add(self)

    def forget(self) -> None:
        """Lower the model anew for each shape that comes."""
        with self.lock:
            self._kept.clear()
            self._unwritten.clear()
            self.is_open = True

    def of(self, shapes: Shapes, values: Mapping[str, np.ndarray] | None = None) -> PlannedProgram:
        """The Program for inputs of these (shape, dtype), by name, and its plan.

        `values` are inputs known at lowering. Raises what `lower` raises.
        """
        with self.lock, collector.paused():  # a collection would walk the model again and again
            planned = self._opened(shapes, values or {}) if self.is_open else None
            if planned is not None:
                return planned
            if invariance.limits(self.model) and self.symbols(shapes):
                raise UsageError(
                    "batch_invariant cannot be kept: a part of the graph runs on onnxruntime, or "
                    "shapes depend on values, so that each shape has choices of its own"
                )
            program = self._lower(shapes, values)
            if self.memory is not None:
                program = self._recomputing(program, program, self.memory)
            return PlannedProgram(program, plan(program))

    def cache_as(self, origin: Future[Origin | None]) -> None:
        """Keep programs in the cache under the name of what the model was made of, if it gets one.

        Those there are looked for from then on, and what takes long to lower is written there.
        """
        self.origin = origin
        reference = weakref.ref(self)

        def named(done: Future[Origin | None]) -> None:
            origin_found, specializer = done.result(), reference()
            if origin_found is not None and specializer is not None:
                specializer.cache_under(origin_found.digest, origin_found.made)

        origin.add_done_callback(named)

    def cache_under(self, digest: str, made: Collection[str] = ()) -> Path:
        """Keep programs in the cache's folder of a graph with this digest.

        The weights in `made` are there for whoever opens the graph. The folder is returned.
        """
        folder = folder_of(digest, self.hw, self.math, self.prefs, self.state, self.memory)
        self.cache_in(ProgramCache(folder, self.made, made))
        return folder

    def cache_in(self, programs: ProgramCache) -> None:
        """Keep programs in this folder."""
        with self.lock:
            self.programs = programs
            self._write()

    def made(self) -> dict[str, np.ndarray]:
        """The weights that lowering made in this process, or an earlier one in the cached graph."""
        return dict(derived_weights(self.model))

    def _write(self) -> None:
        """Write what is not in the cache yet, in a thread of its own."""
        programs = self.programs
        assert programs is not None
        new = [(key, planned) for key, planned, took in self._unwritten if took > programs.seconds]
        self._unwritten.clear()

        def work() -> None:
            for key, planned in new:
                programs.keep(key, planned)

        self._writers = [thread for thread in self._writers if thread.is_alive()]
        if new:
            self._writers.append(threading.Thread(target=work, name="onnx_fuse cache"))
            self._writers[-1].start()

    def written(self) -> None:
        """Return when what was made so far is in the cache."""
        with self.lock:
            writers = list(self._writers)
        for thread in writers:
            thread.join()

    def has(self, key: Key, numbers: Mapping[str, int]) -> bool:
        """Whether there is a program of this key for these sizes, here or in the cache."""
        if any(planned.source.holds(numbers) for planned in list(self._kept.get(key, ()))):
            return True
        return self.programs is not None and self.programs.has(key, numbers)

    def changed(self, shapes: Shapes, sizes: Mapping[str, Any]) -> Shapes:
        """The shapes with these sizes for the symbols among them."""
        return with_sizes(shapes, self.symbols(shapes), sizes)

    def _lower(self, shapes: Shapes, values: Mapping[str, np.ndarray] | None) -> Program:
        from onnx_fuse.lower.walk import lower  # which programs of the cache do without

        self.traced += 1
        return lower(
            self.model, shapes, self.hw, math=self.math, prefs=self.prefs, state=self.state,
            values=values, chosen=self.on_chosen,
        )  # fmt: skip

    def numbers(self, shapes: Shapes) -> dict[str, int]:
        """The size of each open dimension, by its symbol."""
        return self._open_sizes(shapes)[1]

    def key(self, shapes: Shapes, values: Mapping[str, np.ndarray]) -> Key:
        """The key of the programs that may serve these shapes: all about them but open sizes."""
        return self._key(self._open_sizes(shapes), values)

    @staticmethod
    def _key(sizes: _Sizes, values: Mapping[str, np.ndarray]) -> Key:
        symbols, _, ranks = sizes
        return symbols, ranks, tuple(sorted([(n, array.tobytes()) for n, array in values.items()]))

    def _opened(self, shapes: Shapes, values: Mapping[str, np.ndarray]) -> PlannedProgram | None:
        symbols, numbers, _ = sizes = self._open_sizes(shapes)
        if not symbols:
            return None
        key = self._key(sizes, values)
        decided = self._decided(symbols, numbers)
        entries = self._kept.setdefault(key, [])
        for i, entry in enumerate(entries):
            if entry.source.holds(decided):
                entries.insert(0, entries.pop(i))
                return _told(entry.at(numbers), symbols, decided)
        programs = None if values or not self.has_only_ours else self.programs
        planned = None if programs is None else programs.find(key, decided)
        lowered = planned is None or not self._serves(planned)
        if planned is None or lowered:
            began = time.perf_counter()
            planned = self._traced(shapes, values, symbols, decided)
            if planned is None:
                self.is_open = any(self._kept.values())  # of this model some shapes are served
                return None
            planned.seconds = time.perf_counter() - began
        program = _told(planned.at(numbers), symbols, decided)
        if (
            lowered and not values and self.has_only_ours
        ):  # a layout that these sizes need is written as well
            self._unwritten.append((key, planned, planned.seconds))
            if self.programs is not None:
                self._write()
        self.seconds = planned.seconds
        first = lowered and self.traced == 1
        collector.keep(garbage=lowered, everything=first)  # what is read leaves no garbage
        entries.insert(0, planned)
        del entries[KEPT:]
        return program

    def _serves(self, planned: PlannedOpenProgram) -> bool:
        """Whether the model has the weights that a program of the cache reads."""
        weights = self.model.graph.initializers
        return all(name in weights for name in planned.needs)

    def _traced(
        self,
        shapes: Shapes,
        values: Mapping[str, np.ndarray],
        symbols: Symbols,
        numbers: Mapping[str, int],
    ) -> PlannedOpenProgram | None:
        """Lower over open sizes; None where each shape is lowered by itself."""
        trace = Trace(self._limits(symbols))
        sizes = {symbol: trace.symbol(symbol, number) for symbol, number in numbers.items()}
        try:
            program = self._lower(with_sizes(shapes, symbols, sizes), values)
            if program.stages or program.fallbacks:
                return None
            if self.memory is not None:
                _, sized = evaluated(SymbolicProgram(program, trace), trace.largest(), trace.values)
                program = self._recomputing(program, sized, self.memory)
            opened = opened_program(program, trace)
            return PlannedOpenProgram.of(opened, trace.largest(), trace.values)
        except (NeedsValues, OnnxFuseError):
            raise
        except (
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
        ) as error:  # the model still runs, one lowering a shape
            warnings.warn(f"each shape is lowered by itself: {error!r}", stacklevel=7)
            return None

    def _limits(self, symbols: Symbols) -> dict[str, int]:
        """The symbols of dimensions that choices must not depend on, and their largest sizes."""
        most = {(name, axis): limit for name, axis, _, limit in invariance.limited(self.model)}
        return {s: most[name, axis] for name, axis, s in symbols if (name, axis) in most}

    def _decided(self, symbols: Symbols, numbers: Mapping[str, int]) -> dict[str, int]:
        """The sizes by which programs are lowered: 2 for a 1 on which no choice may depend.

        What is right for two sizes that are equal and not 1 is right where both are 1.
        """
        limits = self._limits(symbols)
        return {s: 2 if n == 1 and s in limits else n for s, n in numbers.items()}

    def _recomputing(self, program: Program, sized: Program, memory: Budget) -> Program:
        """The program within the budget; `sized` is the same with the largest sizes it serves."""
        self.recompute = within(sized, memory, self.hw)
        return recomputed(program, self.recompute.turn, self.recompute.calls)

    def symbols(self, shapes: Shapes) -> Symbols:
        """The open dimensions; those of one name in the model share a symbol if they are equal."""
        return self._open_sizes(shapes)[0]

    def _open_sizes(self, shapes: Shapes) -> _Sizes:
        """The open dimensions, the size of each symbol, and the rank and dtype of each input."""
        kinds = tuple(shapes), tuple([(len(shape), dtype) for shape, dtype in shapes.values()])
        free = self._free.get(kinds)
        if free is None:
            free = self._free[kinds] = self._open_dimensions(shapes)
        sizes = [shapes[name][0][axis] for name, axis in free.dimensions]
        equal = tuple([len(set(of(sizes))) == 1 for of in free.sizes_of])
        if equal not in free.symbols:
            symbols: list[tuple[str, int, str]] = []
            numbers: dict[str, int] = {}
            named = {
                i: f"group {g}" for g, same in enumerate(equal) if same for i in free.groups[g]
            }
            for i, (name, axis) in enumerate(free.dimensions):
                label = named.get(i, f"{name} {axis}")
                symbols.append((name, axis, f"s{numbers.setdefault(label, len(numbers))}"))
            free.symbols[equal] = tuple(symbols), [symbol for *_, symbol in symbols]
        found, names = free.symbols[equal]
        return found, dict(zip(names, sizes, strict=True)), free.ranks

    def _open_dimensions(self, shapes: Shapes) -> _Free:
        axes: list[tuple[str, int]] = []
        groups: dict[str, list[int]] = {}
        resident = set((self.state or {}).values())
        for value in self.model.graph.inputs:
            name = value.name or ""
            if name not in shapes or name in resident:
                continue
            shape = shapes[name][0]
            dims = list(value.shape or [None] * len(shape))  # onnxruntime feeds any to a scalar
            for axis, (dim, _) in enumerate(zip(dims, shape, strict=True)):
                if not isinstance(dim, int):
                    label = getattr(dim, "value", None)
                    if label:
                        groups.setdefault(label, []).append(len(axes))
                    axes.append((name, axis))
        ranks = [(n, len(s), dtype) for n, (s, dtype) in shapes.items() if n in self._inputs]
        alike = [tuple(places) for places in groups.values() if len(places) > 1]
        return _Free(tuple(axes), tuple(alike), tuple(sorted(ranks)))


@dataclass
class _Free:
    """The dimensions that a model leaves free: (input, axis), those of one name in groups."""

    dimensions: tuple[tuple[str, int], ...]
    groups: tuple[tuple[int, ...], ...]
    ranks: Ranks
    symbols: dict[tuple[bool, ...], tuple[Symbols, list[str]]] = field(default_factory=dict)
    """The symbols, and the name of each, by which groups have equal sizes."""

    @cached_property
    def sizes_of(self) -> list[Callable[[list[int]], tuple[int, ...]]]:
        """For each group, what takes its sizes out of those of all dimensions."""
        return [itemgetter(*group) for group in self.groups]


def _told(planned: PlannedProgram, symbols: Symbols, decided: Mapping[str, int]) -> PlannedProgram:
    """The program, which knows its open dimensions and the sizes that meet its guards."""
    planned.guarded = decided
    planned.symbols = {(name, axis): symbol for name, axis, symbol in symbols}
    return planned


def opened_program(program: Program, trace: Trace) -> SymbolicProgram:
    """An open program, with the parts that a new shape needs to be evaluated by themselves."""
    sizes = [b.nbytes for b in program.buffers] + [call.workspace for call in program.calls]
    parts = {
        "ends": replace(program, calls=at_ends(program), buffers=()),
        "changes": changes(program),
        # those that may become larger than their room, and the bytes of all buffers
        "sizes": (
            *{expression(s): s for s in sizes if isinstance(s, OpenSize)}.values(),
            sum(b.nbytes for b in program.buffers),
        ),
    }
    return SymbolicProgram(program, trace, parts)

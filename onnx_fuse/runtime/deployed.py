"""A model that `onnx-fuse compile` has made: programs, cubins and weights, without their ONNX.

What is needed to run one is NumPy, cuda.bindings and the part of this package that this module
imports. The fused ONNX graph is in the file as well: `onnx.load.read` reads it.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnx_fuse.container import Container
from onnx_fuse.cuda.source import give, take_back
from onnx_fuse.errors import DeviceError, ModelError, UsageError
from onnx_fuse.program.call import Program, Shapes, dtype_of
from onnx_fuse.program.formula import Formulas
from onnx_fuse.program.packing import Packing
from onnx_fuse.program.problem import ITEMSIZE, Hardware
from onnx_fuse.runtime import encoding
from onnx_fuse.runtime.encoding import FORMAT, CheckedOpen, Module
from onnx_fuse.runtime.plan import PlannedOpenProgram, PlannedProgram, plan, with_sizes
from onnx_fuse.runtime.tensor import Argument

RECOMPILE = "recompile=True (--recompile) compiles the ONNX model inside anew, with NVRTC"
"""What helps where the programs in a file do not."""


class Deployed:
    """Open the file at `path` and check its inputs, outputs, programs, kernels and weights.

    Raises ModelError for a damaged or foreign file and for one of another version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.container = Container(path)
        manifest = self.container.manifest
        if manifest.get("format") != FORMAT:
            origin = f"of format {str(manifest.get('format'))[:20]}, written by onnx-fuse "
            origin += str(manifest.get("version"))[:20]
            raise self._fault(f"{origin}; this version reads format {FORMAT}: {RECOMPILE}")
        try:
            self.precision = str(manifest["precision"])
            self.inputs = [_end(e) for e in manifest["inputs"]]
            self.outputs = [_end(e) for e in manifest["outputs"]]
            self.targets = {str(k): _hardware(str(k), v) for k, v in manifest["targets"].items()}
            modules = [_module(m) for m in manifest["modules"]]
            self._modules: list[Module] = [module for module, _ in modules]
            self._cubins = [cubins for _, cubins in modules]
            self._entries = [_ProgramEntry(p) for p in manifest["programs"]]
            self.adapters: Any = manifest.get("adapters")
            """What it says of its inputs for adapters (`adapters.held.AdaptedFile`), or None."""
            self._packed: Mapping[str, Any] | None = manifest.get("packing")
            self._defaults = {str(k): (str(n), _shape(s)) for k, n, s in manifest["defaults"]}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._fault("damaged: its manifest lacks what a program needs") from error
        self._made: dict[str, PlannedProgram | PlannedOpenProgram | CheckedOpen] = {}
        self._given: set[str] = set()

    def _fault(self, what: str) -> ModelError:
        return self.container.fault(what)

    @property
    def entries(self) -> list[_ProgramEntry]:
        """The programs for these inputs."""
        names = {end.name for end in self.inputs}
        return [entry for entry in self._entries if entry.shapes.keys() == names]

    def with_inputs(self, about: Mapping[str, Any]) -> Deployed:
        """The same file with the programs that have further inputs, those for adapters or rows."""
        other = copy.copy(self)
        try:
            other.inputs = [*self.inputs, *map(_end, about["inputs"])]
        except (LookupError, TypeError, ValueError) as error:
            raise self._fault("damaged: it has no list of further inputs") from error
        return other

    def packed(self, kind: bool | str) -> tuple[Deployed, Packing]:
        """The same file with its programs over tokens only, and what these are fed besides.

        Raises UsageError where it has none of that kind, which is True or "zero".
        """
        held = self._packed
        if held is None or held["zero"] != (kind == "zero"):
            raise UsageError(
                f"{self.container.path}: its programs compute the padding: compile it with --pack "
                f"{'zero' if kind == 'zero' else 'exact'}, or {RECOMPILE}"
            )
        return self.with_inputs(held), Packing.from_json(held["fields"])

    @property
    def defaults(self) -> dict[str, np.ndarray[Any, Any]]:
        """The values of inputs that a caller may leave out."""
        items = self._defaults.items()
        return {name: self._array(at, dtype, shape) for name, (at, (shape, dtype)) in items}

    def shapes(self) -> list[dict[str, tuple[tuple[int, ...], str]]]:
        """(shape, dtype) of each input, of every program, in the order they were compiled in.

        Of one that serves several, those it was lowered for.
        """
        lists = [entry.shapes for entry in self.entries]
        return [shapes for i, shapes in enumerate(lists) if shapes not in lists[:i]]

    def check_precision(self, precision: str) -> None:
        """Raise UsageError for another precision than the file's.

        "fp32" is accepted for any file, since it is also the default.
        """
        if precision not in ("fp32", self.precision):
            raise UsageError(
                f"{self.container.path}: compiled for precision {self.precision}, not {precision}: "
                f"{RECOMPILE}"
            )

    def target(self, hw: Hardware) -> str:
        """The target whose programs this GPU runs. Raises DeviceError where there is none.

        A program counts on the multiprocessors and the shared memory of the chip it is made for.
        """
        usable = [
            (chip.sm_count, name)
            for name, chip in self.targets.items()
            if chip.arch == hw.arch
            and chip.sm_count <= hw.sm_count
            and chip.smem_per_block <= hw.smem_per_block
        ]
        if not usable:
            listing = ", ".join(
                f"{name} ({chip.arch}, {chip.sm_count} multiprocessors)"
                for name, chip in self.targets.items()
            )
            raise DeviceError(
                f"{self.container.path}: compiled for {listing}, but this GPU is {hw.name} "
                f"({hw.arch}, {hw.sm_count}): {RECOMPILE}"
            )
        return max(usable)[1]

    def made(self, shapes: Shapes, hw: Hardware) -> PlannedProgram:
        """The program for inputs of these shapes with its layout in memory.

        Raises UsageError where the file has none.
        """
        target = self.target(hw)
        ends = {name: (tuple(shape), dtype) for name, (shape, dtype) in shapes.items()}
        for entry in self.entries:
            if entry.target != target:
                continue
            try:
                numbers = entry.numbers(ends)
                if numbers is not None:
                    return self._at(entry, numbers, hw.arch)
            except (ModelError, ValueError) as error:
                if str(error).startswith(str(self.container.path)):
                    raise
                what = str(error) if isinstance(error, ModelError) else f"damaged: {error}"
                raise self._fault(what) from error
        first = list(shapes.items())[:_SHOWN]
        text = ", ".join(f"{name} {list(shape)}" for name, (shape, _) in first)
        raise UsageError(
            f"{self.container.path}: there is no program for {text}; there are those for "
            f"{self._listing(target)}; onnx-fuse compile takes several shapes, and {RECOMPILE}"
        )

    def _at(self, entry: _ProgramEntry, numbers: Mapping[str, int], arch: str) -> PlannedProgram:
        if entry.member not in self._made:
            self._give(arch)
            self._made[entry.member] = self._opened(entry, numbers)
        planned = self._made[entry.member]
        if isinstance(planned, PlannedProgram):
            return planned
        if isinstance(planned, PlannedOpenProgram):
            return planned.at(numbers)
        program = planned.at(numbers)
        return PlannedProgram(program, plan(program), planned, None, numbers)

    def _opened(
        self, entry: _ProgramEntry, numbers: Mapping[str, int]
    ) -> PlannedProgram | PlannedOpenProgram | CheckedOpen:
        """What an entry holds: a program of one shape, or an open one with or without a layout."""
        source = encoding.read(
            self.container.json(entry.member), entry.guards, self._array, {*self._modules},
            lambda program, sizes: self._check(
                program, with_sizes(entry.shapes, entry.open or (), sizes)
            ),
        )  # fmt: skip
        if entry.open is None:
            program = source.at({})
            return PlannedProgram(program, plan(program))
        return PlannedOpenProgram.of(source, entry.largest, numbers) if entry.largest else source

    def _array(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return self.container.tensor(name).view(dtype_of(dtype)).reshape(shape)

    def _listing(self, target: str) -> str:
        """The first of the shapes that can be run."""
        lines = list(dict.fromkeys(str(e) for e in self.entries if e.target == target))
        rest = len(lines) - _SHOWN
        return "; ".join(lines[:_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")

    def _check(self, program: Program, shapes: Shapes) -> None:
        """Check that inputs and outputs are the model's, and that each weight is there whole."""
        if {n: (t.shape, t.dtype) for n, t in program.inputs} != shapes:
            raise self._fault("damaged: a program takes other inputs than its entry says")
        if [n for n, _ in program.outputs] != [e.name for e in self.outputs]:
            raise self._fault("damaged: a program has other outputs than the model")
        for b in program.buffers:
            if b.kind == "weight" and self.container.tensor_place(b.name)[1] != b.nbytes:
                raise self._fault(f"damaged: weight {b.name[:80]!r} does not fit its program")

    def weight(self, name: str) -> np.ndarray[Any, Any]:
        """The bytes of a weight, over the mapped file."""
        return self.container.tensor(name)

    def _give(self, arch: str) -> None:
        """Hand the cubins for `arch` over to the loader of kernels."""
        if arch in self._given:
            return
        self._given.add(arch)
        keys = []
        for (source, defines), cubins in zip(self._modules, self._cubins, strict=True):
            if arch in cubins:
                give(source, defines, arch, self.container.member(cubins[arch]))
                keys.append((source, defines, arch))
        weakref.finalize(self.container, take_back, keys).atexit = False


class _ProgramEntry:
    """What the manifest says of a program: for one shape, or (`open`) for all that it serves."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        """Raises LookupError, TypeError or ValueError for what no compiled file says."""
        self.target, self.member = str(data["target"]), str(data["member"])
        self.shapes = _shapes(data["inputs"])
        self.open: list[tuple[str, int, str]] | None = None
        """(input, axis, symbol) of the sizes that may be others."""
        self.guards = Formulas.read(data["guards"], conditions=True)
        symbolic = data.get("open")
        if symbolic is None:
            return
        self.open = [(str(name), _axis(axis), str(s)) for name, axis, s in symbolic["symbols"]]
        for name, axis, _ in self.open:
            self.shapes[name][0][axis]  # there is one
        largest = symbolic["largest"]
        self.largest = None if largest is None else {str(k): _axis(n) for k, n in largest.items()}
        names = {symbol for _, _, symbol in self.open}
        if self.largest is not None and self.largest.keys() != names:
            raise ValueError("the largest sizes")
        if {*self.guards.symbols} != names:
            raise ValueError("guards of other symbols")
        self._ranges = {
            str(symbol): (str(name), _axis(low), _axis(high))
            for name, low, high, symbol in symbolic["ranges"]
        }
        self._names = {str(k): [str(d) for d in dims] for k, dims in symbolic["names"].items()}

    def numbers(self, shapes: Shapes) -> dict[str, int] | None:
        """The sizes by symbol, None where the program does not serve these shapes."""
        if self.open is None:
            return {} if shapes == self.shapes else None
        if shapes.keys() != self.shapes.keys():
            return None
        sizes: dict[str, int] = {}
        places = {(name, axis): symbol for name, axis, symbol in self.open}
        for name, (shape, dtype) in shapes.items():
            dims, kind = self.shapes[name]
            if kind != dtype or len(dims) != len(shape):
                return None
            for axis, size in enumerate(shape):
                symbol = places.get((name, axis), "")
                _, low, high = self._ranges.get(symbol, ("", dims[axis], dims[axis]))
                if not low <= size <= high:
                    return None
                if symbol and sizes.setdefault(symbol, size) != size:
                    return None
        return sizes if self.guards.hold(sizes) else None

    def __str__(self) -> str:
        if self.open is None:
            return ", ".join(f"{n} {list(shape)}" for n, (shape, _) in self.shapes.items())
        vary = {n: dims for n, dims in self._names.items() if not all(map(str.isdigit, dims))}
        ends = ", ".join(f"{n} [{', '.join(dims)}]" for n, dims in vary.items())
        sizes = (f"{name} from {low} to {high}" for name, low, high in self._ranges.values())
        return f"{ends} with {' and '.join(sizes)}"


def first_shapes(path: str | os.PathLike[str]) -> dict[str, list[int]]:
    """The shape of each input in the first program of a compiled file."""
    return {name: list(shape) for name, (shape, _) in Deployed(path).shapes()[0].items()}


_SHOWN = 8  # shapes that an error names


def _axis(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a size or an axis")
    return value


def _module(data: Mapping[str, Any]) -> tuple[Module, dict[str, str]]:
    """(source, defines), and the members of its cubins by architecture."""
    cubins = {str(arch): str(name) for arch, name in data["cubins"].items()}
    defines = tuple((str(k), str(v)) for k, v in data["defines"])
    return (str(data["source"]), defines), cubins


def _end(data: Sequence[Any]) -> Argument:
    name, kind, shape = data
    if not isinstance(name, str) or not isinstance(kind, str):
        raise ValueError("an end's name")
    if any(not (d is None or isinstance(d, str) or (type(d) is int and d >= 0)) for d in shape):
        raise ValueError("an end's shape")
    return Argument(name, kind, list(shape))


def _shape(data: Sequence[Any]) -> tuple[tuple[int, ...], str]:
    shape, dtype = data
    if dtype not in ITEMSIZE or any(type(d) is not int or d < 0 for d in shape):
        raise ValueError("a shape")
    return tuple(shape), dtype


def _shapes(data: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {str(name): _shape(value) for name, value in data.items()}


def _hardware(name: str, data: Mapping[str, Any]) -> Hardware:
    arch, sm_count, smem = str(data["arch"]), data["sm_count"], data["smem_per_block"]
    if type(sm_count) is not int or type(smem) is not int:
        raise ValueError("a target")
    return Hardware(name, arch, sm_count, smem, 0, 1.0, (("float32", 1.0),))

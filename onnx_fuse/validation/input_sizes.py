"""Sizes for the open axes of a model's inputs: what its graph admits, each axis at two sizes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import inline
from onnx_fuse.ir.build import required_inputs
from onnx_fuse.ir.sizes import Symbol, SymbolicSize, evaluate, size
from onnx_fuse.program import formula
from onnx_fuse.validation.sizes import Constraint, System
from onnx_fuse.validation.symbolic import caches
from onnx_fuse.validation.symbolic.graph import controls, follow
from onnx_fuse.validation.symbolic.walk import Lengths, Shape

Dim = int | str

# (leading axes, first other axis, step to the next): started from in turn. Axes differ first, so
# that exchanged ones are noticed; then come sizes for graphs that want equal axes, multiples of 8
# or 32, short contexts, a batch of one, whole images, in case not all constraints are seen.
PATTERNS = (
    *((2, 7, 4), (3, 12, 4), (3, 4, 1), (2, 32, 32), (3, 64, 32)),
    *((2, 8, 0), (3, 16, 0), (2, 32, 0), (3, 64, 0), (1, 7, 4), (1, 12, 4), (1, 8, 0), (1, 16, 0)),
    *((2, 2, 0), (1, 1, 0), (1, 2, 0), (1, 224, 0), (1, 256, 0)),
)
_TRIED = (*range(1, 33), *range(36, 65, 4), *range(72, 129, 8), *range(144, 257, 16))
_LARGER = (320, 384, 448, 512, 640, 768, 1024)
_LARGEST = 2**28  # elements of an input: 2 GiB while they are drawn
_ROUNDS = 12
_SETTINGS = 4
_SMALL = 4


@dataclass
class InputSizes:
    """One way to run a model: sizes by symbol, and which way its branches go."""

    sizes: dict[str, int]
    shapes: dict[str, list[int]]
    branches: dict[str, bool | int]
    sound: bool
    """Whether the sizes meet every constraint that was seen in the graph."""
    varied: list[str]
    """The symbols that may have more than one size."""
    lengths: dict[str, Array]
    """Of inputs that say how many tokens there are, by name: their entries."""
    way: _Assignment | None = None
    """The constraints that the sizes were found by."""

    def small(self) -> Iterator[tuple[str, InputSizes]]:
        """(what it is, sizes) with one dynamic axis at 1 or 0, and the others as they are here.

        The first few axes come one by one, then all others together.
        """
        way = self.way
        if way is None:
            return
        free = [s for s in way.free if s in self.varied]
        for group in filter(None, (*([s] for s in free[:_SMALL]), free[_SMALL:])):
            said = f"{' and '.join(group)} {'is' if len(group) == 1 else 'are'}"
            for n in (1, 0):
                yield f"{said} {n}", way.solved(self.sizes, dict.fromkeys(group, n))

    def __str__(self) -> str:
        parts = [f"{k}={v}" for k, v in (self.sizes | self.branches).items()]
        return ", ".join(parts) or "the shapes given"


OF_A_LIST = (  # what is said of such an input
    "is a sequence of tensors, which no .npz file holds: optimize it with --no-check, and run it "
    "by InferenceSession in Python"
)


def dims_of(model: ir.Model) -> dict[str, list[Dim]]:
    """The inputs' axes: a size, or a symbol (`name.axis` where the file gives none)."""
    result: dict[str, list[Dim]] = {}
    for value in required_inputs(model):
        name = value.name or ""
        if not isinstance(value.type, ir.TensorType):
            if isinstance(value.type, ir.SequenceType):
                raise ModelError(f"input '{name}' {OF_A_LIST}")
            raise ModelError(f"input '{name}' is no tensor: give inputs (--inputs FILE.npz)")
        # An input without a shape is taken for a matrix.
        dims = [None, None] if value.shape is None else list(value.shape)
        result[name] = [
            d
            if isinstance(d, int) and d >= 0
            else (d.value if isinstance(d, ir.SymbolicDim) else None) or f"{name}.{axis}"
            for axis, d in enumerate(dims)
        ]
    return result


def choices(model: ir.Model) -> Iterator[InputSizes]:
    """Ways to run the model, the likeliest first; those that the graph seems to refuse last."""
    dims = dims_of(model)
    plain = model
    if any(n.domain for n in model.graph):
        plain = inline(model, lambda node: not caches.is_grouped(node))
    doubtful: list[InputSizes] = []
    ways = [assignment(plain, dims, branches) for branches in _branches(plain)]
    large: list[int] = []
    any_fits = False
    for pattern in PATTERNS:
        for way in ways:
            choice = way.choice(*pattern)
            shape = max(choice.shapes.values(), key=lambda s: math.prod(map(float, s)), default=[])
            if math.prod(map(float, shape)) > _LARGEST:
                large = shape
                continue
            any_fits = True
            if choice.sound:
                yield choice
            else:
                doubtful.append(choice)
    yield from doubtful
    if large and not any_fits:
        raise ModelError(
            f"an input of shape {large} is too large to generate: give inputs (--inputs FILE.npz)"
        )


def _branches(model: ir.Model) -> list[dict[str, bool | int]]:
    """Settings of the inputs that an If of the graph turns on (of the first two such inputs)."""
    options: dict[str, list[bool | int]] = {}
    for node in model.graph:
        condition = node.inputs[0] if node.op_type == "If" and node.inputs else None
        control = controls(condition) if condition is not None else None
        if control is not None:
            name, number = control
            values = options.setdefault(name, [])
            values += [True, False] if number is None else [number]
    for values in options.values():
        if not isinstance(values[0], bool):
            values.append(next(n for n in range(len(values) + 1) if n not in values))
    first = list(options)[:2]
    settings = itertools.product(*(dict.fromkeys(options[name]) for name in first))
    ways = [dict(zip(first, s, strict=True)) for s in settings][:_SETTINGS]
    if caches.has_caches(model):
        return [{**way, caches.ONE_TOKEN: single} for way in ways for single in (True, False)]
    return ways


@dataclass
class _Assignment:
    """The constraints on sizes for one setting of the branches, and the search for sizes."""

    system: System
    shapes: dict[str, Shape]
    symbols: list[str]
    free: list[str]
    leading: set[str]
    branches: dict[str, bool | int]
    lengths: Mapping[str, Lengths]

    def choice(self, lead: int, base: int, step: int) -> InputSizes:
        others = [s for s in self.free if s not in self.leading]
        start = {s: base + step * others.index(s) if s in others else lead for s in self.free}
        return self.solved(start, {})

    def solved(self, start: Mapping[str, int], held: Mapping[str, int]) -> InputSizes:
        """Sizes near `start` that meet the constraints, with those that are `held` as they are."""
        free, sound = self.repaired(start, held)
        sizes = {s: self.value_of(size(s), free) for s in self.symbols}
        shapes = {n: [max(self.value_of(d, free), 0) for d in s] for n, s in self.shapes.items()}
        varied = [s for s in self.symbols if self.system.resolve(size(s)).number is None]
        lengths = {
            n: self.tokens(told, shapes[n], free) for n, told in self.lengths.items() if n in shapes
        }
        return InputSizes(sizes, shapes, self.branches, sound, varied, lengths, self)

    def tokens(self, told: Lengths, shape: Sequence[int], free: Mapping[Symbol, int]) -> Array:
        """The entries of an input that tells how many tokens there are: the last row has half."""
        total = self.value_of(told.total, free)
        if not told.places:
            return np.full(shape, total)
        rows = np.ceil(np.linspace(total, max(total // 2, 1), math.prod(shape)))
        return rows.reshape(shape) - 1

    def value_of(self, value: SymbolicSize, free: Mapping[Symbol, int]) -> int:
        number = evaluate(self.system.resolve(value), free)
        return 1 if number is None else int(number)

    def repaired(
        self, start: Mapping[str, int], held: Mapping[str, int]
    ) -> tuple[dict[Symbol, int], bool]:
        """Sizes changed one or two at a time until the constraints hold, as far as they can."""
        sizes: dict[Symbol, int] = {s: held.get(s, start[s]) for s in self.free}
        smallest = min((1, *held.values()))
        violated = self._violated(sizes, smallest)
        for _ in range(_ROUNDS):
            if not violated:
                break
            involved = [
                s
                for s in self.free
                if s not in held and any(s in d.a.symbols | d.b.symbols for d in violated)
            ]
            best, repair = (len([d for d in violated if not d.soft]), len(violated)), None
            for change in self._changes(involved, sizes):
                left = self._violated(sizes | change, smallest)
                count = (len([d for d in left if not d.soft]), len(left))
                if count < best:
                    best, repair = count, change
                    if not left:
                        break
            if repair is None:
                break
            sizes |= repair
            violated = self._violated(sizes, smallest)
        return sizes, not any(not d.soft for d in violated)

    def _violated(self, sizes: Mapping[Symbol, int], smallest: int) -> list[Constraint]:
        """The constraints that do not hold; a size below the smallest counts as one."""
        bad = self.system.violated(sizes)
        bad += [Constraint("least", self.system.resolve(size(s)), size(smallest))
                for s in self.symbols if self.value_of(size(s), sizes) < smallest]  # fmt: skip
        return bad

    def _changes(
        self, symbols: Sequence[str], sizes: Mapping[Symbol, int]
    ) -> Iterator[dict[Symbol, int]]:
        """Other sizes for one symbol, nearest first, then for all of them at once."""
        for group in (*([s] for s in symbols), symbols):
            divisors = set().union(*(self.system.divisors(s) for s in group)) if group else set()
            unit = math.lcm(*(d for d in divisors if d <= 64)) if divisors else 1
            multiples = [unit * k for k in range(1, 17)] if unit > 1 else []
            for s in sorted(
                {*_TRIED, *multiples, *_LARGER}, key=lambda n: _distance(n, sizes, group)
            ):
                yield dict.fromkeys(group, s)


def _distance(n: int, sizes: Mapping[Symbol, int], group: Sequence[str]) -> float:
    return max((abs(math.log(n / max(sizes[s], 1))) for s in group), default=0.0)


def assignment(
    model: ir.Model, dims: Mapping[str, Sequence[Dim]], branches: dict[str, bool | int]
) -> _Assignment:
    symbols = list(dict.fromkeys(d for shape in dims.values() for d in shape if isinstance(d, str)))
    system = System(symbols)
    shapes = {name: tuple(size(d) for d in shape) for name, shape in dims.items()}
    lengths = follow(model, system, shapes, branches)
    for symbol in symbols:
        meant = _expression(symbol, set(symbols))
        if meant is not None:
            system.require("equal", size(symbol), meant, soft=True)
    free = [s for s in symbols if system.resolve(size(s)) == size(s)]
    first = {_free_symbol(system, shape[0]) for shape in shapes.values() if shape}
    inner = {_free_symbol(system, d) for shape in shapes.values() for d in shape[1:]}
    leading = {s for s in first - inner if s is not None}
    return _Assignment(system, shapes, symbols, free, leading, branches, lengths)


def _free_symbol(system: System, dim: SymbolicSize) -> str | None:
    terms = system.resolve(dim).terms
    [monomial] = terms if len(terms) == 1 else [()]
    alone = len(monomial) == 1 and terms[monomial] == 1
    return monomial[0] if alone and isinstance(monomial[0], str) else None


def _expression(dim: str, symbols: set[str]) -> SymbolicSize | None:
    """The size that a name such as `past + 1` means in terms of other symbols, or None."""
    others = {s: size(s) for s in symbols if s != dim}
    try:
        meant = formula.value(dim.replace("//", "/").replace("/", "//"), others)
    except (ValueError, TypeError, RecursionError):
        return None
    return meant if isinstance(meant, SymbolicSize) and not (-meant).nonnegative else None

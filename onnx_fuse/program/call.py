"""The LLIR: a flat list of calls, problems over buffers.

Kernels read their operands at `Ptr(name)`: the address of the Tensor bound under that name, its
offset included. Building a Program needs no GPU. How a graph becomes calls is said in
`lower.context`.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from graphlib import TopologicalSorter
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from onnx_fuse.errors import ModelError
from onnx_fuse.program.launch import Launches
from onnx_fuse.program.problem import ITEMSIZE, AnyProblem, Choice, Hardware

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""(shape, dtype) of each input, by name."""

if TYPE_CHECKING:
    from onnx_fuse.program.expression import Expression

ModelBytes = bytes  # a serialized ModelProto
INT32_LIMIT = 2**31


LOWEST = {
    "float16": float.fromhex("-0x1.fffffep127"), "bfloat16": float.fromhex("-0x1.fep127"),
    "float32": float.fromhex("-0x1.fffffep127"), "float64": -sys.float_info.max,
    "int8": -128, "uint8": 0,
}  # fmt: skip
"""What MaxPool gives where a window has no element: the lowest finite number of each type. For
float16 onnxruntime rounds float32's, to -inf."""


@cache
def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy dtype of a ITEMSIZE name."""
    if name.startswith(("bfloat", "float8", "float4", "int4", "uint4", "int2", "uint2")):
        import ml_dtypes

        name = getattr(ml_dtypes, name)
    return np.dtype(name)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The row-major strides of a shape, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Tensor:
    """A view of a buffer: `shape`, `strides` and `offset` count elements of `dtype`.

    `dtype` is a name of problem.ITEMSIZE ("float32", "bfloat16", "bool", ...).
    """

    buffer: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def size(self) -> int:
        """The number of elements of the view."""
        return prod(self.shape)

    @property
    def span(self) -> int:
        """The number of elements of memory from the first to the last, gaps included."""
        if not self.size:
            return 0
        return 1 + sum(abs(s) * (d - 1) for d, s in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, broadcast ones counted each time."""
        return self.size * ITEMSIZE[self.dtype]

    @property
    def wide(self) -> bool:
        """Whether an element's index may pass 2^31 - 1."""
        reach = sum((d - 1) * abs(s) for d, s in zip(self.shape, self.strides, strict=True))
        return max(self.size, reach + 1) >= INT32_LIMIT

    @property
    def dense(self) -> bool:
        """Whether the elements stand in row-major order without gaps."""
        expected = dense_strides(self.shape)
        pairs = zip(self.shape, self.strides, expected, strict=True)
        return self.size == 0 or all(d == 1 or s == e for d, s, e in pairs)

    def reshape(self, shape: Sequence[int]) -> Tensor | None:
        """The same elements in another shape without a copy, None where strides forbid it."""
        strides = reshape_strides(self.shape, self.strides, shape)
        if strides is None:
            return None
        return Tensor(self.buffer, self.dtype, tuple(shape), strides, self.offset)

    def view(self, shape: Sequence[int]) -> Tensor:
        """The same elements in another shape. Raises ValueError where that takes a copy."""
        view = self.reshape(shape)
        if view is None:
            raise ValueError(f"{self} is not seen as {list(shape)} without a copy")
        return view

    def permute(self, perm: Sequence[int]) -> Tensor:
        """Axes in the order `perm`."""
        shape = tuple(self.shape[p] for p in perm)
        strides = tuple(self.strides[p] for p in perm)
        return Tensor(self.buffer, self.dtype, shape, strides, self.offset)

    def expand(self, shape: Sequence[int]) -> Tensor:
        """Broadcast to `shape` or ValueError: new and stretched axes get stride 0."""
        lead = len(shape) - len(self.shape)
        if lead < 0 or any(d not in (1, n) for d, n in zip(self.shape, shape[lead:], strict=True)):
            raise ValueError(f"{list(self.shape)} does not broadcast to {list(shape)}")
        strides = [0] * lead + [
            0 if d == 1 else s for d, s in zip(self.shape, self.strides, strict=True)
        ]
        return Tensor(self.buffer, self.dtype, tuple(shape), tuple(strides), self.offset)

    def slice(self, starts: Sequence[int], steps: Sequence[int], shape: Sequence[int]) -> Tensor:
        """x[start::step] on every axis, `shape` elements long."""
        offset = self.offset + sum(b * s for b, s in zip(starts, self.strides, strict=True))
        strides = tuple(k * s for k, s in zip(steps, self.strides, strict=True))
        return Tensor(self.buffer, self.dtype, tuple(shape), strides, offset)

    def part(self, axis: int, start: int, size: int, step: int = 1) -> Tensor:
        """`size` places along one axis, from `start` on, `step` apart."""
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])
        strides = (*self.strides[:axis], step * self.strides[axis], *self.strides[axis + 1 :])
        offset = self.offset + start * self.strides[axis]
        return Tensor(self.buffer, self.dtype, shape, strides, offset)

    def at(self, axis: int, place: int) -> Tensor:
        """One place along an axis, without that axis."""
        shape = (*self.shape[:axis], *self.shape[axis + 1 :])
        strides = (*self.strides[:axis], *self.strides[axis + 1 :])
        offset = self.offset + place * self.strides[axis]
        return Tensor(self.buffer, self.dtype, shape, strides, offset)

    def first(self, shape: Sequence[int]) -> Tensor:
        """The first elements along every axis, as many as `shape` says."""
        return Tensor(self.buffer, self.dtype, tuple(shape), self.strides, self.offset)

    def __str__(self) -> str:
        layout = "" if self.dense else f" strides={self.strides}".replace(" ", "")
        offset = f"+{self.offset}" if self.offset else ""
        return f"b{self.buffer}{offset} {self.dtype}{list(self.shape)}{layout}".replace(", ", ",")


def reshape_strides(
    shape: Sequence[int], strides: Sequence[int], target: Sequence[int]
) -> tuple[int, ...] | None:
    """Strides of the same elements under `target`, or None if a copy is needed."""
    if 0 in target or 0 in shape:
        return dense_strides(target)
    old = [(d, s) for d, s in zip(shape, strides, strict=True) if d != 1]
    new: list[int] = [0] * len(target)
    i = 0
    j = 0
    while i < len(old):
        # the shortest runs old[i:end], wanted[j:stop] of equal size
        end, stop = i + 1, j + 1
        while j < len(target) and target[j] == 1:
            j, stop = j + 1, j + 2
        left, right = old[i][0], target[j]
        while left != right:
            if left < right:
                if old[end - 1][1] != old[end][0] * old[end][1]:
                    return None
                left, end = left * old[end][0], end + 1
            else:
                right, stop = right * target[stop], stop + 1
        step = old[end - 1][1]
        for k in reversed(range(j, stop)):
            new[k] = step
            step *= target[k]
        i, j = end, stop
    return tuple(new)


@dataclass(frozen=True)
class Buffer:
    """Memory of the program. `kind`: input, weight, constant, temp, output, random.

    `name` is the model's value for inputs, weights and outputs. Only temps live in the arena.
    """

    id: int
    kind: str
    nbytes: int
    name: str = ""


@dataclass(frozen=True)
class Call:
    """One step: kernel launches, or `host`, a serialized one-node model for onnxruntime.

    `reads` and `writes` bind the launches' argument names; `workspace` bytes are bound under
    "workspace". `inplace` pairs (write, read) may share memory element for element.
    """

    kernel: str
    nodes: tuple[str, ...]
    launches: Launches
    reads: tuple[tuple[str, Tensor], ...]
    writes: tuple[tuple[str, Tensor], ...]
    workspace: int = 0
    flops: int = 0
    bytes: int = 0
    note: str = ""
    """What is said of a call that onnxruntime runs, or that runs again."""
    inplace: tuple[tuple[str, str], ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    """(read, write) of each tensor, of a call that does nothing but copy them."""
    problem: AnyProblem | None = field(default=None, repr=False)
    """What is computed: passes rewrite it, and the last one makes its launches."""
    choice: Choice | None = None
    """The kernel of the launches."""
    expression: Expression | None = field(default=None, repr=False)
    host: ModelBytes = field(default=b"", repr=False)

    @classmethod
    def of(
        cls,
        kernel: str,
        nodes: Sequence[str],
        problem: AnyProblem,
        reads: Mapping[str, Tensor],
        writes: Mapping[str, Tensor],
        **more: Any,
    ) -> Call:
        """The call of a problem, whose launches are still to be made.

        Without others given, its bytes are those of all operands.
        """
        pair, flops = (tuple(reads.items()), tuple(writes.items())), problem.flops
        costs = {"bytes": sum(t.nbytes for part in pair for _, t in part), "flops": flops, **more}
        return cls(kernel, tuple(nodes), (), *pair, problem=problem, **costs)

    @property
    def why(self) -> str:
        """The note and the choice in words."""
        return ": ".join(filter(None, (self.note, str(self.choice or ""))))

    @cached_property
    def buffers(self) -> frozenset[int]:
        """The buffers that the call reads or writes."""
        return frozenset([t.buffer for _, t in (*self.reads, *self.writes)])

    def __str__(self) -> str:
        reads = ", ".join(f"{name}={tensor}" for name, tensor in self.reads)
        writes = ", ".join(f"{name}={tensor}" for name, tensor in self.writes)
        grids = " ".join("x".join(map(str, launch.grid)) for launch in self.launches)
        nodes = " ".join(self.nodes[:4]) + (" ..." if len(self.nodes) > 4 else "")
        why = f"  [{self.why}]" if self.why else ""
        return f"{self.kernel}<{grids}>  {writes} <- {reads}  # {nodes}{why}"


@dataclass(frozen=True)
class ColumnOrder:
    """Another order of a constant's columns, and what it is called."""

    name: str
    of: Callable[[np.ndarray], np.ndarray]
    """[..., n] -> the same, row by row, with the columns in that order."""


class PassContext(Protocol):
    """What the passes over a program need of the lowering that it comes from."""

    hw: Hardware
    prefs: Mapping[str, str] | None
    buffers: list[Buffer]

    def scratch(self, dtype: str, shape: Sequence[int]) -> Tensor:
        """A new temporary."""

    def constant(self, array: np.ndarray) -> Tensor:
        """An array known at lowering, in device memory."""

    def known(self, tensor: Tensor) -> np.ndarray | None:
        """The value of a tensor that nothing in the program writes to; None for any other."""

    def folded(
        self,
        gamma: Tensor,
        beta: Tensor | None,
        w: Tensor,
        c: Tensor,
        trans: bool,
        order: ColumnOrder | None = None,
    ) -> dict[str, Tensor] | None:
        """wq, cs, cv of a LayerNormGemm in 16 bits whose parameters nothing writes to, or None.

        wq = gamma * w [k, n] (stored as [n, k] if `trans`), cs = its column sums, cv = beta w + c,
        all with their columns in the `order`. Without beta the norm is an RMSNorm, whose mean is 0,
        and cs is 0.
        """


@dataclass(frozen=True)
class Loop:
    """The inputs and results of a stage whose model is one pass of a Loop.

    The model's first inputs are `inputs`: the pass's number, a condition and the states, and its
    outputs the condition, the states and what is stacked. `trips`, `condition` ("" where there is
    none) and `start`, the states before the first pass, are inputs of the stage or `known`.
    `results` are those of (states, stacks) that are the stage's outputs; `empty` is a stack after
    no pass.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    trips: str
    condition: str
    start: tuple[str, ...]
    known: Mapping[str, np.ndarray] = field(repr=False)
    results: tuple[int, ...]
    empty: tuple[np.ndarray, ...]


def in_turn(before: Mapping[int, Iterable[int]]) -> list[int]:
    """The keys, each behind those `before` it, and of what may come next the least first."""
    sorter = TopologicalSorter(before)
    sorter.prepare()
    ready: list[int] = []
    order = []
    while sorter.is_active():
        for key in sorter.get_ready():
            heapq.heappush(ready, key)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return order


def run_loop(
    loop: Loop,
    feeds: Mapping[str, Any],
    once: Callable[[Mapping[str, Any]], Sequence[Any]],
    stack: Callable[[Sequence[Any]], Any],
) -> list[Any]:
    """The results of a Loop: `once` runs its model, `stack` puts arrays along a new first axis.

    Values may be anything with a shape that `numpy.asarray` reads. Raises ModelError where passes
    stack arrays of different shapes.
    """
    values = {**loop.known, **feeds}
    limit = _first_number(values[loop.trips]) if loop.trips else None
    going = not loop.condition or bool(_first_number(values[loop.condition]))
    states = [values[name] for name in loop.start]
    piles: list[list[Any]] = [[] for _ in loop.empty]
    number = 0
    while going and (limit is None or number < limit):
        first = [np.array(number, np.int64), np.array(True), *states]
        condition, *results = once({**feeds, **dict(zip(loop.inputs, first, strict=True))})
        states = results[: len(states)]
        for pile, row in zip(piles, results[len(states) :], strict=True):
            pile.append(row)
        going = bool(_first_number(condition))
        number += 1
    for name, pile in zip(loop.outputs[1 + len(states) :], piles, strict=True):
        if len({tuple(row.shape) for row in pile}) > 1:
            raise ModelError(f"the passes of a Loop give '{name}' in different shapes")
    stacks = [stack(p) if p else e for p, e in zip(piles, loop.empty, strict=True)]
    return [[*states, *stacks][i] for i in loop.results]


def _first_number(value: object) -> int:
    return int(np.asarray(value).reshape(-1)[0])


@dataclass(frozen=True)
class Stage:
    """A model to run after the calls, over their results: some of its sizes depend on data.

    `inputs` are where its inputs stand on the device; None: an earlier stage makes them.
    onnxruntime runs it if `host`, else it is lowered in its turn; as often as `loop` says.
    """

    model: bytes = field(repr=False)
    inputs: tuple[tuple[str, Tensor | None], ...]
    outputs: tuple[str, ...]
    host: bool
    loop: Loop | None = None


class NeedsValues(Exception):
    """Lowering needs the values of these inputs, which decide about shapes."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"the values of {', '.join(names)} decide about shapes")
        self.names = tuple(names)


LENGTHS = "onnx_fuse.lengths"
"""Input of a program, int32 [B]: the tokens of each sequence before the new ones.

Where `Shapes` has it, caches that grow are lowered in rooms: past and present are one place, with
room for more tokens than there are, and all that a token more changes is this number, to which each
run adds one."""


class NoRoom(Exception):
    """Raised for a graph whose growing caches cannot be lowered in rooms, with the reason."""


@dataclass(frozen=True)
class Program:
    """Kernel calls in order over buffers: a pure function of (model, shapes, Hardware).

    `inputs` and `outputs` are in the model's order. An output known at lowering is an array, one of
    a later stage None; an output that is a state's next value is that state's own tensor.
    """

    calls: tuple[Call, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[tuple[str, Tensor], ...]
    outputs: tuple[tuple[str, Tensor | np.ndarray | None], ...]
    constants: Mapping[int, np.ndarray] = field(repr=False)
    fallbacks: tuple[str, ...] = ()
    """Operators that run on onnxruntime, each with the reason."""
    stages: tuple[Stage, ...] = ()
    """What depends on the calls' results, in order."""
    setup: tuple[Call, ...] = ()
    """Calls that read nothing but constants: they run once, before the first run. What they write
    are buffers of kind constant that `constants` does not hold."""
    sequential: bool = False
    """Whether the calls run one after another, which keeps temporaries short-lived."""
    in_parts: tuple[str, ...] = ()
    """Operators with kernels of ours that are lowered as their bodies, each with the reason."""

    def __str__(self) -> str:
        lines = [f"input {name} = {tensor}" for name, tensor in self.inputs]
        lines += [f"once {call}" for call in self.setup]
        lines += [f"{i:4d} {call}" for i, call in enumerate(self.calls)]
        lines += [f"output {name} = {t}" for name, t in self.outputs if isinstance(t, Tensor)]
        return "\n".join(lines)

"""A program within a memory budget: what it recomputes so that its plan takes no more bytes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

from onnx_fuse.errors import UsageError
from onnx_fuse.kernels import costs
from onnx_fuse.program.call import Call, Program
from onnx_fuse.program.passes.recompute import Lifetimes, gathered_twice, recomputed
from onnx_fuse.program.problem import Collective, Hardware
from onnx_fuse.runtime.plan import plan

Budget: TypeAlias = "int | Literal['min']"
"""The most bytes that a program may take, or "min" for the fewest that recomputing leaves."""
STEPS = 32
"""How many amounts of recomputing are tried before the smallest that suffices is looked for."""
NAMED = 5
"""Kinds of calls that a message names."""
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse(memory: int | str) -> Budget:
    """The budget that a user gives: bytes, a text such as "6GiB" or "800 MB", or "min".

    Units are powers of 1024 with an "i" (KiB, MiB, GiB, TiB) and of 1000 without. Raises
    UsageError.
    """
    if memory == "min":
        return "min"
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(memory), re.IGNORECASE)
    bytes_ = 0
    if match:
        number, unit, binary = match.groups()
        bytes_ = int(float(number) * (1024 if binary else 1000) ** _UNITS[unit.lower()])
    if bytes_ <= 0:
        raise UsageError(f'memory {memory!r}: give bytes, a size such as "6GiB", or "min"')
    return bytes_


@dataclass(frozen=True)
class Recompute:
    """What a program recomputes so that it keeps within a budget."""

    turn: int
    """The call behind which second runs stand."""
    calls: frozenset[int]
    """The calls that run a second time."""
    before: int
    """Bytes that the program took without them."""
    after: int
    """Bytes that it takes with them: inputs, weights, states, outputs and temporaries."""
    seconds: float
    """What they cost, as predicted."""
    fixed: int = 0
    """Bytes of `after` for weights, states, inputs and outputs."""
    kernels: tuple[str, ...] = ()
    """The most frequent calls by name, each with how many of it there are."""
    ranks: int = 1
    """The GPUs that train together; the bytes are those of one of them."""

    def __str__(self) -> str:
        each = f" on each of {self.ranks} GPUs" if self.ranks > 1 else ""
        head = f"memory: {self.after / 2**30:.2f} GiB{each}"
        fixed = f"{self.fixed / 2**30:.2f} for weights, states, inputs and outputs"
        if not self.calls:
            return f"{head}, {fixed}; nothing is computed again"
        return (
            f"{head} instead of {self.before / 2**30:.2f}, {fixed}; {len(self.calls)} calls run "
            f"again in the backward, {self.seconds * 1e3:.2f} ms: {', '.join(self.kernels)}"
        )


def within(program: Program, budget: Budget, hw: Hardware) -> Recompute:
    """The least recomputing by which the program keeps within `budget`. Its sizes are ints.

    Raises UsageError where no recomputing suffices; the message has the fewest bytes possible.
    """
    fixed = sum(b.nbytes for b in program.buffers if b.kind != "temp")
    before = fixed + plan(program).arena
    exchanged = (c.problem for c in program.calls if isinstance(c.problem, Collective))
    ranks = next((problem.ranks for problem in exchanged), 1)
    if budget != "min" and before <= budget:
        return Recompute(0, frozenset(), before, before, 0.0, fixed, ranks=ranks)
    memory = Lifetimes(program)

    def seconds(call: Call) -> float:
        return 0.0 if call.problem is None else costs.seconds(call.problem, hw)

    choices = memory.candidates(seconds)

    def first(count: int) -> Recompute:
        calls = frozenset(i for choice in choices[:count] for i in choice.calls)
        arena = plan(recomputed(program, memory.turn, calls)).arena if calls else before - fixed
        cost = sum(seconds(program.calls[i]) for i in calls)
        names = Counter(program.calls[i].kernel for i in sorted(calls))
        kernels = tuple(f"{n} {name}" for name, n in names.most_common(NAMED))
        after = fixed + arena
        return Recompute(memory.turn, calls, before, after, cost, fixed, kernels, ranks)

    low, tried = 0, []
    for count in sorted({len(choices) * k // STEPS for k in range(STEPS + 1)}):
        tried.append(first(count))
        if budget != "min" and tried[-1].after <= budget:
            option = tried[-1]
            while count - low > 1:  # fewer may do
                middle = (low + count) // 2
                less = first(middle)
                if less.after <= budget:
                    count, option = middle, less
                else:
                    low = middle
            return option
        low = count
    best = min(tried, key=lambda option: (option.after, option.seconds))
    if budget == "min":
        return best
    hint = ""
    if ranks > 1 and not gathered_twice(program.calls):
        hint = '; shard="all" may take less'
    raise UsageError(
        f"a memory of {budget / 2**30:.2f} GiB is too little: a step of these shapes needs at "
        f"least {best.after / 2**30:.2f} GiB{f' on each of {ranks} GPUs' if ranks > 1 else ''}, "
        f"{fixed / 2**30:.2f} of them for weights, states, inputs and outputs{hint}"
    )

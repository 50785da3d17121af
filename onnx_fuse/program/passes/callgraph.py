"""A list of calls as a graph: who writes and reads what, and what a pass puts in a call's place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

from onnx_fuse.kernels import refused, serves
from onnx_fuse.kernels.costs import pays, seconds
from onnx_fuse.program.call import Call, PassContext, Tensor
from onnx_fuse.program.problem import AnyProblem
from onnx_fuse.program.spec import misaligned

LARGE = 1 << 16
"""The number of elements from which a pass over a tensor takes longer than its launch."""
Uses: TypeAlias = dict[int, list[int]]


def uses(parts: Iterable[Sequence[tuple[str, Tensor]]]) -> Uses:
    """Buffer -> the places of the parts that have it, once for each time."""
    found: Uses = defaultdict(list)
    for i, part in enumerate(parts):
        for _, tensor in part:
            found[tensor.buffer].append(i)
    return found


def writers_of(calls: Iterable[Call]) -> Uses:
    """Buffer -> the calls that write it."""
    return uses(call.writes for call in calls)


def in_order(first: Call, second: Call, *, siblings: bool = False) -> bool:
    """Whether `second` must follow `first`: it touches what that writes, or writes what that reads.

    `siblings` may write one buffer.
    """
    written, read = ({t.buffer for _, t in part} for part in (first.writes, first.reads))
    touched = {t.buffer for _, t in second.reads} if siblings else second.buffers
    return not written.isdisjoint(touched) or any(t.buffer in read for _, t in second.writes)


def nodes_of(*calls: Call) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for call in calls for name in call.nodes))


def steps_of(call: Call) -> list[str]:
    """The operators of a pointwise call; none of any other."""
    return [step.name for step in call.expression.steps] if call.expression is not None else []


def operands_of(call: Call, step: str) -> tuple[Tensor, ...]:
    """Both operands and the result of a pointwise call that is one step of two; else nothing."""
    if steps_of(call) != [step] or (len(call.reads), len(call.writes)) != (2, 1):
        return ()
    return tuple(t for _, t in (*call.reads, *call.writes))


def rename_buffer(tensor: Tensor, same: Mapping[int, int]) -> Tensor:
    """The tensor, moved to the buffer that `same` names for its own, if any."""
    return replace(tensor, buffer=same[tensor.buffer]) if tensor.buffer in same else tensor


def rename_buffers(call: Call, same: Mapping[int, int]) -> Call:
    """The call with each buffer replaced by the one that `same` names for it, if any."""
    if call.buffers.isdisjoint(same):
        return call
    reads, writes = (
        tuple((n, rename_buffer(t, same)) for n, t in part) for part in (call.reads, call.writes)
    )
    return replace(call, reads=reads, writes=writes)


def whole(size: int, *tensors: Tensor) -> bool:
    """Whether each tensor is `size` elements in order, from its buffer's first on."""
    return all(t.dense and not t.offset and t.size == size for t in tensors)


class Calls:
    """The calls under a pass, by place; `keep` are buffers whose last values are wanted."""

    def __init__(self, calls: Sequence[Call], keep: Collection[int], ctx: PassContext) -> None:
        self.calls, self.keep, self.ctx = calls, keep, ctx
        self.hw, self.prefs = ctx.hw, ctx.prefs
        self.now: list[tuple[Call, ...]] = [(call,) for call in calls]
        """The calls that now replace the call at each index; none where it was fused away."""

    @cached_property
    def readers(self) -> Uses:
        """Buffer -> the calls that read it, once for each operand."""
        return uses(call.reads for call in self.calls)

    @cached_property
    def writers(self) -> Uses:
        """Buffer -> the calls that write it."""
        return writers_of(self.calls)

    def sole_producer(self, i: int, tensor: Tensor) -> tuple[int, Call] | None:
        """The only producer of what call `i` alone reads, once, and its place.

        None where something keeps that buffer, or other calls read or write it.
        """
        alone = self.readers[tensor.buffer] == [i] and tensor.buffer not in self.keep
        return self.producer(tensor) if alone else None

    def producer(self, tensor: Tensor) -> tuple[int, Call] | None:
        """The one call that writes it, all of it and nothing else in its buffer, and its place."""
        writers = self.writers[tensor.buffer]
        now = self.now[writers[0]] if len(writers) == 1 else ()
        if not now:
            return None
        written = sum(t.size for _, t in now[0].writes if t.buffer == tensor.buffer)
        return (writers[0], now[0]) if written == tensor.size else None

    def may_write(self, at: int, i: int, tensor: Tensor) -> bool:
        """Whether call `at` may write the tensor in place of call `i`.

        No other call may write it, nor one in between read it, as it does the old value of a state.
        """
        readers, writers = self.readers[tensor.buffer], self.writers[tensor.buffer]
        return writers == [i] and not any(at <= r < i for r in readers)

    def written(self, at: int, i: int, *tensors: Tensor) -> bool:
        """Whether a call from `at` on, before call `i`, writes to the buffer of one of them."""
        return any(at <= w < i for t in tensors for w in self.writers[t.buffer])

    def serves(self, problem: AnyProblem) -> bool:
        """Whether a kernel serves the problem, and the one that the user asks for, if any, does."""
        return not refused(problem, self.hw, self.prefs) and serves(
            problem.op, problem, self.hw, self.prefs
        )

    def seconds(self, problem: AnyProblem) -> float:
        """Seconds of the kernel that the models choose; infinity where there is none."""
        return seconds(problem, self.hw, self.prefs, records=False)

    def pays(self, before: Iterable[AnyProblem], after: Iterable[AnyProblem]) -> bool:
        """Whether the problems after a rewrite cost less than those before it."""
        return pays(before, after, self.hw, self.prefs)

    def gather(self, places: Iterable[int], at: int, *together: Call) -> None:
        """Replace the calls at these places by others, which stand at `at`."""
        for i in places:
            self.now[i] = ()
        self.now[at] = together

    def left(self) -> list[Call]:
        """The calls after a pass, in order."""
        return [call for now in self.now for call in now]

    def fuse(self, at: int, i: int, call: Call, *after: Call, here: bool = False) -> bool:
        """Replace the calls at `at` and `i` by `call`, with the calls `after` at `i`.

        `call` stands at `at`, or at `i` if `here`. Returns False, and does nothing, where its
        problem is another than that of `at` and no kernel serves it, or where an operand, read or
        written, stands at an address that its kernels do not take: a part of another buffer.
        """
        (old,) = self.now[at]
        if any(misaligned(each) for each in (call, *after)):
            return False
        differs = call.problem is not None and call.problem != old.problem
        if differs and call.problem is not None and not self.serves(call.problem):
            return False
        call = replace(call, nodes=nodes_of(old, self.calls[i]))
        self.now[at], self.now[i] = ((), (call, *after)) if here else ((call,), after)
        return True


Rule: TypeAlias = Callable[[Calls, int, Call], None]


def rewrite(rule: Rule, calls: Calls) -> list[Call]:
    """The calls after a rule that was asked at each of them, in order."""
    for i in range(len(calls.calls)):
        for call in calls.now[i]:
            rule(calls, i, call)
    return calls.left()

"""Pointwise chains become one call.

Calls form a graph by the buffers they read and write. A pointwise call is contracted into a
pointwise producer whose element it reads at the same place, if no other path leads from the one to
the other; what only the chain itself read is then never stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise
from math import prod
from operator import or_

from onnx_fuse.program.call import Call, Tensor, in_turn
from onnx_fuse.program.data_movement import Pointwise
from onnx_fuse.program.expression import Expression, Operation, Row
from onnx_fuse.program.passes.callgraph import nodes_of, uses
from onnx_fuse.program.problem import ITEMSIZE

MAX_OPERANDS = 24
MAX_STEPS = 96
MAX_SCALAR_STEPS = 4  # a number that each element works out again


def fuse(calls: Sequence[Call], keep: Collection[int], *, narrow: bool = True) -> list[Call]:
    """Contract pointwise chains, then order the groups and forget stores nothing reads.

    Unless `narrow`, a chain ends where it stores elements of one byte.
    """
    groups: dict[int, Call] = {}
    parents: dict[int, set[int]] = {}
    ancestors: list[int] = []
    home: dict[int, int] = {}  # call index -> group that holds it
    writers: dict[int, list[int]] = defaultdict(list)
    readers: dict[int, list[int]] = defaultdict(list)
    members: dict[int, set[int]] = {}
    all_readers = uses(call.reads for call in calls)

    def inner(inside: set[int], buffer: int) -> bool:
        """Whether nothing but these calls reads the buffer."""
        return buffer not in keep and inside.issuperset(all_readers[buffer])

    for q, call in enumerate(calls):
        read = {t.buffer for _, t in call.reads}
        wrote = {t.buffer for _, t in call.writes}
        direct = {w for b in read | wrote for w in writers[b]}
        direct |= {r for b in wrote for r in readers[b]}
        deps = {home[d] for d in direct}
        groups[q], parents[q], home[q], members[q] = call, deps, q, {q}
        mask = 0
        for d in deps:
            mask |= ancestors[d] | 1 << d
        ancestors.append(mask)
        for b in read:
            readers[b].append(q)
        for b in wrote:
            writers[b].append(q)
        group, above = q, reduce(or_, (ancestors[d] for d in deps), 0)
        for p in sorted(deps, reverse=True):
            if p == group or p not in groups or groups[group].expression is None:
                continue
            if above >> p & 1:  # another path leads through another of its parents
                continue
            inside = members[p] | members[group]
            first = groups[p]
            bytes_of = {t.buffer for _, t in first.writes if ITEMSIZE[t.dtype] == 1}
            if not narrow and any(t.buffer in bytes_of for _, t in groups[group].reads):
                continue
            if first.expression is not None and len(first.expression.steps) <= MAX_SCALAR_STEPS:
                stays = any(not inner(inside, t.buffer) for _, t in first.writes)
                first = first if stays else broadcast_call(first, groups[group])
            joined = join(first, groups[group])
            if joined is not None:
                joined = without_stores(joined, partial(inner, inside))
            if joined is None or len(joined.reads) + len(joined.writes) > MAX_OPERANDS:
                continue
            members[p] = inside
            # `group` lives on in p: everything that knew it now knows p
            groups[p] = joined
            parents[p] = (parents[p] | parents[group]) - {p, group}
            extra = ancestors[group] & ~(1 << p)
            for g in groups if group != q else ():  # nothing follows the call that came last
                if ancestors[g] >> group & 1:
                    ancestors[g] = ancestors[g] & ~(1 << group) | 1 << p
                    parents[g] = {p if x == group else x for x in parents[g]}
            for g in groups if extra & ~ancestors[p] else ():
                if ancestors[g] >> p & 1:
                    ancestors[g] |= extra
            ancestors[p] |= extra
            del groups[group]
            for index in inside:
                home[index] = p
            group, above = p, reduce(or_, (ancestors[e] for e in parents[p]), 0)
    ordered = in_turn({g: parents[g] for g in groups})
    return forget_unread([groups[g] for g in ordered], keep)


def forget_unread(calls: Sequence[Call], keep: Collection[int]) -> list[Call]:
    """Drop stores that nothing reads, then steps and loads without a use, and calls without any."""
    read = set(keep)
    for call in calls:
        read.update(t.buffer for _, t in call.reads)
    narrowed = [
        without_stores(call, lambda b: b not in read) if call.expression else call for call in calls
    ]
    return [call for call in narrowed if call.writes]


def without_stores(call: Call, unread: Callable[[int], bool]) -> Call:
    """The call without its stores to buffers that are `unread`."""
    assert call.expression is not None
    stays = [i for i, (_, t) in enumerate(call.writes) if not unread(t.buffer)]
    stores = tuple(call.expression.stores[i] for i in stays)
    writes = tuple(call.writes[i][1] for i in stays)
    expression = replace(call.expression, stores=stores)
    return _renamed(call, expression, [t for _, t in call.reads], writes)


def _renamed(
    call: Call, expression: Expression, reads: Sequence[Tensor], writes: Sequence[Tensor]
) -> Call:
    """The call with unused steps and loads removed and its operands numbered again."""
    first = expression.loads + len(expression.scalars)
    needed = set(expression.stores)
    for i in reversed(range(len(expression.steps))):
        if first + i in needed:
            needed.update(expression.steps[i].args)
    rows = [row for row in expression.rows if row.load in needed]
    needed.update(row.index for row in rows)
    loads = [i for i in range(expression.loads) if i in needed]
    scalars = [i for i in range(len(expression.scalars)) if expression.loads + i in needed]
    steps = [i for i in range(len(expression.steps)) if first + i in needed]
    old = [*loads, *(expression.loads + i for i in scalars), *(first + i for i in steps)]
    fresh = expression
    if len(old) < first + len(expression.steps):
        number = {value: i for i, value in enumerate(old)}
        fresh = Expression(
            len(loads),
            tuple([expression.scalars[i] for i in scalars]),
            tuple([_numbered(expression.steps[i], number) for i in steps]),
            tuple([number[s] for s in expression.stores]),
            tuple(replace(row, load=number[row.load], index=number[row.index]) for row in rows),
        )
    return replace(
        call,
        kernel=fresh.name,
        expression=fresh,
        reads=tuple((f"a{i}", reads[k]) for i, k in enumerate(loads)),
        writes=tuple((f"y{i}", t) for i, t in enumerate(writes)),
    )


def broadcast_call(a: Call, b: Call) -> Call:
    """The call `a` of one element, broadcast to the shape of b's result."""
    shape = b.writes[0][1].shape
    if any(t.size != 1 for _, t in (*a.reads, *a.writes)) or prod(shape) == 1:
        return a
    if a.expression is not None and a.expression.counts:
        a = _first(a, a.expression)

    def all_over(part: Sequence[tuple[str, Tensor]]) -> tuple[tuple[str, Tensor], ...]:
        return tuple((n, replace(t, shape=shape, strides=(0,) * len(shape))) for n, t in part)

    return replace(a, reads=all_over(a.reads), writes=all_over(a.writes))


def _first(call: Call, expression: Expression) -> Call:
    """The call of one element, whose place is 0, with that number where it counted elements."""
    first = expression.loads + len(expression.scalars)
    number = [i + (i >= first) for i in range(first + len(expression.steps))]
    for i, step in enumerate(expression.steps):
        if step.name == "Iota":
            number[first + i] = first
    fresh = Expression(
        expression.loads,
        (*expression.scalars, ("i64", 0)),
        tuple([_numbered(step, number) for step in expression.steps]),
        tuple([number[s] for s in expression.stores]),
        tuple([replace(row, index=number[row.index]) for row in expression.rows]),
    )
    return _renamed(call, fresh, [t for _, t in call.reads], [t for _, t in call.writes])


def refine(a: Sequence[int], b: Sequence[int]) -> list[int] | None:
    """The coarsest shape that both shapes are merges of, None where there is none."""
    if prod(a) != prod(b) or 0 in a:
        return None
    cuts = [1]
    for shape in (a, b):
        step = 1
        for d in reversed(shape):
            step *= d
            cuts.append(step)
    # a set would tell apart open sizes that are equal, in an order that changes from run to run
    steps = [(low, high) for low, high in pairwise(sorted(cuts)) if low != high]
    if any(high % low for low, high in steps):
        return None
    return [high // low for low, high in steps][::-1]


def join(a: Call, b: Call, *, siblings: bool = False) -> Call | None:
    """One call that does `a`, then `b`, element by element; None where that is not possible.

    `siblings` may write parts of one buffer, which neither reads.
    """
    if a.expression is None or b.expression is None:
        return None
    shape = list(a.writes[0][1].shape)
    other = list(b.writes[0][1].shape)
    common = shape if shape == other else refine(shape, other)
    if common is None or len(a.expression.steps) + len(b.expression.steps) > MAX_STEPS:
        return None
    views = [[t if list(t.shape) == common else t.reshape(common) for _, t in part]
             for part in (a.reads, a.writes, b.reads, b.writes)]  # fmt: skip
    if any(t is None for part in views for t in part):
        return None
    a_reads, a_writes, b_reads, b_writes = [[_plain(t) for t in part if t] for part in views]
    stored = {t.buffer: t for t in a_writes}
    if any(t.buffer in stored and t != stored[t.buffer] for t in b_reads):
        return None
    both = [(t, u) for t in a_writes for u in b_writes if t.buffer == u.buffer]
    if any(not siblings or _meet(t, u) for t, u in both):
        return None
    if len(stored) < len(a_writes) and any(t.buffer in stored for t in b_reads):
        return None
    # one element is read and written by one thread alone
    written = {t.buffer: t for t in b_writes}
    if any(t.buffer in written and t != written[t.buffer] for t in (*a_reads, *b_reads)):
        return None
    ea, eb = a.expression, b.expression
    if any(b_reads[i].buffer in stored for row in eb.rows for i in (row.load, row.index)):
        return None
    tables = [a_reads[row.load] for row in ea.rows] + [b_reads[row.load] for row in eb.rows]
    if any(t.buffer in written for t in tables):
        return None
    reads, b_places = _places(ea, a_reads), _places(eb, b_reads)
    source: dict[int, tuple[str, int]] = {}
    for i in sorted(range(len(b_places)), key=lambda i: b_places[i][1] is not None):  # rows last
        t, row = b_places[i]
        if t.buffer in stored:
            source[i] = "a", ea.stores[a_writes.index(t)]
            continue
        place = t, row and replace(row, index=source[row.index][1])
        if place not in reads:
            reads.append(place)
        source[i] = "load", reads.index(place)
    scalars = list(ea.scalars)
    places = []
    for scalar in eb.scalars:
        if scalar not in scalars:
            scalars.append(scalar)
        places.append(scalars.index(scalar))
    base, steps = len(reads), len(reads) + len(scalars)
    from_a = [*range(ea.loads), *range(base, base + len(ea.scalars))]
    from_a += range(steps, steps + len(ea.steps))
    from_b = [from_a[place] if kind == "a" else place
              for kind, place in map(source.__getitem__, range(eb.loads))]  # fmt: skip
    from_b += [base + place for place in places]
    from_b += range(steps + len(ea.steps), steps + len(ea.steps) + len(eb.steps))
    same = from_a == list(range(len(from_a)))
    expression = Expression(
        base,
        tuple(scalars),
        (*(ea.steps if same else [_numbered(s, from_a) for s in ea.steps]),
         *[_numbered(s, from_b) for s in eb.steps]),
        tuple([from_a[i] for i in ea.stores] + [from_b[i] for i in eb.stores]),
        tuple(replace(row, load=i) for i, (_, row) in enumerate(reads) if row is not None),
    )  # fmt: skip
    return replace(
        a,
        kernel=expression.name,
        nodes=nodes_of(a, b),
        expression=expression,
        reads=tuple((f"a{i}", t) for i, (t, _) in enumerate(reads)),
        writes=tuple((f"y{i}", t) for i, t in enumerate((*a_writes, *b_writes))),
    )


def _meet(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one buffer may have an element in common: not those of one form that lie
    side by side along an axis.
    """
    apart = abs(b.offset - a.offset)
    axes = sorted((step, size) for size, step in zip(a.shape, a.strides, strict=True) if size != 1)
    if a.shape != b.shape or a.strides != b.strides or not apart or any(s < 0 for s, _ in axes):
        return True
    extent, between = 1, True
    for step, size in axes:
        if between and step >= apart:
            if apart < extent:
                return True
            extent, between = extent + apart, False
        if step < extent:
            return True
        extent += (size - 1) * step
    return between and apart < extent


def _numbered(step: Operation, number: Mapping[int, int] | Sequence[int]) -> Operation:
    """The step with its values numbered anew."""
    return Operation(step.name, step.dtype, tuple([number[i] for i in step.args]))


def _places(e: Expression, reads: Sequence[Tensor]) -> list[tuple[Tensor, Row | None]]:
    """Each operand that is read, and what chooses its rows, without the operand's number."""
    rows = {row.load: replace(row, load=-1) for row in e.rows}
    return [(t, rows.get(i)) for i, t in enumerate(reads)]


def _plain(tensor: Tensor) -> Tensor:
    """Strides of axes of size 1 set to 0, so that equal views compare equal."""
    pairs = zip(tensor.shape, tensor.strides, strict=True)
    strides = tuple([0 if d == 1 else s for d, s in pairs])
    return Tensor(tensor.buffer, tensor.dtype, tensor.shape, strides, tensor.offset)


def view(tensor: Tensor) -> Tensor:
    """The tensor as it stands in a problem, which does not say in which buffer it is."""
    return Tensor(0, tensor.dtype, tensor.shape, tensor.strides, tensor.offset)


def pointwise(call: Call) -> Pointwise:
    """What a pointwise call computes."""
    assert call.expression is not None
    views = (tuple(view(t) for _, t in part) for part in (call.reads, call.writes))
    return Pointwise(call.expression, *views)


def as_problem(call: Call) -> Call:
    """A pointwise call as a problem, and the pairs of its operands that may share memory."""
    if call.expression is None or not prod(call.writes[0][1].shape):
        return call
    tables = {f"a{row.load}" for row in call.expression.rows}
    pairs = [
        (w, r)
        for w, y in call.writes
        for r, x in call.reads
        if ITEMSIZE[x.dtype] == ITEMSIZE[y.dtype] and x.dense and x.strides in (y.strides, (0,))
        if r not in tables
    ]
    problem = pointwise(call)
    return replace(
        call, problem=problem, inplace=tuple(pairs), flops=problem.flops, bytes=problem.bytes
    )

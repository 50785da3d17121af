"""Calls of one kind over other tensors become one launch: updates, small reductions, copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod

from onnx_fuse.cuda.pointwise import rows_of
from onnx_fuse.kernels import Selection, select
from onnx_fuse.kernels.batched import can_batch
from onnx_fuse.kernels.norm_launches import fold_kind
from onnx_fuse.program.call import Call, Tensor
from onnx_fuse.program.data_movement import (
    BatchedCalls,
    CopyMany,
    Piece,
    Pointwise,
    PointwiseMany,
)
from onnx_fuse.program.passes import copy_fusion
from onnx_fuse.program.passes.buckets import first_buckets, last_buckets
from onnx_fuse.program.passes.callgraph import LARGE, Calls, in_order, nodes_of, steps_of, whole
from onnx_fuse.program.passes.pointwise_fusion import as_problem, pointwise, view
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.program.problems import Fold
from onnx_fuse.program.size import OpenSize, coarse

MAX_WAIT = 2 << 20
"""The most bytes that a call which waits for others may read: they are kept that long."""
MAX_TABLE = 30_000
"""Bytes of kernel arguments that a batch of calls may take: 32 KiB from CUDA 12.1 on."""
MAX_FOLDS = 256
"""Weights that one launch folds."""


def batch(calls: Calls) -> list[Call]:
    """Equal expressions over many flat tensors, an optimizer's updates, become one launch.

    A call may wait for a later one of its kind if nothing in between reads what it writes or
    writes what it touches. Of large tensors those that are ready last have a launch of their own:
    the others' may run beside what makes them. What ranks reduce in different buckets stays apart:
    the earlier one is sent while the later one is made, and updates weights meanwhile.
    """
    depth: dict[int, int] = defaultdict(int)  # of a buffer: the longest chain of calls to it
    depths = []
    for call in calls.calls:
        depths.append(1 + max((depth[t.buffer] for _, t in call.reads), default=0))
        for _, tensor in call.writes:
            depth[tensor.buffer] = depths[-1]
    kinds: dict[object, list[int]] = defaultdict(list)
    apart = list(zip(first_buckets(calls.calls), last_buckets(calls.calls), strict=True))
    for i, call in enumerate(calls.calls):
        if (kind := _kind(call)) is not None:
            kinds[kind, apart[i]].append(i)
    for members in kinds.values():
        runs = [run for run in _runs(calls.calls, members) if len(run) > 1]
        choice = _shared(calls, calls.calls[members[0]]) if runs else None
        if choice is not None:
            for run in runs:
                calls.gather(run, run[0], *_together(calls.calls, run, choice, depths))
    return calls.left()


def _runs(calls: Sequence[Call], members: Sequence[int]) -> list[list[int]]:
    """Split the members, the last one first, into runs whose members may wait for its first."""
    runs: list[list[int]] = []
    pieces = {i: copy_fusion.piece_of(calls[i]) for i in members if calls[i].expression}
    for i in reversed(members):
        beside = runs[-1] if runs and calls[i].expression is not None else ()
        full = pieces.get(i) is not None and len(beside) == copy_fusion.TABLE
        waits = runs and not full and _may_wait(calls, i, runs[-1][0], beside, pieces)
        if waits and _small(calls[i]):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _together(
    calls: Sequence[Call], run: Sequence[int], choice: Selection, depths: Sequence[int]
) -> list[Call]:
    """The members of a run as one call, or a few, for the place of its last member."""
    members = list(reversed(run))
    if copy_fusion.copy_kind(calls[run[0]]) is not None:
        return _in_parts(calls, members, copy_fusion.TABLE, copy_fusion.merged)
    large = [i for i in members if calls[i].expression and calls[i].writes[0][1].size >= LARGE]
    last = max((depths[i] for i in large), default=0)
    early = [i for i in large if depths[i] < last]
    then = [i for i in large if depths[i] == last < max(depths[j] for j in members)]
    apart = {*early, *then}
    rest = [i for i in members if i not in apart]
    tensors = [t for _, t in (*calls[run[0]].reads, *calls[run[0]].writes)]
    gaps = sum(not (t.dense or _single(t)) for t in tensors)
    columns = len(tensors) + 2 + (gaps + 1 if gaps else 0)
    most = MAX_TABLE // (8 * columns)
    most = 1 << (most.bit_length() - 1)
    many = partial(_many, choice=choice)
    return [c for some in (early, then, rest) for c in _in_parts(calls, some, most, many)]


def _in_parts(
    calls: Sequence[Call], members: Sequence[int], most: int, merge: Callable[[list[Call]], Call]
) -> list[Call]:
    """The members merged, so many at a time; one alone stays as it is."""
    parts = [[calls[i] for i in members[k : k + most]] for k in range(0, len(members), most)]
    return [merge(part) if len(part) > 1 else part[0] for part in parts]


def _kind(call: Call) -> object | None:
    """A key that is equal for calls that may share a launch; None for a call that may not."""
    if call.expression is None:
        return _batch_key(call)
    if (kind := copy_fusion.copy_kind(call)) is not None:
        return kind
    if not prod(call.writes[0][1].shape) or call.expression.rows:
        return None
    tensors = [t for _, t in (*call.reads, *call.writes)]
    flat = call.writes[0][1]
    if any(t.wide for t in tensors) or flat.size == 1:
        return None
    gaps = tuple(not (t.dense or _single(t)) for t in tensors)
    if any(gaps) and not _in_rows([t for t, gap in zip(tensors, gaps, strict=True) if gap], call):
        return None
    shared = tuple((t.buffer, t.offset) if _single(t) else None for _, t in call.reads)
    return call.expression, shared, tuple(t.dtype for t in tensors), gaps


def _in_rows(tensors: Sequence[Tensor], call: Call) -> bool:
    """Whether the tensors, which have gaps, are equally long rows of whole accesses.

    So are the parts of packed parameters and of their gradients, which are cast where they stand.
    Copies have launches of their own kind.
    """
    rows_of_each = [rows_of(t) for t in tensors]
    if not call.expression or not call.expression.steps or None in rows_of_each:
        return False
    whole = [t for _, t in (*call.reads, *call.writes) if not _single(t)]
    width = 16 // max(ITEMSIZE[t.dtype] for t in whole)
    lengths = {rows[0] for rows in rows_of_each if rows is not None}
    numbers = [n for rows in rows_of_each if rows is not None for n in rows]
    numbers += [t.offset for t in whole]
    return len(lengths) == 1 and all(type(n) is int and n % width == 0 for n in numbers)


def _batch_key(call: Call) -> object | None:
    """The problem of a call, and which of its operands are there."""
    if call.problem is None or isinstance(call.problem, BatchedCalls | PointwiseMany | CopyMany):
        return None
    return call.problem, tuple(name for name, _ in (*call.reads, *call.writes))


def _small(call: Call) -> bool:
    """Whether what the call reads may be kept until others of its kind are ready."""
    return call.expression is not None or coarse(sum(t.nbytes for _, t in call.reads)) <= MAX_WAIT


def _shared(calls: Calls, call: Call) -> Selection | None:
    """The kernel of calls of this kind, None where it has no room for several."""
    problem = call.problem if call.expression is None else pointwise(call)
    choice = None if problem is None else select(problem.op, problem, calls.hw, calls.prefs)
    if problem is None or choice is None or call.expression is not None:
        return choice
    return choice if can_batch(choice, problem, calls.hw) else None


def _single(tensor: Tensor) -> bool:
    """Whether all elements of the view are one element in memory."""
    return all(s == 0 or d == 1 for d, s in zip(tensor.shape, tensor.strides, strict=True))


def _may_wait(
    calls: Sequence[Call], i: int, until: int, run: Sequence[int],
    pieces: Mapping[int, Piece | None],
) -> bool:  # fmt: skip
    """Whether call `i` may run where `until` stands, with those of `run` beside it."""
    beside = set(run)
    return not any(
        in_order(calls[i], calls[j])
        and not (j in beside and _side_by_side(calls[i], calls[j], pieces[i], pieces[j]))
        for j in range(i + 1, until + 1)
    )


def _side_by_side(first: Call, second: Call, a: Piece | None, b: Piece | None) -> bool:
    """Whether what one of two calls writes in buffers of both the other does not touch."""
    if a is not None and b is not None:
        return copy_fusion.independent(first, second, a, b)
    return all(
        _apart(written, t)
        for one, other in ((first, second), (second, first))
        for _, written in one.writes
        for _, t in (*other.reads, *other.writes)
    )


def _apart(a: Tensor, b: Tensor) -> bool:
    """Whether no element of one view is known to be one of the other."""
    if a.buffer != b.buffer:
        return True
    if b.offset < a.offset:
        a, b = b, a
    if any(isinstance(n, OpenSize) for t in (a, b) for n in (t.offset, *t.shape, *t.strides)):
        return False
    if a.dtype != b.dtype or any(s < 0 for t in (a, b) for s in t.strides):
        return False
    whole = max(16 // ITEMSIZE[a.dtype], 1)
    if a.offset % whole or b.offset % whole:
        return False  # all tensors of a launch would be read in accesses of less than 16 bytes
    reach = sum((d - 1) * s for d, s in zip(a.shape, a.strides, strict=True))
    if a.offset + reach < b.offset:
        return True
    one, two = rows_of(a), rows_of(b)
    if one is None or two is None or one[1] != two[1]:
        return False
    return a.offset + one[0] <= b.offset and b.offset + two[0] <= a.offset + one[1]


def _many(members: Sequence[Call], choice: Selection) -> Call:
    """One call of all members; their operands are bound under "column.row"."""
    first = members[0]
    if first.expression is None:
        return _batched(members, choice)
    shared = [t if _single(t) else None for _, t in first.reads]
    items = [([t for _, t in c.reads], [t for _, t in c.writes]) for c in members]
    reads: dict[str, Tensor] = {f"a{r}": t for r, t in enumerate(shared) if t is not None}
    writes: dict[str, Tensor] = {}
    inputs = len(first.reads)
    for row, (r, w) in enumerate(items):
        reads |= {f"{k}.{row}": t for k, t in enumerate(r) if shared[k] is None}
        writes |= {f"{inputs + k}.{row}": t for k, t in enumerate(w)}
    problem = PointwiseMany(
        first.expression,
        tuple(t and view(t) for t in shared),
        tuple((tuple(map(view, r)), tuple(map(view, w))) for r, w in items),
    )
    name = f"{first.expression.name} x{len(members)}"
    return Call.of(name, nodes_of(*members), problem, reads, writes, bytes=problem.bytes)


def turn_together(calls: Calls) -> list[Call]:
    """Equal copies along another axis, as of filters, become one launch where the first one stood.

    Of tensors that stand before the first call alone, as weights do, and whose copies are small:
    they are kept from there on.
    """
    writers = calls.writers
    kinds: dict[Pointwise, list[int]] = defaultdict(list)
    for i, call in enumerate(calls.calls):
        x, (_, y) = copy_fusion.copied(call), call.writes[0]
        if x is None or coarse(y.nbytes) > MAX_WAIT or len(writers[y.buffer]) > 1:
            continue
        if all(j > i for j in writers[x.buffer]):
            kinds[pointwise(call)].append(i)
    for problem, members in kinds.items():
        choice = select(problem.op, problem, calls.hw, calls.prefs) if len(members) > 1 else None
        if choice is not None and can_batch(choice, problem, calls.hw):
            together = _batched([as_problem(calls.calls[i]) for i in members], choice)
            calls.gather(members, members[0], together)
    return calls.left()


def _batched(members: Sequence[Call], choice: Selection) -> Call:
    """One launch of equal ones over other pointers; operands are bound under "name.row"."""
    first, count = members[0], len(members)
    assert first.problem is not None
    bound = tuple(name for name, _ in (*first.reads, *first.writes))
    problem = BatchedCalls(first.problem, count, bound, choice.kernel.name, choice.config)
    reads = {f"{n}.{i}": t for i, c in enumerate(members) for n, t in c.reads}
    writes = {f"{n}.{i}": t for i, c in enumerate(members) for n, t in c.writes}
    moved = sum(c.bytes for c in members)
    name = f"{first.kernel} x{count}"
    return Call.of(name, nodes_of(*members), problem, reads, writes, bytes=moved)


def fold_together(calls: Calls) -> list[Call]:
    """Folds of weights become one launch where the first stood, which casts float32 masters too.

    Of weights that ranks gather, those of one bucket: others would be gathered long before use.
    """
    readers, writers = calls.readers, calls.writers
    buckets = last_buckets(calls.calls)
    groups: dict[object, list[tuple[int, int | None]]] = defaultdict(list)
    for i, call in enumerate(calls.calls):
        if not isinstance(call.problem, Fold):
            continue
        ((k, n),) = call.problem.shapes
        w = dict(call.reads)["w"].buffer
        for cast in dict.fromkeys((_cast_for(calls, i), None)):
            kind = call.problem.dtype, *fold_kind(k, n, calls.hw)
            group = groups[kind, cast is None, buckets[i]]
            first = group[0][0] if group else i
            wait = [j for _, t in call.reads for j in writers[t.buffer] if j < i and j != cast]
            if max(wait, default=-1) >= first or (cast is not None and min(readers[w]) < first):
                continue
            group.append((i, cast))
            break
    for group in groups.values():
        if len(group) < 2 and not any(cast is not None for _, cast in group):
            continue
        pairs = [(calls.calls[i], None if at is None else calls.calls[at]) for i, at in group]
        parts = [_folds(pairs[j : j + MAX_FOLDS]) for j in range(0, len(group), MAX_FOLDS)]
        calls.gather([i for pair in group for i in pair if i is not None], group[0][0], *parts)
    return calls.left()


def _cast_for(calls: Calls, i: int) -> int | None:
    """The call that does nothing but round the weights which fold `i` alone folds."""
    w = dict(calls.calls[i].reads)["w"]
    at, cast = calls.producer(w) or (i, calls.calls[i])
    if (
        w.buffer in calls.keep
        or steps_of(cast) not in (["CastBFloat16"], ["CastFloat16"])
        or len(cast.writes) != 1
    ):
        return None
    (_, x), (_, y) = cast.reads[0], cast.writes[0]
    if not whole(w.size, w, x, y) or x.dtype != "float32":
        return None
    if calls.written(at + 1, i, x):
        return None
    folds = [j for j in calls.readers[w.buffer] if isinstance(calls.calls[j].problem, Fold)]
    return at if folds == [i] else None


def _folds(members: Sequence[tuple[Call, Call | None]]) -> Call:
    """One call of several folds; a member's cast gives it the float32 weights to read."""
    reads: dict[str, Tensor] = {}
    writes: dict[str, Tensor] = {}
    for i, (fold, cast) in enumerate(members):
        operands = dict(fold.reads)
        if cast is not None:
            writes[f"low.{i}"] = operands["w"]
            operands["w"] = cast.reads[0][1]
        reads |= {f"{name}.{i}": t for name, t in operands.items()}
        writes |= {f"{name}.{i}": t for name, t in fold.writes}
    folds = [fold.problem for fold, _ in members if isinstance(fold.problem, Fold)]
    shapes = tuple(fold.shapes[0] for fold in folds)
    problem = Fold(shapes, folds[0].dtype, members[0][1] is not None)
    nodes = nodes_of(*(call for pair in members for call in pair if call is not None))
    return Call.of(f"Fold x{len(members)}", nodes, problem, reads, writes)

"""Compare a fused model with its original under onnxruntime, on every output."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from onnx_ir import DataType

from onnx_fuse import progress
from onnx_fuse.errors import ModelError
from onnx_fuse.guard import Crash, in_child
from onnx_fuse.importer.load import read
from onnx_fuse.importer.opsets import MENDED
from onnx_fuse.importer.save import weight_bytes
from onnx_fuse.ir.constants import Model
from onnx_fuse.options import OutputOptions, shared, takes
from onnx_fuse.runtime import ort
from onnx_fuse.runtime.graphs import DualGraph
from onnx_fuse.session import load
from onnx_fuse.textwrap import html_table
from onnx_fuse.validation.blame import Culprit, find_culprits
from onnx_fuse.validation.compare import (
    TOLERANCES,
    Difference,
    Tolerance,
    difference,
    random_outputs,
    severity,
)
from onnx_fuse.validation.inputs import Feeds, holds_numbers, repeats_sizes, with_unequal_sizes
from onnx_fuse.validation.layerwise import Along, errors_along
from onnx_fuse.validation.quantized import Steps
from onnx_fuse.validation.request import Request, guarded, runnable, unread
from onnx_fuse.validation.shapes import wrong_sizes

T = TypeVar("T")
AS_WRITTEN, OPTIMIZED = "as written", "with onnxruntime's optimizations"

# What is said of a quantized output that differs at one level, and has the same bits at the other.
_OTHER_TIES = {
    OPTIMIZED: (
        "'{name}' is equal without optimizations; onnxruntime's own optimizations, which choose "
        "other integer kernels, change it by {by:.3g}"
    ),
    AS_WRITTEN: (
        "'{name}' has the same bits with onnxruntime's own optimizations, which choose the same "
        "integer kernels; without them ties round otherwise and change it by {by:.3g}"
    ),
}


@dataclass(repr=False)
class Check:
    """The outcome of one validation."""

    differences: list[Difference] = field(default_factory=list)
    """One Difference for each output of each run, in the order of the runs."""
    feeds: list[dict[str, list[int]]] = field(default_factory=list)
    """The shapes of the inputs of each run, by name."""
    notes: list[str] = field(default_factory=list)
    """Sentences that a reader should know, such as what raised a limit."""
    tolerance: Tolerance = TOLERANCES[DataType.FLOAT]
    """The tolerance that all outputs were compared with."""
    culprits: list[Culprit] = field(default_factory=list)
    """The nodes that make a difference, the worst first, where they were asked for."""
    raised: dict[str, float] = field(default_factory=dict)
    """Limits raised to what onnxruntime's optimizations change in the original, by output."""
    sizes: list[str] = field(default_factory=list)
    """A sentence for each node of the original whose inferred sizes are not onnxruntime's."""
    cases: dict[int, str] = field(default_factory=dict)
    """What is special about the inputs of some runs, by the run's number from 1."""
    along: Along | None = None
    """The differences at every value on the inputs of the worst one, where they were asked for."""

    @property
    def ok(self) -> bool:
        """Whether every output stays within its limit, and inferred sizes are the actual ones."""
        return all(d.ok for d in self.differences) and not self.sizes

    @property
    def worst(self) -> Difference | None:
        """The difference that is largest as a multiple of its limit; None without outputs."""
        return max(self.differences, key=severity, default=None)

    def __repr__(self) -> str:
        worst = self.worst
        shown = f", {worst.max_abs:.3g} of {worst.limit:.3g} at {worst.where}" if worst else ""
        return f"Check(ok={self.ok}{shown})"

    def _repr_html_(self) -> str:
        """The worst difference of each output as a table, in a notebook."""
        names = dict.fromkeys(d.output for d in self.differences)
        worst = [max((d for d in self.differences if d.output == n), key=severity) for n in names]
        rows = [[d.output, d.ok, f"{d.max_abs:.3g}", f"{d.limit:.3g}", d.where] for d in worst]
        return html_table(repr(self), ["output", "ok", "difference", "limit", "where"], rows)

    def to_dict(self) -> dict[str, Any]:
        """The outcome as JSON values, as `--json` writes it."""
        worst = self.worst
        return {
            "ok": self.ok,
            "max_abs": max((d.max_abs for d in self.differences), default=0.0),
            "max_rel": max((d.max_rel for d in self.differences), default=0.0),
            "where": worst.where if worst else "",
            "limit": worst.limit if worst else 0.0,
            "tolerance": asdict(self.tolerance),
            "feeds": self.feeds,
            "notes": self.notes,
            "raised": self.raised,
            "sizes": self.sizes,
            "outputs": [asdict(d) for d in self.differences],
            "blame": [asdict(c) for c in self.culprits],
        }


@dataclass(frozen=True)
class _ValidateArguments(OutputOptions):
    model: Model
    against: Model | None = None
    feeds: Sequence[Feeds] | None = field(default=None, kw_only=True)


@takes(_ValidateArguments)
def validate(arguments: _ValidateArguments) -> Check:
    """Compare every output of `model` with that of its original, under onnxruntime.

    Args:
        model: The model to check: a path, bytes, ModelProto or onnx_ir.Model.
        against: The original. Without it, `model` is the original, and its fusion (as `optimize`
            makes it) is checked against it.
        feeds: One mapping from input names to arrays for each run. Without it, inputs are
            generated for the graph, one with a row that is masked entirely (docs/checking.md).
        {options}

    Returns:
        A Check: `ok`, the worst difference, and all differences by output.

    Raises:
        ModelError: A model is malformed, or onnxruntime cannot run the original.
        UsageError: A name, shape or precision does not fit the model.
        DeviceError: `device` is "cuda" and there is no usable GPU.
    """
    model, original = arguments.model, arguments.against
    if original is None:
        from onnx_fuse import rewrite

        original, model = model, load(model)
        rewrite.optimize(model)
    request = Request(**shared(Request, arguments))
    return guarded(partial(check_outputs, original, model, request), original, request.place)


def check_outputs(
    original: Model,
    fused: Model,
    request: Request | None = None,
    *,
    source: ir.Model | None = None,
) -> Check:
    """Run both models on the request's feeds (or on generated ones) and compare every output.

    The oracle is onnxruntime on `original` as it is written. On the CPU `fused` runs as written,
    and again with onnxruntime's own optimizations on. Where it differs, the original runs with
    them too: then like is compared with like, and the limit of an output is at least what these
    optimizations change in the original. Inferred sizes of the original are compared with those
    of a run, too. On "cuda" `fused` runs in the session's `precision`. `source` is what
    `importer.load.read` gave of `original`, if that is known. The errors are those of `validate`.
    """
    request = request or Request()
    on_cpu = request.place == "cpu"
    source = source or read(original)
    model = request.loaded(source)
    check = Check(tolerance=request.tolerance(model))
    steps = Steps.of(model) if request.rtol is None and request.atol is None else None
    progress.report("running the original")
    if MENDED in model.meta:
        source = original = model
        check.notes.append(f"{model.meta[MENDED]}: the check repairs this in the original")
    oracle = _oracle(original, model, request)
    names, pairs, check.cases = oracle.names, oracle.pairs + oracle.unequal, oracle.cases
    check.notes += oracle.notes
    if oracle.unequal:
        first, case = len(oracle.pairs) + 1, "dimensions of the same name have different sizes"
        check.notes.append(f"inputs from {first} on: {case}")
        check.cases |= dict.fromkeys(range(first, len(pairs) + 1), case)
    every = [feed for feed, _ in pairs]
    empty = [feed for feed in every if request.feeds is None and any(map(_is_empty, feed.values()))]
    beside = on_cpu and _LARGE <= weight_bytes(source) <= _HUGE
    begin = ort.in_background if beside else _when_asked
    threads = max((os.cpu_count() or 1) // 3, 1) if beside else 0
    answer = partial(_answers, fused, every, names, request, threads)
    as_written_answer = partial(answer, as_written=True)
    if empty and not beside:  # a crash there is onnxruntime's
        as_written_answer = partial(in_child, as_written_answer, silent=True)
    levels = {}

    def actual_sizes() -> tuple[list[str], list[str]]:
        notes: list[str] = []
        file = original if isinstance(original, str | os.PathLike) else None
        return wrong_sizes(model, every[: len(oracle.pairs)], notes, threads, file), notes

    with (
        begin(actual_sizes, "the original") as sizes,
        begin(as_written_answer, "the fused model") as as_written,
        begin(answer, "the fused model") as with_optimizations,
    ):
        if on_cpu:
            progress.report("comparing inferred sizes with actual ones")
            check.sizes, notes = sizes()
            check.notes += notes
        progress.report("running the fused model")
        try:
            levels[AS_WRITTEN] = as_written()
        except (ModelError, Crash) as error:
            crash = error if isinstance(error, Crash) else error.__cause__
            if isinstance(crash, Crash) and 0 < len(empty) < len(every):
                others = [feed for feed in every if not any(map(_is_empty, feed.values()))]
                again = check_outputs(original, fused, replace(request, feeds=others))
                with_its_own = partial(_answers, fused, empty, names, request)
                ort.guarded(with_its_own, "the fused model where a size is 0")
                again.notes.insert(
                    0,
                    "without its optimizations onnxruntime crashes on the fused model where a size "
                    f"is 0 ({crash})",
                )
                return again
            if not oracle.unequal or _REUSED not in str(error):
                raise
            equal = every[: len(oracle.pairs)]
            again = check_outputs(original, fused, replace(request, feeds=equal), source=source)
            again.notes.insert(0, "sizes of one name that differ are refused in the fused graph")
            return again
        optimized: list[list[Any]] | None = None
        if on_cpu:
            progress.report("running the fused model with onnxruntime's optimizations")
            try:
                levels[OPTIMIZED] = with_optimizations()
            except ModelError:
                if _optimized(source, every, check.notes) is not None:
                    raise
    random = random_outputs(model)
    if random:
        check.notes.append(f"random by design, only their shapes compared: {', '.join(random)}")
    compare = partial(_compared, names, pairs, levels, random, check.tolerance, steps)
    rows = compare(None)
    if not all(d.ok for row in rows for d in row.levels):
        # Is it what onnxruntime's optimizations change in the original, too? Like with like, then.
        progress.report("running the original with onnxruntime's optimizations")
        optimized = _optimized(source, every, check.notes)
        if optimized is None:
            levels.pop(OPTIMIZED, None)
        rows = compare(optimized)
    doubtful: dict[int, Sequence[Any]] = {}  # feeds, and what the original answers
    check.feeds = [{name: list(array.shape) for name, array in feed.items()} for feed in every]
    for row in rows:
        if steps is not None and any(d.ok and not d.max_abs for d in row.levels):
            # Equal bits at one level: at the other, kernels round ties in another order.
            for d in [d for d in row.levels if not d.ok]:
                check.notes.append(_OTHER_TIES[d.level].format(name=d.output, by=d.max_abs))
                row.levels.remove(d)
        worst = max(row.levels, key=severity)
        check.differences.append(worst)
        if worst.limit == row.gap > 0:
            check.raised[row.name] = max(row.gap, check.raised.get(row.name, 0.0))
        if not worst.ok or worst.limit == row.gap > 0:
            doubtful[row.run] = pairs[row.run][1]
        if _all_nan(row.expected):
            check.notes.append(
                f"'{row.name}' is NaN everywhere in the original too (inputs {row.run + 1})"
            )
    unsteady = set[int]()
    wrong = any(not d.ok for d in check.differences)
    if request.feeds is None and wrong:
        unsteady = _unsteady(source, every, doubtful, names, check.tolerance)
    if unsteady and len(unsteady) < len(every):
        steady = [feed for i, feed in enumerate(every) if i not in unsteady]
        again = check_outputs(original, fused, replace(request, feeds=steady))
        numbers = ", ".join(str(i + 1) for i in sorted(unsteady))
        again.notes.insert(0, f"the original is nondeterministic: inputs {numbers} left out")
        return again
    if steps is not None:
        check.notes.append(str(steps))
    if check.raised:
        worst_raised = max(check.raised, key=lambda n: check.raised[n])
        check.notes.append(
            f"{len(check.raised)} outputs may differ by what onnxruntime's own optimizations "
            f"change in the original: {check.raised[worst_raised]:.3g} in '{worst_raised}'"
        )
    if request.blame and request.precision == "fp32" and wrong:
        bad = next(i for i, d in enumerate(check.differences) if not d.ok)
        progress.report("looking for the operator that differs")
        written = check.differences[bad].level == AS_WRITTEN
        feed = every[bad // len(names)]
        check.culprits = find_culprits(
            original, fused, feed, check.tolerance, request, as_written=written
        )
    if request.along and check.differences and not random:
        number = check.differences.index(max(check.differences, key=severity))
        feed = every[number // len(names)]
        try:
            check.along = errors_along(original, fused, feed, check.tolerance, request)
        except ModelError as error:
            check.notes.append(f"no differences inside the graphs are shown: {error}")
    return check


_LARGE, _HUGE = 1 << 25, 1 << 30
"""Bytes of weights: from the first on sessions of a check are worth a process each, side by side,
and from the second on their copies of the weights might not fit into memory together."""


def _when_asked(
    work: Callable[[], T], name: str
) -> contextlib.AbstractContextManager[Callable[[], T]]:
    return contextlib.nullcontext(work)


_REUSED = "attempting to re-use buffer"
"""What onnxruntime says where it counted on equal sizes: in another graph it counts on others."""


@dataclass
class _Oracle:
    """What the original answers, from one session."""

    names: list[str]
    pairs: list[tuple[Feeds, list[Any]]]
    unequal: list[tuple[Feeds, list[Any]]]
    """Feeds that contradict the names of their sizes, where the original answers them."""
    notes: list[str]
    cases: dict[int, str]


def _oracle(original: Model, model: ir.Model, request: Request) -> _Oracle:
    """Run the original on the request's feeds, and on rare ones, which may kill it.

    Rare are feeds of unequal sizes, and those in which a dynamic axis has size 0.
    """

    def work(*, rare: bool) -> _Oracle:
        with ort.faults("the original"):
            session = ort.session(unread(original), as_written=True, spins="never")
        oracle = _Oracle([v.name for v in session.get_outputs()], [], [], [], {})
        if isinstance(session, ort.Widened):
            oracle.notes.append(session.note)
        run = partial(ort.run, session)
        oracle.pairs = request.pairs(model, run, oracle.notes, oracle.cases, empty=rare)
        unequal = rare and repeats_sizes(model)
        for feed in with_unequal_sizes(model, oracle.pairs[0][0]) if unequal else ():
            outputs = _answer(session, feed)
            if outputs is not None and all(map(holds_numbers, outputs)):
                oracle.unequal.append((feed, outputs))
        return oracle

    # on cuda a session warns of such sizes
    if request.feeds is not None or request.place != "cpu":
        return work(rare=False)
    try:
        return in_child(partial(work, rare=True), silent=True)
    except Crash as error:
        oracle = work(rare=False)
        oracle.notes.append(
            f"the original crashes where a size is 0 or sizes of one name differ ({error})"
        )
        return oracle


def _answer(session: object, feed: Feeds) -> list[Any] | None:
    """The session's outputs; None where onnxruntime refuses the feed."""
    try:
        return ort.run(session, feed)
    except Exception as error:
        if not ort.is_fault(error):
            raise
        return None


def _unsteady(
    original: Model,
    feeds: Sequence[Feeds],
    answered: Mapping[int, Sequence[Any]],
    names: Sequence[str],
    tolerance: Tolerance,
) -> set[int]:
    """The indices of feeds that are `answered` on which the original is nondeterministic.

    onnxruntime 1.32 reads uninitialized memory if a Concat's inputs have mismatched sizes. Running
    other numbers of the same sizes first changes what that memory holds.
    """
    import onnxruntime

    options, unsteady = onnxruntime.SessionOptions(), set[int]()
    options.log_severity_level = ort.FATAL
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # buffers lie elsewhere then
    session = ort.session(runnable(original), options, as_written=True)
    for i, answers in answered.items():
        for factor in (-3, 0.5):
            ort.run(
                session, {name: _scaled_floats(array, factor) for name, array in feeds[i].items()}
            )
            ys = ort.run(session, feeds[i])
            pairs = zip(names, answers, ys, strict=True)
            if not all(difference(name, a, b, tolerance).ok for name, a, b in pairs):
                unsteady.add(i)
    return unsteady


def _scaled_floats(array: object, factor: float) -> Any:
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        return array
    return (array * factor).astype(array.dtype)


def _is_empty(array: Any) -> bool:
    return not np.size(array)


def _all_nan(y: object) -> bool:
    return (
        isinstance(y, np.ndarray) and y.dtype.kind == "f" and y.size > 0 and bool(np.isnan(y).all())
    )


@dataclass
class _Row:
    """One output of one run."""

    run: int
    name: str
    expected: object
    gap: float
    """What onnxruntime's own optimizations change in it in the original."""
    levels: list[Difference]


def _compared(
    names: Sequence[str],
    pairs: Sequence[tuple[Feeds, list[Any]]],
    levels: Mapping[str, list[list[Any]]],
    random: Sequence[str],
    tolerance: Tolerance,
    steps: Steps | None,
    optimized: list[list[Any]] | None,
) -> list[_Row]:
    """Each output of each run at all `levels`, beside the original as written or `optimized`."""
    rows = []
    for i, (_, expected) in enumerate(pairs):
        for k, (name, y) in enumerate(zip(names, expected, strict=True)):
            row = _Row(i, name, y, 0.0, [])
            if optimized is not None and name not in random:
                gap = difference(name, y, optimized[i][k], tolerance).max_abs
                row.gap = gap if np.isfinite(gap) else 0.0  # then each level is for itself
            step = steps.limit(name, y) if steps is not None else 0.0
            for level, mine in levels.items():
                a = optimized[i][k] if optimized is not None and level == OPTIMIZED else y
                b = mine[i][k]
                if name in random:
                    a, b = (np.zeros(np.shape(x), np.asarray(x).dtype) for x in (a, b))
                one = difference(name, a, b, tolerance, floor=max(row.gap, step))
                row.levels.append(replace(one, level=level))
            rows.append(row)
    return rows


def _optimized(original: Model, feeds: Sequence[Feeds], notes: list[str]) -> list[list[Any]] | None:
    """The original's outputs with onnxruntime's own optimizations; None where these break it."""
    try:
        session = ort.session(runnable(original), fallback=False)
        return [ort.run(session, feed) for feed in feeds]
    except Exception as error:
        if not ort.is_fault(error):
            raise
        notes.append(f"onnxruntime's own optimizations break the original ({ort.plain(error)})")
        return None


def _answers(
    fused: Model,
    feeds: Sequence[Feeds],
    names: Sequence[str],
    request: Request,
    threads: int = 0,
    *,
    as_written: bool = False,
) -> list[list[Any]]:
    """The fused model's outputs on all feeds, from a session that is closed afterwards.

    onnxruntime itself reads a file for one level; for the other one its weights are mapped.
    """
    model: Any = fused
    if as_written and threads and isinstance(fused, str | os.PathLike):
        model = DualGraph.of_file(fused)
    with ort.faults("the fused model"):
        session = request.session(model, as_written=as_written, fallback=False, threads=threads)
        outputs = [v.name for v in session.get_outputs()]
        if outputs != list(names):
            raise ModelError(
                f"the models' outputs differ: {outputs} in the one, {list(names)} in the original"
            )
        return [ort.run(session, feed) for feed in feeds]

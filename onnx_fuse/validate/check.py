"""Fused against original under onnxruntime, on every output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx_ir import DataType

from onnx_fuse.errors import ModelError
from onnx_fuse.onnx.common import Model
from onnx_fuse.onnx.shapes import fix_shapes, infer_shapes
from onnx_fuse.runtime import ort
from onnx_fuse.session import InferenceSession, load
from onnx_fuse.validate.blame import Culprit, blame
from onnx_fuse.validate.compare import (
    TOLERANCES,
    Difference,
    Tolerance,
    badness,
    difference,
    random_outputs,
    tolerance_of,
)
from onnx_fuse.validate.inputs import Feeds, reference_pairs
from onnx_fuse.validate.quantized import Steps

AS_WRITTEN, OPTIMIZED = "as written", "with onnxruntime's optimizations"


@dataclass
class Check:
    """The outcome of one validation: a Difference for each compared output of each feed."""

    differences: list[Difference] = field(default_factory=list)
    feeds: list[dict[str, list[int]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tolerance: Tolerance = TOLERANCES[DataType.FLOAT]
    culprits: list[Culprit] = field(default_factory=list)
    raised: dict[str, float] = field(default_factory=dict)
    """The original's own difference between levels, of outputs whose limit that is."""

    @property
    def ok(self) -> bool:
        return all(d.ok for d in self.differences)

    @property
    def worst(self) -> Difference | None:
        return max(self.differences, key=badness, default=None)

    def to_dict(self) -> dict[str, Any]:
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
            "outputs": [asdict(d) for d in self.differences],
            "blame": [asdict(c) for c in self.culprits],
        }


def validate(
    original: Model,
    fused: Model,
    *,
    feeds: Sequence[Feeds] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    dims: Mapping[str, int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    device: str = "cpu",
    precision: str = "fp32",
    seed: int = 0,
    find_culprit: bool = False,
) -> Check:
    """Run both models on `feeds` (or on generated ones) and compare every output.

    The oracle is onnxruntime on `original`. On the CPU both run as they are written, and again with
    onnxruntime's own optimizations on; like is compared with like, and what these change in the
    original is the least limit of an output. On "cuda" `fused` runs in the session's `precision`
    and is compared with the original as it is written. `shapes` fixes the shapes of inputs by name,
    `dims` sizes by symbol. With `find_culprit` a difference in the model's own precision is traced
    to its nodes. Raises ModelError where onnxruntime cannot run the original.
    """
    model = load(original)
    fix_shapes(model, shapes or {}, dims)
    infer_shapes(model)
    check = Check(tolerance=tolerance_of(model, precision))
    steps = Steps.of(model)
    if rtol is not None or atol is not None:
        base = check.tolerance
        check.tolerance = Tolerance(
            base.rtol if rtol is None else rtol, base.atol if atol is None else atol, "as given"
        )
        steps = None
    with ort.faults("the original"):
        oracle = ort.session(_runnable(original), as_written=True)
    names = [v.name for v in oracle.get_outputs()]
    if isinstance(oracle, ort.Widened):
        check.notes.append(oracle.note)
    run = partial(ort.run, oracle)
    pairs = reference_pairs(model, run, feeds, seed, check.notes, rare=True)
    del oracle, run  # its copy of the weights
    every = [feed for feed, _ in pairs]
    optimized = _optimized(original, every, check.notes)
    ours = _answers(fused, every, names, device, precision, as_written=True)
    answers = [(AS_WRITTEN, [y for _, y in pairs], ours)]
    if device == "cpu" and optimized is not None:
        answers.append((OPTIMIZED, optimized, _answers(fused, every, names)))
    random = random_outputs(model)
    if random:
        check.notes.append(f"random by design, only their shapes compared: {', '.join(random)}")
    for i, (feed, expected) in enumerate(pairs):
        check.feeds.append({name: list(array.shape) for name, array in feed.items()})
        for k, (name, y) in enumerate(zip(names, expected, strict=True)):
            own = 0.0
            if optimized is not None and name not in random:
                own = difference(name, y, optimized[i][k], check.tolerance).max_abs
            own = own if np.isfinite(own) else 0.0  # then both levels are compared for themselves
            step = steps.limit(name, y) if steps is not None else 0.0
            found = []
            for level, theirs, mine in answers:
                a, b = theirs[i][k], mine[i][k]
                if name in random:
                    a, b = (np.zeros(np.shape(x), np.asarray(x).dtype) for x in (a, b))
                one = difference(name, a, b, check.tolerance, floor=max(own, step))
                found.append(replace(one, level=level))
            if steps is not None and not found[0].max_abs and found[0].ok and not found[-1].ok:
                check.notes.append(
                    f"'{name}' has the same bits as written; onnxruntime's own optimizations, "
                    f"which choose other integer kernels, change it by {found[-1].max_abs:.3g}"
                )
                del found[1:]
            worst = max(found, key=badness)
            check.differences.append(worst)
            if worst.limit == own > 0:
                check.raised[name] = max(own, check.raised.get(name, 0.0))
            if _all_nan(y):
                check.notes.append(
                    f"'{name}' is NaN everywhere in the original too (inputs {i + 1})"
                )
    if steps is not None:
        check.notes.append(str(steps))
    if check.raised:
        worst_raised = max(check.raised, key=lambda n: check.raised[n])
        check.notes.append(
            f"the limit of {len(check.raised)} outputs is what onnxruntime's own optimizations "
            f"change in the original: {check.raised[worst_raised]:.3g} in '{worst_raised}'"
        )
    if find_culprit and precision == "fp32" and not check.ok:
        bad = next(i for i, d in enumerate(check.differences) if not d.ok)
        as_written = check.differences[bad].level == AS_WRITTEN
        feed = every[bad // len(names)]
        check.culprits = blame(
            original, fused, feed, check.tolerance, device=device, as_written=as_written
        )
    return check


def _all_nan(y: Any) -> bool:
    return (
        isinstance(y, np.ndarray) and y.dtype.kind == "f" and y.size > 0 and bool(np.isnan(y).all())
    )


def _runnable(model: Model) -> Any:
    return model.SerializeToString() if isinstance(model, onnx.ModelProto) else model


def _optimized(original: Model, feeds: Sequence[Feeds], notes: list[str]) -> list[list[Any]] | None:
    """The original's outputs with onnxruntime's own optimizations; None where these break it."""
    try:
        session = ort.session(_runnable(original))
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
    device: str = "cpu",
    precision: str = "fp32",
    *,
    as_written: bool = False,
) -> list[list[Any]]:
    """The fused model's outputs on all feeds, from a session that lives no longer."""
    with ort.faults("the fused model"):
        if device == "cpu":
            session = ort.session(_runnable(fused), as_written=as_written)
        else:
            session = InferenceSession(fused, device=device, optimize=False, precision=precision)
        given = [v.name for v in session.get_outputs()]
        if given != list(names):
            raise ModelError(f"the fused model's outputs are {given}, the original's {list(names)}")
        if device == "cpu":
            return [ort.run(session, feed) for feed in feeds]
        return [session.run(None, feed) for feed in feeds]

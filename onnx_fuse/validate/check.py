"""Fused against original under onnxruntime, on every output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from onnx_fuse.validate.inputs import Feeds, Run, reference_pairs


@dataclass
class Check:
    """The outcome of one validation: a Difference for each compared output of each feed."""

    differences: list[Difference] = field(default_factory=list)
    feeds: list[dict[str, list[int]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tolerance: Tolerance = TOLERANCES[DataType.FLOAT]
    culprits: list[Culprit] = field(default_factory=list)

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
            "outputs": [asdict(d) for d in self.differences],
            "blame": [asdict(c) for c in self.culprits],
        }


def validate(
    original: Model,
    fused: Model,
    *,
    feeds: Sequence[Feeds] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    device: str = "cpu",
    precision: str = "fp32",
    seed: int = 0,
    find_culprit: bool = False,
) -> Check:
    """Run both models on `feeds` (or on generated ones) and compare every output.

    The oracle is onnxruntime on `original` as it is written; `fused` runs on `device`, on "cuda" in
    the session's `precision`. `shapes` fixes the shapes of inputs by name. With `find_culprit` a
    difference in the model's own precision is traced to its nodes.
    Raises ModelError where onnxruntime cannot run the original.
    """
    model = load(original)
    if shapes:
        fix_shapes(model, shapes)
    infer_shapes(model)
    check = Check(tolerance=tolerance_of(model, precision))
    if rtol is not None or atol is not None:
        base = check.tolerance
        check.tolerance = Tolerance(
            base.rtol if rtol is None else rtol, base.atol if atol is None else atol, "as given"
        )
    with ort.faults("the original"):
        oracle = ort.session(_runnable(original), as_written=True)
    names = [v.name for v in oracle.get_outputs()]
    candidate, given = _runner(fused, device, precision)
    if given != names:
        raise ModelError(f"the fused model's outputs are {given}, the original's {names}")
    pairs = reference_pairs(model, lambda f: ort.run(oracle, f), feeds, seed, check.notes)
    random = random_outputs(model)
    if random:
        check.notes.append(f"random by design, only their shapes compared: {', '.join(random)}")
    for feed, expected in pairs:
        check.feeds.append({name: list(array.shape) for name, array in feed.items()})
        with ort.faults("the fused model"):
            got = candidate(feed)
        for name, a, b in zip(names, expected, got, strict=True):
            if name in random:
                a, b = (np.zeros(np.shape(x), np.asarray(x).dtype) for x in (a, b))
            check.differences.append(difference(name, a, b, check.tolerance))
            if isinstance(a, np.ndarray) and a.dtype.kind == "f" and np.isnan(a).all() and a.size:
                check.notes.append(f"'{name}' is NaN everywhere in the original too")
    if find_culprit and precision == "fp32" and not check.ok:
        bad = next(i for i, (f, _) in enumerate(pairs) if not _feed_ok(check, i, len(names)))
        check.culprits = blame(original, fused, pairs[bad][0], check.tolerance, device=device)
    return check


def _feed_ok(check: Check, feed: int, outputs: int) -> bool:
    return all(d.ok for d in check.differences[feed * outputs : (feed + 1) * outputs])


def _runnable(model: Model) -> Any:
    return model.SerializeToString() if isinstance(model, onnx.ModelProto) else model


def _runner(model: Model, device: str, precision: str) -> tuple[Run, list[str]]:
    if device == "cpu":
        with ort.faults("the fused model"):
            session = ort.session(_runnable(model))
        return lambda feeds: ort.run(session, feeds), [v.name for v in session.get_outputs()]
    own = InferenceSession(model, device=device, optimize=False, precision=precision)
    return lambda feeds: own.run(None, feeds), [v.name for v in own.get_outputs()]

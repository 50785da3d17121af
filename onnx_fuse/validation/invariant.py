"""Whether a row has the same bits whatever else is in its batch: alone, in others, in any place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.shapes import fix_shapes
from onnx_fuse.ir.build import required_inputs
from onnx_fuse.ir.constants import Model
from onnx_fuse.runtime.invariance import LIMIT
from onnx_fuse.session import InferenceSession, load
from onnx_fuse.validation.inputs import Feeds, generate, holds_numbers

ROWS = 8
"""The rows of a batch that is made up."""


@dataclass
class Invariance:
    """What `check_batch` found."""

    batch: int
    """The rows of the whole batch."""
    runs: int = 0
    """Runs of some of them."""
    outputs: list[str] = field(default_factory=list)
    """The outputs with a row for each of the batch."""
    predicted: tuple[float, float] | None = None
    """On a GPU: the predicted seconds of the whole batch, and those of the usual plan."""
    faults: list[str] = field(default_factory=list)
    """A sentence for each run and output whose bits differ from those of the whole batch."""

    @property
    def ok(self) -> bool:
        """Whether all rows have the same bits in all runs."""
        return not self.faults


def check_batch(
    model: Model,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    feeds: Feeds | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    adapters: Sequence[str] = (),
) -> Invariance:
    """Run rows alone, in batches of other sizes and permuted, and compare their bits.

    The batch is the first dimension of the first input. On "cuda" the session is batch-invariant.
    Rows have the `adapters` of these files, or none, in turn.
    Raises ModelError for a model without a dynamic batch, and for feeds that it does not take.
    """
    graph = load(model)
    first = next((v for v in required_inputs(graph) if v.shape is not None and len(v.shape)), None)
    size = None if first is None or first.shape is None else first.shape[0]
    name = None if size is None or isinstance(size, int) else size.value
    if first is None or name is None:
        raise ModelError(
            "the first dimension of the first input is the batch, and here is none that is dynamic "
            "and has a name"
        )
    rest = {k: n for k, n in (dims or {}).items() if k != name}
    fix_shapes(graph, {}, rest)
    of_batch = [
        str(v.name) for v in graph.graph.inputs
        if v.shape is not None and len(v.shape) and v.shape[0] == size
    ]  # fmt: skip
    asked = (dims or {}).get(name, ROWS) if feeds is None else len(feeds[str(first.name)])
    wanted = {"batch_invariant": max(asked, LIMIT)}
    more: dict[str, Any] = wanted if device.startswith("cuda") else {}
    session = InferenceSession(graph.clone(), device=device, precision=precision, **more)
    if feeds is None:
        sized = graph.clone()
        fix_shapes(sized, {}, {name: asked})
        made = generate(sized, lambda f: session.run(None, f), seed=seed, single=True)
        feeds = made[0][0]
    count = feeds[str(first.name)].shape[0]
    for path in adapters:
        session.add_adapter(path, path)
    names = [[None, *adapters][row % (len(adapters) + 1)] for row in range(count)]
    whole = session.run(None, feeds, adapter=names)
    found = Invariance(count)
    ends = [
        (i, v.name) for i, v in enumerate(session.get_outputs())
        if holds_numbers(whole[i]) and whole[i].ndim and whole[i].shape[0] == count
    ]  # fmt: skip
    found.outputs = [name for _, name in ends]
    rng = np.random.default_rng(seed)
    sizes = sorted({n for n in (2, 3, 5, 7, count - 1, count) if 1 < n <= count})
    choices = [np.array([row]) for row in range(count)]
    choices += [rng.permutation(count)[:n] for n in sizes]
    for rows in choices:
        part = {k: a[rows] if k in of_batch else a for k, a in feeds.items()}
        outputs = session.run(None, part, adapter=[names[row] for row in rows])
        found.runs += 1
        for i, end in ends:
            wrong = _different(whole[i][rows], outputs[i])
            if wrong:
                what = f"row {rows[0]} alone" if len(rows) == 1 else f"a batch of {len(rows)}"
                found.faults.append(f"'{end}' of {what} has other bits in {wrong}")
    if more:
        found.predicted = session.predicted(feeds)
    return found


def _different(expected: Array, found: Array) -> str:
    """How many elements have other bits, and by how much at most; "" for none."""
    if expected.tobytes() == found.tobytes():
        return ""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"shape {list(found.shape)}"
    size = expected.itemsize
    bits = [np.ascontiguousarray(a).view(np.uint8).reshape(-1, size) for a in (expected, found)]
    count = int((bits[0] != bits[1]).any(axis=1).sum())
    with np.errstate(invalid="ignore"):
        most = np.abs(expected.astype(np.float64) - found.astype(np.float64)).max()
    return f"{count} of {expected.size} elements, by {most:.3g} at most"

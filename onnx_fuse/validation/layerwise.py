"""How two models differ along their graphs: at every value they both compute, and by entry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.importer.load import read
from onnx_fuse.importer.shapes import fix_shapes, infer_shapes
from onnx_fuse.ir.constants import Model
from onnx_fuse.ops.rules import label
from onnx_fuse.validation.compare import Difference, Tolerance, absolute_error, alike, difference
from onnx_fuse.validation.inputs import Feeds
from onnx_fuse.validation.request import Request
from onnx_fuse.validation.values import by_name, values_of

_TOGETHER = 1 << 30  # bytes of values that one session gives back
_WORST = 10


@dataclass(frozen=True)
class Deviation:
    """One element of an output."""

    index: tuple[int, ...]
    expected: float
    got: float


@dataclass(frozen=True)
class Distribution:
    """How the differences of an output's elements are spread."""

    output: str
    decades: dict[str, int]
    """The number of elements by the power of ten of their absolute difference, smallest first."""
    worst: list[Deviation]
    """The elements that differ most, the worst first."""


@dataclass
class Along:
    """The differences between two models on one set of inputs."""

    nodes: list[str] = field(default_factory=list)
    """The node of the checked model that computes each value, in the order of its graph."""
    values: list[Difference] = field(default_factory=list)
    """The difference at each of these values."""
    outputs: list[Distribution] = field(default_factory=list)
    """The spread at each output of numbers."""


def errors_along(
    original: Model,
    fused: Model,
    feeds: Feeds,
    tolerance: Tolerance,
    request: Request | None = None,
) -> Along:
    """Compare both models at every value whose name both have, on one set of inputs.

    Args:
        original: The model that is right; onnxruntime runs it.
        fused: The model to compare with it.
        feeds: Arrays by input name.
        tolerance: What each value is compared with.
        request: Says where and how `fused` runs.

    Both run as they are written: values that are asked for would keep onnxruntime from its own
    rewrites. A value that has another shape or type in the fused model, as where a fusion changed
    its layout, is left out. Raises ModelError where onnxruntime refuses one of the models.
    """
    reference, suspect = read(original), read(fused)
    makers = {v.name or "": label(n) for n in suspect.graph for v in n.outputs if v.name}
    shared = {v.name for node in reference.graph for v in node.outputs}
    names = [name for name in makers if name in shared]
    outputs = {v.name for v in suspect.graph.outputs}
    along = Along()
    for part in chunks(reference, names, feeds):
        expected = values_of(reference, feeds, part, as_written=True)
        got = values_of(suspect, feeds, part, request, as_written=True)
        for name in part:
            a, b = expected[name], got[name]
            if not alike(a, b):
                continue
            along.nodes.append(makers[name])
            along.values.append(difference(name, a, b, tolerance))
            if name in outputs and a.dtype.kind not in "OUSc" and a.size:
                along.outputs.append(_distribution(name, a, b))
    return along


def chunks(model: ir.Model, names: Sequence[str], feeds: Feeds) -> Iterator[Sequence[str]]:
    """The names in parts whose values fit into memory together, as far as their sizes are known."""
    model = model.clone()
    shapes = {name: list(a.shape) for name, a in feeds.items() if isinstance(a, np.ndarray)}
    fix_shapes(model, shapes)
    infer_shapes(model)
    part: list[str] = []
    room = _TOGETHER
    for name, value in by_name(model, names).items():
        dims = value.shape.numpy() if value.shape is not None and value.shape.is_static() else (0,)
        nbytes = prod(dims) * (value.dtype.itemsize if value.dtype is not None else 0)
        if part and nbytes > room:
            yield part
            part, room = [], _TOGETHER
        part.append(name)
        room -= int(nbytes)
    if part:
        yield part


def _distribution(name: str, expected: Array, got: Array) -> Distribution:
    a, b = expected.astype(np.float64).ravel(), got.astype(np.float64).ravel()
    error = absolute_error(a, b)
    with np.errstate(divide="ignore"):
        decade = np.floor(np.log10(error, where=error > 0, out=np.full(error.shape, -np.inf)))
    counts: dict[str, int] = {}
    for power, count in zip(*np.unique(decade, return_counts=True), strict=True):
        counts[_decade(float(power))] = int(count)
    last = np.argsort(error, kind="stable")[::-1][:_WORST]
    worst = [
        Deviation(tuple(map(int, np.unravel_index(i, expected.shape))), float(a[i]), float(b[i]))
        for i in last
        if error[i] > 0
    ]
    return Distribution(name, counts, worst)


def _decade(power: float) -> str:
    if power == -np.inf:
        return "equal"
    if power == np.inf:
        return "not comparable"
    return f"1e{int(power)} … 1e{int(power) + 1}"

"""Compare two runs: tolerances, differences, and outputs that are random by design."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnx_ir import DataType, Value

from onnx_fuse.arrays import Array
from onnx_fuse.autodiff.subgraphs import draws
from onnx_fuse.ir.build import all_nodes


@dataclass(frozen=True)
class Tolerance:
    """A difference passes up to `atol + rtol * (the largest magnitude of that output)`."""

    rtol: float
    """The part that grows with the output's largest magnitude, without a unit."""
    atol: float
    """The part that does not, in the output's own unit."""
    reason: str
    """Why a correct fusion may differ by that much."""


TOLERANCES = {
    DataType.DOUBLE: Tolerance(
        1e-9, 1e-11, "double: sums in another order round differently, over about 100 layers"
    ),
    DataType.FLOAT: Tolerance(
        5e-5,
        5e-6,
        "float: sums in another order differ by 1e-6 per layer, and layers accumulate it",
    ),
    DataType.FLOAT16: Tolerance(
        2e-2,
        2e-3,
        "float16: each stored value is rounded to 2^-11, and a fusion stores fewer values",
    ),
    DataType.BFLOAT16: Tolerance(
        8e-2,
        1e-2,
        "bfloat16: each stored value is rounded to 2^-8, and a fusion stores fewer values",
    ),
}
"""By the coarsest float type anywhere in the graph, that of norms' statistics (`stash_type`) among
them; integers and booleans must be equal."""


COMPUTED = {
    "tf32": Tolerance(2e-2, 2e-3, "tf32: each operand of a MatMul is rounded to 2^-11"),
    "fp16": TOLERANCES[DataType.FLOAT16],
    "bf16": TOLERANCES[DataType.BFLOAT16],
}
"""By the precision that the fused model is computed in, where that is coarser than float."""


def tolerance_of(model: ir.Model, precision: str = "fp32") -> Tolerance:
    """The tolerance for the coarsest float type among the model's values and the `precision`."""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values()]
    values += [v for node in ir.traversal.RecursiveGraphIterator(graph) for v in node.outputs]
    types = {v.dtype for v in values}
    norms = [n for n in graph if n.op_type in ("LayerNormalization", "RMSNormalization")]
    stashes = {n.attributes.get_int("stash_type", DataType.FLOAT.value) for n in norms}
    types |= {kind for kind in TOLERANCES if kind.value in stashes}
    of_model = next(
        (t for kind, t in reversed(TOLERANCES.items()) if kind in types), TOLERANCES[DataType.FLOAT]
    )
    return max(of_model, COMPUTED.get(precision, of_model), key=lambda t: t.rtol)


@dataclass(frozen=True)
class Difference:
    """How far one output of one run is from the original's."""

    output: str
    """The output's name."""
    max_abs: float
    """The largest absolute difference; infinite where shape, dtype or the place of a NaN differ."""
    max_rel: float
    """The largest difference relative to the original's value at the same index."""
    limit: float
    """The absolute difference that is allowed."""
    where: str
    """The place of the largest difference, as `name[index]`."""
    ok: bool
    """Whether `max_abs` is within `limit`."""
    level: str = ""
    """The level of onnxruntime's own optimizations at which both models ran."""
    scale: float = 0.0
    """The largest finite magnitude in the original's output."""


def difference(
    name: str, expected: object, got: object, tolerance: Tolerance, *, floor: float = 0.0
) -> Difference:
    """Compare two arrays, or sequences of them; NaN and infinities must stand in the same place.

    The limit, of integers too, is at least `floor`.
    """
    if isinstance(expected, list) or isinstance(got, list):
        return _list_difference(name, expected, got, tolerance, floor)
    expected, got = np.asarray(expected), np.asarray(got)
    if expected.shape != got.shape or expected.dtype != got.dtype:
        text = f"{name}: {got.dtype}{list(got.shape)}, not {expected.dtype}{list(expected.shape)}"
        return Difference(name, float("inf"), float("inf"), 0.0, text, False)
    if expected.dtype.kind in "OUS":
        wrong = expected != got
        bad = float(np.count_nonzero(wrong))
        return Difference(name, bad, bad, 0.0, _place(name, wrong) if bad else name, not bad)
    if expected.size == 0:
        return Difference(name, 0.0, 0.0, 0.0, name, True)
    kind = np.complex128 if expected.dtype.kind == "c" else np.float64
    exact = expected.dtype.kind in "biu"
    a, b = expected.astype(kind), got.astype(kind)
    error = absolute_error(a, b)
    finite = np.abs(a[np.isfinite(a)])
    scale = float(finite.max()) if finite.size else 0.0
    limit = max(0.0 if exact else tolerance.atol + tolerance.rtol * scale, floor)
    with np.errstate(invalid="ignore"):
        relative = error / np.maximum(np.abs(a), tolerance.atol)
    relative = np.where(np.isnan(relative), np.where(np.isinf(error), np.inf, 0.0), relative)
    worst = float(error.max())
    return Difference(
        name, worst, float(relative.max()), limit, _place(name, error), worst <= limit, scale=scale
    )


def absolute_error(a: Array, b: Array) -> Array:
    """|a - b|: 0 where both are the same infinity or NaN, infinite where one of them is NaN."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return np.where(np.isnan(error), np.inf, error)


def alike(a: object, b: object) -> bool:
    """Whether two values are arrays of one shape and type."""
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        return False
    return a.shape == b.shape and a.dtype == b.dtype


def _list_difference(
    name: str, expected: object, got: object, tolerance: Tolerance, floor: float
) -> Difference:
    if not isinstance(expected, list) or not isinstance(got, list) or len(expected) != len(got):
        return Difference(name, float("inf"), float("inf"), 0.0, f"{name}: another length", False)
    parts = [
        difference(f"{name}.{i}", a, b, tolerance, floor=floor)
        for i, (a, b) in enumerate(zip(expected, got, strict=True))
    ]
    if not parts:
        return Difference(name, 0.0, 0.0, 0.0, name, True)
    worst = max(parts, key=severity)
    return replace(worst, output=name, ok=all(p.ok for p in parts))


def _place(name: str, error: Array) -> str:
    index = np.unravel_index(int(np.argmax(error)), error.shape)
    return f"{name}[{', '.join(str(int(i)) for i in index)}]"


def severity(d: Difference) -> tuple[bool, float]:
    """A key to sort differences by: failed ones last, then by their multiple of the limit."""
    return not d.ok, d.max_abs / (d.limit or 1.0)


def random_outputs(model: ir.Model) -> list[str]:
    """Outputs that depend on a random operator (or a Dropout that drops)."""
    tainted: set[Value] = set()
    for node in model.graph:
        inner = list(all_nodes([node]))
        reads = {v for n in inner for v in n.inputs if v is not None}
        if reads & tainted or any(map(draws, inner)):
            tainted.update(node.outputs)
    return [v.name or "" for v in model.graph.outputs if v in tainted]

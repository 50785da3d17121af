"""Fused against original under onnxruntime: inputs, comparison, and blame for a difference."""

from __future__ import annotations

import ast
import math
import operator
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
from onnx_ir import DataType, Value

from onnx_fuse import ir
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.runtime import ort
from onnx_fuse.session import InferenceSession, load

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]
Run = Callable[[Feeds], list[Any]]


# ---- comparison ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tolerance:
    """A difference passes up to `atol + rtol * (the largest magnitude of that output)`."""

    rtol: float
    atol: float
    reason: str


TOLERANCES = {
    DataType.DOUBLE: Tolerance(1e-9, 1e-11, "double: other orders of summation, some 100 layers"),
    DataType.FLOAT: Tolerance(
        5e-5, 5e-6, "float: another order of summation leaves 1e-6 a layer, and layers add"
    ),
    DataType.FLOAT16: Tolerance(
        2e-2, 2e-3, "float16: each stored value is rounded to 2^-11, and a fusion stores fewer"
    ),
    DataType.BFLOAT16: Tolerance(
        8e-2, 1e-2, "bfloat16: each stored value is rounded to 2^-8, and a fusion stores fewer"
    ),
}
"""By the coarsest float type anywhere in the graph, that of norms' statistics (`stash_type`) among
them; integers and booleans must be equal."""


COMPUTED = {
    "tf32": Tolerance(2e-2, 2e-3, "tf32: each operand of a product is rounded to 2^-11"),
    "fp16": TOLERANCES[DataType.FLOAT16],
    "bf16": TOLERANCES[DataType.BFLOAT16],
}
"""By the precision that the fused model is computed in, where that is coarser than float."""


def tolerance_of(model: onnx_ir.Model, precision: str = "fp32") -> Tolerance:
    """The tolerance for the coarsest float type among the model's values and the `precision`."""
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values()]
    values += [v for node in onnx_ir.traversal.RecursiveGraphIterator(graph) for v in node.outputs]
    found = {v.dtype for v in values}
    norms = [n for n in graph if n.op_type in ("LayerNormalization", "RMSNormalization")]
    found |= {DataType(n.attributes.get_int("stash_type", _F32.value)) for n in norms}
    own = next((t for kind, t in reversed(TOLERANCES.items()) if kind in found), TOLERANCES[_F32])
    return max(own, COMPUTED.get(precision, own), key=lambda t: t.rtol)


_F32 = DataType.FLOAT


@dataclass(frozen=True)
class Difference:
    """One output on one feed; `where` is `name[index]` of the largest difference."""

    output: str
    max_abs: float
    max_rel: float
    limit: float
    where: str
    ok: bool


def difference(name: str, expected: Any, got: Any, tolerance: Tolerance) -> Difference:
    """Compare two arrays, or sequences of them; NaN and infinities must stand in the same place."""
    if isinstance(expected, list) or isinstance(got, list):
        return _list_difference(name, expected, got, tolerance)
    expected, got = np.asarray(expected), np.asarray(got)
    if expected.shape != got.shape or expected.dtype != got.dtype:
        what = f"{name}: {got.dtype}{list(got.shape)}, not {expected.dtype}{list(expected.shape)}"
        return Difference(name, float("inf"), float("inf"), 0.0, what, False)
    if expected.dtype.kind in "OUS":
        wrong = expected != got
        bad = float(np.count_nonzero(wrong))
        return Difference(name, bad, bad, 0.0, _place(name, wrong) if bad else name, not bad)
    if expected.size == 0:
        return Difference(name, 0.0, 0.0, 0.0, name, True)
    kind = np.complex128 if expected.dtype.kind == "c" else np.float64
    exact = expected.dtype.kind in "biu"
    a, b = expected.astype(kind), got.astype(kind)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    error = np.where(np.isnan(error), np.inf, error)
    finite = np.abs(a[np.isfinite(a)])
    scale = float(finite.max()) if finite.size else 0.0
    limit = 0.0 if exact else tolerance.atol + tolerance.rtol * scale
    with np.errstate(invalid="ignore"):
        relative = error / np.maximum(np.abs(a), tolerance.atol)
    relative = np.where(np.isnan(relative), np.where(np.isinf(error), np.inf, 0.0), relative)
    worst = float(error.max())
    return Difference(
        name, worst, float(relative.max()), limit, _place(name, error), worst <= limit
    )


def _list_difference(name: str, expected: Any, got: Any, tolerance: Tolerance) -> Difference:
    if not isinstance(expected, list) or not isinstance(got, list) or len(expected) != len(got):
        return Difference(name, float("inf"), float("inf"), 0.0, f"{name}: another length", False)
    parts = [
        difference(f"{name}.{i}", a, b, tolerance)
        for i, (a, b) in enumerate(zip(expected, got, strict=True))
    ]
    if not parts:
        return Difference(name, 0.0, 0.0, 0.0, name, True)
    worst = max(parts, key=_badness)
    return Difference(
        name, worst.max_abs, worst.max_rel, worst.limit, worst.where, all(p.ok for p in parts)
    )


def _place(name: str, error: Array) -> str:
    index = np.unravel_index(int(np.argmax(error)), error.shape)
    return f"{name}[{', '.join(str(int(i)) for i in index)}]"


def _badness(d: Difference) -> tuple[bool, float]:
    return not d.ok, d.max_abs / (d.limit or 1.0)


@dataclass
class Check:
    """The outcome of one validation: a Difference for each compared output of each feed."""

    differences: list[Difference] = field(default_factory=list)
    feeds: list[dict[str, list[int]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tolerance: Tolerance = TOLERANCES[_F32]
    culprits: list[Culprit] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(d.ok for d in self.differences)

    @property
    def worst(self) -> Difference | None:
        return max(self.differences, key=_badness, default=None)

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
    original: ir.Model,
    fused: ir.Model,
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
        ir.fix_shapes(model, shapes)
    ir.infer_shapes(model)
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
    pairs = _reference(model, lambda f: ort.run(oracle, f), feeds, seed, check.notes)
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


def _runnable(model: ir.Model) -> Any:
    return model.SerializeToString() if isinstance(model, onnx.ModelProto) else model


def _runner(model: ir.Model, device: str, precision: str) -> tuple[Run, list[str]]:
    if device == "cpu":
        with ort.faults("the fused model"):
            session = ort.session(_runnable(model))
        return lambda feeds: ort.run(session, feeds), [v.name for v in session.get_outputs()]
    own = InferenceSession(model, device=device, optimize=False, precision=precision)
    return lambda feeds: own.run(None, feeds), [v.name for v in own.get_outputs()]


def _reference(
    model: onnx_ir.Model,
    run: Run,
    feeds: Sequence[Feeds] | None,
    seed: int,
    notes: list[str],
) -> list[tuple[Feeds, list[Any]]]:
    if feeds is None:
        return generate(model, run, seed=seed, notes=notes)
    with ort.faults("the original"):
        return [(dict(feed), run(dict(feed))) for feed in feeds]


# ---- inputs ----------------------------------------------------------------------------------


def read_feeds(path: str | os.PathLike[str], model: onnx_ir.Model) -> Feeds:
    """The arrays of an .npz file that the model's inputs name; each input must be there."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise ModelError(f"{path}: not an .npz file of arrays ({error})") from error
    needed = [v.name for v in model.graph.inputs]
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise UsageError(
            f"{Path(path).name} has no array for input '{missing[0]}' (it has {sorted(arrays)})"
        )
    return ir.feeds_of(model, arrays)


# (leading axes, first other axis, step to the next): tried in turn until every dynamic axis has
# been seen at two sizes. Axes differ first, so that exchanged ones are noticed; then come sizes for
# graphs that want equal axes, multiples of 8 or 32, short contexts, a batch of one, whole images.
SIZES = (
    *((2, 7, 4), (3, 12, 4), (3, 4, 1), (2, 32, 32), (3, 64, 32)),
    *((2, 8, 0), (3, 16, 0), (2, 32, 0), (3, 64, 0), (1, 7, 4), (1, 12, 4), (1, 8, 0), (1, 16, 0)),
    *((2, 2, 0), (1, 1, 0), (1, 2, 0), (1, 224, 0), (1, 256, 0)),
)


def generate(
    model: onnx_ir.Model,
    run: Run,
    *,
    seed: int = 0,
    notes: list[str] | None = None,
) -> list[tuple[Feeds, list[Any]]]:
    """Feeds that `run` accepts, with its outputs: every dynamic axis at two sizes where it can be.

    Integer inputs that reach a Gather's indices stay in its bounds; masks are 0/1 with padding on
    the right; positions count up. Axes with one symbolic name get one size. `notes` receives what
    could not be done. Raises ModelError if `run` accepts none.
    """
    dims = _dims(model)
    symbols = _symbols(dims)
    inner = {d for own in dims.values() for d in own[1:]}
    leading = {own[0] for own in dims.values() if own} - inner
    bounds = {v.name or "": index_bound(v) for v in model.graph.inputs}
    seen: dict[str, set[int]] = {symbol: set() for symbol in symbols}
    accepted: list[tuple[Feeds, list[Any]]] = []
    first_error: Exception | None = None
    for lead, base, step in SIZES if symbols else SIZES[:1]:
        others = [s for s in symbols if s not in leading]
        sizes = {s: base + step * others.index(s) if s in others else lead for s in symbols}
        if symbols and all(len(seen[s]) > 1 or sizes[s] in seen[s] for s in symbols):
            continue
        # Where integers have no bound that the graph shows, 0 and 1 may still be too much.
        for top in (2, 1):
            rng = np.random.default_rng(seed + len(accepted))
            try:
                feed = {}
                for value in model.graph.inputs:
                    name = value.name or ""
                    shape = _shape(dims[name], sizes)
                    feed[name] = _array(value, shape, bounds[name], rng, top)
                outputs = run(feed)
            except Exception as error:
                if isinstance(error, ModelError):
                    raise
                first_error = first_error or error
                continue
            if all(np.size(y) for y in outputs):
                accepted.append((feed, outputs))
                for symbol in symbols:
                    seen[symbol].add(sizes[symbol])
            break
        if accepted and all(len(values) > 1 for values in seen.values()):
            break
    if not accepted:
        reason = ort.plain(first_error) if first_error else "its outputs are empty"
        raise ModelError(
            f"onnxruntime runs the original on none of the generated inputs ({reason}): give "
            "inputs (--inputs FILE.npz) or skip the check"
        )
    single = [symbol for symbol, values in seen.items() if len(values) < 2]
    if notes is not None and single:
        notes.append(f"the graph took one size only of the dynamic axes {', '.join(single)}")
    if notes is not None and first_error is not None:
        notes.append(f"sizes tried until the graph took them: {sizes}")
    return accepted


Dim = int | str


def _dims(model: onnx_ir.Model) -> dict[str, list[Dim]]:
    result: dict[str, list[Dim]] = {}
    for value in model.graph.inputs:
        name = value.name or ""
        if not isinstance(value.type, onnx_ir.TensorType):
            raise ModelError(f"input '{name}' is no tensor: give inputs (--inputs FILE.npz)")
        # An input without a shape is taken for a matrix.
        dims = [None, None] if value.shape is None else list(value.shape)
        result[name] = [
            d if isinstance(d, int) else ((d.value if d is not None else None) or f"{name}.{axis}")
            for axis, d in enumerate(dims)
        ]
    return result


def _symbols(dims: Mapping[str, Sequence[Dim]]) -> list[str]:
    """Symbols to choose sizes for: all but those that are expressions of others (`past + 1`)."""
    every = dict.fromkeys(d for own in dims.values() for d in own if isinstance(d, str))
    return [d for d in every if _expression(d, set(every)) is None]


def _expression(dim: str, symbols: set[str]) -> ast.expr | None:
    try:
        tree = ast.parse(dim, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return tree if isinstance(tree, ast.BinOp) and names and names <= symbols else None


_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}


def _shape(dims: Sequence[Dim], sizes: Mapping[str, int]) -> list[int]:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name):
            return sizes[node.id]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ModelError(f"the dimension '{ast.unparse(node)}' is not understood: give --inputs")

    shape = []
    for dim in dims:
        if isinstance(dim, str) and dim not in sizes:
            tree = _expression(dim, set(sizes))
            dim = max(value(tree), 0) if tree is not None else 1
        shape.append(sizes[dim] if isinstance(dim, str) else dim)
    if np.prod([float(d) for d in shape]) > 2**31:
        raise ModelError(f"an input of shape {shape} is too large to generate: give --inputs")
    return shape


def _array(
    value: Value, shape: Sequence[int], bound: int | None, rng: np.random.Generator, top: int
) -> Array:
    name, dtype = (value.name or "").lower(), value.dtype
    if dtype is None or dtype == DataType.STRING:
        raise ModelError(f"input '{value.name}' holds strings: give inputs (--inputs FILE.npz)")
    kind = dtype.numpy()
    mask = "mask" in name or dtype == DataType.BOOL or (kind.kind in "iu" and len(shape) > 1)
    array: Array
    if "position" in name and kind.kind in "iu" and shape:
        array = np.broadcast_to(np.arange(shape[-1]) % (bound or shape[-1]), shape)
    elif bound is not None and "mask" not in name:  # positions may be a mask's running sum
        array = rng.integers(0, max(bound, 1), shape)
    elif kind.kind in "iu" and dtype.itemsize == 1 and "mask" not in name:
        array = rng.integers(0, 128, shape)  # pixels
    elif mask and shape and (kind.kind in "iub" or "mask" in name):
        array = _right_padded(shape)
        if kind.kind not in "iub" and any(u.node.op_type == "Add" for u in value.uses()):
            array = np.where(array, 0.0, -1e4)  # an additive mask
    elif kind.kind in "iub":
        array = rng.integers(0, top, shape)
    else:
        array = rng.standard_normal(shape)
    return np.ascontiguousarray(array.astype(kind))


def _right_padded(shape: Sequence[int]) -> Array:
    """Ones, then zeros: the first row is full, the last is half as long."""
    rows, width = (shape[0] if len(shape) > 1 else 1), shape[-1]
    lengths = np.ceil(np.linspace(width, max(width // 2, 1), rows))
    mask = np.arange(width) < lengths.reshape(-1, *(1,) * (max(len(shape), 2) - 1))
    return np.broadcast_to(mask if len(shape) > 1 else mask[0], shape)


# Operators whose output holds values of the input numbered here (None: any input).
_CARRIES = {
    **dict.fromkeys(("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten"), (0,)),
    **dict.fromkeys(("Transpose", "Slice", "Expand", "Tile", "Split", "Gather", "Pad"), (0,)),
    **dict.fromkeys(("Add", "Sub", "Mul", "Max", "Min", "Concat", "Where", "CumSum"), None),
}


def index_bound(value: Value) -> int | None:
    """The smallest exclusive upper bound that indexing operators set on a value's entries."""
    bounds: list[int] = []
    todo, seen = [value], {value}
    while todo:
        for use in todo.pop().uses():
            bound = _index_limit(use.node, use.idx)
            if bound is not None:
                bounds.append(bound)
                continue
            carried = _CARRIES.get(use.node.op_type, ())
            if carried is None or use.idx in carried:
                fresh = [v for v in use.node.outputs if v not in seen]
                seen.update(fresh)
                todo.extend(fresh)
    return min(bounds, default=None)


def _index_limit(node: onnx_ir.Node, idx: int) -> int | None:
    """Size of the axis that input `idx` of the node indexes, 1 where that size is not known."""
    if node.op_type in ("Gather", "GatherElements", "ScatterElements") and idx == 1:
        axis = node.attributes.get_int("axis", 0)
    elif node.op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") and idx == 1:
        axis = 1
    elif node.op_type in ("GatherND", "ScatterND") and idx == 1:
        axis = node.attributes.get_int("batch_dims", 0)
    else:
        return None
    data = node.inputs[0]
    shape = data.shape if data is not None else None
    if shape is None or not -len(shape) <= axis < len(shape):
        return 1
    size = shape[axis]
    return size if isinstance(size, int) else 1


_RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"} | {
    "Bernoulli",
    "Multinomial",
}


def random_outputs(model: onnx_ir.Model) -> list[str]:
    """Outputs that depend on a random operator (or a Dropout that drops)."""
    tainted: set[Value] = set()
    for node in model.graph:
        inner = [node, *_inner_nodes(node)]
        reads = {v for n in inner for v in n.inputs if v is not None}
        if reads & tainted or any(_is_random(n) for n in inner):
            tainted.update(node.outputs)
    return [v.name or "" for v in model.graph.outputs if v in tainted]


def _is_random(node: onnx_ir.Node) -> bool:
    if node.op_type == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None:
        training = ir.const_array(node.inputs[2])
        return training is None or bool(training.any())
    return node.op_type in _RANDOM


def _inner_nodes(node: onnx_ir.Node) -> Iterator[onnx_ir.Node]:
    for attribute in node.attributes.values():
        for graph in ir.subgraphs(attribute):
            yield from onnx_ir.traversal.RecursiveGraphIterator(graph)


# ---- blame -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Culprit:
    """A node of the fused model that turns right inputs into wrong outputs."""

    nodes: list[str]
    ops: list[str]
    output: str
    max_abs: float
    limit: float
    where: str
    confirmed: bool

    def __str__(self) -> str:
        what = ", ".join(f"{op} '{name}'" for op, name in zip(self.ops, self.nodes, strict=True))
        return f"{what}: {self.where} is off by {self.max_abs:.3g} (limit {self.limit:.3g})"


_ORACLE = "/oracle"  # suffix of the inputs that carry the original's values


def blame(
    original: ir.Model,
    fused: ir.Model,
    feeds: Feeds,
    tolerance: Tolerance,
    *,
    device: str = "cpu",
) -> list[Culprit]:
    """The nodes of `fused` that are wrong on their own, the worst first.

    Fusions keep the names of the values they leave, so the fused graph can be cut at every value
    that the original has too: each piece then gets the original's values and must give the
    original's. All pieces run in one session, whatever the number of nodes. A culprit is confirmed
    by running the fused model with the original's value in place of the culprit's output. Where
    every piece is right and the whole is wrong, the fused nodes are turned back into their bodies
    by bisection.
    """
    reference, suspect = ir.read(original), ir.read(fused)
    expected = _values(reference, feeds, _computed(reference), as_written=True)
    common = [name for name in _computed(suspect) if name in expected]
    seen = _values(suspect, feeds, common)
    # A value that changed its layout under its old name cannot stand in for the original's.
    common = [n for n in common if _alike(expected[n], seen[n])]
    cut = _cut(suspect, {name: expected[name] for name in common})
    given = feeds | {name + _ORACLE: expected[name] for name in common}
    got = _values(cut, given, common, device=device)
    wrong = {
        name: d
        for name in common
        if not (d := difference(name, expected[name], got[name], tolerance)).ok
    }
    outputs = [v.name or "" for v in suspect.graph.outputs]
    if wrong:
        repaired = _cut(suspect, {name: expected[name] for name in wrong})
        patched = feeds | {name + _ORACLE: expected[name] for name in wrong}
        after = _values(repaired, patched, outputs, device=device)
        confirmed = all(
            name in wrong or difference(name, expected[name], after[name], tolerance).ok
            for name in outputs
        )
        # A node with several outputs, or one that a Split follows, makes several wrong values.
        culprits: dict[tuple[str, ...], Culprit] = {}
        for d in sorted(wrong.values(), key=_badness, reverse=True):
            culprit = _culprit(cut, d, confirmed)
            culprits.setdefault(tuple(culprit.nodes), culprit)
        return list(culprits.values())
    return _bisect(suspect, feeds, [(n, expected[n]) for n in outputs], tolerance, device)


def _computed(model: onnx_ir.Model) -> list[str]:
    """Names of the tensors that nodes of the main graph compute."""
    return [
        v.name
        for node in model.graph
        for v in node.outputs
        if v.name and (v.uses() or v.is_graph_output())
    ]


def _alike(a: Any, b: Any) -> bool:
    return (
        isinstance(a, np.ndarray)
        and isinstance(b, np.ndarray)
        and a.shape == b.shape
        and a.dtype == b.dtype
    )


def _values(
    model: onnx_ir.Model,
    feeds: Feeds,
    names: Sequence[str],
    *,
    as_written: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """The values called `names` when the model runs on `feeds`."""
    model = model.clone()
    model.graph.outputs[:] = list(_by_name(model, names).values())
    if device != "cpu":
        got = InferenceSession(model, device=device, optimize=False).run(names, feeds)
        return dict(zip(names, got, strict=True))
    with ort.faults("blame"):
        session = ort.session(model, as_written=as_written)
        return dict(zip(names, ort.run(session, feeds, names), strict=True))


def _by_name(model: onnx_ir.Model, names: Sequence[str]) -> dict[str, Value]:
    known = {v.name: v for node in model.graph for v in node.outputs}
    known |= {v.name: v for v in (*model.graph.inputs, *model.graph.initializers.values())}
    return {name: known[name] for name in names}


def _cut(model: onnx_ir.Model, values: Mapping[str, Array]) -> onnx_ir.Model:
    """A copy in which every reader of a named value reads the new input `name/oracle` instead."""
    model = model.clone()
    for name, value in _by_name(model, list(values)).items():
        kind = DataType.from_numpy(values[name].dtype)
        source = Value(name=name + _ORACLE, type=onnx_ir.TensorType(kind))
        for use in tuple(value.uses()):
            use.node.replace_input_with(use.idx, source)
        model.graph.inputs.append(source)
    return model


def _culprit(cut: onnx_ir.Model, d: Difference, confirmed: bool) -> Culprit:
    """The piece of the cut model that ends in the wrong value: its fused nodes, or all of it."""
    piece: list[onnx_ir.Node] = []
    todo = [_by_name(cut, [d.output])[d.output].producer()]
    while todo:
        node = todo.pop()
        if node is not None and node not in piece:
            piece.append(node)
            todo.extend(v.producer() for v in node.inputs if v is not None)
    piece.reverse()
    fused = [node for node in piece if node.domain == ir.FUSE]
    nodes = fused or piece
    return Culprit(
        [n.name or (n.outputs[0].name or "") for n in nodes],
        [n.op_type for n in nodes],
        d.output,
        d.max_abs,
        d.limit,
        d.where,
        confirmed,
    )


def _bisect(
    model: onnx_ir.Model,
    feeds: Feeds,
    expected: Sequence[tuple[str, Any]],
    tolerance: Tolerance,
    device: str,
) -> list[Culprit]:
    """The fused node whose return to its body, with all before it, makes the outputs right."""
    fused = [node.outputs[0].name or "" for node in model.graph if node.domain == ir.FUSE]
    names = [name for name, _ in expected]

    def worst(count: int) -> Difference | None:
        """The largest failing difference when the first `count` fused nodes run as their bodies."""
        got = _values(_with_bodies(model, set(fused[:count])), feeds, names, device=device)
        parts = [difference(name, a, got[name], tolerance) for name, a in expected]
        return max((d for d in parts if not d.ok), key=_badness, default=None)

    failing = worst(0)
    if failing is None or worst(len(fused)) is not None:
        return []
    low, high = 0, len(fused)  # `low` nodes as bodies fail, `high` pass
    while high - low > 1:
        middle = (low + high) // 2
        found = worst(middle)
        low, high, failing = (middle, high, found) if found else (low, middle, failing)
    node = next(n for n in model.graph if n.outputs and n.outputs[0].name == fused[low])
    return [
        Culprit(
            [node.name or fused[low]],
            [node.op_type],
            fused[low],
            failing.max_abs,
            failing.limit,
            failing.where,
            True,
        )
    ]


def _with_bodies(model: onnx_ir.Model, outputs: set[str]) -> onnx_ir.Model:
    """A copy in which the fused nodes with these first outputs are replaced by their bodies."""
    from onnx_ir.passes.common import InlinePass

    model = model.clone()
    for node in model.graph:
        if node.domain == ir.FUSE and node.outputs[0].name in outputs:
            key = (node.domain, node.op_type, "body")
            if key not in model.functions:
                opset = model.graph.opset_imports[""]
                body = model.functions.get(node.op_identifier()) or ir.fused_function(
                    node.op_type, opset, node.overload
                )
                body = body.clone()
                body.overload = "body"
                model.functions[key] = body
            node.overload = "body"
    with ir.functions_attached(model):
        InlinePass(criteria=lambda f: f.overload == "body")(model)
    return model


# ---- gradients -------------------------------------------------------------------------------

# Of the parameter's size: truncation 1e-10, rounding 1e-11; where that crosses a kink (of a ReLU),
# truncation 1e-14, rounding 1e-9.
_STEPS = (1e-5, 1e-7)
_SLOPE_LIMIT = 1e-5
"""Of |gradient| |direction|, in float64: what curvature and rounding leave of the difference."""
_FLOAT_LIMIT = {np.dtype(np.float64): 1e-4, np.dtype(np.float32): 1e-4, np.dtype(np.float16): 2e-2}
"""Of the largest entry: the gradient in its own type against the same graph in float64. float16
rounds each value by up to 5e-4, and sums of terms that cancel lose some bits more.
"""
_ZERO = 1e-6
"""Of the largest entry in the whole model: below it a gradient is zero up to rounding."""


@dataclass(frozen=True)
class GradientError:
    """One trainable tensor: its worst slope along two directions, and its float32 gradient."""

    tensor: str
    op: str
    slope: float
    expected: float
    slope_error: float
    max_abs: float
    limit: float
    where: str
    ok: bool


@dataclass
class GradientCheck:
    """The outcome for every trainable tensor; `worst_first` puts the failing ones in front."""

    errors: list[GradientError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(e.ok for e in self.errors)

    @property
    def failed(self) -> list[GradientError]:
        """Nearest to the outputs first: a wrong rule spoils every tensor before its node."""
        return [e for e in reversed(self.errors) if not e.ok]

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "notes": self.notes,
            "tensors": [asdict(e) for e in self.errors],
        }


def check_gradients(
    model: ir.Model, *, feeds: Feeds | None = None, device: str = "cpu", seed: int = 0
) -> GradientCheck:
    """Every gradient of every trainable float tensor, against central differences.

    The loss is sum(output * cotangent) for fixed random cotangents. The backward of the fused graph
    runs in float32 on `device`; the same backward with all bodies written out runs in float64;
    along two random directions of each tensor that must give the slope that the unfused graph has
    in float64. Raises ModelError where onnxruntime cannot run the model.
    """
    from onnx_fuse import autodiff, passes

    plain = load(model)
    ir.infer_shapes(plain)
    check = GradientCheck()
    with ort.faults("the original"):
        session = ort.session(plain)
    given = [feeds] if feeds else None
    pairs = _reference(plain, lambda f: ort.run(session, f), given, seed, check.notes)
    inputs, outputs = pairs[0]
    rng = np.random.default_rng(seed)
    names = [v.name or "" for v in plain.graph.outputs]
    cotangents = {
        name: np.asarray(rng.standard_normal(y.shape), y.dtype)
        for name, y in zip(names, outputs, strict=True)
        if isinstance(y, np.ndarray) and y.dtype.kind == "f"
    }
    fused = plain.clone()
    passes.optimize(fused, training=True)
    backward = autodiff.gradient(fused)
    seeds = {f"{name}.grad": c for name, c in cotangents.items()}
    seeds = ir.feeds_of(backward, inputs | seeds)
    # One element is a constant of the graph (a scale, a mask's -inf), not a parameter.
    wanted = [
        v.name or ""
        for v in backward.graph.outputs
        if v.name not in names and (v.name or "").endswith(".grad") and _elements(v) != 1
    ]
    single = _values(backward, seeds, wanted, device=device)
    double = _evaluator(ir.inline(backward), wanted)(_doubles(seeds))
    # What is folded in float32 on one side alone may cross an integer there (T5's buckets).
    passes.optimize(plain, level=0, training=True)
    forward, parameters = _forward(plain, [name.removesuffix(".grad") for name in wanted])
    lost = [name for name in wanted if name.removesuffix(".grad") not in parameters]
    check.notes.extend(f"{name}: made while loading, its slope is not compared" for name in lost)
    evaluate = _evaluator(forward, list(cotangents))
    floor = _ZERO * max((float(np.abs(g).max()) for g in double.values() if g.size), default=0.0)

    def loss(changed: Feeds) -> float:
        values = evaluate(_doubles(inputs) | parameters | changed)
        return sum(float(np.vdot(values[n], c)) for n, c in cotangents.items())

    for node, w in _by_reader(plain, parameters):
        g, array = double[f"{w}.grad"], parameters[w]
        size = max(float(np.sqrt(np.mean(array**2))) if array.size else 0.0, 1e-3)
        worst = (0.0, 0.0, 0.0, True)
        for _ in range(2):
            d = rng.standard_normal(array.shape)
            along, length = float((g * d).sum()), float(np.linalg.norm(d))
            limit = (_SLOPE_LIMIT * float(np.linalg.norm(g)) + floor) * length
            for step in _STEPS:
                h = step * size
                slope = (loss({w: array + h * d}) - loss({w: array - h * d})) / (2 * h)
                error = abs(slope - along)
                if error <= limit:
                    break
            worst = max(
                worst, (error, along, slope, error <= limit), key=lambda t: (not t[3], t[0])
            )
        narrow = _FLOAT_LIMIT[single[f"{w}.grad"].dtype]
        tolerance = Tolerance(narrow, floor, "its own type against float64")
        f32 = difference(w, g, single[f"{w}.grad"].astype(np.float64), tolerance)
        check.errors.append(
            GradientError(
                tensor=w,
                op=f"{node.op_type} '{node.name}'",
                slope=worst[1],
                expected=worst[2],
                slope_error=worst[0],
                max_abs=f32.max_abs,
                limit=f32.limit,
                where=f32.where,
                ok=worst[3] and f32.ok,
            )
        )
    return check


def _elements(value: Value) -> int | None:
    shape = value.shape
    return None if shape is None or not shape.is_static() else math.prod(shape.numpy())


def _doubles(feeds: Mapping[str, Array]) -> Feeds:
    """Floats of any width as float64, the rest as it is."""
    return {
        name: a.astype(np.float64) if DataType.from_numpy(a.dtype).is_floating_point() else a
        for name, a in feeds.items()
    }


def _forward(plain: onnx_ir.Model, names: Sequence[str]) -> tuple[onnx_ir.Model, Feeds]:
    """The model with the named initializers as inputs, and their values in float64."""
    model = plain.clone()
    arrays: Feeds = {}
    for name in names:
        value = model.graph.initializers.pop(name, None)
        array = ir.const_array(value)
        if value is not None and array is not None:
            value.const_value = None
            model.graph.inputs.append(value)
            arrays[name] = array
    return model, _doubles(arrays)


def _by_reader(
    model: onnx_ir.Model, names: Mapping[str, Array]
) -> Iterator[tuple[onnx_ir.Node, str]]:
    """(first reader, tensor) in graph order."""
    seen: set[str] = set()
    for node in onnx_ir.traversal.RecursiveGraphIterator(model.graph):
        for value in node.inputs:
            name = (value.name or "") if value is not None else ""
            if name in names and name not in seen:
                seen.add(name)
                yield node, name


def _evaluator(model: onnx_ir.Model, names: Sequence[str]) -> Callable[[Feeds], dict[str, Array]]:
    """The model in float64: onnxruntime where it has the kernels, else the ONNX reference."""
    model = to_double(model)
    model.graph.outputs[:] = list(_by_name(model, names).values())
    try:
        session = ort.session(model)
        return lambda feeds: dict(
            zip(names, ort.run(session, {k: feeds[k] for k in _inputs(model)}, names), strict=True)
        )
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):
            raise
    reference = _reference_evaluator(model)

    def evaluate(feeds: Feeds) -> dict[str, Array]:
        try:
            with np.errstate(all="ignore"):  # a guard selects what is no number afterwards
                found = reference.run(None, {k: feeds[k] for k in _inputs(model)})
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"nothing here runs the graph in float64, which checks its gradients: onnxruntime "
                f"has no kernels for it, ONNX's own evaluator says '{ir.one_line(error)}'"
            ) from error
        return dict(zip(names, found, strict=True))

    return evaluate


def _reference_evaluator(model: onnx_ir.Model) -> Any:
    """ONNX's own evaluator, but for what it does otherwise (onnx 1.23): its Erf rounds to float32,
    its GatherElements takes no negative axis, its Pad no negative pads.
    """
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    erf = np.vectorize(math.erf, otypes=[np.float64])

    class Erf(OpRun):
        def _run(self, x: Array) -> tuple[Array]:
            return (erf(x) if x.size else x,)

    class Gelu(OpRun):
        def _run(self, x: Array, approximate: str = "none") -> tuple[Array]:
            if approximate == "tanh":
                return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
            return (0.5 * x * (1 + erf(x / math.sqrt(2))) if x.size else x,)

    class GatherElements(OpRun):
        def _run(self, x: Array, indices: Array, axis: int = 0) -> tuple[Array]:
            ahead = (slice(None) if k == axis % x.ndim else slice(n)
                     for k, n in enumerate(indices.shape))  # fmt: skip
            return (np.take_along_axis(x[tuple(ahead)], indices, axis),)

    class Pad(OpRun):
        def _run(
            self, x: Array, pads: Array, value: Array | None = None, axes: Array | None = None,
            mode: str = "constant",
        ) -> tuple[Array]:  # fmt: skip
            along = range(x.ndim) if axes is None else (int(a) % x.ndim for a in axes)
            each = dict(zip(along, pads.reshape(2, -1).T, strict=True))
            more = [tuple(int(max(p, 0)) for p in each.get(a, (0, 0))) for a in range(x.ndim)]
            less = [tuple(int(max(-p, 0)) for p in each.get(a, (0, 0))) for a in range(x.ndim)]
            fill = {"constant_values": 0 if value is None else value} if mode == "constant" else {}
            y = np.pad(x, more, mode=mode, **fill)  # type: ignore[call-overload]
            return (y[tuple(slice(a, n - b) for (a, b), n in zip(less, y.shape, strict=True))],)

    return ReferenceEvaluator(ir.to_proto(model), new_ops=[Erf, Gelu, GatherElements, Pad])


def _inputs(model: onnx_ir.Model) -> list[str]:
    return [v.name or "" for v in model.graph.inputs]


_NARROW = (DataType.FLOAT, DataType.FLOAT16, DataType.BFLOAT16)


def to_double(model: onnx_ir.Model) -> onnx_ir.Model:
    """A copy that computes in float64: inputs, weights, constants, casts and created tensors.

    A Resize's scales stay: 8 times 1.9999999 is 16 in float32 alone.
    """
    model = ir.inline(model)
    graph = model.graph
    scales = {v for n in graph if n.op_type == "Resize" for v in n.inputs[1:3]}
    for value in (*graph.inputs, *graph.initializers.values()):
        if value in scales:
            continue
        if value.dtype in _NARROW:
            value.type = onnx_ir.TensorType(DataType.DOUBLE)
        if value.const_value is not None:
            value.const_value = _double_tensor(value.const_value)
    for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
        for name, attribute in list(node.attributes.items()):
            if attribute.type == onnx_ir.AttributeType.TENSOR:
                tensor = _double_tensor(attribute.as_tensor())
                node.attributes[name] = onnx_ir.AttrTensor(name, tensor)
            elif name in ("value_float", "value_floats"):
                del node.attributes[name]
                array = np.asarray(attribute.value, np.float64)
                node.attributes["value"] = onnx_ir.AttrTensor("value", onnx_ir.tensor(array))
            elif name in ("to", "dtype") and attribute.value in [int(k) for k in _NARROW]:
                node.attributes[name] = onnx_ir.AttrInt64(name, int(DataType.DOUBLE))
        if node.op_type == "GroupNormalization":  # its body casts to this
            node.attributes["stash_type"] = onnx_ir.AttrInt64("stash_type", int(DataType.DOUBLE))
        if node.op_type == "ConstantOfShape" and "value" not in node.attributes:
            zero = onnx_ir.tensor(np.zeros(1))
            node.attributes["value"] = onnx_ir.AttrTensor("value", zero)
        for value in node.outputs:
            value.type = value.shape = None
    return model


def _double_tensor(tensor: Any) -> Any:
    if tensor.dtype not in _NARROW:
        return tensor
    return onnx_ir.tensor(tensor.numpy().astype(np.float64), name=tensor.name)

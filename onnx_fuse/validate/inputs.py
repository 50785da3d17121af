"""Feeds for a model: read from a file, or generated within what its graph accepts."""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
from onnx_ir import DataType, Value

from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.onnx.build import feeds_of, required
from onnx_fuse.runtime import ort
from onnx_fuse.training.data import NOT_ARRAYS

Array = np.ndarray[Any, Any]
Feeds = dict[str, Array]
Run = Callable[[Feeds], list[Any]]


def read_feeds(path: str | os.PathLike[str], model: onnx_ir.Model) -> Feeds:
    """The arrays of an .npz file that the model's inputs name; each input must be there."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (*NOT_ARRAYS, AttributeError) as error:
        raise ModelError(f"{path}: not an .npz file of arrays ({error})") from error
    needed = [v.name for v in required(model)]
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise UsageError(
            f"{Path(path).name} has no array for input '{missing[0]}' (it has {sorted(arrays)})"
        )
    return feeds_of(model, arrays)


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
                for value in required(model):
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


def reference_pairs(
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

"""NumPy's answers to the problems that move, order and count elements, and to reductions."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np

from onnx_fuse.program.data_movement import (
    CopyMany,
    CumulativeSum,
    GatherElements,
    GatherND,
    KeptCounts,
    KeptPositions,
    NGrams,
    Pointwise,
    PointwiseMany,
    PointwiseSums,
    ScatterElements,
    ScatterND,
    SortedRows,
    TopK,
)
from onnx_fuse.program.interpret.memory import CallOperands, widened
from onnx_fuse.program.interpret.steps import evaluate
from onnx_fuse.program.problem import ITEMSIZE, KEPT_TILE

Results = dict[str, np.ndarray]


def pointwise_sums(p: PointwiseSums, of: CallOperands) -> Results:
    """What the expression stores, and the sums of one of its results as it is stored."""
    views, memory = p.pointwise, of.memory
    pairs = zip(views.reads, of.reads.values(), strict=True)
    reads = [memory.view(replace(t, buffer=old.buffer)).copy() for t, old in pairs]
    results = evaluate(views.expression, reads, views.writes)
    summed = widened(results[p.summed], views.writes[p.summed].dtype)
    total = np.asarray(summed.sum({"columns": 0, "rows": 1, "all": None}[p.over]))
    assert total.size == of.writes["sum"].size, (p, of.writes["sum"])
    return dict(zip(of.writes, [*results, total], strict=True))


def pointwise(p: Pointwise, of: CallOperands) -> Results:
    """What the expression stores, of calls that share a launch."""
    results = evaluate(p.expression, [of.raw(name) for name in of.reads], list(of.writes.values()))
    return dict(zip(of.writes, results, strict=True))


def pointwise_many(p: PointwiseMany, of: CallOperands) -> Results:
    """One expression over several sets of tensors; a number that all share is read once."""
    results: Results = {}
    for row, (reads, stores) in enumerate(p.items):
        names = [f"{k}.{row}" for k in range(len(reads))]
        values = [
            of.raw(n) if n in of else of.raw(f"a{k}").reshape(-1)[:1].reshape(())
            for k, n in enumerate(names)
        ]
        targets = [f"{len(reads) + k}.{row}" for k in range(len(stores))]
        arrays = evaluate(p.expression, values, [of.writes[n] for n in targets])
        results |= zip(targets, arrays, strict=True)
    return results


def copy_many(p: CopyMany, of: CallOperands) -> Results:
    """Each tensor as it is; the pieces say the same of the memory."""
    for i, piece in enumerate(p.pieces):
        t = of.writes[f"1.{i}"]
        assert t.size == piece.n * prod(piece.sizes), (t, piece)
        assert ITEMSIZE[t.dtype] == p.itemsize, (t, p.itemsize)
    return {f"1.{i}": of.raw(f"0.{i}") for i in range(len(p.pieces))}


def _places(index: np.ndarray, dims: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """(row of each tuple of `index` [..., q] among dims, whether it is inside)."""
    sizes = np.array(dims, np.int64)
    k = np.where(index < 0, index + sizes, index)
    inside = np.asarray(((k >= 0) & (k < sizes)).all(-1))
    steps = np.array([prod(dims[i + 1 :]) for i in range(len(dims))], np.int64)
    return np.where(inside, (k * steps).sum(-1), 0), inside


def gather_elements(p: GatherElements, of: CallOperands) -> Results:
    """y[o, j, i] = x[o, index[o, j, i], i]; zeros outside."""
    outer = p.size // (p.taken * p.inner)
    index = of.shaped("index", outer, p.taken, p.inner)
    x = of.raw("x").reshape(outer, p.length, p.inner)
    at, inside = _places(index[..., None], (p.length,))
    return {"y": np.where(inside, np.take_along_axis(x, at, 1), np.zeros((), x.dtype))}


def gather_nd(p: GatherND, of: CallOperands) -> Results:
    """y[b, j, i] = x[b, index[b, j, :], i]; zeros outside."""
    index = of.shaped("index", p.batch, p.rows, len(p.dims))
    x = of.raw("x").reshape(p.batch, prod(p.dims), p.inner)
    at, inside = _places(index, p.dims)
    gathered = x[np.arange(p.batch)[:, None], at]
    return {"y": np.where(inside[..., None], gathered, np.zeros((), x.dtype))}


_COMBINED = {"add": np.add, "mul": np.multiply}


def _combined(y: np.ndarray, at: np.ndarray, updates: np.ndarray, reduction: str) -> None:
    """y[at] (op)= updates, the first axis in order."""
    if reduction in _COMBINED:
        _COMBINED[reduction].at(y, at, updates)
        return
    for place, update in zip(at, updates, strict=True):
        stays = {"max": y[place] > update, "min": y[place] < update}.get(reduction, False)
        y[place] = np.where(stays, y[place], update)  # no NaN stays, by onnxruntime's comparison


def scatter_elements(p: ScatterElements, of: CallOperands) -> Results:
    """The updates of each line, in order."""
    outer = p.lines // p.inner
    index, update = (of.shaped(n, outer, p.given, p.inner) for n in ("index", "update"))
    y = of.shaped("before", outer, p.length, p.inner)
    at, inside = _places(index[..., None], (p.length,))
    flat = (np.arange(outer)[:, None, None] * p.length + at) * p.inner + np.arange(p.inner)
    at, update, there = (np.moveaxis(v, 1, 0) for v in (flat, update, inside))
    y = y.reshape(-1)
    _combined(y, at[there], update[there], p.reduction)
    return {"y": y}


def scatter_nd(p: ScatterND, of: CallOperands) -> Results:
    """The updates of rows, in order, onto what is there or zeros."""
    assert p.fresh == ("before" not in of), p
    update = of.shaped("update", p.count, p.inner)
    y = np.zeros((p.rows, p.inner), update.dtype)
    y = y if p.fresh else of.shaped("before", p.rows, p.inner)
    at, inside = _places(of.shaped("index", p.count, len(p.dims)), p.dims)
    _combined(y, at[inside], update[inside], p.reduction)
    return {"y": y}


def cumulative_sum(p: CumulativeSum, of: CallOperands) -> Results:
    """Running sums or products along the middle axis."""
    x = of.shaped("x", p.outer, p.length, p.inner)
    x = x[:, ::-1] if p.reverse else x
    if p.exclusive:
        first = np.full_like(x[:, :1], int(p.product))  # a sum begins at +0, as onnxruntime's
        x = np.concatenate([first, x[:, :-1]], 1)[:, : p.length]
    with np.errstate(all="ignore"):
        y = (np.cumprod if p.product else np.cumsum)(x, 1, dtype=x.dtype)
    return {"y": y[:, ::-1] if p.reverse else y}


def _ranked(x: np.ndarray, largest: bool) -> np.ndarray:
    """Integers [lines, length] that order each line as the kernels do: NaN above all, -0 as 0."""
    values, ranks = np.unique(x, return_inverse=True)  # equal NaNs are one value, the last
    ranks = ranks.reshape(x.shape)
    return len(values) - ranks if largest else ranks


def top_k(p: TopK, of: CallOperands) -> Results:
    """The first k of each line in order, equal ones by index."""
    x = of.shaped("x", p.outer, p.length, p.inner)
    at = np.argsort(_ranked(x, p.largest), 1, kind="stable")[:, : p.k]
    raw = of.raw("x").reshape(x.shape)
    return {"values": np.take_along_axis(raw, at, 1), "indices": at}


def sorted_rows(p: SortedRows, of: CallOperands) -> Results:
    """The order of rows by their first numbers that differ."""
    ranks = _ranked(of.shaped("x", p.count, p.width), False)
    return {"indices": np.lexsort(ranks.T[::-1])}


def kept_counts(p: KeptCounts, of: CallOperands) -> Results:
    """The set flags before each tile, and all of them."""
    running = np.append(0, np.cumsum(of.shaped("keep", p.length)))
    return {"first": running[[*range(0, p.length, KEPT_TILE), p.length]]}


def kept_positions(p: KeptPositions, of: CallOperands) -> Results:
    """The positions of the set flags."""
    return {"position": np.flatnonzero(of.shaped("keep", p.length))}


def n_grams(p: NGrams, of: CallOperands) -> Results:
    """How often each n-gram stands in each row, at every distance that counts."""
    words, pool = of.shaped("x", p.size // p.columns, p.words), of["pool"].reshape(-1)
    counts = np.zeros((len(words), p.columns))
    for column, (first, n, distances) in enumerate(of.shaped("entry", -1, 3)):
        for apart in range(1, distances + 1 if n else 1):
            starts = range(max(0, p.words - apart * (n - 1)))
            for k in starts:
                gram = words[:, k : k + apart * (n - 1) + 1 : apart]
                counts[:, column] += (gram == pool[first : first + n]).all(1)
    weight = of["weight"].reshape(-1) if "weight" in of else np.ones(p.columns)
    return {"y": (counts, (counts != 0) * weight, counts * weight)[p.mode]}

"""NumPy's answers to reductions: Reduce in one pass or several, softmax, sums of parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from onnx_fuse.program.call import dtype_of
from onnx_fuse.program.data_movement import Range
from onnx_fuse.program.interpret.data_movement import Results
from onnx_fuse.program.interpret.memory import CallOperands
from onnx_fuse.program.problems import Float8, PartSums, Reduce, Softmax, SumSquares

States = Sequence[np.ndarray]
"""The numbers that a reduction keeps, each [outer, length, inner]."""


def _extreme(states: States, largest: bool) -> States:
    """The first NaN, or the largest (least) number."""
    (x,) = states
    return [(np.max if largest else np.min)(x, 1, keepdims=True)]


def _log_sum_exp(states: States) -> States:
    top, total = states
    most = np.max(top, 1, keepdims=True)
    scaled = np.where(np.isinf(most), total, total * np.exp(top - most))
    return [most, scaled.sum(1, keepdims=True)]


def _log_count(states: States) -> States:
    """The largest integer, and how often it is there."""
    top, total = states
    most = np.max(top, 1, keepdims=True)
    return [most, (total * (top == most)).sum(1, keepdims=True)]


def _moments(states: States) -> States:
    n, mean, squares = states
    count = n.sum(1, keepdims=True)
    weights = n / np.maximum(count, 1)
    whole = (mean * weights).sum(1, keepdims=True)
    return [count, whole, (squares + n * (mean - whole) ** 2).sum(1, keepdims=True)]


def _arg(states: States, largest: bool, last: bool) -> States:
    """The extreme and its index: of equal ones the first or the last, and NaN at index 0 alone."""
    x, at = states
    best = (np.fmax if largest else np.fmin).reduce(x, 1, keepdims=True)
    stays = (x != x) & (at == 0)
    equal = np.where(stays.any(1, keepdims=True), stays, x == best)
    first = equal.shape[1] - 1 - equal[:, ::-1].argmax(1) if last else equal.argmax(1)
    chosen = first[:, None]
    return [np.take_along_axis(v, chosen, 1) for v in (x, at)]


def _sum(states: States) -> States:
    return [states[0].sum(1, keepdims=True, dtype=states[0].dtype)]


def _product(states: States) -> States:
    return [states[0].prod(1, keepdims=True, dtype=states[0].dtype)]


def _mean(states: States, count: int) -> np.ndarray:
    total = states[0]
    if total.dtype.kind == "f":
        return total / count
    return np.trunc(total / count).astype(total.dtype)


Merge = Callable[[States], States]
_MERGES: dict[str, Merge] = {
    "ArgMax": partial(_arg, largest=True, last=False),
    "ArgMaxFinite": partial(_arg, largest=True, last=False),
    "ArgMaxLast": partial(_arg, largest=True, last=True),
    "ArgMin": partial(_arg, largest=False, last=False),
    "ArgMinLast": partial(_arg, largest=False, last=True),
    "LogCount": _log_count,
    "LogSumExp": _log_sum_exp,
    "Max": partial(_extreme, largest=True),
    "Min": partial(_extreme, largest=False),
    "Moments": _moments,
    "Prod": _product,
}
_FIRST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "SumSquare": np.square, "L2": np.square, "L1": np.abs,
}  # fmt: skip


def reduce(p: Reduce, of: CallOperands) -> Results:
    """One pass, of elements or of the states of an earlier pass, to results or to states."""
    kinds = _kinds(p, of)
    shape = (p.outer, p.length, p.inner)
    if p.from_state:
        flat = np.ascontiguousarray(of.raw("x")).reshape(-1).view(np.uint8)
        packed = flat[: p.outer * p.length * p.inner * p.state].view(kinds).reshape(shape)
        states: States = [_wide(packed[name]) for name in kinds.names or ()]
    else:
        x = of.shaped("x", *shape)
        states = _first_states(p.reducer, x * of.shaped("x2", *shape) if p.paired else x)
    merge = _MERGES.get(p.reducer, _sum)
    ends = [(k * p.chunk, min((k + 1) * p.chunk, p.length)) for k in range(p.splits)]
    if p.splits == 1:
        ends = [(0, p.length)]
    with np.errstate(all="ignore"):
        parts = [
            merge([s[:, a:b] for s in states]) if a < b else _identity(p.reducer, states)
            for a, b in ends
        ]
        joined = [np.concatenate(column, 1) for column in zip(*parts, strict=True)]
        if p.to_state:
            packed = np.empty(joined[0].shape, kinds)
            for name, values in zip(kinds.names or (), joined, strict=True):
                packed[name] = values
            return {"y": packed.reshape(-1).view(np.uint8)}
        result = {"y": _value(p.reducer, joined, p.count)}
        if p.second:
            result["y2"] = joined[2] / p.count
    return result


def _kinds(p: Reduce, of: CallOperands) -> np.dtype[Any]:
    """The type of a state, as the kernels lay it out."""
    floating = "float" in p.dtype
    if p.reducer.startswith("Arg"):
        return np.dtype([("x", np.float64 if floating else np.int64), ("at", np.int64)])
    count = {"LogCount": 2, "LogSumExp": 2, "Moments": 3}.get(p.reducer, 1)
    letter = "f" if floating else "u" if p.dtype.startswith("u") else "i"
    return np.dtype([(f"s{i}", f"{letter}{p.state // count}") for i in range(count)])


def _wide(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "f":
        return values.astype(np.float64)
    return values if values.dtype == np.uint64 else values.astype(np.int64)


def _first_states(reducer: str, x: np.ndarray) -> States:
    x = x.astype(np.int64) if x.dtype == bool else x
    if reducer.startswith("Arg"):
        at = np.broadcast_to(np.arange(x.shape[1])[:, None], x.shape)
        return [np.where(np.isnan(x), np.inf, x) if reducer == "ArgMaxFinite" else x, at]
    if reducer in ("LogSumExp", "LogCount"):
        return [x, np.ones_like(x)]
    if reducer == "Moments":
        return [np.ones_like(x), x, np.zeros_like(x)]
    with np.errstate(all="ignore"):
        return [_FIRST.get(reducer, np.asarray)(x)]


def _identity(reducer: str, states: States) -> States:
    """The state of no elements."""
    outer, _, inner = states[0].shape
    kind = states[0].dtype
    least, most = (-np.inf, np.inf)
    if kind.kind != "f":
        least, most = np.iinfo(kind).min, np.iinfo(kind).max
    numbers = {
        "Max": (least,), "Min": (most,), "Prod": (1,), "Moments": (0,) * 3,
        **dict.fromkeys(("LogSumExp", "LogCount"), (least, 0)),
    }.get(reducer, (0,))  # fmt: skip
    if reducer.startswith("Arg"):
        numbers = (least if "Max" in reducer else most, -1)
    return [np.full((outer, 1, inner), n, s.dtype) for n, s in zip(numbers, states, strict=True)]


def _value(reducer: str, states: States, count: int) -> np.ndarray:
    if reducer == "ArgMaxFinite":
        return np.where(np.isfinite(states[0]), states[1], -1)
    if reducer.startswith("Arg"):
        return states[1]
    if reducer == "Mean":
        return _mean(states, count)
    if reducer in ("LogSumExp", "LogCount"):
        return states[0] + np.log(states[1])
    if reducer == "Moments":
        return states[1]
    if reducer in ("L2", "LogSum"):
        return (np.sqrt if reducer == "L2" else np.log)(states[0].astype(np.float64))
    return states[0]


def softmax(p: Softmax, of: CallOperands) -> Results:
    """exp(x - max) / sum, or its logarithm."""
    x = of.shaped("x", p.outer, p.length, p.inner)
    with np.errstate(all="ignore"):
        z = x - np.max(x, 1, keepdims=True, initial=-np.inf)
        total = np.exp(z).sum(1, keepdims=True)
        return {"y": z - np.log(total) if p.log else np.exp(z) / total}


def sum_squares(p: SumSquares, of: CallOperands) -> Results:
    """The sum over all tensors."""
    return {"y": np.sum([np.square(of[name]).sum() for name in of.reads])}


def part_sums(p: PartSums, of: CallOperands) -> Results:
    """The sum over the parts."""
    return {"out0": of.dense("part", p.parts, p.n).sum(0)}


def value_range(p: Range, of: CallOperands) -> Results:
    """Scale and zero point of DynamicQuantizeLinear."""
    x = of.raw("x")
    with np.errstate(all="ignore"):
        low, high = (f(x[~np.isnan(x)], initial=np.float32(0)) for f in (np.min, np.max))
        scale = np.float32(high - low) / np.float32(255) or np.float32(1)
        zero = np.rint(-low / scale)
    zero = 255 if np.isnan(zero) else np.clip(zero, 0, 255)
    return {"scale": np.asarray(scale), "zero": np.asarray(zero)}


def float8(p: Float8, of: CallOperands) -> Results:
    """A tensor in float8 by its scale, its transpose, and its history with its largest number."""
    kind = dtype_of(p.kind)
    limits: Any = ml_dtypes.finfo
    most, top = float(limits(kind).max), of["history"].max()
    x, start = of.shaped("x", p.m, p.k), -16 if p.kind == "float8_e5m2" else 0
    exponent = np.clip(np.ceil(np.log2(float(top) / most)), -60, 60) if top else start
    q = np.clip(np.ldexp(x, -int(exponent)), -most, most).astype(np.float32).astype(kind)
    largest = np.abs(x[np.isfinite(x)]).max(initial=0)
    following = np.append(largest, of["history"].reshape(-1)[:-1])
    sums = np.add.reduceat(x, np.arange(0, p.m, 128), axis=0)
    scale = np.ldexp(1.0, int(exponent))
    return {"q": q, "qt": q.T, "scale": np.asarray(scale), "next": following, "part": sums}

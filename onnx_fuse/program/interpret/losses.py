"""NumPy's answers to the problems of losses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onnx_fuse.program.call import dtype_of
from onnx_fuse.program.interpret.data_movement import Results
from onnx_fuse.program.interpret.memory import CallOperands
from onnx_fuse.program.losses import CrossEntropy, CrossEntropyChunk, ExpRows, LabelScore


def cross_entropy(p: CrossEntropy, of: CallOperands) -> Results:
    """The losses of rows, their total, or their gradient."""
    if p.stage == "total":
        loss, weight = of.dense("rows", max(p.rows, 1), 2)[: p.rows].sum(0)
        with np.errstate(all="ignore"):
            return {"loss": np.asarray(np.divide(loss, weight) if p.mean else loss)}
    batch = p.rows // p.inner
    x = of.shaped("x", batch, p.classes, p.inner)
    label = of.shaped("target", batch, 1, p.inner).astype(np.int64)
    with np.errstate(all="ignore"):
        top = np.max(x, 1, keepdims=True)
        lse = np.where(np.isfinite(top), top, 0)
        lse = lse + np.log(np.exp(x - lse).sum(1, keepdims=True))
        log_p = x - lse if p.log_softmax else x
    if p.stage == "grad":
        hit = np.arange(p.classes)[:, None] == label
        return {"dx": of.shaped("slope", batch, 1, p.inner) * (np.exp(log_p) - hit)}
    assert p.stage == "rows", p
    valid = (label >= 0) & (label < p.classes)
    safe = np.where(valid, label, 0)
    each = of["weight"].reshape(-1) if "weight" in of else np.ones(p.classes)
    weight = np.where(valid, each[safe], np.nan)
    loss = np.where(valid, -np.take_along_axis(log_p, safe, 1) * weight, np.nan)
    counts = np.ones(label.shape, bool) if p.ignored is None else label != p.ignored
    pair = np.stack([np.where(counts, v, 0).reshape(-1) for v in (loss, weight)], -1)
    rows = np.zeros((max(p.rows, 1), 2))
    rows[: p.rows] = pair
    return {"rows": rows, "loss": pair[:, 0], "log_prob": log_p}


def chunk_losses(p: CrossEntropyChunk, read: Mapping[str, np.ndarray]) -> Results:
    """A chunk's losses and weights, and what takes the place of its scores [rows, classes]."""
    x, label = read["x"].astype(np.float64), read["target"]
    counts = label != p.ignored
    log_p = x - np.logaddexp.reduce(x, axis=1, keepdims=True)
    each = read["weight"].astype(np.float64) if "weight" in read else np.ones(p.classes)
    safe = np.where(counts, label, 0)
    weight = np.where(counts, each[safe], 0)
    hard, soft = (1 - p.smoothing) * weight, p.smoothing / p.classes * counts
    rows = np.arange(p.rows)
    loss = np.where(counts, -hard * log_p[rows, safe], 0)
    if p.smoothing:
        loss = loss - np.where(counts, soft * (log_p * each).sum(1), 0)
    g = (hard + soft * each.sum())[:, None] * np.exp(log_p) - soft[:, None] * each
    g[rows, safe] -= hard
    return {"rows": np.stack([loss, weight], 1), "dx": g}


def cross_entropy_chunk(p: CrossEntropyChunk, of: CallOperands) -> Results:
    """The same of a call's operands."""
    return chunk_losses(p, {name: of[name] for name in of.reads})


def label_score(p: LabelScore, of: CallOperands) -> Results:
    """The references of a head's rows."""
    label = of["target"].reshape(-1)
    x, w = _head(p, of)
    counts = (label != p.ignored) & (label >= 0) & (label < p.classes)
    safe = np.where(counts, label, 0)
    score = (x * w[safe]).sum(1) + (of["bias"].reshape(-1)[safe] if "bias" in of else 0)
    near = np.where(np.abs(score) < 1e30, score / np.log(2) + 64, 0)
    return {"to": np.where(counts, near, np.inf)}


def _head(p: LabelScore | ExpRows, of: CallOperands) -> tuple[np.ndarray, np.ndarray]:
    """x [rows, k] and W [classes, k]."""
    x = of.strided("x", (p.rows, p.k), (p.ldx, 1))
    strides = (1, p.ldw) if p.turned else (p.ldw, 1)
    return x, of.strided("w", (p.classes, p.k), strides)


def exp_rows(p: ExpRows, of: CallOperands) -> Results:
    """The losses of rows of exponentials, and what is left of their gradient.

    Rows that were too far from their reference are made anew, from their scores.
    """
    e, label = of.strided("e", (p.rows, p.classes), (p.stride, 1)), of["target"].reshape(-1)
    counts, total = label != p.ignored, of.dense("part", p.parts, p.rows).sum(0)
    valid = counts & (label >= 0) & (label < p.classes)
    rows, safe = np.arange(p.rows), np.where(valid, label, 0)
    numerator = e[rows, safe]
    x, w = _head(p, of)
    with np.errstate(all="ignore"):
        again = valid & ~((numerator >= 2.0**-80) & (total <= 2.0**96)) & ~np.isnan(total)
        scores = x @ w.T + (of["bias"].reshape(-1) if "bias" in of else 0)
        fresh = np.exp(scores - scores.max(1, keepdims=True))
        e = np.where(again[:, None], fresh.astype(dtype_of(p.dtype)).astype(np.float64), e)
        total = np.where(again, fresh.sum(1), total)
        numerator = np.where(again, fresh[rows, safe], numerator)
        weight = of["weight"].reshape(-1)[safe] if "weight" in of else np.ones(p.rows)
        weight = np.where(counts, np.where(valid, weight, np.nan), 0)
        scale = np.where(valid, weight / total, weight)
        loss = np.where(valid, weight * (np.log(total) - np.log(numerator)), weight)
    e[rows, safe] -= np.where(valid, total, 0)
    e[~counts] = np.where(total[~counts, None] != 0, 0, e[~counts])
    held = of.former("e") if "e" in of.writes else e
    e = e if held.size == e.size else _into(held, e)
    return {"e": e, "rows": np.stack([loss, weight], 1), "scale": scale,
            "scaled": scale[:, None] * x, "narrow": scale}  # fmt: skip


def _into(held: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Rows with what stands behind their last class."""
    wide = held.reshape(len(e), -1)
    wide[:, : e.shape[1]] = e
    return wide

"""NumPy's answers to attention and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnx_fuse.program.call import dtype_of
from onnx_fuse.program.contractions import (
    CACHE_OPERANDS,
    Attention,
    AttentionGrad,
    CachedAttention,
)
from onnx_fuse.program.data_movement import CacheAppend
from onnx_fuse.program.interpret.data_movement import Results
from onnx_fuse.program.interpret.memory import CallOperands
from onnx_fuse.program.interpret.norms import with_tail


@dataclass
class _SoftmaxWeights:
    """The softmax w [B, H, S, T], its rows' largest logit and the log of their sum, d z / d qkᵀ."""

    w: np.ndarray
    lse: np.ndarray
    slope: np.ndarray


def _operand(p: Attention, of: CallOperands, name: str) -> np.ndarray:
    """[B, H, S, D] by the problem's strides."""
    shape, strides = p.layout(name)
    return of.strided(name, shape, (*strides, 1))


def _sequences(p: Attention, of: CallOperands) -> np.ndarray:
    """How many sequences of packed rows have begun at each row."""
    return np.searchsorted(of.raw("offsets").reshape(-1), np.arange(p.packed), side="right")


def _weights(p: Attention, of: CallOperands, q: np.ndarray, k: np.ndarray) -> _SoftmaxWeights:
    z = p.scale * q @ k.swapaxes(2, 3)
    slope = np.ones_like(z)
    if p.softcap:
        tanh = np.tanh(z)
        z, slope = p.softcap * tanh, p.softcap * (1 - tanh**2)
    places = None
    if p.packed:
        offsets, sequence = of.raw("offsets").reshape(-1), _sequences(p, of)
        own = np.minimum(sequence, len(offsets) - 1) - 1
        within = np.minimum(np.arange(p.packed) - offsets[own], p.m - 1)
        places = own[:, None], slice(None), within[:, None], within
    masks = ((p.mask, "mask", p.keep, p.fill), (p.mask2, "mask2", p.keep2, p.fill2))
    for strides, name, keep, fill in masks:
        if not strides:
            continue
        mask = of.strided(name, p.mask_shape, strides)
        mask = mask if places is None else np.moveaxis(mask[places], 2, 0)
        if keep:
            z = np.where(mask != 0, z, fill)
            slope = np.where(mask != 0, slope, 0)
        elif p.lowest:  # far beyond the digits that a score has
            z = np.float32(z) + np.float32(np.where(mask == -65504, p.lowest, mask))
        else:
            z = z + mask
    ahead = np.arange(z.shape[3]) - np.arange(z.shape[2])[:, None]
    left, right = (np.inf if n < 0 else n for n in p.window or (-1, -1))
    right = min(right, 0) if p.causal else right
    if p.lengths:
        last = of.raw("lengths").reshape(-1, 1, 1, 1)
        places = np.maximum(last + 1 - p.m, 0) + np.arange(p.m)[:, None]
        ahead, right = np.arange(p.n) - places, np.minimum(last - places, 0)
    seen = (ahead >= -left) & (ahead <= right)
    if p.packed:
        seen &= (sequence[:, None] == sequence) & (sequence < len(offsets))
    z = np.where(seen, z, -np.inf)
    top = z.max(-1, keepdims=True)
    sink = of.dense("sink", 1, p.batch[1], 1, 1) if p.sink else -np.inf
    top = np.maximum(top, sink)
    e = np.exp(z - top)
    total = e.sum(-1, keepdims=True) + (np.exp(sink - top) if p.sink else 0)
    w = e / total
    if p.guard:  # of rows that are masked whole, or of every NaN
        w = np.where(np.isnan(w) if p.guard == 2 else top == -np.inf, 0, w)
    return _SoftmaxWeights(w, np.concatenate([top, np.log(total)], -1), slope)


def attention(p: Attention, of: CallOperands) -> Results:
    """y, and the largest logit and the log of the sum of each row."""
    q, k, v = (_operand(p, of, name) for name in "qkv")
    if p.cache:
        k, v = (t * _steps(p, of, name) for t, name in ((k, "key_step"), (v, "value_step")))
    k, v = (np.repeat(t, p.group, 1) for t in (k, v))
    if p.lengths:  # what stands behind the tokens, or before their window, is not read
        ahead = np.arange(p.n) - of.raw("lengths").reshape(-1, 1)
        read = (ahead <= 0) & (ahead > (-p.window[0] - p.m if p.window else -np.inf))
        v = np.where(read[:, None, :, None], v, 0)
    with np.errstate(all="ignore"):
        weights = _weights(p, of, q, k)
        y = weights.w @ v
        sequence = _sequences(p, of)[:, None] if p.packed else np.zeros(0)
        for each in np.unique(sequence):  # what is no number in a sequence stays in it
            y = np.where(sequence == each, weights.w @ np.where(sequence == each, v, 0), y)
        return {"y": with_tail(p.tail, of, y), "lse": weights.lse}


def _steps(p: Attention | CacheAppend, of: CallOperands, name: str) -> np.ndarray:
    """The steps of a cache's numbers: [1, kv_heads, 1, D]."""
    heads, size = (
        (p.kv_heads, p.size) if isinstance(p, CacheAppend) else (p.batch[1] // p.group, p.k)
    )
    return of.dense(name, heads, size)[None, :, None]


def _in_steps(x: np.ndarray, step: np.ndarray, cache: str) -> np.ndarray:
    """x in steps, in the range of the cache's type."""
    with np.errstate(all="ignore"):
        steps = np.float32(x) / np.where(step == 0, np.float32(1), np.float32(step))
    if cache == "int8":
        return np.where(np.isnan(steps), 127, np.rint(steps).clip(-128, 127))
    return steps.clip(-448, 448).astype(dtype_of(cache)).astype(np.float64)


def cache_append(p: CacheAppend, of: CallOperands) -> Results:
    """The caches with the new rows, and the queries rotated."""
    starts = np.full(p.batch, p.past)
    if not (p.uniform or p.placed):
        lengths = of.raw("lengths").reshape(-1).astype(np.int64)
        starts = np.maximum(lengths + 1 - p.rows, 0)
    places = starts[:, None] + np.arange(p.rows)
    if p.placed:
        at = of.raw("positions").reshape(-1, p.rows)
        places = np.broadcast_to(np.where(at < 0, at + p.length, at), places.shape)
    results: Results = {}
    heads = {"q": p.heads, "k": p.kv_heads, "v": p.kv_heads}
    strides = {"q": p.q_strides, "k": p.k_strides, "v": p.v_strides}
    new = {
        name: of.strided(name, (p.batch, count, p.rows, p.size), (*strides[name], 1))
        for name, count in heads.items()
        if count
    }
    for name in "qk" if p.normed else "":
        mean = np.square(new[name]).mean(-1, keepdims=True)
        new[name] = new[name] / np.sqrt(mean + p.epsilon) * of.dense(f"{name}_scale", p.size)
    if p.half:
        angles = places
        if p.positions == "rows":
            angles = np.arange(places.size).reshape(places.shape)
        elif p.positions:
            given = of.raw("positions").reshape(-1)
            each = p.positions == "each"
            angles = given.reshape(places.shape) if each else given[0] + np.arange(p.rows)
            angles = np.broadcast_to(angles, places.shape)
        angles = np.clip(angles, 0, p.context - 1)
        wide = p.half * (1 + p.columns)
        tables = [of.dense(name, p.context, wide)[angles][:, None] for name in ("cos", "sin")]
        new |= {name: _rotated(p, new[name], *tables) for name in "qk"}
        results["turned"] = new["q"]
    for name, step in (("k", "key_step"), ("v", "value_step")) if p.cache else ():
        row = new[name].astype(dtype_of(p.dtype))  # as it is rotated
        new[name] = _in_steps(row, _steps(p, of, step), p.cache)
    for name, past, present in (
        ("k", "past_key", "present_key"), ("v", "past_value", "present_value")
    ):  # fmt: skip
        cache = np.zeros((p.batch, p.kv_heads, p.length, p.size))
        for b, start in enumerate(starts):
            if p.past:
                old = of.dense(past, p.batch, p.kv_heads, p.past, p.size)
                end = p.past if p.keep else start
                cache[b, :, :end] = old[b, :, :end]
            inside = (places[b] >= 0) & (places[b] < p.length)
            cache[b][:, places[b][inside]] = new[name][b][:, inside]
        results[present] = cache
    return results


class _Over(CallOperands):
    """Those of an attention, some of which are arrays already."""

    arrays: Results

    def strided(self, name: str, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
        """The array of that name, where there is one."""
        if name in self.arrays:
            return np.reshape(self.arrays[name], shape)
        return super().strided(name, shape, strides)


def cached_attention(p: CachedAttention, of: CallOperands) -> Results:
    """The caches with the new rows, and attention over them."""
    append, attended = p.parts
    named = {name: CACHE_OPERANDS.get(name, name) for name in (*CACHE_OPERANDS, *of.reads)}
    reads = {name: of.reads[own] for name, own in named.items() if own in of.reads}
    appended = cache_append(append, CallOperands(of.memory, reads.items(), of.writes.items()))
    over = _Over(of.memory, of.reads.items(), of.writes.items())
    over.arrays = {"k": appended["present_key"], "v": appended["present_value"]}
    if "turned" in appended:
        over.arrays["q"] = appended.pop("turned")
    return appended | attention(attended, over)


def _rotated(p: CacheAppend, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """x [B, H, S, D] with its pairs rotated by angles [B, 1, S, half], or one for each column."""
    result = x.copy()
    ends = 2 * p.half
    step, second = (2, 1) if p.interleaved else (1, p.half)
    first = slice(0, ends if p.interleaved else p.half, step)
    other = slice(second, ends, step)
    c, s = (t[..., -p.half :] for t in (cos, sin))
    cos, sin = (t[..., : p.half] for t in (cos, sin))
    result[..., first] = x[..., first] * cos - x[..., other] * sin
    result[..., other] = x[..., other] * c + x[..., first] * s
    return result


def attention_grad(p: AttentionGrad, of: CallOperands) -> Results:
    """dq, dk and dv, those of keys and values summed over the heads that share them."""
    q, k, v, y, dy = (_operand(p, of, name) for name in ("q", "k", "v", "y", "dy"))
    k, v = (np.repeat(t, p.group, 1) for t in (k, v))
    with np.errstate(all="ignore"):
        weights = _weights(p, of, q, k)
        dw = dy @ v.swapaxes(2, 3)
        dz = weights.w * (dw - (dy * y).sum(-1, keepdims=True)) * weights.slope * p.scale
        dk, dv = dz.swapaxes(2, 3) @ q, weights.w.swapaxes(2, 3) @ dy
    batch, heads, keys, _ = k.shape
    shared = (batch, heads // p.group, p.group, keys)
    dk, dv = (g.reshape(*shared, g.shape[-1]).sum(2) for g in (dk, dv))
    return {"dq": dz @ k, "dk": dk, "dv": dv}

"""NumPy's answers to attention and its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnx_fuse.program.contractions import Attention, AttentionGrad
from onnx_fuse.program.interpret.data_movement import Results
from onnx_fuse.program.interpret.memory import Operands


@dataclass
class _Weights:
    """The softmax w [B, H, S, T], its rows' largest logit and the log of their sum, d z / d qkᵀ."""

    w: np.ndarray
    lse: np.ndarray
    slope: np.ndarray


def _operand(p: Attention, of: Operands, name: str) -> np.ndarray:
    """[B, H, S, D] by the problem's strides."""
    shape, strides = p.layout(name)
    return of.strided(name, shape, (*strides, 1))


def _weights(p: Attention, of: Operands, q: np.ndarray, k: np.ndarray) -> _Weights:
    z = p.scale * q @ k.swapaxes(2, 3)
    slope = np.ones_like(z)
    if p.softcap:
        tanh = np.tanh(z)
        z, slope = p.softcap * tanh, p.softcap * (1 - tanh**2)
    masks = ((p.mask, "mask", p.keep, p.fill), (p.mask2, "mask2", p.keep2, p.fill2))
    for strides, name, keep, fill in masks:
        if not strides:
            continue
        mask = of.strided(name, (*p.batch, p.m, p.n), strides)
        if keep:
            z = np.where(mask != 0, z, fill)
            slope = np.where(mask != 0, slope, 0)
        elif p.lowest:  # far beyond the digits that a score has
            z = np.float32(z) + np.float32(np.where(mask == -65504, p.lowest, mask))
        else:
            z = z + mask
    ahead = np.arange(p.n) - np.arange(p.m)[:, None]
    left, right = (np.inf if n < 0 else n for n in p.window or (-1, -1))
    right = min(right, 0) if p.causal else right
    z = np.where((ahead >= -left) & (ahead <= right), z, -np.inf)
    top = z.max(-1, keepdims=True)
    e = np.exp(z - top)
    total = e.sum(-1, keepdims=True)
    w = e / total
    if p.guard:  # of rows that are masked whole, or of every NaN
        w = np.where(np.isnan(w) if p.guard == 2 else top == -np.inf, 0, w)
    return _Weights(w, np.concatenate([top, np.log(total)], -1), slope)


def attention(p: Attention, of: Operands) -> Results:
    """y, and the largest logit and the log of the sum of each row."""
    q, k, v = (_operand(p, of, name) for name in "qkv")
    k, v = (np.repeat(t, p.group, 1) for t in (k, v))
    with np.errstate(all="ignore"):
        weights = _weights(p, of, q, k)
        return {"y": weights.w @ v, "lse": weights.lse}


def attention_grad(p: AttentionGrad, of: Operands) -> Results:
    """dq, dk and dv, those of keys and values summed over the heads that share them."""
    q, k, v, y, dy = (_operand(p, of, name) for name in ("q", "k", "v", "y", "dy"))
    k, v = (np.repeat(t, p.group, 1) for t in (k, v))
    with np.errstate(all="ignore"):
        weights = _weights(p, of, q, k)
        dw = dy @ v.swapaxes(2, 3)
        dz = weights.w * (dw - (dy * y).sum(-1, keepdims=True)) * weights.slope * p.scale
        dk, dv = dz.swapaxes(2, 3) @ q, weights.w.swapaxes(2, 3) @ dy
    batch, heads = p.batch
    shared = (batch, heads // p.group, p.group, p.n)
    dk, dv = (g.reshape(*shared, g.shape[-1]).sum(2) for g in (dk, dv))
    return {"dq": dz @ k, "dk": dk, "dv": dv}

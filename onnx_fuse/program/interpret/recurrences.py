"""NumPy's answers to problems that go step by step, and to random numbers."""

from __future__ import annotations

import numpy as np

from onnx_fuse.program.call import dtype_of
from onnx_fuse.program.data_movement import Random, Recurrence
from onnx_fuse.program.interpret.data_movement import Results
from onnx_fuse.program.interpret.memory import CallOperands

LSTM, GRU, GRU_LINEAR, RNN_TANH, RNN_RELU = range(5)
"""`Recurrence.kind`."""


def _sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        result: np.ndarray = 1 / (1 + np.exp(-x))
    return result


def recurrence(p: Recurrence, of: CallOperands) -> Results:
    """All steps in one direction, or their gradient."""
    return _gradient(p, of) if p.grad else _forward(p, of)


def _order(p: Recurrence) -> range:
    return range(p.steps)[::-1] if p.reverse else range(p.steps)


def _forward(p: Recurrence, of: CallOperands) -> Results:
    hidden, kind = p.hidden, dtype_of(p.dtype)
    z = of.shaped("z", p.steps, p.batch, -1)
    h, rt, lengths = of.shaped("h0", p.batch, hidden), of["rt"], of["lengths"].reshape(-1, 1)
    c = of.shaped("c0", p.batch, hidden) if p.kind == LSTM else np.zeros_like(h)
    y = np.zeros((p.steps, p.batch, hidden))
    for t in _order(p):
        x = np.split(z[t], z.shape[-1] // hidden, 1)
        sums = np.split(h @ rt, rt.shape[-1] // hidden, 1)
        cell = c
        if p.kind == LSTM:
            i, o, f = (_sigmoid(x[k] + sums[k]) for k in range(3))
            cell = f * c + i * np.tanh(x[3] + sums[3])
            fresh = o * np.tanh(cell)
        elif p.kind in (GRU, GRU_LINEAR):
            update, reset = (_sigmoid(x[k] + sums[k]) for k in range(2))
            if p.kind == GRU:
                new = np.tanh(x[2] + (reset * h) @ of["rn"])
            else:
                new = np.tanh(x[2] + reset * (sums[2] + of["bn"].reshape(-1)))
            fresh = (1 - update) * new + update * h
        else:
            a = x[0] + sums[0]
            fresh = np.tanh(a) if p.kind == RNN_TANH else np.where(a < 0, 0, a)
        alive = t < lengths
        fresh = fresh.astype(kind).astype(np.float64)
        h, c = np.where(alive, fresh, h), np.where(alive, cell, c)
        y[t] = np.where(alive, fresh, 0)
    return {"y": y, "h": h, "c": c}


def _gradient(p: Recurrence, of: CallOperands) -> Results:
    """Backwards over all steps, from the sums that the activations took."""
    hidden = p.hidden
    z, dy = of.shaped("z", p.steps, p.batch, -1), of.shaped("dy", p.steps, p.batch, hidden)
    z2 = of.shaped("z2", p.steps, p.batch, -1) if "z2" in of else None
    r, lengths = of["r"], of["lengths"].reshape(-1, 1)
    dh = of.shaped("dh_T", p.batch, hidden)
    dc = of.shaped("dc_T", p.batch, hidden) if "dc_T" in of else np.zeros_like(dh)
    cells = _cells(p, of, z, lengths) if p.kind == LSTM else None
    dz, dz2 = (np.zeros((p.steps, p.batch, p.gates * hidden)) for _ in range(2))
    for t in reversed(_order(p)):
        g, alive = dh + dy[t], t < lengths
        x = np.split(z[t], z.shape[-1] // hidden, 1)
        passed: list[np.ndarray]
        if cells is not None:
            i, o, f = (_sigmoid(v) for v in x[:3])
            a, c = np.tanh(x[3]), cells[t]
            tc = np.tanh(f * c + i * a)
            slope = dc + g * o * (1 - tc**2)
            out = [slope * a * i * (1 - i), g * tc * o * (1 - o), slope * c * f * (1 - f),
                   slope * i * (1 - a**2)]  # fmt: skip
            dc, passed, stays = np.where(alive, slope * f, dc), out, 0 * g
        elif z2 is not None:
            out, passed, stays = _gru(p, of, x, z2[t], g, t)
        else:
            v = np.tanh(x[0])
            out = [g * (1 - v**2 if p.kind == RNN_TANH else x[0] > 0)]
            passed, stays = out, 0 * g
        out, passed = ([np.where(alive, v, 0) for v in part] for part in (out, passed))
        dz[t], dz2[t] = np.concatenate(out, 1), np.concatenate(passed, 1)
        through = np.concatenate(passed, 1)[:, : len(r.reshape(-1, hidden))]
        dh = np.where(alive, stays + through @ r.reshape(-1, hidden), dh)
    return {"dz": dz, "dz2": dz2, "dh0": dh, "dc0": dc, "cells": cells if cells is not None else dy}


def _cells(p: Recurrence, of: CallOperands, z: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The state c before each step."""
    c, cells = of.shaped("c0", p.batch, p.hidden), np.zeros((p.steps, p.batch, p.hidden))
    for t in _order(p):
        cells[t] = c
        i, _, f, a = np.split(z[t], 4, 1)
        c = np.where(t < lengths, _sigmoid(f) * c + _sigmoid(i) * np.tanh(a), c)
    return cells


def _gru(
    p: Recurrence, of: CallOperands, x: list[np.ndarray], hidden: np.ndarray, g: np.ndarray, t: int
) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """(gradients of the sums, those of the states' part of them, what dh keeps)."""
    h = of.shaped("before", p.steps, p.batch, p.hidden)[t]
    if p.kind == GRU:
        update, reset = (_sigmoid(v) for v in x[:2])
        new = np.tanh(hidden)
        slope = g * (1 - update) * (1 - new**2)
        through = slope @ of["rn"].reshape(p.hidden, p.hidden)
        opened = through * h * reset * (1 - reset)
        out = [g * (h - new) * update * (1 - update), opened, slope]
        return out, out, g * update + through * reset
    mine = np.split(hidden, 3, 1)
    update, reset = (_sigmoid(x[k] + mine[k]) for k in range(2))
    new = np.tanh(x[2] + reset * mine[2])
    slope = g * (1 - update) * (1 - new**2)
    out = [g * (h - new) * update * (1 - update), slope * mine[2] * reset * (1 - reset), slope]
    return out, [*out[:2], slope * reset], g * update


UNIFORM, NORMAL, BERNOULLI, DROPOUT = range(4)
"""`Random.kind`."""


def philox(counter: np.ndarray, seed: int) -> np.ndarray:
    """uint32 [blocks, 4]: ten rounds of Philox4x32 of counters [blocks, 4]."""
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k0, k1, low = seed & 0xFFFFFFFF, seed >> 32, np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), b & low,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), a & low,
        ]  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, 1).astype(np.uint32)


def random(p: Random, of: CallOperands) -> Results:
    """The numbers of random/philox.cu: each a function of seed, draw, stream and its place."""
    seed, draw = (int(v) for v in of.raw("state").reshape(-1).view(np.uint64)[:2])
    seed, draw = (p.bits & (2**64 - 1), 0) if p.fixed else (seed, draw)
    blocks = np.arange(-(-p.size // 4), dtype=np.uint64)
    counter = np.zeros((len(blocks), 4), np.uint64)
    counter[:, 0], counter[:, 1] = blocks & np.uint64(0xFFFFFFFF), blocks >> np.uint64(32)
    counter[:, 2], counter[:, 3] = draw & 0xFFFFFFFF, p.stream & 0xFFFFFFFF
    u = (philox(counter, seed) >> np.uint32(8)) * np.float32(2.0**-24)
    if p.kind == NORMAL:
        first, second = u[:, 0::2].astype(np.float64), u[:, 1::2].astype(np.float64)
        radius, angle = np.sqrt(-2 * np.log1p(-first)), 2 * np.pi * second
        pairs = np.stack([np.cos(angle), np.sin(angle)], -1) * radius[..., None]
        y = (p.a + p.b * pairs).reshape(-1)[: p.size]
        return {"y": y}
    u = u.reshape(-1)[: p.size].astype(np.float64)
    if p.kind == UNIFORM:
        return {"y": np.float32(p.a) + np.float32(p.b - p.a) * u}
    if p.kind == BERNOULLI:
        return {"y": u < of["x"].reshape(-1).astype(np.float32)}
    return {"y": np.where(u >= np.float32(p.b), p.a, 0)}

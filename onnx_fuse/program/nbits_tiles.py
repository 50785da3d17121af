"""4-bit weights in the order in which quant/tiled_nbits.cu reads them.

A word of 32 bits is what a lane of an `mma.m16n8k16` holds of 16 rows of weights and 16 k: rows g
and g + 8, and k = 8 t + 4 h + 2 p + e of a run of 32, where g = lane // 4, t = lane % 4, and h is
the word. Its nibble 4 e + 2 p + r is of row g + 8 r. A tile has 16 rows, a chunk 64 k.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

ROWS = 16
CHUNK = 64


def _grouped(rows: np.ndarray) -> np.ndarray:
    """[n, ...] as [tiles, 2, 8, ...], rows of zeros behind the last."""
    padded = np.pad(rows, [(0, -len(rows) % ROWS)] + [(0, 0)] * (rows.ndim - 1))
    return padded.reshape(-1, 2, 8, *rows.shape[1:])


def tiled(q: np.ndarray) -> np.ndarray:
    """uint8 [n, k / 2], the low nibble first, as uint8 [tiles, k / 64, 32, 16]."""
    step = ROWS * max(1, (1 << 19) // (ROWS * q.shape[1]))  # what a core's cache holds at a time
    parts = [q[i : i + step] for i in range(0, len(q), step)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        return np.concatenate(list(threads.map(_some_tiles, parts)))


def _some_tiles(q: np.ndarray) -> np.ndarray:
    rows = _grouped(np.ascontiguousarray(q).view("<u4"))  # words of 8 k, bytes h p, nibbles e
    first, second = (part.reshape(len(rows), 8, -1, 2, 4) for part in (rows[:, 0], rows[:, 1]))
    even = first & 0x0F0F0F0F | (second & 0x0F0F0F0F) << 4
    odd = first >> 4 & 0x0F0F0F0F | second & 0xF0F0F0F0
    words = np.stack([even & 0xFFFF | odd << 16, even >> 16 | odd & 0xFFFF0000], -1)  # one each h
    pairs = words.astype("<u4").view("<u8")[..., 0]  # tile g chunk run t
    order = np.ascontiguousarray(pairs.transpose(0, 2, 1, 4, 3))
    return order.view(np.uint8).reshape(len(rows), -1, 32, 16)


def untiled(q: np.ndarray, n: int) -> np.ndarray:
    """The 4-bit integers [n, k] of uint8 [tiles, k / 64, 32, 16]."""
    words = q.reshape(-1, q.shape[1], 8, 4, 2, 2, 2, 2)  # tile chunk g t run h e p
    nibbles = np.stack([words & 15, words >> 4])  # r before all
    rows = nibbles.transpose(1, 0, 3, 2, 5, 4, 6, 8, 7)  # tile r g chunk run t h p e
    return rows.reshape(-1, q.shape[1] * CHUNK)[:n]


def tiled_scales(scale: np.ndarray, zero: np.ndarray | None) -> np.ndarray:
    """scale [n, blocks], and zero points, as [tiles, blocks, 8, 2 or 4]: rows g, g + 8 of each.

    A zero point is the bits of the number that the kernel adds: -(1024 + zero) and -(64 + zero) in
    float16, -(128 + zero) in bfloat16.
    """
    groups = [_grouped(scale)]
    if zero is not None:
        base, step = _offsets(scale.dtype)
        bits = _grouped(zero.astype(np.uint16)) * step + base
        groups.append(bits.astype(np.uint16).view(scale.dtype))
    return np.ascontiguousarray(np.concatenate(groups, 1).transpose(0, 3, 2, 1))


def untiled_scales(scale: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray | None]:
    """scale [n, blocks] and the zero points of `tiled_scales`."""
    parts = scale.transpose(0, 3, 2, 1)  # tile r g block

    def rows(part: np.ndarray) -> np.ndarray:
        return part.reshape(-1, part.shape[-1])[:n]

    if parts.shape[1] == 2:
        return rows(parts), None
    base, step = _offsets(scale.dtype)
    bits = np.ascontiguousarray(parts[:, 2:]).view(np.uint16)
    return rows(parts[:, :2]), rows((bits - base) // step)


def _offsets(dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The bits that stand for a zero point of 0, and a zero point's step, for rows g and g + 8."""
    base, step = ((0xE400, 0xD400), (1, 16)) if dtype == np.float16 else ((0xC300, 0xC300), (1, 1))
    shape = (1, 2, 1, 1)
    return np.array(base, np.uint16).reshape(shape), np.array(step, np.uint16).reshape(shape)

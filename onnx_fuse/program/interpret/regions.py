"""NumPy's answers to problems that sample where data says, determinants and transforms."""

from __future__ import annotations

from functools import reduce
from itertools import product
from math import prod

import numpy as np

from onnx_fuse.program.call import dtype_of
from onnx_fuse.program.data_movement import DeformColumns, Determinant, Fourier, NmsChosen, RoiAlign
from onnx_fuse.program.interpret.data_movement import Results
from onnx_fuse.program.interpret.memory import CallOperands


@np.errstate(invalid="ignore")
def roi_align(p: RoiAlign, of: CallOperands) -> Results:
    """The mean of a bin's samples, or their largest weighted pixel; NaN of an infinite box."""
    channels, height, width = p.image
    rows, columns = p.bins
    x = of.shaped("x", p.batch, channels, height, width)
    index, shift = of["index"].reshape(-1), 0.5 if p.half_pixel else 0.0
    y = np.zeros((len(index), channels, rows, columns))
    for r, roi in enumerate(of.shaped("rois", -1, 4) * p.scale - shift):
        if not np.isfinite(roi).all():
            y[r] = np.nan
            continue
        if not 0 <= index[r] < p.batch:
            continue
        sides = roi[2:] - roi[:2] if p.half_pixel else np.maximum(roi[2:] - roi[:2], 1)
        step_x, step_y = sides / (columns, rows)
        grid_y, grid_x = (p.samples or int(np.ceil(step)) for step in (step_y, step_x))
        for i, j in product(range(rows), range(columns)):
            parts = [
                _pixels(
                    x[index[r]],
                    roi[1] + i * step_y + (a + 0.5) * step_y / grid_y,
                    roi[0] + j * step_x + (b + 0.5) * step_x / grid_x,
                )
                for a, b in product(range(grid_y), range(grid_x))
            ]
            if parts and p.maximum:
                y[r, :, i, j] = reduce(_larger, [reduce(_larger, part) for part in parts])
            elif parts:
                y[r, :, i, j] = np.sum([part.sum(0) for part in parts], 0) / len(parts)
    return {"y": y}


def _larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """C++'s std::max, which is its first operand where one is NaN."""
    return np.where(a < b, b, a)


def _pixels(image: np.ndarray, v: float, u: float) -> np.ndarray:
    """Four weighted pixels [4, channels] around a place; outside, the first one times 0."""
    _, height, width = image.shape
    if not (-1 <= v <= height and -1 <= u <= width):
        return 0 * np.stack([image[:, 0, 0]] * 4)
    v, u = (min(max(at, 0.0), n - 1.0) for at, n in ((v, height), (u, width)))
    top, left = int(v), int(u)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    dy, dx = v - top, u - left
    return np.stack([
        (1 - dy) * (1 - dx) * image[:, top, left], (1 - dy) * dx * image[:, top, right],
        dy * (1 - dx) * image[:, bottom, left], dy * dx * image[:, bottom, right],
    ])  # fmt: skip


def deform_columns(p: DeformColumns, of: CallOperands) -> Results:
    """What the moved taps read, interpolated, times the mask."""
    (height, width), window = p.image, p.window
    kernel, pixels = window.kernel[1:], prod(p.outer)
    count, each = prod(kernel), p.channels // p.shifts
    batch = p.size // (p.shifts * count * pixels)
    x = of.shaped("x", batch, p.shifts, each, height * width)
    offset = of.shaped("offset", batch, p.shifts, count, 2, pixels)
    mask = of.shaped("mask", batch, p.shifts, count, pixels) if "mask" in of else None
    columns = np.zeros((batch, p.shifts, each, count, pixels))
    place = np.stack(np.unravel_index(np.arange(pixels), p.outer))
    for t, tap in enumerate(product(*map(range, kernel))):
        v, u = (
            place[i] * window.strides[i + 1] - window.before[i + 1]
            + tap[i] * window.dilations[i + 1] + offset[:, :, t, i]
            for i in range(2)
        )  # fmt: skip
        inside = (v > -1) & (v < height) & (u > -1) & (u < width)
        top, left = (np.floor(np.where(inside, at, 0)).astype(np.int64) for at in (v, u))
        dy, dx = v - top, u - left
        for i, j in product(range(2), range(2)):
            a, b = top + i, left + j
            there = inside & (a >= 0) & (a < height) & (b >= 0) & (b < width)
            weight = (dy if i else 1 - dy) * (dx if j else 1 - dx)
            at = np.where(there, a * width + b, 0)[:, :, None]
            corner = np.take_along_axis(x, np.broadcast_to(at, columns[..., t, :].shape), 3)
            columns[..., t, :] += np.where(there[:, :, None], weight[:, :, None] * corner, 0)
        if mask is not None:
            columns[..., t, :] *= mask[:, :, None, t]
    return {"columns": columns}


def nms_chosen(p: NmsChosen, of: CallOperands) -> Results:
    """The boxes that greedy suppression keeps, best first, and how many."""
    boxes = of.raw("boxes").reshape(-1, p.count, 4).astype(np.float32)
    scores = of.raw("scores").reshape(p.lines, p.count)
    limit, iou, least = (of[n].reshape(-1)[0] if n in of else 0 for n in ("most", "iou", "least"))
    if p.center:
        half = boxes[..., 2:] / np.float32(2)
        low, high = boxes[..., :2] - half, boxes[..., :2] + half
    else:
        low = np.minimum(boxes[..., :2], boxes[..., 2:])
        high = np.maximum(boxes[..., :2], boxes[..., 2:])
    chosen, counts = np.zeros((p.lines, p.count), np.int64), np.zeros(p.lines, np.int64)
    left = np.zeros((p.lines, p.count), bool)
    for line, score in enumerate(scores):
        image, alive = line // p.classes, left[line]
        alive[:] = ~np.isnan(score) & ((score > least) | ("least" not in of))
        while counts[line] < min(limit, p.count) and alive.any():
            best = int(np.argmax(np.where(alive, score, -np.inf)))
            best = best if alive[best] else int(np.argmax(alive))
            chosen[line, counts[line]] = best
            counts[line] += 1
            alive &= ~_overlaps(low[image], high[image], best, iou)
            alive[best] = False
    return {"chosen": chosen, "found": counts, "left": left}


def _overlaps(low: np.ndarray, high: np.ndarray, best: int, limit: float) -> np.ndarray:
    """Whether each box and the best one share more than `limit` of their union."""
    sides = np.minimum(high, high[best]) - np.maximum(low, low[best])
    areas = (high - low).prod(-1)
    both = sides.prod(-1)
    union = areas + areas[best] - both
    with np.errstate(all="ignore"):
        over = both / union > limit
    return (sides > 0).all(-1) & (areas > 0) & (areas[best] > 0) & (union > 0) & over


def determinant(p: Determinant, of: CallOperands) -> Results:
    """The determinants of matrices."""
    x = of.shaped("x", p.count, p.n, p.n)
    return {"y": np.linalg.det(x)}


def fourier(p: Fourier, of: CallOperands) -> Results:
    """Fourier transforms of the frames along an axis."""
    x = of.shaped("x", p.outer, p.length, p.inner, p.parts)
    x = np.stack([x[:, f * p.step :][:, : p.taken] for f in range(p.frames)], 1)
    if p.window:
        x = x * of["window"][: p.taken, None, None]
        x = x.astype(dtype_of(p.dtype)).astype(np.float64)
    z = x[..., 0] + (1j * x[..., 1] if p.parts == 2 else 0)
    if p.half:
        j = np.arange(p.taken)[:, None]
        z *= np.where((j == 0) | (2 * j == p.points), 1, 2)
    y = (np.fft.ifft if p.inverse else np.fft.fft)(z, p.points, axis=2)[:, :, : p.results]
    return {"y": y.real if p.half else np.stack([y.real, y.imag], -1)}

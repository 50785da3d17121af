"""Det: determinants of square matrices; Fourier: what DFT and STFT are made of."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.context import Context, Lowering, floats
from onnx_fuse.program.data_movement import Determinant, Fourier


def det(ctx: Context, node: ir.Node) -> None:
    """y [...] = det(x [..., n, n])."""
    x = floats(ctx.dense(node, 0))
    if len(x.shape) < 2 or x.shape[-1] != x.shape[-2]:
        raise ValueError("only square matrices have a determinant")
    y = ctx.output(node, 0, x.shape[:-2], x.dtype)
    problem = Determinant(y.size, x.shape[-1], x.dtype)
    ctx.select(node, problem, {"x": x}, {"y": y})


def fourier(ctx: Context, node: ir.Node) -> None:
    """The transform of `points` points along `axis` of x [..., 1 or 2], as DFT has it.

    With `frames`, those that begin `step` apart, each times the window, and an axis of them more.
    """
    x = floats(ctx.dense(node, 0))
    axis, points, frames = (ctx.attr(node, name) for name in ("axis", "points", "frames"))
    inverse, onesided = bool(ctx.attr(node, "inverse")), bool(ctx.attr(node, "onesided"))
    before, inner, parts = x.shape[:axis], x.shape[axis + 1 : -1], x.shape[-1]
    length, most = x.shape[axis], points // 2 + 1 if inverse and onesided else points
    problem = Fourier(
        prod(before), frames or 1, ctx.attr(node, "step"), length, prod(inner), parts, points,
        most if length >= most else length, x.dtype, inverse, onesided, ctx.has(node, 1),
    )  # fmt: skip
    shape = (*before, *([frames] if frames else []), problem.results, *inner)
    y = ctx.output(node, 0, (*shape, 1 if problem.half else 2), x.dtype)
    angle = 2 * np.pi / points * np.arange(points) * (1 if inverse else -1)
    reads = {"x": x, "table": ctx.constant(np.stack([np.cos(angle), np.sin(angle)], -1))}
    if problem.window:
        reads["window"] = ctx.dense(node, 1)
        if reads["window"].shape != (points,):
            raise ValueError("a window has an element for each of a frame")
    ctx.select(node, problem, reads, {"y": y})


LOWERINGS: dict[tuple[str, str], Lowering] = {("", "Det"): det, (FUSE, "Fourier"): fourier}

"""RoiAlign and DeformConv, which sample at positions given by data; non-maximum suppression."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.macros import FLOATS
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.context import Context, Lowering, Unserved, apply, copy
from onnx_fuse.lower.conv import window
from onnx_fuse.lower.linear import product
from onnx_fuse.program.call import dtype_of
from onnx_fuse.program.data_movement import DeformColumns, NmsChosen, RoiAlign


def roi_align(ctx: Context, node: ir.Node) -> None:
    """RoiAlign: bins of regions of interest, averaged or their maximum."""
    x, rois, index = (ctx.dense(node, i) for i in range(3))
    if x.dtype not in FLOATS or rois.dtype != x.dtype or len(x.shape) != 4:
        raise Unserved("no-kernel", what=f"{x.dtype} of rank {len(x.shape)}")
    y = ctx.output(node, 0)
    if not x.size:  # onnxruntime and the kernel would read pixels that are not there
        copy(ctx, node, ctx.constant(np.zeros((), dtype_of(x.dtype))), y)
        return
    # before opset 16 there was no shift by half a pixel, and loading says so with an attribute
    half = ctx.attr(node, "coordinate_transformation_mode", "half_pixel") == "half_pixel"
    problem = RoiAlign(
        y.size, x.shape[0], x.shape[1:], y.shape[2:], x.dtype, index.dtype,  # type: ignore[arg-type]
        ctx.attr(node, "sampling_ratio", 0), ctx.attr(node, "spatial_scale", 1.0),
        ctx.attr(node, "mode", "avg") == "max", half,
    )  # fmt: skip
    ctx.select(node, problem, {"x": x, "rois": rois, "index": index}, {"y": y})


def deform_conv(ctx: Context, node: ir.Node) -> None:
    """DeformConv: the moved taps of every place as columns, then a product with the weights."""
    x, w, offset = (ctx.dense(node, i) for i in range(3))
    if x.dtype not in FLOATS or len(x.shape) != 4:
        raise Unserved("no-kernel", what=f"{x.dtype} in {len(x.shape) - 2} axes")
    groups, shifts = ctx.attr(node, "group", 1), ctx.attr(node, "offset_group", 1)
    batch, channels, *image = x.shape
    outer, taps = offset.shape[2:], prod(w.shape[2:])
    y = ctx.output(node, 0, (batch, w.shape[0], *outer), x.dtype)
    if not y.size:
        return
    fits = offset.shape[1] == shifts * taps * 2 and w.shape[1] * groups == channels
    if not fits or channels % shifts or w.shape[0] % groups:
        raise ValueError("its offsets, groups and channels do not fit together")
    pixels = prod(outer)
    columns = ctx.scratch(x.dtype, (batch, groups, channels // groups * taps, pixels))
    mask = ctx.dense(node, 4) if ctx.has(node, 4) else None
    size = batch * shifts * taps * pixels
    frame = window(ctx, node, w.shape[2:], image, outer)
    problem = DeformColumns(size, channels, shifts, tuple(image), tuple(outer), frame, x.dtype)
    reads = {"x": x, "offset": offset} | ({"mask": mask} if mask is not None else {})
    ctx.select(node, problem, reads, {"columns": columns})
    filters = w.view((groups, w.shape[0] // groups, w.shape[1] * taps))
    biased = ctx.has(node, 3)
    unbiased = ctx.scratch(y.dtype, y.shape) if biased else y
    rows = unbiased.view((batch, groups, w.shape[0] // groups, pixels))
    product(ctx, node, filters.expand((batch, *filters.shape)), columns, rows)
    if biased:
        apply(ctx, node, y, "Add", unbiased, ctx.view(node, 3).view((w.shape[0], 1, 1)))


def nms_chosen(ctx: Context, node: ir.Node) -> None:
    """(int64 [batch, classes, boxes]: kept boxes, best first; int64 [batch, classes]: how many).

    The inputs and attributes are NonMaxSuppression's, which is this and the choice of what counts.
    """
    boxes, scores = ctx.dense(node, 0), ctx.dense(node, 1)
    if boxes.dtype != "float32" or scores.dtype != "float32":
        raise Unserved("no-kernel", what=boxes.dtype)
    batch, classes, count = scores.shape
    reads = {"boxes": boxes, "scores": scores}
    limits = enumerate(("most", "iou", "least"), 2)
    reads |= {name: ctx.dense(node, i) for i, name in limits if ctx.has(node, i)}
    writes = {
        "left": ctx.scratch("bool", scores.shape),
        "chosen": ctx.output(node, 0, scores.shape, "int64"),
        "found": ctx.output(node, 1, (batch, classes), "int64"),
    }
    problem = NmsChosen(batch * classes, classes, count, ctx.attr(node, "center_point_box", 0))
    ctx.select(node, problem, reads, writes)


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "RoiAlign"): roi_align,
    ("", "DeformConv"): deform_conv,
    (FUSE, "NmsChosen"): nms_chosen,
}

"""LinearCrossEntropy: scores, losses and gradients of one chunk of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from onnx_fuse.kernels import serves
from onnx_fuse.lower.context import Context, Lowering, copy
from onnx_fuse.lower.linear import bias_row, product
from onnx_fuse.lower.reduce import reduction
from onnx_fuse.onnx.common import FUSE
from onnx_fuse.onnx.names import FusedName
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.problem import ITEMSIZE, Problem
from onnx_fuse.program.problems import CrossEntropyChunk
from onnx_fuse.program.size import coarse

CHUNK_BYTES = 416 << 20
"""The bytes of a chunk of scores. The gradient of the weights is read and written once a chunk, and
4096 rows give each multiprocessor a tile of the gradient of x of width 768."""
ROWS, COLUMNS = 256, 64
"""A chunk's rows, and the elements between two of its rows, are multiples of these."""


def chunk_rows(rows: int, stride: int, dtype: str) -> int:
    """The number of rows of each chunk but the last: about equal ones, of CHUNK_BYTES at most."""
    most = max(ROWS, CHUNK_BYTES // (stride * ITEMSIZE[dtype]) // ROWS * ROWS)
    count = 1
    while coarse(rows) > count * most:  # which leaves open rows open
        count += 1
    return -(-rows // (count * ROWS)) * ROWS


@dataclass(frozen=True)
class _Chunks:
    """One node's operands, and what is done for the rows `start` to `end` of x.

    `z` [rows, stride] holds the scores of a chunk, and then d loss / d scores in their place.
    """

    ctx: Context
    node: ir.Node
    x: Tensor
    w: Tensor
    z: Tensor
    row: Tensor | None
    classes: int

    def _z(self, start: int, end: int) -> Tensor:
        return replace(self.z, shape=(end - start, self.classes))

    def scores(self, start: int, end: int) -> str | None:
        """z = x · Wᵀ + c; of as many columns as `w` has rows, the last ones of any number."""
        columns, stride = self.w.shape[0], self.z.shape[1]
        attrs: dict[str, object] = {} if self.row is None else {"bias": True}
        attrs |= {"ldy": stride} if stride != columns else {}
        extra = {} if self.row is None else {"col1": self.row}
        x, z = rows_of(self.x, start, end), replace(self.z, shape=(end - start, columns))
        return product(self.ctx, self.node, x, self.w.permute((1, 0)), z, extra, attrs=attrs)

    def losses(self, start: int, end: int, to: Tensor, *, gradient: bool) -> str | None:
        """Make each row's loss and weight and, with `gradient`, z's gradient in its place."""
        ctx, node = self.ctx, self.node
        labels, weight = ctx.dense(node, 3), ctx.dense(node, 4)
        problem = CrossEntropyChunk(
            end - start, self.classes, self.z.shape[1], self.z.dtype, labels.dtype,
            weight.dtype, int(ctx.attr(node, "ignore_index", -100)),
            float(ctx.attr(node, "label_smoothing", 0.0)), gradient,
        )  # fmt: skip
        z = self._z(start, end)
        reads = {"x": z, "target": rows_of(labels, start, end)}
        reads |= {"weight": weight} if weight.shape else {}
        writes = {"rows": rows_of(to, start, end)} | ({"dx": z} if gradient else {})
        return ctx.select(node, problem, reads, writes)

    def of_x(self, start: int, end: int, gx: Tensor) -> str | None:
        """gx = g · W for these rows."""
        y = rows_of(gx, start, end)
        w = rows_of(self.w, 0, self.classes)
        return product(self.ctx, self.node, self._z(start, end), w, y)

    def of_w(self, start: int, end: int, gw: Tensor) -> str | None:
        """gw += gᵀ · x, in float32; what is contiguous in W is so in gw."""
        g, x = self._z(start, end), rows_of(self.x, start, end)
        attrs: dict[str, object] = {"accumulate": True} if start else {}
        if gw.dense:
            return product(self.ctx, self.node, g.permute((1, 0)), x, gw, attrs=attrs)
        turned = gw.permute((1, 0))
        return product(self.ctx, self.node, x.permute((1, 0)), g, turned, attrs=attrs)


def rows_of(t: Tensor, start: int, end: int) -> Tensor:
    """The rows `start` to `end`."""
    return t.part(0, start, end - start)


def linear_cross_entropy(ctx: Context, node: ir.Node) -> str | None:
    """The sums of the losses and of their weights; what exposes gx, gw and gb also makes these."""
    x, w, labels = ctx.view(node, 0), ctx.view(node, 1), ctx.dense(node, 3)
    (m, k), classes = x.shape, w.shape[0]
    if x.dtype not in ("float32", "float16", "bfloat16") or w.dtype != x.dtype:
        return f"no kernel for {x.dtype} and {w.dtype}"
    if labels.dtype not in ("int32", "int64") or 0 in (m, k, classes):
        return f"labels of {labels.dtype}, or no row"
    exposed = FusedName.of(node.op_type).exposed
    wanted = [bool(exposed) and ctx.wants(node, i) for i in (2, 3, 4)]
    weight = ctx.host(node, 4)
    if not ctx.view(node, 4).shape and (weight is None or weight != 1):
        return "its weight is one number other than 1"
    biased = len(ctx.view(node, 2).shape) == 1
    row = bias_row(ctx, node, 2, classes) if biased else None
    if row is None and not is_zero(ctx, node):
        return "its bias is a number that is not known beforehand"
    stride = -(-classes // COLUMNS) * COLUMNS
    rows = chunk_rows(m, stride, x.dtype)
    if stride != classes and not _leaves_gaps(ctx, x, w, rows, stride):
        # the columns between two rows are of further rows of the weight
        row = None if row is None else _longer(ctx, node, row, stride)
        w = _longer(ctx, node, w, stride)
    chunks = _Chunks(ctx, node, x, w, ctx.scratch(x.dtype, (rows, stride)), row, classes)
    starts = [0]
    while starts[-1] + rows < m:
        starts.append(starts[-1] + rows)
    losses = ctx.scratch("float32", (m, 2))
    gx = ctx.output(node, 2, (m, k), x.dtype) if wanted[0] else None
    gw = None
    if wanted[1] and w.dense:
        gw = ctx.output(node, 3, (classes, k), "float32")
    elif wanted[1]:
        gw = ctx.scratch("float32", (k, classes)).permute((1, 0))
        ctx.alias(node, 3, gw)
    sums = ctx.scratch("float32", (len(starts), stride)) if wanted[2] else None
    for i, (start, end) in enumerate(zip(starts, [*starts[1:], m], strict=True)):
        why = chunks.scores(start, end)
        why = why or chunks.losses(start, end, losses, gradient=any(wanted))
        if gx is not None:
            why = why or chunks.of_x(start, end, gx)
        if gw is not None:
            why = why or chunks.of_w(start, end, gw)
        if why is not None:
            return why
        if sums is not None:  # the columns between two rows are zeros
            g = replace(chunks.z, shape=(end - start, stride))
            reduction(ctx, node, g, rows_of(sums, i, i + 1), "Sum", [0])
    if sums is not None:
        gb = ctx.scratch("float32", (stride,))
        reduction(ctx, node, sums, gb, "Sum", [0])
        ctx.alias(node, 4, gb.first((classes,)))
    both = ctx.scratch("float32", (2,))
    reduction(ctx, node, losses, both, "Sum", [0])
    for i in range(2):
        ctx.alias(node, i, replace(both, shape=(), strides=(), offset=i))
    return None


def _leaves_gaps(ctx: Context, x: Tensor, w: Tensor, rows: int, stride: int) -> bool:
    """Whether a kernel reads `w` as it is and stores the scores in rows `stride` elements apart."""
    line = max(w.strides)
    problem = Problem.of(
        "Gemm", m=rows, n=w.shape[0], k=x.shape[1], dtype=x.dtype, trans_b=w.dense,
        lda=x.strides[0], ldb=line, ldy=stride, math=ctx.math,
    )  # fmt: skip
    return serves("Gemm", problem, ctx.hw, ctx.prefs)


def _longer(ctx: Context, node: ir.Node, t: Tensor, rows: int) -> Tensor:
    """A copy with more rows, whose contents are undefined, in the memory order of `t`."""
    shape = (rows, *t.shape[1:])
    made = ctx.scratch(t.dtype, shape if t.dense else shape[::-1])
    made = made if t.dense else made.permute((1, 0))
    copy(ctx, node, t, rows_of(made, 0, t.shape[0]))
    return made


def is_zero(ctx: Context, node: ir.Node) -> bool:
    """Whether the bias is the scalar zero that stands for a missing bias."""
    value = ctx.host(node, 2)
    return value is not None and not value.any()


LOWERINGS: dict[tuple[str, str], Lowering] = {
    (FUSE, "LinearCrossEntropy"): linear_cross_entropy,
}

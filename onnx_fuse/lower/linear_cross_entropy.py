"""LinearCrossEntropy: scores, losses and gradients of one chunk of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx_ir as ir

from onnx_fuse.ir.build import required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.kernels import forced
from onnx_fuse.kernels.costs import Passes, pays
from onnx_fuse.lower.context import Context, Lowering, Unserved, copy
from onnx_fuse.lower.linear import bias_row, product
from onnx_fuse.lower.matrices import alignment
from onnx_fuse.lower.reduce import reduction
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.epilogue import EXP_COLUMNS
from onnx_fuse.program.losses import CrossEntropyChunk, ExpRows, LabelScore
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem
from onnx_fuse.program.size import coarse

CHUNK_BYTES = 416 << 20
"""The bytes of a chunk of scores. The gradient of the weights is read and written once a chunk, and
4096 rows give each multiprocessor a tile of the gradient of x of width 768."""
ROWS, COLUMNS = 256, 64
"""A chunk's rows, and the elements between two of its rows, are multiples of these."""


Fields = dict[str, object]
"""Fields of a problem or of its epilogue, by name."""
Operands = dict[str, Tensor]
"""What a call reads or writes, by name."""


def chunk_rows(rows: int, stride: int, dtype: str) -> int:
    """The number of rows of each chunk but the last: about equal ones, of CHUNK_BYTES at most."""
    most = max(ROWS, CHUNK_BYTES // (stride * ITEMSIZE[dtype]) // ROWS * ROWS)
    count = 1
    while coarse(rows) > count * most:  # which leaves open rows open
        count += 1
    return -(-rows // (count * ROWS)) * ROWS


@dataclass(frozen=True)
class _LossChunks:
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

    def _beside_scores(self, start: int, end: int) -> tuple[Fields, Operands, Operands]:
        """The epilogue of the scores' product, what that reads and what it writes."""
        return ({}, {}, {}) if self.row is None else ({"bias": True}, {"col1": self.row}, {})

    def scores(self, start: int, end: int) -> None:
        """z = x · Wᵀ + c; of as many columns as `w` has rows, the last ones of any number."""
        columns, stride = self.w.shape[0], self.z.shape[1]
        attrs, extra, writes = self._beside_scores(start, end)
        attrs |= {"ldy": stride} if stride != columns else {}
        x, z = rows_of(self.x, start, end), replace(self.z, shape=(end - start, columns))
        w = self.w.permute((1, 0))
        product(self.ctx, self.node, x, w, z, extra, writes, attrs)

    def losses(self, start: int, end: int, to: Tensor, *, gradient: bool) -> None:
        """Make each row's loss and weight and, with `gradient`, z's gradient in its place."""
        ctx, node = self.ctx, self.node
        labels, weight = ctx.dense(node, 3), ctx.dense(node, 4)
        problem = chunk_problem(ctx, node, end - start, self.classes, self.z.shape[1], gradient)
        z = self._z(start, end)
        reads = {"x": z, "target": rows_of(labels, start, end)}
        reads |= {"weight": weight} if weight.shape else {}
        writes = {"rows": rows_of(to, start, end)} | ({"dx": z} if gradient else {})
        ctx.select(node, problem, reads, writes)

    def _beside_gx(self, rows: int) -> tuple[Fields, Operands]:
        """The epilogue of the product for gx, and what that reads."""
        return {}, {}

    def of_x(self, start: int, end: int, gx: Tensor) -> None:
        """gx = g · W for these rows."""
        attrs, extra = self._beside_gx(end - start)
        y, w = rows_of(gx, start, end), rows_of(self.w, 0, self.classes)
        product(self.ctx, self.node, self._z(start, end), w, y, extra, attrs=attrs)

    def factor(self, start: int, end: int) -> Tensor:
        """What the transposed gradient of these rows of z is multiplied by."""
        return rows_of(self.x, start, end)

    def of_w(self, start: int, end: int, gw: Tensor) -> None:
        """gw += gᵀ · x, in float32; what is contiguous in W is so in gw."""
        g, x = self._z(start, end), self.factor(start, end)
        attrs: dict[str, object] = {"accumulate": True} if start else {}
        if gw.dense:
            return product(self.ctx, self.node, g.permute((1, 0)), x, gw, attrs=attrs)
        turned = gw.permute((1, 0))
        product(self.ctx, self.node, x.permute((1, 0)), g, turned, attrs=attrs)

    def _whole(self, rows: int) -> Tensor:
        """z with the columns between two rows, which are zeros."""
        return replace(self.z, shape=(rows, self.z.shape[1]))

    def of_bias(self, start: int, end: int, to: Tensor) -> None:
        """The sums of g's columns for these rows, to [1, stride]."""
        reduction(self.ctx, self.node, self._whole(end - start), to, "Sum", [0])


@dataclass(frozen=True)
class _Exponentials(_LossChunks):
    """The same, where the product of the scores takes their exponentials (loss/exp_rows.cu).

    `z` then holds d loss / d scores but for a factor of each row, `scale` [rows], which the product
    for gx multiplies by, and the rows of x for that of gw: `scaled` [rows, K]; `narrow` is `scale`
    in x's type, for the gradient of the bias. The exponentials are
    of what a score has more than the row's `reference` [M]; `part` takes sums of them.
    """

    reference: Tensor
    part: Tensor
    scale: Tensor
    scaled: Tensor | None
    narrow: Tensor | None

    def _beside_scores(self, start: int, end: int) -> tuple[Fields, Operands, Operands]:
        attrs, extra, _ = super()._beside_scores(start, end)
        extra |= {"row0": rows_of(self.reference, start, end)}
        return {"exp": True, **attrs}, extra, {"part": self._part(end - start)}

    def _part(self, rows: int) -> Tensor:
        return replace(self.part, shape=(self.part.shape[0], rows), strides=(rows, 1))

    def losses(self, start: int, end: int, to: Tensor, *, gradient: bool) -> None:
        """Make each row's loss, weight and factor, and z's gradient but for that."""
        ctx, node, z = self.ctx, self.node, self._z(start, end)
        weight, reads = ctx.dense(node, 4), label_operands(self, start, end)
        reads |= {"e": z, "part": self._part(end - start)}
        reads |= {"weight": weight} if weight.shape else {}
        writes = {"rows": rows_of(to, start, end), "scale": rows_of(self.scale, 0, end - start)}
        writes |= {"e": z}
        if self.scaled is not None:
            writes["scaled"] = rows_of(self.scaled, 0, end - start)
        if self.narrow is not None:
            writes["narrow"] = rows_of(required(self.narrow), 0, end - start)
        problem = rows_problem(self, end - start, scaled=self.scaled is not None)
        ctx.select(node, problem, reads, writes)

    def _beside_gx(self, rows: int) -> tuple[Fields, Operands]:
        return {"row_scale": True}, {"row0": rows_of(self.scale, 0, rows)}

    def factor(self, start: int, end: int) -> Tensor:
        """scale x."""
        return rows_of(required(self.scaled), 0, end - start)

    def of_bias(self, start: int, end: int, to: Tensor) -> None:
        """The same, each row times its factor."""
        g, problem = self._whole(end - start), bias_problem(self, end - start)
        scale = rows_of(required(self.narrow), 0, end - start).view((end - start, 1))
        reads = {"a": g.permute((1, 0)), "b": scale}
        self.ctx.select(self.node, problem, reads, {"y": to.permute((1, 0))})


def label_operands(chunks: _Exponentials, start: int, end: int) -> Operands:
    """The operands by which the score of a row's label is made anew."""
    reads = {"x": rows_of(chunks.x, start, end), "w": chunks.w}
    reads |= {} if chunks.row is None else {"bias": chunks.row}
    return reads | {"target": rows_of(chunks.ctx.dense(chunks.node, 3), start, end)}


def ignored(ctx: Context, node: ir.Node) -> int:
    """The label whose rows count nothing."""
    return int(ctx.attr(node, "ignore_index", -100))


def chunk_problem(
    ctx: Context, node: ir.Node, rows: int, classes: int, stride: int, gradient: bool
) -> CrossEntropyChunk:
    """The pass over the scores of so many rows."""
    x, labels, weight = (ctx.view(node, i) for i in (0, 3, 4))
    return CrossEntropyChunk(
        rows, classes, stride, x.dtype, labels.dtype, weight.dtype, ignored(ctx, node),
        float(ctx.attr(node, "label_smoothing", 0.0)), gradient
    )  # fmt: skip


def rows_problem(chunks: _LossChunks, rows: int, *, scaled: bool) -> ExpRows:
    """What is left to do for so many rows of exponentials."""
    ctx, node, x, w = chunks.ctx, chunks.node, chunks.x, chunks.w
    labels, weight = ctx.view(node, 3), ctx.view(node, 4)
    return ExpRows(
        rows, x.shape[1], chunks.classes, chunks.z.shape[1], -(-chunks.classes // EXP_COLUMNS),
        x.strides[0], max(w.strides), x.dtype, labels.dtype, weight.dtype, ignored(ctx, node),
        w.strides[1] != 1, scaled
    )  # fmt: skip


def bias_problem(chunks: _LossChunks, rows: int) -> GemmProblem:
    """The product of so many rows of z, transposed, and their factors: the bias's gradient."""
    most, stride = chunks.z.shape
    return GemmProblem.of(
        "Gemm", m=stride, n=1, k=rows, dtype=chunks.x.dtype, out_dtype="float32", trans_a=True,
        trans_b=True, lda=stride, ldb=most
    )  # fmt: skip


def exponentials(chunks: _LossChunks, of_x: bool, of_w: bool, of_bias: bool) -> _LossChunks:
    """`chunks`, or their kind whose products take exponentials where that costs less.

    There is no pass over the scores then, whose bytes take a tenth of the head's time; but only in
    bfloat16, which has room for exponentials of whatever size, and without a smoothed loss. Who
    forces a kernel of CrossEntropyChunk gets that pass.
    """
    ctx, node, x, w, z = chunks.ctx, chunks.node, chunks.x, chunks.w, chunks.z
    (rows, stride), k, classes, hw = z.shape, x.shape[1], chunks.classes, ctx.hw
    line, turned = max(w.strides), w.strides[1] != 1
    whole = x.strides[0] >= k and line >= (classes if turned else k)
    if x.strides[1] != 1 or 1 not in w.strides or not whole or alignment(x, w) != 16:
        return chunks
    if ctx.attr(node, "label_smoothing", 0.0) or "CrossEntropyChunk" in forced(ctx.prefs):
        return chunks
    scores = GemmProblem.of(
        "Gemm", m=rows, n=classes, k=k, dtype=x.dtype, trans_b=not turned, lda=x.strides[0],
        ldb=line, ldy=stride if stride != classes else 0, bias=chunks.row is not None
    )  # fmt: skip
    gx = GemmProblem.of("Gemm", m=rows, n=k, k=classes, dtype=x.dtype, trans_b=turned, lda=stride,
                    ldb=line)  # fmt: skip
    label = LabelScore(
        x.shape[0], k, classes, x.strides[0], line, x.dtype, ctx.view(node, 3).dtype,
        ignored(ctx, node), turned
    )  # fmt: skip
    rest = rows_problem(chunks, rows, scaled=of_w)
    before = [scores, chunk_problem(ctx, node, rows, classes, stride, True), *([gx] * of_x)]
    after = [scores.replace(exp=True), replace(label, rows=rows), rest,
             *([gx.replace(row_scale=True)] * of_x)]  # fmt: skip
    if of_bias:
        before.append(Passes(rows * stride * ITEMSIZE[x.dtype]))
        after.append(bias_problem(chunks, rows))
    if not pays(before, after, hw, ctx.prefs):
        return chunks
    reference = ctx.scratch("float32", (x.shape[0],))
    row = None if chunks.row is None else rows_of(chunks.row, 0, classes)
    chunked = _Exponentials(
        ctx, node, x, rows_of(w, 0, classes), z, row, classes, reference,
        ctx.scratch("float32", (rest.parts, rows)), ctx.scratch("float32", (rows,)),
        ctx.scratch(x.dtype, (rows, k)) if of_w else None,
        ctx.scratch(x.dtype, (rows,)) if of_bias else None
    )  # fmt: skip
    ctx.select(node, label, label_operands(chunked, 0, x.shape[0]), {"to": reference})
    return chunked


def rows_of(t: Tensor, start: int, end: int) -> Tensor:
    """The rows `start` to `end`."""
    return t.part(0, start, end - start)


def linear_cross_entropy(ctx: Context, node: ir.Node) -> None:
    """The sums of the losses and of their weights; what exposes gx, gw and gb also makes these."""
    x, w, labels = ctx.view(node, 0), ctx.view(node, 1), ctx.dense(node, 3)
    (m, k), classes = x.shape, w.shape[0]
    if x.dtype not in ("float32", "float16", "bfloat16") or w.dtype != x.dtype:
        raise Unserved("no-kernel", what=f"{x.dtype} and {w.dtype}")
    if labels.dtype not in ("int32", "int64") or 0 in (m, k, classes):
        raise Unserved("no-kernel", what=f"labels of {labels.dtype}, or no row")
    exposed = FusedName.of(node.op_type).exposed
    gradients = [bool(exposed) and ctx.wants(node, i) for i in (2, 3, 4)]
    weight = ctx.host(node, 4)
    if not ctx.view(node, 4).shape and (weight is None or weight != 1):
        raise Unserved("no-kernel", what="a weight of one number other than 1")
    biased = len(ctx.view(node, 2).shape) == 1
    row = bias_row(ctx, node, 2, classes) if biased else None
    if row is None and not is_zero(ctx, node):
        raise Unserved("no-kernel", what="a bias of one unknown number")
    stride = -(-classes // COLUMNS) * COLUMNS
    rows = chunk_rows(m, stride, x.dtype)
    if stride != classes and not _leaves_gaps(ctx, x, w, rows, stride):
        # the columns between two rows are of further rows of the weight
        row = None if row is None else _longer(ctx, node, row, stride)
        w = _longer(ctx, node, w, stride)
    chunks = _LossChunks(ctx, node, x, w, ctx.scratch(x.dtype, (rows, stride)), row, classes)
    if any(gradients):
        chunks = exponentials(chunks, *gradients)
    starts = [0]
    while starts[-1] + rows < m:
        starts.append(starts[-1] + rows)
    losses = ctx.scratch("float32", (m, 2))
    gx = ctx.output(node, 2, (m, k), x.dtype) if gradients[0] else None
    gw = None
    if gradients[1] and w.dense:
        gw = ctx.output(node, 3, (classes, k), "float32")
    elif gradients[1]:
        gw = ctx.scratch("float32", (k, classes)).permute((1, 0))
        ctx.alias(node, 3, gw)
    sums = ctx.scratch("float32", (len(starts), stride)) if gradients[2] else None
    for i, (start, end) in enumerate(zip(starts, [*starts[1:], m], strict=True)):
        chunks.scores(start, end)
        chunks.losses(start, end, losses, gradient=any(gradients))
        if gx is not None:
            chunks.of_x(start, end, gx)
        if gw is not None:
            chunks.of_w(start, end, gw)
        if sums is not None:
            chunks.of_bias(start, end, rows_of(sums, i, i + 1))
    if sums is not None:
        gb = ctx.scratch("float32", (stride,))
        reduction(ctx, node, sums, gb, "Sum", [0])
        ctx.alias(node, 4, gb.first((classes,)))
    both = ctx.scratch("float32", (2,))
    reduction(ctx, node, losses, both, "Sum", [0])
    for i in range(2):
        ctx.alias(node, i, replace(both, shape=(), strides=(), offset=i))


def _leaves_gaps(ctx: Context, x: Tensor, w: Tensor, rows: int, stride: int) -> bool:
    """Whether a kernel reads `w` as it is and stores the scores in rows `stride` elements apart."""
    line = max(w.strides)
    problem = GemmProblem.of(
        "Gemm", m=rows, n=w.shape[0], k=x.shape[1], dtype=x.dtype, trans_b=w.dense,
        lda=x.strides[0], ldb=line, ldy=stride, math=ctx.math
    )  # fmt: skip
    return ctx.serves(problem)


def _longer(ctx: Context, node: ir.Node, t: Tensor, rows: int) -> Tensor:
    """A copy with more rows, whose contents are undefined, in the memory order of `t`."""
    shape = (rows, *t.shape[1:])
    longer = ctx.scratch(t.dtype, shape if t.dense else shape[::-1])
    longer = longer if t.dense else longer.permute((1, 0))
    copy(ctx, node, t, rows_of(longer, 0, t.shape[0]))
    return longer


def is_zero(ctx: Context, node: ir.Node) -> bool:
    """Whether the bias is the scalar zero that stands for a missing bias."""
    value = ctx.host(node, 2)
    return value is not None and not value.any()


LOWERINGS: dict[tuple[str, str], Lowering] = {(FUSE, "LinearCrossEntropy"): linear_cross_entropy}

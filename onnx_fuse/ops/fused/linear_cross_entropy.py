"""LinearCrossEntropy: a product that makes scores, and the cross-entropy that alone reads them.

    z = x · Wᵀ + c      p = softmax(z)
    loss = Σ_m (1 - s) w[t] (-log p[t]) + s/V Σ_v w[v] (-log p[v])      total = Σ_m w[t]
for x [M, K], W [V, K], labels t [M], class weights w and label smoothing s. A mean is loss / total.
Rows whose label is `ignore_index` count in neither. With g = d loss / d z the gradients of the loss
are gx = g · W, gw = gᵀ · x and gb = Σ_m g. They are inner values of the body, which the forward of
a training graph returns: it makes them while it has g, and what the gradient of the loss is
multiplies them. So a runtime needs z for a few rows at a time, and never M x V numbers at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import dim, given, rank, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.fused.gemm import product_parts
from onnx_fuse.ops.fused.gradients import cotangents, saved
from onnx_fuse.ops.fused.norm import norm_attributes, norm_node
from onnx_fuse.ops.loss import SMOOTHED, counted_rows, mean_of
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.rules import (
    Rewriter,
    Rule,
    attribute,
    other_operand,
    producer,
    row_axis,
    sole_reader,
    typed,
)
from onnx_fuse.ops.shape_ops import Values, Writer
from onnx_fuse.reasons import Reason

NAME = "LinearCrossEntropy"
LEAST_CLASSES = 2048
"""The number of classes from which the scores take more memory than the operands of the product."""
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_VIEWS = 16
"""Nodes between a product and its loss that are looked over at most."""

_BODY = """LinearCrossEntropy <ignore_index: int = -100, label_smoothing: float = 0.0,
    stash_type: int = 1> (x, w, bias, labels, weight) => (loss, total) {
  product = MatMul (x, Transpose <perm: ints = [1, 0]> (w))
  scores = product + bias
  z = Cast <to: int = @stash_type> (scores)
  log_p = LogSoftmax <axis: int = 1> (z)
  ids = Cast <to: int = 7> (labels)
  ignored = ids == Constant <value_int: int = @ignore_index> ()
  index = Unsqueeze (Where (ignored, 0, ids), [1])
  out = Unsqueeze (ignored, [1])
  classes = Shape <start: int = 1, end: int = 2> (z)
  weights = Cast <to: int = @stash_type> (weight)
  each = Expand (weights, classes)
  counted = Where (out, 0, Gather (each, index))
  total = ReduceSum <keepdims: int = 0> (counted)
  smooth = CastLike (Constant <value_float: float = @label_smoothing> (), z)
  count = Squeeze (classes)
  share = smooth / CastLike (count, z)
  hard = counted * (1 - smooth)
  hard_log = hard * GatherElements <axis: int = 1> (log_p, index)
  spread = ReduceSum <keepdims: int = 1> (log_p * each, [1]) * share
  row = Where (out, 0, hard_log + Where (smooth == 0, 0, spread))
  loss = -ReduceSum <keepdims: int = 0> (row)
  label = Where (Range (0, count, 1) == index, hard, 0)
  slope = hard + share * ReduceSum <keepdims: int = 0> (each)
  g = Where (out, 0, slope * Exp (log_p) - (label + share * each))
  gz = CastLike (g, x)
  gx = MatMul (gz, w)
  gts = Cast <to: int = @stash_type> (Transpose <perm: ints = [1, 0]> (gz))
  gw = MatMul (gts, Cast <to: int = @stash_type> (x))
  gb = ReduceSum <keepdims: int = 0> (Cast <to: int = @stash_type> (gz), [0])
}"""


def _gradient(op: Writer, node: ir.Node, dys: Values) -> Values:
    """The saved gradients of the sum, times that of the sum."""
    cotangents(node, dys, 2)
    dy, answers = dys[0], []
    if dy is None:
        return [None, None, None]
    for name, value in zip(("gx", "gw", "gb"), map(required, node.inputs), strict=False):
        g = saved(node, name)
        wide = g if g.dtype == dy.dtype else op.Cast(g, to=dy.dtype.value)
        turned = producer(value, "Transpose") is not None  # gw then lies as what W is made of
        grad = op.CastLike(op.Mul(op.Transpose(wide) if turned else wide, dy), value)
        answers.append(typed(op.Transpose(grad) if turned else grad, value, value.shape))
    return answers


register(OpDef(NAME, FUSE, body=_BODY, saves=("gx", "gw", "gb"), grad=_gradient))


class _Product(NamedTuple):
    """The product below the scores: x [..., K], and W [V, K], or [K, V] if `turned`.

    With `affine` it is fused with the norm of that kind before it: x is what is normed.
    """

    node: ir.Node
    x: ir.Value
    w: ir.Value
    turned: bool
    bias: ir.Value | None
    affine: Sequence[ir.Value | None] = ()

    def operand(self, op: Writer) -> ir.Value:
        """What W multiplies; the norm as a node of its own again."""
        if not self.affine:
            return self.x
        kind = FusedName.of(self.node.op_type).norm
        return norm_node(op, kind, self.x, self.affine, norm_attributes(self.node))


def _product(node: ir.Node | None) -> _Product | None:
    if node is None:
        return None
    if node.domain == "" and node.op_type == "Add":
        for x in node.inputs:
            product = _product(producer(x, "MatMul"))
            if product is not None and x is not None and sole_reader(x):
                bias = other_operand(node, x)
                return product._replace(bias=bias) if _bias_fits(bias, product) else None
        return None
    parts = product_parts(node)
    if parts is None or parts.activation or rank(parts.w) != 2 or (rank(parts.head[0]) or 0) < 2:
        return None
    (x, *affine), w, turned = parts.head, parts.w, not parts.turned
    view = producer(w, "Transpose")
    if view is not None and view.inputs[0] is not None:  # a table that is tied to the head
        w, turned = view.inputs[0], not turned
    site = _Product(node, x, w, turned, parts.c, affine)
    return site if _bias_fits(site.bias, site) else None


def _bias_fits(bias: ir.Value | None, site: _Product) -> bool:
    classes = dim(site.w, 1 if site.turned else 0)
    return bias is None or (rank(bias) or 0) == 0 or (rank(bias), dim(bias, 0)) == (1, classes)


def _below(node: ir.Node, axis: int) -> int | None:
    """The axis of the classes below a view that keeps the order of the rows, None for others."""
    if node.domain or node.op_type in ("Concat", "Split", "Gather", "Slice"):
        return None
    if node.op_type == "Cast":
        before, after = node.inputs[0], node.outputs[0]
        wider = before is not None and before.dtype in _HALF and after.dtype == ir.DataType.FLOAT
        return axis if wider else None
    below = row_axis(node, axis)
    if node.op_type == "Transpose" and below is not None:
        rows = [p for p in node.attributes.get_ints("perm", ()) if p != below]
        return below if rows == sorted(rows) else None
    return below


def _apply(rw: Rewriter, loss: ir.Node) -> bool:
    scores, labels = loss.inputs[:2]
    smoothed = loss.op_type == SMOOTHED  # whose outputs are those of the operator
    if loss.domain != (FUSE if smoothed else "") or scores is None or labels is None:
        return False
    value, axis, site = scores, 1, None
    views: list[ir.Node] = []
    while len(views) < _VIEWS:
        node = value.producer()
        site = _product(node)
        if site is not None or node is None or (below := _below(node, axis)) is None:
            break
        views.append(node)
        value, axis = required(node.inputs[0]), below
    if site is None or axis != (rank(value) or 0) - 1:
        return False
    classes, width = dim(site.w, int(site.turned)), dim(site.w, 1 - int(site.turned))
    if classes is None or width is None or classes < LEAST_CLASSES:
        return False
    nodes = [site.node, loss]
    weight, reduction = given(loss, 2), attribute(loss, "reduction", "mean")
    if reduction == "none":
        return rw.refuse(NAME, nodes, Reason("row-losses"))
    if (
        not smoothed
        and len(loss.outputs) > 1
        and (loss.outputs[1].uses() or loss.outputs[1].is_graph_output())
    ):
        return rw.refuse(NAME, nodes, Reason("other-readers", what="the probabilities"))
    if not all(sole_reader(v) for v in (value, *(view.outputs[0] for view in views))):
        return rw.refuse(NAME, nodes, Reason("other-readers", what="the scores"))
    if dim(scores, 0) not in (None, dim(labels, 0)):  # onnxruntime runs the loss of others, too
        return rw.refuse(NAME, nodes, Reason("label-rows"))
    op, w = Writer(), site.w
    x = site.operand(op)
    double = x.dtype == ir.DataType.DOUBLE
    stash = ir.DataType.DOUBLE if double else ir.DataType.FLOAT
    x2 = typed(op.Reshape(x, [-1, width]), x, [None, width])
    ids = typed(op.Reshape(labels, [-1]), labels, [None])
    if site.turned:
        w = typed(op.Transpose(w, perm=[1, 0]), w, [classes, width])
    if weight is None:
        weight = rw.initializer(f"one.{stash.name.lower()}", np.ones((), stash.numpy()))
    ignored = loss.attributes.get_int("ignore_index", -(2**62))
    total, count = op.node(
        NAME, [x2, w, rw.zeros(x) if site.bias is None else site.bias, ids, weight], outputs=2,
        domain=FUSE, ignore_index=ignored, stash_type=int(stash),
        label_smoothing=loss.attributes.get_float("label_smoothing", 0.0),
    )  # fmt: skip
    for value in (total, count):
        value.dtype, value.shape = stash, ir.Shape([])
    results = [total, count]
    if not smoothed:
        # where all class weights are one number, their sum tells whether any row counts
        rows = count if given(loss, 2) is None else counted_rows(op, ids, ignored, total)
        mean = total if reduction == "sum" else mean_of(op, total, count, rows)
        results = [typed(mean, total, [])]
    ends = list(loss.outputs[: len(results)])
    for k, end in enumerate(ends):
        if end.dtype is not None and end.dtype != stash:
            results[k] = op.Cast(results[k], to=end.dtype.value)
        results[k] = typed(results[k], end, [])
    return rw.replace(loss, op, ends, results)


RULE = Rule(
    NAME,
    2,
    ("SoftmaxCrossEntropyLoss", SMOOTHED),
    _apply,
    conditions="readers constants weights types ranks body",
)

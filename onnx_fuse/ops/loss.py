"""The two ONNX loss ops and their gradients; the losses that `gradient` and `Trainer` build.

A builder takes (op, logits, labels, options) and returns a scalar loss. Options, all with PyTorch's
meaning: reduction ("mean", "sum"), ignore_index, label_smoothing, weight (an initializer [C]),
class_axis, delta (huber), pos_weight (bce_with_logits).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import dim, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.shape_ops import Tensor, Values, Writer, arguments, known_rank, text

Options = Mapping[str, Any]
SMOOTHED = "SmoothedCrossEntropy"
"""The sum of the smoothed losses of rows x [M, C], labels [M], class weights [C] or one number, and
the sum of the labels' weights: the smoothing is an attribute, for who takes over the scores."""


# ---- the operators ---------------------------------------------------------------------------


def _nll_slope(op: Writer, node: ir.Node, dy: ir.Value) -> tuple[Tensor, Tensor]:
    """(d loss / d (-log p of the label), the labels), both [N, 1, d1, …]; 0 where ignored."""
    x, labels, weight = arguments(node, 3)
    reduction = text(node, "reduction", "mean")
    ignore = node.attributes.get("ignore_index")
    one = op.constant([1])
    index = op.Unsqueeze(labels, one)
    counted = zero = None
    if ignore is not None:
        kind = (labels.dtype or ir.DataType.INT64).numpy()
        counted = op.Not(op.Equal(index, op.constant(np.array(ignore.as_int(), kind))))
        index = op.Where(counted, index, op.constant(np.array(0, kind)))
        zero = op.constant(0.0, x.dtype)
    each = None if weight is None else op.Gather(weight, index)
    if reduction == "none":
        dy = op.Unsqueeze(dy, one)
    elif reduction == "mean":
        if each is not None:
            summed = each if counted is None else op.Where(counted, each, zero)
            total = op.ReduceSum(summed, keepdims=0)
        elif counted is not None:
            total = op.ReduceSum(op.to_like(counted, x), keepdims=0)
        else:
            total = op.to_like(op.Size(index), x)
        dy = op.Div(dy, total)
    slope = dy if each is None else op.Mul(each, dy)
    if counted is not None:  # not a product: dy is infinite where no row counts
        return op.Where(counted, slope, zero), index
    return op.Expand(slope, op.Shape(index)), index


def _nll(op: Writer, node: ir.Node, dys: Values) -> Values:
    """d loss / d x is -slope at the label, 0 elsewhere."""
    x, dy = arguments(node, 1)[0], dys[0]
    slope, index = _nll_slope(op, node, dy)
    zeros = op.zeros_like(x)
    return [op.ScatterElements(zeros, index, op.Neg(slope), axis=1, reduction="none")]


def _cross_entropy(op: Writer, node: ir.Node, dys: Values) -> Values:
    """d loss / d x = slope · softmax(x) - slope at the label."""
    (x,) = arguments(node, 1)
    if len(dys) < 2 or dys[1] is None:
        slope, index = _nll_slope(op, node, required(dys[0]))
        dx = op.node("SoftmaxCrossEntropyGrad", [x, index, slope], domain=FUSE)
        dx.dtype, dx.shape = x.dtype, x.shape
        return [dx]
    p = op.Exp(op.output(node, 1, x.dtype, "log_prob"))
    node.outputs[1].shape = x.shape
    total = op.ReduceSum(dys[1], [1], keepdims=1)
    dx = op.Sub(dys[1], op.Mul(p, total))
    if dys[0] is not None:
        slope, index = _nll_slope(op, node, dys[0])
        part = op.scatter_add("ScatterElements", op.Mul(p, slope), index, op.Neg(slope), axis=1)
        dx = op.Add(part, dx)
    return [dx]


register(
    OpDef(
        "SoftmaxCrossEntropyGrad",
        FUSE,
        body="""SoftmaxCrossEntropyGrad (x, label, slope) => (dx) {
  p = Softmax <axis: int = 1> (x)
  all = p * slope
  dx = ScatterElements <axis: int = 1, reduction: string = "add"> (all, label, Neg (slope))
}""",
    ),
    OpDef(
        SMOOTHED,
        FUSE,
        body="""SmoothedCrossEntropy <ignore_index: int = -100, label_smoothing: float = 0.0>
    (x, labels, weight) => (loss, total) {
  classes = Shape <start: int = 1, end: int = 2> (x)
  each = Expand (weight, classes)
  hard, log_p = SoftmaxCrossEntropyLoss
    <reduction: string = "sum", ignore_index: int = @ignore_index> (x, labels, each)
  ignored = Equal (labels, CastLike (Constant <value_int: int = @ignore_index> (), labels))
  safe = Where (ignored, CastLike (Constant <value_int: int = 0> (), labels), labels)
  own = Gather (each, safe)
  zero = CastLike (Constant <value_float: float = 0.0> (), x)
  counted = Where (ignored, zero, own)
  total = ReduceSum <keepdims: int = 0> (counted)
  second = [1]
  kept = Where (ignored, zero, ReduceSum <keepdims: int = 0> (log_p * each, second))
  every = ReduceSum <keepdims: int = 0> (kept)
  epsilon = CastLike (Constant <value_float: float = @label_smoothing> (), x)
  one = CastLike (Constant <value_float: float = 1.0> (), x)
  keep = one - epsilon
  count = Squeeze (classes)
  share = epsilon / CastLike (count, x)
  loss = hard * keep - every * share
}""",
    ),
    OpDef("NegativeLogLikelihoodLoss", grad=_nll),
    OpDef("SoftmaxCrossEntropyLoss", grad=_cross_entropy),
)


# ---- the losses ------------------------------------------------------------------------------


def class_axis(n: int, options: Options) -> int:
    """The axis of logits of rank n that counts classes."""
    axis = options.get("class_axis")
    return (1 if n >= 4 else n - 1) if axis is None else int(axis) % n


def _rows(
    op: Writer, logits: ir.Value, labels: ir.Value, options: Options
) -> tuple[ir.Value, ir.Value, int]:
    """Logits and labels with the class axis at 1, and the rank. The class axis is the last of
    [N, C] and of a sequence's [N, T, C], and axis 1 of images' [N, C, H, W].
    """
    n = known_rank(logits)
    axis = class_axis(n, options)
    if axis != 1:
        if axis != n - 1:
            raise UsageError(f"class_axis {axis} is neither 1 nor the last of {n} axes")
        classes = dim(logits, -1)
        logits = op.reshape(logits, [-1, classes if classes else op.Shape(logits, start=-1)])
        labels = op.reshape(labels, [-1])
    return logits, labels, axis


def counted_rows(op: Writer, labels: Tensor, ignore: int, like: Tensor) -> Tensor:
    """The number of labels that count, in the type of `like`."""
    kind = (labels.dtype or ir.DataType.INT64).numpy()
    counted = op.Not(op.Equal(labels, op.constant(np.array(ignore, kind))))
    return op.ReduceSum(op.to_like(counted, like), keepdims=0)


def mean_of(op: Writer, loss: Tensor, total: Tensor, counted: Tensor) -> Tensor:
    """loss / total; where no row is counted NaN, through which no gradient flows.

    `counted` is 0 there alone. A gradient of the sum would be infinite, and its rows NaN.
    """
    kind = (loss.dtype or ir.DataType.FLOAT).numpy()
    none = op.Equal(counted, op.constant(np.zeros((), kind)))
    mean = op.Div(loss, op.Where(none, op.constant(np.ones((), kind)), total))
    return op.Where(none, op.constant(np.full((), np.nan, kind)), mean)


def ignored_label(options: Options) -> int:
    """The label that does not count."""
    label = options.get("ignore_index")
    return -100 if label is None else int(label)


def cross_entropy(op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
    """-Σ w log softmax(logits)[label] / Σ w; smoothing ε takes (1 - ε) of that and ε/C of all."""
    x, labels, _ = _rows(op, logits, labels, options)
    weight, smooth = options.get("weight"), float(options.get("label_smoothing") or 0.0)
    reduction, ignore = options.get("reduction", "mean"), ignored_label(options)
    if smooth and op.fused and known_rank(x) == 2 and reduction != "none":
        weight = op.to_like(op.constant(np.float32(1)), x) if weight is None else weight
        loss, total = op.node(
            SMOOTHED, [x, labels, weight], outputs=2, domain=FUSE, ignore_index=ignore,
            label_smoothing=smooth,
        )  # fmt: skip
        counted = total if options.get("weight") is None else counted_rows(op, labels, ignore, x)
        return mean_of(op, loss, total, counted) if reduction == "mean" else loss
    loss, log_p = op.SoftmaxCrossEntropyLoss(
        x, labels, weight, reduction=reduction, ignore_index=ignore, outputs=2
    )
    if not smooth:
        return loss
    one = op.constant([1])
    index = op.Unsqueeze(labels, one)
    kind = (labels.dtype or ir.DataType.INT64).numpy()
    counted = op.Not(op.Equal(index, op.constant(np.array(ignore, kind))))
    index = op.Where(counted, index, op.constant(np.array(0, kind)))
    zero = op.constant(0.0, x.dtype)
    total = op.to_like(counted, x)
    if weight is not None:
        lead = list(range(1, known_rank(x) - 1))
        log_p = op.Mul(log_p, op.Unsqueeze(weight, op.constant(lead)) if lead else weight)
        total = op.Where(counted, op.Gather(weight, index), zero)
    every = op.Where(counted, op.ReduceSum(log_p, one, keepdims=1), zero)
    every = op.Neg(op.ReduceSum(every, keepdims=0))
    classes = op.to_like(op.Squeeze(op.Shape(x, start=1, end=2), [0]), x)
    if reduction == "mean":
        every = op.Div(every, op.ReduceSum(total, keepdims=0))
    return op.Add(op.Mul(loss, 1 - smooth), op.Mul(op.Div(every, classes), smooth))


def nll(op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
    """-Σ w x[label] / Σ w, for a model that ends in log-probabilities."""
    x, labels, _ = _rows(op, logits, labels, options)
    return op.NegativeLogLikelihoodLoss(
        x,
        labels,
        options.get("weight"),
        reduction=options.get("reduction", "mean"),
        ignore_index=ignored_label(options),
    )


@dataclass(frozen=True)
class _Each:
    """The mean or the sum of a formula of scores x, labels t and at most one option."""

    formula: str
    option: str = ""
    default: float = 0.0

    def __call__(self, op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
        value = options.get(self.option)
        value = self.default if value is None else value
        number: Any = value if isinstance(value, ir.Value) else float(value)
        each = op.formula(self.formula, x=logits, t=labels, **{self.option: number})
        mean = options.get("reduction", "mean") == "mean"
        return (op.ReduceMean if mean else op.ReduceSum)(each, keepdims=0)


def bce_with_logits(op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
    """(1 - t) x + (1 + (p - 1) t) softplus(-x), with p = pos_weight (1 where none is given)."""
    weighted = options.get("pos_weight") is not None
    weight = " * ((pos_weight - 1) * t + 1)" if weighted else ""
    each = _Each(f"negative = Softplus(-x){weight}; (1 - t) * x + negative", "pos_weight")
    return each(op, logits, labels, options)


@dataclass(frozen=True)
class Loss:
    """A loss by name: its builder, and whether its labels are class numbers (int64)."""

    build: Callable[[Writer, ir.Value, ir.Value, Options], ir.Value]
    classes: bool = False


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, classes=True),
    "nll": Loss(nll, classes=True),
    "mse": Loss(_Each("d = x - t; d * d")),
    "l1": Loss(_Each("Abs(x - t)")),
    # ½ d² for |d| ≤ δ, δ (|d| - ½ δ) beyond
    "huber": Loss(_Each("d = Abs(x - t); c = Min(d, delta); c * (d - c * 0.5)", "delta", 1.0)),
    "bce_with_logits": Loss(bce_with_logits),
}


def label_value(logits: ir.Value, loss: str, name: str, options: Options) -> Tensor:
    """The label input that a loss wants: class numbers without the class axis, or logits' like."""
    if not LOSSES[loss].classes or logits.shape is None:
        dtype = ir.DataType.INT64 if LOSSES[loss].classes else logits.dtype
        shape = None if LOSSES[loss].classes else logits.shape
        return ir.Value(name=name, type=ir.TensorType(dtype or ir.DataType.FLOAT), shape=shape)
    axis = class_axis(len(logits.shape), options)
    shape = ir.Shape([d for i, d in enumerate(logits.shape) if i != axis])
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=shape)

"""The two ONNX loss ops and their gradients; the losses that `gradient` and `Trainer` build.

A builder takes (op, logits, labels, options) and returns a scalar loss, or with the reduction
"none", which `nn` alone takes, every loss. Options have PyTorch's meanings and defaults. Those that
are arrays, outputs of the model or lengths come as Values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import UsageError, unknown
from onnx_fuse.ir.build import dim, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.ctc import ctc
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.shape_ops import Tensor, Values, Writer, arguments, known_rank, text

Options = Mapping[str, Any]
SMOOTHED = "SmoothedCrossEntropy"
"""The sum of the smoothed losses of rows x [M, C], labels [M], class weights [C] or one number, and
the sum of the labels' weights: the smoothing is an attribute, for who takes over the scores."""


# ---- the operators ---------------------------------------------------------------------------


def _counted(op: Writer, labels: Tensor, ignore: int, index: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each number of `index`, made of the labels, counts, and 0 for those that do not."""
    kind = (labels.dtype or ir.DataType.INT64).numpy()
    counted = op.Not(op.Equal(index, op.constant(np.array(ignore, kind))))
    return counted, op.Where(counted, index, op.constant(np.array(0, kind)))


def _nll_slope(op: Writer, node: ir.Node, dy: ir.Value) -> tuple[Tensor, Tensor]:
    """(d loss / d (-log p of the label), the labels), both [N, 1, d1, …]; 0 where ignored."""
    x, labels, weight = arguments(node, 3)
    reduction = text(node, "reduction", "mean")
    ignore = node.attributes.get("ignore_index")
    one = op.constant([1])
    index = op.Unsqueeze(labels, one)
    counted = zero = None
    if ignore is not None:
        counted, index = _counted(op, labels, ignore.as_int(), index)
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
        part = op.scatter_add(op.Mul(p, slope), index, op.Neg(slope), axis=1)
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
  ignored = labels == CastLike (Constant <value_int: int = @ignore_index> (), labels)
  own = Gather (each, Where (ignored, 0, labels))
  total = ReduceSum <keepdims: int = 0> (Where (ignored, 0, own))
  kept = Where (ignored, 0, ReduceSum <keepdims: int = 0> (log_p * each, [1]))
  every = ReduceSum <keepdims: int = 0> (kept)
  epsilon = CastLike (Constant <value_float: float = @label_smoothing> (), x)
  loss = hard * (1 - epsilon) - every * (epsilon / CastLike (Squeeze (classes), x))
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
    shape, (x, labels, _) = labels, _rows(op, logits, labels, options)
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
        return _alike(op, loss, shape, options)
    one = op.constant([1])
    counted, index = _counted(op, labels, ignore, op.Unsqueeze(labels, one))
    zero = op.constant(0.0, x.dtype)
    total = op.to_like(counted, x)
    if weight is not None:
        lead = list(range(1, known_rank(x) - 1))
        log_p = op.Mul(log_p, op.Unsqueeze(weight, op.constant(lead)) if lead else weight)
        total = op.Where(counted, op.Gather(weight, index), zero)
    every = op.Where(counted, op.ReduceSum(log_p, one, keepdims=1), zero)
    every = op.Neg(op.ReduceSum(every, one if reduction == "none" else None, keepdims=0))
    classes = op.to_like(op.Squeeze(op.Shape(x, start=1, end=2), [0]), x)
    if reduction == "mean":
        every = op.Div(every, op.ReduceSum(total, keepdims=0))
    loss = op.Add(op.Mul(loss, 1 - smooth), op.Mul(op.Div(every, classes), smooth))
    return _alike(op, loss, shape, options)


def nll(op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
    """-Σ w x[label] / Σ w, for a model that ends in log-probabilities."""
    shape, (x, labels, _) = labels, _rows(op, logits, labels, options)
    loss = op.NegativeLogLikelihoodLoss(
        x,
        labels,
        options.get("weight"),
        reduction=options.get("reduction", "mean"),
        ignore_index=ignored_label(options),
    )
    return _alike(op, loss, shape, options)


def _alike(op: Writer, loss: Tensor, labels: Tensor, options: Options) -> Tensor:
    """The loss, which the reduction "none" gives the shape of the labels as they came."""
    return op.Reshape(loss, op.Shape(labels)) if options.get("reduction") == "none" else loss


def _reduced(op: Writer, each: Tensor, options: Options) -> Tensor:
    """The mean of all entries, their sum, or by "batchmean" their sum over the number of rows."""
    reduction = options.get("reduction", "mean")
    if reduction == "none":
        return each
    if reduction == "batchmean":
        rows = op.to_like(op.Squeeze(op.Shape(each, start=0, end=1), [0]), each)
        return op.Div(op.ReduceSum(each, keepdims=0), rows)
    return (op.ReduceMean if reduction == "mean" else op.ReduceSum)(each, keepdims=0)


@dataclass(frozen=True)
class _Each:
    """A formula of scores x, labels t and options, which are numbers or Values, and its mean."""

    formula: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
        given = {name: options.get(name) for name in self.numbers}
        values: dict[str, Any] = {
            name: self.numbers[name] if v is None else v if isinstance(v, ir.Value) else float(v)
            for name, v in given.items()
        }
        return _reduced(op, op.formula(self.formula, x=logits, t=labels, **values), options)


def bce_with_logits(op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
    """(1 - t) x + (1 + (p - 1) t) softplus(-x), with p = pos_weight (1 where none is given)."""
    weighted = options.get("pos_weight") is not None
    weight = " * ((pos_weight - 1) * t + 1)" if weighted else ""
    formula = f"negative = Softplus(-x){weight}; (1 - t) * x + negative"
    return _Each(formula, {"pos_weight": 1.0} if weighted else {})(op, logits, labels, options)


def kl_div(op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
    """t (log t - x) of logarithms x of probabilities; log_target: labels are logarithms, too."""
    formula = "s = Where(t == 0, 1, t); s * Log(s) - t * x"
    return _Each("Exp(t) * (t - x)" if options.get("log_target") else formula)(
        op, logits, labels, options
    )


def poisson_nll(op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
    """exp(x) - t x, or x - t log(x + eps) without log_input; `full` adds Stirling's log t!."""
    linear = options.get("log_input") is not None and not options["log_input"]
    formula = "x - t * Log(x + eps)" if linear else "Exp(x) - t * x"
    if options.get("full"):
        stirling = "Where(t > 1, s * Log(s) - s + 0.5 * Log(s * 6.283185307179586), 0)"
        formula = f"s = Where(t > 1, t, 1); {formula} + {stirling}"
    return _Each(formula, {"eps": 1e-8} if linear else {})(op, logits, labels, options)


def _numbers(op: Writer, x: ir.Value, axis: int) -> Tensor:
    """0, 1, ... along an axis of x."""
    zero, one = (op.constant(np.array(i, np.int64)) for i in (0, 1))
    return op.Range(zero, op.Squeeze(op.Shape(x, start=axis, end=axis + 1), [0]), one)


def _number(options: Options, name: str, default: float) -> float:
    value = options.get(name)
    return default if value is None else float(value)


def softmax_focal(op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
    """-(1 - p)^gamma log p of the label's probability p, over the labels that count."""
    x, labels, _ = _rows(op, logits, labels, options)
    ignore = ignored_label(options)
    each = op.SoftmaxCrossEntropyLoss(x, labels, reduction="none", ignore_index=ignore)
    each.dtype = x.dtype
    hard = f"e * Pow({_AT_LEAST.format('1 - Exp(-e)')}, gamma)"
    each = op.formula(hard, e=each, gamma=_number(options, "gamma", 2.0))
    loss = op.ReduceSum(each, keepdims=0)
    if options.get("reduction", "mean") != "mean":
        return loss
    counted = counted_rows(op, labels, ignore, x)
    return mean_of(op, loss, counted, counted)


def multi_margin(op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
    """Σ max(0, margin - x[label] + x[c])^p / C over the classes c but the label, p being 1 or 2."""
    x, labels, _ = _rows(op, logits, labels, options)
    if known_rank(x) != 2:
        raise UsageError("multi_margin takes scores whose classes are the last axis")
    power, ignore = _number(options, "p", 1), ignored_label(options)
    if power not in (1, 2):
        raise UsageError(f"p is {power}: multi_margin takes 1 or 2")
    index = op.Unsqueeze(labels, [1])
    counts, own = _counted(op, labels, ignore, index)
    each = op.formula(
        f"""left_out = Or(Not(counts), numbers == Cast <to = 7> (index))
        z = Where(left_out, 0, margin - GatherElements <axis = 1> (x, own) + x)
        h = Where(z <= 0, 0, z); {"h * h" if power == 2 else "h"}""",
        **{"x": x, "own": own, "index": index, "counts": counts, "numbers": _numbers(op, x, 1)},
        margin=_number(options, "margin", 1.0),
    )
    count = op.to_like(op.Squeeze(op.Shape(x, start=1, end=2), [0]), x)
    reduction = options.get("reduction", "mean")
    axes = op.constant([1]) if reduction == "none" else None
    loss = op.Div(op.ReduceSum(each, axes, keepdims=0), count)
    if reduction != "mean":
        return loss
    counted = counted_rows(op, labels, ignore, x)
    return mean_of(op, loss, counted, counted)


def dice(op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
    """1 - (2 Σ p t + smooth) / (Σ p + Σ t + smooth) with p = σ(x), for each row and channel.

    Of [N, C, ...] the sums are over what follows C; of [N, K] over K.
    """
    rank = known_rank(logits)
    axes = list(range(min(2, rank - 1), rank))
    each = op.formula(
        """p = Sigmoid(x)
        sums = ReduceSum <keepdims = 0> (p, axes) + ReduceSum <keepdims = 0> (t, axes)
        1 - (2 * ReduceSum <keepdims = 0> (p * t, axes) + smooth) / (sums + smooth)""",
        **{"x": logits, "t": labels, "axes": axes, "smooth": _number(options, "smooth", 1.0)},
    )
    return _reduced(op, each, options)


# ---- losses of several outputs -----------------------------------------------------------------

_LENGTH = "Sqrt(ReduceSum <keepdims = 0> ({0} * {0}, [-1]){1})"


def cosine_embedding(op: Writer, logits: ir.Value, labels: ir.Value, options: Options) -> Tensor:
    """1 - cos(x, other) of the rows whose label is 1, max(0, cos - margin) of those with -1."""
    each = op.formula(
        f"""lengths = {_LENGTH.format("x", " + 1e-12")} * {_LENGTH.format("y", " + 1e-12")}
        c = ReduceSum <keepdims = 0> (x * y, [-1]) / lengths; z = c - margin
        Where(t == 1, 1 - c, 0) + Where(t == -1, Where(z < 0, 0, z), 0)""",
        **{"x": logits, "y": options["other"], "t": labels},
        margin=_number(options, "margin", 0.0),
    )
    return _reduced(op, each, options)


def triplet(op: Writer, logits: ir.Value, labels: object, options: Options) -> Tensor:
    """max(0, |x - positive + eps| - |x - negative + eps| + margin).

    With `swap`, |positive - negative + eps| takes the place of the second where it is less.
    """
    lines = ["a = x - p + eps", "b = x - n + eps"]
    lines += [f"near = {_LENGTH.format('a', '')}", f"far = {_LENGTH.format('b', '')}"]
    if options.get("swap"):
        lines += ["c = p - n + eps", f"far = Min(far, {_LENGTH.format('c', '')})"]
    each = op.formula(
        "; ".join([*lines, "z = near - far + margin", "Where(z < 0, 0, z)"]),
        **{"x": logits, "p": options["positive"], "n": options["negative"]},
        **{"margin": _number(options, "margin", 1.0), "eps": _number(options, "eps", 1e-6)},
    )
    return _reduced(op, each, options)


def contrastive(op: Writer, logits: ir.Value, labels: object, options: Options) -> Tensor:
    """InfoNCE: cross-entropy of cos(x, other) / temperature, row i of `other` being the label of x.

    `symmetric` adds that of other by x, and halves the sum.
    """
    unit = "v / Sqrt(Max(ReduceSum <keepdims = 1> (v * v, [-1]), 1e-24))"
    x, y = (op.formula(unit, v=op.wide(each)) for each in (logits, options["other"]))
    scores = op.formula(
        "MatMul(x, Transpose <perm = [1, 0]> (y)) / t",
        x=x,
        y=y,
        t=_number(options, "temperature", 0.07),
    )
    own = _numbers(op, x, 0)
    reduction = options.get("reduction", "mean")
    ways = [scores, op.Transpose(scores, perm=[1, 0])] if options.get("symmetric") else [scores]
    losses = [op.SoftmaxCrossEntropyLoss(way, own, reduction=reduction) for way in ways]
    loss = losses[0] if len(losses) == 1 else op.Mul(op.Add(*losses), 0.5)
    return op.to_like(loss, logits)


# ---- the table -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A loss by name."""

    build: Callable[[Writer, ir.Value, Any, Options], ir.Value]
    """The builder."""
    labels: str = "scores"
    """The input of labels: "scores" (of the output's type and shape), "classes" (class numbers
    without the axis of classes), "rows" (a number for each row), "sequence" (class numbers [N, S])
    or "" for none."""
    options: tuple[str, ...] = ()
    """The options that it takes beside reduction."""
    outputs: tuple[str, ...] = ()
    """Further outputs that it reads: options that name them, by default those that follow."""
    lengths: tuple[str, ...] = ()
    """Options that name an input of int64, a number for each row."""
    reductions: tuple[str, ...] = ("mean", "sum")
    """What its option reduction may be."""

    @property
    def classes(self) -> bool:
        """Whether labels are class numbers (int64), of which each has its row of scores."""
        return self.labels == "classes"

    def check(self, loss: str, options: Options) -> None:
        """Raise UsageError for an option that the loss of this name does not take."""
        texts = ("reduction", *self.outputs, *self.lengths)
        for name, value in options.items():
            if name not in (*texts, *self.options):
                raise UsageError(unknown(f"option of {loss}", name, (*texts, *self.options)))
            if value is not None and isinstance(value, str) != (name in texts):
                kind = "a text" if name in texts else "a number"
                raise UsageError(f"{name} is {value!r:.40}: it takes {kind}")
        if (reduction := options.get("reduction") or "mean") not in self.reductions:
            raise UsageError(unknown("reduction", reduction, self.reductions))


_CLASSES = ("ignore_index", "class_axis")
_AT_LEAST = "Max({}, 1e-7)"  # a power below 1 has no slope at 0
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, "classes", (*_CLASSES, "weight", "label_smoothing")),
    "nll": Loss(nll, "classes", (*_CLASSES, "weight")),
    "softmax_focal": Loss(softmax_focal, "classes", (*_CLASSES, "gamma")),
    "multi_margin": Loss(multi_margin, "classes", (*_CLASSES, "margin", "p")),
    "mse": Loss(_Each("d = x - t; d * d")),
    "l1": Loss(_Each("Abs(x - t)")),
    # ½ d² for |d| ≤ δ, δ (|d| - ½ δ) beyond
    "huber": Loss(
        _Each("d = Abs(x - t); c = Min(d, delta); c * (d - c * 0.5)", {"delta": 1.0}),
        options=("delta",),
    ),
    "bce_with_logits": Loss(bce_with_logits, options=("pos_weight",)),
    # α_t (1 - p_t)^γ (-log p_t), where p_t is the probability of the label
    "focal": Loss(
        _Each(
            f"""q = Sigmoid(x) * (1 - t) + Sigmoid(-x) * t
            e = ((1 - t) * x + Softplus(-x)) * Pow({_AT_LEAST.format("q")}, gamma)
            e * (alpha * t + (1 - alpha) * (1 - t))""",
            {"alpha": 0.25, "gamma": 2.0},
        ),
        options=("alpha", "gamma"),
    ),
    "dice": Loss(dice, options=("smooth",)),
    "hinge": Loss(
        _Each("z = margin - t * x; Where(z < 0, 0, z)", {"margin": 1.0}), options=("margin",)
    ),
    "kl_div": Loss(kl_div, options=("log_target",), reductions=("mean", "sum", "batchmean")),
    "poisson_nll": Loss(poisson_nll, options=("log_input", "full", "eps")),
    "cosine_embedding": Loss(cosine_embedding, "rows", ("margin",), ("other",)),
    "triplet": Loss(triplet, "", ("margin", "eps", "swap"), ("positive", "negative")),
    "contrastive": Loss(contrastive, "", ("temperature", "symmetric"), ("other",)),
    "ctc": Loss(
        *(ctc, "sequence", ("blank", "ignore_index", "zero_infinity", "time_major"), ()),
        ("input_lengths", "target_lengths"),
    ),
}


def label_value(logits: ir.Value, loss: str, name: str, options: Options) -> Tensor | None:
    """The label input that a loss wants, if any (`Loss.labels`)."""
    kind, sizes = LOSSES[loss].labels, logits.shape
    if not kind:
        return None
    floats = kind in ("scores", "rows")
    dtype = (logits.dtype or ir.DataType.FLOAT) if floats else ir.DataType.INT64
    if kind == "rows":
        sizes = sizes and ir.Shape(sizes[:1])
    elif kind == "sequence":
        sizes = sizes and ir.Shape([sizes[1 if options.get("time_major") else 0], None])
    elif kind == "classes" and sizes is not None:
        axis = class_axis(len(sizes), options)
        sizes = ir.Shape([d for i, d in enumerate(sizes) if i != axis])
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=sizes)

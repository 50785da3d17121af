"""Functions of Tensors for networks, with PyTorch's names and arguments.

Each is a few ONNX nodes that run, and are differentiated, as one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import chain, repeat
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import rank
from onnx_fuse.nn import operators, random, tensor
from onnx_fuse.nn.arrays import axis_of, is_float, number_of, within
from onnx_fuse.nn.dispatch import MODE, op_call, operation
from onnx_fuse.nn.tensor import Tensor
from onnx_fuse.ops.loss import LOSSES, class_axis
from onnx_fuse.ops.shape_ops import Writer, known_rank

__all__ = list[str]()  # of what `_public` stands at
__dir__ = __all__.copy
F = TypeVar("F", bound=Callable[..., Any])


def _public(function: F) -> F:
    """List a function in `__all__`; where it takes Tensors, make them of arrays and lists."""
    __all__.append(function.__name__)
    parameters = [*inspect.signature(function).parameters.values()]
    kinds = {p.name: str(p.annotation) for p in parameters if "Tensor" in str(p.annotation)}
    names = [p.name for p in parameters]

    def tensor_of(name: str, value: object, kind: str | None = None) -> Any:
        kind = kind or kinds.get(name)
        if isinstance(value, Tensor) or kind is None or (value is None and "None" in kind):
            return value
        if kind.startswith("Sequence"):
            if isinstance(value, list | tuple) and value:
                return [tensor_of(f"an entry of {name}", each, "Tensor") for each in value]
            raise UsageError(f"{name} takes a list of Tensors, of one or more")
        if not isinstance(value, np.ndarray | np.generic | list | tuple | int | float):
            raise UsageError(f"{name} is of type {type(value).__name__}: it takes a Tensor")
        return Tensor(value)

    @wraps(function)
    def call(*args: object, **named: object) -> Any:
        for arg in args:
            if arg.__class__ is not Tensor:
                break
        else:
            if not named:
                return function(*args)  # the usual call
        named = {name: tensor_of(name, value) for name, value in named.items()}
        # what comes after all names belongs to `*tensors`, or is refused by the function
        return function(*map(tensor_of, chain(names, repeat(names[-1])), args), **named)

    return cast(F, call)


_ONE = ir.tensor(np.ones(1, np.float32))
Given: TypeAlias = "ir.Value | None"


# ---- activations -------------------------------------------------------------------------------


@_public
def relu(x: Tensor) -> Tensor:
    """The larger of `x` and 0."""
    return x.relu()


@_public
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) of each element of `x`."""
    return x.sigmoid()


@_public
def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent of `x`."""
    return x.tanh()


@_public
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x P(X < x) for a normal X, of each element of `x`; `approximate` may be "tanh"."""
    return op_call("Gelu", [x], {"approximate": approximate})


@_public
def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), of each element of `x`."""
    return op_call("Silu", [x], domain="onnx_fuse")


@_public
def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """`x` where it is positive, else `negative_slope` · x."""
    return op_call("LeakyRelu", [x], {"alpha": float(negative_slope)})


@_public
def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """`x` where it is positive, else `alpha` · (exp(x) - 1)."""
    return op_call("Elu", [x], {"alpha": float(alpha)})


@_public
def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) of each element of `x`."""
    return op_call("Softplus", [x])


@_public
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """exp(x) / Σ exp(x) along axis `dim` of `x`."""
    return x.softmax(dim)


@_public
def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """x - log Σ exp(x) along axis `dim` of `x`."""
    return x.log_softmax(dim)


# ---- layers ------------------------------------------------------------------------------------


@operation
def _linear(op: Writer, x: ir.Value, weight: ir.Value, bias: Given) -> Any:
    if rank(x) == 2 and rank(bias) == 1:
        return op.Gemm(x, weight, bias, transB=1)
    y = op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
    return y if bias is None else op.Add(y, bias)


@_public
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` · `weight`ᵀ + `bias`, with x [..., K], weight [N, K] and bias [N]."""
    return _linear(x, weight, bias)


@operation
def _layer_norm(
    op: Writer, x: ir.Value, weight: Given, bias: Given, *, axis: int, epsilon: float
) -> Any:
    if weight is None:
        weight = op.CastLike(op.ConstantOfShape(op.Shape(x, start=axis), value=_ONE), x)
    return op.LayerNormalization(x, weight, bias, axis=axis, epsilon=epsilon)


@_public
def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """(x - mean) / √(variance + eps) · weight + bias over the last axes.

    `normalized_shape` has the sizes of these axes of `x`, which `weight` and `bias` have too.
    """
    sizes = (normalized_shape,) if isinstance(normalized_shape, int) else (*normalized_shape,)
    count = len(sizes)
    if not count or x._data.shape[-count:] != sizes:
        raise UsageError(f"the last axes of x, {[*x._data.shape]}, are not {[*sizes]}")
    if any(w is not None and w._data.shape != sizes for w in (weight, bias)):
        raise UsageError(f"weight and bias of layer_norm are of shape {[*sizes]}")
    return _layer_norm(x, weight, bias, axis=-count, epsilon=float(eps))


@_public
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last axis of `x`."""
    return op_call(
        "RMSNormalization", [x, weight], {"axis": -1, "epsilon": float(eps)}, "onnx_fuse"
    )


@_public
def embedding(index: Tensor, weight: Tensor) -> Tensor:
    """The rows of `weight` [V, D] that `index` names."""
    within(index)
    return op_call("Gather", [weight, index], {"axis": 0})


def _two(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _fits(
    x: Tensor, kernel: Sequence[int], padding: int | Sequence[int], dilation: Sequence[int] = (1, 1)
) -> None:
    """Refuse a window of no elements, or larger than the image, as PyTorch does."""
    if any(width < 1 for width in (*kernel, *dilation)):
        raise UsageError(f"a window and its dilation are from 1 on, not {[*kernel, *dilation]}")
    sides = zip(x._data.shape[2:], kernel, _two(padding), dilation, strict=False)
    if any(size + 2 * pad < step * (width - 1) + 1 for size, width, pad, step in sides):
        raise UsageError(f"the window {[*kernel]} is larger than the image {[*x._data.shape[2:]]}")


@_public
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """The convolution of `x` [N, C, H, W] with `weight` [M, C / groups, kH, kW] and `bias` [M].

    `stride`, `padding` and `dilation` are one number, or one for each of H and W.
    """
    if min(*_two(stride), groups) < 1:
        raise UsageError(f"a convolution's stride and groups are from 1 on: {stride}, {groups}")
    _fits(x, weight._data.shape[2:], padding, _two(dilation))
    attributes = {
        "strides": _two(stride),
        "pads": _two(padding) * 2,
        "dilations": _two(dilation),
        "group": groups,
    }
    return op_call("Conv", [x, weight, bias], attributes)


@_public
def max_pool2d(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
) -> Tensor:
    """The largest element of each window of `x` [N, C, H, W].

    `kernel_size`, `stride` (the kernel's size where it is None) and `padding` are one number, or
    one for each of H and W.
    """
    _fits(x, _two(kernel_size), padding)
    attributes = {
        "kernel_shape": _two(kernel_size),
        "strides": _two(kernel_size if stride is None else stride),
        "pads": _two(padding) * 2,
    }
    return op_call("MaxPool", [x], attributes)


@operation
def _batch_norm(
    op: Writer, x: ir.Value, *args: ir.Value, training: bool, momentum: float, eps: float
) -> Any:
    return op.BatchNormalization(
        x,
        *args,
        outputs=3 if training else 1,
        training_mode=int(training),
        momentum=1 - momentum,
        epsilon=eps,
    )


@_public
def batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor,
    bias: Tensor,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Each channel (axis 1) of `x` normalized, times `weight`, plus `bias` ([C] each).

    With `training` the statistics are those of the batch, and `running_mean` and `running_var`
    move to them by the share `momentum`; otherwise they are the running ones. `eps` keeps the
    root from 0. The running variance is the biased one, as ONNX has it.
    """
    operands = [x, weight, bias, running_mean, running_var]
    results = _batch_norm(*operands, training=training, momentum=float(momentum), eps=float(eps))
    if not training:
        return results
    y, mean, variance = results
    running_mean.copy_(mean.detach())
    running_var.copy_(variance.detach())
    return y


@operation
def _dropout(op: Writer, x: ir.Value, rng: ir.Value, *, p: float) -> Any:
    scale = op.node("DropoutScale", [op.Shape(x), op.constant(p), rng], domain="onnx_fuse")
    scale.dtype, scale.shape = ir.DataType.FLOAT, x.shape
    return op.Mul(x, op.CastLike(scale, x))


@_public
def dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """`x` with a share `p` of its elements 0 and the others divided by 1 - p, if `training`."""
    if not 0 <= p <= 1:
        raise UsageError(f"dropout's probability is {p}: it must be from 0 to 1")
    if not training or p == 0:
        return x
    if not is_float(x._data.dtype):  # which 1 / (1 - p) would be rounded for
        raise UsageError(f"dropout of a Tensor of {x._data.dtype.name}: take x.float()")
    if p == 1:
        return x * 0.0
    return _dropout(x, random.draw(), p=float(p))


@operation
def _attention(
    op: Writer, q: ir.Value, k: ir.Value, v: ir.Value, mask: Given, scale: Given, *, causal: bool
) -> Any:
    n = known_rank(k)
    order = [*range(n - 2), n - 1, n - 2]
    if scale is None:
        width = op.CastLike(op.Squeeze(op.Shape(q, start=-1), [0]), q)
        scale = op.Reciprocal(op.Sqrt(width))
    scores = op.MatMul(op.Mul(q, scale), op.Transpose(k, perm=order))
    if causal:
        rows, columns = op.Shape(q, start=n - 2, end=n - 1), op.Shape(k, start=n - 2, end=n - 1)
        ones = op.ConstantOfShape(op.Concat(rows, columns, axis=0), value=_ONE)
        later = op.Cast(op.Trilu(ones, op.constant(np.array(1)), upper=1), to=9)
        scores = op.Where(later, op.constant(-np.inf, q.dtype), scores)
    if mask is None:
        return op.MatMul(op.Softmax(scores, axis=-1), v)
    # a row that sees nothing is 0, as PyTorch's; its weights are numbers, for the gradients' sake
    last, hidden = op.constant([-1]), op.constant(-np.inf, q.dtype)
    if mask.dtype == ir.DataType.BOOL:
        blind = op.Not(op.Cast(op.ReduceMax(op.Cast(mask, to=6), last), to=9))
        scores = op.Where(op.Or(mask, blind), scores, hidden)
    else:
        blind = op.Equal(op.ReduceMax(mask, last), hidden)
        scores = op.Add(scores, op.Where(blind, op.CastLike(0.0, mask), mask))
    y = op.MatMul(op.Softmax(scores, axis=-1), v)
    return op.Where(blind, op.CastLike(0.0, y), y)


@_public
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(query · keyᵀ · scale + attn_mask) · value.

    Args:
        query: [..., L, E].
        key: [..., S, E].
        value: [..., S, V].
        attn_mask: Boolean, true where attention is allowed, or numbers that are added. A row of
            which it hides all is 0.
        dropout_p: It must be 0: apply `dropout` to the result instead.
        is_causal: Whether no row attends to a later column.
        scale: The factor on the scores; None is 1 / √E.

    Returns:
        A Tensor [..., L, V].
    """
    if dropout_p:
        raise UsageError("attention has no dropout: leave dropout_p at 0")
    factor = None if scale is None else np.array(scale, query.dtype)
    return _attention(query, key, value, attn_mask, factor, causal=bool(is_causal))


@_public
def split_heads(x: Tensor, heads: int) -> Tensor:
    """`x` [N, L, E] as [N, heads, L, E / heads]: a view."""
    parts: Tensor = op_call("Reshape", [x, [0, 0, heads, -1]])
    return parts.permute(0, 2, 1, 3)


@_public
def merge_heads(x: Tensor) -> Tensor:
    """`x` [N, heads, L, D] as [N, L, heads · D]."""
    return op_call("Reshape", [x.permute(0, 2, 1, 3), [0, 0, -1]])


# ---- losses: each takes the reduction "mean", "sum" or "none", which gives all losses ----------


@operation
def _loss(
    op: Writer, x: ir.Value, target: ir.Value, weight: Given, pos_weight: Given, *more: ir.Value,
    kind: str, names: tuple[str, ...], **options: object,
) -> Any:  # fmt: skip
    options |= {"weight": weight, "pos_weight": pos_weight, **dict(zip(names, more, strict=True))}
    return LOSSES[kind].build(op, x, target, options)


def _loss_of(kind: str, given: Mapping[str, Any], **options: Any) -> Tensor:
    """The loss `kind` of `ops.loss.LOSSES`, of a function's arguments and further options."""
    row = LOSSES[kind]
    tensors = ("x", "target", "weight", "pos_weight", *row.outputs, *row.lengths)
    x = given["x"]
    target, *weights = map(given.get, tensors[1:4])
    more = {name: given[name] for name in tensors[4:]}
    for name, value in given.items():
        if name not in tensors:
            options[name] = value if isinstance(value, int | str | None) else float(value)
    none = options["reduction"] == "none"
    if not none:
        row.check(kind, {"reduction": options["reduction"]})
    if not is_float(x._data.dtype):
        raise UsageError(f"the loss of a Tensor of {x._data.dtype.name}: take x.float()")
    if not 0 <= options.get("label_smoothing", 0) <= 1:
        raise UsageError(f"label_smoothing is from 0 to 1, not {options['label_smoothing']}")
    if options.get("delta", 1) <= 0:
        raise UsageError(f"delta is a number above 0, not {options['delta']}")
    sizes, labels = x._data.shape, row.labels
    if any(more[name]._data.shape != sizes for name in row.outputs):
        raise UsageError("the embeddings that this loss compares are of one shape")
    if target is not None and labels == "sequence":
        within(target, sizes[-1], besides=-100)
        sizes = sizes[1:]  # without steps, labels are impossible, and no labels are certain
    elif target is not None and labels == "classes":
        axis = class_axis(len(sizes), {})
        sizes = sizes[:axis] + sizes[axis + 1 :]
        within(target, besides=options["ignore_index"])
    elif labels == "rows":
        sizes = sizes[:1]
    if target is not None and labels != "sequence" and kind not in ("mse", "l1", "huber"):
        if target._data.shape != sizes:
            raise UsageError(f"the target of this loss is of shape {[*sizes]}, as x says")
        if MODE.recorder is not None:
            MODE.recorder.equal_sizes = True
    if 0 in sizes and none:
        return x.sum().expand(*sizes[: min(2, x.ndim - 1)] if kind == "dice" else sizes)
    if 0 in sizes:
        return x.sum() / 0.0 if options["reduction"] != "sum" else x.sum()
    return _loss(x, target, *weights, *more.values(), kind=kind, names=(*more,), **options)


@_public
def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """-log softmax(x)[target] of all rows, as `reduction` says.

    Args:
        x: Scores [N, C], [N, T, C] or [N, C, H, W].
        target: Class numbers (int64) of that shape without C.
        weight: A factor for each class, [C].
        ignore_index: The class number of rows that do not count.
        label_smoothing: The share of the target that is spread over all classes.
        reduction: "mean", "sum", or "none" for the losses in the shape of `target`.
    """
    return _loss_of("cross_entropy", locals())


@_public
def nll_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """-x[target] for logarithms of probabilities `x`; the arguments of `cross_entropy`.

    These are `target`, `weight`, `ignore_index` and `reduction`.
    """
    return _loss_of("nll", locals())


@_public
def mse_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """(x - target)², `reduction` being mean, sum or none."""
    return _loss_of("mse", locals())


@_public
def l1_loss(x: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    """|x - target|, `reduction` being mean, sum or none."""
    return _loss_of("l1", locals())


@_public
def huber_loss(x: Tensor, target: Tensor, delta: float = 1.0, reduction: str = "mean") -> Tensor:
    """½ d² for d = |x - target| up to `delta`, linear beyond; `reduction` is mean, sum or none."""
    return _loss_of("huber", locals())


@_public
def binary_cross_entropy_with_logits(
    x: Tensor, target: Tensor, pos_weight: Tensor | None = None, reduction: str = "mean"
) -> Tensor:
    """-target log σ(x) - (1 - target) log(1 - σ(x)), `reduction` being mean, sum or none.

    `pos_weight` is a factor on the first term.
    """
    return _loss_of("bce_with_logits", locals())


@_public
def focal_loss(
    x: Tensor, target: Tensor, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "mean"
) -> Tensor:
    """The binary cross-entropy of scores `x`, times (1 - p)^gamma of the label's probability p.

    The term of `target` has the factor `alpha`, the other 1 - alpha; `reduction` is mean, sum or
    none.
    """
    return _loss_of("focal", locals())


@_public
def dice_loss(x: Tensor, target: Tensor, smooth: float = 1.0, reduction: str = "mean") -> Tensor:
    """1 - (2 Σ p t + smooth) / (Σ p + Σ t + smooth), for p = σ(x) and t = `target`.

    The sums are over what follows the first two axes, or the first; `reduction` is over the rest.
    """
    return _loss_of("dice", locals())


@_public
def hinge_loss(x: Tensor, target: Tensor, margin: float = 1.0, reduction: str = "mean") -> Tensor:
    """max(0, margin - target x) for a `target` of 1 and -1, `reduction` being mean, sum or none."""
    return _loss_of("hinge", locals())


@_public
def multi_margin_loss(
    x: Tensor, target: Tensor, p: int = 1, margin: float = 1.0, reduction: str = "mean"
) -> Tensor:
    """Σ max(0, `margin` - x[target] + x[c])^p / C over classes c but the `target`.

    `x` is [N, C], `p` 1 or 2; `reduction` (mean, sum or none) is over N.
    """
    return _loss_of("multi_margin", locals(), ignore_index=-100)


@_public
def kl_div(x: Tensor, target: Tensor, reduction: str = "mean", log_target: bool = False) -> Tensor:
    """target (log target - x) of logarithms `x` of probabilities, reduced by `reduction`.

    That is mean, batchmean (the sum over the rows' number), sum or none. With `log_target` the
    target is logarithms, too.
    """
    return _loss_of("kl_div", locals())


@_public
def poisson_nll_loss(
    x: Tensor,
    target: Tensor,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Tensor:
    """exp(x) - target x, or x - target log(x + `eps`) where not `log_input`.

    `full` adds Stirling's formula of log target! where that is above 1; `reduction` is mean, sum
    or none.
    """
    return _loss_of("poisson_nll", locals())


@_public
def cosine_embedding_loss(
    x: Tensor, other: Tensor, target: Tensor, margin: float = 0.0, reduction: str = "mean"
) -> Tensor:
    """1 - cos(x, other) where `target` [N] is 1, max(0, cos - `margin`) where it is -1.

    `x` and `other` are [N, D]; `reduction` is mean, sum or none.
    """
    return _loss_of("cosine_embedding", locals())


@_public
def triplet_margin_loss(
    x: Tensor,
    positive: Tensor,
    negative: Tensor,
    margin: float = 1.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """max(0, |x - `positive` + eps| - |x - `negative` + eps| + `margin`) of rows [N, D].

    With `swap`, the distance of positive and negative counts where it is less; `eps` keeps a
    distance from 0, and `reduction` is mean, sum or none.
    """
    return _loss_of("triplet", locals())


@_public
def contrastive_loss(
    x: Tensor,
    other: Tensor,
    temperature: float = 0.07,
    symmetric: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """InfoNCE: the cross-entropy of cos(x, other) / `temperature`, in which row i belongs to row i.

    `x` and `other` are [N, D]. `symmetric` takes the mean with that of `other` by `x`; `reduction`
    is mean, sum or none.
    """
    return _loss_of("contrastive", locals())


@_public
def ctc_loss(
    x: Tensor,
    target: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """-log p(target) of scores [T, N, C], summed over all ways to spread labels over time.

    Args:
        x: Scores, or logarithms of probabilities.
        target: Class numbers [N, S], filled up with any class or -100.
        input_lengths: The steps of each sequence, [N].
        target_lengths: The labels of each sequence, [N].
        blank: The class between labels.
        reduction: "mean" of each loss over its number of labels, "sum", or "none": [N] losses.
        zero_infinity: Whether a sequence without any way counts 0, not inf.
    """
    return _loss_of("ctc", locals(), time_major=True)


# ---- putting together --------------------------------------------------------------------------


@_public
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`tensors` one after the other along axis `dim`."""
    axis = axis_of(dim, tensors[0].ndim) if tensors else 0
    shapes = [t._data.shape for t in tensors]
    if len({(len(s), *s[:axis], *s[axis + 1 :]) for s in shapes}) > 1:
        raise UsageError(f"cat along axis {axis} needs sizes that are equal elsewhere: {shapes}")
    return op_call("Concat", list(tensors), {"axis": dim})


@_public
def einsum(equation: str, *tensors: Tensor) -> Tensor:
    """The sum of products of `tensors` that `equation` writes, as "ij,jk->ik"."""
    return operators.einsum(*tensors, equation=equation)


@_public
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`tensors` of one shape along a new axis `dim`."""
    dim = axis_of(dim, tensors[0].ndim + 1)
    return cat([t.unsqueeze(dim) for t in tensors], dim)


@_public
def pad(x: Tensor, padding: Sequence[int], value: float = 0.0) -> Tensor:
    """`x` with `value` around it: `padding` is (before, after) of the last axis, then others."""
    if len(padding) % 2 or len(padding) > 2 * x.ndim:
        raise UsageError(f"pad takes (before, after) of up to {x.ndim} axes, not {len(padding)}")
    pairs = [tuple(padding[i : i + 2]) for i in range(0, len(padding), 2)][::-1]
    lead = [(0, 0)] * (x.ndim - len(pairs))
    sizes = [p[0] for p in (*lead, *pairs)] + [p[1] for p in (*lead, *pairs)]
    return op_call("Pad", [x, sizes, number_of(value, x.dtype)])


@_public
def one_hot(index: Tensor, num_classes: int) -> Tensor:
    """int64 vectors of `num_classes` entries, 1 at `index` and 0 elsewhere."""
    within(index, num_classes)
    return op_call("OneHot", [index, np.array(num_classes), [0, 1]])


where = _public(tensor.where)

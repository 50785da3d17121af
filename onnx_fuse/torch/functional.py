"""Fused functions of torch tensors: each is one operator of ours, with a fused gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from operator import index
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnx_fuse import rewrite, session
from onnx_fuse.autodiff import Emitter
from onnx_fuse.errors import UsageError, unknown
from onnx_fuse.ir.build import add_input
from onnx_fuse.ir.constants import CANONICAL_OPSET, FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.activations import BY_KEY
from onnx_fuse.ops.loss import LOSSES
from onnx_fuse.torch.eager import OWN, unwatched
from onnx_fuse.torch.graph import BUILDERS, OnnxGraph, built
from onnx_fuse.torch.host import DTYPES
from onnx_fuse.torch.library import Fused

ACTIVATIONS = tuple(BY_KEY)
"""The names that `activation` may have."""
_ONNX = {kind: dtype for dtype, kind in DTYPES.items()}
_ATTENTION_OPSET = 24


class _Sketch:
    """A graph while it is built: `op` emits nodes, `input` adds an input."""

    def __init__(self, dtype: str, opset: int = CANONICAL_OPSET) -> None:
        imports = {"": opset, FUSE: 1}
        self._graph = ir.Graph([], [], nodes=[], opset_imports=imports, name="function")
        self._model = ir.Model(self._graph, ir_version=10)
        self.op = Emitter(self._model)
        self.dtype = ir.DataType[dtype]

    def input(self, name: str, *shape: int | str, dtype: ir.DataType | None = None) -> ir.Value:
        return add_input(self._graph, name, dtype or self.dtype, shape)

    def weight(self, transposed: str = "0") -> ir.Value:
        """torch's weight [N, K], or one `transposed` already, as the product's operand [K, N]."""
        if transposed == "1":
            return self.input("weight", "K", "N")
        turned: ir.Value = self.op.Transpose(self.input("weight", "N", "K"), perm=[1, 0])
        return turned

    def bias(self, there: bool) -> ir.Value:
        """The bias, or -0.0, which changes no sum."""
        if there:
            return self.input("bias", "N")
        zero: ir.Value = self.op.constant(np.full(1, -0.0, self.dtype.numpy()))
        return zero

    def graph(self, key: str, y: ir.Value, *shape: int | str, rows: bool = False) -> OnnxGraph:
        """The finished graph, with `y` as its only output; `rows` is the Graph's."""
        y.name, y.shape = "y", ir.Shape(shape)
        self._graph.extend(self.op.nodes)
        self._graph.outputs.append(y)
        model = session.load(self._model)
        rewrite.optimize(model, training=True)
        return OnnxGraph(key, model, rows=rows)


@cache
def _attention_graph(
    dtype: str, heads: str, groups: str, width: str, causal: str, scale: str, mask: str
) -> OnnxGraph:
    """`mask` is "", or its element type and axes such as "BOOL 11ST"."""
    sketch = _Sketch(dtype, _ATTENTION_OPSET)
    q = sketch.input("q", "B", int(heads), "S", int(width))
    k = sketch.input("k", "B", int(groups), "T", int(width))
    v = sketch.input("v", "B", int(groups), "T", "E")
    inputs = [q, k, v]
    if mask:
        kind, _, axes = mask.partition(" ")
        sizes = {"1": 1, "H": int(heads)}
        shape = [sizes.get(a, a) for a in axes]
        inputs.append(sketch.input("mask", *shape, dtype=ir.DataType[kind]))
    factor = float.fromhex(scale) if scale else 1 / math.sqrt(int(width))
    y = sketch.op.Attention(*inputs, is_causal=int(causal), scale=factor)
    key = built("attention", dtype, heads, groups, width, causal, scale, mask)
    return sketch.graph(key, y, "B", int(heads), "S", "E")


@cache
def _linear_cross_entropy_graph(
    dtype: str, wide: str, ignore_index: str, smoothing: str, reduction: str, bias: str
) -> OnnxGraph:
    sketch = _Sketch(dtype)
    x = sketch.input("x", "M", "K")
    w, c = sketch.weight(), sketch.bias(bias == "1")
    labels = sketch.input("target", "M", dtype=ir.DataType.INT64)
    op = sketch.op
    logits = op.node("Gemm", [x, w, c], domain=FUSE)
    logits.shape = ir.Shape(["M", "N"])
    narrow = sketch.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    if narrow:  # sums of exponentials want more bits
        logits = op.Cast(logits, to=int(ir.DataType.FLOAT))
    options = {
        "ignore_index": int(ignore_index),
        "label_smoothing": float.fromhex(smoothing),
        "reduction": reduction,
    }
    loss = LOSSES["cross_entropy"].build(op, logits, labels, options)
    if narrow and wide == "0":
        loss = op.Cast(loss, to=int(sketch.dtype))
    key = built("linear_cross_entropy", dtype, wide, ignore_index, smoothing, reduction, bias)
    return sketch.graph(key, loss, *(["M"] if reduction == "none" else []))


BUILDERS.update(attention=_attention_graph, linear_cross_entropy=_linear_cross_entropy_graph)


# ---- torch's own operators, for CPU tensors ---------------------------------------------------


_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda z: z,
    "relu": F.relu,
    "clipped_relu": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "silu": F.silu,
    "mish": F.mish,
    "sigmoid": torch.sigmoid,
    "hard_sigmoid": lambda z: (0.2 * z + 0.5).clamp(0, 1),  # torch's own has a slope of 1/6
    "hard_swish": F.hardswish,
    "tanh": torch.tanh,
    "softplus": F.softplus,
}


def _torch_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, transposed: bool
) -> Tensor:
    return _TORCH[activation](F.linear(x, weight.t() if transposed else weight, bias))


def _torch_layernorm_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> Tensor:
    ln_weight, ln_bias, eps, *rest = more
    rows = F.layer_norm(x, x.shape[-1:], ln_weight, ln_bias, eps)
    return _torch_linear(rows, weight, bias, *rest)


def _torch_rms_norm_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> Tensor:
    norm_weight, eps, *rest = more
    return _torch_linear(F.rms_norm(x, x.shape[-1:], norm_weight, eps), weight, bias, *rest)


def _torch_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any
) -> Tensor:
    ignore_index, smoothing, reduction, wide = options
    logits = F.linear(x, weight, bias).flatten(0, -2)
    kind = logits.dtype
    narrow = kind in (torch.float16, torch.bfloat16)
    loss = F.cross_entropy(
        logits.float() if narrow else logits, target, ignore_index=ignore_index,
        label_smoothing=smoothing, reduction=reduction,
    )  # fmt: skip
    return loss.to(kind) if narrow and not wide else loss


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    if mask is not None and causal:  # torch takes one of them
        earlier = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        mask = mask & earlier if mask.dtype == torch.bool else mask.masked_fill(~earlier, -math.inf)
        causal = False

    def attend() -> Tensor:
        grouped = index(q.shape[1]) != index(k.shape[1])
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )

    # torch's flash kernel has no tangents, and makes zeros of a row whose scores are all NaN
    if not torch._C._are_functorch_transforms_active():
        y = attend()
        if not unwatched() or type(y) not in OWN or y.detach()[..., :1].all():
            return y
    with sdpa_kernel(SDPBackend.MATH):
        return attend()


# ---- operators -------------------------------------------------------------------------------


def _dtype(kind: torch.dtype) -> str:
    if not kind.is_floating_point or kind not in _ONNX:
        raise UsageError(f"there is no fused function of {kind}")
    return _ONNX[kind].name


def _exact(number: float) -> str:
    """A number in a key; torch.compile makes a constant of it by this method alone."""
    return float(number).hex()


def _flag(value: object) -> str:
    return "0" if value is None or value is False else "1"


def _product(name: str, as_torch: Callable[..., Tensor], norm: str, *affine: str) -> Fused:
    """act(linear(norm(x))), whose norm has these parameters."""

    @cache
    def graph(dtype: str, *options: str) -> OnnxGraph:
        *epsilon, activation, bias, transposed = options
        sketch = _Sketch(dtype)
        x = sketch.input("x", "M", "K")
        w, c = sketch.weight(transposed), sketch.bias(bias == "1")
        scales = [sketch.input(each, "K") for each in affine]
        act = BY_KEY[activation].name if activation else ""
        attributes: dict[str, Any] = {"epsilon": float.fromhex(epsilon[0])} if epsilon else {}
        if norm == "RMSNorm" and dtype == "DOUBLE":
            attributes["stash_type"] = int(ir.DataType.DOUBLE)
        y = sketch.op.node(
            str(FusedName.make("Gemm", act, norm=norm)), [x, *scales, w, c], domain=FUSE,
            attributes=attributes,
        )  # fmt: skip
        return sketch.graph(built(name, dtype, *options), y, "M", "N", rows=True)

    def parts(x: Tensor, weight: Tensor, bias: Tensor | None, *more: Any) -> tuple[str, ...]:
        *epsilon, activation, transposed = more[len(affine) :]
        return _dtype(x.dtype), *map(_exact, epsilon), activation, _flag(bias), _flag(transposed)

    BUILDERS[name] = graph
    return Fused(name, 3 + len(affine), 2, parts, as_torch, flat=2, rows=True)


_LAYERNORM_LINEAR = _product(
    "layernorm_linear", _torch_layernorm_linear, "LayerNorm", "ln_weight", "ln_bias"
)
_RMS_NORM_LINEAR = _product("rms_norm_linear", _torch_rms_norm_linear, "RMSNorm", "norm_weight")
_LINEAR_ACTIVATION = _product("linear_activation", _torch_linear, "")
_LINEAR_CROSS_ENTROPY = Fused(
    "linear_cross_entropy", 4, 2,
    lambda x, weight, bias, target, ignore_index, smoothing, reduction, wide: (
        _dtype(x.dtype), _flag(wide), str(index(ignore_index)), _exact(smoothing), reduction,
        _flag(bias),
    ),
    _torch_cross_entropy,
    flat=2,
)  # fmt: skip


def _attention_parts(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[str, ...]:
    mask_kind = ""
    if mask is not None:
        kind = ir.DataType.BOOL if mask.dtype == torch.bool else _ONNX[mask.dtype]
        axes = zip(mask.shape, "BHST", strict=True)
        mask_kind = f"{kind.name} {''.join('1' if size == 1 else axis for size, axis in axes)}"
    heads, groups, width = (str(index(n)) for n in (q.shape[1], k.shape[1], q.shape[-1]))
    factor = "" if scale is None else _exact(scale)
    return _dtype(q.dtype), heads, groups, width, _flag(causal), factor, mask_kind


_ATTENTION = Fused("attention", 4, 3, _attention_parts, _torch_attention)


# ---- functions -------------------------------------------------------------------------------


def check_activation(name: str | None) -> str | None:
    """The name. Raises UsageError where there is no such activation."""
    if name is not None and name not in BY_KEY:
        raise UsageError(unknown("activation", name, BY_KEY))
    return name


def _activation(name: str | None) -> str:
    return "" if name is None else check_activation(name) or ""


def _autocast(*tensors: Any) -> Sequence[Any]:
    """The tensors in the type of an autocast region, where one is active; others as they are."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    kind = torch.get_autocast_dtype(device)
    return [
        x.to(kind) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    ]


def fused_layernorm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ln_weight: Tensor | None,
    ln_bias: Tensor | None,
    eps: float = 1e-5,
    activation: str | None = None,
    *,
    transposed: bool = False,
) -> Tensor:
    """act(linear(layer_norm(x))), in one operator forward and one backward.

    Args:
        x: [..., K], float32, float64, float16 or bfloat16; contiguous, or it is copied.
        weight: [N, K], as nn.Linear has it, of x's type.
        bias: [N], or None.
        ln_weight, ln_bias: [K], or None for 1 and 0.
        eps: What is added to the variance.
        activation: None, or a name such as "relu", "gelu", "gelu_tanh" or "silu" (`ACTIVATIONS`).
        transposed: Whether weight is [K, N], as GPT-2's Conv1D has it.

    Returns:
        [..., N] of x's type; in an autocast region of its type.

    Raises:
        ValueError: Sizes or types do not fit each other.
        UsageError: There is no such activation, or no kernel for x's type.
    """
    ln_weight = x.new_ones(x.shape[-1:]) if ln_weight is None else ln_weight
    ln_bias = x.new_zeros(x.shape[-1:]) if ln_bias is None else ln_bias
    name = "" if activation is None else _activation(activation)
    if torch._C._is_any_autocast_enabled():
        tensors = _autocast(x, weight, bias, ln_weight, ln_bias)
        return _LAYERNORM_LINEAR(*tensors, eps, name, transposed)
    return _LAYERNORM_LINEAR(x, weight, bias, ln_weight, ln_bias, eps, name, transposed)


def rms_norm_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    eps: float | None = None,
    activation: str | None = None,
    *,
    transposed: bool = False,
) -> Tensor:
    """act(linear(rms_norm(x))), in one operator forward and one backward.

    Args:
        x, weight, bias, activation, transposed: As in `fused_layernorm_linear`.
        norm_weight: [K], or None for 1.
        eps: What is added to the mean square; None is the machine epsilon of x's type.

    Returns:
        [..., N] of x's type; in an autocast region of its type.

    Raises:
        ValueError, UsageError: As in `fused_layernorm_linear`.
    """
    norm_weight = x.new_ones(x.shape[-1:]) if norm_weight is None else norm_weight
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    tensors = _autocast(x, weight, bias, norm_weight)
    return _RMS_NORM_LINEAR(*tensors, eps, _activation(activation), transposed)


def linear_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    transposed: bool = False,
) -> Tensor:
    """act(linear(x)), in one operator forward and one backward.

    Args:
        x, weight, bias, activation, transposed: As in `fused_layernorm_linear`.

    Returns:
        [..., N] of x's type; in an autocast region of its type.

    Raises:
        ValueError, UsageError: As in `fused_layernorm_linear`.
    """
    return _LINEAR_ACTIVATION(*_autocast(x, weight, bias), _activation(activation), transposed)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale q kᵀ + mask) v, without the scores in memory on a GPU.

    Args:
        q: [B, H, S, D].
        k: [B, G, T, D]; where G divides H, each head of k and v serves H / G heads of q.
        v: [B, G, T, E].
        mask: Up to four axes that broadcast to [B, H, S, T]: bool, where False hides a key, or of
            q's type, which is added. A query that sees no key gets zeros.
        causal: Query i sees keys 0 to i alone.
        scale: A number other than 0; the default is 1 / √D.

    Returns:
        [B, H, S, E] of q's type; in an autocast region of its type.

    Raises:
        ValueError: Sizes or types do not fit each other.
    """
    if scale == 0:
        raise ValueError("a scale of 0 takes the mean of v: v.mean(2) does")
    if q.dim() != 4 or q.shape[1] % max(k.shape[1], 1):
        raise ValueError(
            f"q {list(q.shape)} and k {list(k.shape)} are not [batch, heads, rows, width] with "
            "heads of q a multiple of those of k"
        )
    q, k, v, mask = _autocast(q, k, v, mask)
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return _ATTENTION(q, k, v, mask, causal, scale)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """cross_entropy(linear(x), target), in float32 from logits of 16 bits on.

    The logits [M, C] are in memory once, for the backward too.

    Args:
        x: [..., K].
        weight: [C, K], of x's type.
        target: int64 [...], class numbers.
        bias: [C], or None.
        ignore_index: The class number that does not count.
        label_smoothing: The share of the target that is spread over all classes.
        reduction: "mean", "sum", or "none" for a loss of each row.

    Returns:
        A scalar, or target's shape for "none", of x's type; float32 in an autocast region.

    Raises:
        ValueError: Sizes or types do not fit each other.
        UsageError: There is no such reduction.
    """
    if reduction not in ("mean", "sum", "none") or (reduction == "none" and label_smoothing):
        raise UsageError(
            f"reduction '{reduction}' is not mean, sum or (without label_smoothing) none"
        )
    wide = torch.is_autocast_enabled(x.device.type)
    x, weight, bias = _autocast(x, weight, bias)
    options = (ignore_index, float(label_smoothing), reduction, wide)
    loss = _LINEAR_CROSS_ENTROPY(x, weight, bias, target.reshape(-1), *options)
    return loss.reshape(target.shape) if reduction == "none" else loss

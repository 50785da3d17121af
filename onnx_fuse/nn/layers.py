"""Layers, with PyTorch's names, arguments, layouts and initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnx_fuse.errors import UsageError
from onnx_fuse.nn import functional as F
from onnx_fuse.nn import random
from onnx_fuse.nn.module import Module, Parameter
from onnx_fuse.nn.tensor import Tensor

__all__ = [
    "GELU",
    "BCEWithLogitsLoss",
    "BatchNorm2d",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "Flatten",
    "Identity",
    "LayerNorm",
    "Linear",
    "MSELoss",
    "MaxPool2d",
    "MultiheadAttention",
    "RMSNorm",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
]
__dir__ = __all__.copy


def _uniform(bound: float, *shape: int) -> Parameter:
    numbers = random.generator().uniform(-bound, bound, shape)
    return Parameter(numbers.astype(np.float32))


def _filled(value: float, *shape: int) -> Parameter:
    return Parameter(np.full(shape, value, np.float32))


class Linear(Module):
    """y = x · weightᵀ + bias, with weight [out_features, in_features].

    Args:
        in_features: The size of the last axis of x.
        out_features: That of y.
        bias: Whether there is a bias.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        bound = 1 / math.sqrt(in_features) if in_features else 0.0
        self.weight = _uniform(bound, out_features, in_features)
        self.bias = _uniform(bound, out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class LayerNorm(Module):
    """(x - mean) / √(variance + eps) · weight + bias over the last axes.

    Args:
        normalized_shape: The sizes of these axes.
        eps: What keeps the root from 0.
        elementwise_affine: Whether there are a weight and a bias.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
    ) -> None:
        one = isinstance(normalized_shape, int)
        self.normalized_shape: tuple[int, ...] = (
            (normalized_shape,) if one else tuple(normalized_shape)  # type: ignore[assignment, arg-type]
        )
        self.eps = eps
        self.weight = _filled(1.0, *self.normalized_shape) if elementwise_affine else None
        self.bias = _filled(0.0, *self.normalized_shape) if elementwise_affine else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(Module):
    """x / √(mean(x²) + eps) · weight over the last axis.

    Args:
        normalized_shape: The size of this axis.
        eps: What keeps the root from 0.
    """

    def __init__(self, normalized_shape: int, eps: float = 1e-5) -> None:
        self.eps = eps
        self.weight = _filled(1.0, normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight, self.eps)


class Embedding(Module):
    """A vector for each number.

    Args:
        num_embeddings: How many numbers there are.
        embedding_dim: The size of a vector.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        numbers = random.generator().standard_normal((num_embeddings, embedding_dim), np.float32)
        self.weight = Parameter(numbers)

    def forward(self, index: Tensor) -> Tensor:
        """The vectors of `index` (int64)."""
        return F.embedding(index, self.weight)


class Conv2d(Module):
    """The convolution of [N, in_channels, H, W], with weight [out, in / groups, kH, kW].

    Args:
        in_channels: The channels of the input.
        out_channels: Those of the result.
        kernel_size: One number, or one for each of H and W; so are the next three.
        stride: The step of the windows.
        padding: The zeros around the input.
        dilation: The step within a window.
        groups: The number of groups that do not see each other's channels.
        bias: Whether there is a bias.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
    ) -> None:
        size = [kernel_size] * 2 if isinstance(kernel_size, int) else list(kernel_size)
        bound = 1 / math.sqrt(in_channels // groups * math.prod(size))
        self.weight = _uniform(bound, out_channels, in_channels // groups, *size)
        self.bias = _uniform(bound, out_channels) if bias else None
        self.options: dict[str, Any] = {
            "stride": stride,
            "padding": padding,
            "dilation": dilation,
            "groups": groups,
        }

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, **self.options)


class BatchNorm2d(Module):
    """Each channel of [N, C, H, W] normalized by the batch, and by running statistics in `eval`.

    Args:
        num_features: The number of channels.
        eps: What keeps the root from 0.
        momentum: The share by which the running statistics move to those of a batch.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        self.eps, self.momentum = eps, momentum
        self.weight, self.bias = _filled(1.0, num_features), _filled(0.0, num_features)
        self.running_mean = Tensor(np.zeros(num_features, np.float32))
        self.running_var = Tensor(np.ones(num_features, np.float32))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        )


class MultiheadAttention(Module):
    """Attention of several heads, with PyTorch's packed `in_proj_weight` [3 E, E].

    Inputs and results are [N, L, E] (PyTorch's batch_first=True).

    Args:
        embed_dim: The size E of a vector.
        num_heads: The number of heads, a divisor of E.
        bias: Whether the linear layers have biases.
    """

    def __init__(self, embed_dim: int, num_heads: int, bias: bool = True) -> None:
        if embed_dim % num_heads:
            raise UsageError(f"{num_heads} heads do not divide {embed_dim} features")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.in_proj_weight = _uniform(math.sqrt(6 / (4 * embed_dim)), 3 * embed_dim, embed_dim)
        self.in_proj_bias = _filled(0.0, 3 * embed_dim) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias)
        if bias:
            self.out_proj.bias = _filled(0.0, embed_dim)

    def _heads(self, x: Tensor) -> Tensor:
        return F.split_heads(x, self.num_heads)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attention of `query` over `key` and `value`, which are the query where they are None.

        `attn_mask` and `is_causal` are those of `scaled_dot_product_attention`.
        """
        if key is None and value is None:
            parts = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            key = query if key is None else key
            weights = self.in_proj_weight.chunk(3)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            inputs = (query, key, key if value is None else value)
            parts = tuple(F.linear(*each) for each in zip(inputs, weights, biases, strict=True))
        q, k, v = (self._heads(part) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal)
        return self.out_proj(F.merge_heads(y))


class Dropout(Module):
    """In training a share of the elements is 0, and the others are divided by the rest.

    Args:
        p: The share.
    """

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)


class Identity(Module):
    """A module that returns its input."""

    def forward(self, x: object) -> Any:
        return x


class Flatten(Module):
    """The axes from `start_dim` to `end_dim` made one.

    Args:
        start_dim: The first of these axes.
        end_dim: The last of them.
    """

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(self.start_dim, self.end_dim)


class MaxPool2d(Module):
    """The largest element of each window of [N, C, H, W].

    Args:
        kernel_size: The size of a window: one number, or one for each of H and W.
        stride: The step of the windows; None is their size.
        padding: What is added around the input.
    """

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
    ) -> None:
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, self.kernel_size, self.stride, self.padding)


class ReLU(Module):
    """The larger of x and 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class GELU(Module):
    """x P(X < x) for a normal X.

    Args:
        approximate: "none", or "tanh" for the approximation by it.
    """

    def __init__(self, approximate: str = "none") -> None:
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, self.approximate)


class SiLU(Module):
    """x · sigmoid(x) of each element."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class Sigmoid(Module):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid()


class Tanh(Module):
    """The hyperbolic tangent of each element."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class Softmax(Module):
    """exp(x) / Σ exp(x) along an axis.

    Args:
        dim: The axis.
    """

    def __init__(self, dim: int = -1) -> None:
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(self.dim)


class CrossEntropyLoss(Module):
    """`functional.cross_entropy` with its options.

    Args:
        **options: weight, ignore_index, label_smoothing and reduction.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss of scores `x` for the classes `target`."""
        return F.cross_entropy(x, target, **self.options)


class MSELoss(Module):
    """The squared error.

    Args:
        reduction: "mean", "sum" or "none".
    """

    def __init__(self, reduction: str = "mean") -> None:
        self.reduction = reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss of `x` against `target`."""
        return F.mse_loss(x, target, self.reduction)


class BCEWithLogitsLoss(Module):
    """`functional.binary_cross_entropy_with_logits` with its options.

    Args:
        **options: pos_weight and reduction.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss of scores `x` for the labels `target` (0 to 1)."""
        return F.binary_cross_entropy_with_logits(x, target, **self.options)

"""Modules of the fused functions, in the shapes and names of torch's own."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from onnx_fuse.errors import UsageError
from onnx_fuse.torch.functional import (
    check_activation,
    fused_layernorm_linear,
    linear_activation,
    linear_cross_entropy,
    rms_norm_linear,
)

M = TypeVar("M", bound="_NormLinear")


class LinearActivation(nn.Linear):
    """act(linear(x)): an nn.Linear with an activation, and with its state dict.

    Args:
        in_features, out_features, bias, device, dtype: As of nn.Linear.
        activation: A name of `functional.ACTIVATIONS`, or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: str | None = None,
        device: object = None,
        dtype: object = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.activation = check_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        """act(linear(x)) of x [..., in_features]."""
        return linear_activation(x, self.weight, self.bias, self.activation)

    def extra_repr(self) -> str:
        """What print shows of the module besides its class."""
        return f"{super().extra_repr()}, activation={self.activation}"


class _NormLinear(nn.Module):
    """A norm and a linear layer as one, with both as submodules `norm` and `linear`."""

    norm_type: ClassVar[Any]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        eps: float | None = None,
        activation: str | None = None,
        device: object = None,
        dtype: object = None,
    ) -> None:
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        linear = nn.Linear(in_features, out_features, bias, **where)
        where |= {} if eps is None else {"eps": eps}
        self._join(self.norm_type(in_features, **where), linear, activation)

    def _join(self, norm: nn.Module, linear: nn.Linear, activation: str | None) -> None:
        super().__init__()
        if tuple(norm.normalized_shape) != (linear.in_features,):
            raise UsageError(
                f"the norm is over {tuple(norm.normalized_shape)}, and the linear layer reads "
                f"{linear.in_features}: they must be the same last axis"
            )
        self.norm, self.linear = norm, linear
        self.activation = check_activation(activation)

    @classmethod
    def of(cls: type[M], norm: nn.Module, linear: nn.Linear, activation: str | None = None) -> M:
        """The module of `norm` and `linear`, whose parameters it shares, with an `activation`."""
        module = cls.__new__(cls)
        module._join(norm, linear, activation)
        return module

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: object, **more: object
    ) -> None:
        for number, name in (("0", "norm"), ("1", "linear")):  # as nn.Sequential calls them
            for key in [k for k in state_dict if k.startswith(f"{prefix}{number}.")]:
                state_dict[f"{prefix}{name}.{key[len(prefix) + 2 :]}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args, **more)

    def extra_repr(self) -> str:
        """What print shows of the module besides its class."""
        return f"activation={self.activation}"


class FusedLayerNormLinear(_NormLinear):
    """act(linear(layer_norm(x))) with the parameters of `norm` and `linear`.

    Its state dict is that of both under these names; that of an nn.Sequential of the two loads too.

    Args:
        in_features, out_features, bias, device, dtype: As of nn.Linear.
        eps: As of nn.LayerNorm.
        activation: A name of `functional.ACTIVATIONS`, or None.
    """

    norm_type = nn.LayerNorm

    def forward(self, x: Tensor) -> Tensor:
        """act(linear(layer_norm(x))) of x [..., in_features]."""
        norm, linear = self.norm, self.linear
        affine = (norm.weight, norm.bias, norm.eps, self.activation)
        return fused_layernorm_linear(x, linear.weight, linear.bias, *affine)


class RMSNormLinear(_NormLinear):
    """act(linear(rms_norm(x))) with the parameters of `norm` and `linear`.

    Its state dict is that of both under these names; that of an nn.Sequential of the two loads too.

    Args:
        in_features, out_features, bias, device, dtype: As of nn.Linear.
        eps: As of nn.RMSNorm.
        activation: A name of `functional.ACTIVATIONS`, or None.
    """

    norm_type = nn.RMSNorm

    def forward(self, x: Tensor) -> Tensor:
        """act(linear(rms_norm(x))) of x [..., in_features]."""
        norm, linear = self.norm, self.linear
        affine = (norm.weight, norm.eps, self.activation)
        return rms_norm_linear(x, linear.weight, linear.bias, *affine)


class LinearCrossEntropy(nn.Linear):
    """cross_entropy(linear(x), target): an nn.Linear with a loss, and with its state dict.

    Args:
        in_features, out_features, bias, device, dtype: As of nn.Linear.
        ignore_index, label_smoothing, reduction: As of nn.CrossEntropyLoss.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        device: object = None,
        dtype: object = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.reduction = reduction

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """The loss of x [..., in_features] and the class numbers `target` [...]."""
        return linear_cross_entropy(
            x, self.weight, target, bias=self.bias, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing, reduction=self.reduction,
        )  # fmt: skip

"""Fused operators and imported graphs in PyTorch: functions, modules, and what swaps them in."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError("onnx_fuse.torch needs PyTorch: pip install torch", name="torch")

from onnx_fuse.torch.functional import (
    attention,
    fused_layernorm_linear,
    linear_activation,
    linear_cross_entropy,
    rms_norm_linear,
)
from onnx_fuse.torch.fuse import Candidate, explain, fuse
from onnx_fuse.torch.imported import OnnxModule, from_onnx
from onnx_fuse.torch.modules import (
    FusedLayerNormLinear,
    LinearActivation,
    LinearCrossEntropy,
    RMSNormLinear,
)

__all__ = [
    "Candidate",
    "FusedLayerNormLinear",
    "LinearActivation",
    "LinearCrossEntropy",
    "OnnxModule",
    "RMSNormLinear",
    "attention",
    "explain",
    "from_onnx",
    "fuse",
    "fused_layernorm_linear",
    "linear_activation",
    "linear_cross_entropy",
    "rms_norm_linear",
]


def __dir__() -> list[str]:
    return sorted(__all__)

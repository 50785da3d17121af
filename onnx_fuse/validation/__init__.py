"""Compare fused models with their originals: outputs, gradients, and the nodes that differ."""

from __future__ import annotations

import onnx_fuse.ir  # noqa: F401  # it imports onnx_ir without sympy
from onnx_fuse.validation.blame import Culprit
from onnx_fuse.validation.check import Check, validate
from onnx_fuse.validation.compare import Difference, Tolerance
from onnx_fuse.validation.gradients import GradientCheck, GradientError, check_gradients

__all__ = [
    "Check",
    "Culprit",
    "Difference",
    "GradientCheck",
    "GradientError",
    "Tolerance",
    "check_gradients",
    "validate",
]
__dir__ = __all__.copy

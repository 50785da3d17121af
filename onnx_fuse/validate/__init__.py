"""Fused against original under onnxruntime: outputs, gradients, and blame for a difference."""

from onnx_fuse.validate.check import validate as validate
from onnx_fuse.validate.gradients import check_gradients as check_gradients

"""Fuse, run, check, differentiate and train ONNX models.

`optimize` fuses a model, `InferenceSession` runs it, `validate` and `check_gradients` compare it
with its original, `gradient` appends its backward, `hvp` multiplies by a Hessian, `Trainer` (with
the optimizers of `optim`) fine-tunes it, `quantize` stores it in few bits, `generate` continues
prompts with a decoder, and `deploy.compile` writes a file that runs without a compiler. `nn` has
eager tensors and modules, of which `capture` makes models; `register_op` and `register_kernel` add
operators and kernels.
`backend` is the interface of onnx.backend; `torch` has fused operators and graphs for PyTorch.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # typing's own would take a third of this import
if TYPE_CHECKING:
    from typing import Any

    from onnx_fuse import backend as backend
    from onnx_fuse import deploy as deploy
    from onnx_fuse import nn as nn
    from onnx_fuse import plugins as plugins
    from onnx_fuse.api import gradient as gradient
    from onnx_fuse.api import hvp as hvp
    from onnx_fuse.api import load as load
    from onnx_fuse.api import optimize as optimize
    from onnx_fuse.errors import CheckFailed as CheckFailed
    from onnx_fuse.errors import DataError as DataError
    from onnx_fuse.errors import DeviceError as DeviceError
    from onnx_fuse.errors import ModelError as ModelError
    from onnx_fuse.errors import OnnxFuseError as OnnxFuseError
    from onnx_fuse.errors import UsageError as UsageError
    from onnx_fuse.generation.batcher import Batcher as Batcher
    from onnx_fuse.generation.generator import Generator as Generator
    from onnx_fuse.generation.generator import generate as generate
    from onnx_fuse.nn.graphs import capture as capture
    from onnx_fuse.nn.plans import plan as plan
    from onnx_fuse.ops.opdef import OpDef as OpDef
    from onnx_fuse.plugins import register_kernel as register_kernel
    from onnx_fuse.plugins import register_op as register_op
    from onnx_fuse.quantization.quantizer import quantize as quantize
    from onnx_fuse.replicas import Replicas as Replicas
    from onnx_fuse.session import InferenceSession as InferenceSession
    from onnx_fuse.training import callbacks as callbacks
    from onnx_fuse.training import metrics as metrics
    from onnx_fuse.training import optim as optim
    from onnx_fuse.training.adapters import Lora as Lora
    from onnx_fuse.training.trainer import Trainer as Trainer
    from onnx_fuse.validation import check_gradients as check_gradients
    from onnx_fuse.validation import validate as validate

__version__ = "0.1.0"

# Public name -> module; a name is imported when first used, so that `import onnx_fuse` is instant.
_NAMES = {
    "Batcher": "generation.batcher",
    "CheckFailed": "errors",
    "DataError": "errors",
    "DeviceError": "errors",
    "Generator": "generation.generator",
    "InferenceSession": "session",
    "Lora": "training.adapters",
    "ModelError": "errors",
    "OpDef": "ops.opdef",
    "OnnxFuseError": "errors",
    "Replicas": "replicas",
    "Trainer": "training.trainer",
    "UsageError": "errors",
    "capture": "nn.graphs",
    "check_gradients": "validation",
    "generate": "generation.generator",
    "gradient": "api",
    "hvp": "api",
    "load": "api",
    "optimize": "api",
    "plan": "nn.plans",
    "quantize": "quantization.quantizer",
    "register_kernel": "plugins",
    "register_op": "plugins",
    "validate": "validation",
}
_MODULES = {
    "backend": "backend",
    "callbacks": "training.callbacks",
    "deploy": "deploy",
    "metrics": "training.metrics",
    "nn": "nn",
    "optim": "training.optim",
    "plugins": "plugins",
}

__all__ = [*_NAMES, *_MODULES, "__version__"]
__dir__ = __all__.copy


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(f"onnx_fuse.{_NAMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES or name == "torch":  # which needs PyTorch, and so is not in __all__
        return importlib.import_module(f"onnx_fuse.{_MODULES.get(name, name)}")
    raise AttributeError(f"module 'onnx_fuse' has no attribute '{name}'")

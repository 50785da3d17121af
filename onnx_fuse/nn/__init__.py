"""Eager tensors, modules and optimizers over ONNX operators, and their capture into ONNX graphs.

Names follow PyTorch. Every operator is an ONNX operator: it runs at once, its gradient is the rule
of `onnx_fuse.gradient`, and `onnx_fuse.capture` makes one graph of what a function calls.
"""

from __future__ import annotations

from onnx_fuse.nn import creation, functional, layers, optim
from onnx_fuse.nn.creation import *  # noqa: F403 - the names of `creation.__all__`
from onnx_fuse.nn.dispatch import no_grad, op_call
from onnx_fuse.nn.functional import cat, stack, where
from onnx_fuse.nn.imported import ImportedModule, from_onnx
from onnx_fuse.nn.layers import *  # noqa: F403 - the names of `layers.__all__`
from onnx_fuse.nn.module import Module, ModuleDict, ModuleList, Parameter, Sequential, load, save
from onnx_fuse.nn.random import manual_seed, rand, randint, randn
from onnx_fuse.nn.tensor import Tensor, tensor

__all__ = [
    *creation.__all__,
    *layers.__all__,
    "ImportedModule",
    "Module",
    "ModuleDict",
    "ModuleList",
    "Parameter",
    "Sequential",
    "Tensor",
    "cat",
    "from_onnx",
    "functional",
    "load",
    "manual_seed",
    "no_grad",
    "op_call",
    "optim",
    "rand",
    "randint",
    "randn",
    "save",
    "stack",
    "tensor",
    "where",
]
__dir__ = __all__.copy

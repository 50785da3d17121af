"""The backward of an ONNX graph, as ONNX: one reverse walk over the rules of `ops`.

`backward` extends a model in place; `gradient` makes the file that `onnx-fuse gradient` writes;
`partition` makes a model of the forward and one of the backward.
"""

from __future__ import annotations

import onnx_fuse.ir  # noqa: F401  # it imports onnx_ir without sympy
from onnx_fuse.autodiff.emit import CombinesGradients, Emitter
from onnx_fuse.autodiff.model import (
    append_gradients,
    attach_loss,
    gradient,
    gradient_names,
    is_weight,
    only_measured,
    open_parameters,
    scales,
    trainable,
)
from onnx_fuse.autodiff.partition import Partition, partition
from onnx_fuse.autodiff.training_ops import expand_training_ops
from onnx_fuse.autodiff.walk import backward, without_gradient

__all__ = [
    "CombinesGradients",
    "Emitter",
    "Partition",
    "append_gradients",
    "attach_loss",
    "backward",
    "expand_training_ops",
    "gradient",
    "gradient_names",
    "is_weight",
    "only_measured",
    "open_parameters",
    "partition",
    "scales",
    "trainable",
    "without_gradient",
]

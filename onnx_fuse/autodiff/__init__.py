"""The backward of an ONNX graph, as ONNX: one reverse walk over the rules of `ops`.

`backward` extends a model in place; `gradient` makes the file that `onnx-fuse gradient` writes;
`partition` makes a model of the forward and one of the backward.
"""

from __future__ import annotations

import onnx_fuse.ir  # noqa: F401  # it imports onnx_ir without sympy
from onnx_fuse.autodiff.emit import CombinesGradients as CombinesGradients
from onnx_fuse.autodiff.emit import Emitter as Emitter
from onnx_fuse.autodiff.model import append_gradients as append_gradients
from onnx_fuse.autodiff.model import attach_loss as attach_loss
from onnx_fuse.autodiff.model import gradient as gradient
from onnx_fuse.autodiff.model import gradient_names as gradient_names
from onnx_fuse.autodiff.model import is_weight as is_weight
from onnx_fuse.autodiff.model import named_scalars as named_scalars
from onnx_fuse.autodiff.model import only_measured as only_measured
from onnx_fuse.autodiff.model import open_parameters as open_parameters
from onnx_fuse.autodiff.model import scales as scales
from onnx_fuse.autodiff.model import trainable as trainable
from onnx_fuse.autodiff.partition import Partition as Partition
from onnx_fuse.autodiff.partition import partition as partition
from onnx_fuse.autodiff.training_ops import expand_training_ops as expand_training_ops
from onnx_fuse.autodiff.walk import backward as backward
from onnx_fuse.autodiff.walk import without_gradient as without_gradient

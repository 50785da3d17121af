"""The operator table: importing this package fills `OPS`."""

from __future__ import annotations

from onnx_fuse.ops import (  # noqa: F401
    attention,
    collective,
    conv,
    elementwise,
    indexing,
    loss,
    matmul,
    norm,
    quantize,
    random,
    recurrent,
    reduce,
    rnn_scan,
    roi_align,
    shape,
    update,
)
from onnx_fuse.ops.opdef import OPS, GradRule, NoGrad, OpDef, lookup, register

__all__ = ["OPS", "GradRule", "NoGrad", "OpDef", "lookup", "register"]

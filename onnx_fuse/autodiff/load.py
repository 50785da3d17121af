"""The one loader: a model as every entry point gets it."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.autodiff.training_ops import expand_training_ops
from onnx_fuse.importer.load import file_faults, standard
from onnx_fuse.ir.build import rename_shadowing_values
from onnx_fuse.ir.constants import PREVIEW, Model


def load(source: Model) -> ir.Model:
    """The model of a path, bytes, ModelProto or ir.Model, as `importer.load.standard` reads it.

    The standard's training operators (Gradient, Adam, Adagrad, Momentum) are written out.
    Raises ModelError for anything that is not a valid model.
    """
    model = standard(source)
    with file_faults(source):
        if PREVIEW in model.graph.opset_imports:
            expand_training_ops(model)
        rename_shadowing_values(model.graph)
    return model

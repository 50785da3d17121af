"""ONNX files as modules."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnx_fuse import autodiff
from onnx_fuse.autodiff.load import load
from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import bind_defaults
from onnx_fuse.ir.constants import Model
from onnx_fuse.nn.dispatch import apply
from onnx_fuse.nn.module import Module, Parameter
from onnx_fuse.nn.operation import Operation
from onnx_fuse.nn.recorder import copied
from onnx_fuse.nn.tensor import Tensor
from onnx_fuse.rewrite.constants import lift_parameters


class ImportedModule(Module):
    """An ONNX graph as a module: its inputs are arguments in order, its weights parameters.

    A parameter's name is that of its initializer. The forward is fused as `optimize` does it, and
    the backward is that of `gradient`.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model. It is not changed.
        trainable: Whether float weights require gradients.
    """

    def __init__(self, model: Model, trainable: bool = True) -> None:
        graph_model = load(model)
        bind_defaults(graph_model)
        lift_parameters(graph_model, ())
        graph = graph_model.graph
        self.inputs = [str(v.name) for v in graph.inputs]
        self.outputs = [str(v.name) for v in graph.outputs]
        self._order: list[str] = []
        weights = set(autodiff.trainable(graph_model))
        for name, value in list(graph.initializers.items()):
            if value not in weights or not value.shape:
                continue
            assert value.const_value is not None
            array = value.const_value.numpy()
            vars(self)[name] = Parameter(np.array(array), requires_grad=trainable)
            self._order.append(name)
            del graph.initializers[name]
            value.const_value = None
            graph.inputs.append(value)
        self._operation = Operation(
            "an imported graph",
            copied(graph_model),
            opset=graph.opset_imports[""],
            domains={d: v for d, v in graph.opset_imports.items() if d},
            whole=len(self.inputs),
        )

    def forward(self, *args: object) -> Any:
        """The outputs (one Tensor, or a tuple) for `args`, Tensors in the order of the inputs."""
        if len(args) != len(self.inputs):
            wanted = ", ".join(self.inputs)
            raise UsageError(f"the graph has the inputs {wanted}: {len(args)} were given")
        tensors = [a if isinstance(a, Tensor) else Tensor(a) for a in args]
        return apply(self._operation, [*tensors, *(vars(self)[n] for n in self._order)])


def from_onnx(model: Model, trainable: bool = True) -> ImportedModule:
    """The graph of an ONNX file as a module, whose weights train if `trainable`.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model. It is not changed.
        trainable: Whether float weights require gradients.
    """
    return ImportedModule(model, trainable)

"""ONNX files of modules and of captured graphs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.importer.save import save
from onnx_fuse.importer.shapes import infer_shapes
from onnx_fuse.ir.names import Names
from onnx_fuse.nn.dispatch import MODE, no_grad
from onnx_fuse.nn.nested import names_of
from onnx_fuse.nn.recorder import Recorder
from onnx_fuse.nn.tensor import Tensor


def with_initializers(
    model: ir.Model,
    tensors: Sequence[Tensor],
    names: Mapping[int, str],
    shapes: Sequence[Sequence[int]] | None,
) -> ir.Model:
    """A copy of a captured graph whose last inputs, which are `tensors`, are initializers.

    `names` are those of tensors by identity; `shapes` fix the sizes of the first inputs.
    """
    model = model.clone()
    graph = model.graph
    first = len(graph.inputs) - len(tensors)
    for value, shape in zip(graph.inputs, shapes or (), strict=False):
        value.shape = ir.Shape(shape)
    values = list(graph.inputs[first:])
    del graph.inputs[first:]
    others = Names.of(graph)
    for value, tensor in zip(values, tensors, strict=True):
        value.name = others.fresh(names.get(id(tensor), str(value.name)))
        value.const_value = ir.Tensor(np.ascontiguousarray(np.asarray(tensor)).reshape(
            tensor._data.shape), name=value.name)  # fmt: skip
        graph.register_initializer(value)
    if shapes is not None:
        for node in graph:
            for value in node.outputs:
                value.shape = None
        infer_shapes(model)
    return model


def export(module: Any, path: str | os.PathLike[str], args: Sequence[Any]) -> None:
    """Write a module as an ONNX file: see `Module.export`."""
    tensors = [a if isinstance(a, Tensor) else Tensor(a) for a in args]
    recorder = Recorder(grad=False)
    names = names_of(module.forward, tensors, {})
    for tensor in tensors:
        recorder.argument(tensor, names.get(id(tensor), "x"))
    before = [(m, m.training) for m in module.modules()]
    MODE.recorder = recorder
    try:
        module.eval()
        with no_grad():
            result = module(*tensors)
    finally:
        MODE.recorder = None
        for inner, mode in before:
            inner.training = mode
    results = list(result) if isinstance(result, tuple | list) else [result]
    if not results or not all(isinstance(r, Tensor) for r in results):
        raise UsageError("only a module whose forward returns Tensors can be exported")
    outside = [t for t, _ in recorder.inputs]
    model = recorder.finished([recorder.value(r) for r in results], gpu=False)
    weight_names = {id(tensor): name for name, tensor in module._named()}
    shapes = [t._data.shape for t in tensors] if recorder.sizes else None
    model = with_initializers(model, outside, weight_names, shapes)
    for i, value in enumerate(model.graph.outputs):
        value.name = "output" if len(results) == 1 else f"output_{i}"
    save(model, path)

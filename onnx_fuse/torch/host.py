"""Graphs on torch tensors in host memory: onnxruntime reads and writes them where they are."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnx_fuse.importer.save import inline
from onnx_fuse.rewrite.precision import widened
from onnx_fuse.runtime import ort
from onnx_fuse.validation.reference import Reference

DTYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.BOOL: torch.bool,
}
"""Torch's names of the element types that both sides have."""
_NARROW = (torch.float16, torch.bfloat16)
_NUMPY = {kind: dtype.numpy() for dtype, kind in DTYPES.items() if kind not in _NARROW}
_NOWHERE = np.zeros(64, np.uint8)
"""Where tensors without elements stand, since onnxruntime refuses the address 0."""


class HostRunner:
    """A graph on onnxruntime's CPU.

    One with 16-bit floats is computed in float32, since onnxruntime lacks most of its kernels in 16
    bits; the results are rounded once. One in float64 that onnxruntime lacks a kernel for runs on
    NumPy, which is for checks alone.
    """

    def __init__(self, model: ir.Model) -> None:
        narrow = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        ends = (*model.graph.inputs, *model.graph.initializers.values(), *model.graph.outputs)
        if any(v.dtype in narrow for v in ends):
            model = widened(model, narrow, ir.DataType.FLOAT)
        self._evaluator: Reference | None = None
        with ort.faults("running a graph on the CPU"):
            try:
                self._session = ort.session(model)
            except Exception as error:
                if not ort.is_fault(error) or all(v.dtype != ir.DataType.DOUBLE for v in ends):
                    raise
                warnings.warn(
                    f"runs slowly, in NumPy: onnxruntime: {ort.plain(error)}",
                    stacklevel=2,
                )
                self._evaluator = Reference(inline(model))

    def run(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        tensors: Sequence[torch.Tensor],
        shapes: Sequence[tuple[int, ...] | None],
    ) -> list[torch.Tensor]:
        """The outputs. `inputs` and `outputs` are the graph's ends, with name and dtype.

        `shapes` are those of the outputs, None where the run itself tells.
        """
        if self._evaluator is not None:
            feeds = {end.name: t.numpy() for end, t in zip(inputs, tensors, strict=True)}
            values = self._evaluator.run([end.name for end in outputs], feeds)
            return [
                torch.from_numpy(np.array(y)).to(e.dtype)
                for y, e in zip(values, outputs, strict=True)
            ]
        binding = self._session.io_binding()
        tensors = [t.float() if t.dtype in _NARROW else t for t in tensors]  # alive until the end
        for end, tensor in zip(inputs, tensors, strict=True):
            shape, place = tuple(tensor.shape), tensor.data_ptr() or _NOWHERE.ctypes.data
            binding.bind_input(end.name, "cpu", 0, _NUMPY[tensor.dtype], shape, place)
        results: list[torch.Tensor] = []
        for end, static in zip(outputs, shapes, strict=True):
            dtype = torch.float32 if end.dtype in _NARROW else end.dtype
            result = torch.empty(static or (), dtype=dtype)
            results.append(result)
            if static is None:
                binding.bind_output(end.name, "cpu")
            else:
                place = result.data_ptr() or _NOWHERE.ctypes.data
                binding.bind_output(end.name, "cpu", 0, _NUMPY[dtype], static, place)
        with ort.faults("running a graph on the CPU"):
            self._session.run_with_iobinding(binding)
        if None in shapes:
            arrays = [value.numpy() for value in binding.get_outputs()]
            for i, static in enumerate(shapes):
                if static is None:
                    results[i] = torch.from_numpy(np.array(arrays[i]))
        return [r.to(end.dtype) for r, end in zip(results, outputs, strict=True)]

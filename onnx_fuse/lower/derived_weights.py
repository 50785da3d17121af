"""What lowering makes of the numbers of weights, once for all programs of a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Concatenated, required
from onnx_fuse.lower.context import Context
from onnx_fuse.lower.folds import Folds, Rows, RowsOfSeveral
from onnx_fuse.program.call import ColumnOrder, Tensor


class DerivedWeights(Context):
    """The part of a walk that knows weights, and keeps what is made of them in the graph."""

    model: ir.Model
    weight_folds: Folds
    packings: dict[str, Tensor]
    """What `packed` has made for this program, by name."""

    def folded(
        self,
        gamma: Tensor,
        beta: Tensor | None,
        w: Tensor,
        c: Tensor,
        trans: bool,
        order: ColumnOrder | None = None,
    ) -> dict[str, Tensor] | None:
        source = self.buffers[w.buffer]
        if w.dtype not in ("float16", "bfloat16") or source.kind != "weight":
            return None
        values = [self.known(t) for t in (gamma, beta, c) if t is not None]
        known, weights = [v for v in values if v is not None], self._rows(w)
        if weights is None or len(known) < len(values):
            return None
        g, *b, row = known
        row = row if order is None else order.of(row)
        small = b"".join(np.ascontiguousarray(v).tobytes() for v in (g, *b, row))
        way = w.shape, w.strides, w.offset, trans, len(b), order and order.name
        how = repr(way).encode()
        name = f"{source.name} folded {hashlib.sha256(small + how).hexdigest()[:16]}"
        initializer = self.model.graph.initializers.get(source.name)
        # an initializer's number, or what was made of one for this program and the next
        value = initializer.const_value if initializer is not None else self.constants[w.buffer]
        arrays = self.weight_folds.of(
            name, value, g, b[0] if b else None, weights, row, trans, order
        )
        if not arrays:
            return None  # a product beyond float16: it stays in the operand path
        tensors = {}
        for key, array in arrays.items():
            tensors[key] = self._buffer("weight", array.shape, array.dtype.name, f"{name} {key}")
            self.constants[tensors[key].buffer] = array
        return tensors

    def packed(
        self, tensor: Tensor, how: str, make: Callable[[np.ndarray], np.ndarray]
    ) -> Tensor | None:
        array = self.known(tensor)
        if array is None:
            return None
        source = self.buffers[tensor.buffer]
        if source.kind != "weight" or tensor.buffer in self.constants:
            return self.constant(make(array))
        name = f"{source.name} {how} {tensor.shape} {tensor.strides} {tensor.offset}"
        if name not in self.packings:
            cache = self.model.graph.meta.setdefault("packed", {})  # for the next shapes
            value = self.model.graph.initializers[source.name].const_value
            if name not in cache or cache[name][0] is not value:
                cache[name] = value, np.ascontiguousarray(make(array))
            packed = cache[name][1]
            weight = self._buffer("weight", packed.shape, packed.dtype.name, name)
            self.constants[weight.buffer] = packed
            self.packings[name] = weight
        return self.packings[name]

    def _rows(self, matrix: Tensor) -> Rows | None:
        """The rows of a matrix that is known; those of several beside each other are none yet."""
        initializer = self.model.graph.initializers.get(self.buffers[matrix.buffer].name)
        value = None if initializer is None else initializer.const_value
        if isinstance(value, Concatenated) and value.axis == 1 and self.lasting(matrix):
            whole = matrix.dense and matrix.shape == value.shape.numpy()
            if whole and (apart := value.apart):
                return RowsOfSeveral(apart)
        return self.known(matrix)

    def known(self, tensor: Tensor) -> np.ndarray | None:
        if not self.lasting(tensor):
            return None
        buffer = self.buffers[tensor.buffer]
        if tensor.buffer in self.constants:
            array = self.constants[tensor.buffer]
            if not self.weight_folds.is_made(array):
                return None
        else:
            value = self.model.graph.initializers[buffer.name].const_value
            array = required(value).numpy()
        flat = np.ascontiguousarray(array).reshape(-1)[tensor.offset :]
        steps = [step * array.itemsize for step in tensor.strides]
        return np.lib.stride_tricks.as_strided(flat, tensor.shape, steps, writeable=False)

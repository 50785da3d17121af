"""What is known at lowering: constants and shape arithmetic, evaluated on the host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import reads, required
from onnx_fuse.ir.evaluate import evaluate
from onnx_fuse.ir.traits import DRAWS, SIZES
from onnx_fuse.lower.context import WEIGHT_LIMIT, Context, Slot
from onnx_fuse.program import host
from onnx_fuse.program import size as sizes
from onnx_fuse.program.problem import ITEMSIZE

HOST_LIMIT = 1 << 22
"""Elements up to which a node whose inputs are all known is evaluated at lowering."""


class HostValues(Context):
    """Evaluates the nodes whose results do not depend on the values of the feeds."""

    @abstractmethod
    def _lower(self, node: ir.Node) -> None:
        """Append the calls of a node."""

    def _evaluate(self, node: ir.Node) -> bool:
        """Evaluate a node on the host if its results do not depend on the values of the feeds."""
        if (node.op_type in DRAWS and node.domain == "") or node.domain not in ("", "ai.onnx.ml"):
            return False
        if node.op_type in SIZES:
            return self._shape(node)
        values = [v for v in reads(node) if v is not None]
        arrays = [self.slots[v].host for v in values]
        if node.op_type == "CastLike" and arrays[0] is not None and arrays[0].size == 1:
            # a known number is cast on the host: of the second input only the dtype is needed
            dtype = self._type(values[1])[0]
            self._known(node.outputs[0], arrays[0].astype(dtype.numpy()))
            return True
        if any(a is None for a in arrays):
            return False
        if any(host.is_open(a) for a in arrays):
            return self._open(node, arrays)
        if any(self.slots[v].tensor is not None for v in values) and not all(
            a.size <= 64 for a in arrays if a is not None
        ):
            return False
        if node.op_type == "Constant":
            results = [ir.convenience.get_const_tensor(node.outputs[0])]
            if results[0] is not None:
                self._known(node.outputs[0], results[0].numpy())
                return True
        if node.op_type in ("ConstantOfShape", "Expand") and self._filled(node, arrays):
            return True
        if node.op_type == "Range" and self._range_elements(arrays) > WEIGHT_LIMIT:
            return False
        if sum(int(a.size) for a in arrays if a is not None) > HOST_LIMIT:
            return False
        constants = {v: a for v, a in zip(values, arrays, strict=True) if a is not None}
        values_of = evaluate([node], constants, self.opsets)
        if any(v.name and v not in values_of for v in node.outputs):
            return False  # it has a kernel, or onnxruntime says what is wrong with it
        for value, array in values_of.items():
            self._known(value, array)
        return True

    def _open(self, node: ir.Node, arrays: Sequence[np.ndarray | None]) -> bool:
        """Evaluate a node that reads open sizes; False where the device has to compute it."""
        if node.op_type in ("ConstantOfShape", "Expand") and self._filled(node, arrays):
            return True
        moves = node.op_type in ("Expand", "Gather", "Slice", "Tile")
        if node.op_type == "Range" or (moves and not host.is_open(arrays[0])):
            return False  # an open number of elements: on the device
        made = host.evaluate(node, arrays)
        int32 = made is not None and self._is_int32(node)
        narrow = made.flat if made is not None and int32 else ()
        if made is not None and not any(v >= 2**31 or sizes.negative(v + 2**31) for v in narrow):
            self._known(node.outputs[0], made)
            if int32 and host.is_open(made):
                self._lower(node)  # a reader on the device finds it there, in its own type
                self.slots[node.outputs[0]].host = made
            return True
        for value in node.inputs:
            array = None if value is None else self.slots[value].host
            if value is not None and array is not None and host.is_open(array):
                kind = self._type(value)[0].numpy()
                self.slots[value] = Slot(host=host.closed(array).astype(kind))
        return self._evaluate(node)

    def _is_int32(self, node: ir.Node) -> bool:
        """Whether the sizes that the node computes are int32, and not int64 as all others are."""
        if node.op_type == "Cast":
            return self.attr(node, "to") == ir.DataType.INT32
        operand = node.inputs[node.op_type == "Where"]
        return operand is not None and self._type(operand)[0] == ir.DataType.INT32

    @staticmethod
    def _range_elements(arrays: Sequence[np.ndarray | None]) -> float:
        start, limit, delta = (float(a.reshape(-1)[0]) for a in arrays if a is not None)
        return (limit - start) / delta

    def _known(self, value: ir.Value, array: np.ndarray) -> None:
        self.slots[value] = Slot(host=array)

    def _shape(self, node: ir.Node) -> bool:
        slot = self.slots[required(node.inputs[0])]
        shape = (slot.tensor if slot.tensor is not None else required(slot.host)).shape
        if node.op_type == "Size":
            self._known(node.outputs[0], sizes.array(prod(shape)))
        else:
            start, end = self.attr(node, "start", 0), self.attr(node, "end", None)
            self._known(node.outputs[0], sizes.array(shape[start:end]))
        return True

    def _filled(self, node: ir.Node, arrays: Sequence[np.ndarray | None]) -> bool:
        """A large tensor of one number: a broadcast scalar instead of its elements."""
        shape_values = required(arrays[-1])
        shape = tuple(map(sizes.number, shape_values.reshape(-1)))
        if not host.is_open(shape_values) and prod(shape) <= WEIGHT_LIMIT:
            return False
        if node.op_type == "Expand":
            scalar = arrays[0]
            if scalar is None or scalar.size != 1:
                return False
            shape = sizes.broadcast(scalar.shape, shape)
        else:
            scalar = self.attr(node, "value", np.zeros(1, np.float32))
        if scalar.dtype.name not in ITEMSIZE:
            return False
        self.alias(node, 0, self.constant(scalar.reshape(())).expand(shape))
        return True

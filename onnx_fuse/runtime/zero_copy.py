"""Small inputs and outputs that kernels read and write in host memory, instead of two copies.

A copy takes the host two microseconds to enqueue, and the GPU as long again to turn from copying to
computing; a kernel that fetches some kilobytes over the bus itself loses one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import numpy as np

from onnx_fuse.arrays import Array
from onnx_fuse.program.call import Program, Tensor, dtype_of
from onnx_fuse.program.launch import Launch, TensorMap
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.runtime import device
from onnx_fuse.runtime.plan import aligned
from onnx_fuse.runtime.tensor import DeviceTensor

READ = 128 << 10
"""Bytes that may be read over the bus: those of an input, by each block of its reader."""
WRITTEN = 64 << 10
"""Bytes of outputs."""


class ZeroCopy:
    """Pinned memory for one run of a shape at a time: who runs holds `free` until it has read it.

    `inputs` and `outputs` are the arrays in it, by name; `placement` puts the kernels' there.
    """

    def __init__(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> None:
        self.free = threading.Lock()
        size = sum(aligned(t.nbytes) for t in (*inputs.values(), *outputs.values()))
        self._memory, self._used = device.Pinned(size), 0
        self.inputs = {name: self._array(t) for name, t in inputs.items()}
        self.outputs = {name: self._array(t) for name, t in outputs.items()}

    def __bool__(self) -> bool:
        """Whether anything stands there."""
        return bool(self.inputs or self.outputs)

    def _array(self, t: Tensor) -> Array:
        raw = self._memory.array[self._used : self._used + t.nbytes]
        self._used += aligned(t.nbytes)
        return raw.view(dtype_of(t.dtype)).reshape(t.shape)

    def fill(self, feeds: Mapping[str, Any]) -> bool:
        """Take the memory and put the feeds there; False where another run has it, or by copies."""
        arrays = []
        for name, array in self.inputs.items():
            value = feeds[name]
            if not isinstance(value, np.ndarray):
                return False
            arrays.append((array, value))
        if not self.free.acquire(blocking=False):
            return False
        for array, value in arrays:
            array[...] = value
        return True

    def places(self, device_id: int) -> tuple[dict[str, DeviceTensor], dict[str, DeviceTensor]]:
        """Inputs and outputs as the GPU sees them: at the same addresses."""

        def place(array: Array) -> DeviceTensor:
            address = array.ctypes.data
            return DeviceTensor(address, array.shape, array.dtype.name, device_id, self._memory)

        ends = (self.inputs, self.outputs)
        first, second = ({name: place(array) for name, array in end.items()} for end in ends)
        return first, second

    @staticmethod
    def of(
        program: Program, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> ZeroCopy | None:
        """A ZeroCopy if one launch alone reads each input and one writes each output, else None."""
        tensors = [t for t in (*inputs.values(), *outputs.values()) if t.nbytes]
        if program.stages or not tensors or sum(t.nbytes for t in outputs.values()) > WRITTEN:
            return None
        alone = all(over_bus(program, t, alone=True) for t in tensors)
        return ZeroCopy(inputs, outputs) if alone else None


def over_bus(program: Program, t: Tensor, *, alone: bool = False) -> bool:
    """Whether all launches that use a tensor can reach it in host memory, and read few bytes there.

    With `alone`, one launch uses it.
    """
    launches = read = 0
    for call in program.calls:
        names = {name for name, x in (*call.reads, *call.writes) if x.buffer == t.buffer}
        if not names:
            continue
        if call.host or not all(reaches(launch, names) for launch in call.launches):
            return False
        launches += len(call.launches)
        most = t.nbytes * sum(prod(launch.grid) for launch in call.launches)
        if call.expression is not None:  # once for each element of the result
            most = min(most, call.writes[0][1].size * ITEMSIZE[t.dtype])
        read += most * sum(x.buffer == t.buffer for _, x in call.reads)
    return read <= READ and (not alone or launches == 1)


def reaches(launch: Launch, names: Collection[str]) -> bool:
    """Whether a kernel is ours, and uses these operands by ordinary loads and stores alone."""
    maps = (arg.ptr.name for arg in launch.args if isinstance(arg, TensorMap))
    return not launch.of_library and not any(name in names for name in maps)

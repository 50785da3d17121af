"""Weights and states on the device: outside every arena, by name, shared by all shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from onnx_fuse.errors import UsageError
from onnx_fuse.program.call import Program, Tensor, dense_strides, dtype_of
from onnx_fuse.runtime import device
from onnx_fuse.runtime.plan import aligned
from onnx_fuse.runtime.staging import Uploads

RANDOM = "random"
"""Where the random generator's state stands."""


def zeros(array: np.ndarray) -> bool:
    """Whether an array is a single zero, broadcast, as the first state of an optimizer is."""
    if array.size < 2 or any(array.strides):
        return False
    return not any(array[(0,) * array.ndim].tobytes())


class Weights:
    """The tensors of `resident`: name -> (shape and type, address); `home`'s are there too."""

    def __init__(self, stream: device.Stream, device_id: int, home: Weights | None) -> None:
        self._stream, self._device_id = stream, device_id
        self.resident: dict[str, tuple[Tensor, int]] = dict(home.resident if home else {})
        self.resident.pop(RANDOM, None)  # each has its own
        self._blocks: list[device.Memory] = []

    @property
    def nbytes(self) -> int:
        """The bytes that this object has put on the device."""
        return sum(block.nbytes for block in self._blocks)

    def of(
        self,
        program: Program,
        weight: Callable[[str], np.ndarray],
        made: Callable[[np.ndarray], bool] = lambda array: True,
    ) -> dict[int, int]:
        """Buffer -> address of the program's weights and states, which are put there if need be.

        `weight` gives one of the model's by its name, `made` waits for the numbers of an array.
        Where it says that these are of no use, nothing is put there.
        """
        arrays = {}
        for b in program.buffers:
            if b.name in self.resident:
                continue
            if b.kind == "weight" and b.id in program.constants:  # made of others at lowering
                arrays[b.name] = program.constants[b.id]
            elif b.kind == "weight":
                arrays[b.name] = weight(b.name)
            elif b.kind == "random":
                arrays[b.name] = np.zeros(2, np.uint64)  # seed, draw
        if arrays:
            self.place(arrays, made)
        return {
            b.id: self.resident[b.name][1]
            for b in program.buffers
            if b.kind in ("input", "weight", "random") and b.name in self.resident
        }

    def place(
        self,
        arrays: Mapping[str, np.ndarray],
        made: Callable[[np.ndarray], bool] = lambda array: True,
    ) -> None:
        """Put arrays on the device under their names, in one allocation; `made` is as for `of`."""
        device.start(self._device_id)
        sizes = {name: aligned(array.nbytes) for name, array in arrays.items()}
        block = device.Memory(sum(sizes.values()), f"{len(arrays)} weights")
        at, resident, uploads = block.address, {}, Uploads()
        for name, array in arrays.items():
            tensor = Tensor(-1, array.dtype.name, array.shape, dense_strides(array.shape))
            resident[name] = (tensor, at)
            if not made(array):
                self._stream.wait("uploading weights of no use")
                return
            if zeros(array):
                self._stream.fill(at, 0, array.nbytes)
            elif array.nbytes:
                dense = np.asarray(array, order="C")  # keeps a scalar one
                uploads.send(dense, at, self._stream)
            at += sizes[name]
        self._stream.wait(f"uploading {len(arrays)} weights")
        self._blocks.append(block)
        self.resident |= resident  # all of them, or none where a copy failed

    def read(self, name: str) -> np.ndarray:
        """The present value of a weight or state."""
        device.start(self._device_id)
        tensor, address = self.resident[name]
        array = np.empty(tensor.shape, dtype_of(tensor.dtype))
        self._stream.catch_up()
        if array.nbytes:
            self._stream.download(array.ctypes.data, address, array.nbytes)
        self._stream.wait(f"reading {name}")
        return array

    def write(self, name: str, array: np.ndarray) -> None:
        """Replace a weight or state; shape and dtype stay."""
        device.start(self._device_id)
        tensor, address = self.resident[name]
        dense = np.asarray(array, order="C")  # keeps a scalar one
        if (dense.shape, dense.dtype.name) != (tensor.shape, tensor.dtype):
            actual = f"{dense.dtype}{list(dense.shape)}"
            raise UsageError(f"{name} is {tensor.dtype}{list(tensor.shape)}, not {actual}")
        self._stream.catch_up()
        if dense.nbytes:
            self._stream.upload(address, dense.ctypes.data, dense.nbytes)
        self._stream.wait(f"writing {name}")

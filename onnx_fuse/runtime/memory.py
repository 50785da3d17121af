"""The device memory that an Executable's shapes share: the arena, and constants by content."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Mapping

import numpy as np

from onnx_fuse.runtime import device
from onnx_fuse.runtime.plan import aligned

DOUBLES = 256 << 20
"""Bytes up to which an arena that has become too small is doubled."""


class Arena:
    """One block of memory that the runs of all shapes use in turn, in the order of one stream.

    `retire` makes the users of a block let go of it before a larger one takes its place.
    """

    def __init__(self, pool: device.Pool, retire: Callable[[], None]) -> None:
        self._pool, self._retire = pool, retire
        self.block: device.Memory | None = None

    @property
    def nbytes(self) -> int:
        """The number of bytes that the arena holds."""
        return 0 if self.block is None else self.block.nbytes

    def reserve(self, nbytes: int) -> device.Memory:
        """A block of at least so many bytes: that of before, or a larger one instead of it.

        Raises DeviceMemoryError; the block of before is gone then.
        """
        if self.block is None or self.block.nbytes < nbytes:
            held = self.nbytes
            self._retire()
            self.block = None
            size = max(nbytes, min(2 * held, DOUBLES), 5 * held // 4)
            size = -(-size // (2 << 20)) * (2 << 20)
            self.block = self._pool.allocate(size, "the arena", again=False)
        return self.block

    def release(self) -> None:
        """Give the block of memory back to the device."""
        self.block = None


class Constant:
    """An array on the device, in a block that its neighbours keep too."""

    def __init__(self, block: device.Memory, address: int, nbytes: int) -> None:
        self._block, self.address, self.nbytes = block, address, nbytes


class Constants:
    """What Programs know at lowering, uploaded once for all shapes that have it."""

    def __init__(self, pool: device.Pool, stream: device.Stream) -> None:
        self._pool, self._stream = pool, stream
        self._kept: weakref.WeakValueDictionary[bytes, Constant] = weakref.WeakValueDictionary()

    def place(self, arrays: Mapping[int, np.ndarray]) -> dict[int, Constant]:
        """A Constant for each array of at least one byte; it stays while somebody holds it."""
        constants: dict[int, Constant] = {}
        new: dict[bytes, tuple[bytes, list[int]]] = {}
        for number, array in arrays.items():
            content = array.tobytes()
            key = hashlib.blake2b(content, digest_size=20).digest()
            stored = self._kept.get(key)
            if stored is not None:
                constants[number] = stored
            elif content:
                new.setdefault(key, (content, []))[1].append(number)
        if not new:
            return constants
        total = sum(aligned(len(content)) for content, _ in new.values())
        block = self._pool.allocate(total, f"{len(new)} constants", again=False)
        pieces = [content.ljust(aligned(len(content)), b"\0") for content, _ in new.values()]
        staged = np.frombuffer(b"".join(pieces), np.uint8)
        self._stream.upload(block.address, staged.ctypes.data, total)
        at = block.address
        for (key, (content, numbers)), piece in zip(new.items(), pieces, strict=True):
            fresh = self._kept[key] = Constant(block, at, len(content))
            constants |= dict.fromkeys(numbers, fresh)
            at += len(piece)
        return constants

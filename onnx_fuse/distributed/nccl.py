"""NCCL's communicator of this process, by NVIDIA's own bindings (nccl4py)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

from onnx_fuse.distributed.world import World
from onnx_fuse.errors import INSTALL_DISTRIBUTED, DeviceError

Part = tuple[int, int, int, str]
"""The address of x, that of y, the number of elements of x, and their dtype."""
_NAMES = {
    "float32": "Float32", "float64": "Float64", "float16": "Float16", "bfloat16": "Bfloat16",
    "int32": "Int32", "int64": "Int64",
}  # fmt: skip


def bindings() -> Any:
    """The bindings, or a DeviceError that says what to install."""
    try:
        from nccl.bindings import nccl
    except ImportError as error:
        raise DeviceError(
            f"training on several GPUs needs NCCL ({error}): {INSTALL_DISTRIBUTED}"
        ) from error
    return nccl


@contextlib.contextmanager
def _faults(what: str) -> Iterator[None]:
    """What NCCL raises within the block, as a DeviceError."""
    try:
        yield
    except (bindings().NCCLError, RuntimeError, OSError) as error:  # or no library is found
        raise DeviceError(f"NCCL, {what}: {' '.join(str(error).split())}") from error


class Communicator:
    """The ranks of a run, each with a GPU, which make the same calls in the same order.

    The GPU's context is current on this thread. Raises DeviceError.
    """

    def __init__(self, world: World) -> None:
        self._nccl = bindings()
        self.rank, self.size = world.rank, world.size
        with _faults("the connection of the ranks"):
            unique = self._nccl.get_unique_id() if world.rank == 0 else self._nccl.UniqueId()
            # the 128 bytes of the identifier, in place
            content = memoryview((ctypes.c_uint8 * 128).from_address(int(unique.ptr))).cast("B")
            shared = world.broadcast(bytes(content) if world.rank == 0 else b"")
            content[:] = shared
            self._handle = self._nccl.comm_init_rank(world.size, unique, world.rank)

    def enqueue(self, kind: str, parts: Sequence[Part], stream: int) -> None:
        """Enqueue the collective `kind` of all parts, as one, into the stream of that handle."""
        nccl = self._nccl
        total = int(nccl.RedOp.Sum)
        with _faults(kind):
            nccl.group_start()
            for x, y, size, dtype in parts:
                code = int(getattr(nccl.DataType, _NAMES[dtype]))
                if kind == "AllReduce":
                    nccl.all_reduce(x, y, size, code, total, self._handle, stream)
                elif kind == "ReduceScatter":
                    share = size // self.size
                    nccl.reduce_scatter(x, y, share, code, total, self._handle, stream)
                else:
                    nccl.all_gather(x, y, size, code, self._handle, stream)
            nccl.group_end()


_CURRENT: list[Communicator] = []


def connect(world: World) -> Communicator:
    """Make the communicator of this process, which all ranks do together; it has one alone."""
    if not _CURRENT:
        _CURRENT.append(Communicator(world))
    return _CURRENT[0]


def current() -> Communicator:
    """The communicator of this process. Raises DeviceError where it has none."""
    if not _CURRENT:
        raise DeviceError(
            "the model has collectives, but this process is not a rank of a training on several "
            "GPUs: give the Trainer distributed=True"
        )
    return _CURRENT[0]

"""A bucket's collective in place of a kernel of ours: NCCL's calls in the stream of the step."""

from __future__ import annotations

from collections.abc import Mapping

from onnx_fuse.distributed import nccl
from onnx_fuse.errors import DeviceError
from onnx_fuse.program.launch import Launch, Ptr
from onnx_fuse.program.problem import Hardware


class BoundCollective:
    """A bucket with its addresses, reduced or gathered any number of times.

    Raises DeviceError where this process is not the rank of a run of as many ranks.
    """

    early = False
    """Whether it may start while the launch before it ends: the library's kernels may not."""

    def __init__(self, launch: Launch, pointers: Mapping[str, int], hw: Hardware) -> None:
        problem = launch.collective
        assert problem is not None
        self.launch, self._kind = launch, problem.kind
        self._parts = list(zip(problem.sizes, problem.dtypes, strict=True))
        self._ranks = nccl.current()
        if self._ranks.size != problem.ranks:
            raise DeviceError(
                f"the program is one of {problem.ranks} ranks, this run has {self._ranks.size}"
            )
        self.place(pointers)

    def place(self, pointers: Mapping[str, int]) -> None:
        """Take other addresses for what is enqueued from now on."""
        pairs = [pointers[p.name] + p.offset for p in self.launch.args if isinstance(p, Ptr)]
        self._at = list(zip(pairs[::2], pairs[1::2], strict=True))

    def enqueue(self, stream: int) -> None:
        """Enqueue into the CUstream whose handle is `stream`; one under capture records it."""
        self._ranks.enqueue(
            self._kind,
            [(x, y, n, dtype) for (x, y), (n, dtype) in zip(self._at, self._parts, strict=True)],
            stream,
        )

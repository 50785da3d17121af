"""Collectives, which NCCL runs."""

from __future__ import annotations

from onnx_fuse.kernels.kernel import Kernels
from onnx_fuse.kernels.rule_based import HeuristicKernel
from onnx_fuse.program.launch import Launch, Launches, Ptr
from onnx_fuse.program.problem import Collective, Hardware, KernelConfig


class Nccl(HeuristicKernel[Collective]):
    """A group of NCCL's calls, one a tensor. Operands: x.i y.i."""

    name = "nccl"

    def launch(self, problem: Collective, config: KernelConfig, hw: Hardware) -> Launches:
        """One launch, whose kernels are the library's."""
        one = (1, 1, 1)
        operands = tuple(
            Ptr(f"{name}.{i}") for i in range(len(problem.sizes)) for name in ("x", "y")
        )
        return (Launch("", f"nccl{problem.kind}", one, one, operands, collective=problem),)


KERNELS: Kernels = {"Collective": (Nccl(),)}

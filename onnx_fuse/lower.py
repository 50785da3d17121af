"""HLIR -> Program: every node to kernel calls over static shapes. The contract is in `llir`."""

from __future__ import annotations

# Modules under onnx_fuse/kernels whose LOWERINGS table serves operators: see llir.
FAMILIES: tuple[str, ...] = ()

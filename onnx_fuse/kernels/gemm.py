"""Gemm candidates: y[b, m, n] = epilogue(sum_k op(a)[b, m, k] op(b)[b, k, n]).

The fields of the Problem's epilogue are described in `program.epilogue`. Its attrs are:
  static_b                    b is the same throughout a graph: it may be read ahead of it
  rows, epsilon               wgmma only, where k is not split. "stats", "rms": row0 and row1 are
                              written, from a's rows; "tiles" (with dx): row2 and row3 are the row
                              means of the product and of product z, and "part" [tiles of m, k]
                              takes the column sums of a
  rms                         dx and dw of RMSNorm: row1 and row2 are zeros, not read
  parts                       wgmma, with layernorm: how many moments of a row of a "part" holds;
                              row0 and row1 are written from them
and the operands: lda, ldb (row strides; default dense), a_strides, b_strides, c_strides (one a
batch dim, 0 broadcasts; default dense), ldy (row stride of y, of whole 16 bytes; wgmma only,
which leaves anything in a row beyond column n), align (what addresses are multiples of; 16 bytes).
Types: a, b `dtype`; y, z, c `out`. Pointers: a b y c z row0..row3 col0 col1 part workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.kernels.cublaslt import CublasLt
from onnx_fuse.kernels.gemm_cluster import Cluster
from onnx_fuse.kernels.gemm_portable import Fma, Mma, Simt
from onnx_fuse.kernels.gemm_skinny import Skinny
from onnx_fuse.kernels.gemm_sm90 import SplitWgmma, Wgmma
from onnx_fuse.kernels.gemm_vector import Vector

if TYPE_CHECKING:
    from onnx_fuse.kernels import Kernel

__all__ = ["C_TYPES", "KERNELS"]

KERNELS: dict[str, Sequence[Kernel]] = {
    "Gemm": (
        Cluster(), Vector(), Skinny(), Wgmma(), SplitWgmma(), CublasLt(), Mma(), Fma(), Simt(),
    ),
}  # fmt: skip

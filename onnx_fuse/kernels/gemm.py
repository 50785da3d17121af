"""Gemm candidates: y[b, m, n] = epilogue(sum_k op(a)[b, m, k] op(b)[b, k, n]).

The Problem's attrs name the epilogue (cuda_src/gemm/epilogue.cuh), in the order it is applied:
  alpha                       float, default 1
  static_b                    b is the same throughout a graph: it may be read ahead of it
  layernorm                   rows "row0" rstd, "row1" mean; columns "col0" cs, "col1" cv (float32)
  rows, epsilon               wgmma only, where k is not split. "stats", "rms": row0 and row1 are
                              written, from a's rows; "tiles" (with dx): row2 and row3 are the row
                              means of the product and of product z, and "part" [tiles of m, k]
                              takes the column sums of a
  bias                        column "col1", of type `bias_dtype` (default: the operands')
  row_bias                    row "row0", of that type: one number a row (no bias, norm, dx, dw)
  beta                        float, not 0: + beta c, element strides c_rows, c_cols (Gemm's C)
  save_z                      the pre-activation goes to "z"
  act, act_alpha              a key of ops/activations.py's table
  scale                       * column "col0", with a bias and of its type; no norm, beta, dact, dx
  dact                        * act'(c) instead of act: c is the stored pre-activation
  dx                          LayerNorm's backward: rows row0..3 = rstd, mean, c1, c2; c is x;
                              save_z is then (x - mean) rstd
  dw                          weight gradient: rows gamma, beta (of the operands' type), col1 dbias
                              (float32); c is W; "part" [tiles of n, 2, m] takes the row sums of
                              dgamma and dbeta
  rms                         dx and dw of RMSNorm: row1 and row2 are zeros, not read
  residual                    + c, after everything; "norm": + (c - mean) rstd gamma, rows "row0"
                              rstd, "row1" mean, column "col0" gamma; columns are float32 then,
                              and beta is in the bias
  accumulate                  y += the result, which is rounded first; y holds what it is added to
  gate                        with act: the columns of b, and what goes with them, are blocks of 16,
                              8 gates and the 8 they let through in pairs (`interleaved`); y is
                              [m, n / 2], act(gate) times the other
  moments                     wgmma: how many tiles n has; "part" [moments, m] takes (mean, sum of
                              squared deviations) of y's rows in each
  parts                       wgmma, with layernorm: how many moments of a row of a "part" holds;
                              row0 and row1 are written from them
and the operands: lda, ldb (row strides; default dense), a_strides, b_strides, c_strides (one a
batch dim, 0 broadcasts; default dense), align (what addresses are multiples of; 16 bytes).
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

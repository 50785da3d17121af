"""Gemm candidates: y[b, m, n] = epilogue(sum_k op(a)[b, m, k] op(b)[b, k, n]).

The fields are described in `program.problem.Problem` and `program.epilogue`; `rows`, `parts` and
`ldy` are wgmma's alone. Types: a, b `dtype`; y, z, c `out`. Pointers: a b y c z row0..row3 col0
col1 part workspace.
"""

from __future__ import annotations

from onnx_fuse.cuda.macros import C_TYPES
from onnx_fuse.kernels.cublaslt import CublasLt
from onnx_fuse.kernels.gemm_cluster import Cluster
from onnx_fuse.kernels.gemm_fp8 import EightBits
from onnx_fuse.kernels.gemm_portable import Mma, Simt, SimtSplitK
from onnx_fuse.kernels.gemm_skinny import SmallM
from onnx_fuse.kernels.gemm_sm90 import SplitWgmma, Wgmma
from onnx_fuse.kernels.gemm_tf32 import Tf32
from onnx_fuse.kernels.gemm_transposed import TurnedFma, TurnedTf32
from onnx_fuse.kernels.gemm_vector import Gemv
from onnx_fuse.kernels.kernel import Kernels

__all__ = ["C_TYPES", "KERNELS"]

KERNELS: Kernels = {
    "Gemm": (
        Cluster(), Gemv(), SmallM(), Wgmma(), SplitWgmma(), Tf32(), TurnedTf32(),
        EightBits(), CublasLt(), Mma(), SimtSplitK(), TurnedFma(), Simt(),
    ),
}  # fmt: skip

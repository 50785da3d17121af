"""cuBLASLt as an optional Gemm candidate: a library's call in place of a kernel of ours."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from math import ceil

from onnx_fuse.cuda.cublaslt import CUDA_TYPES, workspace
from onnx_fuse.errors import INSTALL_CUBLASLT
from onnx_fuse.kernels.gemm_portable import LIBRARY, epilogue_refusal, normed
from onnx_fuse.kernels.kernel import Kernel, roofline
from onnx_fuse.program.launch import Launch, Launches, Ptr
from onnx_fuse.program.problem import GemmProblem, Hardware, KernelConfig

OPERANDS = tuple(map(Ptr, ("a", "b", "c", "y", "col1", "workspace")))
# tiles, and the share of the chip's rate that they reach on tensor cores and on ordinary ones
TILES = ((256, 128, 0.87, 0.0), (128, 128, 0.75, 0.95), (64, 64, 0.4, 0.8))


_left_out: list[bool] = []


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Within the block no problem is served: programs run where the library is not installed."""
    _left_out.append(True)
    try:
        yield
    finally:
        _left_out.pop()


@cache
def version() -> int | str:
    """cuBLASLt's version, or why it can't be called; loads the library, not nvmath."""
    if find_spec("nvmath") is None:
        return f"nvmath-python is not installed: {INSTALL_CUBLASLT}"
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        library = ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (DynamicLibNotFoundError, OSError) as error:
        return f"cuBLASLt was not found ({' '.join(str(error).split())[:100]}): {INSTALL_CUBLASLT}"
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return int(library.cublasLtGetVersion())


class CublasLt(Kernel[GemmProblem]):
    """cublasLtMatmul: alpha a b + beta c + bias; the algorithm its heuristic puts first."""

    name = "cublaslt"

    @property
    def version(self) -> int:
        """The library's; 0 where it cannot be called."""
        number = version()
        return number if isinstance(number, int) else 0

    def supports(self, problem: GemmProblem, hw: Hardware) -> str | None:
        if problem.dtype not in CUDA_TYPES or problem.out not in (problem.dtype, "float32"):
            return f"no matrix multiplication {problem.dtype} -> {problem.out}"
        if (problem.dtype, problem.out) == ("float64", "float32"):
            return "no matrix multiplication float64 -> float32"
        # its GELU is the tanh form, and its ReLU of NaN is 0 in some of its kernels (13.4, tf32)
        if reason := epilogue_refusal(problem, LIBRARY):
            return reason
        if normed(problem):
            return "its residual is added as it is"
        if problem.epilogue.bias:
            bias = problem.epilogue.bias_dtype or problem.dtype
            if bias != problem.out or bias == "float64":
                return f"no bias of {bias} for a result of {problem.out}"
        rows, columns = problem.ldc
        if problem.epilogue.beta and (columns != 1 or rows < problem.n):
            return "C is broadcast or transposed"
        if len(problem.batch) > 1:
            return f"{len(problem.batch)} batch dims (at most 1)"
        sizes = (problem.m, problem.n, problem.k, problem.batches)
        if any(size >= 2**31 for size in sizes):
            return "a dimension of 2^31 or more"
        missing = "what is compiled into a file calls no library" if _left_out else version()
        return missing if isinstance(missing, str) else None

    def configs(self, problem: GemmProblem, hw: Hardware) -> Sequence[KernelConfig]:
        """One empty configuration, since the library chooses the algorithm."""
        return [KernelConfig()]

    def cost(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> float:
        """Waves of its usual tiles, k split where they do not fill the chip."""
        kind = "tf32" if (problem.dtype, problem.math) == ("float32", "tf32") else problem.dtype
        plain, costs, own = kind in ("float32", "float64"), [], hw.costs("cublaslt")
        for bm, bn, *shares in TILES:
            if not (share := shares[plain]):
                continue
            tiles = ceil(problem.m / bm) * ceil(problem.n / bn) * problem.batches
            splits = max(1, min(hw.sm_count // tiles, problem.k // 256))
            waves = ceil(tiles * splits / hw.sm_count)
            per_sm = hw.rate(kind) * share / hw.sm_count
            seconds = waves * 2 * bm * bn * ceil(problem.k / splits) / per_sm
            costs.append(seconds + (own["split"] if splits > 1 else 0.0))
        return roofline(hw, own, problem.bytes, min(costs))

    def workspace(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> int:
        """The bytes that cuBLASLt's authors advise."""
        return workspace(hw)

    def launch(self, problem: GemmProblem, config: KernelConfig, hw: Hardware) -> Launches:
        one = (1, 1, 1)
        return (Launch("", "cublasLtMatmul", one, one, OPERANDS, product=problem),)

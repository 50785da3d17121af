"""cuBLASLt as an optional Gemm candidate: a library's call in place of a kernel of ours."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from math import ceil
from typing import Any

from onnx_fuse.errors import DeviceError
from onnx_fuse.kernels.gemm_portable import batch_strides, ld, normed, operand
from onnx_fuse.problem import ITEMSIZE, Config, Hardware, Launch, Problem, Ptr

INSTALL = "pip install 'onnx-fuse[cublaslt]'"
OPERANDS = tuple(map(Ptr, ("a", "b", "c", "y", "col1", "workspace")))
CUDA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType_t
# tiles, and the share of the chip's rate that they reach on tensor cores and on ordinary ones
TILES = ((256, 128, 0.87, 0.0), (128, 128, 0.75, 0.95), (64, 64, 0.4, 0.8))
_HANDLES: dict[int, int] = {}
_LOCK = threading.Lock()


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
        return f"nvmath-python is not installed: {INSTALL}"
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        library = ctypes.CDLL(load_nvidia_dynamic_lib("cublasLt").abs_path)
    except (DynamicLibNotFoundError, OSError) as error:
        return f"cuBLASLt was not found ({' '.join(str(error).split())[:100]}): {INSTALL}"
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return int(library.cublasLtGetVersion())


class CublasLt:
    """cublasLtMatmul: alpha a b + beta c + bias, ReLU; the algorithm its heuristic puts first."""

    name = "cublaslt"

    def sources(self) -> tuple[str, ...]:
        """The library's version, as a text."""
        return (f"cuBLASLt {version()}\n",)

    def supports(self, problem: Problem, hw: Hardware) -> str | None:
        """None, or why not."""
        if problem.dtype not in CUDA_TYPES or problem.out not in (problem.dtype, "float32"):
            return f"no product {problem.dtype} -> {problem.out}"
        if (problem.dtype, problem.out) == ("float64", "float32"):
            return "no product float64 -> float32"
        # its GELU is the tanh form, and its stored ReLU input a mask
        own = ("layernorm", "rows", "save_z", "dact", "dx", "dw", "moments", "parts", "accumulate",
               "row_bias", "scale", "gate")  # fmt: skip
        found = [name for name in own if problem.attr(name)]
        if found := [*found, *(["residual=norm"] if normed(problem) else [])]:
            return f"no such epilogue: {', '.join(found)}"
        act = problem.text("act")
        if act not in ("", "relu") or (act and problem.attr("residual")):
            return f"no such epilogue: {act}" + (" + c" if problem.attr("residual") else "")
        if problem.attr("bias"):
            bias = problem.text("bias_dtype", problem.dtype)
            if bias != problem.out or bias == "float64":
                return f"no bias of {bias} for a result of {problem.out}"
        if problem.attr("beta") and problem.attr("residual"):
            return "the epilogue takes one extra operand"
        row = problem.integer("c_rows", problem.n)
        if problem.attr("beta") and (row < problem.n or problem.integer("c_cols", 1) != 1):
            return "C is broadcast or transposed"
        if len(problem.batch) > 1:
            return f"{len(problem.batch)} batch dims (at most 1)"
        if max(problem.m, problem.n, problem.k, problem.batches) >= 2**31:
            return "a dimension of 2^31 or more"
        missing = "what is compiled into a file calls no library" if _left_out else version()
        return missing if isinstance(missing, str) else None

    def configs(self, problem: Problem, hw: Hardware) -> Sequence[Config]:
        """One: the library chooses."""
        return [Config()]

    def fits(self, problem: Problem, config: Config) -> bool:
        """Every configuration serves every problem."""
        return True

    def cost(self, problem: Problem, config: Config, hw: Hardware) -> float:
        """Waves of its usual tiles, k split where they do not fill the chip."""
        kind = "tf32" if (problem.dtype, problem.math) == ("float32", "tf32") else problem.dtype
        plain, found = kind in ("float32", "float64"), []
        for bm, bn, *shares in TILES:
            if not (share := shares[plain]):
                continue
            tiles = ceil(problem.m / bm) * ceil(problem.n / bn) * problem.batches
            splits = max(1, min(hw.sm_count // tiles, problem.k // 256))
            waves = ceil(tiles * splits / hw.sm_count)
            per_sm = hw.rate(kind) * share / hw.sm_count
            seconds = waves * 2 * bm * bn * ceil(problem.k / splits) / per_sm
            found.append(seconds + (1e-6 if splits > 1 else 0.0))
        moved = problem.bytes / (0.65 * hw.bandwidth)
        return max(min(found), moved) + hw.launch_seconds

    def workspace(self, problem: Problem, config: Config, hw: Hardware) -> int:
        """What its authors advise."""
        return (32 if hw.cc >= 90 else 4) << 20

    def launch(self, problem: Problem, config: Config, hw: Hardware) -> tuple[Launch, ...]:
        """One call."""
        one = (1, 1, 1)
        return (Launch("", "cublasLtMatmul", one, one, OPERANDS, product=problem),)


class Bound:
    """A cublasLtMatmul with its addresses and its algorithm, enqueued any number of times.

    Row-major y = a b is column-major yᵀ = bᵀ aᵀ: b comes first, and nothing is transposed.
    """

    early = False
    """Whether it may start while the launch before it ends: the library's kernels may not."""

    def __init__(self, launch: Launch, pointers: Mapping[str, int], hw: Hardware) -> None:
        self.launch, self._made = launch, list[tuple[Any, int]]()
        import numpy as np
        from nvmath.bindings import cublasLt as lt
        from nvmath.bindings.cublas import ComputeType

        problem = launch.product
        assert problem is not None
        self._lt = lt
        double = problem.dtype == "float64"
        compute = ComputeType.COMPUTE_64F if double else ComputeType.COMPUTE_32F
        if (problem.dtype, problem.math) == ("float32", "tf32"):
            compute = ComputeType.COMPUTE_32F_FAST_TF32
        beta = problem.number("beta") or float(bool(problem.attr("residual")))
        self._scale = np.array([problem.number("alpha", 1.0), beta], "f8" if double else "f4")
        m, n, k = problem.m, problem.n, problem.k
        lda, ldb = ld(problem)

        def put(setter: Any, what: int, name: Any, dtype: str, value: int) -> None:
            word = np.array([value], dtype)
            setter(what, name, word.ctypes.data, word.nbytes)

        self._put, self._bias = put, bool(problem.attr("bias"))

        def matrix(dtype: str, name: str, rows: int, cols: int, step: int) -> int:
            layout: int = lt.matrix_layout_create(CUDA_TYPES[dtype], rows, cols, step)
            self._made.append((lt.matrix_layout_destroy, layout))
            if problem.batch:
                kinds, setter = lt.MatrixLayoutAttribute, lt.matrix_layout_set_attribute
                stride = batch_strides(problem, name, rows * cols)[-1]
                put(setter, layout, kinds.BATCH_COUNT, "i4", problem.batches)
                put(setter, layout, kinds.STRIDED_BATCH_OFFSET, "i8", stride)
            return layout

        try:
            self._handle = _handle(lt)
            self._b = matrix(problem.dtype, "b", *((k, n) if problem.trans_b else (n, k)), ldb)
            self._a = matrix(problem.dtype, "a", *((m, k) if problem.trans_a else (k, m)), lda)
            self._y = self._c = matrix(problem.out, "y", n, m, n)
            if operand(problem):
                row = problem.integer("c_rows", n) if problem.attr("beta") else n
                self._c = matrix(problem.out, "c", n, m, row)

            kind = CUDA_TYPES["float64" if double else "float32"]
            self._desc: int = lt.matmul_desc_create(compute, kind)
            self._made.append((lt.matmul_desc_destroy, self._desc))
            kinds, setter = lt.MatmulDescAttribute, lt.matmul_desc_set_attribute
            put(setter, self._desc, kinds.TRANSA, "i4", problem.trans_b)
            put(setter, self._desc, kinds.TRANSB, "i4", problem.trans_a)
            epilogue = lt.Epilogue.RELU * bool(problem.text("act"))
            if self._bias:
                epilogue |= lt.Epilogue.BIAS
            put(setter, self._desc, kinds.EPILOGUE, "u4", epilogue or lt.Epilogue.DEFAULT)
            self.place(pointers)

            prefer: int = lt.matmul_preference_create()
            self._made.append((lt.matmul_preference_destroy, prefer))
            kinds, setter = lt.MatmulPreferenceAttribute, lt.matmul_preference_set_attribute
            size = CublasLt().workspace(problem, Config(), hw)
            put(setter, prefer, kinds.MAX_WORKSPACE_BYTES, "u8", size)
            # parts of k are kept in the workspace, in float32, and summed in their order
            put(setter, prefer, kinds.REDUCTION_SCHEME_MASK, "u4", lt.ReductionScheme.COMPUTE_TYPE)
            align = problem.integer("align", 16)
            align_c = ITEMSIZE[problem.out] if problem.attr("beta") else 16
            for name, value in zip("ABCD", (align, align, align_c, 16), strict=True):
                put(setter, prefer, kinds[f"MIN_ALIGNMENT_{name}_BYTES"], "u4", value)
            self._algorithm = np.zeros(1, lt.matmul_heuristic_result_dtype)
            count = np.zeros(1, "i4")
            lt.matmul_algo_get_heuristic(
                self._handle, self._desc, self._b, self._a, self._c, self._y, prefer, 1,
                self._algorithm.ctypes.data, count.ctypes.data,
            )  # fmt: skip
        except lt.cuBLASLtError as error:
            raise DeviceError(f"cuBLASLt, {problem}: {error}") from error
        if not count[0]:
            raise DeviceError(f"cuBLASLt has no algorithm for {problem}")
        self._size = int(self._algorithm["workspace_size"][0])

    def place(self, pointers: Mapping[str, int]) -> None:
        """Take other addresses for what is enqueued from now on."""
        given = [arg for arg in self.launch.args if isinstance(arg, Ptr)]
        a, b, c, y, bias, self._workspace = (pointers.get(p.name, 0) + p.offset for p in given)
        if self._bias:
            lt = self._lt
            name, setter = lt.MatmulDescAttribute.BIAS_POINTER, lt.matmul_desc_set_attribute
            self._put(setter, self._desc, name, "i8", bias)
        assert self.launch.product is not None
        self._at = a, b, c if operand(self.launch.product) else y, y

    def enqueue(self, stream: int) -> None:
        """Enqueue into the CUstream whose handle is `stream`."""
        (a, b, c, y), scale = self._at, self._scale.ctypes.data
        try:
            self._lt.matmul(
                self._handle, self._desc, scale, b, self._b, a, self._a,
                scale + self._scale.itemsize, c, self._c, y, self._y,
                self._algorithm.ctypes.data, self._workspace, self._size, stream,
            )  # fmt: skip
        except self._lt.cuBLASLtError as error:
            raise DeviceError(f"cuBLASLt, {self.launch.product}: {error}") from error

    def __del__(self) -> None:
        for destroy, what in self._made:
            destroy(what)


def _handle(lt: Any) -> int:
    """The current device's handle; it stays."""
    from cuda.bindings import driver

    device = int(driver.cuCtxGetDevice()[1])
    with _LOCK:
        if device not in _HANDLES:
            _HANDLES[device] = lt.create()
        return _HANDLES[device]

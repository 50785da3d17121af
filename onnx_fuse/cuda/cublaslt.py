"""A call of cuBLASLt in place of a kernel of ours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from onnx_fuse.errors import DeviceError
from onnx_fuse.program.launch import Launch, Ptr
from onnx_fuse.program.problem import ITEMSIZE, Hardware

CUDA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType_t
_HANDLES: dict[int, int] = {}
_LOCK = threading.Lock()


def workspace(hw: Hardware) -> int:
    """The bytes of workspace that cuBLAS's documentation recommends."""
    return (32 if hw.cc >= 90 else 4) << 20


class BoundMatmul:
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
        beta = problem.epilogue.beta or float(bool(problem.epilogue.residual))
        self._scale = np.array([problem.epilogue.alpha, beta], "f8" if double else "f4")
        m, n, k = problem.m, problem.n, problem.k
        lda, ldb = problem.ld

        def put(setter: Callable[..., Any], what: int, name: int, dtype: str, value: int) -> None:
            word = np.array([value], dtype)
            setter(what, name, word.ctypes.data, word.nbytes)

        self._put, self._bias = put, bool(problem.epilogue.bias)

        def matrix(dtype: str, name: str, rows: int, cols: int, step: int) -> int:
            layout: int = lt.matrix_layout_create(CUDA_TYPES[dtype], rows, cols, step)
            self._made.append((lt.matrix_layout_destroy, layout))
            if problem.batch:
                kinds, setter = lt.MatrixLayoutAttribute, lt.matrix_layout_set_attribute
                stride = problem.batch_strides(name, rows * cols)[-1]
                put(setter, layout, kinds.BATCH_COUNT, "i4", problem.batches)
                put(setter, layout, kinds.STRIDED_BATCH_OFFSET, "i8", stride)
            return layout

        try:
            self._handle = _handle(lt)
            self._b = matrix(problem.dtype, "b", *((k, n) if problem.trans_b else (n, k)), ldb)
            self._a = matrix(problem.dtype, "a", *((m, k) if problem.trans_a else (k, m)), lda)
            self._y = self._c = matrix(problem.out, "y", n, m, n)
            if problem.reads_c:
                row = problem.ldc[0] if problem.epilogue.beta else n
                self._c = matrix(problem.out, "c", n, m, row)

            kind = CUDA_TYPES["float64" if double else "float32"]
            self._desc: int = lt.matmul_desc_create(compute, kind)
            self._made.append((lt.matmul_desc_destroy, self._desc))
            kinds, setter = lt.MatmulDescAttribute, lt.matmul_desc_set_attribute
            put(setter, self._desc, kinds.TRANSA, "i4", problem.trans_b)
            put(setter, self._desc, kinds.TRANSB, "i4", problem.trans_a)
            epilogue = lt.Epilogue.BIAS if self._bias else lt.Epilogue.DEFAULT
            put(setter, self._desc, kinds.EPILOGUE, "u4", epilogue)
            self.place(pointers)

            prefer: int = lt.matmul_preference_create()
            self._made.append((lt.matmul_preference_destroy, prefer))
            kinds, setter = lt.MatmulPreferenceAttribute, lt.matmul_preference_set_attribute
            size = workspace(hw)
            put(setter, prefer, kinds.MAX_WORKSPACE_BYTES, "u8", size)
            # parts of k are kept in the workspace, in float32, and summed in their order
            put(setter, prefer, kinds.REDUCTION_SCHEME_MASK, "u4", lt.ReductionScheme.COMPUTE_TYPE)
            align = problem.align
            align_c = ITEMSIZE[problem.out] if problem.epilogue.beta else 16
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
        args = [arg for arg in self.launch.args if isinstance(arg, Ptr)]
        a, b, c, y, bias, self._workspace = (pointers.get(p.name, 0) + p.offset for p in args)
        if self._bias:
            lt = self._lt
            name, setter = lt.MatmulDescAttribute.BIAS_POINTER, lt.matmul_desc_set_attribute
            self._put(setter, self._desc, name, "i8", bias)
        assert self.launch.product is not None
        self._at = a, b, c if self.launch.product.reads_c else y, y

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


def _handle(lt: ModuleType) -> int:
    """The library's handle for the current device, which is made once."""
    from cuda.bindings import driver

    device = int(driver.cuCtxGetDevice()[1])
    with _LOCK:
        if device not in _HANDLES:
            _HANDLES[device] = lt.create()
        return _HANDLES[device]

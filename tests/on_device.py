"""Arrays in a GPU's memory, for tests of kernels."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from onnx_fuse.cuda.launch import PlacedLaunch, bind
from onnx_fuse.kernels import candidates
from onnx_fuse.kernels.gemm_sm90 import STREAM
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.program.problem import GemmProblem, Hardware, KernelConfig
from onnx_fuse.runtime import device

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32,
         "float64": np.float64, "int32": np.int32}  # fmt: skip

# relative Frobenius error, output rounding included: a bound each type or kind of product must meet
TOLERANCE = {"bfloat16": 6e-3, "float16": 1e-3, "float64": 1e-13, "int32": 0.0,
             "ieee": 2e-6, "tf32": 1e-3, "bf16x3": 2e-5, "bf16x6": 5e-6}  # fmt: skip


class Memory:
    """Device copies of named arrays, read back by name."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        device.start()
        self.stream = device.Stream()
        self.arrays = dict(arrays)
        self.buffers = {name: device.Memory(array.nbytes, name) for name, array in arrays.items()}
        for name, array in arrays.items():
            self.stream.upload(self.buffers[name].address, array.ctypes.data, array.nbytes)
        self.stream.wait("uploading")

    def read(self, name: str) -> np.ndarray:
        out = np.empty_like(self.arrays[name])
        self.stream.download(out.ctypes.data, self.buffers[name].address, out.nbytes)
        self.stream.wait("downloading")
        return out

    def write(self, name: str, array: np.ndarray) -> None:
        self.stream.upload(self.buffers[name].address, array.ctypes.data, array.nbytes)
        self.stream.wait("uploading")

    def bind(
        self, kernel: Kernel, problem: GemmProblem, how: KernelConfig, hw: Hardware
    ) -> list[PlacedLaunch]:
        self.buffers["workspace"] = device.Memory(kernel.workspace(problem, how, hw), "workspace")
        pointers = {name: buffer.address for name, buffer in self.buffers.items()}
        return [bind(call, pointers, hw) for call in kernel.launch(problem, how, hw)]

    def run(self, kernel: Kernel, problem: GemmProblem, how: KernelConfig, hw: Hardware) -> None:
        for call in self.bind(kernel, problem, how, hw):
            call.enqueue(self.stream.handle)
        self.stream.wait(f"{kernel.name} {how}")


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def random(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    if dtype == "int32":
        return rng.integers(-9, 9, shape).astype(np.int32)
    return rng.standard_normal(shape).astype(TYPES[dtype])


def poison(dtype: str, *shape: int) -> np.ndarray:
    return np.full(shape, -7 if dtype == "int32" else np.nan).astype(TYPES[dtype])


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(wide(got) - want) / (np.linalg.norm(want) or 1.0))


def each(problem: GemmProblem, hw: Hardware) -> list[tuple[Kernel, KernelConfig]]:
    """Every legal kernel: its two likeliest configurations, its last, those that share steps, and
    the likeliest whose last clusters start late."""
    found = []
    for kernel in candidates(problem.op):
        if kernel.supports(problem, hw) is None:
            hows = sorted(kernel.configs(problem, hw), key=lambda h: kernel.cost(problem, h, hw))
            shared = [h for h in hows if STREAM in (h.attr("splits", 1), h.attr("dw_splits", 1))]
            late = [h for h in hows if h.attr("late")][:1]
            found += [(kernel, how) for how in dict.fromkeys([*hows[:2], hows[-1], *shared, *late])]
    return found

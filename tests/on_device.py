"""Arrays in a GPU's memory, for tests of kernels."""

from collections.abc import Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from onnx_fuse.cuda.launch import PlacedLaunch, bind
from onnx_fuse.kernels import candidates
from onnx_fuse.kernels.gemm_sm90 import STREAM
from onnx_fuse.kernels.kernel import Kernel
from onnx_fuse.program.problem import AnyProblem, GemmProblem, Hardware, KernelConfig
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


def turned(a: np.ndarray, transposed: object) -> np.ndarray:
    """The matrices as they are, or each transposed in memory."""
    return np.ascontiguousarray(np.swapaxes(a, -1, -2)) if transposed else a


def statistics(x: np.ndarray, rms: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mean and 1 / deviation of each row, [m, 1] in float64; of an RMS norm, the mean is 0."""
    mean = wide(x).mean(-1, keepdims=True) * (not rms)
    return mean, 1 / np.sqrt(((wide(x) - mean) ** 2).mean(-1, keepdims=True) + 1e-5)


def norm_operands(
    gamma: np.ndarray, beta: np.ndarray, w: np.ndarray, c: np.ndarray, trans_b: bool = False
) -> dict[str, np.ndarray]:
    """What a product of w [k, n] and a bias c [n] behind a norm reads, folded beforehand or not."""
    wq = (wide(gamma)[:, None] * wide(w)).astype(w.dtype)
    cs, cv = wide(wq).sum(0), wide(beta) @ wide(w) + wide(c)
    return {
        "gamma": gamma, "beta": beta, "w": turned(w, trans_b), "c": c, "wq": turned(wq, trans_b),
        "cs": cs.astype(np.float32), "cv": cv.astype(np.float32),
    }  # fmt: skip


def norm_results(problem: GemmProblem) -> dict[str, np.ndarray]:
    """Room for what a product behind a norm leaves."""
    n = problem.n // 2 if problem.epilogue.gate else problem.n
    row = poison("float32", problem.m)
    return {"y": poison(problem.out, problem.m, n), "mean": row, "rstd": row}


Way = tuple[Kernel, KernelConfig]


def each(problem: AnyProblem, hw: Hardware) -> list[Way]:
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


def results(
    problem: AnyProblem,
    hw: Hardware,
    given: Mapping[str, np.ndarray],
    blank: Mapping[str, np.ndarray],
    ways: Sequence[Way] | None = None,
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Kernel and configuration, and what it makes of `blank`, for `each` of a problem or `ways`.

    Each runs twice, on memory of its own, and must leave the same bits.
    """
    for kernel, how in each(problem, hw) if ways is None else ways:
        name, found = f"{kernel.name} {how}", []
        for _ in range(2):
            memory = Memory({**given, **blank})
            memory.run(kernel, problem, how, hw)
            found.append({key: memory.read(key) for key in blank})
        first, second = found
        differ = [key for key in blank if first[key].tobytes() != second[key].tobytes()]
        assert not differ, f"{name}: two runs differ in {differ}"
        yield name, first

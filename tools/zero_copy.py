"""Feeds that stand on the GPU: copied device to device by `run`, or read in place by an IOBinding.

    python tools/zero_copy.py

Prints microseconds a run (wall time, outputs kept on the GPU) of y = tanh(x) over sizes, and what
the first run of a new place costs: why `run`, whose feeds may stand elsewhere each time, copies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from onnx_fuse.ir.build import text_model
from onnx_fuse.runtime import device
from onnx_fuse.runtime.executable import Executable
from onnx_fuse.runtime.tensor import DeviceTensor


def microseconds(work: Callable[[], object], repeats: int = 30) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def main() -> None:
    text = "agraph (float[N,1024] x) => (float y) { t = Tanh(x) y = ReduceSum<keepdims=0>(t) }"
    print(f"{'MiB':>8s}{'copied µs':>12s}{'in place µs':>13s}{'first at a new place µs':>26s}")
    for mib in (1, 4, 16, 64, 256):
        runner = Executable(text_model(text))
        rows = mib * 256
        device.start()
        memory = device.Memory((mib << 20) + 256, "x")
        runner.stream.fill(memory.address, 0, mib << 20)
        tensor = DeviceTensor(memory.address, (rows, 1024), "float32", 0, memory)
        binding = runner.io_binding()
        binding.bind_output("y", "cpu")

        def bind(address: int, binding: object = binding, rows: int = rows) -> None:
            binding.bind_input("x", "cuda", 0, np.float32, (rows, 1024), address)  # type: ignore[attr-defined]

        runner.run(None, {"x": tensor})
        bind(memory.address)
        runner.run_with_iobinding(binding)
        copied = microseconds(lambda r=runner, t=tensor: r.run(None, {"x": t}))  # type: ignore[misc]
        placed = microseconds(lambda r=runner, b=binding: r.run_with_iobinding(b))  # type: ignore[misc]
        bind(memory.address + 256)
        started = time.perf_counter()
        runner.run_with_iobinding(binding)
        fresh = (time.perf_counter() - started) * 1e6
        print(f"{mib:8d}{copied:12.1f}{placed:13.1f}{fresh:26.1f}")


if __name__ == "__main__":
    main()

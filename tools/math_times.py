"""Times of the math kernels on large shapes: us, GB/s of operands moved once, TFLOP/s of products.

    python tools/math_times.py [WORD ...]     # only the rows whose label holds one of the words

Each row is one node, lowered, its launches enqueued ten times between two events after two warm-up
rounds; operands are random and larger than the L2 cache where the row is about bandwidth.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("", "tests")]
import onnx_ir  # noqa: E402
from math_cases import BF16, F16, F32, Case, dtype_of, i64  # noqa: E402

from onnx_fuse.cuda import nvrtc  # noqa: E402
from onnx_fuse.cuda.launch import bind  # noqa: E402
from onnx_fuse.lower.walk import lower  # noqa: E402
from onnx_fuse.onnx.common import FUSE  # noqa: E402
from onnx_fuse.program.call import Program  # noqa: E402
from onnx_fuse.program.problem import Hardware  # noqa: E402
from onnx_fuse.runtime import device  # noqa: E402

REPEATS = 10


def rows() -> Iterator[tuple[str, Case]]:
    """Label and case; arrays among the inputs stand for their shape and type."""
    for dtype in (BF16, F32):
        for m, k in ((8192, 4096), (65536, 768)):
            yield "layernorm", Case("LayerNormalization", ((m, k), (k,), (k,)), {}, 1, dtype)
            stat = np.ones((m, 1), np.float32)
            given = ((m, k), (m, k), (k,), stat, stat)
            yield "layernorm grad", Case("LayerNormGrad", given, {}, 3, dtype, FUSE)
        for shape in ((16384, 4096), (98304, 1024), (4096, 50304)):
            yield "softmax", Case("Softmax", (shape,), {}, 1, dtype)
        for shape in ((16384, 4096), (65536, 768)):
            yield "sum rows", Case("ReduceSum", (shape, i64(1)), {}, 1, dtype)
            yield "sum columns", Case("ReduceSum", (shape, i64(0)), {}, 1, dtype)
        yield "sum all", Case("ReduceSum", ((16384, 4096), None), {"keepdims": 0}, 1, dtype)
    image = (64, 256, 56, 56)
    statistics = ((256,),) * 4
    yield "batchnorm", Case("BatchNormalization", (image, *statistics), {"training_mode": 1}, 3)
    yield "groupnorm", Case("GroupNormalization", (image, (256,), (256,)), {"num_groups": 32})
    yield "argmax", Case("ArgMax", ((16384, 4096),), {"axis": 1})
    labels, logits = np.zeros((16384, 1), np.int64), (16384, 50304)
    yield "loss", Case("SoftmaxCrossEntropyLoss", (logits, labels[:, 0]), {}, 1, BF16)
    given = (logits, labels, (16384, 1))
    yield "loss grad", Case("SoftmaxCrossEntropyGrad", given, {}, 1, BF16, FUSE)
    for axis in (0, 1):
        yield "cumsum", Case("CumSum", ((8192, 8192), np.array(axis, np.int64)))
    yield "topk", Case("TopK", ((1024, 50257), i64(50)), {}, 2)
    window = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}
    yield "maxpool", Case("MaxPool", ((64, 64, 112, 112),), window)
    same = {"pads": [1] * 4}
    for dtype in (F32, F16):
        for c, size in ((64, 56), (256, 14), (512, 7)):
            given = ((64, c, size, size), (c, c, 3, 3), (c,))
            yield "conv 3x3", Case("Conv", given, same, 1, dtype)
        yield "conv 1x1", Case("Conv", (image, (64, 256, 1, 1), (64,)), {}, 1, dtype)
        first = ((64, 3, 224, 224), (64, 3, 7, 7), (64,))
        yield "conv 7x7", Case("Conv", first, {"pads": [3] * 4, "strides": [2, 2]}, 1, dtype)
        yield "conv dw", Case("Conv", ((64, 64, 56, 56), (64, 64, 56, 56)), same, 1, dtype)
    yield "depthwise", Case("Conv", (image, (256, 1, 3, 3)), {"group": 256, **same})
    for dtype, (b, h, t, d) in (
        (BF16, (16, 12, 1024, 64)),
        (BF16, (4, 16, 4096, 128)),
        (F32, (4, 12, 1024, 64)),
    ):
        q, lse, scale = (b, h, t, d), np.zeros((b, h, t, 2), np.float32), {"scale": d**-0.5}
        for kind in ("", "Causal"):
            yield "attention", Case(f"Sdpa{kind}_lse", (q, q, q), scale, 2, dtype, FUSE)
            given = (q, q, lse, q, q, q)
            yield "attention grad", Case(f"Sdpa{kind}Grad", given, scale, 3, dtype, FUSE)


def program(case: Case, hw: Hardware) -> Program:
    """The case lowered from shapes alone: no operand is made on the host."""
    arrays = [
        np.broadcast_to(np.zeros(1, dtype_of(case.dtype)), spec)
        if isinstance(spec, tuple)
        else spec
        for spec in case.inputs
    ]
    model = onnx_ir.serde.deserialize_model(case.model(arrays))
    named = {v.name or "": arrays[int((v.name or "x0")[1:])] for v in model.graph.inputs}
    shapes = {name: (a.shape, a.dtype.name) for name, a in named.items() if a is not None}
    return lower(model, shapes, hw)


def flops(case: Case, program: Program) -> float:
    """Of the products; an attention's without its recomputation, the causal half of the square."""
    if "Sdpa" not in case.op:
        return float(sum(call.flops for call in program.calls))
    b, h, t, d = case.inputs[0]
    forward = 4.0 * b * h * t * t * d / (2 if "Causal" in case.op else 1)
    return forward * (2.5 if "Grad" in case.op else 1)


def seconds(program: Program, hw: Hardware, stream: device.Stream) -> float:
    """Mean time of one run of all launches."""
    from cuda.bindings import driver

    noise = np.random.default_rng(0).standard_normal(1 << 20)
    memory = {b.id: device.Memory(b.nbytes, "timing") for b in program.buffers}
    for buffer in memory.values():
        driver.cuMemsetD8(buffer.address, 0, buffer.nbytes)
    for _, t in program.inputs:
        if dtype_of(t.dtype).kind in "fV":
            chunk, at, done = noise.astype(dtype_of(t.dtype)), memory[t.buffer].address, 0
            while done < t.nbytes:
                n = min(chunk.nbytes, t.nbytes - done)
                driver.cuMemcpyHtoD(at + done, chunk.ctypes.data, n)
                done += n
    for i, array in program.constants.items():
        driver.cuMemcpyHtoD(
            memory[i].address, np.ascontiguousarray(array).ctypes.data, array.nbytes
        )
    work = device.Memory(max(call.workspace for call in program.calls), "workspace")
    bound = [
        bind(
            launch,
            {n: memory[t.buffer].address for n, t in (*call.reads, *call.writes)}
            | {"workspace": work.address},
            hw,
        )
        for call in program.calls
        for launch in call.launches
    ]
    begin, end = (driver.cuEventCreate(0)[1] for _ in range(2))
    for repeat in range(REPEATS + 2):
        if repeat == 2:
            driver.cuEventRecord(begin, stream.handle)
        for launch in bound:
            launch.enqueue(stream.handle)
    driver.cuEventRecord(end, stream.handle)
    device.check(driver.cuEventSynchronize(end), "timing")
    return float(driver.cuEventElapsedTime(begin, end)[1]) * 1e-3 / REPEATS


def main(words: list[str]) -> None:
    device.start()
    hw, stream = Hardware.detect(), device.Stream()
    wanted = [(w, c) for w, c in rows() if not words or any(word in w for word in words)]
    jobs = [(label, case, program(case, hw)) for label, case in wanted]
    nvrtc.compile_all({x for _, _, p in jobs for c in p.calls for x in c.launches}, hw.arch)
    for label, case, lowered in jobs:
        took = seconds(lowered, hw, stream)
        ends = [t for _, t in (*lowered.inputs, *lowered.outputs) if not isinstance(t, np.ndarray)]
        rate, work = sum(t.nbytes for t in ends) / took * 1e-9, flops(case, lowered)
        shape = "x".join(map(str, case.inputs[0]))
        products = f"{work / took * 1e-12:7.1f} TFLOP/s" if work else ""
        name = f"{label:15s} {case.dtype:9s} {shape:18s}"
        print(f"{name} {took * 1e6:9.1f} us {rate:6.0f} GB/s {products}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Times of every lowered operator, with torch's kernels in the same run, on one GPU.

    python tools/bench_operators.py [WORD ...] [--json FILE]    # rows that hold one of the words

Every operator at 10,000 and 10,000,000 elements, as few long rows and as many short ones. Inputs
stand on the GPU; the launches of a lowered node and torch's call are captured in a CUDA graph each
and timed by events. What reads a size back (NonZero, Unique) is timed by the host's clock, on both
sides. A row shows the times, their ratio (none where torch has no such operator), the time that
the bytes take at the chip's rate, and what `--target` predicts; the ten that are worst against
their bytes come last. Matrix products, convolutions and attention have more tables in
tools/kernel_lab.py and tools/bench_torch.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]
import onnx_ir  # noqa: E402
from math_cases import Case, dtype_of, i64  # noqa: E402
from operator_rows import UNTIMED, every  # noqa: E402

from onnx_fuse import InferenceSession  # noqa: E402
from onnx_fuse.cuda import nvrtc  # noqa: E402
from onnx_fuse.cuda.launch import bind  # noqa: E402
from onnx_fuse.ir.constants import FUSE  # noqa: E402
from onnx_fuse.kernels import site  # noqa: E402
from onnx_fuse.lower.decompose import DECOMPOSED  # noqa: E402
from onnx_fuse.lower.table import lowerings  # noqa: E402
from onnx_fuse.lower.walk import lower  # noqa: E402
from onnx_fuse.program.call import Program  # noqa: E402
from onnx_fuse.program.problem import Hardware  # noqa: E402
from onnx_fuse.runtime import device  # noqa: E402

Torch = Callable[..., Any]
ROUNDS, WARM = 5, 10
"""Times that are measured, and runs before them by the host's clock."""
SHORT = 64
"""Elements of a short row."""
UNARY = {
    "Abs": "abs", "Acos": "acos", "Acosh": "acosh", "Asin": "asin", "Asinh": "asinh",
    "Atan": "atan", "Atanh": "atanh", "Ceil": "ceil", "Cos": "cos", "Cosh": "cosh", "Erf": "erf",
    "Exp": "exp", "Floor": "floor", "Identity": "clone", "IsInf": "isinf", "IsNaN": "isnan",
    "Log": "log", "Neg": "neg", "Reciprocal": "reciprocal", "Relu": "relu", "Round": "round",
    "Sigmoid": "sigmoid", "Sign": "sign", "Sin": "sin", "Sinh": "sinh", "Sqrt": "sqrt",
    "Tan": "tan", "Tanh": "tanh", "Softplus": "softplus", "Gelu": "gelu", "Elu": "elu",
    "Selu": "selu", "Celu": "celu", "Mish": "mish", "HardSwish": "hardswish",
    "HardSigmoid": "hardsigmoid", "LeakyRelu": "leaky_relu", "Softsign": "softsign",
    "ThresholdedRelu": "relu", "Shrink": "hardshrink", "Swish": "silu",
}  # fmt: skip
BINARY = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Pow": "pow", "Max": "maximum",
    "Min": "minimum", "Equal": "eq", "Greater": "gt", "GreaterOrEqual": "ge", "Less": "lt",
    "LessOrEqual": "le", "Mod": "fmod",
}  # fmt: skip
REDUCTIONS = {
    "ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "amax", "ReduceMin": "amin",
    "ReduceProd": "prod", "ReduceLogSumExp": "logsumexp", "ReduceL2": "norm",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One operator at one shape, and what torch does with the same tensors."""

    case: Case
    torch: Torch | None
    shape: str

    @property
    def name(self) -> str:
        """The operator, and what its case notes."""
        return " ".join(filter(None, (self.case.op, self.case.note)))


@dataclass(frozen=True)
class Timed:
    """A row's microseconds; `floor` is what its bytes take, `predicted` what selection expects."""

    name: str
    shape: str
    ours: float
    torch: float
    floor: float
    predicted: float


def shapes(n: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """(label, shape) of n elements: one row, few long ones and many short ones."""
    for rows in (1, 8, n // SHORT):
        yield f"{rows} x {n // rows}", (rows, n // rows)


def rows(n: int) -> Iterator[Row]:
    """The rows of n elements."""
    import torch

    functional = torch.nn.functional
    label, shape = next(shapes(n))
    for op, name in UNARY.items():
        call = getattr(torch, name, None) or getattr(functional, name)
        more = {"lambd": 0.5} if op == "Shrink" else {}
        opset = {"Swish": 24}.get(op, 22)
        yield Row(Case(op, (shape,), more, opset=opset), call, label)
    for op, name in BINARY.items():
        more = {"fmod": 1} if op == "Mod" else {}
        yield Row(Case(op, (shape, shape), more), getattr(torch, name), label)
    condition = np.zeros(shape, np.bool_)
    yield Row(Case("Where", (condition, shape, shape)), torch.where, label)
    yield Row(Case("Clip", (shape, np.float32(-1), np.float32(1))),
              lambda x, a, b: torch.clamp(x, -1.0, 1.0), label)  # fmt: skip
    for label, shape in shapes(n):
        yield from _of_rows(label, shape)
        yield from _indexed(label, shape)
    yield from _images(n)
    for case, call, label in every(n):
        yield Row(case, call, label)


def _of_rows(label: str, shape: tuple[int, int]) -> Iterator[Row]:
    import torch

    functional = torch.nn.functional
    count, length = shape
    square = int(length**0.5)
    for op, name in REDUCTIONS.items():
        call = getattr(torch, name)
        yield Row(Case(op, (shape, i64(1))), lambda x, *_, call=call: call(x, dim=1), label)
    yield Row(Case("ReduceSum", ((length, count), i64(0)), note="columns"),
              lambda x, *_: torch.sum(x, dim=0), label)  # fmt: skip
    yield Row(Case("ArgMax", (shape,), {"axis": 1}), lambda x: torch.argmax(x, 1), label)
    yield Row(Case("Softmax", (shape,), {"axis": 1}), lambda x: torch.softmax(x, 1), label)
    yield Row(Case("LogSoftmax", (shape,), {"axis": 1}), lambda x: torch.log_softmax(x, 1), label)
    yield Row(Case("LayerNormalization", (shape, (length,), (length,)), {"axis": 1}),
              lambda x, s, b: functional.layer_norm(x, (x.shape[1],), s, b), label)  # fmt: skip
    yield Row(Case("RMSNormalization", (shape, (length,)), {"axis": 1}, opset=23),
              lambda x, s: functional.rms_norm(x, (x.shape[1],), s), label)  # fmt: skip
    if length >= 1000:
        stat = np.ones((count, 1), np.float32)

        def backward(x: Any, dy: Any, s: Any, mean: Any, rstd: Any) -> Any:
            back = torch.ops.aten.native_layer_norm_backward
            return back(dy, x, s.shape, mean, rstd, s, s, [True] * 3)

        given = (shape, shape, (length,), stat, stat)
        yield Row(Case("LayerNormGrad", given, {}, 3, domain=FUSE), backward, label)
    planes = (count, 4, square, max(1, length // square // 4))
    yield Row(Case("InstanceNormalization", (planes, (4,), (4,))),
              lambda x, s, b: functional.instance_norm(x, weight=s, bias=b), label)  # fmt: skip
    yield Row(Case("LpNormalization", (shape,), {"axis": 1}),
              lambda x: functional.normalize(x, dim=1), label)  # fmt: skip
    axis = np.array(1, np.int64)
    yield Row(Case("CumSum", (shape, axis)), lambda x, *_: torch.cumsum(x, 1), label)
    yield Row(Case("CumSum", ((length, count), np.array(0, np.int64)), note="columns"),
              lambda x, *_: torch.cumsum(x, 0), label)  # fmt: skip
    for k in {min(50, length), length}:
        yield Row(Case("TopK", (shape, i64(k)), {"axis": 1}, 2, note=f"of {k}"),
                  lambda x, *_, k=k: torch.topk(x, k, 1), label)  # fmt: skip
    yield Row(Case("Transpose", (shape,), {"perm": [1, 0]}),
              lambda x: x.t().clone(memory_format=torch.contiguous_format), label)  # fmt: skip
    yield Row(Case("Concat", (shape, shape), {"axis": 1}),
              lambda x, y: torch.cat((x, y), 1), label)  # fmt: skip


def _indexed(label: str, shape: tuple[int, int]) -> Iterator[Row]:
    import torch

    count, length = shape
    rng = np.random.default_rng(0)
    index = rng.integers(0, length, shape)
    yield Row(Case("GatherElements", (shape, index), {"axis": 1}),
              lambda x, i: torch.gather(x, 1, i), label)  # fmt: skip
    yield Row(Case("Gather", (shape, index[0, None]), {"axis": 1}),
              lambda x, i: torch.index_select(x, 1, i[0]), label)  # fmt: skip
    for reduction, name in (("none", ""), ("add", "sum"), ("max", "amax"), ("mul", "prod")):
        how = {"axis": 1, "reduction": reduction}

        def scatter(x: Any, i: Any, u: Any, name: str = name) -> Any:
            return x.scatter_reduce(1, i, u, name) if name else x.scatter(1, i, u)

        yield Row(Case("ScatterElements", (shape, index, shape), how, note=reduction),
                  scatter, label)  # fmt: skip
    places = rng.integers(0, count * length, (count * length // 4, 1))
    flat = (count * length,)
    for reduction in ("none", "add"):

        def put(x: Any, i: Any, u: Any, reduction: str = reduction) -> Any:
            return x.index_put((i[:, 0],), u, accumulate=reduction == "add")

        if count == 1:
            given = (flat, places, (len(places),))
            how = {"reduction": reduction}
            yield Row(Case("ScatterND", given, how, note=reduction), put, label)
    if count == 1:
        some = rng.random(shape) < 0.5
        yield Row(Case("NonZero", (some,)), torch.nonzero, label)
        yield Row(Case("Unique", (index,), {}, 4),
                  lambda x: torch.unique(x, return_inverse=True, return_counts=True),
                  label)  # fmt: skip


def _images(n: int) -> Iterator[Row]:
    import torch

    functional = torch.nn.functional
    side = int((n / 64) ** 0.5) // 2 * 2
    shape, label = (1, 64, side, side), f"64 x {side} x {side}"
    two = {"kernel_shape": [2, 2], "strides": [2, 2]}
    half = side // 2
    at = np.arange(side * side * 64).reshape(64, half, 2, half, 2)[None, :, :, 0, :, 1]
    yield Row(Case("MaxUnpool", ((1, 64, half, half), at), two),
              lambda x, i: functional.max_unpool2d(x, i % (side * side), 2, 2), label)  # fmt: skip
    yield Row(Case("MaxPool", (shape,), two), lambda x: functional.max_pool2d(x, 2, 2), label)
    yield Row(Case("AveragePool", (shape,), two), lambda x: functional.avg_pool2d(x, 2, 2), label)
    yield Row(Case("GlobalAveragePool", (shape,)), lambda x: x.mean((2, 3), keepdim=True), label)
    yield Row(Case("LRN", (shape,), {"size": 5}),
              lambda x: functional.local_response_norm(x, 5), label)  # fmt: skip
    scales = np.float32([1, 1, 2, 2])
    yield Row(Case("Resize", (shape, None, scales), {"mode": "linear"}),
              lambda x, *_: functional.interpolate(x, scale_factor=2, mode="bilinear"),
              label)  # fmt: skip
    grid = (1, side, side, 2)
    yield Row(Case("GridSample", (shape, grid)),
              lambda x, g: functional.grid_sample(x, g, align_corners=False), label)  # fmt: skip
    yield Row(Case("BatchNormalization", (shape, *((64,),) * 3, np.ones(64, np.float32))),
              lambda x, s, b, m, v: functional.batch_norm(x, m, v, s, b), label)  # fmt: skip
    yield Row(Case("GroupNormalization", (shape, (64,), (64,)), {"num_groups": 8}),
              lambda x, s, b: functional.group_norm(x, 8, s, b), label)  # fmt: skip
    yield Row(Case("DepthToSpace", (shape,), {"blocksize": 2}),
              lambda x: functional.pixel_shuffle(x, 2), label)  # fmt: skip
    yield Row(Case("Pad", (shape, i64(0, 0, 1, 1, 0, 0, 1, 1))),
              lambda x, *_: functional.pad(x, (1, 1, 1, 1)), label)  # fmt: skip


def operands(case: Case) -> list[Any]:
    """The inputs as torch's tensors on the GPU; None where there is none."""
    import torch

    given: list[Any] = []
    for spec in case.inputs:
        if isinstance(spec, tuple):
            given.append(torch.randn(spec, device="cuda"))
        else:
            given.append(None if spec is None else torch.from_numpy(np.asarray(spec)).cuda())
    return given


def replayed(work: Callable[[], object], repeats: int) -> float:
    """Microseconds of `work`, from replays of a CUDA graph that holds it `repeats` times."""
    import torch
    from gpu_events import microseconds

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    graph.replay()
    return median(microseconds(graph.replay) / repeats for _ in range(ROUNDS))


def awaited(work: Callable[[], object]) -> float:
    """Microseconds of `work` by the host's clock, until the GPU is done."""
    import torch

    took = []
    for repeat in range(3 * ROUNDS + WARM):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if repeat >= WARM:
            took.append((time.perf_counter() - started) * 1e6)
    return median(took)


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


def launches(lowered: Program, given: Sequence[Any], hw: Hardware) -> Callable[[], None]:
    """What enqueues a program's launches into torch's stream, over memory of torch's."""
    import torch

    def bytes_of(nbytes: int) -> Any:
        return torch.empty(max(16, nbytes), dtype=torch.uint8, device="cuda")

    memory = {b.id: bytes_of(b.nbytes) for b in lowered.buffers}
    for name, t in lowered.inputs:
        source = given[int(name[1:])].contiguous().reshape(-1).view(torch.uint8)
        memory[t.buffer][: source.numel()] = source
    for i, array in lowered.constants.items():
        raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        memory[i][: raw.size] = torch.from_numpy(raw.copy()).cuda()
    calls = (*lowered.setup, *lowered.calls)
    work = bytes_of(max((call.workspace for call in calls), default=0))

    def bound(call: Any) -> list[Any]:
        pointers = {n: memory[t.buffer].data_ptr() + t.offset * t.nbytes // max(1, t.size)
                    for n, t in (*call.reads, *call.writes)}  # fmt: skip
        return [bind(x, pointers | {"workspace": work.data_ptr()}, hw) for x in call.launches]

    stream = torch.cuda.current_stream().cuda_stream
    for call in lowered.setup:
        for step in bound(call):
            step.enqueue(stream)
    steps = [step for call in lowered.calls for step in bound(call)]

    def enqueue(held: object = (memory, work)) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        for step in steps:
            step.enqueue(stream)

    return enqueue


def measure(row: Row, lowered: Program, hw: Hardware, n: int) -> Timed:
    """The row's times."""
    given = operands(row.case)
    ends = [t for _, t in (*lowered.inputs, *lowered.outputs) if hasattr(t, "nbytes")]
    moved = sum(t.nbytes for t in ends if not isinstance(t, np.ndarray))
    predicted = sum(site(c, hw).seconds for c in lowered.calls if c.problem) * 1e6

    def call() -> None:
        if row.torch is not None:
            row.torch(*given)

    def peer(timed: Callable[[], float]) -> float:
        return timed() if row.torch is not None else nan

    if lowered.stages:
        arrays = [None if g is None else g.cpu().numpy() for g in given]
        session = InferenceSession(row.case.model(arrays).SerializeToString(), device="cuda")
        binding = session.io_binding()
        for i in (int(end.name[1:]) for end in session.get_inputs()):
            tensor = given[i]
            binding.bind_ortvalue_input(f"x{i}", tensor)
        for i in range(row.case.outputs):
            binding.bind_output(f"y{i}", "cuda")
        ours = awaited(lambda: session.run_with_iobinding(binding))
        torchs = peer(lambda: awaited(call))
    else:
        repeats = 20 if n < 1 << 20 else 3
        ours = replayed(launches(lowered, given, hw), repeats)
        torchs = peer(lambda: replayed(call, repeats))
    return Timed(row.name, row.shape, ours, torchs, moved / hw.bandwidth * 1e6, predicted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import torch

    torch.cuda.init()
    torch.backends.cudnn.allow_tf32 = False  # as ours, which compute float32 as it is
    torch.zeros(1, device="cuda")
    device.start()
    hw, timed = Hardware.detect(), []
    seen: set[str] = set()
    print(f"{hw.name}\n{'operator':32s}{'shape':20s}{'us':>10s}{'torch':>10s}{'ratio':>7s}"
          f"{'bytes':>9s}{'predicted':>10s}")  # fmt: skip
    for n in (10_000, 10_000_000):
        chosen = [r for r in rows(n) if not args.words or any(w in r.name for w in args.words)]
        jobs = [(row, program(row.case, hw)) for row in chosen]
        nvrtc.compile_all({x for _, p in jobs for c in p.calls for x in c.launches}, hw.arch)
        for row, lowered in jobs:
            seen.add(row.case.op)
            try:
                one = measure(row, lowered, hw, n)
            except RuntimeError as error:  # torch may lack a kernel for the shape
                print(f"{row.name:32s}{row.shape:20s} {str(error)[:90]!r}")
                torch.cuda.synchronize()
                continue
            timed.append(one)
            print(f"{one.name:32s}{one.shape:20s}{one.ours:10.1f}{one.torch:10.1f}"
                  f"{one.ours / one.torch:7.2f}{one.floor:9.1f}{one.predicted:10.1f}",
                  flush=True)  # fmt: skip
            torch.cuda.empty_cache()
    print("\nworst against their bytes, of those of 10,000,000 elements:")
    large = [t for t in timed if t.floor > 1]
    for t in sorted(large, key=lambda t: t.floor / t.ours)[:10]:
        print(f"{t.name:32s}{t.shape:20s}{t.ours / t.floor:9.1f} times")
    slow = [t for t in timed if t.ours > 3 * t.torch]
    print(f"\n{len(timed)} rows, {len(slow)} above 3 times torch's:")
    for t in slow:
        print(f"{t.name:32s}{t.shape:20s}{t.ours / t.torch:7.2f}")
    lowered = {op for domain, op in (*lowerings(), *DECOMPOSED) if not domain}
    unneeded = {op for ops in UNTIMED.values() for op in ops}
    print(f"\nnot timed here: {' '.join(sorted(lowered - seen - unneeded))}")
    if args.json:
        args.json.write_text(json.dumps([asdict(t) for t in timed], indent=1))


if __name__ == "__main__":
    main()

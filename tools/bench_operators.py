"""Times of every lowered operator, with torch's kernels in the same run, on one GPU.

    python tools/bench_operators.py [WORD ...] [--json FILE]    # rows that hold one of the words

Every operator at 10,000 and 10,000,000 elements, as few long rows and as many short ones. Inputs
stand on the GPU; the launches of a lowered node and torch's call are captured in a CUDA graph each
and timed by events. What reads a size back (NonZero, Unique) is timed by the host's clock, on both
sides. A row shows the times, their ratio (none where torch has no such operator), the time that
the bytes take at the chip's rate, and what `--target` predicts; the ten that are worst against
their bytes come last. Matrix products, convolutions and attention have more rows in
`onnx-fuse lab` and tools/bench_torch.py.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

import _paths  # noqa: F401
import numpy as np
import onnx_ir
import torch
from gpu_events import captured, launches, microseconds
from math_cases import Case, dtype_of
from operator_rows import UNTIMED, Row, Rows

from onnx_fuse import InferenceSession
from onnx_fuse.cuda import nvrtc
from onnx_fuse.kernels import site
from onnx_fuse.lower.decompose import DECOMPOSED
from onnx_fuse.lower.table import lowerings
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Program
from onnx_fuse.program.problem import Hardware
from onnx_fuse.runtime import device

ROUNDS, WARM = 5, 10
"""Times that are measured, and runs before them by the host's clock."""


@dataclass(frozen=True)
class Timed:
    """A row's microseconds; `floor` is what its bytes take, `predicted` what selection expects."""

    name: str
    shape: str
    ours: float
    torch: float
    floor: float
    predicted: float


def operands(case: Case) -> list[Any]:
    """The inputs as torch's tensors on the GPU; None where there is none."""
    given: list[Any] = []
    for spec in case.inputs:
        if isinstance(spec, tuple):
            given.append(torch.randn(spec, device="cuda"))
        else:
            given.append(None if spec is None else torch.from_numpy(np.asarray(spec)).cuda())
    return given


def replayed(work: Callable[[], object], repeats: int) -> float:
    """Microseconds of `work`, from replays of a CUDA graph that holds it `repeats` times."""

    def several() -> None:
        for _ in range(repeats):
            work()

    graph = captured(several, 1)
    graph.replay()
    return median(microseconds(graph.replay) / repeats for _ in range(ROUNDS))


def awaited(work: Callable[[], object]) -> float:
    """Microseconds of `work` by the host's clock, until the GPU is done."""
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
        named = {f"x{i}": tensor for i, tensor in enumerate(given) if tensor is not None}
        ours = replayed(launches(lowered, named, hw), repeats)
        torchs = peer(lambda: replayed(call, repeats))
    return Timed(row.name, row.shape, ours, torchs, moved / hw.bandwidth * 1e6, predicted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("words", nargs="*")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.cuda.init()
    torch.backends.cudnn.allow_tf32 = False  # as ours, which compute float32 as it is
    torch.zeros(1, device="cuda")
    device.start()
    hw, timed = Hardware.detect(), []
    seen: set[str] = set()
    print(f"{hw.name}\n{'operator':32s}{'shape':20s}{'us':>10s}{'torch':>10s}{'ratio':>7s}"
          f"{'bytes':>9s}{'predicted':>10s}")  # fmt: skip
    for n in (10_000, 10_000_000):
        chosen = [r for r in Rows(n) if not args.words or any(w in r.name for w in args.words)]
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

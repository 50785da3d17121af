"""Tuning: which kernel and configuration serves each problem of a program best on this GPU.

Every candidate's likeliest configurations, by the cost model, run on random operands of the call's
shapes and strides. Those whose results are not the present choice's are left out; the others are
timed as CUDA-graph replays over operands that rotate through more than the L2 cache, taking turns.
The winners are tuning records, which `select` reads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path

import numpy as np

from onnx_fuse import config, progress
from onnx_fuse.cuda import nvrtc
from onnx_fuse.cuda.launch import PlacedLaunch, bind
from onnx_fuse.kernels import Selection, by_cost, candidates, select, tuning
from onnx_fuse.kernels.kernel import Candidate
from onnx_fuse.program.call import Call, Program, Tensor, dtype_of
from onnx_fuse.program.contractions import Attention
from onnx_fuse.program.passes.select import with_launches
from onnx_fuse.program.problem import ITEMSIZE, AnyProblem, GemmProblem, Hardware
from onnx_fuse.runtime import device

SETS = 16  # of operands at most
NOISE = 0.01  # timings of one kernel differ by as much: what is less faster is no winner
SAMPLE = 1 << 19  # elements compared at either end of a result
# Relative Frobenius difference of two kernels' results: each rounds once, and sums in its order.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
TF32 = 2e-3  # where one kernel's products of float32 are IEEE's, another's of ten bits of mantissa


@dataclass(frozen=True)
class Tuned:
    """One problem: what was chosen before and what is now, in microseconds a call."""

    problem: AnyProblem
    before: str
    before_us: float
    kernel: str
    config: str
    us: float
    floor: float
    """The part of `us` that no kernel goes below."""
    tried: int
    refused: tuple[str, ...]
    """Configurations whose results differed from the present choice's."""


def calls_of(program: Program, op: str = "") -> list[Call]:
    """One call for each problem (of `op`, if given)."""
    by_key = {tuning.key(c.problem.op, c.problem): c for c in program.calls if c.problem}
    return [c for c in by_key.values() if c.problem and op in ("", c.problem.op)]


def tune(
    calls: Sequence[Call],
    hw: Hardware,
    *,
    top: int = 6,
    seconds: float = 120,
    folder: Path | None = None,
) -> Iterator[Tuned]:
    """Tune each call's problem and keep the winners in `folder` (None: the user's own records).

    `top` configurations of each candidate are tried; none is begun after `seconds`.
    """
    folder = folder or config.CACHE_DIR.value / "tuning"
    until = time.monotonic() + seconds
    for i, call in enumerate(calls):
        if time.monotonic() > until:
            return
        assert call.problem is not None
        choices = shortlist(call.problem, hw, top)
        if len(choices) < 2:  # nothing to choose
            continue
        progress.report("tuning", i, len(calls))
        result, entry = _tune(call, call.problem, choices, hw, until)
        tuning.save([(call.problem.op, call.problem, entry)], hw, folder, candidates)
        yield result


def shortlist(problem: AnyProblem, hw: Hardware, top: int = 6) -> list[Selection]:
    """The present choice, then `top` configurations of each candidate, best predicted first.

    Those predicted to take more than twice the least are left out.
    """
    present = select(problem.op, problem, hw)
    assert present is not None
    choices: list[Selection] = []
    for kernel in candidates(problem.op):
        choices += ranked(kernel, problem, hw)[:top]
    choices.sort(key=lambda choice: choice.seconds)
    first = (present.kernel.name, present.config)
    return [present] + [
        choice
        for choice in choices
        if choice.seconds <= 2 * choices[0].seconds and (choice.kernel.name, choice.config) != first
    ]


def ranked(
    kernel: Candidate, problem: AnyProblem, hw: Hardware, why: str = "tuned"
) -> list[Selection]:
    """The configurations of a kernel, best predicted first; none where it does not serve."""
    return [] if kernel.supports(problem, hw) else [*by_cost((kernel,), problem, hw, why)]


def prepared(call: Call, choices: Sequence[Selection], hw: Hardware) -> tuple[list[Call], Operands]:
    """The call by each of the choices, compiled, and operands for all of them."""
    calls = [with_launches(call, choice, hw) for choice in choices]
    with progress.watched(None):  # its kernels are a part of the step
        nvrtc.compile_all((launch for c in calls for launch in c.launches), hw.arch)
    return calls, Operands(call, max(c.workspace for c in calls), hw)


def _tune(
    call: Call, problem: AnyProblem, choices: Sequence[Selection], hw: Hardware, until: float
) -> tuple[Tuned, dict[str, object]]:
    math = problem.math if isinstance(problem, GemmProblem) else "ieee"
    present = choices[0]
    tries, operands = prepared(call, choices, hw)
    truth = operands.results(tries[0])
    runs, sound = [operands.graph(tries[0])], [present]
    refused: list[str] = []
    for choice, attempt in zip(choices[1:], tries[1:], strict=True):
        if time.monotonic() > until:
            break
        if not operands.agree(operands.results(attempt), truth, math):
            refused.append(f"{choice.kernel.name} {choice.config}")
            continue
        sound.append(choice)
        runs.append(operands.graph(attempt))
    times = [1e6 * seconds for seconds in medians(runs)]
    winner = min(range(len(sound)), key=times.__getitem__)
    if times[0] < (1 + NOISE) * times[winner]:
        winner = 0
    choice, us = sound[winner], times[winner]
    tuned = Tuned(
        problem,
        f"{present.kernel.name} {present.config}",
        times[0],
        choice.kernel.name,
        str(choice.config),
        us,
        1e6 * problem.floor(hw, call.bytes) / us,
        len(sound),
        tuple(refused),
    )
    return tuned, tuning.record(problem, choice.kernel, choice.config, us, hw)


def medians(runs: Sequence[Callable[[], float]]) -> list[float]:
    """The median seconds of each of the runs, which take turns."""
    times: list[list[float]] = [[] for _ in runs]
    best = inf
    for turn in range(5):
        for i, run in enumerate(runs):
            # slower candidates are timed once
            if turn == 0 or statistics.median(times[i]) < 1.15 * best:
                times[i].append(run())
        best = min(statistics.median(t) for t in times)
    return [statistics.median(t) for t in times]


class Operands:
    """Device memory of a call's operands, several sets over: more than twice the L2 cache."""

    def __init__(self, call: Call, workspace: int, hw: Hardware) -> None:
        device.start()
        self.hw, self.stream = hw, device.Stream()
        self.written = list(call.writes)
        tensors = dict([*call.reads, *call.writes])
        total = sum(t.span * ITEMSIZE[t.dtype] for t in tensors.values())
        self.sets: list[dict[str, int]] = []
        self._memory: list[device.Memory] = []
        rng = np.random.default_rng(0)
        self.filled = filled = {name: _random(rng, name, t) for name, t in call.reads}
        """The arrays that are read, flat."""
        if "offsets" in filled and isinstance(call.problem, Attention):  # of sequences alike
            count = len(filled["offsets"])
            ends = np.arange(count) * int(call.problem.packed) // max(1, count - 1)
            filled["offsets"] = ends.astype(np.int32)
        if isinstance(call.problem, GemmProblem) and call.problem.op == "LayerNormGemmGrad":
            filled |= _forward(call.problem, filled)
        for _ in range(max(2, min(SETS, 2 * hw.l2_bytes // max(1, total) + 1))):
            places = {}
            for name, tensor in tensors.items():
                array = filled.get(name)
                places[name] = self._place(tensor.span * ITEMSIZE[tensor.dtype], name)
                if array is not None:
                    self.stream.upload(places[name], array.ctypes.data, array.nbytes)
            places["workspace"] = self._place(workspace, "workspace")
            self.sets.append(places)
        self.stream.wait("uploading operands")

    def _place(self, nbytes: int, purpose: str) -> int:
        self._memory.append(device.Memory(max(16, nbytes), purpose))
        return self._memory[-1].address

    def _bound(self, call: Call, places: dict[str, int]) -> list[PlacedLaunch]:
        return [bind(launch, places, self.hw) for launch in call.launches]

    def results(self, call: Call) -> list[np.ndarray]:
        """The first and last elements of each result of the call, on the first set of buffers."""
        places = self.sets[0]
        for name, tensor in self.written:
            self.stream.fill(places[name], 0, tensor.span * ITEMSIZE[tensor.dtype])
        bound = self._bound(call, places)
        for step in bound:
            step.enqueue(self.stream.handle)
        arrays = []
        for name, tensor in self.written:
            size, item = tensor.span, ITEMSIZE[tensor.dtype]
            for at in {0, max(0, size - SAMPLE)}:
                array = np.empty(min(size, SAMPLE), dtype_of(tensor.dtype))
                self.stream.download(array.ctypes.data, places[name] + at * item, array.nbytes)
                arrays.append(array)
        self.stream.wait(f"{call.kernel}")
        return arrays

    @staticmethod
    def ends(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The first and last elements of each result, as `results` gives them."""
        flat = [array.reshape(-1) for array in arrays]
        return [a[at : at + SAMPLE] for a in flat for at in {0, max(0, a.size - SAMPLE)}]

    @staticmethod
    def agree(got: list[np.ndarray], want: list[np.ndarray], math: str = "ieee") -> bool:
        """Whether two runs differ by their roundings alone; what is not finite is the same."""
        limits = TOLERANCE | ({"float32": TF32} if math == "tf32" else {})
        for a, b in zip(got, want, strict=True):
            x, y = a.astype(np.float64), b.astype(np.float64)
            finite = np.isfinite(y)
            bound = limits.get(b.dtype.name, 0.0) * np.linalg.norm(y[finite])
            if not np.linalg.norm(x[finite] - y[finite]) <= bound:
                return False
            if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
                return False
        return True

    def graph(self, call: Call) -> Callable[[], float]:
        """Seconds of one call, by one replay of a graph of some ten milliseconds at most."""
        bound = [self._bound(call, places) for places in self.sets]
        least = max(call.bytes / self.hw.bandwidth, 3e-6)
        count = max(len(bound), min(200, int(4e-3 / least)))

        def enqueue() -> None:
            for i in range(count):
                for step in bound[i % len(bound)]:
                    step.enqueue(self.stream.handle)

        graph = self.stream.capture([enqueue])
        launch = partial(self.stream.launch, graph, "a graph")

        def run(_alive: object = bound) -> float:
            return self.stream.timed(launch, 2) / count

        return run


def _forward(problem: GemmProblem, filled: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the forward of a LayerNormGemmGrad leaves: some kernels take the sums of its rows from
    z, others from the product, and only of a z that fits x are they the same.
    """
    wide = {name: array.astype(np.float32) for name, array in filled.items()}
    x, gamma = wide["x"].reshape(problem.m, problem.k), wide["gamma"]
    w = wide["w"].reshape((problem.n, problem.k) if problem.trans_b else (problem.k, problem.n))
    w = w.T if problem.trans_b else w
    mean = np.zeros((problem.m, 1)) if problem.rms else x.mean(1, keepdims=True)
    rstd = 1 / np.sqrt(np.square(x - mean).mean(1, keepdims=True))
    shift = wide.get("c", 0) + (wide["beta"] @ w if "beta" in wide else 0)
    folded = (gamma[:, None] * w).astype(filled["w"].dtype)
    left = {
        "mean": mean, "rstd": rstd, "z": ((x - mean) * rstd * gamma) @ w + shift,
        "wq": folded.T if problem.trans_b else folded, "cs": folded.astype(np.float32).sum(0),
        "cv": shift,
    }  # fmt: skip
    return {
        name: np.resize(np.ascontiguousarray(left[name]), array.shape).astype(array.dtype)
        for name, array in filled.items()
        if name in left
    }


def _random(rng: np.random.Generator, name: str, tensor: Tensor) -> np.ndarray:
    dtype = dtype_of(tensor.dtype)
    if tensor.dtype in ("int8", "uint8"):
        some = rng.integers(0, 256, min(tensor.span, 1_000_003)).astype(np.uint8)
        return np.resize(some.view(dtype), tensor.span)
    if tensor.dtype not in TOLERANCE:
        return np.zeros(tensor.span, dtype)
    # a large operand repeats a part of odd length: no two rows are alike
    part = rng.standard_normal(min(tensor.span, 1_000_003))
    if name in ("rstd", "part"):
        part = 0.5 + np.abs(part)
    return np.resize(part.astype(dtype), tensor.span)

"""Timing: a model as it is against the same model fused, taking turns on one device."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx_fuse.ir  # noqa: F401  # first: it imports onnx_ir without sympy

# isort: split
import numpy as np
import onnx_ir as ir
from onnxruntime import OrtValue, get_all_providers

from onnx_fuse import autodiff, progress, rewrite
from onnx_fuse import profile as profiling
from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError, UsageError, unknown
from onnx_fuse.importer.shapes import fix_shapes
from onnx_fuse.ir.build import feeds_of
from onnx_fuse.kernels import ExplainRow, site
from onnx_fuse.lower.walk import lower
from onnx_fuse.profile import Profile
from onnx_fuse.program.call import NeedsValues, Program
from onnx_fuse.program.problem import Hardware
from onnx_fuse.replicas import Replicas
from onnx_fuse.rewrite.precision import in_precision
from onnx_fuse.runtime import ort
from onnx_fuse.session import InferenceSession, why_missing
from onnx_fuse.validation.inputs import Feeds, cotangents_of, generate
from onnx_fuse.validation.request import Request

if TYPE_CHECKING:
    from onnx_fuse.runtime.executable import Executable
    from onnx_fuse.runtime.instance import Instance


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one run: the median and the 10th and 90th percentiles."""

    median: float
    low: float
    high: float


def timing(seconds: Array) -> Timing:
    """The median and the 10th and 90th percentiles, in milliseconds, of seconds."""
    low, median, high = (float(q) * 1e3 for q in np.quantile(seconds, (0.1, 0.5, 0.9)))
    return Timing(median, low, high)


Clock = Callable[[int], float]  # mean seconds of a run, by the number of runs
MODES = ("kernel", "end2end")
"""What is timed on a GPU: its work alone, or a call from arrays in host memory to results there."""


@dataclass(frozen=True)
class Comparison:
    """The same feeds through both models, in the same rounds; `ratio` is of the two medians.

    `noise` is the lowest and the highest of that ratio among the pairs of sessions and all rounds.
    """

    original: Timing
    fused: Timing
    ratio: float
    noise: tuple[float, float]
    feeds: dict[str, list[int]]
    rounds: list[tuple[float, float]]
    """Milliseconds of the original and of the fused model in each round."""
    clock: str = ""
    """What was measured: GPU time, wall-clock time, or the CPU time of one thread."""
    memory: tuple[int | None, int | None] = (None, None)
    """Bytes of GPU memory that each takes, weights, states and temporaries; None on the CPU."""

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON values."""
        return asdict(self)


PAIRS = 5  # sessions made anew: where one's buffers fall in memory moves a small model by 5 %
_RUNS, _ENOUGH = 11, 1.0  # what `run` times at most; no further run begins after these seconds
_BLOCK = 2e-3  # seconds of runs at a stretch, so that a small model finds its caches warm


def compare(
    path: Path,
    graph: ir.Model,
    request: Request,
    *,
    repeat: int = 50,
    threads: int = 0,
    grad: bool = False,
    loss: str = "",
    mode: str = "kernel",
    against: str = "unfused",
) -> Comparison:
    """Time the file at `path` and the fusion of `graph` (the same model, loaded) in rounds.

    On "cpu" both run in onnxruntime; on "cuda" the model at level 0 and at level 2, in the
    request's precision, by its launches, with feeds that lie there already. Each round runs both,
    first the one, then the other first, so that a change of the machine's speed meets both alike;
    the rounds are spread over PAIRS of sessions. `threads=0` is as many as onnxruntime takes; one
    thread is timed by its own clock, which stops while others run.
    The request's shapes are those of generated feeds alone: fixed in one of the two models, they
    would let onnxruntime rewrite that one further. With `grad` forward and backward are timed, of
    the model as it is and of its fusion for training; the file of weights is then `graph`'s. With
    a `loss` it is a training step with AdamW, at level 0 and at the highest. `mode` is one of
    MODES, and matters on "cuda". `against` "ort:NAME" times the file on that provider of
    onnxruntime's.
    """
    device, precision = request.device, request.precision
    own = request.providers or ort.CPU_ONLY
    theirs = providers_of(against)
    if request.feeds is not None:
        [feeds] = request.feeds
    else:
        sized = graph.clone()
        fix_shapes(sized, request.shapes or {}, request.dims)
        feeds = generate(sized, partial(ort.run, ort.session(path)))[-1][0]
    makers: list[Callable[[], Clock]]
    if loss:
        from onnx_fuse.training import data
        from onnx_fuse.training.trainer import Trainer

        # besides the model's inputs a step reads labels
        feeds = data.with_labels(feeds, Trainer(graph.clone(), loss=loss).spec().feeds)
        makers = [partial(_step_clock, graph, feeds, loss, level, device, precision, mode, threads)
                  for level in (0, None)]  # fmt: skip
    elif grad:
        both, feeds = _backwards(graph, feeds)
        if device == "cuda":
            makers = [partial(_gpu_clock, model, feeds, 0, precision, mode) for model in both]
        else:
            makers = [partial(_clock, model, feeds, threads, own) for model in both]
    elif device == "cuda":  # a session fuses what it is given
        makers = [partial(_gpu_clock, graph, feeds, n, precision, mode) for n in (0, 2)]
    else:
        fused = graph.clone()
        rewrite.optimize(fused)
        makers = [partial(_clock, model, feeds, threads, own) for model in (path, fused)]
    if theirs:
        makers[0] = partial(_clock, path, feeds, threads, theirs, bound=mode == "kernel")
    parts = np.array_split(np.arange(repeat), min(PAIRS, repeat))
    groups = []
    for i, part in enumerate(parts):
        progress.report("timing both models", i, len(parts))
        clocks = [make() for make in makers]
        groups.append(_rounds(clocks, len(part)))
        memory = [getattr(clock, "memory", None) for clock in clocks]
    times = np.concatenate(groups)
    ratios = [float(np.divide(*np.median(t, 0)[::-1])) for t in (times, *groups)]
    here = "CPU time of one thread" if threads == 1 else "wall-clock time"
    return Comparison(
        timing(times[:, 0]),
        timing(times[:, 1]),
        ratios[0],
        (min(ratios), max(ratios)),
        {name: list(array.shape) for name, array in feeds.items()},
        [(1e3 * float(a), 1e3 * float(b)) for a, b in times],
        "GPU time" if device == "cuda" and mode == "kernel" else here,
        (memory[0], memory[1]),
    )


def _backwards(graph: ir.Model, feeds: Feeds) -> tuple[list[ir.Model], Feeds]:
    """The model and its fusion with their gradients, and feeds with those of the outputs."""
    graphs = []
    for level in (0, 2):
        model = graph.clone()
        rewrite.optimize(model, level=level, training=True)
        graphs.append(autodiff.gradient(model))
    plain = ort.session(graph)
    names = [v.name for v in plain.get_outputs()]
    cotangents = autodiff.gradient_names(graphs[0].graph.inputs)
    seeds = cotangents_of(names, ort.run(plain, feeds), np.random.default_rng(0))
    return graphs, feeds_of(graphs[0], feeds | {cotangents[y]: seeds[y] for y in seeds})


def _rounds(clocks: Sequence[Clock], count: int) -> Array:
    """[count, 2] seconds of a run by either clock."""
    warm = [clock(1) for _ in range(3) for clock in clocks]
    runs = math.ceil(_BLOCK / min(warm))
    times = np.empty((count, 2))
    for i in range(count):
        for k in (0, 1) if i % 2 else (1, 0):
            times[i, k] = clocks[k](runs)
    return times


def providers_of(against: str) -> list[str]:
    """The providers that "ort:NAME" (or "cpu") asks onnxruntime for; none for "unfused".

    Raises UsageError where the installed onnxruntime has no such provider.
    """
    if against == "unfused":
        return []
    name = "cpu" if against == "cpu" else against.removeprefix("ort:")
    known = {p.removesuffix("ExecutionProvider").lower(): p for p in get_all_providers()}
    if name not in known:
        choices = ("unfused", *(f"ort:{name}" for name in known))
        raise UsageError(unknown("--against", against, choices))
    if reason := why_missing(known[name]):
        raise UsageError(f"--against {against}: {reason}")
    return list(dict.fromkeys((known[name], *ort.CPU_ONLY)))


def _clock(
    model: Path | ir.Model,
    feeds: Feeds,
    threads: int,
    providers: Sequence[Any],
    *,
    bound: bool = False,
) -> Clock:
    """A clock over a new session of onnxruntime; `bound` leaves arrays in a GPU's memory."""
    session = _session(model, threads, providers)
    run = partial(ort.run, session, feeds)
    if bound and providers[0] in _IN_GPU_MEMORY:
        run = partial(session.run_with_iobinding, _bound(session, feeds, "cuda"))
    return partial(_mean, run, _now(threads))


def _now(threads: int) -> Callable[[], float]:
    return time.process_time if threads == 1 else time.perf_counter


_IN_GPU_MEMORY = ("CUDAExecutionProvider", "TensorrtExecutionProvider")
"""The providers whose inputs and outputs may lie in the memory of a GPU."""


def _bound(session: Any, feeds: Feeds, place: str) -> Any:
    """A binding of the feeds, copied to the memory of `place`, and of all outputs there."""
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, OrtValue.ortvalue_from_numpy(array, place, 0))
    for end in session.get_outputs():
        binding.bind_output(end.name, place)
    return binding


def _mean(run: Callable[[], object], now: Callable[[], float], runs: int) -> float:
    """Mean seconds of so many runs by a clock of the host."""
    started = now()
    for _ in range(runs):
        run()
    return (now() - started) / runs


class _GpuClock:
    """A clock on the GPU: events around the launches of a run, or the host's around whole runs.

    `memory` are the bytes that the runs take there.
    """

    def __init__(
        self,
        executable: Executable,
        instance: Instance,
        run: Callable[[], Any] | None,
        states: int = 0,
    ) -> None:
        instance.capture()
        self._stream, self._launch, self._whole = executable.stream, instance.launch, run
        self.memory = executable.weights.nbytes + states + instance.plan.arena

    def __call__(self, runs: int) -> float:
        """Mean seconds of a run, over this number of runs."""
        if self._whole is None:
            return self._stream.timed(self._launch, runs)
        return _mean(self._whole, time.perf_counter, runs)


def _gpu_clock(graph: ir.Model, feeds: Feeds, level: int, precision: str, mode: str) -> Clock:
    session = InferenceSession(graph, device="cuda", level=level, precision=precision)
    session.run(None, feeds)
    executable = session._on_cuda()
    run = partial(session.run, None, feeds) if mode == "end2end" else None
    return _GpuClock(executable, executable.instance(feeds), run)


def _step_clock(
    graph: ir.Model,
    feeds: Feeds,
    loss: str,
    level: int | None,
    device: str,
    precision: str,
    mode: str,
    threads: int,
) -> Clock:
    from onnx_fuse.training.trainer import Trainer

    trainer = Trainer(
        graph.clone(), loss=loss, precision=precision, device=device, level=level, threads=threads
    )

    def step() -> float:
        return float(trainer.step(feeds))

    step()
    if device == "cuda":
        backend: Any = trainer._device
        states = backend._states
        update = states._executables["update"]
        held = states._home.weights.nbytes
        return _GpuClock(update, update.instances()[0], step if mode == "end2end" else None, held)
    return partial(_mean, step, _now(threads))


def _session(model: Path | ir.Model, threads: int, providers: Sequence[Any]) -> Any:
    """A session whose threads sleep between runs: they would take the other model's cores."""
    options = ort.quiet_options(threads=threads, spins="in runs")
    return ort.session(model, options, providers=providers)


@dataclass
class RunResult:
    """The outputs of one run, the median time of `runs`, and, where asked for, a profile."""

    feeds: Feeds
    outputs: dict[str, Array]
    milliseconds: float
    profile: Profile | None = None
    program: Program | None = None
    hardware: Hardware | None = None
    runs: int = 1
    providers: Sequence[str] = ()
    """The execution providers in use, as onnxruntime has them; none where there are several GPUs"""

    @property
    def operators(self) -> dict[str, tuple[int, float]]:
        """(runs, microseconds) by operator or kernel, where the run was profiled."""
        return self.profile.operators if self.profile else {}

    @property
    def total_us(self) -> float:
        """Microseconds of all operators together."""
        return sum(us for _, us in self.operators.values()) or 1.0


def run_once(
    graph: ir.Model,
    feeds: Feeds | None = None,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    profile: bool = False,
    compiled: Path | None = None,
    gpus: int = 1,
    providers: Sequence[Any] | None = None,
    pack: bool | Literal["zero"] = False,
) -> RunResult:
    """Run the fusion of `graph`; `profile` adds the Profile of a run.

    `providers` take the place of `device`, and `pack` is as in InferenceSession.

    With several `gpus` each takes its part of the batch, and there is no profile.
    `compiled` is a file of `deploy.compile` that has the graph and runs in its place.
    """
    if gpus > 1:
        return _run_on(gpus, compiled or graph, feeds, device, precision)
    where: dict[str, Any] = {"providers": providers} if providers else {"device": device}
    session = InferenceSession(compiled or graph, precision=precision, pack=pack, **where)
    feeds = feeds or generate(graph, lambda f: session.run(None, f), single=True)[0][0]
    result = _timed(session, feeds)
    result.providers = session.get_providers()
    if device == "cuda":
        result.program, result.hardware = session.program(feeds)
    if profile:
        if device == "cuda":
            result.profile = profiling.of_calls(session._on_cuda().instance(feeds).profile())
        else:
            result.profile = profiling.of_onnxruntime(session.model, feeds)
    return result


def _run_on(
    gpus: int, model: ir.Model | Path, feeds: Feeds | None, device: str, precision: str
) -> RunResult:
    """A batch over several devices; the first run makes each one's program."""
    if not feeds:
        raise UsageError("--gpus splits a batch: give it by --inputs FILE.npz")
    devices = [device if device == "cpu" else f"{device}:{i}" for i in range(gpus)]
    with Replicas(model, devices, precision=precision) as replicas:
        return _timed(replicas, feeds)


def _timed(session: InferenceSession | Replicas, feeds: Feeds) -> RunResult:
    """The outputs of a first run, and the median time of those that follow it."""
    names, outputs = [v.name for v in session.get_outputs()], session.run(None, feeds)
    times: list[float] = []
    while len(times) < _RUNS and sum(times) < _ENOUGH:
        started = time.perf_counter()
        session.run(None, feeds)
        times.append(time.perf_counter() - started)
    median, results = 1e3 * float(np.median(times)), dict(zip(names, outputs, strict=True))
    return RunResult(dict(feeds), results, median, runs=len(times))


def program(
    graph: ir.Model, hw: Hardware, feeds: Feeds | None = None, precision: str = "fp32"
) -> Program:
    """The program that a GPU would run for `graph`, without one; missing feeds are generated.

    Of generated sizes those are taken that the graph runs with. Raises the ModelError of the first
    where it runs with none.
    """
    graph, math = in_precision(graph, precision)
    if feeds:
        return _lowered(graph, feeds, hw, math)
    attempts: list[Program | Exception] = []

    def run(generated: Feeds) -> list[np.ndarray]:
        try:
            attempts.append(_lowered(graph, generated, hw, math))
        except ModelError as error:
            attempts.append(error)
            raise ValueError from error  # sizes that do not fit: others are tried
        except Exception as error:
            attempts.insert(0, error)
            raise ModelError(str(error)) from error  # which ends the search
        return [np.ones(1)]

    try:
        generate(graph, run, single=True)
    except ModelError as error:
        attempts = attempts or [error]
    first = next((m for m in attempts if isinstance(m, Program)), attempts[0])
    if isinstance(first, Exception):
        raise first
    return first


def _lowered(graph: ir.Model, feeds: Feeds, hw: Hardware, math: str) -> Program:
    shapes = {name: (array.shape, array.dtype.name) for name, array in feeds.items()}
    with contextlib.suppress(NeedsValues):
        return lower(graph, shapes, hw, math=math)
    # shapes depend on values: those of all small inputs but floats are given at once
    values = {k: a for k, a in feeds.items() if a.dtype.kind in "iubOU" and a.size <= 64}
    return lower(graph, shapes, hw, math=math, values=values)


def sites(program: Program, hw: Hardware) -> list[ExplainRow]:
    """Each kernel call of the program, explained."""
    return [site(call, hw) for call in program.calls if call.launches]

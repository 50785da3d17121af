"""Candidate kernels and their choice.

A candidate is an object with the methods of `kernel.Kernel`; `MODULES` says which module under
onnx_fuse/kernels holds the candidates of an op, best first, the plain one that serves every problem
last. `launch` is pure: it returns Launch records that name their arguments ("a", "y", "workspace");
`cuda.launch.bind` binds addresses and enqueues into a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any, TypeVar

from onnx_fuse import config
from onnx_fuse.errors import UsageError
from onnx_fuse.kernels import tuning
from onnx_fuse.kernels.kernel import Candidate
from onnx_fuse.kernels.rule_based import HeuristicKernel
from onnx_fuse.program.launch import Launches
from onnx_fuse.program.problem import AnyProblem, Hardware, KernelConfig, Prefs
from onnx_fuse.program.spec import GRID, of_launch

if TYPE_CHECKING:
    from onnx_fuse.program.call import Call


T = TypeVar("T")

# op -> module of its candidates; the module's KERNELS maps op -> candidates
MODULES: dict[str, str] = {
    "Gemm": "gemm",
    "LayerNormGemm": "layernorm_gemm",
    "LayerNormGemmGrad": "layernorm_gemm_grad",
    "LayerNormLeafGrad": "leaf_norm",
    "MatMulNBits": "matmul_nbits",
    **dict.fromkeys(("GemmInteger", "IntegerConv", "PixelBlocks"), "gemm_integer"),
    **dict.fromkeys(("Sdpa", "CachedAttention"), "sdpa"),
    "CacheAppend": "cache_append",
    "SdpaGrad": "sdpa_grad_sm90",
    "Conv": "conv",
    "ConvWeightGrad": "conv_grad",
    **dict.fromkeys(("Norm", "NormGrad", "NormGradSums"), "norm"),
    **dict.fromkeys(("ChannelNorm", "RunningStats", "ChannelGrad", "GroupGrad"), "channel"),
    "Softmax": "softmax",
    **dict.fromkeys(("Reduce", "SumSquares"), "reduce"),
    **dict.fromkeys(("Pool", "MaxPoolGrad", "ChannelWindow"), "pool"),
    **dict.fromkeys(("Resample", "GridSample", "Col2Im"), "pool"),
    **dict.fromkeys(("CrossEntropy", "CrossEntropyChunk", "LabelScore", "ExpRows"), "loss"),
    **dict.fromkeys(("SlopeProduct", "PartSums", "MergedMoments", "Fold"), "sums"),
    "Float8": "float8",
    **dict.fromkeys(("GatherElements", "GatherND", "ScatterElements", "ScatterND"), "indexing"),
    **dict.fromkeys(("CumulativeSum", "TopK", "SortedRows"), "scan"),
    **dict.fromkeys(("KeptCounts", "KeptPositions"), "scan"),
    **dict.fromkeys(("Pointwise", "PointwiseSums"), "pointwise"),
    "Collective": "collective",
    **dict.fromkeys(("BatchedCalls", "PointwiseMany", "CopyMany"), "batched"),
    "Recurrence": "recurrent",
    **dict.fromkeys(("Random", "RoiAlign", "DeformColumns", "NmsChosen"), "others"),
    **dict.fromkeys(("Determinant", "Fourier", "NGrams", "Range"), "others"),
}


@dataclass(frozen=True)
class Selection:
    """The selected kernel, its configuration, the predicted seconds and the reason for it."""

    kernel: Candidate
    config: KernelConfig
    seconds: float
    why: str

    def launch(self, problem: AnyProblem, hw: Hardware) -> Launches:
        """The chosen kernel's calls."""
        memo = None if problem.trace is None else problem.trace.memo
        key = ("launch", id(self.kernel), self.config, problem, hw)
        return _once(memo, key, lambda: self.kernel.launch(problem, self.config, hw))

    def workspace(self, problem: AnyProblem, hw: Hardware) -> int:
        """The chosen kernel's scratch bytes."""
        return self.kernel.workspace(problem, self.config, hw)


ADDED: dict[str, list[Candidate]] = {}
"""The candidates that a user has registered (`plugins`), which come before the others."""


def candidates(op: str) -> Sequence[Candidate]:
    """The candidates of `op`, best first; empty where the op has no kernel."""
    added = ADDED.get(op, ())
    if op not in MODULES:
        return added
    kernels: Mapping[str, Sequence[Candidate]] = import_module(f"{__name__}.{MODULES[op]}").KERNELS
    return (*added, *kernels[op]) if added else kernels[op]


def named(op: str, name: str) -> Candidate:
    """The candidate of `op` with this name. Raises UsageError where there is none."""
    kernels = candidates(op)
    for kernel in kernels:
        if kernel.name == name:
            return kernel
    raise UsageError(f"{op} has no kernel {name!r}; it has {', '.join(k.name for k in kernels)}")


def forced(prefs: Prefs = None) -> dict[str, str]:
    """op -> candidate name asked for by ONNX_FUSE_KERNEL, overridden by `prefs`."""
    entries = (entry.partition("=") for entry in config.KERNEL.value.split(",") if entry)
    asked = {op: name for op, _, name in entries}
    if unknown := asked.keys() - MODULES.keys() - ADDED.keys():
        raise UsageError(
            f"{config.KERNEL.name}: no operator with kernels to choose from is called "
            f"{', '.join(sorted(unknown))}; there are {', '.join(MODULES)}"
        )
    return asked | dict(prefs or {})


def select(
    op: str, problem: AnyProblem, hw: Hardware, prefs: Prefs = None, *, records: bool = True
) -> Selection | None:
    """Forced by the user, else a tuning record, else the cost model; None if `op` has no kernel.

    A problem with open sizes is served by what suits the largest of its class. Where no cost model
    compares the candidates (`rule_based.RuleBased`), the first that serves the problem is chosen
    and runs by its rule.
    Raises UsageError where a forced kernel does not exist or does not serve the problem.
    """
    memo = _CHOICES.get() if problem.trace is None else problem.trace.memo
    key = (op, problem, hw, tuple(sorted((prefs or {}).items())), records)
    return _once(memo, key, lambda: _select(op, problem, hw, prefs, records))


def _once(memo: dict[Any, Any] | None, key: object, make: Callable[[], T]) -> T:
    """The result of `make`, kept in the memo under `key`; computed each time without a memo."""
    if memo is None:
        return make()
    if key not in memo:
        memo[key] = make()
    return memo[key]


_CHOICES: ContextVar[dict[Any, Any] | None] = ContextVar("choices", default=None)


@contextmanager
def same_choices() -> Iterator[None]:
    """Within the block a problem of plain sizes that comes again keeps its choice.

    Problems with open sizes do so anyway: their trace remembers it.
    """
    token = _CHOICES.set({})
    try:
        yield
    finally:
        _CHOICES.reset(token)


def _legal(op: str, problem: AnyProblem, hw: Hardware) -> list[Candidate]:
    """The candidates that serve a problem, best first."""
    kernels = candidates(op)
    if kernels and not isinstance(kernels[0], HeuristicKernel):
        problem.upper_bound()  # fixes the size class of each dimension before `supports`
    return [kernel for kernel in kernels if refusal(kernel, problem, hw) is None]


def _select(
    op: str, problem: AnyProblem, hw: Hardware, prefs: Prefs, records: bool
) -> Selection | None:
    if not candidates(op) or problem.empty:
        return None
    want = forced(prefs).get(op)
    if want is not None:
        kernel = named(op, want)
        if reason := refusal(kernel, problem, hw):
            raise UsageError(f"{op}={want} does not serve {problem}: {reason}")
        legal, records = [kernel], False
    else:
        legal = _legal(op, problem, hw)
    if want is None and problem.trace is not None and problem.trace.batch:
        # one choice for all batches, so one that serves the largest as well
        largest = problem.upper_bound()
        legal = [kernel for kernel in legal if refusal(kernel, largest, hw) is None]
    if not legal:
        return None
    ruled = isinstance(legal[0], HeuristicKernel)
    if records and (not ruled or tuning.has(op, hw)):
        record = tuning.lookup(op, problem.upper_bound(), hw, legal)
        if record is not None and record[0].fits(problem, record[1]):
            return Selection(*record, "tuning record")
    why = "forced" if want is not None else "its rule" if ruled else "cost model"
    return (_by_rule if ruled else _by_class)(legal, problem, hw, why)


def serves(op: str, problem: AnyProblem, hw: Hardware, prefs: Prefs = None) -> bool:
    """Whether `select` finds a kernel; for open sizes without a comparison of costs.

    Raises UsageError as `select` does.
    """
    trace = problem.trace
    if trace is None or forced(prefs).get(op) is not None:
        return select(op, problem, hw, prefs) is not None
    return _once(trace.memo, ("serves", op, problem, hw), lambda: _serves(op, problem, hw))


def _serves(op: str, problem: AnyProblem, hw: Hardware) -> bool:
    legal = _legal(op, problem, hw) if candidates(op) and not problem.empty else []
    if legal and isinstance(legal[0], HeuristicKernel):
        return _by_rule(legal, problem, hw, "") is not None
    largest = problem.upper_bound()
    # the last one is the plain kernel, whose few configurations nearly always fit
    ways = ((kernel, how) for kernel in reversed(legal) for how in kernel.configs(largest, hw))
    return any(
        kernel.fits(problem, how) and not beyond(kernel, how, largest, hw) for kernel, how in ways
    )


def _by_rule(
    kernels: Sequence[Candidate], problem: AnyProblem, hw: Hardware, why: str
) -> Selection | None:
    """The first kernel by its own rule, which looks at open sizes themselves and not at their
    class; the next one where its launch is none that a GPU takes. Those that are `compared` come by
    their costs for the largest sizes of the class.
    """
    how, here = KernelConfig.of(), problem.concrete()
    if all(isinstance(kernel, HeuristicKernel) and kernel.compared for kernel in kernels):
        largest = problem.upper_bound()
        kernels = sorted(kernels, key=lambda kernel: kernel.cost(largest, how, hw))
    for kernel in kernels:
        if isinstance(kernel, HeuristicKernel) and not beyond(kernel, how, here, hw):
            return Selection(kernel, how, kernel.cost(here, how, hw), why)
    return None


def _by_class(
    kernels: Sequence[Candidate], problem: AnyProblem, hw: Hardware, why: str
) -> Selection | None:
    """The cheapest for the class of `problem` that serves `problem` itself, by launches that a GPU
    takes at the largest sizes of the class.

    The same shape gets the same choice whichever shape of its class came first: what does not fit
    is a guard as well as what does.
    """
    largest = problem.upper_bound()
    choices = by_cost(tuple(kernels), largest, hw, why)
    fitting = (c for c in choices if c.kernel.fits(problem, c.config))
    if problem.trace is not None and problem.trace.batch:
        fitting = (c for c in fitting if c.kernel.fits(largest, c.config))
    return next((c for c in fitting if not beyond(c.kernel, c.config, largest, hw)), None)


def beyond(kernel: Candidate, how: KernelConfig, problem: AnyProblem, hw: Hardware) -> str:
    """What of a kernel's launches is beyond a GPU's limits for a problem of plain sizes, or "".

    The limits are those of grids, blocks and shared memory, and of the arguments' types.
    """
    if problem.bytes <= GRID[1]:  # fewer bytes than blocks along y or z
        return ""
    return next((t for x in kernel.launch(problem, how, hw) for t in of_launch(x, hw)), "")


def refusal(kernel: Candidate, problem: AnyProblem, hw: Hardware) -> str | None:
    """The answer of `supports`. Sizes in its text add no guard; sizes that it compares do."""
    if problem.trace is None:
        return kernel.supports(problem, hw)
    with problem.trace.formatting():
        return kernel.supports(problem, hw)


def refusals(op: str, problem: AnyProblem, hw: Hardware) -> dict[str, str]:
    """Candidate -> why it does not serve `problem`: what --explain prints."""
    here, reasons = problem.concrete(), {}
    for kernel in candidates(op):
        reason = refusal(kernel, problem, hw)
        if not reason:  # or each configuration is beyond a limit
            ways = kernel.configs(here, hw)
            found = [*takewhile(bool, (beyond(kernel, how, here, hw) for how in ways))]
            reason = found[0] if found and len(found) == len(ways) else ""
        reasons[kernel.name] = reason
    return {name: reason for name, reason in reasons.items() if reason}


def refused(problem: AnyProblem, hw: Hardware, prefs: Prefs = None) -> bool:
    """Whether the user asks for a kernel that does not serve `problem`."""
    name = forced(prefs).get(problem.op)
    return name is not None and name in refusals(problem.op, problem, hw)


@dataclass(frozen=True)
class ExplainRow:
    """One call of a program, as --explain shows it: what runs, how long, and why it was chosen.

    `floor` is the time that no kernel beats; where a rule chooses, `seconds` is what the kernel's
    threads need for its bytes, and its launches.
    """

    nodes: tuple[str, ...]
    op: str
    kernel: str
    config: str
    seconds: float
    floor: float
    why: str
    refused: tuple[tuple[str, str], ...] = ()
    """Candidates that cannot serve this problem, and why."""


def site(call: Call, hw: Hardware) -> ExplainRow:
    """The row of a call that has a problem, at its own sizes, which are plain."""
    problem, choice = call.problem, call.choice
    assert problem is not None, f"{call.kernel} has no kernels to choose from"
    assert choice is not None, f"{call.kernel} has no launches"
    kernel, refused = named(problem.op, choice.kernel), refusals(problem.op, problem, hw)
    others = [x for x in candidates(problem.op) if x is not kernel and x.name not in refused]
    record = tuning.lookup(problem.op, problem, hw, [kernel])
    if record is not None and record[1] == choice.config:
        seconds = record[2]
    else:
        seconds = kernel.cost(problem, choice.config, hw)
    op, why = problem.op, choice.reason
    if isinstance(kernel, HeuristicKernel):  # its neighbours are for other problems, not refused
        refused = {}
        op = call.kernel if op in call.kernel else f"{call.kernel} ({op})"
        op += ", channels last" if getattr(problem, "channels_last", False) else ""
        why += f"; also {', '.join(x.name for x in others)}" if others else ""
    elif others:
        rest = (by_cost((x,), problem, hw, "")[0] for x in others)
        second = min(rest, key=lambda other: other.seconds)
        why += f"; next {second.kernel.name}, {second.seconds * 1e6:.1f} µs"
    return ExplainRow(
        call.nodes,
        op,
        choice.kernel,
        str(choice.config),
        seconds,
        problem.floor(hw, call.bytes),
        why if others else f"{why}; no other kernel is possible",
        tuple(refused.items()),
    )


def chosen_seconds(call: Call, hw: Hardware) -> float:
    """By the cost model of the kernel that a call has, which may be one for larger sizes."""
    assert call.problem is not None
    assert call.choice is not None
    kernel = named(call.problem.op, call.choice.kernel)
    return kernel.cost(call.problem, call.choice.config, hw)


@lru_cache(128)
def by_cost(
    kernels: tuple[Candidate, ...], problem: AnyProblem, hw: Hardware, why: str
) -> tuple[Selection, ...]:
    """Every configuration of `kernels`, the cheapest first."""
    priced = [
        Selection(kernel, how, kernel.cost(problem, how, hw), why)
        for kernel in kernels
        for how in kernel.configs(problem, hw)
    ]
    return tuple(sorted(priced, key=lambda choice: choice.seconds))

"""The kernel lab: all configurations of an operator's kernels, checked, timed, and the roofline.

Each configuration runs on random operands at the sizes of `CASES`, and its results are compared
with those of the operator's most general kernel. Those that agree everywhere are timed as
`onnx_fuse.tune` does. It needs a GPU, and no other library.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from onnx_fuse import progress, single_op_models, tune
from onnx_fuse.errors import DeviceError, UsageError
from onnx_fuse.ir.build import extents, required
from onnx_fuse.kernels import Selection, candidates, tuning
from onnx_fuse.kernels.kernel import Candidate
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Call
from onnx_fuse.program.launch import Launches
from onnx_fuse.program.problem import AnyProblem, GemmProblem, Hardware, KernelConfig
from onnx_fuse.runtime import ort
from onnx_fuse.session import load
from onnx_fuse.validation.operator import operator_files

Truth: TypeAlias = "Callable[[tune.Operands], list[np.ndarray]]"
"""What is right for some operands, as of `tune.Operands.ends`."""

CASES = (
    (128, 64, 256), (512, 768, 768), (257, 256, 384), (384, 520, 264), (190, 136, 200),
    (5, 24, 40), (1, 520, 264), (16, 768, 4104), (4096, 128, 128),
)  # fmt: skip
"""Sizes M, K, N of the checks: one tile, several, ragged ones, a row over, few rows, many."""


class Variant:
    """A kernel with another text in place of one of its sources: a candidate that is tried out.

    `kernel` is the candidate that stands in the registry, `path` the changed copy of the source
    that has its file's name.
    """

    def __init__(self, kernel: Candidate, path: Path) -> None:
        self.name = f"{kernel.name} ({path})"
        self._kernel, self._file, self._text = kernel, path.name, path.read_text()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def launch(self, problem: AnyProblem, config: KernelConfig, hw: Hardware) -> Launches:
        """The kernel's calls, from the changed source."""
        return tuple(
            replace(x, source=self._text) if Path(x.source).name == self._file else x
            for x in self._kernel.launch(problem, config, hw)
        )


@dataclass(frozen=True)
class Row:
    """One configuration of a kernel, at one size where it was timed."""

    kernel: str
    config: str
    cases: int
    """The cases that it serves."""
    fault: str
    """The first case whose results differ, or the error there; "" where all agree."""
    problem: str = ""
    us: float = 0.0
    floor: float = 0.0
    """The part of `us` that no kernel goes below, by arithmetic and by memory."""
    flops: float = 0.0
    """Operations a second."""
    bandwidth: float = 0.0
    """Bytes a second, each operand counted once."""
    predicted: float = 0.0
    """The cost model's microseconds."""


def of(op: str, shape: tuple[int, int, int], precision: str, hw: Hardware) -> Call:
    """The call of one of `single_op_models.OPS` at [M,K,N]. Raises UsageError if it has none."""
    calls = tune.calls_of(single_op_models.program_of(op, shape, precision, hw), op)
    if not calls:
        raise UsageError(f"{op} in {precision} at {shape} is computed by other operators here")
    return calls[0]


def kernels_of(op: str, file: Path | None, call: Call, hw: Hardware) -> list[Candidate]:
    """The candidates; with `file` those alone that launch a source of this name, with it.

    Raises UsageError where no candidate does.
    """
    kernels = [k for k in candidates(op) if k.supports(call.problem, hw) is None]
    if file is None:
        return kernels
    changed: list[Any] = []
    for kernel in kernels:
        how = next(iter(kernel.configs(call.problem, hw)))
        sources = {Path(x.source).name for x in kernel.launch(call.problem, how, hw)}
        if file.name in sources:
            changed += [kernel, Variant(kernel, file)]
    if not changed:
        raise UsageError(
            f"no kernel of {op} that serves {call.problem} has a source named {file.name}: name "
            "the file as the one under cuda_src/ that it is to replace"
        )
    return changed


def left_out(op: str, call: Call, hw: Hardware) -> list[tuple[str, str]]:
    """The candidates that do not serve a call, and why: a library may not be installed."""
    reasons = [(k.name, k.supports(call.problem, hw)) for k in candidates(op)]
    return [(name, reason) for name, reason in reasons if reason is not None]


def of_registered(op: str, shapes: Mapping[str, Sequence[int]], hw: Hardware) -> tuple[Call, Truth]:
    """The call of an operator "domain::Name" at these float32 inputs, and what its body gives.

    Raises UsageError where no kernel serves it.
    """
    with tempfile.TemporaryDirectory() as folder:
        one_node, body = operator_files(op, shapes, Path(folder))
        graph, session = load(one_node), ort.session(body)
    types = {
        str(v.name): (tuple(n for n in extents(required(v.shape)) if isinstance(n, int)), "float32")
        for v in graph.graph.inputs
    }
    program = lower(graph, types, hw)
    calls = [c for c in program.calls if c.problem is not None and c.problem.op == op]
    if not calls:
        raise UsageError(f"no kernel of {op} serves these shapes: its body runs in their place")
    (call,) = calls

    def truth(operands: tune.Operands) -> list[np.ndarray]:
        feeds = {name: operands.filled[name].reshape(t.shape) for name, t in call.reads}
        return operands.ends(ort.run(session, feeds))

    return call, truth


def cases_of(
    op: str, precision: str, hw: Hardware, shapes: Sequence[tuple[int, int, int]] = ()
) -> Iterator[tuple[str, Call]]:
    """The calls at `shapes`, whose configurations may be others', and in all cases."""
    for number, shape in enumerate(every := (*shapes, *CASES)):
        progress.report("checking", number, len(every))
        yield str(shape), of(op, shape, precision, hw)


def check(
    kernels: Sequence[Candidate],
    cases: Iterable[tuple[str, Call]],
    hw: Hardware,
    until: float,
    truth: Truth | None = None,
) -> Iterator[Row]:
    """Each configuration of the kernels in each case that begins before `until`, against `truth`,
    or the last candidate's results.
    """
    results: dict[tuple[str, KernelConfig], tuple[int, str]] = {}
    for case, call in cases:
        tries = [
            Selection(kernel, how, 0.0, "lab")
            for kernel in kernels
            if kernel.supports(call.problem, hw) is None
            for how in kernel.configs(call.problem, hw)
        ]
        for choice, fault in _compared(call, tries, hw, truth):
            key = choice.kernel.name, choice.config
            served, before = results.get(key, (0, ""))
            results[key] = served + 1, before or (fault and f"{case}: {fault}")
        if time.monotonic() > until:
            break
    for (name, how), (served, fault) in results.items():
        yield Row(name, str(how), served, fault)


def _compared(
    call: Call, tries: Sequence[Selection], hw: Hardware, truth: Truth | None
) -> Iterator[tuple[Selection, str]]:
    """Each choice, with what is wrong with its results."""
    problem = call.problem
    assert problem is not None
    general = next(k for k in reversed(candidates(problem.op)) if k.supports(problem, hw) is None)
    plain = Selection(general, next(iter(general.configs(problem, hw))), 0.0, "lab")
    calls, operands = tune.prepared(call, (plain, *tries), hw)
    want, other = (
        (operands.results(calls[0]), general.name) if truth is None else (truth(operands), "body")
    )
    math = problem.math if isinstance(problem, GemmProblem) else "ieee"
    for choice, attempt in zip(tries, calls[1:], strict=True):
        try:
            first, second = operands.results(attempt), operands.results(attempt)
        except DeviceError as error:
            yield choice, str(error)
            continue
        if not operands.agree(first, want, math):
            yield choice, f"differs from {other}"
        elif any(a.tobytes() != b.tobytes() for a, b in zip(first, second, strict=True)):
            yield choice, "differs from run to run"
        else:
            yield choice, ""


def measure(
    call: Call, kernels: Sequence[Candidate], sound: set[tuple[str, str]], hw: Hardware, top: int
) -> list[tuple[Row, Selection]]:
    """Times of the `top` configurations of each kernel, best predicted first, of those `sound`."""
    problem = call.problem
    assert problem is not None
    tries: list[Selection] = []
    for kernel in kernels:
        ranked = tune.ranked(kernel, problem, hw, "lab")
        tries += [c for c in ranked if (c.kernel.name, str(c.config)) in sound][:top]
    if not tries:
        return []
    calls, operands = tune.prepared(call, tries, hw)
    medians = tune.medians([operands.graph(c) for c in calls])
    return sorted(
        ((_row(problem, call, choice, s, hw), choice)
         for choice, s in zip(tries, medians, strict=True)),
        key=lambda pair: pair[0].us,
    )  # fmt: skip


def _row(problem: AnyProblem, call: Call, choice: Selection, seconds: float, hw: Hardware) -> Row:
    return Row(
        choice.kernel.name, str(choice.config), 0, "", str(problem), 1e6 * seconds,
        problem.floor(hw, call.bytes) / seconds, problem.flops / seconds, call.bytes / seconds,
        1e6 * choice.seconds,
    )  # fmt: skip


def freeze(
    op: str, winners: Sequence[tuple[Call, Row, Selection]], hw: Hardware, folder: Path
) -> Path:
    """Write the fastest of each call as a tuning record in `folder`; returns the file."""
    records = [
        (op, call.problem, tuning.record(call.problem, choice.kernel, choice.config, row.us, hw))
        for call, row, choice in winners
        if call.problem is not None and not isinstance(choice.kernel, Variant)
    ]
    return tuning.save(records, hw, folder, candidates)

"""The kernel lab: all configurations of an operator's kernels, checked, timed, and the roofline.

Each configuration runs on random operands at the sizes of `CASES`, and its results are compared
with those of the operator's most general kernel. Those that agree everywhere are timed as
`onnx_fuse.tune` does. It needs a GPU, and no other library.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onnx_fuse import progress, single_op_models, tune
from onnx_fuse.errors import DeviceError, UsageError
from onnx_fuse.kernels import Selection, candidates, tuning
from onnx_fuse.kernels.kernel import Candidate
from onnx_fuse.program.call import Call
from onnx_fuse.program.launch import Launches
from onnx_fuse.program.problem import AnyProblem, GemmProblem, Hardware, KernelConfig

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


def check(
    op: str,
    kernels: Sequence[Candidate],
    precision: str,
    hw: Hardware,
    until: float,
    shapes: Sequence[tuple[int, int, int]] = (),
) -> Iterator[Row]:
    """Each configuration of the kernels, against the last candidate's results at `shapes`, whose
    configurations may be others', and in all cases.
    """
    results: dict[tuple[str, KernelConfig], tuple[int, str]] = {}
    cases = (*shapes, *CASES)
    for number, shape in enumerate(cases):
        if time.monotonic() > until:
            break
        progress.report("checking", number, len(cases))
        call = of(op, shape, precision, hw)
        problem = call.problem
        assert problem is not None
        general = next(k for k in reversed(candidates(op)) if k.supports(problem, hw) is None)
        plain = Selection(general, next(iter(general.configs(problem, hw))), 0.0, "lab")
        tries = [
            Selection(kernel, how, 0.0, "lab")
            for kernel in kernels
            if kernel.supports(problem, hw) is None
            for how in kernel.configs(problem, hw)
        ]
        for choice, fault in _compared(call, plain, tries, hw):
            key = choice.kernel.name, choice.config
            served, before = results.get(key, (0, ""))
            results[key] = served + 1, before or (fault and f"{shape}: {fault}")
    for (name, how), (served, fault) in results.items():
        yield Row(name, str(how), served, fault)


def _compared(
    call: Call, plain: Selection, tries: Sequence[Selection], hw: Hardware
) -> Iterator[tuple[Selection, str]]:
    """Each choice, with what is wrong with its results."""
    calls, operands = tune.prepared(call, (plain, *tries), hw)
    truth = operands.results(calls[0])
    math = call.problem.math if isinstance(call.problem, GemmProblem) else "ieee"
    for choice, attempt in zip(tries, calls[1:], strict=True):
        try:
            first, second = operands.results(attempt), operands.results(attempt)
        except DeviceError as error:
            yield choice, str(error)
            continue
        if not operands.agree(first, truth, math):
            yield choice, f"differs from {plain.kernel.name}"
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

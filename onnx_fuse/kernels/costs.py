"""Whether a rewrite pays: what the calls before it cost, and what those after it cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from onnx_fuse.kernels import refused, select
from onnx_fuse.kernels.rule_based import HeuristicKernel
from onnx_fuse.program.problem import AnyProblem, GemmProblem, Hardware, Prefs, Value


@dataclass(frozen=True)
class Passes(AnyProblem):
    """Memory passes of an alternative that is only costed: bytes `moved` in so many launches."""

    moves = "all: uint8 moved"
    moved: int
    launches: int = 1


_LAYOUTS: Mapping[str, Mapping[str, Value]] = {
    "NN": {}, "NT": {"trans_b": True}, "TN": {"trans_a": True},
}  # fmt: skip


def products(text: str, sizes: Mapping[str, int], **how: Value) -> list[GemmProblem]:
    """The products that a text lists: "NT m k n bias; LayerNormGemm m n k".

    Each is which operand lies turned, or the operator; then the names of its M, N and K among
    `sizes`, and what is true of it. `how` is what all have in common.
    """
    problems = []
    for product in text.split("; "):
        kind, m, n, k, *flags = product.split()
        op, of = ("Gemm" if kind in _LAYOUTS else kind), (sizes[m], sizes[n], sizes[k])
        more: dict[str, Value] = {**_LAYOUTS.get(kind, {}), **dict.fromkeys(flags, True), **how}
        problems.append(GemmProblem.of(op, m=of[0], n=of[1], k=of[2], **more))
    return problems


def seconds(
    problem: AnyProblem, hw: Hardware, prefs: Prefs = None, *, records: bool = True
) -> float:
    """Seconds of the kernel that would be chosen, at the largest sizes of the class.

    Infinity if there is none, or if the requested one does not serve the problem. Without `records`
    only by the cost models: never mix measured and predicted times.
    """
    if isinstance(problem, Passes):
        return problem.upper_bound().floor(hw) + problem.launches * hw.launch_seconds
    if refused(problem, hw, prefs):
        return inf
    choice = select(problem.op, problem, hw, prefs, records=records)
    if choice is None:
        return inf
    if isinstance(choice.kernel, HeuristicKernel) and problem.trace is not None:
        return choice.kernel.cost(problem.upper_bound(), choice.config, hw)
    return choice.seconds


def total(problems: Iterable[AnyProblem], hw: Hardware, prefs: Prefs = None) -> float:
    """Seconds of all, one after another, by the models alone: ways to do the same are compared."""
    return sum(seconds(problem, hw, prefs, records=False) for problem in problems)


def pays(
    before: Iterable[AnyProblem], after: Iterable[AnyProblem], hw: Hardware, prefs: Prefs = None
) -> bool:
    """Whether the problems after a rewrite cost less than those before it, by the models alone."""
    return total(after, hw, prefs) < total(before, hw, prefs)

"""The last passes: each problem's kernel and its launches, and which launches call early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from onnx_fuse.errors import ModelError
from onnx_fuse.kernels import Selection, refusals, select
from onnx_fuse.kernels.rule_based import HeuristicKernel
from onnx_fuse.program.call import Call
from onnx_fuse.program.passes.copy_fusion import copied
from onnx_fuse.program.problem import Choice, Hardware, Prefs
from onnx_fuse.program.size import upper_bound, wide_size_class
from onnx_fuse.program.spec import GRID


def with_launches(call: Call, choice: Selection, hw: Hardware) -> Call:
    """The call with the launches of the candidate chosen for its problem.

    Other sizes with too many blocks along y or z of a grid do not meet the guards.
    """
    assert call.problem is not None
    # by a rule the time is that of the sizes lowered, and an open program has others as well
    ruled = call.problem.trace is not None and isinstance(choice.kernel, HeuristicKernel)
    seconds = None if ruled else float(choice.seconds)
    launches = choice.launch(call.problem, hw)
    for launch in launches:
        for size, most in zip(launch.grid[1:], GRID[1:], strict=True):
            # legal here; of an open size it is a decision, so that another shape is asked as well
            assert size <= most, f"{launch.entry}: {size} blocks"
    alone = () if copied(call) is None else ((call.reads[0][0], call.writes[0][0]),)
    return replace(
        call, launches=launches, workspace=choice.workspace(call.problem, hw),
        copies=call.copies or alone,
        choice=Choice(choice.kernel.name, choice.config, choice.why, seconds),
    )  # fmt: skip


def select_kernels(calls: Sequence[Call], hw: Hardware, prefs: Prefs = None) -> list[Call]:
    """The calls, each problem with the launches of the kernel chosen for it.

    Raises UsageError where one that the user asks for does not serve its problem, and ModelError
    where none does: its launch would be beyond what a GPU takes.
    """
    return [call if call.problem is None else _selected(call, hw, prefs) for call in calls]


def _selected(call: Call, hw: Hardware, prefs: Prefs) -> Call:
    assert call.problem is not None
    choice = select(call.problem.op, call.problem, hw, prefs)
    if choice is None:
        reasons = refusals(call.problem.op, call.problem, hw).items()
        raise ModelError(
            f"{call.kernel} ({', '.join(call.nodes[:3])}): no kernel serves it at this size: "
            + "; ".join(f"{name}: {why}" for name, why in reasons)
        )
    return with_launches(call, choice, hw)


def call_early(calls: Sequence[Call], hw: Hardware) -> tuple[Call, ...]:
    """The calls; a launch calls for the next one early where the next one's blocks are large.

    Where a block of such a launch ends, a block of the next one then prepares itself on the idle
    multiprocessor. Blocks of less than half a multiprocessor would take room from the running ones.
    """
    lists = [list(call.launches) for call in calls]
    places = [(i, j) for i, launches in enumerate(lists) for j in range(len(launches))]
    for (i, j), (after, first) in pairwise(places):
        launch, alone = lists[i][j], 2 * lists[after][first].smem > hw.smem_per_block
        if not (alone and launch.early):
            continue
        if upper_bound(prod(launch.grid), wide_size_class) > 128:  # fewer do it anyway
            defines = tuple(sorted((*launch.defines, *launch.early)))
            lists[i][j] = replace(launch, defines=defines)
    return tuple(
        replace(call, launches=tuple(launches)) for call, launches in zip(calls, lists, strict=True)
    )

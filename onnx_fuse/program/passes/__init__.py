"""Passes over a Program's calls, which rewrite problems; the last ones make the launches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias

from onnx_fuse.program.call import Call, Context
from onnx_fuse.program.passes.callgraph import Calls, Rule, rewrite, select_kernels
from onnx_fuse.program.passes.chains import as_problem, fuse
from onnx_fuse.program.passes.deferred import defer
from onnx_fuse.program.passes.epilogues import BEFORE_CHAINS, BEHIND_CHAINS
from onnx_fuse.program.passes.few_columns import FEW_COLUMNS
from onnx_fuse.program.passes.horizontal_fusion import batch, fold_together
from onnx_fuse.program.passes.merge import drop_unread, share

Pass: TypeAlias = Callable[[Sequence[Call], Collection[int], Context], Sequence[Call]]
"""(calls, buffers whose last values are wanted, the lowering they come from) -> the calls."""


def _each(rule: Rule, calls: Sequence[Call], keep: Collection[int], ctx: Context) -> list[Call]:
    return rewrite(rule, Calls(calls, keep, ctx.hw, ctx.prefs))


PIPELINE: tuple[Pass, ...] = (
    lambda calls, keep, _: drop_unread(calls, keep),
    lambda calls, keep, _: share(calls, keep),
    lambda calls, keep, _: drop_unread(calls, keep),
    *(partial(_each, rule) for rule in BEFORE_CHAINS),
    lambda calls, keep, _: fuse(calls, keep),
    *(partial(_each, rule) for rule in (*BEHIND_CHAINS, *FEW_COLUMNS)),
    defer,
    lambda calls, keep, ctx: fold_together(calls, keep, ctx.hw),
    # twice: what a batch has moved to the end lets its producers wait as well
    lambda calls, _, ctx: batch(calls, ctx.hw, ctx.prefs),
    lambda calls, _, ctx: batch(calls, ctx.hw, ctx.prefs),
    lambda calls, _, ctx: select_kernels([as_problem(c) for c in calls], ctx.hw, ctx.prefs),
)
"""In order."""


def run(calls: Sequence[Call], keep: Collection[int], ctx: Context) -> tuple[Call, ...]:
    """The calls to run, in order; buffers in `keep` hold their final values afterwards."""
    for each in PIPELINE:
        calls = each(calls, keep, ctx)
    return tuple(calls)

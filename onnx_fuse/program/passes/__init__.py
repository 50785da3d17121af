"""Passes over a Program's calls, which rewrite problems; the last ones make the launches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeAlias

from onnx_fuse import config
from onnx_fuse.program import spec
from onnx_fuse.program.call import Call, PassContext
from onnx_fuse.program.passes.activation_again import make_activation_again
from onnx_fuse.program.passes.buckets import by_bucket
from onnx_fuse.program.passes.cached_attention import append_in_attention
from onnx_fuse.program.passes.callgraph import Calls, Rule, rewrite
from onnx_fuse.program.passes.column_moments import leave_moments
from onnx_fuse.program.passes.column_sums import sum_columns
from onnx_fuse.program.passes.copy_forwarding import forward_copies
from onnx_fuse.program.passes.cse import eliminate_common, eliminate_dead
from onnx_fuse.program.passes.epilogue_fusion import BEFORE_CHAINS, BEHIND_CHAINS
from onnx_fuse.program.passes.horizontal_fusion import batch, fold_together, turn_together
from onnx_fuse.program.passes.integer_tails import dequantize_where_read, quantize_in_tails
from onnx_fuse.program.passes.memory_order import in_memory_order
from onnx_fuse.program.passes.narrow_products import FEW_COLUMNS
from onnx_fuse.program.passes.norm_deferral import defer
from onnx_fuse.program.passes.packed_products import RULES as PACKED_PRODUCTS
from onnx_fuse.program.passes.pointwise_fusion import as_problem, fuse
from onnx_fuse.program.passes.pointwise_sharing import share_loads
from onnx_fuse.program.passes.pointwise_sums import sum_results
from onnx_fuse.program.passes.select import select_kernels

Pass: TypeAlias = Callable[[Sequence[Call], Collection[int], PassContext], Sequence[Call]]
"""(calls, buffers whose last values are wanted, the lowering they come from) -> the calls."""


def _each(rule: Rule, calls: Sequence[Call], keep: Collection[int], ctx: PassContext) -> list[Call]:
    return rewrite(rule, Calls(calls, keep, ctx))


PIPELINE: tuple[tuple[str, Pass], ...] = (
    ("codes", lambda calls, keep, _: dequantize_where_read(calls, keep)),
    ("memory order", lambda calls, *_: in_memory_order(calls)),
    ("dead calls", lambda calls, keep, _: eliminate_dead(calls, keep)),
    ("cse", lambda calls, keep, _: eliminate_common(calls, keep)),
    ("dead calls", lambda calls, keep, _: eliminate_dead(calls, keep)),
    ("copy forwarding", lambda calls, keep, _: forward_copies(calls, keep)),
    *((f"epilogue fusion: {rule.__name__}", partial(_each, rule)) for rule in BEFORE_CHAINS),
    ("integer tails", quantize_in_tails),
    ("pointwise fusion", lambda calls, keep, _: fuse(calls, keep)),
    *((f"epilogue fusion: {rule.__name__}", partial(_each, rule)) for rule in BEHIND_CHAINS),
    *((f"packed products: {rule.__name__}", partial(_each, rule)) for rule in PACKED_PRODUCTS),
    ("cached attention", partial(_each, append_in_attention)),
    *((f"few columns: {rule.__name__}", partial(_each, rule)) for rule in FEW_COLUMNS),
    ("activations again", partial(_each, make_activation_again)),
    ("column sums", partial(_each, sum_columns)),
    ("column moments", partial(_each, leave_moments)),
    ("norm deferral", partial(_each, defer)),
    ("shared loads", lambda calls, keep, _: share_loads(calls, keep)),
    ("folds of weights", lambda calls, keep, ctx: fold_together(calls, keep, ctx.hw)),
    ("turned weights", lambda calls, _, ctx: turn_together(calls, ctx.hw, ctx.prefs)),
    # twice: what the first has moved to the end lets its producers wait as well
    ("horizontal fusion", lambda calls, _, ctx: batch(calls, ctx.hw, ctx.prefs)),
    ("horizontal fusion", lambda calls, _, ctx: batch(calls, ctx.hw, ctx.prefs)),
    ("sums of results", partial(_each, sum_results)),  # those that share no launch
    ("buckets", lambda calls, *_: by_bucket(calls)),
    ("pointwise problems", lambda calls, *_: [as_problem(call) for call in calls]),
    ("select", lambda calls, _, ctx: select_kernels(calls, ctx.hw, ctx.prefs)),
)
"""Name and pass, in order."""


CHECKED = False
"""Whether every pass is held to `program.spec`: so it is in tests, and with ONNX_FUSE_DEBUG."""


def run(calls: Sequence[Call], keep: Collection[int], ctx: PassContext) -> tuple[Call, ...]:
    """The calls to run, in order; buffers in `keep` hold their final values afterwards.

    Raises AssertionError where they are checked and a pass breaks the spec of programs.
    """
    check = _SpecCheck(ctx) if CHECKED or config.DEBUG.value else None
    if check is not None:
        check("lowering", calls)
    for name, each in PIPELINE:
        calls = each(calls, keep, ctx)
        if check is not None:
            check(name, calls)
    return tuple(calls)


class _SpecCheck:
    """Holds the calls after each pass to the spec; those that a pass has left alone once only."""

    def __init__(self, ctx: PassContext) -> None:
        self._ctx = ctx
        self._seen: dict[int, Call] = {}  # by identity: a hash of a call takes longer than a look

    def __call__(self, name: str, calls: Sequence[Call]) -> None:
        fresh = [call for call in calls if id(call) not in self._seen]
        self._seen |= {id(call): call for call in fresh}
        violations = spec.of_calls(fresh, self._ctx.buffers)
        violations += [text for call in fresh for text in spec.of_launches(call, self._ctx.hw)]
        assert not violations, f"after {name}: {'; '.join(violations)}"

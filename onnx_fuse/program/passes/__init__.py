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

Pass: TypeAlias = Callable[[Calls], Sequence[Call]]
"""The calls under the pass -> those to run in their place."""


def _rule(name: str, rule: Rule) -> tuple[str, Pass]:
    return name, partial(rewrite, rule)


PIPELINE: tuple[tuple[str, Pass], ...] = (
    ("codes", dequantize_where_read),
    ("memory order", in_memory_order),
    ("dead calls", eliminate_dead),
    ("cse", eliminate_common),
    ("dead calls", eliminate_dead),
    _rule("copy forwarding", forward_copies),
    *(_rule(f"epilogue fusion: {rule.__name__}", rule) for rule in BEFORE_CHAINS),
    ("integer tails", quantize_in_tails),
    ("pointwise fusion", lambda calls: fuse(calls.calls, calls.keep)),
    *(_rule(f"epilogue fusion: {rule.__name__}", rule) for rule in BEHIND_CHAINS),
    *(_rule(f"packed products: {rule.__name__}", rule) for rule in PACKED_PRODUCTS),
    _rule("cached attention", append_in_attention),
    *(_rule(f"few columns: {rule.__name__}", rule) for rule in FEW_COLUMNS),
    _rule("activations again", make_activation_again),
    _rule("column sums", sum_columns),
    _rule("column moments", leave_moments),
    _rule("norm deferral", defer),
    ("shared loads", share_loads),
    ("folds of weights", fold_together),
    ("turned weights", turn_together),
    # twice: what the first has moved to the end lets its producers wait as well
    *[("horizontal fusion", batch)] * 2,
    _rule("sums of results", sum_results),  # those that share no launch
    ("buckets", by_bucket),
    ("pointwise problems", lambda calls: [as_problem(call) for call in calls.calls]),
    ("select", lambda calls: select_kernels(calls.calls, calls.hw, calls.prefs)),
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
        calls = each(Calls(calls, keep, ctx))
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

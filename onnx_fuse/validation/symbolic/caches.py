"""GroupQueryAttention over a cache: the sizes of its past and the lengths that it is told."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import Node, Value

from onnx_fuse.importer.contrib import MICROSOFT
from onnx_fuse.ir.build import all_nodes, given
from onnx_fuse.ir.sizes import SymbolicSize, size
from onnx_fuse.validation.symbolic.walk import Fact, Lengths, Rule, Walk, origin

ONE_TOKEN = "one token over the past"
"""The setting of `Walk.branches` by which a call is of one token; otherwise the batch is one."""


def is_grouped(node: Node) -> bool:
    """Whether a node is a GroupQueryAttention, whose lengths the walk reads off the node."""
    return node.op_identifier() == (*_GROUPED, "")


def has_caches(model: ir.Model) -> bool:
    """Whether a GroupQueryAttention of the model has a past, and tokens of an open number."""

    def is_open(value: Value | None) -> bool:
        sizes = None if value is None else value.shape
        return sizes is None or not (isinstance(sizes[0], int) or isinstance(sizes[1], int))

    cached = (n for n in all_nodes(model.graph) if is_grouped(n) and given(n, 3) is not None)
    return any(is_open(given(n, 0)) for n in cached)


def _grouped(w: Walk, node: Node) -> list[Fact]:
    """The total is past + new; where past and present share a buffer, it is at most the buffer.

    onnxruntime takes several new tokens over a past for a batch of one alone.
    """
    query, key, past = (given(node, i) for i in (0, 1, 3))
    q, k, p = (w.shape(v) for v in (query, key, past))
    ends, angles = w.shape(given(node, 5)), w.shape(given(node, 7))
    if q is None or len(q) != 3:
        return []
    batch, tokens, width = q
    for other in (k, p, w.shape(given(node, 2)), w.shape(given(node, 4)), ends):
        if other:
            w.same(other[0], batch)
    total = _total(w, node, tokens, None if p is None else p[2])
    for value, places in ((given(node, 5), True), (given(node, 6), False)):
        source = None if value is None else origin(value)
        if source is not None and source.is_graph_input():
            w.lengths[source.name or ""] = Lengths(total, places)
    if angles:
        w.system.require("least", angles[0], total)
    if p is not None:
        if w.branches.get(ONE_TOKEN) or batch.number not in (None, 1):
            w.system.require("equal", tokens, size(1))
        elif tokens.number != 1 and (total - tokens) != size(0):
            w.system.require("equal", batch, size(1))
    heads, groups = (node.attributes.get_int(a, 1) for a in ("num_heads", "kv_num_heads"))
    head = width / heads if k is not None else width / (heads + 2 * groups)
    length = p[2] if p is not None and _caches_keep_size(node) else total
    present = Fact((batch, size(groups), length, head))
    return [Fact((batch, tokens, head * heads)), present, present]


def _total(w: Walk, node: Node, tokens: SymbolicSize, past: SymbolicSize | None) -> SymbolicSize:
    """How many tokens there are after the call, as the graph computes it or as it must be."""
    numbers = w.numbers(given(node, 6))
    computed = numbers[0] if numbers is not None and len(numbers) == 1 else None
    if past is not None and _caches_keep_size(node):
        total = past if computed is None else computed
        w.system.require("least", past, total)
        w.system.require("least", total, tokens)
        return total
    after = tokens if past is None else past + tokens
    if computed is not None:
        w.system.require("equal", computed, after, soft=True)
    return w.system.resolve(after)


def _caches_keep_size(node: Node) -> bool:
    past, present = given(node, 3), node.outputs[1] if len(node.outputs) > 1 else None
    if past is None or present is None or past.shape is None or present.shape is None:
        return False
    before, after = past.shape[2], present.shape[2]
    named = isinstance(before, int) or before.value is not None
    return named and before == after


_GROUPED = (MICROSOFT, "GroupQueryAttention")
RULES: dict[str, Rule] = {":".join(_GROUPED): _grouped}

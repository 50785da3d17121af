"""The ai.onnx Attention node (opset 23 and later) as an attention operator."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, dim, rank
from onnx_fuse.ops.fused.sdpa.kinds import Kind
from onnx_fuse.ops.fused.sdpa.mask_analysis import causal_step
from onnx_fuse.ops.fused.sdpa.rule import emit, grouping, transposed
from onnx_fuse.ops.fused.sdpa.scores import MaskStep, same_size
from onnx_fuse.ops.rules import Rewriter, attribute, typed

_SHORTER, _SUMS = 24, 25
"""The opsets from which a mask may have fewer columns than there are keys, which hides the others,
and from which what hides keys is added to a mask and does not take its place (onnxruntime 1.32)."""


def fuse_node(rw: Rewriter, node: ir.Node) -> bool:
    """The rule, anchored at an Attention.

    A row that is masked whole, by False or by -inf, gives zeros, as the standard says. Past keys
    and values are concatenated before it, which gives the present ones too.
    """
    bound = [v for v in node.inputs[:3] if v is not None]
    if node.domain or len(bound) < 3:
        return False
    q, k, v = bound
    optional = [*node.inputs[3:], None, None, None, None]
    mask, past_k, past_v, lengths = optional[:4]
    opset = rw.graph.opset_imports[""]
    softcap = attribute(node, "softcap", 0.0)
    used = [bool(o.uses()) or o.is_graph_output() for o in node.outputs]
    full_width = mask is None or _whole(mask, node)
    problems = {
        "its mask has other columns than there are keys": opset < _SHORTER
        and not full_width
        and None not in (dim(mask, -1), dim(k, -2), 0 if past_k is None else dim(past_k, -2)),
        "it has a past of keys or of values alone": (past_k is None) != (past_v is None),
        "it has a past and lengths of its keys": past_k is not None and lengths is not None,
        "its scores are an output that is used": any(used[3:]),
        "inputs of unknown or mixed rank": len({rank(t) for t in bound}) != 1 or rank(q) is None,
        "softmax_precision": attribute(node, "softmax_precision") not in (None, 1),
        "the mask's size is not known": mask is not None and not rank(mask),
        "its mask is of another type": rw.training
        and mask is not None
        and mask.dtype not in (ir.DataType.BOOL, q.dtype),
    }
    for reason, stands in problems.items():
        if stands:
            return rw.refuse("Sdpa", [node], reason)
    op = Builder()
    flat = rank(q) == 3
    heads, groups = attribute(node, "q_num_heads"), attribute(node, "kv_num_heads")
    if flat:
        if not heads or not groups:
            return rw.refuse("Sdpa", [node], "head count or head size is not static")
        q, k, v = (_split_heads(op, t, n) for t, n in ((q, heads), (k, groups), (v, groups)))
    else:
        heads, groups = dim(q, 1), dim(k, 1)
    if heads is None or groups is None or dim(q, -1) is None:
        return rw.refuse("Sdpa", [node], "head count or head size is not static")
    scale = attribute(node, "scale") or 1 / math.sqrt(dim(q, -1) or 1)
    if past_k is not None and past_v is not None:
        k, v = (_joined(op, past, new) for past, new in ((past_k, k), (past_v, v)))
    present = [k, v]
    sums = opset >= _SUMS and mask is not None and mask.dtype != ir.DataType.BOOL
    view = _View.of(node)
    causal = view.plain and past_k is None and lengths is None and not sums
    if mask is not None and opset >= _SHORTER and not full_width:
        mask = _lengthened(op, rw, mask, k, q)
    if not causal and (view.narrow or lengths is not None):
        seen = _seen(op, view, q, k, past_k, lengths)
        mask = _hidden_too(op, rw, mask, seen, sums)
    if mask is not None and mask.dtype == ir.DataType.BOOL:
        mask = _added(op, rw, mask, q)
    capped = bool(softcap)
    q, k, v, grouped = grouping(q, k, v)
    steps, guard = (("Mask",), "Guard") if mask is not None else ((), "")
    kind = Kind(grouped is not None, False, capped, causal, steps, guard)
    inputs = [q, k, v] + ([mask] if mask is not None else [])
    step = causal_step([MaskStep(mask, mask)] if mask is not None else [])
    if capped:
        y = emit(op, kind, grouped, inputs, scale / softcap, softcap, step)
    else:
        y = emit(op, kind, grouped, inputs, scale, proved=step)
    attention = y.producer()
    assert attention is not None
    if lengths is None:  # whose mask may have one row, as onnxruntime's Attention takes none (1.32)
        attention.overload = "newer"
    if flat:
        y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), op.constant([0, 0, -1]))
    old, new = [node.outputs[0]], [y]
    for i in (1, 2):
        if len(used) > i and used[i]:
            if present[i - 1].producer() not in op.nodes:  # an output needs a value of its own
                present[i - 1] = typed(op.Identity(present[i - 1]), present[i - 1])
            old.append(node.outputs[i])
            new.append(present[i - 1])
    return rw.replace(node, op, old[::-1], new[::-1])


def _split_heads(op: Builder, x: ir.Value, heads: int) -> ir.Value:
    width = dim(x, -1)
    rows = op.Reshape(x, op.constant([0, 0, heads, -1]))
    typed(rows, x)
    if x.shape is not None and width is not None:
        rows.shape = ir.Shape([x.shape[0], x.shape[1], heads, width // heads])
    return transposed(op, rows, [0, 2, 1, 3])


def _joined(op: Builder, past: ir.Value, new: ir.Value) -> ir.Value:
    y: ir.Value = op.Concat(past, new, axis=2)
    if new.shape is not None:
        typed(y, new, [new.shape[0], new.shape[1], None, new.shape[3]])
    return typed(y, new)


def _whole(mask: ir.Value, node: ir.Node) -> bool:
    """Whether the mask is known to have a column for each key."""
    k, past = node.inputs[1], node.inputs[4] if len(node.inputs) > 4 else None
    if past is None:
        return same_size(mask, -1, k, -2) if k is not None else False
    before, new = dim(past, -2), dim(k, -2)
    return before is not None and new is not None and dim(mask, -1) == before + new


def _lengthened(op: Any, rw: Rewriter, mask: ir.Value, k: ir.Value, q: ir.Value) -> ir.Value:
    """The mask with a column for each key: those that it does not reach are hidden."""
    if mask.dtype == ir.DataType.BOOL:
        mask = _added(op, rw, mask, q)
    missing = op.Sub(op.Shape(k, start=2, end=3), op.Shape(mask, start=-1))
    amounts = op.Concat(op.constant([0] * (2 * (rank(mask) or 1) - 1)), missing, axis=0)
    wide: ir.Value = op.Pad(mask, amounts, _minus_infinity(rw, mask))
    shape = None if mask.shape is None else [*mask.shape[:-1], dim(k, 2)]
    return typed(wide, mask, shape)


def _hidden_too(
    op: Any, rw: Rewriter, mask: ir.Value | None, seen: ir.Value, sums: bool
) -> ir.Value:
    """The mask, of either kind, that also hides what `seen` does not show.

    `sums`: -inf is added to a mask, so that a NaN in it hides no less; else it takes its place.
    """
    if mask is None:
        return seen
    total: ir.Value
    if mask.dtype == ir.DataType.BOOL:
        total = op.And(mask, seen)
    elif sums:
        total = op.Add(mask, _added(op, rw, seen, mask))
    else:
        total = op.Where(seen, mask, _minus_infinity(rw, mask))
    return typed(total, mask, [None] * max(rank(mask) or 0, rank(seen) or 0))


def _minus_infinity(rw: Rewriter, like: ir.Value) -> ir.Value:
    dtype = (like.dtype or ir.DataType.FLOAT).numpy()
    return rw.initializer(f"minus_inf{np.dtype(dtype).name}", np.asarray(-np.inf, dtype))


def _added(op: Builder, rw: Rewriter, keep: ir.Value, like: ir.Value) -> ir.Value:
    """The mask that is -inf where `keep` is False."""
    low = _minus_infinity(rw, like)
    return typed(op.Where(keep, rw.zeros(like), low), like, keep.shape)


@dataclass(frozen=True)
class _View:
    """The keys that a query at position p sees: from p - left to p + right; -1 is no bound."""

    left: int
    right: int

    @staticmethod
    def of(node: ir.Node) -> _View:
        left, right, causal = (
            int(attribute(node, name, default))  # type: ignore[call-overload]
            for name, default in (
                ("left_window_size", -1),
                ("right_window_size", -1),
                ("is_causal", 0),
            )
        )
        return _View(left, 0 if causal == 1 else right)

    @property
    def narrow(self) -> bool:
        return self.left >= 0 or self.right >= 0

    @property
    def plain(self) -> bool:
        """Whether a mask is exactly the one that the attribute is_causal describes."""
        return self.left < 0 and self.right == 0


def _seen(
    op: Any,
    view: _View,
    q: ir.Value,
    k: ir.Value,
    past: ir.Value | None,
    lengths: ir.Value | None,
) -> ir.Value:
    """bool [S, T], or [B, 1, S, T] with the `lengths` [B] of the keys: what each query sees.

    The first query stands behind the past, or so that the last one stands at the last key.
    """
    zero, one = (op.constant(np.int64(n)) for n in (0, 1))

    def count(x: ir.Value) -> ir.Value:
        return op.Reshape(op.Shape(x, start=2, end=3), op.constant(np.empty(0, np.int64)))

    queries = op.Unsqueeze(op.Range(zero, count(q), one), op.constant([1]))
    keys = op.Range(zero, count(k), one)
    bounds = []
    if past is not None:
        queries = op.Add(queries, count(past))
    if lengths is not None:
        ends = op.Reshape(lengths, op.constant([-1, 1, 1, 1]))
        bounds.append(op.Less(keys, ends))
        queries = op.Add(queries, op.Sub(ends, count(q)))
    if view.right >= 0:
        last = queries if view.right == 0 else op.Add(queries, op.constant(np.int64(view.right)))
        bounds.append(op.LessOrEqual(keys, last))
    if view.left >= 0:
        bounds.append(op.GreaterOrEqual(keys, op.Sub(queries, op.constant(np.int64(view.left)))))
    seen: ir.Value = bounds[0]
    for bound in bounds[1:]:
        seen = op.And(seen, bound)
    seen.dtype = ir.DataType.BOOL
    seen.shape = ir.Shape([None] * (2 if lengths is None else 4))
    return seen

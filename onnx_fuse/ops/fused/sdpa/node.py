"""The ai.onnx Attention node (opset 23 and later) as an attention operator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.onnx.build import Builder, dim, rank
from onnx_fuse.ops.fused.sdpa.causal import causal_step
from onnx_fuse.ops.fused.sdpa.kinds import Kind
from onnx_fuse.ops.fused.sdpa.rule import emit, grouping, transposed
from onnx_fuse.ops.fused.sdpa.scores import Step
from onnx_fuse.ops.rewrite import Rewriter, attribute, typed


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
    causal = attribute(node, "is_causal", 0) == 1
    softcap = attribute(node, "softcap", 0.0)
    used = [bool(o.uses()) or o.is_graph_output() for o in node.outputs]
    # from opset 24 on, keys that the mask does not reach are hidden; to broadcast would show them
    reach, keys, before = dim(mask, -1), dim(k, -2), 0 if past_k is None else dim(past_k, -2)
    every = None if keys is None or before is None else keys + before
    problems = {
        "its mask may be shorter than its keys": mask is not None
        and reach is not None
        and reach != every
        # new keys come behind those of the past, however many
        and (every is not None or reach == 1 or (before is not None and reach <= before)),
        "it has a past of keys or of values alone": (past_k is None) != (past_v is None),
        "it has a padding-length input": lengths is not None,
        "it sees a sliding window": any(
            int(attribute(node, f"{side}_window_size", -1)) >= 0  # type: ignore[call-overload]
            for side in ("left", "right")
        ),
        "its scores are an output that is used": any(used[3:]),
        "inputs of unknown or mixed rank": len({rank(t) for t in bound}) != 1 or rank(q) is None,
        "softmax_precision": attribute(node, "softmax_precision") not in (None, 1),
        "the mask's size is not known": mask is not None and not rank(mask),
    }
    for reason, stands in problems.items():
        if stands:
            return rw.refuse("Sdpa", [node], reason)
    op = Builder()
    flat = rank(q) == 3
    heads, groups = attribute(node, "q_num_heads"), attribute(node, "kv_num_heads")
    if flat:
        if not isinstance(heads, int) or not isinstance(groups, int):
            return rw.refuse("Sdpa", [node], "head count or head size is not static")
        q, k, v = (_split_heads(op, t, n) for t, n in ((q, heads), (k, groups), (v, groups)))
    else:
        heads, groups = dim(q, 1), dim(k, 1)
    if heads is None or groups is None or dim(q, -1) is None:
        return rw.refuse("Sdpa", [node], "head count or head size is not static")
    scale = attribute(node, "scale")
    if not isinstance(scale, float) or scale == 0.0:
        scale = 1 / math.sqrt(dim(q, -1) or 1)
    if past_k is not None and past_v is not None:
        k, v = (_joined(op, past, new) for past, new in ((past_k, k), (past_v, v)))
    present = [k, v]
    if causal and past_k is not None:
        mask, causal = _with_past(op, rw, mask, _seen(op, q, k, past_k), q), False
    if mask is not None and mask.dtype == ir.DataType.BOOL:
        mask = _added(op, rw, mask, q)
    capped = isinstance(softcap, float) and softcap != 0.0
    q, k, v, grouped = grouping(q, k, v)
    steps, guard = (("Mask",), "Guard") if mask is not None else ((), "")
    kind = Kind(grouped is not None, False, capped, causal, steps, guard)
    inputs = [q, k, v] + ([mask] if mask is not None else [])
    step = causal_step([Step(mask, mask)] if mask is not None else [])
    if capped:
        assert isinstance(softcap, float)
        y = emit(op, kind, grouped, inputs, scale / softcap, softcap, step)
    else:
        y = emit(op, kind, grouped, inputs, scale, causal=step)
    made = y.producer()
    assert made is not None
    made.overload = "newer"
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


def _with_past(
    op: Builder, rw: Rewriter, mask: ir.Value | None, seen: ir.Value, q: ir.Value
) -> ir.Value:
    """The mask, of either kind, that also hides what `seen` does."""
    if mask is None:
        return seen
    if mask.dtype == ir.DataType.BOOL:
        return typed(op.And(mask, seen), mask)
    return typed(op.Where(seen, mask, _minus_infinity(rw, q)), mask)


def _minus_infinity(rw: Rewriter, q: ir.Value) -> ir.Value:
    dtype = (q.dtype or ir.DataType.FLOAT).numpy()
    return rw.initializer(f"minus_inf{np.dtype(dtype).name}", np.asarray(-np.inf, dtype))


def _added(op: Builder, rw: Rewriter, keep: ir.Value, q: ir.Value) -> ir.Value:
    """The mask that is -inf where `keep` is False."""
    low = _minus_infinity(rw, q)
    return typed(op.Where(keep, rw.zeros(q), low), q, keep.shape)


def _seen(op: Any, q: ir.Value, k: ir.Value, past: ir.Value) -> ir.Value:
    """bool [S, T]: query i sees key j where j <= i + the length of the past."""
    zero, one = (op.constant(np.int64(n)) for n in (0, 1))
    count = [op.Reshape(op.Shape(x, start=2, end=3), op.constant(np.empty(0, np.int64)))
             for x in (q, k, past)]  # fmt: skip
    queries = op.Add(op.Range(zero, count[0], one), count[2])
    keys = op.Range(zero, count[1], one)
    seen: ir.Value = op.LessOrEqual(keys, op.Unsqueeze(queries, op.constant([1])))
    seen.dtype = ir.DataType.BOOL
    seen.shape = ir.Shape([None, None])
    return seen

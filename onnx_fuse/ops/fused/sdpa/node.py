"""The ai.onnx Attention node (opset 23 and later) as an attention operator."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, rank, required
from onnx_fuse.ops.attention import (
    SHORTER,
    View,
    broadcast_rows,
    hidden_from,
    keys_in_view,
    lengthened,
    whole_mask,
)
from onnx_fuse.ops.fused.sdpa.kinds import Kind
from onnx_fuse.ops.fused.sdpa.mask_analysis import causal_step
from onnx_fuse.ops.fused.sdpa.rule import emit, grouping, transposed
from onnx_fuse.ops.fused.sdpa.scores import MaskStep
from onnx_fuse.ops.rules import Rewriter, attribute, is_float, typed
from onnx_fuse.ops.shape_ops import Writer
from onnx_fuse.reasons import Reason

_DEPTH = 12  # nodes before a mask among which its lowest number is looked for
_SUMS = 25
"""The opset from which what hides keys is added to a mask and does not take its place
(onnxruntime 1.32)."""


def fuse_node(rw: Rewriter, node: ir.Node) -> bool:
    """The rule, anchored at an Attention.

    A row that is masked whole, by False or by -inf, gives zeros, as the standard says, and by the
    lowest number, as onnxruntime does. Past keys and values are concatenated before it, which gives
    the present ones too.
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
    full_width = mask is None or whole_mask(node)
    problems = {
        Reason("mask-columns"): opset < SHORTER
        and not full_width
        and None not in (dim(mask, -1), dim(k, -2), 0 if past_k is None else dim(past_k, -2)),
        Reason("past"): (past_k is None) != (past_v is None) or None not in (past_k, lengths),
        Reason("other-readers", what="its scores"): any(used[3:]),
        Reason("ranks"): len({rank(t) for t in bound}) != 1 or rank(q) is None,
        Reason("softmax-precision"): attribute(node, "softmax_precision") not in (None, 1),
        Reason("unknown", what="the rank of its mask"): mask is not None and not rank(mask),
    }
    for reason, stands in problems.items():
        if stands:
            return rw.refuse("Sdpa", [node], reason)
    op = Writer()
    flat, heads_unknown = rank(q) == 3, Reason("unknown", what="the number or size of its heads")
    heads, groups = attribute(node, "q_num_heads"), attribute(node, "kv_num_heads")
    if flat:
        if not heads or not groups:
            return rw.refuse("Sdpa", [node], heads_unknown)
        q, k, v = (_split_heads(op, t, n) for t, n in ((q, heads), (k, groups), (v, groups)))
    else:
        heads, groups = dim(q, 1), dim(k, 1)
    if heads is None or groups is None or dim(q, -1) is None:
        return rw.refuse("Sdpa", [node], heads_unknown)
    scale = attribute(node, "scale") or 1 / math.sqrt(dim(q, -1) or 1)
    joined = [past_k, k] if past_k is not None else []
    if past_k is not None and past_v is not None:
        k, v = (_joined(op, past, new) for past, new in ((past_k, k), (past_v, v)))
    present = [k, v]
    sums = opset >= _SUMS and mask is not None and mask.dtype != ir.DataType.BOOL
    if mask is not None and mask.dtype != ir.DataType.BOOL:
        mask = _by_infinity(op, rw, mask, hidden_from(opset, mask, q))
    view = View.of(node)
    wide, v = broadcast_rows(op, opset, q, k, v, mask)
    causal = view.plain and past_k is None and lengths is None and not sums and wide is q
    if mask is not None and opset >= SHORTER and not full_width:
        shape = None if mask.shape is None else [*mask.shape[:-1], dim(k, 2)]
        mask = typed(lengthened(op, mask, k)[0], mask, shape)
    if not causal and (view.narrow or lengths is not None):
        seen = keys_in_view(op, opset, view, q, k, joined, lengths)
        mask = _hidden_too(op, rw, mask, seen, sums)
    if mask is not None and mask.dtype == ir.DataType.BOOL:
        mask = _added(op, rw, mask, q)
    if mask is not None and mask.dtype != q.dtype and q.dtype is not None:
        mask = typed(op.Cast(mask, to=int(q.dtype)), q, mask.shape)
    capped = bool(softcap)
    q, k, v, grouped = grouping(wide, k, v)
    steps, guard = (("Mask",), "Guard") if mask is not None else ((), "")
    kind = Kind(grouped is not None, False, capped, causal, steps=steps, guard=guard)
    inputs = [q, k, v] + ([mask] if mask is not None else [])
    step = causal_step([MaskStep(mask, mask)] if mask is not None else [])
    if capped:
        y = emit(op, kind, grouped, inputs, scale / softcap, softcap, step)
    else:
        y = emit(op, kind, grouped, inputs, scale, proved=step)
    attention = required(y.producer())
    # onnxruntime's Attention (1.32) broadcasts no mask along its rows. A mask made of lengths may
    # have one row, and one of a type that its kernel does not take went through the function.
    takes = optional[0] is None or optional[0].dtype in (ir.DataType.BOOL, q.dtype)
    if lengths is None and takes:
        attention.overload = "newer"
    if flat:
        y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, -1])
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
    rows = op.Reshape(x, [0, 0, heads, -1])
    typed(rows, x)
    if x.shape is not None and width is not None:
        rows.shape = ir.Shape([x.shape[0], x.shape[1], heads, width // heads])
    return transposed(op, rows, [0, 2, 1, 3])


def _joined(op: Builder, past: ir.Value, new: ir.Value) -> ir.Value:
    y: ir.Value = op.Concat(past, new, axis=2)
    if new.shape is not None:
        typed(y, new, [new.shape[0], new.shape[1], None, new.shape[3]])
    return typed(y, new)


def _hidden_too(
    op: Writer, rw: Rewriter, mask: ir.Value | None, seen: ir.Value, sums: bool
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


def _by_infinity(op: Writer, rw: Rewriter, mask: ir.Value, lowest: np.ndarray) -> ir.Value:
    """The mask with -inf for the lowest number, where that may hide all keys of a row."""
    sees_itself = causal_step([MaskStep(mask, mask)])[0] > 0
    if np.isinf(lowest) or sees_itself or not _may_be(mask, lowest, _DEPTH):
        return mask
    hides = op.LessOrEqual(mask, rw.initializer(f"lowest{lowest.dtype.name}", lowest))
    return typed(op.Where(hides, _minus_infinity(rw, mask), mask), mask, mask.shape)


def _may_be(mask: ir.Value, lowest: np.ndarray, depth: int) -> bool:
    """Whether an element of the mask may be this number, by the constants that it is made of."""
    array, node = const_array(mask), mask.producer()
    if array is not None:
        return bool((abs(array) == abs(lowest)).any())  # which a Neg or a factor may turn
    if node is None or not depth:
        return True
    sources = [x for x in node.inputs if x is not None and is_float(x)]
    # a Cast of conditions or counts has no such number
    found = any(_may_be(x, lowest, depth - 1) for x in sources)
    return found or not (sources or node.op_type == "Cast")


def _minus_infinity(rw: Rewriter, like: ir.Value) -> ir.Value:
    dtype = (like.dtype or ir.DataType.FLOAT).numpy()
    return rw.initializer(f"minus_inf{np.dtype(dtype).name}", np.asarray(-np.inf, dtype))


def _added(op: Builder, rw: Rewriter, keep: ir.Value, like: ir.Value) -> ir.Value:
    """The mask that is -inf where `keep` is False."""
    low = _minus_infinity(rw, like)
    return typed(op.Where(keep, rw.zeros(like), low), like, keep.shape)

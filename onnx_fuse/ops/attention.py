"""Attention (opset 23: grouped heads, masks, causal, softcap, past) and RotaryEmbedding.

With P = softmax(u) and u = scale·QKᵀ (+ mask):  dV = Pᵀ dY,  dU = P ⊙ (dY Vᵀ - rowsum(dY ⊙ Y)),
dQ = scale·dU K,  dK = scale·dUᵀ Q. P is computed again: nothing of size [S, T] is kept for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import dim
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.shape_ops import (
    Tensor,
    Values,
    Writer,
    arguments,
    fail,
    known_rank,
    same_dim,
    same_size,
)


def _heads(op: Writer, x: Tensor, heads: int) -> Tensor:
    """[B, S, H D] as [B, H, S, D]."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, -1]), perm=[0, 2, 1, 3])


SHORTER = 24
"""The opset from which a mask may have fewer columns than there are keys: it hides the others."""


_KERNELS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
"""The types that onnxruntime (1.32) has a kernel for; others take the operator's function."""


def whole_mask(node: ir.Node) -> bool:
    """Whether the mask of an Attention is known to have a column for each key."""
    _, k, _, mask, past = arguments(node, 5)
    if mask.shape is None or k.shape is None:
        return False
    if past is None:
        return same_dim(mask.shape[-1], k.shape[-2])
    before, new = dim(past, -2), dim(k, -2)
    return before is not None and new is not None and dim(mask, -1) == before + new


def hidden_from(opset: int, mask: ir.Value, q: ir.Value) -> np.ndarray:
    """The number, in q's type, from which down an added mask hides all keys of a row, too."""
    dtype = q.dtype or ir.DataType.FLOAT
    kernel = opset < 25 and mask.dtype == dtype and dtype in _KERNELS
    return np.asarray(dtype.min if kernel else -np.inf, dtype.numpy())


def lengthened(op: Writer, mask: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """A mask with a column for each key, those that it does not reach hidden; what a Pad added."""
    missing = op.Sub(op.Shape(k, start=2, end=3), op.Shape(mask, start=-1))
    missing = op.vector([*[0] * (2 * known_rank(mask) - 1), missing])
    low = False if mask.dtype == ir.DataType.BOOL else -np.inf
    wide = op.Pad(mask, missing, op.constant(np.asarray(low, mask.dtype.numpy())))
    return wide, missing


def broadcast_rows(
    op: Writer, opset: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """q and v [B, H, rows, width] with the rows to which the mask and k broadcast them.

    So does onnxruntime (1.32) where it has no kernel: from opset 25 on, beside float and float16.
    """
    if opset < 25 and q.dtype in _KERNELS:
        return q, v
    if known_rank(v) and not same_dim(k.shape[2], v.shape[2]):
        v = _expand(op, v, [1, 1, op.sizes_of(k)[2], 1])
    lead = [] if mask is None or mask.shape is None else list(mask.shape)[-2::-1]
    if any(m != 1 and not same_dim(m, s) for m, s in zip(lead, q.shape[2::-1], strict=False)):
        q = _expand(op, q, [*op.sizes_of(mask)[:-1], 1])
    return q, v


def _expand(op: Writer, x: Tensor, sizes: list[Any]) -> Tensor:
    y, heads = op.Expand(x, op.vector(sizes)), dim(x, 1)
    y.dtype, y.shape = x.dtype, ir.Shape([None, None if heads == 1 else heads, None, x.shape[3]])
    return y


def _attention(op: Writer, node: ir.Node, dys: Values) -> Values:
    (q, k, v, mask, past_k, past_v, lengths), dy = arguments(node, 7), dys[0]
    flat, y = known_rank(q) == 3, node.outputs[0]
    if len(dys) > 3 and dys[3] is not None:
        raise fail(node, "the gradient would have to flow through qk_matmul_output")
    heads = node.attributes.get_int("q_num_heads", 0) if flat else dim(q, 1)
    shared = node.attributes.get_int("kv_num_heads", 0) if flat else dim(k, 1)
    if not heads or not shared:
        raise fail(node, "its numbers of heads are not static")
    q4, k4, v4 = (
        (_heads(op, q, heads), _heads(op, k, shared), _heads(op, v, shared)) if flat else (q, k, v)
    )
    new_k, new_v = k4, v4
    if past_k is not None:
        k4, v4 = op.Concat(past_k, k4, axis=2), op.Concat(past_v, v4, axis=2)
    missing, added = None, mask is not None and mask.dtype != ir.DataType.BOOL
    bias = op.to_type(mask, q.dtype) if added else mask
    if mask is not None and op.opset >= SHORTER and not whole_mask(node):
        bias, missing = lengthened(op, bias, k4)
    wide_q, long_v = broadcast_rows(op, op.opset, q4, k4, v4, bias)

    def fold(x: Tensor) -> Tensor:
        """[B, H, S, E] as [B, Hkv, (H/Hkv) S, E]: the rows that share keys, together."""
        if heads == shared:
            return x
        batch, _, rows, width = op.sizes_of(x)
        times = heads // shared
        rows = rows * times if isinstance(rows, int) else op.Mul(rows, times)
        return op.reshape(x, [batch, shared, rows, width])

    def unfold(x: Tensor) -> Tensor:
        if heads == shared:
            return x
        batch, _, _, width = op.sizes_of(x)
        return op.reshape(x, [batch, heads, op.sizes_of(wide_q)[2], width])

    scale = node.attributes.get_float("scale", 0.0)
    width = dim(q4, 3)
    if not scale and width is None:
        root = op.Sqrt(op.to_like(op.size_of(q4, 3), q))
        scaled, factor = op.Div(wide_q, root), op.Reciprocal(root)
    else:
        factor = scale or 1 / math.sqrt(width or 1)
        scaled = op.Mul(wide_q, factor)
    scaled = fold(scaled)
    u = unfold(op.MatMul(scaled, op.swap_last(k4)))
    softcap, tanh = node.attributes.get_float("softcap", 0.0), None
    if softcap:
        tanh = op.Tanh(op.Mul(u, 1 / softcap))
        u = op.Mul(tanh, softcap)
    allowed = bias
    if added:
        u = op.Add(u, bias)
        allowed = op.Not(op.LessOrEqual(bias, op.constant(hidden_from(op.opset, mask, q))))
    view = View.of(node)
    if view.narrow or lengths is not None:
        seen = keys_in_view(op, op.opset, view, q4, k4, [past_k, new_k] if past_k else [], lengths)
        allowed = seen if allowed is None else op.And(allowed, seen)
    if allowed is None:
        p = op.Softmax(u, axis=-1)
    else:
        # A row with no key allowed gives 0, as its output does.
        dtype = (q.dtype or ir.DataType.FLOAT).numpy()
        lowest = op.constant(np.asarray(ir.DataType(q.dtype).min).astype(dtype))
        p = op.Softmax(op.Where(allowed, u, lowest), axis=-1)
        p = op.Where(allowed, p, op.constant(0.0, q.dtype))

    dq = dk = dv = dmask = None
    if dy is not None:
        dy4 = _heads(op, dy, heads) if flat else dy
        # rowsum(P ⊙ dP) is rowsum(dY ⊙ Y), which has no [S, T] in it
        product = op.Mul(dy, y)
        if flat:
            product = op.Reshape(product, [0, 0, heads, -1])
        delta = op.ReduceSum(product, [-1], keepdims=1)
        if flat:
            delta = op.Transpose(delta, perm=[0, 2, 1, 3])
        rows = fold(dy4)
        dv = op.unbroadcast(op.MatMul(op.swap_last(fold(p)), rows), v4)
        dp = unfold(op.MatMul(rows, op.swap_last(long_v)))
        du = op.Mul(p, op.Sub(dp, delta))
        if added:
            dmask = op.to_type(op.unbroadcast(du, bias), mask.dtype)
            dmask = dmask if missing is None else op.Pad(dmask, op.Neg(missing))
        if tanh is not None:
            du = op.Mul(du, op.Sub(1.0, op.Mul(tanh, tanh)))
        du = fold(du)
        dq = op.Mul(op.unbroadcast(unfold(op.MatMul(du, k4)), q4), factor)
        dk = op.unbroadcast(op.MatMul(op.swap_last(du), scaled), k4)
    dk, dv = (_plus(op, g, d) for g, d in zip((dk, dv), [*dys[1:3], None, None], strict=False))
    dpast_k = dpast_v = None
    if past_k is not None:
        dpast_k, dk = _cut(op, dk, k4, past_k, new_k)
        dpast_v, dv = _cut(op, dv, v4, past_v, new_v)
    if flat:
        dq, dk, dv = (_join(op, g, x) for g, x in ((dq, q), (dk, k), (dv, v)))
    return [dq, dk, dv, dmask, dpast_k, dpast_v]


def _plus(op: Writer, a: Tensor, b: Tensor) -> Tensor:
    return (b if a is None else a) if a is None or b is None else op.Add(a, b)


def _cut(
    op: Writer, g: Tensor, present: Tensor, past: Tensor, new: Tensor
) -> tuple[Tensor, Tensor]:
    if g is None:
        g = op.zeros_like(present)
    sizes = op.Concat(*(op.Shape(x, start=2, end=3) for x in (past, new)), axis=0)
    first, second = op.Split(g, sizes, axis=2, outputs=2)
    return first, second


def _join(op: Writer, g: Tensor, x: Tensor) -> Tensor:
    """[B, H, S, D] back to [B, S, H D]."""
    return None if g is None else op.reshape_like(op.Transpose(g, perm=[0, 2, 1, 3]), x)


@dataclass(frozen=True)
class View:
    """The keys that a query at position p sees: from p - left to p + right; -1 is no bound."""

    left: int
    right: int

    @staticmethod
    def of(node: ir.Node) -> View:
        left, right = (node.attributes.get_int(f"{s}_window_size", -1) for s in ("left", "right"))
        return View(left, 0 if node.attributes.get_int("is_causal", 0) == 1 else right)

    @property
    def narrow(self) -> bool:
        return self.left >= 0 or self.right >= 0

    @property
    def plain(self) -> bool:
        """Whether a mask is exactly the one that the attribute is_causal describes."""
        return self.left < 0 and self.right == 0


def keys_in_view(
    op: Writer, opset: int, view: View, q: Tensor, k: Tensor, joined: Values, lengths: Tensor
) -> ir.Value:
    """bool [S, T], or [B, 1, S, T] with the `lengths` [B] of the keys: what each query sees.

    The first query stands behind the past, or so that the last one stands at the last key; k may
    be `joined` of a past and new keys. From a single query behind a past that has keys onnxruntime
    (1.32) hides none, however many are new.
    """
    queries = op.Unsqueeze(op.counted(op.size_of(q, 2)), [1])
    keys = op.counted(op.size_of(k, 2))
    bounds = []
    if joined:
        past, new = joined
        before, rows = op.size_of(past, 2), op.size_of(q, 2)
        queries = op.Add(queries, before)
        if opset < 25 and view.plain and q.dtype in _KERNELS and not same_size(q, 2, new, 2):
            alone = op.And(op.Equal(rows, np.int64(1)), op.Greater(before, np.int64(0)))
            queries = op.Where(alone, op.size_of(k, 2), queries)
    if lengths is not None:
        ends = op.Reshape(lengths, [-1, 1, 1, 1])
        bounds.append(op.Less(keys, ends))
        queries = op.Add(queries, op.Sub(ends, op.size_of(q, 2)))
    if view.right >= 0:
        last = queries if view.right == 0 else op.Add(queries, op.constant(np.int64(view.right)))
        bounds.append(op.LessOrEqual(keys, last))
    if view.left >= 0:
        bounds.append(op.GreaterOrEqual(keys, op.Sub(queries, op.constant(np.int64(view.left)))))
    seen: ir.Value = reduce(op.And, bounds)
    seen.dtype = ir.DataType.BOOL
    seen.shape = ir.Shape([None] * (2 if lengths is None else 4))
    return seen


def _rotary(op: Writer, node: ir.Node, dys: Values) -> Values:
    """A rotation: dx turns dy back, by the same op with -sin. With y1 = c x1 - s x2 and
    y2 = s x1 + c x2:  dc = dy1 x1 + dy2 x2,  ds = dy2 x1 - dy1 x2, summed over heads.
    """
    (x, cos, sin, positions), dy = arguments(node, 4), dys[0]
    attributes = {name: a.value for name, a in node.attributes.items()}
    dx = op.RotaryEmbedding(dy, cos, op.Neg(sin), positions, **attributes)
    heads, turned = attributes.get("num_heads", 0), attributes.get("rotary_embedding_dim", 0)

    def halves(value: Tensor) -> tuple[Tensor, Tensor]:
        if known_rank(value) == 3:
            size, (batch, length, _) = dim(value, 2), op.sizes_of(value)
            width = op.Shape(value, start=2)
            each = op.Div(width, heads) if size is None else size // heads
            value = op.reshape(value, [batch, length, heads, each])
        if turned:
            value = op.Slice(value, [0], [turned], [-1])
        if attributes.get("interleaved", 0):
            end = [np.iinfo(np.int64).max]
            return op.Slice(value, [0], end, [-1], [2]), op.Slice(value, [1], end, [-1], [2])
        first, second = op.Split(value, axis=-1, num_outputs=2, outputs=2)
        return first, second

    (x1, x2), (dy1, dy2) = halves(x), halves(dy)
    axis = op.constant([2 if known_rank(x) == 3 else 1])
    dcos = op.ReduceSum(op.Add(op.Mul(dy1, x1), op.Mul(dy2, x2)), axis, keepdims=0)
    dsin = op.ReduceSum(op.Sub(op.Mul(dy2, x1), op.Mul(dy1, x2)), axis, keepdims=0)
    if positions is not None:
        rows = op.Unsqueeze(positions, [-1])
        dcos = op.scatter_add(op.zeros_like(cos), rows, dcos)
        dsin = op.scatter_add(op.zeros_like(sin), rows, dsin)
    return [dx, dcos, dsin]


register(OpDef("Attention", grad=_attention), OpDef("RotaryEmbedding", grad=_rotary))

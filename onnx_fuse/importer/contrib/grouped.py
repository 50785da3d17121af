"""GroupQueryAttention: grouped heads over a cache whose sequences have lengths of their own.

B batch, S new tokens, N query heads, K key heads, h the size of a head. Sequence b has T[b] =
seqlens_k[b] + 1 tokens after the call, of which P[b] = max(T[b] - S, 0) were cached before it.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_fuse.importer.contrib.attention import (
    join_heads,
    lowest,
    rotated,
    scaled_scores,
    split_heads,
    steps,
)
from onnx_fuse.importer.contrib.table import Body, Input, Results, Unwritable, contrib, known
from onnx_fuse.ir.build import dim, rank

_REFUSED = {14: "q_norm_weight", 15: "k_norm_weight", 16: "query_seqlens"}


def _refuse(op: Body) -> None:
    for i, name in _REFUSED.items():
        if op.given(i) is not None:
            raise Unwritable(f"its input {name} is not supported")
    if op.attr("sliding_window_cache", 0):
        raise Unwritable("its cache has the window's size")
    if op.wants(3):
        raise Unwritable("it returns the scores")


def _scale(op: Body, name: str, kv_heads: int, head: int) -> ir.Value | None:
    """What a number of a quantized cache of keys ("k") or values stands for, or [1, K, 1, h]."""
    how, at = op.attr(f"{name}_quant_type", "NONE"), "kv".index(name)
    if how == "NONE":
        return None
    past = op.given(3 + at)
    if (
        past is None
        or past.dtype not in (ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN)
        or op.attr("kv_cache_bit_width", 8) not in (0, 8)
    ):
        raise Unwritable("its cache is quantized, and not a past in int8 or float8e4m3fn")
    shape = (1,) if how == "PER_TENSOR" else (1, kv_heads, 1, head)
    return op.Reshape(op.needed(12 + at), [*shape])


def _cached(
    op: Body, past: ir.Value | None, new: ir.Value, index: ir.Value, valid: ir.Value
) -> ir.Value:
    """The cache [B, K, ·, h] after the call: what `index` [B, K, ·, 1] names, else zeros."""
    both = new if past is None else op.Concat(past, new, axis=2)
    rows = op.GatherND(both, index, batch_dims=2)
    return op.Where(valid, rows, op.number(0.0, new))


def _in_steps(op: Body, x: ir.Value, scale: ir.Value, stored: ir.DataType) -> ir.Value:
    """x in steps of a scale, for which onnxruntime takes 1 where it is 0; NaN becomes 127 in int8.

    Those in float8 are numbers of float32: operators that move tensors don't take the type.
    """
    step = op.Where(op.Equal(scale, op.number(0, scale)), op.number(1, scale), scale)
    steps_of_x = op.Div(op.Cast(x, to=ir.DataType.FLOAT), step)
    if stored == ir.DataType.FLOAT8E4M3FN:
        return op.Cast(op.Cast(steps_of_x, to=stored), to=ir.DataType.FLOAT)
    steps_of_x = op.Round(steps_of_x)
    low, high = (op.number(n, scale) for n in (-128, 127))
    clipped = op.Where(op.IsNaN(steps_of_x), high, op.Clip(steps_of_x, low, high))
    return op.Cast(clipped, to=stored)


def shared_heads(op: Body, x: ir.Value, groups: int, heads: int, head: int) -> ir.Value:
    """Repeat each of the K heads of x [B, K, T, h] `groups` times, which gives [B, N, T, h]."""
    if groups == 1:
        return x
    one = op.Unsqueeze(x, [2])
    each = op.Expand(one, [1, 1, groups, 1, 1])
    batch, rows = op.Shape(x, start=0, end=1), op.Shape(x, start=2, end=3)
    return op.Reshape(each, op.vector([batch, heads, rows, head]), allowzero=1)


# On a CPU, a token over a cache of 1024 takes 0.3 ms whole and 0.6 as fused parts (1.32).
@contrib("GroupQueryAttention", whole=lambda node: True, lowered=lambda node: True)
def group_query_attention(
    op: Body,
    query: ir.Value,
    key: Input,
    value: Input,
    past_key: Input,
    past_value: Input,
    lengths: ir.Value,
    total: ir.Value,
) -> Results:
    _refuse(op)
    heads, kv_heads = op.count("num_heads"), op.count("kv_num_heads")
    parts = heads if key is not None and value is not None else heads + 2 * kv_heads
    width = dim(query, 2)
    head = known(dim(past_key, 3) if width is None else width // parts, "the size of its heads")
    if key is None or value is None:
        cut = op.constant([heads * head, kv_heads * head, kv_heads * head])
        query, key, value = op.Split(query, cut, outputs=3, axis=-1)
    q = split_heads(op, query, heads, heads * head)
    k, v = (split_heads(op, x, kv_heads, kv_heads * head) for x in (key, value))
    rows = op.Shape(q, start=2, end=3)  # S
    ends = op.Add(op.Cast(op.Reshape(lengths, [-1, 1]), to=ir.DataType.INT64), [1])
    starts = op.Max(op.Sub(ends, rows), [0])  # P [B, 1]
    places = op.Add(starts, steps(op, rows))  # of the new tokens: [B, S]
    if op.attr("do_rotary", 0):
        angles = _angles(op, places, rows, total)
        for_both: dict[str, Any] = {
            "half": angles[2],
            "interleaved": bool(op.attr("rotary_interleaved", 0)),
            "head": head,
        }
        q, k = (rotated(op, x, angles[0], angles[1], **for_both) for x in (q, k))
    # the cache: of its past, then of the new tokens
    wanted = op.Cast(op.Reshape(total, [1]), to=ir.DataType.INT64)
    behind = op.constant([0])
    if past_key is not None and past_value is not None:
        behind = op.Shape(past_key, start=2, end=3)
        wanted = op.Max(wanted, behind)
    column = steps(op, wanted)
    valid = op.Less(column, op.Add(starts, rows))  # [B, T]; padding behind a prompt is kept
    old = op.Less(column, starts)
    moved = op.Add(column, op.Sub(behind, starts))
    index = op.Where(valid, op.Where(old, column, moved), [0])
    index = op.Unsqueeze(index, [1, 3])
    index = op.Expand(index, [1, kv_heads, 1, 1])
    valid4 = op.Unsqueeze(valid, [1, 3])
    groups, caches = heads // kv_heads, []
    for name, past, new in (("k", past_key, k), ("v", past_value, v)):
        scale = _scale(op, name, kv_heads, head)
        if scale is None or past is None or past.dtype is None:
            cache = read = _cached(op, past, new, index, valid4)
        else:
            new, old = _in_steps(op, new, scale, past.dtype), past
            if new.dtype != past.dtype:
                old = op.Cast(past, to=new.dtype)
            cache = _cached(op, old, new, index, valid4)
            read = op.to_like(op.Mul(op.to_like(cache, scale), scale), q)
            cache = cache if new.dtype == past.dtype else op.Cast(cache, to=past.dtype)
        caches.append((cache, shared_heads(op, read, groups, heads, head)))
    (k, all_k), (v, all_v) = caches
    scores = scaled_scores(op, q, all_k, op.attr("scale"), head)
    cap = op.attr("softcap", 0.0)
    if cap:
        scores = op.formula("Tanh(scores / cap) * cap", scores=scores, cap=cap)
    mask = _mask(op, places, column, op.Less(column, ends), q)
    scores = op.Add(op.plus(scores, op.given(10)), mask)
    y = op.MatMul(softmax_with_sink(op, scores, heads), all_v)
    window = op.attr("local_window_size", -1)
    if window > 0 and op.attr("causal", 1):  # a query behind the end may see no key: 0
        seen = op.Less(places, op.Add(ends, [window - 1]))
        y = op.Where(op.Unsqueeze(seen, [1, 3]), y, op.number(0.0, y))
    return [join_heads(op, y, heads * head), k, v]


def _mask(
    op: Body, places: ir.Value, column: ir.Value, valid: ir.Value, like: ir.Value
) -> ir.Value:
    """[B, 1, S, T]: the least number for keys that a query does not see.

    It is finite, for a query of the padding may see no key at all.
    """
    row = op.Unsqueeze(places, [2])  # [B, S, 1]
    window = op.attr("local_window_size", -1)
    keep = op.Unsqueeze(valid, [1])
    if op.attr("causal", 1):
        keep = op.And(op.LessOrEqual(column, row), keep)
        if window > 0:
            keep = op.And(keep, op.Greater(column, op.Sub(row, [window])))
    keep = op.Unsqueeze(keep, [1])
    return op.Where(keep, op.number(0.0, like), op.number(lowest(like), like))


def softmax_with_sink(op: Body, scores: ir.Value, heads: int) -> ir.Value:
    """Softmax over the keys and, with a sink, over one more score: 0, or the number of the head."""
    sink = op.given(11)
    if sink is None and op.attr("smooth_softmax", 0) != 1:
        return op.Softmax(scores, axis=-1)
    first = op.Slice(scores, [0], [1], [3])
    if sink is None:
        extra = op.Expand(op.number(0.0, scores), op.Shape(first))
    else:
        extra = op.Expand(op.Reshape(sink, [1, heads, 1, 1]), op.Shape(first))
    p = op.Softmax(op.Concat(scores, extra, axis=-1), axis=-1)
    return op.Slice(p, [0], [-1], [3])


def _angles(
    op: Body, places: ir.Value, rows: ir.Value, total: ir.Value
) -> tuple[ir.Value, ir.Value, int]:
    """cos and sin [B, 1, S, half] of the new tokens' positions, and half."""
    cos, sin, positions = op.needed(7), op.needed(8), op.given(9)
    half = known(dim(cos, 1) if rank(sin) == 2 else None, "the size of its angles")
    if positions is not None:
        # a first prompt counts on from its first position
        first = op.Reshape(op.Slice(op.Reshape(positions, [-1]), [0], [1], [0]), [1, 1])
        counting = op.Add(first, steps(op, rows))
        prompt = op.Equal(op.Cast(op.Reshape(total, [1]), to=ir.DataType.INT64), rows)
        places = op.Where(prompt, counting, positions)
    cos, sin = (op.Unsqueeze(op.Gather(table, places), [1]) for table in (cos, sin))
    return cos, sin, half

"""PagedAttention: the tokens of several sequences side by side, over a cache that stands in pages.

T tokens, B sequences, P pages a sequence at most, p places a page, N query heads, K key heads, h
the size of a head. Every sequence's keys meet every token, of which only its own count: what is no
number in one sequence stays there.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnx_fuse.importer.contrib.attention import lowest, rotated, scaled_scores, steps
from onnx_fuse.importer.contrib.grouped import shared_heads, softmax_with_sink
from onnx_fuse.importer.contrib.padding import int64
from onnx_fuse.importer.contrib.table import Body, Input, Results, Unwritable, contrib, known
from onnx_fuse.ir.build import dim


def _refuse(op: Body, query: ir.Value, cache: ir.Value) -> None:
    if op.attr("kv_cache_layout", "SEPARATE") != "SEPARATE":
        raise Unwritable("its cache holds latent vectors")
    if op.attr("rotary_offset", 0):
        raise Unwritable("its attribute rotary_offset is not supported")
    if any(op.attr(f"{x}_quant_type", "NONE") != "NONE" for x in "kv") or (
        None not in (query.dtype, cache.dtype) and query.dtype != cache.dtype
    ):
        raise Unwritable("its cache is quantized")
    if not op.attr("is_causal", 1) and op.attr("local_window_size", -1) > 0:
        raise Unwritable("it has a window that is not causal")


def _normalized(op: Body, x: ir.Value, gain: ir.Value | None) -> ir.Value:
    """x [T, N, h], each head divided by its root mean square and times `gain` [h]."""
    if gain is None:
        return x
    wide = op.Cast(x, to=ir.DataType.FLOAT)
    mean = op.ReduceMean(op.Mul(wide, wide), [-1], keepdims=1)
    root = op.Sqrt(op.Add(mean, op.number(op.attr("qk_norm_epsilon", 1e-6), wide)))
    return op.to_like(op.Mul(op.Div(wide, root), op.to_like(gain, wide)), x)


def _any(op: Body, x: ir.Value, axis: int) -> ir.Value:
    """Whether x has a true element on an axis, which stays; of none it has not."""
    return op.Greater(op.ReduceSum(int64(op, x), [axis], keepdims=1), [0])


def _inside(op: Body, x: ir.Value, end: ir.Value) -> ir.Value:
    """Whether 0 <= x < end."""
    return op.And(op.GreaterOrEqual(x, [0]), op.Less(x, end))


@contrib("PagedAttention")
def paged_attention(
    op: Body,
    query: ir.Value,
    key: Input,
    value: Input,
    key_cache: ir.Value,
    value_cache: ir.Value,
    starts: ir.Value,
    past: ir.Value,
    table: ir.Value,
    cos: Input,
    sin: Input,
    slots: Input,
    sink: Input,
    q_gain: Input,
    k_gain: Input,
) -> Results:
    _refuse(op, query, key_cache)
    heads, kv_heads = op.count("num_heads"), op.count("kv_num_heads")
    width, parts = dim(query, 1), heads if key is not None else heads + 2 * kv_heads
    head = known(dim(key_cache, 3) if width is None else width // parts, "the size of its heads")
    if key is None or value is None:
        cut = op.constant([heads * head, kv_heads * head, kv_heads * head])
        query, key, value = op.Split(query, cut, outputs=3, axis=-1)
    q = _normalized(op, op.Reshape(query, [0, heads, head]), q_gain)
    k, v = (op.Reshape(x, [0, kv_heads, head]) for x in (key, value))
    k = _normalized(op, k, k_gain)
    starts, past, table = (int64(op, x) for x in (starts, past, table))
    begins, ends = op.Slice(starts, [0], [-1], [0]), op.Slice(starts, [1], [2**31], [0])
    # of each token its sequence and its place there; none may have it
    token = op.Unsqueeze(steps(op, op.Shape(query, start=0, end=1)), [1])
    belongs = op.And(op.LessOrEqual(begins, token), op.Less(token, ends))  # [T, B]
    zero = op.constant([0])
    sequences = steps(op, op.Shape(past))
    sequence = op.ReduceSum(op.Where(belongs, sequences, zero), [1], keepdims=0)
    places = op.Add(past, op.Sub(token, begins))
    place = op.ReduceSum(op.Where(belongs, places, zero), [1], keepdims=0)
    if op.attr("do_rotary", 0):
        half = known(dim(cos, 1), "the size of its angles")
        pairs = bool(op.attr("rotary_interleaved", 0))
        angles = [op.Unsqueeze(op.Gather(x, place), [1]) for x in (cos, sin)]
        for_both: dict[str, Any] = {"half": half, "interleaved": pairs, "head": head}
        q, k = (
            op.Squeeze(rotated(op, op.Unsqueeze(x, [0]), *angles, **for_both), [0]) for x in (q, k)
        )
    # the new keys and values go into the pages; those without a place go behind the last
    pages, size = op.Shape(key_cache, start=0, end=1), op.Shape(key_cache, start=1, end=2)
    count = op.Mul(pages, size)
    if slots is None:
        per, page = op.Shape(table, start=1, end=2), op.Div(place, size)
        here = op.And(op.Less(page, per), op.Squeeze(_any(op, belongs, axis=1), [1]))
        entry = op.Where(here, op.Add(op.Mul(sequence, per), page), zero)
        # a table without entries has one that is none
        flat = op.Concat(op.Reshape(table, [-1]), op.constant([-1]), axis=0)
        number = op.Gather(flat, entry)
        slot = op.Add(op.Mul(number, size), op.Mod(place, size))
        kept = op.And(here, _inside(op, number, pages))
    else:
        slot = int64(op, slots)
        kept = _inside(op, slot, count)
    slot = op.Unsqueeze(op.Where(kept, slot, count), [1])
    # what the tokens of a sequence see: its mapped pages, up to their own place
    mapped = _inside(op, table, pages)  # [B, P]
    index = op.Reshape(op.Where(mapped, table, zero), [-1])
    within = op.Mul(op.Shape(table, start=1, end=2), size)
    column = steps(op, within)  # [P p]
    lengths = op.Unsqueeze(op.Add(past, op.Sub(ends, begins)), [1])
    sizes = op.Concat(op.Shape(table), size, axis=0)
    there = op.Expand(op.Unsqueeze(mapped, [2]), sizes)
    there = op.Reshape(there, op.Concat(op.Shape(past), within, axis=0), allowzero=1)
    there = op.And(there, op.Less(column, lengths))  # [B, P p]
    caches, read = [], []
    for cache, new in ((key_cache, k), (value_cache, v)):
        lines = op.Reshape(cache, op.vector([count, kv_heads, head]), allowzero=1)
        spare = op.Expand(op.number(0.0, new), [1, kv_heads, head])
        written = op.ScatterND(op.Concat(lines, spare, axis=0), slot, new)
        written = op.Reshape(op.Slice(written, [0], count, [0]), op.Shape(cache), allowzero=1)
        caches.append(written)
        rows = op.Gather(written, index, axis=0)  # [B P, p, K, h]
        rows = op.Reshape(rows, op.vector([op.Shape(past), within, kv_heads, head]), allowzero=1)
        rows = op.Where(op.Unsqueeze(there, [2, 3]), rows, op.number(0.0, new))
        rows = op.Transpose(rows, perm=[0, 2, 1, 3])
        read.append(shared_heads(op, rows, heads // kv_heads, heads, head))
    seen = op.And(op.Unsqueeze(belongs, [2]), there)  # [T, B, P p]
    if op.attr("is_causal", 1):
        last = op.Unsqueeze(place, [1, 2])
        seen = op.And(seen, op.LessOrEqual(column, last))
        window = op.attr("local_window_size", -1)
        if window > 0:
            seen = op.And(seen, op.Greater(column, op.Sub(last, [window])))
    seen = op.Unsqueeze(op.Transpose(seen, perm=[1, 0, 2]), [1])  # [B, 1, T, P p]
    q = op.Unsqueeze(op.Transpose(q, perm=[1, 0, 2]), [0])
    scores = scaled_scores(op, q, read[0], op.attr("scale"), head)
    cap = op.attr("softcap", 0.0)
    if cap:
        scores = op.formula("Tanh(scores / cap) * cap", scores=scores, cap=cap)
    scores = op.Where(seen, scores, op.number(lowest(q), q))
    y = op.MatMul(softmax_with_sink(op, scores, heads), read[1])
    # a token has 0 from sequences of which it sees no key
    y = op.Where(_any(op, seen, axis=3), y, op.number(0.0, q))
    y = op.Transpose(op.ReduceSum(y, [0], keepdims=0), perm=[1, 0, 2])
    tokens = op.Shape(query, start=0, end=1)
    y = op.Reshape(y, op.vector([tokens, heads * head]), allowzero=1)
    return [y, *caches]

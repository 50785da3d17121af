"""Attention in onnxruntime's spellings: Attention, MultiHeadAttention, and rotary embedding.

B batch, S queries, L new keys, P keys of the past, T = P + L, N heads, h the size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnx_fuse.importer.contrib.table import (
    Body,
    Input,
    Results,
    Unwritable,
    contrib,
    known,
    known_rank,
)
from onnx_fuse.ir.build import dim, given, rank
from onnx_fuse.ops.shape_ops import same_size

_LOWEST = {ir.DataType.FLOAT16: -65504.0, ir.DataType.BFLOAT16: -3.3895313892515355e38}


def split_heads(op: Body, x: ir.Value, heads: int, width: int | None = None) -> ir.Value:
    """[B, S, N·h] as [B, N, S, h]."""
    size = width if width is not None else dim(x, 2)
    if size:
        rows = op.Reshape(x, [0, 0, heads, size // heads])
    else:  # not known, or 0: neither a -1 nor a copied size stands for it
        head = op.Div(op.Shape(x, start=2, end=3), [heads])
        sizes = op.Concat(op.Shape(x, start=0, end=2), [heads], head, axis=0)
        rows = op.Reshape(x, sizes, allowzero=1)
    return op.Transpose(rows, perm=[0, 2, 1, 3])


def join_heads(op: Body, x: ir.Value, width: int | ir.Value | None) -> ir.Value:
    """[B, N, S, h] as [B, S, N·h]; `width`, that size, may be a vector of one."""
    rows = op.Transpose(x, perm=[0, 2, 1, 3])
    return op.Reshape(rows, op.vector([0, 0, -1 if width is None else width]))


def scaled_scores(
    op: Body, q: ir.Value, k: ir.Value, scale: float | None, head: int | None
) -> ir.Value:
    """q kᵀ · scale; without a scale 1/sqrt(h)."""
    scores = op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2]))
    if not scale and head is None:
        return op.Div(scores, op.Sqrt(op.to_like(op.Shape(q, start=3, end=4), q)))
    return op.Mul(scores, op.number(scale or 1 / math.sqrt(head or 1), q))


def steps(op: Body, size: ir.Value) -> ir.Value:
    """0, 1, … up to a size, which is a vector of one."""
    return op.counted(op.Squeeze(size))


def lowest(like: ir.Value) -> float:
    """The least finite number of the type; of float32 where the type is not known."""
    return _LOWEST.get(like.dtype or ir.DataType.FLOAT, float(np.finfo(np.float32).min))


def _padding(
    op: Body, mask: ir.Value, source: ir.Value, total: ir.Value, like: ir.Value, low: float
) -> ir.Value:
    """The addend of the scores for a mask_index or key_padding_mask; broadcasts to [B, N, S, T].

    `source` [B, …] is what the queries were made of, `like` the queries.
    """
    size = known_rank(mask, "the mask")
    zero, filled = op.number(0.0, like), op.number(low, like)
    if size == 1:
        # the sequences' ends, and behind them their starts if they are not 0
        count, length = dim(source, 0), dim(mask, 0)
        if count is not None and length is not None and length not in (count, 2 * count):
            raise Unwritable("its mask_index describes packed sequences")
        rows = op.Shape(like, start=0, end=1)
        no_starts = op.ConstantOfShape(rows, value=ir.tensor(np.zeros(1, np.int32)))
        doubled = op.Concat(mask, no_starts, axis=0)
        ends = op.Slice(doubled, [0], rows, [0])
        starts = op.Slice(doubled, rows, op.Mul(rows, [2]), [0])
        column = op.Cast(steps(op, total), to=ir.DataType.INT32)
        ends, starts = (op.Unsqueeze(v, [1]) for v in (ends, starts))
        inside = op.And(op.Less(column, ends), op.GreaterOrEqual(column, starts))
        keep = op.Unsqueeze(inside, [1, 2])
    elif size in (2, 3):
        seen = op.Greater(mask, op.to_like(op.constant([0]), mask))
        keep = op.Unsqueeze(seen, [*((1, 2) if size == 2 else (1,))])
    else:
        raise Unwritable(f"its mask has {size} dimensions")
    return op.Where(keep, zero, filled)


def _causal(
    op: Body,
    rows: ir.Value,
    new: ir.Value,
    total: ir.Value,
    padding: ir.Value | None,
    like: ir.Value,
) -> ir.Value:
    """A padding mask with the least number where a key stands behind its query.

    `rows` are S, `new` L, `total` T, each a vector of one; `new` is `rows` where the two are known
    to be the same. Otherwise the last query sees all keys: so do onnxruntime's (1.32, on the CPU).
    """
    row = op.Add(steps(op, rows), op.Sub(total, new))
    column = steps(op, total)
    keep = op.LessOrEqual(column, op.Unsqueeze(row, [1]))
    if new is not rows:
        # with as many keys as queries the causal mask, too, lets the last query see all of them
        final = op.Equal(steps(op, rows), op.Sub(rows, [1]))
        keep = op.Or(keep, op.Unsqueeze(final, [1]))
    other = op.number(0.0, like) if padding is None else padding
    return op.Where(keep, other, op.number(lowest(like), like))


def attend(
    op: Body,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    *,
    mask: ir.Value | None,
    bias: ir.Value | None,
    new: ir.Value | None,
    head: int | None,
    width: int | ir.Value | None,
    seen: ir.Value | None = None,
) -> tuple[ir.Value, ir.Value]:
    """(y, scores before the softmax) of [B, N, ·, h]; `new` is L, None where it is S; `seen` [S, T]
    says in the place of a causal mask which keys count.
    """
    scores = scaled_scores(op, q, k, op.attr("scale"), head)
    total, added = op.Shape(k, start=2, end=3), None
    if mask is not None:
        low = op.attr("mask_filter_value", -10000.0)
        added = _padding(op, mask, op.needed(0), total, q, low)
    if seen is not None:
        scores = op.Where(seen, scores, op.number(-math.inf, q))
    elif op.attr("unidirectional", 0):
        rows = op.Shape(q, start=2, end=3)
        added = _causal(op, rows, rows if new is None else new, total, added, q)
    if bias is not None:
        added = bias if added is None else op.Add(bias, added)
    if added is not None:
        scores = op.Add(scores, added)
    y = op.MatMul(op.Softmax(scores, axis=-1), v)
    return join_heads(op, y, width), scores


def attention_of(
    op: Body,
    qkv: ir.Value,
    sizes: Sequence[int],
    *,
    mask: ir.Value | None,
    past: ir.Value | None,
    bias: ir.Value | None = None,
) -> tuple[ir.Value, ir.Value | None]:
    """(y, present) of the projected queries, keys and values, side by side in `qkv`."""
    for name in ("do_rotary", "past_present_share_buffer"):
        if op.attr(name, 0):
            raise Unwritable(f"its attribute {name} is not supported")
    heads = op.count("num_heads")
    parts = op.Split(qkv, [*sizes], outputs=3, axis=-1)
    q, k, v = (split_heads(op, x, heads, size) for x, size in zip(parts, sizes, strict=True))
    if past is not None:
        pasts = op.Split(past, outputs=2, axis=0, num_outputs=2)
        k, v = (
            op.Concat(op.Squeeze(before, [0]), x, axis=2)
            for before, x in zip(pasts, (k, v), strict=True)
        )
    present = None
    if op.wants(1):
        present = op.Concat(*(op.Unsqueeze(x, [0]) for x in (k, v)), axis=0)
    head = sizes[0] // heads
    y, _ = attend(op, q, k, v, mask=mask, bias=bias, new=None, head=head, width=sizes[2])
    return y, present


# On a CPU, 12 heads of 64 (onnxruntime 1.32): with a past of 1024 Attention takes 1.25 ms whole and
# 2.5 as fused parts, without one the same; MultiHeadAttention 1.0 to 1.2 times as long in parts.
@contrib("Attention", whole=lambda node: given(node, 4) is not None)
def attention(
    op: Body, x: ir.Value, weights: ir.Value, bias: Input, mask: Input, past: Input, added: Input
) -> Results:
    if op.given(6) is not None:
        raise Unwritable("its past_sequence_length says that past and present share a buffer")
    return attention_of(op, *projected(op, x, weights, bias), mask=mask, past=past, bias=added)


def projected(
    op: Body, x: ir.Value, weights: ir.Value, bias: ir.Value | None
) -> tuple[ir.Value, list[int]]:
    """Queries, keys and values side by side, and the size of each."""
    columns = dim(weights, 1) or dim(bias, 0)
    sizes = list(op.attr("qkv_hidden_sizes", ()) or ())
    if not sizes:
        sizes = [known(columns, "the size of its weights") // 3] * 3
    if len(sizes) != 3 or (columns is not None and sum(sizes) != columns):
        raise Unwritable("its qkv_hidden_sizes are not those of its weights")
    return op.plus(op.MatMul(x, weights), bias), sizes


@contrib(
    "MultiHeadAttention", whole=lambda node: True, lowered=lambda node: given(node, 8) is not None
)
def multi_head_attention(
    op: Body,
    query: ir.Value,
    key: Input,
    value: Input,
    bias: Input,
    mask: Input,
    added: Input,
    past_key: Input,
    past_value: Input,
    before: Input,
    beam_rows: Input,
) -> Results:
    if beam_rows is not None:
        raise Unwritable("its cache is that of a beam search")
    masked = mask is not None or added is not None
    if before is not None and (masked or op.wants(3)):
        raise Unwritable("its buffer is shared, and it has a mask or returns its scores")
    heads = op.count("num_heads")
    form = (rank(query), rank(key), rank(value))
    total = dim(bias, 0)
    parts: list[ir.Value | None] = [None, None, None]
    sizes = [_hidden_size(query, heads), _hidden_size(key, heads), _hidden_size(value, heads)]
    if form[0] == 5:
        sizes = [sizes[0]] * 3
    elif form[1] == 5:
        sizes[2] = sizes[1]
    if bias is not None:
        q_size = sizes[0] if sizes[0] is not None else sizes[1]
        if q_size is None and total is not None and sizes[2] is not None:
            q_size = (total - sizes[2]) // 2
        split_of = "the split of its bias among query, key and value"
        q_size, total = known(q_size, split_of), known(total, split_of)
        cut = [q_size, q_size, total - 2 * q_size]
        sizes = [s if s is not None else c for s, c in zip(sizes, cut, strict=True)]
        parts = list(op.Split(bias, [*cut], outputs=3, axis=0))
    if form[0] == 5:  # [B, L, N, 3, h]
        values = _unpacked(op, query, 3)
    elif form[1] == 5:  # [B, L, N, 2, h]
        values = [query, *_unpacked(op, key, 2)]
    elif key is None or value is None:
        raise Unwritable("its key or value is missing")
    else:
        values = [query, key, value]
    split = []
    for x, part, size in zip(values, parts, sizes, strict=True):
        if rank(x) == 4:  # [B, N, L, h], projected already
            split.append(x)
        elif rank(x) == 3:
            split.append(split_heads(op, op.plus(x, part), heads, size))
        else:
            raise Unwritable("the rank of query, key or value is not known")
    q, k, v = split
    new = None if _keys_match_queries(query, key) else op.Shape(k, start=2, end=3)
    seen = None
    if past_key is not None and past_value is not None and before is not None:
        k, v, seen = _in_buffer(op, (past_key, past_value), before, k, v)
    elif before is not None:
        raise Unwritable("its buffer is missing")
    elif past_key is not None and past_value is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    head = sizes[0] // heads if sizes[0] is not None else None
    width = op.Shape(value, start=2) if sizes[2] is None and rank(value) == 3 else sizes[2]
    read = v if seen is None else _seen_rows(op, v, seen)
    y, scores = attend(
        op, q, k, read, mask=mask, bias=added, new=new, head=head, width=width, seen=seen
    )  # fmt: skip
    return [y, k, v, scores]


def _in_buffer(
    op: Body, buffers: tuple[ir.Value, ir.Value], before: ir.Value, k: ir.Value, v: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The buffers with k and v behind the `before` tokens of before, and which key a query sees."""
    rows = op.Shape(k, start=2, end=3)
    place = op.Add(op.Reshape(op.Cast(before, to=ir.DataType.INT64), [1]), steps(op, rows))
    index = op.Expand(op.Reshape(place, [1, 1, -1, 1]), op.Shape(k))
    present_k, present_v = (
        op.ScatterElements(buffer, index, x, axis=2)
        for buffer, x in zip(buffers, (k, v), strict=True)
    )
    column = steps(op, op.Shape(present_k, start=2, end=3))
    last = place if op.attr("unidirectional", 0) else op.ReduceMax(place, keepdims=1)
    seen = op.LessOrEqual(column, op.Unsqueeze(last, [1]))
    return present_k, present_v, seen


def _seen_rows(op: Body, v: ir.Value, seen: ir.Value) -> ir.Value:
    """v with zeros where no query sees it: what stands there is of no meaning."""
    any_row = op.ReduceMax(op.Cast(seen, to=ir.DataType.INT32), [0], keepdims=0)
    rows = op.Cast(op.Unsqueeze(any_row, [1]), to=ir.DataType.BOOL)
    return op.Where(rows, v, op.number(0.0, v))


def _keys_match_queries(query: ir.Value, key: ir.Value | None) -> bool:
    if key is None or key is query:
        return True
    return rank(query) == rank(key) == 3 and same_size(query, 1, key, 1)


def _hidden_size(x: ir.Value | None, heads: int) -> int | None:
    size, head = rank(x), dim(x, -1)
    return head if head is None or size == 3 else heads * head


def _unpacked(op: Body, x: ir.Value | None, count: int) -> list[ir.Value]:
    """[B, L, N, count, h] as `count` of [B, L, N·h]."""
    assert x is not None
    width = None if dim(x, 2) is None or dim(x, 4) is None else (dim(x, 2) or 0) * (dim(x, 4) or 0)
    flat = []
    for part in op.Split(x, outputs=count, axis=3, num_outputs=count):
        y = op.Reshape(part, [0, 0, -1 if width is None else width])
        y.shape = ir.Shape([None, None, width])
        flat.append(y)
    return flat


# ---- rotary embedding ------------------------------------------------------------------------


def rotated(
    op: Body, x: ir.Value, cos: ir.Value, sin: ir.Value, half: int, *, interleaved: bool, head: int
) -> ir.Value:
    """x [..., h] turned by the angles of cos and sin [..., half] in its first 2·half columns."""
    rest: list[ir.Value] = []
    if 2 * half < head:
        x, last = op.Split(x, [2 * half, head - 2 * half], outputs=2, axis=-1)
        rest = [last]
    if interleaved:
        pairs = op.Reshape(x, [0, 0, 0, half, 2])
        a, b = (op.Squeeze(p, [4]) for p in op.Split(pairs, outputs=2, axis=4, num_outputs=2))
    else:
        a, b = op.Split(x, [half, half], outputs=2, axis=-1)
    left = op.formula("a * cos - b * sin", a=a, b=b, cos=cos, sin=sin)
    right = op.formula("b * cos + a * sin", a=a, b=b, cos=cos, sin=sin)
    if interleaved:
        joined = op.Concat(*(op.Unsqueeze(p, [4]) for p in (left, right)), axis=4)
        y = op.Reshape(joined, [0, 0, 0, 2 * half])
    else:
        y = op.Concat(left, right, axis=-1)
    return op.Concat(y, *rest, axis=-1) if rest else y


@contrib("RotaryEmbedding")
def rotary_embedding(
    op: Body, x: ir.Value, positions: ir.Value, cos: ir.Value, sin: ir.Value
) -> Results:
    if op.attr("is_packed_batching", 0) or op.attr("scale", 1.0) != 1.0:
        raise Unwritable("its ragged batches or its scale are not supported")
    half, size = known(dim(cos, 1), "the size of its angles"), known_rank(x, "the input")
    heads = op.attr("num_heads", 0)
    if size == 4 and dim(x, 3) is not None:
        head = dim(x, 3)
    elif op.attr("rotary_embedding_dim", 0):
        width = dim(x, 2) if size == 3 else None
        head = None if width is None or not heads else width // heads
    else:
        head = 2 * half
    head = known(head, "the size of its heads")
    if known_rank(positions, "position_ids") == 1:
        rows = op.Shape(x, start=2, end=3) if size == 4 else op.Shape(x, start=1, end=2)
        positions = op.Unsqueeze(op.Add(steps(op, rows), positions), [0])
    axis = op.constant([1 if size == 4 else 2])
    angles = [op.Unsqueeze(op.Gather(table, positions), axis) for table in (cos, sin)]
    rows = x
    if size == 3:  # a -1 beside sizes of 0 has no value
        count = op.Div(op.Shape(x, start=2, end=3), [head])
        rows = op.Reshape(x, op.vector([0, 0, count, head]))
    pairs = bool(op.attr("interleaved", 0))
    y = rotated(op, rows, angles[0], angles[1], half, interleaved=pairs, head=head)
    if size == 3:
        y = op.Reshape(y, op.Shape(x), allowzero=1)
    return y

"""RemovePadding, RestorePadding and packed attention: rows of tokens without those of the padding.

B batch, S sequence, T tokens; a sequence has its tokens in the first of its S places. Attention is
that of the rows with their padding, whose keys are hidden.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from onnx_fuse.importer.contrib.attention import attend, projected, split_heads, steps
from onnx_fuse.importer.contrib.table import (
    Body,
    Results,
    contrib,
    known,
    known_rank,
)
from onnx_fuse.ir.build import dim


def int64(op: Body, x: ir.Value) -> ir.Value:
    return op.Cast(x, to=ir.DataType.INT64)


def _there(op: Body, counts: ir.Value, length: ir.Value) -> ir.Value:
    """bool [B, S]: whether a place is one of a sequence's first `counts` [B]."""
    return op.Less(steps(op, length), op.Unsqueeze(counts, [1]))


def _flat(op: Body, x: ir.Value) -> ir.Value:
    """[B, S, H] as [B · S, H]."""
    shape = op.Shape(x)
    rows = op.ReduceProd(op.Slice(shape, [0], [2], [0]), keepdims=1)
    return op.Reshape(x, op.Concat(rows, op.Shape(x, start=2), axis=0), allowzero=1)


def _tokens(op: Body, x: ir.Value, offset: ir.Value) -> ir.Value:
    """int64 [T]: the places of the rows of `x` [T, H], with which `offset` [B, S] begins."""
    places = op.Reshape(int64(op, offset), [-1])
    return op.Slice(places, [0], op.Shape(x, start=0, end=1), [0])


def _restored(op: Body, x: ir.Value, offset: ir.Value) -> ir.Value:
    """Rows [T, H] as [B, S, H], zeros at the padding."""
    size = op.Shape(x, start=1)
    rows = op.ReduceProd(op.Shape(offset), keepdims=1)
    nothing = op.Expand(op.number(0.0, x), op.Concat(rows, size, axis=0))
    whole = op.ScatterND(nothing, op.Unsqueeze(_tokens(op, x, offset), [1]), x)
    return op.Reshape(whole, op.Concat(op.Shape(offset), size, axis=0), allowzero=1)


@contrib("RemovePadding")
def remove_padding(op: Body, x: ir.Value, counts: ir.Value) -> Results:
    counts = int64(op, counts)
    there = op.Reshape(_there(op, counts, op.Shape(x, start=1, end=2)), [-1])
    tokens, padding = (op.Squeeze(op.NonZero(v), [0]) for v in (there, op.Not(there)))
    shape = op.Shape(x, start=0, end=2)
    offset = op.Reshape(op.Concat(tokens, padding, axis=0), shape, allowzero=1)
    starts = op.Concat(op.constant([0]), op.CumSum(counts, op.constant([0])), axis=0)
    numbers = (offset, starts, op.ReduceMax(counts, keepdims=1))
    more = (op.Cast(v, to=ir.DataType.INT32) for v in numbers)
    return [op.Gather(_flat(op, x), tokens, axis=0), *more]


@contrib("RestorePadding")
def restore_padding(op: Body, x: ir.Value, offset: ir.Value) -> Results:
    return _restored(op, x, offset)


Packed = tuple[list[ir.Value], list[int], ir.Value, ir.Value, ir.Value | None]
"""Queries, keys and values [T, .], the size of each, where tokens stand among the rows with their
padding [B, S], where sequences begin and end [B + 1], and what is added to scores, [B, N, S, S]."""


def packed_parts(op: Body) -> Packed:
    """What a node of packed attention attends with. Raises Unwritable."""
    if op.call.op_type == "PackedAttention":
        qkv, sizes = projected(op, op.needed(0), op.needed(1), op.given(2))
        parts = op.Split(qkv, sizes, outputs=3, axis=-1)
        return [*parts], sizes, op.needed(3), op.needed(4), op.given(5)
    query, bias = op.needed(0), op.given(3)
    ends = op.needed(4), op.needed(5), op.given(6)
    if known_rank(query, "its query") == 4:  # [T, N, 3, h]
        sizes = [known(dim(query, 3), "the size of its heads") * op.count("num_heads")] * 3
        joined = op.Split(query, outputs=3, axis=2, num_outputs=3)
        parts = [op.Reshape(part, [0, size]) for part, size in zip(joined, sizes, strict=True)]
    else:
        parts = [query, op.needed(1), op.needed(2)]
        sizes = [known(dim(part, 1), "the size of its rows") for part in parts]
    if bias is not None:
        cut = op.Split(bias, sizes, outputs=3, axis=0)
        parts = [op.Add(part, b) for part, b in zip(parts, cut, strict=True)]
    return parts, sizes, *ends


@contrib("PackedAttention", "PackedMultiHeadAttention")
def packed_attention(op: Body) -> Results:
    heads = op.count("num_heads")
    parts, sizes, offset, starts, added = packed_parts(op)
    starts = int64(op, starts)
    last = op.constant([2**31])
    counts = op.Sub(op.Slice(starts, [1], last, [0]), op.Slice(starts, [0], [-1], [0]))
    there = op.Unsqueeze(_there(op, counts, op.Shape(offset, start=1)), [1, 2])
    zero = op.number(0.0, parts[0]) if added is None else added
    hidden = op.Where(there, zero, op.number(-math.inf, parts[0]))
    q, k, v = (
        split_heads(op, _restored(op, part, offset), heads, size)
        for part, size in zip(parts, sizes, strict=True)
    )
    head = sizes[0] // heads
    y, _ = attend(op, q, k, v, mask=None, bias=hidden, new=None, head=head, width=sizes[2])
    return op.Gather(_flat(op, y), _tokens(op, parts[0], offset), axis=0)

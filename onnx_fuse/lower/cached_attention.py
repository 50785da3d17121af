"""Caches of keys and values, and attention of contrib operators over one.

B batch, S new tokens, T places of the cache, H heads of queries, K heads of keys, D numbers a head.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import Code
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.lower.context import Context, Lowering, Unserved, apply, emit
from onnx_fuse.lower.quant import to_float
from onnx_fuse.lower.sdpa import aligned
from onnx_fuse.ops.fused.caches import CACHES, NORM_ROTATED, PLAIN, growing
from onnx_fuse.ops.fused.sdpa.kinds import KINDS
from onnx_fuse.program.call import NoRoom, Tensor, dtype_of
from onnx_fuse.program.contractions import Attention
from onnx_fuse.program.data_movement import CacheAppend
from onnx_fuse.program.size import number

_REFUSED = {10: "an added bias", 14: "a norm of q", 15: "a norm of k", 16: "lengths of queries"}
_FLAGS = ("sliding_window_cache", "qk_output")


def _hold_plain(ctx: Context, node: ir.Node) -> None:
    """Raise Unserved for a node of which the kernels do not take all."""
    reasons = [reason for i, reason in _REFUSED.items() if ctx.has(node, i)]
    reasons += [name for name in _FLAGS if ctx.attr(node, name, 0) not in (0, -1)]
    reasons += ["keys after its queries"] if not ctx.attr(node, "causal", 1) else []
    reasons += ["half a cache"] if ctx.has(node, 3) != ctx.has(node, 4) else []
    if reasons:
        raise Unserved("no-kernel", what=reasons[0])


_STEPS = ("key_step", "value_step")


def _steps(ctx: Context, node: ir.Node, kv_heads: int, size: int) -> dict[str, Tensor]:
    """What a number of a quantized cache stands for [K, D]; nothing where it is not quantized."""
    kinds = [ctx.attr(node, f"{x}_quant_type", "NONE") for x in "kv"]
    if kinds == ["NONE", "NONE"]:
        return {}
    stored = {ctx.view(node, i).dtype for i in (3, 4) if ctx.has(node, i)}
    if stored not in ({"int8"}, {"float8_e4m3fn"}) or ctx.attr(node, "kv_cache_bit_width", 8) == 4:
        raise Unserved("no-kernel", what="a cache in other codes than int8 and float8e4m3fn")
    steps = {}
    for name, kind, i in zip(_STEPS, kinds, (12, 13), strict=True):
        one, scale = kind == "PER_TENSOR", ctx.dense(node, i)
        if scale.size != (1 if one else kv_heads * size) or scale.dtype != "float32":
            raise Unserved("misfit", what="its scales", to="its cache")
        each = scale.view((1, 1) if one else (kv_heads, size)).expand((kv_heads, size))
        steps[name] = ctx.contiguous(each)
    return steps


def _split(ctx: Context, node: ir.Node, heads: int, kv_heads: int) -> list[Tensor]:
    """Queries, keys and values as [B, heads, S, D], also where they stand in one tensor."""
    q = ctx.view(node, 0)
    counts = (heads, kv_heads, kv_heads)
    if ctx.has(node, 1):
        parts = [q, ctx.view(node, 1), ctx.view(node, 2)]
    else:
        size = q.shape[2] // sum(counts)
        starts = (0, heads * size, (heads + kv_heads) * size)
        parts = [q.part(2, at, n * size) for at, n in zip(starts, counts, strict=True)]
    return [
        aligned(ctx, part.view((*part.shape[:2], n, part.shape[2] // n)).permute((0, 2, 1, 3)))
        for part, n in zip(parts, counts, strict=True)
    ]


def group_query_attention(ctx: Context, node: ir.Node) -> None:
    """The new rows go into the cache, rotated; then attention reads the cache where it stands."""
    _hold_plain(ctx, node)
    total = number(ctx.given(node, 6, "its total_sequence_length").reshape(-1)[0])
    if len(ctx.view(node, 0).shape) != 3:
        raise Unserved("no-kernel", what="queries other than [B, S, heads]")
    q, k, v = _split(ctx, node, ctx.attr(node, "num_heads"), ctx.attr(node, "kv_num_heads"))
    rows, size = q.shape[2:]
    pasts = [ctx.dense(node, i) for i in (3, 4) if ctx.has(node, i)]
    room = pasts[0].shape[2] if pasts else 0
    places = total if total > room else room  # whichever it is, nothing else depends on the other
    reads = {"q": q, "k": k, "v": v, "lengths": ctx.dense(node, 5)}
    reads |= dict(zip(("past_key", "past_value"), pasts, strict=False))
    more: dict[str, Any] = {}
    if ctx.attr(node, "do_rotary", 0):
        reads |= {"cos": ctx.dense(node, 7), "sin": ctx.dense(node, 8)}
        context, half = reads["cos"].shape
        interleaved = bool(ctx.attr(node, "rotary_interleaved", 0))
        more = {"half": half, "interleaved": interleaved, "context": context}
        if ctx.has(node, 9):
            reads["positions"] = ctx.dense(node, 9)
            more["positions"] = "first" if total == rows else "each"
        if 2 * half > size or (interleaved and size % 2) or not context:
            raise Unserved("misfit", what="its angles", to="its heads")
    reads |= _steps(ctx, node, k.shape[1], size)
    _through_cache(ctx, node, reads, places, _sink(ctx, node, q.shape[1], q.dtype), **more)


_PAIRS = (("present_key", "past_key"), ("present_value", "past_value"))


def _through_cache(
    ctx: Context,
    node: ir.Node,
    reads: dict[str, Tensor],
    places: int,
    sink: dict[str, Tensor],
    **more: Any,
) -> None:
    """The operands of a CacheAppend, appended and attended to; outputs 1 and 2 are the presents."""
    q, k, v, lengths = (reads[name] for name in ("q", "k", "v", "lengths"))
    (batch, heads, rows, size), kv_heads = q.shape, k.shape[1]
    pasts = [reads[name] for _, name in _PAIRS if name in reads]
    shapes = [(batch, kv_heads, t.shape[2] if t in pasts else rows, size) for t in (k, v, *pasts)]
    fits = [t.shape == shape for t, shape in zip((k, v, *pasts), shapes, strict=True)]
    steps = {name: reads[name] for name in _STEPS if name in reads}
    others = {"lengths", "positions", *steps, *(("past_key", "past_value") if steps else ())}
    numbers = {t.dtype for name, t in reads.items() if name not in others}
    each = more.get("positions") == "each" and reads["positions"].size != batch * rows
    if not all(fits) or len(numbers) > 1 or lengths.size != batch or each:
        raise Unserved("misfit", what="the sizes or types of its operands", to="each other")
    if heads % kv_heads or not batch * rows * places:
        raise Unserved("no-kernel", what="heads that do not fit, or no element")
    dtype, cache = q.dtype, (batch, kv_heads, places, size)
    stored = pasts[0].dtype if steps else dtype
    named = [i < len(node.outputs) for i in (1, 2)]
    presents = [
        ctx.output(node, i, cache, stored) if there else ctx.scratch(stored, cache)
        for i, there in enumerate(named, 1)
    ]
    writes = dict(zip((name for name, _ in _PAIRS), presents, strict=True))
    append = CacheAppend(
        batch=batch, rows=rows, heads=heads if "half" in more else 0, kv_heads=kv_heads, size=size,
        length=places, past=pasts[0].shape[2] if pasts else 0, dtype=dtype,
        q_strides=q.strides[:3], k_strides=k.strides[:3], v_strides=v.strides[:3],
        cache=stored if steps else "", **more,
    )  # fmt: skip
    if "half" in more:
        q = writes["turned"] = ctx.scratch(dtype, (batch, heads, rows, size))
    inplace = _PAIRS if pasts and pasts[0].shape[2] == places else ()
    ctx.select(node, append, reads, writes, inplace=inplace)
    _attend(ctx, node, {"q": q, "k": presents[0], "v": presents[1]}, lengths, steps, sink)


def shared_buffer(ctx: Context, node: ir.Node) -> None:
    """One new token of each sequence over a buffer that is as full for all of them."""
    first = 6 if node.op_type == "MultiHeadAttention" else 5
    past = (first, first + 1, first + 2)
    if not all(ctx.has(node, i) for i in past):
        raise Unserved("no-kernel", what="a past without buffers and their length")
    if any(ctx.has(node, i) for i in range(3, len(node.inputs)) if i not in past):
        raise Unserved("no-kernel", what="a bias, a mask or the cache of a beam search")
    heads, shapes = ctx.attr(node, "num_heads"), [ctx.view(node, i).shape for i in range(3)]
    if any(len(shape) != 3 or shape[1] != 1 for shape in shapes):
        raise Unserved("no-kernel", what="several new tokens, or heads apart")
    if any(shape[2] % heads for shape in shapes) or ctx.view(node, past[2]).size != 1:
        raise Unserved("no-kernel", what="heads that do not fit, or several lengths")
    reads = dict(zip("qkv", _split(ctx, node, heads, heads), strict=True))
    reads |= {name: ctx.dense(node, i) for (_, name), i in zip(_PAIRS, past, strict=False)}
    (batch, _, rows, size), places = reads["q"].shape, reads["past_key"].shape[2]
    one = Attention(rows, places, size, (batch, heads), reads["q"].dtype, size, lengths=True)
    one = replace(one, q_strides=reads["q"].strides[:3])
    if not ctx.serves(one):
        raise Unserved("no-kernel", what="a NaN after its tokens")
    reads["lengths"] = ctx.contiguous(ctx.view(node, past[2]).view((1,)).expand((batch,)))
    _through_cache(ctx, node, reads, places, {}, keep=True)


def _sink(ctx: Context, node: ir.Node, heads: int, dtype: str) -> dict[str, Tensor]:
    """The logit that each head has beside those of its keys; nothing where there is none."""
    if not ctx.has(node, 11):
        smooth = ctx.attr(node, "smooth_softmax", 0) == 1
        return {"sink": ctx.constant(np.zeros(heads, dtype_of(dtype)))} if smooth else {}
    sink = ctx.dense(node, 11)
    if (sink.size, sink.dtype) != (heads, dtype):
        raise Unserved("misfit", what="its sinks", to="its heads")
    return {"sink": sink}


def _dequantized(ctx: Context, node: ir.Node, cache: Tensor, step: Tensor, dtype: str) -> Tensor:
    """The numbers that a cache [B, K, T, D] stands for."""
    heads, size = step.shape
    code, numbers = Code(), ctx.scratch(dtype, cache.shape)
    factor = code.load(step.view((1, heads, 1, size)).expand(cache.shape))
    emit(ctx, code, node, to_float(code, code.load(cache), dtype, None, factor), numbers)
    return numbers


def _attend(
    ctx: Context,
    node: ir.Node,
    reads: dict[str, Tensor],
    lengths: Tensor,
    steps: dict[str, Tensor],
    sink: dict[str, Tensor],
) -> None:
    """Attention of q [B, H, S, D] over the cache; y is [B, S, H D].

    One new token reads a quantized cache as it is; several read its numbers, once for all of them.
    """
    q, key, value = reads.values()
    batch, heads, rows, size = q.shape
    y = ctx.output(node, 0, (batch, rows, heads * size), q.dtype)
    split = y.view((batch, rows, heads, size)).permute((0, 2, 1, 3))
    scale = ctx.attr(node, "scale", 0.0) or float(size) ** -0.5
    cap, window = ctx.attr(node, "softcap", 0.0), ctx.attr(node, "local_window_size", -1)
    problem = Attention(
        m=rows, n=key.shape[2], k=size, batch=(batch, heads), dtype=q.dtype, dv=size,
        group=heads // key.shape[1], scale=scale / cap if cap else scale, softcap=cap,
        q_strides=q.strides[:3], k_strides=key.strides[:3], v_strides=value.strides[:3],
        y_strides=() if split.dense else split.strides[:3],
    )  # fmt: skip
    behind = (window - 1, 0) if window > 0 else ()
    reads |= sink
    own = replace(problem, lengths=True, window=behind, guard=int(rows > 1), sink=bool(sink))
    if steps:
        quantized = replace(own, cache=key.dtype)
        if ctx.serves(quantized):
            return ctx.select(node, quantized, reads | steps | {"lengths": lengths}, {"y": split})
        for name, step in zip("kv", steps.values(), strict=True):
            reads[name] = _dequantized(ctx, node, reads[name], step, q.dtype)
    if ctx.serves(own):
        return ctx.select(node, own, reads | {"lengths": lengths}, {"y": split})
    if sink:
        raise Unserved("no-kernel", what="a sink and so many new tokens")
    mask = _mask(ctx, node, lengths, rows, key.shape[2], window, q.dtype)
    reads["mask"] = mask.expand((batch, heads, rows, key.shape[2]))
    problem = replace(problem, mask=reads["mask"].strides, guard=1)
    ctx.select(node, problem, reads, {"y": split})


def _counted(ctx: Context, node: ir.Node, n: int) -> Tensor:
    """0, 1, ... as int64 [n]."""
    counted = ctx.scratch("int64", (n,))
    apply(ctx, node, counted, "Iota")
    return counted


def _mask(
    ctx: Context, node: ir.Node, lengths: Tensor, rows: int, places: int, window: int, dtype: str
) -> Tensor:
    """[B, 1, S, T]: 0 for keys up to a query's own place, in its window, else -inf.

    A query of padding may see no key: its result is 0.
    """
    batch = lengths.size
    shape, code = (batch, 1, rows, places), Code()
    column = code.load(_counted(ctx, node, places).expand(shape))
    row = code.load(_counted(ctx, node, rows).view((rows, 1)).expand(shape))
    last = code.load(lengths.view((batch, 1, 1, 1)).expand(shape))
    last = code.step("Cast", "int64", last)
    start = code.step("Sub", "int64", last, code.scalar(rows - 1, "int64"))
    start = code.step("Max", "int64", start, code.scalar(0, "int64"))
    place = code.step("Add", "int64", start, row)
    seen = code.step("And", "bool", code.step("LessOrEqual", "bool", column, place),
                     code.step("LessOrEqual", "bool", column, last))  # fmt: skip
    if window > 0:
        first = code.step("Sub", "int64", place, code.scalar(window, "int64"))
        seen = code.step("And", "bool", seen, code.step("Less", "bool", first, column))
    low = code.scalar(-inf, dtype)
    mask = ctx.scratch(dtype, shape)
    emit(ctx, code, node, code.step("Where", dtype, seen, code.scalar(0, dtype), low), mask)
    return mask


def cache_update(ctx: Context, node: ir.Node) -> None:
    """New rows behind the past or at their places, rotated where the node has tables."""
    how, placed = next(key for key, name in CACHES.items() if name == node.op_type)
    try:
        _updated(ctx, node, how, placed)
    except Unserved as error:
        raise NoRoom(str(error)) if ctx.in_rooms and not placed else error from None


def _updated(ctx: Context, node: ir.Node, how: str, placed: bool) -> None:
    rotated = how != PLAIN
    names = ("q", "k", "v") if rotated else ("k", "v")
    reads = {name: aligned(ctx, ctx.view(node, i)) for i, name in enumerate(names)}
    pasts = [ctx.dense(node, len(names) + i) for i in range(2)]
    reads |= dict(zip(("past_key", "past_value"), pasts, strict=True))
    k, q = reads["k"], reads.get("q", reads["k"])
    (batch, kv_heads, rows, size), past = k.shape, pasts[0].shape[2]
    shapes = [(batch, kv_heads, n, size) for n in (rows, rows, past, past)]
    if [t.shape for t in (k, reads["v"], *pasts)] != shapes:
        raise Unserved("misfit", what="its keys", to="its values")
    if (q.shape[0], *q.shape[2:]) != (batch, rows, size) or not batch * rows * size:
        raise Unserved("no-kernel", what="queries that are not those of its keys, or no element")
    more: dict[str, Any] = {"uniform": not placed}
    roomy = ctx.in_rooms and not placed
    if roomy:
        _check_room(node, len(names), rows)
        reads["lengths"] = ctx.tokens_before(batch)
        more = {"keep": True}
    if rotated:
        try:
            views = [ctx.view(node, i) for i in (5, 6)]
            width = views[0].shape[-1]
            tables = [view.expand((batch, 1, rows, width)) for view in views]
        except ValueError:
            raise Unserved("misfit", what="its tables", to="its heads") from None
        reads |= dict(zip(("cos", "sin"), map(ctx.contiguous, tables), strict=True))
        more |= {"heads": q.shape[1], "half": width // 2, "context": batch * rows}
        more |= {"positions": "rows", "columns": True}
    if how == NORM_ROTATED:
        scales = [ctx.dense(node, i) for i in (7, 8)]
        reads |= dict(zip(("q_scale", "k_scale"), scales, strict=True))
        more |= {"normed": True, "epsilon": ctx.attr(node, "epsilon", 1e-5)}
    if placed:
        places = ctx.view(node, len(node.inputs) - 1)
        shared = places.shape[0] == 1
        places = places.expand((1 if shared else batch, 1, rows, 1))
        reads["positions"] = ctx.contiguous(places)
        more |= {"placed": "all" if shared else "each", "keep": True}
    writes = {"turned": ctx.output(node, 0, q.shape, q.dtype)} if rotated else {}
    length, dtype = past if placed or roomy else past + rows, k.dtype
    for i, name in enumerate(("present_key", "present_value"), rotated):
        writes[name] = ctx.output(node, i, (batch, kv_heads, length, size), dtype)
    append = CacheAppend(
        batch=batch, rows=rows, kv_heads=kv_heads, size=size, length=length, past=past,
        dtype=dtype, q_strides=q.strides[:3], k_strides=k.strides[:3],
        v_strides=reads["v"].strides[:3], **{"heads": 0, **more},
    )  # fmt: skip
    if roomy:
        ctx.rooms |= {t.buffer for t in (*pasts, *(writes[present] for present, _ in _PAIRS))}
    ctx.select(node, append, reads, writes, inplace=_PAIRS if placed or roomy else ())


def _check_room(node: ir.Node, first: int, rows: int) -> None:
    """Raise NoRoom where something else than attention over one new token sees past or present.

    Its past is an input of the program and its present a result, or there would be no room.
    """
    if rows != 1:
        raise NoRoom(f"{rows} new tokens")
    pasts, presents = node.inputs[first : first + 2], node.outputs[-2:]
    if not all(v is not None and v.is_graph_input() and len(v.uses()) == 1 for v in pasts):
        raise NoRoom("its past is no input that only it reads")
    values = list(presents)
    for value in values:
        for reader in (use.node for use in value.uses()):
            if reader.op_type == "Cast":
                values.append(reader.outputs[0])
            elif reader.op_type not in KINDS:
                raise NoRoom(f"{reader.op_type} reads its present")
    if not all(v.is_graph_output() for v in presents):
        raise NoRoom("its present is no result")


def checked_rooms(ctx: Context, graph: ir.Graph) -> Tensor:
    """The input LENGTHS of a graph whose caches all stand in rooms.

    Raises NoRoom where one does not, or a call sees what is behind the tokens.
    """
    for call in ctx.calls:
        fits = isinstance(call.problem, CacheAppend) or getattr(call.problem, "lengths", False)
        if not fits and any(t.buffer in ctx.rooms for _, t in call.reads):
            raise NoRoom(f"{call.kernel} reads all of it")
    ends = [ctx.slots[value].tensor for pair in growing(graph) for value in pair]
    if ctx.lengths is None or any(t is None or t.buffer not in ctx.rooms for t in ends):
        raise NoRoom("a cache is empty, or none grows")
    return ctx.lengths


LOWERINGS: dict[tuple[str, str], Lowering] = {
    **{(FUSE, name): cache_update for name in CACHES.values()},
    ("com.microsoft", "GroupQueryAttention"): group_query_attention,
    ("com.microsoft", "MultiHeadAttention"): shared_buffer,
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): shared_buffer,
}

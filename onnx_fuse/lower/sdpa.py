"""The attention operators of `ops.fused.sdpa` and their gradients, as problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from onnx_fuse.cuda.pointwise import Code, cast_step
from onnx_fuse.ir.build import required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.kernels import forced
from onnx_fuse.kernels.costs import Passes, products, total
from onnx_fuse.lower.context import Context, Lowering, Unserved, emit
from onnx_fuse.lower.quant import codes
from onnx_fuse.ops.fused.sdpa.kinds import FLOOR, KINDS
from onnx_fuse.ops.fused.sdpa.mask_analysis import CAUSAL, WINDOW
from onnx_fuse.program.call import NoRoom, Tensor
from onnx_fuse.program.contractions import Attention, AttentionGrad
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.program.size import OpenSize, broadcast

A = TypeVar("A", bound=Attention)
SCORES = 1 << 30
"""Bytes of scores in memory that speed may cost."""
MARGIN = 1.3
"""Products of k = 64 took up to 1.4 times as long together as predicted (H200, 2026-11)."""


def _rows(ctx: Context, node: ir.Node, i: int) -> Tensor:
    """Input `i` [B, H, S, D] with contiguous, aligned rows: heads split by a view stay one."""
    return aligned(ctx, ctx.view(node, i))


def aligned(ctx: Context, x: Tensor) -> Tensor:
    """x [B, H, S, D], copied where its rows are not contiguous pieces of 16 bytes."""
    size = ITEMSIZE[x.dtype]
    pieces = x.offset * size % 16 == 0 and all(s * size % 16 == 0 for s in x.strides[:3])
    return x if x.strides[3] == 1 and pieces else ctx.contiguous(x)


def _fitted(ctx: Context, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H, S, D], keys and values [B, Hkv, T, .], copied where a product would broadcast
    their batches or heads; H is a multiple of Hkv. Raises Unserved where they do not fit together.
    """
    if k.shape[3] != q.shape[3] or v.shape[2] != k.shape[2]:
        raise Unserved("broadcast-heads")
    try:
        (batch,) = broadcast(q.shape[:1], k.shape[:1], v.shape[:1])
        (shared,) = broadcast(k.shape[1:2], v.shape[1:2])
        heads = q.shape[1]
        if not shared or heads % shared:  # heads of keys to which one of queries is broadcast
            (heads,) = broadcast((heads,), (shared,))
    except ValueError:
        raise Unserved("broadcast-heads") from None
    leading = ((batch, heads), (batch, shared), (batch, shared))
    fitted = [
        t if t.shape[:2] == lead else ctx.contiguous(t.expand((*lead, *t.shape[2:])))
        for t, lead in zip((q, k, v), leading, strict=True)
    ]
    return fitted[0], fitted[1], fitted[2]


def _output(ctx: Context, node: ir.Node, i: int, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Output `i` [B, H, S, D]; in memory [B, S, H, D] where what reads it merges the heads."""
    readers = [use.node for use in node.outputs[i].uses()]
    if not any(r.op_type == "Transpose" and ctx.attr(r, "perm") == [0, 2, 1, 3] for r in readers):
        return ctx.output(node, i, shape, dtype)
    batch, heads, rows, width = shape
    y = ctx.output(node, i, (batch, rows, heads, width), dtype).permute((0, 2, 1, 3))
    ctx.alias(node, i, y)
    return y


@dataclass(frozen=True)
class _Masks:
    """The masks of a node: tensors to read, and the fields that they set in the problem."""

    reads: dict[str, Tensor] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


def _problem(
    ctx: Context, node: ir.Node, of: type[A], q: Tensor, k: Tensor, v: Tensor, masks: _Masks,
    **results: Tensor,
) -> A:  # fmt: skip
    kind = KINDS.get(FusedName.of(node.op_type).kind)
    batch, heads, queries, width = q.shape
    scale = ctx.attr(node, "scale", width**-0.5 if kind is None else 1.0)
    more: dict[str, Any] = {"causal": bool(ctx.attr(node, "is_causal", 0))}
    if kind is not None:
        more = {"causal": kind.causal, "guard": ("", "Guard", "NanGuard").index(kind.guard)}
        more |= {"softcap": float(ctx.attr(node, "softcap", 1.0))} if kind.softcap else {}
        more |= {"lowest": float(ctx.attr(node, FLOOR, 0.0))} if kind.added else {}
    lie = {f"{n}_strides": t.strides[:3] for n, t in results.items() if not t.dense}
    fields: dict[str, Any] = {
        "m": queries, "n": k.shape[2], "k": width, "batch": (batch, heads), "dtype": q.dtype,
        "dv": v.shape[3], "group": heads // k.shape[1], "scale": float(scale),
        "q_strides": q.strides[:3], "k_strides": k.strides[:3], "v_strides": v.strides[:3],
    } | more | masks.fields | lie  # fmt: skip
    if "packed" in fields:
        fields |= {name: (0, *by[1:]) for name, by in fields.items() if "strides" in name}
    return of(**fields)


def _window(left: int, right: int, queries: int, keys: int) -> dict[str, Any] | None:
    """The fields of a window; None where a query may see no key through it.

    A window that reaches back over all keys is causal.
    """
    closed = not (isinstance(queries, OpenSize) or isinstance(keys, OpenSize))
    if left >= 0 and queries is not keys and not (closed and queries - left <= keys):
        return None
    if right == 0 and (left < 0 or keys <= left + 1):
        return {"causal": True}
    return {"window": (left, right)}


def _masks(
    ctx: Context, node: ir.Node, first: int, q: Tensor, k: Tensor, *, windows: bool = True
) -> _Masks:
    """The masks from input `first` on, seen as [B, H, S, T].

    Without `windows`, a mask is read that hides what is outside of a window.
    """
    kind = KINDS[FusedName.of(node.op_type).kind]
    masks, at, shape = _Masks(), first, (*q.shape[:3], k.shape[2])
    if kind.packed:
        masks.reads["offsets"] = offsets = ctx.dense(node, first)
        longest = ctx.view(node, first + 1).shape[-1]
        masks.fields.update(m=longest, n=longest, batch=(offsets.shape[0], q.shape[1]))
        masks.fields["packed"] = q.shape[2]
        at, shape = first + 2, (offsets.shape[0] - 1, q.shape[1], longest, longest)
    for number, step in enumerate(kind.steps, 1):
        tensor = ctx.view(node, at)
        proved = ctx.attr(node, CAUSAL, 0)
        behind = shape[4 - len(tensor.shape) :] if len(tensor.shape) <= 4 else ()
        larger = len(behind) != len(tensor.shape) or any(
            n not in (1, m) for n, m in zip(tensor.shape, behind, strict=True)
        )
        if number == abs(proved) and tensor.shape[-2:] == shape[-2:] and not larger:
            left, right = ctx.attr(node, WINDOW, (-1, 0))
            seen = _window(left, right, q.shape[2], k.shape[2])
            if seen is not None and (windows or "causal" in seen):
                masks.fields.update(seen)
                if proved > 0:
                    break  # it is the last one
        name = ("mask", "mask2")[number - 1]
        if step == "Where":
            fill = ctx.host(node, at + 1)
            if fill is None or np.isnan(fill).any():
                raise Unserved("no-kernel", what="a fill that is not known")
            suffix = name.removeprefix("mask")
            masks.fields[f"keep{suffix}"] = True
            masks.fields[f"fill{suffix}"] = float(fill.reshape(()))
            tensor = _as_numbers(ctx, node, tensor, q.dtype)
        at += 2 if step == "Where" else 1
        if larger:
            raise Unserved("mask-grows")
        if tensor.offset * ITEMSIZE[tensor.dtype] % 16:
            tensor = ctx.contiguous(tensor)
        masks.reads[name] = tensor.expand(shape)
        masks.fields[name] = masks.reads[name].strides
    return masks


def _windowed(
    ctx: Context, node: ir.Node, of: type[A], q: Tensor, k: Tensor, v: Tensor, masks: _Masks,
    first: int, **results: Tensor,
) -> tuple[A, _Masks]:  # fmt: skip
    """The problem and its masks, which hide what is outside of a window that no kernel knows."""
    problem = _problem(ctx, node, of, q, k, v, masks, **results)
    if problem.window and not ctx.serves(problem):
        masks = _masks(ctx, node, first, q, k, windows=False)
        problem = _problem(ctx, node, of, q, k, v, masks, **results)
    return problem, masks


def _as_numbers(ctx: Context, node: ir.Node, keep: Tensor, dtype: str) -> Tensor:
    """1 where `keep` is True, else 0: kernels take all masks in the type of q."""
    if (values := ctx.known(keep)) is not None:
        return ctx.constant(values.astype(dtype))
    code, numbers = Code(), ctx.scratch(dtype, keep.shape)
    emit(ctx, code, node, code.step(cast_step(dtype), dtype, code.load(keep)), numbers)
    return numbers


def sdpa(ctx: Context, node: ir.Node) -> None:
    """y = softmax(z) v with z from scale q kᵀ, the S x T matrix never in memory."""
    exposed = FusedName.of(node.op_type).exposed
    if exposed not in ((), ("lse",)):
        raise Unserved("results", names=", ".join(exposed))
    if len(ctx.view(node, 0).shape) != 4:
        raise Unserved("no-kernel", what="operands other than [B, H, S, D]")
    q, k, v = _fitted(ctx, *(_rows(ctx, node, i) for i in range(3)))
    masks = _masks(ctx, node, 3, q, k)
    y = _output(ctx, node, 0, (*q.shape[:3], v.shape[3]), q.dtype)
    writes = {"y": y}
    if exposed:
        writes["lse"] = ctx.output(node, 1, (*q.shape[:3], 2), "float32")
    if not prod(y.shape) or not k.shape[2]:
        raise Unserved("empty")
    problem, masks = _windowed(ctx, node, Attention, q, k, v, masks, 3, y=y)
    reads = {"q": q, "k": k, "v": v} | masks.reads
    if (quantized := _quantized(ctx, node, problem, reads)) is not None:
        return ctx.select(node, *quantized, writes)
    if k.buffer in ctx.rooms and ctx.lengths is not None:
        if problem.mask or problem.causal or problem.window:
            raise NoRoom("attention over it has a mask")
        problem, reads = replace(problem, lengths=True), reads | {"lengths": ctx.lengths}
        try:
            return ctx.select(node, problem, reads, writes)
        except Unserved as error:
            raise NoRoom(str(error)) from None
    if _apart_pays(ctx, problem, 2 * len(exposed)):
        raise Unserved("faster", by="")
    ctx.select(node, problem, reads, writes)


def _quantized(
    ctx: Context, node: ir.Node, problem: Attention, reads: dict[str, Tensor]
) -> tuple[Attention, dict[str, Tensor]] | None:
    """The problem over int8 keys and values that two DequantizeLinear read, where a kernel serves.

    Their scales are known, one for each head or column at most, and no number is too large for q's
    type; their zero points are 0.
    """
    shape, new = (reads["k"].shape[1], problem.k), dict(reads)
    for i, name in enumerate("kv", 1):
        held = codes(ctx, node, i)
        if held is None or held.q.dtype != "int8" or held.floats != reads[name]:
            return None
        axes = {None: (1, 1), 1: (-1, 1), 3: (1, -1)}.get(held.axis)
        limit = (65504.0 if problem.dtype == "float16" else 3.3e38) / 128
        if axes is None or held.zero.any() or not (np.abs(held.scale) <= limit).all():
            return None
        step = np.broadcast_to(held.scale.reshape(axes), shape)
        new |= {name: aligned(ctx, held.q), ("key_step", "value_step")[i - 1]: ctx.constant(step)}
    k_strides, v_strides = (new[name].strides[:3] for name in "kv")
    problem = replace(problem, cache="int8", k_strides=k_strides, v_strides=v_strides)
    return (problem, new) if problem.dv == problem.k and ctx.serves(problem) else None


def _apart_pays(ctx: Context, problem: Attention, more: int = 0) -> bool:
    """Whether float32 attention is faster as two products with the scores in memory between them.

    The fused kernel multiplies without tensor cores. The scores may take `SCORES` bytes; `more`
    counts further passes over them. Open lengths keep the fused kernel: the choice of products
    depends on what divides the lengths, so that one class of lengths would need several programs.
    """
    if problem.dtype != "float32" or problem.op in forced(ctx.prefs) or problem.packed:
        return False
    if any(isinstance(length, OpenSize) for length in (problem.m, problem.n)):
        return False
    p, backward = problem.upper_bound(), isinstance(problem, AttentionGrad)
    scores = ITEMSIZE[p.dtype] * p.batches * p.m * p.n
    if scores > SCORES:
        return False
    text, passes = "NT m n k; NN m dv n", 1 + bool(p.mask) + more
    if backward:
        text, passes = f"{text}; NT m n dv; TN n dv m; TN n k m", passes + 2
    sizes = {"m": p.m, "n": p.n, "k": p.k, "dv": p.dv}
    gemms = products(text, sizes, math=ctx.math, batch=p.batch)
    apart = (*gemms, Passes(2 * passes * scores, 2 * passes))
    return MARGIN * total(apart, ctx.hw, ctx.prefs) < total((problem,), ctx.hw, ctx.prefs)


def attention(ctx: Context, node: ir.Node) -> None:
    """ai.onnx Attention of heads that stand apart, without mask, past or softcap.

    A sliding window that no kernel skips becomes a mask known at lowering.
    """
    if len(ctx.view(node, 0).shape) != 4 or any(ctx.has(node, i) for i in range(3, 7)):
        raise Unserved("no-kernel", what="a mask, a past or heads side by side")
    if any(ctx.wants(node, i) for i in range(1, 4)) or ctx.attr(node, "softcap", 0.0):
        raise Unserved("no-kernel", what="a softcap or further results")
    q, k, v = _fitted(ctx, *(_rows(ctx, node, i) for i in range(3)))
    shape = (*q.shape[:3], v.shape[3])
    if not prod(shape) or not k.shape[2] or len({q.dtype, k.dtype, v.dtype}) > 1:
        raise Unserved("no-kernel", what="operands that are empty or of several types")
    reads = {"q": q, "k": k, "v": v}
    left, right = (ctx.attr(node, f"{side}_window_size", -1) for side in ("left", "right"))
    right = 0 if ctx.attr(node, "is_causal", 0) else right
    y = _output(ctx, node, 0, shape, q.dtype)
    problem = _problem(ctx, node, Attention, q, k, v, _Masks(), y=y)
    if left >= 0 or right >= 0:
        fields = _window(left, right, q.shape[2], k.shape[2])
        if fields is None:
            raise Unserved("no-kernel", what="a window without a key")
        problem = replace(problem, **{"causal": False, **fields})
        if problem.window and not ctx.serves(problem):
            ahead = np.arange(k.shape[2]) - np.arange(q.shape[2])[:, None]
            seen = (ahead >= -left) if left >= 0 else np.ones_like(ahead, bool)
            seen &= (ahead <= right) if right >= 0 else True
            low = np.where(seen, 0, -np.inf).astype(q.dtype)
            reads["mask"] = ctx.constant(low).expand((*q.shape[:3], k.shape[2]))
            problem = replace(problem, causal=False, window=(), mask=reads["mask"].strides)
    ctx.select(node, problem, reads, {"y": y})


def sdpa_grad(ctx: Context, node: ir.Node) -> None:
    """dq, dk, dv from dy, y and the saved log-sum-exp."""
    dy, y, q, k, v = (_rows(ctx, node, i) for i in (0, 1, 3, 4, 5))
    if _fitted(ctx, q, k, v) != (q, k, v):
        raise Unserved("broadcast-heads")
    lse = ctx.dense(node, 2)
    masks = _masks(ctx, node, 6, q, k)
    if not (prod(q.shape) and prod(k.shape) and prod(v.shape)):
        raise Unserved("empty")
    asked, masks = _windowed(ctx, node, AttentionGrad, q, k, v, masks, 6, dy=dy, y=y)
    reads = {"q": q, "k": k, "v": v, "dy": dy, "y": y, "lse": lse} | masks.reads
    names, shapes = ("dq", "dk", "dv"), (q.shape, k.shape, v.shape)
    if _apart_pays(ctx, asked):
        raise Unserved("faster", by="")
    merged = _merged(ctx, node, shapes, q.dtype)
    if merged is not None:
        writes = dict(zip(names, merged, strict=True))
        problem = _problem(ctx, node, AttentionGrad, q, k, v, masks, dy=dy, y=y, **writes)
        if ctx.serves(problem):
            for i, gradient in enumerate(merged):
                ctx.alias(node, i, gradient)
            return ctx.select(node, problem, reads, writes)
    writes = {n: ctx.output(node, i, shapes[i], q.dtype) for i, n in enumerate(names)}
    problem = _problem(ctx, node, AttentionGrad, q, k, v, masks, dy=dy, y=y)
    ctx.select(node, problem, reads, writes)


def _merged(
    ctx: Context, node: ir.Node, shapes: Sequence[tuple[int, ...]], dtype: str
) -> list[Tensor] | None:
    """Views of dq, dk and dv inside the gradient [B, S, H D + ..] of one product's result.

    None where the graph does not join the three to such a gradient.
    """
    ends = [end for end in (_join_of(ctx, out) for out in node.outputs) if end is not None]
    rows = {(shape[0], shape[2]) for shape in shapes}
    if len(ends) < len(shapes) or len({join for join, _ in ends}) > 1 or len(rows) > 1:
        return None
    part_index = {part: i for i, (_, part) in enumerate(ends)}
    order = [-1 if v is None else part_index.get(v, -1) for v in ends[0][0].inputs]
    if sorted(order) != list(range(len(shapes))):
        return None
    (batch, queries), widths = rows.pop(), [shape[1] * shape[3] for shape in shapes]
    whole = ctx.scratch(dtype, (batch, queries, sum(widths)))
    places: dict[int, Tensor] = {}
    start = 0
    for i in order:
        heads = (batch, queries, shapes[i][1], shapes[i][3])
        places[i] = whole.part(2, start, widths[i]).view(heads).permute((0, 2, 1, 3))
        start += widths[i]
    return [places[i] for i in range(len(shapes))]


_Chain = tuple[tuple[str, str, tuple[object, ...]], ...]
_MERGES: tuple[tuple[_Chain, _Chain], ...] = (
    (
        (("Transpose", "perm", ([0, 2, 1, 3],)), ("Reshape", "", (None,)),
         ("Concat", "axis", (-1, 2))),
        (),
    ),
    (
        (("Unsqueeze", "", (None,)), ("Concat", "axis", (0,))),
        (("Transpose", "perm", ([1, 3, 0, 2, 4],)),),
    ),
)  # fmt: skip
"""Operators (type, attribute, values) that join a result to others, and those that then bring all
of them to the order [B, S, parts, H, D] in memory: the heads of each part are merged and the parts
stand side by side, or the parts are stacked and transposed."""


def _along(ctx: Context, value: ir.Value, chain: _Chain) -> list[ir.Value] | None:
    """`value` and the results of a chain of operators that starts at it.

    None where the graph has another operator there, or a value has more than one reader.
    """
    values = [value]
    for op_type, name, allowed in chain:
        readers = [use.node for use in value.uses()]
        if len(readers) != 1 or value.is_graph_output() or readers[0].op_type != op_type:
            return None
        if ctx.attr(readers[0], name) not in allowed:
            return None
        value = readers[0].outputs[0]
        values.append(value)
    return values


def _join_of(ctx: Context, value: ir.Value) -> tuple[ir.Node, ir.Value] | None:
    """The Concat that reads a result, and its inputs; None where no Concat does."""
    for chain, rest in _MERGES:
        path = _along(ctx, value, chain)
        if path is None or _along(ctx, path[-1], rest) is None:
            continue
        return required(path[-1].producer()), path[-2]
    return None


LOWERINGS: dict[tuple[str, str], Lowering] = {
    ("", "Attention"): attention,
    **{(FUSE, name): sdpa for name in KINDS},
    **{(FUSE, f"{name}Grad"): sdpa_grad for name in KINDS},
}

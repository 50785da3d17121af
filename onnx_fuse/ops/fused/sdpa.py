"""Scaled dot-product attention: Sdpa and its relatives, one body each from one template.

    y = softmax(scale · q kᵀ + mask) v,  q [B, H, S, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv]
Sdpa has no mask, SdpaMask an additive one broadcastable to [B, H, S, T], SdpaMaskGuard gives 0 if
a whole row is -inf (the Softmax, IsNaN, Where ending of exporters), SdpaCausal keeps j <= i.
Grouped… is the same with H a multiple of Hkv: query head h reads key head h // (H / Hkv).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.onnx.build import Builder
from onnx_fuse.onnx.common import FUSE
from onnx_fuse.ops.fused.activations import signature
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.rewrite import (
    Rewriter,
    Rule,
    attribute,
    dim,
    is_float,
    made_by,
    only_use,
    rank,
    scalar,
    typed,
    users,
)

LOWEST = -3.4028234663852886e38
KINDS = ("", "Mask", "MaskGuard", "Causal")


def _score_lines(grouped: bool, kind: str) -> tuple[list[str], str]:
    """Lines of a body up to the softmax's input, and its name; `qa`, or `qg`, is q · scale."""
    lines = [
        "scale_f = Constant <value_float: float = @scale> ()",
        "a = CastLike (scale_f, q)",
        "kt = Transpose <perm: ints = [0, 1, 3, 2]> (k)",
        "last = Constant <value_ints: ints = [-1]> ()",
    ]
    if grouped:
        # The query heads that share a key head are rows of one product: [B, Hkv, H/Hkv · S, D].
        lines += [
            "fold = Constant <value_ints: ints = @kv_rows> ()",
            "unfold = Constant <value_ints: ints = @q_rows> ()",
            "qf = Reshape (q, fold)",
            "qg = Mul (qf, a)",  # beside the MatMul, onnxruntime makes the two one
            "sg = MatMul (qg, kt)",
            "s = Reshape (sg, unfold)",
        ]
    else:
        lines += ["qa = Mul (q, a)", "s = MatMul (qa, kt)"]
    if kind == "Causal":
        lines += [
            "q_rows = Shape <start: int = 2, end: int = 3> (q)",
            "k_rows = Shape <start: int = 2, end: int = 3> (k)",
            "square = Concat <axis: int = 0> (q_rows, k_rows)",
            "ones = ConstantOfShape <value: tensor = float[1] {1.0}> (square)",
            "lower = Trilu <upper: int = 0> (ones)",
            "keep = Cast <to: int = 9> (lower)",
            f"low_f = Constant <value_float: float = {LOWEST!r}> ()",
            "low = CastLike (low_f, s)",
            "nil_f = Constant <value_float: float = 0.0> ()",
            "nil = CastLike (nil_f, s)",
            "below = Where (keep, nil, low)",
            "zm = Add (s, below)",
        ]
    elif kind:
        lines += ["zm = Add (s, mask)"]
    return lines, "zm" if kind else "s"


def _guarded(name: str, raw: str) -> list[str]:
    """`name` = `raw`, but 0 where SdpaMaskGuard's is NaN."""
    return [
        f"nan = IsNaN ({raw})",
        "zero_f = Constant <value_float: float = 0.0> ()",
        f"zero = CastLike (zero_f, {raw})",
        f"{name} = Where (nan, zero, {raw})",
    ]


def _body(grouped: bool, kind: str) -> str:
    name = f"{'Grouped' if grouped else ''}Sdpa{kind}"
    lines, logits = _score_lines(grouped, kind)
    guard = kind == "MaskGuard"
    lines += [
        # for the backward alone: log Σ exp of each row, in float32 whatever q is
        f"zf = Cast <to: int = 1> ({logits})",
        "lse = ReduceLogSumExp <keepdims: int = 0> (zf, last)",
    ]
    if guard:
        # Rows are told by the mask, which heads and layers share, not by the far larger weights.
        lines += [
            "top = ReduceMax <keepdims: int = 1> (mask, last)",
            "dead = IsInf <detect_positive: int = 0> (top)",
            "zero_f = Constant <value_float: float = 0.0> ()",
            "zero = CastLike (zero_f, s)",
            "finite = Where (dead, zero, mask)",
            "living = Not (dead)",
            "alive = CastLike (living, s)",
            "zg = Add (s, finite)",
        ]
    lines += [f"p = Softmax <axis: int = -1> ({'zg' if guard else logits})"]
    y = "yn" if guard else "y"
    if grouped:
        lines += ["pg = Reshape (p, fold)", "yg = MatMul (pg, v)", f"{y} = Reshape (yg, unfold)"]
    else:
        lines += [f"{y} = MatMul (p, v)"]
    if guard:
        lines += ["y = Mul (yn, alive)"]
    mask = ", mask" if kind.startswith("Mask") else ""
    head = f"{name} {_attributes(grouped)}(q, k, v{mask}) => (y) {{\n  "
    return head + "\n  ".join(lines) + "\n}"


def _attention_body(grouped: bool, kind: str) -> str:
    """The Attention node of opset 23, which gives 0 too where a row is masked whole."""
    mask = ", mask" if kind == "MaskGuard" else ""
    causal = ", is_causal: int = 1" if kind == "Causal" else ""
    head = f"{'Grouped' if grouped else ''}Sdpa{kind} {_attributes(grouped)}(q, k, v{mask}) => (y)"
    return f"{head} {{\n  y = Attention <scale: float = @scale{causal}> (q, k, v{mask})\n}}"


def _attributes(grouped: bool) -> str:
    return signature("kv_rows, q_rows" if grouped else "", "scale: float = 1.0")


def _grad_body(grouped: bool, kind: str) -> str:
    """dv = pᵀ dy, dq = scale ds k, dk = scale dsᵀ q; p = exp(z - lse), ds = p (dy vᵀ - Σ dy y)."""
    name = f"{'Grouped' if grouped else ''}Sdpa{kind}Grad"
    lines, logits = _score_lines(grouped, kind)
    guard, g = kind == "MaskGuard", "g" if grouped else ""
    turned = "0, 1, 3, 2"
    lines += [
        f"zf = CastLike ({logits}, lse)",
        "l1 = Unsqueeze (lse, last)",
        "zl = Sub (zf, l1)",
        f"{'en' if guard else 'e'} = Exp (zl)",
        *(_guarded("e", "en") if guard else ()),
        "p = CastLike (e, q)",
        "dyy = Mul (dy, y)",
        "delta = ReduceSum <keepdims: int = 1> (dyy, last)",
    ]
    if grouped:
        lines += [f"{name}g = Reshape ({name}, fold)" for name in ("p", "dy", "delta")]
    lines += [
        f"vt = Transpose <perm: ints = [{turned}]> (v)",
        f"dp = MatMul (dy{g}, vt)",
        f"dpd = Sub (dp, delta{g})",
        f"ds = Mul (p{g}, dpd)",
        f"dqa{g} = MatMul (ds, k)",
        f"dst = Transpose <perm: ints = [{turned}]> (ds)",
        f"pt = Transpose <perm: ints = [{turned}]> (p{g})",
        f"dk = MatMul (dst, q{g or 'a'})",
        f"dv = MatMul (pt, dy{g})",
    ]
    if grouped:
        lines += ["dqa = Reshape (dqag, unfold)"]
    lines += ["dq = Mul (dqa, a)"]
    inputs = "dy, y, lse, q, k, v" + (", mask" if kind.startswith("Mask") else "")
    head = f"{name} {_attributes(grouped)}({inputs}) => (dq, dk, dv) {{\n  "
    return head + "\n  ".join(lines) + "\n}"


def _grad(op: Any, node: ir.Node, dys: Sequence[ir.Value | None]) -> Sequence[ir.Value | None]:
    """The fused backward; a mask's gradient, where one is asked for, is written out."""
    name = node.op_type.split("_")[0]
    scale = attribute(node, "scale", 1.0)
    dy, (y, lse), (q, k, v, *masks) = dys[0], node.outputs, node.inputs
    assert dy is not None
    assert q is not None
    assert k is not None
    assert v is not None
    lse.dtype = ir.DataType.FLOAT
    if q.shape is not None:
        lse.shape = ir.Shape(q.shape[:3])
    dq, dk, dv = op.node(
        f"{name}Grad",
        [dy, y, lse, q, k, v, *masks],
        outputs=3,
        domain=FUSE,
        attributes={key: a.value for key, a in node.attributes.items()},
    )
    for d, x in ((dq, q), (dk, k), (dv, v)):
        d.dtype, d.shape = x.dtype, x.shape
        if x is not q and not name.startswith("Grouped") and q.shape and x.shape:
            # One key head may be broadcast over all query heads: the walker sums it back.
            d.shape = ir.Shape([*q.shape[:2], *x.shape[2:]])
    if not masks:
        return [dq, dk, dv]
    if name.startswith("Grouped"):
        k, v = (_repeated(op, x, q) for x in (k, v))
    turn = [0, 1, 3, 2]
    z = op.Add(op.MatMul(op.Mul(q, scale), op.Transpose(k, perm=turn)), masks[0])
    last = op.constant([-1])
    e = op.Exp(op.Sub(op.CastLike(z, lse), op.Unsqueeze(lse, last)))
    p = op.CastLike(op.Where(op.IsNaN(e), op.CastLike(op.constant([0.0]), e), e), q)
    dp = op.MatMul(dy, op.Transpose(v, perm=turn))
    dmask = op.Mul(p, op.Sub(dp, op.ReduceSum(op.Mul(dy, y), last, keepdims=1)))
    return [dq, dk, dv, dmask]


def _repeated(op: Any, x: ir.Value, q: ir.Value) -> Any:
    """Key or value heads, each as often as query heads share it."""
    heads, width = op.Shape(q, start=1, end=2), op.Shape(x, start=2)
    own = op.Shape(x, start=1, end=2)
    batch, one = op.Shape(x, start=0, end=1), op.constant([1])
    tiles = op.Concat(batch, own, op.Div(heads, own), width, axis=0)
    spread = op.Expand(op.Reshape(x, op.Concat(batch, own, one, width, axis=0)), tiles)
    return op.Reshape(spread, op.Concat(batch, heads, width, axis=0))


for _g, _kind in product((False, True), KINDS):
    _name = f"{'Grouped' if _g else ''}Sdpa{_kind}"
    register(
        OpDef(
            _name,
            FUSE,
            body=_body(_g, _kind),
            newer="" if _kind == "Mask" else _attention_body(_g, _kind),
            saves=("lse",),
            grad=_grad,
        ),
        OpDef(f"{_name}Grad", FUSE, body=_grad_body(_g, _kind)),
    )


# ---- recognition -----------------------------------------------------------------------------


@dataclass
class _Scores:
    """softmax's input taken apart: scale · left · right + masks."""

    product: ir.Node
    scale: float = 1.0
    factors: list[tuple[str, ir.Value]] = field(default_factory=list)
    """("Mul" or "Div", scalar computed in the graph)."""
    folded_masks: list[tuple[ir.Value, float]] = field(default_factory=list)
    """Masks [B·H or 1, S or 1, T] added before `split`, and what the sum was scaled by since."""
    split: ir.Node | None = None
    """The Reshape from [B·H, S, T] to [B, H, S, T], where heads were folded into the batch."""
    masks: list[tuple[ir.Value, float]] = field(default_factory=list)
    conditions: list[tuple[ir.Value, bool, float]] = field(default_factory=list)
    """(condition, fill where it holds, fill)."""


def _scores(value: ir.Value | None, depth: int = 8) -> _Scores | str | None:
    """Climb from softmax to the product; a reason where something known stands in the way."""
    node = value.producer() if value is not None else None
    if node is None or node.domain or depth == 0:
        return None
    a = node.inputs[0] if node.inputs else None
    b = node.inputs[1] if len(node.inputs) > 1 else None
    match node.op_type:
        case "MatMul":
            return _Scores(node)
        case "Identity":
            return _scores(a, depth - 1)
        case "Cast" if is_float(a) and a is not None and a.dtype == node.outputs[0].dtype:
            return _scores(a, depth - 1)
        case "Mul" | "Div":
            inner, factor = _scores(a, depth - 1), b
            if inner is None and node.op_type == "Mul":
                inner, factor = _scores(b, depth - 1), a
            if not isinstance(inner, _Scores) or factor is None:
                return inner
            number = scalar(factor)
            if number and node.op_type == "Div":
                number = 1 / number
            fills = [fill * (number or 0.0) for _, _, fill in inner.conditions]
            masked = inner.masks or inner.folded_masks
            # A factor above 1 would make -inf of a mask's lowest float.
            if any(fill > _lowest(node.outputs[0]) for fill in fills) or (
                masked and not (number and 0 < number <= 1)
            ):
                return "the mask is added before the scale"
            if number:
                inner.scale *= number
                for masks in (inner.masks, inner.folded_masks):
                    masks[:] = [(mask, number * before) for mask, before in masks]
                inner.conditions = [
                    (condition, holds, fill)
                    for (condition, holds, _), fill in zip(inner.conditions, fills, strict=True)
                ]
            elif all(d == 1 for d in factor.shape or (None,)):
                inner.factors.append((node.op_type, factor))
            else:
                return f"the scores are scaled by the tensor '{factor.name}'"
            return inner
        case "Reshape":
            inner = _scores(a, depth - 1)
            if not isinstance(inner, _Scores):
                return inner
            if rank(a) != 3 or rank(node.outputs[0]) != 4 or inner.split:
                return "the scores are reshaped"
            if inner.conditions:
                return "a mask is chosen before the heads are split from the batch"
            inner.folded_masks, inner.masks = inner.masks, []
            inner.split = node
            return inner
        case "Add":
            for scores, mask in ((a, b), (b, a)):
                inner = _scores(scores, depth - 1)
                if isinstance(inner, _Scores) and mask is not None:
                    inner.masks.append((mask, 1.0))
                    return inner
                if isinstance(inner, str):
                    return inner
            return None
        case "Where":
            for scores, fill, holds in ((b, node.inputs[2], False), (node.inputs[2], b, True)):
                inner, number = _scores(scores, depth - 1), scalar(fill)
                if not isinstance(inner, _Scores) or number is None:
                    continue
                if number > _lowest(node.outputs[0]) or a is None:
                    return f"masked by Where with {number}, which is no sum"
                inner.conditions.append((a, holds, number))
                return inner
            return None
    below = _scores(a, depth - 1) if is_float(a) and depth > 5 else None
    return f"{node.op_type} stands between the product and the softmax" if below else None


def _lowest(scores: ir.Value) -> float:
    """A sum of a score and so low a number is that number, as the result of a Where is.

    A mild fill (-1e4 in fp16 exports) is not the same as adding it.
    """
    return -1e9 if scores.dtype != ir.DataType.FLOAT16 else -6e4


def _peel(value: ir.Value) -> tuple[ir.Value, float]:
    """Constant factors off an operand."""
    factor = 1.0
    while (node := made_by(value, "Mul", "Div", "Identity")) is not None:
        a = node.inputs[0]
        if a is None:
            break
        if node.op_type == "Identity":
            value = a
            continue
        b = node.inputs[1]
        number = scalar(b)
        rest: ir.Value | None = a
        if number is None and node.op_type == "Mul":
            number, rest = scalar(a), b
        if not number or rest is None:
            break
        factor *= number if node.op_type == "Mul" else 1 / number
        value = rest
    return value, factor


def _key(op: Builder, right: ir.Value) -> tuple[ir.Value, float]:
    """k [.., T, D] of a product's right operand kᵀ [.., D, T], and the constant taken off it."""
    right, outer = _peel(right)
    size = rank(right) or 4
    swap = [*range(size - 2), size - 1, size - 2]
    node = made_by(right, "Transpose")
    perm = attribute(node, "perm") if node is not None else None
    if node is None or not isinstance(perm, Sequence) or node.inputs[0] is None:
        return _transposed(op, right, swap), outer
    composed = [perm[i] for i in swap]
    source, inner = _peel(node.inputs[0])
    if composed == list(range(size)):
        return source, outer * inner
    return _transposed(op, source, composed), outer * inner


def _transposed(op: Builder, x: ir.Value, perm: Sequence[int]) -> ir.Value:
    y: ir.Value = op.Transpose(x, perm=list(perm))
    return typed(y, x, None if x.shape is None else [x.shape[p] for p in perm])


def _ungrouped(value: ir.Value) -> ir.Value | None:
    """The [B, Hkv, T, D] behind a head repetition: Reshape(Expand(Unsqueeze(k, 2)))."""
    reshape = made_by(value, "Reshape")
    expand = made_by(reshape.inputs[0], "Expand") if reshape else None
    unsqueeze = made_by(expand.inputs[0], "Unsqueeze", "Reshape") if expand else None
    source = unsqueeze.inputs[0] if unsqueeze else None
    if unsqueeze is None or source is None or rank(source) != 4 or rank(value) != 4:
        return None
    heads, groups = dim(value, 1), dim(source, 1)
    middle = unsqueeze.outputs[0]
    if rank(middle) != 5 or dim(middle, 2) != 1 or dim(middle, 1) != groups:
        return None
    return source if heads and groups and heads % groups == 0 else None


def _grouping(
    q: ir.Value, k: ir.Value, v: ir.Value
) -> tuple[ir.Value, ir.Value, tuple[int, int] | None]:
    """k and v before their heads were repeated for q's, and (H, Hkv) where the two differ."""
    heads, k_group, v_group = dim(q, 1), _ungrouped(k), _ungrouped(v)
    if k_group is not None and v_group is not None:
        heads, k, v = dim(k, 1), k_group, v_group
    groups = dim(k, 1)  # 1 where a single key head is broadcast over all query heads
    if heads and groups and groups == dim(v, 1) and heads != groups and heads % groups == 0:
        return k, v, (heads, groups)
    return k, v, None


def _fuse(rw: Rewriter, softmax: ir.Node) -> bool:
    size = rank(softmax.outputs[0])
    if attribute(softmax, "axis", -1) not in (-1, (size or 0) - 1):
        return False
    found = _scores(softmax.inputs[0])
    if found is None:
        return False
    if isinstance(found, str):
        return rw.refuse("Sdpa", [softmax], found)
    if rw.training and any(np.isfinite(fill) for _, _, fill in found.conditions):
        # On a row that is masked whole, softmax of the fill is uniform, and the scores behind a
        # Where have no gradient; behind an added mask they would have one.
        reason = "masked by Where with a finite value, whose gradient an added mask would change"
        return rw.refuse("Sdpa", [found.product, softmax], reason)
    split = found.split is not None
    if size not in (3, 4):
        return rw.refuse("Sdpa", [found.product, softmax], f"scores of rank {size}")
    last, guarded, reason = _ending(softmax, split)
    if last is None:
        return rw.refuse("Sdpa", [found.product, softmax], reason)
    left, right = found.product.inputs[0], found.product.inputs[1]
    v = last.inputs[1]
    inner = 3 if split else size
    if left is None or right is None or v is None or {rank(t) for t in (left, right, v)} != {inner}:
        return rw.refuse("Sdpa", [found.product, softmax], "operands of differing rank")
    op = Builder()
    q, q_scale = _peel(left)
    k, k_scale = _key(op, right)
    if split:
        four = [_unfolded(t, dim(softmax.outputs[0], 1)) for t in (q, k, v)]
        if any(t is None for t in four):
            reason = "heads folded into the batch, and not by a Reshape of [B, H, S, D]"
            return rw.refuse("Sdpa", [found.product, softmax], reason)
        q, k, v = (t for t in four if t is not None)
    for op_type, factor in found.factors:
        q = typed(op.node(op_type, [q, factor]), q, q.shape)
    k, v, grouped = _grouping(q, k, v)
    mask = _mask(op, rw, found, q, size)
    if size == 3:
        q, k, v = (op.Unsqueeze(t, op.constant([1])) for t in (q, k, v))
    kind = "" if mask is None else "MaskGuard" if guarded else "Mask"
    scale = found.scale * q_scale * k_scale
    y = _emit(op, kind, grouped, [q, k, v], mask, scale)
    if size == 3:
        y = op.Squeeze(y, op.constant([1]))
    if split:
        y = op.Reshape(y, op.Concat(op.constant([-1]), op.Shape(y, start=2), axis=0))
    return rw.replace(last, op, [last.outputs[0]], [y])


def _emit(
    op: Builder,
    kind: str,
    heads: tuple[int, int] | None,
    qkv: Sequence[ir.Value],
    mask: ir.Value | None,
    scale: float,
) -> ir.Value:
    inputs = [*qkv] if mask is None else [*qkv, mask]
    name, rows = f"Sdpa{kind}", {}
    if heads is not None:
        # Reshape's 0 keeps a size, -1 takes what is left: [B, Hkv, ., D] and [B, H, ., D].
        name, rows = (
            f"Grouped{name}",
            {"q_rows": [0, heads[0], -1, 0], "kv_rows": [0, heads[1], -1, 0]},
        )
    y: ir.Value = op.node(name, inputs, domain=FUSE, scale=scale, attributes=rows)
    return typed(y, qkv[0])


def _unfolded(value: ir.Value, heads: int | None) -> ir.Value | None:
    """[B, H, S, D] behind [B·H, S, D]."""
    node = made_by(value, "Reshape")
    source = node.inputs[0] if node is not None else None
    same = dim(source, -1) is not None and dim(source, -1) == dim(value, -1)
    return source if same and rank(source) == 4 and heads and dim(source, 1) == heads else None


def _ending(softmax: ir.Node, split: bool) -> tuple[ir.Node | None, bool, str]:
    """(the product with v, whether NaN rows become 0, why there is none)."""
    p, guarded = softmax.outputs[0], False
    while True:
        readers = users(p)
        tests = [n for n in readers if n.op_type == "IsNaN"]
        wheres = [n for n in readers if n.op_type == "Where"]
        if len(tests) == 1 and len(wheres) == 1 and len(readers) == 2:
            where = wheres[0]
            ours = where.inputs[0] is tests[0].outputs[0] and where.inputs[2] is p
            if not ours or scalar(where.inputs[1]) != 0 or only_use(tests[0].outputs[0]) is None:
                return None, False, "a Where on the weights that is no NaN guard"
            p, guarded = where.outputs[0], True
            continue
        node = only_use(p)
        if node is None:
            return (
                None,
                False,
                f"the weights '{p.name}' have {len(readers)} readers or are an output",
            )
        if node.op_type in ("Identity", "Cast") and node.outputs[0].dtype == p.dtype:
            p = node.outputs[0]
            continue
        if split and node.op_type == "Reshape" and rank(node.outputs[0]) == 3:
            p, split = node.outputs[0], False
            continue
        if node.op_type == "Dropout" and len(node.inputs) < 3:
            p = node.outputs[0]
            continue
        if node.op_type != "MatMul" or node.inputs[0] is not p:
            return None, False, f"the weights go into {node.op_type}, not into a product with v"
        return node, guarded, ""


def _mask(op: Builder, rw: Rewriter, found: _Scores, q: ir.Value, size: int) -> ir.Value | None:
    """All additive masks and Where conditions as one additive mask of rank 4 or less."""
    like = found.product.outputs[0]
    total: ir.Value | None = None

    def scaled(mask: ir.Value, factor: float) -> ir.Value:
        return mask if factor == 1 else typed(op.Mul(mask, factor), mask, mask.shape)

    terms = [scaled(*mask) for mask in found.masks]
    for mask in (scaled(*folded) for folded in found.folded_masks):
        # To all of [B·H, ...] first: only then is B·H sure to split into B and H.
        heads = op.Shape(q, start=0, end=2)
        rows = op.ReduceProd(heads)
        full = op.Expand(mask, op.Concat(op.Reshape(rows, [1]), op.constant([1, 1]), axis=0))
        shape = op.Concat(heads, op.Shape(full, start=1), axis=0)
        terms.append(typed(op.Reshape(full, shape), like, [None] * 4))
    dtype = (like.dtype or ir.DataType.FLOAT).numpy()
    for condition, holds, fill in found.conditions:
        low = rw.initializer(f"low{np.dtype(dtype).name}x{fill:g}", np.asarray(fill, dtype))
        branches = (low, rw.zeros(like)) if holds else (rw.zeros(like), low)
        term = op.Where(condition, *branches)
        terms.append(typed(term, like, condition.shape))
    for term in terms:
        if size == 3 and rank(term) == 3:
            term = op.Unsqueeze(term, op.constant([1]))
        total = typed(term if total is None else op.Add(total, term), like)
    return total


def _attention(rw: Rewriter, node: ir.Node) -> bool:
    """The ai.onnx Attention node (opset 23 and later), where Sdpa says the same."""
    bound = [v for v in node.inputs[:3] if v is not None]
    if node.domain or len(bound) < 3:
        return False
    q, k, v = bound
    optional = [*node.inputs[3:], None, None, None, None]
    mask = optional[0]
    causal = attribute(node, "is_causal", 0) == 1
    problems = {
        "it has past keys and values": any(x is not None for x in optional[1:3]),
        "it has a padding-length input": optional[3] is not None,
        "it sees a sliding window": any(
            int(attribute(node, f"{side}_window_size", -1)) >= 0  # type: ignore[call-overload]
            for side in ("left", "right")
        ),
        "softcap": attribute(node, "softcap", 0.0) != 0.0,
        "more than one output is used": any(
            o.uses() or o.is_graph_output() for o in node.outputs[1:]
        ),
        "a mask and is_causal together": causal and mask is not None,
        "inputs of unknown or mixed rank": len({rank(t) for t in bound}) != 1 or rank(q) is None,
        "softmax_precision": attribute(node, "softmax_precision") not in (None, 1),
    }
    for reason, stands in problems.items():
        if stands:
            return rw.refuse("Sdpa", [node], reason)
    op = Builder()
    flat = rank(q) == 3
    heads, groups = attribute(node, "q_num_heads"), attribute(node, "kv_num_heads")
    if flat:
        assert isinstance(heads, int)
        assert isinstance(groups, int)
        q, k, v = (_split_heads(op, t, n) for t, n in ((q, heads), (k, groups), (v, groups)))
    else:
        heads, groups = dim(q, 1), dim(k, 1)
    if heads is None or groups is None or dim(q, -1) is None:
        return rw.refuse("Sdpa", [node], "head count or head size is not static")
    scale = attribute(node, "scale")
    if not isinstance(scale, float) or scale == 0.0:
        scale = 1 / math.sqrt(dim(q, -1) or 1)
    if mask is not None and mask.dtype == ir.DataType.BOOL:
        dtype = (q.dtype or ir.DataType.FLOAT).numpy()
        low = rw.initializer(f"minus_inf{np.dtype(dtype).name}", np.asarray(-np.inf, dtype))
        mask = typed(op.Where(mask, rw.zeros(q), low), q, mask.shape)
    # A row that is masked whole, by False or by -inf, gives zeros, as PyTorch and onnxruntime do.
    kind = "Causal" if causal else "" if mask is None else "MaskGuard"
    k, v, grouped = _grouping(q, k, v)
    y = _emit(op, kind, grouped, [q, k, v], mask, scale)
    made = y.producer()
    assert made is not None
    made.overload = "newer"
    if flat:
        y = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), op.constant([0, 0, -1]))
    return rw.replace(node, op, [node.outputs[0]], [y])


def _split_heads(op: Builder, x: ir.Value, heads: int) -> ir.Value:
    width = dim(x, -1)
    rows = op.Reshape(x, op.constant([0, 0, heads, -1]))
    typed(rows, x)
    if x.shape is not None and width is not None:
        rows.shape = ir.Shape([x.shape[0], x.shape[1], heads, width // heads])
    return _transposed(op, rows, [0, 2, 1, 3])


RULES = (Rule("Sdpa", 1, ("Softmax",), _fuse), Rule("Sdpa", 1, ("Attention",), _attention))

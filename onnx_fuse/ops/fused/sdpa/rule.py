"""Recognition: Softmax between two products becomes one attention operator, or a reason why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, detach, dim, rank, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.traits import RESHAPES
from onnx_fuse.ops.fused.sdpa.head_layout import Frame, make_frame
from onnx_fuse.ops.fused.sdpa.kinds import KINDS, STEPS, Kind
from onnx_fuse.ops.fused.sdpa.mask_analysis import CAUSAL, WINDOW, causal_step, is_idle
from onnx_fuse.ops.fused.sdpa.scores import (
    REACH,
    Scores,
    combine_steps,
    same_rows,
    trace_scores,
    whole_rows,
)
from onnx_fuse.ops.patterns import NODES
from onnx_fuse.ops.rules import (
    Rewriter,
    attribute,
    constant_ints,
    consumers,
    is_float,
    nan_guard,
    producer,
    scalar,
    sole_consumer,
    typed,
)
from onnx_fuse.ops.shape_ops import restores, same_size
from onnx_fuse.reasons import Reason

SCALES = (2.0**-14, 2.0**14)
"""Of constants that are taken off q or k: beyond these, products might leave the range of float16
in one order and not in the other."""


def fuse(rw: Rewriter, softmax: ir.Node) -> bool:
    """The rule, anchored at a Softmax."""
    z, p = _ends(softmax)
    ending = _ending(p)
    if isinstance(ending, Reason):
        return rw.refuse("Sdpa", [softmax], ending)
    # The head of a classifier is a Softmax behind a product as well, but before none.
    if ending is None or not is_float(z):
        return False
    op = Builder()
    if _fused(rw, op, softmax, ending, z):
        return True
    detach(op.nodes)  # made in vain: they read nothing of the graph any more
    return False


def _fused(
    rw: Rewriter, op: Builder, softmax: ir.Node, ending: ProductTail, z: ir.Value | None
) -> bool:
    z = whole_rows(op, z)
    scores = trace_scores(z)
    if not isinstance(scores, Scores):
        reason = scores or _unreached(z)
        return rw.refuse("Sdpa", [softmax, ending.product], reason) if reason else False
    nodes = [scores.product, softmax, ending.product]
    axis, size = attribute(softmax, "axis", -1), rank(softmax.outputs[0])
    if axis != -1 and (size is None or axis != size - 1):
        unknown = Reason("unknown", what="the rank of its scores")
        return rw.refuse("Sdpa", nodes, unknown if size is None else Reason("softmax-axis"))
    product = scores.product.outputs[0]
    if not scores.viewed:
        scores.steps = [step for step in scores.steps if not is_idle(step, product)]
    scores.steps = combine_steps(op, scores.steps)
    reason = _why_not_fused(rw, scores, ending, z)
    if reason:
        return rw.refuse("Sdpa", nodes, reason)
    left, right = map(required, scores.product.inputs[:2])
    v = ending.values
    q, q_scale = strip_scales(left)
    k, k_scale = _key(op, right)
    if ending.turned:
        v = transposed(op, v, swapped(rank(v) or 4))
    for op_type, factor in scores.factors:
        q = typed(op.node(op_type, [q, factor]), q, q.shape)
    scale = scores.scale * q_scale * k_scale
    if q.dtype == ir.DataType.DOUBLE and float(np.float32(scale)) != scale:
        q, scale = typed(op.Mul(q, scale), q, q.shape), 1.0  # attributes are of float32
    frame = make_frame(op, scores, [q, k, v])
    if isinstance(frame, Reason):
        return rw.refuse("Sdpa", nodes, frame)
    steps, masks = steps_of(op, rw, scores, frame)
    guard = "NanGuard" if ending.guarded else ""
    q, k, v, heads = grouping(*frame.qkv)
    kind = Kind(
        heads is not None, scores.wide, scores.softcap is not None, steps=steps, guard=guard
    )
    step = causal_step(scores.steps)
    y = emit(op, kind, heads, [q, k, v, *masks], scale, scores.softcap, step)
    y = frame.back(op, y)
    if ending.turned:
        y = transposed(op, y, swapped(rank(ending.product.outputs[0]) or rank(v) or 4))
    return rw.replace(ending.product, op, [ending.product.outputs[0]], [y])


def _why_not_fused(
    rw: Rewriter, scores: Scores, ending: ProductTail, z: ir.Value | None
) -> Reason | None:
    product = scores.product.outputs[0]
    if tuple("Where" if s.fill is not None else "Mask" for s in scores.steps) not in STEPS:
        return Reason("masks", count=len(scores.steps))
    if ending.narrowed and product.dtype == ir.DataType.FLOAT != ending.values.dtype:
        return Reason("mixed-types")
    dtypes = {product.dtype, ending.values.dtype, ending.weights.dtype}
    if len(dtypes) > 1 or scores.wide != ending.narrowed:
        return Reason("weights-type")
    if rw.training and product.dtype == ir.DataType.DOUBLE:
        return Reason("double-gradient")
    if product.dtype == ir.DataType.DOUBLE and scores.softcap is not None:
        return Reason("double-softcap")
    left, right = scores.product.inputs[0], scores.product.inputs[1]
    if scores.viewed and not _same_heads(product, ending.weights):
        return Reason("leading-axes", above="one matrix multiplication", below="the other")
    if {rank(left), rank(right), rank(product)} != {rank(ending.values)}:
        return Reason("ranks")
    # an Unsqueeze of the weights makes a result of more axes
    size, results = rank(product), {rank(ending.weights), rank(ending.product.outputs[0])}
    if size is None or size < 2 or results - {None, rank(ending.values)}:
        return Reason("ranks")
    taken = [strip_scales(side)[1] for side in (left, right) if side is not None]
    if any(not SCALES[0] <= abs(factor) <= SCALES[1] for factor in taken):
        return Reason("operand-scale")
    # A mask that is larger than the scores makes many rows of one.
    end = z
    if end is not None and not scores.viewed and rank(end) == size:
        for axis in range(size):
            m, n = dim(product, axis), dim(end, axis)
            if m is not None and m != n and (n is not None or m == 1):
                return Reason("mask-grows")
    return None


def _same_heads(x: ir.Value, y: ir.Value) -> bool:
    """Whether two scores, views of each other that leave the last two axes alone, have the same
    axes: with one axis more than these two, or where the third from the end is the same and there
    is one more.
    """
    size = rank(x)
    return size == rank(y) and (size == 3 or (size == 4 and same_size(x, 1, y, 1)))


WIDER: dict[ir.DataType | None, tuple[ir.DataType, ...]] = {
    ir.DataType.FLOAT16: (ir.DataType.FLOAT, ir.DataType.DOUBLE),
    ir.DataType.BFLOAT16: (ir.DataType.FLOAT, ir.DataType.DOUBLE),
    ir.DataType.FLOAT: (ir.DataType.DOUBLE,),
}
"""The types that hold every number of one."""


# ---- what comes behind the softmax ---------------------------------------------------------------


@dataclass
class ProductTail:
    """What follows a softmax up to the product with v."""

    product: ir.Node
    weights: ir.Value
    """Its operand, before a Transpose."""
    values: ir.Value
    guarded: bool = False
    """Weights that are NaN become 0."""
    narrowed: bool = False
    """The weights are cast back to 16 bits."""
    turned: bool = False
    """The product is v · pᵀ."""


def _ends(softmax: ir.Node) -> tuple[ir.Value | None, ir.Value]:
    """Logits and weights; before opset 13 a Softmax was of a matrix, and its upgrade writes the
    Flatten and the Reshape back. They count for nothing where the last axis is the matrix's.
    """
    z, p = softmax.inputs[0], softmax.outputs[0]
    flatten, back = producer(z, "Flatten"), sole_consumer(p)
    if flatten is None or back is None or back.op_type != "Reshape" or back.domain:
        return z, p
    x, size = flatten.inputs[0], rank(flatten.inputs[0])
    last = size is not None and attribute(flatten, "axis", 1) in (-1, size - 1)
    return (x, back.outputs[0]) if restores(back, x) and last else (z, p)


def _ending(p: ir.Value) -> ProductTail | Reason | None:
    """Walk from the weights to their product with v; why there is none, None where none is near."""
    guarded, narrowed, turned = False, False, False
    weights = p
    """The values in the type that they have in the end, as far as that is known."""
    near = _leads_to_a_product(p)
    if not near:
        return None
    while True:
        readers = consumers(p)
        tested = len(readers) == 2 and {n.op_type for n in readers} == {"IsNaN", "Where"}
        if tested and not p.is_graph_output():
            guard = nan_guard(p)
            if guard is None or turned or sole_consumer(required(guard.inputs[0])) is None:
                return Reason("no-guard")
            p, guarded = guard.outputs[0], True
            continue
        node = sole_consumer(p)
        if node is None:
            return Reason("other-readers", what=f"the weights '{p.name}'")
        out = node.outputs[0]
        if node.domain:
            return Reason("weights-reader", op=f"{node.domain}.{node.op_type}")
        if node.op_type == "Identity" or (node.op_type == "Cast" and out.dtype == p.dtype):
            p = out
        elif node.op_type == "Cast":
            if out.dtype == weights.dtype and p.dtype in WIDER.get(out.dtype, ()):
                p = out  # there and back again: no digit is lost
            elif p.dtype == weights.dtype and out.dtype in WIDER.get(p.dtype, ()):
                p = out
            elif weights.dtype == ir.DataType.FLOAT and weights.dtype in WIDER.get(out.dtype, ()):
                p, narrowed, weights = out, True, out
            else:
                return Reason("weights-type")
        elif node.op_type in RESHAPES:
            if turned or not same_rows(p, out):
                return Reason("mixing-view", op=node.op_type, place="follows")
            p = out
        elif node.op_type == "Dropout" and len(node.inputs) < 3:
            if any(o.uses() or o.is_graph_output() for o in node.outputs[1:]):
                return Reason("other-readers", what="the mask of a Dropout of the weights")
            p = out
        elif node.op_type == "Transpose" and not turned:
            if list(attribute(node, "perm", ())) != swapped(rank(p) or 0):
                return Reason("mixing-view", op="Transpose", place="follows")
            p, turned = out, True
        elif node.op_type == "MatMul":
            return _product(node, p, guarded, narrowed, turned)
        else:
            return Reason("weights-reader", op=node.op_type)


def _product(
    node: ir.Node, p: ir.Value, guarded: bool, narrowed: bool, turned: bool
) -> ProductTail | Reason:
    left, right = node.inputs[0], node.inputs[1]
    values = left if turned else right
    if (right if turned else left) is not p or values is None or values is p:
        return Reason("sums-queries")
    if turned:
        p = required(required(p.producer()).inputs[0])
    return ProductTail(node, p, values, guarded, narrowed, turned)


_BETWEEN = frozenset(
    (
        *("Identity", "Cast", "Dropout", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Where"),
        *("IsNaN", "Mul", "Div", "Add", "Sub", "Flatten", "Expand", "Slice", "Clip"),
    )
)


def _leads_to_a_product(p: ir.Value, depth: int = 6) -> bool:
    """Whether what reads `p`, through operators that move or touch up weights, is a product."""
    for node in consumers(p) if depth else ():
        if node.domain:
            continue
        if node.op_type in ("MatMul", "Einsum"):
            return True
        if node.op_type in _BETWEEN and _leads_to_a_product(node.outputs[0], depth - 1):
            return True
    return False


def _unreached(z: ir.Value | None, depth: int = REACH // 2) -> Reason | None:
    """The operator that hides a softmax's product, if there is one further up."""
    first = z.producer() if z is not None else None
    todo, seen = [(first, depth)], set()
    while todo:
        node, left = todo.pop()
        if node is None or node in seen or not left:
            continue
        seen.add(node)
        if node.op_type in ("MatMul", "Einsum", "Gemm") and first is not None:
            return Reason("scores", op=first.op_type)
        todo += [(v.producer(), left - 1) for v in node.inputs if is_float(v) and v is not None]
    return None


# ---- operands ------------------------------------------------------------------------------------


def strip_scales(value: ir.Value) -> tuple[ir.Value, float]:
    """Constant factors off an operand."""
    factor = 1.0
    while (node := producer(value, "Mul", "Div", "Identity")) is not None:
        a = node.inputs[0]
        if a is None:
            break
        if node.op_type == "Identity":
            value = a
            continue
        b = node.inputs[1]
        number, held = scalar(b), b
        rest: ir.Value | None = a
        if number is None and node.op_type == "Mul":
            number, rest, held = scalar(a), b, a
        if not number or rest is None or (rank(held) or 0) > (rank(rest) or 0):
            break
        if not np.isfinite(number):
            break
        factor *= number if node.op_type == "Mul" else 1 / number
        value = rest
    return value, factor


def swapped(size: int) -> list[int]:
    """The axes of a matrix product's operand with the last two swapped."""
    return [*range(size - 2), size - 1, size - 2]


def _key(op: Builder, right: ir.Value) -> tuple[ir.Value, float]:
    """k [.., T, D] of a product's right operand kᵀ [.., D, T], and the constant taken off it."""
    right, outer = strip_scales(right)
    if (unflattened := _unflattened(op, right)) is not None:
        return unflattened, outer
    swap = swapped(rank(right) or 4)
    match = NODES.find("Transpose <perm: ints = @perm> (x)", right)
    if match is None:
        return transposed(op, right, swap), outer
    source, inner = strip_scales(match["x"])
    order = [match["perm"][i] for i in swap]
    k = source if order == sorted(order) else transposed(op, source, order)
    return k, outer * inner


def _unflattened(op: Builder, right: ir.Value) -> ir.Value | None:
    """k [B, H, T, D] where an exporter turned it with the heads in the batch: [B, H, D, T] by a
    Reshape of the Transpose of [B·H, T, D].
    """
    reshape = producer(right, "Reshape")
    turn = producer(reshape.inputs[0], "Transpose") if reshape is not None else None
    flat = turn.inputs[0] if turn is not None else None
    if reshape is None or turn is None or flat is None or rank(right) != 4:
        return None
    turned = [*attribute(turn, "perm", ())] == [0, 2, 1]
    if not turned or not same_rows(turn.outputs[0], right):
        return None
    below = producer(flat, "Reshape")
    same = below is not None and same_rows(below.inputs[0], flat)
    source = required(below.inputs[0] if below is not None and same else flat)
    order = (0, 1, 3, 2)
    if rank(source) == 4 and all(same_size(source, i, right, order[i]) for i in range(4)):
        return source
    target = reshape.inputs[1]
    sizes, joined = constant_ints(target), producer(target, "Concat")
    if sizes is not None and 0 not in sizes:
        shape: ir.Value = op.constant([sizes[i] for i in order])
    elif joined is not None and len(joined.inputs) == 4:
        if any(dim(piece, 0) != 1 or constant_ints(piece) == [0] for piece in joined.inputs):
            return None
        shape = op.Concat(*(joined.inputs[i] for i in order), axis=0)
    else:
        return None
    old = required(right.shape)
    return typed(op.Reshape(source, shape), right, [old[i] for i in order])


def transposed(op: Builder, x: ir.Value, perm: Sequence[int]) -> ir.Value:
    y: ir.Value = op.Transpose(x, perm=list(perm))
    return typed(y, x, None if x.shape is None else [x.shape[p] for p in perm])


def _ungrouped(value: ir.Value) -> ir.Value | None:
    """The [B, Hkv, T, D] that Reshape(Expand(Unsqueeze(k, 2))) repeats for each query head."""
    reshape = producer(value, "Reshape")
    expand = producer(reshape.inputs[0], "Expand") if reshape else None
    unsqueeze = producer(expand.inputs[0], "Unsqueeze", "Reshape") if expand else None
    source = unsqueeze.inputs[0] if unsqueeze else None
    if unsqueeze is None or source is None or rank(source) != 4 or rank(value) != 4:
        return None
    heads, groups = dim(value, 1), dim(source, 1)
    middle = unsqueeze.outputs[0]
    if rank(middle) != 5 or dim(middle, 2) != 1 or dim(middle, 1) != groups:
        return None
    wide = required(expand).outputs[0]
    if rank(wide) != 5 or not all(same_size(middle, i, wide, i) for i in (0, 1, 3, 4)):
        return None  # it may repeat more than the heads
    return source if heads and groups and heads % groups == 0 else None


def grouping(
    q: ir.Value, k: ir.Value, v: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value, tuple[int, int] | None]:
    """q, k and v before heads were repeated for q's, and (H, Hkv) where the two differ."""
    heads, k_group, v_group = dim(q, 1), _ungrouped(k), _ungrouped(v)
    if k_group is not None and v_group is not None:
        heads, k, v = dim(k, 1), k_group, v_group
    groups = dim(k, 1)  # 1 where a single key head is broadcast over all query heads
    if heads and groups and groups == dim(v, 1) and heads != groups and heads % groups == 0:
        return q, k, v, (heads, groups)
    return q, k, v, None


# ---- the new node --------------------------------------------------------------------------------


def steps_of(
    op: Builder, rw: Rewriter, scores: Scores, frame: Frame
) -> tuple[tuple[str, ...], list[ir.Value]]:
    """The steps' names, and their inputs in the axes of the frame."""
    names, inputs = [], []
    for step in scores.steps:
        if step.fill is None:
            mask = step.value
            if step.negated:
                mask = typed(op.Neg(mask), mask, mask.shape)
            if step.factor != 1:
                mask = typed(op.Mul(mask, step.factor), mask, mask.shape)
            names.append("Mask")
            inputs.append(frame.under(op, mask, step.at))
            continue
        keep: ir.Value | None = None
        for condition, holds in step.conditions:
            one = condition if holds else typed(op.Not(condition), condition, condition.shape)
            keep = one if keep is None else typed(op.And(keep, one), condition)
        assert keep is not None
        if len(step.conditions) > 1:
            keep.shape = None if step.at.shape is None else ir.Shape([None] * len(step.at.shape))
        names.append("Where")
        fill = step.fill
        stem = f"fill{fill.dtype.name}x{float(fill):g}"
        inputs += [frame.under(op, keep, step.at), rw.initializer(stem, fill)]
    return tuple(names), inputs


def emit(
    op: Builder,
    kind: Kind,
    heads: tuple[int, int] | None,
    inputs: Sequence[ir.Value],
    scale: float,
    softcap: float | None = None,
    proved: tuple[int, tuple[int, int]] = (0, (-1, -1)),
) -> ir.Value:
    """The node, and its output typed like q; `proved` as `causal_step` gives it."""
    attributes: dict[str, object] = {"scale": float(scale)}
    step, window = proved
    if step:
        attributes[CAUSAL] = step
    if step and window != (-1, 0):
        attributes[WINDOW] = list(window)
    if softcap is not None:
        attributes["softcap"] = float(softcap)
    if heads is not None:
        # Reshape's 0 keeps a size, -1 takes what is left: [B, Hkv, ., D] and [B, H, ., D].
        attributes |= {"q_rows": [0, heads[0], -1, 0], "kv_rows": [0, heads[1], -1, 0]}
    assert kind.name in KINDS, kind.name
    y: ir.Value = op.node(kind.name, list(inputs), domain=FUSE, attributes=attributes)
    q, k, v = inputs[:3]
    if q.shape is None or k.shape is None or v.shape is None:
        return typed(y, q)
    lead = [
        q.shape[i] if all(same_size(q, i, other, i) for other in others) else None
        for i, others in ((0, (k, v)), (1, () if heads is not None else (k, v)))
    ]
    return typed(y, q, [*lead, q.shape[2], v.shape[3]])

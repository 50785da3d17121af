"""The softmax's input taken apart: which product, scale, softcap, masks and conditions made it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, const_array, dim, rank, required
from onnx_fuse.ir.traits import RESHAPES
from onnx_fuse.ops.rules import is_float, producer, scalar, typed
from onnx_fuse.ops.shape_ops import same_size
from onnx_fuse.reasons import Reason

REACH = 24
"""How many nodes above a softmax its product is looked for."""

MOST = 2
"""Masks and conditions of one attention operator."""

SMALL = 128.0
"""The largest number of a mask that may be added twice as one: swinv2 hides by -100, twice."""

RANGE = (2.0**-20, 2.0**20)
"""The least and the largest factor of the scores that a kernel's scale may take in."""

_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Expand", "Transpose", "Identity", "Slice")


@dataclass
class MaskStep:
    """A mask that is added to the logits, or a condition under which they are replaced."""

    value: ir.Value
    at: ir.Value
    """The logits after the step, to whose axes the value broadcasts."""
    factor: float = 1.0
    """The factor by which the sum was scaled after a mask was added."""
    negated: bool = False
    """Whether the mask is subtracted instead of added."""
    fill: np.ndarray | None = None
    """The scalar, in the logits' dtype, that replaces logits where a condition says so."""
    conditions: list[tuple[ir.Value, bool]] = field(default_factory=list)
    """(condition, its value where the logits are kept); all must hold."""


@dataclass
class Scores:
    """scale · left · right, perhaps under a tanh, and then the steps in order."""

    product: ir.Node
    scale: float = 1.0
    factors: list[tuple[str, ir.Value]] = field(default_factory=list)
    """("Mul" or "Div", a tensor that is the same for all keys)."""
    softcap: float | None = None
    steps: list[MaskStep] = field(default_factory=list)
    wide: bool = False
    """Whether the result of all these steps is cast to float32."""
    viewed: bool = False
    """Whether some of the steps see the leading axes in another form than the product."""


def trace_scores(value: ir.Value | None, depth: int = REACH) -> Scores | Reason | None:
    """Climb from a softmax to its product: what lies between, the reason why that is no attention
    of ours, or None where there is no product.
    """
    node = value.producer() if value is not None else None
    if node is None or node.domain or depth == 0 or value is None:
        return None
    a = node.inputs[0] if node.inputs else None
    b = node.inputs[1] if len(node.inputs) > 1 else None
    if node.op_type == "MatMul":
        return Scores(node)
    if node.op_type == "Where":
        return _where(node, depth)
    if node.op_type in ("Add", "Mul"):
        traced = trace_scores(a, depth - 1)
        other = b
        if traced is None:
            traced, other = trace_scores(b, depth - 1), a
    else:
        traced, other = trace_scores(a, depth - 1), b
    if not isinstance(traced, Scores) or node.op_type == "Identity":
        return traced
    if node.op_type in RESHAPES:
        if not same_rows(a, value):
            return Reason("mixing-view", op=node.op_type, place="precedes")
        traced.viewed = True
        return traced
    if node.op_type == "Cast":
        return _cast(node, traced)
    if traced.wide:
        return _other_type(node, traced)
    scores = a if other is b else b
    if other is not None and node.op_type in ("Add", "Sub", "Mul", "Div"):
        if rank(value) is None or rank(value) != rank(scores):
            return Reason("adds-axes", what=f"the other operand of {node.op_type}")
        if node.op_type in ("Add", "Sub"):
            traced.steps.append(MaskStep(other, value, negated=node.op_type == "Sub"))
            return traced
        return _scaled(node, traced, other)
    if node.op_type == "Tanh":
        if traced.steps or traced.softcap is not None:
            return Reason("tanh")
        traced.softcap = 1.0
        return traced
    return Reason(
        "between", op=node.op_type, above="the matrix multiplication", below="the softmax"
    )


def whole_rows(op: Builder, z: ir.Value | None) -> ir.Value | None:
    """The logits `z` [.., Q, K] where exporters add masks to them as [.., h, w, h', w'].

    So a position bias is added in parts, one by the key's row and one by its column (vitdet, SAM).
    The sums are made of [.., Q, K], with masks that are expanded to all keys.
    """
    merge, steps = producer(z, "Reshape"), list[tuple[ir.Value, bool]]()
    value = merge.inputs[0] if merge is not None else None
    lead = (rank(z) or 0) - 2
    apart = [dim(value, lead + i) for i in range(4)] if rank(value) == lead + 4 else [None]
    if (
        lead < 1
        or None in apart
        or [dim(z, -2), dim(z, -1)]
        != [(apart[0] or 0) * (apart[1] or 0), (apart[2] or 0) * (apart[3] or 0)]
    ):
        return z
    while (add := producer(value, "Add")) is not None and len(steps) < MOST:
        summands = [i for i in (0, 1) if producer(add.inputs[i], "Add", "Reshape") is not None]
        first = summands[0] if summands else 0
        mask = add.inputs[1 - first]
        if mask is None or rank(mask) != lead + 4 or len(summands) > 1:
            return z
        steps.append((mask, first == 0))
        value = add.inputs[first]
    split = producer(value, "Reshape")
    source = split.inputs[0] if split is not None else None
    if source is None or not steps or rank(source) != lead + 2:
        return z
    z = required(z)
    sizes = [same_size(source, i, z, i) for i in range(lead + 2)]
    if not all((*sizes, *(value is not None and same_size(value, i, z, i) for i in range(lead)))):
        return z
    total = source
    for mask, behind in reversed(steps):
        full = op.Expand(mask, op.constant([1] * lead + apart))
        rows = op.Reshape(full, op.constant([0] * lead + [dim(z, -2), dim(z, -1)]))
        shape = None if mask.shape is None else [*mask.shape[:lead], dim(z, -2), dim(z, -1)]
        rows = typed(rows, mask, shape)
        total = typed(op.Add(*((total, rows) if behind else (rows, total))), source, source.shape)
    return total


def _name(value: ir.Value | None) -> str:
    return "another type" if value is None or value.dtype is None else value.dtype.name.lower()


def same_rows(x: ir.Value | None, y: ir.Value | None) -> bool:
    """Whether a view from `x` to `y` leaves the last two axes alone."""
    if x is None or y is None or (rank(x) or 0) < 2 or (rank(y) or 0) < 2:
        return False
    return all(same_size(x, i, y, i) for i in (-1, -2))


def _other_type(node: ir.Node, traced: Scores) -> Reason:
    dtype, other = _name(node.outputs[0]), _name(traced.product.outputs[0])
    return Reason("scores-type", op=node.op_type, dtype=dtype, other=other)


def _cast(node: ir.Node, traced: Scores) -> Scores | Reason:
    source, target = node.inputs[0], node.outputs[0]
    if not is_float(source) or source is None or source.dtype == target.dtype:
        return traced
    if traced.wide and target.dtype == traced.product.outputs[0].dtype:
        traced.wide = False  # there and back again: no digit is lost
        return traced
    narrow = source.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    if traced.wide or not narrow or target.dtype != ir.DataType.FLOAT:
        return Reason("scores-cast", source=_name(source), target=_name(target))
    traced.wide = True
    return traced


def _scaled(node: ir.Node, traced: Scores, factor: ir.Value) -> Scores | Reason:
    """`traced` times or over `factor`."""
    divides = node.op_type == "Div"
    if divides and node.inputs[0] is factor:
        return Reason("divisor")
    number = scalar(factor)
    if number is None:
        if traced.steps or traced.softcap is not None or traced.viewed:
            return Reason("tensor-scale", name=factor.name, how=" after a mask or a view")
        sizes = None if factor.shape is None else list(factor.shape)
        if sizes is None or any(d != 1 for d in sizes[-1:]):
            return Reason("tensor-scale", name=factor.name, how=", which differs by key")
        if not _moderate(factor):
            return Reason("tensor-scale", name=factor.name, how=", of unknown magnitude")
        traced.factors.append((node.op_type, factor))
        return traced
    if number == 0 or not math.isfinite(number) or not RANGE[0] <= abs(number) <= RANGE[1]:
        return Reason("score-scale", how="divided" if divides else "multiplied", number=number)
    if divides:
        number = 1 / number
    masks = [step for step in traced.steps if step.fill is None]
    # A product with a power of two loses no digit, so that it may be taken apart; one above 1 would
    # make -inf of a mask's lowest float.
    if masks and not (0 < number <= 1 and math.frexp(number)[0] == 0.5):
        return Reason("mask-scaled", number=number)
    for step in traced.steps:
        step.factor *= number
        if step.fill is not None:
            held = required(const_array(factor))
            with np.errstate(all="ignore"):
                how = np.divide if divides else np.multiply
                step.fill = np.asarray(how(step.fill, held.reshape(()).astype(step.fill.dtype)))
    if traced.softcap is not None:
        traced.softcap *= number
    else:
        traced.scale *= number
    return traced


def _moderate(factor: ir.Value) -> bool:
    """Whether a factor may be taken to q: a weight, or what weights and sizes alone have made, and
    of no magnitude that lets a product overflow in one order and not in the other.
    """
    todo, seen = [factor], set[ir.Node]()
    while todo:
        value = todo.pop()
        held = const_array(value)
        if held is not None:
            with np.errstate(invalid="ignore"):
                size = np.abs(held.astype(np.float64)) if held.dtype.kind in "fiu" else None
            if value is factor and (
                size is None or not ((size == 0) | ((size >= RANGE[0]) & (size <= RANGE[1]))).all()
            ):
                return False
            continue
        node = value.producer()
        if node is None or node.domain or len(seen) > REACH:
            return False
        if node not in seen and node.op_type not in ("Shape", "Size"):
            seen.add(node)
            todo += [v for v in node.inputs if v is not None]
    return True


def _where(node: ir.Node, depth: int) -> Scores | Reason | None:
    condition, *branches = node.inputs
    out = node.outputs[0]
    for i in (0, 1):
        scores, fill = branches[i], branches[1 - i]
        traced = trace_scores(scores, depth - 1)
        if traced is None:
            continue
        if isinstance(traced, Reason) or condition is None or scores is None:
            return traced
        held = const_array(fill) if scalar(fill) is not None else None
        if held is None:
            return Reason("fill")
        if traced.wide:
            return _other_type(node, traced)
        if rank(out) is None or rank(out) != rank(scores):
            return Reason("adds-axes", what="the condition of Where")
        holds, step = i == 0, MaskStep(condition, out, fill=held.reshape(()))
        while (inverse := producer(condition, "Not")) is not None and inverse.inputs[0] is not None:
            condition, holds = inverse.inputs[0], not holds
        last = traced.steps[-1] if traced.steps else None
        same = last.fill if last is not None and last.at.shape == out.shape else None
        if last is not None and same is not None and same.tobytes() == held.tobytes():
            last.conditions.append((condition, holds))  # one fill for both: one condition
            return traced
        step.conditions.append((condition, holds))
        traced.steps.append(step)
        return traced
    return None


def combine_steps(op: Builder, steps: list[MaskStep]) -> list[MaskStep]:
    """The steps, where there are more than an operator has by fewer.

    (z + p) + m is z + (p + m) for every z and m, where p is 0 or -inf throughout: where p is -inf
    both are -inf, or NaN where z or m is NaN or +inf. (z + m) + m is z + 2 m but for a rounding at
    the size of m, as the product z has more of, where m is a constant of some hundred at most. No
    other masks may be added up before.
    """
    combined: list[MaskStep] = []
    for i, step in enumerate(steps):
        last = combined[-1] if combined else None
        many = len(combined) + len(steps) - i > MOST
        if many and last is not None and _joins(last, step):
            total = op.Add(last.value, step.value)
            total.dtype = step.value.dtype
            if last.value.shape is not None and step.value.shape is not None:
                total.shape = ir.Shape(_broadcast_sizes(last.value.shape, step.value.shape))
            combined[-1] = replace(step, value=total)
        else:
            combined.append(step)
    return combined


def _joins(first: MaskStep, second: MaskStep) -> bool:
    added = first.fill is None and second.fill is None
    plain = not first.negated and not second.negated and first.factor == second.factor
    same = first.at.shape is not None and first.at.shape == second.at.shape
    return (
        added
        and plain
        and same
        and (
            _is_zero_or_minus_infinity(first.value)
            or (first.value is second.value and _is_small_float32(first.value))
        )
    )


def _is_small_float32(value: ir.Value) -> bool:
    held = const_array(_view_source(value))
    return held is not None and held.dtype == np.float32 and bool((np.abs(held) <= SMALL).all())


def _view_source(value: ir.Value | None) -> ir.Value | None:
    while (view := producer(value, *_VIEWS)) is not None:
        value = view.inputs[0]
    return value


def _is_zero_or_minus_infinity(value: ir.Value | None) -> bool:
    value = _view_source(value)
    chosen = producer(value, "Where")
    sources = chosen.inputs[1:] if chosen is not None else [value]
    arrays = [const_array(v) for v in sources]
    return all(a is not None and ((a == 0) | np.isneginf(a)).all() for a in arrays)


def _broadcast_sizes(a: ir.Shape, b: ir.Shape) -> list[int | str | ir.SymbolicDim | None]:
    size = max(len(a), len(b))
    pairs = zip([1] * (size - len(a)) + [*a], [1] * (size - len(b)) + [*b], strict=True)
    return [y if x == 1 else x if y in (1, x) else None for x, y in pairs]

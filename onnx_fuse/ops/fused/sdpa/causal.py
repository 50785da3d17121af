"""Proof that a mask hides from each query just the keys behind it, whatever the sizes are.

A mask is followed up to constants and positions. Its elements are then one number where an integer
combination of their indices is at least zero, and another number elsewhere. Nothing is assumed of
open sizes but that an axis which two operands share comes from one and the same source in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from onnx_fuse.onnx.build import const_array, dim, rank
from onnx_fuse.ops.fused.sdpa.scores import Step, same_size
from onnx_fuse.ops.rewrite import attribute, constant_ints, is_float, scalar

CAUSAL = "causal"
"""An attribute that kernels read and no body has: the step, counted from 1, whose mask is proved to
hide the keys behind each query where it has the sizes of the scores. Kernels then read no mask.
Less than 0: it hides them by -inf, and may hide more, so that it is read for the others."""

HIDDEN = -1e37
"""What is added to a hidden logit is this or less: its weight is 0 beside a logit that is above."""

_DEPTH = 24
"""How many nodes above a mask its positions are looked for."""
_LARGEST = 1 << 24
"""Elements of a constant that is looked at, and the largest position that float32 holds."""


@dataclass(frozen=True)
class _Form:
    """What the elements of a tensor are, by their indices; axes are counted from the last, -1.

    The value is `number`, if there is one, else the sum s of `offset` and each index times its
    factor; with `choice` (yes, no) it is `yes` where s >= 0, else `no`. NaN is a number not known.
    """

    number: float | None = None
    factors: tuple[tuple[int, int], ...] = ()
    offset: int = 0
    choice: tuple[float, float] | None = None
    sizes: dict[int, object] = field(default_factory=dict, compare=False)
    """Where the sizes of axes come from; those that are not listed are 1."""

    @property
    def turned(self) -> _Form:
        """The same choice by the opposite sum."""
        assert self.choice is not None
        factors = tuple((axis, -factor) for axis, factor in self.factors)
        return replace(
            self, factors=factors, offset=-self.offset - 1, choice=(self.choice[1], self.choice[0])
        )


def causal_step(steps: list[Step]) -> int:
    """What `CAUSAL` is to be: the step by which key j is hidden from query i where j > i; 0: none.

    It must be the last one. Of two steps it must hide by -inf, so that a row which the other step
    hides as a whole stays as it is.
    """
    if not steps or len(steps) > 2:
        return 0
    step, found = steps[-1], 0
    if step.factor != 1 or step.negated:
        return 0
    for value, holds in step.conditions or [(step.value, True)]:
        form = _form(value, _DEPTH)
        if form is None or form.choice is None:
            continue
        if dict(form.factors) == {-2: 1, -1: -1}:
            form = form.turned
        if dict(form.factors) != {-2: -1, -1: 1} or form.offset != -1:
            continue
        assert form.choice is not None
        hidden, seen = form.choice
        if step.fill is not None:
            known = not np.isnan(hidden) and bool(hidden) != holds
            hidden = float(step.fill) if known else np.nan
            exact = len(step.conditions) == 1 and not np.isnan(seen) and bool(seen) == holds
        else:
            exact = seen == 0
        if not {-2, -1} <= set(form.sizes) or np.isnan(hidden):
            continue
        if exact and hidden <= (HIDDEN if len(steps) == 1 else -np.inf):
            return len(steps)
        found = -len(steps) if hidden == -np.inf else found
    return found


def is_idle(step: Step, logits: ir.Value) -> bool:
    """Whether a step is proved to leave all logits as they are, whatever the sizes are.

    Its mask is 0 everywhere, or its conditions always hold, and none of them has an axis that the
    logits before it lack.
    """
    if step.factor != 1:
        return False
    for value, holds in step.conditions or [(step.value, True)]:
        form = _form(value, _DEPTH)
        if form is None or form.number is None or np.isnan(form.number):
            return False
        kept = form.number == 0 if step.fill is None else bool(form.number) == holds
        axes = rank(value)
        if not kept or axes is None or axes > (rank(logits) or 0):
            return False
        if any(dim(value, i) != 1 and not same_size(value, i, logits, i) for i in range(-axes, 0)):
            return False
    return True


def _form(value: ir.Value | None, depth: int) -> _Form | None:
    """What the elements of `value` are, None where that is not known."""
    if value is None:
        return None
    array = const_array(value)
    if array is not None:
        return _constant(array)
    node = value.producer()
    if node is None or node.domain or not depth:
        return None
    if node.op_type == "Range":
        return _range(node)
    if node.op_type == "Trilu":
        return _triangle(node, depth)
    if node.op_type in ("ConstantOfShape", "Expand"):
        return _filled(node, depth)
    if node.op_type in _VIEWS:
        form = _form(node.inputs[0], depth - 1)
        return None if form is None else _VIEWS[node.op_type](node, form)
    if node.op_type == "Where":
        return _where([_form(v, depth - 1) for v in node.inputs])
    if node.op_type == "And":
        return _both(node, depth)
    if node.op_type in _POINTWISE:
        forms = [_form(v, depth - 1) for v in node.inputs]
        return _pointwise(node.op_type, [f for f in forms if f is not None], len(forms))
    return None


# ---- sources -------------------------------------------------------------------------------------


def _constant(array: np.ndarray) -> _Form | None:
    """A number, positions along one axis, or a triangle in the last two axes."""
    if not 0 < array.size <= _LARGEST or array.dtype.kind not in "biuf":
        return None
    sizes: dict[int, object] = {
        axis: array.shape[axis] for axis in range(-array.ndim, 0) if array.shape[axis] != 1
    }
    for axis in range(array.ndim - 2):  # batches that are all alike
        if (array == array.take([0], axis)).all():
            array = array.take([0], axis)
    flat = array.reshape(array.shape[-2:] if array.size == np.prod(array.shape[-2:]) else (-1,))
    first = flat.reshape(-1)[0]
    if (flat == first).all():
        return _Form(float(first), sizes=sizes)
    if flat.ndim == 2 and {-2, -1} <= set(sizes):
        above = np.triu(np.ones(flat.shape, bool), 1)
        high, low = np.unique(flat[above]), np.unique(flat[~above])
        if len(high) == len(low) == 1:
            choice = (float(high[0]), float(low[0]))
            return _Form(None, ((-2, -1), (-1, 1)), -1, choice, sizes)
    if array.dtype.kind not in "iu":
        return None
    varied = [axis for axis in sizes if array.shape[axis] > 1 and np.diff(array, axis=axis).any()]
    if len(varied) == 1:
        (axis,) = varied
        line = np.moveaxis(array, axis, -1).reshape(-1)[: array.shape[axis]].astype(np.int64)
        step = int(line[1] - line[0])
        if (np.diff(line) == step).all():
            return _Form(None, ((axis, step),), int(first), None, sizes)
    return None


def _range(node: ir.Node) -> _Form | None:
    """The form of a Range of integers: start, start + delta, ..."""
    start, delta = scalar(node.inputs[0]), scalar(node.inputs[2])
    if start is None or delta is None or is_float(node.outputs[0]) or not delta:
        return None
    source = (start, delta, node.inputs[1])
    return _Form(None, ((-1, int(delta)),), int(start), None, {-1: source})


def _filled(node: ir.Node, depth: int) -> _Form | None:
    """The form of a tensor that is one number everywhere."""
    out, axes = node.outputs[0], rank(node.outputs[0])
    if node.op_type == "Expand":
        form = _form(node.inputs[0], depth - 1)
        number = None if form is None else form.number
    else:
        fill = node.attributes.get("value")
        number = 0.0 if fill is None else float(fill.value.numpy().reshape(-1)[0])
    if number is None or axes is None:
        return None
    return _Form(number, sizes={axis: (out, axis) for axis in range(-axes, 0)})


def _triangle(node: ir.Node, depth: int) -> _Form | None:
    """The form of a Trilu: a number above or below a diagonal, 0 elsewhere."""
    form = _form(node.inputs[0], depth - 1)
    at = constant_ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else [0]
    if form is None or form.number is None or not at or not {-2, -1} <= set(form.sizes):
        return None
    upper = bool(attribute(node, "upper", 1))
    # the upper triangle has j - i >= k; the lower one has what the one from k + 1 on has not
    offset, choice = (-at[0], (form.number, 0.0)) if upper else (-at[0] - 1, (0.0, form.number))
    return _Form(None, ((-2, -1), (-1, 1)), offset, choice, form.sizes)


# ---- views ---------------------------------------------------------------------------------------


def _permuted(form: _Form, places: dict[int, int]) -> _Form:
    """The form with its axes elsewhere."""
    factors = tuple(sorted((places[axis], factor) for axis, factor in form.factors))
    return replace(form, factors=factors, sizes={places[a]: s for a, s in form.sizes.items()})


def _unsqueeze(node: ir.Node, form: _Form) -> _Form | None:
    axes, size = constant_ints(node.inputs[1]), rank(node.inputs[0])
    if axes is None or size is None:
        return None
    total = size + len(axes)
    new = {axis % total for axis in axes}
    kept = [axis - total for axis in range(total) if axis not in new]
    return _permuted(form, dict(zip(range(-size, 0), kept, strict=True)))


def _squeeze(node: ir.Node, form: _Form) -> _Form | None:
    size = rank(node.inputs[0])
    axes = constant_ints(node.inputs[1]) if len(node.inputs) > 1 else None
    if axes is None or size is None:
        return None
    gone = {axis % size - size for axis in axes}
    kept = [axis for axis in range(-size, 0) if axis not in gone]
    if gone & set(form.sizes):
        return None
    return _permuted(form, {axis: i - len(kept) for i, axis in enumerate(kept)})


def _reshape(node: ir.Node, form: _Form) -> _Form | None:
    """One axis among axes of 1."""
    shape, size = constant_ints(node.inputs[1]), rank(node.inputs[0])
    if shape is None or size != 1 or sorted(shape) != [-1, *[1] * (len(shape) - 1)]:
        return None
    return _permuted(form, {-1: shape.index(-1) - len(shape)})


def _slice(node: ir.Node, form: _Form) -> _Form | None:
    """The form of a Slice that takes every element from the first one on."""
    starts, size = constant_ints(node.inputs[1]), rank(node.inputs[0])
    steps = constant_ints(node.inputs[4]) if len(node.inputs) > 4 else [1]
    given = node.inputs[3] if len(node.inputs) > 3 else None
    axes = constant_ints(given) if given is not None else list(range(len(starts or ())))
    if starts is None or axes is None or size is None or steps is None:
        return None
    if any(starts) or any(step != 1 for step in steps):
        return None
    sizes = {**form.sizes}
    for axis in (axis % size - size for axis in axes):
        if axis in sizes:
            sizes[axis] = (node.inputs[2], axis, sizes[axis])
    return replace(form, sizes=sizes)


def _cast(node: ir.Node, form: _Form) -> _Form | None:
    """The form after a Cast: numbers in any type, positions in a type of integers."""
    if form.number is None and form.choice is None:
        return None if is_float(node.outputs[0]) else form
    to = node.outputs[0].dtype
    if to is None:
        return None
    with np.errstate(all="ignore"):
        return _mapped(form, lambda x: float(np.float64(x).astype(to.numpy())))


_VIEWS: dict[str, Callable[[ir.Node, _Form], _Form | None]] = {
    "Identity": lambda node, form: form,
    "Cast": _cast,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Slice": _slice,
}

# ---- element by element --------------------------------------------------------------------------

_POINTWISE: dict[str, Callable[..., np.generic]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Neg": np.negative,
    "Not": np.logical_not, "Equal": np.equal, "Greater": np.greater, "Less": np.less,
    "GreaterOrEqual": np.greater_equal, "LessOrEqual": np.less_equal,
}  # fmt: skip


def _mapped(form: _Form, work: Callable[[float], float]) -> _Form:
    """A number or a choice under a function of numbers."""
    if form.number is not None:
        return replace(form, number=work(form.number))
    assert form.choice is not None
    high, low = (x if np.isnan(x) else work(x) for x in form.choice)
    return replace(form, choice=(high, low))


def _joined(forms: list[_Form]) -> dict[int, object] | None:
    """The sizes of a result; None where operands share an axis and its source is not the same."""
    sizes: dict[int, object] = {}
    for form in forms:
        for axis, source in form.sizes.items():
            if sizes.setdefault(axis, source) != source:
                return None
    return sizes


def _pointwise(op_type: str, forms: list[_Form], count: int) -> _Form | None:
    """Sums and differences of positions, their comparison, and arithmetic on numbers."""
    sizes = _joined(forms)
    if len(forms) != count or sizes is None:
        return None
    work = _POINTWISE[op_type]
    if len(forms) == 1:
        one = forms[0]
        if one.number is None and one.choice is None:
            return None
        return _mapped(one, lambda x: float(work(x)))
    a, b = forms
    with np.errstate(all="ignore"):
        if b.number is not None and (a.number is not None or a.choice is not None):
            right = b.number
            return replace(_mapped(a, lambda x: float(work(x, right))), sizes=sizes)
        if a.number is not None and b.choice is not None:
            left = a.number
            return replace(_mapped(b, lambda x: float(work(left, x))), sizes=sizes)
    if a.choice is not None or b.choice is not None:
        return None
    return _of_positions(op_type, a, b, sizes)


def _of_positions(op_type: str, a: _Form, b: _Form, sizes: dict[int, object]) -> _Form | None:
    """Positions and integers, of which not both are plain numbers."""
    for form in (a, b):
        if form.number is not None and not form.number.is_integer():
            return None

    def combined(sign: int) -> _Form:
        factors = dict(a.factors)
        for axis, factor in b.factors:
            factors[axis] = factors.get(axis, 0) + sign * factor
        left, right = (f.offset if f.number is None else int(f.number) for f in (a, b))
        kept = tuple(sorted((axis, factor) for axis, factor in factors.items() if factor))
        return _Form(None, kept, left + sign * right, None, sizes)

    if op_type in ("Add", "Sub"):
        return combined(1 if op_type == "Add" else -1)
    difference = combined(-1)
    if op_type in ("GreaterOrEqual", "Less"):  # a - b >= 0, or not
        return replace(difference, choice=(1.0, 0.0) if op_type != "Less" else (0.0, 1.0))
    if op_type in ("Greater", "LessOrEqual"):  # a - b - 1 >= 0, or not
        choice = (1.0, 0.0) if op_type == "Greater" else (0.0, 1.0)
        return replace(difference, offset=difference.offset - 1, choice=choice)
    return None


def _both(node: ir.Node, depth: int) -> _Form | None:
    """False where one operand is: what the other one may be there does not matter."""
    values = node.inputs[:2]
    forms = [_form(value, depth - 1) for value in values]
    for i in (0, 1):
        form, other, own, beside = forms[i], forms[1 - i], values[i], values[1 - i]
        if other is not None and other.number and form is not None:
            sizes = _joined([form, other])
            return None if sizes is None else replace(form, sizes=sizes)
        if form is None or form.choice is None or own is None or beside is None:
            continue
        axes = rank(beside)
        if axes is None or not all(
            -axis > axes or dim(beside, axis) == 1 or same_size(own, axis, beside, axis)
            for axis in form.sizes
        ):
            continue
        high, low = (0.0 if chosen == 0 else np.nan for chosen in form.choice)
        return replace(form, choice=(high, low))
    return None


def _where(forms: list[_Form | None]) -> _Form | None:
    """One of two numbers by a choice, or the one that a condition always chooses."""
    condition, yes, no = forms
    if condition is None or yes is None or no is None:
        return None
    sizes = _joined([condition, yes, no])
    if sizes is None or yes.number is None or no.number is None:
        return None
    if condition.number is not None:
        return replace(yes if condition.number else no, sizes=sizes)
    if condition.choice is None:
        return None
    high, low = (
        chosen if np.isnan(chosen) else yes.number if chosen else no.number
        for chosen in condition.choice
    )
    return replace(condition, choice=(high, low), sizes=sizes)

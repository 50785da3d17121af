"""Proof that a mask hides from each query just the keys outside its window, whatever the sizes are.

A mask is followed up to constants and positions. Its elements are then one number where integer
combinations of their indices are at least zero, and another number elsewhere. Nothing is assumed of
open sizes but that an axis which two operands share comes from one and the same source in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import const_array, dim, extent, rank, required
from onnx_fuse.ops.fused.sdpa.scores import MaskStep
from onnx_fuse.ops.rules import attribute, constant_ints, is_float, scalar
from onnx_fuse.ops.shape_ops import same_size

CAUSAL = "causal"
"""Attribute for kernels, not used by bodies: the index, from 1, of the mask that provably hides the
keys outside each query's window. Kernels then read no mask. Negative: the mask hides these keys
with -inf and may hide more, so that kernels read it for the other keys."""

WINDOW = "window"
"""Attribute beside `CAUSAL`, (left, right): query i sees the keys from i - left to i + right; -1 is
no bound. Without it the mask is causal: (-1, 0)."""

HIDDEN = -1e37
"""Mask values at or below this hide a key: its weight is 0 if any logit of the row is visible."""

_DEPTH = 32
"""The search for a mask's positions visits at most this many nodes before it."""
_LARGEST = 1 << 24
"""Elements of a constant that is looked at, and the largest position that float32 holds."""


_Factors = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Form:
    """What the elements of a tensor are, by their indices; axes are counted from the last, -1.

    The value is the sum of `offset` and each index times its factor; with `choice` (yes, no) it is
    `yes` where the sums of all `conditions` are at least 0, else `no`. NaN is a number not known.
    """

    factors: _Factors = ()
    offset: int = 0
    absolute: bool = False
    """The value is the sum without its sign."""
    choice: tuple[float, float] | None = None
    conditions: tuple[tuple[_Factors, int], ...] = ()
    """(factors, offset) of sums; without any the value is `yes` everywhere."""
    sizes: dict[int, object] = field(default_factory=dict, compare=False)
    """Where the sizes of axes come from; those that are not listed are 1."""

    @property
    def number(self) -> float | None:
        """The value, if it is one number everywhere."""
        return self.choice[0] if self.choice is not None and not self.conditions else None

    @property
    def is_position(self) -> bool:
        """Whether the value is the sum itself."""
        return self.choice is None and not self.absolute

    @property
    def both_ways(self) -> tuple[_Form, ...]:
        """The form and, where there is one condition, the same choice by the opposite one."""
        if self.choice is None or len(self.conditions) != 1:
            return (self,)
        ((factors, offset),) = self.conditions
        opposite = tuple((axis, -factor) for axis, factor in factors), -offset - 1
        choice = (self.choice[1], self.choice[0])
        return self, replace(self, choice=choice, conditions=(opposite,))

    @property
    def window(self) -> tuple[int, int] | None:
        """(left, right) if `yes` is at [i, j] where i - left <= j <= i + right; -1 is no bound.

        None for any other form, and where j = i is not within.
        """
        bounds = [-1, -1]
        for factors, offset in self.conditions:
            side = (((-2, -1), (-1, 1)), ((-2, 1), (-1, -1)))
            if offset < 0 or factors not in side or bounds[at := side.index(factors)] >= 0:
                return None
            bounds[at] = offset
        return bounds[0], bounds[1]


def _everywhere(number: float, sizes: dict[int, object] | None = None) -> _Form:
    return _Form(choice=(number, number), sizes=sizes or {})


def causal_step(steps: list[MaskStep]) -> tuple[int, tuple[int, int]]:
    """What `CAUSAL` and `WINDOW` are to be; (0, (-1, -1)) where no step is proved to hide keys.

    It must be the last one. Of two steps it must hide by -inf, so that a row which the other step
    hides as a whole stays as it is.
    """
    weaker: tuple[int, tuple[int, int]] = 0, (-1, -1)
    if not steps or len(steps) > 2:
        return weaker
    step = steps[-1]
    if step.factor != 1 or step.negated:
        return weaker
    for value, holds in step.conditions or [(step.value, True)]:
        form = _form(value, _DEPTH)
        if form is None or not form.conditions or not {-2, -1} <= set(form.sizes):
            continue
        for way in form.both_ways:
            window, (seen, hidden) = way.window, required(way.choice)
            if step.fill is not None:
                decided = not np.isnan(hidden) and bool(hidden) != holds
                hidden = float(step.fill) if decided else np.nan
                exact = len(step.conditions) == 1 and not np.isnan(seen) and bool(seen) == holds
            else:
                exact = seen == 0
            if window is None or np.isnan(hidden):
                continue
            if exact and hidden <= (HIDDEN if len(steps) == 1 else -np.inf):
                return len(steps), window
            if hidden == -np.inf:
                weaker = -len(steps), window
    return weaker


def is_idle(step: MaskStep, logits: ir.Value) -> bool:
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
        neutral = form.number == 0 if step.fill is None else bool(form.number) == holds
        axes = rank(value)
        if not neutral or axes is None or axes > (rank(logits) or 0):
            return False
        if any(dim(value, i) != 1 and not same_size(value, i, logits, i) for i in range(-axes, 0)):
            return False
    return True


def _form(value: ir.Value | None, depth: int) -> _Form | None:
    if value is None:
        return None
    array = const_array(value)
    if array is not None:
        return _constant(array)
    node = value.producer()
    if node is None or node.domain or not depth:
        return None
    return _FORMS[node.op_type](node, depth) if node.op_type in _FORMS else None


def _operand_forms(node: ir.Node, depth: int) -> list[_Form | None]:
    return [_form(value, depth - 1) for value in node.inputs]


# ---- sources -------------------------------------------------------------------------------------


def _constant(array: np.ndarray) -> _Form | None:
    """A number, positions along one axis, or a band of diagonals in the last two axes."""
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
        return _everywhere(float(first), sizes)
    if flat.ndim == 2 and {-2, -1} <= set(sizes):
        return _band(flat, sizes)
    if array.dtype.kind not in "iu":
        return None
    varied = [axis for axis in sizes if array.shape[axis] > 1 and np.diff(array, axis=axis).any()]
    if len(varied) == 1:
        (axis,) = varied
        line = np.moveaxis(array, axis, -1).reshape(-1)[: array.shape[axis]].astype(np.int64)
        step = int(line[1] - line[0])
        if (np.diff(line) == step).all():
            return _Form(((axis, step),), int(first), sizes=sizes)
    return None


def _band(array: np.ndarray, sizes: dict[int, object]) -> _Form | None:
    """The form of a matrix of two numbers, one on neighbouring diagonals about the main one."""
    rows, columns = array.shape
    line = np.concatenate([array[:0:-1, 0], array[0]])  # of each diagonal, from the lowest one
    diagonals = np.lib.stride_tricks.sliding_window_view(line, columns)[::-1]
    inside = line == line[rows - 1]
    (places,) = inside.nonzero()
    if np.ptp(places) + 1 != len(places) or not (diagonals == array).all():
        return None
    others = np.unique(line[~inside])
    if len(others) != 1:
        return None
    bounds = []
    if places[0] > 0:
        bounds.append((((-2, -1), (-1, 1)), int(rows - 1 - places[0])))
    if places[-1] < len(line) - 1:
        bounds.append((((-2, 1), (-1, -1)), int(places[-1] - rows + 1)))
    choice = (float(line[rows - 1]), float(others[0]))
    return _Form(choice=choice, conditions=tuple(bounds), sizes=sizes)


def _range(node: ir.Node, depth: int) -> _Form | None:
    start, delta = scalar(node.inputs[0]), scalar(node.inputs[2])
    if start is None or delta is None or is_float(node.outputs[0]) or not delta:
        return None
    source = _source(node, -1, (start, delta, node.inputs[1]))
    return _Form(((-1, int(delta)),), int(start), sizes={-1: source})


def _source(node: ir.Node, axis: int, origin: object) -> object:
    """Where the size of a result's axis comes from: itself or its name, else what makes it."""
    size_or_name = extent(node.outputs[0], axis)
    return origin if size_or_name is None else size_or_name


def _filled(node: ir.Node, depth: int) -> _Form | None:
    """The form of a tensor that is one number everywhere, or of positions along further axes."""
    axes = rank(node.outputs[0])
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get("value")
        form = _everywhere(0.0 if fill is None else float(fill.value.numpy().reshape(-1)[0]))
    else:
        operand = _form(node.inputs[0], depth - 1)
        if operand is None or (node.op_type == "CumSum" and operand.number != 0):
            return None
        form = operand
    if axes is None:
        return None
    sizes = _sizes(node, axes)
    if form.number is None and any(sizes.get(a, 1) != source for a, source in form.sizes.items()):
        return None
    return replace(form, sizes=sizes)


def _sizes(node: ir.Node, axes: int) -> dict[int, object]:
    """Where the sizes of a result of so many axes come from; without those that are 1."""
    sources = {axis: _source(node, axis, (node.outputs[0], axis)) for axis in range(-axes, 0)}
    return {axis: source for axis, source in sources.items() if source != 1}


def _gathered(node: ir.Node, depth: int) -> _Form | None:
    """Elements of what is one number, or positions along its last axis, by positions."""
    form, axes = _form(node.inputs[0], depth - 1), rank(node.outputs[0])
    if form is None or axes is None or not (form.is_position or form.number is not None):
        return None
    if form.number is not None:
        return _everywhere(form.number, _sizes(node, axes))
    indices = None if node.inputs[1] is None else node.inputs[1].producer()
    if indices is None or indices.op_type != "Concat" or attribute(node, "batch_dims", 0):
        return None
    if len(indices.inputs) != rank(node.inputs[0]) or dict(form.factors).keys() != {-1}:
        return None
    if attribute(indices, "axis", 0) not in (-1, axes) or dim(indices.inputs[-1], -1) != 1:
        return None
    at = _form(indices.inputs[-1], depth - 1)
    if at is None or not at.is_position or at.offset < 0:
        return None
    if any(axis == -1 or factor < 0 for axis, factor in at.factors):
        return None  # which counts from the end
    ((_, factor),) = form.factors
    factors = tuple((axis + 1, factor * step) for axis, step in at.factors)
    return _Form(factors, form.offset + factor * at.offset, sizes=_sizes(node, axes))


def _continued(node: ir.Node, depth: int) -> _Form | None:
    """Positions behind one number that continues them backwards."""
    if attribute(node, "axis", 0) not in (-1, (rank(node.outputs[0]) or 0) - 1):
        return None
    if len(node.inputs) != 2 or node.inputs[0] is None or dim(node.inputs[0], -1) != 1:
        return None
    first, rest = _operand_forms(node, depth)
    if first is None or rest is None or not rest.is_position:
        return None
    if len(rest.factors) != 1 or rest.factors[0][0] != -1:
        return None
    offset = rest.offset - rest.factors[0][1]
    if first.number != offset:
        return None
    source = _source(node, -1, (node.outputs[0], -1))
    return replace(rest, offset=offset, sizes={**rest.sizes, -1: source})


def _triangle(node: ir.Node, depth: int) -> _Form | None:
    """The form of a Trilu: a number above or below a diagonal, 0 elsewhere."""
    form = _form(node.inputs[0], depth - 1)
    at = constant_ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else [0]
    if form is None or not at or not {-2, -1} <= set(form.sizes):
        return None
    upper = bool(attribute(node, "upper", 1))
    # the upper triangle has j - i >= k; the lower one has what the one from k + 1 on has not
    offset, choice = (-at[0], (1.0, 0.0)) if upper else (-at[0] - 1, (0.0, 1.0))
    inside = (((-2, -1), (-1, 1)), offset)
    triangle = _Form(choice=choice, conditions=(inside,), sizes=form.sizes)
    return _combined([triangle, form], lambda inside, x: x if inside else 0.0)


# ---- views ---------------------------------------------------------------------------------------


def _permuted(form: _Form, places: dict[int, int]) -> _Form:
    def moved(factors: _Factors) -> _Factors:
        return tuple(sorted((places[axis], factor) for axis, factor in factors))

    conditions = tuple((moved(factors), offset) for factors, offset in form.conditions)
    sizes = {places[axis]: source for axis, source in form.sizes.items()}
    return replace(form, factors=moved(form.factors), conditions=conditions, sizes=sizes)


def _moved(node: ir.Node, form: _Form) -> _Form | None:
    """The form behind a view that adds or takes away axes of 1, or moves one axis among such."""
    numbers = constant_ints(node.inputs[1]) if len(node.inputs) > 1 else None
    size = rank(node.inputs[0])
    if numbers is None or size is None:
        return None
    if node.op_type == "Reshape":
        if size != 1 or sorted(numbers) != [-1, *[1] * (len(numbers) - 1)]:
            return None
        return _permuted(form, {-1: numbers.index(-1) - len(numbers)})
    more = len(numbers) if node.op_type == "Unsqueeze" else 0
    ones = {axis % (size + more) for axis in numbers}
    wide = [axis - size - more for axis in range(size + more) if axis not in ones]
    narrow = range(-len(wide), 0)
    places = dict(zip(narrow, wide, strict=True) if more else zip(wide, narrow, strict=True))
    return _permuted(form, places) if places.keys() >= form.sizes.keys() else None


def _slice(node: ir.Node, form: _Form) -> _Form | None:
    """The form of a Slice that takes every element from one on, or that one alone."""
    starts, size = constant_ints(node.inputs[1]), rank(node.inputs[0])
    steps = constant_ints(node.inputs[4]) if len(node.inputs) > 4 else None
    axes_value = node.inputs[3] if len(node.inputs) > 3 else None
    axes = constant_ints(axes_value) if axes_value is not None else list(range(len(starts or ())))
    if starts is None or axes is None or size is None or any(start < 0 for start in starts):
        return None
    if any(step != 1 for step in steps or [1]):
        return None
    sizes, factors, offset = {**form.sizes}, dict(form.factors), form.offset
    for axis, start in zip((axis % size - size for axis in axes), starts, strict=True):
        if start and form.conditions:
            return None
        offset += start * factors.get(axis, 0)
        if dim(node.outputs[0], axis) == 1 and not form.conditions:
            factors.pop(axis, None)
            sizes.pop(axis, None)
        elif axis in sizes:
            sizes[axis] = _source(node, axis, (node.inputs[2], axis, sizes[axis]))
    if form.choice is None and not factors:
        return _everywhere(float(offset), sizes)
    return replace(form, factors=tuple(sorted(factors.items())), offset=offset, sizes=sizes)


def _cast(node: ir.Node, form: _Form) -> _Form | None:
    """The form after a Cast: numbers in any type, positions in a type of integers."""
    if form.choice is None:
        return None if is_float(node.outputs[0]) else form
    to = node.outputs[0].dtype
    if to is None:
        return None
    return _combined([form], _of_known(lambda x: np.float64(x).astype(to.numpy())))


_VIEWS: dict[str, Callable[[ir.Node, _Form], _Form | None]] = {
    "Identity": lambda node, form: form,
    "Cast": _cast,
    "Unsqueeze": _moved,
    "Squeeze": _moved,
    "Reshape": _moved,
    "Slice": _slice,
}

# ---- element by element --------------------------------------------------------------------------

_POINTWISE: dict[str, Callable[..., np.generic]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Neg": np.negative,
    "Not": np.logical_not, "Or": np.logical_or, "Log": np.log,
    "Equal": np.equal, "Greater": np.greater, "Less": np.less,
    "GreaterOrEqual": np.greater_equal, "LessOrEqual": np.less_equal,
}  # fmt: skip


def _of_known(work: Callable[..., np.generic]) -> Callable[..., float]:
    """The function of numbers, which knows nothing of a number not known."""
    return lambda *values: np.nan if np.isnan(values).any() else float(work(*values))


def _joined(forms: Sequence[_Form]) -> dict[int, object] | None:
    """The sizes of a result; None where operands share an axis and its source is not the same."""
    sizes: dict[int, object] = {}
    for form in forms:
        for axis, source in form.sizes.items():
            if sizes.setdefault(axis, source) != source:
                return None
    return sizes


def _pointwise(node: ir.Node, depth: int) -> _Form | None:
    """Sums and differences of positions, their comparison, and arithmetic on numbers."""
    forms = [form for form in _operand_forms(node, depth) if form is not None]
    if len(forms) != len(node.inputs):
        return None
    if all(form.choice is not None for form in forms):
        return _combined(forms, _of_known(_POINTWISE[node.op_type]))
    sizes = _joined(forms)
    if sizes is None or len(forms) != 2 or any(form.conditions for form in forms):
        return None
    a, b = forms
    return _of_positions(node.op_type, a, b, sizes)


def _combined(forms: Sequence[_Form], work: Callable[..., float]) -> _Form | None:
    """Numbers and choices under a function, if it gives one number but where all say yes."""
    sizes = _joined(forms)
    if sizes is None or any(form.choice is None for form in forms):
        return None
    for ways in product(*(form.both_ways for form in forms)):
        choices = [required(way.choice)[: 1 + bool(way.conditions)] for way in ways]
        with np.errstate(all="ignore"):
            values = [work(*each) for each in product(*choices)]
        if len(values) > 2 and (np.isnan(values[1:]).any() or len(set(values[1:])) > 1):
            continue
        conditions = tuple(condition for way in ways for condition in way.conditions)
        return _Form(choice=(values[0], values[-1]), conditions=conditions, sizes=sizes)
    return None


def _of_positions(op_type: str, a: _Form, b: _Form, sizes: dict[int, object]) -> _Form | None:
    """Positions and integers, of which not both are plain numbers."""
    for form in (a, b):
        if form.number is not None and not form.number.is_integer():
            return None
    if a.absolute or b.absolute:
        return _of_distances(op_type, a, b, sizes)

    def combined(sign: int) -> _Form:
        factors = dict(a.factors)
        for axis, factor in b.factors:
            factors[axis] = factors.get(axis, 0) + sign * factor
        left, right = (f.offset if f.number is None else int(f.number) for f in (a, b))
        terms = tuple(sorted((axis, factor) for axis, factor in factors.items() if factor))
        total = left + sign * right
        return _Form(terms, total, sizes=sizes) if terms else _everywhere(float(total), sizes)

    if op_type in ("Add", "Sub"):
        return combined(1 if op_type == "Add" else -1)
    difference = combined(-1)
    if difference.number is not None and op_type in ("Equal", *_COMPARISONS):
        return _everywhere(float(_POINTWISE[op_type](difference.number, 0.0)), sizes)
    if op_type not in _COMPARISONS:
        return None
    less, choice = _COMPARISONS[op_type]
    offset, signs = difference.offset - less, {factor > 0 for _, factor in difference.factors}
    for sign, number in zip((True, False), choice, strict=True):
        if signs == {sign} and (offset >= 0) == sign:  # always, as no index is below zero
            return _everywhere(number, sizes)
    return _Form(choice=choice, conditions=((difference.factors, offset),), sizes=sizes)


_COMPARISONS = {
    "GreaterOrEqual": (0, (1.0, 0.0)), "Less": (0, (0.0, 1.0)),
    "Greater": (1, (1.0, 0.0)), "LessOrEqual": (1, (0.0, 1.0)),
}  # fmt: skip
"""By what is less than the difference of the operands, and the choice by whether that is >= 0."""
_MIRRORED = {"Less": "Greater", "LessOrEqual": "GreaterOrEqual",
             "Greater": "Less", "GreaterOrEqual": "LessOrEqual"}  # fmt: skip


def _of_distances(op_type: str, a: _Form, b: _Form, sizes: dict[int, object]) -> _Form | None:
    """|s| compared with an integer n: |s| <= n is n - s >= 0 and n + s >= 0."""
    if op_type not in _MIRRORED:
        return None
    if b.absolute:
        a, b, op_type = b, a, _MIRRORED[op_type]
    if b.number is None:
        return None
    less, (far, near) = _COMPARISONS[op_type]
    most = int(b.number) - 1 + less
    back = tuple((axis, -factor) for axis, factor in a.factors)
    within = (back, most - a.offset), (a.factors, most + a.offset)
    return _Form(choice=(near, far), conditions=within, sizes=sizes)


def _both(node: ir.Node, depth: int) -> _Form | None:
    """False where one operand is: what the other one may be there does not matter."""

    def both(x: float, y: float) -> float:
        return 0.0 if 0 in (x, y) else x * y

    one, other = _operand_forms(node, depth)
    combined = None if one is None or other is None else _combined([one, other], both)
    if combined is not None:
        return combined
    for form, (operand, beside) in ((one, node.inputs), (other, node.inputs[::-1])):
        if form is None or not form.conditions or operand is None or beside is None:
            continue
        axes = rank(beside)
        if axes is not None and all(
            -axis > axes or dim(beside, axis) == 1 or same_size(operand, axis, beside, axis)
            for axis in form.sizes
        ):
            return _combined([form, _everywhere(np.nan)], both)
    return None


def _where(node: ir.Node, depth: int) -> _Form | None:
    """One of two numbers or choices, by a choice; or either of two, by what always holds."""
    condition, yes, no = _operand_forms(node, depth)
    if condition is None or yes is None or no is None:
        return None
    sizes = _joined([condition, yes, no])
    if sizes is not None and condition.number is not None and not np.isnan(condition.number):
        return replace(yes if condition.number else no, sizes=sizes)
    return _combined(
        [condition, yes, no], lambda holds, x, y: holds if np.isnan(holds) else x if holds else y
    )


def _absolute(node: ir.Node, depth: int) -> _Form | None:
    form = _form(node.inputs[0], depth - 1)
    return None if form is None or form.choice is not None else replace(form, absolute=True)


def _viewed(node: ir.Node, depth: int) -> _Form | None:
    form = _form(node.inputs[0], depth - 1)
    return None if form is None else _VIEWS[node.op_type](node, form)


_FORMS: dict[str, Callable[[ir.Node, int], _Form | None]] = {
    "Abs": _absolute, "And": _both, "Concat": _continued, "ConstantOfShape": _filled,
    "CumSum": _filled, "Expand": _filled, "GatherND": _gathered, "Range": _range,
    "Trilu": _triangle, "Where": _where,
    **dict.fromkeys(_VIEWS, _viewed), **dict.fromkeys(_POINTWISE, _pointwise),
}  # fmt: skip

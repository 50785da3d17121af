"""Values for a model's inputs that its graph accepts: ids, positions, masks, pixels, numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from onnx_ir import AttributeType, DataType, Node, Value

from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import const_array
from onnx_fuse.ir.traits import VIEWS


@dataclass(frozen=True)
class Role:
    """The purpose of an input.

    One of ids, positions, mask (of ones), added (0 or lowest), pixels, scales (of a Resize), sizes
    (of a shape), words, plain.
    """

    kind: str
    dtype: DataType
    bound: int | None = None
    """Exclusive, of what indexes a table."""
    words: tuple[str, ...] = ()
    """Strings that the graph knows."""

    @property
    def masks(self) -> bool:
        return self.kind in ("mask", "added")


def role_of(value: Value) -> Role:
    """The purpose of an input, from its name, its type and its readers. Raises ModelError."""
    name, dtype = (value.name or "").lower(), value.dtype
    if dtype is None:
        raise ModelError(f"input '{value.name}' has no type: give inputs (--inputs FILE.npz)")
    if dtype == DataType.STRING:
        return Role("words", dtype, words=_words(value))
    bound = index_bound(value)
    integral = dtype.is_integer() or dtype == DataType.BOOL
    named = "mask" in name or (integral and _is_flags(value))
    rank = len(value.shape) if value.shape is not None else 2
    if "position" in name and integral and rank:
        kind = "positions"
    elif bound is not None and not named:  # positions may be a mask's running sum
        kind = "ids"
    elif integral and dtype.bitwidth <= 8 and dtype != DataType.BOOL and not named:
        kind = "pixels"
    elif any(use.node.op_type == "Resize" and use.idx == 2 for use in value.uses()):
        kind = "scales"
    elif integral and not named and dtype != DataType.BOOL and is_size(value):
        kind = "sizes"
    elif not integral:
        kind = "added" if is_added(value) else "mask" if named and rank else "plain"
    elif rank and (named or dtype == DataType.BOOL or rank > 1):
        kind = "mask"
    else:
        kind = "plain"
    return Role(kind, dtype, bound)


def make(
    role: Role, shape: Sequence[int], rng: np.random.Generator, *, top: int = 2, past: int = 0
) -> Array:
    """An array of the shape: masks padded on the right, positions from `past` up, ids in bounds.

    Integers of no known bound are below `top`, sizes are `top`.
    """
    array: Array
    if role.kind == "words":
        array = rng.choice(np.array([*role.words, "other"], object), tuple(shape))
    elif role.kind == "positions" and shape:
        last = role.bound if role.bound is not None else past + shape[-1]
        start = past if past + shape[-1] <= last else 0
        array = np.broadcast_to((start + np.arange(shape[-1])) % max(last, 1), shape)
    elif role.kind == "ids":
        array = rng.integers(0, max(role.bound or 1, 1), shape)
    elif role.kind == "pixels":
        array = rng.integers(0, min(1 << (role.dtype.bitwidth - 1), 128), shape)
    elif role.masks and shape:
        array = _right_padded(shape)
        if role.kind == "added":
            array = np.where(array, 0.0, -1e4)
    elif role.kind == "scales":
        array = np.where(np.arange(shape[-1] if shape else 1) < 2, 1.0, 2.0)  # images grow
    elif role.kind == "sizes":
        array = np.full(shape, top)
    elif role.dtype.is_integer() or role.dtype == DataType.BOOL:
        array = rng.integers(0, top, shape)
    else:
        array = rng.standard_normal(shape)
    return np.asarray(np.asarray(array).astype(role.dtype.numpy()), order="C")


_FAR_WORDS = 64
"""Nodes behind an input of strings whose vocabulary is read, and words that are taken of it."""


def _words(value: Value) -> tuple[str, ...]:
    """Strings that the attributes of an input's readers list, or two plain ones."""
    todo, words = [value], dict[str, None]()
    for _ in range(_FAR_WORDS):
        if not todo:
            break
        for node in (use.node for use in todo.pop(0).uses()):
            for attribute in node.attributes.values():
                if attribute.type == AttributeType.STRINGS:
                    words |= dict.fromkeys(attribute.as_strings())
            todo.extend(v for v in node.outputs if v.dtype in (None, DataType.STRING))
    return tuple(words)[:_FAR_WORDS] or ("a word", "12")


def _is_flags(value: Value) -> bool:
    """Whether integers are read as true and false, or counted: positions are a mask's sums."""
    readers = [use.node for use in value.uses()]
    kinds = [node.attributes["to"].value for node in readers if node.op_type == "Cast"]
    return DataType.BOOL.value in kinds or any(node.op_type == "CumSum" for node in readers)


def _right_padded(shape: Sequence[int]) -> Array:
    """Ones, then zeros: the first row is full, the last is half as long."""
    rows, width = (shape[0] if len(shape) > 1 else 1), shape[-1]
    lengths = np.ceil(np.linspace(width, max(width // 2, 1), rows))
    mask = np.arange(width) < lengths.reshape(-1, *(1,) * (max(len(shape), 2) - 1))
    return np.broadcast_to(mask if len(shape) > 1 else mask[0], shape)


def inverted_mask(role: Role, array: Array) -> Array:
    """A mask with the other sense: true where it hides (booleans and integers of 0 and 1)."""
    hides = role.kind == "mask" and role.dtype == DataType.BOOL
    return ~array if hides else array


def with_hidden_row(role: Role, array: Array, *, inverted: bool) -> Array:
    """The mask with its last row hiding everything: by false, by true, or by the lowest number."""
    if not array.size:
        return array
    array = array.copy()
    hidden: Array | int = 0
    if role.kind == "added":
        hidden = np.array(float(role.dtype.min)).astype(array.dtype)
    elif role.dtype == DataType.BOOL:
        hidden = inverted
    array[(-1,) * (array.ndim - 1)] = hidden
    return array


def extreme_values(array: Array) -> Array:
    """Numbers with both zeros among them, a large first row and a tiny last one."""
    if array.ndim == 0 or not array.size:
        return array
    out = array.copy()
    flat = out.reshape(-1)
    flat[::7], flat[3::7] = 0.0, -0.0
    out[0] = out[0] * np.asarray(16, out.dtype)
    out[-1] = out[-1] * np.asarray(2.0**-12, out.dtype)
    return out


def nan_values(array: Array) -> Array:
    """Numbers whose last row is NaN, all of it.

    Of one NaN among keys that a mask hides, a kernel of attention may know nothing (CONTRIBUTING).
    """
    out = array.copy()
    if out.size:
        out[-1] = np.nan
    return out


# Operators whose output holds values of the input numbered here (None: any input).
_CARRIES: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(VIEWS, (0,)),
    **dict.fromkeys(("Cast", "Slice", "Expand", "Tile", "Split", "Gather", "Pad"), (0,)),
    **dict.fromkeys(("Add", "Sub", "Mul", "Max", "Min", "Concat", "Where", "CumSum"), None),
}


def index_bound(value: Value) -> int | None:
    """The smallest exclusive upper bound that indexing operators set on a value's entries.

    Constants that are added, subtracted or multiplied on the way are taken into account.
    """
    limits = ((_index_limit(node, idx), a, b) for node, idx, a, b in _readers(value))
    # the largest x with a x + b <= limit - 1, and one more
    bounds = (max((limit - 1 - b) // a + 1, 1) for limit, a, b in limits if limit is not None)
    return min(bounds, default=None)


def _readers(value: Value) -> Iterator[tuple[Node, int, int, int]]:
    """(node, input, a, b) of what reads a value's entries x, which there are at most a x + b."""
    todo, seen = [(value, 1, 0)], {value}
    while todo:
        here, a, b = todo.pop()
        for use in here.uses():
            yield use.node, use.idx, a, b
            carried = _CARRIES.get(use.node.op_type, ())
            if carried is None or use.idx in carried:
                c, d = _affine(use.node, use.idx)
                fresh = [v for v in use.node.outputs if v not in seen]
                seen.update(fresh)
                todo.extend((v, a * c, b * c + d) for v in fresh)


def _affine(node: Node, idx: int) -> tuple[int, int]:
    """(c, d) of y = c x + d where the other operand is a constant; (1, 0) for all else."""
    if node.op_type not in ("Add", "Sub", "Mul") or len(node.inputs) != 2:
        return 1, 0
    other = const_array(node.inputs[1 - idx])
    if other is None or not other.size or other.dtype.kind not in "iu":
        return 1, 0
    if node.op_type == "Mul":
        return max(int(other.max()), 1), 0
    if node.op_type == "Sub":
        return (1, -int(other.min())) if idx == 0 else (1, 0)
    return 1, int(other.max())


def _index_limit(node: Node, idx: int) -> int | None:
    """Size of the axis that input `idx` of the node indexes, 1 where that size is not known."""
    table = 0
    if node.op_type in ("Gather", "GatherElements", "ScatterElements") and idx == 1:
        axis = node.attributes.get_int("axis", 0)
    elif node.op_type in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss") and idx == 1:
        axis = 1
    elif node.op_type in ("GatherND", "ScatterND") and idx == 1:
        axis = node.attributes.get_int("batch_dims", 0)
    elif node.op_type == "EmbedLayerNormalization" and idx in (0, 1):
        table, axis = (2, 0) if idx == 0 else (4, 0)
    else:
        return None
    data = node.inputs[table]
    shape = data.shape if data is not None else None
    if shape is None or not -len(shape) <= axis < len(shape):
        return 1
    size = shape[axis]
    return size if isinstance(size, int) else 1


_SHAPES = {"Expand": 1, "Resize": 3, "ConstantOfShape": 0}
"""The input that is a shape; Reshape is not among them, whose 0 copies a size."""


def is_size(value: Value) -> bool:
    """Whether an input's entries become sizes of a shape."""
    return any(_SHAPES.get(node.op_type) == idx for node, idx, _, _ in _readers(value))


_VIEWS = ("Unsqueeze", "Squeeze", "Expand", "Cast", "Reshape", "Slice", "Transpose", "Identity")
_FAR = 8  # nodes between a mask and what it is added to, and from there to the Softmax


def is_added(value: Value) -> bool:
    """Whether a float value is added to the scores of an attention, or is named as one that is."""
    named = "mask" in (value.name or "").lower()
    todo = [(value, 0)]
    while todo:
        here, depth = todo.pop()
        for use in here.uses():
            node = use.node
            if node.op_type == "Attention" and use.idx == 3:
                return True
            if node.op_type == "Add" and (named or _ends_in_softmax(node)):
                return True
            if node.op_type in _VIEWS and use.idx == 0 and depth < _FAR:
                todo.extend((v, depth + 1) for v in node.outputs)
    return False


def _ends_in_softmax(node: Node) -> bool:
    for _ in range(_FAR):
        uses = tuple(node.outputs[0].uses())
        if len(uses) != 1 or node.op_type not in ("Add", "Reshape", "Cast", "Max", "Clip"):
            return node.op_type == "Softmax"
        node = uses[0].node
    return False

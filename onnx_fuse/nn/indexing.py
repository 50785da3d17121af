"""`x[...]`: slices are views, index tensors gather, boolean masks select."""

from __future__ import annotations

from operator import index
from typing import Any, SupportsIndex

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.nn.dispatch import constants, op_call, operation
from onnx_fuse.nn.operators import Axes
from onnx_fuse.ops.shape_ops import Writer

_FROM, _TO = np.iinfo(np.int64).min + 1, np.iinfo(np.int64).max


def indexed(x: Any, key: object) -> Any:
    """`x[key]` of a Tensor by NumPy's rules, but for index tensors that stand apart.

    Raises UsageError for a key that is not supported, IndexError for too many indices or an
    integer out of range.
    """
    parts = list(key) if isinstance(key, tuple) else [key]
    if sum(1 for p in parts if p is Ellipsis) > 1:
        raise IndexError("an index may have one ellipsis")
    parts = [_tensor(p) for p in parts]
    used = sum(_axis_count(p) for p in parts)
    if used > x.ndim:
        raise IndexError(f"too many indices for a Tensor of {x.ndim} axes")
    rest = [slice(None)] * (x.ndim - used)
    at = next((i for i, p in enumerate(parts) if p is Ellipsis), len(parts))
    parts = [*parts[:at], *rest, *parts[at + 1 :]]
    axis = 0
    for part in parts:
        count = _axis_count(part)
        if _is_mask(part) and _data(part).shape != x._data.shape[axis : axis + count]:
            sizes = [*x._data.shape[axis : axis + count]]
            raise IndexError(f"a mask of {[*_data(part).shape]} for axes of {sizes}")
        axis += count
    x, where = _sliced(x, parts)
    return x if not where else _gathered(x, where)


def _tensor(part: Any) -> Any:
    """Lists and arrays as arrays; Tensors, numbers and slices as they are."""
    if isinstance(part, bool | np.bool_) or (_is_mask(part) and not _data(part).ndim):
        raise UsageError("True or False is no index of an axis: None makes a new axis")
    if isinstance(part, list):
        part = np.asarray(part, None if len(part) else np.int64)
    if _is_index(part) and _data(part).dtype.kind not in "iub":
        raise IndexError(f"an index is of integers or booleans, not of {_data(part).dtype.name}")
    if _is_index(part) and _data(part).dtype.kind in "iu" and _data(part).dtype != np.int64:
        part = part.astype("int64")
    return part


def _axis_count(part: object) -> int:
    if part is None or part is Ellipsis:
        return 0
    return _data(part).ndim if _is_mask(part) else 1


def _data(part: Any) -> Any:
    return part if isinstance(part, np.ndarray) else part._data


def _within_int64(place: SupportsIndex | None) -> int | None:
    return None if place is None else max(_FROM, min(index(place), _TO))


def _is_index(part: object) -> bool:
    return isinstance(part, np.ndarray) or hasattr(part, "_data")


def _is_mask(part: object) -> bool:
    return _is_index(part) and _data(part).dtype.kind == "b"


def _sliced(x: Any, parts: list[Any]) -> tuple[Any, list[tuple[int, Any]]]:
    """The slices, integers and new axes done; what is left, with the axis of each part then."""
    starts, ends, axes, steps, drop, new, later = [], [], [], [], [], [], []
    source, target = 0, 0
    for part in parts:
        if part is None:
            new.append(target)
            target += 1
            continue
        if _is_index(part):
            later.append((target, part))
            count = _axis_count(part)
            source, target = source + count, target + count
            continue
        if isinstance(part, slice):
            if part != slice(None):
                step = 1 if part.step is None else index(part.step)
                if not step:
                    raise ValueError("the step of a slice is 0")
                part = slice(_within_int64(part.start), _within_int64(part.stop))
                first, last = (_FROM, _TO) if step > 0 else (_TO, _FROM)
                start = first if part.start is None else index(part.start)
                if step < 0 and part.start is not None and start < -x._data.shape[source]:
                    first = x.shape[source]  # ONNX would begin at the first element
                    start, step, last = first, 1, first
                    part = slice(start, first)
                starts.append(start)
                ends.append(last if part.stop is None else index(part.stop))
                axes.append(source)
                steps.append(step)
            target += 1
        elif isinstance(part, int | np.integer):
            i, size = int(part), x._data.shape[source]
            if not -size <= i < size:
                raise IndexError(f"index {i} is out of range for an axis of {size}")
            starts.append(i)
            ends.append(i + 1 if i != -1 else _TO)
            axes.append(source)
            steps.append(1)
            drop.append(source)
        else:
            raise UsageError(f"a Tensor has no index of type {type(part).__name__}")
        source += 1
    if starts or new:
        begin, end = np.array(starts, np.int64), np.array(ends, np.int64)
        fixed = {"axes": tuple(axes), "steps": tuple(steps), "drop": tuple(drop), "new": tuple(new)}
        x = _slice(x, begin, end, **fixed)
    return x, later


def _gathered(x: Any, where: list[tuple[int, Any]]) -> Any:
    if len(where) == 1:
        axis, places = where[0]
        if not _is_mask(places):
            return op_call("Gather", [x, places], {"axis": axis})
        if axis:
            raise UsageError("a boolean mask selects from the first axes of a Tensor")
        return _masked(*constants([x, places]))
    first = where[0][0]
    if any(_is_mask(p) for _, p in where) or [a for a, _ in where] != list(
        range(first, first + len(where))
    ):
        raise UsageError("index tensors must stand side by side, and be integers")
    if first:
        order = list(range(x.ndim))
        moved = [*order[first : first + len(where)], *order[:first], *order[first + len(where) :]]
        x = x.permute(moved)
    y = _gather_several(*constants([x, *(p for _, p in where)]))
    if first:  # NumPy puts the gathered axes where the first index tensor stood
        lead = y.ndim - (x.ndim - len(where))
        order = list(range(y.ndim))
        y = y.permute([*order[lead : lead + first], *order[:lead], *order[lead + first :]])
    return y


@operation
def _slice(
    op: Writer, x: ir.Value, starts: ir.Value, ends: ir.Value, *,
    axes: Axes, steps: Axes, drop: Axes, new: Axes,
) -> Any:  # fmt: skip
    """Slices along `axes`, without the axes `drop`, and then with new ones at `new`."""
    if axes:
        x = op.Slice(x, starts, ends, list(axes), list(steps))
    if drop:
        x = op.Squeeze(x, list(drop))
    return op.Unsqueeze(x, list(new)) if new else x


@operation
def _masked(op: Writer, x: ir.Value, mask: ir.Value) -> Any:
    return op.GatherND(x, op.Transpose(op.NonZero(mask), perm=[1, 0]))


@operation
def _gather_several(op: Writer, x: ir.Value, *indices: ir.Value) -> Any:
    total = indices[0]
    for places in indices[1:]:
        total = op.Add(total, places)  # for the shape that all broadcast to
    shape, last = op.Shape(total), op.constant([-1])
    wide = [op.Unsqueeze(op.Expand(places, shape), last) for places in indices]
    return op.GatherND(x, op.Concat(*wide, axis=-1))

"""Sizes on which no sum may depend: a row then has the same bits whatever else is in its batch.

All sizes of such a dimension up to its limit are of one class (`program.size.Trace.batch`), so that
kernels, tiles, splits and teams are chosen for the limit, whatever the size of a run is.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

from onnx_fuse.errors import ModelError, UsageError

if TYPE_CHECKING:
    import onnx_ir as ir

LIMIT = 32
"""The largest batch where none is given."""
_NOTE = "onnx_fuse.batch_invariant"

Wanted = bool | int | Mapping[str, int]


def note(model: ir.Model, wanted: Wanted) -> None:
    """Write into a model's metadata which dimensions its programs must not depend on.

    `wanted`: the largest size of the first input's first dimension, or of dimensions by name; True
    is LIMIT. Raises UsageError for what is no such number, and for a dimension that is not there.
    """
    model.metadata_props.pop(_NOTE, None)
    if wanted is False:
        return
    names = {d.value for v in model.graph.inputs for d in v.shape or () if not isinstance(d, int)}
    if not isinstance(wanted, Mapping):
        first = next((v for v in model.graph.inputs if v.shape is not None and len(v.shape)), None)
        size = 1 if first is None or first.shape is None else first.shape[0]
        if isinstance(size, int):
            return  # there is one batch
        if size.value is None:
            raise UsageError(
                "batch_invariant needs a name of the batch dimension, and the first dimension of "
                f"'{first.name if first else ''}' has none"
            )
        wanted = {size.value: LIMIT if wanted is True else wanted}
    if not wanted:
        raise UsageError("batch_invariant names no dimension: give names with their largest sizes")
    for name, limit in wanted.items():
        if name not in names:
            raise UsageError(f"batch_invariant: no input has a dynamic dimension '{name}'")
        if isinstance(limit, bool) or not isinstance(limit, Integral) or limit < 1:
            raise UsageError(
                f"batch_invariant is {limit!r} for '{name}': give the largest size of it that runs "
                "will have"
            )
    sizes = {name: int(limit) for name, limit in wanted.items()}
    model.metadata_props[_NOTE] = json.dumps(sizes, sort_keys=True)


def limits(model: ir.Model) -> dict[str, int]:
    """The dimensions that `note` wrote, with the largest size of each."""
    try:
        sizes = dict(json.loads(model.metadata_props.get(_NOTE, "{}")))
        return {name: operator.index(size) for name, size in sizes.items()}
    except (ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"the model's metadata '{_NOTE}' is none of this package") from error


def limited(model: ir.Model) -> Iterable[tuple[str, int, str, int]]:
    """(input, axis, name, limit) of each dimension that `note` wrote."""
    most = limits(model)
    for value in model.graph.inputs if most else ():
        for axis, size in enumerate(value.shape or ()):
            name = None if isinstance(size, int) else size.value
            if name in most:
                yield str(value.name), axis, str(name), most[str(name)]


def check(model: ir.Model, feeds: Mapping[str, Any]) -> None:
    """Raise UsageError where a feed is larger than a limit."""
    for input_name, axis, name, limit in limited(model):
        size = feeds[input_name].shape[axis] if input_name in feeds else 0
        if size > limit:
            raise UsageError(
                f"batch_invariant holds for '{name}' up to {limit}, and '{input_name}' has {size}: "
                "give InferenceSession a larger number"
            )

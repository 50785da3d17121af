"""Feeds for a model: read from a file, or generated within what its graph accepts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import DataType

from onnx_fuse.arrays import Array
from onnx_fuse.errors import DataError, ModelError
from onnx_fuse.ir.build import all_nodes, feeds_of, required_inputs
from onnx_fuse.runtime import ort
from onnx_fuse.training import data
from onnx_fuse.validation.arrays import (
    Role,
    extreme_values,
    inverted_mask,
    make,
    nan_values,
    role_of,
    with_hidden_row,
)
from onnx_fuse.validation.input_sizes import OF_A_LIST, InputSizes, choices, dims_of

Feeds = dict[str, Array]
Run = Callable[[Feeds], list[Any]]
_RUNS = 24  # tries before the graph is given up
_SHOWN = 4  # of them in a message


def read_feeds(
    path: str | os.PathLike[str],
    model: ir.Model,
    optional: Collection[str] = (),
    beside: Collection[str] = (),
) -> Feeds:
    """The arrays of an .npz file that the model's inputs name, of their types and sizes.

    Each input must be there that has no default and is not `optional`. The file format has no
    bfloat16: such an input takes floats, or 2 bytes each as numpy wrote it. Warns of other arrays,
    but for those named in `beside`, which are returned as they are. Raises ModelError.
    """
    try:
        arrays = data.load(path)
    except DataError as error:
        raise ModelError(str(error)) from error
    name = Path(path).name
    needed = [v.name or "" for v in required_inputs(model)]
    missing = [n for n in needed if n not in arrays and n not in optional]
    if missing:
        raise ModelError(
            f"{name} has no array for input '{missing[0]}' (it has {sorted(arrays)}): save it by "
            "np.savez under that name"
        )
    kept = {key: arrays.pop(key) for key in beside if key in arrays}
    if left_out := data.left_out(arrays, model.graph.inputs):
        warnings.warn(f"{name}: {left_out}", stacklevel=2)
    for value in model.graph.inputs:
        if value.name in arrays:
            arrays[value.name] = _fitting(value, arrays[value.name], name)
    return feeds_of(model, arrays) | kept


def _fitting(value: ir.Value, array: Array, file: str) -> Array:
    """The array of a file for an input. Raises ModelError where it has another type or shape."""
    where = f"{file}: input '{value.name}'"
    if isinstance(value.type, ir.SequenceType):
        raise ModelError(f"{where} {OF_A_LIST}")
    if value.dtype == DataType.BFLOAT16 and (array.dtype == "V2" or array.dtype.kind == "f"):
        kind = DataType.BFLOAT16.numpy()
        array = array.view(kind) if array.dtype == "V2" else array.astype(kind)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if value.dtype == DataType.STRING:
        fits = array.dtype.kind in "OSTU"
    else:
        fits = value.dtype is None or array.dtype == value.dtype.numpy()
    if not fits and value.dtype is not None:
        takes = "text" if value.dtype == DataType.STRING else value.dtype.numpy()
        kinds = f"{takes}, the array is {array.dtype}"
        raise ModelError(f"{where} takes {kinds}: save it in that type")
    sizes = None if value.shape is None else list(value.shape)
    if sizes is not None and (
        len(sizes) != array.ndim
        or any(isinstance(d, int) and d != n for d, n in zip(sizes, array.shape, strict=True))
    ):
        takes = ", ".join(str(d if isinstance(d, int) else d.value or "?") for d in sizes)
        raise ModelError(
            f"{where} takes the shape [{takes}], the array has {list(array.shape)}: save it in "
            "that shape"
        )
    return array


def generate(
    model: ir.Model,
    run: Run,
    *,
    seed: int = 0,
    notes: list[str] | None = None,
    single: bool = False,
    small: list[tuple[str, Feeds]] | None = None,
) -> list[tuple[Feeds, list[Any]]]:
    """Feeds that `run` accepts, with its outputs: every dynamic axis at two sizes where it can be.

    Sizes are those that the graph admits (see `validate.choose`), values what the inputs are for
    (see `validate.arrays`). `single` stops at the first feed. `notes` receives what could not be
    done, and `small` feeds, not run yet, in which a dynamic axis has size 1 or 0. Raises
    ModelError if `run` accepts none.
    """
    roles = {v.name or "": role_of(v) for v in required_inputs(model)}
    accepted: list[tuple[Feeds, list[Any]]] = []
    seen: dict[str, set[int]] = {}
    done: set[tuple[bool | int, ...]] = set()
    tried: list[InputSizes] = []
    empty: list[tuple[Feeds, list[Any]]] = []  # what the graph ran and found nothing in
    first_error: Exception | None = None
    refused: Feeds = {}
    first_choices: list[InputSizes] = []  # of each way
    for choice in choices(model):
        way = tuple(choice.branches.values())
        old = all(choice.sizes[s] in seen.get(s, ()) for s in choice.sizes)
        if len(tried) == _RUNS or (single and accepted):
            break
        complete = all(len(seen.get(s, ())) > 1 for s in choice.varied)
        if way in done and (old or complete):
            continue
        tried.append(choice)
        # Where integers have no bound that the graph shows, 0 and 1 may still be too much.
        for top in (2, 1):
            rng = np.random.default_rng(seed + len(accepted))
            feed = draw(roles, choice, rng, top)
            try:
                outputs = run(feed)
                if _any_nan(outputs):  # a mask whose true hides leaves the first row nothing
                    other = {k: inverted_mask(roles[k], a) for k, a in feed.items()}
                    outputs_of_other = run(other)
                    if not _any_nan(outputs_of_other):
                        feed, outputs = other, outputs_of_other
            except Exception as error:
                if isinstance(error, ModelError):
                    raise
                if first_error is None:
                    first_error, refused = error, feed
                continue
            if all(map(holds_numbers, outputs)):
                accepted.append((feed, outputs))
                if way not in done:
                    first_choices.append(choice)
                done.add(way)
                for symbol, size in choice.sizes.items():
                    seen.setdefault(symbol, set()).add(size)
            else:
                empty.append((feed, outputs))
            break
    if not accepted and empty:
        accepted = empty[:1]
        if notes is not None:
            names = [v.name for v, y in zip(model.graph.outputs, empty[0][1], strict=True)
                     if not holds_numbers(y)]  # fmt: skip
            notes.append(f"the generated inputs make {', '.join(map(str, names))} empty, so no "
                         "values of it are compared (--inputs FILE.npz gives others)")  # fmt: skip
    if not accepted:
        assert first_error is not None
        reason = ort.plain(first_error)
        sizes = "; ".join(dict.fromkeys(map(str, tried[:_SHOWN])))
        shown = [f"{name} {[*array.shape]}" for name, array in refused.items()]
        raise ModelError(
            f"onnxruntime runs the original on none of the generated inputs ({reason}, with "
            f"{', '.join(shown[:_SHOWN])}; tried {sizes}): give inputs (--inputs "
            "FILE.npz) or sizes (--dim SYMBOL=N, --input-shapes)"
        )
    if notes is not None and not single:
        one = [symbol for symbol, values in seen.items() if len(values) < 2]
        if one:
            notes.append(f"the graph runs with only one size of the dynamic axes {', '.join(one)}")
        if first_error is not None:
            notes.append(f"sizes that onnxruntime refused: {tried[0]} ({ort.plain(first_error)})")
    if small is not None:
        rng, smaller = np.random.default_rng(seed), dict[str, InputSizes]()
        for choice in reversed(first_choices):  # what several ways have is the first one's
            smaller |= choice.small()
        small += [(case, draw(roles, sizes, rng, 1)) for case, sizes in smaller.items()]
    return accepted


def draw(roles: dict[str, Role], choice: InputSizes, rng: np.random.Generator, top: int) -> Feeds:
    shapes = choice.shapes
    # A mask that is longer than the step gives the length of past and step together.
    widths = [shapes[k][-1] for k, r in roles.items() if r.masks and shapes[k]]
    feed = {}
    for name, role in roles.items():
        if name in choice.branches:
            feed[name] = np.full(shapes[name], choice.branches[name], role.dtype.numpy())
            continue
        if name in choice.lengths:
            feed[name] = choice.lengths[name].astype(role.dtype.numpy())
            continue
        past = max((w - shapes[name][-1] for w in widths), default=0) if shapes[name] else 0
        feed[name] = make(role, shapes[name], rng, top=top, past=max(past, 0))
    return feed


def cotangents_of(names: Sequence[str], outputs: Sequence[Any], rng: np.random.Generator) -> Feeds:
    """A random gradient of each output of floats, by the output's name."""
    return {
        name: np.asarray(rng.standard_normal(y.shape), y.dtype)
        for name, y in zip(names, outputs, strict=True)
        if isinstance(y, np.ndarray) and DataType.from_numpy(y.dtype).is_floating_point()
    }


def _any_nan(outputs: Sequence[Any]) -> bool:
    return any(
        isinstance(y, np.ndarray) and y.dtype.kind == "f" and bool(np.isnan(y).any())
        for y in outputs
    )


def extremes(model: ir.Model, feed: Feeds, *, nan: bool = True) -> list[tuple[str, Feeds]]:
    """(what it is, feed) of rare values at the sizes of a feed that the graph took.

    Masks whose last row hides everything; numbers with 0 and -0 and rows of other magnitudes; with
    `nan`, rows of it.
    """
    roles = {v.name or "": role_of(v) for v in required_inputs(model)}
    masks = {k: a for k, a in feed.items() if roles[k].masks and a.ndim}
    # The first row of a generated mask hides nothing. If it is false there, true means hidden.
    inverted = any(
        a.dtype == bool and a.size > 0 and not a[(0,) * (a.ndim - 1)].any() for a in masks.values()
    )
    rare = []
    if masks:
        hidden = {k: with_hidden_row(roles[k], a, inverted=inverted) for k, a in masks.items()}
        rare.append(("the last row of each mask hides everything", feed | hidden))
    plain = {k: a for k, a in feed.items() if roles[k].kind == "plain"}
    plain = {k: a for k, a in plain.items() if a.ndim and a.dtype.kind not in "iub"}
    kinds = {"floats hold 0, -0, a large row and a tiny one": extreme_values}
    kinds |= {"the last row of floats is NaN": nan_values} if nan else {}
    for case, values in kinds.items() if plain else ():
        rare.append((case, feed | {k: values(a) for k, a in plain.items()}))
    return rare


def holds_numbers(output: Any) -> bool:
    """Whether an output is not empty: an array, or a list of some that may differ in shape."""
    return any(map(holds_numbers, output)) if isinstance(output, list) else bool(np.size(output))


def repeats_sizes(model: ir.Model) -> bool:
    """Whether inputs have several axes that the file calls by one name."""
    names = [d for dims in dims_of(model).values() for d in dims if isinstance(d, str)]
    return len(names) > len(set(names))


def with_unequal_sizes(model: ir.Model, feed: Feeds) -> list[Feeds]:
    """Feeds in which one axis is cut to 1, of several that the file calls by one name.

    onnxruntime does not ask whether these are equal. Nor does it ask whether labels fit their
    scores (1.32), and reads beyond them: a graph with a loss gets no such feed.
    """
    if any(node.op_type in _LOSSES for node in all_nodes(model.graph)):
        return []
    places: dict[str, list[tuple[str, int]]] = {}
    for name, dims in dims_of(model).items():
        # an input whose rank the file leaves open may have been fed at another than this one
        for axis, (dim, size) in enumerate(zip(dims, feed[name].shape, strict=False)):
            if isinstance(dim, str) and size > 1:
                places.setdefault(dim, []).append((name, axis))
    cuts = [place for axes in places.values() if len(axes) > 1 for place in axes[:_ENDS]]
    return [
        feed | {name: np.ascontiguousarray(feed[name].take([0], axis))}
        for name, axis in cuts[:_CUTS]
    ]


_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
_ENDS, _CUTS = 3, 8
"""Axes of one name that are cut, and feeds of unequal sizes, at most."""

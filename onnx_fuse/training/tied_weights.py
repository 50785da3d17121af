"""Weights that are one in the file but not in the model, and the other way round.

An exporter may store a weight twice (an embedding and its transpose at the output), and stores
equal tensors of a fresh model once (a bias of zeros for every layer). Both train otherwise than the
model that was exported; neither can be told for certain from the file, so the user decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.autodiff import is_weight, scales
from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import Builder, add_initializer, const_array, required
from onnx_fuse.ir.names import Names
from onnx_fuse.ops.rules import is_float

_LEAST = 16
"""Entries from which equal tensors are taken for one weight, if they are not all one number."""
_SOME = 64
"""Entries that are compared before whole weights are."""


@dataclass(frozen=True)
class Duplicate:
    """An initializer `copy` that holds what `weight` holds, or its transpose."""

    weight: str
    copy: str
    transposed: bool

    def of(self, array: Array) -> Array:
        """The content of the copy, from the weight's."""
        return np.ascontiguousarray(array.T) if self.transposed else array


def _candidates(graph: ir.Graph) -> Iterable[tuple[ir.Value, Array]]:
    inputs, apart = set(graph.inputs), scales(graph)  # both nodes of a pair read its scale
    for value in graph.initializers.values():
        array = const_array(value)
        if value in inputs or value.name in apart:
            continue
        if array is not None and is_float(value) and value.uses():
            yield value, array


def find_duplicates(graph: ir.Graph) -> list[Duplicate]:
    """Weights that the file holds twice, the first in the file's order being the weight."""
    duplicates: list[Duplicate] = []
    seen: dict[tuple[Any, ...], str] = {}
    by_size: dict[tuple[Any, ...], list[tuple[ir.Value, Array]]] = {}
    for value, array in _candidates(graph):
        if array.size >= _LEAST:
            # some elements that a transpose leaves where they are: few weights share them
            some = array.diagonal() if array.ndim == 2 else array.reshape(-1)
            key = (array.dtype, *sorted(array.shape), some[:_SOME].tobytes())
            by_size.setdefault(key, []).append((value, array))
    for group in by_size.values():
        for value, array in group if len(group) > 1 else ():
            if not is_weight(value) or (array == array.flat[0]).all():
                continue
            content = (array.dtype, array.shape, _digest(array))
            if content in seen:
                duplicates.append(Duplicate(seen[content], str(value.name), False))
                continue
            if array.ndim == 2:
                transposed_key = (array.dtype, array.shape[::-1], _digest(array.T))
                if transposed_key in seen:
                    duplicates.append(Duplicate(seen[transposed_key], str(value.name), True))
                    continue
            seen[content] = str(value.name)
    return duplicates


def _digest(array: Array) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()


def tie(graph: ir.Graph, duplicates: Iterable[Duplicate]) -> None:
    """Let the readers of each copy read the weight, in place."""
    for duplicate in duplicates:
        weight, copy = graph.initializers[duplicate.weight], graph.initializers[duplicate.copy]
        value = weight
        if duplicate.transposed:
            op = Builder()
            value = op.Transpose(weight, perm=[1, 0])
            value.name = Names.of(graph).fresh(f"{duplicate.copy}.tied")
            value.type, value.shape = copy.type, copy.shape
            graph.insert_before(graph[0], op.nodes)
        ir.convenience.replace_all_uses_with(copy, value, replace_graph_outputs=True)
        del graph.initializers[duplicate.copy]


def shared_constants(graph: ir.Graph) -> dict[str, int]:
    """{name: places} of weights all of one number that several places read.

    Such a tensor is what fresh biases and scales are stored as: once for all that are equal.
    """
    return {
        str(value.name): len(value.uses())
        for value, array in _candidates(graph)
        if array.ndim and array.size > 1 and len(value.uses()) > 1
        if is_weight(value) and bool((array == array.flat[0]).all())
    }


def untie(graph: ir.Graph) -> dict[str, list[str]]:
    """Give each place that reads a merged weight its own, in place: {name: [name, name.1, …]}."""
    names: dict[str, list[str]] = {}
    for name in shared_constants(graph):
        value = graph.initializers[name]
        array = required(const_array(value))
        names[name] = [name]
        for i, (node, index) in enumerate(list(value.uses())[1:], start=1):
            copy_name = Names.of(graph).fresh(f"{name}.{i}")
            node.replace_input_with(index, add_initializer(graph, copy_name, array.copy()))
            names[name].append(copy_name)
    return names


def resolve(
    graph: ir.Graph, trains: Callable[[str], bool], *, tied: bool
) -> tuple[list[Duplicate], list[str]]:
    """Tie the weights that the file stores twice, in place, if they are to be `tied`.

    Returns the weights that are tied, and sentences about all that are shared. `trains` says which
    weights train; raises UsageError where only one of two that are tied does.
    """
    notes = [
        f"all entries of '{name}' are equal and {places} nodes read it: it is one parameter "
        "(untie gives each node its own copy)"
        for name, places in shared_constants(graph).items()
    ]
    duplicates = find_duplicates(graph)
    if not tied:
        notes += [
            f"'{t.copy}' holds {'the transpose of ' if t.transposed else ''}'{t.weight}': they "
            "train as two weights (tie trains them as one)"
            for t in duplicates
        ]
        return [], notes
    for t in duplicates:
        if trains(t.weight) != trains(t.copy):
            raise UsageError(f"'{t.weight}' and '{t.copy}' are tied: train both, or neither")
        notes.append(f"'{t.copy}' is tied to '{t.weight}'")
    tie(graph, duplicates)
    return duplicates, notes

"""A graph in a container, for the cache and for another process.

The container (see there) has the graph, and the weights that optimizing, a precision or lowering
made; those that are in the model's file as they are stay there.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.container import GRAPH, WEIGHTS, Container
from onnx_fuse.importer.load import reread
from onnx_fuse.importer.save import is_large_weight, serialized_without_weights
from onnx_fuse.importer.weights import PLACE, Place, read_places
from onnx_fuse.program.call import dtype_of
from onnx_fuse.runtime.recurrences import survivable

PORTABLE = "portable.onnx"
"""Member of a container: its graph without fused operators, as onnxruntime runs it."""
_MADE = ("folded", "packed")  # what lowering makes of weights and keeps in the graph's `meta`


@dataclass(frozen=True)
class GraphParts:
    """What a container of a graph holds beside the graph; `stamps` of files beside the model."""

    manifest: dict[str, Any]
    tensors: dict[str, Array]
    stamps: dict[str, tuple[int, int]]


def parts(model: ir.Model, *, beside: bool) -> GraphParts | None:
    """The parts of `model`; with `beside`, weights that stand in its file stay there.

    None where a file beside the model has changed since it was read.
    """
    graph = model.graph
    tensors: dict[str, Array] = {}
    places: dict[str, tuple[str, int, int]] = {}
    stamps: dict[str, tuple[int, int]] = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not is_large_weight(tensor):
            continue
        place: Place | None = getattr(tensor, "meta", {}).get(PLACE) if beside else None
        if place is None:
            tensors[name] = tensor.numpy()
            continue
        file, at, read = place
        places[name] = file, at, tensor.nbytes
        if read is not None and stamps.setdefault(file, read) != read:
            return None
    names = {id(v.const_value): n for n, v in graph.initializers.items()}
    manifest: dict[str, Any] = {"places": places}
    folded = {id(value) for value, made in list(graph.meta.get("folded", {}).values()) if made}
    for kind in _MADE:
        rows = manifest[kind] = []
        for name, (value, entry) in list(graph.meta.get(kind, {}).items()):
            if id(entry) in folded:
                continue  # programs read what was made of it
            arrays = entry if kind == "folded" else {"": entry}
            labels = {key: f"{kind} {name} {key}" for key in arrays}
            if id(value) in names:
                tensors |= {labels[key]: array for key, array in arrays.items()}
                described = {
                    key: [labels[key], array.dtype.name, list(array.shape)]
                    for key, array in arrays.items()
                }
                rows.append([name, names[id(value)], described])
    return GraphParts(manifest, tensors, stamps)


def opened(container: Container, model: Path | None) -> ir.Model:
    """The graph of a container; `model` is the file that weights stand in, if some do.

    Raises ModelError, OSError, or what a manifest that `parts` did not make leads to.
    """
    return _opened(container, _ContainerWeights(container, model))


def _opened(container: Container, weights: _ContainerWeights) -> ir.Model:
    model_read = reread(bytes(container.member(GRAPH)), weights)
    for kind in _MADE:
        entries = model_read.graph.meta[kind] = {}
        for name, source, arrays in container.manifest[kind]:
            read = {key: weights.made(*place) for key, place in arrays.items()}
            value = model_read.graph.initializers[source].const_value
            entries[name] = value, read if kind == "folded" else read[""]
    return model_read


class DualGraph:
    """A graph in two forms: for onnxruntime, and with its fused operators as `model`.

    `data` is a protobuf, and `weights` holds the large weights that it only names: an array of
    unsigned integers and the ONNX type of its elements, by name. Sessions read these arrays where
    they are, so nobody may change them.
    """

    def __init__(
        self, data: bytes, weights: dict[str, tuple[Array, int]], opened: Callable[[], ir.Model]
    ) -> None:
        self.data, self.weights, self._opened = data, weights, opened

    @classmethod
    def of_container(cls, container: Container, model: Path) -> DualGraph:
        """That of a container; `model` and what is raised are as in `opened`."""
        stored, data = _ContainerWeights(container, model), bytes(container.member(PORTABLE))
        weights = {}
        for tensor in onnx.ModelProto.FromString(data).graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                kind = ir.DataType(tensor.data_type)
                weights[tensor.name] = _as_integers(stored.array(tensor), kind, tensor.dims)
        return cls(data, weights, partial(_opened, container, stored))

    @classmethod
    def of_model(cls, model: ir.Model) -> DualGraph:
        """That of a model in memory, over the arrays of its weights."""
        model = survivable(model)
        weights = {
            name: _as_integers(tensor.numpy(), tensor.dtype, tensor.shape.numpy())
            for name, value in model.graph.initializers.items()
            if (tensor := value.const_value) is not None and is_large_weight(tensor)
        }
        return cls(serialized_without_weights(model, shapes=False), weights, lambda: model)

    @cached_property
    def model(self) -> ir.Model:
        """The fused graph, over the same weights."""
        return self._opened()


def _as_integers(array: Array, kind: ir.DataType, shape: Sequence[int]) -> tuple[Array, int]:
    """The elements as unsigned integers of their size, and the number of their ONNX type."""
    integers = array.view(f"u{int(kind.itemsize)}").reshape(shape)
    return np.require(integers, requirements=["C", "A"]), kind.value


def derived_weights(model: ir.Model) -> Iterator[tuple[str, Array]]:
    """The arrays that lowering has made of weights so far, by their names in programs."""
    for name, (_, arrays) in list(model.graph.meta.get("folded", {}).items()):
        for key, array in arrays.items():
            yield f"{name} {key}", array
    for name, (_, array) in list(model.graph.meta.get("packed", {}).items()):
        yield name, array


def derived_names(manifest: Mapping[str, Any]) -> Iterator[str]:
    """The names, as of `derived_weights`, of what a container with this manifest holds."""
    for name, _, arrays in manifest["folded"]:
        yield from (f"{name} {key}" for key in arrays)
    for name, _, _ in manifest["packed"]:
        yield name


class _ContainerWeights:
    """Weights of a container by name: in it, or where they stand in the model's files."""

    location = WEIGHTS

    def __init__(self, container: Container, model: Path | None) -> None:
        self._container = container
        places: Mapping[str, Any] = container.manifest["places"]
        self._arrays: dict[str, Array] = {}
        if not places:
            return
        assert model is not None
        inside = {name: (at, n) for name, (file, at, n) in places.items() if not file}
        with model.open("rb") as file:
            self._arrays |= zip(inside, read_places(file, list(inside.values())), strict=True)
        maps: dict[str, mmap.mmap] = {}
        for name, (location, at, nbytes) in places.items():
            if not location:
                continue
            if location not in maps:
                with (model.parent / location).open("rb") as file:
                    maps[location] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._arrays[name] = np.frombuffer(maps[location], np.uint8, nbytes, at)

    def nbytes(self, tensor: object) -> int:
        return self.array(tensor).nbytes

    def array(self, tensor: Any) -> Array:
        if tensor.name in self._arrays:
            return self._arrays[tensor.name]
        return self._container.tensor(tensor.name)

    def place(self, tensor: object) -> Place | None:
        return None  # what is taken from an entry is not kept again

    def made(self, stored: str, dtype: str, shape: list[int]) -> Array:
        """An array that lowering made."""
        return self._container.tensor(stored).view(dtype_of(dtype)).reshape(shape)

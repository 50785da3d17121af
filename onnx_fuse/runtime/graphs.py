"""A graph in a container, for the cache and for another process.

The container (see there) has the graph, and the weights that optimizing, a precision or lowering
made; those that are in the model's file as they are stay there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from onnx_fuse.arrays import Array
from onnx_fuse.container import GRAPH, WEIGHTS, Container
from onnx_fuse.importer.load import read, reread
from onnx_fuse.importer.save import is_large_weight, serialized_without_weights, stands_in_file
from onnx_fuse.importer.weights import PLACE, Place, parts_of_file, read_places
from onnx_fuse.program.call import dtype_of
from onnx_fuse.runtime.recurrences import survivable

PORTABLE = "portable.onnx"
"""Member of a container: its graph without fused operators, as onnxruntime runs it."""
_MADE = ("folded", "packed")  # what lowering makes of weights and keeps in the graph's `meta`


@dataclass(frozen=True)
class GraphParts:
    """What a container of a graph holds beside the graph; `stamps` of files beside the model."""

    manifest: dict[str, Any]
    weights: dict[str, ir.TensorProtocol]
    derived: dict[str, Array]
    stamps: dict[str, tuple[int, int]]

    @cached_property
    def tensors(self) -> dict[str, Array]:
        """The weights and what was made of them by name, which may take a while."""
        return {name: tensor.numpy() for name, tensor in self.weights.items()} | self.derived


def parts(model: ir.Model, *, beside: bool, limit: int) -> GraphParts | None:
    """The parts of `model`; with `beside`, weights that stand in its file stay there.

    What lowering made of weights is left out where `limit` has no room for all. None where it has
    none for the others, or a file beside the model has changed since it was read.
    """
    graph = model.graph
    weights: dict[str, ir.TensorProtocol] = {}
    places: dict[str, tuple[str, int, int]] = {}
    stamps: dict[str, tuple[int, int]] = {}
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not is_large_weight(tensor):
            continue
        place: Place | None = getattr(tensor, "meta", {}).get(PLACE) if beside else None
        if place is None:
            weights[name] = tensor
            continue
        file, at, read = place
        places[name] = file, at, tensor.nbytes
        if read is not None and stamps.setdefault(file, read) != read:
            return None
    names = {id(v.const_value): n for n, v in graph.initializers.items()}
    manifest: dict[str, Any] = {"places": places}
    folded = {id(value) for value, made in list(graph.meta.get("folded", {}).values()) if made}
    derived: dict[str, Array] = {}
    for kind in _MADE:
        rows = manifest[kind] = []
        for name, (value, entry) in list(graph.meta.get(kind, {}).items()):
            if id(entry) in folded:
                continue  # programs read what was made of it
            arrays = entry if kind == "folded" else {"": entry}
            labels = {key: f"{kind} {name} {key}" for key in arrays}
            if id(value) in names:
                derived |= {labels[key]: array for key, array in arrays.items()}
                described = {
                    key: [labels[key], array.dtype.name, list(array.shape)]
                    for key, array in arrays.items()
                }
                rows.append([name, names[id(value)], described])
    room = limit - sum(tensor.nbytes for tensor in weights.values())
    if sum(array.nbytes for array in derived.values()) > room:
        derived, manifest = {}, manifest | {kind: [] for kind in _MADE}
    return GraphParts(manifest, weights, derived, stamps) if room >= 0 else None


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
    they are, so nobody may change them. Others it names as bytes of a file in `folder`, which
    sessions map: while one is open, nobody may write into that file.
    """

    def __init__(
        self,
        data: bytes,
        weights: dict[str, tuple[Array, int]],
        opened: Callable[[], ir.Model],
        folder: Path | None = None,
    ) -> None:
        self.data, self.weights, self._opened, self.folder = data, weights, opened, folder

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
    def of_model(cls, model: ir.Model, file: str | os.PathLike[str] | None = None) -> DualGraph:
        """That of a model in memory, over the arrays of its weights or over those of its `file`."""
        model, file = survivable(model), _mappable(file)
        weights = {
            name: _as_integers(tensor.numpy(), tensor.dtype, tensor.shape.numpy())
            for name, value in model.graph.initializers.items()
            if (tensor := value.const_value) is not None
            and is_large_weight(tensor)
            and not (file and stands_in_file(tensor))
        }
        data = serialized_without_weights(model, shapes=False, file=file)
        return cls(data, weights, lambda: model, file and file.parent)

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> DualGraph | str | os.PathLike[str]:
        """That of a file as it is, none of whose large weights is copied.

        The path itself where nothing is gained, and where onnxruntime has to say what is wrong.
        """
        if (file := _mappable(path)) is None:
            return path
        try:
            with file.open("rb") as opened:
                rest, weights = parts_of_file(opened)
            proto = onnx.ModelProto.FromString(rest)
        except (OSError, DecodeError):
            return path
        if weights is None:
            return path
        for tensor in proto.graph.initializer:
            entries = {entry.key: entry for entry in tensor.external_data}
            if entries and entries["location"].value == weights.location:
                at, nbytes = weights.places[int(entries["offset"].value)]
                entries["location"].value, entries["offset"].value = file.name, str(at)
                tensor.external_data.add(key="length", value=str(nbytes))
        return cls(proto.SerializeToString(), {}, partial(read, file), file.parent)

    @cached_property
    def model(self) -> ir.Model:
        """The fused graph, over the same weights."""
        return self._opened()


def _mappable(file: str | os.PathLike[str] | None) -> Path | None:
    """The file unless it is a link, whose target onnxruntime takes for a way out of the folder."""
    return None if file is None or os.path.islink(file) else Path(file)


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

"""What a file says before it is trusted: names, strings, sparse tensors, sizes and places of data.

Most is read off the protobuf message, before a tensor is allocated or a file opened; records of
packed weights are read when their shapes are known.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from onnx_fuse.errors import ModelError
from onnx_fuse.importer.weights import Weights
from onnx_fuse.ir.build import extents
from onnx_fuse.ops.rules import PACKED

_Message = onnx.GraphProto | onnx.FunctionProto
_LARGEST_SPARSE = 2**31
"""Bytes of a sparse tensor as a dense one: what a protobuf message could hold."""


def check_tensors(
    proto: onnx.ModelProto, folders: Sequence[Path], weights: Weights | None = None
) -> None:
    """Sizes and locations of all stored tensors, before any is allocated or opened."""
    nodes = itertools.chain.from_iterable(f.node for f in proto.functions)
    for tensor in itertools.chain(tensors(proto.graph), node_tensors(nodes)):
        where = f"tensor '{tensor.name}'"
        if any(d < 0 for d in tensor.dims):
            raise ModelError(f"{where} has a negative dimension")
        try:
            dtype = ir.DataType(tensor.data_type)
            bits = dtype.bitwidth if dtype != ir.DataType.STRING else 0
        except (ValueError, TypeError) as error:
            raise ModelError(f"{where} has the unknown element type {tensor.data_type}") from error
        count = math.prod(tensor.dims)
        nbytes = (count * bits + 7) // 8
        if nbytes >= 2**48 or math.prod(d or 1 for d in tensor.dims) >= 2**48:
            raise ModelError(f"{where} has shape {list(tensor.dims)}: its size overflows")
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _check_external(tensor, nbytes, folders, weights, where)
        elif bits and tensor.HasField("raw_data") and (held := len(tensor.raw_data)) != nbytes:
            raise ModelError(f"{where} holds {held} bytes, but its shape needs {nbytes}")
        elif not tensor.HasField("raw_data") and _typed_count(tensor) != _entries(
            tensor, count, bits
        ):
            raise ModelError(
                f"{where} holds {_typed_count(tensor)} values, not those of {list(tensor.dims)}"
            )


def _typed_count(tensor: onnx.TensorProto) -> int:
    fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
    return sum(len(getattr(tensor, field)) for field in fields)


def _entries(tensor: onnx.TensorProto, count: int, bits: int) -> int:
    """Entries of a typed field for `count` elements: 4-bit pairs share one, complex takes two."""
    if tensor.data_type in (onnx.TensorProto.COMPLEX64, onnx.TensorProto.COMPLEX128):
        return 2 * count
    return -(-count * bits // 8) if 0 < bits < 8 else count


def _check_external(
    tensor: onnx.TensorProto,
    nbytes: int,
    folders: Sequence[Path],
    weights: Weights | None,
    where: str,
) -> None:
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if weights is not None and location == weights.location:
        if (held := weights.nbytes(tensor)) != nbytes:
            raise ModelError(f"{where} holds {held} bytes, but its shape needs {nbytes}")
        return
    if not folders:
        raise ModelError(f"{where} is in the external file '{location}': pass the model as a path")
    if not location:
        raise ModelError(f"{where}: its external data has no location: name its file")
    where = f"{where}: external data '{location}'"
    for key in ("offset", "length"):
        if not re.fullmatch("[0-9]+", text := entries.get(key, "0")):
            raise ModelError(f"{where}: its {key} is '{text}', no number of bytes")
    # onnxruntime takes a length of 0 for one that is not stated, and some exporters write it
    length = int(entries.get("length", "0")) or nbytes
    target, offset = external_file(location, folders), int(entries.get("offset", "0"))
    if target is None:
        raise ModelError(f"{where} lies outside the model's folder: move it there")
    if not target.is_file():
        fault = "is no file" if target.exists() else "is not there: put it beside the model"
        raise ModelError(f"{where} {fault}")
    size = target.stat().st_size
    if length != nbytes:
        raise ModelError(f"{where}: its length is {length}, but its shape needs {nbytes} bytes")
    if offset + nbytes > size:
        raise ModelError(
            f"{where} of {size} bytes has no {nbytes} bytes at offset {offset}: is the file "
            "complete, and does it belong to the model?"
        )


def external_file(location: str, folders: Sequence[Path]) -> Path | None:
    """The file that a location names, links followed; None where it is in none of the folders.

    The folders are the model's, and that of the file which the model's path is a link to.
    """
    if "\0" in location or os.path.isabs(location):
        return None
    target = (folders[0] / location).resolve()
    return target if any(target.is_relative_to(f.resolve()) for f in folders) else None


def tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    yield from node_tensors(graph.node)


def node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for sub in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                yield from tensors(sub)


# ---- names and strings ---------------------------------------------------------------------------


def check_names(proto: onnx.ModelProto) -> None:
    """Every value has a name of its own, and text is text. Raises ModelError."""
    for graph in graphs(proto):
        owners: dict[str, str] = {}
        if isinstance(graph, onnx.GraphProto):
            for info in graph.input:
                if info.name or graph is proto.graph:
                    _enter(owners, info.name, "an input")
                if graph is proto.graph and lacks_element_type(info.type):
                    raise ModelError(f"input '{info.name}' has no type: state one in the file")
            stored = dict[str, str]()
            for tensor in graph.initializer:
                if tensor.name:
                    _enter(stored, tensor.name, "an initializer")
            if any(not info.name for info in graph.output):
                raise ModelError("an output has no name: give it the name of a node's result")
            owners = stored | owners
        else:
            for name in graph.input:
                _enter(owners, name, f"an input of function '{graph.name}'")
        for node in graph.node:
            if not all(isinstance(text, str) for text in (node.op_type, node.domain, node.name)):
                raise ModelError("an operator's name is no UTF-8 text: store it as such")
            owner = _called(node)
            for name in filter(None, node.output):
                _enter(owners, name, owner)
            _check_attributes(node, owner)
    if not proto.graph.output:
        raise ModelError("the model has no outputs: name the values that it is to return")


def innermost(kind: onnx.TypeProto) -> onnx.TypeProto:
    """The type of what a sequence or an optional holds; other types as they are."""
    while (field := kind.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = getattr(kind, field).elem_type
    return kind


def lacks_element_type(kind: onnx.TypeProto) -> bool:
    """Whether a type says nothing of its elements, or that they are undefined."""
    kind = innermost(kind)
    field = kind.WhichOneof("value")
    return field is None or (field == "tensor_type" and not kind.tensor_type.elem_type)


def _enter(owners: dict[str, str], name: str, owner: str) -> None:
    if not name:
        raise ModelError(f"{owner} has no name: give it one")
    if name in owners:
        raise ModelError(f"'{name}' names two values, of {owners[name]} and of {owner}: rename one")
    owners[name] = owner


def _called(node: onnx.NodeProto) -> str:
    name = node.name or next(filter(None, node.output), "")
    return f"node '{name}' ({node.op_type})"


def _check_attributes(node: onnx.NodeProto, owner: str) -> None:
    """Attributes hold what their type says. Strings are UTF-8; an operator of another domain may
    hold bytes in one.
    """
    for attribute in node.attribute:
        field = _FIELDS.get(attribute.type)
        if field and not attribute.HasField(field) and not attribute.ref_attr_name:
            kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
            raise ModelError(f"{owner}: attribute '{attribute.name}' is a {kind}, but holds none")
        texts = attribute.strings
        if attribute.type == onnx.AttributeProto.STRING and node.domain in _STANDARD:
            texts = [*texts, attribute.s]
        if not all(_is_text(text) for text in texts):
            raise ModelError(
                f"{owner}: attribute '{attribute.name}' is no UTF-8 text: store it as such"
            )


def _is_text(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


_FIELDS = {
    onnx.AttributeProto.TENSOR: "t",
    onnx.AttributeProto.GRAPH: "g",
    onnx.AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    onnx.AttributeProto.TYPE_PROTO: "tp",
}
_STANDARD = ("", "ai.onnx", "ai.onnx.ml")


def graphs(proto: onnx.ModelProto) -> Iterator[_Message]:
    """The graph, the functions, and all graphs in their nodes."""
    todo: list[_Message] = [proto.graph, *proto.functions]
    while todo:
        graph = todo.pop()
        yield graph
        for attribute in (a for node in graph.node for a in node.attribute):
            todo += attribute.graphs
            if attribute.HasField("g"):
                todo.append(attribute.g)


# ---- sparse tensors ------------------------------------------------------------------------------


def has_sparse(proto: onnx.ModelProto) -> bool:
    """Whether the file holds a sparse tensor."""
    return any(
        (isinstance(graph, onnx.GraphProto) and len(graph.sparse_initializer) > 0)
        or any(a.HasField("sparse_tensor") for n in graph.node for a in n.attribute)
        for graph in graphs(proto)
    )


def store_dense(proto: onnx.ModelProto) -> None:
    """Replace sparse initializers and Constants by dense ones, in place. Raises ModelError."""
    for graph in graphs(proto):
        if isinstance(graph, onnx.GraphProto):
            graph.initializer.extend(
                _dense(s, f"sparse initializer '{s.values.name}'", s.values.name)
                for s in graph.sparse_initializer
            )
            graph.ClearField("sparse_initializer")
        for node, attribute in ((n, a) for n in graph.node for a in n.attribute):
            if attribute.HasField("sparse_tensor"):
                dense = _dense(attribute.sparse_tensor, _called(node), "")
                attribute.ClearField("sparse_tensor")
                attribute.name = "value" if node.op_type == "Constant" else attribute.name
                attribute.type = onnx.AttributeProto.TENSOR
                attribute.t.CopyFrom(dense)


def _dense(sparse: onnx.SparseTensorProto, subject: str, name: str) -> onnx.TensorProto:
    """The tensor that a sparse one stands for; an index is one number, or one for each axis."""
    dims = list(sparse.dims)
    parts = (sparse.values, sparse.indices)
    if any(part.data_location == onnx.TensorProto.EXTERNAL for part in parts):
        raise ModelError(f"{subject} has external data, which is not supported: store it dense")
    if any(d < 0 for d in dims):
        raise ModelError(f"{subject} has a negative dimension")
    try:
        values, indices = (numpy_helper.to_array(part) for part in parts)
    except (TypeError, ValueError, KeyError) as error:
        raise ModelError(f"{subject} is malformed: {error}") from error
    if math.prod(dims) * values.itemsize > _LARGEST_SPARSE:
        raise ModelError(f"{subject} is too large to be stored dense: its shape is {dims}")
    if indices.ndim == 2 and dims:
        indices = indices.reshape(-1, indices.shape[1])
        inside = indices.shape[1] == len(dims) and bool(
            ((indices >= 0) & (indices < np.array(dims))).all()
        )
        indices = np.ravel_multi_index(tuple(indices.T), dims) if inside else indices
    else:
        inside = indices.ndim == 1 and bool(((indices >= 0) & (indices < math.prod(dims))).all())
    if not inside or indices.dtype != np.int64 or values.ndim != 1 or len(values) != len(indices):
        raise ModelError(f"{subject} is malformed: its indices are not places of its shape {dims}")
    array = np.zeros(math.prod(dims), values.dtype)
    array[indices] = values
    dense = numpy_helper.from_array(array.reshape(dims), name)
    dense.data_type = sparse.values.data_type
    return dense


def drop_false_records(graph: ir.Graph | ir.Function) -> None:
    """Take a record of packed parameters off each value that it does not fit.

    A file may hold it, whose weights another tool has changed.
    """
    results = (v for node in graph for v in node.outputs)
    initializers = graph.initializers.values() if isinstance(graph, ir.Graph) else ()
    for value in (*graph.inputs, *initializers, *results):
        text = value.metadata_props.get(PACKED)
        shape = value.shape if value.const_value is None else value.const_value.shape
        if text is not None and not _fits(text, extents(shape)):
            del value.metadata_props[PACKED]


def _fits(text: str, shape: Sequence[int | str | None]) -> bool:
    """Whether the parts of a record make a value of this shape."""
    axes = [*range(len(shape))]
    try:
        record = json.loads(text)
        axis, parts = record["axis"], record["parts"]
        rest = 0 if axis is None else shape[axis]
        for part in parts:
            order, sizes = part["perm"] or axes, part["shape"]
            moved, expected = [sizes[i] for i in order], [*shape]
            if axis is not None:
                expected[axis] = moved[axis]
                rest -= moved[axis]
            named = type(part["name"]) is str and sorted(order) == axes and len(sizes) == len(axes)
            if not named or moved != expected or any(type(n) is not int or n < 0 for n in sizes):
                return False
        return rest == 0 and (axis is not None or len(parts) == 1)
    except (ValueError, TypeError, LookupError, RecursionError):
        return False

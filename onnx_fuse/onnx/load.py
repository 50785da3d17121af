"""Read and check a model.

Files are untrusted: sizes and external-data locations are checked before anything is read through
them, and every fault becomes a `ModelError` of one sentence.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from google.protobuf.message import DecodeError

from onnx_fuse import progress
from onnx_fuse.container import GRAPH, Container, is_container, stamp
from onnx_fuse.errors import ModelError
from onnx_fuse.onnx import contrib
from onnx_fuse.onnx.build import all_nodes, subgraphs
from onnx_fuse.onnx.common import (
    CANONICAL_OPSET,
    FUSE,
    MAP_TYPE,
    Model,
    body_of,
    carries_body,
    one_line,
)
from onnx_fuse.onnx.opsets import canonical, constant_weights
from onnx_fuse.onnx.save import functions_attached, serialized
from onnx_fuse.onnx.shapes import without_weights
from onnx_fuse.onnx.types import NCHWC
from onnx_fuse.onnx.weights import PLACE, InContainer, Weights, parts

_READ = "onnx_fuse.read"
"""meta key of what `read` gave back: a command that loads it next need not check it again."""


def load(source: Model) -> ir.Model:
    """Parse, check and canonicalize the opset of `source`: a path, bytes, ModelProto or ir.Model.

    Local functions are inlined, except this project's own fused ops, whose bodies are taken off and
    put back by `save`. Raises ModelError for anything that is not a valid model.
    """
    model = read(source)
    model.meta.pop(_READ, None)
    with _faults(_name(source)):
        late = _checked_late(model)
        model = canonical(model)
        if late:
            _check_operators(model)
        return model


def reread(data: bytes, weights: Weights) -> ir.Model:
    """Read a model of `save.serialized_without_weights`, which was checked before."""
    model = ir.serde.deserialize_model(onnx.ModelProto.FromString(data))
    model.functions.clear()  # our own bodies
    _map_external(model, None, weights)
    constant_weights(model)
    return model


def read(source: Model) -> ir.Model:
    """Parse and check `source` and leave it as it is: its functions, its opset, its weights' order.

    External tensors are mapped into memory, so the model no longer depends on where its file was.
    """
    with _faults(_name(source)):
        if isinstance(source, ir.Model):
            model = source.clone()
            if model.meta.pop(_READ, False):
                return model
        else:
            folder: Path | None = None
            weights: Weights | None = None
            if isinstance(source, onnx.ModelProto):
                proto = _checked(source)
            elif isinstance(source, bytes):
                proto = _checked(_parse(source))
            elif is_container(source):
                container = Container(source)
                proto = _checked(_parse(bytes(container.member(GRAPH))))
                weights = InContainer(container)
            else:
                folder = Path(source).parent
                progress.report(f"reading {Path(source).name}")
                data, weights = parts(Path(source))
                proto = _checked(_parse(data))
            _check_tensors(proto, folder, weights)
            _free_negative_sizes(proto.graph)
            maps = _without_maps(proto.graph)
            model = ir.serde.deserialize_model(proto)
            for value in (*model.graph.inputs, *model.graph.outputs):
                if value.name in maps:
                    value.meta[MAP_TYPE] = maps[value.name]
            model.graph.opset_imports.setdefault("", CANONICAL_OPSET)
            if folder is not None or weights is not None:
                _map_external(model, folder, weights)
        _check_graph(model)
    model.meta[_READ] = True
    return model


def external_files(path: Path) -> list[Path]:
    """The files of weights that the model at `path` names; none where it is no model."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data.find(b"location") < 0:  # a key that each external tensor has
                return []
            proto = _parse(data[:])
        nodes = itertools.chain.from_iterable(f.node for f in proto.functions)
        tensors = itertools.chain(_tensors(proto.graph), _node_tensors(nodes))
        entries = itertools.chain.from_iterable(t.external_data for t in tensors)
        return [path.parent / name for name in {e.value for e in entries if e.key == "location"}]
    except (OSError, ValueError, ModelError):
        return []  # what is wrong with it is said where it is read


def _name(source: Model) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else "model"


@contextlib.contextmanager
def _faults(name: str) -> Iterator[None]:
    """Whatever the parsers raise on an untrusted file becomes one sentence that names the file."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    except OSError as error:
        raise ModelError(f"{name}: {error.strerror or error}") from error
    except MemoryError as error:
        raise ModelError(f"{name}: this machine has too little memory to read it") from error
    except Exception as error:
        raise ModelError(f"{name}: {one_line(_root(error))}") from error


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _parse(data: bytes) -> onnx.ModelProto:
    try:
        proto: onnx.ModelProto = onnx.ModelProto.FromString(data)
    except DecodeError as error:
        raise ModelError(f"not an ONNX file ({one_line(error)})") from error
    return proto


def _checked(proto: onnx.ModelProto) -> onnx.ModelProto:
    if not proto.ir_version or not proto.HasField("graph"):
        raise ModelError("not an ONNX file (it holds no graph)")
    imported = {o.domain for o in proto.opset_import}
    if not imported & {"", "ai.onnx"} and any(n.domain == "" for n in proto.graph.node):
        raise ModelError("the model imports no ai.onnx opset")
    newest = onnx.defs.onnx_opset_version()
    for opset in proto.opset_import:
        if opset.domain in ("", "ai.onnx") and not 1 <= opset.version <= newest:
            raise ModelError(f"ai.onnx opset {opset.version} is not supported (1 to {newest} are)")
    return proto


def _check_tensors(
    proto: onnx.ModelProto, folder: Path | None, weights: Weights | None = None
) -> None:
    """Sizes and locations of all stored tensors, before any is allocated or opened."""
    nodes = itertools.chain.from_iterable(f.node for f in proto.functions)
    for tensor in itertools.chain(_tensors(proto.graph), _node_tensors(nodes)):
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
        if nbytes >= 2**48:
            raise ModelError(f"{where} has shape {list(tensor.dims)}: its size overflows")
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _check_external(tensor, nbytes, folder, weights, where)
        elif bits and tensor.HasField("raw_data") and len(tensor.raw_data) != nbytes:
            raise ModelError(
                f"{where} holds {len(tensor.raw_data)} bytes, but its shape needs {nbytes}"
            )
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
    folder: Path | None,
    weights: Weights | None,
    where: str,
) -> None:
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if weights is not None and location == weights.location:
        if weights.nbytes(tensor) != nbytes:
            raise ModelError(
                f"{where} holds {weights.nbytes(tensor)} bytes, but its shape needs {nbytes}"
            )
        return
    if folder is None:
        raise ModelError(f"{where} is in the external file '{location}': pass the model as a path")
    root = folder.resolve()
    target = (root / location).resolve()
    # resolve() follows symlinks, so a link that leaves the folder is caught as well as ../ is.
    if not location or os.path.isabs(location) or not target.is_relative_to(root):
        raise ModelError(f"{where}: external data '{location}' lies outside the model's folder")
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", nbytes))
        size = target.stat().st_size
    except (OSError, ValueError) as error:
        raise ModelError(f"{where}: external data '{location}': {error}") from error
    if offset < 0 or length != nbytes or offset + length > size:
        raise ModelError(
            f"{where}: external data '{location}' has no {nbytes} bytes at offset {offset}"
        )


def _free_negative_sizes(graph: onnx.GraphProto) -> None:
    """A size of -1, as PaddlePaddle writes it, is one that is not known."""
    for info in itertools.chain(graph.input, graph.output, graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.Clear()
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                _free_negative_sizes(inner)


def _without_maps(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    """Take the types that onnx-ir (1.1) cannot hold off the graph's values: those with maps."""
    taken: dict[str, onnx.TypeProto] = {}
    for info in itertools.chain(graph.input, graph.output, graph.value_info):
        kind = info.type
        while kind.WhichOneof("value") in ("sequence_type", "optional_type"):
            kind = getattr(kind, kind.WhichOneof("value")).elem_type
        if kind.HasField("map_type"):
            taken[info.name] = onnx.TypeProto.FromString(info.type.SerializeToString())
            info.ClearField("type")
    return taken


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    if graph.sparse_initializer:
        raise ModelError("sparse initializers are not supported: store them dense")
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for sub in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                yield from _tensors(sub)


def _map_external(model: ir.Model, folder: Path | None, weights: Weights | None) -> None:
    """Replace external tensors by arrays: over the mapped file, or those that are in memory."""
    if folder is not None:
        ir.external_data.set_base_dir(model.graph, folder)
    graphs = [model.graph, *(f.graph for f in model.functions.values())]
    for graph in itertools.chain.from_iterable((g, *g.subgraphs()) for g in graphs):
        for value in getattr(graph, "initializers", {}).values():
            value.const_value = _mapped(value.const_value, weights)
        for node in graph:
            for name, attribute in node.attributes.items():
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    node.attributes[name] = ir.AttrTensor(
                        name, _mapped(attribute.as_tensor(), weights)
                    )


def _mapped(tensor: Any, weights: Weights | None) -> Any:
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    if weights is not None and tensor.location == weights.location:
        array = weights.array(tensor).view(tensor.dtype.numpy()).reshape(tensor.shape.numpy())
        held = ir.Tensor(array, tensor.dtype, name=tensor.name, doc_string=tensor.doc_string)
        if (place := weights.place(tensor)) is not None:
            held.meta[PLACE] = place
        return held
    mapped = ir.Tensor(tensor.numpy(), tensor.dtype, name=tensor.name, doc_string=tensor.doc_string)
    mapped.meta["external"] = tensor.location  # what saves the same model again may want to know
    mapped.meta[PLACE] = (tensor.location, tensor.offset or 0, stamp(Path(tensor.path)))
    return mapped


def _check_graph(model: ir.Model) -> None:
    """Cycles, undefined values and unknown operators; then the spec's own checker."""
    known = set(model.functions)
    contrib.import_domains(model)
    for node in all_nodes(model.graph):
        own = body_of(node.op_type, node.domain) is not None
        if own or node.op_identifier() in known:
            continue
        opset = model.graph.opset_imports.get(node.domain)
        what = f"node '{node.name or node.outputs[0].name if node.outputs else node.name}'"
        if node.domain == "":
            if not (
                onnx.defs.has(node.op_type, max_inclusive_version=opset or 1)
                or contrib.in_default_domain(node)
            ):
                raise ModelError(f"{what}: ai.onnx opset {opset} has no operator '{node.op_type}'")
        elif opset is None:
            raise ModelError(f"{what}: the model does not import its domain '{node.domain}'")
        _check_attributes(node, what)
    _check_defined(model.graph, set())
    try:
        common_passes.TopologicalSortPass()(model)
    except (ValueError, ir.passes.PassError) as error:
        raise ModelError("the graph has a cycle") from error
    if not _checked_late(model):
        _check_operators(model)


_ELEMENT_TYPES = ("dtype", "output_dtype", "softmax_precision", "stash_type", "to")


def _check_attributes(node: ir.Node, what: str) -> None:
    """Check attributes that ONNX's checker does not look at and its inference trusts."""
    if node.domain:
        return
    if node.op_type == "Constant" and len(node.attributes) != 1:
        raise ModelError(f"{what}: a Constant has one attribute, this has {len(node.attributes)}")
    parts = node.attributes.get_int("num_outputs", 0) if node.op_type == "Split" else 0
    if parts and parts != len(node.outputs):
        raise ModelError(
            f"{what}: num_outputs is {parts}, but Split has {len(node.outputs)} outputs"
        )
    for name in _ELEMENT_TYPES:
        attribute = node.attributes.get(name)
        if attribute is None or attribute.is_ref() or attribute.type != ir.AttributeType.INT:
            continue
        if attribute.value not in {t.value for t in ir.DataType}:
            raise ModelError(
                f"{what} ({node.op_type}): {name} is {attribute.value}, which is no element type"
            )
        kind = ir.DataType(attribute.value)
        if name == "stash_type" and not kind.is_floating_point():
            raise ModelError(
                f"{what} ({node.op_type}): stash_type is {kind.value} ({kind.name.lower()}), which "
                "is no floating-point type"
            )


def _checked_late(model: ir.Model) -> bool:
    """Whether the specification's checker would refuse what `canonical` mends.

    It takes no function that imports another opset than the model does, and calls
    GroupNormalization deprecated in the opsets 18 to 20, which had no other.
    """
    version = model.graph.opset_imports.get("", 1)
    if any(f.opset_imports.get("", version) != version for f in model.functions.values()):
        return True
    nodes = itertools.chain(
        all_nodes(model.graph),
        *(f.all_nodes() for f in model.functions.values()),
    )
    return version < 21 and any(n.op_type == "GroupNormalization" for n in nodes)


def _check_operators(model: ir.Model) -> None:
    """The specification's own checker, which need not see the weights."""
    aside = contrib.default_domain_left(model)
    with functions_attached(model), without_weights(model), aside:
        proto = serialized(model)
    for info in proto.graph.output:  # onnxruntime asks for no type of an output
        if info.type.WhichOneof("value") is None:
            info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    for info in itertools.chain(proto.graph.input, proto.graph.output):  # nor for any shape
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.shape.SetInParent()
    onnx.checker.check_model(proto)


_KNOWN_DOMAINS = ("", FUSE, "ai.onnx.ml", "ai.onnx.preview.training", "com.microsoft", NCHWC)


def opaque(model: ir.Model) -> str | None:
    """The first node whose operator nobody here knows, as a user would name it."""
    for node in all_nodes(model.graph):
        if node.domain not in _KNOWN_DOMAINS and not carries_body(node):
            return f"node '{node.name or node.outputs[0].name}' ({node.domain}.{node.op_type})"
    return None


def _check_defined(graph: ir.Graph, outer: set[ir.Value]) -> None:
    defined = outer | set(graph.inputs) | set(graph.initializers.values())
    for value in graph.initializers.values():
        if value.const_value is None:
            raise ModelError(f"initializer '{value.name}' has no data")
    for node in graph:
        defined.update(node.outputs)
    for node in graph:
        for read in node.inputs:
            if read is not None and read not in defined:
                raise ModelError(
                    f"node '{node.name}' ({node.op_type}) reads '{read.name}', which no node, "
                    "input or initializer defines"
                )
        for attribute in node.attributes.values():
            for sub in subgraphs(attribute):
                _check_defined(sub, defined)
    for output in graph.outputs:
        if output not in defined:
            raise ModelError(f"nothing defines the output '{output.name}'")

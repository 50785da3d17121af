"""Read and check a model.

Files are untrusted: sizes and external-data locations are checked before anything is read through
them, and every fault becomes a `ModelError` of one sentence.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from google.protobuf.message import DecodeError

from onnx_fuse import progress
from onnx_fuse.container import GRAPH, Container, is_container, stamp
from onnx_fuse.errors import ModelError
from onnx_fuse.importer import contrib, training_info
from onnx_fuse.importer.foreign import refuse_foreign
from onnx_fuse.importer.opsets import canonical, constant_weights
from onnx_fuse.importer.save import functions_attached, serialized
from onnx_fuse.importer.shapes import declarations_as_hints, without_weights
from onnx_fuse.importer.types import NCHWC
from onnx_fuse.importer.untrusted import (
    check_names,
    check_tensors,
    drop_false_records,
    external_file,
    graphs,
    has_sparse,
    innermost,
    lacks_element_type,
    node_tensors,
    store_dense,
    tensors,
)
from onnx_fuse.importer.weights import PLACE, InContainer, InFile, Weights, parts, parts_of_file
from onnx_fuse.ir.actual_sizes import POOLS
from onnx_fuse.ir.build import all_nodes, subgraphs
from onnx_fuse.ir.constants import CANONICAL_OPSET, FUSE, MAP_TYPE, PREVIEW, Model, one_line
from onnx_fuse.ops.bodies import body_of, carries_body


def standard(source: Model) -> ir.Model:
    """Parse, check and canonicalize the opset of `source`: a path, bytes, ModelProto or ir.Model.

    Local functions are inlined, except this project's own fused ops, whose bodies are taken off and
    put back by `save`. Raises ModelError for anything that is not a valid model.
    """
    model = read(source)
    with file_faults(source):
        late, called = _checked_late(model), bool(model.functions)
        with declarations_as_hints(model):
            model = canonical(model)
        if late:
            _check_operators(model)
        if called:  # an attribute by reference, which a call does not give, is there no longer
            for node in all_nodes(model.graph):
                _check_attributes(node)
        return model


def reread(data: bytes, weights: Weights) -> ir.Model:
    """Read a model of `save.serialized_without_weights`, which was checked before."""
    model = ir.serde.deserialize_model(onnx.ModelProto.FromString(data))
    model.functions.clear()  # our own bodies
    _map_external(model, (), weights)
    constant_weights(model)
    return model


def read(source: Model, *, lazy: bool = False) -> ir.Model:
    """Parse and check `source` and leave it as it is: its functions, its opset, its weights' order.

    External tensors are mapped into memory, so the model no longer depends on where its file was.
    With `lazy` large weights in a file itself are read whenever their numbers are asked for, and
    meanwhile it may be replaced but not written to.
    """
    with file_faults(source):
        if isinstance(source, ir.Model):
            model = source.clone()
        else:
            if not isinstance(source, onnx.ModelProto):
                refuse_foreign(source if isinstance(source, bytes) else Path(source))
            folders: tuple[Path, ...] = ()
            weights: Weights | None = None
            if isinstance(source, onnx.ModelProto):
                proto = _checked(source)
                if _needs_mending(proto):  # what the caller gave stays as it is
                    proto = onnx.ModelProto.FromString(proto.SerializeToString())
            elif isinstance(source, bytes):
                proto = _checked(_parse(source))
            elif is_container(source):
                container = Container(source)
                proto = _checked(_parse(bytes(container.member(GRAPH))))
                weights = InContainer(container)
            else:
                folders = (Path(source).parent, Path(source).resolve().parent)
                progress.report(f"reading {Path(source).name}")
                data, weights = parts(Path(source), lazy=lazy)
                proto = _checked(_parse(data))
            check_tensors(proto, folders, weights)
            check_names(proto)
            if has_sparse(proto):
                store_dense(proto)
            _free_undefined(proto)
            maps = _without_maps(proto.graph)
            with _unlogged():
                model = ir.serde.deserialize_model(proto)
            for value in (*model.graph.inputs, *model.graph.outputs):
                if value.name in maps:
                    value.meta[MAP_TYPE] = maps[value.name]
            training_info.keep(proto, model)
            _shapes_of_weights(model)
            model.graph.opset_imports.setdefault("", CANONICAL_OPSET)
            if folders or weights is not None:
                _map_external(model, folders, weights)
        for graph in (model.graph, *model.graph.subgraphs(), *model.functions.values()):
            drop_false_records(graph)
        model.graph.name = model.graph.name or "graph"  # of which onnxruntime asks for no name
        _check_graph(model)
    return model


def external_files(path: Path) -> list[Path]:
    """The files of weights that the model at `path` names; none where it is no model."""
    try:
        with path.open("rb") as file:
            data, weights = parts_of_file(file)
        proto = _parse(data)
        nodes = itertools.chain.from_iterable(f.node for f in proto.functions)
        stored = itertools.chain(tensors(proto.graph), node_tensors(nodes))
        entries = itertools.chain.from_iterable(t.external_data for t in stored)
        names = {e.value for e in entries if e.key == "location" and "\0" not in e.value}
        inside = {weights.location} if weights is not None else set()
        return [path.parent / name for name in names - inside]
    except (OSError, ValueError, ModelError):
        return []  # what is wrong with it is said where it is read


@contextlib.contextmanager
def file_faults(source: Model) -> Iterator[None]:
    """Whatever the parsers raise on an untrusted file becomes one sentence that names the file."""
    name = str(source) if isinstance(source, str | os.PathLike) else "model"
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from error
    except OSError as error:
        raise ModelError(f"{name}: {error.strerror or error}") from error
    except MemoryError as error:
        raise ModelError(f"{name}: this machine has too little memory to read it") from error
    except NameError:  # never the fault of a file
        raise
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
        if data[:1] != b"\x08" or "UTF-8" in str(error):  # exporters write ir_version first
            raise ModelError(f"not an ONNX file ({one_line(error)})") from error
        raise ModelError(
            f"not a whole ONNX file: its {len(data):,} bytes are damaged or cut short; "
            "copy or download it again"
        ) from error
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


def _all_value_infos(proto: onnx.ModelProto) -> Iterator[onnx.ValueInfoProto]:
    for graph in graphs(proto):
        if isinstance(graph, onnx.GraphProto):
            yield from (*graph.input, *graph.output, *graph.value_info)


def _free_undefined(proto: onnx.ModelProto) -> None:
    """A size of -1, as PaddlePaddle writes it, and a type without elements are not known."""
    for info in _all_value_infos(proto):
        if lacks_element_type(info.type):
            info.ClearField("type")
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.Clear()


def _without_maps(graph: onnx.GraphProto) -> dict[str, onnx.TypeProto]:
    """Take the types that onnx-ir (1.1) cannot hold off the graph's values: those with maps."""
    taken: dict[str, onnx.TypeProto] = {}
    for info in itertools.chain(graph.input, graph.output, graph.value_info):
        if innermost(info.type).HasField("map_type"):
            taken[info.name] = onnx.TypeProto.FromString(info.type.SerializeToString())
            info.ClearField("type")
    return taken


def _needs_mending(proto: onnx.ModelProto) -> bool:
    infos = [*_all_value_infos(proto)]
    return (
        has_sparse(proto)
        or any(d.dim_value < 0 for i in infos for d in i.type.tensor_type.shape.dim)
        or any(i.type.WhichOneof("value") not in (None, "tensor_type") for i in infos)
        or any(lacks_element_type(i.type) for i in infos)
    )


def _shapes_of_weights(model: ir.Model) -> None:
    """An initializer has its tensor's shape, whatever value_info says; one that is an input and
    may be overridden has the shape that is declared for it."""
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and not value.is_graph_input():
                value.shape, value.dtype = ir.Shape(tensor.shape.numpy()), tensor.dtype


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Without onnx-ir's log lines: what is wrong with a file is said once, as the error."""
    logger = logging.getLogger("onnx_ir")
    before, logger.disabled = logger.disabled, True
    children = [
        child
        for name, child in logging.root.manager.loggerDict.items()
        if name.startswith("onnx_ir.") and isinstance(child, logging.Logger) and not child.disabled
    ]
    for child in children:
        child.disabled = True
    try:
        yield
    finally:
        logger.disabled = before
        for child in children:
            child.disabled = False


def _map_external(model: ir.Model, folders: Sequence[Path], weights: Weights | None) -> None:
    """Replace external tensors by arrays: over the mapped file, or those that are in memory."""
    graphs = [model.graph, *(f.graph for f in model.functions.values())]
    for graph in itertools.chain.from_iterable((g, *g.subgraphs()) for g in graphs):
        for value in getattr(graph, "initializers", {}).values():
            value.const_value = _mapped(value.const_value, folders, weights)
        for node in graph:
            for name, attribute in node.attributes.items():
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    node.attributes[name] = ir.AttrTensor(
                        name, _mapped(attribute.as_tensor(), folders, weights)
                    )


def _mapped(tensor: object, folders: Sequence[Path], weights: Weights | None) -> Any:
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    if weights is not None and tensor.location == weights.location:

        def numbers() -> ir.Tensor[Any]:
            array = weights.array(tensor).view(tensor.dtype.numpy()).reshape(tensor.shape.numpy())
            return ir.Tensor(array, tensor.dtype, name=tensor.name, doc_string=tensor.doc_string)

        held: Any
        if isinstance(weights, InFile):
            held = ir.LazyTensor(numbers, tensor.dtype, ir.Shape(tensor.shape.numpy()))
            held.name, held.doc_string = tensor.name, tensor.doc_string
        else:
            held = numbers()
        if (place := weights.place(tensor)) is not None:
            held.meta[PLACE] = place
        return held
    target = external_file(str(tensor.location), folders)
    if target is None:
        return tensor
    # onnx-ir (1.1) opens no file with several hard links, as caches of packages have; of a file
    # without a base folder it checks nothing, and what this one may be was checked before.
    stored = ir.ExternalTensor(
        str(target),
        tensor.offset,
        tensor.length or None,  # as `_check_external` reads it
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name or "",
    )
    mapped = ir.Tensor(stored.numpy(), tensor.dtype, name=tensor.name, doc_string=tensor.doc_string)
    mapped.meta["external"] = tensor.location  # what saves the same model again may want to know
    mapped.meta[PLACE] = (tensor.location, tensor.offset or 0, stamp(target))
    return mapped


def _check_graph(model: ir.Model) -> None:
    """Cycles, undefined values and unknown operators; then the spec's own checker."""
    functions = set(model.functions)
    contrib.import_domains(model)
    for node in all_nodes(model.graph):
        fused = body_of(node.op_type, node.domain) is not None
        if fused or node.op_identifier() in functions:
            continue
        opset = model.graph.opset_imports.get(node.domain)
        where = _called(node)
        if node.domain == "":
            if not (
                onnx.defs.has(node.op_type, max_inclusive_version=opset or 1)
                or contrib.in_default_domain(node)
            ):
                raise ModelError(f"{where}: ai.onnx opset {opset} has no operator '{node.op_type}'")
        elif opset is None:
            raise ModelError(f"{where}: the model does not import its domain '{node.domain}'")
        _check_attributes(node)
        if node.op_type == "Constant" and not node.domain and (opset or 1) < 12:
            _hold_tensor(node)
    _check_defined(model.graph, set())
    try:
        common_passes.TopologicalSortPass()(model)
    except (ValueError, ir.passes.PassError) as error:
        raise ModelError("the graph has a cycle") from error
    if not _checked_late(model):
        _check_operators(model)


_MOST_AXES = 1024
"""No tensor has more: inference reads the size of an axis before it looks whether there is one."""
_ELEMENT_TYPES = ("dtype", "output_dtype", "softmax_precision", "stash_type", "to")


def _called(node: ir.Node) -> str:
    return f"node '{node.name or node.outputs[0].name if node.outputs else node.name}'"


def _hold_tensor(node: ir.Node) -> None:
    """Write a Constant's numbers or strings as a tensor: onnxruntime takes all in any opset."""
    tensor = ir.convenience.get_const_tensor(node.outputs[0])
    if tensor is not None and "value" not in node.attributes:
        node.attributes.clear()
        node.attributes["value"] = ir.AttrTensor("value", tensor)


def _check_attributes(node: ir.Node) -> None:
    """Check attributes that ONNX's checker does not look at and its inference trusts."""
    if node.domain:
        return
    where = _called(node)
    if node.op_type == "Constant" and len(node.attributes) != 1:
        raise ModelError(f"{where}: a Constant has one attribute, this has {len(node.attributes)}")
    parts = node.attributes.get_int("num_outputs", 0) if node.op_type == "Split" else 0
    if parts and parts != len(node.outputs):
        raise ModelError(
            f"{where}: num_outputs is {parts}, but Split has {len(node.outputs)} outputs"
        )
    if node.op_type in POOLS:
        kernel, pads = (list(node.attributes.get_ints(n, ())) for n in ("kernel_shape", "pads"))
        if any(pad >= size for pad, size in zip(pads, kernel + kernel, strict=False)):
            smaller = f"each must be smaller than the kernel, which is {kernel}"
            raise ModelError(f"{where} ({node.op_type}): pads are {pads}, but {smaller}")
    if node.op_type.startswith("Random"):  # onnxruntime asserts it
        defaults = (("low", 0.0), ("high", 1.0), ("scale", 1.0))
        low, high, scale = (node.attributes.get_float(*pair) for pair in defaults)
        if not (low <= high and scale > 0):
            drawn = f"from {low} to {high}" if scale > 0 else f"with a scale of {scale}"
            raise ModelError(f"{where} ({node.op_type}): no number can be drawn {drawn}")
    for name, attribute in node.attributes.items():
        if attribute.is_ref() or attribute.type != ir.AttributeType.INT:
            continue
        least = -_MOST_AXES if name == "axis" else 0
        if name in ("axis", "batch_dims") and not least <= attribute.value <= _MOST_AXES:
            raise ModelError(
                f"{where} ({node.op_type}): {name} is {attribute.value}, which is out of range"
            )
        types = {t.value for t in ir.DataType if t or name != "to"}  # 0 leaves other ones open
        if name in _ELEMENT_TYPES and attribute.value not in types:
            raise ModelError(
                f"{where} ({node.op_type}): {name} is {attribute.value}, which is no element type"
            )
        if name == "stash_type" and not (kind := ir.DataType(attribute.value)).is_floating_point():
            raise ModelError(
                f"{where} ({node.op_type}): stash_type is {kind.value} ({kind.name.lower()}), "
                "which is no floating-point type"
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
        all_nodes(model.graph), *(f.all_nodes() for f in model.functions.values())
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


_KNOWN_DOMAINS = ("", FUSE, "ai.onnx.ml", PREVIEW, "com.microsoft", NCHWC)


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
                name = node.name or next((v.name for v in node.outputs if v.name), "")
                raise ModelError(
                    f"node '{name}' ({node.op_type}) reads '{read.name}', which no node, "
                    "input or initializer defines"
                )
        branches = [sub for attr in node.attributes.values() for sub in subgraphs(attr)]
        _let_outer_names_win(branches, defined)
        for sub in branches:
            _check_defined(sub, defined)
    for output in graph.outputs:
        if output not in defined:
            raise ModelError(f"nothing defines the output '{output.name}'")


def _let_outer_names_win(branches: Sequence[ir.Graph], outer: set[ir.Value]) -> None:
    """A branch's initializer gives way to an outer value of its name that some branch reads.

    So it is in onnxruntime; ONNX has no two values of one name.
    """
    names = {name for sub in branches for name in sub.initializers}
    shadowed = {value for value in outer if value.name in names} if names else set()
    nodes = [node for sub in branches for node in all_nodes(sub)] if shadowed else []
    read = {value for node in nodes for value in node.inputs}
    read |= {value for sub in branches for value in sub.outputs}
    for value in shadowed & read:
        for sub in branches:
            if inner := sub.initializers.pop(str(value.name), None):
                inner.replace_all_uses_with(value, replace_graph_outputs=True)

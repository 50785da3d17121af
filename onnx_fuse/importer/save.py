"""Write a model: fused ops carry their bodies, and a file appears whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from onnx_fuse import files
from onnx_fuse.container import WEIGHTS
from onnx_fuse.errors import ModelError
from onnx_fuse.importer import contrib, training_info
from onnx_fuse.importer.downgrade import downgrade
from onnx_fuse.importer.upgrade import upgrade
from onnx_fuse.importer.weights import GRAPH, INITIALIZER, PLACE, RAW_DATA, Piece, lengthy
from onnx_fuse.ir.build import all_nodes, given, remove_unused_nodes, rename_shadowing_values
from onnx_fuse.ir.constants import CAME_IN, CANONICAL_OPSET, DEFAULT, FUSE, MAP_TYPE, quiet
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.bodies import body_of, carries_body

MAX_PROTOBUF = 2**31 - 1
_STREAMED = 1 << 16  # bytes from which save() writes an initializer on its own


def attach_functions(model: ir.Model) -> list[ir.OperatorIdentifier]:
    """Give the model the body of every fused op it calls; returns those that it lacked."""
    opset = model.graph.opset_imports[""]
    added: dict[ir.OperatorIdentifier, ir.Function] = {}
    for node in all_nodes(model.graph):
        key = node.op_identifier()
        if carries_body(node) and key not in model.functions and key not in added:
            added[key] = fused_function(node.op_type, opset, node.overload, node.domain)
    model.functions.update(added)
    if added:
        model.graph.opset_imports.update({domain: 1 for domain, *_ in added})
    elif not model.functions:
        model.graph.opset_imports.pop(FUSE, None)
    return list(added)


@contextlib.contextmanager
def functions_attached(model: ir.Model) -> Iterator[None]:
    """Within the block the model carries the body of every fused op it calls."""
    imported = FUSE in model.graph.opset_imports
    added = attach_functions(model)
    try:
        yield
    finally:
        for key in added:
            model.functions.pop(key, None)  # the inliner takes away what it used up
        if added and not imported:
            model.graph.opset_imports[FUSE] = 1


def fused_function(op_type: str, opset: int, overload: str = "", domain: str = FUSE) -> ir.Function:
    """The body of `LayerNormGemm`; that of `LayerNormGemm_mean_rstd` returns inner values too."""
    body = body_of(op_type, domain)
    if body is None:
        raise ModelError(f"domain {domain} has no operator '{op_type}'")
    exposed = FusedName.of(op_type).exposed if domain == FUSE else ()
    if opset >= CANONICAL_OPSET:
        return body(exposed, opset, overload)
    function = body(exposed, CANONICAL_OPSET, overload)
    for node in function:
        if node.op_type == "Split" and opset < 18:  # in equal parts, as in all of our bodies
            node.attributes.pop("num_outputs", None)
    try:
        downgrade(function, CANONICAL_OPSET, opset)
    except ModelError as error:
        raise ModelError(f"the body of {op_type}: {error}") from error
    function.opset_imports[""] = opset
    return function


def to_proto(model: ir.Model, *, shapes: bool = True) -> onnx.ModelProto:
    """The model as a ModelProto that stock onnxruntime runs: fused ops carry their bodies.

    `shapes=False` as in `save`.
    """
    with functions_attached(model), _noted_shapes(model, shapes), _defaults_attached(model):
        return serialized(model)


_OUTSIDE = 1 << 10  # bytes from which a weight is left out of the protobuf


def is_large_weight(tensor: ir.TensorProtocol | None) -> bool:
    """Whether an initializer is left out of the protobuf: a large one of whole bytes."""
    return (
        tensor is not None
        and tensor.dtype != ir.DataType.STRING
        and 8 <= tensor.dtype.bitwidth <= 64
        and tensor.nbytes >= _OUTSIDE
    )


def stands_in_file(tensor: object) -> bool:
    """Whether a tensor was read from the model's own file, which holds its bytes as they are."""
    return getattr(tensor, "meta", {}).get(PLACE, (None,))[0] == ""


def serialized_without_weights(
    model: ir.Model, *, shapes: bool = True, file: Path | None = None
) -> bytes:
    """The model as a protobuf that only names its large weights, which others hold.

    Those that stand in the model's `file` are named as bytes of it. `shapes=False` as in `save`.
    """
    graph = model.graph
    held = {
        n: v.const_value for n, v in graph.initializers.items() if is_large_weight(v.const_value)
    }
    try:
        for name, tensor in held.items():
            assert tensor is not None
            place = (WEIGHTS, 0)
            if file is not None and stands_in_file(tensor):
                place = (file.name, tensor.meta[PLACE][1])
            graph.initializers[name].const_value = ir.ExternalTensor(
                *(*place, tensor.nbytes, tensor.dtype),
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
            )
        return to_proto(model, shapes=shapes).SerializeToString()
    finally:
        for name, tensor in held.items():
            graph.initializers[name].const_value = tensor


def serialized(model: ir.Model) -> onnx.ModelProto:
    """The model as it is, with the types that onnx-ir cannot hold.

    Values in bodies that are called as one outside get names of their own.
    """
    rename_shadowing_values(model.graph)
    with quiet("onnx_ir"):  # it logs values that have a shape and no type
        proto = ir.serde.serialize_model(model)
    graph = proto.graph
    ends = itertools.chain(
        zip(graph.input, model.graph.inputs, strict=True),
        zip(graph.output, model.graph.outputs, strict=True),
    )
    for info, value in ends:
        if MAP_TYPE in value.meta and info.type.WhichOneof("value") is None:
            info.type.CopyFrom(value.meta[MAP_TYPE])
    return proto


@contextlib.contextmanager
def _defaults_attached(model: ir.Model) -> Iterator[None]:
    """Within the block an input that has a default is an initializer too."""
    graph = model.graph
    values = [v for v in graph.inputs if DEFAULT in v.meta]
    for value in values:
        value.const_value = value.meta[DEFAULT]
        graph.initializers[value.name or ""] = value
    try:
        yield
    finally:
        for value in values:
            value.const_value = None
            graph.initializers.pop(value.name or "", None)


@contextlib.contextmanager
def _noted_shapes(model: ir.Model, shapes: bool) -> Iterator[None]:
    """Within the block, unless `shapes`, values that carry no note have no type or shape either."""
    held: list[tuple[ir.Value, ir.TypeProtocol | None, ir.Shape | None]] = []
    for graph in () if shapes else (model.graph, *model.graph.subgraphs()):
        ends = {*graph.inputs, *graph.outputs}
        results = (v for n in graph if n.domain in ("", FUSE) for v in n.outputs)
        for value in itertools.chain(graph.initializers.values(), results):
            if value not in ends and not value.metadata_props and not value.doc_string:
                held.append((value, value.type, value.shape))
                value.type = value.shape = None
    try:
        yield
    finally:
        for value, type_, shape in held:
            value.type, value.shape = type_, shape


def inline(model: ir.Model, chosen: Callable[[ir.Node], bool] = lambda node: True) -> ir.Model:
    """The same model in plain ai.onnx: every fused or contrib op replaced by its body.

    A contrib node that has no body stays, as one does that is not `chosen`.
    """
    model = model.clone()
    contrib.expand(model, chosen)
    with functions_attached(model):
        flat = common_passes.InlinePass()(model).model.clone()
    for key in list(flat.functions):
        del flat.functions[key]
        flat.graph.opset_imports.pop(key[0], None)
    flat.graph.opset_imports.pop(FUSE, None)
    rename_shadowing_values(flat.graph)
    return flat


def loadable(model: ir.Model) -> ir.Model:
    """The model, or a copy at the opset of its file where onnxruntime may not load a newer one.

    From opset 21 on onnxruntime's CPU (1.32) breaks graphs whose activations are quantized to int8:
    it moves a QuantizeLinear, states its type, and then makes uint8 of its zero point alone.
    """
    before = model.graph.meta.get(CAME_IN, CANONICAL_OPSET)
    if before >= _TYPED_QUANTIZE or not any(
        node.op_type == "QuantizeLinear" and not node.domain and _gives_int8(node)
        for node in all_nodes(model.graph)
    ):
        return model
    try:
        return at_opset(model, before)
    except ModelError:
        return model  # its operators need the newer one


_TYPED_QUANTIZE = 21  # since when QuantizeLinear has output_dtype


def _gives_int8(node: ir.Node) -> bool:
    zero = given(node, 2)
    return zero is not None and zero.dtype == ir.DataType.INT8


_OLDEST = 7  # that onnxruntime runs


def at_opset(model: ir.Model, opset: int) -> ir.Model:
    """A copy of the model written in ai.onnx `opset`, newer or older than its own.

    Raises ModelError for an opset that does not exist or that onnxruntime does not run, and with
    the first node whose operator `opset` cannot express.
    """
    newest = onnx.defs.onnx_opset_version()
    if not _OLDEST <= opset <= newest:
        raise ModelError(
            f"ai.onnx opset {opset} cannot be written: choose one from {_OLDEST} to {newest}"
        )
    model = model.clone()
    version = model.graph.opset_imports[""]
    if opset >= version:
        upgrade(model.graph, version, opset)
    else:
        downgrade(model.graph, version, opset)
    model.graph.opset_imports[""] = opset
    remove_unused_nodes(model)
    rename_shadowing_values(model.graph)
    with functions_attached(model):  # whose bodies have to be written in it, too
        return model


def weight_bytes(model: ir.Model) -> int:
    """The bytes of all initializers of a model."""
    tensors = (v.const_value for v in model.graph.initializers.values())
    return sum(t.nbytes for t in tensors if t is not None)


def fits_protobuf(model: ir.Model) -> bool:
    """Whether one message holds the model: its weights, and 64 MB for all else."""
    return weight_bytes(model) <= MAX_PROTOBUF - (64 << 20)


def save(
    model: ir.Model, path: str | os.PathLike[str], *, external: bool = False, shapes: bool = True
) -> None:
    """Write `path` whole or not at all (see `files.written`).

    `shapes=False` leaves inner shapes out, which `onnx.shape_inference` gives back: with them
    onnxruntime's CPU makes SkipLayerNormalization of residual and norm, 14 ms where Add and
    LayerNormalization take 5 (BERT-base, batch 4 x 64; 1.31.1, 2026-11).

    `external` puts weights into `<path>.data`; models over 2 GB always do. Otherwise each large
    initializer is serialized by itself, so that no second copy of the weights is ever in memory:
    a protobuf message may come in pieces, which the parser merges.
    """
    path = Path(path)
    external = external or not fits_protobuf(model)
    big = {} if external else _large_initializers(model.graph)
    noted, defaults = _noted_shapes(model, shapes), _defaults_attached(model)
    with files.written(path) as draft:
        more = training_info.kept(model).SerializeToString()
        if external:
            _save_external(model, draft, shapes)
            with draft.open("ab") as file:
                file.write(more)
            return
        with draft.open("wb") as file, functions_attached(model), noted, defaults:
            for name in big:
                del model.graph.initializers[name]
            try:
                file.write(serialized(model).SerializeToString())
            finally:
                for value in big.values():
                    model.graph.initializers[value.name or ""] = value
            for value in big.values():
                file.writelines(lengthy(GRAPH, lengthy(INITIALIZER, _message(value))))
            file.write(more)


def _message(value: ir.Value) -> list[Piece]:
    """An initializer's message; the bytes of numbers are not copied."""
    tensor = value.const_value
    assert tensor is not None
    if not is_large_weight(tensor) or isinstance(tensor, ir.serde.TensorProtoTensor):
        whole = ir.serde.serialize_tensor(tensor)
        whole.name = value.name or ""
        return [whole.SerializeToString()]
    head = onnx.TensorProto(name=value.name or "", data_type=tensor.dtype.value)
    head.dims.extend(tensor.shape.numpy())
    head.doc_string = tensor.doc_string or ""
    for key, text in tensor.metadata_props.items():
        head.metadata_props.add(key=key, value=text)
    numbers = np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
    return [head.SerializeToString(), *lengthy(RAW_DATA, [numbers.data])]


def _large_initializers(graph: ir.Graph) -> dict[str, ir.Value]:
    return {
        name: value
        for name, value in graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes >= _STREAMED
    }


def _save_external(model: ir.Model, draft: Path, shapes: bool) -> None:
    with functions_attached(model), _noted_shapes(model, shapes), _defaults_attached(model):
        # save() points the tensors at the file it writes; the caller's model keeps its own.
        tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
        try:
            ir.save(model, draft, external_data=f"{draft.name}.data")
        finally:
            for name, tensor in tensors.items():
                model.graph.initializers[name].const_value = tensor

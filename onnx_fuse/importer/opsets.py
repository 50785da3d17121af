"""Bring a model to the one opset that the passes read, its foreign functions inlined."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.version_converter
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from onnx_fuse.errors import ModelError
from onnx_fuse.importer.contrib.table import MICROSOFT
from onnx_fuse.importer.save import fused_function
from onnx_fuse.importer.shapes import check_sizes, infer_shapes
from onnx_fuse.importer.upgrade import UPGRADES, upgrade
from onnx_fuse.ir.build import Builder, all_nodes, const_array, required
from onnx_fuse.ir.constants import CAME_IN, CANONICAL_OPSET, DEFAULT, one_line
from onnx_fuse.ir.evaluate import TO_THE_END
from onnx_fuse.ir.functions import inline_functions
from onnx_fuse.ir.names import Names
from onnx_fuse.ops.bodies import body_of


def canonical(model: ir.Model) -> ir.Model:
    """The model with its local functions inlined and its opset brought up to CANONICAL_OPSET."""
    if model.graph.opset_imports.get("", 1) < _FIRST:
        model = _at_opset_7(model)
    fused = {key for key, f in model.functions.items() if _is_own(f)}
    for key in fused | _functions_unread_by_onnxruntime(model):  # `save` puts our own bodies back
        del model.functions[key]
    graph = model.graph
    bodies = [f for f in model.functions.values() if "" in f.opset_imports]
    version = graph.opset_imports.get("", 1)
    model.graph.meta.setdefault(CAME_IN, version)
    target = max(CANONICAL_OPSET, version, *(f.opset_imports[""] for f in bodies))
    mixed = any(f.opset_imports[""] != version for f in bodies)
    _import_domains(model)
    inline_functions(model)
    if mixed and _read_otherwise(graph, version):
        model.meta[MENDED] = "onnxruntime reads functions of another opset as of the model's"
    constant_weights(model)
    if version < target or mixed:
        if not mixed and _types_matter(graph):  # inference reads one opset
            infer_shapes(model)
        upgrade(graph, version, target)
        graph.opset_imports[""] = target
    _write_as_all_read(model)
    if _rename_equal_nodes(graph):
        model.meta[MENDED] = "onnxruntime takes no two nodes of one name"
    check_sizes(model)
    model.ir_version = max(model.ir_version, 10)
    return model


def _write_as_all_read(model: ir.Model) -> None:
    """Write what onnxruntime reads otherwise than ONNX's inference, or NumPy, as all of them read.

    A backward Slice whose end is the largest integer takes the whole rest; others clamp that end to
    the front, where nothing is left, and take the rest for the smallest integer. A Squeeze by an
    empty list of axes is one without the list; inference squeezes nothing then. A SplitToSequence
    into ones drops the axis; by inference a size keeps it. Empty last operands are left out.
    """
    for node in [node for node in all_nodes(model.graph) if not node.domain]:
        while node.inputs and node.inputs[-1] is None:
            node.resize_inputs(len(node.inputs) - 1)
            if node.op_type == "LayerNormalization":
                model.meta[MENDED] = "an empty operand of LayerNormalization ends onnxruntime"
        if node.op_type in ("Squeeze", "SplitToSequence") and len(node.inputs) > 1:
            second, keeps = const_array(node.inputs[1]), node.attributes.get_int("keepdims", 1)
            unread: object = [] if node.op_type == "Squeeze" else None if keeps else 1
            if second is not None and second.tolist() == unread:
                node.resize_inputs(1)
        if node.op_type != "Slice" or len(node.inputs) < 5 or node.graph is None:
            continue
        ends, steps = (const_array(node.inputs[i]) for i in (2, 4))
        if ends is None or steps is None or ends.shape != steps.shape:
            continue
        backward = (steps < 0) & np.isin(ends, TO_THE_END)
        if backward.any():
            op, least = Builder(), np.iinfo(ends.dtype).min
            node.replace_input_with(2, op.constant(np.where(backward, least, ends)))
            node.graph.insert_before(node, op.nodes)


def _read_otherwise(graph: ir.Graph, version: int) -> bool:
    """Whether a node that a function left with another opset than `version` means another thing."""
    return any(
        min(node.version, version) < since <= max(node.version, version)
        for node in all_nodes(graph)
        if node.version is not None
        for op_type, since in UPGRADES
        if op_type == node.op_type
    )


MENDED = "onnx_fuse.mended"
"""meta key of a model that onnxruntime takes for another one, or refuses, as its file is: why."""


def _rename_equal_nodes(graph: ir.Graph) -> bool:
    """Give nodes of one name in one graph names of their own, as onnxruntime asks for."""
    renamed = False
    for each in (graph, *graph.subgraphs()):
        names, seen = Names(node.name for node in each), set[str]()
        for node in each:
            if node.name and node.name in seen:
                node.name, renamed = names.fresh(node.name), True
            seen.add(node.name or "")
    return renamed


def _functions_unread_by_onnxruntime(model: ir.Model) -> set[ir.OperatorIdentifier]:
    if {domain for domain, *_ in model.functions}.isdisjoint(("", "ai.onnx.ml", MICROSOFT)):
        return set()
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    operators = {(schema.domain, schema.name) for schema in get_all_operator_schema()}
    return {key for key in model.functions if key[:2] in operators}


def _is_own(function: ir.Function) -> bool:
    """Whether a function found in a file is, to the letter, the body of one of our ops.

    A file may carry another body under one of our names (an older release, or a forgery): that one
    must be inlined and run as it stands.
    """
    if body_of(function.name, function.domain) is None:
        return False
    opset = function.opset_imports.get("", CANONICAL_OPSET)
    try:
        ours = fused_function(function.name, opset, function.overload, function.domain)
    except ModelError:
        return False  # ours cannot be written in that opset
    theirs, expected = (ir.serde.serialize_function(f) for f in (function, ours))
    for proto in (theirs, expected):
        del proto.value_info[:], proto.metadata_props[:]
        proto.ClearField("doc_string")
    return bool(theirs == expected)


_FIRST = 7  # the oldest opset that onnxruntime runs, and that `upgrade` starts from


def _at_opset_7(model: ir.Model) -> ir.Model:
    version = model.graph.opset_imports.get("", 1)
    _broadcast_slopes(model)
    try:
        proto = onnx.version_converter.convert_version(ir.serde.serialize_model(model), _FIRST)
    except RuntimeError as error:
        reason = one_line(error).rpartition("failed: ")[2]
        raise ModelError(f"opset {version} cannot be brought up to {_FIRST}: {reason}") from error
    result = ir.serde.deserialize_model(proto)
    result.metadata_props.update(model.metadata_props)
    for new, old in ((result.graph.inputs, model.graph.inputs),
                     (result.graph.outputs, model.graph.outputs)):  # fmt: skip
        for value, source in zip(new, old, strict=True):
            value.name, value.type, value.shape = source.name, source.type, source.shape
    return result


def _broadcast_slopes(model: ir.Model) -> None:
    """Before opset 7 PRelu's slope was one number, or one a channel: axis 1 of x, not the last."""
    nodes = [n for n in all_nodes(model.graph) if n.op_type == "PRelu" and not n.domain]
    if nodes:
        infer_shapes(model)
    for node in nodes:
        x, slope = node.inputs
        if x is None or slope is None or x.shape is None or slope.shape is None:
            continue
        if len(slope.shape) == 1 and slope.shape[0] != 1 and len(x.shape) > 2:
            axes = list(range(1, len(x.shape) - 1))
            spread = ir.node("Unsqueeze", [slope], {"axes": axes})
            spread.outputs[0].name = f"{slope.name}.by_channel.{node.outputs[0].name}"
            required(node.graph).insert_before(node, spread)
            node.replace_input_with(1, spread.outputs[0])


def _types_matter(graph: ir.Graph) -> bool:
    """Whether a node is upgraded to something simpler where its input's type and rank are known."""
    version = graph.opset_imports.get("", 1)
    ops = {op for op, since in UPGRADES if since > version} & _TYPED
    return any(n.op_type in ops for n in all_nodes(graph))


_TYPED = {
    *("Clip", "Pad", "Dropout", "Softmax", "LogSoftmax", "Hardmax"),
    *("LeakyRelu", "PRelu", "Elu", "HardSigmoid", "HardSwish", "Mish", "Selu", "Softplus"),
    *("Softsign", "ThresholdedRelu", "GroupNormalization", "LayerNormalization", "AveragePool"),
}


def _import_domains(model: ir.Model) -> None:
    """The model imports what its functions do; of ai.onnx they may import any version.

    Raises ModelError where versions of another domain differ.
    """
    imports = model.graph.opset_imports
    for key, function in model.functions.items():
        for domain, version in function.opset_imports.items():
            if imports.setdefault(domain, version) != version and domain:
                raise ModelError(
                    f"function '{key[1]}' imports version {version} of '{domain}', "
                    f"the model version {imports[domain]}"
                )


def constant_weights(model: ir.Model) -> None:
    """Before ir_version 4 every weight had to be listed as an input: those are constants.

    From 4 on an initializer that is an input too is a default, which a caller may override.
    """
    if model.ir_version < 4:
        common_passes.RemoveInitializersFromInputsPass()(model)
    graph = model.graph
    for value in graph.inputs:
        if value.name is not None and value.name in graph.initializers:
            value.meta[DEFAULT] = value.const_value
            value.const_value = None
            del graph.initializers[value.name]

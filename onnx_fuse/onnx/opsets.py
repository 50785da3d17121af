"""Bring a model to the one opset that the passes read, its foreign functions inlined."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from onnx_fuse.errors import ModelError
from onnx_fuse.onnx import contrib
from onnx_fuse.onnx.common import CANONICAL_OPSET, FUSE, body_of, quiet
from onnx_fuse.onnx.save import fused_function
from onnx_fuse.onnx.shapes import check_sizes


def canonical(model: ir.Model) -> ir.Model:
    """Inline local functions and bring the ai.onnx opset up to CANONICAL_OPSET."""
    own = {key for key, f in model.functions.items() if _is_own(f)}
    common_passes.InlinePass(criteria=lambda f: f.identifier() not in own)(model)
    for key in list(model.functions):
        del model.functions[key]
    # Old exporters list every weight as an input as well; a weight must be known to be constant.
    common_passes.RemoveInitializersFromInputsPass()(model)
    version = model.graph.opset_imports.get("", 1)
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    if version < 9 and (scan := next((n for n in nodes if n.op_type == "Scan"), None)):
        raise ModelError(f"node '{scan.name}': opset {version}'s Scan has no later counterpart")
    if version < CANONICAL_OPSET:
        model = _upgrade(model)
    check_sizes(model)
    model.ir_version = max(model.ir_version, 10)
    return model


def _is_own(function: ir.Function) -> bool:
    """Whether a function found in a file is, to the letter, the body of one of our ops.

    A file may carry another body under one of our names (an older release, or a forgery): that one
    must be inlined and run as it stands.
    """
    if function.domain != FUSE or body_of(function.name) is None:
        return False
    opset = function.opset_imports.get("", CANONICAL_OPSET)
    ours = fused_function(function.name, opset, function.overload)
    theirs, expected = (ir.serde.serialize_function(f) for f in (function, ours))
    for proto in (theirs, expected):
        del proto.value_info[:], proto.metadata_props[:]
        proto.ClearField("doc_string")
    return bool(theirs == expected)


def _upgrade(model: ir.Model) -> ir.Model:
    """Bring the opset up with the spec's own converter; what that drops is put back."""
    graph, version = model.graph, model.graph.opset_imports[""]
    if _unchanged(model, version):
        graph.opset_imports[""] = CANONICAL_OPSET
        return model
    from onnxscript.version_converter import ConvertVersionPass

    kept = (graph.name, graph.doc_string, dict(graph.metadata_props), dict(graph.opset_imports))
    shapes = [(v.name, v.type, v.shape, v.doc_string, dict(v.metadata_props)) for v in _ends(graph)]
    notes = {n.outputs[0].name: (n.doc_string, dict(n.metadata_props)) for n in graph if n.outputs}
    if version < 14:
        _mark_training(graph)
    contrib.set_aside(model)
    with quiet("onnxscript"), training_mode_kept(model):
        model = ConvertVersionPass(target_version=CANONICAL_OPSET, fallback=True)(model).model
    graph = model.graph
    if graph.opset_imports.get("") != CANONICAL_OPSET:
        raise ModelError(f"opset {version} cannot be brought up to {CANONICAL_OPSET}")
    contrib.put_back(model)
    graph.name, graph.doc_string = kept[:2]
    graph.metadata_props.update(kept[2])
    for domain, number in kept[3].items():
        graph.opset_imports.setdefault(domain, number)
    for value, (name, type_, shape, doc, props) in zip(_ends(graph), shapes, strict=True):
        value.name, value.type, value.shape, value.doc_string = name, type_, shape, doc
        value.metadata_props.update(props)
    for node in graph:
        doc, props = notes.get(node.outputs[0].name, (None, {})) if node.outputs else (None, {})
        node.doc_string = doc
        node.metadata_props.update(props)
    return model


def _mark_training(graph: ir.Graph) -> None:
    """Before opset 14 a BatchNormalization trained where it had outputs beside the first.

    The converter refuses the fourth and fifth, which later opsets lack.
    """
    for node in graph:
        if node.op_type == "BatchNormalization" and len(node.outputs) > 1:
            if any(v.uses() or v.is_graph_output() for v in node.outputs[3:]):
                raise ModelError(f"node '{node.name}': the batch's statistics as outputs 4 and 5")
            node.resize_outputs(min(3, len(node.outputs)))
            node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)


def _unchanged(model: ir.Model, version: int) -> bool:
    """Whether every operator of `model` is defined in `version` as it is in CANONICAL_OPSET."""

    def since(name: str, opset: int) -> int:
        return int(onnx.defs.get_schema(name, opset, "").since_version)

    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    names = {n.op_type for n in nodes if n.domain == "" and not contrib.in_default_domain(n)}
    return all(since(name, version) == since(name, CANONICAL_OPSET) for name in names)


@contextlib.contextmanager
def training_mode_kept(model: ir.Model) -> Iterator[None]:
    """Within the block a pass may drop unused outputs; BatchNormalizations that train still train.

    onnx-ir 1.0's RemoveUnusedNodesPass takes training_mode away from those whose running statistics
    nobody reads, and with it their result.
    """
    held = {
        node.outputs[0].name: ([o.name for o in node.outputs], node.attributes["training_mode"])
        for node in model.graph
        if node.op_type == "BatchNormalization" and "training_mode" in node.attributes
    }
    yield
    for node in model.graph if held else ():
        if node.op_type == "BatchNormalization" and node.outputs[0].name in held:
            names, mode = held[node.outputs[0].name]
            node.attributes["training_mode"] = mode
            for value, name in zip(node.outputs, names, strict=False):
                value.name = name


def _ends(graph: ir.Graph) -> list[ir.Value]:
    return [*graph.inputs, *graph.outputs]

"""A file's `training_info`: its graphs for training by ONNX's own operators, kept as they came.

onnx-ir does not hold it. It refers to values of the model by name, and its graphs are written in
the opsets of the file.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import onnx
import onnx_ir as ir

from onnx_fuse.importer.untrusted import tensors
from onnx_fuse.ir.constants import PREVIEW

_KEY = "onnx_fuse.training_info"
"""meta key of a graph, which its clones have too: a ModelProto of training_info and opsets."""


def keep(proto: onnx.ModelProto, model: ir.Model) -> None:
    """Note the training_info of a file, for `kept`."""
    if proto.training_info:
        noted = onnx.ModelProto(opset_import=proto.opset_import, training_info=proto.training_info)
        model.graph.meta[_KEY] = noted


def kept(model: ir.Model) -> onnx.ModelProto:
    """What to merge into a model's file so that it has the training_info of the one it came from.

    A warning says so where that would not fit the model any longer.
    """
    noted = model.graph.meta.get(_KEY)
    if noted is None:
        return onnx.ModelProto()
    if why := _misfit(model, noted):
        warnings.warn(f"the model's training_info is left out: {why}", stacklevel=3)
        return onnx.ModelProto()
    imported = [o for o in noted.opset_import if o.domain not in model.graph.opset_imports]
    return onnx.ModelProto(opset_import=imported, training_info=noted.training_info)


def _misfit(model: ir.Model, noted: onnx.ModelProto) -> str:
    opsets = model.graph.opset_imports
    for imported in noted.opset_import:
        version = opsets.get(imported.domain, imported.version)
        if version != imported.version:
            domain = imported.domain or "ai.onnx"
            return f"it is written in {domain} {imported.version}, the model now in {version}"
    graphs = [g for info in noted.training_info for g in (info.initialization, info.algorithm)]
    if any(t.data_location == t.EXTERNAL for g in graphs for t in tensors(g)):
        return "its tensors are in files of their own"
    graph, computed = model.graph, {name for g in graphs for name in _names_defined_in(g)}
    named = (*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs))
    names = {v.name or "" for v in named}
    if taken := sorted(names & computed):
        return f"its name '{taken[0]}' is also one of the model"
    read = [name for g in graphs for name in _read(g)]
    for info in noted.training_info:
        read += [b.key for b in (*info.initialization_binding, *info.update_binding)]
    lost = next((name for name in read if name and name not in names | computed), None)
    return "" if lost is None else f"it refers to '{lost}', which the model no longer has"


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs):
                yield from _graphs(body)


def _names_defined_in(graph: onnx.GraphProto) -> Iterator[str]:
    for each in _graphs(graph):
        yield from (v.name for v in (*each.input, *each.initializer))
        yield from (name for node in each.node for name in node.output if name)


def _read(graph: onnx.GraphProto) -> Iterator[str]:
    for node in (node for each in _graphs(graph) for node in each.node):
        yield from node.input
        if node.domain == PREVIEW and node.op_type == "Gradient":
            for attribute in node.attribute:
                yield from (name.decode() for name in (*attribute.strings, attribute.s))

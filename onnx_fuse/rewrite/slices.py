"""Slices that take a tensor apart become one Split, whose gradient is one Concat."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, insert_behind, required
from onnx_fuse.ops.rules import cut_of


def slices_as_splits(model: ir.Model) -> None:
    """Make Slices one Split, in place, where they part a known axis without gaps or overlaps.

    The gradient of each Slice alone is a Pad, and these are added up.
    """
    graph = model.graph
    by_axis: dict[tuple[ir.Value, int], dict[tuple[int, int], list[ir.Node]]] = {}
    for node in graph:
        part = _part(node)
        if part is not None:
            value, axis, start, end = part
            by_axis.setdefault((value, axis), {}).setdefault((start, end), []).append(node)
    for (value, axis), parts in by_axis.items():
        spans = sorted(parts)
        edges = [0, *(end for _, end in spans)]
        if (
            len(spans) < 2
            or edges[-1] != required(value.shape)[axis]
            or [s for s, _ in spans] != edges[:-1]
        ):
            continue
        op = Builder()
        sizes = op.constant(np.array([end - start for start, end in spans], np.int64))
        results = op.node("Split", [value, sizes], outputs=len(spans), axis=axis)
        for result, span in zip(results, spans, strict=True):
            first = parts[span][0].outputs[0]
            result.name, result.type, result.shape = f"{first.name}.part", first.type, first.shape
            for node in parts[span]:
                ir.convenience.replace_all_uses_with(node.outputs[0], result)
        insert_behind(graph, value.producer(), op.nodes)
        for node in (n for nodes in parts.values() for n in nodes):
            graph.remove(node, safe=True)


def _part(node: ir.Node) -> tuple[ir.Value, int, int, int] | None:
    """What a Slice takes of which axis, where it is along one of known size, and not empty."""
    cut = cut_of(node.outputs[0]) if node.op_type == "Slice" else None
    if cut is None or cut.axis is None or cut.start is None or cut.end is None:
        return None
    if node.outputs[0].is_graph_output() or cut.start >= cut.end:
        return None
    return cut.source, cut.axis, cut.start, cut.end

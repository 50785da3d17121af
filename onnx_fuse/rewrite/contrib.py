"""Fusion through contrib operators: their bodies where a fusion takes something of them.

onnxruntime has a kernel for each contrib node, and the written file must not get slower there. So a
node becomes its body only where a fusion wants part of it, which shows when the passes have run:
they run on a copy in which every such node is written out, and then on the model itself, where only
those are that lost something to a fusion in the copy. To write all out and put back what stayed
whole would need each pass, constant folding among them, to be undone.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

import onnx_ir as ir

from onnx_fuse.importer import contrib
from onnx_fuse.importer.contrib.attention import join_heads, split_heads
from onnx_fuse.importer.contrib.padding import packed_parts
from onnx_fuse.importer.contrib.table import MICROSOFT, Body, Unwritable
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.ir.names import Names
from onnx_fuse.ops.fused.sdpa.kinds import Kind
from onnx_fuse.ops.rules import REGION, Refusal, is_float, label
from onnx_fuse.reasons import Reason


def regions(model: ir.Model) -> list[tuple[ir.Node, str]]:
    """The nodes with a result of floats that contrib nodes are written out in, and whose they are.

    Those of a fusion's that are no longer in a graph have become part of it.
    """
    return [
        (node, region)
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
        if (region := node.metadata_props.get(REGION)) and any(is_float(v) for v in node.outputs)
    ]


def expand_where_fused(
    model: ir.Model, taken: Callable[[ir.Model], set[str]], *, own_kernels: bool, training: bool
) -> list[Refusal]:
    """Replace those contrib nodes of `model`, in place, of whose bodies a fusion takes a part.

    Without `own_kernels` those stay that onnxruntime's CPU runs faster whole. `taken` runs the
    passes on a model and answers the regions that lost nodes to a fusion. Returns why some stay.
    """
    nodes, stay = [], []
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        entry = contrib.lookup(node)
        if entry is None or not entry.recognized:
            continue
        whole = own_kernels and not training and entry.lowered(node)
        if whole and contrib.is_writable(node, model.graph.opset_imports):
            continue
        if own_kernels or not entry.whole(node):
            nodes.append(node)
        else:
            stay.append(Refusal(node.op_type, (label(node),), Reason("whole-cpu")))
    if not nodes:
        return stay
    for i, node in enumerate(nodes):
        node.metadata_props[REGION] = str(i)
    trial = model.clone()
    reasons = contrib.expand(trial, lambda node: REGION in node.metadata_props)
    chosen = taken(trial)
    for node in nodes:
        if node.metadata_props[REGION] not in chosen:
            del node.metadata_props[REGION]
    contrib.expand(model, lambda node: REGION in node.metadata_props)
    stay += [Refusal(name, (name,), Reason("whole", why=why)) for name, why in reasons.items()]
    return stay


def forget_regions(model: ir.Model) -> None:
    """Take the marks off again."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        node.metadata_props.pop(REGION, None)


def attend_to_tokens(model: ir.Model) -> int:
    """Let packed attention's nodes be attention over packed rows, in place; how many they were."""
    kinds = [(name, MICROSOFT) for name in ("PackedAttention", "PackedMultiHeadAttention")]
    names, count = Names.of(model.graph), 0
    for node in [n for n in model.graph if (n.op_type, n.domain) in kinds]:
        op = Body(node)
        try:
            heads = op.count("num_heads")
            parts, sizes, places, starts, added = packed_parts(op)
        except Unwritable:
            continue  # the run says why
        rows = [
            split_heads(op, op.Unsqueeze(part, [0]), heads, n)
            for part, n in zip(parts, sizes, strict=True)
        ]
        scale = op.attr("scale") or sqrt(heads / sizes[0])
        steps, guard = ((), "Guard") if added is None else (("Mask",), "")
        kind = Kind(packed=True, steps=steps, guard=guard)
        inputs = [*rows, starts, places, *([] if added is None else [added])]
        y = op.node(kind.name, inputs, domain=FUSE, attributes={"scale": scale})
        result = op.Squeeze(join_heads(op, y, sizes[2]), [0])
        for value in (v for made in op.nodes for v in made.outputs):
            value.name = names.fresh(f"{node.name}.tokens")
        replace_node(node, op.nodes, [result])
        count += 1
    return count

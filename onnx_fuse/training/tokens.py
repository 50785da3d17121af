"""Steps over tokens only: labels of tokens are fed with their padding, and packed in the graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse import autodiff
from onnx_fuse.arrays import Array
from onnx_fuse.ir.build import required
from onnx_fuse.ops.loss import LOSSES
from onnx_fuse.program.packing import Packing
from onnx_fuse.rewrite.padding import NotPacked
from onnx_fuse.training.losses import Target, Term


def taken(
    op: autodiff.Emitter,
    graph: ir.Graph,
    packing: Packing | None,
    targets: Sequence[Target],
    labels: Sequence[ir.Value],
    terms: Sequence[Term],
) -> list[ir.Value]:
    """Take the labels of tokens from inputs [B, S], which are fed in the place of `labels`.

    Without a packing they stay as they are. Those of rows behind the last sequence are the ignored
    one. Raises NotPacked for a loss that would count these rows.
    """
    if packing is None:
        return list(labels)
    if packing.outputs and not all(
        t.named and t.loss in LOSSES and LOSSES[t.loss].labels for t in terms
    ):
        raise NotPacked("its loss is no named one, which leaves out ignored labels")
    inputs, fed = {v.name: v for v in graph.inputs}, list(labels)
    for target in targets:
        if target.logits not in packing.outputs:
            continue
        old = inputs[target.labels]
        if not target.classes or old.shape is None or len(old.shape) != 2:
            raise NotPacked("its loss compares each token with more than a class")
        padded = required(inputs[packing.mask].shape)
        new = ir.Value(name=old.name, type=old.type, shape=ir.Shape(padded))
        rows, offsets = inputs[packing.rows], inputs[packing.offsets]
        count = op.Squeeze(op.Shape(rows, start=1), [0])
        place = op.Range(op.constant(np.int64(0)), count, op.constant(np.int64(1)))
        behind = op.GreaterOrEqual(place, op.Gather(offsets, [-1]))
        ignored = op.constant(np.asarray(target.ignored, required(old.dtype).numpy()))
        own = op.Where(behind, ignored, op.Gather(op.Reshape(new, [-1]), rows))
        own.type, own.shape = old.type, old.shape
        for value in (v for node in op.nodes for v in node.outputs if not v.name):
            value.name = op.fresh("labels.tokens")
        graph.insert_before(graph[0], op.nodes)
        op.nodes = []
        ir.convenience.replace_all_uses_with(old, own)
        graph.inputs[graph.inputs.index(old)] = new
        fed[fed.index(old)] = new
    return fed


def feeds(
    packing: Packing, targets: Sequence[Target], arrays: Mapping[str, Any]
) -> dict[str, Array] | str:
    """What a step is fed beside these arrays, or why the batch cannot be packed."""
    mask = np.asarray(arrays[packing.mask])
    for target in targets:
        if target.logits in packing.outputs:
            labels = np.asarray(arrays[target.labels])
            hidden = labels[mask == 0] if labels.shape == mask.shape else labels
            if (hidden != target.ignored).any():
                return f"'{target.labels}' counts at the padding"
    return packing.feeds(mask, {name: array.shape for name, array in arrays.items()})

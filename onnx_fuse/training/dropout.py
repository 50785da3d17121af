"""Dropout by masks that are a function of a number, so that a step can be drawn again."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from onnx_fuse import autodiff
from onnx_fuse.ir.build import const_array, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.copying import replace_node


def draw_masks(graph: ir.Graph, op: autodiff.Emitter, rng: Callable[[], ir.Value] | None) -> None:
    """Let the Dropouts of training hash their masks from an int64 scalar, in place.

    `rng` makes that scalar, or gives the one it made before; None leaves the Dropouts out.
    """
    for index, node in enumerate([n for n in graph if n.op_type == "Dropout"]):
        x, ratio, training = (*node.inputs, None, None)[:3]
        on = const_array(training)
        if on is None or not on.any() or (len(node.outputs) > 1 and node.outputs[1].uses()):
            continue
        (old, *_), y = node.outputs, required(x)
        if rng is not None:
            ratio = op.constant(0.5) if ratio is None else ratio
            scale = op.node("DropoutScale", [op.Shape(x), ratio, rng()], domain=FUSE, stream=index)
            scale.dtype, scale.shape = ir.DataType.FLOAT, old.shape
            y = op.Mul(x, op.CastLike(scale, x))
        if old.is_graph_output():
            y = op.Identity(y)
        replace_node(node, op.nodes, [y], named=False)
        op.nodes = []

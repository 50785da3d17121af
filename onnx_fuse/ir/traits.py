"""What operators of the standard have in common."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_fuse.ir.build import subgraphs

RESHAPES = frozenset(("Flatten", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators whose result has the elements of the input, in their order, under another shape."""
SAME_ORDER = RESHAPES | {"Identity"}
"""Those and Identity: a dense tensor's elements stay where they are in memory."""
REARRANGES = RESHAPES | {"Transpose"}
"""Operators that move every element and change none: what is elementwise may pass them."""
VIEWS = REARRANGES | {"Identity"}
"""Operators whose result has each element of the input once."""
SIZES = frozenset(("Shape", "Size"))
"""Operators that read the size of their input, and none of its elements."""
DRAWS = frozenset(
    (
        *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli"),
        *("Multinomial", "Dropout"),
    )
)
"""Operators whose results differ from run to run."""
SIZE_INPUTS: dict[str, tuple[int, ...]] = {
    "AffineGrid": (1,),
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "MaxUnpool": (2,),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Upsample": (1,),
}
"""Inputs of ONNX's operators that decide how large a result is, or where its elements come from."""


def only_sizes(graph: ir.Graph) -> set[ir.Value]:
    """The values that reach the outputs of a graph only as sizes: no result is computed with them.

    A value that does not reach an output is none of them.
    """
    return _sources(graph.outputs, sizes=True) - _sources(graph.outputs, sizes=False)


def _sources(values: Sequence[ir.Value], *, sizes: bool) -> set[ir.Value]:
    """All that these values are computed from; without `sizes`, not through inputs that are."""
    todo = list(values)
    reached = set(todo)
    while todo:
        node = todo.pop().producer()
        if node is None:
            continue
        skipped = () if sizes or node.domain else SIZE_INPUTS.get(node.op_type, ())
        read = [v for i, v in enumerate(node.inputs) if v is not None and i not in skipped]
        for attribute in node.attributes.values():
            for body in subgraphs(attribute):
                read.extend(body.outputs)
        fresh = [v for v in dict.fromkeys(read) if v not in reached]
        reached.update(fresh)
        todo += fresh
    return reached

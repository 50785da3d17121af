"""What operators of the standard have in common."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from onnx_fuse.ir.build import sources, subgraphs

RESHAPES = frozenset(("Flatten", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators whose result has the elements of the input, in their order, under another shape."""
SAME_ORDER = RESHAPES | {"Identity"}
"""Those and Identity: a dense tensor's elements stay where they are in memory."""
REARRANGES = RESHAPES | {"Transpose"}
"""Operators that move every element and change none: what is elementwise may pass them."""
VIEWS = REARRANGES | {"Identity"}
"""Operators whose result has each element of the input once."""
POINTWISE = frozenset(
    (
        *("Abs", "Acos", "Asin", "Atan", "BitwiseNot", "Cast", "Ceil", "Celu", "Clip", "Cos"),
        *("Cosh", "Elu", "Erf", "Exp", "FastGelu", "Floor", "Gelu", "HardSigmoid", "HardSwish"),
        *("Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Not", "QuickGelu"),
        *("Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Silu", "Sin"),
        *("Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu"),
    )
)
"""Operators whose result has one element for each element of the first input."""
BROADCASTS = frozenset(
    (
        *("Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal"),
        *("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul"),
        *("Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor"),
    )
)
"""Operators of elements of several inputs, which are broadcast to the size of the result."""
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
    every = sources(graph.outputs, partial(_operands, sizes=True))
    return every.keys() - sources(graph.outputs, partial(_operands, sizes=False)).keys()


def _operands(node: ir.Node, *, sizes: bool) -> list[ir.Value | None]:
    """What a node and its bodies read; without `sizes`, not the inputs that are sizes."""
    skipped = () if sizes or node.domain else SIZE_INPUTS.get(node.op_type, ())
    bodies = [body for a in node.attributes.values() for body in subgraphs(a)]
    read = [v for i, v in enumerate(node.inputs) if i not in skipped]
    return [*read, *(v for body in bodies for v in body.outputs)]

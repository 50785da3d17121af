"""Constant folding: what constants decide is computed once, as onnxruntime would compute it."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, add_initializer, all_nodes, const_array, rank, required
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.ir.evaluate import evaluate
from onnx_fuse.ir.functions import inline_branches
from onnx_fuse.ops.rules import CONSTANT, attribute, freeze_shared, is_constant, is_float

LIMIT = 1 << 16  # elements; more would cost the file more than the nodes cost the run
_SMALL = 64

# Operators that are evaluated: their kernels take any input, and their outputs' sizes are known
# before. Quantization stays in the graph, for what runs it to see.
_EVALUATED = frozenset(
    (
        *("Abs", "Acos", "Add", "And", "ArgMax", "ArgMin", "Asin", "Atan", "Cast", "CastLike"),
        *("Ceil", "Clip", "Concat", "ConstantOfShape", "Cos", "Cosh", "CumSum", "Div", "Elu"),
        *("Equal", "Erf", "Exp", "Expand", "EyeLike", "Flatten", "Floor", "Gather"),
        *("GatherElements", "GatherND", "Gelu", "Gemm", "Greater", "GreaterOrEqual"),
        *("HardSigmoid", "Identity", "IsInf", "IsNaN", "LayerNormalization", "LeakyRelu", "Less"),
        *("LessOrEqual", "Log", "LogSoftmax", "LpNormalization", "MatMul", "Max", "Mean", "Min"),
        *("Mod", "Mul", "Neg", "Not", "Or", "Pad", "Pow", "Range", "Reciprocal", "ReduceL1"),
        *("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
        *("ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Round"),
        *("ScatterElements", "ScatterND", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Size"),
        *("Slice", "Softmax", "Softplus", "Softsign", "Split", "Sqrt", "Squeeze", "Sub", "Sum"),
        *("Tan", "Tanh", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor"),
        *("Shape", "NonZero"),
    )
)
_BOUNDED = {"NonZero"}
"""Operators whose outputs are no larger than their inputs, whatever these hold."""


def fold_constants(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> bool:
    """Replace nodes by what they answer, where constants alone decide it; whether any was.

    `wanted` keeps nodes from being evaluated. An If whose condition is constant becomes its branch.
    """
    changed = _inline_taken_branches(model)
    changed = any([*map(_simplify, list(all_nodes(model.graph)))]) or changed
    return _evaluate(model, wanted) or changed


def _inline_taken_branches(model: ir.Model) -> bool:
    changed = False
    while True:  # a branch may hold another If
        taken = []
        for node in all_nodes(model.graph):
            condition = const_array(node.inputs[0]) if node.op_type == "If" else None
            if condition is not None and condition.size == 1 and not node.domain:
                branch = "then_branch" if condition.reshape(-1)[0] else "else_branch"
                taken.append((node, node.attributes[branch].as_graph()))
        if not taken:
            return changed
        for node, _ in taken:  # ends of two ranks may be declared as those of the other branch
            branches = (a.as_graph().outputs for a in node.attributes.values())
            for ends in zip(node.outputs, *branches, strict=True):
                for value in ends if len({*map(rank, ends)}) > 1 else ():
                    value.shape = value.shape if value.producer() is None else None
        inside = {graph for _, branch in taken for graph in (branch, *branch.subgraphs())}
        inline_branches(model.graph, [(n, b) for n, b in taken if n.graph not in inside])
        changed = True


def _take_scalars(node: ir.Node, graph: ir.Graph | ir.Function) -> bool:
    """A Range of vectors of one entry, which onnxruntime does not load where they are constant."""
    op, changed = Builder(), False
    for i, value in enumerate(node.inputs):
        if value is not None and rank(value) == 1:
            node.replace_input_with(i, op.Squeeze(value, [0]))
            changed = True
    graph.insert_before(node, op.nodes)
    return changed


def _simplify(node: ir.Node) -> bool:
    """Nodes that types alone decide, whatever the values are."""
    if node.domain or node.graph is None or not node.inputs or node.inputs[0] is None:
        return False
    if node.op_type == "Range":
        return _take_scalars(node, node.graph)
    op = Builder()
    x = node.inputs[0]
    match node.op_type:
        case "CastLike" if (like := node.inputs[1]) is not None and like.dtype is not None:
            rest = {k: a for k, a in node.attributes.items() if not a.is_ref()}
            simpler = op.node("Cast", [x], attributes={"to": like.dtype.value, **rest})
        case "Concat":
            axis = attribute(node, "axis", 0)
            parts = [v for v in node.inputs if not _is_empty_part(v, axis)] or [x]
            if len(parts) == len(node.inputs) > 1:
                return False
            simpler = op.Concat(*parts, axis=axis) if len(parts) > 1 else op.Identity(*parts)
        case _:
            return False
    op.nodes[-1].name = node.name
    op.nodes[-1].metadata_props.update(node.metadata_props)
    replace_node(node, op.nodes, [simpler])
    return True


def _is_empty_part(value: ir.Value | None, axis: object) -> bool:
    shape = None if value is None else value.shape
    if shape is None or not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        return False
    return bool(shape[axis] == 0)


def _evaluate(model: ir.Model, wanted: Callable[[ir.Node], bool]) -> bool:
    arrays: dict[ir.Value, np.ndarray] = {}
    inside: set[ir.Value] = set()
    chosen: list[ir.Node] = []
    plain: set[ir.Value] = set()  # what no weight entered
    filled: set[ir.Value] = set()  # what one number over and over entered
    for node in all_nodes(model.graph):
        if (
            node.domain
            or node.op_type not in _EVALUATED
            or not _is_replaceable(node)
            or not wanted(node)
        ):
            continue
        constant = all(v is None or v in inside or is_constant(v) for v in node.inputs)
        if not constant or not _small(node, inside) or not node.inputs:
            continue
        chosen.append(node)
        inside.update(node.outputs)
        if node.op_type == "ConstantOfShape" or any(v in filled for v in node.inputs if v):
            filled.update(node.outputs)
        for value in node.inputs:
            if value is not None and value not in inside and value not in arrays:
                arrays[value] = required(const_array(value))
        if all(v is None or v in plain or CONSTANT in v.metadata_props for v in node.inputs):
            plain.update(node.outputs)
    chosen = _without_tied(chosen)
    results = evaluate(chosen, arrays, model.graph.opset_imports) if chosen else {}
    replaced: list[ir.Value] = []
    for value, array in results.items():
        # one number over and over is no gain as a constant, but what is worked out of it may be
        same = value in filled and array.size > _SMALL and _uniform(array)
        if value.uses() and not same:
            _replace(model, value, array, constant=value in plain)
            replaced.append(value)
    freeze_shared(replaced)
    return bool(replaced)


def _without_tied(chosen: list[ir.Node]) -> list[ir.Node]:
    """The nodes but those that would give a weight, which others read, a second tensor."""
    nodes, going = set(chosen), set(chosen)

    def stays(value: ir.Value) -> bool:
        if value.is_initializer() and is_float(value) and rank(value):
            readers = {use.node for use in value.uses()} - going
            live = any(v.uses() or v.is_graph_output() for n in readers for v in n.outputs)
            return (live or value.is_graph_output()) and CONSTANT not in value.metadata_props
        return value.producer() in nodes and value.producer() not in going

    while tied := {node for node in going if any(map(stays, filter(None, node.inputs)))}:
        going -= tied
    return [node for node in chosen if node in going]


def _uniform(array: np.ndarray) -> bool:
    return array.tobytes() == array.reshape(-1)[:1].tobytes() * array.size


def _is_replaceable(node: ir.Node) -> bool:
    return not any(v.is_graph_output() for v in node.outputs) and not any(
        a.is_ref() for a in node.attributes.values()
    )


def _small(node: ir.Node, inside: set[ir.Value]) -> bool:
    """Whether inputs and outputs have few elements, or no more than the inputs that go."""
    largest, freed = 0, 0
    for value in node.inputs:
        if value is not None:
            size = _elements(value)
            if size is None or value.dtype == ir.DataType.STRING:
                return False
            largest = max(largest, size)
            freed += size if value not in inside and len(value.uses()) == 1 else 0
    if node.op_type == "Transpose":  # a weight as the product wants it
        return largest <= LIMIT or freed == largest
    if largest > LIMIT:
        return False
    if node.op_type == "ConstantOfShape" and (shape := const_array(node.inputs[0])) is not None:
        return math.prod(int(d) for d in shape.reshape(-1)) <= LIMIT
    if node.op_type in _BOUNDED:
        return True
    sizes = [_elements(v) for v in node.outputs if v.name]
    return all(
        size is not None and v.dtype != ir.DataType.STRING and size <= max(LIMIT, freed)
        for v, size in zip((v for v in node.outputs if v.name), sizes, strict=True)
    )


def _elements(value: ir.Value) -> int | None:
    if value.shape is None or not all(isinstance(d, int) for d in value.shape):
        tensor = value.const_value
        return None if tensor is None else math.prod(tensor.numpy().shape)
    return math.prod(d for d in value.shape if isinstance(d, int))


def _replace(model: ir.Model, value: ir.Value, array: np.ndarray, *, constant: bool) -> None:
    node = required(value.producer())
    name = required(value.name)
    value.name = f"{name} computed"
    home = node.graph if isinstance(node.graph, ir.Graph) else model.graph
    initializer = add_initializer(home, name, array)
    initializer.metadata_props.update(value.metadata_props | ({CONSTANT: "1"} if constant else {}))
    value.replace_all_uses_with(initializer)

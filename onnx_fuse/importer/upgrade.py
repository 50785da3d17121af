"""Nodes of an older ai.onnx opset as a later one spells them, with the results they had.

Most versions of an operator only take further types or attributes, and need nothing. The others
are in UPGRADES: a rule for each (operator, first opset that means something else). What an old
operator answers is what onnxruntime, which still runs it, answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import ModelError
from onnx_fuse.ir.build import Builder, all_nodes, const_array, given, rank, required
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.ir.windows import around, passes_padding
from onnx_fuse.ops.shape_ops import Writer

Rule = Callable[[ir.Node, Writer], "Sequence[ir.Value] | None"]
"""Changes the node in place and emits the nodes that it then reads, or returns the values that
replace the node's outputs."""

UPGRADES: dict[tuple[str, int], Rule] = {}


def upgrade(graph: ir.Graph | ir.Function, version: int, target: int) -> None:
    """Bring all nodes of a graph, its subgraphs included, from ai.onnx `version` to `target`.

    A node that a function left with a version of its own is brought up from that, and loses it.
    Types and ranks of values are used where they are known and are not needed. Raises ModelError
    for a node that later opsets cannot express.
    """
    rules: dict[str, list[tuple[int, Rule]]] = {}
    for (op_type, since), rule in sorted(UPGRADES.items(), key=lambda item: item[0][1]):
        if since <= target:
            rules.setdefault(op_type, []).append((since, rule))
    for node in list(all_nodes(graph)):
        if node.domain not in ("", "ai.onnx"):
            continue
        opset, node.version = node.version or version, None
        for since, rule in rules.get(node.op_type, ()):
            if opset < since and node.graph is not None:  # a rule before may have replaced it
                _apply(rule, node)


def _apply(rule: Rule, node: ir.Node) -> None:
    op = Writer()
    results = rule(node, op)
    for new_node in op.nodes:
        new_node.metadata_props.update(node.metadata_props)
    if results is None:
        required(node.graph).insert_before(node, op.nodes)
        return
    last = op.nodes[-1]
    last.name, last.doc_string = node.name, node.doc_string
    replace_node(node, op.nodes, results)


def _rule(since: int, *ops: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        UPGRADES.update({(op, since): rule for op in ops})
        return rule

    return register


def _pop_attribute(node: ir.Node, name: str, default: object = None) -> Any:
    attribute = node.attributes.pop(name, None)
    return default if attribute is None else attribute.value


def _set_input(node: ir.Node, index: int, value: ir.Value | None) -> None:
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def _first_input(node: ir.Node) -> ir.Value:
    value = given(node, 0)
    if value is None:
        raise ModelError(f"node '{node.name}' ({node.op_type}) lacks its first input")
    return value


def _scalar_like(op: Builder, number: float, x: ir.Value) -> ir.Value:
    if x.dtype is not None and x.dtype.is_floating_point():
        with np.errstate(over="ignore"):  # a bound beyond float16 becomes infinite
            return op.constant(np.array(number, np.float32).astype(x.dtype.numpy()))
    return op.CastLike(op.constant(np.array(number, np.float32)), x)


# ---- attributes that became inputs ---------------------------------------------------------------


Moved = tuple[int, str, str, Any]
"""(input, attribute that it was, kind, default of the attribute, None where it has none).

The kinds are "ints", a vector; "size", a vector of one; "int", a scalar; "float", a scalar in the
type of the first input."""
_AXES: tuple[Moved, ...] = ((1, "axes", "ints", None),)
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
BECAME_INPUTS: dict[tuple[str, int], tuple[Moved, ...]] = {
    **dict.fromkeys(((name, 13) for name in ("ReduceSum", "Squeeze", "Unsqueeze")), _AXES),
    **dict.fromkeys(((f"Reduce{kind}", 18) for kind in _REDUCTIONS), _AXES),
    ("Split", 13): ((1, "split", "ints", None),),
    ("TopK", 10): ((1, "k", "size", None),),
    ("Slice", 10): tuple((i, n, "ints", None) for i, n in enumerate(("starts", "ends", "axes"), 1)),
    ("Clip", 11): ((1, "min", "float", None), (2, "max", "float", None)),
    ("Pad", 11): ((1, "pads", "ints", None), (2, "value", "float", None)),
    ("Dropout", 12): ((1, "ratio", "float", 0.5),),
    ("DFT", 20): ((2, "axis", "int", 1),),
}
"""The attributes that became inputs, by (operator, first opset that has the inputs)."""


def _as_inputs(moved: Sequence[Moved]) -> Rule:
    def rule(node: ir.Node, op: Builder) -> None:
        for i, name, kind, default in moved:
            value = _pop_attribute(node, name, default)
            if value is None or (name in ("axes", "value") and not value):
                continue  # without axes it reduces all
            if kind == "float":
                _set_input(node, i, _scalar_like(op, value, _first_input(node)))
            else:
                numbers = [value] if kind == "size" else value
                _set_input(node, i, op.constant(np.array(numbers, np.int64)))

    return rule


UPGRADES.update({key: _as_inputs(moved) for key, moved in BECAME_INPUTS.items()})


@_rule(18, "Split")
def _split_count(node: ir.Node, op: Builder) -> None:
    if given(node, 1) is None:
        node.attributes["num_outputs"] = ir.AttrInt64("num_outputs", len(node.outputs))


# ---- other names and defaults --------------------------------------------------------------------


@_rule(11, "Scatter")
def _scatter(node: ir.Node, op: Builder) -> None:
    node.op_type = "ScatterElements"


@_rule(16, "RoiAlign")
def _roi_align(node: ir.Node, op: Builder) -> None:
    mode = ir.AttrString("coordinate_transformation_mode", "output_half_pixel")
    node.attributes.setdefault(mode.name, mode)


@_rule(20, "GridSample")
def _grid_sample(node: ir.Node, op: Builder) -> None:
    if (mode := _pop_attribute(node, "mode")) is not None:
        mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
        node.attributes["mode"] = ir.AttrString("mode", mode)


# ---- other meanings ------------------------------------------------------------------------------


@_rule(13, "Softmax", "LogSoftmax", "Hardmax")
def _softmax(node: ir.Node, op: Builder) -> Sequence[ir.Value] | None:
    """Before opset 13 all axes from `axis` on are one: a matrix's columns."""
    x = _first_input(node)
    axis, size = _pop_attribute(node, "axis", 1), rank(x)
    if axis == -1 or (size is not None and axis == size - 1):
        node.attributes["axis"] = ir.AttrInt64("axis", -1)
        return None
    rows = op.node(node.op_type, [op.Flatten(x, axis=axis)], axis=-1)
    return [op.Reshape(rows, op.Shape(x), allowzero=1)]


@_rule(12, "Dropout")
def _dropout_mask(node: ir.Node, op: Writer) -> None:
    """Opsets 10 and 11: a mask of bool, and the ratio an attribute."""
    _drop_mask(node, op, typed=True)
    _as_inputs(BECAME_INPUTS["Dropout", 12])(node, op)


def _drop_mask(node: ir.Node, op: Builder, *, typed: bool) -> None:
    """Before opset 12 onnxruntime fills an inference's mask with zeros, later with ones."""
    if len(node.outputs) < 2:
        return
    x, mask = _first_input(node), node.outputs[1]
    if mask.uses() or mask.is_graph_output():
        shape = op.Shape(x)
        kind = ir.DataType.BOOL if typed else x.dtype
        if kind is None:
            zeros = op.CastLike(op.ConstantOfShape(shape), x)
        else:
            zeros = op.ConstantOfShape(shape, value=ir.tensor(np.zeros(1, kind.numpy())))
        zeros.name, zeros.type, zeros.shape = mask.name, mask.type, mask.shape
        ir.convenience.replace_all_uses_with(mask, zeros, replace_graph_outputs=True)
        mask.name = None
    node.resize_outputs(1)


_rule(10, "Dropout")(partial(_drop_mask, typed=False))


@_rule(9, "BatchNormalization")
def _batch_norm_spatial(node: ir.Node, op: Builder) -> Sequence[ir.Value] | None:
    """spatial=0: a mean and a variance for each element of a sample, not for each channel."""
    if _pop_attribute(node, "spatial", 1) != 0:
        return None
    if len(node.outputs) > 1 or len(node.inputs) < 5:
        raise ModelError(f"node '{node.name}': BatchNormalization with spatial=0 cannot train")
    x, scale, bias, mean, variance = node.inputs
    epsilon = _scalar_like(op, node.attributes.get_float("epsilon", 1e-5), _first_input(node))
    rows = op.Div(op.Sub(x, mean), op.Sqrt(op.Add(variance, epsilon)))
    return [op.Add(op.Mul(rows, scale), bias)]


@_rule(14, "BatchNormalization")
def _batch_norm_training(node: ir.Node, op: Builder) -> None:
    """Before opset 14 a BatchNormalization trained where it had outputs beside the first."""
    if len(node.outputs) > 1:
        if any(v.uses() or v.is_graph_output() for v in node.outputs[3:]):
            raise ModelError(
                f"node '{node.name}' (BatchNormalization): outputs 4 and 5, the statistics of the "
                "batch, are not supported"
            )
        node.resize_outputs(min(3, len(node.outputs)))
        node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)


@_rule(19, "AveragePool")
def _average_with_pads(node: ir.Node, op: Builder) -> Sequence[ir.Value] | None:
    """Before opset 19 what counts pads divides by the whole kernel, even of a smaller image."""
    factor = counted_part(node, _first_input(node), op)
    if factor is None:
        return None
    attributes = {key: a.value for key, a in node.attributes.items()}
    return [op.Mul(op.node("AveragePool", [_first_input(node)], attributes=attributes), factor)]


def counted_part(node: ir.Node, x: ir.Value, op: Builder) -> ir.Value | None:
    """How much of the kernel of an AveragePool that counts pads lies on the padded image `x`.

    None where that is all of it. From opset 19 on the pool divides by that part alone; windows that
    pass the padding because of `ceil_mode` are divided so in every opset.
    """
    include, ceil = (node.attributes.get_int(k, 0) for k in ("count_include_pad", "ceil_mode"))
    if not include or ceil or not passes_padding(node, x):
        return None
    kernel = node.attributes.get_ints("kernel_shape", ())
    pads = around(node, len(kernel))
    size = op.Shape(x, start=2)
    pad, window = np.array(pads, np.float32), np.array(kernel, np.float32)
    padded = op.Add(op.Cast(size, to=ir.DataType.FLOAT), op.constant(pad))
    parts = op.Div(op.Min(padded, op.constant(window)), op.constant(window))
    return cast(ir.Value, op.CastLike(op.ReduceProd(parts, keepdims=0), x))


@_rule(21, "GroupNormalization")
def _group_norm(node: ir.Node, op: Builder) -> None:
    """Before opset 21 scale and bias have an entry a group, later one a channel.

    The statistics of float64 are then of float32 where nothing says otherwise.
    """
    if _first_input(node).dtype == ir.DataType.DOUBLE:
        kind = ir.AttrInt64("stash_type", int(ir.DataType.DOUBLE))
        node.attributes.setdefault(kind.name, kind)
    groups = node.attributes.get_int("num_groups", 1)
    if groups < 1:
        raise ModelError(
            f"node '{node.name}' (GroupNormalization): num_groups is {groups}, not positive"
        )
    each = op.Div(op.Shape(_first_input(node), start=1, end=2), [groups])
    each = op.Concat([groups], op.Max(each, [1]), axis=0)
    for i in (1, 2):  # or one for all groups
        wide = op.Expand(op.Unsqueeze(given(node, i), [1]), each)
        _set_input(node, i, op.Reshape(wide, [-1]))


@_rule(9, "Upsample")
def _upsample_attribute(node: ir.Node, op: Builder) -> None:
    _set_input(node, 1, op.constant(np.array(_pop_attribute(node, "scales", ()), np.float32)))


@_rule(10, "Upsample")
def _upsample(node: ir.Node, op: Builder) -> Sequence[ir.Value]:
    mode = node.attributes.get_string("mode", "nearest")
    return [_resized(op, _first_input(node), given(node, 1), mode, "floor")]


@_rule(11, "Resize")
def _resize(node: ir.Node, op: Builder) -> Sequence[ir.Value]:
    """Opset 10: x_original = x / scale; the nearest is the next below, above where it shrinks."""
    x, scales, mode = (
        _first_input(node),
        given(node, 1),
        node.attributes.get_string("mode", "nearest"),
    )
    factors = const_array(scales)
    if mode != "nearest" or (factors is not None and (factors >= 1).all()):
        return [_resized(op, x, scales, mode, "floor")]
    if factors is not None and (factors <= 1).all():
        return [_resized(op, x, scales, mode, "ceil")]
    one = op.constant(np.array(1, np.float32))
    smaller = _resized(op, x, op.Min(scales, one), mode, "ceil")
    return [_resized(op, smaller, op.Max(scales, one), mode, "floor")]


def _resized(
    op: Builder, x: ir.Value, scales: ir.Value | None, mode: str, nearest: str
) -> ir.Value:
    positions = {"coordinate_transformation_mode": "asymmetric"}
    nearest_mode = nearest if mode == "nearest" else None
    return op.Resize(x, None, scales, mode=mode, nearest_mode=nearest_mode, **positions)


@_rule(13, "Resize")
def _resize_sizes(node: ir.Node, op: Builder) -> None:
    """Before opset 13 an empty tensor stands for scales that sizes replace."""
    if given(node, 3) is not None:
        _set_input(node, 2, None)


@_rule(9, "Scan")
def _scan(node: ir.Node, op: Builder) -> Sequence[ir.Value]:
    """Opset 8's Scan has a batch first: a Scan over it whose body is the Scan of one element."""
    if given(node, 0) is not None:
        raise ModelError(
            f"node '{node.name}': opset 8's Scan with a length for each sequence is not supported"
        )
    stem = node.name or node.outputs[0].name
    count, ways = node.attributes.get_int("num_scan_inputs", 1), node.attributes.get("directions")
    sequences = list(node.inputs[1:])
    elements = [ir.Value(name=f"{stem}.element.{i}") for i in range(len(sequences))]
    for value, source in zip(elements, sequences, strict=True):
        if source is not None and source.type is not None:
            value.type = source.type
            value.shape = None if source.shape is None else ir.Shape(source.shape[1:])
    body = node.attributes.pop("body").as_graph()
    directions = {} if ways is None else {"scan_input_directions": ways.as_ints()}
    attributes: dict[str, Any] = {"body": body, "num_scan_inputs": count, **directions}
    inner = ir.node("Scan", elements, attributes, num_outputs=len(node.outputs))
    inner.name = f"{stem}.element"
    for i, value in enumerate(inner.outputs):
        value.name = f"{stem}.result.{i}"
    batch = ir.Graph(elements, inner.outputs, nodes=[inner], name=f"{stem}.batch")
    attributes = {"body": batch, "num_scan_inputs": len(sequences)}
    results = op.node("Scan", sequences, outputs=len(node.outputs), attributes=attributes)
    return list(results) if isinstance(results, tuple) else [results]


@_rule(19, "LeakyRelu", "PRelu")
def _slope_of_other_types(node: ir.Node, op: Writer) -> list[ir.Value] | None:
    """Write the operator out for types of which onnxruntime (1.32) has no kernel.

    It runs them by the standard's body, but only up to opset 18.
    """
    x = node.inputs[0]
    if x is None or x.dtype is None or x.dtype in _KERNEL_TYPES:
        return None
    slope: ir.Value | float | None = given(node, 1)
    if slope is None:
        slope = float(np.float32(_pop_attribute(node, "alpha", 0.01)))
    return [op.formula("Where(x < 0, slope * x, x)", x=x, slope=slope)]


_KERNEL_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@_rule(17, "LayerNormalization")
def _norm_of_two_types(node: ir.Node, op: Writer) -> list[ir.Value] | None:
    """Write the operator out where x has another type than the scale and the bias.

    onnxruntime's operator, which is older than the standard's, has statistics in `stash_type`, and
    y in the type of the scale. This is its body.
    """
    x, scale, bias = given(node, 0), given(node, 1), given(node, 2)
    kind, size = scale.dtype if scale is not None else None, rank(x)
    if x is None or size is None or kind is None or x.dtype in (None, kind):
        return None
    axes = op.constant(np.arange(_pop_attribute(node, "axis", -1) % max(size, 1), size))
    wide = ir.DataType(_pop_attribute(node, "stash_type", int(ir.DataType.FLOAT)))
    rows = op.Cast(x, to=int(wide))
    rows.dtype = wide
    y, mean, rstd = op.formula(
        f"""mean = ReduceMean <keepdims = 1> (rows, axes)
        deviation = Sqrt(ReduceMean <keepdims = 1> (rows * rows, axes) - mean * mean + epsilon)
        y = CastLike((rows - mean) / deviation, scale) * scale {"" if bias is None else "+ bias"}
        y, mean, Reciprocal(deviation)""",
        rows=rows, axes=axes, scale=scale, bias=bias,
        epsilon=float(np.float32(_pop_attribute(node, "epsilon", 1e-5))),
    )  # fmt: skip
    return [y, mean, rstd][: len(node.outputs)]


@_rule(19, "Relu")
def _relu_of_int64(node: ir.Node, op: Writer) -> list[ir.Value] | None:
    """Write the operator out for int64, which onnxruntime (1.32) runs up to opset 18 alone."""
    x = node.inputs[0]
    if x is None or x.dtype != ir.DataType.INT64:
        return None
    return [op.Max(x, op.constant(np.zeros((), np.int64)))]


@_rule(19, "Elu", "HardSigmoid", "HardSwish", "Mish", "Selu", "Softplus", "Softsign")
@_rule(19, "ThresholdedRelu")
def _activation_of_float64(node: ir.Node, op: Writer) -> list[ir.Value] | None:
    """Write the operator out for float64, of which onnxruntime (1.32) has no kernel.

    It runs the standard's body, but only up to opset 18; the formulas have its order of operations.
    """
    x = node.inputs[0]
    if x is None or x.dtype != ir.DataType.DOUBLE:
        return None
    formula, defaults = _WRITTEN_OUT[node.op_type]
    numbers = {k: float(np.float32(_pop_attribute(node, k, v))) for k, v in defaults.items()}
    return [op.formula(formula, x=x, **numbers)]


_HARD_SIGMOID = "Max(Min(x * alpha + beta, 1), 0)"
_WRITTEN_OUT: dict[str, tuple[str, dict[str, float]]] = {
    "Elu": ("Where(x < 0, alpha * (Exp(x) - 1), x)", {"alpha": 1.0}),
    "Selu": (
        "Where(x < 0, gamma * (alpha * Exp(x) - alpha), gamma * x)",
        {"alpha": 1.67326319217681884765625, "gamma": 1.05070102214813232421875},
    ),
    "HardSigmoid": (_HARD_SIGMOID, {"alpha": 0.2, "beta": 0.5}),
    "HardSwish": (f"x * {_HARD_SIGMOID}", {"alpha": 1 / 6, "beta": 0.5}),
    "ThresholdedRelu": ("Where(alpha < x, x, 0)", {"alpha": 1.0}),
    "Softsign": ("x / (1 + Abs(x))", {}),
    "Softplus": ("Log(Exp(x) + 1)", {}),
    "Mish": ("x * Tanh(Log(Exp(x) + 1))", {}),
}
"""Operators as formulas of x and of their attributes, with the defaults of those."""

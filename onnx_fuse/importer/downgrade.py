"""Nodes of a later ai.onnx opset as an older one spells them, where it can."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.errors import ModelError
from onnx_fuse.importer.upgrade import BECAME_INPUTS, UPGRADES, counted_part
from onnx_fuse.ir.build import Builder, all_nodes, const_array, given
from onnx_fuse.ir.copying import replace_node
from onnx_fuse.ops.shape_ops import Writer

Rule = Callable[[ir.Node], bool]
"""Rewrites the node in place for an older opset; False where that opset cannot express it."""

DOWNGRADES: dict[tuple[str, int], Rule] = {}
"""The rules by (operator, first opset that means something else), as in `upgrade.UPGRADES`."""


def downgrade(graph: ir.Graph | ir.Function, version: int, opset: int) -> None:
    """Respell all nodes, subgraphs included, from ai.onnx `version` to the older `opset`."""
    for node in list(all_nodes(graph)):
        if node.domain == "":
            _respell(node, version, opset)
    for node in list(all_nodes(graph)):  # constants that have become attributes
        if node.op_type == "Constant" and node.graph is not None:
            y = node.outputs[0]
            if not y.uses() and not y.is_graph_output():
                node.graph.remove(node, safe=True)


def _respell(node: ir.Node, version: int, opset: int) -> None:
    name = f"node '{node.name or node.outputs[0].name}' ({node.op_type})"
    if not onnx.defs.has(node.op_type, max_inclusive_version=opset):
        if _written_out(node, version, opset):
            return
        first = min(
            s.since_version
            for s in onnx.defs.get_all_schemas_with_history()
            if s.name == node.op_type and s.domain == ""
        )
        raise ModelError(f"{name} needs opset {first} or newer: it cannot be written in {opset}")
    changes = sorted({since for op, since in UPGRADES if op == node.op_type}, reverse=True)
    for since in changes:
        if opset < since <= version:
            rule = DOWNGRADES.get((node.op_type, since))
            if rule is None or not rule(node):
                raise ModelError(
                    f"{name} needs opset {since} or newer: it cannot be written in {opset}"
                )
    old = onnx.defs.get_schema(node.op_type, opset, "")
    new = onnx.defs.get_schema(node.op_type, version, "")
    if old.since_version == new.since_version:
        return
    for key in list(node.attributes):
        if key not in old.attributes:
            default = new.attributes[key].default_value if key in new.attributes else None
            attribute = node.attributes[key]
            usual = ir.serde.deserialize_attribute(default) if default is not None else None
            if attribute.is_ref() or usual is None or usual.value != attribute.value:
                if not attribute.is_ref() and _written_out(node, version, opset):
                    return
                raise ModelError(
                    f"{name}: '{key}' needs opset {_since(node, opset, version, key)} or newer: it "
                    f"cannot be written in {opset}"
                )
            del node.attributes[key]
    while node.inputs and node.inputs[-1] is None:
        node.resize_inputs(len(node.inputs) - 1)
    if len(node.inputs) > old.max_input or len(node.outputs) > old.max_output:
        raise ModelError(f"{name} has more inputs or outputs than opset {opset} allows")
    for i, value in enumerate(node.inputs):
        if value is not None and value.dtype is not None:
            allowed = old.inputs[min(i, len(old.inputs) - 1)].types
            kind = _TYPE_NAMES.get(value.dtype, value.dtype.name.lower())
            if allowed and f"tensor({kind})" not in allowed:
                raise ModelError(f"{name} does not take {kind} in opset {opset}: write a newer one")


def _written_out(node: ir.Node, version: int, opset: int) -> bool:
    """Replace an operator that `opset` lacks by those that it is made of, where they are known."""
    write, op = WRITTEN_OUT.get(node.op_type), Writer()
    results = write(node, op) if write is not None else None
    if results is None or node.graph is None:
        return False
    replace_node(node, op.nodes, results)
    for inner in op.nodes:
        _respell(inner, version, opset)
    return True


def _since(node: ir.Node, opset: int, version: int, key: str) -> int:
    for v in range(opset + 1, version + 1):
        if key in onnx.defs.get_schema(node.op_type, v, "").attributes:
            return v
    return version


_TYPE_NAMES = {ir.DataType.FLOAT: "float", ir.DataType.DOUBLE: "double"}


WRITTEN_OUT: dict[str, Callable[[ir.Node, Writer], list[ir.Value] | None]] = {}
"""Decompositions by operator, for opsets that lack the operator or one of its attributes; None for
a node that cannot be decomposed."""


def _gelu(node: ir.Node, op: Writer) -> list[ir.Value] | None:
    part = f"Erf(x * {math.sqrt(0.5)})"
    if node.attributes.get_string("approximate", "none") == "tanh":
        part = f"Tanh((x + x * x * x * 0.044715) * {math.sqrt(2 / math.pi)})"
    return [op.formula(f"x * 0.5 * ({part} + 1)", x=node.inputs[0])]


def _layer_norm(node: ir.Node, op: Writer) -> list[ir.Value] | None:
    """Write a norm over the last axis of float32 or double; other types need unknown casts."""
    x, scale = node.inputs[:2]
    bias = given(node, 2)
    if x is None or x.dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return None
    axis = node.attributes.get_int("axis", -1)
    if axis != -1 and (x.shape is None or axis != len(x.shape) - 1):
        return None
    y, mean, rstd = op.formula(
        """mean = ReduceMean(x, axes); d = x - mean
        deviation = Sqrt(ReduceMean(d * d, axes) + @epsilon)
        d / deviation * scale, mean, Reciprocal(deviation)""",
        node,
        x=x,
        axes=op.constant([-1]),
        scale=scale,
    )
    return [y if bias is None else op.Add(y, bias), mean, rstd]


def _shape_as_slice(node: ir.Node, op: Builder) -> list[ir.Value]:
    sizes, last = op.Shape(node.inputs[0]), np.iinfo(np.int64).max
    ends = (("start", 0), ("end", last))
    bounds = [op.constant([node.attributes.get_int(name, other)]) for name, other in ends]
    return [op.Slice(sizes, *bounds, [0])]


def _reshape(node: ir.Node, op: Builder) -> list[ir.Value] | None:
    """A Reshape with allowzero to sizes that are known and not zero."""
    sizes = const_array(node.inputs[1])
    if sizes is None and node.outputs[0].shape is not None:
        static = [d for d in node.outputs[0].shape if isinstance(d, int)]
        sizes = np.array(static) if len(static) == len(node.outputs[0].shape) else None
    if sizes is None or not sizes.all():
        return None
    return [op.Reshape(node.inputs[0], op.constant(sizes.astype(np.int64)))]


def _cast_like(node: ir.Node, op: Builder) -> list[ir.Value] | None:
    like = node.inputs[1]
    return None if like is None or like.dtype is None else [op.Cast(node.inputs[0], to=like.dtype)]


def _bitwise_and(node: ir.Node, op: Builder) -> list[ir.Value] | None:
    """The lowest bits of an integer are its remainder, which has the divisor's sign in ONNX."""
    for x, mask in zip(node.inputs, reversed(node.inputs), strict=True):
        bits = const_array(mask)
        if bits is None or bits.size != 1 or x is None:
            continue
        divisor = int(bits.reshape(())) + 1
        if 0 < divisor <= np.iinfo(bits.dtype).max and divisor & (divisor - 1) == 0:
            return [op.Mod(x, op.constant(np.full(bits.shape, divisor, bits.dtype)))]
    return None


WRITTEN_OUT.update(
    Gelu=_gelu, LayerNormalization=_layer_norm, Shape=_shape_as_slice, Reshape=_reshape,
    CastLike=_cast_like, BitwiseAnd=_bitwise_and,
)  # fmt: skip


def _rule(since: int, *ops: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        DOWNGRADES.update({(op, since): rule for op in ops})
        return rule

    return register


def _numbers(node: ir.Node, index: int) -> np.ndarray | None:
    return const_array(given(node, index))


def _as_attributes(node: ir.Node, since: int) -> bool:
    """Make the inputs of opset `since` that are constants the attributes that they were before."""
    for i, name, kind, _ in BECAME_INPUTS[node.op_type, since]:
        if given(node, i) is None:
            if kind in ("size", "int"):
                return False
            continue
        array = _numbers(node, i)
        if array is None or (array.size != 1 and kind != "ints"):
            return False
        if kind == "ints":
            new = ir.AttrInt64s(name, array.reshape(-1).tolist())
        else:
            number = array.reshape(()).item()
            new = ir.AttrFloat32(name, number) if kind == "float" else ir.AttrInt64(name, number)
        node.attributes[name] = new
        node.replace_input_with(i, None)
    return True


DOWNGRADES.update(
    {key: partial(_as_attributes, since=key[1]) for key in BECAME_INPUTS if key[0] != "ReduceSum"}
)


@_rule(13, "ReduceSum")
@_rule(18, *(op for op, since in BECAME_INPUTS if since == 18))
def _axes(node: ir.Node) -> bool:
    array = _numbers(node, 1)
    if node.attributes.get_int("noop_with_empty_axes", 0) and (array is None or not array.size):
        return False
    node.attributes.pop("noop_with_empty_axes", None)
    return _as_attributes(node, 13 if node.op_type == "ReduceSum" else 18)


@_rule(18, "Split")
def _split_count(node: ir.Node) -> bool:
    count = node.attributes.pop("num_outputs", None)
    if count is None:
        return True
    x, axis = node.inputs[0], node.attributes.get_int("axis", 0)
    size = None if x is None or x.shape is None else x.shape[axis]
    return isinstance(size, int) and size % count.as_int() == 0


@_rule(10, "Slice")
def _slice(node: ir.Node) -> bool:
    steps = _numbers(node, 4)
    if given(node, 4) is not None and (steps is None or (steps != 1).any()):
        return False
    node.resize_inputs(min(len(node.inputs), 4))
    return _as_attributes(node, 10)


@_rule(12, "Dropout")
def _dropout(node: ir.Node) -> bool:
    return len(node.outputs) == 1 and given(node, 2) is None and _as_attributes(node, 12)


@_rule(10, "Dropout")
@_rule(11, "Dropout")
def _dropout_mask(node: ir.Node) -> bool:
    return len(node.outputs) == 1


@_rule(13, "Softmax", "LogSoftmax", "Hardmax")
def _softmax(node: ir.Node) -> bool:
    x, axis = node.inputs[0], node.attributes.get_int("axis", -1)
    if x is None or x.shape is None:
        return False
    node.attributes["axis"] = ir.AttrInt64("axis", axis % len(x.shape))
    return axis % len(x.shape) == len(x.shape) - 1


@_rule(14, "BatchNormalization")
def _batch_norm(node: ir.Node) -> bool:
    mode = node.attributes.pop("training_mode", None)
    return mode is None or mode.value == 0


@_rule(9, "BatchNormalization")  # spatial=1 is the older operator's default
@_rule(19, "LeakyRelu", "PRelu", "Elu", "HardSigmoid", "HardSwish", "Mish", "Selu", "Softplus")
@_rule(19, "Softsign", "ThresholdedRelu", "Relu")
def _means_the_same(node: ir.Node) -> bool:
    """The older operator computes the same; only on the way up it is written otherwise."""
    return True


@_rule(16, "RoiAlign")
def _roi_align(node: ir.Node) -> bool:
    mode = node.attributes.pop("coordinate_transformation_mode", None)
    return mode is not None and mode.value == "output_half_pixel"


@_rule(20, "GridSample")
def _grid_sample(node: ir.Node) -> bool:
    mode = node.attributes.get_string("mode", "linear")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    node.attributes["mode"] = ir.AttrString("mode", mode)
    return True


@_rule(19, "AveragePool")
def _average_pool(node: ir.Node) -> bool:
    x = given(node, 0)
    if x is None or counted_part(node, x, Builder()) is None:
        return True
    without = not any(node.attributes.get_ints("pads", ()))
    if without:  # what is counted is the image
        node.attributes.pop("count_include_pad")
    return without


@_rule(13, "Resize")
def _resize(node: ir.Node) -> bool:
    return given(node, 1) is not None and given(node, 2) is not None

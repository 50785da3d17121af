"""Put QuantizeLinear and DequantizeLinear around layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.load import read
from onnx_fuse.importer.save import fits_protobuf, to_proto
from onnx_fuse.ir.build import (
    Builder,
    add_initializer,
    const_array,
    given,
    insert_behind,
    remove_unused_nodes,
    required,
)
from onnx_fuse.ir.names import Names
from onnx_fuse.ir.traits import VIEWS
from onnx_fuse.quantization.layers import PRODUCTS, channels
from onnx_fuse.quantization.rounding import Inputs, compensated
from onnx_fuse.training.stored_codes import StoredCodes

PASSING = ("Relu", "Clip", "MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")
"""Operators that integers pass, behind layers that make them."""
BLOCK = 32
"""Weights of 4 bits that share a scale."""
_F8 = ir.DataType.FLOAT8E4M3FN
_MOVING = VIEWS | {"MaxPool", "Slice"}
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Parts of a block's largest weight that may become the largest code."""


def in_int8(model: ir.Model, names: Sequence[str], ranges: object, kind: str) -> ir.Model:
    """The model with these layers in int8 by onnxruntime's quantizer, weights by channel.

    `kind` is the type of activations, QInt8 or QUInt8. Raises ModelError beyond 2 GB.
    """
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

    if not fits_protobuf(model):
        raise ModelError("onnxruntime's quantizer takes models up to 2 GB: use --to int4-weights")
    # of an output that is an input it makes another value of that name
    ends = [*model.graph.outputs]
    model = model.clone()
    model.graph.outputs[:] = [v for v in model.graph.outputs if not v.is_graph_input()]
    passing = [str(n.name) for n in model.graph if n.op_type in PASSING and not n.domain]
    options = {"MatMulConstBOnly": True, "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]}
    quantizer = QDQQuantizer(
        to_proto(model, shapes=True), True, False, QuantType.QInt8, QuantType[kind], ranges,
        [*names, *passing], [], [*PRODUCTS, *PASSING], options,
    )  # fmt: skip
    quantizer.quantize_model()
    model = read(quantizer.model.model)
    inputs = {v.name: v for v in model.graph.inputs}
    for i, end in enumerate(ends):
        if end.is_graph_input():
            model.graph.outputs.insert(i, inputs[end.name])
    return model


def in_float8(model: ir.Model, names: Sequence[str], ranges: Any) -> ir.Model:
    """The model with these layers in float8e4m3fn, whose largest numbers are the ranges' ends."""
    model, limit = model.clone(), float(_F8.max)
    naming, rounded = Names.of(model.graph), dict[ir.Value, ir.Value]()
    for node in [n for n in model.graph if n.name in names]:
        x, weight = node.inputs[0], const_array(node.inputs[1])
        if x is None or weight is None:
            continue
        largest = np.abs(np.asarray(ranges[x.name].range_value, np.float64)).max()
        step = _scale(largest, limit)
        if x not in rounded:
            rounded[x] = _rounded(model.graph, x, step, naming)
        axis = channels(node, weight)
        others = tuple(i for i in range(weight.ndim) if i != axis)
        scales = _scale(np.abs(weight).max(others), limit)
        bias = const_array(given(node, 2))
        if bias is not None:  # onnxruntime makes integers of it, in these steps
            scales = np.maximum(scales, np.abs(bias).max(initial=0) / (step * np.float32(1 << 30)))
        stored = StoredCodes(_F8, "", scales, None, axis, 0)
        _store(model.graph, node, weight, stored, naming, axis=axis)
        node.replace_input_with(0, rounded[x])
    remove_unused_nodes(model)
    return model


def _rounded(graph: ir.Graph, x: ir.Value, scale: Array, naming: Names) -> ir.Value:
    """A value rounded to float8.

    A Relu or Clip follows the rounding, which is the same: onnxruntime (1.32) drops a Relu before
    it, or fails at a Clip, and moves it up through what moves elements.
    """
    source, passed = x, list[ir.Node]()
    while (maker := source.producer()) is not None and not maker.domain:
        clips = maker.op_type in ("Relu", "Clip")
        if not (clips or maker.op_type in _MOVING) or maker.inputs[0] is None:
            break
        passed.append(maker)
        source = maker.inputs[0]
        if clips:
            break
    if not passed or passed[-1].op_type not in ("Relu", "Clip"):
        source, passed = x, []
    op = Builder()
    scales, zero = (
        add_initializer(graph, naming.fresh(f"{x.name}_{label}"), array)
        for label, array in (("scale", scale), ("zero", np.zeros((), _F8.numpy())))
    )
    result = op.DequantizeLinear(op.QuantizeLinear(source, scales, zero), scales, zero)
    for node in reversed(passed):
        operands = [result, *node.inputs[1:]]
        result = op.node(node.op_type, operands, attributes=dict(node.attributes))
    result = _named(op, result, naming, x)
    insert_behind(graph, x.producer(), op.nodes)
    return result


def in_four_bits(model: ir.Model, names: Sequence[str], inputs: Mapping[str, Inputs]) -> ir.Model:
    """The model with the weights of these layers in int4, in blocks along what is summed over.

    Where the gram of a layer's inputs is known, the codes are those that change its result least.
    """
    model = model.clone()
    naming = Names.of(model.graph)
    for node in [n for n in model.graph if n.name in names]:
        weight = const_array(node.inputs[1])
        if weight is not None:
            axis = 1 - channels(node, weight)
            seen = inputs.get(node.name or "")
            gram = None if seen is None else seen.gram
            weight, stored = _in_blocks(weight, axis, gram)
            _store(model.graph, node, weight, stored, naming, axis=axis, block_size=BLOCK)
    return model


def _in_blocks(weight: Array, axis: int, gram: Array | None) -> tuple[Array, StoredCodes]:
    """A weight as its codes' floats, or itself where they are the nearest ones, and the scales."""
    rows = np.moveaxis(weight.astype(np.float64), axis, 0)
    scales = np.stack([_best_scale(rows[i : i + BLOCK]) for i in range(0, len(rows), BLOCK)])
    wide = scales.repeat(BLOCK, 0)[: len(rows)]
    nearest = np.clip(np.rint(rows / wide), -8, 7) * wide
    if gram is not None:
        found, others = compensated(rows, gram, _best_scale, BLOCK)
        if _lost(found - rows, gram) < _lost(nearest - rows, gram):
            nearest, scales = found, others
    turned = np.moveaxis(scales, 0, axis).astype(weight.dtype)
    stored = StoredCodes(ir.DataType.INT4, "", turned, None, axis, BLOCK)
    return np.moveaxis(nearest, 0, axis), stored


def _lost(difference: Array, gram: Array) -> float:
    """The mean square of what a weight's difference [K, N] makes of inputs with this gram."""
    return float(np.einsum("kn,kn->", difference, gram @ difference))


def _best_scale(block: Array) -> Array:
    """The scales of a block [rows, N], each of some by which its squared error is least."""
    largest = np.abs(block).max(0)
    best, least = _scale(largest, 7), np.full(largest.shape, np.inf)
    for shrink in _SHRINKS:
        scale = _scale(largest * shrink, 7)
        error = np.square(np.clip(np.rint(block / scale), -8, 7) * scale - block).sum(0)
        best = np.where(error < least, scale, best)
        least = np.minimum(error, least)
    return best.astype(np.float64)


def _scale(largest: object, limit: float) -> Array:
    """What the largest code has to be multiplied by; 1 where all is 0."""
    scale = np.asarray(largest, np.float32) / np.float32(limit)
    return np.where(scale > 0, scale, np.float32(1)).astype(np.float32)


def _store(
    graph: ir.Graph,
    node: ir.Node,
    weight: Array,
    stored: StoredCodes,
    naming: Names,
    **attributes: int,
) -> None:
    """Let a node read a weight as stored codes through a DequantizeLinear."""
    value, op = required(node.inputs[1]), Builder()
    codes, scale = (
        add_initializer(graph, naming.fresh(f"{value.name}_{label}"), array)
        for label, array in (("quantized", stored.codes(weight, {})), ("scale", stored.scales))
    )
    result = op.node("DequantizeLinear", [codes, scale], attributes=attributes)
    node.replace_input_with(1, _named(op, result, naming, value))
    graph.insert_before(node, op.nodes)
    if value.is_initializer() and not (value.uses() or value.is_graph_output()):
        del graph.initializers[str(value.name)]


def _named(op: Builder, result: ir.Value, naming: Names, like: ir.Value) -> ir.Value:
    """A result with the type and shape of a value; it and the nodes get names."""
    for node in op.nodes:
        node.name = naming.fresh(f"{like.name}_{node.op_type}")
        node.outputs[0].name = naming.fresh(f"{node.name}_Output")
    result.type, result.shape = like.type, like.shape
    return result

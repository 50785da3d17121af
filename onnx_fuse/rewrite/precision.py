"""A graph computed in another float type: narrower between Casts, or wider throughout."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import inline
from onnx_fuse.ir.build import Builder, add_initializer, insert_behind, sources, subgraphs
from onnx_fuse.ir.names import Names
from onnx_fuse.program.problem import PRECISIONS
from onnx_fuse.rewrite.between_codes import between_codes
from onnx_fuse.rewrite.fp16_range import OutOfRange, find_out_of_range, narrowed, set_floor

F32 = ir.DataType.FLOAT
# Inputs that stay float32, by operator: sizes are no data, and running statistics need the digits.
KEPT_INPUTS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2, 3, 4),
    "QuantizeLinear": (1,),
    "Resize": (1, 2),
    "Upsample": (1,),
}


def in_precision(model: ir.Model, precision: str, *, stored: bool = False) -> tuple[ir.Model, str]:
    """(`model`, or a copy in 16 bits; which products of float32 it may use), by PRECISIONS."""
    dtype, math = PRECISIONS[precision]
    if dtype != "float32":
        model = model.clone()
        lower_precision(model, ir.DataType[dtype.upper()], stored=stored)
    return model, math


def lower_precision(
    model: ir.Model, dtype: ir.DataType, *, masters: bool = False, stored: bool = False
) -> None:
    """Turn float32 into `dtype` (BFLOAT16, FLOAT16) in place, between Casts at the graph's ends.

    With `masters` the initializers stay float32 and are cast where they are read, so that training
    updates them in full precision. Constants beyond `dtype`'s range become its largest numbers: a
    mask of float32's lowest stays finite; what is summed or multiplied with one beyond float16's
    stays float32, and attention is told what its mask's lowest number means. Angles of positions
    stay float32 up to their sine and cosine, and, without `masters`, what stands between codes.
    With `masters`, and in a model that is to be `stored`, an operator that the model's opset has in
    other types only stays float32 between Casts: its gradient could not be typed, and onnxruntime
    would refuse it.
    Of a `stored` one so does attention whose mask has numbers beyond the range, since bodies do not
    know their meaning. Raises ModelError for an If, Loop or Scan in it.
    """
    graph, op = model.graph, Builder()
    for node in graph if stored else ():
        if any(subgraphs(attribute) for attribute in node.attributes.values()):
            raise ModelError(
                f"{node.op_type} '{node.name}' has a body of its own: such a graph is not written "
                "in 16 bits"
            )
    widened = [value.dtype == F32 for value in graph.outputs]
    typed = masters or stored
    if typed and dtype == ir.DataType.BFLOAT16 and graph.opset_imports[""] == 21:
        # all that 22 does is to give operators, Conv and the pools among them, bfloat16
        graph.opset_imports[""] = 22
    # both in order: what is made of them must not depend on a hash
    wide: dict[ir.Node, None] = {}
    wide_values: dict[ir.Value, None] = {}

    def keep(values: Iterable[ir.Value | None], *, makers: bool = True) -> None:
        """Keep these values in float32 and, with `makers`, what they are computed from."""
        for value in values:
            if value is None or value.dtype != F32 or value in wide_values:
                continue
            wide_values[value] = None
            maker = value.producer()
            if makers and maker is not None:
                wide[maker] = None
                keep((*maker.outputs, *maker.inputs))

    far = (
        find_out_of_range(graph, training=masters) if dtype == ir.DataType.FLOAT16 else OutOfRange()
    )
    wide |= far.nodes
    keep(far.values, makers=False)
    for node in far.nodes:
        keep(node.outputs, makers=False)
    for node, i, number in far.masks:
        if stored:  # bodies know no floor
            wide[node] = None
            keep((node.inputs[i],))
            keep(node.outputs, makers=False)
        else:
            set_floor(node, number)
    for node in () if masters else between_codes(graph):
        wide[node] = None
        keep((*node.inputs, *node.outputs), makers=False)
    for node in graph:
        if node.op_type in ("Cos", "Sin") and _of_integers(node.inputs[0]):
            keep(node.outputs)
        at = KEPT_INPUTS.get(node.op_type, ())
        keep(v for i, v in enumerate(node.inputs) if i in at)
        if node.op_type == "BatchNormalization":
            keep(node.outputs[1:], makers=False)
        rounds = node.op_type == "QuantizeLinear"  # its codes are to be those of the saved file
        if "Sequence" in node.op_type or node.op_type.startswith("Optional"):
            wide[node] = None  # no Cast takes a sequence: all of them stay float32
            keep(node.outputs, makers=False)
        elif typed:
            refuses, fixed = _fixed_types(node, dtype, graph.opset_imports[""])
            if rounds or refuses or node.outputs[0] in fixed:
                wide[node] = None
                fixed = [*node.outputs]
            keep(fixed, makers=False)
    inputs = [v for v in graph.inputs if v.dtype == F32 and v not in wide_values]
    weights = [v for v in graph.initializers.values() if v.dtype == F32 and v not in wide_values]
    for node in list(graph):
        _node(node, dtype, wide_values)
        for value in node.outputs:  # a new type: clones share theirs
            if value.dtype == F32 and value not in wide_values:
                value.type = ir.TensorType(dtype)
    for value in [*inputs, *(weights if masters else ()), *wide_values]:
        uses = [(n, i) for n, i in value.uses() if i not in KEPT_INPUTS.get(n.op_type, ())]
        uses = [(n, i) for n, i in uses if n not in wide]
        maker = value.producer()
        here = op if maker is None else Builder()
        if value not in far.values or not uses:
            cast = _to(here, value, dtype) if uses else value
        elif value.const_value is not None and (maker is not None or not masters):
            cast = here.constant(_cast(value.const_value.numpy(), dtype))
        else:
            cast = narrowed(here, value)
        for node, i in uses:
            node.replace_input_with(i, cast)
        if maker is not None:
            graph.insert_after(maker, here.nodes)
    arrays = [value.const_value.numpy() for value in weights if value.const_value is not None]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # NumPy lets other threads run
        converted = pool.map(_clipped_to_range if masters else _cast, arrays, [dtype] * len(arrays))
        for value, array, new in zip(weights, arrays, converted, strict=True):
            if not masters:
                value.const_value = ir.tensor(new, name=value.name)
                value.type = ir.TensorType(dtype)
            elif new is not array:
                value.const_value = ir.tensor(new, name=value.name)
    for node in wide:
        here = Builder()
        for i, read in enumerate(node.inputs):
            if read is not None and read.dtype == dtype:
                node.replace_input_with(i, _to(here, read, F32))
        graph.insert_before(node, here.nodes)
    insert_behind(graph, None, op.nodes)
    op, ends = Builder(), dict[ir.Value, ir.Value]()  # a value may be several outputs
    for k, value in enumerate(graph.outputs):
        if widened[k] and value.dtype == dtype:
            if value not in ends:
                name, ends[value] = value.name, _to(op, value, F32)
                value.name, ends[value].name = f"{name}.{dtype.name.lower()}", name
            graph.outputs[k] = ends[value]
    graph.extend(op.nodes)


def cast_frozen(graph: ir.Graph) -> None:
    """Replace each Cast of a float32 initializer to 16 bits by an initializer, in place.

    `lower_precision` with `masters` leaves them where weights might have been trained.
    """
    names = Names.of(graph)
    for weight in list(graph.initializers.values()):
        if weight.dtype != F32 or weight.const_value is None:
            continue
        for node, _ in list(weight.uses()):
            (y,) = node.outputs if node.op_type == "Cast" and not node.domain else (None,)
            if y is None or y.dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
                continue
            if y.is_graph_output() or node.graph is not graph:
                continue
            name = names.fresh(f"{weight.name}.{y.dtype.name.lower()}")
            array = weight.const_value.numpy().astype(y.dtype.numpy())
            narrow = add_initializer(graph, name, array)
            ir.convenience.replace_all_uses_with(y, narrow)
            graph.remove(node, safe=True)


def _of_integers(value: ir.Value | None) -> bool:
    """Whether a value is made of integers and initializers alone, as the angle of a position is."""
    floats = sources([value], lambda node: [v for v in node.inputs if v and v.dtype == F32])
    return not any(v.dtype == F32 and v.is_graph_input() and v.const_value is None for v in floats)


def _to(op: Builder, value: ir.Value, dtype: ir.DataType) -> ir.Value:
    cast: ir.Value = op.Cast(value, to=dtype.value)
    cast.dtype, cast.shape = dtype, value.shape
    return cast


def _fixed_types(node: ir.Node, dtype: ir.DataType, opset: int) -> tuple[bool, list[ir.Value]]:
    """Whether one of a node's float32 inputs cannot have `dtype`; the float32 results whose type is
    that of no such input.
    """
    has_bodies = any(subgraphs(attribute) for attribute in node.attributes.values())
    if has_bodies or node.domain or not onnx.defs.has(node.op_type, max_inclusive_version=opset):
        return False, []
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    kept = KEPT_INPUTS.get(node.op_type, ())
    kinds = {
        schema.inputs[min(i, len(schema.inputs) - 1)].type_str
        for i, x in enumerate(node.inputs)
        if x is not None and x.dtype == F32 and i not in kept
    }
    name = f"tensor({dtype.name.lower()})"
    results = zip(node.outputs, schema.outputs, strict=False)
    fixed = [y for y, formal in results if y.dtype == F32 and formal.type_str not in kinds]
    refuses = any(name not in allowed.get(kind, (kind,)) for kind in kinds)
    return refuses, [] if node.op_type in _TYPED else fixed


_TYPED = ("Cast", "Constant", "ConstantOfShape", "DequantizeLinear")
"""Operators of which `_node`, or an input that is cast, gives the result its type."""


def _node(node: ir.Node, dtype: ir.DataType, wide_values: Collection[ir.Value]) -> None:
    """Constants and target types inside a node."""
    if node.outputs and node.outputs[0] in wide_values:
        return
    if node.op_type in ("Cast", "EyeLike", "RandomNormalLike", "RandomUniformLike"):
        name = "to" if node.op_type == "Cast" else "dtype"
        if node.attributes.get_int(name, 0) == F32.value:
            node.attributes[name] = ir.AttrInt64(name, dtype.value)
    if node.op_type in ("Constant", "ConstantOfShape"):
        attribute = node.attributes.get("value")
        if attribute is not None and attribute.as_tensor().dtype == F32:
            tensor = ir.tensor(_cast(attribute.as_tensor().numpy(), dtype))
        elif node.op_type == "ConstantOfShape" and attribute is None:
            tensor = ir.tensor(_cast(np.zeros(1, np.float32), dtype))
        elif "value_float" in node.attributes or "value_floats" in node.attributes:
            number = node.attributes.get("value_float") or node.attributes["value_floats"]
            tensor = ir.tensor(_cast(np.array(number.value, np.float32), dtype))
            node.attributes.clear()
        else:
            return
        node.attributes["value"] = ir.AttrTensor("value", tensor)
        if node.op_type == "Constant":
            node.outputs[0].const_value = tensor


def _cast(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    return _clipped_to_range(array, dtype).astype(dtype.numpy())


def _clipped_to_range(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    low, high = float(dtype.min), float(dtype.max)
    if not array.size or (low <= array.min() and array.max() <= high):
        return array
    return np.where(np.isfinite(array), np.clip(array, low, high), array).astype(array.dtype)


def widened(model: ir.Model, narrow: Collection[ir.DataType], wide: ir.DataType) -> ir.Model:
    """A copy with the bodies written out that computes in `wide` what was in a type of `narrow`.

    Inputs, weights, constants, casts and created tensors change; values in between have no declared
    type afterwards, but for results of bodies: onnxruntime's Scan asks for their ranks, which it
    does not always find by itself. What takes nothing but float32 reads Casts.
    """
    model = inline(model)
    graph = model.graph
    graphs = (graph, *graph.subgraphs())
    results = {v for g in graphs[1:] for v in g.outputs if isinstance(v.type, ir.TensorType)}
    nodes = list(ir.traversal.RecursiveGraphIterator(graph))
    # what is an integer but for a constant's rounding, as T5's bucket of distance 16, is one here
    integers = {n for n in nodes if n.op_type == "Cast"
                and any(v is not None and v.dtype in narrow for v in n.inputs)
                and ir.DataType(n.attributes.get_int("to", 0)).is_integer()}  # fmt: skip
    for value in (v for g in graphs for v in (*g.inputs, *g.initializers.values())):
        if value.dtype in narrow:
            value.type = ir.TensorType(wide)
        if value.const_value is not None:
            value.const_value = _wide(value.const_value, narrow, wide)
    for node in nodes:
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR:
                tensor = _wide(attribute.as_tensor(), narrow, wide)
                node.attributes[name] = ir.AttrTensor(name, tensor)
            elif name in ("value_float", "value_floats") and F32 in narrow:
                del node.attributes[name]
                array = np.asarray(attribute.value, wide.numpy())
                node.attributes["value"] = ir.AttrTensor("value", ir.tensor(array))
            elif name in ("to", "dtype") and attribute.value in [int(k) for k in narrow]:
                node.attributes[name] = ir.AttrInt64(name, int(wide))
        if node.op_type == "GroupNormalization":  # its body casts to this
            node.attributes["stash_type"] = ir.AttrInt64("stash_type", int(wide))
        if node.op_type == "ConstantOfShape" and "value" not in node.attributes and F32 in narrow:
            zero = ir.tensor(np.zeros(1, wide.numpy()))
            node.attributes["value"] = ir.AttrTensor("value", zero)
        casts = (0,) if node in integers else _FLOAT32_ALONE.get(node.op_type, ())
        if casts and wide != F32 and node.graph is not None:
            op = Builder()
            for i in casts:
                if i < len(node.inputs) and node.inputs[i] is not None:
                    node.replace_input_with(i, op.Cast(node.inputs[i], to=F32))
            node.graph.insert_before(node, op.nodes)
        for value in node.outputs:
            if value.const_value is not None:
                value.const_value = _wide(value.const_value, narrow, wide)
            if value not in results:
                value.type = value.shape = None
            elif value.dtype in narrow:
                value.type = ir.TensorType(wide)
    return model


_FLOAT32_ALONE = {
    "NonMaxSuppression": (0, 1, 3, 4),
    "QuantizeLinear": (0, 1),
    "Resize": (1, 2),  # 8 times 1.9999999 is 16 in float32 alone
    **dict.fromkeys(("QLinearConv", "QLinearMatMul"), (1, 4, 6)),
}
"""The inputs of operators that are float32 in every model."""


def _wide(
    tensor: ir.TensorProtocol, narrow: Collection[ir.DataType], wide: ir.DataType
) -> ir.TensorProtocol:
    if tensor.dtype not in narrow:
        return tensor
    return ir.tensor(tensor.numpy().astype(wide.numpy()), name=tensor.name)

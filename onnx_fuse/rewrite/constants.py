"""Weights that an exporter keeps in Constant nodes become initializers: parameters by their place.

Whether a constant is a weight its name does not tell, but its reader does: the filter of a
convolution or the table of an embedding is one, a bound of Clip or an axis is none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import add_initializer, const_array

FEW = 4
"""Entries of a constant that is added or multiplied at most, to be no weight: channel means are
three or four; the bias of an Add has one entry for each feature."""
_OPERANDS = {
    **dict.fromkeys(("MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose"), range(9)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "GroupNormalization"), range(1, 3)),
    "InstanceNormalization": range(1, 3),
    "BatchNormalization": range(1, 5),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), (1, 2, 3, 7)),
    "Gather": (0,),
    "PRelu": (1,),
    "DeformConv": (1, 3),
}
"""Inputs that are weights by the operator's definition."""
_TERMS = frozenset(("Add", "Sub", "Mul"))
_VIEWS = frozenset(
    ("Cast", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
)


def lift_parameters(model: ir.Model, named: Collection[str] = ()) -> list[str]:
    """Turn the Constant nodes of the main graph that hold weights into initializers, in place.

    A weight is a float tensor with an axis that the graph reads where operators take weights, or
    adds or multiplies and that has more than `FEW` entries; `named` are weights whatever they look
    like, if they are floats. The initializer has the name of the node's output; returns the names.
    """
    graph, lifted = model.graph, []
    for node in [n for n in graph if n.op_type == "Constant" and not n.domain]:
        value = node.outputs[0]
        array = _content(node)
        if array is None or value.is_graph_output() or not value.name:
            continue
        is_float = ir.tensor(array).dtype.is_floating_point()
        if not is_float or not (value.name in named or _is_weight(value, array)):
            continue
        weight = add_initializer(graph, value.name, array)
        ir.convenience.replace_all_uses_with(value, weight)
        graph.remove(node, safe=True)
        lifted.append(value.name)
    return lifted


def set_parameter(model: ir.Model, name: str, array: np.ndarray) -> None:
    """Give an initializer, or the Constant node whose output has this name, another content."""
    value = model.graph.initializers.get(name)
    tensor = ir.tensor(array, name=name)
    if value is not None:
        value.const_value = tensor
        return
    node = next(n for n in model.graph if any(v.name == name for v in n.outputs))
    node.attributes.clear()
    node.attributes.add(ir.AttrTensor("value", tensor))
    node.outputs[0].const_value = tensor


def _content(node: ir.Node) -> np.ndarray | None:
    """The content of a Constant node. `const_array` would name the tensor, which copies share."""
    attribute = node.attributes.get("value")
    if attribute is None:
        return const_array(node.outputs[0])
    return None if attribute.is_ref() else attribute.as_tensor().numpy()


def _is_weight(value: ir.Value, array: np.ndarray) -> bool:
    if array.ndim == 0 or array.size < 2:
        return False
    for reader, index in readers(value):
        if index in _OPERANDS.get(reader.op_type, ()):
            return True
        if reader.op_type in _TERMS and array.size > FEW:
            return True
    return False


def starts_recurrence(value: ir.Value) -> bool:
    """Whether a value is read as the first state of LSTM, GRU or RNN alone: zeros, not learned."""
    as_state = [n.op_type in ("LSTM", "GRU", "RNN") and i in (5, 6) for n, i in readers(value)]
    return bool(as_state) and all(as_state)


def readers(value: ir.Value, depth: int = 4) -> Iterator[tuple[ir.Node, int]]:
    """The standard operators that read the value, through views of it, and at which input."""
    for node, index in value.uses():
        if node.domain:
            continue
        if node.op_type in _VIEWS and index == 0 and depth:
            yield from readers(node.outputs[0], depth - 1)
        else:
            yield node, index

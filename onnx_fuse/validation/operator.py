"""A model of one operator, and of its body, to compare the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import UsageError, did_you_mean
from onnx_fuse.importer.save import inline, save
from onnx_fuse.ir.constants import CANONICAL_OPSET, FUSE
from onnx_fuse.ops import OPS
from onnx_fuse.ops.bodies import body_of
from onnx_fuse.runtime import ort

_SHAPE = (2, 8)


def operator_files(
    name: str, shapes: Mapping[str, Sequence[int]], folder: Path, *, trains: bool = False
) -> tuple[Path, Path]:
    """Write two models into `folder`: one node of an operator, and the nodes of its body.

    Args:
        name: The operator, as "LayerNormGemm" for one of ours, or as "domain::Name".
        shapes: The shapes of its inputs, by the names in its body; the default is [2, 8]. All
            inputs are float32.
        folder: Where the files are written.
        trains: Whether every input is a weight, and the first one besides a factor on an input, so
            that a gradient check reaches all of them.

    Raises:
        UsageError: There is no such operator with a body, or it has no such input.
    """
    domain, _, op_type = name.rpartition("::")
    domain = domain or FUSE
    body = body_of(op_type, domain)
    if body is None:
        meant = did_you_mean(op_type, (op for of, op in OPS if of == domain))
        raise UsageError(
            f"there is no operator '{name}' with a body{meant}: give it as domain::Name"
        )
    function = body((), CANONICAL_OPSET, "")
    names = [str(v.name) for v in function.inputs]
    if unknown := [n for n in shapes if n not in names]:
        raise UsageError(f"'{name}' has no input {unknown[0]}: it has {', '.join(names)}")
    inputs = [
        ir.Value(
            name=n,
            type=ir.TensorType(ir.DataType.FLOAT),
            shape=ir.Shape([int(d) for d in shapes.get(n, _SHAPE)]),
        )
        for n in names
    ]
    outputs = [ir.Value(name=v.name) for v in function.outputs]
    node = ir.Node(domain, op_type, inputs, outputs=outputs, name=op_type)
    imports = {"": CANONICAL_OPSET, domain: 1}
    graph = ir.Graph(inputs, outputs, nodes=[node], opset_imports=imports, name=op_type)
    if trains:
        _make_weights(graph, node)
    model = ir.Model(graph, ir_version=10)
    flat = inline(model)
    if open_ := [n for n in names if n not in shapes]:
        try:
            ort.session(flat)
        except Exception as error:
            if not ort.is_fault(error):
                raise
            sizes = "x".join(map(str, _SHAPE))
            raise UsageError(
                f"'{name}' does not take {sizes} numbers as each of {', '.join(open_)}: give their "
                f"shapes, as in --input-shapes {' '.join(f'{n}:4,8' for n in names[:2])}"
            ) from error
    one_node, written = folder / f"{op_type}.onnx", folder / f"{op_type}.body.onnx"
    save(model, one_node)
    save(flat, written)
    return one_node, written


def _make_weights(graph: ir.Graph, node: ir.Node) -> None:
    """Turn the inputs into initializers, the first one into the product of one and an input."""
    rng = np.random.default_rng(0)
    first, *others = list(graph.inputs)
    factor = ir.Value(name=f"{first.name}.factor", type=first.type, shape=first.shape)
    product = ir.Node("", "Mul", [first, factor], num_outputs=1, name="factor")
    product.outputs[0].name = f"{first.name}.scaled"
    node.replace_input_with(0, product.outputs[0])
    graph.insert_before(node, product)
    for value in (factor, *others):
        assert value.shape is not None
        array = rng.uniform(0.5, 1.5, value.shape.numpy()).astype(np.float32)
        value.const_value = ir.tensor(array, name=value.name)
        if value is not factor:
            graph.inputs.remove(value)
        graph.register_initializer(value)

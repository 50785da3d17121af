"""The matrix multiplications that a weight has adapters beside, and where these are added."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TypeAlias, TypeVar

import onnx_ir as ir

from onnx_fuse import autodiff
from onnx_fuse.adapters import peft
from onnx_fuse.adapters.files import Adapter
from onnx_fuse.autodiff.emit import expand
from onnx_fuse.errors import ModelError, UsageError
from onnx_fuse.ir.build import Builder, required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import Names
from onnx_fuse.ops.rules import is_float, typed


def adaptable(model: ir.Model) -> dict[str, Adapter]:
    """The weights of a model that can have an adapter, each with the names that its own would have.

    Fused operators that read one are written out, in place.
    """
    matrices = {
        v: module_name(v)
        for v in model.graph.initializers.values()
        if is_float(v) and v.shape is not None and len(v.shape) == 2
    }
    write_out(model, matrices)
    found: dict[str, Adapter] = {}
    for value, module in matrices.items():
        with suppress(ModelError):
            transposed, name = products_of(value)[0][1], str(value.name)
            names = f"{name}.lora_a", f"{name}.lora_b"
            found[name] = Adapter(name, *names, 1.0, transposed, module)
    return found


Key = TypeVar("Key")


def matched(names: Mapping[Key, Iterable[str]], globs: Iterable[str]) -> dict[Key, None]:
    """The weights that globs name. Raises UsageError for a glob that matches no name of one."""
    found: dict[Key, None] = {}
    for glob in globs:
        named = [key for key, its in names.items() if any(fnmatchcase(n, glob) for n in its)]
        if not named:
            raise UsageError(f"'{glob}' matches no weight of the model that LoRA could adapt")
        found |= dict.fromkeys(named)
    return found


def write_out(model: ir.Model, weights: Collection[ir.Value]) -> None:
    """Write out the fused operators that read one of these weights; the passes fuse them again."""
    op = autodiff.Emitter(model)
    for node in {n for v in weights for n, _ in v.uses() if n.domain == FUSE}:
        expand(op, node)


Products: TypeAlias = list[tuple[ir.Node, bool]]


def products_of(weight: ir.Value) -> Products:
    """The products that read a weight, each with whether it reads the transpose.

    Raises ModelError for another reader.
    """
    products: Products = []
    todo = [(weight, False)]
    while todo:
        value, transposed = todo.pop()
        for node, index in value.uses():
            plain = not node.domain
            turned = plain and node.op_type == "Gemm" and bool(_int(node, "transB"))
            if plain and node.op_type in ("Identity", "Transpose"):
                todo.append((node.outputs[0], transposed ^ (node.op_type == "Transpose")))
            elif plain and index == 1 and node.op_type == "MatMul":
                products.append((node, transposed))
            elif plain and index == 1 and node.op_type == "Gemm" and not _int(node, "transA"):
                products.append((node, transposed ^ turned))
            else:
                raise ModelError(
                    f"'{weight.name}' is read by the {node.op_type} node '{node.name}', which is "
                    "no matrix multiplication of rows and this weight"
                )
    if len({turned for _, turned in products}) != 1:
        raise ModelError(f"'{weight.name}' is read as it is and transposed, or by no node")
    return products


def module_name(weight: ir.Value) -> str:
    try:
        return peft.module_of(str(weight.name), products_of(weight)[0][0])
    except ModelError:
        return ""


def _int(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return 0 if attribute is None else attribute.as_int()


LowRank: TypeAlias = Callable[[Builder, ir.Value, float], ir.Value]
"""Makes the low-rank product of rows, times a factor."""


def add_beside(graph: ir.Graph, weight: ir.Value, products: Products, low_rank: LowRank) -> None:
    """Add a low-rank product to each of the products that read a weight, in place."""
    for number, (node, _) in enumerate(products):
        op, home = Builder(), required(node.graph)
        x, (y,) = required(node.inputs[0]), node.outputs
        alpha = node.attributes.get("alpha")
        low = low_rank(op, x, 1.0 if alpha is None else alpha.as_float())
        low = typed(low, weight, y.shape)
        y = _biased_output(y)
        last, uses = required(y.producer()), list(y.uses())
        total = typed(op.Add(y, low), weight, y.shape)
        for user, index in uses:
            user.replace_input_with(index, total)
        for i, value in enumerate(home.outputs):
            if value is y:
                home.outputs[i] = total
        total.name, y.name = y.name, Names.of(graph).fresh(f"{y.name}.frozen")
        for i, new_node in enumerate(op.nodes):
            new_node.name = f"{weight.name}.lora.{number}.{i}"
        home.insert_after(last, op.nodes)


def _biased_output(y: ir.Value) -> ir.Value:
    """`y`, or its sum with the bias and the residual that nothing but they are added to."""
    uses = list(y.uses())
    if len(uses) != 1 or y.is_graph_output() or y.shape is None:
        return y
    ((node, index),) = uses
    if node.op_type != "Add" or node.domain:
        return y
    other, total = required(node.inputs[1 - index]), node.outputs[0]
    row = other.is_initializer() and other.shape is not None and len(other.shape) <= 1
    alike = total.shape == y.shape and (row or other.shape == y.shape)
    return _biased_output(total) if alike else y

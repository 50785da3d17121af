"""The table of contrib operators: their names, and the functions that write their bodies.

A body is standard ONNX, built by a function for the node at hand: a contrib operator's meaning
depends on which inputs are there, on attributes that are strings, and on ranks, none of which one
ONNX function could branch on. Whoever needs the body asks for it in the form that suits: `write`
emits its nodes, `function` makes an ONNX function of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_fuse.ir.build import Builder, detach, dim, given, rank

MICROSOFT = "com.microsoft"

Build: TypeAlias = "Callable[[Body, ir.Node], Sequence[ir.Value | None]]"
"""`build(op, node)` emits the body of `node` with `op`; it answers one value an output, None for an
output that nobody asked for. It may read attributes, types, ranks and known sizes of the node's
inputs. Raises Unwritable."""


class Unwritable(Exception):
    """Why this node has no body in standard ONNX."""


@dataclass(frozen=True)
class Contrib:
    """One contrib operator. `recognized`: rules may look into its body for something to fuse.

    `whole` says of which nodes onnxruntime's kernel is faster on a CPU than what fusion makes of
    the body: those are written out for kernels of ours alone. `lowered`: kernels of ours run such
    a node as it is, so that only training looks into it there.
    """

    name: str
    domain: str
    build: Build
    recognized: bool
    whole: Callable[[ir.Node], bool]
    lowered: Callable[[ir.Node], bool]


Results: TypeAlias = "Sequence[ir.Value | None]"
CONTRIB: dict[tuple[str, str], Contrib] = {}
"""Every contrib operator that has a body, by (domain, name)."""


def contrib(
    *names: str,
    domain: str = MICROSOFT,
    recognized: bool = True,
    whole: Callable[[ir.Node], bool] = lambda node: False,
    lowered: Callable[[ir.Node], bool] = lambda node: False,
) -> Callable[[Build], Build]:
    """Decorator: enter a `Build` into the table under `names`."""

    def enter(build: Build) -> Build:
        for name in names:
            CONTRIB[domain, name] = Contrib(name, domain, build, recognized, whole, lowered)
        return build

    return enter


def lookup(node: ir.Node) -> Contrib | None:
    """The table's entry for a node's operator."""
    return CONTRIB.get((node.domain, node.op_type))


# Operators whose results are of another type than their first operand.
_TYPED = {
    **dict.fromkeys(("Shape", "Size", "ArgMax", "ArgMin", "NonZero"), ir.DataType.INT64),
    **dict.fromkeys(
        (
            *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
            *("And", "Or", "Not", "IsNaN"),
        ),
        ir.DataType.BOOL,
    ),
}
# Operators whose results' types a body states where it needs them.
_UNTYPED = {
    *("Constant", "DynamicQuantizeLinear", "QuantizeLinear", "DequantizeLinear"),
    *("MatMulInteger", "ConvInteger"),
}


class Body(Builder):
    """A Builder that knows its results' element types, and what contrib bodies say often."""

    def node(self, op_type: str, inputs: Sequence[Any], **keywords: Any) -> Any:
        """Emit a node whose results have their element types."""
        results = super().node(op_type, inputs, **keywords)
        node = self.nodes[-1]
        dtype: ir.DataType | None = None
        if "to" in keywords:
            dtype = ir.DataType(keywords["to"])
        elif op_type == "ConstantOfShape":
            dtype = keywords["value"].dtype
        elif op_type not in _UNTYPED:
            source = node.inputs[1 if op_type in ("Where", "CastLike") else 0]
            dtype = _TYPED.get(op_type, None if source is None else source.dtype)
        if dtype is not None:
            for value in node.outputs:
                value.dtype = dtype
        return results

    def cast_like(self, x: ir.Value, like: ir.Value) -> ir.Value:
        """`x` in the element type of `like`."""
        if x.dtype is not None and x.dtype == like.dtype:
            return x
        typed = like.dtype is not None
        return self.Cast(x, to=like.dtype) if typed else self.CastLike(x, like)

    def number(self, value: float, like: ir.Value) -> ir.Value:
        """A scalar constant of the dtype of `like`, known or not."""
        if like.dtype is not None:
            return self.constant(np.array(value, like.dtype.numpy()))
        return self.cast_like(self.constant(np.array(value, np.float32)), like)

    def ints(self, *values: int) -> ir.Value:
        """A constant vector of int64 with these numbers."""
        return self.constant(np.array(values, np.int64))

    def like(self, op_type: str, node: ir.Node, inputs: Sequence[Any], names: str) -> Any:
        """A node with those of `node`'s attributes that are named."""
        return self.node(op_type, inputs, attributes={k: attr(node, k) for k in names.split()})

    def channels_first(self, x: ir.Value, size: int) -> ir.Value:
        """`x` [N, ..., C] of `size` axes as [N, C, ...]."""
        return self.Transpose(x, perm=[0, size - 1, *range(1, size - 1)])

    def channels_last(self, x: ir.Value, size: int) -> ir.Value:
        """`x` [N, C, ...] of `size` axes as [N, ..., C]."""
        return self.Transpose(x, perm=[0, *range(2, size), 1])

    def size(self, x: ir.Value, axis: int) -> ir.Value:
        """The extent of an axis (not negative) as a vector of one int64."""
        extent = dim(x, axis)
        if extent is not None:
            return self.ints(extent)
        return self.Shape(x, start=axis, end=axis + 1)

    def shape(self, *sizes: int | ir.Value) -> ir.Value:
        """A shape vector of numbers and of vectors."""
        if all(isinstance(s, int) for s in sizes):
            return self.ints(*(s for s in sizes if isinstance(s, int)))
        return self.Concat(*(self.ints(s) if isinstance(s, int) else s for s in sizes), axis=0)


CONV = "auto_pad dilations group kernel_shape pads strides"
"""Attributes of a convolution."""


# ---- what a body asks of its node ------------------------------------------------------------


def needed(node: ir.Node, i: int) -> ir.Value:
    """Input `i`, which the operator requires. Raises Unwritable."""
    value = given(node, i)
    if value is None:
        raise Unwritable(f"its input {i} is missing")
    return value


def wants(node: ir.Node, i: int) -> bool:
    """Whether anybody reads output `i`; of a node in no graph, whether it has that output."""
    if i >= len(node.outputs) or node.outputs[i].name == "":
        return False
    value = node.outputs[i]
    return node.graph is None or value.is_graph_output() or bool(value.uses())


def attr(node: ir.Node, name: str, default: Any = None) -> Any:
    """An attribute's value; the default where it is absent."""
    declared = node.attributes.get(name)
    if declared is None:
        return default
    if declared.is_ref():
        raise Unwritable(f"its attribute '{name}' refers to one of a function")
    return declared.value


def count(node: ir.Node, name: str, default: int = 0) -> int:
    """An attribute that counts something, such as heads. Raises Unwritable where it counts none."""
    number = attr(node, name, default)
    if not isinstance(number, int) or number < 1:
        raise Unwritable(f"its attribute '{name}' is missing, or is no positive number")
    return number


def known_ints(value: ir.Value | None) -> tuple[int, ...] | None:
    """The few integers of a constant; those of an initializer that is an input may change."""
    if value is None or (value.is_initializer() and value.is_graph_input()):
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > 64 or not tensor.dtype.is_integer():
        return None
    return tuple(int(i) for i in tensor.numpy().flat)


def known_rank(value: ir.Value, subject: str) -> int:
    """The rank of a value. Raises Unwritable where it is not known."""
    size = rank(value)
    if size is None:
        raise Unwritable(f"the rank of {subject} is not known")
    return size


# ---- a body in its two forms -----------------------------------------------------------------


def write(node: ir.Node) -> tuple[list[ir.Node], list[ir.Value | None]]:
    """The nodes of a contrib node's body over its own inputs, and a value for each output.

    Raises Unwritable where this node has none.
    """
    entry = lookup(node)
    if entry is None:
        raise Unwritable("it has no body in standard ONNX")
    op = Body()
    results = list(entry.build(op, node))[: len(node.outputs)]
    results += [None] * (len(node.outputs) - len(results))
    for i, value in enumerate(results):
        if not wants(node, i):
            results[i] = value = None
        elif value is None:
            raise Unwritable(f"its output {i} has no form in standard ONNX")
        # a result must be a node's: an output that is an input is a copy of it
        if value is not None and (value.producer() not in op.nodes or value in results[:i]):
            results[i] = op.Identity(value)
    return _needed_nodes(op.nodes, results), results


def _needed_nodes(nodes: Sequence[ir.Node], results: Sequence[ir.Value | None]) -> list[ir.Node]:
    """The nodes that the results depend on; the others are cut off from their inputs."""
    wanted, used = {v for v in results if v is not None}, []
    for node in reversed(nodes):
        if any(v in wanted for v in node.outputs):
            wanted.update(v for v in node.inputs if v is not None)
            used.append(node)
        else:
            detach([node])
    return used[::-1]


def is_writable(node: ir.Node, opsets: Mapping[str, int]) -> bool:
    """Whether a contrib node has a body in standard ONNX."""
    try:
        function(node, opsets, "")
    except Unwritable:
        return False
    return True


def function(node: ir.Node, opsets: Mapping[str, int], overload: str = "") -> ir.Function:
    """The body as an ONNX function of the node's operator name, without attributes.

    It holds for nodes with the same attributes, types and shapes alone, see `signature`.
    Raises Unwritable.
    """
    formals = [
        ir.Value(
            name=f"in{i}",
            type=None if v is None else v.type,
            shape=None if v is None else v.shape,
            const_value=None
            if v is None or known_ints(v) is None
            else ir.convenience.get_const_tensor(v),
        )
        for i, v in enumerate(node.inputs)
    ]
    names = [f"out{i}" if wants(node, i) else "" for i in range(len(node.outputs))]
    call = ir.Node(
        node.domain,
        node.op_type,
        [None if v is None else f for v, f in zip(node.inputs, formals, strict=True)],
        [a for a in node.attributes.values() if not a.is_ref()],
        outputs=[ir.Value(name=name) for name in names],
    )
    nodes, results = write(call)
    detach([call])
    for formal in formals:
        formal.const_value = None
    for i, inner in enumerate(nodes):
        for k, value in enumerate(inner.outputs):
            value.name = f"v{i}_{k}"
    op = Body()
    outputs = [v if v is not None else op.ints() for v in results]
    for i, value in enumerate(outputs):
        value.name = value.name or f"none{i}"
    graph = ir.Graph(
        formals,
        outputs,
        nodes=[*nodes, *op.nodes],
        opset_imports={"": opsets.get("", 1)},
        name=node.op_type,
    )
    return ir.Function(node.domain, node.op_type, overload, graph=graph, attributes=[])


def signature(node: ir.Node) -> Any:
    """A key, equal for nodes of one operator with the same body; None where that is unknown."""
    attributes = []
    for name, attribute in sorted(node.attributes.items()):
        value = None if attribute.is_ref() else attribute.value
        if isinstance(value, list | tuple):
            value = tuple(value)
        elif not isinstance(value, str | int | float):
            return None
        attributes.append((name, value))
    symbols: dict[str, int] = {}  # a number for each, so that the symbols' names do not matter

    def size(d: int | ir.SymbolicDim) -> Any:
        if isinstance(d, int):
            return d
        return None if d.value is None else ("symbol", symbols.setdefault(d.value, len(symbols)))

    inputs = tuple(
        None
        if v is None
        else (v.dtype, known_ints(v), None if v.shape is None else tuple(map(size, v.shape)))
        for v in node.inputs
    )
    outputs = tuple(wants(node, i) for i in range(len(node.outputs)))
    return node.op_identifier(), tuple(attributes), inputs, outputs

"""The table of contrib operators: their names, and the functions that write their bodies.

A body is standard ONNX, built by a function for the node at hand: a contrib operator's meaning
depends on which inputs are there, on attributes that are strings, and on ranks, none of which one
ONNX function could branch on. Whoever needs the body asks for it in the form that suits: `write`
emits its nodes, `function` makes an ONNX function of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import onnx_ir as ir

from onnx_fuse.importer.types import element_type
from onnx_fuse.ir.build import Builder, detach, given, needed_nodes, rank
from onnx_fuse.ir.constants import CANONICAL_OPSET
from onnx_fuse.ops.shape_ops import Writer

MICROSOFT = "com.microsoft"

Input: TypeAlias = "ir.Value | None"
"""An input that may be absent."""
Results: TypeAlias = "ir.Value | Sequence[ir.Value | None] | None"
"""One value an output, None for one that nobody asked for; a value by itself is the only output."""
T = TypeVar("T")
Build = TypeVar("Build", bound="Callable[..., Results]")
"""`build(op, x, ...)` emits the body of the node `op.call` with `op`. The parameters after `op` are
the node's first inputs, of type `Input` where they may be absent. It may read attributes, types,
ranks and known sizes of the node's inputs. Raises Unwritable."""


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
    build: Callable[[Body], Sequence[ir.Value | None]]
    recognized: bool
    whole: Callable[[ir.Node], bool]
    lowered: Callable[[ir.Node], bool]


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
        _, *inputs = inspect.signature(build).parameters.values()

        def results(op: Body) -> Sequence[ir.Value | None]:
            operands = [
                op.given(i) if formal.annotation == "Input" else op.needed(i)
                for i, formal in enumerate(inputs)
            ]
            answer = build(op, *operands)
            return answer if isinstance(answer, Sequence) else [answer]

        for name in names:
            CONTRIB[domain, name] = Contrib(name, domain, results, recognized, whole, lowered)
        return build

    return enter


def lookup(node: ir.Node) -> Contrib | None:
    """The table's entry for a node's operator."""
    return CONTRIB.get((node.domain, node.op_type))


class Body(Writer):
    """A builder of the body of the node `call`, which knows its results' element types."""

    def __init__(self, call: ir.Node) -> None:
        super().__init__()
        self.call = call

    def node(self, op_type: str, inputs: Sequence[Any], **keywords: Any) -> Any:
        """Emit a node whose results have their element types."""
        results, node = super().node(op_type, inputs, **keywords), self.nodes[-1]
        known = keywords.get("value") if op_type == "ConstantOfShape" else None
        for i, value in enumerate(node.outputs):
            if "to" in node.attributes:
                value.dtype = ir.DataType(node.attributes["to"].as_int())
            elif dtype := element_type(node, i, CANONICAL_OPSET) if known is None else known.dtype:
                value.dtype = dtype
        return results

    def number(self, value: float, like: ir.Value) -> ir.Value:
        """A scalar constant of the dtype of `like`, known or not."""
        if like.dtype is not None:
            return self.constant(np.array(value, like.dtype.numpy()))
        return self.to_like(self.constant(np.array(value, np.float32)), like)

    def plus(self, x: ir.Value, y: ir.Value | None) -> ir.Value:
        """x + y; x where there is no y."""
        return x if y is None else self.Add(x, y)

    def like(self, op_type: str, inputs: Sequence[Any], names: str, **attributes: object) -> Any:
        """A node with those of the call's attributes that are named."""
        taken = {name: self.attr(name) for name in names.split()}
        return self.node(op_type, inputs, attributes={**taken, **attributes})

    def channels_first(self, x: ir.Value, size: int) -> ir.Value:
        """`x` [N, ..., C] of `size` axes as [N, C, ...]."""
        return self.Transpose(x, perm=[0, size - 1, *range(1, size - 1)])

    def channels_last(self, x: ir.Value, size: int) -> ir.Value:
        """`x` [N, C, ...] of `size` axes as [N, ..., C]."""
        return self.Transpose(x, perm=[0, *range(2, size), 1])

    def given(self, i: int) -> ir.Value | None:
        """Input `i` of the call, None where it is absent."""
        return given(self.call, i)

    def needed(self, i: int) -> ir.Value:
        """Input `i`, which the operator requires. Raises Unwritable."""
        value = given(self.call, i)
        if value is None:
            raise Unwritable(f"its input {i} is missing")
        return value

    def wants(self, i: int) -> bool:
        """Whether anybody reads output `i`."""
        return wants(self.call, i)

    def attr(self, name: str, default: object = None) -> Any:
        """An attribute's value; the default where it is absent."""
        declared = self.call.attributes.get(name)
        if declared is None:
            return default
        if declared.is_ref():
            raise Unwritable(f"its attribute '{name}' refers to one of a function")
        return declared.value

    def count(self, name: str, default: int = 0) -> int:
        """An attribute that counts something, such as heads. Raises Unwritable where it doesn't."""
        number = self.attr(name, default)
        if not isinstance(number, int) or number < 1:
            raise Unwritable(f"its attribute '{name}' is missing, or is no positive number")
        return number


CONV = "auto_pad dilations group kernel_shape pads strides"
"""Attributes of a convolution."""


# ---- what a body asks of its node ------------------------------------------------------------


def wants(node: ir.Node, i: int) -> bool:
    """Whether anybody reads output `i`; of a node in no graph, whether it has that output."""
    if i >= len(node.outputs) or node.outputs[i].name == "":
        return False
    value = node.outputs[i]
    return node.graph is None or value.is_graph_output() or bool(value.uses())


def known_ints(value: ir.Value | None) -> tuple[int, ...] | None:
    """The few integers of a constant; those of an initializer that is an input may change."""
    if value is None or (value.is_initializer() and value.is_graph_input()):
        return None
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size > 64 or not tensor.dtype.is_integer():
        return None
    return tuple(int(i) for i in tensor.numpy().flat)


def known(fact: T | None, subject: str) -> T:
    """What a body depends on, such as a size. Raises Unwritable where it is not known."""
    if fact is None:
        raise Unwritable(f"{subject} is not known")
    return fact


def known_rank(value: ir.Value, subject: str) -> int:
    """The rank of a value. Raises Unwritable where it is not known."""
    return known(rank(value), f"the rank of {subject}")


# ---- a body in its two forms -----------------------------------------------------------------


def write(node: ir.Node) -> tuple[list[ir.Node], list[ir.Value | None]]:
    """The nodes of a contrib node's body over its own inputs, and a value for each output.

    Raises Unwritable where this node has none.
    """
    entry = lookup(node)
    if entry is None:
        raise Unwritable("it has no body in standard ONNX")
    op = Body(node)
    results = list(entry.build(op))[: len(node.outputs)]
    results += [None] * (len(node.outputs) - len(results))
    for i, value in enumerate(results):
        if not wants(node, i):
            results[i] = value = None
        elif value is None:
            raise Unwritable(f"its output {i} has no form in standard ONNX")
        # a result must be a node's: an output that is an input is a copy of it
        if value is not None and (value.producer() not in op.nodes or value in results[:i]):
            results[i] = op.Identity(value)
    return needed_nodes(op.nodes, results), results


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
    op = Builder()
    outputs = [v if v is not None else op.constant([]) for v in results]
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

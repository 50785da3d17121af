"""The definition of an operator: its body, its gradient, and what that reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir

from onnx_fuse.ir.build import required
from onnx_fuse.ir.constants import BODIES, CANONICAL_OPSET, FUSE, base_name
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.activations import signature
from onnx_fuse.ops.formula import written_out
from onnx_fuse.ops.shape_ops import Tensor, Values, Writer, arguments

GradRule: TypeAlias = Callable[[Writer, ir.Node, Values], Values]
"""`grad(op, node, dys)` emits the gradient of each input of `node` with `op` and returns them in
input order, None where an input has none. `dys` holds d loss / d output, None where an output does
not reach the loss. A rule may answer in the broadcast shape: the walker in `autodiff` sums it."""
Unary: TypeAlias = Callable[[Writer, Tensor, Tensor, Tensor, ir.Node], Tensor]
"""`rule(op, dy, x, y, node)` gives dx."""


@dataclass(frozen=True)
class NoGrad:
    """The gradient of an operator through which none flows."""

    reason: str
    """Why none flows, as the end of a sentence about the operator."""


@dataclass(frozen=True)
class OpDef:
    """All that the project knows about one operator."""

    name: str
    """The op_type, without the names of exposed values."""
    domain: str = ""
    """The operator's domain; "" is ai.onnx."""
    body: str = ""
    """For a fused operator, the text of one ONNX function without imports, in which calls may stand
    within calls (`ops.formula`). Attributes are by reference, and a call binds every input."""
    newer: str = ""
    """The same function by an operator of a later opset, which a node asks for with the overload
    "newer". It is for graphs that had that operator; onnxruntime runs it in fewer passes."""
    grad: GradRule | NoGrad | None = None
    """The gradient; None differentiates the body."""
    saves: tuple[str, ...] = ()
    """Values inside the body that the gradient reads. In a training graph the node becomes
    `op_type(saves)`, which is the same body with these as further outputs."""

    def op_type(self, exposed: Sequence[str] = ()) -> str:
        """The name of the operator whose body also returns the inner values `exposed`, in order."""
        return str(FusedName.of(self.name).exposing(*exposed))

    def function(
        self, exposed: Sequence[str] = (), opset: int = CANONICAL_OPSET, overload: str = ""
    ) -> ir.Function:
        """The body as an ONNX function in `opset`; `exposed` inner values become further outputs.

        The `overload` "newer" is the function of `newer`.
        """
        # a file may put the overload on any op of ours; inner values are the first body's alone
        newer = self.newer if overload == "newer" and not exposed else ""
        proto = onnx.parser.parse_function(
            f'<opset_import: ["" : {opset}], domain: "{self.domain}">\n'
            f"{written_out(newer or self.body)}"
        )
        proto.name, proto.overload = self.op_type(exposed), overload
        proto.output.extend(exposed)
        _prune(proto)
        return ir.serde.deserialize_function(proto)


def fused_op(
    name: str, attributes: Sequence[str], inputs: str, outputs: str, text: str, **more: Any
) -> OpDef:
    """The operator of ours whose body's lines are `text`, and `newer` among `more` (see OpDef)."""
    head = f"{name} {signature(*attributes)}({inputs}) => ({outputs})"
    if "newer" in more:
        more["newer"] = f"{head} {{\n{more['newer']}\n}}"
    return OpDef(name, FUSE, f"{head} {{\n{text}\n}}", **more)


def _prune(proto: onnx.FunctionProto) -> None:
    """Drop nodes that the outputs do not need, which onnxruntime would otherwise compute."""
    wanted, live = set(proto.output), []
    for node in reversed(proto.node):
        if not wanted.intersection(node.output):
            continue
        while len(node.output) > 1 and node.output[-1] not in wanted:
            del node.output[-1]
        wanted.update(node.input)
        live.append(node)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(live)]
    del proto.node[:]
    proto.node.extend(nodes)


OPS: dict[tuple[str, str], OpDef] = {}
"""Every known operator by (domain, name)."""


def register(*defs: OpDef) -> None:
    """Enter operators into `OPS`; each key may be entered once."""
    for definition in defs:
        key = (definition.domain, definition.name)
        if key in OPS:
            raise ValueError(f"operator {key} is defined twice")
        OPS[key] = definition
        if definition.body:
            BODIES[definition.domain, definition.name] = definition.function


def lookup(node: ir.Node) -> tuple[OpDef | None, tuple[str, ...]]:
    """The definition of a node's operator and the inner values its op_type exposes."""
    exposed = FusedName.of(node.op_type).exposed if node.domain == FUSE else ()
    return OPS.get((node.domain, base_name(node))), exposed


def unary(rule: Unary) -> GradRule:
    """A rule for the first input alone, from the first output's gradient."""

    def grad(op: Writer, node: ir.Node, dys: Values) -> Values:
        (dy, *_), x = dys, required(node.inputs[0])
        return [None if dy is None else rule(op, dy, x, node.outputs[0], node)]

    return grad


def formulas(*texts: str | None) -> GradRule:
    """A rule whose formulas (`ops.formula`) give the gradients of the first inputs, in order.

    None is for an input without one. `x`, `z` or `a` is the first input, `b` the second, `y` the
    output and `dy` its gradient.
    """

    def grad(op: Writer, node: ir.Node, dys: Values) -> Values:
        a, b = arguments(node, 2)
        names = {"x": a, "z": a, "a": a, "b": b, "y": node.outputs[0], "dy": dys[0]}
        return [op.formula(text, node, **names) if text else None for text in texts]

    return grad


def table(rules: Mapping[str, Unary | str]) -> None:
    """Register ops of one differentiable input; a rule may be a formula, see `formulas`."""
    for name, rule in rules.items():
        grad = formulas(rule) if isinstance(rule, str) else unary(rule)
        register(OpDef(name, grad=grad))


def no_grad(reason: str, *names: str) -> None:
    """Register ops through which no gradient flows."""
    register(*(OpDef(name, grad=NoGrad(reason)) for name in names))

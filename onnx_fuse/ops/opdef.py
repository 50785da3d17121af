"""OpDef: all that the project knows about one operator, in one block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from onnx_fuse.onnx.build import Builder
from onnx_fuse.onnx.common import BODIES, CANONICAL_OPSET, FUSE, base_name
from onnx_fuse.onnx.names import FusedName

GradRule = Callable[[Builder, ir.Node, Sequence["ir.Value | None"]], Sequence["ir.Value | None"]]
"""`grad(op, node, dys)` emits the gradient of each input of `node` with `op` and returns them in
input order, None where an input has none. `dys` holds d loss / d output, None where an output does
not reach the loss. A rule may answer in the broadcast shape: the walker in `autodiff` sums it."""


@dataclass(frozen=True)
class NoGrad:
    """An operator through which no gradient flows, and why."""

    reason: str


@dataclass(frozen=True)
class OpDef:
    """One operator: its name and, for ours, its ONNX function body; its gradient.

    `body` is the text of one ONNX function without header imports. Attributes are by reference and
    every input is bound at a call. `saves` names values inside the body that the gradient wants:
    in a training graph the node becomes `op_type(saves)`, the same body with more outputs.
    `newer` is the same function by an operator of a later opset, which a node asks for with the
    overload "newer": for graphs that had that operator, which onnxruntime runs in fewer passes.
    """

    name: str
    domain: str = ""
    body: str = ""
    newer: str = ""
    grad: GradRule | NoGrad | None = None
    saves: tuple[str, ...] = ()

    def op_type(self, exposed: Sequence[str] = ()) -> str:
        """Name of the op whose body also returns the inner values `exposed`, in that order."""
        return str(FusedName.of(self.name).exposing(*exposed))

    def function(
        self, exposed: Sequence[str] = (), opset: int = CANONICAL_OPSET, overload: str = ""
    ) -> ir.Function:
        """The body as an ONNX function; `exposed` inner values become further outputs."""
        # a file may put the overload on any op of ours; inner values are the first body's alone
        newer = self.newer if overload == "newer" and not exposed else ""
        proto = onnx.parser.parse_function(
            f'<opset_import: ["" : {opset}], domain: "{self.domain}">\n{newer or self.body}'
        )
        proto.name, proto.overload = self.op_type(exposed), overload
        proto.output.extend(exposed)
        _prune(proto)
        return ir.serde.deserialize_function(proto)


def _prune(proto: onnx.FunctionProto) -> None:
    """Drop what the outputs do not need: onnxruntime would compute it, or skip its own fusions."""
    wanted, kept = set(proto.output), []
    for node in reversed(proto.node):
        if not wanted.intersection(node.output):
            continue
        while len(node.output) > 1 and node.output[-1] not in wanted:
            del node.output[-1]
        wanted.update(node.input)
        kept.append(node)
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(kept)]
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
            BODIES[definition.name] = definition.function


def lookup(node: ir.Node) -> tuple[OpDef | None, tuple[str, ...]]:
    """The definition of a node's operator and the inner values its op_type exposes."""
    exposed = FusedName.of(node.op_type).exposed if node.domain == FUSE else ()
    return OPS.get((node.domain, base_name(node))), exposed

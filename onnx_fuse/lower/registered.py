"""Nodes of operators that a user has registered, for which there is a kernel."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.lower.context import Context
from onnx_fuse.ops import OPS
from onnx_fuse.program.problems import Registered


def registered(ctx: Context, node: ir.Node) -> None:
    """One call, whose operands have the names of the body's inputs and outputs."""
    function = OPS[node.domain, node.op_type].function()
    reads = {
        str(formal.name): ctx.dense(node, i)
        for i, formal in enumerate(function.inputs)
        if ctx.has(node, i)
    }
    writes = {str(formal.name): ctx.output(node, i) for i, formal in enumerate(function.outputs)}
    ends = [tuple((k, t.dtype, t.shape) for k, t in part.items()) for part in (reads, writes)]
    attributes = {k: a.value for k, a in function.attributes.items() if a.value is not None}
    attributes |= {name: attribute.value for name, attribute in node.attributes.items()}
    pairs = [(k, tuple(v) if isinstance(v, list) else v) for k, v in sorted(attributes.items())]
    problem = Registered(f"{node.domain}::{node.op_type}", ends[0], ends[1], tuple(pairs))
    ctx.select(node, problem, reads, writes)

"""The gradient rule of every attention operator, and their registration."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnx_fuse.ir.build import required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ir.names import FusedName
from onnx_fuse.ops.fused.sdpa.kinds import KINDS, attention_body, body, grad_body
from onnx_fuse.ops.opdef import OpDef, register
from onnx_fuse.ops.shape_ops import Writer


def gradient(
    op: Writer, node: ir.Node, dys: Sequence[ir.Value | None]
) -> Sequence[ir.Value | None]:
    """The fused backward. The gradients of added masks come from a second node, which goes with
    the dead code where nobody asks for them.
    """
    kind = KINDS[FusedName.of(node.op_type).kind]
    dy, (y, lse), masks = dys[0], node.outputs, node.inputs[3:]
    q, k, v = map(required, node.inputs[:3])
    lse.dtype = ir.DataType.FLOAT
    # batches and heads may be broadcast: the walker sums what the backward gives for all of them
    lead = None if y.shape is None or q.shape is None else [*y.shape[:2]]
    if lead is not None and q.shape is not None:
        lse.shape = ir.Shape([*lead, q.shape[2], 2])
    inputs = [dy, y, lse, q, k, v, *masks]
    name = f"{kind.name}Grad"
    dq, dk, dv = op.node(name, inputs, outputs=3, domain=FUSE, attributes=node.attributes)
    for d, x in ((dq, q), (dk, k), (dv, v)):
        d.dtype, d.shape = x.dtype, None
        if lead is not None and x.shape is not None:
            leading = [lead[0], x.shape[1]] if kind.grouped else lead
            d.shape = ir.Shape([*leading, *x.shape[2:]])
    answers: dict[str, ir.Value] = {}
    if kind.added:
        results = op.node(
            f"{kind.name}GradMasks", inputs, outputs=len(kind.added), domain=FUSE,
            attributes=node.attributes,
        )  # fmt: skip
        for i, result in zip(
            kind.added, results if isinstance(results, tuple) else (results,), strict=True
        ):
            result.dtype = q.dtype
            # a mask may broadcast the logits of one key: v has as many keys as the weights
            if kind.packed:
                places = required(node.inputs[4]).shape
                if lead is not None and places is not None:
                    result.shape = ir.Shape([places[0], lead[1], places[1], places[1]])
            elif lead is not None and q.shape and v is not None and v.shape is not None:
                result.shape = ir.Shape([*lead, q.shape[2], v.shape[2]])
            answers[f"mask{i}"] = result
    return [dq, dk, dv, *(answers.get(name) for name in kind.inputs[3:])]


for _kind in KINDS.values():
    register(
        OpDef(
            _kind.name,
            FUSE,
            body=body(_kind),
            newer=attention_body(_kind),
            saves=("lse",),
            grad=gradient,
        ),
        OpDef(f"{_kind.name}Grad", FUSE, body=grad_body(_kind)),
    )
    if _kind.added:
        register(OpDef(f"{_kind.name}GradMasks", FUSE, body=grad_body(_kind, masks=True)))

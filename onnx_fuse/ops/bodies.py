"""The bodies of fused operators, and of operators that a user has registered."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.ir.constants import BODIES, FUSE, Body
from onnx_fuse.ir.names import FusedName


def body_of(op_type: str, domain: str = FUSE) -> Body | None:
    """The body of `LayerNormGemm`, or of `LayerNormGemm_mean_rstd`; None for no operator of ours.

    The operators register themselves in `BODIES` when they are imported, which is here, when a
    model first has a node in this project's domain.
    """
    if domain != FUSE:
        return BODIES.get((domain, op_type))
    from onnx_fuse.ops import fused  # noqa: F401

    return BODIES.get((FUSE, FusedName.of(op_type).base))


def carries_body(node: ir.Node) -> bool:
    """Whether a node is a fused operator, or one that a user has registered with a body."""
    return node.domain == FUSE or (node.domain, node.op_type) in BODIES

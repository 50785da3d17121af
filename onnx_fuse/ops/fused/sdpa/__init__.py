"""Scaled dot-product attention: operators (`kinds`), their gradient, and recognition.

`scores` takes a softmax's input apart, `frame` brings operands to four axes, `rule` puts both
together, `node` reads the standard's own Attention.
"""

from __future__ import annotations

from onnx_fuse.ops.fused.sdpa import grad as grad
from onnx_fuse.ops.fused.sdpa.kinds import KINDS as KINDS
from onnx_fuse.ops.fused.sdpa.node import fuse_node
from onnx_fuse.ops.fused.sdpa.rule import fuse
from onnx_fuse.ops.rules import Rule

RULES = (
    Rule("Sdpa", 1, ("Softmax",), fuse, conditions="readers weights types ranks sizes body"),
    Rule("Sdpa", 1, ("Attention",), fuse_node, conditions="ranks sizes"),
)

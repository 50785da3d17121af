"""Names of weights."""

from __future__ import annotations

import onnx_ir as ir

from onnx_fuse.rewrite import packed_weights


def model_names(value: ir.Value) -> list[str]:
    """The model's own names of what a (packed) initializer holds."""
    return [part.name for part in packed_weights.parts(value)[1]]


def literal(name: str) -> str:
    """A glob that matches this name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)

"""The fused operators: a module a family, each with bodies, recognition and gradient together."""

from __future__ import annotations

from onnx_fuse.ops.fused import (
    activations,
    caches,  # noqa: F401  (rewrite.caches makes its operators, no rule)
    conv,
    float8,  # noqa: F401  (a precision of training asks for it, no rule)
    gated,
    gather_pushdown,
    gemm,
    groupnorm,
    kept,  # noqa: F401  (lowering and generation ask for its operators, no rule)
    layerscale,
    linear_cross_entropy,
    loss,
    norm,
    pointwise_conv,
    sdpa,
    transpose_sinking,
    window_gradients,  # noqa: F401  (its operators have no rules)
)
from onnx_fuse.ops.rules import Rule

RULES: tuple[Rule, ...] = (
    *activations.RULES,
    *transpose_sinking.RULES,
    *norm.CANONICAL,
    *gather_pushdown.RULES,
    *layerscale.RULES,
    *groupnorm.RULES,
    *pointwise_conv.RULES,
    *conv.RULES,
    *loss.RULES,
    linear_cross_entropy.RULE,
    *sdpa.RULES,
    gemm.FUSE_GEMM,
    gated.RULE,
    gemm.MERGE,
    gemm.KEEP,
    norm.SKIP,
    gemm.FOLD_AFFINE,
)
"""All rewrite rules in the order they run: canonical forms first, and what a Gemm takes over before
what is left to a residual add."""

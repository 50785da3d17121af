"""The table of lowerings: which function serves an operator."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from onnx_fuse.lower.context import Lowering

# Modules of this folder whose LOWERINGS table serves operators: see `context`.
FAMILIES: tuple[str, ...] = (
    *("elementwise", "views", "indexing", "random", "linear", "gated", "leaf_norm"),
    *("reduce", "norm", "softmax", "conv", "conv_grad", "pool", "scan", "recurrent", "loss"),
    *("sdpa", "cached_attention", "regions", "linalg", "text", "quant", "matmul_nbits"),
    *("gemm_integer", "linear_cross_entropy", "collective", "float8"),
)


@cache
def lowerings() -> dict[tuple[str, str], Lowering]:
    """(domain, operator) -> its lowering, of all families."""
    table: dict[tuple[str, str], Lowering] = {}
    for family in FAMILIES:
        table.update(import_module(f"onnx_fuse.lower.{family}").LOWERINGS)
    return table

"""Positions of the flags of a bool [length] that are set, in two operators for two stages.

KeptCounts (keep) -> first, int64 [tiles + 1]: the set flags before each tile of 4096, and all.
KeptPositions (keep, first, count) -> position, int64 [count]: theirs, where count is the last of
`first`, whose value decides about the size. NonZero and its relatives are lowered to them.

ArgMaxFinite (x) -> position: ArgMax along the last axis, as of a next token's logits, but -1 where
one of them is NaN or inf, or none is finite.
"""

from __future__ import annotations

from onnx_fuse.ops.opdef import NoGrad, fused_op, register
from onnx_fuse.program.problem import KEPT_TILE

_COUNTS = f"""
    zero = [0]
    axis = Constant <value_int: int = 0> ()
    running = CumSum (Cast <to: int = 7> (keep), axis)
    before = Concat <axis: int = 0> (zero, running)
    all = Slice (before, [-1], [{2**63 - 1}], zero)
    tiles = Slice (before, zero, [-1], zero, [{KEPT_TILE}])
    first = Concat <axis: int = 0> (tiles, all)
"""
_POSITIONS = """
    axes = [0]
    position = Squeeze (NonZero (keep), axes)
"""
_FINITE = """
    last = [-1]
    weight = ReduceLogSumExp <keepdims: int = @keepdims> (x, last)
    none = Constant <value_int: int = -1> ()
    most = ArgMax <axis: int = -1, keepdims: int = @keepdims> (x)
    position = Where (weight - weight == 0, most, none)
"""
_WHY = NoGrad("it gives positions")

register(
    fused_op("ArgMaxFinite", ["keepdims: int = 1"], "x", "position", _FINITE, grad=_WHY),
    fused_op("KeptCounts", [], "keep", "first", _COUNTS, grad=_WHY),
    fused_op("KeptPositions", [], "keep, first, count", "position", _POSITIONS, grad=_WHY),
)

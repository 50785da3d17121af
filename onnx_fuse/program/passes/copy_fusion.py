"""Copies of runs of elements, as those of a Concat, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

from onnx_fuse.program.call import Call, Tensor
from onnx_fuse.program.data_movement import CopyMany, Piece
from onnx_fuse.program.passes.callgraph import nodes_of
from onnx_fuse.program.problem import ITEMSIZE

MOST = 2 << 20
"""Bytes of a copy that may wait for others, where its size is no open one: what it reads must be
kept that long."""
TABLE = 256
"""Copies that one launch makes."""


def copied(call: Call) -> Tensor | None:
    """The tensor that a call copies as it is, None where the call does anything else."""
    expression = call.expression
    if expression is None or expression.steps or expression.rows or expression.scalars:
        return None
    if len(call.reads) != 1 or len(call.writes) != 1:
        return None
    (_, x), (_, y) = call.reads[0], call.writes[0]
    return x if x.dtype == y.dtype else None


def piece_of(call: Call) -> Piece | None:
    """What a call copies; None for a call that does anything else, or has too many dimensions."""
    x, (_, y) = copied(call), call.writes[0]
    if x is None or x.shape != y.shape or x.wide or y.wide:
        return None
    if not y.size or (isinstance(y.nbytes, int) and y.nbytes > MOST):
        return None
    dims = [(d, s, t) for d, s, t in zip(y.shape, x.strides, y.strides, strict=True) if d != 1]
    n = 1
    outer: list[tuple[int, int, int]] = []
    for d, s, t in reversed(dims):
        if not outer and s == n and t == n:
            n = n * d
        elif outer and s == outer[-1][0] * outer[-1][1] and t == outer[-1][0] * outer[-1][2]:
            outer[-1] = (outer[-1][0] * d, *outer[-1][1:])
        else:
            outer.append((d, s, t))
    if len(outer) > 2 or n == 1:
        return None
    (d1, s1, t1), (d0, s0, t0) = (*outer, *[(1, 0, 0)] * (2 - len(outer)))
    return Piece(n, (d0, d1), (s0, s1), (t0, t1))


def copy_kind(call: Call) -> object | None:
    """What copies of one launch have in common; None for what is no such copy."""
    return ("pieces", ITEMSIZE[call.writes[0][1].dtype]) if piece_of(call) is not None else None


def independent(first: Call, second: Call, a: Piece, b: Piece) -> bool:
    """Whether copies of these pieces may run side by side: none writes what the other touches."""
    (_, x1), (_, y1) = first.reads[0], first.writes[0]
    (_, x2), (_, y2) = second.reads[0], second.writes[0]
    if x1.buffer == y2.buffer or x2.buffer == y1.buffer:
        return False
    if y1.buffer != y2.buffer:
        return True
    if y2.offset < y1.offset:
        (a, y1), (b, y2) = (b, y2), (a, y1)
    if a.sizes[0] != 1 or b.sizes[0] != 1 or y1.offset + a.n > y2.offset:
        return False
    if a.sizes[1] == 1:
        return True
    return a.y[1] == b.y[1] and y2.offset + b.n <= y1.offset + a.y[1]


def merged(members: Sequence[Call]) -> Call:
    """One call of all members; their operands are bound under "0.row" and "1.row"."""
    pieces = tuple(piece for call in members if (piece := piece_of(call)) is not None)
    problem = CopyMany(ITEMSIZE[members[0].writes[0][1].dtype], pieces)
    reads: dict[str, Tensor] = {f"0.{i}": c.reads[0][1] for i, c in enumerate(members)}
    writes: dict[str, Tensor] = {f"1.{i}": c.writes[0][1] for i, c in enumerate(members)}
    pairs = tuple(zip(reads, writes, strict=True))
    nodes = nodes_of(*members)
    return Call.of(f"Copy x{len(members)}", nodes, problem, reads, writes, copies=pairs)

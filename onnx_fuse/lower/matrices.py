"""The operands of a product as the Gemm candidates take them; rows of whole 16 bytes where it pays.

TMA reads and writes rows that begin at multiples of 16 bytes. A product with 50257 columns of 16
bits has others: it takes a copy of such an operand (of a weight that nothing writes to, made once)
and leaves its result in rows that stand apart, which what reads it, or a copy, brings together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnx_fuse.kernels.costs import Passes, total
from onnx_fuse.lower.context import Context, copy
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.passes.narrow_products import COLUMNS
from onnx_fuse.program.problem import ITEMSIZE, GemmProblem
from onnx_fuse.program.size import broadcast

_WHOLE = 8
"""Elements of 16 bits that are 16 bytes."""


@dataclass(frozen=True)
class Matrix:
    """A [batch..., rows, cols] operand as the Gemm candidates take it."""

    tensor: Tensor
    trans: bool
    ld: int
    batch_strides: tuple[int, ...]


def matrix(ctx: Context, t: Tensor) -> Matrix:
    """`t` [batch..., rows, cols] with unit stride along rows or columns, copied if it has none."""
    rows, cols = t.shape[-2:]
    down, right = t.strides[-2:]
    if cols == 1 and rows > 1 and down == 1:  # rows of one element are no multiple of 16 bytes
        return Matrix(t, True, rows, t.strides[:-2])
    if cols == 1:
        right = 1
    if right == 1 and (rows == 1 or down >= cols):
        ld = down if rows > 1 else cols
        return Matrix(t, False, max(ld, cols), t.strides[:-2])
    if (down == 1 or rows == 1) and (cols == 1 or right >= rows):
        ld = right if cols > 1 else rows
        return Matrix(t, True, max(ld, rows), t.strides[:-2])
    dense = ctx.contiguous(t)
    return Matrix(dense, False, cols, dense.strides[:-2])


def factors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...], tuple[int, ...]]:
    """a and b as matrices, the batch that both broadcast to, and the shape of a · b: NumPy's rules.

    A vector is one row on the left, and one column on the right.
    """
    rows, columns = a.shape[-2:-1], b.shape[1:][-1:]
    if not rows:
        a = replace(a, shape=(1, *a.shape), strides=(0, *a.strides))
    if not columns:
        b = replace(b, shape=(*b.shape, 1), strides=(*b.strides, 0))
    batch = broadcast(a.shape[:-2], b.shape[:-2])
    return a, b, batch, (*batch, *rows, *columns)


def alignment(*tensors: Tensor) -> int:
    """Bytes that every operand's address is a multiple of, 16 at most."""
    size = 16
    while any(t.offset * ITEMSIZE[t.dtype] % size for t in tensors):
        size //= 2
    return size


def with_whole_rows(
    ctx: Context, node: ir.Node, problem: GemmProblem, a: Matrix, b: Matrix, y: Tensor
) -> tuple[GemmProblem, Matrix, Matrix, Tensor]:
    """Copy operands to rows of whole 16 bytes where the copies cost less than they save.

    Where the returned `y` is not the given one, the caller has to copy the result to the given one.
    """
    operands = problem, a, b, y
    if problem.dtype not in ("float16", "bfloat16") or problem.batch:
        return operands
    if problem.n <= COLUMNS:  # a norm's kernel may take the product over as it is
        return operands
    bent = [m for m in (a, b) if m.ld % _WHOLE or m.tensor.offset % _WHOLE]
    loose = problem.n % _WHOLE != 0 and not problem.ldy
    if not bent and not loose:
        return operands
    straight = problem.replace(lda=_up(a.ld), ldb=_up(b.ld), align=16)
    moved = sum(2 * m.tensor.nbytes for m in bent if ctx.known(m.tensor) is None)
    ways: list[tuple[GemmProblem, int]] = [(problem, 0), (straight, moved)]
    if loose and not problem.epilogue.among("accumulate", "save_z", "beta", "residual", "dact"):
        apart = straight.replace(ldy=_up(problem.n))
        ways.append((apart, moved + 2 * y.nbytes))

    def cost(way: tuple[GemmProblem, int]) -> float:
        passes = [Passes(way[1], len(bent) + 1)] if way[1] else []
        return total((way[0], *passes), ctx.hw, ctx.prefs)

    best = min(ways, key=cost)[0]
    if best is problem:
        return operands
    if best.ldy:
        y = ctx.scratch(y.dtype, (problem.m, _up(problem.n))).first((problem.m, problem.n))
    return best, _straight(ctx, node, a), _straight(ctx, node, b), y


def _up(size: int) -> int:
    return -(-size // _WHOLE) * _WHOLE


def _straight(ctx: Context, node: ir.Node, m: Matrix) -> Matrix:
    """The operand, or a copy of it whose lines begin at multiples of 16 bytes."""
    if not (m.ld % _WHOLE or m.tensor.offset % _WHOLE):
        return m
    t = replace(m.tensor, shape=m.tensor.shape[-2:], strides=m.tensor.strides[-2:])  # of batch 1
    t = t.permute((1, 0)) if m.trans else t  # lines along the last axis
    ld = _up(t.shape[-1])
    rows = with_gaps(ctx, node, t, ld, "in whole rows")
    return Matrix(rows.permute((1, 0)) if m.trans else rows, m.trans, ld, ())


def with_gaps(ctx: Context, node: ir.Node, t: Tensor, ld: int, how: str) -> Tensor:
    """A copy of `t` [..., n] in rows of `ld` elements, made once where nothing writes to it."""

    def padded(array: np.ndarray) -> np.ndarray:
        wide = np.zeros((*array.shape[:-1], ld), array.dtype)
        wide[..., : array.shape[-1]] = array
        return wide

    rows = ctx.packed(t, how, padded)
    if rows is None:
        rows = ctx.scratch(t.dtype, (*t.shape[:-1], ld))
        copy(ctx, node, t, rows.first(t.shape))
    return rows.first(t.shape)

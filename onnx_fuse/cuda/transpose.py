"""Copies between views that run along different axes: through shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from onnx_fuse.cuda.pointwise import collapse
from onnx_fuse.program.call import Tensor
from onnx_fuse.program.launch import Launch, Num, Ptr
from onnx_fuse.program.problem import ITEMSIZE

TILE_LEAST = 24
"""Accesses that both axes of a transpose must hold to go through tiles of 32."""
COLUMNS = 256
"""Columns of a block of indexing/transpose_short.cu."""


@dataclass(frozen=True)
class _Turn:
    """Sizes and strides of x and y, which run along the axes `p`, maybe back, and `q`.

    `above`: the axis in which runs of x follow each other, where they are short.
    """

    dims: Sequence[int]
    sx: Sequence[int]
    sy: Sequence[int]
    p: int
    q: int
    above: int | None

    @property
    def first(self) -> tuple[int, int]:
        """Where the first element of a run in x is, and where it goes."""
        last = self.dims[self.p] - 1
        return (-last, last * self.sy[self.p]) if self.sx[self.p] < 0 else (0, 0)

    @property
    def y_p(self) -> int:
        """The distance in y of what are neighbours in x."""
        return -self.sy[self.p] if self.sx[self.p] < 0 else self.sy[self.p]


def _turn(x: Tensor, y: Tensor) -> _Turn | None:
    dims, (sx, sy) = collapse(y.shape, [x.strides, y.strides])
    p = next((k for k, n in enumerate(sx) if n in (1, -1)), None)
    q = next((k for k, n in enumerate(sy) if n == 1), None)
    if p is None or q is None or p == q or x.dtype != y.dtype or len(dims) > 5:
        return None
    follows = (k for k in range(len(dims)) if k != p and sx[k] == dims[p])
    return _Turn(dims, sx, sy, p, q, next(follows, None) if dims[p] < TILE_LEAST else None)


def launch_transpose(x: Tensor, y: Tensor) -> Launch | None:
    """y[...] = x[...] tile by tile where the two run along different axes; None elsewhere."""
    turn = _turn(x, y)
    if turn is None or turn.above == turn.q:
        return None
    dims, p, q, above = turn.dims, turn.p, turn.q, turn.above
    length, y_p = dims[p], turn.y_p
    more: list[int] = []
    if above is not None:
        length, y_p = length * dims[above], turn.sy[above]
    if above is not None or turn.sx[p] < 0:
        more = [*turn.first, 1 if above is None else dims[p], turn.y_p]
    sizes = [length, dims[q], turn.sx[q], y_p]
    rest = [k for k in range(len(dims)) if k not in (p, q, above)]
    vec = _vec(x, y, [*sizes, *turn.first, turn.y_p], turn, rest)
    if min(length, dims[q]) < TILE_LEAST * vec:
        return None
    tiles = prod(-(-n // (32 * vec)) for n in (length, dims[q]))
    return _launch("transpose", x, y, turn, rest, tiles, vec, sizes, more)


def launch_short(x: Tensor, y: Tensor) -> Launch | None:
    """The same where x has a few elements for each of many places of y, one after the other."""
    turn = _turn(x, y)
    if turn is None or turn.above != turn.q:
        return None
    dims, p, q = turn.dims, turn.p, turn.q
    rest = [k for k in range(len(dims)) if k not in (p, q)]
    vec = _vec(x, y, [dims[q], turn.y_p, *turn.first], turn, rest)
    if dims[q] < TILE_LEAST * vec:
        return None
    blocks, sizes = -(-dims[q] // COLUMNS), [dims[p], dims[q], turn.y_p]
    return _launch("transpose_short", x, y, turn, rest, blocks, vec, sizes, list(turn.first))


def _vec(x: Tensor, y: Tensor, numbers: Sequence[int], turn: _Turn, rest: Sequence[int]) -> int:
    """Elements of an access, of at most four bytes."""
    size, steps = ITEMSIZE[x.dtype], [s[k] for s in (turn.sx, turn.sy) for k in rest]
    all_of = [*numbers, *steps, x.offset, y.offset]
    return next(v for v in (4, 2, 1) if v == 1 or v * size <= 4 if not any(n % v for n in all_of))


def _launch(
    entry: str, x: Tensor, y: Tensor, turn: _Turn, rest: Sequence[int], blocks: int, vec: int,
    sizes: Sequence[int], more: Sequence[int],
) -> Launch | None:  # fmt: skip
    """So many blocks for each place of the `rest` of the axes, which are three at most."""
    count = blocks * prod(turn.dims[k] for k in rest)
    if len(rest) > 3 or count >= 2**31:
        return None
    wide = x.wide or y.wide
    axes = [None] * (3 - len(rest)) + [*rest]
    steps = [1 if k is None else turn.dims[k] for k in axes[1:]]
    steps += [0 if k is None else s[k] for s in (turn.sx, turn.sy) for k in axes]
    args = [Num("i64" if wide else "i32", n) for n in (*sizes, *steps, *more)]
    unit = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}[ITEMSIZE[x.dtype]]
    defines = [("IDX", "i64" if wide else "int"), ("T", unit), ("VEC", str(vec))]
    if more and entry == "transpose":
        defines.append(("INNER", "1"))
    return Launch(
        f"indexing/{entry}.cu", entry, (count, 1, 1), (256, 1, 1),
        (Ptr("a0"), Ptr("y0"), *args), tuple(defines), waits="first",
    )  # fmt: skip

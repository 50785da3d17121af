"""The problems that move, order, count or draw elements, and those that go step by step.

Conventions are those of `problems`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from onnx_fuse.program.call import Tensor
from onnx_fuse.program.expression import Expression
from onnx_fuse.program.problem import ITEMSIZE, KEPT_TILE, AnyProblem, KernelConfig
from onnx_fuse.program.problems import Window


@dataclass(frozen=True)
class Pointwise(AnyProblem):
    """An expression over views of one iteration space, element by element; a copy has no steps.

    The views' buffers do not matter.
    """

    expression: Expression
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]

    @property
    def flops(self) -> int:
        """One operation for each step of each element."""
        return len(self.expression.steps) * self.writes[0].size

    @property
    def bytes(self) -> int:
        """Every view, broadcast elements counted each time."""
        return sum(t.nbytes for t in (*self.reads, *self.writes))

    @property
    def empty(self) -> bool:
        """Whether there is no element."""
        return not self.writes[0].size

    def __str__(self) -> str:
        views = (f"{t.dtype}{list(t.shape)}" for t in (*self.reads, *self.writes))
        return f"{self.op} {self.expression.name} {' '.join(views)}".replace(", ", ",")


@dataclass(frozen=True)
class PointwiseSums(AnyProblem):
    """An expression over views [m, n], and the sum of one of its results over an axis or both.

    The sums of the result `summed`, as it is stored, go to "sum", of `out_dtype`: those of the
    "columns" [n], of the "rows" [m], or of "all".
    """

    pointwise: Pointwise
    summed: int
    over: str
    out_dtype: str

    @property
    def flops(self) -> int:
        """The expression's operations, and one addition an element."""
        return self.pointwise.flops + self.pointwise.writes[0].size

    @property
    def bytes(self) -> int:
        """Every view of the expression."""
        return self.pointwise.bytes

    @property
    def empty(self) -> bool:
        """Whether there is no element."""
        return self.pointwise.empty

    def __str__(self) -> str:
        return f"{self.op} of {self.over}, {self.pointwise}"


@dataclass(frozen=True)
class PointwiseMany(AnyProblem):
    """An expression over many flat tensors: (reads, writes) an item.

    Operand r of item t is "r.t", the writes counted behind the reads, or "a<r>" where `shared[r]`
    is one number for all.
    """

    expression: Expression
    shared: tuple[Tensor | None, ...]
    items: tuple[tuple[tuple[Tensor, ...], tuple[Tensor, ...]], ...]

    @property
    def flops(self) -> int:
        """One operation for each step of each element."""
        return len(self.expression.steps) * sum(writes[0].size for _, writes in self.items)

    @property
    def bytes(self) -> int:
        """The bytes of all tensors, without the numbers for all."""
        reads = (
            t.nbytes
            for each, _ in self.items
            for t, one in zip(each, self.shared, strict=True)
            if one is None
        )
        return sum(reads) + sum(t.nbytes for _, writes in self.items for t in writes)

    def __str__(self) -> str:
        return f"{self.op} {self.expression.name} of {len(self.items)}"


@dataclass(frozen=True)
class Piece:
    """Runs of `n` elements side by side, in two outer dimensions: sizes, and strides of x and y."""

    n: int
    sizes: tuple[int, int]
    x: tuple[int, int]
    y: tuple[int, int]


@dataclass(frozen=True)
class CopyMany(AnyProblem):
    """Elements of `itemsize` bytes that are copied from "0.t" to "1.t", for each piece t."""

    itemsize: int
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Each element read and written."""
        return 2 * self.itemsize * sum(p.n * p.sizes[0] * p.sizes[1] for p in self.pieces)

    def __str__(self) -> str:
        return f"{self.op} of {len(self.pieces)}"


@dataclass(frozen=True)
class BatchedCalls(AnyProblem):
    """`count` calls of one problem that share a launch of its `kernel` by `config`.

    The operand `name` of call i is "name.i", of those that are `bound`.
    """

    problem: AnyProblem
    count: int
    bound: tuple[str, ...]
    kernel: str
    config: KernelConfig

    @property
    def flops(self) -> int:
        """The sum over all calls."""
        return self.count * self.problem.flops

    @property
    def bytes(self) -> int:
        """The sum over all calls."""
        return self.count * self.problem.bytes

    @property
    def empty(self) -> bool:
        """Whether its problem has nothing to compute."""
        return self.problem.empty


@dataclass(frozen=True)
class GatherElements(AnyProblem):
    """y[o, j, i] = x[o, index[o, j, i], i]: `size` results, `inner` = the sizes of i.

    `taken` and `length` are y's and x's elements along the axis.
    """

    moves = "x y: dtype size; index: index size"
    size: int
    inner: int
    taken: int
    length: int
    dtype: str
    index: str


@dataclass(frozen=True)
class GatherND(AnyProblem):
    """y[b, j, i] = x[b, index[b, j, :], i]: `rows` tuples a batch, x's indexed sizes `dims`."""

    operands = "index: index batch rows #dims; x: dtype batch dims inner; y: dtype batch rows inner"
    moves = "x y: dtype batch rows inner; index: index batch rows #dims"
    batch: int
    rows: int
    dims: tuple[int, ...]
    inner: int
    dtype: str
    index: str


@dataclass(frozen=True)
class ScatterElements(AnyProblem):
    """y[o, index[o, j, i], i] (op)= update[o, j, i] for `given` j in order, `lines` of (o, i).

    `distinct`: no two updates are for the same element.
    """

    operands = "index: index lines given; update: dtype lines given; y: dtype lines length"
    moves = "update y: dtype lines given; index: index lines given"
    lines: int
    inner: int
    given: int
    length: int
    dtype: str
    index: str
    reduction: str = "none"
    distinct: bool = False


@dataclass(frozen=True)
class ScatterND(AnyProblem):
    """y[index[j, :], i] (op)= update[j, i] for `count` j in order; y's indexed sizes are `dims`.

    `fresh`: all of y is written, as if it held zeros before.
    """

    operands = "index: index count #dims; update: dtype count inner; y: dtype rows inner"
    moves = """index: index count #dims; update: dtype count inner; y: dtype rows inner fresh;
        places: dtype count inner !fresh"""
    count: int
    dims: tuple[int, ...]
    inner: int
    dtype: str
    index: str
    reduction: str = "none"
    fresh: bool = False

    @property
    def rows(self) -> int:
        """The runs of `inner` elements that y has."""
        return prod(self.dims)


@dataclass(frozen=True)
class CumulativeSum(AnyProblem):
    """Running sums, or products, of x [outer, length, inner] along `length`."""

    operands = "x y: dtype outer length inner"
    outer: int
    length: int
    inner: int
    dtype: str
    exclusive: bool = False
    reverse: bool = False
    product: bool = False


@dataclass(frozen=True)
class TopK(AnyProblem):
    """The k first of each of `outer` x `inner` lines of `length`, in order, and their indices."""

    operands = """x: dtype outer length inner; values: dtype outer k inner;
        indices: int64 outer k inner"""
    outer: int
    length: int
    inner: int
    k: int
    dtype: str
    largest: bool = True


@dataclass(frozen=True)
class SortedRows(AnyProblem):
    """The order of `count` rows of `width` numbers, by their first ones that differ."""

    operands = "x: dtype count width; indices: int64 count"
    count: int
    width: int
    dtype: str


@dataclass(frozen=True)
class KeptCounts(AnyProblem):
    """How many of `length` flags are set before each tile of KEPT_TILE, and how many in all."""

    moves = "keep: bool length; counts: int64 tiles"
    length: int

    @property
    def tiles(self) -> int:
        """The tiles that the flags make."""
        return -(-self.length // KEPT_TILE)


@dataclass(frozen=True)
class KeptPositions(AnyProblem):
    """The positions of the `count` flags of `length` that are set, by the counts before tiles."""

    moves = "keep: bool length; positions: int64 count"
    length: int
    count: int

    @property
    def tiles(self) -> int:
        """The tiles that the flags make."""
        return -(-self.length // KEPT_TILE)


@dataclass(frozen=True)
class Recurrence(AnyProblem):
    """All steps of an LSTM, GRU or RNN in one direction, or their gradient (`grad`).

    `kind` is the number of the cell in recurrent/steps.cuh, which has `gates` products.
    """

    moves = """weights: dtype hidden hidden gates; gates: dtype steps batch hidden gates;
        states: dtype steps batch hidden"""
    work = "2 steps batch hidden hidden gates"
    multiplied = "dtype"
    kind: int
    gates: int
    steps: int
    batch: int
    hidden: int
    dtype: str
    reverse: bool = False
    grad: bool = False


@dataclass(frozen=True)
class Random(AnyProblem):
    """`size` numbers of distribution `kind` (random/philox.cu) by `a` and `b`, or by x of `given`.

    `fixed`: `bits` are the seed's.
    """

    operands = "y: dtype size"
    kind: int
    size: int
    stream: int
    dtype: str
    given: str = "float32"
    a: float = 0.0
    b: float = 1.0
    fixed: bool = False
    bits: int = 0


@dataclass(frozen=True)
class CacheAppend(AnyProblem):
    """Keys and values of `rows` new tokens, written behind those before them in a cache.

    Sequence b has lengths[b] + 1 tokens with the new ones, of which the last `rows` are new, or
    each has past + rows (`uniform`). q, k and v are [B, H, rows, D] by their strides, past and
    present [B, kv_heads, places, D]; places behind the new tokens are zero. Where past and present
    are one place only the new rows are written. q and k are rotated by cos and sin [context, half];
    turned [B, heads, rows, D] takes q.
    Pointers: q k v lengths cos sin q_scale k_scale positions past_key past_value key_step
    value_step, turned present_key present_value.
    """

    moves = """q turned: dtype batch rows heads size; k v: dtype batch rows kv_heads size;
        present_key present_value: cache_dtype batch rows kv_heads size"""
    batch: int
    rows: int
    heads: int
    """Heads of q, 0 where nothing is rotated. `kv_heads`: of k and v."""
    kv_heads: int
    size: int
    """D, the numbers of a head."""
    length: int
    """Places of present. `past`: of past, 0 where there is none."""
    past: int
    dtype: str
    q_strides: tuple[int, ...]
    """The strides of batch, head and row, in elements."""
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    half: int = 0
    """Pairs of numbers that are rotated, those `half` apart, or neighbours where `interleaved`."""
    interleaved: bool = False
    context: int = 0
    positions: str = ""
    """Where a token's angles stand: "" at its place, "first" from positions[0] on, "each" at
    positions[b, row], "rows" at b rows + row."""
    columns: bool = False
    """cos and sin [context, 2 half] have a number for each column, not for each pair."""
    uniform: bool = False
    keep: bool = False
    """Places behind the new tokens are those of past."""
    placed: str = ""
    """Without `lengths`, rows go to positions[b, row] ("each") or [row] ("all"), the last stays."""
    normed: bool = False
    """Each head of q and k goes through an RMSNormalization with q_scale or k_scale [D] first."""
    epsilon: float = 0.0
    cache: str = ""
    """The type of past and present, int8 or float8_e4m3fn, where they are numbers of steps, of
    key_step and value_step [kv_heads, D] float32 (0 stands for 1); "": `dtype`."""

    @property
    def cache_dtype(self) -> str:
        """The type of past and present."""
        return self.cache or self.dtype


@dataclass(frozen=True)
class RoiAlign(AnyProblem):
    """`size` bins of regions of images [batch, *image]; `image` is channels, height and width."""

    operands = "x: dtype batch image; y: dtype size"
    moves = "x y: dtype size"
    size: int
    batch: int
    image: tuple[int, int, int]
    bins: tuple[int, int]
    dtype: str
    index: str
    samples: int = 0
    scale: float = 1.0
    maximum: bool = False
    half_pixel: bool = True


@dataclass(frozen=True)
class DeformColumns(AnyProblem):
    """The columns of a DeformConv: what its filter's moved taps read, by `size` offsets."""

    size: int
    channels: int
    shifts: int
    image: tuple[int, ...]
    outer: tuple[int, ...]
    window: Window
    dtype: str

    @property
    def bytes(self) -> int:
        """The bytes written, and as many read."""
        return 2 * self.size * self.channels // self.shifts * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class NmsChosen(AnyProblem):
    """The boxes that non-maximum suppression keeps, of `count` in each of `lines`."""

    moves = "boxes: float32 4 lines count; scores: float32 lines count; chosen: int64 lines count"
    counted = "lines"  # one without boxes still writes that it keeps none
    lines: int
    classes: int
    count: int
    center: int = 0


@dataclass(frozen=True)
class Determinant(AnyProblem):
    """The determinants of `count` matrices [n, n]."""

    operands = "x: dtype count n n; y: dtype count"
    counted = "count"  # a matrix of no rows has a determinant
    count: int
    n: int
    dtype: str


def is_smooth(points: int) -> bool:
    """Whether a Fourier transform of so many is one of stages: of 2, 3 or 5 each, and not long."""
    return 1 <= points <= 4096 and 30**12 % points == 0


@dataclass(frozen=True)
class Fourier(AnyProblem):
    """y [outer, frames, results, inner, 1 or 2]: Fourier transforms of `points` points.

    Those of frame f are x [outer, length, inner, parts] from f * step on along `length`, of which
    `taken` count and the others are 0, times the operand "window" where there is one. `onesided`:
    half of a symmetric spectrum is stored, or read if `inverse`, for a real result.
    """

    moves = """x: dtype outer length inner parts; y: dtype count results;
        imaginary: dtype count results !half"""
    counted = "count"  # a transform of no elements has results
    multiplied = "float64"
    outer: int
    frames: int
    step: int
    length: int
    inner: int
    parts: int
    points: int
    taken: int
    dtype: str
    inverse: bool = False
    onesided: bool = False
    window: bool = False

    @property
    def half(self) -> bool:
        """Whether half of the spectrum is read."""
        return self.inverse and self.onesided

    @property
    def results(self) -> int:
        """Numbers of a transform that are stored, each of them real where `half` is read."""
        return self.points // 2 + 1 if self.onesided and not self.inverse else self.points

    @property
    def count(self) -> int:
        """The number of transforms."""
        return self.outer * self.frames * self.inner

    @property
    def flops(self) -> int:
        """In float64: 5 n log2 n a transform."""
        return 5 * self.count * self.points * max(1, self.points.bit_length() - 1)


@dataclass(frozen=True)
class NGrams(AnyProblem):
    """How often each of `columns` n-grams stands in each of the rows of `words`: `size` counts."""

    operands = "y: float32 size"
    moves = "y: float32 size; x: dtype size words"
    size: int
    columns: int
    words: int
    dtype: str
    mode: int = 0


@dataclass(frozen=True)
class Range(AnyProblem):
    """Scale and zero point of uint8 for `size` numbers by their range, which holds 0."""

    operands = "x: float32 size"
    counted = "1"  # the range of no elements is defined too
    size: int

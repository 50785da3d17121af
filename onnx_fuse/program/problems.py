"""The problems that are no products: each a frozen dataclass of sizes, types and flags.

`dtype` is that of the tensor that the operator is about, `param` of its parameters, `stat` of row
statistics. A call's operands are named as the candidates of `kernels` name them. A problem with a
`tail` stores what that makes of each element (`expression.Tail`).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from onnx_fuse.program.expression import Tail
from onnx_fuse.program.problem import ITEMSIZE, AnyProblem, Hardware


@dataclass(frozen=True)
class Norm(AnyProblem):
    """y = (x - mean) rstd scale + bias in each of `rows` rows of `length` elements.

    `rms`: without mean and bias. `residual`: x + residual is normalised, and written to "sum".
    `affine` 1: scale and bias are a row; 2: a number a channel, row r being of group r % `groups`,
    of `channels` channels of `inner` elements. `columns`: "z" is y times "w" [length, columns]
    (`turned`: [columns, length]) plus "c".
    """

    moves = "x y: dtype rows length; residual sum: dtype rows length residual"
    work = "2 rows length columns"
    rows: int
    length: int
    dtype: str
    param: str
    stat: str = "float32"
    rms: bool = False
    residual: bool = False
    affine: int = 1
    groups: int = 1
    channels: int = 1
    inner: int = 1
    epsilon: float = 1e-5
    columns: int = 0
    turned: bool = False
    tail: Tail | None = None

    @property
    def stored(self) -> str:
        """y, unless something has taken its place."""
        return "" if self.tail or self.columns else "y"


@dataclass(frozen=True)
class NormGrad(AnyProblem):
    """dx of a Norm with `affine` 1 by mean and rstd, and `parts` sums for dscale and dbias.

    `skip`: "ds", the gradient of the sum, is added. `dx`: dx is written. `k`: dy is the product of
    "dy" [rows, k] and "b" [k, length] (`turned`: [length, k]).
    """

    moves = """x: dtype rows length; dy: dtype rows length !k; dx: dtype rows length dx;
        ds: dtype rows length skip"""
    work = "2 rows length k"
    rows: int
    length: int
    dtype: str
    param: str
    stat: str
    parts: int
    rms: bool = False
    skip: bool = False
    dx: bool = True
    k: int = 0
    turned: bool = False
    tail: Tail | None = None

    @property
    def stored(self) -> str:
        """dx where it is wanted."""
        return "" if self.tail or not self.dx else "dx"


@dataclass(frozen=True)
class NormGradSums(AnyProblem):
    """dscale (and dbias: `outputs` 2) as sums over the parts that `grad` leaves."""

    grad: NormGrad
    outputs: int

    @property
    def bytes(self) -> int:
        """The bytes of the parts, which are read."""
        wide = 8 if self.grad.dtype == "float64" else 4
        return wide * self.outputs * self.grad.parts * self.grad.length


@dataclass(frozen=True)
class ChannelNorm(AnyProblem):
    """y = (x - mean) / sqrt(variance + epsilon) scale + bias, x of `size` elements.

    Scale and bias are a number a channel, of `channels` of `inner` elements; mean and variance are
    too, or, with `group`, a number for so many channels of a row of the batch; of `pixels` rows, if
    given, where the channels are the last axis and `inner` is 1.
    """

    operands = "x: dtype size; y: result size; scale bias: param channels"
    result = "y"
    size: int
    channels: int
    inner: int
    group: int
    dtype: str
    param: str
    stat: str
    epsilon: float = 1e-5
    tail: Tail | None = None
    pixels: int = 0

    @property
    def bytes(self) -> int:
        """The bytes of x and a tail's operands, which are read, and of y, which is written."""
        reads = self.tail.expression.loads if self.tail else 1
        out = self.tail.dtype if self.tail else self.dtype
        return self.size * (reads * ITEMSIZE[self.dtype] + ITEMSIZE[out])


@dataclass(frozen=True)
class RunningStats(AnyProblem):
    """The running mean and variance of `channels` after a batch's."""

    operands = "mean variance old_mean old_variance new_mean new_variance: any channels"
    moves = "mean variance: stat 3 channels"
    channels: int
    dtype: str
    param: str
    stat: str
    old: str
    momentum: float = 0.9


@dataclass(frozen=True)
class ChannelGrad(AnyProblem):
    """The gradient of a ChannelNorm of x [batch, channels, inner] by its own mean and variance.

    In three stages: "sums" over chunks of each channel, "params", which adds them up, and "dx".
    `splits` chunks of `chunk` elements (vectors) make a channel. `relu`: dy is the gradient of a
    Relu of the norm, which has "bias".
    """

    operands = "x dy dx: dtype batch channels inner; scale bias dscale dbias: param channels"
    stage: str
    batch: int
    channels: int
    inner: int
    splits: int
    chunk: int
    dtype: str
    param: str
    epsilon: float = 1e-5
    relu: bool = False

    @property
    def bytes(self) -> int:
        """x and dy read, dx written; or a channel's sums alone."""
        if self.stage == "params":
            return 8 * self.splits * self.channels
        tensors = 3 if self.stage == "dx" else 2
        return tensors * self.batch * self.channels * self.inner * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class GroupGrad(AnyProblem):
    """The gradient of y = act((x - mean) / sqrt(variance + epsilon) scale + bias) in groups.

    x is [images, channels, pixels], or with `last` [images, pixels, channels]; scale and bias are a
    number a channel, mean and variance one for each image's group of `per` channels. In three
    stages: "sums" in `splits` chunks of `chunk` vectors (`last`: rows) of each image's channel,
    "params", which adds them up, and "dx".
    """

    operands = """x dy dx: dtype images channels pixels; scale bias dscale dbias: param channels;
        part: any 2 images channels splits"""
    stage: str
    images: int
    channels: int
    pixels: int
    per: int
    last: bool
    splits: int
    chunk: int
    dtype: str
    param: str
    epsilon: float = 1e-5
    act: str = ""
    act_alpha: float = 0.0

    @property
    def bytes(self) -> int:
        """x and dy read, dx written; or the sums alone."""
        if self.stage == "params":
            wide = 8 if self.dtype == "float64" else 4
            return 2 * wide * self.images * self.channels * self.splits
        tensors = 3 if self.stage == "dx" else 2
        return tensors * self.images * self.channels * self.pixels * ITEMSIZE[self.dtype]


Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Window:
    """Filter or pool window over three spatial axes; where there are fewer, 1 leads."""

    kernel: Triple
    strides: Triple
    dilations: Triple
    before: Triple
    after: Triple


@dataclass(frozen=True)
class _Filtering(AnyProblem):
    """What a convolution and its weight's gradient have in common: `filters` of `channels` a group.

    x is [batch, groups * channels, *inner], y [batch, groups * filters, *outer].
    """

    work = "2 groups filters depth batch outer"  # products with pads included
    batch: int
    groups: int
    channels: int
    filters: int
    inner: Triple
    outer: Triple
    window: Window
    dtype: str

    @property
    def depthwise(self) -> bool:
        """Whether each channel has one filter of its own."""
        return self.channels == self.filters == 1 < self.groups

    @property
    def depth(self) -> int:
        """The number of products in a sum over a filter."""
        return self.channels * prod(self.window.kernel)


@dataclass(frozen=True)
class Conv(_Filtering):
    """x [batch, groups * channels, *inner] -> y [batch, groups * filters, *outer].

    y = act(x * weight + bias); `slope`: the activation's alpha is a number a filter. `transposed`:
    ConvTranspose. `channels_last`: x is [batch, *inner, groups * channels], y and a tail's operands
    alike, and the weights are [groups * filters, taps, channels] ([taps, groups] where a group has
    one channel and one filter). `x_strides` are then those of x's images, rows and pixels in
    elements, () where x is dense, and `y_strides` alike. `static_weight`: nothing in the program
    writes to the weights.
    `planar`: x is [batch, channels, *inner] nevertheless, of few channels, and the weights are
    [filters, rows, run]: a row's pixels of 4 or 8 channels, zeros up to a multiple of 16 elements.
    `math`: how products of channels-last float32 may be computed, as for Gemm. `column_moments`:
    "part" [pixels / 64, filters, 2] takes y's moments, as of an `Epilogue`, or of 4 rows of 16.
    """

    operands = """x: dtype batch groups channels inner !x_strides; bias slope: any groups filters;
        weight: dtype groups filters depth !planar; y: result batch groups filters outer !y_strides;
        e1 e2 e3: any batch groups filters outer !y_strides"""
    moves = """x: dtype batch groups channels inner; weight: dtype groups filters depth;
        y: dtype batch groups filters outer"""
    op = "Conv"
    transposed: bool = False
    act: str = ""
    act_alpha: float = 0.0
    slope: bool = False
    tail: Tail | None = None
    channels_last: bool = False
    x_strides: tuple[int, ...] = ()
    y_strides: tuple[int, ...] = ()
    static_weight: bool = False
    planar: bool = False
    math: str = "ieee"
    column_moments: bool = False

    @property
    def stored(self) -> str:
        """The operand that holds the result."""
        return "" if self.tail or self.column_moments else "y"

    def rate(self, hw: Hardware) -> float:
        """The rate of products of its type, or of those that stand for them."""
        if self.math == "bf16x3":
            return hw.rate("bfloat16") / 3
        return hw.rate("tf32" if self.math == "tf32" else self.dtype)


@dataclass(frozen=True)
class IntegerConv(_Filtering):
    """y = scale (x * weight + shift) + bias of codes of 8 bits: sums in int32, y in float32.

    x is [batch, *inner, groups * channels] of `dtype`, as a channels-last Conv's, and `border`
    around it; y alike. The weights are int8 [groups * filters, taps, channels], of whose last axis
    zeros fill up 16 bytes; of one group, zeros fill up the filters to 64. "scale" and "bias" are
    float32 [groups * filters], and "shift" int32, if `border`, the zero point of x, is not 0.
    A product of rows has one tap. Of float8_e4m3fn, the weights are that, too, sums are float32,
    and there is no shift.
    """

    op = "IntegerConv"
    multiplied = "int8"
    result = "y"
    border: int = 0
    x_strides: tuple[int, ...] = ()
    tail: Tail | None = None

    @property
    def bytes(self) -> int:
        """x and the weights once each, and what is stored."""
        x, weights = self.channels * prod(self.inner), self.filters * self.depth
        y = self.filters * prod(self.outer) * ITEMSIZE[self.tail.dtype if self.tail else "float32"]
        return self.groups * (self.batch * (x + y) + weights)

    @property
    def weights(self) -> str:
        """The type of the weights."""
        return "int8" if self.dtype in ("int8", "uint8") else self.dtype

    @property
    def columns(self) -> int:
        """The filters that the weights hold."""
        return self.groups * self.filters if self.groups > 1 else -(-self.filters // 64) * 64


@dataclass(frozen=True)
class PixelBlocks(AnyProblem):
    """x [batch, channels, high * rows, columns * steps] as codes y [batch, tall, width, 16].

    A block is rows x steps pixels of channels, then `border`, of which the blocks around the
    `high` x `columns` from `top` and the `first` on consist, too. x has `strides`. `quantize`: the
    scale and the zero point by which x is quantized; () where it holds codes.
    """

    operands = "x: dtype; y: out_dtype batch tall width 16"
    moves = "x: dtype batch high columns block channels; y: out_dtype batch tall width 16"
    op = "PixelBlocks"
    batch: int
    channels: int
    block: tuple[int, int]
    high: int
    columns: int
    tall: int
    width: int
    top: int
    first: int
    strides: tuple[int, int, int, int]
    dtype: str
    out_dtype: str
    border: int
    quantize: tuple[float, int] | tuple[()] = ()


@dataclass(frozen=True)
class ConvWeightGrad(_Filtering):
    """dw [groups * filters, channels, *window.kernel] of a Conv: sums of dy x over the pixels.

    x is [batch, *inner, groups * channels], or has `x_strides` as a Conv's, and dy [batch, *outer,
    groups * filters]. A ConvTranspose has it too, its x as dy, its dy as x. `math`: as a Conv's.
    """

    operands = """x: dtype batch groups channels inner !x_strides;
        dy: dtype batch groups filters outer; dw: out_dtype groups filters depth"""
    moves = """x: dtype batch groups channels inner; dy: dtype batch groups filters outer;
        dw: out_dtype groups filters depth"""
    out_dtype: str
    x_strides: tuple[int, ...] = ()
    math: str = "ieee"

    def rate(self, hw: Hardware) -> float:
        """The rate of products of its type, without tensor cores where channels stand alone."""
        kind = "tf32" if self.math == "tf32" else self.dtype
        return hw.rate("float32" if self.depthwise else kind)


@dataclass(frozen=True)
class Softmax(AnyProblem):
    """y = exp(x - max) / sum exp(x - max) of x [outer, length, inner] over `length`; or its log."""

    operands = "x y: dtype outer length inner"
    outer: int
    length: int
    inner: int
    dtype: str
    log: bool = False


@dataclass(frozen=True)
class Reduce(AnyProblem):
    """One pass of a reduction: x [outer, length, inner] -> y [outer, splits, inner].

    Each result is of `chunk` elements of `length`. x, or y, holds `reducer`'s accumulators of
    `state` bytes where it comes `from_state`, or goes `to_state`; `count` elements of the first x
    make one of the last y. `second`: the moments' variance goes to "y2". A "Dot" sums x times "x2".
    """

    counted = "outer inner"  # a sum of nothing is a result
    reducer: str
    outer: int
    length: int
    inner: int
    chunk: int
    count: int
    dtype: str
    out_dtype: str
    state: int
    from_state: bool = False
    to_state: bool = False
    second: bool = False
    short: bool = False

    @property
    def splits(self) -> int:
        """The number of parts of each sum."""
        return -(-self.length // self.chunk) if self.chunk else 1

    @property
    def paired(self) -> bool:
        """Whether it reads "x2", too."""
        return self.reducer == "Dot" and not self.from_state

    @property
    def bytes(self) -> int:
        """The bytes of x, which is read, and of y, which is written."""
        read = self.state if self.from_state else ITEMSIZE[self.dtype] * (1 + self.paired)
        written = self.state if self.to_state else ITEMSIZE[self.out_dtype]
        return self.outer * self.inner * (self.length * read + self.splits * written)


@dataclass(frozen=True)
class SumSquares(AnyProblem):
    """The sum of the squares of all elements of tensors "x.i" of these `sizes` and `dtypes`."""

    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    out_dtype: str

    @property
    def bytes(self) -> int:
        """The bytes of all tensors, which are read."""
        return sum(n * ITEMSIZE[d] for n, d in zip(self.sizes, self.dtypes, strict=True))


@dataclass(frozen=True)
class Pool(AnyProblem):
    """y [planes, *outer] of the windows of x [planes, *inner]: "max", "average" or "lp".

    With `channels`, of which `planes` is a multiple, the tensors are channels last: x is
    [planes / channels, *inner, channels]. `nowhere` is the index, in its plane, of the maximum of a
    window that holds no element.
    """

    operands = "x: dtype planes inner; y: dtype planes outer; indices: int64 planes outer"
    moves = "x: dtype planes inner; y: dtype planes outer"
    kind: str
    planes: int
    inner: Triple
    outer: Triple
    window: Window
    dtype: str
    include_pad: bool = False
    column_major: bool = False
    p: float = 2.0
    channels: int = 0
    nowhere: int = -1


@dataclass(frozen=True)
class MaxPoolGrad(AnyProblem):
    """dx [planes, *inner, channels] of x's windows and dy [planes, *outer, channels].

    Each dy is added to where the window's first maximum was. `channels` neighbours share a
    position: 1 where the planes of a batch stand one by one.
    """

    operands = "x dx: dtype planes channels inner; dy: dtype planes channels outer"
    planes: int
    channels: int
    inner: Triple
    outer: Triple
    window: Window
    dtype: str


@dataclass(frozen=True)
class ChannelWindow(AnyProblem):
    """LRN: each of `size` elements by the squares of `width` neighbouring channels."""

    operands = "x y: dtype size"
    size: int
    channels: int
    inner: int
    width: int
    dtype: str
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0


@dataclass(frozen=True)
class Resample(AnyProblem):
    """y [outer, resized, inner]: weighted sums of `taps` elements of `length`, by tables.

    `rows` are the length, the resized length and the taps of an axis in front of that one, whose
    sums are made in the same pass; no taps where there is none.
    """

    outer: int
    length: int
    resized: int
    inner: int
    taps: int
    dtype: str
    out_dtype: str
    compute: str
    outside: float = 0.0
    rows: Triple = (1, 1, 0)

    @property
    def bytes(self) -> int:
        """The bytes of x, which is read, and of y, which is written."""
        length, resized = self.length * self.rows[0], self.resized * self.rows[1]
        sides = length * ITEMSIZE[self.dtype] + resized * ITEMSIZE[self.out_dtype]
        return self.outer * self.inner * sides


@dataclass(frozen=True)
class GridSample(AnyProblem):
    """x [batch, channels, *inner] at `points` positions of "grid" in each of the batch."""

    operands = """x: dtype batch channels inner; grid: grid batch points rank;
        y: dtype batch channels points"""
    moves = "x y: dtype batch channels points; grid: grid batch points rank"
    batch: int
    channels: int
    inner: Triple
    points: int
    rank: int
    dtype: str
    grid: str
    mode: int = 1
    padding: int = 0
    align: bool = False


@dataclass(frozen=True)
class Col2Im(AnyProblem):
    """y of `size` elements, images `image`: each pixel the sum of what x's `blocks` hold of it."""

    moves = "x: dtype size window.kernel; y: dtype size"
    size: int
    image: Triple
    blocks: Triple
    window: Window
    dtype: str


@dataclass(frozen=True)
class SlopeProduct(AnyProblem):
    """dz = dy act'(z) [m, n], and its column sums: to "dbias", or to `parts` parts "part" [n].

    Without `act`: the sums alone, of "dy".
    """

    operands = "dy z dz: dtype m n; part: any parts n; dbias: any n"
    moves = "dy: dtype m n; z dz: dtype m n act"
    m: int
    n: int
    dtype: str
    parts: int
    act: str = ""
    act_alpha: float = 1.0


@dataclass(frozen=True)
class PartSums(AnyProblem):
    """The sums over `parts` of "part" [parts, n], float32, to "out0" [n]."""

    operands = "part: float32 parts n; out0: out_dtype n"
    moves = "part: float32 parts n"
    parts: int
    n: int
    out_dtype: str


@dataclass(frozen=True)
class MergedMoments(AnyProblem):
    """ "mean" and "variance" [n], float32, of the columns of a matrix [m, n], from "part".

    "part" [m / 64, n, 2], float32, has the mean and the sum of squared deviations of 64 rows each.
    """

    operands = "part: float32 2 parts n; mean variance: float32 n"
    moves = "part: float32 2 parts n"
    m: int
    n: int

    @property
    def parts(self) -> int:
        """The parts of a column."""
        return -(-self.m // 64)


@dataclass(frozen=True)
class Fold(AnyProblem):
    """wq = gamma w, its column sums cs and cv = beta w + c, of weights w [k, n] each.

    `shapes` are the (k, n) of each; operands are named "w.i" where there are several. `master`: w
    is float32, and its rounded copy goes to "low".
    """

    shapes: tuple[tuple[int, int], ...]
    dtype: str
    master: bool = False

    @property
    def bytes(self) -> int:
        """The bytes of w, which is read, and of wq and w's copy, which are written."""
        each = 4 + 2 * ITEMSIZE[self.dtype] if self.master else 2 * ITEMSIZE[self.dtype]
        return each * sum(k * n for k, n in self.shapes)


@dataclass(frozen=True)
class Float8(AnyProblem):
    """x [m, k] rounded to the float8 type `kind`: "q" [m, k] and "qt" [k, m], where they are read.

    They are x divided by "scale", which follows from "history" [steps], the largest magnitudes of
    x at earlier steps; "next" is the history after this one (`ops.fused.float8`). "part"
    [parts, k], where it is read, holds sums of columns of x, of 128 rows each.
    """

    operands = "x: dtype m k; q qt: kind m k; part: any parts k"
    moves = "x: dtype m k; q qt: kind m k"
    op = "Float8"
    m: int
    k: int
    dtype: str
    kind: str
    steps: int

    @property
    def parts(self) -> int:
        """The number of sums of a column."""
        return -(-self.m // 128)


COLLECTIVE_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
"""What the ranks of a training may exchange."""


@dataclass(frozen=True)
class Registered(AnyProblem):
    """A node of an operator that a user has registered, as "domain::Name".

    `inputs` and `outputs` are the (name, dtype, shape) of its operands, by the names of the body;
    all are dense. `attributes` are those of the node, with the body's defaults.
    """

    op: str
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    attributes: tuple[tuple[str, object], ...] = ()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an operand."""
        return next(shape for n, _, shape in (*self.inputs, *self.outputs) if n == name)

    def dtype(self, name: str) -> str:
        """The element type of an operand, such as "float32"."""
        return next(dtype for n, dtype, _ in (*self.inputs, *self.outputs) if n == name)

    def attribute(self, name: str) -> object:
        """The value of an attribute."""
        return dict(self.attributes)[name]

    @property
    def bytes(self) -> int:
        """Each operand read or written once."""
        return sum(prod(s) * ITEMSIZE[d] for _, d, s in (*self.inputs, *self.outputs))

"""The problems of products that are no Gemm: attention, packed weights, 8-bit integers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from onnx_fuse.program.call import dense_strides
from onnx_fuse.program.data_movement import CacheAppend
from onnx_fuse.program.expression import Tail
from onnx_fuse.program.problem import FEW, ITEMSIZE, AnyProblem, Contraction
from onnx_fuse.program.size import maximum, minimum, size_class, upper_bound

A = TypeVar("A", bound="Attention")


@dataclass(frozen=True)
class Attention(AnyProblem):
    """y = softmax(z) v, of m queries and n keys of k numbers, z = scale q kᵀ with its masks.

    `batch` is (B, H). Pointers: q k v mask mask2 key_step value_step sink, y lse.
    """

    op = "Sdpa"
    moves = "q: dtype batch m k; k: cache_dtype batch k n; scores: dtype batch m n"
    counted = "m n"
    multiplied = "dtype"
    m: int
    n: int
    k: int
    batch: tuple[int, int]
    dtype: str
    dv: int
    """The numbers of a value."""
    q_strides: tuple[int, ...] = ()
    """The strides of batch, head and row, in elements; (): it is [B, H, S, D] in memory. So of
    the other operands and results."""
    k_strides: tuple[int, ...] = ()
    v_strides: tuple[int, ...] = ()
    y_strides: tuple[int, ...] = ()
    group: int = 1
    """Heads of queries that share a head of keys."""
    scale: float = 1.0
    causal: bool = False
    window: tuple[int, ...] = ()
    """(left, right): query i sees the keys from i - left to i + right, -1 is no bound; (): all, or
    with `causal` those up to i."""
    softcap: float = 0.0
    """0: there is none."""
    mask: tuple[int, ...] = ()
    """The strides of batch, head, row and column of what is added to z; (): there is no mask."""
    mask2: tuple[int, ...] = ()
    keep: bool = False
    """The mask selects: where it is 0, `fill` takes the place of z. `keep2`: `mask2` does."""
    keep2: bool = False
    fill: float = 0.0
    fill2: float = 0.0
    lowest: float = 0.0
    """float16: the number that an added -65504 replaces (`rewrite.fp16_range`); 0: itself."""
    guard: int = 0
    """1: a row that is -inf throughout gives 0; 2: weights that are NaN are 0."""
    lengths: bool = False
    """The last query of sequence b stands at place lengths[b], those before it at the places
    before, the first at 0 or later; each sees the keys up to its place and lengths[b], those in its
    window. Pointer: lengths, int32 [B]."""
    cache: str = ""
    """The type of k and v where they are numbers of steps, as in a CacheAppend; "": `dtype`."""
    packed: int = 0
    """The rows of sequences one behind the other, in which q, k, v and y are [1, H, rows, D], with
    strides of 0 for the batch: of B - 1 sequences of m = n rows at most, and of the rows behind
    them, which give 0. Pointer: offsets, int32 [B]."""
    sink: bool = False
    """Each row has one more logit, sink [H] of its head, whose value is 0."""
    tail: Tail | None = None
    """What makes codes of y, which has no other operand."""

    @property
    def stored(self) -> str:
        """y, where a kernel makes codes of it."""
        plain = not (self.packed or self.lengths or self.tail) and self.guard < 2
        return "y" if plain and self.op == Attention.op else ""

    @property
    def cache_dtype(self) -> str:
        """The type of k and v."""
        return self.cache or self.dtype

    @property
    def wide(self) -> Collection[str]:
        """All but the queries' where those are few: a cache grows by a token a run."""
        few = upper_bound(self.m) <= FEW  # a block walks over all its keys anyway
        return self.fields().keys() - {"m", "k", "batch"} if few else ()

    def upper_bound(self: A) -> A:
        """At the largest sizes of its class; packed rows in the fewest sequences of theirs.

        Many sequences would make each of them short.
        """
        largest = super().upper_bound()
        if not self.packed or self.trace is None:
            return largest
        return replace(largest, batch=(size_class(largest.batch[0])[0], largest.batch[1]))

    @property
    def typical(self) -> Attention:
        """Itself, or of packed sequences the same for as many tokens in sequences of one length.

        That is 4/3 of the mean, as where any length up to the longest is as likely: the mean length
        of the sequence of a token.
        """
        if not self.packed:
            return self
        mean = -(-self.packed // maximum(1, self.batch[0] - 1))
        length = maximum(1, minimum(self.m, mean * 4 // 3))
        batch = (-(-self.packed // length), self.batch[1])
        return replace(self, packed=0, batch=batch, m=length, n=length)

    @property
    def batches(self) -> int:
        """The number of heads of all of the batch."""
        return prod(self.batch)

    @property
    def flops(self) -> int:
        """The operations of its two products, of the keys that the queries see; padded ones."""
        whole = 2 * self.batches * self.m * self.seen(self.n) * (self.k + self.dv)
        return whole // 2 if self.causal else whole

    def seen(self, length: int, block: int = 1) -> int:
        """The most rows of `length` that a block of rows of the other side has in its window."""
        if not self.window or min(self.window) < 0:
            return length
        return minimum(length, sum(self.window) + block)

    def layout(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(shape [B, H, S, D], strides of its first three axes) of q, k, v, y or a gradient."""
        batch, heads = self.batch
        lead = (heads // self.group, self.n) if name[-1] in "kv" else (heads, self.m)
        if self.packed:
            batch, lead = 1, (lead[0], self.packed)
        shape = (batch, *lead, self.k if name[-1] in "qk" else self.dv)
        strides = getattr(self, f"{name}_strides", ()) or dense_strides(shape)[:3]
        return shape, (0, *strides[1:]) if self.packed else strides

    @property
    def mask_shape(self) -> tuple[int, int, int, int]:
        """[B, H, S, T]; of packed rows, [B - 1, H, m, n]."""
        return self.batch[0] - (self.packed != 0), self.batch[1], self.m, self.n

    @property
    def rows(self) -> int:
        """The rows of queries of all heads."""
        return self.batch[1] * self.packed if self.packed else self.batches * self.m


CACHE_OPERANDS = {"k": "new_key", "v": "new_value", "past_key": "k", "past_value": "v"}
"""Operand of a CacheAppend -> its name in a CachedAttention, where that is another."""


@dataclass(frozen=True)
class CachedAttention(Attention):
    """Attention of one new token over a cache that takes its key and value, by `append`.

    k and v are the past of that, which has the places of present; q is as `append` reads it.
    Pointers: q k v mask mask2 new_key new_value cos sin q_scale k_scale lengths positions key_step
    value_step sink, y lse present_key present_value.
    """

    op = "CachedAttention"
    append: CacheAppend | None = None

    @property
    def parts(self) -> tuple[CacheAppend, Attention]:
        """The problems of the cache's new rows, and of attention over it."""
        assert self.append is not None
        fields = self.fields()
        del fields["append"]
        if self.append.heads:  # attention reads the turned queries
            fields["q_strides"] = ()
        return self.append, Attention(**fields)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class AttentionGrad(Attention):
    """dq, dk and dv of an Attention. Pointers: its own, dy y lse, dq dk dv."""

    op = "SdpaGrad"
    dy_strides: tuple[int, ...] = ()
    dq_strides: tuple[int, ...] = ()
    """The strides of gradients that are parts of one tensor, () for tensors of their own."""
    dk_strides: tuple[int, ...] = ()
    dv_strides: tuple[int, ...] = ()

    @property
    def wide(self) -> Collection[str]:
        """No field: both have the classes of other sizes."""
        return ()

    @property
    def flops(self) -> int:
        """The operations of its seven products, of which the forward has two."""
        return super().flops * 7 // 2


@dataclass(frozen=True)
class PackedProduct(Contraction):
    """y[m, n] = a[m, k] · w[n, k]ᵀ + bias, of weights that stay in 2, 4 or 8 bits.

    w[n, k] = (q[n, k] - zero[n, k // block]) scale[n, k // block]. Types: a, scale, bias, y are of
    `dtype`; q [n, blocks, block * bits / 8] and packed zeros [n, ceil(blocks * bits / 8)] are
    uint8, the low bits of a byte first. Where `tiled`, they are as `program.nbits_tiles` has them,
    and the epilogue may have an activation, a gate and a residual: y [m, n / 2] is act(column j)
    times column j + n / 2. Pointers: a q scale zero groups bias c gamma beta y workspace.
    """

    op: str = "MatMulNBits"
    trans_b: bool = True
    bits: int = 4
    """The bits of a weight."""
    block: int = 32
    """The weights that have one scale."""
    blocks: int = 1
    """The scales of a row: ceil(k / block)."""
    zero: str = ""
    """The zero points: "" (2^(bits - 1)), "packed" (uint8, as q) or "float" (of a's type)."""
    groups: bool = False
    """int32 [k] says which block each k belongs to, instead of k // block."""
    static_b: bool = False
    """q, scale and zero are the same throughout a graph."""
    tiled: bool = False
    """q and scale, with the zero points in it, are constants in the order of an mma."""
    norm: str = ""
    """a's rows are normalised first: "rms" or "layer", by gamma and beta [k] and `epsilon`."""
    epsilon: float = 0.0

    @property
    def row_bytes(self) -> int:
        """The bytes of a row of packed weights."""
        return self.blocks * self.block * self.bits // 8

    @property
    def bytes(self) -> int:
        """a, the packed weights and their scales read, y written."""
        scales = self.n * self.blocks * ITEMSIZE[self.dtype]
        columns = self.n // 2 if self.epilogue.gate else self.n * (1 + bool(self.epilogue.residual))
        rows = self.m * (self.k + columns) * ITEMSIZE[self.dtype]
        return self.n * self.row_bytes + scales + rows


@dataclass(frozen=True)
class IntegerProduct(Contraction):
    """y[batch, m, n] = Σ_k (a[batch, m, k] - za) (b[batch, n, k] - zb), modulo 2^32.

    `dtype` is a's, int8 or uint8; y is int32. Pointers: a b za zb y.
    """

    op: str = "GemmInteger"
    out_dtype: str = "int32"
    trans_b: bool = True
    b_dtype: str = "int8"
    za: str = ""
    """a's zero point: "" (0), "one" number or "each": one a row of a. `zb`: one a column of y."""
    zb: str = ""
    za_step: int = 0
    """The elements from the zero points of one inner batch to the next's."""
    lda: int = 0
    """The bytes between a's rows, a multiple of 16; k is contiguous. `ldb`: b's."""
    ldb: int = 0
    a_strides: tuple[int, ...] = ()
    """The bytes between batches, one a batch axis (two at most, 0 broadcasts)."""
    b_strides: tuple[int, ...] = ()

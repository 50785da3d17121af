"""Problem (what is computed) and Config (how): frozen scalars."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property, partial
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from onnx_fuse.program.epilogue import DEFAULTS as EPILOGUE_FIELDS
from onnx_fuse.program.epilogue import NONE as NO_EPILOGUE
from onnx_fuse.program.epilogue import Epilogue
from onnx_fuse.program.hardware import CHIPS as CHIPS
from onnx_fuse.program.hardware import Hardware as Hardware
from onnx_fuse.program.size import OpenSize, Trace, hint, size_class, upper_bound, wide_size_class

if TYPE_CHECKING:
    from onnx_fuse.program.expression import Tail

Value = bool | int | float | str | tuple[int, ...]

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "float4_e2m1fn": 1, "int4": 1, "uint4": 1, "int2": 1, "uint2": 1,
}  # fmt: skip
"""Bytes of an element on the device. Elements of less than 8 bits take one byte each, as in NumPy,
so that views and copies treat them as any other; only what `MatMulNBits` reads is packed, and that
is a tensor of uint8 to everyone else."""

PRECISIONS = {
    "fp32": ("float32", "ieee"), "tf32": ("float32", "tf32"),
    "bf16x3": ("float32", "bf16x3"), "bf16x6": ("float32", "bf16x6"),
    "bf16": ("bfloat16", "ieee"), "fp16": ("float16", "ieee"),
}  # fmt: skip
"""What a user may ask for -> the dtype that is computed in, and `GemmProblem.math`."""
TRAINING_PRECISIONS = PRECISIONS | {"fp8": PRECISIONS["bf16"]}
"""The same for training, where "fp8" has its linear products in float8 (`ops.fused.float8`)."""
FEW = 16
"""Queries up to which attention is a token's or a few: the kernels then have one tile of them."""
KEPT_TILE = 4096
"""Flags of which KeptCounts gives one count. Here, since operators read it: the problems of data
movement take a tenth of a second to import."""

_PLAIN = frozenset({type(None), bool, int, float, str})
"""The types of most fields, none of which holds an open size."""
# made once: `int | Size` in a call of isinstance is made at each
_INTEGERS = (int, OpenSize)


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def _sizes(value: object) -> Iterator[OpenSize]:
    """The open sizes in a field or an extra."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return
    if isinstance(value, OpenSize):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _sizes(part)
    elif is_dataclass(value):
        for name in _names(kind):
            inner = getattr(value, name)
            if type(inner) not in _PLAIN:
                yield from _sizes(inner)


def _is_open(value: object) -> bool:
    return any(True for _ in _sizes(value))


def _with(value: object, number: Callable[[Any], int]) -> Any:
    """The value of a field, with `number` applied to each open size in it."""
    if isinstance(value, OpenSize):
        return number(value)
    if isinstance(value, tuple):
        return tuple(_with(part, number) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        inner = {name: _with(getattr(value, name), number) for name in _names(type(value))}
        return replace(value, **inner)
    return value


def _pairs(attrs: dict[str, Value]) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted(attrs.items()))


OperandRow: TypeAlias = tuple[str, str, int]
"""Names of operands, their dtype ("": any), and the number of elements of each."""


@cache
def _parsed(text: str) -> tuple[tuple[str, list[str]], ...]:
    parts = (row.partition(":") for row in text.split(";"))
    return tuple((names.strip(), rest.split()) for names, _, rest in parts)


def rows_of(p: AnyProblem, text: str) -> Iterator[OperandRow]:
    """Rows of operands of a problem: "names: dtype factors", with semicolons between them.

    The dtype is a type's name, the problem's field that holds it, "result" for what a tail or the
    problem stores, or "any". The product of the factors, which are numbers, fields of the problem
    (a text is 1, or 0 if it is empty), lengths of such (#dims) and whether one is not set (!dims),
    is the number of elements; without factors, or where one is 0, none is known.
    """
    for names, (dtype, *factors) in _parsed(text):
        if dtype == "result":
            tail = getattr(p, "tail", None)
            dtype = tail.dtype if tail else p.dtype  # type: ignore[attr-defined]
        dtype = "" if dtype == "any" else getattr(p, dtype, dtype)
        yield names, dtype, _product(p, factors) if factors else 0


def _product(p: AnyProblem, factors: Iterable[str]) -> int:
    return prod(_factor(p, name) for name in factors)


def _factor(p: AnyProblem, name: str) -> int:
    if name.isdigit():
        return int(name)
    if name[0] == "#":
        return len(getattr(p, name[1:]))
    if name[0] == "!":
        return not getattr(p, name[1:])
    size = attrgetter(name)(p)
    return bool(size) if isinstance(size, str) else prod(size) if isinstance(size, tuple) else size


P = TypeVar("P", bound="AnyProblem")
Q = TypeVar("Q", bound="Contraction")


class AnyProblem:
    """What every problem knows; a frozen dataclass, whose fields say what is to be computed.

    `op` is the operator whose candidates serve it (`kernels.MODULES`): the name of the class, where
    that says no other and has none as a field. Sizes among the fields may be open.
    """

    op: str
    operands: ClassVar[str] = ""
    """What its kernels touch, as `rows_of` reads it, where `spec.TABLE` has no function for it."""
    moves: ClassVar[str] = ""
    """What counts as read and written, in the same form; "": all operands, each once."""
    counted: ClassVar[str] = ""
    """The factors, as of a row of operands, of which one is 0 where there is nothing to compute;
    "": there is nothing where no byte is moved."""
    work: ClassVar[str] = ""
    """The factors of `flops`; "": 0, of a pass that memory bounds."""
    multiplied: ClassVar[str] = "float32"
    """The type whose rate these have, or the field that holds it."""
    result: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        members = {**vars(cls), **vars(cls).get("__annotations__", {})}
        if "op" not in members and "op" not in getattr(cls, "__dataclass_fields__", {}):
            cls.op = cls.__name__

    def fields(self) -> dict[str, Any]:
        """The values of the fields by name."""
        return {name: getattr(self, name) for name in _names(type(self))}  # type: ignore[arg-type]

    @property
    def fields_given(self) -> dict[str, Any]:
        """The fields that are not as they are by default, by name."""
        usual = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        items = self.fields().items()
        return {k: v for k, v in items if v is not usual[k] and v != usual[k]}

    @cached_property
    def trace(self) -> Trace | None:
        """The trace of its open sizes, None where all are plain."""
        size = next(_sizes(tuple(self.fields().values())), None)
        return None if size is None else size.trace

    @property
    def wide(self) -> Collection[str]:
        """The fields whose open sizes are of few, wide classes."""
        return ()

    def upper_bound(self: P) -> P:
        """This problem at the largest sizes of its class: what its choices are made for."""
        if self.trace is None:
            return self
        changed = {}
        for name, value in self.fields().items():
            if type(value) not in _PLAIN and _is_open(value):
                classes = wide_size_class if name in self.wide else size_class
                changed[name] = _with(value, partial(upper_bound, classes=classes))
        return replace(self, **changed) if changed else self  # type: ignore[type-var]

    def concrete(self: P) -> P:
        """This problem with plain numbers for its open sizes, for messages: nothing is guarded."""
        changed = {k: _with(v, hint) for k, v in self.fields().items() if _is_open(v)}
        return replace(self, **changed) if changed else self  # type: ignore[type-var]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (_product(self, self.counted.split()) if self.counted else self.bytes)

    @property
    def flops(self) -> int:
        """Operations of the chip's multipliers; 0 for a pass that memory bounds."""
        return _product(self, self.work.split()) if self.work else 0

    @property
    def bytes(self) -> int:
        """What `moves` says, or each operand read or written once."""
        if not (text := self.moves or self.operands):
            raise TypeError(f"{type(self).__name__} does not say what it moves")
        rows = rows_of(self, text)
        return sum(len(names.split()) * ITEMSIZE[dtype] * count for names, dtype, count in rows)

    @property
    def stored(self) -> str:
        """The result that a `Tail` may be applied to, "" where none may, or one has been."""
        return "" if getattr(self, "tail", None) else self.result

    def with_tail(self: P, tail: Tail) -> P:
        """This problem with `tail` applied to the result that it stores."""
        return replace(self, tail=tail)  # type: ignore[type-var]

    def rate(self, hw: Hardware) -> float:
        """The chip's rate for `flops`, operations a second."""
        return hw.rate(getattr(self, self.multiplied, self.multiplied))

    def floor(self, hw: Hardware, moved: int = 0) -> float:
        """Seconds that no kernel beats: `flops` at the chip's rate, `moved` bytes at its own.

        Without `moved`, `bytes`.
        """
        return max(self.flops / self.rate(hw), (moved or self.bytes) / hw.bandwidth)

    def __str__(self) -> str:
        """The operator, and the fields that differ from their defaults."""
        return " ".join((self.op, *(f"{k}={v}" for k, v in self.fields_given.items())))


@dataclass(frozen=True)
class Contraction(AnyProblem):
    """A product: y[batch, m, n] = op(a)[m, k] . op(b)[k, n], and its epilogue.

    `dtype` is the operands', `out_dtype` the result's; `math` says which products are allowed
    ("ieee" fp32 products, "tf32", "bf16x3", "bf16x6"; 16-bit operands ignore it). One problem is
    one key of the tuning records.
    """

    counted = "m n"
    op: str
    m: int = 1
    n: int = 1
    k: int = 1
    batch: tuple[int, ...] = ()
    dtype: str = "float32"
    out_dtype: str = ""
    trans_a: bool = False
    trans_b: bool = False
    math: str = "ieee"
    epilogue: Epilogue = NO_EPILOGUE

    @classmethod
    def of(cls: type[Q], op: str, **values: Value | Epilogue) -> Q:
        """Make a problem from keywords: its own fields and its epilogue's, by name."""
        return cls(op).replace(**values)

    def replace(self: Q, **values: Value | Epilogue) -> Q:
        """This problem with some fields, or fields of its epilogue, replaced."""
        fields: dict[str, Any] = {k: v for k, v in values.items() if k not in EPILOGUE_FIELDS}
        behind: dict[str, Any] = {k: v for k, v in values.items() if k in EPILOGUE_FIELDS}
        if behind:
            fields["epilogue"] = replace(fields.get("epilogue", self.epilogue), **behind)
        return replace(self, **fields)

    def with_epilogue(self: Q, **values: Any) -> Q:
        """This problem with some fields of its epilogue replaced."""
        return replace(self, epilogue=replace(self.epilogue, **values))

    @property
    def extras(self) -> dict[str, Value]:
        """The fields beside a plain product's, and the epilogue's, that are not as by default."""
        usual = _beside_a_product(type(self))  # type: ignore[arg-type]
        fields = {k: value for k in usual if (value := getattr(self, k)) != usual[k]}
        return dict(sorted({**fields, **self.epilogue.given}.items()))

    def among(self, *names: str) -> list[str]:
        """Those of the given names whose fields are set, its own or its epilogue's."""
        return [k for k in names if getattr(self.epilogue if k in EPILOGUE_FIELDS else self, k)]

    @property
    def out(self) -> str:
        """The dtype of the result."""
        return self.out_dtype or self.dtype

    @property
    def batches(self) -> int:
        """The number of matrices in a batch."""
        return prod(self.batch)

    @property
    def flops(self) -> int:
        """2 m n k batch; the gradient of a Gemm has two products."""
        products = 2 if self.op.endswith("GemmGrad") else 1
        return 2 * products * self.batches * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Each operand read once and the result written once."""
        operands = self.m * self.k + self.k * self.n
        results = self.m * self.n // (2 if self.epilogue.gate else 1)
        return self.batches * (operands * ITEMSIZE[self.dtype] + results * ITEMSIZE[self.out])

    def rate(self, hw: Hardware) -> float:
        """The rate of its products; fp32 by split bfloat16 takes several of them."""
        passes = {"bf16x3": 3, "bf16x6": 6}.get(self.math, 1) if self.dtype == "float32" else 1
        kind = "tf32" if (self.dtype, self.math) == ("float32", "tf32") else self.dtype
        return hw.rate("bfloat16" if passes > 1 else kind) / passes

    def __str__(self) -> str:
        p = self.concrete()
        shape = f"m={p.m} n={p.n} k={p.k}" + (f" batch={p.batch}" if p.batch else "")
        types = self.dtype if self.out == self.dtype else f"{self.dtype}->{self.out}"
        layout = ("T" if self.trans_a else "N") + ("T" if self.trans_b else "N")
        extra = "".join(f" {key}={value}" for key, value in p.extras.items())
        math = f" {self.math}" if self.dtype == "float32" else ""
        return f"{self.op} {shape} {types} {layout}{math}{extra}"


@cache
def _beside_a_product(kind: type[Contraction]) -> dict[str, Any]:
    """The defaults of the fields that a kind of product has beside a plain one's."""
    return {f.name: f.default for f in fields(kind) if f.name not in _names(Contraction)}


@dataclass(frozen=True)
class GemmProblem(Contraction):
    """A Gemm, or a product behind a norm (LayerNormGemm) or its gradients, as `op` says.

    Pointers of a Gemm: a b y c z row0..row3 col0 col1 part workspace (`program.epilogue`); those of
    the others stand at the head of their candidates' modules.
    """

    lda: int | None = None
    """The stride of a's rows in elements; None: they are dense. `ldb`: of b's."""
    ldb: int | None = None
    ldy: int = 0
    """The stride of y's rows, of whole 16 bytes, where it is not n; what a row holds beyond column
    n is left as it is."""
    a_strides: tuple[int, ...] = ()
    """One stride a batch axis, 0 broadcasts; (): the matrices are dense. So of b and c."""
    b_strides: tuple[int, ...] = ()
    c_strides: tuple[int, ...] = ()
    align: int = 16
    """The alignment of the operands' addresses in bytes; 16 also stands for any larger one."""
    static_b: bool = False
    """b, or what was folded into it, is the same throughout a graph: it may be read ahead of it."""
    epsilon: float = 1e-5
    """The norm's."""
    rms: bool = False
    """The norm is an RMSNormalization: it has no mean and no beta."""
    folded: bool = False
    """Whether wq, cs and cv hold the norm's parameters (`kernels.norm_launches.fold`)."""
    stats: bool = False
    """mean and rstd are given: the producer of x wrote them."""
    parts: int = 0
    """The number of moments of a row of x in "part" (`Epilogue.moments`). row0 and row1, or mean
    and rstd, are written from them."""
    rows: str = ""
    """Row statistics that a Gemm makes beside its result, where k is not split. "stats", "rms":
    row0 and row1 are written, from a's rows; "tiles" (with dx): row2 and row3 are the row means of
    the product and of product z, and "part" [tiles of m, k] takes the column sums of a."""
    add: str = ""
    """A gradient's dx is added to "add", a residual's gradient ("apart"), or to what dx holds
    ("here")."""
    frozen: bool = False
    """Of a gradient: dx alone is read, so that what else there is may be left out."""
    turned: bool = False
    """The weights of a LayerNormLeafGrad are stored as [k, n]."""
    planes: int = 0
    """The number of bfloat16 planes that represent the float32 operands; 0: they are no planes."""
    b_dtype: str = ""
    """The type of b where it is not a's: of two float8 operands. They have "scale_a" and "scale_b",
    a float32 each, by which the sum is multiplied."""

    @property
    def reads_c(self) -> bool:
        """Whether the epilogue reads one more [M, N] operand, "c"."""
        return bool(self.epilogue.among("beta", "dact", "dx", "dw", "residual"))

    @property
    def ld(self) -> tuple[int, int]:
        """Row strides of a and b in elements."""
        return (
            (self.m if self.trans_a else self.k) if self.lda is None else self.lda,
            (self.k if self.trans_b else self.n) if self.ldb is None else self.ldb,
        )

    @property
    def ldc(self) -> tuple[int, int]:
        """Strides of c's rows and columns in elements."""
        rows = self.epilogue.c_rows
        return self.n if rows is None else rows, self.epilogue.c_cols

    def batch_strides(self, name: str, dense: int) -> tuple[int, ...]:
        """The three batch strides of a, b, c, or of y, which is dense; zeros in front."""
        strides = {"a": self.a_strides, "b": self.b_strides, "c": self.c_strides}.get(name, ())
        if not strides:
            for size in reversed(self.batch):
                strides = (dense, *strides)
                dense *= size
        return (0,) * (3 - len(strides)) + strides


@dataclass(frozen=True)
class KernelConfig:
    """How a kernel does it: tile sizes, stages, splits, as the kernel's own named scalars."""

    attrs: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, **attrs: Value) -> KernelConfig:
        """Make a configuration from keywords."""
        return cls(_pairs(attrs))

    def replace(self, **attrs: Value) -> KernelConfig:
        """This config with some scalars replaced."""
        return KernelConfig(_pairs(dict(self.attrs) | attrs))

    @cached_property
    def _named(self) -> dict[str, Value]:
        return dict(self.attrs)

    def attr(self, name: str, default: Value = 0) -> Value:
        """The scalar called `name`, or `default`."""
        return self._named.get(name, default)

    def integer(self, name: str, default: int = 0) -> int:
        """The scalar called `name` as an int."""
        value = self._named.get(name, default)
        assert isinstance(value, _INTEGERS), f"{name}={value!r} is not an int"
        return value

    def integers(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The scalar called `name` as a tuple of ints."""
        value = self._named.get(name, default)
        assert isinstance(value, tuple), f"{name}={value!r} is not a tuple"
        return value

    def text(self, name: str, default: str = "") -> str:
        """The scalar called `name` as a string."""
        value = self._named.get(name, default)
        assert isinstance(value, str), f"{name}={value!r} is not a string"
        return value

    def __str__(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.attrs) or "-"


@dataclass(frozen=True)
class Choice:
    """The kernel chosen for a problem: its name, its configuration, and the reason.

    `seconds` are predicted for the largest sizes of the problem's class, or measured by a tuning
    record; None of a rule's kernel for open sizes, each of which takes its own time.
    """

    kernel: str
    config: KernelConfig
    reason: str
    seconds: float | None = None

    @property
    def how(self) -> str:
        """The kernel's name, and its configuration where it has one."""
        return f"{self.kernel} {self.config}".removesuffix(" -")

    def __str__(self) -> str:
        took = "" if self.seconds is None else f", {self.seconds * 1e6:.1f} us"
        return f"{self.how}: {self.reason}{took}"


@dataclass(frozen=True)
class Collective(AnyProblem):
    """A bucket of tensors "x.i" of `sizes` elements, over `ranks` processes, to "y.i".

    `kind` "AllReduce": their sum, on every rank; "ReduceScatter": the rank's part of the sum;
    "AllGather": the parts of all ranks in their order.
    """

    kind: str
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    ranks: int
    bucket: int

    @property
    def bytes(self) -> int:
        """The bytes that each rank contributes to the exchange."""
        pairs = zip(self.sizes, self.dtypes, strict=True)
        return sum(size * ITEMSIZE[dtype] for size, dtype in pairs)


Prefs: TypeAlias = Mapping[str, str] | None
"""Operator -> the candidate that the user asks for."""

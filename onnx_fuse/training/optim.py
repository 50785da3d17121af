"""Optimizers, as immutable values, and beside them the learning-rate schedules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any, ClassVar, TypeAlias

import onnx_fuse.ir  # noqa: F401  # first: it imports onnx_ir without sympy

# isort: split
import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.errors import UsageError, unknown
from onnx_fuse.ir.build import required
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.rules import typed
from onnx_fuse.ops.shape_ops import Writer
from onnx_fuse.options import check_types
from onnx_fuse.rewrite import packed_weights
from onnx_fuse.training.groups import Group, find, layer_decay
from onnx_fuse.training.schedules import (
    Schedule,
    constant,
    cosine,
    custom,
    cyclic,
    exponential,
    linear,
    multistep,
    onecycle,
    polynomial,
    restarts,
    sequential,
    step,
)

__all__ = [
    "SGD",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "Group",
    "Lion",
    "Muon",
    "NAdam",
    "Optimizer",
    "RMSprop",
    "Schedule",
    "constant",
    "cosine",
    "custom",
    "cyclic",
    "exponential",
    "from_json",
    "layer_decay",
    "linear",
    "make",
    "multistep",
    "onecycle",
    "polynomial",
    "restarts",
    "sequential",
    "step",
    "to_json",
]
__dir__ = __all__.copy

Values: TypeAlias = Sequence[ir.Value]
_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "betas": ("at least 0 and below 1", lambda v: 0 <= v < 1),
    "beta2_decay": ("at most 0", lambda v: v <= 0),
    "d": ("at least 1", lambda v: v >= 1),
    **dict.fromkeys(("alpha", "eps", "momentum"), ("at least 0", lambda v: v >= 0)),
}
"""What the numbers of an optimizer must be, as PyTorch has it."""


@dataclass(frozen=True)
class Optimizer:
    """The base of all optimizers. Names and defaults of hyperparameters are PyTorch's.

    A subclass names its update op of `ops.update` in `rule`, and its state tensors in `slots`.
    """

    lr: float | Schedule = 1e-3
    """The learning rate, as a number or a Schedule."""
    weight_decay: float = 0.0
    """The factor λ of the weight decay."""
    no_decay: tuple[str, ...] = ()
    """Globs over the names of parameters that have no weight decay."""
    groups: tuple[Group, ...] = ()
    """Groups of weights with settings of their own; the first one that matches a weight counts."""

    counts: ClassVar[bool] = False  # the op reads the number of the update
    shared: ClassVar[tuple[str, ...]] = ()  # slots that are one number, equal for all weights

    def __post_init__(self) -> None:
        check_types(self)
        for field in dataclasses.fields(self):
            kinds, value = str(field.type).split(", "), getattr(self, field.name)
            if kinds[0].startswith("tuple[float") and (
                len(value) != len(kinds)
                or not all(
                    isinstance(v, Real) or (v is None and "None" in kind)
                    for v, kind in zip(value, kinds, strict=True)
                )
            ):
                raise UsageError(f"{field.name} is {value}: it takes {len(kinds)} numbers")
            words, holds = _RANGES.get(field.name, ("", lambda _: True))
            numbers = value if isinstance(value, tuple | list) else [value]
            if not all(v is None or holds(v) for v in numbers):
                raise UsageError(f"{field.name} is {value}: it must be {words}")
        if not isinstance(self.lr, Schedule):
            object.__setattr__(self, "lr", Schedule(self.lr))
        object.__setattr__(self, "no_decay", tuple(self.no_decay))
        object.__setattr__(self, "groups", tuple(map(self._relative, self.groups)))

    def _relative(self, group: Group) -> Group:
        """The group with its rate as a factor, which stays when the schedule becomes another."""
        assert isinstance(self.lr, Schedule)
        if group.lr is None:
            return group
        if not self.lr.lr:
            raise UsageError("a group has a learning rate, and the optimizer's is 0: give a scale")
        return dataclasses.replace(group, lr=None, scale=group.scale * group.lr / self.lr.lr)

    def setting(self, name: str) -> tuple[float, float, int]:
        """(factor on the rate, weight decay, updates before the first) of the weight `name`."""
        group = find(self.groups, name) or Group(())
        decay = self.weight_decay if group.weight_decay is None else group.weight_decay
        if any(fnmatchcase(name, glob) for glob in self.no_decay):
            decay = 0.0
        return group.scale, decay, group.start

    def rate(self, step: int) -> float:
        """The learning rate of update `step`, where the first update is 0."""
        assert isinstance(self.lr, Schedule)
        return self.lr(step)

    @property
    def decoupled(self) -> bool:
        """Whether the update op applies the decay, which is otherwise part of the gradient."""
        return False

    @property
    def slots(self) -> dict[str, float]:
        """The initial values of a parameter's state tensors, by name; `initial` has the shapes."""
        return {}

    def initial(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> dict[str, Array]:
        """The first state tensors, by name, of parameter `name` of this shape and NumPy dtype."""
        return {
            slot: np.broadcast_to(np.array(value, dtype), () if slot in self.shared else shape)
            for slot, value in self.slots.items()
        }  # one number in memory each

    def elementwise(self, name: str, shape: Sequence[int]) -> bool:
        """Whether each entry of weight `name`, of this `shape`, is updated by its own gradient."""
        return True

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        """The update op for a parameter of this weight decay, and its attributes."""
        raise UsageError(f"choose an optimizer: {', '.join(TABLE)}")

    def update(
        self, op: Writer, name: str, w: ir.Value, g: ir.Value, slots: Values, *rates: ir.Value
    ) -> list[ir.Value]:
        """Emit the nodes that update parameter `name`, and return its new value and its new slots.

        `op` builds the nodes, `w` is the parameter's value, `g` its gradient, `slots` are its state
        tensors, `rates` are its rate (float32) and the number of its update (int64, from 1).
        """
        lr, step = rates
        _, decay, _ = self.setting(name)
        if decay and not self.decoupled:
            g = op.Add(g, op.Mul(w, decay))  # the gradient of λ/2 |w|² as well
        kind, attributes = self.rule(decay)
        inputs = [w, g, *slots, lr, *([step] if self.counts else [])]
        results = op.node(kind, inputs, domain=FUSE, outputs=1 + len(slots), **attributes)
        return list(results) if slots else [results]


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent, as torch.optim.SGD: w becomes w - lr g.

    With momentum, m = μ m + g and w becomes w - lr m; Nesterov's variant is w - lr (g + μ m).
    """

    lr: float | Schedule = 1e-2
    momentum: float = 0.0
    """The factor μ of the running sum of gradients."""
    nesterov: bool = False
    """Whether the update looks ahead along the momentum."""

    @property
    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        if not self.momentum:
            return "SgdUpdate", {}
        return f"{'Nesterov' if self.nesterov else 'Momentum'}Update", {"momentum": self.momentum}


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, as torch.optim.Adam: w becomes w - lr m̂ / (√v̂ + eps).

    m̂ and v̂ are the unbiased running means of g and g².
    """

    betas: tuple[float, float] = (0.9, 0.999)
    """The factors by which the running means of g and g² decay at each update."""
    eps: float = 1e-8
    """The number that keeps the denominator from 0."""

    counts: ClassVar[bool] = True
    slots: ClassVar[dict[str, float]] = {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        beta1, beta2 = self.betas
        return "AdamUpdate", {"beta1": beta1, "beta2": beta2, "epsilon": self.eps}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam on w (1 - lr λ), as torch.optim.AdamW: the decay bypasses the running means."""

    weight_decay: float = 1e-2

    decoupled: ClassVar[bool] = True

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        kind, attributes = super().rule(decay)
        return (
            ("AdamWUpdate", attributes | {"weight_decay": decay}) if decay else (kind, attributes)
        )


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad, as torch.optim.Adagrad: s = s + g², and w becomes w - lr g / (√s + eps)."""

    lr: float | Schedule = 1e-2
    eps: float = 1e-10
    """The number that keeps the denominator from 0."""
    initial_accumulator_value: float = 0.0
    """The first value of s."""

    @property
    def slots(self) -> dict[str, float]:
        return {"sum": self.initial_accumulator_value}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        return "AdagradUpdate", {"epsilon": self.eps}


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion (Chen et al., 2023, arXiv:2302.06675).

    w becomes w (1 - lr λ) - lr sign(β1 m + (1-β1) g), and then m = β2 m + (1-β2) g.
    """

    lr: float | Schedule = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    """The factors β1 and β2."""

    decoupled: ClassVar[bool] = True
    slots: ClassVar[dict[str, float]] = {"exp_avg": 0.0}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        beta1, beta2 = self.betas
        return "LionUpdate", {"beta1": beta1, "beta2": beta2, "weight_decay": decay}


@dataclass(frozen=True)
class RMSprop(Optimizer):
    """RMSprop, as torch.optim.RMSprop: v = α v + (1-α) g², and w becomes w - lr g / (√v + eps).

    Centered, a = α a + (1-α) g, and √(v - a²) takes the place of √v. With momentum, m = μ m plus
    the quotient, and w becomes w - lr m.
    """

    lr: float | Schedule = 1e-2
    alpha: float = 0.99
    """The factor α by which the running means decay at each update."""
    eps: float = 1e-8
    """The number that keeps the denominator from 0."""
    momentum: float = 0.0
    """The factor μ of the running sum of quotients."""
    centered: bool = False
    """Whether the running mean of the gradient is subtracted, which leaves the variance."""

    @property
    def slots(self) -> dict[str, float]:
        kept = {"square_avg": True, "grad_avg": self.centered, "momentum": bool(self.momentum)}
        return {name: 0.0 for name, needed in kept.items() if needed}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        attributes = {"share": 1 - self.alpha, "epsilon": self.eps}
        moving = {"momentum": self.momentum} if self.momentum else {}
        variant = f"{'Centered' * self.centered}{'Momentum' * bool(moving)}"
        return f"Rmsprop{variant}Update", attributes | moving


@dataclass(frozen=True)
class NAdam(Adam):
    """Adam with Nesterov's momentum, as torch.optim.NAdam.

    With μ(t) = β1 (1 - 0.96^(t ψ) / 2) and the product p(t) of all μ up to t, w becomes
    w - lr ((1-μ(t)) / (1-p(t)) g + μ(t+1) / (1-p(t+1)) m) / (√v̂ + eps).
    """

    lr: float | Schedule = 2e-3
    momentum_decay: float = 4e-3
    """The factor ψ."""
    decoupled_weight_decay: bool = False
    """Whether the decay bypasses the running means, as AdamW's does."""

    shared: ClassVar[tuple[str, ...]] = ("mu_product",)
    slots: ClassVar[dict[str, float]] = Adam.slots | {"mu_product": 1.0}

    @property
    def decoupled(self) -> bool:
        return self.decoupled_weight_decay

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        decay = decay if self.decoupled_weight_decay else 0.0
        more = {"momentum_decay": self.momentum_decay, "weight_decay": decay}
        return "NadamUpdate", super().rule(decay)[1] | more


@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW whose running means are kept in 8 bits.

    256 entries share the largest magnitude s among them, in the weight's dtype; m is s (q/127)³
    and v is s (q/255)⁴. So small entries have finer steps, and no v > 0 becomes 0. A weight of
    less than 4096 entries, or of a number that 256 does not divide, has AdamW's states.
    """

    def elementwise(self, name: str, shape: Sequence[int]) -> bool:
        return math.prod(shape) < 4096 or math.prod(shape) % _BLOCK > 0

    def initial(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> dict[str, Array]:
        if self.elementwise(name, shape):
            return super().initial(name, shape, dtype)
        first: dict[str, Array] = {}
        for slot, code in (("exp_avg", np.int8), ("exp_avg_sq", np.uint8)):
            for part, kind, width in (("", code, _BLOCK), (".scale", dtype, 1)):
                sizes = math.prod(shape) // _BLOCK, width
                first[f"{slot}{part}"] = np.broadcast_to(np.zeros((), kind), sizes)
        return first

    def update(
        self, op: Writer, name: str, w: ir.Value, g: ir.Value, slots: Values, *rates: ir.Value
    ) -> list[ir.Value]:
        if len(slots) == 2:
            return super().update(op, name, w, g, slots, *rates)
        rows, changes = (typed(op.Reshape(each, [-1, _BLOCK]), w) for each in (w, g))
        means = [
            op.formula(decode, q=q, s=s)
            for (decode, _), q, s in zip(_CODES, slots[::2], slots[1::2], strict=True)
        ]
        new, *means = super().update(op, name, rows, changes, means, *rates)
        codes = [
            op.formula(encode, x=typed(mean, w))
            for (_, encode), mean in zip(_CODES, means, strict=True)
        ]
        return [op.Reshape(new, op.shape_of(w)), *codes[0], *codes[1]]


_BLOCK = 256
_NEAR = "s = ReduceMax(Abs(x), [1]); r = Abs(x) / Where(s > 0, s, 1)"
_CODES = (
    (
        "c = CastLike(q, s) / 127; c * c * c * s",
        f"{_NEAR}; q = Cast <to = 3> (Round(127 * Sign(x) * Pow(r, 1 / 3))); q, s",
    ),
    (
        "c = CastLike(q, s) / 255; c * c * (c * c) * s",
        f"{_NEAR}; q = Cast <to = 2> (Max(Round(255 * Sqrt(Sqrt(r))), 1)); q, s",
    ),
)
"""Of m and of v: x from the code q and the scale s of its block, and both from x."""


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor, as torch.optim.Adafactor: v = r cᵀ / mean(r), of running means r, c of g².

    r is over the last axis of a weight, c over the one before it; a vector has all of v. The rate
    is relative to the weight: min(lr, 1/√t) max(eps[1], RMS(w)) / max(1, RMS(g/√v) / d).
    """

    lr: float | Schedule = 1e-2
    beta2_decay: float = -0.8
    """The power of the update's number t that is the share of the newest g² in the means."""
    eps: tuple[float | None, float] = (None, 1e-3)
    """The least √v, where None is the dtype's epsilon; and the least RMS(w)."""
    d: float = 1.0
    """The RMS of g/√v above which the update is scaled down."""

    counts: ClassVar[bool] = True

    def elementwise(self, name: str, shape: Sequence[int]) -> bool:
        return False

    def initial(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> dict[str, Array]:
        sizes = {"variance": tuple(shape)}
        if len(shape) > 1:
            sizes = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}
        return {slot: np.broadcast_to(np.zeros((), dtype), size) for slot, size in sizes.items()}

    def update(
        self, op: Writer, name: str, w: ir.Value, g: ir.Value, slots: Values, *rates: ir.Value
    ) -> list[ir.Value]:
        least, rms = self.eps
        if least is None:
            least = float(np.finfo(required(w.dtype).numpy()).eps)
        means = """r1 = r + share * (ReduceMean <keepdims = 1> (g * g, [-1]) - r)
            c1 = c + share * (ReduceMean <keepdims = 1> (g * g, [-2]) - c)
            v = r1 * c1 / Max(ReduceMean <keepdims = 1> (r1, [-2]), least)"""
        if len(slots) == 1:
            means = "v = c + share * (g * g - c); r1 = v; c1 = v"
        w1, *news = op.formula(
            f"""td = Cast <to = 11> (t); lrd = Cast <to = 11> (lr)
            share = CastLike(Pow(td, power), w); kept = CastLike(1 - lrd * decay, w) * w
            rms_w = Sqrt(ReduceMean <keepdims = 0> (w * w))
            rate = CastLike(Min(lrd, 1 / Sqrt(td)), w) * Max(rms_w, rms)
            {means}
            u = g / Sqrt(Max(v, least * least))
            w1 = kept - rate / Max(Sqrt(ReduceMean <keepdims = 0> (u * u)) / d, 1) * u
            w1, r1, c1""",
            **{"w": w, "g": g, "r": slots[0], "c": slots[-1], "lr": rates[0], "t": rates[1]},
            **{"least": least, "rms": rms, "d": self.d, "power": self.beta2_decay},
            decay=self.setting(name)[1],
        )
        return [w1, *news[: len(slots)]]


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon, as torch.optim.Muon: matrices move by their momentum, made nearly orthogonal.

    m = μ m + (1-μ) g, and w becomes w (1 - lr λ) - lr f NS(g + μ (m - g)). NS divides a matrix by
    its norm and repeats x = a x + (b G + c G²) x with G = x xᵀ. Weights of other
    ranks, and those that `adamw` names, such as embeddings, are updated by AdamW.
    """

    weight_decay: float = 0.1
    eps: float = 1e-7
    """The least norm of a matrix, and AdamW's epsilon."""
    momentum: float = 0.95
    """The factor μ of the running mean of gradients."""
    nesterov: bool = True
    """Whether the update looks ahead along the momentum; otherwise NS takes m."""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    """The factors a, b and c."""
    ns_steps: int = 5
    """The number of iterations of NS."""
    adjust_lr_fn: str = "original"
    """The factor f of a matrix [A, B]: √max(1, A/B) for "original", 0.2 √max(A, B) for
    "match_rms_adamw", which lets AdamW's rates be used."""
    adamw: tuple[str, ...] = ()
    """Globs over the names of matrices that AdamW updates."""
    ns_dtype: str = "float32"
    """What NS computes in: "float32", "float16" or, as PyTorch does and on a GPU, "bfloat16"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "adamw", tuple(self.adamw))
        for field, choices in (("adjust_lr_fn", _FACTORS), ("ns_dtype", _NS_DTYPES)):
            if getattr(self, field) not in choices:
                raise UsageError(unknown(field, getattr(self, field), choices))
        if self.ns_steps < 1:
            raise UsageError(f"ns_steps is {self.ns_steps}: it must be at least 1")

    def elementwise(self, name: str, shape: Sequence[int]) -> bool:
        named = any(fnmatchcase(name, glob) for glob in self.adamw)
        return named or len(shape) != 2 or 0 in shape

    def initial(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> dict[str, Array]:
        if self.elementwise(name, shape):
            return super().initial(name, shape, dtype)
        return {"momentum_buffer": np.broadcast_to(np.zeros((), dtype), shape)}

    def update(
        self, op: Writer, name: str, w: ir.Value, g: ir.Value, slots: Values, *rates: ir.Value
    ) -> list[ir.Value]:
        if len(slots) == 2:
            return super().update(op, name, w, g, slots, *rates)
        ahead = "g + mu * (m1 - g)" if self.nesterov else "m1"
        m1, x = op.formula(
            f"""m1 = m + (1 - mu) * (g - m); u = {ahead}
            x = u / Max(Sqrt(ReduceSum <keepdims = 0> (u * u)), eps); m1, x""",
            **{"g": g, "m": slots[0], "mu": self.momentum, "eps": self.eps},
        )
        if self.ns_dtype != "float32":
            x = op.Cast(x, to=_NS_DTYPES[self.ns_dtype])
        a, b, c = self.ns_coefficients
        sizes = op.sizes_of(w)
        tall = all(isinstance(size, int) for size in sizes) and sizes[0] > sizes[1]
        for _ in range(self.ns_steps):
            gram = op.Gemm(x, x, **{"transA" if tall else "transB": 1})
            gram = op.Gemm(gram, gram, gram, alpha=c, beta=b)
            x = op.Gemm(*((x, gram) if tall else (gram, x)), x, beta=a)
        if w.metadata_props and packed_weights.parts(w)[1][0].perm is not None:
            sizes.reverse()  # the file has the transpose
        rows, columns = (float(d) if isinstance(d, int) else op.Cast(d, to=11) for d in sizes)
        new = op.formula(
            f"lrd = Cast <to = 11> (lr); kept = CastLike(1 - lrd * decay, w) * w; "
            f"kept - CastLike(lrd * {_FACTORS[self.adjust_lr_fn]}, w) * CastLike(x, w)",
            **{"w": w, "x": x, "lr": rates[0], "decay": self.setting(name)[1]},
            **{"rows": rows, "columns": columns},
        )
        return [new, m1]


_NS_DTYPES = {
    **{"float32": ir.DataType.FLOAT, "float16": ir.DataType.FLOAT16},
    "bfloat16": ir.DataType.BFLOAT16,
}
_FACTORS = {
    "original": "Sqrt(Max(rows / columns, 1))",
    "match_rms_adamw": "0.2 * Sqrt(Max(rows, columns))",
}


TABLE: dict[str, type[Optimizer]] = {
    cls.__name__.lower(): cls
    for cls in (
        *(SGD, Adam, AdamW, AdamW8bit, NAdam, RMSprop),
        *(Adagrad, Adafactor, Lion, Muon),
    )
}
"""The optimizers by the names that the command line and checkpoints use."""


def make(name: str, **options: object) -> Optimizer:
    """Make an optimizer by the name of its class in lower case, such as "adamw".

    `options` are its fields; those that are None take their defaults. Raises UsageError for an
    unknown name or option.
    """
    cls = TABLE.get(name)
    if cls is None:
        raise UsageError(unknown("optimizer", name, TABLE))
    settings: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    names = [f.name for f in dataclasses.fields(cls)]
    for key in settings:
        if key not in names:
            raise UsageError(f"{name} has no {key}: it has {', '.join(names)}")
    return cls(**settings)


def chosen(optimizer: Optimizer | str | None) -> Optimizer:
    """The optimizer that an argument is or names; AdamW for None. Raises UsageError."""
    if isinstance(optimizer, str):
        return make(optimizer)
    if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "groups")):
        kind = type(optimizer).__name__
        raise UsageError(
            f"an optimizer of type {kind}: give one of onnx_fuse.optim, such as AdamW(lr=1e-3), or "
            "its name"
        )
    return optimizer or AdamW()


def to_json(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer as JSON values, such as {"name": "adamw", "lr": {...}, ...}.

    A function of a schedule is text that names it.
    """
    assert isinstance(optimizer.lr, Schedule)
    fields = dataclasses.asdict(dataclasses.replace(optimizer, lr=optimizer.lr.lr))
    name = type(optimizer).__name__.lower()
    return {"name": name, **fields, "lr": optimizer.lr.to_json()}


def from_json(data: Mapping[str, Any]) -> Optimizer:
    """Make the optimizer that `to_json` described by `data`."""
    groups = tuple(Group(**group) for group in data["groups"])
    return make(**{**data, "lr": Schedule(**data["lr"]), "groups": groups})

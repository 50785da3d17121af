"""Optimizers and learning-rate schedules: values that know the nodes of one update."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.onnx.build import Builder
from onnx_fuse.onnx.common import FUSE

# ---- schedules ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Learning rate of each update: `warmup` updates up to `lr`, then a shape of `_SHAPES`.

    "constant"; "linear" and "cosine" reach `end` · lr after `steps` updates, warm-up included, and
    stay there; "step" multiplies by `gamma` every `every` updates.
    """

    lr: float
    shape: str = "constant"
    steps: int = 0
    warmup: int = 0
    end: float = 0.0
    every: int = 1
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.shape not in _SHAPES:
            raise UsageError(f"unknown schedule '{self.shape}': choose one of {', '.join(_SHAPES)}")
        if not 0 <= self.lr < math.inf:
            raise UsageError(f"the learning rate is {self.lr}: it must be finite and not negative")
        if self.warmup < 0 or self.every < 1:
            raise UsageError("a schedule's warmup is at least 0, and its every at least 1")
        if self.shape in ("linear", "cosine") and self.steps <= self.warmup:
            raise UsageError(
                f"a {self.shape} schedule of {self.steps} steps ends within its {self.warmup} "
                "steps of warm-up"
            )

    def __call__(self, step: int) -> float:
        """Rate of update `step`, the first being 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * _SHAPES[self.shape](self, step - self.warmup)

    def progress(self, done: int) -> float:
        """From 0 to 1 over the updates after the warm-up."""
        return min(done / (self.steps - self.warmup), 1.0)


# Factor on lr, `done` updates after the warm-up.
_SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": lambda s, done: 1.0,
    "linear": lambda s, done: 1 - (1 - s.end) * s.progress(done),
    "cosine": lambda s, done: s.end + (1 - s.end) * (1 + math.cos(math.pi * s.progress(done))) / 2,
    "step": lambda s, done: s.gamma ** (done // s.every),
}


def constant(lr: float, *, warmup: int = 0) -> Schedule:
    """lr, after `warmup` updates of linear growth."""
    return Schedule(lr, "constant", warmup=warmup)


def linear(lr: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """A straight line from lr to end · lr at update `steps`."""
    return Schedule(lr, "linear", steps, warmup, end)


def cosine(lr: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Half a cosine from lr to end · lr at update `steps`."""
    return Schedule(lr, "cosine", steps, warmup, end)


def step(lr: float, every: int, *, gamma: float = 0.1, warmup: int = 0) -> Schedule:
    """lr · gamma^k from update k · every on."""
    return Schedule(lr, "step", warmup=warmup, every=every, gamma=gamma)


# ---- optimizers --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Optimizer:
    """Hyperparameters; `lr` is a number or a Schedule. Names and defaults are PyTorch's.

    Parameters whose name matches a glob of `no_decay` get no weight decay. A subclass names its
    update op of `ops.update` in `rule`, and its state tensors in `slots`.
    """

    lr: float | Schedule = 1e-3
    weight_decay: float = 0.0
    no_decay: tuple[str, ...] = ()

    decoupled: ClassVar[bool] = False  # the op applies the decay; otherwise it goes into g
    counts: ClassVar[bool] = False  # the op reads the number of the update

    def __post_init__(self) -> None:
        if not isinstance(self.lr, Schedule):
            object.__setattr__(self, "lr", Schedule(self.lr))
        object.__setattr__(self, "no_decay", tuple(self.no_decay))

    def rate(self, step: int) -> float:
        """Learning rate of update `step`, the first being 0."""
        assert isinstance(self.lr, Schedule)
        return self.lr(step)

    @property
    def slots(self) -> dict[str, float]:
        """State tensors that a parameter has, each of its shape, with their initial value."""
        return {}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        """The update op for a parameter of this weight decay, and its attributes."""
        raise UsageError(f"choose an optimizer: {', '.join(TABLE)}")

    def update(
        self,
        op: Builder,
        name: str,
        w: ir.Value,
        g: ir.Value,
        slots: Sequence[ir.Value],
        lr: ir.Value,
        step: ir.Value,
    ) -> list[ir.Value]:
        """Emit the update of parameter `name`: its new value, then its new slots."""
        decay = self.weight_decay
        if any(fnmatchcase(name, glob) for glob in self.no_decay):
            decay = 0.0
        if decay and not self.decoupled:
            g = op.Add(g, op.Mul(w, decay))  # the gradient of λ/2 |w|² as well
        kind, attributes = self.rule(decay)
        inputs = [w, g, *slots, lr, *([step] if self.counts else [])]
        made = op.node(kind, inputs, domain=FUSE, outputs=1 + len(slots), **attributes)
        return list(made) if slots else [made]


@dataclass(frozen=True)
class SGD(Optimizer):
    """w - lr g; with momentum m = μ m + g: w - lr m, and by Nesterov w - lr (g + μ m)."""

    lr: float | Schedule = 1e-2
    momentum: float = 0.0
    nesterov: bool = False

    @property
    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        if not self.momentum:
            return "SgdUpdate", {}
        return f"{'Nesterov' if self.nesterov else 'Momentum'}Update", {"momentum": self.momentum}


@dataclass(frozen=True)
class Adam(Optimizer):
    """w - lr m̂ / (√v̂ + eps), m̂ and v̂ the unbiased running means of g and g²."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    counts: ClassVar[bool] = True

    @property
    def slots(self) -> dict[str, float]:
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        beta1, beta2 = self.betas
        return "AdamUpdate", {"beta1": beta1, "beta2": beta2, "epsilon": self.eps}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam of w (1 - lr λ): the decay bypasses the gradient's statistics."""

    weight_decay: float = 1e-2

    decoupled: ClassVar[bool] = True

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        kind, attributes = super().rule(decay)
        return (
            ("AdamWUpdate", attributes | {"weight_decay": decay}) if decay else (kind, attributes)
        )


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """s = s + g²: w - lr g / (√s + eps)."""

    lr: float | Schedule = 1e-2
    eps: float = 1e-10
    initial_accumulator_value: float = 0.0

    @property
    def slots(self) -> dict[str, float]:
        return {"sum": self.initial_accumulator_value}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        return "AdagradUpdate", {"epsilon": self.eps}


@dataclass(frozen=True)
class Lion(Optimizer):
    """w (1 - lr λ) - lr sign(β1 m + (1-β1) g), then m = β2 m + (1-β2) g."""

    lr: float | Schedule = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)

    decoupled: ClassVar[bool] = True

    @property
    def slots(self) -> dict[str, float]:
        return {"exp_avg": 0.0}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        beta1, beta2 = self.betas
        return "LionUpdate", {"beta1": beta1, "beta2": beta2, "weight_decay": decay}


TABLE: dict[str, type[Optimizer]] = {
    cls.__name__.lower(): cls for cls in (SGD, Adam, AdamW, Adagrad, Lion)
}
"""Optimizers by the name the command line and checkpoints know them by."""


def make(name: str, **options: Any) -> Optimizer:
    """The optimizer of this name; options that are None take its defaults. Raises UsageError."""
    cls = TABLE.get(name)
    if cls is None:
        raise UsageError(f"unknown optimizer '{name}': choose one of {', '.join(TABLE)}")
    given: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    given = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    known = [f.name for f in dataclasses.fields(cls)]
    for key in given:
        if key not in known:
            raise UsageError(f"{name} has no {key}: it has {', '.join(known)}")
    return cls(**given)


def to_json(optimizer: Optimizer) -> dict[str, Any]:
    """{"name": "adamw", "lr": {...}, ...}, from which `from_json` makes an equal optimizer."""
    return {"name": type(optimizer).__name__.lower(), **dataclasses.asdict(optimizer)}


def from_json(data: Mapping[str, Any]) -> Optimizer:
    return make(**{**data, "lr": Schedule(**data["lr"])})

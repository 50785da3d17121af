"""Optimizers and learning-rate schedules, as immutable values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import onnx_ir as ir

from onnx_fuse.errors import UsageError, unknown
from onnx_fuse.ir.build import Builder
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.options import check_types
from onnx_fuse.training.groups import Group, find, layer_decay

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Group",
    "Lion",
    "Optimizer",
    "Schedule",
    "constant",
    "cosine",
    "exponential",
    "from_json",
    "layer_decay",
    "linear",
    "make",
    "multistep",
    "onecycle",
    "polynomial",
    "restarts",
    "step",
    "to_json",
]
__dir__ = __all__.copy

# ---- schedules ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """The learning rate of each update. Raises UsageError for values that make no schedule."""

    lr: float
    """The rate after the warm-up."""
    shape: str = "constant"
    """The course after the warm-up: the name of a function of this module, such as "cosine"."""
    steps: int = 0
    """The update, warm-up included, from which the rate stays at `end` · lr."""
    warmup: int = 0
    """The number of updates over which the rate grows linearly to `lr`."""
    end: float = 0.0
    """The last rate of "linear", "polynomial", "cosine" and "restarts", as a factor on `lr`."""
    every: int = 1
    """The number of updates after which "step" multiplies the rate by `gamma`; of the first period
    of "restarts"."""
    gamma: float = 0.1
    """The factor of "step" and "multistep"; of "restarts", that of one period on the last."""
    power: float = 1.0
    """The power of "polynomial"."""
    milestones: Sequence[int] = ()
    """The updates, after the warm-up, at which "multistep" multiplies the rate by `gamma`."""

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "milestones", tuple(self.milestones))
        if self.shape not in _SHAPES:
            raise UsageError(unknown("schedule", self.shape, _SHAPES))
        if not 0 <= self.lr < math.inf:
            raise UsageError(f"the learning rate is {self.lr}: it must be finite and not negative")
        if self.warmup < 0 or self.every < 1:
            raise UsageError("a schedule's warmup must be at least 0, and its every at least 1")
        if self.shape == "restarts" and self.gamma < 1:
            raise UsageError(f"the periods of restarts cannot shrink: gamma is {self.gamma}")
        if self.shape == "multistep" and not self.milestones:
            raise UsageError("a multistep schedule needs milestones: optim.multistep takes them")
        if self.shape in ENDING and self.steps <= self.warmup:
            raise UsageError(
                f"a {self.shape} schedule of {self.steps} steps ends within its {self.warmup} "
                "steps of warm-up: give it more steps, or less warm-up"
            )

    def __call__(self, step: int) -> float:
        """The rate of update `step`, where the first update is 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * _SHAPES[self.shape](self, step - self.warmup)

    def progress(self, done: int) -> float:
        """The share of the updates after the warm-up that is done, from 0 to 1."""
        return min(done / (self.steps - self.warmup), 1.0)


def _half_cosine(first: float, last: float, done: float) -> float:
    return last + (first - last) * (1 + math.cos(math.pi * done)) / 2


def _one_cycle(schedule: Schedule, done: int) -> float:
    """PyTorch's OneCycleLR with its defaults, whose three numbers stand in it."""
    first, last = 1 / 25, 1 / 25e4
    top, end = 0.3 * schedule.steps - 1, schedule.steps - 1
    if done <= top:
        return _half_cosine(first, 1.0, done / top)
    return _half_cosine(1.0, last, min((done - top) / (end - top), 1.0))


def _restarts(schedule: Schedule, done: float) -> float:
    """Half a cosine for each period, each `gamma` times as long as the one before it."""
    period: float = schedule.every
    while done >= period:
        done, period = done - period, period * schedule.gamma
    return _half_cosine(1.0, schedule.end, done / period)


# Factor on lr, `done` updates after the warm-up.
_SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": lambda s, done: 1.0,
    "linear": lambda s, done: 1 - (1 - s.end) * s.progress(done),
    "cosine": lambda s, done: s.end + (1 - s.end) * (1 + math.cos(math.pi * s.progress(done))) / 2,
    "step": lambda s, done: s.gamma ** (done // s.every),
    "multistep": lambda s, done: s.gamma ** sum(done >= m for m in s.milestones),
    "polynomial": lambda s, done: s.end + (1 - s.end) * (1 - s.progress(done)) ** s.power,
    "restarts": _restarts,
    "onecycle": _one_cycle,
}
ENDING = ("linear", "cosine", "polynomial", "onecycle")
"""The schedules that have a last update."""


def constant(lr: float, *, warmup: int = 0) -> Schedule:
    """A schedule of the rate `lr`, after `warmup` updates of linear growth."""
    return Schedule(lr, "constant", warmup=warmup)


def linear(lr: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """A rate that grows over `warmup` updates, and falls linearly to end · lr at update `steps`."""
    return Schedule(lr, "linear", steps, warmup, end)


def cosine(lr: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """A rate that grows to `lr` over `warmup` updates, and falls to end · lr at update `steps`.

    It falls along half a cosine.
    """
    return Schedule(lr, "cosine", steps, warmup, end)


def step(lr: float, every: int, *, gamma: float = 0.1, warmup: int = 0) -> Schedule:
    """The rate lr · gamma^k from update k · every on, counted after `warmup` updates of growth."""
    return Schedule(lr, "step", warmup=warmup, every=every, gamma=gamma)


def exponential(lr: float, gamma: float, *, warmup: int = 0) -> Schedule:
    """The rate lr · gamma^k at update k, counted after `warmup` updates of growth."""
    return step(lr, 1, gamma=gamma, warmup=warmup)


def multistep(
    lr: float, milestones: Sequence[int], *, gamma: float = 0.1, warmup: int = 0
) -> Schedule:
    """The rate lr, times gamma from each of the `milestones` on, after `warmup` updates."""
    return Schedule(lr, "multistep", warmup=warmup, gamma=gamma, milestones=milestones)


def polynomial(
    lr: float, steps: int, *, power: float = 1.0, warmup: int = 0, end: float = 0.0
) -> Schedule:
    """A rate that grows over `warmup` updates, and falls by a `power` to end · lr at `steps`."""
    return Schedule(lr, "polynomial", steps, warmup, end, power=power)


def restarts(
    lr: float, every: int, *, growth: int = 1, warmup: int = 0, end: float = 0.0
) -> Schedule:
    """A rate that falls along half a cosine to end · lr, and begins again after `every` updates.

    It grows over `warmup` updates first. Each period is `growth` times as long as the one before
    it, as PyTorch's T_mult.
    """
    return Schedule(lr, "restarts", warmup=warmup, end=end, every=every, gamma=growth)


def onecycle(lr: float, steps: int) -> Schedule:
    """PyTorch's OneCycleLR: from lr / 25 up to `lr` in 30 % of `steps`, then down to 4e-6 lr."""
    return Schedule(lr, "onecycle", steps)


# ---- optimizers --------------------------------------------------------------------------------


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

    decoupled: ClassVar[bool] = False  # the op applies the decay; otherwise it goes into g
    counts: ClassVar[bool] = False  # the op reads the number of the update

    def __post_init__(self) -> None:
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
            raise UsageError("a group has a learning rate, but the optimizer's is 0: give a scale")
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
    def slots(self) -> dict[str, float]:
        """The initial values of a parameter's state tensors, by name; each has its shape."""
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
        """Emit the nodes that update parameter `name`, and return its new value and its new slots.

        `op` builds the nodes, `w` is the parameter's value, `g` its gradient, `slots` are its state
        tensors, `lr` is its rate (float32) and `step` the number of its update (int64, from 1).
        """
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
        """One running sum of gradients, where there is momentum."""
        return {"momentum": 0.0} if self.momentum else {}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        """SgdUpdate, MomentumUpdate or NesterovUpdate; `decay` is part of the gradient."""
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

    @property
    def slots(self) -> dict[str, float]:
        """The running means of the gradient and of its square."""
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        """AdamUpdate with the two decays and epsilon."""
        beta1, beta2 = self.betas
        return "AdamUpdate", {"beta1": beta1, "beta2": beta2, "epsilon": self.eps}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam on w (1 - lr λ), as torch.optim.AdamW: the decay bypasses the running means."""

    weight_decay: float = 1e-2

    decoupled: ClassVar[bool] = True

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        """AdamWUpdate, or AdamUpdate for a parameter without decay."""
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
        """The sum of the squares of all gradients."""
        return {"sum": self.initial_accumulator_value}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        """AdagradUpdate with its epsilon; `decay` is part of the gradient."""
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

    @property
    def slots(self) -> dict[str, float]:
        """The running mean of the gradient."""
        return {"exp_avg": 0.0}

    def rule(self, decay: float) -> tuple[str, dict[str, Any]]:
        """LionUpdate with the two factors and the decay."""
        beta1, beta2 = self.betas
        return "LionUpdate", {"beta1": beta1, "beta2": beta2, "weight_decay": decay}


TABLE: dict[str, type[Optimizer]] = {
    cls.__name__.lower(): cls for cls in (SGD, Adam, AdamW, Adagrad, Lion)
}
"""The optimizers by the names that the command line and checkpoints use."""


def make(name: str, **options: Any) -> Optimizer:
    """Make an optimizer by its name: "sgd", "adam", "adamw", "adagrad" or "lion".

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
    """The optimizer as JSON values, such as {"name": "adamw", "lr": {...}, ...}."""
    return {"name": type(optimizer).__name__.lower(), **dataclasses.asdict(optimizer)}


def from_json(data: Mapping[str, Any]) -> Optimizer:
    """Make the optimizer that `to_json` described by `data`."""
    groups = tuple(Group(**group) for group in data["groups"])
    return make(**{**data, "lr": Schedule(**data["lr"]), "groups": groups})

"""Learning rates by the number of the update, as immutable values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from onnx_fuse.errors import UsageError, unknown
from onnx_fuse.options import check_types


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
    """The last rate of "linear", "polynomial", "cosine" and "restarts", and the lowest one of
    "cyclic", as a factor on `lr`."""
    every: int = 1
    """The number of updates after which "step" multiplies the rate by `gamma`; of the first period
    of "restarts"; that the rate of "cyclic" rises, and falls."""
    gamma: float = 0.1
    """The factor of "step" and "multistep"; of "restarts", that of one period on the last; of
    "cyclic", that of one cycle's height on the last."""
    power: float = 1.0
    """The power of "polynomial"."""
    milestones: Sequence[int] = ()
    """The updates, after the warm-up, at which "multistep" multiplies the rate by `gamma`, and at
    which "sequential" goes on to its next part."""
    factor: Callable[[int], float] | str | None = None
    """Of "custom": a function from the updates done to a factor on `lr`. Text stands for a function
    that a checkpoint names: it has no rate."""
    parts: Sequence[Schedule] | None = None
    """The schedules of "sequential", each of which begins at its own first update."""

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "milestones", tuple(self.milestones))
        if self.parts is not None:
            parts = (Schedule(**p) if isinstance(p, Mapping) else p for p in self.parts)
            object.__setattr__(self, "parts", tuple(parts))
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
        if self.shape == "custom" and not (callable(self.factor) or isinstance(self.factor, str)):
            raise UsageError("a custom schedule needs a function: optim.custom takes it")
        if self.shape == "sequential":
            self._check_parts()
        if self.shape in ENDING and self.steps <= self.warmup:
            raise UsageError(
                f"a {self.shape} schedule of {self.steps} steps ends within its {self.warmup} "
                "steps of warm-up: give it more steps, or less warm-up"
            )

    def _check_parts(self) -> None:
        parts, starts = self.parts or (), self.milestones
        if not parts or not all(isinstance(part, Schedule) for part in parts):
            raise UsageError("a sequential schedule needs schedules: optim.sequential takes them")
        grow = list(starts) == sorted({*starts}) and min(starts, default=1) >= 1
        if not grow or len(starts) != len(parts) - 1:
            raise UsageError(
                f"{len(parts)} schedules need {len(parts) - 1} milestones that grow, from 1 on: "
                f"given are {list(starts)}"
            )

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values: of a function, its name."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        if callable(self.factor):
            name = getattr(self.factor, "__qualname__", type(self.factor).__name__)
            record["factor"] = f"the function {name}"
        if self.parts is not None:
            record["parts"] = [part.to_json() for part in self.parts]
        return record

    @property
    def missing(self) -> str:
        """The first function that `to_json` could only name, or nothing."""
        if isinstance(self.factor, str):
            return self.factor
        return next(filter(None, (part.missing for part in self.parts or ())), "")

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


def _cyclic(schedule: Schedule, done: int) -> float:
    """PyTorch's CyclicLR: straight up over `every` updates, and down over as many."""
    cycle, at = divmod(done, 2 * schedule.every)
    height = 1 - abs(at / schedule.every - 1)
    return schedule.end + (1 - schedule.end) * height * schedule.gamma**cycle


def _custom(schedule: Schedule, done: int) -> float:
    if not callable(schedule.factor):
        raise UsageError(f"the learning rate is {schedule.factor}, which is not here: give it anew")
    factor = float(schedule.factor(done))
    if not 0 <= factor < math.inf:
        raise UsageError(f"the learning rate's function gives {factor} for update {done}")
    return factor


def _sequential(schedule: Schedule, done: int) -> float:
    """The rate of the part that `done` is in, of the highest one."""
    at = sum(done >= start for start in schedule.milestones)
    rate = (schedule.parts or ())[at](done - (0, *schedule.milestones)[at])
    return rate / (schedule.lr or 1.0)


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
    "cyclic": _cyclic,
    "custom": _custom,
    "sequential": _sequential,
}
ENDING = ("linear", "cosine", "polynomial", "onecycle")
"""The schedules that have a last update."""
NAMED = tuple(s for s in _SHAPES if s not in ("multistep", "custom", "sequential"))
"""The schedules that need nothing but numbers, which the command has."""


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


def cyclic(
    lr: float, every: int, *, gamma: float = 1.0, warmup: int = 0, end: float = 0.0
) -> Schedule:
    """A rate that rises from end · lr to `lr` over `every` updates, falls as long, and so on.

    It is PyTorch's CyclicLR. Each cycle is `gamma` times as high as the one before it: 1 is
    "triangular", 0.5 "triangular2". The cycles begin after `warmup` updates of growth.
    """
    return Schedule(lr, "cyclic", warmup=warmup, end=end, every=every, gamma=gamma)


def custom(lr: float, factor: Callable[[int], float], *, warmup: int = 0) -> Schedule:
    """The rate lr · factor(k) at update k, counted after `warmup` updates of growth.

    It is PyTorch's LambdaLR. A checkpoint stores only the function's name, so `Trainer.resume`
    needs such a schedule again.
    """
    return Schedule(lr, "custom", warmup=warmup, factor=factor)


def sequential(schedules: Sequence[Schedule], milestones: Sequence[int]) -> Schedule:
    """PyTorch's SequentialLR: one of the `schedules` after another.

    The first is used until the first of the `milestones`, then the second, which begins at its own
    first update, and so on.
    """
    highest = max((part.lr for part in schedules if isinstance(part, Schedule)), default=0.0)
    return Schedule(highest, "sequential", milestones=milestones, parts=schedules)

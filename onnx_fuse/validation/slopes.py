"""Slopes of a loss in float64, by central differences, against what gradients predict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onnx_fuse import progress
from onnx_fuse.arrays import Array

# Of the parameter's size: truncation 1e-10, rounding 1e-11; where that crosses a kink (of a ReLU),
# truncation 1e-14, rounding 1e-9.
_STEPS = (1e-5, 1e-7)
_DIRECTIONS = 2
_RUNS = 2 * _DIRECTIONS
_SMALLEST_SIZE = 1e-3
_SPREAD = 1e3
"""The ratio of the strongest to the weakest signal among tensors that are compared together: with a
limit of 1e-5 of the whole, an error of 1 % in the weakest one shows."""
_ELEMENTS = 2**25
"""The most numbers that one direction changes, for the sake of memory."""


@dataclass(frozen=True)
class Slope:
    """The slope that gradients predict along a direction, beside the one that was measured."""

    predicted: float
    """The sum of gradient times direction, over all tensors that the direction changes."""
    measured: float
    """The central difference of the loss along that direction."""
    ok: bool
    """Whether the two agree within the limit."""

    @property
    def error(self) -> float:
        """The absolute difference of the two."""
        return abs(self.measured - self.predicted)


@dataclass
class Slopes:
    """Measures the slopes of one loss, and compares them with what gradients predict.

    `loss` takes arrays by name and gives the loss with these in place of the parameters'. `limit`
    bounds the error of a slope relative to |gradient| |direction|, and `floor` is the size below
    which an entry of a gradient is zero up to rounding.
    """

    loss: Callable[[Mapping[str, Array]], float]
    parameters: Mapping[str, Array]
    gradients: Mapping[str, Array]
    limit: float
    floor: float
    rng: np.random.Generator
    moving: Mapping[str, Array] = field(default_factory=dict)
    """The entries that directions change, of tensors of which they do not change all."""

    def each(self, names: Sequence[str]) -> dict[str, Slope]:
        """Compare every tensor along directions of its own."""
        self._begin(names, len(names))
        return {name: self._alone(name) for name in names}

    def sampled(self, names: Sequence[str], *, split: bool = True) -> dict[str, Slope]:
        """Compare tensors along directions that change many of them at once.

        A group whose slopes differ is halved, down to single tensors, or else all of its tensors
        have its slope. Those of one group have signals of similar strength, so that an error in
        each is visible in their sum.
        """
        slopes: dict[str, Slope] = {}
        waiting = list(self._groups(names))
        self._begin(names, len(waiting))
        while waiting:
            group = waiting.pop()
            together = self._together(group)
            if together.ok or not split:
                slopes |= dict.fromkeys(group, together)
            elif len(group) == 1:
                slopes[group[0]] = self._alone(group[0])
            else:
                half = len(group) // 2
                waiting += [group[:half], group[half:]]
                self._runs += 2 * _RUNS
        return slopes

    def _begin(self, names: Sequence[str], comparisons: int) -> None:
        self._what = f"comparing the gradients of {len(names)} tensors"
        self._done, self._runs = 0, _RUNS * comparisons

    def _run(self, changed: Mapping[str, Array]) -> float:
        """The loss, as one step of the work; its own steps are not shown."""
        progress.report(self._what, self._done, self._runs)
        with progress.watched(None):
            loss = self.loss(changed)
        self._done = min(self._done + 1, self._runs - 1)  # a smaller step may come besides
        return loss

    def size(self, name: str) -> float:
        """The root mean square of a parameter, by which it is moved."""
        array = self.parameters[name]
        mean = float(np.sqrt(np.mean(array**2))) if array.size else 0.0
        return max(mean, _SMALLEST_SIZE)

    def _signal(self, name: str) -> float:
        """The expected slope along a random direction as long as the parameter."""
        return float(np.linalg.norm(self.gradients[name])) * self.size(name)

    def _groups(self, names: Iterable[str]) -> Iterator[list[str]]:
        signals = {name: self._signal(name) for name in names}
        group: list[str] = []
        elements = 0
        for name in sorted(signals, key=lambda n: -signals[n]):
            elements += self.parameters[name].size
            weaker = group and signals[name] * _SPREAD < signals[group[0]]
            if weaker or (group and elements > _ELEMENTS):
                yield group
                group, elements = [], self.parameters[name].size
            group.append(name)
        if group:
            yield group

    def _along(self, directions: Mapping[str, Array], step: float) -> float:
        """The central difference of the loss along a direction of several tensors."""
        ahead, behind = (
            self._run({n: self.parameters[n] + sign * step * d for n, d in directions.items()})
            for sign in (1, -1)
        )
        return (ahead - behind) / (2 * step)

    def _compared(self, names: Sequence[str], sizes: Sequence[float], limit: float) -> Slope:
        """The worst of several directions; each moves a tensor by a normal sample of its size."""
        slopes = []
        for _ in range(_DIRECTIONS):
            directions: dict[str, Array] = {
                name: np.asarray(self.rng.standard_normal(self.parameters[name].shape) * size)
                * self.moving.get(name, 1)
                for name, size in zip(names, sizes, strict=True)
            }
            predicted = sum(float(np.vdot(self.gradients[n], d)) for n, d in directions.items())
            for step in _STEPS:
                measured = self._along(directions, step)
                slope = Slope(predicted, measured, abs(measured - predicted) <= limit)
                if slope.ok:
                    break
            slopes.append(slope)
        return max(slopes, key=lambda s: (not s.ok, s.error))

    def _together(self, names: Sequence[str]) -> Slope:
        """Compare tensors at once, each moved in proportion to its own size."""
        sizes = [self.size(name) for name in names]
        bounds = (
            self.limit * self._signal(n) + self.floor * size * math.sqrt(self.parameters[n].size)
            for n, size in zip(names, sizes, strict=True)
        )
        return self._compared(names, sizes, math.hypot(*bounds))

    def _alone(self, name: str) -> Slope:
        """Compare one tensor, with all that curvature and rounding may leave of the difference."""
        size = self.size(name)
        norm = float(np.linalg.norm(self.gradients[name]))
        length = math.sqrt(self.parameters[name].size)  # of a normal sample, nearly
        compared = self._compared([name], [size], (self.limit * norm + self.floor) * length * size)
        return Slope(compared.predicted / size, compared.measured / size, compared.ok)

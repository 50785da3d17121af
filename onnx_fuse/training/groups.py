"""Groups of weights that train otherwise than the rest: rate, decay, frozen, or later."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.importer.load import read
from onnx_fuse.ir.build import required
from onnx_fuse.ir.constants import Model
from onnx_fuse.ops.rules import is_float
from onnx_fuse.training.weights import literal


@dataclass(frozen=True)
class Group:
    """Weights with settings of their own; a weight belongs to the first group that matches it.

    Raises UsageError for values that make no group.
    """

    weights: tuple[str, ...]
    """Globs over the names of weights; a single one may be given as a string."""
    lr: float | None = None
    """The learning rate where the optimizer's is at its peak; an Optimizer turns it to `scale`."""
    weight_decay: float | None = None
    """The factor of the weight decay, or None for the optimizer's."""
    frozen: bool = False
    """Whether the weights do not train."""
    start: int = 0
    """The number of updates before the weights begin to train. The optimizer counts their updates
    from there."""
    scale: float = 1.0
    """The factor on the optimizer's learning rate at every step."""

    def __post_init__(self) -> None:
        globs = (self.weights,) if isinstance(self.weights, str) else tuple(self.weights)
        object.__setattr__(self, "weights", globs)
        numbers = {"lr": self.lr, "scale": self.scale, "weight_decay": self.weight_decay}
        for name, value in numbers.items():
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(
                    f"the {name} of a group is {value}: it must be finite and not negative"
                )
        if self.start < 0:
            raise UsageError(f"the start of a group is {self.start}: it must be at least 0")

    def matches(self, name: str) -> bool:
        """Whether a glob matches the weight `name`."""
        return any(fnmatchcase(name, glob) for glob in self.weights)


def find(groups: Sequence[Group], name: str) -> Group | None:
    """The first of `groups` that the weight `name` belongs to."""
    return next((group for group in groups if group.matches(name)), None)


@dataclass(frozen=True)
class TrainableSelection:
    """Which weights train, by globs over their names."""

    trainable: Sequence[str] | None
    """Globs of the weights that train; None for all."""
    frozen: Sequence[str]
    """Globs of the weights that do not train."""
    groups: Sequence[Group]
    """Groups, some of which are frozen."""

    def __call__(self, name: str) -> bool:
        """Whether the weight `name` trains."""
        wanted = self.trainable is None or any(fnmatchcase(name, g) for g in self.trainable)
        group = find(self.groups, name)
        if group is not None and group.frozen:
            return False
        return wanted and not any(fnmatchcase(name, glob) for glob in self.frozen)

    @property
    def globs(self) -> list[str]:
        """All globs, each of which must match a weight."""
        of_groups = [glob for group in self.groups for glob in group.weights]
        return [*(self.trainable or ()), *self.frozen, *of_groups]


def layer_decay(model: Model, decay: float) -> tuple[Group, ...]:
    """Groups whose learning rate falls by the factor `decay` with each layer towards the input.

    Layers are known by the number in the names of weights, or of the nodes that read them, such as
    `encoder.layer.3.attention.weight`. The last layer has the rate times `decay`; what comes after
    the layers has the full rate, and what comes before them one factor less than the first layer.

    Args:
        model: A path, bytes, ModelProto or onnx_ir.Model.
        decay: The factor, above 0 and at most 1.

    Raises:
        UsageError: No names have numbers, or `decay` is out of range.
    """
    if not 0 < decay <= 1:
        raise UsageError(f"the layer decay is {decay}: it must be above 0 and at most 1")
    weights = [v for v in read(model).graph.initializers.values() if is_float(v) and v.shape]
    places = [(str(v.name), _layer(v)) for v in weights]
    stems = Counter(place[0] for _, place in places if place)
    if not stems:
        raise UsageError("neither weights nor nodes have names with the number of a layer")
    [(stem, _)] = stems.most_common(1)
    numbers = sorted({place[1] for _, place in places if place and place[0] == stem})
    order = {number: i for i, number in enumerate(numbers)}
    members: dict[int, list[str]] = {}  # by the number of factors
    begun = False
    for name, place in places:
        inside = place is not None and place[0] == stem
        begun |= inside
        if inside:
            members.setdefault(len(order) - order[required(place)[1]], []).append(literal(name))
        elif not begun:
            members.setdefault(len(order) + 1, []).append(literal(name))
    return tuple(Group(tuple(names), scale=decay**k) for k, names in sorted(members.items()))


def _layer(value: ir.Value) -> tuple[str, int] | None:
    """(what comes before it, number) of the layer in the name of a weight, or of its reader."""
    names = [value.name, *(node.name for node, _ in value.uses())]
    for name in names:
        path = (name or "").replace("/", ".").lstrip(".")
        if match := re.match(r"(.*?\.)(\d+)(?:\.|$)", path):
            return match[1], int(match[2])
    return None

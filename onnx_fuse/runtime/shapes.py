"""The shapes that a model runs in: a program for each, and an instance for those that have memory.

A shape that comes once hands its instance on to the next one of the same open program; one that
comes again keeps its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from onnx_fuse.program.call import Program
from onnx_fuse.program.open import SymbolicProgram
from onnx_fuse.runtime.instance import Instance
from onnx_fuse.runtime.plan import PlannedProgram

INSTANCES = 64
"""Shape keys kept; the least recently used goes first."""
Key = tuple[Any, ...]


@dataclass
class Shape:
    """What is kept for a set of shapes: its Program, and its Instance while that has memory."""

    made: PlannedProgram
    instance: Instance | None = None

    @property
    def program(self) -> Program:
        """The program that runs in this shape."""
        return self.made.program

    def drop(self) -> None:
        """Let go of the instance's memory."""
        if self.instance is not None:
            self.instance.alive = False
            self.instance = None


class KeptShapes:
    """Shapes by their key, the least recently used first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, Shape] = OrderedDict()
        self._once: dict[SymbolicProgram | None, Shape] = {}  # those that have come once, by source

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def __iter__(self) -> Iterator[Shape]:
        return iter(self._kept.values())

    def find(self, key: Key) -> Shape | None:
        """The shape of this key, which becomes the most recently used one."""
        shape = self._kept.get(key)
        if shape is not None:
            self._kept.move_to_end(key)
        return shape

    def add(self, key: Key, shape: Shape) -> None:
        """Keep a new shape; one too many goes."""
        self._kept[key] = shape
        while len(self._kept) > INSTANCES:
            self._kept.popitem(last=False)[1].drop()

    def once(self, source: SymbolicProgram | None) -> Shape | None:
        """The shape of an open program whose instance another may take over, if there is one."""
        shape = self._once.get(source)
        return shape if shape is not None and shape.instance is not None else None

    def comes_again(self, shape: Shape) -> None:
        """Let a shape keep its instance."""
        if self._once.get(shape.made.source) is shape:
            del self._once[shape.made.source]

    def hand_over(self, other: Shape, key: Key, shape: Shape) -> None:
        """Keep a new shape, whose program the instance of another one has begun to run."""
        shape.instance, other.instance = other.instance, None
        other.made.forget()
        self._once[shape.made.source] = shape
        self.add(key, shape)

    def has_instance(self, shape: Shape) -> None:
        """Note that a shape has got an instance of its own."""
        source = shape.made.source
        if source is not None and self.once(source) is None:
            self._once[source] = shape

    def retire(self) -> None:
        """Release the memory of all shapes; each is set up anew when it comes again."""
        for shape in self:
            shape.drop()
        self._once.clear()

    def clear(self) -> None:
        """Forget all shapes."""
        self.retire()
        self._kept.clear()

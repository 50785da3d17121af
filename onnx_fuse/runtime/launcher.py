"""The one launcher: a Program bound to addresses, moved to others, captured as graphs, launched.

Whoever owns the memory says where inputs and outputs stand: a session its arena and what callers
bind, torch its allocator, eager tensors their pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from onnx_fuse.program.call import Tensor
from onnx_fuse.program.problem import ITEMSIZE, Hardware
from onnx_fuse.runtime import collector, device
from onnx_fuse.runtime.arg_updates import Change, workspace_key
from onnx_fuse.runtime.host_calls import HostCall
from onnx_fuse.runtime.launches import Launches
from onnx_fuse.runtime.plan import PlannedProgram
from onnx_fuse.runtime.schedule import segments

ARENA = -(1 << 40)
"""The key of the arena among the buffers: where it moves, all temporaries and workspaces do."""
FEW = 8
"""The share of the launches, as 1 / FEW, that may take other addresses in a graph at each run."""
Places = tuple[int, ...]
"""The addresses of what moves."""


@dataclass(eq=False)
class LaunchVariant:
    """The launches of a Program for some places; `captured` once they were made graphs."""

    where: Places
    parts: list[HostCall | Launches]
    captured: bool = False
    runs: int = 0
    """Runs since many launches took other addresses, or a graph was lost; if somebody counts."""

    def launch(self, stream: device.Stream) -> None:
        """Enqueue all; returns before it is done."""
        for part in self.parts:
            part.launch(stream)

    def move(self, buffers: Collection[int], count: int) -> None:
        """Take the addresses of these buffers anew; `count` is that of all launches."""
        were = [part.captured for part in self.parts]
        moved = sum([part.move(buffers) for part in self.parts])
        if FEW * moved > count or were != [part.captured for part in self.parts]:
            self.runs = 0

    def capture(self) -> None:
        """Become CUDA graphs."""
        self.captured = True
        for part in self.parts:
            part.capture()


class Launcher:
    """A Program's launches for the places where its buffers `movable` stand, ARENA perhaps first.

    Places that come again have launches of their own, up to `most` of them; others take those that
    were used the longest ago. All of them run in the order of one stream.
    """

    def __init__(
        self,
        made: PlannedProgram,
        hw: Hardware,
        address: dict[int, int],
        movable: Sequence[int],
        most: int,
    ) -> None:
        """`address` has each buffer that stays, and workspaces by `workspace_key`."""
        self._made, self._plan, self._hw = made, made.plan, hw
        self.address, self._movable, self._most = address, movable, most
        self.current: LaunchVariant
        """The launches for the places that were last asked for."""
        self._variants: OrderedDict[Places, LaunchVariant] = OrderedDict()
        self._left: OrderedDict[Places, None] = OrderedDict()
        """Places whose launches were moved lately."""
        self._at: Places = ()  # those that `address` has

    @property
    def parts(self) -> list[HostCall | Launches]:
        """What runs at the present places, in order."""
        return self.current.parts

    @property
    def count(self) -> int:
        """The number of launches."""
        return sum(part.count for part in self.parts if isinstance(part, Launches))

    def stand(self, where: Places) -> None:
        """Note these places in `address`; the launches are left alone."""
        if where is self._at:
            return
        self._at, address, plan = where, self.address, self._plan
        address.update(zip(self._movable, where, strict=True))
        if self._movable and self._movable[0] == ARENA:
            base = where[0]
            address.update([(b, base + at) for b, at in plan.offsets.items()])
            address.update([(workspace_key(i), base + at) for i, at in plan.workspaces.items()])

    def find(self, tensor: Tensor) -> int:
        """The address of a tensor of the program, at the places that `address` has."""
        return self.address[tensor.buffer] + tensor.offset * ITEMSIZE[tensor.dtype]

    def place(self, where: Places) -> LaunchVariant:
        """The launches that read and write there, which become the current ones."""
        variants = self._variants
        variant = variants.get(where)
        if variant is not None:
            variants.move_to_end(where)
        else:
            self.stand(where)
            if not variants or (where in self._left and len(variants) < self._most):
                variant = LaunchVariant(where, self._bound(self.parts if variants else None))
            else:
                left, variant = variants.popitem(last=False)
                self._left[left] = None
                if len(self._left) > 4 * self._most:
                    self._left.popitem(last=False)
                variant.move(self._moved(variant, where), self.count)
            variants[where] = variant
        self.current = variant
        return variant

    def apart(self, where: Places) -> LaunchVariant:
        """Launches there that nobody else has, not even the memory in which they count."""
        self.stand(where)
        return LaunchVariant(where, self._bound(None))

    def _bound(self, like: Sequence[HostCall | Launches] | None) -> list[HostCall | Launches]:
        """Launches for the present addresses; `like` are those for others."""
        address = self.address
        parts: list[HostCall | Launches] = []
        for i, segment in enumerate(segments(self._made.program)):
            twin = None if like is None else like[i]
            if not segment.host:
                assert not isinstance(twin, HostCall)
                parts.append(Launches(segment, self._plan.order, self._hw, address, twin))
            else:  # whose addresses are looked up at each run
                parts.append(HostCall(segment, address) if twin is None else twin)
        return parts

    def _moved(self, variant: LaunchVariant, where: Places) -> list[int]:
        """The buffers that the variant, which takes these places, has elsewhere."""
        pairs = zip(self._movable, variant.where, where, strict=True)
        moved = [b for b, old, new in pairs if old != new]
        if ARENA in moved:
            moved += [*self._plan.offsets, *map(workspace_key, self._plan.workspaces)]
        variant.where = where
        return moved

    # ---- another shape of the same open program ----

    def alone(self) -> None:
        """Forget all places but the present ones."""
        self._variants = OrderedDict({self.current.where: self.current})
        self._left.clear()

    def take(
        self,
        made: PlannedProgram,
        changes: Sequence[Change],
        where: Places,
        others: Collection[int],
    ) -> int | None:
        """Run another shape at these places, with `others` elsewhere as well, by its `changes`.

        A graph stays one where it can. Returns the number of launches that have other numbers, None
        where a graph is lost.
        """
        self._made = made
        self.stand(where)
        moved = [*others, *self._moved(self.current, where)]
        self.alone()
        (part,) = self.parts
        assert isinstance(part, Launches)
        with collector.paused():
            count = part.rewrite(changes, moved, made.ends.calls)
        lost = self.current.captured and not part.captured
        self.current.captured = part.captured
        return None if lost else count

"""A Program that runs: its memory, its launches, and what goes in and out of it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse import config
from onnx_fuse.arrays import Array
from onnx_fuse.program.call import Call, Program, Tensor, dtype_of
from onnx_fuse.runtime import device
from onnx_fuse.runtime.arg_updates import Change, all_launches, workspace_key
from onnx_fuse.runtime.deployed import Deployed
from onnx_fuse.runtime.host_calls import Stages
from onnx_fuse.runtime.launcher import Launcher
from onnx_fuse.runtime.launches import Launches
from onnx_fuse.runtime.placement import Placement, placed
from onnx_fuse.runtime.plan import PlannedProgram, aligned
from onnx_fuse.runtime.run_slots import AFTER, Places, RunSlot, Turns
from onnx_fuse.runtime.schedule import Aliases, Segment, collective
from onnx_fuse.runtime.staging import Pending, Room, copied
from onnx_fuse.runtime.tensor import DeviceTensor, DeviceTensors
from onnx_fuse.runtime.timeline import Communication
from onnx_fuse.runtime.zero_copy import ZeroCopy

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnx_fuse.runtime.resources import Resources

GAP = 64 << 10
"""Bytes between two arrays that one copy to the GPU takes along."""
GRAPH_LAUNCHES = 4
"""Launches that take the host as long as that of a graph: a shape whose launches are rewritten runs
as a graph where more of them stay."""
NEVER = -(1 << 60)
PLACEMENTS = 64
"""Placements of a shape that are kept, as those of outputs whose memory comes again."""
VARIANTS = 4
"""Placements of a shape that have launches of their own, as those of a cache in two places."""


@dataclass(frozen=True)
class Fetch:
    """Outputs wanted on the host: the bytes that one copy brings, and what is where in them."""

    start: int
    nbytes: int
    names: tuple[str, ...]
    outputs: Mapping[str, Any]
    """Each output of the program by name: its tensor, or its value."""
    arriving: tuple[tuple[str, int, Tensor], ...]
    apart: tuple[Tensor, ...]
    """The outputs in memory of their own, which are first copied beside the others."""


class Instance:
    """A Program with its memory and launches; its arena is shared with the other shapes'.

    Its inputs and outputs have a home beside the arena's temporaries; `place` moves them. Raises
    DeviceMemoryError where it finds no room.
    """

    def __init__(
        self,
        owner: Resources,
        made: PlannedProgram,
        inputs: DeviceTensors | None = None,
        outputs: DeviceTensors | None = None,
    ) -> None:
        self.owner, self.made, self.plan = owner, made, made.plan
        program = self.program
        self.staged = bool(program.stages)
        """Whether later stages run behind the calls."""
        self._count = len(program.calls)
        self._say()
        # until here nothing needs the context, which another thread may still be making
        address, self._constants, self._made_once = owner.prepared(program, made.room)
        self.movable = tuple(
            b.id for b in program.buffers
            if b.kind == "output" or (b.kind == "input" and b.id not in address)
        )  # fmt: skip
        own = {b.id: b for b in program.buffers if b.id in set(self.movable)}
        offsets: dict[int, int] = {}
        spans, total = {}, 0
        ends = [t for _, t in program.outputs if isinstance(t, Tensor)]
        ends += [t for stage in program.stages for _, t in stage.inputs if t is not None]
        used = self._used = {t.buffer for t in ends}.union(*(c.buffers for c in program.calls))
        # so that one copy fills them
        small_first = sorted(own.values(), key=lambda b: (b.id not in used, b.nbytes))
        for kind in ("input", "output"):
            start = total
            for b in small_first:
                if b.kind == kind:
                    offsets[b.id] = total
                    total += aligned(made.room.get(b.id, b.nbytes))
            spans[kind] = (start, total - start)
        self._spans, self._offsets = spans, offsets
        self.memory = self._reserve(total)
        base = self.memory.address
        owner.stream.fill(base, 0, total)  # gaps between tensors travel with them
        address |= {b: base + at for b, at in offsets.items()}
        address |= {b: base + total + at for b, at in self.plan.offsets.items()}
        address |= {workspace_key(i): base + total + at for i, at in self.plan.workspaces.items()}
        self.address = address
        self._staged = {b: base + at for b, at in offsets.items()}  # where copies go in and out
        self._apart: dict[int, device.Memory] = {}
        if not config.ARENA.value:
            self._set_apart()
        self._home = Placement(tuple(self.address[b] for b in self.movable))
        self._aliases: Aliases | None = None
        self._own = frozenset(self.movable)
        self._moved: set[int] = set()  # constants that stand elsewhere than launches have it
        self._places: dict[str, tuple[str, int, Tensor, int]] = {}
        self._ends: Program | None = None
        self._set_tensors()
        self.owner.set_up(self.made.ends.setup, self.address)
        self.alive = True
        """Whether later runs may use it."""
        self.stages: Stages | None = None
        """What runs behind the calls, once something has."""
        self.runs = 0
        """Launches so far."""
        self._captures_at = config.CAPTURE.value if config.GRAPH.value else 0
        self.now = self.placement(inputs or {}, outputs or {})
        self.launcher = Launcher(made, owner.hw, address, self.movable, most=VARIANTS)
        self.launcher.place(self.now.where)
        launches = all(isinstance(p, Launches) for p in self.launcher.parts)
        self.whole_on_gpu = launches and not program.stages
        self._stale = False  # whether the launches are still those of another shape
        self._changes: tuple[Change, ...] = ()
        self._rewritten = 0  # shapes whose launches were those of another, rewritten

    @property
    def program(self) -> Program:
        """The program that runs."""
        return self.made.program

    def update(self, made: PlannedProgram) -> bool:
        """Run another shape of the same open program from now on; False where that is not possible.

        Every buffer stays where it is, so that only the launches' numbers change.
        """
        source = self.made.source
        if made.plan is not self.plan or source is None or made.source is not source:
            return False
        changes = made.changes
        if changes is None:
            changes = all_launches(made.program, self.program)
        if changes is None or not self.whole_on_gpu or self._apart or not self.launcher.parts:
            return False
        self.made, self._changes = made, changes
        self._say()
        if self._ends is None or made.ends.constants is not self._ends.constants:
            arrays = {b: made.ends.constants[b] for b in self._constants}
            placed = self.owner.constants.place(arrays)
            self._moved |= {b for b, new in placed.items() if self.address[b] != new.address}
            self._constants |= placed
            self.address |= {b: constant.address for b, constant in placed.items()}
        self._set_tensors()
        self.owner.set_up(self.made.ends.setup, self.address)
        self.runs = 0
        self.launcher.alone()
        self._stale = True  # until it is known where the run's inputs and outputs stand
        return True

    def _renew(self) -> None:
        """Write the launches for the present shape and placement."""
        moved, self._moved = self._moved, set()
        changed = self.launcher.take(self.made, self._changes, self.now.where, moved)
        self._stale = False
        if changed is None:
            self._rewritten = NEVER
        elif self.launcher.count - changed > GRAPH_LAUNCHES:
            self._rewritten += 1

    def _set_tensors(self) -> None:
        """Take the ends of the present shape; most are those of the one before."""
        old, ends = self._ends, self.made.ends
        self._ends, movable = ends, self._own
        alike = old is not None and ends.outputs is old.outputs
        if not (alike and (self._aliases is None or self._aliases.take(ends))):
            self._placements: dict[tuple[str | int | None, ...], Placement] = {}
        if not alike:
            self.outputs = dict(ends.outputs)
            self._in_place = {
                n: t for n, t in ends.outputs if isinstance(t, Tensor) and t.buffer in movable
            }
            self._fetches: dict[tuple[str, ...] | None, Fetch] = {}
        if old is None or ends.inputs is not old.inputs:
            self.inputs = [(n, t) for n, t in ends.inputs if t.buffer in movable]
            first, known = self._spans["input"][0], self._places
            self._places = {
                n: known[n]
                if n in known and known[n][2] is t
                else (n, self._offsets[t.buffer] - first, t, t.nbytes)
                for n, t in self.inputs
            }
            fed = sorted(self._places.values(), key=itemgetter(1))
            # that of which nothing but its shape is read stays on the host
            self._fed = tuple([p[:3] for p in fed if p[3] and p[2].buffer in self._used])
            sizes = [(n, t.nbytes) for n, t in self.inputs if n in known and known[n][2] is not t]
            for key, placement in list(self._placements.items()):
                if any(nbytes > placement.reach.get(n, nbytes) for n, nbytes in sizes):
                    del self._placements[key]

    def _say(self) -> None:
        if config.DEBUG.value >= 1:
            print(f"{self._count} calls; {self.plan}", file=sys.stderr)
        if config.DEBUG.value >= 2:
            print(self.program, file=sys.stderr)
        if config.DUMP.value:
            dump(config.DUMP.value, self.owner.model, f"{self.program}\n{self.plan}\n")

    def _reserve(self, ends: int) -> device.Memory:
        try:
            return self.owner.arena.reserve(ends + self.plan.arena)
        except device.DeviceMemoryError as error:
            raise device.DeviceMemoryError(
                f"{error}; weights and state hold {self.owner.weights.nbytes:,} bytes, this "
                f"shape's temporaries need {self.plan.arena:,}: lower the batch or sequence "
                "length, or release_memory() of other sessions"
            ) from error

    def __str__(self) -> str:
        fallbacks = "".join(f"on onnxruntime: {f}\n" for f in self.program.fallbacks)
        weights = sum(b.nbytes for b in self.program.buffers if b.kind == "weight")
        constants = sum(constant.nbytes for constant in self._constants.values())
        return (
            f"{self.program}\n{fallbacks}{self.plan}\n"
            f"the arena of all shapes holds {self.memory.nbytes:,} bytes, this shape's constants "
            f"{constants:,}; weights {weights:,}"
        )

    def _set_apart(self) -> None:
        """Allocate each tensor and workspace by itself, so that a memory checker sees its ends.

        Kernels read rows by vectors, with what stands between them where rows are padded; NaN
        there shows in the results if a kernel uses it.
        """
        kinds = ("input", "output", "constant", "temp")
        written = [t for call in self.program.calls for _, t in call.writes]
        padded = {t.buffer for t in written if t.size and t.span > t.size}
        for b in self.program.buffers:
            if b.kind in kinds and (b.id in self._offsets or b.kind in ("constant", "temp")):
                memory = self._apart[b.id] = device.Memory(b.nbytes, b.name or "a temporary")
                if b.id in self.program.constants and b.nbytes:
                    self.owner.stream.move(memory.address, self.address[b.id], b.nbytes)
                elif b.kind == "temp" and b.id in padded:
                    self.owner.stream.fill(memory.address, 0xFF, b.nbytes)
                self.address[b.id] = memory.address
        for i in self.plan.workspaces:
            self._apart[-1 - i] = device.Memory(self.program.calls[i].workspace, "a workspace")
            self.address[workspace_key(i)] = self._apart[-1 - i].address

    # ---- where inputs and outputs stand ----

    def placement(self, inputs: DeviceTensors, outputs: DeviceTensors) -> Placement:
        """Where a run with these inputs and outputs has them, in place what can be."""
        if not inputs and not outputs:
            return self._home
        places = [t.address for t in inputs.values()]
        places += [t.address for t in outputs.values()]
        key = (*inputs, None, *outputs, *places)
        found = self._placements.get(key)
        if found is None:
            if len(self._placements) >= PLACEMENTS:
                self._placements.clear()
            home = dict(zip(self.movable, self._home.where, strict=True))
            ends = self.inputs, self._in_place
            found = placed(home, *ends, inputs, outputs, self._may_share)
            self._placements[key] = found
        return found

    def _may_share(self, output: str, source: str) -> bool:
        """Whether the output may be written in the memory of the input `source`."""
        if self._aliases is None:
            self._aliases = Aliases(self.made.ends, self.plan.order)
        elif self._aliases.program is not self.made.ends:
            self._aliases.take(self.made.ends)
        return self._aliases.may_share(output, source)

    def place(self, placement: Placement) -> None:
        """Let the next run read and write there."""
        before, self.now = self.now, placement
        if placement is before or placement.where == before.where:
            return
        self.launcher.stand(placement.where)
        if not self._stale:  # else a run writes the launches
            self.launcher.place(placement.where)

    @property
    def zero_copy(self) -> tuple[ZeroCopy, Placement] | None:
        """Host memory that its kernels read and write themselves, where all of it is small."""
        if self._direct_of is not self.made:
            self._direct_of, self._direct = self.made, None
            plan = None
            if not self._apart:
                inputs = {name: t for name, _, t in self._fed}
                plan = ZeroCopy.of(self.program, inputs, self._in_place)
            if plan is not None:
                self._direct = plan, self.placement(*plan.places(self.owner.device_id))
        return self._direct

    def zero_copied(self, feeds: Mapping[str, Any]) -> tuple[ZeroCopy | None, Placement]:
        """That memory with these feeds, and where it is; None and home where a run has copies.

        Who takes it releases `free`.
        """
        if self.runs_as_graph and self.zero_copy is not None:
            memory, placement = self.zero_copy
            if memory.fill(feeds):
                return memory, placement
        return None, self._home

    _direct_of: object = None  # the program that it was found for
    _direct: tuple[ZeroCopy, Placement] | None = None

    def turn(
        self, fetch: Fetch, feeds: Mapping[str, Any], stream: device.Stream
    ) -> tuple[RunSlot, Turns] | None:
        """Let the next run, of a graph, have memory of its own for inputs and outputs.

        None where it goes by copies in the stream.
        """
        if not self.runs_as_graph or self.runs < AFTER:
            return None
        program, last = self._turns_of
        if program is not self.made or last is not fetch:
            self._turns, self._turns_of = None, (self.made, fetch)
            if not self._apart:
                ends, shared = (self._fed, fetch.arriving), self.owner
                self._turns = Turns.of(self.program, *ends, shared)
        slot = None if self._turns is None else self._turns.take(feeds, stream)
        if slot is None or self._turns is None:
            return None
        turn, where = slot
        self.place(self.placement(where, turn.outputs))
        if not all(part.captured for part in self.launcher.parts):
            self.launcher.current.captured = False  # a graph that was lost is made anew
        return turn, self._turns

    _turns_of: tuple[object, object] = (None, None)  # the program and the outputs that it is for
    _turns: Turns | None = None

    @property
    def runs_as_graph(self) -> bool:
        """Whether it runs as a graph: other addresses then take as long as a small copy."""
        return self.runs >= self._captures_at > 0

    def tensor_of(self, name: str) -> Tensor | None:
        """The output that a run writes where the caller says; None for a known or later one."""
        return self._in_place.get(name)

    # ---- run ----

    def run_turn(
        self, turn: RunSlot, turns: Turns, feeds: Mapping[str, Any], stream: device.Stream
    ) -> None:
        """Copy what a turn does not hold, and launch."""
        self.feed(feeds, stream, turns.fed, turn.copying(turns.copies))
        turn.copied(turns.copies, stream)
        self.launch(stream)
        turn.ended(stream)

    def feed(
        self,
        feeds: Mapping[str, Any],
        stream: device.Stream,
        places: Places | None = None,
        apart: tuple[device.Stream, int] | None = None,
    ) -> None:
        """Copy to the inputs' homes what is not read in place.

        `places` are those of some inputs, `apart` the stream and the address to copy arrays to.
        """
        places = self._fed if places is None else places
        start = self.memory.address + self._spans["input"][0]
        by, start = (stream, start) if apart is None else apart
        spans: list[tuple[int, int]] = []  # of the inputs' memory that arrays fill
        room = views = None
        moves = []
        for name, at, tensor in places:
            value = feeds[name]
            if not isinstance(value, np.ndarray):
                if value.address != self.address[tensor.buffer]:
                    moves.append((self._staged[tensor.buffer], value.address, tensor.nbytes))
                continue
            if views is None:
                room = self.owner.uploads.acquire(self._spans["input"][1])
                views = room.arrays(places, places)
            assert room is not None
            nbytes = views[name].nbytes
            for first, end in copied(views[name], value):
                if end - first < nbytes:  # a piece goes on alone while others are copied
                    by.upload(start + at + first, room.pinned.address + at + first, end - first)
                    continue
                near = bool(spans) and at - spans[-1][1] <= GAP
                spans.append((spans.pop()[0] if near else at, at + nbytes))
        if room is not None:
            for low, high in spans:
                by.upload(start + low, room.pinned.address + low, high - low)
            room.passed.record(by)
        for move in moves:  # after the arrays' copy, which passes over their homes
            stream.move(*move)
        if self._apart:
            for _, tensor in self.inputs:
                inside = self.address[tensor.buffer] == self._apart[tensor.buffer].address
                if tensor.nbytes and inside:
                    target = self.address[tensor.buffer]
                    stream.move(target, self._staged[tensor.buffer], tensor.nbytes)

    def launch(self, stream: device.Stream | None = None) -> None:
        """All between the feeds and the fetches; returns before it is done."""
        self.runs += 1
        if self._stale:
            self._renew()
        current = self.launcher.current
        if not current.captured and max(self.runs, self._rewritten) >= self._captures_at > 0:
            current.capture()
        current.launch(stream or self.owner.stream)

    def capture(self) -> None:
        """Run as CUDA graphs from now on."""
        if self._stale:
            self._renew()
        if self._captures_at:
            self.runs = max(self.runs, self._captures_at)
            self.launcher.current.capture()

    def communication(self) -> Communication | None:
        """The collectives of the last run, which must be over; None if no graph has had any."""
        parts = [p.timeline for p in self.launcher.parts if isinstance(p, Launches)]
        spans = [timeline.read() for timeline in parts if timeline is not None]
        return spans[0] if spans else None

    def profile(self, wanted: Callable[[Call], bool] | None = None) -> list[tuple[Call, float]]:
        """Seconds of each kernel call (that is wanted) by itself, best of three graphs of 20.

        State changes. Without collectives, which no rank can run by itself.
        """
        found = []
        for i, call in enumerate(self.program.calls):
            if call.launches and not collective(call) and (wanted is None or wanted(call)):
                part = Launches(Segment(i, (call,)), self.plan.order, self.owner.hw, self.address)
                stream = device.Stream()
                graph = stream.capture([partial(x, stream.handle) for _, x in part.enqueues] * 20)
                launch = partial(self.owner.stream.launch, graph, "a graph")
                times = [self.owner.stream.timed(launch, 3) for _ in range(3)]
                found.append((call, min(times) / 20))
        return found

    # ---- what comes out ----

    def fetching(self, names: Sequence[str] | None) -> Fetch:
        """How these outputs (None: all but state) come to the host."""
        key = None if names is None else tuple(names)
        if key not in self._fetches:
            state = self.owner.state
            fetched = [n for n in self.outputs if n not in state] if names is None else names
            tensors = {n: t for n, t in self._in_place.items() if n in fetched and t.nbytes}
            starts = [self._offsets[t.buffer] for t in tensors.values()]
            start = min(starts, default=0)
            end = max((self._offsets[t.buffer] + t.nbytes for t in tensors.values()), default=0)
            self._fetches[key] = Fetch(
                start,
                end - start,
                tuple(fetched),
                self.outputs,
                tuple((n, self._offsets[t.buffer] - start, t) for n, t in tensors.items()),
                tuple(t for t in tensors.values() if t.buffer in self._apart),
            )
        return self._fetches[key]

    def download(self, fetch: Fetch, stream: device.Stream) -> Room | None:
        """Start copying outputs that stand at home to the host."""
        if not fetch.nbytes:
            return None
        room = self.owner.downloads.acquire(fetch.nbytes)
        for tensor in fetch.apart:
            home = self._apart[tensor.buffer].address
            stream.move(self._staged[tensor.buffer], home, tensor.nbytes)
        stream.download(room.pinned.address, self.memory.address + fetch.start, fetch.nbytes)
        return room

    def arrays(
        self, fetch: Fetch, room: Room | None, later: Mapping[str, Any] | None = None
    ) -> list[Array]:
        """Copies of the outputs, which have arrived in `room`; those `later` stages made."""
        if room is None:
            return self.copies(fetch, {}, later)
        results = self.copies(fetch, room.arrays(fetch, fetch.arriving), later)
        self.owner.downloads.release(room)
        return results

    def copies(
        self, fetch: Fetch, views: Mapping[str, Array], later: Mapping[str, Any] | None = None
    ) -> list[Array]:
        """The outputs that `views` shows, copied; those known otherwise."""
        known, outputs = later or {}, fetch.outputs
        return [
            views[name].copy() if name in views else self._known(name, outputs[name], known)
            for name in fetch.names
        ]

    def _known(self, name: str, value: Tensor | Array | None, later: Mapping[str, Any]) -> Array:
        """The value of an output that needs no copy from a run: known, empty, a state, or later."""
        if value is None:
            return later[name]
        if not isinstance(value, Tensor):
            return value.copy()
        if name in self.owner.state:
            return self.owner.weights.read(self.owner.state[name])
        return np.empty(value.shape, dtype_of(value.dtype))

    def send(self, fetch: Fetch, stream: device.Stream) -> Pending:
        """Outputs on their way to the host, which nobody waits for yet."""
        room = self.download(fetch, stream)
        if room is None:
            wait = partial(stream.wait, self.describe())
        else:
            room.passed.record(stream)
            wait = partial(self._arrived, room)
        return Pending(fetch.names, wait, partial(self.arrays, fetch, room))

    def sent(self, fetch: Fetch, turn: RunSlot) -> Pending:
        """Outputs that the run of a turn, which has just begun, writes in host memory."""
        read = partial(self.copies, fetch, turn.memory.outputs)
        turn.pending = Pending(fetch.names, partial(self._arrived, turn), read)
        return turn.pending

    def _arrived(self, there: Room | RunSlot) -> None:
        device.start(self.owner.device_id)
        there.passed.wait(self.describe())

    def copy_out(self, name: str, target: DeviceTensor, stream: device.Stream) -> None:
        """Copy an output that stands at home, or is a state's tensor, to GPU memory."""
        value = self.outputs[name]
        assert isinstance(value, Tensor)
        if value.nbytes:
            stream.move(target.address, self.address[value.buffer], value.nbytes)

    def tensor(self, tensor: Tensor) -> DeviceTensor:
        """A tensor of this program as a feed of another."""
        address = self.launcher.find(tensor)
        return DeviceTensor(address, tensor.shape, tensor.dtype, self.owner.device_id, self)

    def describe(self) -> str:
        """A listing of what runs, for messages."""
        return f"running a program of {self._count} calls"


_NUMBERS = itertools.count(1)


def dump(folder: Path, model: ir.Model | Deployed, program: str) -> None:
    """The fused model and the program of one shape, under the next free number."""
    folder.mkdir(parents=True, exist_ok=True)
    number = next(n for n in _NUMBERS if not (folder / f"{n:02d}.program.txt").exists())
    if not isinstance(model, Deployed):
        from onnx_fuse.importer.save import save

        save(model, folder / f"{number:02d}.model.onnx")
    (folder / f"{number:02d}.program.txt").write_text(program)

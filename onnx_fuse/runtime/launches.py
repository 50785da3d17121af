"""The launches of a run of kernel calls: enqueued one by one at first, later as one CUDA graph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import prod

from onnx_fuse import config
from onnx_fuse.cuda.launch import BoundLaunch, PlacedLaunch, bind
from onnx_fuse.errors import DeviceError
from onnx_fuse.program.call import Call
from onnx_fuse.program.launch import Launch
from onnx_fuse.program.problem import Hardware
from onnx_fuse.runtime import device
from onnx_fuse.runtime.arg_updates import Change, operands, places, workspace_key
from onnx_fuse.runtime.schedule import CallOrder, Segment, collective, copies, overlappable, put_off
from onnx_fuse.runtime.timeline import Timeline

AHEAD = 4
"""Launches before a graph that take the host as long as that of the graph."""


class Launches:
    """A segment's launches with their addresses, which may change between runs.

    Enqueued one by one they keep the order of the program; a graph keeps to `order` alone. Raises
    DeviceError, which names the call, where a launch is refused.
    """

    def __init__(
        self,
        segment: Segment,
        order: CallOrder,
        hw: Hardware,
        address: Mapping[int, int],
        like: Launches | None = None,
    ) -> None:
        """`address` has each buffer's, and that of a workspace by `workspace_key`.

        `like` are launches of the same calls for other addresses, and in the same stream.
        """
        self._segment, self._order, self._hw = segment, order, hw
        self._address = address
        self._graph: device.Graph | None = None
        self.timeline: Timeline | None = None
        """When the collectives of the graph ran, where it has some."""
        self._what = ""
        self._watched = bool(config.DEBUG.value) and not config.GRAPH.value
        self._steps: list[PlacedLaunch] = []
        self._busy: list[tuple[int, Callable[[int], None]]] | None = None  # see `enqueues`
        self._calls: list[int] = []  # of each step, the number of its call in the segment
        self._copying: set[int] = set()  # steps of calls that copy tensors
        self._idle: set[int] = set()  # those that would copy what stands there already
        self._nodes: dict[int, int] = {}  # of each step in the graph, its node's number
        call = segment.calls[0]
        try:
            for i, call in enumerate(segment.calls):
                number = segment.first + i
                for launch in call.launches:
                    twin_of = like._steps[len(self._steps)] if like else None
                    if isinstance(twin_of, BoundLaunch):
                        self._steps.append(twin_of.twin(address))
                    else:
                        self._steps.append(bind(launch, address, hw, places(number, call)))
                    self._calls.append(i)
                    if call.copies:
                        self._copying.add(len(self._calls) - 1)
                        self._stands(len(self._calls) - 1, number, call)
        except DeviceError as error:
            raise DeviceError(f"{_label(call)}: {error}") from error
        self._users: dict[int, list[int]] | None = like._users if like else None
        self._shape: Sequence[Call] = ()  # the calls of the present shape, if it is another
        self._changes: Sequence[Change | None] = ()  # what made the launches those of that shape
        self._numbers: tuple[int, ...] = ()  # the step of each of them
        self._varied: set[int] = like._varied if like else set()  # steps that shapes have changed
        self._ahead: list[int] = []  # steps of them that stay out of the graph

    def rewrite(
        self, changes: Sequence[Change], moved: Collection[int], calls: Sequence[Call]
    ) -> int:
        """Launch with the numbers of another shape, and take the new addresses of `moved`.

        The number of launches that have others is returned. A graph stays one, unless a call that
        only copies begins or ceases to have nothing to do; `calls` are the shape's, of which those
        `at_ends` suffice. A launch stays as it is where its Change is equal to the one before.
        """
        if not self._changes:
            at = {(i, k - self._calls.index(i)): k for k, i in enumerate(self._calls)}
            self._numbers = tuple([at[i - self._segment.first, j] for i, j, *_ in changes])
            steps = [self._steps[k] for k in self._numbers]
            self._changes = [(*change[:2], *step.numbers) if isinstance(step, BoundLaunch) else None
                             for change, step in zip(changes, steps, strict=True)]  # fmt: skip
        before, self._changes, self._shape = self._changes, changes, calls
        new = set()
        for k, change, old in zip(self._numbers, changes, before, strict=True):
            if change is not old and change != old:
                step, (_, _, grid, smem, words, sync) = self._steps[k], change
                assert isinstance(step, BoundLaunch)
                step.rewrite(grid, smem, words, sync, self._address)
                self._tell(k)
                new.add(k)
        self._varied |= new
        if moved:
            self.move(moved, new)
        return len(new)

    def _tell(self, k: int) -> None:
        """Let the graph, if there is one, launch the step as it is now."""
        changed, step, i = False, self._steps[k], self._calls[k]
        if k in self._copying:
            number = self._segment.first + i
            call = self._shape[number] if self._shape else self._segment.calls[i]
            changed = self._stands(k, number, call)
        if changed or not isinstance(step, BoundLaunch):
            # it has no node, or one too many; which ones a library's call has is not known: one by
            # one again
            self._graph = None
        elif self._graph is not None and k in self._nodes:
            self._graph.update(self._nodes[k], step.arguments, step.grid, step.smem)

    def _stands(self, k: int, number: int, call: Call) -> bool:
        """Note whether step `k` copies tensors to where they stand; whether that is new."""
        pairs, at = copies(call), operands(self._address, number, call)
        idle = bool(pairs) and all(at[read] == at[write] for read, write in pairs)
        changed = idle != (k in self._idle)
        if changed:
            (self._idle.add if idle else self._idle.discard)(k)
            self._busy = None
        return changed

    def launch(self, stream: device.Stream) -> None:
        """Enqueue all; returns before it is done."""
        if self._graph is not None:
            for k in self._ahead:
                self._enqueue(k, stream)
            stream.launch(self._graph, self._what)
            if self.timeline is not None:
                self.timeline.ended(stream)
            return
        k, handle = 0, stream.handle
        try:
            for k, enqueue in self.enqueues:  # noqa: B007 - an error says which it was
                enqueue(handle)
                if self._watched:
                    stream.wait("after its launch")
        except DeviceError as error:
            raise self._fault(k, error) from error

    @property
    def enqueues(self) -> list[tuple[int, Callable[[int], None]]]:
        """The number of each step that has something to do, and what enqueues it in a CUstream."""
        if self._busy is None:
            steps = enumerate(self._steps)
            self._busy = [(k, step.enqueue) for k, step in steps if k not in self._idle]
        return self._busy

    def _enqueue(self, k: int, stream: device.Stream) -> None:
        try:
            self._steps[k].enqueue(stream.handle)
        except DeviceError as error:
            raise self._fault(k, error) from error

    def _fault(self, k: int, error: DeviceError) -> DeviceError:
        """The error of step `k`, which says whose it is."""
        call = self._segment.calls[self._calls[k]]
        return DeviceError(f"{_label(call)} {self._launch(k).entry}: {error}")

    def _launch(self, k: int) -> Launch:
        """The launch of step `k`, as its call has it."""
        i = self._calls[k]
        return self._segment.calls[i].launches[k - self._calls.index(i)]

    @property
    def count(self) -> int:
        """The number of launches."""
        return len(self._steps)

    @property
    def captured(self) -> bool:
        """Whether it is one graph."""
        return self._graph is not None

    def move(self, buffers: Collection[int], written: Collection[int] = ()) -> int:
        """Take the addresses of these buffers anew, in all steps but those `written` already.

        Returns the number of steps that have taken some.
        """
        using = sorted(self._using(buffers).difference(written))
        for k in using:
            step, i = self._steps[k], self._calls[k]
            if isinstance(step, BoundLaunch):
                step.place(self._address)
            else:
                number, call = self._segment.first + i, self._segment.calls[i]
                step.place(operands(self._address, number, call))
            self._tell(k)
        return len(using)

    def _using(self, buffers: Collection[int]) -> set[int]:
        """The numbers of the launches whose call uses one of these buffers or workspaces."""
        if self._users is None:
            users = defaultdict(list)
            for k, i in enumerate(self._calls):
                call = self._segment.calls[i]
                for b in {t.buffer for _, t in (*call.reads, *call.writes)}:
                    users[b].append(k)
                if call.workspace:
                    users[workspace_key(self._segment.first + i)].append(k)
            self._users = dict(users)
        return {k for b in buffers for k in self._users.get(b, ())}

    def capture(self) -> None:
        """Become one graph, which takes the host half the time of a single launch.

        The stream of the capture is its own: what other threads, or other executables, enqueue
        where this runs would become a part of the graph. Launches that shapes change are enqueued
        before it where they follow no other: a graph that is told arguments takes longer to begin.
        """
        if self._graph is not None or not self._steps:
            return
        self._nodes, self._ahead, stream = {}, [], device.Stream()
        alone = not any(map(collective, self._segment.calls))
        after: list[Sequence[int]] = []
        last: dict[int, list[int]] = {}  # call -> its last launch, or those it stands for
        of: dict[int, list[int]] = defaultdict(list)
        for k, i in enumerate(self._calls):
            of[i].append(k)
        for i in range(len(self._segment.calls)):
            number = self._segment.first + i
            heads = [k for c in self._order.after[number] for k in last.get(c, ())]
            for k in of[i]:
                if k in self._idle:
                    continue
                if alone and not heads and k in self._varied and len(self._ahead) < AHEAD:
                    self._ahead.append(k)
                    continue
                self._nodes[k] = len(after)
                after.append(list(dict.fromkeys(heads)))
                heads = [self._nodes[k]]
            last[number] = heads
        if not self._nodes:
            return
        aside, calls = self._aside(), self._segment.calls
        if aside and not any(map(collective, calls)):
            blocks = [prod(self._launch(k).grid) for k in self._nodes]
            sequence, later = put_off(after, blocks)
            after, numbers = list(later), list(self._nodes)
            self._nodes = {numbers[i]: n for n, i in enumerate(sequence)}
        steps = [partial(self._enqueue, k, stream) for k in self._nodes]
        self._what = f"a graph of {len(steps)} launches"
        if not aside:
            self._graph = stream.capture(steps)
            return
        waits = self._hw.cc >= 90  # kernels themselves, by griddepcontrol
        early = overlappable(after) if waits else [()] * len(after)
        # a library's kernels neither wait by themselves nor call for what follows them
        foreign = [not _waits(self._steps[k]) for k in self._nodes]
        own_calls = [calls[self._calls[k]] for k in self._nodes]
        collectives = [collective(call) for call in own_calls]
        self.timeline = Timeline(own_calls, after, stream) if any(collectives) else None
        early = [
            () if foreign[i] or any(foreign[k] for k in after[i]) else steps
            for i, steps in enumerate(early)
        ]
        before = [step.early for step in self._steps]
        for step in self._steps:
            step.early = False  # the graph's edges say it
        try:
            ordered = [i for i in range(len(steps) - 1) if collectives[i]]
            asides = self.timeline.asides if self.timeline is not None else ()
            self._graph = stream.capture(steps, after, early, ordered, asides)
        finally:
            for step, value in zip(self._steps, before, strict=True):
                step.early = value

    def _aside(self) -> bool:
        """Whether calls may run side by side, and no kernel counts on a single launch before it."""
        after, first, calls = self._order.after, self._segment.first, self._segment.calls
        free = any(i - 1 not in after[i] for i in range(first + 1, first + len(calls)))
        if any(map(collective, calls)):  # whose edges, and those to them, are never early ones
            return free
        launches = [launch for call in calls for launch in call.launches]
        plain = all(x.product is None and not x.cooperative for x in launches)
        return free and plain and all(x.waits == "first" for x in launches)


def _waits(step: PlacedLaunch) -> bool:
    """Whether a kernel of ours waits for those before it ahead of all else."""
    return isinstance(step, BoundLaunch) and step.launch.waits == "first"


def _label(call: Call) -> str:
    return f"{call.kernel} ({', '.join(call.nodes[:3])}): {call.problem or ''}"

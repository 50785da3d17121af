"""Program + Plan -> bound pointers and CUDA graphs: one Instance a shape key, LRU-bounded.

All memory of an instance (inputs, outputs, constants, arena) is one allocation, and so is the
pinned memory its feeds and fetches pass through: a run is one copy in, one graph launch, one copy
out. Weights and state stand outside, shared by all instances.
"""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnx_fuse import config
from onnx_fuse.errors import DeviceError, UsageError
from onnx_fuse.kernels import jit
from onnx_fuse.llir import Buffer, Call, NeedsValues, Program, Stage, Tensor
from onnx_fuse.lower import lower
from onnx_fuse.onnx.save import save
from onnx_fuse.ops.update import expand_standard_updates
from onnx_fuse.problem import ITEMSIZE, Hardware
from onnx_fuse.runtime import device
from onnx_fuse.runtime.plan import aligned, plan
from onnx_fuse.runtime.schedule import Segment, along_rows, segments
from onnx_fuse.runtime.tensor import Binding, DeviceTensor, adopt, dtype_of

INSTANCES = 32
"""Shape keys kept; the least recently used goes first."""
SLOTS = 8
"""Runs whose outputs may be on their way to the host at once; one more waits for the oldest."""
ALIGNED = 16
"""Bytes that the address of an input must be a multiple of, to be read in place."""
RANDOM = "random"
"""Where the random generator's state stands, of each Executable its own."""
KEEP_BYTES = 4 << 30
"""Instances beyond the current one are dropped while all of them hold more than this."""


class Executable:
    """A model on one GPU: lowered, planned and captured for each set of input shapes it meets.

    `state` maps outputs to the inputs or initializers they replace in place: those stay on the
    device (`read` and `write` reach them) and are not fed. `home` is an Executable whose such
    tensors, and whose stream, this one shares and which must outlive it. Raises DeviceError for
    what the GPU, its driver or NVRTC cannot do.
    """

    def __init__(
        self,
        model: ir.Model,
        *,
        math: str = "ieee",
        prefs: Mapping[str, str] | None = None,
        state: Mapping[str, str] | None = None,
        device_id: int = 0,
        home: Executable | None = None,
        seed: int = 0,
    ) -> None:
        device.probe(device_id)
        expand_standard_updates(model)
        self.model, self.math, self.prefs, self.state = model, math, prefs, dict(state or {})
        self.device_id = device_id
        self.hw = Hardware.detect(device_id)
        self.resident: dict[str, tuple[Tensor, int]] = dict(home.resident if home else {})
        self.resident.pop(RANDOM, None)
        if home is not None:
            self.stream = home.stream
        self._blocks: list[device.Memory] = []
        self._seed = seed
        self._instances: OrderedDict[tuple[Any, ...], Instance] = OrderedDict()
        self._lock = threading.RLock()
        self._warned: set[str] = set()
        self._deciding: list[str] = []  # feeds whose values decide about shapes

    @cached_property
    def stream(self) -> device.Stream:
        """The stream of all its work; made at first use, which needs the device's context."""
        device.start(self.device_id)
        return device.Stream()

    def run(
        self, names: Sequence[str] | None, feeds: Mapping[str, Any], *, on_device: bool = False
    ) -> list[Any]:
        """The outputs named (None: all but state), as arrays, or as DeviceTensors if `on_device`.

        Feeds are arrays, or GPU tensors of any library that has DLPack or the CUDA array interface.
        """
        with self._lock:
            adopted = self._adopted(feeds)
            instance = self.instance(adopted)
            instance.feed(adopted)
            instance.launch()
            return instance.keep(names) if on_device else instance.fetch(names)

    def send(self, names: Sequence[str], feeds: Mapping[str, Any]) -> Pending:
        """Start a run and return at once: the outputs named are on their way to the host."""
        with self._lock:
            adopted = self._adopted(feeds)
            instance = self.instance(adopted)
            instance.feed(adopted)
            instance.launch()
            return instance.send(names)

    def adopt(self, value: Any) -> np.ndarray | DeviceTensor:
        """A feed as an array, or as the GPU tensor it is."""
        return value if isinstance(value, np.ndarray) else adopt(value, self.stream.handle)

    def _adopted(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.adopt(value) for name, value in feeds.items()}

    def io_binding(self) -> Binding:
        """What `run_with_iobinding` takes."""
        return Binding([v.name or "" for v in self.model.graph.outputs], self.device_id)

    def run_with_iobinding(self, binding: Binding, feeds: Mapping[str, Any] | None = None) -> None:
        """Run on what is bound; the results are the binding's. GPU tensors are read in place.

        `feeds` are the binding's, checked.
        """
        if not binding.targets:
            raise UsageError("no output is bound: bind_output(name) says which are wanted")
        kept = [n for n, place in binding.targets.items() if place == "cuda"]
        fetched = [n for n in binding.targets if n not in kept]
        with self._lock:
            instance = self._launched(binding.feeds if feeds is None else feeds)
            values = dict(zip(kept, instance.keep(kept, binding.places), strict=True))
            if fetched:
                values |= zip(fetched, instance.fetch(fetched), strict=True)
        binding.results = [values[n] for n in binding.targets]

    def run_in_place(
        self, names: Sequence[str], feeds: Mapping[str, Any], *, on_device: bool
    ) -> list[Any]:
        """As `run`, but GPU tensors are read where they stand."""
        with self._lock:
            instance = self._launched(feeds)
            return instance.keep(names) if on_device else instance.fetch(names)

    def _launched(self, feeds: Mapping[str, Any]) -> Instance:
        adopted = self._adopted(feeds)
        places = {
            name: value.address
            for name, value in adopted.items()
            if isinstance(value, DeviceTensor) and value.address % ALIGNED == 0
        }
        instance = self.instance(adopted, places)
        instance.feed(adopted)
        instance.launch()
        return instance

    def instance(
        self, feeds: Mapping[str, Any], places: Mapping[str, int] | None = None
    ) -> Instance:
        """The instance for the shapes and dtypes of `feeds`, made if need be.

        Its graph reads the inputs at `places` from there, and all others from memory of its own.
        """
        places = places or {}
        key = self._key(feeds, places)
        if key not in self._instances:
            self._make_room(0)
            try:
                made = self._make(feeds, places)
            except device.DeviceMemoryError:
                if not self._instances:
                    raise
                self._instances.clear()
                made = self._make(feeds, places)
            key = self._key(feeds, places)
            self._instances[key] = made
            self._make_room(1)
        self._instances.move_to_end(key)
        device.start(self.device_id)  # this thread may be another than the one that made it
        return self._instances[key]

    def _key(self, feeds: Mapping[str, Any], places: Mapping[str, int]) -> tuple[Any, ...]:
        """Places; shapes and dtypes, and the bytes of the feeds that decide about shapes."""
        shapes = tuple((name, *signature(value)) for name, value in sorted(feeds.items()))
        values = tuple(self._host_value(feeds[name]).tobytes() for name in self._deciding)
        return tuple(sorted(places.items())), shapes, values

    def _make(self, feeds: Mapping[str, Any], places: Mapping[str, int]) -> Instance:
        shapes = {name: signature(value) for name, value in feeds.items()}
        while True:
            values = {name: self._host_value(feeds[name]) for name in self._deciding}
            try:
                # the program is the same wherever the inputs are
                alike = self._key(feeds, {})[1:]
                known = (i.program for key, i in self._instances.items() if key[1:] == alike)
                program = next(known, None) or self.program(shapes, values)
                return Instance(self, program, places)
            except NeedsValues as needs:
                self._deciding += [name for name in needs.names if name not in self._deciding]

    def _host_value(self, value: Any) -> np.ndarray:
        pointer = device_pointer(value)
        if pointer is None:
            return np.asarray(value)
        device.start(self.device_id)
        shape, dtype = signature(value)
        array = np.empty(shape, dtype_of(dtype))
        self.stream.download(array.ctypes.data, pointer, array.nbytes)
        self.stream.wait("reading a feed")
        return array

    def program(
        self,
        shapes: Mapping[str, tuple[tuple[int, ...], str]],
        values: Mapping[str, np.ndarray] | None = None,
    ) -> Program:
        """The Program for these input shapes (and values, of inputs that decide about shapes)."""
        known = {name: (t.shape, t.dtype) for name, (t, _) in self.resident.items()}
        program = lower(
            self.model,
            {**known, **shapes},
            self.hw,
            math=self.math,
            prefs=self.prefs,
            state=self.state,
            values=values,
        )
        for fallback in program.fallbacks:
            if fallback not in self._warned:
                self._warned.add(fallback)
                warnings.warn(f"runs on onnxruntime, with copies: {fallback}", stacklevel=4)
        return program

    def _make_room(self, keep: int) -> None:
        def held() -> int:
            return sum(i.memory.nbytes for i in self._instances.values())

        while len(self._instances) > keep and (
            len(self._instances) > INSTANCES or held() > KEEP_BYTES
        ):
            self._instances.popitem(last=False)

    def programs(self) -> list[Program]:
        """The programs of the instances kept, the least recently used first, stages included."""
        return [p for instance in self._instances.values() for p in instance.programs()]

    def release_memory(self) -> int:
        """Free every instance's memory (weights and state stay); the bytes that were held."""
        with self._lock:
            self.stream.wait("release_memory")
            held = sum(i.memory.nbytes for i in self._instances.values())
            self._instances.clear()
            return held

    # ---- weights and state ----

    def place(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Put weights or state on the device under their names, in one allocation."""
        device.start(self.device_id)
        sizes = {name: aligned(array.nbytes) for name, array in arrays.items()}
        block = device.Memory(sum(sizes.values()), f"{len(arrays)} weights")
        self._blocks.append(block)
        at = block.address
        for name, array in arrays.items():
            dense = np.asarray(array, order="C")  # keeps a scalar one
            tensor = _tensor(dense.shape, dense.dtype.name)
            self.resident[name] = (tensor, at)
            if dense.nbytes:
                self.stream.upload(at, dense.ctypes.data, dense.nbytes)
                self.stream.wait(f"uploading {name}")
            at += sizes[name]

    def read(self, name: str) -> np.ndarray:
        """The present value of a weight or state."""
        device.start(self.device_id)
        tensor, address = self.resident[name]
        array = np.empty(tensor.shape, dtype_of(tensor.dtype))
        if array.nbytes:
            self.stream.download(array.ctypes.data, address, array.nbytes)
        self.stream.wait(f"reading {name}")
        return array

    def write(self, name: str, array: np.ndarray) -> None:
        """Replace a weight or state; shape and dtype stay."""
        device.start(self.device_id)
        tensor, address = self.resident[name]
        dense = np.asarray(array, order="C")  # keeps a scalar one
        if (dense.shape, dense.dtype.name) != (tensor.shape, tensor.dtype):
            given = f"{dense.dtype}{list(dense.shape)}"
            raise UsageError(f"{name} is {tensor.dtype}{list(tensor.shape)}, not {given}")
        if dense.nbytes:
            self.stream.upload(address, dense.ctypes.data, dense.nbytes)
        self.stream.wait(f"writing {name}")


class Instance:
    """A Program with its memory and graphs."""

    def __init__(self, owner: Executable, program: Program, places: Mapping[str, int]) -> None:
        self.owner, self.program = owner, program
        self.plan = plan(program)
        if config.DEBUG.value >= 1:
            print(f"{len(program.calls)} calls; {self.plan}", file=sys.stderr)
        if config.DEBUG.value >= 2:
            print(program, file=sys.stderr)
        if config.DUMP.value:
            dump(config.DUMP.value, owner.model, f"{program}\n{self.plan}\n")
        # until here nothing needs the context, which another thread may still be making
        jit.compile_all((x for c in program.calls for x in c.launches), owner.hw.arch)
        device.start(owner.device_id)
        self._place_weights()
        free = device.free_memory()
        own = [b for b in program.buffers if b.kind in ("input", "output", "constant")]
        elsewhere = {name: address for name, (_, address) in owner.resident.items()} | dict(places)
        own = [b for b in own if b.name not in elsewhere or b.kind == "output"]
        at: dict[str, int] = {}
        where: dict[int, int] = {}
        total = 0
        for kind in ("input", "output", "constant"):
            at[kind] = total
            for b in own:
                if b.kind == kind:
                    where[b.id] = total
                    total += aligned(b.nbytes)
        self._spans = {
            "input": (at["input"], at["output"] - at["input"]),
            "output": (at["output"], at["constant"] - at["output"]),
        }
        try:
            self.memory = device.Memory(total + self.plan.arena, "the arena")
        except device.DeviceMemoryError as error:
            weights = sum(m.nbytes for m in owner._blocks)
            raise device.DeviceMemoryError(
                f"{error}; weights and state hold {weights:,} bytes, this shape's temporaries need "
                f"{self.plan.arena:,}: lower the batch or sequence length, or "
                "release_memory() of other sessions"
            ) from error
        base = self.memory.address
        owner.stream.clear(base, total)  # gaps between tensors travel with them
        self.address = {b: base + offset for b, offset in where.items()}
        for buffer, offset in self.plan.offsets.items():
            self.address[buffer] = base + total + offset
        for b in program.buffers:
            if b.kind in ("input", "weight", "random") and b.name in elsewhere:
                self.address[b.id] = elsewhere[b.name]
        self._workspaces = {i: base + total + at for i, at in self.plan.workspaces.items()}
        self._staged = dict(self.address)  # where inputs and outputs pass
        self._apart: dict[int, device.Memory] = {}
        if not config.ARENA.value:
            self._set_apart([b for b in program.buffers if b.id in where or b.kind == "temp"])
        self._staging: list[tuple[device.Pinned, device.Event]] = []
        self._slots: list[Slot] = []
        for buffer, array in program.constants.items():
            if array.nbytes and buffer in where:
                owner.stream.upload(self.address[buffer], array.ctypes.data, array.nbytes)
        owner.stream.wait("uploading constants")
        self._inputs = {name: t for name, t in program.inputs if name not in elsewhere}
        self._steps = [self._prepare(s) for s in segments(program)]
        self._later: list[Any] = [None] * len(program.stages)
        self.taken = free - device.free_memory()
        """Bytes of GPU memory that making it took, as the driver counts them."""

    def __str__(self) -> str:
        fallbacks = "".join(f"on onnxruntime: {f}\n" for f in self.program.fallbacks)
        weights = sum(b.nbytes for b in self.program.buffers if b.kind == "weight")
        return (
            f"{self.program}\n{fallbacks}{self.plan}\n"
            f"this shape holds {self.memory.nbytes:,} bytes, with kernels and graph "
            f"{self.taken:,} (measured); weights {weights:,}"
        )

    def programs(self) -> list[Program]:
        """Its program, and those of the stages behind it."""
        inner = [p for e in self._later if isinstance(e, Executable) for p in e.programs()]
        return [self.program, *inner]

    def _set_apart(self, buffers: Sequence[Buffer]) -> None:
        """An allocation for each of `buffers` and each workspace: a checker sees their ends."""
        self._apart = {b.id: device.Memory(b.nbytes, b.name or "a temporary") for b in buffers}
        self.address |= {b: memory.address for b, memory in self._apart.items()}
        for i in self._workspaces:
            self._apart[-1 - i] = device.Memory(self.program.calls[i].workspace, "a workspace")
            self._workspaces[i] = self._apart[-1 - i].address

    def _place_weights(self) -> None:
        owner, graph = self.owner, self.owner.model.graph
        arrays = {}
        for b in self.program.buffers:
            if b.kind == "weight" and b.name not in owner.resident:
                if b.id in self.program.constants:  # made of others at lowering
                    arrays[b.name] = self.program.constants[b.id]
                    continue
                value = graph.initializers[b.name].const_value
                assert value is not None
                arrays[b.name] = value.numpy()
            elif b.kind == "random" and b.name not in owner.resident:
                arrays[b.name] = np.array([owner._seed, 0], np.uint64)
        if arrays:
            owner.place(arrays)

    def _prepare(self, segment: Segment) -> Any:
        """Bound launches as a callable: a captured graph, single launches, or a host call."""
        owner = self.owner
        if segment.host:
            from onnx_fuse.runtime import ort

            with ort.faults(f"{segment.calls[0].nodes[0]}, which has no kernel"):
                return partial(self._host, segment, ort.session(segment.host))
        bound: list[tuple[str, jit.Step]] = []
        after: list[list[int]] = []
        last: dict[int, list[int]] = {}  # call -> its last launch, or those it stands for
        aside = bool(config.GRAPH.value) and self._aside(segment)
        for i, call in enumerate(segment.calls, segment.first):
            heads = [k for c in self.plan.order.after[i] for k in last.get(c, ())]
            for entry in self._bind(i, call, early=not aside):
                after.append(list(dict.fromkeys(heads)))
                heads = [len(bound)]
                bound.append(entry)
            last[i] = heads
        if not bound:
            return lambda: None

        def run(label: str, step: jit.Step) -> None:
            try:
                step.enqueue(owner.stream.handle)
                if config.DEBUG.value and not config.GRAPH.value:
                    owner.stream.wait("after its launch")
            except DeviceError as error:
                raise DeviceError(f"{label}: {error}") from error

        steps = [partial(run, *entry) for entry in bound]

        def enqueue() -> None:
            for step in steps:
                step()

        if not config.GRAPH.value:
            return enqueue
        if aside:
            waits = owner.hw.cc >= 90  # kernels themselves, by griddepcontrol
            early = along_rows(after) if waits else [False] * len(after)
            graph = owner.stream.capture_steps(steps, after, early)
        else:
            graph = owner.stream.capture(enqueue)
        # the graph uses what `bound` owns: both live as long as this
        return lambda: owner.stream.launch(graph, f"a graph of {len(bound)} launches")

    def _aside(self, segment: Segment) -> bool:
        """Whether calls may run side by side, and no kernel counts on a single launch before it."""
        after, first = self.plan.order.after, segment.first
        free = any(i - 1 not in after[i] for i in range(first + 1, first + len(segment.calls)))
        launches = [launch for call in segment.calls for launch in call.launches]
        plain = all(x.product is None and not x.cooperative for x in launches)
        return free and plain and all(jit.waits_first(x.source) for x in launches)

    def _bind(self, i: int, call: Call, early: bool = True) -> list[tuple[str, jit.Step]]:
        """The launches of call `i` with their addresses, and what messages call them."""
        pointers = {
            name: self.address[t.buffer] + t.offset * ITEMSIZE[t.dtype]
            for name, t in (*call.reads, *call.writes)
        }
        if call.workspace:
            pointers["workspace"] = self._workspaces[i]
        label = f"{call.kernel} ({', '.join(call.nodes[:3])}): {call.problem or ''}"
        hw = self.owner.hw
        try:
            return [(f"{label} {x.entry}", jit.bind(x, pointers, hw, early)) for x in call.launches]
        except DeviceError as error:
            raise DeviceError(f"{label}: {error}") from error

    def _array(self, tensor: Tensor) -> np.ndarray:
        array = np.empty(tensor.shape, dtype_of(tensor.dtype))
        if array.nbytes:
            address = self.address[tensor.buffer] + tensor.offset * ITEMSIZE[tensor.dtype]
            self.owner.stream.download(array.ctypes.data, address, array.nbytes)
        return array

    def _host(self, segment: Segment, session: Any) -> None:
        call, stream = segment.calls[0], self.owner.stream
        feeds = {name: self._array(tensor) for name, tensor in call.reads}
        stream.wait(f"before {call.kernel} ({call.nodes[0]})")
        results = session.run([name for name, _ in call.writes], feeds)
        for (_, tensor), result in zip(call.writes, results, strict=True):
            dense = np.ascontiguousarray(result)
            if dense.nbytes:
                stream.upload(self.address[tensor.buffer], dense.ctypes.data, dense.nbytes)
        stream.wait(f"after {call.kernel}")

    # ---- run ----

    def feed(self, feeds: Mapping[str, Any]) -> None:
        """Copy the feeds into the instance's input memory."""
        stream = self.owner.stream
        start, span = self._spans["input"]
        base = self.memory.address
        arrays = {n: feeds[n] for n in self._inputs if isinstance(feeds[n], np.ndarray)}
        if span and arrays:
            pinned, uploaded = self._free_staging(span)
            for name, value in arrays.items():
                at = self._staged[self._inputs[name].buffer] - base - start
                room = pinned.array[at : at + value.nbytes]
                np.copyto(room.view(value.dtype).reshape(value.shape), value)
            stream.upload(base + start, pinned.address, span)
            uploaded.record(stream)
        for name, tensor in self._inputs.items():
            pointer = device_pointer(feeds[name])
            if pointer is None and tensor.buffer in self._apart:
                pointer = self._staged[tensor.buffer]
            if pointer is not None and tensor.nbytes:
                stream.move(self.address[tensor.buffer], pointer, tensor.nbytes)

    def _free_staging(self, span: int) -> tuple[device.Pinned, device.Event]:
        """Pinned memory whose last upload is done: a second one where the first is still read."""
        for pair in self._staging:
            if pair[1].passed():
                return pair
        if len(self._staging) < 2:
            self._staging.append((device.Pinned(span), device.Event()))
        else:  # the older upload ends first
            self._staging.reverse()
            self._staging[1][1].wait("uploading feeds")
        return self._staging[-1]

    def launch(self) -> None:
        """All between the feeds and the fetches; returns before it is done."""
        for step in self._steps:
            step()

    def profile(self) -> list[tuple[Call, float]]:
        """Seconds of each kernel call by itself, best of three graphs of 20; state changes."""
        found = []
        for i, call in enumerate(self.program.calls):
            if call.launches:
                bound = [step for _, step in self._bind(i, call)]

                def enqueue(steps: list[jit.Step] = bound) -> None:
                    for _ in range(20):
                        for step in steps:
                            step.enqueue(self.owner.stream.handle)

                graph = self.owner.stream.capture(enqueue)
                launch = partial(self.owner.stream.launch, graph, "a graph")
                times = [self.owner.stream.timed(launch, 3) for _ in range(3)]
                found.append((call, min(times) / 20))
        return found

    def keep(
        self, names: Sequence[str] | None = None, places: Mapping[str, DeviceTensor] | None = None
    ) -> list[Any]:
        """The outputs named, at `places` or in memory of their own on the GPU.

        An array where the output is known without a run.
        """
        known, stream = dict(self.program.outputs), self.owner.stream
        wanted = list(known) if names is None else names
        later = self._run_stages(on_device=True) if self.program.stages else {}
        results: list[Any] = []
        for name in wanted:
            value, target = known[name], (places or {}).get(name)
            made = later[name] if value is None else value
            if isinstance(made, np.ndarray) and target is None:
                made = made.copy()
            if target is not None and signature(target) != (made.shape, str(made.dtype)):
                raise UsageError(f"output {name} is {made.dtype}{list(made.shape)}, not {target}")
            if isinstance(made, DeviceTensor):
                if target is not None:
                    stream.move(target.address, made.address, made.nbytes)
                results.append(made if target is None else target)
                continue
            if isinstance(made, np.ndarray):
                if target is not None and made.nbytes:
                    stream.upload(target.address, made.ctypes.data, made.nbytes)
                    stream.wait(f"output {name}")
                results.append(made if target is None else target)
                continue
            if target is None:
                memory = device.Memory(made.nbytes, f"output {name}")
                own = self.owner.device_id
                target = DeviceTensor(memory.address, made.shape, made.dtype, own, memory)
            if made.nbytes:
                stream.move(target.address, self.address[made.buffer], made.nbytes)
            results.append(target)
        stream.wait(self.describe())
        return results

    def fetch(self, names: Sequence[str] | None = None) -> list[np.ndarray]:
        """The outputs named (None: all but state), after waiting for them."""
        program = self.program
        slot = self._download()
        slot.arrived.wait(self.describe())
        found = self._run_stages() if program.stages else {}
        state = self.owner.state
        wanted = [n for n, _ in program.outputs if n not in state] if names is None else list(names)
        known = dict(program.outputs)
        results = []
        for name in wanted:
            value = known[name]
            if isinstance(value, Tensor) and name in self.owner.state:
                results.append(self.owner.read(self.owner.state[name]))
            elif isinstance(value, Tensor):
                results.append(self.unpacked(slot, value))
            else:
                results.append(found[name] if value is None else value.copy())
        return results

    def send(self, names: Sequence[str]) -> Pending:
        """The outputs named, which are no states; without waiting, unless stages follow."""
        if self.program.stages:
            return Pending(self, names, None, self.fetch(names))
        return Pending(self, names, self._download())

    def _download(self) -> Slot:
        """Start copying the outputs to the host, into pinned memory that nobody waits for."""
        start, span = self._spans["output"]
        slot = next((slot for slot in self._slots if slot.holds is None), None)
        if slot is None and len(self._slots) < SLOTS:
            slot = Slot(device.Pinned(span), device.Event())
            self._slots.append(slot)
        elif slot is None:
            slot = self._slots.pop(0)
            self._slots.append(slot)
            assert slot.holds is not None
            slot.holds.result()
        stream = self.owner.stream
        for b in self.program.buffers:
            if b.kind == "output" and b.id in self._apart and b.nbytes:
                stream.move(self._staged[b.id], self.address[b.id], b.nbytes)
        if span:
            stream.download(slot.pinned.address, self.memory.address + start, span)
        slot.arrived.record(stream)
        return slot

    def unpacked(self, slot: Slot, value: Tensor | np.ndarray | None) -> np.ndarray:
        """A copy of an output that has arrived in `slot`, or that lowering knew."""
        if not isinstance(value, Tensor):
            assert value is not None, "a later stage's outputs are not sent"
            return value.copy()
        at = self._staged[value.buffer] - self.memory.address - self._spans["output"][0]
        raw = slot.pinned.array[at : at + value.nbytes]
        return raw.copy().view(dtype_of(value.dtype)).reshape(value.shape)

    def describe(self) -> str:
        """What runs, for messages."""
        return f"running a program of {len(self.program.calls)} calls"

    def _run_stages(self, *, on_device: bool = False) -> dict[str, Any]:
        """The outputs of the stages behind the calls, which the calls' results have decided."""
        made: dict[str, Any] = {}
        for k, stage in enumerate(self.program.stages):
            feeds = {n: made[n] if t is None else self._there(t) for n, t in stage.inputs}
            if stage.host:
                found = self._on_host(k, stage, feeds)
            else:
                found = self._on_device(k, stage, feeds, on_device)
            made |= zip(stage.outputs, found, strict=True)
        return made

    def _there(self, tensor: Tensor) -> DeviceTensor:
        """A tensor of this program as a feed of another."""
        address = self.address[tensor.buffer] + tensor.offset * ITEMSIZE[tensor.dtype]
        return DeviceTensor(address, tensor.shape, tensor.dtype, self.owner.device_id, self)

    def _on_host(self, k: int, stage: Stage, feeds: Mapping[str, Any]) -> list[Any]:
        if self._later[k] is None:
            from onnx_fuse.runtime import ort

            with ort.faults(f"what depends on {', '.join(n for n, _ in stage.inputs)}"):
                self._later[k] = ort.session(stage.model)
        self.owner.stream.wait("before a stage on onnxruntime")
        arrays = {name: np.asarray(value) for name, value in feeds.items()}
        found: list[Any] = self._later[k].run(list(stage.outputs), arrays)
        return found

    def _on_device(
        self, k: int, stage: Stage, feeds: Mapping[str, Any], on_device: bool
    ) -> list[Any]:
        owner = self.owner
        if self._later[k] is None:
            model = ir.serde.deserialize_model(onnx.ModelProto.FromString(stage.model))
            self._later[k] = Executable(
                model,
                math=owner.math,
                prefs=owner.prefs,
                device_id=owner.device_id,
                home=owner,
                seed=owner._seed,
            )
        inner: Executable = self._later[k]
        results = inner.run_in_place(list(stage.outputs), feeds, on_device=on_device)
        return results


@dataclass
class Slot:
    """Pinned memory for one run's outputs: `arrived` when they are there, for `holds` to read."""

    pinned: device.Pinned
    arrived: device.Event
    holds: Pending | None = None


class Pending:
    """Outputs of a run that are on their way to the host."""

    def __init__(
        self,
        instance: Instance,
        names: Sequence[str],
        slot: Slot | None,
        values: list[np.ndarray] | None = None,
    ) -> None:
        self._instance, self._names, self._slot = instance, list(names), slot
        self._values = values
        if slot is not None:
            slot.holds = self

    def result(self) -> list[np.ndarray]:
        """The outputs, after waiting for them. Raises DeviceError where a kernel failed."""
        if self._values is None:
            assert self._slot is not None
            instance, known = self._instance, dict(self._instance.program.outputs)
            device.start(instance.owner.device_id)
            self._slot.arrived.wait(instance.describe())
            self._values = [instance.unpacked(self._slot, known[name]) for name in self._names]
            self._slot.holds = None
        return self._values


_NUMBERS = itertools.count(1)


def dump(folder: Path, model: ir.Model, program: str) -> None:
    """The fused model and the program of one shape, under the next free number."""
    folder.mkdir(parents=True, exist_ok=True)
    number = next(n for n in _NUMBERS if not (folder / f"{n:02d}.program.txt").exists())
    save(model, folder / f"{number:02d}.model.onnx")
    (folder / f"{number:02d}.program.txt").write_text(program)


def _tensor(shape: Sequence[int], dtype: str) -> Tensor:
    from onnx_fuse.llir import dense_strides

    return Tensor(-1, dtype, tuple(shape), dense_strides(shape))


def signature(value: np.ndarray | DeviceTensor) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) of a feed."""
    return value.shape, value.dtype.name


def device_pointer(value: np.ndarray | DeviceTensor) -> int | None:
    """Address of a feed that stands on the device, None for an array."""
    return value.address if isinstance(value, DeviceTensor) else None

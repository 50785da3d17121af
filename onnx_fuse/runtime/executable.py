"""A model on one GPU: an Instance for each set of input shapes, weights and state, the ways to run.

The instances follow each other in one stream and so share one arena; weights and state stand
outside. Inputs and outputs are read and written in place where a caller binds them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse.errors import UsageError
from onnx_fuse.llir import Program, Tensor
from onnx_fuse.problem import Hardware
from onnx_fuse.runtime import device
from onnx_fuse.runtime.binding import Binding
from onnx_fuse.runtime.instance import Fetch, Instance, Placement
from onnx_fuse.runtime.memory import Arena, Constants
from onnx_fuse.runtime.shapes import Feeds, Shape, Shapes
from onnx_fuse.runtime.staging import Downloads, Pending, Uploads
from onnx_fuse.runtime.tensor import DeviceTensor, adopt, dtype_of
from onnx_fuse.runtime.turns import Turns
from onnx_fuse.runtime.weights import Weights

if TYPE_CHECKING:
    import onnx_ir as ir

DIRECT_BYTES = 1 << 20
"""From here on, an output that is kept is written where it stays rather than copied there, although
the graph must be told the place: that takes the host some microseconds a kernel, a copy of so many
bytes one on the GPU."""


@dataclass(frozen=True)
class Prepared:
    """A binding whose runs need no more than copies of bound arrays, a launch, copies back.

    `results` has a place for each output wanted, None for those of `fetch`.
    """

    owner: Executable
    instance: Instance
    placement: Placement
    feeds: Feeds
    foreign: bool
    copies: bool
    fetch: Fetch | None
    results: dict[str, DeviceTensor | None]


class Executable:
    """A model on one GPU: lowered, planned and bound for each set of input shapes it meets.

    `state` maps outputs to the inputs or initializers they replace in place: those stay on the
    device (`weights` reaches them) and are not fed. `home` is an Executable whose such
    tensors, and whose stream, this one shares and which must outlive it. Any number of threads may
    run it. Raises DeviceError for what the GPU, its driver or NVRTC cannot do.
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
        from onnx_fuse.ops.update import expand_standard_updates

        device.probe(device_id)
        expand_standard_updates(model)
        self.model, self.math, self.prefs, self.state = model, math, prefs, dict(state or {})
        self.device_id = device_id
        self.hw = Hardware.detect(device_id)
        self._home, self._seed = home, seed
        self._stream: device.Stream | None = None
        self.uploads, self.downloads = Uploads(), Downloads()
        self.shapes = Shapes(self, [v.name or "" for v in model.graph.inputs])
        self._lock = threading.RLock()
        self._warned: set[str] = set()

    @property
    def stream(self) -> device.Stream:
        """The stream of all its work; made at first use, which needs the device's context."""
        if self._stream is None:
            with self._lock:  # one, whatever threads come first
                if self._stream is None:
                    device.start(self.device_id)
                    stream = device.Stream() if self._home is None else self._home.stream
                    self._turns = Turns(stream)
                    self._stream = stream
        return self._stream

    @cached_property
    def weights(self) -> Weights:
        """What stays on the device, by name."""
        home = None if self._home is None else self._home.weights
        return Weights(self.stream, self.device_id, home, self._seed)

    @cached_property
    def pool(self) -> device.Pool:
        """Where outputs that stay on the GPU, constants and the arena come from."""
        return device.Pool(self.stream, self.device_id)

    @cached_property
    def arena(self) -> Arena:
        """What all shapes run in."""
        return Arena(self.pool, self.shapes.retire)

    @cached_property
    def constants(self) -> Constants:
        """What lowering knew."""
        return Constants(self.pool, self.stream)

    def inner(self, model: ir.Model) -> Executable:
        """An Executable of a part of this one's work."""
        return Executable(
            model,
            math=self.math,
            prefs=self.prefs,
            device_id=self.device_id,
            home=self,
            seed=self._seed,
        )

    # ---- run ----

    def run(
        self, names: Sequence[str] | None, feeds: Feeds, *, on_device: bool = False
    ) -> list[Any]:
        """The outputs named (None: all but state), as arrays, or as DeviceTensors if `on_device`.

        Feeds are arrays, or GPU tensors of any library that has DLPack or the CUDA array interface.
        """
        stream, direct = self.stream, None
        with self._lock:
            adopted = self._adopted(feeds, stream)
            shape = self.shapes.of(adopted)
            if on_device:
                kept = [n for n, _ in shape.program.outputs] if names is None else list(names)
                found = self._kept(shape, adopted, kept, {}, {}, stream)
                stream.wait(f"running a program of {len(shape.program.calls)} calls")
                return [_settled(found[name]) for name in kept]
            instance = self.shapes.ready(shape, {}, {})
            fetch = instance.fetching(names)
            self._turns.enter(stream)
            if instance.settled and instance.direct is not None:
                direct, placement = instance.direct
                if not direct.fill(adopted):
                    direct = None
            if direct is not None:
                try:
                    instance.place(placement)
                    instance.launch(stream)
                except BaseException:
                    direct.free.release()
                    raise
            else:
                instance.place(instance.home)
                instance.feed(adopted, stream)
                instance.launch(stream)
                room = instance.download(fetch, stream)
            if instance.program.stages:
                stream.wait(instance.describe())
                return instance.arrays(fetch, room, shape.stages.run(instance))
        if direct is None:
            stream.wait(instance.describe())
            return instance.arrays(fetch, room)
        try:
            stream.wait(instance.describe())
            return instance.copies(fetch, direct.outputs)
        finally:
            direct.free.release()

    def send(self, names: Sequence[str], feeds: Feeds) -> Pending:
        """Start a run and return at once: the outputs named, no states, are on their way."""
        with self._lock:
            adopted = self._adopted(feeds, self.stream)
            shape = self.shapes.of(adopted)
            instance = self.shapes.ready(shape, {}, {})
            self._turns.enter(self.stream)
            instance.place(instance.home)
            instance.feed(adopted, self.stream)
            instance.launch(self.stream)
            return self._sent(shape, names, self.stream)

    def _sent(self, shape: Shape, names: Sequence[str], stream: device.Stream) -> Pending:
        instance = shape.instance
        assert instance is not None
        fetch = instance.fetching(names)
        if instance.program.stages:
            room = instance.download(fetch, stream)
            stream.wait(instance.describe())
            values = instance.arrays(fetch, room, shape.stages.run(instance))
            return Pending(names, lambda: None, lambda: values)
        pending = instance.send(fetch, stream)
        self.downloads.follow(pending)
        return pending

    def adopt(self, value: Any) -> np.ndarray | DeviceTensor:
        """A feed as an array, or as the GPU tensor it is."""
        return value if isinstance(value, np.ndarray) else adopt(value, self.stream.handle)

    def _adopted(self, feeds: Feeds, stream: device.Stream) -> Feeds:
        """The feeds as arrays and GPU tensors, which `stream` comes after."""
        for value in feeds.values():
            kind = type(value)
            if kind is not np.ndarray and (kind is not DeviceTensor or value.ready is not None):
                return {name: adopt(value, stream.handle) for name, value in feeds.items()}
        return feeds

    def _kept(
        self,
        shape: Shape,
        feeds: Feeds,
        names: Sequence[str],
        places: Mapping[str, DeviceTensor],
        inputs: Mapping[str, DeviceTensor],
        stream: device.Stream,
    ) -> dict[str, Any]:
        """Run; the outputs named, at `places` or in memory of their own on the GPU.

        `inputs` are read in place. An array where the output is known without a run.
        """
        outputs, instance = dict(shape.program.outputs), shape.instance
        targets = dict(places)
        for name, target in places.items():
            _check_place(name, target, outputs[name])
        made: dict[str, DeviceTensor] = {}
        copied = instance is not None and instance.settled
        for name in names:
            value = outputs[name]
            if isinstance(value, Tensor) and name not in places:
                made[name] = self._memory(name, value)
                if not copied or value.nbytes >= DIRECT_BYTES:
                    targets[name] = made[name]
        instance = self.shapes.ready(shape, inputs, targets)
        self._turns.enter(stream)
        if stream is not self.stream and made:  # which is the pool's
            self.stream.before(stream)
        placement = instance.placement(inputs, targets)
        instance.place(placement)
        instance.feed(feeds, stream)
        instance.launch(stream)
        later = {}
        if instance.program.stages:
            later = shape.stages.run(instance, on_device=True)
        found: dict[str, Any] = {}
        for name in names:
            value = instance.outputs[name]
            if not isinstance(value, Tensor):
                value = later[name] if value is None else value
                found[name] = self._placed(name, value, places.get(name))
                continue
            target = places[name] if name in places else made[name]
            if name in placement.copied or name not in targets:
                instance.copy_out(name, target, stream)
            found[name] = target
        for result in found.values():
            if isinstance(result, DeviceTensor):
                result.ready = stream
        return found

    def _memory(self, name: str, value: Tensor) -> DeviceTensor:
        memory = self.pool.take(value.nbytes, f"output {name}")
        return DeviceTensor(memory.address, value.shape, value.dtype, self.device_id, memory)

    def _placed(self, name: str, made: Any, target: DeviceTensor | None) -> Any:
        """An output that lowering knew or a later stage made, at `target` if there is one."""
        if target is None:
            return made.copy() if isinstance(made, np.ndarray) else made
        _check_place(name, target, made)
        if isinstance(made, DeviceTensor):
            self.stream.move(target.address, made.address, made.nbytes)
        elif made.nbytes:
            dense = np.ascontiguousarray(made)
            self.stream.upload(target.address, dense.ctypes.data, dense.nbytes)
        return target

    # ---- bound ----

    def io_binding(self) -> Binding:
        """What `run_with_iobinding` takes."""
        return Binding([v.name or "" for v in self.model.graph.outputs], self.device_id)

    def run_with_iobinding(
        self,
        binding: Binding,
        checked: Callable[[Feeds], Feeds] | None = None,
        *,
        stream: Any = None,
        synchronize: bool = True,
    ) -> None:
        """Run on what is bound; the results are the binding's. GPU memory is used in place.

        `checked` makes feeds of what is bound, where that is not known to be good.
        """
        target = self.stream
        if stream is not None:
            target = self._turns.stream(stream)
        prepared: Prepared | None = binding.prepared
        # what other libraries enqueue, and into which stream, only their tensors know
        if (
            prepared is not None
            and prepared.owner is self
            and prepared.instance.alive
            and (stream is not None or not prepared.foreign)
        ):
            self._again(binding, prepared, target)
        else:
            self._bound(
                binding, binding.feeds if checked is None else checked(binding.feeds), target
            )
        if synchronize:
            target.wait("running what is bound")
            binding.ran_in = None
            for result in binding.results.values():
                if type(result) is DeviceTensor:
                    result.ready = None
        else:
            binding.ran_in = target
            for result in binding.results.values():
                if type(result) is DeviceTensor:
                    result.ready = target

    def _again(self, binding: Binding, prepared: Prepared, stream: device.Stream) -> None:
        """Run what is bound as it was bound before."""
        instance = prepared.instance
        device.start(self.device_id)
        with self._lock:
            self._turns.enter(stream)
            instance.place(prepared.placement)
            if prepared.copies:
                instance.feed(prepared.feeds, stream)
            instance.launch(stream)
            if prepared.fetch is None:
                binding.late = None
            else:
                binding.late = instance.send(prepared.fetch, stream)
                self.downloads.follow(binding.late)
            self._turns.leave(stream)
        binding.results = prepared.results if prepared.fetch is None else dict(prepared.results)

    def _bound(self, binding: Binding, feeds: Feeds, stream: device.Stream) -> None:
        if not binding.targets:
            raise UsageError("no output is bound: bind_output(name) says which are wanted")
        kept = [n for n, place in binding.targets.items() if place == "cuda"]
        fetched = [n for n in binding.targets if n not in kept]
        with self._lock:
            adopted = self._adopted(feeds, stream)
            for value in binding.lent.values():
                adopt(value, stream.handle)  # what its library still does with it comes first
            inputs = {n: v for n, v in adopted.items() if isinstance(v, DeviceTensor)}
            shape = self.shapes.of(adopted)
            # between kernels, hosts and later stages work in the stream of this
            where = stream if shape.whole_on_gpu else self.stream
            stream.before(where)
            values = self._kept(shape, adopted, kept, binding.places, inputs, where)
            instance = shape.instance
            assert instance is not None
            binding.late = self._sent(shape, fetched, where) if fetched else None
            self._turns.leave(where)
            where.before(stream)
            binding.results = {n: values.get(n) for n in binding.targets}
            # what values decide, lowering knew or no place is bound for is found out each time
            complete = not instance.now.copied and shape.whole_on_gpu and not self.shapes.deciding
            own = (isinstance(instance.outputs[n], Tensor) and n in binding.places for n in kept)
            if complete and all(own):
                binding.prepared = Prepared(
                    self,
                    instance,
                    instance.now,
                    adopted,
                    binding.foreign,
                    not instance.all_in_place(inputs),
                    instance.fetching(fetched) if fetched else None,
                    dict(binding.results),
                )

    def run_in_place(self, names: Sequence[str], feeds: Feeds, *, on_device: bool) -> list[Any]:
        """As `run`, but GPU tensors are read where they stand."""
        stream = self.stream
        with self._lock:
            adopted = self._adopted(feeds, stream)
            inputs = {n: v for n, v in adopted.items() if isinstance(v, DeviceTensor)}
            shape = self.shapes.of(adopted)
            if on_device:
                found = self._kept(shape, adopted, names, {}, inputs, stream)
                return [found[name] for name in names]
            instance = self.shapes.ready(shape, inputs, {})
            self._turns.enter(stream)
            instance.place(instance.placement(inputs, {}))
            instance.feed(adopted, stream)
            instance.launch(stream)
            return self._sent(shape, names, stream).result()

    # ---- shapes ----

    def instance(self, feeds: Feeds) -> Instance:
        """The instance for the shapes and dtypes of `feeds`, made if need be."""
        with self._lock:
            return self.shapes.ready(self.shapes.of(feeds), {}, {})

    def program(
        self,
        shapes: Mapping[str, tuple[tuple[int, ...], str]],
        values: Mapping[str, np.ndarray] | None = None,
    ) -> Program:
        """The Program for these input shapes (and values, of inputs that decide about shapes)."""
        from onnx_fuse.lower import lower

        known = {name: (t.shape, t.dtype) for name, (t, _) in self.weights.resident.items()}
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
                warnings.warn(f"runs on onnxruntime, with copies: {fallback}", stacklevel=5)
        return program

    def instances(self) -> list[Instance]:
        """Those that have memory, the least recently used first."""
        return self.shapes.instances()

    def programs(self) -> list[Program]:
        """The programs of the shapes kept, the least recently used first, stages included."""
        return self.shapes.programs()

    def release_memory(self) -> int:
        """Free what runs hold (weights and state stay); the bytes that were held."""
        with self._lock:
            self.stream.catch_up()
            self.stream.wait("release_memory")
            held = self.arena.nbytes
            self.shapes.give_up()
            self.shapes.clear()
            return held


def _settled(result: Any) -> Any:
    if isinstance(result, DeviceTensor):
        result.ready = None
    return result


def _check_place(name: str, target: DeviceTensor, value: Any) -> None:
    """Refuse a place of another shape or type than the output's, unless that comes later."""
    if value is None:
        return
    dtype = dtype_of(value.dtype) if isinstance(value, Tensor) else value.dtype
    if (target.shape, target.dtype) != (tuple(value.shape), dtype):
        raise UsageError(f"output {name} is {dtype}{list(value.shape)}, not {target}")

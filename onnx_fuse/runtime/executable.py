"""A model on one GPU: an Instance for each set of input shapes, weights and state, the ways to run.

The instances follow each other in one stream and so share one arena; weights and state stand
outside. Inputs and outputs are read and written in place where a caller binds them.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_fuse import config
from onnx_fuse.arrays import Array
from onnx_fuse.errors import DeviceError, UsageError
from onnx_fuse.program.call import LENGTHS, NeedsValues, Program, Shapes, Tensor
from onnx_fuse.program.packing import Packing
from onnx_fuse.program.size import size_class
from onnx_fuse.runtime import collector, device
from onnx_fuse.runtime.binding import Binding, check_place
from onnx_fuse.runtime.deployed import Deployed
from onnx_fuse.runtime.growing import Growing
from onnx_fuse.runtime.host_calls import Stages
from onnx_fuse.runtime.instance import Instance
from onnx_fuse.runtime.plan import PlannedProgram
from onnx_fuse.runtime.prepared import OutputGroup, Prepared, kinds_of, output_groups
from onnx_fuse.runtime.resources import AfterFault, Resources, weakly
from onnx_fuse.runtime.shapes import KeptShapes, Shape
from onnx_fuse.runtime.staging import Pending
from onnx_fuse.runtime.tensor import DeviceTensor, DeviceTensors, adopt
from onnx_fuse.runtime.weights import Weights

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnx_fuse.runtime.budget import Budget
    from onnx_fuse.runtime.precompile import Precompiler
    from onnx_fuse.runtime.program_cache import Origin
    from onnx_fuse.runtime.specialize import Specializer

DIRECT_BYTES = 1 << 20
"""From here on, an output that is kept is written where it stays rather than copied there, although
the graph must be told the place: that takes the host some microseconds a kernel, a copy of so many
bytes one on the GPU."""

Feeds = Mapping[str, Any]


class Executable:
    """A model on one GPU: lowered, planned and bound for each set of input shapes it meets.

    A `Deployed` model has its programs already; nothing of ONNX or NVRTC is imported for it.
    `state` maps outputs to the inputs or initializers they replace in place: those stay on the
    device (`weights` reaches them) and are not fed. `home` are the Resources whose such tensors,
    and whose stream, this one shares. `memory` bounds the bytes that a program takes
    (`runtime.budget`). Any number of threads may run it. Raises DeviceError for what the GPU, its
    driver or NVRTC cannot do.
    """

    def __init__(
        self,
        model: ir.Model | Deployed,
        *,
        math: str = "ieee",
        prefs: Mapping[str, str] | None = None,
        state: Mapping[str, str] | None = None,
        device_id: int = 0,
        home: Resources | None = None,
        memory: Budget | None = None,
    ) -> None:
        device.probe(device_id)
        if not isinstance(model, Deployed):
            from onnx_fuse.ops.update import expand_standard_updates

            expand_standard_updates(model)
        self.model, self.math, self.prefs, self.state = model, math, prefs, dict(state or {})
        self.device_id = device_id
        self._shapes = KeptShapes()
        retire = weakly(self._shapes.retire)
        self.shared = Resources(model, self.state, device_id, home, retire)
        """What its instances refer to, and not to this."""
        self.hw, self._memory = self.shared.hw, memory
        self._lock = threading.RLock()
        self._fresh_after_fault = AfterFault(weakly(self._forget_all))
        self._warned: set[str] = set()
        self.input_names = sorted(v.name or "" for v in self._ends(model).inputs)
        replaced = set(self.state.values())
        self._fed_names = [name for name in self.input_names if name not in replaced] + [LENGTHS]
        self.on_shape: Callable[[Feeds], None] | None = None  # told of feeds whose shape is new
        self.on_lowered: Callable[[ir.Model], Future[Origin | None]] | None = None
        """Told of the graph once it is first lowered, what that made of weights included; says
        later where it is kept."""
        self._resident_shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        self._deciding: list[str] = []  # feeds whose values decide about shapes
        self._expected: Counter[tuple[Any, ...]] = Counter()
        """How many shapes of the same classes of sizes have come."""

    @cached_property
    def specializer(self) -> Specializer:
        """What lowers the graph and keeps its programs by shape."""
        from onnx_fuse.runtime.specialize import Specializer

        assert not isinstance(self.model, Deployed), "it has its programs"
        return Specializer(
            self.model,
            self.hw,
            math=self.math,
            prefs=self.prefs,
            state=self.state,
            memory=self._memory,
        )

    @cached_property
    def _ahead(self) -> Precompiler | None:
        """The Precompiler of this model; None where nothing is prepared ahead of time."""
        from onnx_fuse.runtime.precompile import Precompiler

        nothing_to_do = isinstance(self.model, Deployed) or config.CACHE_MB.value <= 0
        return None if nothing_to_do else Precompiler(self.specializer)

    def keep(self, origin: Future[Origin | None]) -> None:
        """Keep programs in the cache, and take them from there, once it is known by what name."""
        self.specializer.cache_as(origin)

    @property
    def stream(self) -> device.Stream:
        """The stream of all its work. It is made at first use, which needs the device's context."""
        return self.shared.stream

    @property
    def weights(self) -> Weights:
        """What stays on the device, by name."""
        return self.shared.weights

    @staticmethod
    def _ends(model: ir.Model | Deployed) -> ir.Graph | Deployed:
        """The object that lists the inputs and outputs of the model."""
        return model if isinstance(model, Deployed) else model.graph

    def check(self) -> None:
        """Raise DeviceError where programs that are compiled already are for another GPU."""
        if isinstance(self.model, Deployed):
            self.model.target(self.hw)

    # ---- run ----

    def run(
        self, names: Sequence[str] | None, feeds: Feeds, *, on_device: bool = False
    ) -> list[Any]:
        """The outputs named (None: all but state), as arrays, or as DeviceTensors if `on_device`.

        Feeds are arrays, or GPU tensors of any library that has DLPack or the CUDA array interface.
        """
        stream, direct = self.stream, None
        try:
            with self._lock, self._fresh_after_fault:
                adopted = self._adopted(feeds, stream)
                instance = self.instance(adopted)
                stream.catch_up()
                if on_device:
                    wanted = list(instance.outputs) if names is None else list(names)
                    results = self._kept(instance, adopted, wanted, {}, {}, stream)
                    stream.wait(instance.describe())
                    return [_settled(results[name]) for name in wanted]
                fetch = instance.fetching(names)
                direct, placement = instance.zero_copied(adopted)
                instance.place(placement)
                if direct is None:
                    instance.feed(adopted, stream)
                instance.launch(stream)
                room = None if direct is not None else instance.download(fetch, stream)
                if instance.staged:
                    stream.wait(instance.describe())
                    return instance.arrays(fetch, room, self._later(instance).run())
            stream.wait(instance.describe())
            if direct is not None:
                return instance.copies(fetch, direct.outputs)
            return instance.arrays(fetch, room)
        finally:
            if direct is not None:
                direct.free.release()

    def send(self, names: Sequence[str], feeds: Feeds) -> Pending:
        """Start a run and return at once: the outputs named, no states, are on their way."""
        with self._lock, self._fresh_after_fault:
            adopted = self._adopted(feeds, self.stream)
            instance = self.instance(adopted)
            stream = self.stream
            stream.catch_up()
            fetch = instance.fetching(names)
            # a budget has no room for a second place of the inputs
            bounded = self._memory is not None
            slot = None if bounded else instance.turn(fetch, adopted, stream)
            if slot is not None:
                instance.run_turn(*slot, adopted, stream)
                turn, _ = slot
                if turn.outputs:
                    return instance.sent(fetch, turn)
                return self._sent(instance, names, stream)
            instance.place(instance.placement({}, {}))
            instance.feed(adopted, stream)
            instance.launch(stream)
            return self._sent(instance, names, stream)

    def _sent(self, instance: Instance, names: Sequence[str], stream: device.Stream) -> Pending:
        fetch = instance.fetching(names)
        if instance.staged:
            room = instance.download(fetch, stream)
            stream.wait(instance.describe())
            values = instance.arrays(fetch, room, self._later(instance).run())
            return Pending(names, lambda: None, lambda: values)
        pending = instance.send(fetch, stream)
        self.shared.downloads.limit_pending(pending)
        return pending

    def _later(self, instance: Instance) -> Stages:
        if instance.stages is None:
            inner = partial(
                Executable,
                math=self.math,
                prefs=self.prefs,
                device_id=self.device_id,
                home=self.shared,
            )
            instance.stages = Stages(instance, inner)
        return instance.stages

    def adopt(self, value: object) -> np.ndarray | DeviceTensor:
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
        instance: Instance,
        feeds: Feeds,
        names: Sequence[str],
        places: DeviceTensors,
        inputs: DeviceTensors,
        stream: device.Stream,
    ) -> dict[str, Any]:
        """Run; the outputs named, at `places` or in memory of their own on the GPU.

        `inputs` are read in place. An array where the output is known without a run.
        """
        targets = dict(places)
        for name, target in places.items():
            check_place(name, target, instance.outputs[name])
        unplaced = {n: instance.outputs[n] for n in names if n not in places}
        memories = self._memories(output_groups(unplaced))
        for name, tensor in memories.items():
            large = not instance.runs_as_graph or tensor.nbytes >= DIRECT_BYTES
            if large and instance.tensor_of(name) is not None:
                targets[name] = tensor
        if stream is not self.stream and memories:  # which is the pool's
            self.stream.before(stream)
        placement = instance.placement(inputs, targets)
        instance.place(placement)
        instance.feed(feeds, stream)
        instance.launch(stream)
        later = {}
        if instance.staged:
            later = self._later(instance).run(on_device=True)
        results: dict[str, Any] = {}
        for name in names:
            value = instance.outputs[name]
            if not isinstance(value, Tensor):
                value = later[name] if value is None else value
                results[name] = self._placed(name, value, places.get(name))
                continue
            target = places[name] if name in places else memories[name]
            if name in placement.copied or name not in targets:
                instance.copy_out(name, target, stream)
            results[name] = target
        for result in results.values():
            if isinstance(result, DeviceTensor):
                result.ready = stream
        return results

    def _memories(self, groups: Sequence[OutputGroup]) -> dict[str, DeviceTensor]:
        """Allocate the outputs, those of a group in one block."""
        tensors: dict[str, DeviceTensor] = {}
        allocate, device_id = self.shared.pool.allocate, self.device_id
        for what, names, shape, dtype, step in groups:
            memory = allocate(step * len(names), what)
            at = memory.address
            for name in names:
                tensors[name] = DeviceTensor(at, shape, dtype, device_id, memory)
                at += step
        return tensors

    def _placed(self, name: str, value: Array | DeviceTensor, target: DeviceTensor | None) -> Any:
        """An output that lowering knew or a later stage made, at `target` if there is one."""
        if target is None:
            return value.copy() if isinstance(value, np.ndarray) else value
        check_place(name, target, value)
        if isinstance(value, DeviceTensor):
            self.stream.move(target.address, value.address, value.nbytes)
        elif value.nbytes:
            dense = np.ascontiguousarray(value)
            self.stream.upload(target.address, dense.ctypes.data, dense.nbytes)
        return target

    # ---- bound ----

    def io_binding(self) -> Binding:
        """A new binding, which `run_with_iobinding` takes."""
        return Binding([v.name or "" for v in self._ends(self.model).outputs], self.device_id)

    def run_with_iobinding(
        self,
        binding: Binding,
        checked: Callable[[Feeds], Feeds] | None = None,
        *,
        stream: object = None,
        synchronize: bool = True,
    ) -> None:
        """Run on what is bound; the results are the binding's. GPU memory is used in place.

        `checked` checks feeds that differ from those of the last run by more than their address.
        """
        home = self.stream
        target = home if stream is None else self.shared.order.stream(stream)
        ran = False
        if self._growing is not None and target is home:
            with self._lock:
                ran = self._growing.run(binding, partial(self._in_rooms, checked))
        prepared = self._ready(binding) if not ran else None
        if not ran and (prepared is None or not self._again(binding, prepared, target)):
            self._bound(binding, checked(binding.feeds) if checked else binding.feeds, target)
        if synchronize:
            target.wait("running what is bound")
        for result in binding.results.values():
            if isinstance(result, DeviceTensor):
                result.ready = None if synchronize else target
        binding.ran_in = None if synchronize else target

    @cached_property
    def _growing(self) -> Growing | None:
        """The caches of the model that grow, None where it has none."""
        deployed = isinstance(self.model, Deployed)
        return None if deployed else Growing.of(self.shared, self._ends(self.model))  # type: ignore[arg-type]

    def _in_rooms(self, checked: Callable[[Feeds], Feeds] | None, inner: Binding) -> None:
        """Run a binding of a program whose caches stand in rooms."""
        prepared = self._ready(inner)
        if prepared is None or not self._again(inner, prepared, self.stream):
            feeds = {n: v for n, v in inner.feeds.items() if n != LENGTHS}
            feeds = {**(checked(feeds) if checked else feeds), LENGTHS: inner.feeds[LENGTHS]}
            self._bound(inner, feeds, self.stream)

    def _again(self, binding: Binding, prepared: Prepared, stream: device.Stream) -> bool:
        """Run a binding of which nothing but addresses changed; False where that is no use."""
        instance = prepared.instance
        device.start(self.device_id)
        with self._lock:
            try:
                fresh: DeviceTensors = {}
                if prepared.resized and not self._resized(prepared):
                    return False
                if prepared.fresh:
                    binding.results = {}  # memory that nobody else has is taken again
                    fresh = self._memories(prepared.fresh)
                placement, copies = prepared.placed(fresh)
                if placement.copied:
                    return False
                self.shared.order.enter(stream)
                prepared.follow(stream)
                if fresh and stream is not self.stream:  # which is the pool's
                    self.stream.before(stream)
                instance.place(placement)
                if copies:
                    instance.feed(prepared.feeds, stream)
                instance.launch(stream)
                if prepared.fetch is None:
                    binding.late = None
                else:
                    binding.late = instance.send(prepared.fetch, stream)
                    self.shared.downloads.limit_pending(binding.late)
                self.shared.order.leave(stream)
            except DeviceError:
                self._forget_all()
                raise
        binding.results = {**prepared.results, **prepared.places, **fresh}
        return True

    def _resized(self, prepared: Prepared) -> bool:
        """Let the instance of a binding run the shape that its feeds have now.

        False where that is not all there is to do, as for another program or outputs of other
        sizes.
        """
        instance, made = prepared.instance, prepared.made
        once = self._shapes.once(made.source)
        if once is None or once.instance is not instance or self._deciding:
            return False
        planned = made.resized(prepared.resized)
        if planned is None:
            return False
        key = prepared.key(self._fed_names)
        if key in self._shapes:
            return False
        with collector.paused():
            outputs = made.ends.outputs
            if not self._takes_over(instance, planned):
                return False
            self._shapes.hand_over(once, key, Shape(planned))
            self._expect(planned, prepared.feeds)
            prepared.runs(planned)
        return planned.ends.outputs is outputs

    def _ready(self, binding: Binding) -> Prepared | None:
        """What the last run of this binding prepared; None where the next needs more."""
        prepared = binding.prepared
        if prepared is None or prepared.owner is not self or not prepared.instance.alive:
            return None
        if prepared.instance.made is not prepared.made:
            return None  # it has become another shape's
        return prepared if prepared.unchanged() else None

    def _bound(self, binding: Binding, feeds: Feeds, stream: device.Stream) -> None:
        if not binding.targets:
            raise UsageError("no output is bound: bind_output(name) says which are wanted")
        here = [n for n, place in binding.targets.items() if place == "cuda"]
        fetched = [n for n in binding.targets if n not in here]
        home = self.stream
        with self._lock, self._fresh_after_fault:
            adopted = self._adopted(feeds, stream)
            for value in binding.lent.values():
                adopt(value, stream.handle)  # what its library still does with it comes first
            inputs = {n: v for n, v in adopted.items() if isinstance(v, DeviceTensor)}
            instance = self.instance(adopted, inputs, binding.places)
            # host calls and later stages use the stream of this executable
            where = stream if instance.whole_on_gpu else home
            stream.before(where)
            self.shared.order.enter(where)
            values = self._kept(instance, adopted, here, binding.places, inputs, where)
            binding.late = self._sent(instance, fetched, where) if fetched else None
            self.shared.order.leave(where)
            where.before(stream)
            binding.results = {n: values.get(n) for n in binding.targets}
            # what values decide or lowering knew is found out each time
            complete = not instance.now.copied and instance.whole_on_gpu and not self._deciding
            if complete and all(isinstance(instance.outputs[n], Tensor) for n in here):
                fresh = {n: instance.outputs[n] for n in here if n not in binding.places}
                prepared = Prepared(
                    self,
                    instance,
                    adopted,
                    binding.places,
                    output_groups(fresh),
                    instance.fetching(fetched) if fetched else None,
                    dict.fromkeys(binding.targets),
                )
                objects = {
                    n: v for n, v in binding.feeds.items()
                    if n not in binding.addressed and not isinstance(v, np.ndarray)
                }  # fmt: skip
                binding.prepared = prepared if prepared.watch(objects, binding.lent) else None

    def run_in_place(self, names: Sequence[str], feeds: Feeds, *, on_device: bool) -> list[Any]:
        """Do what `run` does, but read GPU tensors in place."""
        stream = self.stream
        with self._lock, self._fresh_after_fault:
            adopted = self._adopted(feeds, stream)
            inputs = {n: v for n, v in adopted.items() if isinstance(v, DeviceTensor)}
            instance = self.instance(adopted, inputs)
            if on_device:
                results = self._kept(instance, adopted, names, {}, inputs, stream)
                return [results[name] for name in names]
            instance.place(instance.placement(inputs, {}))
            instance.feed(adopted, stream)
            instance.launch(stream)
            return self._sent(instance, names, stream).result()

    # ---- shapes ----

    def instance(
        self,
        feeds: Feeds,
        inputs: DeviceTensors | None = None,
        outputs: DeviceTensors | None = None,
    ) -> Instance:
        """The instance for the shapes and dtypes of `feeds`, made if need be.

        A new one begins with `inputs` and `outputs` in place.
        """
        with self._lock:
            return self._found(feeds, inputs or {}, outputs or {})

    def _found(self, feeds: Feeds, inputs: DeviceTensors, outputs: DeviceTensors) -> Instance:
        key = self._key(feeds)
        shape = self._shapes.find(key)
        if shape is None or shape.instance is None:
            with collector.paused():
                shape = self._made(shape, key, feeds, inputs, outputs)
        device.start(self.device_id)  # this thread may be another than the one that made it
        assert shape.instance is not None
        if shape.instance.runs:
            self._shapes.comes_again(shape)
        return shape.instance

    def _made(
        self,
        shape: Shape | None,
        key: tuple[Any, ...],
        feeds: Feeds,
        inputs: DeviceTensors,
        outputs: DeviceTensors,
    ) -> Shape:
        """The shape, which is new or has no instance, with one."""
        new, began = shape is None, time.perf_counter()
        if shape is None:
            if self.on_shape is not None:
                self.on_shape(feeds)
            shape = Shape(self._lowered(feeds))
            key = self._key(feeds)  # which may have become longer
            other = self._shapes.once(shape.made.source)
            if other is None or not self._takes_over(other.instance, shape.made):
                self._shapes.add(key, shape)
            else:
                self._shapes.hand_over(other, key, shape)
        device.start(self.device_id)
        if shape.instance is None:
            shape.instance = self._instance(shape.made, inputs, outputs)
            collector.keep()
            self._shapes.has_instance(shape)
        if new:
            self._expect(shape.made, feeds, time.perf_counter() - began)
        return shape

    def _takes_over(self, instance: Instance | None, made: PlannedProgram) -> bool:
        self.stream.catch_up()
        return instance is not None and instance.update(made)

    def _expect(self, made: PlannedProgram, feeds: Feeds, seconds: float = 0.0) -> None:
        """Have prepared what may come after a new shape, whose program took so long to make."""
        if made.source is None or not config.AHEAD.value or self._ahead is None:
            return
        # in the same classes others were expected already, of the first sizes of each
        classes = id(made.source), *[size_class(n) for n in made.guarded.values()]
        self._expected[classes] += 1
        if self._expected[classes] <= 2:
            shapes = {name: (value.shape, _name_of(value.dtype)) for name, value in feeds.items()}
            self._ahead.expect({**self._resident(), **shapes}, seconds)

    def _instance(
        self, made: PlannedProgram, inputs: DeviceTensors, outputs: DeviceTensors
    ) -> Instance:
        self.stream.catch_up()
        try:
            return Instance(self.shared, made, inputs, outputs)
        except device.DeviceMemoryError:
            if all(shape.instance is None for shape in self._shapes):
                raise
            self._give_up()
            return Instance(self.shared, made, inputs, outputs)

    def _forget_all(self) -> None:
        """Let go of what a call that failed may have left half done; weights and states stay."""
        with suppress(DeviceError):  # a lost GPU does nothing anymore
            self.stream.wait("after a fault")
        self._shapes.clear()
        self.shared.forget()

    def _key(self, feeds: Feeds) -> tuple[Any, ...]:
        """Shapes and dtypes, and the bytes of the feeds that decide about shapes."""
        key = tuple(kinds_of(feeds, self._fed_names).values())
        if not self._deciding:
            return key
        return key, tuple(self.host_value(feeds[name]).tobytes() for name in self._deciding)

    def _lowered(self, feeds: Feeds) -> PlannedProgram:
        shapes = {name: (value.shape, _name_of(value.dtype)) for name, value in feeds.items()}
        if not isinstance(self.model, Deployed):  # what is lowered runs
            self.specializer.on_chosen = weakly(self.shared.begin)
        while True:
            values = {name: self.host_value(feeds[name]) for name in self._deciding}
            try:
                return self._specialized(shapes, values)
            except NeedsValues as needs:
                self._deciding += [name for name in needs.names if name not in self._deciding]

    def host_value(self, value: object) -> np.ndarray:
        """A feed as an array on the host."""
        if not isinstance(value, DeviceTensor):
            array = np.asarray(value)
            # objects are addresses; of characters, equal bytes are equal strings
            return array.astype(str) if array.dtype.kind == "O" else array
        device.start(self.device_id)
        array = np.empty(value.shape, value.dtype)
        self.stream.download(array.ctypes.data, value.address, array.nbytes)
        self.stream.wait("reading a feed")
        return array

    def beside(self, packing: Packing, feeds: Feeds) -> dict[str, np.ndarray] | str:
        """What a packed graph is fed beside the model's own feeds, or why they cannot be packed."""
        mask = self.host_value(self.adopt(feeds[packing.mask]))
        return packing.feeds(mask, {name: value.shape for name, value in feeds.items()})

    def program(self, shapes: Shapes, values: Mapping[str, np.ndarray] | None = None) -> Program:
        """The Program for these input shapes (and values, of inputs that decide about shapes)."""
        return self._specialized(shapes, values).program

    def _specialized(
        self, shapes: Shapes, values: Mapping[str, np.ndarray] | None = None
    ) -> PlannedProgram:
        if isinstance(self.model, Deployed):
            resident = {n: s for n, s in self._resident().items() if n in self.input_names}
            return self.model.made({**shapes, **resident}, self.hw)
        planned = self.specializer.of({**self._resident(), **shapes}, values)
        if self.on_lowered is not None:
            self.keep(self.on_lowered(self.model))
            self.on_lowered = None
        # one of an open program has none, and may not have been made
        for fallback in planned.program.fallbacks if planned.source is None else ():
            if fallback not in self._warned:
                self._warned.add(fallback)
                warnings.warn(f"runs on onnxruntime, with copies: {fallback}", stacklevel=5)
        return planned

    def _resident(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of what stays on the device."""
        if not self.shared.has_residents:
            return {}  # asking would wait for the GPU
        tensors = self.weights.resident
        if len(tensors) != len(self._resident_shapes):  # they become more, and stay what they are
            self._resident_shapes = {name: (t.shape, t.dtype) for name, (t, _) in tensors.items()}
        return self._resident_shapes

    def instances(self) -> list[Instance]:
        """The instances that have memory, the least recently used first."""
        return [s.instance for s in self._shapes if s.instance is not None]

    def programs(self) -> list[Program]:
        """The programs of the shapes kept, the least recently used first, stages included."""
        result = []
        for shape in self._shapes:
            result.append(shape.program)
            if shape.instance is not None and shape.instance.stages is not None:
                for inner in shape.instance.stages.runners():
                    result += inner.programs()
        return result

    def release_memory(self) -> int:
        """Free what runs hold (weights and state stay); the bytes that were held."""
        with self._lock:
            self.stream.catch_up()
            self.stream.wait("release_memory")
            held = self.shared.arena.nbytes
            self._give_up()
            self._shapes.clear()
            return held

    def _give_up(self) -> None:
        """Give the memory of all shapes back to the driver."""
        self._shapes.retire()
        self.shared.arena.release()
        self.shared.pool.trim()


@cache
def _name_of(dtype: np.dtype) -> str:
    """The name of a dtype, kept because NumPy composes it at each call."""
    return str(dtype.name)


def _settled(result: object) -> Any:
    if isinstance(result, DeviceTensor):
        result.ready = None
    return result

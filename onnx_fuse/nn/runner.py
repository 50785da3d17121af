"""A graph made ready to run on the device of its arrays: onnxruntime, a GPU, or views of the host.

A runner takes the arrays of the graph's inputs in order and returns those of its outputs. On the
host an array is NumPy's; on a GPU it is a `runtime.tensor.DeviceTensor`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

from onnx_fuse.errors import UsageError
from onnx_fuse.ir.build import all_nodes
from onnx_fuse.ir.evaluate import viewer
from onnx_fuse.ir.traits import SAME_ORDER, SIZES, VIEWS
from onnx_fuse.rewrite.precision import widened
from onnx_fuse.runtime.tensor import DeviceTensor

if TYPE_CHECKING:
    from onnx_fuse.runtime.device import Memory
    from onnx_fuse.runtime.direct import DirectLayout
    from onnx_fuse.runtime.executable import Executable

KEPT = 256
"""Kinds of inputs for which a graph on a GPU keeps its launches."""
Array: TypeAlias = Any
"""A NumPy array, or a DeviceTensor."""
Run: TypeAlias = Callable[[Sequence[Array]], list[Array]]

_HOST_VIEWS = VIEWS | SIZES | {"Constant", "Expand", "Slice"}
"""Operators whose result is a view of their input, or a few integers, in host memory."""
_THREADED = frozenset(
    (
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "LSTM", "GRU", "RNN"),
        *("MatMulInteger", "QLinearMatMul", "QLinearConv", "MatMulNBits", "FusedMatMul"),
    )
)
"""Operators that are worth threads of their own; a session of any other runs in the caller's."""


def runner(
    model: ir.Model, gpu: int | None, name: str, state: Mapping[int, int] | None = None
) -> Run:
    """Make a runner for the graph on the host (`gpu` is None) or on GPU number `gpu`.

    `name` says in errors what the graph is. `state` has the outputs, by number, that on a GPU are
    written over an input, and that input's number: a run returns the input's own array. The runner
    raises UsageError for what onnxruntime refuses, and DeviceError where a kernel fails.
    """
    views = {n.op_type for n in model.graph if not n.domain} if _plain(model) else {""}
    if gpu is None:
        return _host_views(model, name) if views <= _HOST_VIEWS else _on_host(model, name)
    if len(model.graph) == 1 and views <= SAME_ORDER | SIZES:
        return _device_view(model, gpu, name)
    return _on_gpu(model, gpu, state or {})


def _plain(model: ir.Model) -> bool:
    return all(not node.domain for node in model.graph) and not model.graph.initializers


def _on_host(model: ir.Model, name: str) -> Run:
    import onnxruntime

    from onnx_fuse.runtime import ort

    options = ort.quiet_options()
    if any(node.op_type in _THREADED for node in all_nodes(model.graph)):
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    else:
        options.intra_op_num_threads = 1
    narrow = any(
        v.dtype == ir.DataType.FLOAT16 for v in (*model.graph.inputs, *model.graph.outputs)
    )
    try:
        session = ort.session(model, options)
    except Exception as error:
        if not ort.is_fault(error):
            raise
        if narrow:
            return _in_float32(model, name)
        raise UsageError(f"{name}: onnxruntime: {ort.plain(error)}") from error
    quiet = onnxruntime.RunOptions()
    quiet.log_severity_level = ort.FATAL
    inputs = [str(v.name) for v in model.graph.inputs]
    outputs = [str(v.name) for v in model.graph.outputs]
    call = session.run
    wide: Run | None = None  # once a kernel has turned out to be missing in float16

    def run(arrays: Sequence[Array]) -> list[Array]:
        nonlocal wide
        if wide is not None:
            return wide(arrays)
        try:
            results: list[Array] = call(outputs, dict(zip(inputs, arrays, strict=False)), quiet)
        except Exception as error:
            if not ort.is_fault(error):
                raise
            if narrow:
                wide = _in_float32(model, name)
                return wide(arrays)
            raise UsageError(f"{name}: {_operands(arrays)}: {ort.plain(error)}") from error
        return results

    return run


def _in_float32(model: ir.Model, name: str) -> Run:
    """The same for float16, of which onnxruntime's CPU lacks kernels, computed in float32."""
    half = [v.dtype == ir.DataType.FLOAT16 for v in model.graph.outputs]
    inner = _on_host(widened(model, (ir.DataType.FLOAT16,), ir.DataType.FLOAT), name)

    def run(arrays: Sequence[Array]) -> list[Array]:
        wide = inner([a.astype(np.float32) if a.dtype == np.float16 else a for a in arrays])
        with np.errstate(over="ignore"):
            return [
                y.astype(np.float16) if narrow else y for y, narrow in zip(wide, half, strict=True)
            ]

    return run


def _operands(arrays: Sequence[Array]) -> str:
    return ", ".join(f"{a.dtype.name}{list(a.shape)}" for a in arrays)


def _host_views(model: ir.Model, name: str) -> Run:
    """The same by NumPy, whose results share the memory of what they are views of."""
    slots: dict[ir.Value | None, int] = {None: 0}
    for value in model.graph.inputs:
        slots[value] = len(slots)
    fixed: list[Array] = []
    for node in (n for n in model.graph if n.op_type == "Constant"):
        value = node.outputs[0]
        assert value.const_value is not None
        slots[value] = len(slots)
        fixed.append(value.const_value.numpy())
    steps = []
    for node in (n for n in model.graph if n.op_type != "Constant"):
        steps.append((viewer(node), [slots[v] for v in node.inputs]))
        slots[node.outputs[0]] = len(slots)
    results = [slots[v] for v in model.graph.outputs]

    def run(arrays: Sequence[Array]) -> list[Array]:
        values = [None, *arrays, *fixed]
        try:
            for step, places in steps:
                values.append(step([values[i] for i in places]))
        except (ValueError, IndexError) as error:
            raise UsageError(f"{name}: {_operands(arrays)}: {error}") from error
        return [values[i] for i in results]

    return run


# ---- on a GPU ----------------------------------------------------------------------------------


@cache
def home(gpu: int) -> Any:
    """What owns the stream and the memory of all eager work on a GPU."""
    from onnx_fuse.runtime.executable import Executable

    empty = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)
    return Executable(empty, device_id=gpu)


def _on_gpu(model: ir.Model, gpu: int, state: Mapping[int, int]) -> Run:
    inputs, outputs = ([str(v.name) for v in x] for x in (model.graph.inputs, model.graph.outputs))
    return _Direct(model, gpu, inputs, outputs, state)


def kind(array: Array) -> Any:
    """What launches depend on, of an array."""
    return array.shape, array.dtype, type(array)


def turn_of(run: Run, arrays: Sequence[Array]) -> PooledProgram | None:
    """What launches arrays of these kinds for `run`, if anything does."""
    return run.turn(arrays) if isinstance(run, _Direct) else None


class _Direct:
    """A graph on a GPU, launched where its inputs are; through the executable where it cannot be:

    a step of the graph runs on the host, or draws random numbers. Then no output replaces an input.
    """

    def __init__(
        self,
        model: ir.Model,
        gpu: int,
        inputs: Sequence[str],
        outputs: Sequence[str],
        state: Mapping[int, int],
    ) -> None:
        from onnx_fuse.runtime.specialize import KEEPERS

        self._model, self._gpu = model, gpu
        self._inputs, self._outputs = inputs, outputs
        self._state = {outputs[i]: inputs[k] for i, k in state.items()}
        self._turns: dict[Any, PooledProgram | None] = {}
        KEEPERS.add(self)

    def forget(self) -> None:
        """Lower the graph anew for each kind of inputs that comes."""
        self._turns.clear()

    @cached_property
    def _launched(self) -> Executable:
        return self._executable(self._state)

    @cached_property
    def _bound(self) -> Executable:
        return self._executable({}) if self._state else self._launched

    def _executable(self, state: Mapping[str, str]) -> Executable:
        from onnx_fuse.runtime.executable import Executable

        shared = home(self._gpu).shared
        model = self._model.clone() if self._state else self._model
        new = Executable(model, state=state, device_id=self._gpu, home=shared)
        new.shared.pool = shared.pool  # what one operator's tensors leave, the next one's take
        return new

    def turn(self, arrays: Sequence[Array]) -> PooledProgram | None:
        key = tuple([kind(a) for a in arrays])
        turn = self._turns.get(key)
        if turn is None and key not in self._turns:
            if len(self._turns) >= KEPT:
                self._turns.clear()
            turn = self._turns[key] = self._made(arrays)
        return turn

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        turn = self.turn(arrays)
        if turn is not None:
            return turn.run(arrays)
        feeds = dict(zip(self._inputs, arrays, strict=False))
        return self._bound.run_in_place(self._outputs, feeds, on_device=True)

    def _made(self, arrays: Sequence[Array]) -> PooledProgram | None:
        from onnx_fuse.runtime.direct import layout

        if any(type(a) is np.ndarray and a.dtype.kind in "OSU" for a in arrays):
            return None
        executable = self._launched
        ends = zip(self._inputs, arrays, strict=False)
        shared = layout(executable, self._inputs, {n: (a.shape, a.dtype.name) for n, a in ends})
        return None if shared is None else PooledProgram(executable, shared)


class PooledProgram:
    """The launches for inputs of one kind, with memory of the pool."""

    def __init__(self, executable: Executable, layout: DirectLayout) -> None:
        from onnx_fuse.runtime.direct import BoundProgram as Launched

        self.stream, self._pool = executable.stream, executable.shared.pool
        self._gpu, self._arena = executable.device_id, layout.plan.arena
        self._turn = Launched(layout, self.stream)
        self._results, self._stays = layout.results, layout.stays
        self._own: Memory | None = None
        """The arena of a graph that replaces its inputs, as a repeated training step does."""

    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """The outputs."""
        arrays = self.ready(arrays)
        return self.launch(arrays, [a.address for a in arrays])

    def ready(self, arrays: Sequence[Array]) -> list[Array]:
        """The arrays in the GPU's memory, made before what the stream is given next."""
        stream = self.stream
        arrays = uploaded(arrays, self._gpu)
        if stream.behind is not None:
            stream.catch_up()
        for a in arrays:
            if a.ready is not None and a.ready is not stream:
                a.before(stream.handle)
        return arrays

    def launch(self, arrays: Sequence[Array], addresses: Sequence[int]) -> list[Array]:
        """Launch on inputs that are ready; states among `arrays` are updated in place."""
        allocate, results, ends = self._pool.allocate, [], [0, *addresses]
        for i, (shape, dtype) in enumerate(self._results):
            if i in self._stays:
                tensor = arrays[self._stays[i]]
            else:
                tensor = DeviceTensor(0, shape, dtype, self._gpu, None)
                tensor.own(allocate(tensor.nbytes, "a tensor"))
                tensor.ready = self.stream
            results.append(tensor)
            ends.append(tensor.address)
        if self._arena:
            arena = self._own or allocate(self._arena, "an arena")
            self._own = arena if self._stays else None
            ends[0] = arena.address
        self._turn.launch(ends)
        return results


def _device_view(model: ir.Model, gpu: int, name: str) -> Run:
    """The same memory in another shape, which NumPy works out on a stand-in without elements."""
    (node,) = model.graph
    moved = viewer(node)

    def run(arrays: Sequence[Array]) -> list[Array]:
        x, *others = arrays
        standin = np.empty(x.shape, np.int8)  # whose pages nobody touches
        try:
            view = moved([standin, *others])
        except ValueError as error:
            raise UsageError(f"{name}: {_operands(arrays)}: {error}") from error
        if node.op_type in SIZES:
            return [view]
        result = DeviceTensor(x.address, view.shape, x.dtype.name, gpu, x)
        result.ready = x.ready
        return [result]

    return run


SMALL = 64 << 10
"""Bytes that the driver takes from any memory of the host at once, without waiting for the GPU."""
TOGETHER = 256
"""Bytes up to which arrays of one run go to the GPU in one copy, as numbers do."""
LARGE = 16 << 20
"""Bytes from which on an upload is waited for, rather than pinned memory taken for a copy."""


def upload(array: np.ndarray[Any, Any], gpu: int) -> Array:
    """A copy of a host array in the memory of a GPU. It may be on its way; the array is read."""
    owner, dense = home(gpu), np.ascontiguousarray(array)
    stream = owner.stream
    memory = owner.shared.pool.allocate(dense.nbytes, "a tensor")
    if dense.nbytes > LARGE:
        stream.upload(memory.address, dense.ctypes.data, dense.nbytes)
        stream.wait("a copy to the GPU")
    elif dense.nbytes > SMALL:
        with _UPLOADS:
            room = owner.shared.uploads.acquire(dense.nbytes)
            pinned = room.pinned.array[: dense.nbytes]
            pinned[:] = dense.reshape(-1).view(np.uint8)
            stream.upload(memory.address, room.pinned.address, dense.nbytes)
            room.passed.record(stream)
    elif dense.nbytes:
        pageable = dense.copy()  # the caller's may be pinned, which the GPU would read later
        stream.upload(memory.address, pageable.ctypes.data, dense.nbytes)
    tensor = DeviceTensor(memory.address, array.shape, array.dtype, gpu, memory)
    tensor.ready = stream
    return tensor


def uploaded(arrays: Sequence[Array], gpu: int) -> list[Array]:
    """The arrays, those of the host in the memory of a GPU; small ones travel together."""
    tensors = list(arrays)
    hosts = [i for i, a in enumerate(tensors) if type(a) is np.ndarray]
    small = [i for i in hosts if tensors[i].nbytes <= TOGETHER]
    for i in hosts if len(small) < 2 else set(hosts).difference(small):
        tensors[i] = upload(tensors[i], gpu)
    if len(small) > 1:
        packed = bytearray(len(small) * TOGETHER)
        for k, i in enumerate(small):
            packed[k * TOGETHER : k * TOGETHER + tensors[i].nbytes] = tensors[i].tobytes()
        sent = upload(np.frombuffer(packed, np.uint8), gpu)
        for k, i in enumerate(small):
            at, array = sent.address + k * TOGETHER, tensors[i]
            tensors[i] = DeviceTensor(at, array.shape, array.dtype, gpu, sent)
            tensors[i].ready = sent.ready
    return tensors


_UPLOADS = threading.Lock()


def adopt(value: object) -> Array:
    """A tensor of another library in GPU memory, which is shared."""
    from onnx_fuse.runtime import tensor

    kind = getattr(value, "__dlpack_device__", lambda: (2, 0))()
    return tensor.adopt(value, home(int(kind[1])).stream.handle)

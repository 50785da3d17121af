"""What a Program leaves to others: calls that onnxruntime runs, and the stages behind the calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from onnx_fuse.program.call import Loop, Program, Stage, Tensor, dtype_of, run_loop
from onnx_fuse.program.problem import ITEMSIZE
from onnx_fuse.runtime import device
from onnx_fuse.runtime.resources import Resources
from onnx_fuse.runtime.schedule import Segment
from onnx_fuse.runtime.tensor import DeviceTensor

if TYPE_CHECKING:
    import onnx_ir as ir


class CompletedCalls(Protocol):
    """A Program whose calls ran (an `instance.Instance`): where the stages find their results."""

    owner: Resources

    @property
    def program(self) -> Program:
        """The program, with its stages."""

    def tensor(self, tensor: Tensor) -> DeviceTensor:
        """What the calls made of one of its tensors."""


class StageRunner(Protocol):
    """What runs a stage's model on the GPU (an `executable.Executable`)."""

    input_names: list[str]

    def run_in_place(
        self, names: Sequence[str], feeds: Mapping[str, Any], *, on_device: bool
    ) -> list[Any]:
        """The outputs named, as arrays or DeviceTensors; GPU tensors are read in place."""

    def programs(self) -> list[Program]:
        """The programs of the shapes that came."""


class HostCall:
    """A call that onnxruntime runs between kernels, with copies both ways."""

    def __init__(self, segment: Segment, address: Mapping[int, int]) -> None:
        """`address` is that of each buffer; it may change between two runs."""
        from onnx_fuse.runtime import ort

        self._address, self._call = address, segment.calls[0]
        with ort.faults(f"{self._call.nodes[0]}, which has no kernel"):
            self._session = ort.session(segment.host)

    def launch(self, stream: device.Stream) -> None:
        """Run it; waits for the stream before and after."""
        call = self._call
        feeds = {name: self._array(tensor, stream) for name, tensor in call.reads}
        stream.wait(f"before {call.kernel} ({call.nodes[0]})")
        results = self._session.run([name for name, _ in call.writes], feeds)
        for (_, tensor), result in zip(call.writes, results, strict=True):
            dense = np.ascontiguousarray(result)
            if dense.nbytes:
                stream.upload(self._address[tensor.buffer], dense.ctypes.data, dense.nbytes)
        stream.wait(f"after {call.kernel}")

    def _array(self, tensor: Tensor, stream: device.Stream) -> np.ndarray[Any, Any]:
        array = np.empty(tensor.shape, dtype_of(tensor.dtype))
        if array.nbytes:
            address = self._address[tensor.buffer] + tensor.offset * ITEMSIZE[tensor.dtype]
            stream.download(array.ctypes.data, address, array.nbytes)
        return array

    captured = True
    """No CUDA graph is to be made of it."""

    def move(self, buffers: Collection[int]) -> int:
        """Change nothing: addresses are looked up at each run. Returns 0, as no launch has any."""
        return 0

    def capture(self) -> None:
        """Do nothing: no CUDA graph holds a call on the host."""


class Stages:
    """The stages behind a Program's calls, whose results have decided about their shapes."""

    def __init__(self, calls: CompletedCalls, inner: Callable[[ir.Model], StageRunner]) -> None:
        """`inner` makes what runs a stage's model."""
        self._calls: CompletedCalls = weakref.proxy(calls)  # which has this
        self._make = inner
        self._hosts: dict[int, Any] = {}
        self._inner: dict[int, StageRunner] = {}

    def runners(self) -> list[StageRunner]:
        """The stages that run on the GPU, as far as a run has made them."""
        return list(self._inner.values())

    def run(self, *, on_device: bool = False) -> dict[str, Any]:
        """Their outputs by name, arrays or (of stages on the GPU, if `on_device`) DeviceTensors."""
        values: dict[str, Any] = {}
        calls = self._calls
        for k, stage in enumerate(calls.program.stages):
            feeds = {n: values[n] if t is None else calls.tensor(t) for n, t in stage.inputs}
            if stage.host:
                results = self._on_host(k, stage, feeds)
            elif stage.loop is not None:
                results = self._passes(k, stage.loop, feeds)
                if not on_device:
                    results = [np.asarray(value) for value in results]
            else:
                results = self._on_device(k, stage, feeds, on_device)
            values |= zip(stage.outputs, results, strict=True)
        return values

    def _on_host(self, k: int, stage: Stage, feeds: Mapping[str, Any]) -> list[Any]:
        if k not in self._hosts:
            from onnx_fuse.runtime import ort

            with ort.faults(f"what depends on {', '.join(n for n, _ in stage.inputs)}"):
                self._hosts[k] = ort.session(stage.model)
        self._calls.owner.stream.wait("before a stage on onnxruntime")
        arrays = {name: np.asarray(value) for name, value in feeds.items()}
        return self._hosts[k].run(list(stage.outputs), arrays)

    def _runner(self, k: int) -> StageRunner:
        if k not in self._inner:
            import onnx
            import onnx_ir as ir

            proto = onnx.ModelProto.FromString(self._calls.program.stages[k].model)
            self._inner[k] = self._make(ir.serde.deserialize_model(proto))
        return self._inner[k]

    def _on_device(
        self, k: int, stage: Stage, feeds: Mapping[str, Any], on_device: bool
    ) -> list[Any]:
        return self._runner(k).run_in_place(list(stage.outputs), feeds, on_device=on_device)

    def _passes(self, k: int, loop: Loop, feeds: Mapping[str, Any]) -> list[Any]:
        """A Loop's results, those of passes on the device: the host reads a condition a pass."""
        inner = self._runner(k)
        read = set(inner.input_names)
        self._calls.owner.stream.wait("before a Loop")

        def once(values: Mapping[str, Any]) -> list[Any]:
            feeds_of = {name: value for name, value in values.items() if name in read}
            return inner.run_in_place(loop.outputs, feeds_of, on_device=True)

        results = run_loop(loop, feeds, once, self._stacked)
        feed_ids = [id(value) for value in feeds.values()]  # memory that the next run writes
        return [self._joined([r], r.shape) if id(r) in feed_ids else r for r in results]

    def _stacked(self, rows: Sequence[Any]) -> Any:
        if all(isinstance(row, np.ndarray) for row in rows):
            return np.stack(rows)  # lowering knew them
        return self._joined(rows, (len(rows), *rows[0].shape))

    def _joined(self, rows: Sequence[Any], shape: Sequence[int]) -> DeviceTensor:
        owner, size = self._calls.owner, rows[0].nbytes
        memory = device.Memory(size * len(rows), "what a Loop gives")
        for i, row in enumerate(rows if size else ()):
            if isinstance(row, DeviceTensor):
                owner.stream.move(memory.address + i * size, row.address, size)
            else:
                dense = np.asarray(row, order="C")
                owner.stream.upload(memory.address + i * size, dense.ctypes.data, size)
        owner.stream.wait("the results of a Loop")
        return DeviceTensor(memory.address, shape, rows[0].dtype.name, owner.device_id, memory)

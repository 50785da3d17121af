"""A GPU made of host memory: the driver's calls that the runtime makes, and kernels run by NumPy.

`FakeGpu.use(monkeypatch)` puts it under `runtime.device` and `cuda.launch`. Work is done where it
is enqueued, so what comes too early in the code reads what is not there yet: memory begins as 0xA5.
A captured launch is kept with the arguments it had, and replayed; `update` gives it others.
"""

import ctypes
import itertools
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from onnx_fuse.cuda import arguments, nvrtc
from onnx_fuse.cuda import launch as launching
from onnx_fuse.program.call import Call, Program, dtype_of
from onnx_fuse.program.interpret.memory import HostMemory
from onnx_fuse.program.interpret.run import _answer
from onnx_fuse.program.launch import Launch, Ptr, Table, TensorMap
from onnx_fuse.program.open import SymbolicProgram
from onnx_fuse.program.problem import CHIPS, Hardware
from onnx_fuse.runtime import device, instance, specialize
from onnx_fuse.runtime.plan import aligned


class _Kinds:
    """Any enumeration of the driver's."""

    def __getattr__(self, name: str) -> int:
        return 1


class IdleDriver:
    """The module cuda.bindings.driver, whose calls do nothing; memory is addresses alone."""

    CUstream = CUfunction = cuuint64_t = cuuint32_t = staticmethod(int)
    CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC = 1
    CUgraphEdgeData = SimpleNamespace
    CUDA_MEMCPY2D = staticmethod(SimpleNamespace)
    CUmemPoolProps = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))

    def __init__(self) -> None:
        self._numbers = itertools.count(100)
        self._next = 1 << 32
        self._pinned: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """A call that always succeeds, with a new handle; or an enumeration."""
        if name.startswith("__"):
            raise AttributeError(name)
        return (lambda *_: (0, next(self._numbers))) if name.startswith("cu") else _Kinds()

    def cuCtxGetDevice(self) -> tuple[int, int]:
        return 0, 0

    def cuMemAlloc(self, nbytes: int) -> tuple[int, int]:
        self._next, address = self._next + -(-nbytes // 256) * 256, self._next
        return 0, address

    def cuMemAllocFromPoolAsync(self, nbytes: int, pool: int, stream: int) -> tuple[int, int]:
        return self.cuMemAlloc(nbytes)

    def cuMemAllocHost(self, nbytes: int) -> tuple[int, int]:
        self._pinned.append((ctypes.c_uint8 * nbytes)())
        return 0, ctypes.addressof(self._pinned[-1])

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        return 0, 1, 2, 3, [next(self._numbers)]

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[int, Any]:
        return 0, SimpleNamespace(kernelParams=0)

    def stand_ins(self) -> Iterator[tuple[Any, str, Any]]:
        """(what has it, name, what takes its place): this, and an H200, under the runtime."""
        yield device, "bindings", lambda: self
        for name in ("begin", "start", "probe"):
            yield device, name, lambda device_id=0: None
        yield Hardware, "detect", classmethod(lambda cls, device_id=0: CHIPS["H200"])
        yield launching, "_driver", lambda: self
        yield launching, "_kernel", lambda launch, arch: SimpleNamespace(function=id(launch))
        yield launching, "_settings", lambda *given: given[-1]
        yield nvrtc, "compile_all", lambda launches, arch, progress=True: None
        yield arguments, "_descriptor", lambda arg, address: address.to_bytes(128, "little")


class _Operands(HostMemory):
    """The memory that the operands of a call's launches reach.

    What no launch has, such as the gradient of what is frozen, is written where nobody reads.
    """

    def __init__(self, call: Call, addresses: Mapping[str, int]) -> None:
        self.parts = {}
        rows = () if call.expression is None else call.expression.rows
        further = {call.reads[row.load][0]: (row.size - 1) * row.step for row in rows}
        ends = [(name, t, dtype_of(t.dtype).itemsize) for name, t in (*call.reads, *call.writes)]
        at = {t.buffer: addresses[n] - t.offset * size for n, t, size in ends if n in addresses}
        for name, t, size in ends:
            last = sum((d - 1) * s for d, s in zip(t.shape, t.strides, strict=True))
            count = (t.offset + last + further.get(name, 0) + 1) * size if t.size else 0
            if count >= len(self.parts.get(t.buffer, ())):
                some = ctypes.c_uint8 * aligned(count)
                known = t.buffer in at or (name, t) in call.reads
                place = some.from_address(at[t.buffer]) if known and count else some()
                self.parts[t.buffer] = np.frombuffer(place, np.uint8)


class FakeGpu(IdleDriver):
    """One that does the work, as far as it is used; `counts` says how often what was."""

    # by the identity of a launch; of all GPUs, since eager operators outlive the test's
    _calls: ClassVar[dict[int, Call]] = {}
    _launches: ClassVar[dict[int, Launch]] = {}
    _expressions: ClassVar[dict[Any, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.order: list[tuple[Any, ...]] = []
        """Launches, copies, records and waits, each with its stream, in the order they came; "done"
        and "passed" are the host's own waits for a stream and an event."""
        self._memory: dict[int, Any] = {}
        self._begun: dict[tuple[str, ...], tuple[Call, dict[str, int]]] = {}
        """Of the nodes of a call its operands so far."""
        self._capture: list[list[Any]] | None = None
        self._capturing: int | None = None  # the stream

    def use(self, monkeypatch: pytest.MonkeyPatch) -> "FakeGpu":
        """Run what comes on this."""
        lowered, at = specialize.Specializer.of, SymbolicProgram.at
        renew = instance.Instance._renew

        def told(program: Program) -> None:
            for call in (*program.setup, *program.calls):
                for launch in call.launches:
                    module = launch.source, launch.defines, launch.entry
                    if call.expression is None:  # as a file has it
                        call = replace(call, expression=self._expressions.get(module))
                    elif len(call.launches) == 1:
                        self._expressions[module] = call.expression
                    self._calls[id(launch)], self._launches[id(launch)] = call, launch

        def of(specializer: specialize.Specializer, *given: Any) -> Any:
            found = lowered(specializer, *given)
            told(found.program)
            return found

        def evaluated(opened: SymbolicProgram, values: Mapping[str, int]) -> Any:
            found = at(opened, values)
            told(found)
            return found

        def renewed(made: instance.Instance) -> None:
            part = made.launcher.parts[0]
            launches = (x for call in made.program.calls for x in call.launches)
            for k, (step, launch) in enumerate(zip(part._steps, launches, strict=True)):
                step._kernel = id(launch)
                if part._graph is not None and k in part._nodes:
                    part._graph.raw[part._nodes[k]][0] = id(launch)
            renew(made)

        monkeypatch.setenv("ONNX_FUSE_AHEAD", "0")
        for holder, name, value in self.stand_ins():
            monkeypatch.setattr(holder, name, value)
        monkeypatch.setattr(specialize.Specializer, "of", of)
        monkeypatch.setattr(SymbolicProgram, "at", evaluated)
        monkeypatch.setattr(instance.Instance, "_renew", renewed)
        return self

    def __getattr__(self, name: str) -> Any:
        idle = super().__getattr__(name)
        if not name.startswith("cu"):
            return idle

        def call(*given: Any) -> tuple[Any, ...]:
            self.counts[name] += 1
            return idle()

        return call

    # ---- memory ----

    def _new(self, name: str, nbytes: int, *_: int) -> tuple[int, int]:
        self.counts[name] += 1
        raw = np.full(nbytes + 256, 0xA5, np.uint8)
        address = -(-raw.ctypes.data // 256) * 256
        self._memory[address] = raw
        return 0, address

    cuMemAlloc = partialmethod(_new, "cuMemAlloc")
    cuMemAllocHost = partialmethod(_new, "cuMemAllocHost")
    cuMemAllocFromPoolAsync = partialmethod(_new, "cuMemAllocFromPoolAsync")

    def _freed(self, address: int) -> tuple[int]:
        # stays readable, as something else: what uses it after its end is wrong, not a crash
        self._memory[address][...] = 0x5A
        return (0,)

    cuMemFree = cuMemFreeHost = _freed

    def cuMemFreeAsync(self, address: int, stream: int) -> tuple[int]:
        assert stream != self._capturing, "a graph would free it with each run"
        self.counts["cuMemFreeAsync"] += 1
        return self._freed(address)

    def _copy(self, name: str, target: int, source: int, nbytes: int, stream: int) -> tuple[int]:
        ctypes.memmove(target, source, nbytes)
        return self._noted(name, name, stream)

    cuMemcpyHtoDAsync = partialmethod(_copy, "cuMemcpyHtoDAsync")
    cuMemcpyDtoHAsync = partialmethod(_copy, "cuMemcpyDtoHAsync")
    cuMemcpyDtoDAsync = partialmethod(_copy, "cuMemcpyDtoDAsync")

    def cuMemcpy2DAsync(self, copy: Any, stream: int) -> tuple[int]:
        for row in range(copy.Height):
            to, at = copy.dstDevice + row * copy.dstPitch, copy.srcDevice + row * copy.srcPitch
            self._copy("cuMemcpy2DAsync", to, at, copy.WidthInBytes, stream)
        return (0,)

    def cuMemcpyDtoH(self, target: int, source: int, nbytes: int) -> tuple[int]:
        self.counts["cuMemcpyDtoH"] += 1
        ctypes.memmove(target, source, nbytes)
        return (0,)

    def cuMemsetD8Async(self, address: int, value: int, nbytes: int, stream: int) -> tuple[int]:
        ctypes.memset(address, value, nbytes)
        return (0,)

    # ---- streams and events ----

    def _noted(self, name: str, *what: Any) -> tuple[int]:
        self.counts[name] += 1
        self.order.append(what)
        return (0,)

    cuStreamSynchronize = partialmethod(_noted, "cuStreamSynchronize", "done")
    cuEventSynchronize = partialmethod(_noted, "cuEventSynchronize", "passed", 0)

    def cuEventQuery(self, event: int) -> tuple[int]:
        return (0,)

    def cuEventRecord(self, event: int, stream: int) -> tuple[int]:
        return self._noted("cuEventRecord", "record", stream, event)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[int]:
        return self._noted("cuStreamWaitEvent", "wait", stream, event)

    # ---- launches and graphs ----

    def _operands(self, kernel: int, place: int) -> dict[str, int]:
        """Name -> address, from the arguments as a kernel would read them."""
        launch, found = self._launches[kernel], {}
        slots = (ctypes.c_uint64 * len(launch.args)).from_address(place)
        for arg, slot in zip(launch.args, slots, strict=True):
            words = arg.words if isinstance(arg, Table) else (arg,)
            for i, word in enumerate(words):
                word = word.ptr if isinstance(word, TensorMap) else word
                if isinstance(word, Ptr):
                    value = ctypes.c_uint64.from_address(slot + 8 * i).value
                    if value:
                        found[word.name] = value - word.offset
        return found

    def cuLaunchKernelEx(self, stream: int, kernel: int, place: int, extra: int) -> tuple[int]:
        operands = self._operands(kernel, place)
        if stream == self._capturing:
            self._capture.append([kernel, operands])
            return (0,)
        self.counts["cuLaunchKernelEx"] += 1
        self.order.append(("launch", stream))
        self._run(kernel, operands)
        return (0,)

    def _run(self, kernel: int, operands: Mapping[str, int]) -> None:
        """Do a call at its last launch, as the first one knows it: later ones may be shared."""
        call, launch = self._calls[kernel], self._launches[kernel]
        place = [x is launch for x in call.launches].index(True)
        if place == 0:
            self._begun[call.nodes] = call, {}
        begun, addresses = self._begun[call.nodes]
        addresses.update(operands)
        if place < len(call.launches) - 1:
            return
        memory = _Operands(begun, addresses)
        results = _answer(begun, memory, None)
        for name, t in begun.writes:
            memory.store(t, results[name])

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> tuple[int]:
        self._capture, self._capturing = [], stream
        return (0,)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        return 0, 1, 2, 3, [len(self._capture) - 1]

    def cuStreamEndCapture(self, stream: int) -> tuple[int, Any]:
        self.counts["capture"] += 1
        found, self._capture, self._capturing = self._capture, None, None
        return 0, found

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, Any]:
        return 0, graph

    def cuGraphExecKernelNodeSetParams(
        self, graph: list[list[Any]], node: int, params: Any
    ) -> tuple[int]:
        self.counts["update"] += 1
        grid = params.gridDimX, params.gridDimY, params.gridDimZ
        launch = self._launches[graph[node][0]]
        assert (grid, params.sharedMemBytes) == (launch.grid, launch.smem)
        graph[node][1] = self._operands(graph[node][0], params.kernelParams)
        return (0,)

    def cuGraphLaunch(self, graph: Sequence[Sequence[Any]], stream: int) -> tuple[int]:
        self.counts["cuGraphLaunch"] += 1
        self.order.append(("launch", stream))
        for kernel, operands in graph:
            self._run(kernel, operands)
        return (0,)


class FaultyGpu(FakeGpu):
    """One whose n-th call fails, and which counts what it has given and not got back."""

    FREE: ClassVar[dict[str, str]] = {
        "cuMemFree": "cuMemAlloc",
        "cuMemFreeHost": "cuMemAllocHost",
        "cuMemFreeAsync": "cuMemAllocFromPoolAsync",
        "cuStreamDestroy": "cuStreamCreate",
        "cuEventDestroy": "cuEventCreate",
        "cuGraphDestroy": "cuStreamEndCapture",
        "cuGraphExecDestroy": "cuGraphInstantiate",
    }
    """What takes back, and what gave."""
    SURE = ("cuGetErrorName", "cuGetErrorString", "cuCtxPushCurrent", "cuCtxPopCurrent", *FREE)
    """Calls that do not fail: nobody could do anything about it."""
    SHORT = 2

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.called = 0
        self.fails_at = 0
        """The number of the call that fails; 0: none does."""
        self.failed, self.told = "", False
        """The call that failed, and whether somebody is there to be told."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        called = name.startswith("cu") and name[2].isupper()
        return partial(self._tried, name, found) if called else found

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        called = name.startswith("cu") and name[2].isupper()
        return partial(self._tried, name, found) if called else found

    def _tried(self, name: str, call: Any, *given: Any) -> tuple[Any, ...]:
        if name not in self.SURE:
            self.called += 1
            # memory that is short is short when it is asked for again
            short = "Alloc" in name or "Create" in name
            again = short and name == self.failed  # pools give back what they keep before that
            if self.fails_at and (self.called == self.fails_at or again):
                self.fails_at = 0 if again else self.fails_at
                self.failed, frame = name, sys._getframe()
                while frame is not None and frame.f_code.co_name not in ("__del__", "begin"):
                    frame = frame.f_back  # type: ignore[assignment]
                self.told = frame is None
                if name == "cuStreamEndCapture":
                    super().__getattribute__(name)(*given)  # what was captured is lost
                return (self.SHORT if short else 999, None)
        result: tuple[Any, ...] = call(*given)
        if name in self.FREE:
            self.live[self.FREE[name]] -= 1
        elif name in self.FREE.values():
            self.live[name] += 1
        return result

    def cuGetErrorName(self, code: int) -> tuple[int, bytes]:
        return 0, b"CUDA_ERROR_OUT_OF_MEMORY" if code == self.SHORT else b"CUDA_ERROR_UNKNOWN"

    def cuGetErrorString(self, code: int) -> tuple[int, bytes]:
        return 0, b"out of memory" if code == self.SHORT else b"unknown error"

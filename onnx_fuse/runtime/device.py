"""The driver calls the runtime makes: memory, copies, streams, graphs; faults as DeviceError."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import numpy as np

from onnx_fuse.cuda import nvrtc
from onnx_fuse.errors import INSTALL_CUDA, DeviceError
from onnx_fuse.program.problem import Hardware
from onnx_fuse.runtime import collector


def bindings() -> Any:
    """cuda.bindings.driver, or a DeviceError that says what to install."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceError(
            f"device 'cuda' needs the CUDA packages ({error}): {INSTALL_CUDA}"
        ) from error
    return driver


def check(result: Sequence[Any], what: str) -> Any:
    """The value of a driver call's result; a DeviceError that names `what` where it failed."""
    if result[0]:
        driver = bindings()
        name, text = driver.cuGetErrorName(result[0])[1], driver.cuGetErrorString(result[0])[1]
        detail = f"{_text(name)} ({_text(text)})"
        if "OUT_OF_MEMORY" in detail:
            raise DeviceMemoryError(f"{what}: {detail}")
        if any(fault in detail for fault in _FATAL):
            detail += (
                "; this process cannot use the GPU any more: start a new one, in which "
                "ONNX_FUSE_GRAPH=0 ONNX_FUSE_DEBUG=1 names the kernel that failed"
            )
        raise DeviceError(f"{what}: {detail}")
    return result[1] if len(result) > 1 else None


_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def allocated(what: str, call: Callable[..., Sequence[Any]], *given: object) -> Any:
    """The result of a driver call that allocates memory. Raises DeviceMemoryError.

    Where memory is short, Python's garbage collector runs first: memory that nobody uses any more
    may be kept by reference cycles in the caller's objects. What pools keep goes back, too.
    """
    result = call(*given)
    if int(result[0]) == _OUT_OF_MEMORY:
        gc.collect()
        for pool in list(_POOLS):
            pool.empty()
        result = call(*given)
    return check(result, what)


# faults of a kernel or of the GPU itself, which take the context along
_FATAL = (
    *("ILLEGAL_ADDRESS", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "ASSERT"),
    *("ILLEGAL_INSTRUCTION", "HARDWARE_STACK", "LAUNCH_FAILED", "LAUNCH_TIMEOUT"),
    *("ECC_UNCORRECTABLE", "DEVICE_UNAVAILABLE", "CONTEXT_IS_DESTROYED"),
)


_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class DeviceMemoryError(DeviceError):
    """The GPU has too little free memory."""


def _text(name: object) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


_thread = threading.local()


def begin(device_id: int = 0) -> None:
    """Create the GPU's primary context in another thread, which takes 0.2 s.

    `start` raises errors.
    """

    def retain() -> None:
        with contextlib.suppress(DeviceError):
            _context(device_id)

    threading.Thread(target=retain).start()  # no daemon: an exit must not cut off the driver


def probe(device_id: int = 0) -> None:
    """Raise DeviceError, which says what to do, where this GPU does not exist or cannot be used."""
    check_process()
    driver = bindings()
    try:
        result = driver.cuInit(0)
    except RuntimeError as error:  # the bindings find no libcuda
        detail = " ".join(str(error).split())[:200]
        raise DeviceError(
            f"no NVIDIA driver was found ({detail}): install it, or give the container the GPU "
            "(--gpus all); device 'cpu' needs none"
        ) from error
    check(result, "the NVIDIA driver does not start")
    count = check(driver.cuDeviceGetCount(), "counting GPUs")
    if device_id >= count:
        raise DeviceError(f"GPU {device_id} does not exist: this machine has {count}")


def faults() -> list[str]:
    """Everything that keeps "cuda" from running here, each with what mends it."""

    def fault(work: Callable[[], object]) -> str:
        try:
            work()
        except DeviceError as error:
            return str(error)
        return ""

    texts = dict.fromkeys(fault(work) for work in (bindings, nvrtc.check_compiler, start))
    if not any(texts):
        texts[fault(Hardware.detect)] = None
    return [text for text in texts if text]


_CONTEXTS: dict[int, Any] = {}
"""The primary contexts that this process has, by GPU, each taken once for all threads."""
_RETAINING = threading.Lock()
_started_in = 0  # in a fork of a process that has started a GPU, that process


def _forget() -> None:
    global _started_in, _RETAINING
    _RETAINING = threading.Lock()  # a thread that is not here may have held it
    if _CONTEXTS:
        _started_in = _started_in or os.getppid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def check_process() -> None:
    """Raise DeviceError in a fork of a process that has used CUDA: a call might never return."""
    if _started_in:
        raise DeviceError(
            f"the GPU was started in process {_started_in}; CUDA cannot be used after fork: start "
            "the worker with 'spawn'"
        )


def _context(device_id: int) -> Any:
    """The GPU's primary context, which the first call makes; other threads wait for it."""
    probe(device_id)
    with _RETAINING:
        if device_id not in _CONTEXTS:
            result = bindings().cuDevicePrimaryCtxRetain(device_id)
            _CONTEXTS[device_id] = check(result, f"a context on GPU {device_id}")
        return _CONTEXTS[device_id]


def start(device_id: int = 0) -> None:
    """Make the GPU's primary context current on this thread; what is missing is a DeviceError."""
    if _started_in:
        check_process()
    if getattr(_thread, "device", None) != device_id:
        check(bindings().cuCtxSetCurrent(_context(device_id)), f"the context of GPU {device_id}")
        _thread.device = device_id


LEGACY = 1
"""The handle of the legacy default stream."""


def wait_for_all() -> None:
    """Wait until all streams of the current GPU have finished."""
    check(bindings().cuCtxSynchronize(), "waiting for the GPU")


class Owned:
    """What the driver gives back in the context that it was made in, when the object goes.

    The thread that lets go of it may have another context, or none.
    """

    _made: tuple[Any, Any, Callable[..., Any], Any] | None = None

    def own(self, destroy: str, handle: object) -> None:
        """Have the driver's function of this name called with the handle at the end."""
        driver = bindings()
        result = driver.cuCtxGetCurrent()
        if result[0]:
            getattr(driver, destroy)(handle)
        context = check(result, "the present context")
        self._made = driver, context, getattr(driver, destroy), handle

    def give_up(self) -> None:
        """Give it back now, unless the process ends, which gives everything back, or is a fork."""
        handles, self._made = self._made, None
        if handles is None or sys.is_finalizing() or _started_in:
            return
        driver, context, destroy, handle = handles
        if not driver.cuCtxPushCurrent(context)[0]:
            try:
                destroy(handle)
            finally:
                driver.cuCtxPopCurrent()

    def __del__(self) -> None:
        self.give_up()


class Memory(Owned):
    """One device allocation; freed when the object goes."""

    def __init__(self, nbytes: int, what: str) -> None:
        self.nbytes = max(nbytes, 1)
        address = allocated(f"{what}: {nbytes:,} bytes", bindings().cuMemAlloc, self.nbytes)
        self.address = int(address)
        self.own("cuMemFree", self.address)


class Pinned(Owned):
    """Page-locked host memory as a uint8 array."""

    def __init__(self, nbytes: int) -> None:
        what = f"{nbytes:,} bytes of pinned memory"
        self.address = int(allocated(what, bindings().cuMemAllocHost, max(nbytes, 1)))
        self.own("cuMemFreeHost", self.address)
        raw = (ctypes.c_uint8 * max(nbytes, 1)).from_address(self.address)
        self.array: np.ndarray[Any, np.dtype[np.uint8]] = np.ctypeslib.as_array(raw)


@cache
def _spare(driver: object, device_id: int) -> list[Any]:
    """The driver's pools whose sessions are gone; the next session takes one of them.

    They are not destroyed: `cuMemPoolDestroy` with releases under way has ended a process in the
    driver (580.159).
    """
    return []


class Pool:
    """Memory that is taken and given back in the order of one stream, without waiting for it.

    What is given back goes to the next taker of its size without the driver, up to `keeps` bytes;
    more is handed to the driver, which keeps RELEASE bytes. All of it is when the pool is gone, and
    the driver's pool then serves another. A GPU without memory pools has plain allocations.
    """

    RELEASE = 1 << 30
    keeps = 256 << 20

    def __init__(self, stream: Stream, device_id: int) -> None:
        driver = self._driver = bindings()
        self._stream, self._device_id = stream, device_id
        self._context = check(driver.cuCtxGetCurrent(), "the present context")
        self._dead: deque[tuple[int, bool]] = deque()
        self._idle: dict[int, list[int]] = {}  # by the number of their bytes
        self._idle_bytes = 0
        _POOLS.add(self)
        self._ended = False
        pooled = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
        self._raw: Any = None
        if check(driver.cuDeviceGetAttribute(pooled, device_id), "memory pools"):
            with contextlib.suppress(IndexError):
                self._raw = _spare(driver, device_id).pop()
                return
            kinds = driver.CUmemPool_attribute
            props = driver.CUmemPoolProps()
            props.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            props.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            props.location.id = device_id
            self._raw = allocated("a memory pool", driver.cuMemPoolCreate, props)
            limit = driver.cuuint64_t(self.RELEASE)
            threshold = kinds.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
            check(driver.cuMemPoolSetAttribute(self._raw, threshold, limit), "a memory pool")

    def allocate(self, nbytes: int, what: str, *, again: bool = True) -> Memory:
        """`nbytes` for what is enqueued from now on. Raises DeviceMemoryError.

        `again`: its like is soon asked for again, so that it stays here when it is given back.
        """
        nbytes = max(nbytes, 1)
        if self._raw is None:
            return Memory(nbytes, what)
        if self._dead:
            self._stream.catch_up()
            self._sweep()
        if again:
            step = 1 << max(nbytes.bit_length() - 4, 0)  # for sizes that grow, few of them
            nbytes = -(-nbytes // step) * step
            with contextlib.suppress(KeyError, IndexError):
                address = self._idle[nbytes].pop()
                self._idle_bytes -= nbytes
                self._stream.catch_up()
                return Pooled(self, nbytes, address, again)
        args = nbytes, self._raw, self._stream.raw
        said = f"{what}: {nbytes:,} bytes"
        address = allocated(said, self._driver.cuMemAllocFromPoolAsync, *args)
        return Pooled(self, nbytes, int(address), again)

    def free(self, address: int, nbytes: int, *, lent: bool, again: bool) -> None:
        """Take back the memory of an object that is gone, from any thread and at any time.

        `lent`: other libraries have used it, in streams that are not known.
        """
        if sys.is_finalizing() or _started_in:  # the process gives everything back
            return
        if again and not lent and 2 * nbytes <= self.keeps and not self._ended:
            self._idle.setdefault(nbytes, []).append(address)
            self._idle_bytes += nbytes
            if self._idle_bytes <= self.keeps:
                return
            self._let_go(self._idle_bytes - self.keeps)
        else:
            self._dead.append((address, lent))
        # where a run elsewhere may use it, the next taker sweeps
        if self._stream.behind is None or self._ended:
            self._release()

    def _let_go(self, wanted: float) -> None:
        """Hand over so many bytes of what is kept; the sizes that came first go first."""
        for nbytes, addresses in list(self._idle.items()):
            with contextlib.suppress(IndexError):  # another thread was faster
                while addresses and wanted > 0:
                    self._dead.append((addresses.pop(), False))
                    self._idle_bytes -= nbytes
                    wanted -= nbytes

    def _release(self) -> None:
        with contextlib.suppress(DeviceError):  # a lost GPU takes nothing back
            self._stream.catch_up()
            self._sweep()

    def __del__(self) -> None:
        if getattr(self, "_raw", None) is None or sys.is_finalizing() or _started_in:
            return
        self._ended = True
        self._let_go(math.inf)
        self._release()
        self._driver.cuMemPoolTrimTo(self._raw, 0)
        _spare(self._driver, self._device_id).append(self._raw)

    def _sweep(self) -> None:
        """Enqueue the release of the memory of objects that are gone."""
        if self._dead and not self._driver.cuCtxPushCurrent(self._context)[0]:
            try:
                self._give_back()
            finally:
                self._driver.cuCtxPopCurrent()

    def _give_back(self) -> None:
        while self._dead:
            try:
                address, lent = self._dead.popleft()
            except IndexError:  # another thread was faster
                return
            if lent and self._driver.cuCtxSynchronize()[0]:  # not while another stream captures
                self._dead.append((address, lent))
                return
            self._driver.cuMemFreeAsync(address, self._stream.raw)

    def empty(self) -> None:
        """Do what `trim` does, in the pool's own context, for others that need the memory."""
        if not self._driver.cuCtxPushCurrent(self._context)[0]:
            try:
                with contextlib.suppress(DeviceError):  # a lost GPU gives nothing back
                    self.trim()
            finally:
                self._driver.cuCtxPopCurrent()

    def trim(self) -> None:
        """Wait for the stream, then give unused memory back to the driver."""
        if self._raw is not None:
            self._stream.catch_up()
            self._let_go(math.inf)
            self._sweep()
            self._stream.wait("giving memory back")
            check(self._driver.cuMemPoolTrimTo(self._raw, 0), "a memory pool")


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pooled(Memory):
    """Memory of a Pool, which goes back to it with the object."""

    lent = False
    """Whether another library has seen its address."""

    def __init__(self, pool: Pool, nbytes: int, address: int, again: bool) -> None:
        self._pool, self.nbytes, self.address, self._again = pool, nbytes, address, again

    def __del__(self) -> None:
        self._pool.free(self.address, self.nbytes, lent=self.lent, again=self._again)


class Event(Owned):
    """A point in a stream's order that the host, or another stream, can wait for."""

    def __init__(self, *, timed: bool = False) -> None:
        """One that is `timed` says how long it is `until` another."""
        driver = self._driver = bindings()
        flags = 0 if timed else int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self.raw = check(driver.cuEventCreate(flags), "an event")
        self.own("cuEventDestroy", self.raw)

    def until(self, other: Event) -> float:
        """The seconds from this point to another one that has passed as well; both are timed."""
        result = self._driver.cuEventElapsedTime(self.raw, other.raw)
        return float(check(result, "timing")) / 1e3

    def record(self, stream: Stream) -> None:
        """Move to the end of what the stream holds now."""
        check(self._driver.cuEventRecord(self.raw, stream.raw), "an event")

    def passed(self) -> bool:
        """Whether the stream has come this far (or it was never recorded)."""
        result = self._driver.cuEventQuery(self.raw)
        if int(result[0]) != _NOT_READY:
            check(result, "an event")
        return not result[0]

    def before(self, other: Stream) -> None:
        """Let work that `other` gets from now on begin after this point."""
        other.wait_event(self)

    def wait(self, what: str) -> None:
        """Wait until the stream has reached this point; raises DeviceError if a kernel failed."""
        check(self._driver.cuEventSynchronize(self.raw), what)


class Stream(Owned):
    """A CUDA stream, and the copies and graphs that go through it; `handle`: one of a caller's.

    A stream of its own does not wait for the legacy default stream, nor that for it, and is
    destroyed with the object.
    """

    def __init__(self, handle: int | None = None) -> None:
        driver = self._driver = bindings()
        if handle is None:
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            self.raw = allocated("a CUDA stream", driver.cuStreamCreate, int(flags))
            self.own("cuStreamDestroy", self.raw)
        else:
            self.raw = driver.CUstream(handle)
        self.handle = int(self.raw)
        self.behind: Event | None = None
        """What was enqueued in another stream, to be done before what this one is given next."""

    def __del__(self) -> None:
        if self._made is None or sys.is_finalizing() or _started_in:
            return
        # memory in one cycle of garbage with the stream may go after it, by the default stream
        with contextlib.suppress(DeviceError):  # a lost GPU has no order
            end = Event()
            end.record(self)
            self.behind = end
        self.give_up()  # which lets what is enqueued run to its end
        self.raw, self.handle = self._driver.CUstream(LEGACY), LEGACY

    def upload(self, address: int, source: int, nbytes: int) -> None:
        """Host to device, in stream order."""
        check(self._driver.cuMemcpyHtoDAsync(address, source, nbytes, self.raw), "copy to the GPU")

    def download(self, target: int, address: int, nbytes: int) -> None:
        """Device to host, in stream order."""
        done = self._driver.cuMemcpyDtoHAsync(target, address, nbytes, self.raw)
        check(done, "copy from the GPU")

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Device to device, in stream order."""
        check(self._driver.cuMemcpyDtoDAsync(target, source, nbytes, self.raw), "copy on the GPU")

    def move_rows(
        self, target: int, step: int, source: int, source_step: int, nbytes: int, rows: int
    ) -> None:
        """Rows of `nbytes`, which begin `step` and `source_step` bytes after each other, on the
        device, in stream order.
        """
        if not nbytes * rows:
            return
        copy = self._driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.srcPitch, copy.dstDevice, copy.dstPitch = (
            source, source_step, target, step,
        )  # fmt: skip
        copy.WidthInBytes, copy.Height = nbytes, rows
        check(self._driver.cuMemcpy2DAsync(copy, self.raw), "copy on the GPU")

    def fill(self, address: int, value: int, nbytes: int) -> None:
        """Set each of these bytes to `value`, in stream order."""
        if nbytes:
            check(self._driver.cuMemsetD8Async(address, value, nbytes, self.raw), "filling memory")

    def note(self, address: int, value: int) -> None:
        """Set four bytes of page-locked host memory to `value`, in stream order."""
        check(self._driver.cuMemsetD32Async(address, value, 1, self.raw), "filling memory")

    def wait(self, what: str) -> None:
        """Wait until everything enqueued has finished; raises DeviceError if a kernel failed."""
        check(self._driver.cuStreamSynchronize(self.raw), what)

    def wait_event(self, event: Event) -> None:
        """Let work enqueued from now on begin after `event`, wherever that was recorded."""
        check(self._driver.cuStreamWaitEvent(self.raw, event.raw, 0), "the order of two streams")

    def before(self, other: Stream) -> None:
        """Let work that `other` gets from now on begin after all that this stream holds now."""
        if other.handle != self.handle:
            event = Event()
            event.record(self)
            other.wait_event(event)

    def catch_up(self) -> None:
        """Let work enqueued from now on begin after what other streams were given."""
        if self.behind is not None:
            event = self.behind
            self.wait_event(event)
            if self.behind is event:  # another thread may have put a later one there
                self.behind = None

    def timed(self, enqueue: Callable[[], None], repeats: int = 20) -> float:
        """Seconds that one `enqueue` takes on the GPU, by events around `repeats` of them."""
        begin, end = Event(timed=True), Event(timed=True)
        enqueue()
        begin.record(self)
        for _ in range(repeats):
            enqueue()
        end.record(self)
        end.wait("timing")
        return begin.until(end) / repeats

    def capture(
        self,
        steps: Sequence[Callable[[], None]],
        after: Sequence[Sequence[int]] | None = None,
        early: Sequence[Collection[int]] = (),
        joined: Sequence[int] = (),
        asides: Sequence[tuple[Callable[[], None], Sequence[int]]] = (),
    ) -> Graph:
        """An executable graph of what the steps enqueue in this stream, in their order.

        It must be one that nobody else knows, since what another thread enqueues would join.
        With `after`, each step is one kernel or a library's call, and step i follows the steps
        `after[i]`, all earlier ones; its kernel itself waits for the end of those in `early[i]`,
        and may be launched before it. The graph ends in the steps `joined`, but for the last, as
        well: a library may have drawn streams of its own into the capture there. Of `asides`, each
        follows some steps, and nothing follows it.
        """
        driver, what = self._driver, "graph capture"
        nodes: list[list[Any]] = []
        whole, programmatic = driver.CUgraphEdgeData(), driver.CUgraphEdgeData()
        kinds = driver.CUgraphDependencyType
        programmatic.type = int(kinds.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
        programmatic.from_port = int(driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC)
        flags = driver.CUstreamUpdateCaptureDependencies_flags
        replaced = int(flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

        def follow(heads: list[Any], edges: list[Any]) -> None:
            """Let what is enqueued next come after these nodes."""
            pairs = heads, edges, len(heads)
            check(driver.cuStreamUpdateCaptureDependencies(self.raw, *pairs, replaced), what)

        # memory that is freed while this thread captures would spoil the graph
        with collector.paused():
            check(driver.cuStreamBeginCapture(self.raw, mode), what)
            try:
                for i, step in enumerate(steps):
                    if after is not None:
                        pairs = [(node, k) for k in after[i] for node in nodes[k]]
                        edges = [programmatic if k in early[i] else whole for _, k in pairs]
                        follow([node for node, _ in pairs], edges)
                    step()
                    info = driver.cuStreamGetCaptureInfo(self.raw)
                    check(info, what)
                    nodes.append(list(info[4] or ()))
                for work, earlier in asides:
                    before = [node for k in earlier for node in nodes[k]]
                    follow(before, [whole] * len(before))
                    work()
                if joined or asides:
                    ends = {int(n): n for i in (*joined, len(nodes) - 1) for n in nodes[i]}
                    follow(list(ends.values()), [whole] * len(ends))
            except BaseException:
                ended = driver.cuStreamEndCapture(self.raw)
                if not ended[0]:
                    driver.cuGraphDestroy(ended[1])
                raise
            graph = check(driver.cuStreamEndCapture(self.raw), what)
        return Graph(graph, [last[0] if last else None for last in nodes])

    def launch(self, graph: Graph, what: str) -> None:
        """Launch an executable graph in this stream."""
        check(self._driver.cuGraphLaunch(graph.raw, self.raw), what)


class Graph(Owned):
    """An executable CUDA graph, whose kernels can be given other arguments.

    `nodes` are the last node of each step that was captured. Destroyed when the object goes.
    """

    def __init__(self, graph: object, nodes: Sequence[Any]) -> None:
        driver = self._driver = bindings()
        self._captured, self._nodes = Owned(), nodes  # the nodes live as long as the graph
        self._captured.own("cuGraphDestroy", graph)
        self._params: dict[int, Any] = {}
        self.raw = check(driver.cuGraphInstantiate(graph, 0), "graph instantiation")
        self.own("cuGraphExecDestroy", self.raw)

    def update(self, i: int, arguments: int, grid: tuple[int, int, int], smem: int) -> None:
        """From now on, launch the kernel of step `i` so, with the arguments at this address."""
        if i not in self._params:
            result = self._driver.cuGraphKernelNodeGetParams(self._nodes[i])
            self._params[i] = check(result, "a graph's kernel")
        params = self._params[i]
        params.kernelParams = arguments
        params.gridDimX, params.gridDimY, params.gridDimZ = grid
        params.sharedMemBytes = smem
        done = self._driver.cuGraphExecKernelNodeSetParams(self.raw, self._nodes[i], params)
        check(done, "a graph's kernel")
